"""Where a network ends."""

from __future__ import annotations

from torch import Tensor, fx, nn

from econv.conversion.names import PERMUTATIONS, POINTWISE, RESHAPES, SOFTMAX
from econv.conversion.trace import name_of, value_of

__all__ = ["find_heads"]

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
    POINTWISE
    | RESHAPES
    | SOFTMAX
    | PERMUTATIONS
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
