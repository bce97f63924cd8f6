"""One door for all engines: results in eager mode, in graphs, in transformations and in copies."""

import copy
import pickle

import pytest
import torch
from torch import nn

import econv
from econv import GroupConv2d, LiftConv2d, VectorConv2d, engines
from econv.engines import Problem, Prologue, choice
from econv.engines.dense import Dense
from econv.engines.spectral import operator
from fake_engines import installed
from test_compile import compilations
from test_engines import FORWARD, distance, layers_with, run_reference
from test_spectral import ON_A_CPU

# torch warns of its own deprecated parts while the compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
ENGINES = ["auto", *ON_A_CPU]
COMPILED = ("plain", "stride", "circular", "everything")
MARKED = [one if hasattr(one, "marks") else pytest.param(one) for one in ON_A_CPU]
SOME = ["auto", *(one._replace(marks=(*one.marks, pytest.mark.slow)) for one in MARKED)]
"""One engine in the fast tests, every one in all of them."""
DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def everything(run, layer, x, probe):
    """Output and all gradients."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = run(x)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], probe)]


def assert_close(found, wanted, tolerance=1e-10):
    for ours, theirs in zip(found, wanted, strict=True):
        largest = float(theirs.detach().abs().max())
        assert distance(ours, theirs) <= tolerance * max(1.0, largest)
        assert largest > 1e-3


def cases(options):
    for layer in layers_with("p4", options):
        x = torch.randn(2, layer.in_channels, 12, 11, dtype=DOUBLE)
        yield layer, x, torch.randn_like(layer(x))


@pytest.mark.parametrize("options", FORWARD.values(), ids=FORWARD.keys())
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_equals_the_reference(engine, options):
    for layer, x, probe in cases({**options, "engine": engine}):
        wanted = everything(lambda x, layer=layer: run_reference(layer, x), layer, x, probe)
        assert_close(everything(layer, layer, x, probe), wanted)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("engine", SOME)
def test_every_engine_equals_the_reference_inside_a_graph(engine, name):
    for layer, x, probe in cases({**FORWARD[name], "engine": engine}):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        found = everything(compiled, layer, x, probe)
        assert_close(found, everything(layer, layer, x, probe), 1e-12)
        wanted = everything(lambda x, layer=layer: run_reference(layer, x), layer, x, probe)
        assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("engine", ENGINES)
def test_inductor_gives_what_every_engine_gives(engine, layout):
    network = nn.Sequential(
        LiftConv2d(3, 2, "p4", engine=engine, bias=True),
        nn.ReLU(),
        GroupConv2d(2, 3, "p4", engine=engine, stride=2, bias=True),
        nn.Tanh(),
        VectorConv2d(3, 1, "p4", engine=engine),
    ).double()
    x = torch.randn(2, 3, 12, 11, dtype=DOUBLE).to(memory_format=layout)
    probe = torch.randn_like(network(x))
    compiled = torch.compile(network, fullgraph=True)
    found, wanted = (everything(run, network, x, probe) for run in (compiled, network))
    assert_close(found, wanted)
    assert found[0].stride() == wanted[0].stride()
    with torch.no_grad():
        assert distance(compiled(x), network(x)) <= 1e-10


def changed(patch, what):
    """An engine that is a little wrong."""
    run = Dense.run
    if what == "output":
        patch.setattr(Dense, "run", lambda self, *given: run(self, *given) * (1 + 1e-8))
    else:
        patch.setattr(
            Dense,
            "run",
            lambda self, problem, x, *given: run(self, problem, x + 1e-8 * x.detach(), *given),
        )


@pytest.mark.parametrize("what", ["output", "gradient"])
def test_the_comparison_with_the_reference_can_fail(monkeypatch, what):
    changed(monkeypatch, what)
    with pytest.raises(AssertionError):
        test_every_engine_equals_the_reference("dense", {})


# Graphs


def graphs_of(run, x):
    """The text of the graphs that a compiler is given, forwards and backwards."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def keep(graph, inputs):
        seen.append(graph.code)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    out = torch.compile(run, fullgraph=True, backend=backend)(x)
    if out.requires_grad:
        out.sum().backward()
    return seen


