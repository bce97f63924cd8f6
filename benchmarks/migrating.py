"""escnn's code and ours of docs/migrating.md, side by side: shapes, and errors when an image turns.

    python benchmarks/migrating.py --json benchmarks/results/migrating.json

Runs the page's own code in an environment that has escnn too (compatibility.py says how to make
it). A smooth random image is turned; ‖f(πx) − πf(x)‖ / ‖πf(x)‖, mean over seeds.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from econv.files import write_atomically
from econv.lab import windowed
from econv.testing import equivariance_error, smooth_field
from recording import stamp

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrating.md"
RESULTS = Path(__file__).resolve().parent / "results"
LIBRARIES = ("escnn", "econv")
ANGLES = {"90": 2, "45": 1}  # degrees, and which element of p8 that is
PIXELS, SMOOTHNESS, SEEDS = 65, 2.0, 3
KINDS = {
    "A layer": "regular",
    "A network": "scalar",
    "Vectors out of an image": "vector",
    "A classifier": "invariant",
    "Reflections first, rotations later": "regular",
}
"""What each code of the page makes."""


def codes(text: str) -> dict[str, dict[str, str]]:
    """The code of each library under each heading that has tabs."""
    found: dict[str, dict[str, str]] = {}
    for title, section in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", text, re.M | re.S):
        tabs = re.findall(r'^=== "(\w+)"\n\n    ```py\n(.*?)^    ```$', section, re.M | re.S)
        if tabs:
            found[title] = {name: textwrap.dedent(code) for name, code in tabs}
    return found


def function(code: str) -> Callable[[Tensor], Tensor]:
    """What a code makes of ``x``: all but its last line runs once, here, with weights by chance."""
    *before, last = ast.parse(code).body
    names: dict[str, Any] = {}
    exec(compile(ast.Module(before, []), str(PAGE), "exec"), names)
    assert isinstance(last, ast.Assign)
    value = compile(ast.Expression(last.value), str(PAGE), "eval")

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return eval(value, {**names, "x": x})

    return run


def measure(code: str, kind: str, seeds: int = SEEDS) -> dict[str, Any]:
    """The shape of ``y``, and its error at each angle."""
    errors: dict[str, list[float]] = {angle: [] for angle in ANGLES}
    for seed in range(seeds):
        torch.manual_seed(seed)
        run = function(code)
        # Faded towards the corners, which would leave the image: a classifier sees all of it.
        x = windowed(smooth_field(PIXELS, 3, SMOOTHNESS, seed, dtype=torch.float32))
        kinds = {"input_kind": "scalar", "output_kind": kind}
        for angle, element in ANGLES.items():
            errors[angle].append(equivariance_error(run, x, element, "p8", **kinds))
    shape = list(run(x).shape)
    return {"shape": shape, "errors": {angle: sum(e) / seeds for angle, e in errors.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args()
    found: dict[str, Any] = {
        **stamp(),
        "versions": {name: importlib.metadata.version(name) for name in ("escnn", "torch")},
        "pixels": PIXELS,
        "smoothness": SMOOTHNESS,
        "seeds": SEEDS,
        "codes": {
            title: {name: measure(code, KINDS[title]) for name, code in tabs.items()}
            for title, tabs in codes(PAGE.read_text(encoding="utf-8")).items()
        },
    }
    for title, row in found["codes"].items():
        print(title, json.dumps(row))
        if row["escnn"]["shape"] != row["econv"]["shape"]:
            raise SystemExit(f"{title}: the shapes differ: {row}")
    if options.json:
        write_atomically(options.json, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
