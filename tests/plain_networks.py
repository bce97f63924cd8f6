"""Ordinary networks to convert: the well-known ones, layer by layer, as plain torch modules.

They stand in for the packages that define them, which are not always installed; the counts of
their parameters prove that the shapes are the same.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def conv_norm(inside, outside, size=3, stride=1, groups=1, act=nn.ReLU, eps=1e-5):
    conv = nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)
    layers = [conv, nn.BatchNorm2d(outside, eps)]
    return nn.Sequential(*layers, *([] if act is None else [act(inplace=True)]))


class Residual(nn.Module):
    def __init__(self, branch, shortcut, gate=None, after=None):
        super().__init__()
        self.branch, self.shortcut, self.after = branch, shortcut, after
        self.gate = gate

    def forward(self, x):
        out = self.branch(x)
        out = out + (x if self.shortcut is None else self.shortcut(x))
        return out if self.after is None else self.after(out)


class SqueezeExcitation(nn.Module):
    """With 1×1 convolutions, or with linear maps of flattened features."""

    def __init__(self, channels, squeezed, act=nn.ReLU, gate=nn.Sigmoid, linear=False):
        super().__init__()
        make = nn.Linear if linear else lambda a, b: nn.Conv2d(a, b, 1)
        self.linear = linear
        self.fc1, self.fc2 = make(channels, squeezed), make(squeezed, channels)
        self.act, self.gate = act(), gate()

    def forward(self, x):
        scale = x.mean((2, 3), keepdim=not self.linear)
        scale = self.gate(self.fc2(self.act(self.fc1(scale))))
        if self.linear:
            scale = scale.view(x.size(0), x.size(1), 1, 1)
        return x * scale


class ResNet(nn.Module):
    def __init__(self, counts, bottleneck, groups=1, group_width=64, classes=1000):
        super().__init__()
        self.stem = conv_norm(3, 64, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, inside = [], 64
        for stage, count in enumerate(counts):
            planes = 64 * 2**stage
            outside = planes * 4 if bottleneck else planes
            for number in range(count):
                stride = 2 if stage and not number else 1
                if bottleneck:
                    width = planes * group_width // 64 * groups
                    branch = nn.Sequential(
                        conv_norm(inside, width, 1),
                        conv_norm(width, width, 3, stride, groups),
                        conv_norm(width, outside, 1, act=None),
                    )
                else:
                    branch = nn.Sequential(
                        conv_norm(inside, planes, 3, stride), conv_norm(planes, planes, act=None)
                    )
                changes = stride > 1 or inside != outside
                shortcut = conv_norm(inside, outside, 1, stride, act=None) if changes else None
                blocks.append(Residual(branch, shortcut, after=nn.ReLU(inplace=True)))
                inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x):
        x = self.blocks(self.pool(self.stem(x)))
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


def resnet18(**options):
    return ResNet((2, 2, 2, 2), False, **options)


def resnet50(**options):
    return ResNet((3, 4, 6, 3), True, **options)


def resnext50(**options):
    return ResNet((3, 4, 6, 3), True, groups=32, group_width=4, **options)


class VGG(nn.Module):
    def __init__(self, classes=1000, hidden=4096):
        super().__init__()
        layers, inside = [], 3
        for outside in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
            if outside == "M":
                layers.append(nn.MaxPool2d(2, 2))
                continue
            conv = nn.Conv2d(inside, outside, 3, padding=1)
            layers += [conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
            inside = outside
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 49, hidden), nn.ReLU(True), nn.Dropout()),
            *(nn.Linear(hidden, hidden), nn.ReLU(True), nn.Dropout(), nn.Linear(hidden, classes)),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


def inverted(inside, wide, outside, size, stride, gate, act, eps, depthwise_act=True):
    layers = [] if wide == inside else [conv_norm(inside, wide, 1, act=act, eps=eps)]
    layers.append(conv_norm(wide, wide, size, stride, wide, act, eps))
    if gate is not None:
        layers.append(gate)
    layers.append(conv_norm(wide, outside, 1, act=None, eps=eps))
    return nn.Sequential(*layers)


class WithSkip(nn.Module):
    def __init__(self, branch, skip):
        super().__init__()
        self.branch, self.skip = branch, skip

    def forward(self, x):
        out = self.branch(x)
        if self.skip:
            out += x
        return out


def mobilenet_v3_small(classes=1000):
    rows = (
        *((3, 16, 16, True, nn.ReLU, 2), (3, 72, 24, False, nn.ReLU, 2)),
        *((3, 88, 24, False, nn.ReLU, 1), (5, 96, 40, True, nn.Hardswish, 2)),
        *[(5, 240, 40, True, nn.Hardswish, 1)] * 2,
        *((5, 120, 48, True, nn.Hardswish, 1), (5, 144, 48, True, nn.Hardswish, 1)),
        *((5, 288, 96, True, nn.Hardswish, 2), *[(5, 576, 96, True, nn.Hardswish, 1)] * 2),
    )
    layers, inside = [conv_norm(3, 16, 3, 2, act=nn.Hardswish, eps=1e-3)], 16
    for size, wide, outside, gated, act, stride in rows:
        squeezed = max(8, int(wide / 4 + 4) // 8 * 8)
        squeezed += 8 * (squeezed < 0.9 * wide / 4)
        gate = SqueezeExcitation(wide, squeezed, gate=nn.Hardsigmoid) if gated else None
        branch = inverted(inside, wide, outside, size, stride, gate, act, 1e-3)
        layers.append(WithSkip(branch, stride == 1 and inside == outside))
        inside = outside
    layers.append(conv_norm(96, 576, 1, act=nn.Hardswish, eps=1e-3))
    head = (nn.Linear(576, 1024), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1024, classes))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


def efficientnet_b0(classes=1000):
    rows = (
        *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
        *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
    )
    layers, inside = [conv_norm(3, 32, 3, 2, act=nn.SiLU)], 32
    for times, size, stride, outside, count in rows:
        for number in range(count):
            wide, step = inside * times, 1 if number else stride
            gate = SqueezeExcitation(wide, max(1, inside // 4), nn.SiLU)
            branch = inverted(inside, wide, outside, size, step, gate, nn.SiLU, 1e-5)
            layers.append(WithSkip(branch, step == 1 and inside == outside))
            inside = outside
    layers.append(conv_norm(320, 1280, 1, act=nn.SiLU))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, classes))
    return nn.Sequential(*layers, *head)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, 1e-6)
        self.wide, self.narrow = (
            nn.Linear(channels, 4 * channels),
            nn.Linear(4 * channels, channels),
        )
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))

    def forward(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        y = self.narrow(functional.gelu(self.wide(self.norm(y))))
        return x + self.scale * y.permute(0, 3, 1, 2)


def convnext_tiny(classes=1000):
    layers, inside = [nn.Conv2d(3, 96, 4, 4), LayerNorm2d(96, 1e-6)], 96
    for channels, count in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if channels != inside:
            layers += [LayerNorm2d(inside, 1e-6), nn.Conv2d(inside, channels, 2, 2)]
            inside = channels
        layers += [ConvNeXtBlock(channels) for _ in range(count)]
    head = (LayerNorm2d(768, 1e-6), nn.Flatten(), nn.Linear(768, classes))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), *head)


class DenseLayer(nn.Module):
    def __init__(self, inside, growth):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(inside, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, maps):
        x = self.conv1(torch.relu(self.norm1(torch.cat(maps, 1))))
        return self.conv2(torch.relu(self.norm2(x)))


class DenseNet(nn.Module):
    def __init__(self, counts=(6, 12, 24, 16), growth=32, classes=1000):
        super().__init__()
        self.stem = conv_norm(3, 64, 7, 2)
        self.stages, self.transitions = nn.ModuleList(), nn.ModuleList()
        channels = 64
        for stage, count in enumerate(counts):
            layers = [DenseLayer(channels + i * growth, growth) for i in range(count)]
            self.stages.append(nn.ModuleList(layers))
            channels += count * growth
            if stage < len(counts) - 1:
                norm = nn.BatchNorm2d(channels)
                conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
                self.transitions.append(nn.Sequential(norm, nn.ReLU(), conv, nn.AvgPool2d(2, 2)))
                channels //= 2
        self.norm = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = functional.max_pool2d(self.stem(x), 3, 2, 1)
        for number, stage in enumerate(self.stages):
            maps = [x]
            for layer in stage:
                maps.append(layer(maps))
            x = torch.cat(maps, 1)
            if number < len(self.transitions):
                x = self.transitions[number](x)
        return self.fc(torch.relu(self.norm(x)).mean((2, 3)))


def regnety_002(classes=1000):
    layers, inside = [conv_norm(3, 32, 3, 2)], 32
    for channels, count in ((24, 1), (56, 1), (152, 4), (368, 7)):
        for number in range(count):
            stride = 1 if number else 2
            gate = SqueezeExcitation(channels, round(inside / 4))
            branch = nn.Sequential(
                conv_norm(inside, channels, 1),
                conv_norm(channels, channels, 3, stride, channels // 8),
                gate,
                conv_norm(channels, channels, 1, act=None),
            )
            changes = stride > 1 or inside != channels
            shortcut = conv_norm(inside, channels, 1, stride, act=None) if changes else None
            layers.append(Residual(branch, shortcut, after=nn.ReLU()))
            inside = channels
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(368, classes))
    return nn.Sequential(*layers, *head)


class UNet(nn.Module):
    """Maps to maps of classes; pads what it has upsampled where sizes do not fit."""

    def __init__(self, widths=(64, 128, 256, 512, 1024), classes=2, transposed=True):
        super().__init__()
        self.down, self.up, self.merge = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inside = 3
        for width in widths:
            self.down.append(nn.Sequential(conv_norm(inside, width), conv_norm(width, width)))
            inside = width
        for width in reversed(widths[:-1]):
            if transposed:
                self.up.append(nn.ConvTranspose2d(inside, width, 2, 2))
            else:
                up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
                self.up.append(nn.Sequential(up, nn.Conv2d(inside, width, 1)))
            self.merge.append(nn.Sequential(conv_norm(2 * width, width), conv_norm(width, width)))
            inside = width
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(inside, classes, 1)

    def forward(self, x):
        skips = []
        for number, block in enumerate(self.down):
            x = block(self.pool(x) if number else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = up(x)
            if x.shape[-2:] != skip.shape[-2:]:
                rows, columns = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
                half = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
                x = functional.pad(x, half)
            x = merge(torch.cat([skip, x], dim=1))
        return self.head(x)


NETWORKS = {
    "resnet18": (resnet18, 11_689_512),
    "resnet50": (resnet50, 25_557_032),
    "resnext50_32x4d": (resnext50, 25_028_904),
    "vgg11_bn": (VGG, 132_868_840),
    "mobilenet_v3_small": (mobilenet_v3_small, 2_542_856),
    "efficientnet_b0": (efficientnet_b0, 5_288_548),
    "convnext_tiny": (convnext_tiny, 28_589_128),
    "densenet121": (DenseNet, 7_978_856),
    "regnety_002": (regnety_002, 3_162_996),
    "unet": (UNet, 31_037_698),
}
