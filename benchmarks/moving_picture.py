"""The moving picture of the README: a digit turns, and features are turned back.

    python benchmarks/moving_picture.py

Trains the two networks of `econv demo`, or takes those that it left in outputs/. Writes
docs/pictures/turning.gif, and beside it turning.json with what the picture shows as numbers: by how
much the maps differ from those of the upright digit, turned back, inside the inscribed disc.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
import torch
from matplotlib import pyplot
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from econv import data, train
from econv.files import write_atomically
from econv.lab import windowed
from econv.models import create_model
from econv.recipes import RECIPES
from econv.records import path_of
from econv.testing import rotate

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "turning.gif"
LARGEST = 2_000_000  # bytes

NETWORKS = {
    "digits_p8": "p8 network: features, turned back",
    "digits_cnn": "CNN: features, turned back",
}
LAYER = 2  # the activation after the first convolution: 26×26 pixels in both networks
ORDER = 8
SHOWN = 4  # fields of a network, two by two
STEPS = 60
SECONDS = 8.0
INK, GROUND = "#1f2430", "#ffffff"
MARGIN = 3  # pixels of a map that borders reach


def trained(name: str, output: Path, dataset: data.Dataset) -> nn.Module:
    """The network of a recipe, trained here or before."""
    weights = output / name / "0" / "model.safetensors"
    if not (weights.exists() and path_of(output / "records", name, 0).exists()):
        train.run(RECIPES[name], 0, data=dataset, output=output, records=output / "records")
    network = create_model(RECIPES[name].model, **dict(RECIPES[name].model_options))
    network.load_state_dict(load_file(weights))
    return network.eval()


@torch.no_grad()
def maps_turned_back(network: nn.Module, images: list[Tensor], dataset: data.Dataset) -> Tensor:
    """Feature maps of the turned images, orientations pooled, each turned back."""
    first = nn.Sequential(*list(network.layers)[: LAYER + 1])
    turned = []
    for step, image in enumerate(images):
        maps = first(data.normalise(image, dataset))
        if hasattr(network.layers[0], "group"):
            maps = maps.unflatten(1, (-1, ORDER)).mean(2)
        turned.append(rotate(maps.double(), -360 * step / STEPS))
    return torch.cat(turned)


def disc(size: int, margin: float) -> Tensor:
    line = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    return (line[:, None] ** 2 + line**2 <= (size / 2 - margin) ** 2).double()


def changes(maps: Tensor) -> list[float]:
    """‖turned back − upright‖ / ‖upright‖ at every angle."""
    inside = disc(maps.shape[-1], MARGIN)
    upright = maps[:1] * inside
    return [float((one * inside - upright).norm() / upright.norm()) for one in maps]


def most_telling(maps: Tensor) -> list[int]:
    """The fields that vary most over the upright digit."""
    inside = disc(maps.shape[-1], MARGIN).bool()
    spread = maps[0][:, inside].std(dim=1)
    return spread.argsort(descending=True)[:SHOWN].tolist()


def tiled(maps: Tensor, fields: list[int]) -> list[np.ndarray]:
    """One picture for each angle: the fields two by two, on one scale each."""
    size = maps.shape[-1]
    inside = disc(size, 1.0).bool()
    chosen = maps[:, fields]
    low = chosen[0][:, inside].amin(dim=1)[None, :, None, None]
    high = chosen[0][:, inside].amax(dim=1)[None, :, None, None]
    chosen = ((chosen - low) / (high - low)).clamp(0, 1)
    chosen = nn.functional.interpolate(chosen, scale_factor=4, mode="bicubic").clamp(0, 1)
    hidden = ~disc(4 * size, 4.0).bool()
    chosen[:, :, hidden] = torch.nan
    rows = [torch.cat(list(chosen[:, k : k + 2].unbind(1)), dim=2) for k in (0, 2)]
    return list(torch.cat(rows, dim=1).numpy())


def frames(digit: list[Tensor], tiles: dict[str, list[np.ndarray]]) -> list[Image.Image]:
    """The picture at each angle."""
    figure, axes = pyplot.subplots(1, 3, figsize=(7.6, 2.9), dpi=90, facecolor=GROUND)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.88, bottom=0.02, wspace=0.06)
    colours = matplotlib.colormaps["viridis"].copy()
    colours.set_bad(GROUND)
    titles = ["the image turns", *(NETWORKS[name] for name in tiles)]
    shown = [[d[0, 0].numpy() for d in digit], *tiles.values()]
    pictures = []
    for axis, title, first, colour in zip(
        axes, titles, shown, ("gray", colours, colours), strict=True
    ):
        axis.set_axis_off()
        axis.set_title(title, fontsize=10.5, color=INK)
        interpolation = "bicubic" if colour == "gray" else "nearest"
        pictures.append(
            axis.imshow(first[0], cmap=colour, vmin=0, vmax=1, interpolation=interpolation)
        )
    found = []
    for step in range(STEPS):
        for picture, images in zip(pictures, shown, strict=True):
            picture.set_data(images[step])
        figure.canvas.draw()
        found.append(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3]))
    pyplot.close(figure)
    return found


def as_gif(pictures: list[Image.Image], path: Path) -> None:
    """All frames in one palette, that of a few of them."""
    sample = Image.new("RGB", (pictures[0].width, pictures[0].height * 4))
    for place, picture in enumerate(pictures[:: STEPS // 4]):
        sample.paste(picture, (0, place * picture.height))
    palette = sample.quantize(64)
    reduced = [p.quantize(palette=palette, dither=Image.Dither.NONE) for p in pictures]
    reduced[0].save(
        path,
        save_all=True,
        append_images=reduced[1:],
        duration=round(1000 * SECONDS / STEPS),
        loop=0,
        optimize=True,
    )
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path}: {path.stat().st_size} bytes are more than {LARGEST}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs"), metavar="FOLDER")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    parser.add_argument("--digit", type=int, default=4, help="class to show (%(default)s)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    digits, dataset = data.load("digits"), data.load("digits_upright")
    place = int((dataset.test.y == args.digit).nonzero()[0])
    image = windowed(dataset.test.x[place : place + 1].float() / 255)
    turned = [rotate(image, 360 * step / STEPS).clamp(0, 1) for step in range(STEPS)]
    found: dict[str, Any] = {"layer": LAYER, "angles": STEPS, "digit": args.digit}
    tiles = {}
    for name in NETWORKS:
        network = trained(name, args.output, digits)
        maps = maps_turned_back(network, turned, digits)
        measured = changes(maps)
        found[name] = {
            "parameters": sum(p.numel() for p in network.parameters()),
            "mean_change": sum(measured[1:]) / (STEPS - 1),
            "largest_change": max(measured),
            "largest_change_at_quarter_turns": max(measured[:: STEPS // 4]),
        }
        tiles[name] = tiled(maps, most_telling(maps))
    as_gif(frames(turned, tiles), args.picture)
    found["versions"] = {
        "econv": importlib.metadata.version("econv"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    write_atomically(args.picture.with_suffix(".json"), text.encode())
    for name in NETWORKS:
        print(f"{name}: the maps change by {found[name]['mean_change']:.3f} on average")
    print(f"{args.picture}: {args.picture.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
