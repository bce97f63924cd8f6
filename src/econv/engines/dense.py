"""The dense engine: expand the filter bank and call `conv2d`.

The cost of a convolution grows with the square of the group's order; in exchange every device,
dtype and exporter that knows `conv2d` runs it. This room knows tensors and index tables; what the
numbers in them mean is the business of `basis`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "convolve",
    "filter_places",
    "group_filters",
    "lift_filters",
    "memory_format",
    "replicate",
    "vector_filters",
]


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


def group_filters(weight: Tensor, synthesis: Tensor, places: Tensor) -> Tensor:
    """Φ̃: weight ``[out, in, order, s]`` → ``[out * order, in * order, k, k]``.

    ``places`` are those of :func:`filter_places`.
    """
    return _orient(weight, synthesis, places).flatten(0, 1)


def vector_filters(weight: Tensor, synthesis: Tensor, places: Tensor, matrices: Tensor) -> Tensor:
    """Group features to vectors: weight ``[2 * out, in, order, s]`` → ``[2 * out, in * order, …]``.

    ``matrices`` are the elements A ``[order, 2, 2]``.
    """
    filters = _orient(weight, synthesis, places).unflatten(0, (-1, 2))
    return torch.einsum("gdc,vcgiyx->vdiyx", matrices, filters).flatten(0, 1)


def filter_places(relative: npt.NDArray[np.int64], in_fields: int) -> npt.NDArray[np.int64]:
    """Where the filter from input (field, B) to output A lies among those by (field, k, A).

    Output A reads input B through the relative element k = A⁻¹B, turned to frame A.
    ``relative[A, B]`` is the index of A⁻¹B.
    """
    order = len(relative)
    field = np.arange(in_fields)[:, None]
    frame = np.arange(order)[:, None, None]
    return ((field * order + relative[:, None]) * order + frame).ravel()


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
        if padding_mode == "replicate":
            padded = replicate(x, padding, padding)
        else:
            padded = functional.pad(x, (padding,) * 4, mode=padding_mode)
        x = padded.contiguous(memory_format=memory_format(x))
        padding = 0
    return functional.conv2d(x, filters, bias, stride, padding, dilation, groups)


def replicate(x: Tensor, before: int, after: int) -> Tensor:
    """The image with its outermost pixels repeated, so often before and after each axis.

    Unlike that of `torch.nn.functional.pad`, its gradient can be compiled in every memory format.
    """
    for dim in (2, 3):
        first, last = x.narrow(dim, 0, 1), x.narrow(dim, -1, 1)
        x = torch.cat([*[first] * before, x, *[last] * after], dim)
    return x


def memory_format(x: Tensor) -> torch.memory_format:
    """The layout of a batch of images, to be kept by what is computed from it."""
    _, channels, height, width = x.shape
    # One channel lies in both ways; what was made channels-last tells by its stride, as for torch.
    if x.is_contiguous() and (channels > 1 or x.stride(1) > 1 or height * width == 1):
        return torch.contiguous_format
    # By the strides: inside `torch.func.vmap` torch does not answer for channels-last.
    strides = (channels * height * width, 1, channels * width, channels)
    last = all(
        size == 1 or found == wanted
        for size, found, wanted in zip(x.shape, x.stride(), strides, strict=True)
    )
    return torch.channels_last if last else torch.contiguous_format


def _orient(weight: Tensor, synthesis: Tensor, places: Tensor) -> Tensor:
    """The filters by output and input orientation, ``[out, A, (in, B), k, k]``."""
    filters = _expand(weight, synthesis).flatten(1, 3)  # [out, (in, k, A), k, k]
    return filters.index_select(1, places).unflatten(1, (synthesis.shape[1], -1))


def _expand(weight: Tensor, synthesis: Tensor) -> Tensor:
    """Every weight as filters in every frame, ``[*, s]`` → ``[*, order, k, k]``."""
    return (weight @ synthesis.flatten(1)).unflatten(-1, synthesis.shape[1:])
