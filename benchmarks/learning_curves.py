"""Test error over the number of labelled images: what equivariance buys when labels are few.

    python benchmarks/learning_curves.py --source DATA --rows outputs/learning_curves
    python benchmarks/learning_curves.py --source DATA --rows outputs/learning_curves --part 2/8
    python benchmarks/learning_curves.py --rows outputs/learning_curves --collect
    python benchmarks/learning_curves.py --draw docs/pictures/learning_curves.png

MNIST-rot with its first 100 to 12,000 training images, equally many of each class, and the recipes
of Table 1: a CNN, the same with training images turned at random, and PDO-eConvs of p4 and p8, of
about as many parameters. Every run takes the same number of steps, whatever the images; nothing is
selected: all is fixed beforehand, the last moving average counts, and the test split is read once.

Each run leaves a file of its own in the folder of rows: runs that are there are not made again, and
several processes share the work by ``--part``. ``--collect`` makes the record of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from econv import train
from econv.data import Dataset, Split, load, permutation
from econv.files import atomic, write_atomically
from econv.recipes import RECIPES, Recipe
from recording import Growing, origin

COUNTS = (100, 300, 1_000, 3_000, 12_000)
STEPS = 3_000
NETWORKS = {
    "CNN": ("mnist_rot_cnn", False),
    "CNN, images turned": ("mnist_rot_cnn", True),
    "p4": ("mnist_rot_p4", False),
    "p8": ("mnist_rot_p8", False),
}
"""The recipe of each, and whether training images are turned."""
STYLES = {
    "CNN": ("#6b7280", "o"),
    "CNN, images turned": ("#b45309", "s"),
    "p4": ("#2563eb", "^"),
    "p8": ("#047857", "D"),
}
RESULT = Path(__file__).parent / "results" / "learning_curves.json"


def chosen(data: Dataset, count: int, seed: int) -> Dataset:
    """The data set with so many training images, as equally many of each class as it goes.

    Validation images are some of these: they are told during training and select nothing.
    """
    whole = data.with_validation_in_training().train
    order = permutation(len(whole), seed, 0, "cpu")
    ranks = torch.empty_like(order)  # the how-manieth of its class each image is, in that order
    classes = whole.y[order]
    for label in range(data.classes):
        mine = (classes == label).nonzero()[:, 0]
        ranks[mine] = torch.arange(len(mine))
    kept = order[ranks.argsort(stable=True)[:count]]
    split = Split(whole.x[kept], whole.y[kept])
    few = Split(split.x[:100], split.y[:100])
    return Dataset.of(
        data.name, split, few, data.test, data.classes, data.recreated, data.unverified
    )


def recipe_of(network: str, count: int, steps: int = STEPS) -> Recipe:
    """The recipe of Table 1 for so many images: as many epochs as make that number of steps."""
    name, turned = NETWORKS[network]
    recipe = RECIPES[name]
    in_epoch = max(1, count // recipe.batch_size)
    epochs = -(-steps // in_epoch)
    return dataclasses.replace(
        recipe,
        name=f"{name}{'_turned' * turned}_{count}",
        epochs=epochs,
        evaluate_every=epochs,  # once: nothing is selected
        warmup_epochs=0.03 * epochs,
        augmentation=(("rotate", True),) if turned else (),
        retrain_on_all=False,
    )


def measured(
    network: str, count: int, seed: int, data: Dataset, options: argparse.Namespace
) -> dict[str, Any]:
    started = time.perf_counter()
    recipe = recipe_of(network, count, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        record = train.run(
            recipe,
            seed,
            data=chosen(data, count, seed),
            device=options.device,
            output=Path(folder) / "outputs",
            records=Path(folder) / "records",
            checkpoint_every=10**6,
            checkpoint_minutes=60.0,
            precision=options.precision,
            progress=not options.quiet,
        )
    return {
        "network": network,
        "images": count,
        "seed": seed,
        "test_error": record.test_error,
        "training_loss": record.epochs[-1]["loss"],
        "parameters": record.parameters,
        "epochs": recipe.epochs,
        "steps": options.steps,
        "dataset": record.dataset,
        "recreated": record.recreated,
        "data_sha256": record.data_sha256,
        "predictions_sha256": record.predictions_sha256,
        "precision": record.precision,
        "device": record.device,
        "revision": record.revision,
        "source_sha256": record.source_sha256,
        "seconds": time.perf_counter() - started,
        "finished": record.finished,
    }


def place(folder: Path, network: str, count: int, seed: int) -> Path:
    word = network.replace(", images ", "_").replace(" ", "_")
    return folder / f"{word}-{count}-{seed}.json"


def wanted(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """The runs of this process, the longest first spread over all of them."""
    every = [
        (network, count, seed)
        for seed in range(options.seeds)
        for count in options.counts
        for network in options.networks
    ]
    part, parts = (int(number) for number in options.part.split("/"))
    if not 1 <= part <= parts:
        raise SystemExit(f"expected --part as 1/8 to 8/8; got {options.part}")
    return every[part - 1 :: parts]


def collect(folder: Path, path: Path) -> dict[str, Any]:
    """One record of all rows in a folder."""
    found = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))]
    order = {name: number for number, name in enumerate(NETWORKS)}
    found.sort(key=lambda row: (order[row["network"]], row["images"], row["seed"]))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    growing = Growing(path, {"origin": origin(kind)}, "rows", lambda r: _key(r))
    growing.rows = found
    growing.write()
    return {"rows": found}


def _key(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["network"], row["images"], row["seed"]


def means(rows: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, float, int]]:
    """Mean, deviation over the seeds, and their number, by network and images."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        found.setdefault((row["network"], row["images"]), []).append(row["test_error"])
    return {
        key: (statistics.fmean(e), statistics.stdev(e) if len(e) > 1 else 0.0, len(e))
        for key, e in found.items()
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Error over images, a line for every network, the deviation as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    panel = figure.subplots()
    found = means(rows)
    for network, (colour, marker) in STYLES.items():
        own = sorted((count, *found[name, count]) for name, count in found if name == network)
        if own:
            counts, errors, spread, _ = zip(*own, strict=True)
            panel.errorbar(
                counts, errors, spread, label=network, color=colour, marker=marker, ms=5, capsize=3
            )
    panel.set(xscale="log", yscale="log", xlabel="training images", ylabel="test error, %")
    panel.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
    panel.set_yticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    panel.minorticks_off()
    panel.grid(color="0.9")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=100, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--rows", type=Path, help="the folder of the runs' files")
    add("--source", type=Path, help="a folder or .npz with MNIST-rot")
    add("--recreated", action="store_true", help="as econv train has it")
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    add("--counts", nargs="+", type=int, default=list(COUNTS))
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=STEPS)
    add("--part", default="1/1", help="of how many processes this one is which")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", help="as econv train has it")
    add("--quiet", action="store_true")
    add("--collect", action="store_true", help="make the record of the rows")
    add("--json", type=Path, default=RESULT, help="the record")
    add("--draw", type=Path, metavar="PICTURE", help="draw the record")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.json.read_text(encoding="utf-8"))["rows"], options.draw)
        return
    if options.rows is None:
        parser.error("expected --rows FOLDER, where every run leaves a file")
    if options.collect:
        print(len(collect(options.rows, options.json)["rows"]), "rows:", options.json)
        return
    data = None
    for network, count, seed in wanted(options):
        file = place(options.rows, network, count, seed)
        if file.exists():
            continue
        if data is None:
            data = load("mnist_rot", source=options.source, recreated=options.recreated)
        row = measured(network, count, seed, data, options)
        write_atomically(file, (json.dumps(row) + "\n").encode())
        print(
            f"{network}, {count} images, seed {seed}: {row['test_error']:.2f} %, "
            f"{row['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
