"""Operators: algebra, the action of orthogonal matrices, closures and how sets are read."""

import itertools
import math
import operator

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group

from econv.groups import Group
from econv.operators import OperatorSet, Polynomial, action, monomials, operator_set

PAPER = ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2))

seeds = st.integers(0, 2**32 - 1)
dimensions = st.sampled_from([2, 3])


def orthogonal(dimension, seed):
    return ortho_group.rvs(dimension, random_state=seed)


def rows(polynomials, order, dimension=2):
    columns = monomials(order, dimension)
    return np.array([[p.coefficient(e) for e in columns] for p in polynomials])


def to_sympy(polynomial, symbols):
    return sum(
        (value * math.prod(s**e for s, e in zip(symbols, exponents, strict=True)))
        for exponents, value in polynomial.terms
    ) + sympy.Integer(0)


@st.composite
def polynomials(draw, dimension=2, order=3):
    # Small whole numbers keep every law exact in floating point.
    exponents = st.sampled_from(monomials(order, dimension))
    terms = draw(st.dictionaries(exponents, st.integers(-5, 5).map(float), max_size=5))
    return Polynomial.of(terms, dimension)


# The algebra of polynomials


@given(polynomials(), polynomials(), polynomials())
@settings(deadline=None)
def test_polynomials_form_a_commutative_ring(p, q, r):
    zero, one = Polynomial.of({}, 2), Polynomial.monomial((0, 0))
    assert p + q == q + p
    assert (p + q) + r == p + (q + r)
    assert p * q == q * p
    assert (p * q) * r == p * (q * r)
    assert p * (q + r) == p * q + p * r
    assert p + zero == p == p * one
    assert p - p == zero == p * zero
    assert p - q == p + q * -1
    assert 2 * p == p * 2 == p + p


@given(polynomials(order=2), st.integers(0, 4))
@settings(deadline=None)
def test_a_power_is_a_repeated_product(p, exponent):
    assert p**exponent == math.prod([p] * exponent, start=Polynomial.monomial((0, 0)))


@given(polynomials(dimension=3), polynomials(dimension=3))
@settings(deadline=None)
def test_product_agrees_with_sympy(p, q):
    symbols = sympy.symbols("x y z")
    expected = sympy.Poly(to_sympy(p, symbols) * to_sympy(q, symbols), symbols)
    found = p * q
    wanted = {e: float(v) for e, v in expected.terms() if v != 0}
    assert dict(found.terms) == pytest.approx(wanted, rel=1e-14, abs=0)


@given(polynomials())
@settings(deadline=None)
def test_terms_are_canonical_and_hashable(p):
    assert all(value != 0 for _, value in p.terms)
    assert Polynomial.of(dict(reversed(p.terms)), 2) == p
    assert hash(Polynomial.of(dict(p.terms), 2)) == hash(p)
    orders = [sum(exponents) for exponents, _ in p.terms]
    assert orders == sorted(orders)
    assert p.order == max(orders, default=0)


def test_coefficients_and_variables():
    x, y, z = Polynomial.variables(3)
    p = 2 * x * y + 3j * z**2
    assert p.coefficient((1, 1, 0)) == 2
    assert p.coefficient((0, 0, 2)) == 3j
    assert p.coefficient((1, 0, 0)) == 0
    assert p.order == 2
    assert p.dimension == 3
    assert z == Polynomial.monomial((0, 0, 1))


@pytest.mark.parametrize("exponent", [-1, -2])
def test_a_negative_power_is_refused(exponent):
    with pytest.raises(ValueError, match=str(exponent)):
        Polynomial.variables(2)[0] ** exponent


@pytest.mark.parametrize("combine", [operator.add, operator.sub, operator.mul])
def test_polynomials_of_different_dimensions_do_not_combine(combine):
    with pytest.raises(ValueError, match="dimension"):
        combine(Polynomial.variables(2)[0], Polynomial.variables(3)[2])


