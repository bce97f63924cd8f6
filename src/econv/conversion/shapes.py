"""Changes of shape: which axes a tensor has afterwards.

Group features keep their layout in the converted network, so that a permutation of axes becomes
nothing and a change of shape one of a few known ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from econv.conversion.plan import Emission, Plan, Value
from econv.conversion.trace import ConversionError, owner, value_of

__all__ = ["FLAT", "IMAGE", "VECTOR", "permute", "reshape"]

IMAGE = ("N", "C", "H", "W")
VECTOR = ("N", "C")
FLAT = (("N", "CHW"), ("N", "HWC"))


def reshape(plan: Plan, node: fx.Node) -> Value:
    """A change of shape, whatever it is called: what it does follows from the shapes."""
    read: Any = node.args[0]
    value = plan.value(read)
    before, after = tuple(value_of(read).shape), tuple(value_of(node).shape)
    if value.kind != "fields":
        return plan.copy(node, _of_image(value, before, after, node))
    found = _axes_after(value, before, after)
    if found is None:
        positions = value.has_pixels and "positions"
        raise ConversionError(
            owner(node) or node.name,
            f"it reshapes group features from {before} to {after}, which mixes "
            f"{positions or 'channels'} and other axes; attention over positions and shuffled "
            "channels have no equivariant counterpart here",
        )

    def step(e: Emission) -> fx.Node:
        if value.axes != VECTOR and found.axes == VECTOR:
            return e.method("flatten", e[read], 1)
        if value.axes == VECTOR and found.axes != VECTOR:
            return e.method("unsqueeze", e.method("unsqueeze", e[read], 2), 3)
        return e[read]

    return plan.emit(node, found, step)


def _axes_after(value: Value, before: tuple[int, ...], after: tuple[int, ...]) -> Value | None:
    axes = value.axes
    if before == after:
        return value
    if axes == VECTOR and after == (*before, 1, 1):
        return replace(value, axes=IMAGE)
    if axes == VECTOR and after == (before[0], 1, 1, before[1]):
        return replace(value, axes=("N", "H", "W", "C"))
    if set(axes) != set(IMAGE) or axes[0] != "N" or after[0] != before[0] or len(after) != 2:
        return None
    sizes = dict(zip(axes, before, strict=True))
    if sizes["H"] == sizes["W"] == 1:
        return replace(value, axes=VECTOR)
    merged = "".join(axes[1:])
    if ("N", merged) not in FLAT:
        return None
    return replace(value, axes=("N", merged), sides=(sizes["H"], sizes["W"]))


def _of_image(
    value: Value, before: tuple[int, ...], after: tuple[int, ...], node: fx.Node
) -> Value:
    """Images keep the source's shapes; only the axes are followed."""
    if value.kind != "image":
        return value
    if before == after:
        return value
    sizes = dict(zip(value.axes, before, strict=True))
    if sizes.get("H", 1) == sizes.get("W", 1) == 1:
        return Value("invariant", VECTOR if len(after) == 2 else IMAGE)
    if sizes.get("C") == 1 and len(after) == 3:  # the only channel is squeezed
        return Value("image", tuple(a for a in value.axes if a != "C"))
    if len(after) == 4 and value.axes == ("N", "H", "W") and after[1] == 1:
        return Value("image", IMAGE)
    raise ConversionError(
        owner(node) or node.name,
        f"it reshapes an image from {before} to {after}: pixels in a fixed order do not turn",
    )


def permute(plan: Plan, node: fx.Node, order: tuple[int, ...]) -> Value:
    """A permutation of axes."""
    read: Any = node.args[0]
    value = plan.value(read)
    if len(value.axes) != len(order):
        raise ConversionError(owner(node), f"it permutes the axes {value.axes}")
    axes = tuple(value.axes[i] for i in order)
    if value.kind != "fields":
        return plan.copy(node, replace(value, axes=axes))
    return plan.emit(node, replace(value, axes=axes), lambda e: e[read])
