"""The kernels on a GPU: the checks of the interpreter, and what only a device can show."""

import copy

import pytest
import torch

import econv

if not torch.cuda.is_available():
    pytest.skip("no CUDA device found", allow_module_level=True)

import triton

from econv.engines import ENGINES, Problem, choice, door
from econv.engines.choice import Times
from econv.engines.problem import Geometry
from econv.engines.spectral.torch import apply
from econv.engines.spectral.triton import launches as triton_launches
from econv.gpu import passes
from econv.plan import spectral_plan
from econv.train.capture import captured
from triton_checks import *  # noqa: F403
from triton_checks import (
    PreActivated,
    convolve,
    err_little_more,
    error,
    exact,
    exact_step,
    results,
    step,
    tiles,
    weight_gradient,
)

BFLOAT16 = {"device": "cuda", "dtype": torch.bfloat16, "engine": "spectral"}
ROWS = [("p8", 40, 16), ("p8", 80, 8), ("p16", 20, 32), ("p8m", 20, 32), ("p32", 20, 16)]


def runs(layer, x):
    """Which of the kernels, of those for Hopper GPUs and the others, takes these images."""
    problem = Problem.of(layer.convolution, x, layer.weight)
    names = ("spectral/hopper", "spectral/triton")
    return next(name for name in names if ENGINES[name].why_not(problem) is None)


