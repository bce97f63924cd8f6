"""Items of lists, rows of channels and parts of images."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from econv.conversion.arguments import known, no_rule, reads_extrema
from econv.conversion.plan import OTHER, Emission, Plan, Step, Value
from econv.conversion.registry import rule, rule_for
from econv.conversion.steps import about_centre, map_step
from econv.conversion.trace import ConversionError, value_of
from econv.conversion.widths import slice_runs


@rule("getitem", many=True)
def getitem(plan: Plan, node: fx.Node) -> Value:
    read, value = plan.first(node)
    index: Any = node.args[1]
    if value.kind == "list":
        if value.axes == ("extrema",):
            return _values_of_extrema(plan, node, value)
        item = value.items[known(index)]
        if item.kind == "image":
            return plan.copy(node, item)
        return plan.emit(node, item, _slice_fields(read, item))
    if value.kind == "invariant":
        return plan.copy(node, value)
    entries = index if isinstance(index, tuple) else (index,)
    if None in entries and all(entry in (None, slice(None)) for entry in entries):
        return rule_for("unsqueeze")(plan, node)
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
    rows, *others = (by_axis.get(axis, full) for axis in plan.pixels)
    if any(taken != full for taken in (rows, *others)):
        if by_axis["C"] != full or value.axes != plan.image:
            raise ConversionError("", f"it indexes group features by {index}")
        alike = all(taken == rows for taken in others)
        if alike and rows.start in (None, 0) and rows.stop is None and rows.step is not None:
            stride = int(rows.step)
            return map_step(plan, node, lambda: plan.layer("CentredAvgPool")(1, stride))
        return _crop(plan, node, value, [given[axis] for axis in plan.pixels])
    start, stop, step = by_axis["C"].indices(sizes["C"])
    if value.kind == "image":
        return plan.copy(node, value)
    if step != 1:
        raise ConversionError("", f"it takes every {step}th channel")
    before, within = slice_runs(value.widths, start, stop)
    item = replace(value, widths=tuple(within), start=tuple(before))
    return plan.emit(node, replace(item, start=()), _slice_fields(read, item))


@rule("getattr", many=True)
def attribute(plan: Plan, node: fx.Node) -> Value:
    """The ``values`` of what `max` along an axis returns."""
    value = plan.value(node.args[0])
    if value.axes != ("extrema",):
        raise no_rule(plan, node)
    return _values_of_extrema(plan, node, value)


def _values_of_extrema(plan: Plan, node: fx.Node, value: Value) -> Value:
    if not reads_extrema(node):  # and nothing reads it
        return plan.emit(node, OTHER, lambda e: None)
    read = plan.first(node)[0]
    return plan.emit(node, value.items[0], lambda e: e[read])


def _slice_fields(read: fx.Node, item: Value) -> Step:
    def step(e: Emission) -> fx.Node:
        order = e.plan.group.order
        start = e.sizes.fields(item.start) * order
        return e.method("narrow", e[read], 1, start, e.sizes.fields(item.widths) * order)

    return step


def _crop(plan: Plan, node: fx.Node, value: Value, taken: list[slice]) -> Value:
    """A part of a map about its centre; the slices of each axis are the source's, with nodes."""
    read: Any = node.args[0]
    shape = value_of(read).shape[2:]
    for given, size in zip(taken, shape, strict=True):
        start, stop, step = fx.node.map_arg(given, value_of).indices(size)
        if step != 1 or abs(start - (size - stop)) > 1:
            raise ConversionError("", f"it crops an image to one side: {node.args[1]}")
    fixed = not any(
        isinstance(edge, fx.Node) for given in taken for edge in (given.start, given.stop)
    )
    if fixed and len({(given.start, given.stop) for given in taken}) > 1:
        raise ConversionError("", f"it takes rows and columns differently: {node.args[1]}")
    if fixed and _same_at_both_ends(taken[0]):
        return plan.copy(node, value)

    def sizes(e: Emission) -> list[Any]:
        return [_length(e, e[read], axis, e.args(g)) for axis, g in enumerate(taken, 2)]

    return about_centre(plan, node, value, sizes)


def _same_at_both_ends(given: slice) -> bool:
    start, stop = given.start or 0, given.stop
    return (start == 0 and stop is None) or (isinstance(stop, int) and stop < 0 and start == -stop)


def _length(e: Emission, x: fx.Node, axis: int, given: slice) -> Any:
    """How many pixels a slice takes."""
    start, stop = given.start, given.stop
    size = e.method("size", x, axis)
    if stop is None:
        stop = size
    elif isinstance(stop, int) and stop < 0:
        stop = e.function(operator.add, size, stop)
    if isinstance(start, int) and start < 0:
        start = e.function(operator.add, size, start)
    return stop if start in (None, 0) else e.function(operator.sub, stop, start)
