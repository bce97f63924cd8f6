"""Files that are whole or not there: written beside, brought to the disk, moved into place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic", "write_atomically"]


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the place of the wanted file once all went well."""
    wanted = Path(path)
    temporary = wanted.with_name(f".{os.getpid()}.{wanted.name}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, wanted)
        _keep_name(wanted.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Put the bytes in place in one move, in a folder that is made if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def _keep_name(folder: Path) -> None:
    """Bring the folder's own entries to the disk: the new name must survive a loss of power."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
