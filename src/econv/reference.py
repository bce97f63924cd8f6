"""The paper's sums as plain loops in float64: slow, obvious, and independent of `basis`.

Everything fast in this library is tested against this file. Nothing here is shared with the
engines: a filter is built term by term from equations 20 and 22, a convolution tap by tap.
The functions take and give tensors, so that autograd gives the reference for every gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from econv.groups import Group, GroupLike
from econv.operators import OperatorsLike, Polynomial, operator_set
from econv.stencils import StencilsLike, stencil_set

__all__ = [
    "convolve",
    "group_filters",
    "lift_filters",
    "pad",
    "recentre",
    "scalar_filters",
    "vector_filters",
]


Spacing = float | tuple[float, float]
"""The length of a pixel, or its lengths along (y, x)."""


def lift_filters(
    coefficients: Tensor,
    group: GroupLike,
    operators: OperatorsLike = "paper",
    stencils: StencilsLike = "isotropic",
    size: int = 5,
    spacing: Spacing = 1.0,
    vectors: int = 0,
    pseudoscalars: int = 0,
) -> Tensor:
    """Ψ̃ as a filter bank: β ``[out, in, operators]`` → ``[out * order, in, size, size]``.

    The last 2·``vectors`` input channels are vectors (x, y), read in frame A: A⁻¹v. Before them
    come ``pseudoscalars``, which a frame that was mirrored reads with the other sign.
    """
    found = Group(group)
    out_fields, in_channels, _ = coefficients.shape
    filters = torch.zeros(out_fields * found.order, in_channels, size, size, dtype=torch.float64)
    scalars = in_channels - 2 * vectors
    for o in range(out_fields):
        for g in range(found.order):
            for c in range(in_channels):
                beta = coefficients[o, c]
                chi = turned_filter(beta, found, g, operators, stencils, size, spacing)
                if c < scalars:
                    mirrored = c >= scalars - pseudoscalars and g >= found.rotations
                    filters[o * found.order + g, c] += -chi if mirrored else chi
                    continue
                vector, component = divmod(c - scalars, 2)
                for d in range(2):
                    # Component c of A⁻¹v is Σ_d (A⁻¹)_cd v_d.
                    inverse = float(found.matrices[found.inverse[g], component, d])
                    filters[o * found.order + g, scalars + 2 * vector + d] += inverse * chi
    return filters


def group_filters(
    coefficients: Tensor,
    group: GroupLike,
    operators: OperatorsLike = "paper",
    stencils: StencilsLike = "isotropic",
    size: int = 5,
    spacing: Spacing = 1.0,
) -> Tensor:
    """Φ̃ as a filter bank: β ``[out, in, order, operators]`` → ``[out * order, in * order, …]``.

    Equation 22: output orientation A reads input orientation Ak through χ_k^(A).
    """
    found = Group(group)
    out_fields, in_fields, order, _ = coefficients.shape
    filters = torch.zeros(out_fields * order, in_fields * order, size, size, dtype=torch.float64)
    for o in range(out_fields):
        for i in range(in_fields):
            for g in range(order):
                for k in range(order):
                    beta = coefficients[o, i, k]
                    chi = turned_filter(beta, found, g, operators, stencils, size, spacing)
                    filters[o * order + g, i * order + int(found.product[g, k])] += chi
    return filters


def vector_filters(
    coefficients: Tensor,
    group: GroupLike,
    operators: OperatorsLike = "paper",
    stencils: StencilsLike = "isotropic",
    size: int = 5,
    spacing: Spacing = 1.0,
) -> Tensor:
    """Group features to vector fields: β ``[2 * out, in, order, operators]`` → ``[2 * out, …]``.

    out(x) = Σ_A A · [s₁(x, A), s₂(x, A)], where s = Φ̃[e] has two fields for each vector.
    """
    found = Group(group)
    fields = group_filters(coefficients, found, operators, stencils, size, spacing)
    filters = torch.zeros(coefficients.shape[0], *fields.shape[1:], dtype=torch.float64)
    for vector in range(coefficients.shape[0] // 2):
        for g in range(found.order):
            for row in range(2):
                for column in range(2):
                    entry = float(found.matrices[g, row, column])
                    field = (2 * vector + column) * found.order + g
                    filters[2 * vector + row] += entry * fields[field]
    return filters


def scalar_filters(
    coefficients: Tensor,
    group: GroupLike,
    operators: OperatorsLike = "paper",
    stencils: StencilsLike = "isotropic",
    size: int = 5,
    spacing: Spacing = 1.0,
    pseudo: bool = False,
) -> Tensor:
    """Group features to scalars: β ``[out, in, order, operators]`` → ``[out, …]``.

    out(x) = Σ_A s(x, A), for pseudoscalars Σ_A det(A)·s(x, A), where s = Φ̃[e].
    """
    found = Group(group)
    fields = group_filters(coefficients, found, operators, stencils, size, spacing)
    filters = torch.zeros(coefficients.shape[0], *fields.shape[1:], dtype=torch.float64)
    for field in range(coefficients.shape[0]):
        for g in range(found.order):
            mirrored = pseudo and g >= found.rotations
            one = fields[field * found.order + g]
            filters[field] += -one if mirrored else one
    return filters


def turned_filter(
    beta: Tensor,
    group: Group,
    element: int,
    operators: OperatorsLike,
    stencils: StencilsLike,
    size: int,
    spacing: Spacing,
) -> Tensor:
    """χ̃^(A) = Σ_i C_i^(A) ũ_i (equation 20), for one element and one β, ``[size, size]``."""
    dy, dx = spacing if isinstance(spacing, tuple) else (spacing, spacing)
    total = torch.zeros(size, size, dtype=torch.float64)
    differences = stencil_set(stencils, rotations=group.rotations)
    polynomials = operator_set(operators).polynomials
    for b, polynomial in zip(beta.double(), polynomials, strict=True):
        for exponents, c in polynomial.in_frame(group.matrices[element]).terms:
            if abs(c) > 1e-13:
                u = differences.stencil(Polynomial.monomial(exponents), size, dy / dx).weights
                # The stencils are those of pixels of area 1.
                scaled = torch.from_numpy(u.copy()) / math.sqrt(dy * dx) ** sum(exponents)
                total = total + b * c * scaled
    return total


def convolve(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation with zero padding, tap by tap: what `conv2d` means."""
    batch, channels, height, width = x.shape
    out_channels, in_channels, size, _ = filters.shape
    if channels != in_channels * groups:
        raise ValueError(f"expected {in_channels * groups} channels; got {channels}")
    padded = torch.zeros(batch, channels, height + 2 * padding, width + 2 * padding).double()
    padded[:, :, padding : padding + height, padding : padding + width] = x.double()
    extent = dilation * (size - 1) + 1
    rows = (height + 2 * padding - extent) // stride + 1
    columns = (width + 2 * padding - extent) // stride + 1
    per_group = out_channels // groups
    out = torch.zeros(batch, out_channels, rows, columns, dtype=torch.float64)
    for group in range(groups):
        o = slice(group * per_group, (group + 1) * per_group)
        c = slice(group * in_channels, (group + 1) * in_channels)
        for r in range(size):
            for s in range(size):
                top, left = r * dilation, s * dilation
                down = slice(top, top + stride * (rows - 1) + 1, stride)
                right = slice(left, left + stride * (columns - 1) + 1, stride)
                tap = torch.einsum("oc,bcyx->boyx", filters[o, :, r, s], padded[:, c, down, right])
                out[:, o] += tap
    return out if bias is None else out + bias.double()[:, None, None]


