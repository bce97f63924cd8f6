"""Half a pixel along both axes: means of four neighbours, in one pass over memory.

torch's own pooling takes many times as long where channels lie last on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from econv.gpu.devices import DTYPES, on_device, ran, works
from econv.tensors import memory_format, one_by_one, transformed, watched

__all__ = ["mean_of_four"]

_KERNEL = "the kernel for means of four"


def mean_of_four(x: Tensor, step: int = 1) -> Tensor:
    """`avg_pool2d` of 2×2 windows, ``step`` pixels apart.

    >>> mean_of_four(torch.arange(4.0).view(1, 1, 2, 2)).item()
    1.5
    """
    if torch.compiler.is_compiling() or not _has_kernel(x):
        return functional.avg_pool2d(x, 2, step)
    return cast(Tensor, _MeanOfFour.apply(x, step, None))


def _has_kernel(x: Tensor) -> bool:
    if watched(x) or transformed() or x.dtype not in DTYPES or not x.numel():
        return False
    if memory_format(x) is not torch.channels_last:
        return False
    return works(_KERNEL, x.device)


def _fill(x: Tensor, y: Tensor, step: int, adjoint: bool) -> None:
    from econv.layers.shift_kernel import launch

    with on_device(x):
        launch(x, y, step, adjoint)


class _MeanOfFour(torch.autograd.Function):
    """The means, or with the size of an image what their gradient is to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int, size: tuple[int, int] | None) -> Tensor:
        ctx.step, ctx.adjoint, ctx.size = step, size is not None, x.shape[2:]
        sizes = tuple((n - 2) // step + 1 for n in x.shape[2:]) if size is None else size
        x = x.contiguous(memory_format=torch.channels_last)
        shape, last = (*x.shape[:2], *sizes), torch.channels_last
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=last)
        fill = partial(_fill, x, y, step, ctx.adjoint)
        if works(_KERNEL, x.device) and ran(_KERNEL, x.device, fill):
            return y
        if not ctx.adjoint:
            return functional.avg_pool2d(x, 2, step)
        window = ([2, 2], [step, step], [0, 0], False, True, None)
        return torch.ops.aten.avg_pool2d_backward(x, y, *window)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        more = (ctx.step, None if ctx.adjoint else ctx.size)
        return one_by_one(lambda given: _MeanOfFour.apply(given, *more), gradient), None, None
