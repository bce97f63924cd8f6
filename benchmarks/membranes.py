"""Cell membranes of ISBI 2012: a U-Net of p8m and its CNN twin, with few labelled images.

    python benchmarks/membranes.py --data train-volume.tif --rows outputs/membranes
    python benchmarks/membranes.py --data FOLDER --rows outputs/membranes --part 2/8
    python benchmarks/membranes.py --data FOLDER --rows outputs/membranes --score
    python benchmarks/membranes.py --draw docs/pictures/membranes.png --rows outputs/membranes

The challenge's 30 labelled images of 512×512 pixels, in five folds: six images are tested, and 2,
5, 10 or 24 of the others are trained on. Both networks have as many parameters and the same
training, with and without random rotations and reflections; all of it was fixed beforehand, and
nothing is selected. The images of the challenge's hidden test are others, so that no figure
compares with its table.

A run leaves the probabilities of its test images, in steps of a twentieth. ``--score`` makes the
record of them: the challenge's V_rand and V_info, whose borders are thinned first (Arganda-Carreras
et al. 2015), at a threshold of one half and at the best of nine, as the challenge has it; and the
share of wrong pixels. Runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import econv
from econv.data import DataError
from econv.files import atomic
from econv.progress import Progress
from recording import Growing, origin, stamp

WHERE = "get it from https://imagej.net/events/isbi-2012-segmentation-challenge"
FILES = ("train-volume.tif", "train-labels.tif")
RESULT = Path(__file__).parent / "results" / "membranes.json"

FOLDS = 5
COUNTS = (2, 5, 10, 24)
FIELDS = (2, 4, 8, 16)
OPTIONS = {"operators": "order<=2", "size": 3, "engine": "dense"}
TWIN = 3.3  # channels of the CNN for each field: as many parameters
NETWORKS = ("CNN", "p8m")
LEVELS = 20  # steps of stored probabilities
BEYOND = 32  # pixels that an image is continued by before borders are thinned
THRESHOLDS = tuple(level / 10 for level in range(1, 10))

STEPS, BATCH, CROP = 1_000, 4, 256
RATE, DECAY, WARM_UP = 2e-3, 1e-4, 50


# ------------------------------------------------------------------------------------ images


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and cells, uint8 ``[30, 512, 512]``; cells are 1 inside, 0 on membranes.

    From a folder with the challenge's files, from one of them, or from an ``.npz`` with x and y.
    """
    path = Path(path)
    if path.suffix == ".npz":
        try:
            with np.load(path) as found:
                x, y = found["x"], found["y"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path}: cannot read x and y from it: {error}") from None
    else:
        folder = path if path.is_dir() else path.parent
        x, y = (read_tif(folder / name) for name in FILES)
        y = (y > 127).astype(np.uint8)
    if x.shape != y.shape or x.ndim != 3 or x.dtype != np.uint8 or not set(np.unique(y)) <= {0, 1}:
        raise DataError(
            f"{path}: expected images and cells as uint8 [n, height, width], cells 0 or 1; got "
            f"{x.dtype} {x.shape} and {y.dtype} {y.shape}"
        )
    return x, y


def read_tif(path: Path) -> np.ndarray:
    """A stack of grey pictures of bytes, uncompressed, as the challenge's files are."""
    if not path.is_file():
        raise DataError(f"{path} is missing: {WHERE}")
    content = path.read_bytes()
    try:
        order = {b"II": "<", b"MM": ">"}[content[:2]]
        number, place = struct.unpack(order + "HI", content[2:8])
        if number != 42:
            raise ValueError(f"expected the number 42; got {number}")
        pictures = []
        while place and len(pictures) < 10_000:
            tags, place = _tags(content, place, order)
            pictures += _pictures(content, tags)
        return np.stack(pictures)
    except (KeyError, ValueError, struct.error, IndexError) as error:
        raise DataError(
            f"{path}: expected an uncompressed TIFF of bytes: {error}: truncated, damaged or "
            f"another file; {WHERE}"
        ) from None


def _tags(content: bytes, place: int, order: str) -> tuple[dict[int, tuple[int, ...]], int]:
    """The numbers of a picture, by the tag of TIFF, and where the next one begins."""
    (count,) = struct.unpack_from(order + "H", content, place)
    found: dict[int, tuple[int, ...]] = {}
    for number in range(count):
        at = place + 2 + 12 * number
        tag, kind, length = struct.unpack_from(order + "HHI", content, at)
        letter = {1: "B", 2: "B", 3: "H", 4: "I"}.get(kind)
        if letter is None or length > len(content):
            continue
        size = struct.calcsize(letter) * length
        start = at + 8 if size <= 4 else struct.unpack_from(order + "I", content, at + 8)[0]
        found[tag] = struct.unpack_from(f"{order}{length}{letter}", content, start)
    (following,) = struct.unpack_from(order + "I", content, place + 2 + 12 * count)
    return found, following


