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


def plot_angles(
    curves: AngleCurve | Mapping[str, AngleCurve], title: str = "Equivariance error over the angle"
) -> Figure:
    """Error over the angle, around a circle, the radius on a logarithmic scale.

    Spokes are drawn at the angles of the group of the first curve.
    """
    named = {"error": curves} if isinstance(curves, AngleCurve) else dict(curves)
    if not named:
        raise ValueError("expected at least one curve")
    figure = _figure(6.4, 6.2)
    axis: Any = figure.add_subplot(projection="polar")
    errors = np.concatenate([np.asarray(curve.errors) for curve in named.values()])
    shown = errors[(errors > 0) & np.isfinite(errors)]
    high = math.ceil(math.log10(shown.max())) if shown.size else 0
    # Whatever is exact to rounding ends in the centre, and leaves the scale to the rest.
    low = high - 4
    for (name, curve), colour, marker in zip(named.items(), COLOURS, MARKERS, strict=False):
        angles = np.radians(curve.angles)
        radius = np.log10(np.maximum(np.asarray(curve.errors), 10.0**low)) - low
        # A line to the centre and back would hide that only single angles are exact.
        line = np.where(radius > 0, radius, np.nan)
        if _goes_round(curve.angles):
            angles, radius, line = (np.append(a, a[0]) for a in (angles, radius, line))
        axis.plot(angles, line, color=colour, lw=1.4)
        style = {"marker": marker, "markersize": 3.5, "ls": "none", "clip_on": False}
        axis.plot(angles, radius, color=colour, label=name, **style)
    group = next(iter(named.values())).group
    count = group.rotations if group is not None and 3 <= group.rotations <= 24 else 8
    axis.set_thetagrids([360 * k / count for k in range(count)])
    axis.set_rlim(0, high - low)
    ticks = range(1, high - low + 1)
    labels = [f"$10^{{{low + t}}}$" for t in ticks]
    axis.set_rgrids(list(ticks), labels, angle=360 / count / 2, fontsize=9, color="0.35")
    axis.grid(color="0.85")
    axis.set_title(title, pad=18, fontsize=13)
    caption = f"centre: $10^{{{low}}}$ or less"
    if group is not None:
        caption += f"; labelled: the angles of {group.name}"
    axis.set_xlabel(caption, fontsize=9, color="0.35", labelpad=10)
    if len(named) > 1:
        axis.legend(loc="upper right", bbox_to_anchor=(1.14, 1.08), fontsize=9)
    return figure


def plot_resolution(
    curves: ResolutionCurve | Mapping[str, ResolutionCurve],
    title: str = "Equivariance error over the resolution",
) -> Figure:
    """Error over the length of a pixel with the fitted power law, both axes logarithmic."""
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
    """Write a figure in the format that the name ends with: whole, or not at all."""
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