def test_text_reads_like_mathematics():
    x, y = Polynomial.variables(2)
    assert str(x**2 + y**2) == "∂xx + ∂yy"
    assert str(2 * x**2 * y) == "2·∂xxy"
    assert str(y - 2.5 * x) == "-2.5·∂x + ∂y"
    assert str(x - 2 * y) == "∂x - 2·∂y"
    assert str(x + 3 * x**0) == "3 + ∂x"
    assert str(x**0) == "1"
    assert str(x * 0) == "0"
    assert str(math.prod(Polynomial.variables(3))) == "∂xyz"


# The action of an orthogonal matrix


@given(dimension=dimensions, seed=seeds)
@settings(max_examples=25, deadline=None)
def test_every_monomial_in_a_turned_frame_agrees_with_sympy(dimension, seed):
    matrix = orthogonal(dimension, seed)
    symbols = sympy.symbols("x y z")[:dimension]
    nabla = sympy.Matrix(np.linalg.inv(matrix)) * sympy.Matrix(symbols)
    random = np.random.default_rng(seed)
    every = monomials(4 if dimension == 2 else 3, dimension)
    for i in random.choice(len(every), 4, replace=False):
        substituted = math.prod((nabla[axis] ** e for axis, e in enumerate(every[i])), start=1)
        expected = sympy.Poly(sympy.expand(substituted), symbols)
        found = Polynomial.monomial(every[i]).in_frame(matrix)
        for exponents in monomials(found.order, dimension):
            assert found.coefficient(exponents) == pytest.approx(
                float(expected.coeff_monomial(exponents)), rel=0, abs=1e-13
            )


def test_the_turned_frame_of_equation_5_spelt_out():
    angle = 0.3
    c, s = math.cos(angle), math.sin(angle)
    x, y = Polynomial.variables(2)
    rotation = [[c, -s], [s, c]]
    assert x.in_frame(rotation) == c * x + s * y
    assert y.in_frame(rotation) == -s * x + c * y


@given(p=polynomials(order=2), q=polynomials(order=2), seed=seeds)
@settings(deadline=None)
def test_turning_the_frame_respects_sums_and_products(p, q, seed):
    matrix = orthogonal(2, seed)

    def close(left, right):
        np.testing.assert_allclose(rows([left], 4), rows([right], 4), rtol=0, atol=1e-12)

    close((p + q).in_frame(matrix), p.in_frame(matrix) + q.in_frame(matrix))
    close((p * q).in_frame(matrix), p.in_frame(matrix) * q.in_frame(matrix))


@given(
    p=st.integers(0, 4), q=st.integers(0, 4), angle=st.floats(-math.pi, math.pi), flip=st.booleans()
)
@settings(deadline=None)
def test_angular_frequency_is_p_minus_q_and_reflection_swaps_them(p, q, angle, flip):
    x, y = Polynomial.variables(2)
    plus, minus = x + 1j * y, x - 1j * y
    c, s = math.cos(angle), math.sin(angle)
    if flip:
        found = (plus**p * minus**q).in_frame(np.diag([1.0, -1.0]))
        expected = plus**q * minus**p
    else:
        found = (plus**p * minus**q).in_frame([[c, -s], [s, c]])
        expected = plus**p * minus**q * complex(np.exp(-1j * (p - q) * angle))
    np.testing.assert_allclose(rows([found], 8), rows([expected], 8), rtol=0, atol=1e-11)


