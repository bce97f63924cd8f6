"""How kernels are launched: by Triton at first, and from then on with as little Python as can be.

Triton finds out at every launch which compiled kernel fits its arguments, asks the driver about
every address, and encodes how each matrix is copied. All of that depends on shapes and addresses
alone. A `Launch` remembers the first; `Steps`, what an operator launches one after the other,
describe their operands as places in a few tensors, so that later calls add up addresses and hand
them to the compiled launcher. What is encoded for an address is kept, since memory comes back at
the same addresses in every step of a training.

The compiled launcher is no public part of Triton: with a version other than those it was checked
for, or while somebody listens to launches, each goes through Triton.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

__all__ = ["Copied", "Launch", "Part", "Steps", "compile_together"]

_KNOWN = ("3.6.", "3.7.")  # versions of Triton whose launchers are called as `_queue` calls them
_KEPT = 16  # addresses for which a launch keeps what was encoded


class Copied(Protocol):
    """How a kernel copies matrices: descriptors, one operand each."""

    def __call__(self, memory: Tensor) -> Sequence[Any]:
        """Of matrices in some memory."""

    def at(self, address: int) -> Sequence[Any]:
        """Of matrices at an address."""


Queue = Callable[..., None]
"""Launches: takes a stream and addresses, and an address for all that is copied from there."""


class Launch:
    """A kernel with all of its arguments that depend on shapes alone.

    A kernel takes tensors, then numbers, then constants. Which compiled kernel fits them is found
    at the first launch, and again where addresses are less aligned.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], **options: Any
    ) -> None:
        self.kernel, self.grid, self.options = kernel, (*grid, 1, 1)[:3], options
        self.numbers = numbers
        constants = [value for name, value in options.items() if name.isupper()]
        self.more = (*numbers, *constants)
        self.compiled: Any = None
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: Any) -> None:
        """Run on tensors, or on what says how they are copied: those are aligned."""
        aligned = True
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.data_ptr() % 16:
                aligned = False
        if aligned and self._run is not None:
            self._run(*tensors, *self.more)
            return
        found = self.kernel[self.grid](*tensors, *self.numbers, **self.options)
        if aligned and found is not None:  # nothing is compiled where Triton interprets
            self.compiled, self._run = found, found[self.grid]


class Part(NamedTuple):
    """Where an operand of a launch lies."""

    memory: int
    """Which of the tensors that steps are given."""
    byte: int = 0
    """Where it begins there."""
    shown: Callable[[Tensor], Tensor] = lambda memory: memory
    """The operand, given that tensor."""
    copied: Copied | None = None
    """It is several, which say how that tensor is copied."""

    def operands(self, memory: Tensor) -> Sequence[Any]:
        return [self.shown(memory)] if self.copied is None else self.copied(memory)


class Steps:
    """Launches one after the other, with operands that lie in tensors of the same shapes."""

    def __init__(self, steps: Iterable[tuple[Launch, Sequence[Part]]]) -> None:
        self.steps = list(steps)
        self._aligned = not any(part.byte % 16 for _, parts in self.steps for part in parts)
        self._queues: list[tuple[Queue, list[tuple[int, int]]]] | None = None
        self._warm = False

    def __call__(self, *memories: Tensor) -> None:
        if self._queues is not None and not _heard():
            addresses = [memory.data_ptr() for memory in memories]
            if not reduce(or_, addresses) & 15:
                stream = torch._C._cuda_getCurrentRawStream(memories[0].get_device())
                for queue, parts in self._queues:
                    queue(stream, *[addresses[memory] + byte for memory, byte in parts])
                return
        self._first(memories)

    def _first(self, memories: tuple[Tensor, ...]) -> None:
        jobs = [
            (launch, [one for part in parts for one in part.operands(memories[part.memory])])
            for launch, parts in self.steps
        ]
        if not self._warm:
            self._warm = True
            compile_together(memories[0].device, jobs)
        for launch, operands in jobs:
            launch(*operands)
        if self._queues is None and self._aligned:
            found = [_queue(launch, parts) for launch, parts in self.steps]
            known = [queue for queue in found if queue is not None]
            if len(known) == len(found):
                places = [[(part.memory, part.byte) for part in parts] for _, parts in self.steps]
                self._queues = list(zip(known, places, strict=True))


def _heard() -> bool:
    """Whether somebody wants to hear of every launch, such as a profiler."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def _queue(launch: Launch, parts: Sequence[Part]) -> Queue | None:
    """A launch that is compiled, without what Triton does around it; nothing where it must."""
    run = getattr(launch.compiled, "run", None)
    if run is None or not triton.__version__.startswith(_KNOWN):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    start, options = launch.grid, (run.launch_cooperative_grid, run.launch_pdl)
    function, packed, more = launch.compiled.function, launch.compiled.packed_metadata, launch.more
    nobody = (None, None, None)  # hears of it
    raw, encoded = run.launch, None
    number = next((i for i, part in enumerate(parts) if part.copied is not None), -1)
    if number >= 0:
        # Triton's own function encodes descriptors and calls this one.
        closure = dict(zip(raw.__code__.co_freevars, raw.__closure__, strict=True))
        raw = closure["launcher"].cell_contents
        metadata = closure["tensordesc_meta"].cell_contents
        encoded = _Encoded(parts[number], metadata)
    if hasattr(run, "kernel_signature"):  # since 3.7
        last = (packed, *nobody, None, None, run.arg_annotations, run.kernel_signature)

        def queue(stream: int, *operands: Any) -> None:
            if encoded is not None:
                operands = _replaced(operands, number, encoded)
            raw(*start, stream, function, *options, *last, (*operands, *more))

    else:
        middle = (None, None, packed, *nobody)

        def queue(stream: int, *operands: Any) -> None:
            if encoded is not None:
                operands = _replaced(operands, number, encoded)
            raw(*start, stream, function, *options, *middle, *operands, *more)

    return queue


def _replaced(operands: tuple[Any, ...], number: int, encoded: _Encoded) -> tuple[Any, ...]:
    return (*operands[:number], *encoded[operands[number]], *operands[number + 1 :])


class _Encoded(dict[int, tuple[Any, ...]]):
    """What a launch is given for matrices at an address, which it copies."""

    def __init__(self, part: Part, metadata: Sequence[Any]) -> None:
        super().__init__()
        self.part, self.metadata = part, metadata

    def __missing__(self, address: int) -> tuple[Any, ...]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        assert self.part.copied is not None
        descriptors = self.part.copied.at(address)
        given = zip(descriptors, self.metadata, strict=True)
        found = tuple(one for each in given for one in make_tensordesc_arg(*each))
        if len(self) >= _KEPT:
            self.clear()
        self[address] = found
        return found


def compile_together(device: torch.device, jobs: Iterable[tuple[Launch, Sequence[Any]]]) -> None:
    """Compile what launches on these tensors need, all at the same time.

    Compilers work without Python for most of the time.
    """
    missing = {
        id(launch.kernel): (launch, tensors)
        for launch, tensors in jobs
        if launch.compiled is None and isinstance(launch.kernel, triton.JITFunction)
    }
    if len(missing) < 2:
        return

    def compiled(job: tuple[Launch, Sequence[Any]]) -> None:
        launch, tensors = job
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            launch.kernel.warmup(*tensors, *launch.numbers, grid=launch.grid, **launch.options)

    # What is made meanwhile is kept, and there are many objects to look through for what is not.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(compiled, missing.values()))
    finally:
        if collecting:
            gc.enable()
