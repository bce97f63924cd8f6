"""Which engine runs: by layer, by block, by what was faster here; and what is remembered of it."""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import econv
from econv import GroupConv2d, engines
from econv.engines import Problem, choice
from econv.engines.choice import Times
from econv.engines.spectral import native, operator
from econv.engines.spectral.operator import EngineError
from econv.files import processor_name
from econv.stencils import Central, StencilSet
from fake_engines import Fake, installed

needs_kernel = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


def what_runs(layer, shape, dtype=torch.float32, **options):
    with econv.engine(**options) as ran, torch.no_grad():
        layer(torch.randn(shape, dtype=dtype))
    return ran


def called(layer, x=None):
    """What ran a layer on some input."""
    x = torch.randn(2, layer.in_channels, 8, 8) if x is None else x
    with econv.engine() as ran:
        layer(x)
    (found,) = ran
    return found


def forget(patch):
    """As another process would begin: with what is on disk."""
    patch.setattr(operator, "FAILED", {})
    for known in ("_memory", "_decided", "_times"):
        patch.setattr(choice, known, {})


def refuse(*given):
    raise AssertionError("measured")


# Names


def test_a_layers_own_choice_goes_first():
    layer = GroupConv2d(1, 1, "p4", engine="dense")
    assert what_runs(layer, (1, 4, 6, 6), name="spectral") == ["dense"]
    layer = GroupConv2d(1, 1, "p4", engine="spectral")
    (ran,) = what_runs(layer, (1, 4, 6, 6), name="dense")
    assert ran.startswith("spectral/")


def test_an_engine_is_asked_for_by_its_own_name():
    layer = GroupConv2d(1, 1, "p4")
    names = ["dense", "spectral/torch", *["spectral/native"] * (native.reason() is None)]
    for name in names:
        assert what_runs(layer, (1, 4, 6, 6), name=name) == [name]
        assert called(GroupConv2d(1, 1, "p4", engine=name)) == name


def test_an_engine_that_cannot_run_says_why():
    layer = GroupConv2d(1, 1, "p4", engine="spectral/triton")
    with pytest.raises(ValueError, match=r"'spectral/triton' cannot run p4, .*NVIDIA GPUs"):
        layer(torch.randn(1, 4, 6, 6))


def test_the_innermost_block_decides_and_ends():
    layer = GroupConv2d(1, 1, "p4")
    x = torch.randn(1, 4, 6, 6)
    with econv.engine("spectral") as outer:
        layer(x)
        with econv.engine("dense") as inner:
            layer(x)
        layer(x)
    layer(x)
    assert inner == ["dense"]
    assert [ran.split("/")[0] for ran in outer] == ["spectral", "dense", "spectral"]


def test_a_block_ends_with_an_error_too():
    layer = GroupConv2d(1, 1, "p4")
    with pytest.raises(KeyError), econv.engine("spectral", measure=False):
        raise KeyError
    assert what_runs(layer, (1, 4, 6, 6)) == ["dense"]
    assert choice._blocks == choice._lists == []


def test_blocks_of_threads_end_in_any_order():
    first, second = econv.engine("dense"), econv.engine("spectral")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert choice.resolve("auto") == "spectral"
    second.__exit__(None, None, None)
    assert choice.resolve("auto") == "auto"


def test_an_unknown_engine_is_an_error():
    with (
        pytest.raises(ValueError, match=r"unknown engine 'fast'.*'dense', 'spectral'"),
        econv.engine("fast"),
    ):
        pass
    with pytest.raises(ValueError, match="unknown engine 'fast'"):
        GroupConv2d(1, 1, "p4", engine="fast")


def test_a_network_tells_the_engine_of_every_convolution():
    network = nn.Sequential(
        econv.LiftConv2d(1, 2, "p4", engine="dense"),
        nn.ReLU(),
        GroupConv2d(2, 2, "p4", engine="spectral"),
    )
    with econv.engine() as ran, engines.noted() as noted:
        network(torch.randn(1, 1, 8, 8))
    assert [name.split("/")[0] for name in ran] == ["dense", "spectral"]
    assert noted == ran


# The rule


