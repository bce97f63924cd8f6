"""Detectors with boxes: the backbone is converted, and the heads follow the pixels' symmetries.

This module knows the structure of torchvision's detectors (a backbone, anchors, heads) and nothing
of its classes: whatever has the same parts will do.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.conversion.convert import convert
from econv.conversion.trace import ConversionError
from econv.groups import Group, GroupLike
from econv.layers.checks import check_module

__all__ = ["convert_detector"]

Turn = tuple[int, bool]
"""Quarter turns anticlockwise, after a flip of left and right or none."""


def convert_detector(
    model: nn.Module,
    group: GroupLike = "p4",
    match: str = "params",
    *,
    example_input: Tensor,
    **options: Any,
) -> nn.Module:
    """Make a detector follow quarter turns (and flips): its boxes turn with the image.

    The backbone, with its feature pyramid, becomes equivariant, as :func:`~econv.convert` says. The
    heads stay as they are, weights included. They run on the features in every orientation that the
    pixels have, and the mean of what they say, turned back, counts: four times their work for
    quarter turns, eight with flips. Anchors and regions of interest lie about the centre.

    Boxes are exact to rounding for images whose sides, after the detector's own resizing, are
    multiples of its coarsest stride (32 for most; others are padded at two sides only).

    Args:
        model: ``fasterrcnn``, ``retinanet`` or ``fcos`` of torchvision, or what has their parts:
            ``backbone``, an anchor generator, and ``rpn`` with ``roi_heads``, or ``head``. It is
            not changed.
        group: a :class:`~econv.Group` or its name.
        match: as of :func:`~econv.convert`.
        example_input: images as the backbone gets them, ``[batch, channels, height, width]``.
        options: keywords of :func:`~econv.convert`, such as ``pretrained``.

    Returns:
        A detector with the same calls; ``detector.backbone.report`` says what became what.

    Raises:
        ConversionError: for heads of masks or keypoints, and for anchors of which a quarter turn
            makes others.

    With torchvision, for images of any size::

        model = torchvision.models.detection.fcos_resnet50_fpn()
        detector = econv.convert_detector(model, example_input=torch.randn(1, 3, 128, 128))

    What is no detector is refused:

    >>> image = torch.randn(1, 3, 128, 128)
    >>> convert_detector(nn.ReLU(), example_input=image)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    econv...ConversionError: ... it has no backbone: expected a detector of torchvision's kind
    """
    check_module(model)
    if not isinstance(getattr(model, "backbone", None), nn.Module):
        raise ConversionError("", "it has no backbone: expected a detector of torchvision's kind")
    detector: Any = copy.deepcopy(model)
    detector.backbone = convert(
        detector.backbone, group, match, example_input=example_input, **options
    )
    turns = _turns(Group(group))
    stage = getattr(detector, "rpn", detector)
    generator = getattr(stage, "anchor_generator", None)
    has_parts = hasattr(generator, "cell_anchors") and hasattr(stage, "head")
    if not isinstance(generator, nn.Module) or not has_parts:
        raise ConversionError("", "it has no head with anchors of sizes and aspect ratios")
    regression = getattr(stage.head, "regression_head", None)
    distances = hasattr(regression, "bbox_ctrness")  # as FCOS has them
    stage.head = TurnedHead(stage.head, generator, turns, distances)
    stage.anchor_generator = CentredAnchors(generator)
    if hasattr(detector, "roi_heads"):
        _turn_regions(detector.roi_heads, turns)
    turned: nn.Module = detector
    return turned


def _turn_regions(roi_heads: Any, turns: list[Turn]) -> None:
    for kind in ("mask", "keypoint"):
        if getattr(roi_heads, f"{kind}_roi_pool", None) is not None:
            raise ConversionError("roi_heads", f"heads of {kind}s are not converted")
    roi_heads.box_roi_pool = CentredRegions(roi_heads.box_roi_pool)
    roi_heads.box_head = TurnedRegions(roi_heads.box_head, turns)
    roi_heads.box_predictor = TurnedPredictor(roi_heads.box_predictor, turns)


def _turns(group: Group) -> list[Turn]:
    found = set()
    for element in group.grid_symmetries:
        quarters = 4 * (element % group.rotations) // group.rotations
        found.add((quarters, element >= group.rotations))
    return sorted(found)


def _turned(x: Tensor, turn: Turn) -> Tensor:
    """Maps, ``[…, height, width]``, flipped and turned."""
    quarters, flip = turn
    return torch.rot90(x.flip(-1) if flip else x, quarters, (-2, -1))


def _turned_back(x: Tensor, turn: Turn) -> Tensor:
    quarters, flip = turn
    x = torch.rot90(x, -quarters, (-2, -1))
    return x.flip(-1) if flip else x


def _boxes_back(deltas: Tensor, turn: Turn, distances: bool) -> Tensor:
    """Numbers of boxes in a turned image, ``[…, 4]``, as those in the image itself.

    They are shifts and logarithms of sizes ``(dx, dy, dw, dh)`` or, as ``distances``, those to the
    left, upper, right and lower side.
    """
    quarters, flip = turn
    for _ in range(quarters):
        a, b, c, d = deltas.unbind(-1)
        deltas = torch.stack((d, a, b, c) if distances else (-b, a, d, c), -1)
    if flip:
        a, b, c, d = deltas.unbind(-1)
        deltas = torch.stack((c, b, a, d) if distances else (-a, b, c, d), -1)
    return deltas


class CentredAnchors(nn.Module):
    """The anchors of a generator, moved so that together they lie about the image's centre."""

    def __init__(self, generator: nn.Module) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, images: Any, features: list[Tensor]) -> list[Tensor]:
        """The boxes of every image, ``[anchors, 4]``."""
        found: list[Tensor] = self.generator(images, features)
        each = self.generator.num_anchors_per_location()  # type: ignore[operator]
        size = images.tensors.shape[-2:]
        moves = []
        for feature, number in zip(features, each, strict=True):
            sides = feature.shape[-2:]
            y, x = ((n - (m - 1) * (n // m)) / 2 for n, m in zip(size, sides, strict=True))
            move = feature.new_tensor([x, y, x, y])
            moves.append(move.expand(sides[0] * sides[1] * number, 4))
        return [boxes + torch.cat(moves) for boxes in found]


class TurnedHead(nn.Module):
    """A head of dense predictions, averaged over the symmetries of the pixels."""

    def __init__(self, head: nn.Module, generator: Any, turns: list[Turn], distances: bool) -> None:
        super().__init__()
        self.head = head
        self.turns = turns
        self.distances = distances
        self.swapped = [_swapped(anchors) for anchors in generator.cell_anchors]
        """For every level, the places of the anchors after a quarter turn."""

    def forward(self, features: list[Tensor]) -> Any:
        """The predictions of the head, in its own form: lists of maps, or rows by name."""
        sizes = [feature.shape[-2:] for feature in features]
        rows: list[dict[str, Tensor]] = []
        maps: list[list[list[Tensor]]] = []
        for turn in self.turns:
            given = self.head([_turned(feature, turn) for feature in features])
            if isinstance(given, dict):
                rows.append(self._of_rows(given, turn, sizes))
            else:
                maps.append(self._of_maps(given, turn))
        if rows:
            return {key: _mean([one[key] for one in rows]) for key in rows[0]}
        kinds = zip(*maps, strict=True)
        return tuple([_mean([*level]) for level in zip(*kind, strict=True)] for kind in kinds)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the head."""
        return self.head.compute_loss(*args, **kwargs)  # type: ignore[operator]

    def _of_maps(self, given: tuple[list[Tensor], ...], turn: Turn) -> list[list[Tensor]]:
        """Scores and boxes of every level, ``[batch, anchors * numbers, height, width]``."""
        levels: list[list[Tensor]] = [[], []]
        for kind, maps in enumerate(given):
            for level, x in enumerate(maps):
                y = _turned_back(x, turn).unflatten(1, (len(self.swapped[level]), -1))
                y = self._anchors_back(y.permute(0, 3, 4, 1, 2), turn, level, kind == 1)
                levels[kind].append(y.permute(0, 3, 4, 1, 2).flatten(1, 2))
        return levels

    def _of_rows(self, given: dict[str, Tensor], turn: Turn, sizes: list[Any]) -> dict[str, Tensor]:
        """Predictions by name, ``[batch, rows of all levels, numbers]``."""
        found = {}
        for key, rows in given.items():
            each = [h * w * len(swap) for (h, w), swap in zip(sizes, self.swapped, strict=True)]
            levels = []
            for level, x in enumerate(rows.split(each, 1)):
                h, w = sizes[level] if turn[0] % 2 == 0 else sizes[level][::-1]
                y = x.unflatten(1, (h, w, -1))
                y = _turned_back(y.permute(0, 3, 4, 1, 2), turn).permute(0, 3, 4, 1, 2)
                y = self._anchors_back(y, turn, level, key == "bbox_regression")
                levels.append(y.flatten(1, 3))
            found[key] = torch.cat(levels, 1)
        return found

    def _anchors_back(self, x: Tensor, turn: Turn, level: int, boxes: bool) -> Tensor:
        """``[batch, height, width, anchors, numbers]``: the anchors that these are in the image."""
        if turn[0] % 2:
            x = x[:, :, :, self.swapped[level]]
        return _boxes_back(x, turn, self.distances) if boxes else x


def _mean(given: list[Tensor]) -> Tensor:
    return torch.stack(given).mean(0)


def _swapped(anchors: Tensor) -> list[int]:
    """Where the anchor with the sides of each one exchanged stands."""
    sides = anchors[:, 2:] - anchors[:, :2]
    far = (sides[:, None] - sides.flip(1)[None]).abs().amax(2)
    nearest = far.amin(0)
    if not bool((nearest <= 1e-3 * sides.amax()).all()):
        raise ConversionError(
            "anchor_generator",
            "a quarter turn makes anchors that it does not have: expected every aspect ratio with "
            f"its inverse; got sides {sides.tolist()}",
        )
    return far.argmin(0).tolist()


class CentredRegions(nn.Module):
    """Regions of interest, sampled as pixels lie: the first one's centre is half a pixel inside."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool

    def forward(
        self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]
    ) -> Tensor:
        """The maps of all boxes, ``[boxes, channels, height, width]``."""
        pool: Any = self.pool
        maps = [features[name] for name in pool.featmap_names if name in features]
        height = max(size[0] for size in sizes)
        coarse = [round(math.log2(height / x.shape[-2])) for x in maps]
        found = []
        for image, own in enumerate(boxes):
            area = (own[:, 2] - own[:, 0]) * (own[:, 3] - own[:, 1])
            scale = torch.log2(area.sqrt() / pool.canonical_scale) + pool.canonical_level
            wanted = (scale + 1e-6).floor().clamp(coarse[0], coarse[-1])
            sampled = maps[0].new_zeros(len(own), maps[0].shape[1], *pool.output_size)
            for level, x in zip(coarse, maps, strict=True):
                here = (wanted == level).nonzero()[:, 0]
                sampled[here] = self._sample(x[image], own[here] / 2**level)
            found.append(sampled)
        return torch.cat(found)

    def _sample(self, x: Tensor, boxes: Tensor) -> Tensor:
        """The means of samples in every bin of boxes, in pixels of ``x``."""
        pool: Any = self.pool
        each = pool.sampling_ratio if pool.sampling_ratio > 0 else 2
        places = []
        for axis, (number, size) in enumerate(zip(pool.output_size, x.shape[1:], strict=True)):
            steps = torch.arange(number * each, device=x.device, dtype=x.dtype) + 0.5
            first, last = boxes[:, 1 - axis, None], boxes[:, 3 - axis, None]
            places.append((first + (last - first) * steps / (number * each)) * (2 / size) - 1)
        rows, columns = places
        grid = torch.stack(
            [
                columns[:, None, :].expand(-1, rows.shape[1], -1),
                rows[:, :, None].expand(-1, -1, columns.shape[1]),
            ],
            -1,
        )
        flat = functional.grid_sample(
            x[None], grid.flatten(0, 1)[None], padding_mode="border", align_corners=False
        )
        found = flat[0].unflatten(1, (len(boxes), rows.shape[1])).transpose(0, 1)
        return functional.avg_pool2d(found, each)


class TurnedRegions(nn.Module):
    """What a head makes of regions, in every orientation: ``[orientations, regions, …]``."""

    def __init__(self, head: nn.Module, turns: list[Turn]) -> None:
        super().__init__()
        self.head = head
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        """Read ``[regions, channels, height, width]``."""
        return torch.stack([self.head(_turned(x, turn)) for turn in self.turns])


class TurnedPredictor(nn.Module):
    """Classes and boxes from what `TurnedRegions` gives, turned back and averaged."""

    def __init__(self, predictor: nn.Module, turns: list[Turn]) -> None:
        super().__init__()
        self.predictor = predictor
        self.turns = turns

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, ``[regions, classes]``, and boxes, ``[regions, classes * 4]``."""
        scores, boxes = zip(*(self.predictor(one) for one in x), strict=True)
        back = [
            _boxes_back(given.unflatten(1, (-1, 4)), turn, distances=False).flatten(1)
            for given, turn in zip(boxes, self.turns, strict=True)
        ]
        return _mean([*scores]), _mean(back)
