"""Images that a conversion is fitted to, and how many of them a network names rightly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from econv.groups import Group
from econv.testing import transform

__all__ = ["Given", "Images", "accuracies", "read_images"]

Images = Tensor | Iterable[Any]

_BATCH = 64


class Given(NamedTuple):
    """Images ``[n, channels, height, width]`` and, if they are known, their classes ``[n]``."""

    images: Tensor
    labels: Tensor | None


def read_images(images: Images | None, labels: Tensor | None, like: Tensor) -> Given | None:
    """The images of a tensor, or of the batches of a loader; with the device and dtype of another.

    Batches are tensors, or pairs of images and labels.
    """
    if images is None:
        if labels is not None:
            raise ValueError("expected images beside labels; got labels alone")
        return None
    if not isinstance(images, Tensor):
        given = images if isinstance(images, Iterable) else [images]
        batches = [batch if isinstance(batch, tuple | list) else (batch,) for batch in given]
        if not batches or not all(
            batch and all(isinstance(part, Tensor) for part in batch) for batch in batches
        ):
            raise ValueError(
                "expected images as a tensor or as batches of tensors, (images,) or (images, "
                f"labels); got {next((type(b[0]).__name__ for b in batches if b), 'no batch')}"
            )
        images = torch.cat([batch[0] for batch in batches])
        if labels is None and all(len(batch) > 1 for batch in batches):
            labels = torch.cat([batch[1] for batch in batches])
    if images.ndim != 4 or len(images) < 2:
        raise ValueError(
            "expected at least two images [number, channels, height, width]; got "
            f"{tuple(images.shape)}"
        )
    if labels is not None and not isinstance(labels, Tensor):
        raise ValueError(f"expected labels as a tensor; got {type(labels).__name__}")
    if labels is not None and (labels.shape != images.shape[:1] or labels.is_floating_point()):
        raise ValueError(
            f"expected labels as {len(images)} whole numbers; got {tuple(labels.shape)}, "
            f"{labels.dtype}"
        )
    return Given(images.to(like.device, like.dtype), labels)


def accuracies(network: nn.Module, given: Given, group: Group) -> dict[str, float] | None:
    """The share of images, as they are and turned, whose largest score is that of their label."""
    if given.labels is None:
        return None
    turns = [e for e in group.grid_symmetries if e and e < group.rotations]
    angles = {f"{360 * e / group.rotations:.4g}°": e for e in [0, *turns]}
    return {
        angle: _accuracy(network, transform(given.images, group, element, "scalar"), given.labels)
        for angle, element in angles.items()
    }


def _accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    modes = {module: module.training for module in network.modules()}
    right = 0
    try:
        with torch.no_grad():
            network.eval()
            for x, y in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
                scores = network(x)
                if not isinstance(scores, Tensor) or scores.ndim != 2:
                    raise ValueError("expected a network that returns [batch, classes] for labels")
                right += int((scores.argmax(1).cpu() == y.cpu()).sum())
    finally:
        for module, mode in modes.items():
            module.training = mode
    return right / len(labels)
