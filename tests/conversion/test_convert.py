"""Conversion: every network becomes equivariant, with the widths, weights and names promised."""

import copy
import functools
import inspect
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import econv
from econv import ConversionError, Group, convert, filter_basis
from econv.conversion import fit_filter, registry, rules
from econv.conversion.registry import rule
from econv.lab import calibrate
from econv.layers import PDOConv2d
from econv.testing import assert_equivariant, equivariance_error
from plain_networks import (
    NETWORKS,
    LayerNorm2d,
    SqueezeExcitation,
    UNet,
    conv_norm,
    resnet18,
)

DOUBLE = {"dtype": torch.float64}


def images(size=24, batch=2, channels=3):
    return torch.randn(batch, channels, size, size, **DOUBLE)


def quarter_turn_error(network, x):
    """The largest error over the quarter turns (and flips) of the network's group."""
    calibrate(network, x)
    return max(
        equivariance_error(network, x, element)
        for element in network.group.grid_symmetries
        if element
    )


def converted(source, group="p4", match="width", size=24, **options):
    options.setdefault("measure", False)
    return convert(source.double(), group, match, example_input=images(size), **options)


# The networks that everyone knows


@pytest.mark.parametrize("name", NETWORKS)
def test_the_plain_networks_have_the_parameters_of_their_namesakes(name):
    make, count = NETWORKS[name]
    with torch.device("meta"):
        network = make()
    assert sum(p.numel() for p in network.parameters()) == count


@pytest.mark.parametrize("group", [pytest.param("p4", marks=pytest.mark.slow), "p8"])
@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "efficientnet_b0", "unet"])
def test_quarter_turns_are_exact_at_224_pixels(name, group):
    source = UNet((8, 16, 24, 32, 64)) if name == "unet" else NETWORKS[name][0]()
    x = images(224, batch=1)
    network = convert(source.double(), group, "width", example_input=x, measure=False)
    calibrate(network, x)
    quarter = network.group.rotations // 4
    assert equivariance_error(network, x, quarter) <= 1e-9


@pytest.mark.parametrize("name", ["resnet18", "unet"])
def test_the_sources_are_not_exact_at_224_pixels(name):
    source = UNet((4, 4, 4), classes=2) if name == "unet" else resnet18()
    x = images(224, batch=1)
    kind = "scalar" if name == "unet" else "invariant"
    calibrate(source.double(), x)
    assert equivariance_error(source, x, 1, "p4", output_kind=kind) > 1e-2


@pytest.mark.parametrize(
    "name",
    [
        *("resnext50_32x4d", "mobilenet_v3_small", "regnety_002"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet50", "densenet121", "vgg11_bn")),
    ],
)
def test_other_networks_convert_and_are_exact(name):
    source = NETWORKS[name][0]().double()
    x = images(160, batch=1)
    network = convert(source, "p4", "width", example_input=x, measure=False)
    calibrate(network, x)
    assert equivariance_error(network, x, 1) <= 1e-9


@pytest.mark.parametrize("size", [41, 48, 51, 54])
def test_the_output_has_the_source_s_size_and_turns_on_every_size(size):
    source = nn.Sequential(
        *(nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(8, 8, 2, 2), nn.Tanh(), nn.Conv2d(8, 8, 5, 1, 2), nn.Conv2d(8, 4, 1)),
    )
    network = converted(source, "p4m", size=48)
    x = images(size)
    assert network(x).shape == source(x).shape
    assert quarter_turn_error(network, x) <= 1e-12


@pytest.mark.parametrize("group", ["p4", "p8"])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("size", [24, 27, 32])
def test_a_u_net_gives_maps_that_turn(group, transposed, size):
    source = UNet((8, 8, 16), classes=3, transposed=transposed)
    network = converted(source, group, size=size)
    assert network.output_kind == "scalar"
    assert network(images(size)).shape == (2, 3, size, size)
    assert quarter_turn_error(network, images(size)) <= 1e-12


# Single operations


class Of(nn.Module):
    """A lifting convolution, one function of its maps, and a read-out."""

    def __init__(self, function, channels=8, out=8, **modules):
        super().__init__()
        self.lift = nn.Conv2d(3, channels, 3, padding=1)
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)
        self.end = nn.Conv2d(out, 5, 1)

    def forward(self, x):
        y = torch.tanh(self.lift(x))
        return self.end(self.function(self, x, y))


def cbam(self, x, y):
    spatial = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], dim=1)
    return y * torch.sigmoid(self.conv(spatial))


def cbam_max(self, x, y):
    greatest, _ = torch.max(y, dim=1, keepdim=True)
    spatial = torch.cat([torch.mean(y, dim=1, keepdim=True), greatest], dim=1)
    return y * torch.sigmoid(self.conv(spatial))


def selective(self, x, y):
    paths = torch.stack([torch.relu(self.conv(y)), torch.tanh(y)], dim=1)
    weights = self.select(paths.sum(1).mean((2, 3), keepdim=True))
    weights = torch.softmax(weights.view(y.size(0), 2, 8, 1, 1), dim=1)
    return (paths * weights).sum(dim=1)


