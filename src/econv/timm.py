"""Our networks under timm's roof: importing this module registers each of them with timm.

    import timm, econv.timm
    model = timm.create_model("econv_resnet18_p8", num_classes=100)

The names are those of `econv.models.MODELS` with ``econv_`` before them, since timm has a
``resnet18`` of its own. timm's words are understood: ``in_chans``, ``img_size``, ``drop_rate``,
``features_only`` with ``out_indices``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from econv.models import MODELS, ConvNet, Features, ImageNetResNet, create_model

try:  # by name: it need not be installed where types are checked
    _registry: Any = importlib.import_module("timm.models")
except ImportError:
    raise ImportError("econv.timm needs timm: pip install 'econv[timm]'") from None

__all__: list[str] = []  # timm adds the names that it registers

# What timm calls the arguments of a network, and of those that drop numbers after each layer.
_NAMES = {"in_chans": "in_channels", "img_size": "image_size"}
_OF_CONVNET = {"drop_rate": "dropout"}


def _data(name: str) -> dict[str, Any]:
    """What timm's loaders and scripts want to know."""
    kind, options = MODELS[name]
    photographs = kind is ImageNetResNet
    images = (1, 28, 28) if kind is ConvNet else (3, 224, 224) if photographs else (3, 32, 32)
    stem = {ConvNet: "layers.0", ImageNetResNet: "conv1"}.get(kind, "lift")
    return {
        "url": "",  # no weights are published
        "num_classes": 1000 if photographs else 10,
        "input_size": images,
        "fixed_input_size": kind is ConvNet and options.get("readout", "map") == "map",
        "pool_size": None,
        "crop_pct": 1.0,
        "mean": (0.5,) * images[0],
        "std": (0.5,) * images[0],
        "first_conv": stem,
        "classifier": "classifier",
    }


def _maker(name: str) -> Callable[..., nn.Module]:
    names = {**_NAMES, **(_OF_CONVNET if MODELS[name][0] is ConvNet else {})}

    def make(pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            raise ValueError(
                f"expected pretrained=False: no weights of {registered} are published; "
                "econv.from_pretrained reads your own"
            )
        for ours in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            options.pop(ours, None)
        renamed = {names.get(key, key): value for key, value in options.items()}
        model: nn.Module = create_model(name, **renamed)
        network = model.network if isinstance(model, Features) else model
        cfg = _registry.get_pretrained_cfg(registered).to_dict()
        cfg.update(num_classes=network.num_classes)
        model.pretrained_cfg = model.default_cfg = cfg
        return model

    registered = f"econv_{name}"
    make.__name__ = make.__qualname__ = registered
    make.__doc__ = f"``econv.create_model({name!r})`` with timm's names for its arguments."
    return make


default_cfgs = {f"econv_{name}": _data(name) for name in MODELS}
for _name in MODELS:
    globals()[f"econv_{_name}"] = _registry.register_model(_maker(_name))
