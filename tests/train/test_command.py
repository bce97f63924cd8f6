"""The command: one line for what is wrong, every seed, signals."""

import argparse
import dataclasses
import functools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from econv import records, report, train
from econv.data import Dataset, load
from econv.recipes import RECIPES
from econv.train import runs
from econv.train.trainer import Trainer
from tiny_training import (
    TINY,
    interrupt_at,
    outcome,
    stripes,
)


@functools.lru_cache
def digits() -> Dataset:
    return load("digits")


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.main(parser.parse_args(arguments))


def test_the_old_name_of_step_is_an_error_that_says_the_new_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        command("digits_p8", "--engine", "graph")
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "expected --step eager|graph|compile, as --engine is called now" in told
    assert "got --engine graph" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "unknown recipe 'nothing'"),
        (("digits_p8", "--set", "epochs"), "expected --set key=value; got 'epochs'"),
        (("digits_p8", "--set", "epochs=x"), "expected epochs: a whole number"),
        (("digits_p8", "--seeds", "0"), "expected --seeds of at least 1"),
        *(
            (("digits_p8", "--set", f"{key}={value}"), message)
            for key, value, message in (
                (
                    "model_options.fields",
                    "9",
                    "expected fields: whole numbers of at least 1; got 9",
                ),
                ("model_options.fields", "9,9,0", "expected fields: whole numbers"),
                ("model_options.fields", "many", "expected fields: whole numbers"),
                ("model_options.foo", "1", "expected model_options that convnet6_p8 can be built"),
                ("model_options.options", "1", "expected model_options that convnet6_p8 can be"),
                ("model_options.num_classes", "3", "num_classes=10, as the data have; got 3"),
                ("model_options.in_channels", "3", "expected 3 image channels; got 1"),
                ("model_options.dropout", "much", "expected dropout as a number from 0 to below 1"),
                ("model_options.shrink", "2", "expected shrink as True or False; got 2"),
                ("model_options.pooled_after", "2", "expected pooled_after: whole numbers"),
                ("model_options.image_size", "small", "expected image_size: a whole number"),
                ("augmentation.spin", "1", "expected augmentation with keywords of rotate, shift"),
                ("augmentation.rotate", "yes", "expected rotate as True or False; got 'yes'"),
                ("augmentation.flip", "1", "expected flip as True or False; got 1"),
            )
        ),
        *(
            (("digits_cnn", "--set", "model_options.readout=map", "--set", change), message)
            for change, message in (
                ("model_options.in_channels=3", "expected a network for images of [1, 28, 28]"),
                ("model_options.image_size=24", "expected 10 scores of an image of [1, 28, 28]"),
            )
        ),
        (("digits_p8", "--device", "foo"), "expected a device that is there, such as cpu"),
        (("digits_p8", "--device", "meta"), "expected a device that is there, such as cpu"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    interrupt_at(monkeypatch, 1, AssertionError)
    monkeypatch.setattr(runs, "load", lambda name, **_: digits())
    if "--device" not in arguments:
        arguments += ("--device", "cpu")
    assert command(*arguments, "--quiet") == 1
    told = capsys.readouterr().err
    assert told.startswith("econv train: ")
    assert message in told
    assert told.count("\n") == 1


def test_the_command_trains_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    monkeypatch.setattr(runs, "load", lambda name, **_: stripes())
    places = ("--output", str(tmp_path / "out"), "--records", str(tmp_path / "records"))
    arguments = ("tiny", "--set", "epochs=2", "--seeds", "2", "--seed", "5", "--device", "cpu")
    assert command(*arguments, *places, "--quiet") == 0
    found = records.load_all(tmp_path / "records")
    assert [(r.recipe, r.seed, len(r.epochs)) for r in found] == [
        ("tiny+epochs=2", 5, 2),
        ("tiny+epochs=2", 6, 2),
    ]
    told = capsys.readouterr().out
    assert "tiny+epochs=2 seed 6: test error" in told
    assert "trained before" not in told
    assert command(*arguments, *places, "--quiet") == 0
    assert capsys.readouterr().out.count("to set up; trained before; --fresh trains it anew\n") == 2
    assert command(*arguments, *places, "--quiet", "--fresh") == 0
    assert "trained before" not in capsys.readouterr().out


def test_a_row_of_the_table_can_be_trained_on_recreated_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, object]] = []

    def load(name: str, **options: object) -> Dataset:
        asked.append({"name": name, **options})
        return dataclasses.replace(stripes(), name=name, recreated=bool(options["recreated"]))

    monkeypatch.setattr(runs, "load", load)
    row = dataclasses.replace(TINY, table=1, dataset="mnist_rot", minimum_seeds=1)
    monkeypatch.setitem(RECIPES, "tiny", row)
    folder = tmp_path / "records"
    places = ("--output", str(tmp_path / "out"), "--records", str(folder))
    assert command("tiny", "--recreated", "--device", "cpu", "--quiet", *places) == 0
    (given,) = asked
    assert given == {
        "name": "mnist_rot",
        "seed": 0,
        "root": None,
        "source": None,
        "recreated": True,
    }
    assert "on mnist_rot (re-created)" in capsys.readouterr().out
    (found,) = records.load_all(folder)
    assert (found.recipe, found.dataset, found.recreated) == ("tiny", "mnist_rot", True)
    (line,) = [r for r in report.rows([found]) if r.recipe.name == "tiny"]
    assert line.complete
    assert "re-created" in line.cells()[-1]


