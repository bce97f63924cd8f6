"""The first thing to run: a p8 network and its CNN twin on the embedded digits, side by side.

Trains both, measures with `lab` whether their answers stay when a digit turns, and leaves a report.
How they are trained is the business of `recipes`.
"""

from __future__ import annotations

import argparse
import html
import importlib
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from econv import data as data_room
from econv import lab, page, records, report, train
from econv.files import locked, remove_leftovers, write_atomically
from econv.groups import Group
from econv.layers import LiftConv2d
from econv.models import create_model
from econv.recipes import RECIPES, Recipe
from econv.records import Record

__all__ = ["add_arguments", "main"]

NAMES = ("digits_p8", "digits_cnn")
GROUP = Group("p8")

_ANGLES = (22.5, *(45.0 * k for k in range(1, 8)))  # one between those of the group
_TURNED = 200  # test digits that are turned by these angles
_DRAWN = 50  # and by every angle of the picture
_SHOWN_LAYER = "network.layers.2"  # the last one before the pooling, which leaves few pixels


@dataclass(frozen=True)
class _Trained:
    """A network that reads pixels from 0 to 1, and the record of its training."""

    recipe: Recipe
    record: Record
    network: nn.Module


class _Pixels(nn.Module):
    """A network with its normalisation: turning brings in zeros, which must mean black."""

    def __init__(self, network: nn.Module, dataset: data_room.Dataset) -> None:
        super().__init__()
        self.network = network
        self.dataset = dataset

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.network(data_room.normalise(x, self.dataset))
        return scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``econv demo``."""
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=Path("outputs"),
        metavar="FOLDER",
        help="for the report, pictures, weights and records (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of both runs (default: %(default)s)")
    add("--fresh", action="store_true", help="train anew instead of going on")
    add("--device", help="to train on, such as cpu or cuda:0 (default: a GPU if there is one)")
    add("--quiet", action="store_true", help="no progress")


def main(options: argparse.Namespace) -> int:
    """Train, compare and report; 0, or 1 with a line on stderr, or 130 if interrupted."""
    threads = torch.get_num_threads()
    # Threads that wait for one another lose everything where other programs want the cores too.
    torch.set_num_threads(1)
    try:
        digits = data_room.load("digits")
        print(
            f"{len(digits.train):,} handwritten digits, each turned by its own random angle, to "
            f"train with; {len(digits.test):,} others to test",
            flush=True,
        )
        ours, twin = (_trained(RECIPES[name], digits, options) for name in NAMES)
        with locked(options.output / "demo.lock", wait=True):
            remove_leftovers(options.output, least_age=0.0)
            _compare(ours, twin, digits, options.output)
    except KeyboardInterrupt:
        how = "Without --fresh, the" if options.fresh else "The"
        print(f"\nStopped. {how} same command goes on from the last epoch.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (train.TrainingError, ValueError, ImportError, OSError) as error:
        print(f"econv demo: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads)
    return 0


def _record_path(name: str, options: argparse.Namespace) -> Path:
    return records.path_of(options.output / "records", name, options.seed)


def _trained(recipe: Recipe, digits: data_room.Dataset, options: argparse.Namespace) -> _Trained:
    weights = options.output / recipe.name / str(options.seed) / "model.safetensors"
    finished = _record_path(recipe.name, options).exists()
    # Without its weights a finished run has nothing left to measure.
    fresh = options.fresh or (finished and not weights.exists())

    def forget() -> None:
        if options.fresh:  # both: an interrupted run must not find the other one finished
            for name in NAMES[NAMES.index(recipe.name) :]:
                _record_path(name, options).unlink(missing_ok=True)

    record = train.run(
        recipe,
        options.seed,
        data=digits,
        device=options.device,
        output=options.output,
        records=options.output / "records",
        resume=not fresh,
        progress=not options.quiet,
        checkpoint_every=1,
        when_ready=forget,
    )
    if finished and not fresh:
        print(f"{recipe.name}, seed {options.seed}: {train.TRAINED_BEFORE}")
    network = create_model(recipe.model, **dict(recipe.model_options))
    try:
        # By name: it need not be installed where types are checked.
        network.load_state_dict(importlib.import_module("safetensors.torch").load_file(weights))
    except Exception as error:  # whatever the file makes its reader raise
        reason = " ".join(str(error).split())
        raise ValueError(f"{weights} cannot be used: {reason}; --fresh makes it anew") from None
    return _Trained(recipe, record, _Pixels(network, digits).eval())


def _compare(ours: _Trained, twin: _Trained, digits: data_room.Dataset, output: Path) -> None:
    """Print what came out and leave it as a report, a page to turn a digit on, and pictures."""
    test = digits.test
    images = _spread(test.x, _TURNED).float() / 255
    results = (
        ("network", "test error", "parameters", "training"),
        [
            (
                run.recipe.row,
                f"{run.record.test_error:.1f} %",
                f"{run.record.parameters:,}",
                f"{run.record.seconds:.0f} s",
            )
            for run in (ours, twin)
        ],
    )
    print(f"\n{report.aligned(*results)}\n")
    question = "Does the answer stay when the digit turns?"
    how = (
        f"‖f(πx) − f(x)‖ / ‖f(x)‖ for the class scores of {len(images)} test digits, and how many "
        "keep their class; ∗ marks turns of the pixel grid, 22.5° lies between those of the group"
    )
    turned = _turned(ours, twin, images)
    print(f"{question}\n{textwrap.fill(how, 90)}\n{report.aligned(*turned)}\n", flush=True)

    pictures = _pictures(ours, twin, _spread(images, _DRAWN), output)
    beside = page.write_page(
        output / "equivariance.html",
        ours.network,
        _one_of_each(test),
        twin=twin.network,
        title=f"A {GROUP} network and its CNN twin, trained on turned digits",
        layer=_SHOWN_LAYER,
    )
    runs = [record for record in records.load_all(output / "records") if record.recipe in NAMES]
    text = report.as_html(
        report.rows(runs, {name: RECIPES[name] for name in NAMES}),
        title=f"A {GROUP} network and its CNN twin on turned digits",
        further=report.section(
            "turned",
            question,
            f"<p>{html.escape(how)}. <a href='{beside.name}'>Turn a digit yourself</a>, and see "
            f"every layer.</p>{report.as_table(*turned)}{_gallery(pictures)}",
        ),
    )
    write_atomically(output / "report.html", text.encode())
    for what, path in (
        ("Report", output / "report.html"),
        ("Turn a digit yourself", beside),
        *((caption, path) for path, caption in pictures.items()),
    ):
        print(f"{what}: {path}")


def _spread(images: Tensor, count: int) -> Tensor:
    """About so many, evenly over all: they may be sorted by class."""
    return images[:: max(1, len(images) // count)]


def _turned(
    ours: _Trained, twin: _Trained, images: Tensor
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and lines of the table of equivariance errors."""
    heads = ("", *(f"{angle:g}°{'∗' * (angle % 90 == 0)}" for angle in _ANGLES))
    lines: list[tuple[str, ...]] = []
    for run in (ours, twin):
        found = lab.angle_curve(run.network, images, _ANGLES, GROUP)
        lines.append((run.recipe.row, *(f"{error or 0:.1e}" for error in found.errors)))
        same = (f"{100 * (1 - changed):.1f} %" for changed in found.changed or ())
        lines.append((f"{run.recipe.row}, same class", *same))
    return heads, lines


