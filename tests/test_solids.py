"""Point groups: conventions, axioms, character tables, subgroups, the Fourier transform."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import block_diag

from econv import Group
from econv.fourier import commutant, couple, decompose, representation

SOLIDS = {"T": 12, "Td": 24, "Th": 24, "O": 24, "Oh": 48, "I": 60, "Ih": 120}
WHEELS = {"C": 1, "Cv": 2, "Ch": 2, "D": 2, "Dh": 4, "Dd": 4}
NAMES = [*SOLIDS, *(f"{k[0]}{n}{k[1:]}" for k in WHEELS for n in (1, 2, 3, 4, 5, 6, 8))]

names = st.one_of(
    st.sampled_from(list(SOLIDS)),
    st.builds(lambda k, n: f"{k[0]}{n}{k[1:]}", st.sampled_from(list(WHEELS)), st.integers(1, 12)),
)


# Conventions and axioms


@pytest.mark.parametrize("name", NAMES)
def test_orders_and_attributes_follow_from_the_name(name):
    group = Group(name)
    wheel = name[0] in "CD"
    n = int(name.strip("CDvhd")) if wheel else 0
    expected = n * WHEELS[name[0] + name.lstrip("CD0123456789")] if wheel else SOLIDS[name]
    assert group.order == len(group) == expected
    assert group.dimension == 3
    determinants = np.linalg.det(group.matrices)
    signs = np.where(np.arange(group.order) < group.rotations, 1.0, -1.0)
    np.testing.assert_allclose(determinants, signs, rtol=0, atol=1e-14)
    assert group.mirrored is bool((signs < 0).any())
    assert Group(name) is group
    assert pickle.loads(pickle.dumps(group)) is group
    assert eval(repr(group)) is group


@given(names)
@settings(deadline=None, max_examples=40)
def test_products_inverses_and_the_identity_are_those_of_the_matrices(name):
    group = Group(name)
    m = group.matrices
    np.testing.assert_array_equal(m[0], np.eye(3))
    every = np.einsum("aij,bjk->abik", m, m)
    np.testing.assert_allclose(every, m[group.product], rtol=0, atol=1e-13)
    np.testing.assert_allclose(m[group.inverse], m.swapaxes(1, 2), rtol=0, atol=1e-14)
    np.testing.assert_array_equal(group.product[np.arange(group.order), group.inverse], 0)
    for row in group.product:  # elements are distinct
        assert sorted(row.tolist()) == list(range(group.order))


@given(name=names, data=st.data())
@settings(deadline=None)
def test_products_are_associative(name, data):
    group = Group(name)
    a, b, c = (data.draw(st.integers(0, group.order - 1)) for _ in range(3))
    assert group.product[group.product[a, b], c] == group.product[a, group.product[b, c]]
    assert group.product[a, group.relative[a, b]] == b


@pytest.mark.parametrize("name", [*SOLIDS, "C5", "D6d", "D4h", "C1"])
def test_the_generators_generate(name):
    group = Group(name)
    reached = {0}
    while True:
        more = reached | {int(group.product[a, b]) for a in reached for b in group.generators}
        if more == reached:
            break
        reached = more
    assert len(reached) == group.order


@pytest.mark.parametrize("n", [1, 3, 4, 7])
def test_groups_about_z_turn_slices_as_the_groups_of_the_plane(n):
    for space, plane in ((f"C{n}", f"p{n}"), (f"C{n}v", f"p{n}m")):
        np.testing.assert_array_equal(Group(space).matrices[:, :2, :2], Group(plane).matrices)
        np.testing.assert_array_equal(Group(space).product, Group(plane).product)
        np.testing.assert_array_equal(Group(space).matrices[:, 2, 2], 1.0)


def kinds(name):
    """How many elements have each determinant and trace."""
    matrices = Group(name).matrices
    pairs = zip(np.linalg.det(matrices), np.trace(matrices, axis1=1, axis2=2), strict=True)
    return Counter((round(d), round(t, 6)) for d, t in pairs)


def test_the_elements_of_the_solids_are_those_of_crystallography():
    golden = round((1 + 5**0.5) / 2, 6)
    turns = {"half": (1, -1.0), "third": (1, 0.0), "quarter": (1, 1.0), "one": (1, 3.0)}
    assert kinds("T") == {turns["one"]: 1, turns["half"]: 3, turns["third"]: 8}
    assert kinds("O") == {
        turns["one"]: 1, turns["half"]: 9, turns["third"]: 8, turns["quarter"]: 6
    }  # fmt: skip
    assert kinds("I") == {
        turns["one"]: 1, turns["half"]: 15, turns["third"]: 20,
        (1, golden): 12, (1, round(1 - golden, 6)): 12,
    }  # fmt: skip
    # Td has six mirrors and six quarter turns with a mirror; Th, Oh and Ih the point reflection.
    assert kinds("Td") == kinds("T") + Counter({(-1, 1.0): 6, (-1, -1.0): 6})
    for name in ("T", "O", "I"):
        reflected = Counter({(-d, -t): count for (d, t), count in kinds(name).items()})
        assert kinds(f"{name}h") == kinds(name) + reflected


def test_the_cube_has_48_symmetries_and_the_grid_has_them_exactly():
    matrices = Group("Oh").matrices
    assert set(np.unique(matrices)) == {-1.0, 0.0, 1.0}
    assert len({m.tobytes() for m in matrices}) == 48
    assert len(Group("Oh").grid_symmetries) == 48
    assert len(Group("O").grid_symmetries) == 24
    assert Group("I").grid_symmetries == tuple(range(12))  # its tetrahedral subgroup
    assert Group("D6h").grid_symmetries == tuple(
        e for e, m in enumerate(Group("D6h").matrices) if (m == m.round()).all()
    )
    assert len(Group("D6h").grid_symmetries) == 8


def test_mirrors_and_axes_lie_where_they_are_said_to():
    def has(name, matrix):
        return (np.abs(Group(name).matrices - matrix).max(axis=(1, 2)) < 1e-12).any()

    half_x, flip_y, flip_z = np.diag([1, -1, -1]), np.diag([1, -1, 1]), np.diag([1, 1, -1])
    for n in (3, 4):
        assert has(f"D{n}", half_x)
        assert has(f"C{n}v", flip_y)
        assert has(f"C{n}h", flip_z)
        assert has(f"D{n}h", flip_z)
        assert not has(f"D{n}d", flip_z)
    assert has("D3d", -np.eye(3))
    assert not has("D4d", -np.eye(3))
    angle = np.pi / 8  # midway between the half turns about 0° and 45°
    midway = np.array([np.cos(angle), np.sin(angle), 0])
    across = np.array([-np.sin(angle), np.cos(angle), 0])
    assert has("D4d", np.eye(3) - 2 * np.outer(across, across))
    assert not has("D4d", np.eye(3) - 2 * np.outer(midway @ half_x, midway @ half_x) @ flip_y)


# Representations

GOLDEN = (1 + 5**0.5) / 2
# Rows: irreps; columns: the identity, then one element of each class, by its trace as a rotation.
CHARACTERS = {
    "T": {3: [1, 2, 3], -1: [1, 2, -1], 0: [1, -1, 0]},
    "I": {
        3: [1, 3, 3, 4, 5],
        -1: [1, -1, -1, 0, 1],
        0: [1, 0, 0, 1, -1],
        GOLDEN: [1, GOLDEN, 1 - GOLDEN, -1, 0],
        1 - GOLDEN: [1, 1 - GOLDEN, GOLDEN, -1, 0],
    },
}
CUBE = {  # of two classes of half turns, about the axes of the cube and across its edges
    (3, True): [1, 1, 2, 3, 3],
    (-1, True): [1, 1, 2, -1, -1],
    (0, True): [1, 1, -1, 0, 0],
    (-1, False): [1, -1, 0, -1, 1],
    (1, False): [1, -1, 0, 1, -1],
}


def characters(name):
    return np.array([np.trace(i.matrices, axis1=1, axis2=2) for i in Group(name).irreps])


@pytest.mark.parametrize("name", ["T", "I"])
def test_characters_are_those_of_the_tables(name):
    traces = np.trace(Group(name).matrices, axis1=1, axis2=2)
    for element, trace in enumerate(traces):
        wanted = min(CHARACTERS[name], key=lambda t: abs(t - trace))
        np.testing.assert_allclose(
            characters(name)[:, element], CHARACTERS[name][wanted], rtol=0, atol=1e-13
        )


def test_characters_of_the_cube_are_those_of_the_table_for_both_groups_like_it():
    rotations = Group("O").matrices
    mirrored = Group("Td").matrices * np.where(np.arange(24) < 12, 1, -1)[:, None, None]
    for name, turns in (("O", rotations), ("Td", mirrored)):
        tetrahedral = np.linalg.det(np.abs(turns)) > 0
        for element, turn in enumerate(turns):
            wanted = CUBE[round(np.trace(turn)), bool(tetrahedral[element])]
            np.testing.assert_allclose(characters(name)[:, element], wanted, rtol=0, atol=1e-13)
    vector = np.trace(Group("Td").matrices, axis1=1, axis2=2)
    np.testing.assert_allclose(characters("Td")[4], vector, rtol=0, atol=1e-14)  # T2


@pytest.mark.parametrize("name", ["T", "O", "I"])
def test_with_the_point_reflection_every_irrep_is_even_or_odd(name):
    both = characters(f"{name}h")
    single = characters(name)
    expected = np.block([[single, single], [single, -single]])
    np.testing.assert_allclose(both, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "cost"), [("T", 32), ("O", 64), ("Td", 64), ("I", 244), ("Oh", 128), ("Ih", 488)]
)
def test_products_of_the_irreps_cost_what_theory_counts(name, cost):
    assert sum(i.dimension**2 * i.multiplicity for i in Group(name).irreps) == cost


@pytest.mark.parametrize("name", NAMES)
def test_irreps_are_irreducible_inequivalent_and_all_of_them(name):
    group = Group(name)
    found = characters(name)
    expected = np.diag([i.dimension / i.multiplicity for i in group.irreps])
    np.testing.assert_allclose(found @ found.T / group.order, expected, rtol=0, atol=1e-13)
    assert sum(i.dimension * i.multiplicity for i in group.irreps) == group.order
    assert len({i.name for i in group.irreps}) == len(group.irreps)
    for irrep in group.irreps:  # over all products, not those with generators alone
        rho = irrep.matrices
        every = np.einsum("aij,bjk->abik", rho, rho)
        np.testing.assert_allclose(every, rho[group.product], rtol=0, atol=1e-12)
        assert len(commutant(irrep)) * irrep.multiplicity == irrep.dimension


@pytest.mark.parametrize("name", ["C4h", "C5v", "D3d", "D4d", "T", "Td", "Th", "O", "I"])
def test_the_fourier_transform_block_diagonalises_left_translation(name):
    group = Group(name)
    for h in range(0, group.order, 5):
        translation = np.eye(group.order)[group.relative[h]]
        blocks = block_diag(*[i.matrices[h] for i in group.irreps for _ in range(i.multiplicity)])
        spectrum = group.fourier @ translation @ group.fourier.T
        np.testing.assert_allclose(spectrum, blocks, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "product"),
    [("O", ["A1", "E", "T1", "T2"]), ("I", ["A", "T1", "H"]), ("Td", ["A1", "E", "T1", "T2"])],
)
def test_two_vectors_couple_to_a_scalar_a_vector_and_what_turns_as_a_tensor(name, product):
    group = Group(name)
    vector = next(
        i for i, r in enumerate(group.irreps) if r.name == ("T2" if name == "Td" else "T1")
    )
    assert [group.irreps[i].name for i, _ in couple(group, vector, vector)] == product


def test_vectors_and_pseudoscalars_of_space_are_representations():
    group = Group("Oh")
    vector = decompose(group, representation(group, "vector"))
    assert [group.irreps[copy.irrep].name for copy in vector] == ["T1u"]
    pseudoscalar = decompose(group, representation(group, "pseudoscalar"))
    assert [group.irreps[copy.irrep].name for copy in pseudoscalar] == ["A1u"]


# Subgroups

PAIRS = [(outer, inner) for outer in (*SOLIDS, "D6h", "D4d") for inner in Group(outer).subgroups]


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_subgroups_have_the_same_matrices_and_products(outer, inner):
    group, subgroup = Group(outer), Group(inner)
    found = group.embed(inner)
    np.testing.assert_allclose(group.matrices[found], subgroup.matrices, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(group.product[np.ix_(found, found)], found[subgroup.product])
    rows = group.cosets(inner)
    assert sorted(rows.ravel().tolist()) == list(range(group.order))


def test_the_chain_of_solids():
    assert {"T", "D4", "C4", "D2", "C2"} <= set(Group("O").subgroups)
    assert "D4h" in Group("Oh").subgroups
    for name in ("O", "I"):
        np.testing.assert_array_equal(Group(name).embed("T"), np.arange(12))
    assert "Th" in Group("Ih").subgroups
    assert "O" not in Group("Ih").subgroups


@pytest.mark.parametrize(
    ("outer", "inner"), [("O", "C3"), ("O", "I"), ("T", "Th"), ("O", "p4"), ("p8", "C4")]
)
def test_what_is_not_a_subgroup_as_it_lies_is_refused(outer, inner):
    with pytest.raises(ValueError, match=f"{inner} is not a subgroup of {outer}"):
        Group(outer).embed(inner)


@pytest.mark.parametrize("bad", ["C0", "Dnh", "Cd", "C4d", "D3v", "Ov", "Id", "H", "o", "C", "c4"])
def test_unknown_names_are_told_what_there_is(bad):
    with pytest.raises(ValueError, match="'Dnd', 'T', 'Td'"):
        Group(bad)


def test_matrices_that_are_no_group_are_refused():
    from econv.solids import places

    turn = Group("C5").matrices
    with pytest.raises(ArithmeticError, match="missing"):
        places(turn, Group("O").matrices.reshape(24, -1))
