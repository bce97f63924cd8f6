"""Advice that was tried: changes of a copy of the network, and the error before and after."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from econv.basis import filter_basis
from econv.lab.images import windowed
from econv.lab.lie import check_images
from econv.lab.measure import MARGIN
from econv.lab.results import Advice, Suggestion
from econv.lab.split import EXACT, error_of
from econv.lab.steps import Step, function_name, trace_steps
from econv.layers import Downsample2d, GroupPool2d, PDOConv2d, group_activation
from econv.layers.normalisation import calibrate
from econv.layers.sampling import CentredAvgPool2d, CentredMaxPool2d
from econv.testing import _undisturbed

_KINKED = {
    "relu": "ReLU",
    "relu6": "ReLU6",
    "leaky_relu": "LeakyReLU",
    "hardtanh": "Hardtanh",
    "hardswish": "Hardswish",
    "hardsigmoid": "Hardsigmoid",
}
"""Activations with kinks, by the names of torch's functions, and those of their modules."""


def _blurred(x: Tensor) -> Tensor:
    return group_activation(x, "silu") if x.ndim == 4 else functional.silu(x)


_SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "SiLU": functional.silu,
    "GELU": functional.gelu,
    'GroupActivation2d("silu")': _blurred,
}
"""What is tried in their place."""

KINDS_OF_ADVICE = (
    "activations",
    "sampling",
    "strides",
    "orientation pooling",
    "stencils",
    "images",
)
"""Of changes."""

_MAX_POOLS = (nn.MaxPool2d, CentredMaxPool2d)
_AVERAGE_POOLS = (nn.AvgPool2d, CentredAvgPool2d)


@dataclass(frozen=True)
class _Change:
    kind: str
    text: str
    layers: tuple[str, ...]
    apply: Callable[[nn.Module], nn.Module]
    images: Callable[[Tensor], Tensor] = lambda images: images


