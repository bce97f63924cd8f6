"""Which learning rate fits: PDO-eConvs beside an ordinary CNN, and whether batch norm keeps up.

    python benchmarks/learning_rates.py --output benchmarks/results/learning_rates.json

Two tasks. Digits: the 3,000 turned digits that come with a package, averaged to 14×14 pixels, four
layers with batch norm and ReLU, for three epochs in batches of 64. Flow: a step of Burgers'
equation on smooth periodic fields of 16×16 pixels, four layers with GELU and no norm, for 300 steps
in batches of 16. Rates are constant and a factor of √10 apart. The loss is the mean of the last
quarter of the steps: what fits best is the rate whose loss, averaged over the seeds, is lowest.

For digits, the accuracy on validation images with the statistics that batch norm has kept is put
beside the one with those of the batch, every 24 steps after the first forty.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import econv
from econv.data.digits import digits
from econv.data.splits import Dataset
from econv.models import ConvNet
from recording import Growing, origin

LAYERS = 4
RATES = {"adam": (-3.0, -2.5, -2.0, -1.5, -1.0), "sgd": (-2.0, -1.5, -1.0, -0.5, 0.0)}
NETWORKS: dict[str, dict[str, Any]] = {
    "CNN, 16 channels": {"group": None, "fields": 16},
    "CNN, 48 channels": {"group": None, "fields": 48},
    "p4, 8 fields": {"group": "p4", "fields": 8},
    "p8, 3 fields": {"group": "p8", "fields": 3},
    "p8, 6 fields": {"group": "p8", "fields": 6},
    "p8, 12 fields": {"group": "p8", "fields": 12},
    "p16, 3 fields": {"group": "p16", "fields": 3},
    "p8m, 3 fields": {"group": "p8m", "fields": 3},
    "p8, 6 fields, order<=2": {"group": "p8", "fields": 6, "operators": "order<=2"},
    "p8, 6 fields, central": {"group": "p8", "fields": 6, "stencils": "central"},
    "p8, 6 fields, gaussian": {"group": "p8", "fields": 6, "stencils": "gaussian"},
}
PIXELS = "p8, 6 fields, pixels"
"""The network whose weights are the pixels of canonical filters, as in the first version."""
TASKS = ("digits", "flow")


def options_of(network: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in network.items() if n in ("operators", "stencils")}


def classifier(network: dict[str, Any], pool: str | None = "max") -> nn.Module:
    group = network["group"]
    return ConvNet(
        group=group,
        fields=(network["fields"],) * LAYERS,
        image_size=14,
        pooled_after=(1,),
        shrink=False,
        readout="mean",
        pool=None if group is None else pool,
        dropout=0.0,
        options=options_of(network) or None,
    )


def flow(network: dict[str, Any]) -> nn.Module:
    group, fields = network["group"], network["fields"]
    layers: list[nn.Module] = []
    if group is None:
        widths = [2, *(fields,) * (LAYERS - 1), 2]
        for into, out in pairwise(widths):
            layers += [nn.Conv2d(into, out, 3, padding=1, padding_mode="circular"), nn.GELU()]
        return nn.Sequential(*layers[:-1])
    own = {**options_of(network), "padding_mode": "circular"}
    layers = [econv.LiftConv2d(2, fields, group, vectors=1, bias=True, **own), nn.GELU()]
    for _ in range(LAYERS - 2):
        layers += [econv.GroupConv2d(fields, fields, group, bias=True, **own), nn.GELU()]
    return nn.Sequential(*layers, econv.VectorConv2d(fields, 1, group, **own))


def as_pixels(network: nn.Module) -> nn.Module:
    """The same filters with weights that are their pixels."""
    for layer in network.modules():
        if isinstance(layer, econv.layers.PDOConv2d):
            kept = layer.coefficients().detach()
            state = layer.state_dict()
            del state["coordinates"]
            layer.load_state_dict(state)
            layer.set_coefficients(kept)
    return network


def burgers(count: int, seed: int, size: int = 16, steps: int = 20) -> tuple[Tensor, Tensor]:
    """Smooth periodic velocities and what they are after a while, ``[count, 2, size, size]``."""
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.fft.fftfreq(size, 1 / size)
    squared = frequency[:, None] ** 2 + frequency[None] ** 2
    noise = torch.randn(count, 2, size, size, generator=generator)
    smooth = torch.fft.ifft2(torch.fft.fft2(noise) * torch.exp(-squared / 8)).real
    smooth = smooth / smooth.std()
    velocity = smooth.double()
    step = 1.0 / steps
    for _ in range(steps):  # y points up: rows run against it
        right = (velocity.roll(-1, 3) - velocity.roll(1, 3)) / 2
        up = (velocity.roll(1, 2) - velocity.roll(-1, 2)) / 2
        spread = sum(velocity.roll(s, d) for s in (1, -1) for d in (2, 3)) - 4 * velocity
        velocity = velocity + step * (0.5 * spread - velocity[:, :1] * right - velocity[:, 1:] * up)
    return smooth, velocity.float()


def accuracy(model: nn.Module, x: Tensor, y: Tensor, batch_statistics: bool) -> float:
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(batch_statistics)
    with torch.no_grad():
        right = [
            (model(a).argmax(1) == b).sum() for a, b in zip(x.split(100), y.split(100), strict=True)
        ]
    return float(sum(right)) / len(y)


def optimizer_of(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    after: Callable[[int], None] = lambda step: None,
) -> float:
    """The mean loss of the last quarter of the steps; infinite where it is not a number."""
    losses = []
    for step, (x, y) in enumerate(batches, start=1):
        model.train()
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return math.inf
        after(step)
    return statistics.fmean(losses[-(len(losses) // 4) :])


@cache
def turned_digits(seed: int) -> Dataset:
    return digits(None, seed)


def digits_run(
    network: dict[str, Any], name: str, optimizer: str, rate: float, seed: int, pool: str | None
) -> dict[str, Any]:
    data = turned_digits(seed)

    def read(split: Any) -> tuple[Tensor, Tensor]:
        small = functional.avg_pool2d(split.x.float() / 255, 2)
        mixed = torch.randperm(len(split), generator=torch.Generator().manual_seed(5))
        return ((small - data.mean[0]) / data.std[0])[mixed], split.y[mixed]

    (x, y), held = read(data.train), tuple(part[:500] for part in read(data.validation))
    torch.manual_seed(seed)
    model = classifier(network, pool)
    if name == PIXELS:
        as_pixels(model)
    generator = torch.Generator().manual_seed(seed)
    indices = [
        chosen
        for _ in range(3)
        for chosen in torch.randperm(len(y), generator=generator).split(64)
        if len(chosen) == 64
    ]
    kept: list[float] = []
    batch: list[float] = []

    def look(step: int) -> None:
        if step > 40 and step % 24 == 0:
            kept.append(accuracy(model, *held, batch_statistics=False))
            batch.append(accuracy(model, *held, batch_statistics=True))

    loss = train(
        model,
        optimizer_of(optimizer, model, rate),
        [(x[i], y[i]) for i in indices],
        functional.cross_entropy,
        look,
    )
    found: dict[str, Any] = {"loss": loss}
    if kept:
        found |= {
            "lag": statistics.fmean(b - k for b, k in zip(batch, kept, strict=True)),
            "kept": kept[-1],
            "batch": batch[-1],
        }
    return found


def flow_run(
    network: dict[str, Any], name: str, optimizer: str, rate: float, seed: int
) -> dict[str, Any]:
    x, y = burgers(512, seed)
    torch.manual_seed(seed)
    model = flow(network)
    if name == PIXELS:
        as_pixels(model)
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(300):
        chosen = torch.randint(len(x), (16,), generator=generator)
        batches.append((x[chosen], y[chosen]))
    loss = train(model, optimizer_of(optimizer, model, rate), batches, functional.mse_loss)
    return {"loss": loss / float(y.var())}


def measure(
    record: Growing, task: str, name: str, seeds: int, pool: str | None, optimizers: list[str]
) -> None:
    network = NETWORKS[name if name != PIXELS else "p8, 6 fields"]
    for optimizer in optimizers:
        for exponent in RATES[optimizer]:
            runs = []
            start = time.perf_counter()
            for seed in range(seeds):
                rate = 10**exponent
                if task == "digits":
                    runs.append(digits_run(network, name, optimizer, rate, seed, pool))
                else:
                    runs.append(flow_run(network, name, optimizer, rate, seed))
            losses = [run["loss"] for run in runs]
            finite = all(map(math.isfinite, losses))
            row: dict[str, Any] = {
                "task": task,
                "network": name,
                "pool": pool if network["group"] and task == "digits" else None,
                "optimizer": optimizer,
                "exponent": exponent,
                "seeds": seeds,
                "loss": statistics.fmean(losses) if finite else None,
                "loss_std": statistics.pstdev(losses) if finite else None,
            }
            for key in ("lag", "kept", "batch"):
                if finite and key in runs[0]:
                    row[key] = statistics.fmean(run[key] for run in runs)
                    row[f"{key}_std"] = statistics.pstdev([run[key] for run in runs])
            row["seconds"] = time.perf_counter() - start
            record.keep(row)
            print(
                f"{task:7}{name:26}{row['pool'] or '':10}{optimizer:5} 1e{exponent:+.1f} "
                f"loss {row['loss']} lag {row.get('lag')} {row['seconds']:.0f} s",
                flush=True,
            )


def best(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The row with the lowest loss among those that are asked for."""
    fits = [
        row
        for row in rows
        if all(row[key] == value for key, value in wanted.items()) and row["loss"] is not None
    ]
    return min(fits, key=lambda row: row["loss"], default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="the record to write or to continue")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS, PIXELS], metavar="NAME")
    parser.add_argument("--pool", default="max", help="pooling of orientations; 'none' for none")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = {"about": "learning rates", **origin("cpu")}
    record = Growing(
        options.output,
        head,
        "rows",
        lambda row: [row[k] for k in ("task", "network", "pool", "optimizer", "exponent")],
    )
    pool = None if options.pool == "none" else options.pool
    for task in options.tasks:
        for name in options.networks or [*NETWORKS, PIXELS]:
            measure(record, task, name, options.seeds, pool, options.optimizers)


if __name__ == "__main__":
    main()
