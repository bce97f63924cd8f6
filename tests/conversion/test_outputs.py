"""A converted network returns what the source returns: as many channels, which turn as images."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from econv import ConversionError, GroupBatchNorm2d, convert
from econv.conversion import registry
from econv.conversion.registry import rule
from econv.lab import calibrate
from econv.testing import equivariance_error
from plain_networks import UNet, conv_norm

DOUBLE = {"dtype": torch.float64}


def images(size=24, batch=2, channels=3):
    return torch.randn(batch, channels, size, size, **DOUBLE)


class Scaled(nn.Module):
    """An image in [0, 1] from a 3×3 convolution, as generators end."""

    def __init__(self, channels=3):
        super().__init__()
        self.conv = nn.Conv2d(8, channels, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv(x)) * 0.5 + 0.5


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(8, 5, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x):
        return self.conv(x) * torch.sigmoid(self.gate(x))


class ResidualEnd(nn.Module):
    """The last unit of a U-Net with residual units: its convolution is added to what it reads."""

    def __init__(self, classes=2):
        super().__init__()
        self.up = nn.ConvTranspose2d(8, classes, 3, 2, 1, output_padding=1)
        self.norm, self.act = nn.InstanceNorm2d(classes), nn.PReLU()
        self.unit = nn.Conv2d(classes, classes, 3, padding=1)

    def forward(self, x):
        y = self.act(self.norm(self.up(x)))
        return self.unit(y) + y


class Anchors(nn.Module):
    """A detection head: the channels divided into anchors and their numbers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 12, 1)

    def forward(self, x):
        y = self.conv(x)
        return y.view(y.shape[0], 3, 4, y.shape[2], y.shape[3]).permute(0, 1, 3, 4, 2)


class LastAxis(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)


ENDS = {
    "scaled": Scaled,
    "scaled, many": lambda: Scaled(40),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(8, 3, 3, padding=1), nn.BatchNorm2d(3)),
    "batch norm of a 1×1": lambda: nn.Sequential(nn.Conv2d(8, 3, 1), nn.BatchNorm2d(3)),
    "PReLU": lambda: nn.Sequential(nn.Conv2d(8, 3, 3, padding=1), nn.PReLU(3)),
    "dropout": lambda: nn.Sequential(nn.Conv2d(8, 3, 3, padding=1), nn.Dropout2d(0.1)),
    "pooling": lambda: nn.Sequential(nn.Conv2d(8, 3, 3), nn.MaxPool2d(3, 2, 1), nn.GELU()),
    "group norm": lambda: nn.Sequential(nn.Conv2d(8, 4, 3), nn.GroupNorm(2, 4), nn.Softplus()),
    "gated": Gated,
    "residual": ResidualEnd,
    "residual, many": lambda: ResidualEnd(40),
    "anchors": Anchors,
    "features": lambda: conv_norm(8, 5),
    "many features": lambda: conv_norm(8, 40),
    "features, last axis": lambda: nn.Sequential(conv_norm(8, 40), LastAxis()),
    "embedding": lambda: nn.Sequential(
        conv_norm(8, 40), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Identity()
    ),
    "classes": lambda: nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4)
    ),
    "flattened map": lambda: nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(8 * 36, 40)),
}


def with_end(name):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), ENDS[name]()).double()


def kind_of(output):
    return "scalar" if output.ndim == 4 else "invariant"


def turned_output(output, name):
    if name == "features, last axis":
        return output.permute(0, 3, 1, 2)
    return output.flatten(0, 1).permute(0, 3, 1, 2) if name == "anchors" else output


@pytest.mark.parametrize("match", ["width", "fields"])
@pytest.mark.parametrize("name", ENDS)
def test_the_output_has_the_source_s_channels_and_they_turn_as_images(name, match):
    source, x = with_end(name), images()
    network = convert(source, "p4", match, example_input=x).eval()
    assert network.report.error <= 1e-9
    assert network(x).shape == source(x).shape
    assert network.report.outputs == (tuple(source(x).shape),)
    calibrate(network, x)
    error = equivariance_error(
        lambda x: turned_output(network(x), name),
        x,
        1,
        "p4",
        input_kind="scalar",
        output_kind=kind_of(turned_output(network(x), name)),
    )
    assert error <= 1e-12
    if "many" in name or "last axis" in name or name in ("embedding", "flattened map"):
        (line,) = (line for line in network.report.lines if line.name.endswith("_channels"))
        said = {"width": "out of fewer fields", "fields": "a field for every channel"}[match]
        assert line.became.endswith(said)


