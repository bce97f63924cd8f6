"""Trained on upright digits, tested at every angle: econv, an ordinary CNN and escnn.

    python benchmarks/every_angle.py --python ../peers/bin/python --json outputs/every_angle.json

Each network has the layers of the recipe `digits_upright_p8` and about as many parameters, and is
built as its library documents it: econv with SiLU, blurs and the mean over orientations, escnn with
ReLU, antialiased pooling, `GroupPooling` and images of an odd size. All are trained alike on 3,000
upright digits. A thousand others choose the learning rate, with the first seed, and the epoch; the
last thousand are turned by 24 angles, with quintic splines, and read once.

What interpolation itself costs is measured twice. One more network is trained on images that were
turned by a full turn in some steps: they are upright, and as blurred as images that turned. And
every network is tested on upright images that were turned so.

The time of a training step is that over the CNN's, interleaved in one process. On idle cores all of
it takes about half an hour. How to make the environment of escnn, and what `--python` means: see
compatibility.py; without it, its row is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve()
ANGLES = tuple(range(0, 360, 15))
OURS, TWIN, PEER = "econv, p8", "CNN", "escnn, C8"
BLURRED = "econv, p8, images that made a full turn"
BATCH = 50

# ------------------------------------------------------------------ what runs in each environment


def network(name: str, layout: dict[str, Any]) -> nn.Module:
    """The network of that name; its widths in channels or regular fields are in the layout."""
    torch.manual_seed(layout["seed"])
    if name == TWIN:
        return _cnn(layout["twin"], layout["pooled_after"], layout["margin"])
    if name == PEER:
        return _escnn(layout["peer"], layout["pooled_after"], layout["margin"])
    from econv import create_model

    return create_model("convnet6_p8", **layout["ours"])


def _cnn(widths: list[int], pooled_after: list[int], margin: int) -> nn.Module:
    """The CNN twin, in plain torch, so that every environment can build it."""
    layers: list[nn.Module] = [nn.ReplicationPad2d(margin)]
    for number, (before, after) in enumerate(zip([1, *widths], widths, strict=False), start=1):
        layers += [nn.Conv2d(before, after, 3, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2) if number in pooled_after else nn.Dropout(0.1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class _Escnn(nn.Module):
    """Layers of escnn between plain tensors."""

    def __init__(self, widths: list[int], pooled_after: list[int], margin: int) -> None:
        super().__init__()
        from escnn import gspaces
        from escnn import nn as enn

        space = gspaces.rot2dOnR2(8)
        before = enn.FieldType(space, [space.trivial_repr])
        self.wrap = lambda x, kind=before: enn.GeometricTensor(x, kind)
        # Even sizes have no pixel in the centre, which its strided pooling needs.
        self.pad = nn.ReplicationPad2d((margin, margin + 1, margin, margin + 1))
        layers = []
        for number, count in enumerate(widths, start=1):
            after = enn.FieldType(space, count * [space.regular_repr])
            layers += [
                enn.R2Conv(before, after, 5, padding=1, bias=False),
                enn.InnerBatchNorm(after),
                enn.ReLU(after),
                enn.PointwiseAvgPoolAntialiased2D(after, sigma=0.66, stride=2)
                if number in pooled_after
                else enn.PointwiseDropout(after, 0.1),
            ]
            before = after
        self.layers = enn.SequentialModule(*layers, enn.GroupPooling(before))
        self.classifier = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(self.wrap(self.pad(x))).tensor
        scores: Tensor = self.classifier(found.mean((2, 3)))
        return scores


def _escnn(widths: list[int], pooled_after: list[int], margin: int) -> nn.Module:
    return _Escnn(widths, pooled_after, margin)


def count(made: nn.Module) -> int:
    return sum(p.numel() for p in made.parameters())


def train(made: nn.Module, data: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """One cycle of the rate; the weights of the epoch that knows the validation digits best."""
    x, y = data["full turn" if job["network"] == BLURRED else "upright"], data["classes"]
    batches, start = len(x) // BATCH, time.process_time()
    optimiser = torch.optim.AdamW(made.parameters(), lr=job["rate"], weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, job["rate"], total_steps=job["epochs"] * batches, pct_start=0.1
    )
    drawn = torch.Generator().manual_seed(job["seed"])
    best: tuple[float, float] | None = None
    kept: dict[str, Tensor] = {}
    history = []
    for _ in range(job["epochs"]):
        made.train()
        for batch in torch.randperm(len(x), generator=drawn)[: batches * BATCH].split(BATCH):
            optimiser.zero_grad()
            scores = made(x[batch])
            functional.cross_entropy(scores, y[batch], label_smoothing=0.05).backward()
            optimiser.step()
            schedule.step()
        scores = answers(made, data["validation"])
        error = percent_wrong(scores, data["validation classes"])
        loss = float(functional.cross_entropy(scores, data["validation classes"]))
        history.append(error)
        if best is None or (error, loss) < best:
            best = (error, loss)
            made.train()  # escnn's layers have other tensors in eval mode
            kept = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    made.train()
    made.load_state_dict(kept)
    assert best is not None
    seconds = time.process_time() - start
    return {"validation_error": best[0], "history": history, "seconds": seconds}


@torch.no_grad()
def answers(made: nn.Module, x: Tensor) -> Tensor:
    made.eval()
    return torch.cat([made(part) for part in x.split(250)])


def percent_wrong(scores: Tensor, y: Tensor) -> float:
    return 100 * int((scores.argmax(1) != y).sum()) / len(y)


def step_over_the_twins(made: nn.Module, layout: dict[str, Any], data: dict[str, Any]) -> float:
    """The median time of a training step over that of the CNN."""
    from timing import interleaved

    def stepping(trained: nn.Module) -> Callable[[], None]:
        optimiser = torch.optim.AdamW(trained.train().parameters(), lr=1e-4)

        def step() -> None:
            optimiser.zero_grad()
            x, y = data["upright"][:BATCH], data["classes"][:BATCH]
            functional.cross_entropy(trained(x), y).backward()
            optimiser.step()

        return step

    runs = {"made": stepping(made), "twin": stepping(network(TWIN, layout))}
    times = interleaved(runs, layout["timed"])
    return statistics.median(times["made"]) / statistics.median(times["twin"])


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Train and test one network, in the environment of its library."""
    torch.set_num_threads(1)
    layout = job["layout"] | {"seed": job["seed"]}
    if job["what"] == "count":
        library = "escnn" if job["network"] == PEER else "torch"
        version = importlib.metadata.version(library)
        return {"parameters": count(network(job["network"], layout)), "version": version}
    data = torch.load(job["data"], weights_only=True)
    made = network(job["network"], layout)
    if job["what"] == "time":
        return {"step": step_over_the_twins(made, layout, data)}
    weights = Path(job["data"]).parent / f"{job['network']}, {job['seed']}, {job['rate']}.pt"
    if not weights.exists():
        found = {"parameters": count(made), **train(made, data, job)}
        torch.save({"weights": made.state_dict(), "found": json.dumps(found)}, weights)
    kept = torch.load(weights, weights_only=True)
    found = json.loads(kept["found"])
    if job["what"] == "test":
        made.train().load_state_dict(kept["weights"])
        y = data["test classes"]
        found["error_percent"] = {
            angle: percent_wrong(answers(made, x), y) for angle, x in data["test"].items()
        }
        found["full_turn"] = percent_wrong(answers(made, data["test, full turn"]), y)
    return found


