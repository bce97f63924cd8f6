"""Batch norm of fields as kernels: the numbers of a prologue, and what comes through them."""

from __future__ import annotations

import torch
from torch import Tensor

from econv.engines.problem import memory_format
from econv.engines.spectral.tiling import Like
from econv.engines.spectral.triton.engine import on_device
from econv.engines.spectral.triton.launches import backward_run, statistics_steps

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
    with on_device(x):
        means, deviations = torch.batch_norm_stats(x, eps)
        found = torch.empty((4, fields), dtype=torch.float32, device=x.device)
        mean, variance, share = (None, None, 0.0) if running is None else running
        several = (weight, bias, mean)
        dtypes = [None if tensor is None else tensor.dtype for tensor in several[:2]]
        kept_as = None if mean is None or variance is None else (mean.dtype, variance.dtype)
        part = share.dtype if isinstance(share, Tensor) else share
        steps = statistics_steps(Like.of(x), fields, *dtypes, kept_as, part, eps)
        given = (t if isinstance(t, Tensor) else means for t in (*several, variance, share))
        steps(means, deviations, *given, found)
    for kept in (mean, variance):
        if kept is not None and not kept.is_inference():
            torch.autograd.graph.increment_version(kept)  # what a kernel writes, autograd misses
    return found


def statistics_backward(x: Tensor, g: Tensor, numbers: Tensor, to_affine: Tensor) -> Tensor:
    """The gradient to ``x``: its own part g, and what comes through `field_statistics`."""
    run = backward_run(Like.of(x), numbers.shape[1])
    assert run is not None
    with on_device(x):
        g = g.contiguous(memory_format=memory_format(x))
        return run.statistics(g, x, numbers, to_affine.contiguous())
