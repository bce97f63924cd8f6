"""What becomes of each kind of module."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from econv.basis import filter_basis
from econv.conversion.plan import Emission, Part, Plan, Row, Value, describe, positions_of
from econv.conversion.shapes import FLAT, IMAGE, VECTOR, reshape
from econv.conversion.trace import CannotConvert, value_of
from econv.conversion.widths import Sizes, Width, join, runs
from econv.layers import (
    CentredAvgPool2d,
    CentredMaxPool2d,
    ConvOptions,
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupGroupNorm2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupLinear,
    GroupPool2d,
    GroupPReLU2d,
    GroupUpsampleConv2d,
    LiftConv2d,
)
from econv.operators import OperatorsLike

__all__ = [
    "POINTWISE",
    "avg_pool",
    "convert_module",
    "is_leaf",
    "max_pool",
    "pool_step",
    "resizes_symmetrically",
]

POINTWISE: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
    nn.Dropout,
    nn.AlphaDropout,
)
# Classes of other libraries, by name: drops of whole samples, and pointwise functions as modules.
_POINTWISE_NAMES = {"StochasticDepth", "DropPath", "Swish", "HardSwish", "HardSigmoid", "GELUTanh"}
_SYMMETRIC: tuple[type[nn.Module], ...] = (
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.Softmax2d,
)
# Their forward is not torch's, but they mean the same.
_KNOWN_VARIANTS = {
    *("BatchNormAct2d", "GroupNormAct", "LayerNormAct", "LayerNormAct2d", "SyncBatchNorm"),
    *("LayerNorm", "LayerNorm2d", "GroupNorm", "GroupNorm1", "Conv2dSame", "LayerNormFp32"),
    *(
        "Linear",
        "LayerNorm2dFp32",
        "Swish",
        "GELU",
        "GELUTanh",
        "Sigmoid",
        "Tanh",
        "HardSwish",
        "PReLU",
    ),
}
_CHANNELS_FIRST = {"LayerNorm2d", "LayerNormAct2d", "LayerNorm2dFp32"}
_BLUR = {"BlurPool2d"}

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


def _rule_of(module: nn.Module) -> Callable[[Plan, fx.Node, Any], Value] | None:
    kind = type(module)
    if kind.__name__ in _POINTWISE_NAMES:
        return _pointwise
    if kind.__name__ in _BLUR:
        return _blur_pool
    for base in kind.__mro__:
        if base in _RULES:
            same = kind.forward is base.forward or kind.__name__ in _KNOWN_VARIANTS
            return _RULES[base] if same else None
    return None


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is converted as one; others are looked into."""
    if _rule_of(module) is not None:
        return True
    inside = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return type(module).__module__.startswith("torch.nn.") and not inside


def convert_module(plan: Plan, node: fx.Node) -> Value:
    """Plan one call of a module."""
    module = plan.module(node)
    values = [plan.value(read) for read in node.all_input_nodes]
    if any(value.kind == "left" for value in values):
        return plan.as_in_source(node)
    if not any(value.kind in ("fields", "image", "list") for value in values):
        return plan.copy(node, Value("invariant"))
    rule = _rule_of(module)
    if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return plan.leave(node, "attention over positions is not equivariant to their rotation")
    if rule is None:
        return plan.leave(node, f"there is no rule for {type(module).__name__}")
    if len(node.args) != 1 or node.kwargs or values[0].kind == "list":
        return plan.leave(node, f"expected {type(module).__name__} to read one tensor")
    try:
        return rule(plan, node, module)
    except CannotConvert as error:
        if plan.strict or error.module not in ("", str(node.target)):
            raise CannotConvert(error.module or str(node.target), error.reason) from None
        if isinstance(module, nn.Conv2d):
            return _plain_convolution(plan, node, module, error.reason)
        return plan.leave(node, error.reason)


# Convolutions


@dataclass(frozen=True)
class _Geometry:
    """Where the windows of a convolution or pooling lie."""

    kernel: int
    stride: int
    padding: int
    """Of both ends of an axis together."""
    dilation: int = 1

    @property
    def extent(self) -> int:
        return self.dilation * (self.kernel - 1) + 1


