"""The steps of a network, one after the other, in any module: layers, and functions between them.

A step is a module without children, a layer of econv, or a function that bends or samples a map
(`torch.relu`, `functional.max_pool2d`). :func:`trace_steps` finds them in one pass, and how the map
after each of them turns; :func:`replay` runs the network again and hands every such map to a
function that may replace it. What is measured with that is the business of others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.weak import WeakTensorKeyDictionary

from econv.checking import FieldType, Follow, after
from econv.groups import Group
from econv.lab.kinds import _called, input_kind_of
from econv.layers import (
    Downsample2d,
    Enlarge2d,
    GroupDropout2d,
    GroupGroupNorm2d,
    GroupLayerNorm2d,
    GroupPool2d,
    GroupPReLU2d,
    GroupWindows2d,
    NearestResize2d,
    PDOConv2d,
    Recentre2d,
    Upsample2d,
)
from econv.layers.activations import ACTIVATIONS, GroupActivation
from econv.layers.attention import GroupAttentionPool2d
from econv.layers.sampling import CentredPool

ACTIVATING = {
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
    *("logsigmoid", "mish", "prelu", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu"),
    *("softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold", "clamp", "clip"),
}
"""Functions of single numbers."""

_POOLING = {
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "lp_pool2d"),
    *("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "lp_pool3d"),
    *("boolean_dispatch", "interpolate", "pixel_shuffle", "pixel_unshuffle", "grid_sample"),
}

_REDUCING = {"mean", "sum", "amax", "amin", "logsumexp", "norm"}
"""Functions that may read all pixels."""

_SAMPLING: tuple[type[nn.Module], ...] = (
    nn.AvgPool2d,
    nn.MaxPool2d,
    nn.LPPool2d,
    nn.FractionalMaxPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.Upsample,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    Downsample2d,
    Enlarge2d,
    GroupWindows2d,
    NearestResize2d,
    Recentre2d,
    Upsample2d,
    CentredPool,
)

_NORMS = (
    _BatchNorm,
    _InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    GroupGroupNorm2d,
    GroupLayerNorm2d,
)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a network."""

    name: str
    type: str
    module: nn.Module | None
    """Nothing for a function."""
    source: str
    """What kind of step it is, as :func:`~econv.lab.split_error` counts it."""
    field_type: FieldType | None
    """How the map after it turns; nothing where that is not known."""
    value: Tensor
    spacing: float
    """The length of a pixel of this map in those of the input."""
    reach: int
    """From how far in pixels of this map it reads."""
    pools: bool
    """Whether it makes one number of all pixels."""

    @property
    def label(self) -> str:
        return self.name if self.module is None else f"{self.name} ({self.type})"


@dataclass(frozen=True)
class Steps:
    """A network's steps, and how its input and output turn."""

    steps: tuple[Step, ...]
    input_type: FieldType
    output: Tensor
    output_type: FieldType
    plain: bool
    """Whether no layer says how its map turns, so that every map is taken for images."""


Visit = Callable[[int, Tensor], Tensor | None]


def trace_steps(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    input_kind: str | None = None,
    output_kind: str | None = None,
) -> Steps:
    """One pass that finds the steps of a model."""
    group = _group_of(model)
    kind = input_kind_of(model, input_kind)
    if kind == "regular" and group is None:
        raise ValueError("expected a model with layers that name a group to read group features")
    input_type = FieldType(kind, group if kind in ("regular", "vector", "pseudoscalar") else None)
    found: list[Step] = []
    plain = group is None
    watch = _Watch(model, plain, found)
    watch.set(x, input_type)
    watch.spacings[x] = 1.0
    output = _watched(model, run, x, watch)
    if not isinstance(output, Tensor):
        raise ValueError(f"expected a model that returns one tensor; got {type(output).__name__}")
    output_type = watch.type_of(output)
    if output_kind is not None:
        known = output_type.group if output_type is not None else None
        output_type = FieldType(output_kind, known or group)
    if output_type is None or output_type.kind in ("unflattened", "lost"):
        output_type = watch.guess(output, None)
    if output_type is None:
        raise ValueError(
            "the output is neither a map [batch, channels, height, width] nor scores "
            f"[batch, scores]: expected one of these; got shape {tuple(output.shape)}"
        )
    return Steps(tuple(found), input_type, output.detach().clone(), output_type, plain)


def replay(
    model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, steps: Steps, visit: Visit
) -> Tensor:
    """Run the model again; ``visit`` is given each step's number and map and may replace the map.

    Maps that are not known to turn are left alone. What a module cannot do is a `StepError`.
    """
    watch = _Again(model, steps, visit)
    try:
        output = _watched(model, run, x, watch)
    except (RuntimeError, NotImplementedError) as error:
        where = watch.running[-1] if watch.running else model
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise StepError(f"{watch.names[where]} ({type(where).__name__}): {text}") from error
    if watch.count != len(steps.steps):
        raise _other_steps(len(steps.steps), watch.count)
    return output


