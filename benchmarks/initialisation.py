"""How a deep network at initialisation changes the size of its features: ours, the paper's, He's.

    python benchmarks/initialisation.py

White noise goes through 50 layers of convolution and ReLU, 32 fields, circular padding. The table
gives the growth of the second moment per layer (geometric mean over layers and seeds, and the
range of the seeds' own means), and what it comes to after all layers. 1 is ideal.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from deep_growth import group_layer, growth, plain_layer
from econv import Group

GROUPS = ("p8", "p6m")
STENCILS = ("central", "isotropic", "gaussian")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fields", type=int, default=32)
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--pixels", type=int, default=12)
    options = parser.parse_args()

    rows = []
    for group in GROUPS:
        for stencils in STENCILS:
            for init, name in (("relu", "econv's default"), ("paper", "the paper's scheme")):
                maker = group_layer(group, options.fields, stencils=stencils, init=init)
                rows.append((f"{group}, {stencils}, {name}", *maker))
        channels = options.fields * Group(group).order
        for size in (5, 3):
            maker = plain_layer(channels, size)
            rows.append((f"plain CNN {size}×{size}, {channels} channels, He", *maker))

    print(
        f"{options.depth} layers, {options.seeds} seeds, {options.fields} fields, "
        f"{options.pixels}×{options.pixels} pixels\n"
    )
    print("| layer | growth per layer | range over seeds | after all layers | seconds |")
    print("|---|---|---|---|---|")
    for name, make, channels in rows:
        start = time.perf_counter()
        means = growth(
            make,
            channels,
            depth=options.depth,
            seeds=range(options.seeds),
            pixels=options.pixels,
        )
        seconds = time.perf_counter() - start
        logarithm = sum(map(math.log, means)) / len(means)
        print(
            f"| {name} | {math.exp(logarithm):.3f} | {min(means):.3f} to {max(means):.3f} "
            f"| {math.exp(options.depth * logarithm):.1e} | {seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