def _equal(pair: Any, what: str) -> int:
    both = tuple(pair) if isinstance(pair, tuple | list) else (pair, pair)
    if len(both) == 1:
        both = both * 2
    if len(both) != 2 or both[0] != both[1]:
        raise CannotConvert("", f"{what}: a quarter turn would exchange {both}")
    return int(both[0])


def _geometry(module: Any) -> _Geometry:
    kernel = _equal(module.kernel_size, "its kernel is not square")
    stride = _equal(
        module.kernel_size if module.stride is None else module.stride, "its strides are unequal"
    )
    dilation = _equal(getattr(module, "dilation", 1), "its dilations are unequal")
    extent = dilation * (kernel - 1) + 1
    if type(module).__name__ == "Conv2dSame":  # ⌈n / stride⌉ samples, as TensorFlow pads
        padding = extent - 1
    elif isinstance(module.padding, str):
        padding = extent - 1 if module.padding == "same" else 0
    else:
        padding = 2 * _equal(module.padding, "its paddings are unequal")
    return _Geometry(kernel, stride, padding, dilation)


def _operators(plan: Plan, geometry: _Geometry, side: int) -> tuple[OperatorsLike, int, str]:
    """The operators that replace a kernel, the size of their stencils, and what to say of it."""
    if geometry.kernel > _LARGEST:
        raise CannotConvert(
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


def _conv_options(plan: Plan, geometry: _Geometry, module: Any, side: int) -> ConvOptions:
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


def _convolution(plan: Plan, node: fx.Node, module: nn.Conv2d) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    if value.axes != IMAGE:
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}, not {IMAGE}")
    geometry = _geometry(module)
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
            groups = math.gcd(fields, module.groups)
            return LiftConv2d(
                module.in_channels, fields, plan.group, **options, groups=groups, **where
            )
        groups = _groups(sizes, into, out, module)
        in_fields = sizes.fields(into)
        return GroupConv2d(in_fields, fields, plan.group, **options, groups=groups, **where)

    fit = _fit_convolution(geometry, _smaller_side(read), into, out)
    plan.add_part(Part(name, make, module, pixels, into, out, fit))
    _say_if_smaller(plan, name, geometry, _smaller_side(read))
    return _maybe_head(plan, node, name, Value("fields", IMAGE, out))


def _say_if_smaller(plan: Plan, name: str, geometry: _Geometry, side: int) -> None:
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
        raise CannotConvert("", "it is called twice, on tensors that turn differently")
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
    """A 1×1 convolution or linear map that ends the network: on features pooled over orientations."""
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
        raise CannotConvert("", "it is called twice, on tensors that turn differently")
    plan.add_part(Part(name, make, module, positions_of(node, module), into, (), fit))
    kind = "image" if value.has_pixels else "invariant"
    return plan.emit(node, Value(kind, value.axes), lambda e: e.module(name, pool(e)))


def _plain_convolution(plan: Plan, node: fx.Node, module: nn.Conv2d, reason: str) -> Value:
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


def _transposed(plan: Plan, node: fx.Node, module: nn.ConvTranspose2d) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    if value.axes != IMAGE or value.kind != "fields":
        raise CannotConvert("", "a transposed convolution is converted on group features only")
    geometry = _geometry(module)
    more = _equal(module.output_padding, "its output paddings are unequal")
    excess = geometry.extent - geometry.stride - geometry.padding + more
    if str(node.target) in plan.parts:
        return _again(plan, node, value)
    side = min(value_of(node).shape[2:])
    plain = _Geometry(geometry.kernel, 1, geometry.extent - 1, geometry.dilation)
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
        return GroupUpsampleConv2d(
            sizes.fields(into),
            sizes.fields(out),
            plan.group,
            factor=geometry.stride,
            excess=excess,
            **options,
            groups=_groups(sizes, into, out, module),
            **where,
        )

    pixels = int(value_of(node).shape[2:].numel())
    plan.add_part(Part(name, make, module, pixels, into, out))
    return _maybe_head(plan, node, name, Value("fields", IMAGE, out))