@given(dimension=dimensions, first=seeds, second=seeds, order=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_action_of_a_product_is_the_reversed_product_of_actions(dimension, first, second, order):
    a, b = orthogonal(dimension, first), orthogonal(dimension, second)
    operators = operator_set(f"order<={order}", dimension).polynomials
    np.testing.assert_allclose(
        action(b @ a, operators), action(a, operators) @ action(b, operators), rtol=0, atol=1e-12
    )


def test_the_order_of_the_product_matters():
    a, b = orthogonal(3, 1), orthogonal(3, 2)
    operators = operator_set("order<=2", 3).polynomials
    wrong = action(b, operators) @ action(a, operators)
    assert np.abs(action(b @ a, operators) - wrong).max() > 0.1


@given(dimension=dimensions, seed=seeds)
@settings(max_examples=20, deadline=None)
def test_action_writes_turned_operators_in_the_operators_themselves(dimension, seed):
    matrix = orthogonal(dimension, seed)
    operators = operator_set("order<=3", dimension).polynomials
    combined = action(matrix, operators) @ rows(operators, 3, dimension)
    turned = rows([p.in_frame(matrix) for p in operators], 3, dimension)
    np.testing.assert_allclose(combined, turned, rtol=0, atol=1e-12)


def test_action_of_the_identity_is_the_identity():
    operators = operator_set("paper").polynomials
    np.testing.assert_allclose(action(np.eye(2), operators), np.eye(9), rtol=0, atol=1e-15)


def test_action_refuses_a_set_that_is_not_closed():
    eighth = Group("p8").matrices[1]
    with pytest.raises(ValueError, match="not closed"):
        action(eighth, operator_set("paper").polynomials)
    twelve = operator_set("paper").closure("p8")
    assert action(eighth, twelve).shape == (12, 12)
    with pytest.raises(ValueError, match="not closed"):
        action(Group("p3").matrices[1], twelve)


@pytest.mark.parametrize(
    "matrix",
    [np.eye(3), np.ones(4), [[1.0, 0.1], [0.0, 1.0]], 2 * np.eye(2), np.full((2, 2), np.nan)],
)
def test_only_orthogonal_matrices_of_the_right_size_act(matrix):
    with pytest.raises(ValueError, match="expected a"):
        Polynomial.monomial((1, 0)).in_frame(matrix)


# Closures

CLOSURE = {
    **{f"p{n}{m}": 9 for n in (1, 2, 4) for m in ("", "m")},
    **{f"p8{m}": 12 for m in ("", "m")},
    **{f"p{n}{m}": 13 for n in (3, 5, 6, 7, 9, 10, 11, 12, 16, 24, 32) for m in ("", "m")},
}
GENERAL = [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (3, 0), (2, 1), (1, 2), (0, 3), (4, 0),
           (2, 2), (0, 4)]  # fmt: skip


def wirtinger(exponents):
    x, y = Polynomial.variables(2)
    return [(x + 1j * y) ** p * (x - 1j * y) ** q for p, q in exponents]


@pytest.mark.parametrize(("name", "dimension"), CLOSURE.items())
def test_closure_of_the_nine_has_the_dimension_that_theory_gives(name, dimension):
    closure = operator_set("paper").closure(name)
    assert len(closure) == dimension
    assert np.linalg.matrix_rank(rows(closure, 4)) == dimension


@pytest.mark.parametrize("name", [name for name, size in CLOSURE.items() if size == 13])
def test_general_closure_is_spanned_by_thirteen_complex_derivatives(name):
    closure = rows(operator_set("paper").closure(name), 4)
    complex_basis = rows(wirtinger(GENERAL), 4)
    assert np.linalg.matrix_rank(complex_basis) == 13
    assert np.linalg.matrix_rank(np.concatenate([closure, complex_basis]), tol=1e-9) == 13


@pytest.mark.parametrize("name", ["p8", "p8m"])
def test_closure_under_eighth_turns_holds_the_sum_of_the_fourth_powers_only(name):
    closure = rows(operator_set("paper").closure(name), 4)
    kept = wirtinger([e for e in GENERAL if e not in ((4, 0), (0, 4))])
    plus, minus = wirtinger([(4, 0), (0, 4)])
    basis = rows([*kept, plus + minus], 4)
    assert np.linalg.matrix_rank(np.concatenate([closure, basis]), tol=1e-9) == 12
    with_one = np.concatenate([closure, rows([plus], 4)])
    assert np.linalg.matrix_rank(with_one, tol=1e-9) == 13


@given(n=st.integers(1, 24), mirrored=st.booleans())
@settings(max_examples=25, deadline=None)
def test_closure_is_closed_and_holds_every_turned_operator(n, mirrored):
    group = Group(f"p{n}{'m' * mirrored}")
    operators = operator_set("paper")
    closure = operators.closure(group)
    basis = rows(closure, 4)
    turned = operators.turned(group).reshape(-1, basis.shape[1])
    residue = turned - turned @ np.linalg.pinv(basis) @ basis
    assert np.abs(residue).max() < 1e-12
    # `action` itself refuses what is not closed.
    for matrix in group.matrices:
        assert action(matrix, closure).shape == (len(closure), len(closure))


@pytest.mark.parametrize("name", ["p3", "p5", "p6m", "p8", "p8m", "p12", "p16m"])
def test_closure_basis_is_orthonormal_so_that_its_action_is_orthogonal(name):
    closure = operator_set("paper").closure(name)
    for matrix in Group(name).matrices:
        turned = action(matrix, closure)
        np.testing.assert_allclose(turned @ turned.T, np.eye(len(closure)), rtol=0, atol=1e-12)
    norms = np.array([math.factorial(i) * math.factorial(j) for i, j in monomials(4, 2)])
    norms = norms / [math.factorial(i + j) for i, j in monomials(4, 2)]
    basis = rows(closure, 4)
    np.testing.assert_allclose(basis * norms @ basis.T, np.eye(len(closure)), rtol=0, atol=1e-12)


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_general_closure_is_closed_under_all_of_o2(seed):
    turned = action(orthogonal(2, seed), operator_set("paper").closure("p3"))
    np.testing.assert_allclose(turned @ turned.T, np.eye(13), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CLOSURE)
def test_closure_polynomials_are_homogeneous(name):
    for polynomial in operator_set("paper").closure(name):
        assert len({sum(exponents) for exponents, _ in polynomial.terms}) == 1


@pytest.mark.parametrize("order", range(6))
@pytest.mark.parametrize("name", ["p1", "p4m", "p5", "p8", "p12m"])
def test_all_monomials_up_to_an_order_are_their_own_closure(name, order):
    operators = operator_set(f"order<={order}")
    assert operators.closure(name) == operators.polynomials


@pytest.mark.parametrize("name", ["p1", "p2", "p4", "p1m", "p2m", "p4m"])
def test_the_nine_are_their_own_closure_under_grid_symmetries(name):
    assert operator_set("paper").closure(name) == operator_set("paper").polynomials


@pytest.mark.parametrize(
    ("listed", "name", "size"),
    [
        ([(2, 0)], "p2", 1),
        ([(2, 0)], "p4", 2),
        ([(2, 0)], "p3", 3),
        ([(1, 0)], "p1m", 1),
        ([(1, 0)], "p3", 2),
        ([(2, 0), (0, 2)], "p8", 3),
        ([(0, 0), (3, 0)], "p4", 3),
        ([(0, 0), (3, 0)], "p6", 4),
        ([(0, 0), (3, 0)], "p12", 5),
    ],
)
def test_closures_of_small_sets(listed, name, size):
    assert len(operator_set(listed).closure(name)) == size


def test_turned_rows_are_the_operators_in_every_frame():
    operators, group = operator_set("paper"), Group("p6m")
    turned = operators.turned(group)
    assert turned.shape == (12, 9, 15)
    for element, matrix in enumerate(group.matrices):
        expected = rows([p.in_frame(matrix) for p in operators.polynomials], 4)
        np.testing.assert_allclose(turned[element], expected, rtol=0, atol=1e-13)
    assert not turned.flags.writeable


# Operator sets


def test_the_papers_nine_come_in_the_fixed_order():
    operators = operator_set("paper")
    assert operators.monomials == tuple(operators) == PAPER
    assert [str(p) for p in operators.polynomials] == [
        "1", "∂x", "∂y", "∂xx", "∂xy", "∂yy", "∂xxy", "∂xyy", "∂xxyy",
    ]  # fmt: skip
    assert operators.name == "paper"
    assert operators.orders == (0, 1, 1, 2, 2, 2, 3, 3, 4)
    assert operators.order == 4
    assert len(operators) == 9
    assert operators.dimension == 2


@given(order=st.integers(0, 6), dimension=st.integers(1, 3), spaces=st.sampled_from(["", " "]))
@settings(deadline=None)
def test_order_up_to_n_holds_every_monomial_once(order, dimension, spaces):
    operators = operator_set(f"order{spaces}<={spaces}{order}", dimension)
    expected = {e for e in itertools.product(range(order + 1), repeat=dimension) if sum(e) <= order}
    assert set(operators) == expected
    assert len(operators) == math.comb(order + dimension, dimension)
    assert list(operators.orders) == sorted(operators.orders)
    assert operators.name == f"order<={order}"


def test_monomials_read_low_orders_first_and_x_before_y():
    assert monomials(2, 2) == ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2))
    assert monomials(1, 3) == ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))


