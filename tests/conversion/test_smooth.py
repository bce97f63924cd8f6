"""Converted networks that stay equivariant between the angles of the pixel grid."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from econv import Downsample2d, GroupActivation2d, convert
from econv.layers import CentredMaxPool2d, GroupPool2d
from econv.testing import smooth_field


class Source(nn.Module):
    """Strided, pooled, with modules and functions that are activations."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv2 = nn.Conv2d(12, 12, 3, stride=2, padding=1)
        self.elu = nn.ELU(0.5)
        self.conv3 = nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.pool(self.act(self.conv1(x)))
        x = functional.relu(self.conv2(x))
        x = self.conv3(self.elu(x))
        return self.head(torch.sigmoid(x).mean((2, 3)))


@pytest.fixture(scope="module")
def image():
    return smooth_field(64, 1, 1.5, batch=8, dtype=torch.float32)


def made(image, **options):
    torch.manual_seed(0)
    source = Source()
    return convert(source, "p8", example_input=image, **{"match": "width", **options})


def of_kind(network, kind):
    return [module for module in network.modules() if isinstance(module, kind)]


def test_what_becomes_smooth(image):
    network = made(image, smooth=True)
    assert isinstance(network.act.function, nn.SiLU)
    assert network.elu.function.alpha == 0.5
    assert isinstance(network.pool, Downsample2d)
    assert network.pool.antialias == 8
    blurs = [a for a in of_kind(network, GroupActivation2d) if type(a.function) is nn.Identity]
    assert [blur.width for blur in blurs] == [1.1]
    # act, relu, elu, and the blur before the stride; functions that have no kind of module stay
    assert len(of_kind(network, GroupActivation2d)) == 4
    assert [pool.reduce for pool in of_kind(network, GroupPool2d)] == ["mean+std"]
    assert network(image[:, :, :37, :40]).shape == (8, 5)
    plain = made(image)
    assert not of_kind(plain, GroupActivation2d)
    assert isinstance(plain.pool, CentredMaxPool2d)


def test_the_report_has_the_errors_between_the_angles_of_the_grid(image):
    smooth, plain = made(image, smooth=True).report, made(image).report
    for report in (smooth, plain):
        assert [turn.degrees for turn in report.turns] == [45.0, 22.5]
        assert "error at 22.5°" in str(report)
        assert all(turn.source > 0 for turn in report.turns)
    assert smooth.turns[0].converted < plain.turns[0].converted / 4
    assert smooth.error < 1e-5
    assert not made(image, smooth=True, measure=False).report.turns


def test_the_report_names_what_would_cost_most(image):
    found = made(image, smooth=True).report.unsmoothed
    assert {one.name for one in found} == {"act", "pool", "relu", "elu"}
    assert {one.was for one in found} == {"ReLU", "CentredMaxPool2d", "ELU"}
    errors = [one.error for one in found]
    assert errors == sorted(errors, reverse=True)
    report = made(image, smooth=True).report
    assert errors[0] > report.turns[0].converted
    assert f"as in the source, {found[0].name}" in str(report)
    assert not made(image).report.unsmoothed


def test_smooth_networks_of_trained_ones_keep_their_functions(image):
    network = made(image, smooth=True, pretrained=True, match="fields")
    assert isinstance(network.act.function, nn.ReLU)
    assert network.pool.reduce == "max"


def test_nothing_turns_in_the_trivial_group(image):
    network = convert(Source(), "p1", example_input=image, smooth=True)
    assert not of_kind(network, GroupActivation2d)
