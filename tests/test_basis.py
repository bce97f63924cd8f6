"""Filter bases: turned filters, what a weight means, gains at initialisation, value semantics."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from econv.basis import INITIALISATIONS, FilterBasis, Gains, filter_basis
from econv.groups import Group
from econv.operators import operator_set
from econv.stencils import Central, Isotropic, central

GROUPS = ["p1", "p2", "p3", "p4", "p6", "p8", "p12", "p1m", "p2m", "p4m", "p6m", "p8m"]
OPERATORS = ["paper", "order<=0", "order<=1", "order<=2", "order<=3", ((0, 0), (2, 0), (0, 2))]


# Filters


def central_basis(name, operators="paper", **options):
    return filter_basis(name, operators, "central", **options)


@pytest.mark.parametrize("accuracy", [2, 4])
@pytest.mark.parametrize("operators", ["paper", "order<=2", ((0, 0), (2, 0), (0, 2))])
@pytest.mark.parametrize("name", GROUPS)
def test_turned_filters_are_sums_of_stencils(name, operators, accuracy):
    basis = filter_basis(name, operators, "central", accuracy=accuracy)
    polynomials = operator_set(operators).polynomials
    expected = np.zeros((Group(name).order, len(polynomials), basis.size, basis.size))
    for element, matrix in enumerate(Group(name).matrices):
        for s, polynomial in enumerate(polynomials):
            for exponents, value in polynomial.in_frame(matrix).terms:
                if abs(value) > 1e-13:
                    stencil = central(exponents, accuracy, basis.size)
                    expected[element, s] += value * stencil.weights
    np.testing.assert_allclose(basis.turned, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "operators", "accuracy", "size"),
    [
        ("p4", "paper", 2, 3),
        ("p4m", "paper", 2, 3),
        ("p8", "paper", 2, 5),
        ("p6m", "paper", 2, 5),
        ("p8", "paper", 4, 7),
        ("p4", "paper", 4, 5),
        ("p8", "order<=0", 2, 1),
        ("p8", "order<=1", 2, 3),
        ("p8", "order<=2", 2, 3),
        ("p8", "order<=3", 2, 5),
        ("p4", ((3, 0),), 2, 5),
    ],
)
def test_the_smallest_support_holds_every_turned_operator(name, operators, accuracy, size):
    basis = central_basis(name, operators, accuracy=accuracy)
    assert basis.size == size
    assert basis.turned.shape == (Group(name).order, len(operator_set(operators)), size, size)


@pytest.mark.parametrize("name", ["p6", "p8m"])
def test_a_larger_size_pads_the_filters_with_zeros(name):
    small, large = central_basis(name), central_basis(name, size=9)
    assert (small.size, large.size) == (5, 9)
    margin = [(0, 0), (0, 0), (2, 2), (2, 2)]
    np.testing.assert_allclose(large.turned, np.pad(small.turned, margin), rtol=0, atol=1e-14)
    np.testing.assert_allclose(large.synthesis, np.pad(small.synthesis, margin), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["p4", "p8", "p8m", "p12m"])
def test_a_quarter_turn_of_the_frame_turns_the_filter(name):
    basis, group = filter_basis(name), Group(name)
    quarter = group.rotations // 4
    for element in range(group.order):
        turned = np.rot90(basis.turned[element], axes=(1, 2))
        np.testing.assert_allclose(
            basis.turned[group.product[quarter, element]], turned, rtol=0, atol=1e-13
        )


@pytest.mark.parametrize("name", ["p4m", "p6m", "p8m"])
def test_a_reflected_frame_reflects_the_filter(name):
    basis, group = filter_basis(name), Group(name)
    mirror = group.rotations
    for element in range(group.order):
        np.testing.assert_allclose(
            basis.turned[group.product[mirror, element]],
            basis.turned[element][:, ::-1],
            rtol=0,
            atol=1e-13,
        )


# What a weight means


@pytest.mark.parametrize("accuracy", [2, 4])
def test_the_canonical_system_of_the_nine_is_the_central_one_on_3x3(accuracy):
    basis = filter_basis("p8", "paper", "central", accuracy=accuracy)
    expected = np.stack([central(e, size=3).weights.ravel() for e in operator_set("paper")])
    np.testing.assert_array_equal(basis.canonical_filters, expected)
    pixels = filter_basis("p8", "paper", "central", accuracy=accuracy, coordinates="pixels")
    np.testing.assert_allclose(expected @ pixels.canonical, np.eye(9), rtol=0, atol=1e-14)
    orthonormal = basis.canonical @ expected
    np.testing.assert_allclose(orthonormal @ orthonormal.T, np.eye(9), rtol=0, atol=1e-14)


@given(st.lists(st.floats(-10, 10), min_size=9, max_size=9))
@settings(deadline=None)
def test_coefficients_solve_the_linear_system(weight):
    stencils = [central(e, size=3).weights for e in operator_set("paper")]
    for coordinates in ("pixels", "orthonormal"):
        basis = filter_basis("p6", "paper", "central", coordinates=coordinates)
        beta = np.array(weight) @ basis.canonical
        canonical_filter = sum(b * s for b, s in zip(beta, stencils, strict=True))
        if coordinates == "pixels":
            expected = np.reshape(weight, (3, 3))
            np.testing.assert_allclose(canonical_filter, expected, rtol=0, atol=1e-12)
        else:  # as long as the weight, and its sum is that of one number
            assert np.linalg.norm(canonical_filter) == pytest.approx(np.linalg.norm(weight))
            assert canonical_filter.sum() == pytest.approx(3 * weight[0], abs=1e-12)


@pytest.mark.parametrize("name", ["p4", "p8", "p6m"])
def test_weights_of_the_nine_are_the_pixels_of_the_canonical_filter(name):
    basis = filter_basis(name, "paper", "central", coordinates="pixels")
    margin = (basis.size - 3) // 2
    pixels = np.pad(np.eye(9).reshape(9, 3, 3), [(0, 0), (margin, margin), (margin, margin)])
    np.testing.assert_allclose(basis.synthesis[0], pixels, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "operators", ["paper", "order<=1", "order<=2", "order<=3", ((0, 0), (2, 0), (0, 2))]
)
@pytest.mark.parametrize("coordinates", ["orthonormal", "pixels"])
def test_weights_are_coordinates_of_orthonormal_filters(operators, coordinates):
    basis = filter_basis("p8", operators, "central", coordinates=coordinates)
    count = len(basis.operators)
    assert (basis.canonical_filters.shape[0] < 9) == (operators not in ("paper", "order<=3"))
    directions = basis.synthesis[0].reshape(count, -1)
    np.testing.assert_allclose(directions @ directions.T, np.eye(count), rtol=0, atol=1e-12)
    reached = np.concatenate([directions, basis.turned[0].reshape(count, -1)])
    assert np.linalg.matrix_rank(reached, tol=1e-9) == count


@pytest.mark.parametrize("stencils", ["central", "isotropic", "gaussian"])
@pytest.mark.parametrize("operators", ["paper", "order<=2", "order<=3", ((0, 0), (2, 0), (0, 2))])
def test_one_coordinate_alone_answers_constants(operators, stencils):
    """With every stencil set, in every frame: derivatives take no notice of constants."""
    sums = filter_basis("p8", operators, stencils).synthesis.sum(axis=(2, 3))
    assert (np.abs(sums[:, 0]) > 0.5).all()
    np.testing.assert_allclose(sums[:, 1:], 0, rtol=0, atol=1e-12)
    mixed = filter_basis("p8", operators, stencils, coordinates="pixels").synthesis.sum(axis=(2, 3))
    assert (np.abs(mixed) > 0.1).sum(axis=1).min() > 1


@pytest.mark.parametrize("operators", ["paper", "order<=1", "order<=2", "order<=4"])
def test_the_symmetries_of_the_grid_permute_the_coordinates_up_to_signs(operators):
    """So that an optimiser that treats numbers one by one commutes with quarter turns and flips."""
    basis = filter_basis("p4m", operators)
    frames = basis.synthesis.reshape(8, len(basis.operators), -1)
    for frame in frames:
        moved = frame @ np.linalg.pinv(frames[0])
        np.testing.assert_allclose(np.abs(moved).round(9).sum(axis=1), 1, rtol=0, atol=1e-8)
        np.testing.assert_allclose(np.abs(moved).max(axis=1), 1, rtol=0, atol=1e-8)


def test_pixels_of_few_operators_take_the_operators_in_turn():
    # Row s of inverse(canonical) writes operator s in the coordinates: triangular, as in
    # Gram–Schmidt, with a positive diagonal.
    for operators in ("order<=1", "order<=2", "order<=3"):
        basis = filter_basis("p8", operators, coordinates="pixels")
        coordinates = np.linalg.inv(basis.canonical)
        np.testing.assert_allclose(coordinates, np.tril(coordinates), rtol=0, atol=1e-12)
        assert (np.diag(coordinates) > 0).all()


@pytest.mark.parametrize("operators", OPERATORS)
def test_the_filters_of_a_weight_are_those_of_its_coefficients(operators):
    basis = filter_basis("p6m", operators)
    weight = np.random.default_rng(0).normal(size=len(basis.operators))
    from_weight = np.tensordot(basis.synthesis, weight, axes=([1], [0]))
    from_beta = np.tensordot(basis.turned, weight @ basis.canonical, axes=([1], [0]))
    np.testing.assert_allclose(from_weight, from_beta, rtol=0, atol=1e-12)


@given(spacing=st.floats(0.05, 20.0), operators=st.sampled_from(OPERATORS))
@settings(deadline=None)
def test_to_and_from_coefficients_are_inverse(spacing, operators):
    basis = filter_basis("p8", operators)
    identity = np.eye(len(basis.operators))
    there, back = basis.to_coefficients(spacing), basis.from_coefficients(spacing)
    scale = np.abs(there) @ np.abs(back)
    assert (np.abs(there @ back - identity) <= 1e-13 * np.maximum(scale, 1)).all()
    scale = np.abs(back) @ np.abs(there)
    assert (np.abs(back @ there - identity) <= 1e-13 * np.maximum(scale, 1)).all()


@given(spacing=st.floats(0.05, 20.0))
@settings(deadline=None)
def test_spacing_leaves_the_filters_alone(spacing):
    basis = filter_basis("p6")
    weight = np.random.default_rng(1).normal(size=9)
    beta = weight @ basis.to_coefficients(spacing)
    at_spacing = basis.turned / np.power(spacing, basis.operators.orders)[:, None, None]
    filters = np.tensordot(at_spacing, beta, axes=([1], [0]))
    expected = np.tensordot(basis.synthesis, weight, axes=([1], [0]))
    np.testing.assert_allclose(filters, expected, rtol=0, atol=1e-11)


def test_spacing_one_is_the_canonical_system():
    basis = filter_basis("p6")
    np.testing.assert_array_equal(basis.to_coefficients(1.0), basis.canonical)


# Gains


def energies(basis):
    found = (basis.synthesis**2).sum(axis=(1, 2, 3))
    return found / len(basis.operators)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p4", [1] * 4),
        ("p4m", [1] * 8),
        ("p8", [1, 2.17] * 4),
        ("p8m", [1, 2.17] * 8),
        ("p6", [1, 1.70, 1.70] * 2),
        ("p12", [1, 1.70, 1.70] * 4),
    ],
)
def test_energy_of_turned_filters_under_central_differences(name, expected):
    np.testing.assert_allclose(energies(central_basis(name)), expected, rtol=0, atol=0.005)


def test_energy_at_offset_angles_is_the_same_throughout():
    # Turns by odd multiples of π/8 are the odd elements of p16.
    odd = energies(central_basis("p16"))[1::2]
    np.testing.assert_allclose(odd, 1.35, rtol=0, atol=0.005)


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("name", ["p4", "p6", "p8m"])
def test_default_initialisation_has_gain_one_through_relu(name, operators):
    assert filter_basis(name, operators).gains("relu").relu == pytest.approx(1.0, abs=1e-12)
    assert filter_basis(name, operators).gains() == filter_basis(name, operators).gains("relu")


@pytest.mark.parametrize(
    ("name", "operators"), [("p1", "order<=0"), ("p8m", "order<=0"), ("p1", "paper")]
)
def test_where_every_pixel_is_free_the_default_is_he_but_for_the_width(
    name, operators, monkeypatch
):
    narrow = central_basis(name, operators)
    assert 1.0 < narrow.scale("relu") < math.exp(2.5 / 32 / 2)
    monkeypatch.setattr("econv.basis._WIDTH", math.inf)
    wide = dataclasses.replace(narrow)
    assert wide.scale("relu") == pytest.approx(1.0, abs=1e-12)
    assert wide.gains("paper") == pytest.approx((2.0, 2.0, 1.0), abs=1e-12)


def test_the_papers_initialisation_grows_where_turned_filters_carry_more_energy():
    assert central_basis("p8").gains("paper").relu > 1.2
    assert central_basis("p6").gains("paper").relu > 1.2


@pytest.mark.parametrize("operators", ["paper", "order<=2"])
@pytest.mark.parametrize("name", ["p6", "p8", "p8m"])
def test_initialisations_differ_by_one_scalar(name, operators):
    basis = filter_basis(name, operators)
    ours, papers = basis.gains("relu"), basis.gains("paper")
    np.testing.assert_allclose(np.array(ours) * papers.relu, papers, rtol=1e-12)
    ratio = basis.standard_deviation(40, "relu") / basis.standard_deviation(40, "paper")
    assert ratio**2 == pytest.approx(1 / papers.relu, rel=1e-12)
    assert basis.scale("paper") == 1.0
    assert isinstance(ours, Gains)


@given(fan_in=st.integers(1, 10_000))
@settings(deadline=None)
def test_the_papers_initialisation_is_he_on_the_canonical_filter(fan_in):
    basis = filter_basis("p8")
    found = basis.standard_deviation(fan_in, "paper")
    assert found == pytest.approx(math.sqrt(2 / (9 * fan_in)), rel=1e-14)
    # Of independent numbers of this deviation in a weight, the nine pixels are such numbers too.
    pixels = basis.canonical @ basis.canonical_filters.reshape(9, 9)
    covariance = found**2 * pixels.T @ pixels
    np.testing.assert_allclose(covariance * 9 * fan_in / 2, np.eye(9), rtol=0, atol=1e-12)


def random_layer(basis, maps, random, initialisation):
    """One random Φ̃ on a torus as transfer functions, ``[order, in_fields * order, side, side]``."""
    group = basis.group
    order, fields = group.order, maps.shape[0] // group.order
    deviation = basis.standard_deviation(maps.shape[0], initialisation)
    weight = deviation * random.normal(size=(fields, order, len(basis.operators)))
    filters = np.einsum("ikj,gjyx->gikyx", weight, basis.synthesis)
    bank = np.empty((order, fields, order, basis.size, basis.size))
    for g in range(order):
        bank[g, :, group.product[g]] = filters[g].swapaxes(0, 1)
    bank = bank.reshape(order, fields * order, basis.size, basis.size)
    # Cross-correlation is multiplication by the conjugate spectrum.
    return np.conj(np.fft.fftn(bank, maps.shape[1:], axes=(-2, -1)))


@pytest.mark.parametrize("initialisation", ["relu", "paper"])  # the others only scale
@pytest.mark.parametrize(
    ("name", "operators"), [("p8", "paper"), ("p6", "paper"), ("p6m", "order<=2"), ("p4", "paper")]
)
def test_gains_for_constants_and_noise_are_those_of_random_layers(name, operators, initialisation):
    basis, random = filter_basis(name, operators), np.random.default_rng(7)
    side, draws = 8, 1500
    channels = 2 * basis.group.order
    expected = basis.gains(initialisation)
    moments = {"constant": [], "noise": []}
    for _ in range(draws):
        inputs = {
            "constant": random.normal(size=(channels, 1, 1)) * np.ones((side, side)),
            "noise": random.normal(size=(channels, side, side)),
        }
        transfer = random_layer(basis, inputs["noise"], random, initialisation)
        for kind, maps in inputs.items():
            spectrum = np.einsum("gcyx,cyx->gyx", transfer, np.fft.fftn(maps, axes=(-2, -1)))
            output = np.fft.ifftn(spectrum, axes=(-2, -1)).real
            moments[kind].append((output**2).mean() / (maps**2).mean())
    for kind, found in moments.items():
        spread = np.std(found) / math.sqrt(draws)
        assert spread < 0.025 * getattr(expected, kind)
        assert abs(np.mean(found) - getattr(expected, kind)) < 4 * spread


@pytest.mark.parametrize("name", ["p6", "p8"])
def test_gain_through_relu_is_that_of_deep_random_networks(name):
    basis = filter_basis(name)
    order, fields, side, depth = basis.group.order, 16, 12, 20
    growth = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        maps = random.normal(size=(fields * order, side, side))
        moments = []
        for _ in range(depth):
            spectrum = np.fft.fftn(maps, axes=(-2, -1))
            layers = [random_layer(basis, maps, random, "relu") for _ in range(fields)]
            outputs = [np.einsum("gcyx,cyx->gyx", layer, spectrum) for layer in layers]
            output = np.fft.ifftn(np.concatenate(outputs), axes=(-2, -1)).real
            maps = np.maximum(output, 0)
            moments.append((maps**2).mean())
        growth.append((moments[-1] / moments[4]) ** (1 / (depth - 5)))
    assert np.exp(np.log(growth).mean()) == pytest.approx(1.0, abs=0.1)


FUNCTIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * torch.special.ndtr(torch.from_numpy(x)).numpy(),
    "softplus": lambda x: np.logaddexp(x, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_moment_of_one_stays_through_a_layer_of_each_function(name):
    assert set(INITIALISATIONS) == {"relu", "paper", *FUNCTIONS}
    basis, fields, side = filter_basis("p8"), 24, 12
    typical = {}
    for initialisation in (name, "paper"):
        random, growth = np.random.default_rng(0), []
        maps = random.normal(size=(fields * basis.group.order, side, side))
        for _ in range(12):
            spectrum = np.fft.fftn(maps, axes=(-2, -1))
            layers = [random_layer(basis, maps, random, initialisation) for _ in range(fields)]
            outputs = [np.einsum("gcyx,cyx->gyx", layer, spectrum) for layer in layers]
            maps = FUNCTIONS[name](np.fft.ifftn(np.concatenate(outputs), axes=(-2, -1)).real)
            growth.append(math.log((maps**2).mean()))
            maps /= np.sqrt((maps**2).mean())  # SiLU and GELU make more of what has grown
        typical[initialisation] = math.exp(np.mean(growth[4:]))
    assert typical[name] == pytest.approx(1.0, abs=0.1)
    assert abs(typical["paper"] - 1) > 0.1


def test_the_series_of_smooth_functions_gives_relu_its_closed_form():
    for name in ("p4", "p8"):
        basis = filter_basis(name)
        series = basis._smooth_scale(lambda x: np.maximum(x, 0.0))
        assert series == pytest.approx(basis.scale("relu"), rel=0.005)


@pytest.mark.parametrize("method", ["scale", "gains"])
@pytest.mark.parametrize("bad", ["he", "", None, 2])
def test_an_unknown_initialisation_says_what_there_is(method, bad):
    with pytest.raises(ValueError, match="unknown initialisation") as error:
        getattr(filter_basis("p4"), method)(bad)
    for name in INITIALISATIONS:
        assert repr(name) in str(error.value)


# Values


def test_a_basis_is_made_once():
    assert filter_basis("p8") is filter_basis(Group("p8"), operator_set("paper"), Isotropic(8))
    assert central_basis("p8", accuracy=4) is filter_basis("p8", stencils=Central(4))
    assert filter_basis("p8") == filter_basis("p8", size=5)
    assert hash(filter_basis("p8")) == hash(filter_basis("p8", size=5))


def test_bases_differ_in_each_of_their_parts():
    different = [
        filter_basis("p8"),
        filter_basis("p8m"),
        filter_basis("p8", "order<=2"),
        central_basis("p8"),
        central_basis("p8", accuracy=4),
        filter_basis("p8", size=7),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("operators", OPERATORS)
def test_a_copied_or_pickled_basis_is_the_same_value(operators):
    basis = filter_basis("p6m", operators, size=7)
    assert basis.gains().relu == pytest.approx(1.0)  # copies are made of a used basis too
    for other in (copy.copy(basis), copy.deepcopy(basis), pickle.loads(pickle.dumps(basis))):
        assert isinstance(other, FilterBasis)
        assert other == basis
        assert other.operators.name == basis.operators.name
        np.testing.assert_array_equal(other.synthesis, basis.synthesis)


def test_a_pickled_basis_holds_no_arrays():
    basis = filter_basis("p16m", size=9)
    assert basis.synthesis.nbytes > 100_000
    assert len(pickle.dumps(basis)) < 1000


@pytest.mark.parametrize("array", ["turned", "canonical_filters", "canonical", "synthesis"])
@pytest.mark.parametrize("operators", ["paper", "order<=2"])
def test_arrays_are_read_only_and_double(array, operators):
    found = getattr(filter_basis("p6", operators), array)
    assert found.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0


def test_a_basis_cannot_be_changed():
    with pytest.raises(AttributeError):
        filter_basis("p6").size = 7


def test_text_names_the_parts():
    text = "FilterBasis(p8, 'paper', Isotropic(rotations=8), size=5"
    assert repr(filter_basis("p8")) == f"{text})"
    assert repr(filter_basis("p8", coordinates="pixels")) == f"{text}, coordinates='pixels')"


# Bad input


def test_unknown_coordinates_are_refused():
    with pytest.raises(ValueError, match=r"expected coordinates as one of \('pixels'.*got 'polar'"):
        filter_basis("p8", coordinates="polar")


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 6, -5, 5.0, 5.5, "5", True])
def test_a_size_that_cannot_hold_the_operators_is_refused(size):
    assert filter_basis("p8", size=5).size == 5
    with pytest.raises(ValueError, match="odd size of at least 5") as error:
        filter_basis("p8", size=size)
    assert "'paper' in p8" in str(error.value)
    assert repr(size) in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"group": "q8"}, "unknown group"),
        ({"operators": "ten"}, "unknown operators"),
        ({"operators": [(0, 0, 0)]}, "2 dimensions"),
        ({"stencils": "forward"}, "unknown stencils"),
        ({"stencils": "central", "accuracy": 3}, "even accuracy"),
        ({"accuracy": 4}, "accuracy=2 with .isotropic. stencils"),
        ({"stencils": "gaussian", "accuracy": 4}, "accuracy=2 with .gaussian. stencils"),
    ],
)
def test_bad_parts_are_refused_with_what_was_expected(arguments, said):
    with pytest.raises(ValueError, match=said):
        filter_basis(**{"group": "p8", **arguments})


@pytest.mark.parametrize("operators", ["paper", "order<=2", ((0, 0), (2, 0), (0, 2))])
def test_pixels_are_turned_into_coordinates_of_the_same_filter(operators):
    basis = filter_basis("p8", operators)
    pixels = filter_basis("p8", operators, coordinates="pixels")
    turn = basis.from_pixels
    np.testing.assert_allclose(turn @ turn.T, np.eye(len(turn)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(pixels.from_pixels, np.eye(len(turn)), rtol=0, atol=1e-12)
    given = np.random.default_rng(0).normal(size=len(turn))
    ours = np.tensordot(basis.synthesis, given @ turn, axes=([1], [0]))
    theirs = np.tensordot(pixels.synthesis, given, axes=([1], [0]))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
