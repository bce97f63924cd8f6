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
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from econv.engines.problem import Geometry
from econv.engines.spectral.hopper import launches as hopper
from econv.engines.spectral.hopper.kernels import row_copies, weight_copies
from econv.engines.spectral.hopper.schedule import ROWS, gains
from econv.engines.spectral.tiling import (
    INTERNAL,
    Grid,
    Like,
    Tiles,
    chosen_tiles,
    concurrent_programs,
    convolution_tiling,
    image_groups,
    rounded_up,
    units,
    weight_gradient_memory,
    weight_gradient_tiling,
)
from econv.engines.spectral.triton import kernels
from econv.engines.spectral.triton.kernels import OVERALL
from econv.engines.spectral.triton.scheme import FIELDS, HEADROOM, Scheme, power_of_two, scheme
from econv.engines.spectral.triton.source import FIRST
from econv.engines.spectral.triton.steps import Launch, Operand, Steps
from econv.plan import SpectralPlan, plan_named

_Step = tuple[Launch, list[Operand]]


def precision_of(dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return "tf32"  # says nothing about products of float16
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # asked for in torch's newer words
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return "tf32" if allowed else "tf32x3"


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


def _scheme(plan: SpectralPlan, dtype: torch.dtype) -> Scheme:
    return scheme(plan, 16 // INTERNAL[dtype].itemsize)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that some kernel fills: every element, or nobody reads it."""
    return torch.empty(shape, dtype=dtype, device=device)


def _f16x2(dtype: torch.dtype) -> bool:
    return dtype == torch.float16 and not kernels.INTERPRETED


def _may_specialise(x: Like, chosen: Tiles, allowed: bool) -> bool:
    """Whether warp-specialised kernels may run on these images."""
    if not allowed or INTERNAL[x.dtype] != torch.float16:
        return False
    forced = chosen.warp_specialised
    return hopper.supported(x.device) if forced < 0 else bool(forced)


class _Analysis:
    """From images to their spectrum, ``[field chunks, slot chunks, grid, fields, width]``."""

    def __init__(
        self,
        analyse: tuple[Any, Any],
        x: Like,
        layout: Scheme,
        geometry: Geometry,
        each: int,
        activated: bool,
        fields: int = FIELDS,
    ) -> None:
        """``each``: every image is scaled by a number of its own (1), or all by one (0).

        ``fields`` are contiguous.
        """
        batch, channels, height, width = x.shape
        count = channels // layout.plan.analysis.shape[1]
        self.grid = Grid.of(x.shape, geometry, layout.plan.basis.size)
        chunks = units(count, FIELDS) * (FIELDS // fields)
        self.shape = (chunks, layout.chunks, self.grid.size, fields, layout.width)
        self.numbers = math.prod(self.shape)
        block = 64 * FIELDS // fields
        numbers = (batch, count, height, width, geometry.up, geometry.before, *self.grid, each)
        grid = (units(self.grid.size, block), chunks)
        launch = (analyse[activated], grid, (*numbers, *x.strides))
        self.run = Launch(*launch, BP=block, num_warps=4)

    def within(self, memory: int, offset: int, internal: torch.dtype) -> Operand:
        """The spectrum, from some number on in some memory."""

        def shown(tensor: Tensor) -> Tensor:
            flat = tensor.as_strided((tensor.numel(),), (1,)).view(internal)
            return flat[offset : offset + self.numbers].view(self.shape)

        return Operand(memory, offset * internal.itemsize, shown)

    def positions(self, pixels: int, geometry: Geometry) -> tuple[int, ...]:
        """Where output pixels lie in the grid: what kernels that read a spectrum take first."""
        shape = (pixels, geometry.height, geometry.width)
        steps = (self.grid.pitch, self.grid.pitch * self.grid.lines, self.grid.size)
        return (*shape, geometry.down, geometry.dilation, *steps)


def _in_words(spectrum: Operand) -> Operand:
    """A spectrum as warp-specialised kernels read it: two float16 at a time."""
    return spectrum._replace(shown=lambda memory: spectrum.shown(memory).view(torch.int32))


def _images(memory: int, x: Like, first: int, images: int) -> Operand:
    """Some of the images ``x``."""
    byte = first * x.strides[0] * x.dtype.itemsize
    return Operand(memory, byte, lambda memory: memory[first : first + images])


def _scales(memory: int, first: int) -> Operand:
    """The largest numbers of images, from one of them on."""
    return Operand(memory, 4 * (OVERALL + first), lambda memory: memory[OVERALL + first :])


def _parts(first: int, count: int) -> list[Operand]:
    return [Operand(memory) for memory in range(first, first + count)]


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
        self.x, self.internal = x, INTERNAL[x.dtype]
        self.shape = (x.shape[0], out_fields * channels, geometry.height, geometry.width)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.groups: list[_Group] = []
        if not math.prod(self.shape):
            return
        chosen = chosen or chosen_tiles(layout)
        allowed = channels_last and _may_specialise(x, chosen, warp_specialised)
        self.tiling = tiling = convolution_tiling(layout, out_fields, chosen, allowed)
        self.arranged = (
            rounded_up(x.shape[1] // channels, FIELDS),
            tiling.layouts[0].batch * tiling.layouts[0].inner,
            tiling.cut.padded,
            2,
        )
        made = kernels.convolution_kernels(layout, tiling.cut.parts, _f16x2(self.internal))
        strides = torch.empty(self.shape, device="meta", memory_format=self.format).stride()

        @cache
        def launches(images: int) -> tuple[_Analysis, list[Launch]]:
            like = x._replace(shape=(images, *x.shape[1:]))
            analysis = _Analysis(made.analyse, like, layout, geometry, 1, activated)
            pixels = images * geometry.height * geometry.width
            numbers = (*analysis.positions(pixels, geometry), analysis.shape[0])
            if tiling.warp_specialised:
                given = (numbers, out_fields, strides[3])
                return analysis, hopper.convolution_launches(tiling, chosen, x.device, *given)
            grid = (units(pixels, tiling.pixels), tiling.cut.programs)
            numbers = (*numbers, tiling.cut.programs, out_fields, *strides)
            options = {"num_warps": chosen.warps, "num_stages": 1}
            constants = {"BP": tiling.pixels, "PRECISION": precision}
            return analysis, [Launch(made.forward, grid, numbers, **constants, **options)]

        total, first = math.prod(self.shape), 0
        self.own = 0  # numbers of the memory that is no part of the output
        for images in image_groups(x, layout, geometry, tiling, self.shape[1], adjoint, chosen):
            analysis, forward = launches(images)
            written = (first + images) * total // x.shape[0]
            offset = (total - analysis.numbers) // 64 * 64
            if offset < written:
                offset = -1
                self.own = max(self.own, analysis.numbers)
            self.groups.append(_Group(first, images, offset, analysis, forward))
            first += images
        self.constants: list[Tensor] = []
        y = Like(self.shape, strides, x.dtype, x.device)
        self.steps = Steps(self._steps(y, adjoint, activated))

    def _steps(self, y: Like, adjoint: bool, activated: bool) -> Iterator[_Step]:
        """What is launched, on the memory that `__call__` names in this order."""
        special, layouts = self.tiling.warp_specialised, self.tiling.layouts
        x, x_largest, weights, w_largest, *affine, out, own = _parts(0, 6 + activated)
        factors = _parts(own.memory + 1, len(layouts))
        for number, layout in enumerate(layouts):
            found = _constants(layout, self.x.device, special)
            first = factors[-1].memory + 1 + len(self.constants)
            self.constants += [*(found[2:4] if adjoint else found[:2]), found[4]]
            into = factors[number]
            yield self._arrange(layout, adjoint), [weights, *_parts(first, 3), w_largest, into]
            if special:
                copies = weight_copies(layout, self.tiling.cut.parts, self.arranged)
                factors[number] = into._replace(copied=copies)
        for group in self.groups:
            memory, offset = (own, 0) if group.offset < 0 else (out, group.offset)
            spectrum = group.analysis.within(memory.memory, offset, self.internal)
            scales = _scales(x_largest.memory, group.first)
            images = _images(x.memory, self.x, group.first, group.images)
            yield group.analysis.run, [images, *affine, scales, spectrum]
            last = [_images(out.memory, y, group.first, group.images), scales, w_largest]
            spectrum = _in_words(spectrum) if special else spectrum
            for launch, factor in zip(group.forward, factors, strict=True):
                yield launch, [spectrum, factor, *last]

    def _arrange(self, layout: Scheme, adjoint: bool) -> Launch:
        """How weights come into the order in which a launch reads them."""
        channels, weights = layout.plan.synthesis.shape[0], layout.plan.weights
        cut, total = self.tiling.cut, math.prod(self.arranged)
        in_fields, out_fields = self.x.shape[1] // channels, self.shape[1] // channels
        strides = (weights, out_fields * weights) if adjoint else (in_fields * weights, weights)
        sizes = (cut.programs, layout.batch, layout.inner, layout.length)
        last = (self.arranged[0] // FIELDS, sum(cut.parts), cut.parts[0], total)
        numbers = (out_fields, in_fields, *strides, *sizes, *last)
        constants = {"BF": FIELDS, "BLOCK": 1024, "HEADROOM": HEADROOM}
        return Launch(kernels.arrange, (units(total, 1024),), numbers, **constants, num_warps=8)

    def __call__(
        self, x: Tensor, x_largest: Tensor, weights: Tensor, w_largest: Tensor, *affine: Tensor
    ) -> Tensor:
        device = x.device
        y = torch.empty(self.shape, dtype=x.dtype, device=device, memory_format=self.format)
        if self.groups:
            own = _empty((self.own,), self.internal, device)
            arranged = [_empty(self.arranged, self.internal, device) for _ in self.tiling.layouts]
            memory = (x, x_largest, weights, w_largest, *affine, y, own, *arranged)
            self.steps(*memory, *self.constants)
        return y


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
        """As `ConvolutionRun`."""
        self.layout = layout = _scheme(plan_named(plan), x.dtype)
        channels = layout.plan.analysis.shape[1]
        in_fields, out_fields = x.shape[1] // channels, g.shape[1] // channels
        self.shape, self.internal = (out_fields, in_fields, layout.plan.weights), INTERNAL[x.dtype]
        self.groups: list[tuple[int, int]] = []
        """The first image of a group, and how many there are."""
        if not math.prod(x.shape) * math.prod(g.shape):
            return
        chosen = chosen or chosen_tiles(layout)
        allowed = _may_specialise(x, chosen, warp_specialised)
        self.tiling = tiling = weight_gradient_tiling(layout, out_fields, chosen, allowed)
        given = (x, layout, geometry, tiling, g.shape[1], chosen)
        self.splits, most = weight_gradient_memory(*given)
        in_padded = rounded_up(in_fields, FIELDS)
        self.partial = (self.splits, in_padded, tiling.features, tiling.cut.padded, 2)
        self.groups = [(n, min(most, x.shape[0] - n)) for n in range(0, x.shape[0], most)]
        tiles = units(self.groups[0][1] * geometry.height * geometry.width, tiling.pixels)
        self.packed = (tiles, tiling.packed * tiling.pixels)
        found = [_constants(one, x.device, tiling.warp_specialised) for one in tiling.layouts]
        self.constants = [tensor for one in found for tensor in one[5:7]]
        self.numbers = found[0][7]
        self.spectrum = 0  # numbers of a group
        self.steps = Steps(self._steps(x, g, geometry, chosen, precision, activated))

    def _steps(
        self, x: Like, g: Like, geometry: Geometry, chosen: Tiles, precision: str, activated: bool
    ) -> Iterator[_Step]:
        """What is launched, on the memory that `__call__` names in this order."""
        tiling, cut, pixels = self.tiling, self.tiling.cut, geometry.height * geometry.width
        ours, x_largest, theirs, g_largest, *affine = _parts(0, 4 + activated)
        memory, packed, result = _parts(4 + activated, 3)
        partials = _parts(result.memory + 1, len(tiling.layouts))
        numbered = Operand(partials[-1].memory + 1)
        given = (cut.parts, tiling.fields, _f16x2(self.internal))
        made = [kernels.weight_gradient_kernels(one, *given) for one in tiling.layouts]
        for again, (first, images) in enumerate(self.groups):
            like = x._replace(shape=(images, *x.shape[1:]))
            analysis = _Analysis(
                made[0].analyse, like, self.layout, geometry, 0, activated, tiling.fields
            )
            self.spectrum = self.spectrum or analysis.numbers  # the first group is the largest
            spectrum = analysis.within(memory.memory, 0, self.internal)
            ones = _images(ours.memory, x, first, images)
            yield analysis.run, [ones, *affine, x_largest, spectrum]
            spectrum = _in_words(spectrum) if tiling.warp_specialised else spectrum
            numbers = analysis.positions(images * pixels, geometry)
            tiles = units(images * pixels, tiling.pixels)
            for number, layout in enumerate(tiling.layouts):
                grid = (tiles * (tiling.pixels // ROWS), cut.padded // FIELDS)
                sizes = (images * pixels, self.shape[0], *numbers[1:3], cut.programs, *g.strides)
                pack = Launch(made[number].pack, grid, sizes, BP=ROWS, num_warps=4)
                yield pack, [_images(theirs.memory, g, first, images), g_largest, packed]
                factor = packed
                if tiling.warp_specialised:
                    factor = packed._replace(copied=row_copies(layout, cut.parts, self.packed))
                    launches = hopper.weight_gradient_launches(
                        tiling, number, chosen, numbers, self.partial, again
                    )
                else:
                    grid3 = (self.partial[1] // tiling.fields, cut.programs, self.splits)
                    last = (self.partial[1], cut.padded, self.partial[2], again)
                    sizes = (*numbers, tiles, cut.programs, *last)
                    constants: dict[str, Any] = {"BP": tiling.pixels, "PRECISION": precision}
                    kernel, warps = made[number].weight_gradient, tiling.warps
                    launches = [Launch(kernel, grid3, sizes, **constants, num_warps=warps)]
                factors = [factor] if tiling.warp_specialised else [factor, numbered]
                for launch in launches:
                    yield launch, [spectrum, *factors, partials[number], x_largest, g_largest]
        owners = iter(_parts(partials[-1].memory + 2, len(self.constants)))
        for partial, most in zip(partials, self.constants[::2], strict=True):
            yield self._reduce(most.shape[1]), [partial, next(owners), next(owners), result]

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
        # Images add up: they are scaled alike, by the largest number of all.
        memory = _empty((self.spectrum,), self.internal, device)
        packed = _empty(self.packed, self.internal, device)
        result = _empty(self.shape, torch.float32, device)
        partials = [_empty(self.partial, torch.float32, device) for _ in self.tiling.layouts]
        given = (x, x_largest, g, g_largest, *affine)
        self.steps(*given, memory, packed, result, *partials, self.numbers, *self.constants)
        return result


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
    blocks = 16 if images * numbers >= 16 * block * 8 * concurrent_programs(x.device) else 4
    grid = (images, units(numbers, block * blocks))  # the second has a limit of 65,535
    constants = {"BLOCK": block, "BLOCKS": blocks, "OVERALL": OVERALL}
    launch = Launch(kernels.largest, grid, (numbers, x.strides[0]), **constants, num_warps=4)
    return Steps([(launch, [Operand(0), _as_bits(1)])])


def _as_bits(memory: int) -> Operand:
    """Numbers that are compared by their bits."""
    return Operand(memory, 0, lambda memory: memory.view(torch.int32))


_Rows = tuple[tuple[int, int, int], tuple[int, ...], dict[str, Any]]


def _rows(x: Like, fields: int) -> _Rows | None:
    """Grid, numbers and constants of kernels that go through images field by field.

    Nothing where images lie in neither of torch's two layouts.
    """
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
        blocks = min(4, units(rows, at_once))
        programs = units(rows, at_once * blocks)
        grid = (images * programs, units(fields, several), units(inner, inners))
        sizes = {"INNER": inner, "BR": at_once, "BF": several, "BI": inners, "BLOCKS": blocks}
        numbers = (rows, fields, programs, x.strides[0])
        return grid, numbers, {**sizes, "FIRST": FIRST}
    return None


def _by_rows(kernel: Any, rows: _Rows, *numbers: int, **constants: Any) -> Launch:
    grid, first, sizes = rows
    return Launch(kernel, grid, (*first, *numbers), **sizes, **constants, num_warps=4)


@lru_cache(maxsize=1024)
def largest_activated_steps(x: Like, fields: int) -> Steps | None:
    """`largest_steps` of an input that is activated, by numbers that come second."""
    rows = _rows(x, fields)
    if rows is None:
        return None
    launch = _by_rows(kernels.largest_activated, rows, OVERALL=OVERALL)
    return Steps([(launch, [Operand(0), Operand(1), _as_bits(2)])])


class BackwardRun:
    """What follows the gradient to an activated input, where that lies in one piece."""

    def __init__(self, x: Like, rows: _Rows, fields: int) -> None:
        self.x, self.numbers, self.fields = x, math.prod(x.shape), fields
        programs = rows[0][0] * rows[0][2]
        self.sums = (programs, 2, fields)
        g, ours, affine, to_x, sums, found = _parts(0, 6)
        grid, block = (units(fields, FIELDS),), min(512, power_of_two(programs))
        add_up = Launch(
            kernels.to_affine, grid, (programs, fields), BF=FIELDS, BLOCK=block, num_warps=4
        )
        differentiate = _by_rows(kernels.activation_backward, rows)
        self._activation = Steps(
            [(differentiate, [g, ours, affine, to_x, sums]), (add_up, [sums, affine, found])]
        )
        through = _by_rows(kernels.statistics_backward, rows, self.numbers // fields)
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
    there = {"WEIGHT": weight, "BIAS": bias, "RUNNING": running}
    constants = {name: dtype is not None for name, dtype in there.items()}
    sizes = {"SHARE": momentum is None, "BF": FIELDS, "BE": power_of_two(order)}
    grid, numbers = (units(fields, FIELDS),), (fields, order, momentum or 0.0, count / (count - 1))
    launch = Launch(
        kernels.field_statistics, grid, (*numbers, eps), **constants, **sizes, num_warps=1
    )
    return Steps([(launch, _parts(0, 8))])
