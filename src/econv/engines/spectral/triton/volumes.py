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
from econv.gpu.launch import Job, Launch, launch_all
from econv.gpu.passes import empty
from econv.gpu.sizes import Like, power_of_two, rounded_up, units
from econv.plan import SpectralPlan

__all__ = ["CHANGES", "convolution", "largest", "weight_gradient"]

CHANGES: dict[str, Any] = {}
"""Other tiles than `Tiles` has, for tests and for finding those."""


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


class Tiles(NamedTuple):
    """How launches are cut into programs."""

    language: str = "gl"
    """Gluon, or Triton alone (``"tl"``)."""
    voxels: int = 0
    """Of each warp of the convolution; 0: as many as its registers hold."""
    warps: int = 4
    lines: int = 2
    """Of a tile of the convolution: along y; the rest of its voxels lie along x."""
    planes: int = 2
    """The same along z."""
    registers: int = 0
    """Of each thread of the convolution, at most; 0: as many as there are."""
    gradient_registers: int = 0
    """The same of the weight's gradient."""
    programs: int = 132 * 8
    """Of a kernel of the weight's gradient, about: each sums over a part of the grid."""

    @staticmethod
    def chosen() -> Tiles:
        return Tiles()._replace(**CHANGES)


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
        reach = geometry.dilation * (size - 1)
        pitches = []
        every = geometry.before if above is None else above, geometry.before, geometry.before
        for length, out, before in zip(lengths, geometry.sizes, every, strict=True):
            needed = (out - 1) * geometry.down + reach + 1
            used = before + (length - 1) * geometry.up + 1
            pitches.append(max(1, min(used, needed), needed - max(0, before)))
        planes, lines, row = pitches[0], pitches[1], rounded_up(pitches[2], 2)
        z, y, x = ((out - 1) * geometry.down for out in geometry.sizes)
        last = (((images - 1) * planes + z) * lines + y) * row + x + 1
        last = rounded_up(last, _UNIT)
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
    adjoint = plan.weight_map @ plan.adjoint_map
    with torch.inference_mode(False):
        made = {
            "matrix": torch.tensor(padded, dtype=dtype, device=device),
            "tiles": torch.tensor(layout.tiles.ravel(), device=device),
            "places": torch.tensor(layout.places, device=device),
        }
        for name, matrix in (("forward", plan.weight_map), ("adjoint", adjoint)):
            found = torch.tensor(matrix[:, entries] * signs, dtype=torch.float32, device=device)
            made[name] = found
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


