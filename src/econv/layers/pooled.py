"""Batch norm of fields on a GPU: the statistics of channels, which all of it adds up, pooled.

torch's own norm gives the sums of a field to one multiprocessor. A field is ``order`` channels:
their sums are found by the kernels that torch has for statistics that come in parts, elsewhere from
several processes, and brought together. Inside `torch.compile` they are operations of torch, which
the compiler makes into kernels of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econv.engines import Prologue
from econv.gpu.devices import DTYPES, on_device, works
from econv.tensors import exporting, memory_format, transformed, watched

__all__ = ["Running", "activated", "activates", "affine", "normalise", "rows", "usable"]


_LEAST = 1 << 14
"""Numbers of a field. For each torch takes 3 to 12 ns, both ways (H200); to queue the kernels here
takes some 0.2 ms, an estimate."""


def usable(x: Tensor, fields: int, eps: float) -> bool:
    """Whether `normalise` can stand in for torch's norm here, and is worth it."""
    if not (x.is_cuda and x.is_floating_point()):
        return False
    if torch.compiler.is_compiling():  # which adds up single channels faster where they lie last
        return not exporting() and memory_format(x) is not torch.contiguous_format
    return (
        not watched(x)
        and x.numel() >= _LEAST * fields
        and eps > 0  # of channels that are constant only then something is left
        and not transformed()
    )


class Running(NamedTuple):
    """Running statistics, one per field, and the share of a new batch in them."""

    mean: Tensor
    variance: Tensor
    momentum: float | Tensor

    def update(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Bring them up to date with the statistics of ``count`` numbers of each field."""
        unbiased = variance * (count / (count - 1))
        for kept, new in ((self.mean, mean), (self.variance, unbiased)):
            kept.lerp_(new.to(kept.dtype), self.momentum)


def normalise(
    x: Tensor,
    fields: int,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running | None,
    eps: float,
) -> Tensor:
    """As torch's ``batch_norm`` of ``[batch, fields * order, …]`` in training.

    The running statistics are brought up to date; gradients are of every order.
    """
    if torch.compiler.is_compiling():
        normed, mean, variance = _by_channel(x, weight, bias, fields, eps)
    else:
        x = x.contiguous(memory_format=memory_format(x))
        normed, mean, variance = _Normalise.apply(x, weight, bias, fields, eps)
    if running is not None:
        running.update(mean.detach(), variance.detach(), x.numel() // fields)
    found: Tensor = normed
    return found


def affine(
    x: Tensor,
    fields: int,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`normalise` before it is applied: ``x``, the `rows` of (x − centre)·scale + shift, and ``x``.

    The gradient to ``x`` has the part that comes through its statistics, if what is made of the
    norm is made of the first ``x`` that is given back, and what else reads it reads the last: all
    parts are added in one go.
    """
    x = x.contiguous(memory_format=memory_format(x))
    x, numbers, same = _Affine.apply(x, weight, bias, fields, running, eps)
    return x, numbers, same


def activates(x: Tensor) -> bool:
    """Whether a kernel writes what `activated` gives."""
    if x.dtype not in DTYPES:
        return False
    return works("norm and ReLU in one kernel", x.device, "econv.layers.norm_kernels")


def activated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    fields: int,
    statistics: Running | tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The ReLU of a norm as one map, and ``x`` for what else reads it, as `affine` gives it.

    ``statistics``: the running ones, which are brought up to date; or a mean and a variance, which
    are applied in place of those of ``x``.
    """
    x = x.contiguous(memory_format=memory_format(x))
    out, same = _Activated.apply(x, weight, bias, fields, statistics, eps)
    return out, same


def rows(mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Centre, scale and shift of fields whose deviations are 1 / ``scale``, ``[3, fields]``."""
    scale = scale if weight is None else scale * weight.to(scale.dtype)
    shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
    return torch.stack([mean, scale, shift])


def _by_channel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, fields: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, mean and variance by operations that a compiler fuses."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    order, axes = x.shape[1] // fields, (0, *range(2, x.ndim))

    def of_channels(number: Tensor) -> Tensor:
        spread = number.to(wide.dtype)[:, None].expand(-1, order)
        return spread.reshape(-1, *[1] * len(axes[1:]))

    variances, means = torch.var_mean(wide, axes, correction=0)
    variances, means = variances.view(fields, order), means.view(fields, order)
    mean = means.mean(1)
    variance = (variances + (means - mean[:, None]) ** 2).mean(1)
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight.to(scale.dtype)
    normed = (wide - of_channels(mean)) * of_channels(scale)
    normed = normed if bias is None else normed + of_channels(bias)
    return normed.to(x.dtype), mean, variance


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
        gradient = gradient.contiguous(memory_format=memory_format(x))
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


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, fields: int, *more: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        from econv.layers.norm_kernels import field_statistics

        running, ctx.eps = more
        numbers = field_statistics(x, fields, weight, bias, running, ctx.eps)
        ctx.save_for_backward(x, weight, bias, numbers)
        ctx.set_materialize_grads(False)
        return x, numbers[:3], x.detach()

    @staticmethod
    def backward(
        ctx: Any, to_x: Tensor | None, to_rows: Tensor | None, to_same: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, bias, numbers = ctx.saved_tensors
        to_rows = torch.zeros_like(numbers[:3]) if to_rows is None else to_rows
        if torch.is_grad_enabled():  # for derivatives of the second order and beyond
            return _again(ctx, (x, weight, bias), to_rows, (to_x, to_same))
        to_x = x.new_zeros(()).expand_as(x) if to_x is None else to_x
        return _found(x, weight, bias, numbers, to_x, to_rows, to_same)


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, fields: int, *more: Any
    ) -> tuple[Tensor, Tensor]:
        from econv.layers import norm_kernels

        statistics, ctx.eps = more
        own = statistics is None or isinstance(statistics, Running)
        ctx.fixed = None if own else statistics
        if ctx.fixed is None:
            given = (weight, bias, statistics, ctx.eps)
            numbers = norm_kernels.field_statistics(x, fields, *given)
        else:
            mean, variance = (kept.float() for kept in ctx.fixed)
            inverse = (variance + ctx.eps).rsqrt()
            numbers = torch.cat([rows(mean, inverse, weight, bias), inverse[None]])
        ctx.save_for_backward(x, weight, bias, numbers)
        ctx.set_materialize_grads(False)
        with on_device(x):
            return norm_kernels.activated(x, numbers[:3]), x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, to_same: Tensor | None) -> tuple[Tensor | None, ...]:
        from econv.gpu.passes import activation_gradient

        x, weight, bias, numbers = ctx.saved_tensors
        g = torch.zeros_like(x) if g is None else g
        if torch.is_grad_enabled():
            return _again(ctx, (x, weight, bias), g, (to_same,), ctx.fixed, True)
        with on_device(x):
            found = activation_gradient(g, x, numbers[:3], write=False)
        assert found is not None
        to_rows = found[1]
        fixed = ctx.fixed is not None
        return _found(x, weight, bias, numbers, g, to_rows, to_same, True, fixed)


