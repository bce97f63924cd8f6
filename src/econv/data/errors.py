"""What is said about a file that is not what it should be."""

from __future__ import annotations

import tarfile
import zipfile
import zlib

BROKEN = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
)


class DataError(ValueError):
    """A file that is missing, truncated, corrupt or another one; says what to do about it."""


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
