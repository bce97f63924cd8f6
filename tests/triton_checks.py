"""Checks of the kernels for GPUs: `test_triton` runs them interpreted, `test_cuda_triton` there."""

import copy
import math
import re
from unittest.mock import patch

import numpy as np
import pytest
import torch

import econv
from econv import GroupBatchNorm2d, GroupConv2d, filter_basis
from econv.engines import ENGINES, Prologue, choice, door, filter_kernel
from econv.engines.problem import Geometry
from econv.engines.spectral import tiling
from econv.engines.spectral.operator import Task
from econv.engines.spectral.triton import kernels as triton_kernels
from econv.engines.spectral.triton import launches as triton_launches
from econv.engines.spectral.triton.engine import Hopper, Triton
from econv.engines.spectral.triton.kernels import INTERPRETED, OVERALL
from econv.gpu import devices, passes
from econv.gpu import launch as triton_launch
from econv.layers import (
    blur,
    blur_kernel,
    norm_kernels,
    norm_relu,
    norm_relu_conv,
    shift,
    shift_kernel,
)
from econv.plan import spectral_plan
from econv.tensors import memory_format
from test_engines import run_reference

DEVICE = "cpu" if INTERPRETED else "cuda"
TRITON = "spectral/triton"  # on a Hopper GPU "spectral" stands for other kernels
FLOAT32 = 1e-6 if INTERPRETED else 1e-5  # a GPU multiplies with 21 digits of 24

# What the interpreter does with the bounds of loops, and with numbers that are none.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim", "ignore:invalid value encountered:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch):
    """Kernels take the tensors of the device here, and float32 has all its digits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if not INTERPRETED:
        yield
        return
    devices.DEVICES.add(DEVICE)
    devices._not_installed.cache_clear()
    monkeypatch.setattr(Hopper, "why_not", why_not_hopper)
    with tiles(gradient_fields=4, splits=1):  # fewer programs, one after the other
        yield
    devices.DEVICES.discard(DEVICE)
    devices._not_installed.cache_clear()


def why_not_hopper(self, problem):
    """Its kernels are interpreted only where a check asks for them."""
    return Triton.why_not(self, problem) if asked_for() else "nobody asked for it"


def asked_for():
    """Whether a check wants the warp-specialised kernels."""
    return tiling.CHANGES.get("everywhere", 0) > 0


def tiles(warp_specialised=None, **changes):
    """Inside the block every launch is cut as given, and warp-specialised if asked for."""
    if warp_specialised is not None:
        changes["everywhere"] = warp_specialised
    return patch.dict(tiling.CHANGES, changes)


def error(found, wanted):
    """The relative distance to what is wanted, in the mean square."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    assert found.shape == wanted.shape
    assert float(wanted.norm()) > 1e-3
    return float((found - wanted).norm() / wanted.norm())


def ran_by(layer, x):
    with econv.engine() as ran:
        layer(x)
    return ran


def results(layer, x, probe, engine, run=None):
    """Output, and the gradients to input and parameters, as one list."""
    layer = copy.deepcopy(layer)
    layer.engine = engine
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = (run or (lambda layer, x: layer(x)))(layer, x)
    gradients = torch.autograd.grad(out, [x, *layer.parameters()], probe.to(out))
    return [out, *gradients]


def exact(layer, x, probe, run=None):
    layer = copy.deepcopy(layer).double().cpu()
    return results(layer, x.double().cpu(), probe.double().cpu(), "dense", run)


def case(group, fields=(2, 3), shape=(2, 7, 6), dtype=torch.float32, **options):
    layer = GroupConv2d(*fields, group, engine=TRITON, device=DEVICE, **options)
    layer = layer.to(dtype)
    shape = (shape[0], layer.in_channels, *shape[1:])
    x = torch.randn(shape).to(device=DEVICE, dtype=dtype)
    with econv.engine() as ran:
        out = layer(x)
    assert set(ran) == {TRITON}
    layer.engine = "spectral"  # float64 is for other engines of that name
    return layer, x, torch.randn_like(out)


REFERENCE = {
    "plain": {},
    "stride 2": {"stride": 2, "bias": True},
    "dilation 2": {"dilation": 2, "shape": (1, 9, 11)},
    "no padding": {"padding": 0},
    "stride, dilation, padding": {"stride": 3, "dilation": 2, "padding": 1, "shape": (2, 10, 12)},
    "circular": {"padding_mode": "circular", "stride": 2, "shape": (1, 8, 7)},
    "a channel": {"padding_mode": ("zeros", "circular"), "shape": (1, 6, 7)},
    "rectangles": {"spacing": (0.5, 0.8), "shape": (1, 6, 5)},
    "order<=2, 3×3": {"operators": "order<=2", "size": 3},
    "one image, one field": {"shape": (1, 5, 5), "fields": (1, 1)},
    "fields beyond a tile": {"fields": (5, 9)},
    "groups": {"fields": (4, 2), "groups": 2},
}


@pytest.mark.parametrize("options", REFERENCE.values(), ids=REFERENCE.keys())
def test_outputs_and_gradients_equal_the_reference(options):
    layer, x, probe = case("p4", **options)
    wanted = exact(layer, x, probe, run_reference)
    for ours, theirs in zip(results(layer, x, probe, TRITON), wanted, strict=True):
        assert error(ours, theirs) <= FLOAT32


LOW = {"operators": "order<=2", "size": 3}
GROUPS = [("p6", {}), ("p8", {}), ("p16", {}), ("p4m", {}), ("p8m", {})]
GROUPS += [
    ("p6m", LOW),
    ("p8", LOW),
    ("p16", LOW),
    ("p8m", LOW),
    ("p8", {"size": 7, "shape": (1, 7, 8)}),
]


@pytest.mark.parametrize(("group", "options"), GROUPS)
def test_every_kind_of_group_equals_the_dense_engine_in_float64(group, options):
    layer, x, probe = case(group, **{"shape": (1, 6, 5), **options})
    wanted = exact(layer, x, probe)
    for ours, theirs in zip(results(layer, x, probe, TRITON), wanted, strict=True):
        assert error(ours, theirs) <= FLOAT32


def test_a_layer_between_volumes_equals_the_dense_engine_in_float64():
    """The others are in `volume_checks`."""
    layer = econv.GroupConv3d(1, 1, "C2", engine=TRITON, device=DEVICE)
    x = torch.randn(1, 2, 3, 3, 4, device=DEVICE)
    probe = torch.randn_like(layer(x))
    wanted = exact(layer, x, probe)
    for ours, theirs in zip(results(layer, x, probe, TRITON), wanted, strict=True):
        assert error(ours, theirs) <= FLOAT32


# In float16 the derivatives themselves are rounded, to as many digits as the input has.
HALF = [("p4", torch.bfloat16, 1.5), ("p8", torch.bfloat16, 1.5), ("p16", torch.bfloat16, 1.5)]
HALF += [("p8m", torch.bfloat16, 1.5), ("p8", torch.float16, 2.5)]


