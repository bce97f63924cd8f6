"""Arrays in ``.npz`` files: those that users name, and those that were derived once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from econv.data.errors import BROKEN, DataError, reason
from econv.data.formats import Array, Arrays
from econv.data.sources import SOURCES
from econv.files import atomic

KEYS = ("train_x", "train_y", "test_x", "test_y")


def read_npz(path: Path, name: str) -> tuple[Arrays, bool]:
    source = SOURCES[name]
    try:
        with open_npz(path) as archive:
            missing = [key for key in KEYS if key not in archive]
            found = {key: archive[key] for key in KEYS if key in archive}
            says = "recreated" in archive and bool(np.any(archive["recreated"]))
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
    return arrays, says or "recreated" in path.name.lower()


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


def derived(root: Path, key: str, make: Callable[[], Arrays]) -> Arrays:
    """What ``make`` returns, kept in ``root`` under a name that says what it was made from.

    A file that cannot be read is made again, and a folder that cannot be written is done without.
    """
    path = root / "derived" / f"{key}-1.npz"  # the number changes with the code that makes it
    with contextlib.suppress(*BROKEN), open_npz(path) as archive:
        return Arrays(*(archive[key] for key in KEYS))
    print(f"making {path.name} in {path.parent}, once", file=sys.stderr, flush=True)
    arrays = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary, open(temporary, "wb") as stream:
            np.savez(stream, **{key: getattr(arrays, key) for key in KEYS})
    return arrays
