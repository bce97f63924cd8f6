"""Sums, means and extrema over axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from econv.conversion.arguments import argument, is_channel_axis, known, reads_extrema
from econv.conversion.plan import Emission, Plan, Value, in_source_order
from econv.conversion.registry import rule, rule_for
from econv.conversion.trace import ConversionError, name_of, value_of


@rule("mean", "sum", "amax", "amin", "std", "var", "norm", "logsumexp", "vector_norm")
def reduce(plan: Plan, node: fx.Node) -> Value:
    name = name_of(node)
    read, value = plan.first(node)
    dims, keep, options = _reduction(node, name)
    if dims is None:
        dims = tuple(range(len(value.axes)))
    chosen = (dims,) if isinstance(dims, int) else tuple(dims)
    gone = {value.axes[d] for d in chosen}
    letters = set("".join(gone))
    if letters & set(plan.pixels) not in (set(), value.pixels):
        raise ConversionError("", f"{name} takes rows and columns apart")
    axes = value.axes if keep else _without(value.axes, gone)
    sides = (1,) * plan.dimension if keep and "H" in letters else value.sides
    if value.kind == "image" and isinstance(value_of(node), Tensor):
        pixels = "H" in "".join(axes) and not (keep and "H" in letters)
        return plan.copy(node, Value("image" if pixels else "invariant", axes, sides=sides))
    if "N" in gone:
        raise ConversionError("", f"{name} over the batch")
    if "1" in gone or ("P" in gone and keep):
        raise ConversionError("", f"{name} of group features with axes {value.axes}")
    new_dims = sorted(place for axis in gone for place in value.places(axis))
    order = value.layout

    def step(e: Emission) -> fx.Node:
        target: Any = node.target
        wanted = {**options, "dim": new_dims, "keepdim": keep}
        if name in ("max", "min"):
            found = e.function(getattr(torch, f"a{name}"), e[read], **wanted)
        elif node.op == "call_method":
            found = e.graph.call_method(target, (e[read],), wanted)
        else:
            found = e.graph.call_function(target, (e[read],), wanted)
        if "C" in gone and keep and value.axes != order:
            return in_source_order(e, found, value)
        return found

    if "C" not in letters:
        return plan.emit(node, replace(value, axes=axes, sides=sides), step)
    kind = "image" if "H" in "".join(axes) and "H" not in letters else "invariant"
    return plan.emit(node, Value(kind, axes, sides=sides), step)


_NAMES_OF_REDUCTIONS = {
    "norm": ("p", "dim", "keepdim"),
    "vector_norm": ("ord", "dim", "keepdim"),
    "std": ("dim", "unbiased", "keepdim"),
    "var": ("dim", "unbiased", "keepdim"),
}


def _reduction(node: fx.Node, name: str) -> tuple[Any, bool, dict[str, Any]]:
    """The axes of a reduction, whether they stay, and its other arguments by name."""
    given = [known(argument) for argument in node.args[1:]]
    names: tuple[str, ...] = _NAMES_OF_REDUCTIONS.get(name, ("dim", "keepdim"))
    if name in ("std", "var") and given and isinstance(given[0], bool):
        names = names[1:]
    options = dict(zip(names, given, strict=False))
    same = {"axis": "dim", "keepdims": "keepdim"}
    options |= {same.get(key, key): known(found) for key, found in node.kwargs.items()}
    unbiased = options.pop("unbiased", None)
    if unbiased is not None:
        options["correction"] = int(unbiased)
    return options.pop("dim", None), bool(options.pop("keepdim", False)), options


@rule("max", "min")
def extremum(plan: Plan, node: fx.Node) -> Value:
    """`max` and `min`: of two tensors, or along an axis, with the places beside the numbers."""
    if len([r for r in node.all_input_nodes if isinstance(value_of(r), Tensor)]) > 1:
        return rule_for("maximum")(plan, node)
    if isinstance(value_of(node), Tensor):
        return reduce(plan, node)
    if any(user.users and not reads_extrema(user) for user in node.users):
        raise ConversionError("", "it reads the places of extrema, which a rotation exchanges")
    found = reduce(plan, node)
    return Value("list", ("extrema",), items=(found,))


@rule("argmax", "argmin")
def place_of_extremum(plan: Plan, node: fx.Node) -> Value:
    """`argmax` of the classes of a map that has been read out."""
    value = plan.value(node.args[0])
    axis = known(argument(node, 1, "dim"))
    if value.kind != "image" or axis is None or not is_channel_axis(value, axis):
        raise ConversionError("", "it takes the place of an extremum that a rotation moves")
    keep = bool(known(argument(node, 2, "keepdim", False)))
    return plan.copy(node, value if keep else Value("image", _without(value.axes, {"C"})))


def _without(axes: tuple[str, ...], gone: set[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in gone)
