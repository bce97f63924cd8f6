"""The kernels on a GPU: the checks of the interpreter, and what only a device can show."""

import copy

import pytest
import torch

import econv

if not torch.cuda.is_available():
    pytest.skip("no CUDA device found", allow_module_level=True)

from econv.engines import auto, replayed, spectral, triton_ops
from econv.engines.spectral import Geometry
from econv.engines.spectral.triton import launches as triton_launches
from econv.engines.spectral.triton import steps as triton_steps
from econv.plan import spectral_plan
from econv.train.capture import captured
from triton_checks import *  # noqa: F403
from triton_checks import (
    FUSED,
    PreActivated,
    err_little_more,
    error,
    exact,
    exact_step,
    results,
    step,
)

BFLOAT16 = {"device": "cuda", "dtype": torch.bfloat16, "engine": "spectral"}
ROWS = [("p8", 40, 16), ("p8", 80, 8), ("p16", 20, 32), ("p8m", 20, 32), ("p32", 20, 16)]


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
    assert ran == ["spectral/triton"]
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    for a, b, truth in zip(ours, results(layer, x, probe, "dense"), wanted, strict=True):
        assert error(a, truth) <= 1.5 * error(b, truth)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize(("group", "fields", "size"), ROWS)
def test_later_calls_are_launched_by_address_and_give_the_same(
    monkeypatch, group, fields, size, most
):
    """With all images together, and in groups, which begin at other addresses."""
    layer, x, probe = row(group, fields, size, batch=9)
    through_triton = []
    launch = triton_steps.Launch.__call__

    def counted(self, *tensors):
        through_triton.append(self)
        launch(self, *tensors)

    monkeypatch.setattr(triton_steps.Launch, "__call__", counted)
    with triton_ops.tiles(bytes=most):
        wanted = results(layer, x, probe, "spectral")
        through_triton.clear()
        for _ in range(2):
            found = results(layer, x, probe, "spectral")
            assert all(map(torch.equal, found, wanted))
    assert not through_triton


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
    sizes = (19, 21, layer.stride, layer.padding, layer.dilation)
    geometry = Geometry.of(plan.basis.size, *sizes)
    without = run_with({"warp_specialised": 0}, x, probe, weights, plan, geometry)
    exactly = in_float64(x, probe, weights, plan, geometry)
    monkeypatch.setattr(
        triton_launches,
        "_empty",
        lambda shape, dtype, device: torch.full(shape, torch.nan, dtype=dtype, device=device),
    )
    for chosen in ({}, {"partitions": 1}, {"splits": 3}, {"bytes": 1 << 20}, {"halves": 1}):
        found = run_with({"warp_specialised": 1, **chosen}, x, probe, weights, plan, geometry)
        # The first half of a layer waits in 16 bits.
        most = 1.75 if "halves" in chosen or group == "p32" else 1.25
        for a, b, truth in zip(found, without, exactly, strict=True):
            assert error(a, truth) <= most * error(b, truth)


def in_float64(x, probe, weights, plan, geometry):
    """What `run_with` gives, by torch's own operations."""
    x, weights = (tensor.double().requires_grad_() for tensor in (x, weights))
    table = spectral.tables(plan, x.device, torch.float64)
    out = spectral.apply(x, weights, table, geometry)
    return out, *torch.autograd.grad(out, [x, weights], probe.double())


def run_with(chosen, x, probe, weights, plan, geometry):
    """A layer, its adjoint and the gradient to its weights, cut as said."""
    back = geometry.transposed(plan.basis.size, *x.shape[2:])
    with triton_ops.tiles(**chosen):
        return (
            triton_ops.convolve(x, weights, plan.name, False, *geometry),
            triton_ops.convolve(probe, weights, plan.name, True, *back),
            triton_ops.gram(x, probe, plan.name, *geometry[:4]),
        )


@HOPPER
def test_kernels_are_warp_specialised_where_they_can_be(monkeypatch):
    """In float32, in other layouts and for few targets the other kernels run."""
    runs = []
    made = triton_launches.ConvolutionRun.__init__
    monkeypatch.setattr(
        triton_launches.ConvolutionRun,
        "__init__",
        lambda self, *args: (made(self, *args), runs.append(self.tiling.warp_specialised))[0],
    )

    def ran(group, convert=lambda x: x):
        layer, x, _ = row(group, 8, 11)
        triton_launches.convolution_run.cache_clear()
        layer.to(convert(x).dtype)(convert(x))
        return runs[-1]

    assert ran("p8")
    assert ran("p8", torch.Tensor.half)
    assert not ran("p8", torch.Tensor.float)
    assert not ran("p8", torch.Tensor.contiguous)
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
    found = step(pair, x, probe, wanted=FUSED)
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


def with_coefficients(monkeypatch, x, dense, spectral):
    """Coefficients of launches, and of Python's share, where ``x`` is; the name of their set."""
    name = auto.where("cuda", x.dtype, auto.has_roles(x.device))
    known, last = auto.COEFFICIENTS[name], auto.host(name)
    table = {
        engine: (launches,) * (len(known[engine]) - last) + (python,) * last
        for engine, (launches, python) in (("dense", dense), ("spectral", spectral))
    }
    monkeypatch.setitem(auto.COEFFICIENTS, name, table)
    # Of layers as small as these nothing would be asked.
    monkeypatch.setattr(auto, "_QUEUED", {2: 0, 4: 0})
    auto.faster.cache_clear()
    return name


def test_auto_takes_the_kernels_where_its_cost_model_says_so(monkeypatch):
    layer, x, _ = row("p8", 8, 16)
    layer.engine = "auto"
    for cost, engine in ((0.0, "spectral/triton"), (1e9, "dense")):
        name = with_coefficients(monkeypatch, x, (1.0, 1.0), (cost, cost))
        with econv.engine() as ran:
            layer(x)
        assert ran == [engine]
    with_coefficients(monkeypatch, x, (1.0, 1.0), (0.0, 0.0))
    monkeypatch.delitem(auto.COEFFICIENTS, name)
    with econv.engine() as ran:
        layer(x)
    assert ran == ["dense"]
    auto.faster.cache_clear()


def test_a_step_that_auto_chose_for_is_captured(monkeypatch):
    """Python's share makes the kernels too slow, but not in a graph."""
    layer, x, probe = row("p8", 8, 16)
    with_coefficients(monkeypatch, x, (1e-9, 0.0), (0.0, 1e9))
    layer.engine = "auto"
    found = torch.zeros_like(probe)

    def step():
        found.copy_(layer(x))

    with torch.no_grad():
        with econv.engine() as ran:
            step()
        assert ran == ["dense"]
        wanted = found.clone()
        with econv.engine() as ran, replayed():
            replay = captured(step, [found])
        assert set(ran) == {"spectral/triton"}
        found.zero_()
        replay()
    assert error(found, wanted) <= 1e-2
    auto.faster.cache_clear()
