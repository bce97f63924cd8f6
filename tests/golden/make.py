"""Make the golden checkpoints: networks as this version saves them, and what they compute.

    python tests/golden/make.py NAME …

Each lies in a folder of its own with the inputs and outputs of one batch, in float64. They are
kept for ever: later versions must read them and compute the same. So this is run for a new
network, or for a new format of the files under a new name, and never again for an old one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import econv
from econv.models import ConvNet, ResNet
from econv.stencils import Gaussian

FOLDER = Path(__file__).resolve().parent
NETWORKS = {
    "resnet8_p8": lambda: ResNet("p8", depth=8, fields=(2, 2, 3), num_classes=4),
    "resnet8_p6m": lambda: ResNet(
        "p6m", depth=8, fields=(1, 2, 2), num_classes=4, pool="max", exact=True
    ),
    "convnet6_p4": lambda: ConvNet("p4", fields=(2,) * 6, num_classes=4),
    "convnet3_p8_central": lambda: ConvNet(
        "p8",
        fields=(1, 2, 2),
        num_classes=4,
        shrink=False,
        readout="mean",
        pool="mean",
        options={"stencils": "central", "bias": True, "padding_mode": "reflect"},
    ),
    "convnet3_p12_gaussian": lambda: ConvNet(
        "p12",
        fields=(1, 2, 2),
        num_classes=4,
        shrink=False,
        readout="mean",
        options={"stencils": Gaussian(0.8), "operators": [(0, 0), (2, 0), (0, 2), (1, 1)]},
    ),
    "resnet8": lambda: ResNet(None, depth=8, fields=(2, 3, 4), num_classes=4),
}


def make(name: str) -> None:
    folder = FOLDER / name
    if folder.exists():
        raise SystemExit(f"{folder} is there already: golden files do not change")
    torch.manual_seed(0)
    network = NETWORKS[name]().train()
    image = torch.randn(4, network.config["in_channels"], 28, 28)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for _ in range(3):  # so that nothing is left as it was drawn, statistics neither
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(image), torch.arange(4)).backward()
        optimizer.step()
    network.save_pretrained(folder)
    # Whole numbers, which any JSON reader gets right.
    x = torch.randint(-3, 4, (2, network.config["in_channels"], 28, 28))
    outputs = network.double().eval()(x.double())
    found = {"version": econv.__version__, "x": x.flatten().tolist(), "outputs": outputs.tolist()}
    (folder / "outputs.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        make(name)
