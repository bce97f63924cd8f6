"""Theorem 1: in the continuum Ψ and Φ are equivariant, in the plane and in space.

The functions are polynomials times Gaussians. sympy differentiates r(Mᵀx) with a symbolic matrix M,
so that both sides of the theorem are evaluated from exact derivatives; the library contributes
nothing but the operators in turned frames.
"""

from functools import cache

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group, special_ortho_group

from econv.groups import Group
from econv.operators import monomials, operator_set

PARAMETERS = 6
TOLERANCE = 1e-10
POINTS = 5

PLANE = operator_set("paper")
SPACE = operator_set([*operator_set("order<=2", 3), (2, 1, 0), (1, 1, 1), (2, 1, 1), (0, 2, 2)], 3)

seeds = st.integers(0, 2**32 - 1)


@cache
def derivatives(dimension, order=4):
    """All derivatives in x of r(Mᵀx; parameters), as one function of x, M and the parameters."""
    x = sympy.symbols(f"x:{dimension}")
    m = sympy.symbols(f"m:{dimension}:{dimension}")
    p = sympy.symbols(f"p:{PARAMETERS}")
    u = list(sympy.Matrix(dimension, dimension, m).T * sympy.Matrix(x))
    centred = [component - centre for component, centre in zip(u, p, strict=False)]
    widths = (sympy.Rational(2, 5), sympy.Rational(3, 5), sympy.Rational(1, 2))
    quadratic = sum(w * c**2 for w, c in zip(widths, centred, strict=False))
    polynomial = 1 + p[3] * u[0] + p[4] * u[0] * u[1] + p[5] * u[-1] ** 2
    function = polynomial * sympy.exp(-quadratic)
    found = {(0,) * dimension: function}
    for exponents in monomials(order, dimension)[1:]:
        axis = next(i for i, e in enumerate(exponents) if e)
        lower = tuple(e - (i == axis) for i, e in enumerate(exponents))
        found[exponents] = found[lower].diff(x[axis])
    listed = [found[e] for e in monomials(order, dimension)]
    return sympy.lambdify((x, m, p), listed, modules="numpy", cse=True)


def apply(operators, beta, frame, points, matrix, parameters):
    """χ^(frame)[r(Mᵀ·)] at the points, with coefficients β: Σ_s β_s ∂_s in the turned frame."""
    dimension = operators.dimension
    values = derivatives(dimension)(points.T, matrix.ravel(), parameters)
    by_exponents = dict(zip(monomials(4, dimension), values, strict=True))
    total = np.zeros(len(points))
    for b, polynomial in zip(beta, operators.polynomials, strict=True):
        for exponents, value in polynomial.in_frame(frame).terms:
            total += b * value * by_exponents[exponents]
    return total


def lift_sides(operators, seed, matrices=ortho_group, frame_of=lambda a: a):
    """Ψ[π r](x, A) and π[Ψ r](x, A) at random points, for random A and Ã."""
    random = np.random.default_rng(seed)
    d = operators.dimension
    a, turn = matrices.rvs(d, size=2, random_state=random)
    beta = random.normal(size=len(operators))
    points, parameters = random.normal(size=(POINTS, d)), random.normal(size=PARAMETERS)
    left = apply(operators, beta, frame_of(a), points, turn, parameters)
    right = apply(operators, beta, frame_of(turn.T @ a), points @ turn, np.eye(d), parameters)
    return left, right


def feature_parameters(random, dimension):
    """A smooth map from matrices to parameters: e(x, A) = r(x; parameters(A))."""
    linear = random.normal(size=(PARAMETERS, dimension * dimension))
    return lambda a: np.sin(linear @ a.ravel())


def group_sides(operators, seed, relative, a, turn, neighbour=lambda a, b: a @ b):
    """Φ[π e](x, A) and π[Φ e](x, A), the integral a sum over the elements in ``relative``."""
    random = np.random.default_rng(seed)
    d = operators.dimension
    parameters = feature_parameters(random, d)
    beta = random.normal(size=(len(relative), len(operators)))
    points = random.normal(size=(POINTS, d))
    left, right = np.zeros(POINTS), np.zeros(POINTS)
    for b, element in zip(beta, relative, strict=True):
        # (π e)(x, AB) = e(Ã⁻¹x, Ã⁻¹AB)
        moved = parameters(turn.T @ neighbour(a, element))
        left += apply(operators, b, a, points, turn, moved)
        here = turn.T @ a
        right += apply(
            operators, b, here, points @ turn, np.eye(d), parameters(neighbour(here, element))
        )
    return left, right


def error(sides):
    left, right = sides
    return np.abs(left - right).max() / np.abs(right).max()


