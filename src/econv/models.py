"""Networks by name: ResNets as everybody knows them, the paper's networks, and ordinary twins.

The ResNets for photographs and the U-Nets are for volumes, too: their dimension is the group's.

This room knows architectures and nothing of how they are trained. Every network takes
``group=None`` for its twin: the same layers as ordinary convolutions and batch norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from econv import layers
from econv.basis import INITIALISATIONS
from econv.groups import Group, GroupLike
from econv.layers import CentredMaxPool2d, ConvOptions, LiftConv, norm_relu, norm_relu_conv
from econv.layers.activations import GroupActivation, activation_module
from econv.layers.checks import read_group
from econv.layers.convolution import GroupConv
from econv.layers.orientations import GroupPool
from econv.layers.sampling import Downsample, Upsample
from econv.parameters import no_weight_decay
from econv.pretrained import Pretrained

__all__ = [
    "MODELS",
    "ConvNet",
    "FeatureInfo",
    "Features",
    "ImageNetResNet",
    "ResNet",
    "UNet",
    "create_model",
]


class _Classifier(Pretrained):
    """What the networks share: features, a head, and the names that timm gives to both."""

    group: Group | None
    input_kind = "scalar"
    grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, ``[batch, fields * order, …]``."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Class scores of a feature map; what the classifier reads, if ``pre_logits``."""
        raise NotImplementedError

    def _new_classifier(self, num_classes: int) -> nn.Module:
        """The last layer, for one class or more."""
        raise NotImplementedError

    def feature_maps(self, x: Tensor) -> Iterator[Tensor]:
        """The last map of every stage, as group features: what :class:`Features` pools."""
        raise NotImplementedError

    def feature_info(self) -> list[dict[str, Any]]:
        """Of each of these maps its fields, its reduction and the module that it comes from."""
        raise ValueError(
            f"expected a network with stages for features_only; {type(self).__name__} has none"
        )

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The parts of the network from first to last, as timm groups parameters by them.

        Patterns of parameter names: those of the stem, and those of the blocks, of which each is a
        part of its own; whole stages, where the network has some, if ``coarse``.
        """
        raise NotImplementedError

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
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
        whole = isinstance(num_classes, Integral) and not isinstance(num_classes, bool)
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
        drop_rate: probability of dropping a feature before the classifier, 0 by default.
        activation: name of the functions between layers, ``"relu"`` by default, as
            :class:`~econv.GroupActivation2d` reads it.
        antialias: width in pixels of the blur after each of them, such as 0.7, which keeps the
            network equivariant at angles that the pixel grid has not; images are then
            halved by :class:`~econv.Downsample2d` with 8 taps. 0 (default) for none.
        oversample: points for each pixel that they act on, 1 by default; above 1 with ``antialias``
            only.

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
    ) -> None:
        super().__init__()
        if not isinstance(depth, int) or not 8 <= depth <= 1202 or (depth - 2) % 6:
            raise ValueError(
                f"expected a depth of 6n + 2 from 8 to 1202, such as 26 or 44; got {depth!r}"
            )
        if not isinstance(fields, Sequence) or len(fields) != 3:
            raise ValueError(f"expected the fields of three stages; got {fields!r}")
        _expect_whole("fields", fields)
        _expect_whole("in_channels", in_channels)
        _expect_whole("stem", 1 if stem is None else stem)
        _expect_truth(exact=exact)
        kit = _Kit(group, pool, options, activation, antialias, oversample, 2, halves=exact)
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
            "drop_rate": _share("drop_rate", drop_rate),
            "activation": activation,
            "antialias": kit.antialias,
            "oversample": oversample,
        }
        width = fields[0] if stem is None else stem
        self.dimension = kit.dimension
        self.lift = kit.lift(in_channels, width)
        blocks: list[nn.Module] = []
        for stage, stage_fields in enumerate(fields):
            for block in range((depth - 2) // 6):
                halve = stage > 0 and block == 0
                blocks.append(_Block(width, stage_fields, kit, halve))
                width = stage_fields
        self.blocks = nn.Sequential(*blocks)
        self.norm = kit.norm(width)
        self.activation = kit.activation()
        self.pool = kit.pool()
        self.num_features = width * kit.orientations
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        self.register_load_state_dict_pre_hook(_explain_classifier)

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
        return 32

    def forward_features(self, x: Tensor) -> Tensor:
        x = self._through(self.blocks, len(self.blocks), self.lift(x))
        return norm_relu(self.norm, x, self.activation)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return _scores(self, x, pre_logits)

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
        count = len(self.blocks) // 3
        modules = [f"blocks.{count - 1}", f"blocks.{2 * count - 1}", "norm"]
        found = zip(self.config["fields"], (1, 2, 4), modules, strict=True)
        return [{"fields": f, "reduction": r, "module": m} for f, r, m in found]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The stem, and each block; they belong to no stages that have names."""
        return {"stem": r"^lift", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def _new_classifier(self, num_classes: int) -> nn.Module:
        return _linear(self.num_features, num_classes)


# Blocks of each of the four stages, and whether they are bottlenecks.
_IMAGENET: dict[int, tuple[tuple[int, ...], bool]] = {
    10: ((1, 1, 1, 1), False),
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


class ImageNetResNet(_Classifier):
    """The ResNet that everybody knows, for photographs of 224×224 pixels, with PDO-eConvs.

    A 7×7 convolution of stride 2, a 3×3 max pooling of stride 2, four stages of basic (18 and 34
    layers) or bottleneck blocks (50, 101 and 152, the stride in the 3×3 convolution), the mean over
    the image and a linear classifier; the names of the modules are torchvision's but for the
    ``classifier``. Images have at least 129 pixels along each side, so that the last maps have the
    five that the default stencils span. ``[batch, in_channels, height, width]`` →
    ``[batch, num_classes]``.

    With a group of space, such as ``"O"``, it is for volumes ``[batch, in_channels, depth, height,
    width]``: a 5×5×5 convolution of stride 2 and no pooling, then the same stages. Volumes have at
    least 33 voxels along each side.

    Args:
        group: a group or its name; ``None`` for the ordinary ResNet.
        depth: 10, 18, 34, 50, 101 or 152.
        fields: the number of fields of each stage, in bottlenecks before their fourfold width; by
            default 64, 128, 256 and 512 over the root of the group's order, which keeps the number
            of parameters near the ordinary network's.
        in_channels: channels of the image.
        num_classes: number of classes; 0 for no classifier: features come out.
        pool: how orientations are pooled before the classifier, as :class:`~econv.GroupPool2d`
            reduces them; ``None`` for a classifier on all of them.
        exact: put strides symmetrically about the centre (``centred=True``), so that they commute
            with quarter turns on every size.
        options: keywords of every PDO-eConv but the 1×1 ones.
        drop_rate: probability of dropping a feature before the classifier, 0 by default.
        activation: name of the functions between layers, ``"relu"`` by default, as
            :class:`~econv.GroupActivation2d` reads it.
        antialias: width in pixels of the blur after each of them, such as 0.7, which keeps the
            network equivariant at angles that the pixel grid has not; images are then
            halved by :class:`~econv.Downsample2d` with 8 taps, at the start of a stage, in place of
            strides and the pooling. 0 (default) for none.
        oversample: points for each pixel that they act on, 1 by default; above 1 with ``antialias``
            only.
        dimension: 2 for images or 3 for volumes; by default the group's, and 2 without one.

    >>> network = ImageNetResNet("p4", depth=18, fields=(2, 2, 4, 4), num_classes=5, pool="max")
    >>> network(torch.randn(1, 3, 129, 129)).shape
    torch.Size([1, 5])
    """

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(
        self,
        group: GroupLike | None = "p8",
        depth: int = 18,
        fields: Sequence[int] | None = None,
        in_channels: int = 3,
        num_classes: int = 1000,
        pool: str | None = None,
        exact: bool = False,
        options: ConvOptions | None = None,
        drop_rate: float = 0.0,
        activation: str = "relu",
        antialias: float = 0.0,
        oversample: int = 1,
        dimension: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(depth, int) or depth not in _IMAGENET:
            raise ValueError(f"expected a depth of {sorted(_IMAGENET)}; got {depth!r}")
        kit = _Kit(
            group, pool, options, activation, antialias, oversample, dimension, centred=exact
        )
        if fields is None:
            share = 1.0 if kit.group is None else kit.group.order**-0.5
            fields = [max(1, round(channels * share)) for channels in (64, 128, 256, 512)]
        if not isinstance(fields, Sequence) or len(fields) != 4:
            raise ValueError(f"expected the fields of four stages; got {fields!r}")
        _expect_whole("fields", fields)
        _expect_whole("in_channels", in_channels)
        _expect_truth(exact=exact)
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
            "drop_rate": _share("drop_rate", drop_rate),
            "activation": activation,
            "antialias": kit.antialias,
            "oversample": oversample,
            **kit.named_dimension,
        }
        self.dimension = kit.dimension
        blocks, bottleneck = _IMAGENET[depth]
        self.expansion = 4 if bottleneck else 1
        stem_size = 7 if kit.dimension == 2 else 5
        stem = kit.lift(in_channels, fields[0], size=stem_size, stride=1 if kit.antialias else 2)
        self.conv1 = stem
        self.halve = kit.halving() if kit.antialias else nn.Identity()
        self.bn1 = kit.norm(fields[0])
        self.activation = kit.activation()
        centred = exact and kit.group is not None
        pooling = CentredMaxPool2d(3, 2, 1) if centred else nn.MaxPool2d(3, 2, 1)
        self.pooled = kit.dimension == 2
        self.maxpool: nn.Module = nn.Identity()
        if self.pooled:
            self.maxpool = kit.halving() if kit.antialias else pooling
        width = fields[0]
        for number, (count, inner) in enumerate(zip(blocks, fields, strict=True), start=1):
            stage: list[nn.Module] = []
            for place in range(count):
                stride = 2 if number > 1 and place == 0 else 1
                kind = _Bottleneck if bottleneck else _Basic
                stage.append(kind(width, inner, kit, stride))
                width = inner * self.expansion
            setattr(self, f"layer{number}", nn.Sequential(*stage))
        self.pool = kit.pool()
        self.num_features = width * kit.orientations
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        self.register_load_state_dict_pre_hook(_explain_classifier)

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
        return 224 if self.dimension == 2 else 64

    def _stem(self, x: Tensor) -> Tensor:
        return norm_relu(self.bn1, self.halve(self.conv1(x)), self.activation)

    def _stages(self) -> list[nn.Sequential]:
        return [self.layer1, self.layer2, self.layer3, self.layer4]

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.maxpool(self._stem(x))
        for stage in self._stages():
            x = self._through(stage, len(stage), x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return _scores(self, x, pre_logits)

    def feature_maps(self, x: Tensor) -> Iterator[Tensor]:
        """The map of the stem and the last of every stage, as group features."""
        x = self._stem(x)
        yield x
        x = self.maxpool(x)
        for stage in self._stages():
            x = stage(x)
            yield x

    def feature_info(self) -> list[dict[str, Any]]:
        """Of each of these maps its fields, its reduction and the module that it comes from."""
        fields = self.config["fields"]
        found = [{"fields": fields[0], "reduction": 2, "module": "bn1"}]
        for number, count in enumerate(fields, start=1):
            whole = count * self.expansion
            reduction = (2 if self.pooled else 1) << number
            found.append({"fields": whole, "reduction": reduction, "module": f"layer{number}"})
        return found

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The stem, and each block, or each stage if ``coarse``."""
        return {
            "stem": r"^conv1|bn1|maxpool",
            "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)",
        }

    def _new_classifier(self, num_classes: int) -> nn.Module:
        return _linear(self.num_features, num_classes)


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
        kit = _Kit(group, reduce, options, activation, antialias, oversample, dimension)
        if fields is None:
            share = 1.0 if kit.group is None else kit.group.order**-0.5
            fields = [max(1, round(channels * share)) for channels in (32, 64, 128, 256)]
        if not isinstance(fields, Sequence) or len(fields) < 2:
            raise ValueError(f"expected the fields of two levels or more; got {fields!r}")
        _expect_whole("fields", fields)
        _expect_whole("in_channels", in_channels)
        self.group, self.dimension = kit.group, kit.dimension
        self.config = {
            "group": kit.group,
            "fields": list(fields),
            "in_channels": in_channels,
            "num_classes": num_classes,
            "pool": pool,
            "options": options,
            "drop_rate": _share("drop_rate", drop_rate),
            "activation": activation,
            "antialias": kit.antialias,
            "oversample": oversample,
            **kit.named_dimension,
        }
        self.halve = kit.halving()
        self.widen = kit.doubling()
        first, *others = fields
        self.down = nn.ModuleList([_Pair(kit.lift(in_channels, first), first, kit)])
        for before, width in zip(fields, others, strict=False):
            self.down.append(_Pair(kit.conv(before, width), width, kit))
        self.up = nn.ModuleList()
        for below, width in list(zip(others, fields, strict=False))[::-1]:
            self.up.append(_Pair(kit.conv(below + width, width), width, kit))
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
        conv: Any = _TORCH[self.dimension]["conv"]
        classifier: nn.Module = conv(self.num_features, num_classes, 1)
        nn.init.xavier_normal_(classifier.weight)  # type: ignore[arg-type]
        nn.init.zeros_(classifier.bias)  # type: ignore[arg-type]
        return classifier


class _Pair(nn.Module):
    """A convolution and another, each with a norm and an activation."""

    def __init__(self, first: nn.Module, fields: int, kit: _Kit) -> None:
        super().__init__()
        self.conv1 = first
        self.norm1 = kit.norm(fields)
        self.activation = kit.activation()
        self.conv2 = kit.conv(fields, fields)
        self.norm2 = kit.norm(fields)

    def forward(self, x: Tensor) -> Tensor:
        out = norm_relu_conv(self.norm1, self.conv2, self.conv1(x), self.activation)
        return norm_relu(self.norm2, out, self.activation)


class _Basic(nn.Module):
    """Two 3×3 convolutions with norms, added to their input."""

    def __init__(self, in_fields: int, fields: int, kit: _Kit, stride: int) -> None:
        super().__init__()
        self.halve, left = kit.apart(stride)
        self.conv1 = kit.conv(in_fields, fields, left)
        self.bn1 = kit.norm(fields)
        self.activation = kit.activation()
        self.conv2 = kit.conv(fields, fields)
        self.bn2 = kit.norm(fields)
        self.downsample = _shortcut(in_fields, fields, kit, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = self.halve(x)
        shortcut = x if self.downsample is None else self.downsample(x)
        out = norm_relu_conv(self.bn1, self.conv2, self.conv1(x), self.activation)
        found: Tensor = self.activation(self.bn2(out) + shortcut)
        return found


class _Bottleneck(nn.Module):
    """A 3×3 convolution between 1×1 ones that narrow and widen, added to its input."""

    def __init__(self, in_fields: int, fields: int, kit: _Kit, stride: int) -> None:
        super().__init__()
        self.halve, left = kit.apart(stride)
        self.conv1 = kit.pointwise(in_fields, fields, 1)
        self.bn1 = kit.norm(fields)
        self.activation = kit.activation()
        self.conv2 = kit.conv(fields, fields, left)
        self.bn2 = kit.norm(fields)
        self.conv3 = kit.pointwise(fields, 4 * fields, 1)
        self.bn3 = kit.norm(4 * fields)
        self.downsample = _shortcut(in_fields, 4 * fields, kit, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = self.halve(x)
        shortcut = x if self.downsample is None else self.downsample(x)
        out = norm_relu_conv(self.bn1, self.conv2, self.conv1(x), self.activation)
        out = norm_relu_conv(self.bn2, self.conv3, out, self.activation)
        found: Tensor = self.activation(self.bn3(out) + shortcut)
        return found


def _shortcut(in_fields: int, out_fields: int, kit: _Kit, stride: int) -> nn.Module | None:
    if stride == 1 and in_fields == out_fields:
        return None
    left = kit.apart(stride)[1]
    return nn.Sequential(kit.pointwise(in_fields, out_fields, left), kit.norm(out_fields))


def _scores(network: ResNet | ImageNetResNet, x: Tensor, pre_logits: bool) -> Tensor:
    axes = tuple(range(2, 2 + network.dimension))
    features: Tensor = network.pool(x).mean(dim=axes)
    if pre_logits:
        return features
    scores: Tensor = network.classifier(network.head_drop(features))
    return scores


def _linear(features: int, num_classes: int) -> nn.Linear:
    classifier = nn.Linear(features, num_classes)
    nn.init.xavier_normal_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return classifier


def _explain_classifier(
    network: nn.Module, state: dict[str, Tensor], prefix: str, *_: object
) -> None:
    """Weights of a network whose classifier reads all orientations do not fit a pooled one."""
    assert isinstance(network, ResNet | ImageNetResNet)
    found, own = state.get(f"{prefix}classifier.weight"), network.classifier
    if found is None or not isinstance(own, nn.Linear) or network.group is None:
        return
    pool = network.pool
    every = network.num_features // pool.outputs if isinstance(pool, GroupPool) else 0
    if found.ndim == 2 and found.shape[1] == every * network.group.order != own.in_features:
        raise ValueError(
            f"expected a classifier of {own.in_features} features, of which orientations are "
            f"pooled (pool={network.config['pool']!r}); got one of {found.shape[1]}, which reads "
            "all orientations, as the paper's networks do: make the network with pool=None and "
            "exact=False, or by its name paper_resnet…"
        )


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
        activation: name of the functions between layers, ``"relu"`` by default, as
            :class:`~econv.GroupActivation2d` reads it.
        antialias: width in pixels of the blur after each of them, such as 0.7, which keeps the
            network equivariant at angles that the pixel grid has not; poolings then are
            :class:`~econv.Downsample2d` with 8 taps. 0 (default) for none.
        oversample: points for each pixel that they act on, 1 by default; above 1 with ``antialias``
            only.
        margin: pixels that the image is continued by on every side, as it is at its border; 0 by
            default. What the layers make of the border then stays away from what is in the image.

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
        activation: str = "relu",
        antialias: float = 0.0,
        oversample: int = 1,
        margin: int = 0,
    ) -> None:
        super().__init__()
        if readout not in ("map", "mean"):
            raise ValueError(f"expected readout 'map' or 'mean'; got {readout!r}")
        _expect_whole("fields", fields)
        if not fields:
            raise ValueError("expected the fields of one layer or more; got none")
        _expect_whole("pooled_after", pooled_after)
        _expect_whole("in_channels", in_channels)
        _expect_whole("image_size", image_size)
        _expect_truth(shrink=shrink)
        _share("dropout", dropout)
        if isinstance(margin, bool) or not isinstance(margin, int) or margin < 0:
            raise ValueError(f"expected margin as a number of pixels, 0 or more; got {margin!r}")
        kit = _Kit(group, pool, options, activation, antialias, oversample, 2)
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
            "activation": activation,
            "antialias": kit.antialias,
            "oversample": oversample,
            "margin": margin,
        }
        self.margin = nn.ReplicationPad2d(margin) if margin else nn.Identity()
        layers: list[nn.Module] = []
        width, size = in_channels, image_size + 2 * margin
        for number, layer_fields in enumerate(fields, start=1):
            make = kit.conv if layers else kit.lift
            layers += [make(width, layer_fields, shrink=shrink), kit.norm(layer_fields)]
            layers.append(kit.activation())
            width, size = layer_fields, size - 2 * shrink
            if number in pooled_after:
                layers.append(kit.halving() if kit.antialias else nn.MaxPool2d(2))
                size = (size + bool(kit.antialias)) // 2
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
        return self._through(self.layers, len(self.config["fields"]), self.margin(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.pool(x)
        if self.readout == "mean":
            x = x.mean(dim=(2, 3), keepdim=True)
        scores: Tensor = x if pre_logits else self.classifier(x)
        return scores.flatten(1)

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
        return int(self.config["image_size"])

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The first layer, and each of the others."""
        return {"stem": r"^layers\.0\.", "blocks": r"^layers\.(\d+)"}

    def _new_classifier(self, num_classes: int) -> nn.Module:
        whole = self.readout == "map"
        size = self.last_size if whole else 1
        if self.num_features * num_classes * size**2 > _MOST_WEIGHTS:
            raise ValueError(
                f"expected a classifier of at most {_MOST_WEIGHTS} weights: it reads {size}×{size} "
                f"pixels of {self.num_features} channels for {num_classes} classes; take smaller "
                "images or margins, or readout='mean'"
            )
        classifier = nn.Conv2d(self.num_features, num_classes, size, bias=not whole)
        nn.init.xavier_normal_(classifier.weight)
        return classifier


Network = ResNet | ConvNet | ImageNetResNet | UNet

_INVARIANT: dict[str, Any] = {"pool": "max", "exact": True}

# The rows of the paper's tables, and what else has a name of its own.
MODELS: dict[str, tuple[type[Network], dict[str, Any]]] = {
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
    "paper_resnet26": (ResNet, {"group": None, "depth": 26, "fields": (16, 32, 64)}),
    "paper_resnet26_p6": (ResNet, {"group": "p6", "depth": 26, "fields": (6, 13, 26)}),
    "paper_resnet26_p6m": (ResNet, {"group": "p6m", "depth": 26, "fields": (6, 9, 18)}),
    "paper_resnet26_p8": (ResNet, {"group": "p8", "depth": 26, "fields": (20, 40, 80)}),
    "paper_resnet44": (ResNet, {"group": None, "depth": 44, "fields": (32, 64, 128)}),
    "paper_resnet44_p4m": (ResNet, {"group": "p4m", "depth": 44, "fields": (11, 23, 45)}),
    "paper_resnet44_p8": (ResNet, {"group": "p8", "depth": 44, "fields": (11, 23, 45)}),
    "paper_wide_resnet26": (
        ResNet,
        {"group": None, "depth": 26, "fields": (160, 320, 640), "stem": 16},
    ),
    **{
        f"resnet{depth}{end}": (
            ImageNetResNet,
            {"group": group, "depth": depth, **(_INVARIANT if group else {})},
        )
        for depth in (18, 50)
        for group, end in ((None, ""), ("p4", "_p4"), ("p8", "_p8"))
    },
}
MODELS |= {
    name.replace("paper_", "cifar_"): (kind, {**options, **_INVARIANT})
    for name, (kind, options) in MODELS.items()
    if name in ("paper_resnet26_p6", "paper_resnet26_p8", "paper_resnet44_p8")
}


def create_model(
    name: str,
    *,
    features_only: bool = False,
    out_indices: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Build a network by name, such as ``"resnet18_p8"``; options override its arguments.

    - ``resnet18_p8``, ``resnet50_p4m``, …: the ResNets of 18, 34, 50, 101 and 152 layers for
      photographs (:class:`ImageNetResNet`).
    - ``cifar_resnet26_p8``, ``cifar_resnet20_p4``, …: the thin ones of 6n + 2 layers for images of
      32×32 (:class:`ResNet`). ``resnet26_p8`` means the same, where no other has that depth.
    - ``paper_resnet26_p8``, ``paper_resnet44_p4m``, …: the same as in the paper's tables, with
      strides and a classifier that reads all orientations.
    - ``convnet6_p8``, ``convnet7_p8``, …: the paper's for MNIST-rot (:class:`ConvNet`).
    - ``resnet10_3d_O``, ``resnet18_3d_I``, ``resnet50_3d_D4h``, …: ResNets for volumes, also of 10
      layers (:class:`ImageNetResNet`).
    - ``unet_p8``, ``unet_3d_O``, …: U-Nets for images and volumes (:class:`UNet`).

    Any depth and any group has a name; without a group, as in ``resnet18``, it is the ordinary
    network. All but the paper's pool orientations (``pool="max"``) and halve exactly, so that their
    scores stay the same when the image makes a quarter turn. Where the paper has a row for a name,
    its fields are taken; elsewhere as many as keep the number of parameters near the ordinary
    network's: its channels divided by the root of the group's order.

    Args:
        name: of the network; :data:`MODELS` lists those with rows.
        features_only: as timm has it: make a :class:`Features` of the network, which returns the
            last map of every stage.
        out_indices: which of these maps, all by default.
        options: arguments of the network's class, such as ``num_classes`` or ``in_channels``.

    Raises:
        ValueError: for a name that none of these is, or arguments out of their range.
        TypeError: for options that the class does not take.

    >>> model = create_model("resnet18_p8", num_classes=100)
    >>> create_model("cifar_resnet8_p4m").group
    Group('p4m')
    >>> create_model("resnet10_3d_O", fields=(1, 1, 2, 2), num_classes=10).dimension
    3
    """
    _expect_truth(features_only=features_only)
    network = _named(name, options)
    if not features_only:
        if out_indices is not None:
            raise ValueError("expected out_indices together with features_only=True")
        return network
    return Features(network, out_indices)


def _named(name: str, options: dict[str, Any]) -> Network:
    if isinstance(name, str) and name in MODELS:
        kind, found = MODELS[name]
        return kind(**{**found, **options})
    several = re.fullmatch(r"(?:resnet([0-9]+)(?=_3d)|unet)(_3d)?(?:_(\w+))?", str(name))
    if several is not None:
        return _in_any_dimension(several[1], several[2], several[3], options)
    pattern = r"(?:(paper|cifar)_)?(resnet([0-9]+)|convnet[67])(?:_(p[1-9][0-9]*m?))?"
    match = re.fullmatch(pattern, str(name))
    if match is None or (match[1] and not match[3]):
        raise ValueError(
            f"unknown model {name!r}: expected one of {sorted(MODELS)}, or a name such as "
            "'resnet34_p4m', 'cifar_resnet20_p12', 'convnet7_p6m', 'resnet10_3d_O' or 'unet_3d_O'"
        )
    group = Group(match[4]) if match[4] else None
    share = 1.0 if group is None else group.order**-0.5
    if match[2] == "convnet7":
        widths = (45, 45, 90, 90, 90, 181, 181)
        fields = tuple(max(1, round(channels * share)) for channels in widths)
        given = {"group": group, "fields": fields, "pool": "max" if group else None}
        return ConvNet(**{**MODELS["convnet7_p8"][1], **given, **options})
    if not match[3]:
        return ConvNet(**{"group": group, "fields": (max(1, round(20 * share)),) * 6, **options})
    depth = int(match[3])
    invariant = _INVARIANT if group is not None and match[1] != "paper" else {}
    if match[1] is None and depth in _IMAGENET:
        return ImageNetResNet(**{"group": group, "depth": depth, **invariant, **options})
    row = f"paper_{match[2]}" + (f"_{match[4]}" if match[4] else "")
    if row in MODELS:
        return ResNet(**{**MODELS[row][1], **invariant, **options})
    fields = tuple(max(1, round(channels * share)) for channels in (16, 32, 64))
    return ResNet(**{"group": group, "depth": depth, "fields": fields, **invariant, **options})


def _in_any_dimension(
    depth: str | None, volumes: str | None, group: str | None, options: dict[str, Any]
) -> Network:
    """The networks whose names say whether they are for volumes."""
    dimension = 3 if volumes else 2
    found = None if group is None else read_group(group, dimension, "create_model")
    given: dict[str, Any] = {"group": found} if found else {"group": None, "dimension": dimension}
    if depth is None:
        return UNet(**{**given, **options})
    if int(depth) not in _IMAGENET:
        raise ValueError(f"expected a depth of {sorted(_IMAGENET)} for volumes; got {depth}")
    invariant = _INVARIANT if found else {}
    return ImageNetResNet(**{"depth": int(depth), **given, **invariant, **options})


class FeatureInfo:
    """What the maps of :class:`Features` are, in timm's words."""

    def __init__(self, info: Sequence[dict[str, Any]], out_indices: Sequence[int]) -> None:
        self.info = list(info)
        self.out_indices = tuple(out_indices)

    def channels(self) -> list[int]:
        """Of each map its channels."""
        return [self.info[i]["num_chs"] for i in self.out_indices]

    def reduction(self) -> list[int]:
        """Of each map how many pixels of the image one of its own stands for."""
        return [self.info[i]["reduction"] for i in self.out_indices]

    def module_name(self) -> list[str]:
        """Of each map the module that it comes from."""
        return [self.info[i]["module"] for i in self.out_indices]

    def get_dicts(self) -> list[dict[str, Any]]:
        """All of that, a dictionary for each map."""
        return [{**self.info[i], "index": i} for i in self.out_indices]


class Features(nn.Module):
    """The last map of every stage of a network, as ordinary images that turn with the input.

    Orientations are pooled as the network pools them before its classifier, so that any decoder can
    read the maps; those of a network with ``pool=None`` keep them: group features. ``feature_info``
    has the channels and reductions, as timm's networks have it.

    >>> backbone = create_model("resnet18_p4", features_only=True, fields=(2, 2, 4, 4))
    >>> [tuple(x.shape) for x in backbone(torch.randn(1, 3, 160, 160))][-2:]
    [(1, 4, 10, 10), (1, 4, 5, 5)]
    >>> backbone.feature_info.channels(), backbone.feature_info.reduction()
    ([2, 2, 2, 4, 4], [2, 4, 8, 16, 32])
    """

    def __init__(self, network: Network, out_indices: Sequence[int] | None = None) -> None:
        super().__init__()
        if not isinstance(network, Network):
            raise ValueError(f"expected a network of econv; got {type(network).__name__}")
        info = network.feature_info()
        each = network.num_features // info[-1]["fields"]
        for entry in info:
            entry["num_chs"] = entry.pop("fields") * each
        chosen = range(len(info)) if out_indices is None else out_indices
        whole = isinstance(chosen, Sequence) and all(isinstance(i, int) for i in chosen)
        if not whole or not chosen or not all(-len(info) <= i < len(info) for i in chosen):
            raise ValueError(
                f"expected out_indices from {-len(info)} to {len(info) - 1}; got {out_indices!r}"
            )
        network.reset_classifier(0)
        self.network = network
        self.group = network.group
        self.feature_info = FeatureInfo(info, [i % len(info) for i in chosen])

    def forward(self, x: Tensor) -> list[Tensor]:
        """The maps of ``[batch, in_channels, height, width]``, in the order of the indices."""
        maps = list(self.network.feature_maps(x))
        return [self.network.pool(maps[i]) for i in self.feature_info.out_indices]


_TORCH: dict[int, dict[str, type[nn.Module]]] = {
    2: {"conv": nn.Conv2d, "norm": nn.BatchNorm2d},
    3: {"conv": nn.Conv3d, "norm": nn.BatchNorm3d},
}


class _Kit:
    """The parts of a network: of a group, or ordinary ones."""

    def __init__(
        self,
        group: GroupLike | None,
        pool: str | None,
        options: ConvOptions | None,
        activation: str,
        antialias: float,
        oversample: int,
        dimension: int | None,
        centred: bool = False,
        halves: bool = False,
    ) -> None:
        if not isinstance(dimension, int | None) or dimension not in (None, 2, 3):
            raise ValueError(f"expected dimension 2 or 3; got {dimension!r}")
        self.group = None if group is None else Group(group)
        self.dimension = dimension or (self.group.dimension if self.group else 2)
        if self.group is not None:
            read_group(self.group, self.dimension, "a network of this kind")
        self.centred = centred
        function = self._named("GroupActivation")(activation, oversample, antialias)
        self.name, self.oversample, self.antialias = activation, oversample, function.width
        self.halves = halves or self.antialias > 0
        self.reduce = pool
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"expected options as a mapping; got {options!r}")
        self.options: ConvOptions = {**(options or {})}
        if group is not None and activation in INITIALISATIONS:
            self.options.setdefault("init", activation)
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
    def named_dimension(self) -> dict[str, int]:
        """The dimension, where no group tells it."""
        return {} if self.group or self.dimension == 2 else {"dimension": self.dimension}

    def _named(self, name: str) -> Any:
        """The layer of that name, for images or for volumes."""
        return getattr(layers, f"{name}{self.dimension}d")

    def activation(self) -> nn.Module:
        if not self.antialias:
            return activation_module(self.name)
        made: GroupActivation = self._named("GroupActivation")(
            self.name, self.oversample, self.antialias
        )
        return made

    def halving(self) -> Downsample:
        made: Downsample = self._named("Downsample")(antialias=8 if self.antialias else 4)
        return made

    def doubling(self) -> Upsample:
        made: Upsample = self._named("Upsample")(antialias=8 if self.antialias else 4)
        return made

    def apart(self, stride: int) -> tuple[nn.Module, int]:
        """What halves at the start of a block, and the stride that is left to its convolutions."""
        if stride == 1 or not self.antialias:
            return nn.Identity(), stride
        return self.halving(), 1

    @property
    def orientations(self) -> int:
        """How many channels of each field reach the classifier."""
        pool = self.pool()
        if isinstance(pool, GroupPool):
            return pool.outputs
        return 1 if self.group is None else self.group.order

    def lift(
        self,
        in_channels: int,
        fields: int,
        shrink: bool = False,
        size: int | None = None,
        stride: int = 1,
    ) -> nn.Module:
        if self.group is None:
            return _plain_conv(self.dimension, in_channels, fields, size or 3, stride, shrink)
        options = self._strided(stride)
        if size is not None:
            options["size"] = size
        return _shrunk(self._named("LiftConv")(in_channels, fields, self.group, **options), shrink)

    def _strided(self, stride: int) -> ConvOptions:
        options: ConvOptions = {**self.options, "stride": stride}
        if self.centred and stride > 1:
            options["centred"] = True
        return options

    def conv(
        self, in_fields: int, out_fields: int, stride: int = 1, shrink: bool = False
    ) -> nn.Module:
        if self.group is None:
            return _plain_conv(self.dimension, in_fields, out_fields, stride=stride, shrink=shrink)
        options = self._strided(stride)
        return _shrunk(
            self._named("GroupConv")(in_fields, out_fields, self.group, **options), shrink
        )

    def pointwise(self, in_fields: int, out_fields: int, stride: int) -> nn.Module:
        if self.group is None:
            return _plain_conv(self.dimension, in_fields, out_fields, size=1, stride=stride)
        # 1×1: the paper's shortcuts are group convolutions with operators of order 0.
        options = self._strided(stride)
        options["operators"], options["size"] = "order<=0", 1
        made: GroupConv = self._named("GroupConv")(in_fields, out_fields, self.group, **options)
        return made

    def norm(self, fields: int) -> nn.Module:
        if self.group is None:
            return _TORCH[self.dimension]["norm"](fields)
        made: nn.Module = self._named("GroupBatchNorm")(fields, self.group)
        return made

    def pool(self) -> nn.Module:
        if self.group is None or self.reduce is None:
            return nn.Identity()
        made: GroupPool = self._named("GroupPool")(self.group, self.reduce)
        return made


class _Block(nn.Module):
    """Norm, ReLU, convolution, twice; a 1×1 convolution where the shape changes."""

    def __init__(self, in_fields: int, out_fields: int, kit: _Kit, halve: bool) -> None:
        super().__init__()
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
        if self.shortcut is None:
            out, shortcut = norm_relu_conv(self.norm1, self.conv1, x, self.activation, True)
            out = self.halve(out)
        else:  # two layers read the same map
            normed = norm_relu(self.norm1, x, self.activation)
            shortcut, out = self.shortcut(self.halve(normed)), self.halve(self.conv1(normed))
        return norm_relu_conv(self.norm2, self.conv2, out, self.activation) + shortcut


_MOST_WEIGHTS = 1 << 28  # of a classifier: a gigabyte


def _expect_whole(name: str, given: Any) -> None:
    """One whole number above 0, or for a name in the plural a sequence of them."""
    many = name in ("fields", "pooled_after")
    fits = not many or (isinstance(given, Sequence) and not isinstance(given, str))
    for value in (given if many else [given]) if fits else ():
        fits &= isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
    if not fits:
        what = "whole numbers" if many else "a whole number"
        raise ValueError(f"expected {name}: {what} of at least 1; got {given!r}")


def _share(name: str, given: Any) -> float:
    """A probability below 1."""
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not 0 <= given < 1:
        raise ValueError(f"expected {name} as a number from 0 to below 1; got {given!r}")
    return float(given)


def _expect_truth(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"expected {name} as True or False; got {value!r}")


def _plain_conv(
    dimension: int,
    in_channels: int,
    out_channels: int,
    size: int = 3,
    stride: int = 1,
    shrink: bool = False,
) -> nn.Module:
    padding, kind = size // 2 - shrink, _TORCH[dimension]["conv"]
    conv: Any = kind(in_channels, out_channels, size, stride, padding, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    made: nn.Module = conv
    return made


def _shrunk(conv: LiftConv | GroupConv, shrink: bool) -> nn.Module:
    """The convolution with one pixel less of padding: what is left of a valid 3×3 one."""
    if shrink:
        conv.padding -= 1
    return conv
