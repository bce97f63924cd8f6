"""The spectral plan: its operation counts, its exactness, and that a wrong one cannot be built."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from econv import Central, filter_basis, plan
from econv.engines.spectral import native
from econv.plan import SpectralPlan, plan_named, spectral_plan
from econv.stencils import Gaussian

LAYERS = [
    ("regular", "regular"),
    ("scalar", "regular"),
    ("pseudoscalar", "regular"),
    ("vector", "regular"),
    ("regular", "scalar"),
    ("regular", "pseudoscalar"),
    ("regular", "vector"),
]
GROUPS = ["p1", "p2", "p3", "p4", "p6", "p8", "p1m", "p3m", "p4m"]


@pytest.mark.parametrize(
    ("group", "multiplications"), [("p8", 168), ("p16", 390), ("p8m", 336), ("p32", 806)]
)
def test_multiplications_grow_with_the_order_of_the_group(group, multiplications):
    found = spectral_plan(filter_basis(group), "regular", "regular")
    assert found.multiplications == multiplications
    assert found.weights == found.basis.group.order * len(found.stencils)


@pytest.mark.parametrize("kinds", LAYERS)
@pytest.mark.parametrize("operators", ["paper", "order<=2", "order<=4", "order<=0", [(1, 0)]])
@pytest.mark.parametrize("group", GROUPS)
def test_the_steps_give_the_filters(group, operators, kinds):
    check_steps(group, operators, kinds)


@pytest.mark.parametrize("kinds", LAYERS)
@pytest.mark.parametrize(
    ("group", "operators"),
    [("C4v", "order<=3"), ("D3d", "order<=2"), ("T", "order<=3"), ("Th", [(1, 0, 0), (0, 2, 0)]),
     ("O", "order<=2"), ("O", [(0, 0, 0), (2, 1, 1)]), ("I", "order<=2"), ("Td", "order<=0")],
)  # fmt: skip
def test_the_steps_give_the_filters_in_space(group, operators, kinds):
    check_steps(group, operators, kinds)


def check_steps(group, operators, kinds):
    """Analysis, stencils, features, blocks and synthesis of unit weights, against the basis."""
    basis = filter_basis(group, operators)
    found = spectral_plan(basis, *kinds)
    weights = np.random.default_rng(0).normal(size=found.weight_map.shape[0])
    spectral = weights @ found.weight_map
    pixels = (basis.size,) * basis.operators.dimension
    filters = np.zeros((found.synthesis.shape[1], found.analysis.shape[0], *pixels))
    for block in found.blocks:
        matrix = spectral[block.entries] * block.signs  # [inner, columns]
        for row in range(block.rows):
            for k, feature in enumerate(block.features[row]):
                for t in range(found.feature_factors.shape[1]):
                    stencil = found.stencils[found.feature_stencils[feature, t]]
                    slot = found.feature_slots[feature, t]
                    factor = found.feature_factors[feature, t] * matrix[k]
                    filters[block.slots[row], slot] += np.multiply.outer(factor, stencil)
    filters = np.einsum("ao,oi...,ib->ab...", found.synthesis, filters, found.analysis)
    wanted = expected_filters(basis, kinds, weights)
    assert np.abs(filters - wanted).max() <= 1e-12 * max(1.0, np.abs(wanted).max())
    assert np.abs(wanted).max() > 1e-3


def expected_filters(basis, kinds, weights):
    """The filters of one pair of fields, written from the definition of each layer."""
    group, synthesis = basis.group, basis.synthesis  # [order, s, size, size]
    count = synthesis.shape[1]
    if kinds == ("scalar", "regular"):
        return np.einsum("s,as...->a...", weights, synthesis)[:, None]
    reflections = np.where(np.arange(group.order) < group.rotations, 1.0, -1.0)
    if kinds == ("pseudoscalar", "regular"):
        return np.einsum("s,as...,a->a...", weights, synthesis, reflections)[:, None]
    if kinds == ("vector", "regular"):
        frames = group.matrices[group.inverse]
        return np.einsum("cs,as...,acd->ad...", weights.reshape(-1, count), synthesis, frames)
    weights = weights.reshape(-1, group.order, count)
    fields = np.zeros((len(weights), group.order, group.order, *synthesis.shape[2:]))
    for a in range(group.order):
        for k in range(group.order):
            filters = np.einsum("cs,s...->c...", weights[:, k], synthesis[a])
            fields[:, a, group.product[a, k]] += filters
    if kinds[1] == "regular":
        return fields[0]
    if kinds[1] == "scalar":
        return fields.sum(axis=1)
    if kinds[1] == "pseudoscalar":
        return np.einsum("a,cab...->cb...", reflections, fields)
    return np.einsum("adc,cab...->db...", group.matrices, fields)


@pytest.mark.parametrize("kinds", LAYERS)
@pytest.mark.parametrize("group", ["p3", "p4", "p8", "p3m", "Th", "O"])
def test_the_adjoint_of_the_adjoint_is_the_layer(group, kinds):
    found = spectral_plan(filter_basis(group), *kinds)
    assert found.adjoint.adjoint is found
    twice = found.adjoint_map @ found.adjoint.adjoint_map
    assert np.abs(twice - np.eye(found.weights)).max() <= 1e-12


@pytest.mark.parametrize(("group", "cost"), [("T", 32), ("O", 64), ("I", 244), ("Ih", 488)])
def test_multiplications_in_space_are_those_of_the_irreps_for_each_operator(group, cost):
    found = spectral_plan(filter_basis(group), "regular", "regular")
    assert len(found.stencils) == 10
    assert found.multiplications == 10 * cost


def test_a_plan_that_is_made_again_is_the_adjoint_of_its_adjoint():
    """Plans are made once, but for those that were forgotten among many, whose adjoint was not."""
    basis = filter_basis("p5")
    known = spectral_plan(basis, "scalar", "regular").adjoint
    again = SpectralPlan(basis, "scalar", "regular")
    assert again.adjoint is known
    assert known.adjoint is again
    same = SpectralPlan(basis, "regular", "regular")
    assert same.adjoint is same


def families(found):
    """The pieces of equal irrep and symmetry, ``[pieces, rows of a piece, size, size]`` each."""
    copies = found._operators[0]
    together = {}
    for copy in copies:
        piece = np.tensordot(copy.basis, found.stencils, axes=1)
        key = copy.irrep, float((copy.basis @ found.parity)[0]), *plan._mirrored(piece[0])
        together.setdefault(key, []).append(piece)
    return [np.stack(pieces) for pieces in together.values()]


@pytest.mark.parametrize("group", [*GROUPS, "p16"])
def test_stencils_have_length_one_on_average_and_parity(group):
    """Within an irreducible piece lengths differ, as the grid is not isotropic; their mean is 1."""
    found = spectral_plan(filter_basis(group), "regular", "regular")
    for pieces in families(found):
        for one in pieces:
            assert abs(np.vdot(one, one) / len(one) - 1) <= 1e-12
    mirrored = found.stencils[:, ::-1, ::-1] * found.parity[:, None, None]
    assert np.abs(mirrored - found.stencils).max() <= 1e-12


@pytest.mark.parametrize("group", [*GROUPS, "p16", "p32"])
def test_stencils_of_one_frequency_are_nearly_orthogonal_and_spare_taps(group):
    found = spectral_plan(filter_basis(group), "regular", "regular")
    for pieces in families(found):
        values = np.linalg.svd(pieces.reshape(len(pieces), -1), compute_uv=False)
        assert values[0] / values[-1] <= plan._SKEW
        rows = pieces[:, 0].reshape(len(pieces), -1)
        for n, one in enumerate(rows):
            others = np.abs(np.delete(rows, n, axis=0)).max(axis=0, initial=0.0)
            assert ((one == 0) & (others > 1e-6)).sum() >= len(rows) - 1


@pytest.mark.parametrize("group", [*GROUPS, "p16"])
def test_stencils_have_the_symmetry_of_their_operators(group):
    """Each reads one class of symmetric parts of the patch, however much their irreps differ."""
    found = spectral_plan(filter_basis(group), "regular", "regular")
    _, stencils, adds, factors = native.symmetry_classes(found.stencils)
    assert sorted(stencils.tolist()) == list(range(len(found.stencils)))
    assert not adds.any()
    assert (factors == 0).sum() >= len(found.stencils)


def test_stencils_stay_orthogonal_where_sparing_taps_would_skew_them(monkeypatch):
    given = filter_basis("p8")
    monkeypatch.setattr(plan, "_SKEW", 1.0)
    plan._irreducible_stencils.cache_clear()
    try:
        stencils = plan._irreducible_stencils(given)[1]
    finally:
        plan._irreducible_stencils.cache_clear()
    flat = np.stack([one.ravel() / np.linalg.norm(one) for one in stencils[4:8]])  # frequency 1
    assert np.abs(flat @ flat.T - np.eye(4)).max() <= 1e-12


@pytest.mark.parametrize("group", GROUPS)
def test_features_have_one_or_two_terms_of_equal_weight(group):
    found = spectral_plan(filter_basis(group), "regular", "regular")
    assert set(np.unique(np.abs(found.feature_factors))) <= {0.0, 1.0}
    assert (found.feature_factors != 0).any(axis=1).all()
    used = np.concatenate([block.features.ravel() for block in found.blocks])
    assert sorted(used.tolist()) == list(range(len(found.feature_factors)))


def test_a_map_that_does_not_commute_is_refused():
    found = spectral_plan(filter_basis("p4"), "regular", "regular")
    with pytest.raises(ArithmeticError, match="does not commute"):
        plan._project(found, np.ones((1, 4, len(found.stencils), 4)))


def test_filters_outside_the_span_of_the_stencils_are_refused():
    basis = filter_basis("p4", "paper", Central(), 7)
    found = plan.SpectralPlan(basis, "scalar", "regular")  # not the shared one
    wrong = basis.synthesis.copy()
    wrong[0, 0, 0, 0] += 1e-6
    object.__setattr__(found, "basis", Stranger(basis, wrong))
    with pytest.raises(ArithmeticError, match="does not span"):
        _ = found.weight_map


class Stranger:
    """A basis whose filters are not what its stencils give."""

    def __init__(self, basis, synthesis):
        self.basis, self.synthesis = basis, synthesis

    def __getattr__(self, name):
        return getattr(self.basis, name)


def test_plans_are_values():
    found = spectral_plan(filter_basis("p8"), "regular", "regular")
    assert pickle.loads(pickle.dumps(found)) is found
    assert spectral_plan(filter_basis("p8"), "regular", "regular") is found
    assert repr(found).startswith("SpectralPlan(FilterBasis(p8, 'paper'")
    with pytest.raises(ValueError, match="unknown kind of field 'image'"):
        spectral_plan(filter_basis("p8"), "image", "regular")


# Names


def test_names_determine_plans_that_words_do_not_describe():
    names = {}
    for width in (0.5, 0.8):
        found = spectral_plan(filter_basis("p4", stencils=Gaussian(width)), "regular", "regular")
        names[width] = found.name
        assert plan_named(found.name) is found
        assert plan_named(found.adjoint.name) is found.adjoint
    assert names[0.5] != names[0.8]
    code = (
        "from econv import filter_basis; from econv.plan import plan_named, spectral_plan;"
        "from econv.stencils import Gaussian; import sys;"
        "b = filter_basis('p4', stencils=Gaussian(0.8)); b.digest; p = plan_named(sys.argv[1]);"
        "assert p.basis is b and p.name == sys.argv[1]"
    )
    subprocess.run([sys.executable, "-c", code, names[0.8]], check=True)


def test_a_name_of_a_basis_that_this_process_has_not_is_refused():
    found = spectral_plan(filter_basis("p4", stencils=Gaussian(0.77)), "regular", "regular")
    name = found.name.replace(found.basis.digest, "0" * 32)
    assert name != found.name
    with pytest.raises(ValueError, match="expected the name of a plan of this process"):
        plan_named(name)
