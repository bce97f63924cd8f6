"""The reference: its filters worked out by hand, its convolution against torch's own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from econv import Group, reference
from econv.stencils import Central

DX = torch.tensor([[0.0, 0.0, 0.0], [-0.5, 0.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
DY = torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.0, 0.0], [0.0, -0.5, 0.0]], dtype=torch.float64)
DXX = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
DYY = DXX.T
DXY = torch.tensor([[-0.25, 0.0, 0.25], [0.0, 0.0, 0.0], [0.25, 0.0, -0.25]], dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-14) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= tolerance


def lift_of(exponents: tuple[int, int], group: str, spacing: float = 1.0) -> torch.Tensor:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    filters = reference.lift_filters(one, group, [exponents], "central", 3, spacing)
    return filters[:, 0]


def test_p4_turns_the_x_derivative_through_the_four_directions():
    assert close(lift_of((1, 0), "p4"), torch.stack([DX, DY, -DX, -DY]))


def test_p1m_mirrors_y_and_leaves_x():
    assert close(lift_of((1, 0), "p1m"), torch.stack([DX, DX]))
    assert close(lift_of((0, 1), "p1m"), torch.stack([DY, -DY]))


def test_p8_mixes_derivatives_between_the_axes():
    half = math.sqrt(0.5)
    assert close(lift_of((1, 0), "p8")[:3], torch.stack([DX, half * (DX + DY), DY]))
    # cos²∂xx + 2 sin cos ∂xy + sin²∂yy at 45°.
    assert close(lift_of((2, 0), "p8")[1], (DXX + 2 * DXY + DYY) / 2)


def test_a_derivative_divides_by_the_spacing_to_its_order():
    assert close(lift_of((1, 0), "p4", 0.5), 2 * lift_of((1, 0), "p4"))
    assert close(lift_of((2, 0), "p4", 0.5), 4 * lift_of((2, 0), "p4"))


def test_lifting_is_linear_in_the_coefficients_and_ordered_by_field_then_element():
    beta = torch.randn(2, 3, 2, dtype=torch.float64)
    filters = reference.lift_filters(beta, "p4", [(0, 0), (1, 0)], "central", 3)
    one = torch.zeros(3, 3, dtype=torch.float64)
    one[1, 1] = 1.0
    for o in range(2):
        for c in range(3):
            for g, turned in enumerate([DX, DY, -DX, -DY]):
                wanted = beta[o, c, 0] * one + beta[o, c, 1] * turned
                assert close(filters[4 * o + g, c], wanted)


def test_vector_channels_are_read_in_the_frame_of_each_element():
    beta = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)  # the x component
    filters = reference.lift_filters(beta, "p4", [(0, 0)], "central", 1, vectors=1)
    assert filters[..., 0, 0].tolist() == [[1, 0], [0, 1], [-1, 0], [0, -1]]


def test_scalars_come_before_vectors():
    beta = torch.tensor([[[5.0], [0.0], [1.0]]], dtype=torch.float64)  # a scalar, then (x, y)
    filters = reference.lift_filters(beta, "p4", [(0, 0)], "central", 1, vectors=1)
    assert filters[..., 0, 0].tolist() == [[5, 0, 1], [5, -1, 0], [5, 0, -1], [5, 1, 0]]


def test_group_filters_of_p4_with_order_zero_are_circulant():
    beta = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64).reshape(1, 1, 4, 1)
    filters = reference.group_filters(beta, "p4", [(0, 0)], "central", 1)[..., 0, 0]
    assert filters.tolist() == [[2, 3, 5, 7], [7, 2, 3, 5], [5, 7, 2, 3], [3, 5, 7, 2]]


@pytest.mark.parametrize("name", ["p3", "p3m", "p4m"])
def test_output_orientation_reads_the_input_at_the_product_of_the_matrices(name):
    """The place of every weight follows from the matrices alone, not from the product table."""
    group = Group(name)
    beta = torch.rand(2, 2, group.order, 1, dtype=torch.float64) + 1
    filters = reference.group_filters(beta, name, [(0, 0)], "central", 1)[..., 0, 0]
    wanted = torch.zeros_like(filters)
    for g, a in enumerate(group.matrices):
        for k, b in enumerate(group.matrices):
            (h,) = [h for h, m in enumerate(group.matrices) if np.allclose(m, a @ b, atol=1e-12)]
            for o in range(2):
                for i in range(2):
                    wanted[o * group.order + g, i * group.order + h] = beta[o, i, k, 0]
    assert torch.equal(filters, wanted)


def test_group_filters_turn_with_the_output_orientation():
    beta = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64).reshape(1, 1, 4, 1)
    filters = reference.group_filters(beta, "p4", [(1, 0)], "central", 3)
    for g, turned in enumerate([DX, DY, -DX, -DY]):
        for h in range(4):
            assert close(filters[g, h], turned if g == h else torch.zeros_like(DX))


def test_vector_filters_turn_components_back_to_the_picture():
    beta = torch.zeros(2, 1, 4, 1, dtype=torch.float64)
    beta[0, 0, 0] = 1.0  # s₁(x, A) = e(x, A), s₂ = 0
    filters = reference.vector_filters(beta, "p4", [(0, 0)], "central", 1)[..., 0, 0]
    assert filters.tolist() == [[1, 0, -1, 0], [0, 1, 0, -1]]
    second = reference.vector_filters(beta.flip(0), "p4", [(0, 0)], "central", 1)[..., 0, 0]
    assert second.tolist() == [[0, -1, 0, 1], [1, 0, -1, 0]]


@given(
    group=st.sampled_from(["p1", "p3", "p4", "p5", "p6m", "p8", "p8m"]),
    slope=st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
    spacing=st.floats(0.25, 4),
)
@settings(max_examples=20, deadline=None)
def test_lifting_a_plane_gives_its_slope_along_each_direction(group, slope, spacing):
    """Central differences are exact on planes: χ^(A)[ax + by] = (first column of A) · (a, b)."""
    line = torch.arange(7, dtype=torch.float64)
    image = (slope[0] * line - slope[1] * line[:, None])[None, None]
    filters = lift_of((1, 0), group, spacing)[:, None]
    found = reference.convolve(image, filters)[0, :, 2, 2]
    directions = torch.from_numpy(Group(group).matrices[:, :, 0].copy())
    wanted = directions @ torch.tensor(slope, dtype=torch.float64) / spacing
    assert close(found, wanted, 1e-12)


def test_wider_stencils_enter_as_values():
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    filters = reference.lift_filters(one, "p1", [(1, 0)], Central(4), 5)
    wanted = torch.tensor([1.0, -8.0, 0.0, 8.0, -1.0], dtype=torch.float64) / 12
    assert close(filters[0, 0, 2], wanted)
    assert filters[0, 0, [0, 1, 3, 4]].abs().max() == 0


@given(
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 3),
    size=st.sampled_from([1, 3]),
    height=st.integers(5, 9),
    width=st.integers(5, 9),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_convolve_means_what_conv2d_means(
    stride, padding, dilation, groups, size, height, width, bias, seed
):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, filters = draw(2, 2 * groups, height, width), draw(4 * groups, 2, size, size)
    offset = draw(4 * groups) if bias else None
    found = reference.convolve(x, filters, offset, stride, padding, dilation, groups)
    wanted = functional.conv2d(x, filters, offset, stride, padding, dilation, groups)
    assert close(found, wanted, 1e-12)


def test_convolve_passes_gradients_to_everything_it_reads():
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    filters = torch.randn(2, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(*inputs):
        return reference.convolve(*inputs, stride=2, padding=1, groups=2)

    assert torch.autograd.gradcheck(run, (x, filters, bias))


def test_convolve_rejects_the_wrong_number_of_channels():
    with pytest.raises(ValueError, match="expected 4 channels; got 3"):
        reference.convolve(torch.zeros(1, 3, 5, 5), torch.zeros(2, 2, 3, 3), groups=2)
