"""Sums over positions with weights, which is attention that pools; other attention is refused."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx, nn

from econv.conversion.arguments import argument
from econv.conversion.plan import Emission, Plan, Step, Value
from econv.conversion.registry import rule
from econv.conversion.steps import as_map
from econv.conversion.trace import ConversionError, name_of, owner, value_of


@rule(nn.MultiheadAttention, nn.TransformerEncoderLayer, many=True)
def attention_module(plan: Plan, node: fx.Node) -> Value:
    raise ConversionError("", "attention over positions is not equivariant to their rotation")


@rule("scaled_dot_product_attention", "baddbmm")
def attention(plan: Plan, node: fx.Node) -> Value:
    raise ConversionError(
        "", f"{name_of(node)}: attention over positions has no equivariant counterpart"
    )


@rule("matmul", "bmm")
def product(plan: Plan, node: fx.Node) -> Value:
    """Products of matrices, as sums over a letter that both have."""
    a, b = argument(node, 0, "input"), argument(node, 1, "mat2", node.kwargs.get("other"))
    ranks = [value_of(read).ndim for read in (a, b)]
    if min(ranks) < 2:
        raise ConversionError("", f"{name_of(node)} of a vector")
    batch = "abcdefgh"[: max(ranks) - 2]
    rows, columns = (batch[len(batch) - (rank - 2) :] for rank in ranks)
    return _contract(plan, node, [(a, f"{rows}ij"), (b, f"{columns}jk")], f"{batch}ik")


@rule("einsum", many=True)
def einsum(plan: Plan, node: fx.Node) -> Value:
    """Sums over letters of one tensor, or of two of which one has weights of positions."""
    equation, *given = node.args
    operands: Any = given[0] if isinstance(given[0], list | tuple) else given
    left, arrow, out = str(equation).replace(" ", "").partition("->")
    if "." in left:
        raise ConversionError("", f"einsum {equation!r}: expected a letter for every axis")
    if not arrow:
        out = "".join(sorted(x for x in set(left) - {","} if left.count(x) == 1))
    return _contract(plan, node, [*zip(operands, left.split(","), strict=True)], out)


def _contract(plan: Plan, node: fx.Node, operands: list[tuple[fx.Node, str]], out: str) -> Value:
    """A sum over the letters that ``out`` does not have; every letter is an axis."""
    fields = [pair for pair in operands if plan.value(pair[0]).kind == "fields"]
    many = [pair for pair in fields if plan.value(pair[0]).channels > 1] or fields[:1]
    if not fields:
        return _of_images(plan, node, operands, out)
    if len(many) > 1 or len(operands) > 2:
        raise ConversionError(
            "",
            f"{name_of(node)} of group features with each other: attention between positions, or "
            "between channels, has no counterpart here",
        )
    read, letters = many[0]
    value = plan.value(read)
    axes = dict(zip(letters, value.axes, strict=True))
    weights = [pair for pair in operands if pair[0] is not read]
    readers = [_weights(plan, node, weight, axes, (read, value)) for weight in weights]
    summed = [place for x in letters if x not in out for place in value.places(axes[x])]
    gone = {axis for x, axis in axes.items() if x not in out} - {"1"}
    if {*"".join(gone)} not in (set(), value.pixels) or "P" in value.axes:
        raise ConversionError("", f"{name_of(node)} sums group features over the axes {gone}")
    for x in out:
        axes.setdefault(x, "1")

    def step(e: Emission) -> fx.Node:
        found = e[read]
        for reader in readers:
            found = e.function(operator.mul, found, reader(e))
        return e.method("sum", found, summed) if summed else found

    found = Value("fields", tuple(axes[x] for x in out), value.widths, sides=value.sides)
    return plan.emit(node, found, step)


def _weights(
    plan: Plan,
    node: fx.Node,
    weight: tuple[fx.Node, str],
    axes: dict[str, str],
    whole: tuple[fx.Node, Value],
) -> Step:
    """One number for every position, as a map of one channel."""
    read, letters = weight
    value, shape = plan.value(read), value_of(read).shape
    reader: Step | None = None
    if value.kind == "fields":
        value, reader = plan.as_image(read, value, owner(node) or node.name)
    own = value.axes if len(value.axes) == len(letters) else ("?",) * len(letters)
    fits = (
        size == 1 or axes.get(x) == axis for x, axis, size in zip(letters, own, shape, strict=True)
    )
    if value.kind != "image" or not all(fits):
        raise ConversionError(
            "",
            f"{name_of(node)} of group features and a tensor of shape {tuple(shape)}: expected one "
            "weight for every position",
        )
    return as_map(read, value, *whole, reader)


def _of_images(plan: Plan, node: fx.Node, operands: list[tuple[fx.Node, str]], out: str) -> Value:
    """Sums of channels that turn as images, and of numbers."""
    axes: dict[str, str] = {}
    for read, letters in operands:
        value = plan.value(read)
        for x, axis in zip(letters, value.axes, strict=False):
            of_positions = value.kind == "image" and set(axis) <= value.pixels
            if of_positions and axes.setdefault(x, axis) != axis:
                raise ConversionError("", f"{name_of(node)} joins the axes {axes[x]} and {axis}")
            axes.setdefault(x, axis)
    pixels = set(plan.pixels)
    kept = [axes[x] for x in out if set(axes.get(x, "")) & pixels]
    gone = {letter for x, axis in axes.items() if x not in out for letter in axis} & pixels
    if gone not in (set(), pixels) or len(kept) != len({*kept}):
        raise ConversionError(
            "", f"{name_of(node)}: attention between positions has no counterpart here"
        )
    assert isinstance(value_of(node), Tensor)
    if not kept:
        return plan.copy(node, Value("invariant"))
    sides = next(v.sides for v in plan.values_read(node) if v.kind == "image")
    return plan.copy(node, Value("image", tuple(axes[x] for x in out), sides=sides))