def paths_and_back(self, x, y):
    b, c, h, w = y.shape
    paths = y.reshape(b, 2, c // 2, h, w)
    return torch.cat([paths.sum(1), (paths * paths).reshape(b, c, h, w)], 1)


def efficient_channels(self, x, y):
    z = self.conv(y.mean((2, 3)).view(y.shape[0], 1, -1))
    return y * torch.sigmoid(z).view(y.shape[0], -1, 1, 1).expand_as(y)


def efficient_channels_squeezed(self, x, y):
    z = functional.adaptive_avg_pool2d(y, 1)
    z = self.conv(z.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
    return y * torch.sigmoid(z).expand_as(y)


def norms_last(self, x, y):
    z = self.rms(y.permute(0, 2, 3, 1))
    z = functional.layer_norm(z, (8,), self.weight, self.bias, 1e-6)
    return z.permute(0, 3, 1, 2)


def last_axes(self, x, y):
    z = y.permute(0, 2, 3, 1)
    assert z.shape[-1] == y.shape[1]
    z = self.linear(self.norm(z) * self.scale)
    return z.permute(0, 3, 1, 2)


OPERATIONS = {
    "conv 2×2": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 2)),
    "conv 4×4 stride 4": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 4, 4)),
    "conv 5×5": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 5, padding=2)),
    "conv 7×7 valid": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 7)),
    "conv 11×11 stride 4": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 11, 4, 2)),
    "conv stride 3": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 3, 3, 1)),
    "conv dilation": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 3, 2, 2, dilation=2)),
    "conv same": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 5, padding="same")),
    "conv reflect": Of(
        lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
    ),
    "depthwise": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 3, padding=1, groups=8)),
    "depthwise, twice as many": Of(
        lambda s, x, y: s.conv(y), out=16, conv=nn.Conv2d(8, 16, 3, padding=1, groups=8)
    ),
    "grouped": Of(lambda s, x, y: s.conv(y), conv=nn.Conv2d(8, 8, 3, padding=1, groups=2)),
    "transposed 2×2": Of(lambda s, x, y: s.conv(y), conv=nn.ConvTranspose2d(8, 8, 2, 2)),
    "transposed 3×3": Of(
        lambda s, x, y: s.conv(y), conv=nn.ConvTranspose2d(8, 8, 3, 2, 1, output_padding=1)
    ),
    "transposed odd": Of(lambda s, x, y: s.conv(y), conv=nn.ConvTranspose2d(8, 8, 3, 2, 1)),
    "transposed by 3": Of(lambda s, x, y: s.conv(y), conv=nn.ConvTranspose2d(8, 8, 5, 3, 1)),
    "batch norm": Of(lambda s, x, y: s.norm(y), norm=nn.BatchNorm2d(8)),
    "group norm": Of(lambda s, x, y: s.norm(y), norm=nn.GroupNorm(4, 8)),
    "instance norm": Of(lambda s, x, y: s.norm(y), norm=nn.InstanceNorm2d(8, affine=True)),
    "layer norm": Of(lambda s, x, y: s.norm(y), norm=LayerNorm2d(8)),
    "PReLU": Of(lambda s, x, y: s.act(y), act=nn.PReLU(8)),
    "max pool": Of(lambda s, x, y: functional.max_pool2d(y, 3, 2, 1)),
    "max pool, ceil": Of(lambda s, x, y: s.pool(y), pool=nn.MaxPool2d(3, 2, ceil_mode=True)),
    "average pool": Of(lambda s, x, y: functional.avg_pool2d(y, 3, 2, 1)),
    "adaptive pool": Of(lambda s, x, y: functional.adaptive_avg_pool2d(y, 7)),
    "every second pixel": Of(lambda s, x, y: y[:, :, ::2, ::2]),
    "upsample": Of(lambda s, x, y: functional.interpolate(y, scale_factor=2.0)),
    "upsample to a size": Of(
        lambda s, x, y: functional.interpolate(y, size=(35, 35), mode="nearest")
    ),
    "dropout of maps": Of(lambda s, x, y: functional.dropout2d(y, 0.3, s.training)),
    "add and multiply": Of(lambda s, x, y: (y + s.conv(y)) * 2 * y, conv=nn.Conv2d(8, 8, 1)),
    "concatenate": Of(lambda s, x, y: torch.cat([y, torch.relu(y)], 1), out=16),
    "concatenate the image": Of(lambda s, x, y: torch.cat([y, x], 1), out=11),
    "chunk": Of(lambda s, x, y: torch.cat([*y.chunk(2, 1)][::-1], 1)),
    "slice": Of(lambda s, x, y: y[:, :4] + y[:, 4:], out=4),
    "pad channels": Of(lambda s, x, y: functional.pad(y, (0, 0, 0, 0, 4, 4)), out=16),
    "pad pixels": Of(lambda s, x, y: functional.pad(y, (1, 1, 1, 1))),
    "pad one side more": Of(lambda s, x, y: functional.pad(y, (0, 1, 1, 0))),
    "pad by reflection": Of(lambda s, x, y: functional.pad(y, (1, 1, 1, 1), mode="reflect")),
    "softmax over channels": Of(lambda s, x, y: torch.softmax(y, 1)),
    "squeeze and excitation": Of(lambda s, x, y: s.se(y), se=SqueezeExcitation(8, 4)),
    "squeeze and excitation, linear": Of(
        lambda s, x, y: s.se(y), se=SqueezeExcitation(8, 4, linear=True)
    ),
    "spatial attention": Of(cbam, conv=nn.Conv2d(2, 1, 7, padding=3)),
    "spatial attention by max": Of(cbam_max, conv=nn.Conv2d(2, 1, 7, padding=3)),
    "greatest value": Of(lambda s, x, y: y - y.max(1, True).values),
    "maximum of two": Of(lambda s, x, y: torch.max(y, -y)),
    "zero padding": Of(lambda s, x, y: s.pad(y), pad=nn.ZeroPad2d(2)),
    "zero padding, one side more": Of(lambda s, x, y: s.pad(y), pad=nn.ZeroPad2d((0, 1, 0, 1))),
    "reflection padding": Of(lambda s, x, y: s.pad(y), pad=nn.ReflectionPad2d(1)),
    "replication padding": Of(lambda s, x, y: s.pad(y), pad=nn.ReplicationPad2d(2)),
    "circular padding": Of(lambda s, x, y: s.pad(y), pad=nn.CircularPad2d(1)),
    "constant padding": Of(lambda s, x, y: s.pad(y), pad=nn.ConstantPad2d(1, 0.7)),
    "crop": Of(lambda s, x, y: y[:, :, 2:-2, 2:-2]),
    "crop to a size": Of(lambda s, x, y: y[:, :, 1:22, 1:22]),
    "gated halves": Of(lambda s, x, y: s.glu(y), out=4, glu=nn.GLU(dim=1)),
    "gated halves, function": Of(lambda s, x, y: functional.glu(y, dim=1), out=4),
    "norms of the last axis": Of(
        norms_last,
        rms=nn.RMSNorm(8),
        weight=nn.Parameter(torch.randn(8)),
        bias=nn.Parameter(torch.randn(8)),
    ),
    "instance norm, function": Of(
        lambda s, x, y: functional.instance_norm(y, weight=s.weight, bias=s.bias),
        weight=nn.Parameter(torch.randn(8)),
        bias=nn.Parameter(torch.randn(8)),
    ),
    "group norm, function": Of(lambda s, x, y: functional.group_norm(y, 4)),
    "unit length": Of(lambda s, x, y: functional.normalize(y, dim=1)),
    "comparison": Of(lambda s, x, y: torch.where(y > 0.1, y, 0.2 * y) * (y != 0)),
    "constant": Of(lambda s, x, y: y * torch.tensor(0.5) + torch.full((1,), 2.0)),
    "constant of the image": Of(
        lambda s, x, y: s.conv(x - torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1)),
        conv=nn.Conv2d(3, 8, 3),
    ),
    "variance": Of(lambda s, x, y: y / (1 + y.var((2, 3), False, True))),
    "deviation": Of(lambda s, x, y: y / (1 + torch.std(y, (1, 2, 3), keepdim=True))),
    "selective kernels": Of(
        selective, conv=nn.Conv2d(8, 8, 3, padding=1), select=nn.Conv2d(8, 16, 1)
    ),
    "paths and back": Of(paths_and_back, out=12),
    "efficient channel attention": Of(
        efficient_channels, conv=nn.Conv1d(1, 1, 3, padding=1, bias=False)
    ),
    "efficient channel attention, squeezed": Of(
        efficient_channels_squeezed, conv=nn.Conv1d(1, 1, 3, padding=1)
    ),
    "random leaks": Of(lambda s, x, y: s.act(y), act=nn.RReLU()),
    "channel of ones": Of(
        lambda s, x, y: s.conv(
            torch.cat([x, torch.ones(x.size(0), 1, *x.shape[2:], dtype=x.dtype)], 1)
        ),
        conv=nn.Conv2d(4, 8, 3),
    ),
    "uniform channel": Of(
        lambda s, x, y: s.conv(torch.cat([x, s.level.expand(x.size(0), 1, *x.shape[2:])], 1)),
        conv=nn.Conv2d(4, 8, 3),
        level=nn.Parameter(torch.ones(1, 1, 1, 1)),
    ),
    "channels last": Of(
        last_axes, norm=nn.LayerNorm(8), linear=nn.Linear(8, 8), scale=nn.Parameter(torch.ones(8))
    ),
}


