"""Networks with an answer for every pixel or voxel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from econv.groups import GroupLike
from econv.layers import ConvOptions, norm_relu, norm_relu_conv
from econv.models.classifier import _Classifier
from econv.models.classifiers import by_name
from econv.models.imagenet import ImageNetResNet
from econv.models.kit import TORCH, Kit, expect_whole, share_below_one
from econv.models.resnet import ResNet

OUTPUTS = ("scalar", "regular", "vector")


class _Dense(_Classifier):
    """Features of every pixel, and a last layer for scores, fields or vectors."""

    output_kind = "scalar"

    def _take_head(self, kit: Kit, width: int, output: str, drop_rate: float) -> None:
        if output not in OUTPUTS:
            raise ValueError(f"expected output as one of {OUTPUTS}; got {output!r}")
        if output != "scalar" and kit.group is None:
            raise ValueError(
                f"expected a group for the output {output!r}: an ordinary network has no "
                "orientations"
            )
        self.output_kind, self._kit, self._width = output, kit, width
        self.group, self.dimension = kit.group, kit.dimension
        self.pool = kit.pool() if output == "scalar" else nn.Identity()
        each = kit.orientations if output == "scalar" or kit.group is None else kit.group.order
        self.num_features = width * each
        self.head_drop = nn.Dropout(drop_rate)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Scores, fields or vectors of a feature map; what they are made of, if ``pre_logits``."""
        features: Tensor = self.pool(x)
        if pre_logits:
            return features
        scores: Tensor = self.classifier(self.head_drop(features))
        return scores

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
        return 256 if self.dimension == 2 else 64

    def _new_classifier(self, num_classes: int) -> nn.Module:
        if self.output_kind == "regular":
            return self._kit.pointwise(self._width, num_classes, 1)
        if self.output_kind == "vector":
            return self._kit.vectors(self._width, num_classes)
        conv: Any = TORCH[self.dimension]["conv"]
        classifier: nn.Module = conv(self.num_features, num_classes, 1)
        nn.init.xavier_normal_(classifier.weight)  # type: ignore[arg-type]
        nn.init.zeros_(classifier.bias)  # type: ignore[arg-type]
        return classifier


