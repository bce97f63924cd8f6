"""Where the error of a network comes from: stencils, activations, sampling, borders or the input.

At every step the map that came out is compared with the one that should have: the turned map of
the upright image. With all these differences taken away the network is exact; with none, it is
what it is. In between, the error grows, and each difference adds its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from econv.checking import FieldType
from econv.groups import Group
from econv.lab.lie import Run, check_images
from econv.lab.measure import MARGIN, _too_small, disc_mask
from econv.lab.motions import has_pixels, turn
from econv.lab.results import ErrorSplit, Source
from econv.lab.steps import (
    Step,
    Steps,
    replay,
    trace_steps,
    with_gradient,
    without_parameter_gradients,
)
from econv.layers import PDOConv2d
from econv.testing import _undisturbed

EXACT = 1e-5  # what is less is rounding
_POINTS = 3  # of the integral
_RESOLVED = 0.1  # what shares may lack to a whole
_EXACT = 1e-4  # what a step errs by at a quarter turn more than this, it does not turn
_BLUR = 2  # pixels at the border that the spline of a turned map is disturbed in


def split_error(
    model: nn.Module,
    images: Tensor,
    degrees: float = 45.0,
    *,
    margin: float = MARGIN,
    input_kind: str | None = None,
    output_kind: str | None = None,
) -> ErrorSplit:
    """How much stencils, activations, sampling, borders and the input add to the output's error.

    Every step of the network is given the exact map, that of the upright image turned, and what it
    does wrong there is its own error. Those errors sum to that of the output on the way from a
    network in which none is made to the network as it is: each one's share is its part of that
    integral, along the error (Aumann and Shapley's division, in a few forward and backward passes).
    ``alone`` is the error of the output if only this kind were made.

    The kinds are

    - ``"input"``: what turning the image itself loses, which is no fault of the network: from
      turning it there and back (an estimate);
    - ``"borders"``: filters see zeros beyond them instead of the scene, and corners turn out of
      sight, which pooling over all pixels counts as well;
    - ``"stencils"``: convolutions; ``"orientations"``: the same at an angle between those of their
      group, which no stencil can repair;
    - ``"activations"``, ``"norms"``, ``"orientation pooling"``;
    - ``"sampling"``: poolings, resizing, and convolutions with a stride;
    - ``"not equivariant"``: steps that fail at quarter turns as well, and have no sampling to
      blame, such as the filters of an ordinary convolution;
    - ``"other layers"``.

    Args:
        model: any module of one tensor, see :func:`lie_derivatives` for how its maps turn.
        images: ``[batch, channels, size, size]``.
        degrees: the angle, anticlockwise.
        margin: an output that has pixels is compared inside the disc that ends this fraction of the
            side before the border.
        input_kind: how the input turns.
        output_kind: how the output turns.

    Raises:
        ValueError: for images that are not square, an angle of whole turns, and a model that
            returns neither a map nor scores.

    >>> from econv import GroupPool2d, LiftConv2d
    >>> from econv.lab import windowed
    >>> from econv.testing import smooth_field
    >>> model = nn.Sequential(LiftConv2d(1, 2, "p8"), nn.ReLU(), GroupPool2d("p8", "mean")).double()
    >>> split = split_error(model, windowed(smooth_field(49)))
    >>> split.sources[0].name, abs(sum(s.share for s in split.sources) - 1) < 0.02
    ('activations', True)
    """
    check_images(images)
    if not math.isfinite(degrees) or degrees % 360 == 0:
        raise ValueError(f"expected a finite angle in degrees that is no whole turn; got {degrees}")
    if images.shape[-1] != images.shape[-2] and degrees % 180:
        raise ValueError(f"expected square images to turn; got {tuple(images.shape[-2:])} pixels")
    with _undisturbed(model, images.device) as run:
        steps = trace_steps(model, run, images, input_kind=input_kind, output_kind=output_kind)
        split = _Split(model, run, images, steps, degrees, margin)
        return split.result()


def output_error(
    model: nn.Module,
    images: Tensor,
    degrees: float = 45.0,
    *,
    margin: float = MARGIN,
    input_kind: str | None = None,
    output_kind: str | None = None,
) -> float:
    """‖f(πx) − πf(x)‖ / ‖πf(x)‖ of the output at any angle, as :func:`split_error` has it.

    Raises:
        ValueError: for images that are no batch, and a model that returns neither a map nor scores.

    >>> from econv import LiftConv2d
    >>> model = nn.Sequential(LiftConv2d(1, 2, "p4"), nn.ReLU())
    >>> output_error(model, torch.randn(1, 1, 33, 33), degrees=90.0) < 1e-4
    True
    """
    check_images(images)
    with _undisturbed(model, images.device) as run:
        steps = trace_steps(model, run, images, input_kind=input_kind, output_kind=output_kind)
    return error_of(model, images, steps, degrees, margin)


def error_of(
    model: nn.Module, images: Tensor, steps: Steps, degrees: float, margin: float
) -> float:
    """The same, of a network whose input and output turn as those of these steps."""
    with _undisturbed(model, images.device) as run:
        expected = turn(run(images), steps.output_type, degrees)
        result = run(turn(images, steps.input_type, degrees))
        return _relative(result - expected, expected, _mask(expected, margin, degrees))


class _Split:
    """The errors of all steps of one network at one angle."""

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        images: Tensor,
        steps: Steps,
        degrees: float,
        margin: float,
    ) -> None:
        self.model, self.run, self.steps, self.degrees = model, run, steps, degrees
        count = len(steps.steps)
        turned = turn(images, steps.input_type, degrees)
        # What one more turn there and back loses, the first has lost half of.
        again = turn(turn(turned, steps.input_type, -degrees), steps.input_type, degrees)
        self.blur = (again - turned) / 2
        self.input = turned - self.blur
        self.expected = turn(steps.output, steps.output_type, degrees)
        self.mask = _mask(self.expected, margin, degrees)
        self.error = self._masked(run(turned) - self.expected)
        self.size = float(self.error.square().sum())
        self.differences: list[Tensor | None] = [None] * count
        self.inside: list[Tensor | None] = [None] * count
        self.last = replay(model, run, self.input, steps, self._compare) - self.expected
        self.broken = self._broken(images)

    def _compare(self, place: int, output: Tensor) -> Tensor:
        step = self.steps.steps[place]
        wanted = turn(step.value, step.field_type or FieldType("invariant"), self.degrees)
        difference = output - wanted
        if has_pixels(wanted):
            # Of the corners that turn into sight nobody knows what they should be.
            if self.degrees % 90:
                difference = difference * _inside(wanted, self.degrees, 0)
            self.inside[place] = _inside(wanted, self.degrees, step.reach + _BLUR)
        self.differences[place] = difference
        return output - difference

    def _broken(self, images: Tensor) -> set[int]:
        """Steps that fail at a quarter turn, though it maps the pixels onto themselves."""
        if images.shape[-1] != images.shape[-2]:
            return set()
        found: set[int] = set()

        def visit(place: int, output: Tensor) -> Tensor:
            step = self.steps.steps[place]
            wanted = turn(step.value, step.field_type or FieldType("invariant"), 90.0)
            if not float((output - wanted).norm()) <= _EXACT * float(wanted.norm()):
                found.add(place)
            return wanted

        if _has_quarter_turns(self.steps):
            turned = turn(images, self.steps.input_type, 90.0)
            replay(self.model, self.run, turned, self.steps, visit)
        return found

    def result(self) -> ErrorSplit:
        relative = _relative(self.error, self._masked(self.expected), None)
        kind = self.steps.output_type.kind
        if relative <= EXACT:
            return ErrorSplit(self.degrees, kind, relative, (), (), 0.0)
        parts = self._parts()
        shares = self._shares(parts)
        rest = float((self._masked(self.last) * self.error).sum()) / self.size
        names = ["input", *(part for part in _ORDER if any(part in of for of in parts))]
        sources: list[Source] = []
        for name in names:
            share = shares[-1].get(name, 0.0) if name == "input" else 0.0
            of_steps = [(shares[i].get(name, 0.0), i) for i in range(len(parts))]
            share += sum(value for value, _ in of_steps)
            largest = sorted((v, i) for v, i in of_steps if v > 0.01)[::-1][:3]
            mostly = tuple(self.steps.steps[i].label for _, i in largest)
            alone = self._alone(parts, name) if abs(share) >= 0.005 else None
            sources.append(Source(name, share, alone, mostly))
        if abs(rest) > 1e-6:
            sources.append(Source("functions after the last layer", rest))
        layers = tuple(
            Source(step.label, sum(shares[i].values()))
            for i, step in enumerate(self.steps.steps)
            if step.field_type is not None
        )
        sources.sort(key=lambda source: -source.share)
        unexplained = 1.0 - sum(source.share for source in sources)
        return ErrorSplit(self.degrees, kind, relative, tuple(sources), layers, unexplained)

    def _parts(self) -> list[dict[str, Tensor]]:
        """Each step's error, divided among the kinds."""
        parts: list[dict[str, Tensor]] = []
        for place, step in enumerate(self.steps.steps):
            difference = self.differences[place]
            if difference is None:
                parts.append({})
                continue
            named: dict[str, Tensor] = {}
            source = self._source(place, step)
            inside = self.inside[place]
            # A quarter turn maps borders onto borders; what never turns fails there as elsewhere.
            if inside is not None and self.degrees % 90 and source != "not equivariant":
                named["borders"] = difference * (1 - inside)
                difference = difference * inside
            named[source] = difference + named[source] if source in named else difference
            parts.append(named)
        return parts

    def _source(self, place: int, step: Step) -> str:
        if place in self.broken and not _loses_pixels(step):
            return "not equivariant"
        if step.pools:
            return "borders"
        if step.source == "stencils" and isinstance(step.module, PDOConv2d):
            step_angle = 360 / step.module.group.rotations
            if abs(self.degrees / step_angle - round(self.degrees / step_angle)) > 1e-9:
                return "orientations"
        return step.source

    def _shares(self, parts: list[dict[str, Tensor]]) -> list[dict[str, float]]:
        """The integral of what each part adds to the output's error; the input comes last."""
        rest = float((self._masked(self.last) * self.error).sum()) / self.size
        for points in (_POINTS, 3 * _POINTS):  # more where the first do not resolve it
            shares: list[dict[str, float]] = [{} for _ in range(len(parts) + 1)]
            nodes, weights = np.polynomial.legendre.leggauss(points)
            for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
                self._gradients(float(node), float(weight) / self.size, parts, shares)
            if abs(1 - rest - sum(sum(named.values()) for named in shares)) < _RESOLVED:
                break
        return shares

    def _gradients(
        self,
        amount: float,
        weight: float,
        parts: list[dict[str, Tensor]],
        shares: list[dict[str, float]],
    ) -> None:
        def visit(place: int, output: Tensor) -> Tensor | None:
            difference = self.differences[place]
            if difference is None:
                return None
            result = output - (1 - amount) * difference

            def seen(gradient: Tensor) -> None:
                for name, part in parts[place].items():
                    added = weight * float((gradient * part).sum(dtype=torch.float64))
                    shares[place][name] = shares[place].get(name, 0.0) + added

            if result.requires_grad:
                result.register_hook(seen)
            return result

        with torch.enable_grad(), without_parameter_gradients(self.model):
            x = (self.input + amount * self.blur).detach().requires_grad_()
            output = replay(self.model, with_gradient(self.model), x, self.steps, visit)
            (self._masked(output) * self.error).sum().backward()
        if x.grad is not None:
            added = weight * float((x.grad * self.blur).sum(dtype=torch.float64))
            shares[-1]["input"] = shares[-1].get("input", 0.0) + added

    def _alone(self, parts: list[dict[str, Tensor]], name: str) -> float:
        """The error of the output if steps made errors of one kind only."""

        def visit(place: int, output: Tensor) -> Tensor | None:
            others = [part for other, part in parts[place].items() if other != name]
            for part in others:
                output = output - part
            return output

        x = self.input + self.blur if name == "input" else self.input
        output = replay(self.model, self.run, x, self.steps, visit) - self.last
        return _relative(self._masked(output - self.expected), self._masked(self.expected), None)

    def _masked(self, x: Tensor) -> Tensor:
        return x.double() if self.mask is None else x.double() * self.mask


_ORDER = (
    "borders",
    "stencils",
    "orientations",
    "activations",
    "norms",
    "sampling",
    "orientation pooling",
    "not equivariant",
    "other layers",
)


def _inside(x: Tensor, degrees: float, reach: int) -> Tensor:
    """1 where neither a pixel nor the one that it was turned from is within reach of the border."""
    height, width = x.shape[-2:]
    rows = (height - 1) / 2 - torch.arange(height, dtype=torch.float64)[:, None]
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    radians = math.radians(degrees)
    cosine, sine = math.cos(radians), math.sin(radians)
    before = (columns * cosine + rows * sine, rows * cosine - columns * sine)
    inside = torch.ones(height, width, dtype=torch.bool)
    for right, up in ((columns, rows), before):
        inside &= (right.abs() <= (width - 1) / 2 - reach) & (up.abs() <= (height - 1) / 2 - reach)
    return inside.to(x)


def _has_quarter_turns(steps: Steps) -> bool:
    kinds: Iterable[FieldType | None] = (
        steps.input_type,
        steps.output_type,
        *(step.field_type for step in steps.steps),
    )
    groups = {entry.group for entry in kinds if entry is not None and entry.kind == "regular"}
    return all(isinstance(g, Group) and g.rotations % 4 == 0 for g in groups)


def _loses_pixels(step: Step) -> bool:
    """Whether a failure at quarter turns may be that of the sampling alone."""
    module = step.module
    filters = isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and max(module.kernel_size) > 1
    return step.source == "sampling" and not filters


def _mask(x: Tensor, margin: float, degrees: float) -> Tensor | None:
    if degrees % 90 == 0:  # the whole map is mapped onto itself
        return None
    if has_pixels(x) and _too_small(x, margin):
        raise ValueError(
            f"expected an output with pixels enough to turn by {degrees:g}°; got "
            f"{x.shape[-2]}×{x.shape[-1]}"
        )
    return disc_mask(x, margin)


def _relative(error: Tensor, expected: Tensor, mask: Tensor | None) -> float:
    if mask is not None:
        error, expected = error.double() * mask, expected.double() * mask
    norm, size = float(error.double().norm()), float(expected.double().norm())
    if not (size > 0 and math.isfinite(norm)):
        raise ValueError("expected an output that is finite and not zero")
    return norm / size
