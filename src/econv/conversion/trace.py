"""The source network as a graph: every operation of one pass, with the shapes that it saw.

Symbolic tracing of torch.fx, run side by side with the pass on tensors without data: sizes are
known when the source's own code asks for them, so that ``if x.shape != y.shape`` is no obstacle.
This module knows nothing of groups.
"""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import math
import operator
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from econv.tracing import followed

__all__ = [
    "LEAVE",
    "Answer",
    "Call",
    "ConversionError",
    "Pass",
    "Trace",
    "arguments_of",
    "calls_of",
    "line_of",
    "live_nodes",
    "name_of",
    "owner",
    "plain_name",
    "trace",
    "value_of",
]


LEAVE = "strict=False leaves it as it is, and the report says so"
"""What can be done about an operation without a counterpart."""


class ConversionError(ValueError):
    """What cannot be converted: the module's name, the reason, the source's line and a remedy.

    The message has all four; so have the attributes ``module``, ``reason``, ``line`` and
    ``remedy``.

    >>> error = ConversionError("stem.0", "its kernel is not square", remedy="use 3×3")
    >>> print(error)
    cannot convert stem.0: its kernel is not square; use 3×3
    >>> error.module
    'stem.0'
    """

    def __init__(self, module: str, reason: str, line: str = "", remedy: str = "") -> None:
        text = f"cannot convert {module or 'the network'}: {reason}"
        if line:
            text += f" ({line})"
        super().__init__(f"{text}; {remedy}" if remedy else text)
        self.module = module
        self.reason = reason
        self.line = line
        self.remedy = remedy


@dataclass(frozen=True)
class Answer:
    """What the source's code was told about a size, and went on with."""

    node: fx.Node
    value: Any
    place: tuple[str, int]
    """The file and line that asked."""

    @property
    def tensors(self) -> frozenset[fx.Node]:
        """The tensors whose sizes were asked for."""
        return _measured(self.node)

    @property
    def compares(self) -> bool:
        """Whether the question was if sizes of different tensors agree."""
        asked = self.node.op == "call_function" and self.node.target in (operator.eq, operator.ne)
        return asked and len(self.tensors) > 1

    @property
    def agree(self) -> bool:
        """Whether the compared sizes are the same."""
        return bool(self.value) == (self.node.target is operator.eq)


