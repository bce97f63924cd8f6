"""Groups: conventions, multiplication, representations, subgroups and value semantics."""

import copy
import math
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import block_diag

from econv.groups import Group, Irrep

NAMES = [f"p{n}{m}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16) for m in ("", "m")]

names = st.builds(lambda n, m: f"p{n}{m}", st.integers(1, 40), st.sampled_from(["", "m"]))


# Conventions


@given(n=st.integers(1, 500), data=st.data())
@settings(deadline=None)
def test_element_k_is_the_anticlockwise_rotation_by_k_nths_of_a_turn(n, data):
    k = data.draw(st.integers(0, n - 1))
    angle = 2 * math.pi * k / n
    expected = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    np.testing.assert_allclose(Group(f"p{n}").matrices[k], expected, rtol=0, atol=2e-15)


def test_anticlockwise_means_from_x_towards_y():
    np.testing.assert_array_equal(Group("p4").matrices[1] @ [1, 0], [0, 1])


@given(n=st.integers(1, 60))
@settings(deadline=None)
def test_element_n_plus_k_is_rotation_k_times_the_reflection_of_y(n):
    group, rotations = Group(f"p{n}m"), Group(f"p{n}")
    np.testing.assert_array_equal(group.matrices[:n], rotations.matrices)
    np.testing.assert_array_equal(group.matrices[n:], rotations.matrices @ np.diag([1.0, -1.0]))


@given(names)
@settings(deadline=None)
def test_element_zero_is_the_identity_exactly(name):
    group = Group(name)
    np.testing.assert_array_equal(group.matrices[0], np.eye(2))
    np.testing.assert_array_equal(group.product[0], np.arange(group.order))
    np.testing.assert_array_equal(group.product[:, 0], np.arange(group.order))


@pytest.mark.parametrize("name", NAMES)
def test_order_and_attributes_follow_from_the_name(name):
    group = Group(name)
    n = int(name.strip("pm"))
    assert group.rotations == n
    assert group.mirrored is name.endswith("m")
    assert group.order == len(group) == (2 * n if name.endswith("m") else n)
    assert group.dimension == 2
    assert group.name == str(group) == name
    assert repr(group) == f"Group('{name}')"
    assert group.matrices.shape == (group.order, 2, 2)
    assert group.matrices.dtype == np.float64


@given(n=st.integers(1, 50))
@settings(deadline=None)
def test_quarter_turns_are_whole_numbers_exactly(n):
    quarter = np.array([[0.0, -1.0], [1.0, 0.0]])
    matrices = Group(f"p{4 * n}").matrices
    for turns in range(4):
        expected = np.linalg.matrix_power(quarter, turns)
        np.testing.assert_array_equal(matrices[turns * n], expected)


@given(n=st.integers(1, 200))
@settings(deadline=None)
def test_rotations_are_symmetric_to_the_last_bit(n):
    matrices = Group(f"p{n}").matrices
    backwards = -np.arange(n) % n
    np.testing.assert_array_equal(matrices[backwards], matrices.swapaxes(1, 2))
    if n % 4 == 0:
        quarter = np.array([[0.0, -1.0], [1.0, 0.0]])
        np.testing.assert_array_equal(np.roll(matrices, -n // 4, axis=0), quarter @ matrices)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p1", (0,)),
        ("p3", (0,)),
        ("p6", (0, 3)),
        ("p8", (0, 2, 4, 6)),
        ("p1m", (0, 1)),
        ("p4m", tuple(range(8))),
        ("p6m", (0, 3, 6, 9)),
        ("p8m", tuple(range(0, 16, 2))),
    ],
)
def test_grid_symmetries_are_the_quarter_turns_and_flips(name, expected):
    assert Group(name).grid_symmetries == expected


# Multiplication


@given(names)
@settings(deadline=None)
def test_product_inverse_and_relative_agree_with_the_matrices(name):
    group = Group(name)
    m = group.matrices
    every = np.einsum("aij,bjk->abik", m, m)
    # Elements of these groups differ by more than 0.1, so closeness fixes the index.
    np.testing.assert_allclose(every, m[group.product], rtol=0, atol=1e-14)
    np.testing.assert_allclose(m[group.inverse], np.linalg.inv(m), rtol=0, atol=1e-14)
    quotients = np.einsum("aij,bjk->abik", np.linalg.inv(m), m)
    np.testing.assert_allclose(quotients, m[group.relative], rtol=0, atol=1e-14)


@given(names)
@settings(deadline=None)
def test_elements_are_distinct(name):
    group = Group(name)
    differences = np.abs(group.matrices[:, None] - group.matrices[None]).max(axis=(2, 3))
    assert differences[~np.eye(group.order, dtype=bool)].min(initial=1.0) > 0.1


@given(name=names, data=st.data())
@settings(deadline=None)
def test_product_is_a_group(name, data):
    group = Group(name)
    a, b, c = (data.draw(st.integers(0, group.order - 1)) for _ in range(3))
    assert group.product[group.product[a, b], c] == group.product[a, group.product[b, c]]
    assert group.product[a, group.inverse[a]] == group.product[group.inverse[a], a] == 0
    assert group.product[a, group.relative[a, b]] == b


def test_reflections_do_not_commute_with_rotations():
    group = Group("p8m")
    assert not np.array_equal(group.product, group.product.T)


# Representations


@pytest.mark.parametrize("name", NAMES)
def test_irreps_are_as_many_as_theory_counts(name):
    group, n = Group(name), Group(name).rotations
    lines = (2 if n % 2 == 0 else 1) * (2 if group.mirrored else 1)
    planes = (n - 1) // 2
    dimensions = [irrep.dimension for irrep in group.irreps]
    assert dimensions == [1] * lines + [2] * planes
    assert sum(i.dimension * i.multiplicity for i in group.irreps) == group.order
    if group.mirrored:  # all real irreps of a dihedral group are absolutely irreducible
        assert sum(i.dimension**2 for i in group.irreps) == group.order
    assert len({irrep.name for irrep in group.irreps}) == len(group.irreps)


@given(names)
@settings(deadline=None)
def test_irreps_are_orthogonal_and_multiplicative(name):
    group = Group(name)
    for irrep in group.irreps:
        rho = irrep.matrices
        transposed = rho.swapaxes(1, 2)
        identity = np.broadcast_to(np.eye(irrep.dimension), rho.shape)
        np.testing.assert_allclose(rho @ transposed, identity, rtol=0, atol=1e-14)
        every = np.einsum("aij,bjk->abik", rho, rho)
        np.testing.assert_allclose(every, rho[group.product], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_irreps_are_irreducible_and_pairwise_inequivalent(name):
    irreps = Group(name).irreps
    characters = np.array([np.trace(i.matrices, axis1=1, axis2=2) for i in irreps])
    # ⟨χ, χ⟩ = 1 for a real type and 2 for a complex one, where a plane occurs once only.
    expected = np.diag([i.dimension / i.multiplicity for i in irreps])
    np.testing.assert_allclose(
        characters @ characters.T / Group(name).order, expected, rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("m")])
def test_matrix_entries_obey_schur_orthogonality(name):
    group = Group(name)
    entries = np.concatenate(
        [math.sqrt(i.dimension) * i.matrices.reshape(group.order, -1).T for i in group.irreps]
    )
    np.testing.assert_allclose(
        entries @ entries.T / group.order, np.eye(group.order), rtol=0, atol=1e-13
    )


@given(names)
@settings(deadline=None)
def test_fourier_transform_is_orthogonal(name):
    transform = Group(name).fourier
    identity = np.eye(Group(name).order)
    np.testing.assert_allclose(transform @ transform.T, identity, rtol=0, atol=1e-13)
    np.testing.assert_allclose(transform.T @ transform, identity, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_fourier_transform_block_diagonalises_left_translation(name):
    group = Group(name)
    for h in range(group.order):
        translation = np.zeros((group.order, group.order))
        for g in range(group.order):
            translation[g, group.product[group.inverse[h], g]] = 1.0  # f(g) → f(h⁻¹g)
        blocks = block_diag(*[i.matrices[h] for i in group.irreps for _ in range(i.multiplicity)])
        spectrum = group.fourier @ translation @ group.fourier.T
        np.testing.assert_allclose(spectrum, blocks, rtol=0, atol=1e-13)


def test_right_translation_is_not_what_the_fourier_transform_diagonalises():
    group = Group("p5m")
    translation = np.zeros((group.order, group.order))
    translation[np.arange(group.order), group.product[:, 1]] = 1.0
    blocks = block_diag(*[i.matrices[1] for i in group.irreps for _ in range(i.multiplicity)])
    assert np.abs(group.fourier @ translation @ group.fourier.T - blocks).max() > 0.1


def test_fourier_transform_refuses_irreps_that_do_not_span():
    group = Group("p6m")
    twice = (*group.irreps[:-1], group.irreps[-2])
    broken = SimpleNamespace(name="p6m", order=group.order, irreps=twice)
    with pytest.raises(ArithmeticError, match="p6m"):
        Group.fourier.func(broken)


@given(name=names, seed=st.integers(0, 1000), size=st.floats(1e-9, 1.0))
@settings(deadline=None)
def test_a_broken_irrep_is_refused(name, seed, size):
    group, random = Group(name), np.random.default_rng(seed)
    irrep = group.irreps[random.integers(len(group.irreps))]
    matrices = irrep.matrices.copy()
    matrices[tuple(random.integers(matrices.shape))] += size
    with pytest.raises(ValueError, match=f"not an orthogonal representation of {name}"):
        Irrep(group, irrep.name, matrices, irrep.multiplicity)


@pytest.mark.parametrize("name", ["p5", "p8", "p4m", "p5m"])
def test_orthogonal_matrices_that_do_not_multiply_are_refused(name):
    group = Group(name)
    matrices = group.matrices.copy()
    matrices[[1, 2]] = matrices[[2, 1]]
    with pytest.raises(ValueError, match="multiplicative"):
        Irrep(group, "shuffled", matrices, 1)


def test_a_representation_of_the_rotations_alone_is_refused():
    group = Group("p5m")
    # Multiplicative as far as rotations on the right go, but wrong for the reflection.
    turns = Group("p5").matrices
    with pytest.raises(ValueError, match="multiplicative"):
        Irrep(group, "half right", np.concatenate([turns, turns.swapaxes(1, 2)]), 2)


def test_multiplicative_matrices_that_are_not_orthogonal_are_refused():
    group = Group("p4")
    sheared = np.array([[1.0, 0.5], [0.0, 1.0]])
    with pytest.raises(ValueError, match="orthogonal"):
        Irrep(group, "sheared", sheared @ group.matrices @ np.linalg.inv(sheared), 1)


def test_an_irrep_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="not an orthogonal representation of p4"):
        Irrep(Group("p4"), "not a number", np.full((4, 1, 1), np.nan), 1)


# Subgroups


def subgroup_pairs():
    for outer in ("p1", "p4", "p6", "p8", "p12", "p1m", "p4m", "p6m", "p8m", "p12m"):
        for inner in NAMES:
            big, small = Group(outer), Group(inner)
            if big.rotations % small.rotations == 0 and small.mirrored <= big.mirrored:
                yield outer, inner


SUBGROUPS = list(subgroup_pairs())


@pytest.mark.parametrize(("outer", "inner"), SUBGROUPS)
def test_embed_finds_the_same_matrices_in_the_same_order(outer, inner):
    found = Group(outer).embed(inner)
    np.testing.assert_allclose(
        Group(outer).matrices[found], Group(inner).matrices, rtol=0, atol=1e-15
    )


@pytest.mark.parametrize(("outer", "inner"), SUBGROUPS)
def test_embed_respects_products(outer, inner):
    group, subgroup = Group(outer), Group(inner)
    found = group.embed(subgroup)
    np.testing.assert_array_equal(group.product[np.ix_(found, found)], found[subgroup.product])


@pytest.mark.parametrize(("outer", "inner"), SUBGROUPS)
def test_cosets_partition_the_group(outer, inner):
    rows = Group(outer).cosets(inner)
    assert rows.shape == (Group(outer).order // Group(inner).order, Group(inner).order)
    assert sorted(rows.ravel().tolist()) == list(range(Group(outer).order))
    np.testing.assert_array_equal(rows[0], Group(outer).embed(inner))


@pytest.mark.parametrize(("outer", "inner"), SUBGROUPS)
def test_left_translation_permutes_a_coset_as_the_subgroup_permutes_itself(outer, inner):
    group, subgroup = Group(outer), Group(inner)
    rows, found = group.cosets(inner), group.embed(inner)
    for t in range(subgroup.order):
        np.testing.assert_array_equal(group.product[found[t], rows], rows[:, subgroup.product[t]])


def test_left_cosets_would_not_be_permuted_like_the_subgroup():
    group, subgroup = Group("p8m"), Group("p4m")
    found = group.embed(subgroup)
    left = group.product[1, found]
    moved = [group.product[found[t], left] for t in range(subgroup.order)]
    assert any(not np.array_equal(row, left[subgroup.product[t]]) for t, row in enumerate(moved))


@pytest.mark.parametrize(
    ("outer", "inner"), [("p4", "p8"), ("p8", "p3"), ("p8", "p4m"), ("p6m", "p4m"), ("p1", "p1m")]
)
def test_what_is_not_a_subgroup_is_refused(outer, inner):
    for method in (Group(outer).embed, Group(outer).cosets):
        with pytest.raises(ValueError, match=f"{inner} is not a subgroup of {outer}"):
            method(inner)


# Values


@pytest.mark.parametrize("name", NAMES)
def test_a_group_is_one_value_however_it_is_made(name):
    group = Group(name)
    assert group.fourier.shape == (group.order, group.order)  # copies are made of a used group too
    for other in (
        Group(name),
        Group(group),
        copy.copy(group),
        copy.deepcopy(group),
        pickle.loads(pickle.dumps(group)),
        eval(repr(group)),
    ):
        assert other is group
        assert other == group
        assert hash(other) == hash(group)


def test_a_pickled_group_is_its_name_and_nothing_derived():
    group = Group("p64m")
    assert group.fourier.nbytes > 100_000
    assert len(pickle.dumps(group)) < 200


def test_groups_differ_by_name():
    assert len({Group(name) for name in NAMES}) == len(NAMES)
    assert Group("p4") != Group("p4m")
    assert Group("p4") != "p4"


@pytest.mark.parametrize("attribute", ["name", "dimension", "rotations", "order", "matrices", "x"])
def test_attributes_cannot_be_set(attribute):
    with pytest.raises(AttributeError):
        setattr(Group("p8"), attribute, 3)
    assert Group("p8").name == "p8"


@pytest.mark.parametrize("attribute", ["name", "dimension", "rotations", "mirrored"])
def test_attributes_cannot_be_deleted(attribute):
    value = getattr(Group("p9m"), attribute)
    try:
        with pytest.raises(AttributeError):
            delattr(Group("p9m"), attribute)
    finally:
        # The one object of this name must not stay broken for other tests.
        Group("p9m").__dict__[attribute] = value


@pytest.mark.parametrize("array", ["matrices", "product", "inverse", "relative", "fourier"])
def test_arrays_are_read_only(array):
    found = getattr(Group("p6m"), array)
    before = found.copy()
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0
    np.testing.assert_array_equal(getattr(Group("p6m"), array), before)


def test_irreps_are_read_only():
    for irrep in Group("p6m").irreps:
        with pytest.raises(ValueError, match="read-only"):
            irrep.matrices[0] = 0


def test_an_irrep_does_not_share_memory_with_what_it_was_made_of():
    group = Group("p2")
    values = np.array([1.0, -1.0])[:, None, None]
    irrep = Irrep(group, "sign", values, 1)
    values[1] = 7.0
    assert irrep.matrices[1, 0, 0] == -1.0


@pytest.mark.parametrize(
    "name",
    ["", "p", "p0", "p04", "P4", "4", "m", "pm", "p4mm", "p-4", "p4 ", " p4", "p4\n", "p4.0", "p٤",
     "C", None, 4, 4.0, b"p4", ["p4"], ("p", 4)],
)  # fmt: skip
def test_a_bad_name_says_what_names_look_like(name):
    with pytest.raises(ValueError, match="unknown group") as error:
        Group(name)
    assert repr(name) in str(error.value)
    for example in ("'pn'", "'pnm'", "'p8'", "'p6m'"):
        assert example in str(error.value)


SPACE = "[CD][1-9][0-9]*[vhd]?|T[dh]?|Oh?|Ih?"  # tests/test_solids.py has those of space


@given(st.text(max_size=6).filter(lambda text: not re.fullmatch(f"p[1-9][0-9]*m?|{SPACE}", text)))
@settings(deadline=None)
def test_any_other_text_is_a_bad_name(text):
    with pytest.raises(ValueError, match="expected 'pn'"):
        Group(text)


def test_steps_are_the_turns_of_the_plane_and_none_in_space():
    assert [Group(name).steps for name in ("p1", "p8", "p6m", "O", "D4h")] == [1, 8, 6, 0, 0]
