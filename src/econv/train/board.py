"""TensorBoard's event files, on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from econv.recipes import Recipe
from econv.train.processes import Processes


@contextmanager
def tensorboard_writer(
    folder: Path | str | None, recipe: Recipe, seed: int, processes: Processes
) -> Iterator[Any]:
    if folder is None or not processes.first:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("--tensorboard needs it: pip install tensorboard") from None
    writer = SummaryWriter(str(Path(folder) / recipe.name / str(seed)))
    try:
        yield writer
    finally:
        writer.close()
