"""The dense engine: expand the filter bank and call `conv2d`.

The cost of a convolution grows with the square of the group's order; in exchange every device,
dtype and exporter that knows `conv2d` runs it. This room knows tensors and index tables; what the
numbers in them mean is the business of `basis`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["convolve", "group_filters", "lift_filters", "memory_format", "vector_filters"]


def lift_filters(weight: Tensor, synthesis: Tensor, frames: Tensor | None) -> Tensor:
    """Ψ̃: weight ``[out, in, s]``, synthesis ``[s, order, k, k]`` → ``[out * order, in, k, k]``.

    ``frames`` are the matrices A⁻¹ ``[order, 2, 2]`` that read each pair among the last input
    channels as a vector; their number of pairs is the weight's channels less the scalars, halved.
    """
    filters = _expand(weight, synthesis)  # [out, in, order, k, k]
    if frames is not None:
        pairs = filters.unflatten(1, (-1, 2))
        filters = torch.einsum("ovcgyx,gcd->ovdgyx", pairs, frames).flatten(1, 2)
    return filters.transpose(1, 2).flatten(0, 1)


def group_filters(weight: Tensor, synthesis: Tensor, relative: Tensor) -> Tensor:
    """Φ̃: weight ``[out, in, order, s]`` → ``[out * order, in * order, k, k]``.

    ``relative[A * order + B]`` is the place of (A⁻¹B, A) among all pairs (k, A).
    """
    return (
        _orient(weight, synthesis, relative).permute(0, 2, 1, 3, 4, 5).flatten(2, 3).flatten(0, 1)
    )


def vector_filters(weight: Tensor, synthesis: Tensor, relative: Tensor, matrices: Tensor) -> Tensor:
    """Group features to vectors: weight ``[2 * out, in, order, s]`` → ``[2 * out, in * order, …]``.

    ``matrices`` are the elements A ``[order, 2, 2]``.
    """
    filters = _orient(weight, synthesis, relative).unflatten(0, (-1, 2))
    return torch.einsum("gdc,vcigbyx->vdibyx", matrices, filters).flatten(2, 3).flatten(0, 1)


def convolve(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
    padding_mode: str,
    dilation: int,
    groups: int,
) -> Tensor:
    """`conv2d` with the padding modes of `torch.nn.Conv2d`."""
    if padding_mode != "zeros" and padding:
        padded = functional.pad(x, (padding,) * 4, mode=padding_mode)
        x = padded.contiguous(memory_format=memory_format(x))
        padding = 0
    return functional.conv2d(x, filters, bias, stride, padding, dilation, groups)


def memory_format(x: Tensor) -> torch.memory_format:
    """The layout of a batch of images, to be kept by what is computed from it."""
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


def _orient(weight: Tensor, synthesis: Tensor, relative: Tensor) -> Tensor:
    """The filters by output and input orientation, ``[out, in, A, B, k, k]``."""
    order = synthesis.shape[1]
    filters = _expand(weight, synthesis).flatten(2, 3)  # [out, in, (k, A), k, k]
    return filters.index_select(2, relative).unflatten(2, (order, order))


def _expand(weight: Tensor, synthesis: Tensor) -> Tensor:
    """Every weight as filters in every frame, ``[*, s]`` → ``[*, order, k, k]``."""
    return (weight @ synthesis.flatten(1)).unflatten(-1, synthesis.shape[1:])