@pytest.mark.parametrize(("group", "match"), [("p4", "fields"), ("p8", "width")])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_keeps_quarter_turns_and_the_shape(name, group, match):
    source = copy.deepcopy(OPERATIONS[name]).double()
    x = images(24)
    network = convert(source, group, match, example_input=x, measure=False)
    assert network(x).shape == source(x).shape
    assert quarter_turn_error(network.eval(), x) <= 1e-12


@functools.cache
def converted_operation(name):
    source = copy.deepcopy(OPERATIONS[name]).double()
    return source, converted(source).eval()


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_exported_without_econv_and_runs_on_other_sizes(name):
    _, network = converted_operation(name)
    plain = econv.export(network, images(24))
    for size in (24, 27):
        x = images(size)
        assert torch.allclose(plain(x), network(x), atol=1e-9)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_exact_on_other_sizes(name):
    source, network = converted_operation(name)
    for size in (25, 26, 27):
        assert quarter_turn_error(network, images(size)) <= 1e-12
        assert network(images(size)).shape == source(images(size)).shape


@pytest.mark.parametrize("end", ["map", "vector"])
def test_a_classifier_that_reads_a_whole_map_becomes_invariant(end):
    hidden = [nn.Linear(16, 10)] if end == "vector" else []
    features = 10 if end == "map" else 16
    source = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Dropout(0.5)),
        *(nn.Linear(8 * 36, features), *hidden),
    )
    network = converted(source)
    assert network(images()).shape == (2, 10)
    assert quarter_turn_error(network, images()) <= 1e-12


def test_maps_too_small_for_the_stencils_get_smaller_operators():
    source = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(8), nn.Conv2d(8, 8, 3, padding=1)),
        *(nn.MaxPool2d(3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)),
    )
    network = converted(source)
    operators = [m.basis.operators.name for m in network.modules() if hasattr(m, "basis")]
    assert operators == ["paper", "order<=2", "order<=0"]
    assert quarter_turn_error(network, images()) <= 1e-12


# Widths

LONG = ("densenet121", "mobilenet_v3_small")  # conversions, which take one group of three here


@pytest.mark.parametrize(
    ("name", "group"),
    [
        pytest.param(name, group, marks=[pytest.mark.slow] * (group != "p8" and name in LONG))
        for name in ("resnet18", "mobilenet_v3_small", "densenet121", "regnety_002")
        for group in ("p4", "p8", "p4m")
    ],
)
def test_params_match_within_two_percent(name, group):
    with torch.device("meta"):
        source = NETWORKS[name][0]()
    x = torch.empty(1, 3, 224, 224, device="meta")
    report = convert(source, group, "params", example_input=x, measure=False).report
    assert report.parameters / report.source_parameters == pytest.approx(1, abs=0.02)
    assert report.source_parameters == NETWORKS[name][1]


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "efficientnet_b0"])
def test_multiply_adds_match_within_five_percent(name):
    with torch.device("meta"):
        source = NETWORKS[name][0]()
    x = torch.empty(1, 3, 224, 224, device="meta")
    report = convert(source, "p8", "flops", example_input=x, measure=False).report
    assert report.multiply_adds / report.source_multiply_adds == pytest.approx(1, abs=0.05)


def test_multiply_adds_are_those_that_are_known():
    with torch.device("meta"):
        source = resnet18()
    x = torch.empty(1, 3, 224, 224, device="meta")
    report = convert(source, "p4", "width", example_input=x, measure=False).report
    assert report.source_multiply_adds == 1_814_073_344


def test_width_keeps_the_channels():
    network = converted(resnet18(classes=10), "p8", size=64)
    assert network.get_submodule("stem.0").out_channels == 64
    assert network.get_submodule("blocks.7.branch.1.0").out_channels == 512
    assert network.fc.in_features == 512 // 8


def test_groups_of_channels_become_groups_of_fields():
    source = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, groups=8)),
        *(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 4, 1)),
    )
    network = converted(source, "p4", "width")
    grouped, depthwise = network.get_submodule("1"), network.get_submodule("2")
    assert (grouped.in_fields, grouped.groups) == (8, 8)
    assert (depthwise.in_fields, depthwise.groups) == (8, 8)


