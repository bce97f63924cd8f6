"""Checkpoints: a resumed run ends as an uninterrupted one; what is damaged is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from econv import files, records, report, train
from econv.engines import choice
from econv.recipes import Recipe
from econv.train.trainer import Trainer
from fake_engines import installed
from tiny_training import TINY, changed, interrupt_at, outcome, start, stripes, weights


@pytest.mark.parametrize(
    ("recipe", "every", "step"),
    [
        (TINY, 1, 11),
        (TINY, 2, 15),
        (TINY, 3, 3),
        (changed(optimizer="adam", ema_decay=0.0, schedule="steps", milestones=(0.5,)), 1, 9),
        (changed(optimizer="sgd", evaluate_every=3), 1, 13),
        (changed(retrain_on_all=True), 1, 14),
        (changed(retrain_on_all=True), 3, 25),
    ],
)
def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, every: int, step: int
) -> None:
    whole = start(tmp_path / "whole", recipe)
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "parts", recipe, checkpoint_every=every)
    resumed = start(tmp_path / "parts", recipe, checkpoint_every=every)
    assert outcome(resumed) == outcome(whole)
    assert weights(tmp_path / "parts", recipe) == weights(tmp_path / "whole", recipe)


def test_resuming_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 14, KeyboardInterrupt)  # four steps an epoch: in the fourth
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    steps: list[int] = []
    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self: (steps.append(1), original(self))[1])
    start(tmp_path)
    assert len(steps) == 4


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
        "checkpoint-0-2.safetensors",
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


def damage_tensors(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def damage_json(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_bytes(path.read_bytes()[:-20])


def change_told(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        whole = json.loads((folder / "checkpoint.json").read_text())
        whole["told"] = {**whole["told"], **changes} if changes else []
        (folder / "checkpoint.json").write_text(json.dumps(whole))

    return damage


def forget_parts(folder: Path) -> None:
    whole = json.loads((folder / "checkpoint.json").read_text())
    del whole["told"]["parts"]
    (folder / "checkpoint.json").write_text(json.dumps(whole))


def lose_tensors(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_tensors, "checksum differs"),
        (damage_json, "cannot be used"),
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
        (lose_tensors, "No such file"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_a_fresh_start_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage, message: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    damage(tmp_path / "out" / "tiny" / "0")
    with pytest.raises(train.CheckpointError, match=message) as caught:
        start(tmp_path)
    assert "--fresh" in str(caught.value)
    assert outcome(start(tmp_path, resume=False)) == outcome(start(tmp_path / "other"))


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
    path.write_text(json.dumps(whole))
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
    record = start(tmp_path, progress=True)
    assert "going on with other revision, source_sha256; the record" in capsys.readouterr().err
    assert record.parts is not None
    assert [(part["after"], part["revision"]) for part in record.parts] == [
        (0, "a" * 40),
        (2, "b" * 40),
    ]
    assert record.parts[1]["source_sha256"] == record.source_sha256 == "c" * 64
    assert record.parts[1]["step"] == record.step
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


@pytest.mark.parametrize("poison", ["loss", "weights"])
def test_no_number_stops_the_run_names_the_step_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: str
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
            start(tmp_path)
    message = str(caught.value)
    if poison == "loss":
        assert "the loss is nan at step 10 (epoch 3, step 2 of 4)" in message
    else:
        assert "the weights are no numbers after step 12 (epoch 3, step 4 of 4)" in message
    assert "The checkpoint after epoch 2 is kept in" in message
    tensors = load_file(tmp_path / "out" / "tiny" / "0" / "checkpoint-0-2.safetensors")
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
