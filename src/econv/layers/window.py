"""A group convolution whose map is one window, as derivatives of the map and one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from econv.engines.problem import times
from econv.groups import GroupLike
from econv.layers.convolution import ConvOptions, GroupConv, GroupConv2d, GroupConv3d
from econv.tensors import without_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GroupWindowConv", "GroupWindowConv2d", "GroupWindowConv3d", "jets"]


class GroupWindowConv(GroupConv):
    """What :class:`GroupWindowConv2d` and :class:`GroupWindowConv3d` share.

    Raises:
        ValueError: as :class:`GroupWindowConv2d`.
        TypeError: for a keyword that there is not, such as ``kernel_size``.
    """

    def __init__(
        self,
        in_fields: int,
        out_fields: int,
        group: GroupLike,
        **options: Unpack[ConvOptions],
    ) -> None:
        options.setdefault("padding", "valid")
        super().__init__(in_fields, out_fields, group, **options)
        found = {"stride": self.stride, "padding": self.padding, "groups": self.groups}
        if found != {"stride": 1, "padding": 0, "groups": 1}:
            raise ValueError(f"expected one window: no stride, padding or groups; got {found}")
        # For every A the places A·k of the relative elements k: numbers, which compilers follow.
        self.places: list[list[int]] = self.group.product.tolist()

    def forward(self, x: Tensor) -> Tensor:
        """Read ``[batch, in_fields * order, size, size]``, or volumes of one axis more."""
        x = self.read(x)
        window = (self.basis.size,) * self.dimension
        if not torch.compiler.is_compiling() and tuple(x.shape[2:]) != window:
            points = "pixels" if self.dimension == 2 else "voxels"
            raise ValueError(
                f"expected a map of one window, {times(window)} {points}; got {times(x.shape[2:])}"
            )
        with without_autocast(self.weight.device):  # derivatives carry the accuracy
            found = jets(x.to(self.weight.dtype), self._weight().tables[0], self.places)
        found = functional.linear(found, self.weight.flatten(1))  # [batch, A, out]
        found = found.transpose(1, 2).flatten(1)
        bias = self._channel_bias()
        if bias is not None:
            found = found + bias
        return found.view(*found.shape, *[1] * self.dimension)

    def multiply_adds(self) -> int:
        """Multiplications for one map."""
        pixels = self.basis.size**self.dimension
        derivatives = self.in_channels * len(self.basis.operators) * pixels
        return self._order * (self.weight.numel() + derivatives)


class GroupWindowConv2d(GroupWindowConv, GroupConv2d):
    """A :class:`~econv.GroupConv2d` that reads a whole map at once, ``[batch, out, 1, 1]``.

    What `Flatten` and `Linear` are to ordinary networks. Arguments, weight and result are those of
    a `GroupConv2d` with ``padding="valid"``, which is the default here; derivatives come
    first and the weight meets them as it is. Filters, ``order · size² / operators`` times as many
    numbers as the weight, are never made.

    Raises:
        ValueError: for a stride, padding or ``groups``, and what :class:`~econv.GroupConv2d`
            refuses; when called, for maps that are not one window large.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> whole = GroupWindowConv2d(4, 6, "p8", operators="order<=2")
    >>> whole(torch.randn(2, 4 * 8, 3, 3)).shape
    torch.Size([2, 48, 1, 1])
    """


class GroupWindowConv3d(GroupWindowConv, GroupConv3d):
    """:class:`GroupWindowConv2d` for volumes, ``[batch, out, 1, 1, 1]``.

    Raises:
        ValueError: for a stride, padding or ``groups``, and what :class:`~econv.GroupConv3d`
            refuses; when called, for maps that are not one window large.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> whole = GroupWindowConv3d(2, 3, "T")
    >>> whole(torch.randn(2, 2 * 12, 3, 3, 3)).shape
    torch.Size([2, 36, 1, 1, 1])
    """


def jets(x: Tensor, synthesis: Tensor, places: list[list[int]]) -> Tensor:
    """What every orientation A reads, ``[batch, A, (field, k, operator)]``.

    Of the maps ``[batch, fields * order, size, …]``, the relative ones k in the order of A,
    each operator of ``synthesis``, ``[operators, order, pixels]``, turned to A.
    """
    order = len(places)
    pixels = x.reshape(x.shape[0], x.shape[1] // order, order, synthesis.shape[-1])
    read = [
        functional.linear(pixels[:, :, place], synthesis[:, frame]).flatten(1)
        for frame, place in enumerate(places)
    ]
    return torch.stack(read, 1)
