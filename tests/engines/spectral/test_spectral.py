"""The spectral engine against the reference: outputs and every gradient, both ways to run it."""

import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import econv
from econv import FieldConv2d, GroupConv2d, LiftConv2d, VectorConv2d
from econv.engines.spectral import native
from econv.engines.spectral.torch import tables
from econv.plan import spectral_plan
from test_engines import FORWARD, distance, layers_with, run_reference

RUNS = [
    "spectral/torch",
    pytest.param(
        "spectral/native",
        marks=pytest.mark.skipif(bool(native.reason(torch.float64)), reason="no C++ compiler"),
    ),
]


ON_A_CPU = ["dense", *RUNS]


@pytest.fixture(params=RUNS)
def ran(request, monkeypatch):
    """Runs a layer and says no unless it was run as the test asks."""
    if request.param == "spectral/torch":
        monkeypatch.setenv("ECONV_NATIVE", "0")

    def run(layer, x):
        with econv.engine() as found:
            result = layer(x)
        assert set(found) == {request.param}
        return result

    return run


def assert_equal_to_the_reference(run, layer, x, tolerance=1e-10):
    x = x.requires_grad_()
    found, wanted = run(layer, x), run_reference(layer, x)
    probe = torch.randn_like(wanted)
    inputs = [x, *layer.parameters()]
    ours = torch.autograd.grad(found, inputs, probe)
    theirs = torch.autograd.grad(wanted, inputs, probe)
    for a, b in zip([found, *ours], [wanted, *theirs], strict=True):
        assert distance(a, b) <= tolerance * max(1.0, float(b.detach().abs().max()))
        assert float(b.detach().abs().max()) > 1e-3


@pytest.mark.parametrize("options", FORWARD.values(), ids=FORWARD.keys())
def test_outputs_and_gradients_equal_the_reference(options, ran):
    for layer in layers_with("p4", {**options, "engine": "spectral"}):
        x = torch.randn(2, layer.in_channels, 12, 11, dtype=torch.float64)
        assert_equal_to_the_reference(ran, layer, x)


@pytest.mark.parametrize("group", ["p1", "p2", "p3", "p5", "p6", "p8", "p1m", "p2m", "p3m", "p4m"])
def test_every_group_equals_the_reference(group, ran):
    options = {"dtype": torch.float64, "engine": "spectral"}
    for layer in (
        LiftConv2d(3, 1, group, vectors=1, bias=True, **options),
        GroupConv2d(2, 1, group, bias=True, **options),
        VectorConv2d(1, 1, group, **options),
        LiftConv2d(3, 1, group, pseudoscalars=1, vectors=1, **options),
        *FieldConv2d(1, group, scalars=1, pseudoscalars=2, bias=True, **options).heads,
    ):
        x = torch.randn(1, layer.in_channels, 7, 9, dtype=torch.float64)
        assert_equal_to_the_reference(ran, layer, x)


@pytest.mark.parametrize("group", ["p12", "p16", "p6m", "p8m", "p32"])
def test_larger_groups_equal_the_reference(group, ran):
    options = {"dtype": torch.float64, "engine": "spectral", "bias": True}
    layer = GroupConv2d(1, 1, group, **options)
    x = torch.randn(1, layer.in_channels, 5, 6, dtype=torch.float64)
    assert_equal_to_the_reference(ran, layer, x)


