"""Changes of shape: which axes a tensor has afterwards.

Group features keep their layout in the converted network, so that a permutation of axes becomes
nothing and a change of shape one of a few known ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from econv.conversion.arguments import known
from econv.conversion.plan import (
    POSITIONS,
    VECTOR,
    Emission,
    Plan,
    Step,
    Value,
    in_source_order,
)
from econv.conversion.registry import rule
from econv.conversion.steps import one_pixel
from econv.conversion.trace import ConversionError, owner, value_of
from econv.conversion.widths import divide


def _shuffled(plan: Plan) -> tuple[str, ...]:
    """The axes of paths whose channels are to alternate."""
    return ("N", "C", "P", *plan.pixels)


@rule(
    *(nn.Flatten, "flatten", "reshape", "view", "squeeze", "unsqueeze", "reshape_as", "view_as"),
    "unflatten",
)
def reshape(plan: Plan, node: fx.Node) -> Value:
    """A change of shape, whatever it is called: what it does follows from the shapes."""
    read, value = plan.first(node)
    before, after = tuple(value_of(read).shape), tuple(value_of(node).shape)
    if value.kind != "fields":
        return plan.copy(node, _of_image(plan, value, before, after, node))
    found = _axes_after(plan, value, before, after)
    if found is None and _is_of_bags(value, before, after):
        channels = plan.as_channels(read, value, owner(node) or node.name)
        readers: dict[fx.Node, Step] = {
            read: lambda e: in_source_order(e, channels(e, e[read]), value)
        }
        return plan.emit(node, Value("invariant"), lambda e: e.copy(node, readers))
    if found is None and value.channels == 1:  # without its axis, the only channel is an image
        image, reader = plan.as_image(read, value, owner(node) or node.name)
        return plan.emit(
            node,
            _of_image(plan, image, before, after, node),
            lambda e: e.copy(node, {read: reader}),
        )
    if found is None:
        positions = value.has_pixels and "positions"
        raise ConversionError(
            owner(node) or node.name,
            f"it reshapes group features from {before} to {after}, which mixes "
            f"{positions or 'channels'} and other axes; attention between positions has no "
            "equivariant counterpart here",
        )

    image_axes, paths = plan.image, plan.paths
    alternate = value.axes == _shuffled(plan) and found.axes == image_axes
    if alternate:
        plan.notes.append(
            f"{owner(node) or node.name}: shuffled channels keep the source's weights only with a "
            "field for each"
        )

    def step(e: Emission) -> fx.Node:
        if alternate:
            fields = e.method("unflatten", e[read], 2, (-1, e.plan.group.order))
            return e.method("flatten", e.method("transpose", fields, 1, 2), 1, 3)
        if found.layout == paths != value.layout:
            return e.method("unflatten", e[read], 1, (after[1], -1))
        if value.layout == paths != found.layout:
            return e.method("flatten", e[read], 1, 2)
        if value.layout == image_axes and found.layout == VECTOR:
            return e.method("flatten", e[read], 1)
        if value.layout == VECTOR and found.layout == image_axes:
            return one_pixel(e, e[read])
        return e[read]

    return plan.emit(node, found, step)


def _is_of_bags(value: Value, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a batch of instances, each without positions, becomes one of bags."""
    of_instances = math.prod(before[1:]) == value.channels == math.prod(after[2:])
    return value.axes[0] == "N" and of_instances and after[0] * after[1] == before[0] > after[0]


def _axes_after(
    plan: Plan, value: Value, before: tuple[int, ...], after: tuple[int, ...]
) -> Value | None:
    axes = value.axes
    if before == after:
        return value
    if axes == plan.image and len(after) == len(plan.paths):
        return _divided(plan, value, before, after)
    if axes == plan.paths and after == (before[0], before[1] * before[2], *before[3:]):
        return replace(value, axes=plan.image, widths=value.widths * before[1])
    if axes == _shuffled(plan) and after == (before[0], before[1] * before[2], *before[3:]):
        return replace(value, axes=plan.image, widths=value.widths * before[2])
    sizes = dict(_atoms(value, before))
    if set(sizes) <= set(plan.image) and all(sizes.get(axis, 1) == 1 for axis in plan.pixels):
        return _of_one_pixel(plan, value, after)
    found = _regrouped(value, before, after)
    if found is None or found.axes[0] != "N":
        return None
    row = all(axis in ("N", "C", "1") or set(axis) <= set(POSITIONS) for axis in found.axes)
    return found if (row and "C" in found.axes) or found.axes in plan.flat else None


