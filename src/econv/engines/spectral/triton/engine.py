"""The spectral engines on a GPU: what is launched for a layer, and for its gradients.

Arithmetic: 16-bit inputs run in float16, each image scaled by a power of two to the middle of its
range, so that derivatives and weights keep three digits more than bfloat16 has; sums are float32.
float32 inputs run in float32 with products in tf32, or in three of them where tf32 is not allowed.
Every operand comes with its largest numbers, which settle how it is scaled.

This room knows tensors; launches are said by `econv.engines.spectral.triton.launches`, which is
imported with the first launch: Triton need not be installed.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from econv.engines.problem import Problem, Prologue, memory_format
from econv.engines.spectral.operator import Spectral, Task
from econv.engines.spectral.tiling import Like, overridden, warp_specialised
from econv.engines.spectral.torch import spectral_weights
from econv.engines.spectral.triton.scheme import scheme

__all__ = ["DEVICES", "Hopper", "Triton", "on_device"]

DEVICES = {"cuda"}
"""The kinds of device that the kernels run on."""

_OLDEST = (8, 0)  # capability of the GPUs whose tensor cores the kernels know
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Triton(Spectral):
    """Kernels in Triton, between group features, in 16 bits and in float32."""

    name = "spectral/triton"
    compiled = True
    fuses = True
    specialised = False

    def why_not(self, problem: Problem) -> str | None:
        """It runs layers between group features, on recent GPUs."""
        return (
            _unavailable(problem.device) or self._not_covered(problem) or super().why_not(problem)
        )

    def _not_covered(self, problem: Problem) -> str | None:
        conv = problem.convolution
        if (conv.parts[0].kind, conv.target) != ("regular", "regular"):
            return f"it maps group features to group features; this maps {conv}"
        if problem.dtype not in _DTYPES:
            return f"it runs in bfloat16, float16 and float32; the output is {problem.dtype}"
        if problem.context in ("watched", "transformed"):
            return "a tracer or a transformation must see operations of torch"
        height, width = problem.height, problem.width
        back = problem.geometry.transposed(conv.basis.size, height, width)
        if back.before < 0:
            return f"its padding of {conv.padding} is wider than the stencils reach"
        return None

    def forward(
        self, task: Task, x: Tensor, weight: Tensor, affine: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer; the largest numbers of its input are kept."""
        with on_device(x):
            _, weights = spectral_weights(task.plan, weight, x.dtype)
            known = largest(x, affine)
            return self._launch(task, x, known, weights, affine), known

    def known_like(self, x: Tensor) -> Tensor:
        """The largest numbers of images."""
        return torch.empty(_launches().OVERALL + x.shape[0], dtype=torch.float32, device=x.device)

    def backward(
        self,
        task: Task,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        affine: Tensor | None,
        known: Tensor,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Both gradients; that to the weight first, while the other, larger one does not exist."""
        launches, to_x, to_weight, to_affine = _launches(), None, None, None
        with on_device(x):
            table, weights = spectral_weights(task.plan, weight, x.dtype)
            gradient = gradient.to(x.dtype)
            found = largest(gradient)
            if wanted[1]:
                run = launches.weight_gradient_run(
                    Like.of(x),
                    Like.of(gradient),
                    task.plan.name,
                    task.geometry,
                    overridden(),
                    launches.precision_of(x.dtype),
                    affine is not None,
                    self.specialised,
                )
                to_weights = run(x, known, gradient, found, *_given(affine))
                to_weight = (to_weights @ table.weight_map.T).to(weight.dtype)
            if wanted[0]:
                back = Task(task.plan, task.back(x))
                to_x = self._launch(back, gradient, found, weights, None, x)
                if affine is not None:
                    to_x, to_affine = activation_backward(to_x, x, affine)
        return to_x, to_weight, to_affine

    def _launch(
        self,
        task: Task,
        x: Tensor,
        x_largest: Tensor,
        weights: Tensor,
        affine: Tensor | None,
        into: Tensor | None = None,
    ) -> Tensor:
        """A layer, or its adjoint with an output like ``into``."""
        launches, adjoint = _launches(), into is not None
        run = launches.convolution_run(
            Like.of(x),
            task.plan.name,
            adjoint,
            task.geometry,
            weights.shape[1 if adjoint else 0],
            memory_format(x if into is None else into) is torch.channels_last,
            overridden(),
            launches.precision_of(x.dtype),
            affine is not None,
            self.specialised,
        )
        found: Tensor = run(x, x_largest, weights.contiguous(), largest(weights), *_given(affine))
        return found


class Hopper(Triton):
    """Kernels in which some warps differentiate while others multiply, for Hopper GPUs."""

    name = "spectral/hopper"
    specialised = True

    def why_not(self, problem: Problem) -> str | None:
        """It runs what was found to gain: 16 bits, channels-last, and most groups."""
        reason = super().why_not(problem)
        if reason is not None:
            return reason
        if not _is_hopper(problem.device):
            return "it needs a Hopper GPU, and the Gluon of Triton 3.6 or later"
        if problem.dtype == torch.float32 or not problem.channels_last:
            return "it runs in 16 bits on channels-last images"
        conv = problem.convolution
        fields = (conv.parts[0].fields // conv.groups, conv.out_fields // conv.groups)
        if not warp_specialised(scheme(conv.plan(conv.parts[0]), 8), *fields, problem.dtype):
            return f"{conv.basis.group.name} has no products that fit its warps"
        return None


@cache
def _unavailable(device: torch.device) -> str | None:
    if device.type not in DEVICES:
        return f"it runs on NVIDIA GPUs; the input is on {device.type}"
    if os.environ.get("ECONV_TRITON") == "0":
        return "forbidden by ECONV_TRITON=0"
    if torch.version.hip is not None:
        return "it runs on NVIDIA GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        return "the GPU is older than Ampere"
    return None


@cache
def _is_hopper(device: torch.device) -> bool:
    from econv.engines.spectral.hopper.launches import supported

    return bool(supported(device))


@cache
def _launches() -> Any:
    from econv.engines.spectral.triton import launches

    return launches


_NOTHING = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device: it has to be that of the tensors."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def _given(affine: Tensor | None) -> tuple[Tensor, ...]:
    return () if affine is None else (affine.contiguous(),)


def largest(x: Tensor, affine: Tensor | None = None) -> Tensor:
    """The largest magnitude in ``x``, and from `OVERALL` on that of each of its images.

    With ``affine``, of ``x`` when it is activated.
    """
    launches = _launches()
    overall, like = launches.OVERALL, Like.of(x)
    found = torch.zeros(overall + x.shape[0], dtype=torch.float32, device=x.device)
    if not x.numel():
        return found
    if affine is None:
        steps = launches.largest_steps(like)
    else:
        steps = launches.largest_activated_steps(like, affine.shape[1])
    if steps is not None:
        steps(x, *_given(affine), found)
    else:
        x = x if affine is None else Prologue(affine).apply(x.float())
        rest = tuple(range(1, x.dim()))
        each = torch.linalg.vector_norm(x, math.inf, dim=rest, dtype=torch.float32)
        found[overall:] = each
        found[:overall] = each.amax()
    return found


def activation_backward(g: Tensor, x: Tensor, affine: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients to ``x`` and ``affine`` from that to max(0, (x − centre)·scale + shift)."""
    run = _launches().backward_run(Like.of(x), affine.shape[1])
    if run is not None:
        layout = memory_format(x)
        pair: tuple[Tensor, Tensor] = run.activation(
            g.contiguous(memory_format=layout), x, affine.contiguous()
        )
        return pair
    with torch.enable_grad():
        ours, numbers = x.detach().float().requires_grad_(), affine.detach().requires_grad_()
        made = Prologue(numbers).apply(ours)
        to_x, to_affine = torch.autograd.grad(made, (ours, numbers), g.float())
    return to_x.to(x.dtype), to_affine
