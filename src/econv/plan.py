"""A PDO-eConv in Fourier space, step by step: the fixed arrays that the spectral engine runs on.

Every layer is linear in its input, in its weight and in the stencils, and commutes with the group.
In five steps, for each pixel:

1. *analysis*: the channels of each input field are transformed to its irreducible pieces;
2. *stencils*: fixed stencils, the same for every channel, differentiate what came out;
3. *features*: sums of derivatives (Clebsch–Gordan), of at most two in the plane, transform by one
   irrep;
4. *blocks*: Schur's lemma leaves one matrix product for each irrep, over the input fields;
5. *synthesis*: the irreducible pieces of each output field are transformed back to its channels.

The adjoint layer, which takes gradients of the output to gradients of the input, has the same form:
each stencil is plus or minus its own mirror image.

A plan that does not give exactly the layer's filters cannot be built. This module stays in numpy
float64; who runs the steps, and in which order, is the business of the engines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from econv.basis import FilterBasis, basis_of, filter_basis
from econv.fourier import KINDS, Copy, commutant, couple, decompose, representation, transform
from econv.groups import FloatArray, IntArray, frozen
from econv.harmonics import pieces as harmonic_pieces
from econv.operators import Polynomial, action, monomials
from econv.stencils import harmonic

__all__ = ["Block", "ParityError", "SpectralPlan", "of_plan", "plan_named", "spectral_plan"]

_Made = TypeVar("_Made")


class ParityError(ValueError):
    """A stencil is neither even nor odd."""


@dataclass(frozen=True, eq=False)
class Block:
    """One matrix product: what all features of one irrep give to one irrep of the output.

    For each of the ``rows``, output column n is Σ_k feature[row, k] · W[k, n], and the entry
    W[k, n] is ``signs[k, n]`` times the spectral weight number ``entries[k, n]``. Rows share the
    matrix.
    """

    irrep: int
    features: IntArray
    """Numbers of the features, ``[rows, inner]``."""
    slots: IntArray
    """Where the products go in the spectrum of the output, ``[rows, columns]``."""
    entries: IntArray
    """Numbers of the spectral weights, ``[inner, columns]``."""
    signs: FloatArray
    """Their signs, ``[inner, columns]``."""

    @property
    def rows(self) -> int:
        """How many vectors of features share the matrix."""
        return int(self.features.shape[0])

    @property
    def inner(self) -> int:
        """The length of such a vector, for each input field."""
        return int(self.features.shape[1])

    @property
    def columns(self) -> int:
        """The length of a product, for each output field."""
        return int(self.slots.shape[1])


class _Atoms(NamedTuple):
    """What one unit spectral weight does: sums of ±1 · (output slot, stencil, input slot)."""

    places: IntArray  # [weights, terms], into output slots × stencils × input slots
    factors: FloatArray  # [weights, terms], 0 where there are fewer terms


@dataclass(frozen=True)
class SpectralPlan:
    """The fixed arrays of one kind of layer: a value, made by `spectral_plan`.

    >>> from econv import filter_basis
    >>> plan = spectral_plan(filter_basis("p8"), "regular", "regular")
    >>> len(plan.stencils), plan.weights, [(b.rows, b.inner, b.columns) for b in plan.blocks]
    (12, 96, [(1, 12, 1), (1, 12, 1), (1, 24, 2), (1, 24, 2), (1, 24, 2)])
    >>> plan.multiplications
    168
    """

    basis: FilterBasis
    source: str
    """How an input field transforms: one of `econv.fourier.KINDS`."""
    target: str
    """How an output field transforms."""

    @cached_property
    def _operators(self) -> tuple[tuple[Copy, ...], FloatArray, FloatArray]:
        return _irreducible_stencils(self.basis)

    @property
    def stencils(self) -> FloatArray:
        """A basis of all turned stencils, ``[stencils, size, size]``.

        Each irreducible piece has unit length, and those of one irrep and parity are orthogonal, on
        the mean over their rows: derivatives that are rounded to few digits lose little.
        """
        return self._operators[1]

    @property
    def parity(self) -> FloatArray:
        """+1 for stencils that are their own mirror image through the centre, −1 for the others."""
        return self._operators[2]

    @cached_property
    def analysis(self) -> FloatArray:
        """Channels of an input field to its spectrum, ``[slots, channels]``, orthogonal."""
        return frozen(np.concatenate([c.basis for c in transform(self.basis.group, self.source)]))

    @cached_property
    def synthesis(self) -> FloatArray:
        """Spectrum of an output field to its channels, ``[channels, slots]``, orthogonal."""
        return frozen(
            np.concatenate([c.basis for c in transform(self.basis.group, self.target)]).T.copy()
        )

    @cached_property
    def _features_and_blocks(
        self,
    ) -> tuple[IntArray, IntArray, FloatArray, tuple[Block, ...], int]:
        return _features_and_blocks(self)

    @property
    def feature_stencils(self) -> IntArray:
        """Feature f is Σ_t factor[f, t] · stencil[f, t] applied to slot[f, t].

        ``[features, terms]``: two in the plane, and more in space; one that a feature lacks has the
        factor 0.
        """
        return self._features_and_blocks[0]

    @property
    def feature_slots(self) -> IntArray:
        """The slots of the input's spectrum that each feature reads, ``[features, terms]``."""
        return self._features_and_blocks[1]

    @property
    def feature_factors(self) -> FloatArray:
        """The factors of the terms, ``[features, terms]``; in the plane they are 1, −1 or 0."""
        return self._features_and_blocks[2]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The matrix products, one for each irrep of the output that the features reach.

        Slots of the output's spectrum that no block names are zero.
        """
        return self._features_and_blocks[3]

    @property
    def weights(self) -> int:
        """How many independent spectral weights a pair of fields has."""
        return self._features_and_blocks[4]

    @property
    def multiplications(self) -> int:
        """Multiplications of the blocks for each pixel and pair of fields."""
        return sum(block.rows * block.inner * block.columns for block in self.blocks)

    @cached_property
    def weight_map(self) -> FloatArray:
        """From a layer's weight to spectral weights, ``[coordinates, weights]``.

        Coordinates of a pair of fields, in the order of the layers' weights: (k, s) for regular
        fields to regular ones, (component, s) for others to regular, and (component, k, s) for
        regular to others; scalars and pseudoscalars have one component.
        """
        return _weight_map(self)

    @cached_property
    def adjoint(self) -> SpectralPlan:
        """The plan of the adjoint layer, from output gradients to input gradients.

        Its adjoint is this plan, even where plans that were forgotten have been made again.
        """
        if self.source == self.target:
            return self
        found = spectral_plan(self.basis, self.target, self.source)
        vars(found)["adjoint"] = self
        return found

    @cached_property
    def adjoint_map(self) -> FloatArray:
        """From spectral weights to those of the adjoint layer, ``[weights, weights]``."""
        return _adjoint_map(self)

    @cached_property
    def _atoms(self) -> _Atoms:
        return _atoms(self)

    @cached_property
    def name(self) -> str:
        """What stands for the plan where there is room for a text only, as in an exported graph.

        It determines the plan in every process: graphs that hold it are kept on disk. It says how
        to make the plan where words can say that; otherwise it holds a digest of the basis, and is
        understood by processes that have such a basis.
        """
        basis = self.basis
        words = {
            "group": basis.group.name,
            "operators": basis.operators.name,
            "stencils": basis.stencils.name,
            "size": basis.size,
            "accuracy": basis.stencils.accuracy,
            "source": self.source,
            "target": self.target,
        }
        name = json.dumps(words)
        try:
            if plan_named(name) == self:
                return name
        except ValueError:
            pass
        name = json.dumps({"basis": basis.digest, **words})
        _named.setdefault(name, self)
        return name

    @cached_property
    def made(self) -> dict[Any, Any]:
        """What `of_plan` keeps of it, which goes when the plan goes."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        return spectral_plan, (self.basis, self.source, self.target)

    def __repr__(self) -> str:
        return f"SpectralPlan({self.basis!r}, {self.source!r}, {self.target!r})"


