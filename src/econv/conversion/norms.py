"""Norms that are called as functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.nn import functional

from econv.conversion.arguments import argument, is_channel_axis, known
from econv.conversion.elementwise import field_parameter
from econv.conversion.modules import most_groups, normalised
from econv.conversion.plan import Emission, Part, Plan, Row, Value, describe
from econv.conversion.shapes import IMAGE, VECTOR
from econv.conversion.trace import ConversionError, name_of, owner, value_of
from econv.layers import GroupGroupNorm2d, GroupInstanceNorm2d

__all__ = ["norm_of_fields", "norm_over_channels", "normalize"]


def _learned(
    plan: Plan, node: fx.Node, value: Value, weight: Any, bias: Any
) -> Callable[[Emission, Any], Any]:
    """What a norm does last: numbers for every channel, as numbers for every field."""
    last = value if value.axes == VECTOR else replace(value, axes=("N", "H", "W", "C"))
    scale, shift = (
        field_parameter(plan, node, found, last) if isinstance(found, fx.Node) else None
        for found in (weight, bias)
    )

    def step(e: Emission, x: Any) -> Any:
        if scale is not None:
            x = e.function(operator.mul, x, scale(e))
        return x if shift is None else e.function(operator.add, x, shift(e))

    return step


def norm_over_channels(plan: Plan, node: fx.Node) -> Value:
    """`layer_norm` and `rms_norm` of the channels of every pixel."""
    read: Any = node.args[0]
    value = plan.value(read)
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
        return learned(e, normalised(e, e[read], centred, eps, value_of(read).dtype))

    return plan.emit(node, value, step)


def norm_of_fields(plan: Plan, node: fx.Node) -> Value:
    """`instance_norm` and `group_norm`: the layer without numbers of its own, and the numbers."""
    read: Any = node.args[0]
    value = plan.value(read)
    instances = name_of(node) == "instance_norm"
    if value.kind == "image":
        return plan.copy(node, value)
    if value.axes != IMAGE:
        raise ConversionError("", f"it reads a tensor with axes {value.axes}")
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

    def make(sizes: Any, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(value.widths)
        if groups is None:
            return GroupInstanceNorm2d(fields, plan.group, epsilon, affine=False)
        fitting = most_groups(groups, value.channels, fields)
        return GroupGroupNorm2d(fitting, fields, plan.group, epsilon, affine=False)

    name = plan.new_name(f"{owner(node)}_{node.name}" if owner(node) else node.name)
    plan.add_part(Part(name, make, None, 0, value.widths))
    plan.rows.append(Row(name, name_of(node), describe))
    return plan.emit(node, value, lambda e: learned(e, e.module(name, e[read])))


_GROUP_NORM = (("weight", 2), ("bias", 3), ("eps", 4))


def normalize(plan: Plan, node: fx.Node) -> Value:
    """`normalize`: each pixel's channels to length one."""
    read: Any = node.args[0]
    value = plan.value(read)
    if not is_channel_axis(value, argument(node, 2, "dim", 1)):
        raise ConversionError("", "it normalises over positions, or over the batch")
    if value.kind == "image":
        return plan.copy(node, value)
    options = {"p": known(argument(node, 1, "p", 2.0)), "eps": argument(node, 3, "eps", 1e-12)}
    return plan.emit(
        node, value, lambda e: e.function(functional.normalize, e[read], dim=1, **options)
    )
