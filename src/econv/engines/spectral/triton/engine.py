"""The spectral engines on a GPU: what is launched for a layer, and for its gradients.

Arithmetic: 16-bit inputs run in float16, each image scaled by a power of two to the middle of its
range, so that derivatives and weights keep three digits more than bfloat16 has; sums are float32.
float32 inputs run in float32 with products in tf32, or in three of them where tf32 is not allowed.
Every operand comes with its largest numbers, which settle how it is scaled.

This module knows tensors; launches are said by `econv.engines.spectral.triton.launches`, which is
imported with the first launch: Triton need not be installed.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from econv.engines.problem import Problem, times
from econv.engines.spectral.operator import Gradients, Saved, Spectral, Task, through
from econv.engines.spectral.tiling import CHANGES, Tiles, convolution_tiling
from econv.engines.spectral.torch import tables
from econv.engines.spectral.triton.scheme import scheme
from econv.gpu.devices import DTYPES, on_device, unavailable
from econv.gpu.sizes import Like, rounded_up
from econv.plan import SpectralPlan
from econv.tensors import memory_format

__all__ = ["Hopper", "Triton"]


class Triton(Spectral):
    """Kernels in Triton, between group features, in 16 bits and in float32."""

    name = "spectral/triton"
    compiled = True
    fuses = True
    specialised = False

    def why_not(self, problem: Problem) -> str | None:
        """It runs layers between group features, on recent GPUs."""
        missing = unavailable(problem.device) or self._not_covered(problem)
        return missing or super().why_not(problem)

    def _not_covered(self, problem: Problem) -> str | None:
        conv = problem.convolution
        if conv.dimension not in (2, 3):
            return f"it serves images and volumes; these have {conv.dimension} axes"
        if (conv.parts[0].kind, conv.target) != ("regular", "regular"):
            return f"it maps group features to group features; this maps {conv}"
        if problem.dtype not in DTYPES:
            return f"it runs in bfloat16, float16 and float32; the output is {problem.dtype}"
        if problem.context in ("watched", "transformed"):
            return "a tracer or a transformation must see operations of torch"
        if conv.geometry((0, 0)).transposed(conv.basis.size, (0, 0)).before < 0:  # of any size
            return f"its padding of {conv.padding} is wider than the stencils reach"
        rim = 2 * conv.padding + conv.dilation * conv.basis.size
        pixels = math.prod(n + rim for n in problem.sizes)
        if pixels >= 2**26 or pixels * max(conv.channels) >= 2**31:  # 32 numbers each are kept
            return "its kernels count what they keep of an image in 32 bits"
        size, order = conv.basis.size, conv.basis.group.order
        if conv.dimension == 3 and size > 5:
            return f"it knows stencils of up to 5×5×5; these are {times([size] * 3)}"
        if conv.dimension == 3 and order > (most := _MOST_ELEMENTS):
            return f"of volumes it knows groups of up to {most} elements; this has {order}"
        return None

    def forward(
        self, task: Task, x: Tensor, weight: Tensor, affine: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer; what is known of its operands is kept."""
        with on_device(x):
            known, x_largest, w_largest, weights = self._known(task, x, weight, affine)
            return self._launch(task, x, x_largest, weights, w_largest, affine), known

    def known_like(self, task: Task, x: Tensor, weight: Tensor) -> Tensor:
        """Largest numbers of the input and of the spectral weights, and these weights."""
        numbers = sum(_lengths(x, weight)) + math.prod(weight.shape[:2]) * task.plan.weights
        return torch.empty(numbers, dtype=torch.float32, device=x.device)

    def _known(
        self, task: Task, x: Tensor, weight: Tensor, affine: Tensor | None, have: Any = None
    ) -> tuple[Tensor, ...]:
        """All of that, and its three parts."""
        known = self.known_like(task, x, weight) if have is None else have
        lengths = _lengths(x, weight)
        x_largest, w_largest, rest = known.split([*lengths, len(known) - sum(lengths)])
        weights = rest.view(*weight.shape[:2], task.plan.weights)
        if have is None:
            known[: sum(lengths)].zero_()
            flat = weight.to(torch.float32).flatten(0, 1)
            torch.mm(flat, _weight_map(task, x), out=weights.view(-1, task.plan.weights))
            _launches().largest(x, x_largest, affine)
            _launches().largest(weights.flatten(1)[:, :, None, None], w_largest)
        return known, x_largest, w_largest, weights

    def backward(
        self, task: Task, gradient: Tensor, saved: Saved, wanted: tuple[bool, bool]
    ) -> Gradients:
        """Both gradients; that to the weight first, while the other, larger one does not exist."""
        x, weight, affine, known = saved
        launches, to_x, to_weight, to_affine = _launches(), None, None, None
        with on_device(x):
            _, x_largest, w_largest, weights = self._known(task, x, weight, affine, known)
            gradient = gradient.to(x.dtype)
            found = gradient.new_zeros(launches.OVERALL + len(gradient), dtype=torch.float32)
            launches.largest(gradient, found)
            if wanted[1]:
                pair, way = (Like.of(x), Like.of(gradient)), self._way(x, affine)
                run = _runs(x).weight_gradient_run(*pair, task.plan.name, task.geometry, *way)
                to_weights = run(x, x_largest, gradient, found, *_given(affine))
                to_weight = (to_weights @ _weight_map(task, x).T).to(weight.dtype)
            if wanted[0]:
                back = Task(task.plan, task.back(x))
                to_x = self._launch(back, gradient, found, weights, w_largest, None, x)
                if affine is not None:
                    found = launches.passes.activation_gradient(to_x, x, affine)
                    to_x, to_affine = found or through(affine, x, to_x.to(x.dtype))
                to_x = to_x.contiguous(memory_format=memory_format(x))
        return to_x, to_weight, to_affine

    def _launch(
        self,
        task: Task,
        x: Tensor,
        x_largest: Tensor,
        weights: Tensor,
        w_largest: Tensor,
        affine: Tensor | None,
        into: Tensor | None = None,
    ) -> Tensor:
        """A layer, or its adjoint with an output like ``into``."""
        adjoint, layout = into is not None, memory_format(x if into is None else into)
        last = self.specialised or layout is not torch.contiguous_format
        numbers = adjoint, task.geometry, weights.shape[int(adjoint)]
        way = last, *self._way(x, affine)
        run = _runs(x).convolution_run(Like.of(x), task.plan.name, *numbers, *way)
        found: Tensor = run(x, x_largest, weights, w_largest, *_given(affine))
        return found

    def _way(self, x: Tensor, affine: Tensor | None) -> tuple[Any, ...]:
        """What else kernels are made for."""
        precision = _launches().precision_of(x.dtype)
        changes = CHANGES if x.ndim == 4 else _runs(x).CHANGES
        return precision, affine is not None, self.specialised, tuple(changes.items())


