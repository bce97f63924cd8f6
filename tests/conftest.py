"""What every test starts from: one thread, the same random numbers and engines; small data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from small_data import Published

pytest.register_assert_rewrite("small_data")

# Engines by rule, here and in processes that tests start: what was faster is not the same twice.
os.environ["ECONV_MEASURE"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take minutes start before the others: at the end no process would be beside."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


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
