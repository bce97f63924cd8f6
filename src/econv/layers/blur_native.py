"""Separable means of pixels by compiled code on a CPU, with the function before them.

torch's convolutions of single channels take many times as long there, and a function of its own is
one more pass over memory in each direction.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooks

from econv.engines.problem import transformed, watched
from econv.engines.spectral import native

__all__ = ["FUNCTIONS", "fill", "has_kernel", "number_of"]

_DTYPES = (torch.float32, torch.float64)
FUNCTIONS = {1: torch.relu, 2: functional.silu}
"""What the kernel computes by itself, by the numbers that it has for them."""

_NUMBERS: dict[type[nn.Module], int] = {nn.ReLU: 1, nn.SiLU: 2}
_MOST = 32  # taps


def has_kernel(x: Tensor, taps: tuple[int, int]) -> bool:
    """Whether compiled code may take ``x``, with nobody who must see torch's operations."""
    if x.device.type != "cpu" or x.dtype not in _DTYPES or max(taps) > _MOST:
        return False
    return not watched(x) and not transformed() and native.available(x.dtype)


def number_of(function: object) -> int | None:
    """The kernel's name of a module that does nothing but what its class says."""
    number = _NUMBERS.get(type(function))  # type: ignore[arg-type]
    if number is None or hooks._has_any_global_hook() or "forward" in vars(function):
        return None
    seen = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return None if any(getattr(function, name) for name in seen) else number


def fill(
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    columns: Tensor,
    before: tuple[int, int],
    last: bool,
    adjoint: bool = False,
    function: int = 0,
    inner: Tensor | None = None,
) -> None:
    """Fill y from x with windows that begin ``before`` the image; ``last``: channels lie last.

    With ``adjoint`` x is the gradient to the means, y that to what they were made of; and ``inner``
    is what ``function`` was applied to, whose slope is then a factor.
    """
    if not y.numel():
        return
    batch, channels, height, width = y.shape
    step = channels if last else 1
    lines = [tuple(line.tolist()) for line in (rows, columns)]
    windows = x.shape[2:] if adjoint else y.shape[2:]
    pixels = y.shape[2:] if adjoint else x.shape[2:]
    scales = [
        _scale(line, size, count, pad, repeat, y.dtype)
        for line, size, count, pad, repeat in zip(
            lines, pixels, windows, before, (1, step), strict=True
        )
    ]
    if adjoint:
        lines = [line[::-1] for line in lines]
        before = (len(rows) - 1 - before[0], len(columns) - 1 - before[1])
    weights = [_tensor(line, y.dtype) for line in lines]
    sizes = (*x.shape[2:], height, width, step, len(rows), len(columns), *before)
    planes = batch if last else batch * channels
    numbers = [torch.get_num_threads(), planes, *sizes, function, int(adjoint)]
    images = [None if t is None else _lines(t, planes, step, last) for t in (x, inner, y)]
    native.means(y.dtype, numbers, [*weights, *scales, *images])


def _lines(image: Tensor, planes: int, step: int, last: bool) -> Tensor:
    """An image as planes of rows, ``[planes, rows, columns, step]``; no other layout has them."""
    height, width = image.shape[2:]
    there = image.permute(0, 2, 3, 1) if last else image
    return there.view(planes, height, width, step)


@lru_cache(maxsize=256)
def _scale(
    line: tuple[float, ...], size: int, windows: int, before: int, repeat: int, dtype: torch.dtype
) -> Tensor:
    """One over the weight that each window has inside, for every number of a pixel."""
    place = torch.arange(windows)[:, None] + torch.arange(len(line)) - before
    inside = (place >= 0) & (place < size)
    weight = (inside * torch.tensor(line, dtype=torch.float64)).sum(1)
    return weight.reciprocal().to(dtype).repeat_interleave(repeat)


@lru_cache(maxsize=256)
def _tensor(line: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor(line, dtype=dtype)
