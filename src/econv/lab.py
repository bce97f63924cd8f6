"""The laboratory: is a model equivariant, where does the error come from, does training keep it?

Functions that return numbers, as frozen records with ``to_dict``. They know models, images and the
checkers of `testing`; they draw nothing and write no files.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from econv.basis import FilterBasis
from econv.groups import FloatArray, Group, GroupLike
from econv.layers import (
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupPool2d,
    PDOConv2d,
    Restrict2d,
    Upsample2d,
)
from econv.stencils import coordinates
from econv.testing import _disc, _undisturbed, convergence_order, rotate, transform

__all__ = [
    "AngleCurve",
    "ErrorSources",
    "LayerError",
    "LayerErrors",
    "OperatorSymbol",
    "OutputError",
    "ResolutionCurve",
    "angle_curve",
    "calibrate",
    "element_name",
    "error_sources",
    "find_group",
    "layer_errors",
    "load_images",
    "operator_symbols",
    "plain_twin",
    "resolution_curve",
    "windowed",
]

MARGIN = 3 / 16
"""Fraction of the side before the border that interior errors leave out."""

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".npy", ".npz")


class _Record:
    """A frozen dataclass that knows how to become JSON."""

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain lists, strings and floats."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, _Record):
        return value.to_dict()
    if isinstance(value, Group):
        return value.name
    if isinstance(value, np.ndarray):
        if np.iscomplexobj(value):
            return {"real": value.real.tolist(), "imag": value.imag.tolist()}
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value


@dataclass(frozen=True)
class LayerError(_Record):
    """How far the map after one layer is from turning with the input."""

    name: str
    type: str
    kind: str
    order: int
    """How many channels turn together: the group's elements, the components of a vector, or 1."""
    shape: tuple[int, ...]
    errors: tuple[float, ...]
    """‖f(πx) − πf(x)‖ / ‖πf(x)‖ for each element."""


@dataclass(frozen=True)
class OutputError(_Record):
    """How far the output for one turned input is from the turned output."""

    element: int
    absolute: float
    """The largest difference of any number."""
    relative: float
    """‖f(πx) − πf(x)‖ / ‖πf(x)‖."""
    agreement: float | None
    """For scores: the share of images whose predicted class stays the same."""


@dataclass(frozen=True)
class LayerErrors(_Record):
    """The table of :func:`layer_errors`."""

    group: Group
    elements: tuple[int, ...]
    names: tuple[str, ...]
    """The elements in words, such as ``45°``."""
    layers: tuple[LayerError, ...]
    output_kind: str
    output: tuple[OutputError, ...]
    unknown: tuple[str, ...]
    """Modules whose maps were not compared, because how they turn is not known."""
    strided: tuple[str, ...]
    """Layers that keep only some of the pixels: on some sizes their samples lie off the centre."""

    def first_inexact(self, tolerance: float = 1e-4) -> str | None:
        """The first layer that fails at a quarter turn or flip, where every layer can be exact."""
        places = [
            i for i, element in enumerate(self.elements) if element in self.group.grid_symmetries
        ]
        for layer in self.layers:
            # Written so that a NaN fails.
            if not all(layer.errors[i] <= tolerance for i in places):
                return layer.name
        return None


@dataclass(frozen=True)
class AngleCurve(_Record):
    """Error over the angle of rotation."""

    kind: str
    angles: tuple[float, ...]
    errors: tuple[float, ...]
    group: Group | None
    """The group of the model; its own angles are those that the layers are made for."""


@dataclass(frozen=True)
class ResolutionCurve(_Record):
    """Error over the length of a pixel, and the order with which it vanishes."""

    element: int
    angle: str
    spacings: tuple[float, ...]
    errors: tuple[float, ...]
    order: float


@dataclass(frozen=True, eq=False)
class OperatorSymbol(_Record):
    """The frequency response of one operator's stencil beside the ideal one."""

    name: str
    frequencies: FloatArray
    """Radians per pixel along each axis, from −π to π."""
    stencil: npt.NDArray[np.complex128]
    """Response ``[y, x]``, y upwards with the index."""
    ideal: npt.NDArray[np.complex128]
    error: float
    """Relative L2 distance to the ideal, for images with the given smoothness."""
    turning_error: float
    """Relative L2 distance between the response and that of the turned stencils, turned back."""


