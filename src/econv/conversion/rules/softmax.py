"""Softmax over channels, or over the paths of split attention."""

from __future__ import annotations

from dataclasses import replace

from torch import fx, nn

from econv.conversion.arguments import argument, check_map, known
from econv.conversion.plan import VECTOR, Emission, Plan, Value
from econv.conversion.registry import rule
from econv.conversion.trace import ConversionError, name_of, owner
from econv.conversion.widths import divide


@rule(nn.Softmax, nn.LogSoftmax)
def softmax_module(plan: Plan, node: fx.Node) -> Value:
    return _softmax(plan, node, plan.module(node).dim)


@rule(nn.Softmax2d)
def softmax_of_maps(plan: Plan, node: fx.Node) -> Value:
    value = plan.value(node.args[0])
    check_map(plan, value)
    return plan.copy(node, value)


@rule("softmax", "log_softmax")
def softmax(plan: Plan, node: fx.Node) -> Value:
    return _softmax(plan, node, known(argument(node, 1, "dim")))


def _softmax(plan: Plan, node: fx.Node, dim: int | None) -> Value:
    read, value = plan.first(node)
    if dim is None:
        raise ConversionError("", "it does not say over which axis it is taken")
    if not value.axes:
        return plan.copy(node, value)
    axis = value.axes[dim]
    if axis in plan.pixels:
        raise ConversionError("", "it takes rows and columns apart")
    if value.kind == "image":
        return plan.copy(node, value)
    flat = axis in [row for _, row in plan.flat] and value.channels == 1
    if flat or set(axis) == set(plan.pixels):
        return _over_positions(plan, node, read, value)
    if axis == "P" or (axis == "C" and value.axes in (plan.image, VECTOR)):
        return plan.copy(node, value)
    if axis == "C" and "P" not in value.axes:  # the layout has them second
        name = name_of(node) if node.op != "call_module" else _NAMES[type(plan.module(node))]
        return plan.emit(node, value, lambda e: e.method(name, e[read], 1))
    raise ConversionError("", f"it is taken over the axis {axis}")


_NAMES: dict[type[nn.Module], str] = {nn.Softmax: "softmax", nn.LogSoftmax: "log_softmax"}


def _over_positions(plan: Plan, node: fx.Node, read: fx.Node, value: Value) -> Value:
    """Weights of positions, for every orientation, or of one channel for all of them."""
    if value.channels == 1:
        image, reader = plan.as_image(read, value, owner(node) or node.name)
        if node.op == "call_module":
            plan.keep(node)
        row = "".join(plan.pixels)
        axes = tuple(row if "C" in axis and axis != "C" else axis for axis in value.axes)
        return plan.emit(node, replace(image, axes=axes), lambda e: e.copy(node, {read: reader}))
    name = name_of(node) if node.op != "call_module" else _NAMES[type(plan.module(node))]

    def step(e: Emission) -> fx.Node:
        row = e.method(name, e.method("flatten", e[read], 2), -1)
        return e.method("view_as", row, e[read])

    return plan.emit(node, value, step)


@rule(classes=("RadixSoftmax",))
def radix_softmax(plan: Plan, node: fx.Node) -> Value:
    """Weights of the paths of split attention, from features without positions."""
    module = plan.module(node)
    read, value = plan.first(node)
    if module.cardinality != 1 or value.axes != plan.image:
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
