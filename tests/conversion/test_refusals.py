"""Refusals name the architecture, the line of the source and what to do instead."""

import contextlib
import importlib
import inspect
import linecache

import pytest
import torch
from torch import nn

from econv import ConversionError, convert
from econv.conversion.refusals import ARCHITECTURES
from econv.conversion.registry import rule_of_module


def images(size=32, channels=3):
    return torch.randn(2, channels, size, size)


def refusal(source, x=None, **options):
    with pytest.raises(ConversionError) as caught:
        convert(source, "p4", "width", example_input=images() if x is None else x, **options)
    return caught.value


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(torch.softmax(q @ k.transpose(-2, -1), -1) @ v)


class VisionTransformer(nn.Module):
    def __init__(self, patch=16):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, patch, patch)
        self.attention, self.head = Attention(16), nn.Linear(16, 4)

    def forward(self, x):
        y = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(y).mean(1))


class WindowAttention(Attention):
    pass


class Swin(VisionTransformer):
    def __init__(self):
        super().__init__(4)
        self.attention = WindowAttention(16)

    def forward(self, x):
        b, c, h, w = (y := self.patches(x)).shape
        windows = y.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1)
        return self.head(self.attention(windows.reshape(-1, 4, c)).view(b, -1, c).mean(1))


class MixerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.positions(x)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.block, self.head = nn.Conv2d(3, 16, 4, 4), MixerBlock(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.block(self.patches(x).flatten(2)).mean(2))


def cnn(out=16):
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, out, 3, 2, 1)]
    return nn.Sequential(*layers)


class Hybrid(nn.Module):
    """A CNN, and a transformer on its features."""

    def __init__(self):
        super().__init__()
        self.backbone, self.attention = cnn(), Attention(16)

    def forward(self, x):
        return self.attention(self.backbone(x).flatten(2).transpose(1, 2)).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.reader = cnn(), nn.LSTM(16, 8, batch_first=True)

    def forward(self, x):
        return self.reader(self.backbone(x).mean(2).transpose(1, 2))[0]


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3)

    def forward(self, x):
        return self.conv(x.flatten(2))


class AnchorGenerator(nn.Module):
    def forward(self, x):
        return [torch.zeros(int(y.sum()), 4) for y in x]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.anchors = cnn(), AnchorGenerator()

    def forward(self, x):
        return self.anchors([self.backbone(x)])


ARCHITECTURAL = {
    "a vision transformer": (VisionTransformer, "patches have a fixed frame", "ConvNeXt"),
    "a Swin transformer": (Swin, "windows and patches have a fixed frame", "ConvNeXt"),
    "an MLP-Mixer": (Mixer, "mixes them in a fixed order", "ConvNeXt"),
    "a detector": (Detector, "boxes have sides along the axes", "econv.convert_detector(model, …)"),
    "a network of sequences": (Sequences, "no image to turn", ""),
    "a recurrent network": (Recurrent, "one after another", "convert(model.backbone, …)"),
}


@pytest.mark.parametrize("name", ARCHITECTURAL)
def test_an_architecture_is_called_by_its_name(name):
    make, reason, remedy = ARCHITECTURAL[name]
    error = refusal(make(), images())
    assert f"this is {name}: " in str(error)
    assert reason in error.reason
    assert remedy in error.remedy
    assert "\n" not in str(error)
    assert len(str(error)) < 600


def test_every_architecture_has_its_case():
    assert {kind.name for kind in ARCHITECTURES} == set(ARCHITECTURAL)


@pytest.mark.parametrize("kind", ARCHITECTURES, ids=lambda kind: kind.name)
def test_a_cnn_is_none_of_them(kind):
    assert not kind.is_one(cnn())
    assert not kind.is_one(nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 16, 7, groups=16)))


def test_attention_on_features_points_to_the_backbone():
    error = refusal(Hybrid())
    assert "attention over positions" in error.reason
    assert "convert(model.backbone, …) converts the part that is a CNN alone" in str(error)
    source = Hybrid()
    source.backbone = convert(source.backbone, "p4", "width", example_input=images())
    assert source(images()).shape == (2, 16)


# Lines


