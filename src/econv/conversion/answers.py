"""What the source's code was told about sizes: where it matters, the network checks it."""

from __future__ import annotations

import linecache
import operator
from typing import Any

import torch
from torch import Tensor, fx

from econv.conversion.plan import Emission, Plan
from econv.conversion.trace import Answer, name_of, owner, value_of
from econv.layers.checks import expect

__all__ = ["check_answers", "expect_that"]


def check_answers(plan: Plan, node: fx.Node) -> None:
    """Let the converted network stop where an answer about a size would be another one."""
    answer = next((answer for answer in plan.trace.answers if answer.node is node), None)
    if answer is None:
        return
    if _is_of_dtype(node):  # which the converted network has as well
        return
    axes = _axes(plan, node)
    whole = _whole_shapes(plan, node)
    value = value_of(node)
    # A number of the batch alone mostly goes into a shape, which the converted network has anew.
    # A device or a layout is not the example's either: the traced pass had no data.
    matters = bool(axes) and (isinstance(answer.value, bool) or bool(axes - {"N"}))
    refused = isinstance(value, int | float) and matters and ("C" not in axes or bool(whole))
    text = _describe(answer)
    note = f"{text}; a size where it is not is refused" if refused else f"{text} for every size"
    if note not in plan.notes:
        plan.notes.append(note)
    if not refused:
        return

    def step(e: Emission) -> None:
        found = e[node]
        if whole and "C" in axes:  # the converted network has channels of its own
            pixels = [e.function(operator.getitem, e[shape], slice(2, None)) for shape in whole]
            found = e.function(node.target, *pixels)  # type: ignore[arg-type]
        if isinstance(answer.value, bool) and not isinstance(value, bool):
            found = e.function(operator.ne, found, 0)
        same = e.function(operator.eq, found, answer.value)
        expect_that(
            e,
            same,
            f"expected sizes like those of the example input: {text}; convert with an example of "
            "this size",
        )

    plan.steps.append((node, step))


def expect_that(e: Emission, condition: fx.Node, message: str) -> None:
    """Write a check; tracing the network again keeps it as one call."""
    e.function(expect, condition, message).meta["is_wrapped"] = True


def _is_of_dtype(node: fx.Node) -> bool:
    """Whether a question compares the dtype of a tensor with others."""
    reads = node.all_input_nodes
    return bool(reads) and all(isinstance(value_of(read), torch.dtype) for read in reads)


def _describe(answer: Answer) -> str:
    line = linecache.getline(*answer.place).strip()
    asked = f"in `{line}`, {answer.node.name}" if line else answer.node.name
    return f"{owner(answer.node) or 'the network'}: {asked} is {answer.value!r}"


def _whole_shapes(plan: Plan, node: fx.Node) -> tuple[fx.Node, ...]:
    """The shapes that a node compares, where they have the same channels."""
    shapes: Any = node.args
    if node.target not in (operator.eq, operator.ne) or len(shapes) != 2:
        return ()
    if not all(isinstance(s, fx.Node) and isinstance(value_of(s), torch.Size) for s in shapes):
        return ()
    sizes = [value_of(shape) for shape in shapes]
    rank = len(plan.image)
    if not all(len(size) == rank and size[1] == sizes[0][1] for size in sizes):
        return ()
    return tuple(shapes)


def _axes(plan: Plan, node: fx.Node) -> set[str]:
    """The axes whose sizes a number depends on; channels only where they change."""
    if node.op not in ("call_function", "call_method"):
        return {"?"}
    read: Any = node.args[0] if node.args else None
    name = name_of(node)
    if isinstance(read, fx.Node) and isinstance(value_of(read), Tensor):
        axes = _of_tensor(plan, read)
        if name == "size" and len(node.args) == 2 and isinstance(node.args[1], int):
            return {axes[node.args[1]]}
        about_sizes = name in ("size", "numel", "nelement") or node.args[1:] == ("shape",)
        return set(axes) if about_sizes else set()
    if name == "getitem" and isinstance(read, fx.Node) and isinstance(value_of(read), torch.Size):
        tensor: Any = read.args[0] if read.args else None
        if isinstance(tensor, fx.Node) and isinstance(value_of(tensor), Tensor):
            axes = _of_tensor(plan, tensor)
            index = fx.node.map_arg(node.args[1], value_of)
            if len(axes) == len(value_of(read)) and isinstance(index, int | slice):
                found = axes[index]
                return {found} if isinstance(found, str) else set(found)
    return set().union(*(_axes(plan, before) for before in node.all_input_nodes))


def _of_tensor(plan: Plan, node: fx.Node) -> tuple[str, ...]:
    value = plan.value(node)
    axes = value.axes if len(value.axes) == value_of(node).ndim else ("?",) * value_of(node).ndim
    return axes if value.kind == "fields" else tuple("?" if a == "C" else a for a in axes)
