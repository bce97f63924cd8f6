"""Norms, as modules and as functions, and what else learns a number for every channel."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from econv.conversion.arguments import argument, check_map, is_channel_axis, known
from econv.conversion.per_field import common_number, field_parameter, fit_by_channel
from econv.conversion.plan import VECTOR, Emission, Make, Plan, PlannedModule, Value
from econv.conversion.registry import rule
from econv.conversion.steps import one_pixel
from econv.conversion.trace import ConversionError, name_of, owner, value_of
from econv.conversion.widths import Sizes
from econv.layers import FieldParameter

_CHANNELS_FIRST = ("LayerNorm2d", "LayerNormAct2d", "LayerNorm2dFp32")
_GROUP_NORM = (("weight", 2), ("bias", 3), ("eps", 4))

# Modules


@rule(_BatchNorm, variants=("BatchNormAct2d", "SyncBatchNorm"))
def batch_norm(plan: Plan, node: fx.Node) -> Value:
    return _statistics_norm(plan, node, "GroupBatchNorm", VECTOR)


@rule(classes=("FrozenBatchNorm2d",))
def frozen_batch_norm(plan: Plan, node: fx.Node) -> Value:
    """Batch norm whose numbers are buffers, as detectors have it: one that learns its own."""
    module, value = plan.module(node), plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    check_map(plan, value)
    plan.notes.append(f"{node.target}: its frozen statistics are learned anew")

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(value.widths)
        return plan.layer("GroupBatchNorm")(fields, plan.group, module.eps, **where)

    return _layer_in_place(plan, node, make)


@rule(_InstanceNorm)
def instance_norm(plan: Plan, node: fx.Node) -> Value:
    return _statistics_norm(plan, node, "GroupInstanceNorm")


def _statistics_norm(
    plan: Plan,
    node: fx.Node,
    layer: str,
    *other_axes: tuple[str, ...],
) -> Value:
    """A norm that may keep running statistics."""
    module, value = plan.module(node), plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    check_map(plan, value, *other_axes)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return plan.layer(layer)(
            sizes.fields(value.widths),
            plan.group,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            **where,
        )

    return _layer_in_place(plan, node, make)


@rule(nn.GroupNorm, variants=("GroupNormAct", "GroupNorm", "GroupNorm1"))
def group_norm(plan: Plan, node: fx.Node) -> Value:
    module, value = plan.module(node), plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    check_map(plan, value, VECTOR)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(value.widths)
        groups = _most_groups(module.num_groups, module.num_channels, fields)
        return plan.layer("GroupGroupNorm")(
            groups, fields, plan.group, module.eps, module.affine, **where
        )

    return _layer_in_place(plan, node, make)


def _most_groups(groups: int, channels: int, fields: int) -> int:
    """How many groups a norm of fields has; one for each field if it was so for channels."""
    most = fields if groups == channels else groups
    return max(n for n in range(1, min(most, fields) + 1) if fields % n == 0)


@rule(nn.LayerNorm, variants=("LayerNorm", "LayerNormAct", "LayerNormFp32", *_CHANNELS_FIRST))
def layer_norm(plan: Plan, node: fx.Node) -> Value:
    module, value = plan.module(node), plan.value(node.args[0])
    if len(module.normalized_shape) != 1:
        raise ConversionError("", "it learns a scale for every pixel")
    axis = "C" if type(module).__name__ in _CHANNELS_FIRST else value.axes[-1]
    if axis != "C":
        raise ConversionError("", f"it normalises the last of the axes {value.axes}")
    if value.kind == "image":
        return plan.copy(node, value)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return plan.layer("GroupLayerNorm")(
            sizes.fields(value.widths), plan.group, module.eps, module.elementwise_affine, **where
        )

    return _layer_in_place(plan, node, make)


@rule(nn.PReLU, variants=("PReLU",))
def prelu(plan: Plan, node: fx.Node) -> Value:
    module, value = plan.module(node), plan.value(node.args[0])
    if value.kind == "image" or module.num_parameters == 1:
        return plan.copy(node, value)
    initial = common_number(module.weight)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        slope = 0.25 if initial is None else initial
        fields = sizes.fields(value.widths)
        return plan.layer("GroupPReLU")(fields, plan.group, slope, **where)

    return _layer_in_place(plan, node, make)


def _layer_in_place(plan: Plan, node: fx.Node, make: Make) -> Value:
    """A layer of group features, with the function and the dropout that some norms contain."""
    name, source = str(node.target), plan.module(node)
    read, value = plan.first(node)
    initial = common_number(getattr(source, "weight", None))

    def make_all(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        norm = make(sizes, where)
        own = getattr(norm, "weight", None)
        if own is not None and initial is not None and not own.is_meta:
            nn.init.constant_(own, initial)
        after = [(n, getattr(source, n, None)) for n in ("drop", "act")]
        inside = [(n, m) for n, m in after if isinstance(m, nn.Module)]
        if not [m for _, m in inside if not isinstance(m, nn.Identity)]:
            return norm
        parts = [("norm", norm), *((n, copy.deepcopy(m)) for n, m in inside)]
        return nn.Sequential(OrderedDict(parts))

    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    fit = fit_by_channel(value.widths, source, names)
    plan.add_shared(PlannedModule(name, make_all, source, into=value.widths, fit=fit))
    if value.axes == VECTOR:

        def on_vectors(e: Emission) -> fx.Node:
            return e.method("flatten", e.module(name, one_pixel(e, e[read])), 1)

        return plan.emit(node, value, on_vectors)
    return plan.emit(node, value, lambda e: e.module(name, e[read]))


@rule(nn.RMSNorm)
def rms_norm(plan: Plan, node: fx.Node) -> Value:
    module = plan.module(node)
    read, value = plan.first(node)
    if len(module.normalized_shape) != 1 or value.axes[-1] != "C":
        raise ConversionError("", f"it normalises the last of the axes {value.axes}")
    if value.kind == "image":
        return plan.copy(node, value)
    name = str(node.target)
    initial = common_number(module.weight)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        start = 1.0 if initial is None else initial
        return FieldParameter(
            sizes.fields(value.widths), plan.group, start, value.axes != VECTOR, **where
        )

    if module.weight is not None:
        fit = fit_by_channel(value.widths, module, ("weight",))
        plan.add_shared(PlannedModule(name, make, module, into=value.widths, fit=fit))

    def step(e: Emission) -> Any:
        found = _normalised(e, e[read], False, module.eps, value_of(read).dtype)
        if module.weight is None:
            return found
        return e.function(operator.mul, found, e.module(name))

    return plan.emit(node, value, step)


def _normalised(e: Emission, x: Any, centred: bool, eps: float | None, dtype: torch.dtype) -> Any:
    """Group features with the channels of every pixel at mean square one, and at mean zero."""
    if centred:
        x = e.function(operator.sub, x, e.method("mean", x, 1, True))
    power = e.method("mean", e.method("square", x), 1, True)
    least = torch.finfo(dtype).eps if eps is None else eps
    return e.function(operator.mul, x, e.method("rsqrt", e.function(operator.add, power, least)))


# Functions


def _learned(
    plan: Plan, node: fx.Node, value: Value, weight: Any, bias: Any
) -> Callable[[Emission, Any], Any]:
    """What a norm does last: numbers for every channel, as numbers for every field."""
    last = value if value.axes == VECTOR else replace(value, axes=("N", *plan.pixels, "C"))
    scale, shift = (
        field_parameter(plan, node, found, last) if isinstance(found, fx.Node) else None
        for found in (weight, bias)
    )

    def step(e: Emission, x: Any) -> Any:
        if scale is not None:
            x = e.function(operator.mul, x, scale(e))
        return x if shift is None else e.function(operator.add, x, shift(e))

    return step


@rule("layer_norm", "rms_norm")
def norm_over_channels(plan: Plan, node: fx.Node) -> Value:
    """`layer_norm` and `rms_norm` of the channels of every pixel."""
    read, value = plan.first(node)
    shape = known(argument(node, 1, "normalized_shape"))
    if len(shape) != 1 or value.axes[-1] != "C":
        raise ConversionError("", f"it normalises the last of the axes {value.axes}")
    if value.kind == "image":
        return plan.copy(node, value)
    centred = name_of(node) == "layer_norm"
    bias = argument(node, 3, "bias") if centred else None
    learned = _learned(plan, node, value, argument(node, 2, "weight"), bias)
    eps = known(argument(node, 4, "eps", 1e-5) if centred else argument(node, 3, "eps"))

    def step(e: Emission) -> Any:
        return learned(e, _normalised(e, e[read], centred, eps, value_of(read).dtype))

    return plan.emit(node, value, step)


@rule("instance_norm", "group_norm")
def norm_of_fields(plan: Plan, node: fx.Node) -> Value:
    """`instance_norm` and `group_norm`: the layer without numbers of its own, and the numbers."""
    read, value = plan.first(node)
    instances = name_of(node) == "instance_norm"
    if value.kind == "image":
        return plan.copy(node, value)
    check_map(plan, value)
    places = (("weight", 3), ("bias", 4), ("eps", 7)) if instances else _GROUP_NORM
    weight, bias, eps = (argument(node, place, name) for name, place in places)
    if instances and (
        argument(node, 1, "running_mean") is not None
        or not known(argument(node, 5, "use_input_stats", True))
    ):
        raise ConversionError("", "its running statistics belong to channels: use the module")
    epsilon = 1e-5 if eps is None else float(known(eps))
    groups = None if instances else int(known(argument(node, 1, "num_groups")))
    learned = _learned(plan, node, value, weight, bias)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(value.widths)
        if groups is None:
            return plan.layer("GroupInstanceNorm")(fields, plan.group, epsilon, affine=False)
        fitting = _most_groups(groups, value.channels, fields)
        return plan.layer("GroupGroupNorm")(fitting, fields, plan.group, epsilon, affine=False)

    name = plan.new_name(f"{owner(node)}_{node.name}" if owner(node) else node.name)
    plan.add_part(PlannedModule(name, make, into=value.widths), source=name_of(node))
    return plan.emit(node, value, lambda e: learned(e, e.module(name, e[read])))


@rule("normalize")
def normalize(plan: Plan, node: fx.Node) -> Value:
    """`normalize`: each pixel's channels to length one."""
    read, value = plan.first(node)
    if not is_channel_axis(value, argument(node, 2, "dim", 1)):
        raise ConversionError("", "it normalises over positions, or over the batch")
    if value.kind == "image":
        return plan.copy(node, value)
    options = {"p": known(argument(node, 1, "p", 2.0)), "eps": argument(node, 3, "eps", 1e-12)}
    return plan.emit(
        node, value, lambda e: e.function(functional.normalize, e[read], dim=1, **options)
    )
