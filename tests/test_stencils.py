"""Stencils: the supplement's matrices, moments proven at birth, measured orders of convergence."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from econv.operators import Polynomial, monomials
from econv.stencils import Central, Stencil, central, check_moments, coordinates, stencil_set

# Supplement, section 1: the numerical schemes of the partial differential operators, at h = 1.
SUPPLEMENT = {
    (0, 0): [
        [0, 0, 0],
        [0, 1, 0],
        [0, 0, 0],
    ],
    (1, 0): [
        [0, 0, 0],
        [-1 / 2, 0, 1 / 2],
        [0, 0, 0],
    ],
    (0, 1): [
        [0, 1 / 2, 0],
        [0, 0, 0],
        [0, -1 / 2, 0],
    ],
    (2, 0): [
        [0, 0, 0],
        [1, -2, 1],
        [0, 0, 0],
    ],
    (1, 1): [
        [-1 / 4, 0, 1 / 4],
        [0, 0, 0],
        [1 / 4, 0, -1 / 4],
    ],
    (0, 2): [
        [0, 1, 0],
        [0, -2, 0],
        [0, 1, 0],
    ],
    (2, 1): [
        [1 / 2, -1, 1 / 2],
        [0, 0, 0],
        [-1 / 2, 1, -1 / 2],
    ],
    (1, 2): [
        [-1 / 2, 0, 1 / 2],
        [1, 0, -1],
        [-1 / 2, 0, 1 / 2],
    ],
    (2, 2): [
        [1, -2, 1],
        [-2, 4, -2],
        [1, -2, 1],
    ],
    (3, 0): [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [-1 / 2, 1, 0, -1, 1 / 2],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ],
    (0, 3): [
        [0, 0, 1 / 2, 0, 0],
        [0, 0, -1, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, -1 / 2, 0, 0],
    ],
    (4, 0): [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, -4, 6, -4, 1],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ],
    (3, 1): [
        [0, 0, 0, 0, 0],
        [-1 / 4, 1 / 2, 0, -1 / 2, 1 / 4],
        [0, 0, 0, 0, 0],
        [1 / 4, -1 / 2, 0, 1 / 2, -1 / 4],
        [0, 0, 0, 0, 0],
    ],
    (1, 3): [
        [0, -1 / 4, 0, 1 / 4, 0],
        [0, 1 / 2, 0, -1 / 2, 0],
        [0, 0, 0, 0, 0],
        [0, -1 / 2, 0, 1 / 2, 0],
        [0, 1 / 4, 0, -1 / 4, 0],
    ],
    (0, 4): [
        [0, 0, 1, 0, 0],
        [0, 0, -4, 0, 0],
        [0, 0, 6, 0, 0],
        [0, 0, -4, 0, 0],
        [0, 0, 1, 0, 0],
    ],
}

FREQUENCIES = (0.9, 1.1, 0.8)
PHASES = (0.5, 0.7, 0.3)


def wave(*coordinates):
    """A product of sines, smooth and with no derivative that vanishes at 0."""
    waves = zip(coordinates, FREQUENCIES, PHASES, strict=False)
    return math.prod(np.sin(f * x + phase) for x, f, phase in waves)


def wave_derivative(exponents):
    """The derivative of `wave` at 0."""
    waves = zip(exponents, FREQUENCIES, PHASES, strict=False)
    return math.prod(f**e * math.sin(phase + e * math.pi / 2) for e, f, phase in waves)


# The supplement


def test_the_supplement_covers_every_operator_up_to_order_four():
    assert set(SUPPLEMENT) == set(monomials(4, 2))


@pytest.mark.parametrize(("exponents", "matrix"), SUPPLEMENT.items())
def test_central_stencils_equal_the_supplement(exponents, matrix):
    np.testing.assert_array_equal(central(exponents, size=len(matrix)).weights, matrix)


@pytest.mark.parametrize(("exponents", "matrix"), SUPPLEMENT.items())
def test_a_larger_size_pads_with_zeros(exponents, matrix):
    margin = (9 - len(matrix)) // 2
    np.testing.assert_array_equal(central(exponents, size=9).weights, np.pad(matrix, margin))


def test_the_smallest_sizes():
    sizes = {e: central(e).size for e in monomials(4, 2)}
    for exponents, size in sizes.items():
        assert size == {0: 1, 1: 3, 2: 3, 3: 5, 4: 5}[max(exponents)]
    assert central((1, 0), accuracy=4).size == 5
    assert central((2, 0), accuracy=4).size == 5
    assert central((4, 0), accuracy=4).size == 7
    assert central((2, 0), accuracy=6).size == 7


def test_textbook_schemes_of_fourth_order():
    first = np.array([1, -8, 0, 8, -1]) / 12
    second = np.array([-1, 16, -30, 16, -1]) / 12
    np.testing.assert_array_equal(central((1,), accuracy=4).weights, first)
    np.testing.assert_array_equal(central((2,), accuracy=4).weights, second)


# Coordinates


def test_x_points_right_and_y_points_up():
    x, y = coordinates(3, 2)
    np.testing.assert_array_equal(x, [[-1, 0, 1]] * 3)
    np.testing.assert_array_equal(y, [[1] * 3, [0] * 3, [-1] * 3])
    assert central((0, 1)).weights[0, 1] > 0 > central((0, 1)).weights[2, 1]


def test_a_third_coordinate_runs_along_its_axis():
    x, y, z = coordinates(3, 3)
    assert (x[:, :, 0] == -1).all()
    assert (x[:, :, 2] == 1).all()
    assert (y[:, 0] == 1).all()
    assert (y[:, 2] == -1).all()
    assert (z[0] == -1).all()
    assert (z[2] == 1).all()


@pytest.mark.parametrize("axis", range(3))
def test_first_derivatives_grow_along_their_own_coordinate(axis):
    exponents = tuple(int(i == axis) for i in range(3))
    weights = central(exponents).weights
    for other, points in enumerate(coordinates(3, 3)):
        assert (weights * points).sum() == (1.0 if other == axis else 0.0)


def test_transposing_the_grid_swaps_x_and_minus_y():
    for i, j in monomials(4, 2):
        swapped = central((j, i), size=5).weights.T * (-1) ** (i + j)
        np.testing.assert_array_equal(central((i, j), size=5).weights, swapped)


# Accuracy


def cases():
    for accuracy in (2, 4):
        for dimension, order in ((1, 4), (2, 4), (3, 3)):
            for exponents in monomials(order, dimension)[1:]:
                yield accuracy, exponents


CASES = list(cases())


@pytest.mark.parametrize(("accuracy", "exponents"), CASES)
def test_measured_order_of_convergence(accuracy, exponents):
    stencil = central(exponents, accuracy)
    spacings = np.array([0.2, 0.1])
    errors = [abs(stencil.apply(wave, spacing=h) - wave_derivative(exponents)) for h in spacings]
    slope = np.log(errors[0] / errors[1]) / np.log(spacings[0] / spacings[1])
    assert slope == pytest.approx(accuracy, abs=0.1)


@pytest.mark.parametrize("dimension", [1, 2, 3])
@pytest.mark.parametrize("accuracy", [2, 4, 6])
def test_order_zero_is_exact(dimension, accuracy):
    stencil = central((0,) * dimension, accuracy)
    assert stencil.size == 1
    assert stencil.apply(wave, spacing=0.3) == wave_derivative((0,) * dimension)


@pytest.mark.parametrize("accuracy", [2, 4, 6])
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_stencils_are_exact_on_polynomials_below_their_order(accuracy, dimension):
    for exponents in monomials(3, dimension):
        stencil = central(exponents, accuracy)
        for power in monomials(sum(exponents) + accuracy - 1, dimension):
            expected = math.prod(map(math.factorial, exponents)) if power == exponents else 0.0
            found = stencil.apply(
                lambda *x, power=power: math.prod(c**e for c, e in zip(x, power, strict=True))
            )
            assert found == pytest.approx(expected, rel=0, abs=1e-9)


def test_apply_at_another_point():
    found = central((1, 1)).apply(lambda x, y: x**2 * y, at=(3.0, 5.0), spacing=0.5)
    assert found == pytest.approx(6.0, rel=1e-12)


def test_operators_of_mixed_order_are_refused():
    dx, _ = Polynomial.variables(2)
    with pytest.raises(ValueError, match=r"one order.*got 1 \+ ∂x"):
        Central().stencil(dx**0 + dx)


# Moments are proven at birth


@given(
    exponents=st.sampled_from(monomials(4, 2)),
    accuracy=st.sampled_from([2, 4]),
    perturbation=st.floats(1e-6, 1.0),
    sign=st.sampled_from([-1, 1]),
    data=st.data(),
)
@settings(deadline=None)
def test_a_stencil_with_one_wrong_weight_cannot_be_built(
    exponents, accuracy, perturbation, sign, data
):
    right = central(exponents, accuracy)
    weights = right.weights.copy()
    place = data.draw(st.integers(0, weights.size - 1))
    weights.flat[place] += sign * perturbation
    with pytest.raises(ArithmeticError, match=f"accuracy {accuracy}"):
        Stencil(right.operator, weights, accuracy)


@given(seed=st.integers(0, 2**32 - 1), size=st.floats(1e-6, 10.0))
@settings(deadline=None)
def test_moments_leave_no_freedom_where_the_nine_fill_the_support(seed, size):
    direction = np.random.default_rng(seed).normal(size=(3, 3))
    weights = central((2, 2)).weights + size * direction / np.abs(direction).max()
    with pytest.raises(ArithmeticError, match="∂xxyy"):
        Stencil(Polynomial.monomial((2, 2)), weights, 2)


@given(
    exponents=st.sampled_from(monomials(4, 2)),
    claimed=st.sampled_from(monomials(4, 2)),
)
@settings(deadline=None)
def test_a_stencil_cannot_pass_for_another_operator(exponents, claimed):
    weights = central(exponents, size=5).weights
    if exponents == claimed:
        assert Stencil(Polynomial.monomial(claimed), weights, 2).size == 5
    else:
        with pytest.raises(ArithmeticError, match="moment"):
            Stencil(Polynomial.monomial(claimed), weights, 2)


@pytest.mark.parametrize("exponents", monomials(4, 2)[1:])
def test_a_stencil_cannot_claim_more_accuracy_than_it_has(exponents):
    stencil = central(exponents, size=5)
    with pytest.raises(ArithmeticError, match="accuracy 4"):
        Stencil(stencil.operator, stencil.weights, 4)


def test_a_one_sided_difference_is_of_first_order():
    forward = np.array([[0, 0, 0], [0, -1, 1], [0, 0, 0]])
    operator = Polynomial.monomial((1, 0))
    assert Stencil(operator, forward, 1).apply(lambda x, y: 3 * x) == 3.0
    with pytest.raises(ArithmeticError, match=r"moment \(2, 0\) is 0.5, expected 0"):
        Stencil(operator, forward, 2)


@pytest.mark.parametrize("exponents", [(1, 0), (0, 1), (2, 1)])
def test_a_mirrored_axis_is_noticed(exponents):
    stencil = central(exponents)
    axis = 0 if exponents[1] % 2 else 1
    with pytest.raises(ArithmeticError, match="moment"):
        Stencil(stencil.operator, np.flip(stencil.weights, axis), 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_weights_that_are_not_numbers_cannot_be_built(value):
    weights = central((1, 0)).weights.copy()
    weights[0, 0] = value
    with pytest.raises(ArithmeticError, match="moment"):
        Stencil(Polynomial.monomial((1, 0)), weights, 2)


def test_the_message_names_the_moment():
    with pytest.raises(ArithmeticError, match=r"∂x: moment \(1, 0\) is 2, expected 1"):
        Stencil(Polynomial.monomial((1, 0)), 2 * central((1, 0)).weights, 2)


def test_check_moments_obeys_its_tolerance():
    stencil = central((1, 0))
    shifted = stencil.weights + np.pad([[1e-12]], 1)
    near = Stencil(stencil.operator, shifted, 2)
    with pytest.raises(ArithmeticError, match="moment"):
        check_moments(near, tolerance=1e-14)


# Shapes, values and how sets are read


@pytest.mark.parametrize("shape", [(3, 5), (2, 2), (9,), (3, 3, 3), (0, 0)])
def test_weights_must_have_equal_odd_sizes(shape):
    with pytest.raises(ValueError, match="equal odd sizes"):
        Stencil(Polynomial.monomial((1, 0)), np.zeros(shape), 2)


def test_weights_are_a_read_only_copy():
    given_weights = central((1, 0)).weights.copy()
    stencil = Stencil(Polynomial.monomial((1, 0)), given_weights, 2)
    given_weights[:] = 7.0
    np.testing.assert_array_equal(stencil.weights, SUPPLEMENT[1, 0])
    with pytest.raises(ValueError, match="read-only"):
        stencil.weights[0] = 0


def test_shared_one_dimensional_schemes_cannot_be_spoilt():
    with pytest.raises(ValueError, match="read-only"):
        central((1,)).weights[:] = 0
    Central().weights((1,), 3)[:] = 0
    np.testing.assert_array_equal(central((1,)).weights, [-0.5, 0, 0.5])


@given(order=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_stencils_are_linear_in_the_operator(order, seed):
    factors = np.random.default_rng(seed).normal(size=order + 1)
    listed = [(order - j, j) for j in range(order + 1)]
    operator = Polynomial.of(dict(zip(listed, factors.tolist(), strict=True)), 2)
    expected = sum(f * central(e, size=5).weights for f, e in zip(factors, listed, strict=True))
    np.testing.assert_allclose(Central().stencil(operator, 5).weights, expected, rtol=0, atol=1e-14)


def test_the_zero_operator_has_a_stencil_of_zeros():
    stencil = Central().stencil(Polynomial.of({}, 2))
    np.testing.assert_array_equal(stencil.weights, [[0.0]])


def test_complex_operators_have_complex_stencils():
    x, y = Polynomial.variables(2)
    stencil = Central().stencil(x + 1j * y)
    expected = central((1, 0)).weights + 1j * central((0, 1)).weights
    np.testing.assert_array_equal(stencil.weights, expected)
    with pytest.raises(ArithmeticError, match="moment"):
        Stencil(x - 1j * y, expected, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 0, -3, 5.0, "5"])
def test_sizes_are_odd_and_large_enough(size):
    with pytest.raises(ValueError, match="odd size of at least 5") as error:
        central((3, 0), size=size)
    assert repr(size) in str(error.value)


@pytest.mark.parametrize("accuracy", [0, 1, 3, -2, 2.0, "2", None, True])
def test_accuracy_is_an_even_number_from_two(accuracy):
    with pytest.raises(ValueError, match="even accuracy, 2 or higher"):
        central((1, 0), accuracy=accuracy)
    with pytest.raises(ValueError, match="even accuracy, 2 or higher"):
        stencil_set("central", accuracy)


def test_stencil_sets_are_values():
    assert stencil_set("central") == Central() == Central(2) != Central(4)
    assert hash(Central(4)) == hash(stencil_set("central", accuracy=4))
    assert repr(Central(4)) == "Central(accuracy=4)"
    chosen = Central(4)
    assert stencil_set(chosen) is chosen


@pytest.mark.parametrize("bad", ["centre", "", None, 3, Central, ["central"]])
def test_unknown_stencils_say_what_names_look_like(bad):
    with pytest.raises(ValueError, match=r"unknown stencils .*'central'"):
        stencil_set(bad)
