"""Progress: rates from what is settled, few words, and a terminal that is left as it was."""

import contextlib
import re
import types

import pytest

from econv import progress
from econv.progress import Progress
from terminals import use_terminal


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def rate(number: float) -> str:
    return f"{number:g} stones/s"


def test_the_rate_is_that_of_what_is_settled(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("wall", 100, rate) as bar:
        clock.now += 20
        bar.advance(10, "first row")
        assert capsys.readouterr().err == "wall: first row, 0.5 stones/s, 0:03:00 left\n"
        clock.now += 30
        bar.advance(15, "on the way", settled=False)
        assert capsys.readouterr().err == "wall: on the way, 0.5 stones/s, 0:02:30 left\n"
        clock.now += 10
        bar.advance(0, "second row")  # 25 stones in 60 seconds
        assert capsys.readouterr().err == f"wall: second row, {25 / 60:g} stones/s, 0:03:00 left\n"


def test_what_was_done_before_and_other_work_do_not_count(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = Progress("wall", 100, rate)
    clock.now += 1000
    with bar:
        bar.skip(50)
        clock.now += 500
        bar.restart()
        clock.now += 10
        bar.advance(20, "row")
    assert capsys.readouterr().err == "wall: row, 2 stones/s, 0:00:15 left\n"


def test_nothing_is_estimated_from_nothing(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("wall", 100, rate) as bar:
        clock.now += 20
        bar.advance(10, "on the way", settled=False)
        assert capsys.readouterr().err == "wall: on the way\n"
    with Progress("wall", None, rate) as bar:
        clock.now += 20
        bar.advance(10, "row")
    assert capsys.readouterr().err == "wall: row, 0.5 stones/s\n"


def test_lines_come_now_and_then_and_the_last_state_always(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("wall", 1000, rate) as bar:
        for number in range(35):
            clock.now += 1
            bar.advance(1, f"stone {number + 1}")
        told = capsys.readouterr().err
        assert re.findall(r"stone \d+", told) == ["stone 10", "stone 20", "stone 30"]
        bar.say("dinner")
        assert re.findall(r"stone \d+|dinner", capsys.readouterr().err) == ["stone 35", "dinner"]
    assert capsys.readouterr().err == ""
    with contextlib.suppress(KeyboardInterrupt), Progress("wall", 10, rate) as bar:
        bar.advance(3, "stone 3")
        raise KeyboardInterrupt
    assert capsys.readouterr().err.startswith("wall: stone 3")


def test_silence_is_kept(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("wall", 10, rate, enabled=False) as bar:
        clock.now += 100
        bar.advance(5, "row")
        bar.say("dinner")
    told = capsys.readouterr()
    assert told.out == told.err == ""


def test_a_terminal_shows_a_bar_and_gets_its_cursor_back(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = use_terminal(monkeypatch)
    with contextlib.suppress(KeyboardInterrupt), Progress("wall [1]", 10, rate) as bar:
        clock.now += 5
        bar.advance(5, "row [2]")
        bar.say("dinner [3]")
        raise KeyboardInterrupt
    assert "wall [1] ━━━━━━━━━━" in terminal.shown()
    assert "1 stones/s, 0:00:05 left" in terminal.shown()
    assert "\nrow [2]" in terminal.shown()
    assert "dinner [3]\n" in terminal.shown()
    written = terminal.getvalue()
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    assert written.index("\x1b[?25l") < written.index("\x1b[?25h")


def test_what_is_printed_to_a_file_meanwhile_goes_there(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = use_terminal(monkeypatch)
    with Progress("wall", 10, rate) as bar:
        clock.now += 5
        bar.advance(5, "row")
        print("result")
    assert capsys.readouterr().out == "result\n"
    assert "result" not in terminal.shown()


def test_a_long_detail_stays_on_one_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with Progress("wall", 10, rate) as bar:
        clock.now += 5
        bar.advance(5, "long " * 50)
    assert max(map(len, terminal.shown().splitlines())) <= 100
    assert "…" in terminal.shown()


def test_a_bar_is_not_drawn_more_often_than_it_is_seen(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = use_terminal(monkeypatch)
    with Progress("wall", 1000, rate) as bar:
        for number in range(1000):
            clock.now += 0.01
            bar.advance(1, f"stone {number + 1}")
    assert 40 <= terminal.shown().count("stone ") <= 60


@pytest.mark.parametrize("missing", ["rich", "a terminal that can"])
def test_without_a_bar_there_are_lines(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    terminal = use_terminal(monkeypatch)
    if missing == "rich":
        nowhere = types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda name: None))
        monkeypatch.setattr(progress, "importlib", nowhere)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with Progress("wall", 10, rate) as bar:
        clock.now += 5
        bar.advance(5, "row")
    assert terminal.getvalue() == "wall: row, 1 stones/s, 0:00:05 left\n"
