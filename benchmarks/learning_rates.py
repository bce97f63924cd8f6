"""Which learning rate fits: PDO-eConvs beside an ordinary CNN, and whether batch norm keeps up.

    python benchmarks/learning_rates.py --output benchmarks/results/learning_rates.json
    python benchmarks/learning_rates.py --draw docs/pictures/learning_rates.png

Two tasks. Digits: the 3,000 turned digits that come with a package, averaged to 14×14 pixels, four
layers with batch norm and ReLU, for three epochs in batches of 64. Flow: a step of Burgers'
equation on smooth periodic fields of 16×16 pixels, four layers with GELU and no norm, for 300 steps
in batches of 16. Rates are constant and a factor of √10 apart. The loss is the mean of the last
quarter of the steps: what fits best is the rate whose loss, averaged over the seeds, is lowest.
Without norms SGD takes rates that are far smaller, and more of them are tried there. With `--add`
rows go to a record that other code began, and name theirs; `--draw` makes the picture of a record.

For digits, the accuracy on validation images with the statistics that batch norm has kept is put
beside the one with those of the batch, every 24 steps after the first forty.
"""

from __future__ import annotations

import argparse
import copy
import json
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
from econv.files import atomic
from econv.models import ConvNet
from econv.records import revision
from recording import Growing, origin

LAYERS = 4
RESULTS = Path(__file__).resolve().parent / "results" / "learning_rates.json"
RATES = {"adam": (-3.0, -2.5, -2.0, -1.5, -1.0), "sgd": (-2.0, -1.5, -1.0, -0.5, 0.0)}
LOWER = (-4.0, -3.5, -3.0, -2.5)
"""Rates of SGD where no norm follows the convolutions of a group."""
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
DRAWN = {
    "CNN, 16 channels": ("#c8553d", "o"),
    "CNN, 48 channels": ("#c8553d", "s"),
    "p4, 8 fields": ("#a07a1e", "D"),
    "p8, 3 fields": ("#1f5fa8", "o"),
    "p8, 6 fields": ("#1f5fa8", "D"),
    "p8, 12 fields": ("#1f5fa8", "s"),
    "p16, 3 fields": ("#3b8f5a", "o"),
    "p8m, 3 fields": ("#8a5aa8", "o"),
}
"""Colours and markers of the networks in the picture."""


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


def rates(task: str, network: dict[str, Any], optimizer: str) -> tuple[float, ...]:
    """The decimal logarithms of the rates that are tried."""
    lower = task == "flow" and optimizer == "sgd" and network["group"]
    return (*LOWER, *RATES[optimizer]) if lower else RATES[optimizer]


def measure(
    record: Growing,
    task: str,
    name: str,
    options: argparse.Namespace,
    more: dict[str, Any],
) -> None:
    network = NETWORKS[name if name != PIXELS else "p8, 6 fields"]
    pool = None if options.pool == "none" else options.pool
    seeds = options.seeds
    for optimizer in options.optimizers:
        for exponent in rates(task, network, optimizer):
            if options.only and exponent not in options.only:
                continue
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
            record.keep({**row, **more})
            print(
                f"{task:7}{name:26}{row['pool'] or '':10}{optimizer:5} 1e{exponent:+.1f} "
                f"loss {row['loss']} lag {row.get('lag')} {row['seconds']:.0f} s",
                flush=True,
            )


def draw(record: dict[str, Any], path: Path) -> None:
    """Loss over rate: a panel for every task and optimiser, a line for every network."""
    from matplotlib.figure import Figure  # here, so that nothing else needs it

    figure = Figure(figsize=(9.2, 7.0), layout="constrained")
    panels = figure.subplots(2, 2, sharey="row")
    words = {"adam": "Adam", "sgd": "SGD", "digits": "turned digits, batch norm"}
    words["flow"] = "Burgers' equation, no norm"
    for across, task in zip(panels, TASKS, strict=True):
        for panel, optimizer in zip(across, RATES, strict=True):
            rows = [
                row
                for row in record["rows"]
                if (row["task"], row["optimizer"]) == (task, optimizer)
                and row["pool"] in (None, "max")
                and row["network"] in DRAWN
            ]
            for name, (colour, style) in DRAWN.items():
                own = sorted((r["exponent"], r["loss"]) for r in rows if r["network"] == name)
                finite = [(10**e, loss) for e, loss in own if loss is not None]
                drawn = {"color": colour, "marker": style, "ms": 4, "lw": 1.3}
                panel.plot(*zip(*finite, strict=True), label=name, **drawn) if finite else None
            panel.set(xscale="log", yscale="log")
            panel.set_title(f"{words[task]}: {words[optimizer]}", fontsize=10)
            panel.grid(color="0.9")
            panel.spines[["top", "right"]].set_visible(False)
        across[0].set_ylabel("training loss")
    panels[1, 0].set_ylim(top=2.0)
    for panel in panels[1]:
        panel.set_xlabel("learning rate")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9
    )
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=100, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, help="the record to write or to continue")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    add("--networks", nargs="+", choices=[*NETWORKS, PIXELS], metavar="NAME")
    add("--only", nargs="+", type=float, metavar="EXPONENT", help="of the rates that are tried")
    add("--pool", default="max", help="pooling of orientations; 'none' for none")
    add("--seeds", type=int, default=2)
    add("--add", action="store_true", help="continue a record that other code began")
    add("--draw", type=Path, metavar="PICTURE", help="draw the record instead of measuring")
    options = parser.parse_args()
    if options.draw:
        record = options.output or RESULTS
        draw(json.loads(record.read_text(encoding="utf-8")), options.draw)
        return
    torch.set_num_threads(1)
    head: dict[str, Any] = {"about": "learning rates", **origin("cpu")}
    more: dict[str, Any] = {}
    if options.add:
        if not options.output or not options.output.exists():
            parser.error(f"--add: expected a record in --output; got {options.output}")
        begun = json.loads(options.output.read_text(encoding="utf-8"))
        head, more = {name: begun[name] for name in head}, {"revision": revision()}
    record = Growing(
        options.output,
        head,
        "rows",
        lambda row: [row[k] for k in ("task", "network", "pool", "optimizer", "exponent")],
    )
    for task in options.tasks:
        for name in options.networks or [*NETWORKS, PIXELS]:
            measure(record, task, name, options, more)


if __name__ == "__main__":
    main()
