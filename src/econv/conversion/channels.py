"""Rows of channels: joined, divided, read by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from econv.conversion.arguments import argument, is_channel_axis, known, why_positional
from econv.conversion.modules import pool_step
from econv.conversion.plan import Emission, Plan, Step, Value
from econv.conversion.reductions import values_of_extrema
from econv.conversion.resizing import crop
from econv.conversion.shapes import IMAGE, PATHS, reshape
from econv.conversion.trace import ConversionError, owner, value_of
from econv.conversion.widths import Width, join, slice_runs
from econv.layers import CentredAvgPool2d

__all__ = ["concatenate", "getitem", "split", "stack"]


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
            known = value if value.axes else replace(value, axes=IMAGE[: value_of(part).ndim])
            found, readers[part] = plan.spread(part, known, owner(node) or node.name)
        if found.kind != "fields" or found.axes != whole.axes:
            raise ConversionError("", f"it concatenates tensors with axes {found.axes}")
        widths += found.widths

    def step(e: Emission) -> fx.Node:
        here = {part: reader(e) for part, reader in readers.items()}
        tensors = [here.get(part, e.found.get(part)) for part in parts]
        return e.function(torch.cat, tensors, 1)

    return plan.emit(node, replace(whole, widths=tuple(widths)), step)


def stack(plan: Plan, node: fx.Node) -> Value:
    """Maps of equally many fields, as paths."""
    parts: Any = argument(node, 0, "tensors")
    values = [plan.value(part) for part in parts]
    first = values[0]
    paths = known(argument(node, 1, "dim", 0)) in (1, -4)
    if not paths or any(value.kind != "fields" or value.axes != IMAGE for value in values):
        raise ConversionError(
            "", "it stacks tensors other than maps of features along a new axis 1"
        )
    for value in values[1:]:
        join(first.widths, value.widths)
    return plan.emit(
        node,
        replace(first, axes=PATHS),
        lambda e: e.function(torch.stack, [e[part] for part in parts], 1),
    )


def _check_positions(parts: Any, values: list[Value], whole: Value) -> None:
    for part, value in zip(parts, values, strict=True):
        if value.kind in ("invariant", "parameter"):
            positional = why_positional(tuple(value_of(part).shape), whole.axes)
            if positional:
                raise ConversionError("", positional)


def split(plan: Plan, node: fx.Node) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
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


def getitem(plan: Plan, node: fx.Node) -> Value:
    read: Any = node.args[0]
    index: Any = node.args[1]
    value = plan.value(read)
    if value.kind == "list":
        if value.axes == ("extrema",):
            return values_of_extrema(plan, node, value)
        item = value.items[known(index)]
        if item.kind == "image":
            return plan.copy(node, item)
        return plan.emit(node, item, _slice_fields(read, item))
    if value.kind == "invariant":
        return plan.copy(node, value)
    entries = index if isinstance(index, tuple) else (index,)
    if None in entries and all(entry in (None, slice(None)) for entry in entries):
        return reshape(plan, node)
    if Ellipsis in entries or len(entries) > len(value.axes):
        raise ConversionError("", f"it indexes group features by {index}")
    if any(not isinstance(entry, slice) for entry in entries):
        raise ConversionError("", f"it takes out single rows, columns or channels: {index}")
    full = slice(None)
    given = dict(zip(value.axes, (*entries, *[full] * len(value.axes)), strict=False))
    by_axis = {axis: known(entry) for axis, entry in given.items()}
    sizes = dict(zip(value.axes, value_of(read).shape, strict=True))
    if by_axis["N"] != full:
        raise ConversionError("", "it takes out images of the batch")
    rows, columns = (by_axis.get(axis, full) for axis in "HW")
    if (rows, columns) != (full, full):
        if by_axis["C"] != full or value.axes != IMAGE:
            raise ConversionError("", f"it indexes group features by {index}")
        from_first = rows.start in (None, 0) and rows.stop is None and rows == columns
        if from_first and rows.step is not None:
            stride = int(rows.step)
            return pool_step(plan, node, value, lambda: CentredAvgPool2d(1, stride))
        return crop(plan, node, value, given["H"], given["W"])
    start, stop, step = by_axis["C"].indices(sizes["C"])
    if value.kind == "image":
        return plan.copy(node, value)
    if step != 1:
        raise ConversionError("", f"it takes every {step}th channel")
    before, within = slice_runs(value.widths, start, stop)
    item = replace(value, widths=tuple(within), start=tuple(before))
    return plan.emit(node, replace(item, start=()), _slice_fields(read, item))


def _slice_fields(read: fx.Node, item: Value) -> Step:
    def step(e: Emission) -> fx.Node:
        order = e.plan.group.order
        start = e.sizes.fields(item.start) * order
        return e.method("narrow", e[read], 1, start, e.sizes.fields(item.widths) * order)

    return step
