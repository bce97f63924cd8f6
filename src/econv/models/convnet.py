"""Stacks of convolutions: the paper's networks for MNIST-rot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from econv.groups import GroupLike
from econv.layers import ConvOptions
from econv.models.classifier import _Classifier
from econv.models.kit import (
    TORCH,
    Kit,
    continued,
    expect_margin,
    expect_truth,
    expect_whole,
    share_below_one,
)


class ConvNet(_Classifier):
    """A stack of convolutions, batch norms and ReLUs: the paper's networks for MNIST-rot.

    Table 1: six layers without padding's help (each takes two pixels off), a 2×2 max-pooling after
    the second, and a classifier that reads the last map whole, 4×4 on images of 28×28. Table 2:
    seven layers that keep the size, poolings after the second and the fourth, then the mean over
    the image. Both are exactly symmetric under quarter turns on 28×28. With a group of space, or
    ``dimension=3``, it is one for volumes.

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
            network equivariant at angles between quarter turns, too; poolings then are
            :class:`~econv.Downsample2d` with 8 taps. 0 (default) for none.
        oversample: points for each pixel that they act on, 1 by default; above 1 with ``antialias``
            only.
        margin: pixels that the image is continued by on every side, by the mean of its corners; 0
            by default. What the layers make of the border then stays away from what is in the
            image.
        dimension: 2 or 3; by default the group's, and 2 without one.

    Raises:
        ValueError: for arguments out of their range, and images of which nothing is left.

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
        dimension: int | None = None,
    ) -> None:
        super().__init__()
        if readout not in ("map", "mean"):
            raise ValueError(f"expected readout 'map' or 'mean'; got {readout!r}")
        expect_whole("fields", fields)
        if not fields:
            raise ValueError("expected the fields of one layer or more; got none")
        expect_whole("pooled_after", pooled_after)
        expect_whole("in_channels", in_channels)
        expect_whole("image_size", image_size)
        expect_truth(shrink=shrink)
        share_below_one("dropout", dropout)
        expect_margin(margin)
        kit = Kit(group, pool, options, activation, antialias, oversample, dimension)
        self.dimension = kit.dimension
        self._axes = tuple(range(2, 2 + self.dimension))  # known where the network is traced
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
            **kit.named_dimension,
        }
        self.margin = margin
        layers: list[nn.Module] = []
        width, size = in_channels, image_size + 2 * margin
        for number, layer_fields in enumerate(fields, start=1):
            make = kit.conv if layers else kit.lift
            layers += [make(width, layer_fields, shrink=shrink), kit.norm(layer_fields)]
            layers.append(kit.activation())
            width, size = layer_fields, size - 2 * shrink
            if number in pooled_after:
                plain = TORCH[self.dimension]["halving"]
                layers.append(kit.halving() if kit.antialias else plain(2))
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
        if self.margin:
            x = continued(x, self.margin, self._axes)
        return self._through(self.layers, len(self.config["fields"]), x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.pool(x)
        if self.readout == "mean":
            x = x.mean(dim=self._axes, keepdim=True)
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
        weights = self.num_features * num_classes * size**self.dimension
        if weights > _MOST_WEIGHTS:
            raise ValueError(
                f"expected a classifier of at most {_MOST_WEIGHTS} weights; got {weights} for "
                f"{num_classes} classes and a last map with sides of {size} pixels: take smaller "
                "images or margins, or readout='mean'"
            )
        made = TORCH[self.dimension]["conv"]
        classifier: Any = made(self.num_features, num_classes, size, bias=not whole)
        nn.init.xavier_normal_(classifier.weight)
        found: nn.Module = classifier
        return found


_MOST_WEIGHTS = 1 << 28  # of a classifier: a gigabyte
