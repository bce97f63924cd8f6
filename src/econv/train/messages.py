"""What a run tells while it goes: images, steps, epochs and how it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from econv.progress import Progress
from econv.recipes import Recipe
from econv.records import Record
from econv.train.errors import when


class RunMessages:
    """What one run says of its progress, counted in images.

    Args:
        recipe: that is trained.
        seed: of the run.
        per_epoch: images in an epoch of each phase.
        steps_settle: whether a step is done when it returns; on a GPU it is only queued then, and
            the epochs tell the truth about time.
        enabled: whether to say anything.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        per_epoch: Sequence[int],
        steps_settle: bool,
        enabled: bool,
    ) -> None:
        self.recipe, self.per_epoch, self.steps_settle = recipe, per_epoch, steps_settle
        self.title = f"{recipe.name}, seed {seed}"
        total = recipe.epochs * sum(per_epoch)
        self.bar = Progress(self.title, total, lambda rate: f"{rate:,.0f} images/s", enabled)
        self.batch = 0
        self.retraining = ""
        self.metrics = ""

    def __enter__(self) -> RunMessages:
        self.bar.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self.bar.__exit__(*reason)

    def resumed(self, phase: int, epoch: int, step: int, batch: int) -> None:
        before = self.recipe.epochs * sum(self.per_epoch[:phase])
        self.bar.skip(before + epoch * self.per_epoch[phase] + step * batch)
        self.bar.say(f"{self.title}: going on after {when(phase, epoch, step)}")

    def changed(self, what: Sequence[str]) -> None:
        names = ", ".join(what)
        self.bar.say(f"{self.title}: going on with other {names}; the record names both")

    def phase(self, name: str, batch: int) -> None:
        """All is set up, and a phase begins or goes on."""
        self.batch = batch
        self.retraining = " of retraining" if name == "retrain" else ""
        self.bar.restart()

    def step(self, epoch: int, step: int, steps: int) -> None:
        detail = f"epoch {epoch + 1}/{self.recipe.epochs}{self.retraining}, step {step + 1}/{steps}"
        self.bar.advance(self.batch, detail + self.metrics, self.steps_settle)

    def epoch(self, entry: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
        self.metrics = f", loss {entry['loss']:.4f}"
        if "validation_error" in entry and best is not None:
            self.metrics += (
                f", validation {entry['validation_error']:.2f} % "
                f"(best {best['validation_error']:.2f} % at {best['epoch']})"
            )
        detail = f"epoch {entry['epoch']}/{self.recipe.epochs}{self.retraining}"
        self.bar.advance(0, detail + self.metrics)

    def finished(self, record: Record) -> None:
        self.bar.say(
            f"{self.title}: test error {record.test_error:.2f} %, validation "
            f"{record.validation_error:.2f} % (epoch {record.selected_epoch}), "
            f"{record.parameters:,} parameters, {record.seconds:.1f} s + "
            f"{record.setup_seconds:.1f} s to set up, {record.device}"
        )
