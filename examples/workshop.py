"""What the worked examples share: arguments, a short training, and where results go."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from econv.files import atomic, write_atomically
from econv.parameters import parameter_groups

DOCS = Path(__file__).resolve().parent.parent / "docs"
COLOURS = {"p8": "#1f5fa8", "plain": "#c8553d", "turned": "#a07a1e", "truth": "#4d4d4d"}


def arguments(description: str, steps: int, seeds: int) -> argparse.Namespace:
    """The arguments that every example takes, read from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help=f"of training ({steps})")
    parser.add_argument("--seeds", type=int, default=seeds, help=f"to average over ({seeds})")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for results")
    parser.add_argument("--docs", action="store_true", help="renew the page in docs/ as well")
    return parser.parse_args()


def fit(
    network: nn.Module,
    batch: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: int,
    rate: float = 1e-2,
) -> None:
    """Train by AdamW with one cycle of the learning rate; the network ends in eval mode."""
    network.train()
    optimizer = torch.optim.AdamW(parameter_groups(network, weight_decay=1e-2), lr=rate)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        images, wanted = batch()
        optimizer.zero_grad()
        loss(network(images), wanted).backward()
        optimizer.step()
        cycle.step()
    network.eval()


def parameters(network: nn.Module) -> int:
    """How many numbers the network learns."""
    return sum(parameter.numel() for parameter in network.parameters())


def publish(
    name: str, figure: Any, results: dict[str, Any], table: str, options: argparse.Namespace
) -> None:
    """Print the table; write picture and results; on demand, renew the page of the docs."""
    print(table)
    folders = [options.output] + [DOCS / "pictures"] * options.docs
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        write_picture(figure, folder / f"{name}.png")
        text = json.dumps(results, indent=1) + "\n"
        write_atomically(folder / f"{name}.json", text.encode())
    if options.docs:
        page = DOCS / "examples" / f"{name}.md"
        write_atomically(page, with_table(page.read_text(encoding="utf-8"), table).encode())
    print(f"\nThe picture: {options.output / name}.png")


def write_picture(figure: Any, path: Path) -> None:
    """Write a picture of 224 colours, which is enough for these and a third of the size."""
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=100, format="png")
        with Image.open(temporary) as picture:
            small = picture.convert("RGB").quantize(224, dither=Image.Dither.NONE)
        small.save(temporary, format="png", optimize=True)


def with_table(page: str, table: str) -> str:
    """The text of a page, with this table between its markers."""
    pattern = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = pattern.subn(lambda marks: f"{marks[1]}{table}\n{marks[2]}", page)
    if count != 1:
        raise ValueError(f"expected the markers of a table once in the page; found {count}")
    return text