def pad(x: Tensor, padding: int, modes: tuple[str, str]) -> Tensor:
    """The image with a border, as ``padding_mode=(y, x)`` says; pixel by pixel."""
    batch, channels, height, width = x.shape
    out = torch.zeros(batch, channels, height + 2 * padding, width + 2 * padding).double()
    for i in range(out.shape[2]):
        for j in range(out.shape[3]):
            row = _inside(i - padding, height, modes[0])
            column = _inside(j - padding, width, modes[1])
            if row is not None and column is not None:
                out[:, :, i, j] = x[:, :, row, column].double()
    return out


def _inside(place: int, size: int, mode: str) -> int | None:
    """The pixel of a line that a place on it or beyond its ends repeats; none for zeros."""
    if mode == "zeros":
        return place if 0 <= place < size else None
    if mode == "circular":
        return place % size
    if mode == "replicate":
        return min(max(place, 0), size - 1)
    return size - 1 - abs(size - 1 - abs(place))  # reflect


def recentre(x: Tensor, height: int, width: int) -> Tensor:
    """The points, a pixel apart, about the centre of the image: the mean of the pixels around each.

    A point on a pixel has one around it along that axis, a point between two pixels both; points
    outside of the image are zero.
    """
    batch, channels, rows, columns = x.shape
    out = torch.zeros(batch, channels, height, width, dtype=torch.float64)
    for i in range(height):
        for j in range(width):
            # In half pixels, so that positions are whole numbers.
            twice_row = rows - height + 2 * i
            twice_column = columns - width + 2 * j
            around = [
                (r, c)
                for r in {twice_row // 2, (twice_row + 1) // 2}
                for c in {twice_column // 2, (twice_column + 1) // 2}
            ]
            if all(0 <= r < rows and 0 <= c < columns for r, c in around):
                for r, c in around:
                    out[:, :, i, j] += x[:, :, r, c].double() / len(around)
    return out
