"""Launches whose warps have roles, and when there are such.

This room knows launches. The kernels are those of `econv.engines.hopper_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
from torch import Tensor

from econv.engines import hopper_kernels
from econv.engines.hopper_source import gram_features
from econv.engines.hopper_turns import ROWS, fits, pieces_of_a_chunk, used_pieces
from econv.engines.triton_kernels import INTERPRETED
from econv.engines.triton_scheme import FIELDS, Scheme, halves
from econv.engines.triton_steps import Launch
from econv.engines.triton_tiles import INTERNAL, Cut, Like, Tiles, at_a_time, divided

__all__ = ["GramRoles", "Roles", "as_words"]

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
    """Whether warps can have roles on these images, and were found to gain by them."""
    if INTERNAL[x.dtype] != torch.float16:
        return False
    if chosen.roles >= 0:
        return bool(chosen.roles)
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
    if layout.batch < _MOST or chosen.roles > 0:
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


class Roles(NamedTuple):
    """A layer whose warps have roles."""

    layout: Scheme
    cut: Cut
    stages: int
    chosen: Tiles
    device: torch.device

    @staticmethod
    def of(x: Like, layout: Scheme, chosen: Tiles, out_fields: int) -> list[Roles]:
        """One, or two of half a layer each, or none: they have none, or no room for two stages."""
        return _of_a_division(Roles._of, x, layout, chosen, out_fields)

    @staticmethod
    def _of(x: Like, layout: Scheme, chosen: Tiles, out_fields: int) -> Roles | None:
        length = sum(used_pieces(layout))
        for found in _cuts(out_fields, layout):
            rows = layout.batch * (ROWS + 2 * sum(found.parts))
            stages = min(4, _SHARED // (rows * FIELDS * length * 2))
            if stages > 1:
                return Roles(layout, found, stages, chosen, x.device)
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
            hopper_kernels.forward(self.layout, self.cut.parts, self.chosen.teams),
            (min(tiles, self.running), self.cut.programs),
            (*numbers, chunks, tiles, self.cut.programs, out_fields, y_dot),
            BP=ROWS,
            PRODUCERS=self.chosen.producers,
            REGISTERS=self.chosen.registers or _REGISTERS,
            STAGES=self.stages,
            num_warps=_MULTIPLIERS,
        )


class GramRoles(NamedTuple):
    """The gradient to the weights where warps have roles."""

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
    def of(x: Like, layout: Scheme, chosen: Tiles, out_fields: int) -> list[GramRoles]:
        """One, or two of half a layer each, or none: they have none, or no room for two stages."""
        return _of_a_division(GramRoles._of, x, layout, chosen, out_fields)

    @staticmethod
    def _of(x: Like, layout: Scheme, chosen: Tiles, out_fields: int) -> GramRoles | None:
        if gram_features(layout) > ROWS:
            return None
        fields = ROWS // gram_features(layout)
        pixels = 32 * chosen.producers // fields
        left = _SHARED - 2 * layout.batch * pixels * 2 * ROWS
        for found in _cuts(out_fields, layout):
            ready = min(4, left // (layout.batch * 2 * sum(found.parts) * 2 * ROWS))
            if ready > 1 and pixels >= ROWS:
                running = at_a_time(x.device, 8)
                return GramRoles(layout, found, pixels, fields, running, ready, chosen)
        return None

    def splits(self, programs: int, most: int) -> int:
        """How many programs share the pixels: in whole rounds, each takes a share of them."""
        most = min(most, self.running)
        return min(
            range(1, most + 1), key=lambda n: (triton.cdiv(programs * n, self.running) / n, n)
        )

    def copies(self, laid: tuple[int, ...]) -> hopper_kernels.Copies:
        """How a gradient that was laid out reaches the products."""
        return hopper_kernels.row_copies(self.layout, self.cut.parts, laid)

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
                hopper_kernels.gram(self.layout, self.cut.parts, chunk, self.chosen.teams),
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