@needs_kernel
@pytest.mark.parametrize(
    ("layer", "shape", "engine"),
    [
        (GroupConv2d(16, 16, "p8"), (8, 128, 32, 32), "spectral/native"),
        (GroupConv2d(8, 8, "p16"), (1, 128, 16, 16), "spectral/native"),
        (GroupConv2d(8, 8, "p8", dtype=torch.float64), (4, 64, 16, 16), "spectral/native"),
        (GroupConv2d(2, 2, "p4"), (1, 8, 6, 6), "dense"),
        (GroupConv2d(8, 8, "p2"), (4, 16, 16, 16), "dense"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_by_rule_the_kernel_runs_all_but_the_smallest_layers(layer, shape, engine):
    assert what_runs(layer, shape, layer.weight.dtype) == [engine]


def test_auto_is_dense_without_the_kernel(monkeypatch):
    monkeypatch.setenv("ECONV_NATIVE", "0")
    assert what_runs(GroupConv2d(16, 12, "p8"), (8, 128, 16, 16)) == ["dense"]


def test_auto_is_dense_on_devices_without_kernels(measuring, monkeypatch):
    monkeypatch.setattr(choice, "_measure", refuse)
    layer = GroupConv2d(16, 16, "p8", device="meta")
    with econv.engine() as ran:
        layer(torch.empty(8, 128, 32, 32, device="meta"))
    assert ran == ["dense"]


def test_auto_is_dense_while_a_graph_is_exported():
    layer = GroupConv2d(16, 16, "p8")
    program = torch.export.export(layer, (torch.randn(8, 128, 16, 16),))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "aten.conv2d.default" in targets


@pytest.mark.parametrize(
    ("size", "batch", "device_only", "wins"),
    [(5, 1, True, True), (5, 1, False, False), (5, 256, False, True), (3, 256, True, False)],
)
def test_by_rule_a_gpu_runs_many_taps_(size, batch, device_only, wins):
    layer = GroupConv2d(16, 16, "p8", operators="order<=2", size=size, padding=size // 2)
    given = Problem(
        *(layer.convolution, 4 * batch, (32, 32), torch.bfloat16, torch.device("cuda")),
        *(True, True, True),
    )
    able = [engines.ENGINES["dense"], engines.ENGINES["spectral/triton"]]
    assert choice.rule(given, able, device_only) is able[wins]
    assert choice.rule(given._replace(context="watched"), able, device_only) is able[0]
    assert choice.rule(given, able[:1], device_only) is able[0]


# Measuring


@pytest.mark.parametrize("times", [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_engine_is_chosen(measuring, monkeypatch, times):
    made = installed(monkeypatch, *times)
    fast = min(made, key=lambda one: one.seconds)
    layer = GroupConv2d(2, 2, "p4")
    assert called(layer) == fast.name
    assert all(one.calls >= 2 for one in made)  # the first call of each does not count


def test_what_is_made_once_does_not_count(measuring, monkeypatch):
    _dense, fake = installed(monkeypatch, 1.0, 0.5)
    run = fake.run

    def slow_at_first(*given):
        fake.seconds = 0.5 if fake.calls else 100.0
        return run(*given)

    fake.run = slow_at_first
    assert called(GroupConv2d(2, 2, "p4")) == fake.name


def test_a_measured_choice_is_remembered(measuring, monkeypatch):
    dense, fake = installed(monkeypatch, 2.0, 1.0)
    first, again, other = GroupConv2d(2, 2, "p4"), GroupConv2d(2, 2, "p4"), GroupConv2d(2, 3, "p4")
    x = torch.randn(2, 8, 8, 8)
    called(first, x)
    before = (dense.calls, fake.calls)
    for layer in (first, again, first):
        assert called(layer, x) == fake.name
    assert (dense.calls, fake.calls) == (before[0], before[1] + 3)
    called(other, x)
    assert dense.calls > before[0]


@pytest.mark.parametrize("change", ["batch", "size", "layout", "dtype", "gradients"])
def test_another_problem_is_measured_anew(measuring, monkeypatch, change):
    dense, _ = installed(monkeypatch, 2.0, 1.0)
    layer = GroupConv2d(2, 2, "p4").requires_grad_(False)
    x = torch.randn(2, 8, 8, 8)
    called(layer, x)
    before = dense.calls
    called(layer, torch.randn_like(x))
    assert dense.calls == before
    others = {
        "batch": lambda: (layer, x[:1]),
        "size": lambda: (layer, x[..., :7]),
        "layout": lambda: (layer, x.to(memory_format=torch.channels_last)),
        "dtype": lambda: (layer.double(), x.double()),
        "gradients": lambda: (layer, x.clone().requires_grad_()),
    }
    called(*others[change]())
    assert dense.calls > before


def test_weights_of_another_dtype_are_measured_anew(measuring, monkeypatch):
    """As under autocast, which leaves them as they are."""
    dense, _ = installed(monkeypatch, 2.0, 1.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        called(layer, x)
    before = dense.calls
    called(layer.bfloat16(), x.bfloat16())
    assert dense.calls > before
    assert len(json.loads(the_file(measuring).read_text())) == 2


def test_rounding_to_tf32_is_another_problem(monkeypatch):
    layer = GroupConv2d(2, 2, "p4")
    given = Problem.of(layer.convolution, torch.randn(2, 8, 8, 8), layer.weight)
    on_gpu = given._replace(device=torch.device("cuda"))
    half = on_gpu._replace(dtype=torch.float16)
    texts = []
    for allowed in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        assert choice._tf32(on_gpu) == allowed
        assert not choice._tf32(given)
        assert not choice._tf32(half)
        texts.append([choice._text(p) for p in (on_gpu, given, half)])
    first, second = texts
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, True, True]


def test_small_problems_are_not_measured(measuring, monkeypatch):
    dense, fake = installed(monkeypatch, 2.0, 1.0)
    monkeypatch.undo()
    for one in (dense, fake):
        monkeypatch.setitem(choice.ENGINES, one.name, one)
    monkeypatch.setenv("ECONV_CACHE", str(measuring.parent))
    monkeypatch.delenv("ECONV_MEASURE")
    monkeypatch.setattr(choice, "_measure", refuse)
    layer = GroupConv2d(2, 2, "p4")
    most = choice._TINY["cpu"] // (8 * 8 * 25 * 64)  # images of 8×8
    called(layer, torch.randn(most, 8, 8, 8))
    with pytest.raises(AssertionError, match="measured"):
        called(layer, torch.randn(most + 1, 8, 8, 8))


@pytest.mark.parametrize("forbid", ["a variable", "a block", "determinism"])
def test_nothing_is_measured_where_it_may_not_be(measuring, monkeypatch, forbid):
    installed(monkeypatch, 2.0, 1.0)
    monkeypatch.setattr(choice, "_measure", refuse)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    with pytest.raises(AssertionError, match="measured"):  # the check can fail
        layer(x)
    if forbid == "a variable":
        monkeypatch.setenv("ECONV_MEASURE", "0")
        layer(x)
    elif forbid == "a block":
        with econv.engine("auto", measure=False):
            layer(x)
    else:
        torch.use_deterministic_algorithms(True)
        try:
            layer(x)
        finally:
            torch.use_deterministic_algorithms(False)
    assert not measuring.exists()
    monkeypatch.setenv("ECONV_MEASURE", "1")
    with pytest.raises(AssertionError, match="measured"):  # nor was the rule's choice remembered
        layer(x)


def test_what_was_measured_does_not_count_where_a_rule_decides(measuring, monkeypatch):
    installed(monkeypatch, 1.0, 2.0)
    layer = GroupConv2d(8, 8, "p4")
    x = torch.randn(2, 32, 8, 8)
    assert called(layer, x) == "dense"
    with econv.engine("auto", measure=False) as ran:
        layer(x)
    assert ran == ["spectral/native"]
    assert called(layer, x) == "dense"


@pytest.mark.parametrize("context", ["watched", "transformed"])
def test_nothing_is_measured_for_tracers_and_transformations(measuring, monkeypatch, context):
    installed(monkeypatch)
    monkeypatch.setattr(choice, "_measure", refuse)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    problem = Problem.of(layer.convolution, x, layer.weight, context)
    choice.choose(problem)


def test_measuring_leaves_random_numbers_as_they_are(measuring, monkeypatch):
    installed(monkeypatch)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8, requires_grad=True)
    np.random.seed(0)
    before = torch.get_rng_state()
    numpys = np.random.get_state()[1].copy()
    layer(x)
    assert measuring.exists()
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpys)


def test_measuring_leaves_no_gradients_and_no_trace_on_the_layer(measuring, monkeypatch):
    installed(monkeypatch)
    layer, x = GroupConv2d(2, 2, "p4", bias=True), torch.randn(2, 8, 8, 8, requires_grad=True)
    wanted = GroupConv2d(2, 2, "p4", bias=True, engine="dense")
    wanted.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), wanted(x))
    assert x.grad is None
    assert all(p.grad is None for p in layer.parameters())


@needs_kernel
@pytest.mark.parametrize("inside", ["inference", "no gradients", "autocast", "compile"])
def test_real_engines_are_measured_wherever_the_first_call_is(measuring, monkeypatch, inside):
    monkeypatch.setitem(choice._TINY, "cpu", 0)
    seen = []
    measure = choice._measure
    monkeypatch.setattr(choice, "_measure", lambda *given: seen.append(measure(*given)) or seen[-1])
    layer, x = GroupConv2d(2, 2, "p8", stride=2), torch.randn(2, 16, 9, 9)
    if inside == "inference":
        with torch.inference_mode():
            layer(x)
    elif inside == "no gradients":
        with torch.no_grad():
            layer(x)
    elif inside == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    else:
        torch._dynamo.reset()
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    (times,) = seen
    assert times.keys() == {"dense", "spectral/native"}
    assert all(min(three[:2]) > 0 and three[2] >= 0 and max(three) < 1 for three in times.values())
    layer(x.requires_grad_()).sum().backward()
    assert x.grad.isfinite().all()


@needs_kernel
def test_a_checkpointed_first_call_is_measured(measuring, monkeypatch, caplog):
    """What the passes that are timed save is no business of the checkpoint's."""
    monkeypatch.setitem(choice._TINY, "cpu", 0)
    layer, x = GroupConv2d(2, 2, "p8"), torch.randn(2, 16, 9, 9, requires_grad=True)
    layer.requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert measuring.exists()
    assert x.grad.isfinite().all()
    assert operator.FAILED == {}
    assert caplog.text == ""


def test_hooks_may_be_forbidden_around_the_first_call(measuring, monkeypatch):
    _, fake = installed(monkeypatch, 2.0, 1.0)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert called(GroupConv2d(2, 2, "p4")) == fake.name


def test_on_another_gpu_than_the_current_one_that_one_is_timed(measuring, monkeypatch):
    around, seen = [], []

    @contextlib.contextmanager
    def current(device):
        around.append(device)
        yield
        around.pop()

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    dense, fake = installed(monkeypatch)
    monkeypatch.setitem(choice._TINY, "cuda", 0)
    monkeypatch.setattr(choice, "candidates", lambda problem: [dense, fake])
    monkeypatch.setattr(choice, "_capturing", lambda device: False)
    monkeypatch.setattr(choice, "_pass", lambda *given: lambda: seen.append(list(around)))
    monkeypatch.setattr(choice, "_time", lambda run, device: run() or Times(1.0, 1.0))
    layer, second = GroupConv2d(2, 2, "p4"), torch.device("cuda", 1)
    problem = Problem.of(layer.convolution, torch.randn(2, 8, 8, 8), layer.weight)
    problem = problem._replace(device=second)
    choice._measure(problem)
    assert seen == [[second]] * 2
    times = {dense.name: Times(1.0, 4.0), fake.name: Times(2.0, 3.0)}
    monkeypatch.setattr(choice, "measured", lambda *given, **options: times)
    assert choice.choose(problem) is dense
    assert seen == [[second]] * 3  # what a CUDA graph would take has run once
    assert around == []
    monkeypatch.setattr(fake, "fuses", True)
    monkeypatch.setattr(choice, "_memory", {})
    monkeypatch.setattr(choice, "_pass", lambda *given: lambda: seen.append(given[2]))
    choice.choose(problem)
    assert sorted(seen[3:]) == [False, True]  # and with a prologue, if that is fused


def test_threads_measure_a_problem_once(measuring, monkeypatch):
    installed(monkeypatch, 2.0, 1.0)
    seen, measure = [], choice._measure
    entered = threading.Barrier(3)
    decide = choice._decide

    def together(*given):
        entered.wait(60)
        return decide(*given)

    monkeypatch.setattr(choice, "_measure", lambda *given: seen.append(1) or measure(*given))
    monkeypatch.setattr(choice, "_decide", together)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    threads = [threading.Thread(target=layer, args=(x,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1]


# Two times


def measured_as(monkeypatch, **times):
    """Times of calls and of the device, in place of measured ones."""
    found = {name.replace("_", "/"): Times(*three) for name, three in times.items()}
    monkeypatch.setattr(choice, "_measure", lambda *given: dict(found))


def test_in_graphs_the_devices_time_counts(measuring, monkeypatch):
    installed(monkeypatch)
    measured_as(monkeypatch, dense=(1.0, 4.0), spectral_native=(2.0, 3.0))
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    eager = Problem.of(layer.convolution, x, layer.weight)
    for problem, name in (
        (eager, "dense"),
        (eager._replace(context="traced"), "spectral/native"),
        (eager, "dense"),
    ):
        assert choice.choose(problem).name == name


@pytest.mark.parametrize(("host", "name"), [(2.2, "dense"), (1.8, "spectral/native")])
def test_in_traced_graphs_pythons_time_counts(measuring, monkeypatch, host, name):
    """But where the compiler makes CUDA graphs of them."""
    installed(monkeypatch)
    measured_as(monkeypatch, dense=(4.0, 4.0, 9.0), spectral_native=(3.9, 3.0, host))
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    eager = Problem.of(layer.convolution, x, layer.weight)
    traced = eager._replace(context="traced")
    assert choice.choose(eager).name == "spectral/native"
    assert choice.choose(traced).name == name
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert choice.choose(traced).name == "spectral/native"


def test_by_rule_a_captured_step_takes_what_its_first_runs_took(measuring, monkeypatch):
    """Another engine would have to be compiled, which a graph that is captured forbids."""
    monkeypatch.setenv("ECONV_MEASURE", "0")
    asked = []
    monkeypatch.setattr(choice, "rule", lambda given, able, graph: asked.append(graph) or able[0])
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    eager = Problem.of(layer.convolution, x, layer.weight)
    choice.choose(eager)
    monkeypatch.setattr(choice, "_capturing", lambda device: True)
    choice.choose(eager)
    choice.choose(eager._replace(context="traced"))
    assert asked == [False, False, True]


def test_while_a_graph_is_captured_nothing_is_measured(measuring, monkeypatch):
    installed(monkeypatch)
    capturing = [True]
    monkeypatch.setattr(choice, "_capturing", lambda device: capturing[0])
    monkeypatch.setattr(choice, "_measure", refuse)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    assert called(layer, x) == "spectral/native"  # by rule: nothing is known
    measured_as(monkeypatch, dense=(2.0, 3.0), spectral_native=(1.0, 4.0))
    capturing[0] = False
    assert called(layer, x) == "spectral/native"
    capturing[0] = True
    assert called(layer, x) == "dense"  # what was captured first has not settled it


# Failures


def broken(reason="no such luck"):
    return EngineError(f"spectral/native failed: {reason}")


@pytest.mark.parametrize("measure", [True, False])
def test_an_engine_that_fails_is_reported_once_and_another_runs(
    measuring, monkeypatch, caplog, measure
):
    _, fake = installed(monkeypatch, 2.0, 1.0, error=broken())
    layer, x = GroupConv2d(8, 8, "p4"), torch.randn(2, 32, 8, 8)
    other = GroupConv2d(8, 4, "p4")
    with econv.engine("auto", measure=measure) as ran:
        for _ in range(3):
            layer(x)
        assert fake.calls == 1
        layer(x[:1])
        assert fake.calls == 1  # not for another batch either
        other(x)
    assert ran == ["dense"] * 5
    assert fake.calls == 2
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert all("spectral/native failed on p4" in text for text in warnings)
    assert all("EngineError: spectral/native failed: no such luck" in text for text in warnings)


def test_an_engine_that_fails_raises_when_asked_by_name(measuring, monkeypatch):
    _, fake = installed(monkeypatch, 2.0, 1.0, error=broken())
    x = torch.randn(2, 8, 8, 8)
    for name in ("spectral/native", "spectral"):
        with pytest.raises(EngineError, match="no such luck"):
            GroupConv2d(2, 2, "p4", engine=name)(x)
        with econv.engine(name), pytest.raises(EngineError, match="no such luck"):
            GroupConv2d(2, 2, "p4")(x)
    assert fake.calls == 4


@needs_kernel
def test_a_kernel_that_fails_is_told_from_a_wrong_call(monkeypatch, caplog):
    def fail(*given):
        raise RuntimeError("the native kernel failed: 7")

    monkeypatch.setattr(choice, "_memory", {})
    monkeypatch.setattr(operator, "FAILED", {})
    monkeypatch.setattr(native.Native, "product", fail)
    layer, x = GroupConv2d(8, 8, "p4"), torch.randn(2, 32, 8, 8)
    wanted = what_dense_gives(layer, x)
    assert called(layer, x) == "dense"
    assert torch.equal(layer(x), wanted)
    assert "the native kernel failed: 7" in caplog.text
    with econv.engine("spectral"), pytest.raises(EngineError, match="failed: 7") as caught:
        layer(x)
    assert isinstance(caught.value.__cause__, RuntimeError)


def what_dense_gives(layer, x):
    with econv.engine("dense"):
        return layer(x)


def test_what_the_dense_engine_raises_says_nothing_of_it(measuring, monkeypatch, caplog):
    """It is what runs in place of others: a rule decides."""
    dense, fake = installed(monkeypatch, 2.0, 3.0)
    dense.error = RuntimeError("not now")
    layer, x = GroupConv2d(8, 8, "p4"), torch.randn(2, 32, 8, 8)
    assert called(layer, x) == called(layer, x) == fake.name
    assert dense.calls == 1
    assert operator.FAILED == {}
    assert engines.kept() == {}
    assert not measuring.exists()
    assert caplog.text == ""


def test_the_next_kernel_runs_in_place_of_one_that_fails(measuring, monkeypatch, caplog):
    dense, slow = installed(monkeypatch, 3.0, 2.0)
    first = Fake("spectral/triton", 1.0, dense.clock, error=broken())
    monkeypatch.setitem(choice.ENGINES, first.name, first)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    assert called(layer, x) == "dense"  # while it is found out
    assert first.calls == 1
    assert called(layer, x[:1]) == slow.name
    assert first.calls == 1
    assert caplog.text.count("failed on") == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError()])
def test_an_engine_without_memory_has_lost(measuring, monkeypatch, caplog, error):
    _, fake = installed(monkeypatch, 2.0, 1.0, error=error)
    layer, x = GroupConv2d(8, 8, "p4"), torch.randn(2, 32, 8, 8)
    assert called(layer, x) == called(layer, x) == "dense"
    assert fake.calls == 1
    assert not measuring.exists()  # another time there may be room
    assert "failed" not in caplog.text
    fake.error = None
    forget(monkeypatch)
    assert called(layer, x) == fake.name
    assert measuring.exists()


def test_an_error_of_memory_is_not_hidden(monkeypatch):
    monkeypatch.setattr(choice, "_memory", {})
    monkeypatch.setattr(operator, "FAILED", {})
    installed(monkeypatch, error=torch.OutOfMemoryError("full"))
    layer, x = GroupConv2d(8, 8, "p4"), torch.randn(2, 32, 8, 8)
    with pytest.raises(torch.OutOfMemoryError):
        layer(x)


# On disk


def the_file(folder):
    (found,) = folder.iterdir()
    return found


def test_a_file_tells_what_was_measured_on_which_device(measuring, monkeypatch):
    installed(monkeypatch, 1.0, 2.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    called(layer, x)
    found = the_file(measuring)
    assert torch.__version__.partition("+")[0] in found.name
    model = re.findall(r"[\w.]+", processor_name())
    assert model
    assert all(word in found.name for word in model)
    assert str(measuring.parent.name) not in found.name  # whatever folder it lies in
    ((text, times),) = json.loads(found.read_text()).items()
    assert times == {"dense": [1.0, 1.0, 0.0], "spectral/native": [2.0, 2.0, 0.0]}
    assert text.startswith(layer.convolution.name)
    assert f"{torch.get_num_threads()} threads" in text
    assert measuring.stat().st_mode & 0o077 == 0


def test_what_is_on_disk_is_not_measured_again(measuring, monkeypatch):
    installed(monkeypatch, 2.0, 1.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    called(layer, x)
    forget(monkeypatch)
    dense, fake = installed(monkeypatch, 1.0, 2.0)
    assert called(layer, x) == fake.name
    assert dense.calls == 0
    torch.set_num_threads(2)  # another problem
    try:
        assert called(layer, x) == fake.name  # remembered in the process
        forget(monkeypatch)
        assert called(layer, x) == dense.name
    finally:
        torch.set_num_threads(1)


def test_an_engine_that_is_new_is_measured(measuring, monkeypatch):
    dense, _fake = installed(monkeypatch, 2.0, 1.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    called(layer, x)
    forget(monkeypatch)
    faster = Fake("spectral/triton", 0.5, dense.clock)
    monkeypatch.setitem(choice.ENGINES, faster.name, faster)
    assert called(layer, x) == faster.name


DAMAGED = {
    "cut off": lambda good: good[:-9],
    "empty": lambda good: b"",
    "no text": lambda good: b"\xff\xfe\x00" + good,
    "a list": lambda good: b"[1, 2, 3]",
    "a number": lambda good: b"17",
    "nothing": lambda good: b"null",
    "numbers for times": lambda good: good.replace(b"[9.0, 9.0, 0.0]", b"3"),
    "one time": lambda good: good.replace(b"[9.0, 9.0, 0.0]", b"[9.0]"),
    "four times": lambda good: good.replace(b"[9.0, 9.0, 0.0]", b"[9.0, 9.0, 9.0, 9.0]"),
    "words for times": lambda good: good.replace(b"9.0", b'"soon"'),
    "no times": lambda good: good.replace(b"9.0", b"null"),
    "no numbers": lambda good: good.replace(b"9.0", b"NaN"),
    "endless": lambda good: good.replace(b"9.0", b"Infinity"),
    "negative": lambda good: good.replace(b"9.0", b"-9.0"),
    "zero": lambda good: good.replace(b"9.0", b"0"),
    "deep": lambda good: b"[" * 100_000,
    "another program's": lambda good: b'{"version": 3, "entries": [{"a": 1}]}',
    "another engine's": lambda good: good.replace(b"spectral/native", b"spectral/quantum"),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_as_good_as_none(measuring, monkeypatch, damage):
    dense, fake = installed(monkeypatch, 9.0, 1.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    called(layer, x)
    path = the_file(measuring)
    good = path.read_bytes()
    assert good.count(b"9.0") == 2
    path.write_bytes(damage(good))
    assert path.read_bytes() != good
    forget(monkeypatch)
    before = dense.calls
    assert called(layer, x) == fake.name
    assert dense.calls > before
    assert json.loads(path.read_text())[next(iter(json.loads(good)))] == {
        "dense": [9.0, 9.0, 0.0],
        "spectral/native": [1.0, 1.0, 0.0],
    }


def test_a_folder_in_the_place_of_the_file_does_no_harm(measuring, monkeypatch):
    _dense, fake = installed(monkeypatch, 2.0, 1.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    called(layer, x)
    path = the_file(measuring)
    path.unlink()
    path.mkdir()
    forget(monkeypatch)
    assert called(layer, x) == called(layer, x) == fake.name
    assert list(measuring.iterdir()) == [path]  # nothing half-made is left
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("how", ["a file in its place", "no permission"])
def test_a_folder_that_cannot_be_written_to_does_no_harm(measuring, monkeypatch, how):
    dense, fake = installed(monkeypatch, 2.0, 1.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    if how == "a file in its place":
        measuring.parent.write_text("")
    elif os.geteuid():
        measuring.parent.mkdir(mode=0o500)
    else:  # root may write everywhere
        monkeypatch.setattr(Path, "mkdir", refuse_writing)
    assert called(layer, x) == called(layer, x) == fake.name
    assert not measuring.is_dir()
    before = dense.calls
    forget(monkeypatch)
    assert called(layer, x) == fake.name
    assert dense.calls > before


def refuse_writing(*given, **options):
    raise PermissionError(13, "no permission")


def test_other_problems_in_the_file_are_kept(measuring, monkeypatch):
    installed(monkeypatch)
    layer = GroupConv2d(2, 2, "p4")
    for batch in (1, 2, 3):
        forget(monkeypatch)
        called(layer, torch.randn(batch, 8, 8, 8))
    assert len(json.loads(the_file(measuring).read_text())) == 3


SCRIPT = """
import sys
import pytest, torch
import econv
from econv.engines import choice
from fake_engines import installed

patch = pytest.MonkeyPatch()
dense, fake = installed(patch, {dense}, {native})
torch.set_num_threads(1)
"""


def start(code, folder, dense=1.0, native=2.0, **variables):
    text = SCRIPT.format(dense=dense, native=native) + textwrap.dedent(code)
    here = str(Path(__file__).parents[1])
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "ECONV_CACHE": str(folder), "PYTHONPATH": paths, **variables}
    environment.pop("ECONV_MEASURE", None)
    command = [sys.executable, "-c", text]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)


def told(process):
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return said.split()


ONE_CALL = """
with econv.engine() as ran:
    econv.GroupConv2d(2, 2, "p2")(torch.ones(2, 4, 8, 8))  # dense by rule
print(ran[0], dense.calls)
"""


def test_another_process_reads_what_was_measured(tmp_path):
    first = told(start(ONE_CALL, tmp_path, 2.0, 1.0))
    assert first[0] == "spectral/native"
    assert int(first[1]) >= 2
    # There the other engine would be faster, and the dense one is never tried.
    assert told(start(ONE_CALL, tmp_path, 1.0, 2.0)) == ["spectral/native", "0"]


def test_two_processes_that_measure_at_once_leave_a_whole_file(tmp_path):
    many = """
    econv.engines.choice._MOST_SIZES = 40
    layer = econv.GroupConv2d(1, 1, "p4")
    for batch in range({first}, {first} + 40):
        layer(torch.ones(batch, 4, 6, 6))
    """
    for process in [start(many.format(first=first), tmp_path) for first in (1, 101)]:
        told(process)
    found = json.loads(the_file(tmp_path / "choices").read_text())  # and nothing half-made
    sizes = {choice._pixels(text) // 36 for text in found}
    assert sizes >= set(range(1, 41)) or sizes >= set(range(101, 141))
    assert all(
        times == {"dense": [1, 1, 0], "spectral/native": [2, 2, 0]} for times in found.values()
    )


# Kept decisions


def test_kept_decisions_are_taken_again(measuring, monkeypatch):
    installed(monkeypatch, 2.0, 1.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    assert engines.kept() == {}
    called(layer, x)
    kept = engines.kept()
    assert list(kept.values()) == ["spectral/native"]
    kept = json.loads(json.dumps(kept))  # as a checkpoint may hold it
    forget(monkeypatch)
    the_file(measuring).unlink()
    dense, fake = installed(monkeypatch, 1.0, 2.0)
    engines.keep(kept)
    assert called(layer, x) == fake.name
    assert dense.calls == 0
    assert engines.kept() == kept
    assert called(layer, x[:1]) == dense.name  # which nobody had decided


def test_kept_decisions_replace_those_that_were_taken(measuring, monkeypatch):
    installed(monkeypatch, 1.0, 2.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    assert called(layer, x) == "dense"
    engines.keep(dict.fromkeys(engines.kept(), "spectral/native"))
    assert called(layer, x) == "spectral/native"


def test_kept_decisions_for_engines_that_cannot_run_are_taken_anew(measuring, monkeypatch):
    _, fake = installed(monkeypatch, 2.0, 1.0)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    called(layer, x)
    kept = engines.kept()
    forget(monkeypatch)
    engines.keep(dict.fromkeys(kept, "spectral/quantum"))
    assert engines.kept() == {}
    engines.keep(kept)
    fake.reason = "not today"
    assert called(layer, x) == "dense"


# What is told


def test_a_choice_is_logged_once(measuring, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="econv.engines")
    installed(monkeypatch, 0.002, 0.001)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    for _ in range(3):
        called(layer, x)
        called(GroupConv2d(2, 2, "p4"), x)
    (record,) = [r for r in caplog.records if r.name == "econv.engines"]
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "p4, 2 regular → 2 regular, 5×5, batch 2, 8×8, float32, with gradients: "
        "spectral/native (dense 2 ms, spectral/native 1 ms)"
    )
    called(layer, x[:1])
    assert len([r for r in caplog.records if r.name == "econv.engines"]) == 2


# Several processes

TRAINED = """
import os
import re
from pathlib import Path
from typing import ClassVar
rank = int(os.environ["RANK"])
torch.distributed.init_process_group(
    "gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=2
)
choice._WAIT = 60
with econv.engine() as ran:
    econv.GroupConv2d(2, 2, "p2")(torch.ones(2, 4, 8, 8))  # dense by rule
torch.distributed.barrier()
torch.distributed.destroy_process_group()
print(ran[0], dense.calls)
"""


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_processes_that_train_together_choose_alike(tmp_path, known):
    """Rank 1 has other speeds and another folder; rank 0 may have measured before."""
    if known:
        told(start(ONE_CALL, tmp_path / "0", 2.0, 1.0))
    running = [
        start(
            *(TRAINED, tmp_path / str(rank), *times),
            RANK=str(rank),
            MEETING=str(tmp_path / "meeting"),
            OMP_NUM_THREADS="1",
        )
        for rank, times in enumerate([(2.0, 1.0), (1.0, 2.0)])
    ]
    first, second = map(told, running)
    assert first[0] == "spectral/native"
    assert (first[1] == "0") == known
    assert second == ["spectral/native", "0"]  # it has not measured


def test_one_process_of_its_own_asks_nobody(measuring, monkeypatch):
    monkeypatch.setattr(choice, "_hear", refuse)
    installed(monkeypatch)
    called(GroupConv2d(2, 2, "p4"))


def test_a_first_process_that_is_silent_is_not_waited_for_without_end(
    measuring, monkeypatch, caplog
):
    installed(monkeypatch)
    monkeypatch.setattr(choice, "_WAIT", 0.1)
    ranked(monkeypatch, 1)
    assert called(GroupConv2d(8, 8, "p4")) == "spectral/native"  # by rule
    assert "the first process has not decided" in caplog.text
    assert called(GroupConv2d(8, 4, "p4")) == "spectral/native"  # without waiting
    assert caplog.text.count("the first process has not decided") == 1


def ranked(monkeypatch, rank, store=None):
    """As one of two processes that train together; where they leave word."""
    store = store or torch.distributed.HashStore()
    monkeypatch.setattr(choice, "_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    return store


@pytest.mark.parametrize("before", ["decided", "kept", "failed", "cannot be measured"])
def test_what_the_first_process_knew_before_it_tells_the_others(measuring, monkeypatch, before):
    """None of them waits; they measure nothing, and run what it runs."""
    dense, fake = installed(monkeypatch, 2.0, 1.0)
    layer, x = GroupConv2d(8, 8, "p4"), torch.randn(2, 32, 8, 8)
    if before == "failed":
        fake.error = broken()
    if before == "cannot be measured":
        monkeypatch.setattr(choice, "_measure", lambda *given: {})
    runs = called(layer, x)  # before there were others
    if before == "kept":
        kept = engines.kept()
        forget(monkeypatch)
        engines.keep(kept)
    store = ranked(monkeypatch, 0)
    assert called(layer, x) == runs
    fake.error = None
    forget(monkeypatch)
    monkeypatch.setenv("ECONV_CACHE", str(measuring / "another"))
    monkeypatch.setattr(choice, "_measure", refuse)
    monkeypatch.setattr(choice, "_WAIT", 0.1)
    ranked(monkeypatch, 1, store)
    assert called(layer, x) == runs == (dense.name if before == "failed" else fake.name)
    assert choice._silent == []


def test_the_others_know_what_the_first_process_runs_in_graphs(measuring, monkeypatch):
    installed(monkeypatch)
    measured_as(monkeypatch, dense=(1.0, 4.0), spectral_native=(2.0, 3.0))
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    store = ranked(monkeypatch, 0)
    assert called(layer, x) == "dense"
    forget(monkeypatch)
    monkeypatch.setattr(choice, "_measure", refuse)
    ranked(monkeypatch, 1, store)
    assert called(layer, x) == "dense"
    monkeypatch.setattr(choice, "_capturing", lambda device: True)
    assert called(layer, x) == "spectral/native"


def test_of_many_sizes_the_first_are_measured(measuring, monkeypatch):
    dense, fake = installed(monkeypatch, 0.002, 0.001)
    monkeypatch.setattr(choice, "_MOST_SIZES", 2)
    layer = GroupConv2d(2, 2, "p4")
    for size in (8, 9):
        layer(torch.randn(2, 8, size, size))
    before = dense.calls
    assert before
    with econv.engine() as ran:
        layer(torch.randn(2, 8, 10, 10))
    assert ran == [fake.name]
    assert dense.calls == before  # nobody timed it


def test_a_resumed_run_repeats_after_many_sizes(measuring, monkeypatch):
    """What ran as the largest size did is kept too, and that there were many."""
    installed(monkeypatch, 2.0, 1.0)
    monkeypatch.setattr(choice, "_MOST_SIZES", 2)
    layer = GroupConv2d(2, 2, "p4")
    for size in (8, 9, 7):
        assert called(layer, torch.randn(2, 8, size, size)) == "spectral/native"
    kept = engines.kept()
    assert len(kept) == 3
    forget(monkeypatch)
    engines.keep(kept)
    monkeypatch.setattr(choice, "_measure", refuse)
    for size in (9, 7, 8, 10, 6):
        assert called(layer, torch.randn(2, 8, size, size)) == "spectral/native"


def test_the_memory_of_calls_is_bounded(measuring, monkeypatch):
    installed(monkeypatch)
    monkeypatch.setattr(choice, "_MOST_MEMORIES", 3)
    layer = GroupConv2d(2, 2, "p4")
    for batch in range(1, 9):
        called(layer, torch.randn(batch, 8, 8, 8))
        assert len(choice._memory) <= 3
        assert len(engines.kept()) <= 3
    (found,) = measuring.iterdir()
    before = json.loads(found.read_text())
    assert len(before) == 3
    forget(monkeypatch)
    called(layer, torch.randn(9, 8, 8, 8))  # what was measured first makes way
    after = json.loads(found.read_text())
    assert [*after][:2] == [*before][1:]
    assert len(after) == 3


def test_a_device_that_nobody_knows_runs_by_rule(measuring, monkeypatch):
    dense, fake = installed(monkeypatch)
    monkeypatch.setattr(choice, "_measure", refuse)
    layer = GroupConv2d(2, 2, "p4")
    problem = Problem.of(layer.convolution, torch.randn(2, 8, 8, 8), layer.weight)
    found = choice.choose(problem._replace(device=torch.device("xpu")))
    assert found in (dense, fake)


def test_a_new_engine_is_chosen_by_what_it_says_not_by_its_name(measuring, monkeypatch):
    dense, native = installed(monkeypatch, 3.0, 2.0)
    native.reason = "not today"
    new = Fake("fast", 1.0, dense.clock)
    monkeypatch.setitem(choice.ENGINES, new.name, new)
    assert called(GroupConv2d(2, 2, "p4")) == new.name


@dataclass(frozen=True)
class Lopsided(StencilSet):
    """Central differences with a part that is neither even nor odd, of an order that is free."""

    accuracy: int = 2
    name: ClassVar[str] = "lopsided"

    def smallest_size(self, operators):
        return 5

    def weights(self, exponents, size):
        fourth, third = np.array([1.0, -4, 6, -4, 1]), np.array([-1.0, 3, -3, 1, 0])
        return Central().weights(exponents, size) + 0.01 * np.outer(fourth, third)


@pytest.mark.parametrize("measured", [True, False])
def test_lopsided_stencils_run_densely_where_nobody_chose(measured, request):
    if measured:
        request.getfixturevalue("measuring")
    layers = {
        name: econv.GroupConv2d(1, 2, "p4", stencils=Lopsided(), engine=name, dtype=torch.float64)
        for name in ("auto", "dense", "spectral")
    }
    layers["dense"].load_state_dict(layers["auto"].state_dict())
    found = {}
    for name in ("auto", "dense"):
        x = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0)).double()
        x.requires_grad_(True)
        with econv.engine() as ran:
            out = layers[name](x)
        out.square().sum().backward()
        assert ran == ["dense"]
        found[name] = out, x.grad, layers[name].weight.grad
    for ours, wanted in zip(found["auto"], found["dense"], strict=True):
        assert torch.equal(ours, wanted)
    with pytest.raises(ValueError, match="expected stencils that are even or odd"):
        layers["spectral"](torch.randn(2, 4, 9, 9).double())
