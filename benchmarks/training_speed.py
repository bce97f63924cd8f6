"""Training from end to end: images a second with each engine, in one run.

Whole steps of a recipe (augmentation, forward, backward, optimiser, moving average) on pictures of
noise of the data's size, as `econv train --step graph` runs them: every engine is captured as a
CUDA graph of its own, and each runs some steps, isolated, in several rounds. Recipes that the file
already holds, of the same machine, stay in it with the revision that they were measured by.

    python benchmarks/training_speed.py --json benchmarks/results/training_cuda.json
    python benchmarks/training_speed.py --device cpu --step eager --batch 4   # that it runs
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import econv
from econv.data import Dataset, Split
from econv.files import write_atomically
from econv.recipes import RECIPES, Recipe
from econv.train.execution import Execution, convolution_precision
from econv.train.processes import Processes
from econv.train.trainer import Trainer
from recording import stamp

ENGINES = ("dense", "spectral", "auto")
# The paper's networks, with nine operators on 5×5 pixels, and ours, with six on 3×3.
NAMES = (
    *("cifar10_resnet44_p8_paper", "cifar10_resnet44_p8"),
    *("cifar10_resnet26_p8_paper", "cifar10_resnet26_p8"),
)


def noise(recipe: Recipe, count: int, device: torch.device) -> Dataset:
    """Pictures of CIFAR's size."""
    make = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=make)
    split = Split(images, torch.randint(0, 10, (count,), generator=make))
    return Dataset.of(recipe.dataset, split, split, split, classes=10).to(device)


def measure(recipe: Recipe, steps: int, rounds: int, execution: Execution) -> dict[str, Any]:
    processes = Processes(0, 1, execution.device)
    data = noise(recipe, recipe.batch_size * steps, execution.device)
    trainers: dict[str, Trainer] = {}
    ran: dict[str, list[str]] = {}
    for engine in ENGINES:
        with econv.engine(engine) as chosen:
            trainers[engine] = Trainer(recipe, 0, data.train, data, execution, processes)
        ran[engine] = chosen  # a graph that is replayed adds nothing to what was captured
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for number in range(rounds + 1):
        for engine, trainer in trainers.items():
            start = time.perf_counter()
            with econv.engine(engine) as chosen:
                trainer.epoch(number, lambda *_: None)  # ends with the losses, which waits
            ran[engine] = chosen or ran[engine]
            if number:  # the first round is for caches
                times[engine].append(time.perf_counter() - start)
    images = recipe.batch_size * steps
    speed = {engine: images / statistics.median(t) for engine, t in times.items()}
    layers = [
        m
        for m in trainers["dense"].model.modules()
        if isinstance(m, econv.GroupConv2d) and m.basis.size > 1
    ]
    return {
        "recipe": recipe.name,
        "operators": sorted(
            {
                f"{layer.weight.shape[-1]} on {layer.basis.size}×{layer.basis.size}"
                for layer in layers
            }
        ),
        "parameters": sum(p.numel() for p in trainers["dense"].model.parameters()),
        "batch": recipe.batch_size,
        "images_per_second": {e: float(f"{value:.4g}") for e, value in speed.items()},
        "ran": {e: {n: ran[e].count(n) for n in sorted(set(ran[e]))} for e in ENGINES},
        "losses_of_the_last_step": {
            engine: round(float(trainer.losses[-1]), 4) for engine, trainer in trainers.items()
        },
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=NAMES, choices=sorted(RECIPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--step", default="graph", choices=("eager", "graph", "compile"))
    parser.add_argument("--batch", type=int, help="instead of the recipe's")
    parser.add_argument("--steps", type=int, default=10, help="of a measurement (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    execution = Execution(device, args.step, "bfloat16" if gpu else "float32", gpu)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if gpu else device.type,
        "step": args.step,
        "precision": execution.precision,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    runs: dict[str, dict[str, Any]] = {}
    if args.json and args.json.exists():
        before = json.loads(args.json.read_text(encoding="utf-8"))
        if all(before.get(key) == value for key, value in record.items()):
            runs = {run["recipe"]: run for run in before["runs"]}
    for name in args.recipes:
        changes = {"batch_size": str(args.batch)} if args.batch else {}
        with convolution_precision(execution):
            found = measure(RECIPES[name].with_changes(changes), args.steps, args.rounds, execution)
        runs[name] = {**found, **stamp()}
        speed = found["images_per_second"]
        print(
            f"{name}, operators {', '.join(found['operators'])}: "
            + ", ".join(f"{engine} {value:,.0f}" for engine, value in speed.items())
            + f" images/s; spectral/dense {speed['spectral'] / speed['dense']:.2f}",
            flush=True,
        )
        if args.json:  # as far as it has come
            text = json.dumps({**record, "runs": list(runs.values())}, indent=1) + "\n"
            write_atomically(args.json, text.encode())


if __name__ == "__main__":
    main()
