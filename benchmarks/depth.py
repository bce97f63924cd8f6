"""What six layers leave of equivariance at 45°: by activation, by its grid, and by how maps shrink.

    python benchmarks/depth.py
    python benchmarks/depth.py --json benchmarks/results/depth.json

A lift and five group convolutions of p8 with batch norms, each followed by an activation, on smooth
random fields (white noise blurred by σ pixels) that are turned by quintic splines. The norms'
statistics are those of the straight field and held fixed, or they would see the corners that turn
out of sight. What counts is ‖f(πx) − πf(x)‖ / ‖πf(x)‖ after the last activation, in float64, in a
central disc that is out of the border's reach, mean over seeds. In the second table the map is
halved after the second layer and after the fourth.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from econv import Downsample2d, GroupActivation2d, GroupBatchNorm2d, GroupConv2d, LiftConv2d
from econv.files import write_atomically
from econv.testing import smooth_field, transform
from recording import origin

SMOOTHNESS = (1.0, 1.5)
DEPTH, FIELDS = 6, 4
PIXELS, RADIUS = 147, 17.5
# Halved twice, the last map is a quarter as wide, and each of its pixels reaches four times as far.
HALVED_PIXELS, HALVED_RADIUS = 200, 9.0

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "plain": {"width": 0.0},
    "blur .7": {"width": 0.7},
    "blur 1": {"width": 1.0},
    "2 points, blur .7": {"oversample": 2, "width": 0.7},
    "2 points, blur .85": {"oversample": 2, "width": 0.85},
    "4 points, blur .7": {"oversample": 4, "width": 0.7},
    "4 points, blur .85": {"oversample": 4, "width": 0.85},
}
FUNCTIONS = ("relu", "gelu", "silu", "softplus")
HALVINGS: dict[str, Callable[[], nn.Module]] = {
    "max_pool2d(2)": lambda: nn.MaxPool2d(2),
    "avg_pool2d(2)": lambda: nn.AvgPool2d(2),
    'Downsample2d("max", 8)': lambda: Downsample2d("max", 8),
    "Downsample2d(antialias=4)": lambda: Downsample2d(),
    "Downsample2d(antialias=6)": lambda: Downsample2d(antialias=6),
    "Downsample2d(antialias=8)": lambda: Downsample2d(antialias=8),
}


class Network(nn.Module):
    """Six layers of p8 with norms and activations."""

    def __init__(self, activation: nn.Module, halving: nn.Module | None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(DEPTH):
            kind: Any = GroupConv2d if number else LiftConv2d
            layers.append(kind(FIELDS if number else 1, FIELDS, "p8", dtype=torch.float64))
            # With momentum 1 one pass in training mode sets the running statistics.
            layers.append(GroupBatchNorm2d(FIELDS, "p8", momentum=1.0, dtype=torch.float64))
            layers.append(activation)
            if halving is not None and number in (1, 3):
                layers.append(halving)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


@torch.no_grad()
def error(
    activation: nn.Module, sigma: float, seed: int, halving: nn.Module | None = None
) -> float:
    """The relative error after the last activation."""
    torch.manual_seed(seed)
    network = Network(activation.double(), halving and halving.double())
    pixels, radius = (PIXELS, RADIUS) if halving is None else (HALVED_PIXELS, HALVED_RADIUS)
    image = smooth_field(pixels, 1, sigma, seed)
    network.train()(image)
    network.eval()
    expected, found = network(image), network(transform(image, "p8", 1))
    expected = transform(expected, "p8", 1, "regular")
    line = torch.arange(expected.shape[-1], dtype=torch.float64)
    line = line - line.mean()
    disc = line[:, None] ** 2 + line**2 <= radius**2
    return float(((found - expected) * disc).norm() / (expected * disc).norm())


def mean(seeds: int, sigma: float, *parts: Callable[[], nn.Module]) -> float:
    made = [part() for part in parts]
    errors = [error(made[0], sigma, seed, *made[1:]) for seed in range(seeds)]
    return float(f"{sum(errors) / seeds:.4g}")


def table(rows: dict[str, dict[str, list[float]]], columns: tuple[str, ...]) -> None:
    """Markdown: in every cell the errors at each smoothness."""
    print("| |" + "".join(f" {column} |" for column in columns))
    print("|---" * (len(columns) + 1) + "|")
    for name, cells in rows.items():
        texts = [" / ".join(f"{e:.4f}".lstrip("0") for e in cells[c]) for c in columns]
        print(f"| {name} |" + "".join(f" {text} |" for text in texts))
    print(flush=True)


def by_activation(seeds: int) -> dict[str, dict[str, list[float]]]:
    return {
        name: {
            function: [
                mean(seeds, sigma, lambda f=function, o=options: GroupActivation2d(f, **o))
                for sigma in SMOOTHNESS
            ]
            for function in FUNCTIONS
        }
        for name, options in ACTIVATIONS.items()
    }


def by_halving(seeds: int) -> dict[str, dict[str, list[float]]]:
    activations = {
        "silu": lambda: GroupActivation2d("silu", width=0.0),
        "silu, blur .7": lambda: GroupActivation2d("silu"),
    }
    return {
        name: {
            column: [mean(seeds, sigma, activation, halving) for sigma in SMOOTHNESS]
            for column, activation in activations.items()
        }
        for name, halving in HALVINGS.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="networks (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(arguments)
    if args.seeds < 1:
        parser.error(f"--seeds: expected at least 1; got {args.seeds}")
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    told = " / ".join(f"{sigma:g}" for sigma in SMOOTHNESS)
    print(f"{DEPTH} layers of p8, error at 45° on fields of σ = {told}, {args.seeds} seeds\n")
    activations = by_activation(args.seeds)
    table(activations, FUNCTIONS)
    halvings = by_halving(args.seeds)
    table(halvings, tuple(next(iter(halvings.values()))))
    print(f"{time.perf_counter() - started:.0f} s")
    if args.json:
        content = {
            "origin": origin("cpu"),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "settings": {
                "group": "p8",
                "degrees": 45,
                "depth": DEPTH,
                "fields": FIELDS,
                "smoothness": list(SMOOTHNESS),
                "pixels": PIXELS,
                "disc_radius": RADIUS,
                "halved_pixels": HALVED_PIXELS,
                "halved_disc_radius": HALVED_RADIUS,
                "seeds": args.seeds,
            },
            "errors_by_activation": activations,
            "errors_by_halving": halvings,
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomically(args.json, text.encode())


if __name__ == "__main__":
    main()