def of_plan(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """A function of a plan and more, whose results are kept for as long as the plan lasts."""

    @wraps(make)
    def kept(plan: SpectralPlan, *more: Any) -> _Made:
        key = (make, *more)
        if key not in plan.made:
            plan.made[key] = make(plan, *more)
        found: _Made = plan.made[key]
        return found

    return kept


@lru_cache(maxsize=16)
def spectral_plan(basis: FilterBasis, source: str, target: str) -> SpectralPlan:
    """The plan of a layer from ``source`` to ``target`` fields, made once per process.

    Raises:
        ValueError: for an unknown kind of field.
    """
    for kind in (source, target):
        if kind not in KINDS:
            raise ValueError(f"unknown kind of field {kind!r}: expected one of {KINDS}")
    return SpectralPlan(basis, source, target)


_named: WeakValueDictionary[str, SpectralPlan] = WeakValueDictionary()


def plan_named(name: str) -> SpectralPlan:
    """The plan whose `SpectralPlan.name` this is.

    Raises:
        ValueError: for a number that no plan of this process has.

    >>> from econv import filter_basis
    >>> plan = spectral_plan(filter_basis("p8"), "regular", "regular")
    >>> plan_named(plan.name) == plan
    True
    """
    found = _named.get(name)
    if found is None:
        words = json.loads(name)
        ends = words.pop("source"), words.pop("target")
        basis = basis_of(words["basis"]) if "basis" in words else filter_basis(**words)
        if basis is None:
            raise ValueError(f"expected the name of a plan of this process; got {name}")
        found = _named[name] = spectral_plan(basis, *ends)
    return found


@lru_cache(maxsize=64)
def _irreducible_stencils(
    basis: FilterBasis,
) -> tuple[tuple[Copy, ...], FloatArray, FloatArray]:
    """The closure of the operators in irreducible pieces: copies, stencils, parities."""
    group, operators = basis.group, basis.operators
    columns = monomials(operators.order, operators.dimension)
    degrees = np.array([sum(e) for e in columns])
    # Monomials have the length √(a!/|a|!) in the inner product that rotations leave alone.
    lengths = np.sqrt([_bombieri(e) for e in columns])
    turned = operators.turned(group) * lengths
    pieces: list[tuple[int, int, FloatArray]] = []  # irrep, degree, stencils [d, size, size]
    for degree in sorted(set(operators.orders)):
        chosen = np.flatnonzero(degrees == degree)
        rows = turned[:, np.array(operators.orders) == degree][..., chosen]
        values, vectors = np.linalg.svd(rows.reshape(-1, len(chosen)))[1:]
        space = vectors[: int((values > 1e-9 * values[0]).sum())]  # orthonormal rows
        space = np.where(np.abs(space) < 1e-13, 0.0, space)
        names = [columns[j] for j in chosen]
        length = lengths[chosen]
        everything = [Polynomial.monomial(e) for e in names]
        # The derivatives of a turned image are the turned image of derivatives in the frame of h⁻¹.
        acts = [action(group.matrices[inverse], everything) for inverse in group.inverse]
        matrices = space @ (np.stack(acts) * length / length[:, None]) @ space.T
        candidates = np.stack([row * length for row in _harmonics(degree, names)]) @ space.T
        used = np.flatnonzero(np.abs(space).max(axis=0))  # others may not fit on the support
        weights = np.stack([basis.monomial(names[j]) for j in used])
        for index, found in decompose(group, matrices, candidates):
            in_monomials = ((found @ space) / length)[:, used]
            pieces.append((index, degree, np.tensordot(in_monomials, weights, axes=1)))
    pieces.sort(key=lambda piece: piece[0])  # stable: low degrees first within an irrep
    pieces = _reduced(_orthonormalised(pieces))
    stencils = np.concatenate([weights for *_, weights in pieces])
    unit = np.eye(len(stencils))
    copies: list[Copy] = []
    for index, _, weights in pieces:
        first = sum(len(copy.basis) for copy in copies)
        copies.append(Copy(index, frozen(unit[first : first + len(weights)].copy())))
    parity = np.concatenate([np.full(len(w), (-1.0) ** degree) for _, degree, w in pieces])
    mirrored = (np.flip(stencils, tuple(range(1, stencils.ndim))).T * parity).T
    if not np.abs(mirrored - stencils).max() <= 1e-12 * np.abs(stencils).max():
        raise ParityError(
            f"expected stencils that are even or odd, as the spectral engine needs them; {basis!r} "
            "has others: use engine='dense'"
        )
    return tuple(copies), frozen(stencils), frozen(parity)


def _harmonics(degree: int, names: list[tuple[int, ...]]) -> Iterator[FloatArray]:
    """Operators of one degree that turn by a phase alone, in space as spherical harmonics do.

    They are rows over the monomials.
    """
    if len(names[0]) != 2:
        for _, rows in harmonic_pieces(degree, len(names[0])):
            yield from rows
        return
    for q in range(degree // 2 + 1):
        terms = harmonic(degree - q, q)
        row = np.array([complex(terms.coefficient(e)) for e in names])
        yield row.real
        if degree > 2 * q:
            yield row.imag


def _orthonormalised(
    pieces: list[tuple[int, int, FloatArray]],
) -> list[tuple[int, int, FloatArray]]:
    """Gram–Schmidt over the pieces of one irrep and parity, the same for each of their rows."""
    done: list[tuple[int, int, FloatArray]] = []
    for index, degree, weights in pieces:
        rest = weights
        for other, other_degree, known in done:
            if other == index and (other_degree - degree) % 2 == 0:
                rest = rest - np.vdot(known, rest) / np.vdot(known, known) * known
        length = np.linalg.norm(rest) / math.sqrt(len(rest))
        if length <= 1e-9 * np.linalg.norm(weights):
            raise ArithmeticError("the stencils of different operators are not independent")
        rest = np.where(np.abs(rest) <= 1e-14 * np.abs(rest).max(), 0.0, rest)
        done.append((index, degree, rest / length))
    return done


def _reduced(pieces: list[tuple[int, int, FloatArray]]) -> list[tuple[int, int, FloatArray]]:
    """Other bases of what the pieces of one irrep and symmetry span, with more taps that are zero.

    In the plane; in space, where no engine counts taps, they stay what they are.

    Each piece but one loses the tap that counts most in that one, with all taps that mirror it.
    They still have length one, and stand nearly at right angles; otherwise nothing changes.
    """
    found = list(pieces)
    if pieces[0][2].ndim != 3:
        return found
    families: dict[tuple[int, ...], list[int]] = {}
    for n, (index, degree, weights) in enumerate(pieces):
        families.setdefault((index, degree % 2, *_mirrored(weights[0])), []).append(n)
    for members in families.values():
        given = np.stack([pieces[n][2] for n in members])
        lead = given[:, 0].reshape(len(members), -1)  # their first rows
        mixed, free = lead.copy(), np.ones(len(members), dtype=bool)
        for _ in members:
            row, tap = np.unravel_index(np.abs(mixed * free[:, None]).argmax(), mixed.shape)
            free[row] = False
            for other in set(range(len(members))) - {int(row)}:
                mixed[other] -= mixed[other, tap] / mixed[row, tap] * mixed[row]
        mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
        change = mixed @ np.linalg.pinv(lead)
        if not np.linalg.cond(change) <= _SKEW:
            continue
        for n, weights in zip(members, np.tensordot(change, given, axes=1), strict=True):
            weights /= np.linalg.norm(weights) / math.sqrt(len(weights))
            least = 1e-12 * np.abs(weights).max()
            index, degree, _ = pieces[n]
            found[n] = index, degree, np.where(np.abs(weights) <= least, 0.0, weights)
    return found


def _mirrored(weights: FloatArray) -> Iterator[int]:
    """Whether weights stay (1) or change sign (−1) in each mirror of the grid; otherwise 0."""
    least = 1e-9 * np.abs(weights).max()
    for other in (weights[:, ::-1], weights[::-1], weights.T):
        signs = [s for s in (1, -1) if np.abs(weights - s * other).max() <= least]
        yield signs[0] if signs else 0


_SKEW = 3.0  # at most, of the lengths of sums of reduced pieces over those of their factors


def _slots(copies: tuple[Copy, ...]) -> list[tuple[int, IntArray]]:
    """The irrep of each copy and the rows that it takes when all are put below one another."""
    ends = np.cumsum([len(copy.basis) for copy in copies])
    return [
        (copy.irrep, np.arange(end - len(copy.basis), end))
        for copy, end in zip(copies, ends, strict=True)
    ]


def _features_and_blocks(
    plan: SpectralPlan,
) -> tuple[IntArray, IntArray, FloatArray, tuple[Block, ...], int]:
    group = plan.basis.group
    inputs = _slots(transform(group, plan.source))
    outputs = _slots(transform(group, plan.target))
    operators = _slots(plan._operators[0])
    stencils: list[list[int]] = []
    slots: list[list[int]] = []
    factors: list[list[float]] = []
    features: dict[int, list[list[int]]] = {}  # by irrep: for every coupling its rows
    wanted = {irrep for irrep, _ in outputs}
    for input_irrep, input_slots in inputs:
        for operator_irrep, operator_slots in operators:
            for irrep, coefficients in couple(group, operator_irrep, input_irrep):
                if irrep not in wanted:
                    continue
                rows = []
                sizes = np.abs(coefficients[coefficients != 0])
                # Where all terms weigh the same, the spectral weights take the scale.
                equal = np.allclose(sizes, sizes[0])
                if not equal and group.dimension == 2:
                    raise ArithmeticError(f"unequal Clebsch–Gordan coefficients in {group}")
                for table in coefficients:
                    terms = np.argwhere(table)
                    values = table[tuple(terms.T)]
                    rows.append(len(stencils))
                    stencils.append([int(operator_slots[a]) for a, _ in terms])
                    slots.append([int(input_slots[b]) for _, b in terms])
                    factors.append([float(np.sign(v) if equal else v) for v in values])
                features.setdefault(irrep, []).append(rows)
    blocks: list[Block] = []
    count = 0
    for irrep in sorted(wanted & features.keys()):
        couplings = np.array(features[irrep])  # [couplings, d]
        copies = np.stack([s for index, s in outputs if index == irrep])  # [copies, d]
        algebra = commutant(group.irreps[irrep])  # [e, d, d]
        first = count + np.arange(len(couplings) * len(copies) * len(algebra))
        numbers = first.reshape(len(couplings), len(copies), len(algebra))
        count += first.size
        if len(algebra) == 1:
            entries = numbers[:, :, 0]
            ones = np.ones(entries.shape)
            found = Block(irrep, couplings.T, copies.T, entries, ones)
        else:
            # Entry [r, s] of Σ_e w_e C_e, the matrix that takes features to the output, is one w_e.
            which = np.abs(algebra).argmax(axis=0)  # [d, d]
            sign = np.take_along_axis(algebra, which[None], axis=0)[0]
            if not np.allclose(np.abs(algebra).sum(axis=0), 1.0):
                raise ArithmeticError(f"the commutant of an irrep of {group} is not monomial")
            entries = numbers[:, :, which]  # [couplings, copies, r, s]
            entries = entries.transpose(0, 3, 1, 2).reshape(couplings.size, copies.size)
            signs = np.tile(np.sign(sign).T, (len(couplings), len(copies)))
            found = Block(irrep, couplings.reshape(1, -1), copies.reshape(1, -1), entries, signs)
        blocks.append(found)
    most = max(2, *map(len, factors))

    def padded(rows: list[Any], dtype: type) -> Any:
        return frozen(np.array([row + [0] * (most - len(row)) for row in rows], dtype=dtype))

    return (
        padded(stencils, np.int64),
        padded(slots, np.int64),
        padded(factors, np.float64),
        tuple(blocks),
        count,
    )


def _atoms(plan: SpectralPlan) -> _Atoms:
    slots, stencils = plan.analysis.shape[0], len(plan.stencils)
    terms: list[list[tuple[int, float]]] = [[] for _ in range(plan.weights)]
    for block in plan.blocks:
        for k, n in np.ndindex(block.entries.shape):
            for row in range(block.rows):
                feature, out = block.features[row, k], block.slots[row, n]
                for t in range(plan.feature_factors.shape[1]):
                    factor = block.signs[k, n] * plan.feature_factors[feature, t]
                    if factor:
                        place = out * stencils + plan.feature_stencils[feature, t]
                        place = place * slots + plan.feature_slots[feature, t]
                        terms[block.entries[k, n]].append((int(place), float(factor)))
    most = max(map(len, terms))
    padded = np.array([t + [(0, 0.0)] * (most - len(t)) for t in terms])
    return _Atoms(padded[..., 0].astype(np.int64), padded[..., 1])


def _project(plan: SpectralPlan, wanted: FloatArray) -> FloatArray:
    """Spectral weights of equivariant maps ``[…, output slots, stencils, input slots]``."""
    places, factors = plan._atoms
    flat = wanted.reshape(-1, math.prod(wanted.shape[-3:])).T  # [places, maps]
    found = (flat[places] * factors[..., None]).sum(axis=1)
    found /= (factors**2).sum(axis=1)[:, None]
    again = np.zeros_like(flat)
    for term in range(places.shape[1]):
        np.add.at(again, places[:, term], found * factors[:, term, None])
    error = np.abs(again - flat).max() / np.abs(flat).max()
    if not error <= 1e-9:
        raise ArithmeticError(f"{plan!r} is off by {error:.1e}: the map does not commute")
    return found.T.reshape(*wanted.shape[:-3], -1)


def _weight_map(plan: SpectralPlan) -> FloatArray:
    basis, group = plan.basis, plan.basis.group
    # Filters of each coordinate in every frame, in the basis of the stencils: [order, s, stencils].
    flat = plan.stencils.reshape(len(plan.stencils), -1)
    filters = basis.synthesis.reshape(*basis.synthesis.shape[:2], -1)
    turned = filters @ np.linalg.pinv(flat)
    error = np.abs(turned @ flat - filters).max() / np.abs(filters).max()
    if not error <= 1e-10:
        raise ArithmeticError(f"{plan!r} does not span the turned stencils: off by {error:.1e}")
    analysis, synthesis = plan.analysis, plan.synthesis
    if plan.source != "regular":
        if plan.target != "regular":
            raise ValueError(f"expected regular fields on one side; got {plan!r}")
        # Component c in frame A is that of A⁻¹v.
        frames = representation(group, plan.source)[group.inverse]
        wanted = np.einsum("ao,asi,acd,qd->csoiq", synthesis, turned, frames, analysis)
        return frozen(_project(plan, wanted).reshape(-1, plan.weights))
    found = []
    for k in range(group.order):  # output A reads input Ak
        moved = analysis[:, group.product[:, k]]
        if plan.target == "regular":
            wanted = np.einsum("ao,asi,qa->soiq", synthesis, turned, moved, optimize=True)
        else:  # Σ_A ρ(A)·s(A), such as A·[s₁, s₂]
            frames = representation(group, plan.target)
            matrices = np.einsum("adc,do->aco", frames, synthesis)
            wanted = np.einsum("aco,asi,qa->csoiq", matrices, turned, moved, optimize=True)
        found.append(_project(plan, wanted))
    stacked = np.stack(found, axis=-3)  # [(component,) k, s, weights]
    return frozen(stacked.reshape(-1, plan.weights))


def _adjoint_map(plan: SpectralPlan) -> FloatArray:
    adjoint = plan.adjoint
    places, factors = plan._atoms
    slots, stencils = plan.analysis.shape[0], len(plan.stencils)
    out, rest = np.divmod(places, stencils * slots)
    stencil, source = np.divmod(rest, slots)
    mirrored = (source * stencils + stencil) * plan.synthesis.shape[1] + out
    values = factors * plan.parity[stencil]
    found = np.zeros((plan.weights, adjoint.weights))
    # Numbers of the adjoint's weights by place; every place belongs to few.
    owners: dict[int, list[tuple[int, float]]] = {}
    norms = (adjoint._atoms.factors**2).sum(axis=1)
    for number, (spots, scales) in enumerate(zip(*adjoint._atoms, strict=True)):
        for spot, scale in zip(spots.tolist(), scales.tolist(), strict=True):
            if scale:
                owners.setdefault(spot, []).append((number, scale / norms[number]))
    for number in range(plan.weights):
        for place, value in zip(mirrored[number].tolist(), values[number].tolist(), strict=True):
            for other, scale in owners[place] if value else ():
                found[number, other] += value * scale
    return frozen(found)


def _bombieri(exponents: tuple[int, ...]) -> float:
    return math.prod(map(math.factorial, exponents)) / math.factorial(sum(exponents))
