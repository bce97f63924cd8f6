"""The measurements: errors by layer, angle and resolution, and where they come from."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from econv.basis import FilterBasis
from econv.checking import FieldType
from econv.engines.problem import times
from econv.groups import FloatArray, Group, GroupLike
from econv.lab.kinds import (
    Map,
    element_name,
    find_group,
    group_of_layers,
    input_kind_of,
    leaf_modules,
    output_kind_of,
    rotate_map,
    together,
    trace_maps,
    turn_channels,
    turn_map,
)
from econv.lab.results import (
    AngleCurve,
    Blame,
    ErrorSources,
    LayerError,
    LayerErrors,
    OperatorSymbol,
    OutputError,
    ResolutionCurve,
)
from econv.layers import (
    GroupBatchNorm2d,
    GroupPool2d,
    PDOConv2d,
)
from econv.layers.activations import ACTIVATIONS
from econv.layers.checks import MAPS
from econv.stencils import Aspect, coordinates, sides
from econv.testing import _ball, _undisturbed, convergence_order, transform

MARGIN = 3 / 16
"""Fraction of the side before the border that interior errors leave out."""

_EXACT = 1e-4
"""What fails by more at a symmetry of the pixel grid is not exact."""


def layer_errors(
    model: nn.Module,
    images: Tensor,
    group: GroupLike | None = None,
    elements: Iterable[int] | None = None,
    margin: float = MARGIN,
    *,
    input_kind: str | None = None,
    output_kind: str | None = None,
) -> LayerErrors:
    """The error after every layer and for every element: f(πx) against πf(x).

    Maps are collected by hooks. How a map turns is what the layers say of themselves
    (``output_kind``); modules and functions that treat all channels alike hand on the kind of what
    flows in, and everything else is listed as unknown.

    The model is measured in the mode that it is in, and left as it was. At elements that are no
    symmetries of the pixel grid the error of maps is taken inside the disc that ends ``margin`` of
    the side before the border; maps of two pixels, which no other angle maps onto themselves, and
    those without a signal there are not compared.

    Raises:
        ValueError: for images that cannot be turned, elements that the group does not have, and
            outputs that are not known to turn.

    >>> from econv import LiftConv2d
    >>> from econv.testing import smooth_field
    >>> model = nn.Sequential(LiftConv2d(1, 2, "p4"), nn.ReLU(), GroupPool2d("p4")).double()
    >>> table = layer_errors(model, smooth_field(16))
    >>> [layer.name for layer in table.layers], max(table.layers[-1].errors) < 1e-12
    (['0', '1', '2'], True)
    """
    found = find_group(model, group)
    chosen = _elements(found, elements)
    _check_images(images, found, chosen)
    kind = input_kind_of(model, input_kind)
    with _undisturbed(model, images.device) as run:
        straight = trace_maps(model, run, images, kind, found)
        out_kind = output_kind_of(model, straight, output_kind)
        errors: list[list[float | None]] = [[] for _ in straight.maps]
        outputs = []
        wrong: tuple[int, int] | None = None  # the first map that fails on the grid, and where
        for element in chosen:
            turned = trace_maps(model, run, transform(images, found, element, kind), kind, found)
            exact = element in found.grid_symmetries
            pairs = zip(errors, straight.maps, turned.maps, strict=True)
            for place, (row, before, after) in enumerate(pairs):
                expected = turn_map(before.value, before.field_type, found, element)
                off_grid = None if exact else margin
                error = _map_error(after.value, expected, off_grid, before.name)
                row.append(error)
                if exact and not _is_exact(error) and (wrong is None or place < wrong[0]):
                    wrong = place, element
            outputs.append(
                _output_error(straight.output, turned.output, out_kind, found, element, margin)
            )
            if exact and wrong is None and not _is_exact(outputs[-1].relative):
                wrong = len(straight.maps), element
        blame = None if wrong is None else _blame(model, run, images, kind, found, straight, *wrong)
    layers = tuple(
        LayerError(
            entry.name,
            entry.type,
            entry.field_type.kind,
            together(entry.field_type, found),
            tuple(entry.value.shape[1:]),
            tuple(row),
        )
        for entry, row in zip(straight.maps, errors, strict=True)
    )
    strided = tuple(name for name, module in model.named_modules() if _strided(module))
    return LayerErrors(
        found,
        chosen,
        tuple(element_name(found, element) for element in chosen),
        layers,
        out_kind.kind,
        tuple(outputs),
        tuple(straight.unknown),
        strided,
        blame,
    )


def _is_exact(error: float | None) -> bool:
    return error is None or error <= _EXACT  # written so that a NaN is not


def _map_error(result: Tensor, expected: Tensor, margin: float | None, name: str) -> float | None:
    """The error of a map: of all of it, or inside of a margin, where something is to be seen."""
    if margin is None:
        return relative_error(result, expected, None, name)
    has_pixels = expected.ndim > 3 and expected.shape[2:].numel() > 1
    if has_pixels and _too_small(expected, margin):
        return None
    mask = disc_mask(expected, margin)
    if mask is not None and not bool((expected.double() * mask).any()):
        return None
    return relative_error(result, expected, mask, name)


def _too_small(x: Tensor, margin: float) -> bool:
    """Whether pixels of the disc come from outside of the map when it turns."""
    side = min(x.shape[2:])
    return side * (0.5 - _inner_margin(side, margin)) > (side - 1) / 2


def _blame(
    model: nn.Module,
    run: Any,
    images: Tensor,
    kind: str,
    group: Group,
    straight: Any,
    place: int,
    element: int,
) -> Blame:
    """Why the map at this place, or the output behind the last, fails at a symmetry of the grid."""
    before = straight.maps[place - 1].name if place else "the input"
    if place == len(straight.maps):
        modules, here = straight.rest, "the output"
    else:
        entry = straight.maps[place]
        modules, here = entry.before, entry.name
        there = transform(images, group, element, kind)
        read, turned = (
            trace_maps(model, run, x, kind, group, reader=entry.name).reading
            for x in (images, there)
        )
        if read is not None and turned is not None:
            expected = turn_map(read[0], read[1], group, element)
            if _is_exact(relative_error(turned[0], expected, None, entry.name)):
                module = _module_of(model, entry.name)
                return Blame((f"{entry.name} ({entry.type})",), _strided(module))
    if modules:
        named = [_module_of(model, name.rpartition(" (")[0]) for name in modules]
        return Blame(tuple(modules), all(_strided(module) for module in named))
    loses = place < len(straight.maps) and _loses_pixels(model, straight.maps, place)
    return Blame((), loses, (before, here))


def _module_of(model: nn.Module, name: str) -> nn.Module:
    return dict(model.named_modules()).get(name.partition(" (call")[0], model)


def angle_curve(
    model: nn.Module,
    images: Tensor,
    angles: Sequence[float] | None = None,
    group: GroupLike | None = None,
    margin: float = MARGIN,
    *,
    input_kind: str | None = None,
    output_kind: str | None = None,
) -> AngleCurve:
    """The error of the model's output over the angle of rotation, in degrees.

    Outputs that are images, vector fields or invariant are measured at any angle (every 5° by
    default), group feature maps at the angles of the group only. The error of maps is taken inside
    the same disc at all angles. Volumes turn about z, by default every 15°.

    Raises:
        ValueError: for images that cannot be turned, outputs that are not known to turn, and angles
            by which group features do not turn.

    >>> from econv import LiftConv2d
    >>> from econv.testing import smooth_field
    >>> model = nn.Sequential(LiftConv2d(1, 2, "p8"), GroupPool2d("p8")).double()
    >>> curve = angle_curve(model, smooth_field(33), angles=[0, 20, 45, 90])
    >>> [f"{error:.0e}" for error in curve.errors[:1]], curve.errors[2] < curve.errors[1]
    (['0e+00'], True)
    """
    found = find_group(model, group)
    _check_images(images, found, ())
    if len(set(images.shape[2:])) > 1:
        what = "square images" if found.dimension == 2 else "cubes"
        raise ValueError(f"expected {what} to turn; got {times(images.shape[2:])} pixels")
    kind = input_kind_of(model, input_kind)
    with _undisturbed(model, images.device) as run:
        straight = trace_maps(model, run, images, kind, found)
        field_type = output_kind_of(model, straight, output_kind)
        step = 360 / found.rotations
        if "regular" in (kind, field_type.kind) and found.dimension != 2:
            raise ValueError(
                "expected a model that returns no group features: those of volumes turn by "
                "elements of their group, and by no angle"
            )
        if "regular" in (kind, field_type.kind):
            if angles is None:
                angles = [step * k for k in range(found.rotations)]
            for angle in angles:
                if abs(angle / step - round(angle / step)) > 1e-9:
                    raise ValueError(
                        f"expected multiples of {step:.4g}°, the angles of {found}: group feature "
                        f"maps turn by no others; got {angle}°"
                    )
        elif angles is None:
            steps = 72 if found.dimension == 2 else 24
            angles = [360 / steps * k for k in range(steps)]
        scores = field_type.kind == "invariant" and straight.output.ndim == 2
        scores = scores and straight.output.shape[1] > 1
        errors: list[float | None] = []
        changed = []
        for angle in angles:
            if "regular" in (kind, field_type.kind):
                element = round(angle / step) % found.rotations
                result = run(transform(images, found, element, kind))
                expected = turn_map(straight.output, field_type, found, element)
            else:
                result = run(rotate_map(images, angle, kind))
                expected = rotate_map(straight.output, angle, field_type.kind)
            off_grid = None if field_type.kind == "invariant" else margin
            errors.append(_map_error(result, expected, off_grid, "the output"))
            if scores:
                other = result.argmax(1) != straight.output.argmax(1)
                changed.append(float(other.double().mean()))
    shares = tuple(changed) if scores else None
    degrees = tuple(float(a) for a in angles)
    return AngleCurve(field_type.kind, degrees, tuple(errors), found, shares)


def resolution_curve(
    module: nn.Module,
    element: int = 1,
    spacings: Sequence[float] = (0.5, 0.4, 0.3, 0.22),
    group: GroupLike | None = None,
    *,
    length: float = 6.0,
    functions: int = 16,
    seed: int = 0,
) -> ResolutionCurve:
    """The equivariance error of the same operators on ever finer grids, and its fitted order.

    Functions are sums of plane waves, known in closed form, whose wavelengths over 2π are at least
    ``length`` pixels of the layer's own grid. Each function and its turned copy are sampled around
    the one point that a turned grid shares with the grid; nothing is interpolated. ``spacings`` are
    in units of the layer's own; the coefficients β stay while the pixels shrink.

    For a PDO-eConv, or a `Sequential` of them with pointwise modules in between.

    Raises:
        ValueError: for a model that is not a chain of PDO-eConvs of stride 1 and pointwise modules,
            and an element that is a symmetry of the pixel grid.

    >>> from econv import LiftConv2d
    >>> curve = resolution_curve(LiftConv2d(1, 2, "p8", stencils="central"))
    >>> 1.8 < curve.order < 2.2
    True
    """
    found = group_of_layers(module, group)
    square = not any(isinstance(getattr(m, "spacing", 1.0), tuple) for m in module.modules())
    exact = [e for e in found.grid_symmetries if square or not found.matrices[e][0, 1]]
    if not 0 <= element < found.order or element in exact:
        raise ValueError(
            f"expected an element of {found} that is no symmetry of the pixel grid, where the "
            f"error is zero at every resolution; got {element}"
        )
    work = copy.deepcopy(module).double().eval()
    leaves = list(leaf_modules(work))
    convolutions = [leaf for leaf in leaves if isinstance(leaf, PDOConv2d)]
    for leaf in leaves:
        if not isinstance(leaf, (PDOConv2d, GroupBatchNorm2d, GroupPool2d, *ACTIVATIONS)):
            raise ValueError(
                "expected PDO-eConvs and pointwise modules, which mean the same at every "
                f"resolution; got {type(leaf).__name__}"
            )
    if not convolutions:
        raise ValueError(f"expected at least one PDO-eConv; {type(module).__name__} has none")
    own = convolutions[0].spacing
    if any(c.stride != 1 or c.spacing != own for c in convolutions):
        raise ValueError("expected convolutions of stride 1 and one spacing, which one grid serves")
    kind = str(convolutions[0].input_kind)
    if kind == "mixed":
        raise ValueError("expected an input of one kind; the first layer mixes images and vectors")
    order = found.order if kind == "regular" else 1
    fields = convolutions[0].in_channels // order
    size = 1 + sum(c.extent - 1 for c in convolutions)
    coefficients = [c.coefficients().detach() for c in convolutions]
    lengths = np.broadcast_to(own, 2)  # along y and x
    waves = _PlaneWaves(functions, fields * order, length * math.sqrt(lengths.prod()), seed)
    inner = convolutions[0].group.embed(found)[element]
    errors = []
    for spacing in spacings:
        for convolution, beta in zip(convolutions, coefficients, strict=True):
            convolution.padding = 0
            scaled = tuple((lengths * spacing).tolist())
            convolution.spacing = scaled if isinstance(own, tuple) else scaled[0]
            convolution.set_coefficients(beta)
        straight = waves.sample(size, lengths * spacing, np.eye(2))
        turned = waves.sample(size, lengths * spacing, found.matrices[element])
        turned = turn_channels(turned, kind, convolutions[0].group, int(inner))
        with torch.no_grad():
            trace = trace_maps(work, work, straight, kind, found)
            result = work(turned)
        if result.shape[-2:] != (1, 1):
            raise ValueError("expected a chain of layers, each of which reads the one before it")
        field_type = output_kind_of(work, trace, None)
        expected = turn_map(trace.output, field_type, found, element)
        errors.append(relative_error(result, expected, None, "the output"))
    return ResolutionCurve(
        element,
        element_name(found, element),
        tuple(float(h) for h in spacings),
        tuple(errors),
        convergence_order(errors, spacings),
    )


def operator_symbols(
    basis: FilterBasis, points: int = 65, smoothness: float = 1.5
) -> tuple[OperatorSymbol, ...]:
    """The frequency response of every operator's stencil, the ideal one, and their distance.

    Errors weigh frequencies by the spectrum of images of the given ``smoothness`` in pixels.

    Raises:
        ValueError: for unknown operators or stencils, and an aspect of another dimension.

    >>> from econv import filter_basis
    >>> central = operator_symbols(filter_basis("p8", stencils="central"))
    >>> isotropic = operator_symbols(filter_basis("p8", stencils="isotropic"))
    >>> central[3].name, isotropic[3].turning_error < central[3].turning_error
    ('∂xx', True)
    """
    limit = math.pi / max(sides(2, basis.aspect))
    line = np.linspace(-limit, limit, points)
    kappa = np.stack(np.broadcast_arrays(line[None, :], line[:, None]))
    weight = np.exp(-(smoothness**2) * (kappa**2).sum(axis=0))
    # Turned beyond the square of frequencies, a response would repeat itself.
    weight = weight * ((kappa**2).sum(axis=0) <= limit**2)

    def distance(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
        error = (weight * np.abs(one - other) ** 2).sum() / (weight * np.abs(other) ** 2).sum()
        return float(np.sqrt(error))

    symbols = []
    for place, polynomial in enumerate(basis.operators.polynomials):
        found = _response(basis.turned[0, place], kappa, basis.aspect)
        ideal = np.zeros_like(found)
        for exponents, coefficient in polynomial.terms:
            waves = [(1j * kappa[axis]) ** exponent for axis, exponent in enumerate(exponents)]
            ideal = ideal + coefficient * math.prod(waves, start=np.ones_like(found))
        # r(A⁻¹x) moves frequency κ to Aκ, where the operator in frame A must do what it did at κ.
        turning = 0.0
        for element, matrix in enumerate(basis.group.matrices):
            moved = np.tensordot(matrix, kappa, axes=1)
            there = _response(basis.turned[element, place], moved, basis.aspect)
            turning = max(turning, distance(there, found))
        symbols.append(
            OperatorSymbol(str(polynomial), line, found, ideal, distance(found, ideal), turning)
        )
    return tuple(symbols)


def error_sources(
    model: nn.Module,
    images: Tensor,
    element: int = 1,
    group: GroupLike | None = None,
    margin: float = MARGIN,
    *,
    input_kind: str | None = None,
) -> ErrorSources:
    """How much sampling, padding and stencils each contribute to the error of the last map.

    - ``sampling``: what remains at quarter turns and flips, where stencils and padding are exact.
      Strided layers keep samples that lie off the centre of the image by some vector c; π moves
      them by c − Ac, and the squared error grows with the square of that. At other angles the share
      is therefore an estimate, extrapolated from quarter turns and flips.
    - ``broken``: the same where what fails there first has no stride: it is not equivariant.
      At other angles an estimate too, the mean over quarter turns and flips.
    - ``padding``: what the error in the whole inscribed disc exceeds that of the interior disc by.
    - ``stencil``: the rest of the interior's error: stencils, and the aliasing of sharp maps.

    Raises:
        ValueError: for images that cannot be turned, and a model without a map that is known to
            turn with them.

    >>> from econv import LiftConv2d
    >>> from econv.testing import smooth_field
    >>> model = nn.Sequential(LiftConv2d(1, 4, "p8", stride=2)).double()
    >>> error_sources(model, smooth_field(48)).sampling > 0.1  # off the centre
    True
    >>> error_sources(model, smooth_field(49)).sampling < 1e-9
    True
    """
    found = find_group(model, group)
    chosen = _elements(found, [element])
    exact = [e for e in found.grid_symmetries if e != 0]
    if found.dimension == 3:
        exact = [*found.grid_generators]
    _check_images(images, found, (*chosen, *exact))
    kind = input_kind_of(model, input_kind)
    with _undisturbed(model, images.device) as run:
        straight = trace_maps(model, run, images, kind, found)
        places = [
            i
            for i, entry in enumerate(straight.maps)
            if entry.has_pixels and (element in exact or not _too_small(entry.value, margin))
        ]
        if not places:
            raise ValueError(
                "expected a model with at least one map that is known to turn with the image and "
                "has pixels enough for it; "
                "what its layers do to it is unknown: " + (", ".join(straight.unknown) or "none")
            )
        last = straight.maps[places[-1]]

        first_inexact, failing = len(straight.maps), element

        def squares(which: int, margin: float) -> tuple[float, float]:
            nonlocal first_inexact, failing
            turned = trace_maps(model, run, transform(images, found, which, kind), kind, found)
            if which in exact:
                pairs = zip(straight.maps[:first_inexact], turned.maps, strict=False)
                for place, (before, after) in enumerate(pairs):
                    wanted = turn_map(before.value, before.field_type, found, which)
                    if not _is_exact(relative_error(after.value, wanted, None, before.name)):
                        first_inexact, failing = place, which
                        break
            expected = turn_map(last.value, last.field_type, found, which).double()
            result = turned.maps[places[-1]].value.double()
            _same_shape(result, expected, last.name)
            mask = _disc_of(expected, margin)
            difference = (result - expected) * mask
            return float(difference.square().sum()), float((expected * mask).square().sum())

        whole, whole_norm = squares(element, 0.0)
        inner, inner_norm = squares(element, margin)
        on_grid = [(e, *squares(e, margin)) for e in exact]
        there = turn_map(last.value.double(), last.field_type, found, element)
        back = turn_map(there, last.field_type, found, int(found.inverse[element]))
        mask = _disc_of(back, margin)
        comparison = relative_error(back, last.value.double(), mask, last.name) / math.sqrt(2)
        broken_layer = None
        if first_inexact <= places[-1]:
            blame = _blame(model, run, images, kind, found, straight, first_inexact, failing)
            broken_layer = None if blame.strided else str(blame)
    if not (inner_norm > 0 and math.isfinite(whole) and math.isfinite(whole_norm)):
        raise ValueError(f"expected a map after {last.name} that is finite and not zero")
    interior = inner / inner_norm
    total = max(whole / whole_norm, interior)
    grid = max((error / norm for _, error, norm in on_grid), default=0.0)
    at_fault = 0.0
    if element in exact:
        at_fault = interior = total  # stencils and padding are exact
    elif broken_layer is not None:
        at_fault = min(interior, sum(error / norm for _, error, norm in on_grid) / len(on_grid))
    elif on_grid:
        offset = sum(_displacement(found, e) for e, _, _ in on_grid)
        per_offset = sum(error / norm for _, error, norm in on_grid) / offset
        at_fault = min(interior, per_offset * _displacement(found, element))
    sampling, broken = (at_fault, 0.0) if broken_layer is None else (0.0, at_fault)
    shares: tuple[float, ...] = (sampling, total - interior, interior - at_fault, broken)
    error = math.sqrt(whole / whole_norm)
    result = ErrorSources(
        last.name,
        element,
        element_name(found, element),
        error,
        math.sqrt(inner / inner_norm),
        math.sqrt(grid) if exact else None,
        comparison,
        *(0.0, 0.0, 0.0, 0.0),
        broken_layer,
    )
    if result.exact:
        return result
    sampled, padded, rest, broken = (share / total for share in shares)
    return dataclasses.replace(
        result, sampling=sampled, padding=padded, stencil=rest, broken=broken
    )


def telling_elements(group: GroupLike) -> tuple[int, ...]:
    """The elements that a table is made for by default: in the plane all but the identity.

    In space those that generate the symmetries of the grid, and one of each kind of the others.

    >>> [Group("I").element_name(element) for element in telling_elements("I")][2:4]
    ['120° about (1, 1, 1)', '72° about (0, 0.618, 1)']
    """
    found = Group(group)
    if found.dimension == 2:
        return tuple(range(1, found.order))
    chosen = list(found.grid_generators)
    seen = set()
    for element in range(found.order):
        kind = (round(float(np.trace(found.matrices[element])), 6), element >= found.rotations)
        if element not in found.grid_symmetries and kind not in seen:
            seen.add(kind)
            chosen.append(element)
    return tuple(chosen)


def _elements(group: Group, elements: Iterable[int] | None) -> tuple[int, ...]:
    chosen = telling_elements(group) if elements is None else tuple(elements)
    if not chosen or not all(0 <= element < group.order for element in chosen):
        raise ValueError(
            f"expected elements of {group} from 0 to {group.order - 1}; got {list(chosen)}"
        )
    return chosen


def _check_images(images: Tensor, group: Group, elements: Iterable[int]) -> None:
    rank = group.dimension + 2
    if not isinstance(images, Tensor) or images.ndim != rank or not images.is_floating_point():
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        what = "images" if group.dimension == 2 else "volumes"
        raise ValueError(f"expected {what} as a float tensor {MAPS[group.dimension]}; got {found}")
    lengths = images.shape[:1:-1]  # along x, y and z
    for element in elements:
        swaps = np.argwhere(group.matrices[element])
        unequal = any(lengths[i] != lengths[j] for i, j in swaps)
        if element in group.grid_symmetries and unequal:
            whole = "square images" if group.dimension == 2 else "volumes with equal sides"
            raise ValueError(
                f"expected {whole} for the quarter turns of {group}, which swap the sides; "
                f"got {times(images.shape[2:])} pixels"
            )


def _output_error(
    straight: Tensor,
    turned: Tensor,
    field_type: FieldType,
    group: Group,
    element: int,
    margin: float,
) -> OutputError:
    expected = turn_map(straight, field_type, group, element)
    mask, off_grid = None, None
    if field_type.kind != "invariant" and element not in group.grid_symmetries:
        mask, off_grid = disc_mask(expected, margin), margin
    relative = _map_error(turned, expected, off_grid, "the output")
    difference = (turned.double() - expected.double()).abs()
    agreement = None
    if field_type.kind == "invariant" and turned.ndim == 2 and turned.shape[1] > 1:
        agreement = float((turned.argmax(1) == expected.argmax(1)).double().mean())
    largest = float((difference if mask is None else difference * mask).max())
    return OutputError(element, largest, relative, agreement)


def disc_mask(x: Tensor, margin: float) -> Tensor | None:
    has_pixels = x.ndim > 3 and min(x.shape[2:]) > 1
    return _disc_of(x, margin) if has_pixels else None


def _disc_of(x: Tensor, margin: float) -> Tensor:
    sides = tuple(x.shape[2:])
    return _ball(sides, _inner_margin(min(sides), margin), (1.0,) * len(sides)).to(x.device)


def _inner_margin(side: int, margin: float) -> float:
    """On maps of a few pixels an empty disc would measure nothing."""
    return min(margin, 0.5 - 0.75 / side)


def relative_error(result: Tensor, expected: Tensor, mask: Tensor | None, name: str) -> float:
    _same_shape(result, expected, name)
    difference, size = (result.double() - expected.double()), expected.double()
    if mask is not None:
        difference, size = difference * mask, size * mask
    error, norm = float(difference.norm()), float(size.norm())
    if norm == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / norm


def _same_shape(result: Tensor, expected: Tensor, name: str) -> None:
    if result.shape != expected.shape:
        raise ValueError(
            f"{name}: the map of the turned input has shape {tuple(result.shape)}, the turned map "
            f"{tuple(expected.shape)}: expected the same"
        )


def _displacement(group: Group, element: int) -> float:
    """|c − Ac|² for samples that lie off the centre along the diagonal, as strides leave them."""
    offset = np.array([-1.0, 1.0, -1.0])[: group.dimension] / math.sqrt(group.dimension)
    return float(((offset - group.matrices[element] @ offset) ** 2).sum())


def _loses_pixels(model: nn.Module, maps: Sequence[Map], place: int) -> bool:
    """Whether a layer has a stride, or a function before it keeps only some of the pixels."""
    if _strided(_module_of(model, maps[place].name)):
        return True
    before = next((m for m in reversed(maps[:place]) if m.has_pixels), None)
    return before is not None and maps[place].value.shape[-1] <= 0.6 * before.value.shape[-1]


def _strided(module: nn.Module) -> bool:
    stride = getattr(module, "stride", 1)
    largest = max(stride) if isinstance(stride, tuple | list) else stride
    return isinstance(largest, int) and largest > 1


class _PlaneWaves:
    """Random sums of plane waves, one for each function (batch) and channel."""

    count = 6

    def __init__(self, functions: int, channels: int, length: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        shape = (functions, channels, self.count, 1, 1)
        number = random.uniform(0.3, 1.0, shape) / length
        angle = random.uniform(0.0, 2 * np.pi, shape)
        self.wave_x, self.wave_y = number * np.cos(angle), number * np.sin(angle)
        self.phase = random.uniform(0.0, 2 * np.pi, shape)

    def sample(self, size: int, spacing: FloatArray, matrix: FloatArray) -> Tensor:
        """f(A⁻¹x) on a grid around the origin, of spacings along (y, x)."""
        right, up = (h * axis for h, axis in zip(spacing[::-1], coordinates(size, 2), strict=True))
        x = matrix[0, 0] * right + matrix[1, 0] * up
        y = matrix[0, 1] * right + matrix[1, 1] * up
        waves = np.cos(self.wave_x * x + self.wave_y * y + self.phase)
        return torch.from_numpy(waves.sum(axis=2) / math.sqrt(self.count))


def _response(weights: FloatArray, kappa: FloatArray, aspect: Aspect) -> npt.NDArray[np.complex128]:
    """Σ w(x) e^{iκ·x} at every frequency κ, ``[2, …]``."""
    x, y = coordinates(weights.shape[-1], 2, aspect)
    phase = np.multiply.outer(kappa[0], x) + np.multiply.outer(kappa[1], y)
    return (weights * np.exp(1j * phase)).sum(axis=(-2, -1))
