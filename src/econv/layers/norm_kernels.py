"""Kernels of the batch norm of fields, and of the ReLU after it. Needs Triton.

Statistics take one pass over the images, the activated map another. Backwards one pass adds up what
reaches the numbers of fields, and one writes the gradient to the images.
"""

# Kernels are written in Triton's language, which has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from econv.engines.problem import Prologue
from econv.gpu import passes
from econv.gpu.devices import on_device
from econv.gpu.launch import launch_all
from econv.gpu.passes import (
    added_up,
    adding_up,
    begun,
    by_rows,
    like,
    numbers_of,
    rectified,
    store_sums,
    sums_of,
    tile_of,
)
from econv.gpu.sizes import Like
from econv.tensors import memory_format

__all__ = ["activated", "attempt", "field_statistics", "norm_gradient"]


@triton.jit
def activate(
    x, affine, out, rows, fields, programs, image_stride,
    INNER: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr, BI: tl.constexpr, BLOCKS: tl.constexpr,
    FIRST: tl.constexpr
):  # fmt: skip
    """max(0, (x − centre)·scale + shift)."""
    _, base, first, field = begun(programs, image_stride, fields, BF, BLOCKS, FIRST)
    centre, scale, shift = numbers_of(affine, field, fields)
    for block in tl.static_range(BLOCKS):
        where, known = tile_of(first + block, field, rows, fields, INNER, BR, BI, FIRST)
        value = tl.load(x + base + where, mask=known, other=0.0).to(tl.float32)
        value = rectified((value - centre) * scale + shift)
        tl.store(out + base + where, value.to(out.dtype.element_ty), mask=known)


