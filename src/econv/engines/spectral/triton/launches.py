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
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from econv.engines.problem import Geometry
from econv.engines.spectral.hopper import kernels as hopper
from econv.engines.spectral.hopper.schedule import PRODUCERS, ROWS, gains
from econv.engines.spectral.tiling import (
    Grid,
    chosen_tiles,
    convolution_tiling,
    image_groups,
    weight_gradient_memory,
    weight_gradient_tiling,
)
from econv.engines.spectral.triton import kernels
from econv.engines.spectral.triton.kernels import OVERALL
from econv.engines.spectral.triton.scheme import FIELDS, HEADROOM, Scheme, scheme
from econv.engines.spectral.triton.source import convolution_source, weight_gradient_source
from econv.gpu import passes
from econv.gpu.devices import tf32_allowed
from econv.gpu.launch import Job, Launch, launch_all
from econv.gpu.sizes import Like, power_of_two, rounded_up, units
from econv.plan import plan_named

_WARPS: dict[str, Any] = {"PRODUCERS": PRODUCERS, "REGISTERS": 128, "num_warps": 4}
"""Of a warp-specialised program: four multiply. With more registers of a producer thread, they
would wait for every product."""


def precision_of(dtype: torch.dtype) -> str:
    exact = dtype == torch.float32 and not tf32_allowed()
    return "tf32x3" if exact else "tf32"  # which says nothing about products of float16


