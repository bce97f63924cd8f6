"""What the cost model counts of the kernels for GPUs is what would be launched."""

import pytest
import torch
from econv.engines.kernel_counts import Kernels, KernelsWithRoles

import econv
from econv.engines import kernel_counts
from econv.engines.problem import Geometry
from econv.engines.spectral.triton.scheme import scheme
from econv.plan import spectral_plan

cases = pytest.importorskip("engine_cases", reason="no benchmarks beside the tests")
GRID = [*cases.cuda_grid(), *cases.TARGETS["cuda"], *cases.GROWTH]
SHAPES = sorted({case._replace(stride=1) for case in GRID if case.kind == "group"})
NARROW = [case for case in SHAPES if case.dtype != "float32"]
OTHERS = [
    cases.Case(group, fields, 2 * fields, 8, 16, operators=operators, dtype="bfloat16")
    for group, fields, operators in [
        ("p3", 20, "paper"),
        ("p5", 12, "paper"),
        ("p8", 12, "order<=2"),
        ("p16", 28, "paper"),
        ("p32", 6, "paper"),
        ("p24", 6, "paper"),
        ("p16m", 6, "paper"),
        ("p64", 3, "paper"),
    ]
]


def launched(case, roles=False):
    """The launches of a layer, of its adjoint and of the gradient to its weights.

    With roles of warps where an H200 has them for images whose channels lie last; or without.
    """
    pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")
    from econv.engines.spectral.triton.launches import ConvolutionRun, GramRun
    from econv.engines.spectral.triton.tiles import Like

    layer = case.layer("meta")
    plan = spectral_plan(layer.basis, "regular", "regular")
    geometry = Geometry.of(plan.basis.size, case.size, case.size, 1, layer.padding, 1)
    back = geometry.transposed(plan.basis.size, case.size, case.size)
    x, y = (
        Like.of(torch.empty(case.batch, channels, case.size, case.size, device="meta"))
        for channels in (layer.in_channels, layer.out_channels)
    )
    dtype = cases.DTYPES[case.dtype]
    device = torch.device("meta" if roles else "cpu")  # which stands for an H200, or for no GPU
    x, y = (like._replace(dtype=dtype, device=device) for like in (x, y))
    rest = (roles, None, "tf32")
    return (
        ConvolutionRun(x, plan.name, False, geometry, case.out_fields, *rest),
        ConvolutionRun(y, plan.name, True, back, case.in_fields, *rest),
        GramRun(x, y, plan.name, geometry, *rest[1:]),
    )


