"""Stencils that turn as harmonic polynomials do: their design, in any number of dimensions.

Operators of one degree fall apart into Δ^q h(∂), h a harmonic polynomial of degree l: for each l
and q the h turn among themselves, as the spherical harmonics do, and so should their stencils. In
the plane these are D₊^p D₋^q, whose design in `stencils` is this one in complex numbers.

This module knows points and polynomials. What the designs are for is the business of `stencils`.

A grid is its points ``[n, d]``, coordinates (x, y, …) in units of the sides of a cube as large as
a cell; its symmetries are the signed permutations of the axes that map it onto itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econv.groups import FloatArray, IntArray, frozen
from econv.operators import Exponents, Polynomial, monomials

__all__ = ["Field", "designed", "gaussian_derivatives", "harmonics", "nearest", "of_order"]


class Field(NamedTuple):
    """Random fields with the power spectrum e^{−σ²|κ|²}, and how much they count in a design."""

    sigma: float
    weight: float


def of_order(order: int, dimension: int) -> tuple[Exponents, ...]:
    """The monomials of one order, in the order of `monomials`.

    >>> of_order(2, 2)
    ((2, 0), (1, 1), (0, 2))
    """
    return tuple(e for e in monomials(order, dimension) if sum(e) == order)


@lru_cache(maxsize=256)
def harmonics(degree: int, dimension: int) -> FloatArray:
    """The harmonic polynomials of one degree, as rows over `of_order`.

    Orthonormal in the inner product ⟨x^a, x^b⟩ = a!/|a|! δ_ab, which rotations leave alone.

    >>> harmonics(2, 2).round(3).tolist()
    [[0.707, 0.0, -0.707], [0.0, 1.414, 0.0]]
    """
    names = of_order(degree, dimension)
    lengths = _lengths(names)
    lower = {e: i for i, e in enumerate(of_order(degree - 2, dimension))} if degree > 1 else {}
    laplacian = np.zeros((max(1, len(lower)), len(names)))
    for (j, e), axis in itertools.product(enumerate(names), range(dimension)):
        if e[axis] > 1:
            fewer = tuple(n - 2 * (i == axis) for i, n in enumerate(e))
            laplacian[lower[fewer], j] += e[axis] * (e[axis] - 1)
    scaled = laplacian / lengths
    kept = np.eye(len(names)) - np.linalg.pinv(scaled) @ scaled
    rows = np.zeros((0, len(names)))
    for row in kept:  # Gram–Schmidt: monomials that matter first come first
        for _ in range(2):
            row = row - rows.T @ (rows @ row)
        if (length := np.linalg.norm(row)) > 1e-6:
            rows = np.concatenate([rows, _clean(row / length)[None]])
    return frozen(rows / lengths)


@lru_cache(maxsize=256)
def pieces(order: int, dimension: int) -> tuple[tuple[int, FloatArray], ...]:
    """For each l = order, order − 2, …: l, and Δ^q h for its h, as rows over `of_order`."""
    names = of_order(order, dimension)
    squares = sum((v**2 for v in Polynomial.variables(dimension)), Polynomial.of({}, dimension))
    found = []
    for degree in range(order, -1, -2):
        rows = []
        lower = of_order(degree, dimension)
        for row in harmonics(degree, dimension):
            terms = Polynomial.of(dict(zip(lower, row.tolist(), strict=True)), dimension)
            whole = terms * squares ** ((order - degree) // 2)
            rows.append([whole.coefficient(e) for e in names])
        if rows:
            found.append((degree, frozen(np.array(rows, dtype=np.float64))))
    return tuple(found)


def designed(
    order: int,
    points: FloatArray,
    conditions: FloatArray,
    fields: Sequence[Field],
    consistency: float,
) -> FloatArray:
    """Stencils of all monomials of one order, ``[monomials, n]``.

    Stencils s_m of Δ^q h_m, of one l and q together, minimise under ``conditions``, the Taylor
    terms ``[powers, n]`` through ``order`` + 1, what turns wrongly in the ``fields``. The symbols
    ŝ_m(κ) = Σ_x s_m(x) e^{iκ·x} turn correctly where they are f(|κ|)·Y_m(κ/|κ|), Y_m being the h_m
    on the sphere. The energy of all, and of this part, are quadratic forms in closed form:
    ∫ e^{−σ²|κ|²} gives e^{−|x−y|²/4σ²} = Σ_l a_l(|x|, |y|) Σ_m Y_m(x)Y_m(y) for all, and for this
    part a_l(|x|, |y|) Y_m(x)Y_m'(y) / dim l, with m at x and m' at y. ``consistency`` is the weight
    of plain accuracy.
    """
    dimension = points.shape[1]
    symmetries = _symmetries(points)
    powers = monomials(order + 1, dimension)
    names = of_order(order, dimension)
    weights = []
    for degree, operators in pieces(order, dimension):
        basis = _symmetric_basis(degree, points, symmetries)  # [m, n, unknowns]
        wanted = np.zeros((len(operators), len(powers)))
        wanted[:, [powers.index(e) for e in names]] = operators
        rows = np.einsum("an,mnu->mau", conditions, basis, optimize=True).reshape(wanted.size, -1)
        cost, target = _objective(degree, operators, order, points, basis, fields, consistency)
        weights.append(basis @ _minimal(cost, target, rows, wanted.ravel()))
    transform = np.concatenate([rows for _, rows in pieces(order, dimension)])
    found = np.linalg.solve(transform, np.concatenate(weights))
    return frozen(_symmetrised(found, names, symmetries))


def nearest(
    order: int, points: FloatArray, conditions: FloatArray, samples: FloatArray, unit: FloatArray
) -> FloatArray:
    """Samples ``[monomials, n]`` with the correction c of least Σ |c|²/unit that sets moments."""
    dimension = points.shape[1]
    powers, names = monomials(order + 1, dimension), of_order(order, dimension)
    wanted = np.array([[float(a == e) for a in powers] for e in names])
    # The least one is √unit times the shortest solution of conditions·√unit; scaled so, weights
    # that span many orders stay accurate.
    root = np.sqrt(unit)
    missing = wanted - samples @ conditions.T
    correction = root * np.linalg.lstsq(conditions * root, missing.T, rcond=1e-14)[0].T
    return frozen(_symmetrised(samples + correction, names, _symmetries(points)))


def gaussian_derivatives(order: int, points: FloatArray, variance: float) -> FloatArray:
    """∂^e of e^{−|u|²/2v} for all monomials of one order, ``[monomials, n]``.

    >>> gaussian_derivatives(1, np.array([[1.0, 0.0]]), 1.0).round(3).tolist()
    [[-0.607], [-0.0]]
    """
    u = points / math.sqrt(variance)
    hermite = [np.ones_like(u), u]
    for k in range(1, order):
        hermite.append(u * hermite[k] - k * hermite[k - 1])
    scale = (-1.0 / math.sqrt(variance)) ** order * np.exp(-(u**2).sum(axis=1) / 2)
    rows = [
        np.prod([hermite[e][:, i] for i, e in enumerate(exponents)], axis=0) * scale
        for exponents in of_order(order, points.shape[1])
    ]
    return np.stack(rows)


class _Symmetries(NamedTuple):
    """Signed permutations of the axes: where each takes axes and points."""

    axes: IntArray  # [elements, d]: component i of g·x is sign i times component axes[i] of x
    signs: FloatArray  # [elements, d]
    points: IntArray  # [elements, n]


def _symmetries(points: FloatArray) -> _Symmetries:
    dimension = points.shape[1]
    steps = np.array([np.diff(np.unique(line.round(9)))[:1].sum() for line in points.T])
    places = {tuple(row): i for i, row in enumerate(points.round(9) + 0.0)}
    axes, signs, images = [], [], []
    for order in itertools.permutations(range(dimension)):
        if not np.allclose(steps[list(order)], steps, rtol=1e-9, atol=0):
            continue
        for sign in itertools.product((1.0, -1.0), repeat=dimension):
            moved = points[:, order] * np.array(sign)
            axes.append(order)
            signs.append(sign)
            images.append([places[tuple(row)] for row in moved.round(9) + 0.0])
    return _Symmetries(np.array(axes), np.array(signs), np.array(images))


def _on_monomials(
    names: Sequence[Exponents], symmetries: _Symmetries
) -> tuple[IntArray, FloatArray]:
    """Each g takes x^e to (g·x)^e, a sign times a monomial: ``[elements, monomials]`` both."""
    place = {e: i for i, e in enumerate(names)}
    places = np.zeros((len(symmetries.axes), len(names)), dtype=np.int64)
    signs = np.ones(places.shape)
    for g, (axes, sign) in enumerate(zip(symmetries.axes, symmetries.signs, strict=True)):
        for i, e in enumerate(names):
            moved = [0] * len(e)
            for axis, power in zip(axes, e, strict=True):
                moved[axis] = power
            places[g, i] = place[tuple(moved)]
            signs[g, i] = np.prod(sign ** np.array(e))
    return places, signs


def _symmetric_basis(degree: int, points: FloatArray, symmetries: _Symmetries) -> FloatArray:
    """An orthonormal basis of all tuples s with s(g·x) = D(g)·s(x), ``[m, n, unknowns]``.

    D is how the grid's symmetries turn the harmonic polynomials of the degree.
    """
    names = of_order(degree, points.shape[1])
    lengths = _lengths(names)
    rows = harmonics(degree, points.shape[1]) * lengths
    places, signs = _on_monomials(names, symmetries)
    # Orthonormal monomials are permuted with signs: only those of equal lengths change places.
    turns = np.stack(
        [
            rows @ (np.eye(len(names))[p] * s[:, None]) @ rows.T
            for p, s in zip(places, signs, strict=True)
        ]
    )
    columns = []
    seen: set[int] = set()
    for point in range(len(points)):
        if point in seen:
            continue
        images = symmetries.points[:, point]
        orbit, first = np.unique(images, return_index=True)
        seen.update(orbit.tolist())
        kept = turns[images == point].mean(axis=0)  # a projection
        values, vectors = np.linalg.eigh((kept + kept.T) / 2)
        for vector in vectors[:, values > 0.5].T:
            column = np.zeros((len(rows), len(points)))
            column[:, orbit] = (turns[first] @ vector).T / math.sqrt(len(orbit))
            columns.append(column)
    return np.stack(columns, axis=-1)


def _objective(
    degree: int,
    operators: FloatArray,
    order: int,
    points: FloatArray,
    basis: FloatArray,
    fields: Sequence[Field],
    consistency: float,
) -> tuple[FloatArray, FloatArray]:
    """The quadratic form and the linear one in the unknowns."""
    dimension = points.shape[1]
    radii, place = np.unique(np.linalg.norm(points, axis=1).round(12), return_inverse=True)
    polynomials = harmonics(degree, dimension)
    unit = np.array([_values(degree, np.eye(dimension)[:1])]).reshape(-1, 1)
    scale = math.sqrt(len(polynomials) / float(((polynomials @ unit) ** 2).sum()))
    directions = points / np.where(radii[place], radii[place], 1.0)[:, None]
    sphere = scale * polynomials @ _values(degree, directions)  # Y_m(x), [m, n]
    correct = np.zeros((len(radii), basis.shape[-1]))
    np.add.at(correct, place, np.einsum("mn,mnu->nu", sphere, basis))
    squares = ((points[:, None] - points) ** 2).sum(axis=-1)
    cosines, share, legendre = _zonal(degree, dimension)
    gaps = radii[:, None, None] ** 2 + radii[:, None] ** 2
    gaps = gaps - 2 * radii[:, None, None] * radii[:, None] * cosines
    flat = basis.transpose(1, 0, 2).reshape(len(points), -1)
    cost = np.zeros((basis.shape[-1],) * 2)
    target = np.zeros(basis.shape[-1])
    for sigma, weight in fields:
        energy = (np.exp(-squares / (4 * sigma**2)) @ flat).reshape(
            flat.shape[0], *basis.shape[::2]
        )
        everything = np.einsum("mnu,nmv->uv", basis, energy, optimize=True)
        kernel = np.exp(-gaps / (4 * sigma**2)) @ (share * legendre)
        leak = everything - correct.T @ kernel @ correct / len(polynomials)
        cost += weight * (leak + consistency * everything)
        derivatives = operators @ gaussian_derivatives(order, -points, 2 * sigma**2)
        target += weight * consistency * np.einsum("mn,mnu->u", derivatives, basis)
    return cost, target


def _minimal(
    cost: FloatArray, target: FloatArray, rows: FloatArray, wanted: FloatArray
) -> FloatArray:
    """The u that minimises uᵀ·cost·u − 2·target·u under rows·u = wanted."""
    values, vectors = np.linalg.svd(rows)[1:]
    free = vectors[int((values > 1e-10 * values[0]).sum()) :].T
    start = np.linalg.lstsq(rows, wanted, rcond=1e-10)[0]
    step = np.linalg.lstsq(free.T @ cost @ free, free.T @ (target - cost @ start), rcond=None)[0]
    found: FloatArray = start + free @ step
    return found


def _symmetrised(
    weights: FloatArray, names: Sequence[Exponents], symmetries: _Symmetries
) -> FloatArray:
    """The mean over the grid's symmetries, which permute monomials up to signs.

    Sums are rounded once, whatever their order, so that the mean is symmetric to the last bit.
    """
    places, signs = _on_monomials(names, symmetries)
    moved = np.empty((len(places), *weights.shape))
    for g, points in enumerate(symmetries.points):
        moved[g, places[g]] = signs[g][:, None] * weights[:, points]
    flat = moved.reshape(len(moved), -1).T.tolist()
    sums = np.array([math.fsum(values) for values in flat]).reshape(weights.shape)
    return sums / len(places) + 0.0


@lru_cache(maxsize=64)
def _zonal(degree: int, dimension: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Cosines between two directions, their share of the sphere, and there Σ_m Y_m Y_m / dim."""
    if dimension == 1:
        t, share = np.array([1.0, -1.0]), np.array([0.5, 0.5])
    elif dimension == 2:
        t, share = np.cos(2 * np.pi * np.arange(64) / 64), np.full(64, 1 / 64)
    else:
        t, share = np.polynomial.legendre.leggauss(64)
        share = share * (1 - t**2) ** ((dimension - 3) / 2)
        share = share / share.sum()
    values = [np.ones_like(t), t]
    for k in range(1, degree):  # Gegenbauer's recursion, with the value 1 at t = 1
        last = (2 * k + dimension - 2) * t * values[k] - k * values[k - 1]
        values.append(last / (k + dimension - 2))
    found = values[degree]
    return t, share, found


def _values(degree: int, points: FloatArray) -> FloatArray:
    """The monomials of one degree at points, ``[monomials, n]``."""
    exponents = np.array(of_order(degree, points.shape[1]))
    found: FloatArray = np.prod(points.T ** exponents[:, :, None], axis=1)
    return found


def _lengths(names: Sequence[Exponents]) -> FloatArray:
    each = [
        math.prod(map(math.factorial, e)) / math.factorial(sum(e)) for e in names
    ]  # of monomials, squared
    return np.sqrt(each)


def _clean(array: npt.NDArray[Any]) -> FloatArray:
    return np.where(np.abs(array) < 1e-14, 0.0, array)