@triton.jit
def moments(
    x, sums, out, rows, fields, programs, image_stride,
    INNER: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr, BI: tl.constexpr, BLOCKS: tl.constexpr,
    FIRST: tl.constexpr
):  # fmt: skip
    """``sums[program, 2, field]`` of x − c and of its square; ``out`` begins with the c of fields.

    This is a number of the field, from the middle of the first image: in sums of squares of x
    itself the mean would swallow the digits of small deviations.
    """
    program, base, first, field = begun(programs, image_stride, fields, BF, BLOCKS, FIRST)
    middle = (rows // 2 * fields + field) * INNER + INNER // 2
    centre = tl.load(x + middle, mask=field < fields, other=0.0).to(tl.float32)
    total = tl.zeros([BF, BR, BI] if FIRST else [BR, BF, BI], tl.float32)
    square = tl.zeros([BF, BR, BI] if FIRST else [BR, BF, BI], tl.float32)
    for block in tl.static_range(BLOCKS):
        where, known = tile_of(first + block, field, rows, fields, INNER, BR, BI, FIRST)
        value = tl.load(x + base + where, mask=known, other=0.0).to(tl.float32)
        value = tl.where(known, value - centre, 0.0)
        total += value
        square += value * value
    store_sums(total, square, sums, program, fields, BF, FIRST)
    tl.store(out + field, centre, mask=field < fields)


@triton.jit
def add_statistics(
    sums, weight, bias, running_mean, running_variance, share, out, programs, fields, count,
    momentum, unbiased, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr, SHARE: tl.constexpr,
    BF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A norm's numbers from the sums of `moments`.

    ``out``: centre, scale and shift of each field, and its inverse deviation. The running
    statistics move towards these by ``momentum``, or by a share that lies in memory.
    """
    total, square = added_up(sums, programs, fields, BF, BLOCK)
    field = tl.program_id(0) * BF + tl.arange(0, BF)
    there = field < fields
    distance = total / count
    mean = tl.load(out + field, mask=there, other=0.0) + distance
    variance = rectified(square / count - distance * distance)
    inverse = 1.0 / tl.sqrt(variance + eps)
    scale = inverse
    if WEIGHT:
        scale *= tl.load(weight + field, mask=there, other=0.0).to(tl.float32)
    shift = tl.zeros([BF], tl.float32)
    if BIAS:
        shift = tl.load(bias + field, mask=there, other=0.0).to(tl.float32)
    tl.store(out + field, mean, mask=there)
    tl.store(out + fields + field, scale, mask=there)
    tl.store(out + 2 * fields + field, shift, mask=there)
    tl.store(out + 3 * fields + field, inverse, mask=there)
    if RUNNING:
        part = momentum
        if SHARE:
            part = tl.load(share).to(tl.float32)
        old = tl.load(running_mean + field, mask=there, other=0.0).to(tl.float32)
        new = (old + part * (mean - old)).to(running_mean.dtype.element_ty)
        tl.store(running_mean + field, new, mask=there)
        old = tl.load(running_variance + field, mask=there, other=0.0).to(tl.float32)
        new = (old + part * (variance * unbiased - old)).to(running_variance.dtype.element_ty)
        tl.store(running_variance + field, new, mask=there)


@triton.jit
def norm_backward(
    g, shortcut, x, affine, gradients, out, rows, fields, programs, image_stride, count,
    INNER: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr, BI: tl.constexpr, BLOCKS: tl.constexpr,
    FIRST: tl.constexpr, ACTIVATED: tl.constexpr, SHORTCUT: tl.constexpr
):  # fmt: skip
    """The gradient to x, of which `field_statistics` made the numbers that act on it.

    g is that to x without its part in the numbers, or to what they make of it if ``ACTIVATED``;
    that of another reader of x is added. ``gradients`` are those to centre, scale and shift: the
    scale is variance^(−1/2) times a weight, and the variance the mean of (x − mean)².
    """
    _, base, first, field = begun(programs, image_stride, fields, BF, BLOCKS, FIRST)
    centre, scale, shift = numbers_of(affine, field, fields)
    to_centre, to_scale, _ = numbers_of(gradients, field, fields)
    inverse = tl.load(affine + 3 * fields + field, mask=field < fields, other=0.0)
    factor = -inverse * inverse * scale * to_scale / count
    to_centre = to_centre / count
    for block in tl.static_range(BLOCKS):
        where, known = tile_of(first + block, field, rows, fields, INNER, BR, BI, FIRST)
        value = tl.load(x + base + where, mask=known, other=0.0).to(tl.float32) - centre
        total = tl.load(g + base + where, mask=known, other=0.0).to(tl.float32)
        if ACTIVATED:
            total = tl.where(value * scale + shift <= 0.0, 0.0, total * scale)
        total += value * factor + to_centre
        if SHORTCUT:
            total += tl.load(shortcut + base + where, mask=known, other=0.0).to(tl.float32)
        tl.store(out + base + where, total.to(out.dtype.element_ty), mask=known)


def activated(x: Tensor, affine: Tensor) -> Tensor:
    """max(0, (x − centre)·scale + shift) of each field."""
    launch = by_rows(activate, Like.of(x), affine.shape[1])
    if launch is None:
        return Prologue(affine).apply(x)
    out = like(x)
    launch(x, affine.contiguous(), out)
    return out


def norm_gradient(
    x: Tensor,
    g: Tensor,
    numbers: Tensor,
    to_rows: Tensor,
    shortcut: Tensor | None,
    is_activated: bool = False,
) -> Tensor:
    """The gradient to ``x`` of a norm with the `field_statistics` ``numbers``.

    ``g`` is that to ``x`` without its part in the numbers, or to what was activated; ``to_rows``
    that to the first three numbers, ``shortcut`` that of another reader of ``x``.
    """
    fields = numbers.shape[1]
    constants = {"ACTIVATED": is_activated, "SHORTCUT": shortcut is not None}
    launch = by_rows(norm_backward, Like.of(x), fields, x.numel() // fields, **constants)
    assert launch is not None
    with on_device(x):
        layout = memory_format(x)
        out, g = like(x), g.contiguous(memory_format=layout)
        more = g if shortcut is None else shortcut.contiguous(memory_format=layout)
        launch(g, more, x, numbers, to_rows.contiguous(), out)
    return out


def field_statistics(
    x: Tensor,
    fields: int,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor, float | Tensor] | None,
    eps: float,
) -> Tensor:
    """Centre, scale and shift of each field of ``x``, and as a fourth row inverse deviations.

    ``x`` lies in one of torch's two layouts. ``running`` are mean, variance and the share of this
    batch in them (a number, or in memory): they are brought up to date. Without gradients.
    """
    mean, variance, share = (None, None, 0.0) if running is None else running
    number, in_memory = (0.0, share) if isinstance(share, Tensor) else (share, None)
    others = (weight, bias, mean, variance, in_memory)
    dtypes = [None if tensor is None else tensor.dtype for tensor in others]
    there = {"WEIGHT": dtypes[0], "BIAS": dtypes[1], "RUNNING": dtypes[2], "SHARE": dtypes[4]}
    constants = {name: dtype is not None for name, dtype in there.items()}
    count = x.numel() // fields
    numbers = (float(count), number, count / (count - 1), eps)
    launch = by_rows(moments, Like.of(x), fields, blocks=4)
    assert launch is not None
    with on_device(x):
        sums = sums_of(launch, fields, x.device)
        found = passes.empty((4, fields), torch.float32, x.device)
        adding = adding_up(add_statistics, sums.shape, numbers, (x.dtype, *dtypes), **constants)
        given = (sums if tensor is None else tensor for tensor in others)  # any stands for none
        launch_all([(launch, (x, sums, found)), (adding, (sums, *given, found))])
    for kept in (mean, variance):
        if kept is not None and not kept.is_inference():
            torch.autograd.graph.increment_version(kept)  # what a kernel writes, autograd misses
    return found


def attempt(device: torch.device) -> None:
    """What an activated map takes, once."""
    zero = torch.zeros(3, 1, dtype=torch.float32, device=device)
    activated(zero.new_zeros(1, 1, 1, 8), zero)
