"""The paper's networks, made of the layers of this library.

This room knows architectures and nothing of how they are trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from econv.groups import Group, GroupLike
from econv.layers import (
    ConvOptions,
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupPool2d,
    LiftConv2d,
)

__all__ = ["ResNet"]


class ResNet(nn.Module):
    """A pre-activation ResNet of 6n + 2 layers (He et al. 2016) with PDO-eConvs, as in Table 3.

    A lifting layer, three stages of n blocks with two convolutions each, group batch norm, ReLU,
    the mean over the image and a linear classifier. ``[batch, in_channels, height, width]`` →
    ``[batch, num_classes]``.

    Args:
        group: a group or its name.
        depth: 6n + 2, such as 26 or 44.
        fields: the number of fields of each stage.
        in_channels: channels of the image.
        num_classes: number of classes.
        pool: how orientations are pooled before the classifier: ``"max"``, ``"mean"``, or
            ``None``, the paper's way, for a classifier on all of them.
        exact: halve the image with :class:`~econv.Downsample2d`, which commutes with quarter turns
            on every size, in place of stride 2.
        options: keywords of every convolution, such as ``{"stencils": "central"}``.

    >>> network = ResNet("p8", depth=8, fields=(4, 8, 16), pool="max")
    >>> network(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    input_kind = "scalar"
    output_kind = "invariant"

    def __init__(
        self,
        group: GroupLike = "p8",
        depth: int = 26,
        fields: Sequence[int] = (20, 40, 80),
        in_channels: int = 3,
        num_classes: int = 10,
        pool: str | None = None,
        exact: bool = False,
        options: ConvOptions | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(depth, int) or depth < 8 or (depth - 2) % 6:
            raise ValueError(f"expected a depth of 6n + 2, such as 26 or 44; got {depth!r}")
        if not isinstance(fields, Sequence) or len(fields) != 3:
            raise ValueError(f"expected the fields of three stages; got {fields!r}")
        self.group = Group(group)
        options = options or {}
        self.lift = LiftConv2d(in_channels, fields[0], self.group, **options)
        blocks: list[nn.Module] = []
        width = fields[0]
        for stage, stage_fields in enumerate(fields):
            for block in range((depth - 2) // 6):
                halve = stage > 0 and block == 0
                blocks.append(_Block(width, stage_fields, self.group, halve, exact, options))
                width = stage_fields
        self.blocks = nn.Sequential(*blocks)
        self.norm = GroupBatchNorm2d(width, self.group)
        self.pool = nn.Identity() if pool is None else GroupPool2d(self.group, pool)
        features = width * (self.group.order if pool is None else 1)
        self.classifier = nn.Linear(features, num_classes)
        nn.init.xavier_normal_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        x = self.blocks(self.lift(x))
        x = self.pool(torch.relu(self.norm(x)))
        scores: Tensor = self.classifier(x.mean(dim=(2, 3)))
        return scores


class _Block(nn.Module):
    """Norm, ReLU, convolution, twice; a 1×1 group convolution where the shape changes."""

    def __init__(
        self,
        in_fields: int,
        out_fields: int,
        group: Group,
        halve: bool,
        exact: bool,
        options: ConvOptions,
    ) -> None:
        super().__init__()
        stride = 2 if halve and not exact else 1
        first: ConvOptions = {**options, "stride": stride}
        # 1×1: the paper's shortcuts are group convolutions with operators of order 0.
        pointwise: ConvOptions = {**first, "operators": "order<=0", "size": 1}
        self.halve = Downsample2d() if halve and exact else nn.Identity()
        self.norm1 = GroupBatchNorm2d(in_fields, group)
        self.conv1 = GroupConv2d(in_fields, out_fields, group, **first)
        self.norm2 = GroupBatchNorm2d(out_fields, group)
        self.conv2 = GroupConv2d(out_fields, out_fields, group, **options)
        self.shortcut = (
            GroupConv2d(in_fields, out_fields, group, **pointwise)
            if halve or in_fields != out_fields
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = torch.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(self.halve(normed))
        out = self.halve(self.conv1(normed))
        result: Tensor = self.conv2(torch.relu(self.norm2(out))) + shortcut
        return result
