"""How features turn on their way through a model: the kind of every map, by watching it run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from econv.checking import CHANNELWISE, SIGNED, FieldType, Follow, after
from econv.groups import Group, GroupLike
from econv.layers import GroupConv
from econv.layers.orientations import GroupDropout
from econv.testing import rotate, transform


def element_name(group: GroupLike, element: int) -> str:
    """An element in words.

    >>> element_name("p8m", 1), element_name("p8m", 9)
    ('45°', '45°, mirrored')
    """
    return Group(group).element_name(element)


def find_group(model: nn.Module, group: GroupLike | None = None) -> Group:
    """The group to check: the given one, or the one that all layers of the model share.

    >>> from econv import LiftConv2d
    >>> find_group(nn.Sequential(LiftConv2d(1, 2, "p8"), nn.ReLU()))
    Group('p8')

    Raises:
        ValueError: without layers of a group or with several, and where pixels are no squares.
    """
    for module in model.modules():
        if isinstance(spacing := getattr(module, "spacing", 1.0), tuple):
            raise ValueError(
                f"expected square pixels, which are turned here; a layer has spacing={spacing}: "
                "use econv.testing, whose checkers know rectangles"
            )
    return group_of_layers(model, group)


def group_of_layers(model: nn.Module, group: GroupLike | None = None) -> Group:
    """The same, for pixels of any shape."""
    of_layers = {
        Group(found)
        for module in model.modules()
        for name in ("group", "subgroup")
        if isinstance(found := getattr(module, name, None), Group | str)
    }
    if group is None:
        if not of_layers:
            raise ValueError("expected a group: the model has no layer that names one")
        if len(of_layers) > 1:
            names = ", ".join(sorted(found.name for found in of_layers))
            raise ValueError(
                f"expected a group: the layers of the model have several ({names}); name the one "
                "to check, which they must all contain"
            )
        return of_layers.pop()
    chosen = Group(group)
    for found in of_layers:
        found.embed(chosen)  # says what is wrong unless it contains the group
    return chosen


_DROPPING = (nn.Dropout, nn.Dropout2d, nn.Dropout3d, GroupDropout)


@dataclass(frozen=True)
class Map:
    name: str
    type: str
    field_type: FieldType
    value: Tensor
    before: tuple[str, ...] = ()
    """The modules of unknown effect that ran since the map before."""

    @property
    def has_pixels(self) -> bool:
        return self.value.ndim > 3 and min(self.value.shape[2:]) > 1


@dataclass(frozen=True)
class _Trace:
    output: Tensor
    output_type: FieldType | None
    maps: list[Map]
    unknown: list[str]
    rest: tuple[str, ...]
    """The modules of unknown effect that ran since the last map."""
    reading: tuple[Tensor, FieldType] | None
    """What the layer that was asked for read."""


def trace_maps(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    kind: str,
    group: Group,
    reader: str | None = None,
) -> _Trace:
    """One pass, with the map after every layer and how it turns, and what a reader was given."""
    follow = Follow()
    own = getattr(model, "group", None)
    first = own or next((m.group for m in model.modules() if isinstance(m, GroupConv)), group)
    follow.set(x, FieldType(kind, Group(first) if kind == "regular" else None))
    maps: list[Map] = []
    unknown: list[str] = []
    seen: dict[str, int] = {}
    since: list[str] = []
    reading: list[tuple[Tensor, FieldType]] = []
    calls: dict[str, int] = {}
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}

    def read(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        name = _called(names[module], calls)
        if name == reader and inputs and isinstance(inputs[0], Tensor):
            found = follow.type_of(inputs[0])
            if found is not None and found.kind not in ("unflattened", "lost"):
                reading.append((inputs[0].detach().clone(), found))

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        says = getattr(module, "output_kind", None)
        leaf = next(module.children(), None) is None
        if not (leaf or says) or isinstance(module, nn.Identity):
            return
        if not leaf and (module is model or follow.type_of(output) is not None):
            return  # its last layer has been seen
        if isinstance(module, _DROPPING) and not module.training:
            if isinstance(output, Tensor) and inputs:
                follow.set(output, follow.type_of(inputs[0]))
            return
        name = _called(names[module], seen)
        field_type = None
        if isinstance(output, Tensor):
            field_type = after(
                module, follow.type_of(inputs[0]) if inputs else None, inputs, output
            )
            follow.set(output, field_type)
            field_type = follow.type_of(output)
        if field_type is None:
            unknown.append(f"{name} ({type(module).__name__})")
            since.append(unknown[-1])
        else:
            # A copy: what follows may work in place.
            value = output.detach().clone()
            maps.append(Map(name, type(module).__name__, field_type, value, tuple(since)))
            since.clear()

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    if reader is not None:
        handles += [module.register_forward_pre_hook(read) for module in model.modules()]
    try:
        with follow, torch.no_grad():
            output = run(x)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(output, Tensor):
        raise ValueError(f"expected a model that returns one tensor; got {type(output).__name__}")
    read_there = reading[0] if reading else None
    return _Trace(output, follow.type_of(output), maps, unknown, tuple(since), read_there)


def _called(name: str, calls: dict[str, int]) -> str:
    """The name of a module, with the number of the call where there are several."""
    calls[name] = calls.get(name, 0) + 1
    return name if calls[name] == 1 else f"{name} (call {calls[name]})"


def turn_map(x: Tensor, field_type: FieldType, group: Group, element: int) -> Tensor:
    """π of one element of the checked group, on a map whose own group may be larger."""
    if field_type.kind == "invariant":
        return x
    own = field_type.group or group
    inner = int(own.embed(group)[element])
    if x.ndim == group.dimension + 2 and x.shape[2:].numel() > 1:
        return transform(x, own, inner, field_type.kind)
    return turn_channels(x, field_type.kind, own, inner)


def together(field_type: FieldType, group: Group) -> int:
    if field_type.kind == "regular":
        return (field_type.group or group).order
    return group.dimension if field_type.kind == "vector" else 1


def turn_channels(x: Tensor, kind: str, group: Group, element: int) -> Tensor:
    """What π does to the channels, leaving pixels where they are."""
    if kind == "regular":
        places = group.relative[element].tolist()
        return x.unflatten(1, (-1, group.order))[:, :, places].flatten(1, 2)
    if kind == "vector":
        matrix = torch.tensor(group.matrices[element], dtype=x.dtype, device=x.device)
        vectors = x.unflatten(1, (-1, group.dimension))
        return torch.einsum("dc,bvc...->bvd...", matrix, vectors).flatten(1, 2)
    return -x if kind == "pseudoscalar" and element >= group.rotations else x


def rotate_map(x: Tensor, degrees: float, kind: str) -> Tensor:
    if kind == "invariant":
        return x
    turned = rotate(x, degrees) if x.ndim > 3 else x
    if kind == "vector":
        angle = math.radians(degrees)
        cosine, sine = math.cos(angle), math.sin(angle)
        matrix = torch.eye(max(2, x.ndim - 2), dtype=x.dtype, device=x.device)
        matrix[:2, :2] = torch.tensor([[cosine, -sine], [sine, cosine]])
        turned = torch.einsum("dc,bvc...->bvd...", matrix, turned.unflatten(1, (-1, len(matrix))))
        turned = turned.flatten(1, 2)
    return turned


def output_kind_of(model: nn.Module, trace: _Trace, given: str | None) -> FieldType:
    """How the output turns: what was given, what the model says, or what followed from its making.

    Scores have no pixels that could turn: they are compared as invariant unless known otherwise.
    """
    known = trace.output_type
    if known is not None and known.kind == "unflattened":
        known = None
    says = given or (getattr(model, "output_kind", None) if _is_custom(model) else None)
    if says is not None:
        if says not in ("scalar", "regular", *SIGNED, "invariant"):
            raise ValueError(f"cannot check an output of kind {says!r}")
        group = known.group if known else getattr(model, "group", None)
        return FieldType(str(says), Group(group) if group is not None else None)
    if known is not None:
        return known
    if trace.output.ndim == 2:
        return FieldType("invariant")
    rank = max((entry.value.ndim for entry in trace.maps), default=0)
    if trace.output.ndim == rank > 3:
        after = "; what these do is unknown: " + ", ".join(trace.unknown) if trace.unknown else ""
        raise ValueError(
            "the output is not known to be an equivariant map: expected a model that ends in "
            f"layers of econv, in scores, or an output_kind{after}"
        )
    raise ValueError(
        "the output is no equivariant map: expected [batch, channels, height, width] or "
        f"[batch, scores] from layers of econv; got shape {tuple(trace.output.shape)}"
    )


def _is_custom(model: nn.Module) -> bool:
    return next(model.children(), None) is not None


def input_kind_of(model: nn.Module, given: str | None) -> str:
    found = given or getattr(model, "input_kind", None)
    if found is None:
        # The first layer that does more than hand channels on reads the image.
        leaves = (m for m in model.modules() if next(m.children(), None) is None)
        reader = next((m for m in leaves if not isinstance(m, CHANNELWISE)), None)
        found = getattr(reader, "input_kind", None)
    found = found or "scalar"
    if found not in ("scalar", "regular", *SIGNED):
        raise ValueError(
            "expected an input of kind 'scalar', 'pseudoscalar', 'regular' or 'vector'; got "
            f"{found!r}"
        )
    return found


def leaf_modules(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from leaf_modules(child)
    else:
        yield module
