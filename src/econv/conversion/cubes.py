"""Kernels, strides and factors whose sides differ, as cubes of about as many voxels.

Networks of videos, and of scans with thick slices, treat one axis of a volume apart: kernels of
3×7×7, strides of 1×2×2. Layers here have one size for all axes, which rotations exchange. What has
several is replaced before the network is traced, so that all sizes of the traced pass are those of
the cubes. This module knows modules and nothing of groups.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from econv.engines.problem import times

__all__ = ["with_cubes"]


def with_cubes(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """A copy of a network without sides that differ, and what was replaced; itself if nothing is.

    A kernel keeps its output's size, relative to the stride, where that is the same for all axes.

    >>> stem = nn.Conv3d(3, 8, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3))
    >>> with_cubes(nn.Sequential(stem))[1]
    ['0: 3×7×7, stride 1×2×2 → 5×5×5, stride 2']
    >>> plain = nn.Sequential(nn.Conv3d(3, 8, 3))
    >>> with_cubes(plain)[0] is plain
    True
    """
    cubes = {name: _cube(module) for name, module in model.named_modules(remove_duplicate=False)}
    found = {name: cube for name, cube in cubes.items() if cube is not None}
    if not found:
        return model, []
    made: dict[int, Any] = {}
    notes = []
    for name, cube in found.items():
        source = model.get_submodule(name)
        if id(source) not in made:
            made[id(source)] = cube
            notes.append(f"{name}: {_sides(source)} → {_sides(cube)}")
    return copy.deepcopy(model, made), notes  # which takes what is made already in its place


def _cube(module: nn.Module) -> nn.Module | None:
    """What has the same size along all axes in place of a module; nothing where it has already."""
    for kind, make in _KINDS:
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return make(module)
    return None


def _convolution(module: Any) -> nn.Module | None:
    sides = (module.kernel_size, module.stride, module.dilation)
    padding = (0, 0, 0) if isinstance(module.padding, str) else module.padding
    if all(len(set(each)) == 1 for each in (*sides, padding)):
        return None
    transposed = isinstance(module, nn.ConvTranspose3d)
    stride, dilation = _side(module.stride), _side(module.dilation)
    more = module.output_padding if transposed else (0, 0, 0)
    if transposed:  # the output's size over `stride` times the input's
        numbers = (module.kernel_size, module.dilation, module.stride, padding, more)
        excess = {d * (k - 1) + 1 - s - 2 * p + m for k, d, s, p, m in zip(*numbers, strict=True)}
    elif not any(padding):
        excess = {0}
    else:
        windows = zip(module.kernel_size, module.dilation, padding, strict=True)
        excess = {2 * p - d * (k - 1) for k, d, p in windows}
    if len(excess) > 1:
        return None  # its rule says what is wrong
    rest, pads = excess.pop(), transposed or any(padding)

    def padded(kernel: int) -> int:
        reach = dilation * (kernel - 1)
        return reach + 1 - stride - rest if transposed else (rest + reach if pads else 0)

    fits = [k for k in _near(module.kernel_size) if padded(k) >= 0 and padded(k) % 2 == 0]
    if not fits:
        return None
    options = {
        "stride": stride,
        "padding": module.padding if isinstance(module.padding, str) else padded(fits[0]) // 2,
        "dilation": dilation,
        "groups": module.groups,
        "bias": module.bias is not None,
        "padding_mode": module.padding_mode,
        "device": module.weight.device,
        "dtype": module.weight.dtype,
    }
    kind = nn.ConvTranspose3d if transposed else nn.Conv3d
    made = kind(module.in_channels, module.out_channels, fits[0], **options)
    with torch.no_grad():
        made.weight.copy_(_about_centre(module.weight, fits[0]))
        if module.bias is not None and made.bias is not None:
            made.bias.copy_(module.bias)
    return made.train(module.training)


def _pooling(module: Any) -> nn.Module | None:
    names = ("kernel_size", "stride", "padding", "dilation")
    given = {name: _three(getattr(module, name)) for name in names if hasattr(module, name)}
    if all(len(set(each)) == 1 for each in given.values()):
        return None
    kernel, padding = _side(given["kernel_size"]), given["padding"]
    if any(padding):
        # As many voxels beyond the border as the windows have on one side of their middle.
        if any(2 * p != k - 1 for p, k in zip(padding, given["kernel_size"], strict=True)):
            return None
        kernel = next(k for k in _near(given["kernel_size"]) if k % 2)
    made = copy.copy(module)
    made.kernel_size, made.stride = kernel, _side(given["stride"])
    made.padding = kernel // 2 if any(padding) else 0
    if "dilation" in given:
        made.dilation = _side(given["dilation"])
    return made


def _upsampling(module: Any) -> nn.Module | None:
    factor = module.scale_factor
    if not isinstance(factor, tuple) or len(set(factor)) == 1:
        return None
    made = copy.copy(module)
    made.scale_factor = float(max(1, round(math.prod(factor) ** (1 / len(factor)))))
    return made


_KINDS: tuple[tuple[type[nn.Module], Any], ...] = (
    (nn.Conv3d, _convolution),
    (nn.ConvTranspose3d, _convolution),
    (nn.MaxPool3d, _pooling),
    (nn.AvgPool3d, _pooling),
    (nn.Upsample, _upsampling),
)


def _three(given: Any) -> tuple[int, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,) * 3


def _near(sizes: Any) -> list[int]:
    """Whole numbers near the side of a cube of the same volume, nearest first."""
    mean = math.prod(sizes) ** (1 / len(sizes))
    step = 2 if all(n % 2 for n in sizes) else 1  # odd ones have a middle
    return sorted(range(1, max(sizes) + 1, step), key=lambda n: abs(math.log(n / mean)))


def _side(sizes: Any) -> int:
    return int(sizes[0]) if len(set(sizes)) == 1 else _near([*map(int, sizes)])[0]


def _about_centre(weight: torch.Tensor, size: int) -> torch.Tensor:
    """A kernel cut or padded about its middle to a cube."""
    for axis in range(2, weight.ndim):
        lacking = size - weight.shape[axis]
        before = abs(lacking) // 2
        if lacking < 0:
            weight = weight.narrow(axis, before, size)
        elif lacking:
            sides = [0, 0] * (weight.ndim - 1 - axis) + [before, lacking - before]
            weight = nn.functional.pad(weight, sides)
    return weight


def _sides(module: Any) -> str:
    """The kernel and the stride of a module in words, or its factor."""
    if isinstance(module, nn.Upsample):
        return f"factor {'×'.join(f'{n:g}' for n in _three(module.scale_factor))}"
    kernel, stride = _three(module.kernel_size), _three(module.stride)
    text = times(kernel)
    if set(stride) == {1}:
        return text
    return f"{text}, stride {stride[0] if len(set(stride)) == 1 else times(stride)}"
