"""The spectral engine: differentiate in Fourier space, then one small product for each irrep.

The steps are those of `econv.plan`; their cost grows with the order of the group where the dense
engine's grows with its square. No dense filter is expanded and no convolution joins channels.

Memory: what is kept for the backward pass is the input and the spectral weights, nothing else. The
derivatives, ``stencils × order`` maps for each input field, exist for a few images at a time and
are formed again, from the output's gradient, in the backward pass: one set of derivatives serves
the gradient to the input and that to the weights.

This room knows tensors; what the numbers mean is the business of `plan`. The same sums run as plain
torch operations (here) or in compiled code (`econv.engines.spectral.native` on the CPU and
`econv.engines.triton_ops` on GPUs).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from econv.engines import note
from econv.engines.dense import memory_format
from econv.engines.spectral import native
from econv.plan import SpectralPlan

__all__ = [
    "FUSED",
    "TABLES",
    "TRITON",
    "Geometry",
    "Tables",
    "apply",
    "apply_with_gram",
    "arrays",
    "kernel_name",
    "kernels",
    "result_dtype",
    "run",
    "shapes",
    "tables",
    "traced",
]

_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
"""The derivatives that exist at a time: about a share of the cache, or of the device's memory."""

TABLES = (
    "stencils",
    "analysis",
    "synthesis",
    "weight_map",
    "adjoint_map",
    "entries",
    "signs",
    "pick",
    "factors",
)
"""The names of the tensors in `Tables`."""


