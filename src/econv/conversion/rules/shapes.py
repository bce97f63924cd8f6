"""Changes of shape: which axes a tensor has afterwards.

Group features keep their layout in the converted network, so that a permutation of axes becomes
nothing and a change of shape one of a few known ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from econv.conversion.arguments import known
from econv.conversion.plan import FLAT, IMAGE, PATHS, VECTOR, Emission, Plan, Value
from econv.conversion.registry import rule
from econv.conversion.trace import ConversionError, owner, value_of
from econv.conversion.widths import divide


@rule(
    *(nn.Flatten, "flatten", "reshape", "view", "squeeze", "unsqueeze", "reshape_as", "view_as"),
)
def reshape(plan: Plan, node: fx.Node) -> Value:
    """A change of shape, whatever it is called: what it does follows from the shapes."""
    read, value = plan.first(node)
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
        if found.layout == PATHS != value.layout:
            return e.method("unflatten", e[read], 1, (after[1], -1))
        if value.layout == PATHS != found.layout:
            return e.method("flatten", e[read], 1, 2)
        if value.layout == IMAGE and found.layout == VECTOR:
            return e.method("flatten", e[read], 1)
        if value.layout == VECTOR and found.layout == IMAGE:
            return e.method("unsqueeze", e.method("unsqueeze", e[read], 2), 3)
        return e[read]

    return plan.emit(node, found, step)


def _axes_after(value: Value, before: tuple[int, ...], after: tuple[int, ...]) -> Value | None:
    axes = value.axes
    if before == after:
        return value
    if axes == IMAGE and len(after) == 5:
        return _divided(value, before, after)
    if axes == PATHS and after == (before[0], before[1] * before[2], *before[3:]):
        return replace(value, axes=IMAGE, widths=value.widths * before[1])
    sizes = dict(zip(axes, before, strict=True))
    if set(axes) <= {*IMAGE, "1"} and sizes.get("H", 1) == sizes.get("W", 1) == 1:
        return _of_one_pixel(value, after)
    if set(axes) != set(IMAGE) or axes[0] != "N" or after[0] != before[0] or len(after) != 2:
        return None
    merged = "".join(axes[1:])
    if ("N", merged) not in FLAT:
        return None
    return replace(value, axes=("N", merged), sides=(sizes["H"], sizes["W"]))


def _of_one_pixel(value: Value, after: tuple[int, ...]) -> Value | None:
    """Features without positions, under axes of length one that come and go."""
    number = value.channels
    for axes in (VECTOR, ("N", "1", "C"), ("N", "C", "1"), IMAGE, ("N", "H", "W", "C")):
        sizes = tuple(number if axis == "C" else 1 for axis in axes[1:])
        if after[1:] == sizes:
            return replace(value, axes=axes)
    return None


def _divided(value: Value, before: tuple[int, ...], after: tuple[int, ...]) -> Value | None:
    """Channels as stacked paths of equally many."""
    paths, channels = after[1:3]
    if after != (before[0], paths, channels, *before[2:]) or paths * channels != before[1]:
        return None
    return replace(value, axes=PATHS, widths=divide(value.widths, paths))


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
    if (
        value.axes == IMAGE
        and len(after) == 5
        and (before[0], *before[2:])
        == (
            after[0],
            *after[3:],
        )
    ):
        return Value("image", PATHS)
    if len(after) == 4 and value.axes == ("N", "H", "W") and after[1] == 1:
        return Value("image", IMAGE)
    raise ConversionError(
        owner(node) or node.name,
        f"it reshapes an image from {before} to {after}: pixels in a fixed order do not turn",
    )


@rule("permute", "transpose", "swapaxes", "movedim")
def permute(plan: Plan, node: fx.Node) -> Value:
    """A permutation of axes."""
    order = _order(node)
    read, value = plan.first(node)
    if len(value.axes) != len(order):
        raise ConversionError(owner(node), f"it permutes the axes {value.axes}")
    axes = tuple(value.axes[i] for i in order)
    if value.kind != "fields":
        return plan.copy(node, replace(value, axes=axes))
    return plan.emit(node, replace(value, axes=axes), lambda e: e[read])


def _order(node: fx.Node) -> tuple[int, ...]:
    """The permutation of a permuting function, read off a tensor of small sizes."""
    rank = value_of(node.args[0]).ndim  # type: ignore[arg-type]
    probe = torch.empty(tuple(range(1, rank + 1)))
    args, kwargs = known(node.args[1:]), known(node.kwargs)
    target: Any = node.target
    moved = (
        getattr(probe, target)(*args, **kwargs)
        if node.op == "call_method"
        else target(probe, *args, **kwargs)
    )
    return tuple(size - 1 for size in moved.shape)


@rule(nn.PixelShuffle, nn.PixelUnshuffle)
def sub_pixels(plan: Plan, node: fx.Node) -> Value:
    raise ConversionError("", "it lays channels out as pixels in a frame that does not turn")
