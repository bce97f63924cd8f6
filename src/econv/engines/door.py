"""The one function that layers call, and the table that explains what it does.

Tracing, fusion and choice are three callers of the same engines. Inside `torch.compile` the call
is one operator, ``econv::convolution``, that stands for what an engine makes of it: which one is
chosen while the graph is traced, by sizes as they were seen first, so that no size is frozen.
"""

from __future__ import annotations

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
    without_autocast,
)
from econv.engines.registry import ENGINES, Engine
from econv.engines.spectral.operator import EngineError

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
            name = "dense" if name == "auto" else "spectral/torch" if name != "dense" else name
            return _run(convolution, x, weight, bias, name, prologue, "watched")
        affine = None if prologue is None else prologue.affine
        operands = (x, weight.learned, bias, affine, list(weight.tables))
        found: Tensor = torch.ops.econv.convolution(*operands, convolution.name, name)
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
    problem = Problem.of(convolution, x, weight.learned, context)
    chosen = choice.choose(problem, name, weight.learned)
    with without_autocast(x.device):
        try:
            found = chosen.run(problem, x, weight, bias, prologue)
        except EngineError as error:
            if name != "auto":
                raise
            choice.failed(problem, chosen, error)
            chosen = ENGINES["dense"]
            found = chosen.run(problem, x, weight, bias, prologue)
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
    return _run(known, x, given, bias, engine, prologue, "traced")


_LIBRARY.impl("convolution", _traced, "CompositeImplicitAutograd")


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
    problems: dict[Problem, Any] = {}

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        read = module.read(inputs[0])
        problems.setdefault(Problem.of(module.convolution, read, module.weight), module)

    convolutions = [m for m in layer.modules() if hasattr(m, "convolution")]
    if not convolutions:
        raise ValueError(f"expected a layer or a network of econv; got {type(layer).__name__}")
    handles = [module.register_forward_pre_hook(look) for module in convolutions]
    try:
        layer(x)
    finally:
        for handle in handles:
            handle.remove()
    for problem, module in problems.items():
        print("\n".join(_table(problem, module)))


def _table(problem: Problem, module: Any) -> list[str]:
    chosen: Engine = choice.choose(problem, choice.resolve(module.engine), module.weight)
    times = choice.measured(problem, module.weight.dtype, choice.may_measure()) or {}
    lines = [str(problem)]
    for one in ENGINES.values():
        reason, took = one.why_not(problem), times.get(one.name)
        says = "can run" if reason is None else f"cannot run: {reason}"
        if took is not None:
            says = f"{1e3 * took.call:.3g} ms"
            if took.device != took.call:
                says += f", {1e3 * took.device:.3g} ms of it on the device"
        lines.append(f"{'*' if one is chosen else ' '} {one.name:<16} {says}")
    return lines
