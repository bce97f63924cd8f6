"""What a run tells on stderr."""

from pathlib import Path

import pytest

from econv import progress
from econv.train.messages import RunMessages
from econv.train.trainer import batches
from terminals import use_terminal
from tiny_training import TINY, changed, interrupt_at, start


def test_progress_tells_rates_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SAID", 0.0)
    start(tmp_path, progress=True)
    told = capsys.readouterr().err
    assert "tiny, seed 0: epoch 2/4, step 3/4" in told
    assert "images/s" in told
    assert " left" in told
    assert "test error" in told
    start(tmp_path / "quiet")
    assert capsys.readouterr().err == ""


def test_progress_ends_where_the_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SAID", 0.0)
    recipe = changed(retrain_on_all=True)  # 64 images an epoch, then 96
    with monkeypatch.context() as patch:
        interrupt_at(patch, 23, KeyboardInterrupt)  # in the second epoch of retraining
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, recipe, progress=True)
    capsys.readouterr()
    start(tmp_path, recipe, progress=True)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "tiny, seed 0: going on after epoch 1 of retraining"
    assert "epoch 2/4 of retraining, step 1/6" in told[1]
    assert "epoch 4/4 of retraining, loss" in told[-2]
    assert told[-2].endswith("images/s, 0:00:00 left")
    assert "test error" in told[-1]


def test_all_images_of_all_phases_are_counted() -> None:
    assert batches(TINY, 70) == (16, 4)
    assert batches(TINY, 9) == (9, 1)
    told = RunMessages(TINY, 0, [64, 96], steps_settle=True, enabled=False)
    assert told.bar._total == 4 * (64 + 96)
    told.resumed(1, 3, 0, 16)
    assert told.bar._done == 4 * 64 + 3 * 96
    told.phase("retrain", 16)
    for step in range(6):
        told.step(3, step, 6)
    assert told.bar._done == told.bar._total


@pytest.mark.parametrize("settle", [True, False])
def test_only_steps_that_are_done_count_for_the_rate(settle: bool) -> None:
    told = RunMessages(TINY, 0, [64], steps_settle=settle, enabled=False)
    told.phase("select", 16)
    told.step(0, 0, 4)
    assert told.bar._settled == (16 if settle else 0)
    told.epoch({"loss": 1.0, "epoch": 1}, None)
    assert told.bar._settled == 16


def test_a_terminal_shows_a_bar_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = use_terminal(monkeypatch)
    start(tmp_path, progress=True)
    told = terminal.shown()
    assert "tiny, seed 0 ━━━━━━━━━━━━━━━━━━━━" in told
    assert "images/s, 0:00:00 left" in told
    assert "epoch 4/4, loss" in told
    assert "tiny, seed 0: test error" in told