@pytest.mark.parametrize(("group", "dtype", "factor"), HALF)
def test_half_precisions_err_little_more_than_the_dense_engine(group, dtype, factor):
    layer, x, probe = case(group, shape=(2, 6, 7), dtype=dtype, bias=True)
    wanted = exact(layer, x, probe)
    ours, theirs = (results(layer, x, probe, engine) for engine in (TRITON, "dense"))
    for a, b, truth in zip(ours, theirs, wanted, strict=True):
        assert a.dtype == dtype
        assert error(a, truth) <= factor * error(b, truth)


def test_images_of_any_magnitude_keep_their_digits():
    layer, x, _ = case("p4", shape=(4, 6, 6), dtype=torch.bfloat16)
    scales = torch.tensor([1.0, 1e-20, 1e20, 0.0]).to(DEVICE)[:, None, None, None]
    scaled = (x * scales).bfloat16()
    found = layer(scaled).double().cpu()
    wanted = copy.deepcopy(layer).double().cpu()(scaled.double().cpu())
    for scale, ours, theirs in zip(scales.flatten().tolist()[:3], found, wanted, strict=False):
        assert error(ours / scale, theirs / scale) <= 5e-3
    assert not found[3].any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_reaches_its_neighbours_and_no_other_image(value):
    layer, x, _ = case("p4", dtype=torch.float16, shape=(2, 7, 7))
    clean = layer(x)
    x[0, 0, 3, 3] = value
    out = layer(x)
    assert not out[0, :, 3, 3].isfinite().any()
    assert torch.equal(out[1], clean[1])


def largest(x, affine=None):
    """The largest magnitude in ``x``, and from `OVERALL` on that of each of its images."""
    found = torch.zeros(OVERALL + len(x), device=x.device)
    triton_launches.largest(x, found, affine)
    return found


