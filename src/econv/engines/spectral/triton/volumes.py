"""Layers between volumes on a GPU: from shapes to launches.

A layer takes three kernels. `analyse` scales the input and takes it to the group's Fourier space,
on a grid with the zeros around it; `arrange` puts the weights into the order in which they are
read; what `volume_source` writes does the rest, up to the channels of the output. The gradient to
the input is the same with other weights. That to the weights reads both spectra with neighbouring
voxels side by side, and its sums over parts of the grid are added up in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2

    _GLUON = True
except (ImportError, AttributeError):
    _GLUON = False

from econv.engines.problem import Geometry
from econv.engines.spectral.tiling import spans
from econv.engines.spectral.triton import launches
from econv.engines.spectral.triton.kernels import (
    INTERPRETED,
    OVERALL,
    exponent,
    read_source,
    two_to,
)
from econv.engines.spectral.triton.volume_source import (
    FIELDS,
    TILE,
    WEIGHT_HEADROOM,
    convolution_source,
    gradient_source,
    scheme,
)
from econv.gpu import passes
from econv.gpu.launch import Job, Launch, launch_all
from econv.gpu.sizes import Like, power_of_two, rounded_up, units
from econv.plan import SpectralPlan, plan_named

__all__ = ["CHANGES", "convolution_run", "weight_gradient_run"]

CHANGES: dict[str, Any] = {}
"""What measurements and tests set otherwise: ``language``, ``voxels`` or ``programs``."""

_WARPS, _LINES, _PLANES = 4, 2, 2
"""Of a program of the convolution; the rest of its voxels lie along x."""

_PROGRAMS = 132 * 8
"""Of a kernel of the weight's gradient, about: each sums over a part of the grid."""


