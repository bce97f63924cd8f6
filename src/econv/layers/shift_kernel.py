"""Means of four neighbouring pixels as one kernel, where channels lie last. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["launch"]


@triton.jit
def _mean_of_four(
    x,
    y,
    channels,
    height,
    width,
    rows,
    columns,
    STEP: tl.constexpr,
    ADJOINT: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """y, ``rows`` × ``columns``, from x; or the transpose of that."""  # fmt: skip
    pixel = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    channel = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    image = tl.program_id(2).to(tl.int64)
    known = (pixel < rows * columns) & (channel < channels)
    i = pixel // columns
    j = pixel % columns
    source = x + image * height * width * channels
    total = tl.zeros([BP, BC], tl.float32)
    for a in tl.static_range(2):
        for b in tl.static_range(2):
            if ADJOINT:
                p = i - a
                q = j - b
                there = known & (p >= 0) & (q >= 0) & (p % STEP == 0) & (q % STEP == 0)
                p = p // STEP
                q = q // STEP
                there = there & (p < height) & (q < width)
            else:
                p = i * STEP + a
                q = j * STEP + b
                there = known
            value = tl.load(source + (p * width + q) * channels + channel, mask=there, other=0.0)
            total += value.to(tl.float32)
    into = y + image * rows * columns * channels + pixel * channels + channel
    tl.store(into, (total * 0.25).to(y.dtype.element_ty), mask=known)


def launch(x: Tensor, y: Tensor, step: int, adjoint: bool) -> None:
    """Fill y, channels-last as x is."""
    batch, channels, rows, columns = y.shape
    grid = (triton.cdiv(rows * columns, 32), triton.cdiv(channels, 64), batch)
    _mean_of_four[grid](
        x,
        y,
        channels,
        *x.shape[2:],
        rows,
        columns,
        STEP=step,
        ADJOINT=adjoint,
        BP=32,
        BC=64,
        num_warps=4,
    )
