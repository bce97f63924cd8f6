"""Means of four neighbouring pixels as one kernel, where channels lie last. Needs Triton."""

# Kernels are written in Triton's language, which has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["launch"]


@triton.jit
def _mean_of_four(
    x,
    y,
    height,
    rows,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    ADJOINT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A piece of a row of y from two rows of x; or of the transpose of that.

    Sizes along a row are constants: then the compiler knows what is aligned.
    """
    PIECES: tl.constexpr = (COLUMNS * CHANNELS + BLOCK - 1) // BLOCK
    line = tl.program_id(0) // PIECES
    piece = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    i = line % rows
    image = (line // rows).to(tl.int64)
    known = piece < COLUMNS * CHANNELS
    column = piece // CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(2):
        if ADJOINT:
            row = (i - a) // STEP
            row_known = (i >= a) & ((i - a) % STEP == 0) & (row < height)
        else:
            row = i * STEP + a
            row_known = row < height
        source = x + (image * height + row) * (WIDTH * CHANNELS)
        for b in tl.static_range(2):
            if STEP == 1:
                place = piece - b * CHANNELS if ADJOINT else piece + b * CHANNELS
                there = (place >= 0) & (place < WIDTH * CHANNELS)
            elif ADJOINT:
                place = (column - b) // STEP * CHANNELS + piece % CHANNELS
                there = (column >= b) & ((column - b) % STEP == 0) & (place < WIDTH * CHANNELS)
            else:
                place = (column * STEP + b) * CHANNELS + piece % CHANNELS
                there = place < WIDTH * CHANNELS
            value = tl.load(source + place, mask=known & there & row_known, other=0.0)
            total += value.to(tl.float32)
    into = y + (image * rows + i) * (COLUMNS * CHANNELS) + piece
    tl.store(into, (total * 0.25).to(y.dtype.element_ty), mask=known)


def launch(x: Tensor, y: Tensor, step: int, adjoint: bool) -> None:
    """Fill y, channels-last as x is."""
    batch, channels, rows, columns = y.shape
    block = min(1024, triton.next_power_of_2(columns * channels))
    pieces = triton.cdiv(columns * channels, block)
    _mean_of_four[(pieces * rows * batch,)](  # the other axes of a grid end at 65,535
        x,
        y,
        x.shape[2],
        rows,
        WIDTH=x.shape[3],
        COLUMNS=columns,
        CHANNELS=channels,
        STEP=step,
        ADJOINT=adjoint,
        BLOCK=block,
        num_warps=4,
    )