@dataclass(frozen=True)
class ErrorSources(_Record):
    """Where the error of the last map comes from; the shares are of the squared error."""

    layer: str
    element: int
    angle: str
    error: float
    """Relative error in the whole inscribed disc."""
    interior: float
    """Relative error in the interior disc, where padding plays no role."""
    grid: float | None
    """Relative error at quarter turns and flips; none if the group has none."""
    comparison: float
    """What turning the map there and back changes: sharp maps cannot be compared more finely."""
    sampling: float
    padding: float
    stencil: float


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
    the side before the border.

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
    kind = _input_kind(model, input_kind)
    with _undisturbed(model, images.device) as run:
        straight = _trace(model, run, images, kind, found)
        out_kind = _output_kind(model, straight, output_kind)
        errors: list[list[float]] = [[] for _ in straight.maps]
        outputs = []
        for element in chosen:
            turned = _trace(model, run, transform(images, found, element, kind), kind, found)
            exact = element in found.grid_symmetries
            for row, before, after in zip(errors, straight.maps, turned.maps, strict=True):
                expected = _turned(before.value, before.flow, found, element)
                mask = None if exact else _mask(expected, margin)
                row.append(_relative(after.value, expected, mask, before.name))
            outputs.append(
                _output_error(straight.output, turned.output, out_kind, found, element, margin)
            )
    layers = tuple(
        LayerError(
            entry.name,
            entry.type,
            entry.flow.kind,
            _together(entry.flow, found),
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
    )


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
    the same disc at all angles.

    >>> from econv import LiftConv2d
    >>> from econv.testing import smooth_field
    >>> model = nn.Sequential(LiftConv2d(1, 2, "p8"), GroupPool2d("p8")).double()
    >>> curve = angle_curve(model, smooth_field(33), angles=[0, 20, 45, 90])
    >>> [f"{error:.0e}" for error in curve.errors[:1]], curve.errors[2] < curve.errors[1]
    (['0e+00'], True)
    """
    found = find_group(model, group)
    _check_images(images, found, ())
    if images.shape[-1] != images.shape[-2]:
        raise ValueError(f"expected square images to turn; got {tuple(images.shape[-2:])} pixels")
    kind = _input_kind(model, input_kind)
    with _undisturbed(model, images.device) as run:
        straight = _trace(model, run, images, kind, found)
        flow = _output_kind(model, straight, output_kind)
        step = 360 / found.rotations
        if "regular" in (kind, flow.kind):
            if angles is None:
                angles = [step * k for k in range(found.rotations)]
            for angle in angles:
                if abs(angle / step - round(angle / step)) > 1e-9:
                    raise ValueError(
                        f"expected multiples of {step:.4g}°, the angles of {found}: group feature "
                        f"maps turn by no others; got {angle}°"
                    )
        elif angles is None:
            angles = [5.0 * k for k in range(72)]
        errors = []
        for angle in angles:
            if "regular" in (kind, flow.kind):
                element = round(angle / step) % found.rotations
                result = run(transform(images, found, element, kind))
                expected = _turned(straight.output, flow, found, element)
            else:
                result = run(_rotated(images, angle, kind))
                expected = _rotated(straight.output, angle, flow.kind)
            mask = None if flow.kind == "invariant" else _mask(expected, margin)
            errors.append(_relative(result, expected, mask, "the output"))
    return AngleCurve(flow.kind, tuple(float(a) for a in angles), tuple(errors), found)


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

    >>> from econv import LiftConv2d
    >>> curve = resolution_curve(LiftConv2d(1, 2, "p8", stencils="central"))
    >>> 1.8 < curve.order < 2.2
    True
    """
    found = find_group(module, group)
    if not 0 <= element < found.order or element in found.grid_symmetries:
        raise ValueError(
            f"expected an element of {found} that is no symmetry of the pixel grid, where the "
            f"error is zero at every resolution; got {element}"
        )
    work = copy.deepcopy(module).double().eval()
    leaves = list(_leaves(work))
    convolutions = [leaf for leaf in leaves if isinstance(leaf, PDOConv2d)]
    for leaf in leaves:
        if not isinstance(leaf, (PDOConv2d, GroupBatchNorm2d, GroupPool2d, *_ACTIVATIONS)):
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
    waves = _PlaneWaves(functions, fields * order, length * own, seed)
    inner = convolutions[0].group.embed(found)[element]
    errors = []
    for spacing in spacings:
        for convolution, beta in zip(convolutions, coefficients, strict=True):
            convolution.padding = 0
            convolution.spacing = own * spacing
            convolution.set_coefficients(beta)
        straight = waves.sample(size, own * spacing, np.eye(2))
        turned = waves.sample(size, own * spacing, found.matrices[element])
        turned = _turn_channels(turned, kind, convolutions[0].group, int(inner))
        with torch.no_grad():
            trace = _trace(work, work, straight, kind, found)
            result = work(turned)
        if result.shape[-2:] != (1, 1):
            raise ValueError("expected a chain of layers, each of which reads the one before it")
        flow = _output_kind(work, trace, None)
        expected = _turned(trace.output, flow, found, element)
        errors.append(_relative(result, expected, None, "the output"))
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

    >>> from econv import filter_basis
    >>> central = operator_symbols(filter_basis("p8", stencils="central"))
    >>> isotropic = operator_symbols(filter_basis("p8", stencils="isotropic"))
    >>> central[3].name, isotropic[3].turning_error < central[3].turning_error
    ('∂xx', True)
    """
    line = np.linspace(-math.pi, math.pi, points)
    kappa = np.stack(np.broadcast_arrays(line[None, :], line[:, None]))
    weight = np.exp(-(smoothness**2) * (kappa**2).sum(axis=0))
    # Turned beyond the square of frequencies, a response would repeat itself.
    weight = weight * ((kappa**2).sum(axis=0) <= math.pi**2)

    def distance(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
        error = (weight * np.abs(one - other) ** 2).sum() / (weight * np.abs(other) ** 2).sum()
        return float(np.sqrt(error))

    symbols = []
    for place, polynomial in enumerate(basis.operators.polynomials):
        exponents = basis.operators.monomials[place]
        found = _response(basis.turned[0, place], kappa)
        ideal = np.ones_like(found)
        for axis, exponent in enumerate(exponents):
            ideal = ideal * (1j * kappa[axis]) ** exponent
        # r(A⁻¹x) moves frequency κ to Aκ, where the operator in frame A must do what it did at κ.
        turning = max(
            distance(
                _response(basis.turned[element, place], np.tensordot(matrix, kappa, axes=1)), found
            )
            for element, matrix in enumerate(basis.group.matrices)
        )
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
      them by c − Ac, and the squared error grows with the square of that. A layer that is not
      equivariant at all shows up here too: :meth:`LayerErrors.first_inexact` names it.
    - ``padding``: what the error in the whole inscribed disc exceeds that of the interior disc by.
    - ``stencil``: the rest of the interior's error: stencils, and the aliasing of sharp maps.

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
    _check_images(images, found, (*chosen, *exact))
    kind = _input_kind(model, input_kind)
    with _undisturbed(model, images.device) as run:
        straight = _trace(model, run, images, kind, found)
        places = [i for i, entry in enumerate(straight.maps) if entry.has_pixels]
        if not places:
            raise ValueError(
                "expected a model with at least one map that is known to turn with the image; "
                "what its layers do to it is unknown: " + (", ".join(straight.unknown) or "none")
            )
        last = straight.maps[places[-1]]

        def squares(which: int, margin: float) -> tuple[float, float]:
            turned = _trace(model, run, transform(images, found, which, kind), kind, found)
            expected = _turned(last.value, last.flow, found, which).double()
            result = turned.maps[places[-1]].value.double()
            _same_shape(result, expected, last.name)
            mask = _disc_of(expected, margin)
            difference = (result - expected) * mask
            return float(difference.square().sum()), float((expected * mask).square().sum())

        whole, whole_norm = squares(element, 0.0)
        inner, inner_norm = squares(element, margin)
        on_grid = [(e, *squares(e, margin)) for e in exact]
        there = _turned(last.value.double(), last.flow, found, element)
        back = _turned(there, last.flow, found, int(found.inverse[element]))
        mask = _disc_of(back, margin)
        comparison = _relative(back, last.value.double(), mask, last.name) / math.sqrt(2)
    if not (inner_norm > 0 and math.isfinite(whole) and math.isfinite(whole_norm)):
        raise ValueError(f"expected a map after {last.name} that is finite and not zero")
    interior = inner / inner_norm
    total = max(whole / whole_norm, interior)
    grid = max((error / norm for _, error, norm in on_grid), default=0.0)
    offset = sum(_displacement(found, e) for e, _, _ in on_grid)
    sampling = 0.0
    if offset > 0:
        per_offset = sum(error / norm for _, error, norm in on_grid) / offset
        sampling = min(interior, per_offset * _displacement(found, element))
    shares = (sampling, total - interior, interior - sampling)
    sampled, padded, rest = (share / total if total > 0 else 0.0 for share in shares)
    return ErrorSources(
        last.name,
        element,
        element_name(found, element),
        math.sqrt(whole / whole_norm),
        math.sqrt(interior),
        math.sqrt(grid) if exact else None,
        comparison,
        sampled,
        padded,
        rest,
    )


def plain_twin(model: nn.Module, seed: int = 0) -> nn.Module:
    """A CNN of the same architecture: a copy with ordinary convolutions and norms, drawn anew.

    PDO-eConvs become `Conv2d` of equal channels, support, stride, padding, dilation and groups, and
    norms per field become norms per channel. Pooling over orientations stays, as a maxout over
    channels, and so does everything else, such as the classifier with its weights.

    >>> from econv import LiftConv2d
    >>> twin = plain_twin(nn.Sequential(LiftConv2d(1, 2, "p4"), GroupBatchNorm2d(2, "p4")))
    >>> twin[0], twin[1].num_features
    (Conv2d(1, 8, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2), bias=False), 8)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _twin(copy.deepcopy(model))


