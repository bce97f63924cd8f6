"""Which images are for training, validation and test."""

from __future__ import annotations

import numpy as np
import torch

from econv.data.formats import Array, Found
from econv.data.keyed import ORDER, keyed_bits
from econv.data.sources import SOURCES
from econv.data.splits import Dataset, Split


def divided(name: str, found: Found, seed: int) -> Dataset:
    source, arrays = SOURCES[name], found.arrays
    order = stratified(arrays.train_y, seed)
    chosen = np.sort(order[: source.validation]), np.sort(order[source.validation :])
    validation, train = (to_split(arrays.train_x[i], arrays.train_y[i]) for i in chosen)
    test = to_split(arrays.test_x, arrays.test_y)
    splits = (train, validation, test)
    return Dataset.of(name, *splits, source.classes, found.recreated, found.unverified)


def to_split(x: Array, y: Array) -> Split:
    # Copied only where torch could not write to them.
    return Split(
        *(torch.from_numpy(np.require(array, requirements=("C", "W"))) for array in (x, y))
    )


def stratified(y: Array, seed: int) -> Array:
    """A random order in which every stretch holds the classes in about their proportions."""
    index = torch.arange(len(y))
    shuffled = torch.argsort(keyed_bits(ORDER, seed, index), stable=True).numpy()
    classes = y[shuffled]
    by_class = np.argsort(classes, kind="stable")
    counts = np.bincount(classes)
    rank = np.empty(len(y), dtype=np.int64)
    rank[by_class] = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    return shuffled[np.argsort((rank + 0.5) / counts[classes], kind="stable")]
