"""Checkpoints: a resumed run ends as an uninterrupted one; what is damaged is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from econv import files, records, report, train
from econv.engines import choice
from econv.engines.spectral import native
from econv.recipes import Recipe
from econv.train import checkpoints
from econv.train.trainer import Trainer
from fake_engines import installed
from full_disk import contents, full_disk
from tiny_training import ONE, TINY, changed, interrupt_at, outcome, start, stripes, weights


@pytest.mark.parametrize(
    ("recipe", "every", "minutes", "step"),
    [
        (TINY, 1, 5, 11),
        (TINY, 2, 5, 15),
        (TINY, 3, 5, 3),
        (TINY, 9, 1e-9, 2),  # after every step
        (changed(optimizer="adam", ema_decay=0.0, schedule="steps", milestones=(0.5,)), 1, 5, 9),
        (changed(optimizer="sgd", evaluate_every=3), 1, 1e-9, 12),
        (changed(retrain_on_all=True), 1, 5, 14),
        (changed(retrain_on_all=True), 3, 1e-9, 25),
    ],
)
def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: Recipe,
    every: int,
    minutes: float,
    step: int,
) -> None:
    often = {"checkpoint_every": every, "checkpoint_minutes": minutes}
    whole = start(tmp_path / "whole", recipe)
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "parts", recipe, **often)
    resumed = start(tmp_path / "parts", recipe, **often)
    assert outcome(resumed) == outcome(whole)
    assert weights(tmp_path / "parts", recipe) == weights(tmp_path / "whole", recipe)


@pytest.mark.parametrize(("minutes", "missing"), [(5, 4), (1e-9, 3)])
def test_resuming_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, missing: int
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 14, KeyboardInterrupt)  # four steps an epoch: in the fourth
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, checkpoint_minutes=minutes)
    steps: list[int] = []
    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self: (steps.append(1), original(self))[1])
    start(tmp_path)
    assert len(steps) == missing


def test_a_failed_write_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start(tmp_path / "whole")
    original = files.write_atomically
    written: list[str] = []

    def failing(path: Path, content: bytes) -> None:
        written.append(path.name)
        if written.count("checkpoint.json") == 3:
            raise OSError("no space left")
        original(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", failing)
        with pytest.raises(OSError, match="no space left"):
            start(tmp_path / "parts")
    folder = tmp_path / "parts" / "out" / "tiny" / "0"
    assert json.loads((folder / "checkpoint.json").read_text())["told"]["epoch"] == 2
    assert outcome(start(tmp_path / "parts")) == outcome(whole)


@pytest.mark.parametrize(
    ("name", "time"),
    [
        ("checkpoint-0-1.safetensors", 1),
        ("checkpoint-0-3.safetensors", 1),
        ("checkpoint.json", 1),
        ("checkpoint.json", 4),
        ("checkpoint-before.json", 1),
        ("checkpoint-before.json", 2),
        ("model.safetensors", 1),
        ("0.json", 1),
    ],
)
def test_a_full_disk_is_named_and_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, time: int
) -> None:
    with monkeypatch.context() as patch:
        before = full_disk(patch, name, tmp_path, time)
        with pytest.raises(OSError, match=rf"No space left on device: '.*/{name}'"):
            start(tmp_path)
    assert contents(tmp_path) == before
    resumed = start(tmp_path)
    assert outcome(resumed) == outcome(start(tmp_path / "whole"))
    assert files_left(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("below", ["out/tiny/0", "records/tiny"])
def test_a_folder_that_can_only_be_read_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    before = contents(tmp_path)
    (tmp_path / below).chmod(0o500)
    try:
        if os.access(tmp_path / below, os.W_OK):
            pytest.skip("root writes anywhere")
        with pytest.raises(OSError, match=f"can be written to; got .*{below}: Permission denied"):
            start(tmp_path, resume=False)
    finally:
        (tmp_path / below).chmod(0o700)
    assert contents(tmp_path) == before


def files_left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out" / "tiny" / "0").iterdir())


def test_checkpoints_hold_everything_and_go_when_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "out" / "tiny" / "0"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoint-0-1.safetensors",
        "checkpoint-0-2.safetensors",
        "checkpoint-before.json",
        "checkpoint.json",
    ]
    tensors = load_file(folder / "checkpoint-0-2.safetensors")
    owners = {name.split(".")[0] for name in tensors}
    assert owners == {"step", "model", "average", "optimizer", "best"}
    assert tensors["step"].item() == 8
    told = json.loads((folder / "checkpoint.json").read_text())["told"]
    assert told["epoch"] == 2
    assert told["best"]["epoch"] in (1, 2)
    start(tmp_path)
    assert [p.name for p in folder.iterdir()] == ["model.safetensors"]


def tensors_of(folder: Path) -> Path:
    return folder / json.loads((folder / "checkpoint.json").read_text())["tensors"]


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the newest checkpoint says, as one would that can make checksums."""
    path = folder / "checkpoint.json"
    whole = json.loads(path.read_text())
    del whole["checksum"]
    change(whole)
    path.write_bytes(checkpoints.sealed(whole))


