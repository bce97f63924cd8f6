"""The Triton kernels of the spectral engine.

Some are generated for one plan: `source` writes their text, and this module compiles it. The others
serve all plans and are written here. `launches` launches both kinds.
"""

# Kernels are written in Triton's language, which has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from econv.engines.spectral.triton.scheme import Scheme
from econv.gpu.passes import begun, numbers_of, rectified, tile_of


@lru_cache(maxsize=512)
def generated(write: Callable[..., str], layout: Scheme, *options: Any) -> dict[str, Any]:
    """What `convolution_source` or `weight_gradient_source` writes, compiled: kernels by name."""
    return read_source(write(layout, *options), layout, globals())


def read_source(source: str, layout: Any, names: dict[str, Any]) -> dict[str, Any]:
    """What a text defines, where these names are known."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    name = f"<econv {layout.plan.basis.group.name} {digest}>"
    # Triton reads the source of a function: this is where Python looks for it.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space = {**names, "__name__": __name__}
    exec(compile(source, name, "exec"), space)
    return space


@triton.jit
def exponent(largest):
    """⌊log₂⌋ of a float32, kept where 2^ of it is a number; that of inf and NaN scales by one."""
    found = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.where(found == 128, 7, tl.minimum(tl.maximum(found, -100), 100))


@triton.jit
def two_to(power):
    """2^power, exactly; powers too small for a float32 become the smallest."""
    return ((tl.maximum(tl.minimum(power, 127), -126) + 127) << 23).to(tl.float32, bitcast=True)


INTERPRETED = not isinstance(two_to, triton.JITFunction)
"""Whether Triton runs kernels one operation after the other, on the CPU."""


OVERALL = 4
"""Where the largest numbers of the images begin, after that of all: both addresses are aligned."""


@triton.jit
def largest(
    x, affine, out, rows, fields, programs, image_stride,
    INNER: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr, BI: tl.constexpr, BLOCKS: tl.constexpr,
    FIRST: tl.constexpr, OVERALL: tl.constexpr, ACTIVATED: tl.constexpr
):  # fmt: skip
    """The largest magnitudes of all images and of each, where ``out`` was zero.

    Of max(0, (x − centre)·scale + shift) where they are activated. Magnitudes are ordered as their
    bits are, and NaN comes after infinity.
    """
    program, base, first, field = begun(programs, image_stride, fields, BF, BLOCKS, FIRST)
    found = tl.zeros([BF, BR, BI] if FIRST else [BR, BF, BI], tl.int32)
    if ACTIVATED:
        centre, scale, shift = numbers_of(affine, field, fields)
    for block in tl.static_range(BLOCKS):
        where, known = tile_of(first + block, field, rows, fields, INNER, BR, BI, FIRST)
        value = tl.load(x + base + where, mask=known, other=0.0).to(tl.float32)
        if ACTIVATED:
            value = tl.where(known, rectified((value - centre) * scale + shift), 0.0)
        found = tl.maximum(found, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    most = tl.max(tl.reshape(found, [BR * BF * BI]), axis=0)
    tl.atomic_max(out, most)
    tl.atomic_max(out + OVERALL + program // programs, most)


@triton.jit
def arrange(
    weights, entries, signs, pieces, largest, out, out_fields, in_fields, out_stride, in_stride,
    programs, targets, inner, length, chunks, fields, wide, total,
    BF: tl.constexpr, BLOCK: tl.constexpr, HEADROOM: tl.constexpr
):  # fmt: skip
    """Spectral weights as rows of matrices, scaled.

    A matrix for each piece of a slot chunk, ``[slot chunk, field chunk, program, part, target,
    (field, column)]`` by ``[input field, feature]``.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < total
    columns = targets * 2 * fields
    rows = inner // length * chunks * programs * columns
    feature = n // (rows * BF)
    start = tl.load(pieces + feature * 2, mask=kept, other=0)
    size = tl.load(pieces + feature * 2 + 1, mask=kept, other=1)
    n = n - start * (rows * BF)
    k = n % (BF * size)
    row = n // (BF * size)
    step = row // columns // programs
    program = row // columns % programs
    row = row % columns
    second = row >= targets * 2 * wide
    row = row - tl.where(second, targets * 2 * wide, 0)
    each = 2 * tl.where(second, fields - wide, wide)
    target = row // each
    o = program * fields + tl.where(second, wide, 0) + row % each // 2
    i = step % chunks * BF + k // size
    offset = (target * inner + step // chunks * length + start + k % size) * 2 + row % 2
    entry = tl.load(entries + offset, mask=kept, other=-1)
    sign = tl.load(signs + offset, mask=kept, other=0.0)
    known = (o < out_fields) & (i < in_fields) & (entry >= 0)
    value = tl.load(weights + o * out_stride + i * in_stride + entry, mask=known, other=0.0)
    value *= sign * two_to(HEADROOM - exponent(tl.load(largest)))
    into = out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(into, value.to(out.dtype.element_ty), mask=kept)


@triton.jit
def reduce(
    partial, owners, signs, out, out_fields, in_fields, weights, in_padded, out_padded, count,
    splits,
    MOST: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr
):  # fmt: skip
    """Sum the partial gradients in a fixed order: each spectral weight has its own.

    A program reads ``SPLITS`` of them at once. What another launch sums is left alone. Outputs lie
    side by side where it reads, and weights where it writes.
    """
    number = tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.program_id(0) % in_fields
    o = tl.program_id(0) // in_fields * BO + tl.arange(0, BO)
    owned = tl.load(owners + number * MOST, mask=number < weights, other=-2) > -2
    each = in_padded * count * out_padded * 2
    total = tl.zeros([SPLITS, BN, BO], tl.float32)
    for t in tl.static_range(MOST):
        offset = tl.load(owners + number * MOST + t, mask=owned, other=-1)
        sign = tl.load(signs + number * MOST + t, mask=owned, other=0.0)
        where = (i * count + offset // 2) * out_padded * 2 + offset % 2
        source = partial + (where[:, None] + o[None, :] * 2)[None, :, :]
        known = (offset >= 0)[:, None] & (o < out_fields)[None, :]
        for first in tl.range(0, splits, SPLITS):
            split = (first + tl.arange(0, SPLITS))[:, None, None]
            there = (split < splits) & known[None, :, :]
            value = tl.load(source + split.to(tl.int64) * each, mask=there, other=0.0)
            total += value * sign[None, :, None]
    total = tl.sum(total, axis=0)
    into = out + number[:, None] + (o * in_fields + i)[None, :] * weights
    tl.store(into, total, mask=owned[:, None] & (o < out_fields)[None, :])
