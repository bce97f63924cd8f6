"""Trained weights by name: what they were trained on, how well, and how images are given to them.

This module reads what `train` published. It knows nothing of recipes, records and data sets: it has
their names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from econv.pretrained import from_pretrained, is_ours, read_config, saved_folder, weights_folders

__all__ = ["LICENCE", "Transforms", "Weights", "inscribed_disc", "named"]

LICENCE = "MIT"
"""Of the weights; that of the images they were trained on is for the owners of these to say."""

_ENTRY = "weights"  # in config.json
_METRICS = ("test_error", "validation_error")


@dataclass(frozen=True)
class Transforms:
    """From pictures to what the network reads: the pixels' mean and deviation in training.

    Raises:
        ValueError: for means, deviations or sizes out of their range; when called, for what is not
            ``[batch, channels, height, width]``.

    >>> ready = Transforms(mean=(0.5,), std=(0.25,), size=(2, 2))
    >>> ready(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).unique()
    tensor([2.])
    """

    mean: tuple[float, ...]
    """Of each channel, of pixels from 0 to 1."""
    std: tuple[float, ...]
    """Their standard deviation."""
    size: tuple[int, int]
    """Height and width of the images of training."""
    disc: bool = False
    """Whether the network saw the inscribed disc of an image only."""

    def __post_init__(self) -> None:
        numbers = [*self.mean, *self.std]
        if len(self.mean) != len(self.std) or not self.mean or not all(map(_finite, numbers)):
            raise ValueError(
                "expected a mean and a std for each channel, as numbers; "
                f"got {self.mean} and {self.std}"
            )
        if not min(self.std) > 0:
            raise ValueError(f"expected stds above 0; got {self.std}")
        if len(self.size) != 2 or not all(_whole(side) for side in self.size):
            raise ValueError(f"expected size as height and width in pixels; got {self.size}")

    def __call__(self, images: Tensor) -> Tensor:
        """Images ``[…, channels, height, width]``: bytes, or floats from 0 to 1.

        Images of another size keep it: it is for the caller to say how they are resized.
        """
        channels = len(self.mean)
        if images.ndim < 3 or images.shape[-3] != channels:
            raise ValueError(
                f"expected images [batch, {channels}, height, width]; got {list(images.shape)}"
            )
        pixels = images if images.is_floating_point() else images.to(torch.float32) / 255
        mean, std = (
            torch.tensor(values, dtype=pixels.dtype, device=pixels.device).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        found = (pixels - mean) / std
        if self.disc:
            found = found * inscribed_disc(*found.shape[-2:]).to(found)
        return found


@dataclass(frozen=True)
class Weights:
    """Trained weights: where they lie, and what there is to know about them.

    :meth:`find` reads one by its name; ``econv.create_model(model, weights=name)`` and
    ``econv.from_pretrained(name)`` load the network.

    >>> found = Weights.find("digits_p8")
    >>> found.model, found.classes[:3]
    ('convnet6_p8', ('0', '1', '2'))
    >>> network = found.load()
    >>> network(found.transforms()(torch.zeros(1, 1, 28, 28))).shape
    torch.Size([1, 10])
    """

    name: str
    folder: Path
    """With ``config.json``, ``model.safetensors`` and the model card ``README.md``."""
    model: str
    """The name of the network for :func:`econv.create_model`."""
    recipe: str
    """How it was trained, as ``econv train`` knows it."""
    seed: int
    data_seed: int
    """Which re-creation of the images, as ``seed`` of :func:`econv.data.load`."""
    dataset: str
    recreated: bool
    """Whether the images stand in for those of the data set."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int]
    disc: bool
    test_angles: int
    """The test error is the mean over so many angles; 0 for images as they are."""
    classes: tuple[str, ...]
    """Their names, in the order of the scores."""
    metrics: Mapping[str, float]
    """``test_error`` and ``validation_error`` of the record, in percent."""
    parameters: int
    dtype: str
    """How matrices are stored: ``"float32"``, ``"float16"`` or ``"bfloat16"``."""
    precision: str
    """Of convolutions when the record's predictions were made."""
    record_sha256: str
    """Of the record of the run, a file under ``records/``."""
    predictions_sha256: str
    """Of the record's predicted classes of the test split."""
    data_sha256: str
    """Of the images and classes that it was trained and tested on."""
    licence: str = LICENCE

    @classmethod
    def find(cls, name: str | Path | Weights) -> Weights:
        """The weights of that name, in a folder, or in a repository ``owner/name`` on the Hub.

        Names are looked for in the folder that ``ECONV_WEIGHTS`` names, in ``weights/`` and in the
        ``weights/`` of a checkout of econv. Raises `ValueError` where there are none, or where the
        file that describes them is damaged.
        """
        if isinstance(name, Weights):
            return name
        folder = saved_folder(name)
        path = folder / "config.json"
        entry = read_config(path).get(_ENTRY)
        wanted = {field.name for field in fields(cls)} - {"folder"}
        if not isinstance(entry, dict) or set(entry) != wanted:
            got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(
                f"{path}: expected 'weights' with {', '.join(sorted(wanted))}; got {got}"
            )
        try:
            _check(entry)
            values: dict[str, Any] = {
                key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()
            }
            found = cls(folder=folder, **values)
            found.transforms()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None
        return found

    def transforms(self) -> Transforms:
        """What makes the network's input of pictures."""
        return Transforms(self.mean, self.std, self.size, self.disc)

    def load(self, num_classes: int | None = None, **options: Any) -> Any:
        """The network, in eval mode, as :func:`econv.from_pretrained` gives it."""
        source = self.folder if self.folder.is_absolute() else Path.cwd() / self.folder
        return from_pretrained(source, num_classes=num_classes, **options)

    def entry(self) -> dict[str, Any]:
        """What ``config.json`` says of them."""
        told = asdict(self)
        del told["folder"]
        return told


