"""Networks by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from econv.layers.checks import read_group
from econv.models.classifiers import MODELS, by_name
from econv.models.dense import FPN, EncoderUNet, UNet
from econv.models.features import Features
from econv.models.kit import expect_truth
from econv.weights import Weights
from econv.weights import named as trained_weights


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
    - ``wrn16_8_p8m``, ``wrn28_10_p8m_p4m_p1m``, …: Wide ResNets of 6n + 4 layers, with one group or
      with that of each stage, as Weiler & Cesa (2019) restrict them along depth (:class:`ResNet`).
    - ``resnet10_3d_O``, ``resnet18_3d_I``, ``resnet50_3d_D4h``, …: ResNets for volumes, also of 10
      layers (:class:`ImageNetResNet`).
    - ``convnet6_3d_O``, …: a small stack for volumes of 32³ (:class:`ConvNet`).
    - ``unet_p8``, ``unet_3d_O``, …: U-Nets for images and volumes (:class:`UNet`).
    - ``unet_resnet26_p8``, ``fpn_resnet18_p8``, ``unet_resnet10_3d_O``, …: U-Nets and feature
      pyramids over any of these ResNets (:class:`EncoderUNet`, :class:`FPN`).

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
    expect_truth(features_only=features_only)
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

    Raises:
        ValueError: for a pattern that is no text.

    >>> list_models("cifar_*44*")
    ['cifar_resnet44_p8']
    >>> "digits_p8" in list_models("*p8*", weights=True)
    True
    """
    if not isinstance(pattern, str):
        raise ValueError(f"expected pattern as a text such as '*p8*'; got {pattern!r}")
    expect_truth(weights=weights)
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


def _named(name: str, options: dict[str, Any]) -> Any:
    renamed = dict(options)
    if "classes" in renamed and str(name).startswith(("unet", "fpn")):
        if "num_classes" in renamed:
            raise ValueError(f"expected num_classes or classes, which is the same; got {options}")
        renamed["num_classes"] = renamed.pop("classes")  # as other libraries call it
    over = re.fullmatch(r"(unet|fpn)_((?:(?:paper_|cifar_)?resnet|wrn)\w+)", str(name))
    if over is not None:
        kind = EncoderUNet if over[1] == "unet" else FPN
        return kind(over[2], **renamed)
    own = re.fullmatch(r"unet(_3d)?(?:_(\w+))?", str(name))
    if own is None:
        return by_name(name, options)
    dimension = 3 if own[1] else 2
    group = None if own[2] is None else read_group(own[2], dimension, "create_model")
    if renamed.get("group") is not None:
        read_group(renamed["group"], dimension, "create_model")
    given: dict[str, Any] = {"group": group} if group else {"group": None, "dimension": dimension}
    return UNet(**{**given, **renamed})
