"""How well does a network commute with rotations? An untrained one, measured and drawn.

Prints the equivariance errors of a small econv network for every element of its group, layer by
layer and beside a plain CNN, and draws a canonical filter with its turned copies.

    python examples/demonstration.py --output outputs --group p8 --seed 0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import econv
from econv.lab import element_name
from econv.plots import plot_filters, save
from econv.testing import equivariance_error, smooth_field

FIELDS = 4
CONVOLUTIONS = 4
SIZE = 65  # pixels along each side of the image
SMOOTHNESS = 5.0  # pixels over which the image changes
STENCILS = ("central", "isotropic")  # the paper's, and the default

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


def draw_filters(group: econv.Group, stencils: str, path: Path) -> None:
    """A canonical filter and what every element of the group turns it into."""
    layer = econv.LiftConv2d(1, 1, group, stencils=stencils, dtype=torch.float64)
    canonical = torch.tensor(CANONICAL_FILTER, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(canonical.reshape(layer.weight.shape))
    save(plot_filters(layer), path)


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
    for stencils in STENCILS:
        picture = args.output / f"filters_{stencils}.png"
        draw_filters(args.group, stencils, picture)
        print(f"A filter and its turned copies, {stencils} stencils: {picture}")


if __name__ == "__main__":
    main()
