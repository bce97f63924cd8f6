"""Data sets in memory: splits of images, their statistics, and normalisation by them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Images ``x``, uint8 ``[n, channels, height, width]``, and classes ``y``, int64 ``[n]``.

    Or volumes ``[n, channels, depth, height, width]``.

    Raises:
        ValueError: for images that are not ``uint8``, or classes that do not fit them.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 or self.x.ndim not in (4, 5):
            raise ValueError(
                "expected images as uint8 [n, channels, height, width]; "
                f"got {self.x.dtype} {tuple(self.x.shape)}"
            )
        if self.y.dtype != torch.int64 or self.y.shape != self.x.shape[:1]:
            raise ValueError(
                f"expected classes as int64 [{len(self.x)}]; got {self.y.dtype} "
                f"{tuple(self.y.shape)}"
            )
        if self.x.device != self.y.device:
            raise ValueError(
                f"expected images and classes on one device; got {self.x.device}, {self.y.device}"
            )

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> Split:
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test images of one kind.

    ``mean`` and ``std`` are per channel, of ``x / 255`` over the training split alone.
    ``recreated`` says that the images stand in for a published data set that they are not, and
    ``unverified`` that no checksum vouches for them. ``seed`` is the one that images were made
    again with; ``None`` where they are what they are.

    Raises:
        ValueError: for splits that do not fit one another, or classes, means and deviations that do
            not fit them.

    >>> images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    >>> split = Split(images, torch.tensor([0, 1, 0, 1, 0, 1]))
    >>> data = Dataset.of("six", split, split, split, classes=2)
    >>> round(255 * data.mean[0], 6), len(data.with_validation_in_training().train)
    (2.5, 12)
    """

    name: str
    recreated: bool
    train: Split
    validation: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unverified: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise ValueError(f"expected at least one class; got {self.classes}")
        channels = self.train.x.shape[1]
        if len(self.mean) != channels or len(self.std) != channels:
            raise ValueError(
                f"expected a mean and a std for each of {channels} channels; "
                f"got {self.mean} and {self.std}"
            )
        if not all(map(math.isfinite, (*self.mean, *self.std))) or not min(self.std) > 0:
            raise ValueError(f"expected finite means, positive stds; got {self.mean}, {self.std}")
        for name in ("train", "validation", "test"):
            split: Split = getattr(self, name)
            if split.x.shape[1:] != self.train.x.shape[1:]:
                raise ValueError(
                    f"expected {name} images of {tuple(self.train.x.shape[1:])}; "
                    f"got {tuple(split.x.shape[1:])}"
                )
            if len(split) and not 0 <= int(split.y.min()) <= int(split.y.max()) < self.classes:
                raise ValueError(
                    f"expected {name} classes from 0 to {self.classes - 1}; "
                    f"got {int(split.y.min())} to {int(split.y.max())}"
                )

    @classmethod
    def of(
        cls,
        name: str,
        train: Split,
        validation: Split,
        test: Split,
        classes: int,
        recreated: bool = False,
        unverified: bool = False,
    ) -> Dataset:
        """A data set with the mean and the std of its training split."""
        mean, std = statistics(train.x)
        return cls(name, recreated, train, validation, test, classes, mean, std, unverified)

    def to(self, device: torch.device | str) -> Dataset:
        """The same data set, all of it on a device."""
        return replace(
            self,
            train=self.train.to(device),
            validation=self.validation.to(device),
            test=self.test.to(device),
        )

    def with_validation_in_training(self) -> Dataset:
        """Training on all there is but the test split; ``validation`` stays, for reporting only."""
        train = Split(
            torch.cat([self.train.x, self.validation.x]),
            torch.cat([self.train.y, self.validation.y]),
        )
        mean, std = statistics(train.x)
        return replace(self, train=train, mean=mean, std=std)


def fingerprint(data: Dataset) -> str:
    """SHA-256 of the name and of the images and classes of all splits.

    >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> data = Dataset.of("two", *[Split(pixels, torch.tensor([0, 1]))] * 3, classes=2)
    >>> len(fingerprint(data))
    64
    """
    found = hashlib.sha256(data.name.encode())
    for split in (data.train, data.validation, data.test):
        for tensor in (split.x, split.y):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def normalise(x: Tensor, dataset: Dataset) -> Tensor:
    """Pixels to mean 0 and std 1 per channel, float32: (x/255 − mean) / std.

    ``x`` is ``[batch, channels, height, width]``: uint8 as in a split, or floats that were divided
    by 255 already. Nothing is copied from the host, so that a CUDA graph can hold it.

    Raises:
        ValueError: for other channels than those of the data set.

    >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> data = Dataset.of("two", *[Split(pixels, torch.tensor([0, 1]))] * 3, classes=2)
    >>> normalise(pixels, data).flatten().tolist()
    [-1.0, 1.0]
    """
    if x.ndim not in (4, 5) or x.shape[1] != len(dataset.mean):
        raise ValueError(
            f"expected [batch, {len(dataset.mean)}, height, width]; got {tuple(x.shape)}"
        )
    mean = _per_channel(dataset.mean, x)
    factor = _per_channel([1 / value for value in dataset.std], x)
    return (unit_range(x) - mean) * factor


def _per_channel(values: Sequence[float], x: Tensor) -> float | Tensor:
    if len(values) == 1:
        return values[0]
    filled = [torch.full((1,) * (x.ndim - 1), value, device=x.device) for value in values]
    return torch.cat(filled)


def unit_range(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.float32) * (1 / 255)


def statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std per channel of x/255, from exact integer sums: the same on every device."""
    if x.numel() == 0:
        raise ValueError(f"expected training images; got {tuple(x.shape)}")
    first = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
    second = torch.zeros_like(first)
    for images in x.split(2048):
        values = images.to(torch.int32)
        axes = (0, *range(2, x.ndim))
        first += values.sum(axes, dtype=torch.int64)
        second += (values * values).sum(axes, dtype=torch.int64)
    count = x.numel() // x.shape[1]
    mean, std = [], []
    for total, squares in zip(first.tolist(), second.tolist(), strict=True):
        mean.append(total / (255 * count))
        variance = (squares * count - total * total) / (255 * count) ** 2
        std.append(math.sqrt(variance) or 1.0)  # a constant channel stays finite
    return tuple(mean), tuple(std)
