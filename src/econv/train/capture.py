"""A step as one CUDA graph, recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UP_STEPS = 3


def tried(step: Callable[[], None], state: Sequence[Tensor], times: int = 1) -> None:
    """Run the step, so that all is compiled and chosen; the state is then what it was before."""
    before = [tensor.clone() for tensor in state]
    for _ in range(times):
        step()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)


def captured(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """The step as one CUDA graph; the state is afterwards what it was before.

    The caller keeps what the step reads and writes: the graph knows only where it lies.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tried(step, state, _WARM_UP_STEPS)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, and changes nothing
        step()
    torch.cuda.synchronize()
    replay: Callable[[], None] = graph.replay
    return replay
