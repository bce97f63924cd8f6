"""Separable means of pixels, of those that there are, in one pass over memory.

torch's convolutions of single channels take many times as long where channels lie last on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econv.engines.devices import DEVICES, DTYPES, ran, works
from econv.engines.problem import memory_format, one_by_one, transformed, watched
from econv.layers import blur_native as native

__all__ = ["mean_of_pixels"]

_KERNEL = "the kernel for means of pixels"


def mean_of_pixels(
    x: Tensor,
    rows: Tensor,
    columns: Tensor,
    taps: tuple[int, int],
    padding: tuple[int, int],
    function: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Means with the weights ``rows`` down and ``columns`` across, as `conv2d` puts windows.

    Where a window reaches out of the image, of the pixels inside. ``taps`` is how many weights
    there are, which tracers cannot tell; ``function`` is what is taken the means of.

    >>> half = torch.tensor([0.5, 0.5])
    >>> mean_of_pixels(torch.arange(4.0).view(1, 1, 2, 2), half, half, (2, 2), (0, 1)).tolist()
    [[[[1.0, 1.5, 2.0]]]]
    """
    if torch.compiler.is_compiling() or not _has_kernel(x, taps):
        x = x if function is None else function(x)
        return _by_convolution(x, rows, columns, taps, padding)
    given = (rows.detach(), columns.detach(), taps, padding)
    if function is not None:
        if _natively(x) and (number := native.number_of(function)):
            fused: Tensor = _MeanOf.apply(x, *given, number)
            return fused
        x = function(x)
        if not _has_kernel(x, taps):
            return _by_convolution(x, rows, columns, taps, padding)
    found: Tensor = _Mean.apply(x, *given, None)
    return found


def _by_convolution(
    x: Tensor, rows: Tensor, columns: Tensor, taps: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    kernel, channels = (rows[:, None] * columns).to(x.dtype)[None, None], x.shape[1]
    every = kernel.expand(channels, 1, *taps)
    sums = functional.conv2d(x, every, None, 1, padding, 1, channels)
    inside = functional.conv2d(x.new_ones(1, 1, x.shape[2], x.shape[3]), kernel, None, 1, padding)
    return sums / inside.to(sums.dtype)


def _natively(x: Tensor) -> bool:
    """Whether a kernel in Triton does not run there: Triton's interpreter serves CPUs, too."""
    return x.device.type not in DEVICES


def _has_kernel(x: Tensor, taps: tuple[int, int]) -> bool:
    if watched(x) or transformed() or not x.numel():
        return False
    if _natively(x):
        return native.has_kernel(x, taps)
    if x.dtype not in DTYPES:
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
        on_cpu = _natively(x)
        form = memory_format(x) if on_cpu else torch.channels_last
        x, y = _dense(x, form, size or _windows(x, taps, before))
        given = (x, y, rows, columns, before)
        if on_cpu:
            native.fill(*given, form is torch.channels_last, ctx.adjoint)
            return y
        fill = partial(_fill, *given, ctx.adjoint)
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


class _MeanOf(torch.autograd.Function):
    """The means of a function, of which nothing is kept but what it was applied to. On a CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        columns: Tensor,
        taps: tuple[int, int],
        before: tuple[int, int],
        function: int,
    ) -> Tensor:
        ctx.save_for_backward(x, rows, columns)
        ctx.taps, ctx.before, ctx.function = taps, before, function
        form = memory_format(x)
        x, y = _dense(x, form, _windows(x, taps, before))
        native.fill(x, y, rows, columns, before, form is torch.channels_last, False, function)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return one_by_one(partial(_MeanOf.pulled, ctx), gradient), *[None] * 5

    @staticmethod
    def pulled(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient to what the function was applied to."""
        x, rows, columns = ctx.saved_tensors
        size, form = x.shape[2:], memory_format(x)
        if torch.is_grad_enabled():  # for derivatives of the second order and beyond
            to_made = _Mean.apply(gradient, rows, columns, ctx.taps, ctx.before, size)
            made = native.FUNCTIONS[ctx.function](x)
            found = torch.autograd.grad(made, x, to_made, create_graph=True)[0]
        else:
            gradient, found = _dense(gradient, form, size)
            inner, last = _dense(x, form, size)[0], form is torch.channels_last
            given = (gradient, found, rows, columns, ctx.before, last)
            native.fill(*given, True, ctx.function, inner)
        return found


def _windows(x: Tensor, taps: tuple[int, int], before: tuple[int, int]) -> tuple[int, ...]:
    """How many there are along each axis."""
    found = zip(x.shape[2:], before, taps, strict=True)
    return tuple(n + 2 * pad - count + 1 for n, pad, count in found)


def _dense(x: Tensor, form: torch.memory_format, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``x`` in a layout, and an image of another size in the same."""
    shape: Any = (*x.shape[:2], *size)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)
    return x.resolve_neg().contiguous(memory_format=form), y


def _fill(*given: Any) -> None:
    from econv.layers.blur_kernel import launch

    launch(*given)
