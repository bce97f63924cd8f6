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

from econv.engines.problem import Geometry, memory_format
from econv.engines.spectral.operator import Task
from econv.engines.spectral.tiling import INTERNAL, rounded_up, units
from econv.engines.spectral.torch import tables
from econv.engines.spectral.triton import launches
from econv.engines.spectral.triton.kernels import (
    INTERPRETED,
    OVERALL,
    exponent,
    read_source,
    two_to,
)
from econv.engines.spectral.triton.launch import Job, Launch, launch_all
from econv.engines.spectral.triton.scheme import power_of_two
from econv.engines.spectral.triton.volume_source import (
    FIELDS,
    WEIGHT_HEADROOM,
    Scheme,
    convolution_source,
    gradient_source,
    scheme,
)
from econv.plan import SpectralPlan

__all__ = ["CHANGES", "convolution", "largest", "weight_gradient"]

CHANGES: dict[str, Any] = {}
"""Other tiles than `Tiles` has, for tests and for finding those."""


class Tiles(NamedTuple):
    """How launches are cut into programs."""

    language: str = "gl"
    """Gluon, or Triton alone (``"tl"``)."""
    voxels: int = 0
    """Of each warp of the convolution; 0: as many as its registers hold."""
    warps: int = 4
    splits: int = 0
    """Parts of the sums of a weight gradient; 0: enough for every processor."""

    @staticmethod
    def chosen() -> Tiles:
        return Tiles()._replace(**CHANGES)


