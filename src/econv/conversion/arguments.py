"""The arguments of a call in the source, and what they must be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import fx

from econv.conversion.plan import Plan, Value
from econv.conversion.trace import ConversionError, name_of, owner, value_of

__all__ = [
    "argument",
    "check_map",
    "equal",
    "is_channel_axis",
    "known",
    "known_arguments",
    "no_rule",
    "reads_extrema",
    "why_positional",
]


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def known(argument: Any) -> Any:
    """An argument with the numbers of the traced pass in place of its nodes."""
    return fx.node.map_arg(argument, value_of) if argument is not None else None


def known_arguments(plan: Plan, node: fx.Node, **defaults: Any) -> Any:
    """The module that a node calls, or the arguments of its function as such a module has them."""
    if node.op == "call_module":
        return plan.module(node)
    names = enumerate(defaults.items(), start=1)
    return SimpleNamespace(**{n: known(argument(node, place, n, d)) for place, (n, d) in names})


def equal(pair: Any, what: str) -> Any:
    """The number that all axes of positions share."""
    each = tuple(pair) if isinstance(pair, tuple | list) else (pair,)
    if len(set(each)) != 1:
        raise ConversionError("", f"{what}: a quarter turn would exchange {each}")
    return each[0]


def check_map(plan: Plan, value: Value, *other: tuple[str, ...]) -> None:
    """Refuse axes other than those of a map, or these."""
    if value.axes not in (plan.image, *other):
        raise ConversionError("", f"it reads a tensor with axes {value.axes}")


def is_channel_axis(value: Value, axis: Any) -> bool:
    return bool(value.axes) and value.axes[known(axis)] == "C"


def reads_extrema(node: fx.Node) -> bool:
    """Whether a node takes the numbers, not the places, from what `max` along an axis returns."""
    return name_of(node) in ("getitem", "getattr") and known(node.args[1]) in (0, "values")


def why_positional(shape: tuple[int, ...], axes: tuple[str, ...]) -> str | None:
    """Why a tensor that does not turn cannot meet one with these axes, if it cannot."""
    aligned = zip(reversed(axes), reversed(shape), strict=False)
    if all(size == 1 for axis, size in aligned if axis not in ("N", "P", "C")):
        return None
    return (
        f"a parameter or constant of shape {shape} belongs to positions: a fixed positional "
        "embedding does not turn with the image"
    )


def no_rule(plan: Plan, node: fx.Node, why: str = "") -> ConversionError:
    """The error about a function that has no rule."""
    inside = type(plan.trace.modules.get(owner(node))).__name__
    return ConversionError(
        "", f"there is no rule for the function {name_of(node)} of {inside}{why}"
    )
