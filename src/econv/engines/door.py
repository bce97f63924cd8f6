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
from econv.engines.problem import Convolution, Problem, Prologue, Weight, convolution_named
from econv.engines.registry import ENGINES
from econv.engines.spectral.operator import EngineError, give_up
from econv.tensors import exporting, transformed, without_autocast

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
    name, context = choice.resolve(engine), None
    if exporting():
        name, context = "dense" if name in ("auto", "dense") else "spectral/torch", "watched"
    elif torch.compiler.is_compiling():
        affine = None if prologue is None else prologue.affine
        operands = (x, weight.learned, bias, affine, list(weight.tables))
        told = choice.traced_name(name)
        found: Tensor = torch.ops.econv.convolution(*operands, convolution.name, told)
        return found
    problem = Problem.of(convolution, x, weight.learned, context, name)
    return _run(problem, x, weight, bias, prologue)


def _run(
    problem: Problem, x: Tensor, weight: Weight, bias: Tensor | None, prologue: Prologue | None
) -> Tensor:
    for met in _met:
        met[problem] = None
    chosen = ENGINES["dense"] if _met else choice.choose(problem)
    done = prologue is not None and prologue.affine is None
    fused = done or (chosen.fuses and prologue is not None)
    try:
        with without_autocast(problem.device):
            found = chosen.run(problem, x, weight, bias, None if done else prologue)
    except EngineError as error:
        if problem.named:
            raise
        give_up(chosen.name, problem.convolution.name, problem, error)
        return _run(problem, x, weight, bias, prologue)
    if problem.context != "traced" and not exporting():
        choice.note(chosen.name + FUSED * fused)
    return found


def fuses(convolution: Convolution, x: Tensor, weight: Tensor, engine: str = "auto") -> bool | None:
    """Whether the engine applies a prologue where it reads ``x``.

    Nothing where kernels are not to apply it before that either: who asks for an engine that cannot
    gets the modules, one after the other.
    """
    problem = Problem.of(convolution, x, weight, None, choice.resolve(engine))
    if problem.context != "eager":
        return None
    whole = problem.dtype == x.dtype and convolution.groups == 1
    if whole and choice.choose(problem).fuses:
        return True
    return None if problem.named else False


_LIBRARY = torch.library.Library("econv", "FRAGMENT")
_LIBRARY.define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? affine, Tensor[] tables,"
    " str convolution, str engine) -> Tensor"
)


def _traced(
    x: Tensor, weight: Tensor, bias: Tensor | None, affine: Tensor | None, *others: Any
) -> Tensor:
    tables, convolution, engine = others
    # Functions that torch.func transforms hold no operators of ours.
    name = "dense" if transformed() else engine.partition(":")[0]
    problem = Problem.of(convolution_named(convolution), x, weight, "traced", name)
    prologue = None if affine is None else Prologue(affine)
    return _run(problem, x, Weight(weight, tuple(tables)), bias, prologue)


for _key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):
    _LIBRARY.impl("convolution", _traced, _key)


def explain(layer: nn.Module, x: Tensor) -> None:
    """Print which engines can run a layer on ``x``, why others cannot, and how long each takes.

    Of a network, the same for each convolution that differs from those before. The star marks what
    runs here. Engines that ``"auto"`` does not choose from are not timed.

    Raises:
        ValueError: for what is no layer or network of econv.

    >>> import econv
    >>> layer = econv.GroupConv2d(1, 1, "p8", engine="dense")
    >>> econv.engines.explain(layer, torch.randn(1, 8, 9, 9))
    p8, 1 regular → 1 regular, 5×5, batch 1, 9×9, float32, with gradients
    ...
    """
    modes = [(module, module.training) for module in layer.modules()]
    with choice.during(_met, {}) as problems:
        try:
            layer.eval()(x)  # nothing is counted, and nothing drawn
        finally:
            for module, training in modes:
                module.training = training
    if not problems:
        raise ValueError(f"expected a layer or a network of econv; got {type(layer).__name__}")
    for problem in problems:
        reasons = {one.name: one.why_not(problem) for one in ENGINES.values()}
        chosen = ""
        with contextlib.suppress(ValueError):  # one that was asked for and cannot run: it says so
            chosen = choice.choose(problem).name
        times = choice.measured(problem, choice.may_measure())
        print(problem)
        for name, reason in reasons.items():
            says = "can run" if reason is None else f"cannot run: {reason}"
            if took := times.get(name):
                says = f"{1e3 * took.call:.3g} ms"
                if took.device != took.call:
                    says += f", {1e3 * took.device:.3g} ms of it on the device"
            print(f"{'*' if name == chosen else ' '} {name:<16} {says}")


_met: list[dict[Problem, None]] = []
"""Of each explanation under way the problems that were met; they run with the dense engine."""