def test_a_layer_too_narrow_for_the_group_is_an_error_with_its_name():
    source = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Conv2d(2, 32, 3), nn.Conv2d(32, 2, 1))
    with pytest.raises(ValueError, match=r"at least 4 channels.*p8.*'width'.*0 has 2"):
        converted(source, "p8", "width")
    assert converted(source, "p8", "params").report.parameters > 0


def test_a_count_that_cannot_be_reached_is_an_error():
    source = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="narrower than one field"):
        convert(source, "p16", "params", example_input=torch.randn(1, 1, 9, 9), measure=False)


# What it returns


class WithOptions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, image, mask=None, *, scale: float = 1.0):
        y = torch.relu(self.conv(image)) * scale
        if mask is not None:
            y = y * mask
        return {"out": self.head(y), "image": image}


def test_the_call_signature_stays():
    source = WithOptions().double()
    network = converted(source)
    assert list(inspect.signature(network.forward).parameters) == ["image", "mask", "scale"]
    out = network(image=images())
    assert set(out) == {"out", "image"}
    masked = convert(
        source, "p4", "width", example_input=(images(), torch.ones(2, 1, 24, 24, **DOUBLE))
    )
    assert masked(images(), torch.zeros(2, 1, 24, 24, **DOUBLE))["out"].shape == (2, 2, 24, 24)
    for other in ({"mask": torch.ones(1)}, {"scale": 2.0}):  # what was traced is what it does
        with pytest.raises(AssertionError, match="specialized"):
            network(images(), **other)


def test_names_mode_dtype_and_device_stay():
    source = resnet18(classes=10).train()
    network = convert(source, "p4", "width", example_input=torch.randn(1, 3, 64, 64))
    assert network.training
    assert next(network.parameters()).dtype == torch.float32
    names = {name for name, _ in source.named_parameters()}
    assert {name for name, _ in network.named_parameters()} == names
    assert isinstance(network, nn.Module)
    assert network.group == Group("p4")


def test_the_source_is_not_changed():
    source = resnet18(classes=10).double()
    before = copy.deepcopy(source.state_dict())
    x = images(64)
    converted(source, size=64, measure=True)
    assert all(torch.equal(before[k], v) for k, v in source.state_dict().items())
    assert source.training
    assert source(x).shape == (2, 10)


