"""Detectors: boxes turn with the image, of dense heads and of heads of regions."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional

import econv
from econv import ConversionError, convert_detector
from econv.conversion.network import ConvertedNetwork
from econv.lab import calibrate
from plain_networks import conv_norm

DOUBLE = {"dtype": torch.float64}


class Backbone(nn.Module):
    """Features of two scales, and a pyramid."""

    def __init__(self, channels=8):
        super().__init__()
        self.early, self.late = conv_norm(3, 8, 3, 2), conv_norm(8, 16, 3, 2)
        self.inner = nn.ModuleList(nn.Conv2d(c, channels, 1) for c in (8, 16))
        self.outer = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        early = self.early(x)
        late = self.inner[1](self.late(early))
        finer = functional.interpolate(late, size=early.shape[-2:], mode="nearest")
        return {
            "0": self.outer[0](self.inner[0](early) + finer),
            "1": self.outer[1](late),
        }


class Anchors(nn.Module):
    """Anchors of every size and aspect ratio, from the first pixel's corner on."""

    def __init__(self, ratios=(0.5, 1.0, 2.0)):
        super().__init__()
        self.cell_anchors = [self.of_level(size, ratios) for size in (8.0, 16.0)]

    def of_level(self, size, ratios):
        height = torch.tensor(ratios).sqrt() * size
        width = size**2 / height
        return torch.stack([-width, -height, width, height], 1) / 2

    def num_anchors_per_location(self):
        return [len(anchors) for anchors in self.cell_anchors]

    def forward(self, images, features):
        found = []
        for feature, anchors in zip(features, self.cell_anchors, strict=True):
            h, w = feature.shape[-2:]
            stride = images.tensors.shape[-1] // w
            y, x = (torch.arange(n, dtype=feature.dtype) * stride for n in (h, w))
            y, x = torch.meshgrid(y, x, indexing="ij")
            centres = torch.stack([x, y, x, y], -1).reshape(-1, 1, 4)
            found.append((centres + anchors.to(feature.dtype)).flatten(0, 1))
        return [torch.cat(found)] * len(images.tensors)


class Images:
    def __init__(self, tensors):
        self.tensors = tensors


class Maps(nn.Module):
    """A head that gives maps, as one that proposes regions."""

    def __init__(self, anchors):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.scores, self.boxes = nn.Conv2d(8, anchors, 1), nn.Conv2d(8, 4 * anchors, 1)

    def forward(self, features):
        hidden = [torch.relu(self.conv(feature)) for feature in features]
        return [self.scores(x) for x in hidden], [self.boxes(x) for x in hidden]


def rows(x, anchors):
    n, _, h, w = x.shape
    return x.view(n, anchors, -1, h, w).permute(0, 3, 4, 1, 2).reshape(n, h * w * anchors, -1)


class Regression(nn.Module):
    def __init__(self, anchors, distances):
        super().__init__()
        self.boxes = nn.Conv2d(8, 4 * anchors, 3, padding=1)
        if distances:
            self.bbox_ctrness = nn.Conv2d(8, anchors, 3, padding=1)


class Rows(nn.Module):
    """A head that gives rows by name, as those of one stage."""

    def __init__(self, anchors, distances):
        super().__init__()
        self.anchors = anchors
        self.classes = nn.Conv2d(8, 2 * anchors, 3, padding=1)
        self.regression_head = Regression(anchors, distances)

    def forward(self, features):
        kinds = {"cls_logits": self.classes, "bbox_regression": self.regression_head.boxes}
        if hasattr(self.regression_head, "bbox_ctrness"):
            kinds["bbox_ctrness"] = self.regression_head.bbox_ctrness
        return {
            name: torch.cat([rows(conv(x), self.anchors) for x in features], 1)
            for name, conv in kinds.items()
        }


def decoded(anchors, numbers, distances=False):
    """Boxes from anchors and what a head says of them."""
    centre, size = (anchors[..., :2] + anchors[..., 2:]) / 2, anchors[..., 2:] - anchors[..., :2]
    if distances:
        near, far = centre - numbers[..., :2] * size, centre + numbers[..., 2:] * size
        return torch.cat([near, far], -1)
    centre = centre + numbers[..., :2] * size
    half = size * numbers[..., 2:].exp() / 2
    return torch.cat([centre - half, centre + half], -1)


