"""The spectral engine on a GPU as operators of torch: three launches around each product.

``econv::convolve`` is a layer A(x; w), linear in its input and in its spectral weights, or its
adjoint; ``econv::gram`` is the gradient to the weights. Their derivatives are these two again, so
that every order of differentiation is made of them. Every operand comes with its largest numbers
(``econv::largest``), which settle how it is scaled and no result depends on: they are found once
for all operators that read it, and have no gradient. All have fake kernels: compilers and
exporters see one opaque operator each.

An input may be activated where it is read, so that the activated one is never written: with an
argument ``affine``, float32 and ``[3, fields]``, what is convolved is
max(0, (x − centre)·scale + shift), zero outside of the image. Gradients reach x and the three
numbers of each field (``econv::activation_backward``).

Arithmetic: 16-bit inputs run in float16, each image scaled by a power of two to the middle of its
range, so that derivatives and weights keep three digits more than bfloat16 has; sums are float32.
float32 inputs run in float32 with products in tf32, or in three of them where tf32 is not allowed.

This room knows operators and their derivatives. What is launched, and in which memory, is said by
`econv.engines.spectral.triton.launches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from econv.engines.dense import memory_format
from econv.engines.spectral import Geometry
from econv.engines.spectral.tiling import Like, Tiles, overridden, tiles
from econv.engines.spectral.triton.kernels import OVERALL
from econv.engines.spectral.triton.launches import (
    backward_run,
    convolution_run,
    covers,
    largest_activated_steps,
    largest_steps,
    precision_of,
    statistics_steps,
)
from econv.engines.spectral.triton.launches import weight_gradient_run as gram_run
from econv.plan import plan_named

__all__ = [
    "Tiles",
    "convolve",
    "covers",
    "field_statistics",
    "gram",
    "largest",
    "run_activation_backward",
    "run_convolve",
    "run_gram",
    "run_largest",
    "statistics_backward",
    "tiles",
]

_GEOMETRY = "SymInt up, SymInt down, SymInt dilation, SymInt before"
_LIBRARY = torch.library.Library("econv", "DEF")
_LIBRARY.define("largest(Tensor x, Tensor? affine) -> Tensor")
_LIBRARY.define(
    "convolve(Tensor x, Tensor x_largest, Tensor weights, Tensor w_largest, str plan,"
    f" bool adjoint, {_GEOMETRY}, SymInt height, SymInt width, bool channels_last,"
    " Tensor? affine) -> Tensor"
)
_LIBRARY.define(
    "gram(Tensor x, Tensor x_largest, Tensor g, Tensor g_largest, str plan,"
    f" {_GEOMETRY}, Tensor? affine) -> Tensor"
)
_LIBRARY.define("activation_backward(Tensor g, Tensor x, Tensor affine) -> (Tensor, Tensor)")
_op_largest = torch.ops.econv.largest.default
_op_convolve = torch.ops.econv.convolve.default
_op_gram = torch.ops.econv.gram.default
_op_activation_backward = torch.ops.econv.activation_backward.default


def largest(x: Tensor, affine: Tensor | None = None) -> Tensor:
    """The largest magnitude in ``x``, and from `OVERALL` on that of each of its images.

    With ``affine``, of ``x`` when it is activated.
    """
    found: Tensor = _op_largest(x, affine)
    return found


def convolve(
    x: Tensor,
    weights: Tensor,
    plan: str,
    adjoint: bool,
    *geometry: int,
    affine: Tensor | None = None,
) -> Tensor:
    """A layer, or its adjoint: `run_convolve` as an operator, in the layout of the input."""
    last = memory_format(x) is torch.channels_last
    rest = (plan, adjoint, *geometry, last, affine)
    found: Tensor = _op_convolve(x, largest(x, affine), weights, largest(weights), *rest)
    return found


def gram(x: Tensor, g: Tensor, plan: str, *geometry: int, affine: Tensor | None = None) -> Tensor:
    """The gradient to the weights: `run_gram` as an operator."""
    found: Tensor = _op_gram(x, largest(x, affine), g, largest(g), plan, *geometry, affine)
    return found


def run_largest(x: Tensor, affine: Tensor | None = None) -> Tensor:
    """`largest`, on a device."""
    found = torch.zeros(OVERALL + x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        if affine is None:
            steps = largest_steps(Like.of(x))
        else:
            steps = largest_activated_steps(Like.of(x), affine.shape[1])
        if steps is not None:
            steps(x, *_given(affine), found)
        else:
            x = x if affine is None else _activated(x, affine)
            each = torch.linalg.vector_norm(
                x, math.inf, dim=tuple(range(1, x.dim())), dtype=torch.float32
            )
            found[OVERALL:] = each
            found[:OVERALL] = each.amax()
    return found


def _by_channel(affine: Tensor, x: Tensor) -> Tensor:
    """The three numbers of each field for every channel, ``[3, 1, channels, 1, 1]``."""
    each = x.shape[1] // affine.shape[1]
    return affine[:, :, None].expand(-1, -1, each).reshape(3, 1, -1, 1, 1)


def _activated(x: Tensor, affine: Tensor) -> Tensor:
    """What the kernels do at the load, written: in float32."""
    centre, scale, shift = _by_channel(affine, x)
    return torch.relu((x.to(affine.dtype) - centre) * scale + shift)


def run_convolve(
    x: Tensor,
    x_largest: Tensor,
    weights: Tensor,
    w_largest: Tensor,
    plan: str,
    adjoint: bool,
    up: int,
    down: int,
    dilation: int,
    before: int,
    height: int,
    width: int,
    channels_last: bool,
    affine: Tensor | None = None,
) -> Tensor:
    """A layer, or its adjoint, on ``[batch, fields * order, height, width]``.

    ``weights`` are spectral weights ``[out, in, count]`` in float32, those of the layer in both
    cases; the numbers from ``up`` on are those of `econv.engines.spectral.Geometry`. ``affine``:
    what is convolved is max(0, (x − centre)·scale + shift); a layer only, not its adjoint.
    """
    if adjoint and affine is not None:
        raise ValueError("expected no affine with adjoint=True: gradients are not activated")
    run = convolution_run(
        Like.of(x),
        plan,
        adjoint,
        Geometry(up, down, dilation, before, height, width),
        weights.shape[1 if adjoint else 0],
        channels_last,
        overridden(),
        precision_of(x.dtype),
        affine is not None,
    )
    return run(x, x_largest, weights.contiguous(), w_largest, *_given(affine))


def _given(affine: Tensor | None) -> tuple[Tensor, ...]:
    return () if affine is None else (affine.contiguous(),)


def run_gram(
    x: Tensor,
    x_largest: Tensor,
    g: Tensor,
    g_largest: Tensor,
    plan: str,
    up: int,
    down: int,
    dilation: int,
    before: int,
    affine: Tensor | None = None,
) -> Tensor:
    """The gradient of ⟨A(x; w), g⟩ to the spectral weights w, ``[out, in, count]`` in float32.

    ``affine`` activates x, as in `run_convolve`.
    """
    run = gram_run(
        Like.of(x),
        Like.of(g),
        plan,
        Geometry(up, down, dilation, before, *g.shape[2:]),
        overridden(),
        precision_of(x.dtype),
        affine is not None,
    )
    return run(x, x_largest, g, g_largest, *_given(affine))


def run_activation_backward(g: Tensor, x: Tensor, affine: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients to ``x`` and ``affine`` from that to max(0, (x − centre)·scale + shift)."""
    run = backward_run(Like.of(x), affine.shape[1])
    if run is None:
        return _plain_activation_backward(g, x, affine)
    return run.activation(g.contiguous(memory_format=memory_format(x)), x, affine.contiguous())