def test_rows_are_reported_over_seeds_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str, seed: int, recreated: bool, **_: object) -> Dataset:
        return dataclasses.replace(stripes(seed), name=name, recreated=recreated, seed=seed)

    monkeypatch.setattr(runs, "load", load)
    row = dataclasses.replace(TINY, table=1, dataset="mnist_rot", epochs=1, minimum_seeds=2)
    monkeypatch.setitem(RECIPES, "tiny", row)
    folder = tmp_path / "records"
    places = ("--output", str(tmp_path / "out"), "--records", str(folder), "--device", "cpu")
    for number in ("0", "2"):
        asked = ("tiny", "--recreated", "--seeds", "2", "--data-seed", number, *places, "--quiet")
        assert command(*asked) == 0
    assert "tiny seed 1-data2: test error" in capsys.readouterr().out
    assert sorted(path.name for path in folder.glob("tiny/*")) == [
        "0-data2.json",
        "0.json",
        "1-data2.json",
        "1.json",
    ]
    assert records.strays(folder) == []
    found = records.load_all(folder)
    assert [(r.data_seed, r.seed) for r in found] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert len({r.data_sha256 for r in found}) == 2
    (line,) = [r for r in report.rows(found) if r.recipe.name == "tiny"]
    errors = [r.test_error for r in found]
    means = f"{report.spread(errors[:2])}, {report.spread(errors[2:])} by data"
    assert line.error == f"{report.spread(errors)} ({means})"
    assert line.cells()[3] == "2 on each of 2 data sets, 4 runs"
    assert "re-created, data seeds 0, 2" in line.cells()[-1]
    assert "over seeds and data" in report.as_text([line])
    assert command(*asked) == 0
    assert "trained before" in capsys.readouterr().out
    monkeypatch.setattr(runs, "load", lambda name, **_: stripes())
    assert command("tiny", "--data-seed", "3", *places) == 1
    assert "expected data_seed with data that are made again with it; got 3" in (
        capsys.readouterr().err
    )


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT is heard, which a shell has ignored where it starts tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_the_same_one_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    monkeypatch.setattr(runs, "load", lambda name, **_: stripes())
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
        assert command(*arguments) == 128 + number
    assert "The same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
    assert command(*arguments) == 0
    assert "going on after step 2 of epoch 3" in capsys.readouterr().err
    resumed = records.load(tmp_path / "records" / "tiny" / "0.json")
    assert command(*arguments, "--fresh") == 0
    assert outcome(resumed) == outcome(records.load(tmp_path / "records" / "tiny" / "0.json"))


def test_the_package_can_be_run_as_torchrun_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "econv.train", "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("econv train: unknown recipe 'nothing'")
