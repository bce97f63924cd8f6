"""A published data set as arrays, from wherever its files are."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from econv.data.archives import Bounded, again, check_md5, md5, open_inside, read_tar
from econv.data.download import fetched
from econv.data.errors import BROKEN, DataError, reason
from econv.data.formats import Arrays, Found, WrongMemberError
from econv.data.npz import KEYS, derived, read_npz
from econv.data.sources import SOURCES, File


def published(name: str, root: Path, place: Path | None, download: bool) -> Found:
    """The images as published, wherever they are, and what is known of them."""
    if place is not None and not place.exists():
        raise DataError(f"{place}: no such file or folder; expected {wanted(name)}")
    folder = root if place is None else place
    if folder.is_file():
        if folder.suffix == ".npz":
            return read_npz(folder, name)
        return official(name, root, folder, download=False)
    archive = folder / f"{name}.npz"
    if archive.is_file():
        return read_npz(archive, name)
    return official(name, root, folder, download and place is None)


def wanted(name: str) -> str:
    files = ", ".join(file.name for file in SOURCES[name].files)
    return f"a folder with {files} or {name}.npz, or an .npz with {', '.join(KEYS)}"


def instead(name: str) -> str:
    """What to take where the files of a data set cannot be had."""
    if f"{name}_recreated" not in SOURCES:
        return ""
    return (
        ". Or take the images that are made again from MNIST: --recreated on the command line, "
        "recreated=True in Python"
    )


def official(name: str, root: Path, place: Path, download: bool) -> Found:
    """Read the official files in (or at) ``place``, downloading into it what is missing."""
    source = SOURCES[name]
    where: dict[str, Path] = {}  # member → its archive, or the member itself
    missing = []
    unverified = False
    for file in source.files:
        if place.is_file():
            found = place if len(source.files) == 1 else None
        else:
            found = _find(place, source.subfolders, file.name)
        loose = {member: _find(place, source.subfolders, member) for member in file.members}
        if found is None and all(loose.values()):
            where.update({member: path for member, path in loose.items() if path})
            unverified |= not file.member_md5  # the archive's checksum says nothing of these
            continue
        if found is None and download:
            try:
                found = fetched(file, place)
            except DataError as error:
                raise DataError(f"{error}{instead(name)}") from error
        elif found is not None and not file.member_md5:
            check_md5(found, file)
        if found is None:
            missing.append(file)
        else:
            where.update(dict.fromkeys(file.members, found))
    if missing:
        raise DataError(
            f"{place}: expected {wanted(name)}; missing: {', '.join(f.name for f in missing)}. "
            f"Get what is missing from {' or '.join(missing[0].folders)}"
            f"{_pickled(place, missing)}{instead(name)}"
        )

    contents = {m: d for f in source.files for m, d in zip(f.members, f.member_md5, strict=False)}
    opened: dict[Path, dict[str, bytes]] = {}  # archives that can only be read from the start

    @contextlib.contextmanager
    def open_member(member: str) -> Iterator[IO[bytes]]:
        path = where[member]
        try:
            if path.name.endswith((".tar.gz", ".tgz")) and path not in opened:
                wanted = [m for m in where if where[m] == path]
                opened[path] = read_tar(path, wanted, source.largest)
            inside = opened.get(path)
            with Bounded(
                io.BytesIO(inside[member]) if inside else open_inside(path, member),
                source.largest,
                member,
            ) as stream:
                if member not in contents:
                    yield cast(IO[bytes], stream)
                    return
                data = stream.read()
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
            if digest != contents[member]:
                raise DataError(
                    f"{path}: expected {member} with MD5 {contents[member]}; got {digest} "
                    f"({len(data)} bytes): truncated, corrupt or another file. {again(path)}"
                )
            yield io.BytesIO(data)
        except (DataError, WrongMemberError):
            raise
        except BROKEN as error:
            raise DataError(
                f"{path}: cannot read {member} ({reason(error)}): truncated, corrupt or another "
                f"file. {again(path)}"
            ) from error

    def read() -> Arrays:
        try:
            arrays = source.read(open_member, source.members)
        except WrongMemberError as error:
            path = where[error.member]
            inside = "" if path.name == error.member else f" in {error.member}"
            raise DataError(f"{path}: {error}{inside}. {again(path)}") from None
        found = [len(arrays.train_x), len(arrays.test_x)]
        if found != [source.train, source.test]:
            raise DataError(
                f"{place}: expected {source.train} training and {source.test} test images of "
                f"{name}; got {found[0]} and {found[1]}: truncated or other files. Delete and get "
                f"again {', '.join(sorted({path.name for path in where.values()}))}"
            )
        return arrays

    if not source.keep:
        return Found(read(), recreated=False, unverified=unverified)
    paths = sorted(set(where.values()))
    arrays = derived(root, f"{name}-{'-'.join(md5(path)[:16] for path in paths)}", read)
    return Found(arrays, recreated=False, unverified=unverified)


def _find(place: Path, subfolders: Sequence[str], name: str) -> Path | None:
    for folder in ("", *subfolders):
        if (place / folder / name).is_file():
            return place / folder / name
    return None


def _pickled(place: Path, missing: Sequence[File]) -> str:
    for file in missing:
        other = file.name.replace("binary", "python")
        folders = {"cifar-10-python.tar.gz": "cifar-10-batches-py"}
        for found in (other, folders.get(other, other.removesuffix(".tar.gz"))):
            if found != file.name and (place / found).exists():
                return f" ({found} is there, but pickles can run any code and are not read)"
    return ""
