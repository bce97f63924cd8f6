"""The memory layout of a plan's kernels: the order of slots, features and weights.

It needs NumPy alone. `source` and `econv.engines.spectral.hopper.source` write kernels by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from econv.plan import SpectralPlan

_MANY = 16  # targets: those of which a layer is made by halves
_BEGINNINGS = 4

FIELDS = 4
"""Fields of one tile: with four features each they fill the shortest product, 16."""

HEADROOM = 7
"""The largest number of an image is scaled to at least 2^7 and less than 2^8. Derivatives may be
2^7.9 times as large and stay below float16's largest number, 2^16. All but the smallest 2^-21 of
the image keep every digit."""


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


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

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """What the products give, in the order in which their slots lie.

        A target should find as many features in one chunk of slots as in another: irreps of
        neighbouring angular frequencies alternate where that helps.
        """
        group = self.plan.basis.group
        if self.plan.source != self.plan.target:
            raise ValueError(f"expected equal fields before and after; got {self.plan!r}")
        found: list[Target] = []
        single: list[Target] = []
        for block in self.plan.blocks:
            if block.columns > 2:
                raise ArithmeticError(
                    f"expected blocks of one or two columns; {self.plan!r} has {block.columns}"
                )
            for row in range(block.rows):
                entries = {
                    (int(block.features[row, k]), n): (
                        int(block.entries[k, n]),
                        float(block.signs[k, n]),
                    )
                    for k, n in np.ndindex(block.entries.shape)
                }
                target = Target(tuple(block.slots[row].tolist()), entries, block.irrep)
                (found if block.columns == 2 else single).append(target)
        for first in range(0, len(single), 2):
            slots, entries, irrep = single[first]
            for other in single[first + 1 : first + 2]:
                slots += other.slots
                entries = entries | {(f, 1): value for (f, _), value in other.entries.items()}
            found.append(Target((*slots, -1)[:2], entries, irrep))

        def frequency(target: Target) -> int:
            """The angular frequency of an irrep."""
            irrep = group.irreps[target.irrep]
            cosine = np.trace(irrep.matrices[1 % group.rotations]) / irrep.dimension
            return round(np.arccos(np.clip(cosine, -1, 1)) * group.rotations / (2 * np.pi))

        # Rows of one block read the same slots and stay together, before targets that stand alone.
        rows = {block.irrep: block.rows for block in self.plan.blocks}
        orders = [
            sorted(found, key=lambda t: (frequency(t) % period, -rows[t.irrep]))
            for period in (1, 2, 4)
        ]
        orders.append(sorted(found, key=lambda t: -rows[t.irrep]))
        possible = [order for order in orders if self._counts(order) is not None]
        best = min(possible, key=lambda order: sum(self._lengths(order)))
        if power_of_two(len(best)) >= _MANY:
            best = min(best, self._evened(best), key=lambda order: sum(self._lengths(order)))
        return tuple(best)

    def _evened(self, targets: Sequence[Target]) -> list[Target]:
        """Targets in an order in which few find more than eight features in one chunk of slots.

        Blocks are swapped as long as that helps, from several starts. Long chunks come first.
        """
        blocks = [list(rows) for _, rows in itertools.groupby(targets, lambda t: t.irrep)]

        def listed(order: Sequence[int]) -> list[Target]:
            return [target for number in order for target in blocks[number]]

        def cost(order: Sequence[int]) -> tuple[int, ...]:
            """Features beyond eight in a chunk, and how unevenly they come."""
            found = self._counts(listed(order))
            if found is None:
                return (1, 0, 0)
            return 0, int(np.maximum(found - 8, 0).sum()), int((found**2).sum())

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
        if cost(best)[0]:
            return list(targets)
        evened = listed(best)
        each, lengths = self._per_chunk(evened), self._lengths(evened)
        full = sorted(range(len(evened) // each), key=lambda n: -lengths[n])
        rest = evened[len(full) * each :]  # which do not fill their chunk: they stay behind
        return [target for n in full for target in evened[n * each : (n + 1) * each]] + rest

    def _per_chunk(self, targets: Sequence[Target]) -> int:
        """How many targets have their slots in one chunk."""
        return min(self.vector, 2 * power_of_two(len(targets))) // 2

    @property
    def batch(self) -> int:
        """How many products are made at a time: a power of two, some of them of zeros."""
        return power_of_two(len(self.targets))

    @cached_property
    def positions(self) -> np.ndarray:
        """Where each slot of the plan's spectrum lies."""
        return self._positions(self.targets)

    def _positions(self, targets: Sequence[Target]) -> np.ndarray:
        found = np.zeros(self.plan.analysis.shape[0], dtype=np.int64)
        for number, target in enumerate(targets):
            for column, slot in enumerate(target.slots):
                if slot >= 0:
                    found[slot] = 2 * number + column
        return found

    @property
    def width(self) -> int:
        """Slots that are read at a time: the vector, or less for small groups."""
        return min(self.vector, 2 * self.batch)

    @property
    def chunks(self) -> int:
        """How many times `width` slots the spectrum takes."""
        return -(-2 * len(self.targets) // self.width)

    def _chunk_of(self, targets: Sequence[Target]) -> np.ndarray | None:
        """The slot chunk that each feature reads; nothing if one reads two."""
        plan = self.plan
        chunk = self._positions(targets)[plan.feature_slots] // (2 * self._per_chunk(targets))
        used = plan.feature_factors != 0
        if (used.all(axis=1) & (chunk[:, 0] != chunk[:, 1])).any():
            return None
        return np.where(used[:, 0], chunk[:, 0], chunk[:, 1])

    def _counts(self, targets: Sequence[Target]) -> np.ndarray | None:
        """How many features each target finds in each slot chunk; nothing if one reads two."""
        chunk_of = self._chunk_of(targets)
        if chunk_of is None:
            return None
        chunks = chunk_of.max() + 1
        return np.array([np.bincount(chunk_of[t.features], minlength=chunks) for t in targets])

    def _lengths(self, targets: Sequence[Target]) -> list[int]:
        """The padded number of features of a target for each slot chunk."""
        counts = self._counts(targets)
        assert counts is not None
        return [int(most + -most % 4) for most in counts.max(axis=0)]

    @property
    def length(self) -> int:
        """Features of a target in each slot chunk, with padding."""
        return max(self._lengths(self.targets))

    @property
    def slots(self) -> tuple[int, ...]:
        """Those of the output's spectrum that the products give, two for each; −1: none."""
        found = [slot for target in self.targets for slot in target.slots]
        return (*found, *[-1] * (2 * self.batch - len(found)))

    @property
    def before(self) -> tuple[int, ...]:
        """Slots that another launch gave before this one."""
        return ()

    @property
    def complete(self) -> bool:
        """Whether all slots are there, these and those before."""
        return True

    @cached_property
    def output_analysis(self) -> np.ndarray:
        """Channels to `slots`, ``[channels, 2 * batch]``."""
        found = np.zeros((self.plan.analysis.shape[1], 2 * self.batch))
        for offset, slot in enumerate(self.slots):
            if slot >= 0:
                found[:, offset] = self.plan.analysis[slot]
        return found

    def derivatives(self, chunk: int) -> set[tuple[int, int]]:
        """What the features of a slot chunk read: (stencil, pair of slots)."""
        features = (feature for row in self.lists[chunk] for feature in row if feature >= 0)
        return {key for feature in features for key in self.terms(feature)}

    @cached_property
    def analysis(self) -> np.ndarray:
        """Channels to slots where they lie, ``[channels, chunks * width]``."""
        found = np.zeros((self.plan.analysis.shape[1], self.chunks * self.width))
        found[:, self.positions] = self.plan.analysis.T
        return found

    @cached_property
    def lists(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each slot chunk and target the features, −1 for padding: all lists are as long."""
        chunk_of, length = self._chunk_of(self.targets), self.length
        assert chunk_of is not None
        found = []
        for chunk in range(self.chunks):
            rows = []
            for target in self.targets:
                names = self._paired([f for f in target.features if chunk_of[f] == chunk])
                rows.append((*names, *[-1] * (length - len(names))))
            rows += [(-1,) * length] * (self.batch - len(rows))
            found.append(tuple(rows))
        return tuple(found)

    def terms(self, feature: int) -> dict[tuple[int, int], tuple[int, float]]:
        """A feature's terms: (stencil, pair of slots) → which of the two, and the factor."""
        plan = self.plan
        found = {}
        for t in range(2):
            factor = float(plan.feature_factors[feature, t])
            if factor:
                slot = int(self.positions[plan.feature_slots[feature, t]]) % self.width
                found[int(plan.feature_stencils[feature, t]), slot // 2] = (slot % 2, factor)
        return found

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
        spare = next(f for names in lists for f in names if f >= 0)
        found = []
        for k in range(first, first + size, 2):
            column = []
            for names in lists:
                one, two = (*names[k : k + 2], -1, -1)[:2]
                if one < 0:
                    one, two = names[:2] if names[1] >= 0 else (spare, spare)
                column.append((one, two if two >= 0 else one))
            found.append(column)
        return found

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
        rows = [[f for rows in self.lists for f in rows[t]] for t in range(self.batch)]
        there = np.array(rows) >= 0
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
        found, first = [], 0
        for number, size in enumerate(pieces):
            if any(f >= 0 for names in self.lists[chunk] for f in names[first : first + size]):
                found.append(number)
            first += size
        return found

    @cached_property
    def used_pieces(self) -> tuple[int, ...]:
        """`pieces` without those at the end that no chunk fills."""
        last = max(self.filled(chunk, self.pieces)[-1] for chunk in range(self.chunks))
        return self.pieces[: last + 1]

    @cached_property
    def piece_of(self) -> np.ndarray:
        """For each feature of a chunk where its piece begins and how long it is."""
        rows: list[tuple[int, int]] = []
        for size in self.pieces:
            rows += [(len(rows), size)] * size
        return np.array(rows, dtype=np.int32)

    @cached_property
    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """The spectral weight (−1: none) and sign at each offset, ``[batch * inner * 2]``."""
        entries = np.full((self.batch, self.inner, 2), -1, dtype=np.int32)
        signs = np.zeros((self.batch, self.inner, 2), dtype=np.float32)
        for t, target in enumerate(self.targets):
            names = [f for rows in self.lists for f in rows[t]]
            for k, feature in enumerate(names):
                for column in range(2):
                    known = target.entries.get((feature, column))
                    if known is not None:
                        entries[t, k, column], signs[t, k, column] = known
        return entries.ravel(), signs.ravel()

    @cached_property
    def adjoint_entries(self) -> tuple[np.ndarray, np.ndarray]:
        """`entries` of the adjoint layer, as spectral weights of this one."""
        matrix = self.plan.adjoint_map  # a permutation with signs
        if not ((matrix != 0).sum(axis=0) == 1).all():
            raise ArithmeticError(f"the adjoint of {self.plan!r} mixes spectral weights")
        source = np.abs(matrix).argmax(axis=0)
        entries, signs = self.entries
        adjoint = np.where(entries >= 0, source[entries], -1).astype(np.int32)
        factor = np.where(entries >= 0, matrix[source[entries], entries], 0.0)
        return adjoint, (signs * factor).astype(np.float32)

    def owned(self, weight: int) -> bool:
        """Whether a spectral weight is one of this layout's."""
        return True

    @cached_property
    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """For each spectral weight where it stands and with which sign.

        −1: nowhere; −2 where it is none of this layout's.
        """
        entries, signs = self.entries
        lists = [np.flatnonzero(entries == n) for n in range(self.plan.weights)]
        most = max(map(len, lists))
        where = np.full((len(lists), most), -1, dtype=np.int32)
        factors = np.zeros((len(lists), most), dtype=np.float32)
        for number, found in enumerate(lists):
            if not self.owned(number):
                where[number] = -2
            where[number, : len(found)] = found
            factors[number, : len(found)] = signs[found]
        return where, factors

    @cached_property
    def coefficients(self) -> np.ndarray:
        """The stencils on sums and differences of taps, ``[stencils, size, size]``.

        Along each axis the taps t become, in this order, x(0), x(t) + x(−t) for t = 1 …, and
        x(t) − x(−t) for t = 1 …: stencils that are even or odd there need half of them.
        """
        stencils = self.plan.stencils
        size = stencils.shape[-1]
        reach = size // 2
        fold = np.zeros((size, size))
        fold[0, reach] = 1.0
        for t in range(1, reach + 1):
            fold[t, [reach - t, reach + t]] = 0.5
            fold[reach + t, [reach - t, reach + t]] = -0.5, 0.5
        found = np.einsum("ay,syx,bx->sab", fold, stencils, fold)
        return np.where(np.abs(found) <= 1e-12 * np.abs(found).max(), 0.0, found)

    def mirrored(self) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """Taps that mirror each other, as far as any stencil reads them.

        How far down and across from the centre they lie, and where in `coefficients` the sums (and
        differences) stand that they make along each axis.
        """
        reach = self.coefficients.shape[-1] // 2
        for dy, dx in itertools.product(range(reach + 1), repeat=2):
            rows = (dy, reach + dy) if dy else (0,)
            columns = (dx, reach + dx) if dx else (0,)
            if self.coefficients[:, rows][:, :, columns].any():
                yield dy, dx, rows, columns


@dataclass(frozen=True, eq=False)
class Half(Scheme):
    """Half of the targets of a scheme, which read derivatives that no other target does.

    Turning by a half circle changes the sign of derivatives of odd frequency, and of slots of odd
    irreps. Targets of even irreps read even derivatives of even slots and odd ones of odd slots;
    those of odd irreps read the rest. So each half of the targets takes half of the derivatives.
    """

    whole: Scheme
    numbers: tuple[int, ...]
    """Of its targets."""
    first: Half | None
    """The half that comes before this one."""

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        return tuple(self.whole.targets[number] for number in self.numbers)

    @property
    def before(self) -> tuple[int, ...]:
        return () if self.first is None else self.first.slots

    @property
    def complete(self) -> bool:
        return self.first is not None

    @cached_property
    def positions(self) -> np.ndarray:
        return self.whole.positions

    @property
    def width(self) -> int:
        return self.whole.width

    @property
    def chunks(self) -> int:
        return self.whole.chunks

    def owned(self, weight: int) -> bool:
        """Whatever the other half does not have is the first one's."""
        if self.first is None:
            _, other = halves(self.whole) or (None, self)
            return not (other.entries[0] == weight).any()
        return bool((self.entries[0] == weight).any())

    def _chunk_of(self, targets: Sequence[Target]) -> np.ndarray | None:
        return self.whole._chunk_of(self.whole.targets)

    @property
    def length(self) -> int:
        """As many as in the other half: their launches are cut alike."""
        return self.whole.length


@lru_cache(maxsize=512)
def halves(layout: Scheme) -> tuple[Half, Half] | None:
    """Both halves of a scheme; nothing where its targets have derivatives in common."""
    plan = layout.plan
    owner = list(range(len(layout.targets)))
    readers: dict[tuple[int, int], int] = {}
    for number, target in enumerate(layout.targets):
        for feature in target.features:
            for t in np.flatnonzero(plan.feature_factors[feature]):
                pair = int(layout.positions[plan.feature_slots[feature, t]]) // 2
                key = int(plan.feature_stencils[feature, t]), pair
                other = owner[readers.setdefault(key, number)]
                owner = [owner[number] if o == other else o for o in owner]
    groups = [tuple(n for n, o in enumerate(owner) if o == one) for one in dict.fromkeys(owner)]
    if len(groups) != 2 or len(groups[0]) != len(groups[1]):
        return None
    one = Half(plan, layout.vector, layout, groups[0], None)
    return one, Half(plan, layout.vector, layout, groups[1], one)


@lru_cache(maxsize=512)
def scheme(plan: SpectralPlan, vector: int) -> Scheme:
    """The scheme of a plan whose kernels read ``vector`` slots at a time."""
    return Scheme(plan, vector)
