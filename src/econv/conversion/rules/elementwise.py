"""Functions of single numbers, sums, products and what else meets element by element."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor, fx, nn

from econv.conversion.arguments import no_rule, why_positional
from econv.conversion.per_field import field_parameter
from econv.conversion.plan import VECTOR, Plan, Step, Value
from econv.conversion.registry import rule
from econv.conversion.steps import as_map, smooth_step
from econv.conversion.trace import ConversionError, name_of, owner, value_of
from econv.conversion.widths import join, runs
from econv.layers.activations import ACTIVATIONS


@rule(
    *ACTIVATIONS,
    *(nn.Threshold, nn.RReLU),
    variants=("GELU", "Sigmoid", "Tanh"),
    classes=("Swish", "HardSwish", "HardSigmoid", "GELUTanh"),
)
@rule(
    *("abs", "celu", "clamp", "clamp_min", "clamp_max", "elu", "exp", "gelu", "hardsigmoid"),
    *("hardswish", "hardtanh", "leaky_relu", "log", "log1p", "mish", "neg", "relu", "relu6"),
    *("rsqrt", "selu", "sigmoid", "silu", "softplus", "softsign", "sqrt", "square", "tanh"),
    *("threshold", "logsigmoid", "sin", "cos", "erf", "reciprocal", "sign", "logical_not"),
    *("clone", "contiguous", "detach", "to", "float", "double", "half", "bfloat16", "type"),
    *("type_as", "requires_grad", "zeros_like", "ones_like", "full_like"),
)
def pointwise(plan: Plan, node: fx.Node) -> Value:
    """A function of one tensor that treats all its numbers alike."""
    values = plan.values_read(node)
    if len([value for value in values if value.kind != "other"]) != 1:
        raise no_rule(plan, node)
    function = _function(plan, node) if plan.smooth and values[0].axes == plan.image else None
    if function is None or values[0].kind != "fields" or plan.group.order == 1:
        return plan.copy(node, values[0])
    # Fitted layers after it expect the function that the source has.
    kinked = isinstance(function, _KINKED) and not plan.fitted
    used = nn.SiLU() if kinked else function
    return smooth_step(
        plan,
        node,
        lambda: plan.layer("GroupActivation")(copy.deepcopy(used)),
        lambda: copy.deepcopy(function),
    )


_KINKED = (nn.Hardswish, nn.LeakyReLU, nn.ReLU, nn.ReLU6)


def _function(plan: Plan, node: fx.Node) -> nn.Module | None:
    """The activation that a node is, as a module; none where it is a mere operation."""
    if node.op == "call_module":
        module = plan.module(node)
        return module if type(module) in _CURVED else None
    found = _BY_NAME.get(name_of(node))
    if found is None or len(node.args) > 1 or set(node.kwargs) - {"inplace"}:
        return None
    return found()


_CURVED = tuple(kind for kind in (*ACTIVATIONS, nn.ReLU6) if kind is not nn.Identity)
_BY_NAME: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "hardswish": nn.Hardswish,
    "leaky_relu": nn.LeakyReLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}


@rule(
    *(
        "add",
        "iadd",
        "sub",
        "pow",
        "radd",
        "isub",
        "rsub",
        "mul",
        "imul",
        "rmul",
        "div",
        "idiv",
        "truediv",
        "itruediv",
    ),
    *("rtruediv", "maximum", "minimum", "multiply", "subtract", "addcmul", "addcdiv", "lerp"),
    *("where", "hypot", "masked_fill", "logical_and", "logical_or", "and", "or", "invert"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
def elementwise(plan: Plan, node: fx.Node) -> Value:
    reads = node.all_input_nodes
    tensors = [r for r in reads if isinstance(value_of(r), Tensor) and value_of(r).ndim > 0]
    fields = [r for r in tensors if plan.value(r).kind == "fields"]
    shape = tuple(value_of(node).shape)
    if not fields:
        return _elementwise_images(plan, node, tensors, shape)
    widest = max(fields, key=lambda r: (value_of(r).ndim, plan.value(r).channels))
    whole = plan.value(widest)
    if value_of(widest).ndim != len(shape):
        raise ConversionError("", f"group features are broadcast to {shape}")
    readers: dict[fx.Node, Step] = {}
    for read in tensors:
        _join_operand(plan, node, read, widest, whole, readers)
    return plan.emit(node, whole, lambda e: e.copy(node, readers))


def _join_operand(
    plan: Plan,
    node: fx.Node,
    read: fx.Node,
    widest: fx.Node,
    whole: Value,
    readers: dict[fx.Node, Step],
) -> None:
    """Make one operand fit to group features, or say why it does not."""
    value, shape = plan.value(read), tuple(value_of(read).shape)
    here = owner(node) or node.name
    if value.kind == "fields":
        if value.axes != whole.axes:
            raise ConversionError("", f"it joins tensors with axes {value.axes} and {whole.axes}")
        if value.channels == whole.channels:
            join(whole.widths, value.widths)
        elif value.channels == 1:
            for width in runs(value.widths):
                width.fix(1)
            pool = plan.pool_part(here, value.widths, plan.reduce_to_one)
            readers[read] = lambda e: e.module(pool, e[read])
        else:
            raise ConversionError("", f"it joins {value.channels} and {whole.channels} channels")
        return
    if value.kind == "parameter":
        readers[read] = field_parameter(plan, node, read, whole)
        return
    positional = why_positional(shape, whole.axes) if value.kind != "image" else None
    if positional:
        raise ConversionError("", positional)
    place = len(shape) - len(whole.axes) + whole.axes.index("C")
    channels = shape[place] if place >= 0 else 1
    if channels == 1 and value.kind == "image" and whole.axes not in (plan.image, VECTOR):
        pairs = zip(reversed(value.axes), reversed(whole.axes), strict=False)
        if any(axis not in ("1", "C", other) for axis, other in pairs):
            raise ConversionError("", f"it joins tensors with axes {value.axes} and {whole.axes}")
        readers[read] = as_map(read, value, widest, whole)
        return
    if whole.axes not in (plan.image, VECTOR):
        raise ConversionError("", f"it joins an image and group features with axes {whole.axes}")
    if channels == 1:
        return
    if value.kind != "image" and value.axes not in (plan.image, VECTOR):
        raise ConversionError("", f"a tensor of shape {shape} meets group features")
    known = value if value.axes else replace(value, axes=plan.image[: len(shape)])
    spread, reader = plan.spread(read, known, here)
    join(whole.widths, spread.widths)
    readers[read] = reader


def _elementwise_images(
    plan: Plan, node: fx.Node, tensors: list[fx.Node], shape: tuple[int, ...]
) -> Value:
    images = [plan.value(r) for r in tensors if plan.value(r).kind == "image"]
    longest = max(images, key=lambda value: len(value.axes))
    for read in tensors:
        positional = why_positional(tuple(value_of(read).shape), longest.axes)
        if plan.value(read).kind != "image" and positional:
            raise ConversionError("", positional)
    if len(longest.axes) != len(shape):
        raise ConversionError("", f"an image is broadcast to {shape}")
    return plan.copy(node, longest)


@rule("expand", "expand_as")
def expand(plan: Plan, node: fx.Node) -> Value:
    """Broadcasting does what an expansion says; the operation that follows does it by itself."""
    read, value = plan.first(node)
    before, after = value_of(read).shape, value_of(node).shape
    if value.kind != "fields":
        axes = value.axes if value.kind == "image" else plan.image[-len(after) :]
        positional = why_positional(tuple(before), axes)
        if value.kind != "image" and (positional or len(before) != len(after)):
            raise ConversionError("", positional or f"it expands {tuple(before)}")
        return plan.copy(node, replace(value, kind="image", axes=axes))
    place = value.axes.index("C")
    if len(before) != len(after) or before[place] != after[place] or before[0] != after[0]:
        raise ConversionError("", f"it expands {tuple(before)} to {tuple(after)}")
    return plan.emit(node, value, lambda e: e[read])


@rule("expand", "expand_as", "repeat", constants=True)
def uniform_image(plan: Plan, node: fx.Node) -> Value:
    """An image where an expansion gives every pixel the same numbers."""
    before, after = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    if before.ndim == after.ndim == plan.dimension + 2 and before.shape[2:].numel() == 1:
        return plan.copy(node, Value("image", plan.image))
    return plan.copy_constant(node)


@rule("zeros", "ones", "full", constants=True)
def constant_image(plan: Plan, node: fx.Node) -> Value:
    if value_of(node).ndim == plan.dimension + 2:
        return plan.copy(node, Value("image", plan.image))
    return plan.copy_constant(node)