@triton.jit
def analyse(
    x, matrix, scales, out, positions, row, lines, planes, width, height, depth, images, fields,
    chunks, up, before, x_sample, x_channel, x_plane, x_row, x_column, each,
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
    iz = position // (row * lines) % planes - before
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
    largest = tl.load(scales + image * each, mask=known, other=1.0)
    value = value.to(tl.float32) * two_to(HEADROOM - exponent(largest))[:, None]
    slot = tl.arange(0, BN)
    factors = tl.load(matrix + channel[:, None] * BN + slot[None, :])
    found = tl.dot(value.to(factors.dtype), factors, input_precision=PRECISION)
    size = positions.to(tl.int64) * EIGHT
    into = out + (slot * chunks + tl.program_id(1)) * size + tl.program_id(0) * BP * EIGHT
    tl.store(into[None, :] + r[:, None], found.to(out.dtype.element_ty), mask=(slot < SLOTS)[None, :])


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
    value = tl.load(placed + o.to(tl.int64) * out_stride + i * in_stride + entry, mask=known, other=0.0)
    value *= two_to(HEADROOM - exponent(tl.load(largest)))
    tl.store(out + n, value.to(out.dtype.element_ty), mask=kept)


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
    def of(images: int, lengths: tuple[int, ...], geometry: Geometry, size: int, unit: int) -> Grid:
        """For so many samples, in whole units."""
        reach = geometry.dilation * (size - 1)
        pitches = []
        for length, out in zip(lengths, geometry.sizes, strict=True):
            needed = (out - 1) * geometry.down + reach + 1
            used = geometry.before + (length - 1) * geometry.up + 1
            pitches.append(max(1, min(used, needed), needed - geometry.before))
        planes, lines, row = pitches[0], pitches[1], rounded_up(pitches[2], 2)
        z, y, x = ((out - 1) * geometry.down for out in geometry.sizes)
        last = (((images - 1) * planes + z) * lines + y) * row + x + 1
        last = rounded_up(last, unit)
        return Grid(row, lines, planes, last, rounded_up(last + reach * ((lines + 1) * row + 1), unit))

    @property
    def plane(self) -> int:
        return self.row * self.lines

    @property
    def sample(self) -> int:
        return self.plane * self.planes


_UNIT = 64  # positions: whole tiles of every kernel


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
def _kernel(plan: SpectralPlan, dtype: torch.dtype, language: str, *which: Any) -> Any:
    """A kernel of a plan: the convolution, or some sums of the weight's gradient."""
    layout = scheme(plan)
    halves = dtype == torch.float16 and not INTERPRETED
    if which:
        source = gradient_source(layout, *which, language, halves)
    else:
        order = plan.synthesis.shape[0]
        group = math.gcd(order, 8)
        source = convolution_source(layout, language, halves, group)
    names = {"triton": triton, "tl": tl, "exponent": exponent, "two_to": two_to}
    if language == "gl":
        names |= {"gluon": gluon, "gl": gl, "mma_v2": mma_v2}
        names |= {one.__name__: gluon.jit(one.fn) for one in (exponent, two_to)}
    return read_source(source, layout, names)["weight_gradient" if which else "forward"]


def _language(dtype: torch.dtype, tiles: Tiles) -> str:
    """Gluon for 16 bits; float32 wants products in three, which Triton makes."""
    return tiles.language if _GLUON and not INTERPRETED and dtype == torch.float16 else "tl"


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in ``x``, and from `OVERALL` on that of each sample."""
    found = x.new_zeros(rounded_up(OVERALL + len(x), 4), dtype=torch.float32)
    launches.largest(x.flatten(2, -2), found)
    return found


def _analysis(
    x: Tensor, scales: Tensor, plan: SpectralPlan, geometry: tuple[int, int], grid: Grid, pairs: bool, each: int
) -> tuple[Tensor, Job]:
    """The spectrum of an input, to be, and what makes it."""
    dtype = INTERNAL[x.dtype]
    slots, order = plan.analysis.shape
    fields = x.shape[1] // order
    chunks = units(fields, FIELDS)
    spectrum = launches.empty((slots * chunks * grid.size * FIELDS,), dtype, x.device)
    up, before = geometry
    wide = _padded(max(slots, order)) > 64
    block = 8 if wide else 16
    numbers = (grid.size, grid.row, grid.lines, grid.planes, *x.shape[:1:-1], len(x), fields)
    strides = (x.stride(0), x.stride(1), *x.stride()[2:])
    options = {
        "HEADROOM": scheme(plan).headroom,
        "ORDER": order,
        "SLOTS": slots,
        "BK": _padded(order),
        "BN": _padded(slots),
        "BP": block,
        "EIGHT": FIELDS,
        "PAIRS": pairs,
        "PRECISION": launches.precision_of(x.dtype),
        "num_warps": 4,
    }
    launch = Launch(
        analyse, (grid.size // block, chunks), (*numbers, chunks, up, before, *strides, each), **options
    )
    return spectrum, (launch, (x, _constants(plan, x.device, dtype)["matrix"], scales, spectrum))


def convolution(
    task: Task, x: Tensor, x_largest: Tensor, weight: Tensor, adjoint: bool, last: bool
) -> Tensor:
    """A layer, or with ``adjoint`` the adjoint of the layer with this weight; channels last or not."""
    plan, geometry, tiles = task.plan, task.geometry, Tiles.chosen()
    layout, dtype = scheme(plan), INTERNAL[x.dtype]
    constants = _constants(plan, x.device, dtype)
    out_fields, in_fields = weight.shape[:2][:: -1 if adjoint else 1]
    order = plan.synthesis.shape[0]
    shape = (len(x), out_fields * order, *geometry.sizes)
    form = torch.channels_last_3d if last else torch.contiguous_format
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)
    if not y.numel() or not x.numel():
        return y.zero_()
    flat = weight.to(torch.float32).flatten(0, 1)
    placed = flat @ constants["adjoint" if adjoint else "forward"]
    w_largest = largest(placed[None, None, None])
    chunks, out_chunks = units(in_fields, FIELDS), units(out_fields, FIELDS)
    count, entries = len(layout.tiles), placed.shape[1]
    matrices = launches.empty((out_chunks * chunks * count * 256,), dtype, x.device)
    strides = (entries, out_fields * entries) if adjoint else (in_fields * entries, entries)
    numbers = (out_fields, in_fields, *strides, chunks, count, matrices.numel())
    launch = Launch(
        arrange, (units(matrices.numel(), 1024),), numbers, BLOCK=1024, HEADROOM=WEIGHT_HEADROOM, num_warps=4
    )
    jobs: list[Job] = [(launch, (placed, constants["tiles"], w_largest, matrices))]
    language = _language(dtype, tiles)
    kernel = _kernel(plan, dtype, language)
    voxels = tiles.voxels or (16 if layout.sums_of_a_voxel <= 16 else 8)
    voxels *= tiles.warps
    for first, images in _groups(x, y):
        some, out = x[first : first + images], y[first : first + images]
        grid = Grid.of(images, tuple(x.shape[2:]), geometry, plan.basis.size, _UNIT)
        scales = x_largest[OVERALL + first :]
        spectrum, job = _analysis(
            some, scales, plan, (geometry.up, geometry.before), grid, False, 1
        )
        total = images * geometry.pixels
        places = (grid.size, grid.sample, grid.plane, grid.row, geometry.down, geometry.dilation)
        numbers = (total, *geometry.sizes, *places, chunks, out_fields, *out.stride())
        options = {"VOXELS": voxels, "WARPS": tiles.warps, "PRECISION": launches.precision_of(x.dtype)}
        launch = Launch(
            kernel, (units(total, voxels), out_chunks), numbers, **options, num_warps=tiles.warps
        )
        jobs += [job, (launch, (spectrum, matrices, out, scales, w_largest))]
    launch_all(jobs)
    return y


def _groups(x: Tensor, y: Tensor) -> list[tuple[int, int]]:
    """Samples that run together: the first, and how many."""
    return [(0, len(x))]


def weight_gradient(
    task: Task, x: Tensor, x_largest: Tensor, g: Tensor, g_largest: Tensor
) -> Tensor:
    """The gradient to the entries of blocks, ``[out fields, in fields, coordinates]``."""
    plan, geometry, tiles = task.plan, task.geometry, Tiles.chosen()
    layout, dtype = scheme(plan), INTERNAL[x.dtype]
    constants = _constants(plan, x.device, dtype)
    order = plan.synthesis.shape[0]
    in_fields, out_fields = x.shape[1] // order, g.shape[1] // order
    coordinates = constants["forward"].shape[0]
    if not x.numel() or not g.numel():
        return x.new_zeros(out_fields, in_fields, coordinates, dtype=torch.float32)
    language = _language(dtype, tiles)
    chunks, out_chunks = units(in_fields, FIELDS), units(out_fields, FIELDS)
    every = [sum(map(len, layout.sums(family))) for family in layout.families]
    count = sum(n * family.copies for n, family in zip(every, layout.families, strict=True))
    copies = sum(family.copies for family in layout.families) * chunks * out_chunks
    grid = Grid.of(len(x), tuple(x.shape[2:]), geometry, plan.basis.size, _UNIT)
    voxels = 16 if language == "gl" else 64
    steps = grid.last // voxels
    splits = min(steps, tiles.splits or units(_WARPS, copies))
    each = units(steps, splits)
    splits = units(steps, each)
    partial = launches.empty((splits, out_chunks * chunks * count * 128), torch.float32, x.device)
    ours = (geometry.up, geometry.before)
    spectrum, one = _analysis(x, x_largest, plan, ours, grid, True, 0)
    gradient, two = _analysis(g, g_largest, plan.adjoint, (geometry.down, 0), grid, True, 0)
    jobs = [one, two]
    numbers = (grid.size, grid.plane, grid.row, geometry.dilation, chunks, out_chunks, steps, each)
    options = {"VOXELS": voxels, "ODD": geometry.dilation % 2, "PRECISION": launches.precision_of(x.dtype)}
    for number, family in enumerate(layout.families):
        programs = (family.copies * chunks * out_chunks, splits)
        for kernel in range(len(layout.sums(family))):
            made = _kernel(plan, dtype, language, number, kernel)
            warps = 1 if language == "gl" else 4
            launch = Launch(made, programs, numbers, **options, num_warps=warps)
            jobs.append((launch, (spectrum, gradient, partial, x_largest, g_largest)))
    launch_all(jobs)
    total = partial.sum(0) if splits > 1 else partial[0]
    total = total.view(out_chunks, chunks, 2 * count, FIELDS, FIELDS)
    total = total.index_select(2, constants["places"]).permute(0, 3, 1, 4, 2)
    total = total.reshape(out_chunks * FIELDS, chunks * FIELDS, -1)[:out_fields, :in_fields]
    return total @ constants["forward"].T


_WARPS = 132 * 8  # that a GPU runs at a time
