"""Rows of channels: joined, divided, gated by each other."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from econv.conversion.arguments import (
    argument,
    is_channel_axis,
    known,
    known_arguments,
    why_positional,
)
from econv.conversion.plan import Emission, Plan, Step, Value
from econv.conversion.registry import rule
from econv.conversion.trace import ConversionError, owner, value_of
from econv.conversion.widths import Width, divide, join, slice_runs


@rule("cat", "concat", "concatenate")
def concatenate(plan: Plan, node: fx.Node) -> Value:
    parts: Any = argument(node, 0, "tensors")
    axis = argument(node, 1, "dim", 0)
    values = [plan.value(part) for part in parts]
    if all(value.kind in ("image", "invariant", "parameter") for value in values):
        images = [value for value in values if value.kind == "image"]
        if not is_channel_axis(images[0], axis):
            raise ConversionError("", "it concatenates positions")
        _check_positions(parts, values, images[0])
        return plan.copy(node, images[0])
    whole = next(value for value in values if value.kind == "fields")
    if not is_channel_axis(whole, axis):
        raise ConversionError("", "it concatenates group features along an axis of positions")
    _check_positions(parts, values, whole)
    readers: dict[fx.Node, Step] = {}
    widths: list[Width] = []
    for part, value in zip(parts, values, strict=True):
        found = value
        if value.kind in ("image", "invariant"):
            known = value if value.axes else replace(value, axes=plan.image[: value_of(part).ndim])
            found, readers[part] = plan.spread(part, known, owner(node) or node.name)
        if found.kind != "fields" or found.axes != whole.axes:
            raise ConversionError("", f"it concatenates tensors with axes {found.axes}")
        widths += found.widths

    def step(e: Emission) -> fx.Node:
        here = {part: reader(e) for part, reader in readers.items()}
        tensors = [here.get(part, e.found.get(part)) for part in parts]
        return e.function(torch.cat, tensors, 1)

    return plan.emit(node, replace(whole, widths=tuple(widths)), step)


@rule("stack")
def stack(plan: Plan, node: fx.Node) -> Value:
    """Features of equally many fields, as paths."""
    parts: Any = argument(node, 0, "tensors")
    values = [plan.value(part) for part in parts]
    first = values[0]
    if any(value.kind != "fields" or value.axes != first.axes for value in values):
        raise ConversionError("", "it stacks tensors other than group features of equal axes")
    dim = known(argument(node, 1, "dim", 0)) % value_of(node).ndim
    axes = (*first.axes[:dim], "P", *first.axes[dim:])
    found = replace(first, axes=axes)
    if "P" in first.axes:
        raise ConversionError("", "it stacks group features that are stacked already")
    for value in values[1:]:
        join(first.widths, value.widths)
    return plan.emit(
        node,
        found,
        lambda e: e.function(torch.stack, [e[part] for part in parts], found.place("P")),
    )


@rule("repeat", "tile")
def repeat(plan: Plan, node: fx.Node) -> Value:
    """Channels in a row, several times."""
    read, value = plan.first(node)
    given = node.args[1:] or tuple(node.kwargs.values())
    times = known(given[0] if isinstance(given[0], list | tuple) else given)
    each = dict(zip(value.axes, times, strict=False))
    number = each.pop("C", 1)
    if len(times) != len(value.axes) or any(n != 1 for n in each.values()):
        raise ConversionError("", f"it repeats positions, or the batch: {tuple(times)}")
    if value.kind == "image":
        return plan.copy(node, value)
    return plan.emit(
        node,
        replace(value, widths=value.widths * number),
        lambda e: e.function(torch.cat, [e[read]] * number, value.place("C")),
    )


def _check_positions(parts: Any, values: list[Value], whole: Value) -> None:
    for part, value in zip(parts, values, strict=True):
        if value.kind in ("invariant", "parameter"):
            positional = why_positional(tuple(value_of(part).shape), whole.axes)
            if positional:
                raise ConversionError("", positional)


@rule("chunk", "split", "tensor_split")
def split(plan: Plan, node: fx.Node) -> Value:
    read, value = plan.first(node)
    axis = argument(node, 2, "dim", 0)
    if value.kind == "image" and is_channel_axis(value, axis):
        return plan.copy(node, Value("list", items=(value,) * len(value_of(node))))
    if value.kind != "fields" or not is_channel_axis(value, axis):
        raise ConversionError("", "it divides positions")
    items: list[Value] = []
    position = 0
    place = value.axes.index("C")
    for piece in value_of(node):
        size = int(piece.shape[place])
        before, within = slice_runs(value.widths, position, position + size)
        items.append(replace(value, widths=tuple(within), start=tuple(before)))
        position += size
    return plan.emit(node, Value("list", value.axes, items=tuple(items)), lambda e: e[read])


@rule(nn.GLU, "glu")
def gate_halves(plan: Plan, node: fx.Node) -> Value:
    """The first half of the channels, times a sigmoid of the second."""
    read, value = plan.first(node)
    dim = known_arguments(plan, node, dim=-1).dim
    if value.axes[dim] != "C":
        raise ConversionError("", f"it halves the axis {value.axes[dim]}")
    if value.kind == "image":
        return plan.copy(node, value)
    widths = divide(value.widths, 2)

    def step(e: Emission) -> Any:
        number = e.sizes.fields(widths) * e.plan.group.order
        first, gate = (e.method("narrow", e[read], 1, start, number) for start in (0, number))
        return e.function(operator.mul, first, e.method("sigmoid", gate))

    return plan.emit(node, replace(value, widths=widths), step)
