"""Runs: the record says what happened, the best epoch is selected, the test split read once."""

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import econv
from econv import create_model, records
from econv.data import Split
from econv.train.trainer import Trainer
from tiny_training import TINY, changed, interrupt_at, outcome, start, stripes, trainer, weights


def test_a_network_learns_and_the_record_says_what_happened(tmp_path: Path) -> None:
    record = start(tmp_path, changed(epochs=12))
    assert record.test_error <= 10
    assert record.epochs[-1]["loss"] < record.epochs[0]["loss"] / 1.5
    assert records.load(tmp_path / "records" / "tiny" / "0.json") == record
    assert (record.dataset, record.recreated, record.processes) == ("stripes", False, 1)
    assert record.unverified is False
    assert record.channels_last is False
    assert [e["epoch"] for e in record.epochs] == list(range(1, 13))
    assert record.settings == changed(epochs=12).settings()
    assert record.seconds >= sum(e["seconds"] for e in record.epochs) > 0
    assert record.setup_seconds > 0


def test_the_selected_epoch_is_the_best_one_and_its_weights_are_tested(tmp_path: Path) -> None:
    record = start(tmp_path, changed(epochs=6, evaluate_every=2))
    seen = [e for e in record.epochs if "validation_error" in e]
    assert [e["epoch"] for e in seen] == [2, 4, 6]
    best = min(seen, key=lambda e: (e["validation_error"], e["validation_loss"]))
    assert record.selected_epoch == best["epoch"]
    assert record.validation_error == best["validation_error"]

    from safetensors.torch import load

    model = create_model(TINY.model, **dict(TINY.model_options)).eval()
    model.load_state_dict(load(weights(tmp_path)))
    data = stripes()
    x = (data.test.x / 255 - data.mean[0]) / data.std[0]
    classes = model(x).argmax(1)
    assert 100 * (classes != data.test.y).double().mean() == pytest.approx(record.test_error)
    assert hashlib.sha256(classes.numpy().tobytes()).hexdigest() == record.predictions_sha256


def test_an_early_best_epoch_is_kept_over_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([(3, 0.5), (1, 0.5), (1, 0.4), (1, 0.4), (2, 0.1)])
    states: list[dict[str, torch.Tensor]] = []
    original = Trainer.predict

    def predict(self: Trainer, split: Split) -> tuple[torch.Tensor, float]:
        if len(split) == 50:  # the test split
            states.append({n: t.clone() for n, t in self.evaluated.state_dict().items()})
            return original(self, split)
        states.append({n: t.clone() for n, t in self.evaluated.state_dict().items()})
        wrong, loss = next(errors)
        classes = split.y.clone()
        classes[:wrong] = (classes[:wrong] + 1) % 3
        return classes, loss

    monkeypatch.setattr(Trainer, "predict", predict)
    record = start(tmp_path, changed(epochs=5))
    assert record.selected_epoch == 3
    assert record.validation_error == 2.5
    assert all(torch.equal(states[-1][n], states[2][n]) for n in states[2])
    assert not all(torch.equal(states[-1][n], states[4][n]) for n in states[4])


def test_the_test_split_is_read_once_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = Trainer.predict

    def predict(self: Trainer, split: Split) -> tuple[torch.Tensor, float]:
        read.append(len(split))
        return original(self, split)

    monkeypatch.setattr(Trainer, "predict", predict)
    start(tmp_path, changed(retrain_on_all=True))
    assert read == [40] * 4 + [50]


def test_retraining_takes_the_last_epoch_of_training_on_both_splits(tmp_path: Path) -> None:
    record = start(tmp_path, changed(retrain_on_all=True))
    assert record.retrained
    assert [e["phase"] for e in record.epochs] == ["select"] * 4 + ["retrain"] * 4
    plain = start(tmp_path / "plain")
    assert not plain.retrained
    assert record.validation_error == plain.validation_error
    assert record.selected_epoch == plain.selected_epoch

    data = stripes().with_validation_in_training()
    network = trainer(TINY, data, precision="float32")
    losses = [network.epoch(e, lambda *_: None) for e in range(4)]
    assert len(losses[0]) == 110 // 16
    assert record.epochs[-1]["loss"] == sum(losses[-1]) / len(losses[-1])
    found, _ = network.predict(data.test)
    expected = hashlib.sha256(found.numpy().tobytes()).hexdigest()
    assert record.predictions_sha256 == expected


def test_the_record_says_that_data_are_unverified(tmp_path: Path) -> None:
    data = dataclasses.replace(stripes(), recreated=True, unverified=True)
    record = start(tmp_path, changed(epochs=1), data=data)
    assert (record.recreated, record.unverified) == (True, True)


def test_the_record_says_what_ran_the_convolutions(tmp_path: Path) -> None:
    short = changed(epochs=1)
    for name in ("dense", "spectral"):
        with econv.engine(name) as ran:
            record = start(tmp_path / name, short)
        assert record.convolutions is not None
        assert all(found.startswith(name) for found in record.convolutions)
        # Of one step, and those of all steps and evaluations reach the block around.
        layers = sum(isinstance(m, econv.layers.PDOConv2d) for m in trainer(short).model.modules())
        assert sum(record.convolutions.values()) == layers
        assert len(ran) > 2 * layers


def test_the_record_says_how_many_runs_shared_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = changed(epochs=1)
    monkeypatch.delenv("ECONV_SHARED", raising=False)
    assert start(tmp_path / "a", short).shared is None
    monkeypatch.setenv("ECONV_SHARED", "3")
    assert start(tmp_path / "b", short).shared == 3
    assert start(tmp_path / "c", short, shared=1).shared == 1
    with pytest.raises(ValueError, match="expected shared as the number of runs, 1 or more; got 0"):
        start(tmp_path / "d", short, shared=0)
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("ECONV_SHARED", wrong)
        with pytest.raises(ValueError, match=f"expected ECONV_SHARED .*; got '{wrong}'"):
            start(tmp_path / "d", short)


def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    first, again, other = (start(tmp_path / n, seed=s) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert outcome(first) == outcome(again)
    assert first.epochs[0]["loss"] != other.epochs[0]["loss"]


def test_the_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    start(tmp_path, changed(epochs=1))
    assert torch.equal(torch.rand(3), expected)


def test_a_wrong_revision_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong() -> str:
        raise ValueError("expected ECONV_REVISION")

    monkeypatch.setattr(records, "revision", wrong)
    interrupt_at(monkeypatch, 1, AssertionError)
    with pytest.raises(ValueError, match="expected ECONV_REVISION"):
        start(tmp_path)


@pytest.mark.parametrize("option", ["records", "output"])
def test_a_place_that_cannot_be_written_to_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    interrupt_at(monkeypatch, 1, AssertionError)
    with pytest.raises(OSError, match=r"expected a folder that can be written to; got .*file"):
        start(tmp_path, **{option: tmp_path / "file" / "below"})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("module", "message"),
    [("torch.utils.tensorboard", "pip install tensorboard"), ("safetensors.torch", "econv.train")],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message):
        start(tmp_path, tensorboard=tmp_path if "tensorboard" in module else None)


def test_importing_econv_imports_nothing_of_training() -> None:
    code = (
        "import sys, econv; names = 'train recipes records report data'.split(); "
        "sys.exit(any(f'econv.{n}' in sys.modules for n in names))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
