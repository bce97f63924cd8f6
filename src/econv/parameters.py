"""Which parameters should decay: what an optimiser is told about the weights of a network."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from econv.layers.checks import check_module
from econv.layers.normalisation import GroupLayerNorm

__all__ = ["no_weight_decay", "parameter_groups"]

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm, GroupLayerNorm)


def no_weight_decay(model: nn.Module) -> set[str]:
    """The names of the parameters that weight decay should leave alone.

    Scales and biases of norms, all other biases, and single numbers such as temperatures: what a
    norm follows does not feel their size, or they have no size to keep small. The weights of
    convolutions and linear layers decay; a PDO-eConv's is its canonical filter in orthonormal
    coordinates, as long as in pixels, so that one rate fits them and ordinary convolutions alike.

    >>> sorted(no_weight_decay(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))))
    ['0.bias', '1.bias', '1.weight']
    """
    found = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or isinstance(module, _NORMS):
                found.add(f"{prefix}.{name}" if prefix else name)
    return found


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters in the two groups that every optimiser of torch takes.

    The first group decays, the second, of :func:`no_weight_decay`, does not. Frozen parameters are
    in neither, parameters with several names in one. Each group has a ``name``, ``"decay"`` or
    ``"no_decay"``.

    Args:
        model: any network.
        weight_decay: the decay of the first group.

    Raises:
        ValueError: if the decay is no number of 0 or more.

    >>> import torch, econv
    >>> model = econv.create_model("cifar_resnet26_p8")
    >>> optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.05), lr=1e-3)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.05, 0.0]
    """
    check_module(model)
    number = isinstance(weight_decay, float | int) and not isinstance(weight_decay, bool)
    if not number or not 0 <= weight_decay < math.inf:
        raise ValueError(f"expected a weight_decay of 0 or more; got {weight_decay!r}")
    left_alone = no_weight_decay(model)
    decay: list[nn.Parameter] = []
    other: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():  # each once, whatever its names
        if parameter.requires_grad:
            (other if name in left_alone else decay).append(parameter)
    return [
        {"name": "decay", "params": decay, "weight_decay": float(weight_decay)},
        {"name": "no_decay", "params": other, "weight_decay": 0.0},
    ]
