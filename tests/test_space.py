"""Stencils and bases in space, and the design of stencils in any dimension."""

import itertools
import math
import time

import numpy as np
import pytest
from scipy.stats import special_ortho_group

from econv import Group, filter_basis, harmonics, operator_set, stencils
from econv.operators import Polynomial, monomials
from econv.stencils import Central, Gaussian, Isotropic, Stencil, coordinates, sides
from econv.testing import convergence_order

SETS = [Isotropic(), Central(), Gaussian(), Gaussian(0.7)]


def points(size, aspect=1.0):
    return [axis.ravel() for axis in coordinates(size, 3, aspect)]


# Harmonic polynomials


@pytest.mark.parametrize(
    ("dimension", "counts"), [(1, [1, 1, 0, 0]), (2, [1, 2, 2, 2]), (3, [1, 3, 5, 7])]
)
def test_there_are_as_many_harmonics_as_theory_counts(dimension, counts):
    assert [len(harmonics.harmonics(degree, dimension)) for degree in range(4)] == counts


@pytest.mark.parametrize("degree", range(6))
def test_harmonics_are_harmonic_and_orthonormal(degree):
    names = harmonics.of_order(degree, 3)
    rows = harmonics.harmonics(degree, 3)
    lengths = [math.prod(map(math.factorial, e)) / math.factorial(degree) for e in names]
    np.testing.assert_allclose(rows * lengths @ rows.T, np.eye(2 * degree + 1), rtol=0, atol=1e-13)
    for row in rows:
        laplacian = {}
        for e, value in zip(names, row, strict=True):
            for axis in range(3):
                fewer = tuple(n - 2 * (i == axis) for i, n in enumerate(e))
                laplacian[fewer] = laplacian.get(fewer, 0) + value * e[axis] * (e[axis] - 1)
        assert max(map(abs, laplacian.values())) < 1e-12


@pytest.mark.parametrize("size", [3, 5, 7])
def test_in_the_plane_the_design_is_that_in_complex_numbers(size):
    for order in range(1, min(size, 5)):
        found = Isotropic().designed(order, 2, size, 1.0)
        for exponents, weights in zip(harmonics.of_order(order, 2), found, strict=True):
            wanted = Isotropic().weights(exponents, size).ravel()
            # The forms are nearly singular: along their flat directions few digits are certain.
            assert np.abs(weights - wanted).max() < 1e-4 * np.abs(wanted).max(), exponents


@pytest.mark.parametrize("width", [0.7, 1.0])
def test_in_the_plane_gaussian_stencils_are_those_in_complex_numbers(width):
    for order in range(1, 5):
        found = Gaussian(width).designed(order, 2, 5, 1.0)
        for exponents, weights in zip(harmonics.of_order(order, 2), found, strict=True):
            wanted = Gaussian(width).weights(exponents, 5).ravel()
            np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-10 * np.abs(wanted).max())


# Moments, symmetry, order


@pytest.mark.parametrize("aspect", [1.0, (2.5, 1.0), (0.8, 1.3)])
@pytest.mark.parametrize("found", SETS, ids=repr)
def test_moments_are_exact_through_the_order_above_the_operators(found, aspect):
    for size, exponents in [(3, e) for e in monomials(2, 3)] + [(5, e) for e in monomials(4, 3)]:
        weights = found.weights_on(exponents, size, aspect).ravel()
        for powers in monomials(sum(exponents) + 1, 3):
            terms = weights * np.prod(
                [p**a for p, a in zip(points(size, aspect), powers, strict=True)], axis=0
            )
            terms = terms / math.prod(map(math.factorial, powers))
            size_of_terms = max(1.0, np.abs(terms).sum())
            assert abs(terms.sum() - (powers == exponents)) < 1e-10 * size_of_terms, (
                exponents,
                powers,
            )


def test_wrong_weights_are_refused():
    operator = Polynomial.monomial((1, 1, 0))
    weights = Isotropic().weights((1, 1, 0), 3)
    Stencil(operator, weights, 2)
    weights[0, 1, 2] += 1e-8
    with pytest.raises(ArithmeticError, match="not a stencil"):
        Stencil(operator, weights, 2)
    with pytest.raises(ArithmeticError, match="not a stencil"):
        Stencil(Polynomial.monomial((1, 0, 1)), Isotropic().weights((1, 1, 0), 3), 2)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("found", SETS, ids=repr)
