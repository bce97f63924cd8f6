"""Modules without parameters in place of operations: steps that several rules take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx, nn

from econv.conversion.arguments import check_map
from econv.conversion.plan import POSITIONS, Emission, Plan, PlannedModule, Step, Value, describe
from econv.conversion.trace import ConversionError, owner, value_of
from econv.conversion.widths import Width
from econv.conversion.windows import Windows
from econv.layers import GroupWindows2d

__all__ = [
    "about_centre",
    "as_map",
    "in_frames",
    "in_its_place",
    "map_step",
    "module_step",
    "one_pixel",
    "smooth_step",
]


def in_its_place(plan: Plan, node: fx.Node, make: Callable[[], nn.Module]) -> str:
    """Add a module, under the name of the source's if it has one."""
    if node.op != "call_module":
        return plan.insert(owner(node), node.name, make)
    name = str(node.target)
    if name not in plan.parts:
        part = PlannedModule(name, lambda sizes, where: make(), plan.module(node))
        plan.add_part(part, describe(make()))
    return name


def module_step(plan: Plan, node: fx.Node, value: Value, make: Callable[[], nn.Module]) -> Value:
    """A module in place of an operation on one tensor."""
    read: Any = node.args[0]
    name = in_its_place(plan, node, make)
    return plan.emit(node, value, lambda e: e.module(name, e[read]))


def map_step(
    plan: Plan,
    node: fx.Node,
    make: Callable[[], nn.Module],
    named: Callable[[str], object] = str,
) -> Value:
    """A module in place of an operation on one map; the report names a function.

    ``named`` is told the name of the module.
    """
    read, value = plan.first(node)
    check_map(plan, value)
    if node.op == "call_module":
        named(str(node.target))
        return module_step(plan, node, value, make)
    name = plan.new_name(f"{owner(node)}.{node.name}" if owner(node) else node.name)
    part = PlannedModule(name, lambda sizes, where: make())
    plan.add_part(part, describe(make()), source=str(node.target).split(" at ")[0])
    named(name)
    return plan.emit(node, value, lambda e: e.module(name, e[read]))


def smooth_step(
    plan: Plan, node: fx.Node, make: Callable[[], nn.Module], plain: Callable[[], nn.Module]
) -> Value:
    """A module that keeps the frequencies the grid holds, where otherwise ``plain`` would be."""

    def named(name: str) -> None:
        plan.smoothed[name] = plain

    return map_step(plan, node, make, named)


def as_map(
    read: fx.Node, value: Value, beside: fx.Node, whole: Value, reader: Step | None = None
) -> Step:
    """An image of one channel as ``[N, 1, H, W]``, to meet the map ``beside`` it.

    In the source its rows and columns may be one axis. ``reader`` writes it, if not as it is.
    """
    gone = [place for place, axis in enumerate(value.axes) if axis in ("1", "C")]
    axes = [axis for axis in value.axes if axis not in ("1", "C")]
    letters = [letter for axis in axes for letter in axis]
    wanted = [axis for axis in whole.layout if axis == "N" or axis in POSITIONS]
    if sorted(letters) != sorted(wanted) or "H" not in wanted:
        raise ConversionError("", f"it joins tensors with axes {value.axes} and {whole.axes}")

    def step(e: Emission) -> fx.Node:
        x = e[read] if reader is None else reader(e)
        for place in reversed(gone):
            x = e.method("squeeze", x, place)
        for place, axis in enumerate(axes):
            if len(axis) > 1:
                sides = [e.method("size", e[beside], whole.place(letter)) for letter in axis]
                x = e.method("unflatten", x, place, sides)
        x = e.method("permute", x, *(letters.index(letter) for letter in wanted))
        return e.method("unsqueeze", x, 1)

    return step


def in_frames(
    plan: Plan,
    node: fx.Node,
    windows: Windows,
    beside: str,
    *,
    reach: tuple[int, int] = (0, 0),
    fill: float = 0.0,
    ceil_mode: bool = False,
) -> tuple[str, Value]:
    """Add what lets every orientation read the windows of the source in its own frame.

    Returns:
        The name of the module, and what it gives: group features, of images too.
    """
    read, value = plan.first(node)
    lifts = value.kind == "image"
    widths = value.widths
    if lifts:
        widths = (Width(int(value_of(read).shape[1]), beside),)
        widths[0].fix(widths[0].channels)
    name = plan.insert(
        beside,
        "windows",
        lambda: GroupWindows2d(
            plan.group,
            windows.extent,
            windows.stride,
            windows.sides,
            reach,
            fill,
            ceil_mode,
            lifts,
        ),
    )
    return name, replace(value, kind="fields", widths=widths)


def one_pixel(e: Emission, x: fx.Node) -> fx.Node:
    """Features without positions as a map of one pixel."""
    for place in range(e.plan.dimension):
        x = e.method("unsqueeze", x, 2 + place)
    return x


def about_centre(
    plan: Plan,
    node: fx.Node,
    value: Value,
    sizes: Callable[[Emission], list[Any]],
    fill: float = 0.0,
) -> Value:
    """Pad or crop a map to these sizes, about its centre."""
    read: Any = node.args[0]
    name = in_its_place(plan, node, lambda: plan.layer("Recentre")(fill))
    return plan.emit(node, value, lambda e: e.module(name, e[read], *sizes(e)))