def _language(tiles: Tiles) -> str:
    return tiles.language if _GLUON and not INTERPRETED else "tl"


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in ``x``, and from `OVERALL` on that of each sample."""
    found = x.new_zeros(rounded_up(OVERALL + len(x), 4), dtype=torch.float32)
    launches.largest(x.flatten(2, -2), found)
    return found


class _Analysis:
    """Some samples on the way to their spectrum."""

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
        self.launch = Launch(analyse, (grid.size // block, chunks), numbers, **options)

    def job(self, x: Tensor, scales: Tensor, spectrum: Tensor) -> Job:
        return self.launch, (x, self.matrix, scales, spectrum)


class Convolution:
    """A layer or its adjoint on volumes of one shape."""

    def __init__(
        self,
        x: Like,
        plan: SpectralPlan,
        geometry: Geometry,
        out_fields: int,
        adjoint: bool,
        last: bool,
        precision: str,
        tiles: Tiles,
    ) -> None:
        """``last``: whether the channels of the output lie last."""
        layout, order = scheme(plan), plan.synthesis.shape[0]
        self.dtype, self.adjoint = launches.internal(x.dtype), adjoint
        self.shape = (x.shape[0], out_fields * order, *geometry.sizes)
        self.format = torch.channels_last_3d if last else torch.contiguous_format
        self.groups: list[tuple[slice, slice, int, _Analysis, Launch]] = []
        """Samples, planes of the output, where in it the spectrum lies (−1: not there) …"""
        self.own = 0
        if not math.prod(self.shape) * math.prod(x.shape):
            return
        self.constants = _constants(plan, x.device, self.dtype)
        in_fields = x.shape[1] // order
        chunks, out_chunks = units(in_fields, FIELDS), units(out_fields, FIELDS)
        count, entries = len(layout.tiles), layout.starts[-1]
        self.matrices = out_chunks * chunks * count * TILE**2
        strides = (entries, out_fields * entries) if adjoint else (in_fields * entries, entries)
        numbers = (out_fields, in_fields, *strides, chunks, count, self.matrices)
        options = {"BLOCK": 1024, "HEADROOM": WEIGHT_HEADROOM, "num_warps": 4}
        self.arrange = Launch(arrange, (units(self.matrices, 1024),), numbers, **options)
        kernel = _kernel(plan, self.dtype, language := _language(tiles))
        warps = tiles.warps
        each = tiles.voxels or (16 if layout.matrices_of_a_voxel <= 8 else 8)
        voxels = each * warps if language == "gl" else 32
        block = (tiles.planes, tiles.lines, voxels // (tiles.lines * tiles.planes))
        options = {"VOXELS": voxels, "LINES": block[1], "PLANES": block[0], "WARPS": warps}
        options |= {"num_warps": warps}
        if tiles.registers:
            options["maxnreg"] = tiles.registers
        y = torch.empty(self.shape, device="meta", memory_format=self.format)
        total, itemsize = math.prod(self.shape), x.dtype.itemsize
        filters = x.shape[1] * self.shape[1] * plan.stencils[0].size * itemsize
        spare = max(LEAST, 5 * filters // 2, 0 if adjoint else x.bytes)
        first = start = 0
        while first < len(y):
            images, depth = len(y) - first, geometry.sizes[0] - start
            if start:
                images = 1
            while True:
                part = geometry._replace(sizes=(depth, *geometry.sizes[1:]))
                before = geometry.before - start * geometry.down, geometry.before
                grid = Grid.of(images, x.shape[2:], part, plan.basis.size, before[0])
                own = _Analysis(x, images, plan, geometry.up, before, grid, first)
                offset = (total - own.numbers) // 64 * 64
                inside = offset >= (first + images) * (total // len(y))
                fits = inside or own.numbers * itemsize <= spare
                if images == depth == 1 or (fits and grid.size <= _MOST):
                    break
                images, depth = (units(images, 2), depth) if images > 1 else (1, units(depth, 2))
            places = (
                grid.size,
                grid.sample,
                grid.plane,
                grid.row,
                geometry.down,
                geometry.dilation,
            )
            cut = [units(size, side) for size, side in zip(part.sizes, block, strict=True)]
            programs = (images * math.prod(cut), out_chunks)
            numbers = (*part.sizes, *cut, *places, chunks, OVERALL + first, out_fields)
            numbers = (*numbers, *y.stride())
            launch = Launch(kernel, programs, numbers, PRECISION=precision, **options)
            samples, planes = slice(first, first + images), slice(start, start + depth)
            self.groups.append((samples, planes, offset if inside else -1, own, launch))
            self.own = max(self.own, 0 if inside else own.numbers)
            start += depth
            if start == geometry.sizes[0]:
                first, start = first + images, 0

    def __call__(self, x: Tensor, x_largest: Tensor, weight: Tensor) -> Tensor:
        y = torch.empty(self.shape, dtype=x.dtype, device=x.device, memory_format=self.format)
        if not self.groups:
            return y.zero_()
        flat = weight.to(torch.float32).flatten(0, 1)
        placed = flat @ self.constants["adjoint" if self.adjoint else "forward"]
        w_largest = largest(placed[None, None, None])
        matrices = empty((self.matrices,), self.dtype, x.device)
        jobs: list[Job] = [(self.arrange, (placed, self.constants["tiles"], w_largest, matrices))]
        own = empty((self.own,), self.dtype, x.device)
        memory = y.as_strided((y.numel(),), (1,)).view(self.dtype)
        for samples, planes, offset, analysis, launch in self.groups:
            spectrum = (own if offset < 0 else memory[offset:])[: analysis.numbers]
            jobs.append(analysis.job(x[samples], x_largest, spectrum))
            out = y[samples, :, planes]
            jobs.append((launch, (spectrum, matrices, out, x_largest, w_largest)))
        launch_all(jobs)
        return y


LEAST = 9 << 19  # bytes that any layer may take


class WeightGradient:
    """The gradient to the weights on volumes of one shape."""

    def __init__(
        self,
        x: Like,
        g: Like,
        plan: SpectralPlan,
        geometry: Geometry,
        precision: str,
        tiles: Tiles,
    ) -> None:
        layout, order = scheme(plan), plan.synthesis.shape[0]
        self.dtype = launches.internal(x.dtype)
        self.fields = g.shape[1] // order, x.shape[1] // order
        self.constants = _constants(plan, x.device, self.dtype)
        self.groups: list[tuple[int, int, _Analysis, _Analysis, list[tuple[Launch, Launch]]]] = []
        if not math.prod(x.shape) * math.prod(g.shape):
            return
        out_chunks, chunks = (units(fields, FIELDS) for fields in self.fields)
        self.sums = (out_chunks, chunks, 2 * layout.count, FIELDS, FIELDS)
        language = _language(tiles)
        voxels, warps = (TILE, 1) if language == "gl" else (_UNIT, 4)
        options = {"VOXELS": voxels, "ODD": geometry.dilation % 2, "PRECISION": precision}
        options["num_warps"] = warps
        if tiles.gradient_registers:
            options["maxnreg"] = tiles.gradient_registers
        images, first = x.shape[0], 0
        while True:
            grid = Grid.of(images, x.shape[2:], geometry, plan.basis.size)
            ours = _Analysis(x, images, plan, geometry.up, (geometry.before,) * 2, grid, None)
            bytes_ = 2 * ours.numbers * self.dtype.itemsize
            if images == 1 or (bytes_ <= max(LEAST, x.bytes) and grid.size <= _MOST):
                break
            images = units(images, 2)
        self.partial, adding = 0, {"SPLITS": 128, "BLOCK": 32, "num_warps": 8}
        while first < x.shape[0]:
            images = min(images, x.shape[0] - first)
            grid = Grid.of(images, x.shape[2:], geometry, plan.basis.size)
            ours = _Analysis(x, images, plan, geometry.up, (geometry.before,) * 2, grid, None)
            theirs = _Analysis(g, images, plan.adjoint, geometry.down, (0, 0), grid, None)
            places = (grid.size, grid.plane, grid.row, geometry.dilation, chunks, out_chunks)
            steps, before, several = grid.last // voxels, 0, []
            for number, family in enumerate(layout.families):
                programs = family.copies * chunks * out_chunks
                each = units(steps, min(steps, units(tiles.programs, programs)))
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
            self.groups.append((first, images, ours, theirs, several))
            first += images

    def __call__(self, x: Tensor, x_largest: Tensor, g: Tensor, g_largest: Tensor) -> Tensor:
        matrix = self.constants["forward"]
        if not self.groups:
            return x.new_zeros(*self.fields, len(matrix), dtype=torch.float32)
        partial = empty((self.partial,), torch.float32, x.device)
        sums = empty((math.prod(self.sums),), torch.float32, x.device)
        _, _, ours, theirs, _ = self.groups[0]  # no other group is larger
        spectrum = empty((ours.numbers,), self.dtype, x.device)
        gradient = empty((theirs.numbers,), self.dtype, x.device)
        jobs: list[Job] = []
        for first, images, ours, theirs, several in self.groups:
            some = slice(first, first + images)
            jobs.append(ours.job(x[some], x_largest, spectrum))
            jobs.append(theirs.job(g[some], g_largest, gradient))
            for launch, last in several:
                jobs.append((launch, (spectrum, gradient, partial, x_largest, g_largest)))
                jobs.append((last, (partial, sums)))
        launch_all(jobs)
        total = sums.view(self.sums).index_select(2, self.constants["places"])
        total = total.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
        return total[: self.fields[0], : self.fields[1]] @ matrix.T


_SUM = 2 * FIELDS**2  # numbers

convolution = lru_cache(maxsize=1024)(Convolution)
weight_gradient = lru_cache(maxsize=1024)(WeightGradient)
