"""MNIST-rot made again from MNIST: the same recipe, other images."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from econv.data.digits import turned
from econv.data.dividing import divided, stratified
from econv.data.errors import DataError
from econv.data.formats import Arrays, Found
from econv.data.npz import derived, npz_count, read_npz
from econv.data.official import published
from econv.data.sources import SOURCES
from econv.data.splits import Dataset


def recreated(root: Path, place: Path | None, download: bool, seed: int) -> Dataset:
    """MNIST-rot made again: 62,000 of MNIST's 70,000 digits, each turned by a uniform angle."""
    name = "mnist_rot_recreated"
    ready = root / f"{name}.npz" if place is None else place
    if ready.is_dir():
        ready = ready / f"{name}.npz"
    if ready.is_file() and ready.suffix == ".npz" and npz_count(ready) != SOURCES["mnist"].train:
        if seed:
            raise DataError(
                f"{ready} has images that were made before: expected MNIST's own files as source "
                f"to make others, with seed {seed}"
            )
        return divided(name, replace(read_npz(ready, name), recreated=True), seed)
    mnist = published("mnist", root, place, download)
    upright = mnist.arrays
    digest = hashlib.md5(usedforsecurity=False)
    for array in (upright.train_x, upright.train_y, upright.test_x, upright.test_y):
        digest.update(array.tobytes())
    source = SOURCES[name]

    def make() -> Arrays:
        x = np.concatenate([upright.train_x, upright.test_x])
        y = np.concatenate([upright.train_y, upright.test_y])
        order = stratified(y, seed)[: source.train + source.test]
        train, test = np.split(order, [source.train])
        return Arrays(turned(x[train], train, seed), y[train], turned(x[test], test, seed), y[test])

    arrays = derived(root, f"{name}-{digest.hexdigest()[:16]}-{seed}", make, recreated=True)
    return replace(divided(name, Found(arrays, True, mnist.unverified), seed), seed=seed)
