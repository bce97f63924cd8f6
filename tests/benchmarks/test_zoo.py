"""The benchmark of conversions: rows say what happened, whatever happened."""

import pytest
import torch
from torch import nn

zoo = pytest.importorskip("zoo", reason="no benchmarks beside the tests")


class Doubling(nn.Module):
    """Returns a dictionary of maps, one of which a quarter turn changes if it is told to."""

    def __init__(self, wide=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, (1, 5) if wide else 3, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, x):
        return {"out": self.head(torch.relu(self.norm(self.conv(x))))}


def row(monkeypatch, network):
    monkeypatch.setattr(zoo.Source, "make", lambda self: network)
    return zoo.measure(zoo.Source("timm", "ours", 16))


def test_a_network_that_converts_is_exact_and_keeps_its_outputs(monkeypatch):
    found = row(monkeypatch, Doubling())
    assert found["outcome"] == "converts"
    assert found["same_shapes"]
    assert found["error"] <= 1e-12
    assert found["forward_ratio"] > 0
    assert found["seconds"] >= 0


def test_a_network_of_volumes_is_measured_alike(monkeypatch):
    network = nn.Sequential(nn.Conv3d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv3d(24, 48, 3))
    monkeypatch.setattr(zoo.Source, "make", lambda self: network)
    found = zoo.measure(zoo.Source("monai", "ours", 6, channels=1, dimension=3))
    assert found["outcome"] == "converts", found["sentence"]
    assert found["same_shapes"]
    assert found["error"] <= 1e-12


def test_a_network_that_is_refused_says_why(monkeypatch):
    found = row(monkeypatch, Doubling(wide=True))
    assert found["outcome"] == "refused"
    assert "1×5" in found["sentence"] or "(1, 5)" in found["sentence"]


def test_errors_are_those_of_the_turned_output():
    out = torch.randn(1, 2, 4, 4)
    assert zoo._error(out, out.rot90(1, (2, 3))) == 0
    assert zoo._error(out, out) > 0.1
    assert zoo._error(out.flatten(1), 2 * out.flatten(1)) == pytest.approx(1)


def test_a_process_that_fails_is_a_row(monkeypatch, tmp_path):
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit('no such network')")
    monkeypatch.setattr(zoo, "__file__", str(program))
    found = zoo.tried(next(iter(zoo.SOURCES)))
    assert found["outcome"] == "failed"
    assert found["sentence"] == "no such network"


def test_the_summary_counts_networks_without_attention_apart():
    there = {"outcome": "converts", "attention": False, "same_shapes": True}
    rows = [
        {**there, "key": "a", "seconds": 1.0, "megabytes": 20, "error": 1e-15},
        {**there, "key": "b", "seconds": 2.0, "megabytes": 10, "error": 1e-3, "same_shapes": False},
        {"key": "c", "attention": True, "outcome": "refused", "seconds": 3.0, "megabytes": 1},
        {"key": "d", "attention": False, "outcome": "failed", "sentence": "no"},
    ]
    found = zoo.summary(rows)
    assert (found["networks"], found["without_attention"], found["of_these_convert"]) == (4, 3, 2)
    assert found["other_shapes"] == ["b"]
    assert (found["most_seconds"], found["most_megabytes"]) == (3.0, 20)
    assert found["worst_error"] == 1e-3


def test_at_least_sixty_networks_are_tried():
    assert len(zoo.SOURCES) >= 60
    assert {source.package for source in zoo.SOURCES.values()} == set(zoo.PACKAGES)
