"""The dense engine: expand the filter bank and call `conv2d`.

The cost of a convolution grows with the square of the group's order; in exchange every device,
dtype and exporter that knows `conv2d` runs it. This room knows tensors and index tables; what the
numbers in them mean is the business of `econv.basis`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from econv.engines.problem import (
    Convolution,
    Problem,
    Prologue,
    Weight,
    exporting,
    memory_format,
)

__all__ = ["Dense", "convolve", "filter_offsets", "filters", "replicate", "tables"]


class Dense:
    """`conv2d` with an expanded filter bank: it runs everything."""

    name = "dense"
    fuses = False

    def why_not(self, problem: Problem) -> str | None:
        """Nothing stands against it."""
        return None

    def run(
        self,
        problem: Problem,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> Tensor:
        """Expand the filters in the weight's own dtype, and convolve."""
        if prologue is not None:
            x = prologue.apply(x)
        bank = filters(problem.convolution, weight).to(problem.dtype)
        bias = None if bias is None else bias.to(problem.dtype)
        return convolve(problem.convolution, x.to(problem.dtype), bank, bias)


def tables(convolution: Convolution) -> dict[str, npt.NDArray[Any]]:
    """The fixed arrays that `filters` reads, by name, in its order."""
    basis, group = convolution.basis, convolution.basis.group
    # Operators first, so that one matrix product with the weight gives every filter.
    found: dict[str, npt.NDArray[Any]] = {"synthesis": basis.synthesis.swapaxes(0, 1)}
    if convolution.parts[0].kind == "regular":
        in_fields = convolution.parts[0].fields // convolution.groups
        offsets = filter_offsets(group.relative, in_fields)
        found["offsets"], found["offsets_back"] = offsets, np.argsort(offsets)
    if convolution.target == "vector":
        found["matrices"] = group.matrices
    elif convolution.parts[-1].kind == "vector":
        found["matrices"] = group.matrices[group.inverse]
    return found


def filters(convolution: Convolution, weight: Weight) -> Tensor:
    """The filter bank that `conv2d` takes, ``[out channels, in channels / groups, size, size]``."""
    learned, (synthesis, *more) = weight
    if convolution.parts[0].kind == "regular":
        found = _expand(learned, synthesis).flatten(1, 3)  # [out, (in, k, A), size, size]
        found = _permuted(found, *more[:2]).unflatten(1, (synthesis.shape[1], -1))
        if convolution.target == "regular":
            return found.flatten(0, 1)
        # out(x) = Σ_A A·[s₁(x, A), s₂(x, A)]
        return torch.einsum("gdc,vcgiyx->vdiyx", more[2], found.unflatten(0, (-1, 2))).flatten(0, 1)
    bank = _expand(learned, synthesis)  # [out, in, order, size, size]
    scalars = sum(fields for kind, fields in convolution.parts if kind == "scalar")
    if len(more):  # vectors come last, and are read in frame A as A⁻¹v
        pairs = bank[:, scalars:].unflatten(1, (-1, 2))
        pairs = torch.einsum("ovcgyx,gcd->ovdgyx", pairs, more[0]).flatten(1, 2)
        bank = torch.cat([bank[:, :scalars], pairs], dim=1)
    return bank.transpose(1, 2).flatten(0, 1)


def filter_offsets(relative: npt.NDArray[np.int64], in_fields: int) -> npt.NDArray[np.int64]:
    """Where the filter from input (field, B) to output A lies among those by (field, k, A).

    Output A reads input B through the relative element k = A⁻¹B, turned to frame A.
    ``relative[A, B]`` is the index of A⁻¹B.
    """
    order = len(relative)
    field = np.arange(in_fields)[:, None]
    frame = np.arange(order)[:, None, None]
    return ((field * order + relative[:, None]) * order + frame).ravel()


def convolve(
    convolution: Convolution, x: Tensor, bank: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`conv2d` with the padding modes of `torch.nn.Conv2d`."""
    padding, mode = convolution.padding, convolution.padding_mode
    if mode != "zeros" and padding:
        if mode == "replicate":
            padded = replicate(x, padding, padding)
        else:
            padded = functional.pad(x, (padding,) * 4, mode=mode)
        x = padded.contiguous(memory_format=memory_format(x))
        padding = 0
    return functional.conv2d(
        x, bank, bias, convolution.stride, padding, convolution.dilation, convolution.groups
    )


def replicate(x: Tensor, before: int, after: int) -> Tensor:
    """The image with its outermost pixels repeated, so often before and after each axis.

    Unlike that of `torch.nn.functional.pad`, its gradient can be compiled in every memory format.
    """
    for dim in (2, 3):
        first, last = x.narrow(dim, 0, 1), x.narrow(dim, -1, 1)
        x = torch.cat([*[first] * before, x, *[last] * after], dim)
    return x


def _permuted(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """The second axis in another order."""
    if exporting() or torch._C._is_tracing():  # who know no functions of ours
        return x.index_select(1, order)
    found: Tensor = _Permute.apply(x, order, back)
    return found


class _Permute(torch.autograd.Function):
    """`index_select` by a permutation of the second axis, whose gradient is another one.

    torch's own would add up what no two indices share, many times slower.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        return x.index_select(1, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        order, back = ctx.saved_tensors
        return _Permute.apply(gradients[0], back, order), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return _Permute.apply(tangent, *ctx.saved_tensors)


def _expand(weight: Tensor, synthesis: Tensor) -> Tensor:
    """Every weight as filters in every frame, ``[*, s]`` → ``[*, order, k, k]``."""
    if len(synthesis) == 1:  # no sum: what compilers fuse, and matrix products are slow at
        return weight[..., None, None] * synthesis[0]
    return (weight @ synthesis.flatten(1)).unflatten(-1, synthesis.shape[1:])