@pytest.mark.parametrize("kind", ["map", "classes"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_computes_the_same_and_says_the_same(how, kind):
    end = nn.Conv2d(8, 2, 1)
    if kind == "classes":
        end = nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(8 * 36, 2))
    network = converted(nn.Sequential(conv_norm(3, 8), SqueezeExcitation(8, 4), end)).eval()
    if how == "deepcopy":
        other = copy.deepcopy(network)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(network))
    else:
        buffer = io.BytesIO()
        torch.save(network, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    x = images()
    assert torch.equal(network(x), other(x))
    assert (other.group, other.report, other.training) == (network.group, network.report, False)
    if kind == "classes":
        with pytest.raises(ValueError, match="reads a map of 6×6"):
            other(images(32))


def test_the_weights_are_saved_and_read_into_a_network_converted_again():
    source = nn.Sequential(conv_norm(3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    network, other = (converted(source).eval() for _ in range(2))
    assert not torch.equal(network(images() * 0 + 1), other(images() * 0 + 1))
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    x = images()
    assert torch.equal(network(x), other(x))


def test_a_converted_network_trains_compiles_its_shapes_and_exports():
    source = nn.Sequential(
        *(conv_norm(3, 8, 3, 2), SqueezeExcitation(8, 4), nn.MaxPool2d(3, 2, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 4)),
    )
    network = converted(source)
    network.train()(images()).square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    sides = {2: torch.export.Dim("height", min=12), 3: torch.export.Dim("width", min=12)}
    name = next(iter(inspect.signature(network.forward).parameters))
    program = torch.export.export(
        network.eval(), (images(),), dynamic_shapes={name: sides}, strict=False
    )
    for size in (24, 25, 31):
        x = images(size)
        assert torch.allclose(program.module()(x), network(x), atol=1e-12)


def test_dropout_follows_the_mode():
    network = converted(copy.deepcopy(OPERATIONS["dropout of maps"]))
    x = images()
    assert not torch.equal(network.train()(x), network(x))
    assert torch.equal(network.eval()(x), network(x))


# The report


def test_the_report_says_what_became_what():
    source = nn.Sequential(conv_norm(3, 8), nn.MaxPool2d(2), nn.Conv2d(8, 2, 1))
    report = converted(source, measure=True).report
    text = str(report)
    assert "LiftConv2d(3, 2, p4" in text
    assert "CentredMaxPool2d" in text
    assert "GroupPool2d(p4" in text
    assert {line.name for line in report.lines} >= {"0.0", "0.1", "1", "2", "2_orientations"}
    assert report.source_parameters == sum(p.numel() for p in source.parameters())
    assert report.error <= 1e-12 < 1e-3 < report.source_error
    assert f"{report.source_parameters:,} → {report.parameters:,}" in text


def test_the_report_begins_with_the_work_over_the_source_s():
    source = nn.Sequential(conv_norm(3, 64), conv_norm(64, 64), nn.Conv2d(64, 2, 1))
    report = converted(source, "p8", "params").report
    flops, width = (converted(source, "p8", match).report for match in ("flops", "width"))
    first = str(report).partition("\n")[0]
    assert first == report.headline() == report.summary()[0]
    before = report.source_multiply_adds
    assert report.multiply_adds > 10 * before
    found = [float(number) for number in re.findall(r"([\d.]+)×", first)]
    wanted = [r.multiply_adds / before for r in (report, flops, width)]
    assert found == pytest.approx(wanted, rel=0.05)
    assert re.findall(r"match='(\w+)'", first) == ["params", "flops", "width"]


def test_the_report_has_the_costs_of_every_match():
    source = nn.Sequential(conv_norm(3, 64), conv_norm(64, 64), nn.Conv2d(64, 2, 1))
    report = converted(source, "p4", "width").report
    assert [cost.match for cost in report.costs] == ["width", "params", "flops", "fields"]
    for cost in report.costs:
        made = converted(source, "p4", cost.match).report
        assert (cost.parameters, cost.multiply_adds) == (made.parameters, made.multiply_adds)
        assert any(
            f"{cost.parameters:,}" in line for line in report.summary() if cost.match in line
        )
    source_work = 2 * report.source_multiply_adds  # of the example's two images
    filters = sum(
        layer.weight.numel() * 4 * layer.basis.size**2
        for layer in converted(source, "p4", "width").modules()
        if isinstance(layer, PDOConv2d)
    )
    own = (2 * report.multiply_adds + filters) / source_work
    assert report.costs[0].step == pytest.approx(own)


def test_a_match_that_cannot_be_reached_has_no_cost():
    source = nn.Sequential(conv_norm(3, 32), conv_norm(32, 32), nn.Conv2d(32, 2, 1))
    with pytest.raises(ValueError, match="expected widths with a count near"):
        converted(source, "p8", "flops")
    costs = [cost.match for cost in converted(source, "p8", "width").report.costs]
    assert costs == ["width", "params", "fields"]


def flattened(width, side, hidden, classes):
    """A classifier that reads a flattened map, as VGG has it."""
    return nn.Sequential(
        *(conv_norm(3, width), nn.MaxPool2d(2), conv_norm(width, width)),
        *(nn.AdaptiveAvgPool2d(side), nn.Flatten(), nn.Linear(width * side**2, hidden)),
        *(nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)),
    )


def test_a_classifier_of_a_flattened_map_never_has_filters(monkeypatch):
    network = converted(flattened(8, 7, 16, 3), "p8", "params")
    window = network.get_submodule("5")
    filters = window.in_channels * window.out_channels * window.basis.size**2
    assert filters > 10 * window.weight.numel()
    convolve, seen = PDOConv2d.forward, []

    def spied(layer, x):
        seen.append(layer)
        return convolve(layer, x)

    monkeypatch.setattr(PDOConv2d, "forward", spied)
    assert network.eval()(images()).shape == (2, 3)
    assert len(seen) == 2  # the others, which have filters
    assert window not in seen


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc on this system")
def test_vgg_at_64_pixels_converts_within_ten_seconds_and_two_gigabytes():
    # Seconds of the processor, which other programs do not stretch; and memory of this program
    # alone: what `resource` tells of a new process is that of the one that started it, if larger.
    program = """
import time
from pathlib import Path
import torch
import econv
from plain_networks import VGG
torch.set_num_threads(1)
source = VGG().eval()
x = torch.randn(1, 3, 64, 64)
start = time.process_time()
network = econv.convert(source, "p8", "params", example_input=x)
converted = time.process_time()
network(x)
took = time.process_time() - converted
status = Path("/proc/self/status").read_text().splitlines()
(kilobytes,) = [line.split()[1] for line in status if line.startswith("VmHWM")]
print(converted - start, int(kilobytes) / 1e6, took)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    seconds, gigabytes, forward = map(float, run.stdout.split())
    assert seconds < 10
    assert gigabytes < 2
    assert forward < 10


def test_the_table_has_every_module():
    source = nn.Sequential(
        *(conv_norm(3, 8), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    )
    report = converted(source).report
    became = {line.name: line.became for line in report.lines}
    assert {"0.0", "0.1", "0.2", "1", "2", "4"} <= set(became)
    assert became["0.2"] == became["1"] == became["2"] == "as it is"


def test_a_count_that_is_missed_is_noted():
    source = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 5, 3), nn.Conv2d(5, 2, 1))
    report = convert(
        source, "p8", "params", example_input=torch.randn(1, 3, 16, 16), measure=False
    ).report
    missed = report.parameters / report.source_parameters - 1
    assert abs(missed) > 0.02
    assert any(f"{missed:+.1%} parameters" in note for note in report.notes)


def test_errors_are_measured_only_where_wanted():
    report = converted(conv_norm(3, 8)).report
    assert report.error is None
    assert "error at" not in str(report)


def test_modules_that_the_pass_does_not_call_are_named():
    source = Of(
        lambda s, x, y: y if not s.training else s.auxiliary(y), auxiliary=nn.Conv2d(8, 8, 1)
    )
    report = converted(source).report
    assert any("gone: auxiliary" in note for note in report.notes)
    assert report.source_parameters == sum(p.numel() for p in source.parameters()) - 72


# What cannot be converted


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(y, y, y)[0].mean(1))


class Positions(nn.Module):
    def __init__(self, early):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.embedding = nn.Parameter(torch.randn(1, 3 if early else 8, 24, 24))
        self.early = early

    def forward(self, x):
        if self.early:
            return self.head(self.stem(x + self.embedding))
        return self.head(self.stem(x) + self.embedding)


def conv3():
    return nn.Conv2d(3, 8, 3)


def buffer(*shape):
    return nn.Buffer(torch.randn(shape))


def rows(y):
    return torch.linspace(-1, 1, y.shape[2]).view(1, 1, -1, 1).expand(y.shape[0], 1, *y.shape[2:])


def coordinates(self, x, y):
    return self.conv(torch.cat([x, rows(x)], 1))


def between(*layers, channels=8):
    head = nn.Conv2d(channels, 2, 1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, head)


IMPOSSIBLE = {
    "attention": (Attention, "attention", "attention over positions"),
    "positional embedding": (lambda: Positions(False), "add", "positional embedding"),
    "positional embedding of the image": (lambda: Positions(True), "add", "positional embedding"),
    "coordinates of columns": (
        lambda: Of(lambda s, x, y: y + torch.arange(y.shape[3], device=y.device)),
        "add",
        r"shape \(24,\) belongs to positions",
    ),
    "coordinates of columns of the image": (
        lambda: Of(lambda s, x, y: s.conv(x + torch.linspace(-1, 1, x.shape[3])), conv=conv3()),
        "add",
        r"shape \(24,\) belongs to positions",
    ),
    "coordinate channel": (
        lambda: Of(coordinates, conv=nn.Conv2d(4, 8, 3)),
        "cat",
        r"shape \(2, 1, 24, 24\) belongs to positions",
    ),
    "coordinate channel of features": (
        lambda: Of(lambda s, x, y: torch.cat([y, rows(y)], 1), out=9),
        "cat",
        r"shape \(2, 1, 24, 24\) belongs to positions",
    ),
    "window of numbers": (
        lambda: Of(lambda s, x, y: y * torch.hann_window(24)),
        "mul",
        r"shape \(24,\) belongs to positions",
    ),
    "noise of positions": (
        lambda: Of(lambda s, x, y: y + torch.rand(1, 1, y.size(2), y.size(3))),
        "add",
        r"shape \(1, 1, 24, 24\) belongs to positions",
    ),
    "gate of positions": (
        lambda: Of(lambda s, x, y: y * s.gate.expand_as(y), gate=buffer(1, 8, 24, 24)),
        "expand_as",
        "belongs to positions",
    ),
    "unequal adaptive pooling": (
        lambda: between(nn.AdaptiveAvgPool2d((1, None))),
        "1",
        "output sizes are unequal",
    ),
    "unequal adaptive pooling, function": (
        lambda: Of(lambda s, x, y: functional.adaptive_max_pool2d(y, (3, 6))),
        "adaptive_max_pool2d",
        "output sizes are unequal",
    ),
    "unequal factors": (
        lambda: Of(lambda s, x, y: functional.interpolate(y, scale_factor=(2.0, 1.0))),
        "interpolate",
        "factors are unequal",
    ),
    "unequal sizes": (
        lambda: Of(lambda s, x, y: functional.interpolate(y, size=(48, 24))),
        "interpolate",
        "sizes are unequal",
    ),
    "unequal upsampling": (
        lambda: between(nn.Upsample(scale_factor=(2, 1))),
        "1",
        "factors are unequal",
    ),
    "unequal sizes that follow the image": (
        lambda: Of(lambda s, x, y: functional.interpolate(y, size=(2 * y.size(2), y.size(3)))),
        "interpolate",
        "sizes are unequal",
    ),
    "unequal padding module": (lambda: between(nn.ZeroPad2d((1, 1, 0, 0))), "1", "pads the sides"),
    "reflection to one side": (
        lambda: between(nn.ReflectionPad2d((0, 1, 0, 1))),
        "1",
        "it pads by",
    ),
    "crop to one side": (lambda: Of(lambda s, x, y: y[:, :, 4:, 4:]), "getitem", "to one side"),
    "places of extrema": (
        lambda: Of(lambda s, x, y: y * torch.max(y, dim=1, keepdim=True)[1]),
        "max_1",
        "places of extrema",
    ),
    "rows apart, max": (lambda: Of(lambda s, x, y: y * y.max(2, True)[0]), "max_1", "apart"),
    "filters made in forward": (
        lambda: Of(lambda s, x, y: functional.conv2d(y, s.kernel), kernel=buffer(8, 8, 3, 3)),
        "conv2d",
        "no rule for the function conv2d",
    ),
    "neighbouring channels": (lambda: between(nn.LocalResponseNorm(3)), "1", "LocalResponseNorm"),
    "new tensors": (lambda: Of(lambda s, x, y: y + y.new_zeros(8, 1, 1)), "new_zeros", "no rule"),
    "unequal strides": (lambda: between(nn.Conv2d(8, 8, 3, (1, 2), 1)), "1", "strides are unequal"),
    "asymmetric kernel": (
        lambda: between(nn.Conv2d(8, 8, (1, 7), padding=(0, 3))),
        "1",
        "kernel is not square",
    ),
    "unequal padding": (lambda: between(nn.Conv2d(8, 8, 3, padding=(1, 0))), "1", "paddings"),
    "large kernel": (lambda: between(nn.Conv2d(8, 8, 13, padding=6)), "1", "13×13"),
    "sub-pixels": (lambda: between(nn.PixelShuffle(2), channels=2), "1", "lays channels"),
    "unequal pooling": (lambda: between(nn.MaxPool2d((2, 1))), "1", "kernel is not square"),
    "rows apart": (lambda: Of(lambda s, x, y: y.mean(2, keepdim=True) * y), "mean", "apart"),
    "more rows than columns": (
        lambda: Of(lambda s, x, y: functional.pad(y, (0, 0, 1, 1))),
        "pad",
        "pads",
    ),
    "unequal pads": (lambda: Of(lambda s, x, y: functional.pad(y, (0, 2, 0, 2))), "pad", "pads"),
    "unknown function": (lambda: Of(lambda s, x, y: torch.roll(y, 1, 2)), "roll", "no rule.*roll"),
    "scale of every pixel": (
        lambda: between(nn.LayerNorm([8, 24, 24])),
        "1",
        "scale for every pixel",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_converted_stops_with_name_and_reason(name):
    make, module, reason = IMPOSSIBLE[name]
    with pytest.raises(ConversionError, match=reason) as caught:
        converted(make())
    assert caught.value.module == module
    assert f"cannot convert {module}: " in str(caught.value)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_without_strict_it_is_left_alone_and_named(name):
    make, module, _ = IMPOSSIBLE[name]
    source = make().double()
    network = converted(source, strict=False)
    assert network(images()).shape == source(images()).shape
    assert network.report.left
    assert module in [left for left, _ in network.report.left]
    assert "left alone" in str(network.report)


def test_an_asymmetric_kernel_left_alone_breaks_what_the_others_keep():
    source = between(nn.Conv2d(8, 8, (1, 7), padding=(0, 3)))
    network = converted(source, strict=False)
    assert isinstance(network.get_submodule("1"), nn.Conv2d)
    assert isinstance(network.get_submodule("0"), econv.LiftConv2d)
    assert quarter_turn_error(network, images()) > 1e-2


# Rules


@pytest.fixture
def own_rules(monkeypatch):
    """Rules that are registered in a test are forgotten after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def as_it_is(plan, node):
    return plan.copy(node, plan.value(node.args[0]))


class Waves(nn.Module):
    """A leaf, if it has a rule: what it calls has none."""

    def forward(self, x):
        return x + torch.sinc(x)


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize(
    ("operations", "options", "names"),
    [
        ((torch.sinc,), {}, ["0", "2"]),
        (("sinc",), {}, ["0", "2"]),
        ((Waves,), {}, ["0", "1", "2"]),
        ((), {"classes": ("Waves",)}, ["0", "1", "2"]),
    ],
)
def test_a_new_operation_needs_one_function_with_a_decorator(operations, options, names):
    source = between(Waves())
    with pytest.raises(ConversionError, match="no rule for the function sinc of Waves"):
        converted(source)

    @rule(*operations, **options)
    def new(plan, node):
        calls.append(node.name)
        return plan.copy(node, plan.value(node.args[0]))

    calls = []
    network = converted(source)
    assert len(calls) == 1
    assert [line.name for line in network.report.lines if "_" not in line.name] == names
    assert quarter_turn_error(network, images()) <= 1e-12


@pytest.mark.usefixtures("own_rules")
def test_a_subclass_with_a_forward_of_its_own_has_its_base_s_rule_only_if_that_is_said():
    class Base(nn.Module):
        def forward(self, x):
            return x

    class Other(Base):
        def forward(self, x):
            return x * 2

    rule(Base, variants=("Same",))(as_it_is)
    same = type("Same", (Other,), {})
    assert registry.rule_of_module(Other()) is None
    assert registry.rule_of_module(same()) is registry.rule_of_module(Base())


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize(
    ("operation", "options", "name"),
    [
        (nn.ReLU, {}, "ReLU"),
        (torch.cat, {}, "cat"),
        ("relu_", {}, "relu"),
        ("zeros", {"constants": True}, "zeros"),
    ],
)
def test_no_operation_has_two_rules(operation, options, name):
    of_here = r"test_convert\.as_it_is"
    with pytest.raises(ValueError, match=rf"one rule for {name}; got econv\..* and {of_here}"):
        rule(operation, **options)(as_it_is)
    with pytest.raises(ValueError, match=rf"one rule for DropPath; got econv\..* and {of_here}"):
        rule(classes=("DropPath",))(as_it_is)


def test_every_file_of_rules_is_found():
    files = {path.stem for path in Path(rules.__path__[0]).glob("[!_]*.py")}
    found = {rule.convert.__module__ for rule in registry._RULES.values()}
    assert {f"econv.conversion.rules.{file}" for file in files} == found


class Sided(nn.Module):
    """A leaf that looks harmless and is not."""

    def forward(self, x):
        return x.roll(1, 3)


@pytest.mark.usefixtures("own_rules")
def test_a_network_that_a_quarter_turn_changes_is_refused_whatever_it_is_made_of():
    rule(classes=("Sided",))(as_it_is)
    for dtype in (torch.float32, torch.float64):
        source, x = between(Sided()).to(dtype), images().to(dtype)
        with pytest.raises(ConversionError, match=r"changes the output by .*, far above"):
            convert(source, "p4", "width", example_input=x)
        assert convert(source, "p4", "width", example_input=x, strict=False).report.error > 1e-2
        assert convert(between().to(dtype), "p4", "width", example_input=x).report.error < 1e-5


class TwoImages(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.conv, self.head, self.end = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1), end

    def forward(self, image, weights, mask):
        y = self.conv(image) * weights * mask.unsqueeze(1)
        return self.end(self.head(y))


@pytest.mark.parametrize(
    "end",
    [
        lambda y: y,
        lambda y: y.squeeze(1),
        lambda y: y.permute(0, 2, 3, 1),
        lambda y: torch.cat([y, -y], 1).argmax(1),
        lambda y: y.mean((1, 2, 3)),
    ],
)
@pytest.mark.parametrize("sides", [(12, 12), (12, 10)])
def test_images_beside_the_first_and_outputs_of_every_layout_are_measured(end, sides):
    inputs = (
        torch.randn(2, 3, *sides, **DOUBLE),
        torch.rand(2, 1, *sides, **DOUBLE),
        torch.rand(2, *sides, **DOUBLE) > 0.5,
    )
    network = convert(TwoImages(end).double(), "p4", "width", example_input=inputs)
    assert network.report.error <= 1e-9
    assert network.report.turn == ("90°" if sides == (12, 12) else "180°")
    assert network(*inputs).shape == TwoImages(end).double()(*inputs).shape


def test_one_convolution_is_a_network():
    source = nn.Conv2d(3, 5, 3, padding=1).double()
    network = convert(source, "p4", "width", example_input=images())
    assert network(images()).shape == (2, 5, 24, 24)
    assert quarter_turn_error(network, images()) <= 1e-12


def test_an_output_that_does_not_turn_is_measured_as_such():
    source = Of(
        lambda s, x, y: s.conv(functional.interpolate(x, size=(48, 24))), conv=conv3()
    ).double()
    report = convert(source, "p4", "width", example_input=images(), strict=False).report
    assert report.error == float("inf")


def test_functions_left_alone_have_plain_names():
    network = converted(Of(lambda s, x, y: torch.roll(y, 1, 2)), strict=False)
    assert [name for name, _ in network.report.left] == ["roll"]


def refuses(self, x, y):
    raise RuntimeError("not today")


def reads_numbers(self, x, y):
    return y * sum(y.tolist())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (refuses, "torch.fx cannot follow it: RuntimeError: not today"),
        (reads_numbers, "asks for the numbers in a tensor"),
    ],
)
def test_what_cannot_be_traced_is_a_conversion_error(function, reason):
    with pytest.raises(ConversionError, match=reason):
        converted(Of(function))


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return y if y.sum() > 0 else -y


