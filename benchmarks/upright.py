"""Settings of the recipes for upright images, each judged on validation images that are turned.

    python benchmarks/upright.py --data mnist.npz --json outputs/upright.json base "epochs=5"

Every argument is one trial: changes of the recipe as `econv train --set` takes them, several joined
by semicolons, `recipe=NAME` among them for another one, or `base` for none. The trials run side by
side. Test images are not read: those that turn in the end are the validation images, which also
choose the epoch, upright.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from econv import data
from econv.recipes import recipe
from econv.train import run
from recording import Growing, origin


def changed(trial: str, epochs: int | None) -> tuple[str, dict[str, str]]:
    """The name of a recipe, and what is changed in it."""
    pairs = dict(pair.split("=", 1) for pair in trial.split(";") if "=" in pair)
    name = pairs.pop("recipe", "mnist_upright_p8")
    return name, pairs | ({"epochs": str(epochs)} if epochs else {})


def tried(job: dict[str, Any]) -> dict[str, Any]:
    """Train one trial, and judge it."""
    name, changes = changed(job["trial"], job["epochs"])
    chosen = recipe(name).with_changes(changes)
    found = data.load(chosen.dataset, source=job["data"], recreated=chosen.dataset == "mnist_rot")
    if job["images"]:
        few = [data.Split(s.x[: job["images"]], s.y[: job["images"]]) for s in _splits(found)]
        found = replace(found, train=few[0], validation=few[1])
    with tempfile.TemporaryDirectory() as folder:
        record = run(
            replace(chosen, minimum_seeds=1),
            job["seed"],
            data=replace(found, test=found.validation),
            device=job["device"],
            output=Path(folder) / "outputs",
            records=Path(folder) / "records",
            progress=False,
            **({"step": "graph", "precision": "bfloat16"} if job["device"] == "cuda" else {}),
        )
    errors = record.angle_errors or [record.test_error]
    return {
        "trial": job["trial"],
        "seed": job["seed"],
        "parameters": record.parameters,
        "mean": sum(errors) / len(errors),
        "worst": max(errors),
        "angle_errors": errors,
        "epochs": chosen.epochs,
        "seconds": record.seconds,
    }


def _splits(found: data.Dataset) -> tuple[data.Split, data.Split]:
    return found.train, found.validation


def _ask(trial: str, common: dict[str, Any]) -> dict[str, Any] | None:
    """What a trial in a process of its own found, if it came to an end."""
    job = json.dumps({"trial": trial, **common})
    command = [sys.executable, "-W", "ignore", __file__, "--job", job]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "trials", nargs="*", metavar="TRIAL", help="changes such as epochs=5;model_options.margin=6"
    )
    add("--data", type=Path, metavar="PATH", help="a folder or .npz with the images")
    add("--epochs", type=int, help="in place of the recipes'")
    add("--images", type=int, default=0, help="at most, of each split")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    add("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(tried(json.loads(args.job))))
        return
    common = {n: getattr(args, n) for n in ("epochs", "images", "seed", "device")}
    head = {**origin(args.device), "arguments": {**common}, "judged by": "validation images"}
    record = Growing(args.json, head, "rows", lambda row: (row["trial"], row["seed"]))
    common["data"] = None if args.data is None else str(args.data)
    with ThreadPoolExecutor(max(1, len(args.trials))) as pool:
        for found in as_completed(pool.submit(_ask, trial, common) for trial in args.trials):
            row = found.result()
            if row is not None:
                record.keep(row)
                print(f"{row['trial']}: {row['mean']:.2f}, worst {row['worst']:.2f}", flush=True)


if __name__ == "__main__":
    main()