def calibrate(model: nn.Module, images: Tensor) -> nn.Module:
    """Set the running statistics of every batch norm to those of these images.

    An untrained network in eval mode otherwise applies statistics that it has never seen.
    Returns the model, in eval mode.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    model.eval()
    kept = [(norm, norm.momentum) for norm in norms if norm.track_running_stats]
    for norm, _ in kept:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        with torch.no_grad():
            model(images)
    finally:
        for norm, momentum in kept:
            norm.momentum = momentum
            norm.eval()
    return model


def windowed(images: Tensor, start: float = 0.7) -> Tensor:
    """The images with everything outside of the inscribed disc faded to zero.

    Turning such an image loses no corner, so that what remains is the error of the model. The fade
    begins at the fraction ``start`` of the disc's radius.

    >>> windowed(torch.ones(1, 1, 9, 9))[0, 0, 0, 0].item()
    0.0
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    radius = torch.sqrt(rows[:, None] ** 2 + columns**2) / (min(height, width) / 2)
    fade = torch.clamp((radius - start) / (1 - start), 0, 1)
    # The polynomial from 0 to 1 with four derivatives that vanish at both ends: a kink in any of
    # them would be seen by the stencils.
    rise = fade**5 * (126 - fade * (420 - fade * (540 - fade * (315 - fade * 70))))
    return images * (1 - rise).to(images)


