"""The spectral engine as operations of torch: it runs wherever torch does.

The derivatives, ``stencils × order`` maps for each input field, exist for a few images at a time
and are formed again, from the output's gradient, in the backward pass: one set of derivatives
serves the gradient to the input and that to the weight.

This module knows tensors; what the numbers mean is the business of `econv.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat, zip_longest

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from econv.engines.problem import Geometry, Prologue
from econv.engines.spectral.operator import Gradients, Saved, Spectral, Task, through
from econv.plan import SpectralPlan, of_plan
from econv.tensors import exporting

__all__ = ["Torch", "apply", "arrays", "tables"]


class Torch(Spectral):
    """Operations of torch, on every device and in every dtype."""

    name = "spectral/torch"

    def forward(
        self, task: Task, x: Tensor, weight: Tensor, affine: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer; half precisions are rounded once, at the end."""
        made = Prologue(affine).apply(x)
        _, weights = spectral_weights(task.plan, weight, x.dtype)
        found, _ = self.product(made.to(weights.dtype), weights, task)
        assert found is not None
        return found.to(x.dtype), self.known_like(task, x, weight)

    def backward(
        self, task: Task, gradient: Tensor, saved: Saved, wanted: tuple[bool, bool]
    ) -> Gradients:
        """Both gradients, from one set of derivatives."""
        x, weight, affine, _ = saved
        made = Prologue(affine).apply(x)
        table, weights = spectral_weights(task.plan, weight, x.dtype)
        turned = (weights @ table["adjoint_map"]).transpose(0, 1)
        other = made.to(weights.dtype) if wanted[1] else None
        back = Task(task.plan.adjoint, task.back(x))
        to_x, total = self.product(gradient.to(weights.dtype), turned, back, other, wanted[0])
        to_weight = to_affine = None
        if total is not None:
            to_weights = total.transpose(0, 1) @ table["adjoint_map"].T
            to_weight = (to_weights @ table["weight_map"].T).to(weight.dtype)
        to_x = None if to_x is None else to_x.to(x.dtype)
        if affine is not None and to_x is not None and wanted[0]:
            to_x, to_affine = through(affine, x, to_x)
        return to_x, to_weight, to_affine

    def product(
        self, x: Tensor, weights: Tensor, task: Task, other: Tensor | None = None, out: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """The layer, and with ``other`` the gradient to the weights of their inner product.

        Some images at a time: their derivatives are a share of the cache, or of a GPU's memory.
        """
        if torch._C._is_tracing() or exporting():  # for any number of images
            return apply(x, weights, task.plan, task.geometry, other)
        pixels = x.shape[1] * len(task.plan.stencils) * task.geometry.pixels
        most = 8 << 20 if x.device.type == "cpu" else 1 << 30
        step = max(1, most // max(1, pixels * x.element_size()))
        found, total, others = [], None, () if other is None else other.split(step)
        for images, targets in zip_longest(x.split(step), others):
            some, part = apply(images, weights, task.plan, task.geometry, targets)
            found.append(some)
            # Not in place: mapped tensors may meet ordinary ones.
            total = part if total is None or part is None else total + part
        return torch.cat(found), total


def spectral_weights(
    plan: SpectralPlan, weight: Tensor, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """The weight in Fourier space, ``[out fields, in fields, weights]``, in float32 at least."""
    working = torch.promote_types(dtype, torch.float32)
    table = tables(plan, weight.device, working)
    return table, weight.to(working) @ table["weight_map"]


@of_plan
def arrays(plan: SpectralPlan) -> dict[str, np.ndarray]:
    """The arrays of a plan, features and slots in the order in which the blocks use them."""
    blocks = plan.blocks
    features = np.concatenate([block.features.ravel() for block in blocks])
    slots = np.concatenate([block.slots.ravel() for block in blocks])
    pick = plan.feature_slots * len(plan.stencils) + plan.feature_stencils
    return {
        "stencils": plan.stencils[:, None],
        "analysis": plan.analysis,
        "synthesis": plan.synthesis[:, slots],  # [channels, slots that blocks reach]
        "weight_map": plan.weight_map,
        "adjoint_map": plan.adjoint_map,
        # Which spectral weight stands where in the matrices, [sum of inner × columns].
        "entries": np.concatenate([block.entries.ravel() for block in blocks]),
        "signs": np.concatenate([block.signs.ravel() for block in blocks]),
        "pick": pick[features].T.copy(),  # [terms, features], into slots × stencils
        "factors": plan.feature_factors[features].T.copy(),
    }


def tables(plan: SpectralPlan, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The `arrays` of a plan as tensors, made once for each device and dtype."""
    found: dict[str, Tensor] | None = plan.made.get((device, dtype))
    if found is None:
        with torch.inference_mode(False):
            found = {
                name: torch.tensor(array, device=device, dtype={"f": dtype}.get(array.dtype.kind))
                for name, array in arrays(plan).items()
            }
        if type(found["stencils"]) is Tensor:  # not one of a mode that was on by chance
            plan.made[device, dtype] = found
    return found


def differentiate(x: Tensor, plan: SpectralPlan, geometry: Geometry) -> Iterator[Tensor]:
    """The features of every block: ``[batch, rows, inner * fields, pixels]``."""
    table = tables(plan, x.device, x.dtype)
    stencils, fields = table["stencils"], x.unflatten(1, (-1, table["analysis"].shape[1]))
    spectrum = torch.einsum("sn,bcn...->bsc...", table["analysis"], fields)
    maps = _padded(spectrum.flatten(0, 2)[:, None], stencils.shape[-1], geometry)
    convolve = functional.conv2d if x.ndim == 4 else functional.conv3d
    found = convolve(maps, stencils, stride=geometry.down, dilation=geometry.dilation)
    for axis, size in enumerate(geometry.sizes, 2):
        found = found.narrow(axis, 0, size)
    found = found.flatten(2).unflatten(0, spectrum.shape[:3]).transpose(2, 3).flatten(1, 2)
    sizes = [block.features.size for block in plan.blocks]
    picks, factors = (table[name].split(sizes, dim=1) for name in ("pick", "factors"))
    for block, pick, factor in zip(plan.blocks, picks, factors, strict=True):
        terms = [
            found.index_select(1, offsets) * weights[:, None, None]
            for offsets, weights in zip(pick, factor, strict=True)
        ]
        total = sum(terms[1:], start=terms[0])
        yield total.unflatten(1, (block.rows, block.inner)).flatten(2, 3)


def apply(
    x: Tensor, weights: Tensor, plan: SpectralPlan, geometry: Geometry, other: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """As `Torch.product`, the whole batch at once; ``other`` has the shape of the output."""
    table, blocks = tables(plan, x.device, x.dtype), plan.blocks
    synthesis, (out_fields, in_fields) = table["synthesis"], weights.shape[:2]
    spectra: Iterable[Tensor | None] = repeat(None, len(blocks))
    if other is not None:
        fields = other.flatten(2).unflatten(1, (-1, len(synthesis)))
        spectrum = torch.einsum("ns,bonp->bsop", synthesis, fields)
        spectra = spectrum.split([block.slots.size for block in blocks], dim=1)
    products, gradients = [], []
    placed = weights.index_select(-1, table["entries"]) * table["signs"]
    each = placed.split([block.entries.size for block in blocks], dim=-1)
    operands = (differentiate(x, plan, geometry), each, spectra, blocks)
    for features, own, here, block in zip(*operands, strict=True):
        own = own.unflatten(-1, (block.inner, block.columns)).permute(3, 0, 2, 1)
        matrix = own.flatten(0, 1).flatten(1, 2)  # [columns * out, inner * in]
        product = matrix @ features  # [batch, rows, columns * out, pixels]
        products.append(product.unflatten(2, (-1, out_fields)).flatten(1, 2))
        if here is not None:
            here = here.unflatten(1, (block.rows, block.columns)).flatten(2, 3)
            found = (here @ features.transpose(2, 3)).sum(dim=(0, 1))
            found = found.view(block.columns, out_fields, block.inner, in_fields)
            gradients.append(found.permute(1, 3, 2, 0).flatten(2, 3))
    out = torch.einsum("ns,bsop->bonp", synthesis, torch.cat(products, dim=1))
    out = out.flatten(1, 2).unflatten(-1, geometry.sizes)
    if other is None:
        return out, None
    gradient = torch.cat(gradients, dim=2) * table["signs"]
    return out, torch.zeros_like(weights).index_add(2, table["entries"], gradient)


def _padded(maps: Tensor, size: int, geometry: Geometry) -> Tensor:
    """The input, spread and padded so that the stencils give the output without padding."""
    for axis in range(2, maps.ndim):
        # One pixel has none to be apart from: of a large step nothing is left but zeros.
        if (more := geometry.up - 1) and maps.shape[axis] != 1:
            spread = functional.pad(
                maps.unsqueeze(axis + 1), [0, 0] * (maps.ndim - 1 - axis) + [0, more]
            )
            maps = spread.flatten(axis, axis + 1)
    sides = []
    for length, wanted in zip(maps.shape[:1:-1], geometry.sizes[::-1], strict=True):
        needed = (wanted - 1) * geometry.down + geometry.dilation * (size - 1) + 1
        sides += [geometry.before, needed - geometry.before - length]
    return functional.pad(maps, sides) if any(sides) else maps
