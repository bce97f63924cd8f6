"""The ordinary CNN that a network is compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from econv.export import plain_borders
from econv.groups import Group
from econv.layers import FieldParameter, GroupLinear, PDOConv
from econv.layers.normalisation import (
    GroupBatchNorm,
    GroupGroupNorm,
    GroupInstanceNorm,
    GroupLayerNorm,
)
from econv.layers.orientations import GroupDropout, GroupPReLU, Restrict


def plain_twin(model: nn.Module, seed: int = 0) -> nn.Module:
    """A CNN of the same architecture: a copy with ordinary convolutions and norms, drawn anew.

    PDO-eConvs become `Conv2d`, of volumes `Conv3d`, of equal channels, support, stride, padding,
    dilation and groups, and norms per field become norms per channel. Pooling over orientations
    stays, as a maxout over channels, and so does everything else, such as the classifier with its
    weights.

    >>> from econv import GroupBatchNorm2d, LiftConv2d
    >>> twin = plain_twin(nn.Sequential(LiftConv2d(1, 2, "p4"), GroupBatchNorm2d(2, "p4")))
    >>> twin[0], twin[1].num_features
    (Conv2d(1, 8, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2), bias=False), 8)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _twin(copy.deepcopy(model))


def _twin(module: nn.Module) -> nn.Module:
    weight = getattr(module, "weight", None)
    options: dict[str, Any] = {}
    if isinstance(weight, Tensor):
        options = {"device": weight.device, "dtype": weight.dtype}
    twin: nn.Module | None = None
    if isinstance(module, GroupLinear):
        bias = module.bias is not None
        twin = nn.Linear(module.in_channels, module.out_channels, bias, **options)
        nn.init.kaiming_normal_(twin.weight, nonlinearity="relu")
    elif isinstance(module, PDOConv):
        borders, padding = plain_borders(module)
        conv = _of_torch("Conv", module.dimension)(
            module.in_channels,
            module.out_channels,
            module.basis.size,
            module.stride,
            dilation=module.dilation,
            groups=module.groups,
            bias=module.bias is not None,
            **padding,
            **options,
        )
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        twin = nn.Sequential(*borders, conv) if borders else conv
    elif isinstance(module, GroupBatchNorm | GroupInstanceNorm):
        name = "BatchNorm" if isinstance(module, GroupBatchNorm) else "InstanceNorm"
        twin = _of_torch(name, module.dimension)(
            module.fields * module.group.order,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            **options,
        )
    elif isinstance(module, GroupLayerNorm):
        channels, trivial = module.fields * module.group.order, _trivial(module.group)
        twin = type(module)(channels, trivial, module.eps, weight is not None, **options)
    elif isinstance(module, GroupGroupNorm):
        channels, affine = module.fields * module.group.order, weight is not None
        twin = nn.GroupNorm(module.num_groups, channels, module.eps, affine, **options)
    elif isinstance(module, GroupPReLU):
        twin = nn.PReLU(module.fields * module.group.order, module.init, **options)
    elif isinstance(module, FieldParameter):
        channels = module.fields * module.group.order
        trivial = _trivial(module.group)
        twin = FieldParameter(channels, trivial, module.initial, module.pixels, **options)
    elif isinstance(module, GroupDropout):
        twin = _of_torch("Dropout", module.dimension)(module.p)
    elif isinstance(module, Restrict):
        twin = nn.Identity()
    if twin is not None:
        return twin.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, _twin(child))
    return module


def _of_torch(name: str, dimension: int) -> Any:
    """A module of torch that has the dimension in its name."""
    return getattr(nn, f"{name}{dimension}d")


def _trivial(group: Group) -> str:
    """The group of the same space that turns nothing."""
    return {2: "p1", 3: "C1"}[group.dimension]
