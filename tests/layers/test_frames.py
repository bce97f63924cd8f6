"""Windows in the frame of every orientation: what a plain layer reads of an image turned so."""

import functools

import pytest
import torch
from torch.nn import functional

from econv import Group, export
from econv.layers import GroupFrameScore2d, GroupWindows2d
from econv.testing import transform

DOUBLE = {"dtype": torch.float64}
WINDOWS = [
    (3, 2, (1, 1)),
    (7, 2, (3, 3)),
    (1, 2, (0, 0)),
    (2, 2, (0, 0)),
    (4, 3, (1, 2)),
    (2, 1, (0, 1)),
]


def turned_back(x, group, element):
    return transform(x, group, int(group.inverse[element]), "scalar")


@pytest.mark.parametrize(("extent", "step", "padding"), WINDOWS)
@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_each_orientation_reads_what_a_plain_layer_reads_of_an_image_turned_so(
    group, extent, step, padding
):
    group = Group(group)
    x, kernel = torch.randn(2, 1, 12, 15, **DOUBLE), torch.randn(1, 1, extent, extent, **DOUBLE)
    windows = GroupWindows2d(group, extent, step, padding, lifts=True)(x)
    for element in range(group.order):
        padded = functional.pad(turned_back(x, group, element), [*padding, *padding])
        wanted = functional.conv2d(padded, kernel, stride=step)
        own = turned_back(windows[:, element : element + 1], group, element)
        assert torch.allclose(functional.conv2d(own, kernel, stride=step), wanted, atol=1e-12)


@pytest.mark.parametrize("size", [11, 12, 13])
def test_maxima_are_torch_s_in_ceil_mode(size):
    x = torch.randn(1, 4, size, size)
    given = {"fill": -torch.inf, "ceil_mode": True}
    read = GroupWindows2d("p4", 3, 2, (1, 1), **given)(x)
    wanted = functional.max_pool2d(x, 3, 2, 1, ceil_mode=True)
    assert torch.equal(functional.max_pool2d(read, 3, 2)[:, 0], wanted[:, 0])


@pytest.mark.parametrize("size", [11, 12, 13])
def test_the_same_padding_of_tensorflow(size):
    x = torch.randn(1, 1, size, size)
    lacking = max(0, (-(-size // 3) - 1) * 3 + 4 - size)
    wanted = functional.pad(x, [lacking // 2, lacking - lacking // 2] * 2)
    found = GroupWindows2d("p4", 4, 3, "same", lifts=True)(x)[:, :1]
    count = 3 * (-(-size // 3) - 1) + 4
    assert torch.equal(found, wanted[:, :, :count, :count])


@pytest.mark.parametrize("group", ["p4m", "p8"])
def test_features_turn_with_the_image(group):
    group = Group(group)
    layer = GroupWindows2d(group, 3, 2, (1, 1))
    x = torch.randn(1, 2 * group.order, 8, 11, **DOUBLE)
    for element in group.grid_symmetries:
        turned = layer(transform(x, group, element, "regular"))
        assert torch.allclose(turned, transform(layer(x), group, element, "regular"), atol=1e-12)


def test_between_pixels_it_interpolates():
    ramp = torch.arange(12.0, **DOUBLE).expand(1, 1, 12, 12)
    found = GroupWindows2d("p8", 2, 3, lifts=True)(ramp)[0, :, 0]
    first = 0.5 + torch.tensor(Group("p8").matrices)[:, 0] @ torch.tensor([-0.5, 0.5], **DOUBLE)
    assert torch.allclose(found[:, 0], first.clamp_min(0), atol=1e-6)  # no further than the edge


def test_other_windows_are_refused():
    for options in ({"extent": 0}, {"step": 0}, {"padding": (-1, 0)}, {"reach": 3}):
        with pytest.raises(ValueError, match=f"expected {next(iter(options))}"):
            GroupWindows2d("p4", **{"extent": 3, "step": 2, **options})
    with pytest.raises(ValueError, match=r"fields of 4 orientations .*got 6"):
        GroupWindows2d("p4", 3, 2)(torch.zeros(1, 6, 8, 8))
    with pytest.raises(ValueError, match="at least 3 pixels along each side; got 2"):
        GroupWindows2d("p4", 3, 2)(torch.zeros(1, 4, 2, 8))


def score(group, fields=2):
    layer = GroupFrameScore2d(fields, group, **DOUBLE)
    torch.nn.init.normal_(layer.weight)
    return layer


def error(layer, x):
    """By how much scores differ from those of a turned map, with the orientations exchanged."""
    group, apart = layer.group, 0.0
    for element in group.grid_symmetries:
        turned = layer(transform(x, group, element, "regular"))
        places = torch.tensor(group.product[group.inverse[element]])
        apart = max(apart, float((turned - layer(x)[:, places]).abs().max().detach()))
    return apart


@pytest.mark.parametrize("group", ["p4m", "p8"])
@pytest.mark.parametrize("shape", [(8, 8), (7, 10), (2, 3)])
def test_scores_follow_the_frame(group, shape):
    layer = score(group)
    x = torch.randn(2, layer.fields * layer.group.order, *shape, **DOUBLE)
    assert error(layer, x) < 1e-12
    layer.frames = layer.frames[[1, 0, *range(2, layer.group.order)]]  # two are exchanged
    assert error(layer, x) > 1e-2
    features = layer.features(x)
    assert features.shape == (2, layer.group.order, layer.fields, 16)


def test_scores_are_those_of_its_features():
    layer, x = score("p8"), torch.randn(2, 16, 9, 9, **DOUBLE)
    assert torch.allclose((layer.features(x) * layer.weight).sum((2, 3)), layer(x))


@pytest.mark.parametrize(
    "layer",
    [
        functools.partial(GroupWindows2d, "p8", 3, 2, (1, 1)),
        functools.partial(GroupWindows2d, "p8", 2, 2, "same", fill=-torch.inf, ceil_mode=True),
        functools.partial(score, "p8"),
    ],
)
def test_plain_forms_compute_the_same_on_every_size(layer):
    layer = layer().double()
    plain = export(layer)
    for sides in ((8, 8), (9, 12)):
        x = torch.randn(2, 16, *sides, **DOUBLE)
        assert torch.allclose(plain(x), layer(x), atol=1e-12)


@pytest.mark.parametrize("padding", [(1, 1), "same"])
def test_a_program_with_sizes_that_vary_computes_the_same(padding):
    layer = GroupWindows2d("p8", 3, 2, padding).double()
    sizes = {2: torch.export.Dim("rows", min=4), 3: torch.export.Dim("columns", min=4)}
    x = torch.randn(1, 8, 9, 12, **DOUBLE)
    program = torch.export.export(layer, (x,), dynamic_shapes=(sizes,)).module()
    for sides in ((9, 12), (10, 7), (16, 16)):
        x = torch.randn(1, 8, *sides, **DOUBLE)
        assert torch.allclose(program(x), layer(x), atol=1e-12)


def test_an_image_that_is_too_small_is_told_how_large_it_must_be():
    windows = GroupWindows2d("p4", extent=7, step=2, padding=(1, 2))
    assert windows(torch.randn(1, 4, 4, 4)).shape[0] == 1
    with pytest.raises(ValueError, match="at least 4 pixels along each side; got 3"):
        windows(torch.randn(1, 4, 3, 3))