def named(pattern: str = "*") -> list[str]:
    """The names of all weights that can be found here, those that fit a pattern.

    >>> named("digits_*")
    ['digits_p8']
    """
    found = {
        path.parent.name
        for place in weights_folders()
        for path in place.glob("*/config.json")
        if is_ours(path) and _ENTRY in read_config(path)
    }
    return sorted(name for name in found if fnmatchcase(name, pattern))


def inscribed_disc(height: int, width: int) -> Tensor:
    """1 inside the largest disc of an image, 0 outside, with an edge two pixels wide.

    >>> inscribed_disc(9, 9)[4].tolist()
    [0.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.25]
    """
    rows, columns = (torch.arange(n) - (n - 1) / 2 for n in (height, width))
    distance = (rows[:, None] ** 2 + columns**2).sqrt()
    return ((min(height, width) / 2 - distance) / 2).clamp(0, 1)


def _check(entry: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an entry whose values are of other kinds."""
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("seed", "data_seed", "test_angles", "parameters"), int),
        **dict.fromkeys(("recreated", "disc"), bool),
        **dict.fromkeys(("mean", "std", "size", "classes"), list),
        "metrics": dict,
    }
    for name, value in entry.items():
        kind = kinds.get(name, str)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"expected {name} of another kind; got {value!r:.60}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"expected {name} of 0 or more; got {value}")
    for name in ("name", "recipe"):  # of which paths are made
        if re.search(r"^\.|[/\\]", entry[name]):
            raise ValueError(f"expected {name} as a name, not a path; got {entry[name]!r:.60}")
    _expect_texts("classes", entry["classes"])
    metrics = entry["metrics"]
    if set(metrics) != set(_METRICS) or not all(map(_finite, metrics.values())):
        raise ValueError(f"expected metrics with {' and '.join(_METRICS)}; got {metrics!r:.60}")


def _expect_texts(name: str, values: Sequence[Any]) -> None:
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected {name} as names; got {values!r:.60}")


def _finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
