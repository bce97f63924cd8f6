"""A terminal of 100 columns in the place of stderr, and what it shows."""

import io
import re
import sys

import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        """All that was ever written, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """To be called in the test itself: pytest takes stderr back after the fixtures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal
