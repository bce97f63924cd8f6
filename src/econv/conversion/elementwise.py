"""Sums, products and what else meets element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from econv.conversion.arguments import why_positional
from econv.conversion.plan import Emission, Part, Plan, Row, Step, Value
from econv.conversion.shapes import IMAGE, VECTOR
from econv.conversion.trace import ConversionError, name_of, owner, value_of
from econv.conversion.widths import join, runs
from econv.layers import FieldParameter, GroupPool2d

__all__ = ["elementwise", "expand", "field_parameter"]


def elementwise(plan: Plan, node: fx.Node) -> Value:
    reads = node.all_input_nodes
    tensors = [r for r in reads if isinstance(value_of(r), Tensor) and value_of(r).ndim > 0]
    fields = [r for r in tensors if plan.value(r).kind == "fields"]
    shape = tuple(value_of(node).shape)
    if not fields:
        return _elementwise_images(plan, node, tensors, shape)
    widest = max(fields, key=lambda r: (value_of(r).ndim, plan.value(r).channels))
    whole = plan.value(widest)
    if value_of(widest).ndim != len(shape):
        raise ConversionError("", f"group features are broadcast to {shape}")
    readers: dict[fx.Node, Step] = {}
    for read in tensors:
        _join_operand(plan, node, read, whole, readers)
    axes = whole.axes
    pixels = [plan.value(r) for r in fields if plan.value(r).axes == axes]

    def step(e: Emission) -> fx.Node:
        here = {read: reader(e) for read, reader in readers.items()}
        return e.graph.node_copy(node, lambda n: here.get(n, e.found.get(n, n)))

    return plan.emit(node, pixels[0] if whole not in pixels else whole, step)


def _join_operand(
    plan: Plan, node: fx.Node, read: fx.Node, whole: Value, readers: dict[fx.Node, Step]
) -> None:
    """Make one operand fit to group features, or say why it does not."""
    value, shape = plan.value(read), tuple(value_of(read).shape)
    here = owner(node) or node.name
    if value.kind == "fields":
        if value.axes != whole.axes:
            raise ConversionError("", f"it joins tensors with axes {value.axes} and {whole.axes}")
        if value.channels == whole.channels:
            join(whole.widths, value.widths)
        elif value.channels == 1:
            for width in runs(value.widths):
                width.fix(1)
            pool = plan.insert(here, "orientations", lambda: GroupPool2d(plan.group, plan.reduce))
            readers[read] = lambda e: e.module(pool, e[read])
        else:
            raise ConversionError("", f"it joins {value.channels} and {whole.channels} channels")
        return
    if value.kind == "parameter":
        readers[read] = field_parameter(plan, node, read, whole)
        return
    positional = why_positional(shape, whole.axes) if value.kind != "image" else None
    if positional:
        raise ConversionError("", positional)
    place = len(shape) - len(whole.axes) + whole.axes.index("C")
    channels = shape[place] if place >= 0 else 1
    if whole.axes not in (IMAGE, VECTOR):
        raise ConversionError("", f"it joins an image and group features with axes {whole.axes}")
    if channels == 1:
        return
    if value.kind != "image" and value.axes not in (IMAGE, VECTOR):
        raise ConversionError("", f"a tensor of shape {shape} meets group features")
    known = value if value.axes else replace(value, axes=IMAGE[: len(shape)])
    spread, reader = plan.spread(read, known, here)
    join(whole.widths, spread.widths)
    readers[read] = reader


def field_parameter(plan: Plan, node: fx.Node, read: fx.Node, whole: Value) -> Step:
    """A parameter with one number per channel, as one with one number per field."""
    tensor = value_of(read)
    shape = tuple(tensor.shape)
    if tensor.numel() == 1:
        return lambda e: e[read]
    place = len(shape) - len(whole.axes) + whole.axes.index("C")
    positional = why_positional(shape, whole.axes)
    if positional or place < 0 or shape[place] != tensor.numel():
        raise ConversionError("", positional or f"a parameter of shape {shape} meets an image")
    if tensor.numel() != whole.channels:
        raise ConversionError("", f"a parameter of shape {shape} meets {whole.channels} channels")
    source = _parameter_behind(read)
    name = str(source.target)
    given = plan.trace.attribute(name)
    widths = whole.widths
    learned = isinstance(given, nn.Parameter) and given.requires_grad
    initial = float(given.detach().double().mean()) if not given.is_meta else 1.0
    pixels = whole.axes != VECTOR

    def make(sizes: Any, where: dict[str, Any]) -> nn.Module:
        module = FieldParameter(sizes.fields(widths), plan.group, initial, pixels, **where)
        return module.requires_grad_(learned)

    def fit(kept: Any, module: Any) -> float | None:
        with torch.no_grad():
            module.weight.copy_(given.detach().flatten()[kept.channels(widths)])
        return None

    if name in plan.parts:
        join(plan.parts[name].into, widths)
    else:
        plan.add_part(Part(name, make, None, 0, widths, (), fit))
        plan.rows.append(Row(name, f"Parameter{shape}", f"FieldParameter({plan.group.name})"))
    return lambda e: e.module(name)


def _parameter_behind(node: fx.Node) -> fx.Node:
    """The attribute that an expression of one parameter reads."""
    while node.op != "get_attr":
        reads = [r for r in node.all_input_nodes if isinstance(value_of(r), Tensor)]
        same = node.op == "call_method" and node.target in (
            *("view", "reshape", "unsqueeze", "to", "type_as", "expand", "expand_as", "contiguous"),
            *("squeeze", "float"),
        )
        if len(reads) != 1 or not (same or name_of(node) in ("getitem", "reshape", "unsqueeze")):
            raise ConversionError(
                "", f"it computes a number for every channel: {node.format_node()}"
            )
        node = reads[0]
    return node


def _elementwise_images(
    plan: Plan, node: fx.Node, tensors: list[fx.Node], shape: tuple[int, ...]
) -> Value:
    images = [plan.value(r) for r in tensors if plan.value(r).kind == "image"]
    longest = max(images, key=lambda value: len(value.axes))
    for read in tensors:
        positional = why_positional(tuple(value_of(read).shape), longest.axes)
        if plan.value(read).kind != "image" and positional:
            raise ConversionError("", positional)
    if len(longest.axes) != len(shape):
        raise ConversionError("", f"an image is broadcast to {shape}")
    return plan.copy(node, longest)


def expand(plan: Plan, node: fx.Node) -> Value:
    """Broadcasting does what an expansion says; the operation that follows does it by itself."""
    read: Any = node.args[0]
    value = plan.value(read)
    before, after = value_of(read).shape, value_of(node).shape
    if value.kind != "fields":
        axes = value.axes if value.kind == "image" else IMAGE[-len(after) :]
        positional = why_positional(tuple(before), axes)
        if value.kind != "image" and (positional or len(before) != len(after)):
            raise ConversionError("", positional or f"it expands {tuple(before)}")
        return plan.copy(node, replace(value, kind="image", axes=axes))
    place = value.axes.index("C")
    if len(before) != len(after) or before[place] != after[place] or before[0] != after[0]:
        raise ConversionError("", f"it expands {tuple(before)} to {tuple(after)}")
    return plan.emit(node, value, lambda e: e[read])
