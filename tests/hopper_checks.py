"""Checks of the kernels for Hopper GPUs, which `gluon_interpreter` runs: see `test_hopper`."""

import inspect
import itertools
import math
import re
import threading
from functools import partial

import pytest
import torch

import econv
from econv import GroupConv2d, filter_basis
from econv.engines.problem import Geometry
from econv.engines.spectral import tiling
from econv.engines.spectral.hopper import kernels as hopper_kernels
from econv.engines.spectral.hopper import schedule
from econv.engines.spectral.hopper.schedule import early_taps, fits, magnitudes
from econv.engines.spectral.triton import kernels as triton_kernels
from econv.engines.spectral.triton.scheme import halves, scheme
from econv.gpu import launch as triton_launch
from econv.gpu import passes
from econv.plan import spectral_plan
from gluon_interpreter import Deadlock, Gluon, OutOfBounds, Race
from triton_checks import (
    LOW,
    convolve,
    error,
    exact,
    forget,
    kernels_run,
    learned,
    poisoned_without,
    pytestmark,
    results,
    tiles,
    weight_gradient,
)

__all__ = ["kernels_run", "pytestmark"]  # the former runs around every check, the latter marks them


def forget_all():
    forget()
    hopper_kernels.generated.cache_clear()


def names(gluon):
    borrowed = {name: getattr(triton_kernels, name).fn for name in ("exponent", "two_to")}
    return gluon.names(**borrowed)


def interpreting(patch, seed=0, together=1):
    """Warp-specialised kernels are run by a new interpreter.

    ``together`` of their programs run at a time, so that each has several tiles.
    """
    gluon = Gluon(seed)

    def read(source, layout):
        return triton_kernels.read_source(source, layout, names(gluon))

    patch.setattr(hopper_kernels, "_read", read)
    patch.setattr(tiling, "concurrent_programs", lambda device, warps=8: together)
    forget_all()
    return gluon


@pytest.fixture
def interpret(monkeypatch):
    """`interpreting`, as long as a check runs."""
    yield partial(interpreting, monkeypatch)
    forget_all()


def case(group="p4", fields=(5, 6), shape=(2, 5, 7), dtype=torch.float16, **options):
    """A layer, its input and its output's gradient."""
    layer = GroupConv2d(*fields, group, engine="spectral", **options).to(dtype)
    x = torch.randn(shape[0], layer.in_channels, *shape[1:]).to(dtype)
    x = x.to(memory_format=torch.channels_last)
    layer.engine = "dense"
    probe = torch.randn_like(layer(x))
    return layer, x, probe


def warp_specialised(layer, x, probe, **chosen):
    with tiles(warp_specialised=1, **chosen), econv.engine() as ran:
        found = results(layer, x, probe, "spectral")
    assert set(ran) == {"spectral/hopper"}
    return found


def err_little_more(found, layer, x, probe, factor):
    dense, truth = results(layer, x, probe, "dense"), exact(layer, x, probe)
    for ours, theirs, exactly in zip(found, dense, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, exactly) <= factor * error(theirs, exactly)