@pytest.mark.parametrize("engine", ON_A_CPU)
def test_a_graph_holds_the_engine_and_nothing_of_ours_around_it(engine):
    layer = GroupConv2d(2, 2, "p4", engine=engine)
    forward, backward = graphs_of(layer, torch.randn(2, 8, 8, 8, requires_grad=True))
    assert "econv.convolution" not in forward + backward
    if engine == "dense":
        assert "econv" not in forward + backward
        assert "aten.convolution.default" in forward
        assert "aten.convolution_backward.default" in backward
    else:
        assert f"'{engine}'" in forward
        assert "econv.spectral.default" in forward
        assert "econv.spectral_backward.default" in backward
        assert "aten.convolution" not in forward + backward


def test_a_graph_is_chosen_for_by_the_devices_time(measuring, monkeypatch):
    dense, fake = installed(monkeypatch, 2.0, 1.0)
    layer = GroupConv2d(2, 2, "p4")
    torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(2, 8, 8, 8))
    assert dense.calls > 1  # measured while the graph was traced
    ((key, name),) = engines.kept().items()
    assert key.startswith("traced: ")
    assert name == fake.name


def test_a_graph_that_only_infers_has_no_backward():
    layer = GroupConv2d(2, 2, "p4", engine="spectral").requires_grad_(False)
    (forward,) = graphs_of(layer, torch.randn(2, 8, 8, 8))
    assert "econv.spectral.default" in forward


@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_batch_is_not_compiled_again(engine):
    layer = GroupConv2d(2, 2, "p4", engine=engine, bias=True)
    x = torch.randn(2, 8, 9, 9)
    assert compilations(layer, x, batches=(4, 4, 4)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"stride": 2, "groups": 2}, marks=pytest.mark.slow),
        pytest.param({"padding_mode": "circular"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("engine", SOME)
def test_other_sizes_are_compiled_no_more_often_than_with_the_dense_engine(engine, options):
    counts = []
    for name in ("dense", engine):
        torch._dynamo.reset()
        layer = GroupConv2d(2, 2, "p4", engine=name, bias=True, **options)

        def equal(inputs, found, layer=layer):
            torch.testing.assert_close(found[0], layer(inputs), rtol=1e-5, atol=1e-5)

        counts.append(compilations(layer, torch.randn(2, 8, 9, 9), check=equal))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for size in ((9, 9), (11, 13), (16, 12)):
            x = torch.randn(2, 8, *size, requires_grad=True)
            found, wanted = compiled(x), layer(x)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                torch.autograd.grad(found.sin().sum(), [x, layer.weight]),
                torch.autograd.grad(wanted.sin().sum(), [x, layer.weight]),
                rtol=1e-4,
                atol=1e-4,
            )
    assert counts[1] <= counts[0]


def test_a_layer_that_computes_otherwise_is_compiled_again():
    layer = GroupConv2d(2, 2, "p4", engine="spectral")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, 9, 9)
    for stride in (1, 2, 1):
        layer.stride = stride
        assert distance(compiled(x), layer(x)) <= 1e-6


@pytest.mark.parametrize("engine", ON_A_CPU[1:])
def test_the_operators_pass_the_checks_of_torch(engine):
    layer = GroupConv2d(2, 3, "p4", stride=2, dtype=DOUBLE)
    convolution = layer.convolution
    (part,) = convolution.parts
    plan, geometry = convolution.plan(part), convolution.geometry((6, 7))
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 8, 6, 7, dtype=DOUBLE).to(memory_format=layout)
        weight = layer.weight.detach().flatten(2)
        rest = (engine, plan.name, geometry.numbers, True)
        out, known = torch.ops.econv.spectral(x, weight, None, *rest)
        g = torch.randn_like(out)
        for wanted in ((True, True), (True, False), (False, True)):
            inputs = (g, x, weight, None, known, *rest, *wanted)
            torch.library.opcheck(torch.ops.econv.spectral_backward.default, inputs)
        inputs = (x.requires_grad_(), weight.requires_grad_(), None, *rest)
        torch.library.opcheck(torch.ops.econv.spectral.default, inputs)


