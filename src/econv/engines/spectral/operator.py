"""What the spectral engines share: borders, groups and parts around a product, and its gradients.

A layer A(x; w) is linear in its input and in its weight, and so are its gradients: every order of
differentiation is made of two functions, the layer and the pair of its gradients. Both exist
twice: as functions of autograd, which `torch.func` can transform, and as operators of torch
(``econv::spectral``, ``econv::spectral_backward``), which compilers hold as one node each.

Memory: what is kept for the backward pass is the input, the weight, and what the engine knows of
them (on GPUs the weight in Fourier space).
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from econv.engines.problem import (
    Geometry,
    Problem,
    Prologue,
    Weight,
    bordered,
    exporting,
    memory_format,
    transformed,
)
from econv.plan import ParityError, SpectralPlan, plan_named

__all__ = ["EngineError", "Spectral", "Task"]


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
        return self.geometry.transposed(self.plan.basis.size, *x.shape[2:])

    def shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Of the output."""
        channels = weight.shape[0] * self.plan.synthesis.shape[0]
        return (x.shape[0], channels, self.geometry.height, self.geometry.width)


class Spectral:
    """An engine that differentiates in Fourier space. Subclasses say on what, and run a task."""

    def __init__(self) -> None:
        _MADE[self.name] = self

    name = "spectral"
    compiled = False
    """Whether it runs kernels, which may fail where torch does not."""
    fuses = False
    """Whether a prologue costs nothing: what it makes of the input is never written."""

    def why_not(self, problem: Problem) -> str | None:
        """Why the engine cannot run a problem, as a sentence; nothing where it can."""
        try:
            for part in problem.convolution.parts:
                problem.convolution.plan(part).stencils  # noqa: B018  # checks its parity
                if lost := _LOST.get((self.name, problem.convolution.plan(part).name)):
                    return f"it failed before: {lost}"
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
        self,
        task: Task,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        affine: Tensor | None,
        known: Tensor | None,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
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
        convolution, layout, dtype = problem.convolution, memory_format(x), problem.dtype
        if prologue is not None and not (self.fuses and convolution.groups == 1):
            x, prologue = prologue.apply(x), None
        x, _ = bordered(convolution, x.to(dtype))
        geometry = convolution.geometry(*x.shape[2:])
        affine = None if prologue is None else prologue.affine
        found, first = [], 0
        for part, own in zip(convolution.parts, weight.parts(convolution), strict=True):
            channels = part.fields * convolution.width(part.kind)
            here = x if channels == x.shape[1] else x.narrow(1, first, channels)
            first += channels
            task = Task(convolution.plan(part), geometry, problem.named)
            if convolution.groups == 1:  # not as one of one chunks, whose gradients would be copied
                found.append(self._convolve(problem, task, here, own, affine))
            else:
                pairs = zip(
                    here.chunk(convolution.groups, dim=1),
                    own.chunk(convolution.groups),
                    strict=True,
                )
                each = [self._convolve(problem, task, *pair, None) for pair in pairs]
                found.append(torch.cat(each, dim=1))
        if bias is not None:
            found.append(bias.to(dtype)[:, None, None])
        total = sum(found[1:], start=found[0])
        return total.contiguous(memory_format=layout)

    def _convolve(
        self, problem: Problem, task: Task, x: Tensor, weight: Tensor, affine: Tensor | None
    ) -> Tensor:
        if problem.context == "traced":
            rest = (self.name, task.plan.name, list(task.geometry), task.named)
            found = _SPECTRAL(x, weight, affine, *rest)
        elif torch._C._is_tracing() or exporting():
            found = self.forward(task, x, weight, affine)  # they know no functions of autograd
        else:
            found = _Convolve.apply(x, weight, affine, self, task)
        return cast(Tensor, found[0])


