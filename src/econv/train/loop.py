"""Phases, epochs, selection of the best one, and the record at the end."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from econv import engines, records
from econv.data import Dataset
from econv.recipes import Recipe
from econv.records import Record
from econv.train.board import Board
from econv.train.checkpoints import Checkpoints, Saved
from econv.train.errors import CheckpointError, DivergedError
from econv.train.execution import Execution
from econv.train.messages import RunMessages
from econv.train.processes import Processes
from econv.train.trainer import Trainer, batches


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
        board: Board,
        progress: bool,
        shared: int | None,
    ) -> None:
        self.recipe, self.seed, self.execution, self.processes = recipe, seed, execution, processes
        self.data = data.to(execution.device)
        self.checkpoints, self.checkpoint_every = checkpoints, checkpoint_every
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
            "best": None,
            "history": [],
            "seconds": 0.0,
            "setup_seconds": 0.0,
            "parts": [],
            "choices": {},
        }
        self.best: dict[str, Tensor] = {}

    def train(
        self, saved: Saved | None, started: float, ready: Callable[[], None] | None = None
    ) -> Record:
        """Train to the end; ``ready`` is called before the first step, when all is set up."""
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
                now = time.perf_counter()
                self.told["setup_seconds"] += now - started
                started = now
                started = self._phase(trainer, started)
                if self.told["phase"] == len(self.phases) - 1:
                    break
                self.told.update(phase=self.told["phase"] + 1, epoch=0)
            return self._finish(trainer, started)

    def _take_part(self) -> None:
        """Note who trains from here on, and say so if it is another one than before."""
        part = {
            "after": len(self.told["history"]),
            "revision": records.revision(),
            "source_sha256": records.source_hash(),
            "step": self.execution.step,
            "processes": self.processes.world,
            "device": _device_name(self.execution.device),
        }
        parts = self.told["parts"]
        other = [key for key in part if parts and key != "after" and parts[-1][key] != part[key]]
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
            given = {n: t for n, t in saved.tensors.items() if not n.startswith("best.")}
            if {n: t.shape for n, t in given.items()} != {n: t.shape for n, t in state.items()}:
                raise CheckpointError(
                    f"the tensors in {self.checkpoints.folder} do not fit {self.recipe.model}: "
                    "the code has changed; start anew with --fresh"
                )
            for name, tensor in state.items():
                tensor.copy_(given[name])
            self.best = {
                name.removeprefix("best."): tensor.to(self.execution.device)
                for name, tensor in saved.tensors.items()
                if name.startswith("best.")
            }
            self.say.resumed(self.told["phase"], self.told["epoch"])
        if self.phases[self.told["phase"]] == "select":
            trainer.watch(self.data.validation)
        return trainer

    def _phase(self, trainer: Trainer, started: float) -> float:
        recipe, told = self.recipe, self.told
        phase = self.phases[told["phase"]]
        self.say.phase(phase, trainer.batch)
        while told["epoch"] < recipe.epochs:
            number = told["epoch"]
            losses = trainer.epoch(number, self.say.step)
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
            now = time.perf_counter()
            entry["seconds"] = now - started
            told["seconds"] += now - started
            started = now
            told["history"].append(entry)
            told["epoch"] = number + 1
            self.say.epoch(entry, told["best"])
            self.board.epoch(entry, len(told["history"]))
            if last or (number + 1) % self.checkpoint_every == 0:
                self._save(trainer)
                # What a checkpoint takes belongs to the run, too.
                now = time.perf_counter()
                told["seconds"] += now - started
                started = now
        return started

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

    def _save(self, trainer: Trainer) -> None:
        if not self.processes.first:
            return
        tensors = trainer.state() | {f"best.{name}": t for name, t in self.best.items()}
        self.board.flush()
        self.told["choices"] = engines.kept()
        self.checkpoints.save(self.told, tensors)

    def _finish(self, trainer: Trainer, started: float) -> Record:
        told, split, best = self.told, self.data.test, self.told["best"]
        retrained = self.phases[-1] == "retrain"
        if not retrained:
            trainer.evaluated.load_state_dict(self.best)
        angles = self.recipe.test_angles
        turned = [trainer.predict(split, 360 * turn / angles) for turn in range(1, angles)]
        predicted = [found for found, _ in (trainer.predict(split), *turned)]
        errors = [100 * int((found != split.y).sum()) / len(split.y) for found in predicted]
        classes = torch.cat(predicted)
        self.checkpoints.save_weights(trainer.evaluated.state_dict())
        told["seconds"] += time.perf_counter() - started
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
            convolutions=trainer.convolutions or None,
            choices=engines.kept(),
            angle_errors=errors if angles else None,
        )
        self.say.finished(record)
        return record


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