CASES = {
    "p4": {},
    "p8, stride 2": {"group": "p8", "stride": 2, "fields": (5, 3)},
    "p16": {"group": "p16", "fields": (3, 2)},
    "p8m": {"group": "p8m", "fields": (2, 3)},
    "p6, bfloat16": {"group": "p6", "dtype": torch.bfloat16},
    "p4m, dilation 2": {"group": "p4m", "dilation": 2, "shape": (1, 9, 9), "fields": (2, 3)},
    "p8, 3×3": {"group": "p8", **LOW},
    "p16, 3×3": {"group": "p16", "fields": (2, 5), **LOW},
    "p8m, 3×3, stride 2": {"group": "p8m", "fields": (5, 3), "stride": 2, **LOW},
    "p3, 7×7": {"group": "p3", "size": 7, "fields": (2, 2), "shape": (2, 7, 8)},
    "p2, no padding": {"group": "p2", "padding": 0, "shape": (2, 9, 10)},
    "p8m, rectangles": {"group": "p8m", "fields": (2, 3), "spacing": (0.5, 0.8)},
    "order 0": {"operators": "order<=0", "bias": True},
    "stride 3, dilation 2": {"stride": 3, "dilation": 2, "padding": 3, "shape": (2, 10, 12), **LOW},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients_err_little_more_than_the_dense_engine(interpret, options):
    gluon = interpret()
    layer, x, probe = case(**options)
    found = warp_specialised(layer, x, probe)
    assert gluon.launches.keys() == {"forward", "weight_gradient"}
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    err_little_more(found, layer, x, probe, 1.5 if x.dtype == torch.bfloat16 else 2.5)


HALVES = {
    "p8": {"group": "p8", "fields": (5, 3)},
    "p16, bfloat16": {"group": "p16", "fields": (3, 2), "dtype": torch.bfloat16},
    "p32": {"group": "p32", "fields": (2, 2), "shape": (1, 5, 6)},
    "p8m, stride 2": {"group": "p8m", "fields": (2, 3), "stride": 2},
    "p4m, 3×3": {"group": "p4m", "fields": (2, 5), **LOW},
    "p12": {"group": "p12", "fields": (2, 2), "shape": (1, 5, 5)},
    "p28": {"group": "p28", "fields": (2, 1), "shape": (1, 5, 5)},
    "p32, more fields": {"group": "p32", "fields": (1, 8), "shape": (1, 5, 5)},
    "p16m, more fields": {"group": "p16m", "fields": (1, 8), "shape": (1, 5, 5)},
    "p32, 3×3": {"group": "p32", "fields": (1, 2), "shape": (1, 5, 5), **LOW},
    "p16m, 3×3": {"group": "p16m", "fields": (1, 2), "shape": (1, 5, 5), **LOW},
}


# Of which others have the group, its kind or the size.
LARGER = ("p28", "p32", "p32, 3×3", "p16m, more fields")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * (name in LARGER))
        for name, options in HALVES.items()
    ],
)
def test_two_launches_make_a_layer_by_halves(interpret, options):
    """The second one finds what the first one left in the output."""
    gluon = interpret()
    layer, x, probe = case(**options)
    found = warp_specialised(layer, x, probe, halves=1)
    assert gluon.launches["forward"] == 4  # two for the layer, two for its adjoint
    err_little_more(found, layer, x, probe, 1.5 if x.dtype == torch.bfloat16 else 2.5)


@pytest.mark.parametrize("group", ["p8", "p12", "p16", "p24", "p28", "p32", "p4m", "p8m", "p16m"])
@pytest.mark.parametrize("options", [{}, LOW], ids=["5×5", "3×3"])
def test_halves_are_alike_and_have_everything_once(group, options):
    """Launches of both are cut as those of the first."""
    plan = spectral_plan(filter_basis(group, **options), "regular", "regular")
    whole = scheme(plan, 8)
    both = halves(whole)
    one, two = both
    assert (one.batch, one.inner, one.pieces) == (two.batch, two.inner, two.pieces)
    for fields in (1, 5, 8, 20, 33, 64):
        chosen = tiling.Tiles(everywhere=1, halves=1)
        for kind in (tiling.convolution_tiling, tiling.weight_gradient_tiling):
            assert kind(whole, fields, chosen, True).layouts in (both, (whole,))
    slots = [slot for half in both for slot in half.slots if slot >= 0]
    assert sorted(slots) == list(range(plan.analysis.shape[0]))
    owned = [half.owners[0] for half in both]
    assert (sum((where >= 0).any(axis=1) * 1 for where in owned) == 1).all()
    assert (sum((where[:, 0] > -2) * 1 for where in owned) == 1).all()
    for chunk in range(len(one.lists)):  # p24 fills three of four
        assert not one.derivatives(chunk) & two.derivatives(chunk)


