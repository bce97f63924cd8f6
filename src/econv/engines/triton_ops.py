"""The spectral engine on a GPU as operators of torch: three launches around each product.

``econv::convolve`` is a layer A(x; w), linear in its input and in its spectral weights, or its
adjoint; ``econv::gram`` is the gradient to the weights. Their derivatives are these two again, so
that every order of differentiation is made of them. Every operand comes with its largest numbers
(``econv::largest``), which settle how it is scaled and no result depends on: they are found once
for all operators that read it, and have no gradient. All have fake kernels: compilers and
exporters see one opaque operator each.

Arithmetic: 16-bit inputs run in float16, each image scaled by a power of two to the middle of its
range, so that derivatives and weights keep three digits more than bfloat16 has; sums are float32.
float32 inputs run in float32 with products in tf32, or in three of them where tf32 is not allowed.

This room knows operators and their derivatives. What is launched, and in which memory, is said by
`econv.engines.triton_launches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from econv.engines.dense import memory_format
from econv.engines.spectral import Geometry
from econv.engines.triton_kernels import OVERALL
from econv.engines.triton_launches import (
    Like,
    Tiles,
    convolution_run,
    covers,
    gram_run,
    largest_launch,
    overridden,
    precision_of,
    tiles,
)
from econv.plan import plan_named

__all__ = [
    "Tiles",
    "convolve",
    "covers",
    "gram",
    "largest",
    "run_convolve",
    "run_gram",
    "run_largest",
    "tiles",
]

_GEOMETRY = "SymInt up, SymInt down, SymInt dilation, SymInt before"
_LIBRARY = torch.library.Library("econv", "DEF")
_LIBRARY.define("largest(Tensor x) -> Tensor")
_LIBRARY.define(
    "convolve(Tensor x, Tensor x_largest, Tensor weights, Tensor w_largest, str plan,"
    f" bool adjoint, {_GEOMETRY}, SymInt height, SymInt width, bool channels_last) -> Tensor"
)
_LIBRARY.define(
    f"gram(Tensor x, Tensor x_largest, Tensor g, Tensor g_largest, str plan, {_GEOMETRY}) -> Tensor"
)
_op_largest = torch.ops.econv.largest.default
_op_convolve = torch.ops.econv.convolve.default
_op_gram = torch.ops.econv.gram.default


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in ``x``, and from `OVERALL` on that of each of its images."""
    found: Tensor = _op_largest(x)
    return found


def convolve(x: Tensor, weights: Tensor, plan: str, adjoint: bool, *geometry: int) -> Tensor:
    """A layer, or its adjoint: `run_convolve` as an operator, in the layout of the input."""
    last = memory_format(x) is torch.channels_last
    found: Tensor = _op_convolve(
        x, largest(x), weights, largest(weights), plan, adjoint, *geometry, last
    )
    return found


def gram(x: Tensor, g: Tensor, plan: str, *geometry: int) -> Tensor:
    """The gradient to the weights: `run_gram` as an operator."""
    found: Tensor = _op_gram(x, largest(x), g, largest(g), plan, *geometry)
    return found


def run_largest(x: Tensor) -> Tensor:
    """`largest`, on a device."""
    found = torch.zeros(OVERALL + x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        launch = largest_launch(Like.of(x))
        if launch is not None:
            launch(x, found.view(torch.int32))
        else:
            each = torch.linalg.vector_norm(
                x, math.inf, dim=tuple(range(1, x.dim())), dtype=torch.float32
            )
            found[OVERALL:] = each
            found[:OVERALL] = each.amax()
    return found


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
) -> Tensor:
    """A layer, or its adjoint, on ``[batch, fields * order, height, width]``.

    ``weights`` are spectral weights ``[out, in, count]`` in float32, those of the layer in both
    cases; the numbers from ``up`` on are those of `econv.engines.spectral.Geometry`.
    """
    run = convolution_run(
        Like.of(x),
        plan,
        adjoint,
        Geometry(up, down, dilation, before, height, width),
        weights.shape[1 if adjoint else 0],
        channels_last,
        overridden(),
        precision_of(x.dtype),
    )
    return run(x, x_largest, weights.contiguous(), w_largest)


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
) -> Tensor:
    """The gradient of ⟨A(x; w), g⟩ to the spectral weights w, ``[out, in, count]`` in float32."""
    run = gram_run(
        Like.of(x),
        Like.of(g),
        plan,
        Geometry(up, down, dilation, before, *g.shape[2:]),
        overridden(),
        precision_of(x.dtype),
    )
    return run(x, x_largest, g, g_largest)


