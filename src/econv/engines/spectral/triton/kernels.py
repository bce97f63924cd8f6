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
from typing import Any, NamedTuple, Protocol

import triton
import triton.language as tl

from econv.engines.spectral.triton.scheme import Scheme
from econv.plan import SpectralPlan


class _Planned(Protocol):
    @property
    def plan(self) -> SpectralPlan: ...


class Kernels(NamedTuple):
    """Generated kernels."""

    analyse: tuple[Any, Any]
    """Of an input as it is, and of one that is activated."""
    pack: Any = None
    forward: Any = None
    weight_gradient: Any = None


@lru_cache(maxsize=512)
def generated(write: Callable[..., str], layout: Scheme, *options: Any) -> Kernels:
    """What `convolution_source` or `weight_gradient_source` writes, compiled."""
    space = _read(write(layout, *options), layout)
    others = {name: space[name] for name in Kernels._fields[1:] if name in space}
    return Kernels((space["analyse"], space["analyse_activated"]), **others)


def read_source(source: str, layout: _Planned, names: dict[str, Any]) -> dict[str, Any]:
    """What a text defines, where these names are known."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    name = f"<econv {layout.plan.basis.group.name} {digest}>"
    # Triton reads the source of a function: this is where Python looks for it.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space = {"__name__": __name__, **names}
    exec(compile(source, name, "exec"), space)
    return space


def _read(source: str, layout: Scheme) -> dict[str, Any]:
    names = {"exponent": exponent, "two_to": two_to, "rectified": rectified}
    return read_source(source, layout, {"triton": triton, "tl": tl, **names})


@triton.jit
def exponent(largest):
    """⌊log₂⌋ of a float32, kept where 2^ of it is a number; that of inf and NaN scales by one."""
    found = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.where(found == 128, 7, tl.minimum(tl.maximum(found, -100), 100))


@triton.jit
def two_to(power):
    """2^power, exactly; powers too small for a float32 become the smallest."""
    return ((tl.maximum(tl.minimum(power, 127), -126) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rectified(x):
    """max(0, x), and NaN of NaN, as torch has it."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


INTERPRETED = not isinstance(two_to, triton.JITFunction)
"""Whether Triton runs kernels one operation after the other, on the CPU."""


OVERALL = 4
"""Where the largest numbers of the images begin, after that of all: both addresses are aligned."""


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
