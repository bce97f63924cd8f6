"""A run from its arguments to its record: refused, found finished, resumed or started anew."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from econv import files
from econv import records as records_room
from econv.data import Dataset, fingerprint, load
from econv.recipes import Recipe
from econv.records import Record
from econv.train.board import open_board
from econv.train.checkpoints import Checkpoints, clear
from econv.train.errors import CheckpointError
from econv.train.execution import Execution, convolution_precision
from econv.train.loop import Loop
from econv.train.processes import Processes, watched
from econv.train.publishing import expect_publishable, publish


def run(
    recipe: Recipe,
    seed: int,
    *,
    data: Dataset | None = None,
    root: Path | str | None = None,
    source: Path | str | None = None,
    recreated: bool = False,
    data_seed: int = 0,
    device: torch.device | str | None = None,
    output: Path | str = "outputs",
    records: Path | str = "records",
    resume: bool = True,
    progress: bool = True,
    tensorboard: Path | str | None = None,
    checkpoint_every: int = 10,
    checkpoint_minutes: float = 5.0,
    step: str | None = None,
    precision: str | None = None,
    channels_last: bool | None = None,
    shared: int | None = None,
    weights: Path | str | None = None,
    when_ready: Callable[[], None] | None = None,
) -> Record:
    """Train a recipe to its end, write the record and return it.

    The epoch with the lowest validation error is selected (of equal ones the one with the lower
    validation loss); the test split is read once, after that.

    Args:
        recipe: what to train; see :data:`econv.recipes.RECIPES`.
        seed: of the weights, the order of the images, augmentation and dropout.
        data: the data set, if it is at hand; otherwise the recipe's is loaded.
        root: where :func:`econv.data.load` keeps what it downloads.
        source: a folder or an ``.npz`` that it reads instead.
        recreated: train on the re-creation of the recipe's data set; the record says so.
        data_seed: which re-creation, as the ``seed`` of :func:`econv.data.load`; with another than
            0 places are named ``<seed>-data<data_seed>``.
        device: where to train; the first GPU if there is one.
        output: checkpoints and the trained weights go to ``<output>/<recipe>/<seed>/``.
        records: the record goes to ``<records>/<recipe>/<seed>.json``.
        resume: go on from the checkpoint, or return the record, that a run of the same settings
            left; otherwise start anew.
        progress: whether to say on stderr how far it is.
        tensorboard: a folder for TensorBoard's event files.
        checkpoint_every: epochs from one checkpoint to the next.
        checkpoint_minutes: and minutes, however long an epoch takes. The last two are kept, and
            what stops a run (Ctrl-C, SIGTERM) leaves one of where it was.
        step: how a step is run: ``"eager"``; ``"graph"``, all of it in a CUDA graph; ``"compile"``,
            the network through `torch.compile` too. By default ``"graph"`` on one GPU, otherwise
            ``"eager"``.
        precision: ``"float64"``, ``"float32"``, ``"tf32"`` or ``"bfloat16"`` for convolutions; by
            default ``"tf32"`` on GPUs and ``"float32"`` elsewhere.
        channels_last: whether images are laid out with channels last; by default with bfloat16.
        shared: how many runs share the device, this one among them, for the record: the seconds of
            a run that is not alone mean little. By default what ``ECONV_SHARED`` says, or not
            known.
        weights: a folder to publish the weights in, as ``<weights>/<recipe>/`` with a model card:
            what ``econv verify`` and ``econv.create_model(…, weights=…)`` read. By default they
            are in the output folder alone.
        when_ready: called once, when data and network are ready and training begins. What
            ``resume=False`` replaces is removed then and not before.

    Raises:
        ValueError: for arguments out of their range.
        CheckpointError: for a checkpoint or record of another run.
        InUseError: where another process trains the same run.
        DivergedError: where the loss is no longer a number.
        WorkerLostError: where a process of the run was lost.
        ImportError: for ``tensorboard`` where it is not installed.
    """
    started = time.perf_counter()
    if not 0 <= seed < 2**32:
        raise ValueError(f"expected a seed from 0 to 2**32 - 1; got {seed}")
    if checkpoint_every < 1:
        raise ValueError(f"expected checkpoint_every of at least 1; got {checkpoint_every}")
    if not checkpoint_minutes > 0:
        raise ValueError(f"expected checkpoint_minutes above 0; got {checkpoint_minutes}")
    shared = _shared(shared)
    records_room.revision()  # what is wrong with it is said before training, not after
    processes = Processes.join(device)
    execution = Execution.choose(processes, step, precision, channels_last)
    if data is not None and not data_seed:
        data_seed = data.seed or 0
    name = records_room.run_name(seed, data_seed)
    folder = Path(output) / recipe.name / name
    place = records_room.path_of(Path(records), recipe.name, seed, data_seed)

    def places() -> None:
        for wanted in (folder, place.parent, *([] if weights is None else [Path(weights)])):
            files.check_folder(wanted)

    processes.together(places, OSError)  # before hours of training, not after
    with _held(folder, processes):
        if data is None:
            given: dict[str, Any] = {"root": root, "source": source, "recreated": recreated}
            data = load(recipe.dataset, seed=data_seed, **given)
        elif recreated:
            raise ValueError("expected recreated without data: those at hand are what they are")
        if data_seed != (data.seed or 0):
            raise ValueError(
                f"expected data_seed with data that are made again with it; got {data_seed} for "
                f"{data.name}, seed {data.seed}"
            )
        if weights is not None:
            expect_publishable(data)
        identity = {
            "settings": recipe.settings(),
            "seed": seed,
            "data_sha256": fingerprint(data),
            "precision": execution.precision,
        }

        def published(record: Record) -> None:
            if weights is not None and processes.first:
                publish(record, folder, data, records, weights, processes.device, progress)

        done = _finished(identity, place, processes) if resume else None
        if done is not None:
            published(done)
            return done
        checkpoints = Checkpoints(folder, identity, processes)
        saved = checkpoints.load() if resume else None

        def ready() -> None:
            if not resume and processes.first:
                clear(folder, place)
            if when_ready is not None:
                when_ready()

        trained = len(saved.told["history"]) if saved is not None else 0
        events = None
        if tensorboard is not None and processes.first:
            events = Path(tensorboard) / recipe.name / name
        with (
            watched(processes, checkpoints.describe),
            convolution_precision(execution),
            torch.random.fork_rng(
                devices=[execution.device] if execution.device.type == "cuda" else []
            ),
            open_board(events, first_step=trained + 1) as board,
        ):
            loop = Loop(
                recipe,
                seed,
                data,
                execution,
                processes,
                checkpoints,
                checkpoint_every,
                checkpoint_minutes,
                board,
                progress,
                shared,
            )
            record = loop.train(saved, started, ready)
            if processes.first:
                records_room.save(record, Path(records))
                checkpoints.remove()
            published(record)
            processes.wait()
        return record


@contextmanager
def _held(folder: Path, processes: Processes) -> Iterator[None]:
    """The output folder for this run alone; what a killed one left half-written goes."""
    with ExitStack() as stack:

        def hold() -> None:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_empty, missing)
            if not stack.enter_context(files.locked(folder / "lock")):
                print(f"{folder}: cannot be locked here", file=sys.stderr, flush=True)
            files.remove_leftovers(folder, least_age=0.0)

        try:
            processes.together(hold, files.InUseError)
        except files.InUseError as error:
            raise files.InUseError(
                f"{error}: wait for it, end it, or name another folder as output"
            ) from None
        yield


def _remove_empty(folders: Sequence[Path]) -> None:
    """Folders that were made for nothing: a run that is refused leaves none."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _finished(identity: dict[str, Any], path: Path, processes: Processes) -> Record | None:
    """The record that an earlier run left; an error if it is one of something else."""
    content = path.read_bytes() if processes.first and path.exists() else None
    content = processes.share(content)
    if content is None:
        return None
    record = records_room.parse(content, path)
    other = [name for name, wanted in identity.items() if getattr(record, name) != wanted]
    if other:
        raise CheckpointError(
            f"{path} is the record of a run with other {' and '.join(other)}; start anew with "
            "--fresh, or name another folder for records"
        )
    return record


def _shared(told: int | None) -> int | None:
    text = os.environ.get("ECONV_SHARED")
    what = "shared"
    if told is None and text:
        what, told = "ECONV_SHARED", int(text) if text.isdecimal() else 0
    if told is not None and told < 1:
        given = told if what == "shared" else repr(text)
        raise ValueError(f"expected {what} as the number of runs, 1 or more; got {given}")
    return told
