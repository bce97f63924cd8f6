"""Quarter turns and flips hold to rounding for whole networks that contain every layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import econv
from econv import (
    CentredAvgPool2d,
    CentredMaxPool2d,
    Curl2d,
    Downsample2d,
    Enlarge2d,
    FieldConv2d,
    FieldParameter,
    Group,
    GroupActivation2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupGroupNorm2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupLinear,
    GroupPool2d,
    GroupPReLU2d,
    GroupUpsampleConv2d,
    LiftConv2d,
    NearestResize2d,
    Recentre2d,
    Restrict2d,
    Spread2d,
    Upsample2d,
    VectorConv2d,
    restrict,
)
from econv.models import ResNet
from econv.testing import assert_equivariant, equivariance_error

GROUPS = ["p4", "p4m", "p8", "p8m"]
SIZES = [28, 29, 32, 33]
MODES = ["train", "eval"]
OUTPUTS = ["regular", "vector", "vector curl", "scalar max", "scalar mean"]
FIELDS = 2
DOUBLE = {"dtype": torch.float64}


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def prepared(network: nn.Module, mode: str) -> nn.Module:
    """In float64, in the given mode, with scales, biases and statistics that are not trivial."""
    network.double().train(mode == "train")
    with torch.no_grad():
        for i, (name, tensor) in enumerate(network.state_dict().items()):
            if name.endswith(("bias", "running_mean")):
                tensor.copy_(0.5 * noise(*tensor.shape, seed=i))
            elif name.endswith("running_var") or ("norm" in name and name.endswith("weight")):
                tensor.copy_(0.5 + noise(*tensor.shape, seed=i).abs())
    return network


class UNet(nn.Module):
    """A vector field in; group features, vector fields or scalars out; two halvings and back."""

    input_kind = "vector"

    def __init__(self, name: str, output: str) -> None:
        super().__init__()
        group = self.group = Group(name)
        f = FIELDS
        self.output_kind = output.split()[0]
        self.lift = LiftConv2d(3, f, group, vectors=1, bias=True)
        self.norm1 = GroupBatchNorm2d(f, group)
        self.halve1 = Downsample2d()
        self.conv1 = GroupConv2d(f, 2 * f, group, padding_mode="reflect", bias=True)
        self.norm2 = GroupInstanceNorm2d(2 * f, group, affine=True, track_running_stats=True)
        self.smooth = GroupActivation2d("silu", oversample=2)
        self.halve2 = Downsample2d(reduce="max")
        # Of 28 pixels seven are left: wide enough for 3×3 central differences two pixels apart.
        narrow = {"operators": "order<=2", "stencils": "central", "dilation": 2}
        self.conv2 = GroupConv2d(2 * f, 2 * f, group, groups=2, padding_mode="circular", **narrow)
        self.norm3 = GroupLayerNorm2d(2 * f, group)
        self.drop = GroupDropout2d(group, p=0.3)
        self.up1 = GroupUpsampleConv2d(2 * f, f, group, padding_mode="replicate")
        self.mix = GroupConv2d(3 * f, f, group, operators="order<=0", bias=True)
        self.up2 = Upsample2d()
        self.head: nn.Module = {
            "regular": GroupConv2d(2 * f, 1, group, operators="order<=2"),
            "vector": VectorConv2d(2 * f, 2, group, groups=2, operators="order<=1"),
            "vector curl": nn.Sequential(FieldConv2d(2 * f, group, pseudoscalars=2), Curl2d()),
            "scalar max": GroupPool2d(group),
            "scalar mean": GroupPool2d(group, "mean"),
        }[output]

    def forward(self, wind: Tensor) -> Tensor:
        speed = wind.square().sum(1, keepdim=True).sqrt()
        full = torch.relu(self.norm1(self.lift(torch.cat([speed, wind], dim=1))))
        half = self.smooth(self.norm2(self.conv1(self.halve1(full))))
        quarter = self.drop(torch.relu(self.norm3(self.conv2(self.halve2(half)))))
        height, width = half.shape[-2:]
        half = torch.cat([half, torch.relu(self.up1(quarter, (height, width)))], dim=1)
        height, width = full.shape[-2:]
        return self.head(torch.cat([full, self.up2(self.mix(half), (height, width))], dim=1))


class Doubling(nn.Module):
    """Upsampling to the default size, as a decoder without skips does it."""

    input_kind = "scalar"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.group = Group(name)
        self.lift = LiftConv2d(1, FIELDS, name, size=7, padding=2)
        self.up1 = Upsample2d()
        self.up2 = GroupUpsampleConv2d(FIELDS, FIELDS, name, operators="order<=1", padding="valid")

    def forward(self, x: Tensor) -> Tensor:
        return self.up2(torch.relu(self.up1(self.lift(x))))


class Restricting(nn.Module):
    """From features of a group to features of a subgroup, by the function and by the module."""

    input_kind = "scalar"

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__()
        self.outer, self.group = Group(outer), Group(inner)
        index = self.outer.order // self.group.order
        self.lift = LiftConv2d(1, FIELDS, outer, padding_mode="reflect")
        self.norm = GroupBatchNorm2d(FIELDS, outer)
        self.restrict = Restrict2d(outer, inner)
        self.conv = GroupConv2d(index * FIELDS, FIELDS, inner)
        self.skip = GroupConv2d(index * FIELDS, FIELDS, inner, operators="order<=0")

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.lift(x)))
        skip = self.skip(restrict(features, self.outer, self.group))
        return self.conv(self.restrict(features)) + skip


class Centred(nn.Module):
    """Strides and poolings as torch counts them, gates, scales, the image beside its features."""

    input_kind = "scalar"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.group = Group(name)
        f = FIELDS
        self.lift = LiftConv2d(1, f, name, stride=2, centred=True)
        self.norm1 = GroupGroupNorm2d(f, f, name)
        self.slopes = GroupPReLU2d(f, name)
        self.halve = CentredAvgPool2d(2, ceil_mode=True)
        self.spread = Spread2d(name)
        self.mix = GroupConv2d(f + 1, f, name, operators="order<=0")
        self.gate = GroupLinear(f, f, name)
        self.scale = FieldParameter(f, name, initial=0.3)
        self.pool = CentredMaxPool2d(3, 2, 1)
        self.enlarge = Enlarge2d(2, excess=-1)
        self.resize, self.centre = NearestResize2d(), Recentre2d(fill=0.5)
        self.narrow = GroupConv2d(
            f, f, name, operators="order<=1", stride=2, padding=1, centred=(2, 0)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.slopes(self.norm1(self.lift(x)))
        y = self.mix(torch.cat([y, self.spread(self.halve(x))], dim=1))
        gate = torch.sigmoid(self.gate(y.mean((2, 3))))
        y = y + self.scale() * (y * gate[:, :, None, None])
        y = self.enlarge(self.pool(y))
        height, width = y.shape[2:]
        y = self.centre(self.resize(y, 2 * height - 1, 2 * width - 1), height, width)
        return self.narrow(y)


def networks(name: str) -> list[nn.Module]:
    unets = [UNet(name, output) for output in OUTPUTS]
    return [*unets, Doubling(name), Restricting(name, "p2"), Centred(name)]


@pytest.mark.parametrize("name", GROUPS)
def test_the_networks_contain_every_layer_of_the_library(name):
    found = {type(module) for network in networks(name) for module in network.modules()}
    # Those of volumes have networks of their own, in tests/layers.
    names = [public_name for public_name in econv.__all__ if not public_name.endswith("3d")]
    public = [getattr(econv, public_name) for public_name in names]
    layers = {x for x in public if isinstance(x, type) and issubclass(x, nn.Module)}
    assert len(layers) >= 12
    assert layers <= found


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GROUPS)
def test_a_u_net_with_vector_input(name, size, mode, output):
    network = prepared(UNet(name, output), mode)
    assert_equivariant(network, noise(2, 2, size, size), tolerance=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GROUPS)
def test_doubling_without_skips(name, size, mode):
    network = prepared(Doubling(name), mode)
    assert_equivariant(network, noise(1, 1, size, size), tolerance=1e-12)


@pytest.mark.parametrize("size", [*SIZES, 30, 31])
@pytest.mark.parametrize("name", GROUPS)
def test_strides_and_poolings_as_torch_counts_them(name, size):
    network = prepared(Centred(name), "eval")
    x = noise(1, 1, size, size)
    assert_equivariant(network, x, tolerance=1e-12)
    windows = (size - 1) // 2 + 1  # the stride of the first layer
    pooled = (windows - 1) // 2 + 1
    assert network(x).shape[-1] == (2 * pooled - 1) // 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("outer", "inner"),
    [("p4", "p2"), ("p4m", "p4"), ("p4m", "p2m"), ("p8", "p4"), ("p8m", "p4m"), ("p8m", "p4")],
)
def test_restriction_to_a_subgroup(outer, inner, size, mode):
    network = prepared(Restricting(outer, inner), mode)
    assert_equivariant(network, noise(2, 1, size, size), tolerance=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GROUPS)
def test_a_res_net_that_halves_exactly(name, size, mode):
    network = ResNet(name, depth=8, fields=(1, 2, 2), in_channels=1, pool="max", exact=True)
    assert_equivariant(prepared(network, mode), noise(2, 1, size, size), tolerance=1e-12)


@pytest.mark.parametrize("shape", [(28, 33), (29, 32)])
@pytest.mark.parametrize("output", OUTPUTS)
def test_images_that_are_not_square(output, shape):
    network = prepared(UNet("p8m", output), "train")
    assert_equivariant(network, noise(2, 2, *shape), tolerance=1e-12)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("size", [12, 13])
@pytest.mark.parametrize("name", GROUPS)
def test_every_padding_mode_with_and_without_dilation(name, size, dilation, padding_mode):
    options = {"padding_mode": padding_mode, "dilation": dilation, "bias": True, **DOUBLE}
    lift = prepared(LiftConv2d(2, 2, name, groups=2, **options), "eval")
    assert_equivariant(lift, noise(1, 2, size, size))
    conv = prepared(GroupConv2d(2, 2, name, groups=2, **options), "eval")
    assert_equivariant(conv, noise(1, 2 * conv.group.order, size, size))


# torch-style strides and pooling: exact on the sizes that the docstrings name, and only there


def is_exact(size: int, extent: int, stride: int, padding: int) -> bool:
    return (size + 2 * padding - extent) % stride == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GROUPS)
def test_stride_two_is_exact_on_odd_sizes_only(name, size):
    lift = LiftConv2d(1, 2, name, stride=2, **DOUBLE)
    conv = GroupConv2d(2, 2, name, stride=2, **DOUBLE)
    for layer, channels in ((lift, 1), (conv, 2 * conv.group.order)):
        x = noise(1, channels, size, size)
        if size % 2:
            assert_equivariant(layer, x, tolerance=1e-12)
        else:
            assert equivariance_error(layer, x, conv.group.rotations // 4) > 1e-3
            with pytest.raises(AssertionError):
                assert_equivariant(layer, x)


@pytest.mark.parametrize("stride", [2, 3, 4])
@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("size", range(12, 18))
def test_any_stride_is_exact_where_it_divides_the_rest(size, dilation, padding, stride):
    options = {"stencils": "central", "size": 3, "padding": padding, "dilation": dilation}
    layer = LiftConv2d(1, 2, "p4m", stride=stride, **options, **DOUBLE)
    x = noise(1, 1, size, size)
    errors = [equivariance_error(layer, x, element) for element in range(1, 8)]
    half = {"same": dilation, "valid": 0, 1: 1}[padding]
    if is_exact(size, 2 * dilation + 1, stride, half):
        assert max(errors) < 1e-12
    else:
        assert min(errors[e - 1] for e in (1, 2, 3, 4, 6)) > 1e-3


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 3, 0)])
@pytest.mark.parametrize("size", [*SIZES, 30])
@pytest.mark.parametrize("name", GROUPS)
def test_max_pooling_is_exact_where_the_stride_divides_the_rest(name, size, window):
    extent, stride, padding = window
    order = Group(name).order

    def pool(x: Tensor) -> Tensor:
        return functional.max_pool2d(x, extent, stride, padding)

    x = noise(1, 2 * order, size, size)
    if is_exact(size, extent, stride, padding):
        assert_equivariant(pool, x, name, input_kind="regular")
    else:
        quarter = Group(name).rotations // 4
        assert equivariance_error(pool, x, quarter, name, input_kind="regular") > 1e-3
        with pytest.raises(AssertionError):
            assert_equivariant(pool, x, name, input_kind="regular")
    if (extent, stride, padding) == (2, 2, 0):
        assert is_exact(size, extent, stride, padding) == (size % 2 == 0)


@pytest.mark.parametrize("size", SIZES)
def test_downsampling_is_exact_where_torch_style_strides_are_not(size):
    x = noise(1, 3, size, size)
    for reduce in ("mean", "max"):
        kinds = {"input_kind": "scalar", "output_kind": "scalar"}
        assert_equivariant(Downsample2d(reduce), x, "p4m", **kinds)
        assert Downsample2d(reduce)(x).shape[-2:] == ((size + 1) // 2,) * 2


def test_a_res_net_with_strides_is_exact_on_the_sizes_that_stay_odd_only():
    network = ResNet("p4m", depth=8, fields=(1, 2, 2), in_channels=1, pool="max")
    prepared(network, "eval")
    assert_equivariant(network, noise(1, 1, 33, 33))
    for size in (28, 31, 32):  # 31 is odd, its half 16 is not
        with pytest.raises(AssertionError):
            assert_equivariant(network, noise(1, 1, size, size))