def _atoms(value: Value, sizes: tuple[int, ...]) -> list[tuple[str, int]]:
    """The axes of a tensor one by one, with those in it that a change of shape made one."""
    sides = dict(zip(POSITIONS[-len(value.sides) :], value.sides, strict=True))
    found = []
    for axis, size in zip(value.axes, sizes, strict=True):
        if len(axis) == 1:
            found += [(axis, size)] if axis != "1" else []
            continue
        pixels = math.prod(sides[letter] for letter in axis if letter in sides)
        found += [(letter, sides.get(letter, size // pixels)) for letter in axis]
    return found


def _regrouped(
    value: Value, before: tuple[int, ...], after: tuple[int, ...], drop: bool = False
) -> Value | None:
    """The axes after neighbours became one, or one became several that it was made of.

    Axes of length one come and go; those with a name only if they may ``drop`` out.
    """
    atoms = _atoms(value, before)
    rest, axes = list(atoms), []
    for size in after:
        axis, product = "", 1
        while drop and size > 1 and rest and rest[0][1] == 1:
            rest = rest[1:]
        while rest and (product < size or (product == size == 1 and not axis)):
            letter, number = rest[0]
            if product * number > size:
                break
            axis, product, rest = axis + letter, product * number, rest[1:]
        if product != size:
            return None
        axes.append(axis or "1")
    if any(size > 1 or not drop for _, size in rest):
        return None
    sizes = dict(atoms)
    letters = POSITIONS if "D" in sizes else POSITIONS[-len(value.sides) :]
    return replace(value, axes=tuple(axes), sides=tuple(sizes.get(x, 1) for x in letters))


def _of_one_pixel(plan: Plan, value: Value, after: tuple[int, ...]) -> Value | None:
    """Features without positions, under axes of length one that come and go."""
    number = value.channels
    maps = (plan.image, ("N", *plan.pixels, "C"))
    for axes in (VECTOR, ("N", "1", "C"), ("N", "C", "1"), *maps):
        sizes = tuple(number if axis == "C" else 1 for axis in axes[1:])
        if after[1:] == sizes:
            return replace(value, axes=axes)
    return None


def _divided(
    plan: Plan, value: Value, before: tuple[int, ...], after: tuple[int, ...]
) -> Value | None:
    """Channels as stacked paths of equally many."""
    paths, channels = after[1:3]
    if after != (before[0], paths, channels, *before[2:]) or paths * channels != before[1]:
        return None
    return replace(value, axes=plan.paths, widths=divide(value.widths, paths))


def _of_image(
    plan: Plan, value: Value, before: tuple[int, ...], after: tuple[int, ...], node: fx.Node
) -> Value:
    """Images keep the source's shapes; only the axes are followed."""
    if value.kind != "image" or before == after:
        return value
    sizes = dict(_atoms(value, before))
    if all(sizes.get(axis, 1) == 1 for axis in plan.pixels):
        return Value("invariant", VECTOR if len(after) == 2 else plan.image)
    divided = after == (before[0], *after[1:3], *before[2:])
    if value.axes == plan.image and len(after) == len(plan.paths) and divided:
        return Value("image", plan.paths)  # channels as anchors and their numbers
    found = _regrouped(value, before, after, drop=True)
    known = ("N", "I", "NI", "P", "C", "1")
    if found is not None and all(a in known or set(a) <= set(POSITIONS) for a in found.axes):
        if found.axes[0] in ("NI", "I"):  # the instances of all bags are a batch
            return replace(found, axes=("N", *found.axes[1:]))
        return found
    if len(after) == len(plan.image) and value.axes == ("N", *plan.pixels) and after[1] == 1:
        return Value("image", plan.image)
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


@rule(nn.PixelShuffle, nn.PixelUnshuffle, "pixel_shuffle", "pixel_unshuffle")
def sub_pixels(plan: Plan, node: fx.Node) -> Value:
    """Nothing right after a convolution, which then gives the finer map."""
    read, value = plan.first(node)
    if read in plan.finer:
        return plan.emit(node, value, lambda e: e[read])
    raise ConversionError(
        "",
        "it lays channels out as pixels in a frame that does not turn; right after a convolution "
        f"with stride 1 PixelShuffle is converted, and so are ConvTranspose{plan.dimension}d and "
        "Upsample",
    )
