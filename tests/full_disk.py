"""A disk that is full when the file of a name is written: half of it gets there."""

import errno
import os
from pathlib import Path

import pytest


class Full:
    """A stream whose writes fail half-way, as on a full disk: no error names the file."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, content):
        self.stream.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(patch: pytest.MonkeyPatch, name: str, folder: Path, time: int = 1) -> dict:
    """From its ``time``-th opening on the file cannot be written; what lay in the folder then."""
    original, before, opened = Path.open, {}, []

    def full(self, mode="r", *rest, **options):
        stream = original(self, mode, *rest, **options)
        if (not self.name.endswith(f".{name}") and self.name != f"{name}.part") or "r" in mode:
            return stream
        opened.append(mode)
        if len(opened) < time:
            return stream
        if len(opened) == time:
            before.update(contents(folder))
        return Full(stream)

    patch.setattr(Path, "open", full)
    return before


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but locks and what is being written."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and "lock" not in path.name
    }
