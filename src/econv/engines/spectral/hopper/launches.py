"""Launches of the warp-specialised kernels, and the rules for when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
from torch import Tensor

from econv.engines.spectral.hopper import kernels as hopper_kernels
from econv.engines.spectral.hopper.schedule import ROWS, fits, pieces_of_a_chunk, used_pieces
from econv.engines.spectral.hopper.source import weight_gradient_features
from econv.engines.spectral.triton.kernels import INTERPRETED
from econv.engines.spectral.triton.scheme import FIELDS, Scheme, halves
from econv.engines.spectral.triton.steps import Launch
from econv.engines.spectral.triton.tiles import INTERNAL, Cut, Like, Tiles, at_a_time, divided

__all__ = ["WarpSpecialised", "WarpSpecialisedWeightGradient", "as_words"]

_Made = TypeVar("_Made", bound="_Part")

_SHARED = 225 << 10  # bytes of shared memory that the stages of a program may take
_ACCUMULATORS = 320  # output channels of a program: 160 registers of each thread that multiplies
_MULTIPLIERS = 4  # warps
_REGISTERS = 128  # of threads that differentiate
_TARGETS = (4, 8)  # products that layers have for which this was measured to be faster
_MOST = 16  # those that are made by halves


class _Part(Protocol):
    """What is made of a part of a layer."""

    @property
    def cut(self) -> Cut: ...


def _possible(x: Like, layout: Scheme, chosen: Tiles) -> bool:
    """Whether these images can be warp-specialised, and gain by it."""
    if INTERNAL[x.dtype] != torch.float16:
        return False
    if chosen.warp_specialised >= 0:
        return bool(chosen.warp_specialised)
    if INTERPRETED or not hopper_kernels.AVAILABLE or layout.batch not in (*_TARGETS, _MOST):
        return False
    if x.device.type == "cuda":
        return torch.cuda.get_device_capability(x.device) == (9, 0)
    return x.device.type == "meta"  # which stands for an H200


def _divisions(layout: Scheme, chosen: Tiles) -> Iterator[tuple[Scheme, ...]]:
    """Ways to divide a layer into launches, the best first.

    All targets at a time, unless there are so many that a program would hold few output fields, and
    others make the same features again: half of the targets read half of the derivatives.
    """
    both = halves(layout) if chosen.halves else None
    ways: list[tuple[Scheme, ...]] = []
    if both is not None and (chosen.halves > 0 or layout.batch >= _MOST):
        ways.append(both)
    if layout.batch < _MOST or chosen.warp_specialised > 0:
        ways.append((layout,))
    for way in ways:
        if all(pieces_of_a_chunk(each) is not None and fits(each) for each in way):
            yield way


def _of_a_division(
    make: Callable[[Like, Scheme, Tiles, int], _Made | None],
    x: Like,
    layout: Scheme,
    chosen: Tiles,
    out_fields: int,
) -> list[_Made]:
    """What is made of each part of a division, the first of which all can be made."""
    if _possible(x, layout, chosen):
        for way in _divisions(layout, chosen):
            found = [make(x, each, chosen, out_fields) for each in way]
            known = [one for one in found if one is not None]
            # What belongs to all of them is cut once.
            if len(known) == len(found) and len({one.cut for one in known}) == 1:
                return known
    return []


def _cuts(fields: int, layout: Scheme) -> Iterator[Cut]:
    """Ways to cut output fields, those of fewest programs first, whose sums fit into registers."""
    for programs in range(1, triton.cdiv(fields, FIELDS) + 1):
        found = divided(fields, programs, 1, FIELDS)
        if 2 * layout.batch * sum(found.parts) <= _ACCUMULATORS and 2 * max(found.parts) <= 256:
            yield found


def as_words(spectrum: Tensor) -> Tensor:
    """A spectrum in halves as the kernels read it, two of them at a time."""
    return spectrum.view(torch.int32)


class WarpSpecialised(NamedTuple):
    """A warp-specialised layer."""

    layout: Scheme
    cut: Cut
    stages: int
    chosen: Tiles
    device: torch.device

    @staticmethod
    def of(x: Like, layout: Scheme, chosen: Tiles, out_fields: int) -> list[WarpSpecialised]:
        """One launch, or one for each half of the layer; none where they do not fit."""
        return _of_a_division(WarpSpecialised._of, x, layout, chosen, out_fields)

    @staticmethod
    def _of(x: Like, layout: Scheme, chosen: Tiles, out_fields: int) -> WarpSpecialised | None:
        length = sum(used_pieces(layout))
        for found in _cuts(out_fields, layout):
            rows = layout.batch * (ROWS + 2 * sum(found.parts))
            stages = min(4, _SHARED // (rows * FIELDS * length * 2))
            if stages > 1:
                return WarpSpecialised(layout, found, stages, chosen, x.device)
        return None

    @property
    def running(self) -> int:
        """Programs that run at the same time, for each run of output fields."""
        return max(1, at_a_time(self.device, 8) // self.cut.programs)

    def copies(self, arranged: tuple[int, ...]) -> hopper_kernels.Copies:
        """How weights of that shape reach the products."""
        return hopper_kernels.weight_copies(self.layout, self.cut.parts, arranged)

    def launch(self, numbers: tuple[int, ...], chunks: int, out_fields: int, y_dot: int) -> Launch:
        """It takes the spectrum in words, the copies, the output, and both largest numbers."""
        tiles = triton.cdiv(numbers[0], ROWS)
        return Launch(
            hopper_kernels.forward(self.layout, self.cut.parts, self.chosen.partitions),
            (min(tiles, self.running), self.cut.programs),
            (*numbers, chunks, tiles, self.cut.programs, out_fields, y_dot),
            BP=ROWS,
            PRODUCERS=self.chosen.producers,
            REGISTERS=self.chosen.registers or _REGISTERS,
            STAGES=self.stages,
            num_warps=_MULTIPLIERS,
        )


class WarpSpecialisedWeightGradient(NamedTuple):
    """A warp-specialised gradient to the weights."""

    layout: Scheme
    cut: Cut
    pixels: int
    """At a time."""
    fields: int
    """Input fields of a program."""
    running: int
    """Programs that run at the same time."""
    ready: int
    """Stages of the output's gradient; those of the features are two."""
    chosen: Tiles

    @staticmethod
    def of(
        x: Like, layout: Scheme, chosen: Tiles, out_fields: int
    ) -> list[WarpSpecialisedWeightGradient]:
        """One launch, or one for each half of the layer; none where they do not fit."""
        return _of_a_division(WarpSpecialisedWeightGradient._of, x, layout, chosen, out_fields)

    @staticmethod
    def _of(
        x: Like, layout: Scheme, chosen: Tiles, out_fields: int
    ) -> WarpSpecialisedWeightGradient | None:
        if weight_gradient_features(layout) > ROWS:
            return None
        fields = ROWS // weight_gradient_features(layout)
        pixels = 32 * chosen.producers // fields
        left = _SHARED - 2 * layout.batch * pixels * 2 * ROWS
        for found in _cuts(out_fields, layout):
            ready = min(4, left // (layout.batch * 2 * sum(found.parts) * 2 * ROWS))
            if ready > 1 and pixels >= ROWS:
                running = at_a_time(x.device, 8)
                return WarpSpecialisedWeightGradient(
                    layout, found, pixels, fields, running, ready, chosen
                )
        return None

    def splits(self, programs: int, most: int) -> int:
        """How many programs share the pixels: in whole rounds, each takes a share of them."""
        most = min(most, self.running)
        return min(
            range(1, most + 1), key=lambda n: (triton.cdiv(programs * n, self.running) / n, n)
        )

    def copies(self, packed: tuple[int, ...]) -> hopper_kernels.Copies:
        """How a packed gradient reaches the products."""
        return hopper_kernels.row_copies(self.layout, self.cut.parts, packed)

    def launches(
        self, numbers: tuple[int, ...], in_padded: int, count: int, splits: int, again: int
    ) -> list[Launch]:
        """One for each chunk of slots. Sums have room for ``count`` features.

        They take the spectrum in words, the copies, the sums, and both largest numbers.
        """
        tiles = triton.cdiv(numbers[0], self.pixels)
        more: tuple[Any, ...] = (tiles, self.cut.programs, in_padded, self.cut.padded, again)
        return [
            Launch(
                hopper_kernels.weight_gradient(
                    self.layout, self.cut.parts, chunk, self.chosen.partitions
                ),
                (in_padded // self.fields, self.cut.programs, splits),
                (*numbers, *more),
                BP=self.pixels,
                PRODUCERS=self.chosen.producers,
                REGISTERS=self.chosen.registers or _REGISTERS,
                STAGES=2,
                READY=self.ready,
                COUNT=count,
                num_warps=_MULTIPLIERS,
            )
            for chunk in range(self.layout.chunks)
        ]