@pytest.mark.parametrize("group", ["p16", "p8m", "p32"])
def test_larger_groups_equal_the_dense_engine(group, ran):
    layer = GroupConv2d(2, 3, group, dtype=torch.float64, engine="spectral")
    x = torch.randn(2, layer.in_channels, 9, 20, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(2, layer.out_channels, 9, 20, dtype=torch.float64)
    twin = GroupConv2d(2, 3, group, dtype=torch.float64, engine="dense")
    twin.load_state_dict(layer.state_dict())
    found, wanted = ran(layer, x), twin(x)
    assert distance(found, wanted) <= 1e-10
    for a, b in zip(
        torch.autograd.grad(found, [x, layer.weight], probe),
        torch.autograd.grad(wanted, [x, twin.weight], probe),
        strict=True,
    ):
        assert distance(a, b) <= 1e-10 * float(b.abs().max())


STENCILS = {
    "constants": {"operators": "order<=0"},
    "one derivative": {"operators": [(1, 0)]},
    "laplacian": {"operators": [(2, 0), (0, 2)]},
    "order<=4": {"operators": "order<=4"},
    "7×7": {"size": 7},
    "9×9": {"size": 9, "stencils": "central"},
    "gaussian": {"stencils": "gaussian"},
    "central": {"stencils": "central"},
    "rectangles": {"spacing": (1.5, 0.5)},
    "gaussian rectangles, 7×7": {"spacing": (0.4, 1.0), "stencils": "gaussian", "size": 7},
    "accurate": {"stencils": "central", "accuracy": 4, "size": 9, "dilation": 2},
}


@pytest.mark.parametrize("group", ["p4", "p3m"])
@pytest.mark.parametrize("options", STENCILS.values(), ids=STENCILS.keys())
def test_other_operators_and_stencils_equal_the_reference(group, options, ran):
    layer = GroupConv2d(1, 2, group, dtype=torch.float64, engine="spectral", **options)
    x = torch.randn(1, layer.in_channels, 18, 17, dtype=torch.float64)
    assert_equal_to_the_reference(ran, layer, x)


@pytest.mark.parametrize("width", [5, 7, 8, 15, 16, 17, 31, 33, 40, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_width_equals_the_dense_engine(width, dtype, ran):
    """Widths around those of the processor's vectors and of the kernel's tiles."""
    layer = GroupConv2d(3, 5, "p4", dtype=dtype, engine="spectral")
    twin = GroupConv2d(3, 5, "p4", dtype=dtype, engine="dense")
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(2, 12, 6, width, dtype=dtype)
    wanted = twin(x)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert distance(ran(layer, x), wanted) <= tolerance * float(wanted.detach().abs().max())


def test_sizes_beyond_the_kernel_run_as_torch_operations():
    layer = GroupConv2d(1, 1, "p4", size=11, dtype=torch.float64, engine="spectral")
    with econv.engine() as found:
        layer(torch.randn(1, 4, 12, 12, dtype=torch.float64))
    assert found == ["spectral/torch"]


class NoDenseConvolution(TorchDispatchMode):
    """Raises where a convolution wider than 1×1 reads more than one channel at a time."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "conv" in str(function):
            # The filters are the second argument forwards, the third backwards.
            filters = args[2 if "backward" in str(function) else 1]
            if filters.shape[1] > 1 and max(filters.shape[2:]) > 1:
                raise AssertionError(f"a dense convolution: {function} {tuple(filters.shape)}")
        return function(*args, **(kwargs or {}))


WATCHED = {
    "plain": {},
    "stride 2": {"stride": 2},
    "circular": {"padding_mode": "circular"},
    "reflections": {"group": "p4m", "padding_mode": "reflect"},
    "p6, dilation 2": {"group": "p6", "dilation": 2, "operators": "order<=2", "size": 3},
}


@pytest.mark.parametrize("options", WATCHED.values(), ids=WATCHED.keys())
@pytest.mark.parametrize("kind", [LiftConv2d, GroupConv2d, VectorConv2d])
def test_no_dense_convolution_runs(kind, options):
    options = {"group": "p4", **options}
    layer = kind(4, 2, engine="spectral", bias=kind is not VectorConv2d, **options)
    x = torch.randn(2, layer.in_channels, 8, 8, requires_grad=True)
    with NoDenseConvolution(), econv.engine() as found:
        layer(x).pow(2).sum().backward()
    assert set(found) == {"spectral/torch"}


def test_many_groups_at_once_are_watched():
    layer = GroupConv2d(4, 2, "p4", engine="spectral", groups=2)
    x = torch.randn(2, layer.in_channels, 8, 8, requires_grad=True)
    with NoDenseConvolution():
        layer(x).pow(2).sum().backward()


def test_the_watch_notices_a_dense_convolution():
    layer = GroupConv2d(4, 2, "p4", engine="dense")
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    with NoDenseConvolution(), pytest.raises(AssertionError, match="a dense convolution"):
        layer(x)
    result = layer(x).sum()
    with NoDenseConvolution(), pytest.raises(AssertionError, match="a dense convolution"):
        result.backward()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_no_convolution_at_all_runs_beside_the_kernel():
    def convolutions(engine):
        layer = GroupConv2d(4, 2, "p4", engine=engine)
        x = torch.randn(2, 16, 8, 8, requires_grad=True)
        with torch.profiler.profile() as profile:
            layer(x).sum().backward()
        return [event.name for event in profile.events() if "conv" in event.name.lower()]

    assert convolutions("dense")
    if native.compiler():
        found = [name for name in convolutions("spectral") if name.startswith("aten")]
        assert found == []


def test_gradients_of_gradients(ran):
    options = {"operators": "order<=1", "dtype": torch.float64, "engine": "spectral"}
    for layer in (GroupConv2d(1, 2, "p3", stride=2, **options), LiftConv2d(2, 1, "p2", **options)):
        x = torch.randn(1, layer.in_channels, 5, 4, dtype=torch.float64, requires_grad=True)
        weight = layer.weight.detach().clone().requires_grad_()

        def run(x, weight, layer=layer):
            return torch.func.functional_call(layer, {"weight": weight}, (x,)).pow(2)

        ran(layer, x)
        assert torch.autograd.gradcheck(run, (x, weight))
        assert torch.autograd.gradgradcheck(run, (x, weight))


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_one_gradient_alone_is_the_same(wanted, ran):
    layer = GroupConv2d(2, 2, "p4", dtype=torch.float64, engine="spectral")
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64, requires_grad=True)
    both = torch.autograd.grad(ran(layer, x).pow(2).sum(), [x, layer.weight])
    if wanted == "x":
        layer.weight.requires_grad_(False)
        alone, expected = torch.autograd.grad(ran(layer, x).pow(2).sum(), x)[0], both[0]
    else:
        result = ran(layer, x.detach()).pow(2).sum()
        alone, expected = torch.autograd.grad(result, layer.weight)[0], both[1]
    assert torch.equal(alone, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.jvp itself
def test_transforms_of_functions(ran):
    layer = GroupConv2d(1, 2, "p3", operators="order<=2", dtype=torch.float64, engine="spectral")
    xs = torch.randn(3, 2, 3, 6, 7, dtype=torch.float64)
    wanted = torch.stack([ran(layer, x) for x in xs])
    assert distance(torch.func.vmap(layer)(xs), wanted) <= 1e-12

    def loss(weight, x):
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).pow(2).sum()

    weight = layer.weight.detach()
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, xs)
    expected = [
        torch.autograd.grad(loss(w, x), w)[0] for x in xs for w in [weight.clone().requires_grad_()]
    ]
    assert distance(found, torch.stack(expected)) <= 1e-10
    tangents = (torch.randn_like(weight), torch.randn_like(xs[0]))
    _, slope = torch.func.jvp(loss, (weight, xs[0]), tangents)
    step = 1e-6
    ahead = loss(weight + step * tangents[0], xs[0] + step * tangents[1])
    behind = loss(weight - step * tangents[0], xs[0] - step * tangents[1])
    assert abs(float(slope - (ahead - behind) / (2 * step))) <= 1e-5 * abs(float(slope))


def test_a_compiled_layer_is_the_same():
    layer = GroupConv2d(2, 2, "p4", dtype=torch.float64, engine="spectral", stride=2)
    x = torch.randn(2, 8, 8, 9, dtype=torch.float64, requires_grad=True)
    found, wanted = torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x)
    assert distance(found, wanted) <= 1e-12
    probe = torch.randn_like(wanted)
    ours = torch.autograd.grad(found, [x, layer.weight], probe)
    theirs = torch.autograd.grad(wanted, [x, layer.weight], probe)
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a, b) <= 1e-10 * float(b.abs().max())


def test_an_exported_layer_is_the_same_on_every_size():
    layer = LiftConv2d(3, 2, "p4", vectors=1, bias=True, dtype=torch.float64, engine="spectral")
    x, other = (torch.randn(2, 3, *s, dtype=torch.float64) for s in ((8, 9), (11, 7)))
    size = {2: torch.export.Dim("height", min=6), 3: torch.export.Dim("width", min=6)}
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: None, **size},))
    assert distance(program.module()(other), layer(other)) <= 1e-12


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_a_layer_traced_by_jit_reads_its_input():
    layer = GroupConv2d(2, 2, "p4", dtype=torch.float64, engine="spectral").requires_grad_(False)
    x, other = torch.randn(2, 1, 8, 7, 7, dtype=torch.float64)
    traced = torch.jit.trace(layer, x, check_trace=False)
    assert distance(traced(other), layer(other)) <= 1e-12


def test_a_block_around_the_compiler_chooses_the_engine():
    from torch._dynamo.backends.common import aot_autograd

    layer = GroupConv2d(1, 1, "p4", dtype=torch.float64)
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    seen = []

    def keep(graph, inputs):
        seen.append(graph.code)
        return graph

    for name in ("dense", "spectral", "dense"):
        with econv.engine(name):
            wanted = layer(x)
            compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
            found = compiled(x)
        assert distance(found, wanted) <= 1e-12
        assert ("econv.spectral" in seen[-1]) == (name == "spectral")
        assert ("aten.convolution" in seen[-1]) == (name == "dense")


def test_state_is_the_same_for_all_engines():
    layers = [GroupConv2d(2, 2, "p4", bias=True, engine=e) for e in ("auto", "dense", "spectral")]
    for layer in layers:
        assert list(layer.state_dict()) == ["weight", "bias", "coordinates"]
        layer.load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 8, 6, 6)
    wanted = layers[0](x)
    for layer in (*layers, copy.deepcopy(layers[2]), pickle.loads(pickle.dumps(layers[2]))):
        assert distance(layer(x), wanted) <= 1e-5
    again = layers[2].double()
    plan = spectral_plan(again.basis, "regular", "regular")
    table = tables(plan, x.device, torch.float64)
    assert table["stencils"].dtype == torch.float64
    assert float((table["stencils"][:, 0] - torch.tensor(plan.stencils)).abs().max()) == 0
    exact = copy.deepcopy(layers[0]).double()
    assert distance(again(x.double()), exact(x.double())) <= 1e-12


def test_only_the_input_and_the_weights_are_kept_for_the_backward_pass(ran):
    layer = GroupConv2d(4, 4, "p8", engine="spectral")
    x = torch.randn(2, 32, 16, 16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        ran(layer, x)
    plan = spectral_plan(layer.basis, "regular", "regular")
    table = tables(plan, x.device, x.dtype)
    sizes = {t.data_ptr(): t.numel() for t in kept}
    known = (x.numel(), 16 * plan.weights, layer.weight.numel(), table["weight_map"].numel())
    assert sum(sizes.values()) <= sum(known)
    assert len(plan.stencils) * x.numel() > 3 * sum(known)  # what keeping derivatives would take


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_rounded_once(dtype, ran):
    layer = GroupConv2d(4, 4, "p8", engine="spectral", dtype=dtype)
    x = torch.randn(2, 32, 9, 9, dtype=dtype)
    layer.requires_grad_(False)
    found = ran(layer, x)
    assert found.dtype == dtype
    exact = copy.deepcopy(layer).double()
    exact.engine = "dense"
    wanted = exact(x.double())
    twin = GroupConv2d(4, 4, "p8", engine="dense", dtype=dtype).requires_grad_(False)
    twin.load_state_dict(layer.state_dict())
    error = float((found.double() - wanted).norm() / wanted.norm())
    dense = float((twin(x).double() - wanted).norm() / wanted.norm())
    assert error <= dense
    assert error <= torch.finfo(dtype).eps


@pytest.mark.parametrize("engine", ["spectral/torch", "spectral/native"])
def test_a_backward_pass_inside_autocast_is_the_same(engine):
    layer = GroupConv2d(2, 3, "p8", engine=engine)
    x = torch.randn(2, 16, 9, 9)
    found = []
    for inside in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x).sum()
            if inside:
                found.append(torch.autograd.grad(out, layer.weight)[0])
        if not inside:
            found.append(torch.autograd.grad(out, layer.weight)[0])
    assert torch.equal(*found)


def test_autocast_gives_its_dtype(ran):
    layer = GroupConv2d(2, 2, "p4", engine="spectral", bias=True)
    x = torch.randn(1, 8, 6, 6)
    wanted = ran(layer, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ran(layer, x)
    assert found.dtype == torch.bfloat16
    assert distance(found.float(), wanted) <= 0.02 * float(wanted.detach().abs().max())
    found.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_memory_formats_and_strides(ran):
    layer = GroupConv2d(2, 3, "p4", engine="spectral", dtype=torch.float64)
    x = torch.randn(2, 8, 7, 9, dtype=torch.float64)
    wanted = ran(layer, x)
    last = ran(layer, x.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, wanted)
    wide = torch.randn(2, 20, 7, 9, dtype=torch.float64)
    wide[:, 4:12] = x
    assert torch.equal(ran(layer, wide[:, 4:12]), wanted)
    assert torch.equal(ran(layer, x.transpose(2, 3)), ran(layer, x.transpose(2, 3).contiguous()))


def test_an_empty_batch(ran):
    layer = GroupConv2d(2, 3, "p4", engine="spectral")
    x = torch.zeros(0, 8, 6, 6, requires_grad=True)
    result = ran(layer, x)
    assert result.shape == (0, 12, 6, 6)
    result.sum().backward()
    assert x.grad.shape == x.shape
    assert float(layer.weight.grad.abs().max()) == 0


def test_nothing_is_left_of_earlier_inputs(ran):
    """A run on NaN poisons every buffer that is kept; the next must not read any of it."""
    layer = GroupConv2d(3, 2, "p4", engine="spectral", dtype=torch.float64)
    x = torch.randn(2, 12, 9, 13, dtype=torch.float64, requires_grad=True)

    def everything(x):
        result = ran(layer, x)
        return result, *torch.autograd.grad(result.pow(2).sum(), [x, layer.weight])

    wanted = everything(x)
    poisoned = everything(torch.full((3, 12, 20, 37), torch.nan, dtype=x.dtype).requires_grad_())
    assert all(t.isnan().all() for t in poisoned)
    for a, b in zip(everything(x), wanted, strict=True):
        assert torch.equal(a, b)


def test_runs_repeat_to_the_last_bit(ran):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layer = GroupConv2d(3, 2, "p8", engine="spectral")
        x = torch.randn(5, 24, 16, 16, requires_grad=True)

        def everything():
            result = ran(layer, x)
            return result, *torch.autograd.grad(result.pow(2).sum(), [x, layer.weight])

        first = everything()
        for _ in range(3):
            for a, b in zip(everything(), first, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


def test_an_image_does_not_depend_on_its_batch(ran):
    layer = GroupConv2d(2, 2, "p8", engine="spectral")
    x = torch.randn(4, 16, 11, 11)
    assert torch.equal(ran(layer, x)[2:3], ran(layer, x[2:3]))


def test_training_equals_training_with_the_dense_engine(ran):
    torch.manual_seed(0)
    x, wanted = torch.randn(4, 3, 12, 12), torch.randn(4, 8)
    losses = []
    for engine in ("dense", "spectral"):
        torch.manual_seed(1)
        network = torch.nn.Sequential(
            LiftConv2d(3, 4, "p4", engine=engine),
            torch.nn.ReLU(),
            GroupConv2d(4, 2, "p4", engine=engine, stride=2, bias=True),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        )
        optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
        for _ in range(10):
            optimiser.zero_grad()
            loss = (network(x) - wanted).pow(2).mean()
            loss.backward()
            optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