def advice(
    model: nn.Module,
    images: Tensor,
    degrees: float = 45.0,
    *,
    kinds: Iterable[str] = KINDS_OF_ADVICE,
    statistics: str = "estimated",
    least: float = 0.1,
    margin: float = MARGIN,
    input_kind: str | None = None,
    output_kind: str | None = None,
) -> Advice:
    """What would make this network more equivariant: changes that were tried, and helped.

    Each change is made in a copy, nothing is trained, and the error of the output at one angle is
    measured before and after. Those that lower it by less than ``least`` of itself are listed as
    tried and nothing more. What is tried, wherever a network has it, by kind:

    - ``"activations"``: SiLU and GELU in place of those with a kink (ReLU, LeakyReLU …), modules
      and functions;
    - ``"sampling"``: `Downsample2d`, which filters before it halves, in place of poolings;
    - ``"strides"``: the same behind convolutions with a stride of 2, which then have none;
    - ``"orientation pooling"``: the mean over orientations in place of their maximum;
    - ``"stencils"``: ``stencils="isotropic"``, and two pixels larger, for the same operators;
    - ``"images"``: faded to zero outside of their inscribed disc, as a plain background is.

    A change alters what the network computes: train it again before you use it.

    Args:
        model: any module of one tensor; left as it is.
        images: ``[batch, channels, size, size]``.
        degrees: the angle, anticlockwise.
        kinds: what to try; all by default.
        statistics: running statistics of batch norms: ``"estimated"`` anew on these images for
            every network, the unchanged one included, or ``"held"`` as they are.
        least: by which fraction of itself a change has to lower the error to be reported.
        margin: an output that has pixels is compared inside the disc that ends this fraction of the
            side before the border.
        input_kind: how the input turns.
        output_kind: how the output turns.

    Raises:
        ValueError: for options out of their range, images that are not square, and a model that
            returns neither a map nor scores.

    >>> from econv import GroupConv2d, LiftConv2d
    >>> from econv.testing import smooth_field
    >>> model = nn.Sequential(LiftConv2d(1, 4, "p8"), nn.ReLU(), GroupConv2d(4, 4, "p8"))
    >>> found = advice(model.double(), smooth_field(49, smoothness=1.5))
    >>> found.suggestions[0].change, found.suggestions[0].after < found.error
    ('GroupActivation2d("silu") in place of this ReLU', True)
    """
    check_images(images)
    if images.shape[-1] != images.shape[-2] and degrees % 180:
        raise ValueError(f"expected square images to turn; got {tuple(images.shape[-2:])} pixels")
    if statistics not in ("estimated", "held"):
        raise ValueError(f"expected statistics 'estimated' or 'held'; got {statistics!r}")
    wanted = set(kinds)
    if not wanted <= set(KINDS_OF_ADVICE):
        raise ValueError(
            f"expected kinds among {KINDS_OF_ADVICE}; got {sorted(wanted - set(KINDS_OF_ADVICE))}"
        )
    if not 0 <= least < 1:
        raise ValueError(f"expected least as a fraction from 0 to 1; got {least!r}")

    with _undisturbed(model, images.device) as run:
        steps = trace_steps(model, run, images, input_kind=input_kind, output_kind=output_kind)

    def measured(changes: Sequence[_Change]) -> float:
        seen = images
        network = copy.deepcopy(model)
        for change in changes:
            seen, network = change.images(seen), change.apply(network)
        if statistics == "estimated" and any(isinstance(m, _BatchNorm) for m in network.modules()):
            calibrate(network, seen).train(model.training)
        return error_of(network, seen, steps, degrees, margin)

    before = measured(())
    helped: list[tuple[_Change, float]] = []
    tried = []
    if before > EXACT:
        for change in _changes(model, images, steps.steps):
            if change.kind not in wanted:
                continue
            try:
                after = measured((change,))
            except (ValueError, RuntimeError):  # sizes that no longer fit what follows
                continue
            tried.append(change.text)
            if after <= (1 - least) * before:
                helped.append((change, after))
    helped.sort(key=lambda entry: entry[1])
    best = list({change.kind: change for change, _ in reversed(helped)}.values())[::-1]
    together = None
    if len(best) > 1:
        try:
            after = measured(best)
        except (ValueError, RuntimeError):
            after = before
        if after < helped[0][1]:
            text = " and ".join(change.text for change in best)
            where = tuple(dict.fromkeys(name for change in best for name in change.layers))
            together = Suggestion(text, where, before, after)
    found = tuple(Suggestion(c.text, c.layers, before, after) for c, after in helped)
    return Advice(degrees, before, statistics, found, together, tuple(tried))


def _changes(model: nn.Module, images: Tensor, steps: Iterable[Step]) -> Iterator[_Change]:
    """Every change that fits the network."""
    yield from _activations(steps)
    yield from _poolings(model)
    yield from _strides(model)
    yield from _orientations(model)
    yield from _stencils(model)
    if bool((windowed(images) == 0).logical_and(images != 0).any()):
        text = "images faded to zero outside of their inscribed disc"
        yield _Change("images", text, (), lambda network: network, windowed)


def _activations(steps: Iterable[Step]) -> Iterator[_Change]:
    names = {module: function for function, module in _KINKED.items()}
    found: dict[str, list[str]] = {}
    for step in steps:
        function = names.get(step.type, step.type)
        if function in _KINKED:
            found.setdefault(function, []).append(step.name)
    for function, places in found.items():
        for name, smooth in _SMOOTH.items():
            yield _Change(
                "activations",
                f"{name} in place of {_these(places, _KINKED[function])}",
                tuple(places),
                _swapping(function, smooth),
            )


def _swapping(name: str, instead: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], nn.Module]:
    return lambda network: _Swapped(network, name, instead)


