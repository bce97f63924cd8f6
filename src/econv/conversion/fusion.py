"""Norm, ReLU and convolution of a graph as one call, for devices whose kernels run them as one.

The graphs of a converted network and of its parts have a node for each. `flattened` is all of them
as one, and `fused` writes another, in which every such chain is a call of
`econv.layers.norm_relu_conv`, or of `norm_relu` where something else reads the ReLU. All compute
the same, with the same modules, which are looked up when they run: one that was replaced, or has
hooks, counts in all of them.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator
from functools import update_wrapper
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules import module as hooks

from econv.layers import GroupBatchNorm2d, GroupConv2d, norm_relu, norm_relu_conv
from econv.layers.checks import expect
from econv.layers.fused import may_fuse
from econv.tracing import keep_whole

__all__ = ["Chain", "chains", "flattened", "fused", "switched"]

_RELUS: dict[Any, bool] = {
    torch.relu: False,
    functional.relu: False,
    torch.relu_: True,
    functional.relu_: True,
    "relu": False,
    "relu_": True,
}
"""Functions and methods, and whether they write into what they read."""


class Chain(NamedTuple):
    """Nodes of which each is read by the next and by nothing else."""

    norm: fx.Node
    relu: fx.Node
    conv: fx.Node | None
    """Nothing if something else reads the ReLU."""


def chains(graph: fx.Graph, root: nn.Module) -> list[Chain]:
    """Where a ReLU, and nothing else, reads a `GroupBatchNorm2d`, and if so a `GroupConv2d` that.

    What the norm reads may have other readers. ``root`` has the modules that the graph names.
    """
    found = []
    for relu in graph.nodes:
        norm = None if _in_place(relu, root) is None else _only_read_by(relu)
        if norm is None or not _calls(norm, root, GroupBatchNorm2d):
            continue
        (reader, *others) = [*relu.users] or [None]
        alone = reader is not None and not others and _calls(reader, root, GroupConv2d)
        found.append(Chain(norm, relu, reader if alone else None))
    return found


def fused(graph: fx.Graph, root: nn.Module) -> fx.Graph | None:
    """A copy of a graph with its `chains` as one call each; nothing where there are none.

    The call stands where the norm stood: what writes into the norm's input later still comes later.
    """
    found = copy.deepcopy(graph)
    together = chains(found, root)
    for norm, relu, conv in together:
        run: Callable[..., Tensor] = norm_relu_conv if conv else norm_relu
        own = [norm, *([conv] if conv else [])]
        with found.inserting_before(norm):
            given = [*(found.get_attr(str(node.target)) for node in own), norm.args[0]]
            if relu.op == "call_module":
                given.append(found.get_attr(str(relu.target)))
            elif _in_place(relu, root):
                run = _norm_relu_in_place_conv if conv else _norm_relu_in_place
            (conv or relu).replace_all_uses_with(found.call_function(run, tuple(given)))
        for node in (*own[1:], relu, norm):
            found.erase_node(node)
    return found if together else None


def switched(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` that was generated from a graph, with a second form.

    Eager calls on devices whose kernels fuse run what is generated from the `fused` graph of the
    module and its parts, at the first of them. Whoever traces, compiles, exports or transforms
    meets ``plain``; so do calls while parts of the module have hooks, which then run one by one.
    """
    forms: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def second(network: nn.Module) -> Callable[..., Any]:
        parts = list(_parts(network, ""))
        if any(_has_hooks(part) for _, part in parts[1:]):
            return plain
        key = tuple((path, getattr(part, "_code", None), *part._modules) for path, part in parts)
        if key not in forms:
            forms.clear()  # of what it was before it was edited
            forms[key] = _generated(network) or plain
        return forms[key]

    may_fuse_call = _may_fuse_call  # not a global: those of the function are others

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = second(self) if may_fuse_call(args, kwargs) else plain
        return run(self, *args, **kwargs)

    # Tracers look into the globals of a ``forward`` for functions that they have to follow.
    made = FunctionType(forward.__code__, plain.__globals__, "forward", None, forward.__closure__)
    return update_wrapper(made, plain)