def _pictures(content: bytes, tags: dict[int, tuple[int, ...]]) -> list[np.ndarray]:
    """The picture of some tags; ImageJ may put all others of a stack right behind it."""
    (width,), (height,) = tags[256], tags[257]
    if tags.get(258, (1,)) != (8,) or tags.get(259, (1,)) != (1,):
        raise ValueError(f"8 bits, no compression wanted; got {tags.get(258)}, {tags.get(259)}")
    words = bytes(tags.get(270, ())).decode("latin-1")
    stack = [line for line in words.splitlines() if line.startswith("images=")]
    if len(tags[273]) == 1 and stack:
        count, start = int(stack[0][7:]), tags[273][0]
        whole = np.frombuffer(content, np.uint8, count * height * width, start)
        return list(whole.reshape(count, height, width))
    strips = b"".join(content[a : a + n] for a, n in zip(tags[273], tags[279], strict=True))
    return [np.frombuffer(strips, np.uint8, height * width).reshape(height, width)]


def folds(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each fold the images to train on, in the order they are taken, and those to test."""
    order = np.random.default_rng(0).permutation(count)
    parts = np.array_split(order, FOLDS)
    return [(np.concatenate([*parts[n + 1 :], *parts[:n]]), part) for n, part in enumerate(parts)]


# ---------------------------------------------------------------------------------- networks


def network_of(name: str) -> nn.Module:
    """The U-Net of p8m, or an ordinary one of as many parameters."""
    if name == "p8m":
        return econv.create_model("unet_p8m", fields=FIELDS, options=OPTIONS)
    return econv.create_model("unet", fields=[round(TWIN * count) for count in FIELDS])


def size_of(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def crops(
    x: Tensor, y: Tensor, turned: bool, generator: torch.Generator, size: int = CROP
) -> tuple[Tensor, Tensor]:
    """A batch of squares out of random images; turned and reflected at random, if asked.

    Images go on beyond their border as in a mirror. Cells are taken at the nearest pixel.
    """
    device, side = x.device, x.shape[-1]
    number = torch.randint(len(x), (BATCH,), generator=generator)
    drawn = torch.rand(4, BATCH, generator=generator)
    angle = 2 * math.pi * drawn[0] * turned
    mirror = 1 - 2 * ((drawn[1] < 0.5) & turned).float()
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.stack([cos * mirror, -sin, sin * mirror, cos], 1).view(-1, 1, 1, 2, 2)
    middle = (drawn[2:].T - 0.5) * (side - size)
    if not turned:
        middle = middle.round() + (0.5 if (side - size) % 2 else 0.0)
    steps = torch.arange(size) - (size - 1) / 2
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1)[None, ..., None]
    points = (matrix @ grid)[..., 0] + middle.view(-1, 1, 1, 2)
    points = (points * (2 / side)).to(device)
    options = {"padding_mode": "reflection", "align_corners": False}
    images = functional.grid_sample(x[number], points, mode="bilinear", **options)
    cells = functional.grid_sample(y[number], points, mode="nearest", **options)
    return images, cells[:, 0].long()


def trained(
    name: str, x: Tensor, y: Tensor, turned: bool, seed: int, options: argparse.Namespace
) -> nn.Module:
    """The network after all steps, in eval mode."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network = network_of(name).to(x.device)
    cuda = x.device.type == "cuda"
    if cuda:
        network = network.to(memory_format=torch.channels_last)
    groups = econv.parameter_groups(network, weight_decay=DECAY)
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    total = options.steps

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / WARM_UP)
        return warm * (1 + math.cos(math.pi * step / total)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    with Progress(
        f"{name}, {len(x)} images", total, "{:.1f} steps/s".format, not options.quiet
    ) as bar:
        for step in range(total):
            images, cells = crops(x, y, turned, generator, min(options.crop, x.shape[-1]))
            with torch.autocast(x.device.type, torch.bfloat16, enabled=cuda):
                scores = network(images)
            loss = functional.cross_entropy(scores.float(), cells)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 50 == 49 or step + 1 == total:
                bar.advance(step + 1 - step // 50 * 50, f"loss {loss.item():.4f}")
    return network.eval()


@torch.no_grad()
def probabilities(network: nn.Module, x: Tensor) -> np.ndarray:
    """Of the inside of cells, in steps of a twentieth."""
    cuda = x.device.type == "cuda"
    found = []
    for image in x.split(1):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=cuda):
            scores = network(image)
        found.append((scores.float().softmax(1)[:, 1] * LEVELS).round().to(torch.uint8).cpu())
    return torch.cat(found).numpy()


# ------------------------------------------------------------------------------------ scores


def cells_of(inside: np.ndarray, thin: bool = True) -> np.ndarray:
    """The number of the cell that each pixel is in, 0 on borders, which are thinned to a line."""
    from scipy.ndimage import label

    if thin:
        from skimage.morphology import skeletonize

        # Borders go on beyond the image, or their ends would be thinned away at its edge.
        wide = np.pad(~inside, BEYOND, mode="edge")
        inside = ~skeletonize(wide)[BEYOND:-BEYOND, BEYOND:-BEYOND]
    found: np.ndarray = label(inside)[0]
    return found


def agreement(found: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """V_rand and V_info of two numberings of pixels, where the truth is above 0.

    Each is the harmonic mean of a share of what is rightly together and one of what is rightly
    apart: Σp²/(½Σs² + ½Σt²), and I/(½H(s) + ½H(t)). A pixel on a found border is a cell of its own.
    """
    inside = truth > 0
    s, t = found[inside].astype(np.int64), truth[inside].astype(np.int64)
    if not len(s):
        raise ValueError("expected a truth with cells; got borders alone")
    border = s == 0
    s[border] = s.max() + 1 + np.arange(border.sum())
    joint = np.unique(s * (int(t.max()) + 1) + t, return_counts=True)[1] / len(s)
    own, true = (np.unique(each, return_counts=True)[1] / len(s) for each in (s, t))
    rand = 2 * (joint**2).sum() / ((own**2).sum() + (true**2).sum())

    def entropy(p: np.ndarray) -> float:
        return -float((p * np.log(p)).sum())

    whole = entropy(own) + entropy(true)
    info = 2 * (whole - entropy(joint)) / whole if whole > 1e-12 else 1.0
    return float(rand), float(info)


def scores_of(levels: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Of one image: at one half, and at every threshold."""
    real = cells_of(truth > 0, thin=False)
    found = [agreement(cells_of(levels > t * LEVELS), real) for t in THRESHOLDS]
    return {
        "pixel_error": 100 * float(((levels > LEVELS / 2) != (truth > 0)).mean()),
        "v_rand": [rand for rand, _ in found],
        "v_info": [info for _, info in found],
    }


def scored(row: dict[str, Any], levels: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """A row with the means over its images; the best threshold is that of the means."""
    each = [scores_of(own, true) for own, true in zip(levels, truth, strict=True)]
    half = THRESHOLDS.index(0.5)
    more = {"pixel_error": statistics.fmean(one["pixel_error"] for one in each)}
    for name in ("v_rand", "v_info"):
        means = np.mean([one[name] for one in each], 0)
        more |= {name: float(means[half]), f"{name}_best": float(means.max())}
        more[f"{name}_threshold"] = THRESHOLDS[int(means.argmax())]
    return {**row, **more}


# -------------------------------------------------------------------------------------- runs


def wanted(options: argparse.Namespace) -> list[tuple[str, bool, int, int]]:
    """The runs of this process."""
    every = [
        (name, turned, count, fold)
        for fold in options.folds
        for count in options.counts
        for name in options.networks
        for turned in (False, True)
    ]
    part, parts = (int(number) for number in options.part.split("/"))
    if not 1 <= part <= parts:
        raise SystemExit(f"expected --part as 1/8 to 8/8; got {options.part}")
    return every[part - 1 :: parts]


def run(
    name: str,
    turned: bool,
    count: int,
    fold: int,
    data: tuple[np.ndarray, np.ndarray],
    options: argparse.Namespace,
) -> tuple[dict[str, Any], np.ndarray]:
    started = time.perf_counter()
    chosen, test = folds(len(data[0]))[fold]
    images, cells = (torch.from_numpy(part)[:, None].to(options.device).float() for part in data)
    images /= 255
    own = torch.from_numpy(chosen[:count])
    mean, std = images[own].mean(), images[own].std()
    images = (images - mean) / std
    network = trained(name, images[own], cells[own], turned, fold, options)
    levels = probabilities(network, images[torch.from_numpy(test)])
    row = {
        "network": name,
        "turned": turned,
        "images": count,
        "fold": fold,
        "parameters": size_of(network),
        "steps": options.steps,
        "tested": test.tolist(),
        "seconds": time.perf_counter() - started,
        **origin(torch.device(options.device).type),
        **stamp(),
    }
    return row, levels


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="a folder with the challenge's files, or an .npz")
    add("--rows", type=Path, required=True, help="the folder of the runs' files")
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    add("--counts", nargs="+", type=int, default=list(COUNTS))
    add("--folds", nargs="+", type=int, default=list(range(FOLDS)))
    add("--part", default="1/1", help="of how many processes this one is which")
    add("--steps", type=int, default=STEPS)
    add("--crop", type=int, default=CROP)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quiet", action="store_true")
    add("--score", action="store_true", help="make the record of the runs")
    add("--json", type=Path, default=RESULT, help="the record")
    add("--draw", type=Path, metavar="PICTURE", help="draw the record and an image of the runs")
    options = parser.parse_args()
    if options.data is None:
        parser.error(f"expected --data with {' and '.join(FILES)}: {WHERE}")
    data = load(options.data)
    if options.draw:
        draw(options, data)
    elif options.score:
        score(options, data)
    else:
        for name, turned, count, fold in wanted(options):
            file = options.rows / f"{name}-{'turned' if turned else 'plain'}-{count}-{fold}.npz"
            if file.exists():
                continue
            row, levels = run(name, turned, count, fold, data, options)
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic(file) as temporary, temporary.open("wb") as stream:
                np.savez_compressed(stream, levels=levels, row=np.array(json.dumps(row)))
            print(f"{file.stem}: {row['seconds']:.0f} s", flush=True)


def read(file: Path) -> tuple[dict[str, Any], np.ndarray]:
    with np.load(file) as found:
        return json.loads(str(found["row"])), found["levels"]


def score(options: argparse.Namespace, data: tuple[np.ndarray, np.ndarray]) -> None:
    """The record of all runs in the folder; what it has already is not scored again."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("network", "turned", "images", "fold", "finished"))

    growing = Growing(options.json, {"benchmark": "membranes"}, "rows", lambda row: key(row)[:4])
    done = {key(row) for row in growing.rows}
    files = sorted(options.rows.glob("*.npz"))
    with Progress("scores", len(files), "{:.2f} runs/s".format, not options.quiet) as bar:
        for file in files:
            row, levels = read(file)
            if key(row) not in done:
                growing.keep(scored(row, levels, data[1][row["tested"]]))
            bar.advance(1, file.stem)


def draw(options: argparse.Namespace, data: tuple[np.ndarray, np.ndarray]) -> None:
    """V_rand over the number of images, and one test image with what the networks make of it."""
    from matplotlib.figure import Figure

    rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    figure = Figure(figsize=(9.2, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 4)
    for place, measure in ((grid[0, :2], "v_rand"), (grid[0, 2:], "v_info")):
        panel = figure.add_subplot(place)
        for name, colour in (("CNN", "#6b7280"), ("p8m", "#047857")):
            for turned, style in ((False, "-"), (True, "--")):
                own: dict[int, list[float]] = {}
                for row in rows:
                    if (row["network"], row["turned"]) == (name, turned):
                        own.setdefault(row["images"], []).append(row[measure])
                counts = sorted(own)
                means = [statistics.fmean(own[count]) for count in counts]
                label = name + ", images turned" * turned
                panel.plot(counts, means, style, color=colour, marker="o", ms=4, label=label)
        panel.set(xscale="log", xlabel="training images", ylabel=measure.replace("v_", "V "))
        panel.set_xticks(COUNTS, [str(count) for count in COUNTS])
        panel.minorticks_off()
        panel.grid(color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    least = min(row["images"] for row in rows)
    shown: list[tuple[str, np.ndarray]] = []
    for name in NETWORKS:
        row, levels = read(options.rows / f"{name}-plain-{least}-0.npz")
        number = row["tested"][0]
        shown.append((f"{name}, {least} images", cells_of(levels[0] > LEVELS / 2) > 0))
    shown = [("image", data[0][number]), ("labels", data[1][number]), *shown]
    for column, (title, picture) in enumerate(shown):
        panel = figure.add_subplot(grid[1, column])
        panel.imshow(picture, cmap="gray", interpolation="nearest")
        panel.set_title(title, fontsize=9)
        panel.set_axis_off()
    with atomic(options.draw) as temporary:
        figure.savefig(temporary, dpi=100, format="png")


if __name__ == "__main__":
    main()
