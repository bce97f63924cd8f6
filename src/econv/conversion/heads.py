"""Where a network ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from econv.conversion.rules import rule_of
from econv.conversion.trace import name_of, value_of

__all__ = ["Ends", "find_ends"]

_LEARNED = (nn.modules.conv._ConvNd, nn.Linear, nn.MultiheadAttention, nn.RNNBase)
_FILTERS = frozenset({"linear"}) | {
    f"conv{how}{d}d" for how in ("", "_transpose") for d in (1, 2, 3)
}


@dataclass(frozen=True)
class Ends:
    """The last layers of a network, and what comes before others."""

    heads: frozenset[fx.Node] = field(default_factory=frozenset)
    """The convolutions and linear maps that end an output: none reads what they give."""
    inner: frozenset[fx.Node] = field(default_factory=frozenset)
    """What another convolution or linear map reads, be it after other operations."""


def find_ends(graph: fx.Graph, modules: dict[str, nn.Module]) -> Ends:
    """Find the heads of a network.

    Between a head and the output may stand whatever is no convolution or linear map: it then acts
    on the channels of the source. An output that comes from an inner layer as well, such as the
    features of a backbone, has no head.
    """
    inner: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(_filters(user, modules) or user in inner for user in _readers(node)):
            inner.add(node)
    (output,) = (node for node in graph.nodes if node.op == "output")
    heads: set[fx.Node] = set()
    for end in output.all_input_nodes:
        found = _filters_before(end, modules)
        if not found & inner:
            heads |= found
    return Ends(frozenset(heads), frozenset(inner))


def _filters_before(end: fx.Node, modules: dict[str, nn.Module]) -> set[fx.Node]:
    """The first convolutions and linear maps on every way back from an output."""
    found: set[fx.Node] = set()
    stack, seen = [end], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if _filters(node, modules):
            found.add(node)
        else:
            stack += [read for read in node.all_input_nodes if _has_numbers(read)]
    return found


def _filters(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether an operation mixes channels in a learned way, or may do so."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return isinstance(module, _LEARNED) or rule_of(node, modules) is None
    return node.op in ("call_function", "call_method") and name_of(node) in _FILTERS


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output" and _has_numbers(user)]


def _has_numbers(node: fx.Node) -> bool:
    """Whether a node gives tensors, not only sizes."""
    value = value_of(node)
    several = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(part, Tensor) for part in several)
