"""Half a pixel along both axes: means of four neighbours, in one pass over memory.

torch's own pooling takes many times as long where channels lie last on a GPU.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from econv.engines.problem import memory_format, transformed, watched
from econv.engines.spectral.triton.engine import on_device, unavailable

__all__ = ["mean_of_four"]

_log = logging.getLogger("econv.engines")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def mean_of_four(x: Tensor, step: int = 1) -> Tensor:
    """`avg_pool2d` of 2×2 windows, ``step`` pixels apart.

    >>> mean_of_four(torch.arange(4.0).view(1, 1, 2, 2)).item()
    1.5
    """
    if torch.compiler.is_compiling() or not _has_kernel(x):
        return functional.avg_pool2d(x, 2, step)
    return cast(Tensor, _MeanOfFour.apply(x, step, None))


def _has_kernel(x: Tensor) -> bool:
    if _Kernel.failed or x.dtype not in _DTYPES or unavailable(x.device) is not None:
        return False
    usual = not watched(x) and not transformed()
    return usual and x.numel() > 0 and memory_format(x) is torch.channels_last


class _Kernel:
    """What launches the kernel, until that fails once."""

    failed = False

    @classmethod
    def fill(cls, x: Tensor, y: Tensor, step: int, adjoint: bool) -> bool:
        """Whether ``y`` was filled."""
        if cls.failed:
            return False
        try:
            from econv.layers.shift_kernel import launch

            with on_device(x):
                launch(x, y, step, adjoint)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or a driver raises
            reason = f"{type(error).__name__}: {error}"
            _log.warning("the kernel for means of four failed and is not used again: %s", reason)
            cls.failed = True
        return not cls.failed


class _MeanOfFour(torch.autograd.Function):
    """The means, or with the size of an image what their gradient is to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int, size: tuple[int, int] | None) -> Tensor:
        ctx.step, ctx.adjoint, ctx.size = step, size is not None, x.shape[2:]
        sizes = tuple((n - 2) // step + 1 for n in x.shape[2:]) if size is None else size
        x = x.contiguous(memory_format=torch.channels_last)
        shape, last = (*x.shape[:2], *sizes), torch.channels_last
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=last)
        if _Kernel.fill(x, y, step, ctx.adjoint):
            return y
        if not ctx.adjoint:
            return functional.avg_pool2d(x, 2, step)
        window = ([2, 2], [step, step], [0, 0], False, True, None)
        return torch.ops.aten.avg_pool2d_backward(x, y, *window)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _MeanOfFour.apply(gradient, ctx.step, None if ctx.adjoint else ctx.size), None, None
