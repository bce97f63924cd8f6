"""Thin ResNets for small images, as in the paper's Table 3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from econv.groups import Group, GroupLike
from econv.layers import ConvOptions, Restrict2d, norm_relu, norm_relu_conv
from econv.models.classifier import _Classifier, explain_classifier, linear_classifier, mean_scores
from econv.models.kit import (
    Kit,
    continued,
    expect_margin,
    expect_truth,
    expect_whole,
    share_below_one,
)


class ResNet(_Classifier):
    """A pre-activation ResNet of 6n + 2 layers (He et al. 2016) with PDO-eConvs, as in Table 3.

    A lifting layer, three stages of n blocks with two convolutions each, group batch norm, ReLU,
    the mean over the image and a linear classifier. ``[batch, in_channels, height, width]`` →
    ``[batch, num_classes]``.

    Args:
        group: a group or its name; ``None`` for the ordinary ResNet.
        depth: 6n + 2, such as 26 or 44.
        fields: the number of fields of each stage.
        in_channels: channels of the image.
        num_classes: number of classes; 0 for no classifier: features come out.
        pool: how orientations are pooled before the classifier, as :class:`~econv.GroupPool2d`
            reads it (``"max"``, ``"mean+max"``, …), or ``None``, the paper's way, for a classifier
            on all of them.
        exact: halve the image with :class:`~econv.Downsample2d`, which commutes with quarter turns
            on every size, in place of stride 2.
        options: keywords of every PDO-eConv, such as ``{"stencils": "central"}``.
        stem: fields of the first layer; those of the first stage by default.
        drop_rate: probability of dropping a feature before the classifier, 0 by default.
        activation: name of the functions between layers, ``"relu"`` by default, as
            :class:`~econv.GroupActivation2d` reads it.
        antialias: width in pixels of the blur after each of them, such as 0.7, which keeps the
            network equivariant at angles between quarter turns, too; images are then
            halved by :class:`~econv.Downsample2d` with 8 taps. 0 (default) for none.
        oversample: points for each pixel that they act on, 1 by default; above 1 with ``antialias``
            only.
        margin: pixels that the image is continued by on every side, by the mean of its corners; 0
            by default. What the layers make of the border then stays away from what is in the
            image; maps for a decoder have none.
        restrict: the groups of the second and the third stage, each a subgroup of the one before,
            where features are read as those of the subgroup (Weiler & Cesa 2019); by default all
            have the same. The network turns with its input under the last one.

    Raises:
        ValueError: for arguments out of their range, such as a depth that is not 6n + 2.

    >>> import torch
    >>> network = ResNet("p8", depth=8, fields=(4, 8, 16), pool="max")
    >>> network(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        group: GroupLike | None = "p8",
        depth: int = 26,
        fields: Sequence[int] = (20, 40, 80),
        in_channels: int = 3,
        num_classes: int = 10,
        pool: str | None = None,
        exact: bool = False,
        options: ConvOptions | None = None,
        stem: int | None = None,
        drop_rate: float = 0.0,
        activation: str = "relu",
        antialias: float = 0.0,
        oversample: int = 1,
        restrict: Sequence[GroupLike] | None = None,
        margin: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(depth, int) or not 8 <= depth <= 1202 or (depth - 2) % 6:
            raise ValueError(
                f"expected a depth of 6n + 2 from 8 to 1202, such as 26 or 44; got {depth!r}"
            )
        if not isinstance(fields, Sequence) or len(fields) != 3:
            raise ValueError(f"expected the fields of three stages; got {fields!r}")
        expect_whole("fields", fields)
        expect_whole("in_channels", in_channels)
        expect_whole("stem", 1 if stem is None else stem)
        expect_truth(exact=exact)
        expect_margin(margin)
        kit = Kit(group, pool, options, activation, antialias, oversample, 2, halves=exact)
        kits = self._restricted(kit, restrict)
        self.group = kits[-1].group
        self.config = {
            "group": kit.group,
            "depth": depth,
            "fields": list(fields),
            "in_channels": in_channels,
            "num_classes": num_classes,
            "pool": pool,
            "exact": exact,
            "options": options,
            "stem": stem,
            "drop_rate": share_below_one("drop_rate", drop_rate),
            "activation": activation,
            "antialias": kit.antialias,
            "oversample": oversample,
            "restrict": None if restrict is None else [str(Group(g).name) for g in restrict],
            "margin": margin,
        }
        self.margin = margin
        width = fields[0] if stem is None else stem
        self.dimension = kit.dimension
        self.lift = kit.lift(in_channels, width)
        blocks: list[nn.Module] = []
        for stage, stage_fields in enumerate(fields):
            before, kit = kit, kits[stage]
            for block in range((depth - 2) // 6):
                halve = stage > 0 and block == 0
                made = _Block(width * before.order // kit.order, stage_fields, kit, halve)
                if before.group != kit.group:
                    made.restrict = Restrict2d(before.group, kit.group)  # type: ignore[arg-type]
                blocks.append(made)
                width, before = stage_fields, kit
        self.blocks = nn.Sequential(*blocks)
        self.norm = kit.norm(width)
        self.activation = kit.activation()
        self.pool = kit.pool()
        self.num_features = width * kit.orientations
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        self.register_load_state_dict_pre_hook(explain_classifier)

    @staticmethod
    def _restricted(kit: Kit, restrict: Sequence[GroupLike] | None) -> list[Kit]:
        """The parts of each stage."""
        if restrict is None:
            return [kit] * 3
        if not isinstance(restrict, Sequence) or isinstance(restrict, str) or len(restrict) != 2:
            raise ValueError(f"expected restrict as the groups of two stages; got {restrict!r}")
        if kit.group is None:
            raise ValueError(f"expected a group to restrict; got group=None, restrict={restrict!r}")
        found = [kit, kit.of(restrict[0]), kit.of(restrict[1])]
        for larger, smaller in pairwise(found):
            assert larger.group is not None
            larger.group.embed(smaller.group)  # type: ignore[arg-type]  # or it says what is not
        return found

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
        return 32

    def forward_features(self, x: Tensor) -> Tensor:
        if self.margin:
            x = continued(x, self.margin, (2, 3))
        x = self._through(self.blocks, len(self.blocks), self.lift(x))
        return norm_relu(self.norm, x, self.activation)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return mean_scores(self, x, pre_logits)

    def feature_maps(self, x: Tensor) -> Iterator[Tensor]:
        """The last map of every stage, as group features."""
        x, count = self.lift(x), len(self.blocks) // 3
        for number, block in enumerate(self.blocks, start=1):
            x = block(x)
            if number % count == 0:
                last = number == len(self.blocks)
                yield norm_relu(self.norm, x, self.activation) if last else x

    def feature_info(self) -> list[dict[str, Any]]:
        """Of each of these maps its fields, its reduction and the module that it comes from."""
        if self.config["restrict"]:
            raise ValueError(
                "expected a network of one group for its maps; this one restricts it to "
                f"{', '.join(self.config['restrict'])}"
            )
        if self.margin:
            raise ValueError(f"expected margin=0 for a decoder's maps; got {self.margin}")
        count = len(self.blocks) // 3
        modules = [f"blocks.{count - 1}", f"blocks.{2 * count - 1}", "norm"]
        found = zip(self.config["fields"], (1, 2, 4), modules, strict=True)
        return [{"fields": f, "reduction": r, "module": m} for f, r, m in found]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The stem, and each block; they belong to no stages that have names."""
        return {"stem": r"^lift", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def _new_classifier(self, num_classes: int) -> nn.Module:
        return linear_classifier(self.num_features, num_classes)


class _Block(nn.Module):
    """Norm, ReLU, convolution, twice; a 1×1 convolution where the shape changes."""

    def __init__(self, in_fields: int, out_fields: int, kit: Kit, halve: bool) -> None:
        super().__init__()
        self.restrict: nn.Module | None = None
        stride = 2 if halve and not kit.halves else 1
        self.halve = kit.halving() if halve and kit.halves else nn.Identity()
        self.activation = kit.activation()
        self.norm1 = kit.norm(in_fields)
        self.conv1 = kit.conv(in_fields, out_fields, stride)
        self.norm2 = kit.norm(out_fields)
        self.conv2 = kit.conv(out_fields, out_fields)
        changes = halve or in_fields != out_fields
        self.shortcut = kit.pointwise(in_fields, out_fields, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        if self.restrict is not None:
            x = self.restrict(x)
        if self.shortcut is None:
            out, shortcut = norm_relu_conv(self.norm1, self.conv1, x, self.activation, True)
            out = self.halve(out)
        else:  # two layers read the same map
            normed = norm_relu(self.norm1, x, self.activation)
            shortcut, out = self.shortcut(self.halve(normed)), self.halve(self.conv1(normed))
        return norm_relu_conv(self.norm2, self.conv2, out, self.activation) + shortcut
