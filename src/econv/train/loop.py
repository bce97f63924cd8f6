"""Phases, epochs, selection of the best one, and the record at the end."""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from econv import engines, files, records
from econv.data import Dataset
from econv.engines.spectral import native
from econv.recipes import Recipe
from econv.records import Record
from econv.train.board import Board
from econv.train.checkpoints import Checkpoints, Saved
from econv.train.errors import CheckpointError, DivergedError
from econv.train.execution import Execution
from econv.train.messages import RunMessages
from econv.train.processes import Processes
from econv.train.stopping import SIGNALS, Stop
from econv.train.trainer import Trainer, batches

_LOOKED = 16  # steps from one agreement of several processes to the next


class Loop:
    """Phases, epochs, selection and checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        data: Dataset,
        execution: Execution,
        processes: Processes,
        checkpoints: Checkpoints,
        checkpoint_every: int,
        checkpoint_minutes: float,
        board: Board,
        progress: bool,
        shared: int | None,
    ) -> None:
        self.recipe, self.seed, self.execution, self.processes = recipe, seed, execution, processes
        self.data = data.to(execution.device)
        self.checkpoints, self.checkpoint_every = checkpoints, checkpoint_every
        self.checkpoint_seconds = 60 * checkpoint_minutes
        self.saved = self.since = time.perf_counter()
        self.stop = Stop()
        self.board = board
        self.shared = shared
        self.phases = ["select", "retrain"] if recipe.retrain_on_all else ["select"]
        images = len(data.train), len(data.train) + len(data.validation)
        self.say = RunMessages(
            recipe,
            seed,
            [
                math.prod(batches(recipe, count))
                for count, _ in zip(images, self.phases, strict=False)
            ],
            steps_settle=execution.device.type != "cuda",
            enabled=progress and processes.first,
        )
        # What goes into the checkpoint's JSON, next to the tensors.
        self.told: dict[str, Any] = {
            "phase": 0,
            "epoch": 0,
            "step": 0,  # of the epoch that is under way, and how long those took
            "spent": 0.0,
            "best": None,
            "history": [],
            "seconds": 0.0,
            "setup_seconds": 0.0,
            "parts": [],
            "choices": {},
            "convolutions": {},
        }
        self.best: dict[str, Tensor] = {}

    def train(
        self, saved: Saved | None, started: float, ready: Callable[[], None] | None = None
    ) -> Record:
        """Train to the end; ``ready`` is called before the first step, when all is set up."""
        self.since = started
        if saved is not None:
            self.told.update(saved.told)
            engines.keep(self.told["choices"])  # or the next steps could round another way
        with self.say:
            self._take_part()
            while True:
                trainer = self._trainer(saved)
                saved = None
                if ready is not None:
                    ready()
                    ready = None
                self.told["setup_seconds"] += self._lap()
                with self.stop:
                    self._phase(trainer)
                if self.told["phase"] == len(self.phases) - 1:
                    break
                self.told.update(phase=self.told["phase"] + 1, epoch=0)
            return self._finish(trainer)

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self.since = self.since, time.perf_counter()
        return self.since - before

    def _take_part(self) -> None:
        """Note who trains from here on, and say so if it is another one than before."""
        part = {
            "after": len(self.told["history"]),
            "revision": records.revision(),
            "source_sha256": records.source_hash(),
            "step": self.execution.step,
            "processes": self.processes.world,
            "device": _device_name(self.execution.device),
            "torch": str(torch.__version__),
            "processor": files.processor_name(),
            "kernel": _kernel(self.execution),
        }
        parts = self.told["parts"]
        before = parts[-1] if parts else {}  # older ones say less
        other = [key for key in part if key != "after" and before.get(key, part[key]) != part[key]]
        if other:
            self.say.changed(other)
        if other or not parts:
            parts.append(part)

    def _trainer(self, saved: Saved | None) -> Trainer:
        data = self.data
        if self.phases[self.told["phase"]] == "retrain":
            data = data.with_validation_in_training()
        trainer = Trainer(self.recipe, self.seed, data.train, data, self.execution, self.processes)
        if saved is not None:
            state = trainer.state()
            within = {n: t for n, t in saved.tensors.items() if n in ("losses", "generator")}
            given = {
                n: t
                for n, t in saved.tensors.items()
                if not n.startswith("best.") and n not in within
            }
            if {n: t.shape for n, t in given.items()} != {n: t.shape for n, t in state.items()}:
                raise CheckpointError(
                    f"the tensors in {self.checkpoints.folder} do not fit {self.recipe.model}: "
                    "the code has changed; start anew with --fresh"
                )
            for name, tensor in state.items():
                tensor.copy_(given[name])
            step, done = self.told["step"], self.told["epoch"] * trainer.steps + self.told["step"]
            if int(trainer.step_number) != done or step >= trainer.steps or (step and not within):
                raise CheckpointError(
                    f"the tensors in {self.checkpoints.folder} are those after step "
                    f"{int(trainer.step_number)}; expected {done}: start anew with --fresh"
                )
            if step:
                trainer.go_on(within)
            self.best = {
                name.removeprefix("best."): tensor.to(self.execution.device)
                for name, tensor in saved.tensors.items()
                if name.startswith("best.")
            }
            self.say.resumed(self.told["phase"], self.told["epoch"], step, trainer.batch)
        if self.phases[self.told["phase"]] == "select":
            trainer.watch(self.data.validation)
        return trainer

    def _phase(self, trainer: Trainer) -> None:
        recipe, told = self.recipe, self.told
        phase = self.phases[told["phase"]]
        self.say.phase(phase, trainer.batch)
        while told["epoch"] < recipe.epochs:
            number = told["epoch"]

            def stepped(epoch: int, step: int, steps: int) -> None:
                self.say.step(epoch, step, steps)
                self._look(trainer, step + 1)

            losses = trainer.epoch(number, stepped, told["step"])
            self._check(losses, trainer, number)
            entry: dict[str, Any] = {
                "phase": phase,
                "epoch": number + 1,
                "learning_rate": recipe.rate(number + 0.5),
                "loss": sum(losses) / len(losses),
            }
            last = number + 1 == recipe.epochs
            if phase == "select" and (last or (number + 1) % recipe.evaluate_every == 0):
                self._evaluate(trainer, entry)
            lap = self._lap()
            entry["seconds"] = told["spent"] + lap
            told["seconds"] += lap
            told["history"].append(entry)
            told.update(epoch=number + 1, step=0, spent=0.0)
            self.say.epoch(entry, told["best"])
            self.board.epoch(entry, len(told["history"]))
            asked, due = self._wanted()
            if last or due or (number + 1) % self.checkpoint_every == 0:
                self._save(trainer)
                # What a checkpoint takes belongs to the run, too.
                told["seconds"] += self._lap()
            if asked is not None:
                self.stop.obey(asked)

    def _look(self, trainer: Trainer, done: int) -> None:
        """In the middle of an epoch: save what is due, and stop if that was asked for."""
        if done == trainer.steps or (self.processes.world > 1 and done % _LOOKED):
            return
        asked, due = self._wanted()
        if not due:
            return
        told, within = self.told, trainer.within()
        self._check(within["losses"][:done].tolist(), trainer, told["epoch"])
        lap = self._lap()
        told["seconds"] += lap
        told.update(step=done, spent=told["spent"] + lap)
        self._save(trainer, within)
        if asked is not None:
            self.stop.obey(asked)

    def _wanted(self) -> tuple[signal.Signals | None, bool]:
        """The signal that asks to stop, and whether to save: the same in all processes."""
        late = time.perf_counter() - self.saved >= self.checkpoint_seconds
        found = [self.stop.asked == number for number in SIGNALS] + [late and self.processes.first]
        if self.processes.world > 1:
            told = torch.tensor(found, dtype=torch.int64, device=self.processes.device)
            found = self.processes.sum(told).bool().tolist()
        asked = [number for number, one in zip(SIGNALS, found, strict=False) if one]
        return (asked[-1] if asked else None), any(found)

    def _check(self, losses: list[float], trainer: Trainer, number: int) -> None:
        bad = next((i for i, loss in enumerate(losses) if not abs(loss) < float("inf")), None)
        if bad is None and trainer.finite():
            return
        where = f"step {number * trainer.steps + (len(losses) if bad is None else bad + 1)}"
        within = f"epoch {number + 1}, step {(len(losses) if bad is None else bad + 1)}"
        what = (
            "the weights are no numbers after" if bad is None else f"the loss is {losses[bad]} at"
        )
        raise DivergedError(
            f"{self.recipe.name}, seed {self.seed}: {what} {where} ({within} of {trainer.steps}). "
            f"{self.checkpoints.describe()} A lower learning_rate may help."
        )

    def _evaluate(self, trainer: Trainer, entry: dict[str, Any]) -> None:
        split = self.data.validation
        classes, loss = trainer.predict(split)
        error = 100 * int((classes != split.y).sum()) / len(split.y)
        if not abs(loss) < float("inf"):
            raise DivergedError(
                f"{self.recipe.name}, seed {self.seed}: the validation loss is {loss} after epoch "
                f"{entry['epoch']}. {self.checkpoints.describe()}"
            )
        entry.update(validation_loss=loss, validation_error=error)
        best = self.told["best"]
        if best is None or (error, loss) < (best["validation_error"], best["validation_loss"]):
            self.told["best"] = {
                "epoch": entry["epoch"],
                "validation_error": error,
                "validation_loss": loss,
            }
            self.best = {n: t.clone() for n, t in trainer.evaluated.state_dict().items()}

    def _save(self, trainer: Trainer, within: Mapping[str, Tensor] | None = None) -> None:
        if self.processes.first:
            best = {f"best.{name}": tensor for name, tensor in self.best.items()}
            self.board.flush()
            self.told["choices"] = engines.kept()
            self.told["convolutions"] = trainer.convolutions or self.told["convolutions"]
            self.checkpoints.save(self.told, {**trainer.state(), **best, **(within or {})})
        self.saved = time.perf_counter()

    def _finish(self, trainer: Trainer) -> Record:
        told, split, best = self.told, self.data.test, self.told["best"]
        retrained = self.phases[-1] == "retrain"
        if not retrained:
            trainer.evaluated.load_state_dict(self.best)
        angles = self.recipe.test_angles
        turned = [trainer.predict(split, 360 * turn / angles) for turn in range(1, angles)]
        predicted = [found for found, _ in (trainer.predict(split), *turned)]
        errors = [100 * int((found != split.y).sum()) / len(split.y) for found in predicted]
        classes = torch.cat(predicted)
        weights = self.checkpoints.save_weights(trainer.evaluated.state_dict())
        told["seconds"] += self._lap()
        record = Record(
            recipe=self.recipe.name,
            seed=self.seed,
            dataset=self.data.name,
            recreated=self.data.recreated,
            parameters=sum(p.numel() for p in trainer.model.parameters()),
            validation_error=best["validation_error"],
            test_error=sum(errors) / len(errors),
            seconds=told["seconds"],
            setup_seconds=told["setup_seconds"],
            device=_device_name(self.execution.device),
            selected_epoch=best["epoch"],
            retrained=retrained,
            data_sha256=self.checkpoints.identity["data_sha256"],
            predictions_sha256=hashlib.sha256(classes.cpu().numpy().tobytes()).hexdigest(),
            epochs=told["history"],
            settings=self.recipe.settings(),
            processes=self.processes.world,
            step=self.execution.step,
            precision=self.execution.precision,
            revision=records.revision(),
            source_sha256=records.source_hash(),
            versions=records.versions(),
            finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            unverified=self.data.unverified,
            channels_last=self.execution.channels_last,
            parts=told["parts"],
            shared=self.shared,
            convolutions=trainer.convolutions or told["convolutions"] or None,
            choices=engines.kept(),
            angle_errors=errors if angles else None,
            weights_sha256=weights,
            data_seed=self.data.seed,
        )
        self.say.finished(record)
        return record


def _kernel(execution: Execution) -> str:
    """What is compiled for the convolutions: other kernels round another way."""
    if execution.device.type == "cpu":
        return files.printable(native.identity(execution.dtype))[:200]
    try:
        return f"triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        return "none"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