def _plain_activation_backward(g: Tensor, x: Tensor, affine: Tensor) -> tuple[Tensor, Tensor]:
    """`run_activation_backward` as operations of torch, which have gradients again."""
    centre, scale, shift = _by_channel(affine, x)
    value = x.to(affine.dtype) - centre
    passed = torch.where(value * scale + shift <= 0, 0.0, g.to(affine.dtype))
    sums = [
        p.unflatten(1, (affine.shape[1], -1)).sum((0, 2, 3, 4)) for p in (passed, passed * value)
    ]
    return (passed * scale).to(x.dtype), torch.stack([-affine[1] * sums[0], sums[1], sums[0]])


def _field_statistics(
    x: Tensor,
    fields: int,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor, float | Tensor] | None,
    eps: float,
) -> Tensor:
    means, deviations = torch.batch_norm_stats(x, eps)
    found = torch.empty((4, fields), dtype=torch.float32, device=x.device)
    mean, variance, share = (None, None, 0.0) if running is None else running
    several = (weight, bias, mean)
    dtypes = [None if tensor is None else tensor.dtype for tensor in several[:2]]
    kept_as = None if mean is None or variance is None else (mean.dtype, variance.dtype)
    part = share.dtype if isinstance(share, Tensor) else share
    steps = statistics_steps(Like.of(x), fields, *dtypes, kept_as, part, eps)
    given = (t if isinstance(t, Tensor) else means for t in (*several, variance, share))
    steps(means, deviations, *given, found)
    for kept in (mean, variance):
        if kept is not None and not kept.is_inference():
            torch.autograd.graph.increment_version(kept)  # what a kernel writes, autograd misses
    return found


def _statistics_backward(x: Tensor, g: Tensor, numbers: Tensor, to_affine: Tensor) -> Tensor:
    run = backward_run(Like.of(x), numbers.shape[1])
    assert run is not None
    g = g.contiguous(memory_format=memory_format(x))
    return run.statistics(g, x, numbers, to_affine.contiguous())


