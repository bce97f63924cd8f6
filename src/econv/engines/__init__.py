"""Ways to run one group convolution on tensors, each with the same signature.

An engine is a module with the functions of `dense`. The one that is asked for is the one that
runs: an engine that is not available is an error, and only ``"auto"`` may choose.
"""

from __future__ import annotations

__all__ = ["ENGINES", "resolve"]

ENGINES = ("dense",)


def resolve(engine: str) -> str:
    """The engine that a name stands for: itself, or the choice of ``"auto"``."""
    if engine == "auto":
        return "dense"
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: expected 'auto' or one of {list(ENGINES)}")
    return engine
