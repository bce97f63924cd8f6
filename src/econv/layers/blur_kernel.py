"""Separable means of pixels as one kernel, where channels lie last. Needs Triton."""

# Kernels are written in Triton's language, which has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from econv.gpu.devices import on_device

__all__ = ["launch"]


@triton.jit
def means(
    x, y, down, across, height, lines, before_rows, before_columns,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, ADJOINT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A piece of a row of y: means of pixels of x, of those that there are; or of the adjoint.

    Sizes along a row are constants: then the compiler knows what is aligned.
    """
    PIECES: tl.constexpr = (COLUMNS * CHANNELS + BLOCK - 1) // BLOCK
    line = tl.program_id(0) // PIECES
    place = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    known = place < COLUMNS * CHANNELS
    column = place // CHANNELS
    i = line % lines
    image = (line // lines).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    weight_across = tl.zeros([BLOCK], tl.float32)
    for b in tl.static_range(ACROSS):
        shift = before_columns - b if ADJOINT else b - before_columns
        inside = known & (column + shift >= 0) & (column + shift < WIDTH)
        sums = tl.zeros([BLOCK], tl.float32)
        weight_down = 0.0
        for a in tl.static_range(DOWN):
            row = i + (before_rows - a if ADJOINT else a - before_rows)
            there = (row >= 0) & (row < height)
            weight = tl.load(down + a).to(tl.float32)
            if ADJOINT:
                window = 0.0
                for t in tl.static_range(DOWN):
                    pixel = row + t - before_rows
                    window += tl.where((pixel >= 0) & (pixel < lines), tl.load(down + t), 0.0)
                weight = tl.where(there, weight / tl.where(there, window, 1.0), 0.0)
            else:
                weight_down += tl.where(there, weight, 0.0)
            source = x + (image * height + row) * (WIDTH * CHANNELS) + place + shift * CHANNELS
            sums += weight * tl.load(source, mask=inside & there, other=0.0).to(tl.float32)
        weight = tl.zeros([BLOCK], tl.float32) + tl.load(across + b).to(tl.float32)
        if ADJOINT:
            window = tl.zeros([BLOCK], tl.float32)
            for t in tl.static_range(ACROSS):
                pixel = column + shift + t - before_columns
                window += tl.where((pixel >= 0) & (pixel < COLUMNS), tl.load(across + t), 0.0)
            total += tl.where(inside, weight / tl.where(inside, window, 1.0), 0.0) * sums
        else:
            weight_across += tl.where(inside, weight, 0.0)
            total += weight * sums / weight_down
    if not ADJOINT:
        total = total / weight_across
    into = y + line.to(tl.int64) * (COLUMNS * CHANNELS) + place
    tl.store(into, total.to(y.dtype.element_ty), mask=known)


def launch(
    x: Tensor, y: Tensor, down: Tensor, across: Tensor, before: tuple[int, int], adjoint: bool
) -> None:
    """Fill y from x, both channels-last, with windows that begin ``before`` the image."""
    batch, channels, lines, columns = y.shape
    block = min(1024, triton.next_power_of_2(columns * channels))
    programs = triton.cdiv(columns * channels, block) * lines * batch
    with on_device(x):
        means[(programs,)](  # the other axes of a grid end at 65,535
            x, y, down, across, x.shape[2], lines, *before,
            WIDTH=x.shape[3], COLUMNS=columns, CHANNELS=channels, DOWN=len(down),
            ACROSS=len(across), ADJOINT=adjoint, BLOCK=block, num_warps=4,
        )  # fmt: skip
