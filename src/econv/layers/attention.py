"""Orientations weighed against each other by what their features say."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from econv.engines import memory_format
from econv.groups import Group, GroupLike
from econv.layers.checks import check_fields, positive
from econv.layers.constants import WithConstants

__all__ = ["GroupAttentionPool2d"]


class GroupAttentionPool2d(WithConstants):
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

    >>> pool = GroupAttentionPool2d(4, "p8")
    >>> pool(torch.randn(2, 32, 8, 8)).shape, pool.weight.shape
    (torch.Size([2, 4, 8, 8]), torch.Size([4, 8]))
    """

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
        self.group = Group(group)
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

    def forward(self, x: Tensor) -> Tensor:
        """Pool ``[batch, fields * order, height, width]``, or ``[batch, fields * order]``."""
        check_fields(
            x[:, :, None, None] if x.ndim == 2 else x, self.fields, self.group, self.weight
        )
        pooled = weigh(x, self.weight, self.places, self.group.order)
        return pooled if x.ndim == 2 else pooled.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.fields}, {self.group.name}"


def weigh(x: Tensor, weight: Tensor, places: Tensor, order: int) -> Tensor:
    """The mean of ``[batch, fields * order, …]`` over orientations, weighed.

    The score of A is the sum over fields and relative elements k of ``weight`` times the feature
    at A·k, whose index is ``places[A, k]``.
    """
    by_field = x.unsqueeze(-1).flatten(2).mean(2)
    relative = by_field.unflatten(1, (-1, order))[:, :, places]  # [batch, fields, A, k]
    weights = (relative * weight[:, None]).sum((1, 3)).softmax(1)
    return torch.einsum("bfg...,bg->bf...", x.unflatten(1, (-1, order)), weights)