@lru_cache(maxsize=512)
def _constants(layout: Scheme, device: torch.device, warp_specialised: bool) -> list[Tensor]:
    """Entries and signs, those of the adjoint, pieces, owners with their signs, and numbers."""
    (entries, signs), (adjoint, more) = layout.entries, layout.adjoint_entries
    owners, factors = layout.owners
    if warp_specialised:
        gain = gains(layout)
        signs, more = signs * gain, more * gain
        factors = np.where(owners >= 0, factors * gain[owners], factors).astype(np.float32)
    # Sums have no padding.
    numbers = layout.unpadded.ravel().astype(np.int32)
    owners = np.where(owners >= 0, 2 * numbers[owners // 2] + owners % 2, owners).astype(np.int32)
    arrays = (entries, signs, adjoint, more, layout.piece_of, owners, factors, numbers)
    with torch.inference_mode(False):
        return [torch.tensor(array, device=device) for array in arrays]


def internal(dtype: torch.dtype) -> torch.dtype:
    """What the kernels compute in, for inputs of a dtype."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def _internal(dtype: torch.dtype, plan: str) -> tuple[torch.dtype, Scheme]:
    """That, and how they lay a plan out."""
    found = internal(dtype)
    return found, scheme(plan_named(plan), 16 // found.itemsize)


def _f16x2(dtype: torch.dtype) -> bool:
    return dtype == torch.float16 and not kernels.INTERPRETED


class _Group:
    """Some images on the way to their spectrum, and what reads it.

    This is ``[field chunks, slot chunks, grid, fields, width]``, ``fields`` being contiguous.
    """

    def __init__(
        self,
        made: dict[str, Any],
        x: Like,
        first: int,
        images: int,
        layout: Scheme,
        geometry: Geometry,
        each: int,
        activated: bool,
        fields: int = FIELDS,
    ) -> None:
        """``each``: every image is scaled by a number of its own (1), or all by one (0)."""
        self.first, self.images = first, images
        count = x.shape[1] // layout.plan.analysis.shape[1]
        grid = Grid.of((images, *x.shape[1:]), geometry, layout.plan.basis.size)
        self.chunks = units(count, FIELDS) * (FIELDS // fields)
        self.numbers = self.chunks * layout.chunks * grid.size * fields * layout.width
        pixels = (images * geometry.pixels, *geometry.sizes)
        steps = (grid.pitch, grid.pitch * grid.lines, grid.size)
        self.positions = (*pixels, geometry.down, geometry.dilation, *steps)
        """Where output pixels lie in the grid: what kernels that read a spectrum take first."""
        block = 64 * FIELDS // fields
        shape, padding = (images, count, *x.shape[2:]), (geometry.up, geometry.before)
        numbers = (*shape, *padding, *grid, each, *x.strides)
        programs = (units(grid.size, block), self.chunks)
        analyse = made["analyse_activated" if activated else "analyse"]
        self.analyse = Launch(analyse, programs, numbers, BP=block, num_warps=4)
        self.launches: list[list[Launch]] = []
        """What reads their spectrum, for each layout; of a weight gradient, after what packs."""
        self.offset = 0
        """Where in the output the spectrum lies; −1: in memory of its own."""

    def of(self, images: Tensor) -> Tensor:
        every = self.images == len(images)  # a slice would take time
        return images if every else images[self.first : self.first + self.images]

    into = of  # of the output

    def scales(self, largest: Tensor) -> Tensor:
        """Where the largest numbers of its images begin."""
        return largest[OVERALL + self.first :]


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
        precision: str,
        activated: bool = False,
        warp_specialised: bool = False,
        changes: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """``warp_specialised``: whether those kernels are used, where they fit and gain.

        Then outputs lie channels-last. ``changes`` are those of `chosen_tiles`, to tell runs apart.
        """
        self.internal, layout = _internal(x.dtype, plan)
        channels = layout.plan.synthesis.shape[0]
        self.shape = (x.shape[0], out_fields * channels, *geometry.sizes)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.groups: list[_Group] = []
        total = math.prod(self.shape)
        if not total:
            return
        chosen = chosen_tiles(layout)
        special = warp_specialised and self.internal == torch.float16
        self.tiling = tiling = convolution_tiling(layout, out_fields, chosen, special)
        self.word = torch.int32 if tiling.warp_specialised else self.internal  # two at a time
        cut, fields = tiling.cut, (out_fields, x.shape[1] // channels)
        features = tiling.layouts[0].batch * tiling.layouts[0].inner
        in_padded = rounded_up(fields[1], FIELDS)
        self.arranged: tuple[int, ...] = (in_padded, features, cut.padded, 2)
        self.arrange = [self._arrange(one, fields, adjoint, x.device) for one in tiling.layouts]
        """How weights come into the order in which each launch reads them."""
        made = kernels.generated(convolution_source, layout, cut.parts, _f16x2(self.internal))
        if tiling.warp_specialised:
            several = [hopper.generated(one, cut.parts) for one in tiling.layouts]
            forward = [
                partial(Launch, kernel, BP=tiling.pixels, **_WARPS, STAGES=stages)
                for kernel, stages in zip(several, tiling.stages, strict=True)
            ]
        else:
            options: dict[str, Any] = {"BP": tiling.pixels, "PRECISION": precision}
            options |= {"num_warps": chosen.warps, "num_stages": 1}
            forward = [partial(Launch, made["forward"], **options)]
        strides = torch.empty(self.shape, device="meta", memory_format=self.format).stride()
        self.own = first = 0  # numbers of the memory that is no part of the output
        for images in image_groups(x, geometry, tiling, self.shape[1], adjoint):
            group = _Group(made, x, first, images, layout, geometry, 1, activated)
            numbers: tuple[int, ...] = (*group.positions, group.chunks)
            tiles = units(numbers[0], tiling.pixels)
            grid = (tiles, cut.programs)
            if tiling.warp_specialised:
                numbers = (*numbers, *grid, out_fields, strides[3])
                grid = (min(tiles, tiling.running(x.device)), cut.programs)
            else:
                numbers = (*numbers, cut.programs, out_fields, *strides)
            group.launches = [[launch(grid, numbers)] for launch in forward]
            group.offset = (total - group.numbers) // 64 * 64
            first += images
            if group.offset < first * total // x.shape[0]:  # already written
                group.offset = -1
                self.own = max(self.own, group.numbers)
            self.groups.append(group)

    def _arrange(
        self, layout: Scheme, fields: tuple[int, int], adjoint: bool, device: torch.device
    ) -> tuple[Launch, list[Tensor], hopper.Copies | None]:
        """A launch, the constants that it reads, and how its result is copied, if it is."""
        cut, special = self.tiling.cut, self.tiling.warp_specialised
        total, weights = math.prod(self.arranged), layout.plan.weights
        strides = (weights, fields[0] * weights) if adjoint else (fields[1] * weights, weights)
        sizes = (cut.programs, layout.batch, layout.inner, layout.length)
        last = (self.arranged[0] // FIELDS, sum(cut.parts), cut.parts[0], total)
        options = {"BF": FIELDS, "BLOCK": 1024, "HEADROOM": HEADROOM, "num_warps": 8}
        launch = Launch(
            kernels.arrange, (units(total, 1024),), (*fields, *strides, *sizes, *last), **options
        )
        copies = None
        if special:
            inners = [FIELDS * size for size in layout.used_pieces]
            copies = hopper.Copies(layout, cut.parts, total // (FIELDS * layout.length), inners)
        entries = _constants(layout, device, special)
        constants = [*entries[2:4], entries[4]] if adjoint else [*entries[:2], entries[4]]
        return launch, constants, copies

    def __call__(
        self, x: Tensor, x_largest: Tensor, weights: Tensor, w_largest: Tensor, *affine: Tensor
    ) -> Tensor:
        device = x.device
        y = torch.empty(self.shape, dtype=x.dtype, device=device, memory_format=self.format)
        if not self.groups:
            return y.zero_()
        jobs: list[Job] = []
        factors = []
        for launch, constants, copies in self.arrange:
            arranged = passes.empty(self.arranged, self.internal, device)
            jobs.append((launch, (weights, *constants, w_largest, arranged)))
            factors.append(copies(arranged) if copies else [arranged])
        own = passes.empty((self.own,), self.internal, device)
        flat = y.as_strided((y.numel(),), (1,)).view(self.internal)
        for group in self.groups:
            scales = group.scales(x_largest)
            memory = own if group.offset < 0 else flat[group.offset :]
            spectrum = memory[: group.numbers]
            jobs.append((group.analyse, (group.of(x), *affine, scales, spectrum)))
            spectrum = spectrum.view(self.word)
            for (launch,), factor in zip(group.launches, factors, strict=True):
                jobs.append((launch, (spectrum, *factor, group.into(y), scales, w_largest)))
        launch_all(jobs)
        return y


class WeightGradientRun:
    """The gradient to the weights on images of one shape."""

    def __init__(
        self,
        x: Like,
        g: Like,
        plan: str,
        geometry: Geometry,
        precision: str,
        activated: bool = False,
        warp_specialised: bool = False,
        changes: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """As `ConvolutionRun`."""
        self.internal, layout = _internal(x.dtype, plan)
        channels = layout.plan.analysis.shape[1]
        in_fields, out_fields = x.shape[1] // channels, g.shape[1] // channels
        self.shape = (out_fields, in_fields, layout.plan.weights)
        self.groups: list[_Group] = []
        if not math.prod(x.shape) * math.prod(g.shape):
            return
        chosen = chosen_tiles(layout)
        special = warp_specialised and self.internal == torch.float16
        self.tiling = tiling = weight_gradient_tiling(layout, out_fields, chosen, special)
        self.word = torch.int32 if tiling.warp_specialised else self.internal
        cut, in_padded = tiling.cut, rounded_up(in_fields, FIELDS)
        splits, most = weight_gradient_memory(x, geometry, tiling, g.shape[1])
        self.partial = (splits, in_padded, tiling.features, cut.padded, 2)
        pixels = min(most, x.shape[0]) * geometry.pixels
        self.packed = (units(pixels, tiling.pixels), tiling.packed * tiling.pixels)
        given = (cut.parts, tiling.fields, _f16x2(self.internal))
        made = [kernels.generated(weight_gradient_source, one, *given) for one in tiling.layouts]
        found = [_constants(one, x.device, tiling.warp_specialised)[5:] for one in tiling.layouts]
        self.copies: list[hopper.Copies | None] = [None]
        self.more: list[Tensor] = []
        """What else the kernels read."""
        options: dict[str, Any] = {"BP": tiling.pixels}
        if tiling.warp_specialised:
            length = math.prod(self.packed) // ROWS
            self.copies = [hopper.Copies(one, cut.parts, length, [ROWS]) for one in tiling.layouts]
            options |= {**_WARPS, "STAGES": 2}
            gradients = [
                [
                    partial(Launch, kernel, **options, READY=ready, COUNT=tiling.features)
                    for kernel in (hopper.generated(one, cut.parts, c) for c in range(one.chunks))
                ]
                for one, ready in zip(tiling.layouts, tiling.stages, strict=True)
            ]
        else:
            self.more = found[0][2:]
            options |= {"PRECISION": precision, "COUNT": tiling.features, "num_warps": tiling.warps}
            gradients = [[partial(Launch, made[0]["weight_gradient"], **options)]]
        grid = (in_padded // tiling.fields, cut.programs, splits)
        for again, first in enumerate(range(0, x.shape[0], most)):
            images = min(most, x.shape[0] - first)
            shape = (x, first, images, layout, geometry, 0, activated, tiling.fields)
            group = _Group(made[0], *shape)
            pixels, height, width, *_ = group.positions
            tiles = units(pixels, tiling.pixels)
            rows = (tiles * (tiling.pixels // ROWS), cut.padded // FIELDS)
            numbers = (pixels, out_fields, height, width, cut.programs, *g.strides)
            packs = [Launch(one["pack"], rows, numbers, BP=ROWS, num_warps=4) for one in made]
            last = (tiles, cut.programs, in_padded, cut.padded, again)
            numbers = (*group.positions, *last)
            group.launches = [
                [pack, *(launch(grid, numbers) for launch in several)]
                for pack, several in zip(packs, gradients, strict=True)
            ]
            self.groups.append(group)
        self.spectrum = self.groups[0].numbers  # no other group is larger
        self.reduce = [(self._reduce(one[0].shape[1]), one[:2]) for one in found]

    def _reduce(self, most: int) -> Launch:
        """How the sums of programs are added up, for weights with at most so many features."""
        out_fields, in_fields, weights = self.shape
        splits, in_padded, count, out_padded, _ = self.partial
        outs, together = (min(16, power_of_two(n)) for n in (out_fields, splits))
        several = max(16, 2048 // (outs * together))
        # The second has a limit of 65,535.
        grid = (in_fields * units(out_fields, outs), units(weights, several))
        numbers = (out_fields, in_fields, weights, in_padded, out_padded, count, splits)
        constants = {"MOST": most, "SPLITS": together, "BN": several, "BO": outs}
        return Launch(kernels.reduce, grid, numbers, **constants, num_warps=4)

    def __call__(
        self, x: Tensor, x_largest: Tensor, g: Tensor, g_largest: Tensor, *affine: Tensor
    ) -> Tensor:
        device = x.device
        if not self.groups:
            return torch.zeros(self.shape, dtype=torch.float32, device=device)
        memory = passes.empty((self.spectrum,), self.internal, device)
        packed = passes.empty(self.packed, self.internal, device)
        result = passes.empty(self.shape, torch.float32, device)
        partials = [passes.empty(self.partial, torch.float32, device) for _ in self.reduce]
        factors = [copies(packed) if copies else [packed, *self.more] for copies in self.copies]
        # Images add up: they are scaled alike, by the largest number of all.
        largest = (x_largest, g_largest)
        jobs: list[Job] = []
        for group in self.groups:
            spectrum = memory[: group.numbers]
            jobs.append((group.analyse, (group.of(x), *affine, x_largest, spectrum)))
            spectrum = spectrum.view(self.word)
            for (pack, *more), factor, sums in zip(group.launches, factors, partials, strict=True):
                jobs.append((pack, (group.of(g), g_largest, packed)))
                jobs += [(launch, (spectrum, *factor, sums, *largest)) for launch in more]
        for (launch, owners), sums in zip(self.reduce, partials, strict=True):
            jobs.append((launch, (sums, *owners, result)))
        launch_all(jobs)
        return result


convolution_run = lru_cache(maxsize=1024)(ConvolutionRun)
weight_gradient_run = lru_cache(maxsize=1024)(WeightGradientRun)


def largest(x: Tensor, found: Tensor, affine: Tensor | None = None) -> None:
    """Add the largest magnitude in ``x``, and from `OVERALL` on that of each image, to zeros.

    With ``affine``, of ``x`` when it is activated.
    """
    if not x.numel():
        return
    x = x.flatten(2, -2)  # planes of volumes lie as rows do
    fields = 0 if affine is None else affine.shape[1]
    constants = {"OVERALL": OVERALL, "ACTIVATED": fields > 0}
    launch = passes.by_rows(kernels.largest, Like.of(x), fields, whole=False, **constants)
    if launch is None:  # in neither of torch's layouts
        largest(x.contiguous(), found, affine)
    else:
        launch(x, x if affine is None else affine.contiguous(), found.view(torch.int32))
