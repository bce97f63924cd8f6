"""One call: plan, choose the widths, build, take over weights, measure and report."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from econv.conversion.arguments import argument
from econv.conversion.cubes import with_cubes
from econv.conversion.fit import Kept
from econv.conversion.fitting import fit_on_images
from econv.conversion.heads import find_ends
from econv.conversion.images import Given, Images, accuracies, read_images
from econv.conversion.network import ConvertedNetwork, assemble
from econv.conversion.offers import offer
from econv.conversion.operations import convert_node, is_image, is_leaf, pair_with_training
from econv.conversion.outputs import check_outputs
from econv.conversion.plan import ATTENTION, Emission, Plan, multiply_adds, parameters, positions_of
from econv.conversion.recipe import Recipe, described
from econv.conversion.refusals import explained
from econv.conversion.report import Accuracy, Cost, Line, Report, Turn, Unsmoothed
from econv.conversion.structure import Written, divide, leaves
from econv.conversion.trace import (
    Call,
    ConversionError,
    Trace,
    arguments_of,
    name_of,
    trace,
    value_of,
)
from econv.conversion.widths import Sizes, match_widths
from econv.groups import Group, GroupLike
from econv.layers import ConvOptions
from econv.layers.checks import MAPS, check_module, truth
from econv.layers.normalisation import calibrate
from econv.layers.orientations import read_statistics
from econv.pretrained import remade
from econv.testing import equivariance_error, transform

__all__ = ["MATCHES", "convert", "rebuild"]

MATCHES = ("params", "flops", "width", "fields")
_OPTIONS = {"stencils", "accuracy", "init", "engine"}


def convert(
    model: nn.Module,
    group: GroupLike = "p8",
    match: str | None = None,
    *,
    example_input: Tensor | tuple[Any, ...],
    strict: bool = True,
    pretrained: bool = False,
    images: Images | None = None,
    labels: Tensor | None = None,
    pool: str | None = None,
    options: ConvOptions | None = None,
    smooth: bool = False,
    methods: Sequence[str] = (),
    measure: bool = True,
) -> ConvertedNetwork:
    """Make a convolutional network equivariant.

    Convolutions become PDO-eConvs, the first of them the lifting one; norms, poolings, squeeze and
    excitation, dropout, strides and upsampling become their equivariant versions; orientations are
    pooled before the classifier, or before the last 1×1 convolution of a network that returns
    maps. Quarter turns and flips are exact to rounding on every image size that the network runs
    on: those of the source, but where its code asks about sizes, those with the answers of the
    example (the report names them, and other sizes are an error). Names of modules, the call
    signature and the shapes of the outputs stay: the converted network is run on the example, and
    refused if it returns other shapes.

    Args:
        model: the network; it is not changed. It must be possible to trace it with torch.fx, and
            its operations must have rules; it is converted as it computes in eval mode.
        group: a :class:`~econv.Group` or its name.
        match: what stays as it is in the source: ``"params"`` (the number of parameters),
            ``"flops"`` (multiply-adds of the dense filters), ``"width"`` (the number of channels:
            fields = channels / order), ``"fields"`` (a field for every channel). The default is
            ``"params"``, and ``"fields"`` with ``pretrained``.
        example_input: an image batch ``[batch, channels, height, width]`` of the size that will be
            used, or the tuple of all positional arguments.
        strict: stop with :class:`ConversionError` at what cannot be converted, at forward hooks,
            and (with ``measure``) at a network that a symmetry of the pixels changes by more than
            rounding; otherwise leave it alone, and say so in the report. Asymmetric kernels and
            unequal strides then stay ordinary convolutions of the group features; after anything
            else that is left alone, the rest of the network is.
        pretrained: start from the model's weights: every field keeps one channel of the source and
            its canonical filter is fitted to that channel's, with stencils that reach it
            (``"central"``). Otherwise weights are drawn anew, as the layers say.
        images: with ``pretrained``, images to fit to, upright as those in training: a tensor
            ``[number, channels, height, width]``, or a loader whose batches are tensors or (images,
            labels). Layer by layer, by least squares and without labels, the output in the frame
            of the images becomes that of the source's layer; norms and the classifier follow. A
            few hundred are enough; no more than 512 are fitted to.
        labels: classes of the images ``[number]``: the report then has the accuracy on all of them,
            before and after, as they are and turned.
        pool: how orientations are pooled, as :class:`~econv.GroupPool2d` reads it: ``"max"``
            (default), ``"mean+std"`` (default with ``smooth``: a maximum over angles jumps from one
            to the next, and a mean alone says too little), ``"top3"``, …. Several statistics reach
            a classifier or a last 1×1 convolution; where each field must become one channel, only
            the first is taken. ``"attention"`` (default with ``images``) weighs orientations by a
            learned map of their features, :class:`~econv.layers.GroupAttentionPool2d`.
        options: keywords of every PDO-eConv: ``stencils``, ``accuracy``, ``init``, ``engine``.
        smooth: keep the network equivariant at angles between quarter turns, too:
            activations become :class:`~econv.GroupActivation2d` (those with a kink SiLU, but with
            ``pretrained``), poolings that halve :class:`~econv.Downsample2d` of eight taps, and
            images are blurred before strides. The report says what each of the source's would
            cost. Borders stay square: small images want a margin, such as `nn.ZeroPad2d(4)` as the
            source's first layer.
        methods: names of methods that ``forward`` does not call, such as ``"embed"`` or
            ``"predict"``: they are methods of the converted network, too, with outputs as those of
            ``forward``. Each is traced with the example, as many of its arguments as it takes.
        measure: whether to run both networks to report their errors under rotations, and the
            converted one in float64 if that under a symmetry of the pixels is above rounding.

    Returns:
        The converted network, in the source's mode, dtype and device; its ``report`` says what
        became what.

    Raises:
        ConversionError: a ``ValueError`` with the name of the module and the reason.

    >>> cnn = nn.Sequential(
    ...     nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    ...     nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ...     nn.Linear(32, 10))
    >>> network = convert(cnn, "p4", match="width", example_input=torch.randn(2, 3, 16, 16))
    >>> network(torch.randn(5, 3, 16, 16)).shape
    torch.Size([5, 10])
    >>> print(network.report.summary()[2])
    parameters          5,450 → 1,370 (0.251×)
    """
    check_module(model)
    for name, value in (("strict", strict), ("pretrained", pretrained), ("smooth", smooth)):
        truth(name, value)
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"expected options as a mapping; got {options!r}")
    found = Group(group)
    _check_dimension(model, found)
    if found.dimension != 2 and images is not None:
        raise ValueError(
            f"expected no images for {found.name}: weights are fitted to images of two dimensions "
            "only; pretrained=True alone fits filters"
        )
    given = _read_images(model, images, labels, pretrained)
    if match is None:
        match = "fields" if pretrained else "params"
    if pool is None:
        learned = given is not None and found.order > 1
        pool = ATTENTION if learned else "mean+std" if smooth else "max"
    if pretrained:
        options = {"stencils": "central", **(options or {})}
    if match not in MATCHES:
        raise ValueError(f"expected match as one of {MATCHES}; got {match!r}")
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"expected an nn.Module that is not scripted; got {type(model).__name__}")
    if not any(is_image(x, found.dimension) for x in inputs):
        sides = MAPS[found.dimension].removeprefix("[batch, ")
        raise ValueError(
            f"expected an example_input [batch, {sides}, or bags of images [batch, instances, "
            f"{sides}; got "
            f"{[tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in inputs]}"
        )
    if given is not None and len(inputs) > 1:
        raise ValueError(f"expected a network of one argument to fit to images; got {len(inputs)}")
    unknown = set(options or {}) - _OPTIONS
    if unknown:
        raise ValueError(f"expected options among {sorted(_OPTIONS)}; got {sorted(unknown)}")
    recipe = Recipe(
        *(found, match, pool, strict, pretrained, smooth, options or {}, _methods(model, methods)),
        tuple(map(described, inputs)),
    )
    return _converted(model, recipe, inputs, given, pretrained, measure)


def rebuild(model: nn.Module, recipe: Mapping[str, Any]) -> ConvertedNetwork:
    """Make the modules of a conversion again: nothing is chosen, fitted or measured.

    Weights are new, and those of the network that gave the recipe can be loaded.

    Args:
        model: what was converted, with any weights; it is not changed.
        recipe: the :attr:`~econv.conversion.ConvertedNetwork.recipe` of a converted network, also
            one that was kept as JSON.

    Raises:
        ConversionError: for another network than the recipe's.
        ValueError: for what is no recipe.

    >>> cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
    >>> network = convert(cnn, "p4", "width", example_input=torch.randn(1, 3, 16, 16))
    >>> again = rebuild(cnn, network.recipe)
    >>> again.load_state_dict(network.state_dict())
    <All keys matched successfully>
    """
    check_module(model)
    found = Recipe.read(recipe)
    network = _converted(model, found, found.inputs(), None, False, False)
    if found.num_classes is not None:
        network.reset_classifier(found.num_classes)
    return network


@remade(ConvertedNetwork.__name__)
def _rebuild(model: nn.Module, **recipe: Any) -> ConvertedNetwork:
    return rebuild(model, recipe)


def _methods(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """The names of methods, if the network has them."""
    given = (names,) if isinstance(names, str) or not isinstance(names, Sequence) else tuple(names)
    for name in given:
        if not isinstance(name, str):
            raise ValueError(f"expected names of methods; got {names!r}")
        ours = hasattr(nn.Module, name) or name.startswith("_")
        if ours or not inspect.ismethod(getattr(model, name, None)):
            raise ValueError(
                f"expected methods of {type(model).__name__} beside forward; got {name!r}"
            )
    return given


def _converted(
    model: nn.Module,
    recipe: Recipe,
    inputs: tuple[Any, ...],
    given: Given | None,
    pretrained: bool,
    measure: bool,
) -> ConvertedNetwork:
    """The network of a recipe; with ``pretrained``, with the weights of its source."""
    found, match, strict = recipe.group, recipe.match, recipe.strict
    examples = [x for x in inputs if is_image(x, found.dimension)]
    _check_source(model, strict)
    if is_leaf(model):  # one layer: what is traced must contain it
        model = nn.Sequential(model).train(model.training)
    try:
        plan = _plan(model, inputs, recipe)
    except ConversionError as error:
        raise explained(error, model) from error.__cause__
    sizes = _choose(plan, match, model) if recipe.scale is None else Sizes(recipe.scale)
    own = next(model.parameters(), torch.empty(0))
    where = {"device": own.device, "dtype": own.dtype}
    network, lines, accuracy = _build(plan, sizes, where, model, pretrained, given)
    results = plan.given.results
    outputs = check_outputs(network, inputs, results[0])
    kind = _output_kind(plan, plan.trace.results[0])
    errors = _errors(model, network, inputs, found, kind, measure)
    if strict and measure:
        _check_exact(network, inputs, found, kind, errors["error"])
    for name, wanted, result in zip(
        recipe.methods, results[1:], plan.trace.results[1:], strict=True
    ):
        method, read = getattr(network, name), arguments_of(getattr(model, name), inputs)
        check_outputs(method, read, wanted, name)
        if strict and measure:
            turns = _output_kind(plan, result)
            change = max(_error(method, read, found, turns, e) for e in _symmetries(read, found))
            _check_exact(method, read, found, turns, change, name)
    costs = _costs(plan, match, sizes, model, len(examples[0]))
    report = Report(
        group=found.name,
        match=match,
        scale=sizes.scale,
        lines=lines,
        source_parameters=_called_parameters(plan, model),
        parameters=parameters(network),
        source_multiply_adds=_source_multiply_adds(plan.given),
        outputs=outputs,
        multiply_adds=costs[0].multiply_adds,
        costs=costs,
        batch=len(examples[0]),
        accuracy=accuracy,
        turns=_turns(model, network, inputs, found, kind) if measure else (),
        unsmoothed=_unsmoothed(plan, network, inputs, kind) if measure else (),
        **errors,
        left=tuple(plan.left),
        notes=tuple(_notes(plan, model, pretrained)),
    )
    missed = report.missed()
    if missed is not None:
        report = replace(report, notes=(*report.notes, missed))
    made_by = replace(recipe, scale=sizes.scale)
    return network.describe_as(group=found, output_kind=kind.kind, report=report, made_by=made_by)


_OF_DIMENSION: dict[int, tuple[type[nn.Module], ...]] = {
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}


def _check_dimension(model: nn.Module, group: Group) -> None:
    """Refuse a group of the plane for a network of volumes, and the reverse."""
    found = {d for d, kinds in _OF_DIMENSION.items() if _has(model, kinds)}
    if found and group.dimension not in found:
        wanted = {
            2: "of the plane, such as 'p4', for a network with two-dimensional convolutions",
            3: "of space, such as 'O', for a network with three-dimensional convolutions",
        }
        raise ValueError(f"expected a group {wanted[found.pop()]}; got {group.name!r}")


def _has(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def _check_source(model: nn.Module, strict: bool) -> None:
    """Refuse what would be converted into something else without a word."""
    for name, module in model.named_modules():
        ours = type(module).__module__.partition(".")[0] == __name__.partition(".")[0]
        if ours or isinstance(module, ConvertedNetwork):
            kind = type(module).__name__
            raise ConversionError(
                name, f"it is made by econv already: {kind}; expected plain torch"
            )
        if strict and _hooks(module):
            raise ConversionError(
                name, "it has forward hooks, which would be lost: remove them, or use strict=False"
            )


def _hooks(module: nn.Module) -> list[Any]:
    """Hooks that someone registered; those that reparametrise weights are torch's own."""
    found = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return [hook for hook in found if not type(hook).__module__.startswith("torch.nn.utils.")]


