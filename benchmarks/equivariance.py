"""How far layers are from equivariance at angles that the pixel grid does not have.

    python benchmarks/equivariance.py
    python benchmarks/equivariance.py --install-escnn --json benchmarks/results/equivariance.json
    python benchmarks/equivariance.py --add e2cnn --json benchmarks/results/equivariance.json

Smooth random fields (white noise blurred by σ pixels) are turned by quintic splines; what counts is
‖f(πx) − πf(x)‖ / ‖πf(x)‖ inside a central disc that no border reaches, in float64, mean over seeds.
Three tables: one layer side by side with escnn's on the same fields, one layer of other groups,
and six layers with batch norm and ReLU, where errors compound. `--add` measures the layer of one
library alone, in an environment that has it, and puts its row into a record that there is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import econv
from econv import GroupBatchNorm2d, GroupConv2d, LiftConv2d
from econv.basis import filter_basis
from econv.files import write_atomically
from econv.testing import equivariance_error, smooth_field, transform
from recording import stamp

SMOOTHNESS = (1.0, 1.5, 2.0, 3.0)
STENCILS: dict[str, dict[str, Any]] = {
    "central 5×5": {"stencils": "central", "size": 5},
    "gaussian 5×5": {"stencils": "gaussian", "size": 5},
    "isotropic 5×5": {"stencils": "isotropic", "size": 5},
    "isotropic 7×7": {"stencils": "isotropic", "size": 7},
}
OURS = "isotropic 5×5"
PEERS = {"escnn": "escnn R2Conv 5×5", "e2cnn": "e2cnn R2Conv 5×5"}
ESCNN = PEERS["escnn"]

PIXELS, BORDER = 65, 12  # the disc has the radius PIXELS / 2 − BORDER
# Six layers of 7×7 carry what lies outside of the image 18 pixels inwards.
DEPTH, DEEP_FIELDS, DEEP_PIXELS, DEEP_BORDER = 6, 6, 81, 22
DEEP_SMOOTHNESS = (1.0, 2.0, 3.0)
DEEP_STENCILS = ("central 5×5", "isotropic 5×5", "isotropic 7×7")

Layer = Callable[[Tensor], Tensor]


def random_layer(group: str, fields: int, seed: int, options: dict[str, Any]) -> GroupConv2d:
    """Canonical filters w ~ N(0, 1), β = w·T⁻¹: the distribution of the paper's initialisation."""
    layer = GroupConv2d(fields, fields, group, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(1000 + seed)
    w = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
    canonical = filter_basis(group, "paper", "central").canonical
    layer.set_coefficients(w @ torch.tensor(np.array(canonical)))
    return layer


def peer_layer(library: str, fields: int, seed: int) -> Layer:
    """R2Conv between regular fields of C8 with its own initialisation, as a function of a tensor.

    Channels are field · 8 + rotation and rotations run anticlockwise, as here; that a quarter turn
    comes out at rounding shows that both are read right.
    """
    gspaces = importlib.import_module(f"{library}.gspaces")
    modules = importlib.import_module(f"{library}.nn")
    torch.manual_seed(seed)
    space = gspaces.rot2dOnR2(8) if library == "escnn" else gspaces.Rot2dOnR2(8)
    kind = modules.FieldType(space, fields * [space.regular_repr])
    layer = modules.R2Conv(kind, kind, 5, padding=2, bias=False)
    if library == "e2cnn":  # whose layers have no .double(): their filters have
        filters = layer.expand_parameters()[0].detach().double()
        return lambda x: nn.functional.conv2d(x, filters, padding=2)
    layer = layer.double()

    def run(x: Tensor) -> Tensor:
        result: Tensor = layer(modules.GeometricTensor(x, kind)).tensor
        return result

    return run


def one_layer(
    make: Callable[[int], Layer], group: str, fields: int, element: int, seeds: int
) -> list[float]:
    """The mean error at each smoothness."""
    channels = fields * econv.Group(group).order
    layers = [make(seed) for seed in range(seeds)]
    return [
        sum(
            equivariance_error(
                layer,
                smooth_field(PIXELS, channels, sigma, seed),
                element,
                group,
                input_kind="regular",
                output_kind="regular",
                margin=BORDER / PIXELS,
            )
            for seed, layer in enumerate(layers)
        )
        / seeds
        for sigma in SMOOTHNESS
    ]


def two_digits(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}"


def table(rows: dict[str, list[float]], against: str, columns: list[str]) -> None:
    """Errors, and how many times that of one row they are."""
    width = max(map(len, rows)) + 1
    head = "".join(f"{c:>10}" for c in columns)
    print(f"{'':<{width}}{head}    times {against}")
    for name, errors in rows.items():
        line = "".join(f"{two_digits(error):>10}" for error in errors)
        ratios = [e / o for e, o in zip(errors, rows[against], strict=True)]
        relative = "" if name == against else "".join(f"{two_digits(r):>7}" for r in ratios)
        print(f"{name:<{width}}{line}  {relative}".rstrip())
    print()


def side_by_side(seeds: int, with_escnn: bool) -> dict[str, Any]:
    group, fields = "p8", 16
    print(f"One layer, {fields}→{fields} fields of p8 (C8), turned by 45°, {PIXELS}×{PIXELS}")
    makers: dict[str, Callable[[int], Layer]] = {
        name: lambda seed, options=options: random_layer(group, fields, seed, options)
        for name, options in STENCILS.items()
    }
    if with_escnn:
        makers[ESCNN] = lambda seed: peer_layer("escnn", fields, seed)
    rows = {name: one_layer(make, group, fields, 1, seeds) for name, make in makers.items()}
    table(rows, OURS, [f"σ={sigma:g}" for sigma in SMOOTHNESS])
    quarter = {
        name: max(one_layer(makers[name], group, fields, 2, 1))
        for name in (OURS, ESCNN)
        if name in makers
    }
    listed = ", ".join(f"{name} {error:.0e}" for name, error in quarter.items())
    print(f"Quarter turns of the same layers, at most: {listed}")
    if with_escnn:
        print("(escnn samples its filters in float32)")
        if quarter[ESCNN] > 1e-5:
            sys.exit("escnn's quarter turns are not at rounding: its conventions are misread here")
        lower = all(o < e for o, e in zip(rows[OURS], rows[ESCNN], strict=True))
        if not lower:
            sys.exit(f"{OURS} is not lower than escnn at every σ")
        print(f"{OURS} is lower than escnn at every σ")
    else:
        print("escnn is not installed here, so its row is missing; --install-escnn installs it")
    print()
    return {
        "fields": fields,
        "group": group,
        "degrees": 45,
        "errors": rows,
        "quarter_turn": quarter,
    }


def add_row(library: str, file: Path) -> None:
    """Measure the layer of one library as a record was, and write its row into that record."""
    record = json.loads(file.read_text(encoding="utf-8"))
    found, seeds = record["one_layer"], record["settings"]["seeds"]

    def make(seed: int) -> Layer:
        return peer_layer(library, found["fields"], seed)

    quarter = max(one_layer(make, found["group"], found["fields"], 2, 1))
    if quarter > 1e-5:
        sys.exit(f"quarter turns of {library} are off by {quarter:.0e}: misread here")
    row = rounded(one_layer(make, found["group"], found["fields"], 1, seeds))
    found["errors"][PEERS[library]] = row
    found["quarter_turn"][PEERS[library]] = rounded(quarter)
    versions = {name: importlib.metadata.version(name) for name in (library, "torch", "numpy")}
    record.setdefault("added", {})[library] = {**versions, "python": platform.python_version()}
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_atomically(file, text.encode())
    print(f"{PEERS[library]}: {', '.join(two_digits(error) for error in row)}")


def other_groups(seeds: int) -> dict[str, Any]:
    fields = 4
    found: dict[str, Any] = {"fields": fields}
    for group, element, degrees in (("p8", 1, 45.0), ("p16", 1, 22.5), ("p12", 1, 30.0)):
        print(f"One layer, {fields}→{fields} fields of {group}, turned by {degrees:g}°")
        rows = {
            name: one_layer(
                lambda seed, group=group, options=options: random_layer(
                    group, fields, seed, options
                ),
                group,
                fields,
                element,
                seeds,
            )
            for name, options in STENCILS.items()
            if name in DEEP_STENCILS
        }
        table(rows, OURS, [f"σ={sigma:g}" for sigma in SMOOTHNESS])
        found[group] = {"degrees": degrees, "errors": rows}
    return found


class Network(nn.Module):
    """A lift and five group convolutions, each followed by batch norm and ReLU."""

    def __init__(self, group: str, fields: int, options: dict[str, Any]) -> None:
        super().__init__()
        first: nn.Module = LiftConv2d(1, fields, group, dtype=torch.float64, **options)
        rest = [
            GroupConv2d(fields, fields, group, dtype=torch.float64, **options)
            for _ in range(DEPTH - 1)
        ]
        self.convolutions = nn.ModuleList([first, *rest])
        # With momentum 1 one pass in training mode sets the running statistics.
        self.norms = nn.ModuleList(
            GroupBatchNorm2d(fields, group, momentum=1.0, dtype=torch.float64) for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """The output of each layer's batch norm, before ReLU."""
        features = []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            features.append(norm(convolution(x)))
            x = torch.relu(features[-1])
        return features


@torch.no_grad()
def deep_errors(options: dict[str, Any], sigma: float, seed: int) -> dict[str, list[float]]:
    """The error of each layer, before its ReLU and after."""
    torch.manual_seed(seed)
    network = Network("p8", DEEP_FIELDS, options)
    image = smooth_field(DEEP_PIXELS, 1, sigma, seed)
    network.train()
    network(image)
    network.eval()
    straight, turned = network(image), network(transform(image, "p8", 1))
    line = torch.arange(DEEP_PIXELS, dtype=torch.float64) - (DEEP_PIXELS - 1) / 2
    disc = line[:, None] ** 2 + line**2 <= (DEEP_PIXELS / 2 - DEEP_BORDER) ** 2

    def error(last: Tensor, first: Tensor) -> float:
        expected = transform(last, "p8", 1, "regular") * disc
        return float((first * disc - expected).norm() / expected.norm())

    pairs = list(zip(straight, turned, strict=True))
    return {
        "before": [error(last, first) for last, first in pairs],
        "after": [error(last.relu(), first.relu()) for last, first in pairs],
    }


def deep(seeds: int) -> dict[str, Any]:
    print(
        f"{DEPTH} layers of p8 with batch norm and ReLU, {DEEP_FIELDS} fields, 45°, "
        f"{DEEP_PIXELS}×{DEEP_PIXELS}, at the output of each batch norm\n"
        "ReLU makes kinks, which no grid and no interpolation turns exactly: from layer 2 on they "
        "are in every row."
    )
    found: dict[str, Any] = {"before": {}, "after": {}}
    for sigma in DEEP_SMOOTHNESS:
        rows: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
        for name in DEEP_STENCILS:
            runs = [deep_errors(STENCILS[name], sigma, seed) for seed in range(seeds)]
            for place, means in rows.items():
                columns = zip(*(run[place] for run in runs), strict=True)
                means[name] = [sum(column) / seeds for column in columns]
        print(f"σ = {sigma:g}")
        table(rows["before"], OURS, [f"layer {i + 1}" for i in range(DEPTH)])
        for place, means in rows.items():
            found[place][f"{sigma:g}"] = means
    return {
        "group": "p8",
        "degrees": 45,
        "fields": DEEP_FIELDS,
        "errors_before_relu_by_smoothness": found["before"],
        "errors_after_relu_by_smoothness": found["after"],
    }


def install_escnn() -> None:
    """Install escnn into the environment that runs this, or say what is missing."""
    if importlib.util.find_spec("escnn") is not None:
        return
    print(
        "Installing escnn with pip into this environment. It needs a Fortran compiler (its "
        "dependency py3nj is compiled), a Python that lie_learn has wheels for, and NumPy 1, "
        "which pip may put in the place of NumPy 2.",
        flush=True,
    )
    if shutil.which("gfortran") is None:
        sys.exit("no gfortran was found: install one (Debian: apt install gfortran) and try again")
    if subprocess.run([sys.executable, "-m", "pip", "install", "escnn"]).returncode:
        sys.exit("escnn could not be installed: see pip's messages above")
    importlib.invalidate_caches()
    # NumPy may have been replaced under this process: start again with what is installed now.
    arguments = [argument for argument in sys.argv if argument != "--install-escnn"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def rounded(value: Any) -> Any:
    """The same with 4 significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="layers and fields (%(default)s)")
    parser.add_argument("--deep-seeds", type=int, default=2, help="networks (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--install-escnn", action="store_true", help="install escnn if it is absent"
    )
    parser.add_argument("--add", choices=PEERS, help="measure this library alone, into --json")
    args = parser.parse_args(arguments)
    if args.add and not (args.json and args.json.exists()):
        parser.error("--add: --json has to name a record that there is")
    for name in ("seeds", "deep_seeds", "threads"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option}: expected at least 1; got {getattr(args, name)}")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: no such folder: {args.json.parent}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.install_escnn:
        install_escnn()
    with_escnn = importlib.util.find_spec("escnn") is not None
    torch.set_num_threads(args.threads)
    if args.add:
        add_row(args.add, args.json)
        return
    start = time.perf_counter()
    print(f"Equivariance errors, mean over {args.seeds} seeds ({args.deep_seeds} for networks)\n")
    record = {
        "one_layer": side_by_side(args.seeds, with_escnn),
        "groups": other_groups(args.seeds),
        "six_layers": deep(args.deep_seeds),
    }
    print(f"{time.perf_counter() - start:.0f} s")
    if args.json:
        settings = {
            "smoothness": list(SMOOTHNESS),
            "pixels": PIXELS,
            "disc_radius": PIXELS / 2 - BORDER,
            "seeds": args.seeds,
            "deep_pixels": DEEP_PIXELS,
            "deep_disc_radius": DEEP_PIXELS / 2 - DEEP_BORDER,
            "deep_seeds": args.deep_seeds,
        }
        versions = {
            "econv": econv.__version__,
            "escnn": importlib.metadata.version("escnn") if with_escnn else None,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }
        content = rounded({**stamp(), **record, "settings": settings, "versions": versions})
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomically(args.json, text.encode())


if __name__ == "__main__":
    main()
