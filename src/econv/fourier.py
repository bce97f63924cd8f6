"""Fourier analysis on finite groups: how representations fall apart, and how products couple.

A feature map transforms under the group; so does the set of operators that a layer applies to it.
Taken apart into irreducible pieces, an equivariant linear map can only join pieces of one kind
(Schur's lemma): that is what makes a group convolution block-diagonal. This module knows groups and
their representations. It knows nothing of derivatives, pixels or tensors.

A representation is an array of orthogonal matrices ``[order, dimension, dimension]`` that acts on
column vectors; ``matrices[g] @ matrices[h]`` is that of g·h.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from econv.groups import FloatArray, Group, Irrep, frozen

__all__ = [
    "KINDS",
    "Copy",
    "butterflies",
    "commutant",
    "couple",
    "decompose",
    "representation",
    "transform",
]

KINDS = ("regular", "scalar", "pseudoscalar", "vector")
"""How the channels of one field transform: by permutation of the group elements, not at all, by a
change of sign under reflections, or as a vector of the plane."""

_DUST = 1e-13  # what is left of entries that cancel exactly


class Copy(NamedTuple):
    """One irreducible piece of a representation."""

    irrep: int
    """Its kind: an index of ``group.irreps``."""
    basis: FloatArray
    """Orthonormal rows ``[irrep.dimension, dimension]``: ``basis @ matrices[g] @ basis.T`` is
    ρ(g)."""


def representation(group: Group, kind: str) -> FloatArray:
    """How the channels of a field transform, ``[order, channels, channels]``.

    Raises:
        ValueError: for an unknown kind of field.

    >>> representation(Group("p4"), "regular")[1].argmax(axis=0).tolist()
    [1, 2, 3, 0]
    """
    if kind == "scalar":
        return frozen(np.ones((group.order, 1, 1)))
    if kind == "pseudoscalar":
        return frozen(np.linalg.det(group.matrices).round()[:, None, None])
    if kind == "vector":
        return group.matrices
    if kind == "regular":  # (π_h f)(g) = f(h⁻¹g)
        return frozen(np.eye(group.order)[group.relative])
    raise ValueError(f"unknown kind of field {kind!r}: expected one of {KINDS}")


def transform(group: Group, kind: str) -> tuple[Copy, ...]:
    """The Fourier transform of a field: the irreducible pieces of its representation.

    Their bases, one below the other, are an orthogonal matrix. For ``"regular"`` it is
    ``group.fourier``.

    Raises:
        ValueError: for an unknown kind, channels that do not fit it, and an element that the group
            does not have.

    >>> copies = transform(Group("p4"), "regular")
    >>> bool((np.concatenate([copy.basis for copy in copies]) == Group("p4").fourier).all())
    True
    """
    if kind != "regular":
        return decompose(group, representation(group, kind))
    copies: list[Copy] = []
    row = 0
    for index, irrep in enumerate(group.irreps):
        for _ in range(irrep.multiplicity):
            copies.append(Copy(index, group.fourier[row : row + irrep.dimension]))
            row += irrep.dimension
    return tuple(copies)


def decompose(
    group: Group, matrices: FloatArray, candidates: FloatArray | None = None
) -> tuple[Copy, ...]:
    """Take a representation apart into irreducible copies, sorted by irrep.

    Where an irrep occurs more than once the choice of copies is free: they are built from the
    ``candidates`` (rows; the unit vectors by default), the first that will do first.
    Raises ``ArithmeticError`` if what is found does not add up to the representation.

    Raises:
        ArithmeticError: for matrices that are no orthogonal representation of the group.

    >>> [copy.irrep for copy in decompose(Group("p3"), representation(Group("p3"), "regular"))]
    [0, 1]
    """
    dimension = matrices.shape[-1]
    tried = np.eye(dimension) if candidates is None else candidates
    found: list[Copy] = []
    for index, irrep in enumerate(group.irreps):
        # Σ_g ρ(g)_r0 M(g): takes a first basis vector of a copy to the r-th, and others to zero.
        raising = np.einsum("gr,gij->rij", irrep.matrices[:, :, 0], matrices)
        raising *= irrep.dimension / group.order
        known = np.zeros((0, dimension))
        for candidate in tried:
            first = raising[0] @ candidate
            first = first - known.T @ (known @ first)
            first = first - known.T @ (known @ first)  # once more, for what rounding left
            length = np.linalg.norm(first)
            if length <= 1e-6 * np.linalg.norm(candidate):
                continue
            basis = _without_dust(raising @ (first / length))
            found.append(Copy(index, frozen(basis)))
            known = np.concatenate([known, basis])
    everything = np.concatenate([copy.basis for copy in found])
    if everything.shape != (dimension, dimension):
        raise ArithmeticError(
            f"found {len(everything)} dimensions of {dimension}: the matrices are not an "
            f"orthogonal representation of {group.name}, or the candidates do not span it"
        )
    blocks = np.zeros((group.order, dimension, dimension))
    row = 0
    for index, basis in found:
        here = slice(row, row + len(basis))
        blocks[:, here, here] = group.irreps[index].matrices
        row += len(basis)
    error = np.abs(everything @ matrices @ everything.T - blocks).max()
    error = max(error, np.abs(everything @ everything.T - np.eye(dimension)).max())
    if not error <= 1e-10:  # written so that a NaN fails
        raise ArithmeticError(
            f"the matrices are not an orthogonal representation of {group.name}: off by {error:.1e}"
        )
    return tuple(found)


@lru_cache(maxsize=65536)
def couple(group: Group, left: int, right: int) -> tuple[tuple[int, FloatArray], ...]:
    """The Clebsch–Gordan coefficients: the irreps in the product of two irreps.

    Each entry is an irrep ρ and an array ``[d_ρ, d_left, d_right]``: for u and v that transform by
    the left and the right irrep, the sums Σ C[r, a, b] u_a v_b transform by ρ.

    >>> [irrep for irrep, _ in couple(Group("p8m"), 4, 5)]
    [4, 6]
    """
    a, b = group.irreps[left], group.irreps[right]
    product = np.einsum("gij,gkl->gikjl", a.matrices, b.matrices)
    size = a.dimension * b.dimension
    copies = decompose(group, product.reshape(group.order, size, size))
    return tuple(
        (index, frozen(basis.reshape(-1, a.dimension, b.dimension))) for index, basis in copies
    )


@lru_cache(maxsize=4096)
def _commutant(group: Group, index: int) -> FloatArray:
    irrep = group.irreps[index]
    units = np.eye(irrep.dimension**2).reshape(-1, irrep.dimension, irrep.dimension)
    means = np.einsum("gik,ukl,gjl->uij", irrep.matrices, units, irrep.matrices) / group.order
    found: list[FloatArray] = []
    for mean in means:
        rest = mean - sum(
            (np.vdot(c, mean) / irrep.dimension * c for c in found), np.zeros_like(mean)
        )
        if (length := np.linalg.norm(rest)) > 1e-6:
            found.append(_without_dust(rest * (np.sqrt(irrep.dimension) / length)))
    if len(found) * irrep.multiplicity != irrep.dimension:
        raise ArithmeticError(f"{irrep.name!r} of {group.name} is not irreducible")
    return frozen(np.stack(found))


def commutant(irrep: Irrep) -> FloatArray:
    """The matrices that commute with a real irrep: its endomorphism algebra ``[1 | 2 | 4, d, d]``.

    The identity comes first. It is alone where the irrep stays irreducible over the complex
    numbers; a plane that turns, without reflections, also commutes with the quarter turn.

    >>> commutant(Group("p3").irreps[1])[-1].round(12).tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    return _commutant(irrep.group, irrep.group.irreps.index(irrep))


