"""TensorBoard's event files, on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Board:
    """Where every epoch's metrics go; nowhere without a writer."""

    def __init__(self, writer: Any = None) -> None:
        self.writer = writer

    def epoch(self, entry: Mapping[str, Any], step: int) -> None:
        if self.writer is not None:
            for name in ("loss", "learning_rate", "validation_loss", "validation_error"):
                if name in entry:
                    self.writer.add_scalar(name, entry[name], step)

    def flush(self) -> None:
        """Bring to the disk what a run that is killed would not write again."""
        if self.writer is not None:
            self.writer.flush()


@contextmanager
def open_board(folder: Path | None, first_step: int) -> Iterator[Board]:
    """Event files in the folder; what earlier ones say of the steps to come no longer counts."""
    if folder is None:
        yield Board()
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("--tensorboard needs it: pip install tensorboard") from None
    writer = SummaryWriter(str(folder), purge_step=first_step)
    try:
        yield Board(writer)
    finally:
        writer.close()
