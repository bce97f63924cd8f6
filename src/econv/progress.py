"""How far it is: a bar on a terminal, a line now and then elsewhere; both on stderr."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

__all__ = ["Progress"]

_REDRAWN = 0.2  # seconds from one look of the bar to the next
_SAID = 10.0  # and from one line to the next


class Progress:
    """Work that is counted, with its rate and the time that is left.

    `rich` draws the bar, where it is installed and the terminal can show one. What is told more
    often than anybody reads is left out, so that a word costs next to nothing.

    Args:
        label: what is done.
        total: how much of it there is; None if nobody knows.
        rate: a number per second in words.
        enabled: whether to say anything.
        last: whether lines, where no bar can be shown, end with the last state: without it, what
            took no time leaves none.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        rate: Callable[[float], str],
        enabled: bool = True,
        last: bool = True,
    ) -> None:
        self._label, self._total, self._rate, self._enabled = label, total, rate, enabled
        self._last = last
        self._done = 0
        self._settled = 0  # of what was done here, how much took the time that was spent
        self._skipped = 0
        self._spent = 0.0
        self._since = self._told = time.monotonic()
        self._detail = ""
        self._news = False
        self._bar = _bar() if enabled else None
        if self._bar is not None:
            self._task = self._bar.add_task(label, total=total, estimates="", detail="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        if self._news and (self._last or self._bar is not None):
            self._tell()
        if self._bar is not None:
            self._bar.stop()

    def restart(self) -> None:
        """The time until now was not spent on what is counted."""
        self._since = time.monotonic()

    def skip(self, count: int) -> None:
        """So much was done before: it counts, but says nothing about the rate."""
        self._done += count
        self._skipped += count

    def advance(self, count: int, detail: str, settled: bool = True) -> None:
        """So much more is done. Not settled: it is only on its way, and its time not known yet."""
        self._done += count
        self._detail = detail
        self._news = True
        now = time.monotonic()
        if settled:
            self._spent += now - self._since
            self._since = now
            self._settled = self._done - self._skipped
        wait = _SAID if self._bar is None else _REDRAWN
        if now - self._told >= wait:
            self._told = now
            self._tell()

    def say(self, text: str) -> None:
        """A line that stays, after the last state."""
        if self._news:
            self._tell()
        self._print(text)

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            print(text, file=sys.stderr, flush=True)

    def _tell(self) -> None:
        self._news = False
        if self._bar is not None:
            estimates = ", ".join(self._estimates())
            self._bar.update(
                self._task, completed=self._done, estimates=estimates, detail=self._detail
            )
            self._bar.refresh()
        else:
            self._print(f"{self._label}: {', '.join([self._detail, *self._estimates()])}")

    def _estimates(self) -> list[str]:
        if not self._settled or not self._spent:
            return []
        rate = self._settled / self._spent
        if self._total is None:
            return [self._rate(rate)]
        left = timedelta(seconds=round(max(self._total - self._done, 0) / rate))
        return [self._rate(rate), f"{left} left"]


def _bar() -> Any:
    """Rich's, without a thread of its own; None where it is not there or cannot be seen."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich import progress
    from rich.console import Console, RenderableType
    from rich.text import Text

    class Bar(progress.Progress):
        """The detail in a line of its own, which is cut off where the terminal ends."""

        def get_renderables(self) -> Iterator[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            for task in self.tasks:
                yield Text(task.fields["detail"], no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True)
    if console.is_dumb_terminal:
        return None
    return Bar(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=20),
        progress.TextColumn("{task.fields[estimates]}", markup=False),
        console=console,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays what it is
    )