class UNet(_Dense):
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
            network equivariant at angles between quarter turns, too. 0 (default) for none.
        oversample: points for each pixel that they act on, 1 by default; above 1 with ``antialias``
            only.
        dimension: 2 for images or 3 for volumes; by default the group's, and 2 without one.
        output: ``"scalar"`` (default), scores of each pixel; ``"regular"``, group features,
            ``num_classes`` fields of them; ``"vector"``, so many vectors.

    :class:`EncoderUNet` and :class:`FPN` are for a ResNet as encoder.

    Raises:
        ValueError: for arguments out of their range, such as the fields of one level only.

    >>> import torch
    >>> network = UNet("T", fields=(1, 2), num_classes=3)
    >>> network(torch.randn(1, 1, 8, 9, 8)).shape
    torch.Size([1, 3, 8, 9, 8])
    """

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
        output: str = "scalar",
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
            "output": output,
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
        self._take_head(kit, first, output, drop_rate)
        self.reset_classifier(num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, of the size of the input."""
        kept: list[Tensor] = []
        for number, level in enumerate(self.down):
            x = self._level(level, self.halve(x) if number else x)
            kept.append(x)
        del kept[-1]
        for level in self.up:
            beside = kept.pop()
            x = self._level(level, torch.cat([self.widen(x, beside.shape[2:]), beside], 1))
        return x

    def _level(self, level: nn.Module, x: Tensor) -> Tensor:
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            kept: Tensor = checkpoint(level, x, use_reentrant=False)
            return kept
        through: Tensor = level(x)
        return through

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The first level, and each of the others."""
        return {"stem": r"^down\.0\.", "blocks": r"^(?:down|up)\.(\d+)"}


class _OverEncoder(_Dense):
    """What the networks over an encoder share: its maps, of every size, and the way back."""

    def __init__(
        self,
        encoder: str = "resnet18_p8",
        fields: Sequence[int] | None = None,
        in_channels: int = 3,
        num_classes: int = 2,
        output: str = "scalar",
        pool: str = "max",
        drop_rate: float = 0.0,
        encoder_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        own = {"in_channels", "num_classes"}
        options = {} if encoder_options is None else encoder_options
        if not isinstance(options, Mapping) or own & {*options}:
            raise ValueError(
                "expected encoder_options as a mapping without in_channels and num_classes, which "
                f"are arguments of the whole network; got {encoder_options!r}"
            )
        given = {**options, "in_channels": in_channels, "num_classes": 0}
        found = by_name(encoder, given)
        if not isinstance(found, ResNet | ImageNetResNet):
            raise ValueError(f"expected the name of a ResNet as encoder; got {encoder!r}")
        self.encoder = found
        of = found.config
        reduce = None if found.group is None else pool
        shape = (of["activation"], of["antialias"], of["oversample"], found.dimension)
        kit = Kit(found.group, reduce, of["options"], *shape)
        self.config = {
            "encoder": encoder,
            "in_channels": in_channels,
            "num_classes": num_classes,
            "output": output,
            "pool": pool,
            "drop_rate": share_below_one("drop_rate", drop_rate),
            "encoder_options": dict(options),
        }
        info = found.feature_info()
        # Of each map whether it is smaller than the one before: known where the network is traced.
        reductions = [1, *(entry["reduction"] for entry in info)]
        self.halved = [after > before for before, after in pairwise(reductions)]
        self.widen = kit.doubling()
        width = self._build(kit, [entry["fields"] for entry in info], fields)
        self._take_head(kit, width, output, drop_rate)
        self.reset_classifier(num_classes)

    def _build(self, kit: Kit, maps: list[int], fields: Sequence[int] | None) -> int:
        """Make the way back from maps of so many fields; returns the fields at its end."""
        raise NotImplementedError

    def _to(self, x: Tensor, number: int, like: Tensor) -> Tensor:
        """Of the size of that map, enlarged to that of the one before, or of the input."""
        found: Tensor = self.widen(x, like.shape[2:]) if self.halved[number] else x
        return found

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
        return self.encoder.image_size

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training computes the features of each block twice and keeps none of them."""
        if enable:
            raise ValueError("expected enable=False: the encoder's maps are all needed")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The encoder, and what comes after it."""
        return {"stem": r"^encoder", "blocks": r"^(?:levels|sides|end)\.?(\d+)?"}


class EncoderUNet(_OverEncoder):
    """A U-Net whose way down is one of our ResNets: ``create_model("unet_resnet26_p8")``.

    From the last map of the encoder up: enlarged by linear interpolation, beside the map of the
    next larger stage, two convolutions. At the end, at the size of the input, orientations are
    pooled, and a 1×1 convolution makes scores. ``[batch, in_channels, …]`` →
    ``[batch, num_classes, …]``: scores turn with the input, under the symmetries of the grid
    exactly on every size, if the encoder's maps do (``exact=True``, as all but the paper's are).

    Args:
        encoder: name of a ResNet, for images or volumes, as :func:`econv.create_model` reads it.
        fields: of each level on the way up, from the smallest; by default those of the encoder's
            map of that size, and half of the last at the end.
        in_channels: channels of the input.
        num_classes: scores of each pixel; 0 for none: features come out.
        output: ``"scalar"`` (default), scores of each pixel; ``"regular"``, group features,
            ``num_classes`` fields of them; ``"vector"``, so many vectors.
        pool: how orientations are pooled before the scores, ``"max"`` by default.
        drop_rate: probability of dropping a feature before the scores, 0 by default.
        encoder_options: arguments of the encoder, such as ``{"fields": (4, 8, 16)}``; activation,
            blur and options of convolutions hold on the way up, too.

    Raises:
        ValueError: for an encoder that is no ResNet by name, and options that it does not take.

    >>> import torch
    >>> network = EncoderUNet("cifar_resnet8_p4", encoder_options={"fields": (1, 2, 2)})
    >>> network(torch.randn(1, 3, 21, 22)).shape
    torch.Size([1, 2, 21, 22])
    """

    def _build(self, kit: Kit, maps: list[int], fields: Sequence[int] | None) -> int:
        beside = [*maps[-2::-1], 0] if self.halved[0] else maps[-2::-1]
        default = [count or max(1, maps[0] // 2) for count in beside]
        widths = default if fields is None else fields
        if not isinstance(widths, Sequence) or len(widths) != len(default):
            raise ValueError(f"expected the fields of {len(default)} levels; got {fields!r}")
        expect_whole("fields", widths)
        self.config["fields"] = list(widths)
        self.levels = nn.ModuleList()
        below = maps[-1]
        for skip, width in zip(beside, widths, strict=True):
            self.levels.append(ConvPair(kit.conv(below + skip, width), width, kit))
            below = width
        return below

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, of the size of the input."""
        *maps, found = self.encoder.feature_maps(x)
        for level in self.levels:
            found = self._to(found, len(maps), maps[-1] if maps else x)
            if maps:
                found = torch.cat([found, maps.pop()], 1)
            found = level(found)
        return found


