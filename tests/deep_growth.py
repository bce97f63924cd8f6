"""How a deep ReLU network at initialisation changes the second moment of white noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from econv import GroupConv2d

__all__ = ["group_layer", "growth", "plain_layer"]


@torch.no_grad()
def growth(
    layer: Callable[[], nn.Module],
    channels: int,
    *,
    depth: int = 50,
    seeds: Sequence[int] = range(10),
    pixels: int = 12,
) -> list[float]:
    """For each seed, the geometric mean of the growth of the second moment per layer.

    ``layer`` makes a convolution from ``channels`` to ``channels``, which is followed by ReLU and
    made anew for every layer.
    """
    means = []
    for seed in seeds:
        torch.manual_seed(seed)
        x = torch.randn(1, channels, pixels, pixels)
        total = 0.0
        for _ in range(depth):
            # A network that explodes would overflow: divide the growth out and add its logarithm.
            x = x / x.square().mean().sqrt()
            x = layer()(x).relu()
            total += math.log(float(x.square().mean()))
        means.append(math.exp(total / depth))
    return means


def group_layer(
    group: str, fields: int = 32, **options: object
) -> tuple[Callable[[], nn.Module], int]:
    """A maker of group convolutions that wrap around the image, and their number of channels."""

    def make() -> GroupConv2d:
        return GroupConv2d(fields, fields, group, padding_mode="circular", **options)

    return make, make().out_channels


def plain_layer(channels: int, size: int) -> tuple[Callable[[], nn.Module], int]:
    """A maker of ordinary convolutions with He's initialisation, and their number of channels."""

    def make() -> nn.Conv2d:
        conv = nn.Conv2d(
            channels, channels, size, padding=size // 2, padding_mode="circular", bias=False
        )
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        return conv

    return make, channels