def test_what_is_not_a_number_scales_by_one():
    source = inspect.getsource(triton_kernels.exponent.fn)
    assert f"found == 128, {schedule.HEADROOM}, " in source


@pytest.mark.parametrize("group", ["p28", "p32", "p14m", "p16m"])
def test_many_targets_find_few_features_in_a_chunk(group):
    """Most chunks have at most eight of each target: the products of the others are left out."""
    both = halves(scheme(spectral_plan(filter_basis(group), "regular", "regular"), 8))
    there = [half.filled(chunk, half.pieces) for half in both for chunk in range(half.chunks)]
    assert {tuple(pieces) for pieces in there} == {(0,), (0, 1)}
    assert sum(pieces == [0] for pieces in there) >= 5
    for half in both:  # long chunks come first, so that the loops are two at most
        lengths = [len(half.filled(c, (8, 4))) for c in range(half.chunks)]
        assert sum(a != b for a, b in itertools.pairwise(lengths)) <= 2


@pytest.mark.parametrize("group", ["p8", "p16", "p28", "p32", "p8m", "p16m"])
def test_sums_have_no_padding(group):
    layout = scheme(spectral_plan(filter_basis(group), "regular", "regular"), 8)
    for one in (layout, *halves(layout)):
        listed = [[f for rows in one.lists for f in rows[t]] for t in range(one.batch)]
        features = [f for row in listed for f in row if f >= 0]
        assert len(set(features)) == len(features) == one.count
        numbers = one.unpadded.ravel().tolist()
        assert [n for n in numbers if n >= 0] == list(range(one.count))
        assert [n >= 0 for n in numbers] == [f >= 0 for row in listed for f in row]


def test_slots_wait_in_outputs_of_any_magnitude(interpret):
    """Images and weights that are tiny or zero, and float16 near its largest number."""
    layer, x, _ = case("p8", (2, 3), (2, 6, 6), torch.bfloat16)
    with torch.no_grad():
        layer.weight.mul_(1e-3)
    x = x.clone()
    x[1] = 0
    large, ones, _ = case("p32", (2, 2), (1, 5, 5), operators="order<=0")
    with torch.no_grad():
        large.weight.fill_(1.0)
    ones = torch.ones_like(ones)
    ones = ones * (60_000 / large(ones).max())
    interpret()
    layer.engine = large.engine = "spectral"
    with tiles(warp_specialised=1, halves=1):
        found, filled = layer(x), large(ones)
    assert found[0].any()
    assert not found[1].any()
    assert error(filled, torch.full_like(filled, 60_000)) <= 5e-3


@pytest.mark.parametrize("sizes", [[16], [32, 64], [32, 32, 16]])
def test_matrices_are_copied_from_where_they_lie(sizes):
    """One after the other; descriptors that were made before stay where they are."""
    layout, rows = scheme(SMALL, 8), 16
    copies = hopper_kernels.Copies(layout, (8, 4), rows, sizes)
    memories = [torch.zeros(rows, sum(sizes) + 1, dtype=torch.float16) for _ in range(2)]
    for memory, found in [(memory, copies(memory)) for memory in memories]:
        address, descriptors = memory.data_ptr(), iter(found)
        for size in sizes:
            for part in (8, 4):
                one = next(descriptors)
                assert one.base.data_ptr() == address
                assert one.base.numel() == rows * size
                assert list(one.shape) == [rows, size]
                assert list(one.strides) == [size, 1]
                assert one.block_shape == [2 * part * layout.batch, size]
            address += 2 * rows * size
        assert next(descriptors, None) is None


