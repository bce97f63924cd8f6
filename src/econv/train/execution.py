"""How a step is run: eagerly, captured or compiled; on which device, in which number formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from econv.train.processes import Processes

STEPS = ("eager", "graph", "compile")
PRECISIONS = ("float64", "float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Execution:
    """Device, way of running a step and number formats of a run."""

    device: torch.device
    step: str
    precision: str
    channels_last: bool

    @classmethod
    def choose(
        cls,
        processes: Processes,
        step: str | None,
        precision: str | None,
        channels_last: bool | None,
    ) -> Execution:
        on_gpu = processes.device.type == "cuda"
        step = step or ("graph" if on_gpu and processes.world == 1 else "eager")
        precision = precision or ("tf32" if on_gpu else "float32")
        if step not in STEPS:
            raise ValueError(f"expected a step in {STEPS}; got {step!r}")
        if precision not in PRECISIONS:
            raise ValueError(f"expected a precision in {PRECISIONS}; got {precision!r}")
        if step == "graph" and not on_gpu:
            raise ValueError(f"expected a GPU for the step 'graph'; got {processes.device}")
        if step != "eager" and processes.world > 1:
            raise ValueError(f"expected the step 'eager' with several processes; got {step!r}")
        if precision == "tf32" and not on_gpu:
            raise ValueError(f"expected a GPU for the precision 'tf32'; got {processes.device}")
        last = precision == "bfloat16" if channels_last is None else channels_last
        return cls(processes.device, step, precision, last)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision != "bfloat16":
            return nullcontext()
        # A cache of casted weights would outlive a captured graph.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)


@contextmanager
def convolution_precision(execution: Execution) -> Iterator[None]:
    """TF32 for convolutions alone: the products that make filters keep their accuracy."""
    if execution.device.type != "cuda":
        yield
        return
    backend = torch.backends.cudnn
    wanted = execution.precision != "float32"
    value: bool | str = wanted
    holder, name = backend, "allow_tf32"
    if hasattr(backend, "conv"):  # since torch 2.9; the two ways must not be mixed
        holder, name, value = backend.conv, "fp32_precision", "tf32" if wanted else "ieee"
    kept, benchmark = getattr(holder, name), backend.benchmark
    setattr(holder, name, value)
    backend.benchmark = True
    try:
        yield
    finally:
        setattr(holder, name, kept)
        backend.benchmark = benchmark
