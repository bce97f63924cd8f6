"""The ways in which a run ends before its time."""


class TrainingError(RuntimeError):
    """A run ended before its time; the message says why and what is left."""


class DivergedError(TrainingError):
    """The loss is no longer a number."""


class WorkerLostError(TrainingError):
    """Another process of the same run is gone."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be read or belongs to another run."""
