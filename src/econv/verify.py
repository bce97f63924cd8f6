"""Check trained weights: predict the test images again, and compare with the record of the run."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

from econv import data as data_room
from econv import records, train
from econv.data import DataError
from econv.weights import Weights, named

__all__ = ["add_arguments", "main"]


class _ElsewhereError(Exception):
    """The images are not here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``econv verify``."""
    add = parser.add_argument
    add(
        "weights",
        nargs="*",
        metavar="RECIPE",
        help="names of weights, which are those of recipes, or their folders",
    )
    add("--all", action="store_true", help="all weights whose images are here; nothing is loaded")
    add("--root", type=Path, metavar="FOLDER", help="where downloaded data are kept")
    add("--source", type=Path, metavar="PATH", help="a folder or .npz with the data")
    add(
        "--records",
        type=Path,
        default=Path("records"),
        metavar="FOLDER",
        help="compared with the weights' card where the record is there (default: %(default)s)",
    )
    add("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    add("--quiet", action="store_true", help="no progress")


def main(options: argparse.Namespace) -> int:
    """Verify what the options say; 0 if all of it holds, otherwise 1."""
    names, there = list(options.weights), ""
    try:
        if options.all:
            names += named()
        elif not names:
            there = ", ".join(named())
    except (ValueError, OSError) as error:
        print(f"econv verify: {error}", file=sys.stderr)
        return 1
    if not names:
        print(
            f"econv verify: expected names of weights, or --all; found {there or 'none'}",
            file=sys.stderr,
        )
        return 1
    failed = done = 0
    for name in dict.fromkeys(names):
        try:
            failed += not _verified(name, options, download=name in options.weights)
            done += 1
        except _ElsewhereError as error:
            print(f"{name}: skipped, {error}")
        except (ValueError, ImportError, OSError) as error:
            print(f"econv verify: {name}: {error}", file=sys.stderr)
            failed += 1
    if not failed and not done:
        print(
            "econv verify: no images of any weights are here; --source says where", file=sys.stderr
        )
    return 1 if failed or not done else 0


def _verified(name: str, options: argparse.Namespace, download: bool) -> bool:
    started = time.perf_counter()
    weights = Weights.find(name)
    _check_record(weights, options.records)
    data = _data(weights, options, download)
    if data_room.fingerprint(data) != weights.data_sha256:
        raise ValueError(f"expected the images of the record; those of {data.name} are others")
    network = weights.load()
    found = train.Evaluation.of(
        network, weights, data.test, options.device, progress=not options.quiet
    )
    seconds = time.perf_counter() - started
    if found.same:
        what = f"all {found.count:,} predictions are the record's"
    elif found.comparable:
        what = f"not all of {found.count:,} predictions are the record's"
    elif found.close:
        what = f"the record's error, to rounding ({weights.dtype}, recorded in {weights.precision})"
    else:
        what = "not the record's error"
    print(
        f"{weights.name}: {'verified' if found.holds else 'FAILED'}, {what}: test error "
        f"{found.error:.2f} %, recorded {found.wanted:.2f} %, on {weights.dataset}"
        f"{' (re-created)' * weights.recreated}, {seconds:.1f} s"
    )
    return found.holds


def _check_record(weights: Weights, folder: Path) -> None:
    """Raise `ValueError` if the record is there and is another one than the card says."""
    path = records.path_of(folder, weights.recipe, weights.seed, weights.data_seed)
    if not path.is_file():
        return
    record = records.load(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != weights.record_sha256 or record.predictions_sha256 != weights.predictions_sha256:
        raise ValueError(
            f"expected {path} with the SHA-256 {weights.record_sha256}, of the run that these "
            f"weights are from; got {digest}"
        )


def _data(weights: Weights, options: argparse.Namespace, download: bool) -> data_room.Dataset:
    try:
        return data_room.load(
            weights.dataset,
            root=options.root,
            source=options.source,
            seed=weights.data_seed,
            recreated=weights.recreated and not weights.dataset.endswith("_recreated"),
            download=download,
        )
    except DataError as error:
        if download:
            raise
        raise _ElsewhereError(str(error)) from None
