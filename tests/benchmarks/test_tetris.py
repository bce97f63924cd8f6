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
    pytest.importorskip("scipy")
    pieces, group = tetris.volumes()[3:5], Group("O")
    for element in (4, 13):
        matrices = np.stack([group.matrices[element][None]] * 2)
        wanted = transform(pieces, "O", element)
        torch.testing.assert_close(tetris.turned(pieces, matrices), wanted, rtol=0, atol=1e-5)
    matrix = tetris.random_rotations(1)
    turned = tetris.turned(pieces[:1], matrix[None])  # cubic splines here, quintic ones there
    assert (turned - rotate(pieces[:1], matrix[0])).abs().mean() < 0.01


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


def test_a_record_has_a_row_for_every_seed_and_size(tmp_path, monkeypatch, capsys):
    pytest.importorskip("scipy")
    path = tmp_path / "found.json"
    words = "--group C2 --fields 1 1 --seeds 2 --stencils 3 --steps 2 --copies 1"
    arguments = ["tetris", *words.split()]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json", str(path)])
    tetris.main()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["size"], row["seed"]) for row in found["runs"]] == [(3, 0), (3, 1)]
    assert found["source_sha256"]
    for row in found["runs"]:
        assert len(row["each"]) == 8
        assert row["accuracy"] == sum(row["each"]) / 8
    assert capsys.readouterr().out.count('"accuracy"') == 2