class FPN(_OverEncoder):
    """A feature pyramid (Lin et al. 2017) over a ResNet: ``create_model("fpn_resnet18_p8")``.

    The maps of all stages get as many fields by 1×1 convolutions; each is added to the one below,
    enlarged, and goes through a convolution; these, enlarged to the largest, are added up (Kirillov
    et al. 2019). Input, output and exactness are those of :class:`EncoderUNet`.

    Args:
        encoder: name of a ResNet, for images or volumes, as :func:`econv.create_model` reads it.
        fields: one number, of every level, in a sequence; by default the encoder's second map's.
        in_channels: channels of the input.
        num_classes: scores of each pixel; 0 for none: features come out.
        output: ``"scalar"`` (default), ``"regular"`` or ``"vector"``.
        pool: how orientations are pooled before the scores, ``"max"`` by default.
        drop_rate: probability of dropping a feature before the scores, 0 by default.
        encoder_options: arguments of the encoder, such as ``{"fields": (4, 8, 16)}``.

    Raises:
        ValueError: for an encoder that is no ResNet by name, and options that it does not take.

    >>> import torch
    >>> network = FPN("cifar_resnet8_p4", num_classes=5, encoder_options={"fields": (1, 2, 2)})
    >>> network(torch.randn(1, 3, 21, 22)).shape
    torch.Size([1, 5, 21, 22])
    """

    def _build(self, kit: Kit, maps: list[int], fields: Sequence[int] | None) -> int:
        widths = [maps[1]] if fields is None else fields
        if not isinstance(widths, Sequence) or len(widths) != 1:
            raise ValueError(f"expected the fields of all levels as one number; got {fields!r}")
        expect_whole("fields", widths)
        self.config["fields"] = list(widths)
        width = widths[0]
        self.sides = nn.ModuleList(kit.pointwise(count, width, 1) for count in maps)
        self.levels = nn.ModuleList(_ConvNorm(width, kit) for _ in maps)
        self.end = _ConvNorm(width, kit)
        return width

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, of the size of the input."""
        maps = [
            side(each) for side, each in zip(self.sides, self.encoder.feature_maps(x), strict=True)
        ]
        for number in range(len(maps) - 2, -1, -1):
            maps[number] = maps[number] + self._to(maps[number + 1], number + 1, maps[number])
        total: Tensor = self.levels[-1](maps[-1])
        for number in range(len(maps) - 2, -1, -1):
            total = self.levels[number](maps[number]) + self._to(total, number + 1, maps[number])
        last: Tensor = self.end(self._to(total, 0, x))
        return last


class _ConvNorm(nn.Module):
    """A convolution, a norm and an activation."""

    def __init__(self, fields: int, kit: Kit) -> None:
        super().__init__()
        self.conv = kit.conv(fields, fields)
        self.norm = kit.norm(fields)
        self.activation = kit.activation()

    def forward(self, x: Tensor) -> Tensor:
        return norm_relu(self.norm, self.conv(x), self.activation)


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
