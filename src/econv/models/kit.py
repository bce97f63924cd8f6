"""The parts of all networks: of a group, or ordinary ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from econv import layers
from econv.basis import INITIALISATIONS
from econv.groups import Group, GroupLike
from econv.layers import ConvOptions, LiftConv
from econv.layers.activations import GroupActivation, activation_module
from econv.layers.checks import read_group
from econv.layers.convolution import GroupConv
from econv.layers.orientations import GroupPool
from econv.layers.sampling import Downsample, Upsample

TORCH: dict[int, dict[str, Any]] = {
    2: {"conv": nn.Conv2d, "norm": nn.BatchNorm2d, "halving": nn.MaxPool2d},
    3: {"conv": nn.Conv3d, "norm": nn.BatchNorm3d, "halving": nn.MaxPool3d},
}


class Kit:
    """The parts of a network: of a group, or ordinary ones."""

    def __init__(
        self,
        group: GroupLike | None,
        pool: str | None,
        options: ConvOptions | None,
        activation: str,
        antialias: float,
        oversample: int,
        dimension: int | None,
        centred: bool = False,
        halves: bool = False,
    ) -> None:
        if not isinstance(dimension, int | None) or dimension not in (None, 2, 3):
            raise ValueError(f"expected dimension 2 or 3; got {dimension!r}")
        self.group = None if group is None else Group(group)
        self.dimension = dimension or (self.group.dimension if self.group else 2)
        if self.group is not None:
            read_group(self.group, self.dimension, "a network of this kind")
        self.centred = centred
        function = self._named("GroupActivation")(activation, oversample, antialias)
        self.name, self.oversample, self.antialias = activation, oversample, function.width
        self.halves = halves or self.antialias > 0
        self.reduce = pool
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"expected options as a mapping; got {options!r}")
        self.options: ConvOptions = {**(options or {})}
        if group is not None and activation in INITIALISATIONS:
            self.options.setdefault("init", activation)
        if {"device", "dtype"} & set(self.options):
            raise ValueError(
                "expected options of convolutions; move the network with .to() instead"
            )
        if self.group is None and (pool is not None or options):
            raise ValueError(
                "expected neither pool nor options without a group: an ordinary network has no "
                f"orientations; got pool={pool!r}, options={options!r}"
            )

    def of(self, group: GroupLike) -> Kit:
        """The same parts of another group."""
        found = copy.copy(self)
        found.group = read_group(group, self.dimension, "a network of this kind")
        return found

    @property
    def order(self) -> int:
        """Channels of each field."""
        return 1 if self.group is None else self.group.order

    @property
    def named_dimension(self) -> dict[str, int]:
        """The dimension, where no group tells it."""
        return {} if self.group or self.dimension == 2 else {"dimension": self.dimension}

    def _named(self, name: str) -> Any:
        """The layer of that name, for images or for volumes."""
        return getattr(layers, f"{name}{self.dimension}d")

    def activation(self) -> nn.Module:
        if not self.antialias:
            return activation_module(self.name)
        made: GroupActivation = self._named("GroupActivation")(
            self.name, self.oversample, self.antialias
        )
        return made

    def halving(self) -> Downsample:
        made: Downsample = self._named("Downsample")(antialias=8 if self.antialias else 4)
        return made

    def doubling(self) -> Upsample:
        made: Upsample = self._named("Upsample")(antialias=8 if self.antialias else 4)
        return made

    def apart(self, stride: int) -> tuple[nn.Module, int]:
        """What halves at the start of a block, and the stride that is left to its convolutions."""
        if stride == 1 or not self.antialias:
            return nn.Identity(), stride
        return self.halving(), 1

    @property
    def orientations(self) -> int:
        """How many channels of each field reach the classifier."""
        pool = self.pool()
        if isinstance(pool, GroupPool):
            return pool.outputs
        return 1 if self.group is None else self.group.order

    def lift(
        self,
        in_channels: int,
        fields: int,
        shrink: bool = False,
        size: int | None = None,
        stride: int = 1,
    ) -> nn.Module:
        if self.group is None:
            return plain_conv(self.dimension, in_channels, fields, size or 3, stride, shrink)
        options = self._strided(stride)
        if size is not None:
            options["size"] = size
        return _shrunk(self._named("LiftConv")(in_channels, fields, self.group, **options), shrink)

    def _strided(self, stride: int) -> ConvOptions:
        options: ConvOptions = {**self.options, "stride": stride}
        if self.centred and stride > 1:
            options["centred"] = True
        return options

    def conv(
        self, in_fields: int, out_fields: int, stride: int = 1, shrink: bool = False
    ) -> nn.Module:
        if self.group is None:
            return plain_conv(self.dimension, in_fields, out_fields, stride=stride, shrink=shrink)
        options = self._strided(stride)
        return _shrunk(
            self._named("GroupConv")(in_fields, out_fields, self.group, **options), shrink
        )

    def pointwise(self, in_fields: int, out_fields: int, stride: int) -> nn.Module:
        if self.group is None:
            return plain_conv(self.dimension, in_fields, out_fields, size=1, stride=stride)
        # 1×1: the paper's shortcuts are group convolutions with operators of order 0.
        options = self._strided(stride)
        options["operators"], options["size"] = "order<=0", 1
        made: GroupConv = self._named("GroupConv")(in_fields, out_fields, self.group, **options)
        return made

    def vectors(self, in_fields: int, out_vectors: int) -> nn.Module:
        made: nn.Module = self._named("VectorConv")(
            in_fields, out_vectors, self.group, **self.options
        )
        return made

    def norm(self, fields: int) -> nn.Module:
        if self.group is None:
            return TORCH[self.dimension]["norm"](fields)
        made: nn.Module = self._named("GroupBatchNorm")(fields, self.group)
        return made

    def pool(self) -> nn.Module:
        if self.group is None or self.reduce is None:
            return nn.Identity()
        made: GroupPool = self._named("GroupPool")(self.group, self.reduce)
        return made


def expect_whole(name: str, given: Any) -> None:
    """One whole number above 0, or for a name in the plural a sequence of them."""
    many = name in ("fields", "pooled_after")
    fits = not many or (isinstance(given, Sequence) and not isinstance(given, str))
    values: Any = (given if many else [given]) if fits else ()
    for value in values:
        fits &= not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1
    if not fits:
        what = "whole numbers" if many else "a whole number"
        raise ValueError(f"expected {name}: {what} of at least 1; got {given!r}")


def share_below_one(name: str, given: Any) -> float:
    """A probability below 1."""
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not 0 <= given < 1:
        raise ValueError(f"expected {name} as a number from 0 to below 1; got {given!r}")
    return float(given)


def expect_truth(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"expected {name} as True or False; got {value!r}")


def plain_conv(
    dimension: int,
    in_channels: int,
    out_channels: int,
    size: int = 3,
    stride: int = 1,
    shrink: bool = False,
) -> nn.Module:
    padding, kind = size // 2 - shrink, TORCH[dimension]["conv"]
    conv: Any = kind(in_channels, out_channels, size, stride, padding, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    made: nn.Module = conv
    return made


def _shrunk(conv: LiftConv | GroupConv, shrink: bool) -> nn.Module:
    """The convolution with one pixel less of padding: what is left of a valid 3×3 one."""
    if shrink:
        conv.padding -= 1
    return conv


def continued(x: Tensor, pixels: int, axes: tuple[int, ...]) -> Tensor:
    """Images on their background, the mean of their corners, so many pixels wide on every side.

    To repeat what is at the border would draw out whatever touches it when the image turns.

    >>> image = torch.tensor([[[[1.0, 9, 3], [9, 9, 9], [1, 9, 3]]]])
    >>> continued(image, 1, (2, 3))[0, 0, 0].tolist()
    [2.0, 2.0, 2.0, 2.0, 2.0]
    """
    corners = x
    for axis in axes:
        ends = corners.narrow(axis, 0, 1), corners.narrow(axis, -1, 1)
        corners = torch.cat(ends, axis)
    background = corners.mean(axes, keepdim=True)
    return functional.pad(x - background, (pixels, pixels) * len(axes)) + background


def expect_margin(given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(f"expected margin as a number of pixels, 0 or more; got {given!r}")
