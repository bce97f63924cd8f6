"""One door to the engines: a layer says what it computes, and never how.

A `Problem` is all that a convolution is. An engine is an object with a name, a ``why_not`` and a
``run``; `econv.engines.registry` lists them, `econv.engines.choice` picks one.
"""

from __future__ import annotations

from econv.engines.choice import engine, keep, kept, noted, resolve
from econv.engines.door import convolve, explain, fuses
from econv.engines.problem import Convolution, Engine, Part, Problem, Prologue, Weight, convolution
from econv.engines.registry import ENGINES, check_name

__all__ = [
    "ENGINES",
    "Convolution",
    "Engine",
    "Part",
    "Problem",
    "Prologue",
    "Weight",
    "check_name",
    "convolution",
    "convolve",
    "engine",
    "explain",
    "fuses",
    "keep",
    "kept",
    "noted",
    "resolve",
]