def row(group, fields, size, batch=4):
    layer = econv.GroupConv2d(fields, fields, group, **BFLOAT16)
    x = torch.randn(batch, layer.in_channels, size, size, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    return layer, x, torch.randn_like(x)


@pytest.mark.parametrize(("group", "fields", "size"), ROWS)
def test_layers_of_the_benchmark_err_little_more_than_the_dense_engine(group, fields, size):
    layer, x, probe = row(group, fields, size)
    wanted = exact(layer, x, probe)
    with econv.engine() as ran:
        ours = results(layer, x, probe, "spectral")
    assert ran == [runs(layer, x)]
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    for a, b, truth in zip(ours, results(layer, x, probe, "dense"), wanted, strict=True):
        assert error(a, truth) <= 1.5 * error(b, truth)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize(("group", "fields", "size"), ROWS)
def test_later_calls_find_no_kernels_anew_and_give_the_same(monkeypatch, group, fields, size, most):
    """With all images together, and in groups, which begin at other addresses."""
    layer, x, probe = row(group, fields, size, batch=9)
    sought, run = [], triton.JITFunction.run

    def counted(self, *arguments, **options):
        sought.append(self)
        return run(self, *arguments, **options)

    monkeypatch.setattr(triton.JITFunction, "run", counted)
    with tiles(bytes=most):
        wanted = results(layer, x, probe, "spectral")
        assert sought
        sought.clear()
        for _ in range(2):
            found = results(layer, x, probe, "spectral")
            assert all(map(torch.equal, found, wanted))
    assert not sought


HOPPER = pytest.mark.skipif(
    torch.cuda.get_device_capability() != (9, 0),
    reason="warp-specialised kernels need a Hopper GPU",
)


WITH_ROLES = [  # what compiles longest first
    ("p32", torch.bfloat16, {}),
    ("p8", torch.bfloat16, {}),
    ("p8", torch.float16, {"stride": 2}),
    ("p16", torch.bfloat16, {"dilation": 2}),
    ("p8m", torch.bfloat16, {}),
    ("p6", torch.bfloat16, {"padding": 0}),
    ("p4m", torch.bfloat16, {"operators": "order<=2", "size": 3}),
    ("p4", torch.float16, {}),
    ("p2", torch.bfloat16, {}),
    ("p1", torch.bfloat16, {}),
]


@HOPPER
@pytest.mark.parametrize(("group", "dtype", "options"), WITH_ROLES)
def test_warp_specialised_kernels_err_little_more_than_others(monkeypatch, group, dtype, options):
    """Fields that fill no program, pixels that fill no tile, and memory full of NaN."""
    layer = econv.GroupConv2d(11, 13, group, **{**BFLOAT16, "dtype": dtype}, **options)
    x = torch.randn(5, layer.in_channels, 19, 21, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    probe = torch.randn_like(layer(x))
    plan = spectral_plan(layer.basis, "regular", "regular")
    weights = torch.randn(13, 11, plan.weights, device="cuda")
    sizes = ((19, 21), layer.stride, layer.padding, layer.dilation)
    geometry = Geometry.of(plan.basis.size, *sizes)
    without = run_with({"warp_specialised": 0}, x, probe, weights, plan, geometry)
    exactly = in_float64(x, probe, weights, plan, geometry)
    monkeypatch.setattr(
        passes,
        "empty",
        lambda shape, dtype, device: torch.full(shape, torch.nan, dtype=dtype, device=device),
    )
    for chosen in ({}, {"splits": 3}, {"bytes": 1 << 20}, {"halves": 1}):
        found = run_with({"warp_specialised": 1, **chosen}, x, probe, weights, plan, geometry)
        # The first half of a layer waits in 16 bits.
        most = 1.75 if "halves" in chosen or group == "p32" else 1.25
        for a, b, truth in zip(found, without, exactly, strict=True):
            assert error(a, truth) <= most * error(b, truth)


def in_float64(x, probe, weights, plan, geometry):
    """What `run_with` gives, by torch's own operations."""
    x, weights = (tensor.double().requires_grad_() for tensor in (x, weights))
    out, _ = apply(x, weights, plan, geometry)
    return out, *torch.autograd.grad(out, [x, weights], probe.double())


def run_with(chosen, x, probe, weights, plan, geometry):
    """A layer, its adjoint and the gradient to its weights, cut as said."""
    back = geometry.transposed(plan.basis.size, x.shape[2:])
    with tiles(**chosen):
        return (
            convolve(x, weights, plan, geometry),
            convolve(probe, weights, plan, back, into=x),
            weight_gradient(x, probe, plan, geometry),
        )


@HOPPER
def test_kernels_are_warp_specialised_where_they_can_be(monkeypatch):
    """In float32 and for few targets the other kernels run."""
    made_with = []
    made = triton_launches.ConvolutionRun.__init__
    monkeypatch.setattr(
        triton_launches.ConvolutionRun,
        "__init__",
        lambda self, *args: (made(self, *args), made_with.append(self.tiling.warp_specialised))[0],
    )

    def ran(group, convert=lambda x: x):
        layer, x, _ = row(group, 8, 11)
        triton_launches.convolution_run.cache_clear()
        layer, x = layer.to(convert(x).dtype), convert(x)
        with econv.engine() as ran:
            layer(x)
        assert ran == ["spectral/hopper" if made_with[-1] else "spectral/triton"]
        return made_with[-1]

    assert ran("p8")
    assert ran("p8", torch.Tensor.half)
    assert not ran("p8", torch.Tensor.float)
    assert ran("p8", torch.Tensor.contiguous)
    assert ran("p32")
    assert not ran("p4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_batch_equals_its_images_one_by_one(dtype):
    """Many programs, many groups of images, and more pixels than a tile divides."""
    layer, x, probe = row("p8", 12, 19, batch=300)
    layer, x, probe = layer.to(dtype), x.to(dtype), probe.to(dtype)
    found = results(layer, x, probe, "spectral")
    parts = [
        results(layer, *(t[i : i + 100] for t in (x, probe)), "spectral")
        for i in range(0, 300, 100)
    ]
    assert torch.equal(found[0], torch.cat([part[0] for part in parts]))
    assert torch.equal(found[1], torch.cat([part[1] for part in parts]))
    total = sum(part[2].double() for part in parts)
    assert error(found[2], total) <= (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_training_step_is_captured_as_a_graph():
    layer, x, probe = row("p8", 8, 16)
    x.requires_grad_()

    found = []

    def step():
        found[:] = torch.autograd.grad(layer(x), [x, layer.weight], probe)

    step()
    wanted = list(found)
    replay = captured(step, [])
    for gradient in found:  # those that the graph writes
        gradient.zero_()
    replay()
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device():
    layer, x, probe = row("p8", 8, 16)
    x.requires_grad_()
    torch.autograd.grad(layer(x), [x, layer.weight], probe)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(layer(x), [x, layer.weight], probe)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


# torch warns of its own deprecated parts while the compiler is imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_inductor_runs_the_operator_and_gives_the_same():
    layer, x, probe = row("p8", 8, 16)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    x.requires_grad_()
    for module in (layer, compiled):
        module(x).backward(probe)
    assert error(compiled.weight.grad, layer.weight.grad) <= 1e-2


def test_a_training_step_takes_no_more_memory_than_the_dense_engine():
    peaks = {}
    for engine in ("dense", "spectral"):
        layer, x, probe = row("p8", 40, 16, batch=256)
        layer.engine = engine
        x.requires_grad_()
        for _ in range(2):
            x.grad = layer.weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer(x).backward(probe)
        peaks[engine] = torch.cuda.max_memory_allocated() - before
    assert peaks["spectral"] <= peaks["dense"], peaks


def pre_activated_row(group, fields, size, batch=4):
    layer, x, probe = row(group, fields, size, batch)
    norm = econv.GroupBatchNorm2d(fields, group, device="cuda")
    return PreActivated(norm, layer), 2 * x + 1, probe


@pytest.mark.parametrize(("group", "fields", "size"), ROWS)
def test_norm_and_relu_at_the_load_err_little_more_than_the_dense_engine(group, fields, size):
    pair, x, probe = pre_activated_row(group, fields, size)
    wanted = exact_step(pair, x, probe)
    found = step(pair, x, probe, "spectral", wanted=runs(pair.conv, x) + door.FUSED)
    err_little_more(found, step(pair, x, probe, "dense", False), wanted, 1.5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_training_step_with_norm_and_relu_at_the_load_is_captured_and_waits_for_nothing():
    pair, x, probe = pre_activated_row("p8", 8, 16)
    x.requires_grad_()
    inputs = [x, *pair.parameters()]
    found = []

    def run():
        found[:] = torch.autograd.grad(pair(x), inputs, probe)

    run()
    wanted = list(found)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    tracked = int(pair.norm.num_batches_tracked)
    replay = captured(run, [])
    for gradient in found:  # those that the graph writes
        gradient.zero_()
    before = int(pair.norm.num_batches_tracked)
    replay()
    assert int(pair.norm.num_batches_tracked) == before + 1 > tracked
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("group", "fields", "size"), ROWS[:3])
def test_norm_and_relu_at_the_load_save_a_map(group, fields, size):
    """Kept from the forward pass: one map less; at its most: no more than before."""
    kept, peaks = {}, {}
    for fuse in (False, True):
        pair, x, probe = pre_activated_row(group, fields, size, batch=128)
        pair.fuse = fuse
        x.requires_grad_()
        for _ in range(2):
            x.grad = None
            pair.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = pair(x)
            kept[fuse] = torch.cuda.memory_allocated() - before
            out.backward(probe)
            del out
        peaks[fuse] = torch.cuda.max_memory_allocated() - before
    image = x.numel() * x.element_size()
    assert kept[False] - kept[True] >= 0.99 * image
    assert peaks[True] <= peaks[False], peaks


def measured_as(monkeypatch, layer, x, dense, kernels):
    """Times of calls and of the device, in place of measured ones; the kernels that they are of."""
    monkeypatch.delenv("ECONV_MEASURE", raising=False)
    monkeypatch.setitem(choice._TINY, "cuda", 0)
    for known in ("_memory", "_decided", "_times"):
        monkeypatch.setattr(choice, known, {})
    name = runs(layer, x)
    found = {"dense": Times(*dense), name: Times(*kernels)}
    monkeypatch.setattr(choice, "_measure", lambda *given: found)
    return name


def test_auto_takes_the_kernels_where_they_were_faster(measuring, monkeypatch):
    layer, x, _ = row("p8", 8, 16)
    layer.engine = "auto"
    for times, fast in (((2.0, 1.0), True), ((1.0, 2.0), False)):
        dense, kernels = times
        name = measured_as(monkeypatch, layer, x, (dense, dense), (kernels, kernels))
        monkeypatch.setenv("ECONV_CACHE", str(measuring / str(fast)))
        with econv.engine() as ran:
            layer(x)
        assert ran == [name if fast else "dense"]


def test_engines_are_measured_on_a_gpu(measuring, monkeypatch):
    """Both times of each; random numbers of the device are left as they are."""
    monkeypatch.setitem(choice._TINY, "cuda", 0)
    layer, x, _ = row("p8", 8, 16)
    layer.engine = "auto"
    seen, measure = [], choice._measure
    monkeypatch.setattr(choice, "_measure", lambda *given: seen.append(measure(*given)) or seen[-1])
    before = torch.cuda.get_rng_state()
    for _ in range(2):
        layer(x)
    (times,) = seen
    assert times.keys() == {"dense", runs(layer, x)}
    for call, device, host in times.values():
        assert 0 < device <= 2 * call
        assert 0 < host < 1
    assert torch.equal(torch.cuda.get_rng_state(), before)
    (kept,) = measuring.iterdir()
    assert torch.cuda.get_device_name().split()[-1] in kept.name


def test_a_step_that_auto_chose_for_is_captured(measuring, monkeypatch):
    """Python's share makes the kernels too slow, but not in a graph."""
    layer, x, probe = row("p8", 8, 16)
    name = measured_as(monkeypatch, layer, x, (1.0, 2.0), (2.0, 1.0))
    layer.engine = "auto"
    found = torch.zeros_like(probe)

    def step():
        found.copy_(layer(x))

    with torch.no_grad():
        with econv.engine(name):
            step()  # what is launched was compiled before, as measuring would have done
        with econv.engine() as ran:
            step()
        assert ran == ["dense"]
        wanted = found.clone()
        with econv.engine() as ran:
            replay = captured(step, [found])
        assert ran == ["dense"] * 3 + [name]  # those that warm up are calls
        found.zero_()
        replay()
    assert error(found, wanted) <= 1e-2