@dataclass(eq=False)
class Call:
    """One call of a module in the traced pass, or of another method than ``forward``."""

    path: str
    """The name of the module."""
    method: str
    """The name of the method, if it is not ``forward``."""
    caller: Call | None
    """The call in whose code it stands; nothing in that of the network's ``forward``."""
    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    start: int
    """How many operations of its pass there were before."""
    result: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What each parameter was given, with nodes in the place of tensors and sizes."""
        bound = self.signature.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


@dataclass(eq=False)
class Pass:
    """A run through ``forward``, or through another method of the network after it.

    Operations that an earlier pass has had with the same arguments are the same nodes.
    """

    method: str = ""
    order: dict[fx.Node, int] = field(default_factory=dict)
    """The nodes that belong to it, and their places in it."""
    calls: list[Call] = field(default_factory=list)
    """Every call that was followed, callers first."""
    call_of: dict[fx.Node, Call] = field(default_factory=dict)
    """The call that made a node; for the call of a leaf that call itself."""

    @property
    def top(self) -> Call | None:
        """The call of the method; none for ``forward``, which is not followed as one."""
        found = (c for c in self.calls if not c.path and c.method == self.method and not c.caller)
        return next(found, None) if self.method else None

    def close(self) -> None:
        """Take in what its nodes read that was made before it."""
        stack = list(self.order)
        while stack:
            for read in stack.pop().all_input_nodes:
                if read not in self.order:
                    self.order[read] = -1
                    stack.append(read)


class Trace:
    """The graph of a source network, and what its tracing took for granted."""

    def __init__(
        self,
        graph: fx.Graph,
        model: nn.Module,
        answers: list[Answer],
        arguments: list[inspect.Parameter],
        constants: dict[str, Tensor],
        passes: list[Pass],
    ) -> None:
        self.graph = graph
        self.passes = passes
        """That of ``forward`` first."""
        (output,) = (node for node in graph.nodes if node.op == "output")
        returned: Any = output.args[0]
        self.results: tuple[Any, ...] = returned if len(passes) > 1 else (returned,)
        """What each pass returns."""
        self.model = model
        self.modules = dict(model.named_modules())
        names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
        self.names = {found[0]: tuple(found) for found in names.values()}
        """All names of each module, by the first of them."""
        self.answers = answers
        self.constants = constants
        """Tensors that the source's code makes of numbers."""
        self.training: Trace | str = "it was not traced"
        """The graph in training, or why there is none."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.signature: dict[fx.Node, tuple[str, Any]] = {
            node: (argument.name, argument.default)
            for node, argument in zip(inputs, arguments, strict=True)
        }
        """The name and the default (or ``inspect.Parameter.empty``) of every argument."""

    def passes_of(self, node: fx.Node) -> list[Pass]:
        """The passes that a node belongs to, the first of which made it."""
        return [found for found in self.passes if node in found.order]

    def attribute(self, name: str) -> Any:
        """A parameter, buffer or constant of the source, with its numbers."""
        return self.constants[name] if name in self.constants else _attribute(self.model, name)


def value_of(node: fx.Node) -> Any:
    """What a node gave in the traced pass; tensors are on the meta device."""
    return node.meta["value"]


def owner(node: fx.Node) -> str:
    """The name of the module whose code made this node; the module itself for its call."""
    return str(node.target) if node.op == "call_module" else str(node.meta.get("owner", ""))


def line_of(node: fx.Node) -> str:
    """The line of the source's code that made this node, in words; empty where torch's did."""
    return _line(node.meta.get("place"))


def name_of(node: fx.Node) -> str:
    """The plain name of the function or method that a node calls."""
    return plain_name(node.target)


_DISPATCHED = ("max_pool2d", "adaptive_max_pool2d", "max_pool3d", "adaptive_max_pool3d")
"""Functions of torch without a name of their own."""


def plain_name(target: Any) -> str:
    """What a function, method or operator is called, in place or not."""
    for name in _DISPATCHED:
        if target is getattr(functional, name) or target is getattr(torch, name, None):
            return name
    return str(target if isinstance(target, str) else target.__name__).strip("_")


def trace(
    model: nn.Module,
    inputs: tuple[Any, ...],
    is_leaf: Callable[[nn.Module], bool],
    methods: tuple[str, ...] = (),
    dimension: int = 2,
) -> Trace:
    """Trace a network in eval mode on these inputs; modules that are leaves stay whole.

    After ``forward`` come the methods, with the first of the inputs, as many as each takes.

    ``if x.shape != y.shape: x = pad(x, …)`` is answered as if the sizes differed, wherever that
    does nothing if they do not: the graph is then the source's on every size.
    """
    signature = inspect.signature(model.forward)
    names = list(signature.parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in names):
        raise ConversionError("", f"its arguments have no names of their own: {signature}")
    if len(inputs) > len(names):
        raise ValueError(f"expected at most {len(names)} example inputs; got {len(inputs)}")
    source = _Source(model, names, is_leaf, methods, dimension)
    found = source.trace(inputs)
    differ = _always_differ(source, inputs, found)
    if differ:
        found = source.trace(inputs, differ)
        found.answers = [answer for answer in found.answers if answer.place not in differ]
    try:
        found.training = source.trace(inputs, differ, training=True)
    except ConversionError as error:
        found.training = error.reason
    return found


class _Source:
    """A network that is traced on several sizes."""

    def __init__(
        self,
        model: nn.Module,
        names: list[inspect.Parameter],
        is_leaf: Callable[[nn.Module], bool],
        methods: tuple[str, ...],
        dimension: int,
    ) -> None:
        self.dimension = dimension
        self.names = names
        self.methods = methods
        self.is_leaf = is_leaf
        self.model = model
        self.blank = _without_numbers(model).eval()

    def trace(
        self,
        inputs: tuple[Any, ...],
        differ: frozenset[tuple[str, int]] = frozenset(),
        training: bool = False,
    ) -> Trace:
        """One pass; sizes that are compared at the places of ``differ`` are said to differ."""
        blank = copy.deepcopy(self.blank)
        for module in blank.modules():
            module.training = training and not self.is_leaf(module)
        without_data = tuple(x.detach().to("meta") if isinstance(x, Tensor) else x for x in inputs)
        tracer = _Tracer(without_data, self.is_leaf, differ)
        rest = self.names[len(inputs) :]
        given = {p.name: p.default for p in rest if p.default is not p.empty}
        for name, module in blank.named_modules():
            if not self.is_leaf(module):
                tracer.follow_methods(name, module)
        before = set(vars(blank))
        if self.methods:
            blank.__class__ = _with_passes(type(blank), self.methods, tracer)
        try:
            with torch.no_grad(), followed():
                graph = tracer.trace(blank, concrete_args=given)
        except ConversionError:
            raise
        except Exception as error:  # the source's own code, which may do anything
            raise ConversionError(
                tracer.where,
                f"torch.fx cannot follow it: {type(error).__name__}: {_first_line(error)}",
                _line(_raised(error)),
            ) from error
        constants = {n: v for n, v in vars(blank).items() if n not in before}
        constants |= {n: v for n, v in blank.named_buffers() if n.startswith("_tensor_constant")}
        for node in graph.nodes:
            if node.op == "get_attr" and "value" not in node.meta:
                node.meta["value"] = _without_data(_attribute(blank, str(node.target)))
        return Trace(
            graph,
            self.model,
            tracer.answers,
            self.names,
            {n: v for n, v in constants.items() if isinstance(v, Tensor)},
            tracer.closed(graph),
        )


def arguments_of(method: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first of these arguments, as many as a method takes."""
    parameters = list(inspect.signature(method).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return given
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return given[: len(by_place)]


def _with_passes(kind: type[nn.Module], methods: tuple[str, ...], tracer: _Tracer) -> Any:
    """The same class, whose ``forward`` has these methods run, too."""
    within: list[nn.Module] = []

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self in within:  # a method calls it
            return kind.forward(self, *args, **kwargs)
        within.append(self)
        found = [kind.forward(self, *args, **kwargs)]
        for name in methods:
            tracer.begin_pass(name)
            method = getattr(self, name)
            found.append(method(*arguments_of(method, args)))
        return tuple(found)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


# Questions about sizes

_RESIZES = {"pad", "interpolate", "upsample", "getitem", "narrow"}


def _measured(node: fx.Node) -> frozenset[fx.Node]:
    """The tensors that a number was read off, as a size or in a computation with sizes."""
    found: set[fx.Node] = set()
    stack, seen = [node], {node}
    while stack:
        for read in stack.pop().all_input_nodes:
            if isinstance(value_of(read), Tensor):
                found.add(read)
            elif read not in seen:
                seen.add(read)
                stack.append(read)
    return frozenset(found)


def _always_differ(
    source: _Source, inputs: tuple[Any, ...], natural: Trace
) -> frozenset[tuple[str, int]]:
    """The places where sizes may be said to differ, because what follows then fits them."""
    compared = [answer for answer in natural.answers if answer.compares]
    if not compared:
        return frozenset()
    agreeing, like = natural, inputs
    if not all(answer.agree for answer in compared):  # on sizes that halve well, they would
        like = tuple(_halved_well(x, source.dimension) for x in inputs)
        try:
            agreeing = source.trace(like)
        except ConversionError:
            return frozenset()
    asked = [answer for answer in agreeing.answers if answer.compares]
    never = {answer.place for answer in asked if not answer.agree}
    places = [p for p in dict.fromkeys(answer.place for answer in asked) if p not in never]

    def settled(differ: frozenset[tuple[str, int]]) -> bool:
        try:
            taken = source.trace(like, differ)
            here = source.trace(inputs, differ) if like is not inputs else taken
        except ConversionError:
            return False
        answers = [answer for answer in taken.answers if answer.place in differ]
        alike = _calls(taken.graph, answers) == _calls(agreeing.graph, ())
        return alike and _calls(here.graph, ()) == _calls(taken.graph, ())

    whole = frozenset(places)
    if not whole or settled(whole):
        return whole
    found: frozenset[tuple[str, int]] = frozenset()
    for place in places if len(places) > 1 else ():
        if settled(found | {place}):
            found |= {place}
    return found


def _halved_well(x: Any, dimension: int) -> Any:
    if not isinstance(x, Tensor) or x.ndim != dimension + 2:
        return x
    return torch.empty(*x.shape[:2], *(-(-n // 64) * 64 for n in x.shape[2:]), device="meta").to(
        x.dtype
    )


def live_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the output depends on, and those that change something."""
    stack = [node for node in graph.nodes if node.op == "output" or _changes_something(node)]
    found = set(stack)
    while stack:
        for read in stack.pop().all_input_nodes:
            if read not in found:
                found.add(read)
                stack.append(read)
    return [node for node in graph.nodes if node in found or node.op == "placeholder"]


def _changes_something(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and ("assert" in name_of(node) or name_of(node) == "setitem")


def _calls(graph: fx.Graph, answers: Sequence[Answer]) -> list[Any]:
    """What a graph computes, as a list to compare; resizing that answers led to and that changes
    no size is left out, and with it the sizes that only it reads.
    """
    same = {}
    for node in graph.nodes:
        read: Any = node.args[0] if node.args else None
        if (
            node.op in ("call_function", "call_method")
            and name_of(node) in _RESIZES
            and isinstance(read, fx.Node)
            and isinstance(value_of(read), Tensor)
            and isinstance(value_of(node), Tensor)
            and value_of(read).shape == value_of(node).shape
        ):
            sizes = frozenset().union(*(_measured(n) for n in node.all_input_nodes if n != read))
            if sizes and any(sizes <= answer.tensors for answer in answers):
                same[node] = read
    kept = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        copied[node] = (
            copied[same[node]] if node in same else kept.node_copy(node, lambda n: copied[n])
        )
    return calls_of(live_nodes(kept))


def calls_of(nodes: list[fx.Node], apart_from: frozenset[str] = frozenset()) -> list[Any]:
    """Nodes as a list to compare; the arguments of some functions after the first are left out."""
    place = {node: f"%{number}" for number, node in enumerate(nodes)}
    found: list[Any] = []
    for node in nodes:
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: place.get(n, "%"))
        if node.op in ("call_function", "call_method") and name_of(node) in apart_from:
            args = (args[0][:1], {})
        found.append((node.op, node.target, repr(args)))
    return found


class _Proxy(fx.Proxy):
    """A value of the traced pass that answers questions about its size."""

    @property
    def _value(self) -> Any:
        return value_of(self.node)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A tensor's class for ``isinstance``, which code asks before it goes on."""
        return Tensor if isinstance(self._value, Tensor) else _Proxy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = value_of(self.node)
        if name == "ndim":  # a rank is the same in the converted network
            return value.ndim
        if callable(getattr(value, name)):
            return _Method(self, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __repr__(self) -> str:
        """A size as its number, which messages of the source's code may have."""
        return super().__repr__() if isinstance(self._value, Tensor) else repr(self._value)

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

    def __floor__(self) -> Any:
        return self._whole(math.floor)

    def __ceil__(self) -> Any:
        return self._whole(math.ceil)

    def __trunc__(self) -> Any:
        return self._whole(math.trunc)

    def _whole(self, function: Callable[..., Any]) -> Any:
        return self.tracer.create_proxy("call_function", function, (self,), {})

    def _fixed(self) -> Any:
        value = self._value
        if isinstance(value, Tensor):
            raise ConversionError(
                owner(self.node), "it computes with the numbers in a tensor", _line(_place())
            )
        self.tracer.answered(self.node, value)  # type: ignore[attr-defined]
        return value


class _Method:
    def __init__(self, proxy: _Proxy, name: str) -> None:
        self.proxy = proxy
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = self.proxy.tracer
        return tracer.create_proxy("call_method", self.name, (self.proxy, *args), kwargs)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(
        self,
        inputs: tuple[Any, ...],
        is_leaf: Callable[[nn.Module], bool],
        differ: frozenset[tuple[str, int]],
    ) -> None:
        # Without torch.fx's patches of `math`: what is imported during the pass would keep them.
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.inputs: Iterator[Any] = iter(inputs)
        self.is_leaf = is_leaf
        self.differ = differ
        self.path: list[str] = []
        self.answers: list[Answer] = []
        self.passes = [Pass()]
        self.known: dict[str, list[fx.Node]] = {}
        """The nodes of each operation with certain arguments."""
        self.again: Counter[str] = Counter()
        """How many of them this pass has had."""
        self.inside: list[Call] = []
        self.running = False
        self.where = ""
        """The module that the pass is in, or was in when it stopped."""

    def answered(self, node: fx.Node, value: Any) -> Any:
        """Remember what the source's code was told; what it is told may be settled beforehand."""
        answer = Answer(node, value, _asking())
        if answer.place in self.differ and answer.compares:
            answer = replace(answer, value=node.target is operator.ne)
        self.answers.append(answer)
        return answer.value

    def begin_pass(self, method: str) -> None:
        """What follows belongs to another run through the network."""
        self.passes.append(Pass(method))
        self.again.clear()

    def closed(self, graph: fx.Graph) -> list[Pass]:
        """The passes that made a graph, whose output belongs to all."""
        (output,) = (node for node in graph.nodes if node.op == "output")
        for found in self.passes:
            found.order.pop(output, None)
            found.close()
            found.order[output] = len(graph.nodes)
        return self.passes

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
        if m is self.root:  # a method that runs the whole network
            return m.forward(*args, **kwargs)
        self.path.append(self.path_of_module(m))
        self.where = self.path[-1]
        call = self._begin(self.path[-1], "", inspect.signature(m.forward), args, kwargs)
        try:
            found = super().call_module(m, forward, args, kwargs)
        finally:
            self.path.pop()
            self.inside.pop()
        self.where = self._here()
        call.result = _nodes(found)
        return found

    def follow_methods(self, name: str, module: nn.Module) -> None:
        """Remember calls of the methods that the class of a module has beside ``forward``."""
        for owner_ in type(module).__mro__:
            for method, function in vars(owner_).items():
                plain = inspect.isfunction(function) and not method.startswith("_")
                if plain and not hasattr(nn.Module, method) and method not in vars(module):
                    vars(module)[method] = self._remembered(name, method, getattr(module, method))

    def _remembered(self, path: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = list(_leaves(_nodes((args, kwargs))))
            if self.running or not any(isinstance(leaf, fx.Node) for leaf in given):
                return method(*args, **kwargs)
            call = self._begin(path, name, inspect.signature(method), args, kwargs)
            try:
                found = method(*args, **kwargs)
            finally:
                self.inside.pop()
            call.result = _nodes(found)
            return found

        return run

    def _begin(
        self,
        path: str,
        method: str,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Call:
        caller = self.inside[-1] if self.inside else None
        given = _nodes(args), _nodes(kwargs)
        here = self.passes[-1]
        call = Call(path, method, caller, signature, *given, start=len(here.order))
        here.calls.append(call)
        self.inside.append(call)
        return call

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        return a.node if type(a) is _Proxy else super().create_arg(a)

    def proxy(self, node: fx.Node) -> _Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = value_of(obj.node)
        if isinstance(value, Tensor):
            raise ConversionError(
                owner(obj.node) or self._here(),
                "its course depends on the numbers in a tensor",
                _line(_place()),
                "take the decision outside of the network, or compute both and use torch.where",
            )
        return bool(self.answered(obj.node, bool(value)))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        items: Any = obj
        return iter([items[i] for i in range(len(value_of(obj.node)))])

    def keys(self, obj: fx.Proxy) -> Any:
        return value_of(obj.node).keys()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        here = self.passes[-1]
        key = repr(fx.node.map_arg(args[:4], str))
        earlier = self.known.setdefault(key, [])
        self.again[key] += 1
        same = len(self.passes) > 1 and len(earlier) >= self.again[key]
        node = earlier[self.again[key] - 1] if same else super().create_node(*args, **kwargs)
        here.order[node] = len(here.order)
        if self.inside:
            here.call_of[node] = self.inside[-1]
        if same:
            return node
        earlier.append(node)
        node.meta["owner"] = self._here()
        node.meta["place"] = _place()
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
                return _without_data(_attribute(self.root, target))
            with torch.device("meta"), followed(follow=False):
                if node.op == "call_module":
                    return self.root.get_submodule(target)(*args, **kwargs)
                if node.op == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                return target(*args, **kwargs)
        except NotImplementedError as error:  # of tensors without data
            raise ConversionError(
                owner(node) or self._here(),
                f"it asks for the numbers in a tensor: {_first_line(error)}",
                line_of(node),
            ) from error
        except Exception as error:
            raise ConversionError(
                owner(node) or self._here(),
                "it does not run on the example input: "
                f"{type(error).__name__}: {_first_line(error)}",
                line_of(node),
            ) from error
        finally:
            self.running = False


def _nodes(found: Any) -> Any:
    """Arguments or results, with the nodes of the proxies in them."""
    return fx.node.map_aggregate(found, lambda a: a.node if isinstance(a, fx.Proxy) else a)


def _leaves(found: Any) -> list[Any]:
    leaves: list[Any] = []
    fx.node.map_aggregate(found, leaves.append)
    return leaves


def _attribute(root: nn.Module, name: str) -> Any:
    found: Any = root
    for part in name.split("."):
        found = getattr(found, part)
    return found


_LONGEST = 160


def _first_line(error: Exception) -> str:
    """The first sentence of an error, without the advice that torch may add."""
    line = str(error).strip().partition("\n")[0]
    if len(line) > _LONGEST:
        line = line.partition(". ")[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def _without_data(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, Tensor) else value


def _without_numbers(model: nn.Module) -> nn.Module:
    """A copy on the meta device; the numbers are not copied on the way."""
    blank: dict[int, Any] = {}
    for found in model.parameters():
        if not is_lazy(found):
            blank[id(found)] = nn.Parameter(found.detach().to("meta"), found.requires_grad)
    for buffer in model.buffers():
        blank[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, blank).to("meta")


def _asking() -> tuple[str, int]:
    """The file and line of the source's code that is running."""
    inside = (str(Path(fx.__file__).parent), str(Path(__file__).parent))
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
Place = tuple[str, int]


def _is_of_a_library(name: str) -> bool:
    """Whether a file is of torch, econv or einops, whose lines say nothing about a network."""
    return name.startswith(_OURS) or f"{os.sep}einops{os.sep}" in name


def _place() -> Place | None:
    """The innermost line that is neither torch's nor ours, of the pass that is being traced."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not _Source.trace.__code__:
        if not _is_of_a_library(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _raised(error: Exception) -> Place | None:
    """The innermost such line that an error came through."""
    found = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not _is_of_a_library(name):
            found = name, number
    return found


def _line(place: Place | None) -> str:
    if place is None:
        return ""
    code = linecache.getline(*place).strip()
    where = f"{Path(place[0]).name}, line {place[1]}"
    return f"{where}: `{code}`" if code else where