def load_images(
    source: str | Path | Sequence[str | Path] | npt.NDArray[Any] | Tensor,
    channels: int | None = None,
    *,
    square: bool = False,
    limit: int | None = None,
) -> Tensor:
    """Images as a float tensor ``[n, channels, height, width]``; bytes become 0 … 1.

    Args:
        source: a file (picture, ``.npy`` or ``.npz``), several files, a folder of them, an array or
            a tensor. Arrays may be ``[h, w]``, ``[h, w, c]``, ``[c, h, w]``, ``[n, h, w]``,
            ``[n, c, h, w]`` or ``[n, h, w, c]``; channels are looked for among 1 to 4.
        channels: how many the model reads; any number by default.
        square: whether quarter turns will be asked for.
        limit: take the first so many only.

    >>> load_images(np.zeros((28, 28), dtype=np.uint8)).shape
    torch.Size([1, 1, 28, 28])
    """
    if isinstance(source, Tensor | np.ndarray):
        named = [("the array", _as_images(source, "the array"))]
    else:
        paths = [Path(source)] if isinstance(source, str | Path) else [Path(p) for p in source]
        named = [(str(p), _read_images(p)) for p in _image_paths(paths, limit)]
    first, rest = named[0], named[1:]
    for name, found in rest:
        if found.shape[1:] != first[1].shape[1:]:
            raise ValueError(
                f"expected images of one size: {first[0]} has "
                f"{_size_text(first[1])}, {name} has {_size_text(found)}"
            )
    images = torch.cat([found for _, found in named])[:limit]
    if images.numel() == 0:
        raise ValueError(f"expected at least one image; {first[0]} has none")
    if channels is not None and images.shape[1] != channels:
        raise ValueError(
            f"expected images of {channels} channel{'s' * (channels != 1)}, which the model reads; "
            f"{first[0]} has {images.shape[1]}"
        )
    if square and images.shape[-1] != images.shape[-2]:
        raise ValueError(
            f"expected square images, which quarter turns map onto themselves; {first[0]} has "
            f"{images.shape[-2]}×{images.shape[-1]} pixels"
        )
    if not bool(torch.isfinite(images).all()):
        raise ValueError(f"expected finite numbers; {first[0]} has NaN or infinity")
    return images


