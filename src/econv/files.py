"""Files that are whole or not there: written beside, brought to the disk, moved into place."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

__all__ = [
    "atomic",
    "cache_folder",
    "check_folder",
    "processor",
    "processor_name",
    "write_atomically",
]


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


def check_folder(path: str | Path) -> None:
    """Raise `OSError`, naming the folder, if no file could be written to it or made for it.

    Nothing is left behind: a folder that is not there is not made, its nearest parent is tried.
    """
    wanted = Path(path)
    try:
        there = wanted.absolute()
        while not os.path.lexists(there) and there != there.parent:
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OSError(f"expected a folder that can be written to; got {wanted}: {reason}") from None


def _keep_name(folder: Path) -> None:
    """Bring the folder's own entries to the disk: the new name must survive a loss of power."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def cache_folder() -> Path:
    """Where compiled kernels are kept, and what was measured."""
    if given := os.environ.get("ECONV_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "econv"


@cache
def processor() -> str:
    """All that tells this kind of processor from others."""
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.startswith(wanted)]
        return "\n".join(sorted(set(lines)))
    return platform.processor()


def processor_name() -> str:
    """The same in short, for the name of a file: the model, and a checksum of the rest."""
    found = re.search(r"^model name\s*: (.+)", processor(), re.MULTILINE)
    model = found[1] if found else platform.machine()
    return f"{model}-{hashlib.sha256(processor().encode()).hexdigest()[:8]}"
