"""Lie derivatives: how a network answers when its input begins to turn, shift or grow."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from econv.checking import FieldType
from econv.lab.measure import MARGIN, _too_small, disc_mask
from econv.lab.motions import TRANSFORMATIONS, has_pixels, velocity
from econv.lab.results import LieDerivative, LieDerivatives
from econv.lab.steps import (
    StepError,
    Steps,
    replay,
    trace_steps,
    with_gradient,
    without_parameter_gradients,
)
from econv.testing import _undisturbed

Run = Callable[[Tensor], Tensor]


def lie_derivatives(
    model: nn.Module,
    images: Tensor,
    transformation: str = "rotation",
    *,
    direction: tuple[float, float] = (1.0, 0.0),
    margin: float = MARGIN,
    shares: bool = True,
    totals: bool = True,
    input_kind: str | None = None,
    output_kind: str | None = None,
) -> LieDerivatives:
    """The Lie derivative of every layer of any network, and what it adds to that of the output.

    An equivariant map commutes with the generator G of a movement: df(Gx) = G f(x). The difference
    of the two sides is the Lie derivative, which Gruver et al. (2023), "The Lie derivative for
    measuring learned equivariance", measure. It needs no angle and no turned image: Gx is the
    derivative of the spline through the pixels, and df that of the network, by forward-mode
    differentiation. By the chain rule that of the network is the sum of what its layers add to it.

    Maps turn as the layers of econv say of themselves (``output_kind``, which any module may have
    as an attribute, with ``group``). In networks without such layers every map is taken for images
    and what has no pixels for invariant, as there. Group features turn by any angle here, read
    between the group's own: with few orientations that is a large part of the error.

    Args:
        model: any module of one tensor; measured in the mode that it is in, and left as it was.
        images: ``[batch, channels, height, width]``.
        transformation: ``"rotation"`` (per radian), ``"translation"`` (per pixel of the input) or
            ``"scale"`` (per factor e), about the centre.
        direction: of a translation, (right, up).
        margin: maps are compared inside the disc that ends this fraction of the side before the
            border.
        shares: whether to find what each layer adds to the Lie derivative of the output, which
            takes a backward pass.
        totals: whether to find that of the network up to every layer and of its output, which
            shares need.
        input_kind: how the input turns; by default what the layers say, else as images.
        output_kind: how the output turns; by default what follows from the layers.

    Where a module has no forward mode, small finite differences are taken instead, and ``method``
    says so.

    Raises:
        ValueError: for an unknown transformation, and a model that returns neither a map nor
            scores.

    >>> from econv.testing import smooth_field
    >>> network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 1)).double()
    >>> found = lie_derivatives(network, smooth_field(33))
    >>> [layer.own > 1e-3 for layer in found.layers], found.method
    ([True, False], 'forward mode')
    """
    if transformation not in TRANSFORMATIONS:
        raise ValueError(f"expected a transformation of {TRANSFORMATIONS}; got {transformation!r}")
    check_images(images)
    if shares and not totals:
        raise ValueError("expected shares=False with totals=False: shares are of the total")

    def moving(x: Tensor, field_type: FieldType, spacing: float) -> Tensor:
        return velocity(x, field_type, transformation, direction, spacing)

    with _undisturbed(model, images.device) as run:
        steps = trace_steps(model, run, images, input_kind=input_kind, output_kind=output_kind)
        last = steps.steps[-1].spacing if steps.steps else 1.0
        start = moving(images, steps.input_type, 1.0)
        speeds = [
            None if s.field_type is None else moving(s.value, s.field_type, s.spacing)
            for s in steps.steps
        ]
        goal = moving(steps.output, steps.output_type, last)
        measure, method = _tangents, "forward mode"
        try:
            own, _ = measure(model, run, images, start, steps, speeds)
        except StepError as stopped:
            measure = _differences
            method = f"finite differences, because forward mode stops at {stopped}"
            own, _ = measure(model, run, images, start, steps, speeds)
        lies = _minus(own, speeds)
        whole: list[Tensor | None] = [None] * len(lies)
        error, added = None, None
        if totals:
            moved, end = measure(model, run, images, start, steps, None)
            whole, error = _minus(moved, speeds), end - goal
        if shares and error is not None:
            added = _shares(model, images, steps, lies, error, disc_mask(error, margin))
    layers = []
    for place, step in enumerate(steps.steps):
        if step.field_type is None:
            continue
        layers.append(
            LieDerivative(
                step.name,
                step.type,
                step.field_type.kind,
                tuple(step.value.shape[1:]),
                _relative(lies[place], step.value, margin),
                _relative(whole[place], step.value, margin),
                None if added is None else added[place],
            )
        )
    known = None if added is None else [share for share in added if share is not None]
    return LieDerivatives(
        transformation,
        tuple(layers),
        steps.output_type.kind,
        _relative(error, steps.output, margin),
        None if known is None else 1.0 - sum(known),
        method,
    )


def check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(
            f"expected images as a float tensor [batch, channels, height, width]; got {found}"
        )


def _tangents(
    model: nn.Module,
    run: Run,
    x: Tensor,
    start: Tensor,
    steps: Steps,
    speeds: list[Tensor | None] | None,
) -> tuple[list[Tensor | None], Tensor]:
    """The derivative of every map as ``x`` moves; with speeds, as what each step reads moves."""
    found: list[Tensor | None] = [None] * len(steps.steps)
    with forward_ad.dual_level():

        def visit(place: int, output: Tensor) -> Tensor | None:
            primal, tangent = forward_ad.unpack_dual(output)
            found[place] = torch.zeros_like(primal) if tangent is None else tangent.clone()
            speed = None if speeds is None else speeds[place]
            return None if speed is None else _dual(primal, speed)

        output = replay(model, run, _dual(x, start), steps, visit)
        primal, tangent = forward_ad.unpack_dual(output)
        return found, torch.zeros_like(primal) if tangent is None else tangent.clone()


def _dual(x: Tensor, tangent: Tensor) -> Tensor:
    """A copy of ``x`` that moves.

    Not by `forward_ad.make_dual`, which first imports torch's compiler, seconds, for what the
    derivatives of a few losses need. What has no forward mode without it has finite differences.
    """
    level = forward_ad._current_level
    result: Tensor = torch._VF._make_dual(x.clone(), tangent.clone(), level=level)
    return result


def _differences(
    model: nn.Module,
    run: Run,
    x: Tensor,
    start: Tensor,
    steps: Steps,
    speeds: list[Tensor | None] | None,
) -> tuple[list[Tensor | None], Tensor]:
    """The same from two passes, by central differences."""
    width = torch.finfo(x.dtype).eps ** (1 / 3)
    found: list[list[Tensor | None]] = []
    ends = []
    for way in (width, -width):
        maps: list[Tensor | None] = [None] * len(steps.steps)

        def visit(
            place: int, output: Tensor, way: float = way, maps: list[Tensor | None] = maps
        ) -> Tensor | None:
            maps[place] = output.clone()
            speed = None if speeds is None else speeds[place]
            return None if speed is None else steps.steps[place].value + way * speed

        ends.append(replay(model, run, x + way * start, steps, visit).clone())
        found.append(maps)
    between = [
        None if one is None or other is None else (one - other) / (2 * width)
        for one, other in zip(*found, strict=True)
    ]
    return between, (ends[0] - ends[1]) / (2 * width)


def _shares(
    model: nn.Module,
    x: Tensor,
    steps: Steps,
    lies: list[Tensor | None],
    error: Tensor,
    mask: Tensor | None,
) -> list[float | None] | None:
    """What each step adds to the output's Lie derivative, along that and over its square."""
    along = error.double() if mask is None else error.double() * mask
    size = float(along.square().sum())
    if not (size > 0 and math.isfinite(size)):
        return None
    shares: list[float | None] = [None] * len(steps.steps)

    def visit(place: int, output: Tensor) -> None:
        lie = lies[place]
        if lie is None or not output.requires_grad:
            return

        def seen(gradient: Tensor) -> None:
            shares[place] = float((gradient.double() * lie.double()).sum()) / size

        output.register_hook(seen)

    with torch.enable_grad(), without_parameter_gradients(model):
        leaf = x.clone().requires_grad_()
        try:
            output = replay(model, with_gradient(model), leaf, steps, visit)
            (output * along.to(output)).sum().backward()
        except RuntimeError:  # a module without a backward pass
            return None
    return shares


def _minus(one: list[Tensor | None], other: list[Tensor | None]) -> list[Tensor | None]:
    return [None if a is None or b is None else a - b for a, b in zip(one, other, strict=True)]


def _relative(lie: Tensor | None, value: Tensor, margin: float) -> float | None:
    if lie is None:
        return None
    if value.ndim == 4 and has_pixels(value) and _too_small(value, margin):
        return None
    mask = disc_mask(value, margin)
    wide, size = lie.double(), value.double()
    if mask is not None:
        wide, size = wide * mask, size * mask
    norm = float(size.norm())
    return float(wide.norm()) / norm if norm > 0 else None
