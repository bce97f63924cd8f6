"""What the cost model counts of the kernels for GPUs is what would be launched."""

import pytest
import torch

import econv
from econv.engines import kernel_counts
from econv.engines.kernel_counts import Kernels
from econv.engines.spectral import Geometry
from econv.engines.triton_scheme import scheme
from econv.plan import spectral_plan

cases = pytest.importorskip("engine_cases", reason="no benchmarks beside the tests")
GRID = [*cases.cuda_grid(), *cases.TARGETS["cuda"], *cases.GROWTH]
SHAPES = sorted({case._replace(stride=1) for case in GRID if case.kind == "group"})


def launched(case):
    """The launches of a layer, of its adjoint and of the gradient to its weights.

    Without roles of warps: the coefficients are those of the kernels that have none.
    """
    pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")
    from econv.engines.triton_launches import ConvolutionRun, GramRun
    from econv.engines.triton_tiles import Like

    layer = case.layer("meta")
    plan = spectral_plan(layer.basis, "regular", "regular")
    geometry = Geometry.of(plan.basis.size, case.size, case.size, 1, layer.padding, 1)
    back = geometry.transposed(plan.basis.size, case.size, case.size)
    x, y = (
        Like.of(torch.empty(case.batch, channels, case.size, case.size, device="meta"))
        for channels in (layer.in_channels, layer.out_channels)
    )
    dtype = cases.DTYPES[case.dtype]
    x, y = (like._replace(dtype=dtype, device=torch.device("cpu")) for like in (x, y))
    rest = (False, None, "tf32")
    return (
        ConvolutionRun(x, plan.name, False, geometry, case.out_fields, *rest),
        ConvolutionRun(y, plan.name, True, back, case.in_fields, *rest),
        GramRun(x, y, plan.name, geometry, *rest[1:]),
    )


def counted(case):
    layer = case.layer("meta")
    itemsize = cases.DTYPES[case.dtype].itemsize
    layout = scheme(spectral_plan(layer.basis, "regular", "regular"), 16 // itemsize)
    return Kernels(layout, case.in_fields, case.out_fields, itemsize)


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
    same("sums", splits * ours.weights, torch.Size(gram.sums[0].partial).numel())
    same("laid out", ours.laid * 64, gram.sums[0].laid[1])
    return found


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
