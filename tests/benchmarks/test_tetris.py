"""benchmarks/tetris.py: the pieces, how they turn, and what networks can tell of them."""

import itertools
import json
import sys

import numpy as np
import pytest
import torch

from econv import Group
from econv.testing import rotate, transform

tetris = pytest.importorskip("tetris", reason="no benchmarks beside the tests")


def cells():
    """The pieces on their grids of 4³: every fifth voxel of the middle."""
    return tetris.volumes()[:, :, 12:32:5, 12:32:5, 12:32:5]


def test_there_are_eight_pieces_of_four_cubes():
    found = tetris.volumes()
    assert found.shape == (8, 1, 40, 40, 40)
    assert found.sum((1, 2, 3, 4)).tolist() == [4 * 5**3] * 8
    assert found[:, :, :10].sum() == found[..., -10:].sum() == 0


@pytest.mark.parametrize("name", ["O", "Oh"])
def test_the_chiral_pair_are_mirror_images_and_no_others_are_alike(name):
    pieces = cells()

    def shape(piece):
        """What does not depend on where the piece is: the sorted list of its cubes."""
        at = piece[0].nonzero()
        return tuple(map(tuple, (at - at.min(0).values).tolist()))

    orbits = [
        {shape(transform(p[None], name, e)[0]) for e in range(Group(name).order)} for p in pieces
    ]
    alike = [
        (i, j)
        for i, j in itertools.combinations(range(8), 2)
        if not orbits[i].isdisjoint(orbits[j])
    ]
    assert alike == ([(0, 1)] if name == "Oh" else [])


def test_pieces_turn_as_volumes_do():
    pieces, group = tetris.volumes()[3:5], Group("O")
    for element in (4, 13):
        matrices = np.stack([group.matrices[element][None]] * 2)
        wanted = transform(pieces, "O", element)
        torch.testing.assert_close(tetris.turned(pieces, matrices), wanted, rtol=0, atol=1e-5)
    matrix = tetris.random_rotations(1)
    turned = tetris.turned(pieces[:1], matrix[None])  # cubic splines here, quintic ones there
    assert (turned - rotate(pieces[:1], matrix[0])).abs().mean() < 0.01


def test_splines_are_those_of_scipy():
    ndimage = pytest.importorskip("scipy.ndimage")
    piece = torch.randn(1, 1, 9, 9, 9, dtype=torch.float64)
    rotations = tetris.random_rotations(2)
    down = np.array([1.0, -1.0, 1.0])
    for rotation, found in zip(rotations, tetris.turned(piece, rotations[None]), strict=True):
        inverse = (rotation.T * down * down[:, None])[::-1, ::-1]
        offset = np.full(3, 4.0) - inverse @ np.full(3, 4.0)
        wanted = ndimage.affine_transform(piece[0, 0].numpy(), inverse, offset, order=3)
        np.testing.assert_allclose(found[0].numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "confused"), [("T", False), ("O", False), ("Th", True), ("Td", True)]
)
def test_groups_with_reflections_confuse_the_chiral_pair_exactly_and_others_do_not(name, confused):
    torch.manual_seed(0)
    network = tetris.Network(name, 3, "isotropic", (2, 2, 2)).double()
    tetris.calibrate(network, tetris.volumes().double())
    with torch.no_grad():
        scores = network(tetris.volumes().double())
    apart = (scores[:, None] - scores).abs().amax(2)
    assert (apart[0, 1] < 1e-12 * scores.abs().max()) == confused
    assert apart[2:, 2:][~torch.eye(6, dtype=torch.bool)].min() > 1e-6


def run(monkeypatch, words, path):
    monkeypatch.setattr(
        sys, "argv", ["tetris", *words.split(), "--device", "cpu", "--json", str(path)]
    )
    tetris.main()
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_record_has_a_row_for_every_seed_and_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tetris, "draws", lambda pieces, copies, seed: pieces)
    words = "--group C2 --fields 1 1 --stencils 3 --steps 2 --copies 1"
    first = run(monkeypatch, f"{words} --seeds 2", tmp_path / "first.json")
    assert [(row["size"], row["seed"]) for row in first["runs"]] == [(3, 0), (3, 1)]
    assert first["source_sha256"]
    for row in first["runs"]:
        assert len(row["each"]) == 8
        assert row["accuracy"] == sum(row["each"]) / 8
    assert capsys.readouterr().out.count('"accuracy"') == 2
    run(monkeypatch, f"{words} --seeds 1 --first 2", tmp_path / "second.json")
    parts = f"--join {tmp_path / 'second.json'} {tmp_path / 'first.json'}"
    found = run(monkeypatch, parts, tmp_path / "all.json")
    assert [row["seed"] for row in found["runs"]] == [0, 1, 2]
    assert found["runs"][:2] == first["runs"]
    other = "--group C2 --fields 1 1 --stencils 3 --steps 1 --copies 1 --seeds 1"
    run(monkeypatch, other, tmp_path / "other.json")
    with pytest.raises(ValueError, match="with the same steps"):
        run(monkeypatch, f"{parts} {tmp_path / 'other.json'}", tmp_path / "all.json")


def test_what_was_best_in_validation_is_tested_and_turns_of_the_test_choose_nothing(
    tmp_path, monkeypatch
):
    small = {"group": "C2", "fields": (1, 1), "rate": 0.0}
    monkeypatch.setattr(tetris, "DEFAULTS", {**tetris.DEFAULTS, **small})
    monkeypatch.setattr(tetris, "CANDIDATES", {"a": {"blur": 1.0}, "b": {"blur": 3.0}})
    monkeypatch.setattr(tetris, "VALIDATION", 1)
    drawn = []
    monkeypatch.setattr(tetris, "draws", lambda pieces, _, seed: drawn.append(seed) or pieces)
    words = "--stencils 3 --steps 1 --copies 1"
    tried = run(monkeypatch, f"{words} --try a b", tmp_path / "tries.json")["tries"]
    assert drawn == [1]
    chosen = max(tried, key=lambda row: (row["accuracy"], -row["turned_loss"]))
    found = run(
        monkeypatch, f"{words} --seeds 1 --tries {tmp_path / 'tries.json'}", tmp_path / "x.json"
    )
    assert drawn == [1, 2022]
    assert [row["settings"] for row in found["runs"]] == [chosen["settings"]]
    assert [row["name"] for row in found["tries"]] == ["a", "b"]
