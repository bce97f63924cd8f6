"""What becomes of convolutions and linear maps."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from econv.basis import filter_basis
from econv.conversion.answers import expect_that
from econv.conversion.plan import Emission, Part, Plan, Value, positions_of
from econv.conversion.resizing import equal
from econv.conversion.shapes import FLAT, IMAGE, VECTOR
from econv.conversion.trace import ConversionError, value_of
from econv.conversion.widths import Sizes, Width, join, runs
from econv.layers import (
    ConvOptions,
    GroupConv2d,
    GroupLinear,
    GroupPool2d,
    GroupUpsampleConv2d,
    LiftConv2d,
)
from econv.operators import OperatorsLike

__all__ = [
    "Geometry",
    "convolution",
    "linear",
    "plain_convolution",
    "transposed_convolution",
]

_OPERATORS: dict[int, OperatorsLike] = {
    1: "order<=0",
    2: ((0, 0), (1, 0), (0, 1), (1, 1)),  # what the four pixels of 2×2 can tell apart
    3: "paper",
    4: "order<=3",
    5: "order<=4",
    6: "order<=5",
    7: "order<=6",
}
_LARGEST = 11


@dataclass(frozen=True)
class Geometry:
    """Where the windows of a convolution or pooling lie."""

    kernel: int
    stride: int
    padding: int
    """Of both ends of an axis together."""
    dilation: int = 1

    @property
    def extent(self) -> int:
        """Pixels from the first to the last that a window reads."""
        return self.dilation * (self.kernel - 1) + 1

    @classmethod
    def of(cls, module: Any) -> Geometry:
        """Read off a module; an error where rows and columns are treated differently."""
        kernel = equal(module.kernel_size, "its kernel is not square")
        strides = module.kernel_size if module.stride is None else module.stride
        stride = equal(strides, "its strides are unequal")
        dilation = equal(getattr(module, "dilation", 1), "its dilations are unequal")
        reach = dilation * (kernel - 1)
        if type(module).__name__ == "Conv2dSame":  # ⌈n / stride⌉ samples, as TensorFlow pads
            padding = reach
        elif isinstance(module.padding, str):
            padding = reach if module.padding == "same" else 0
        else:
            padding = 2 * equal(module.padding, "its paddings are unequal")
        return cls(kernel, stride, padding, dilation)


def _operators(plan: Plan, geometry: Geometry, side: int) -> tuple[OperatorsLike, int, str]:
    """The operators that replace a kernel, the size of their stencils, and what to say of it."""
    if geometry.kernel > _LARGEST:
        raise ConversionError(
            "",
            f"a kernel of {geometry.kernel}×{geometry.kernel} reaches further than derivatives of "
            f"sixth order; the largest that has a counterpart is {_LARGEST}×{_LARGEST}",
        )
    operators = _OPERATORS[min(geometry.kernel, 7)]
    size = _stencil_size(plan, operators)
    note = ""
    if geometry.dilation * (size - 1) + 1 > side:
        # Stencils must fit into the map: beyond it there is only padding.
        order = (side - 1) // geometry.dilation // 2 * 2
        operators = f"order<={min(order, 6)}"
        size = _stencil_size(plan, operators)
        note = f" (the map has {side} pixels only)"
    return operators, size, note


def _stencil_size(plan: Plan, operators: OperatorsLike) -> int:
    options = plan.options
    return filter_basis(
        plan.group,
        operators,
        options.get("stencils", "isotropic"),
        None,
        options.get("accuracy", 2),
    ).size


def _conv_options(plan: Plan, geometry: Geometry, module: Any, side: int) -> ConvOptions:
    """Everything but the groups of a convolution that samples where the source's does."""
    operators, size, _ = _operators(plan, geometry, side)
    extent = geometry.dilation * (size - 1) + 1
    padding = max(0, geometry.padding + extent - geometry.extent)
    options: ConvOptions = {
        **plan.options,
        "operators": operators,
        "stride": geometry.stride,
        "dilation": geometry.dilation,
        "padding": (padding + 1) // 2,
        "bias": module.bias is not None,
    }
    mode = getattr(module, "padding_mode", "zeros")
    if mode != "zeros":
        options["padding_mode"] = mode
    like = (geometry.extent, geometry.padding)
    if geometry.padding + extent - geometry.extent != padding or padding % 2:
        options["centred"] = like
    elif geometry.stride > 1:
        options["centred"] = True
    return options


def _smaller_side(node: Any) -> int:
    return int(min(value_of(node).shape[2:]))


