"""Softmax over channels, or over the paths of split attention."""

from __future__ import annotations

from dataclasses import replace

from torch import fx, nn

from econv.conversion.arguments import argument, check_map, is_channel_axis, known
from econv.conversion.plan import IMAGE, PATHS, VECTOR, Emission, Plan, Value
from econv.conversion.registry import rule
from econv.conversion.trace import ConversionError
from econv.conversion.widths import divide


@rule(nn.Softmax, nn.LogSoftmax)
def softmax_module(plan: Plan, node: fx.Node) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    axis = value.axes[plan.module(node).dim]
    if axis != "C":
        raise ConversionError("", f"it is taken over the axis {axis}")
    check_map(value, VECTOR)
    return plan.copy(node, value)


@rule(nn.Softmax2d)
def softmax_of_maps(plan: Plan, node: fx.Node) -> Value:
    value = plan.value(node.args[0])
    check_map(value)
    return plan.copy(node, value)


@rule("softmax", "log_softmax")
def softmax(plan: Plan, node: fx.Node) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    axis = argument(node, 1, "dim")
    if axis is not None and value.axes == PATHS and known(axis) == 1:
        return plan.copy(node, value)
    if axis is None or not is_channel_axis(value, axis) or value.axes not in (IMAGE, VECTOR):
        raise ConversionError("", "softmax over positions: attention has no counterpart here")
    return plan.copy(node, value)


@rule(classes=("RadixSoftmax",))
def radix_softmax(plan: Plan, node: fx.Node) -> Value:
    """Weights of the paths of split attention, from features without positions."""
    module = plan.module(node)
    read, value = plan.first(node)
    if module.cardinality != 1 or value.axes != IMAGE:
        raise ConversionError("", "its paths are divided into groups")
    if module.radix == 1:
        return plan.emit(
            node,
            replace(value, axes=VECTOR),
            lambda e: e.method("sigmoid", e.method("flatten", e[read], 1)),
        )
    divide(value.widths, module.radix)

    def step(e: Emission) -> fx.Node:
        paths = e.method("unflatten", e.method("flatten", e[read], 1), 1, (module.radix, -1))
        return e.method("flatten", e.method("softmax", paths, 1), 1)

    return plan.emit(node, replace(value, axes=VECTOR), step)
