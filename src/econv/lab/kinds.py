"""How features turn on their way through a model: the kind of every map, by watching it run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from econv.groups import Group, GroupLike
from econv.layers import (
    CentredAvgPool2d,
    CentredMaxPool2d,
    Downsample2d,
    GroupConv2d,
    GroupDropout2d,
    Upsample2d,
)
from econv.layers.activations import ACTIVATIONS
from econv.testing import rotate, transform


def element_name(group: GroupLike, element: int) -> str:
    """An element in words.

    >>> element_name("p8m", 1), element_name("p8m", 9)
    ('45°', '45°, mirrored')
    """
    found = Group(group)
    angle = f"{360 * (element % found.rotations) / found.rotations:.4g}°"
    return f"{angle}, mirrored" if element >= found.rotations else angle


def find_group(model: nn.Module, group: GroupLike | None = None) -> Group:
    """The group to check: the given one, or the one that all layers of the model share."""
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


_CHANNELWISE: tuple[type[nn.Module], ...] = (
    *ACTIVATIONS,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool2d,
    nn.BatchNorm2d,
    nn.InstanceNorm2d,
    nn.MaxPool2d,
    nn.PReLU,
    nn.Upsample,
    nn.Dropout,
    nn.Dropout2d,
    CentredAvgPool2d,
    CentredMaxPool2d,
    Downsample2d,
    Upsample2d,
)
_LINEAR: tuple[type[nn.Module], ...] = (
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.Identity,
    CentredAvgPool2d,
    Upsample2d,
)


@dataclass(frozen=True)
class FieldType:
    """How a map turns: its kind, and for regular fields the group of their channels."""

    kind: str
    group: Group | None = None


@dataclass(frozen=True)
class Map:
    name: str
    type: str
    field_type: FieldType
    value: Tensor

    @property
    def has_pixels(self) -> bool:
        return self.value.ndim == 4 and min(self.value.shape[-2:]) > 1


@dataclass(frozen=True)
class _Trace:
    output: Tensor
    output_type: FieldType | None
    maps: list[Map]
    unknown: list[str]


_SUMS = {"add", "iadd", "radd", "sub", "isub", "rsub"}


_COPIES = {"clone", "contiguous", "detach", "to", "float", "double", "half", "neg", "type"}


_POINTWISE = {
    *("abs", "celu", "clamp", "elu", "exp", "gelu", "hardsigmoid", "hardswish", "hardtanh"),
    *("leaky_relu", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign"),
    *("square", "sqrt", "tanh", "log", "log1p", "dropout", "dropout2d", "feature_dropout"),
    *("mul", "imul", "rmul", "div", "idiv", "truediv", "itruediv", "pow"),
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "interpolate"),
    *("boolean_dispatch",),
}


_REDUCTIONS = {"mean", "sum", "amax", "amin"}


_RESHAPES = {"flatten", "reshape", "squeeze", "view"}


class _Follow(TorchFunctionMode):
    """Knows for each tensor of one pass how it turns, as far as that follows from its making."""

    def __init__(self) -> None:
        super().__init__()
        # Tensors are kept alive: an id that is free again would name another one.
        self.known: dict[int, tuple[Tensor, FieldType]] = {}

    def type_of(self, tensor: object) -> FieldType | None:
        entry = self.known.get(id(tensor))
        return entry[1] if entry else None

    def set(self, tensor: Tensor, field_type: FieldType | None) -> None:
        if field_type is None:
            self.known.pop(id(tensor), None)
            return
        if field_type.kind == "scalar" and (tensor.ndim != 4 or tensor.shape[-2:] == (1, 1)):
            field_type = FieldType("invariant")  # no pixels are left that could turn
        self.known[id(tensor)] = tensor, field_type

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.set(result, self._follow(func, args, kwargs or {}, result))
        return result

    def _follow(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
    ) -> FieldType | None:
        name = getattr(func, "__name__", "").strip("_")
        along = None
        if name == "cat":
            along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            args = args[0] if args else kwargs["tensors"]
        maps = [a for a in args if isinstance(a, Tensor) and a.ndim > 1]
        field_types = {self.type_of(a) for a in maps}
        if len(field_types) != 1:
            return None
        field_type = field_types.pop()
        if field_type is None or field_type.kind == "invariant":
            return field_type
        x = maps[0]
        if field_type.kind == "unflattened":  # [batch, fields, elements, height, width]
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            pooled = name in _REDUCTIONS and dims in (2, -3, (2,), (-3,), [2], [-3])
            return FieldType("scalar") if pooled and result.ndim == 4 else None
        if name == "unflatten" and field_type.kind == "regular" and field_type.group is not None:
            fields = (x.shape[1] // field_type.group.order, field_type.group.order)
            apart = x.ndim == 4 and result.shape == (x.shape[0], *fields, *x.shape[2:])
            return FieldType("unflattened", field_type.group) if apart else None
        if name in _COPIES or (name in _SUMS and len(maps) == 2):
            return field_type
        if field_type.kind == "vector":  # what acts on components one by one does not turn
            return None
        if name in _POINTWISE or name in _SUMS:
            return field_type
        if along in (1, 1 - result.ndim):
            return field_type
        if name in _REDUCTIONS and x.ndim == 4:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(dims, tuple | list) and {d % 4 for d in dims} == {2, 3}:
                return field_type
        if name in _RESHAPES and x.shape[2:].numel() == 1 and result.shape[:2] == x.shape[:2]:
            return field_type
        return None


def trace_maps(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    kind: str,
    group: Group,
) -> _Trace:
    """One pass, with the map after every layer and how it turns."""
    follow = _Follow()
    own = getattr(model, "group", None)
    first = own or next((m.group for m in model.modules() if isinstance(m, GroupConv2d)), group)
    follow.set(x, FieldType(kind, Group(first) if kind == "regular" else None))
    maps: list[Map] = []
    unknown: list[str] = []
    seen: dict[str, int] = {}
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        says = getattr(module, "output_kind", None)
        leaf = next(module.children(), None) is None
        if not (leaf or says) or isinstance(module, nn.Identity):
            return
        if not leaf and (module is model or follow.type_of(output) is not None):
            return  # its last layer has been seen
        if isinstance(module, nn.Dropout | nn.Dropout2d | GroupDropout2d) and not module.training:
            if isinstance(output, Tensor) and inputs:
                follow.set(output, follow.type_of(inputs[0]))
            return
        name = names[module]
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name = f"{name} (call {seen[name]})"
        field_type = None
        if isinstance(output, Tensor):
            field_type = _after(
                module, follow.type_of(inputs[0]) if inputs else None, inputs, output
            )
            follow.set(output, field_type)
            field_type = follow.type_of(output)
        if field_type is None:
            unknown.append(f"{name} ({type(module).__name__})")
        else:
            # A copy: what follows may work in place.
            maps.append(Map(name, type(module).__name__, field_type, output.detach().clone()))

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        with follow, torch.no_grad():
            output = run(x)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(output, Tensor):
        raise ValueError(f"expected a model that returns one tensor; got {type(output).__name__}")
    return _Trace(output, follow.type_of(output), maps, unknown)


def _after(
    module: nn.Module, before: FieldType | None, inputs: tuple[Any, ...], output: Tensor
) -> FieldType | None:
    """How the output of a module turns, or nothing where that is not known."""
    says = getattr(module, "output_kind", None)
    # What treats every channel alike hands on whatever comes, also where it names one kind.
    if isinstance(says, str) and not isinstance(module, _CHANNELWISE):
        group = getattr(module, "subgroup", None) or getattr(module, "group", None)
        group = Group(group) if group is not None else (before.group if before else None)
        return FieldType(says, group if says in ("regular", "vector") else None)
    if before is None or before.kind == "invariant":
        return before
    if before.kind == "unflattened":
        return None
    if isinstance(module, _CHANNELWISE):
        linear = isinstance(module, _LINEAR) or getattr(module, "reduce", None) == "mean"
        return before if before.kind != "vector" or linear else None
    if isinstance(module, nn.Conv2d) and before.kind == "scalar" and module.kernel_size == (1, 1):
        return before
    x = inputs[0]
    if (
        isinstance(module, nn.Flatten)
        and x.shape[2:].numel() == 1
        and output.shape[:2] == x.shape[:2]
    ):
        return before
    return None


def turn_map(x: Tensor, field_type: FieldType, group: Group, element: int) -> Tensor:
    """π of one element of the checked group, on a map whose own group may be larger."""
    if field_type.kind == "invariant":
        return x
    own = field_type.group or group
    inner = int(own.embed(group)[element])
    if x.ndim == 4 and x.shape[-2:] != (1, 1):
        return transform(x, own, inner, field_type.kind)
    return turn_channels(x, field_type.kind, own, inner)


def together(field_type: FieldType, group: Group) -> int:
    if field_type.kind == "regular":
        return (field_type.group or group).order
    return 2 if field_type.kind == "vector" else 1


def turn_channels(x: Tensor, kind: str, group: Group, element: int) -> Tensor:
    """What π does to the channels, leaving pixels where they are."""
    if kind == "regular":
        places = group.relative[element].tolist()
        return x.unflatten(1, (-1, group.order))[:, :, places].flatten(1, 2)
    if kind == "vector":
        matrix = torch.tensor(group.matrices[element], dtype=x.dtype, device=x.device)
        return torch.einsum("dc,bvc...->bvd...", matrix, x.unflatten(1, (-1, 2))).flatten(1, 2)
    return x


def rotate_map(x: Tensor, degrees: float, kind: str) -> Tensor:
    if kind == "invariant":
        return x
    turned = rotate(x, degrees) if x.ndim == 4 else x
    if kind == "vector":
        angle = math.radians(degrees)
        cosine, sine = math.cos(angle), math.sin(angle)
        matrix = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=x.dtype, device=x.device)
        turned = torch.einsum("dc,bvc...->bvd...", matrix, turned.unflatten(1, (-1, 2)))
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
        if says not in ("scalar", "regular", "vector", "invariant"):
            raise ValueError(f"cannot check an output of kind {says!r}")
        group = known.group if known else getattr(model, "group", None)
        return FieldType(str(says), Group(group) if group is not None else None)
    if known is not None:
        return known
    if trace.output.ndim == 2:
        return FieldType("invariant")
    if trace.maps and trace.output.ndim == 4:
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
        reader = next((m for m in leaves if not isinstance(m, _CHANNELWISE)), None)
        found = getattr(reader, "input_kind", None)
    found = found or "scalar"
    if found not in ("scalar", "regular", "vector"):
        raise ValueError(
            f"expected an input of kind 'scalar', 'regular' or 'vector'; got {found!r}"
        )
    return found


def leaf_modules(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from leaf_modules(child)
    else:
        yield module
