"""Signals are heard between steps; one folder has one run."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from econv import files, train
from econv.train.stopping import Stop, Terminated, terminable
from tiny_training import interrupt_at, start


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """A shell has SIGINT ignored where it starts tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_the_first_signal_waits_and_the_second_does_not(
    number: signal.Signals, error: type[BaseException]
) -> None:
    with terminable():
        outside = signal.getsignal(number)
        heard: list[object] = []

        def hear(times: int) -> None:
            with Stop() as stop:
                for _ in range(times):
                    signal.raise_signal(number)
                    heard.append(stop.asked)

        with pytest.raises(error):
            hear(2)
        assert heard == [number]  # and then at once
        with pytest.raises(error):
            hear(1)  # nobody asked: at the end
        assert heard == [number, number]
        assert signal.getsignal(number) == outside


def test_other_threads_hear_no_signals_and_an_ignored_one_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked is None
    signal.signal(signal.SIGINT, before)
    done: list[bool] = []

    def elsewhere() -> None:
        with terminable(), Stop():
            done.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done


HOLDER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("files", sys.argv[2])  # quicker than all of econv
files = sys.modules["files"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
with files.locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), files.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_in_a_folder_is_told_who_holds_it(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "tiny" / "0"
    folder.mkdir(parents=True)
    with holder(folder / "lock") as process:
        message = rf"tiny.0 is in use by process {process.pid} on .*, since 20.*another folder"
        for resume in (True, False):
            with pytest.raises(files.InUseError, match=message):
                start(tmp_path, resume=resume)
        process.kill()
        process.wait()
    assert [path.name for path in folder.iterdir()] == ["lock"]
    start(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_a_run_that_is_refused_leaves_neither_lock_nor_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="expected"):
        start(tmp_path, data=None)
    assert list(tmp_path.iterdir()) == []
    interrupt_at(monkeypatch, 6, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    assert not (tmp_path / "out" / "tiny" / "0" / "lock").exists()


@pytest.mark.parametrize(
    ("content", "who"),
    [
        (b"", "another process"),
        (b"[" * 5000, "another process"),
        (b'{"process": 1, "machine": "\\u001b[2J", "since": "x"}', r"process 1 on \?\[2J, since x"),
    ],
)
def test_what_a_lock_says_cannot_hurt(tmp_path: Path, content: bytes, who: str) -> None:
    path = tmp_path / "lock"
    with files.locked(path):
        path.write_bytes(content)
        with pytest.raises(files.InUseError, match=f"in use by {who}$"), files.locked(path):
            pass
    assert not path.exists()


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="link"), files.locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_those_who_wait_come_one_after_another(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def come(number: int) -> None:
        for _ in range(50):
            with files.locked(tmp_path / "lock", wait=True):
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    threads = [threading.Thread(target=come, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 200
    assert max(most) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import errno

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "_lock", none)
    start(tmp_path)
    assert "cannot be locked here" in capsys.readouterr().err


def test_leftovers_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = f".{ended.pid}.a", f".{os.getppid()}.a"
    for name in (dead, alive, f".{ended.pid}.b", ".hidden", ".7x.a"):
        (tmp_path / name).touch()
    files.write_atomically(tmp_path / "a", b"")  # too young to be given up
    assert (tmp_path / dead).exists()
    os.utime(tmp_path / dead, (0, 0))
    files.write_atomically(tmp_path / "a", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a", alive, f".{ended.pid}.b", ".hidden", ".7x.a"]
    )


def test_minutes_between_checkpoints_are_above_0(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected checkpoint_minutes above 0; got 0"):
        start(tmp_path, checkpoint_minutes=0)
    assert train.CheckpointError.__doc__
