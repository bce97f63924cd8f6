"""What the spectral engines share: borders, groups and parts around a product, and its gradients.

A layer A(x; w) is linear in its input and in its weight, and so are its gradients: every order of
differentiation is made of two functions, the layer and the pair of its gradients. Both exist
twice: as functions of autograd, which `torch.func` can transform, and as operators of torch
(``econv::spectral``, ``econv::spectral_backward``), which compilers hold as one node each.

Memory: what is kept for the backward pass is the input and the weight, nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from econv.engines.problem import (
    Geometry,
    Problem,
    Prologue,
    Weight,
    exporting,
    memory_format,
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
        if prologue is not None and not self.fuses:
            x, prologue = prologue.apply(x), None
        x = x.to(dtype)
        if convolution.padding_mode != "zeros" and convolution.padding:
            x = functional.pad(x, (convolution.padding,) * 4, mode=convolution.padding_mode)
        geometry = convolution.geometry(*x.shape[2:])
        affine = None if prologue is None else prologue.affine
        found, first = [], 0
        for part, own in zip(convolution.parts, weight.parts(convolution), strict=True):
            channels = part.fields * convolution.width(part.kind)
            here = x if channels == x.shape[1] else x.narrow(1, first, channels)
            first += channels
            task = Task(convolution.plan(part), geometry)
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
            found = _SPECTRAL(x, weight, affine, self.name, task.plan.name, list(task.geometry))
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
            to_x, to_weight, to_affine = ctx.engine.backward(ctx.task, *given)
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
        to_x, to_weight, _ = engine.backward(task, g, x, weight, None, known, wanted)
        # Zeros that take no room stand for what is not wanted.
        to_x = x.new_zeros(()).expand_as(x) if to_x is None else to_x
        none = weight.new_zeros(()).expand_as(weight)
        return to_x, none if to_weight is None else to_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        g, x, weight, _, ctx.engine, ctx.task, _ = inputs
        ctx.save_for_backward(g, x, weight)

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
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _loop(_Gradients, info, in_dims, inputs), (0, 0)


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
    "spectral(Tensor x, Tensor weight, Tensor? affine, str engine, str plan, SymInt[] geometry)"
    " -> (Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "spectral_backward(Tensor g, Tensor x, Tensor weight, Tensor? affine, Tensor known,"
    " str engine, str plan, SymInt[] geometry, bool to_x, bool to_weight)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_SPECTRAL = torch.ops.econv.spectral.default
_BACKWARD = torch.ops.econv.spectral_backward.default


def _task(plan: str, geometry: list[int]) -> Task:
    return Task(plan_named(plan), Geometry(*geometry))


def _run(
    x: Tensor, weight: Tensor, affine: Tensor | None, engine: str, plan: str, geometry: list[int]
) -> tuple[Tensor, Tensor]:
    y, known = _MADE[engine].forward(_task(plan, geometry), x, weight, affine)
    return y.contiguous(memory_format=memory_format(x)), known


def _fake(
    x: Tensor, weight: Tensor, affine: Tensor | None, engine: str, plan: str, geometry: list[int]
) -> tuple[Tensor, Tensor]:
    task = _task(plan, geometry)
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
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    task, wanted = _task(plan, geometry), (to_x, to_weight)
    found = _MADE[engine].backward(task, g, x, weight, affine, known, wanted)
    layouts = (memory_format(x), torch.contiguous_format, torch.contiguous_format)
    kept = (to_x, to_weight, to_x and affine is not None)
    one, two, three = (
        x.new_empty(0) if t is None or not keep else t.contiguous(memory_format=layout)
        for t, keep, layout in zip(found, kept, layouts, strict=True)
    )
    return one, two, three


def _fake_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    affine: Tensor | None,
    known: Tensor,
    engine: str,
    plan: str,
    geometry: list[int],
    to_x: bool,
    to_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    like_x = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    return (
        like_x if to_x else x.new_empty(0),
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
        if to_weight
        else x.new_empty(0),
        torch.empty(affine.shape, dtype=affine.dtype, device=x.device)
        if to_x and affine is not None
        else x.new_empty(0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, affine, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, affine, output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, affine, known = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    pair = (wanted[0] or wanted[2], wanted[1])
    found = _BACKWARD(gradient, x, weight, affine, known, *ctx.rest, *pair)
    return *(g if need else None for g, need in zip(found, wanted, strict=False)), None, None, None


for _name, _kernel, _meta in (
    ("spectral", _run, _fake),
    ("spectral_backward", _run_backward, _fake_backward),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"econv::{_name}", _meta, lib=_LIBRARY)
torch.library.register_autograd(
    "econv::spectral", _differentiate, setup_context=_keep, lib=_LIBRARY
)
