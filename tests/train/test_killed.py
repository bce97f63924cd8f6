"""Signals at random moments: what was going on ends as Unix has it, and goes on to the same result.

Processes are forked: they import nothing again.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from econv import data, demo, records
from econv.cli import main
from econv.recipes import RECIPES
from econv.train import runs
from test_demo import made_small
from test_download import Resuming, handler, serve
from tiny_training import TINY, changed, outcome, stripes

__all__ = ["serve"]  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="no fork on this system"),
]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOMENTS = 50


def status_of(work: Callable[[], int], seconds: float, number: int) -> int:
    """How a process ends that works and gets a signal after some seconds; it may be done before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            code = work()
        except KeyboardInterrupt:  # before or after the command's own work
            code = 128 + signal.SIGINT
        finally:
            os._exit(code)
    time.sleep(seconds)
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Moments:
    """Number, seconds and signal of each trial; a little of them after the end.

    A machine may be faster than it was when ``longest`` was measured: what came too late shortens
    the trials to come.
    """

    def __init__(self, longest: float) -> None:
        self.longest, self.in_time = longest, 0

    def __iter__(self) -> Iterator[tuple[int, float, int]]:
        draw = random.Random(0)
        for trial in range(MOMENTS):
            seconds = draw.uniform(0, 1.1 * self.longest)
            before = self.in_time
            yield trial, seconds, SIGNALS[trial % len(SIGNALS)]
            if self.in_time == before:
                self.longest = min(self.longest, seconds)

    def check(self, found: int, number: int) -> None:
        """Whether the signal came in time is counted; it is told as shells do."""
        # Before the command hears SIGTERM it ends the process, as it does any other.
        assert found in (0, 128 + number, -number), found
        assert number != signal.SIGINT or found != -number
        self.in_time += found != 0


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    assert work() == 0
    return time.perf_counter() - begun


def test_a_training_ends_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "tiny", changed(epochs=8, retrain_on_all=True))
    monkeypatch.setattr(runs, "load", lambda name, **_: stripes())

    def train(folder: Path) -> int:
        places = ("--output", str(folder / "out"), "--records", str(folder / "records"))
        return main(["train", TINY.name, "--device", "cpu", "--quiet", *places])

    def left(folder: Path) -> tuple[object, bytes]:
        record = records.load(folder / "records" / "tiny" / "0.json")
        return outcome(record), (folder / "out" / "tiny" / "0" / "model.safetensors").read_bytes()

    assert train(tmp_path / "whole") == 0
    moments = Moments(seconds_of(lambda: train(tmp_path / "again")))
    for trial, seconds, number in moments:
        folder = tmp_path / str(trial)
        moments.check(status_of(partial(train, folder), seconds, number), number)
        assert train(folder) == 0
        assert left(folder) == left(tmp_path / "whole")
        assert [p.name for p in (folder / "out" / "tiny" / "0").iterdir()] == ["model.safetensors"]
    assert moments.in_time > MOMENTS // 2


def test_a_demo_ends_in_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_small(monkeypatch)

    def show(folder: Path) -> int:
        return main(["demo", "--output", str(folder), "--quiet"])

    def left(folder: Path) -> dict[str, object]:
        found = {r.recipe: outcome(r) for r in records.load_all(folder / "records")}
        return {**found, "files": sorted(p.name for p in folder.iterdir())}

    assert show(tmp_path / "whole") == 0  # imports and fonts: the processes below have them
    moments = Moments(seconds_of(lambda: show(tmp_path / "again")))
    assert set(demo.NAMES) < set(left(tmp_path / "whole"))
    for trial, seconds, number in moments:
        folder = tmp_path / str(trial)
        moments.check(status_of(partial(show, folder), seconds, number), number)
        assert show(folder) == 0
        assert left(folder) == left(tmp_path / "whole")
    assert moments.in_time > MOMENTS // 2


class Slow(Resuming):
    """Takes a tenth of a second for every file."""

    def setup(self) -> None:
        super().setup()
        self.wfile = self

    def write(self, content: bytes) -> int:
        piece = max(1, len(content) // 20)
        for start in range(0, len(content), piece):
            self.connection.sendall(content[start : start + piece])
            time.sleep(0.005)
        return len(content)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    closed = False


def test_a_download_is_whole_in_the_end(
    publish, serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish("cifar10")
    published.at(serve(published.folder, handler(Slow)))

    def load() -> int:
        published.check(data.load("cifar10"))
        return 0

    monkeypatch.setenv("ECONV_DATA", str(tmp_path / "whole"))
    moments = Moments(seconds_of(load))
    for trial, seconds, number in moments:
        monkeypatch.setenv("ECONV_DATA", str(tmp_path / str(trial)))
        moments.check(status_of(load, seconds, number), number)
        load()
        kept = [path.name for path in (tmp_path / str(trial)).rglob("*") if path.is_file()]
        assert sorted(kept) == sorted(
            path.name for path in (tmp_path / "whole").rglob("*") if path.is_file()
        )
    assert moments.in_time > MOMENTS // 2
