"""Grids that people have: walls along one axis, and what stays exact on them."""

import pytest
import torch
from torch import nn

import econv
from econv import GroupBatchNorm2d, GroupConv2d, LiftConv2d, VectorConv2d
from econv.lab import plain_twin
from econv.models import ConvNet, ResNet
from econv.testing import assert_equivariant, equivariance_error

CHANNELS_BETWEEN_WALLS = [("zeros", "circular"), ("replicate", "circular"), ("reflect", "zeros")]
DOUBLE = {"dtype": torch.float64}


def flips_and_half_turns(group):
    """The elements that map each axis onto itself."""
    return [k for k in range(group.order) if abs(group.matrices[k, 0, 1]) < 1e-12]


def chain(group, **options):
    """Image and velocity in, velocity out."""
    return nn.Sequential(
        LiftConv2d(4, 2, group, vectors=2, bias=True, **options),
        GroupBatchNorm2d(2, group, **DOUBLE),
        nn.ReLU(),
        GroupConv2d(2, 2, group, bias=True, **options),
        VectorConv2d(2, 1, group, **options),
    ).eval()


@pytest.mark.parametrize("mode", CHANNELS_BETWEEN_WALLS, ids="-".join)
@pytest.mark.parametrize("name", ["p2m", "p4m", "p8m"])
def test_between_walls_half_turns_and_flips_are_exact_and_quarter_turns_are_not(name, mode):
    network, group = chain(name, padding_mode=mode, **DOUBLE), econv.Group(name)
    x = torch.randn(2, 4, 9, 12, **DOUBLE)
    kinds = {"input_kind": "vector", "output_kind": "vector"}
    assert_equivariant(network, x, group, elements=flips_and_half_turns(group), **kinds)
    assert len(flips_and_half_turns(group)) == 4
    square = torch.randn(2, 4, 12, 12, **DOUBLE)
    for element in set(group.grid_symmetries) - set(flips_and_half_turns(group)):
        assert equivariance_error(network, square, element, group, **kinds) > 1e-2


@pytest.mark.parametrize("engine", ["dense", "spectral"])
def test_a_channel_that_is_periodic_along_x_can_be_shifted_along_x(engine):
    network = chain("p4", padding_mode=("zeros", "circular"), engine=engine, **DOUBLE)
    x = torch.randn(2, 4, 9, 12, **DOUBLE)
    with torch.no_grad():
        out = network(x)
        torch.testing.assert_close(network(x.roll(5, 3)), out.roll(5, 3), rtol=0, atol=1e-12)
        assert (network(x.roll(5, 2)) - out.roll(5, 2)).abs().max() > 1e-2


def test_equal_modes_are_one():
    assert GroupConv2d(1, 1, "p4", padding_mode=("circular", "circular")).padding_mode == "circular"
    layer = GroupConv2d(1, 1, "p4", padding_mode=["zeros", "circular"])
    assert layer.padding_mode == ("zeros", "circular")
    assert "padding_mode=('zeros', 'circular')" in repr(layer)


def test_each_axis_has_the_limits_of_its_mode():
    layer = GroupConv2d(1, 1, "p4", padding=6, padding_mode=("replicate", "circular"))
    assert layer(torch.randn(1, 4, 5, 6)).shape == (1, 4, 13, 14)
    with pytest.raises(ValueError, match=r"('replicate', 'circular').*got 6×5"):
        layer(torch.randn(1, 4, 6, 5))


@pytest.mark.parametrize("kind", [ResNet, ConvNet])
def test_networks_take_a_mode_for_each_axis_and_export(kind):
    options = {"padding_mode": ("replicate", "circular")}
    shape = {"depth": 8, "fields": (1, 2, 2)} if kind is ResNet else {"fields": (2,) * 6}
    network = kind("p4", in_channels=1, options=options, **shape).eval()
    x = torch.randn(2, 1, 28, 28)
    wide = [m for m in network.modules() if isinstance(m, LiftConv2d | GroupConv2d) and m.padding]
    assert {layer.padding_mode for layer in wide} == {("replicate", "circular")}
    plain = econv.export(network, x)
    kinds = {type(module) for module in plain.modules()}
    assert {nn.ReplicationPad2d, nn.CircularPad2d} <= kinds
    torch.testing.assert_close(plain(x), network(x), rtol=1e-5, atol=1e-5)
    # The norm after a convolution is folded into it, as ever.
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
    ordinary = econv.export(kind("p4", in_channels=1, **shape).eval(), x)
    assert norms == sum(isinstance(m, nn.BatchNorm2d) for m in ordinary.modules())


def test_a_twin_pads_as_its_network_does():
    network = chain("p4", padding_mode=("zeros", "circular"))
    twin = plain_twin(network)
    assert isinstance(twin[0][0], nn.CircularPad2d)
    x = torch.randn(1, 4, 9, 12)
    with torch.no_grad():
        torch.testing.assert_close(twin[0](x.roll(3, 3)), twin[0](x).roll(3, 3))
        assert not torch.allclose(twin[0](x.roll(3, 2)), twin[0](x).roll(3, 2), atol=1e-2)
