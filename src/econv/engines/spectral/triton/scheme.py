"""The memory layout of a plan's kernels: the order of slots, features and weights.

It needs NumPy alone. `source` and `econv.engines.spectral.hopper.source` write kernels by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from econv.gpu.sizes import power_of_two
from econv.plan import SpectralPlan, of_plan

_BEGINNINGS = 4
_IMPOSSIBLE = 1 << 16  # features

MANY = 16
"""Targets from which on a layer is made by halves."""

FIELDS = 4
"""Fields of one tile: with four features each they fill the shortest product, 16."""

HEADROOM = 7
"""The largest number of an image is scaled to at least 2^7 and less than 2^8. Derivatives may be
2^7.9 times as large and stay below float16's largest number, 2^16. All but the smallest 2^-21 of
the image keep every digit."""


class Target(NamedTuple):
    """Two output slots and the features that reach them: a matrix product of its own.

    It is a row of a block with two columns, or two blocks of one column each: all targets are
    alike.
    """

    slots: tuple[int, ...]
    """The slots of the output's spectrum, one for each column; −1: none."""
    entries: dict[tuple[int, int], tuple[int, float]]
    """(feature, column) → spectral weight and sign; those that are not there are zero."""
    irrep: int

    @property
    def features(self) -> list[int]:
        """The numbers of the features, each once."""
        return list(dict.fromkeys(feature for feature, _ in self.entries))


