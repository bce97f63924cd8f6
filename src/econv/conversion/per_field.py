"""Numbers for every channel, as numbers for every field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from econv.conversion.arguments import why_positional
from econv.conversion.plan import VECTOR, Plan, PlannedModule, Step, Value
from econv.conversion.trace import ConversionError, name_of, value_of
from econv.conversion.widths import Width
from econv.layers import FieldParameter

__all__ = ["common_number", "field_parameter", "fit_by_channel"]


def common_number(parameter: Any) -> float | None:
    """The number that all entries of a parameter share, if they do."""
    if parameter is None or parameter.is_meta or parameter.numel() == 0:
        return None
    first = float(parameter.detach().flatten()[0])
    return first if bool((parameter.detach() == first).all()) else None


def fit_by_channel(
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


def field_parameter(plan: Plan, node: fx.Node, read: fx.Node, whole: Value) -> Step:
    """A parameter with one number per channel, as one with one number per field."""
    tensor = value_of(read)
    shape = tuple(tensor.shape)
    if tensor.numel() == 1:
        return lambda e: e[read]
    place = len(shape) - len(whole.axes) + whole.axes.index("C")
    positional = why_positional(shape, whole.axes)
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

    part = PlannedModule(name, make, into=widths, fit=fit)
    plan.add_shared(part, f"FieldParameter({plan.group.name})", source=f"Parameter{shape}")
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
