"""The dense engine: expand the filter bank and call `conv2d`, or `conv3d` for volumes.

The cost of a convolution grows with the square of the group's order; in exchange every device,
dtype and exporter that knows `conv2d` runs it. This module knows tensors and index tables; what the
numbers in them mean is the business of `econv.basis`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from econv.engines.problem import Convolution, Engine, Problem, Prologue, Weight, bordered
from econv.fourier import representation
from econv.gpu.devices import DTYPES, works
from econv.tensors import exporting, memory_format, one_by_one, transformed

__all__ = ["TABLES", "Dense", "convolve", "filter_offsets", "filters", "tables"]

TABLES = ("synthesis", "offsets", "offsets_back", "signs", "matrices")
"""The names of `tables`, in their order; the last two turn fields of one and of two channels."""


_SMALL = 1 << 25
"""Products in filter banks that are expanded as one kernel; more are worth those of matrices."""


class Dense(Engine):
    """`conv2d` or `conv3d` with an expanded filter bank: it runs everything."""

    name = "dense"

    def run(
        self,
        problem: Problem,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> Tensor:
        """Expand the filters in the weight's own dtype, and convolve."""
        x = (x if prologue is None else prologue.apply(x)).to(problem.dtype)
        fused = problem.dtype if problem.context == "traced" and x.is_cuda else None
        by_kernel = problem.dtype if _has_kernel(problem, weight) else None
        bank = filters(problem.convolution, weight, fused, by_kernel).to(problem.dtype)
        bias = None if bias is None else bias.to(problem.dtype)
        return convolve(problem.convolution, x, bank, bias)


def tables(convolution: Convolution) -> dict[str, npt.NDArray[Any]]:
    """The fixed arrays that `filters` reads, by name, in its order."""
    basis, group = convolution.basis, convolution.basis.group
    # Operators first, so that one matrix product with the weight gives every filter.
    synthesis = basis.synthesis.swapaxes(0, 1)
    synthesis = synthesis.reshape(*synthesis.shape[:2], -1)
    found: dict[str, npt.NDArray[Any]] = {"synthesis": np.ascontiguousarray(synthesis)}
    if convolution.parts[0].kind == "regular":
        in_fields = convolution.parts[0].fields // convolution.groups
        offsets = filter_offsets(group.relative, in_fields)
        found["offsets"], found["offsets_back"] = offsets, np.argsort(offsets)
    made = convolution.target != "regular"  # fields, of features; otherwise they are read
    kinds = [convolution.target] if made else [k for k, _ in convolution.parts if k != "scalar"]
    for kind in kinds if kinds != ["regular"] else ():
        turns = representation(group, kind)
        name = "signs" if turns.shape[-1] == 1 else "matrices"
        found[name] = turns if made else turns[group.inverse]
    return found


def _has_kernel(problem: Problem, weight: Weight) -> bool:
    """Whether filters are expanded by a kernel, with channels last as the images have them.

    Who asks for this engine by name gets operations of torch.
    """
    ours = problem.context == "eager" and not problem.named and problem.channels_last
    ours = ours and problem.convolution.dimension == 2
    if not ours or weight.learned.dtype not in DTYPES or problem.dtype not in DTYPES:
        return False
    kernel = "econv.engines.filter_kernel"
    return works("the kernel that expands filters", problem.device, kernel)


def filters(
    convolution: Convolution,
    weight: Weight,
    fused: torch.dtype | None = None,
    by_kernel: torch.dtype | None = None,
) -> Tensor:
    """The filter bank that `conv2d` takes, ``[out channels, in channels / groups, size, size]``,
    or `conv3d`.

    ``fused`` is the dtype wanted by a compiler that makes one kernel of sums of products,
    ``by_kernel`` the one that a kernel of ours rounds to.
    """
    learned, (synthesis, *more) = weight
    pixels = (convolution.basis.size,) * convolution.dimension
    if convolution.parts[0].kind == "regular":
        given = (more[0], more[1], fused, by_kernel)
        found = _turned(learned, synthesis, *given)
        if convolution.target == "regular":
            return found.unflatten(-1, pixels).flatten(0, 1)
        # out(x) = Σ_A ρ(A)·s(x, A), for vectors A·[s₁(x, A), s₂(x, A)]
        found = found.unflatten(0, (-1, more[2].shape[-1]))
        found = torch.einsum("gdc,vcgip->vdip", more[2], found)
        return found.unflatten(-1, pixels).flatten(0, 1)
    bank = _expand(learned, synthesis)  # [out, in, order, pixels]
    if more:  # what turns comes last, and is read in frame A as ρ(A)⁻¹v
        banks = list(bank.split([n * convolution.width(k) for k, n in convolution.parts], 1))
        for part, turns in enumerate(more, len(banks) - len(more)):
            own = banks[part].unflatten(1, (-1, turns.shape[-1]))
            banks[part] = torch.einsum("ovcgp,gcd->ovdgp", own, turns).flatten(1, 2)
        bank = torch.cat(banks, dim=1)
    return bank.transpose(1, 2).flatten(0, 1).unflatten(-1, pixels)


def filter_offsets(relative: npt.NDArray[np.int64], in_fields: int) -> npt.NDArray[np.int64]:
    """Where the filter from input (field, B) to output A lies among those by (field, k, A).

    Output A reads input B through the relative element k = A⁻¹B, turned to frame A.
    ``relative[A, B]`` is the index of A⁻¹B.
    """
    order = len(relative)
    field = np.arange(in_fields)[:, None]
    frame = np.arange(order)[:, None, None]
    return ((field * order + relative[:, None]) * order + frame).ravel()


