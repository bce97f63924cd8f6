"""Orientations that are weighed: exact under turns, a mean at first, sharp where it should be."""

import numpy as np
import pytest
import torch
from torch import nn

from econv import Group, GroupPool2d, LiftConv2d, export
from econv.layers import GroupAttentionPool2d
from econv.layers.attention import cells_in_frames
from econv.testing import assert_equivariant

DOUBLE = {"dtype": torch.float64}
SCALAR = {"input_kind": "scalar", "output_kind": "scalar"}


def drawn(group, fields=3):
    pool = GroupAttentionPool2d(fields, group, **DOUBLE)
    nn.init.normal_(pool.weight)
    return pool


@pytest.mark.parametrize("group", ["p4", "p4m", "p8"])
def test_it_turns_with_the_image(group):
    network = nn.Sequential(LiftConv2d(1, 3, group, **DOUBLE), nn.ReLU(), drawn(group))
    assert_equivariant(network, torch.randn(2, 1, 9, 9, **DOUBLE), group, **SCALAR)


def test_a_score_that_does_not_follow_the_group_would_be_seen():
    pool = drawn("p4")
    pool.places = (
        pool.places[:, :1].expand(-1, 4).flip(0)
    )  # every orientation reads another's features
    network = nn.Sequential(LiftConv2d(1, 3, "p4", **DOUBLE), nn.ReLU(), pool)
    with pytest.raises(AssertionError):
        assert_equivariant(network, torch.randn(2, 1, 9, 9, **DOUBLE), "p4", **SCALAR)


def test_at_initialisation_it_is_the_mean():
    x = torch.randn(2, 24, 5, 5)
    assert torch.allclose(GroupAttentionPool2d(3, "p8")(x), GroupPool2d("p8", "mean")(x), atol=1e-6)


def test_a_large_score_takes_one_orientation():
    group = Group("p4")
    pool = GroupAttentionPool2d(2, group)
    with torch.no_grad():
        pool.weight[0, 0] = 1e4  # the orientation in which field 0 is largest
    x = torch.rand(5, 8)
    best = x[:, :4].argmax(1)
    wanted = torch.stack([x[torch.arange(5), best], x[torch.arange(5), 4 + best]], 1)
    assert torch.allclose(pool(x), wanted, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 12), (2, 12, 6, 6)])
def test_its_plain_form_computes_the_same(shape):
    network, x = nn.Sequential(drawn("p4"), nn.ReLU()), torch.randn(*shape, **DOUBLE)
    assert torch.allclose(export(network, x)(x), network(x), atol=1e-12)


def test_other_fields_are_refused():
    with pytest.raises(ValueError, match="12 channels"):
        drawn("p4")(torch.randn(2, 16, 5, 5, **DOUBLE))


@pytest.mark.parametrize("name", ["p4", "p8", "p6m"])
@pytest.mark.parametrize("side", [2, 3, 5])
def test_cells_in_frames_interpolate_linear_maps_exactly(name, side):
    group, middle = Group(name), (side - 1) / 2
    found = cells_in_frames(group, side)
    np.testing.assert_allclose(found.sum(axis=2), 1.0, atol=1e-12)
    assert (found >= 0).all()
    rows, columns = np.divmod(np.arange(side**2), side)
    x, y = columns - middle, middle - rows
    for matrix, cells in zip(group.matrices, found, strict=True):
        wanted = (matrix @ np.stack([x, y])).clip(-middle, middle)
        np.testing.assert_allclose(np.stack([cells @ x, cells @ y]), wanted, atol=1e-8)
