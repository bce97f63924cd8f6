"""Fourier analysis on groups: Schur's relations, Clebsch–Gordan coefficients, fast transforms."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from econv import Group, fourier

NAMES = ["p1", "p2", "p3", "p4", "p5", "p6", "p8", "p12", "p16", "p1m", "p2m", "p3m", "p4m", "p8m"]


@pytest.mark.parametrize("name", NAMES)
def test_schur_orthogonality(name):
    """Means of products of matrix elements: nothing between irreps, the commutant within one."""
    group = Group(name)
    for a, one in enumerate(group.irreps):
        for b, two in enumerate(group.irreps):
            mean = np.einsum("gij,gkl->ijkl", one.matrices, two.matrices) / group.order
            wanted = np.zeros_like(mean)
            if a == b:
                algebra = fourier.commutant(one)
                wanted = np.einsum("eik,ejl->ijkl", algebra, algebra) / one.dimension
            assert np.abs(mean - wanted).max() <= 1e-13


@pytest.mark.parametrize("name", NAMES)
def test_the_commutant_is_what_commutes(name):
    group = Group(name)
    for irrep in group.irreps:
        found = fourier.commutant(irrep)
        assert np.abs(found[0] - np.eye(irrep.dimension)).max() <= 1e-14
        for matrix in found:
            there = np.einsum("ij,gjk->gik", matrix, irrep.matrices)
            back = np.einsum("gij,jk->gik", irrep.matrices, matrix)
            assert np.abs(there - back).max() <= 1e-13
        # As large as the linear system ρ(g)X = Xρ(g) has solutions.
        size = irrep.dimension**2
        rows = [
            np.kron(rho, np.eye(irrep.dimension)) - np.kron(np.eye(irrep.dimension), rho.T)
            for rho in irrep.matrices
        ]
        assert len(found) == size - np.linalg.matrix_rank(np.concatenate(rows), tol=1e-9)


@pytest.mark.parametrize("kind", fourier.KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_transforms_block_diagonalise_the_representation(name, kind):
    group = Group(name)
    matrices = fourier.representation(group, kind)
    assert np.abs(matrices[group.product] - matrices[:, None] @ matrices).max() <= 1e-13
    copies = fourier.transform(group, kind)
    whole = np.concatenate([copy.basis for copy in copies])
    spectrum = whole @ matrices @ whole.T
    row = 0
    for irrep, basis in copies:
        here = slice(row, row + len(basis))
        assert np.abs(spectrum[:, here, here] - group.irreps[irrep].matrices).max() <= 1e-13
        spectrum[:, here, here] = 0
        row += len(basis)
    assert np.abs(spectrum).max() <= 1e-13


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**32 - 1))
def test_parseval(name, seed):
    group = Group(name)
    f, g = np.random.default_rng(seed).normal(size=(2, group.order))
    whole = np.concatenate([copy.basis for copy in fourier.transform(group, "regular")])
    assert abs((whole @ f) @ (whole @ g) - f @ g) <= 1e-12 * group.order


@pytest.mark.parametrize("name", NAMES)
def test_group_correlation_is_block_diagonal(name):
    """out(A) = Σ_k w_k in(Ak) joins spectrum slots of equal irrep and equal row only."""
    group = Group(name)
    weights = np.random.default_rng(0).normal(size=group.order)
    matrix = np.zeros((group.order, group.order))
    for a in range(group.order):
        for k in range(group.order):
            matrix[a, group.product[a, k]] += weights[k]
    spectrum = group.fourier @ matrix @ group.fourier.T
    labels = [
        (copy.irrep, row)
        if fourier.commutant(group.irreps[copy.irrep]).shape[0] == 1
        else (copy.irrep, 0)
        for copy in fourier.transform(group, "regular")
        for row in range(len(copy.basis))
    ]
    different = np.array([[a != b for b in labels] for a in labels])
    assert np.abs(spectrum[different]).max(initial=0) <= 1e-12
    assert np.abs(spectrum[~different]).min() > 0


@pytest.mark.parametrize("name", ["p1", "p3", "p4", "p8", "p2m", "p3m", "p4m"])
def test_a_hidden_representation_is_taken_apart(name):
    """Whatever orthogonal matrix hides them, the irreps come back, each as often as it was put."""
    group = Group(name)
    random = np.random.default_rng(1)
    counts = random.integers(0, 3, len(group.irreps))
    counts[0] += 1
    parts = [irrep for irrep, n in zip(group.irreps, counts, strict=True) for _ in range(n)]
    size = sum(irrep.dimension for irrep in parts)
    matrices = np.zeros((group.order, size, size))
    row = 0
    for irrep in parts:
        here = slice(row, row + irrep.dimension)
        matrices[:, here, here] = irrep.matrices
        row += irrep.dimension
    turn = np.linalg.qr(random.normal(size=(size, size)))[0]
    found = fourier.decompose(group, turn @ matrices @ turn.T)
    numbers = [copy.irrep for copy in found]
    assert [numbers.count(i) for i in range(len(group.irreps))] == counts.tolist()
    assert numbers == sorted(numbers)


def test_what_is_no_representation_is_refused():
    group = Group("p4")
    regular = fourier.representation(group, "regular")
    with pytest.raises(ArithmeticError, match="not an orthogonal representation of p4"):
        fourier.decompose(group, regular[[0, 2, 1, 3]])
    with pytest.raises(ArithmeticError, match="not an orthogonal representation of p4"):
        fourier.decompose(group, 1.5 * regular)
    with pytest.raises(ArithmeticError, match="candidates do not span"):
        fourier.decompose(group, regular, np.ones((1, 4)))
    with pytest.raises(ValueError, match=r"unknown kind of field 'tensor'.*'regular'"):
        fourier.representation(group, "tensor")


@pytest.mark.parametrize("name", ["p1", "p3", "p4", "p6", "p8", "p2m", "p3m", "p4m", "p6m"])
def test_clebsch_gordan_coefficients_couple_products_to_irreps(name):
    group = Group(name)
    for a, one in enumerate(group.irreps):
        for b, two in enumerate(group.irreps):
            product = np.einsum("gij,gkl->gikjl", one.matrices, two.matrices)
            rows = []
            for irrep, c in fourier.couple(group, a, b):
                there = np.einsum("rik,gikjl->grjl", c, product)
                back = np.einsum("grs,sjl->grjl", group.irreps[irrep].matrices, c)
                assert np.abs(there - back).max() <= 1e-13
                rows.append(c.reshape(len(c), -1))
            whole = np.concatenate(rows)
            assert np.abs(whole @ whole.T - np.eye(one.dimension * two.dimension)).max() <= 1e-13


@pytest.mark.parametrize("name", [*NAMES, "p32", "p16m"])
def test_butterflies_are_the_transform(name):
    matrix = Group(name).fourier
    pairs, rest = fourier.butterflies(matrix)
    steps = np.eye(len(matrix))
    for a, b in pairs:
        steps[[a, b]] = steps[a] + steps[b], steps[a] - steps[b]
    assert np.abs(rest @ steps - matrix).max() <= 1e-14
    assert 2 * len(pairs) + np.count_nonzero(rest) <= matrix.size
    if Group(name).order >= 8:
        assert 2 * len(pairs) + np.count_nonzero(rest) <= matrix.size / 2


def test_a_matrix_without_symmetry_has_no_butterflies():
    matrix = np.random.default_rng(0).normal(size=(5, 5))
    pairs, rest = fourier.butterflies(matrix)
    assert pairs == []
    assert (rest == matrix).all()


def test_the_self_check_of_a_decomposition_can_fail(monkeypatch):
    """Pieces that are spoilt on the way are noticed, whichever of the two relations they break."""
    group = Group("p4")
    matrices = fourier.representation(group, "regular")
    keep = fourier._without_dust

    def bent(array):
        """Not of unit length."""
        return keep(array) * (1 + 1e-6)

    def lost(array):
        return array * np.nan

    def swapped(array):
        """Orthonormal, in another order than the irrep's."""
        return keep(array)[::-1]

    spoilt = {bent: "orthogonal representation", swapped: "off by", lost: "orthogonal"}
    for spoil, message in spoilt.items():
        monkeypatch.setattr(fourier, "_without_dust", spoil)
        with pytest.raises(ArithmeticError, match=message):
            fourier.decompose(group, matrices)
    monkeypatch.setattr(fourier, "_without_dust", keep)
    assert len(fourier.decompose(group, matrices)) == 3


