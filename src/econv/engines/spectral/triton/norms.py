"""Batch norm of fields as kernels: the numbers of a prologue, and what comes through them."""

from __future__ import annotations

import torch
from torch import Tensor

from econv.engines.spectral.tiling import Like
from econv.engines.spectral.triton import launches
from econv.engines.spectral.triton.engine import on_device

__all__ = ["field_statistics", "statistics_backward"]


def field_statistics(
    x: Tensor,
    fields: int,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor, float | Tensor] | None,
    eps: float,
) -> Tensor:
    """Centre, scale and shift of each field of ``x``, and as a fourth row inverse deviations.

    ``x`` lies in one of torch's two layouts. ``running`` are mean, variance and the share of this
    batch in them (a number, or in memory): they are brought up to date. Without gradients.
    """
    mean, variance, share = (None, None, 0.0) if running is None else running
    number, in_memory = (0.0, share) if isinstance(share, Tensor) else (share, None)
    there = (weight, bias, mean, variance, in_memory)
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in there)
    with on_device(x):
        means, deviations = torch.batch_norm_stats(x, eps)
        found = torch.empty((4, fields), dtype=torch.float32, device=x.device)
        launch = launches.statistics_launch(Like.of(x), fields, dtypes, number, eps)
        launch(means, deviations, *(means if t is None else t for t in there), found)
    for kept in (mean, variance):
        if kept is not None and not kept.is_inference():
            torch.autograd.graph.increment_version(kept)  # what a kernel writes, autograd misses
    return found


def statistics_backward(x: Tensor, g: Tensor, numbers: Tensor, to_affine: Tensor) -> Tensor:
    """The gradient to ``x``: its own part g, and what comes through `field_statistics`."""
    with on_device(x):
        return launches.statistics_backward(g, x, numbers, to_affine)
