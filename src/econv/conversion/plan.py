"""What becomes of each operation: the kind of every tensor, the parts to be built, the steps.

The plan is made once, for widths that are not known yet; the same plan is then counted for many
widths and built for one. What each operation becomes is the business of `rules`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from econv import layers
from econv.conversion.trace import LEAVE, ConversionError, Trace, line_of, owner, value_of
from econv.conversion.widths import Sizes, Width, count_of, join, runs
from econv.groups import Group
from econv.layers import ConvOptions, GroupWindowConv, PDOConv
from econv.layers.sampling import Upsample

__all__ = [
    "POSITIONS",
    "VECTOR",
    "Emission",
    "Plan",
    "PlannedModule",
    "Row",
    "Value",
    "in_source_order",
    "multiply_adds",
]

POSITIONS = "DHW"
"""The axes of positions; images have the last two of them."""

VECTOR = ("N", "C")

ATTENTION = "attention"
"""The pooling over orientations that is learned."""

_FEW = 32
"""So many channels at the end of a network have a field each."""

Make = Callable[[Sizes, dict[str, Any]], nn.Module]


@dataclass(frozen=True)
class Value:
    """How one tensor of the source turns, and where its axes lie.

    Kinds: ``"image"`` (channels that turn as images do), ``"fields"`` (group features),
    ``"invariant"`` (no pixels, nothing turns), ``"parameter"`` (also a buffer, or what is made of
    numbers and sizes alone), ``"list"`` (of fields), ``"left"`` (follows something that was left
    alone), ``"other"`` (no tensor).

    Group features are always ``[N, C, H, W]``, ``[N, C]`` or, for stacked paths,
    ``[N, P, C, H, W]`` in the converted network, whatever the order of the axes in the source, and
    those of volumes have an axis ``D`` before ``H``:
    ``axes`` are the source's, with ``"1"`` for one that the converted network does without. Maps
    whose positions are in a row, ``("N", "C", "HW")``, or that are flattened, ``("N", "CHW")``,
    stay maps. Images keep the shape that they have in the source.
    """

    kind: str
    axes: tuple[str, ...] = ()
    widths: tuple[Width, ...] = ()
    items: tuple[Value, ...] = ()
    start: tuple[Width, ...] = ()
    """For an item of a list: the widths before it."""
    sides: tuple[int, ...] = (1, 1)
    """Where the axes of positions are one: how many each has."""

    @property
    def channels(self) -> int:
        """The source's channels of a group feature map."""
        return count_of(self.widths)

    @property
    def has_pixels(self) -> bool:
        """Whether positions are left."""
        return any("H" in axis for axis in self.axes)

    @property
    def pixels(self) -> set[str]:
        """The axes of positions that are left."""
        return set(POSITIONS) & set("".join(self.axes))

    def place(self, axis: str) -> int:
        """The dimension of an axis in the converted network."""
        return self.layout.index(axis)

    def places(self, axis: str) -> tuple[int, ...]:
        """The dimensions of an axis, of which the source may have made one."""
        return () if axis == "1" else tuple(self.place(letter) for letter in axis)

    @property
    def layout(self) -> tuple[str, ...]:
        """The axes in the converted network."""
        return tuple(a for a in f"NIPC{POSITIONS}" if a in "".join(self.axes))


OTHER = Value("other")


@dataclass
class Row:
    """One line of the report."""

    name: str
    source: str
    became: str | Callable[[nn.Module], str]


@dataclass
class PlannedModule:
    """A module of the converted network, to be made for widths that are chosen later."""

    name: str
    make: Make
    source: nn.Module | None = None
    positions: int = 0
    """At how many pixels of one image it is evaluated, all calls together."""
    into: tuple[Width, ...] = ()
    out: tuple[Width, ...] = ()
    fit: Callable[[Any, nn.Module], float | None] | None = None
    """Takes over the source's weights: what is left, relative to their norm."""
    kept: bool = False
    """Whether it is the source's own module."""


