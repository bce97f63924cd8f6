"""Norms with statistics, scales and biases per field, as equivariance needs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from econv.groups import GroupLike
from econv.layers import pooled
from econv.layers.checks import (
    check_factory,
    check_fields,
    check_groups,
    check_statistics,
    positive,
    read_group,
    truth,
)
from econv.tensors import memory_format

__all__ = [
    "GroupBatchNorm",
    "GroupBatchNorm2d",
    "GroupBatchNorm3d",
    "GroupGroupNorm",
    "GroupGroupNorm2d",
    "GroupGroupNorm3d",
    "GroupInstanceNorm",
    "GroupInstanceNorm2d",
    "GroupInstanceNorm3d",
    "GroupLayerNorm",
    "GroupLayerNorm2d",
    "GroupLayerNorm3d",
    "calibrate",
]


class GroupBatchNorm(_BatchNorm):
    """Batch norm of fields, in any number of dimensions."""

    dimension: int
    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_statistics(eps, momentum)
        check_factory(device, dtype)
        options = truth("affine", affine), truth("track_running_stats", track_running_stats)
        super().__init__(positive("fields", fields), eps, momentum, *options, device, dtype)
        self.fields = fields
        self.group = read_group(group, self.dimension, type(self).__name__)
        self._order = self.group.order
        # Whoever reads it makes a norm of channels that cannot stand in for this one.
        del self.num_features

    def __getattr__(self, name: str) -> Any:
        if name == "num_features":
            raise AttributeError(
                f"{type(self).__name__} has no num_features: its statistics are those of `fields`, "
                "which a norm of channels does not know. To synchronise the norms of several "
                "processes, call econv.convert_sync_batchnorm(model)"
            )
        return super().__getattr__(name)

    def _check_input_dim(self, input: Tensor) -> None:
        """The folded tensor is ours; what the user gave is checked in `forward`."""

    def check(self, x: Tensor) -> None:
        """Stop with what was expected unless ``x`` can be normalised."""
        own = self.running_mean if self.weight is None else self.weight
        check_fields(x, self.fields, self.group, own)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, …]``."""
        self.check(x)
        if self._pools(x):
            return self._pooled(x)
        return by_field(x, self.fields, self._normalise)

    def _pools(self, x: Tensor) -> bool:
        """Whether statistics are to be found that a GPU finds better channel by channel."""
        now = self.training or self.running_mean is None
        return now and self.momentum is not None and pooled.usable(x, self.fields, self.eps)

    def _pooled(self, x: Tensor) -> Tensor:
        return pooled.normalise(x, self.fields, self.weight, self.bias, self._tracked(), self.eps)

    def _tracked(self) -> pooled.Running | None:
        """What this batch is to be counted in, which is counted; nothing if nothing is."""
        if not (self.training and self.track_running_stats):
            return None
        momentum: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean of all batches, found without waiting for a GPU
                momentum = 1.0 / self.num_batches_tracked
        if self.running_mean is None or self.running_var is None:
            return None
        return pooled.Running(self.running_mean, self.running_var, momentum)

    def fuses(self, x: Tensor) -> bool:
        """Whether :meth:`as_affine` says what `forward` does to ``x``."""
        batch = self.training or self.running_mean is None
        if batch and x.dtype == torch.float16 and torch.is_grad_enabled():
            return (
                False  # a part of the gradient, which is written, may be too large where all is not
            )
        several = x.numel() > self.fields  # of one number torch finds no variance, and says so
        plain = all(t.is_contiguous() for t in (*self.parameters(), *self.buffers()))
        return several and plain and self.eps > 0

    def as_affine(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The norm before it is applied: ``x``, three numbers of each field in float32, and ``x``.

        They are the rows centre, scale and shift of (x − centre)·scale + shift. In training the
        running statistics are brought up to date, and gradients reach whatever the numbers come
        from, the statistics of ``x`` included: apply them to the first ``x`` that is given back,
        and read the last for whatever else is made of it.
        """
        if self.training or self.running_mean is None or self.running_var is None:
            tracked = self._tracked()
            return pooled.affine(x, self.fields, self.weight, self.bias, tracked, self.eps)
        scale = (self.running_var.float() + self.eps).rsqrt()
        return x, pooled.rows(self.running_mean.float(), scale, self.weight, self.bias), x

    def activated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The ReLU of the norm of ``x``, and ``x`` to be read in its place by whatever else does.

        One kernel writes the map, and one the gradient to ``x``, that of other readers included.
        """
        statistics: pooled.Running | tuple[Tensor, Tensor] | None = self._tracked()
        if not self.training and self.running_mean is not None and self.running_var is not None:
            statistics = self.running_mean, self.running_var
        return pooled.activated(x, self.weight, self.bias, self.fields, statistics, self.eps)

    def _normalise(self, folded: Tensor) -> Tensor:
        """Normalise ``[n, fields, m]``."""
        return super().forward(folded)

    def extra_repr(self) -> str:
        return (
            f"{self.group.name}, {self.fields}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.affine}, track_running_stats={self.track_running_stats}"
        )


class GroupBatchNorm2d(GroupBatchNorm):
    """Batch norm with one mean, variance, scale and bias per *field*, which equivariance needs.

    ``[batch, fields * order, height, width]`` in and out.
    The statistics run over batch, orientations and pixels. Arguments and state are those of
    `BatchNorm2d` with ``fields`` in place of channels. To share the statistics of several
    processes, use :func:`~econv.convert_sync_batchnorm`; torch's own conversion, which does not
    know fields, ends with an error that says so.

    Raises:
        ValueError: for fields below 1, a group of space, or ``eps`` and ``momentum`` out of their
            range; when called, for other channels, another dtype or device, and in training for one
            number per field.

    >>> norm = GroupBatchNorm2d(4, "p8")
    >>> norm(torch.randn(2, 32, 8, 8)).shape, norm.weight.shape
    (torch.Size([2, 32, 8, 8]), torch.Size([4]))
    """

    dimension = 2


class GroupBatchNorm3d(GroupBatchNorm):
    """Batch norm of volumes with one mean, variance, scale and bias per *field*.

    Arguments and state are those of :class:`GroupBatchNorm2d`.

    Raises:
        ValueError: for fields below 1, a group of the plane, or ``eps`` and ``momentum`` out of
            their range; when called, for other channels, another dtype or device, and in training
            for one number per field.

    >>> GroupBatchNorm3d(2, "O")(torch.randn(2, 48, 4, 4, 4)).shape
    torch.Size([2, 48, 4, 4, 4])
    """

    dimension = 3


def by_field(x: Tensor, fields: int, normalise: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply what normalises ``[n, fields, m]`` to ``[batch, fields * order, …]``, uncopied."""
    if x.ndim in (4, 5) and memory_format(x) is not torch.contiguous_format:
        last = x.movedim(1, -1)
        folded = last.reshape(math.prod(last.shape[:-1]), fields, x.shape[1] // fields)
        return normalise(folded).view(last.shape).movedim(-1, 1)
    numbers = x.shape[1] // fields * math.prod(x.shape[2:])  # -1 would not do for empty batches
    return normalise(x.reshape(x.shape[0], fields, numbers)).view(x.shape)


class GroupInstanceNorm(_InstanceNorm):
    """Instance norm of fields, in any number of dimensions."""

    dimension: int
    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_statistics(eps, momentum)
        check_factory(device, dtype)
        options = truth("affine", affine), truth("track_running_stats", track_running_stats)
        super().__init__(positive("fields", fields), eps, momentum, *options, device, dtype)
        self.fields = fields
        self.group = read_group(group, self.dimension, type(self).__name__)

    def _check_input_dim(self, input: Tensor) -> None:
        """The folded tensor is ours; what the user gave is checked in `forward`."""

    def _get_no_batch_dim(self) -> int:
        return 2

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, …]``."""
        own = self.running_mean if self.weight is None else self.weight
        check_fields(x, self.fields, self.group, own)
        sizes_known = torch.compiler.is_compiling() or not torch._C._is_tracing()
        if sizes_known and x.shape[0] == 0:  # torch's own has no statistics of nothing
            return x * (1 if self.weight is None else self.weight.sum() + self.bias.sum())
        numbers = x.shape[1] // self.fields * math.prod(x.shape[2:])
        normed = super().forward(x.reshape(x.shape[0], self.fields, numbers)).view(x.shape)
        return normed.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.group.name}, {super().extra_repr()}"


class GroupInstanceNorm2d(GroupInstanceNorm):
    """Instance norm with one mean and variance per sample and *field*, over all its orientations.

    ``[batch, fields * order, height, width]`` in and out.
    Arguments and state are those of `InstanceNorm2d` with ``fields`` in place of channels.

    Raises:
        ValueError: for fields below 1, a group of space, or ``eps`` and ``momentum`` out of their
            range; when called, for other channels, another dtype or device, and in training for one
            number per field.

    >>> GroupInstanceNorm2d(4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

    dimension = 2


class GroupInstanceNorm3d(GroupInstanceNorm):
    """Instance norm of volumes, with one mean and variance per sample and *field*.

    Arguments and state are those of :class:`GroupInstanceNorm2d`.

    Raises:
        ValueError: for fields below 1, a group of the plane, or ``eps`` and ``momentum`` out of
            their range; when called, for other channels, another dtype or device, and in training
            for one number per field.

    >>> GroupInstanceNorm3d(2, "O")(torch.randn(2, 48, 4, 4, 4)).shape
    torch.Size([2, 48, 4, 4, 4])
    """

    dimension = 3


class _FieldAffine(nn.Module):
    """A scale and a bias per field, or none of them."""

    dimension: int
    input_kind = "regular"
    output_kind = "regular"
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        eps: float,
        affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.fields = positive("fields", fields)
        check_statistics(eps)
        check_factory(device, dtype)
        self.group = read_group(group, self.dimension, type(self).__name__)
        self.eps = eps
        self._order = self.group.order
        if truth("affine", affine):
            self.weight = nn.Parameter(torch.empty(fields, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(fields, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every scale to one and every bias to zero."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def _by_channel(self) -> tuple[Tensor | None, Tensor | None]:
        if self.weight is None or self.bias is None:
            return None, None
        weight, bias = (
            p[:, None].expand(-1, self._order).flatten() for p in (self.weight, self.bias)
        )
        return weight, bias

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.group.name}, {self.fields}, eps={self.eps}, affine={affine}"


class GroupGroupNorm(_FieldAffine):
    """Group norm of whole fields, in any number of dimensions."""

    dimension: int

    def __init__(
        self,
        num_groups: int,
        fields: int,
        group: GroupLike,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_groups(num_groups, fields=positive("fields", fields))
        self.num_groups = num_groups
        super().__init__(fields, group, eps, affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, …]``."""
        check_fields(x, self.fields, self.group, self.weight)
        # torch's gradient ends the process where channels are last and the input needs none itself.
        safe = x if x.requires_grad or not x.is_cpu else x.contiguous()
        normed = functional.group_norm(safe, self.num_groups, *self._by_channel(), self.eps)
        return normed.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return f"num_groups={self.num_groups}, {super().extra_repr()}"


class GroupGroupNorm2d(GroupGroupNorm):
    """Group norm over blocks of whole fields, with one scale and one bias per *field*.

    ``[batch, fields * order, height, width]`` in and out.
    `GroupNorm` on ``fields`` in place of channels: each of ``num_groups`` blocks is normalised over
    its fields, all their orientations and all pixels.

    Raises:
        ValueError: for fields that ``num_groups`` does not divide, a group of space, or ``eps``
            below 0; when called, for other channels, another dtype or device.

    >>> GroupGroupNorm2d(2, 4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

    dimension = 2


class GroupGroupNorm3d(GroupGroupNorm):
    """Group norm of volumes over blocks of whole fields; one scale and bias per *field*.

    Arguments and state are those of :class:`GroupGroupNorm2d`.

    Raises:
        ValueError: for fields that ``num_groups`` does not divide, a group of the plane, or ``eps``
            below 0; when called, for other channels, another dtype or device.

    >>> GroupGroupNorm3d(1, 2, "O")(torch.randn(2, 48, 4, 4, 4)).shape
    torch.Size([2, 48, 4, 4, 4])
    """

    dimension = 3


class GroupLayerNorm(_FieldAffine):
    """Layer norm of every pixel's fields, in any number of dimensions."""

    dimension: int

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fields, group, eps, affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, …]``."""
        check_fields(x, self.fields, self.group, self.weight)
        last, channels = x.movedim(1, -1), x.shape[1]
        # A matrix, so that its gradient is one too: of a permuted gradient torch's compiler expects
        # another layout than layer norm gives.
        pixels = last.reshape(math.prod(last.shape[:-1]), channels)
        normed = functional.layer_norm(pixels, (channels,), *self._by_channel(), self.eps)
        maps = normed.view(last.shape).movedim(-1, 1)
        return maps.contiguous(memory_format=memory_format(x))


class GroupLayerNorm2d(GroupLayerNorm):
    """Layer norm over all fields and orientations of a pixel; one scale and one bias per *field*.

    ``[batch, fields * order, height, width]`` in and out. What ConvNeXt calls
    LayerNorm2d, made equivariant.

    Raises:
        ValueError: for fields below 1, a group of space, or ``eps`` below 0; when called, for other
            channels, another dtype or device.

    >>> GroupLayerNorm2d(4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

    dimension = 2


class GroupLayerNorm3d(GroupLayerNorm):
    """Layer norm over all fields and orientations of a voxel; one scale and bias per *field*.

    Raises:
        ValueError: for fields below 1, a group of the plane, or ``eps`` below 0; when called, for
            other channels, another dtype or device.

    >>> GroupLayerNorm3d(2, "O")(torch.randn(2, 48, 4, 4, 4)).shape
    torch.Size([2, 48, 4, 4, 4])
    """

    dimension = 3


def calibrate(model: nn.Module, images: Tensor) -> nn.Module:
    """Set the running statistics of every batch norm to those of these images.

    An untrained network in eval mode otherwise applies statistics that it has never seen.
    Returns the model, in eval mode.

    >>> norm = nn.BatchNorm2d(1)
    >>> calibrate(norm, torch.full((2, 1, 4, 4), 3.0)).running_mean
    tensor([3.])
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    model.eval()
    kept = [(norm, norm.momentum) for norm in norms if norm.track_running_stats]
    for norm, _ in kept:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        with torch.no_grad():
            model(images)
    finally:
        for norm, momentum in kept:
            norm.momentum = momentum
            norm.eval()
    return model
