"""A mode that follows group features through a network and stops at what cannot be meant.

Feature maps are plain tensors, so that a map of p8 passes for one of p4 with twice the fields. Here
every tensor is known by how it came about: which group its channels belong to, or that they are
images, or vectors. Nothing is known of a tensor that user code made in a way of its own; it is let
through.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from econv.groups import Group
from econv.layers import LiftConv
from econv.layers.activations import ACTIVATIONS
from econv.layers.orientations import Restrict, Spread
from econv.layers.sampling import (
    CentredAvgPool,
    CentredMaxPool,
    Downsample,
    Enlarge,
    NearestResize,
    Recentre,
    Upsample,
)

__all__ = ["CHANNELWISE", "SIGNED", "FieldType", "Follow", "KindError", "after", "checked"]

SIGNED = ("pseudoscalar", "vector")
"""Kinds that change sign: functions of single channels do not keep them."""

_TEXTS = {"scalar": "images", "pseudoscalar": "pseudoscalars", "vector": "vector fields"}


class KindError(ValueError):
    """Features that turn in one way were given to what expects another; says where."""


@dataclass(frozen=True)
class FieldType:
    """How a map turns: its kind, and for regular fields the group of their channels."""

    kind: str
    group: Group | None = None
    why: str = field(default="", compare=False)
    """For maps of kind ``"lost"``: what ended the symmetry."""

    def __str__(self) -> str:
        if self.kind == "regular" and self.group is not None:
            return f"group features of {self.group.name}"
        return _TEXTS.get(self.kind, self.kind)


CHANNELWISE: tuple[type[nn.Module], ...] = (
    *ACTIVATIONS,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.PReLU,
    nn.Upsample,
    nn.Dropout,
    nn.Dropout2d,
    nn.Dropout3d,
    CentredAvgPool,
    CentredMaxPool,
    Downsample,
    Enlarge,
    NearestResize,
    Recentre,
    Upsample,
)
"""Modules that treat all channels alike, or one by one."""

_LINEAR: tuple[type[nn.Module], ...] = (
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.Identity,
    CentredAvgPool,
    Enlarge,
    NearestResize,
    Recentre,
    Upsample,
)

_MIXING = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)

_MAPS = (4, 5)
"""Dimensions of tensors that have pixels or voxels."""

_SUMS = {"add", "iadd", "radd", "sub", "isub", "rsub"}

_COPIES = {"clone", "contiguous", "detach", "to", "float", "double", "half", "neg", "type"}

_PRODUCTS = {"mul", "imul", "rmul", "div", "idiv", "truediv", "itruediv"}

_POINTWISE = {
    *("abs", "celu", "clamp", "elu", "exp", "gelu", "hardsigmoid", "hardswish", "hardtanh"),
    *("leaky_relu", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign"),
    *("square", "sqrt", "tanh", "log", "log1p", "dropout", "dropout2d", "feature_dropout"),
    *("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "dropout3d"),
    *_PRODUCTS,
    "pow",
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "interpolate"),
    *("boolean_dispatch",),
}

_REDUCTIONS = {"mean", "sum", "amax", "amin"}

_RESHAPES = {"flatten", "reshape", "squeeze", "view"}

_PER_CHANNEL = (
    nn.modules.batchnorm._BatchNorm,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
    nn.PReLU,
)
"""Modules of torch with numbers for each channel: they tell orientations apart."""

_THEIRS = tuple(
    str(Path(str(package.__file__)).parent) + os.sep
    for package in (torch, sys.modules[__package__ or "econv"])
)


class Follow(TorchFunctionMode):
    """Knows for each tensor of one pass how it turns, as far as that follows from its making."""

    def __init__(self) -> None:
        super().__init__()
        self.known = WeakTensorKeyDictionary()

    def type_of(self, tensor: object) -> FieldType | None:
        found: FieldType | None = self.known.get(tensor) if isinstance(tensor, Tensor) else None
        return found

    def set(self, tensor: Tensor, field_type: FieldType | None) -> None:
        if field_type is None:
            self.known.pop(tensor, None)
            return
        if field_type.kind == "scalar" and not (
            tensor.ndim in _MAPS and tensor.shape[2:].numel() > 1
        ):
            field_type = FieldType("invariant")  # no pixels are left that could turn
        self.known[tensor] = field_type

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            found = self._follow(func, args, kwargs or {}, result)
            changed = getattr(func, "__name__", "_").endswith("_")
            # What needs no copy, such as `resolve_neg`, gives back what it is given.
            if found is not None or changed or not any(result is given for given in args):
                self.set(result, found)
        return result

    def clash(self, name: str, maps: Sequence[Tensor]) -> FieldType | None:
        """What a function makes of maps that turn differently: nothing that is known."""
        return None

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
            mixes = name in _SUMS or name in _PRODUCTS or along in (1, 1 - result.ndim)
            return self.clash(name, maps) if mixes and None not in field_types else None
        field_type = field_types.pop()
        if field_type is None or field_type.kind in ("invariant", "lost"):
            return field_type
        x = maps[0]
        if field_type.kind == "unflattened":  # [batch, fields, elements, height, width]
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            alone = [dims] if isinstance(dims, int) else dims
            pooled = isinstance(alone, list | tuple) and [d % x.ndim for d in alone] == [2]
            pooled = pooled and name in _REDUCTIONS
            return FieldType("scalar") if pooled and result.ndim == x.ndim - 1 else None
        if name == "unflatten" and field_type.kind == "regular" and field_type.group is not None:
            fields = (x.shape[1] // field_type.group.order, field_type.group.order)
            apart = x.ndim in _MAPS and result.shape == (x.shape[0], *fields, *x.shape[2:])
            return FieldType("unflattened", field_type.group) if apart else None
        if name in _COPIES or (name in _SUMS and len(maps) == 2):
            return field_type
        if field_type.kind in SIGNED:  # what acts on components one by one does not turn
            return None
        if name in _POINTWISE or name in _SUMS:
            return field_type
        if along in (1, 1 - result.ndim):
            return field_type
        if name in _REDUCTIONS and x.ndim in _MAPS:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            pixels = set(range(2, x.ndim))
            if isinstance(dims, tuple | list) and {d % x.ndim for d in dims} == pixels:
                return field_type
        if name in _RESHAPES and x.shape[2:].numel() == 1 and result.shape[:2] == x.shape[:2]:
            return field_type
        return None


def after(
    module: nn.Module, before: FieldType | None, inputs: tuple[Any, ...], output: Tensor
) -> FieldType | None:
    """How the output of a module turns, or nothing where that is not known."""
    says = getattr(module, "output_kind", None)
    # What treats every channel alike hands on whatever comes, also where it names one kind.
    if says == "mixed":  # its parts, if it has any, have been seen
        return None
    if isinstance(says, str) and not isinstance(module, CHANNELWISE):
        group = getattr(module, "subgroup", None) or getattr(module, "group", None)
        group = Group(group) if group is not None else (before.group if before else None)
        return FieldType(says, group if says in ("regular", *SIGNED) else None)
    if before is None or before.kind in ("invariant", "lost"):
        return before
    if before.kind == "unflattened":
        return None
    if isinstance(module, CHANNELWISE):
        linear = isinstance(module, _LINEAR) or getattr(module, "reduce", None) == "mean"
        return before if before.kind not in SIGNED or linear else None
    plain = isinstance(module, nn.Conv2d | nn.Conv3d) and set(module.kernel_size) == {1}
    if plain and before.kind == "scalar":
        return before
    x = inputs[0]
    if (
        isinstance(module, nn.Flatten)
        and x.shape[2:].numel() == 1
        and output.shape[:2] == x.shape[:2]
    ):
        return before
    return None


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Stop where features that turn in one way are given to what expects another.

    Inside, every tensor that a layer of econv makes is known by its kind and group, through
    pointwise functions, sums and ``torch.cat``. A :class:`KindError` names the module, what made
    its input, and the line of the code that called it. It finds

    - features of one group where those of another are expected, as after a forgotten
      :func:`~econv.restrict`; images where group features are expected, and the other way round;
    - norms and activations of torch that have numbers for each channel, such as `BatchNorm2d`, on
      group features, whose orientations they tell apart;
    - sums, products and concatenations of maps that turn differently;
    - activations that bend the components of vectors one by one;
    - layers of econv after an ordinary convolution of group features.

    Numbers do not matter: any images of the right shape will do, and the network computes what it
    always does. Once is enough, before the training; it is not for `torch.compile`.

    Raises:
        KindError: a ``ValueError``, at the layer or operation where kinds do not match.

    >>> from econv import GroupConv2d, LiftConv2d
    >>> network = nn.Sequential(LiftConv2d(1, 2, "p8"), GroupConv2d(4, 4, "p4"))
    >>> network(torch.randn(1, 1, 9, 9)).shape  # 2 fields of p8 look like 4 of p4
    torch.Size([1, 16, 9, 9])
    >>> with checked():
    ...     network(torch.randn(1, 1, 9, 9))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    econv.checking.KindError: '1' (GroupConv2d) expects group features of p4; got group features ...
    """
    mode = _Checked()
    handles = [
        register_module_forward_pre_hook(mode.enter),
        register_module_forward_hook(mode.leave, always_call=True),
    ]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Checked(Follow):
    """The kinds of all tensors, and who made them."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.makers = WeakTensorKeyDictionary()

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.running.append(module)
        x = inputs[0] if inputs else None
        found = self.type_of(x)
        if found is None or not isinstance(x, Tensor):
            return
        problem = _problem(module, found, x)
        if problem:
            maker = self.makers.get(x)
            made = f", made by {maker}" if maker else ""
            here = self._name(module)
            raise KindError(f"{here} {problem[0]}; got {found}{made}{_line()}. {problem[1]}")

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self.running or self.running[-1] is not module:
            return  # it began before this mode
        if isinstance(output, Tensor):
            self._made(module, inputs, output)
        self.running.pop()

    def _made(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        before = self.type_of(inputs[0]) if inputs else None
        leaf = next(module.children(), None) is None
        if isinstance(module, Restrict):
            self.set(output, FieldType("regular", module.subgroup))
        elif leaf or isinstance(getattr(module, "output_kind", None), str):
            found = after(module, before, inputs, output)
            mixes = isinstance(module, _MIXING)
            if found is None and before is not None and before.kind == "regular" and mixes:
                why = f"{self._name(module)} mixes the channels of {before}"
                found = FieldType("lost", why=why)
            if leaf or found is not None:
                self.set(output, found)
        else:
            return
        self.makers[output] = self._name(module)

    def clash(self, name: str, maps: Sequence[Tensor]) -> FieldType | None:
        if self.running and type(self.running[-1]).__module__.startswith("econv.layers"):
            return None  # a layer knows what it does
        found = [self.type_of(x) for x in maps]
        kinds = {entry.kind for entry in found if entry is not None}
        one = [x.shape[1] == 1 for x in maps]
        groups = {entry.group for entry in found if entry is not None and entry.kind == "regular"}
        plain = kinds <= {"scalar", "invariant", "regular"} and len(groups) <= 1
        if "lost" in kinds:
            return next(entry for entry in found if entry is not None and entry.kind == "lost")
        if name != "cat" and plain:
            # One image or number for all channels turns with any of them.
            alike = [e for e, single in zip(found, one, strict=True) if not single]
            if len(set(alike)) <= 1:
                return alike[0] if alike else None
        if not kinds <= {"scalar", "regular", "vector"} or (name == "cat" and len(groups) <= 1):
            return None
        texts = [
            f"{entry} {tuple(x.shape)}" + (f" of {self.makers[x]}" if x in self.makers else "")
            for x, entry in zip(maps, found, strict=True)
        ]
        inside = f" in {self._name(self.running[-1])}" if self.running else ""
        raise KindError(
            f"{name}{inside} expects maps that turn alike; got {' and '.join(texts)}{_line()}. "
            "Restrict2d makes features of a smaller group, Spread2d those of images"
        )

    def _name(self, module: nn.Module) -> str:
        whole = self.running[0] if self.running else module
        name = next((name for name, found in whole.named_modules() if found is module), "")
        return f"'{name}' ({type(module).__name__})" if name else type(module).__name__


def _problem(module: nn.Module, found: FieldType, x: Tensor) -> tuple[str, str] | None:
    """What a module expects and what to do, where it is given something else."""
    expects = getattr(module, "input_kind", None)
    group = getattr(module, "group", None)
    if isinstance(module, Restrict):
        expects, group = "regular", module.whole
    kinds = (*_TEXTS, "regular")
    if found.kind == "lost":
        if expects in kinds and not isinstance(module, CHANNELWISE) and group is not None:
            return f"expects features that turn with the image: {found.why}", (
                "Use a GroupConv2d there, or pool the orientations first (GroupPool2d)"
            )
        return None
    if found.kind == "vector" and isinstance(module, (*ACTIVATIONS, *_PER_CHANNEL)):
        return "acts on each channel by itself, and a vector's components turn together", (
            "Bend its length instead, or stay with group features until the last layer"
        )
    if found.kind not in kinds or (found.group is not None and found.group.order == 1):
        return None
    if expects == "regular" and group is not None:
        return _regular_problem(module, Group(group), found)
    if found.kind != "regular" or found.group is None:
        return None
    order, d = found.group.order, found.group.dimension
    if isinstance(module, _PER_CHANNEL) and order > 1 and x.shape[1] % order == 0:
        return _channel_problem(module, found.group, x.shape[1] // order)
    if isinstance(module, LiftConv | Spread):
        text = _TEXTS.get(str(expects), "images")
        return f"expects {text}", (
            f"GroupConv{d}d reads group features, and GroupPool{d}d({found.group.name!r}) makes "
            "images of them"
        )
    return None


def _regular_problem(module: nn.Module, group: Group, found: FieldType) -> tuple[str, str] | None:
    expected, d = f"expects {FieldType('regular', group)}", group.dimension
    if group.order == 1:
        return None
    if found.kind != "regular":
        return expected, (
            f"LiftConv{d}d makes group features of {found}, and Spread{d}d({group.name!r}) reads "
            "images as features that are the same in every orientation"
        )
    if found.group is None or found.group == group:
        return None
    names = f"{found.group.name!r}, {group.name!r}"
    try:
        found.group.embed(group)
    except ValueError:
        return expected, f"{found.group.name} does not contain {group.name}: name one group"
    return expected, f"Restrict{d}d({names}) or econv.restrict(x, {names}) makes them of the others"


def _channel_problem(module: nn.Module, group: Group, fields: int) -> tuple[str, str] | None:
    name = type(module).__name__
    numbers = next(module.parameters(recurse=False), None)
    running = getattr(module, "running_mean", None)
    if isinstance(module, nn.PReLU):
        if numbers is not None and numbers.numel() == 1:
            return None
        instead = f"GroupPReLU{group.dimension}d({fields}, {group.name!r})"
    elif isinstance(module, nn.GroupNorm):
        whole = fields % module.num_groups == 0
        if whole and numbers is None:
            return None
        instead = f"GroupGroupNorm{group.dimension}d with the {fields} fields of {group.name}"
    elif isinstance(module, nn.InstanceNorm2d | nn.InstanceNorm3d):
        if numbers is None and running is None:
            return None  # each channel by itself, and all alike
        instead = f"GroupInstanceNorm{group.dimension}d({fields}, {group.name!r})"
    else:
        instead = f"GroupBatchNorm{group.dimension}d({fields}, {group.name!r})"
    return f"has numbers for each channel ({name}), which tell orientations apart", (
        f"Use {instead}"
    )


def _line() -> str:
    """Where the user's code is: the innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_THEIRS):
            return f" at {path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
