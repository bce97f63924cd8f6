"""What the spectral kernels for GPUs do, counted without them, for `econv.engines.auto`.

Launches are cut as `triton.launches` cuts them for an H200, those with roles as
`hopper.launches` does. Those rooms need Triton, and make kernels; the cost model
needs neither. Tests hold them together. Three things are left out: images that are taken in several
groups for want of memory count as one; products of padding that are not made count as if they were
(p28, p32, p14m, p16m); and no plan is known whose derivatives would be too large for float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from econv.engines.spectral.triton.scheme import FIELDS, Scheme, halves, power_of_two
from econv.groups import FloatArray

__all__ = ["PROCESSORS", "Cut", "Kernels", "KernelsWithRoles", "at_a_time", "parts", "rounded"]

PROCESSORS = 132
"""Of an H200."""

_ACCUMULATORS = 384  # output slots of a program, at most
_GRAM_PIXELS = 64  # at a time
_GRAM_FIELDS = 8  # output fields that are laid out together
_LEAST = 9 << 19  # bytes that the dense engine takes for small layers

# Where warps have roles:
_ROWS = 64  # of a product
_ROLE_ACCUMULATORS = 320
_ROLE_THREADS = 256  # that differentiate: each a field of a pixel
_ROLE_TARGETS = (4, 8)  # products of layers whose warps have roles
_HALVED_TARGETS = 16  # of those that are made by halves
_SHARED = 225 << 10  # bytes for the stages of a program, of which there are two or more


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
        return Cut.divided(fields, parts(fields, most), copies, least)

    @staticmethod
    def divided(fields: int, programs: int, copies: int, least: int) -> Cut:
        """For about so many programs."""
        each = least * parts(fields, least * copies * programs)
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
    def shares(self) -> tuple[Scheme, ...]:
        """The layouts of launches that make a part of the layer each, all of one shape."""
        return (self.layout,)

    @property
    def tile(self) -> tuple[int, int]:
        """Pixels and warps of a program of the layer or its adjoint."""
        return (64, 8) if self.layout.batch >= 16 else (32, 4)

    def cut(self, adjoint: bool) -> Cut:
        """The programs of the layer or its adjoint."""
        return Cut.of(self._made(adjoint), self.layout.batch, self.tile[1], FIELDS)

    def _made(self, adjoint: bool) -> int:
        return self.in_fields if adjoint else self.out_fields

    def convolution(self, pixels: int, adjoint: bool) -> FloatArray:
        """Products, features and taps of all programs of a launch that gives so many pixels.

        Every program differentiates all input fields anew for its share of the output fields.
        """
        (tile, warps), cut = self.tile, self.cut(adjoint)
        programs = _whole_rounds(parts(pixels, tile) * cut.programs, warps)
        return programs * self._program(tile, rounded(self._made(not adjoint), FIELDS), cut)

    def _program(self, pixels: int, given: int, cut: Cut) -> FloatArray:
        one, count = self.shares[0], len(self.shares) * pixels * given
        features = count * one.batch * one.inner
        taps = count * one.chunks * one.plan.basis.size**2
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
        cut, one = self.gram_cut, self.shares[0]
        each = len(self.shares) * 2 * one.batch * one.inner
        return rounded(self.in_fields, FIELDS) * each * cut.programs * cut.fields

    @property
    def laid(self) -> int:
        """Numbers of a pixel of the output's gradient as the tensor cores read it."""
        each = len(self.shares) * 2 * self.shares[0].batch
        return self.gram_cut.programs * self.gram_cut.fields * each

    def splits(self, batch: int, in_pixels: int, out_pixels: int) -> int:
        """How many programs share the pixels: what the GPU holds, as far as there is memory."""
        running = at_a_time(self.gram_tile[1]) // self._gram_programs
        most = max(1, min(running, self._free(batch, in_pixels) // 4 // (4 * self.weights)))
        return max(1, min(most, parts(batch * out_pixels, _GRAM_PIXELS)))

    def _free(self, batch: int, in_pixels: int) -> int:
        """Bytes that the gradient to the weights may take."""
        plan, channels = self.layout.plan, self.layout.plan.analysis.shape[1]
        dense = 2 * channels**2 * plan.basis.size**2 * self.itemsize
        ours = plan.weights * 8 + 2 * self.layout.batch * self.layout.inner * self.itemsize
        free = batch * in_pixels * self.in_fields * channels * self.itemsize
        return free + max(_LEAST, self.in_fields * self.out_fields * (dense - ours))

    @property
    def _gram_programs(self) -> int:
        return rounded(self.in_fields, FIELDS) // self.gram_tile[0] * self.gram_cut.programs

    def gram(self, pixels: int, splits: int) -> FloatArray:
        """Products, features and taps of the gradient to the weights."""
        fields, warps = self.gram_tile
        programs = _whole_rounds(self._gram_programs * splits, warps)
        turns = parts(parts(pixels, _GRAM_PIXELS), splits)
        return programs * turns * self._program(_GRAM_PIXELS, fields, self.gram_cut)


class KernelsWithRoles(Kernels):
    """The kernels of a layer of 16-bit numbers whose warps have roles.

    Some differentiate, others multiply, of one program on each processor. It is for the caller to
    ask whether there are such for the layer: `convolves`, `sums`.
    """

    __slots__ = ()

    @property
    def shares(self) -> tuple[Scheme, ...]:
        """The layer, or both halves of one that has many targets."""
        if self.layout.batch in _ROLE_TARGETS:
            return (self.layout,)
        return halves(self.layout) or () if self.layout.batch == _HALVED_TARGETS else ()

    def convolves(self, adjoint: bool) -> bool:
        """Whether warps of the layer or its adjoint have roles."""
        return self._alike and next(self._cuts(adjoint), None) is not None

    @property
    def sums(self) -> bool:
        """Whether warps have roles in the gradient to the weights."""
        return self._alike and next(self._gram_cuts(), None) is not None

    @property
    def _alike(self) -> bool:
        """Whether the products of all chunks of slots are alike, and every chunk has some."""
        lengths = [[len(rows[0]) for rows in share.lists] for share in self.shares]
        every = (
            found == share.chunks * found[:1]
            for found, share in zip(lengths, self.shares, strict=True)
        )
        return bool(lengths) and all(every)

    @property
    def weights(self) -> int:
        """Sums that one program after another adds to, without padding."""
        cut, each = self.gram_cut, len(self.shares) * 2 * max(one.count for one in self.shares)
        return rounded(self.in_fields, FIELDS) * each * cut.programs * cut.fields

    @property
    def _length(self) -> int:
        """Features of a target in a chunk of slots."""
        return self.shares[0].inner // self.shares[0].chunks

    @property
    def tile(self) -> tuple[int, int]:
        """Pixels and warps of a program: those that multiply, which the others add to."""
        return _ROWS, 4

    def cut(self, adjoint: bool) -> Cut:
        """The programs of the layer or its adjoint."""
        return next(self._cuts(adjoint))

    def _cuts(self, adjoint: bool) -> Iterator[Cut]:
        each = self.shares[0].batch * FIELDS * self._length * 2
        return self._fitting(
            self._made(adjoint), lambda fields: _SHARED // (each * (_ROWS + 2 * fields))
        )

    def _fitting(self, fields: int, stages: Callable[[int], int]) -> Iterator[Cut]:
        """Ways to cut output fields whose sums fit into registers, fewest programs first.

        ``stages`` says for how many there is memory.
        """
        for programs in range(1, parts(fields, FIELDS) + 1):
            found = Cut.divided(fields, programs, 1, FIELDS)
            held = 2 * self.shares[0].batch * found.fields
            if held <= _ROLE_ACCUMULATORS and stages(found.fields) > 1:
                yield found

    def convolution(self, pixels: int, adjoint: bool) -> FloatArray:
        """Products, features and taps; programs stay and take one tile after the other."""
        cut, given = self.cut(adjoint), rounded(self._made(not adjoint), FIELDS)
        running = max(1, PROCESSORS // cut.programs)
        programs = parts(parts(pixels, _ROWS), running) * PROCESSORS
        return programs * self._program(_ROWS, given, cut)

    @property
    def _gram_features(self) -> int:
        """Of a field and target, padded."""
        return max(_ROWS // FIELDS, power_of_two(self._length))

    @property
    def gram_tile(self) -> tuple[int, int]:
        """Input fields and warps of a program of the gradient to the weights."""
        return _ROWS // self._gram_features, 4

    @property
    def gram_pixels(self) -> int:
        """At a time."""
        return _ROLE_THREADS // self.gram_tile[0]

    @property
    def gram_cut(self) -> Cut:
        """The output fields of the gradient to the weights."""
        return next(self._gram_cuts())

    def _gram_cuts(self) -> Iterator[Cut]:
        if self._gram_features > _ROWS:
            return iter(())
        each = self.shares[0].batch * _ROWS * 2
        left = _SHARED - 2 * each * self.gram_pixels
        return self._fitting(self.out_fields, lambda fields: left // (2 * each * fields))

    def splits(self, batch: int, in_pixels: int, out_pixels: int) -> int:
        """How many programs share the pixels: those that end together, if there is memory."""
        programs, free = self._gram_programs, self._free(batch, in_pixels)
        most = max(1, free // 4 // (4 * self.weights))
        if programs * most < PROCESSORS:
            most = max(1, free // 2 // (4 * self.weights))
        found = min(
            range(1, min(most, PROCESSORS) + 1),
            key=lambda n: (parts(programs * n, PROCESSORS) / n, n),
        )
        return max(1, min(found, parts(batch * out_pixels, self.gram_pixels)))

    def gram(self, pixels: int, splits: int) -> FloatArray:
        """Products, features and taps of the gradient to the weights, chunk after chunk."""
        tile, (fields, _) = self.gram_pixels, self.gram_tile
        programs = rounded(self._gram_programs * splits, PROCESSORS)
        turns = parts(parts(pixels, tile), splits)
        padded = np.array([self._gram_features / self._length, 1, 1])
        return programs * turns * padded * self._program(tile, fields, self.gram_cut)