_CONTAINERS = (fx.GraphModule, nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and all in it that only calls others."""
    yield path, module
    for name, part in module._modules.items():
        if isinstance(part, _CONTAINERS) or type(part) is nn.Module:
            yield from _parts(part, f"{path}{name}.")


def _has_hooks(module: nn.Module) -> bool:
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    compiled = module._compiled_call_impl or "forward" in vars(module)
    return bool(own or module._backward_pre_hooks or compiled or hooks._has_any_global_hook())


def flattened(root: fx.GraphModule) -> fx.Graph:
    """The graph of a module and of all the parts that it calls as one."""
    graph = fx.Graph()
    inputs = {node: graph.node_copy(node) for node in root.graph.nodes if node.op == "placeholder"}
    graph.output(_inlined(graph, root, "", inputs))
    return graph


def _inlined(graph: fx.Graph, module: fx.GraphModule, path: str, found: dict[fx.Node, Any]) -> Any:
    """Write the operations of a part; what it gives."""

    def read(given: Any) -> Any:
        return fx.node.map_arg(given, lambda node: found[node])

    for node in module.graph.nodes:
        args, kwargs = read(node.args), read(node.kwargs)
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            continue
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            found[node] = _called(graph, called, f"{path}{node.target}", args, kwargs)
        elif node.target in _KNOWN and not _nodes_in(args[: 2 - (node.target is operator.getitem)]):
            found[node] = node.target(*args)  # of arguments that are no tensors
        else:
            made = found[node] = graph.node_copy(node, lambda n: n)
            made.args, made.kwargs = args, kwargs
            if node.op == "get_attr":
                made.target = f"{path}{node.target}"
    return None


_KNOWN = (operator.eq, operator.getitem, expect)


def _nodes_in(given: Any) -> bool:
    return any(isinstance(item, fx.Node) for item in given)


def _called(
    graph: fx.Graph, called: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Write a call of a module; what it gives."""
    if isinstance(called, fx.GraphModule):
        given = inspect.signature(type(called).forward).bind(called, *args, **kwargs)
        given.apply_defaults()
        inputs = {
            node: given.arguments[str(node.target).strip("*")]
            for node in called.graph.nodes
            if node.op == "placeholder"
        }
        return _inlined(graph, called, f"{name}.", inputs)
    if isinstance(called, nn.Sequential) and type(called).forward is nn.Sequential.forward:
        for key, part in called._modules.items():
            assert part is not None
            args = (_called(graph, part, f"{name}.{key}", args, kwargs),)
            kwargs = {}
        return args[0]
    return graph.call_module(name, args, kwargs)


def _may_fuse_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether kernels may take the first tensor of a call."""
    if torch.compiler.is_compiling():
        return False
    given = (*args, *kwargs.values())
    first = next((found for found in given if isinstance(found, Tensor)), None)
    if first is None:
        keep_whole(given, _is_layer)
        return False
    return may_fuse(first)


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith(GroupConv2d.__module__.rpartition(".")[0])


def _generated(root: Any) -> Callable[..., Any] | None:
    """The function of the fused graph; nothing if a graph was edited since it became code."""
    parts = [part for _, part in _parts(root, "") if isinstance(part, fx.GraphModule)]
    if any(part.graph.python_code("self").src != part.code for part in parts):
        return None
    found = fused(flattened(root), root)
    return None if found is None else type(fx.GraphModule(root, found)).forward


def _norm_relu_in_place(norm: nn.Module, x: Tensor) -> Tensor:
    return norm_relu(norm, x, torch.relu_)


def _norm_relu_in_place_conv(norm: nn.Module, conv: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = norm_relu_conv(norm, conv, x, torch.relu_)
    return found


def _only_read_by(node: fx.Node) -> fx.Node | None:
    """The first argument of a node, if nothing else reads it."""
    read = node.args[0] if node.args else None
    return read if isinstance(read, fx.Node) and [*read.users] == [node] else None


def _calls(node: fx.Node, root: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a node calls a module of a class with one argument."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    return type(root.get_submodule(str(node.target))) is kind


def _in_place(node: fx.Node, root: nn.Module) -> bool | None:
    """Whether a ReLU that is a function writes into what it reads; nothing for what is no ReLU."""
    if node.op == "call_module":
        return False if _calls(node, root, nn.ReLU) else None
    always = _RELUS.get(node.target) if node.op in ("call_function", "call_method") else None
    asked = [*node.args[1:], *node.kwargs.values()]
    if always is None or len(asked) > 1 or not node.kwargs.keys() <= {"inplace"}:
        return None
    return always or bool(asked and asked[0])