def test_halves_in_groups_of_images_find_what_is_theirs(interpret, monkeypatch):
    layer, x, probe = case("p8", (5, 6), (6, 5, 5), torch.bfloat16)
    interpret()
    wanted = warp_specialised(layer, x, probe, halves=1)
    monkeypatch.setattr(
        passes,
        "empty",
        lambda shape, dtype, device: torch.full(shape, torch.nan, dtype=dtype, device=device),
    )
    for chosen in ({"bytes": 1, "splits": 2}, {"splits": 2}):
        interpret(1, together=2)
        found = warp_specialised(layer, x, probe, halves=1, **chosen)
        for ours, theirs in zip(found[:2], wanted[:2], strict=True):
            assert torch.equal(ours, theirs)
        assert error(found[2], wanted[2]) <= 1e-3


CUTS = [
    {"splits": 3},
    {"bytes": 1, "splits": 2},
]


def test_every_way_to_cut_gives_the_same(interpret):
    layer, x, probe = case("p4", (5, 9), (9, 4, 4), **LOW)
    interpret()
    wanted = warp_specialised(layer, x, probe)
    for chosen in CUTS:
        gluon = interpret(1, together=2)
        found = warp_specialised(layer, x, probe, **chosen)
        for ours, theirs in zip(found[:2], wanted[:2], strict=True):
            assert torch.equal(ours, theirs)
        assert error(found[2], wanted[2]) <= 1e-3
        assert sum(gluon.launches.values()) > 4


def test_more_fields_than_one_program_holds(interpret, monkeypatch):
    """As few as four at a time, and of the last four not all are there."""
    layer, x, probe = case("p16", (5, 9), (1, 5, 6), **LOW)
    monkeypatch.setattr(tiling, "_CONSUMER_ACCUMULATORS", 4 * 16)
    gluon = interpret(2)
    found = warp_specialised(layer, x, probe)
    assert gluon.launches["forward"] == 3 + 2  # the layer and its adjoint
    err_little_more(found, layer, x, probe, 2.5)


def test_taps_that_are_loaded_early_have_names_of_their_own():
    """Whatever the size; the farthest of a stencil are too small to be missed by other checks."""
    basis = filter_basis("p4", "order<=2", "gaussian", 11)
    layout = scheme(spectral_plan(basis, "regular", "regular"), 8)
    found = early_taps(layout)
    assert len(found) == len(set(found.values())) == 11


@pytest.mark.parametrize("group", ["p1", "p2", "p3", "p4", "p6", "p8", "p16", "p8m"])
def test_sums_of_every_cut_fit_into_registers_and_into_a_product(group):
    layout = scheme(spectral_plan(filter_basis(group), "regular", "regular"), 8)
    for fields in (1, 4, 20, 37, 73, 76, 140, 152, 400):
        cuts = list(tiling.cuts(fields, layout))
        assert cuts
        for found in cuts:
            assert found.padded >= fields
            assert found.padded - fields < sum(found.parts)
            assert 2 * max(found.parts) <= 256
            assert 2 * layout.batch * sum(found.parts) <= 320


@pytest.mark.parametrize("operators", ["paper", "order<=2", "order<=4"])
@pytest.mark.parametrize("group", ["p3", "p4", "p8", "p12", "p16", "p32", "p4m", "p8m", "p16m"])
def test_derivatives_and_features_are_never_too_large_for_halves(group, operators):
    layout = scheme(spectral_plan(filter_basis(group, operators), "regular", "regular"), 8)
    assert fits(layout)


def test_what_would_be_too_large_for_float16_is_not_warp_specialised(monkeypatch):
    layout = scheme(spectral_plan(filter_basis("p32"), "regular", "regular"), 8)
    most = max(max(magnitudes(layout, chunk)) for chunk in range(len(layout.lists)))
    assert 7 < math.log2(most) < 8
    monkeypatch.setattr(schedule, "HEADROOM", 8)
    assert not fits(layout)
    given = (layout, 8, tiling.Tiles(everywhere=1), True)
    assert not tiling.convolution_tiling(*given).warp_specialised
    monkeypatch.undo()
    assert tiling.convolution_tiling(*given).warp_specialised


