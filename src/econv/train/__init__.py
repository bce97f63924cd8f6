"""Training: from a recipe and a seed to a record.

Everything that a step reads lives on the device: the images, the epoch's permutation, the learning
rates of all steps and the step's own number. A step is therefore the same sequence of operations
every time, and on a GPU it is captured once, as a CUDA graph, and replayed. All randomness is
keyed by seed, epoch and sample, so that a run depends neither on the number of processes nor on
having been interrupted. Only dropout on a single GPU is torch's own, seeded in every epoch.

Several processes run under ``torchrun`` with torch's own `DistributedDataParallel`: it is part of
torch, starts on every cluster, and leaves this loop as it is. They compute what one would, to
rounding: in float64 losses agree to 1e-9 and better, in float32 to 1e-6 in the first steps only,
since training amplifies rounding. Networks this small gain nothing from sharded optimisers, which
is what larger frameworks would add.

The modules, from the bottom up: `errors`; `processes`, who trains together; `execution`, device,
way of running a step and number formats; `capture`, a step as a CUDA graph; `parts`, dropout and
norms for both; `optimise`, all parameters as one vector; `trainer`, one state and its step;
`checkpoints`; `messages` and `board`, what is told meanwhile; `loop`, phases and epochs; `runs`,
from arguments to the record; `publishing`, its weights for others; `command`, the same from the
shell.
"""

from econv.train.command import TRAINED_BEFORE, add_arguments, main
from econv.train.errors import CheckpointError, DivergedError, TrainingError, WorkerLostError
from econv.train.execution import PRECISIONS, STEPS
from econv.train.parts import KeyedDropout
from econv.train.processes import leave
from econv.train.publishing import Evaluation, publish
from econv.train.runs import run

__all__ = [
    "PRECISIONS",
    "STEPS",
    "TRAINED_BEFORE",
    "CheckpointError",
    "DivergedError",
    "Evaluation",
    "KeyedDropout",
    "TrainingError",
    "WorkerLostError",
    "add_arguments",
    "leave",
    "main",
    "publish",
    "run",
]