class StepError(RuntimeError):
    """A module failed in a pass that is not the usual one; the message begins with its name."""


def _other_steps(expected: int, found: int) -> ValueError:
    return ValueError(
        "expected a network that does the same on every image: it took "
        f"{expected} steps on the first and {found} on another"
    )


def _group_of(model: nn.Module) -> Group | None:
    """The group of the first layer that names one."""
    for module in model.modules():
        found = getattr(module, "group", None)
        if isinstance(found, Group | str):
            return Group(found)
    return None


def _watched(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, watch: _Hooks) -> Tensor:
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(watch.enter))
        handles.append(module.register_forward_hook(watch.leave))
    try:
        with watch:
            return run(x)
    finally:
        for handle in handles:
            handle.remove()


class _Hooks(Follow):
    """Knows which modules are running, and sees the steps end."""

    functions = ACTIVATING | _POOLING

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.inside: nn.Module | None = None
        self.count = 0
        self.names = {m: name or type(model).__name__ for name, m in model.named_modules()}
        self.calls: dict[str, int] = {}

    def ended(
        self, name: str, kind: str, module: nn.Module | None, inputs: Any, output: Tensor
    ) -> Tensor | None:
        raise NotImplementedError

    def is_step(self, module: nn.Module) -> bool:
        """Whether a module is looked at as a whole."""
        leaf = next(module.children(), None) is None
        return leaf or type(module).__module__.startswith("econv.layers")

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.running.append(module)
        if self.inside is None and self.is_step(module):
            self.inside = module

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self.running.pop()
        if self.inside is not module:
            return None
        dropped = isinstance(module, nn.Identity) or (
            isinstance(module, nn.Dropout | nn.Dropout2d | GroupDropout2d) and not module.training
        )
        try:
            if dropped or not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            name = _called(self.names[module], self.calls)
            return self.ended(name, type(module).__name__, module, inputs, output)
        finally:
            self.inside = None  # what is done with the map is no step

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self.follow(func, types, args, kwargs)
        if self.inside is not None or not isinstance(result, Tensor):
            return result
        name = function_name(func)
        read = next((a for a in args if isinstance(a, Tensor)), None)
        slices = name == "getitem" and read is not None and _fewer_pixels(read, result)
        pools = name in _REDUCING and read is not None and _without_pixels(read, result)
        if read is None or not (slices or pools or name in self.functions):
            return result
        if not result.is_floating_point() or result.ndim < 2:
            return result
        place = self.names[self.running[-1]] if self.running else ""
        name = "slice" if slices else name
        called = _called(f"{place}: {name}" if place else name, self.calls)
        replaced = self.ended(called, name, None, (*args, *(kwargs or {}).values()), result)
        return result if replaced is None else replaced

    def follow(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
        return func(*args, **(kwargs or {}))


class _Watch(_Hooks):
    """The first pass: finds the steps."""

    def __init__(self, model: nn.Module, plain: bool, found: list[Step]) -> None:
        super().__init__(model)
        self.plain, self.found = plain, found
        self.spacings = WeakTensorKeyDictionary()

    def follow(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
        result = Follow.__torch_function__(self, func, types, args, kwargs)
        if isinstance(result, Tensor):
            listed = args[0] if args and isinstance(args[0], list | tuple) else args
            read = next((a for a in listed if isinstance(a, Tensor) and a.ndim == 4), None)
            if read is not None and read in self.spacings:
                self.spacings[result] = self.spacings[read] * _ratio(read, result)
        return result

    def guess(self, output: Tensor, before: FieldType | None) -> FieldType | None:
        """How a map would turn if what made it was equivariant."""
        if output.ndim == 2 or (output.ndim == 4 and not min(output.shape[-2:]) > 1):
            known = before is not None and before.kind == "invariant"
            return FieldType("invariant") if known or self.plain or output.ndim == 2 else None
        if output.ndim != 4:
            return None
        if before is not None and before.kind == "regular" and before.group is not None:
            return before if output.shape[1] % before.group.order == 0 else FieldType("scalar")
        return FieldType("scalar")

    def ended(
        self, name: str, kind: str, module: nn.Module | None, inputs: Any, output: Tensor
    ) -> Tensor | None:
        read = next((a for a in inputs if isinstance(a, Tensor)), None)
        before = self.type_of(read)
        if before is not None and before.kind in ("unflattened", "lost"):
            before = None
        field_type = None if self.plain else self.type_of(output)
        if module is not None and not self.plain:
            said = after(module, before, inputs, output)
            # Of what a conversion wrote, its functions say more.
            field_type = field_type if said is None and isinstance(module, GraphModule) else said
        if field_type is None or field_type.kind in ("unflattened", "lost"):
            field_type = self.guess(output, before)
        self.set(output, field_type)
        field_type = self.type_of(output)
        spacing = self.spacings.get(read, 1.0) if isinstance(read, Tensor) else 1.0
        stride = _stride_of(module) if module is not None else None
        if isinstance(read, Tensor):
            spacing *= _ratio(read, output) if stride is None else stride
        self.spacings[output] = spacing
        self.found.append(
            Step(
                name,
                kind,
                module,
                _source(module, kind),
                field_type,
                output.detach().clone(),
                spacing,
                _reach(module, kind),
                isinstance(read, Tensor) and _without_pixels(read, output),
            )
        )
        return None


class _Again(_Hooks):
    """Later passes: hands every known map to a visitor."""

    def __init__(self, model: nn.Module, steps: Steps, visit: Visit) -> None:
        super().__init__(model)
        self.steps, self.visit = steps.steps, visit

    def ended(
        self, name: str, kind: str, module: nn.Module | None, inputs: Any, output: Tensor
    ) -> Tensor | None:
        place = self.count
        self.count += 1
        if place >= len(self.steps) or self.steps[place].name != name:
            raise _other_steps(len(self.steps), self.count)
        step = self.steps[place]
        if step.field_type is None:
            return None
        if step.value.shape != output.shape:
            raise ValueError(
                f"{step.label}: the map of the moved input has shape {tuple(output.shape)}, that "
                f"of the input {tuple(step.value.shape)}: expected the same"
            )
        return self.visit(place, output)


def function_name(func: Any) -> str:
    """A function without the underscores of its variants: of `relu_` too it is "relu"."""
    return getattr(func, "__name__", "").strip("_")


def _fewer_pixels(before: Tensor, result: Tensor) -> bool:
    if before.ndim not in (4, 5) or result.ndim != before.ndim:
        return False
    return any(b > 1 and r < b for b, r in zip(before.shape[2:], result.shape[2:], strict=True))


def _without_pixels(before: Tensor, result: Tensor) -> bool:
    if before.ndim != 4 or min(before.shape[-2:]) < 2 or result.shape[:2] != before.shape[:2]:
        return False
    return result.shape[2:].numel() == 1


def _ratio(before: Tensor, result: Tensor) -> float:
    """Of the lengths of pixels, as far as the sizes tell."""
    if before.ndim != 4 or result.ndim != 4 or min(result.shape[-1], before.shape[-1]) < 2:
        return 1.0
    ratio = before.shape[-1] / result.shape[-1]
    if ratio >= 1.5:
        return float(round(ratio))
    return 1.0 / round(1 / ratio) if ratio <= 1 / 1.5 else 1.0


def _stride_of(module: nn.Module) -> float | None:
    """How much longer pixels become, where the module says so."""
    stride = getattr(module, "stride", None)
    stride = stride[-1] if isinstance(stride, tuple) else stride
    if not isinstance(stride, int):
        return None
    transposed = isinstance(module, nn.ConvTranspose2d)
    return 1 / stride if transposed else float(stride)


def _source(module: nn.Module | None, kind: str) -> str:
    if module is None:
        return "activations" if kind in ACTIVATING else "sampling"
    if isinstance(module, GroupActivation):
        return "sampling" if isinstance(module.function, nn.Identity) else "activations"
    if isinstance(module, (*ACTIVATIONS, nn.PReLU, nn.RReLU, nn.Threshold, GroupPReLU2d)):
        return "activations"
    if isinstance(module, _SAMPLING):
        return "sampling"
    if isinstance(module, PDOConv2d | nn.Conv2d | nn.ConvTranspose2d):
        return "sampling" if _extent(module.stride) > 1 else "stencils"
    if isinstance(module, _NORMS):
        return "norms"
    if isinstance(module, GroupPool2d | GroupAttentionPool2d):
        return "orientation pooling"
    return "other layers"


def _extent(value: Any) -> int:
    largest = max(value) if isinstance(value, tuple | list) else value
    return largest if isinstance(largest, int) else 1


def _reach(module: nn.Module | None, kind: str) -> int:
    if isinstance(module, PDOConv2d):
        return math.ceil((module.extent // 2) / module.stride)
    if module is None:
        return 0 if kind in ACTIVATING else 2
    size = _extent(getattr(module, "kernel_size", 1))
    dilation = _extent(getattr(module, "dilation", 1))
    extent = dilation * (size - 1) + 1
    if extent > 1:
        return math.ceil((extent // 2) / max(1, _extent(getattr(module, "stride", 1))))
    return 2 if isinstance(module, _SAMPLING) else 0


@contextlib.contextmanager
def without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """Gradients reach maps and no parameters."""
    kept = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for parameter, _ in kept:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, required in kept:
            parameter.requires_grad_(required)


def with_gradient(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Run a model for its gradient: the same random numbers every time, and a copy of the input.

    Inside of `econv.testing`'s pass, which puts buffers back when all is over: earlier, and the
    backward pass would find them changed.
    """

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        result: Tensor = model(x.clone())
        return result

    return run


__all__ = [
    "ACTIVATING",
    "Step",
    "StepError",
    "Steps",
    "function_name",
    "replay",
    "trace_steps",
    "with_gradient",
    "without_parameter_gradients",
]
