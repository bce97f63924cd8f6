"""Orientations weighed against each other by what their features say."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.groups import Group, GroupLike
from econv.layers.checks import (
    check_factory,
    check_fields,
    check_filled,
    check_rank,
    positive,
    read_group,
)
from econv.layers.constants import WithConstants
from econv.tensors import memory_format

__all__ = [
    "GroupAttentionPool",
    "GroupAttentionPool2d",
    "GroupAttentionPool3d",
    "GroupFrameScore2d",
]


class GroupAttentionPool(WithConstants):
    """Pools over orientations by learned weights, in any number of dimensions."""

    dimension: int
    input_kind = "regular"
    output_kind = "scalar"
    places: Tensor

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fields = positive("fields", fields)
        self.group = read_group(group, self.dimension, type(self).__name__)
        check_factory(device, dtype)
        shape = (fields, self.group.order)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self._refresh_constants()
        self.reset_parameters()

    def _constants(self) -> dict[str, np.ndarray]:
        return {"places": np.asarray(self.group.product)}

    def _constants_like(self, name: str) -> Tensor:
        return self.weight

    def reset_parameters(self) -> None:
        """Let all orientations weigh the same."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor, scores: Tensor | float = 0.0) -> Tensor:
        """Pool ``[batch, fields * order, …]``, or ``[batch, fields * order]``.

        ``scores`` of the orientations, ``[batch, order]``, are added to the layer's own:
        :class:`GroupFrameScore2d` makes them of other maps.
        """
        check_rank(x, self.dimension, flat=True)
        maps = x.view(*x.shape, *[1] * self.dimension) if x.ndim == 2 else x
        check_fields(maps, self.fields, self.group, self.weight)
        pooled = weigh(x, self.weight, self.places, self.group.order, scores)
        return pooled if x.ndim == 2 else pooled.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.fields}, {self.group.name}"


class GroupAttentionPool2d(GroupAttentionPool):
    """Pools over orientations by a mean whose weights depend on the image.

    ``[batch, fields * order, …]`` → ``[batch, fields, …]``. A learned linear map of the features,
    averaged over pixels, gives every orientation a score, and a softmax over orientations the
    weights. Where one of them stands out, such as the one in which the image is upright, its
    features are what comes out; at initialisation all weigh the same.

    Args:
        fields: fields of the feature map.
        group: a :class:`~econv.Group` or its name.
        device: as in `Linear`.
        dtype: as in `Linear`.

    Raises:
        ValueError: for fields below 1 or a group of space; when called, for other channels, another
            dtype or device.

    >>> pool = GroupAttentionPool2d(4, "p8")
    >>> pool(torch.randn(2, 32, 8, 8)).shape, pool.weight.shape
    (torch.Size([2, 4, 8, 8]), torch.Size([4, 8]))
    """

    dimension = 2


class GroupAttentionPool3d(GroupAttentionPool):
    """Pools over the orientations of volumes by a mean whose weights depend on the volume.

    What :class:`GroupAttentionPool2d` is to images.

    Raises:
        ValueError: for fields below 1 or a group of the plane; when called, for other channels,
            another dtype or device.

    >>> GroupAttentionPool3d(2, "T")(torch.randn(2, 24, 4, 4, 4)).shape
    torch.Size([2, 2, 4, 4, 4])
    """

    dimension = 3