@pytest.mark.parametrize("name", ["batch norm", "PReLU", "dropout", "group norm"])
def test_what_follows_the_head_is_the_source_s_own(name):
    network = convert(with_end(name), "p4", "width", example_input=images(), measure=False)
    became = {line.name: line.became for line in network.report.lines}
    assert became["2.1"] == "as it is"


class Pyramid(nn.Module):
    """Features at three scales, two of which the next stage reads."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([conv_norm(3, 8), conv_norm(8, 12, 3, 2), conv_norm(12, 6)])

    def forward(self, x):
        found = {}
        for i, stage in enumerate(self.stages):
            x = found[str(i)] = stage(x)
        return found


def test_every_output_of_a_backbone_keeps_its_channels():
    source, x = Pyramid().double(), images()
    network = convert(source, "p4", "width", example_input=x).eval()
    shapes = {name: y.shape for name, y in source(x).items()}
    assert {name: y.shape for name, y in network(x).items()} == shapes
    assert network.report.outputs == tuple(map(tuple, shapes.values()))
    calibrate(network, x)
    for name in shapes:
        error = equivariance_error(
            lambda x, name=name: network(x)[name],
            x,
            1,
            "p4",
            input_kind="scalar",
            output_kind="scalar",
        )
        assert error <= 1e-12
    assert "8×24×24, 2×12×12×12, 2×6×12×12, as the source's" in str(network.report)


def test_features_of_the_source_s_weights_are_the_source_s_channels():
    source, x = with_end("many features"), images()
    options = {"pretrained": True, "pool": "mean", "options": {"stencils": "central"}}
    network = convert(source.eval(), "p1", "fields", example_input=x, **options)
    assert torch.allclose(network(x), source(x), atol=1e-12)
    fewer = convert(source, "p4", "width", example_input=x, pretrained=True)
    weight = fewer.get_submodule("2.0_channels").weight.flatten(1)
    assert weight.sum(0).tolist() == [1.0] * 10
    assert weight.sum() == weight.square().sum()


def test_few_channels_that_inner_layers_read_do_not_make_the_network_wide():
    source = Pyramid().double()
    network = convert(source, "p4", "width", example_input=images(), measure=False)
    assert [m.fields for m in network.modules() if isinstance(m, GroupBatchNorm2d)] == [2, 3]


@pytest.fixture
def own_rules(monkeypatch):
    """Rules that are registered in a test are forgotten after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


class Narrower(nn.Module):
    """A leaf whose rule is wrong: it becomes something that drops a channel."""

    def forward(self, x):
        return functional.relu(x)


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused_whatever_is_measured(measure, strict):
    @rule(Narrower)
    def narrower(plan, node):
        read, value = plan.first(node)
        return plan.emit(node, value, lambda e: e.method("narrow", e[read], 1, 0, 1))

    source = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1), Narrower()).double()
    match = r"it would return \(2, 1, 22, 22\); the source returns \(2, 2, 22, 22\)"
    with pytest.raises(ConversionError, match=match):
        convert(source, "p4", "width", example_input=images(), measure=measure, strict=strict)


@pytest.mark.usefixtures("own_rules")
def test_a_network_that_does_not_run_is_refused():
    @rule(Narrower)
    def narrower(plan, node):
        read, value = plan.first(node)
        return plan.emit(node, value, lambda e: e.method("narrow", e[read], 1, 0, 99))

    source = nn.Sequential(nn.Conv2d(3, 8, 3), Narrower(), nn.Conv2d(8, 2, 1)).double()
    with pytest.raises(ConversionError, match="does not run on the example input: RuntimeError"):
        convert(source, "p4", "width", example_input=images(), measure=False)


def test_the_check_leaves_modes_and_statistics_as_they_are():
    source = with_end("features").train()
    source[2][1].eval()
    network = convert(source, "p4", "width", example_input=images(), measure=False)
    assert network.training
    assert not network.get_submodule("2.1").training
    norms = [m for m in network.modules() if hasattr(m, "num_batches_tracked")]
    assert [int(norm.num_batches_tracked) for norm in norms] == [0]


def test_a_u_net_without_a_1x1_head_keeps_its_classes():
    source = UNet((8, 8), classes=5)
    source.head = nn.Sequential(nn.Conv2d(8, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Softmax(1))
    network = convert(copy.deepcopy(source).double(), "p8", "width", example_input=images())
    y = network.eval()(images())
    assert y.shape == (2, 5, 24, 24)
    assert torch.allclose(y.sum(1), torch.ones_like(y[:, 0]))
