"""Passes over images, field by field: their kernels, and what launches them. Needs Triton.

A kernel of that kind reads every number once, does the same to all of a field, and may leave two
sums of each field, which another kernel adds up.
"""

# Kernels are written in Triton's language, which has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from econv.gpu.launch import FIRST, Launch, launch_all
from econv.gpu.sizes import Like, power_of_two, units
from econv.tensors import memory_format

__all__ = [
    "activation_gradient",
    "added_up",
    "adding_up",
    "begun",
    "by_rows",
    "empty",
    "like",
    "numbers_of",
    "rectified",
    "store_sums",
    "sums_of",
    "tile_of",
]


@triton.jit
def rectified(x):
    """max(0, x), and NaN of NaN, as torch has it."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def begun(
    programs, image_stride, fields, BF: tl.constexpr, BLOCKS: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """A program's number among those of its fields, where its image begins, its block and fields.

    Programs that run at the same time read fields that lie side by side, and so do threads.
    """
    chunks = tl.cdiv(fields, BF)
    program = tl.program_id(0) // chunks
    field = tl.program_id(0) % chunks * BF + tl.arange(0, BF)
    field = field[:, None, None] if FIRST else field[None, :, None]
    base = (program // programs).to(tl.int64) * image_stride
    return program, base, program % programs * BLOCKS, field


@triton.jit
def numbers_of(affine, field, fields):
    """Centre, scale and shift of some fields."""
    there = field < fields
    centre = tl.load(affine + field, mask=there, other=0.0)
    scale = tl.load(affine + fields + field, mask=there, other=0.0)
    return centre, scale, tl.load(affine + 2 * fields + field, mask=there, other=0.0)


@triton.jit
def tile_of(
    block, field, rows, fields,
    INNER: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """Where the numbers of a tile lie in their image, and which of them there are.

    An image is seen as ``[row, field, inner]``: channels-last a row is a pixel and the inner
    numbers are the elements of the group; otherwise there is one row, and they are its pixels, too.
    """
    row = block * BR + tl.arange(0, BR)
    row = row[None, :, None] if FIRST else row[:, None, None]
    inner = (tl.program_id(1) * BI + tl.arange(0, BI))[None, None, :]
    known = (row < rows) & (field < fields) & (inner < INNER)
    return (row * fields + field) * INNER + inner, known


@triton.jit
def store_sums(one, other, sums, program, fields, BF: tl.constexpr, FIRST: tl.constexpr):
    """Store both sums of a program's fields."""
    field = tl.program_id(0) % tl.cdiv(fields, BF) * BF + tl.arange(0, BF)
    into = sums + (program * tl.num_programs(1) + tl.program_id(1)) * 2 * fields + field
    ROWS: tl.constexpr = 1 if FIRST else 0
    tl.store(into, tl.sum(tl.sum(one, axis=2), axis=ROWS), mask=field < fields)
    tl.store(into + fields, tl.sum(tl.sum(other, axis=2), axis=ROWS), mask=field < fields)


@triton.jit
def activation_backward(
    g, x, affine, out, sums, rows, fields, programs, image_stride,
    INNER: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr, BI: tl.constexpr, BLOCKS: tl.constexpr,
    FIRST: tl.constexpr, WRITE: tl.constexpr
):  # fmt: skip
    """From the gradient to what was activated to that to x, with sums for those to the numbers.

    ``sums[program, 2, field]`` are those of the gradient where it passes, and of it times
    x − centre.
    """
    program, base, first, field = begun(programs, image_stride, fields, BF, BLOCKS, FIRST)
    centre, scale, shift = numbers_of(affine, field, fields)
    total = tl.zeros([BF, BR, BI] if FIRST else [BR, BF, BI], tl.float32)
    product = tl.zeros([BF, BR, BI] if FIRST else [BR, BF, BI], tl.float32)
    for block in tl.static_range(BLOCKS):
        where, known = tile_of(first + block, field, rows, fields, INNER, BR, BI, FIRST)
        value = tl.load(x + base + where, mask=known, other=0.0).to(tl.float32) - centre
        passed = tl.load(g + base + where, mask=known, other=0.0).to(tl.float32)
        passed = tl.where(value * scale + shift <= 0.0, 0.0, passed)
        if WRITE:
            tl.store(out + base + where, (passed * scale).to(out.dtype.element_ty), mask=known)
        total += passed
        product += passed * value
    store_sums(total, product, sums, program, fields, BF, FIRST)


@triton.jit
def added_up(sums, programs, fields, BF: tl.constexpr, BLOCK: tl.constexpr):
    """Both sums of some fields, over all programs."""
    field = tl.program_id(0) * BF + tl.arange(0, BF)[None, :]
    one = tl.zeros([BLOCK, BF], tl.float32)
    other = tl.zeros([BLOCK, BF], tl.float32)
    for first in tl.range(0, programs, BLOCK):
        program = first + tl.arange(0, BLOCK)[:, None]
        where = sums + program * (2 * fields) + field
        known = (program < programs) & (field < fields)
        one += tl.load(where, mask=known, other=0.0)
        other += tl.load(where + fields, mask=known, other=0.0)
    return tl.sum(one, axis=0), tl.sum(other, axis=0)