def _fake_largest(x: Tensor, affine: Tensor | None) -> Tensor:
    return torch.empty(OVERALL + x.shape[0], dtype=torch.float32, device=x.device)


def _fake_convolve(
    x: Tensor, _: Tensor, weights: Tensor, __: Tensor, plan: str, adjoint: bool, *numbers: Any
) -> Tensor:
    *_geometry, height, width, channels_last, _affine = numbers
    channels = plan_named(plan).synthesis.shape[0]
    out_fields = weights.shape[1 if adjoint else 0]
    return torch.empty(
        (x.shape[0], out_fields * channels, height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )


def _fake_gram(x: Tensor, _: Tensor, g: Tensor, __: Tensor, plan: str, *geometry: Any) -> Tensor:
    found = plan_named(plan)
    channels = found.analysis.shape[1]
    shape = (g.shape[1] // channels, x.shape[1] // channels, found.weights)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _fake_activation_backward(g: Tensor, x: Tensor, affine: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(affine, memory_format=torch.contiguous_format)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs[:4], inputs[-1])
        ctx.plan, ctx.adjoint, *geometry = inputs[4:-2]
        ctx.geometry = Geometry(*geometry)
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = _op_convolve(*inputs)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, x_largest, weights, w_largest, affine = ctx.saved_tensors
        back = ctx.geometry.transposed(plan_named(ctx.plan).basis.size, *x.shape[2:])
        last = memory_format(x) is torch.channels_last
        to_x = to_weights = to_affine = None
        found = largest(gradient)
        if ctx.needs_input_grad[2]:  # first: while it runs, the other, larger one does not exist
            # The layer's input and output in this order, whichever of them was ours.
            if ctx.adjoint:
                pair = (gradient, found, x, x_largest)
                to_weights = _op_gram(*pair, ctx.plan, *back[:4], None)
            else:
                pair = (x, x_largest, gradient, found)
                to_weights = _op_gram(*pair, ctx.plan, *ctx.geometry[:4], affine)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[-1]:
            rest = (weights, w_largest, ctx.plan, not ctx.adjoint, *back, last, None)
            to_x = _op_convolve(gradient, found, *rest)
            if affine is not None:
                to_x, to_affine = _op_activation_backward(to_x, x, affine)
        return to_x, None, to_weights, *[None] * 10, to_affine


class _GramOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, x_largest, g, g_largest, ctx.plan, *geometry, affine = inputs
        ctx.save_for_backward(x, x_largest, g, g_largest, affine)
        ctx.geometry = Geometry(*geometry, *g.shape[2:])
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = _op_gram(*inputs)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, x_largest, g, g_largest, affine = ctx.saved_tensors
        size = plan_named(ctx.plan).basis.size
        back = ctx.geometry.transposed(size, *x.shape[2:])
        to_x = to_g = to_affine = None
        weights = (gradient, largest(gradient), ctx.plan)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[-1]:
            last = memory_format(x) is torch.channels_last
            to_x = _op_convolve(g, g_largest, *weights, True, *back, last, None)
            if affine is not None:
                to_x, to_affine = _op_activation_backward(to_x, x, affine)
        if ctx.needs_input_grad[2]:
            last = memory_format(g) is torch.channels_last
            to_g = _op_convolve(x, x_largest, *weights, False, *ctx.geometry, last, affine)
        return to_x, None, to_g, *[None] * 6, to_affine


def _there(run: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels are launched on the current device: it has to be that of the tensors."""

    def on_device(x: Tensor, *more: Any) -> Any:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return run(x, *more)
        with torch.cuda.device(x.device):
            return run(x, *more)

    return on_device


field_statistics: Callable[..., Tensor] = _there(_field_statistics)
"""The numbers of a batch norm of ``x``: ``affine`` and, as a fourth row, inverse deviations.

``x`` lies in one of torch's two layouts. ``running`` are mean, variance and the share of this batch
in them (a number, or in memory): they are brought up to date. Without gradients.
"""

statistics_backward: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _there(
    _statistics_backward
)
"""The gradient to ``x`` from its own part g, `field_statistics` and the gradients to ``affine``."""


def _differentiable(operator: Any, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """An operator with its derivative, or without where it has none or nobody asks for it.

    `torch.library.register_autograd` would do the same in more time than all launches take.
    """

    def run(*inputs: Any) -> Any:
        if function and torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return function(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return run


for _operator, _kernel, _fake, _function in (
    (_op_largest, run_largest, _fake_largest, None),
    (_op_convolve, run_convolve, _fake_convolve, _Convolve.apply),
    (_op_gram, run_gram, _fake_gram, _GramOf.apply),
    (
        _op_activation_backward,
        run_activation_backward,
        _fake_activation_backward,
        _plain_activation_backward,
    ),
):
    _name = _operator._opname
    _LIBRARY.impl(_name, _there(_kernel), "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _differentiable(_operator, _function), "Autograd")
    torch.library.register_fake(f"econv::{_name}", _fake, lib=_LIBRARY)