def convolution(plan: Plan, node: fx.Node, module: nn.Conv2d) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    if value.axes != IMAGE:
        raise ConversionError("", f"it reads a tensor with axes {value.axes}, not {IMAGE}")
    geometry = Geometry.of(module)
    pointwise = geometry.kernel == 1 and geometry.stride == 1 and not geometry.padding
    if value.kind == "image" and pointwise:
        return plan.copy(node, Value("image", IMAGE))
    if value.kind == "fields" and pointwise and node in plan.heads and module.groups == 1:
        return _read_out(plan, node, module, value)
    if str(node.target) in plan.parts:
        return _again(plan, node, value)
    options = _conv_options(plan, geometry, module, _smaller_side(read))
    pixels = positions_of(node, module)
    name = str(node.target)
    if value.kind == "image":
        into: tuple[Width, ...] = ()
        out = _new_width(plan, node, module.out_channels, module.groups)
    else:
        into = value.widths
        out = _grouped_width(plan, node, module, value)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(out)
        if not into:
            own: ConvOptions = {**options, "groups": math.gcd(fields, module.groups)}
            return LiftConv2d(module.in_channels, fields, plan.group, **own, **where)
        own = {**options, "groups": _groups(sizes, into, out, module)}
        return GroupConv2d(sizes.fields(into), fields, plan.group, **own, **where)

    fit = _fit_convolution(geometry, _smaller_side(read), into, out)
    plan.add_part(Part(name, make, module, pixels, into, out, fit))
    _say_if_smaller(plan, name, geometry, _smaller_side(read))
    return _maybe_head(plan, node, name, Value("fields", IMAGE, out))


def _say_if_smaller(plan: Plan, name: str, geometry: Geometry, side: int) -> None:
    note = _operators(plan, geometry, side)[2]
    if note:
        plan.notes.append(f"{name}: its operators fit into a small map{note}")


def _maybe_head(plan: Plan, node: fx.Node, name: str, value: Value) -> Value:
    """The output of a layer; pooled over orientations where it is what the network returns."""
    read: Any = node.args[0]
    if node not in plan.heads:
        return plan.emit(node, value, lambda e: e.module(name, e[read]))
    for width in runs(value.widths):
        width.fix(width.channels)
    pool = plan.insert(name, "orientations", lambda: GroupPool2d(plan.group, plan.reduce))
    kind = "image" if value.has_pixels else "invariant"
    return plan.emit(
        node, Value(kind, value.axes), lambda e: e.module(pool, e.module(name, e[read]))
    )


def _again(plan: Plan, node: fx.Node, value: Value) -> Value:
    """A layer that the source calls a second time."""
    part = plan.parts[str(node.target)]
    if part.kept or bool(part.into) != (value.kind == "fields") or node in plan.heads:
        raise ConversionError("", "it is called twice, on tensors that turn differently")
    join(part.into, value.widths)
    part.positions += positions_of(node, plan.module(node))
    return _maybe_head(plan, node, part.name, Value("fields", value.axes, part.out))


def _new_width(plan: Plan, node: fx.Node, channels: int, groups: int = 1) -> tuple[Width, ...]:
    width = Width(channels, str(node.target))
    width.blocks = groups
    return (width,)


def _is_depthwise(module: Any) -> bool:
    return bool(module.groups > 1 and module.groups == module.in_channels)


def _grouped_width(plan: Plan, node: fx.Node, module: Any, value: Value) -> tuple[Width, ...]:
    times = module.out_channels // module.in_channels
    if _is_depthwise(module) and times == 1:
        return value.widths
    if _is_depthwise(module):
        width = Width(module.out_channels, str(node.target))
        width.multiple_of = (value.widths, times)
        return (width,)
    if module.groups > 1:
        for width in runs(value.widths):
            width.blocks = max(width.blocks, module.groups)
    return _new_width(plan, node, module.out_channels, module.groups)


def _groups(sizes: Sizes, into: tuple[Width, ...], out: tuple[Width, ...], module: Any) -> int:
    if module.groups == 1:
        return 1
    return sizes.fields(into) if _is_depthwise(module) else sizes.groups(into, out, module.groups)


