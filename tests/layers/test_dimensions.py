"""Layers whose dimension is a parameter: what holds for images holds for volumes."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from econv import Group, export
from econv import layers as every
from econv.layers import (
    CentredAvgPool2d,
    CentredAvgPool3d,
    CentredMaxPool2d,
    CentredMaxPool3d,
    Downsample2d,
    Downsample3d,
    Enlarge2d,
    Enlarge3d,
    FieldConv3d,
    FieldParameter,
    GroupActivation2d,
    GroupActivation3d,
    GroupAttentionPool3d,
    GroupBatchNorm3d,
    GroupDropout3d,
    GroupGroupNorm3d,
    GroupInstanceNorm3d,
    GroupLayerNorm3d,
    GroupPool3d,
    GroupPReLU3d,
    GroupUpsampleConv3d,
    NearestResize2d,
    NearestResize3d,
    Restrict3d,
    Spread3d,
    Upsample2d,
    Upsample3d,
    convert_sync_batchnorm,
    group_activation,
    restrict,
)
from econv.layers.activations import _HALVES
from econv.testing import assert_equivariant, transform


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Fixed(nn.Module):
    """A layer whose sizes are given."""

    def __init__(self, layer, *sizes):
        super().__init__()
        self.layer, self.sizes = layer, sizes

    def forward(self, x):
        return self.layer(x, *(n + extra for n, extra in zip(x.shape[2:], self.sizes, strict=True)))


# Layers that treat channels alike, for images and for volumes.
SAMPLING = {
    "downsample": (Downsample2d, Downsample3d, {}),
    "downsample max 6": (Downsample2d, Downsample3d, {"reduce": "max", "antialias": 6}),
    "upsample": (Upsample2d, Upsample3d, {}),
    "upsample 8": (Upsample2d, Upsample3d, {"antialias": 8}),
    "enlarge": (Enlarge2d, Enlarge3d, {"factor": 3, "excess": -2}),
    "max pool": (CentredMaxPool2d, CentredMaxPool3d, {"kernel_size": 3, "stride": 2, "padding": 1}),
    "average": (CentredAvgPool2d, CentredAvgPool3d, {"kernel_size": 2, "ceil_mode": True}),
    "silu": (GroupActivation2d, GroupActivation3d, {}),
    "relu 2": (GroupActivation2d, GroupActivation3d, {"activation": "relu", "oversample": 2}),
    "nearest": (NearestResize2d, NearestResize3d, {}),
}


def made(name, place):
    layer = SAMPLING[name][place](**SAMPLING[name][2]).double()
    return Fixed(layer, *(3, -2, 0)[: 2 + place]) if name == "nearest" else layer


@pytest.mark.parametrize("name", SAMPLING)
def test_what_acts_on_every_axis_alike_commutes_with_all_symmetries_of_the_cube(name):
    layer = made(name, 1) if name != "nearest" else Fixed(NearestResize3d(), 3, 3, 3)
    generators = Group("Oh").generators
    for shape in ((5, 5, 5), (4, 4, 4), (4, 5, 7)):
        x = noise(1, 2, *shape)
        whole = {"input_kind": "scalar", "output_kind": "scalar"}
        assert_equivariant(layer, x, "Oh", elements=generators, **whole)


@pytest.mark.parametrize("name", ["downsample", "upsample 8", "enlarge", "average", "relu 2"])
def test_a_volume_that_is_constant_along_depth_is_an_image(name):
    image = noise(1, 2, 6, 7)
    volume = image[:, :, None].expand(-1, -1, 9, -1, -1)
    found = made(name, 1)(volume)
    if name == "enlarge":  # zeros beyond the border are none of an image
        found = found[:, :, 4:-4]
    if name == "average":
        found = found[:, :, 1:-1]
    wanted = made(name, 0)(image)
    if name == "relu 2":
        grids = _HALVES[2][2], _HALVES[3][2]
        assert [g[-2:] for g in grids[1]] == list(grids[0])
    torch.testing.assert_close(
        found, wanted[:, :, None].expand_as(found), rtol=0, atol=1e-12, check_stride=False
    )


@pytest.mark.parametrize("oversample", [1, 2, 4, 8])
def test_activations_of_volumes_keep_constants_and_have_symmetric_grids(oversample):
    layer = GroupActivation3d("softplus", oversample).double()
    x = torch.full((1, 1, 4, 5, 6), 0.3, dtype=torch.float64)
    torch.testing.assert_close(layer(x), functional.softplus(x), rtol=0, atol=1e-12)
    grids = set(_HALVES[3][oversample])
    assert len(grids) == oversample
    assert all(
        tuple(g[i] for i in p) in grids for g in grids for p in itertools.permutations(range(3))
    )
    y = noise(1, 2, 5, 5, 6)
    found = group_activation(y, "softplus", oversample)
    torch.testing.assert_close(found, layer(y), rtol=0, atol=0)


FEATURES = {
    "batch norm": lambda group: GroupBatchNorm3d(2, group),
    "instance norm": lambda group: GroupInstanceNorm3d(2, group, affine=True),
    "group norm": lambda group: GroupGroupNorm3d(2, 2, group),
    "layer norm": lambda group: GroupLayerNorm3d(2, group),
    "dropout": lambda group: GroupDropout3d(group, 0.5),
    "prelu": lambda group: GroupPReLU3d(2, group),
    "pool": lambda group: GroupPool3d(group, "mean+std+top2"),
    "attention": lambda group: GroupAttentionPool3d(2, group),
    "fields": lambda group: FieldConv3d(2, group, scalars=1, pseudoscalars=1, vectors=1),
    "up": lambda group: GroupUpsampleConv3d(2, 1, group, operators="order<=1"),
    "up by 3": lambda group: GroupUpsampleConv3d(
        2, 1, group, operators="order<=1", factor=3, excess=-2
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", FEATURES)
def test_layers_of_features_commute_with_the_symmetries_of_the_cube(name, training):
    group = Group("Th")
    layer = FEATURES[name](group).double().train(training)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=number))
    for size in (3, 4):
        x = noise(2, 2 * group.order, size, size, size)
        assert_equivariant(layer, x, elements=group.generators)


def test_normalised_fields_have_mean_zero_and_variance_one():
    x = noise(3, 2 * 12, 4, 5, 6) * 3 + 2
    for norm, axes in ((GroupBatchNorm3d, (0, 2, 3, 4, 5)), (GroupInstanceNorm3d, (2, 3, 4, 5))):
        fields = norm(2, "T").double()(x).unflatten(1, (2, 12))
        assert fields.mean(axes).abs().max() < 1e-12
        assert (fields.var(axes, correction=0) - 1).abs().max() < 1e-4
    pixels = GroupLayerNorm3d(2, "T").double()(x)
    assert pixels.mean(1).abs().max() < 1e-12


def test_dropout_drops_whole_fields_of_volumes():
    torch.manual_seed(0)
    fields = GroupDropout3d("T")(torch.ones(8, 4 * 12, 2, 3, 4)).unflatten(1, (4, 12)).flatten(2)
    assert set(fields.unique().tolist()) == {0.0, 2.0}
    assert (fields == fields[..., :1]).all()


@pytest.mark.parametrize("names", [("O", "T"), ("Oh", "D4"), ("I", "T"), ("D4h", "C2v")])
def test_restriction_of_volumes_commutes_with_the_subgroup(names):
    whole, inner = map(Group, names)
    x = noise(1, whole.order, 4, 4, 4)
    places = whole.embed(inner)
    for element in inner.grid_symmetries[:6]:
        found = restrict(transform(x, whole, int(places[element]), "regular"), whole, inner)
        wanted = transform(restrict(x, whole, inner), inner, element, "regular")
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_what_is_spread_is_alike_in_every_orientation():
    x = noise(1, 2, 3, 4, 5)
    spread = Spread3d("T")(x).unflatten(1, (2, 12))
    assert (spread == x[:, :, None]).all()
    assert FieldParameter(2, "T", initial=2.0)().shape == (24, 1, 1, 1)


# Bad input


@pytest.mark.parametrize("name", sorted(n for n in every.__all__ if n.endswith("3d")))
def test_every_layer_of_volumes_has_kin_for_images(name):
    assert name.replace("3d", "2d") in every.__all__
    assert "3d" in getattr(every, name).__name__


@pytest.mark.parametrize("name", FEATURES)
def test_groups_of_the_plane_are_refused_and_the_reverse(name):
    with pytest.raises(ValueError, match=r"expected a group of space, such as .* got 'p4'"):
        FEATURES[name]("p4")
    kind = type(FEATURES[name]("T")).__name__.replace("3d", "2d")
    arguments = {"fields": 2, "in_fields": 2, "out_fields": 1, "num_groups": 1, "scalars": 1}
    taken = getattr(every, kind)
    code = {n: arguments[n] for n in arguments if n in taken.__init__.__code__.co_varnames}
    with pytest.raises(ValueError, match=r"expected a group of the plane, such as .* got 'O'"):
        taken(group="O", **code)


@pytest.mark.parametrize("name", [*FEATURES, *(name for name in SAMPLING if name != "nearest")])
def test_images_are_refused_where_volumes_are_expected(name):
    layer = FEATURES[name]("T") if name in FEATURES else made(name, 1)
    with pytest.raises(ValueError, match=r"expected a tensor \[batch, channels, depth, height, w"):
        layer(
            torch.zeros(
                1, 24, 6, 6, dtype=next(iter(layer.state_dict().values()), torch.zeros(1)).dtype
            )
        )


def test_a_size_that_fits_no_volume_is_refused():
    with pytest.raises(ValueError, match="expected a size of twice"):
        Upsample3d()(torch.zeros(1, 1, 4, 4, 4), size=(8, 8, 9))
    with pytest.raises(ValueError, match="expected oversample as 1, 2, 4 or 8 points"):
        GroupActivation3d("relu", oversample=3)
    with pytest.raises(ValueError, match="expected 3 sizes"):
        NearestResize3d()(torch.zeros(1, 1, 4, 4, 4), 4, 4)


# As modules of torch


@pytest.mark.parametrize("name", [n for n in FEATURES if n not in ("attention",)])
def test_layers_of_volumes_export_copy_and_pickle(name):
    layer = FEATURES[name]("T").double()
    x = noise(2, 24, 4, 5, 6)
    layer(x)  # running statistics of their own
    layer.eval()
    wanted = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), export(layer, x)):
        torch.testing.assert_close(other(x), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in SAMPLING if name != "nearest"])
def test_sampling_of_volumes_exports(name):
    layer = made(name, 1).eval()
    for shape in ((6, 7, 8), (5, 4, 7)):
        x = noise(1, 2, *shape)
        torch.testing.assert_close(export(layer, x)(x), layer(x), rtol=0, atol=1e-12)


def test_layouts_of_volumes_are_kept():
    x = noise(2, 24, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    for name in ("batch norm", "layer norm", "group norm", "pool"):
        layer = FEATURES[name]("T").double()
        out = layer(x)
        assert out.is_contiguous(memory_format=torch.channels_last_3d), name
        torch.testing.assert_close(out, layer(x.contiguous()), rtol=0, atol=1e-12)
    assert Downsample3d()(x).is_contiguous(memory_format=torch.channels_last_3d)


def test_norms_of_volumes_are_synchronised_by_conversion():
    model = nn.Sequential(GroupBatchNorm3d(2, "T")).double()
    x = noise(2, 24, 4, 4, 4)
    wanted = copy.deepcopy(model)(x)
    converted = convert_sync_batchnorm(model)
    assert type(converted[0]).__name__ == "SyncGroupBatchNorm3d"
    torch.testing.assert_close(converted(x), wanted, rtol=0, atol=1e-12)


def test_restricted_features_are_a_module():
    x = noise(1, 24, 3, 3, 3)
    torch.testing.assert_close(Restrict3d("O", "T").double()(x), restrict(x, "O", "T"))