if _GLUON:

    @gluon.jit
    def product(a, b, total, PRECISION: gl.constexpr):
        """The sum and a product; of float32 in one or in three of tf32."""
        if PRECISION == "tf32x3":
            a_high = (a.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
            b_high = (b.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
            total = mma_v2(a - a_high, b_high, total, "tf32")
            total = mma_v2(a_high, b - b_high, total, "tf32")
            total = mma_v2(a_high, b_high, total, "tf32")
        else:
            total = mma_v2(a, b, total, "tf32")
        return total


@triton.jit(do_not_specialize=["begin"])
def analyse(
    x, matrix, scales, out, positions, row, lines, planes, width, height, depth, images, fields,
    chunks, up, above, before, x_sample, x_channel, x_plane, x_row, x_column, begin, each,
    HEADROOM: tl.constexpr, ORDER: tl.constexpr, SLOTS: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, EIGHT: tl.constexpr, PAIRS: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Channels to slots, on a grid: ``[slot, chunk of fields, position, field]``.

    With ``PAIRS`` two neighbouring positions come last.
    """
    r = tl.arange(0, BP * EIGHT)
    position = tl.program_id(0) * BP
    if PAIRS:
        position += r // (2 * EIGHT) * 2 + r % 2
        field = tl.program_id(1) * EIGHT + r // 2 % EIGHT
    else:
        position += r // EIGHT
        field = tl.program_id(1) * EIGHT + r % EIGHT
    ix = position % row - before
    iy = position // row % lines - before
    iz = position // (row * lines) % planes - above
    image = position // (row * lines * planes)
    known = (ix >= 0) & (iy >= 0) & (iz >= 0) & (image < images) & (field < fields)
    known &= (ix % up == 0) & (iy % up == 0) & (iz % up == 0)
    ix, iy, iz = ix // up, iy // up, iz // up
    known &= (ix < width) & (iy < height) & (iz < depth)
    channel = tl.arange(0, BK)
    place = x + image.to(tl.int64) * x_sample + iz.to(tl.int64) * x_plane
    place += iy * x_row + ix * x_column + field * ORDER * x_channel
    there = known[:, None] & (channel < ORDER)[None, :]
    value = tl.load(place[:, None] + (channel * x_channel)[None, :], mask=there, other=0.0)
    largest = tl.load(scales + begin + image * each, mask=known, other=1.0)
    value = value.to(tl.float32) * two_to(HEADROOM - exponent(largest))[:, None]
    slot = tl.arange(0, BN)
    factors = tl.load(matrix + channel[:, None] * BN + slot[None, :])
    found = tl.dot(value.to(factors.dtype), factors, input_precision=PRECISION)
    size = positions.to(tl.int64) * EIGHT
    into = out + (slot * chunks + tl.program_id(1)) * size + tl.program_id(0) * BP * EIGHT
    tl.store(
        into[None, :] + r[:, None], found.to(out.dtype.element_ty), mask=(slot < SLOTS)[None, :]
    )


@triton.jit
def arrange(
    placed, tiles, largest, out, out_fields, in_fields, out_stride, in_stride, chunks, count, total,
    BLOCK: tl.constexpr, HEADROOM: tl.constexpr
):  # fmt: skip
    """Entries of blocks as matrices, ``[out chunk, chunk, matrix, 256]``, scaled."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < total
    place = n % (count * 256)
    chunk = n // (count * 256)
    entry = tl.load(tiles + place, mask=kept, other=-1)
    o = chunk // chunks * 8 + place % 256 // 32
    i = chunk % chunks * 8 + place // 8 % 4 * 2 + place % 2
    known = kept & (o < out_fields) & (i < in_fields) & (entry >= 0)
    value = tl.load(
        placed + o.to(tl.int64) * out_stride + i * in_stride + entry, mask=known, other=0.0
    )
    value *= two_to(HEADROOM - exponent(tl.load(largest)))
    tl.store(out + n, value.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["splits", "before", "again"])
def add_up(
    partial, out, splits, several, copies, count, before, again,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums of all programs of a kernel, ``several`` times so many copies, in a fixed order."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = several * copies
    kept = n < total
    found = tl.zeros([SPLITS, BLOCK], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)[:, None]
        there = (split < splits) & kept[None, :]
        found += tl.load(partial + (split.to(tl.int64) * total + n[None, :]), mask=there, other=0.0)
    sums = tl.sum(found, axis=0)
    into = out + n // copies * count + before + n % copies
    if again:
        sums += tl.load(into, mask=kept, other=0.0)
    tl.store(into, sums, mask=kept)


class Grid(NamedTuple):
    """Where the voxels of an input lie, and the zeros around them, which neighbours share."""

    row: int
    """Positions from one row to the next: an even number."""
    lines: int
    planes: int
    last: int
    """The position of the last output voxel, plus one."""
    size: int
    """All positions that anything reads."""

    @staticmethod
    def of(
        images: int, lengths: Sequence[int], geometry: Geometry, size: int, above: int | None = None
    ) -> Grid:
        """For so many samples; ``above``: planes before the first, if not `Geometry.before`."""
        margins = geometry.before if above is None else above, geometry.before, geometry.before
        (planes, _), (lines, _), (row, _) = spans(lengths, geometry, size, margins)
        row = rounded_up(row, 2)
        z, y, x = ((out - 1) * geometry.down for out in geometry.sizes)
        last = (((images - 1) * planes + z) * lines + y) * row + x + 1
        last = rounded_up(last, _UNIT)
        reach = geometry.dilation * (size - 1)
        most = rounded_up(last + reach * ((lines + 1) * row + 1), _UNIT)
        return Grid(row, lines, planes, last, most)

    @property
    def plane(self) -> int:
        return self.row * self.lines

    @property
    def sample(self) -> int:
        return self.plane * self.planes


_UNIT = 64  # positions: whole tiles of every kernel
_MOST = 1 << 27  # positions: with eight fields each they are counted in 32 bits


@lru_cache(maxsize=256)
def _constants(plan: SpectralPlan, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """What kernels read of a plan, and the matrices around them."""
    layout = scheme(plan)
    entries = np.concatenate([block.entries.ravel() for block in plan.blocks])
    signs = np.concatenate([block.signs.ravel() for block in plan.blocks])
    slots, order = plan.analysis.shape
    padded = np.zeros((_padded(order), _padded(slots)))
    padded[:order, :slots] = plan.analysis.T
    with torch.inference_mode(False):
        made = {
            "matrix": torch.tensor(padded, dtype=dtype, device=device),
            "tiles": torch.tensor(layout.tiles.ravel(), device=device),
            "places": torch.tensor(layout.places, device=device),
        }
        for name, matrix in (("forward", np.eye(plan.weights)), ("adjoint", plan.adjoint_map)):
            placed = matrix[:, entries] * signs
            made[name] = torch.tensor(placed, dtype=torch.float32, device=device)
    return made


def _padded(length: int) -> int:
    return max(16, power_of_two(length))


@lru_cache(maxsize=256)
def _kernel(
    plan: SpectralPlan, dtype: torch.dtype, language: str, sums: tuple[int, int] | None = None
) -> Any:
    """A kernel of a plan: the convolution, or some sums of the weight's gradient."""
    layout = scheme(plan)
    halves = dtype == torch.float16 and not INTERPRETED
    if sums is None:
        group = math.gcd(plan.synthesis.shape[0], 8)  # channels that are stored together
        source = convolution_source(layout, language, halves, group)
    else:
        source = gradient_source(layout, *sums, language, halves)
    names = {"triton": triton, "tl": tl, "exponent": exponent, "two_to": two_to}
    if language == "gl":
        names |= {"gluon": gluon, "gl": gl, "product": product}
        names |= {one.__name__: gluon.jit(one.fn) for one in (exponent, two_to)}
    return read_source(source, layout, names)["forward" if sums is None else "weight_gradient"]


def _language() -> str:
    """Gluon, or Triton alone."""
    known = _GLUON and not INTERPRETED
    return str(CHANGES.get("language", "gl")) if known else "tl"


class _Samples:
    """Some samples on the way to their spectrum, and planes of the output that are made of them."""

    def __init__(
        self,
        x: Like,
        images: int,
        plan: SpectralPlan,
        up: int,
        before: tuple[int, int],
        grid: Grid,
        first: int | None,
    ) -> None:
        """``before``: positions before the first plane, and before rows and columns.

        ``first``: the number of the first sample; if there is none, neighbours lie together and
        one scale is for all samples.
        """
        self.samples = slice(first or 0, (first or 0) + images)
        self.planes, self.offset = slice(None), -1
        self.launches: list[list[Launch]] = []
        dtype = launches.internal(x.dtype)
        slots, order = plan.analysis.shape
        fields = x.shape[1] // order
        chunks = units(fields, FIELDS)
        self.matrix = _constants(plan, x.device, dtype)["matrix"]
        self.numbers = slots * chunks * grid.size * FIELDS
        block = 8 if max(self.matrix.shape) > 64 else 16
        numbers = (grid.size, grid.row, grid.lines, grid.planes, *x.shape[:1:-1], images, fields)
        options = {
            "HEADROOM": scheme(plan).headroom,
            "ORDER": order,
            "SLOTS": slots,
            "BK": self.matrix.shape[0],
            "BN": self.matrix.shape[1],
            "BP": block,
            "EIGHT": FIELDS,
            "PAIRS": first is None,
            "PRECISION": launches.precision_of(x.dtype),
            "num_warps": 4,
        }
        scales = (0, 0) if first is None else (OVERALL + first, 1)
        numbers = (*numbers, chunks, up, *before, *x.strides, *scales)
        self.analyse = Launch(analyse, (grid.size // block, chunks), numbers, **options)

    def of(self, x: Tensor) -> Tensor:
        return x[self.samples]

    def into(self, y: Tensor) -> Tensor:
        return y[self.samples, :, self.planes]

    def scales(self, largest: Tensor) -> Tensor:
        return largest  # kernels are told where to begin: of any address there are few kernels


class Convolution(launches.ConvolutionRun):
    """A layer or its adjoint on volumes of one shape."""

    def __init__(
        self,
        x: Like,
        plan_name: str,
        adjoint: bool,
        geometry: Geometry,
        out_fields: int,
        channels_last: bool,
        precision: str,
        *_: Any,
    ) -> None:
        plan = plan_named(plan_name)
        layout, order = scheme(plan), plan.synthesis.shape[0]
        self.internal = self.word = launches.internal(x.dtype)
        self.shape = (x.shape[0], out_fields * order, *geometry.sizes)
        self.format = torch.channels_last_3d if channels_last else torch.contiguous_format
        self.groups: list[Any] = []
        self.own = 0
        if not math.prod(self.shape) * math.prod(x.shape):
            return
        constants = _constants(plan, x.device, self.internal)
        self.matrix = constants["matrix"]
        self.places = constants["adjoint" if adjoint else "forward"]
        in_fields = x.shape[1] // order
        chunks, out_chunks = units(in_fields, FIELDS), units(out_fields, FIELDS)
        count, entries = len(layout.tiles), layout.starts[-1]
        self.arranged = (out_chunks * chunks * count * TILE**2,)
        strides = (entries, out_fields * entries) if adjoint else (in_fields * entries, entries)
        numbers = (out_fields, in_fields, *strides, chunks, count, *self.arranged)
        options = {"BLOCK": 1024, "HEADROOM": WEIGHT_HEADROOM, "num_warps": 4}
        launch = Launch(arrange, (units(self.arranged[0], 1024),), numbers, **options)
        self.arrange = [(launch, [constants["tiles"]], None)]
        kernel = _kernel(plan, self.internal, language := _language())
        each = CHANGES.get("voxels", 16 if layout.matrices_of_a_voxel <= 8 else 8)
        voxels = each * _WARPS if language == "gl" else 32
        block = (_PLANES, _LINES, voxels // (_LINES * _PLANES))
        cuts: dict[str, Any] = {"VOXELS": voxels, "LINES": _LINES, "PLANES": _PLANES}
        cuts |= {"WARPS": _WARPS, "num_warps": _WARPS, "PRECISION": precision}
        lies = torch.empty(self.shape, device="meta", memory_format=self.format).stride()
        total, itemsize = math.prod(self.shape), x.dtype.itemsize
        filters = x.shape[1] * self.shape[1] * plan.stencils[0].size * itemsize
        spare = max(LEAST, 5 * filters // 2, 0 if adjoint else x.bytes)
        first = start = 0
        while first < x.shape[0]:
            images, depth = x.shape[0] - first, geometry.sizes[0] - start
            if start:
                images = 1
            while True:
                part = geometry._replace(sizes=(depth, *geometry.sizes[1:]))
                before = geometry.before - start * geometry.down, geometry.before
                grid = Grid.of(images, x.shape[2:], part, plan.basis.size, before[0])
                group = _Samples(x, images, plan, geometry.up, before, grid, first)
                offset = (total - group.numbers) // 64 * 64
                inside = offset >= (first + images) * (total // x.shape[0])
                fits = inside or group.numbers * itemsize <= spare
                if images == depth == 1 or (fits and grid.size <= _MOST):
                    break
                images, depth = (units(images, 2), depth) if images > 1 else (1, units(depth, 2))
            steps = (grid.size, grid.sample, grid.plane, grid.row)
            cut = [units(size, side) for size, side in zip(part.sizes, block, strict=True)]
            programs = (images * math.prod(cut), out_chunks)
            numbers = (*part.sizes, *cut, *steps, geometry.down, geometry.dilation, chunks)
            numbers = (*numbers, OVERALL + first, out_fields, *lies)
            group.launches = [[Launch(kernel, programs, numbers, **cuts)]]
            group.planes = slice(start, start + depth)
            group.offset = offset if inside else -1
            self.groups.append(group)
            self.own = max(self.own, 0 if inside else group.numbers)
            start += depth
            if start == geometry.sizes[0]:
                first, start = first + images, 0

    def __call__(
        self, x: Tensor, x_largest: Tensor, weights: Tensor, w_largest: Tensor, *_: Tensor
    ) -> Tensor:
        more = []
        if self.groups:
            weights, more = weights.flatten(0, 1) @ self.places, [self.matrix]
        return super().__call__(x, x_largest, weights, w_largest, *more)


LEAST = 9 << 19  # bytes that any layer may take


class WeightGradient:
    """The gradient to the weights on volumes of one shape."""

    def __init__(
        self, x: Like, g: Like, plan_name: str, geometry: Geometry, precision: str, *_: Any
    ) -> None:
        plan = plan_named(plan_name)
        layout, order = scheme(plan), plan.synthesis.shape[0]
        self.dtype = launches.internal(x.dtype)
        self.fields = g.shape[1] // order, x.shape[1] // order
        self.constants = _constants(plan, x.device, self.dtype)
        self.groups: list[tuple[_Samples, _Samples, list[tuple[Launch, Launch]]]] = []
        if not math.prod(x.shape) * math.prod(g.shape):
            return
        out_chunks, chunks = (units(fields, FIELDS) for fields in self.fields)
        self.sums = (out_chunks, chunks, 2 * layout.count, FIELDS, FIELDS)
        language = _language()
        voxels, warps = (TILE, 1) if language == "gl" else (_UNIT, 4)
        options = {"VOXELS": voxels, "ODD": geometry.dilation % 2, "PRECISION": precision}
        options["num_warps"] = warps

        def spectrum(images: int) -> tuple[Grid, _Samples]:
            grid = Grid.of(images, x.shape[2:], geometry, plan.basis.size)
            before = (geometry.before,) * 2
            return grid, _Samples(x, images, plan, geometry.up, before, grid, None)

        images, first = x.shape[0], 0
        while images > 1:
            grid, ours = spectrum(images)
            bytes_ = 2 * ours.numbers * self.dtype.itemsize
            if bytes_ <= max(LEAST, x.bytes) and grid.size <= _MOST:
                break
            images = units(images, 2)
        self.partial, adding = 0, {"SPLITS": 128, "BLOCK": 32, "num_warps": 8}
        while first < x.shape[0]:
            images = min(images, x.shape[0] - first)
            grid, ours = spectrum(images)
            ours.samples = slice(first, first + images)
            theirs = _Samples(g, images, plan.adjoint, geometry.down, (0, 0), grid, None)
            steps, before, several = grid.last // voxels, 0, []
            places = (grid.size, grid.plane, grid.row, geometry.dilation, chunks, out_chunks)
            for number, family in enumerate(layout.families):
                programs = family.copies * chunks * out_chunks
                splits = units(CHANGES.get("programs", _PROGRAMS), programs)
                each = units(steps, min(steps, splits))
                splits = units(steps, each)
                for part, own in enumerate(layout.sums(family)):
                    kernel = _kernel(plan, self.dtype, language, (number, part))
                    numbers = (*places, steps, each)
                    launch = Launch(kernel, (programs, splits), numbers, **options)
                    copies = family.copies * len(own) * _SUM
                    total = chunks * out_chunks * copies
                    where = (chunks * out_chunks, copies, layout.count * _SUM, before)
                    last = Launch(add_up, (units(total, 32),), (splits, *where, first), **adding)
                    several.append((launch, last))
                    before += copies
                    self.partial = max(self.partial, splits * total)
            self.groups.append((ours, theirs, several))
            first += images

    def __call__(
        self, x: Tensor, x_largest: Tensor, g: Tensor, g_largest: Tensor, *_: Tensor
    ) -> Tensor:
        placed, matrix = self.constants["forward"], self.constants["matrix"]
        if not self.groups:
            return x.new_zeros(*self.fields, len(placed), dtype=torch.float32)
        partial = passes.empty((self.partial,), torch.float32, x.device)
        sums = passes.empty((math.prod(self.sums),), torch.float32, x.device)
        ours, theirs = self.groups[0][:2]  # no other group is larger
        spectrum = passes.empty((ours.numbers,), self.dtype, x.device)
        gradient = passes.empty((theirs.numbers,), self.dtype, x.device)
        jobs: list[Job] = []
        for ours, theirs, several in self.groups:
            jobs.append((ours.analyse, (ours.of(x), matrix, x_largest, spectrum)))
            jobs.append((theirs.analyse, (g[ours.samples], matrix, g_largest, gradient)))
            for launch, last in several:
                jobs.append((launch, (spectrum, gradient, partial, x_largest, g_largest)))
                jobs.append((last, (partial, sums)))
        launch_all(jobs)
        total = sums.view(self.sums).index_select(2, self.constants["places"])
        total = total.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
        return total[: self.fields[0], : self.fields[1]] @ placed.T


_SUM = 2 * FIELDS**2  # numbers

convolution_run = lru_cache(maxsize=1024)(Convolution)
weight_gradient_run = lru_cache(maxsize=1024)(WeightGradient)