@triton.jit
def to_affine(sums, affine, out, programs, fields, BF: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients to the numbers of fields, from the sums of `activation_backward`."""
    total, product = added_up(sums, programs, fields, BF, BLOCK)
    field = tl.program_id(0) * BF + tl.arange(0, BF)
    there = field < fields
    scale = tl.load(affine + fields + field, mask=there, other=0.0)
    tl.store(out + field, -scale * total, mask=there)
    tl.store(out + fields + field, product, mask=there)
    tl.store(out + 2 * fields + field, total, mask=there)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that some kernel fills: every element, or nobody reads it."""
    return torch.empty(shape, dtype=dtype, device=device)


_BLOCK, _BLOCKS, _SIDE_BY_SIDE = 4096, 2, 8
"""Numbers that a program of a pass over images handles at a time; how often; and how many fields,
where channels lie last. Found by measuring on an H200."""

_FIELDS = 4  # of a program that adds up


@lru_cache(maxsize=1024)
def by_rows(
    kernel: Any,
    x: Like,
    fields: int,
    *numbers: int,
    whole: bool = True,
    blocks: int = _BLOCKS,
    **constants: Any,
) -> Launch | None:
    """A kernel that goes through images field by field; without fields, number by number.

    Nothing where images lie in neither of torch's two layouts, or are to be ``whole``, one after
    the other and some, and are not.
    """
    images, channels, height, width = x.shape
    pixels = height * width
    each = channels * pixels
    if whole and (not images * each or (images > 1 and x.strides[0] != each)):
        return None
    layouts = {pixels: (1, width * channels, channels), 1: (pixels, width, 1)}
    for rows, strides in layouts.items():
        axes = zip(x.shape[1:], x.strides[1:], strides, strict=True)
        if any(length > 1 and have != wanted for length, have, wanted in axes):
            continue
        if not fields:
            rows, fields = each, 1
        inner = each // (fields * rows)
        inners = min(_BLOCK, power_of_two(inner))
        several = 1 if rows == 1 else min(_SIDE_BY_SIDE, power_of_two(fields))
        at_once = min(max(1, _BLOCK // (inners * several)), power_of_two(rows))
        blocks = min(blocks, units(rows, at_once))
        programs = units(rows, at_once * blocks)
        grid = (images * programs * units(fields, several), units(inner, inners))
        sizes = {"INNER": inner, "BR": at_once, "BF": several, "BI": inners, "BLOCKS": blocks}
        numbers = (rows, fields, programs, x.strides[0], *numbers)
        return Launch(kernel, grid, numbers, **sizes, FIRST=FIRST, **constants, num_warps=8)
    return None


@lru_cache(maxsize=1024)
def adding_up(
    kernel: Any, sums: torch.Size, numbers: tuple[float, ...] = (), dtypes: Any = (), **options: Any
) -> Launch:
    """A kernel that adds up the sums of programs. ``dtypes`` of others tell launches apart."""
    programs, _, fields = sums
    options |= {"BF": _FIELDS, "BLOCK": min(512, power_of_two(programs)), "num_warps": 4}
    return Launch(kernel, (units(fields, _FIELDS),), (programs, fields, *numbers), **options)


def sums_of(launch: Launch, fields: int, device: torch.device) -> Tensor:
    """Memory for two sums of each field, from every program of a launch."""
    programs = math.prod(launch.grid) // units(fields, launch.options["BF"])
    return empty((programs, 2, fields), torch.float32, device)


def like(x: Tensor) -> Tensor:
    """Memory for an image that lies as ``x`` does."""
    return empty((x.numel(),), x.dtype, x.device).as_strided(x.shape, x.stride())


def activation_gradient(
    g: Tensor, x: Tensor, affine: Tensor, write: bool = True
) -> tuple[Tensor, Tensor] | None:
    """The gradients to ``x`` and ``affine`` from that to max(0, (x − centre)·scale + shift).

    Unless it is to be written, something stands for the former. Nothing where `by_rows` has none.
    """
    fields = affine.shape[1]
    launch = by_rows(activation_backward, Like.of(x), fields, WRITE=write)
    if launch is None:
        return None
    g, affine = g.contiguous(memory_format=memory_format(x)), affine.contiguous()
    to_x, found = like(x) if write else x, empty((3, fields), torch.float32, x.device)
    sums = sums_of(launch, fields, x.device)
    last = adding_up(to_affine, sums.shape)
    launch_all([(launch, (g, x, affine, to_x, sums)), (last, (sums, affine, found))])
    return to_x, found