def _plan(model: nn.Module, inputs: tuple[Any, ...], recipe: Recipe) -> Plan:
    group, pool = recipe.group, recipe.pool
    if pool != ATTENTION:
        read_statistics(pool, group.order, "pool")  # what is unknown fails before it is traced
    alike, replaced = with_cubes(model) if group.dimension == 3 else (model, [])
    given, *others = (
        trace(source, inputs, is_leaf, recipe.methods, group.dimension)
        for source in ([model, alike] if replaced else [model])
    )
    found = others[0] if others else given
    _check_methods(found)
    plan = Plan(found, group, pool, recipe.options, recipe.strict, recipe.fitted, recipe.smooth)
    plan.given = given
    if replaced:
        plan.notes.append(
            "rotations exchange the axes: sides that differ became cubes of about as many voxels, "
            f"and maps have other sizes ({_some(replaced)})"
        )
    ends = find_ends(found.graph, found.modules)
    plan.heads, plan.inner = ends.heads, ends.inner
    pair_with_training(plan)
    for node in found.graph.nodes:
        convert_node(plan, node)
    if not any(part.out for part in plan.parts.values()):
        raise ConversionError("", "it has no convolution that could lift the image")
    return plan


def _check_methods(found: Trace) -> None:
    """Refuse methods that the converted network has already, with group features."""
    called = {call.method for call in found.passes[0].calls if not call.path and call.method}
    for one in found.passes[1:]:
        if one.method in called:
            raise ValueError(
                f"expected methods that forward does not call; {one.method} is one that it does: "
                "the converted network has it already"
            )