# How maps turn, as far as it is known


@dataclass(frozen=True)
class _Flow:
    kind: str
    group: Group | None = None


@dataclass(frozen=True)
class _Map:
    name: str
    type: str
    flow: _Flow
    value: Tensor

    @property
    def has_pixels(self) -> bool:
        return self.value.ndim == 4 and min(self.value.shape[-2:]) > 1


@dataclass(frozen=True)
class _Trace:
    output: Tensor
    output_flow: _Flow | None
    maps: list[_Map]
    unknown: list[str]


_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
)
# They map channel to channel, each perhaps with numbers of its own, and so hand on what a channel
# is meant to be; whether they treat channels as equivariance needs is what the error shows.
_CHANNELWISE: tuple[type[nn.Module], ...] = (
    *_ACTIVATIONS,
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
    Downsample2d,
    Upsample2d,
)
_LINEAR: tuple[type[nn.Module], ...] = (nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.Identity, Upsample2d)
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
        self.known: dict[int, tuple[Tensor, _Flow]] = {}

    def flow(self, tensor: object) -> _Flow | None:
        entry = self.known.get(id(tensor))
        return entry[1] if entry else None

    def set(self, tensor: Tensor, flow: _Flow | None) -> None:
        if flow is None:
            self.known.pop(id(tensor), None)
            return
        if flow.kind == "scalar" and (tensor.ndim != 4 or tensor.shape[-2:] == (1, 1)):
            flow = _Flow("invariant")  # no pixels are left that could turn
        self.known[id(tensor)] = tensor, flow

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.set(result, self._follow(func, args, kwargs or {}, result))
        return result

    def _follow(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
    ) -> _Flow | None:
        name = getattr(func, "__name__", "").strip("_")
        along = None
        if name == "cat":
            along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            args = args[0] if args else kwargs["tensors"]
        maps = [a for a in args if isinstance(a, Tensor) and a.ndim > 1]
        flows = {self.flow(a) for a in maps}
        if len(flows) != 1:
            return None
        flow = flows.pop()
        if flow is None or flow.kind == "invariant":
            return flow
        x = maps[0]
        if name in _COPIES or (name in _SUMS and len(maps) == 2):
            return flow
        if flow.kind == "vector":  # what acts on components one by one does not turn
            return None
        if name in _POINTWISE or name in _SUMS:
            return flow
        if along in (1, 1 - result.ndim):
            return flow
        if name in _REDUCTIONS and x.ndim == 4:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(dims, tuple | list) and {d % 4 for d in dims} == {2, 3}:
                return flow
        if name in _RESHAPES and x.shape[2:].numel() == 1 and result.shape[:2] == x.shape[:2]:
            return flow
        return None