@pytest.mark.parametrize("size", [1e-9, 1e-11])
def test_the_self_check_of_a_decomposition_is_as_fine_as_it_says(size):
    group = Group("p1m")
    matrices = np.array(fourier.representation(group, "regular"))
    matrices[1] = matrices[1] + size * np.array([[0.0, 0.0], [1.0, 0.0]])
    if size > 1e-10:
        with pytest.raises(ArithmeticError, match="off by"):
            fourier.decompose(group, matrices)
    else:
        fourier.decompose(group, matrices)


def test_an_irrep_that_falls_apart_has_no_commutant():
    """Two copies of one irrep under one name commute with more than an irreducible one does."""
    group = Group("p3")
    plane = group.irreps[1]

    class Apart:
        order, name = group.order, group.name
        irreps = (
            SimpleNamespace(
                matrices=np.stack([np.kron(np.eye(2), m) for m in plane.matrices]),
                dimension=4,
                multiplicity=2,
                name="two planes",
            ),
        )

    with pytest.raises(ArithmeticError, match="'two planes' of p3 is not irreducible"):
        fourier._commutant.__wrapped__(Apart, 0)


def test_a_butterfly_joins_what_is_alike_only():
    """Columns that agree up to sign in a part of the rows alone are left alone."""
    matrix = np.array([[1.0, 1.0], [1.0, -1.0], [1.0, 0.5]])
    pairs, rest = fourier.butterflies(matrix)
    assert pairs == []
    assert (rest == matrix).all()
    pairs, rest = fourier.butterflies(matrix[:2])
    assert pairs == [(0, 1)]
    assert rest.tolist() == [[1.0, 0.0], [0.0, 1.0]]