class Compiled:
    """A kernel that notes what it is compiled for."""

    def __init__(self, error=None, together=None):
        self.error, self.together, self.calls = error, together, []

    def warmup(self, *arguments, grid, **options):
        self.calls.append((arguments, grid, options))
        if self.together:
            self.together.wait()
        if self.error:
            raise self.error


def test_kernels_are_compiled_together_and_each_once(monkeypatch):
    monkeypatch.setattr(triton_launch.triton, "JITFunction", Compiled)
    together = threading.Barrier(2, timeout=10)
    one, two = Compiled(together=together), Compiled(together=together)
    x = torch.zeros(1)

    def jobs(*kernels):
        launches = [triton_launch.Launch(k, (3,), (5, 7), BP=64, num_warps=4) for k in kernels]
        return [(launch, (x, "y")) for launch in launches]

    first = jobs(one, one, two)
    triton_launch.compile_together(first)
    wanted = ((x, "y", 5, 7), (3, 1, 1), {"BP": 64, "num_warps": 4})
    assert one.calls == two.calls == [wanted]
    triton_launch.compile_together(first)
    triton_launch.compile_together([*first, *jobs(two)])  # one is left, which its launch compiles
    assert one.calls == two.calls == [wanted]
    with pytest.raises(RuntimeError, match="no room"):
        triton_launch.compile_together(jobs(one, Compiled(RuntimeError("no room"), together)))


def test_images_of_any_magnitude_keep_their_digits(interpret):
    layer, x, _ = case("p4", (2, 3), (4, 6, 6), torch.bfloat16)
    scales = torch.tensor([1.0, 1e-20, 1e20, 0.0])[:, None, None, None]
    scaled = (x * scales).bfloat16()
    interpret()
    layer.engine = "spectral"
    with tiles(warp_specialised=1):
        found = layer(scaled).double()
    layer.engine = "dense"
    wanted = layer.double()(scaled.double())
    for scale, ours, theirs in zip(scales.flatten().tolist()[:3], found, wanted, strict=False):
        assert error(ours / scale, theirs / scale) <= 5e-3
    assert not found[3].any()


