"""Which galaxies are seen edge-on, which face-on? A class that no rotation changes.

Galaxies in the Hubble eXtreme Deep Field, as scikit-image ships it. A p8 network, a plain CNN of
as many parameters, and that CNN with random rotations learn from 150 of them on the left of the
picture, and are asked about those on the right, cut out at every angle.

    python examples/galaxies.py --output outputs
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy import ndimage
from skimage import data
from torch import Tensor, nn
from torch.nn import functional

import econv
from workshop import COLOURS, arguments, fit, parameters, publish

SIZE = 24  # pixels along each side of a cut-out
ANGLES = [*range(0, 360, 15)]
TRAINED_BELOW = 400  # columns of the sky
EDGE_ON, FACE_ON = 0.6, 0.75  # ratio of the axes: below the one, above the other
NAMES = {"p8": "p8", "plain": "plain CNN", "turned": "plain CNN, random rotations"}


@dataclass(frozen=True)
class Sky:
    """A grey picture and the galaxies in it."""

    picture: np.ndarray
    places: np.ndarray  # [galaxy, 2], row and column of the centre
    edge_on: np.ndarray

    def where(self, chosen: np.ndarray) -> Sky:
        return Sky(self.picture, self.places[chosen], self.edge_on[chosen])

    def cut_out(self, angles: np.ndarray | float) -> Tensor:
        """Every galaxy, turned by its angle (degrees), read from the sky by cubic splines."""
        half = (SIZE - 1) / 2
        down, right = np.mgrid[-half : half + 1, -half : half + 1]
        turn = np.radians(np.broadcast_to(angles, len(self.places)))[:, None, None]
        rows = self.places[:, 0, None, None] + np.cos(turn) * down + np.sin(turn) * right
        columns = self.places[:, 1, None, None] - np.sin(turn) * down + np.cos(turn) * right
        light = ndimage.map_coordinates(_splines(), [rows, columns], mode="mirror", prefilter=False)
        return torch.from_numpy(light[:, None]).float()

    @property
    def classes(self) -> Tensor:
        return torch.from_numpy(self.edge_on.astype(np.int64))


def observe() -> Sky:
    """Find the galaxies, and measure the axes of their light by its second moments."""
    picture = _picture()
    smooth = ndimage.gaussian_filter(picture, 1.0)
    regions, _ = ndimage.label(smooth > 0.17)
    places, ratios = [], []
    for number, box in enumerate(ndimage.find_objects(regions), start=1):
        inside = regions[box] == number
        if not 25 <= inside.sum() <= 600:  # neither specks nor foreground
            continue
        light = np.where(inside, smooth[box], 0.0)
        position = np.stack(np.mgrid[box])
        centre = (light * position).sum(axis=(1, 2)) / light.sum()
        apart = position - centre[:, None, None]
        moments = np.einsum("xy,axy,bxy->ab", light, apart, apart) / light.sum()
        short, long = np.linalg.eigvalsh(moments)
        places.append(centre)
        ratios.append(np.sqrt(short / long))
    place, ratio = np.array(places), np.array(ratios)
    clear = (ratio < EDGE_ON) | (ratio > FACE_ON)
    whole = (place >= SIZE) & (place <= np.array(picture.shape) - SIZE)
    chosen = clear & whole.all(axis=1)
    return Sky(picture, place[chosen], ratio[chosen] < EDGE_ON)


@cache
def _picture() -> np.ndarray:
    grey = data.hubble_deep_field().mean(axis=2) / 255
    return np.arcsinh(10 * (grey - np.median(grey))) / 3  # faint arms beside bright cores


@cache
def _splines() -> np.ndarray:
    return ndimage.spline_filter(_picture(), 3, mode="mirror")


def equivariant_network(group: str = "p8") -> nn.Sequential:
    layers: list[nn.Module] = [econv.LiftConv2d(1, 4, group)]
    for before, fields in ((4, 4), (4, 8), (8, 8)):
        layers += [econv.GroupBatchNorm2d(before, group), nn.ReLU()]
        if len(layers) == 3:
            layers += [econv.Downsample2d()]
        layers += [econv.GroupConv2d(before, fields, group)]
    layers += [econv.GroupBatchNorm2d(8, group), nn.ReLU(), econv.GroupPool2d(group)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def plain_network() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, 11, 3, padding=1, bias=False)]
    for before, channels in ((11, 11), (11, 22), (22, 23)):
        layers += [nn.BatchNorm2d(before), nn.ReLU()]
        if len(layers) == 3:
            layers += [nn.AvgPool2d(2)]
        layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(23), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(23, 2))


def trained(kind: str, sky: Sky, steps: int, seed: int) -> nn.Module:
    """A network of one of the three kinds, trained on this sky."""
    torch.manual_seed(seed)
    numbers = np.random.default_rng(seed)
    network = equivariant_network() if kind == "p8" else plain_network()

    def batch() -> tuple[Tensor, Tensor]:
        part = sky.where(numbers.permutation(len(sky.places))[:32])
        turns = numbers.uniform(0, 360, len(part.places)) if kind == "turned" else 0.0
        return part.cut_out(turns), part.classes

    fit(network, batch, functional.cross_entropy, steps)
    return network


@torch.no_grad()
def predicted(network: nn.Module, views: list[Tensor]) -> np.ndarray:
    """``[angle, galaxy]``: whether each is taken for edge-on."""
    return np.stack([network(images).argmax(1).numpy() == 1 for images in views])


def compare(steps: int, seeds: int, angles: list[int]) -> dict[str, Any]:
    """Train and test every kind; shares of the test galaxies, averaged over seeds."""
    sky = observe()
    training = sky.where(sky.places[:, 1] < TRAINED_BELOW)
    test = sky.where(sky.places[:, 1] >= TRAINED_BELOW + SIZE)
    views = [test.cut_out(angle) for angle in angles]
    results: dict[str, Any] = {
        "steps": steps,
        "seeds": seeds,
        "angles": angles,
        "training": len(training.places),
        "test": len(test.places),
        "networks": {},
    }
    for kind in NAMES:
        right, changed = [], []
        for seed in range(seeds):
            network = trained(kind, training, steps, seed)
            answers = predicted(network, views)
            right.append((answers == test.edge_on).mean(axis=1))
            changed.append((answers != answers[0]).mean(axis=1))
        results["networks"][kind] = {
            "parameters": parameters(network),
            "right": np.mean(right, axis=0).round(4).tolist(),
            "changed": np.mean(changed, axis=0).round(4).tolist(),
        }
    return results


def table(results: dict[str, Any]) -> str:
    lines = [
        "| network | parameters | right, as seen | right, turned | changes its mind when turned |",
        "|---|---|---|---|---|",
    ]
    for kind, found in results["networks"].items():
        turned, changed = np.mean(found["right"][1:]), np.mean(found["changed"][1:])
        lines.append(
            f"| {NAMES[kind]} | {found['parameters']:,} | {found['right'][0]:.1%} | {turned:.1%} "
            f"| {changed:.1%} |"
        )
    lines += [
        "",
        f"({results['training']} galaxies to learn from, {results['test']} to be asked about, "
        f"{len(results['angles'])} angles, mean of {results['seeds']} seeds.)",
    ]
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> Figure:
    sky = observe()
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.45))
    axes = left.subplots(4, 4)
    for edge_on, block, name in ((True, axes[:2], "edge-on"), (False, axes[2:], "face-on")):
        galaxies = sky.where(sky.edge_on == edge_on).cut_out(0.0)[:, 0]
        alone = galaxies[:, 8:-8, 8:-8].mean(dim=(1, 2)) - 2 * galaxies[:, 4:-4, :2].mean(
            dim=(1, 2)
        )
        shown = galaxies[alone.argsort(descending=True)[:16:2]]
        for axis, galaxy in zip(block.flat, shown, strict=False):
            axis.imshow(galaxy, cmap="gray", vmin=0, vmax=0.9)
            axis.set_xticks([])
            axis.set_yticks([])
        block[0, 0].set_ylabel(name, fontsize=11)
    chart = right.subplots()
    angles = [*results["angles"], 360]
    for kind, found in results["networks"].items():
        share = 100 * np.array([*found["right"], found["right"][0]])
        chart.plot(angles, share, "o-", ms=3.5, lw=1.5, color=COLOURS[kind], label=NAMES[kind])
    chart.set_xticks(range(0, 361, 45))
    chart.set_xlabel("angle at which the test galaxies are cut out, degrees")
    chart.set_ylabel("right, per cent")
    chart.grid(color="0.9")
    chart.spines[["top", "right"]].set_visible(False)
    chart.legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    options = arguments((__doc__ or "").splitlines()[0], steps=120, seeds=1)
    results = compare(options.steps, options.seeds, ANGLES)
    publish("galaxies", draw(results), results, table(results), options)


if __name__ == "__main__":
    main()