def _sizes(plan: Plan, match: str, model: nn.Module) -> Sizes:
    order = plan.group.order
    if match == "width":
        sizes = Sizes(1 / order)
    elif match == "fields":
        sizes = Sizes(1.0)
    elif match == "params":
        total = _called_parameters(plan, model)
        sizes = match_widths(lambda s: plan.count(s, "params"), total, order**-0.5)
    else:
        total = _source_multiply_adds(plan.given)
        sizes = match_widths(lambda s: plan.count(s, "flops"), total, 1 / order)
    return sizes


def _choose(plan: Plan, match: str, model: nn.Module) -> Sizes:
    order = plan.group.order
    sizes = _sizes(plan, match, model)
    narrow = sizes.too_narrow(plan.widths())
    if narrow and match == "width":
        worst = min(narrow, key=lambda width: width.channels)
        raise ValueError(
            f"expected at least {order / 2:g} channels in every layer for {plan.group.name} with "
            f"match='width' (half a field each); {worst.name} has {worst.channels}: choose a "
            "smaller group, another match or a wider network"
        )
    if narrow:
        plan.notes.append(f"{len(narrow)} narrow layers have one field, more than their share")
    return sizes


def _costs(plan: Plan, match: str, sizes: Sizes, model: nn.Module, images: int) -> tuple[Cost, ...]:
    """What this network costs, and what each other match would."""
    found = {match: sizes}
    for other in MATCHES:
        if other != match:
            with contextlib.suppress(ValueError):  # none comes near, or a layer is too narrow
                found[other] = _sizes(plan, other, model)
    before = _source_multiply_adds(plan.given) * images
    costs = []
    for name, chosen in found.items():
        work = plan.count(chosen, "flops")
        whole = work * images + plan.count(chosen, "filters")
        step = whole / before if before else math.nan
        costs.append(Cost(name, chosen.scale, plan.count(chosen, "params"), work, step))
    return tuple(costs)


