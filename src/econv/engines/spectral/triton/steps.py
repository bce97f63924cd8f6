"""How kernels are launched: by Triton at first, and from then on with as little Python as can be.

Triton finds out at every launch which compiled kernel fits its arguments, asks the driver about
every address, and encodes how each matrix is copied. All of that depends on shapes and addresses
alone. A `Launch` remembers the first; `Steps`, what an operator launches one after the other,
describe their operands as offsets in a few tensors, so that later calls add up addresses and hand
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
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

_KNOWN = ("3.6.", "3.7.")  # versions of Triton whose launchers are called as `_queue` calls them
_KEPT = 16  # addresses for which a launch keeps what was encoded


Queue = Callable[[int, list[int]], None]
"""Takes a stream and the addresses of a launch's parts, and launches."""


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


class Operand(NamedTuple):
    """Where an operand of a launch lies."""

    memory: int
    """Which of the tensors that steps are given."""
    byte: int = 0
    """Where it begins there."""
    shown: Callable[[Tensor], Tensor] = lambda memory: memory
    """The operand as a view of that tensor."""
    copied: Any = None
    """What makes descriptors of matrices in it: `econv.engines.spectral.hopper.kernels.Copies`."""

    def operands(self, memory: Tensor) -> Sequence[Any]:
        """What Triton is given for it."""
        return [self.shown(memory)] if self.copied is None else self.copied(memory)


class Steps:
    """Launches one after the other, with operands that lie in tensors of the same shapes."""

    def __init__(self, steps: Iterable[tuple[Launch, Sequence[Operand]]]) -> None:
        self.steps = list(steps)
        self._aligned = not any(part.byte % 16 for _, parts in self.steps for part in parts)
        self._queues: list[tuple[Queue, list[tuple[int, int]]]] | None = None
        self._warm = False

    def __call__(self, *memories: Tensor) -> None:
        if self._queues is not None and not _heard():
            addresses = [memory.data_ptr() for memory in memories]
            devices = {memory.get_device() for memory in memories}  # Triton would refuse others
            if len(devices) == 1 and not reduce(or_, addresses) & 15:
                stream = torch._C._cuda_getCurrentRawStream(devices.pop())
                for queue, parts in self._queues:
                    queue(stream, [addresses[memory] + byte for memory, byte in parts])
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
            self._queues = self._queued()

    def _queued(self) -> list[tuple[Queue, list[tuple[int, int]]]] | None:
        """What later calls launch; nothing where Triton has to."""
        found = []
        for launch, parts in self.steps:
            queue = _queue(launch, parts)
            if queue is None:
                return None
            found.append((queue, [(part.memory, part.byte) for part in parts]))
        return found


def _heard() -> bool:
    """Whether somebody wants to hear of every launch, such as a profiler."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _queue(launch: Launch, parts: Sequence[Operand]) -> Queue | None:
    """A launch that is compiled, without what Triton does around it; nothing where it must."""
    run = getattr(launch.compiled, "run", None)
    if run is None or not triton.__version__.startswith(_KNOWN):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    raw, encoded, index = run.launch, None, 0
    for number, part in enumerate(parts):
        if part.copied is None:
            continue
        inside = _inside(raw)
        if inside is None or part.byte:
            return None
        raw, metadata = inside
        encoded, index = _Encoded(part.copied, metadata), number
    grid, more, compiled = launch.grid, launch.more, launch.compiled
    function, flags = compiled.function, (run.launch_cooperative_grid, run.launch_pdl)
    known = (compiled.packed_metadata, None, None, None)  # no metadata of the launch, no hooks
    scratch = (None, None)

    def operands(addresses: list[int]) -> list[Any]:
        if encoded is not None:
            addresses[index : index + 1] = encoded[addresses[index]]
        addresses += more
        return addresses

    if hasattr(run, "kernel_signature"):  # since 3.7
        last = (*known, *scratch, run.arg_annotations, run.kernel_signature)

        def queue(stream: int, addresses: list[Any]) -> None:
            raw(*grid, stream, function, *flags, *last, operands(addresses))

    else:
        middle = (*scratch, *known)

        def queue(stream: int, addresses: list[Any]) -> None:
            raw(*grid, stream, function, *flags, *middle, *operands(addresses))

    return queue


def _inside(encoding: Any) -> tuple[Any, Sequence[Any]] | None:
    """The launcher that Triton's own function calls when it has encoded descriptors, and how."""
    names = getattr(getattr(encoding, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(encoding, "__closure__", None) or (), strict=True))
    if not {"launcher", "tensordesc_meta"} <= cells.keys():
        return None
    return cells["launcher"].cell_contents, cells["tensordesc_meta"].cell_contents


class _Encoded(dict[int, tuple[Any, ...]]):
    """What a launch is given for matrices that it copies, by their address."""

    def __init__(self, copied: Any, metadata: Sequence[Any]) -> None:
        super().__init__()
        self.copied, self.metadata = copied, metadata

    def __missing__(self, address: int) -> tuple[Any, ...]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        given = zip(self.copied.at(address), self.metadata, strict=True)
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
