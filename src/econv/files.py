"""Files that are whole or not there: written beside, then moved into place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic"]


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the place of the wanted file once all went well."""
    wanted = Path(path)
    temporary = wanted.with_name(f".{os.getpid()}.{wanted.name}")
    try:
        yield temporary
        os.replace(temporary, wanted)
    finally:
        temporary.unlink(missing_ok=True)