def test_stencils_have_the_48_symmetries_of_the_cube_to_the_last_bit(found, size):
    places = {p: i for i, p in enumerate(zip(*points(size), strict=True))}
    for exponents in monomials(size - 1, 3):
        weights = found.weights(exponents, size).ravel()
        for axes in itertools.permutations(range(3)):
            for signs in itertools.product((1, -1), repeat=3):
                # x^e at (±x_axes) is a sign times x^e', e'[axes] = e.
                moved = [
                    places[tuple(s * p[a] for a, s in zip(axes, signs, strict=True))]
                    for p in places
                ]
                other = [0, 0, 0]
                for axis, power in zip(axes, exponents, strict=True):
                    other[axis] = power
                sign = math.prod(s**e for s, e in zip(signs, exponents, strict=True))
                np.testing.assert_array_equal(
                    sign * weights[moved], found.weights(tuple(other), size).ravel()
                )


def test_long_voxels_keep_the_symmetries_of_their_grid():
    for exponents in monomials(2, 3):
        weights = Isotropic().weights_on(exponents, 3, (2.0, 1.0))
        for axis, power in zip((2, 1, 0), exponents, strict=True):
            np.testing.assert_array_equal(np.flip(weights, axis), (-1) ** power * weights)
        x, y, z = exponents
        swapped = Isotropic().weights_on((y, x, z), 3, (2.0, 1.0))
        # Exchanging x and y turns the slice and flips it.
        turned = np.rot90(weights, 1, (1, 2))[:, ::-1] * (-1) ** y
        np.testing.assert_array_equal(np.abs(turned), np.abs(swapped))
    assert Isotropic().weights_on((0, 0, 2), 3, (2.0, 1.0))[0, 1, 1] < 0.5


@pytest.mark.parametrize(("found", "size"), [(s, n) for s in SETS for n in (3, 5)], ids=repr)
def test_every_derivative_is_of_second_order(found, size):
    wave, phase, at = np.array([0.9, -0.6, 0.5]), 0.3, (0.2, 0.1, -0.4)

    def function(x, y, z):
        return np.cos(wave[0] * x + wave[1] * y + wave[2] * z + phase)

    for exponents in monomials(2, 3)[1:]:
        stencil = found.stencil(Polynomial.monomial(exponents), size)
        order = sum(exponents)
        exact = np.prod(wave**exponents) * np.cos(wave @ at + phase + order * np.pi / 2)
        errors = [abs(stencil.apply(function, at, h) - exact) for h in (0.2, 0.14, 0.1)]
        # In the limit: some errors of fourth order come in.
        assert convergence_order(errors, (0.2, 0.14, 0.1)) == pytest.approx(2.0, abs=0.1)


# What turns wrongly


def leak(found, order, size, sigma, seed=0):
    """RMS over turns, fields and operators of ŝ(R⁻¹κ; turned operator) − ŝ(κ), over that of ŝ.

    By random frequencies: nothing is shared with the forms that the design minimises.
    """
    random = np.random.default_rng(seed)
    frequencies = random.normal(size=(100, 3)) / (math.sqrt(2) * sigma)
    grid = np.stack(points(size))
    names = harmonics.of_order(order, 3)
    weights = {e: found.weights(e, size).ravel() for e in names}
    wrong, right = [], []
    for turn in special_ortho_group.rvs(3, size=6, random_state=random):
        waves = [np.exp(1j * kappa @ grid) for kappa in (frequencies, frequencies @ turn.T)]
        for exponents in names:
            straight = waves[0] @ weights[exponents]
            terms = Polynomial.monomial(exponents).in_frame(turn).terms
            turned = sum(value * (waves[1] @ weights[e]) for e, value in terms)
            count = math.factorial(order) / math.prod(map(math.factorial, exponents))
            wrong.append(count * np.square(np.abs(turned - straight)).mean())
            right.append(count * np.square(np.abs(straight)).mean())
    return math.sqrt(sum(wrong) / sum(right))


@pytest.mark.parametrize("sigma", [1.0, 2.0])
@pytest.mark.parametrize("order", [1, 2])
def test_isotropic_stencils_turn_better_than_the_others(order, sigma):
    isotropic, wide = (leak(Isotropic(), order, size, sigma) for size in (3, 5))
    assert wide < 0.1 * leak(Central(), order, 5, sigma)
    assert wide < 0.1 * leak(Gaussian(), order, 5, sigma)
    # On 3³ the moments leave less freedom.
    assert isotropic < 0.9 * leak(Central(), order, 3, sigma)
    assert isotropic < leak(Gaussian(0.7), order, 3, sigma)


