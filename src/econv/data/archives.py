"""Files inside of files: what an archive holds, and checksums."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from econv.data.errors import DataError
from econv.data.sources import File


def again(path: Path) -> str:
    return f"Delete {path} and get it again"


def open_inside(path: Path, member: str) -> IO[bytes]:
    """The bytes of a member of a .zip, of a compressed file, or of the file itself."""
    if path.name == member:
        return path.open("rb")
    if path.suffix == ".zip":
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == member]
        return archive.open(_only(names, member))
    return io.BytesIO(gzip.decompress(path.read_bytes()))


def read_tar(path: Path, members: Sequence[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(path, "r:gz") as archive:
        for entry in archive:
            name = entry.name.rsplit("/", 1)[-1]
            stream = archive.extractfile(entry) if name in members else None
            if stream is not None:
                found[name] = stream.read()
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
