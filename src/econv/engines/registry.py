"""The engines, by name. A new one is a class in a file of its own, and a line here."""

from __future__ import annotations

from econv.engines.dense import Dense
from econv.engines.problem import Engine, Problem
from econv.engines.spectral.native import Native
from econv.engines.spectral.torch import Torch
from econv.engines.spectral.triton.engine import Hopper, Triton

__all__ = ["ENGINES", "check_name", "first_able"]

# Of those whose names begin alike, the first that can run stands for all.
ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (Dense(), Hopper(), Triton(), Native(), Torch())
}


def check_name(name: str) -> str:
    """The name of an engine, of several that begin alike, or ``"auto"``; otherwise an error.

    Raises:
        ValueError: for a name that no engine has.
    """
    families = {known.partition("/")[0] for known in ENGINES}
    if not isinstance(name, str) or name not in {"auto", *ENGINES, *families}:
        raise ValueError(
            f"unknown engine {name!r}: expected 'auto', {', '.join(map(repr, sorted(families)))} "
            f"or one of {list(ENGINES)}"
        )
    return name


def first_able(name: str, problem: Problem) -> Engine:
    """The engine of a name, or the first of several that can run; otherwise the reasons."""
    reasons = []
    for engine in ENGINES.values():
        if engine.name == name or engine.name.startswith(f"{name}/"):
            reason = engine.why_not(problem)
            if reason is None:
                return engine
            reasons.append(f"{engine.name}: {reason}")
    raise ValueError(f"the engine {name!r} cannot run {problem}: {'; '.join(reasons)}")
