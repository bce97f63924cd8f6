"""What becomes of each function, method and operator in the source's own code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from econv.conversion.answers import check_answers
from econv.conversion.modules import (
    avg_pool,
    convert_module,
    gate_halves,
    max_pool,
    most_groups,
    normalised,
    pool_step,
)
from econv.conversion.plan import OTHER, Emission, Part, Plan, Row, Step, Value, describe
from econv.conversion.resizing import Resizing, adaptive_size, crop, pad, resize
from econv.conversion.shapes import IMAGE, PATHS, VECTOR, permute, reshape
from econv.conversion.trace import (
    ConversionError,
    calls_of,
    live_nodes,
    name_of,
    owner,
    value_of,
)
from econv.conversion.widths import Width, join, runs, slice_runs
from econv.layers import (
    CentredAvgPool2d,
    FieldParameter,
    GroupDropout2d,
    GroupGroupNorm2d,
    GroupInstanceNorm2d,
    GroupPool2d,
)

__all__ = ["convert_node", "find_heads", "pair_with_training"]

_POINTWISE = {
    *("abs", "celu", "clamp", "clamp_min", "clamp_max", "elu", "exp", "gelu", "hardsigmoid"),
    *("hardswish", "hardtanh", "leaky_relu", "log", "log1p", "mish", "neg", "pow", "relu"),
    *("relu6", "rsqrt", "selu", "sigmoid", "silu", "softplus", "softsign", "sqrt", "square"),
    *("tanh", "threshold", "logsigmoid", "sin", "cos", "erf", "reciprocal", "sign", "logical_not"),
    *("clone", "contiguous", "detach", "to", "float", "double", "half", "bfloat16", "type"),
    *("type_as", "requires_grad", "zeros_like", "ones_like", "full_like"),
}
_BINARY = {
    *("add", "iadd", "radd", "sub", "isub", "rsub", "mul", "imul", "rmul", "div", "idiv"),
    *("truediv", "itruediv", "rtruediv", "maximum", "minimum", "pow", "multiply", "subtract"),
    *("addcmul", "addcdiv", "lerp", "where", "hypot", "masked_fill", "logical_and", "logical_or"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert"),
}
_DROPS = frozenset({"dropout", "dropout2d", "feature_dropout", "alpha_dropout"})
_REDUCTIONS = {"mean", "sum", "amax", "amin", "std", "var", "norm", "logsumexp", "vector_norm"}
_RESHAPES = {"flatten", "reshape", "view", "squeeze", "unsqueeze", "reshape_as", "view_as"}
_PERMUTATIONS = {"permute", "transpose", "swapaxes", "movedim"}
_SPLITS = {"chunk", "split", "tensor_split"}
_SOFTMAX = {"softmax", "log_softmax"}
_FILTERING = {"conv1d", "conv2d", "conv_transpose2d", "linear", "unfold", "conv3d"}
_ATTENTION = {"matmul", "bmm", "scaled_dot_product_attention", "einsum", "baddbmm"}


def convert_node(plan: Plan, node: fx.Node) -> None:
    """Plan one operation."""
    if node.op == "output":
        plan.output(node)
        return
    plan.values[node] = _convert(plan, node)


def _convert(plan: Plan, node: fx.Node) -> Value:
    if node.op == "placeholder":
        name, default = plan.trace.signature[node]
        found = plan.emit(
            node, _input(plan, value_of(node)), lambda e: e.graph.placeholder(name, None, default)
        )
        check_answers(plan, node)
        return found
    if node.op == "get_attr":
        return plan.emit(node, Value("parameter"), lambda e: e.copy(node))
    if node.op == "call_module":
        return convert_module(plan, node)
    name = name_of(node)
    values = _inputs(plan, node)
    if name in ("assert", "assert_is_none"):
        if _is_about_arguments(node):
            return plan.copy(node, OTHER)
        return plan.emit(node, OTHER, lambda e: None)  # about the source's own sizes
    if not isinstance(value_of(node), Tensor) and not _is_list_of_tensors(value_of(node)):
        asked = _question(plan, node, values)
        check_answers(plan, node)
        return asked
    if any(value.kind == "left" for value in values):
        return plan.as_in_source(node)
    kinds = {value.kind for value in values}
    if not kinds & {"fields", "image", "list"}:
        if name in ("expand", "expand_as", "repeat") and _is_uniform(node):
            return plan.copy(node, Value("image", IMAGE))
        if name in ("zeros", "ones", "full") and value_of(node).ndim == 4:
            return plan.copy(node, Value("image", IMAGE))
        return plan.copy(node, Value("invariant" if "invariant" in kinds else "parameter"))
    try:
        return _tensor_function(plan, node, name, values)
    except ConversionError as error:
        here = owner(node) or node.name
        if plan.strict or error.module not in ("", here):
            raise ConversionError(error.module or here, error.reason) from None
        return plan.leave(node, error.reason)


def _input(plan: Plan, value: Any) -> Value:
    if not isinstance(value, Tensor):
        return OTHER
    if value.ndim == 4:
        return Value("image", IMAGE)
    images = [value_of(n) for n in plan.trace.signature if isinstance(value_of(n), Tensor)]
    shapes = [(x.shape[0], *x.shape[2:]) for x in images if x.ndim == 4]
    return Value("image", ("N", "H", "W")) if tuple(value.shape) in shapes else Value("invariant")


def _is_uniform(node: fx.Node) -> bool:
    """Whether an expansion gives every pixel the same numbers."""
    before, after = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    return bool(before.ndim == after.ndim == 4 and before.shape[2:].numel() == 1)


def _positional(shape: tuple[int, ...], axes: tuple[str, ...]) -> str | None:
    """Why a tensor that does not turn cannot meet one with these axes, if it cannot."""
    aligned = zip(reversed(axes), reversed(shape), strict=False)
    if all(size == 1 for axis, size in aligned if axis not in ("N", "P", "C")):
        return None
    return (
        f"a parameter or constant of shape {shape} belongs to positions: a fixed positional "
        "embedding does not turn with the image"
    )


def _is_about_arguments(node: fx.Node) -> bool:
    """Whether an assertion says that an argument is the one that was traced."""
    reads = list(node.all_input_nodes)
    while reads and all(r.op == "call_function" and name_of(r) in ("eq", "is") for r in reads):
        reads = [before for read in reads for before in read.all_input_nodes]
    return bool(reads) and all(
        r.op == "placeholder" and not isinstance(value_of(r), Tensor) for r in reads
    )


def _inputs(plan: Plan, node: fx.Node) -> list[Value]:
    return [plan.value(read) for read in node.all_input_nodes]


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value)


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _known(argument: Any) -> Any:
    """An argument with the numbers of the traced pass in place of its nodes."""
    return fx.node.map_arg(argument, value_of) if argument is not None else None


def _question(plan: Plan, node: fx.Node, values: list[Value]) -> Value:
    """A size, a dtype, a device: asked of the converted tensor, in the source's order of axes."""
    value = values[0] if values else OTHER
    moved = value.kind == "fields" and value.axes != value.layout
    if not moved:
        return plan.copy(node, OTHER)
    name, read = name_of(node), node.args[0]
    if name == "size" and len(node.args) == 2 and value.axes[_known(node.args[1])] != "1":
        axis = value.axes[_known(node.args[1])]
        return plan.emit(
            node,
            OTHER,
            lambda e: e.method("size", e[read], value.place(axis)),  # type: ignore[index]
        )
    if name == "getattr" and node.args[1] in ("dtype", "device"):
        return plan.copy(node, OTHER)
    if "1" in value.axes:
        raise ConversionError(owner(node), f"{name} of a tensor with axes {value.axes}")
    order = tuple(value.place(axis) for axis in value.axes)
    if name == "size" or (name == "getattr" and node.args[1] == "shape"):
        return plan.emit(
            node,
            OTHER,
            lambda e: e.function(sizes_in_order, e[read], order),  # type: ignore[index]
        )
    raise ConversionError(owner(node), f"{name} of a tensor with axes {value.axes}")