# ------------------------------------------------------------------ what runs here


def ask(interpreter: str, job: dict[str, Any]) -> dict[str, Any]:
    """Let an environment do a job, and read the last line that it says."""
    done = subprocess.run(
        [interpreter, "-W", "ignore", str(HERE), "--job", json.dumps(job)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{job['network']}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def full_turn(x: Tensor, steps: int) -> Tensor:
    """Images that made a full turn in so many equal steps: upright, and interpolated so often."""
    from econv.testing import rotate

    for _ in range(steps):
        x = rotate(x, 360 / steps)
    return x


def prepare(path: Path, images: int, steps: int) -> None:
    """All that is read in training and testing, as tensors that every environment reads."""
    from econv import data
    from econv.testing import rotate

    found = data.load("digits_upright")

    def part(split: data.Split) -> tuple[Tensor, Tensor]:
        each = max(1, len(split.y) // images)  # evenly: they may be sorted by class
        return split.x[::each].float() / 255, split.y[::each]

    train_x, train_y = part(found.train)
    validation_x, validation_y = part(found.validation)
    test_x, test_y = part(found.test)
    torch.save(
        {
            "upright": train_x,
            "full turn": full_turn(train_x, steps),
            "classes": train_y,
            "validation": validation_x,
            "validation classes": validation_y,
            "test": {angle: rotate(test_x, angle) for angle in ANGLES},
            "test, full turn": full_turn(test_x, steps),
            "test classes": test_y,
        },
        path,
    )


def widths_like(interpreter: str, parameters: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Fields of escnn's layers, in the proportions of ours, that come nearest to the parameters."""
    widths, scale = layout["ours"]["fields"], 1.0
    tried: dict[float, dict[str, Any]] = {}
    for _ in range(3):  # parameters grow about as the square of the widths
        fields = [max(1, round(count * scale)) for count in widths]
        job = {"what": "count", "network": PEER, "seed": 0, "layout": layout | {"peer": fields}}
        found = ask(interpreter, job)
        tried[abs(found["parameters"] - parameters)] = {"peer": fields, PEER: found["version"]}
        scale *= (parameters / found["parameters"]) ** 0.5
    return tried[min(tried)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--python", metavar="PATH", help="an interpreter that has escnn")
    add("--epochs", type=int, default=10)
    add("--rates", type=float, nargs="+", default=(5e-3, 2e-2), help="to choose from")
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=3, help="of the full turns")
    add("--images", type=int, default=3000, help="at most, of each split")
    add("--timed", type=int, default=15, help="steps to time")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    add("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(work(json.loads(args.job))))
        return

    from econv.recipes import RECIPES
    from recording import Growing, origin

    ours = dict(RECIPES["digits_upright_p8"].model_options)
    twin = dict(RECIPES["digits_upright_cnn"].model_options)
    layout: dict[str, Any] = {
        "ours": ours,
        "twin": twin["fields"],
        "pooled_after": ours["pooled_after"],
        "margin": ours.get("margin", 0),
        "timed": args.timed,
    }
    interpreters = {OURS: sys.executable, BLURRED: sys.executable, TWIN: sys.executable}
    if args.python:
        interpreters[PEER] = args.python
    job = {"what": "count", "network": OURS, "seed": 0, "layout": layout}
    parameters = ask(sys.executable, job)["parameters"]
    if args.python:
        layout |= widths_like(args.python, parameters, layout)
    asked = {name: value for name, value in vars(args).items() if name not in ("json", "python")}
    head = {**origin("cpu"), "arguments": asked, "layout": layout, "angles": ANGLES}
    record = Growing(args.json, json.loads(json.dumps(head)), "rows", lambda row: row["key"])
    done = {tuple(row["key"]): row for row in record.rows}

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits.pt"
        prepare(data, args.images, args.steps)

        def do(what: str, name: str, seed: int, rate: float) -> dict[str, Any]:
            key = (what, name, seed, rate)
            if key not in done:
                job = {"what": what, "network": name, "seed": seed, "rate": rate}
                job |= {"epochs": args.epochs, "layout": layout, "data": str(data)}
                done[key] = {"key": list(key), **ask(interpreters[name], job)}
                record.keep(done[key])
                print(*key, {n: v for n, v in done[key].items() if n != "key"}, flush=True)
            return done[key]

        for name in interpreters:
            if name != BLURRED:
                do("time", name, 0, 0.0)
            like = OURS if name == BLURRED else name
            tried = {rate: do("validate", like, 0, rate) for rate in args.rates}
            best = min(tried, key=lambda rate: tried[rate]["validation_error"])
            for seed in range(args.seeds):
                do("test", name, seed, best)


if __name__ == "__main__":
    main()
