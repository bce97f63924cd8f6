"""Padding, resizing and pooling to a size: symmetric about the centre on every size."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import fx, nn
from torch.nn import functional

from econv.conversion.arguments import argument, check_map, equal
from econv.conversion.plan import Emission, Plan, Value
from econv.conversion.registry import rule
from econv.conversion.steps import about_centre, in_its_place
from econv.conversion.trace import ConversionError, owner, value_of
from econv.conversion.widths import Width


@rule(
    *(nn.AdaptiveAvgPool2d, "adaptive_avg_pool2d", nn.AdaptiveMaxPool2d, "adaptive_max_pool2d"),
    *(nn.AdaptiveAvgPool3d, "adaptive_avg_pool3d", nn.AdaptiveMaxPool3d, "adaptive_max_pool3d"),
)
def pool_to_size(plan: Plan, node: fx.Node) -> Value:
    """Pooling to a size, which must be the same along all sides."""
    value = plan.value(node.args[0])
    check_map(plan, value)
    is_module = node.op == "call_module"
    size = plan.module(node).output_size if is_module else argument(node, 1, "output_size")
    _check_size(node, size, "its output sizes are unequal")
    return plan.copy(node, value)


def _check_size(node: fx.Node, size: Any, what: str) -> None:
    """Sizes that are numbers must be equal; sizes read off a map turn with it."""
    each = tuple(size) if isinstance(size, tuple | list) else (size,)
    follow = [isinstance(n, fx.Node) for n in each]
    if not any(follow):
        equal(size, what)
    elif not all(follow):
        raise ConversionError("", f"{what}: only some of them follow the image")
    read: Any = node.args[0]
    old, new = value_of(read).shape[2:], tuple(value_of(node).shape[2:])
    if len(set(old)) == 1 != len(set(new)):
        raise ConversionError("", f"{what}: a quarter turn would exchange {new}")


@dataclass(frozen=True)
class _Resizing:
    """The arguments of an interpolation."""

    size: Any = None
    factor: Any = None
    mode: str = "nearest"
    align_corners: bool | None = None
    antialias: bool = False


@rule(nn.Upsample)
def upsample(plan: Plan, node: fx.Node) -> Value:
    module = plan.module(node)
    given = _Resizing(module.size, module.scale_factor, module.mode, module.align_corners)
    return _resize(plan, node, given)


@rule("interpolate", "upsample")
def interpolate(plan: Plan, node: fx.Node) -> Value:
    given = _Resizing(
        argument(node, 1, "size"),
        argument(node, 2, "scale_factor"),
        str(argument(node, 3, "mode", "nearest")),
        argument(node, 4, "align_corners"),
        bool(argument(node, 6, "antialias", False)),
    )
    return _resize(plan, node, given)


def _resize(plan: Plan, node: fx.Node, given: _Resizing) -> Value:
    """An interpolation that commutes with quarter turns on every size.

    A whole factor does so as it is. Any other leaves a rest that torch puts to one side: there the
    size is computed and given instead.
    """
    read, value = plan.first(node)
    check_map(plan, value)
    factor: Any = None
    if given.size is not None:
        _check_size(node, given.size, "its sizes are unequal")
    else:
        factor = equal(fx.node.map_arg(given.factor, value_of), "its factors are unequal")
        if float(factor).is_integer():
            return plan.copy(node, value)
    nearest = given.mode.startswith("nearest")
    if given.size is not None and not nearest:
        return plan.copy(node, value)
    if nearest:
        plan.notes.append(
            f"{owner(node) or node.name}: where two pixels are equally near, it takes their mean"
        )
        name = in_its_place(plan, node, plan.layer("NearestResize"))
    ratio = None if factor is None else Fraction(float(factor)).limit_denominator(1000)

    def step(e: Emission) -> fx.Node:
        x = e[read]
        if ratio is not None:
            scaled = [
                e.function(operator.mul, e.method("size", x, axis), ratio.numerator)
                for axis in range(2, 2 + plan.dimension)
            ]
            sides = [e.function(operator.floordiv, n, ratio.denominator) for n in scaled]
        else:
            sides = _sides(e, given.size)
        if nearest:
            return e.module(name, x, *sides)
        options: dict[str, Any] = {"mode": given.mode}
        if given.align_corners is not None:
            options["align_corners"] = given.align_corners
        if given.antialias:
            options["antialias"] = True
        return e.function(functional.interpolate, x, sides, **options)

    return plan.emit(node, value, step)


def _sides(e: Emission, size: Any) -> list[Any]:
    """Each side, of a size given as one number, several, or a shape."""
    number = e.plan.dimension
    if isinstance(size, fx.Node) and not isinstance(value_of(size), int):
        return [e.function(operator.getitem, e[size], i) for i in range(number)]
    each = size if isinstance(size, tuple | list) else (size,)
    return list(e.args(tuple(each) if len(each) == number else (each[0],) * number))


@rule(
    *(nn.ConstantPad2d, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d),
    *(nn.ConstantPad3d, nn.ZeroPad3d, nn.ReflectionPad3d, nn.ReplicationPad3d, nn.CircularPad3d),
)
def pad_module(plan: Plan, node: fx.Node) -> Value:
    module = plan.module(node)
    constant = isinstance(module, nn.modules.padding._ConstantPadNd)
    mode = "constant" if constant else type(module).__name__
    return _pad(plan, node, list(module.padding), mode, getattr(module, "value", 0.0))


@rule("pad")
def pad(plan: Plan, node: fx.Node) -> Value:
    mode, fill = argument(node, 2, "mode", "constant"), argument(node, 3, "value", 0.0)
    return _pad(plan, node, argument(node, 1, "pad"), str(mode), fill)


def _pad(plan: Plan, node: fx.Node, amounts: Any, mode: str, fill: Any) -> Value:
    """Padding of pixels, about the centre, or of channels."""
    read, value = plan.first(node)
    check_map(plan, value)
    number = 2 * plan.dimension
    known = [int(n) for n in fx.node.map_arg(amounts, value_of)]
    sides = [*known[:number], *[0] * (number - len(known[:number]))]
    follows_size = bool(set(node.all_input_nodes) - {read})  # and so turns with the image
    pairs = list(zip(sides[::2], sides[1::2], strict=True))  # the last axis first
    uneven = max(abs(before - after) for before, after in pairs) > 1
    if uneven or (len(set(map(sum, pairs))) > 1 and not follows_size):
        raise ConversionError("", f"it pads the sides of an image differently: {sides}")
    same = not follows_size and all(before == after for before, after in pairs)
    if len(known) == number and same:
        return plan.copy(node, value)
    if len(known) == number and mode == "constant":

        def sizes(e: Emission) -> list[Any]:
            given = (
                [e.function(operator.getitem, e[amounts], i) for i in range(number)]
                if isinstance(amounts, fx.Node)
                else e.args(amounts)
            )
            places = range(number - 2, -1, -2)
            return [
                _sum(e, e.method("size", e[read], axis), given[place], given[place + 1])
                for axis, place in enumerate(places, 2)
            ]

        return about_centre(plan, node, value, sizes, float(fill or 0.0))
    channels = [*known[number:], 0, 0][:2]
    if not same or any(sides) or len(known) > number + 2 or min(channels) < 0:
        raise ConversionError("", f"it pads by {known}, with mode {mode!r}")
    if value.kind == "image":
        return plan.copy(node, value)
    name = owner(node) or node.name
    before = (Width(channels[0], name),) if channels[0] else ()
    after = (Width(channels[1], name),) if channels[1] else ()

    def step(e: Emission) -> fx.Node:
        order = e.plan.group.order
        each = [e.sizes.fields(widths) * order for widths in (before, after)]
        return e.function(functional.pad, e[read], (*[0] * number, *each), value=fill or 0)

    return plan.emit(node, replace(value, widths=(*before, *value.widths, *after)), step)


def _sum(e: Emission, first: Any, *others: Any) -> Any:
    for other in others:
        first = e.function(operator.add, first, other)
    return first
