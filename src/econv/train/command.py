"""The command ``econv train``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from econv.recipes import RECIPES, Recipe, recipe
from econv.records import path_of, run_name
from econv.train.errors import TrainingError
from econv.train.execution import PRECISIONS, STEPS
from econv.train.processes import leave
from econv.train.runs import run
from econv.train.stopping import exit_code, terminable

TRAINED_BEFORE = "trained before; --fresh trains it anew"


class _Renamed(argparse.Action):
    """``--engine``, under which older notes and scripts have ``--step``."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        parser.error(
            f"expected --step {'|'.join(STEPS)}, as --engine is called now; got --engine {values}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``econv train``."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help=f"one of {', '.join(RECIPES)}")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="another value for a setting of the recipe, such as epochs=3",
    )
    add("--seeds", type=int, default=1, metavar="N", help="how many runs (default: %(default)s)")
    add("--seed", type=int, default=0, help="the first of them (default: %(default)s)")
    add("--root", type=Path, metavar="FOLDER", help="where downloaded data are kept")
    add("--source", type=Path, metavar="PATH", help="a folder or .npz with the data")
    add(
        "--recreated",
        action="store_true",
        help="train on MNIST-rot made again from MNIST, where the recipe's are the official images",
    )
    add(
        "--data-seed",
        type=int,
        default=0,
        metavar="N",
        help="which re-creation: other angles and another division (default: %(default)s)",
    )
    add("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    add("--output", type=Path, default=Path("outputs"), metavar="FOLDER", help="for checkpoints")
    add("--records", type=Path, default=Path("records"), metavar="FOLDER", help="for records")
    add(
        "--weights",
        type=Path,
        metavar="FOLDER",
        help="publish the first seed's weights there, with a model card, for econv verify",
    )
    add("--fresh", action="store_true", help="start anew instead of going on")
    add("--quiet", action="store_true", help="no progress")
    add("--tensorboard", type=Path, metavar="FOLDER", help="write event files for TensorBoard")
    add("--checkpoint-every", type=int, default=10, metavar="EPOCHS", help="default: %(default)s")
    add(
        "--checkpoint-minutes",
        type=float,
        default=5.0,
        metavar="MINUTES",
        help="and within long epochs (default: %(default)s)",
    )
    add(
        "--step",
        choices=STEPS,
        help="how a step is run (default: graph on one GPU, otherwise eager)",
    )
    add("--engine", action=_Renamed, help=argparse.SUPPRESS)
    add("--precision", choices=PRECISIONS, help="default: tf32 on GPUs, otherwise float32")
    add(
        "--shared",
        type=int,
        metavar="N",
        help="how many runs share the device, this one among them, for the record",
    )
    add(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="memory layout of images (default: with bfloat16)",
    )


def main(options: argparse.Namespace) -> int:
    """Train what the options say; 0, or 1 with a line on stderr, or 130 or 143 if stopped."""
    try:
        chosen = recipe(options.recipe).with_changes(_pairs(options.changes))
        if options.seeds < 1:
            raise ValueError(f"expected --seeds of at least 1; got {options.seeds}")
        with terminable():
            for seed in range(options.seed, options.seed + options.seeds):
                _run_and_print(chosen, seed, options)
            leave()
    except KeyboardInterrupt as signal:
        print("\nStopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        return exit_code(signal)
    except (TrainingError, ValueError, ImportError, OSError) as error:
        print(f"econv train: {error}", file=sys.stderr)
        return 1
    return 0


def _run_and_print(chosen: Recipe, seed: int, options: argparse.Namespace) -> None:
    before = (
        not options.fresh
        and path_of(options.records, chosen.name, seed, options.data_seed).exists()
    )
    record = run(
        chosen,
        seed,
        root=options.root,
        source=options.source,
        recreated=options.recreated,
        data_seed=options.data_seed,
        device=options.device,
        output=options.output,
        records=options.records,
        resume=not options.fresh,
        progress=not options.quiet,
        tensorboard=options.tensorboard,
        checkpoint_every=options.checkpoint_every,
        checkpoint_minutes=options.checkpoint_minutes,
        step=options.step,
        precision=options.precision,
        channels_last=options.channels_last,
        shared=options.shared,
        weights=options.weights if seed == options.seed else None,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        labels = ["re-created"] * record.recreated + ["unverified"] * bool(record.unverified)
        label = f" ({', '.join(labels)})" if labels else ""
        angles = record.angle_errors or []
        spread = f" (from {min(angles):.2f} to {max(angles):.2f} % by angle)" if angles else ""
        name = run_name(seed, record.data_seed)
        print(
            f"{record.recipe} seed {name}: test error {record.test_error:.2f} %{spread}, "
            f"validation error {record.validation_error:.2f} % on {record.dataset}{label}, "
            f"{record.parameters:,} parameters, {record.seconds:.1f} s + "
            f"{record.setup_seconds:.1f} s to set up" + (f"; {TRAINED_BEFORE}" if before else "")
        )


def _pairs(changes: Sequence[str]) -> dict[str, str]:
    found = {}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise ValueError(f"expected --set key=value; got {change!r}")
        found[key.strip()] = value.strip()
    return found
