"""One graph for each module of the source: the flat graph of a conversion, divided by calls.

Conversion writes one graph for the whole network. `divide` gives every module that the source
calls the part of it that its call was, with the arguments and the results of that call. Where what
a call reads or gives cannot be passed, its operations stand in the graph of its caller.
This module knows graphs and calls, and nothing of groups.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from econv.conversion.trace import Call, ConversionError
from econv.layers.checks import expect

__all__ = ["Divided", "Written", "divide", "leaves", "parent_of", "remove_unused"]

_VARIOUS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass
class Written:
    """A flat graph, and from which operation of the source each of its nodes is."""

    graph: fx.Graph
    calls: list[Call]
    origin: dict[fx.Node, tuple[int, Call | None]]
    """For each node the place of the source's node in its graph, and the call that made that."""
    found: dict[fx.Node, Any]
    """What became of each node of the source."""
    names: dict[str, tuple[str, ...]]
    """All names that each module of the source has, by the first of them."""
    constants: frozenset[str]
    """Tensors that the source's code makes of numbers."""
    stateless: Callable[[str], bool]
    """Whether a converted module has neither parameters nor buffers."""
    describe: Callable[[str], str]
    """A converted module in words, which are the same for those that compute the same."""
    top: Call | None = None
    """The call of the method that it is the graph of; none for ``forward``."""


@dataclass
class Divided:
    """The graphs of the network, of its modules and of their methods."""

    graphs: dict[str, fx.Graph] = field(default_factory=dict)
    """By the name of the module; the empty name is the network."""
    methods: dict[tuple[str, str], fx.Graph] = field(default_factory=dict)
    """By the names of module and method."""
    renamed: dict[str, str] = field(default_factory=dict)
    """New names of modules that the source does not have: they are parts of what calls them."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names, of modules and constants that are found elsewhere."""
    inlined: dict[str, str] = field(default_factory=dict)
    """Modules whose operations stand in the graph of the caller, and why."""


def divide(written: Written, *methods: Written) -> Divided:
    """Divide a flat graph, which loses what nothing reads; and those of methods beside it.

    What methods call are the parts that ``forward`` calls, where their calls are the same.
    """
    division = _Division(written)
    divided = division.run()
    for other in methods:
        division = _Division(other, division)
        found = division.run()
        divided = Divided(
            {**divided.graphs, **found.graphs},
            {**divided.methods, **found.methods},
            found.renamed,
            found.aliases,
            divided.inlined,
        )
        division.divided = divided
    return divided


def parent_of(name: str) -> str:
    """The name of the module that has a module, parameter or buffer."""
    return name.rpartition(".")[0]


def leaves(found: Any) -> list[Any]:
    """What arguments or results are made of."""
    kept: list[Any] = []
    fx.node.map_aggregate(found, kept.append)
    return kept


def remove_unused(graph: fx.Graph, keep: frozenset[fx.Node] = frozenset()) -> None:
    """Remove questions and parameters that nothing reads; what works in place stays."""
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "__name__", str(node.target))
        does_more = name.endswith("_") or "assert" in name or node.target is expect
        plain = node.op in ("get_attr", "call_function", "call_method") and not does_more
        if plain and not node.users and node not in keep:
            graph.erase_node(node)


