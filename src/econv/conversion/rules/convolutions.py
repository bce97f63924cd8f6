"""What becomes of convolutions and linear maps."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from econv.basis import filter_basis
from econv.conversion.answers import expect_that
from econv.conversion.arguments import argument, equal, known, no_rule
from econv.conversion.plan import (
    ATTENTION,
    VECTOR,
    Emission,
    Plan,
    PlannedModule,
    Value,
    positions_of,
)
from econv.conversion.registry import rule
from econv.conversion.steps import in_frames
from econv.conversion.trace import ConversionError, name_of, value_of
from econv.conversion.upright import attended
from econv.conversion.widths import Sizes, Width, join, runs
from econv.conversion.windows import Windows
from econv.engines.problem import times
from econv.layers import ConvOptions, GroupLinear
from econv.operators import OperatorsLike

_OPERATORS: dict[int, OperatorsLike] = {
    1: "order<=0",
    3: "order<=2",
    4: "order<=3",
    5: "order<=4",
    6: "order<=5",
    7: "order<=6",
}
_LARGEST = 11


def _operators_of(kernel: int, dimension: int) -> OperatorsLike:
    """The operators that replace a kernel of so many pixels along each axis."""
    if kernel == 2:  # what the pixels of 2×2 can tell apart, in space but for ∂xyz
        products = itertools.product(range(2), repeat=dimension)
        return tuple(exponents for exponents in products if sum(exponents) <= 2)
    if kernel == 3 and dimension == 2:
        return "paper"
    return _OPERATORS[min(kernel, 7)]


def _operators(plan: Plan, windows: Windows, side: int) -> tuple[OperatorsLike, int, str]:
    """The operators that replace a kernel, the size of their stencils, and what to say of it."""
    if windows.kernel > _LARGEST:
        raise ConversionError(
            "",
            f"a kernel of {times((windows.kernel,) * plan.dimension)} reaches further than "
            "derivatives of sixth order; the largest that has a counterpart is "
            f"{times((_LARGEST,) * plan.dimension)}",
        )
    if plan.fitted:
        operators = _reaching(plan, windows, side)
        return operators, _stencil_size(plan, operators), ""
    operators = _operators_of(windows.kernel, plan.dimension)
    size = _stencil_size(plan, operators)
    note = ""
    if windows.dilation * (size - 1) + 1 > side:
        # Stencils must fit into the map: beyond it there is only padding.
        order = (side - 1) // windows.dilation // 2 * 2
        operators = f"order<={min(order, 6)}"
        size = _stencil_size(plan, operators)
        note = f" (the map has {side} pixels only)"
    return operators, size, note


def _reaching(plan: Plan, windows: Windows, side: int) -> OperatorsLike:
    """Operators that reach the source's filters.

    Where the points of a centred layer lie between pixels they are means of these, and a larger
    support takes back some of the blur. Where all turns are turns of the pixels, all products of
    derivatives along the axes are to be had: they span every filter of a support.
    """
    between = plan.group.order > 1 and windows.between(side) and not plan.in_frames
    support = windows.kernel + (2 * between if windows.kernel % 2 else 1)
    if support == 1:
        return "order<=0"
    exact = plan.options.get("stencils") == "central" and plan.options.get("accuracy", 2) == 2
    if not exact or len(plan.group.grid_symmetries) < plan.group.order:
        return _operators_of(support, plan.dimension)
    support = min(support, _LARGEST)
    return tuple(itertools.product(range(support), repeat=plan.dimension))


def _stencil_size(plan: Plan, operators: OperatorsLike) -> int:
    options = plan.options
    return filter_basis(
        plan.group,
        operators,
        options.get("stencils", "isotropic"),
        None,
        options.get("accuracy", 2),
    ).size


def _conv_options(
    plan: Plan, windows: Windows, module: Any, operators: OperatorsLike, size: int, side: int
) -> ConvOptions:
    """Everything but the groups of a convolution that samples where the source's does."""
    extent = windows.dilation * (size - 1) + 1
    padding = max(0, windows.padding + extent - windows.extent)
    options: ConvOptions = {
        **plan.options,
        "operators": operators,
        "stride": windows.stride,
        "dilation": windows.dilation,
        "padding": (padding + 1) // 2,
        "bias": module.bias is not None,
    }
    mode = getattr(module, "padding_mode", "zeros")
    if mode != "zeros":
        options["padding_mode"] = mode
    small = plan.fitted and extent > side
    if windows.padding + extent - windows.extent != padding or padding % 2 or small:
        options["centred"] = (windows.extent, windows.padding)
    elif windows.stride > 1 and plan.group.order > 1:
        options["centred"] = True
    return options