def test_no_other_stencil_of_the_same_moments_turns_better():
    # The tuple of ∂x, ∂y, ∂z on 3³; the first changed by what no moment through order 2 sees.
    here = [Isotropic().weights(e, 3).ravel() for e in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    grid = np.stack(points(3))
    # Directions that integrate polynomials of the sphere to degree 19, exactly.
    z, share = np.polynomial.legendre.leggauss(10)
    angle = 2 * np.pi * np.arange(20) / 20
    across = np.sqrt(1 - z**2)[:, None] * np.stack([np.cos(angle), np.sin(angle)])[:, None]
    kappa = np.stack([*across, np.broadcast_to(z[:, None], (10, 20))], axis=-1).reshape(-1, 3)
    share = np.repeat(share / 40, 20)

    def objective(tuple_of_three):
        """Σ_σ of the energy that is not f(|κ|)·κ̂, over shells of directions."""
        total = 0.0
        for sigma in (1.0, 1.5, 2.0, 3.0):
            for radius in np.linspace(0.1, 3.5, 12) / sigma:
                symbols = np.exp(1j * radius * kappa @ grid) @ np.stack(tuple_of_three).T
                part = share @ (symbols * kappa).sum(axis=1)
                wrong = share @ (np.abs(symbols) ** 2).sum(axis=1) - abs(part) ** 2
                spectrum = radius**2 * math.exp(-((sigma * radius) ** 2)) / sigma
                total += sigma**6.5 * sigma**3 * spectrum * wrong
        return total

    best = objective(here)
    # Odd in x, even in y and z: three unknowns on 3³, and one condition, the slope.
    x, y, z = grid
    edge = x * (np.abs(y) + np.abs(z) == 1) / 8 - x * ((y == 0) & (z == 0)) / 2
    corner = x * (np.abs(y * z) == 1) / 8 - x * ((y == 0) & (z == 0)) / 2
    for change in (edge, corner):
        assert abs((change * x).sum()) < 1e-15
        three = [change, change.reshape(3, 3, 3).transpose(0, 2, 1)[:, ::-1].ravel(),
                 change.reshape(3, 3, 3).transpose(2, 1, 0).ravel()]  # fmt: skip
        for size in (0.03, -0.03):
            changed = [
                w + size * c * np.sign((w * c).sum()) for w, c in zip(here, three, strict=True)
            ]
            assert objective(changed) > best


# Sets of stencils, bases


def test_designing_a_set_is_quick():
    def seconds(size, order):
        stencils._isotropic_set.cache_clear()
        start = time.process_time()
        for exponents in monomials(order, 3):
            Isotropic().stencil(Polynomial.monomial(exponents), size)
        return time.process_time() - start

    assert min(seconds(3, 2) for _ in range(3)) < 0.3
    assert min(seconds(5, 4) for _ in range(2)) < 2


def test_the_default_operators_of_space_are_ten_that_are_closed():
    found = operator_set(None, 3)
    assert found == operator_set("order<=2", 3)
    assert len(found) == len(found.closure("O")) == len(found.closure("Ih")) == 10
    assert operator_set(None, 2) == operator_set("paper")
    with pytest.raises(ValueError, match="expected operators in 3 dimensions"):
        operator_set("paper", 3)
    own = operator_set([(1, 0, 0)], 3)
    assert [len(own.closure(g)) for g in ("C4", "T", "O", "I")] == [2, 3, 3, 3]
    assert len(operator_set([(2, 0, 0)], 3).closure("I")) == 6


@pytest.mark.parametrize(("found", "size"), [("isotropic", 3), ("central", 3), ("gaussian", 5)])
@pytest.mark.parametrize("group", ["Oh", "I", "D4h"])
def test_the_grids_symmetries_turn_the_filters(group, found, size):
    basis = filter_basis(group, None, found, size)
    for element in basis.group.grid_symmetries:
        turn = basis.group.matrices[element]
        there = np.stack(points(size))
        places = {tuple(p): i for i, p in enumerate(there.T)}
        back = [places[tuple(p + 0.0)] for p in (turn.T @ there).T]
        for other in (0, basis.group.order - 1):
            moved = basis.turned[basis.group.product[element, other]].reshape(10, -1)
            still = basis.turned[other].reshape(10, -1)[:, back]
            np.testing.assert_allclose(moved, still, rtol=0, atol=1e-14)


@pytest.mark.parametrize("group", ["T", "O", "I"])
def test_bases_of_space_keep_the_second_moment_and_make_coefficients(group):
    basis = filter_basis(group)
    assert basis.turned.shape == (basis.group.order, 10, 3, 3, 3)
    assert basis.gains().relu == pytest.approx(1.0, abs=1e-9)
    product = basis.to_coefficients(1.7) @ basis.from_coefficients(1.7)
    np.testing.assert_allclose(product, np.eye(10), rtol=0, atol=1e-12)


def test_lengths_of_voxels():
    for aspect in ((3.0, 1.0), (2.0, 0.5)):
        x, y, z = sides(3, aspect)
        assert x * y * z == pytest.approx(1.0)
        assert (z / x, y / x) == pytest.approx(aspect)
    for bad in (2.0, (2.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(ValueError, match="expected an aspect of 1 or 2 numbers"):
            sides(3, bad)
    assert filter_basis("O", aspect=(1.0, 1.0)) is filter_basis("O")
    assert Group("O").steps == 0
