"""Where is the epithelium? A U-Net, and the p8 U-Net that `econv.convert` makes of it.

A section of colon that scikit-image ships, stained twice: a brown antibody marks the epithelium,
a blue counterstain all nuclei. The networks see the blue stain alone and learn, on the left half,
to draw the mask that the brown one gives. They are tested on the right half, turned.

    python examples/tissue.py --output outputs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy import ndimage
from skimage import color, data
from torch import Tensor, nn
from torch.nn import functional

import econv
from workshop import COLOURS, arguments, fit, parameters, publish

CROP = 48  # pixels along each side of what the networks learn from
WINDOW = 112  # and of what they are tested on
CENTRES = ((62.0, 190.0), (190.0, 190.0))  # row and column of two windows on the right half
RADIUS = 50  # of the disc that is judged, the same at every angle
LEARNED = 118  # columns of the left half
ANGLES = [*range(0, 360, 15)]
NAMES = {"p8": "p8 U-Net, converted", "plain": "plain U-Net"}


@dataclass(frozen=True)
class Slide:
    """The counterstain and the mask of the epithelium, ``[256, 256]`` each."""

    colours: np.ndarray
    nuclei: np.ndarray
    epithelium: np.ndarray


def stained() -> Slide:
    """Part the two stains, at half the resolution."""
    picture = data.immunohistochemistry()
    blue, _, brown = np.moveaxis(color.rgb2hed(picture), -1, 0)
    wide = np.pad(ndimage.gaussian_filter(brown, 4.0), 16, mode="edge")
    mask = ndimage.binary_closing(wide > 0.045, iterations=6)
    mask = ndimage.binary_opening(mask, iterations=6)[16:-16, 16:-16]
    nuclei = _halved(blue)
    nuclei = (nuclei - nuclei.mean()) / nuclei.std()
    return Slide(_halved(picture / 255), nuclei, _halved(mask) > 0.5)


def _halved(array: np.ndarray) -> np.ndarray:
    height, width = array.shape[0] // 2, array.shape[1] // 2
    return array.reshape(height, 2, width, 2, *array.shape[2:]).mean(axis=(1, 3))


def seen_at(array: np.ndarray, centre: tuple[float, float], angle: float, size: int) -> np.ndarray:
    """A square window of the slide, turned about its centre by an angle in degrees."""
    half, turn = (size - 1) / 2, np.radians(angle)
    down, right = np.mgrid[-half : half + 1, -half : half + 1]
    rows = centre[0] + np.cos(turn) * down + np.sin(turn) * right
    columns = centre[1] - np.sin(turn) * down + np.cos(turn) * right
    return ndimage.map_coordinates(array.astype(float), [rows, columns], order=3, mode="mirror")


class UNet(nn.Module):
    """A small U-Net in plain torch: two halvings, two doublings, one map out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.outer = _twice(1, width)
        self.middle = _twice(width, 2 * width)
        self.inner = _twice(2 * width, 4 * width)
        self.back = _twice(4 * width + 2 * width, 2 * width)
        self.out = _twice(2 * width + width, width)
        self.pool = nn.MaxPool2d(2)
        self.enlarge = nn.Upsample(scale_factor=2, mode="bilinear")
        self.classify = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(x)
        middle = self.middle(self.pool(outer))
        inner = self.inner(self.pool(middle))
        back = self.back(torch.cat([self.enlarge(inner), middle], dim=1))
        return self.classify(self.out(torch.cat([self.enlarge(back), outer], dim=1)))