class Emission:
    """The converted graph while it is written."""

    def __init__(self, sizes: Sizes, plan: Plan, result: Any = None) -> None:
        self.result = result
        """What is returned, in nodes of the source."""
        self.graph = fx.Graph()
        self.sizes = sizes
        self.plan = plan
        self.found: dict[fx.Node, fx.Node] = {}

    def __getitem__(self, node: fx.Node) -> fx.Node:
        return self.found[node]

    def args(self, arguments: Any) -> Any:
        """Arguments of the source, with its nodes replaced."""
        return fx.node.map_arg(arguments, lambda node: self.found[node])

    def module(self, name: str, *args: Any) -> fx.Node:
        return self.graph.call_module(name, args)

    def method(self, name: str, *args: Any) -> fx.Node:
        return self.graph.call_method(name, args)

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def copy(self, node: fx.Node, readers: Mapping[fx.Node, Step] | None = None) -> fx.Node:
        """A node of the source, with what these steps write in place of some that it reads."""
        here = {read: reader(self) for read, reader in (readers or {}).items()}
        return self.graph.node_copy(node, lambda n: here.get(n, self.found.get(n, n)))


Step = Callable[[Emission], Any]


@dataclass
class Plan:
    """The plan of one conversion."""

    trace: Trace
    group: Group
    reduce: str
    options: ConvOptions
    strict: bool
    fitted: bool = False
    """Whether layers take over the source's filters, and need operators that reach them."""
    smooth: bool = False
    """Whether activations, poolings and strides are those that keep frequencies the grid holds."""
    smoothed: dict[str, Callable[[], nn.Module]] = field(default_factory=dict)
    """Of the modules that do so, what would be in their place otherwise."""
    given: Trace = field(init=False)
    """The pass of the network as it was given: its costs and outputs are the source's."""
    made: dict[str, nn.Module] = field(default_factory=dict)
    """The modules of the converted network, by the names of their parts."""
    values: dict[fx.Node, Value] = field(default_factory=dict)
    parts: dict[str, PlannedModule] = field(default_factory=dict)
    steps: list[tuple[fx.Node, Step]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    heads: frozenset[fx.Node] = frozenset()
    inner: frozenset[fx.Node] = frozenset()
    """What another convolution or linear map reads."""
    finer: set[fx.Node] = field(default_factory=set)
    """Convolutions that give the finer map, of which the source lays channels out as pixels."""
    before: dict[str, str] = field(default_factory=dict)
    """What stands before layers, wherever these are called: modules without parameters."""
    reads: dict[str, str] = field(default_factory=dict)
    """Of which kind is what layers read at their first call."""
    scores: dict[str, list[str]] = field(default_factory=dict)
    """Of what pools orientations by attention, the modules that score them beside it."""
    used: set[str] = field(default_factory=set)
    blanks: dict[tuple[Any, ...], nn.Module] = field(default_factory=dict)
    in_training: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """What each node is when the source is trained, where that is the same graph."""

    # What rules ask

    @property
    def dimension(self) -> int:
        """Of the space: 2 for images, 3 for volumes."""
        return self.group.dimension

    @property
    def pixels(self) -> tuple[str, ...]:
        """The axes of positions."""
        return tuple(POSITIONS[-self.dimension :])

    @property
    def image(self) -> tuple[str, ...]:
        """The axes of a map."""
        return (*VECTOR, *self.pixels)

    @property
    def paths(self) -> tuple[str, ...]:
        """The axes of stacked paths."""
        return ("N", "P", "C", *self.pixels)

    @property
    def bags(self) -> tuple[str, ...]:
        """The axes of bags of images."""
        return ("N", "I", "C", *self.pixels)

    @property
    def flat(self) -> tuple[tuple[str, ...], ...]:
        """The axes of a flattened map."""
        row = "".join(self.pixels)
        return (("N", f"C{row}"), ("N", f"{row}C"))

    def layer(self, name: str) -> Callable[..., nn.Module]:
        """The layer of this dimension, such as `GroupPool2d` for ``"GroupPool"``."""
        found: Callable[..., nn.Module] = getattr(layers, f"{name}{self.dimension}d")
        return found

    def plain(self, name: str) -> Callable[..., nn.Module]:
        """The module of torch of this dimension, such as `Conv2d` for ``"Conv"``."""
        found: Callable[..., nn.Module] = getattr(nn, f"{name}{self.dimension}d")
        return found

    @property
    def in_frames(self) -> bool:
        """Whether each orientation reads windows where the source does in an image turned so."""
        plane = self.dimension == 2
        return plane and self.fitted and self.group.order > 1 and not self.smooth

    def value(self, argument: Any) -> Value:
        """The value of an argument of a node."""
        return self.values[argument] if isinstance(argument, fx.Node) else OTHER

    def first(self, node: fx.Node) -> tuple[Any, Value]:
        """The first argument of a node, and its value."""
        return node.args[0], self.value(node.args[0])

    def values_read(self, node: fx.Node) -> list[Value]:
        """The values of everything that a node reads."""
        return [self.value(read) for read in node.all_input_nodes]

    def module(self, node: fx.Node) -> Any:
        """The source's module that a node calls."""
        return self.trace.modules[str(node.target)]

    def new_name(self, wanted: str) -> str:
        """A name that no part of the network has."""
        plain = wanted.replace("/", "_")
        name, number = plain, 1
        while name in self.used or name in self.trace.modules or name in self.parts:
            number += 1
            name = f"{plain}_{number}"
        self.used.add(name)
        return name

    # What rules do

    def emit(self, node: fx.Node, value: Value, step: Step) -> Value:
        """Let a node become what the step writes."""
        self.steps.append((node, step))
        return value

    def copy(self, node: fx.Node, value: Value) -> Value:
        """Let a node be what it is in the source, with a module as it is."""
        if node.op == "call_module":
            self.keep(node)
        return self.emit(node, value, lambda e: e.copy(node))

    def copy_constant(self, node: fx.Node) -> Value:
        """Let a node be what it is, where nothing that it reads turns."""
        kinds = {value.kind for value in self.values_read(node)}
        learned = node.op != "call_module" and "invariant" not in kinds
        return self.copy(node, Value("parameter" if learned else "invariant"))

    def keep(self, node: fx.Node, became: str = "as it is") -> None:
        """Take a module of the source as it is."""
        name = str(node.target)
        source = self.trace.modules[name]
        part = self.parts.get(name)
        if part is None:
            part = PlannedModule(
                name, lambda sizes, where: copy.deepcopy(source), source, kept=True
            )
            self.parts[name] = part
            self.rows.append(Row(name, describe(source), became))
        part.positions += positions_of(node, source)

    def add_part(
        self,
        part: PlannedModule,
        became: str | Callable[[nn.Module], str] | None = None,
        source: str | None = None,
    ) -> str:
        """Add a module to the network, and a line to the report if the source has it too."""
        self.parts[part.name] = part
        source = describe(part.source) if part.source is not None else source
        if source is not None or became is not None:
            self.rows.append(Row(part.name, source or "–", became or describe))
        return part.name

    def add_shared(self, part: PlannedModule, became: str | None = None, **row: str) -> None:
        """Add a module that the source may use twice, on tensors of equal widths."""
        if part.name in self.parts:
            join(self.parts[part.name].into, part.into)
        else:
            self.add_part(part, became, **row)

    def insert(self, beside: str, suffix: str, module: Callable[[], nn.Module]) -> str:
        """Add a module without parameters that the source does not have."""
        name = self.new_name(f"{beside}_{suffix}" if beside else suffix)
        self.add_part(PlannedModule(name, lambda sizes, where: module()), describe(module()))
        return name

    def leave(self, node: fx.Node, reason: str) -> Value:
        """Stop, or leave an operation alone: it reads images of the source's channels."""
        name = owner(node)
        if self.strict:
            raise ConversionError(name, reason, line_of(node), LEAVE)
        self.left.append((name or node.name, reason))
        return self.as_in_source(node)

    def as_in_source(self, node: fx.Node) -> Value:
        """An operation as it is; group features that it reads are pooled over orientations."""
        readers: dict[fx.Node, Step] = {}
        for read in node.all_input_nodes:
            value = self.value(read)
            if value.kind in ("fields", "list"):
                if value.kind == "list":
                    raise ConversionError(owner(node), "it reads a list of group features")
                for width in runs(value.widths):
                    width.fix(width.channels)
                readers[read] = self.pooled(read, value, owner(node) or node.name)
        if node.op == "call_module":
            self.keep(node, "left alone")
        # What leaves an image an image does not keep the layers after it from lifting it.
        images = [v for v in map(self.value, node.all_input_nodes) if v.kind == "image"]
        out = value_of(node)
        if images and not readers and isinstance(out, Tensor) and out.ndim == len(images[0].axes):
            return self.emit(node, images[0], lambda e: e.copy(node, readers))
        return self.emit(node, Value("left"), lambda e: e.copy(node, readers))

    @property
    def reduce_to_one(self) -> str:
        """How orientations are pooled where a field may become one channel only."""
        first = self.reduce.split("+")[0]
        return "max" if first.startswith("top") else first

    def pool_part(self, beside: str, widths: tuple[Width, ...], reduce: str) -> str:
        """Add what pools fields of these widths over orientations."""
        if reduce != ATTENTION:
            return self.insert(
                beside, "orientations", lambda: self.layer("GroupPool")(self.group, reduce)
            )

        def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
            return self.layer("GroupAttentionPool")(sizes.fields(widths), self.group, **where)

        name = self.new_name(f"{beside}_orientations" if beside else "orientations")
        return self.add_part(PlannedModule(name, make, into=widths), describe, source="–")

    def pooled(self, node: fx.Node, value: Value, beside: str, reduce: str = "") -> Step:
        """A step that pools a node over orientations and gives it the source's axes.

        Every field becomes one channel, or what ``reduce`` makes of it.
        """
        axes = value.axes
        if "P" in axes:
            raise ConversionError(beside, f"it reads group features with axes {axes}")
        name = self.pool_part(beside, value.widths, reduce or self.reduce_to_one)
        return lambda e: in_source_order(e, e.module(name, e[node]), value)

    def as_image(self, node: fx.Node, value: Value, beside: str) -> tuple[Value, Step]:
        """Group features as images of the source's channels, each of which has a field."""
        for width in runs(value.widths):
            width.fix(width.channels)
        image = Value("image" if value.has_pixels else "invariant", value.axes, sides=value.sides)
        return image, self.pooled(node, value, beside)

    def as_channels(
        self, node: fx.Node, value: Value, beside: str
    ) -> Callable[[Emission, Any], Any]:
        """What makes group features the channels that the source has there, orientations pooled.

        Few channels at the end of a network have a field each. Of others a learned 1×1 map makes
        the channels, unless there are as many fields.
        """
        count = value.channels
        if "P" in value.axes:
            raise ConversionError(beside, f"it gives group features with axes {value.axes}")
        pool = self.pool_part(beside, value.widths, self.reduce_to_one)
        if count <= _FEW and node not in self.inner:
            for width in runs(value.widths):
                width.fix(width.channels)
            return lambda e, x: e.module(pool, x)
        name = self.new_name(f"{beside}_channels")
        into, maps = value.widths, value.has_pixels

        def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
            fields = sizes.fields(into)
            if fields == count:
                return nn.Identity()
            if maps:
                return self.plain("Conv")(fields, count, 1, bias=False, **where)
            return nn.Linear(fields, count, bias=False, **where)

        def fit(kept: Any, layer: Any) -> float | None:
            if not isinstance(layer, nn.Identity):
                with torch.no_grad():  # a field gives the channel that it stands for
                    layer.weight.zero_()
                    chosen = kept.channels(into)
                    layer.weight[chosen, torch.arange(len(chosen))] = 1.0
            return None

        pixels = value_of(node).numel() // max(1, value_of(node).shape[0] * count)
        part = PlannedModule(name, make, None, pixels, into, fit=fit)
        self.add_part(part, _describe_channels, source="–")
        return lambda e, x: e.module(name, e.module(pool, x))

    def spread(self, node: fx.Node, value: Value, beside: str) -> tuple[Value, Step]:
        """An image as group features that are the same in every orientation."""
        if value.axes not in (self.image, VECTOR):
            raise ConversionError(beside, f"it joins group features and an image {value.axes}")
        channels = int(value_of(node).shape[1])
        width = Width(channels, beside)
        width.fix(channels)
        name = self.insert(beside, "spread", lambda: self.layer("Spread")(self.group))
        return (
            Value("fields", value.axes, (width,)),
            lambda e: e.module(name, e[node]),
        )

    def output(self, node: fx.Node) -> None:
        """What the network returns: group features are pooled over orientations."""
        pooled: dict[fx.Node, Step] = {}
        for read in node.all_input_nodes:
            value = self.value(read)
            if any(item.kind == "fields" for item in value.items):
                raise ConversionError("", "it returns a list of parts of a feature map")
            if value.kind == "fields":
                pooled[read] = self._scalars(read, value)

        def step(e: Emission) -> fx.Node:
            here: dict[fx.Node, fx.Node] = {}

            def read(found: fx.Node) -> fx.Node:
                if found not in here:
                    here[found] = pooled[found](e) if found in pooled else e[found]
                return here[found]

            return e.graph.output(fx.node.map_arg(e.result, read))

        self.steps.append((node, step))

    def _scalars(self, node: fx.Node, value: Value) -> Step:
        """A step that returns group features as the channels that the source returns."""
        channels = self.as_channels(node, value, "output")
        return lambda e: in_source_order(e, channels(e, e[node]), value)

    # What becomes of the plan

    def widths(self) -> list[Width]:
        """Every width that a module of the plan has, as it is in the end."""
        found: dict[Width, None] = {}
        for part in self.parts.values():
            found.update(dict.fromkeys(runs((*part.into, *part.out))))
        return list(found)

    def build(self, sizes: Sizes, where: dict[str, Any]) -> dict[str, nn.Module]:
        """The modules, for these widths."""
        made = {name: part.make(sizes, where) for name, part in self.parts.items()}
        for name, part in self.parts.items():
            if not part.kept:  # also layers that have nothing but constants, such as blurs
                made[name].to(**where)
        return made

    def count(self, sizes: Sizes, what: str) -> int:
        """What these widths lead to: ``"params"``, ``"flops"`` (multiply-adds of one image) or
        ``"filters"`` (those that expand the filters, once a pass). Nothing is allocated.
        """
        total = 0
        for part in self.parts.values():
            if part.kept and part.source is not None:
                module: nn.Module = part.source
            elif part.into or part.out:
                module = self._blank(part, sizes)
            else:
                continue
            if what == "params":
                total += parameters(module)
            elif what == "flops":
                total += multiply_adds(module, part.positions)
            else:
                total += expansion(module)
        return total

    def _blank(self, part: PlannedModule, sizes: Sizes) -> nn.Module:
        """A part without data, made once for each of its widths."""
        of_blocks = tuple(sizes.block(width) for width in runs(part.into))
        key = (part.name, sizes.fields(part.into), sizes.fields(part.out), of_blocks)
        if key not in self.blanks:
            self.blanks[key] = part.make(sizes, {"device": "meta", "dtype": None})
        return self.blanks[key]


def _describe_channels(module: nn.Module) -> str:
    if isinstance(module, nn.Identity):
        return "a field for every channel"
    return f"{describe(module)}, reads the channels out of fewer fields"


def in_source_order(e: Emission, x: fx.Node, value: Value) -> fx.Node:
    """Pooled group features with the axes that they have in the source."""
    order = tuple(letter for axis in value.axes if axis != "1" for letter in axis)
    if order != value.layout:
        x = e.method("permute", x, *(value.place(letter) for letter in order))
    for place, axis in enumerate(axis for axis in value.axes if axis != "1"):
        if len(axis) > 1:
            x = e.method("flatten", x, place, place + len(axis) - 1)
    for place, axis in enumerate(value.axes):
        if axis == "1":
            x = e.method("unsqueeze", x, place)
    return x


def parameters(module: nn.Module) -> int:
    """The number of learned numbers."""
    return sum(p.numel() for p in module.parameters())


def multiply_adds(module: nn.Module, positions: int) -> int:
    """Multiplications of the convolutions and linear maps in a module, at so many pixels."""
    total = 0
    for layer in module.modules():
        if isinstance(layer, GroupWindowConv):
            total += layer.multiply_adds() * positions
        elif isinstance(layer, PDOConv):
            per_pixel = layer.in_channels * layer.out_channels // layer.groups
            total += per_pixel * layer.basis.size**layer.dimension * positions
        elif isinstance(layer, _ConvNd | nn.Linear):
            total += layer.weight.numel() * positions
    return total


def expansion(module: nn.Module) -> int:
    """Multiplications that make the filters of a module of its weights."""
    return sum(
        layer.weight.numel() * layer.group.order * layer.basis.size**layer.dimension
        for layer in module.modules()
        if isinstance(layer, PDOConv) and not isinstance(layer, GroupWindowConv)
    )


def positions_of(node: fx.Node, module: nn.Module) -> int:
    """The pixels of one image that a module of the source is evaluated at."""
    if isinstance(module, _ConvTransposeNd):
        counted, channels = value_of(node.args[0]), module.in_channels  # type: ignore[arg-type]
    else:
        counted = value_of(node)
        channels = getattr(module, "out_channels", getattr(module, "out_features", 0))
    if not isinstance(counted, Tensor) or not channels:
        return 0
    return counted.numel() // max(1, counted.shape[0] * int(channels))


def describe(module: nn.Module) -> str:
    """A module in one line, with the layers in it that do something."""
    inside = [describe(m) for m in module.children() if not isinstance(m, nn.Identity | Upsample)]
    own = f"{type(module).__name__}({module.extra_repr()})"
    if not inside:
        return own
    return " → ".join(inside if isinstance(module, nn.Sequential) else [own, *inside])
