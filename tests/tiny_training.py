"""A training that takes a second: rings of three radii, two layers, four epochs."""

import dataclasses
from pathlib import Path

import pytest
import torch

from econv import train
from econv.data import Dataset, Split
from econv.recipes import Recipe
from econv.records import Record
from econv.train.execution import Execution
from econv.train.processes import Processes
from econv.train.trainer import Trainer

ONE = Processes(0, 1, torch.device("cpu"))
EXECUTION = Execution(torch.device("cpu"), "eager", "float64", False)

TINY = Recipe(
    name="tiny",
    table=0,
    row="tiny",
    dataset="stripes",
    model="convnet6_p4",
    model_options=(
        ("fields", (2, 3)),
        ("image_size", 12),
        ("num_classes", 3),
        ("pooled_after", (1,)),
        ("dropout", 0.2),
        ("pool", "max"),
    ),
    epochs=4,
    batch_size=16,
    learning_rate=0.02,
    warmup_epochs=1.0,
    weight_decay=0.01,
    label_smoothing=0.05,
    ema_decay=0.9,
    augmentation=(("rotate", True), ("shift", 1)),
)


def stripes(seed: int = 0, train_count: int = 70) -> Dataset:
    """Rings of three radii in noise: a task that any turn leaves as it is."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.arange(12) - 5.5
    radius = (axis[:, None] ** 2 + axis**2).sqrt()

    def split(count: int) -> Split:
        y = torch.randint(0, 3, (count,), generator=generator)
        rings = torch.stack([(radius - r).abs() < 0.8 for r in (1.0, 3.0, 5.0)])
        noise = torch.randint(0, 100, (count, 12, 12), generator=generator)
        x = (rings[y] * 120 + noise).to(torch.uint8)
        return Split(x[:, None], y)

    return Dataset.of("stripes", split(train_count), split(40), split(50), 3)


def start(folder: Path, recipe: Recipe = TINY, seed: int = 0, **options: object) -> Record:
    values: dict[str, object] = {
        "data": stripes(),
        "device": "cpu",
        "output": folder / "out",
        "records": folder / "records",
        "progress": False,
        "checkpoint_every": 1,
    }
    return train.run(recipe, seed, **{**values, **options})  # type: ignore[arg-type]


def outcome(record: Record) -> dict[str, object]:
    """All of a record but what time and place leave on it."""
    told = dataclasses.asdict(record)
    for name in ("seconds", "setup_seconds", "finished"):
        del told[name]
    told["epochs"] = [{k: v for k, v in e.items() if k != "seconds"} for e in record.epochs]
    return told


def weights(folder: Path, recipe: Recipe = TINY, seed: int = 0) -> bytes:
    return (folder / "out" / recipe.name / str(seed) / "model.safetensors").read_bytes()


def losses(record: Record) -> list[float]:
    return [e[name] for e in record.epochs for name in ("loss", "validation_loss")]


def trainer(recipe: Recipe = TINY, data: Dataset | None = None, **changes: object) -> Trainer:
    data = data or stripes()
    chosen = dataclasses.replace(EXECUTION, **changes)
    return Trainer(recipe, 0, data.train, data, chosen, ONE)


def changed(**changes: object) -> Recipe:
    return dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


def with_options(**options: object) -> Recipe:
    return changed(model_options=tuple({**dict(TINY.model_options), **options}.items()))


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, error: type[BaseException]) -> None:
    """The run ends when it comes to that step, counted from 1 over all phases."""
    original = Trainer.step
    done = [0]

    def stopping(self: Trainer) -> None:
        done[0] += 1
        if done[0] == step:
            raise error
        original(self)

    monkeypatch.setattr(Trainer, "step", stopping)
