"""What becomes of each operation of the source: its rule, or what needs none."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx, nn

from econv.conversion.answers import check_answers
from econv.conversion.arguments import known, no_rule
from econv.conversion.network import sizes_in_order
from econv.conversion.plan import OTHER, Plan, Value
from econv.conversion.registry import Rule
from econv.conversion.rules import dropping, rule_of, rule_of_module
from econv.conversion.trace import (
    LEAVE,
    ConversionError,
    calls_of,
    line_of,
    live_nodes,
    name_of,
    owner,
    value_of,
)

__all__ = ["convert_node", "is_image", "is_leaf", "pair_with_training"]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is converted as one; others are looked into."""
    if rule_of_module(module) is not None:
        return True
    inside = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return type(module).__module__.startswith("torch.nn.") and not inside


def is_image(value: Any, dimension: int = 2) -> bool:
    """Whether an input is a batch of images, or of bags of images; with dimension 3 of volumes."""
    return isinstance(value, Tensor) and value.ndim in (dimension + 2, dimension + 3)


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
    if node.op != "call_module":
        if name_of(node) in ("assert", "assert_is_none"):
            if _is_about_arguments(node):
                return plan.copy(node, OTHER)
            return plan.emit(node, OTHER, lambda e: None)  # about the source's own sizes
        if not isinstance(value_of(node), Tensor) and not _is_list_of_tensors(value_of(node)):
            asked = _question(plan, node)
            check_answers(plan, node)
            return asked
    kinds = {value.kind for value in plan.values_read(node)}
    if "left" in kinds:
        return plan.as_in_source(node)
    if not kinds & {"fields", "image", "list"}:
        of_constants = rule_of(node, plan.trace.modules, constants=True)
        return of_constants.convert(plan, node) if of_constants else plan.copy_constant(node)
    return _by_rule(plan, node, rule_of(node, plan.trace.modules))


def _by_rule(plan: Plan, node: fx.Node, rule: Rule | None) -> Value:
    """Plan a call that reads something that turns."""
    lists = any(value.kind == "list" for value in plan.values_read(node))
    many = rule is not None and rule.many
    if node.op == "call_module":
        kind = type(plan.module(node)).__name__
        if rule is None:
            return plan.leave(node, f"there is no rule for {kind}")
        if not many and (len(node.args) != 1 or node.kwargs or lists):
            return plan.leave(node, f"expected {kind} to read one tensor")
    try:
        if lists and not many:
            raise ConversionError("", f"{name_of(node)} of parts of a feature map")
        if rule is None:
            raise no_rule(plan, node)
        return rule.convert(plan, node)
    except ConversionError as error:
        here = owner(node) or node.name
        if plan.strict or error.module not in ("", here):
            raise ConversionError(
                error.module or here,
                error.reason,
                error.line or line_of(node),
                error.remedy or LEAVE,
            ) from None
        return (rule.otherwise if rule else Plan.leave)(plan, node, error.reason)


def _input(plan: Plan, value: Any) -> Value:
    if not isinstance(value, Tensor):
        return OTHER
    rank = plan.dimension + 2
    images = [value_of(n) for n in plan.trace.signature if isinstance(value_of(n), Tensor)]
    shapes = [(x.shape[0], *x.shape[2:]) for x in images if x.ndim == rank]
    if tuple(value.shape) in shapes:
        return Value("image", ("N", *plan.pixels))
    if is_image(value, plan.dimension):
        return Value("image", plan.image if value.ndim == rank else plan.bags)
    return Value("invariant")


def _is_about_arguments(node: fx.Node) -> bool:
    """Whether an assertion says that an argument is the one that was traced."""
    reads = list(node.all_input_nodes)
    while reads and all(r.op == "call_function" and name_of(r) in ("eq", "is") for r in reads):
        reads = [before for read in reads for before in read.all_input_nodes]
    return bool(reads) and all(
        r.op == "placeholder" and not isinstance(value_of(r), Tensor) for r in reads
    )


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value)


def _question(plan: Plan, node: fx.Node) -> Value:
    """A size, a dtype, a device: asked of the converted tensor, in the source's order of axes."""
    value = next(iter(plan.values_read(node)), OTHER)
    if value.kind != "fields" or value.axes == value.layout:
        return plan.copy(node, OTHER)
    name, read = name_of(node), plan.first(node)[0]
    if name == "getattr" and node.args[1] in ("dtype", "device"):
        return plan.copy(node, OTHER)
    order = tuple(value.places(axis) for axis in value.axes)
    if name == "size" and len(node.args) == 2:
        places = order[known(node.args[1])]
        return plan.emit(
            node,
            OTHER,
            lambda e: e.function(
                operator.getitem, e.function(sizes_in_order, e[read], (places,)), 0
            ),
        )
    if name == "size" or (name == "getattr" and node.args[1] == "shape"):
        return plan.emit(node, OTHER, lambda e: e.function(sizes_in_order, e[read], order))
    raise ConversionError(owner(node), f"{name} of a tensor with axes {value.axes}")


def pair_with_training(plan: Plan) -> None:
    """Find what each node is when the source is trained; say so where it is something else."""
    trained = plan.trace.training
    if isinstance(trained, str):
        plan.notes.append(
            f"in training the source computes something else, which was not followed: {trained}"
        )
        return
    ours, theirs = live_nodes(plan.trace.graph), live_nodes(trained.graph)
    calls, others = (calls_of(nodes, dropping()) for nodes in (ours, theirs))
    if calls == others:
        plan.in_training = dict(zip(ours, theirs, strict=True))
        return
    pairs = zip(theirs, others, strict=True)
    first = next((n for i, (n, c) in enumerate(pairs) if calls[i : i + 1] != [c]), theirs[-1])
    plan.notes.append(
        f"in training the source computes something else, from {owner(first) or first.name} on; "
        "the converted network does what the source does in eval mode"
    )