class OneStage(nn.Module):
    def __init__(self, ratios=(0.5, 1.0, 2.0), distances=False):
        super().__init__()
        self.backbone, self.anchor_generator = Backbone(), Anchors(ratios)
        self.head, self.distances = Rows(len(ratios), distances), distances

    def forward(self, x):
        features = [*self.backbone(x).values()]
        found = self.head(features)
        anchors = self.anchor_generator(Images(x), features)[0]
        boxes = decoded(anchors, found["bbox_regression"], self.distances)
        others = [found[name] for name in sorted(found) if name != "bbox_regression"]
        return boxes[0], torch.cat(others, 2)[0]


class Proposals(nn.Module):
    def __init__(self, ratios):
        super().__init__()
        self.anchor_generator, self.head = Anchors(ratios), Maps(len(ratios))

    def forward(self, x, features):
        scores, boxes = self.head([*features.values()])
        anchors = self.anchor_generator(Images(x), [*features.values()])[0]
        number = self.head_anchors = len(self.anchor_generator.generator.cell_anchors[0])
        found = decoded(anchors, torch.cat([rows(y, number) for y in boxes], 1))[0]
        best = torch.cat([rows(y, number) for y in scores], 1)[0, :, 0].topk(7).indices
        return found[best].clamp(0, x.shape[-1])


class RegionPool(nn.Module):
    """What describes the sampling of regions; it is replaced before it runs."""

    featmap_names, output_size, sampling_ratio = ("0", "1"), (4, 4), 2
    canonical_scale, canonical_level = 16, 2


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.boxes = nn.Linear(12, 3), nn.Linear(12, 12)

    def forward(self, x):
        return self.classes(x), self.boxes(x)


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.box_roi_pool = RegionPool()
        self.box_head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 12), nn.ReLU())
        self.box_predictor = Predictor()


class TwoStages(nn.Module):
    def __init__(self, ratios=(0.5, 1.0, 2.0)):
        super().__init__()
        self.backbone, self.rpn, self.roi_heads = Backbone(), Proposals(ratios), Regions()

    def forward(self, x):
        features = self.backbone(x)
        proposals = self.rpn(x, features)
        heads = self.roi_heads
        sampled = heads.box_roi_pool(features, [proposals], [x.shape[-2:]])
        classes, numbers = heads.box_predictor(heads.box_head(sampled))
        boxes = decoded(proposals[:, None], numbers.unflatten(1, (-1, 4)))
        return boxes.flatten(0, 1), classes.repeat_interleave(3, 0)


DETECTORS = {
    "one stage": OneStage,
    "one stage, one anchor, distances": lambda: OneStage((1.0,), distances=True),
    "two stages": TwoStages,
}


def turned(boxes, side):
    """Boxes of an image that is turned by a quarter, anticlockwise."""
    x1, y1, x2, y2 = boxes.unbind(1)
    return torch.stack([y1, side - x2, y2, side - x1], 1)


def flipped(boxes, side):
    x1, y1, x2, y2 = boxes.unbind(1)
    return torch.stack([side - x2, y1, side - x1, y2], 1)


def distance(found, wanted):
    """How far boxes with their scores are from the nearest of others, both ways."""
    far = (torch.cat(found, 1)[:, None] - torch.cat(wanted, 1)[None]).abs().amax(2)
    return max(far.amin(0).max().item(), far.amin(1).max().item())


def detector(name, group="p4"):
    source = DETECTORS[name]().double()
    x = torch.randn(1, 3, 32, 32, **DOUBLE)
    found = convert_detector(source, group, "width", example_input=x)
    calibrate(found.backbone, x)
    return found.eval(), x


