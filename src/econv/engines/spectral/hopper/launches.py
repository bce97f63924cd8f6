"""Launches of the warp-specialised kernels."""

from __future__ import annotations

import torch

from econv.engines.spectral.hopper import kernels
from econv.engines.spectral.hopper.schedule import ROWS
from econv.engines.spectral.tiling import Tiles, Tiling, units
from econv.engines.spectral.triton.kernels import INTERPRETED
from econv.engines.spectral.triton.steps import Launch

_CONSUMERS = 4  # warps
_REGISTERS = 128  # of a producer thread; with more, consumers would wait for every product


def supported(device: torch.device) -> bool:
    """Whether a device runs these kernels: a Hopper GPU, and a Triton with all of Gluon."""
    if INTERPRETED or not kernels.AVAILABLE:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) == (9, 0)
    return device.type == "meta"  # which stands for an H200


def convolution_launches(
    tiling: Tiling,
    chosen: Tiles,
    device: torch.device,
    numbers: tuple[int, ...],
    out_fields: int,
    y_dot: int,
) -> list[Launch]:
    """One for each layout of the tiling.

    They take the spectrum in words, the weights' descriptors, the output, and both largest numbers.
    """
    tiles, programs = units(numbers[0], ROWS), tiling.cut.programs
    return [
        Launch(
            kernels.forward(layout, tiling.cut.parts, chosen.partitions),
            (min(tiles, tiling.running(device)), programs),
            (*numbers, tiles, programs, out_fields, y_dot),
            BP=ROWS,
            PRODUCERS=chosen.producers,
            REGISTERS=_REGISTERS,
            STAGES=stages,
            num_warps=_CONSUMERS,
        )
        for layout, stages in zip(tiling.layouts, tiling.stages, strict=True)
    ]


def weight_gradient_launches(
    tiling: Tiling,
    number: int,
    chosen: Tiles,
    numbers: tuple[int, ...],
    partial: tuple[int, ...],
    again: int,
) -> list[Launch]:
    """One for each chunk of slots, of the layout with that number.

    They take the spectrum in words, the descriptors of the packed gradient, the sums, which have
    the shape ``partial``, and both largest numbers.
    """
    layout, cut = tiling.layouts[number], tiling.cut
    splits, in_padded, count, out_padded, _ = partial
    tiles = units(numbers[0], tiling.pixels)
    return [
        Launch(
            kernels.weight_gradient(layout, cut.parts, chunk, chosen.partitions),
            (in_padded // tiling.fields, cut.programs, splits),
            (*numbers, tiles, cut.programs, in_padded, out_padded, again),
            BP=tiling.pixels,
            PRODUCERS=chosen.producers,
            REGISTERS=_REGISTERS,
            STAGES=2,
            READY=tiling.stages[number],
            COUNT=count,
            num_warps=_CONSUMERS,
        )
        for chunk in range(layout.chunks)
    ]