class GroupFrameScore2d(WithConstants):
    """Scores orientations by a linear map of coarse maps, each turned to its own frame.

    ``[batch, fields * order, height, width]`` → ``[batch, order]``. The map of every orientation is
    averaged to ``side`` × ``side`` cells and turned back by that orientation; all are then read by
    one set of weights. In the orientation in which the image is upright that is what a plain
    network sees of an upright image. At initialisation all scores are zero.

    Args:
        fields: fields of the feature map.
        group: a :class:`~econv.Group` or its name.
        side: cells along each side.
        device: as in `Linear`.
        dtype: as in `Linear`.

    Raises:
        ValueError: for fields or a ``side`` below 1, or a group of space; when called, for other
            channels, another dtype or device.

    >>> score = GroupFrameScore2d(4, "p4")
    >>> score(torch.randn(2, 16, 9, 9)).shape, score.weight.shape
    (torch.Size([2, 4]), torch.Size([4, 16]))
    """

    input_kind = "regular"
    output_kind = "regular"
    frames: Tensor

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        side: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fields, self.side = positive("fields", fields), positive("side", side)
        self.group = read_group(group, 2, type(self).__name__)
        check_factory(device, dtype)
        self.weight = nn.Parameter(torch.empty(fields, side * side, device=device, dtype=dtype))
        self._refresh_constants()
        self.reset_parameters()

    def _constants(self) -> dict[str, np.ndarray]:
        return {"frames": cells_in_frames(self.group, self.side)}

    def _constants_like(self, name: str) -> Tensor:
        return self.weight

    def reset_parameters(self) -> None:
        """Let all orientations score the same."""
        nn.init.zeros_(self.weight)

    def features(self, x: Tensor) -> Tensor:
        """What the weights read: ``[batch, order, fields, side * side]``."""
        cells = cells_of(x, self.side, self.group.order)
        return torch.einsum("nfap,aqp->nafq", cells, self.frames)

    def forward(self, x: Tensor) -> Tensor:
        """Score the orientations of ``[batch, fields * order, height, width]``."""
        check_fields(x, self.fields, self.group, self.weight)
        check_filled(x)
        return score(x, self.weight, self.frames, self.side)

    def extra_repr(self) -> str:
        return f"{self.fields}, {self.group.name}, side={self.side}"


def cells_in_frames(group: Group, side: int) -> np.ndarray:
    """How the cells in the frame of each orientation are made of those of the map.

    ``[order, side², side²]``: permutations for symmetries of the pixels, and linear interpolation
    for other elements; beyond the outermost cells their values are taken.
    """
    middle = (side - 1) / 2
    rows, columns = np.divmod(np.arange(side * side), side)
    places = np.stack([columns - middle, middle - rows])  # x to the right, y up
    turned = np.asarray(group.matrices) @ places
    found = np.zeros((group.order, side * side, side * side))
    for element, (x, y) in enumerate(turned):
        column, row = ((v + middle).round(9).clip(0, side - 1) for v in (x, -y))
        for down in (0, 1):
            for right in (0, 1):
                r, c = np.floor(row) + down, np.floor(column) + right
                weight = (1 - abs(row - r)) * (1 - abs(column - c))
                inside = weight > 0
                at = (r * side + c).astype(int)
                found[element, np.flatnonzero(inside), at[inside]] += weight[inside]
    return found


def cells_of(x: Tensor, side: int, order: int) -> Tensor:
    """Means over ``side`` × ``side`` cells of a map, ``[batch, fields, order, side²]``."""
    return functional.adaptive_avg_pool2d(x, side).flatten(2).unflatten(1, (-1, order))


def score(x: Tensor, weight: Tensor, frames: Tensor, side: int) -> Tensor:
    """What :class:`GroupFrameScore2d` computes."""
    turned = torch.einsum("fq,aqp->fap", weight, frames)
    return torch.einsum("nfap,fap->na", cells_of(x, side, len(frames)), turned)


def weigh(
    x: Tensor, weight: Tensor, places: Tensor, order: int, scores: Tensor | float = 0.0
) -> Tensor:
    """The mean of ``[batch, fields * order, …]`` over orientations, weighed.

    The score of A is the sum over fields and relative elements k of ``weight`` times the feature
    at A·k, whose index is ``places[A, k]``; other scores are added.
    """
    by_field = x.unsqueeze(-1).flatten(2).mean(2)
    relative = by_field.unflatten(1, (-1, order))[:, :, places]  # [batch, fields, A, k]
    own = (relative * weight[:, None]).sum((1, 3))
    weights = (own + scores).softmax(1)
    return torch.einsum("bfg...,bg->bf...", x.unflatten(1, (-1, order)), weights)