@pytest.mark.parametrize("group", ["p4", "p4m", pytest.param("p8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DETECTORS)
def test_boxes_turn_with_the_image(name, group):
    network, x = detector(name, group)
    boxes, scores = network(x)
    for quarters in range(1, 4):
        boxes = turned(boxes, 32)
        assert distance(network(torch.rot90(x, quarters, (2, 3))), (boxes, scores)) <= 1e-10
    if group == "p4m":
        boxes, scores = network(x)
        assert distance(network(x.flip(3)), (flipped(boxes, 32), scores)) <= 1e-10


@pytest.mark.parametrize("name", ["one stage", "one stage, one anchor, distances"])
def test_boxes_of_the_source_do_not(name):
    source, x = DETECTORS[name]().double().eval(), torch.randn(1, 3, 32, 32, **DOUBLE)
    boxes, scores = source(x)
    assert distance(source(torch.rot90(x, 1, (2, 3))), (turned(boxes, 32), scores)) > 1e-2


@pytest.mark.parametrize("part", ["head", "anchor_generator", "backbone"])
def test_every_part_is_needed_for_it(part):
    network, x = detector("one stage")
    if part == "head":
        network.head = network.head.head
    elif part == "anchor_generator":
        network.anchor_generator = network.anchor_generator.generator
    else:
        network.backbone = Backbone().double().eval()
    boxes, scores = network(x)
    assert distance(network(torch.rot90(x, 1, (2, 3))), (turned(boxes, 32), scores)) > 1e-3


def test_the_source_stays_and_the_head_keeps_its_weights():
    source = OneStage()
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    found = convert_detector(source, "p4", "width", example_input=torch.randn(1, 3, 32, 32))
    assert all(torch.equal(before[name], t) for name, t in source.state_dict().items())
    assert isinstance(found.backbone, ConvertedNetwork)
    assert torch.equal(found.head.head.classes.weight, source.head.classes.weight)
    assert found.backbone.report.outputs == ((1, 8, 16, 16), (1, 8, 8, 8))
    boxes, scores = found(torch.randn(1, 3, 32, 32))
    (boxes.square().sum() + scores.sum()).backward()
    assert all(p.grad is not None for p in found.parameters())


def test_what_has_other_parts_is_refused():
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(ConversionError, match="it has no backbone"):
        convert_detector(nn.Sequential(nn.Conv2d(3, 4, 3)), "p4", "width", example_input=x)
    bare = OneStage()
    del bare.anchor_generator
    with pytest.raises(ConversionError, match="no head with anchors"):
        convert_detector(bare, "p4", "width", example_input=x)
    with pytest.raises(ConversionError, match="every aspect ratio with its inverse"):
        convert_detector(OneStage((1.0, 2.0)), "p4", "width", example_input=x)
    masks = TwoStages()
    masks.roi_heads.mask_roi_pool = nn.Identity()
    with pytest.raises(ConversionError, match="heads of masks are not converted"):
        convert_detector(masks, "p4", "width", example_input=x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the package
@pytest.mark.parametrize("name", ["fcos", "retinanet", "fasterrcnn"])
def test_detectors_of_torchvision(name):
    try:
        package = importlib.import_module("torchvision.models.detection")
        importlib.import_module("torchvision.ops").nms(torch.rand(1, 4), torch.rand(1), 0.5)
    except (ImportError, RuntimeError) as error:  # torchvision's operators want their own torch
        pytest.skip(f"torchvision is not installed, or not for this torch: {error}")
    threshold = "box_score_thresh" if name == "fasterrcnn" else "score_thresh"
    options = {"weights": None, "weights_backbone": None, "num_classes": 3, threshold: 0.0}
    sizes = {"min_size": 128, "max_size": 128, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    source = getattr(package, f"{name}_resnet50_fpn")(**options, **sizes)
    if name == "retinanet":  # without norms its scores would all be 0 or 1
        source.head.classification_head.cls_logits.weight.data.mul_(1e-3)
        source.head.regression_head.bbox_reg.weight.data.mul_(0.1)
    x = torch.rand(1, 3, 128, 128)
    network = econv.convert_detector(source, "p4", "width", example_input=x).double().eval()
    calibrate(network.backbone, x.double())
    with torch.no_grad():
        found = network([*x.double()])[0]
        other = network([*torch.rot90(x, 1, (2, 3)).double()])[0]
    there = turned(found["boxes"], 128), found["scores"][:, None]
    assert distance((other["boxes"], other["scores"][:, None]), there) <= 1e-6
