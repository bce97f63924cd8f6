"""A map that is read as one window: the convolution it stands for, without its filters."""

import pytest
import torch
from torch import nn

from econv import GroupConv2d, GroupConv3d, export
from econv.layers import GroupWindowConv2d, GroupWindowConv3d

DOUBLE = {"dtype": torch.float64}
OPTIONS = {"operators": "order<=4", "padding": "valid", "bias": True}


def both(group, centred):
    options = {**OPTIONS, "centred": centred}
    plain = GroupConv2d(3, 4, group, **options, **DOUBLE)
    window = GroupWindowConv2d(3, 4, group, **options, **DOUBLE)
    nn.init.normal_(plain.bias)
    window.load_state_dict(plain.state_dict())
    return plain, window


@pytest.mark.parametrize("group", ["p1", "p4", "p8", "p6m"])
@pytest.mark.parametrize("more", [None, 0, 1, 2])
def test_it_computes_what_the_group_convolution_computes(group, more):
    size = GroupConv2d(1, 1, group, **OPTIONS).basis.size
    side = size + (more or 0)  # of one pixel more the points lie between pixels
    plain, window = both(group, False if more is None else (side, 0))
    x = torch.randn(2, window.in_channels, side, side, **DOUBLE, requires_grad=True)
    assert torch.allclose(window(x), plain(x), atol=1e-10)
    given = torch.randn_like(plain(x))
    for layer in (plain, window):
        (layer(x) * given).sum().backward()
    assert torch.allclose(window.weight.grad, plain.weight.grad, atol=1e-9)
    assert torch.allclose(window.bias.grad, plain.bias.grad, atol=1e-9)


def test_its_plain_form_has_no_filters_either():
    _, window = both("p8", (5, 0))
    x = torch.randn(2, window.in_channels, 5, 5, **DOUBLE)
    network = nn.Sequential(window, nn.ReLU())
    plain = export(network, x)
    numbers = sum(t.numel() for t in plain.state_dict().values())
    tables = window.synthesis.numel() + 8 * window.bias.numel()
    assert numbers == window.weight.numel() + tables
    assert torch.allclose(plain(x), network(x), atol=1e-10)


def test_a_map_that_is_larger_than_its_window_is_refused():
    _, window = both("p4", False)
    with pytest.raises(ValueError, match=r"one window, 5×5 pixels; got 6×6"):
        window(torch.randn(1, 12, 6, 6, **DOUBLE))


def test_its_work_is_that_of_its_products():
    _, window = both("p8", False)
    operators, size = len(window.basis.operators), window.basis.size
    derivatives = 8 * (3 * 8) * operators * size**2
    assert window.multiply_adds() == derivatives + 8 * window.weight.numel()


@pytest.mark.parametrize("option", [{"stride": 2}, {"padding": 1}, {"groups": 2}])
def test_what_makes_no_window_is_refused(option):
    with pytest.raises(ValueError, match=f"expected one window.*{next(iter(option))}"):
        GroupWindowConv2d(2, 4, "p4", **option)


def test_a_volume_that_is_one_window_is_what_the_group_convolution_computes():
    plain = GroupConv3d(2, 3, "D2", padding="valid", bias=True, **DOUBLE)
    window = GroupWindowConv3d(2, 3, "D2", bias=True, **DOUBLE)
    nn.init.normal_(plain.bias)
    window.load_state_dict(plain.state_dict())
    x = torch.randn(2, 8, 3, 3, 3, **DOUBLE)
    assert window(x).shape == (2, 12, 1, 1, 1)
    assert torch.allclose(window(x), plain(x), atol=1e-10)
    with pytest.raises(ValueError, match=r"one window, 3×3×3 voxels; got 3×4×3"):
        window(torch.randn(1, 8, 3, 4, 3, **DOUBLE))
