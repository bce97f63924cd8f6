"""Files inside of files: what an archive holds, and checksums."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from econv.arrays import bounded
from econv.data.errors import DataError
from econv.data.sources import File


def again(path: Path) -> str:
    return f"Delete {path} and get it again"


class Bounded(io.RawIOBase):
    """A stream that ends with an error where it has more bytes than it can have."""

    def __init__(self, stream: IO[bytes], most: int, member: str) -> None:
        self._stream, self._left, self._most, self._member = stream, most, most, member

    def read(self, size: int | None = -1) -> bytes:
        wanted = self._left + 1 if size is None or size < 0 else min(size, self._left + 1)
        found = self._stream.read(wanted)
        self._left -= len(found)
        if self._left < 0:
            raise ValueError(f"expected {self._member} of at most {self._most} bytes; got more")
        return found

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_inside(path: Path, member: str) -> IO[bytes]:
    """The bytes of a member of a .zip, of a compressed file, or of the file itself."""
    if path.name == member:
        return path.open("rb")
    if path.suffix == ".zip":
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == member]
        return archive.open(_only(names, member))
    return cast(IO[bytes], gzip.open(path))


def read_tar(path: Path, members: Sequence[str], most: int) -> dict[str, bytes]:
    """The content of files, each of at most so many bytes; nothing is unpacked to anywhere."""
    found: dict[str, bytes] = {}
    with tarfile.open(path, "r:gz") as archive:
        for entry in archive:
            name = entry.name.rsplit("/", 1)[-1]
            # Links and devices are no files, and what comes twice may be either.
            stream = archive.extractfile(entry) if name in members and entry.isreg() else None
            if stream is not None:
                if name in found:
                    raise KeyError(f"expected one {name} in the archive; got more")
                found[name] = bounded(stream, most, name)
    for member in members:
        _only([name for name in found if name == member], member)
    return found


def _only(names: Sequence[str], member: str) -> str:
    if len(names) != 1:
        raise KeyError(f"expected one {member} in the archive; got {len(names)}")
    return names[0]


def md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_md5(path: Path, file: File) -> None:
    digest = md5(path)
    if digest != file.md5:
        raise DataError(
            f"{path}: expected {file.name} with MD5 {file.md5}; got {digest} "
            f"({path.stat().st_size} bytes): truncated, corrupt or another file. {again(path)}"
        )
