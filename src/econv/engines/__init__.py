"""Ways to run one group convolution on tensors: `dense` and `spectral`.

The one that is asked for is the one that runs: an engine that is not available is an error, and
only ``"auto"`` may choose. A layer's own choice goes first, then that of the innermost
:func:`engine` block, then the cost model of `econv.engines.auto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ENGINES", "engine", "note", "noted", "replayed", "resolve", "without_python"]

ENGINES = ("dense", "spectral")


# For the whole process, as torch's own switches are: what a compiler can follow and guard.
_names: list[str] = []
_lists: list[list[str]] = []
_replayed: list[bool] = []


def resolve(engine: str) -> str:
    """The engine that a layer's own choice stands for here: one of `ENGINES`, or ``"auto"``."""
    if engine != "auto":
        if engine not in ENGINES:
            raise ValueError(
                f"unknown engine {engine!r}: expected 'auto' or one of {list(ENGINES)}"
            )
        return engine
    return _names[-1] if _names else "auto"


def note(ran: str) -> None:
    """Tell the blocks around what ran: an engine's name, with what carried it out after a slash."""
    for found in _lists:
        found.append(ran)


@contextmanager
def engine(name: str = "auto") -> Iterator[list[str]]:
    """Choose, and watch, the engine of the convolutions that run inside the block.

    The name holds for all layers that leave the choice open (``engine="auto"``). What the block
    gives is a list to which every convolution adds what ran it: ``"dense"``,
    ``"spectral/torch"``, ``"spectral/native"`` or ``"spectral/triton"``; after the last there may
    be ``"+norm+relu"``, where the kernels did these two as well. Compiled and exported passes add
    nothing. Blocks hold for all threads.

    >>> import econv, torch
    >>> layer = econv.GroupConv2d(1, 1, "p8")
    >>> with econv.engine("dense") as ran:
    ...     _ = layer(torch.randn(1, 8, 9, 9))
    >>> ran
    ['dense']
    """
    resolve(name)
    _names.append(name)
    try:
        with noted() as ran:
            yield ran
    finally:
        _names.pop()


@contextmanager
def noted() -> Iterator[list[str]]:
    """Watch what :func:`engine` tells of; the choice is that of the blocks around."""
    ran: list[str] = []
    _lists.append(ran)
    try:
        yield ran
    finally:
        _lists[:] = [found for found in _lists if found is not ran]


@contextmanager
def replayed() -> Iterator[None]:
    """Inside the block ``"auto"`` does not count what Python does for a call.

    For what is captured as a CUDA graph, and for the calls before it that warm up: a replay is the
    device's work alone.
    """
    _replayed.append(True)
    try:
        yield
    finally:
        _replayed.pop()


def without_python() -> bool:
    """Whether a :func:`replayed` block is open."""
    return bool(_replayed)