def test_a_list_of_exponents_keeps_its_order():
    listed = [[0, 2], (0, 0), (2, 0)]
    operators = operator_set(listed)
    assert operators.monomials == ((0, 2), (0, 0), (2, 0))
    assert operators.name == "∂yy,1,∂xx"
    assert operator_set(iter(listed)) == operators
    assert operator_set(operators) is operators


def test_an_integer_array_is_a_list_of_exponents():
    operators = operator_set(np.array([[0, 0], [1, 0]]))
    assert operators.monomials == ((0, 0), (1, 0))
    assert all(type(e) is int for exponents in operators for e in exponents)


def test_sets_are_equal_by_their_monomials():
    assert operator_set(PAPER) == operator_set("paper")
    assert hash(operator_set(PAPER)) == hash(operator_set("paper"))
    assert operator_set(PAPER[::-1]) != operator_set("paper")


@pytest.mark.parametrize(
    "bad", ["papers", "", "order", "order<=", "order<=-1", "order<=1.5", "order<3", "order>=2"]
)
def test_unknown_names_say_what_names_look_like(bad):
    with pytest.raises(ValueError, match="unknown operators") as error:
        operator_set(bad)
    for example in (repr(bad), "'paper'", "'order<=N'", "(0, 0)"):
        assert example in str(error.value)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], "at least one"),
        ([(0, 0), (1, 0), (0, 0)], "each monomial once"),
        ([(-1, 0)], "non-negative"),
        ([(0, 0), (1,)], "one length"),
        ([(0.5, 0)], "whole numbers"),
        ([("a", 0)], "exponent tuples"),
        ([("1", "0")], "whole numbers"),
        ([(math.inf, 0)], "expected"),
        ([(math.nan, 0)], "expected"),
        ([0, 1], "exponent tuples"),
        (3, "exponent tuples"),
        ([(0, 0, 0)], "2 dimensions"),
        ([(1,)], "2 dimensions"),
    ],
)
def test_bad_lists_say_what_was_expected(bad, said):
    with pytest.raises(ValueError, match=said):
        operator_set(bad)


def test_the_nine_are_two_dimensional_only():
    with pytest.raises(ValueError, match="3 dimensions"):
        operator_set("paper", dimension=3)


def test_a_planar_group_refuses_operators_of_space():
    with pytest.raises(ValueError, match="3×3"):
        OperatorSet(((1, 0, 0),)).turned("p4")


@pytest.mark.parametrize("group", ["p4", "p8", "p6m"])
def test_operators_in_a_turned_frame_are_the_operators_turned(group):
    upright, turned = operator_set("paper"), operator_set("paper@22.5")
    angle = math.radians(22.5)
    frame = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    for matrix, found in zip(Group(group).matrices, turned.turned(group), strict=True):
        wanted = rows([p.in_frame(matrix @ frame) for p in upright.polynomials], 4, 2)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    assert np.abs(turned.turned(group) - upright.turned(group)).max() > 0.1
    assert turned != upright
    assert turned.name == "paper@22.5"


def test_an_angle_that_is_no_angle_is_refused():
    for wrong in ("paper@", "paper@x", "order<=2@1e3"):
        with pytest.raises(ValueError, match="unknown operators"):
            operator_set(wrong)
    with pytest.raises(ValueError, match="degrees in the plane"):
        operator_set("order<=2@22.5", 3)
