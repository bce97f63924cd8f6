"""Sizes of launches: counts in whole units, and what there is to know of images."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Like", "power_of_two", "rounded_up", "units"]


def units(count: int, unit: int) -> int:
    """How many units hold a count: 33 take two of 32."""
    return -(-count // unit)


def rounded_up(count: int, unit: int) -> int:
    """A count in whole units: 33 in units of 32 are 64."""
    return units(count, unit) * unit


def power_of_two(count: int) -> int:
    """The least power of two that is no less: of 33 it is 64."""
    return 1 << max(0, count - 1).bit_length()


class Like(NamedTuple):
    """What there is to know of images but their numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> Like:
        return Like(x.shape, x.stride(), x.dtype, x.device)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
