"""Rotations, translations and changes of scale of maps of every kind, by angles and infinitesimal.

A map moves by its own quintic spline, the one that `econv.testing.rotate` turns images with. Group
features have one sample for each of the group's rotations; between these they are read off the
trigonometric polynomial through the samples, so that group features turn by any angle.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from econv.checking import FieldType
from econv.groups import FloatArray, Group
from econv.testing import _mirrored, _spline_filter, rotate

TRANSFORMATIONS = ("rotation", "translation", "scale")


def has_pixels(x: Tensor) -> bool:
    """Whether there is something to move."""
    return x.ndim == 4 and min(x.shape[-2:]) > 1


def turn(x: Tensor, field_type: FieldType, degrees: float) -> Tensor:
    """A map turned anticlockwise: its pixels, and the components or orientations of its fields."""
    if field_type.kind == "invariant":
        return x
    turned = rotate(x, degrees) if has_pixels(x) else x
    return mix_channels(turned, field_type, degrees)


def mix_channels(x: Tensor, field_type: FieldType, degrees: float) -> Tensor:
    """What a turn does to the channels, leaving pixels where they are."""
    if degrees % 360 == 0:
        return x
    if field_type.kind == "vector":
        radians = math.radians(degrees)
        return _mixed(
            x,
            np.array(
                [
                    [math.cos(radians), -math.sin(radians)],
                    [math.sin(radians), math.cos(radians)],
                ]
            ),
        )
    if field_type.kind == "regular" and field_type.group is not None:
        steps = degrees * field_type.group.rotations / 360
        return _mixed(x, _blocks(field_type.group, _shift(field_type.group.rotations, steps)))
    return x


def velocity(
    x: Tensor,
    field_type: FieldType,
    transformation: str,
    direction: tuple[float, float] = (1.0, 0.0),
    spacing: float = 1.0,
) -> Tensor:
    """How fast a map changes when it begins to move.

    In a rotation per radian, in a translation per pixel of the input along ``direction`` (x, y), in
    a change of scale per factor e. ``spacing`` is the length of a pixel of this map in those of the
    input.
    """
    if field_type.kind == "invariant":
        return torch.zeros_like(x)
    result = torch.zeros_like(x)
    if has_pixels(x):
        along_x, along_y = _derivatives(x)
        height, width = x.shape[-2:]
        options = {"dtype": torch.float64, "device": x.device}
        right = torch.arange(width, **options) - (width - 1) / 2  # type: ignore[call-overload]
        up = (height - 1) / 2 - torch.arange(height, **options)[:, None]  # type: ignore[call-overload]
        if transformation == "rotation":
            moved = up * along_x - right * along_y
        elif transformation == "translation":
            moved = -(direction[0] * along_x + direction[1] * along_y) / spacing
        else:
            moved = -(right * along_x + up * along_y)
        result = moved.to(x.dtype)
    if transformation != "rotation":
        return result
    if field_type.kind == "vector":
        return result + _mixed(x, np.array([[0.0, -1.0], [1.0, 0.0]]))
    if field_type.kind == "regular" and field_type.group is not None:
        slope = _slope(field_type.group.rotations)
        return result + _mixed(x, _blocks(field_type.group, slope))
    return result


def _derivatives(x: Tensor) -> tuple[Tensor, Tensor]:
    """∂x and ∂y (upwards) of the spline through the pixels, at the pixels."""
    down, across = (torch.from_numpy(_spline_slope(n)).to(x.device) for n in x.shape[-2:])
    wide = x.double()
    return wide @ across.T, -(down @ wide)


@lru_cache(maxsize=32)
def _spline_slope(size: int) -> FloatArray:
    """The matrix from pixels to the derivatives there of the quintic spline, mirrored outside."""
    slopes = np.zeros((size, size))
    pixels = np.arange(size)
    # The derivative of a B-spline is the difference of two of one degree less: B₅'(1) = −10/24,
    # B₅'(2) = −1/24, odd.
    for offset, slope in ((-2, -1 / 24), (-1, -10 / 24), (1, 10 / 24), (2, 1 / 24)):
        np.add.at(slopes, (pixels, _mirrored(pixels + offset, size)), slope)
    return slopes @ _spline_filter(size)


def _mixed(x: Tensor, matrix: FloatArray) -> Tensor:
    """The channels of each field times a matrix."""
    table = torch.from_numpy(matrix).to(x)
    apart = x.unflatten(1, (-1, len(matrix)))
    return torch.einsum("dc,bvc...->bvd...", table, apart).flatten(1, 2)


def _blocks(group: Group, matrix: FloatArray) -> FloatArray:
    """The same for the rotations and, where the group has them, for the reflections."""
    return np.kron(np.eye(group.order // group.rotations), matrix)


def _shift(count: int, steps: float) -> FloatArray:
    """The matrix that moves a trigonometric polynomial by so many of its samples."""
    if abs(steps - round(steps)) < 1e-12:  # without rounding
        return np.roll(np.eye(count), round(steps), axis=0)
    distance = np.subtract.outer(np.arange(count), np.arange(count)) - steps
    waves = np.ones_like(distance)
    for weight, frequency, phase in _waves(count, distance):
        waves += weight * np.cos(frequency * phase)
    return waves / count


def _slope(count: int) -> FloatArray:
    """The derivative of that in the angle, where it begins."""
    distance = np.subtract.outer(np.arange(count), np.arange(count)).astype(np.float64)
    waves = np.zeros_like(distance)
    for weight, frequency, phase in _waves(count, distance):
        waves += weight * frequency * np.sin(frequency * phase)
    return waves / count


def _waves(count: int, distance: FloatArray) -> list[tuple[float, int, FloatArray]]:
    """Weight, frequency and phase of all waves that so many samples hold, but for the constant."""
    phase = 2 * np.pi * distance / count
    # Of the highest frequency of an even count the samples know the cosine only.
    return [(1.0 if 2 * m == count else 2.0, m, phase) for m in range(1, count // 2 + 1)]
