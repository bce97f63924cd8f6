"""Arrays in ``.npz`` files: those that users name, and those that were derived once."""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from econv.arrays import Head, open_npz
from econv.data.errors import BROKEN, DataError, reason
from econv.data.formats import Array, Arrays, Found, as_idx, read_idx
from econv.data.sources import SOURCES, Source
from econv.files import atomic

KEYS = ("train_x", "train_y", "test_x", "test_y")


def read_npz(path: Path, name: str) -> Found:
    """The arrays of a file, checked, and what they are.

    Official ones and some re-created ones are recognised by their checksums. Nothing vouches for
    any others; those that stand in for the official ones say so by the key ``recreated``, as ours
    do, or by the file's name.
    """
    source = SOURCES[name]
    try:
        with open_npz(path) as archive:
            missing = [key for key in KEYS if key not in archive.names]
            if not missing:  # what is of another size is not read
                _check(path, source, {key: archive.head(key) for key in KEYS})
            found = {key: archive.read(key) for key in KEYS if not missing}
            told = "recreated" in archive.names
            says = archive.read("recreated", 64) if told else np.False_
    except DataError:
        raise
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
        _first(found["train_x"]),
        _labels(path, "train_y", found["train_y"], source.classes),
        _first(found["test_x"]),
        _labels(path, "test_y", found["test_y"], source.classes),
    )
    if says.dtype != np.bool_ or says.shape != ():
        raise DataError(
            f"{path}: expected recreated as one truth value; got {says.dtype} {list(says.shape)}"
        )
    if _official(arrays, source):
        return Found(arrays, recreated=False, unverified=False)
    if source.recreations and content_hash(arrays) in source.recreations:
        return Found(arrays, recreated=True, unverified=False)
    # Anybody can write a key or a name: they say what it is, and vouch for nothing.
    return Found(arrays, bool(says) or "recreated" in path.name.lower(), unverified=True)


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


def _check(path: Path, source: Source, heads: Mapping[str, Head]) -> None:
    """Raise :class:`DataError` where arrays are not of the size that they must have."""
    channels, height, width = source.shape
    for key, head in heads.items():
        count = source.train if key.startswith("train") else source.test
        shape = head.shape
        if key.endswith("y"):
            if not np.issubdtype(head.dtype, np.integer) or shape != (count,):
                raise DataError(
                    f"{path}: expected {key} as integers [{count}]; got {head.dtype} {list(shape)}"
                )
            continue
        if len(shape) == 3:
            shape = (*shape, 1)
        if head.dtype != np.uint8 or shape != (count, height, width, channels):
            raise DataError(
                f"{path}: expected {key} as uint8 [{count}, {height}, {width}, {channels}]; got "
                f"{head.dtype} {list(shape)}: this is another data set, or a part of it"
            )


def _first(x: Array) -> Array:
    """Channels first."""
    return np.ascontiguousarray((x[..., None] if x.ndim == 3 else x).transpose(0, 3, 1, 2))


def _labels(path: Path, key: str, y: Array, classes: int) -> Array:
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
            return math.prod(archive.head("train_y").shape)
    except BROKEN:
        return None


def derived(root: Path, key: str, make: Callable[[], Arrays], recreated: bool = False) -> Arrays:
    """What ``make`` returns, kept in ``root`` under a name that says what it was made from.

    The file is one that :func:`read_npz` takes: it may be copied, and named as a source.

    A file that cannot be read, or that is not what was written, is made again; a folder that cannot
    be written is done without.
    """
    path = root / "derived" / f"{key}-3.npz"  # the number changes with the code that makes it
    with contextlib.suppress(*BROKEN), open_npz(path) as archive:
        kept = {name: archive.read(name) for name in (*KEYS, "recreated")}
        if str(archive.read("sha256", 1024)) == _digest(kept):
            return Arrays(**{n: kept[n] if kept[n].ndim == 1 else _first(kept[n]) for n in KEYS})
    print(f"making {path.name} in {path.parent}, once", file=sys.stderr, flush=True)
    arrays = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary, open(temporary, "wb") as stream:
            whole: dict[str, Any] = {"recreated": np.array(recreated)}
            for name in KEYS:
                array = getattr(arrays, name)
                whole[name] = array if array.ndim == 1 else array.transpose(0, 2, 3, 1)
            np.savez(stream, **whole, sha256=np.array(_digest(whole)))
    return arrays


def _digest(arrays: Mapping[str, Array]) -> str:
    """SHA-256 over names, kinds, shapes and numbers."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
