"""Where a network ends."""

from __future__ import annotations

from torch import Tensor, fx, nn

from econv.conversion.rules import rule_of
from econv.conversion.trace import value_of

__all__ = ["find_heads"]


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
            elif (rule := rule_of(node, modules)) is not None and rule.after_head:
                stack += [r for r in node.all_input_nodes if isinstance(value_of(r), Tensor)]
            elif node.op != "placeholder":
                whole = False
        if whole:
            heads |= found
    return heads