def _fake_largest(x: Tensor) -> Tensor:
    return torch.empty(OVERALL + x.shape[0], dtype=torch.float32, device=x.device)


def _fake_convolve(
    x: Tensor, _: Tensor, weights: Tensor, __: Tensor, plan: str, adjoint: bool, *numbers: Any
) -> Tensor:
    *_geometry, height, width, channels_last = numbers
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


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs[:4])
        ctx.plan, ctx.adjoint, *geometry = inputs[4:-1]
        ctx.geometry = Geometry(*geometry)
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = _op_convolve(*inputs)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, x_largest, weights, w_largest = ctx.saved_tensors
        back = ctx.geometry.transposed(plan_named(ctx.plan).basis.size, *x.shape[2:])
        last = memory_format(x) is torch.channels_last
        to_x = to_weights = None
        found = largest(gradient)
        if ctx.needs_input_grad[2]:  # first: while it runs, the other, larger one does not exist
            # The layer's input and output in this order, whichever of them was ours.
            if ctx.adjoint:
                pair = (gradient, found, x, x_largest)
                to_weights = _op_gram(*pair, ctx.plan, *back[:4])
            else:
                pair = (x, x_largest, gradient, found)
                to_weights = _op_gram(*pair, ctx.plan, *ctx.geometry[:4])
        if ctx.needs_input_grad[0]:
            rest = (weights, w_largest, ctx.plan, not ctx.adjoint, *back, last)
            to_x = _op_convolve(gradient, found, *rest)
        return to_x, None, to_weights, *[None] * 10


class _GramOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, x_largest, g, g_largest, ctx.plan, *geometry = inputs
        ctx.save_for_backward(x, x_largest, g, g_largest)
        ctx.geometry = Geometry(*geometry, *g.shape[2:])
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensor = _op_gram(*inputs)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, x_largest, g, g_largest = ctx.saved_tensors
        size = plan_named(ctx.plan).basis.size
        back = ctx.geometry.transposed(size, *x.shape[2:])
        to_x = to_g = None
        weights = (gradient, largest(gradient), ctx.plan)
        if ctx.needs_input_grad[0]:
            last = memory_format(x) is torch.channels_last
            to_x = _op_convolve(g, g_largest, *weights, True, *back, last)
        if ctx.needs_input_grad[2]:
            last = memory_format(g) is torch.channels_last
            to_g = _op_convolve(x, x_largest, *weights, False, *ctx.geometry, last)
        return to_x, None, to_g, *[None] * 6


def _there(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Kernels are launched on the current device: it has to be that of the tensors."""

    def on_device(x: Tensor, *more: Any) -> Tensor:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return run(x, *more)
        with torch.cuda.device(x.device):
            return run(x, *more)

    return on_device


def _differentiable(operator: Any, function: Any) -> Callable[..., Tensor]:
    """An operator with its derivative, or without where it has none or nobody asks for it.

    `torch.library.register_autograd` would do the same in more time than all launches take.
    """

    def run(*inputs: Any) -> Tensor:
        found: Tensor
        if function and torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            found = function.apply(*inputs)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                found = operator(*inputs)
        return found

    return run


for _operator, _kernel, _fake, _function in (
    (_op_largest, run_largest, _fake_largest, None),
    (_op_convolve, run_convolve, _fake_convolve, _Convolve),
    (_op_gram, run_gram, _fake_gram, _GramOf),
):
    _name = _operator._opname
    _LIBRARY.impl(_name, _there(_kernel), "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _differentiable(_operator, _function), "Autograd")
    torch.library.register_fake(f"econv::{_name}", _fake, lib=_LIBRARY)
