"""The benchmark of whole training steps: every engine trains the same network."""

import json

import pytest
import torch

training_speed = pytest.importorskip("training_speed", reason="no benchmarks beside the tests")


def test_every_engine_takes_part_and_trains_the_same(tmp_path, capsys):
    arguments = "--device cpu --step eager --batch 2 --steps 1 --rounds 1"
    file = tmp_path / "found.json"
    recipes = ["--recipes", "cifar10_resnet26_p6_paper", "cifar10_resnet26_p6"]
    training_speed.main([*arguments.split(), *recipes, "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["device"] == "cpu"
    assert [run["operators"] for run in found["runs"]] == [["9 on 5×5"], ["6 on 3×3"]]
    for run in found["runs"]:
        assert set(run["images_per_second"]) == {"dense", "spectral", "auto"}
        assert min(run["images_per_second"].values()) > 0
        assert set(run["ran"]["dense"]) == {"dense"}
        assert all(name.startswith("spectral/") for name in run["ran"]["spectral"])
        assert {sum(counts.values()) for counts in run["ran"].values()} == {27}
        losses = torch.tensor(list(run["losses_of_the_last_step"].values()))
        torch.testing.assert_close(losses, losses[:1].expand(3), rtol=0.05, atol=0)
    assert "spectral/dense" in capsys.readouterr().out


def test_an_unknown_recipe_is_refused(capsys):
    with pytest.raises(SystemExit):
        training_speed.main(["--recipes", "cifar10_resnet7"])
    assert "invalid choice" in capsys.readouterr().err
