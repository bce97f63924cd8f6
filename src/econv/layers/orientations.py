"""Layers that act on all orientations of a field alike: pooling, dropout, scales, subgroups."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.groups import Group, GroupLike
from econv.layers.checks import (
    check_factory,
    check_fields,
    check_multiple,
    check_rank,
    held,
    number,
    positive,
    read_group,
)
from econv.layers.constants import WithConstants
from econv.tensors import memory_format

__all__ = [
    "FieldParameter",
    "GroupDropout",
    "GroupDropout2d",
    "GroupDropout3d",
    "GroupPReLU",
    "GroupPReLU2d",
    "GroupPReLU3d",
    "GroupPool",
    "GroupPool2d",
    "GroupPool3d",
    "Restrict",
    "Restrict2d",
    "Restrict3d",
    "Spread",
    "Spread2d",
    "Spread3d",
    "restrict",
]


class GroupPool(nn.Module):
    """Pools over orientations, in any number of dimensions."""

    dimension: int
    input_kind = "regular"
    output_kind = "scalar"

    def __init__(self, group: GroupLike, reduce: str = "max") -> None:
        super().__init__()
        self.group = read_group(group, self.dimension, type(self).__name__)
        self._order = self.group.order
        self._read(reduce)

    def _read(self, reduce: str) -> None:
        self.statistics = read_statistics(reduce, self._order)
        self.reduce = reduce

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "statistics" not in state:  # pickled when there was but one
            self._read(self.reduce)

    @property
    def outputs(self) -> int:
        """How many channels a field becomes."""
        return sum(most or 1 for _, most in self.statistics)

    def forward(self, x: Tensor) -> Tensor:
        """Pool ``[batch, fields * order, …]``, or ``[batch, fields * order]``."""
        check_multiple(x, self.group, flat=True)
        pooled = pool_orientations(x, self._order, self.statistics)
        return pooled if x.ndim == 2 else pooled.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.group.name}, reduce={self.reduce!r}"


class GroupPool2d(GroupPool):
    """Pools over orientations: ``[batch, fields * order, …]`` → ``[batch, fields, …]``.

    What comes out is a stack of ordinary images that turn with the input. Several statistics say
    more of a field than one, and a classifier that reads few fields needs it: they are channels
    side by side, channel = field * ``outputs`` + statistic, and turn as exactly as one.

    Args:
        group: a group or its name.
        reduce: statistics of the orientations, joined by ``+``: ``"max"`` (default), ``"mean"``,
            ``"std"`` (the root mean square distance from the mean) and ``"top3"``, ``"top4"``, …
            (so many of the largest values, in order). ``"mean+max"`` gives two channels a field.

    Raises:
        ValueError: for a group of space or an unknown ``reduce``; when called, for channels that
            are not whole fields.

    >>> import torch
    >>> GroupPool2d("p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    >>> pool = GroupPool2d("p8", "mean+std+top2")
    >>> pool.outputs, pool(torch.randn(2, 32, 8, 8)).shape
    (4, torch.Size([2, 16, 8, 8]))
    """

    dimension = 2


class GroupPool3d(GroupPool):
    """Pools over the orientations of volumes, as :class:`GroupPool2d` does those of images.

    Raises:
        ValueError: for a group of the plane or an unknown ``reduce``; when called, for channels
            that are not whole fields.

    >>> import torch
    >>> GroupPool3d("O", "mean+max")(torch.randn(2, 3 * 24, 4, 4, 4)).shape
    torch.Size([2, 6, 4, 4, 4])
    """

    dimension = 3


def read_statistics(
    reduce: str, order: int, argument: str = "reduce"
) -> tuple[tuple[str, int], ...]:
    """The statistics that ``reduce`` names, with how many values of those that have several."""
    names = reduce.split("+") if isinstance(reduce, str) else [""]
    found: list[tuple[str, int]] = []
    for name in names:
        top = re.fullmatch(r"top([1-9][0-9]*)", name, re.ASCII)
        if (top is None and name not in ("max", "mean", "std")) or names.count(name) > 1:
            raise ValueError(
                f"expected {argument} as 'max', 'mean', 'std' or 'top2', 'top3', …, or several of "
                f"them, joined by '+'; got {reduce!r}"
            )
        if top is not None and int(top[1]) > order:
            raise ValueError(
                f"expected {argument} of at most top{order} for {order} orientations; "
                f"got {reduce!r}"
            )
        found.append((name, 0) if top is None else ("top", int(top[1])))
    return tuple(found)


def pool_orientations(x: Tensor, order: int, statistics: tuple[tuple[str, int], ...]) -> Tensor:
    """The statistics of ``[batch, fields * order, …]`` over orientations, side by side."""
    apart = x.unflatten(1, (-1, order))
    if len(statistics) == 1 and not statistics[0][1]:
        return _statistic(apart, order, statistics[0][0])
    parts = [
        apart.topk(most, dim=2).values if most else _statistic(apart, order, name).unsqueeze(2)
        for name, most in statistics
    ]
    return torch.cat(parts, 2).flatten(1, 2)


def _statistic(apart: Tensor, order: int, name: str) -> Tensor:
    if name == "mean":
        return apart.mean(2)
    if name == "std":
        # Not `std`: its gradient is not a number where all orientations are equal.
        distance = torch.linalg.vector_norm(apart - apart.mean(2, keepdim=True), dim=2)
        return distance * order**-0.5
    # Not `amax`: its gradient compares numbers with their maximum, and a compiled network in
    # bfloat16 computes them anew without rounding, finds none equal and divides 0 by 0.
    return apart.max(2).values


class GroupDropout(nn.Module):
    """Drops whole fields, in any number of dimensions."""

    dimension: int
    input_kind = "regular"
    output_kind = "regular"

    def __init__(self, group: GroupLike, p: float = 0.5) -> None:
        super().__init__()
        self.group = read_group(group, self.dimension, type(self).__name__)
        self._order = self.group.order
        if not isinstance(p, float | int) or not 0.0 <= p <= 1.0:
            raise ValueError(f"expected a probability p between 0 and 1; got {p!r}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop fields of ``[batch, fields * order, …]`` in train mode."""
        check_multiple(x, self.group)
        fields = x.unflatten(1, (-1, self._order)).flatten(3, -2)  # torch knows no fourth axis
        return functional.dropout3d(fields, self.p, self.training).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"{self.group.name}, p={self.p}"


class GroupDropout2d(GroupDropout):
    """Drops whole fields: all orientations and pixels of a field together.

    ``[batch, fields * order, height, width]`` in and out; in eval mode the input itself.

    Raises:
        ValueError: for a group of space, or a ``p`` that is not between 0 and 1; when called, for
            channels that are not whole fields.

    >>> import torch
    >>> GroupDropout2d("p8", p=0.2).eval()(torch.ones(1, 16, 4, 4)).sum().item()
    256.0
    """

    dimension = 2


class GroupDropout3d(GroupDropout):
    """Drops whole fields of volumes: all orientations and voxels of a field together.

    Raises:
        ValueError: for a group of the plane, or a ``p`` that is not between 0 and 1; when called,
            for channels that are not whole fields.

    >>> import torch
    >>> GroupDropout3d("T", p=0.2).eval()(torch.ones(1, 12, 2, 2, 2)).sum().item()
    96.0
    """

    dimension = 3


class Spread(nn.Module):
    """Reads a map as group features that are alike, in any number of dimensions."""

    dimension: int
    input_kind = "scalar"
    output_kind = "regular"

    def __init__(self, group: GroupLike) -> None:
        super().__init__()
        self.group = read_group(group, self.dimension, type(self).__name__)
        self._order = self.group.order

    def forward(self, x: Tensor) -> Tensor:
        """Spread ``[batch, channels, …]``, or ``[batch, channels]``."""
        check_rank(x, self.dimension, flat=True)
        spread = x.repeat_interleave(self._order, dim=1)
        return spread if x.ndim == 2 else spread.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return self.group.name


class Spread2d(Spread):
    """Reads an image as group features that are the same in every orientation.

    ``[batch, channels, …]`` → ``[batch, channels * order, …]``: what an image needs to be added or
    concatenated to group features.

    Raises:
        ValueError: for a group of space; when called, for what is no batch of maps or of features.

    >>> import torch
    >>> Spread2d("p8")(torch.randn(2, 3, 4, 4)).shape
    torch.Size([2, 24, 4, 4])
    """

    dimension = 2


class Spread3d(Spread):
    """Reads a volume as group features that are the same in every orientation.

    Raises:
        ValueError: for a group of the plane; when called, for what is no batch of maps or of
            features.

    >>> import torch
    >>> Spread3d("O")(torch.randn(2, 3, 4, 4, 4)).shape
    torch.Size([2, 72, 4, 4, 4])
    """

    dimension = 3


class FieldParameter(nn.Module):
    """One learned number per field, as a tensor that broadcasts to the channels of group features.

    ``[fields * order, 1, 1]``, for volumes ``[fields * order, 1, 1, 1]``, or ``[fields * order]``
    for features without pixels: the scale that ConvNeXt puts on its branches, made equivariant.

    Raises:
        ValueError: for fields below 1, an unknown group, or an ``initial`` that is not finite.

    >>> import torch
    >>> scale = FieldParameter(4, "p8", initial=1e-6)
    >>> (scale() * torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        initial: float = 1.0,
        pixels: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fields = positive("fields", fields)
        self.group = Group(group)
        self.initial = number("initial", initial)
        self.pixels = pixels
        self._order = self.group.order
        check_factory(device, dtype)
        self.weight = nn.Parameter(torch.empty(fields, device=device, dtype=dtype))
        held("initial", self.initial, self.weight.dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every number to the initial one."""
        nn.init.constant_(self.weight, self.initial)

    def forward(self) -> Tensor:
        """The numbers by channel."""
        by_channel = self.weight[:, None].expand(-1, self._order).flatten()
        return by_channel.view(-1, *[1] * self.group.dimension) if self.pixels else by_channel

    def extra_repr(self) -> str:
        return f"{self.fields}, {self.group.name}, initial={self.initial}, pixels={self.pixels}"


class GroupPReLU(nn.Module):
    """`PReLU` with one slope per field, in any number of dimensions."""

    dimension: int
    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        init: float = 0.25,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fields = positive("fields", fields)
        self.group = read_group(group, self.dimension, type(self).__name__)
        self.init = number("init", init)
        self._order = self.group.order
        check_factory(device, dtype)
        self.weight = nn.Parameter(torch.empty(fields, device=device, dtype=dtype))
        held("init", self.init, self.weight.dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every slope to the initial one."""
        nn.init.constant_(self.weight, self.init)

    def forward(self, x: Tensor) -> Tensor:
        """Bend ``[batch, fields * order, …]``."""
        check_fields(x, self.fields, self.group, self.weight)
        slopes = self.weight[:, None].expand(-1, self._order).flatten()
        return functional.prelu(x, slopes.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.fields}, {self.group.name}, init={self.init}"


class GroupPReLU2d(GroupPReLU):
    """`PReLU` with one slope per *field*.

    ``[batch, fields * order, height, width]`` in and out.

    Raises:
        ValueError: for fields below 1 or a group of space; when called, for other channels, another
            dtype or device.

    >>> import torch
    >>> GroupPReLU2d(4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

    dimension = 2


class GroupPReLU3d(GroupPReLU):
    """`PReLU` with one slope per *field* of volumes.

    Raises:
        ValueError: for fields below 1 or a group of the plane; when called, for other channels,
            another dtype or device.

    >>> import torch
    >>> GroupPReLU3d(2, "T")(torch.randn(2, 24, 4, 4, 4)).shape
    torch.Size([2, 24, 4, 4, 4])
    """

    dimension = 3


class Restrict(WithConstants):
    """:func:`restrict` as a module, in any number of dimensions."""

    dimension: int
    places: Tensor

    def __init__(self, group: GroupLike, subgroup: GroupLike) -> None:
        super().__init__()
        self.whole = read_group(group, self.dimension, type(self).__name__)
        self.subgroup = read_group(subgroup, self.dimension, type(self).__name__)
        self._refresh_constants()

    def _constants(self) -> dict[str, np.ndarray]:
        return {"places": self.whole.cosets(self.subgroup).ravel()}

    def forward(self, x: Tensor) -> Tensor:
        """Read ``[batch, fields * group.order, …]`` as features of the subgroup."""
        check_multiple(x, self.whole)
        by_orientation = x.unflatten(1, (-1, self.whole.order))
        chosen = by_orientation.index_select(2, self.places).flatten(1, 2)
        return chosen.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.whole.name}, {self.subgroup.name}"


class Restrict2d(Restrict):
    """:func:`restrict` as a module.

    ``[batch, fields * order, …]`` in and out: more fields, of a smaller order. Its input turns
    as features of ``whole``, its output as features of ``subgroup``; for the
    elements of the subgroup it commutes with both.

    Raises:
        ValueError: for a second group that is not part of the first; when called, for channels that
            are not whole fields.

    >>> Restrict2d("p8", "p4")(torch.randn(1, 3 * 8, 5, 5)).shape  # 6 fields of p4
    torch.Size([1, 24, 5, 5])
    """

    dimension = 2


class Restrict3d(Restrict):
    """:func:`restrict` as a module, for volumes.

    Raises:
        ValueError: for a second group that is not part of the first; when called, for channels that
            are not whole fields.

    >>> import torch
    >>> Restrict3d("O", "T")(torch.randn(2, 24, 4, 4, 4)).shape
    torch.Size([2, 24, 4, 4, 4])
    """

    dimension = 3


def restrict(x: Tensor, group: GroupLike, subgroup: GroupLike) -> Tensor:
    """Read group features as features of a subgroup T, with |S| / |T| times as many fields.

    Field (f, c) of the result holds, for t in T, the orientation t·c of field f: the right cosets
    Tc, each of which T permutes as it permutes itself.

    Raises:
        ValueError: for a second group that is not part of the first, and channels that are not
            whole fields.

    >>> import torch
    >>> x = torch.arange(8.0).reshape(1, 8, 1, 1)
    >>> restrict(x, "p8", "p4").flatten().tolist()
    [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]
    """
    kind = {2: Restrict2d, 3: Restrict3d}[Group(group).dimension]
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a tensor of group features; got {type(x).__name__}")
    result: Tensor = kind(group, subgroup).to(x.device)(x)
    return result