def _linear(plan: Plan, node: fx.Node, module: nn.Linear) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    if value.kind == "image":
        if value.axes[-1] == "C":
            return plan.copy(node, value)
        raise CannotConvert("", "it reads the pixels of an image in a fixed order")
    if value.axes in FLAT:
        return _window(plan, node, module, value)
    if value.axes[-1] != "C":
        raise CannotConvert("", f"it maps the last of the axes {value.axes}, not the channels")
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

    fit = _fit_convolution(_Geometry(1, 1, 0), 1, into, out)
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
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}")
    read: Any = node.args[0]
    name = str(node.target)
    if name in plan.parts:
        return _again(plan, node, value)
    if node in plan.heads:
        return _read_out_last(plan, node, module, value)
    into, out = value.widths, _new_width(plan, node, module.out_features)
    options: ConvOptions = {**plan.options, "operators": "order<=0"}
    options["bias"] = module.bias is not None

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return GroupConv2d(sizes.fields(into), sizes.fields(out), plan.group, **options, **where)

    fit = _fit_convolution(_Geometry(1, 1, 0), 1, into, out)
    plan.add_part(Part(name, make, module, positions_of(node, module), into, out, fit))
    return plan.emit(node, Value("fields", value.axes, out), lambda e: e.module(name, e[read]))


def _read_out_last(plan: Plan, node: fx.Node, module: nn.Linear, value: Value) -> Value:
    # `pooled` gives the source's axes back, and the linear map reads the last of them.
    return _read_out(plan, node, module, value)


_WINDOW = 7


def _window(plan: Plan, node: fx.Node, module: nn.Linear, value: Value) -> Value:
    """A linear map of a whole feature map: a convolution with one window."""
    read: Any = node.args[0]
    name = str(node.target)
    if name in plan.parts:
        raise CannotConvert("", "it is called twice")
    height, width = value.sides
    if height != width:
        raise CannotConvert("", f"it reads a map of {height}×{width} pixels, which is not square")
    side = min(height, _WINDOW)
    into, out = value.widths, _new_width(plan, node, module.out_features)
    geometry = _Geometry(side, 1, 0)
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
        x = e[read] if smaller is None else e.module(smaller, e[read])
        found = e.method("flatten", e.module(name, x), 1)
        return found if pool is None else e.module(pool, found)

    return plan.emit(
        node, Value("invariant", VECTOR) if head else Value("fields", VECTOR, out), step
    )


# Fitting


def _fit_convolution(
    geometry: _Geometry,
    side: int,
    into: tuple[Width, ...],
    out: tuple[Width, ...],
    window: bool | None = None,
) -> Callable[[Any, nn.Module], float | None]:
    def fit(kept: Any, layer: nn.Module) -> float | None:
        return kept.fit_filters(layer, geometry.kernel, geometry.dilation, side, into, out, window)

    return fit


def _fit_by_channel(
    widths: tuple[Width, ...], source: nn.Module, names: tuple[str, ...]
) -> Callable[[Any, nn.Module], float | None]:
    """Takes over numbers that belong to channels, one for each field."""

    def fit(kept: Any, layer: nn.Module) -> float | None:
        target = next((m for m in layer.modules() if hasattr(m, "weight")), layer)
        with torch.no_grad():
            for name in names:
                given, own = getattr(source, name, None), getattr(target, name, None)
                if given is not None and own is not None:
                    own.copy_(given.detach()[kept.channels(widths)])
        return None

    return fit


# Norms


def _constant(parameter: Any) -> float | None:
    """The number that all entries of a parameter share, if they do."""
    if parameter is None or parameter.is_meta or parameter.numel() == 0:
        return None
    first = float(parameter.detach().flatten()[0])
    return first if bool((parameter.detach() == first).all()) else None


