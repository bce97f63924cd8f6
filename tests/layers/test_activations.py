"""Activations whose result the grid can hold: what they compute, and what turns with them."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import econv
from econv import GroupActivation2d, GroupBatchNorm2d, GroupConv2d, LiftConv2d, group_activation
from econv.layers.activations import ACTIVATIONS
from econv.testing import assert_equivariant, equivariance_error, smooth_field

KINDS = {"input_kind": "regular", "output_kind": "regular"}
GRIDS = (1, 2, 4)


def reference(x, function, oversample, width):
    """Means by Gaussian weights of the pixels that there are, point by point."""
    each = width if oversample == 1 else width / math.sqrt(2)

    def matrix(size, half, back):
        pixels, points = torch.arange(size) * 1.0, torch.arange(size + 1) - 0.5
        to, of = (pixels, points if half else pixels) if back else (points, pixels)
        to = to if half or back else pixels
        distance = (to[:, None] - of).double()
        reach = math.ceil(2.5 * each + 0.5) - 0.5 if half else math.ceil(2.5 * each)
        weights = torch.exp(-(distance**2) / (2 * each**2)) * (distance.abs() <= reach)
        return weights / weights.sum(1, keepdim=True)

    def blurred(z, halves, back):
        size = [n - half * back for n, half in zip(z.shape[2:], halves, strict=True)]
        rows, columns = (matrix(n, h, back) for n, h in zip(size, halves, strict=True))
        return rows @ z @ columns.T

    if oversample == 1:
        return blurred(function(x), (0, 0), True)
    grids = {2: [(0, 0), (1, 1)], 4: [(0, 0), (1, 1), (0, 1), (1, 0)]}[oversample]
    found = [blurred(function(blurred(x, h, False)), h, True) for h in grids]
    return sum(found) / oversample


@pytest.mark.parametrize("oversample", GRIDS)
@pytest.mark.parametrize("width", [0.4, 0.7, 1.2])
@pytest.mark.parametrize("size", [(6, 6), (7, 9)])
def test_it_is_what_it_says(oversample, width, size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    layer = GroupActivation2d("gelu", oversample, width).double()
    expected = reference(x, functional.gelu, oversample, width)
    assert (layer(x) - expected).abs().max() < 1e-12
    assert (group_activation(x, torch.tanh, oversample, width) - expected).abs().max() > 0.1


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_every_activation_has_a_name(kind):
    x = torch.randn(1, 8, 7, 7, dtype=torch.float64)
    named = GroupActivation2d(kind.__name__, 2).double()
    assert torch.equal(named(x), GroupActivation2d(kind().forward, 2).double()(x))
    assert torch.equal(GroupActivation2d(kind.__name__.lower(), width=0).double()(x), kind()(x))


@pytest.mark.parametrize("oversample", GRIDS)
@pytest.mark.parametrize("size", [8, 9])
def test_quarter_turns_and_flips_are_exact(oversample, size):
    x = torch.randn(2, 3 * 16, size, size, dtype=torch.float64)
    layer = GroupActivation2d("softplus", oversample).double()
    assert_equivariant(layer, x, "p8m", **KINDS)
    shifted = nn.Sequential(nn.ZeroPad2d((1, 0, 0, 0)), layer)
    with pytest.raises((AssertionError, ValueError)):
        assert_equivariant(shifted, x, "p8m", **KINDS)


@pytest.mark.parametrize("oversample", GRIDS)
def test_constants_stay_constant_to_the_border(oversample):
    x = torch.full((1, 2, 5, 6), 0.7, dtype=torch.float64)
    out = group_activation(x, "silu", oversample)
    assert (out - functional.silu(x)).abs().max() < 1e-14


@pytest.mark.parametrize("oversample", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_and_memory_format_are_kept(oversample, dtype):
    x = torch.randn(2, 8, 9, 10)
    layer = GroupActivation2d("silu", oversample)
    exact = layer(x)
    for form in (torch.contiguous_format, torch.channels_last):
        out = layer.to(dtype)(x.to(dtype).contiguous(memory_format=form))
        assert out.dtype == dtype
        assert out.is_contiguous(memory_format=form)
        assert (out.float() - exact).abs().max() < {torch.float32: 1e-6}.get(dtype, 0.05)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own jvp
@pytest.mark.parametrize("oversample", GRIDS)
def test_gradients_and_functional_transforms(oversample):
    layer = GroupActivation2d("softplus", oversample).double()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    each = torch.func.vmap(lambda z: layer(z[None])[0])(x.detach())
    assert (each - layer(x)).abs().max() < 1e-14
    tangent = torch.randn_like(x)
    forward = torch.func.jvp(layer, (x.detach(),), (tangent,))[1]
    step = 1e-6 * tangent
    difference = (layer(x + step) - layer(x - step)) / 2e-6
    assert (forward - difference).abs().max() < 1e-7


@pytest.mark.parametrize("oversample", GRIDS)
def test_it_exports_with_dynamic_sizes_and_pickles(oversample, tmp_path):
    layer = GroupActivation2d("silu", oversample)
    sizes = {2: torch.export.Dim("h", min=5, max=64), 3: torch.export.Dim("w", min=5, max=64)}
    program = torch.export.export(layer, (torch.randn(2, 8, 9, 12),), dynamic_shapes=(sizes,))
    x = torch.randn(2, 8, 16, 7)
    assert (program.module()(x) - layer(x)).abs().max() < 1e-6
    plain = econv.export(nn.Sequential(LiftConv2d(1, 2, "p4"), copy.deepcopy(layer)))
    assert not any("econv" in type(m).__module__ for m in plain.modules())
    torch.save(layer, tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(again(x), layer(x))
    assert not layer.state_dict()


def test_states_of_networks_do_not_change_with_activations():
    plain = econv.create_model("cifar_resnet8_p4", fields=(1, 2, 2))
    smooth = econv.create_model(
        "cifar_resnet8_p4", fields=(1, 2, 2), activation="silu", antialias=0.7, oversample=2
    )
    smooth.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 20, 20)
    assert not torch.allclose(plain.eval()(x), smooth.eval()(x))


class Six(nn.Module):
    """A lift and five convolutions with norms, as benchmarks/depth.py measures them."""

    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        layers = []
        for number in range(6):
            conv = GroupConv2d if number else LiftConv2d
            layers += [
                conv(3 if number else 1, 3, "p8", dtype=torch.float64),
                GroupBatchNorm2d(3, "p8", momentum=1.0, dtype=torch.float64),
                activation,
            ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def deep_error(activation, sigma=1.5):
    network, image = Six(activation), smooth_field(97, 1, sigma)
    with torch.no_grad():
        network.train()(image)  # statistics of the straight image, held fixed
    kinds = {"input_kind": "scalar", "output_kind": "regular"}
    return equivariance_error(network.eval(), image, 1, "p8", margin=3 / 8, **kinds)


def test_six_layers_turn_as_one_does():
    assert deep_error(nn.ReLU()) > 0.06
    assert deep_error(GroupActivation2d("silu").double()) < 0.01
    assert deep_error(GroupActivation2d("silu", 2).double()) < 0.004
    assert deep_error(GroupActivation2d("relu", 4, 0.9).double()) < 0.03


def test_bad_arguments_are_told():
    for given in (0, 3, 8, True, 2.0):
        with pytest.raises(ValueError, match="1, 2 or 4 points"):
            GroupActivation2d("relu", given)
    for given in (-1, 5, "wide", True, math.nan):
        with pytest.raises(ValueError, match="expected width from 0 to 4"):
            GroupActivation2d("relu", 1, given)
    with pytest.raises(ValueError, match="above 0"):
        GroupActivation2d("relu", 2, 0)
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        GroupActivation2d("swish")
    for given in (nn.ReLU, 3):
        with pytest.raises(ValueError, match="function of a tensor"):
            group_activation(torch.randn(1, 1, 5, 5), given)
    with pytest.raises(ValueError, match="floating-point"):
        GroupActivation2d()(torch.zeros(1, 1, 5, 5, dtype=torch.int64))
