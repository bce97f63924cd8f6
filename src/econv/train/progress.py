"""What a run tells while it goes: lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from econv.recipes import Recipe
from econv.records import Record


class Progress:
    """One line that is rewritten on a terminal; a line now and then elsewhere."""

    def __init__(self, recipe: Recipe, seed: int, enabled: bool) -> None:
        self.recipe = recipe
        self.title = f"{recipe.name}, seed {seed}"
        self.enabled = enabled
        self.terminal = sys.stderr.isatty()
        self.interval = 0.2 if self.terminal else 10.0
        self.told = time.monotonic()
        self.trained = 0
        self.spent = 0.0
        self.text = ""

    def _say(self, text: str, important: bool = False) -> None:
        now = time.monotonic()
        if not self.enabled or (now - self.told < self.interval and not important):
            return
        self.told = now
        if self.terminal:
            end = "\n" if important else ""
            print(f"\r\x1b[K{text}", end=end, file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def resumed(self, epoch: int) -> None:
        self._say(f"{self.title}: going on after epoch {epoch}", important=True)

    def step(self, epoch: int, step: int, steps: int) -> None:
        # On a GPU steps are only queued here; the epochs tell the truth about time.
        self._say(
            f"{self.title}: epoch {epoch + 1}/{self.recipe.epochs}, step {step + 1}/{steps}"
            f"{self.text}"
        )

    def epoch(
        self, entry: Mapping[str, Any], best: Mapping[str, Any] | None, images: int, phases: int
    ) -> None:
        self.trained += 1
        self.spent += entry["seconds"]
        each = self.spent / self.trained
        ahead = self.recipe.epochs - entry["epoch"]
        if entry["phase"] == "select":
            ahead += (phases - 1) * self.recipe.epochs
        self.text = f", loss {entry['loss']:.4f}"
        if "validation_error" in entry and best is not None:
            self.text += (
                f", validation {entry['validation_error']:.2f} % "
                f"(best {best['validation_error']:.2f} % at {best['epoch']})"
            )
        remaining = timedelta(seconds=round(ahead * each))
        self.text += f", {images / entry['seconds']:,.0f} images/s, {remaining} left"
        retrain = " of retraining" if entry["phase"] == "retrain" else ""
        self._say(
            f"{self.title}: epoch {entry['epoch']}/{self.recipe.epochs}{retrain}{self.text}",
            important=ahead == 0,
        )

    def finished(self, record: Record) -> None:
        self._say(
            f"{self.title}: test error {record.test_error:.2f} %, validation "
            f"{record.validation_error:.2f} % (epoch {record.selected_epoch}), "
            f"{record.parameters:,} parameters, {record.seconds:.1f} s + "
            f"{record.setup_seconds:.1f} s to set up, {record.device}",
            important=True,
        )