def test_derivatives_agree_with_finite_differences():
    evaluate = derivatives(2)
    matrix, parameters = ortho_group.rvs(2, random_state=3), np.linspace(-1, 1, PARAMETERS)
    point, h = np.array([0.3, -0.4]), 1e-5
    for axis in range(2):
        step = h * np.eye(2)[axis]
        above = np.array(evaluate(point + step, matrix.ravel(), parameters))
        below = np.array(evaluate(point - step, matrix.ravel(), parameters))
        here = dict(zip(monomials(4, 2), evaluate(point, matrix.ravel(), parameters), strict=True))
        for i, exponents in enumerate(monomials(3, 2)):
            higher = tuple(e + (j == axis) for j, e in enumerate(exponents))
            slope = (above[i] - below[i]) / (2 * h)
            assert here[higher] == pytest.approx(slope, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("operators", [PLANE, SPACE], ids=["plane", "space"])
@given(seed=seeds)
@settings(max_examples=50, deadline=None)
def test_lift_is_equivariant(operators, seed):
    assert error(lift_sides(operators, seed)) < TOLERANCE


@pytest.mark.parametrize("determinant", [1, -1])
@pytest.mark.parametrize("operators", [PLANE, SPACE], ids=["plane", "space"])
def test_random_matrices_hold_rotations_and_reflections(operators, determinant):
    found = [
        np.linalg.det(ortho_group.rvs(operators.dimension, random_state=seed)) for seed in range(20)
    ]
    assert any(d == pytest.approx(determinant) for d in found)


@pytest.mark.parametrize("operators", [PLANE, SPACE], ids=["plane", "space"])
@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_group_operator_is_equivariant_under_all_of_o_n(operators, seed):
    random = np.random.default_rng(seed)
    relative = ortho_group.rvs(operators.dimension, size=4, random_state=random)
    a, turn = ortho_group.rvs(operators.dimension, size=2, random_state=random)
    assert error(group_sides(operators, seed, relative, a, turn)) < TOLERANCE


@pytest.mark.parametrize("name", ["p6", "p8", "p8m"])
@given(seed=seeds, data=st.data())
@settings(max_examples=20, deadline=None)
def test_group_operator_is_equivariant_under_a_subgroup(name, seed, data):
    matrices = Group(name).matrices
    a, turn = (matrices[data.draw(st.integers(0, len(matrices) - 1))] for _ in range(2))
    assert error(group_sides(PLANE, seed, matrices, a, turn)) < TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_group_operator_on_features_indexed_by_the_product_table(seed):
    """The same with e(x, g) given for the sixteen elements alone, all frames and all turns."""
    group, random = Group("p8m"), np.random.default_rng(seed)
    parameters = random.normal(size=(group.order, PARAMETERS))
    beta = random.normal(size=(group.order, len(PLANE)))
    points, turn = random.normal(size=(1, 2)), int(random.integers(1, group.order))
    matrix = group.matrices[turn]
    for g in range(0, group.order, 3):
        back = group.relative[turn, g]
        left = right = 0.0
        for k in range(group.order):
            source = group.relative[turn, group.product[g, k]]
            frame = group.matrices[g]
            left += apply(PLANE, beta[k], frame, points, matrix, parameters[source])
            source = group.product[back, k]
            frame = group.matrices[back]
            right += apply(PLANE, beta[k], frame, points @ matrix, np.eye(2), parameters[source])
        assert error((left, right)) < TOLERANCE


# The checks above can say no


@pytest.mark.parametrize("operators", [PLANE, SPACE], ids=["plane", "space"])
@pytest.mark.parametrize("seed", range(10))
def test_a_frame_turned_by_the_inverse_breaks_the_lift(operators, seed):
    # Rotations only: a reflection of the plane is its own inverse, and nobody could tell.
    sides = lift_sides(operators, seed, special_ortho_group, frame_of=np.transpose)
    assert error(sides) > 1e-3


@pytest.mark.parametrize("operators", [PLANE, SPACE], ids=["plane", "space"])
@pytest.mark.parametrize("seed", range(10))
def test_a_frame_that_stays_put_breaks_the_lift(operators, seed):
    sides = lift_sides(operators, seed, frame_of=lambda a: np.eye(len(a)))
    assert error(sides) > 1e-3


@pytest.mark.parametrize("operators", [PLANE, SPACE], ids=["plane", "space"])
@pytest.mark.parametrize("seed", range(10))
def test_the_product_the_wrong_way_round_breaks_the_group_operator(operators, seed):
    random = np.random.default_rng(seed)
    d = operators.dimension
    # In the plane, rotations commute with each other but not with a reflection.
    relative = special_ortho_group.rvs(d, size=4, random_state=random) @ np.diag([-1, 1, 1][:d])
    a, turn = special_ortho_group.rvs(d, size=2, random_state=random)
    sides = group_sides(operators, seed, relative, a, turn, neighbour=lambda a, b: b @ a)
    assert error(sides) > 1e-3
