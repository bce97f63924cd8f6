"""NumPy's files from strangers: sizes are known before anything is allocated, no pickle runs."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

__all__ = ["MOST", "Head", "Npz", "bounded", "open_npz", "read_npy"]

MOST = 4 << 30
"""Bytes of an array of which nothing else is known."""

_HEAD = 1 << 14  # bytes: NumPy writes fewer than 200, and refuses more than 10,000


@dataclass(frozen=True)
class Head:
    """What a file says of its array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def bounded(stream: IO[bytes], most: int, what: str) -> bytes:
    """All of a stream, or `ValueError` if that is more than so many bytes.

    Raises:
        ValueError: for a stream with more bytes than that.

    >>> bounded(io.BytesIO(b"abc"), 2, "letters")
    Traceback (most recent call last):
    ValueError: expected letters of at most 2 bytes; got more
    """
    found = stream.read(most + 1)
    if len(found) > most:
        raise ValueError(f"expected {what} of at most {most} bytes; got more")
    return found


class Npz:
    """The arrays of an ``.npz``, read one by one."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self.names = [name.removesuffix(".npy") for name in archive.namelist()]

    def head(self, name: str) -> Head:
        """What the file says of an array; none of it is read."""
        with self._open(name) as stream:
            head = _head(stream.read(_HEAD))
        if head.nbytes + head.start != self._info(name).file_size:
            raise ValueError(
                f"{name} says that it has {head.nbytes} bytes; there are "
                f"{self._info(name).file_size - head.start}"
            )
        return head

    def read(self, name: str, most: int = MOST) -> npt.NDArray[Any]:
        """An array of at most so many bytes."""
        head = self.head(name)
        if head.nbytes > most:
            raise ValueError(f"expected {name} of at most {most} bytes; got {head.nbytes}")
        with self._open(name) as stream:
            return _array(head, bounded(stream, head.start + head.nbytes, name))

    def _info(self, name: str) -> zipfile.ZipInfo:
        return self._archive.getinfo(f"{name}.npy")

    def _open(self, name: str) -> IO[bytes]:
        info = self._info(name)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"expected {name} deflated or as it is")  # as NumPy writes
        return self._archive.open(info)


@contextmanager
def open_npz(path: Path) -> Iterator[Npz]:
    """The arrays of a file by name."""
    with zipfile.ZipFile(path) as archive:
        yield Npz(archive)


def read_npy(path: Path) -> npt.NDArray[Any]:
    """The array of a file, which is no larger than the file.

    Raises:
        ValueError: for a file that is no plain array, or is cut off.
    """
    with path.open("rb") as stream:
        head = _head(stream.read(_HEAD))
        size = path.stat().st_size
        if head.nbytes + head.start != size:
            raise ValueError(f"expected {head.start + head.nbytes} bytes, as it says; got {size}")
        stream.seek(0)
        return _array(head, stream.read(size))


def _head(begin: bytes) -> Head:
    stream = io.BytesIO(begin)
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    if dtype.hasobject:
        raise ValueError("objects are pickled, and pickles can run any code")
    if min(shape, default=0) < 0:
        raise ValueError(f"expected a shape of at least 0; got {shape}")
    return Head(dtype, shape, fortran, stream.tell())


def _array(head: Head, content: bytes) -> npt.NDArray[Any]:
    if len(content) != head.start + head.nbytes:
        raise ValueError(f"expected {head.nbytes} bytes; got {len(content) - head.start}")
    flat = np.frombuffer(bytearray(content), head.dtype, offset=head.start)
    return flat.reshape(head.shape, order="F" if head.fortran else "C")
