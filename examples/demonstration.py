"""How well does a network commute with rotations? An untrained one, measured and drawn.

Prints the equivariance errors of a small econv network for every element of its group, layer by
layer and beside a plain CNN, and draws a canonical filter with its turned copies.

    python examples/demonstration.py --output outputs --group p8 --seed 0
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.patches import Polygon
from torch import Tensor, nn

import econv
from econv.testing import equivariance_error, smooth_field

matplotlib.use("Agg")

from matplotlib import pyplot  # after the choice of the backend

FIELDS = 4
CONVOLUTIONS = 4
SIZE = 65  # pixels along each side of the image
SMOOTHNESS = 5.0  # pixels over which the image changes
PICTURE = "filters.png"

# An edge detector: only a full turn maps it onto itself.
CANONICAL_FILTER = [
    [1.0, 2.0, 1.0],
    [0.0, 0.0, 0.0],
    [-1.0, -2.0, -1.0],
]


def equivariant_network(group: econv.Group) -> nn.Sequential:
    layers: list[nn.Module] = [econv.LiftConv2d(1, FIELDS, group)]
    for _ in range(CONVOLUTIONS - 1):
        layers += [
            econv.GroupBatchNorm2d(FIELDS, group, momentum=None),
            nn.ReLU(),
            econv.GroupConv2d(FIELDS, FIELDS, group),
        ]
    layers.append(econv.GroupPool2d(group))
    return nn.Sequential(*layers).double()


def plain_network(channels: int, support: int) -> nn.Sequential:
    """The same with ordinary convolutions of equal width and filter size."""
    layers: list[nn.Module] = []
    for convolution in range(CONVOLUTIONS):
        before = channels if convolution else 1
        layers += [
            nn.Conv2d(before, channels, support, padding=support // 2, bias=False),
            nn.BatchNorm2d(channels, momentum=None),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers[:-2]).double()


def equivariance_errors(group: econv.Group, image: Tensor) -> tuple[list[str], list[list[float]]]:
    """The names of what was measured, and for every element its errors."""
    network = equivariant_network(group)
    plain = plain_network(FIELDS * group.order, network[0].basis.size)
    measured: dict[str, tuple[nn.Module, str]] = {}
    for place, layer in enumerate(network):
        if isinstance(layer, econv.LiftConv2d | econv.GroupConv2d):
            measured[f"conv {len(measured) + 1}"] = (network[: place + 1], layer.output_kind)
    measured["pooled"] = (network, "scalar")
    measured["plain CNN"] = (plain, "scalar")
    for whole in (network, plain):
        with torch.no_grad():
            whole(image)  # lets batch norm see the statistics that it will apply
        whole.eval()
    errors = [
        [
            equivariance_error(module, image, element, group, output_kind=kind)
            for module, kind in measured.values()
        ]
        for element in range(group.order)
    ]
    return list(measured), errors


def element_name(group: econv.Group, element: int) -> str:
    angle = f"{360 * (element % group.rotations) / group.rotations:.4g}°"
    return f"{angle}, mirrored" if element >= group.rotations else angle


def print_errors(group: econv.Group, names: list[str], errors: list[list[float]]) -> None:
    width = max(12, *(len(element_name(group, element)) for element in range(group.order)))
    print(f"Equivariance errors ‖f(πx) − πf(x)‖ / ‖πf(x)‖ of an untrained network of {group}:")
    print(f"{CONVOLUTIONS} convolutions with {FIELDS} fields, group batch norm and ReLU between,")
    print("the maximum over orientations at the end. Last column: a plain CNN of equal width.\n")
    print(f"{'element':<{width}}" + "".join(f"{name:>11}" for name in names))
    for element, row in enumerate(errors):
        exact = "   exact on the grid" if element in group.grid_symmetries else ""
        figures = "".join(f"{error:>11.1e}" for error in row)
        print(f"{element_name(group, element):<{width}}{figures}{exact}")
    print()


def draw_filters(group: econv.Group, path: Path) -> None:
    """A canonical filter and what every element of the group turns it into, on one scale."""
    layer = econv.LiftConv2d(1, 1, group, dtype=torch.float64)
    canonical = torch.tensor(CANONICAL_FILTER, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(canonical.reshape(layer.weight.shape))
        turned = layer.filters()[:, 0].numpy()
    extent = max(float(np.abs(turned).max()), float(canonical.abs().max()))
    # Whole rows of rotations, where their number allows it.
    columns = max(n for n in range(1, 7) if group.rotations % n == 0 or n == min(group.order, 4))
    lines = math.ceil(group.order / columns)
    figure, axes = pyplot.subplots(
        lines,
        columns + 1,
        figsize=(2.0 * (columns + 1) + 1.2, 2.1 * lines + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    draw_filter(axes[0, 0], canonical.numpy(), np.eye(2), "canonical, 3×3", extent)
    panels = axes[:, 1:].flat
    for element in range(group.order):
        image = draw_filter(
            panels[element],
            turned[element],
            group.matrices[element],
            element_name(group, element),
            extent,
        )
    size = layer.basis.size
    figure.suptitle(f"A canonical filter and its copies in {group}, {size}×{size}", fontsize=13)
    figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, label="weight")
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        figure.savefig(temporary, dpi=140)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        pyplot.close(figure)


def draw_filter(
    axis: pyplot.Axes, weights: np.ndarray, matrix: np.ndarray, title: str, extent: float
) -> matplotlib.image.AxesImage:
    half = weights.shape[0] / 2
    image = axis.imshow(
        weights,
        cmap="RdBu_r",
        vmin=-extent,
        vmax=extent,
        extent=(-half, half, -half, half),
    )
    for row, column in np.ndindex(weights.shape):
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
    corners = 1.5 * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) @ matrix.T
    axis.add_patch(Polygon(corners, fill=False, edgecolor="0.45", linewidth=1.2, zorder=2))
    for line in np.arange(-half, half + 1):
        axis.plot([line, line], [-half, half], color="white", linewidth=0.8, zorder=1)
        axis.plot([-half, half], [line, line], color="white", linewidth=0.8, zorder=1)
    reach = max(half, 2.6)
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach))
    axis.set_title(title, fontsize=11)
    return image


def group_argument(text: str) -> econv.Group:
    try:
        return econv.Group(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs"),
        metavar="FOLDER",
        help="where the picture goes; made if it does not exist (default: %(default)s)",
    )
    parser.add_argument(
        "--group",
        type=group_argument,
        default="p8",
        help="'pn', n rotations, or 'pnm', with reflections (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the weights and the image (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: cannot make the folder {str(args.output)!r}: {error.strerror}")

    torch.set_num_threads(1)  # layers this small lose more by sharing cores than they gain
    torch.manual_seed(args.seed)
    image = smooth_field(SIZE, smoothness=SMOOTHNESS, seed=args.seed)
    print_errors(args.group, *equivariance_errors(args.group, image))
    picture = args.output / PICTURE
    draw_filters(args.group, picture)
    print(f"Picture of a filter and its turned copies: {picture}")


if __name__ == "__main__":
    main()
