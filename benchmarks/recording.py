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

from econv.files import write_atomically
from econv.records import revision, source_hash


def stamp() -> dict[str, str]:
    """Which code found a result, and when: every result says so."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"revision": revision(), "source_sha256": source_hash(), "finished": when}


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

    def take(self, paths: Iterable[Path]) -> None:
        """Add the rows of other records with the same head."""
        for path in paths:
            other = json.loads(path.read_text(encoding="utf-8"))
            differs = [name for name, value in self.head.items() if other.get(name) != value]
            if differs:
                raise ValueError(f"{path}: expected the same {', '.join(differs)}")
            for row in other[self.name]:
                self.keep(row)

    def write(self, **more: Any) -> None:
        """One line for each row."""
        if self.path:
            finished = stamp()["finished"]
            head = {**self.head, "finished": finished, "load": os.getloadavg(), **more}
            about = json.dumps(head)
            rows = ",\n".join(json.dumps(row) for row in self.rows)
            text = f'{about[:-1]}, "{self.name}": [\n{rows}\n]}}\n'
            write_atomically(self.path, text.encode())
