"""The converted network: ordinary modules with the source's names, places and call signatures."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, fx, nn
from torch.fx.graph_module import reduce_graph_module

from econv.conversion.fusion import switched
from econv.conversion.recipe import Recipe
from econv.conversion.structure import Divided, parent_of
from econv.groups import Group
from econv.pretrained import Saved

if TYPE_CHECKING:
    from torch.fx.graph import PythonCode

    from econv.conversion.report import Report

__all__ = ["Classifier", "ConvertedNetwork", "ConvertedPart", "Head", "assemble", "sizes_in_order"]

_GENERATED = ("_graph", "_code", "_lineno_map", "_prologue_start")


class ConvertedPart(fx.GraphModule):
    """A module of a converted network: what one call of the source's module became.

    It has the class name, the arguments and the results of the source's. On GPUs norm, ReLU and
    convolution that follow each other run in one go where they can, also across its parts as long
    as these have no hooks, as :func:`econv.layers.norm_relu_conv` says; ``graph`` and ``code``
    have the three.
    """

    def __init__(self, graph: fx.Graph, name: str) -> None:
        """Without the modules and tensors that the graph names: they are given later."""
        empty = fx.Graph()
        empty.output(None)
        super().__init__({}, empty, name)
        self.graph = graph

    def recompile(self) -> PythonCode:
        """Make ``forward`` from the graph. Parts are recompiled on their own."""
        code = super().recompile()
        made: Any = type(self)
        made.forward = switched(made.forward)
        return code

    def _recompile_submodules(self) -> list[tuple[str, PythonCode]]:
        return []

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedPart:
        copied = self._kind()(copy.deepcopy(self.graph), type(self).__name__)
        memo[id(self)] = copied
        state = {name: value for name, value in vars(self).items() if name not in _GENERATED}
        vars(copied).update(copy.deepcopy(state, memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        arguments: Any = super().__reduce__()[1]
        return _unpickle, (self._kind(), type(self).__name__, *arguments)

    def sharing(self, graph: fx.Graph, name: str) -> ConvertedPart:
        """Something else that is computed with the same modules, parameters and buffers."""
        made = ConvertedPart(graph, name)
        for shared in ("_modules", "_parameters", "_buffers"):
            vars(made)[shared] = vars(self)[shared]
        return made

    def _kind(self) -> type[ConvertedPart]:
        """Its class as it is written here; torch gives every graph a class of its own."""
        return next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)


class ConvertedNetwork(ConvertedPart, Saved):
    """An equivariant network made by :func:`~econv.convert`.

    Its parts have the names that they have in the source, and are called where the source calls
    them. :attr:`report` says what became what.
    """

    input_kind = "scalar"
    group: Group
    report: Report
    output_kind: str
    made_by: Recipe
    former: Mapping[str, str]
    """Names that parts with numbers had in earlier versions, and those that they have."""

    def describe_as(self, **told: Any) -> ConvertedNetwork:
        """Say what the network is: its group, output_kind and report. Copies say it too."""
        vars(self).update(told)
        return self

    @property
    def recipe(self) -> dict[str, Any]:
        """What was asked for and the widths that were chosen, in numbers and texts that JSON has.

        :func:`econv.rebuild` makes the same modules of it and of the source.
        """
        return self.made_by.written()

    def _made_of(self) -> tuple[str, Mapping[str, Any]]:
        return ConvertedNetwork.__name__, self.recipe

    @property
    def get_classifier(self) -> Callable[..., Any]:
        """Gives the classifier, or its name: of sources that have this method."""
        return self._classifier(resets=False)[1]

    @property
    def reset_classifier(self) -> Callable[..., None]:
        """Put a new linear map in the place of the classifier, as sources of timm's kind do.

        ``reset_classifier(num_classes)`` makes one with new weights; with 0 classes the network
        returns the features that the classifier would read.
        """
        return self._classifier(resets=True)[0]

    def _classifier(self, resets: bool) -> tuple[Callable[..., None], Callable[..., Any]]:
        known: Classifier | None = vars(self).get("classifier_of")
        if known is None or (resets and not known.resets):
            raise AttributeError("expected a source whose classifier can be asked for or reset")

        def get(name_only: bool = False) -> Any:
            return known.name if name_only else self.get_submodule(known.name)

        def reset(num_classes: int, global_pool: str | None = None) -> None:
            if global_pool not in (None, known.pool):
                raise ValueError(
                    f"expected global_pool={known.pool!r}, as the network was converted; got "
                    f"{global_pool!r}: forward_features gives the map that is pooled"
                )
            before = get()
            if not known.features or not isinstance(before, nn.Linear | nn.Identity):
                raise ValueError(
                    f"expected a classifier that is linear; {known.name} is {before}: convert the "
                    "source with another classifier"
                )
            layer: nn.Module = nn.Identity()
            if num_classes:
                like = next(self.parameters(), Tensor())
                layer = nn.Linear(
                    known.features, num_classes, known.bias, device=like.device, dtype=like.dtype
                )
            self.set_submodule(known.name, layer.train(self.training))
            vars(self)["num_classes"] = num_classes
            vars(self)["made_by"] = replace(self.made_by, num_classes=num_classes)

        return reset, get

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *told: Any) -> None:
        for key in list(state_dict):
            name = key.removeprefix(prefix)
            for old, new in vars(self).get("former", {}).items():
                if key.startswith(prefix) and (name == old or name.startswith(f"{old}.")):
                    value = state_dict.pop(key)
                    if new:
                        state_dict[prefix + new + name[len(old) :]] = value
        super()._load_from_state_dict(state_dict, prefix, *told)


class Classifier(NamedTuple):
    """The last layer of a network that offers to reset it."""

    name: str
    features: int
    """How many numbers it reads; 0 where it is no linear map."""
    bias: bool
    pool: str
    """What pools before it, as the source calls it."""
    resets: bool


class Head(nn.Module):
    """The ``forward_head`` of a network: scores, or the features that the classifier reads."""

    scores: ConvertedPart
    features: ConvertedPart

    def __init__(self, scores: ConvertedPart, features: ConvertedPart) -> None:
        super().__init__()
        vars(self).update(scores=scores, features=features)  # no parts: theirs are the network's

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        found: Tensor = (self.features if pre_logits else self.scores)(x)
        return found


class _ListPart(ConvertedPart):
    """A module that was a list, and its parts by their places in the source."""

    order: tuple[str, ...]
    """The names in the source."""

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[nn.Module]:
        return (getattr(self, name) for name in self.order if name in self._modules)

    def __getitem__(self, place: int | slice) -> nn.Module:
        if isinstance(place, slice):
            names = self.order[place]
            whole = list(self._modules) == list(self.order)
            if not whole:
                raise ValueError(
                    f"expected one item; got {place}: other modules stand between those of "
                    f"{type(self).__name__}, whose parts are {list(self._modules)}"
                )
            return nn.Sequential(OrderedDict((name, getattr(self, name)) for name in names))
        return self.get_submodule(self._named(place))

    def __setitem__(self, place: int, module: nn.Module) -> None:
        setattr(self, self._named(place), module)

    def _named(self, place: int) -> str:
        name = self.order[place]
        if name not in self._modules:
            raise IndexError(f"expected an item that the source calls; got {place}: it is gone")
        return name


class _DictPart(ConvertedPart):
    """A module that was a dictionary, and its parts by their names."""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)

    def __setitem__(self, name: str, module: nn.Module) -> None:
        setattr(self, name, module)

    def keys(self) -> Any:
        return self._modules.keys()

    def items(self) -> Any:
        return self._modules.items()

    def values(self) -> Any:
        return self._modules.values()


class _ListNetwork(_ListPart, ConvertedNetwork):
    pass


class _DictNetwork(_DictPart, ConvertedNetwork):
    pass


def _unpickle(
    kind: type[ConvertedPart], name: str, body: dict[str, Any], import_block: str
) -> ConvertedPart:
    plain: Any = reduce_graph_module(dict(body), import_block)
    made = kind(plain.graph, name)
    vars(made).update({name: value for name, value in body.items() if name not in _GENERATED})
    return made


def _kind_of(source: nn.Module | None, network: bool) -> type[ConvertedPart]:
    if isinstance(source, nn.Sequential | nn.ModuleList):
        return _ListNetwork if network else _ListPart
    if isinstance(source, nn.ModuleDict):
        return _DictNetwork if network else _DictPart
    return ConvertedNetwork if network else ConvertedPart


def assemble(
    source: nn.Module,
    divided: Divided,
    modules: Mapping[str, nn.Module],
    tensor: Callable[[str], Tensor],
) -> ConvertedNetwork:
    """The network of these graphs, with its modules and tensors where the source has them.

    Args:
        source: what was converted.
        divided: the graphs.
        modules: the converted layers, by the names that they had in the flat graph.
        tensor: gives a parameter, buffer or constant.
    """
    return _Assembly(source, divided, modules, tensor).network()


class _Assembly:
    def __init__(
        self,
        source: nn.Module,
        divided: Divided,
        modules: Mapping[str, nn.Module],
        tensor: Callable[[str], Tensor],
    ) -> None:
        self.divided = divided
        self.sources = dict(source.named_modules(remove_duplicate=False))
        self.training = source.training
        flat = {new: old for old, new in divided.renamed.items()} | divided.aliases
        self.layers: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        made: dict[str, Tensor] = {}
        methods = [(path, graph) for (path, _), graph in divided.methods.items()]
        for path, graph in [*divided.graphs.items(), *methods]:
            for node in graph.nodes:
                name = f"{path}.{node.target}" if path else str(node.target)
                old = flat.get(name, name)
                if node.op == "get_attr":
                    if old not in made:
                        made[old] = tensor(old)
                    self.tensors[name] = made[old]
                elif node.op == "call_module" and name not in divided.graphs:
                    self.layers[name] = modules[old]
                    if name in divided.aliases and old in self.sources:
                        self.layers[old] = modules[old]
        self.children: dict[str, dict[str, None]] = {}
        for name in [*divided.graphs, *self.layers, *self.tensors]:
            while name:
                self.children.setdefault(parent_of(name), {})[name] = None
                name = parent_of(name)

    def network(self) -> ConvertedNetwork:
        made: Any = self._make("")
        for (path, name), graph in self.divided.methods.items():
            part = made.get_submodule(path)
            vars(part)[name] = part.sharing(graph, name)
        found: ConvertedNetwork = made
        return found

    def _make(self, path: str) -> nn.Module:
        source = self.sources.get(path)
        order = [] if source is None else list(source._modules)
        below = [n for n in self.children.get(path, ()) if n not in self.tensors]
        names = [name.rpartition(".")[2] for name in below]
        places = {name: order.index(name) if name in order else len(order) for name in names}
        parts = {
            name: self._part(f"{path}.{name}" if path else name)
            for name in sorted(names, key=places.__getitem__)
        }
        made = self._empty(path, source, list(parts) == order, list(parts))
        for name, part in parts.items():
            made.add_module(name, part)
        for name in self.children.get(path, ()):
            if name in self.tensors:
                self._add_tensor(made, name)
        made.training = self.training if source is None else source.training
        return made

    def _part(self, path: str) -> nn.Module:
        return self.layers[path] if path in self.layers else self._make(path)

    def _empty(
        self, path: str, source: nn.Module | None, whole: bool, names: list[str]
    ) -> nn.Module:
        graph = self.divided.graphs.get(path)
        if graph is None:
            kind = type(source)
            if kind is nn.ModuleDict:
                return nn.ModuleDict()
            if kind in (nn.ModuleList, nn.Sequential):  # the latter is called if it is complete
                return nn.Sequential() if whole and kind is nn.Sequential else nn.ModuleList()
            return nn.Module()
        if path and whole and _in_a_row(graph, names) and _forwards(source) is _SEQUENTIAL:
            return nn.Sequential()
        made = _kind_of(source, network=not path)(graph, type(source).__name__)
        if isinstance(made, _ListPart) and source is not None:
            made.order = tuple(source._modules)
        return made

    def _add_tensor(self, module: nn.Module, name: str) -> None:
        leaf, given = name.rpartition(".")[2], self.tensors[name]
        if isinstance(given, nn.Parameter):
            module.register_parameter(leaf, given)
        else:
            module.register_buffer(leaf, given, persistent=name not in self.divided.aliases)


_SEQUENTIAL = nn.Sequential.forward


def _forwards(module: nn.Module | None) -> Any:
    return type(module).forward if module is not None else None


def _in_a_row(graph: fx.Graph, names: list[str]) -> bool:
    """Whether a graph calls these modules one after the other, and nothing else."""
    nodes = list(graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    if [node.target for node in calls] != names or len(nodes) != len(calls) + 2:
        return False
    return all(after.args == (before,) and not after.kwargs for before, after in pairwise(nodes))


def sizes_in_order(x: Tensor, order: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The sizes of the axes that a tensor has in the source, each of so many axes here."""
    return tuple(math.prod(x.shape[place] for place in places) for places in order)
