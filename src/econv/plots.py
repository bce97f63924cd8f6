"""Pictures of what the laboratory measured. Each function returns a matplotlib `Figure`.

Matplotlib is loaded by these functions alone, and without `pyplot`: no window, no global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from econv.files import atomic
from econv.groups import FloatArray
from econv.lab import AngleCurve, OperatorSymbol, ResolutionCurve, element_name
from econv.layers import GroupConv2d, LiftConv2d, PDOConv2d, VectorConv2d

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = ["plot_angles", "plot_filters", "plot_resolution", "plot_symbols", "save"]

COLOURS = ("#1f5fa8", "#c8553d", "#3b8f5a", "#8a5aa8", "#a07a1e", "#4d4d4d")
MARKERS = "osD^v*"
_ROUNDING = 1e-5  # what is less is that of float32, and exact


def plot_angles(
    curves: AngleCurve | Mapping[str, AngleCurve],
    title: str = "Equivariance error over the angle",
    logarithmic: bool = True,
) -> Figure:
    """Error over the angle, around a circle and, as it is noticed, on a linear scale beside it.

    The circle reaches from 1e-7, where rounding lies, to the largest error; or from nothing, in
    percent, if not ``logarithmic``. Its spokes are at the angles of the group of the first curve.
    The linear scale has the share of images whose class changes, or for outputs that are no scores
    the error itself.

    Raises:
        ValueError: for no curve at all.
        ImportError: without matplotlib.

    >>> curve = AngleCurve("scalar", (0.0, 90.0, 180.0, 270.0), (0.0, 0.1, 0.2, 0.1), None)
    >>> len(plot_angles({"a network": curve}).axes)
    2
    """
    named = {"error": curves} if isinstance(curves, AngleCurve) else dict(curves)
    if not named:
        raise ValueError("expected at least one curve")
    figure = _figure(11.4, 6.0)
    grid = figure.add_gridspec(1, 2, width_ratios=(1.25, 1))
    axis: Any = figure.add_subplot(grid[0], projection="polar")
    beside = figure.add_subplot(grid[1])
    found = {name: _errors(curve) for name, curve in named.items()}
    errors = np.concatenate(list(found.values()))
    shown = errors[(errors > 0) & np.isfinite(errors)]
    low = -7  # the decade of rounding in float32: whatever is exact ends in the centre
    high = max(0, math.ceil(math.log10(shown.max()))) if shown.size else 0
    scores = all(curve.changed is not None for curve in named.values())
    style: dict[str, Any]
    for (name, curve), colour, marker in zip(named.items(), COLOURS, MARKERS, strict=False):
        angles = np.radians(curve.angles)
        decades = np.log10(np.maximum(found[name], 10.0**low)) - low
        radius = decades if logarithmic else 100 * found[name]
        linear = 100 * (np.asarray(curve.changed) if scores else found[name])
        degrees = np.asarray(curve.angles)
        # A line to the centre and back would hide that only single angles are exact.
        single = logarithmic & (found[name] <= _ROUNDING)
        line = np.where(single, np.nan, radius)
        if _goes_round(curve.angles):
            angles, radius, line = (np.append(a, a[0]) for a in (angles, radius, line))
            degrees, linear = np.append(degrees, degrees[0] + 360), np.append(linear, linear[0])
        axis.plot(angles, line, color=colour, lw=1.4)
        style = {"marker": marker, "markersize": 3.5, "ls": "none", "clip_on": False}
        axis.plot(angles, radius, color=colour, label=name, **style)
        style = {"marker": marker, "markersize": 3.5, "lw": 1.4, "clip_on": False}
        beside.plot(degrees, linear, color=colour, label=name, zorder=3, **style)
    group = next(iter(named.values())).group
    count = group.rotations if group is not None and 3 <= group.rotations <= 24 else 8
    axis.set_thetagrids([360 * k / count for k in range(count)])
    if logarithmic:
        powers = range(1, high - low + 1)
        rings: list[float] = [*powers]
        labels = [f"$10^{{{low + t}}}$" if (high - low - t) % 2 == 0 else "" for t in powers]
        axis.set_rlim(0, high - low)
    else:
        largest = 100 * float(shown.max()) if shown.size else 100.0
        step = 10.0 ** math.floor(math.log10(largest / 2))
        rings = [n * step for n in range(1, math.floor(largest / step) + 1)]
        labels = [
            f"{ring:g} %" if n % max(1, len(rings) // 4) == 0 else ""
            for n, ring in enumerate(rings, 1)
        ]
        axis.set_rlim(0, 1.05 * largest)
    axis.set_rgrids(rings, labels, angle=360 / count / 2, fontsize=9, color="0.35")
    axis.grid(color="0.85")
    scale = "logarithmic" if logarithmic else "linear"
    axis.set_title(f"relative error, {scale}", pad=18, fontsize=11)
    captions = [f"centre: $10^{{{low}}}$ or less"] if logarithmic else []
    if group is not None:
        captions.append(f"labelled: the angles of {group.name}")
    axis.set_xlabel("; ".join(captions), fontsize=9, color="0.35", labelpad=10)
    beside.set_title(
        "images whose class changes, %" if scores else "relative error, %", fontsize=11
    )
    beside.set_xlabel("angle")
    beside.set_xticks(range(0, 361, 90), [f"{degrees}°" for degrees in range(0, 361, 90)])
    beside.set_ylim(0, max(5.0, beside.get_ylim()[1]))
    beside.grid(color="0.9")
    for side in ("top", "right"):
        beside.spines[side].set_visible(False)
    if len(named) > 1:
        beside.legend(fontsize=9)
    figure.suptitle(title, fontsize=13)
    return figure


def _errors(curve: AngleCurve) -> FloatArray:
    """The errors, with NaN where nothing could be compared: nothing is drawn there."""
    return np.array([math.nan if error is None else error for error in curve.errors])


def plot_resolution(
    curves: ResolutionCurve | Mapping[str, ResolutionCurve],
    title: str = "Equivariance error over the resolution",
) -> Figure:
    """Error over the length of a pixel with the fitted power law, both axes logarithmic.

    Raises:
        ValueError: for no curve at all.
        ImportError: without matplotlib.

    >>> curve = ResolutionCurve(1, "45°", (1.0, 0.5), (0.04, 0.01), order=2.0)
    >>> plot_resolution(curve).axes[0].get_legend().get_texts()[0].get_text()
    'error, 45°: order 2.00'
    """
    named = {"error": curves} if isinstance(curves, ResolutionCurve) else dict(curves)
    if not named:
        raise ValueError("expected at least one curve")
    figure = _figure(6.4, 4.6)
    axis = figure.add_subplot()
    for (name, curve), colour, marker in zip(named.items(), COLOURS, MARKERS, strict=False):
        spacings, errors = np.asarray(curve.spacings), np.asarray(curve.errors)
        factor = np.exp(np.mean(np.log(errors) - curve.order * np.log(spacings)))
        line = np.linspace(spacings.min(), spacings.max(), 50)
        axis.loglog(line, factor * line**curve.order, color=colour, lw=1, alpha=0.6)
        label = f"{name}, {curve.angle}: order {curve.order:.2f}"
        axis.loglog(spacings, errors, marker, color=colour, ls="none", label=label)
    spacings = np.unique(np.concatenate([curve.spacings for curve in named.values()]))
    axis.set_xticks(spacings, [f"{h:.3g}" for h in spacings])
    axis.set_xticks([], minor=True)
    axis.set(xlabel="length of a pixel, in units of the layer's", ylabel="relative error")
    axis.grid(color="0.9")
    axis.set_title(title, fontsize=13)
    axis.legend(fontsize=9)
    return figure


def plot_filters(layer: PDOConv2d, field: int = 0, channel: int = 0) -> Figure:
    """One learned filter and what every element of the group turns it into, on one scale.

    Args:
        layer: a `LiftConv2d`, or a `GroupConv2d`, of which the filters from each orientation to
            itself are drawn.
        field: the output field.
        channel: the input channel, or input field.

    Raises:
        ValueError: for what is no lifting or group convolution, and fields or channels that it does
            not have.
        ImportError: without matplotlib.

    >>> figure = plot_filters(LiftConv2d(1, 2, "p4"), field=1)
    >>> [axis.get_title() for axis in figure.axes][:3]
    ['canonical, 3×3', '0°', '90°']
    """
    if isinstance(layer, VectorConv2d) or not isinstance(layer, LiftConv2d | GroupConv2d):
        raise ValueError(f"expected a LiftConv2d or a GroupConv2d; got {type(layer).__name__}")
    group = layer.group
    if not (0 <= field < layer.out_fields and 0 <= channel < layer.weight.shape[1]):
        raise ValueError(
            f"expected a field below {layer.out_fields} and a channel below "
            f"{layer.weight.shape[1]}; got {field} and {channel}"
        )
    with torch.no_grad():
        bank = layer.filters().double().cpu().unflatten(0, (-1, group.order))[field].numpy()
    elements = range(group.order)
    weight = layer.weight.detach().double().cpu()[field, channel]
    if isinstance(layer, GroupConv2d):
        turned = [bank[element, channel * group.order + element] for element in elements]
        weight = weight[0]
    else:
        turned = [bank[element, channel] for element in elements]
    panels = [
        (found, group.matrices[element], element_name(group, element))
        for element, found in enumerate(turned)
    ]
    side = math.isqrt(weight.numel())
    # It is drawn where the operators fill a square.
    pixels = weight.numpy() @ layer.basis.canonical @ layer.basis.canonical_filters
    canonical = pixels.reshape(side, side) if side * side == weight.numel() == pixels.size else None
    extent = max(float(np.abs(found).max()) for found, _, _ in panels)
    if canonical is not None:
        extent = max(extent, float(np.abs(canonical).max()))
    # Whole rows of rotations, where their number allows it.
    columns = max(n for n in range(1, 7) if group.rotations % n == 0 or n == min(group.order, 4))
    lines = math.ceil(group.order / columns)
    first = 0 if canonical is None else 1
    figure = _figure(2.0 * (columns + first) + 1.2, 2.1 * lines + 0.6)
    axes = figure.subplots(lines, columns + first, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    half = (side if canonical is not None else layer.basis.size) / 2
    if canonical is not None:
        title = f"canonical, {side}×{side}"
        _draw_filter(axes[0, 0], canonical, np.eye(2), title, extent, half)
    for axis, (found, matrix, name) in zip(axes[:, first:].flat, panels, strict=False):
        image = _draw_filter(axis, found, matrix, name, extent, half)
    size = layer.basis.size
    title = (
        f"A filter and its copies in {group}, {size}×{size}, {layer.basis.stencils.name} stencils"
    )
    figure.suptitle(title, fontsize=13)
    figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, label="weight")
    return figure


def _draw_filter(
    axis: Axes, weights: FloatArray, matrix: FloatArray, title: str, extent: float, square: float
) -> AxesImage:
    from matplotlib.patches import Polygon

    half = weights.shape[0] / 2
    image = axis.imshow(
        weights,
        cmap="RdBu_r",
        vmin=-extent,
        vmax=extent,
        extent=(-half, half, -half, half),
    )
    for row, column in np.ndindex(*weights.shape):
        value = weights[row, column]
        axis.text(
            column + 0.5 - half,
            half - row - 0.5,
            f"{value:.1f}".replace("-", "−") if abs(value) >= 0.05 else "",
            ha="center",
            va="center",
            fontsize=8,
            zorder=3,  # above the square's outline
            color="white" if abs(value) > 0.6 * extent else "black",
        )
    # The square that the canonical filter fills, turned with it.
    corners = square * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) @ matrix.T
    axis.add_patch(Polygon(corners, fill=False, edgecolor="0.45", linewidth=1.2, zorder=2))
    for line in np.arange(-half, half + 1):
        axis.plot([line, line], [-half, half], color="white", linewidth=0.8, zorder=1)
        axis.plot([-half, half], [line, line], color="white", linewidth=0.8, zorder=1)
    reach = max(half, 1.42 * square, 2.6)
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach))
    axis.set_title(title, fontsize=11)
    return image


def plot_symbols(
    symbols: Sequence[OperatorSymbol], title: str = "Frequency response of each operator"
) -> Figure:
    """The ideal response of each operator, its stencil's, and the difference, on one scale each.

    What is drawn is the response without the factor i^order that all three share.

    Raises:
        ValueError: for no operator at all.
        ImportError: without matplotlib.

    >>> from econv.lab import operator_symbols
    >>> len(plot_symbols(operator_symbols(LiftConv2d(1, 1, "p4").basis)).axes)  # three rows of nine
    27
    """
    if not symbols:
        raise ValueError("expected at least one operator")
    count = len(symbols)
    figure = _figure(1.45 * count + 1.2, 6.0)
    axes = figure.subplots(3, count, squeeze=False)
    rows = ("ideal", "stencil", "difference")
    for column, symbol in enumerate(symbols):
        edge = symbol.frequencies[-1]
        # Operators of odd order respond imaginarily, the others really.
        turn = 1j if np.abs(symbol.ideal.imag).max() > np.abs(symbol.ideal.real).max() else 1.0
        ideal, stencil = (symbol.ideal / turn).real, (symbol.stencil / turn).real
        limit = float(np.abs(stencil).max())
        for row, values in enumerate((ideal, stencil, stencil - ideal)):
            axis = axes[row, column]
            axis.imshow(
                values,
                cmap="RdBu_r",
                origin="lower",
                extent=(-edge, edge, -edge, edge),
                vmin=-limit,
                vmax=limit,
            )
            axis.set_xticks([-math.pi, 0, math.pi], ["−π", "0", "π"] if row == 2 else [])
            axis.set_yticks([-math.pi, 0, math.pi], ["−π", "0", "π"] if column == 0 else [])
            axis.tick_params(labelsize=8)
        axes[0, column].set_title(symbol.name, fontsize=12)
        axes[2, column].set_xlabel(
            f"to ideal {symbol.error:.2g}\nturning {symbol.turning_error:.2g}", fontsize=8
        )
    for row, name in enumerate(rows):
        axes[row, 0].set_ylabel(name, fontsize=11)
    figure.suptitle(title, fontsize=13)
    return figure


def save(figure: Figure, path: str | Path, dpi: int = 140) -> Path:
    """Write a figure in the format that the name ends with: whole, or not at all.

    >>> from tempfile import mkdtemp
    >>> save(plot_filters(LiftConv2d(1, 2, "p4")), f"{mkdtemp()}/filters.png").name
    'filters.png'
    """
    wanted = Path(path)
    with atomic(wanted) as temporary:
        figure.savefig(temporary, dpi=dpi)
    return wanted


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "drawing needs matplotlib, which is not installed: pip install 'econv[plot]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _goes_round(angles: Sequence[float]) -> bool:
    steps = np.diff(np.asarray([*angles, angles[0] + 360.0]))
    return bool(len(angles) > 2 and np.allclose(steps, steps[0]))
