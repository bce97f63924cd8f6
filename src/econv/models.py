"""The paper's networks by name, and their non-equivariant twins.

This room knows architectures and nothing of how they are trained. Every network takes
``group=None`` for its twin: the same layers as ordinary 3×3 convolutions and batch norms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from econv.groups import Group, GroupLike
from econv.layers import (
    ConvOptions,
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupPool2d,
    LiftConv2d,
    norm_relu_conv,
)
from econv.parameters import no_weight_decay
from econv.pretrained import Pretrained

__all__ = ["MODELS", "ConvNet", "ResNet", "create_model"]


class _Classifier(Pretrained):
    """What the networks share: features, a head, and the names that timm gives to both."""

    group: Group | None
    input_kind = "scalar"
    grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, ``[batch, fields * order, height, width]``."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Class scores of a feature map; what the classifier reads, if ``pre_logits``."""
        raise NotImplementedError

    def _new_classifier(self, num_classes: int) -> nn.Module:
        """The last layer, for one class or more."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        """The number of classes, 0 for a network without a classifier."""
        return int(self.config["num_classes"])

    def get_classifier(self) -> nn.Module:
        """The last layer; the identity if there is none."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a new last layer in, for other classes, or none for 0: the features come out."""
        if global_pool is not None:
            raise ValueError(f"expected no global_pool: the head keeps its own; got {global_pool}")
        whole = hasattr(num_classes, "__index__") and not isinstance(num_classes, bool)
        if not whole or num_classes < 0:
            raise ValueError(f"expected num_classes of 0 or more; got {num_classes!r}")
        like = next(self.parameters())
        made = self._new_classifier(num_classes) if num_classes else nn.Identity()
        self.classifier = made.to(like.device, like.dtype)
        self.config["num_classes"] = num_classes

    def no_weight_decay(self) -> set[str]:
        """The parameters that weight decay should leave alone."""
        return no_weight_decay(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training keeps the features of each block only, and computes the rest twice."""
        self.grad_checkpointing = enable

    def _through(self, blocks: nn.Sequential, segments: int, x: Tensor) -> Tensor:
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            kept: Tensor = checkpoint_sequential(blocks, segments, x, use_reentrant=False)
            return kept
        through: Tensor = blocks(x)
        return through


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
    ) -> None:
        super().__init__()
        if not isinstance(depth, int) or depth < 8 or (depth - 2) % 6:
            raise ValueError(f"expected a depth of 6n + 2, such as 26 or 44; got {depth!r}")
        if not isinstance(fields, Sequence) or len(fields) != 3:
            raise ValueError(f"expected the fields of three stages; got {fields!r}")
        _expect_whole("fields", fields)
        _expect_whole("in_channels", in_channels)
        _expect_whole("stem", 1 if stem is None else stem)
        _expect_truth(exact=exact)
        kit = _Kit(group, pool, options)
        self.group = kit.group
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
        }
        width = fields[0] if stem is None else stem
        self.lift = kit.lift(in_channels, width)
        blocks: list[nn.Module] = []
        for stage, stage_fields in enumerate(fields):
            for block in range((depth - 2) // 6):
                halve = stage > 0 and block == 0
                blocks.append(_Block(width, stage_fields, kit, halve, exact))
                width = stage_fields
        self.blocks = nn.Sequential(*blocks)
        self.norm = kit.norm(width)
        self.pool = kit.pool()
        self.num_features = width * kit.orientations
        self.reset_classifier(num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self._through(self.blocks, len(self.blocks), self.lift(x))
        return torch.relu(self.norm(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        features: Tensor = self.pool(x).mean(dim=(2, 3))
        scores: Tensor = features if pre_logits else self.classifier(features)
        return scores

    def _new_classifier(self, num_classes: int) -> nn.Module:
        classifier = nn.Linear(self.num_features, num_classes)
        nn.init.xavier_normal_(classifier.weight)
        nn.init.zeros_(classifier.bias)
        return classifier


class ConvNet(_Classifier):
    """A stack of convolutions, batch norms and ReLUs: the paper's networks for MNIST-rot.

    Table 1: six layers without padding's help (each takes two pixels off), a 2×2 max-pooling after
    the second, and a classifier that reads the last map whole, 4×4 on images of 28×28. Table 2:
    seven layers that keep the size, poolings after the second and the fourth, then the mean over
    the image. Both are exactly symmetric under quarter turns on 28×28.

    Args:
        group: a group or its name; ``None`` for the ordinary CNN.
        fields: the number of fields of each layer.
        in_channels: channels of the image.
        num_classes: number of classes; 0 for no classifier: features come out.
        image_size: pixels along each side of the image; the classifier that reads the last map
            whole needs to know.
        pooled_after: the layers, counted from 1, that a 2×2 max-pooling follows.
        shrink: whether each layer takes a pixel off every side; otherwise it keeps the size.
        readout: ``"map"`` for a classifier on the whole last map, without bias; ``"mean"`` for one
            on its mean over the image.
        pool: how orientations are pooled before the classifier, as :class:`~econv.GroupPool2d`
            reads it (``"max"``, ``"mean+max"``, …), or ``None``.
        dropout: probability of dropping a number after each layer but those that a pooling follows.
        options: keywords of every PDO-eConv.

    >>> network = ConvNet("p8", fields=(7,) * 6)
    >>> sum(p.numel() for p in network.parameters())
    26747
    """

    def __init__(
        self,
        group: GroupLike | None = "p8",
        fields: Sequence[int] = (7,) * 6,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
        pooled_after: Sequence[int] = (2,),
        shrink: bool = True,
        readout: str = "map",
        pool: str | None = None,
        dropout: float = 0.2,
        options: ConvOptions | None = None,
    ) -> None:
        super().__init__()
        if readout not in ("map", "mean"):
            raise ValueError(f"expected readout 'map' or 'mean'; got {readout!r}")
        _expect_whole("fields", fields)
        _expect_whole("pooled_after", pooled_after)
        _expect_whole("in_channels", in_channels)
        _expect_whole("image_size", image_size)
        _expect_truth(shrink=shrink)
        share = isinstance(dropout, int | float) and not isinstance(dropout, bool)
        if not share or not 0 <= dropout < 1:
            raise ValueError(f"expected dropout as a number from 0 to below 1; got {dropout!r}")
        kit = _Kit(group, pool, options)
        self.group = kit.group
        self.config = {
            "group": kit.group,
            "fields": list(fields),
            "in_channels": in_channels,
            "num_classes": num_classes,
            "image_size": image_size,
            "pooled_after": list(pooled_after),
            "shrink": shrink,
            "readout": readout,
            "pool": pool,
            "dropout": dropout,
            "options": options,
        }
        layers: list[nn.Module] = []
        width, size = in_channels, image_size
        for number, layer_fields in enumerate(fields, start=1):
            make = kit.conv if layers else kit.lift
            layers += [make(width, layer_fields, shrink=shrink), kit.norm(layer_fields), nn.ReLU()]
            width, size = layer_fields, size - 2 * shrink
            if number in pooled_after:
                layers.append(nn.MaxPool2d(2))
                size //= 2
            elif dropout:
                layers.append(nn.Dropout(dropout))
        if size < 1:
            raise ValueError(f"expected larger images: of {image_size} pixels nothing is left")
        self.layers = nn.Sequential(*layers)
        self.pool = kit.pool()
        self.readout = readout
        self.num_features = width * kit.orientations
        self.last_size = size
        self.reset_classifier(num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        return self._through(self.layers, len(self.config["fields"]), x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.pool(x)
        if self.readout == "mean":
            x = x.mean(dim=(2, 3), keepdim=True)
        scores: Tensor = x if pre_logits else self.classifier(x)
        return scores.flatten(1)

    def _new_classifier(self, num_classes: int) -> nn.Module:
        whole = self.readout == "map"
        size = self.last_size if whole else 1
        classifier = nn.Conv2d(self.num_features, num_classes, size, bias=not whole)
        nn.init.xavier_normal_(classifier.weight)
        return classifier


# The rows of the paper's tables, by the names of their networks.
MODELS: dict[str, tuple[type[ResNet | ConvNet], dict[str, Any]]] = {
    "convnet6": (ConvNet, {"group": None, "fields": (20,) * 6}),
    "convnet6_p4": (ConvNet, {"group": "p4", "fields": (10,) * 6}),
    "convnet6_p8": (ConvNet, {"group": "p8", "fields": (7,) * 6}),
    "convnet7_p8": (
        ConvNet,
        {
            "group": "p8",
            "fields": (16, 16, 32, 32, 32, 64, 64),
            "pooled_after": (2, 4),
            "shrink": False,
            "readout": "mean",
            "pool": "max",
        },
    ),
    "resnet26": (ResNet, {"group": None, "depth": 26, "fields": (16, 32, 64)}),
    "resnet26_p6": (ResNet, {"group": "p6", "depth": 26, "fields": (6, 13, 26)}),
    "resnet26_p6m": (ResNet, {"group": "p6m", "depth": 26, "fields": (6, 9, 18)}),
    "resnet26_p8": (ResNet, {"group": "p8", "depth": 26, "fields": (20, 40, 80)}),
    "resnet44": (ResNet, {"group": None, "depth": 44, "fields": (32, 64, 128)}),
    "resnet44_p4m": (ResNet, {"group": "p4m", "depth": 44, "fields": (11, 23, 45)}),
    "resnet44_p8": (ResNet, {"group": "p8", "depth": 44, "fields": (11, 23, 45)}),
    "wide_resnet26": (
        ResNet,
        {"group": None, "depth": 26, "fields": (160, 320, 640), "stem": 16},
    ),
}


def create_model(name: str, **options: Any) -> ResNet | ConvNet:
    """Build a network by name, such as ``"resnet26_p8"``; options override its arguments.

    The names are those of :data:`MODELS`, and ``resnet<depth>_<group>`` and
    ``convnet6_<group>`` for any other depth and group, with as many fields as keep the number of
    parameters near the ordinary network's: its channels divided by the root of the group's order.

    >>> model = create_model("resnet26_p6", num_classes=100)
    >>> create_model("resnet8_p4m").group
    Group('p4m')
    """
    if name in MODELS:
        kind, found = MODELS[name]
        return kind(**{**found, **options})
    match = re.fullmatch(r"(resnet([0-9]+)|convnet6)(?:_(p[1-9][0-9]*m?))?", str(name))
    if match is None:
        raise ValueError(
            f"unknown model {name!r}: expected one of {sorted(MODELS)}, or a name such as "
            "'resnet20_p12' or 'convnet6_p6m'"
        )
    group = Group(match[3]) if match[3] else None
    share = 1.0 if group is None else group.order**-0.5
    if match[2]:
        fields = tuple(max(1, round(channels * share)) for channels in (16, 32, 64))
        return ResNet(**{"group": group, "depth": int(match[2]), "fields": fields, **options})
    return ConvNet(**{"group": group, "fields": (max(1, round(20 * share)),) * 6, **options})


class _Kit:
    """The parts of a network: of a group, or ordinary ones."""

    def __init__(
        self, group: GroupLike | None, pool: str | None, options: ConvOptions | None
    ) -> None:
        self.group = None if group is None else Group(group)
        self.reduce = pool
        self.options: ConvOptions = options or {}
        if {"device", "dtype"} & set(self.options):
            raise ValueError(
                "expected options of convolutions; move the network with .to() instead"
            )
        if self.group is None and (pool is not None or options):
            raise ValueError(
                "expected neither pool nor options without a group: an ordinary network has no "
                f"orientations; got pool={pool!r}, options={options!r}"
            )

    @property
    def orientations(self) -> int:
        """How many channels of each field reach the classifier."""
        pool = self.pool()
        if isinstance(pool, GroupPool2d):
            return pool.outputs
        return 1 if self.group is None else self.group.order

    def lift(self, in_channels: int, fields: int, shrink: bool = False) -> nn.Module:
        if self.group is None:
            return _plain_conv(in_channels, fields, shrink=shrink)
        return _shrunk(LiftConv2d(in_channels, fields, self.group, **self.options), shrink)

    def conv(
        self, in_fields: int, out_fields: int, stride: int = 1, shrink: bool = False
    ) -> nn.Module:
        if self.group is None:
            return _plain_conv(in_fields, out_fields, stride=stride, shrink=shrink)
        options: ConvOptions = {**self.options, "stride": stride}
        return _shrunk(GroupConv2d(in_fields, out_fields, self.group, **options), shrink)

    def pointwise(self, in_fields: int, out_fields: int, stride: int) -> nn.Module:
        if self.group is None:
            return _plain_conv(in_fields, out_fields, size=1, stride=stride)
        # 1×1: the paper's shortcuts are group convolutions with operators of order 0.
        options: ConvOptions = {**self.options, "stride": stride}
        options["operators"], options["size"] = "order<=0", 1
        return GroupConv2d(in_fields, out_fields, self.group, **options)

    def norm(self, fields: int) -> nn.Module:
        if self.group is None:
            return nn.BatchNorm2d(fields)
        return GroupBatchNorm2d(fields, self.group)

    def pool(self) -> nn.Module:
        if self.group is None or self.reduce is None:
            return nn.Identity()
        return GroupPool2d(self.group, self.reduce)


class _Block(nn.Module):
    """Norm, ReLU, convolution, twice; a 1×1 convolution where the shape changes."""

    def __init__(
        self, in_fields: int, out_fields: int, kit: _Kit, halve: bool, exact: bool
    ) -> None:
        super().__init__()
        stride = 2 if halve and not exact else 1
        self.halve = Downsample2d() if halve and exact else nn.Identity()
        self.norm1 = kit.norm(in_fields)
        self.conv1 = kit.conv(in_fields, out_fields, stride)
        self.norm2 = kit.norm(out_fields)
        self.conv2 = kit.conv(out_fields, out_fields)
        changes = halve or in_fields != out_fields
        self.shortcut = kit.pointwise(in_fields, out_fields, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        if self.shortcut is None:
            shortcut, out = x, self.halve(norm_relu_conv(self.norm1, self.conv1, x))
        else:  # two layers read the same map
            normed = torch.relu(self.norm1(x))
            shortcut, out = self.shortcut(self.halve(normed)), self.halve(self.conv1(normed))
        return norm_relu_conv(self.norm2, self.conv2, out) + shortcut


def _expect_whole(name: str, given: Any) -> None:
    """One whole number above 0, or for a name in the plural a sequence of them."""
    many = name in ("fields", "pooled_after")
    fits = not many or (isinstance(given, Sequence) and not isinstance(given, str))
    for value in (given if many else [given]) if fits else ():
        fits &= hasattr(value, "__index__") and not isinstance(value, bool) and value >= 1
    if not fits:
        what = "whole numbers" if many else "a whole number"
        raise ValueError(f"expected {name}: {what} of at least 1; got {given!r}")


def _expect_truth(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"expected {name} as True or False; got {value!r}")


def _plain_conv(
    in_channels: int, out_channels: int, size: int = 3, stride: int = 1, shrink: bool = False
) -> nn.Conv2d:
    padding = size // 2 - shrink
    conv = nn.Conv2d(in_channels, out_channels, size, stride, padding, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


def _shrunk(conv: LiftConv2d | GroupConv2d, shrink: bool) -> nn.Module:
    """The convolution with one pixel less of padding: what is left of a valid 3×3 one."""
    if shrink:
        conv.padding -= 1
    return conv
