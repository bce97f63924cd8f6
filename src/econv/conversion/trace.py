"""The source network as a graph: every operation of one pass, with the shapes that it saw.

Symbolic tracing of torch.fx, run side by side with the pass on tensors without data: sizes are
known when the source's own code asks for them, so that ``if x.shape != y.shape`` is no obstacle.
This room knows nothing of groups.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["ConversionError", "Trace", "owner", "trace", "value_of"]


class ConversionError(ValueError):
    """What cannot be converted: the module's name and the reason."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"cannot convert {module or 'the network'}: {reason}")
        self.module = module
        self.reason = reason


class Trace:
    """The graph of a source network, and what its tracing took for granted."""

    def __init__(
        self,
        graph: fx.Graph,
        modules: dict[str, nn.Module],
        fixed: list[str],
        arguments: list[inspect.Parameter],
    ) -> None:
        self.graph = graph
        self.modules = modules
        self.fixed = fixed
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.signature: dict[fx.Node, tuple[str, Any]] = {
            node: (argument.name, argument.default)
            for node, argument in zip(inputs, arguments, strict=True)
        }
        """The name and the default (or ``inspect.Parameter.empty``) of every argument."""


def value_of(node: fx.Node) -> Any:
    """What a node gave in the traced pass; tensors are on the meta device."""
    return node.meta["value"]


def owner(node: fx.Node) -> str:
    """The name of the module whose code made this node; the module itself for its call."""
    return str(node.target) if node.op == "call_module" else str(node.meta.get("owner", ""))


def trace(model: nn.Module, inputs: tuple[Any, ...], is_leaf: Callable[[nn.Module], bool]) -> Trace:
    """Trace a network in eval mode on these inputs; modules that are leaves stay whole."""
    blank = copy.deepcopy(model).to("meta").eval()
    without_data = tuple(x.detach().to("meta") if isinstance(x, Tensor) else x for x in inputs)
    tracer = _Tracer(without_data, is_leaf)
    signature = inspect.signature(model.forward)
    names = list(signature.parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in names):
        raise ConversionError("", f"its arguments have no names of their own: {signature}")
    if len(inputs) > len(names):
        raise ValueError(f"expected at most {len(names)} example inputs; got {len(inputs)}")
    rest = names[len(inputs) :]
    given = {p.name: p.default for p in rest if p.default is not p.empty}
    with torch.no_grad():
        graph = tracer.trace(blank, concrete_args=given)
    for node in graph.nodes:
        if node.op == "get_attr" and "value" not in node.meta:
            node.meta["value"] = _attribute(blank, str(node.target))
    return Trace(graph, dict(model.named_modules()), tracer.fixed, names)


class _Proxy(fx.Proxy):
    """A value of the traced pass that answers questions about its size."""

    @property
    def _value(self) -> Any:
        return value_of(self.node)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = value_of(self.node)
        if name == "ndim":  # a rank is the same in the converted network
            return value.ndim
        if callable(getattr(value, name)):
            return _Method(self, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def dim(self) -> int:
        return int(value_of(self.node).dim())

    def __len__(self) -> int:
        return len(self._value)

    def __index__(self) -> int:
        return int(self._fixed())

    def __int__(self) -> int:
        return int(self._fixed())

    def __float__(self) -> float:
        return float(self._fixed())

    def _fixed(self) -> Any:
        value = self._value
        if isinstance(value, Tensor):
            raise ConversionError(owner(self.node), "it computes with the numbers in a tensor")
        self.tracer.fix(self.node, value)  # type: ignore[attr-defined]
        return value


class _Method:
    def __init__(self, proxy: _Proxy, name: str) -> None:
        self.proxy = proxy
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = self.proxy.tracer
        return tracer.create_proxy("call_method", self.name, (self.proxy, *args), kwargs)


class _Tracer(fx.Tracer):
    def __init__(self, inputs: tuple[Any, ...], is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.inputs: Iterator[Any] = iter(inputs)
        self.is_leaf = is_leaf
        self.path: list[str] = []
        self.fixed: list[str] = []
        self.running = False

    def fix(self, node: fx.Node, value: Any) -> None:
        note = f"{owner(node) or 'the network'}: {node.name} is {value!r} for every size"
        if note not in self.fixed:
            self.fixed.append(note)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.is_leaf(m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.running:  # tracing patches every module, also those that run to be seen
            return forward(*args, **kwargs)
        self.path.append(self.path_of_module(m))
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self.path.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> _Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = value_of(obj.node)
        if isinstance(value, Tensor):
            raise ConversionError(
                owner(obj.node) or self._here(), "its course depends on the numbers in a tensor"
            )
        self.fix(obj.node, bool(value))
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        items: Any = obj
        return iter([items[i] for i in range(len(value_of(obj.node)))])

    def keys(self, obj: fx.Proxy) -> Any:
        return value_of(obj.node).keys()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["owner"] = self._here()
        if node.op != "output" and "value" not in node.meta:
            node.meta["value"] = self._run(node)
        return node

    def _here(self) -> str:
        return self.path[-1] if self.path else ""

    def _run(self, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, value_of)
        kwargs = fx.node.map_arg(node.kwargs, value_of)
        target: Any = node.target
        if node.op == "placeholder":
            return next(self.inputs, args[0] if args else None)
        self.running = True
        try:
            if node.op == "get_attr":
                return _attribute(self.root, target)
            if node.op == "call_module":
                return self.root.get_submodule(target)(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)
        except Exception as error:
            raise ConversionError(
                owner(node) or self._here(),
                f"it does not run on the example input: {type(error).__name__}: {error}",
            ) from error
        finally:
            self.running = False


def _attribute(root: nn.Module, name: str) -> Any:
    found: Any = root
    for part in name.split("."):
        found = getattr(found, part)
    return found
