"""Records that grow while they are made, and say by which code, on what."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from econv.files import processor_model, write_atomically
from econv.records import revision, source_hash


def stamp() -> dict[str, str]:
    """Which code found a result, on which processor, and when: every result says so."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {**_code(), "finished": when}


def origin(device: str) -> dict[str, Any]:
    """The machine and the code."""
    cuda = device == "cuda"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "kind": device,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton,
        "python": sys.version.split()[0],
        **_code(),
    }


def _code() -> dict[str, str]:
    return {
        "machine": processor_model(),
        "revision": revision(),
        "source_sha256": source_hash(),
    }


class Growing:
    """A record in a file, written anew with every row.

    What the file already holds is continued if it has the same head: rows that are measured again
    are replaced.
    """

    def __init__(
        self, path: Path | None, head: dict[str, Any], rows: str, key: Callable[[Any], Any]
    ) -> None:
        self.path, self.head, self.name, self.key = path, head, rows, key
        self.rows: list[dict[str, Any]] = []
        if path and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if all(before.get(name) == value for name, value in head.items()):
                self.rows = before[rows]

    def keep(self, row: dict[str, Any], **more: Any) -> None:
        """Add a row, or replace the one with its key."""
        key = self.key(row)
        at = next((n for n, other in enumerate(self.rows) if self.key(other) == key), None)
        if at is None:
            self.rows.append(row)
        else:
            self.rows[at] = row
        self.write(**more)

    def write(self, **more: Any) -> None:
        """One line for each row."""
        if self.path:
            finished = stamp()["finished"]
            head = {**self.head, "finished": finished, "load": os.getloadavg(), **more}
            about = json.dumps(head)
            rows = ",\n".join(json.dumps(row) for row in self.rows)
            text = f'{about[:-1]}, "{self.name}": [\n{rows}\n]}}\n'
            write_atomically(self.path, text.encode())


def joined(path: Path, parts: Iterable[Path], rows: str, key: Callable[[Any], Any]) -> Growing:
    """One record of several that differ in their rows alone: those of runs side by side.

    Other lists than the rows, such as what was tried before, are put together as well.
    """
    records = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    passing = ("finished", "load")
    heads = [
        {k: v for k, v in one.items() if k not in passing and not _of_rows(v)} for one in records
    ]
    for other in heads[1:]:
        differs = [name for name in heads[0] if other.get(name) != heads[0][name]]
        if differs:
            raise ValueError(f"expected records with the same {', '.join(differs)}")
    more: dict[str, list[Any]] = {}
    for one in records:
        for name, value in one.items():
            if name != rows and _of_rows(value):
                more.setdefault(name, []).extend(v for v in value if v not in more.get(name, []))
    found = Growing(None, heads[0], rows, key)
    for row in sorted((row for one in records for row in one[rows]), key=key):
        found.keep(row)
    found.path = path
    found.write(**more)
    return found


def _of_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