# Transformations


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.jvp itself
@pytest.mark.parametrize("engine", SOME)
def test_transformations_give_what_autograd_gives(engine):
    layer = GroupConv2d(1, 2, "p3", operators="order<=1", dtype=DOUBLE, engine=engine)
    x = torch.randn(2, 3, 5, 4, dtype=DOUBLE, requires_grad=True)
    weight = layer.weight.detach().clone().requires_grad_()

    def run(x, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).pow(2)

    assert torch.autograd.gradcheck(run, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight))
    many = torch.randn(3, 2, 3, 5, 4, dtype=DOUBLE)
    mapped = torch.func.vmap(run, (0, None))(many, weight)
    assert distance(mapped, torch.stack([run(one, weight) for one in many])) <= 1e-12
    tangents = (torch.randn_like(x), torch.randn_like(weight))
    _, forward = torch.func.jvp(run, (x, weight), tangents)
    probe = torch.randn_like(forward)
    backward = torch.autograd.grad(run(x, weight), (x, weight), probe)
    both = sum(float((g * t).sum()) for g, t in zip(backward, tangents, strict=True))
    assert float((forward * probe).detach().sum()) == pytest.approx(both, rel=1e-10)
    jacobian = torch.func.jacrev(lambda w: run(x, w).sum((0, 1)))(weight)
    assert distance(jacobian, torch.func.jacfwd(lambda w: run(x, w).sum((0, 1)))(weight)) <= 1e-10


@pytest.mark.parametrize("engine", ["auto", "dense", "spectral", "spectral/torch"])
def test_who_watches_sees_operations_of_torch(engine):
    from torch.utils.flop_counter import FlopCounterMode

    layer, x = GroupConv2d(4, 4, "p4"), torch.randn(2, 16, 12, 12)
    wanted = {"auto": "dense", "spectral": "spectral/torch"}.get(engine, engine)
    with FlopCounterMode(display=False) as counter, econv.engine(engine) as ran:
        layer(x)
    assert ran == [wanted]
    assert counter.get_total_flops() > 0


def test_a_kernel_that_is_asked_for_by_name_refuses_to_be_watched():
    from torch.utils.flop_counter import FlopCounterMode

    layer, x = GroupConv2d(4, 4, "p4", engine="spectral/native"), torch.randn(2, 16, 12, 12)
    with (
        FlopCounterMode(display=False),
        pytest.raises(ValueError, match="must see operations of torch"),
    ):
        layer(x)


# Exports


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exported_layer_is_made_of_operations_of_torch(engine):
    layer = GroupConv2d(2, 2, "p4", engine=engine, bias=True, dtype=DOUBLE)
    x = torch.randn(2, 8, 9, 9, dtype=DOUBLE)
    program = torch.export.export(layer, (x,))
    text = str(program.graph)
    assert "econv" not in text
    assert distance(program.module()(x), layer(x)) <= 1e-12


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("engine", ["auto", "dense", "spectral", "spectral/torch"])
def test_a_layer_traced_by_jit_computes_the_same(engine):
    layer = GroupConv2d(2, 2, "p4", engine=engine, dtype=DOUBLE).requires_grad_(False)
    x, other = torch.randn(2, 1, 8, 7, 7, dtype=DOUBLE)
    traced = torch.jit.trace(layer, x, check_trace=False)
    assert distance(traced(other), layer(other)) <= 1e-12


# Copies


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("compiled", [False, True])
def test_copies_of_a_layer_that_has_run_keep_working(engine, compiled):
    for layer in layers_with("p4", {"engine": engine, "bias": True}):
        x = torch.randn(2, layer.in_channels, 9, 9, dtype=DOUBLE)
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        wanted = run(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other.convolution is layer.convolution
            assert distance(other(x), wanted) <= 1e-12
            other(x).sum().backward()
            assert layer.weight.grad is None
            with torch.no_grad():
                other.weight.mul_(2)
                if other.bias is not None:
                    other.bias.mul_(2)
            assert distance(other(x), 2 * wanted) <= 1e-12


def test_the_state_holds_nothing_of_the_engines():
    layers = [GroupConv2d(2, 2, "p4", bias=True, engine=name) for name in ("auto", "spectral")]
    for layer in layers:
        layer(torch.randn(2, 8, 9, 9))
        assert list(layer.state_dict()) == ["weight", "bias", "coordinates"]
    assert len(pickle.dumps(layers[0])) < 20_000


# What is explained


def explained(capsys, layer, x):
    engines.explain(layer, x)
    return capsys.readouterr().out.splitlines()


def test_every_engine_is_explained(capsys):
    layer = GroupConv2d(2, 2, "p4", size=11)
    lines = explained(capsys, layer, torch.randn(2, 8, 12, 12))
    assert lines[0] == ("p4, 2 regular → 2 regular, 11×11, batch 2, 12×12, float32, with gradients")
    assert [line[2:].split()[0] for line in lines[1:]] == list(engines.ENGINES)
    said = {line[2:].split()[0]: " ".join(line[2:].split()[1:]) for line in lines[1:]}
    assert [line[2:].split()[0] for line in lines if line[0] == "*"] == ["dense"]
    assert said["spectral/torch"] == "can run"
    assert said["spectral/native"].endswith("it knows stencils of up to 9×9; these are 11×11")
    for name in ("spectral/hopper", "spectral/triton"):
        assert said[name] == "cannot run: it runs on NVIDIA GPUs; the input is on cpu"


def test_the_times_of_engines_are_explained(measuring, monkeypatch, capsys):
    installed(monkeypatch, 0.002, 0.001)
    lines = explained(capsys, GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8))
    assert "  dense            2 ms" in lines
    assert "* spectral/native  1 ms" in lines
    assert "  spectral/torch   can run" in lines


