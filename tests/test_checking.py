"""The mode that follows kinds: it lets sound networks pass and names the line of what is not."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import econv
from catalogue import NETWORKS
from econv import (
    GroupBatchNorm2d,
    GroupConv2d,
    GroupPool2d,
    LiftConv2d,
    Restrict2d,
    Spread2d,
    VectorConv2d,
    checked,
    restrict,
)
from econv.checking import KindError

IMAGE = torch.randn(2, 1, 13, 13)


def refused(network, x: Tensor = IMAGE) -> str:
    network(x)  # the shapes fit: without the mode nobody notices
    with pytest.raises(KindError) as caught, checked():
        network(x)
    return str(caught.value)


def passes(network, x: Tensor = IMAGE) -> None:
    wanted = network(x)
    with checked():
        assert torch.equal(network(x), wanted)


class Custom(nn.Module):
    """Layers of p8, and a function between them."""

    def __init__(self, function, last: nn.Module) -> None:
        super().__init__()
        self.lift, self.last = LiftConv2d(1, 2, "p8"), last
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        features = self.function(torch.relu(self.lift(x)))
        return self.last(features)


def test_features_of_another_group_are_named_with_the_line_and_the_remedy():
    text = refused(Custom(lambda x: x * 2 + 1, GroupConv2d(4, 1, "p4")))
    assert "'last' (GroupConv2d) expects group features of p4; got group features of p8" in text
    assert re.search(r"at .*test_checking\.py:\d+\. Restrict2d\('p8', 'p4'\)", text)
    line = int(re.search(r"test_checking\.py:(\d+)", text)[1])
    with open(__file__, encoding="utf-8") as file:
        assert "return self.last(features)" in file.readlines()[line - 1]


def test_the_maker_of_the_input_is_named():
    text = refused(nn.Sequential(LiftConv2d(1, 2, "p8"), GroupConv2d(4, 1, "p4")))
    assert "made by '0' (LiftConv2d)" in text


def test_what_was_restricted_passes():
    passes(Custom(lambda x: restrict(x, "p8", "p4"), GroupConv2d(4, 1, "p4")))
    passes(nn.Sequential(LiftConv2d(1, 1, "p8"), Restrict2d("p8", "p4"), GroupConv2d(2, 1, "p4")))
    text = refused(
        nn.Sequential(LiftConv2d(1, 2, "p4"), Restrict2d("p8", "p4"), GroupConv2d(2, 1, "p4"))
    )
    assert "'1' (Restrict2d) expects group features of p8; got group features of p4" in text


def test_a_group_that_does_not_contain_the_other_has_no_such_remedy():
    text = refused(nn.Sequential(LiftConv2d(1, 4, "p6"), GroupConv2d(3, 1, "p8")))
    assert "p6 does not contain p8" in text


@pytest.mark.parametrize(
    ("norm", "remedy"),
    [
        (nn.BatchNorm2d(16), "GroupBatchNorm2d(2, 'p8')"),
        (nn.BatchNorm2d(16, affine=False), "GroupBatchNorm2d(2, 'p8')"),
        (nn.InstanceNorm2d(16, affine=True), "GroupInstanceNorm2d(2, 'p8')"),
        (nn.GroupNorm(2, 16), "GroupGroupNorm2d with the 2 fields of p8"),
        (nn.PReLU(16), "GroupPReLU2d(2, 'p8')"),
    ],
)
def test_norms_of_channels_on_fields_are_refused(norm, remedy):
    text = refused(nn.Sequential(LiftConv2d(1, 2, "p8"), norm))
    assert f"'1' ({type(norm).__name__}) has numbers for each channel" in text
    assert remedy in text


@pytest.mark.parametrize(
    "module",
    [
        nn.InstanceNorm2d(16),
        nn.GroupNorm(2, 16, affine=False),
        nn.PReLU(),
        nn.Sequential(GroupPool2d("p8"), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(16 * 13 * 13, 2)),
        nn.Conv2d(16, 3, 13),
    ],
    ids=["instance norm", "group norm", "one slope", "pooled", "flattened", "read-out"],
)
def test_what_treats_orientations_alike_or_ends_them_passes(module):
    passes(nn.Sequential(LiftConv2d(1, 2, "p8"), nn.SiLU(), module))


def test_images_and_features_are_not_taken_for_each_other():
    pooled = [LiftConv2d(1, 8, "p8"), GroupPool2d("p8")]
    text = refused(nn.Sequential(*pooled, GroupConv2d(1, 1, "p8")))
    assert "expects group features of p8; got images, made by '1' (GroupPool2d)" in text
    text = refused(nn.Sequential(LiftConv2d(1, 2, "p8"), LiftConv2d(16, 1, "p8")))
    assert "expects images; got group features of p8" in text
    passes(nn.Sequential(*pooled, Spread2d("p8"), GroupConv2d(8, 1, "p8")))
    passes(nn.Sequential(*pooled, LiftConv2d(8, 1, "p8")))


def test_activations_bend_no_vectors():
    flow = [LiftConv2d(1, 2, "p4"), VectorConv2d(2, 1, "p4")]
    assert "a vector's components turn together" in refused(nn.Sequential(*flow, nn.ReLU()))
    passes(nn.Sequential(*flow, LiftConv2d(2, 1, "p4", vectors=1)))
    text = refused(nn.Sequential(*flow, nn.AvgPool2d(2), GroupBatchNorm2d(1, "p2")))
    assert "got vector fields" in text


class Two(nn.Module):
    def __init__(self, first, second, join) -> None:
        super().__init__()
        self.first, self.second, self.join = first, second, join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.first(x), self.second(x))


def test_sums_of_maps_that_turn_differently_are_refused():
    eight, four = LiftConv2d(1, 2, "p8"), LiftConv2d(1, 4, "p4")
    text = refused(Two(eight, four, torch.add))
    assert "group features of p8 (2, 16, 13, 13) of 'first' (LiftConv2d)" in text
    assert "group features of p4" in text
    assert "test_checking.py" in text
    assert "cat in Two" in refused(Two(eight, four, lambda a, b: torch.cat([a, b], 1)))
    passes(Two(eight, LiftConv2d(1, 2, "p8"), lambda a, b: a * torch.sigmoid(b) + b))


def test_an_image_of_one_channel_weighs_all_orientations():
    gate = nn.Sequential(LiftConv2d(1, 1, "p8"), GroupPool2d("p8"))
    passes(Two(LiftConv2d(1, 2, "p8"), gate, lambda a, b: a * torch.sigmoid(b)))
    many = nn.Sequential(LiftConv2d(1, 16, "p8"), GroupPool2d("p8"))
    assert "got" in refused(Two(LiftConv2d(1, 2, "p8"), many, torch.mul))


def test_layers_after_an_ordinary_convolution_of_features_are_refused():
    network = nn.Sequential(
        LiftConv2d(1, 2, "p8"), nn.Conv2d(16, 16, 1), nn.ReLU(), GroupConv2d(2, 1, "p8")
    )
    text = refused(network)
    assert "'3' (GroupConv2d) expects features that turn with the image" in text
    assert "'1' (Conv2d) mixes the channels of group features of p8" in text


def test_what_is_not_known_is_let_through():
    passes(Custom(lambda x: x.roll(1, 1).flip(1), GroupConv2d(4, 1, "p4")))


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_sound_networks_pass(name):
    make, shape = NETWORKS[name]
    network = make().eval()
    x = torch.randn(shape)
    with torch.no_grad():
        wanted = network(x)
        with checked():
            found = network(x)
    torch.testing.assert_close(found, wanted)


def test_gradients_flow_as_without_it():
    network = nn.Sequential(LiftConv2d(1, 2, "p4"), nn.ReLU(), GroupPool2d("p4"))
    with checked():
        functional.mse_loss(network(IMAGE), torch.zeros(2, 2, 13, 13)).backward()
    assert network[0].weight.grad.abs().max() > 0


def test_nothing_is_left_behind():
    network = nn.Sequential(LiftConv2d(1, 2, "p8"), GroupConv2d(4, 1, "p4"))
    refused(network)
    network(IMAGE)
    with checked():
        features = network[0](IMAGE)
    with checked():
        network[1](features)  # made elsewhere: nothing is known of it


def test_converted_networks_pass():
    source = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    passes(econv.convert(source, "p4", example_input=IMAGE).eval())


# Volumes


@pytest.mark.parametrize("name", ["unet_3d_T", "resnet10_3d_T"])
def test_networks_of_volumes_pass(name):
    fields = (1, 2) if "unet" in name else (1, 1, 1, 1)
    network = econv.create_model(name, fields=fields, in_channels=1).eval()
    volume = torch.randn(1, 1, *[8 if "unet" in name else 33] * 3)
    with checked():
        network(volume)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (lambda: nn.BatchNorm3d(24), r"Use GroupBatchNorm3d\(2, 'T'\)"),
        (lambda: econv.GroupConv3d(1, 1, "O"), "Restrict3d|does not contain"),
        (lambda: econv.LiftConv3d(24, 1, "T"), r"GroupPool3d\('T'\) makes images"),
    ],
)
def test_what_volumes_cannot_mean_is_found_and_named(last, message):
    network = nn.Sequential(econv.LiftConv3d(1, 2, "T"), last()).eval()
    with checked(), pytest.raises(KindError, match=message):
        network(torch.randn(1, 1, 4, 4, 4))
