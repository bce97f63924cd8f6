"""Classifiers by their names."""

from __future__ import annotations

import re
from typing import Any

from econv.groups import Group
from econv.layers.checks import read_group
from econv.models.convnet import ConvNet
from econv.models.imagenet import IMAGENET, ImageNetResNet
from econv.models.resnet import ResNet

Classifier = ResNet | ConvNet | ImageNetResNet

INVARIANT: dict[str, Any] = {"pool": "max", "exact": True}

# The rows of the paper's tables, and what else has a name of its own.
MODELS: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
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
            {"group": group, "depth": depth, **(INVARIANT if group else {})},
        )
        for depth in (18, 50)
        for group, end in ((None, ""), ("p4", "_p4"), ("p8", "_p8"))
    },
}
MODELS |= {
    name.replace("paper_", "cifar_"): (kind, {**options, **INVARIANT})
    for name, (kind, options) in MODELS.items()
    if name in ("paper_resnet26_p6", "paper_resnet26_p8", "paper_resnet44_p8")
}


def by_name(name: str, options: dict[str, Any]) -> Classifier:
    """The classifier of that name; options override its arguments."""
    if isinstance(name, str) and name in MODELS:
        kind, found = MODELS[name]
        return kind(**{**found, **options})
    volumes = re.fullmatch(r"(?:resnet([0-9]+)|convnet6)_3d(?:_(\w+))?", str(name))
    if volumes is not None:
        return _for_volumes(volumes[1], volumes[2], options)
    wide = re.fullmatch(r"wrn([0-9]+)_([0-9]+)((?:_p[1-9][0-9]*m?)*)", str(name))
    if wide is not None:
        return _wide(int(wide[1]), int(wide[2]), wide[3].split("_")[1:], options)
    pattern = r"(?:(paper|cifar)_)?(resnet([0-9]+)|convnet[67])(?:_(p[1-9][0-9]*m?))?"
    match = re.fullmatch(pattern, str(name))
    if match is None or (match[1] and not match[3]):
        raise ValueError(
            f"unknown model {name!r}: expected one of {sorted(MODELS)}, or a name such as "
            "'resnet34_p4m', 'cifar_resnet20_p12', 'convnet7_p6m', 'wrn16_8_p8m', "
            "'convnet6_3d_O', 'resnet10_3d_O', 'unet_3d_O' or 'fpn_resnet18_p8'"
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
    invariant = INVARIANT if group is not None and match[1] != "paper" else {}
    if match[1] is None and depth in IMAGENET:
        return ImageNetResNet(**{"group": group, "depth": depth, **invariant, **options})
    row = f"paper_{match[2]}" + (f"_{match[4]}" if match[4] else "")
    if row in MODELS:
        return ResNet(**{**MODELS[row][1], **invariant, **options})
    fields = tuple(max(1, round(channels * share)) for channels in (16, 32, 64))
    return ResNet(**{"group": group, "depth": depth, "fields": fields, **invariant, **options})


def _wide(depth: int, widening: int, groups: list[str], options: dict[str, Any]) -> ResNet:
    """Zagoruyko & Komodakis (2016) count the shortcuts: their depth is 6n + 4."""
    if (depth - 4) % 6 or depth < 10 or not 1 <= widening <= 100 or len(groups) not in (0, 1, 3):
        raise ValueError(
            "expected a Wide ResNet of 6n + 4 layers, with no group, one, or those of three "
            "stages, such as 'wrn16_8_p8m' or 'wrn28_10_p8m_p4m_p1m'; got "
            f"{'_'.join([f'wrn{depth}_{widening}', *groups])!r}"
        )
    orders = [Group(group).order for group in groups] or [1]
    shares = [order**-0.5 for order in (orders * 3)[:3]]
    channels = zip((16, 32, 64), shares, strict=True)
    given: dict[str, Any] = {
        "group": groups[0] if groups else None,
        "depth": depth - 2,
        "fields": tuple(max(1, round(widening * count * share)) for count, share in channels),
        "stem": max(1, round(16 * shares[0])),
        "restrict": groups[1:] or None,
        **(INVARIANT if groups else {}),
    }
    return ResNet(**{**given, **options})


def _for_volumes(
    depth: str | None, group: str | None, options: dict[str, Any]
) -> ImageNetResNet | ConvNet:
    found = None if group is None else read_group(group, 3, "create_model")
    if options.get("group") is not None:
        read_group(options["group"], 3, "create_model")
    given: dict[str, Any] = {"group": found} if found else {"group": None, "dimension": 3}
    if depth is None:
        return ConvNet(**{**_stack(found), **given, **options})
    if int(depth) not in IMAGENET:
        raise ValueError(f"expected a depth of {sorted(IMAGENET)} for volumes; got {depth}")
    invariant = INVARIANT if found else {}
    return ImageNetResNet(**{"depth": int(depth), **given, **invariant, **options})


def _stack(group: Group | None) -> dict[str, Any]:
    """A stack for volumes of 32³, with about as many parameters whatever the group."""
    # A plain filter has 27 parameters for each pair of channels, one of order two 10 · order.
    share = 1.0 if group is None else (2.7 / group.order) ** 0.5
    return {
        "fields": tuple(max(1, round(channels * share)) for channels in (12, 24, 24, 48, 48, 72)),
        "image_size": 32,
        "pooled_after": (1, 2, 4),
        "shrink": False,
        "readout": "mean",
        "pool": "max" if group else None,
    }