def layouts(x):
    """The same images in one piece, channels last, with gaps, and out of step with addresses."""
    wide = torch.zeros(2 * x.shape[0], x.shape[1] + 1, *x.shape[2:], dtype=x.dtype, device=x.device)
    wide[::2, 1:] = x
    return x, x.to(memory_format=torch.channels_last), wide[::2, 1:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_largest_numbers_are_those_of_all_images_and_of_each(dtype):
    x = torch.randn(5, 7, 40, 33).to(device=DEVICE, dtype=dtype)
    x[1] = 0
    x[2, 6, 39, 32] = -torch.inf
    x[4, 0, 0, 0] = torch.nan
    wanted = x.flatten(1).abs().amax(1).float()
    for images in layouts(x):
        found = largest(images)
        torch.testing.assert_close(found[OVERALL:], wanted, rtol=0, atol=0, equal_nan=True)
        assert found[0].isnan()
        assert largest(images[:4])[0] == torch.inf
        assert largest(images[1:2])[0] == 0
    expanded = torch.full((), -3.0, device=DEVICE).expand(2, 3, 4, 5)
    assert largest(expanded).tolist()[OVERALL:] == [3.0, 3.0]
    assert largest(x[:0]).shape == (OVERALL,)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_to_the_input_lies_as_the_input_and_is_not_copied(monkeypatch, layout):
    """Whatever the layout of the output's gradient; that of a sum has none."""
    layer, x, _ = case("p4", shape=(2, 6, 5))
    x = x.to(memory_format=layout).requires_grad_()
    made = []
    plan = triton_launches.ConvolutionRun.__call__

    def kept(self, *operands):
        found = plan(self, *operands)
        made.append((found.data_ptr(), found.stride()))
        return found

    monkeypatch.setattr(triton_launches.ConvolutionRun, "__call__", kept)
    layer(x).sum().backward()
    assert made[1] == (x.grad.data_ptr(), x.stride())


def test_a_launch_finds_its_kernel_once_for_addresses_that_are_aligned():
    found, launched = [], []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: launched.append((grid, arguments[1:]))

    class Kernel:
        def __getitem__(self, grid):
            def run(*arguments, **options):
                found.append((grid, arguments[1:], options))
                return Compiled()

            return run

    launch = triton_launch.Launch(Kernel(), (5, 2), (7, 8), BLOCK=64, num_warps=4)
    x = torch.zeros(64)
    launch(x)
    assert found == [((5, 2, 1), (7, 8), {"BLOCK": 64, "num_warps": 4})]
    launch(x)
    assert launched == [((5, 2, 1), (7, 8, 64))]
    launch(x[1:])
    assert len(found) == 2
    launch(x[4:])
    assert len(found) == len(launched) == 2


@pytest.mark.parametrize(("group", "dtype"), [("p6", torch.float32), ("p4", torch.bfloat16)])
def test_buffers_are_filled_before_they_are_read(monkeypatch, group, dtype):
    layer, x, probe = case(group, (5, 3), (1, 5, 7), dtype, stride=2)
    wanted = results(layer, x, probe, TRITON)
    shapes = []

    def poisoned(shape, dtype, device):
        shapes.append(shape)
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(passes, "empty", poisoned)
    for ours, theirs in zip(results(layer, x, probe, TRITON), wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert len(shapes) == 8  # two for each convolution, four for the gradient to the weights


def forget():
    """What was planned with other kernels than those of a test."""
    triton_launches.convolution_run.cache_clear()
    triton_launches.weight_gradient_run.cache_clear()


@pytest.fixture
def forgotten():
    """What is planned with the kernels of a test is not used again."""
    yield
    forget()


def poisoned_without(monkeypatch, kernel):
    """All memory is NaN where nothing was written, and a kernel of that name writes nothing.

    The list that is given back tells how often it was left out.
    """
    full, launch, left_out = torch.full, triton_launch.Launch.__call__, []

    def name(found):
        return getattr(found, "fn", None) or found.function

    def call(self, *tensors):
        if name(self.kernel).__name__ == kernel:
            left_out.append(kernel)
        else:
            launch(self, *tensors)

    monkeypatch.setattr(triton_launch.Launch, "__call__", call)
    monkeypatch.setattr(
        passes,
        "empty",
        lambda shape, dtype, device: full(shape, torch.nan, dtype=dtype, device=device),
    )
    return left_out


@pytest.mark.parametrize("kernel", ["arrange", "analyse", "pack", "weight_gradient", "reduce"])
def test_poison_that_is_read_is_seen(monkeypatch, kernel):
    """The check above says no where one kernel leaves its buffer as it is."""
    layer, x, probe = case("p4")
    left_out = poisoned_without(monkeypatch, kernel)
    found = results(layer, x, probe, TRITON)
    assert left_out
    assert any(tensor.isnan().any() for tensor in found)


PLACES = {
    "plain": {"fields": (9, 5), "shape": (6, 5, 5)},
    "an odd number of images": {"shape": (9, 5, 6)},
    "stride, channels last": {"shape": (9, 6, 6), "stride": 2, "dtype": torch.bfloat16},
    "activated": {"shape": (9, 5, 6)},
}


@pytest.mark.parametrize("name", PLACES)
def test_images_in_groups_and_programs_that_share_pixels_give_the_same(name):
    layer, x, probe = case("p4", **{"fields": (5, 3), **PLACES[name]})
    run = None
    if name == "activated":
        norm = GroupBatchNorm2d(5, "p4", device=DEVICE)

        def run(layer, x):
            return norm_relu_conv(norm, layer, x)

    if name != "plain":
        x = x.contiguous(memory_format=torch.channels_last)
    wanted = results(layer, x, probe, TRITON, run)
    with tiles(bytes=1, splits=3):
        found = results(layer, x, probe, TRITON, run)
    for ours, theirs in zip(found[:2], wanted[:2], strict=True):
        # The interpreter's products round by where a row lies in a matrix, on some processors.
        assert torch.equal(ours, theirs) or (INTERPRETED and error(ours, theirs) <= FLOAT32)
    assert error(found[2], wanted[2]) <= (1e-2 if x.dtype == torch.bfloat16 else FLOAT32)


def test_images_that_lie_elsewhere_are_found_out(monkeypatch):
    layer, x, probe = case("p4", (5, 3), (9, 5, 6))
    wanted = results(layer, x, probe, TRITON)
    monkeypatch.setattr(triton_launches._Group, "of", lambda self, images: images[: self.images])
    with tiles(bytes=1):
        found = results(layer, x, probe, TRITON)
    for ours, theirs in zip(found, wanted, strict=True):
        assert not error(ours, theirs) <= 0.1  # NaN is found out, too


CPU = torch.device("cpu")
LAYERS = [("p8", 40, 512, 16), ("p8", 80, 512, 8), ("p16", 20, 256, 32), ("p8", 20, 64, 32)]


@pytest.mark.parametrize(("group", "fields", "batch", "size"), LAYERS)
def test_what_is_made_of_images_takes_no_more_than_dense_filters(group, fields, batch, size):
    """Beside output and gradient to the input: the rest lies where nothing is written yet."""
    plan = spectral_plan(filter_basis(group), "regular", "regular")
    shape = (batch, fields * plan.basis.group.order, size, size)
    numbers = math.prod(shape)
    strides = (numbers // batch, 1, shape[1] * size, shape[1])
    x = tiling.Like(shape, strides, torch.bfloat16, CPU)
    geometry = Geometry(1, 1, 1, 2, (size, size))
    for adjoint in (False, True):
        made = triton_launches.ConvolutionRun(x, plan.name, adjoint, geometry, fields, True, "tf32")
        filters = max(4 * shape[1] ** 2 * 25, 9 << 19)
        assert 2 * made.own <= filters + (0 if adjoint else 2 * numbers)
        assert len(made.groups) <= (8 if adjoint else 2)
        running = made.tiling.running(x.device)
        rounds = [g.images * size**2 / tiling.Tiles().pixels / running for g in made.groups]
        assert sum(map(math.ceil, rounds)) == math.ceil(sum(rounds))  # none is half empty
        done = 0
        for group_ in made.groups:
            assert group_.first == done
            done += group_.images
            if group_.offset >= 0:
                assert group_.offset >= done * numbers // batch
                assert group_.offset + group_.numbers <= numbers
        assert done == batch
    takes_no_more_for_the_weights(x, plan, geometry, 2 * numbers + filters)


def launches_of(run, *likes):
    """What a run launches: on tensors without memory, and nothing runs."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch.Launch, "__call__", lambda launch, *_: made.append(launch))
        patch.setattr(triton_launch, "compile_together", lambda jobs: None)
        largest = torch.empty(OVERALL + max(like.shape[0] for like in likes), device="meta")
        given = (torch.empty_strided(like.shape, like.strides, device="meta") for like in likes)
        run(*(one for like in given for one in (like, largest)))
    return made


def launched(run, x, *names):
    """The launches of the weight gradient of a layer from ``x`` to the same whose kernels are so
    called.
    """
    launches = launches_of(run, x, x)
    found = [launch for launch in launches if launch.kernel.fn.__name__ in names]
    assert found
    return found


def takes_no_more_for_the_weights(x, plan, geometry, most, *special):
    given = (x, x, plan.name, geometry, "tf32", False)
    with tiles(gradient_fields=tiling.Tiles().gradient_fields, splits=0):
        weight_gradient = triton_launches.WeightGradientRun(*given, *special)
    spectrum = weight_gradient.spectrum + math.prod(weight_gradient.packed)
    partial = 4 * math.prod(weight_gradient.partial) * len(weight_gradient.tiling.layouts)
    assert partial + 2 * spectrum <= most
    assert sum(group.images for group in weight_gradient.groups) == x.shape[0]
    return weight_gradient


@pytest.mark.parametrize(
    ("group", "fields", "batch", "size", "launches"),
    [("p8", 80, 512, 8, 1), ("p16", 20, 256, 32, 1), ("p32", 20, 64, 32, 2)],
)
def test_warp_specialised_sums_take_no_more_either(group, fields, batch, size, launches):
    plan = spectral_plan(filter_basis(group), "regular", "regular")
    channels = fields * plan.basis.group.order
    strides = (channels * size**2, 1, channels * size, channels)
    meta = torch.device("meta")
    x = tiling.Like((batch, channels, size, size), strides, torch.bfloat16, meta)
    geometry = Geometry(1, 1, 1, 2, (size, size))
    most = 2 * batch * channels * size**2 + max(4 * channels**2 * 25, 9 << 19)
    weight_gradient = takes_no_more_for_the_weights(x, plan, geometry, most, True)
    assert len(weight_gradient.tiling.layouts) == launches
    for launch in launched(weight_gradient, x, "weight_gradient"):
        assert math.prod(launch.grid) >= 0.9 * 132  # nearly all processors have work


def test_a_training_step_takes_as_many_launches_as_the_documents_say():
    plan = spectral_plan(filter_basis("p8"), "regular", "regular")
    like = tiling.Like(
        (512, 320, 16, 16), (81920, 1, 5120, 320), torch.bfloat16, torch.device("meta")
    )
    geometry = Geometry(1, 1, 1, 2, (16, 16))
    special = ("tf32", False, True)
    with tiles(gradient_fields=tiling.Tiles().gradient_fields, splits=0):
        runs = [
            triton_launches.ConvolutionRun(like, plan.name, back, geometry, 40, True, *special)
            for back in (False, True)
        ]
        runs.append(triton_launches.WeightGradientRun(like, like, plan.name, geometry, *special))
    weights = tiling.Like((40, 40, plan.weights), (40 * plan.weights, plan.weights, 1), *like[2:])
    operands = [(like, weights), (like, weights), (like, like)]
    largest = 3  # of the input, of the weights, of the output's gradient
    made = [len(launches_of(run, *given)) for run, given in zip(runs, operands, strict=True)]
    assert sum(made) + largest == 33


def test_layers_of_many_fields_have_no_more_programs_than_a_launch_may():
    plan = spectral_plan(filter_basis("p1"), "regular", "regular")
    x = tiling.Like((4, 2048, 8, 8), (131072, 1, 16384, 2048), torch.bfloat16, CPU)
    run = triton_launches.WeightGradientRun(x, x, plan.name, Geometry(1, 1, 1, 2, (8, 8)), "tf32")
    for launch in launched(run, x, "reduce", "weight_gradient"):
        assert max(launch.grid[1:]) <= 65_535


@pytest.mark.parametrize("batch", [250, 255, 5, 3])
def test_groups_begin_where_addresses_are_aligned(batch):
    """Others would need kernels of their own, found anew at every call."""
    plan = spectral_plan(filter_basis("p8"), "regular", "regular")
    x = tiling.Like((batch, 320, 16, 16), (81920, 1, 5120, 320), torch.bfloat16, CPU)
    for adjoint in (False, True):
        geometry = Geometry(1, 1, 1, 2, (16, 16))
        made = triton_launches.ConvolutionRun(x, plan.name, adjoint, geometry, 40, True, "tf32")
        assert all(group.first % 4 == 0 for group in made.groups)
        assert sum(group.images for group in made.groups) == batch


def test_numbers_of_a_spectrum_are_counted_in_32_bits():
    """Groups of images, not single ones, keep below 2^31, however much memory there is."""
    plan = spectral_plan(filter_basis("p16"), "regular", "regular")
    x = torch.empty(64, 8 * 16, 768, 768, dtype=torch.bfloat16, device="meta")
    geometry = Geometry(1, 1, 1, 2, (768, 768))
    like = tiling.Like.of(x)
    made = triton_launches.ConvolutionRun(like, plan.name, False, geometry, 8, True, "tf32")
    numbers = [group.numbers for group in made.groups]
    assert sum(numbers) >= x.numel() > 2**31  # more than could be counted
    assert max(numbers) < 2**31


TILES = {
    "more pixels": {
        "pixels": 64,
        "warps": 8,
    },
    "few fields": {"pixels": 128, "accumulators": 8, "gradient_fields": 2},
}


@pytest.mark.parametrize("chosen", TILES.values(), ids=TILES.keys())
def test_every_way_to_cut_gives_the_same(chosen):
    layer, x, probe = case("p4", (3, 13), dtype=torch.float16)
    wanted = results(layer, x, probe, TRITON)
    with tiles(**chosen):
        found = results(layer, x, probe, TRITON)
    for ours, theirs in zip(found, wanted, strict=True):
        assert error(ours, theirs) <= 1e-3


def two_halves(code, registers, operands, dtype, is_pure, pack):
    """The few instructions on two halves at a time that the kernels are made of, on arrays."""
    from triton.runtime.interpreter import TensorHandle

    values = [operand.handle.data for operand in operands]
    if found := re.search(r"mov\.b32 c, (0x[0-9a-f]+)", code):
        pair = np.array([int(found[1], 16)], dtype=np.uint32).view(np.float16)
        values.insert(1, np.resize(pair, values[0].shape[-1]))
    name = re.search(r"\b(add|sub|mul|fma\.rn|prmt)\b", code)[1]
    if name == "prmt":
        halves = values[0].reshape(*values[0].shape[:-1], -1, 2)
        result = halves[..., ::-1].reshape(values[0].shape)
    else:
        one, other, *more = (value.astype(np.float32) for value in values)
        sums = {"add": one + other, "sub": one - other}
        result = sums.get(name, one * other + sum(more))
    result = np.ascontiguousarray(result.astype(np.float16))
    return type(operands[0])(TensorHandle(result, operands[0].handle.dtype), operands[0].type)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs the instructions themselves")
@pytest.mark.parametrize("group", ["p8", "p4m"])
def test_sums_of_two_halves_at_a_time_are_the_same(monkeypatch, forgotten, group):
    layer, x, probe = case(group, (2, 2), dtype=torch.float16)
    wanted = results(layer, x, probe, TRITON)
    seen = []

    def read(source, layout, names):
        seen.append(source.count("tl.inline_asm_elementwise"))
        return original(source.replace("tl.inline_asm_elementwise", "tl.two_halves"), layout, names)

    original = triton_kernels.read_source
    monkeypatch.setattr(triton_kernels, "read_source", read)
    monkeypatch.setattr(triton_kernels.tl, "two_halves", two_halves, raising=False)
    monkeypatch.setattr(triton_launches, "_f16x2", lambda dtype: True)
    forget()
    found = results(layer, x, probe, TRITON)
    triton_kernels.generated.cache_clear()
    assert min(seen) > 50
    for ours, theirs in zip(found, wanted, strict=True):
        assert error(ours, theirs) <= 1e-3


def test_gradients_of_gradients_equal_the_dense_engine_in_float64():
    layer, x, probe = case("p4", (1, 2), (1, 6, 5))

    def second(layer, x, probe):
        x = x.detach().clone().requires_grad_()
        first = torch.autograd.grad(layer(x), [x, layer.weight], probe.to(x), create_graph=True)
        total = (first[0] ** 3).sum() + (first[1] ** 2).sum() * first[0].sum()
        return torch.autograd.grad(total, [x, layer.weight])

    twin = copy.deepcopy(layer).double().cpu()
    twin.engine = "dense"
    wanted = second(twin, x.double().cpu(), probe.cpu())
    for ours, theirs in zip(second(layer, x, probe), wanted, strict=True):
        assert error(ours, theirs) <= 10 * FLOAT32


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_layout_of_the_input_is_that_of_the_output(layout):
    layer, x, probe = case("p4", shape=(2, 6, 5))
    wanted = results(layer, x, probe, TRITON)
    found = results(layer, x.to(memory_format=layout), probe.to(memory_format=layout), TRITON)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert found[0].is_contiguous(memory_format=layout)
    assert found[1].is_contiguous(memory_format=layout)


def test_a_view_with_gaps_is_read_as_it_lies():
    layer, x, _ = case("p4", shape=(2, 6, 6))
    wide = torch.randn(4, x.shape[1], 12, 12).to(DEVICE)
    view = wide[::2, :, 1:7, ::2]
    assert torch.equal(layer(view), layer(view.contiguous()))


def test_autocast_runs_in_its_own_precision():
    layer, x, probe = case("p4")
    with torch.autocast(DEVICE, torch.bfloat16), econv.engine() as ran:
        found = results(layer, x, probe, TRITON)
    assert ran == [TRITON]
    assert found[0].dtype == torch.bfloat16
    assert [gradient.dtype for gradient in found[1:]] == [torch.float32] * 2
    for ours, theirs in zip(found, exact(layer, x, probe), strict=True):
        assert error(ours, theirs) <= 5e-3


def test_no_images_give_no_output_and_no_gradient():
    layer, x, _ = case("p4")
    out = layer(x[:0].requires_grad_())
    assert out.shape == (0, 12, 7, 6)
    out.sum().backward()
    assert not layer.weight.grad.any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_kernels_do_not_know_runs_otherwise(monkeypatch):
    layer, x, _ = case("p4")
    assert ran_by(copy.deepcopy(layer).double(), x.double())[0] != TRITON
    padded = GroupConv2d(2, 3, "p4", engine="spectral", padding=5, device=DEVICE)
    assert ran_by(padded, x)[0] != TRITON
    assert ran_by(econv.LiftConv2d(2, 3, "p4", engine="spectral", device=DEVICE), x[:, :2])[
        0
    ] not in (TRITON, "dense")
    _, tangent = torch.func.jvp(layer, (x,), (x,))
    assert error(tangent, layer(x)) <= 1e-5
    monkeypatch.setenv("ECONV_TRITON", "0")
    assert ran_by(layer, x)[0] != TRITON


def operands(group="p4"):
    plan = spectral_plan(filter_basis(group), "regular", "regular")
    x = torch.randn(1, 2 * plan.basis.group.order, 5, 6, device=DEVICE)
    g = torch.randn(1, plan.basis.group.order, 3, 3, device=DEVICE)
    weights = torch.randn(1, 2, plan.weights, device=DEVICE)
    return plan, x, g, weights, Geometry(1, 2, 1, 2, (3, 3))


def learned(plan, fields=(1, 2)):
    return torch.randn(*fields, plan.weight_map.shape[0], device=DEVICE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("activated", [False, True])
def test_the_operators_pass_the_checks_of_torch(activated, layout):
    plan, x, g, _, geometry = operands()
    x, weight = x.to(memory_format=layout), learned(plan)
    affine = torch.randn(3, 2, device=DEVICE) if activated else None
    known = Triton()._known(Task(plan, geometry), x, weight, affine)[0]
    rest = (TRITON, plan.name, geometry.numbers, True)
    for wanted in ((True, True), (True, False), (False, True)):
        inputs = (g, x, weight, affine, known, *rest, *wanted)
        torch.library.opcheck(torch.ops.econv.spectral_backward.default, inputs)
    for tensor in (x, weight) if affine is None else (x, weight, affine):
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.econv.spectral.default, (x, weight, affine, *rest))


def convolve(x, weights, plan, geometry, affine=None, into=None):
    """A layer with spectral weights, or its adjoint with an output like ``into``."""
    operands = (x, largest(x, affine), weights, largest(weights.flatten(1)[:, :, None, None]))
    engine = Hopper() if asked_for() else Triton()
    return engine._launch(Task(plan, geometry), *operands, affine, into)


def weight_gradient(x, g, plan, geometry):
    """The gradient to spectral weights."""
    run = triton_launches.weight_gradient_run(
        tiling.Like.of(x),
        tiling.Like.of(g),
        plan.name,
        geometry,
        triton_launches.precision_of(x.dtype),
        False,
        asked_for(),
        tuple(tiling.CHANGES.items()),
    )
    return run(x, largest(x), g, largest(g))


def test_the_adjoint_and_the_weight_gradient_are_those_of_the_layer():
    plan, x, g, weights, geometry = operands("p6")
    back = geometry.transposed(plan.basis.size, x.shape[2:])
    out = convolve(x, weights, plan, geometry)
    adjoint = convolve(g, weights, plan, back, into=x)
    to_weights = weight_gradient(x, g, plan, geometry)
    scalar = (out * g).sum()
    for other in ((adjoint * x).sum(), (to_weights * weights).sum()):
        torch.testing.assert_close(other, scalar, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_layer_is_one_graph_with_the_operator_in_it():
    from torch._dynamo.backends.common import aot_autograd

    layer, x, probe = case("p4", bias=True)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    inputs = [x.requires_grad_(), *layer.parameters()]
    out = compiled(x)
    found = [out, *torch.autograd.grad(out, inputs, probe)]
    for ours, theirs in zip(found, results(layer, x, probe, TRITON), strict=True):
        torch.testing.assert_close(ours, theirs)
    forward, backward = graphs
    assert "econv.spectral.default" in forward
    assert "econv.spectral_backward.default" in backward


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_an_exported_layer_is_made_of_operations_of_torch():
    layer, x, _ = case("p4")
    program = torch.export.export(layer, (x,))
    assert "econv" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_results_repeat_to_the_last_bit():
    layer, x, probe = case("p8", shape=(3, 6, 5), dtype=torch.bfloat16)
    for first, second in zip(*(results(layer, x, probe, TRITON) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


FUSED = TRITON + door.FUSED


class PreActivated(torch.nn.Module):
    """Norm, ReLU, convolution; as one where ``fuse`` says so and it can be had."""

    def __init__(self, norm, conv, fuse=True):
        super().__init__()
        self.norm, self.conv, self.fuse = norm, conv, fuse

    def forward(self, x):
        if self.fuse:
            return norm_relu_conv(self.norm, self.conv, x)
        return self.conv(torch.relu(self.norm(x)))


def pre_activated(group="p4", fields=(2, 3), shape=(2, 7, 6), norm=None, dtype=None, **options):
    """The three modules with numbers that are no defaults, an input and an output's gradient."""
    conv, x, probe = case(group, fields, shape, dtype or torch.float32, **options)
    normed = GroupBatchNorm2d(fields[0], group, device=DEVICE, **(norm or {}))
    with torch.no_grad():
        for tensor in (*normed.parameters(), normed.running_var):
            if tensor is not None:
                tensor.uniform_(0.5, 1.5)
        if normed.bias is not None:
            normed.bias -= 0.7  # of either sign, as the scales are
            normed.weight[0] *= -1
        if normed.running_mean is not None:
            normed.running_mean.normal_()
    return PreActivated(normed, conv), 2 * x + 1, probe


def step(pair, x, probe, engine=TRITON, fuse=True, wanted=None):
    """Output, all gradients, and the statistics after it; what ran is what was wanted."""
    pair = copy.deepcopy(pair)
    pair.fuse, pair.conv.engine = fuse, engine
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with econv.engine() as ran:
        out = pair(x)
    assert ran == [wanted] or wanted is None
    found = torch.autograd.grad(out, [x, *pair.parameters()], probe.to(out))
    return [out, *found, *(b for b in pair.norm.buffers() if b.is_floating_point())]


def exact_step(pair, x, probe):
    pair = copy.deepcopy(pair).double().cpu()
    return step(pair, x.double().cpu(), probe.double().cpu(), "dense", False)


ACTIVATED = {
    "p4": (True, {}),
    "p4, eval": (False, {"bias": True}),
    "p6, stride 2, odd fields": (True, {"group": "p6", "fields": (5, 3), "stride": 2}),
    "p8m, eval": (False, {"group": "p8m", "shape": (1, 6, 7), **LOW}),
    "p16": (True, {"group": "p16", "shape": (1, 5, 4), **LOW}),
    "dilation 2, no padding": (True, {"dilation": 2, "padding": 0, "shape": (1, 9, 11)}),
    "circular, eval": (False, {"padding_mode": "circular", "shape": (1, 5, 6)}),
    "1×1": (True, {"operators": "order<=0"}),
    "mean of all batches": (True, {"norm": {"momentum": None}, **LOW}),
    "no scale and bias": (True, {"norm": {"affine": False}, **LOW}),
    "no running statistics, eval": (False, {"norm": {"track_running_stats": False}, **LOW}),
}


@pytest.mark.parametrize(("training", "options"), ACTIVATED.values(), ids=ACTIVATED.keys())
def test_norm_and_relu_at_the_load_equal_the_modules_in_float64(training, options):
    pair, x, probe = pre_activated(**options)
    pair.train(training)
    x = x.to(memory_format=torch.channels_last if training else torch.contiguous_format)
    wanted = exact_step(pair, x, probe)
    found = step(pair, x, probe, wanted=FUSED)
    assert found[0].is_contiguous(memory_format=memory_format(x))
    for ours, theirs in zip(found, wanted, strict=True):
        assert error(ours, theirs) <= FLOAT32


@pytest.fixture
def dense_is_chosen(monkeypatch):
    monkeypatch.setattr(choice, "_memory", {})
    monkeypatch.setattr(choice, "rule", lambda *given: ENGINES["dense"])


CHOSEN = {
    "p4": (True, {}),
    "p8m, eval": (False, {"group": "p8m", "shape": (1, 6, 7), **LOW}),
    "p6, stride 2, odd fields": (True, {"group": "p6", "fields": (5, 3), "stride": 2}),
}


@pytest.mark.parametrize(("training", "options"), CHOSEN.values(), ids=CHOSEN.keys())
def test_norm_and_relu_are_one_kernel_where_auto_takes_the_dense_engine(
    dense_is_chosen, training, options
):
    pair, x, probe = pre_activated(**options)
    pair.train(training)
    x = x.to(memory_format=torch.channels_last if training else torch.contiguous_format)
    wanted = exact_step(pair, x, probe)
    for ours, theirs in zip(
        step(pair, x, probe, "auto", wanted="dense" + door.FUSED), wanted, strict=True
    ):
        assert error(ours, theirs) <= FLOAT32
    assert step(pair, x, probe, "dense", wanted="dense")  # by name: the modules


def test_what_one_kernel_activates_has_gradients_of_gradients(dense_is_chosen):
    pair, x, _ = pre_activated(fields=(1, 2), shape=(1, 6, 5))
    found = []
    for given in (pair, copy.deepcopy(pair).double()):
        given.conv.engine, image = "auto", x.to(given.norm.weight).requires_grad_()
        with econv.engine() as ran:
            out = given(image)
        parameters = [image, *given.parameters()]
        first = torch.autograd.grad((out**2).sum(), parameters, create_graph=True)
        found.append(torch.autograd.grad(sum((g**2).sum() for g in first), parameters))
        assert ran == ["dense" + (door.FUSED if given is pair else "")]
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) <= 20 * FLOAT32


def test_where_triton_cannot_compile_the_dense_engine_takes_the_modules(
    dense_is_chosen, monkeypatch, caplog
):
    pair, x, probe = pre_activated()
    monkeypatch.setattr(devices, "_TRIED", {})
    monkeypatch.setattr(norm_kernels, "activated", lambda x, affine: 1 / 0)
    for _ in range(2):
        step(pair, x, probe, "auto", wanted="dense")
    assert [record.message for record in caplog.records] == [
        f"norm and ReLU in one kernel failed on {x.device} and is not used again: "
        "ZeroDivisionError: division by zero"
    ]


class Residual(torch.nn.Module):
    """A pre-activated layer beside a shortcut, and a norm and ReLU that a sum follows."""

    def __init__(self, pair):
        super().__init__()
        self.norm, self.conv, self.last = pair.norm, pair.conv, copy.deepcopy(pair.norm)
        self.fuse = True

    def forward(self, x):
        if not self.fuse:
            x = x + self.conv(torch.relu(self.norm(x)))
            return torch.relu(self.last(x)) + x
        out, same = norm_relu_conv(self.norm, self.conv, x, shortcut=True)
        out = out + same
        return norm_relu(self.last, out) + out


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("engine", ["auto", TRITON])
def test_a_shortcut_joins_the_gradient_of_the_norm(dense_is_chosen, training, engine):
    pair, x, _ = pre_activated(fields=(3, 3), **LOW)
    block = Residual(pair).train(training)
    x, probe = (t.to(memory_format=torch.channels_last) for t in (x, torch.randn_like(x)))
    wanted = exact_step(block, x, probe)
    fused = ("dense" if engine == "auto" else TRITON) + door.FUSED
    for ours, theirs in zip(step(block, x, probe, engine, wanted=fused), wanted, strict=True):
        assert error(ours, theirs) <= FLOAT32


@pytest.mark.parametrize("engine", ["auto", TRITON])
def test_gradients_of_gradients_pass_a_shortcut(dense_is_chosen, engine):
    pair, x, _ = pre_activated(fields=(1, 1), shape=(1, 6, 5), **LOW)
    found = []
    for dtype in (torch.float32, torch.float64):
        block = Residual(copy.deepcopy(pair)).to(dtype)
        block.conv.engine, image = "auto" if dtype == torch.float64 else engine, x.to(dtype)
        image.requires_grad_()
        parameters = [image, *block.parameters()]
        first = torch.autograd.grad((block(image) ** 2).sum(), parameters, create_graph=True)
        found.append(torch.autograd.grad(sum((g**2).sum() for g in first), parameters))
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) <= 20 * FLOAT32


EXPANDED = {
    "p4": ("p4", (2, 3), {}),
    "p8m, 3×3": ("p8m", (1, 2), {"operators": "order<=2", "size": 3}),
    "p6, groups": ("p6", (4, 2), {"groups": 2}),
    "1×1": ("p8", (20, 3), {"operators": "order<=0"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "fields", "options"), EXPANDED.values(), ids=EXPANDED.keys())
def test_one_kernel_expands_filters(dense_is_chosen, monkeypatch, group, fields, options, dtype):
    """Where ``auto`` takes the dense engine and channels lie last; by name, torch's operations."""
    layer = GroupConv2d(*fields, group, device=DEVICE, **options)
    x = torch.randn(2, layer.in_channels, 7, 6, device=DEVICE).to(dtype)
    x = x.to(memory_format=torch.channels_last)
    layer, called = layer.to(dtype), []
    expand = filter_kernel.expand

    def counted(*given):
        called.append(given)
        return expand(*given)

    monkeypatch.setattr(filter_kernel, "expand", counted)
    probe = torch.randn_like(layer(x))
    assert called
    called.clear()
    by_torch = results(layer, x, probe, "dense")
    assert not called
    found, wanted = results(layer, x, probe, "auto"), exact(layer, x, probe)
    assert len(called) == 1
    for ours, theirs, truth in zip(found, by_torch, wanted, strict=True):
        factor = 3.0 if INTERPRETED else 1.2  # it cuts digits off where a GPU rounds
        most = FLOAT32 if dtype == torch.float32 else factor * error(theirs, truth)
        assert error(ours, truth) <= most
    image = x.float().requires_grad_()
    twice = []
    for one in (copy.deepcopy(layer).float(), copy.deepcopy(layer).double()):
        given = image.to(one.weight)
        first = torch.autograd.grad((one(given) ** 2).sum(), one.weight, create_graph=True)[0]
        twice.append(torch.autograd.grad((first**2).sum(), [image, one.weight]))
    for ours, theirs in zip(*twice, strict=True):
        assert error(ours, theirs) <= 20 * FLOAT32


STATISTICS = [(0.1, torch.float32, True), (1.0, torch.float32, False), (None, torch.float32, True)]
STATISTICS += [(None, torch.bfloat16, False), (0.1, torch.bfloat16, True)]


@pytest.mark.parametrize(("momentum", "dtype", "affine"), STATISTICS)
def test_running_statistics_are_those_of_the_norm(momentum, dtype, affine):
    """Over several batches, as large means make it hard, and with parameters of another dtype."""
    norm = GroupBatchNorm2d(5, "p6", momentum=momentum, affine=affine, device=DEVICE).to(dtype)
    conv = GroupConv2d(5, 1, "p6", operators="order<=0", device=DEVICE, engine=TRITON)
    pair, twin = PreActivated(norm, conv.to(dtype)), copy.deepcopy(norm).cpu().double()
    versions = [kept._version for kept in (norm.running_mean, norm.running_var)]
    for n in range(3):
        x = (torch.randn(2, 30, 3, 4) * (n + 1) + 100 * n).to(dtype)
        assert ran_by(pair, x.to(DEVICE)) == [FUSED]
        twin(x.double())
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip(norm.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs.double(), rtol=close, atol=close)
    for kept, version in zip((norm.running_mean, norm.running_var), versions, strict=True):
        assert kept._version == version + 3  # autograd is told


# The interpreter cuts digits off where a GPU rounds, which doubles the error of bfloat16.
ACTIVATED_HALF = [("p8", torch.bfloat16, 3.0 if INTERPRETED else 1.5), ("p8", torch.float16, 2.5)]


@pytest.mark.parametrize(("group", "dtype", "factor"), ACTIVATED_HALF)
def test_norm_and_relu_at_the_load_err_little_more_in_half_precisions(group, dtype, factor):
    """In several layers: the gradients of one norm are three numbers each, which chance rules."""
    draws = []
    for _ in range(2 if INTERPRETED else 8):
        pair, x, probe = pre_activated(group, (3, 3), (2, 7, 8), dtype=dtype)
        pair.train(dtype != torch.float16)
        found, dense = step(pair, x, probe, wanted=FUSED), step(pair, x, probe, "dense", False)
        draws.append((found, dense, exact_step(pair, x, probe)))
    found, dense, truth = (
        [torch.cat(tensors) for tensors in zip(*lists, strict=True)]
        for lists in zip(*draws, strict=True)
    )
    err_little_more(found, dense, truth, factor)


def test_what_is_trained_in_float16_runs_as_the_modules_do():
    """What the statistics take off a gradient may be more than float16 holds."""
    pair, x, probe = pre_activated(dtype=torch.float16)
    wanted = step(pair, x, probe, fuse=False)
    found = step(pair, x, probe, wanted=TRITON)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    pair.eval()
    with torch.no_grad(), econv.engine(TRITON) as ran:
        norm_relu_conv(pair.norm, pair.conv, x)
    assert ran == [FUSED]


def err_little_more(found, dense, truth, factor):
    """Than the dense engine: of the norm's few numbers, which chance rules, than at its worst."""
    worst = max(error(theirs, exactly) for theirs, exactly in zip(dense, truth, strict=True))
    for ours, theirs, exactly in zip(found, dense, truth, strict=True):
        assert ours.dtype == theirs.dtype
        least = error(theirs, exactly) if ours.ndim > 1 else worst
        assert error(ours, exactly) <= factor * least


def test_the_check_of_norm_and_relu_sees_a_rim_that_is_not_zero(monkeypatch, forgotten):
    """Zeros belong around what was activated, not around what is to be."""
    pair, x, probe = pre_activated(**LOW)
    pair.eval()
    wanted = exact_step(pair, x, probe)
    read, line = triton_kernels.read_source, "factor = tl.where(inside, factor, 0.0)"

    def without(source, layout, names):
        assert source.count(line) == 1
        return read(source.replace(line, ""), layout, names)

    monkeypatch.setattr(triton_kernels, "read_source", without)
    triton_kernels.generated.cache_clear()
    forget()
    found = step(pair, x, probe, wanted=FUSED)
    triton_kernels.generated.cache_clear()
    wrong = [error(ours, theirs) > 1e-2 for ours, theirs in zip(found, wanted, strict=True)]
    # Output and gradient to the weights; whatever comes from the adjoint has no part in it.
    assert wrong == [True, False, False, False, True, False, False]


LAYOUTS = [("p6", torch.contiguous_format), ("p4", torch.channels_last)]


@pytest.mark.parametrize(("group", "layout"), LAYOUTS)
def test_buffers_of_an_activated_layer_are_filled_before_they_are_read(monkeypatch, group, layout):
    pair, x, probe = pre_activated(group, (5, 3), (2, 5, 7), stride=2, **LOW)
    x = x.to(memory_format=layout)
    wanted = step(pair, x, probe)
    shapes = []

    def poisoned(shape, dtype, device):
        shapes.append(shape)
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(passes, "empty", poisoned)
    for ours, theirs in zip(step(pair, x, probe), wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert len(shapes) == 14  # four more for the gradients of norm and ReLU, two for statistics


def test_activated_views_with_gaps_are_read_as_they_lie():
    plan, x, _, _, geometry = operands()
    weight, affine = learned(plan), torch.randn(3, 2, device=DEVICE)
    wide = torch.randn(4, x.shape[1], 10, 12, device=DEVICE)
    view = wide[::2, :, ::2, ::2]
    results = []
    for images, engine in (
        *((view, TRITON), (view.contiguous(), TRITON)),
        (view.double(), "spectral/torch"),
    ):
        given = [t.detach().to(images.dtype).requires_grad_() for t in (images, weight, affine)]
        out, _ = torch.ops.econv.spectral(*given, engine, plan.name, geometry.numbers, True)
        results.append([out, *torch.autograd.grad(out, given, torch.ones_like(out))])
    for ours, theirs, exact in zip(*results, strict=True):
        # Where sums cancel, both are that far from what float64 gives.
        assert error(ours, theirs) <= max(FLOAT32, error(theirs, exact))
        assert error(theirs, exact) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_largest_numbers_of_activated_images(dtype):
    x = torch.randn(5, 3 * 8, 9, 11).to(device=DEVICE, dtype=dtype)
    x[2, 23, 8, 10] = torch.inf
    x[3, 0, 0, 0] = torch.nan
    affine = torch.tensor([[0.5, 1.0, -2.0], [-1.5, 1.0, 0.3], [-9.0, 3.0, 1.0]]).to(DEVICE)
    x[1], affine[2, 0] = -50.0, -90.0
    for images in layouts(x):
        wanted = Prologue(affine).apply(images.float()).flatten(1).amax(1)
        found = largest(images, affine)
        torch.testing.assert_close(found[OVERALL:], wanted, equal_nan=True)
        assert found[0].isnan()
        assert largest(images[:3], affine)[0] == torch.inf
    assert wanted.tolist()[1:3] == [0.0, torch.inf]


def test_what_is_no_number_passes_norm_and_relu():
    pair, x, _ = pre_activated(shape=(2, 7, 7), dtype=torch.float16)
    pair.eval()
    clean = pair(x)
    x[0, 0, 3, 3] = torch.nan
    out = pair(x)
    assert not out[0, :, 3, 3].isfinite().any()
    assert torch.equal(out[1], clean[1])


def test_an_activated_layer_keeps_its_input_and_a_few_numbers():
    """The modules one after the other keep what was activated as well."""
    pair, x, _ = pre_activated(fields=(3, 3), shape=(2, 8, 8), **LOW)
    x.requires_grad_()
    maps = {}
    for fuse in (True, False):
        pair.fuse, kept = fuse, []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t) or t, lambda t: t
        ):
            pair(x)
        maps[fuse] = {t.untyped_storage().data_ptr() for t in kept if t.numel() >= x.numel()}
    assert maps[True] == {x.untyped_storage().data_ptr()}
    assert len(maps[False]) > 1


def test_gradients_of_gradients_of_an_activated_layer():
    pair, x, probe = pre_activated(fields=(1, 2), shape=(2, 6, 5), **LOW)

    def second(pair, x, probe):
        x = x.detach().clone().requires_grad_()
        inputs = [x, *pair.parameters()]
        first = torch.autograd.grad(pair(x), inputs, probe.to(x), create_graph=True)
        total = sum((gradient**2).sum() for gradient in first) + (first[0] ** 3).sum()
        return torch.autograd.grad(total, inputs)

    twin = copy.deepcopy(pair).double().cpu()
    twin.fuse, twin.conv.engine = False, "dense"
    wanted = second(twin, x.double().cpu(), probe.cpu())
    with econv.engine() as ran:
        found = second(pair, x, probe)
    assert ran == [FUSED]
    for ours, theirs in zip(found, wanted, strict=True):
        assert error(ours, theirs) <= 10 * FLOAT32


def test_blocks_of_a_network_use_it_by_themselves():
    options = {"engine": "spectral", "operators": "order<=2", "size": 3}
    network = econv.models.ResNet("p4", 8, (2, 2, 3), options=options).to(DEVICE)
    x = torch.randn(2, 3, 12, 12).to(DEVICE)
    twin = copy.deepcopy(network).double().cpu()
    with econv.engine() as ran:
        found = network(x)
    # Two of three blocks have a shortcut, which reads the activated map as well.
    assert ran.count(FUSED) == 4
    assert ran.count(TRITON) == 4
    for module in twin.modules():
        if isinstance(module, econv.layers.PDOConv2d):
            module.engine = "dense"
    wanted = twin(x.double().cpu())
    found.sum().backward()
    wanted.sum().backward()
    assert error(found, wanted) <= 10 * FLOAT32
    assert network.state_dict().keys() == twin.state_dict().keys()
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert error(ours.grad, theirs.grad) <= 100 * FLOAT32
    for ours, theirs in zip(network.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "step"), [((2, 5, 7, 6), 1), ((2, 70, 9, 8), 2), ((1, 3, 9, 8), 3), ((1, 8, 2, 2), 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_of_four_pixels_are_those_of_torch(shape, step, dtype):
    x = torch.randn(shape, dtype=dtype, device=DEVICE).to(memory_format=torch.channels_last)
    x.requires_grad_()
    found = shift.mean_of_four(x, step)
    assert type(found.grad_fn).__name__ == "_MeanOfFourBackward"
    wanted = torch.nn.functional.avg_pool2d(x.double(), 2, step)
    probe = torch.randn_like(found)
    ours = (found, *torch.autograd.grad(found, x, probe, create_graph=True))
    theirs = (wanted, *torch.autograd.grad(wanted, x, probe.double()))
    eps = torch.finfo(dtype).eps
    for one, other in zip(ours, theirs, strict=True):
        assert one.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(one.double(), other.double(), rtol=eps, atol=eps)


def test_the_gradient_of_means_of_four_has_a_gradient():
    x = torch.randn(2, 3, 6, 5, device=DEVICE).to(memory_format=torch.channels_last)
    results = []
    for mean in (shift.mean_of_four, lambda x: torch.nn.functional.avg_pool2d(x, 2, 1)):
        ours = x.detach().requires_grad_()
        (first,) = torch.autograd.grad((mean(ours) ** 3).sum(), ours, create_graph=True)
        results.append(torch.autograd.grad((first**2).sum(), ours)[0])
    torch.testing.assert_close(*results)


def test_means_of_four_without_kernels(monkeypatch):
    x = torch.randn(1, 3, 4, 4, device=DEVICE, requires_grad=True)
    last = x.to(memory_format=torch.channels_last)
    assert type(shift.mean_of_four(last).grad_fn).__name__ == "_MeanOfFourBackward"
    monkeypatch.setenv("ECONV_TRITON", "0")
    assert type(shift.mean_of_four(last).grad_fn).__name__ == "AvgPool2DBackward0"


WINDOWS = [((5, 5), (2, 2)), ((4, 3), (2, 1)), ((4, 4), (1, 1)), ((1, 2), (0, 0))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("taps", "padding"), WINDOWS)
def test_means_of_pixels(taps, padding, dtype):
    """By one kernel, with gradients of every order, as by torch where channels lie first."""
    x = torch.randn(2, 5, 6, 7, device=DEVICE).to(dtype)
    lines = [torch.rand(count, device=DEVICE) + 0.1 for count in taps]
    found = []
    for layout in (torch.channels_last, torch.contiguous_format):
        image = x.clone(memory_format=layout).requires_grad_()
        y = blur.mean_of_pixels(image, *lines, taps, padding)
        assert (type(y.grad_fn).__name__ == "_MeanBackward") == (layout is torch.channels_last)
        first = torch.autograd.grad((y**2).sum(), image, create_graph=True)[0]
        found.append([y, first, torch.autograd.grad((first**2).sum(), image)[0]])
    for ours, theirs in zip(*found, strict=True):
        assert ours.is_contiguous(memory_format=torch.channels_last)
        assert error(ours, theirs) <= (FLOAT32 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_means_of_pixels_where_the_kernel_fails(monkeypatch, caplog, when):
    def fail(*operands):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(devices, "_TRIED", {})
    x = torch.randn(2, 3, 6, 5, device=DEVICE).to(memory_format=torch.channels_last)
    line, x = torch.tensor([0.25, 0.5, 0.25], device=DEVICE), x.requires_grad_()
    if when == "forward":
        monkeypatch.setattr(blur_kernel, "launch", fail)
    found = blur.mean_of_pixels(x, line, line, (3, 3), (1, 1))
    monkeypatch.setattr(blur_kernel, "launch", fail)
    found = [found, *torch.autograd.grad(found.square().sum(), x)]
    (record,) = caplog.records
    assert "RuntimeError: no such instruction" in record.getMessage()
    y = blur.mean_of_pixels(x, line, line, (3, 3), (1, 1))
    assert type(y.grad_fn).__name__ != "_MeanBackward"
    for ours, theirs in zip(found, [y, *torch.autograd.grad(y.square().sum(), x)], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_means_of_four_where_the_kernel_fails(monkeypatch, caplog, when, step):
    def fail(*operands):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(devices, "_TRIED", {})
    x = torch.randn(2, 3, 6, 5, device=DEVICE).to(memory_format=torch.channels_last)
    x.requires_grad_()
    found = []
    with monkeypatch.context() as patched:
        if when == "forward":
            patched.setattr(shift_kernel, "launch", fail)
        y = shift.mean_of_four(x, step)
        patched.setattr(shift_kernel, "launch", fail)
        found += [y, *torch.autograd.grad(y.square().sum(), x, create_graph=True)]
        found += torch.autograd.grad(found[-1].square().sum(), x)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("econv.engines", "WARNING")
    assert "RuntimeError: no such instruction" in record.getMessage()
    assert type(shift.mean_of_four(x).grad_fn).__name__ == "AvgPool2DBackward0"
    y = torch.nn.functional.avg_pool2d(x, 2, step)
    wanted = [y, *torch.autograd.grad(y.square().sum(), x, create_graph=True)]
    wanted += torch.autograd.grad(wanted[-1].square().sum(), x)
    torch.testing.assert_close(found, wanted)
