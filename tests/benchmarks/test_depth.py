"""benchmarks/depth.py: a small run, and what its record says of what docs advise."""

import json

import pytest

depth = pytest.importorskip("depth", reason="no benchmarks beside the tests")
readme = pytest.importorskip("readme", reason="no benchmarks beside the tests")


def test_a_record_says_by_which_code_and_has_a_cell_for_everything(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(depth, "PIXELS", 41)
    monkeypatch.setattr(depth, "RADIUS", 5.0)
    monkeypatch.setattr(depth, "HALVED_PIXELS", 48)
    monkeypatch.setattr(depth, "HALVED_RADIUS", 4.0)
    monkeypatch.setattr(depth, "FUNCTIONS", ("relu",))
    monkeypatch.setattr(depth, "SMOOTHNESS", (1.5,))
    for name in ("ACTIVATIONS", "HALVINGS"):
        some = dict(list(getattr(depth, name).items())[:2])
        monkeypatch.setattr(depth, name, some)
    path = tmp_path / "found.json"
    depth.main(["--seeds", "1", "--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["origin"]["source_sha256"]
    rows = found["errors_by_activation"]
    assert set(rows) == set(depth.ACTIVATIONS)
    assert 0 < rows["blur .7"]["relu"][0] < rows["plain"]["relu"][0]
    assert set(found["errors_by_halving"]) == set(depth.HALVINGS)
    for text in (capsys.readouterr().out, readme.depth_by_activation(found)):
        assert f"| plain | {readme.small(rows['plain']['relu'])} |" in text


def test_the_record_keeps_what_docs_promise():
    rows = readme.read("depth.json")["errors_by_activation"]
    assert rows["plain"]["relu"][1] > 0.08
    rough, smooth = rows["blur .7"]["silu"]  # what `create_model(antialias=0.7)` has
    assert rough < 0.030
    assert smooth < 0.010
    rough, smooth = rows["2 points, blur .85"]["silu"]
    assert rough < 0.010
    assert smooth < 0.002
