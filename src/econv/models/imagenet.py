"""The ResNets that everybody knows, for photographs and for volumes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from econv.groups import GroupLike
from econv.layers import CentredMaxPool2d, ConvOptions, norm_relu, norm_relu_conv
from econv.models.classifier import _Classifier, explain_classifier, linear_classifier, mean_scores
from econv.models.kit import Kit, expect_truth, expect_whole, share_below_one

# Blocks of each of the four stages, and whether they are bottlenecks.
IMAGENET: dict[int, tuple[tuple[int, ...], bool]] = {
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
            network equivariant at angles between quarter turns, too; images are then
            halved by :class:`~econv.Downsample2d` with 8 taps, at the start of a stage, in place of
            strides and the pooling. 0 (default) for none.
        oversample: points for each pixel that they act on, 1 by default; above 1 with ``antialias``
            only.
        dimension: 2 for images or 3 for volumes; by default the group's, and 2 without one.

    Raises:
        ValueError: for arguments out of their range, such as a depth that there is not.

    >>> import torch
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
        if not isinstance(depth, int) or depth not in IMAGENET:
            raise ValueError(f"expected a depth of {sorted(IMAGENET)}; got {depth!r}")
        kit = Kit(group, pool, options, activation, antialias, oversample, dimension, centred=exact)
        if fields is None:
            share = 1.0 if kit.group is None else kit.group.order**-0.5
            fields = [max(1, round(channels * share)) for channels in (64, 128, 256, 512)]
        if not isinstance(fields, Sequence) or len(fields) != 4:
            raise ValueError(f"expected the fields of four stages; got {fields!r}")
        expect_whole("fields", fields)
        expect_whole("in_channels", in_channels)
        expect_truth(exact=exact)
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
            "drop_rate": share_below_one("drop_rate", drop_rate),
            "activation": activation,
            "antialias": kit.antialias,
            "oversample": oversample,
            **kit.named_dimension,
        }
        self.dimension = kit.dimension
        blocks, bottleneck = IMAGENET[depth]
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
        self.register_load_state_dict_pre_hook(explain_classifier)

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
        return mean_scores(self, x, pre_logits)

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
        return linear_classifier(self.num_features, num_classes)


class _Basic(nn.Module):
    """Two 3×3 convolutions with norms, added to their input."""

    def __init__(self, in_fields: int, fields: int, kit: Kit, stride: int) -> None:
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

    def __init__(self, in_fields: int, fields: int, kit: Kit, stride: int) -> None:
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


def _shortcut(in_fields: int, out_fields: int, kit: Kit, stride: int) -> nn.Module | None:
    if stride == 1 and in_fields == out_fields:
        return None
    left = kit.apart(stride)[1]
    return nn.Sequential(kit.pointwise(in_fields, out_fields, left), kit.norm(out_fields))