class Hopper(Triton):
    """Kernels in which some warps differentiate while others multiply, for Hopper GPUs."""

    name = "spectral/hopper"
    specialised = True

    def why_not(self, problem: Problem) -> str | None:
        """It runs what was found to gain: 16 bits, and most groups."""
        if problem.convolution.dimension != 2:
            return "it serves images only"
        reason = super().why_not(problem)
        if reason is not None:
            return reason
        if not _is_hopper(problem.device):
            return "it needs a Hopper GPU, and the Gluon of Triton 3.6 or later"
        if problem.dtype == torch.float32:
            return "it runs in 16 bits"
        conv = problem.convolution
        if not _specialised(conv.plan(conv.parts[0]), conv.out_fields // conv.groups):
            return f"{conv.basis.group.name} has no products that fit its warps"
        return None


@cache
def _specialised(plan: SpectralPlan, out_fields: int) -> bool:
    return convolution_tiling(scheme(plan, 8), out_fields, Tiles(), True).warp_specialised


@cache
def _is_hopper(device: torch.device) -> bool:
    from econv.engines.spectral.hopper.kernels import supported

    return bool(supported(device))


_MOST_ELEMENTS = 60
"""Of a group of space: all channels of a tile of voxels stay in registers."""


def _runs(x: Tensor) -> Any:
    """What launches the kernels for images, or for volumes."""
    if x.ndim == 4:
        return _launches()
    from econv.engines.spectral.triton import volumes

    return volumes


@cache
def _launches() -> Any:
    from econv.engines.spectral.triton import launches

    return launches


def _weight_map(task: Task, x: Tensor) -> Tensor:
    return tables(task.plan, x.device, torch.float32)["weight_map"]


def _given(affine: Tensor | None) -> tuple[Tensor, ...]:
    return () if affine is None else (affine.contiguous(),)


def _lengths(x: Tensor, weight: Tensor) -> tuple[int, int]:
    """Numbers that the largest ones of both take, in whole 16 bytes."""
    overall = _launches().OVERALL
    return rounded_up(overall + x.shape[0], 4), rounded_up(overall + weight.shape[0], 4)