def _plain_convolution(plan: Plan, node: fx.Node, reason: str) -> Value:
    """A convolution that cannot be converted, on the channels of the group features."""
    module, value = plan.module(node), plan.value(node.args[0])
    name = str(node.target)
    plan.left.append((name, reason))
    into = value.widths
    if value.axes != plan.image or name in plan.parts:
        return plan.as_in_source(node)
    out = _grouped_width(name, module, value) if into else _new_width(name, module.out_channels)
    order = plan.group.order

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        channels = sizes.fields(into) * order if into else module.in_channels
        groups = _groups(sizes, into, out, module) if into else 1
        return plan.plain("Conv")(
            channels,
            sizes.fields(out) * order,
            module.kernel_size,
            module.stride,
            module.padding,
            module.dilation,
            groups,
            module.bias is not None,
            module.padding_mode,
            **where,
        )

    plan.add_part(
        PlannedModule(name, make, module, positions_of(node, module), into, out),
        f"left alone, as Conv{plan.dimension}d",
    )
    return _maybe_head(plan, node, name, Value("fields", plan.image, out))


@rule(
    *(nn.Conv2d, nn.Conv3d),
    variants=("Conv2dSame", "Conv2dStaticSamePadding"),
    otherwise=_plain_convolution,
)
def convolution(plan: Plan, node: fx.Node) -> Value:
    return _convolve(plan, node, plan.module(node), str(node.target))


