"""3-D Tetris: trained on eight upright pieces alone, tested under rotations of every kind.

    python benchmarks/tetris.py
    python benchmarks/tetris.py --stencils 3 5 --seeds 5 --json benchmarks/results/tetris.json

The task of PDO-s3DCNNs (ICML 2022): eight pieces of four cubes on a grid of 4³, two of which are
mirror images of each other. Every cube becomes 5³ voxels, and ten voxels of nothing are put on
each side: volumes of 40³. The eight are all there is to train on; the test has 100 copies of each,
turned by rotations uniform in SO(3) with cubic splines. Their networks reach 18.2 % with finite
differences on 3³, 30.0 % with derivatives of Gaussians on 3³ and 99.04 % with those on 5³.
"""

from __future__ import annotations

import argparse
import json
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
from recording import Growing, origin

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

CELLS, VOXELS, EMPTY = 4, 5, 10


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
    """Every piece turned by rotations of its own, ``[pieces, n, d, d]``, by cubic splines."""
    from scipy.ndimage import affine_transform

    down = np.array([1.0, -1.0, 1.0])  # from (x, y up, z) to indices along (z, y, x)
    found = []
    for piece, own in zip(pieces[:, 0].numpy(), rotations, strict=True):
        middle = (np.array(piece.shape) - 1) / 2
        for rotation in own:
            inverse = (rotation.T * down * down[:, None])[::-1, ::-1]
            found.append(affine_transform(piece, inverse, middle - inverse @ middle, order=3))
    return torch.from_numpy(np.stack(found))[:, None]


class Network(nn.Module):
    """A lift and group convolutions, first on half of the grid's points, then on a quarter.

    What goes in is blurred, so that upright pieces have edges like turned ones, and stencils find
    what they can turn.
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


def train(network: nn.Module, pieces: Tensor, steps: int, rate: float, noise: float) -> float:
    """Learn the eight by heart, with white noise on every voxel; the last loss."""
    optimiser = torch.optim.Adam(network.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    labels = torch.arange(len(pieces), device=pieces.device)
    network.train()
    for _ in range(steps):
        noisy = pieces + noise * torch.randn_like(pieces)
        loss = functional.cross_entropy(network(noisy), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
    calibrate(network, pieces)
    return float(loss.detach())


@torch.no_grad()
def accuracy(network: nn.Module, test: Tensor, copies: int) -> list[float]:
    """The share that is told right, of each piece."""
    network.eval()
    found = torch.cat([network(part).argmax(1) for part in test.split(8)])
    right = found.view(-1, copies) == torch.arange(len(test) // copies)[:, None]
    return [float(share) for share in right.double().mean(1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stencils", type=int, nargs="+", default=[3, 5], help="their sides")
    parser.add_argument("--kind", default="isotropic", help="how stencils are designed")
    parser.add_argument("--group", default="I")
    parser.add_argument("--fields", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--activation", default="silu")
    parser.add_argument("--reduce", default="mean")
    parser.add_argument("--blur", type=float, default=2.0, help="of what goes in, in voxels")
    parser.add_argument("--noise", type=float, default=0.3, help="deviation, in training")
    parser.add_argument("--fine", type=int, default=1, help="layers on the finer grid")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--copies", type=int, default=100, help="of each piece in the test")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    pieces = volumes()
    rotations = random_rotations(len(PIECES) * given.copies, seed=2022)
    test = turned(pieces, rotations.reshape(len(PIECES), given.copies, 3, 3))
    settings = {
        "group": given.group,
        "stencils": given.kind,
        "fields": given.fields,
        "activation": given.activation,
        "reduce": given.reduce,
        "blur": given.blur,
        "fine": given.fine,
        "noise": given.noise,
        "steps": given.steps,
        "rate": given.rate,
        "copies": given.copies,
        "pieces": list(PIECES),
    }
    head = {"schema": 1, **settings, **origin("cpu")}
    record = Growing(given.json, head, "runs", lambda row: (row["size"], row["seed"]))
    for seed in range(given.seeds):
        for size in given.stencils:
            torch.manual_seed(seed)
            options = (given.group, size, given.kind, tuple(given.fields))
            more = (given.activation, given.reduce, given.blur, given.fine)
            network = Network(*options, *more)
            parameters = sum(p.numel() for p in network.parameters())
            start = time.perf_counter()
            loss = train(network, pieces, given.steps, given.rate, given.noise)
            trained = time.perf_counter() - start
            shares = accuracy(network, test, given.copies)
            row = {
                "size": size,
                "seed": seed,
                "parameters": parameters,
                "loss": loss,
                "upright": sum(accuracy(network, pieces, 1)) / len(PIECES),
                "accuracy": sum(shares) / len(shares),
                "each": shares,
                "training_s": round(trained, 1),
            }
            record.keep(row)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