def _within(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


def _relative(name: str, path: str) -> str:
    return name[len(path) + 1 :] if path else name


def _is_plain(leaf: Any) -> bool:
    numbers = (bool, int, float, str, torch.dtype, torch.device)
    return leaf is None or isinstance(leaf, (fx.Node, *numbers))


class _Division:
    def __init__(self, written: Written, base: _Division | None = None) -> None:
        self.written = written
        self.base = base
        """The division of ``forward``, and of methods before this one."""
        self.placed: dict[str, str] = {}
        """Where modules are that the source does not have."""
        self.bad: dict[Call, str] = {}
        """Calls without a graph of their own, and why; "" where the call is a module's."""
        self.given = {c: self._flat(list(c.arguments.values())) for c in written.calls}
        self.gives = {c: self._flat(c.result) for c in written.calls}
        passed = frozenset[fx.Node]().union(*self.given.values(), *self.gives.values())
        remove_unused(written.graph, keep=passed)
        self.callers: dict[str, set[str]] = defaultdict(set)
        self.targets: dict[Call | None, set[str]] = defaultdict(set)
        for node in written.graph.nodes:
            if node.op == "call_module":
                call = written.origin[node][1]
                self.targets[call].add(str(node.target))
                self.callers[str(node.target)].add("" if call is None else call.path)
        self.divided = Divided()

    def run(self) -> Divided:
        self._find_bad()
        top = self.written.top
        if top in self.bad:
            raise ConversionError(
                top.method if top else "", f"its graph is not one of its own: {self.bad[top]}"
            )
        for call, reason in list(self.bad.items()):
            if not call.method:
                self._refuse(call.path, reason)
        for path, reason in self.base.divided.inlined.items() if self.base else ():
            self._refuse(path, reason)
        while (differs := self._write()) is not None:
            self._refuse(differs, "its calls are not the same")
        for call, reason in self.bad.items():
            if reason and not call.method:
                self.divided.inlined.setdefault(call.path, reason)
        return self.divided

    def _refuse(self, path: str, reason: str) -> None:
        """All calls of a module, or none: its hooks are called each time."""
        for call in self.written.calls:
            if call.path == path and not call.method:
                self.bad.setdefault(call, reason)

    def _flat(self, given: Any) -> set[fx.Node]:
        """The nodes of the flat graph in what a call was given, or gave."""
        nodes = [leaf for leaf in leaves(given) if isinstance(leaf, fx.Node)]
        found = [leaf for node in nodes for leaf in leaves(self.written.found.get(node))]
        return {leaf for leaf in found if isinstance(leaf, fx.Node)}

    # Which calls can stand on their own

    def _chain(self, call: Call | None) -> Iterator[Call]:
        """A call and its callers, from the inside, as far as they stand on their own."""
        while call is not None:
            if call not in self.bad:
                yield call
            call = call.caller

    def _find_bad(self) -> None:
        calls, origin = self.written.calls, self.written.origin
        for call in calls:
            reason = self._why_not_alone(call)
            if reason is not None:
                self.bad[call] = reason
        for node in self.written.graph.nodes:
            if node.op == "call_module":
                self._check_place(str(node.target), origin[node][1])
            for read in node.all_input_nodes:
                self._check_read(read, origin[node][1])
        for call in calls:
            for node in self.given[call]:
                self._check_read(node, call.caller)
            for node in self.gives[call]:
                self._check_read(node, call)
            if call not in self.bad and not call.method:
                for caller in list(self._chain(call.caller)):
                    if not _within(call.path, caller.path):
                        self.bad[caller] = f"it calls {call.path}"

    def _why_not_alone(self, call: Call) -> str | None:
        if not call.method and call.path in self.targets[call]:
            return ""  # it became a module, perhaps with others beside it
        given = list(call.arguments.values())
        parameters = list(call.signature.parameters.values())
        defaults = [p.default for p in parameters if p.default is not p.empty]
        if not all(map(_is_plain, leaves([given, defaults]))):
            return "its arguments are not only tensors, numbers and texts"
        if not all(map(_is_plain, leaves(call.result))):
            return "it gives something else than tensors"
        optional = [p.default is not p.empty for p in parameters if p.kind not in _VARIOUS]
        if optional != sorted(optional):
            return "an optional argument comes before one that is not"
        nodes = [n for n in leaves([given, call.result]) if isinstance(n, fx.Node)]
        if any(self.written.found.get(node) is None for node in nodes):
            return "something that it reads or gives is gone"
        return None

    def _check_place(self, name: str, call: Call | None) -> None:
        """A module with numbers has to be a part of what calls it."""
        own = name in self.written.names or len(self.callers[name]) > 1
        if own and not self.written.stateless(name):
            for caller in list(self._chain(call)):
                if not _within(name, caller.path):
                    self.bad[caller] = f"it calls {name}"

    def _check_read(self, node: fx.Node, reader: Call | None) -> None:
        """What is read in a call has to be made there, or passed to it by all its callers."""
        readers = list(self._chain(reader))
        if node.op == "get_attr":
            name = str(node.target)
            for call in readers if name not in self.written.constants else ():
                if not _within(name, call.path):
                    self.bad[call] = f"it reads {name}"
            return
        makers = list(self._chain(self.written.origin[node][1]))
        for call in makers:
            if call not in readers and node not in self.gives[call]:
                self.bad[call] = "what it computes is read elsewhere"
        for call in readers:
            if call not in makers and node not in self.given[call]:
                self.bad[call] = "it reads more than its arguments"

    # The graphs

    def _write(self) -> str | None:
        """Write all graphs; or say which module has calls that are not the same."""
        self.divided = Divided()
        self.told: dict[str, list[Any]] = {}
        self.placed = {}
        if self.base is not None:
            self.divided.renamed = dict(self.base.divided.renamed)
            self.divided.aliases = dict(self.base.divided.aliases)
            self.told = dict(self.base.told)
            self.placed = dict(self.base.placed)
        self.differs: str | None = None
        self.items = self._items()
        top = self.written.top
        if top is not None:
            self.divided.methods["", top.method] = self._graph_of(top)[0]
            return self.differs
        self.divided.graphs[""] = self._graph_of(None)[0]
        methods = {(c.path, c.method): c for c in reversed(self.written.calls) if c.method}
        for (path, method), call in methods.items():
            gives = any(isinstance(leaf, fx.Node) for leaf in leaves(call.result))
            if gives and call not in self.bad and path in self.divided.graphs:
                graph, _ = self._graph_of(call)
                self.divided.methods[path, method] = graph
        return self.differs

    def _items(self, method: Call | None = None) -> dict[Call | None, list[Any]]:
        """The nodes and calls in the code of each call, in order.

        The code of methods is that of their callers, but for the one that is named.
        """

        def home(call: Call | None) -> Call | None:
            return next((c for c in self._chain(call) if not c.method or c is method), None)

        items: dict[Call | None, list[tuple[int, int, Any]]] = defaultdict(list)
        for node in self.written.graph.nodes:
            place, call = self.written.origin[node]
            items[home(call)].append((place, 1, node))
        for call in self.written.calls:
            if call not in self.bad and not call.method:
                items[home(call.caller)].append((call.start, 0, call))
        return {c: [i[2] for i in sorted(found, key=lambda i: i[:2])] for c, found in items.items()}

    def _graph_of(self, top: Call | None) -> tuple[fx.Graph, list[Any]]:
        """The graph of a call, or of the network; and what it computes, as a list to compare."""
        path = "" if top is None else top.path
        graph = fx.Graph()
        here: dict[fx.Node, fx.Node] = {}
        inserted: dict[fx.Node, str] = {}

        def read(node: fx.Node) -> fx.Node:
            if node not in here and node.op == "get_attr":
                here[node] = graph.get_attr(self._name_of_attribute(str(node.target), path))
            return here[node]

        def passed(given: Any) -> Any:
            return fx.node.map_arg(fx.node.map_arg(given, lambda n: self.written.found[n]), read)

        if top is not None:
            _arguments(graph, top, self.written.found, here)
        items = self._items(top) if top is not None and top.method else self.items
        for item in items.get(top, ()):
            if isinstance(item, Call):
                self._part(item)
                made = graph.call_module(
                    _relative(item.path, path), passed(item.args), passed(item.kwargs)
                )
                _unpack(graph, item.result, made, self.written.found, here.__setitem__)
            elif item.op != "get_attr":
                made = here[item] = graph.node_copy(item, read)
                made.type = None  # annotations may be texts, which no file can hold
                made.meta = {k: v for k, v in item.meta.items() if k == "is_wrapped"}
                if item.op == "call_module":
                    made.target = self._name_of_module(str(item.target), path)
                    if str(item.target) not in self.written.names:
                        inserted[made] = self.written.describe(str(item.target))
        if top is not self.written.top:
            graph.output(passed(top.result if top else None))
        remove_unused(graph)
        return graph, _told(graph, inserted)

    def _part(self, call: Call) -> None:
        """Write the graph of a call, or find it equal to that of an earlier one."""
        divided = self.divided
        if call.path not in self.told:
            divided.graphs[call.path], self.told[call.path] = self._graph_of(call)
            return
        before = dict(divided.renamed), dict(divided.aliases)
        _, told = self._graph_of(call)
        divided.renamed, divided.aliases = before
        if told != self.told[call.path]:
            self.differs = call.path

    def _name_of_module(self, name: str, path: str) -> str:
        """What a module is called where it is used."""
        divided, source = self.divided, self.written.names
        place = self.placed.get(name)
        if place is not None and _within(place, path):
            return _relative(place, path)
        if name not in source and len(self.callers[name]) == 1 and place is None:
            self.placed[name] = name
            if _within(name, path) and parent_of(name) == path:
                return _relative(name, path)
            # It moves: what calls it has it, and lists that it stood in have their own items only.
            if _within(name, path):
                leaf = _relative(name, path).replace(".", "_")
            else:
                leaf = name.rpartition(".")[2].removeprefix(f"{path.rpartition('.')[2]}_")
            new = self._free(f"{path}.{leaf}" if path else leaf, name)
            divided.renamed[name] = self.placed[name] = new
        elif place is None and _within(name, path):
            if name not in source:
                self.placed[name] = name
            return _relative(name, path)
        else:
            names = [n for n in source.get(name, ()) if parent_of(n) == path]
            new = names[0] if names else self._free(f"{path}.{name.rpartition('.')[2]}", name)
            divided.aliases[new] = name
        return _relative(new, path)

    def _name_of_attribute(self, name: str, path: str) -> str:
        if name in self.written.constants and path:
            new = f"{path}.{name.rpartition('.')[2]}"
            self.divided.aliases[new] = name
            return _relative(new, path)
        return _relative(name, path)

    def _free(self, wanted: str, module: str) -> str:
        """A name that no other module has."""
        name, number = wanted, 1
        divided = self.divided
        new = {n: old for old, n in divided.renamed.items()} | divided.aliases
        while new.get(name, module) != module or self._taken(name):
            number += 1
            name = f"{wanted}_{number}"
        return name

    def _taken(self, name: str) -> bool:
        leaf = name.rpartition(".")[2]
        return name in self.written.names or name in self.callers or hasattr(fx.GraphModule, leaf)


def _arguments(
    graph: fx.Graph, call: Call, found: dict[fx.Node, Any], here: dict[fx.Node, fx.Node]
) -> None:
    """The arguments of a call; those that were no tensors have to be what they were."""
    stars: dict[Any, str] = dict(zip(_VARIOUS, ("*", "**"), strict=True))
    given = call.arguments
    made = {
        p.name: graph.placeholder(f"{stars.get(p.kind, '')}{p.name}", None, p.default)
        for p in call.signature.parameters.values()
    }
    for name, node in made.items():
        value = given.get(name, {} if str(node.target).startswith("**") else ())
        if any(isinstance(leaf, fx.Node) for leaf in leaves(value)):
            _unpack(graph, value, node, found, here.setdefault)
        else:
            same = graph.call_function(operator.eq, (node, value))
            text = (
                f"expected {name}={value!r}, for which {call.path or 'the network'} was converted"
            )
            graph.call_function(expect, (same, text)).meta["is_wrapped"] = True


def _unpack(
    graph: fx.Graph,
    given: Any,
    node: fx.Node,
    found: dict[fx.Node, Any],
    put: Callable[[fx.Node, fx.Node], Any],
) -> None:
    """Let a node stand for what was given, and its items for the items of that."""
    if isinstance(given, fx.Node):
        flat = found.get(given, given)
        if isinstance(flat, fx.Node):
            put(flat, node)
        else:
            _unpack(graph, flat, node, {}, put)
    elif isinstance(given, tuple | list | dict):
        pairs = given.items() if isinstance(given, dict) else enumerate(given)
        for key, value in pairs:
            if any(isinstance(leaf, fx.Node) for leaf in leaves(value)):
                item = graph.call_function(operator.getitem, (node, key))
                _unpack(graph, value, item, found, put)


def _told(graph: fx.Graph, inserted: dict[fx.Node, str]) -> list[Any]:
    place = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            inserted.get(node, node.target),
            repr(fx.node.map_arg((node.args, node.kwargs), lambda n: place[n])),
        )
        for node in graph.nodes
    ]