def _trace(
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
    follow.set(x, _Flow(kind, Group(first) if kind == "regular" else None))
    maps: list[_Map] = []
    unknown: list[str] = []
    seen: dict[str, int] = {}
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        says = getattr(module, "output_kind", None)
        leaf = next(module.children(), None) is None
        if not (leaf or says) or isinstance(module, nn.Identity):
            return
        if not leaf and (module is model or follow.flow(output) is not None):
            return  # its last layer has been seen
        if isinstance(module, nn.Dropout | nn.Dropout2d | GroupDropout2d) and not module.training:
            if isinstance(output, Tensor) and inputs:
                follow.set(output, follow.flow(inputs[0]))
            return
        name = names[module]
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name = f"{name} (call {seen[name]})"
        flow = None
        if isinstance(output, Tensor):
            flow = _after(module, follow.flow(inputs[0]) if inputs else None, inputs, output)
            follow.set(output, flow)
            flow = follow.flow(output)
        if flow is None:
            unknown.append(f"{name} ({type(module).__name__})")
        else:
            # A copy: what follows may work in place.
            maps.append(_Map(name, type(module).__name__, flow, output.detach().clone()))

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        with follow, torch.no_grad():
            output = run(x)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(output, Tensor):
        raise ValueError(f"expected a model that returns one tensor; got {type(output).__name__}")
    return _Trace(output, follow.flow(output), maps, unknown)


def _after(
    module: nn.Module, before: _Flow | None, inputs: tuple[Any, ...], output: Tensor
) -> _Flow | None:
    """How the output of a module turns, or nothing where that is not known."""
    says = getattr(module, "output_kind", None)
    # What treats every channel alike hands on whatever comes, also where it names one kind.
    if isinstance(says, str) and not isinstance(module, _CHANNELWISE):
        group = getattr(module, "subgroup", None) or getattr(module, "group", None)
        group = Group(group) if group is not None else (before.group if before else None)
        return _Flow(says, group if says in ("regular", "vector") else None)
    if before is None or before.kind == "invariant":
        return before
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


def _turned(x: Tensor, flow: _Flow, group: Group, element: int) -> Tensor:
    """π of one element of the checked group, on a map whose own group may be larger."""
    if flow.kind == "invariant":
        return x
    own = flow.group or group
    inner = int(own.embed(group)[element])
    if x.ndim == 4 and x.shape[-2:] != (1, 1):
        return transform(x, own, inner, flow.kind)
    return _turn_channels(x, flow.kind, own, inner)


def _together(flow: _Flow, group: Group) -> int:
    if flow.kind == "regular":
        return (flow.group or group).order
    return 2 if flow.kind == "vector" else 1


def _turn_channels(x: Tensor, kind: str, group: Group, element: int) -> Tensor:
    """What π does to the channels, leaving pixels where they are."""
    if kind == "regular":
        places = group.relative[element].tolist()
        return x.unflatten(1, (-1, group.order))[:, :, places].flatten(1, 2)
    if kind == "vector":
        matrix = torch.tensor(group.matrices[element], dtype=x.dtype, device=x.device)
        return torch.einsum("dc,bvc...->bvd...", matrix, x.unflatten(1, (-1, 2))).flatten(1, 2)
    return x


def _rotated(x: Tensor, degrees: float, kind: str) -> Tensor:
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


def _output_kind(model: nn.Module, trace: _Trace, given: str | None) -> _Flow:
    """How the output turns: what was given, what the model says, or what followed from its making.

    Scores have no pixels that could turn: they are compared as invariant unless known otherwise.
    """
    known = trace.output_flow
    says = given or (getattr(model, "output_kind", None) if _is_custom(model) else None)
    if says is not None:
        if says not in ("scalar", "regular", "vector", "invariant"):
            raise ValueError(f"cannot check an output of kind {says!r}")
        group = known.group if known else getattr(model, "group", None)
        return _Flow(str(says), Group(group) if group is not None else None)
    if known is not None:
        return known
    if trace.output.ndim == 2:
        return _Flow("invariant")
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


def _input_kind(model: nn.Module, given: str | None) -> str:
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


def _elements(group: Group, elements: Iterable[int] | None) -> tuple[int, ...]:
    chosen = tuple(range(1, group.order)) if elements is None else tuple(elements)
    if not chosen or not all(0 <= element < group.order for element in chosen):
        raise ValueError(
            f"expected elements of {group} from 0 to {group.order - 1}; got {list(chosen)}"
        )
    return chosen


def _check_images(images: Tensor, group: Group, elements: Iterable[int]) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(
            f"expected images as a float tensor [batch, channels, height, width]; got {found}"
        )
    height, width = images.shape[-2:]
    if height == width:
        return
    for element in elements:
        if element in group.grid_symmetries and group.matrices[element][0, 0] == 0:
            raise ValueError(
                f"expected square images for the quarter turns of {group}, which swap the sides; "
                f"got {height}×{width} pixels"
            )


def _output_error(
    straight: Tensor, turned: Tensor, flow: _Flow, group: Group, element: int, margin: float
) -> OutputError:
    expected = _turned(straight, flow, group, element)
    mask = None
    if flow.kind != "invariant" and element not in group.grid_symmetries:
        mask = _mask(expected, margin)
    relative = _relative(turned, expected, mask, "the output")
    difference = (turned.double() - expected.double()).abs()
    agreement = None
    if flow.kind == "invariant" and turned.ndim == 2 and turned.shape[1] > 1:
        agreement = float((turned.argmax(1) == expected.argmax(1)).double().mean())
    largest = float((difference if mask is None else difference * mask).max())
    return OutputError(element, largest, relative, agreement)


def _mask(x: Tensor, margin: float) -> Tensor | None:
    has_pixels = x.ndim == 4 and min(x.shape[-2:]) > 1
    return _disc_of(x, margin) if has_pixels else None


def _disc_of(x: Tensor, margin: float) -> Tensor:
    # On maps of a few pixels an empty disc would measure nothing.
    height, width = x.shape[-2:]
    return _disc(height, width, min(margin, 0.5 - 0.75 / min(height, width))).to(x.device)


def _relative(result: Tensor, expected: Tensor, mask: Tensor | None, name: str) -> float:
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
    offset = np.array([-1.0, 1.0]) / math.sqrt(2)
    return float(((offset - group.matrices[element] @ offset) ** 2).sum())


def _strided(module: nn.Module) -> bool:
    stride = getattr(module, "stride", 1)
    largest = max(stride) if isinstance(stride, tuple | list) else stride
    return isinstance(largest, int) and largest > 1


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from _leaves(child)
    else:
        yield module


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

    def sample(self, size: int, spacing: float, matrix: FloatArray) -> Tensor:
        """f(A⁻¹x) on a grid around the origin."""
        right, up = (spacing * axis for axis in coordinates(size, 2))
        x = matrix[0, 0] * right + matrix[1, 0] * up
        y = matrix[0, 1] * right + matrix[1, 1] * up
        waves = np.cos(self.wave_x * x + self.wave_y * y + self.phase)
        return torch.from_numpy(waves.sum(axis=2) / math.sqrt(self.count))


def _response(weights: FloatArray, kappa: FloatArray) -> npt.NDArray[np.complex128]:
    """Σ w(x) e^{iκ·x} at every frequency κ, ``[2, …]``."""
    x, y = coordinates(weights.shape[-1], 2)
    phase = np.multiply.outer(kappa[0], x) + np.multiply.outer(kappa[1], y)
    return (weights * np.exp(1j * phase)).sum(axis=(-2, -1))


def _twin(module: nn.Module) -> nn.Module:
    weight = getattr(module, "weight", None)
    options: dict[str, Any] = {}
    if isinstance(weight, Tensor):
        options = {"device": weight.device, "dtype": weight.dtype}
    twin: nn.Module | None = None
    if isinstance(module, PDOConv2d):
        twin = nn.Conv2d(
            module.in_channels,
            module.out_channels,
            module.basis.size,
            module.stride,
            module.padding,
            module.dilation,
            module.groups,
            module.bias is not None,
            module.padding_mode,  # type: ignore[arg-type]  # one of the four that torch knows
            **options,
        )
        nn.init.kaiming_normal_(twin.weight, nonlinearity="relu")
    elif isinstance(module, GroupBatchNorm2d | GroupInstanceNorm2d):
        plain = nn.BatchNorm2d if isinstance(module, GroupBatchNorm2d) else nn.InstanceNorm2d
        twin = plain(
            module.fields * module.group.order,
            module.eps,
            module.momentum,  # type: ignore[arg-type]
            module.affine,
            module.track_running_stats,
            **options,
        )
    elif isinstance(module, GroupLayerNorm2d):
        channels = module.fields * module.group.order
        twin = GroupLayerNorm2d(channels, "p1", module.eps, weight is not None, **options)
    elif isinstance(module, GroupDropout2d):
        twin = nn.Dropout2d(module.p)
    elif isinstance(module, Restrict2d):
        twin = nn.Identity()
    if twin is not None:
        return twin.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, _twin(child))
    return module