def test_buffers_are_filled_before_they_are_read(interpret, monkeypatch):
    layer, x, probe = case("p6", (5, 3), (1, 5, 7), stride=2, **LOW)
    interpret()
    wanted = warp_specialised(layer, x, probe)
    monkeypatch.setattr(
        passes,
        "empty",
        lambda shape, dtype, device: torch.full(shape, torch.nan, dtype=dtype, device=device),
    )
    for ours, theirs in zip(warp_specialised(layer, x, probe), wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kernel", ["arrange", "analyse", "pack", "weight_gradient", "reduce"])
def test_poison_that_is_read_is_seen(interpret, monkeypatch, kernel):
    layer, x, probe = case("p4", (2, 2), (1, 5, 5), **LOW)
    interpret()
    left_out = poisoned_without(monkeypatch, kernel)
    found = warp_specialised(layer, x, probe)
    assert left_out
    assert any(tensor.isnan().any() for tensor in found)


def test_an_activated_input_gives_what_the_other_kernels_do(interpret):
    plan = spectral_plan(filter_basis("p4", **LOW), "regular", "regular")
    x = torch.randn(2, 3 * 4, 5, 6).half().to(memory_format=torch.channels_last)
    weight, affine = learned(plan, (2, 3)), torch.randn(3, 3)
    geometry = Geometry(1, 1, 1, 1, (5, 6))
    made = []
    for special in (0, 1):
        gluon = interpret()
        given = [t.detach().requires_grad_() for t in (x, weight, affine)]
        name = "spectral/hopper" if special else "spectral/triton"
        with tiles(warp_specialised=special):
            out, _ = torch.ops.econv.spectral(*given, name, plan.name, geometry.numbers, True)
            made.append([out, *torch.autograd.grad(out, given, torch.ones_like(out))])
        assert gluon.launches.keys() == ({"forward", "weight_gradient"} if special else set())
    for ours, theirs in zip(made[1], made[0], strict=True):
        assert error(ours, theirs) <= 2e-3


SMALL = spectral_plan(filter_basis("p4", **LOW), "regular", "regular")
AROUND = Geometry(1, 1, 1, 1, (6, 6))


@pytest.fixture(scope="module")
def small():
    """A layer and its gradient on a few stages: their text, and what they are launched with."""
    generator = torch.Generator().manual_seed(3)
    x, g = (torch.randn(20, 4 * n, 6, 6, generator=generator).half() for n in (9, 2))
    x, g = (t.to(memory_format=torch.channels_last) for t in (x, g))
    weights = torch.randn(2, 9, SMALL.weights, generator=generator)
    found = {}
    with pytest.MonkeyPatch.context() as patch, tiles(warp_specialised=1, splits=2):
        gluon, sources = interpreting(patch, together=1), []
        read = hopper_kernels._read
        patch.setattr(hopper_kernels, "_read", lambda *given: sources.append(given) or read(*given))
        convolve(x[:6], weights, SMALL, AROUND)
        found["forward"] = (sources[-1], gluon.launched)
        weight_gradient(x, g, SMALL, AROUND)
        found["weight_gradient"] = (sources[-1], gluon.launched)
    forget_all()
    return found


def launched(small, kernel, change=lambda source: source, seed=0, **constants):
    """Launch a kernel again, with another text or other constants; what it writes."""
    (source, layout), (grid, given, options) = small[kernel]
    space = triton_kernels.read_source(change(source), layout, names(Gluon(seed)))
    space[kernel][grid](*given, **{**options, **constants})
    return given[space[kernel].names.index(WRITTEN[kernel])].clone()


WRITTEN = {"forward": "y", "weight_gradient": "partial"}


@pytest.mark.parametrize("kernel", WRITTEN)
def test_results_depend_neither_on_who_goes_first_nor_on_the_number_of_stages(small, kernel):
    wanted = launched(small, kernel)
    for seed in range(1, 7):
        stages = {"STAGES": 2 + seed % 2} | (
            {"READY": 2 + seed % 3} if kernel == "weight_gradient" else {}
        )
        assert torch.equal(launched(small, kernel, seed=seed, **stages), wanted)


def changed(pattern, replacement):
    """To the text of a kernel, which has to have what is replaced."""

    def change(source):
        found, count = re.subn(pattern, replacement, source)
        assert count
        return found

    return change


FILL, SAY = r"mbarrier\.wait\(empty\..*", r"mbarrier\.arrive\(full\..*"
AWAIT, EMPTY = r"\w.* = warpgroup_mma_wait.*", r"mbarrier\.arrive\(empty\..*"
LAST = r"\w.* = warpgroup_mma_wait\(0.*"
LINES = r"((?:\n.*)*?)\n +"
LATE, STILL, NOBODY = "may not be written yet", "may still read it", "that nobody wrote"
EARLY = f"{LATE}|{NOBODY}"
WRONG = {
    "full is said before the stores": (f"({FILL}){LINES}({SAY})", r"\1; \3\2", Race, EARLY),
    "no fence after stores": (r"\n {8,}fence_async_shared\(\)", "", Race, LATE),
    "no fence after barriers": (
        r"\n    fence_async_shared\(\)\n",
        "\n",
        Race,
        "before that is initialised",
    ),
    "threads of a partition do not wait": (
        r"thread_barrier\(\)\n( +mbarrier)",
        r"pass\n\1",
        Race,
        LATE,
    ),
    "stages are filled unasked": (
        FILL,
        "pass",
        (Race, Deadlock),
        f"{STILL}|{EARLY}|waits for",
    ),
    "stages are filled after a phase": (r"phase \^ 1", "phase", Deadlock, "waits for phase 0"),
    "features are read unasked": (r"mbarrier\.wait\(full.*", "pass", Race, EARLY),
    "features are read a phase early": (
        r"(mbarrier\.wait\(full\.index\(stage\), .*)\)",
        r"\1 ^ 1)",
        (Race, Deadlock),
        f"{EARLY}|waits for phase 1",
    ),
    "weights are read unasked": (r"mbarrier\.wait\(ready.*", "pass", Race, EARLY),
    "empty is said while products read": (f"({LAST}){LINES}({EMPTY})", r"\3; \1\2", Race, STILL),
    "weights are copied while products read": (
        f"({LAST}){LINES}(later.*)\n +(issue.*)",
        r"\3; \4; \1\2",
        Race,
        STILL,
    ),
    "the last products are not waited for": (
        r"mma_wait\(0,",
        "mma_wait(1,",
        Race,
        "a wait for other products",
    ),
    "sums are used before they are made": (
        AWAIT,
        "pass",
        (Race, AttributeError, TypeError),
        "may still read it|'Product'",
    ),
    "one partition speaks for both": (
        "count=2",
        "count=1",
        (Race, Deadlock),
        f"{EARLY}|waits|arrive",
    ),
    "nobody empties": (EMPTY, "pass", Deadlock, "waits for phase"),
    "too few bytes": (r"(expect\(.*), \d+,", r"\1, 64,", Deadlock, "-.* bytes to come"),
    "weights that are not copied": (r" +tma.*\n(?! *tma)", "", Deadlock, "bytes to come"),
    "weights that nobody waits for": (
        r"later < (\w+)",
        r"later < \1 + 1",
        (Race, OutOfBounds),
        "nobody waited for|from .* on of",
    ),
    "taps beyond the grid": ("offset [+]=", "offset += pitch * 99 +", OutOfBounds, "a load at"),
    "pixels beyond the images": (r"p = gl\.where.*", "p = pixel * 9", OutOfBounds, "a load at"),
    "an unknown instruction": (r"add\.f16x2", "max.f16x2", NotImplementedError, "unknown instr"),
    "barriers too few": (
        r"gl\.static_range\((\w+)\):\n +mbar",
        r"range(1):\n        mbar",
        RuntimeError,
        "not init",
    ),
}


@pytest.mark.parametrize("kernel", ["forward", "weight_gradient"])
@pytest.mark.parametrize(("pattern", "other", "error", "why"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_barriers_and_addresses_is_found(
    small, kernel, pattern, other, error, why
):
    """Whoever goes first: not by chance."""
    for seed in range(3):
        with pytest.raises(error, match=why):
            launched(small, kernel, changed(pattern, other), seed)


STORES = {
    "pixels": ("forward", "inside = pixel < pixels", "inside = pixel > -1", "a store at"),
    "fields": ("forward", r" & \(o < out_fields\)", " & (o < 9)", "a store at|at one address"),
    "features": ("weight_gradient", "number < 12", "number < 14", "at one address|another"),
    "splits": (
        "weight_gradient",
        r"into = partial .*",
        "into = partial",
        "another one of the launch",
    ),
}


@pytest.mark.parametrize(("kernel", "pattern", "other", "why"), STORES.values(), ids=STORES.keys())
def test_stores_that_are_not_a_programs_own_are_found(small, kernel, pattern, other, why):
    with pytest.raises((Race, OutOfBounds), match=why):
        launched(small, kernel, changed(pattern, other))


SUMS = {
    "a sign": ("forward", "0xbc003c00", "0x3c003c00"),
    "a pair": ("weight_gradient", "0x5432", "0x7610"),
    "a tap": ("forward", r"centre \+ -1 \* column", "centre + 1 * column"),
    "a scale": ("weight_gradient", r"two_to\(power", "two_to(1 + power"),
}


@pytest.mark.parametrize(("kernel", "pattern", "other"), SUMS.values(), ids=SUMS.keys())
def test_sums_that_are_wrong_are_seen(small, kernel, pattern, other):
    wanted = launched(small, kernel)
    found = launched(small, kernel, changed(pattern, other))
    assert error(found, wanted) > 1e-2