def sizes_in_order(x: Tensor, order: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of a tensor, in the order of the axes that the source had."""
    return tuple(x.shape[i] for i in order)


def _tensor_function(plan: Plan, node: fx.Node, name: str, values: list[Value]) -> Value:
    if name == "getitem":
        return _getitem(plan, node)
    if name == "getattr" and values[0].axes == ("extrema",):
        return _values_of_extrema(plan, node, values[0])
    if any(value.kind == "list" for value in values):
        raise ConversionError("", f"{name} of parts of a feature map")
    if name in _DROPS:
        return _dropout(plan, node, name)
    if name in _POINTWISE and len([v for v in values if v.kind != "other"]) == 1:
        return plan.copy(node, values[0])
    if name in _BINARY:
        return _elementwise(plan, node)
    if name == "cat" or name == "concat" or name == "concatenate":
        return _concatenate(plan, node)
    if name in _SPLITS:
        return _split(plan, node)
    if name in _REDUCTIONS:
        return _reduce(plan, node, name)
    if name in _RESHAPES:
        return reshape(plan, node)
    if name in _PERMUTATIONS:
        return permute(plan, node, _order(node, name))
    if name in _SOFTMAX:
        return _softmax(plan, node)
    if name == "expand_as" or name == "expand":
        return _expand(plan, node)
    if name in _RULES:
        return _RULES[name](plan, node)
    if name in _ATTENTION:
        raise ConversionError(
            "", f"{name}: attention over positions has no equivariant counterpart"
        )
    inside = type(plan.trace.modules.get(owner(node))).__name__
    if name in _FILTERING:
        raise ConversionError(
            "",
            f"there is no rule for the function {name} of {inside}: only modules with filters of "
            "their own become PDO-eConvs",
        )
    raise ConversionError("", f"there is no rule for the function {name} of {inside}")


def _order(node: fx.Node, name: str) -> tuple[int, ...]:
    """The permutation of a permuting function, read off a tensor of small sizes."""
    rank = value_of(node.args[0]).ndim  # type: ignore[arg-type]
    probe = torch.empty(tuple(range(1, rank + 1)))
    args, kwargs = _known(node.args[1:]), _known(node.kwargs)
    target: Any = node.target
    moved = (
        getattr(probe, target)(*args, **kwargs)
        if node.op == "call_method"
        else target(probe, *args, **kwargs)
    )
    return tuple(size - 1 for size in moved.shape)


# Sums, products


def _elementwise(plan: Plan, node: fx.Node) -> Value:
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
        _join_operand(plan, node, read, whole, readers)
    axes = whole.axes
    pixels = [plan.value(r) for r in fields if plan.value(r).axes == axes]

    def step(e: Emission) -> fx.Node:
        here = {read: reader(e) for read, reader in readers.items()}
        return e.graph.node_copy(node, lambda n: here.get(n, e.found.get(n, n)))

    return plan.emit(node, pixels[0] if whole not in pixels else whole, step)


def _join_operand(
    plan: Plan, node: fx.Node, read: fx.Node, whole: Value, readers: dict[fx.Node, Step]
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
            pool = plan.insert(here, "orientations", lambda: GroupPool2d(plan.group, plan.reduce))
            readers[read] = lambda e: e.module(pool, e[read])
        else:
            raise ConversionError("", f"it joins {value.channels} and {whole.channels} channels")
        return
    if value.kind == "parameter":
        readers[read] = _field_parameter(plan, node, read, whole)
        return
    positional = _positional(shape, whole.axes) if value.kind != "image" else None
    if positional:
        raise ConversionError("", positional)
    place = len(shape) - len(whole.axes) + whole.axes.index("C")
    channels = shape[place] if place >= 0 else 1
    if whole.axes not in (IMAGE, VECTOR):
        raise ConversionError("", f"it joins an image and group features with axes {whole.axes}")
    if channels == 1:
        return
    if value.kind != "image" and value.axes not in (IMAGE, VECTOR):
        raise ConversionError("", f"a tensor of shape {shape} meets group features")
    known = value if value.axes else replace(value, axes=IMAGE[: len(shape)])
    spread, reader = plan.spread(read, known, here)
    join(whole.widths, spread.widths)
    readers[read] = reader


def _field_parameter(plan: Plan, node: fx.Node, read: fx.Node, whole: Value) -> Step:
    """A parameter with one number per channel, as one with one number per field."""
    tensor = value_of(read)
    shape = tuple(tensor.shape)
    if tensor.numel() == 1:
        return lambda e: e[read]
    place = len(shape) - len(whole.axes) + whole.axes.index("C")
    positional = _positional(shape, whole.axes)
    if positional or place < 0 or shape[place] != tensor.numel():
        raise ConversionError("", positional or f"a parameter of shape {shape} meets an image")
    if tensor.numel() != whole.channels:
        raise ConversionError("", f"a parameter of shape {shape} meets {whole.channels} channels")
    source = _parameter_behind(read)
    name = str(source.target)
    given = plan.trace.attribute(name)
    widths = whole.widths
    learned = isinstance(given, nn.Parameter) and given.requires_grad
    initial = float(given.detach().double().mean()) if not given.is_meta else 1.0
    pixels = whole.axes != VECTOR

    def make(sizes: Any, where: dict[str, Any]) -> nn.Module:
        module = FieldParameter(sizes.fields(widths), plan.group, initial, pixels, **where)
        return module.requires_grad_(learned)

    def fit(kept: Any, module: Any) -> float | None:
        with torch.no_grad():
            module.weight.copy_(given.detach().flatten()[kept.channels(widths)])
        return None

    if name in plan.parts:
        join(plan.parts[name].into, widths)
    else:
        plan.add_part(Part(name, make, None, 0, widths, (), fit))
        plan.rows.append(Row(name, f"Parameter{shape}", f"FieldParameter({plan.group.name})"))
    return lambda e: e.module(name)


def _parameter_behind(node: fx.Node) -> fx.Node:
    """The attribute that an expression of one parameter reads."""
    while node.op != "get_attr":
        reads = [r for r in node.all_input_nodes if isinstance(value_of(r), Tensor)]
        same = node.op == "call_method" and node.target in (
            *("view", "reshape", "unsqueeze", "to", "type_as", "expand", "expand_as", "contiguous"),
            *("squeeze", "float"),
        )
        if len(reads) != 1 or not (same or name_of(node) in ("getitem", "reshape", "unsqueeze")):
            raise ConversionError(
                "", f"it computes a number for every channel: {node.format_node()}"
            )
        node = reads[0]
    return node


def _elementwise_images(
    plan: Plan, node: fx.Node, tensors: list[fx.Node], shape: tuple[int, ...]
) -> Value:
    images = [plan.value(r) for r in tensors if plan.value(r).kind == "image"]
    longest = max(images, key=lambda value: len(value.axes))
    for read in tensors:
        positional = _positional(tuple(value_of(read).shape), longest.axes)
        if plan.value(read).kind != "image" and positional:
            raise ConversionError("", positional)
    if len(longest.axes) != len(shape):
        raise ConversionError("", f"an image is broadcast to {shape}")
    return plan.copy(node, longest)


def _expand(plan: Plan, node: fx.Node) -> Value:
    """Broadcasting does what an expansion says; the operation that follows does it by itself."""
    read: Any = node.args[0]
    value = plan.value(read)
    before, after = value_of(read).shape, value_of(node).shape
    if value.kind != "fields":
        axes = value.axes if value.kind == "image" else IMAGE[-len(after) :]
        positional = _positional(tuple(before), axes)
        if value.kind != "image" and (positional or len(before) != len(after)):
            raise ConversionError("", positional or f"it expands {tuple(before)}")
        return plan.copy(node, replace(value, kind="image", axes=axes))
    place = value.axes.index("C")
    if len(before) != len(after) or before[place] != after[place] or before[0] != after[0]:
        raise ConversionError("", f"it expands {tuple(before)} to {tuple(after)}")
    return plan.emit(node, value, lambda e: e[read])


# Rows of channels


def _channel_axis(value: Value, axis: Any) -> bool:
    return bool(value.axes) and value.axes[_known(axis)] == "C"


def _concatenate(plan: Plan, node: fx.Node) -> Value:
    parts: Any = _argument(node, 0, "tensors")
    axis = _argument(node, 1, "dim", 0)
    values = [plan.value(part) for part in parts]
    if all(value.kind in ("image", "invariant", "parameter") for value in values):
        images = [value for value in values if value.kind == "image"]
        if not _channel_axis(images[0], axis):
            raise ConversionError("", "it concatenates positions")
        _check_positions(parts, values, images[0])
        return plan.copy(node, images[0])
    whole = next(value for value in values if value.kind == "fields")
    if not _channel_axis(whole, axis):
        raise ConversionError("", "it concatenates group features along an axis of positions")
    _check_positions(parts, values, whole)
    readers: dict[fx.Node, Step] = {}
    widths: list[Width] = []
    for part, value in zip(parts, values, strict=True):
        found = value
        if value.kind in ("image", "invariant"):
            known = value if value.axes else replace(value, axes=IMAGE[: value_of(part).ndim])
            found, readers[part] = plan.spread(part, known, owner(node) or node.name)
        if found.kind != "fields" or found.axes != whole.axes:
            raise ConversionError("", f"it concatenates tensors with axes {found.axes}")
        widths += found.widths

    def step(e: Emission) -> fx.Node:
        here = {part: reader(e) for part, reader in readers.items()}
        tensors = [here.get(part, e.found.get(part)) for part in parts]
        return e.function(torch.cat, tensors, 1)

    return plan.emit(node, replace(whole, widths=tuple(widths)), step)


def _stack(plan: Plan, node: fx.Node) -> Value:
    """Maps of equally many fields, as paths."""
    parts: Any = _argument(node, 0, "tensors")
    values = [plan.value(part) for part in parts]
    first = values[0]
    paths = _known(_argument(node, 1, "dim", 0)) in (1, -4)
    if not paths or any(value.kind != "fields" or value.axes != IMAGE for value in values):
        raise ConversionError(
            "", "it stacks tensors other than maps of features along a new axis 1"
        )
    for value in values[1:]:
        join(first.widths, value.widths)
    return plan.emit(
        node,
        replace(first, axes=PATHS),
        lambda e: e.function(torch.stack, [e[part] for part in parts], 1),
    )


def _check_positions(parts: Any, values: list[Value], whole: Value) -> None:
    for part, value in zip(parts, values, strict=True):
        if value.kind in ("invariant", "parameter"):
            positional = _positional(tuple(value_of(part).shape), whole.axes)
            if positional:
                raise ConversionError("", positional)


def _split(plan: Plan, node: fx.Node) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    axis = _argument(node, 2, "dim", 0)
    if value.kind == "image" and _channel_axis(value, axis):
        return plan.copy(node, Value("list", items=(value,) * len(value_of(node))))
    if value.kind != "fields" or not _channel_axis(value, axis):
        raise ConversionError("", "it divides positions")
    items: list[Value] = []
    position = 0
    place = value.axes.index("C")
    for piece in value_of(node):
        size = int(piece.shape[place])
        before, within = slice_runs(value.widths, position, position + size)
        items.append(replace(value, widths=tuple(within), start=tuple(before)))
        position += size
    return plan.emit(node, Value("list", value.axes, items=tuple(items)), lambda e: e[read])


def _getitem(plan: Plan, node: fx.Node) -> Value:
    read: Any = node.args[0]
    index: Any = node.args[1]
    value = plan.value(read)
    if value.kind == "list":
        if value.axes == ("extrema",):
            return _values_of_extrema(plan, node, value)
        item = value.items[_known(index)]
        if item.kind == "image":
            return plan.copy(node, item)
        return plan.emit(node, item, _slice_fields(read, item))
    if value.kind == "invariant":
        return plan.copy(node, value)
    entries = index if isinstance(index, tuple) else (index,)
    if None in entries and all(entry in (None, slice(None)) for entry in entries):
        return reshape(plan, node)
    if Ellipsis in entries or len(entries) > len(value.axes):
        raise ConversionError("", f"it indexes group features by {index}")
    if any(not isinstance(entry, slice) for entry in entries):
        raise ConversionError("", f"it takes out single rows, columns or channels: {index}")
    full = slice(None)
    given = dict(zip(value.axes, (*entries, *[full] * len(value.axes)), strict=False))
    by_axis = {axis: _known(entry) for axis, entry in given.items()}
    sizes = dict(zip(value.axes, value_of(read).shape, strict=True))
    if by_axis["N"] != full:
        raise ConversionError("", "it takes out images of the batch")
    rows, columns = (by_axis.get(axis, full) for axis in "HW")
    if (rows, columns) != (full, full):
        if by_axis["C"] != full or value.axes != IMAGE:
            raise ConversionError("", f"it indexes group features by {index}")
        from_first = rows.start in (None, 0) and rows.stop is None and rows == columns
        if from_first and rows.step is not None:
            stride = int(rows.step)
            return pool_step(plan, node, value, lambda: CentredAvgPool2d(1, stride))
        return crop(plan, node, value, given["H"], given["W"])
    start, stop, step = by_axis["C"].indices(sizes["C"])
    if value.kind == "image":
        return plan.copy(node, value)
    if step != 1:
        raise ConversionError("", f"it takes every {step}th channel")
    before, within = slice_runs(value.widths, start, stop)
    item = replace(value, widths=tuple(within), start=tuple(before))
    return plan.emit(node, replace(item, start=()), _slice_fields(read, item))


def _slice_fields(read: fx.Node, item: Value) -> Step:
    def step(e: Emission) -> fx.Node:
        order = e.plan.group.order
        start = e.sizes.fields(item.start) * order
        return e.method("narrow", e[read], 1, start, e.sizes.fields(item.widths) * order)

    return step


# Reductions


def _reduce(plan: Plan, node: fx.Node, name: str) -> Value:
    read: Any = node.args[0]
    value = plan.value(read)
    dims, keep, options = _reduction(node, name)
    if dims is None:
        dims = tuple(range(len(value.axes)))
    chosen = (dims,) if isinstance(dims, int) else tuple(dims)
    gone = {value.axes[d] for d in chosen}
    if len(gone & {"H", "W"}) == 1:
        raise ConversionError("", f"{name} takes rows and columns apart")
    if value.kind == "image" and isinstance(value_of(node), Tensor):
        if keep:
            pixels = "H" not in gone
            return plan.copy(node, Value("image" if pixels else "invariant", value.axes))
        axes = _without(value.axes, gone)
        return plan.copy(node, Value("image" if "H" in axes else "invariant", axes))
    if "N" in gone:
        raise ConversionError("", f"{name} over the batch")
    axes = value.axes if keep else _without(value.axes, gone)
    if "1" in value.axes or ("P" in gone and keep):
        raise ConversionError("", f"{name} of group features with axes {value.axes}")
    new_dims = sorted(value.place(axis) for axis in gone)
    order = value.layout

    def step(e: Emission) -> fx.Node:
        target: Any = node.target
        wanted = {**options, "dim": new_dims, "keepdim": keep}
        if name in ("max", "min"):
            found = e.function(getattr(torch, f"a{name}"), e[read], **wanted)
        elif node.op == "call_method":
            found = e.graph.call_method(target, (e[read],), wanted)
        else:
            found = e.graph.call_function(target, (e[read],), wanted)
        if "C" in gone and keep and value.axes != order:
            found = e.method("permute", found, *(order.index(axis) for axis in value.axes))
        return found

    if "C" not in gone:
        return plan.emit(node, replace(value, axes=axes), step)
    kind = "image" if "H" in axes and "H" not in gone else "invariant"
    return plan.emit(node, Value(kind, axes), step)


_NAMES_OF_REDUCTIONS = {
    "norm": ("p", "dim", "keepdim"),
    "vector_norm": ("ord", "dim", "keepdim"),
    "std": ("dim", "unbiased", "keepdim"),
    "var": ("dim", "unbiased", "keepdim"),
}


def _reduction(node: fx.Node, name: str) -> tuple[Any, bool, dict[str, Any]]:
    """The axes of a reduction, whether they stay, and its other arguments by name."""
    given = [_known(argument) for argument in node.args[1:]]
    names: tuple[str, ...] = _NAMES_OF_REDUCTIONS.get(name, ("dim", "keepdim"))
    if name in ("std", "var") and given and isinstance(given[0], bool):
        names = names[1:]
    options = dict(zip(names, given, strict=False))
    same = {"axis": "dim", "keepdims": "keepdim"}
    options |= {same.get(key, key): _known(found) for key, found in node.kwargs.items()}
    unbiased = options.pop("unbiased", None)
    if unbiased is not None:
        options["correction"] = int(unbiased)
    return options.pop("dim", None), bool(options.pop("keepdim", False)), options


def _extremum(plan: Plan, node: fx.Node) -> Value:
    """`max` and `min`: of two tensors, or along an axis, with the places beside the numbers."""
    if len([r for r in node.all_input_nodes if isinstance(value_of(r), Tensor)]) > 1:
        return _elementwise(plan, node)
    if isinstance(value_of(node), Tensor):
        return _reduce(plan, node, name_of(node))
    if any(user.users and not _reads_values(user) for user in node.users):
        raise ConversionError("", "it reads the places of extrema, which a rotation exchanges")
    found = _reduce(plan, node, name_of(node))
    return Value("list", ("extrema",), items=(found,))


def _reads_values(node: fx.Node) -> bool:
    return name_of(node) in ("getitem", "getattr") and _known(node.args[1]) in (0, "values")


def _values_of_extrema(plan: Plan, node: fx.Node, value: Value) -> Value:
    if not _reads_values(node):  # and nothing reads it
        return plan.emit(node, OTHER, lambda e: None)
    return plan.emit(node, value.items[0], lambda e: e[node.args[0]])  # type: ignore[index]


def _place_of_extremum(plan: Plan, node: fx.Node) -> Value:
    """`argmax` of the classes of a map that has been read out."""
    value = plan.value(node.args[0])
    axis = _known(_argument(node, 1, "dim"))
    if value.kind != "image" or axis is None or not _channel_axis(value, axis):
        raise ConversionError("", "it takes the place of an extremum that a rotation moves")
    keep = bool(_known(_argument(node, 2, "keepdim", False)))
    return plan.copy(node, value if keep else Value("image", _without(value.axes, {"C"})))


def _without(axes: tuple[str, ...], gone: set[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in gone)


def _softmax(plan: Plan, node: fx.Node) -> Value:
    value = plan.value(node.args[0])
    if value.kind == "image":
        return plan.copy(node, value)
    axis = _argument(node, 1, "dim")
    if axis is not None and value.axes == PATHS and _known(axis) == 1:
        return plan.copy(node, value)
    if axis is None or not _channel_axis(value, axis) or value.axes not in (IMAGE, VECTOR):
        raise ConversionError("", "softmax over positions: attention has no counterpart here")
    return plan.copy(node, value)


# Norms


def _learned(
    plan: Plan, node: fx.Node, value: Value, weight: Any, bias: Any
) -> Callable[[Emission, Any], Any]:
    """What a norm does last: numbers for every channel, as numbers for every field."""
    last = value if value.axes == VECTOR else replace(value, axes=("N", "H", "W", "C"))
    scale, shift = (
        _field_parameter(plan, node, found, last) if isinstance(found, fx.Node) else None
        for found in (weight, bias)
    )

    def step(e: Emission, x: Any) -> Any:
        if scale is not None:
            x = e.function(operator.mul, x, scale(e))
        return x if shift is None else e.function(operator.add, x, shift(e))

    return step


def _norm_over_channels(plan: Plan, node: fx.Node) -> Value:
    """`layer_norm` and `rms_norm` of the channels of every pixel."""
    read: Any = node.args[0]
    value = plan.value(read)
    shape = _known(_argument(node, 1, "normalized_shape"))
    if len(shape) != 1 or value.axes[-1] != "C":
        raise ConversionError("", f"it normalises the last of the axes {value.axes}")
    if value.kind == "image":
        return plan.copy(node, value)
    centred = name_of(node) == "layer_norm"
    bias = _argument(node, 3, "bias") if centred else None
    learned = _learned(plan, node, value, _argument(node, 2, "weight"), bias)
    eps = _known(_argument(node, 4, "eps", 1e-5) if centred else _argument(node, 3, "eps"))

    def step(e: Emission) -> Any:
        return learned(e, normalised(e, e[read], centred, eps, value_of(read).dtype))

    return plan.emit(node, value, step)


def _norm_of_fields(plan: Plan, node: fx.Node) -> Value:
    """`instance_norm` and `group_norm`: the layer without numbers of its own, and the numbers."""
    read: Any = node.args[0]
    value = plan.value(read)
    instances = name_of(node) == "instance_norm"
    if value.kind == "image":
        return plan.copy(node, value)
    if value.axes != IMAGE:
        raise ConversionError("", f"it reads a tensor with axes {value.axes}")
    places = (("weight", 3), ("bias", 4), ("eps", 7)) if instances else _GROUP_NORM
    weight, bias, eps = (_argument(node, place, name) for name, place in places)
    if instances and (
        _argument(node, 1, "running_mean") is not None
        or not _known(_argument(node, 5, "use_input_stats", True))
    ):
        raise ConversionError("", "its running statistics belong to channels: use the module")
    known = 1e-5 if eps is None else float(_known(eps))
    groups = None if instances else int(_known(_argument(node, 1, "num_groups")))
    learned = _learned(plan, node, value, weight, bias)

    def make(sizes: Any, where: dict[str, Any]) -> nn.Module:
        fields = sizes.fields(value.widths)
        if groups is None:
            return GroupInstanceNorm2d(fields, plan.group, known, affine=False)
        fitting = most_groups(groups, value.channels, fields)
        return GroupGroupNorm2d(fitting, fields, plan.group, known, affine=False)

    name = plan.new_name(f"{owner(node)}_{node.name}" if owner(node) else node.name)
    plan.add_part(Part(name, make, None, 0, value.widths))
    plan.rows.append(Row(name, name_of(node), describe))
    return plan.emit(node, value, lambda e: learned(e, e.module(name, e[read])))


_GROUP_NORM = (("weight", 2), ("bias", 3), ("eps", 4))


def _normalize(plan: Plan, node: fx.Node) -> Value:
    """`normalize`: each pixel's channels to length one."""
    read: Any = node.args[0]
    value = plan.value(read)
    if not _channel_axis(value, _argument(node, 2, "dim", 1)):
        raise ConversionError("", "it normalises over positions, or over the batch")
    if value.kind == "image":
        return plan.copy(node, value)
    options = {"p": _known(_argument(node, 1, "p", 2.0)), "eps": _argument(node, 3, "eps", 1e-12)}
    return plan.emit(
        node, value, lambda e: e.function(functional.normalize, e[read], dim=1, **options)
    )


def _glu(plan: Plan, node: fx.Node) -> Value:
    return gate_halves(plan, node, _known(_argument(node, 1, "dim", -1)))


# Functions that have modules


@dataclass
class _PoolArguments:
    """The arguments of a pooling function, as its module would hold them."""

    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any = 1
    ceil_mode: bool = False
    return_indices: bool = False
    count_include_pad: bool = True
    divisor_override: Any = None


def _pooling(plan: Plan, node: fx.Node, names: tuple[str, ...], convert: Any) -> Value:
    arguments: dict[str, Any] = {"stride": None, "padding": 0}
    for place, name in enumerate(names, start=1):
        found = _known(_argument(node, place, name, ...))
        if found is not ...:
            arguments[name] = found
    arguments["stride"] = arguments["stride"] or arguments["kernel_size"]
    result: Value = convert(plan, node, _PoolArguments(**arguments))
    return result


def _max_pool(plan: Plan, node: fx.Node) -> Value:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    return _pooling(plan, node, names, max_pool)


def _avg_pool(plan: Plan, node: fx.Node) -> Value:
    names = (
        *("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
        "divisor_override",
    )
    return _pooling(plan, node, names, avg_pool)


def _adaptive(plan: Plan, node: fx.Node) -> Value:
    return adaptive_size(plan, node, _argument(node, 1, "output_size"))


def _interpolate(plan: Plan, node: fx.Node) -> Value:
    given = Resizing(
        _argument(node, 1, "size"),
        _argument(node, 2, "scale_factor"),
        str(_argument(node, 3, "mode", "nearest")),
        _argument(node, 4, "align_corners"),
        bool(_argument(node, 6, "antialias", False)),
    )
    return resize(plan, node, given)


def pair_with_training(plan: Plan) -> None:
    """Find what each node is when the source is trained; say so where it is something else."""
    trained = plan.trace.training
    if isinstance(trained, str):
        plan.notes.append(
            f"in training the source computes something else, which was not followed: {trained}"
        )
        return
    ours, theirs = live_nodes(plan.trace.graph), live_nodes(trained.graph)
    calls, others = calls_of(ours, _DROPS), calls_of(theirs, _DROPS)
    if calls == others:
        plan.in_training = dict(zip(ours, theirs, strict=True))
        return
    pairs = zip(theirs, others, strict=True)
    first = next((n for i, (n, c) in enumerate(pairs) if calls[i : i + 1] != [c]), theirs[-1])
    plan.notes.append(
        f"in training the source computes something else, from {owner(first) or first.name} on; "
        "the converted network does what the source does in eval mode"
    )


def _dropout(plan: Plan, node: fx.Node, name: str) -> Value:
    """A function that drops, as a module that knows whether it is trained."""
    value = plan.value(node.args[0])
    p = float(_known(_argument(node, 1, "p", 0.5)))
    drops, trained = _drops(node, name), plan.in_training.get(node)
    if drops:
        if value.kind == "fields" and name in ("dropout2d", "feature_dropout"):
            raise ConversionError("", "it drops whole maps in eval mode too")
        plan.notes.append(
            f"{owner(node) or node.name}: it drops in eval mode too, as in the source"
        )
        return plan.copy(node, value)
    if trained is not None and not _drops(trained, name):
        plan.notes.append(f"{owner(node) or node.name}: it never drops, and is gone")
        return plan.emit(node, value, lambda e: e[node.args[0]])  # type: ignore[index]

    def make() -> nn.Module:
        if name in ("dropout", "alpha_dropout"):
            return nn.Dropout(p) if name == "dropout" else nn.AlphaDropout(p)
        return GroupDropout2d(plan.group, p) if value.kind == "fields" else nn.Dropout2d(p)

    if value.kind == "fields" and name in ("dropout2d", "feature_dropout"):
        return pool_step(plan, node, value, make)
    return module_step(plan, node, value, make)


def _drops(node: fx.Node, name: str) -> bool:
    in_torch = "train" in node.kwargs  # torch.dropout calls it so
    default = name != "alpha_dropout"
    return bool(_known(_argument(node, 2, "train" if in_torch else "training", default)))


def module_step(plan: Plan, node: fx.Node, value: Value, make: Callable[[], nn.Module]) -> Value:
    read: Any = node.args[0]
    part = plan.insert(str(node.meta.get("owner", "")), node.name, make)
    return plan.emit(node, value, lambda e: e.module(part, e[read]))


def _pad(plan: Plan, node: fx.Node) -> Value:
    mode, fill = _argument(node, 2, "mode", "constant"), _argument(node, 3, "value", 0.0)
    return pad(plan, node, _argument(node, 1, "pad"), str(mode), fill)


_RULES: dict[str, Callable[[Plan, fx.Node], Value]] = {
    "max_pool2d": _max_pool,
    "avg_pool2d": _avg_pool,
    "adaptive_avg_pool2d": _adaptive,
    "adaptive_max_pool2d": _adaptive,
    "interpolate": _interpolate,
    "upsample": _interpolate,
    "pad": _pad,
    "stack": _stack,
    "max": _extremum,
    "min": _extremum,
    "argmax": _place_of_extremum,
    "argmin": _place_of_extremum,
    "layer_norm": _norm_over_channels,
    "rms_norm": _norm_over_channels,
    "instance_norm": _norm_of_fields,
    "group_norm": _norm_of_fields,
    "normalize": _normalize,
    "glu": _glu,
}


# Where a network ends

_TRANSPARENT_MODULES: tuple[type[nn.Module], ...] = (
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.Identity,
    nn.LogSoftmax,
    nn.ReLU,
    nn.Sigmoid,
    nn.Softmax,
    nn.Tanh,
    nn.Upsample,
    nn.Dropout,
)
_TRANSPARENT = (
    _POINTWISE
    | _RESHAPES
    | _SOFTMAX
    | _PERMUTATIONS
    | {"add", "iadd", "sub", "mean", "interpolate", "adaptive_avg_pool2d", "argmax", "cat"}
)


def find_heads(graph: fx.Graph, modules: dict[str, nn.Module]) -> set[fx.Node]:
    """The convolutions and linear maps that end the network, with nothing learned after them.

    An output that other layers end as well, such as the features of a backbone, has no head.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    heads: set[fx.Node] = set()
    for end in output.all_input_nodes:
        found: set[fx.Node] = set()
        stack, seen = [end], set()
        whole = True
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            module = modules.get(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
                found.add(node)
            elif isinstance(module, _TRANSPARENT_MODULES) or (
                node.op in ("call_function", "call_method") and name_of(node) in _TRANSPARENT
            ):
                stack += [r for r in node.all_input_nodes if isinstance(value_of(r), Tensor)]
            elif node.op != "placeholder":
                whole = False
        if whole:
            heads |= found
    return heads