# Images


def _image_paths(paths: Sequence[Path], limit: int | None) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}")
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_FILES)
            if not inside:
                raise ValueError(
                    f"no images in the folder {path}: expected {', '.join(IMAGE_FILES)}"
                )
            found += inside
        else:
            found.append(path)
    if not found:
        raise ValueError("expected at least one image file")
    return found[:limit]


def _read_images(path: Path) -> Tensor:
    try:
        if path.suffix.lower() == ".npy":
            return _as_images(np.load(path, allow_pickle=False), str(path))
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                if len(archive.files) != 1:
                    raise ValueError(f"expected one array; found {archive.files}")
                return _as_images(archive[archive.files[0]], str(path))
        return _as_images(_read_picture(path), str(path))
    except ImportError:
        raise
    except Exception as error:  # decoders raise what they like
        text = str(error)
        named = text.startswith(str(path))
        raise ValueError(text if named else f"cannot read {path}: {text}") from None


def _read_picture(path: Path) -> npt.NDArray[Any]:
    try:
        from PIL import Image
    except ImportError:
        try:
            from matplotlib.image import imread
        except ImportError:
            raise ImportError(
                f"reading {path} needs pillow or matplotlib: pip install 'econv[plot]', or give "
                "the images as a .npy file"
            ) from None
        return np.asarray(imread(path))
    with Image.open(path) as picture:
        if picture.mode in ("P", "LA", "PA", "RGBA", "CMYK"):
            picture = picture.convert("L" if picture.mode == "LA" else "RGB")
        elif picture.mode == "1":
            picture = picture.convert("L")
        return np.asarray(picture)