def butterflies(matrix: FloatArray) -> tuple[list[tuple[int, int]], FloatArray]:
    """A fast transform: the matrix as ``rest @ steps``, with few entries left in ``rest``.

    The steps are pairs (a, b) of places, one after the other: x_a, x_b become x_a + x_b and
    x_a − x_b. Rows of a Fourier transform are even or odd under many symmetries of the group; where
    they all agree up to sign in two columns, each row needs the sum or the difference alone.

    >>> pairs, rest = butterflies(Group("p16").fourier)
    >>> 2 * len(pairs) + int(np.count_nonzero(rest))  # operations, of 256
    82
    """
    rest = _without_dust(matrix)
    pairs: list[tuple[int, int]] = []
    waiting = [(np.arange(len(rest)), list(range(rest.shape[1])))]
    while waiting:
        rows, columns = waiting.pop()
        part = rest[rows]
        alike = {
            (a, b): np.sign(part[:, a] * part[:, b])
            for i, a in enumerate(columns)
            for b in columns[i + 1 :]
            if np.allclose(np.abs(part[:, a]), np.abs(part[:, b]), rtol=0, atol=_DUST)
            and part[:, a].any()
        }
        best: list[tuple[int, int]] = []
        parity = np.zeros(0)
        for first in sorted({tuple(signs) for signs in alike.values()}):
            pattern = np.array(first)  # 0 where the sign does not matter yet
            chosen: list[tuple[int, int]] = []
            for pair, signs in alike.items():
                free = not any(place in known for known in chosen for place in pair)
                if free and (signs * pattern >= 0).all():
                    pattern = np.where(pattern == 0, signs, pattern)
                    chosen.append(pair)
            if (pattern < 0).any() and len(chosen) > len(best):
                best, parity = chosen, pattern
        if not best:
            continue
        even, odd = rows[parity >= 0], rows[parity < 0]
        for a, b in best:
            rest[even, b] = 0.0
            rest[odd, b], rest[odd, a] = rest[odd, a], 0.0
        pairs += best
        single = [c for c in columns if not any(c in pair for pair in best)]
        waiting.append((even, [a for a, _ in best] + [c for c in single if not rest[odd, c].any()]))
        waiting.append((odd, [b for _, b in best] + [c for c in single if not rest[even, c].any()]))
    return pairs, rest


def _without_dust(array: FloatArray) -> FloatArray:
    return np.where(np.abs(array) < _DUST, 0.0, array)
