"""The spectral engine as operations of torch: it runs wherever torch does.

The derivatives, ``stencils × order`` maps for each input field, exist for a few images at a time
and are formed again, from the output's gradient, in the backward pass: one set of derivatives
serves the gradient to the input and that to the weight.

This room knows tensors; what the numbers mean is the business of `econv.plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from econv.engines.problem import Geometry, exporting
from econv.engines.spectral.operator import Spectral, Task
from econv.plan import SpectralPlan

__all__ = ["Tables", "Torch", "apply", "apply_with_weight_gradient", "arrays", "tables"]

_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
"""The derivatives that exist at a time: about a share of the cache, or of the device's memory."""


class Torch(Spectral):
    """Operations of torch, on every device and in every dtype."""

    name = "spectral/torch"

    def forward(
        self, task: Task, x: Tensor, weight: Tensor, affine: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer, some images at a time; half precisions are rounded once, at the end."""
        table, weights = spectral_weights(task.plan, weight, x.dtype)
        working = x.to(weights.dtype)
        if torch._C._is_tracing() or exporting():  # for any number of images
            return apply(working, weights, table, task.geometry).to(x.dtype), self.known_like(
                task, x, weight
            )
        parts = [
            apply(working[here], weights, table, task.geometry)
            for here in _chunks(working, table, task.geometry)
        ]
        found = _joined(parts, working.new_empty((0, *task.shape(x, weight)[1:])))
        return found.to(x.dtype), self.known_like(task, x, weight)

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
        """Both gradients, from one set of derivatives."""
        table, weights = spectral_weights(task.plan, weight, x.dtype)
        adjoint = tables(task.plan.adjoint, x.device, weights.dtype)
        turned = (weights @ table.adjoint_map).transpose(0, 1)
        back, total, found = task.back(x), torch.zeros_like(turned), []
        gradient, ours = gradient.to(weights.dtype), x.to(weights.dtype)
        for here in _chunks(gradient, adjoint, back):
            image, part = apply_with_weight_gradient(
                gradient[here], turned, adjoint, back, ours[here]
            )
            found.append(image)
            total = total + part  # not in place: mapped tensors may meet ordinary ones
        to_weights = total.transpose(0, 1) @ table.adjoint_map.T
        to_weight = (to_weights @ table.weight_map.T).to(weight.dtype)
        return _joined(found, torch.empty_like(ours)).to(x.dtype), to_weight, None


def spectral_weights(
    plan: SpectralPlan, weight: Tensor, dtype: torch.dtype
) -> tuple[Tables, Tensor]:
    """The weight in Fourier space, ``[out fields, in fields, weights]``, in float32 at least."""
    working = torch.promote_types(dtype, torch.float32)
    table = tables(plan, weight.device, working)
    return table, weight.to(working) @ table.weight_map


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
        shapes = tuple((block.rows, block.inner, block.columns) for block in plan.blocks)
        found = Tables(**made, shapes=shapes)
        if type(found.stencils) is Tensor:  # not one of a mode that was on by chance
            _MADE[key] = found
    return found


def differentiate(x: Tensor, table: Tables, geometry: Geometry) -> Iterator[Tensor]:
    """The features of every block: ``[batch, rows, inner * fields, pixels]``."""
    channels = table.analysis.shape[1]
    spectrum = torch.einsum("sn,bcnyx->bscyx", table.analysis, x.unflatten(1, (-1, channels)))
    batch, slots, fields = spectrum.shape[:3]
    maps = _padded(spectrum.flatten(0, 2)[:, None], table.stencils.shape[-1], geometry)
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
    """The spectral weights in order: for each block ``[columns * out, inner * in]``."""
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


def apply_with_weight_gradient(
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
    products, gradients = [], []
    start = 0
    for features, matrix, (rows, inner, columns) in zip(
        differentiate(x, table, geometry), matrices(weights, table), table.shapes, strict=True
    ):
        product = matrix @ features
        products.append(product.unflatten(2, (-1, out_fields)).flatten(1, 2))
        here = spectrum[:, start : start + rows * columns].unflatten(1, (rows, columns))
        start += rows * columns
        found = (here.flatten(2, 3) @ features.transpose(2, 3)).sum(dim=(0, 1))
        found = found.view(columns, out_fields, inner, in_fields).permute(1, 3, 2, 0)
        gradients.append(found.flatten(2, 3))
    gradient = torch.cat(gradients, dim=2) * table.signs
    total = torch.zeros_like(weights).index_add(2, table.entries, gradient)
    return _synthesised(torch.cat(products, dim=1), table, geometry), total


def _synthesised(products: Tensor, table: Tables, geometry: Geometry) -> Tensor:
    out = torch.einsum("ns,bsop->bonp", table.synthesis, products)
    return out.flatten(1, 2).unflatten(-1, (geometry.height, geometry.width))


def _padded(maps: Tensor, size: int, geometry: Geometry) -> Tensor:
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


def _joined(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else empty
