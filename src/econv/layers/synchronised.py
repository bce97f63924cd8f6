"""Batch norms with the statistics of all processes' samples, on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from econv.layers.checks import check_module
from econv.layers.normalisation import (
    GroupBatchNorm,
    GroupBatchNorm2d,
    GroupBatchNorm3d,
    by_field,
)

__all__ = [
    "SyncBatchNorm",
    "SyncGroupBatchNorm2d",
    "SyncGroupBatchNorm3d",
    "convert_sync_batchnorm",
]


def convert_sync_batchnorm(model: nn.Module, process_group: Any = None) -> nn.Module:
    """Make the batch norms of a network, ours and torch's, use the samples of all processes.

    Like `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, which knows channels only and refuses the
    CPU. Parameters, buffers and their names stay. Processes may have batches of different sizes.
    Call it before `DistributedDataParallel`; without processes the norms are ordinary ones.

    Args:
        model: the network; its norms are changed in place.
        process_group: the processes that share statistics; all of them by default.

    Returns:
        The model.

    Raises:
        ValueError: for what is no module, and for batch norms of other classes than torch's and
            econv's.

    >>> model = convert_sync_batchnorm(nn.Sequential(GroupBatchNorm2d(2, "p4"), nn.BatchNorm2d(8)))
    >>> [type(norm).__name__ for norm in model]
    ['SyncGroupBatchNorm2d', 'SyncBatchNorm']
    """
    check_module(model)
    kinds = {
        GroupBatchNorm2d: SyncGroupBatchNorm2d,
        GroupBatchNorm3d: SyncGroupBatchNorm3d,
        nn.BatchNorm1d: SyncBatchNorm,
        nn.BatchNorm2d: SyncBatchNorm,
        nn.BatchNorm3d: SyncBatchNorm,
    }
    ready = (_SyncGroupBatchNorm, SyncBatchNorm, nn.SyncBatchNorm)
    norms = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
    for name, norm in norms.items():
        if not isinstance(norm, ready) and type(norm) not in kinds:
            raise ValueError(
                "expected GroupBatchNorm2d, GroupBatchNorm3d or torch's BatchNorm1d, BatchNorm2d, "
                f"BatchNorm3d; got "
                f"{type(norm).__name__} at {name or 'the top'!r}"
            )
    for norm in norms.values():
        if not isinstance(norm, nn.SyncBatchNorm):
            if not isinstance(norm, ready):
                norm.__dict__["ordinary"] = type(norm)
                norm.__class__ = kinds[type(norm)]  # what else it carries, such as hooks, stays
            norm.process_group = process_group
    return model


class _SyncGroupBatchNorm(GroupBatchNorm):
    """A group batch norm with the statistics of all processes."""

    process_group: Any = None
    ordinary: type[nn.Module]

    def _pools(self, x: Tensor) -> bool:
        return super()._pools(x) and _processes(self.process_group) is None

    def _normalise(self, folded: Tensor) -> Tensor:
        return _normalised(self, folded, self.fields)


class SyncGroupBatchNorm2d(_SyncGroupBatchNorm, GroupBatchNorm2d):
    """:class:`GroupBatchNorm2d` with the statistics of all processes; made by conversion.

    Raises:
        ValueError: for fields below 1, a group of space, or ``eps`` and ``momentum`` out of their
            range; when called, for other channels, another dtype or device, and in training for one
            number per field.
    """

    ordinary = GroupBatchNorm2d


class SyncGroupBatchNorm3d(_SyncGroupBatchNorm, GroupBatchNorm3d):
    """:class:`GroupBatchNorm3d` with the statistics of all processes; made by conversion.

    Raises:
        ValueError: for fields below 1, a group of the plane, or ``eps`` and ``momentum`` out of
            their range; when called, for other channels, another dtype or device, and in training
            for one number per field.
    """

    ordinary = GroupBatchNorm3d


class SyncBatchNorm(_BatchNorm):
    """A batch norm of channels with the statistics of all processes; made by conversion.

    Unlike torch's it runs on every device, and on maps of any dimension.

    Raises:
        ValueError: when called, for other channels, and in training without several numbers of
            each.
    """

    process_group: Any = None
    ordinary: type[nn.Module] = nn.BatchNorm2d

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, channels, …]``."""
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"expected [batch, {self.num_features}, …], as many channels as the norm has; "
                f"got {tuple(x.shape)}"
            )
        return by_field(x, self.num_features, lambda folded: _normalised(self, folded, x.shape[1]))


def _normalised(norm: _SyncGroupBatchNorm | SyncBatchNorm, folded: Tensor, fields: int) -> Tensor:
    """The norm of ``[n, fields, m]``."""
    mean, variance = norm.running_mean, norm.running_var
    # ONNX is for inference, whatever the mode: so are torch's own norms exported.
    if (not norm.training or torch.onnx.is_in_onnx_export()) and mean is not None:
        return functional.batch_norm(folded, mean, variance, norm.weight, norm.bias, eps=norm.eps)
    normed, now, spread, count = _Normalise.apply(
        folded, norm.weight, norm.bias, norm.eps, _processes(norm.process_group)
    )
    if norm.training and mean is not None and variance is not None:
        with torch.no_grad():
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.add_(1)
            share: Any = norm.momentum
            if share is None:
                share = 1.0 / norm.num_batches_tracked.to(mean.dtype)
            unbiased = spread * (count / (count - 1).clamp_min(1)).to(spread.dtype)
            mean.add_(share * (now.to(mean.dtype) - mean))
            variance.add_(share * (unbiased.to(variance.dtype) - variance))
    return normed


def _processes(group: Any) -> Any:
    """The processes to share with, or nothing where there are no others."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    group = distributed.group.WORLD if group is None else group
    return group if distributed.get_world_size(group) > 1 else None


class _Normalise(torch.autograd.Function):
    """Batch norm of ``[n, fields, m]`` whose sums run over all processes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(_wide(x, weight))
        samples = x.numel() // x.shape[1]
        if group is None and samples < 2:
            raise ValueError(
                f"expected more than one number per field to train with; got {samples}"
            )
        if samples:
            variance, mean = torch.var_mean(wide, (0, 2), correction=0)
        else:  # an empty batch takes part, with nothing
            variance = mean = wide.new_zeros(x.shape[1])
        count = torch.full((), samples, dtype=torch.float64, device=x.device)
        if group is not None:
            m, v = mean.double(), variance.double()
            sums = torch.stack([m, v + m * m, torch.ones_like(m)]) * count
            distributed.all_reduce(sums, group=group)
            count = sums[2, 0]
            m, square = sums[:2] / count
            mean, variance = m.to(mean.dtype), (square - m * m).clamp_min_(0).to(mean.dtype)
        scale = _scale(torch.rsqrt(variance + eps), weight)
        shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
        normed = torch.addcmul(shift[:, None], wide, scale[:, None]).to(x.dtype)
        return normed, mean, variance, count

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, ctx.eps, ctx.group = inputs
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        deviation = torch.rsqrt(variance + ctx.eps)
        scale = _scale(deviation, weight)
        wide = gradient.to(mean.dtype)
        offset = mean * deviation
        normed = torch.addcmul(-offset[:, None], x.to(mean.dtype), deviation[:, None])
        sums = torch.stack([wide.sum((0, 2)), (wide * normed).sum((0, 2))])
        # The gradients of scale and bias are those of this process's samples; it is for
        # DistributedDataParallel to bring them together, as it does for every parameter.
        to_bias, to_weight = (
            None if dtype is None else own.to(dtype)
            for own, dtype in zip(sums.clone(), ctx.dtypes[::-1], strict=True)
        )
        if ctx.group is not None:
            distributed.all_reduce(sums, group=ctx.group)
        first, second = sums * (-1.0 / count).to(sums.dtype)
        to_x = torch.addcmul(first[:, None], normed, second[:, None])
        to_x.add_(wide).mul_(scale[:, None])
        return to_x.to(x.dtype), to_weight, to_bias, None, None


def _scale(deviation: Tensor, weight: Tensor | None) -> Tensor:
    return deviation if weight is None else weight.to(deviation.dtype) * deviation


def _wide(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype to add up in: never less than float32, nor than the parameters have."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return wide if weight is None else torch.promote_types(wide, weight.dtype)
