"""What every test starts from: one thread, the same random numbers and engines; small data sets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from small_data import Published

pytest.register_assert_rewrite("small_data")

# Engines by rule, here and in processes that tests start: what was faster is not the same twice.
os.environ["ECONV_MEASURE"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take minutes start before the others: at the end no process would be beside."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def wrong_skips(reasons: set[str], gate: str) -> list[str]:
    """Reasons that `skips.json` does not have, or that this target of make should leave nobody.

    A target of make sets ``ECONV_GATE`` to its name: what runs there is not skipped there, unless
    it needs what not every machine has.
    """
    known = json.loads(Path(__file__).with_name("skips.json").read_text(encoding="utf-8"))
    gates = {"test": ("test",), "test-all": ("test", "test-all")}.get(gate, (gate,))
    wrong = []
    for reason in sorted(reasons):
        entry = next((e for e in known if re.fullmatch(e["reason"], reason, re.DOTALL)), None)
        if entry is None:
            wrong.append(f"tests/skips.json has no such reason: {reason}")
        elif entry["runs"] in gates and "needs" not in entry:
            wrong.append(f"make {gate} runs these tests, and they were skipped: {reason}")
    return wrong


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run with a skip that nobody has accounted for fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    skipped = [report.longrepr for report in reporter.stats.get("skipped", ())]
    reasons = {told[2].removeprefix("Skipped: ") for told in skipped if isinstance(told, tuple)}
    wrong = wrong_skips(reasons, os.environ.get("ECONV_GATE", ""))
    if wrong:
        reporter.write_line("")
        for line in wrong:
            reporter.write_line(line, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    # A level of forward mode that is left open makes graphs that are compiled later run densely.
    level, forward_ad._current_level = forward_ad._current_level, -1
    assert level == -1, "expected no level of forward-mode differentiation to be left open"


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``"auto"`` measures and has not decided anything yet; where it keeps its choices."""
    from econv.engines import choice
    from econv.engines.spectral import operator

    folder = tmp_path / "measured"
    monkeypatch.delenv("ECONV_MEASURE")
    monkeypatch.setenv("ECONV_CACHE", str(folder))
    monkeypatch.setattr(operator, "FAILED", {})
    for known in ("_memory", "_decided", "_times"):
        monkeypatch.setattr(choice, known, {})
    monkeypatch.setattr(choice, "_silent", [])
    return folder / "choices"


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Published]:
    """Publishes a small data set by its name; what is loaded is kept in a folder of the test."""
    from small_data import Published

    monkeypatch.setenv("ECONV_DATA", str(tmp_path / "cache"))
    return lambda name: Published(name, tmp_path / f"published_{name}", monkeypatch)