def _as_images(source: npt.NDArray[Any] | Tensor, name: str) -> Tensor:
    if isinstance(source, np.ndarray):
        if source.dtype.kind not in "fiub":
            raise ValueError(f"{name}: expected an array of numbers; got {source.dtype}")
        native = source.astype(source.dtype.newbyteorder("="))
        if native.dtype.kind == "u" and native.dtype.itemsize > 1:
            native = native.astype(np.float64) / np.iinfo(source.dtype).max
        x = torch.from_numpy(np.ascontiguousarray(native))
    else:
        x = source.detach().cpu()
        if x.is_complex():
            raise ValueError(f"{name}: expected real numbers; got {x.dtype}")
    if x.dtype == torch.uint8:
        x = x.float() / 255
    elif x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    last = x.ndim >= 3 and x.shape[-1] in (1, 3, 4)
    if x.ndim == 2:
        x = x[None, None]
    elif x.ndim == 3 and x.shape[0] <= 4:
        x = x[None]
    elif x.ndim == 3:
        x = x.permute(2, 0, 1)[None] if last else x[:, None]
    elif x.ndim == 4:
        x = x.permute(0, 3, 1, 2) if last and x.shape[1] > 4 else x
    else:
        raise ValueError(f"{name}: expected images of 2 to 4 dimensions; got {tuple(x.shape)}")
    return x.contiguous()


def _size_text(images: Tensor) -> str:
    channels, height, width = images.shape[1:]
    return f"{channels} channel{'s' * (channels != 1)} of {height}×{width} pixels"


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the place of the wanted file once all went well."""
    wanted = Path(path)
    temporary = wanted.with_name(f".{os.getpid()}.{wanted.name}")
    try:
        yield temporary
        os.replace(temporary, wanted)
    finally:
        temporary.unlink(missing_ok=True)