def test_a_course_that_depends_on_numbers_is_named():
    with pytest.raises(ConversionError, match="depends on the numbers in a tensor"):
        converted(Undecided())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match": "depth"}, "expected match as one of"),
        ({"group": "q8"}, "q8"),
        ({"pool": "median"}, "expected pool"),
        ({"options": {"stride": 2}}, r"expected options among.*stride"),
        ({"example_input": torch.randn(3, 24, 24)}, "expected an example_input"),
        ({"example_input": torch.randn(1, 4, 24, 24)}, "does not run on the example input"),
    ],
)
def test_bad_arguments_say_what_was_expected(options, message):
    default = {"model": conv_norm(3, 8), "example_input": torch.randn(1, 3, 24, 24)}
    with pytest.raises(ValueError, match=message):
        convert(**{"measure": False, **default, **options})


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_network_is_refused():
    with pytest.raises(ValueError, match="that is not scripted; got RecursiveScriptModule"):
        converted(torch.jit.script(nn.Conv2d(3, 8, 3)))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: econv.create_model("resnet8_p4"), ""),
        (lambda: nn.Sequential(econv.LiftConv2d(3, 8, "p4")), "0"),
        (lambda: converted(conv_norm(3, 8)), ""),
    ],
)
def test_an_equivariant_network_is_refused(make, name):
    with pytest.raises(ConversionError, match="made by econv already") as caught:
        converted(make())
    assert caught.value.module == name


