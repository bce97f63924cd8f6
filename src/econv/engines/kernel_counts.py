"""What the spectral kernels for GPUs do, counted without them, for `econv.engines.auto`.

Launches are cut as `econv.engines.triton_launches` cuts them for an H200. That room needs Triton,
and makes kernels; the cost model needs neither. A test holds the two together. Two things are left
out: images that are taken in several groups for want of memory count as one, and warps have no
roles (`econv.engines.hopper_launches`); where they have, the kernels are faster than this says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from econv.engines.triton_scheme import FIELDS, Scheme, power_of_two
from econv.groups import FloatArray

__all__ = ["PROCESSORS", "Cut", "Kernels", "at_a_time", "parts", "rounded"]

PROCESSORS = 132
"""Of an H200."""

_ACCUMULATORS = 384  # output slots of a program, at most
_GRAM_PIXELS = 64  # at a time
_GRAM_FIELDS = 8  # output fields that are laid out together
_LEAST = 9 << 19  # bytes that the dense engine takes for small layers


def parts(count: int, unit: int) -> int:
    """How many units hold a count.

    >>> parts(33, 32)
    2
    """
    return -(-count // unit)


def rounded(count: int, unit: int) -> int:
    """A count in whole units.

    >>> rounded(33, 32)
    64
    """
    return parts(count, unit) * unit


def at_a_time(warps: int) -> int:
    """Programs that a GPU runs at a time: eight warps take all registers of a processor."""
    return PROCESSORS * max(1, 8 // warps)


def _whole_rounds(programs: int, warps: int) -> float:
    """Programs, with those that would find room while the last of them run.

    A processor with one program where two have room takes three quarters of the time of both.
    """
    return (rounded(programs, at_a_time(warps)) + rounded(programs, PROCESSORS)) / 2


class Cut(NamedTuple):
    """The output fields of the programs of a kernel."""

    fields: int
    """Of one program, those that fill it up counted."""
    programs: int

    @staticmethod
    def of(fields: int, targets: int, warps: int, least: int) -> Cut:
        """Fields come in two powers of two at most, ``least`` at a time."""
        copies = max(1, warps // targets)
        most = max(least * copies, _ACCUMULATORS // (2 * targets))
        each = least * parts(fields, least * copies * parts(fields, most))
        rest = each - (1 << (each.bit_length() - 1))
        held = copies * (power_of_two(each) if rest & (rest - 1) else each)
        return Cut(held, parts(fields, held))


class Kernels(NamedTuple):
    """The kernels of a layer."""

    layout: Scheme
    in_fields: int
    out_fields: int
    itemsize: int

    @property
    def tile(self) -> tuple[int, int]:
        """Pixels and warps of a program of the layer or its adjoint."""
        return (64, 8) if self.layout.batch >= 16 else (32, 4)

    def cut(self, adjoint: bool) -> Cut:
        """The programs of the layer or its adjoint."""
        made = self.in_fields if adjoint else self.out_fields
        return Cut.of(made, self.layout.batch, self.tile[1], FIELDS)

    def convolution(self, pixels: int, adjoint: bool) -> FloatArray:
        """Products, features and taps of all programs of a launch that gives so many pixels.

        Every program differentiates all input fields anew for its share of the output fields.
        """
        given = self.out_fields if adjoint else self.in_fields
        (tile, warps), cut = self.tile, self.cut(adjoint)
        programs = _whole_rounds(parts(pixels, tile) * cut.programs, warps)
        return programs * self._program(tile, rounded(given, FIELDS), cut)

    def _program(self, pixels: int, given: int, cut: Cut) -> FloatArray:
        features = pixels * given * self.layout.batch * self.layout.inner
        taps = pixels * given * self.layout.chunks * self.layout.plan.basis.size**2
        return np.array([features * 2 * cut.fields, features, taps], dtype=np.float64)

    @property
    def gram_tile(self) -> tuple[int, int]:
        """Input fields and warps of a program of the gradient to the weights."""
        return (2, 4) if self.layout.chunks == 1 else (4, 8)

    @property
    def gram_cut(self) -> Cut:
        """The output fields of the gradient to the weights."""
        return Cut.of(self.out_fields, self.layout.batch, self.gram_tile[1], _GRAM_FIELDS)

    @property
    def weights(self) -> int:
        """Sums that one program after another adds to in the gradient to the weights."""
        cut, each = self.gram_cut, 2 * self.layout.batch * self.layout.inner
        return rounded(self.in_fields, FIELDS) * each * cut.programs * cut.fields

    @property
    def laid(self) -> int:
        """Numbers of a pixel of the output's gradient as the tensor cores read it."""
        return self.gram_cut.programs * self.gram_cut.fields * 2 * self.layout.batch

    def splits(self, batch: int, in_pixels: int, out_pixels: int) -> int:
        """How many programs share the pixels: what the GPU holds, as far as there is memory."""
        plan, channels = self.layout.plan, self.layout.plan.analysis.shape[1]
        dense = 2 * channels**2 * plan.basis.size**2 * self.itemsize
        ours = plan.weights * 8 + 2 * self.layout.batch * self.layout.inner * self.itemsize
        free = batch * in_pixels * self.in_fields * channels * self.itemsize
        free += max(_LEAST, self.in_fields * self.out_fields * (dense - ours))
        running = at_a_time(self.gram_tile[1]) // self._gram_programs
        most = max(1, min(running, free // 4 // (4 * self.weights)))
        return max(1, min(most, parts(batch * out_pixels, _GRAM_PIXELS)))

    @property
    def _gram_programs(self) -> int:
        return rounded(self.in_fields, FIELDS) // self.gram_tile[0] * self.gram_cut.programs

    def gram(self, pixels: int, splits: int) -> FloatArray:
        """Products, features and taps of the gradient to the weights."""
        fields, warps = self.gram_tile
        programs = _whole_rounds(self._gram_programs * splits, warps)
        turns = parts(parts(pixels, _GRAM_PIXELS), splits)
        return programs * turns * self._program(_GRAM_PIXELS, fields, self.gram_cut)