def damage_tensors(folder: Path) -> None:
    path = tensors_of(folder)
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def damage_json(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_bytes(path.read_bytes()[:-20])


def change_told(**changes: object) -> Callable[[Path], None]:
    def change(whole: dict[str, Any]) -> None:
        whole["told"] = {**whole["told"], **changes} if changes else []

    return lambda folder: rewritten(folder, change)


def forget_parts(folder: Path) -> None:
    rewritten(folder, lambda whole: whole["told"].pop("parts"))


def lose_tensors(folder: Path) -> None:
    tensors_of(folder).unlink()


def name_a_path(folder: Path) -> None:
    rewritten(folder, lambda whole: whole.update(tensors="../0/" + whole["tensors"]))


def break_off(folder: Path) -> None:
    (folder / "checkpoint.json").write_bytes(b"[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_tensors, "checksum differs"),
        (damage_json, "checksum differs|Unterminated"),
        (change_told(), r"expected told as an object; got \[\]"),
        (change_told(epoch="2"), "expected epoch of another kind; got '2'"),
        (change_told(seconds=None), "expected seconds of another kind; got None"),
        (change_told(phase=1), "expected a phase and an epoch of this run; got 1, 2"),
        (change_told(epoch=9), "expected a phase and an epoch of this run; got 0, 9"),
        (change_told(best={}), "expected best as one of the evaluated epochs"),
        (change_told(best=None), "expected best as one of the evaluated epochs; got None"),
        (change_told(best={"epoch": 1, "validation_error": "0", "validation_loss": 0.1}), "best"),
        (change_told(history=[1]), "expected epochs with their number"),
        (change_told(history=[{"epoch": 1, "loss": "0"}] * 2), "epochs with loss as a number"),
        (change_told(history=[]), "expected a history of every epoch so far"),
        (change_told(parts=[]), "who took part"),
        (change_told(parts=[{}]), "expected parts with after, revision"),
        (forget_parts, "expected parts, which is missing"),
        (change_told(parts=None), "expected parts of another kind; got None"),
        (change_told(step=-1), "expected a phase and an epoch of this run"),
        (change_told(step=1), "are those after step 8; expected 9"),
        (lose_tensors, "No such file"),
        (name_a_path, "expected the name of tensors"),
        (break_off, "recursion"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_a_fresh_start_helps(
    capsys: pytest.CaptureFixture[str],
    halfway: Path,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    folder = halfway / "out" / "tiny" / "0"
    room = room_of(folder)
    damage(folder)
    if "after step" not in message:  # that one only who trains can see
        found = room.load()
        assert found is not None
        assert found.told["epoch"] == 1
        told = capsys.readouterr().err
        assert "damaged, going on from the checkpoint before: checkpoint.json: " in told
        assert re.search(message, told)
        (folder / "checkpoint-before.json").unlink()
    with pytest.raises(train.CheckpointError, match=message) as caught:
        start(halfway)
    assert "--fresh" in str(caught.value)


def room_of(folder: Path) -> checkpoints.Checkpoints:
    whole = json.loads((folder / "checkpoint.json").read_text())
    identity = {name: whole[name] for name in ("settings", "seed", "data_sha256", "precision")}
    return checkpoints.Checkpoints(folder, identity, ONE)


def test_a_fresh_start_helps_where_nothing_is_whole(
    halfway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = halfway / "out" / "tiny" / "0"
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        train.CheckpointError, match=r"checkpoint\.json: .*checkpoint-before\.json: "
    ):
        start(halfway)
    assert outcome(start(halfway, resume=False)) == outcome(start(halfway / "whole"))
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(folder)
    return folder


@pytest.fixture
def halfway(tmp_path: Path, stopped: Path) -> Path:
    """A folder where a run was stopped in its third epoch."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_damaged_generation_costs_an_epoch_and_no_bit(halfway: Path) -> None:
    damage_tensors(halfway / "out" / "tiny" / "0")
    assert outcome(start(halfway)) == outcome(start(halfway / "whole"))


def test_every_flipped_bit_of_a_checkpoint_is_noticed(
    halfway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = halfway / "out" / "tiny" / "0"
    room = room_of(folder)
    found = room.load()
    assert found is not None
    assert found.told["epoch"] == 2
    random = np.random.default_rng(0)
    for path in (folder / "checkpoint.json", tensors_of(folder)):
        content = path.read_bytes()
        for bit in random.choice(8 * len(content), 150, replace=False):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(flipped)
            found = room.load()
            assert found is not None
            assert found.told["epoch"] == 1, bit
            assert path.name in capsys.readouterr().err
        path.write_bytes(content)


@pytest.mark.parametrize("other", ["recipe", "version"])
def test_a_checkpoint_that_is_not_for_us_is_left_as_it_is(halfway: Path, other: str) -> None:
    folder = halfway / "out" / "tiny" / "0"
    if other == "version":
        rewritten(folder, lambda whole: whole.update(format=3, further=1))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    recipe = changed(weight_decay=0.5) if other == "recipe" else TINY
    message = {"recipe": r"settings \(weight_decay\)", "version": "newer version: format 3"}[other]
    with pytest.raises(train.CheckpointError, match=message):
        start(halfway, recipe)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_half_written_files_of_killed_processes_go(halfway: Path) -> None:
    folder = halfway / "out" / "tiny" / "0"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (folder / f".{ended.pid}.checkpoint.json").write_bytes(b"{")
    (folder / f".{os.getpid()}.mine").write_bytes(b"{")
    start(halfway)
    assert sorted(p.name for p in folder.iterdir()) == [f".{os.getpid()}.mine", "model.safetensors"]


def test_a_run_killed_before_its_record_knows_what_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    record = start(tmp_path)
    assert record.convolutions
    assert outcome(record) == outcome(start(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": changed(weight_decay=0.5)}, r"other settings \(weight_decay\)"),
        ({"data": stripes(1)}, "other data_sha256"),
        ({"precision": "float64"}, "other precision"),
    ],
)
def test_a_checkpoint_or_record_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], message: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    with pytest.raises(train.CheckpointError, match=message):
        start(tmp_path, **change)
    start(tmp_path)
    with pytest.raises(train.CheckpointError, match=r"0\.json is the record of a run with other"):
        start(tmp_path, **change)


def test_a_checkpoint_with_older_names_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    path = tmp_path / "out" / "tiny" / "0" / "checkpoint.json"
    whole = json.loads(path.read_text())
    (part,) = whole["told"]["parts"]
    part["engine"] = part.pop("step")
    for name in ("torch", "processor", "kernel"):
        del part[name]
    for name in ("step", "spent", "convolutions"):
        del whole["told"][name]
    for name in ("checksum", "format"):
        del whole[name]
    path.write_text(json.dumps(whole))
    (path.parent / "checkpoint-before.json").unlink()
    record = start(tmp_path)
    assert record.parts is not None
    assert [(each["after"], each["step"]) for each in record.parts] == [(0, "eager")]


def test_everything_that_took_part_in_a_resumed_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_until(step: int) -> None:
        with monkeypatch.context() as patch:
            interrupt_at(patch, step, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                start(tmp_path, progress=True)

    monkeypatch.setattr(records, "revision", lambda: "a" * 40)
    run_until(6)
    run_until(5)  # the same code again, stopped after one more epoch
    assert "with other" not in capsys.readouterr().err
    monkeypatch.setattr(records, "revision", lambda: "b" * 40)
    monkeypatch.setattr(records, "source_hash", lambda: "c" * 64)
    monkeypatch.setattr(native, "identity", lambda dtype: "no compiler")
    record = start(tmp_path, progress=True)
    assert "with other revision, source_sha256, kernel; the record" in capsys.readouterr().err
    assert record.parts is not None
    assert [(part["after"], part["revision"]) for part in record.parts] == [
        (0, "a" * 40),
        (2, "b" * 40),
    ]
    assert record.parts[1]["source_sha256"] == record.source_sha256 == "c" * 64
    assert record.parts[1]["step"] == record.step
    assert record.parts[1]["kernel"] == "no compiler"
    assert record.parts[1]["torch"] == record.versions["torch"]
    page = report.as_html([], {"tiny": [record]})
    assert "aaaaaaaaaa, bbbbbbbbbb" in page


def test_a_finished_run_is_not_trained_again_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, AssertionError)
        assert start(tmp_path) == first
        with pytest.raises(AssertionError):
            start(tmp_path, resume=False)
    assert outcome(start(tmp_path)) == outcome(first)


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": None, "source": "/nowhere"},
        {"data": None},
        {"precision": "float16"},
        {"recipe": changed(batch_size=16, model="convnet9")},
    ],
)
def test_a_fresh_start_with_wrong_input_keeps_what_is_there(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    start(tmp_path)
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    assert sorted(path.name for path in before) == ["0.json", "model.safetensors"]
    with pytest.raises(ValueError, match="expected"):
        start(tmp_path, resume=False, **wrong)
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before


def test_an_interrupted_fresh_start_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, resume=False)
    assert not (tmp_path / "records" / "tiny" / "0.json").exists()
    again = start(tmp_path)
    assert again.finished >= first.finished
    assert outcome(again) == outcome(first)


@pytest.mark.parametrize(
    ("poison", "minutes", "last"),
    [("loss", 5, "0-2"), ("weights", 5, "0-2"), ("loss", 1e-9, "0-2-1")],
)
def test_no_number_stops_the_run_names_the_step_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: str, minutes: float, last: str
) -> None:
    from safetensors.torch import load_file

    original = Trainer.step

    def step(self: Trainer) -> None:
        original(self)
        number = int(self.step_number)
        if poison == "loss" and number == 10:
            self.losses[1] = float("nan")
        if poison == "weights" and number == 12:
            self.weights.flat[0] = float("inf")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(train.DivergedError) as caught:
            start(tmp_path, checkpoint_minutes=minutes)
    message = str(caught.value)
    if poison == "loss":
        assert "the loss is nan at step 10 (epoch 3, step 2 of 4)" in message
    else:
        assert "the weights are no numbers after step 12 (epoch 3, step 4 of 4)" in message
    where = "epoch 2" if last == "0-2" else "step 1 of epoch 3"
    assert f"The checkpoint after {where} is kept in" in message
    tensors = load_file(tmp_path / "out" / "tiny" / "0" / f"checkpoint-{last}.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert outcome(start(tmp_path)) == outcome(start(tmp_path / "whole"))


def test_a_learning_rate_that_is_far_too_high_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(train.DivergedError, match="No checkpoint was written yet"):
        start(tmp_path, changed(learning_rate=1e30, optimizer="sgd", warmup_epochs=0.0))


def test_a_resumed_run_keeps_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measuring: Path
) -> None:
    """Measured again, another engine might win, and round another way."""
    installed(monkeypatch, 2.0, 1.0)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    told = json.loads((tmp_path / "out" / "tiny" / "0" / "checkpoint.json").read_text())["told"]
    assert set(told["choices"].values()) == {"spectral/native"}
    for known in ("_memory", "_decided", "_times"):  # as in another process, without the disk's
        monkeypatch.setattr(choice, known, {})
    for file in measuring.iterdir():
        file.unlink()
    installed(monkeypatch, 1.0, 2.0)  # where the other engine would win
    record = start(tmp_path)
    assert record.choices is not None
    assert told["choices"].items() <= record.choices.items()
    new = {name for key, name in record.choices.items() if key not in told["choices"]}
    assert new == {"dense"}  # the size of the test split, which only the second part met
