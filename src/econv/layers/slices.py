"""What acts on images, along one axis or both, for volumes: on every slice, then along depth."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["by_slices"]


def by_slices(
    x: Tensor,
    dimension: int,
    across: Callable[[Tensor], Tensor],
    along: Callable[[Tensor], Tensor],
) -> Tensor:
    """``across`` of images; of volumes ``across`` of every slice, and then ``along``.

    Both take images ``[batch, channels, height, width]`` and treat channels alike. What is given to
    the second has the depth of a volume as its height, and all pixels of a slice side by side.

    >>> import torch
    >>> means = (lambda x: x.mean((2, 3), keepdim=True)), (lambda x: x.mean(2, keepdim=True))
    >>> by_slices(torch.arange(8.0).view(1, 1, 2, 2, 2), 3, *means).flatten().tolist()
    [3.5]
    """
    if dimension == 2:
        return across(x)
    slices = across(x.flatten(1, 2)).unflatten(1, (x.shape[1], x.shape[2]))
    found = along(slices.flatten(3, 4))
    return found.unflatten(3, (slices.shape[3], slices.shape[4]))