@pytest.mark.parametrize("allowed", [True, False])
def test_nothing_is_timed_for_an_explanation_where_it_may_not_be(
    measuring, monkeypatch, capsys, allowed
):
    dense, fake = installed(monkeypatch, 0.002, 0.001)
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 8, 8)
    with econv.engine("auto", measure=allowed):
        lines = explained(capsys, layer, x)
    assert dense.calls + fake.calls > 1 if allowed else dense.calls + fake.calls == 1
    assert any(line.endswith(" ms") for line in lines) == allowed
    assert measuring.exists() == allowed


def test_a_network_is_explained_once_for_each_problem(capsys):
    network = nn.Sequential(
        LiftConv2d(1, 2, "p4"),
        GroupConv2d(2, 2, "p4"),
        GroupConv2d(2, 2, "p4", bias=True),  # the same convolution
        GroupConv2d(2, 2, "p4", stride=2, engine="dense"),
    )
    lines = explained(capsys, network, torch.randn(1, 1, 9, 9))
    heads = [line for line in lines if line[0] not in " *"]
    assert len(heads) == 3
    assert heads[0].startswith("p4, 1 scalar → 2 regular")
    assert len(lines) == 3 * (1 + len(engines.ENGINES))
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_an_error_while_explaining_leaves_no_hooks():
    layer = GroupConv2d(2, 2, "p4")
    with pytest.raises(ValueError, match="expected"):
        engines.explain(layer, torch.randn(1, 7, 9, 9))
    assert not layer._forward_pre_hooks


# Fusion


def test_no_engine_of_a_cpu_applies_a_prologue_where_it_reads():
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 9, 9)
    for name in ENGINES[:3]:
        assert not engines.fuses(layer.convolution, x, layer.weight, name)


@pytest.mark.parametrize("engine", ON_A_CPU)
def test_a_prologue_is_applied_by_every_engine(engine):
    layer, x = GroupConv2d(2, 3, "p4", bias=True, engine=engine), torch.randn(2, 8, 9, 9)
    affine = torch.tensor([[0.5, -0.2], [1.5, -2.0], [0.1, 0.3]], requires_grad=True)
    x.requires_grad_()
    centre, scale, shift = affine.repeat_interleave(4, 1)[:, None, :, None, None]
    wanted = layer(torch.relu((x - centre) * scale + shift))
    inputs = [x, affine, *layer.parameters()]
    probe = torch.randn_like(wanted)
    results = [[wanted, *torch.autograd.grad(wanted, inputs, probe)]]
    runs = [layer.forward_activated]
    runs.append(torch.compile(layer.forward_activated, fullgraph=True, backend="aot_eager"))
    for run in runs:
        found = run(x, affine)
        results.append([found, *torch.autograd.grad(found, inputs, probe)])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-4)