def test_a_network_without_convolutions_is_refused():
    with pytest.raises(ConversionError, match="fixed order"):
        converted(nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 4)))


# Weights of the source


def ensemble(source, x):
    """The source on every quarter turn of its input, averaged."""
    turned = [source(torch.rot90(x, k, (2, 3))) for k in range(4)]
    return torch.stack(turned).mean(0)


def trained_like():
    """A network whose every parameter and statistic differs from its neighbours'."""
    source = nn.Sequential(
        *(conv_norm(3, 8), conv_norm(8, 12, 3, 2), SqueezeExcitation(12, 4)),
        *(conv_norm(12, 12, 3, 1, 12), conv_norm(12, 16, 1), nn.PReLU(16)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    ).double()
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.5)
    return calibrate(source, images(17, batch=8))


def test_with_a_field_for_every_channel_it_is_the_source_in_every_orientation():
    source, x = trained_like(), images(17)
    options = {"pretrained": True, "pool": "mean", "options": {"stencils": "central"}}
    network = convert(source, "p4", "fields", example_input=x, **options)
    assert torch.allclose(network(x), ensemble(source, x), atol=1e-12)
    assert not torch.allclose(source(x), ensemble(source, x), atol=1e-3)
    assert all(line.fit < 1e-12 for line in network.report.lines if line.fit is not None)


