"""What ends a run from outside: Ctrl-C and SIGTERM, heard where nothing is lost by it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated` in a block, so that it tidies up; in the main thread."""

    def stop(number: int, frame: Any) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # only the main thread may
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(reason: KeyboardInterrupt) -> int:
    """Of a command that was stopped, as shells give it: 128 and the signal's number.

    >>> exit_code(KeyboardInterrupt()), exit_code(Terminated())
    (130, 143)
    """
    return 128 + (signal.SIGTERM if isinstance(reason, Terminated) else signal.SIGINT)


class Stop:
    """Notes a signal in a block instead of letting it break in; a second one does.

    >>> with Stop() as stop:
    ...     stop.asked is None
    True
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before in (signal.SIG_IGN, None):
                continue  # as in a shell's background
            try:
                signal.signal(number, self._note)
            except ValueError:  # only the main thread hears signals
                continue
            self._before[number] = before
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._restore()
        if kind is None and self.asked is not None:
            self.obey(self.asked)

    def obey(self, number: signal.Signals) -> None:
        """Do what the signal does where nobody delays it."""
        self._restore()
        self.asked = None
        signal.raise_signal(number)

    def _note(self, number: int, frame: Any) -> None:
        if self.asked is not None:
            self._restore()
            signal.raise_signal(number)
        self.asked = signal.Signals(number)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
