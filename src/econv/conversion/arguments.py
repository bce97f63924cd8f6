"""The arguments of a call in the source, and steps that all rules take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from econv.conversion.plan import Plan, Value
from econv.conversion.trace import value_of

__all__ = ["argument", "is_channel_axis", "known", "module_step", "why_positional"]


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def known(argument: Any) -> Any:
    """An argument with the numbers of the traced pass in place of its nodes."""
    return fx.node.map_arg(argument, value_of) if argument is not None else None


def is_channel_axis(value: Value, axis: Any) -> bool:
    return bool(value.axes) and value.axes[known(axis)] == "C"


def why_positional(shape: tuple[int, ...], axes: tuple[str, ...]) -> str | None:
    """Why a tensor that does not turn cannot meet one with these axes, if it cannot."""
    aligned = zip(reversed(axes), reversed(shape), strict=False)
    if all(size == 1 for axis, size in aligned if axis not in ("N", "P", "C")):
        return None
    return (
        f"a parameter or constant of shape {shape} belongs to positions: a fixed positional "
        "embedding does not turn with the image"
    )


def module_step(plan: Plan, node: fx.Node, value: Value, make: Callable[[], nn.Module]) -> Value:
    read: Any = node.args[0]
    part = plan.insert(str(node.meta.get("owner", "")), node.name, make)
    return plan.emit(node, value, lambda e: e.module(part, e[read]))
