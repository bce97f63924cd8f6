"""Functions of single numbers: the same in every channel, so that equivariance survives them.

A function of single numbers makes frequencies that the pixel grid cannot hold, and that no stencil
can turn: kinks most of all. :class:`GroupActivation2d` takes away what the grid holds badly.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from econv.layers.blur import mean_of_pixels
from econv.layers.checks import check_filled, check_rank
from econv.layers.constants import WithConstants
from econv.layers.slices import by_slices
from econv.tensors import memory_format

__all__ = [
    "ACTIVATIONS",
    "GroupActivation",
    "GroupActivation2d",
    "GroupActivation3d",
    "activation_module",
    "group_activation",
]

ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
)
"""Modules of torch that act on every number alone and learn nothing."""

_NAMES: dict[str, type[nn.Module]] = {kind.__name__.lower(): kind for kind in ACTIVATIONS}

_HALVES: dict[int, dict[int, tuple[tuple[int, ...], ...]]] = {
    2: {1: ((0, 0),), 2: ((0, 0), (1, 1)), 4: ((0, 0), (1, 1), (0, 1), (1, 0))},
    3: {
        1: ((0, 0, 0),),
        2: ((0, 0, 0), (1, 1, 1)),
        4: ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)),
        8: tuple(itertools.product((0, 1), repeat=3)),
    },
}
"""The grids that points lie on, by the dimension and how many points there are for each pixel: half
a pixel along which axes."""

Function = Callable[[Tensor], Tensor]


class GroupActivation(WithConstants):
    """A function of single numbers and a blur, in any number of dimensions."""

    dimension: int
    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        activation: str | Function = "silu",
        oversample: int = 1,
        width: float = 0.7,
    ) -> None:
        super().__init__()
        self.function = activation_module(activation)
        self.oversample = _read_oversample(oversample, self.dimension)
        self.width = _read_width(width, self.oversample)
        self._refresh_constants()

    def _constants(self) -> dict[str, np.ndarray]:
        return _line_weights(self.oversample, self.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to ``[batch, channels, …]``."""
        check_rank(x, self.dimension)
        check_filled(x)
        lines = dict(self.named_buffers(recurse=False))
        out = limited(x, self.function, self.oversample, self.width, lines, self.dimension)
        return out.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return f"oversample={self.oversample}, width={self.width:g}"


class GroupActivation2d(GroupActivation):
    """A function of single numbers whose result the pixel grid can hold, and so can turn.

    The map is blurred by a Gaussian of ``width`` pixels after the function. With ``oversample``
    above 1 half of that blur (in variance) comes before it, and the function acts on a finer grid,
    on which the blurred map is known just as well; what it makes is blurred again on the way back.
    A Gaussian is the same in all directions, so that this turns as the map does.

    After six layers of p8 the error at 45° is a small fraction of the plain function's
    (``benchmarks/depth.py``; docs/choosing.md has the table). Quarter turns and flips are exact on
    every size. At borders a mean is one of the pixels that there are: constant maps stay constant.

    Args:
        activation: the name of a module in `torch.nn` that acts on every number alone, such as
            ``"silu"`` (default), or a callable that does.
        oversample: points for each pixel: 1 (default), 2 for a second grid half a pixel down and
            to the right, or 4 for a grid twice as fine along both axes. Smooth functions gain
            nothing from 4, functions with a kink, as ``"relu"``, do.
        width: standard deviation of the blur in pixels, 0.7 by default; 0 for none, where
            ``oversample`` is 1.

    Raises:
        ValueError: for an unknown activation, ``oversample`` other than 1, 2 or 4, or a width that
            is not between 0 and 4; when called, for what is not ``[batch, channels, height,
            width]``.

    >>> silu = GroupActivation2d("silu")
    >>> silu(torch.randn(2, 6 * 8, 16, 16)).shape
    torch.Size([2, 48, 16, 16])
    >>> softplus = GroupActivation2d("softplus", oversample=2)
    >>> bool((softplus(torch.zeros(1, 8, 5, 5)) - math.log(2)).abs().max() < 1e-6)
    True
    """

    dimension = 2


class GroupActivation3d(GroupActivation):
    """A function of single numbers whose result the voxel grid can hold, and so can turn.

    What :class:`GroupActivation2d` is to images, exact under the symmetries of the cube on every
    size. ``oversample`` may be 1, 2 (a second grid half a voxel off along all axes), 4 (grids half
    a voxel off along two axes each) or 8 (a grid twice as fine).

    Raises:
        ValueError: for an unknown activation, ``oversample`` other than 1, 2, 4 or 8, or a width
            that is not between 0 and 4; when called, for what is not ``[batch, channels, depth,
            height, width]``.

    >>> silu = GroupActivation3d("silu", oversample=2)
    >>> silu(torch.randn(2, 24, 6, 6, 6)).shape
    torch.Size([2, 24, 6, 6, 6])
    """

    dimension = 3