@dataclass(frozen=True, eq=False)
class Scheme:
    """The order in which the kernels of a plan keep slots, features and weights.

    The slots of one target are contiguous, both in the input's spectrum and in the output's.
    """

    plan: SpectralPlan
    vector: int
    """Slots that a thread reads at a time."""
    order: tuple[Target, ...]
    """All targets of the plan, as their slots lie."""
    half: tuple[Target, ...] = ()
    """Those that this layout has, where it is one of two."""
    before: tuple[int, ...] = ()
    """Slots that another launch gave before this one."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """What the products give."""
        return self.half or self.order

    @property
    def batch(self) -> int:
        """How many products are made at a time: a power of two, some of them of zeros."""
        return power_of_two(len(self.targets))

    @cached_property
    def positions(self) -> np.ndarray:
        """Where each slot of the plan's spectrum lies."""
        slots = [slot for target in self.order for slot in target.slots]
        found = np.zeros(len(self.plan.analysis) + 1, dtype=np.int64)
        found[slots] = np.arange(len(slots))
        return found[:-1]  # without that of −1

    @property
    def width(self) -> int:
        """Slots that are read at a time: the vector, or less for small groups."""
        return min(self.vector, 2 * power_of_two(len(self.order)))

    @property
    def chunks(self) -> int:
        """How many times `width` slots the spectrum takes."""
        return -(-2 * len(self.order) // self.width)

    @cached_property
    def _chunk_of(self) -> np.ndarray:
        """The slot chunk that each feature reads; −1 if it reads two."""
        used, chunk = self.plan.feature_factors != 0, self.positions // self.width
        one, two = chunk[self.plan.feature_slots].T
        return np.where(used.all(axis=1) & (one != two), -1, np.where(used[:, 0], one, two))

    @cached_property
    def counts(self) -> np.ndarray:
        """How many features each target of the plan finds in each slot chunk.

        More than can be if a feature reads two chunks: there are no kernels for that.
        """
        if (self._chunk_of < 0).any():
            return np.full((len(self.order), self.chunks), _IMPOSSIBLE)
        chunks = [self._chunk_of[target.features] for target in self.order]
        return np.array([np.bincount(found, minlength=self.chunks) for found in chunks])

    @cached_property
    def lengths(self) -> list[int]:
        """The padded number of features of a target for each slot chunk."""
        return [int(most + -most % 4) for most in self.counts.max(axis=0)]

    @property
    def length(self) -> int:
        """Features of a target in each slot chunk, with padding: in both halves as many."""
        return max(self.lengths)

    @property
    def slots(self) -> tuple[int, ...]:
        """Those of the output's spectrum that the products give, two for each; −1: none."""
        found = [slot for target in self.targets for slot in target.slots]
        return (*found, *[-1] * (2 * self.batch - len(found)))

    @cached_property
    def output_analysis(self) -> np.ndarray:
        """Channels to `slots`, ``[channels, 2 * batch]``."""
        slots = np.array(self.slots)
        return np.where(slots >= 0, self.plan.analysis.T[:, slots], 0.0)

    @cached_property
    def analysis(self) -> np.ndarray:
        """Channels to slots where they lie, ``[channels, chunks * width]``."""
        found = np.zeros((self.plan.analysis.shape[1], self.chunks * self.width))
        found[:, self.positions] = self.plan.analysis.T
        return found

    @cached_property
    def lists(self) -> np.ndarray:
        """The features of each slot chunk and target, ``[chunks, batch, length]``; −1: padding."""
        found = np.full((self.chunks, self.batch, self.length), -1)
        for chunk, (t, target) in itertools.product(range(self.chunks), enumerate(self.targets)):
            names = self._paired([f for f in target.features if self._chunk_of[f] == chunk])
            found[chunk, t, : len(names)] = names
        return found

    @property
    def features(self) -> np.ndarray:
        """`lists` target by target, ``[batch, inner]``."""
        return self.lists.swapaxes(0, 1).reshape(self.batch, self.inner)

    def terms(self, feature: int) -> dict[tuple[int, int], tuple[int, float]]:
        """A feature's terms: (stencil, pair of slots) → which of the two, and the factor."""
        plan, found = self.plan, {}
        for t in np.flatnonzero(plan.feature_factors[feature]):
            slot = int(self.positions[plan.feature_slots[feature, t]]) % self.width
            factor = float(plan.feature_factors[feature, t])
            found[int(plan.feature_stencils[feature, t]), slot // 2] = (slot % 2, factor)
        return found

    def derivatives(self, chunk: int) -> set[tuple[int, int]]:
        """What the features of a slot chunk read: (stencil, pair of slots)."""
        features = self.lists[chunk][self.lists[chunk] >= 0].tolist()
        return {key for feature in features for key in self.terms(feature)}

    def alike(self, one: int, two: int) -> bool:
        """Whether two features read the same derivatives, each the slot that the other does not.

        Then whole pairs of slots are added, as they are or swapped.
        """
        left, right = self.terms(one), self.terms(two)
        return left.keys() == right.keys() and all(left[k][0] != right[k][0] for k in left)

    def pairs(self, chunk: int, first: int, size: int) -> list[list[tuple[int, int]]]:
        """Features of a slot chunk two by two: a list for each pair of columns, of all targets.

        Padding repeats features of the same target, whose weights are zero.
        """
        lists = self.lists[chunk]
        missing = max(0, first + size - self.length)
        found = np.pad(lists, ((0, 0), (0, missing)), constant_values=-1).reshape(self.batch, -1, 2)
        spare = np.where(found[:, :1, 1:] >= 0, found[:, :1], lists[lists >= 0][0])
        found = np.where(found[:, :, :1] >= 0, found, spare)
        found = np.where(found >= 0, found, found[:, :, :1])
        columns = found.swapaxes(0, 1)[first // 2 : (first + size) // 2].tolist()
        return [[(one, two) for one, two in column] for column in columns]

    def _paired(self, names: list[int]) -> list[int]:
        """The features in an order in which neighbours are alike, as far as there are such."""
        rest, found, odd = list(names), [], []
        while rest:
            one = rest.pop(0)
            two = next((f for f in rest if self.alike(one, f)), None)
            if two is None:
                odd.append(one)
            else:
                rest.remove(two)
                found += [one, two]
        return found + odd

    @property
    def inner(self) -> int:
        """Features of a target over all chunks, padding counted."""
        return self.chunks * self.length

    @cached_property
    def unpadded(self) -> np.ndarray:
        """Which of all features stands at each offset, ``[batch, inner]``; −1: padding."""
        there = self.features >= 0
        return np.where(there, np.cumsum(there).reshape(there.shape) - 1, -1)

    @property
    def count(self) -> int:
        """Features of all targets."""
        return int(self.unpadded.max()) + 1

    @property
    def pieces(self) -> tuple[int, ...]:
        """How many features each product of a slot chunk takes: powers of two, at most 32."""
        found: list[int] = []
        while left := self.length - sum(found):
            found.append(min(32, 1 << (left.bit_length() - 1)))
        return tuple(found)

    def filled(self, chunk: int, pieces: Sequence[int]) -> list[int]:
        """Which products of a slot chunk have features: others are padding for every target."""
        parts = np.split(self.lists[chunk], np.cumsum(pieces), axis=1)[: len(pieces)]
        return [number for number, part in enumerate(parts) if (part >= 0).any()]

    @cached_property
    def used_pieces(self) -> tuple[int, ...]:
        """`pieces` without those at the end that no chunk fills."""
        last = max(self.filled(chunk, self.pieces)[-1] for chunk in range(self.chunks))
        return self.pieces[: last + 1]

    @cached_property
    def piece_of(self) -> np.ndarray:
        """For each feature of a chunk where its piece begins and how long it is."""
        sizes = np.array(self.pieces, dtype=np.int32)
        return np.repeat(np.stack([np.cumsum(sizes, dtype=np.int32) - sizes, sizes], 1), sizes, 0)

    @cached_property
    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """The spectral weight (−1: none) and sign at each offset, ``[batch * inner * 2]``."""
        known = {key: value for target in self.targets for key, value in target.entries.items()}
        offsets = itertools.product(self.features.ravel().tolist(), range(2))
        entries, signs = zip(*(known.get(key, (-1, 0.0)) for key in offsets), strict=True)
        return np.array(entries, dtype=np.int32), np.array(signs, dtype=np.float32)

    @cached_property
    def adjoint_entries(self) -> tuple[np.ndarray, np.ndarray]:
        """`entries` of the adjoint layer, as spectral weights of this one."""
        matrix = self.plan.adjoint_map  # a permutation with signs
        if not ((matrix != 0).sum(axis=0) == 1).all():
            raise ArithmeticError(f"the adjoint of {self.plan!r} mixes spectral weights")
        entries, signs = self.entries
        source = np.abs(matrix).argmax(axis=0)[entries]
        adjoint = np.where(entries >= 0, source, -1).astype(np.int32)
        return adjoint, (signs * matrix[source, entries]).astype(np.float32)

    @cached_property
    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """For each spectral weight where it stands and with which sign.

        −1: nowhere else; −2 first where it is none of this layout's.
        """
        entries, signs = self.entries
        found = [np.flatnonzero(entries == n).tolist() or [-2] for n in range(self.plan.weights)]
        where = np.array([*itertools.zip_longest(*found, fillvalue=-1)], dtype=np.int32).T.copy()
        return where, np.where(where >= 0, signs[where], np.float32(0))


@of_plan
def folded(plan: SpectralPlan) -> np.ndarray:
    """Stencils on sums and differences of taps, ``[stencils, size, size]``, or of volumes.

    Along each axis the taps t become, in this order, x(0), x(t) + x(−t) for t = 1 …, and
    x(t) − x(−t) for t = 1 …: stencils that are even or odd there need half of them.
    """
    stencils, size, reach = plan.stencils, plan.basis.size, plan.basis.size // 2
    fold = np.zeros((size, size))
    fold[0, reach] = 1.0
    for t in range(1, reach + 1):
        fold[t, [reach - t, reach + t]] = 0.5
        fold[reach + t, [reach - t, reach + t]] = -0.5, 0.5
    spec = {3: "ay,syx,bx->sab", 4: "az,by,szyx,cx->sabc"}[stencils.ndim]
    found = np.einsum(spec, *[fold] * (stencils.ndim - 2), stencils, fold)
    return np.where(np.abs(found) <= 1e-12 * np.abs(found).max(), 0.0, found)


def _targets(plan: SpectralPlan) -> list[Target]:
    """The targets of a plan from fields to as many alike; blocks of one column two by two."""
    found: list[Target] = []
    single: list[Target] = []
    for block in plan.blocks:
        if block.columns > 2:
            raise ArithmeticError(
                f"expected blocks of one or two columns; {plan!r} has {block.columns}"
            )
        for features, slots in zip(block.features.tolist(), block.slots.tolist(), strict=True):
            entries = {
                (features[k], n): (int(block.entries[k, n]), float(block.signs[k, n]))
                for k, n in np.ndindex(block.entries.shape)
            }
            target = Target(tuple(slots), entries, block.irrep)
            (found if block.columns == 2 else single).append(target)
    for first in range(0, len(single), 2):
        both = single[first : first + 2]
        slots = (*[target.slots[0] for target in both], -1)[:2]
        entries = {(f, n): v for n, one in enumerate(both) for (f, _), v in one.entries.items()}
        found.append(Target(slots, entries, both[0].irrep))
    return found


def _evened(layout: Scheme) -> Scheme:
    """Targets in an order in which few find more than eight features in one chunk of slots.

    Blocks are swapped as long as that helps, from several starts. Long chunks come first.
    """
    blocks = [list(rows) for _, rows in itertools.groupby(layout.order, lambda t: t.irrep)]

    def arranged(order: Sequence[int]) -> Scheme:
        targets = [target for number in order for target in blocks[number]]
        return replace(layout, order=tuple(targets))

    def cost(order: Sequence[int]) -> tuple[int, int]:
        """Features beyond eight in a chunk, and how unevenly they come."""
        counts = arranged(order).counts
        return int(np.maximum(counts - 8, 0).sum()), int((counts**2).sum())

    make = np.random.default_rng(0)
    best = order = sorted(range(len(blocks)), key=lambda number: -len(blocks[number]))
    for _ in range(_BEGINNINGS):
        now, before = cost(order), None
        while now != before:
            before = now
            for one, two in itertools.combinations(range(len(order)), 2):
                other = list(order)
                other[one], other[two] = other[two], other[one]
                if (found := cost(other)) < now:
                    order, now = other, found
        best = min(best, order, key=cost)
        order = make.permutation(len(order)).tolist()
    evened = arranged(best)
    each = evened.width // 2
    # Targets that do not fill their chunk stay behind.
    full = sorted(range(len(evened.order) // each), key=lambda n: -evened.lengths[n])
    order = [n * each + k for n in full for k in range(each)]
    order += range(len(order), len(evened.order))
    return replace(layout, order=tuple(evened.order[n] for n in order))


@lru_cache(maxsize=512)
def scheme(plan: SpectralPlan, vector: int) -> Scheme:
    """The scheme of a plan whose kernels read ``vector`` slots at a time.

    A target should find as many features in one chunk of slots as in another: irreps of
    neighbouring angular frequencies alternate where that helps.
    """
    group = plan.basis.group

    def frequency(target: Target) -> int:
        """The angular frequency of an irrep."""
        irrep = group.irreps[target.irrep]
        cosine = np.trace(irrep.matrices[1 % group.rotations]) / irrep.dimension
        return round(np.arccos(np.clip(cosine, -1, 1)) * group.rotations / (2 * np.pi))

    def total(layout: Scheme) -> int:
        return sum(layout.lengths)

    # Rows of one block read the same slots and stay together, before targets that stand alone.
    rows = {block.irrep: block.rows for block in plan.blocks}
    orders = [
        sorted(_targets(plan), key=lambda t: (frequency(t) % period, -rows[t.irrep]))
        for period in (1, 2, 4)
    ]
    best = min((Scheme(plan, vector, tuple(order)) for order in orders), key=total)
    if best.batch >= MANY:
        best = min(best, _evened(best), key=total)
    if best.length >= _IMPOSSIBLE:
        raise ArithmeticError(f"a feature of {plan!r} reads slots that do not lie together")
    return best


@lru_cache(maxsize=512)
def halves(layout: Scheme) -> tuple[Scheme, Scheme] | None:
    """Two layouts of half of the targets each; nothing where these have derivatives in common.

    Turning by a half circle changes the sign of derivatives of odd frequency, and of slots of odd
    irreps. Targets of even irreps read even derivatives of even slots and odd ones of odd slots;
    those of odd irreps read the rest. So each half of the targets takes half of the derivatives.
    """
    reads = [
        {(c, key) for c, row in enumerate(rows) for f in row[row >= 0] for key in layout.terms(f)}
        for rows in layout.lists.swapaxes(0, 1)[: len(layout.targets)]
    ]
    shared = np.array([[bool(one & two) for two in reads] for one in reads])
    connected = np.linalg.matrix_power(shared, len(reads))
    groups = sorted({tuple(np.flatnonzero(row).tolist()) for row in connected})
    if [len(group) for group in groups] != [len(reads) // 2] * 2:
        return None
    one, two = (replace(layout, half=tuple(layout.order[n] for n in group)) for group in groups)
    return one, replace(two, before=one.slots)