def _read_out(plan: Plan, node: fx.Node, module: Any, value: Value) -> Value:
    """A 1×1 convolution or linear map that ends the network: orientations are pooled before it."""
    read: Any = node.args[0]
    name = str(node.target)
    pool = plan.pooled(read, value, name)
    into = value.widths

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        bias = module.bias is not None
        if isinstance(module, nn.Linear):
            return nn.Linear(sizes.fields(into), module.out_features, bias, **where)
        return nn.Conv2d(sizes.fields(into), module.out_channels, 1, bias=bias, **where)

    def fit(kept: Any, layer: Any) -> float | None:
        with torch.no_grad():
            layer.weight.copy_(module.weight.detach()[:, kept.channels(into)])
            if layer.bias is not None:
                layer.bias.copy_(module.bias.detach())
        return None

    if name in plan.parts:
        raise ConversionError("", "it is called twice, on tensors that turn differently")
    plan.add_part(Part(name, make, module, positions_of(node, module), into, (), fit))
    kind = "image" if value.has_pixels else "invariant"
    return plan.emit(node, Value(kind, value.axes), lambda e: e.module(name, pool(e)))


def plain_convolution(plan: Plan, node: fx.Node, module: nn.Conv2d, reason: str) -> Value:
    """A convolution that cannot be converted, on the channels of the group features."""
    read: Any = node.args[0]
    value = plan.value(read)
    name = str(node.target)
    plan.left.append((name, reason))
    into = value.widths
    if value.axes != IMAGE or name in plan.parts:
        return plan.as_in_source(node)
    out = (
        _grouped_width(plan, node, module, value)
        if into
        else _new_width(plan, node, module.out_channels)
    )
    order = plan.group.order

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        channels = sizes.fields(into) * order if into else module.in_channels
        groups = _groups(sizes, into, out, module) if into else 1
        return nn.Conv2d(
            channels,
            sizes.fields(out) * order,
            module.kernel_size,  # type: ignore[arg-type]
            module.stride,  # type: ignore[arg-type]
            module.padding,  # type: ignore[arg-type]
            module.dilation,  # type: ignore[arg-type]
            groups,
            module.bias is not None,
            module.padding_mode,
            **where,
        )

    plan.add_part(
        Part(name, make, module, positions_of(node, module), into, out), "left alone, as Conv2d"
    )
    return _maybe_head(plan, node, name, Value("fields", IMAGE, out))


def transposed_convolution(plan: Plan, node: fx.Node, module: nn.ConvTranspose2d) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    if value.axes != IMAGE or value.kind != "fields":
        raise ConversionError("", "a transposed convolution is converted on group features only")
    geometry = Geometry.of(module)
    more = equal(module.output_padding, "its output paddings are unequal")
    excess = geometry.extent - geometry.stride - geometry.padding + more
    if str(node.target) in plan.parts:
        return _again(plan, node, value)
    side = min(value_of(node).shape[2:])
    plain = Geometry(geometry.kernel, 1, geometry.extent - 1, geometry.dilation)
    operators, _, _ = _operators(plan, plain, side)
    options: ConvOptions = {
        **plan.options,
        "operators": operators,
        "dilation": geometry.dilation,
        "bias": module.bias is not None,
    }
    name = str(node.target)
    into = value.widths
    out = _grouped_width(plan, node, module, value)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        own: ConvOptions = {**options, "groups": _groups(sizes, into, out, module)}
        return GroupUpsampleConv2d(
            sizes.fields(into),
            sizes.fields(out),
            plan.group,
            factor=geometry.stride,
            excess=excess,
            **own,
            **where,
        )

    pixels = int(value_of(node).shape[2:].numel())

    def fit(kept: Any, layer: nn.Module) -> float | None:
        return kept.fit_transposed(layer, into, out)

    plan.add_part(Part(name, make, module, pixels, into, out, fit))
    return _maybe_head(plan, node, name, Value("fields", IMAGE, out))


def linear(plan: Plan, node: fx.Node, module: nn.Linear) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    if value.kind == "image":
        if value.axes[-1] == "C":
            return plan.copy(node, value)
        raise ConversionError("", "it reads the pixels of an image in a fixed order")
    if value.axes in FLAT:
        return _window(plan, node, module, value)
    if value.axes[-1] != "C":
        raise ConversionError("", f"it maps the last of the axes {value.axes}, not the channels")
    if value.axes != VECTOR:
        return _channels_last(plan, node, module, value)
    if node in plan.heads or not _returns_to_pixels(node):
        return _read_out(plan, node, module, value)
    if str(node.target) in plan.parts:
        return _again(plan, node, value)
    name = str(node.target)
    into, out = value.widths, _new_width(plan, node, module.out_features)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        bias = module.bias is not None
        return GroupLinear(sizes.fields(into), sizes.fields(out), plan.group, bias, **where)

    fit = _fit_convolution(Geometry(1, 1, 0), 1, into, out)
    plan.add_part(Part(name, make, module, 1, into, out, fit))
    return plan.emit(node, Value("fields", VECTOR, out), lambda e: e.module(name, e[read]))


