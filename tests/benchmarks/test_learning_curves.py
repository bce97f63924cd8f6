"""benchmarks/learning_curves.py: which images, which steps, rows that are made once."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from econv.data import Dataset, Split
from econv.recipes import RECIPES
from econv.train.trainer import batches

curves = pytest.importorskip("learning_curves", reason="no benchmarks beside the tests")


def digits(count: int = 400) -> Dataset:
    """Images that say their own number, in classes of which the first is the most frequent."""
    x = torch.arange(count)[:, None, None, None].expand(-1, 1, 28, 28)
    y = (torch.arange(count) % 13).clamp(max=10) % 10
    split = Split((x % 256).to(torch.uint8), y)
    parts = [Split(split.x[low:high], split.y[low:high]) for low, high in ((0, 300), (300, 400))]
    return Dataset.of("mnist_rot", *parts, parts[1], 10)


def test_few_images_are_of_all_classes_and_among_the_many() -> None:
    data = digits()
    found = [curves.chosen(data, count, 0) for count in (20, 50, 400)]
    assert torch.bincount(found[0].train.y).tolist() == [2] * 10
    assert torch.bincount(found[1].train.y).tolist() == [5] * 10
    assert torch.equal(found[1].train.x[:20], found[0].train.x)
    assert len(found[2].train) == 400
    other = curves.chosen(data, 20, 1)
    assert not torch.equal(other.train.x, found[0].train.x)
    assert torch.equal(other.test.x, data.test.x)
    assert other.mean != found[0].mean  # the statistics are those of the images that are known


@pytest.mark.parametrize("network", curves.NETWORKS)
@pytest.mark.parametrize("count", curves.COUNTS)
def test_every_run_takes_about_as_many_steps(network: str, count: int) -> None:
    recipe = curves.recipe_of(network, count)
    steps = recipe.epochs * batches(recipe, count)[1]
    assert curves.STEPS <= steps < 1.04 * curves.STEPS
    assert recipe.evaluate_every == recipe.epochs
    assert not recipe.retrain_on_all
    assert bool(recipe.augmentation) is (network == "CNN, images turned")
    assert recipe.model_options == RECIPES[curves.NETWORKS[network][0]].model_options


def test_rows_are_made_once_collected_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curves, "load", lambda *_, **__: digits())
    common = ["learning_curves.py", "--rows", str(tmp_path / "rows"), "--quiet", "--device", "cpu"]
    common += ["--json", str(tmp_path / "a.json")]
    for _ in range(2):
        arguments = ["--networks", "CNN", "--counts", "20", "50", "--seeds", "2", "--steps", "2"]
        monkeypatch.setattr(sys, "argv", [*common, *arguments])
        curves.main()
    assert capsys.readouterr().out.count(" s\n") == 4
    monkeypatch.setattr(sys, "argv", [*common, "--collect"])
    curves.main()
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(r["images"], r["seed"]) for r in rows] == [(20, 0), (20, 1), (50, 0), (50, 1)]
    mean, _, count = curves.means(rows)["CNN", 20]
    assert mean == pytest.approx((rows[0]["test_error"] + rows[1]["test_error"]) / 2)
    assert count == 2
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", [*common, "--draw", str(tmp_path / "a.png")])
    curves.main()
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_parts_share_all_runs() -> None:
    every = {"seeds": 3, "counts": curves.COUNTS, "networks": list(curves.NETWORKS)}
    whole = curves.wanted(argparse.Namespace(part="1/1", **every))
    assert len(whole) == 60
    parts = [
        run
        for number in range(1, 8)
        for run in curves.wanted(argparse.Namespace(part=f"{number}/7", **every))
    ]
    assert sorted(parts) == sorted(whole)
    with pytest.raises(SystemExit, match="expected --part"):
        curves.wanted(argparse.Namespace(part="0/7", **every))
