"""How launches on a GPU are cut into programs, and how much memory they take.

Both kinds of kernels, those in Triton and the warp-specialised ones, follow these rules. They ask
for shapes and a plan alone and need no Triton, so that an engine can be chosen by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from econv.engines.problem import Geometry
from econv.engines.spectral.hopper.schedule import PRODUCERS, ROWS, fits, weight_gradient_features
from econv.engines.spectral.triton.scheme import FIELDS, MANY, Scheme, halves
from econv.gpu.sizes import Like, power_of_two, rounded_up, units

_ACCUMULATORS = 384  # output channels (slots times fields) of one program, at most
_GRADIENT_FIELDS = 8  # output fields: with two columns each they fill a product's 16 rows
_COUNTED = 2**31 - 1  # numbers of a spectrum, at most: kernels count them in 32 bits
_LEAST = 9 << 19  # bytes that a library of convolutions takes for small layers
_PROCESSORS = 132  # of an H200, for tensors that are on no GPU

# Warp-specialised kernels:
_CONSUMER_ACCUMULATORS = 320  # 160 registers of each consumer thread
_SHARED = 225 << 10  # bytes of shared memory for the stages of a program
_TARGETS = (4, 8, 16)  # products of layers that were measured to gain


class Tiles(NamedTuple):
    """How a launch is cut into programs.

    A thread owns a pixel and a field: pixels times fields of a program are at least 32 for each of
    its warps.
    """

    pixels: int = 32
    """Pixels of one program of the convolution, which takes `FIELDS` fields at a time."""
    warps: int = 4
    accumulators: int = _ACCUMULATORS
    gradient_fields: int = 2
    """Input fields of one program there, at most `FIELDS`."""
    splits: int = 0
    """How many programs share the pixels of one gradient to the weights; 0: enough for the GPU."""
    everywhere: int = 0
    """Whether layers are warp-specialised that were not measured to gain."""
    halves: int = -1
    """Whether warp-specialised launches make half of a layer: 0 never, 1 always, −1 large ones."""
    bytes: int = 0
    """Memory for the spectrum of one group of images; 0: as much as the dense engine takes."""


CHANGES: dict[str, int] = {}
"""What measurements and tests set otherwise than the rules do."""


def chosen_tiles(layout: Scheme) -> Tiles:
    """The tiles that were measured to be fastest.

    Programs are small, so that several share a processor, unless there are many targets.
    """
    found = Tiles(pixels=64, warps=8) if layout.batch >= 16 else Tiles()
    return found._replace(**CHANGES)


def concurrent_programs(device: torch.device, warps: int = 8) -> int:
    """Programs that a GPU runs at a time: eight warps take all registers of a processor."""
    processors = _PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * max(1, 8 // warps)


class Cut(NamedTuple):
    """The output fields of one program: these parts, powers of two each."""

    parts: tuple[int, ...]
    programs: int

    @property
    def padded(self) -> int:
        return self.programs * sum(self.parts)

    @staticmethod
    def of(fields: int, programs: int, least: int) -> Cut:
        """For about so many programs: parts are rounded up to powers of two.

        >>> Cut.of(20, 1, 4).parts, Cut.of(28, 1, 4).parts  # not three: 16 + 8 + 4
        ((16, 4), (32,))
        """
        each = least * units(fields, least * programs)
        size = 1 << (each.bit_length() - 1)
        rest = each - size
        parts = (size, rest) if rest else (size,)
        if rest & (rest - 1):
            parts = (power_of_two(each),)
        return Cut(parts, units(fields, sum(parts)))


def _cut(fields: int, layout: Scheme, accumulators: int, least: int) -> Cut:
    """For programs of at most so many accumulators; each takes at least ``least`` fields."""
    most = max(least, accumulators // (2 * layout.batch))
    return Cut.of(fields, units(fields, most), least)


def cuts(fields: int, layout: Scheme) -> Iterator[Cut]:
    """Warp-specialised: all cuts whose sums fit into registers, those of fewest programs first."""
    for programs in range(1, units(fields, FIELDS) + 1):
        found = Cut.of(fields, programs, FIELDS)
        held = 2 * layout.batch * sum(found.parts)
        if held <= _CONSUMER_ACCUMULATORS and 2 * max(found.parts) <= 256:
            yield found


class Tiling(NamedTuple):
    """How a layer, its adjoint or its weight gradient is launched."""

    layout: Scheme
    chosen: Tiles
    layouts: tuple[Scheme, ...]
    """The layer, or its halves, launched one after the other."""
    cut: Cut
    pixels: int
    """Of a program at a time. Warp-specialised ones take one tile of so many after the other."""
    fields: int
    """Input fields of a program at a time."""
    warps: int
    """Of a program, by the registers that they take."""
    stages: tuple[int, ...] = ()
    """Of the copies of each warp-specialised launch. None: it is not warp-specialised."""

    @property
    def warp_specialised(self) -> bool:
        return bool(self.stages)

    @property
    def features(self) -> int:
        """In the sums of a weight gradient."""
        return max(layout.count for layout in self.layouts)

    @property
    def packed(self) -> int:
        """Numbers of the packed gradient for each pixel."""
        return self.cut.padded * 2 * self.layouts[0].batch

    def running(self, device: torch.device) -> int:
        """Programs that run at the same time, for each run of output fields."""
        return max(1, concurrent_programs(device, self.warps) // self.cut.programs)


def convolution_tiling(
    layout: Scheme, out_fields: int, chosen: Tiles, warp_specialised: bool
) -> Tiling:
    """``warp_specialised``: whether such kernels may be used. The layout may still have none."""

    def stages(share: Scheme, cut: Cut) -> int:
        rows = share.batch * (ROWS + 2 * sum(cut.parts))
        return _SHARED // (rows * FIELDS * sum(share.used_pieces) * 2)

    cut = _cut(out_fields, layout, chosen.accumulators, FIELDS)
    plain = Tiling(layout, chosen, (layout,), cut, chosen.pixels, FIELDS, chosen.warps)
    shape = (ROWS, FIELDS)
    return _specialised(plain, out_fields, lambda _: shape, stages) if warp_specialised else plain


def weight_gradient_tiling(
    layout: Scheme, out_fields: int, chosen: Tiles, warp_specialised: bool
) -> Tiling:
    """As `convolution_tiling`."""

    def shape(share: Scheme) -> tuple[int, int]:
        fields = ROWS // min(ROWS, weight_gradient_features(share))
        return 32 * PRODUCERS // fields, fields

    def stages(share: Scheme, cut: Cut) -> int:
        pixels, _ = shape(share)
        if weight_gradient_features(share) > ROWS or pixels < ROWS:
            return 0
        left = _SHARED - 2 * share.batch * pixels * 2 * ROWS  # features have two stages
        return left // (share.batch * 2 * sum(cut.parts) * 2 * ROWS)

    cut = _cut(out_fields, layout, _ACCUMULATORS // 2, _GRADIENT_FIELDS)
    plain = Tiling(layout, chosen, (layout,), cut, ROWS, chosen.gradient_fields, 4)
    return _specialised(plain, out_fields, shape, stages) if warp_specialised else plain


def _specialised(
    plain: Tiling,
    out_fields: int,
    shape: Callable[[Scheme], tuple[int, int]],
    stages: Callable[[Scheme, Cut], int],
) -> Tiling:
    """Warp-specialised launches of so many pixels and fields; plain ones where none fit.

    All targets are made at a time, unless there are so many that a program would hold few output
    fields. Then half of them are, which read half of the derivatives.
    """
    layout, chosen = plain.layout, plain.chosen
    if not chosen.everywhere and layout.batch not in _TARGETS:
        return plain
    ways: list[tuple[Scheme, ...]] = []
    if chosen.halves > 0 or (chosen.halves and layout.batch >= MANY):
        ways += [both] if (both := halves(layout)) else []
    if layout.batch < MANY or chosen.everywhere:
        ways.append((layout,))
    for way in ways:
        if not all(fits(share) for share in way):
            continue
        first = [next((c for c in cuts(out_fields, s) if stages(s, c) > 1), None) for s in way]
        cut = first[0]
        if cut is not None and first == [cut] * len(way):  # what both halves read is cut once
            several = tuple(min(4, stages(share, cut)) for share in way)
            return Tiling(layout, chosen, way, cut, *shape(way[0]), 8, several)
    return plain


class Grid(NamedTuple):
    """The padded grid that holds a spectrum: rows and images share the zeros between them."""

    pitch: int
    """From a row to the next."""
    lines: int
    """Rows of an image."""
    size: int
    """Pixels of all images."""

    @staticmethod
    def of(shape: tuple[int, ...], geometry: Geometry, size: int) -> Grid:
        margins = (geometry.before,) * 2
        (lines, above), (pitch, left) = spans(shape[2:], geometry, size, margins)
        return Grid(pitch, lines, (shape[0] * lines + above) * pitch + left)


def spans(
    lengths: Sequence[int], geometry: Geometry, size: int, margins: Sequence[int]
) -> list[tuple[int, int]]:
    """Along each axis from one row to the next, and the zeros between them that both read."""
    found = []
    for have, wanted, before in zip(lengths, geometry.sizes, margins, strict=True):
        needed = (wanted - 1) * geometry.down + geometry.dilation * (size - 1) + 1
        after = needed - before - ((have - 1) * geometry.up + 1)
        shared = max(0, min(before, after))
        found.append((needed - shared, shared))
    return found


def image_groups(
    x: Like, geometry: Geometry, tiling: Tiling, out_channels: int, adjoint: bool
) -> list[int]:
    """How many images a convolution takes at a time: one number for each group.

    A group's spectrum has the memory that is free, or the part of the output that later groups
    write. Groups are in whole rounds of the programs that run at a time, where they are so large.
    """
    batch, pixels = x.shape[0], geometry.pixels
    each = _spectrum_bytes(x, tiling.layout, geometry)
    written = out_channels * pixels * x.dtype.itemsize
    free = _spare_bytes(x, tiling.layout, out_channels) + (0 if adjoint else x.bytes)
    free = tiling.chosen.bytes or free
    whole = tiling.running(x.device) * tiling.pixels // pixels
    sizes: list[int] = []
    while (left := batch - sum(sizes)) > 0:  # from the last group on, which has the remainder
        over = 0 if sizes else batch % 4
        room = min(max(free, sum(sizes) * written - each), _COUNTED * x.dtype.itemsize)
        several = _multiple(room // each - over, whole) + over
        sizes.append(min(several, left, max(1, _COUNTED * x.dtype.itemsize // each)))
    return sizes[::-1]


def weight_gradient_memory(
    x: Like, geometry: Geometry, tiling: Tiling, out_channels: int
) -> tuple[int, int]:
    """How many programs share the pixels of a gradient to the weights, and images at a time.

    Each of these programs has sums of its own, which take a quarter of the memory that is free;
    half of it, where programs would not fill the GPU.
    """
    layout, chosen, cut = tiling.layout, tiling.chosen, tiling.cut
    batch, pixels = x.shape[0], geometry.pixels
    in_padded = rounded_up(x.shape[1] // layout.plan.analysis.shape[1], FIELDS)
    programs = in_padded // tiling.fields * cut.programs
    sums = 4 * in_padded * tiling.features * cut.padded * 2 * len(tiling.layouts)
    running = concurrent_programs(x.device, tiling.warps)
    free = x.bytes + _spare_bytes(x, layout, out_channels)
    most = max(1, free // 4 // sums)
    if programs * most < running:
        most = max(1, free // 2 // sums)
    # In whole rounds, of which each program takes a share of the pixels.
    several = range(1, min(most, running) + 1)
    splits = min(several, key=lambda n: (units(programs * n, running) / n, n))
    splits = min(chosen.splits or splits, units(batch * pixels, tiling.pixels))
    free = min(chosen.bytes or free - sums * splits, _COUNTED * x.dtype.itemsize)
    each = _spectrum_bytes(x, layout, geometry) + tiling.packed * pixels * x.dtype.itemsize
    images = rounded_up(units(batch, units(batch, _multiple(free // each))), 4)
    return splits, min(images, max(1, _COUNTED * x.dtype.itemsize // each))


def _spectrum_bytes(x: Like, layout: Scheme, geometry: Geometry) -> int:
    """Of one image, with its share of what images have in common."""
    grid = Grid.of((1, *x.shape[1:]), geometry, layout.plan.basis.size)
    fields = rounded_up(x.shape[1] // layout.plan.analysis.shape[1], FIELDS)
    return grid.size * fields * layout.chunks * layout.width * x.dtype.itemsize


def _spare_bytes(x: Like, layout: Scheme, out_channels: int) -> int:
    """What the dense engine's filters and the gradient to them take, less what ours do."""
    plan, pairs = layout.plan, out_channels * x.shape[1]
    dense = 2 * pairs * plan.basis.size**2 * x.dtype.itemsize
    fields = pairs // plan.analysis.shape[1] ** 2
    ours = plan.weights * 2 * 4 + 2 * layout.batch * layout.inner * x.dtype.itemsize
    return max(_LEAST, dense - fields * ours)


def _multiple(images: int, whole: int = 4) -> int:
    """Groups are multiples of four images: less aligned addresses would need other kernels.

    And of ``whole``, where there are as many.
    """
    whole = whole // 4 * 4
    return images // whole * whole if whole and images >= whole else max(4, images // 4 * 4)
