"""The command: one line for what is wrong, every seed, signals."""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from econv import records, train
from econv.recipes import RECIPES
from econv.train import runs
from econv.train.trainer import Trainer
from tiny_training import (
    TINY,
    stripes,
)


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.main(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "unknown recipe 'nothing'"),
        (("digits_p8", "--set", "epochs"), "expected --set key=value; got 'epochs'"),
        (("digits_p8", "--set", "epochs=x"), "expected epochs: a whole number"),
        (("digits_p8", "--seeds", "0"), "expected --seeds of at least 1"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert command(*arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("econv train: ")
    assert message in told
    assert told.count("\n") == 1


def test_the_command_trains_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    monkeypatch.setattr(runs, "load", lambda name, root, source: stripes())
    places = ("--output", str(tmp_path / "out"), "--records", str(tmp_path / "records"))
    arguments = ("tiny", "--set", "epochs=2", "--seeds", "2", "--seed", "5", "--device", "cpu")
    assert command(*arguments, *places, "--quiet") == 0
    found = records.load_all(tmp_path / "records")
    assert [(r.recipe, r.seed, len(r.epochs)) for r in found] == [
        ("tiny+epochs=2", 5, 2),
        ("tiny+epochs=2", 6, 2),
    ]
    assert "tiny+epochs=2 seed 6: test error" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_the_same_one_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    monkeypatch.setattr(runs, "load", lambda name, root, source: stripes())
    places = ("--output", str(tmp_path / "out"), "--records", str(tmp_path / "records"))
    arguments = ("tiny", "--device", "cpu", "--checkpoint-every", "1", *places)
    original = Trainer.step
    before = signal.getsignal(signal.SIGTERM)

    def step(self: Trainer) -> None:
        if int(self.step_number) == 9:
            signal.raise_signal(number)
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        assert command(*arguments) == 130
    assert "The same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
    assert command(*arguments) == 0
    assert "going on after epoch 2" in capsys.readouterr().err


def test_the_package_can_be_run_as_torchrun_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "econv.train", "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("econv train: unknown recipe 'nothing'")