def _source_multiply_adds(source: Trace) -> int:
    total = 0
    for node in source.graph.nodes:
        if node.op == "call_module":
            module = source.modules[str(node.target)]
            total += multiply_adds(module, positions_of(node, module))
        elif node.op == "call_function" and name_of(node) in ("conv2d", "conv3d"):
            weight: Any = argument(node, 1, "weight")
            total += value_of(weight).numel() * value_of(node).shape[2:].numel()
    return total


def _build(
    plan: Plan,
    sizes: Sizes,
    where: dict[str, Any],
    model: nn.Module,
    pretrained: bool,
    given: Given | None,
) -> tuple[ConvertedNetwork, tuple[Line, ...], tuple[Accuracy, ...]]:
    modules = plan.build(sizes, where)
    plan.made = modules
    errors: dict[str, float | None] = {}
    if pretrained:
        kept = Kept(plan, sizes)
        for name, part in plan.parts.items():
            kept.source = part.source
            if part.fit is not None:
                errors[name] = part.fit(kept, modules[name])
                _freeze(modules[name], part.source)
            elif isinstance(part.source, nn.Conv2d | nn.Conv3d | nn.Linear) and not part.kept:
                plan.notes.append(f"{name}: its weights are drawn anew")
            if part.out and part.fit is not None and errors[name] is None:
                plan.notes.append(f"{name}: its blocks are not the source's, its weights are new")
    else:
        _draw_anew(plan, modules)
    divided = divide(*(_write(plan, sizes, modules, i) for i in range(len(plan.trace.passes))))
    network = assemble(model, divided, modules, lambda n: _own_copy(plan.trace.attribute(n)))
    for name, part in plan.parts.items():
        if part.source is not None:
            modules[name].train(part.source.training)
    former = {n: divided.renamed[n] for n in divided.renamed if any(modules[n].state_dict())}
    gone = {n: "" for n in plan.trace.constants if n not in network._buffers}
    network.describe_as(former=former | gone)
    offer(network, model, plan, sizes)
    plan.notes += [
        f"{name}: it runs as a part of what calls it, and its hooks do not; {reason}"
        for name, reason in divided.inlined.items()
    ]
    accuracy: tuple[Accuracy, ...] = ()
    if given is not None:
        before = accuracies(model, given, plan.group)
        misfits = fit_on_images(plan, kept, network, modules, model, given.images)
        errors.update(misfits)
        plan.notes += _misfitted(misfits)
        accuracy = _compared_accuracies(before, accuracies(network, given, plan.group))
    lines = tuple(
        Line(
            divided.renamed.get(row.name, row.name),
            row.source,
            row.became if isinstance(row.became, str) else row.became(modules[row.name]),
            errors.get(row.name),
        )
        for row in plan.rows
    )
    return network, lines, accuracy