class _Convolve(torch.autograd.Function):
    """A(x; w), linear in both; with ``affine`` of what that makes of x."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, affine: Tensor | None, engine: Spectral, task: Task
    ) -> tuple[Tensor, Tensor]:
        if not engine.compiled:
            return engine.forward(task, x, weight, affine)
        try:
            return engine.forward(task, x, weight, affine)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise EngineError(f"{engine.name} failed: {error}") from error

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, affine, ctx.engine, ctx.task = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, affine, output[1])
        ctx.save_for_forward(x, weight, affine, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, affine, known = ctx.saved_tensors
        wanted, rest = ctx.needs_input_grad, (ctx.engine, ctx.task)
        to_affine = None
        if affine is None:
            pair = (wanted[0], wanted[1])
            to_x, to_weight = _Gradients.apply(gradients[0], x, weight, known, *rest, pair)
        elif torch.is_grad_enabled():  # for derivatives of the second order and beyond
            with torch.enable_grad():
                out, _ = _Convolve.apply(Prologue(affine).apply(x), weight, None, *rest)
            inputs = [t for t, need in zip((x, weight, affine), wanted, strict=False) if need]
            found = iter(torch.autograd.grad(out, inputs, gradients[0], create_graph=True))
            return *(next(found) if need else None for need in wanted[:3]), None, None
        else:
            pair = (wanted[0] or wanted[2], wanted[1])
            given = (gradients[0], x, weight, affine, known, pair)
            to_x, to_weight, to_affine = _backward(ctx.engine, ctx.task, *given)
        found_all = (to_x, to_weight, to_affine)
        return (
            *(g if need else None for g, need in zip(found_all, wanted, strict=False)),
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, weight, affine, _ = ctx.saved_tensors
        assert affine is None  # engines that fuse know no forward mode
        total = None
        for a, b in ((tangents[0], weight), (x, tangents[1])):
            if a is not None and b is not None:
                part, _ = _Convolve.apply(a, b, None, ctx.engine, ctx.task)
                total = part if total is None else total + part
        return total, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _loop(_Convolve, info, in_dims, inputs), (0, 0)


class _Gradients(torch.autograd.Function):
    """(A*(g; w), C(x, g)): the gradients of ⟨A(x; w), g⟩ to x and to w.

    With cotangents (h, H) its own scalar is ⟨A(h; w) + A(x; H), g⟩, whose gradients to x and to w
    are again A*(g; H) and C(h, g).
    """

    @staticmethod
    def forward(
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        known: Tensor | None,
        engine: Spectral,
        task: Task,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        to_x, to_weight, _ = _backward(engine, task, g, x, weight, None, known, wanted)
        return _zeros(x) if to_x is None else to_x, _zeros(
            weight
        ) if to_weight is None else to_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        g, x, weight, _, ctx.engine, ctx.task, _ = inputs
        ctx.save_for_backward(g, x, weight)
        ctx.save_for_forward(g, x, weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        g, x, weight = ctx.saved_tensors
        rest = (ctx.engine, ctx.task)
        h, big_h = cotangents
        to_g = _Convolve.apply(h, weight, None, *rest)[0]
        to_g = to_g + _Convolve.apply(x, big_h, None, *rest)[0]
        to_x, to_weight = _Gradients.apply(g, h, big_h, None, *rest, (True, True))
        return to_g, to_x, to_weight, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        g, x, weight = ctx.saved_tensors
        given = zip(ctx.saved_tensors, tangents[:3], strict=True)
        moved = [torch.zeros_like(t) if d is None else d for t, d in given]
        rest = (None, ctx.engine, ctx.task, (True, True))
        pairs = (
            _Gradients.apply(moved[0], x, weight, *rest),
            _Gradients.apply(g, *moved[1:], *rest),
        )
        return tuple(one + other for one, other in zip(*pairs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _loop(_Gradients, info, in_dims, inputs), (0, 0)


def _zeros(x: Tensor) -> Tensor:
    """What is not wanted: zeros that take no room, but where a transformation may write to them."""
    return torch.zeros_like(x) if transformed() else x.new_zeros(()).expand_as(x)


_LOST: dict[tuple[str, str], str] = {}
"""Why an engine failed on a plan, where nobody had asked for it by name."""

_log = logging.getLogger("econv.engines")


def lost() -> int:
    """How many engines have failed so far: what was chosen before has to be chosen again."""
    return len(_LOST)


def _forward(
    engine: Spectral, task: Task, x: Tensor, weight: Tensor, affine: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A graph's forward pass; by operations of torch where kernels fail that were only chosen."""
    if (engine.name, task.plan.name) not in _LOST:
        try:
            return engine.forward(task, x, weight, affine)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _lose(engine, task, error)
    made = x if affine is None else Prologue(affine).apply(x)
    found, _ = _MADE["spectral/torch"].forward(task, made, weight, None)
    return found, engine.known_like(task, x, weight)


