"""The paper's sums as plain loops in float64: slow, obvious, and independent of `basis`.

Everything fast in this library is tested against this file. It knows images and volumes: the
dimension is that of the group, or of the tensors. Nothing here is shared with the
engines: a filter is built term by term from equations 20 and 22, a convolution tap by tap.
The functions take and give tensors, so that autograd gives the reference for every gradient.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

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


Spacing = float | tuple[float, ...]
"""The length of a pixel, or its lengths along (y, x), or (z, y, x)."""


def lift_filters(
    coefficients: Tensor,
    group: GroupLike,
    operators: OperatorsLike | None = None,
    stencils: StencilsLike = "isotropic",
    size: int = 5,
    spacing: Spacing = 1.0,
    vectors: int = 0,
    pseudoscalars: int = 0,
) -> Tensor:
    """Ψ̃ as a filter bank: β ``[out, in, operators]`` → ``[out * order, in, size, …]``.

    The last input channels are ``vectors``, in the plane (x, y), read in frame A: A⁻¹v. Before them
    come ``pseudoscalars``, which a frame that was mirrored reads with the other sign.

    >>> lift_filters(torch.randn(2, 3, 9), "p4").shape
    torch.Size([8, 3, 5, 5])
    """
    found = Group(group)
    out_fields, in_channels, _ = coefficients.shape
    pixels = (size,) * found.dimension
    filters = torch.zeros(out_fields * found.order, in_channels, *pixels, dtype=torch.float64)
    scalars = in_channels - found.dimension * vectors
    for o in range(out_fields):
        for g in range(found.order):
            for c in range(in_channels):
                beta = coefficients[o, c]
                chi = turned_filter(beta, found, g, operators, stencils, size, spacing)
                if c < scalars:
                    mirrored = c >= scalars - pseudoscalars and g >= found.rotations
                    filters[o * found.order + g, c] += -chi if mirrored else chi
                    continue
                vector, component = divmod(c - scalars, found.dimension)
                for d in range(found.dimension):
                    # Component c of A⁻¹v is Σ_d (A⁻¹)_cd v_d.
                    inverse = float(found.matrices[found.inverse[g], component, d])
                    place = scalars + found.dimension * vector + d
                    filters[o * found.order + g, place] += inverse * chi
    return filters


def group_filters(
    coefficients: Tensor,
    group: GroupLike,
    operators: OperatorsLike | None = None,
    stencils: StencilsLike = "isotropic",
    size: int = 5,
    spacing: Spacing = 1.0,
) -> Tensor:
    """Φ̃ as a filter bank: β ``[out, in, order, operators]`` → ``[out * order, in * order, …]``.

    Equation 22: output orientation A reads input orientation Ak through χ_k^(A).

    >>> group_filters(torch.randn(2, 1, 4, 9), "p4").shape
    torch.Size([8, 4, 5, 5])
    """
    found = Group(group)
    out_fields, in_fields, order, _ = coefficients.shape
    pixels = (size,) * found.dimension
    filters = torch.zeros(out_fields * order, in_fields * order, *pixels, dtype=torch.float64)
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
    operators: OperatorsLike | None = None,
    stencils: StencilsLike = "isotropic",
    size: int = 5,
    spacing: Spacing = 1.0,
) -> Tensor:
    """Group features to vector fields: β ``[2 * out, in, order, operators]`` → ``[2 * out, …]``.

    out(x) = Σ_A A · [s₁(x, A), s₂(x, A)], where s = Φ̃[e] has two fields for each vector; in space
    three.

    >>> vector_filters(torch.randn(2 * 3, 1, 4, 9), "p4").shape
    torch.Size([6, 4, 5, 5])
    """
    found = Group(group)
    d = found.dimension
    fields = group_filters(coefficients, found, operators, stencils, size, spacing)
    filters = torch.zeros(coefficients.shape[0], *fields.shape[1:], dtype=torch.float64)
    for vector in range(coefficients.shape[0] // d):
        for g in range(found.order):
            for row in range(d):
                for column in range(d):
                    entry = float(found.matrices[g, row, column])
                    field = (d * vector + column) * found.order + g
                    filters[d * vector + row] += entry * fields[field]
    return filters


def scalar_filters(
    coefficients: Tensor,
    group: GroupLike,
    operators: OperatorsLike | None = None,
    stencils: StencilsLike = "isotropic",
    size: int = 5,
    spacing: Spacing = 1.0,
    pseudo: bool = False,
) -> Tensor:
    """Group features to scalars: β ``[out, in, order, operators]`` → ``[out, …]``.

    out(x) = Σ_A s(x, A), for pseudoscalars Σ_A det(A)·s(x, A), where s = Φ̃[e].

    >>> scalar_filters(torch.randn(3, 1, 4, 9), "p4").shape
    torch.Size([3, 4, 5, 5])
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
    operators: OperatorsLike | None,
    stencils: StencilsLike,
    size: int,
    spacing: Spacing,
) -> Tensor:
    """χ̃^(A) = Σ_i C_i^(A) ũ_i (equation 20), for one element and one β, ``[size, size, …]``."""
    lengths = spacing if isinstance(spacing, tuple) else (spacing,) * group.dimension
    ratios = tuple(length / lengths[-1] for length in lengths[:-1])
    aspect = ratios if len(ratios) > 1 else ratios[0]  # one number in the plane
    unit = math.prod(lengths) ** (1 / group.dimension)
    total = torch.zeros((size,) * group.dimension, dtype=torch.float64)
    differences = stencil_set(stencils, rotations=group.steps)
    polynomials = operator_set(operators, group.dimension).polynomials
    for b, polynomial in zip(beta.double(), polynomials, strict=True):
        for exponents, c in polynomial.in_frame(group.matrices[element]).terms:
            if abs(c) > 1e-13:
                u = differences.stencil(Polynomial.monomial(exponents), size, aspect).weights
                # The stencils are those of pixels of area 1, voxels of volume 1.
                scaled = torch.from_numpy(u.copy()) / unit ** sum(exponents)
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
    """Cross-correlation with zero padding, tap by tap: what `conv2d` and `conv3d` mean.

    Raises:
        ValueError: for other channels than the filters read.

    >>> x, filters = torch.randn(1, 2, 6, 6).double(), torch.randn(3, 2, 5, 5).double()
    >>> torch.allclose(convolve(x, filters, padding=2), torch.conv2d(x, filters, padding=2))
    True
    """
    batch, channels, *sizes = x.shape
    out_channels, in_channels, size, *_ = filters.shape
    if channels != in_channels * groups:
        raise ValueError(f"expected {in_channels * groups} channels; got {channels}")
    padded = torch.zeros(batch, channels, *(n + 2 * padding for n in sizes)).double()
    inside = tuple(slice(padding, padding + n) for n in sizes)
    every = slice(None)
    whole: Any = (every, every, *inside)
    padded[whole] = x.double()
    extent = dilation * (size - 1) + 1
    counts = [(n + 2 * padding - extent) // stride + 1 for n in sizes]
    per_group = out_channels // groups
    out = torch.zeros(batch, out_channels, *counts, dtype=torch.float64)
    for group in range(groups):
        o = slice(group * per_group, (group + 1) * per_group)
        c = slice(group * in_channels, (group + 1) * in_channels)
        for tap in itertools.product(range(size), repeat=len(sizes)):
            firsts = [dilation * t for t in tap]
            read = tuple(
                slice(first, first + stride * (count - 1) + 1, stride)
                for first, count in zip(firsts, counts, strict=True)
            )
            one: Any = (o, every, *tap)
            seen: Any = (every, c, *read)
            out[:, o] += torch.einsum("oc,bc...->bo...", filters[one], padded[seen])
    return out if bias is None else out + bias.double().view(-1, *[1] * len(sizes))


def pad(x: Tensor, padding: int, modes: tuple[str, ...]) -> Tensor:
    """The image with a border, as ``padding_mode=(y, x)`` says; pixel by pixel.

    >>> pad(torch.tensor([[[[1.0, 2.0]]]]), 1, ("zeros", "replicate"))[0, 0].tolist()
    [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    """
    batch, channels, *sizes = x.shape
    out = torch.zeros(batch, channels, *(n + 2 * padding for n in sizes)).double()
    for place in itertools.product(*map(range, out.shape[2:])):
        each = zip(place, sizes, modes, strict=True)
        source = tuple(_inside(i - padding, size, mode) for i, size, mode in each)
        if None not in source:
            here: Any = (..., *place)
            there: Any = (..., *source)
            out[here] = x[there].double()
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


def recentre(x: Tensor, *sizes: int) -> Tensor:
    """The points, a pixel apart, about the centre of the image: the mean of the pixels around each.

    A point on a pixel has one around it along that axis, a point between two pixels both; points
    outside of the image are zero.

    Raises:
        ValueError: for another number of sizes than the map has axes.

    >>> recentre(torch.tensor([[[[1.0, 2.0, 4.0]]]]), 1, 2).tolist()
    [[[[1.5, 3.0]]]]
    """
    out = torch.zeros(*x.shape[:2], *sizes, dtype=torch.float64)
    for place in itertools.product(*map(range, sizes)):
        # In half pixels, so that positions are whole numbers.
        twice = [have - n + 2 * i for have, n, i in zip(x.shape[2:], sizes, place, strict=True)]
        around = list(itertools.product(*({t // 2, (t + 1) // 2} for t in twice)))
        if all(0 <= i < n for near in around for i, n in zip(near, x.shape[2:], strict=True)):
            here: Any = (..., *place)
            for near in around:
                there: Any = (..., *near)
                out[here] += x[there].double() / len(around)
    return out