_MISFIT = 0.5


def _misfitted(misfits: dict[str, float]) -> list[str]:
    """What to say of layers that the images show to be another's; a warning, too."""
    found = {name: misfit for name, misfit in misfits.items() if misfit > _MISFIT}
    if not found:
        return []
    worst = max(found, key=lambda name: found[name])
    text = (
        f"{len(found)} layers give less than the source's on these images: more than {_MISFIT:.0%} "
        f"of the deviation is left, {found[worst]:.0%} at {worst}"
    )
    warnings.warn(f"{text}; the report has all", stacklevel=4)
    return [text]


def _compared_accuracies(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> tuple[Accuracy, ...]:
    if before is None or after is None:
        return ()
    return tuple(Accuracy(turn, before[turn], after[turn]) for turn in before)


def _read_images(
    model: nn.Module, images: Images | None, labels: Tensor | None, pretrained: bool
) -> Given | None:
    if images is not None and not pretrained:
        raise ValueError("expected pretrained=True beside images, which weights are fitted to")
    like = next(model.parameters(), torch.empty(0))
    return read_images(images, labels, like)


def _freeze(layer: nn.Module, source: nn.Module | None) -> None:
    """Let what was frozen in the source be frozen."""
    if source is None:
        return
    for name, parameter in source.named_parameters():
        leaf = name.rpartition(".")[2]
        for own, found in layer.named_parameters():
            if own.rpartition(".")[2] == leaf:
                found.requires_grad_(parameter.requires_grad)


def _write(plan: Plan, sizes: Sizes, modules: dict[str, nn.Module], number: int) -> Written:
    """The flat graph of the converted network, or that of a method."""
    found = plan.trace.passes[number]
    emission = Emission(sizes, plan, plan.trace.results[number])
    places, top = found.order, found.top
    origin: dict[fx.Node, tuple[int, Call | None]] = {}
    steps = [(node, step) for node, step in plan.steps if node in places]
    for node, step in sorted(steps, key=lambda pair: places[pair[0]]):
        new = step(emission)
        if new is not None:
            emission.found[node] = new
        for written in reversed(emission.graph.nodes):
            if written in origin:
                break
            origin[written] = places[node], top if node.op == "output" else found.call_of.get(node)
    emission.graph.lint()
    return Written(
        emission.graph,
        found.calls,
        origin,
        emission.found,
        plan.trace.names,
        frozenset(plan.trace.constants),
        lambda name: not any(modules[name].state_dict()),
        lambda name: repr(modules[name]),
        top,
    )


def _own_copy(given: Any) -> Any:
    copied = given.detach().clone()
    if isinstance(given, nn.Parameter):
        return nn.Parameter(copied, requires_grad=given.requires_grad)
    return copied


def _draw_anew(plan: Plan, modules: dict[str, nn.Module]) -> None:
    """Weights of modules that are the source's own, which would otherwise be trained ones."""
    for name, part in plan.parts.items():
        if part.kept:
            for module in modules[name].modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
                    module.requires_grad_(True)


@dataclass(frozen=True)
class _Output:
    """How the (first) output of a network turns."""

    kind: str
    pixels: tuple[str, ...]
    """The axes of positions."""
    axes: tuple[str, ...] = ()

    @property
    def turns_as(self) -> str:
        """The kind that :func:`as_image` has."""
        return "scalar" if set(self.pixels) <= set(self.axes) else self.kind

    def as_image(self, x: Tensor) -> Tensor:
        """The output with the axes of an image."""
        if self.turns_as != "scalar" or len(self.axes) != x.ndim:
            return x
        last = range(-len(self.pixels), 0)
        image = x.movedim(tuple(map(self.axes.index, self.pixels)), tuple(last))
        return image.reshape(1, -1, *image.shape[-len(last) :])


def _output_kind(plan: Plan, result: Any) -> _Output:
    first = next(leaf for leaf in leaves(result) if isinstance(leaf, fx.Node))
    value = plan.value(first)
    shape = value_of(first)
    pixels = isinstance(shape, Tensor) and shape.ndim == len(plan.image) and value.has_pixels
    axes = value.axes if value.kind in ("image", "fields") else ()
    return _Output("scalar" if pixels else "invariant", plan.pixels, axes)


def _errors(
    model: nn.Module,
    network: nn.Module,
    inputs: tuple[Any, ...],
    group: Group,
    kind: _Output,
    measure: bool,
) -> dict[str, Any]:
    """The relative change of the output under a rotation, before and after."""
    turns = _symmetries(inputs, group)
    names = ["mirror" if e >= group.steps > 0 else group.element_name(e) for e in turns]
    found: dict[str, Any] = {"turn": " and ".join(names), "source_error": None, "error": None}
    if measure and turns != [0]:
        for name, measured in (("source_error", model), ("error", network)):
            found[name] = max(_error(measured, inputs, group, kind, e) for e in turns)
    return found


def _turns(
    model: nn.Module, network: nn.Module, inputs: tuple[Any, ...], group: Group, kind: _Output
) -> tuple[Turn, ...]:
    """The errors at 45° and 22.5°, where anything turns and nothing else would have to."""
    if group.steps < 2 or not _alone(inputs):
        return ()
    inputs = _in_disc(inputs)
    return tuple(
        Turn(
            22.5 * element,
            _error_between(model, inputs, kind, element),
            _error_between(network, inputs, kind, element),
        )
        for element in (2, 1)
    )


def _unsmoothed(
    plan: Plan, network: nn.Module, inputs: tuple[Any, ...], kind: _Output
) -> tuple[Unsmoothed, ...]:
    """The error at 45° with each activation or pooling in turn as in the source."""
    if not plan.smoothed or plan.dimension != 2 or not _alone(inputs):
        return ()
    inputs = _in_disc(inputs)
    places = {id(module): name for name, module in network.named_modules()}
    found = []
    for name, plain in plan.smoothed.items():
        here = places.get(id(plan.made[name]), "")
        if here:
            kept = network.get_submodule(here)
            network.set_submodule(here, plain().train(kept.training))
            error = _error_between(network, inputs, kind, 2)
            network.set_submodule(here, kept)
            found.append(Unsmoothed(here, type(plain()).__name__, error))
    return tuple(sorted(found, key=lambda one: -one.error))


_SIXTEEN = Group("p16")  # whose rotations are multiples of 22.5°


def _error_between(
    measured: nn.Module, inputs: tuple[Any, ...], kind: _Output, element: int
) -> float:
    """The change of the output under a turn by so many times 22.5°.

    Scores of several images change by so much of what tells these images apart: what all share
    would hide it.
    """
    error = _error(measured, inputs, _SIXTEEN, kind, element)
    if kind.turns_as == "scalar" or len(inputs[0]) == 1:
        return error
    with torch.no_grad():
        output = _first(_with_statistics(measured, inputs)(*inputs)).double()
    apart = float((output - output.mean(0)).norm())
    return error * float(output.norm()) / apart if apart else error


def _in_disc(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The images with nothing in the corners, which would turn out of sight."""
    (image,) = inputs
    rows, columns = (torch.linspace(-1, 1, n, device=image.device) for n in image.shape[2:])
    height, width = image.shape[2:]
    short = min(height, width)
    radius = ((rows[:, None] * height / short) ** 2 + (columns * width / short) ** 2).sqrt()
    window = torch.cos(math.pi / 2 * ((radius - 0.7) / 0.3).clamp(0, 1)) ** 2
    return (image * window.to(image.dtype),)


def _alone(inputs: tuple[Any, ...]) -> bool:
    """Whether the image is the only argument, and has room for what turns."""
    return len(inputs) == 1 and inputs[0].ndim == 4 and min(inputs[0].shape[2:]) > 8


def _symmetries(inputs: tuple[Any, ...], group: Group) -> list[int]:
    """The symmetries of the pixels to measure; of an oblong image those that leave it its sides.

    In the plane one, and in space so many that all others are products of them.
    """
    image = next(x for x in inputs if is_image(x, group.dimension))
    exact = [element for element in group.grid_symmetries if element]
    if len(set(image.shape[-group.dimension :])) > 1:
        same = [e for e in exact if _moved(image, group, e).shape == image.shape]
        exact = same or exact
    if group.dimension == 2 or not exact:
        return exact[:1] or [min(1, group.order - 1)]
    return [e for e in group.grid_generators if e in exact] or exact[:1]


def _error(
    measured: nn.Module, inputs: tuple[Any, ...], group: Group, kind: _Output, element: int
) -> float:
    axes = group.dimension + 1
    place = next(i for i, x in enumerate(inputs) if is_image(x, group.dimension))
    bags = inputs[place].shape[:-axes]
    run = _with_statistics(measured, inputs)
    turned = tuple(_turned(x, inputs[place], group, element) for x in inputs)

    flat = inputs[place].flatten(0, -axes - 1)

    def output(x: Tensor) -> Tensor:
        others = inputs if x is flat else turned
        bag = x.unflatten(0, bags)
        return kind.as_image(_first(run(*others[:place], bag, *others[place + 1 :])))

    try:
        return equivariance_error(
            output, flat, element, group, input_kind="scalar", output_kind=kind.turns_as
        )
    except ValueError as error:
        if "the output for the turned input has shape" in str(error):
            return math.inf  # rows and columns are treated differently
        raise


def _turned(x: Any, image: Tensor, group: Group, element: int) -> Any:
    """An argument of a turned image: images beside it, and maps without channels, turn with it."""
    if not isinstance(x, Tensor):
        return x
    if is_image(x, group.dimension):
        return _moved(x, group, element)
    if tuple(x.shape) == (image.shape[0], *image.shape[2:]):
        return transform(x[:, None], group, element, "scalar")[:, 0]
    return x


def _moved(image: Tensor, group: Group, element: int) -> Tensor:
    """A turned image, or bag of images."""
    axes = group.dimension + 1
    moved = transform(image.flatten(0, -axes - 1), group, element, "scalar")
    return moved.unflatten(0, image.shape[:-axes])


_ROUNDING = 1e-6


def _check_exact(
    network: nn.Module,
    inputs: tuple[Any, ...],
    group: Group,
    kind: _Output,
    error: float | None,
    method: str = "",
) -> None:
    """Refuse a network that a quarter turn or a flip changes by more than rounding can."""
    elements = _symmetries(inputs, group)
    image = next(x for x in inputs if is_image(x, group.dimension))
    own = next((p.dtype for p in network.parameters()), torch.float32)
    rounding = max(_ROUNDING, 1e3 * torch.finfo(own).eps)
    on_grid = set(elements) <= set(group.grid_symmetries)
    if error is None or not error > rounding or not on_grid:
        return
    if image.device.type != "mps":  # which has no float64
        wide = tuple(
            x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )
        precise = copy.deepcopy(network).double()
        error = max(_error(precise, wide, group, kind, element) for element in elements)
        if not error > _ROUNDING or _is_random(precise, wide):
            return
    raise ConversionError(
        method,
        f"a symmetry of the {'pixels' if group.dimension == 2 else 'voxels'} changes the output by "
        f"{error:.2g}, far above rounding: something in it knows where up is; strict=False "
        "converts it all the same",
    )


def _is_random(network: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether a network in eval mode gives the same twice."""
    with torch.no_grad(), torch.random.fork_rng():
        first, second = (_first(network.eval()(*inputs)) for _ in range(2))
    return not torch.equal(first, second)


def _with_statistics(model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    """A copy in eval mode that shares the parameters; norms that have seen no batch get the
    statistics of the example.

    Without them a deep network may give zeros, whose error says nothing.
    """
    run = _sharing(model).eval()
    norms = [m for m in run.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    fresh = any(n.num_batches_tracked == 0 for n in norms if n.num_batches_tracked is not None)
    if fresh and len(inputs) == 1:
        try:
            return calibrate(run, inputs[0])
        except ValueError:  # torch refuses statistics of one number
            return _sharing(model).eval()
    return run


def _sharing(model: nn.Module) -> nn.Module:
    """A copy with buffers of its own and the parameters of the model."""
    return copy.deepcopy(model, {id(found): found for found in model.parameters()})


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output


def _idle(plan: Plan, model: nn.Module) -> list[str]:
    """Modules with parameters that the traced pass does not call."""
    nodes = plan.trace.graph.nodes
    called = {str(node.target) for node in nodes if node.op == "call_module"}
    called |= {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}
    return [
        name
        for name, module in model.named_modules()
        if name
        and next(module.parameters(recurse=False), None) is not None
        and not any(name == used or name.startswith(f"{used}.") for used in called)
    ]


def _called_parameters(plan: Plan, model: nn.Module) -> int:
    idle = [model.get_submodule(name).parameters(recurse=False) for name in _idle(plan, model)]
    return parameters(model) - sum(p.numel() for found in idle for p in found)


def _notes(plan: Plan, model: nn.Module, pretrained: bool) -> list[str]:
    notes = list(plan.notes)
    if not pretrained and not all(p.requires_grad for p in model.parameters()):
        notes.append("frozen parameters of the source are trained: their numbers are new")
    hooked = [name or "the network" for name, m in model.named_modules() if _hooks(m)]
    if hooked:
        notes.append(f"forward hooks are gone: {_some(hooked)}")
    reparametrised = [
        name
        for name, m in model.named_modules()
        if parametrize.is_parametrized(m) or len(m._forward_pre_hooks) > len(_hooks(m))
    ]
    if reparametrised:
        notes.append(
            f"weights are parameters of their own, no longer normalised or reparametrised: "
            f"{_some(reparametrised)}"
        )
    idle = _idle(plan, model)
    if idle:
        notes.append(f"not called by the traced pass, and gone: {_some(idle)}")
    return notes


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
