"""What becomes of each kind of module."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from econv.conversion.convolutions import (
    Geometry,
    convolution,
    linear,
    plain_convolution,
    transposed_convolution,
)
from econv.conversion.plan import Emission, Part, Plan, Row, Value, describe
from econv.conversion.resizing import PADS, Resizing, adaptive_size, resize
from econv.conversion.shapes import IMAGE, VECTOR, reshape
from econv.conversion.trace import ConversionError, value_of
from econv.conversion.widths import Sizes, Width, join, slice_runs
from econv.layers import (
    CentredAvgPool2d,
    CentredMaxPool2d,
    Downsample2d,
    FieldParameter,
    GroupBatchNorm2d,
    GroupDropout2d,
    GroupGroupNorm2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupPReLU2d,
)
from econv.layers.activations import ACTIVATIONS

__all__ = [
    "POINTWISE",
    "avg_pool",
    "convert_module",
    "gate_halves",
    "is_leaf",
    "max_pool",
    "most_groups",
    "normalised",
    "pool_step",
]

POINTWISE = (*ACTIVATIONS, nn.Threshold, nn.RReLU, nn.Dropout, nn.AlphaDropout)
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
    *("LayerNorm2dFp32", "Linear", "Swish", "GELU", "GELUTanh", "Sigmoid", "Tanh", "HardSwish"),
    "PReLU",
}
_CHANNELS_FIRST = {"LayerNorm2d", "LayerNormAct2d", "LayerNorm2dFp32"}
_BLUR = {"BlurPool2d"}
_RADIX = {"RadixSoftmax"}


def _rule_of(module: nn.Module) -> Callable[[Plan, fx.Node, Any], Value] | None:
    kind = type(module)
    if kind.__name__ in _POINTWISE_NAMES:
        return _pointwise
    if kind.__name__ in _BLUR:
        return _blur_pool
    if kind.__name__ in _RADIX:
        return _radix_softmax
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
    except ConversionError as error:
        if plan.strict or error.module not in ("", str(node.target)):
            raise ConversionError(error.module or str(node.target), error.reason) from None
        if isinstance(module, nn.Conv2d):
            return plain_convolution(plan, node, module, error.reason)
        return plan.leave(node, error.reason)


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
                    own.copy_(given.detach()[kept.channels(widths)] if given.ndim else given)
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
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
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


def _statistics_norm(
    layer: type[GroupBatchNorm2d | GroupInstanceNorm2d], layouts: tuple[tuple[str, ...], ...]
) -> Callable[[Plan, fx.Node, Any], Value]:
    """The rule of norms that may keep running statistics."""

    def rule(plan: Plan, node: fx.Node, module: Any) -> Value:
        value = plan.value(node.args[0])
        if value.kind == "image":
            return _on_image(plan, node)
        if value.axes not in layouts:
            raise ConversionError("", f"it reads a tensor with axes {value.axes}")

        def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
            return layer(
                sizes.fields(value.widths),
                plan.group,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                **where,
            )

        return _norm(plan, node, module, value.widths, make, value)

    return rule


def _group_norm(plan: Plan, node: fx.Node, module: nn.GroupNorm) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return _on_image(plan, node)
    if value.axes not in (IMAGE, VECTOR):
        raise ConversionError("", f"it reads a tensor with axes {value.axes}")

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(value.widths)
        groups = most_groups(module.num_groups, module.num_channels, fields)
        return GroupGroupNorm2d(groups, fields, plan.group, module.eps, module.affine, **where)

    return _norm(plan, node, module, value.widths, make, value)


def most_groups(groups: int, channels: int, fields: int) -> int:
    """How many groups a norm of fields has; one for each field if it was so for channels."""
    most = fields if groups == channels else groups
    return max(n for n in range(1, min(most, fields) + 1) if fields % n == 0)


def normalised(e: Emission, x: Any, centred: bool, eps: float | None, dtype: torch.dtype) -> Any:
    """Group features with the channels of every pixel at mean square one, and at mean zero."""
    if centred:
        x = e.function(operator.sub, x, e.method("mean", x, 1, True))
    power = e.method("mean", e.method("square", x), 1, True)
    least = torch.finfo(dtype).eps if eps is None else eps
    return e.function(operator.mul, x, e.method("rsqrt", e.function(operator.add, power, least)))


def _rms_norm(plan: Plan, node: fx.Node, module: Any) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    if len(module.normalized_shape) != 1 or value.axes[-1] != "C":
        raise ConversionError("", f"it normalises the last of the axes {value.axes}")
    if value.kind == "image":
        return _on_image(plan, node)
    name = str(node.target)
    initial = _constant(module.weight)

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        start = 1.0 if initial is None else initial
        return FieldParameter(
            sizes.fields(value.widths), plan.group, start, value.axes != VECTOR, **where
        )

    if name in plan.parts:
        join(plan.parts[name].into, value.widths)
    elif module.weight is not None:
        fit = _fit_by_channel(value.widths, module, ("weight",))
        plan.add_part(Part(name, make, module, 0, value.widths, (), fit))

    def step(e: Emission) -> Any:
        found = normalised(e, e[read], False, module.eps, value_of(read).dtype)
        if module.weight is None:
            return found
        return e.function(operator.mul, found, e.module(name))

    return plan.emit(node, value, step)


def _glu(plan: Plan, node: fx.Node, module: nn.GLU) -> Value:
    return gate_halves(plan, node, module.dim)


def gate_halves(plan: Plan, node: fx.Node, dim: int) -> Value:
    """The first half of the channels, times a sigmoid of the second."""
    read: Any = node.args[0]
    value = plan.value(read)
    if value.axes[dim] != "C":
        raise ConversionError("", f"it halves the axis {value.axes[dim]}")
    if value.kind == "image":
        return plan.copy(node, value)
    half = value.channels // 2
    before, second = slice_runs(value.widths, half, 2 * half)
    join(before, second)
    widths = tuple(before)

    def step(e: Emission) -> Any:
        number = e.sizes.fields(widths) * e.plan.group.order
        first, gate = (e.method("narrow", e[read], 1, start, number) for start in (0, number))
        return e.function(operator.mul, first, e.method("sigmoid", gate))

    return plan.emit(node, replace(value, widths=widths), step)


def _layer_norm(plan: Plan, node: fx.Node, module: nn.LayerNorm) -> Value:
    value = plan.value(node.args[0])
    if len(module.normalized_shape) != 1:
        raise ConversionError("", "it learns a scale for every pixel")
    axis = "C" if type(module).__name__ in _CHANNELS_FIRST else value.axes[-1]
    if axis != "C":
        raise ConversionError("", f"it normalises the last of the axes {value.axes}")
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
        raise ConversionError("", f"it reads a tensor with axes {value.axes}")
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
    geometry = Geometry.of(module)
    if geometry.dilation != 1:
        raise ConversionError("", "its windows are dilated")
    if getattr(module, "return_indices", False):
        raise ConversionError("", "it returns the places of the maxima, which a rotation exchanges")

    def make() -> nn.Module:
        return CentredMaxPool2d(
            geometry.kernel, geometry.stride, geometry.padding // 2, module.ceil_mode
        )

    return pool_step(plan, node, plan.value(node.args[0]), make)


def avg_pool(plan: Plan, node: fx.Node, module: Any) -> Value:
    geometry = Geometry.of(module)
    if module.divisor_override is not None:
        raise ConversionError("", "its divisor is not the size of its windows")

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
        raise ConversionError("", "it blurs without halving")
    return pool_step(plan, node, plan.value(node.args[0]), Downsample2d)


def _symmetric(plan: Plan, node: fx.Node, module: Any) -> Value:
    return adaptive_size(plan, node, getattr(module, "output_size", 1))


def _upsample(plan: Plan, node: fx.Node, module: nn.Upsample) -> Value:
    corners = getattr(module, "align_corners", None)
    given = Resizing(module.size, module.scale_factor, module.mode, corners)
    return resize(plan, node, given)


def _flatten(plan: Plan, node: fx.Node, module: nn.Flatten) -> Value:
    return reshape(plan, node)


def _softmax(plan: Plan, node: fx.Node, module: Any) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    if value.axes[module.dim] != "C":
        raise ConversionError("", f"it is taken over the axis {value.axes[module.dim]}")
    if value.axes not in (IMAGE, VECTOR):
        raise ConversionError("", f"it reads a tensor with axes {value.axes}")
    return plan.copy(node, value)


def _radix_softmax(plan: Plan, node: fx.Node, module: Any) -> Value:
    """Weights of the paths of split attention, from features without positions."""
    read: Any = node.args[0]
    value = plan.value(read)
    if module.cardinality != 1 or value.axes != IMAGE:
        raise ConversionError("", "its paths are divided into groups")
    if module.radix == 1:
        return plan.emit(
            node,
            replace(value, axes=VECTOR),
            lambda e: e.method("sigmoid", e.method("flatten", e[read], 1)),
        )
    number = value.channels // module.radix
    rows = [slice_runs(value.widths, i * number, (i + 1) * number)[1] for i in range(module.radix)]
    for row in rows[1:]:
        join(rows[0], row)

    def step(e: Emission) -> fx.Node:
        paths = e.method("unflatten", e.method("flatten", e[read], 1), 1, (module.radix, -1))
        return e.method("flatten", e.method("softmax", paths, 1), 1)

    return plan.emit(node, replace(value, axes=VECTOR), step)


def _along_channels(plan: Plan, node: fx.Node, module: nn.Conv1d) -> Value:
    """A filter along the channels, as in efficient channel attention: along fields, for each
    orientation alone.
    """
    read: Any = node.args[0]
    value = plan.value(read)
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


def _sub_pixels(plan: Plan, node: fx.Node, module: nn.Module) -> Value:
    raise ConversionError("", "it lays channels out as pixels in a frame that does not turn")


_RULES: dict[type[nn.Module], Callable[[Plan, fx.Node, Any], Value]] = {
    nn.Conv2d: convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.Linear: linear,
    nn.Conv1d: _along_channels,
    _BatchNorm: _statistics_norm(GroupBatchNorm2d, (IMAGE, VECTOR)),
    _InstanceNorm: _statistics_norm(GroupInstanceNorm2d, (IMAGE,)),
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.PReLU: _prelu,
    nn.RMSNorm: _rms_norm,
    nn.GLU: _glu,
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
    **PADS,
}