class Undecided(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 4, 3), how

    def forward(self, x):
        y = self.conv(x)
        if self.how == "branch":
            if y.sum() > 0:
                y = -y
        elif self.how == "number":
            y = y * int(y.sum())
        elif self.how == "list":
            y = y * sum(y.flatten().tolist())
        elif self.how == "error":
            raise RuntimeError("not today\nwith a paragraph")
        elif self.how == "size":
            assert y.shape[2] == 224, f"Expected 224 but got {y.shape[2]}!"
        elif self.how == "sizes":
            y = y + torch.zeros(1, 5, 7, 9)
        else:
            y = torch.roll(y, 1, 2)
        return y


LINES = {
    "branch": ("if y.sum() > 0:", "depends on the numbers", "torch.where"),
    "number": ("y = y * int(y.sum())", "computes with the numbers", ""),
    "list": ("y = y * sum(y.flatten().tolist())", "asks for the numbers", ""),
    "error": ('raise RuntimeError("not today\\nwith a paragraph")', "RuntimeError: not today", ""),
    "size": (
        'assert y.shape[2] == 224, f"Expected 224 but got {y.shape[2]}!"',
        "AssertionError: Expected 224 but got 30!",
        "",
    ),
    "sizes": ("y = y + torch.zeros(1, 5, 7, 9)", "does not run on the example", ""),
    "rule": ("y = torch.roll(y, 1, 2)", "no rule for the function roll", "strict=False"),
}


@pytest.mark.parametrize("how", LINES)
def test_the_line_of_the_source_is_named(how):
    line, reason, remedy = LINES[how]
    error = refusal(Undecided(how))
    source, first = inspect.getsourcelines(Undecided)
    number = first + next(i for i, text in enumerate(source) if text.strip() == line)
    assert error.line == f"test_refusals.py, line {number}: `{line}`"
    assert linecache.getline(inspect.getsourcefile(Undecided), number).strip() == line
    assert reason in str(error)
    assert remedy in error.remedy
    assert f" ({error.line})" in str(error)


def test_layers_in_a_row_have_no_line_of_their_own():
    error = refusal(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, (1, 3))))
    assert error.line == ""
    assert "strict=False leaves it as it is" in str(error)


# Networks of the packages

NETWORKS = {
    "torchvision.models:vit_b_16": "a vision transformer",
    "torchvision.models:swin_t": "a Swin transformer",
    "timm:vit_tiny_patch16_224": "a vision transformer",
    "timm:swin_tiny_patch4_window7_224": "a Swin transformer",
    "timm:mixer_s32_224": "an MLP-Mixer",
    "torchvision.models.detection:fasterrcnn_resnet50_fpn": "a detector",
    "torchvision.models.detection:retinanet_resnet50_fpn": "a detector",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_packages_are_called_by_their_names(name):
    package, _, network = name.partition(":")
    try:
        found = importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # torchvision's operators want their own torch
        pytest.skip(f"{package} is not installed, or not for this torch: {error}")
    if package == "timm":
        source = found.create_model(network)
    else:
        options = {"weights": None}
        if "detection" in package:
            options["weights_backbone"] = None
        source = getattr(found, network)(**options)
    error = refusal(source, images(224), measure=False)
    assert f"this is {NETWORKS[name]}: " in str(error)
    assert len(str(error)) < 800


class Reversed(nn.MaxPool2d):
    """A pooling by its class, and something else by its forward."""

    def forward(self, x):
        return -super().forward(-x)


class Shifted(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.roll(1, 3))


class Renamed(nn.MaxPool2d):
    """Has no forward of its own: it is what its class is."""


def pooling(layer):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def test_dilated_maxima_are_refused():
    assert "1: its windows are dilated" in str(refusal(pooling(nn.MaxPool2d(2, 2, dilation=2))))

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

        def forward(self, x):
            x = torch.nn.functional.max_pool2d(self.conv(x), 2, 2, dilation=2)
            return self.head(x.mean((2, 3)))

    assert "its windows are dilated" in str(refusal(Called()))
    convert(pooling(nn.MaxPool2d(2, 2, dilation=1)), "p4", "width", example_input=images())


@pytest.mark.parametrize("layer", [Reversed(2), Shifted(4, 4, 3, padding=1)])
def test_what_a_subclass_computes_is_not_guessed_from_its_base(layer):
    """It is followed into, or refused; its forward is never replaced by the base's."""
    source = pooling(layer).double().eval()
    x = images().double()
    with contextlib.suppress(ConversionError):
        converted = convert(source, "p1", example_input=x, pretrained=True)
        torch.testing.assert_close(converted(x), source(x))
    assert rule_of_module(layer) is None
    assert rule_of_module(Renamed(2)) is rule_of_module(nn.MaxPool2d(2)) is not None