class Geometry(NamedTuple):
    """Which input pixels an output pixel reads, along both axes alike.

    Output y reads the points y·down + t·dilation − before of the input, t = 0 … size − 1, where
    the input was spread by ``up`` (up − 1 zeros between pixels) and is zero outside.
    """

    up: int
    down: int
    dilation: int
    before: int
    """Pixels of padding before the first; negative ones are cut off."""
    height: int
    """Rows of the output."""
    width: int

    @staticmethod
    def of(
        size: int, height: int, width: int, stride: int, padding: int, dilation: int
    ) -> Geometry:
        """The geometry of a layer with zeros around an input of the given height and width."""
        reach = dilation * (size - 1) + 1
        rows, columns = ((n + 2 * padding - reach) // stride + 1 for n in (height, width))
        return Geometry(1, stride, dilation, padding, rows, columns)

    def transposed(self, size: int, height: int, width: int) -> Geometry:
        """The geometry of the adjoint, whose output has the given height and width."""
        before = self.dilation * (size - 1) - self.before
        return Geometry(self.down, self.up, self.dilation, before, height, width)


@dataclass(frozen=True, eq=False)
class Tables:
    """The arrays of a plan as tensors of one device and dtype."""

    stencils: Tensor  # [stencils, 1, size, size]
    analysis: Tensor  # [slots, channels]
    synthesis: Tensor  # [channels, slots that blocks reach], in the order of the blocks
    weight_map: Tensor  # [coordinates, weights]
    adjoint_map: Tensor  # [weights, weights]
    entries: Tensor  # [sum of inner × columns]: which spectral weight stands in a block
    signs: Tensor  # the same shape
    pick: Tensor  # [2, features], into slots × stencils
    factors: Tensor  # [2, features]
    shapes: tuple[tuple[int, int, int], ...]  # rows, inner, columns of each block
    name: str  # what the kernels for GPUs call the plan; empty where they do not know it


@lru_cache(maxsize=512)
def arrays(plan: SpectralPlan) -> dict[str, np.ndarray]:
    """The arrays of `Tables`, features and slots in the order in which the blocks use them."""
    blocks = plan.blocks
    features = np.concatenate([block.features.ravel() for block in blocks])
    slots = np.concatenate([block.slots.ravel() for block in blocks])
    pick = plan.feature_slots * len(plan.stencils) + plan.feature_stencils
    return {
        "stencils": plan.stencils[:, None],
        "analysis": plan.analysis,
        "synthesis": plan.synthesis[:, slots],
        "weight_map": plan.weight_map,
        "adjoint_map": plan.adjoint_map,
        "entries": np.concatenate([block.entries.ravel() for block in blocks]),
        "signs": np.concatenate([block.signs.ravel() for block in blocks]),
        "pick": pick[features].T.copy(),
        "factors": plan.feature_factors[features].T.copy(),
    }


def shapes(plan: SpectralPlan) -> tuple[tuple[int, int, int], ...]:
    """Rows, inner length and columns of each block."""
    return tuple((block.rows, block.inner, block.columns) for block in plan.blocks)


def kernel_name(plan: SpectralPlan) -> str:
    """What the kernels for GPUs call a plan; empty where they do not know it."""
    return plan.name if (plan.source, plan.target) == ("regular", "regular") else ""


FUSED = "+norm+relu"
"""What follows the name of kernels that normalise and rectify their input where they read it."""

TRITON = {"cuda"}
"""The kinds of device that the kernels in Triton run on."""


def _kernels(x: Tensor) -> Any:
    """The kernels for the device of ``x``, or nothing where there are none."""
    if x.device.type not in TRITON or os.environ.get("ECONV_TRITON") == "0":
        return None
    if torch.version.hip is not None:
        return None
    try:
        from econv.engines import triton_ops
    except ImportError:
        return None
    return triton_ops


def kernels(
    x: Tensor, plan: SpectralPlan, geometry: Geometry, dtype: torch.dtype, shape: tuple[int, ...]
) -> Any:
    """The kernels that run a layer, or nothing where torch's operations do.

    ``dtype`` and ``shape`` are those of the input when it gets there: ``x`` may still have to be
    rounded and padded.
    """
    if not kernel_name(plan) or torch._C._is_tracing() or transformed():
        return None
    found = _kernels(x)
    if found is None or not found.covers(dtype, plan.basis.size, geometry, shape):
        return None
    return found


def transformed() -> bool:
    """Whether functions are being transformed (vmap, jvp …) in ways that kernels do not know."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._are_functorch_transforms_active()


_MADE: dict[tuple[SpectralPlan, torch.device, torch.dtype], Tables] = {}


def tables(plan: SpectralPlan, device: torch.device, dtype: torch.dtype) -> Tables:
    """The tables of a plan, made once for each device and dtype."""
    key = (plan, device, dtype)
    found = _MADE.get(key)
    if found is None:
        with torch.inference_mode(False):
            made = {
                name: torch.tensor(
                    array, device=device, dtype=dtype if array.dtype.kind == "f" else None
                )
                for name, array in arrays(plan).items()
            }
        found = Tables(**made, shapes=shapes(plan), name=kernel_name(plan))
        if type(found.stencils) is Tensor:  # not one of a mode that was on by chance
            _MADE[key] = found
    return found


def differentiate(x: Tensor, table: Tables, geometry: Geometry) -> Iterator[Tensor]:
    """The features of every block: ``[batch, rows, inner * fields, pixels]``."""
    channels = table.analysis.shape[1]
    spectrum = torch.einsum("sn,bcnyx->bscyx", table.analysis, x.unflatten(1, (-1, channels)))
    batch, slots, fields = spectrum.shape[:3]
    maps = _placed(spectrum.flatten(0, 2)[:, None], table.stencils.shape[-1], geometry)
    found = functional.conv2d(
        maps, table.stencils, stride=geometry.down, dilation=geometry.dilation
    )
    found = found[:, :, : geometry.height, : geometry.width].flatten(2)
    found = found.unflatten(0, (batch, slots, fields)).transpose(2, 3).flatten(1, 2)
    start = 0
    for rows, inner, _ in table.shapes:
        here = slice(start, start + rows * inner)
        start += rows * inner
        one, two = table.pick[:, here].unbind()
        features = found.index_select(1, one) * table.factors[0, here, None, None]
        features = features + found.index_select(1, two) * table.factors[1, here, None, None]
        yield features.unflatten(1, (rows, inner)).flatten(2, 3)


def matrices(weights: Tensor, table: Tables) -> list[Tensor]:
    """The spectral weights in their places: for each block ``[columns * out, inner * in]``."""
    placed = weights.index_select(-1, table.entries) * table.signs
    found = []
    start = 0
    for _, inner, columns in table.shapes:
        here = placed[..., start : start + inner * columns].unflatten(-1, (inner, columns))
        start += inner * columns
        found.append(here.permute(3, 0, 2, 1).flatten(0, 1).flatten(1, 2))
    return found


def apply(x: Tensor, weights: Tensor, table: Tables, geometry: Geometry) -> Tensor:
    """The layer as plain, differentiable torch operations, the whole batch at once."""
    products = []
    for features, matrix in zip(
        differentiate(x, table, geometry), matrices(weights, table), strict=True
    ):
        product = matrix @ features  # [batch, rows, columns * out, pixels]
        products.append(product.unflatten(2, (-1, weights.shape[0])).flatten(1, 2))
    return _synthesised(torch.cat(products, dim=1), table, geometry)


def apply_with_gram(
    x: Tensor, weights: Tensor, table: Tables, geometry: Geometry, other: Tensor
) -> tuple[Tensor, Tensor]:
    """The layer, and the gradient to its weights of its inner product with ``other``.

    ``other`` has the shape of the output. Both use the same derivatives of ``x``.
    """
    spectrum = torch.einsum(
        "ns,bonp->bsop",
        table.synthesis,
        other.flatten(2).unflatten(1, (-1, table.synthesis.shape[0])),
    )
    out_fields, in_fields = weights.shape[:2]
    products, grams = [], []
    start = 0
    for features, matrix, (rows, inner, columns) in zip(
        differentiate(x, table, geometry), matrices(weights, table), table.shapes, strict=True
    ):
        product = matrix @ features
        products.append(product.unflatten(2, (-1, out_fields)).flatten(1, 2))
        here = spectrum[:, start : start + rows * columns].unflatten(1, (rows, columns))
        start += rows * columns
        gram = (here.flatten(2, 3) @ features.transpose(2, 3)).sum(dim=(0, 1))
        gram = gram.view(columns, out_fields, inner, in_fields).permute(1, 3, 2, 0)
        grams.append(gram.flatten(2, 3))
    gradient = torch.cat(grams, dim=2) * table.signs
    total = torch.zeros_like(weights).index_add(2, table.entries, gradient)
    return _synthesised(torch.cat(products, dim=1), table, geometry), total


def _synthesised(products: Tensor, table: Tables, geometry: Geometry) -> Tensor:
    out = torch.einsum("ns,bsop->bonp", table.synthesis, products)
    return out.flatten(1, 2).unflatten(-1, (geometry.height, geometry.width))


def _placed(maps: Tensor, size: int, geometry: Geometry) -> Tensor:
    """The input, spread and padded so that the stencils give the output without padding."""
    if geometry.up > 1:
        height, width = maps.shape[2:]
        spread = maps.new_zeros(*maps.shape[:2], height * geometry.up, width * geometry.up)
        spread[:, :, :: geometry.up, :: geometry.up] = maps
        maps = spread
    reach = geometry.dilation * (size - 1) + 1
    sides = []
    for length, wanted in zip(maps.shape[:1:-1], (geometry.width, geometry.height), strict=True):
        needed = (wanted - 1) * geometry.down + reach
        sides += [geometry.before, needed - geometry.before - length]
    return functional.pad(maps, sides) if any(sides) else maps


def _chunks(x: Tensor, table: Tables, geometry: Geometry) -> list[slice]:
    """Images in groups whose derivatives stay small."""
    channels = x.shape[1] * table.stencils.shape[0]
    image = max(1, channels * geometry.height * geometry.width * x.element_size())
    step = max(1, _CHUNK_BYTES.get(x.device.type, 1 << 30) // image)
    return [slice(i, i + step) for i in range(0, x.shape[0], step)]


@dataclass(frozen=True, eq=False)
class _Operator:
    """One layer at one geometry, forwards and backwards: what the autograd functions carry."""

    plan: SpectralPlan
    forward: Tables
    adjoint: Tables
    geometry: Geometry
    transposed: Geometry
    native: bool

    def run(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.native:
            found, _ = native.run(x, weights, self.plan, self.geometry)
            assert found is not None
            return found
        parts = [
            apply(x[here], weights, self.forward, self.geometry)
            for here in _chunks(x, self.forward, self.geometry)
        ]
        shape = (0, weights.shape[0] * self.forward.synthesis.shape[0], *self.geometry[-2:])
        return _joined(parts, x.new_empty(shape))

    def run_backward(
        self, gradient: Tensor, x: Tensor, weights: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """The gradients to x and to the weights; zeros that take no room for what is unwanted."""
        turned = (weights @ self.forward.adjoint_map).transpose(0, 1)
        if self.native:
            adjoint = self.plan.adjoint
            other = x if wanted[1] else None
            to_x, gram = native.run(gradient, turned, adjoint, self.transposed, other, wanted[0])
        else:
            gram = torch.zeros_like(turned)
            found = []
            for here in _chunks(gradient, self.adjoint, self.transposed):
                image, part = apply_with_gram(
                    gradient[here], turned, self.adjoint, self.transposed, x[here]
                )
                found.append(image)
                gram += part
            to_x = _joined(found, torch.empty_like(x))
        if to_x is None:
            to_x = x.new_zeros(()).expand_as(x)
        if gram is None:
            return to_x, weights.new_zeros(()).expand_as(weights)
        return to_x, gram.transpose(0, 1) @ self.forward.adjoint_map.T


def _joined(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else empty


class _Convolution(torch.autograd.Function):
    """A(x; w), linear in both."""

    @staticmethod
    def forward(x: Tensor, weights: Tensor, operator: _Operator) -> Tensor:
        return operator.run(x, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weights, ctx.operator = inputs
        ctx.save_for_backward(x, weights)
        ctx.save_for_forward(x, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        to_x, to_weights = _Gradients.apply(gradients[0], x, weights, ctx.operator, wanted)
        return to_x if wanted[0] else None, to_weights if wanted[1] else None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, weights = ctx.saved_tensors
        total = None
        for a, b in ((tangents[0], weights), (x, tangents[1])):
            if a is not None and b is not None:
                part = _Convolution.apply(a, b, ctx.operator)
                total = part if total is None else total + part
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _loop(_Convolution, info, in_dims, inputs), 0


class _Gradients(torch.autograd.Function):
    """(A*(g; w), C(x, g)): the gradients of ⟨A(x; w), g⟩ to x and to w.

    With cotangents (h, H) its own scalar is ⟨A(h; w) + A(x; H), g⟩, whose gradients to x and to w
    are again A*(g; H) and C(h, g): every order of differentiation is made of these two functions.
    """

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, weights: Tensor, operator: _Operator, wanted: tuple[bool, bool]
    ) -> Any:
        return operator.run_backward(g, x, weights, wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        g, x, weights, ctx.operator, _ = inputs
        ctx.save_for_backward(g, x, weights)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        g, x, weights = ctx.saved_tensors
        h, big_h = cotangents
        to_g = _Convolution.apply(h, weights, ctx.operator)
        to_g = to_g + _Convolution.apply(x, big_h, ctx.operator)
        to_x, to_weights = _Gradients.apply(g, h, big_h, ctx.operator, (True, True))
        return to_g, to_x, to_weights, None, None

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
    if isinstance(found[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True))
    return torch.stack(found)


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a convolution of ``x`` gives: under autocast, autocast's."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def traced(
    x: Tensor,
    weight: Tensor,
    table: Tables,
    stride: int,
    padding: int,
    padding_mode: str,
    dilation: int,
    groups: int,
) -> Tensor:
    """The layer as plain operations, which compilers and exporters can follow, without bias.

    ``weight`` is ``[out fields, in fields / groups, coordinates]``, coordinates in the order of
    `SpectralPlan.weight_map`.
    """
    known = _kernels(x) if table.name else None

    def plain(x: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
        if known is not None and known.covers(x.dtype, size, geometry, x.shape):
            return cast(Tensor, known.convolve(x, weights, table.name, False, *geometry))
        return apply(x.to(weights.dtype), weights, table, geometry)

    size = table.stencils.shape[-1]
    working = weight.dtype if known is None else torch.promote_types(x.dtype, torch.float32)
    weights = weight.to(working) @ table.weight_map.to(working)
    return _convolve(plain, x, weights, table, stride, padding, padding_mode, dilation, groups)


def run(
    x: Tensor,
    weight: Tensor,
    plan: SpectralPlan,
    stride: int,
    padding: int,
    padding_mode: str,
    dilation: int,
    groups: int,
    affine: Tensor | None = None,
) -> Tensor:
    """The layer, as fast as it can be had here.

    With ``affine``, which only the `kernels` know and of one group of channels, what is convolved
    is max(0, (x − centre)·scale + shift), with these three numbers of each field.
    """
    # Half precisions are rounded once, at the end.
    working = torch.promote_types(x.dtype, torch.float32)
    table = tables(plan, x.device, working)
    adjoint = tables(plan.adjoint, x.device, working)
    ran: list[str] = []

    def saving(x: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
        found = kernels(x, plan, geometry, x.dtype, x.shape)
        if found is not None:
            ran.append("spectral/triton" + FUSED * (affine is not None))
            operands = (x, weights, table.name, False)
            return cast(Tensor, found.convolve(*operands, *geometry, affine=affine))
        assert affine is None
        x = x.to(working)
        compiled = native.supports(x, plan)
        ran.append("spectral/native" if compiled else "spectral/torch")
        if torch._C._is_tracing():
            return apply(x, weights, table, geometry)
        transposed = geometry.transposed(plan.basis.size, *x.shape[2:])
        operator = _Operator(plan, table, adjoint, geometry, transposed, compiled)
        return cast(Tensor, _Convolution.apply(x, weights, operator))

    weights = weight.to(working) @ table.weight_map
    geometry = (stride, padding, padding_mode, dilation, groups)
    found = _convolve(saving, x, weights, table, *geometry)
    note(ran[0])
    return found


def _convolve(
    function: Callable[[Tensor, Tensor, Geometry], Tensor],
    x: Tensor,
    weights: Tensor,
    table: Tables,
    stride: int,
    padding: int,
    padding_mode: str,
    dilation: int,
    groups: int,
) -> Tensor:
    """Padding modes, groups, dtypes and layouts around the layer itself."""
    layout, dtype = memory_format(x), x.dtype
    if padding_mode != "zeros" and padding:
        x = functional.pad(x, (padding,) * 4, mode=padding_mode)
        padding = 0
    size, (height, width) = table.stencils.shape[-1], x.shape[2:]
    geometry = Geometry.of(size, height, width, stride, padding, dilation)
    if groups == 1:  # not as one of one chunks, whose gradients would be copied
        result = function(x, weights, geometry)
    else:
        parts = zip(x.chunk(groups, dim=1), weights.chunk(groups), strict=True)
        result = torch.cat([function(*part, geometry) for part in parts], dim=1)
    return result.to(dtype).contiguous(memory_format=layout)
