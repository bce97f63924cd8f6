"""The one function that layers call, and the table that explains what it does.

Tracing, fusion and choice are three callers of the same engines. Inside `torch.compile` the call
is one operator, ``econv::convolution``, that stands for what an engine makes of it: which one is
chosen while the graph is traced, by sizes as they were seen first, so that no size is frozen.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from econv.engines import choice
from econv.engines.problem import (
    Convolution,
    Problem,
    Prologue,
    Weight,
    convolution_named,
    exporting,
    transformed,
    without_autocast,
)
from econv.engines.registry import ENGINES, Engine
from econv.engines.spectral.operator import EngineError, give_up

__all__ = ["convolve", "explain", "fuses"]

FUSED = "+norm+relu"
"""What follows the name of kernels that normalise and rectify their input where they read it."""


def convolve(
    convolution: Convolution,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    engine: str = "auto",
    prologue: Prologue | None = None,
) -> Tensor:
    """Run a convolution with the engine that was asked for, or that is chosen.

    ``bias`` is that of channels, ``[out channels]``.
    """
    name = choice.resolve(engine)
    if torch.compiler.is_compiling():
        if exporting():
            plain = "dense" if name in ("auto", "dense") else "spectral/torch"
            return _run(convolution, x, weight, bias, plain, prologue, "watched")
        affine = None if prologue is None else prologue.affine
        operands = (x, weight.learned, bias, affine, list(weight.tables))
        told = choice.traced_name(name)
        found: Tensor = torch.ops.econv.convolution(*operands, convolution.name, told)
        return found
    return _run(convolution, x, weight, bias, name, prologue, None)


def _run(
    convolution: Convolution,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    name: str,
    prologue: Prologue | None,
    context: str | None,
) -> Tensor:
    problem = Problem.of(convolution, x, weight.learned, context, name != "auto")
    for met in _met:
        met.setdefault(problem, (name, weight.learned))
    chosen = ENGINES["dense"] if _met else choice.choose(problem, name, weight.learned)
    with without_autocast(x.device):
        while True:
            try:
                found = chosen.run(problem, x, weight, bias, prologue)
                break
            except EngineError as error:
                if name != "auto":
                    raise
                give_up(chosen.name, convolution.name, problem, error)
                chosen = choice.choose(problem, name, weight.learned)
    if context is None:
        choice.note(chosen.name + FUSED * (chosen.fuses and prologue is not None))
    return found


def fuses(convolution: Convolution, x: Tensor, weight: Tensor, engine: str = "auto") -> bool:
    """Whether the engine of a call would apply a prologue where it reads ``x``."""
    problem = Problem.of(convolution, x, weight)
    if problem.context != "eager" or problem.dtype != x.dtype or convolution.groups > 1:
        return False
    return choice.choose(problem, choice.resolve(engine), weight).fuses


_LIBRARY = torch.library.Library("econv", "FRAGMENT")
_LIBRARY.define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? affine, Tensor[] tables,"
    " str convolution, str engine) -> Tensor"
)


def _traced(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    affine: Tensor | None,
    tables: list[Tensor],
    convolution: str,
    engine: str,
) -> Tensor:
    prologue = None if affine is None else Prologue(affine)
    known, given = convolution_named(convolution), Weight(weight, tuple(tables))
    if transformed():  # by torch.func, which knows no operators of ours
        return _run(known, x, given, bias, "dense", prologue, "watched")
    return _run(known, x, given, bias, engine.partition(":")[0], prologue, "traced")


def _mapped(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
    """One call for each member of a mapped dimension; the tables are never mapped."""
    found = [
        torch.ops.econv.convolution(
            *(
                value.select(dim, i) if isinstance(dim, int) else value
                for value, dim in zip(inputs, in_dims, strict=True)
            )
        )
        for i in range(info.batch_size)
    ]
    return torch.stack(found), 0


_LIBRARY.impl("convolution", _traced, "CompositeImplicitAutograd")
torch.library.register_vmap("econv::convolution", _mapped, lib=_LIBRARY)


def explain(layer: nn.Module, x: Tensor) -> None:
    """Print which engines can run a layer on ``x``, why others cannot, and how long each takes.

    Of a network, the same for each convolution that differs from those before. The star marks what
    runs here. Engines that ``"auto"`` does not choose from are not timed.

    >>> import econv
    >>> layer = econv.GroupConv2d(1, 1, "p8", engine="dense")
    >>> econv.engines.explain(layer, torch.randn(1, 8, 9, 9))
    p8, 1 regular → 1 regular, 5×5, batch 1, 9×9, float32, with gradients
    ...
    """
    problems: dict[Problem, tuple[str, Tensor]] = {}
    modes = [(module, module.training) for module in layer.modules()]
    _met.append(problems)
    try:
        layer.eval()(x)  # nothing is counted, and nothing drawn
    finally:
        _met.remove(problems)
        for module, training in modes:
            module.training = training
    if not problems:
        raise ValueError(f"expected a layer or a network of econv; got {type(layer).__name__}")
    for problem, (name, learned) in problems.items():
        print("\n".join(_table(problem, name, learned)))


_met: list[dict[Problem, tuple[str, Tensor]]] = []
"""Of each explanation under way the problems that were met; they run with the dense engine."""


def _table(problem: Problem, name: str, learned: Tensor) -> list[str]:
    reasons = {one.name: one.why_not(problem) for one in ENGINES.values()}
    chosen: Engine | None = None
    with contextlib.suppress(ValueError):  # one that was asked for and cannot run: it says so
        chosen = choice.choose(problem, name, learned)
    times = choice.measured(problem, learned.dtype, choice.may_measure()) or {}
    lines = [str(problem)]
    for one, reason in reasons.items():
        took = times.get(one)
        says = "can run" if reason is None else f"cannot run: {reason}"
        if took is not None:
            says = f"{1e3 * took.call:.3g} ms"
            if took.device != took.call:
                says += f", {1e3 * took.device:.3g} ms of it on the device"
        lines.append(f"{'*' if ENGINES[one] is chosen else ' '} {one:<16} {says}")
    return lines