def _twice(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def trained(kind: str, slide: Slide, steps: int, seed: int) -> nn.Module:
    """The plain U-Net or its p8 version, trained on crops of the left half."""
    torch.manual_seed(seed)
    network: nn.Module = UNet()
    if kind == "p8":
        example = torch.zeros(1, 1, CROP, CROP)
        network = econv.convert(network, "p8", "params", example_input=example, measure=False)
    numbers = np.random.default_rng(seed)

    def batch() -> tuple[Tensor, Tensor]:
        rows = numbers.integers(0, slide.nuclei.shape[0] - CROP, 6)
        columns = numbers.integers(0, LEARNED - CROP, 6)
        crops = [np.s_[r : r + CROP, c : c + CROP] for r, c in zip(rows, columns, strict=True)]
        return (
            torch.from_numpy(np.stack([slide.nuclei[crop] for crop in crops])[:, None]).float(),
            torch.from_numpy(np.stack([slide.epithelium[crop] for crop in crops])[:, None]).float(),
        )

    fit(network, batch, functional.binary_cross_entropy_with_logits, steps)
    return network


@torch.no_grad()
def drawn(network: nn.Module, slide: Slide, angle: float) -> np.ndarray:
    """The mask that the network draws in every window, ``[window, y, x]``."""
    windows = [seen_at(slide.nuclei, centre, angle, WINDOW) for centre in CENTRES]
    return (network(torch.from_numpy(np.stack(windows)[:, None]).float()) > 0)[:, 0].numpy()


def judged(slide: Slide, angle: float) -> np.ndarray:
    return np.stack([seen_at(slide.epithelium, c, angle, WINDOW) > 0.5 for c in CENTRES])


def turned_back(masks: np.ndarray, angle: float) -> np.ndarray:
    centre = ((WINDOW - 1) / 2, (WINDOW - 1) / 2)
    return np.stack([seen_at(mask, centre, -angle, WINDOW) > 0.5 for mask in masks])


def _disc() -> np.ndarray:
    down, right = np.mgrid[:WINDOW, :WINDOW] - (WINDOW - 1) / 2
    return down**2 + right**2 <= RADIUS**2


def compare(
    steps: int, seeds: int, angles: list[int]
) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """Train and test both networks, averaged over seeds; and the networks of the last seed.

    ``overlap`` is the intersection of both masks over their union, ``changed`` the share of pixels
    that change sides when the slide is turned.
    """
    slide, disc = stained(), _disc()
    results: dict[str, Any] = {"steps": steps, "seeds": seeds, "angles": angles, "networks": {}}
    networks: dict[str, nn.Module] = {}
    for kind in NAMES:
        overlap, changed = [], []
        for seed in range(seeds):
            network = networks[kind] = trained(kind, slide, steps, seed)
            masks = {angle: drawn(network, slide, angle) for angle in angles}
            wanted = {angle: judged(slide, angle) for angle in angles}
            overlap.append([_overlap(masks[a] & disc, wanted[a] & disc) for a in angles])
            back = [turned_back(masks[angle], angle) for angle in angles]
            changed.append([(mask != masks[0])[:, disc].mean() for mask in back])
        results["networks"][kind] = {
            "parameters": parameters(network),
            "overlap": np.mean(overlap, axis=0).round(4).tolist(),
            "changed": np.mean(changed, axis=0).round(4).tolist(),
        }
    return results, networks


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


def table(results: dict[str, Any]) -> str:
    lines = [
        "| network | parameters | overlap, as seen | overlap, turned | worst angle "
        "| pixels that change sides when turned |",
        "|---|---|---|---|---|---|",
    ]
    for kind, found in results["networks"].items():
        overlap, changed = found["overlap"], np.mean(found["changed"][1:])
        lines.append(
            f"| {NAMES[kind]} | {found['parameters']:,} | {overlap[0]:.3f} "
            f"| {np.mean(overlap[1:]):.3f} | {min(overlap):.3f} | {changed:.1%} |"
        )
    lines += [
        "",
        "(Overlap: intersection over union of the mask drawn and the mask of the brown stain, "
        f"{len(results['angles'])} angles, mean of {results['seeds']} seeds.)",
    ]
    return "\n".join(lines)


def draw(results: dict[str, Any], networks: dict[str, nn.Module]) -> Figure:
    slide, angle, window = stained(), 105, 1
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    wanted = judged(slide, angle)[window]
    colours = np.stack(
        [
            seen_at(channel, CENTRES[window], angle, WINDOW)
            for channel in np.moveaxis(slide.colours, 2, 0)
        ]
    )
    nuclei = seen_at(slide.nuclei, CENTRES[window], angle, WINDOW)
    axes = above.subplots(1, 2 + len(networks))
    axes[0].imshow(np.clip(np.moveaxis(colours, 0, 2), 0, 1))
    axes[0].set_title(f"both stains, turned by {angle}°", fontsize=10)
    axes[1].imshow(nuclei, cmap="gray", vmin=-1.5, vmax=2.5)
    axes[1].set_title("what the networks see", fontsize=10)
    for axis, (kind, network) in zip(axes[2:], networks.items(), strict=True):
        axis.imshow(nuclei, cmap="gray", vmin=-1.5, vmax=2.5)
        mask = drawn(network, slide, angle)[window]
        tint = np.zeros((*mask.shape, 4))
        tint[mask] = (0.12, 0.37, 0.66, 0.5)
        axis.imshow(tint)
        axis.contour(wanted, levels=[0.5], colors=["#ffb000"], linewidths=1.3)
        axis.set_title(NAMES[kind], fontsize=10)
    for axis in axes:
        axis.set_axis_off()
    chart = below.subplots()
    turns = [*results["angles"], 360]
    for kind, found in results["networks"].items():
        overlap = [*found["overlap"], found["overlap"][0]]
        chart.plot(turns, overlap, "o-", ms=3.5, lw=1.5, color=COLOURS[kind], label=NAMES[kind])
    chart.set_xticks(range(0, 361, 45))
    chart.set_xlabel("angle of the test windows, degrees")
    chart.set_ylabel("overlap")
    chart.grid(color="0.9")
    chart.spines[["top", "right"]].set_visible(False)
    chart.legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    options = arguments((__doc__ or "").splitlines()[0], steps=100, seeds=1)
    results, networks = compare(options.steps, options.seeds, ANGLES)
    publish("tissue", draw(results, networks), results, table(results), options)


if __name__ == "__main__":
    main()
