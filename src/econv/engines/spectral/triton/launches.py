"""Launches of the Triton kernels: from shapes to programs and memory.

Memory. For the backward pass the input and the spectral weights are kept. Where the input is
activated at the load, the input before that and three numbers of each field are kept. While an
operator runs there is the spectrum of a group of images on the padded grid. A training step takes
no more memory than the dense engine's, whose peak is output, gradient to the input, and twice its
filter bank:

- the adjoint may use as much as those filters take less our own weights, or 4.5 MiB;
- a layer may use as much as its input takes in addition: later the gradient to it lies there;
- the gradient to the weights, which runs before that to the input, may use the same.

A spectrum that needs more than that uses the part of the output that is not yet written: a group of
images is about as large as all that come after it.

Time. What depends on shapes alone is worked out once (`ConvolutionRun`, `WeightGradientRun`), down
to the compiled kernel of each launch and the addresses of its operands (`Steps`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from econv.engines.problem import Geometry
from econv.engines.spectral.hopper.kernels import Copies
from econv.engines.spectral.hopper.launches import (
    WarpSpecialised,
    WarpSpecialisedWeightGradient,
    as_words,
)
from econv.engines.spectral.hopper.schedule import ROWS, gains
from econv.engines.spectral.triton.kernels import (
    INTERPRETED,
    OVERALL,
    activation_backward,
    arrange,
    arrange_rows,
    convolution_kernels,
    field_statistics,
    largest_activated,
    packed_row_kernels,
    reduce,
    statistics_backward,
    to_affine,
    weight_gradient_kernels,
)
from econv.engines.spectral.triton.kernels import largest as largest_kernel
from econv.engines.spectral.triton.scheme import FIELDS, Scheme, power_of_two, scheme
from econv.engines.spectral.triton.source import FIRST, HEADROOM, RUN
from econv.engines.spectral.triton.steps import Launch, Part, Steps
from econv.engines.spectral.triton.tiles import (
    INTERNAL,
    Like,
    Tiles,
    at_a_time,
    chosen_tiles,
    cut,
    overridden,
)
from econv.plan import SpectralPlan, plan_named

__all__ = [
    "OVERALL",
    "BackwardRun",
    "ConvolutionRun",
    "Like",
    "WeightGradientRun",
    "backward_run",
    "convolution_run",
    "covers",
    "largest_activated_steps",
    "largest_steps",
    "overridden",
    "precision_of",
    "statistics_steps",
    "warp_specialised",
    "weight_gradient_run",
]


def covers(dtype: torch.dtype, size: int, geometry: Geometry, shape: tuple[int, ...]) -> bool:
    """Whether the kernels can run a layer from regular fields to regular ones, both ways.

    ``size`` is that of the stencils, ``shape`` that of the input.
    """
    back = geometry.transposed(size, *shape[2:])
    return dtype in INTERNAL and geometry.before >= 0 and back.before >= 0


@dataclass(frozen=True)
class _Grid:
    """The padded grid that holds a spectrum: rows and images share the zeros between them."""

    pitch: int
    """From a row to the next."""
    lines: int
    """Rows of an image."""
    size: int

    @staticmethod
    def of(shape: tuple[int, ...], geometry: Geometry, size: int) -> _Grid:
        reach = geometry.dilation * (size - 1) + 1
        lengths, shared = [], []
        for have, wanted in zip(shape[2:], (geometry.height, geometry.width), strict=True):
            needed = (wanted - 1) * geometry.down + reach
            after = needed - geometry.before - ((have - 1) * geometry.up + 1)
            shared.append(max(0, min(geometry.before, after)))
            lengths.append(needed - shared[-1])
        lines, pitch = lengths
        size = (shape[0] * lines + shared[0]) * pitch + shared[1]
        return _Grid(pitch, lines, size)


class _Constants(NamedTuple):
    entries: Tensor
    signs: Tensor
    adjoint_entries: Tensor
    adjoint_signs: Tensor
    pieces: Tensor
    owners: Tensor
    owner_signs: Tensor


@lru_cache(maxsize=512)
def _constants(layout: Scheme, device: torch.device, warp_specialised: bool) -> _Constants:
    (entries, signs), (adjoint, more) = layout.entries, layout.adjoint_entries
    owners, factors = layout.owners
    if warp_specialised:
        gain = gains(layout)
        signs, more = signs * gain, more * gain
        factors = np.where(owners >= 0, factors * gain[owners], factors).astype(np.float32)
        # Their sums lie without padding.
        offset = 2 * layout.unpadded.ravel()[owners // 2] + owners % 2
        owners = np.where(owners >= 0, offset, owners).astype(np.int32)
    arrays = (entries, signs, adjoint, more, layout.piece_of, owners, factors)
    with torch.inference_mode(False):
        made = [torch.tensor(array, device=device) for array in arrays]
    return _Constants(*made)


def _scheme(plan: SpectralPlan, dtype: torch.dtype) -> Scheme:
    return scheme(plan, 16 // INTERNAL[dtype].itemsize)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that some kernel fills: every element, or nobody reads it."""
    return torch.empty(shape, dtype=dtype, device=device)


