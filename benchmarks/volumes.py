"""What is left of equivariance in volumes: one layer and four, beside escnn's of the same support.

    python benchmarks/volumes.py
    python benchmarks/volumes.py --json benchmarks/results/volumes.json

Layers of the icosahedral group, whose rotations but twelve are none of the voxel grid. Group
convolutions of one field, on smooth random features (white noise blurred by σ voxels), and networks
of a lift and three of them with norms and SiLU, on smooth random volumes. Volumes are turned by
random elements of the group, by quintic splines. What counts is ‖f(πx) − πf(x)‖ / ‖πf(x)‖ in
float64, in a central ball out of the border's reach, mean over elements and seeds. Norms have the
statistics of the straight volume, or they would see corners that turn out of sight. Where escnn is
installed its `R3Conv` is measured in the same run; both are run by their filters and `conv3d`. At
the rotations that the grid has every layer must be exact, or the run ends.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from econv import Group, GroupConv3d, LiftConv3d
from econv.testing import rotate, smooth_field
from recording import Growing, origin

GROUP, ORDER = "I", 60
SMOOTHNESS = (1.0, 1.5, 2.0, 3.0)
SIZES = (3, 5)
STENCILS = ("isotropic", "central", "gaussian")
VOXELS, RADIUS = 29, 5.5
LAYERS = 4


class Element(NamedTuple):
    """How one element turns volumes, and the orientations of a field."""

    matrix: np.ndarray
    permutation: Tensor  # [order, order]

    def turn(self, x: Tensor) -> Tensor:
        """π of images, which have one channel, or of group features."""
        turned = rotate(x, self.matrix)
        if x.shape[1] == 1:
            return turned
        fields = turned.unflatten(1, (-1, ORDER))
        return torch.einsum("ba,nfa...->nfb...", self.permutation, fields).flatten(1, 2)

    @property
    def on_grid(self) -> bool:
        """Whether it maps voxels to voxels."""
        return bool((self.matrix == self.matrix.round()).all())


class Library(NamedTuple):
    """A way to make filters, and the elements of its group."""

    name: str
    elements: list[Element]
    filters: Callable[[bool, int], Tensor]
    """Of a lift or of a group convolution, of one field and of a size."""


def ours(stencils: str) -> Library:
    """Layers with these stencils."""
    group = Group(GROUP)
    elements = []
    for number, matrix in enumerate(group.matrices):
        permutation = torch.eye(ORDER, dtype=torch.float64)[group.relative[number].tolist()]
        elements.append(Element(np.asarray(matrix), permutation))

    def filters(lift: bool, size: int) -> Tensor:
        kind: Any = LiftConv3d if lift else GroupConv3d
        layer = kind(1, 1, group, stencils=stencils, size=size, dtype=torch.float64)
        made: Tensor = layer.filters().detach()
        return made

    return Library(f"econv, {stencils}", elements, filters)


def escnn() -> Library:
    """`R3Conv` between regular fields of the same group."""
    from escnn import gspaces, nn

    warnings.filterwarnings("ignore")
    space = gspaces.icoOnR3()
    regular, trivial = (nn.FieldType(space, [r]) for r in (space.regular_repr, space.trivial_repr))
    flip = np.diag([1.0, 1.0, -1.0])  # its z runs against the depth
    elements = []
    for element in space.fibergroup.elements:
        matrix = flip @ space.basespace_action(element) @ flip
        whole = matrix.round()
        matrix = (
            whole
            if np.abs(matrix - whole).max() < 1e-6
            else np.linalg.qr(matrix)[0] * np.sign(np.diagonal(np.linalg.qr(matrix)[1]))
        )
        permutation = torch.from_numpy(space.regular_repr(element).round())
        elements.append(Element(matrix, permutation.double()))
    made: dict[tuple[bool, int], Any] = {}

    def filters(lift: bool, size: int) -> Tensor:
        if (lift, size) not in made:
            types = (trivial if lift else regular, regular)
            made[lift, size] = nn.R3Conv(*types, size, padding=size // 2, bias=False).double()
        conv = made[lift, size]
        nn.init.generalized_he_init(conv.weights.data, conv.basisexpansion, cache=True)
        expanded: Tensor = conv.expand_parameters()[0].detach()
        return expanded

    return Library("escnn R3Conv", elements, filters)


def network(filters: list[Tensor], straight: Tensor) -> Callable[[Tensor], Tensor]:
    """The convolutions in a row; after each of several a norm of fields and SiLU."""
    statistics: list[tuple[Tensor, Tensor]] = []

    def run(x: Tensor) -> Tensor:
        for number, own in enumerate(filters):
            x = functional.conv3d(x, own, padding=own.shape[-1] // 2)
            if len(filters) == 1:
                break
            if len(statistics) == number:
                statistics.append((x.mean(), x.std()))
            mean, deviation = statistics[number]
            x = functional.silu((x - mean) / deviation)
        return x

    run(straight)
    return run


def ball() -> Tensor:
    """The part of a volume that no border reaches."""
    line = torch.arange(VOXELS, dtype=torch.float64) - (VOXELS - 1) / 2
    squares = line[:, None, None] ** 2 + line[:, None] ** 2 + line**2
    return (squares <= RADIUS**2).double()


@torch.no_grad()
def errors(
    library: Library, size: int, layers: int, sigma: float, seed: int, count: int
) -> tuple[list[float], float]:
    """At so many random elements, and at one that the grid has."""
    torch.manual_seed(seed)
    lifts = [layers > 1, *[False] * (layers - 1)]
    filters = [library.filters(lift, size) for lift in lifts]
    x = smooth_field(VOXELS, 1 if layers > 1 else ORDER, sigma, seed, dimension=3)
    run = network(filters, x)
    wanted, inside = run(x), ball()
    generator = np.random.default_rng(seed)
    others = [e for e in library.elements if not e.on_grid]
    exact = [e for e in library.elements if e.on_grid][1]
    chosen = [others[n] for n in generator.choice(len(others), count, replace=False)]
    found = []
    for element in [*chosen, exact]:
        turned = element.turn(wanted)
        difference = (run(element.turn(x)) - turned) * inside
        found.append(float(difference.norm() / (turned * inside).norm()))
    return found[:-1], found[-1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--elements", type=int, default=2, help="of each seed")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    libraries = [ours(stencils) for stencils in STENCILS]
    peers = {}
    if find_spec("escnn"):
        libraries.append(escnn())
        peers = {"escnn": version("escnn")}
    settings = {"group": GROUP, "voxels": VOXELS, "radius": RADIUS, "layers": LAYERS}
    settings |= {"seeds": given.seeds, "elements": given.elements, "peers": peers}
    head = {"schema": 1, **settings, **origin("cpu")}
    keys = ("layers", "library", "size", "sigma")
    record = Growing(given.json, head, "rows", lambda row: tuple(row[key] for key in keys))
    done = {record.key(row) for row in record.rows}
    for layers in (1, LAYERS):
        for size in given.sizes:
            for library in libraries:
                texts = []
                for sigma in SMOOTHNESS:
                    key = (layers, library.name, size, sigma)
                    if key in done:
                        continue
                    each, exact = [], 0.0
                    for seed in range(given.seeds):
                        own, at_grid = errors(library, size, layers, sigma, seed, given.elements)
                        each += own
                        exact = max(exact, at_grid)
                    if not exact < 1e-6:
                        raise ArithmeticError(f"{library.name} errs by {exact} on the grid")
                    error = float(np.mean(each))
                    record.keep({**dict(zip(keys, key, strict=True)), "error": error, "each": each})
                    texts.append(f"σ={sigma:g}: {error:.2g}")
                print(f"{layers} × {size}³, {library.name}: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