def test_what_ran_is_told_outside_of_graphs_only():
    layer, x = GroupConv2d(2, 2, "p4"), torch.randn(2, 8, 9, 9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with econv.engine() as ran:
        compiled(x)
    assert ran == []
    with econv.engine("dense") as ran:
        layer(x)
    assert ran == ["dense"]
    assert choice._lists == []


# What was broken once


@pytest.mark.parametrize("engine", SOME)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transformations_inside_a_compiler_are_those_outside(engine, transform):
    layer = GroupConv2d(2, 2, "p4", engine=engine, dtype=DOUBLE)
    x = torch.randn(2, 8, 7, 7, dtype=DOUBLE)
    ways = {
        "grad": torch.func.grad(lambda a: (layer(a) ** 2).sum()),
        "vmap": lambda a: torch.func.vmap(layer)(a[:, None]),
        "jvp": lambda a: torch.func.jvp(layer, (a,), (a,))[1],
    }
    compiled = torch.compile(lambda a: ways[transform](a), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), ways[transform](x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", ON_A_CPU)
def test_forward_over_reverse_is_that_of_the_dense_engine(engine):
    layer, x = GroupConv2d(1, 2, "p4", dtype=DOUBLE), torch.randn(1, 4, 6, 6, dtype=DOUBLE)

    def curvature(name):
        with econv.engine(name):
            return torch.func.jvp(torch.func.grad(lambda a: (layer(a) ** 3).sum()), (x,), (x,))[1]

    torch.testing.assert_close(curvature(engine), curvature("dense"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["replicate", ("replicate", "circular"), ("zeros", "reflect")])
@pytest.mark.parametrize("engine", ON_A_CPU)
def test_repeated_borders_compile_in_every_layout(engine, mode):
    layer = GroupConv2d(1, 1, "p4", padding_mode=mode, engine=engine)
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-5)
    out.sum().backward()


def test_a_prologue_is_applied_with_groups_too(monkeypatch):
    layer = GroupConv2d(2, 2, "p4", groups=2)
    x, native = torch.randn(1, 8, 7, 7), engines.ENGINES["spectral/native"]
    monkeypatch.setattr(native, "fuses", True, raising=False)
    nothing = Prologue(torch.tensor([[0.0, 0.0], [0.0, 0.0], [-1.0, -1.0]]))
    problem = Problem.of(layer.convolution, x, layer.weight)
    assert not native.run(problem, x, layer._weight(), None, nothing).any()


# What other tests have compiled changes what the compiler does here.
@pytest.mark.first
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_kernels_that_fail_only_now_are_replaced_and_reported_once(
    monkeypatch, caplog, way, compiled
):
    layer, x = GroupConv2d(2, 2, "p4", dtype=DOUBLE), torch.randn(2, 8, 9, 9, dtype=DOUBLE)
    torch.compiler.reset()  # of sizes that other tests have made dynamic
    monkeypatch.setattr(operator, "FAILED", {})
    monkeypatch.setattr(choice, "_memory", {})
    monkeypatch.setattr(engines.ENGINES["spectral/native"], way, broken, raising=False)
    with econv.engine("dense"):
        wanted = torch.autograd.grad(layer(x).sum(), layer.weight)[0]
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    for _ in range(2):
        found = torch.autograd.grad(call(x).sum(), layer.weight)[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert sum("no such kernel" in record.getMessage() for record in caplog.records) == 1
    monkeypatch.setattr(operator, "FAILED", {})
    with (
        econv.engine("spectral/native"),
        pytest.raises(operator.EngineError, match="no such kernel"),
    ):
        layer(x).sum().backward()


def broken(*operands):
    raise OSError("no such kernel")


def test_explaining_a_network_changes_nothing(capsys):
    network = nn.Sequential(
        LiftConv2d(1, 2, "p4"), econv.GroupBatchNorm2d(2, "p4"), nn.Dropout(), nn.Flatten(2)
    ).train()
    network[2].eval()
    before = torch.get_rng_state()
    engines.explain(network, torch.randn(2, 1, 9, 9, generator=torch.Generator()))
    assert network[1].num_batches_tracked == 0
    assert [module.training for module in network] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), before)
    assert "spectral/native" in capsys.readouterr().out


def test_linear_layers_and_engines_that_cannot_run_are_explained(capsys):
    engines.explain(econv.GroupLinear(2, 2, "p4"), torch.randn(3, 8))
    layer = GroupConv2d(2, 2, "p4", engine="spectral/triton")
    engines.explain(layer, torch.randn(1, 8, 9, 9))
    assert "*" not in capsys.readouterr().out.splitlines()[-4]


def test_graphs_that_are_kept_on_disk_are_told_apart_by_what_decides(monkeypatch):
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(choice, "_kept", [""])
    names = [choice.traced_name("auto")]
    with econv.engine("auto", measure=False):
        names.append(choice.traced_name("auto"))
    for engine in ("dense", "spectral/native"):
        engines.keep({"device: some problem": engine})
        names.append(choice.traced_name("auto"))
    assert len(set(names)) == len(names)
    assert choice.traced_name("dense") == "dense"