def _norm(
    plan: Plan, node: fx.Node, source: Any, widths: tuple[Width, ...], make: Any, value: Value
) -> Value:
    """A norm of group features, with the function and the dropout that some norms contain."""
    name = str(node.target)
    read: Any = node.args[0]
    initial = _constant(getattr(source, "weight", None))

    def make_all(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        norm: nn.Module = make(sizes, where)
        own = getattr(norm, "weight", None)
        if own is not None and initial is not None and not own.is_meta:
            nn.init.constant_(own, initial)
        after = [(n, getattr(source, n, None)) for n in ("drop", "act")]
        inside = [(n, m) for n, m in after if isinstance(m, nn.Module)]
        if not [m for _, m in inside if not isinstance(m, nn.Identity)]:
            return norm
        parts = [("norm", norm), *((n, copy.deepcopy(m)) for n, m in inside)]
        return nn.Sequential(OrderedDict(parts))

    if name in plan.parts:
        join(plan.parts[name].into, widths)
    else:
        names = ("weight", "bias", "running_mean", "running_var")
        fit = _fit_by_channel(widths, source, names)
        plan.add_part(Part(name, make_all, source, 0, widths, (), fit))
    if value.axes == VECTOR:

        def on_vectors(e: Emission) -> fx.Node:
            map_ = e.method("unsqueeze", e.method("unsqueeze", e[read], 2), 3)
            return e.method("flatten", e.module(name, map_), 1)

        return plan.emit(node, value, on_vectors)
    return plan.emit(node, value, lambda e: e.module(name, e[read]))


def _on_image(plan: Plan, node: fx.Node) -> Value:
    """A norm of an image, channel by channel, stays what it is."""
    return plan.copy(node, plan.value(node.args[0]))


def _batch_norm(plan: Plan, node: fx.Node, module: Any) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return _on_image(plan, node)
    if value.axes not in (IMAGE, VECTOR):
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}")

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return GroupBatchNorm2d(
            sizes.fields(value.widths),
            plan.group,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            **where,
        )

    return _norm(plan, node, module, value.widths, make, value)


def _instance_norm(plan: Plan, node: fx.Node, module: Any) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return _on_image(plan, node)
    if value.axes != IMAGE:
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}")

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return GroupInstanceNorm2d(
            sizes.fields(value.widths),
            plan.group,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            **where,
        )

    return _norm(plan, node, module, value.widths, make, value)


def _group_norm(plan: Plan, node: fx.Node, module: nn.GroupNorm) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return _on_image(plan, node)
    if value.axes not in (IMAGE, VECTOR):
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}")

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(value.widths)
        most = fields if module.num_groups == module.num_channels else module.num_groups
        groups = max(n for n in range(1, min(most, fields) + 1) if fields % n == 0)
        return GroupGroupNorm2d(groups, fields, plan.group, module.eps, module.affine, **where)

    return _norm(plan, node, module, value.widths, make, value)


def _layer_norm(plan: Plan, node: fx.Node, module: nn.LayerNorm) -> Value:
    value = plan.value(node.args[0])
    if len(module.normalized_shape) != 1:
        raise CannotConvert("", "it learns a scale for every pixel")
    axis = "C" if type(module).__name__ in _CHANNELS_FIRST else value.axes[-1]
    if axis != "C":
        raise CannotConvert("", f"it normalises the last of the axes {value.axes}")
    if value.kind == "image":
        return _on_image(plan, node)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return GroupLayerNorm2d(
            sizes.fields(value.widths), plan.group, module.eps, module.elementwise_affine, **where
        )

    return _norm(plan, node, module, value.widths, make, value)


def _prelu(plan: Plan, node: fx.Node, module: nn.PReLU) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image" or module.num_parameters == 1:
        return plan.copy(node, value)
    initial = _constant(module.weight)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        slope = 0.25 if initial is None else initial
        return GroupPReLU2d(sizes.fields(value.widths), plan.group, slope, **where)

    return _norm(plan, node, module, value.widths, make, value)


# What treats all channels alike


def _pointwise(plan: Plan, node: fx.Node, module: nn.Module) -> Value:
    return plan.copy(node, plan.value(node.args[0]))


def _dropout_of_maps(plan: Plan, node: fx.Node, module: _DropoutNd) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    return pool_step(plan, node, value, lambda: GroupDropout2d(plan.group, module.p))


def pool_step(plan: Plan, node: fx.Node, value: Value, make: Callable[[], nn.Module]) -> Value:
    """A module without parameters in place of an operation on one map."""
    read: Any = node.args[0]
    if value.axes not in (IMAGE,):
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}")
    if node.op == "call_module":
        name = str(node.target)
        if name not in plan.parts:
            plan.add_part(
                Part(name, lambda sizes, where: make(), plan.module(node)), describe(make())
            )
    else:
        owner = str(node.meta.get("owner", ""))
        name = plan.new_name(f"{owner}.{node.name}" if owner else node.name)
        plan.add_part(Part(name, lambda sizes, where: make()))
        plan.rows.append(Row(name, f"{node.target!s}".split(" at ")[0], describe(make())))
    return plan.emit(node, value, lambda e: e.module(name, e[read]))


