"""Separable means of pixels, of those that there are, in one pass over memory.

torch's convolutions of single channels take many times as long where channels lie last on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econv.gpu.devices import DTYPES, ran, works
from econv.tensors import memory_format, one_by_one, transformed, watched

__all__ = ["mean_of_pixels"]

_KERNEL = "the kernel for means of pixels"


def mean_of_pixels(
    x: Tensor, rows: Tensor, columns: Tensor, taps: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Means with the weights ``rows`` down and ``columns`` across, as `conv2d` puts windows.

    Where a window reaches out of the image, of the pixels inside. ``taps`` is how many weights
    there are, which tracers cannot tell.

    >>> half = torch.tensor([0.5, 0.5])
    >>> mean_of_pixels(torch.arange(4.0).view(1, 1, 2, 2), half, half, (2, 2), (0, 1)).tolist()
    [[[[1.0, 1.5, 2.0]]]]
    """
    if torch.compiler.is_compiling() or not _has_kernel(x):
        return _by_convolution(x, rows, columns, taps, padding)
    found: Tensor = _Mean.apply(x, rows.detach(), columns.detach(), taps, padding, None)
    return found


def _by_convolution(
    x: Tensor, rows: Tensor, columns: Tensor, taps: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    kernel, channels = (rows[:, None] * columns).to(x.dtype)[None, None], x.shape[1]
    every = kernel.expand(channels, 1, *taps)
    sums = functional.conv2d(x, every, None, 1, padding, 1, channels)
    inside = functional.conv2d(x.new_ones(1, 1, x.shape[2], x.shape[3]), kernel, None, 1, padding)
    return sums / inside.to(sums.dtype)


def _has_kernel(x: Tensor) -> bool:
    if watched(x) or transformed() or not x.numel() or x.dtype not in DTYPES:
        return False
    return memory_format(x) is torch.channels_last and works(_KERNEL, x.device)


class _Mean(torch.autograd.Function):
    """The means, or with the size of an image what their gradient is to it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        columns: Tensor,
        taps: tuple[int, int],
        before: tuple[int, int],
        size: tuple[int, int] | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.taps, ctx.before, ctx.adjoint, ctx.size = taps, before, size is not None, x.shape[2:]
        x = x.resolve_neg().contiguous(memory_format=torch.channels_last)
        windows = [n + 2 * b - t + 1 for n, b, t in zip(x.shape[2:], before, taps, strict=True)]
        shape: Any = (*x.shape[:2], *(size or windows))
        options: Any = {"dtype": x.dtype, "memory_format": torch.channels_last}
        y = torch.empty(shape, device=x.device, **options)
        fill = partial(_fill, x, y, rows, columns, before, ctx.adjoint)
        if works(_KERNEL, x.device) and ran(_KERNEL, x.device, fill):
            return y
        if not ctx.adjoint:
            return _by_convolution(x, rows, columns, taps, before)
        with torch.enable_grad():
            image = torch.zeros_like(y, requires_grad=True)
            means = _by_convolution(image, rows, columns, taps, before)
        return torch.autograd.grad(means, image, x)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        more = (*ctx.saved_tensors, ctx.taps, ctx.before, None if ctx.adjoint else ctx.size)
        return one_by_one(lambda given: _Mean.apply(given, *more), gradient), *[None] * 5


def _fill(*given: Any) -> None:
    from econv.layers.blur_kernel import launch

    launch(*given)