def _backward(
    engine: Spectral,
    task: Task,
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    affine: Tensor | None,
    known: Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """A backward pass; by operations of torch where kernels fail that were only chosen."""
    if torch._C._functorch.is_legacy_batchedtensor(g):
        raise RuntimeError(
            f"{engine.name} has no gradients that are batched (is_grads_batched, vectorize=True): "
            "use torch.func.vmap, or econv.engine('dense')"
        )
    if (engine.name, task.plan.name) not in _LOST:
        try:
            return engine.backward(task, g, x, weight, affine, known, wanted)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _lose(engine, task, error)
    plain = _MADE["spectral/torch"]
    if affine is None:
        return plain.backward(task, g, x, weight, None, None, wanted)
    with torch.enable_grad():
        given = (x.detach().requires_grad_(), affine.detach().requires_grad_())
        made = Prologue(given[1]).apply(given[0])
    to_made, to_weight, _ = plain.backward(task, g, made.detach(), weight, None, None, wanted)
    to_x, to_affine = torch.autograd.grad(made, given, to_made)
    return to_x, to_weight, to_affine


def _lose(engine: Spectral, task: Task, error: Exception) -> None:
    """Never run an engine on a plan again, and say so once; raise where it was asked for."""
    if not engine.compiled:
        raise error
    if task.named:
        raise EngineError(f"{engine.name} failed: {error}") from error
    _LOST[engine.name, task.plan.name] = reason = f"{type(error).__name__}: {str(error)[:500]}"
    _log.warning("%s failed on %r and is not chosen again: %s", engine.name, task.plan, reason)


def _loop(function: Any, info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
    """One call for each member of a mapped dimension."""
    found = []
    for i in range(info.batch_size):
        chosen = [
            value.select(dim, i) if isinstance(dim, int) else value
            for value, dim in zip(inputs, in_dims, strict=True)
        ]
        found.append(function.apply(*chosen))
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


# The same as operators of torch, for graphs.

_LIBRARY = torch.library.Library("econv", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides,)
_LIBRARY.define(
    "spectral(Tensor x, Tensor weight, Tensor? affine, str engine, str plan, SymInt[] geometry,"
    " bool named) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "spectral_backward(Tensor g, Tensor x, Tensor weight, Tensor? affine, Tensor known,"
    " str engine, str plan, SymInt[] geometry, bool named, bool to_x, bool to_weight)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_SPECTRAL = torch.ops.econv.spectral.default
_BACKWARD = torch.ops.econv.spectral_backward.default


def _task(plan: str, geometry: list[int], named: bool) -> Task:
    return Task(plan_named(plan), Geometry(*geometry), named)


def _run(
    x: Tensor, weight: Tensor, affine: Tensor | None, engine: str, plan: str, *about: Any
) -> tuple[Tensor, Tensor]:
    y, known = _forward(_MADE[engine], _task(plan, *about), x, weight, affine)
    return y.contiguous(memory_format=memory_format(x)), known


def _fake(
    x: Tensor, weight: Tensor, affine: Tensor | None, engine: str, plan: str, *about: Any
) -> tuple[Tensor, Tensor]:
    task = _task(plan, *about)
    shape = task.shape(x, weight)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    return y, _MADE[engine].known_like(task, x, weight)


def _run_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    affine: Tensor | None,
    known: Tensor,
    engine: str,
    plan: str,
    geometry: list[int],
    named: bool,
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    task, wanted = _task(plan, geometry, named), (to_x, to_weight)
    found = _backward(_MADE[engine], task, g, x, weight, affine, known, wanted)
    layouts = (memory_format(x), torch.contiguous_format, torch.contiguous_format)
    kept = (to_x, to_weight, to_x and affine is not None)
    one, two, three = (
        x.new_empty(0) if t is None or not keep else t.contiguous(memory_format=layout)
        for t, keep, layout in zip(found, kept, layouts, strict=True)
    )
    return one, two, three


def _fake_backward(
    g: Tensor, x: Tensor, weight: Tensor, affine: Tensor | None, known: Tensor, *about: Any
) -> tuple[Tensor, Tensor, Tensor]:
    to_x, to_weight = about[-2:]
    like_x = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    like_w = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    like_a = x.new_empty(0)
    if to_x and affine is not None:
        like_a = torch.empty(affine.shape, dtype=affine.dtype, device=x.device)
    return like_x if to_x else x.new_empty(0), like_w if to_weight else x.new_empty(0), like_a


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, affine, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, affine, output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, affine, known = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    pair = (wanted[0] or wanted[2], wanted[1])
    found = _BACKWARD(gradient, x, weight, affine, known, *ctx.rest, *pair)
    return *(g if need else None for g, need in zip(found, wanted, strict=False)), *[None] * 4


for _name, _kernel, _meta in (
    ("spectral", _run, _fake),
    ("spectral_backward", _run_backward, _fake_backward),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"econv::{_name}", _meta, lib=_LIBRARY)
torch.library.register_autograd(
    "econv::spectral", _differentiate, setup_context=_keep, lib=_LIBRARY
)