def test_several_statistics_reach_the_classifier_and_start_as_the_first_alone():
    source, x = trained_like(), images(17)
    options = {"pretrained": True, "options": {"stencils": "central"}}
    alone = convert(source, "p4", "fields", example_input=x, pool="mean", **options)
    network = convert(source, "p4", "fields", example_input=x, pool="mean+std+top2", **options)
    assert network.get_submodule("8").in_features == 4 * alone.get_submodule("8").in_features
    assert torch.allclose(network(x), alone(x), atol=1e-12)
    nn.init.normal_(network.get_submodule("8").weight)
    assert_equivariant(network, x, "p4", tolerance=1e-12)


@pytest.mark.parametrize(("pool", "kept"), [("mean+max", "mean"), ("top3+mean", "max")])
def test_an_output_keeps_its_channels_whatever_statistics_are_asked_for(pool, kept):
    source = nn.Sequential(conv_norm(3, 8), nn.Conv2d(8, 4, 3, padding=1)).double()
    network = converted(source, "p4", pool=pool)
    assert network(images(17)).shape == source(images(17)).shape
    pools = [m for m in network.modules() if isinstance(m, econv.GroupPool2d)]
    assert [m.reduce for m in pools] == [kept]


def test_fewer_fields_keep_the_most_important_channels():
    source = nn.Sequential(conv_norm(3, 8), nn.Conv2d(8, 2, 1)).double()
    scales = torch.tensor([0.1, 5.0, 0.2, 4.0, 0.3, 0.4, 0.5, 0.6])
    source[0][1].weight.data.copy_(scales)
    network = converted(source, "p4", "width", pretrained=True)
    assert network.get_submodule("0.1").weight.tolist() == [5.0, 4.0]
    assert torch.equal(network.get_submodule("1").weight, source[1].weight[:, [1, 3]])


def test_without_pretrained_weights_are_drawn_anew_but_constants_stay():
    source = between(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)).double()
    nn.init.zeros_(source[1].weight)
    network = converted(source)
    assert network.get_submodule("1").weight.tolist() == [0.0, 0.0]
    head = nn.Sequential(nn.Conv2d(3, 3, 1), *between()).double()
    kept = converted(head).get_submodule("0").weight
    assert not torch.equal(kept, head[0].weight)
    assert torch.equal(converted(head, pretrained=True).get_submodule("0").weight, head[0].weight)


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_a_filter_that_the_operators_reach_is_fitted_exactly(size):
    operators = {1: "order<=0", 3: "paper", 5: "order<=4", 7: "order<=6"}[size]
    basis = filter_basis("p8", operators)
    weights = torch.randn(4, 2, len(basis.operators), **DOUBLE)
    filters = torch.einsum("oij,jyx->oiyx", weights, torch.from_numpy(basis.synthesis[0].copy()))
    found, error = fit_filter(basis, filters)
    assert torch.allclose(found, weights, atol=1e-8)
    assert error < 1e-12


def test_what_the_operators_do_not_reach_is_stated():
    filters = torch.randn(16, 16, 3, 3, **DOUBLE)
    assert fit_filter(filter_basis("p8", "paper", "central"), filters)[1] < 1e-12
    assert 0.2 < fit_filter(filter_basis("p8", "paper"), filters)[1] < 0.8
    constant, error = fit_filter(filter_basis("p8", "order<=0"), filters)
    assert torch.allclose(constant[..., 0], filters[..., 1, 1])
    assert error == pytest.approx((8 / 9) ** 0.5, rel=0.05)


def test_smooth_filters_are_fitted_better_than_rough_ones():
    ramp = torch.tensor([-1.0, 0.0, 1.0], **DOUBLE)
    smooth = (ramp[:, None] * 0.5 + ramp * 0.2 + 1.0)[None, None]
    rough = torch.tensor([[1.0, -1, 1], [-1, 1, -1], [1, -1, 1]], **DOUBLE)[None, None]
    basis = filter_basis("p8", "paper")
    assert fit_filter(basis, smooth)[1] < fit_filter(basis, rough)[1]


def test_more_fields_than_channels_cannot_take_over_weights():
    source = between(nn.Conv2d(8, 8, 7))  # 49 numbers, replaced by 28 operators
    isotropic = {"stencils": "isotropic"}
    with pytest.raises(ValueError, match="at most as many fields as channels"):
        converted(source, "p1", "params", pretrained=True, options=isotropic)


def test_a_u_net_takes_over_its_transposed_convolutions():
    source = UNet((8, 8), classes=2).double()
    network = converted(source, match="fields", pretrained=True)
    fits = {line.name: line.fit for line in network.report.lines}
    assert 0 < fits["up.0"] < 1
    assert torch.equal(network.head.weight, source.head.weight)