def max_pool(plan: Plan, node: fx.Node, module: Any) -> Value:
    geometry = _geometry(module)
    if geometry.dilation != 1:
        raise CannotConvert("", "its windows are dilated")
    if getattr(module, "return_indices", False):
        raise CannotConvert("", "it returns the places of the maxima, which a rotation exchanges")

    def make() -> nn.Module:
        return CentredMaxPool2d(
            geometry.kernel, geometry.stride, geometry.padding // 2, module.ceil_mode
        )

    return pool_step(plan, node, plan.value(node.args[0]), make)


def avg_pool(plan: Plan, node: fx.Node, module: Any) -> Value:
    geometry = _geometry(module)
    if module.divisor_override is not None:
        raise CannotConvert("", "its divisor is not the size of its windows")

    def make() -> nn.Module:
        return CentredAvgPool2d(
            geometry.kernel,
            geometry.stride,
            geometry.padding // 2,
            module.ceil_mode,
            module.count_include_pad,
        )

    return pool_step(plan, node, plan.value(node.args[0]), make)


def _blur_pool(plan: Plan, node: fx.Node, module: Any) -> Value:
    read, out = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    if tuple(out.shape[2:]) != tuple((n + 1) // 2 for n in read.shape[2:]):
        raise CannotConvert("", "it blurs without halving")
    return pool_step(plan, node, plan.value(node.args[0]), Downsample2d)


def _symmetric(plan: Plan, node: fx.Node, module: nn.Module) -> Value:
    value = plan.value(node.args[0])
    if value.axes != IMAGE:
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}")
    return plan.copy(node, value)


def _upsample(plan: Plan, node: fx.Node, module: nn.Upsample) -> Value:
    value = plan.value(node.args[0])
    if value.axes != IMAGE:
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}")
    if not resizes_symmetrically(node, module.mode):
        # Nearest pixels of sizes that do not divide each other lie to one side.
        size, factor = module.size, module.scale_factor
        return pool_step(plan, node, value, lambda: nn.Upsample(size, factor, mode="bilinear"))
    return plan.copy(node, value)


def resizes_symmetrically(node: fx.Node, mode: str) -> bool:
    """Whether an interpolation commutes with quarter turns."""
    if not mode.startswith("nearest"):
        return True
    before, after = value_of(node.args[0]).shape[2:], value_of(node).shape[2:]  # type: ignore[arg-type]
    return all(n % m == 0 for m, n in zip(before, after, strict=True))


def _flatten(plan: Plan, node: fx.Node, module: nn.Flatten) -> Value:
    return reshape(plan, node)


def _softmax(plan: Plan, node: fx.Node, module: Any) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    if value.axes[module.dim] != "C":
        raise CannotConvert("", f"it is taken over the axis {value.axes[module.dim]}")
    if value.axes not in (IMAGE, VECTOR):
        raise CannotConvert("", f"it reads a tensor with axes {value.axes}")
    return plan.copy(node, value)


def _sub_pixels(plan: Plan, node: fx.Node, module: nn.Module) -> Value:
    raise CannotConvert("", "it lays channels out as pixels in a frame that does not turn")


_RULES: dict[type[nn.Module], Callable[[Plan, fx.Node, Any], Value]] = {
    nn.Conv2d: _convolution,
    nn.ConvTranspose2d: _transposed,
    nn.Linear: _linear,
    _BatchNorm: _batch_norm,
    _InstanceNorm: _instance_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.PReLU: _prelu,
    nn.Dropout2d: _dropout_of_maps,
    nn.MaxPool2d: max_pool,
    nn.AvgPool2d: avg_pool,
    nn.Upsample: _upsample,
    nn.Flatten: _flatten,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.PixelShuffle: _sub_pixels,
    nn.PixelUnshuffle: _sub_pixels,
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(_SYMMETRIC, _symmetric),
}