def _found(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    numbers: Tensor,
    g: Tensor,
    to_rows: Tensor,
    to_same: Tensor | None,
    is_activated: bool = False,
    fixed: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients that both give, from ``g`` to ``x`` or to what was activated."""
    from econv.layers.norm_kernels import norm_gradient

    to_weight = None if weight is None else (to_rows[1] * numbers[3]).to(weight.dtype)
    to_bias = None if bias is None else to_rows[2].to(bias.dtype)
    through = torch.zeros_like(to_rows) if fixed else to_rows  # statistics that are no part of x
    to_x = norm_gradient(x, g, numbers, through, to_same, is_activated)
    return to_x, to_weight, to_bias, None, None, None


def _again(
    ctx: Any,
    given: tuple[Tensor, Tensor | None, Tensor | None],
    g: Tensor,
    added: tuple[Tensor | None, ...],
    fixed: tuple[Tensor, Tensor] | None = None,
    is_activated: bool = False,
) -> tuple[Tensor | None, ...]:
    """The same by operations of torch, which have gradients again.

    ``g`` is the gradient to what was activated or to the numbers of fields; others to ``x`` are
    added to what comes of it.
    """
    x, weight, bias = given
    wanted = ctx.needs_input_grad[:3]
    inputs = [t for t, need in zip(given, wanted, strict=True) if need and t is not None]
    if fixed is None:
        fields = ctx.saved_tensors[3].shape[1]
        folded = x.float().unflatten(1, (fields, -1))
        every = (0, *range(2, folded.ndim))
        variance, mean = torch.var_mean(folded, every, correction=0)
    else:
        mean, variance = (kept.float() for kept in fixed)
    made = rows(mean, (variance + ctx.eps).rsqrt(), weight, bias)
    made = Prologue(made).apply(x) if is_activated else made
    found = list(torch.autograd.grad(made, inputs, g, create_graph=True))
    if wanted[0]:
        found[0] = sum((more for more in added if more is not None), found[0])
    rest = iter(found)
    return *(next(rest) if need else None for need in wanted), None, None, None
