"""Grids that people have: walls along one axis, pixels that are no squares; what stays exact."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import econv
from econv import GroupBatchNorm2d, GroupConv2d, LiftConv2d, Upsample2d, VectorConv2d, filter_basis
from econv.lab import layer_errors, operator_symbols, plain_twin, resolution_curve
from econv.models import ConvNet, ResNet
from econv.operators import Polynomial
from econv.stencils import Central, Gaussian, Isotropic, Stencil
from econv.testing import assert_equivariant, equivariance_error, smooth_field, transform

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


# Pixels that are rectangles

RECTANGLES = [(0.5, 1.0), (1.0, 0.4), (0.3, 0.2)]
SETS = [Isotropic(8), Isotropic(), Gaussian(0.9), Central(), Central(4)]


def quarter_turns(group):
    """The elements that map one axis onto the other."""
    return [k for k in group.grid_symmetries if k not in flips_and_half_turns(group)]


@pytest.mark.parametrize("stencils", SETS, ids=repr)
@pytest.mark.parametrize("aspect", [0.3, 0.5, 1.5, 4.0])
def test_stencils_on_rectangles_have_the_moments_of_physical_derivatives(stencils, aspect):
    """Exact on polynomials of x and y in lengths, not in pixels, and no others pass the check."""
    for exponents in [(1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]:
        size = max(7, stencils.smallest_size([Polynomial.monomial(exponents)]))
        stencil = stencils.stencil(Polynomial.monomial(exponents), size, aspect)
        for powers in [(1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (3, 0), (2, 2)]:
            if sum(powers) > sum(exponents) + 1:
                continue
            found = stencil.apply(lambda x, y, p=powers: x ** p[0] * y ** p[1])
            wanted = math.prod(map(math.factorial, powers)) if powers == exponents else 0.0
            assert found == pytest.approx(wanted, abs=1e-9)
        if exponents[0] != exponents[1]:  # of ∂xy, only the area counts
            with pytest.raises(ArithmeticError, match="not a stencil of accuracy"):
                Stencil(stencil.operator, stencil.weights, stencil.accuracy, 1.1 * aspect)


@pytest.mark.parametrize("stencils", SETS, ids=repr)
def test_stencils_are_symmetric_as_rectangles_are_to_the_last_bit(stencils):
    for exponents in [(1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (2, 2)]:
        weights = stencils.weights_on(exponents, 7, 0.5)
        np.testing.assert_array_equal(weights[:, ::-1], (-1) ** exponents[0] * weights)
        np.testing.assert_array_equal(weights[::-1], (-1) ** exponents[1] * weights)
        squares = stencils.weights_on(exponents, 7, 1.0)
        np.testing.assert_array_equal(squares, stencils.weights(exponents, 7))
        across = stencils.weights_on(exponents[::-1], 7, 2.0)  # the rectangles, lying down
        np.testing.assert_allclose(weights, across[::-1, ::-1].T, rtol=0, atol=1e-6)


def test_stencils_are_designed_for_the_rectangles():
    """Less turns wrongly than with those of squares, stretched."""

    class Stretched(Isotropic):
        def weights_on(self, exponents, size, aspect):
            return super(Isotropic.__mro__[1], self).weights_on(exponents, size, aspect)

        def weights(self, exponents, size):
            return Isotropic.weights_on(self, exponents, size, 1.0)

    def worst(stencils):
        found = operator_symbols(filter_basis("p8", stencils=stencils, size=7, aspect=2.0), 33)
        return max(symbol.turning_error for symbol in found)

    assert worst(Isotropic(8)) < worst(Stretched(8)) / 3
    assert worst(Isotropic(8)) < worst(Central()) / 5


@pytest.mark.parametrize("spacing", RECTANGLES)
@pytest.mark.parametrize("kind", ["isotropic", "central", "gaussian"])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_derivative_is_the_slope_over_lengths(kind, spacing, dilation):
    options = {"spacing": spacing, "stencils": kind, "dilation": dilation, "padding": "valid"}
    layer = LiftConv2d(1, 1, "p8", **options, **DOUBLE)
    beta = torch.zeros_like(layer.coefficients())
    beta[..., 1] = 1.0  # ∂x
    layer.set_coefficients(beta)
    torch.testing.assert_close(layer.coefficients(), beta, rtol=0, atol=1e-12)
    dy, dx = spacing
    line = torch.arange(21, dtype=torch.float64)
    plane = 2.0 * dx * line - (-3.0) * dy * line[:, None]  # slopes 2 along x, −3 along y, up
    directions = torch.tensor(layer.group.matrices[:, :, 0])
    wanted = directions @ torch.tensor([2.0, -3.0], **DOUBLE)
    out = layer(plane[None, None])
    torch.testing.assert_close(out, wanted[None, :, None, None].expand_as(out), rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", ["dense", "spectral"])
@pytest.mark.parametrize("name", ["p2", "p2m", "p4", "p4m", "p6m", "p8m"])
def test_on_rectangles_half_turns_and_flips_are_exact(name, engine):
    network, group = chain(name, spacing=(0.5, 0.8), engine=engine, **DOUBLE), econv.Group(name)
    x = torch.randn(2, 4, 14, 11, **DOUBLE)
    kinds = {"input_kind": "vector", "output_kind": "vector"}
    assert_equivariant(network, x, group, **kinds)  # by default, all that are exact
    assert_equivariant(network, x, group, elements=flips_and_half_turns(group), **kinds)
    for element in quarter_turns(group):
        with pytest.raises(ValueError, match="expected a tolerance"):
            assert_equivariant(network, x, group, elements=[element], **kinds)


@pytest.mark.parametrize("spacing", RECTANGLES[:2])
@pytest.mark.parametrize("stencils", ["isotropic", "central", "gaussian"])
@pytest.mark.parametrize("element", [1, 2])  # an eighth and a quarter of a turn
def test_other_angles_have_order_two_on_rectangles(element, stencils, spacing):
    torch.manual_seed(0)
    options = {"spacing": spacing, "stencils": stencils, **DOUBLE}
    layers = nn.Sequential(LiftConv2d(1, 2, "p8", **options), GroupConv2d(2, 1, "p8", **options))
    assert 1.9 < resolution_curve(layers, element).order < 2.5


@pytest.mark.parametrize("element", [1, 2])
def test_taking_rectangles_for_squares_does_not_converge(element, monkeypatch):
    def of_squares(basis, exponents):
        return basis.stencils.weights(exponents, basis.size)

    monkeypatch.setattr(econv.FilterBasis, "monomial", of_squares)
    torch.manual_seed(0)
    layer = LiftConv2d(1, 2, "p8", spacing=(0.5123, 1.0), **DOUBLE)  # no other test has its basis
    assert resolution_curve(layer, element).order < 1


def test_half_turns_on_rectangles_have_no_order_to_measure():
    layer = LiftConv2d(1, 2, "p8", spacing=(0.5, 1.0))
    with pytest.raises(ValueError, match="error is zero at every resolution"):
        resolution_curve(layer, 4)


def test_a_weight_means_the_same_operator_on_every_grid():
    square = GroupConv2d(1, 2, "p8", spacing=math.sqrt(0.5), **DOUBLE)
    tall = GroupConv2d(1, 2, "p8", spacing=(1.0, 0.5), **DOUBLE)
    tall.load_state_dict(square.state_dict())
    torch.testing.assert_close(tall.coefficients(), square.coefficients())
    assert (tall.filters() - square.filters()).abs().max() > 1e-3


def test_equal_lengths_are_one_and_the_grid_is_said():
    assert GroupConv2d(1, 1, "p4", spacing=(0.5, 0.5)).spacing == 0.5
    layer = GroupConv2d(1, 1, "p4", spacing=[0.5, 1])
    assert layer.spacing == (0.5, 1.0)
    assert "spacing=(0.5, 1.0)" in repr(layer)
    assert repr(layer.basis).endswith("aspect=0.5)")
    assert layer.basis != GroupConv2d(1, 1, "p4").basis
    assert layer.convolution is not GroupConv2d(1, 1, "p4").convolution
    assert layer.convolution is GroupConv2d(1, 1, "p4", spacing=(1.0, 2.0)).convolution
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.basis == layer.basis
        assert torch.equal(twin.filters(), layer.filters())


def test_another_shape_of_pixels_needs_another_layer():
    layer = GroupConv2d(1, 1, "p4", spacing=(0.5, 1.0))
    layer.spacing = (0.25, 0.5)  # as square layers, finer
    assert layer.coefficients().isfinite().all()
    layer.spacing = 0.5
    with pytest.raises(ValueError, match=r"pixels 0.5 times as high as wide.*got 0.5: make"):
        layer.coefficients()


def test_three_dimensions_have_two_ratios():
    with pytest.raises(ValueError, match="aspect of 1 or 2 numbers in 3 dimensions"):
        Central().stencil(Polynomial.monomial((1, 0, 0)), 3, 2.0)


@pytest.mark.parametrize("spacing", [(0.5, 1.0), (1.0, 0.7)])
def test_turned_pixels_are_where_lengths_say(spacing):
    """A Gaussian hill off the centre, turned in closed form."""
    dy, dx = spacing
    rows, columns = round(24 / dy) + 1, round(24 / dx) + 1
    y = (torch.arange(rows, **DOUBLE) - (rows - 1) / 2).flip(0)[:, None] * dy
    x = (torch.arange(columns, **DOUBLE) - (columns - 1) / 2) * dx

    def hill(angle):
        across, up = 4 * math.cos(angle), 4 * math.sin(angle)
        return torch.exp(-((x - across) ** 2 / 9 + (y - up) ** 2 / 9))[None, None]

    for element in range(8):
        found = transform(hill(0.3), "p8", element, spacing=spacing)
        wanted = hill(0.3 + element * math.pi / 4)
        inside = (x**2 + y**2 <= 10**2).double()
        assert ((found - wanted) * inside).abs().max() < 2e-4
        wrong = transform(hill(0.3), "p8", element)
        if element % 4 and wrong.shape == wanted.shape:
            assert ((wrong - wanted) * inside).abs().max() > 0.1


def test_the_error_on_rectangles_is_that_of_lengths():
    layer = LiftConv2d(1, 2, "p8", spacing=(0.6, 1.0), size=7, **DOUBLE)
    x = smooth_field(81, smoothness=4.0)
    assert equivariance_error(layer, x, 1) < 1e-4
    assert equivariance_error(layer, x, 2) < 1e-4  # a quarter turn
    assert equivariance_error(layer, x, 2, spacing=1.0) > 0.05  # of pixels
    other = nn.Sequential(layer, GroupConv2d(2, 1, "p8", spacing=(1.0, 2.0), **DOUBLE))
    with pytest.raises(ValueError, match=r"pixels of one shape.*\(0.6, 1.0\), \(1.0, 2.0\)"):
        equivariance_error(other, x, 1, "p8")


def test_what_turns_squares_says_so():
    with pytest.raises(ValueError, match=r"square pixels.*spacing=\(0.6, 1.0\)"):
        layer_errors(LiftConv2d(1, 2, "p4", spacing=(0.6, 1.0)), torch.randn(1, 1, 9, 9))


@pytest.mark.parametrize("kind", [ResNet, ConvNet])
def test_networks_take_rectangles_and_export(kind):
    options = {"spacing": (0.5, 1.0)}
    shape = {"depth": 8, "fields": (1, 2, 2)} if kind is ResNet else {"fields": (2,) * 6}
    network = kind("p4", in_channels=1, options=options, **shape).eval()
    x = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(econv.export(network, x)(x), network(x), rtol=1e-5, atol=1e-5)


def test_a_size_that_doubling_cannot_give_is_refused():
    """Of n pixels come 2n or 2n − 1, and nothing else."""
    x = torch.randn(1, 2, 5, 7)
    for size in ((10, 14), (9, 13), (10, 13)):
        assert Upsample2d()(x, size).shape[2:] == size
    for size in ((8, 14), (11, 14), (10, 12), (10, 15)):
        with pytest.raises(ValueError, match="size"):
            Upsample2d()(x, size)
