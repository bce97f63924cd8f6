"""How launches on a GPU are cut into programs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from econv.engines.spectral.triton.scheme import Scheme

__all__ = [
    "INTERNAL",
    "Cut",
    "Like",
    "Tiles",
    "at_a_time",
    "chosen_tiles",
    "cut",
    "divided",
    "overridden",
    "tiles",
]

INTERNAL = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.float16,
    torch.float32: torch.float32,
}
"""What the kernels compute in, for inputs of these dtypes."""


class Tiles(NamedTuple):
    """How a launch is cut into programs.

    Pixels times fields of a program are at least 32 for each of its warps: a thread owns a pixel
    and a field.
    """

    pixels: int = 32
    """Pixels of one program of the convolution, which takes `FIELDS` fields at a time."""
    warps: int = 4
    stages: int = 1
    accumulators: int = 384
    """Output channels (slots times fields) of one program, at most."""
    gradient_pixels: int = 64
    """Pixels at a time in the gradient to the weights."""
    gradient_fields: int = 2
    """Input fields of one program there, at most `FIELDS`."""
    gradient_warps: int = 4
    gradient_accumulators: int = 384
    splits: int = 0
    """How many programs share the pixels of one gradient to the weights; 0: enough for the GPU,
    as far as their sums take a quarter of the memory that is free (half of it for
    warp-specialised kernels)."""
    warp_specialised: int = -1
    """0: never; 1: wherever kernels can be, on any device (not in float32); −1: where they gain."""
    producers: int = 8
    """Warps that differentiate; four multiply."""
    partitions: int = 2
    """Of the producers, each of which goes its own pace."""
    registers: int = 0
    """Of each of their threads; 0: what was fastest. With more than 128 the others have too few for
    the features that they fetch, and wait for every product."""
    halves: int = -1
    """Whether these take half of a layer's targets at a time: 0 never, 1 wherever there are halves,
    −1 where there are many targets."""
    bytes: int = 0
    """The most that is made of the images of one launch; 0: as much as the dense engine takes."""


_override: list[Tiles] = []


class tiles:  # noqa: N801  # a context manager, named as `econv.engine` is
    """Inside the block every launch is cut as given: for measurements.

    >>> with tiles(pixels=128):  # doctest: +SKIP
    ...     layer(x)
    """

    def __init__(self, **changes: int) -> None:
        self.changes = changes

    def __enter__(self) -> Tiles:
        found = (_override[-1] if _override else Tiles())._replace(**self.changes)
        _override.append(found)
        return found

    def __exit__(self, *error: object) -> None:
        _override.pop()


def chosen_tiles(layout: Scheme) -> Tiles:
    """What was fastest of the tiles that ``benchmarks/engines.py --device cuda --tune`` tries.

    Small programs, several of which share a processor, unless there are
    many targets. Where slots come in several chunks the gradient holds one at a time, of more
    fields.
    """
    if _override:
        return _override[-1]
    found = Tiles()
    if layout.batch >= 16:
        found = found._replace(pixels=64, warps=8)
    return found if layout.chunks == 1 else found._replace(gradient_fields=4, gradient_warps=8)


def overridden() -> Tiles | None:
    """The tiles of the innermost `tiles` block, or nothing."""
    return _override[-1] if _override else None


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
    def image_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class Cut(NamedTuple):
    """The output fields of one program: so many copies of these parts, powers of two each."""

    parts: tuple[int, ...]
    copies: int
    programs: int

    @property
    def padded(self) -> int:
        return self.programs * self.copies * sum(self.parts)


def cut(fields: int, layout: Scheme, warps: int, accumulators: int, least: int) -> Cut:
    """Programs for so many output fields, each of at most so many accumulators (or ``least``)."""
    copies = max(1, warps // layout.batch)
    most = max(least * copies, accumulators // (2 * layout.batch))
    return divided(fields, triton.cdiv(fields, most), copies, least)


def divided(fields: int, programs: int, copies: int, least: int) -> Cut:
    """Output fields for about so many programs: parts are rounded up to powers of two."""
    each = least * triton.cdiv(fields, least * copies * programs)
    parts: list[int] = []
    while each:  # 20 is 16 + 4; 28, which would take three parts, is 32
        size = 1 << (each.bit_length() - 1)
        rest = each - size
        if parts or rest & (rest - 1):
            size = triton.next_power_of_2(each)
        parts.append(size)
        each -= min(size, each)
    return Cut(tuple(parts), copies, triton.cdiv(fields, copies * sum(parts)))


def at_a_time(device: torch.device, warps: int) -> int:
    """Programs that a GPU runs at a time: eight warps take all registers of a processor."""
    processors = 132  # of an H200, for whom there is none
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * max(1, 8 // warps)