def _f16x2(dtype: torch.dtype) -> bool:
    return dtype == torch.float16 and not INTERPRETED


def precision_of(dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return "tf32"  # says nothing about products of float16
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # asked for in torch's newer words
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return "tf32" if allowed else "tf32x3"


class _Analysis:
    """From images to their spectrum, ``[field chunks, slot chunks, size, FIELDS, width]``."""

    def __init__(
        self,
        analyse: tuple[Any, Any],
        x: Like,
        layout: Scheme,
        geometry: Geometry,
        each: int,
        activated: bool,
        several: int = FIELDS,
    ) -> None:
        """``each``: every image is scaled by a number of its own (1), or all by one (0).

        ``several`` fields lie side by side.
        """
        batch, channels, height, width = x.shape
        fields = channels // layout.plan.analysis.shape[1]
        self.grid = _Grid.of(x.shape, geometry, layout.plan.basis.size)
        chunks = triton.cdiv(fields, FIELDS) * (FIELDS // several)
        self.shape = (chunks, layout.chunks, self.grid.size, several, layout.width)
        block = 64 * FIELDS // several
        grid = (self.grid.pitch, self.grid.lines, self.grid.size)
        numbers = (batch, fields, height, width, geometry.up, geometry.before, *grid, each)
        self.run = Launch(
            analyse[activated],
            (triton.cdiv(self.grid.size, block), chunks),
            (*numbers, *x.strides),
            BP=block,
            num_warps=4,
        )

        self.numbers = math.prod(self.shape)

    def within(self, memory: int, offset: int, internal: torch.dtype) -> Part:
        """The spectrum, from some number on in some memory."""

        def shown(tensor: Tensor) -> Tensor:
            flat = tensor.as_strided((tensor.numel(),), (1,)).view(internal)
            return flat[offset : offset + self.numbers].view(self.shape)

        return Part(memory, offset * internal.itemsize, shown)


def _in_words(spectrum: Part) -> Part:
    """A spectrum as warp-specialised kernels read it."""
    return spectrum._replace(shown=lambda memory: as_words(spectrum.shown(memory)))


def _images(memory: int, x: Like, first: int, images: int) -> Part:
    """Some of the images ``x``."""
    byte = first * x.strides[0] * x.dtype.itemsize
    return Part(memory, byte, lambda memory: memory[first : first + images])


def _scales(memory: int, first: int) -> Part:
    """The largest numbers of images, from one of them on."""
    return Part(memory, 4 * (OVERALL + first), lambda memory: memory[OVERALL + first :])


def _spectrum_bytes(x: Like, layout: Scheme, geometry: Geometry) -> int:
    """Of one image, with its share of what images have in common."""
    grid = _Grid.of((1, *x.shape[1:]), geometry, layout.plan.basis.size)
    fields = FIELDS * triton.cdiv(x.shape[1] // layout.plan.analysis.shape[1], FIELDS)
    return grid.size * fields * layout.chunks * layout.width * x.dtype.itemsize


def _addressed(x: Like) -> int:
    """The most bytes that a spectrum may take: kernels count its numbers in 32 bits."""
    return (2**31 - 1) * x.dtype.itemsize


def _multiple(images: int, whole: int = 4) -> int:
    """Groups are multiples of four images: less aligned addresses would need other kernels.

    And of ``whole``, where there are as many: as many as the GPU runs at a time.
    """
    whole = whole // 4 * 4
    return images // whole * whole if whole and images >= whole else max(4, images // 4 * 4)


def _spare_bytes(x: Like, layout: Scheme, out_channels: int) -> int:
    """What the dense engine's filters and the gradient to them take, less what ours do."""
    plan, pairs = layout.plan, out_channels * x.shape[1]
    dense = 2 * pairs * plan.basis.size**2 * x.dtype.itemsize
    fields = pairs // plan.analysis.shape[1] ** 2
    ours = plan.weights * 2 * 4 + 2 * layout.batch * layout.inner * x.dtype.itemsize
    return max(_LEAST, dense - fields * ours)


_LEAST = 9 << 19
"""What a library of convolutions takes for small layers, in bytes."""


def _numbers(pixels: int, geometry: Geometry, grid: _Grid) -> tuple[int, ...]:
    """Where pixels lie: what the kernels that read a spectrum take first."""
    shape = (pixels, geometry.height, geometry.width)
    steps = (grid.pitch, grid.pitch * grid.lines, grid.size)
    return (*shape, geometry.down, geometry.dilation, *steps)


class _Order(NamedTuple):
    """The order in which a launch reads weights."""

    arrange: Launch
    constants: tuple[Tensor, ...]
    """That say where they come from."""
    shape: tuple[int, ...]
    copies: Copies | None
    """How warp-specialised kernels copy them."""


def _parts(first: int, count: int) -> list[Part]:
    return [Part(memory) for memory in range(first, first + count)]


class _Group(NamedTuple):
    """Images that are convolved together."""

    first: int
    images: int
    offset: int
    """Where in the output the spectrum lies; −1: in memory of its own."""
    analysis: _Analysis
    forward: list[Launch]
    """Several, where each makes a part of the layer."""


class ConvolutionRun:
    """A layer or its adjoint on images of one shape."""

    def __init__(
        self,
        x: Like,
        plan: str,
        adjoint: bool,
        geometry: Geometry,
        out_fields: int,
        channels_last: bool,
        chosen: Tiles | None,
        precision: str,
        activated: bool = False,
        warp_specialised: bool = True,
    ) -> None:
        """``warp_specialised``: whether those kernels are used, where they fit and gain."""
        layout = _scheme(plan_named(plan), x.dtype)
        channels = layout.plan.synthesis.shape[0]
        batch, in_fields = x.shape[0], x.shape[1] // channels
        self.x, self.internal = x, INTERNAL[x.dtype]
        self.shape = (batch, out_fields * channels, geometry.height, geometry.width)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.groups: list[_Group] = []
        if not math.prod(self.shape):
            return
        chosen = chosen or chosen_tiles(layout)
        self.specialised: list[WarpSpecialised] = []
        if channels_last and warp_specialised:
            self.specialised = WarpSpecialised.of(x, layout, chosen, out_fields)
        if not self.specialised:
            self.cut = cut(out_fields, layout, chosen.warps, chosen.accumulators, FIELDS)
            running = at_a_time(x.device, chosen.warps) // self.cut.programs
            at_once = running * chosen.pixels
        else:
            self.cut = self.specialised[0].cut
            at_once = self.specialised[0].running * ROWS
        self._arrange(layout, in_fields, out_fields, adjoint)
        sizes = self._sizes(layout, geometry, chosen.bytes, at_once, adjoint)
        kernels = convolution_kernels(
            layout, self.cut.parts, self.cut.copies, _f16x2(self.internal), channels_last
        )
        strides = torch.empty(self.shape, device="meta", memory_format=self.format).stride()
        total, first = math.prod(self.shape), 0
        self.own = 0  # numbers of the memory that is no part of the output
        made: dict[int, tuple[_Analysis, list[Launch]]] = {}
        for images in sizes:
            if images not in made:
                like = x._replace(shape=(images, *x.shape[1:]))
                analysis = _Analysis(kernels.analyse, like, layout, geometry, 1, activated)
                pixels = images * geometry.height * geometry.width
                numbers = _numbers(pixels, geometry, analysis.grid)
                if self.specialised:
                    last = (analysis.shape[0], out_fields, strides[3])
                    made[images] = (
                        analysis,
                        [one.launch(numbers, *last) for one in self.specialised],
                    )
                else:
                    launch = Launch(
                        kernels.forward,
                        (triton.cdiv(pixels, chosen.pixels), self.cut.programs),
                        (*numbers, analysis.shape[0], self.cut.padded, out_fields, *strides),
                        BP=chosen.pixels,
                        PRECISION=precision,
                        num_warps=chosen.warps,
                        num_stages=chosen.stages,
                    )
                    made[images] = (analysis, [launch])
            written = (first + images) * total // batch
            offset = (total - made[images][0].numbers) // 64 * 64
            if offset < written:
                offset = -1
                self.own = max(self.own, made[images][0].numbers)
            self.groups.append(_Group(first, images, offset, *made[images]))
            first += images
        y = Like(self.shape, strides, x.dtype, x.device)
        self.constants = [tensor for order in self.orders for tensor in order.constants]
        self.steps = Steps(self._steps(y, activated))

    def _steps(self, y: Like, activated: bool) -> Iterator[tuple[Launch, list[Part]]]:
        """What is launched, on the memory that `__call__` names in this order."""
        x, x_largest, weights, w_largest, *affine, out, own = _parts(0, 6 + activated)
        first = own.memory + 1
        arranged = _parts(first, len(self.orders))
        constants = iter(_parts(first + len(self.orders), len(self.constants)))
        factors = []
        for order, into in zip(self.orders, arranged, strict=True):
            known = [next(constants) for _ in order.constants]
            yield order.arrange, [weights, *known, w_largest, into]
            factors.append(into._replace(copied=order.copies))
        for group in self.groups:
            memory, offset = (own, 0) if group.offset < 0 else (out, group.offset)
            spectrum = group.analysis.within(memory.memory, offset, self.internal)
            scales = _scales(x_largest.memory, group.first)
            images = _images(x.memory, self.x, group.first, group.images)
            yield group.analysis.run, [images, *affine, scales, spectrum]
            last = [_images(out.memory, y, group.first, group.images), scales, w_largest]
            spectrum = _in_words(spectrum) if self.specialised else spectrum
            for launch, factor in zip(group.forward, factors, strict=True):
                yield launch, [spectrum, factor, *last]

    def _arrange(self, layout: Scheme, in_fields: int, out_fields: int, adjoint: bool) -> None:
        """How weights come into the order in which each launch reads them."""
        if self.specialised:
            self.orders = [
                self._order(one.layout, one, in_fields, out_fields, adjoint)
                for one in self.specialised
            ]
        else:
            self.orders = [self._order(layout, None, in_fields, out_fields, adjoint)]

    def _order(
        self,
        layout: Scheme,
        special: WarpSpecialised | None,
        in_fields: int,
        out_fields: int,
        adjoint: bool,
    ) -> _Order:
        found, constants = self.cut, _constants(layout, self.x.device, special is not None)
        order = (constants.entries, constants.signs, constants.pieces)
        strides = (in_fields * layout.plan.weights, layout.plan.weights)
        if adjoint:
            order = (*constants[2:4], constants.pieces)
            strides = (layout.plan.weights, out_fields * layout.plan.weights)
        in_padded = FIELDS * triton.cdiv(in_fields, FIELDS)
        arranged = (in_padded, layout.batch * layout.inner, found.padded, 2)
        total = math.prod(arranged)
        sizes: tuple[int, ...] = (layout.batch, layout.inner)
        copies = None
        if special is None:
            kernel, sizes = arrange, (found.padded, *sizes, found.copies)
        else:
            length = layout.inner // layout.chunks
            kernel, sizes = arrange_rows, (found.programs, *sizes, length, in_padded // FIELDS)
            copies = special.copies(arranged)
        launch = Launch(
            kernel,
            (triton.cdiv(total, 1024),),
            (out_fields, in_fields, *strides, *sizes, sum(found.parts), found.parts[0], total),
            BF=FIELDS,
            BLOCK=1024,
            HEADROOM=HEADROOM,
            num_warps=8,
        )
        return _Order(launch, order, arranged, copies)

    def _sizes(
        self, layout: Scheme, geometry: Geometry, most: int, at_once: int, adjoint: bool
    ) -> list[int]:
        """How many images run together, the first first: see the module's memory.

        ``most`` bytes, if that is not 0, and pixels that the GPU takes ``at_once``.
        """
        batch = self.shape[0]
        each = _spectrum_bytes(self.x, layout, geometry)
        written = math.prod(self.shape[1:]) * self.x.dtype.itemsize
        free = _spare_bytes(self.x, layout, self.shape[1])
        if not adjoint:
            free += batch * self.x.image_bytes
        free = most or free
        whole = at_once // (geometry.height * geometry.width)
        sizes: list[int] = []
        while (left := batch - sum(sizes)) > 0:  # from the last one on, which has what is over
            over = 0 if sizes else batch % 4
            room = min(max(free, sum(sizes) * written - each), _addressed(self.x))
            sizes.append(min(_multiple(room // each - over, whole) + over, left))
        return sizes[::-1]

    def __call__(
        self, x: Tensor, x_largest: Tensor, weights: Tensor, w_largest: Tensor, *affine: Tensor
    ) -> Tensor:
        device = x.device
        y = torch.empty(self.shape, dtype=x.dtype, device=device, memory_format=self.format)
        if self.groups:
            own = _empty((self.own,), self.internal, device)
            arranged = [_empty(order.shape, self.internal, device) for order in self.orders]
            memory = (x, x_largest, weights, w_largest, *affine, y, own, *arranged)
            self.steps(*memory, *self.constants)
        return y


class _Share(NamedTuple):
    """What is made of the images of a group by the launches of one layout."""

    pack: Launch
    weight_gradients: list[Launch]


class _WeightGradientGroup(NamedTuple):
    """Images whose gradients to the weights are added up together."""

    first: int
    images: int
    analysis: _Analysis
    shares: list[_Share]


class _Sums(NamedTuple):
    """How the gradients to the weights of one layout are added up."""

    copies: Copies | None
    """How warp-specialised kernels copy the packed gradient."""
    owners: tuple[Tensor, ...]
    reduce: Launch


class WeightGradientRun:
    """The gradient to the weights on images of one shape."""

    def __init__(
        self,
        x: Like,
        g: Like,
        plan: str,
        geometry: Geometry,
        chosen: Tiles | None,
        precision: str,
        activated: bool = False,
        warp_specialised: bool = True,
    ) -> None:
        """``warp_specialised``: whether those kernels are used, where they fit and gain."""
        layout = _scheme(plan_named(plan), x.dtype)
        channels, weights = layout.plan.analysis.shape[1], layout.plan.weights
        in_fields, out_fields = x.shape[1] // channels, g.shape[1] // channels
        self.shape, self.internal = (out_fields, in_fields, weights), INTERNAL[x.dtype]
        self.groups: list[_WeightGradientGroup] = []
        if not math.prod(x.shape) * math.prod(g.shape):
            return
        chosen = chosen or chosen_tiles(layout)
        self.specialised: list[WarpSpecialisedWeightGradient] = []
        if warp_specialised:
            self.specialised = WarpSpecialisedWeightGradient.of(x, layout, chosen, out_fields)
        # Those of one launch after the other: of equal shapes.
        layouts = [one.layout for one in self.specialised] or [layout]
        special = self.specialised[0] if self.specialised else None
        if special is None:
            found = cut(
                out_fields, layout, chosen.gradient_warps, chosen.gradient_accumulators, RUN
            )
            at_once, fields, block = chosen.gradient_pixels, chosen.gradient_fields, RUN
        else:
            found, at_once, fields, block = special.cut, special.pixels, special.fields, FIELDS
        batch, pixels = x.shape[0], geometry.height * geometry.width
        in_padded = FIELDS * triton.cdiv(in_fields, FIELDS)
        programs = in_padded // fields * found.programs
        count = layout.batch * layout.inner
        if special is not None:
            count = max(one.count for one in layouts)
        one = (in_padded, count, found.padded, 2)
        free = batch * x.image_bytes + _spare_bytes(x, layout, g.shape[1])
        running = at_a_time(x.device, chosen.gradient_warps) if special is None else special.running
        sums = 4 * math.prod(one) * len(layouts)
        most = max(1, free // 4 // sums)
        if special is not None and programs * most < running:  # half of the memory that is free
            most = max(1, free // 2 // sums)
        if special is None:
            # All programs run at the same time: a few more would take as long again.
            splits = max(1, min(running // programs, most))
        else:
            splits = special.splits(programs, most)
        splits = min(chosen.splits or splits, triton.cdiv(batch * pixels, at_once))
        self.partial = (splits, *one)  # the shape of the sums of each
        free = min(chosen.bytes or free - 4 * math.prod(self.partial) * len(layouts), _addressed(x))
        packed = found.padded * 2 * layouts[0].batch  # numbers for each pixel
        each = _spectrum_bytes(x, layout, geometry) + packed * pixels * x.dtype.itemsize
        several = triton.cdiv(batch, _multiple(free // each))
        most = 4 * triton.cdiv(batch, 4 * several)
        if special is None:
            kernels = weight_gradient_kernels(
                layout, found.parts, found.copies, at_once, _f16x2(self.internal)
            )
            analyse, pack_kernels, side_by_side = kernels.analyse, [kernels.pack], FIELDS
            tile = {"TILE": at_once}
        else:
            made = [packed_row_kernels(half, found.parts, fields) for half in layouts]
            analyse, pack_kernels = made[0][0], [pack for _, pack in made]
            tile, side_by_side = {}, fields
        for first in range(0, batch, most):
            images = min(most, batch - first)
            like = x._replace(shape=(images, *x.shape[1:]))
            analysis = _Analysis(analyse, like, layout, geometry, 0, activated, side_by_side)
            tiles_ = triton.cdiv(images * pixels, at_once)
            run = min(ROWS, at_once)
            shape = (geometry.height, geometry.width)
            numbers = _numbers(images * pixels, geometry, analysis.grid)
            shares = []
            for number, pack_kernel in enumerate(pack_kernels):
                pack = Launch(
                    pack_kernel,
                    (tiles_ * (at_once // run), found.padded // block),
                    (images * pixels, out_fields, *shape, found.programs, *g.strides),
                    **tile,
                    BP=run,
                    num_warps=4,
                )
                if special is not None:
                    again = len(self.groups)
                    last = (in_padded, count, splits, again)
                    weight_gradients = self.specialised[number].launches(numbers, *last)
                else:
                    weight_gradient = Launch(
                        kernels.weight_gradient,
                        (in_padded // fields, found.programs, splits),
                        (*numbers, tiles_, in_padded, found.padded, len(self.groups)),
                        BF=fields,
                        PRECISION=precision,
                        num_warps=chosen.gradient_warps,
                    )
                    weight_gradients = [weight_gradient]
                shares.append(_Share(pack, weight_gradients))
            self.groups.append(_WeightGradientGroup(first, images, analysis, shares))
        tiles_ = triton.cdiv(self.groups[0].images * pixels, at_once)
        self.packed = (tiles_, packed * at_once)
        self.sums: list[_Sums] = []
        outs = min(16, triton.next_power_of_2(out_fields))
        together = min(16, triton.next_power_of_2(splits))
        several = max(16, 2048 // (outs * together))
        for number, each_layout in enumerate(layouts):
            constants = _constants(each_layout, x.device, bool(self.specialised))
            launch = Launch(
                reduce,
                # The second has a limit of 65,535.
                (in_fields * triton.cdiv(out_fields, outs), triton.cdiv(weights, several)),
                (out_fields, in_fields, weights, in_padded, found.padded, count, splits),
                MOST=constants.owners.shape[1],
                SPLITS=together,
                BN=several,
                BO=outs,
                num_warps=4,
            )
            copies = self.specialised[number].copies(self.packed) if self.specialised else None
            owners = (constants.owners, constants.owner_signs)
            self.sums.append(_Sums(copies, owners, launch))
        self.constants = [tensor for sums in self.sums for tensor in sums.owners]
        self.steps = Steps(self._steps(x, g, activated))

    def _steps(self, x: Like, g: Like, activated: bool) -> Iterator[tuple[Launch, list[Part]]]:
        """What is launched, on the memory that `__call__` names in this order."""
        ours, x_largest, theirs, g_largest, *affine = _parts(0, 4 + activated)
        memory, fragments, result = _parts(4 + activated, 3)
        first, count = result.memory + 1, len(self.sums)
        partials = _parts(first, count)
        constants = iter(_parts(first + count, len(self.constants)))
        for group in self.groups:
            spectrum = group.analysis.within(memory.memory, 0, self.internal)
            images = _images(ours.memory, x, group.first, group.images)
            yield group.analysis.run, [images, *affine, x_largest, spectrum]
            spectrum = _in_words(spectrum) if self.specialised else spectrum
            for share, sums, partial in zip(group.shares, self.sums, partials, strict=True):
                packed = _images(theirs.memory, g, group.first, group.images)
                yield share.pack, [packed, g_largest, fragments]
                factor = fragments._replace(copied=sums.copies)
                for launch in share.weight_gradients:
                    yield launch, [spectrum, factor, partial, x_largest, g_largest]
        for sums, partial in zip(self.sums, partials, strict=True):
            yield sums.reduce, [partial, *(next(constants) for _ in sums.owners), result]

    def __call__(
        self, x: Tensor, x_largest: Tensor, g: Tensor, g_largest: Tensor, *affine: Tensor
    ) -> Tensor:
        device = x.device
        if not self.groups:
            return torch.zeros(self.shape, dtype=torch.float32, device=device)
        # Images add up: they are scaled alike, by the largest number of all.
        memory = _empty((self.groups[0].analysis.numbers,), self.internal, device)
        fragments = _empty(self.packed, self.internal, device)
        result = _empty(self.shape, torch.float32, device)
        partials = [_empty(self.partial, torch.float32, device) for _ in self.sums]
        given = (x, x_largest, g, g_largest, *affine)
        self.steps(*given, memory, fragments, result, *partials, *self.constants)
        return result


def warp_specialised(
    plan: SpectralPlan, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether any launch of a layer between so many fields, or of its gradients, would be."""
    layout, like = _scheme(plan, dtype), Like((), (), dtype, device)
    chosen = chosen_tiles(layout)
    found = [WarpSpecialised.of(like, layout, chosen, n) for n in (outputs, inputs)]
    return any(found) or bool(WarpSpecialisedWeightGradient.of(like, layout, chosen, outputs))


convolution_run = lru_cache(maxsize=1024)(ConvolutionRun)
weight_gradient_run = lru_cache(maxsize=1024)(WeightGradientRun)


@lru_cache(maxsize=1024)
def largest_steps(x: Like) -> Steps | None:
    """How the largest numbers are found; nothing where images do not lie in one piece.

    The steps take the images, and zeros in float32.
    """
    images, *lengths = x.shape
    numbers, piece = math.prod(lengths), 1
    for stride, length in sorted(zip(x.strides[1:], lengths, strict=True)):
        if length > 1 and stride != piece:
            return None
        piece *= length
    block = 2048
    # As many as keep memory busy, if that leaves enough programs.
    blocks = 16 if images * numbers >= 16 * block * 8 * at_a_time(x.device, 8) else 4
    launch = Launch(
        largest_kernel,
        (images, triton.cdiv(numbers, block * blocks)),  # the second has a limit of 65,535
        (numbers, x.strides[0]),
        BLOCK=block,
        BLOCKS=blocks,
        OVERALL=OVERALL,
        num_warps=4,
    )
    return Steps([(launch, [Part(0), _as_bits(1)])])


def _as_bits(memory: int) -> Part:
    """Numbers that are compared by their bits."""
    return Part(memory, 0, lambda memory: memory.view(torch.int32))


class _Rows(NamedTuple):
    """How the kernels that go through images field by field are cut."""

    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def _rows(x: Like, fields: int) -> _Rows | None:
    """Nothing where images lie in neither of torch's two layouts."""
    images, channels, height, width = x.shape
    pixels = height * width
    layouts = {pixels: (1, width * channels, channels), 1: (pixels, width, 1)}
    for rows, strides in layouts.items():
        axes = zip(x.shape[1:], x.strides[1:], strides, strict=True)
        if any(length > 1 and have != wanted for length, have, wanted in axes):
            continue
        inner = channels // fields * pixels // rows
        block = 2048  # numbers at a time
        inners = min(block, power_of_two(inner))
        several = 1 if rows == 1 else min(FIELDS, power_of_two(fields))
        at_once = min(max(1, block // (inners * several)), power_of_two(rows))
        blocks = min(4, triton.cdiv(rows, at_once))
        programs = triton.cdiv(rows, at_once * blocks)
        grid = (images * programs, triton.cdiv(fields, several), triton.cdiv(inner, inners))
        sizes = {"INNER": inner, "BR": at_once, "BF": several, "BI": inners, "BLOCKS": blocks}
        numbers = (rows, fields, programs, x.strides[0])
        return _Rows(grid, numbers, {**sizes, "FIRST": FIRST})
    return None


def _by_rows(kernel: Any, rows: _Rows, *numbers: int, **constants: Any) -> Launch:
    more = {**rows.constants, **constants}
    return Launch(kernel, rows.grid, (*rows.numbers, *numbers), **more, num_warps=4)


@lru_cache(maxsize=1024)
def largest_activated_steps(x: Like, fields: int) -> Steps | None:
    """`largest_steps` of an input that is activated, by numbers that come second."""
    rows = _rows(x, fields)
    if rows is None:
        return None
    launch = _by_rows(largest_activated, rows, OVERALL=OVERALL)
    return Steps([(launch, [Part(0), Part(1), _as_bits(2)])])


class BackwardRun:
    """What follows the gradient to an activated input, where that lies in one piece."""

    def __init__(self, x: Like, rows: _Rows, fields: int) -> None:
        self.x, self.numbers, self.fields = x, math.prod(x.shape), fields
        programs = rows.grid[0] * rows.grid[2]
        self.sums = (programs, 2, fields)
        g, ours, affine, to_x, sums, found = _parts(0, 6)
        add_up = Launch(
            to_affine,
            (triton.cdiv(fields, FIELDS),),
            (programs, fields),
            BF=FIELDS,
            BLOCK=min(512, triton.next_power_of_2(programs)),
            num_warps=4,
        )
        differentiate = _by_rows(activation_backward, rows)
        self._activation = Steps(
            [(differentiate, [g, ours, affine, to_x, sums]), (add_up, [sums, affine, found])]
        )
        through = _by_rows(statistics_backward, rows, self.numbers // fields)
        self._statistics = Steps([(through, _parts(0, 5))])

    def _like_x(self) -> Tensor:
        flat = _empty((self.numbers,), self.x.dtype, self.x.device)
        return flat.as_strided(self.x.shape, self.x.strides)

    def activation(self, g: Tensor, x: Tensor, affine: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients to x, which all images lie as, and to ``affine``."""
        to_x = self._like_x()
        sums = _empty(self.sums, torch.float32, x.device)
        found = _empty((3, self.fields), torch.float32, x.device)
        self._activation(g, x, affine, to_x, sums, found)
        return to_x, found

    def statistics(self, g: Tensor, x: Tensor, affine: Tensor, to_affine: Tensor) -> Tensor:
        """The gradient g to x with what comes through its statistics, `field_statistics`."""
        out = self._like_x()
        self._statistics(g, x, affine, to_affine, out)
        return out


@lru_cache(maxsize=1024)
def backward_run(x: Like, fields: int) -> BackwardRun | None:
    """Nothing where images do not lie one after the other in one of torch's two layouts."""
    rows = _rows(x, fields)
    empty = not math.prod(x.shape)
    if rows is None or empty or (x.shape[0] > 1 and x.strides[0] != math.prod(x.shape[1:])):
        return None
    return BackwardRun(x, rows, fields)


@lru_cache(maxsize=1024)
def statistics_steps(
    x: Like,
    fields: int,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    running: tuple[torch.dtype, torch.dtype] | None,
    share: float | torch.dtype,
    eps: float,
) -> Steps:
    """How the numbers of a norm are found; ``share`` is a dtype where it lies in memory.

    ``running`` are the dtypes of the running mean and variance: other ones are another kernel.

    The steps take means and inverse deviations of channels, weight, bias, running mean and
    variance, share, and the result; any tensor stands for those that are not there.
    """
    order, count = x.shape[1] // fields, math.prod(x.shape) // fields
    momentum = None if isinstance(share, torch.dtype) else share
    launch = Launch(
        field_statistics,
        (triton.cdiv(fields, FIELDS),),
        (fields, order, momentum or 0.0, count / (count - 1), eps),
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        RUNNING=running is not None,
        SHARE=momentum is None,
        BF=FIELDS,
        BE=power_of_two(order),
        num_warps=1,
    )
    return Steps([(launch, _parts(0, 8))])
