"""ModelNet10: shapes of furniture as voxels, upright or each turned by any rotation."""

from __future__ import annotations

import contextlib
import math
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from econv.arrays import bounded, open_npz
from econv.data.archives import md5
from econv.data.augmentation import quaternions, turn
from econv.data.dividing import stratified
from econv.data.errors import BROKEN, DataError, reason
from econv.data.formats import Array
from econv.data.keyed import ANGLE
from econv.data.splits import Dataset, Split
from econv.files import atomic

CLASSES = (
    "bathtub",
    "bed",
    "chair",
    "desk",
    "dresser",
    "monitor",
    "night_stand",
    "sofa",
    "table",
    "toilet",
)
COUNTS = {"train": 3_991, "test": 908}
VALIDATION = 399
GRID, SHAPE = 30, 24
"""Voxels along the sides of the grid, and along the longest side of a shape in its middle."""

FILES = ("modelnet10_voxels.npz", "ModelNet10.zip")
_LARGEST = 1 << 28  # bytes of one shape's file
_ADDRESS = "https://3dvision.princeton.edu/projects/2014/3DShapeNets/ModelNet10.zip"


def modelnet10(name: str, root: Path, place: Path | None, seed: int) -> Dataset:
    """Volumes of 32³, of which a voxel on each side is empty.

    ``modelnet10_rot`` has validation and test shapes turned, each by a rotation of its own;
    ``modelnet10_upright`` has the same test shapes, turned alike, and all others upright.
    """
    arrays = _arrays(root, place)
    order = stratified(arrays["train_y"], seed)
    chosen = {
        "train": np.sort(order[VALIDATION:]),
        "validation": np.sort(order[:VALIDATION]),
    }
    splits = []
    for part in ("train", "validation", "test"):
        source = "test" if part == "test" else "train"
        at = chosen.get(part, np.arange(len(arrays["test_y"])))
        x = torch.from_numpy(_unpacked(arrays[f"{source}_x"][at]))
        if part == "test" or (part == "validation" and name == "modelnet10_rot"):
            x = turned(x, torch.from_numpy(at + (part == "test") * len(order)), seed)
        splits.append(Split(x, torch.from_numpy(arrays[f"{source}_y"][at].astype(np.int64))))
    train, validation, test = splits
    return Dataset.of(name, train, validation, test, len(CLASSES), unverified=True)


def turned(x: torch.Tensor, index: torch.Tensor, seed: int) -> torch.Tensor:
    """Volumes of bytes, each turned by the rotation that is keyed by the seed and its index."""
    found = torch.empty_like(x)
    turns = quaternions(ANGLE, seed, index)
    for start in range(0, len(x), 16):
        part = slice(start, start + 16)
        found[part] = turn(x[part].float(), turns[part]).round().to(torch.uint8)
    return found


def _unpacked(packed: Array) -> Array:
    """0 and 255, ``[n, 1, 32, 32, 32]``."""
    x = np.unpackbits(packed, axis=1)[:, : GRID**3].reshape(-1, 1, GRID, GRID, GRID)
    return np.pad(255 * x, ((0, 0), (0, 0), (1, 1), (1, 1), (1, 1)))


def _arrays(root: Path, place: Path | None) -> dict[str, Array]:
    folder = root if place is None else place
    found = [folder] if folder.is_file() else [folder / name for name in FILES]
    for path in found:
        if path.is_file():
            return _read(path) if path.suffix == ".npz" else _from_meshes(path, root)
    raise DataError(
        f"{folder}: expected {' or '.join(FILES)}; neither is there. The archive is at "
        f"{_ADDRESS}; name it, or its folder, as source"
    )