def _returns_to_pixels(node: fx.Node) -> bool:
    """Whether what follows meets a map again, as the gates of squeeze-and-excitation do."""
    seen = set()
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user in seen or user.op == "output":
            continue
        seen.add(user)
        out = value_of(user)
        if isinstance(out, torch.Tensor) and out.ndim == 4 and out.shape[2:].numel() > 1:
            return True
        stack += list(user.users)
    return False


def _channels_last(plan: Plan, node: fx.Node, module: nn.Linear, value: Value) -> Value:
    """A linear map of the channels of every pixel: a 1×1 convolution."""
    if set(value.axes) != set(IMAGE):
        raise ConversionError("", f"it reads a tensor with axes {value.axes}")
    read: Any = node.args[0]
    name = str(node.target)
    if name in plan.parts:
        return _again(plan, node, value)
    if node in plan.heads:  # pooled features have the source's axes, channels last
        return _read_out(plan, node, module, value)
    into, out = value.widths, _new_width(plan, node, module.out_features)
    options: ConvOptions = {**plan.options, "operators": "order<=0"}
    options["bias"] = module.bias is not None

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return GroupConv2d(sizes.fields(into), sizes.fields(out), plan.group, **options, **where)

    fit = _fit_convolution(Geometry(1, 1, 0), 1, into, out)
    plan.add_part(Part(name, make, module, positions_of(node, module), into, out, fit))
    return plan.emit(node, Value("fields", value.axes, out), lambda e: e.module(name, e[read]))


_WINDOW = 7


def _window(plan: Plan, node: fx.Node, module: nn.Linear, value: Value) -> Value:
    """A linear map of a whole feature map: a convolution with one window."""
    read: Any = node.args[0]
    name = str(node.target)
    if name in plan.parts:
        raise ConversionError("", "it is called twice")
    height, width = value.sides
    if height != width:
        raise ConversionError("", f"it reads a map of {height}×{width} pixels, which is not square")
    side = min(height, _WINDOW)
    into, out = value.widths, _new_width(plan, node, module.out_features)
    geometry = Geometry(side, 1, 0)
    options: ConvOptions = {
        **plan.options,
        "operators": f"order<={(side - 1) // 2 * 2}",
        "padding": "valid",
        "centred": (side, 0),
        "bias": module.bias is not None,
    }

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return GroupConv2d(sizes.fields(into), sizes.fields(out), plan.group, **options, **where)

    smaller = None
    if side < height:
        smaller = plan.insert(name, "smaller", lambda: nn.AdaptiveAvgPool2d(side))
        plan.notes.append(f"{name}: the map that it reads is averaged to {side}×{side} pixels")
    fit = None
    if smaller is None:
        first = value.axes[1] == "CHW"
        fit = _fit_convolution(geometry, side, into, out, window=first)
    plan.add_part(Part(name, make, module, 1, into, out, fit))
    head = node in plan.heads
    pool = None
    if head:
        for run in runs(out):
            run.fix(run.channels)
        pool = plan.insert(name, "orientations", lambda: GroupPool2d(plan.group, plan.reduce))

    def step(e: Emission) -> fx.Node:
        for axis in (2, 3):
            same = e.function(operator.eq, e.method("size", e[read], axis), height)
            expect_that(
                e,
                same,
                f"expected images of the example's size: {name} reads a map of {height}×{width} "
                "pixels, as in the source; convert with an example of this size",
            )
        x = e[read] if smaller is None else e.module(smaller, e[read])
        found = e.method("flatten", e.module(name, x), 1)
        return found if pool is None else e.module(pool, found)

    return plan.emit(
        node, Value("invariant", VECTOR) if head else Value("fields", VECTOR, out), step
    )


# Fitting


def _fit_convolution(
    geometry: Geometry,
    side: int,
    into: tuple[Width, ...],
    out: tuple[Width, ...],
    window: bool | None = None,
) -> Callable[[Any, nn.Module], float | None]:
    def fit(kept: Any, layer: nn.Module) -> float | None:
        return kept.fit_filters(layer, geometry.kernel, geometry.dilation, side, into, out, window)

    return fit
