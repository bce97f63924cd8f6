"""What the spectral engines share: borders, groups and parts around a product, and its gradients.

A layer A(x; w) is linear in its input and in its weight, and ⟨A(x; w), g⟩ in all three: every
order of differentiation is made of two functions, the layer and the pair of its gradients. Both
are one function of autograd, which `torch.func` can transform. What it runs is an engine, or in a
graph an operator of torch that runs one (``econv::spectral``, ``econv::spectral_backward``), which
compilers hold as one node.

Memory: what is kept for the backward pass is the input, the weight, and what the engine knows of
them (on GPUs the weight in Fourier space).
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from econv.engines.problem import Engine, Geometry, Problem, Prologue, Weight, bordered
from econv.engines.spectral.gate import UnreadableError
from econv.plan import ParityError, SpectralPlan, plan_named
from econv.tensors import (
    exporting,
    functionalised,
    memory_format,
    one_by_one,
    transformed,
    without_autocast,
)

__all__ = [
    "FAILED",
    "EngineError",
    "Gradients",
    "Saved",
    "Spectral",
    "Task",
    "give_up",
    "through",
]


_MOST_ELEMENTS = 128
"""Of a group: its Fourier transform is found in a time that grows with their cube."""


class EngineError(RuntimeError):
    """A kernel that could not be compiled or launched; its cause says why."""


_MADE: dict[str, Spectral] = {}
"""The engines by name, as graphs know them."""


class Task(NamedTuple):
    """One plan at one geometry."""

    plan: SpectralPlan
    geometry: Geometry
    named: bool = True
    """Whether the engine was asked for by name: then a kernel that fails is an error."""

    def back(self, x: Tensor) -> Geometry:
        """The geometry of the gradient to ``x``."""
        return self.geometry.transposed(self.plan.basis.size, x.shape[2:])


class Saved(NamedTuple):
    """What a backward pass reads."""

    x: Tensor
    weight: Tensor
    affine: Tensor | None = None
    known: Tensor | None = None
    """The second result of `Spectral.forward`, unless it has to be found out again."""


Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
"""To the input, to the weight, and to the numbers of a prologue."""


class Spectral(Engine):
    """An engine that differentiates in Fourier space. Subclasses say on what, and run a task."""

    def __init__(self) -> None:
        _MADE[self.name] = self

    def why_not(self, problem: Problem) -> str | None:
        """Why the engine cannot run a problem, as a sentence; nothing where it can."""
        order = problem.convolution.basis.group.order
        if order > _MOST_ELEMENTS:
            return f"it knows groups of up to {_MOST_ELEMENTS} elements; this one has {order}"
        try:
            for part in problem.convolution.parts:
                problem.convolution.plan(part).stencils  # noqa: B018  # checks its parity
                if reason := FAILED.get((self.name, problem.convolution.plan(part).name)):
                    return f"it failed before: {reason}"
        except ParityError as error:
            return str(error)
        return None

    def forward(
        self, task: Task, x: Tensor, weight: Tensor, affine: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer, ``weight`` being ``[out fields, in fields, coordinates]``.

        The second tensor is what the backward pass would have to find out again.
        """
        raise NotImplementedError

    def backward(
        self, task: Task, gradient: Tensor, saved: Saved, wanted: tuple[bool, bool]
    ) -> Gradients:
        """The gradients to ``x``, ``weight`` and ``affine``; what is not wanted may be missing."""
        raise NotImplementedError

    def known_like(self, task: Task, x: Tensor, weight: Tensor) -> Tensor:
        """The second result of `forward`, empty: for compilers."""
        return x.new_empty(0, dtype=torch.float32)

    def run(
        self,
        problem: Problem,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> Tensor:
        """Borders, parts, groups and layout around the tasks."""
        conv, layout, dtype = problem.convolution, memory_format(x), problem.dtype
        if prologue is not None and not (self.fuses and conv.groups == 1 and conv.dimension == 2):
            x, prologue = prologue.apply(x), None
        x, _ = bordered(conv, x.to(dtype))
        geometry = conv.geometry(x.shape[2:])
        affine = None if prologue is None else prologue.affine
        engine = self.name if problem.context == "traced" else self
        sizes = [fields * conv.width(kind) for kind, fields in conv.parts]
        # One of one parts or chunks would have gradients that are copied.
        images = x.split(sizes, 1) if len(sizes) > 1 else [x]
        found = []
        for part, here, own in zip(conv.parts, images, weight.parts(conv), strict=True):
            rest = engine, Task(conv.plan(part), geometry, problem.named)
            if conv.groups > 1:
                chunks = here.chunk(conv.groups, 1), own.chunk(conv.groups, 0)
                each = [_layer(*pair, affine, *rest) for pair in zip(*chunks, strict=True)]
                found.append(torch.cat(each, dim=1))
            else:
                found.append(_layer(here, own, affine, *rest))
        if bias is not None:
            found.append(bias.to(dtype).view(-1, *[1] * conv.dimension))
        total = sum(found[1:], start=found[0])
        return total.contiguous(memory_format=layout)


class _Form(torch.autograd.Function):
    """⟨A(x; w), g⟩, linear in g, x and w: its gradients to g, which is the layer, or to x and w.

    A gradient to one of the three depends on the other two alone, so that the derivative of any
    of these along changes of g, x and w is a sum of the same gradients with a change in the place
    of what changes (`_moved`). That is the backward pass, and forward-mode differentiation too.
    With ``affine`` all that is said of x is said of what a prologue makes of it. The name of an
    engine stands for the operators that run it in a graph.
    """

    @staticmethod
    def forward(g: Tensor | None, *given: Any) -> tuple[Tensor | None, ...]:
        """Without ``g`` the layer, and last what is known; with it what is wanted of x and w."""
        *operands, engine, task, wanted = given
        saved = Saved(*operands)
        if isinstance(engine, str):
            words = engine, task.plan.name, task.geometry.numbers, task.named
            with torch._C._AutoDispatchBelowAutograd():
                if g is None:
                    found = torch.ops.econv.spectral(*saved[:3], *words)
                else:
                    found = torch.ops.econv.spectral_backward(g, *saved, *words, *wanted)
        elif g is None:
            found = _attempt(engine, "forward", True, task, *saved[:3])
        else:
            found = _attempt(engine, "backward", task.named, task, g, saved, wanted)
        if g is None:
            return found[0], None, None, None, found[1]
        kept = zip(found, (*wanted, wanted[0] and saved.affine is not None), strict=True)
        return None, *(t if keep else None for t, keep in kept), None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *kept, known, ctx.engine, ctx.task, ctx.wanted = inputs
        if kept[0] is None:
            known = output[-1]
            ctx.mark_non_differentiable(known)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept, known)
        ctx.save_for_forward(*kept, known)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        found = one_by_one(partial(_Form.pulled, ctx), *cotangents)
        return *found, *[None] * 4

    @staticmethod
    def pulled(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        """The gradients to g, x, w and affine."""
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[:4]
        _, x, weight, affine, _ = saved
        if affine is not None and torch.is_grad_enabled():  # for derivatives of second order
            out = _layer(Prologue(affine).apply(x), weight, None, ctx.engine, ctx.task)
            inputs = [t for t, need in zip((x, weight, affine), wanted[1:], strict=True) if need]
            each = iter(torch.autograd.grad(out, inputs, cotangents[0], create_graph=True))
            return tuple(next(each) if need else None for need in wanted)
        return tuple(_moved(ctx, saved, cotangents, wanted))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved = ctx.saved_tensors
        assert saved[3] is None  # engines that fuse know no forward mode
        wanted = (saved[0] is None, *ctx.wanted, False)
        return *one_by_one(lambda *moves: tuple(_moved(ctx, saved, moves, wanted)), *tangents), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        """One call for each member of a mapped dimension."""
        given = zip(inputs, in_dims, strict=True)
        each = (t.unbind(dim) if isinstance(dim, int) else repeat(t) for t, dim in given)
        parts = zip(*[_Form.apply(*one) for one in zip(*each, strict=False)], strict=True)
        return tuple(None if part[0] is None else torch.stack(part) for part in parts), 0


def _form(*given: Any) -> Any:
    """What `_Form` says; autograd and `torch.func` hear of it only where they have to."""
    # They know no functions of autograd.
    apart = torch._C._is_tracing() or exporting() or functionalised()
    followed = not apart and (torch.is_grad_enabled() or transformed())
    return (_Form.apply if followed else _Form.forward)(*given)


def _layer(x: Tensor, weight: Tensor, affine: Tensor | None, *rest: Any) -> Tensor:
    return cast(Tensor, _form(None, x, weight, affine, None, *rest, (False, False))[0])


def _moved(
    ctx: Any, saved: tuple[Any, ...], moves: tuple[Any, ...], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """What is wanted of the gradients to g, x, w and affine, along moves of the first three."""
    g, x, weight, affine, known = saved
    (dg, dx, dw, *_), rest = moves, (ctx.engine, ctx.task)
    terms: list[tuple[Any, ...]] = []
    if wanted[0]:
        pairs = [(a, b) for a, b in ((dx, weight), (x, dw)) if a is not None and b is not None]
        terms += [(_layer(*pair, None, *rest), *[None] * 3) for pair in pairs]
    if dg is not None:
        pair = (wanted[1] or wanted[3], wanted[2])
        terms.append(_form(dg, x, weight, affine, known, *rest, pair))
    crossed = (wanted[1] and dw is not None, wanted[2] and dx is not None)
    if g is not None and any(crossed):
        there = (x if dx is None else dx, weight if dw is None else dw)
        terms.append(_form(g, *there, None, None, *rest, crossed))
    found: list[Tensor | None] = []
    for like, want, *each in zip(saved[:4], wanted, *terms, strict=False):
        given = [term for term in each if term is not None and want]
        zero = torch.zeros_like(like) if want and not given else None
        found.append(sum(given[1:], given[0]) if given else zero)
    return found


FAILED: dict[tuple[str, str], str] = {}
"""Why an engine failed on a plan or a convolution that nobody had asked it by name to run."""

_NOT_ITS_FAULT = (torch.OutOfMemoryError, UnreadableError)

_log = logging.getLogger("econv.engines")


def give_up(engine: str, name: str, what: object, error: Exception) -> None:
    """Never choose an engine for something again, and say so once."""
    if (engine, name) not in FAILED:
        FAILED[engine, name] = reason = f"{type(error).__name__}: {str(error).strip()[:500]}"
        _log.warning("%s failed on %s and is not chosen again: %s", engine, what, reason)


def _attempt(engine: Spectral, way: str, named: bool, task: Task, *given: Any) -> Any:
    """A pass, forward or backward; by operations of torch where kernels fail that were chosen."""
    with without_autocast(given[0].device):  # which may be on around a backward pass, too
        if (engine.name, task.plan.name) not in FAILED:
            try:
                return getattr(engine, way)(task, *given)
            except Exception as error:
                if not engine.compiled or isinstance(error, _NOT_ITS_FAULT):
                    raise
                if named:
                    raise EngineError(f"{engine.name} failed: {error}") from error
                give_up(engine.name, task.plan.name, repr(task.plan), error)
        return getattr(_MADE["spectral/torch"], way)(task, *given)


def through(affine: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients to ``x`` and ``affine`` from that to what a prologue makes of them."""
    centre, scale, shift = affine.view(*affine.shape, *[1] * (x.ndim - 1))
    distance, passed = (t.unflatten(1, (len(scale), -1)).to(affine.dtype) for t in (x, g))
    distance = distance - centre
    passed = torch.where(distance * scale + shift <= 0, 0, passed)
    total, product = (t.transpose(0, 1).flatten(1).sum(1) for t in (passed, passed * distance))
    to_affine = torch.stack([-affine[1] * total, product, total])
    return (passed * scale).flatten(1, 2).to(x.dtype), to_affine


# The operators of graphs


def _told(engine: str, plan: str, geometry: list[int], named: bool) -> tuple[Spectral, Task]:
    """What the words of an operator stand for."""
    return _MADE[engine], Task(plan_named(plan), Geometry.read(geometry), named)


def _autograd(*given: Any) -> tuple[Tensor, Tensor]:
    task = _told(*given[3:])[1]
    y, *_, known = _Form.apply(None, *given[:3], None, given[3], task, (False, False))
    return y, known


def _run(*given: Any) -> tuple[Tensor, ...]:
    engine, task = _told(*given[3:])
    y, known = _attempt(engine, "forward", task.named, task, *given[:3])
    if not known.numel():  # another engine may have run
        known = engine.known_like(task, *given[:2])
    return _in_layouts((y, known), given[0], Tensor.contiguous)


def _fake(x: Tensor, weight: Tensor, _: Tensor | None, *words: Any) -> tuple[Tensor, ...]:
    engine, task = _told(*words)
    channels = weight.shape[0] * len(task.plan.synthesis)
    y = x.new_empty(x.shape[0], channels, *task.geometry.sizes)
    return _in_layouts((y, engine.known_like(task, x, weight)), x, torch.empty_like)


def _run_backward(*given: Any) -> tuple[Tensor, ...]:
    found = _Form.forward(*given[:5], *_told(*given[5:-2]), given[-2:])
    return _in_layouts(found[1:4], given[1], Tensor.contiguous)


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    _, x, weight, affine, *_, to_x, to_weight = given
    like = (x if to_x else None, weight if to_weight else None, affine if to_x else None)
    return _in_layouts(like, x, torch.empty_like)


def _in_layouts(found: tuple[Tensor | None, ...], x: Tensor, make: Any) -> tuple[Tensor, ...]:
    """Results in the layouts that a graph expects, the first in that of ``x``; none is empty."""
    layouts = (memory_format(x), torch.contiguous_format, torch.contiguous_format)
    return tuple(
        x.new_empty(0) if t is None else make(t, memory_format=layout)
        for t, layout in zip(found, layouts, strict=False)
    )


_LIBRARY = torch.library.Library("econv", "FRAGMENT")
_OPERANDS = "Tensor x, Tensor weight, Tensor? affine"
_WORDS = "str engine, str plan, SymInt[] geometry, bool named"
_ALL = f"Tensor g, {_OPERANDS}, Tensor? known, {_WORDS}, bool to_x, bool to_weight"
for _name, _schema, _kernel, _meta in (
    ("spectral", f"({_OPERANDS}, {_WORDS}) -> (Tensor, Tensor)", _run, _fake),
    ("spectral_backward", f"({_ALL}) -> (Tensor, Tensor, Tensor)", _run_backward, _fake_backward),
):
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"econv::{_name}", _meta, lib=_LIBRARY)
_LIBRARY.impl("spectral", _autograd, "Autograd")
