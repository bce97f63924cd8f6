"""Arrays in ``.npz`` files: those that users name, and those that were derived once."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from econv.data.errors import BROKEN, DataError, reason
from econv.data.formats import Array, Arrays, Found, as_idx, read_idx
from econv.data.sources import SOURCES, Source
from econv.files import atomic

KEYS = ("train_x", "train_y", "test_x", "test_y")


def read_npz(path: Path, name: str) -> Found:
    """The arrays of a file, checked, and what they are.

    Official ones are recognised by checksums where they are known. Re-created ones are by theirs,
    by the key ``recreated`` that every re-creation of ours carries, or by the file's name. Nothing
    vouches for any others.
    """
    source = SOURCES[name]
    try:
        with open_npz(path) as archive:
            missing = [key for key in KEYS if key not in archive]
            found = {key: archive[key] for key in KEYS if key in archive}
            says = archive.get("recreated", np.False_)
    except BROKEN as error:
        raise DataError(
            f"{path}: cannot be read as an .npz of plain arrays ({reason(error)}); it is "
            "truncated, corrupt or another kind of file: copy or make it again"
        ) from error
    if missing:
        raise DataError(
            f"{path}: expected the arrays {', '.join(KEYS)}; {', '.join(missing)} missing"
        )
    arrays = Arrays(
        _images(path, "train_x", found["train_x"], source.train, source.shape),
        _labels(path, "train_y", found["train_y"], source.train, source.classes),
        _images(path, "test_x", found["test_x"], source.test, source.shape),
        _labels(path, "test_y", found["test_y"], source.test, source.classes),
    )
    if says.dtype != np.bool_ or says.shape != ():
        raise DataError(
            f"{path}: expected recreated as one truth value; got {says.dtype} {list(says.shape)}"
        )
    if _official(arrays, source):
        return Found(arrays, recreated=False, unverified=False)
    if says or (source.recreations and content_hash(arrays) in source.recreations):
        return Found(arrays, recreated=True, unverified=False)
    return Found(arrays, recreated="recreated" in path.name.lower(), unverified=True)


def content_hash(arrays: Arrays) -> str:
    """SHA-256 over images and classes as bytes."""
    found = hashlib.sha256()
    for key in KEYS:
        found.update(getattr(arrays, key).astype(np.uint8).tobytes())
    return found.hexdigest()


def _official(arrays: Arrays, source: Source) -> bool:
    """Whether written as the published files they have those files' checksums."""
    known = [digest for file in source.files for digest in file.member_md5]
    if not known or source.read is not read_idx:
        return False
    written = (arrays.train_x[:, 0], arrays.train_y, arrays.test_x[:, 0], arrays.test_y)
    digests = [hashlib.md5(as_idx(a), usedforsecurity=False).hexdigest() for a in written]
    return digests == known


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[Mapping[str, Array]]:
    """Arrays by name, without unpickling anything."""
    with path.open("rb") as stream:
        archive = np.load(stream, allow_pickle=False)
        if not isinstance(archive, Mapping):
            raise ValueError("one array and no names")
        yield archive


def _images(path: Path, key: str, x: Array, count: int, shape: tuple[int, int, int]) -> Array:
    channels, height, width = shape
    if x.ndim == 3:
        x = x[..., None]
    if x.dtype != np.uint8 or x.shape != (count, height, width, channels):
        raise DataError(
            f"{path}: expected {key} as uint8 [{count}, {height}, {width}, {channels}]; got "
            f"{x.dtype} {list(x.shape)}: this is another data set, or a part of it"
        )
    return _first(x)


def _first(x: Array) -> Array:
    """Channels first."""
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _labels(path: Path, key: str, y: Array, count: int, classes: int) -> Array:
    if not np.issubdtype(y.dtype, np.integer) or y.shape != (count,):
        raise DataError(
            f"{path}: expected {key} as integers [{count}]; got {y.dtype} {list(y.shape)}"
        )
    present = np.unique(y)
    if not np.array_equal(present, np.arange(classes)):
        raise DataError(
            f"{path}: expected every class from 0 to {classes - 1} in {key}; got {len(present)} "
            f"classes from {present[0]} to {present[-1]}: this is another data set, or a part of it"
        )
    return y.astype(np.int64)


def npz_count(path: Path) -> int | None:
    """How many training images an .npz has, or None if it does not say."""
    try:
        with open_npz(path) as archive:
            return int(archive["train_y"].size)
    except BROKEN:
        return None


def derived(root: Path, key: str, make: Callable[[], Arrays], recreated: bool = False) -> Arrays:
    """What ``make`` returns, kept in ``root`` under a name that says what it was made from.

    The file is one that :func:`read_npz` takes: it may be copied, and named as a source.

    A file that cannot be read is made again, and a folder that cannot be written is done without.
    """
    path = root / "derived" / f"{key}-2.npz"  # the number changes with the code that makes it
    with contextlib.suppress(*BROKEN), open_npz(path) as archive:
        kept = {key: archive[key] for key in KEYS}
        return Arrays(**{key: a if a.ndim == 1 else _first(a) for key, a in kept.items()})
    print(f"making {path.name} in {path.parent}, once", file=sys.stderr, flush=True)
    arrays = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary, open(temporary, "wb") as stream:
            whole: dict[str, Any] = {"recreated": np.array(recreated)}
            for name in KEYS:
                array = getattr(arrays, name)
                whole[name] = array if array.ndim == 1 else array.transpose(0, 2, 3, 1)
            np.savez(stream, **whole)
    return arrays
