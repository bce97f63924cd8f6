"""TensorBoard gets every epoch once."""

import sys
import types
from pathlib import Path

import pytest

from econv.records import Record
from tiny_training import changed, interrupt_at, start


def test_tensorboard_gets_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "board" / "tiny" / "0")
            assert purge_step == 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def flush(self) -> None:
            written.append(("flushed", 0))

        def close(self) -> None:
            written.append(("closed", 0))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    start(tmp_path, changed(retrain_on_all=True), tensorboard=tmp_path / "board")
    assert [step for name, step in written if name == "loss"] == list(range(1, 9))
    assert [step for name, step in written if name == "validation_error"] == [1, 2, 3, 4]
    assert written.count(("flushed", 0)) == 8  # with every checkpoint
    assert written[-1] == ("closed", 0)


def test_tensorboard_reads_each_epoch_once_whatever_happened_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"

    def curves() -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(board / "tiny" / "0"))
        events.Reload()
        return {
            name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }

    def check(record: Record) -> None:
        found = curves()
        assert set(found) == {"loss", "learning_rate", "validation_loss", "validation_error"}
        for name, points in found.items():
            expected = [(e["epoch"], e[name]) for e in record.epochs if name in e]
            assert [step for step, _ in points] == [step for step, _ in expected]
            assert [v for _, v in points] == pytest.approx([v for _, v in expected], rel=1e-6)

    with monkeypatch.context() as patch:
        interrupt_at(patch, 15, KeyboardInterrupt)  # in the fourth epoch, a checkpoint at two
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, tensorboard=board, checkpoint_every=2)
    assert [step for step, _ in curves()["loss"]] == [1, 2, 3]
    check(start(tmp_path, tensorboard=board, checkpoint_every=2))
    check(start(tmp_path, tensorboard=board, resume=False))
    assert len(list((board / "tiny" / "0").iterdir())) == 3