class _Swapped(nn.Module):
    """A network in which one function is called in place of another, in modules and outside."""

    def __init__(self, network: nn.Module, name: str, instead: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.name, self.instead = network, name, instead
        for end in ("input_kind", "output_kind", "group"):
            if hasattr(network, end):
                setattr(self, end, getattr(network, end))
        self.train(network.training)

    def forward(self, x: Tensor) -> Tensor:
        with _Instead(self.name, self.instead):
            result: Tensor = self.network(x)
        return result


class _Instead(TorchFunctionMode):
    def __init__(self, name: str, instead: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.instead = name, instead

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function_name(func) == self.name:
            return self.instead(args[0] if args else (kwargs or {})["input"])
        return func(*args, **(kwargs or {}))


def _poolings(model: nn.Module) -> Iterator[_Change]:
    maxima = _halving(model, _MAX_POOLS)
    if maxima:
        for reduce in ("max", "mean"):
            text = f"Downsample2d({reduce!r}) in place of {_these(maxima, 'max pooling')}"
            yield _replacing("sampling", text, maxima, _halved(reduce))
    means = _halving(model, _AVERAGE_POOLS)
    if means:
        text = f"Downsample2d() in place of {_these(means, 'average pooling')}"
        yield _replacing("sampling", text, means, _halved("mean"))


def _halved(reduce: str) -> Callable[[nn.Module], nn.Module]:
    return lambda _: Downsample2d(reduce)


def _halving(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, kinds) and _side(m.stride) == 2]


def _strides(model: nn.Module) -> Iterator[_Change]:
    strided = [
        name
        for name, module in model.named_modules()
        if isinstance(module, PDOConv2d | nn.Conv2d) and _side(module.stride) == 2
    ]
    if strided:
        text = f"stride 1 and then Downsample2d() in place of the stride of {_these(strided)}"
        yield _replacing("strides", text, strided, _unstrided)


def _unstrided(module: nn.Module) -> nn.Module:
    assert isinstance(module, PDOConv2d | nn.Conv2d)
    if isinstance(module, PDOConv2d):
        module.stride, module.centred = 1, False
    else:
        module.stride = (1, 1)
    return nn.Sequential(module, Downsample2d())


def _orientations(model: nn.Module) -> Iterator[_Change]:
    found = {n: m for n, m in model.named_modules() if isinstance(m, GroupPool2d)}
    pools = [name for name, module in found.items() if module.reduce == "max"]
    if pools:
        text = f'GroupPool2d(…, "mean") in place of {_these(pools, "maximum over orientations")}'
        yield _replacing(
            "orientation pooling",
            text,
            pools,
            lambda pool: GroupPool2d(pool.group, "mean"),  # type: ignore[arg-type]
        )


def _stencils(model: nn.Module) -> Iterator[_Change]:
    found = {n: m for n, m in model.named_modules() if isinstance(m, PDOConv2d) and m.extent > 1}
    other = [n for n, m in found.items() if m.basis.stencils.name != "isotropic"]
    if other:
        text = f'stencils="isotropic" in {_these(other)}'
        yield _replacing("stencils", text, other, lambda layer: _with_stencils(layer, 0))
    size = max((m.basis.size for m in found.values()), default=0)
    if size:
        text = f"size={size + 2} in {_these(list(found))}"
        yield _replacing("stencils", text, list(found), lambda layer: _with_stencils(layer, 2))


def _with_stencils(layer: nn.Module, larger: int) -> nn.Module:
    """Isotropic stencils for the same operators and coefficients."""
    assert isinstance(layer, PDOConv2d)
    beta, basis = layer.coefficients().detach(), layer.basis
    same = layer.padding == layer.extent // 2
    layer.basis = filter_basis(
        basis.group, basis.operators, "isotropic", basis.size + larger, aspect=basis.aspect
    )
    layer.padding = layer.extent // 2 if same else layer.padding + larger * layer.dilation // 2
    layer._refresh_constants()
    layer.set_coefficients(beta)
    return layer


def _replacing(
    kind: str, text: str, names: Sequence[str], make: Callable[[nn.Module], nn.Module]
) -> _Change:
    def apply(network: nn.Module) -> nn.Module:
        inner = network.network if isinstance(network, _Swapped) else network
        for name in names:
            if not name:  # the model itself
                return make(network)
            parent, _, last = name.rpartition(".")
            setattr(inner.get_submodule(parent), last, make(inner.get_submodule(name)))
        return network

    return _Change(kind, text, tuple(names), apply)


def _side(stride: object) -> object:
    return stride[0] if isinstance(stride, tuple) and len(set(stride)) == 1 else stride


def _these(places: Sequence[str], what: str = "convolution") -> str:
    if len(places) == 1:
        return f"this {what}"
    return f"these {len(places)} {what}s"