def counted(case, kind=Kernels):
    layer = case.layer("meta")
    itemsize = cases.DTYPES[case.dtype].itemsize
    layout = scheme(spectral_plan(layer.basis, "regular", "regular"), 16 // itemsize)
    return kind(layout, case.in_fields, case.out_fields, itemsize)


def differences(ours, case, runs):
    """Where what is counted is not what would be launched."""
    pixels, found = case.size**2, []
    splits = ours.splits(case.batch, pixels, pixels)

    def same(name, one, other):
        if one != other:
            found.append(f"{name}: {one}, not {other}")

    *convolutions, gram = runs
    for adjoint, run in enumerate(convolutions):
        cut = ours.cut(bool(adjoint))
        same("fields", cut, (run.cut.copies * sum(run.cut.parts), run.cut.programs))
        tile, warps = ours.tile
        options = run.groups[0].forward[0].options
        same("tile", (tile, warps), (options["BP"], options["num_warps"]))
        tiles = sum(group.forward[0].grid[0] for group in run.groups)
        most = kernel_counts.parts(case.batch * pixels, tile) + len(run.groups)
        same("tiles", tiles <= most, True)
    launches = [launch for group in gram.groups for launch in group.shares[0].grams]
    fields, warps = ours.gram_tile
    options = launches[0].options
    same("gradient's tile", (fields, warps), (options["BF"], options["num_warps"]))
    rows = kernel_counts.rounded(case.in_fields, 4) // fields
    same("gradient's programs", (rows, ours.gram_cut.programs, splits), launches[0].grid)
    same("sums", splits * ours.weights, torch.Size(gram.partial).numel())
    same("laid out", ours.laid * 64, gram.laid[1])
    return found


def differences_with_roles(ours, case, runs):
    """Where what is counted of warps with roles is not what would be launched."""
    pixels, found = case.size**2, []

    def same(name, one, other):
        if one != other:
            found.append(f"{name}: {one}, not {other}")

    *convolutions, gram = runs
    for adjoint, run in enumerate(convolutions):
        same("has roles", ours.convolves(bool(adjoint)), bool(run.roles))
        if not (run.roles and ours.convolves(bool(adjoint))):
            continue
        same("launches", len(ours.shares), len(run.roles))
        cut = ours.cut(bool(adjoint))
        for share, launch in zip(run.roles, run.groups[0].forward, strict=True):
            same("fields", cut, (sum(share.cut.parts), share.cut.programs))
            same("targets", ours.shares[0].batch, share.layout.batch)
            same("features", ours.shares[0].inner, share.layout.inner)
            same("tile", ours.tile, (launch.options["BP"], launch.options["num_warps"]))
        for group in run.groups:
            tiles = kernel_counts.parts(group.images * pixels, ours.tile[0])
            running = min(tiles, kernel_counts.PROCESSORS // cut.programs)
            same("programs", (running, cut.programs, 1), group.forward[0].grid)
    same("gradient has roles", ours.sums, bool(gram.roles))
    if not (gram.roles and ours.sums):
        return found
    splits = ours.splits(case.batch, pixels, pixels)
    rows = kernel_counts.rounded(case.in_fields, 4) // ours.gram_tile[0]
    for group in gram.groups:
        same("shares", len(ours.shares), len(group.shares))
        for share in group.shares:
            same("chunks", ours.shares[0].chunks, len(share.grams))
            for launch in share.grams:
                wanted = (rows, ours.gram_cut.programs, splits)
                same("gradient's programs", wanted, launch.grid)
                same("gradient's warps", ours.gram_tile[1], launch.options["num_warps"])
                same("gradient's pixels", ours.gram_pixels, launch.options["BP"])
    same("sums", splits * ours.weights, torch.Size(gram.partial).numel() * len(gram.sums))
    same("laid out", ours.laid * ours.gram_pixels, gram.laid[1] * len(gram.sums))
    return found


@pytest.mark.parametrize("case", [*NARROW, *OTHERS], ids=str)
def test_what_is_counted_is_what_is_launched_with_roles(case):
    runs = launched(case, roles=True)
    assert differences_with_roles(counted(case, KernelsWithRoles), case, runs) == []


def test_some_layers_have_roles_and_some_do_not():
    known = {}
    for case in [*NARROW, *OTHERS]:
        ours = counted(case, KernelsWithRoles)
        known.setdefault(case.group, set()).add((ours.convolves(False), ours.sums))
    for group in ("p1", "p2", "p3", "p4", "p12"):
        assert known[group] == {(False, False)}
    for group in ("p5", "p6", "p8", "p16", "p32", "p4m", "p8m"):
        assert known[group] == {(True, True)}


def test_a_count_with_roles_that_is_wrong_is_found():
    for group in ("p8", "p32"):
        case = cases.Case(group, 20, 20, 64, 16, dtype="bfloat16")
        runs, ours = launched(case, roles=True), counted(case, KernelsWithRoles)
        assert differences_with_roles(ours, case, runs) == []
        assert differences_with_roles(ours, case, launched(case))
        assert differences_with_roles(ours._replace(out_fields=60), case, runs)
        assert differences_with_roles(ours._replace(in_fields=60), case, runs)
        for name in ("p16", "p12"):
            other = scheme(spectral_plan(econv.filter_basis(name), "regular", "regular"), 8)
            assert differences_with_roles(ours._replace(layout=other), case, runs)


def test_whole_rounds_of_programs_that_stay_are_counted():
    ours = counted(cases.Case("p8", 80, 80, 1, 16, dtype="bfloat16"), KernelsWithRoles)
    assert ours.cut(False) == (40, 2)
    one, same, two = (ours.convolution(64 * tiles, adjoint=False) for tiles in (1, 66, 67))
    assert (one == same).all()
    assert (two == 2 * same).all()
    products, features, taps = same
    assert features == 132 * 64 * 80 * 4 * 24
    assert (products, taps) == (features * 2 * 40, 132 * 64 * 80 * 25)


def test_halves_are_counted_twice():
    """Each has half of the targets, which find their features among half of the derivatives."""
    ours = counted(cases.Case("p32", 20, 20, 1, 16, dtype="bfloat16"), KernelsWithRoles)
    assert [share.batch for share in ours.shares] == [8, 8]
    _, features, taps = ours.convolution(64, adjoint=False)
    assert features == 132 * 64 * 20 * 2 * 8 * ours.shares[0].inner
    assert taps == 132 * 64 * 20 * 2 * 4 * 25


@pytest.mark.parametrize("case", [*SHAPES[::2], cases.GROWTH[1]], ids=str)
def test_what_is_counted_is_what_is_launched(case):
    assert differences(counted(case), case, launched(case)) == []


def test_a_count_that_is_wrong_is_found():
    case = cases.Case("p8", 20, 20, 64, 16, dtype="bfloat16")
    runs, ours = launched(case), counted(case)
    assert differences(ours, case, runs) == []
    assert differences(ours._replace(out_fields=60), case, runs)
    assert differences(ours._replace(itemsize=4), case, runs)
    other = scheme(spectral_plan(econv.filter_basis("p16"), "regular", "regular"), 8)
    assert differences(ours._replace(layout=other), case, runs)


def test_whole_rounds_are_counted():
    """As long as all programs run at the same time, more pixels take no longer."""
    ours = counted(cases.Case("p8", 20, 20, 1, 16, dtype="bfloat16"))
    one, same, two, three = (
        ours.convolution(32 * programs, adjoint=False) for programs in (1, 132, 264, 265)
    )
    assert (one == same).all()
    assert (two == same * 4 / 3).all()
    assert (three > two).all()


def test_nothing_to_do_is_counted_too():
    ours = counted(cases.Case("p8", 2, 2, 1, 8, dtype="bfloat16"))
    assert ours.splits(0, 64, 64) == 1
    assert (ours.gram(0, 1) == 0).all()
