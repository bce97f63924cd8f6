"""The spectral engine's kernels for GPUs: those that are written for a plan, and those for all.

This room knows Triton. The text of the former comes from `econv.engines.triton_source`; where
tensors live and what calls what is the business of `econv.engines.triton_ops`.
"""

# Kernels are written in Triton's language, which has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import hashlib
import linecache
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from econv.engines.triton_scheme import Scheme
from econv.engines.triton_source import convolution_source, gradient_source

__all__ = [
    "INTERPRETED",
    "OVERALL",
    "Convolution",
    "Gradient",
    "arrange",
    "convolution",
    "gradient",
    "largest",
    "spread",
]


class Convolution(NamedTuple):
    """The kernels of a layer."""

    analyse: Any
    forward: Any


class Gradient(NamedTuple):
    """The kernels of the gradient to a layer's weights."""

    analyse: Any
    lay: Any
    gram: Any


@lru_cache(maxsize=256)
def convolution(layout: Scheme, parts: tuple[int, ...], copies: int, packed: bool) -> Convolution:
    """The kernels of a plan's layer, cut as `convolution_source` says."""
    space = _read(convolution_source(layout, parts, copies, packed), layout)
    return Convolution(space["analyse"], space["forward"])


@lru_cache(maxsize=256)
def gradient(
    layout: Scheme, parts: tuple[int, ...], copies: int, pixels: int, packed: bool
) -> Gradient:
    """The kernels of the gradient to its weights, cut as `gradient_source` says."""
    space = _read(gradient_source(layout, parts, copies, pixels, packed), layout)
    return Gradient(space["analyse"], space["lay"], space["gram"])


def _read(source: str, layout: Scheme) -> dict[str, Any]:
    digest = hashlib.sha256(source.encode()).hexdigest()
    name = f"<econv {layout.plan.basis.group.name} {digest}>"
    # Triton reads the source of a function: this is where Python looks for it.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": __name__, "triton": triton, "tl": tl}
    space |= {"exponent": exponent, "two_to": two_to}
    exec(compile(source, name, "exec"), space)
    return space


@triton.jit
def exponent(largest):
    """⌊log₂⌋ of a float32, kept where 2^ of it is a number; that of inf and NaN scales by one."""
    found = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.where(found == 128, 9, tl.minimum(tl.maximum(found, -100), 100))


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
    x,
    out,
    numbers,
    image_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERALL: tl.constexpr,
):
    """The largest magnitudes of all images and of each, where ``out`` was zero.

    Those of numbers are ordered as their bits are, and NaN comes after infinity.
    """
    image = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for block in tl.static_range(BLOCKS):
        n = (tl.program_id(1) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + image.to(tl.int64) * image_stride + n, mask=n < numbers, other=0.0)
        found = tl.maximum(found, value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    most = tl.max(found, axis=0)
    tl.atomic_max(out, most)
    tl.atomic_max(out + OVERALL + image, most)


@triton.jit
def arrange(
    weights,
    entries,
    signs,
    pieces,
    largest,
    out,
    out_fields,
    in_fields,
    out_stride,
    in_stride,
    out_padded,
    targets,
    inner,
    copies,
    fields,
    wide,
    total,
    BF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADROOM: tl.constexpr,
):
    """Spectral weights in the order in which the products read them, scaled.

    ``[field chunk, piece, program, part]``, and there `_Fragments`.
    """  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < total
    k = n % inner
    field = n // inner % BF
    column = n // (inner * BF) % 2
    o = n // (inner * BF * 2) % out_padded
    target = n // (inner * BF * 2) // out_padded % targets
    chunk = n // (inner * BF * 2) // out_padded // targets
    place = (target * inner + k) * 2 + column
    entry = tl.load(entries + place, mask=kept, other=-1)
    sign = tl.load(signs + place, mask=kept, other=0.0)
    start = tl.load(pieces + k * 2)
    size = tl.load(pieces + k * 2 + 1)
    i = chunk * BF + field
    known = (o < out_fields) & (i < in_fields) & (entry >= 0)
    value = tl.load(weights + o * out_stride + i * in_stride + entry, mask=known, other=0.0)
    value *= sign * two_to(HEADROOM - exponent(tl.load(largest)))
    each = targets * 2 * BF * size
    where = (chunk * inner + start) * (targets * out_padded * 2 * BF)
    where += o // (fields * copies) * (fields * copies) * each
    copy = o // fields % copies
    o = o % fields
    second = o >= wide
    where += tl.where(second, wide * copies * each, 0)
    o = tl.where(second, o - wide, o)
    runs = tl.where(second, fields - wide, wide) // 4
    k = field * size + k - start
    n = o * 2 + column
    inners = BF * size // 16
    two = tl.minimum(2, runs)
    one = tl.where(two == 1, tl.minimum(2, inners), 1)
    group = n // 8 // two * (inners // one) + k // 16 // one
    thread = (group * (targets * copies) + target * copies + copy) * 32 + n % 8 * 4 + k // 2 % 4
    where += ((thread * two + n // 8 % two) * one + k // 16 % one) * 4 + k // 8 % 2 * 2 + k % 2
    tl.store(out + where, value.to(out.dtype.element_ty), mask=kept)


@triton.jit
def spread(
    partial,
    owners,
    signs,
    out,
    out_fields,
    in_fields,
    weights,
    in_padded,
    out_padded,
    count,
    splits,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the partial gradients in a fixed order: each spectral weight has its own.

    A program reads ``SPLITS`` of them at once.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < weights * in_fields * out_fields
    o = n % out_fields
    i = n // out_fields % in_fields
    number = n // (out_fields * in_fields)
    each = in_padded * count * out_padded * 2
    total = tl.zeros([SPLITS, BLOCK], tl.float32)
    for t in tl.static_range(MOST):
        place = tl.load(owners + number * MOST + t, mask=kept, other=-1)
        sign = tl.load(signs + number * MOST + t, mask=kept, other=0.0)
        where = ((i * count + place // 2) * out_padded + o) * 2 + place % 2
        source = partial + where[None, :]
        for first in tl.range(0, splits, SPLITS):
            split = first + tl.arange(0, SPLITS)[:, None]
            there = (split < splits) & (place >= 0)[None, :]
            value = tl.load(source + split.to(tl.int64) * each, mask=there, other=0.0)
            total += value * sign[None, :]
    total = tl.sum(total, axis=0)
    tl.store(out + (o * in_fields + i) * weights + number, total, mask=kept)
