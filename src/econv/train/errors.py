"""The ways in which a run ends before its time."""


class TrainingError(RuntimeError):
    """A run ended before its time; the message says why and what is left."""


class DivergedError(TrainingError):
    """The loss is no longer a number."""


class WorkerLostError(TrainingError):
    """Another process of the same run is gone."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be read or belongs to another run."""


def when(phase: int, epoch: int, step: int) -> str:
    """A place in a run in words.

    >>> when(0, 3, 0), when(1, 3, 7)
    ('epoch 3', 'step 7 of epoch 4 of retraining')
    """
    of = " of retraining" if phase else ""
    return f"step {step} of epoch {epoch + 1}{of}" if step else f"epoch {epoch}{of}"
