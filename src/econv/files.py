"""Files that are whole or not there: written beside, brought to the disk, moved into place."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import IO

__all__ = [
    "InUseError",
    "atomic",
    "cache_folder",
    "check_folder",
    "locked",
    "printable",
    "processor",
    "processor_model",
    "processor_name",
    "remove_leftovers",
    "write_atomically",
]

_ABANDONED = 60.0  # seconds after which nobody writes to a dead process's file any more
_LOCK_BYTE = 1 << 30  # far behind the text: Windows lets nobody read a byte that is locked


class InUseError(OSError):
    """Another process holds what is wanted; the message says which one."""


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the place of the wanted file once all went well."""
    wanted = Path(path)
    temporary = wanted.with_name(f".{os.getpid()}.{wanted.name}")
    remove_leftovers(wanted.parent, wanted.name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, wanted)
        _keep_name(wanted.parent)
    except OSError as error:
        if error.errno and error.filename in (None, str(temporary)):  # a full disk names none
            error.filename = str(wanted)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Put the bytes in place in one move, in a folder that is made if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def remove_leftovers(folder: Path, name: str | None = None, least_age: float = _ABANDONED) -> None:
    """Remove what killed processes left in a folder: files that were to become others, or one.

    A process of another machine looks dead from here, and is not where its file has just grown.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            found = re.fullmatch(r"\.(\d{1,10})\.(.+)", path.name)
            if found is None or name not in (None, found[2]) or _alive(int(found[1])):
                continue
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime >= least_age:
                    path.unlink()


def _alive(process: int) -> bool:
    if os.name != "posix":  # where a signal of 0 would end it
        return process == os.getpid()
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


@contextmanager
def locked(path: str | Path, wait: bool = False) -> Iterator[bool]:
    """One process at a time; the file is there as long as it is held, and says by whom.

    The system lets go with the process, however that ends: what a killed one left is taken over.
    Yields whether it could be locked, which some network file systems cannot do.

    Args:
        path: of the file, in a folder that is there.
        wait: for the one that holds it; otherwise :class:`InUseError` says who that is.

    Raises:
        InUseError: an ``OSError``, where another process holds it.
    """
    wanted, owner = Path(path), os.getpid()
    stream = _opened(wanted)
    try:
        held = _hold(stream, wanted, wait)
        while held and not _is_file(stream, wanted):  # the one before removed it meanwhile
            stream.close()
            stream = _opened(wanted)
            held = _hold(stream, wanted, wait)
        if held:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            told = {"process": owner, "machine": platform.node(), "since": now}
            stream.truncate(0)
            stream.write(json.dumps(told).encode())
        try:
            yield held
        finally:
            # Still locked, so that nobody takes the file that is about to go.
            if owner == os.getpid() and held and _is_file(stream, wanted):
                if os.name != "posix":
                    stream.close()
                with suppress(OSError):
                    wanted.unlink()
    finally:
        stream.close()


def _opened(path: Path) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return open(os.open(path, flags, 0o666), "r+b", buffering=0)


def _is_file(stream: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(path))
    except OSError:
        return False


def _hold(stream: IO[bytes], path: Path, wait: bool) -> bool:
    """Lock an open file; False where the file system has no locks."""
    while True:
        try:
            _lock(stream.fileno(), wait)
            return True
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
                return False
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise
            if not wait:
                raise InUseError(f"{path.parent} is in use by {_holder(stream)}") from None


def _lock(handle: int, wait: bool) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, _LOCK_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _holder(stream: IO[bytes]) -> str:
    """Who holds a lock, as its file says."""
    stream.seek(0)
    try:
        told = json.loads(stream.read(1000))
        words = (told["process"], told["machine"], told["since"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return "another process"
    return printable("process {} on {}, since {}".format(*words))


def printable(text: str) -> str:
    r"""A text of strangers in one line, without what would steer a terminal.

    >>> printable("a GPU\x1b[2J\n")
    'a GPU?[2J?'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def check_folder(path: str | Path) -> None:
    """Raise `OSError`, naming the folder, if no file could be written to it or made for it.

    Nothing is left behind: a folder that is not there is not made, its nearest parent is tried.

    Raises:
        OSError: for a folder that cannot be written to.
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


def processor_model() -> str:
    """What the maker calls it, or at least its kind."""
    found = re.search(r"^model name\s*: (.+)", processor(), re.MULTILINE)
    return found[1] if found else platform.machine()


def processor_name() -> str:
    """The same in short, for the name of a file: the model, and a checksum of the rest."""
    return f"{processor_model()}-{hashlib.sha256(processor().encode()).hexdigest()[:8]}"
