"""How kernels are launched: compiled at the same time, and run one after the other.

Triton finds out at every launch which compiled kernel fits its arguments. That depends on shapes
and on how addresses are aligned alone, so that a `Launch` remembers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor

FIRST = triton.__version__.startswith("3.6.")
"""Along which axes a load distributes threads, then warps: the first ones, or those next to the
contiguous axis. Tensors with another order would be exchanged between threads."""


class Launch:
    """A kernel with all arguments but tensors, which come first: then numbers, then constants."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], /, **options: Any
    ) -> None:
        self.kernel, self.grid, self.options = kernel, (*grid, 1, 1)[:3], options
        self.numbers = numbers
        known = {*getattr(kernel, "arg_names", options), "num_warps", "num_stages", "maxnreg"}
        if unknown := options.keys() - known:  # what interprets kernels would not say
            raise TypeError(f"{kernel} takes no {', '.join(sorted(unknown))}")
        constants = [value for name, value in options.items() if name.isupper()]
        self._more = (*numbers, *constants)
        self._run: Callable[..., None] | None = None
        self.known = False
        """Whether it was compiled, or left to its first call."""

    def __call__(self, *tensors: Any) -> None:
        """Run on tensors, or on what says how they are copied: those are aligned."""
        loose = [one for one in tensors if isinstance(one, Tensor) and one.data_ptr() % 16]
        if self._run is not None and not loose:
            self._run(*tensors, *self._more)
            return
        found = self.kernel[self.grid](*tensors, *self.numbers, **self.options)
        if not loose and found is not None:  # nothing is compiled where Triton interprets
            self._run = found[self.grid]


Job = tuple[Launch, Sequence[Any]]
"""A launch, and the tensors that it runs on."""


def launch_all(jobs: Sequence[Job]) -> None:
    """Launch one after the other."""
    compile_together(jobs)
    for launch, tensors in jobs:
        launch(*tensors)


def compile_together(jobs: Sequence[Job]) -> None:
    """Compile the kernels of launches that are new, all at the same time.

    Compilers work without Python for most of the time.
    """
    new = {
        id(launch.kernel): (launch, tensors)
        for launch, tensors in jobs
        if not launch.known and isinstance(launch.kernel, triton.JITFunction)
    }
    for launch, _ in jobs:
        launch.known = True
    if len(new) < 2:
        return

    def compiled(job: Job) -> None:
        launch, tensors = job
        with torch.cuda.device_of(tensors[0]):
            launch.kernel.warmup(*tensors, *launch.numbers, grid=launch.grid, **launch.options)

    with ThreadPoolExecutor(len(new)) as pool:
        list(pool.map(compiled, new.values()))
