"""Networks by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from econv.groups import Group
from econv.layers.checks import read_group
from econv.models.convnet import ConvNet
from econv.models.dense import UNet
from econv.models.features import Features
from econv.models.imagenet import IMAGENET, ImageNetResNet
from econv.models.resnet import ResNet
from econv.weights import Weights
from econv.weights import named as trained_weights

Network = ResNet | ConvNet | ImageNetResNet | UNet

INVARIANT: dict[str, Any] = {"pool": "max", "exact": True}

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


def create_model(
    name: str,
    *,
    weights: str | Path | Weights | None = None,
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
        weights: trained ones of that network, by their name or in a folder; :func:`list_models`
            has the names, and :class:`econv.Weights` all there is to know about them. The network
            is made as it was trained, but for ``options``. With another ``num_classes`` the
            features are kept, and a warning says so.
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
    network = _named(name, options) if weights is None else _trained(name, weights, options)
    if not features_only:
        if out_indices is not None:
            raise ValueError("expected out_indices together with features_only=True")
        return network
    return Features(network, out_indices)


def list_models(pattern: str = "*", *, weights: bool = False) -> list[str]:
    """The names of networks for :func:`create_model` that fit a pattern; or those of weights.

    Any depth and any group has a name: those listed are the paper's and the usual ones. With
    ``weights=True`` the names are those of the trained weights that were found here.

    >>> list_models("cifar_*44*")
    ['cifar_resnet44_p8']
    >>> "digits_p8" in list_models("*p8*", weights=True)
    True
    """
    if weights:
        return trained_weights(pattern)
    return sorted(name for name in MODELS if fnmatchcase(name, pattern))


def _trained(name: str, weights: str | Path | Weights, options: dict[str, Any]) -> Any:
    """The network of these weights, which must be one of that name."""
    found = Weights.find(weights)
    if found.model != name:
        there = [each for each in trained_weights() if Weights.find(each).model == name]
        raise ValueError(
            f"expected weights of {name}, of which there are {', '.join(there) or 'none'}; "
            f"{found.name} are of {found.model}"
        )
    others = {key: value for key, value in options.items() if key != "num_classes"}
    network = found.load(options.get("num_classes"))
    if not others:
        return network
    made = type(network)(**{**network.config, **others})
    try:
        made.load_state_dict(network.state_dict())
    except RuntimeError as error:
        raise ValueError(
            f"expected options that leave the weights of {found.name} as they are; got {others}: "
            f"{str(error).splitlines()[-1].strip()}"
        ) from None
    return made.eval()


def _named(name: str, options: dict[str, Any]) -> Network:
    if name in MODELS:
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
    invariant = INVARIANT if group is not None and match[1] != "paper" else {}
    if match[1] is None and depth in IMAGENET:
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
    if int(depth) not in IMAGENET:
        raise ValueError(f"expected a depth of {sorted(IMAGENET)} for volumes; got {depth}")
    invariant = INVARIANT if found else {}
    return ImageNetResNet(**{"depth": int(depth), **given, **invariant, **options})