def group_activation(
    x: Tensor, activation: str | Function = "silu", oversample: int = 1, width: float = 0.7
) -> Tensor:
    """What :class:`GroupActivation2d` computes, or of volumes :class:`GroupActivation3d`.

    Raises:
        ValueError: for an unknown activation, ``oversample`` or width, and for what is no batch of
            maps.

    >>> group_activation(torch.randn(1, 8, 9, 9), torch.sin, oversample=2).shape
    torch.Size([1, 8, 9, 9])
    """
    dimension = 3 if getattr(x, "ndim", 4) == 5 else 2
    check_rank(x, dimension)
    check_filled(x)
    function = activation_module(activation)
    oversample = _read_oversample(oversample, dimension)
    width = _read_width(width, oversample)
    weights = _line_weights(oversample, width)
    lines = {name: torch.from_numpy(w).to(x.device, x.dtype) for name, w in weights.items()}
    out = limited(x, function, oversample, width, lines, dimension)
    return out.contiguous(memory_format=memory_format(x))


def activation_module(activation: str | Function) -> nn.Module:
    """The module of that name, or one that calls the function.

    >>> activation_module("relu")
    ReLU()
    """
    if isinstance(activation, str):
        found = _NAMES.get(activation.lower())
        if found is None:
            raise ValueError(
                f"unknown activation {activation!r}: expected one of {', '.join(sorted(_NAMES))}, "
                "or a function of a tensor"
            )
        return found()
    if isinstance(activation, nn.Module):
        return activation
    if inspect.isclass(activation) or not callable(activation):
        raise ValueError(
            "expected activation as a name of torch.nn, such as 'silu', or as a function of a "
            f"tensor; got {activation!r}"
        )
    return _Function(activation)


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def _read_oversample(given: object, dimension: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given not in _HALVES[dimension]:
        *some, most = map(str, _HALVES[dimension])
        raise ValueError(
            f"expected oversample as {', '.join(some)} or {most} points for each pixel; "
            f"got {given!r}"
        )
    return given


def _read_width(given: object, oversample: int) -> float:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not 0 <= given <= 4 or (given == 0 and oversample > 1):  # type: ignore[operator]
        least = "0" if oversample == 1 else "above 0"
        raise ValueError(f"expected width from {least} to 4 pixels; got {given!r}")
    return float(given)  # type: ignore[arg-type]


def _counts(oversample: int, width: float) -> dict[str, int]:
    """Taps of the Gaussian along an axis: ``even`` ones on pixels, ``odd`` ones between them."""
    if width == 0:
        return {}
    reach = 2.5 * _each(oversample, width)
    on_pixels = {"even": 2 * math.ceil(reach) + 1}
    return on_pixels if oversample == 1 else {**on_pixels, "odd": 2 * math.ceil(reach + 0.5)}


def _each(oversample: int, width: float) -> float:
    """The width of one blur, of which there are two where the grid is finer."""
    return width if oversample == 1 else width / math.sqrt(2)


def _line_weights(oversample: int, width: float) -> dict[str, np.ndarray]:
    found = {}
    for name, count in _counts(oversample, width).items():
        places = np.arange(count) - (count - 1) / 2
        weights = np.exp(-((places / _each(oversample, width)) ** 2) / 2)
        found[name] = weights / weights.sum()
    return found


def limited(
    x: Tensor,
    function: Function,
    oversample: int,
    width: float,
    lines: dict[str, Tensor],
    dimension: int = 2,
) -> Tensor:
    """What :class:`GroupActivation2d` computes, in operations that any tracer can follow."""
    if width == 0:
        return function(x)
    counts = _counts(oversample, width)
    grids = _HALVES[dimension][oversample]
    if oversample == 1:
        return _blurred(function(x), lines, counts, grids[0], 0)
    parts = []
    for halves in grids:
        points = _blurred(x, lines, counts, halves, 0)
        parts.append(_blurred(function(points), lines, counts, halves, 1))
    return sum(parts[1:], parts[0]) / oversample


def _blurred(
    x: Tensor,
    lines: dict[str, Tensor],
    counts: dict[str, int],
    halves: tuple[int, ...],
    back: int,
) -> Tensor:
    """Weighted means of pixels, of those that there are.

    Along an axis that is a ``half`` between them, n of them have n + 1, and with ``back`` n + 1
    have n.
    """
    names = ["odd" if half else "even" for half in halves]
    taps = [counts[name] for name in names]
    pads = [count // 2 - half * back for count, half in zip(taps, halves, strict=True)]
    weights = [lines[name] for name in names]

    def across(x: Tensor) -> Tensor:
        window = ((taps[-2], taps[-1]), (pads[-2], pads[-1]))
        return mean_of_pixels(x, weights[-2], weights[-1], *window)

    def along(x: Tensor) -> Tensor:
        return mean_of_pixels(x, weights[0], weights[0].new_ones(1), (taps[0], 1), (pads[0], 0))

    return by_slices(x, len(halves), across, along)
