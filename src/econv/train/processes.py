"""The processes of one run: who is there, what they add up and share, and when one is lost."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.distributed.rendezvous import rendezvous

from econv.train.errors import TrainingError, WorkerLostError

_PATIENCE = timedelta(minutes=10)  # with a process that says nothing


@dataclass(frozen=True)
class Processes:
    """The processes of one run, and this one among them."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, device: torch.device | str | None) -> Processes:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = _device(device)
        if world > 1 and not distributed.is_initialized():
            backend = "nccl" if place.type == "cuda" else "gloo"
            # torchrun may start a job again with the store of the one before, where that one's
            # addresses still are: processes that believe them wait for ever.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store, rank, world = next(rendezvous("env://", timeout=_PATIENCE))
            distributed.init_process_group(
                backend,
                store=distributed.PrefixStore(f"attempt {attempt}", store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=world,
                timeout=_PATIENCE,
            )
        if not distributed.is_initialized():
            return cls(0, 1, place)
        return cls(distributed.get_rank(), distributed.get_world_size(), place)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up in place over the processes."""
        if self.world > 1:
            distributed.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        self.sum(torch.zeros(1, device=self.device))

    def share(self, content: bytes | None) -> bytes | None:
        """The first process's bytes in all of them: folders need not be shared by machines."""
        if self.world == 1:
            return content
        length = torch.tensor([-1 if content is None else len(content)], device=self.device)
        distributed.broadcast(length, 0)
        if length.item() < 0:
            return None
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8)
        if content:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        buffer = buffer.to(self.device)
        distributed.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    def together(self, attempt: Callable[[], None], kind: type[Exception]) -> None:
        """What the first process attempts; where it fails, every process raises that error."""
        problem = None
        if self.first:
            try:
                attempt()
            except kind as error:
                problem = str(error).encode()
        problem = self.share(problem)
        if problem is not None:
            raise kind(problem.decode())


def _device(wanted: torch.device | str) -> torch.device:
    """The device, tried: `ValueError` if nothing can be computed on it."""
    try:
        place = torch.device(wanted)
        if place.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError(f"expected a device that is there; got {wanted}: no GPU is")
            number = int(os.environ.get("LOCAL_RANK", "0")) if place.index is None else place.index
            place = torch.device("cuda", number)
            torch.cuda.set_device(place)
        torch.ones(1, device=place).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"expected a device that is there, such as cpu or cuda:0; got {wanted}: {first}"
        ) from None
    return place


@contextmanager
def watched(processes: Processes, what_is_left: Callable[[], str]) -> Iterator[None]:
    """Says in one sentence that a worker is gone; the backends say it in their own ways."""
    try:
        yield
    except TrainingError:
        raise
    except RuntimeError as error:
        text = str(error)
        signs = ("gloo", "NCCL", "Connection", "peer", "timed out", "Timed out")
        if processes.world == 1 or not any(sign in text for sign in signs):
            raise
        first = text.splitlines()[0] if text else type(error).__name__
        raise WorkerLostError(
            f"process {processes.rank} of {processes.world} lost another one, which was killed or "
            f"cut off ({first}). {what_is_left()}"
        ) from error


def leave() -> None:
    """Part from the other processes, all at once: one that leaves early makes the rest abort."""
    if distributed.is_initialized():
        # A network that waits to be collected holds the group, which would then outlive this call
        # and end its threads in an interpreter that is half gone: they abort.
        gc.collect()
        distributed.barrier()
        distributed.destroy_process_group()
