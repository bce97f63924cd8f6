"""3-D Tetris: trained on eight upright pieces alone, tested under rotations of every kind.

    python benchmarks/tetris.py
    python benchmarks/tetris.py --stencils 3 --try "one grid" "four layers" --json tries.json
    python benchmarks/tetris.py --stencils 3 --tries tries.json --json tetris_3.json

The task of PDO-s3DCNNs (ICML 2022): eight pieces of four cubes on a grid of 4³, two of which are
mirror images of each other. Every cube becomes 5³ voxels, and ten voxels of nothing are put on
each side: volumes of 40³. The eight are all there is to train on; the test has 100 copies of each,
turned by rotations uniform in SO(3) with cubic splines. Their networks reach 18.2 % with finite
differences on 3³, 30.0 % with derivatives of Gaussians on 3³ and 99.04 % with those on 5³.

`--try` trains networks on the upright pieces and looks at them on 20 draws of each piece, of other
rotations than the test's; `--tries` takes the best of these for each size, and reads the test once
for each seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv import (
    Downsample3d,
    GroupActivation3d,
    GroupBatchNorm3d,
    GroupConv3d,
    GroupPool3d,
    LiftConv3d,
)
from econv.layers.normalisation import calibrate
from econv.testing import random_rotations
from econv.train.execution import Execution, convolution_precision
from recording import Growing, joined, origin

PIECES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "chiral, one hand": ((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0)),
    "chiral, other hand": ((0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 0, 0)),
    "square": ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)),
    "line": ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)),
    "corner": ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)),
    "L": ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)),
    "T": ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 1)),
    "zigzag": ((0, 0, 0), (1, 0, 0), (1, 1, 0), (2, 1, 0)),
}
"""Where the cubes of each piece are, as (x, y, z)."""

CELLS, VOXELS, EMPTY, CUT = 4, 5, 10, 4
VALIDATION = 20
"""Draws of each piece that networks are chosen on; they are not those of the test."""


def volumes() -> Tensor:
    """The eight upright pieces, ``[8, 1, 40, 40, 40]``, each in the middle of its grid."""
    found = torch.zeros(len(PIECES), 1, CELLS, CELLS, CELLS)
    for number, cubes in enumerate(PIECES.values()):
        extent = np.max(cubes, axis=0) + 1
        for x, y, z in np.array(cubes) + (CELLS - extent) // 2:
            found[number, 0, z, CELLS - 1 - y, x] = 1.0  # y points up
    for axis in (2, 3, 4):
        found = found.repeat_interleave(VOXELS, axis)
    return functional.pad(found, (EMPTY,) * 6)


def turned(pieces: Tensor, rotations: np.ndarray) -> Tensor:
    """Every piece turned by rotations of its own, ``[pieces, n, d, d]``, by cubic splines.

    As SciPy's `affine_transform` does it with its defaults, on any device.
    """
    n, device = pieces.shape[-1], pieces.device
    matrix = torch.eye(n, dtype=torch.float64) * 4 / 6
    matrix += torch.diag(torch.full((n - 1,), 1 / 6, dtype=torch.float64), 1)
    matrix += torch.diag(torch.full((n - 1,), 1 / 6, dtype=torch.float64), -1)
    matrix[0, 1] = matrix[-1, -2] = 2 / 6  # mirrored at the border voxels
    spline = torch.linalg.inv(matrix).to(device)
    line = torch.arange(n, dtype=torch.float64, device=device) - (n - 1) / 2
    points = torch.stack(torch.meshgrid(line, line, line, indexing="ij"), -1).view(-1, 3)
    down = np.array([1.0, -1.0, 1.0])  # from (x, y up, z) to indices along (z, y, x)
    found = []
    for piece, own in zip(pieces[:, 0].double(), rotations, strict=True):
        coefficients = torch.einsum("zyx,az,by,cx->abc", piece, spline, spline, spline).flatten()
        for rotation in own:
            inverse = np.ascontiguousarray((rotation.T * down * down[:, None])[::-1, ::-1])
            at = points @ torch.from_numpy(inverse).to(device).T + (n - 1) / 2
            base = at.floor()
            t = at - base
            weights = [(1 - t) ** 3, 4 - 6 * t**2 + 3 * t**3, 1 + 3 * t + 3 * t**2 - 3 * t**3, t**3]
            index = [(base.long() + k - 1).abs() for k in range(4)]
            index = [torch.minimum(i, 2 * (n - 1) - i).clamp(0, n - 1) for i in index]
            value = torch.zeros(len(at), dtype=torch.float64, device=device)
            for i, j, k in itertools.product(range(4), repeat=3):
                place = (index[i][:, 0] * n + index[j][:, 1]) * n + index[k][:, 2]
                share = weights[i][:, 0] * weights[j][:, 1] * weights[k][:, 2] / 216
                value += share * coefficients[place]
            inside = ((at >= 0) & (at <= n - 1)).all(1)
            found.append(torch.where(inside, value, 0).view(n, n, n).to(pieces.dtype))
    return torch.stack(found)[:, None]


CANDIDATES: dict[str, dict[str, Any]] = {
    "two grids": {"fine": 1},
    "one grid": {},
    "one grid, more noise": {"noise": 1.0},
    "four layers": {"fields": (2, 2, 4, 8), "fine": 4},
    "one grid, mean": {"reduce": "mean"},
    "one grid, mean, more noise": {"reduce": "mean", "noise": 1.0},
    "two grids, mean": {"reduce": "mean", "fine": 1},
}
"""Networks to choose from: what is other than in `DEFAULTS`."""
DEFAULTS: dict[str, Any] = {
    "group": "I",
    "kind": "isotropic",
    "fields": (2, 4, 8),
    "activation": "silu",
    "reduce": "mean+std",
    "blur": 2.0,
    "fine": 3,
    "noise": 0.3,
    "rate": 0.02,
}


class Network(nn.Module):
    """A lift and group convolutions on half of the grid's points, or later ones on a quarter.

    What goes in is blurred, so that upright pieces have edges like turned ones, and stencils find
    what they can turn. The outermost voxels, which no piece reaches however it turns, are cut off.
    """

    def __init__(
        self,
        group: str,
        size: int,
        stencils: str,
        fields: tuple[int, ...],
        activation: str = "silu",
        reduce: str = "mean",
        blur: float = 2.0,
        fine: int = 1,
    ) -> None:
        super().__init__()
        options: Any = {"size": size, "stencils": stencils, "operators": "order<=2"}
        layers: list[nn.Module] = [GroupActivation3d("identity", width=blur)]
        layers.append(nn.ConstantPad3d(-CUT, 0.0))
        before = 1
        for number, width in enumerate(fields):
            if number in (0, fine):
                layers.append(Downsample3d(antialias=8))
            kind: Any = GroupConv3d if number else LiftConv3d
            layers += [kind(before, width, group, **options), GroupBatchNorm3d(width, group)]
            layers.append(GroupActivation3d(activation))
            before = width
        self.layers = nn.Sequential(*layers)
        self.pool = GroupPool3d(group, reduce)
        features = before * self.pool.outputs
        self.classifier = nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, len(PIECES)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(self.pool(self.layers(x)).mean((2, 3, 4)))
        return found


def made(settings: dict[str, Any], size: int) -> Network:
    first = (settings["group"], size, settings["kind"], tuple(settings["fields"]))
    return Network(*first, *(settings[name] for name in ("activation", "reduce", "blur", "fine")))


def train(network: nn.Module, pieces: Tensor, steps: int, rate: float, noise: float) -> float:
    """Learn the eight by heart, with white noise on every voxel; the last loss."""
    optimiser = torch.optim.Adam(network.parameters(), lr=rate)
    labels = torch.arange(len(pieces), device=pieces.device)
    network.train()
    for step in range(steps):
        part = (step + 0.5) / steps
        for group in optimiser.param_groups:  # up for a tenth of the steps, and down
            group["lr"] = rate * min(part / 0.1, 0.5 + 0.5 * math.cos(math.pi * part))
        noisy = pieces + noise * torch.randn_like(pieces)
        loss = functional.cross_entropy(network(noisy), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return float(loss.detach())


@torch.no_grad()
def judged(network: nn.Module, test: Tensor, copies: int) -> tuple[list[float], float]:
    """The share that is told right, of each piece; the mean loss."""
    network.eval()
    scores = torch.cat([network(part) for part in test.split(8)]).double()
    labels = torch.arange(len(test) // copies, device=test.device).repeat_interleave(copies)
    right = (scores.argmax(1) == labels).view(-1, copies)
    shares = [float(share) for share in right.double().mean(1)]
    return shares, float(functional.cross_entropy(scores, labels))


def draws(pieces: Tensor, copies: int, seed: int) -> Tensor:
    rotations = random_rotations(len(PIECES) * copies, seed=seed)
    return turned(pieces, rotations.reshape(len(PIECES), copies, 3, 3))


def row_of(
    settings: dict[str, Any], size: int, seed: int, steps: int, pieces: Tensor, seen: Tensor
) -> dict[str, Any]:
    """One network, trained on the upright pieces and judged on turned ones."""
    torch.manual_seed(seed)
    network = made(settings, size).to(pieces.device)
    start = time.perf_counter()
    fast, exact = ("tf32" if pieces.is_cuda else "float32", "float32")
    with convolution_precision(Execution(pieces.device, "eager", fast, False)):
        loss = train(network, pieces, steps, settings["rate"], settings["noise"])
    trained = time.perf_counter() - start
    with convolution_precision(Execution(pieces.device, "eager", exact, False)):
        calibrate(network, pieces)
        upright = judged(network, pieces, 1)[0]
        shares, test_loss = judged(network, seen, len(seen) // len(PIECES))
    return {
        "size": size,
        "seed": seed,
        "settings": {**settings, "fields": list(settings["fields"])},
        "parameters": sum(p.numel() for p in network.parameters()),
        "loss": loss,
        "upright": statistics.mean(upright),
        "accuracy": statistics.mean(shares),
        "turned_loss": test_loss,
        "each": shares,
        "training_s": round(trained, 1),
    }


def best(tries: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """The settings that were right most often on the draws for validation; then of least loss."""
    own = [row for row in tries if row["size"] == size]
    if not own:
        raise SystemExit(f"expected a try with stencils of {size} voxels; there is none")
    chosen = max(own, key=lambda row: (row["accuracy"], -row["turned_loss"]))
    found: dict[str, Any] = chosen["settings"]
    return found


def key(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["size"], row["seed"], row.get("name", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stencils", type=int, nargs="+", default=[3, 5], help="their sides")
    parser.add_argument("--try", nargs="+", dest="tried", choices=list(CANDIDATES), default=[])
    parser.add_argument("--tries", type=Path, nargs="+", default=[], help="what --try wrote")
    for name, value in DEFAULTS.items():
        several = {"nargs": "+", "type": int} if name == "fields" else {"type": type(value)}
        parser.add_argument(f"--{name}", default=value, **several)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--copies", type=int, default=100, help="of each piece in the test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--join", type=Path, nargs="+", help="put records together, and stop")
    given = parser.parse_args()
    if given.join:
        joined(given.json, given.join, "runs", key)
        return
    torch.set_num_threads(given.threads)
    pieces = volumes().to(given.device)
    tries = [row for path in given.tries for row in json.loads(path.read_text())["tries"]]
    head = {
        "schema": 2,
        "steps": given.steps,
        "copies": given.copies,
        "pieces": list(PIECES),
        **origin(given.device.partition(":")[0]),
    }
    if given.tried:
        record = Growing(given.json, head, "tries", key)
        seen = draws(pieces, VALIDATION, seed=1)
        for name, size in itertools.product(given.tried, given.stencils):
            settings = {**DEFAULTS, **CANDIDATES[name]}
            row = row_of(settings, size, 1000, given.steps, pieces, seen)
            record.keep({"name": name, **row})
            print(json.dumps(record.rows[-1]), flush=True)
        return
    record = Growing(given.json, head, "runs", key)
    done = {key(row) for row in record.rows}
    seen = None
    for seed, size in itertools.product(
        range(given.first, given.first + given.seeds), given.stencils
    ):
        if (size, seed, "") in done:
            continue
        own = best(tries, size) if tries else {name: getattr(given, name) for name in DEFAULTS}
        seen = draws(pieces, given.copies, seed=2022) if seen is None else seen
        record.keep(row_of(own, size, seed, given.steps, pieces, seen), tries=tries)
        print(json.dumps(record.rows[-1]), flush=True)


if __name__ == "__main__":
    main()
