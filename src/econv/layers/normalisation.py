"""Norms with statistics, scales and biases per field, as equivariance needs them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from econv.engines import dense
from econv.groups import Group, GroupLike
from econv.layers.checks import check_fields, check_groups, positive

__all__ = ["GroupBatchNorm2d", "GroupGroupNorm2d", "GroupInstanceNorm2d", "GroupLayerNorm2d"]


class GroupBatchNorm2d(_BatchNorm):
    """Batch norm with one mean, variance, scale and bias per *field*, which equivariance needs.

    The statistics run over batch, orientations and pixels. Arguments and state are those of
    `BatchNorm2d` with ``fields`` in place of channels. `SyncBatchNorm.convert_sync_batchnorm` does
    not know fields: it must not be applied to networks that contain this layer.

    >>> norm = GroupBatchNorm2d(4, "p8")
    >>> norm(torch.randn(2, 32, 8, 8)).shape, norm.weight.shape
    (torch.Size([2, 32, 8, 8]), torch.Size([4]))
    """

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
        super().__init__(
            positive("fields", fields), eps, momentum, affine, track_running_stats, device, dtype
        )
        self.fields = fields
        self.group = Group(group)
        self._order = self.group.order

    def _check_input_dim(self, input: Tensor) -> None:
        """The folded tensor is ours; what the user gave is checked in `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, height, width]``."""
        own = self.running_mean if self.weight is None else self.weight
        check_fields(x, self.fields, self.group, own)
        batch, channels, height, width = x.shape
        if dense.memory_format(x) is torch.channels_last:
            last = x.permute(0, 2, 3, 1)
            folded = last.reshape(batch * height * width, self.fields, self._order)
            normed = super().forward(folded)
            return normed.view(batch, height, width, channels).permute(0, 3, 1, 2)
        folded = x.reshape(batch, self.fields, self._order * height * width)
        return super().forward(folded).view(batch, channels, height, width)

    def extra_repr(self) -> str:
        return f"{self.group.name}, {super().extra_repr()}"


class GroupInstanceNorm2d(_InstanceNorm):
    """Instance norm with one mean and variance per sample and *field*, over all its orientations.

    Arguments and state are those of `InstanceNorm2d` with ``fields`` in place of channels.

    >>> GroupInstanceNorm2d(4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

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
        super().__init__(
            positive("fields", fields), eps, momentum, affine, track_running_stats, device, dtype
        )
        self.fields = fields
        self.group = Group(group)

    def _check_input_dim(self, input: Tensor) -> None:
        """The folded tensor is ours; what the user gave is checked in `forward`."""

    def _get_no_batch_dim(self) -> int:
        return 2

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, height, width]``."""
        own = self.running_mean if self.weight is None else self.weight
        check_fields(x, self.fields, self.group, own)
        normed = super().forward(x.reshape(x.shape[0], self.fields, -1)).view(x.shape)
        return normed.contiguous(memory_format=dense.memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.group.name}, {super().extra_repr()}"


class _FieldAffine(nn.Module):
    """A scale and a bias per field, or none of them."""

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
        self.group = Group(group)
        self.eps = eps
        self._order = self.group.order
        if affine:
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


class GroupGroupNorm2d(_FieldAffine):
    """Group norm over blocks of whole fields, with one scale and one bias per *field*.

    `GroupNorm` on ``fields`` in place of channels: each of ``num_groups`` blocks is normalised over
    its fields, all their orientations and all pixels.

    >>> GroupGroupNorm2d(2, 4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

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
        """Normalise ``[batch, fields * order, height, width]``."""
        check_fields(x, self.fields, self.group, self.weight)
        normed = functional.group_norm(x, self.num_groups, *self._by_channel(), self.eps)
        return normed.contiguous(memory_format=dense.memory_format(x))

    def extra_repr(self) -> str:
        return f"num_groups={self.num_groups}, {super().extra_repr()}"


class GroupLayerNorm2d(_FieldAffine):
    """Layer norm over all fields and orientations of a pixel; one scale and one bias per *field*.

    What ConvNeXt calls LayerNorm2d, made equivariant.

    >>> GroupLayerNorm2d(4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

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
        """Normalise ``[batch, fields * order, height, width]``."""
        check_fields(x, self.fields, self.group, self.weight)
        last = x.permute(0, 2, 3, 1)
        channels = (self.fields * self._order,)
        normed = functional.layer_norm(last, channels, *self._by_channel(), self.eps)
        return normed.permute(0, 3, 1, 2).contiguous(memory_format=dense.memory_format(x))