def convolve(convolution: Convolution, x: Tensor, bank: Tensor, bias: Tensor | None) -> Tensor:
    """`conv2d` or `conv3d` with the padding modes of `torch.nn.Conv2d`."""
    x, padding = bordered(convolution, x)
    if _unfolds(convolution, x):
        return _on_blocks_of_pixels(x, bank, bias, convolution.stride, padding)
    windows = (convolution.stride, padding, convolution.dilation)
    if convolution.dimension == 2:
        return functional.conv2d(x, bank, bias, *windows, convolution.groups)
    found = functional.conv3d(x, bank, bias, *windows, convolution.groups)
    return found.contiguous(memory_format=memory_format(x))  # of float64 torch forgets it


def _unfolds(convolution: Convolution, x: Tensor) -> bool:
    """Whether tensor cores of a GPU would be starved of channels."""
    few = x.shape[1] * convolution.stride**2 <= 16 and convolution.stride > 1 and x.ndim == 4
    plain = convolution.groups == convolution.dilation == 1 and not exporting()
    return x.is_cuda and few and plain and x.dtype in (torch.float16, torch.bfloat16)


def _on_blocks_of_pixels(
    x: Tensor, bank: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    """A strided convolution as one of stride 1 that reads blocks of pixels as channels."""
    size = bank.shape[-1]
    reach = -(-size // stride)  # blocks
    sides = []
    for n in (x.shape[3], x.shape[2]):
        windows = (n + 2 * padding - size) // stride + 1
        sides += [padding, stride * (windows + reach - 1) - n - padding]
    more = stride * reach - size
    even = (0, 0, 0, 0, 0, -x.shape[1] * stride**2 % 8)  # channels, as tensor cores want them
    blocks = functional.pixel_unshuffle(functional.pad(x, sides), stride)
    blocks = functional.pad(blocks, even)
    bank = functional.pixel_unshuffle(functional.pad(bank, (0, more, 0, more)), stride)
    bank = functional.pad(bank, even)
    blocks = blocks.contiguous(memory_format=memory_format(x))
    return functional.conv2d(blocks, bank, bias)


def _turned(weight: Tensor, synthesis: Tensor, *given: Any) -> Tensor:
    """The filters of each frame in its own order, ``[out, A, (in, B), pixels]``."""
    unknown = torch.compiler.is_dynamo_compiling() or exporting() or torch._C._is_tracing()
    if unknown or transformed():  # what follows the calls knows no functions of ours
        return _in_order(_expand(weight, synthesis).flatten(1, 3), given[0], synthesis)
    found: Tensor = _Turned.apply(weight, synthesis, *given)
    return found


def _in_order(filters: Tensor, order: Tensor, synthesis: Tensor) -> Tensor:
    return filters.index_select(1, order).unflatten(1, (synthesis.shape[1], -1))


class _Turned(torch.autograd.Function):
    """Filters in another order, whose gradient is in the order before.

    torch's own gradient would add up what no two indices share, many times slower. Filters of
    small banks are products and sums that a compiler makes one kernel of, both ways: as matrix
    products they would be three and more, each launched for a few microseconds of work.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, synthesis: Tensor, order: Tensor, *more: Any) -> Tensor:
        back, fused, by_kernel = more
        small = weight.numel() * synthesis.shape[1:].numel() <= _SMALL
        ctx.save_for_backward(synthesis, back)
        ctx.relative, ctx.fused = weight.shape[2], small and fused is not None
        ctx.dtype = None if by_kernel is None else weight.dtype
        if by_kernel is not None:
            from econv.engines.filter_kernel import expand

            return expand(weight, synthesis, order, by_kernel)
        if not ctx.fused:
            return _in_order(_expand(weight, synthesis).flatten(1, 3), order, synthesis)
        each = _in_order(weight.flatten(1, 2), order // synthesis.shape[1], synthesis)
        found = (each[:, :, None] * synthesis.movedim(0, -1)[:, :, None]).sum(-1)
        return found.to(fused).transpose(2, 3)  # from [out, A, pixels, (in, B)]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return one_by_one(partial(_Turned.pulled, ctx), *gradients), *[None] * 5

    @staticmethod
    def pulled(ctx: Any, given: Tensor) -> Tensor:
        """The gradient to the weight."""
        synthesis, back = ctx.saved_tensors
        if ctx.dtype is not None and not torch.is_grad_enabled():
            from econv.engines.filter_kernel import gradient

            return gradient(given, synthesis, back, ctx.dtype)
        found = given.flatten(1, 2).index_select(1, back).to(synthesis.dtype)
        found = found.unflatten(1, (-1, synthesis.shape[1]))  # [out, (in, k), A, pixels]
        if ctx.fused:
            found = (found[:, :, None] * synthesis).sum((3, 4))
        else:
            found = found.flatten(2) @ synthesis.flatten(1).T
        return found.unflatten(1, (-1, ctx.relative))


def _expand(weight: Tensor, synthesis: Tensor) -> Tensor:
    """Every weight as filters in every frame, ``[*, s]`` → ``[*, order, pixels]``."""
    if len(synthesis) == 1:  # no sum: what compilers fuse, and matrix products are slow at
        return weight[..., None] * synthesis[0]
    return (weight @ synthesis.flatten(1)).unflatten(-1, synthesis.shape[1:])
