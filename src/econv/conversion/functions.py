"""What becomes of each function, method and operator in the source's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from econv.conversion.answers import check_answers
from econv.conversion.arguments import known
from econv.conversion.calls import (
    adaptive,
    avg_pool2d,
    dropout,
    glu,
    interpolate,
    max_pool2d,
    pad2d,
)
from econv.conversion.channels import concatenate, getitem, split, stack
from econv.conversion.elementwise import elementwise, expand
from econv.conversion.modules import convert_module
from econv.conversion.names import (
    ATTENTION,
    BINARY,
    DROPS,
    FILTERING,
    PERMUTATIONS,
    POINTWISE,
    REDUCTIONS,
    RESHAPES,
    SOFTMAX,
    SPLITS,
)
from econv.conversion.norms import norm_of_fields, norm_over_channels, normalize
from econv.conversion.plan import OTHER, Plan, Value
from econv.conversion.reductions import (
    extremum,
    place_of_extremum,
    reduce,
    softmax,
    values_of_extrema,
)
from econv.conversion.shapes import IMAGE, permute, reshape
from econv.conversion.trace import ConversionError, calls_of, live_nodes, name_of, owner, value_of

__all__ = ["convert_node", "pair_with_training"]


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


def _question(plan: Plan, node: fx.Node, values: list[Value]) -> Value:
    """A size, a dtype, a device: asked of the converted tensor, in the source's order of axes."""
    value = values[0] if values else OTHER
    moved = value.kind == "fields" and value.axes != value.layout
    if not moved:
        return plan.copy(node, OTHER)
    name, read = name_of(node), node.args[0]
    if name == "size" and len(node.args) == 2 and value.axes[known(node.args[1])] != "1":
        axis = value.axes[known(node.args[1])]
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
        return getitem(plan, node)
    if name == "getattr" and values[0].axes == ("extrema",):
        return values_of_extrema(plan, node, values[0])
    if any(value.kind == "list" for value in values):
        raise ConversionError("", f"{name} of parts of a feature map")
    if name in DROPS:
        return dropout(plan, node, name)
    if name in POINTWISE and len([v for v in values if v.kind != "other"]) == 1:
        return plan.copy(node, values[0])
    if name in BINARY:
        return elementwise(plan, node)
    if name == "cat" or name == "concat" or name == "concatenate":
        return concatenate(plan, node)
    if name in SPLITS:
        return split(plan, node)
    if name in REDUCTIONS:
        return reduce(plan, node, name)
    if name in RESHAPES:
        return reshape(plan, node)
    if name in PERMUTATIONS:
        return permute(plan, node, _order(node, name))
    if name in SOFTMAX:
        return softmax(plan, node)
    if name == "expand_as" or name == "expand":
        return expand(plan, node)
    if name in _RULES:
        return _RULES[name](plan, node)
    if name in ATTENTION:
        raise ConversionError(
            "", f"{name}: attention over positions has no equivariant counterpart"
        )
    inside = type(plan.trace.modules.get(owner(node))).__name__
    if name in FILTERING:
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
    args, kwargs = known(node.args[1:]), known(node.kwargs)
    target: Any = node.target
    moved = (
        getattr(probe, target)(*args, **kwargs)
        if node.op == "call_method"
        else target(probe, *args, **kwargs)
    )
    return tuple(size - 1 for size in moved.shape)


def pair_with_training(plan: Plan) -> None:
    """Find what each node is when the source is trained; say so where it is something else."""
    trained = plan.trace.training
    if isinstance(trained, str):
        plan.notes.append(
            f"in training the source computes something else, which was not followed: {trained}"
        )
        return
    ours, theirs = live_nodes(plan.trace.graph), live_nodes(trained.graph)
    calls, others = calls_of(ours, DROPS), calls_of(theirs, DROPS)
    if calls == others:
        plan.in_training = dict(zip(ours, theirs, strict=True))
        return
    pairs = zip(theirs, others, strict=True)
    first = next((n for i, (n, c) in enumerate(pairs) if calls[i : i + 1] != [c]), theirs[-1])
    plan.notes.append(
        f"in training the source computes something else, from {owner(first) or first.name} on; "
        "the converted network does what the source does in eval mode"
    )


_RULES: dict[str, Callable[[Plan, fx.Node], Value]] = {
    "max_pool2d": max_pool2d,
    "avg_pool2d": avg_pool2d,
    "adaptive_avg_pool2d": adaptive,
    "adaptive_max_pool2d": adaptive,
    "interpolate": interpolate,
    "upsample": interpolate,
    "pad": pad2d,
    "stack": stack,
    "max": extremum,
    "min": extremum,
    "argmax": place_of_extremum,
    "argmin": place_of_extremum,
    "layer_norm": norm_over_channels,
    "rms_norm": norm_over_channels,
    "instance_norm": norm_of_fields,
    "group_norm": norm_of_fields,
    "normalize": normalize,
    "glu": glu,
}