def _read(path: Path) -> dict[str, Array]:
    """Voxels as packed bits, ``train_x`` and ``test_x``, one row for each shape, and classes."""
    found: dict[str, Array] = {}
    try:
        with open_npz(path) as archive:
            for part, count in COUNTS.items():
                wanted = {f"{part}_x": (count, -(-(GRID**3) // 8)), f"{part}_y": (count,)}
                for key, shape in wanted.items():
                    head = archive.head(key)
                    if head.dtype != np.uint8 or head.shape != shape:
                        raise DataError(
                            f"{path}: expected {key} as uint8 {list(shape)}; got {head.dtype} "
                            f"{list(head.shape)}"
                        )
                    found[key] = archive.read(key)
                if int(found[f"{part}_y"].max()) >= len(CLASSES):
                    raise DataError(f"{path}: expected classes from 0 to {len(CLASSES) - 1}")
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(f"{path}: cannot be read as voxels ({reason(error)})") from error
    return found


def _from_meshes(path: Path, root: Path) -> dict[str, Array]:
    """The voxels of the published archive's meshes; kept, because making them takes minutes."""
    kept = root / "derived" / f"modelnet10-{md5(path)[:16]}-1.npz"
    if kept.is_file():
        with contextlib.suppress(DataError):
            return _read(kept)
    print(f"making {kept.name} in {kept.parent}, once", file=sys.stderr, flush=True)
    found: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for part, count in COUNTS.items():
                rows, classes = [], []
                for label, member in _members(archive, part):
                    with archive.open(member) as stream:
                        text = bounded(stream, _LARGEST, member)
                    rows.append(np.packbits(voxels(*read_off(text, member))))
                    classes.append(label)
                if len(rows) != count:
                    raise DataError(
                        f"{path}: expected {count} shapes for {part}; got {len(rows)}: truncated, "
                        "or another archive"
                    )
                found[f"{part}_x"] = np.stack(rows)
                found[f"{part}_y"] = np.array(classes, np.uint8)
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(f"{path}: cannot be read as ModelNet10.zip ({reason(error)})") from error
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with atomic(kept) as temporary, open(temporary, "wb") as stream:
            whole: dict[str, Any] = found
            np.savez_compressed(stream, **whole)
    return found


def _members(archive: zipfile.ZipFile, part: str) -> Iterator[tuple[int, str]]:
    """Classes and names of the shapes for training or test: ModelNet10/bed/train/bed_0001.off."""
    for name in sorted(archive.namelist()):
        words = name.split("/")
        if name.endswith(".off") and words[0] != "__MACOSX" and words[-2:-1] == [part]:
            label = words[-3] if len(words) > 2 else ""
            if label not in CLASSES:
                raise DataError(f"{name}: expected a class of {', '.join(CLASSES)}; got {label!r}")
            yield CLASSES.index(label), name


def read_off(text: bytes, name: str) -> tuple[Array, Array]:
    """Vertices ``[n, 3]`` and triangles ``[m, 3]`` of a mesh in the Object File Format.

    Polygons are cut into triangles about their first corner. In some files of ModelNet the counts
    follow the word OFF without a space.

    >>> read_off(b"OFF 3 1 0  0 0 0  1 0 0  0 1 0  3 0 1 2", "a triangle")[1].tolist()
    [[0, 1, 2]]
    """
    if text[:3] != b"OFF":
        raise DataError(f"{name}: expected a mesh that begins with OFF; got {text[:8]!r}")
    lines = (line.partition(b"#")[0] for line in text[3:].splitlines())
    words = b" ".join(lines).split()
    try:
        corners, faces = int(words[0]), int(words[1])
        end = 3 + 3 * corners
        points = np.array(words[3:end], np.float64).reshape(corners, 3)
        rest = np.array(words[end:], np.float64)
        if len(rest) == 4 * faces and (rest[::4] == 3).all():  # nearly all files, fast
            found = rest.reshape(-1, 4)[:, 1:].astype(np.int64)
        else:
            found = _fans(rest, faces)
    except (ValueError, IndexError) as error:
        raise DataError(f"{name}: expected counts, vertices and faces; {error}") from None
    inside = not found.size or 0 <= found.min() <= found.max() < corners
    if not inside or not np.isfinite(points).all():
        raise DataError(f"{name}: expected finite vertices, and faces between them")
    return points, found


def _fans(rest: Array, faces: int) -> Array:
    triangles, at = [], 0
    for _ in range(faces):
        count = int(rest[at])
        around = rest[at + 1 : at + 1 + count].astype(np.int64)
        if len(around) != count:
            raise ValueError("the faces end early")
        triangles += [(around[0], *around[i : i + 2]) for i in range(1, count - 1)]
        at += 1 + count
    return np.array(triangles, np.int64).reshape(-1, 3)


def voxels(points: Array, triangles: Array, grid: int = GRID, shape: int = SHAPE) -> Array:
    """Where the surface of a mesh is, as truth values ``[grid, grid, grid]``.

    The mesh lies in the middle, its longest side is ``shape`` voxels; axes are z, y up, x.

    >>> corners = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    >>> int(voxels(corners, np.array([[0, 1, 2]]), grid=4, shape=2).sum())
    3
    """
    found = np.zeros((grid,) * 3, bool)
    if not len(triangles):
        return found
    used = points[np.unique(triangles)]
    low, high = used.min(0), used.max(0)
    side = float((high - low).max()) or 1.0
    middle = (low + high) / 2
    inside = 1 - 1e-6  # faces between two voxels belong to the one in the shape
    corners = ((points - middle) * (inside * shape / side))[triangles]  # [m, 3 corners, 3]
    edges = np.linalg.norm(corners - np.roll(corners, 1, 1), axis=2).max(1)
    steps = np.maximum(1, np.ceil(2 * edges)).astype(np.int64)  # half a voxel or less
    for count in np.unique(steps):
        i, j = np.triu_indices(int(count) + 1)
        weights = np.stack([i, j - i, count - j], 1) / count
        chosen = corners[steps == count]
        for part in np.array_split(chosen, math.ceil(len(chosen) * len(i) / 1_000_000)):
            at = np.einsum("pc,mcd->mpd", weights, part).reshape(-1, 3)
            x, y, z = np.floor(at * [1, -1, 1] + grid / 2).astype(np.int64).T
            found[z, y, x] = True
    return found