def _one_of_each(split: data_room.Split) -> Tensor:
    """A digit of each class, a 4 first: it looks like no other from any side."""
    places = [int((split.y == (4 + k) % 10).nonzero()[0]) for k in range(10)]
    return split.x[places].float() / 255


def _pictures(ours: _Trained, twin: _Trained, images: Tensor, output: Path) -> dict[Path, str]:
    """Draw what needs matplotlib; the captions by path."""
    try:
        from econv import plots

        curves = {
            run.recipe.row: lab.angle_curve(run.network, images, group=GROUP)
            for run in (ours, twin)
        }
        angles = plots.plot_angles(curves, "How far the class scores move", logarithmic=False)
        layer = next(m for m in ours.network.modules() if isinstance(m, LiftConv2d))
        filters = plots.plot_filters(layer)
    except ImportError as error:
        print(f"No pictures: {error}")
        return {}
    return {
        plots.save(angles, output / "angles.png"): "Equivariance error over the angle",
        plots.save(filters, output / "filters.png"): "A learned filter and its turned copies",
    }


def _gallery(pictures: dict[Path, str]) -> str:
    figures = (
        f"<figure><img src='{page.address(path.read_bytes())}' alt='{html.escape(caption)}'>"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for path, caption in pictures.items()
    )
    return f"<div class='pictures'>{''.join(figures)}</div>"
