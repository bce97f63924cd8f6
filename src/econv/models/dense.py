"""Networks with an answer for every pixel or voxel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from econv.groups import GroupLike
from econv.layers import ConvOptions, norm_relu, norm_relu_conv
from econv.models.classifier import _Classifier
from econv.models.kit import TORCH, Kit, expect_whole, share_below_one


class UNet(_Classifier):
    """A U-Net (Ronneberger et al. 2015) for a label or a number of every pixel or voxel.

    Two convolutions at every level, :class:`~econv.Downsample2d` between the levels on the way
    down, linear interpolation on the way up, where the features of the same level are put beside
    them; at the end orientations are pooled, and a 1×1 convolution makes scores.
    ``[batch, in_channels, …]`` → ``[batch, num_classes, …]``, of the same size: scores turn with
    the input, under the symmetries of the grid exactly on every size.

    Args:
        group: a group or its name: of the plane for images, of space, such as ``"O"``, for
            volumes; ``None`` for the ordinary U-Net.
        fields: the number of fields of each level; by default 32, 64, 128 and 256 over the root of
            the group's order, which keeps the number of parameters near the ordinary network's.
        in_channels: channels of the input.
        num_classes: scores of each pixel; 0 for none: features come out.
        pool: how orientations are pooled before the scores, as :class:`~econv.GroupPool2d` reads
            it, ``"max"`` by default; without a group it is ignored.
        options: keywords of every PDO-eConv.
        drop_rate: probability of dropping a feature before the scores, 0 by default.
        activation: name of the functions between layers, ``"relu"`` by default, as
            :class:`~econv.GroupActivation2d` reads it.
        antialias: width in pixels of the blur after each of them, such as 0.7, which keeps the
            network equivariant at angles that the grid has not. 0 (default) for none.
        oversample: points for each pixel that they act on, 1 by default; above 1 with ``antialias``
            only.
        dimension: 2 for images or 3 for volumes; by default the group's, and 2 without one.

    >>> import torch
    >>> network = UNet("T", fields=(1, 2), num_classes=3)
    >>> network(torch.randn(1, 1, 8, 9, 8)).shape
    torch.Size([1, 3, 8, 9, 8])
    """

    output_kind = "scalar"

    def __init__(
        self,
        group: GroupLike | None = "p8",
        fields: Sequence[int] | None = None,
        in_channels: int = 1,
        num_classes: int = 2,
        pool: str = "max",
        options: ConvOptions | None = None,
        drop_rate: float = 0.0,
        activation: str = "relu",
        antialias: float = 0.0,
        oversample: int = 1,
        dimension: int | None = None,
    ) -> None:
        super().__init__()
        reduce = None if group is None else pool
        kit = Kit(group, reduce, options, activation, antialias, oversample, dimension)
        if fields is None:
            share = 1.0 if kit.group is None else kit.group.order**-0.5
            fields = [max(1, round(channels * share)) for channels in (32, 64, 128, 256)]
        if not isinstance(fields, Sequence) or len(fields) < 2:
            raise ValueError(f"expected the fields of two levels or more; got {fields!r}")
        expect_whole("fields", fields)
        expect_whole("in_channels", in_channels)
        self.group, self.dimension = kit.group, kit.dimension
        self.config = {
            "group": kit.group,
            "fields": list(fields),
            "in_channels": in_channels,
            "num_classes": num_classes,
            "pool": pool,
            "options": options,
            "drop_rate": share_below_one("drop_rate", drop_rate),
            "activation": activation,
            "antialias": kit.antialias,
            "oversample": oversample,
            **kit.named_dimension,
        }
        self.halve = kit.halving()
        self.widen = kit.doubling()
        first, *others = fields
        self.down = nn.ModuleList([ConvPair(kit.lift(in_channels, first), first, kit)])
        for before, width in zip(fields, others, strict=False):
            self.down.append(ConvPair(kit.conv(before, width), width, kit))
        self.up = nn.ModuleList()
        for below, width in list(zip(others, fields, strict=False))[::-1]:
            self.up.append(ConvPair(kit.conv(below + width, width), width, kit))
        self.pool = kit.pool()
        self.num_features = first * kit.orientations
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
        return 256 if self.dimension == 2 else 64

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, of the size of the input."""
        kept: list[Tensor] = []
        for number, level in enumerate(self.down):
            x = level(self.halve(x) if number else x)
            kept.append(x)
        del kept[-1]
        for level in self.up:
            beside = kept.pop()
            x = level(torch.cat([self.widen(x, beside.shape[2:]), beside], 1))
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Scores of a feature map; what they are made of, if ``pre_logits``."""
        features: Tensor = self.pool(x)
        if pre_logits:
            return features
        scores: Tensor = self.classifier(self.head_drop(features))
        return scores

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The first level, and each of the others."""
        return {"stem": r"^down\.0\.", "blocks": r"^(?:down|up)\.(\d+)"}

    def _new_classifier(self, num_classes: int) -> nn.Module:
        conv: Any = TORCH[self.dimension]["conv"]
        classifier: nn.Module = conv(self.num_features, num_classes, 1)
        nn.init.xavier_normal_(classifier.weight)  # type: ignore[arg-type]
        nn.init.zeros_(classifier.bias)  # type: ignore[arg-type]
        return classifier


class ConvPair(nn.Module):
    """A convolution and another, each with a norm and an activation."""

    def __init__(self, first: nn.Module, fields: int, kit: Kit) -> None:
        super().__init__()
        self.conv1 = first
        self.norm1 = kit.norm(fields)
        self.activation = kit.activation()
        self.conv2 = kit.conv(fields, fields)
        self.norm2 = kit.norm(fields)

    def forward(self, x: Tensor) -> Tensor:
        out = norm_relu_conv(self.norm1, self.conv2, self.conv1(x), self.activation)
        return norm_relu(self.norm2, out, self.activation)