def _convolve(plan: Plan, node: fx.Node, module: Any, name: str) -> Value:
    """A convolution that a module, or a function with the numbers of one, does."""
    read, value = plan.first(node)
    if value.axes != plan.image:
        raise ConversionError("", f"it reads a tensor with axes {value.axes}, not {plan.image}")
    windows = Windows.of(module)
    pointwise = windows.kernel == 1 and windows.stride == 1 and not windows.padding
    if value.kind == "image" and pointwise:  # also a function, whose numbers stay where they are
        return plan.copy(node, Value("image", plan.image))
    if value.kind == "fields" and pointwise and node in plan.heads and module.groups == 1:
        return _read_out(plan, node, module, value, name)
    if name in plan.parts:
        return _again(plan, node, value)
    factor = _shuffled_by(plan, node)
    if factor is not None and value.kind == "fields":
        return _sub_pixels(plan, node, module, name, factor)
    side = int(min(value_of(read).shape[2:]))
    operators, size, note = _operators(plan, windows, side)
    options = _conv_options(plan, windows, module, operators, size, side)
    plan.reads[name] = value.kind
    blur = _blurred(plan, windows, name)
    if blur is not None:
        plan.before[name] = blur
    zeros = getattr(module, "padding_mode", "zeros") == "zeros"
    exact = plan.in_frames and zeros and not windows.symmetric and size >= windows.kernel
    if exact:
        more = windows.dilation * (size - windows.kernel)
        reach = windows.dilation * ((size - windows.kernel) // 2)
        plan.before[name], value = in_frames(plan, node, windows, name, reach=(reach, more - reach))
        options["padding"] = "valid"
        options.pop("centred", None)
    into = value.widths
    if into:
        out = _grouped_width(name, module, value)
    else:
        out = _new_width(name, module.out_channels, module.groups)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(out)
        if not into:
            own: ConvOptions = {**options, "groups": math.gcd(fields, module.groups)}
            return plan.layer("LiftConv")(module.in_channels, fields, plan.group, **own, **where)
        own = {**options, "groups": _groups(sizes, into, out, module)}
        return plan.layer("GroupConv")(sizes.fields(into), fields, plan.group, **own, **where)

    fit = _fit_convolution(windows, 0 if exact else side, into, out)
    plan.add_part(PlannedModule(name, make, module, positions_of(node, module), into, out, fit))
    if note:
        plan.notes.append(f"{name}: its operators fit into a small map{note}")
    return _maybe_head(plan, node, name, Value("fields", plan.image, out))


def _blurred(plan: Plan, windows: Windows, name: str) -> str | None:
    """Add what takes frequencies away that a stride would fold onto others."""
    if not plan.smooth or windows.stride == 1 or plan.group.order == 1:
        return None
    # With the blur of the activation before about that of eight binomial taps, for a stride of 2.
    width = min(4.0, 0.55 * windows.stride)
    return plan.insert(name, "blur", lambda: plan.layer("GroupActivation")("identity", 1, width))


def _shuffled_by(plan: Plan, node: fx.Node) -> int | None:
    """By which factor the only reader of a convolution lays its channels out as pixels."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) > 1 or user.op == "output":
        return None
    if user.op == "call_module":
        module = plan.module(user)
        return int(module.upscale_factor) if type(module) is nn.PixelShuffle else None
    is_one = name_of(user) == "pixel_shuffle"
    return int(known(argument(user, 1, "upscale_factor"))) if is_one else None


def _sub_pixels(plan: Plan, node: fx.Node, module: Any, name: str, factor: int) -> Value:
    """A convolution whose channels become pixels: one onto a finer grid."""
    windows = Windows.of(module)
    if windows.stride > 1 or windows.padding != windows.extent - 1 or module.groups > 1:
        raise ConversionError(
            "", "the channels of a strided, cropped or grouped layer are laid out as pixels"
        )
    value = plan.value(node.args[0])
    finer = value_of(next(iter(node.users)))
    kernel = min(windows.extent * factor, _LARGEST)
    options: ConvOptions = {
        **plan.options,
        "operators": _operators(plan, Windows(kernel, 1, 0), int(min(finer.shape[2:])))[0],
        "bias": module.bias is not None,
    }
    into, out = value.widths, _new_width(name, module.out_channels // factor**2)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(into), sizes.fields(out)
        layer = plan.layer("GroupUpsampleConv")
        return layer(*fields, plan.group, factor=factor, **options, **where)

    pixels = int(finer.shape[2:].numel())
    plan.add_part(PlannedModule(name, make, module, pixels, into, out))
    plan.finer.add(node)
    return _maybe_head(plan, node, name, Value("fields", plan.image, out))


def _maybe_head(plan: Plan, node: fx.Node, name: str, value: Value) -> Value:
    """The output of a layer; pooled over orientations where it is what the network returns."""
    read: Any = node.args[0]
    before = plan.before.get(name)

    def layer(e: Emission) -> fx.Node:
        return e.module(name, e[read] if before is None else e.module(before, e[read]))

    if node not in plan.heads:
        return plan.emit(node, value, layer)
    channels = plan.as_channels(node, value, name)
    kind = "image" if value.has_pixels else "invariant"
    return plan.emit(node, Value(kind, value.axes), lambda e: channels(e, layer(e)))


def _again(plan: Plan, node: fx.Node, value: Value) -> Value:
    """A layer that the source calls a second time."""
    part = plan.parts[str(node.target)]
    if part.kept or plan.reads[part.name] != value.kind or node in plan.heads:
        raise ConversionError("", "it is called twice, on tensors that turn differently")
    if value.kind == "fields":
        join(part.into, value.widths)
    part.positions += positions_of(node, plan.module(node))
    return _maybe_head(plan, node, part.name, replace(value, widths=part.out))


def _new_width(name: str, channels: int, groups: int = 1) -> tuple[Width, ...]:
    width = Width(channels, name)
    width.blocks = groups
    return (width,)


def _is_depthwise(module: Any) -> bool:
    return bool(module.groups > 1 and module.groups == module.in_channels)


def _grouped_width(name: str, module: Any, value: Value) -> tuple[Width, ...]:
    times = module.out_channels // module.in_channels
    if _is_depthwise(module) and times == 1:
        return value.widths
    if _is_depthwise(module):
        width = Width(module.out_channels, name)
        width.multiple_of = (value.widths, times)
        return (width,)
    if module.groups > 1:
        for width in runs(value.widths):
            width.blocks = max(width.blocks, module.groups)
    return _new_width(name, module.out_channels, module.groups)


def _groups(sizes: Sizes, into: tuple[Width, ...], out: tuple[Width, ...], module: Any) -> int:
    if module.groups == 1:
        return 1
    return sizes.fields(into) if _is_depthwise(module) else sizes.groups(into, out, module.groups)


def _read_out(
    plan: Plan, node: fx.Node, module: Any, value: Value, name: str | None = None
) -> Value:
    """A 1×1 convolution or linear map that ends the network: orientations are pooled before it."""
    read: Any = node.args[0]
    name = name or str(node.target)
    learned = plan.reduce == ATTENTION
    pool = (
        attended(plan, node, value, name)
        if learned
        else plan.pooled(read, value, name, plan.reduce)
    )
    into = value.widths
    pooling: Any = plan.layer("GroupPool")
    each = 1 if learned else pooling(plan.group, plan.reduce).outputs

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        bias = module.bias is not None
        if isinstance(module, nn.Linear):
            return nn.Linear(sizes.fields(into) * each, module.out_features, bias, **where)
        fields = sizes.fields(into) * each
        return plan.plain("Conv")(fields, module.out_channels, 1, bias=bias, **where)

    def fit(kept: Any, layer: Any) -> float | None:
        with torch.no_grad():
            layer.weight.zero_()  # of several statistics the first stands for the channel
            layer.weight[:, ::each] = module.weight.detach()[:, kept.channels(into)]
            if layer.bias is not None:
                layer.bias.copy_(module.bias.detach())
        return None

    if name in plan.parts:
        raise ConversionError("", "it is called twice, on tensors that turn differently")
    plan.add_part(PlannedModule(name, make, module, positions_of(node, module), into, (), fit))
    kind = "image" if value.has_pixels else "invariant"
    return plan.emit(node, Value(kind, value.axes), lambda e: e.module(name, pool(e)))


@rule(nn.ConvTranspose2d, nn.ConvTranspose3d)
def transposed_convolution(plan: Plan, node: fx.Node) -> Value:
    module, value = plan.module(node), plan.value(node.args[0])
    if value.axes != plan.image or value.kind != "fields":
        raise ConversionError("", "a transposed convolution is converted on group features only")
    windows = Windows.of(module)
    more = equal(module.output_padding, "its output paddings are unequal")
    excess = windows.extent - windows.stride - windows.padding + more
    if str(node.target) in plan.parts:
        return _again(plan, node, value)
    side = min(value_of(node).shape[2:])
    plain = Windows(windows.kernel, 1, windows.extent - 1, windows.dilation)
    options: ConvOptions = {
        **plan.options,
        "operators": _operators(plan, plain, side)[0],
        "dilation": windows.dilation,
        "bias": module.bias is not None,
    }
    name = str(node.target)
    into = value.widths
    out = _grouped_width(str(node.target), module, value)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        own: ConvOptions = {**options, "groups": _groups(sizes, into, out, module)}
        return plan.layer("GroupUpsampleConv")(
            sizes.fields(into),
            sizes.fields(out),
            plan.group,
            factor=windows.stride,
            excess=excess,
            **own,
            **where,
        )

    pixels = int(value_of(node).shape[2:].numel())

    def fit(kept: Any, layer: nn.Module) -> float | None:
        return kept.fit_transposed(layer, into, out)

    plan.add_part(PlannedModule(name, make, module, pixels, into, out, fit))
    return _maybe_head(plan, node, name, Value("fields", plan.image, out))


@rule(nn.Linear, variants=("Linear",))
def linear(plan: Plan, node: fx.Node) -> Value:
    module = plan.module(node)
    read, value = plan.first(node)
    if value.kind == "image":
        if value.axes[-1] == "C":
            return plan.copy(node, value)
        raise ConversionError("", "it reads the pixels of an image in a fixed order")
    if value.axes in plan.flat:
        return _window(plan, node, module, value)
    if value.axes[-1] != "C":
        raise ConversionError("", f"it maps the last of the axes {value.axes}, not the channels")
    if value.axes != VECTOR:
        return _channels_last(plan, node, module, value)
    if node in plan.heads or not _returns_to_pixels(plan, node):
        return _read_out(plan, node, module, value)
    if str(node.target) in plan.parts:
        return _again(plan, node, value)
    name = str(node.target)
    into, out = value.widths, _new_width(str(node.target), module.out_features)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        bias = module.bias is not None
        return GroupLinear(sizes.fields(into), sizes.fields(out), plan.group, bias, **where)

    fit = _fit_convolution(Windows(1, 1, 0), 1, into, out)
    plan.add_part(PlannedModule(name, make, module, 1, into, out, fit))
    return plan.emit(node, Value("fields", VECTOR, out), lambda e: e.module(name, e[read]))


def _returns_to_pixels(plan: Plan, node: fx.Node) -> bool:
    """Whether what follows meets a map again, as the gates of squeeze-and-excitation do."""
    seen = set()
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user in seen or user.op == "output":
            continue
        seen.add(user)
        out = value_of(user)
        maps = isinstance(out, torch.Tensor) and out.ndim == len(plan.image)
        others = [plan.values[read] for read in user.all_input_nodes if read in plan.values]
        meets = any(value.kind == "fields" and value.has_pixels for value in others)
        if maps and (meets or out.shape[2:].numel() > 1):
            return True
        stack += list(user.users)
    return False


def _channels_last(plan: Plan, node: fx.Node, module: nn.Linear, value: Value) -> Value:
    """A linear map of the channels of every pixel: a 1×1 convolution."""
    if set("".join(value.axes)) != set(plan.image):
        raise ConversionError("", f"it reads a tensor with axes {value.axes}")
    read: Any = node.args[0]
    name = str(node.target)
    if name in plan.parts:
        return _again(plan, node, value)
    if node in plan.heads:  # pooled features have the source's axes, channels last
        return _read_out(plan, node, module, value)
    into, out = value.widths, _new_width(str(node.target), module.out_features)
    options: ConvOptions = {**plan.options, "operators": "order<=0"}
    options["bias"] = module.bias is not None

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(into), sizes.fields(out)
        return plan.layer("GroupConv")(*fields, plan.group, **options, **where)

    fit = _fit_convolution(Windows(1, 1, 0), 1, into, out)
    plan.add_part(PlannedModule(name, make, module, positions_of(node, module), into, out, fit))
    found = replace(value, widths=out)
    return plan.emit(node, found, lambda e: e.module(name, e[read]))


_WINDOW = 7


def _window(plan: Plan, node: fx.Node, module: nn.Linear, value: Value) -> Value:
    """A linear map of a whole feature map: a convolution with one window."""
    read: Any = node.args[0]
    name = str(node.target)
    if name in plan.parts:
        raise ConversionError("", "it is called twice")
    shape, points = times(value.sides), "pixels" if plan.dimension == 2 else "voxels"
    if len(set(value.sides)) > 1:
        wanted = "square" if plan.dimension == 2 else "a cube"
        raise ConversionError("", f"it reads a map of {shape} {points}, which is not {wanted}")
    length = value.sides[0]
    side = min(length, _WINDOW)
    into, out = value.widths, _new_width(str(node.target), module.out_features)
    windows = Windows(side, 1, 0)
    options: ConvOptions = {
        **plan.options,
        "operators": f"order<={(side - 1) // 2 * 2}",
        "padding": "valid",
        "centred": (side, 0),
        "bias": module.bias is not None,
    }

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(into), sizes.fields(out)
        return plan.layer("GroupWindowConv")(*fields, plan.group, **options, **where)

    smaller = None
    if side < length:
        smaller = plan.insert(name, "smaller", lambda: plan.plain("AdaptiveAvgPool")(side))
        averaged = times((side,) * plan.dimension)
        plan.notes.append(f"{name}: the map that it reads is averaged to {averaged} {points}")
    fit = None
    if smaller is None:
        first = value.axes == plan.flat[0]
        fit = _fit_convolution(windows, side, into, out, window=first)
    plan.add_part(PlannedModule(name, make, module, 1, into, out, fit))
    found = Value("fields", VECTOR, out)
    head = node in plan.heads
    channels = plan.as_channels(node, found, name) if head else None

    def step(e: Emission) -> fx.Node:
        for axis in range(2, 2 + plan.dimension):
            same = e.function(operator.eq, e.method("size", e[read], axis), length)
            expect_that(
                e,
                same,
                f"expected {'images' if plan.dimension == 2 else 'volumes'} of the example's size: "
                f"{name} reads a map of {shape} {points}, as in the source; convert with an "
                "example of this size",
            )
        x = e[read] if smaller is None else e.module(smaller, e[read])
        vector = e.method("flatten", e.module(name, x), 1)
        return vector if channels is None else channels(e, vector)

    return plan.emit(node, Value("invariant", VECTOR) if head else found, step)


@rule(nn.Conv1d)
def along_channels(plan: Plan, node: fx.Node) -> Value:
    """A filter along the channels, as in efficient channel attention: along fields, for each
    orientation alone.
    """
    module = plan.module(node)
    read, value = plan.first(node)
    reach = module.dilation[0] * (module.kernel_size[0] - 1)
    same = module.padding == "same" or (module.stride[0], 2 * int(module.padding[0])) == (1, reach)
    one = module.in_channels == module.out_channels == 1
    if value.kind != "fields" or value.axes != ("N", "1", "C") or not one or not same:
        raise ConversionError("", f"it filters a tensor with axes {value.axes}")
    plan.keep(node, "as it is, along the fields of every orientation")

    def step(e: Emission) -> fx.Node:
        order = e.plan.group.order
        fields = e.method("transpose", e.method("unflatten", e[read], 1, (-1, order)), 1, 2)
        rows = e.method("unsqueeze", e.method("flatten", fields, 0, 1), 1)
        found = e.method("squeeze", e.module(str(node.target), rows), 1)
        back = e.method("transpose", e.method("unflatten", found, 0, (-1, order)), 1, 2)
        return e.method("flatten", back, 1)

    return plan.emit(node, value, step)


@rule("conv2d", "conv3d")
def convolution_by_function(plan: Plan, node: fx.Node) -> Value:
    """`conv2d` or `conv3d` with a parameter of the source: a module that has it."""
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    reads = [found for found in (weight, bias) if found is not None]
    if not all(_is_parameter(plan, found) for found in reads):
        raise no_rule(plan, node, ": only filters that are parameters become PDO-eConvs")
    out, each, *kernel = value_of(weight).shape
    given: dict[str, Any] = {"bias": bias is not None, "device": "meta"}
    defaults = (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))
    for place, (key, default) in enumerate(defaults, start=3):
        found = known(argument(node, place, key, default))
        given[key] = tuple(found) if isinstance(found, list) else found
    kind: Any = {"conv2d": nn.Conv2d, "conv3d": nn.Conv3d}[name_of(node)]
    module = kind(each * given["groups"], out, tuple(kernel), **given)
    module.weight = plan.trace.attribute(str(weight.target))
    if bias is not None:
        module.bias = plan.trace.attribute(str(bias.target))
    beside = str(weight.target).rpartition(".")[0]
    name = plan.new_name(f"{beside}.{node.name}" if beside else node.name)
    return _convolve(plan, node, module, name)


def _is_parameter(plan: Plan, node: Any) -> bool:
    is_attribute = isinstance(node, fx.Node) and node.op == "get_attr"
    return is_attribute and isinstance(plan.trace.attribute(str(node.target)), nn.Parameter)


@rule("conv1d", "conv_transpose2d", "conv_transpose3d", "linear", "unfold")
def filtering(plan: Plan, node: fx.Node) -> Value:
    raise no_rule(plan, node, ": only modules with filters of their own become PDO-eConvs")


# Fitting


def _fit_convolution(
    windows: Windows,
    side: int,
    into: tuple[Width, ...],
    out: tuple[Width, ...],
    window: bool | None = None,
) -> Callable[[Any, nn.Module], float | None]:
    def fit(kept: Any, layer: nn.Module) -> float | None:
        about_centre = bool(getattr(layer, "centred", False)) and windows.dilation == 1
        left = windows.left_over(side) if about_centre else 0
        if not side:  # each orientation reads the windows in its own frame
            left = 1 - windows.kernel % 2
        return kept.fit_filters(layer, windows.kernel, left, into, out, window)

    return fit
