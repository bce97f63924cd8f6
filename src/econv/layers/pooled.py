"""Batch norm of fields on a GPU: the statistics of channels, which all of it adds up, pooled.

torch's own norm gives the sums of a field to one multiprocessor. A field is ``order`` channels:
their sums are found by the kernels that torch has for statistics that come in parts, elsewhere from
several processes, and brought together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econv.engines import dense
from econv.engines.native import watched
from econv.engines.spectral import transformed

__all__ = ["normalise", "usable"]


_LEAST = 1 << 14
"""Numbers of a field. For each torch takes 3 to 12 ns, both ways (H200); to queue the kernels here
takes some 0.2 ms, an estimate."""


def usable(x: Tensor, fields: int, eps: float) -> bool:
    """Whether `normalise` can stand in for torch's norm here, and is worth it."""
    return (
        not torch.compiler.is_compiling()
        and not watched(x)
        and x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        and x.numel() >= _LEAST * fields
        and eps > 0  # of channels that are constant only then something is left
        and not transformed()
    )


def normalise(
    x: Tensor,
    fields: int,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """As torch's ``batch_norm`` of ``[batch, fields * order, height, width]`` in training.

    The running statistics, one per field, are brought up to date; gradients are of every order.
    """
    x = x.contiguous(memory_format=dense.memory_format(x))
    normed, mean, variance = _Normalise.apply(x, weight, bias, fields, eps)
    if running_mean is not None and running_var is not None:
        count = x.numel() // fields
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    found: Tensor = normed
    return found


def _plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, fields: int, eps: float
) -> Tensor:
    folded = x.reshape(x.shape[0], fields, -1)
    return functional.batch_norm(folded, None, None, weight, bias, True, 0.0, eps).view_as(x)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, fields: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        order = x.shape[1] // fields
        means, deviations = torch.batch_norm_stats(x, eps)
        means, variances = means.view(fields, order), deviations.view(fields, order) ** -2
        variance, mean = torch.var_mean(means, 1, correction=0)
        variance += variances.mean(1)  # and eps, which each of them has
        parts = [mean, variance.rsqrt()]
        parts += [] if weight is None else [weight.to(mean.dtype)]
        parts += [] if bias is None else [bias.to(mean.dtype)]
        spread = torch.stack(parts)[:, :, None].expand(-1, -1, order).reshape(len(parts), -1)
        own = spread[2] if weight is not None else None
        normed = torch.batch_norm_elemt(
            x, own, spread[-1] if bias is not None else None, spread[0], spread[1], eps
        )
        ctx.save_for_backward(x, weight, bias, spread)
        ctx.fields, ctx.eps = fields, eps
        variance.sub_(eps).clamp_min_(0)
        ctx.mark_non_differentiable(mean, variance)
        return normed, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, spread = ctx.saved_tensors
        fields = ctx.fields
        if torch.is_grad_enabled():  # for derivatives of the second order and beyond
            wanted = ctx.needs_input_grad[:3]
            inputs = [t for t, needed in zip((x, weight, bias), wanted, strict=True) if needed]
            out = _plain(x, weight, bias, fields, ctx.eps)
            found = iter(torch.autograd.grad(out, inputs, gradient, create_graph=True))
            return *(next(found) if needed else None for needed in wanted), None, None
        gradient = gradient.contiguous(memory_format=dense.memory_format(x))
        order = x.shape[1] // fields
        own = spread[2] if weight is not None else None
        sums = torch.batch_norm_backward_reduce(
            gradient, x, spread[0], spread[1], own, True, weight is not None, bias is not None
        )
        pooled = torch.stack([s for s in sums if s is not None and s.numel()])
        pooled = pooled.view(-1, fields, order).sum(2)
        first, second = pooled[:2, :, None].expand(-1, -1, order).reshape(2, -1)
        to_weight = pooled[2].to(weight.dtype) if weight is not None else None
        to_bias = pooled[-1].to(bias.dtype) if bias is not None else None
        count = torch.full((1,), x.numel() // fields, dtype=torch.int32, device=x.device)
        to_x = torch.batch_norm_backward_elemt(
            gradient, x, spread[0], spread[1], own, first, second, count
        )
        return to_x, to_weight, to_bias, None, None
