"""benchmarks/volumes.py: a small run, and what its table says."""

import json

import pytest
import torch

volumes = pytest.importorskip("volumes", reason="no benchmarks beside the tests")
readme = pytest.importorskip("readme", reason="no benchmarks beside the tests")


@pytest.fixture
def _small(monkeypatch):
    found = {"VOXELS": 9, "RADIUS": 2.0, "SMOOTHNESS": (2.0,), "STENCILS": ("isotropic",)}
    for name, value in {**found, "LAYERS": 2}.items():
        monkeypatch.setattr(volumes, name, value)
    monkeypatch.setattr(volumes, "find_spec", lambda name: None)


@pytest.mark.usefixtures("_small")
def test_a_record_has_a_row_for_everything_and_is_continued(tmp_path, capsys):
    path = tmp_path / "found.json"
    arguments = ["--seeds", "1", "--elements", "1", "--sizes", "3", "--json", str(path)]
    volumes.main(arguments)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["layers"], row["size"]) for row in found["rows"]] == [(1, 3), (2, 3)]
    assert all(0 < row["error"] < 1 for row in found["rows"])
    assert "| econv, isotropic |" in readme.volume_errors(found)
    assert capsys.readouterr().out.count("σ=2") == 2
    volumes.main(arguments)
    assert "σ=2" not in capsys.readouterr().out  # nothing is left to do


@pytest.mark.usefixtures("_small")
def test_what_errs_on_the_grid_ends_the_run(monkeypatch):
    made = volumes.ours("isotropic")
    wrong = made._replace(filters=lambda *given: torch.rand_like(made.filters(*given)))
    monkeypatch.setattr(volumes, "ours", lambda stencils: wrong)
    with pytest.raises(ArithmeticError, match="errs by"):
        volumes.main(["--seeds", "1", "--elements", "1", "--sizes", "3"])
