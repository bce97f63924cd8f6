"""Weights of the source as weights of its equivariant version.

A field keeps one channel of the source: what that channel computes, in every orientation. Its
canonical filter is the one nearest to the source's filter, and features of other orientations are
not read yet. With a field for every channel the converted network is then the source, run in
every orientation of the group, up to what the filters cannot express.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvTransposeNd

from econv.basis import FilterBasis
from econv.conversion.plan import Plan
from econv.conversion.widths import Sizes, Width, runs
from econv.layers import GroupConv, GroupUpsampleConv, LiftConv, PDOConv
from econv.layers.sampling import by_dimension

__all__ = ["Kept", "fit_error", "fit_filter"]


class Kept:
    """Which channels of the source live on as fields: for every width, the most important ones."""

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        self.sizes = sizes
        self.chosen: dict[Width, Tensor] = {}
        importance = _importance(plan)
        for width in plan.widths():
            fields = sizes.of(width)
            if fields > width.channels:
                raise ValueError(
                    f"expected at most as many fields as channels to take over weights: "
                    f"{width.name} has {width.channels} channels and would have {fields} fields"
                )
            if width.multiple_of is None:
                self.chosen[width] = _most_important(importance[width], fields, width.blocks)
        self.source: nn.Module | None = None

    def channels(self, widths: tuple[Width, ...]) -> Tensor:
        """The source's channels that the fields of widths in a row stand for."""
        found, position = [], 0
        for width in runs(widths):
            found.append(self._of(width) + position)
            position += width.channels
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)

    def _of(self, width: Width) -> Tensor:
        if width.multiple_of is None:
            return self.chosen[width]
        base, times = width.multiple_of
        return (self.channels(base)[:, None] * times + torch.arange(times)).flatten()

    def fit_filters(
        self,
        layer: nn.Module,
        kernel: int,
        left_over: int,
        into: tuple[Width, ...],
        out: tuple[Width, ...],
        window: bool | None,
    ) -> float | None:
        """Set the weight of a convolution from the source's; the relative error of the fit.

        The windows of the source lie to the left and on top of those about the centre, by half of
        the pixels that are ``left_over``.
        """
        assert isinstance(layer, PDOConv)
        axes = layer.dimension
        source: Any = self.source
        weight = source.weight.detach().double().cpu()
        if weight.ndim == 2:
            sides = (kernel,) * axes
            if window is None:
                weight = weight.view(*weight.shape, *[1] * axes)
            elif window:  # a linear map of a flattened map
                weight = weight.reshape(len(weight), -1, *sides)
            else:
                weight = weight.reshape(len(weight), *sides, -1).movedim(-1, 1)
        weight = weight[self.channels(out)]
        grouped = getattr(source, "groups", 1) > 1
        if grouped and not _same_blocks(self, source, layer, into, out):
            return None
        if into and not grouped:
            weight = weight[:, self.channels(into)]
        weight = functional.pad(weight, (0, left_over) * axes)
        half = (kernel + left_over) % 2 == 0
        fitted, error = fit_filter(layer.basis, weight, half)
        with torch.no_grad():
            if isinstance(layer, LiftConv):
                layer.weight.copy_(fitted)
            else:
                assert isinstance(layer, GroupConv)
                layer.weight.zero_()
                layer.weight[:, :, 0].copy_(fitted)
            if layer.bias is not None and source.bias is not None:
                layer.bias.copy_(source.bias.detach()[self.channels(out)])
        return error

    def fit_transposed(
        self, layer: nn.Module, into: tuple[Width, ...], out: tuple[Width, ...]
    ) -> float | None:
        """Set the weight of an upsampling convolution from the source's transposed one."""
        assert isinstance(layer, GroupUpsampleConv)
        source: Any = self.source
        weight = source.weight.detach().double().cpu()
        if source.groups > 1:
            return None
        weight = weight[self.channels(into)][:, self.channels(out)].transpose(0, 1)
        fitted, error = _fit_impulses(*_impulse_responses(layer, source), weight)
        with torch.no_grad():
            layer.conv.weight.zero_()
            layer.conv.weight[:, :, 0].copy_(fitted)
            if layer.conv.bias is not None and source.bias is not None:
                layer.conv.bias.copy_(source.bias.detach()[self.channels(out)])
        return error


def _impulse_responses(layer: GroupUpsampleConv, source: Any) -> tuple[Tensor, Tensor]:
    """What one bright pixel becomes: by each weight of the layer, by each pixel of the kernel."""
    axes = layer.dimension
    impulse = torch.zeros(1, 1, *[9] * axes, dtype=torch.float64)
    centre = (0, 0) + (4,) * axes
    impulse[centre] = 1.0
    sides = (source.kernel_size[0],) * axes
    pixels = torch.eye(math.prod(sides), dtype=torch.float64).reshape(1, -1, *sides)
    theirs = by_dimension("conv_transpose", axes)(
        impulse,
        pixels,
        None,
        source.stride,
        source.padding,
        source.output_padding,
        1,
        source.dilation,
    )
    filters = torch.from_numpy(layer.conv.basis.synthesis[0].copy())[:, None]
    ours = by_dimension("conv", axes)(
        layer.upsample(impulse), filters, None, 1, layer.conv.padding, layer.conv.dilation
    )
    return ours[0].flatten(1), theirs[0].flatten(1)


def _fit_impulses(ours: Tensor, theirs: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    wanted = weight.flatten(2) @ theirs
    solution = torch.linalg.lstsq(ours.T, wanted.flatten(0, 1).T).solution.T
    left = solution @ ours - wanted.flatten(0, 1)
    fitted = solution.reshape(*weight.shape[:2], -1)
    return fitted, fit_error(float(left.norm()), float(wanted.norm()))


def _most_important(importance: Tensor, fields: int, blocks: int) -> Tensor:
    """The channels to keep; as many of each block, where a grouped convolution divides them."""
    if len(importance) % blocks or fields % blocks:
        blocks = 1
    by_block = importance.reshape(blocks, -1)
    order = by_block.argsort(dim=1, descending=True, stable=True)[:, : fields // blocks]
    first = torch.arange(blocks)[:, None] * by_block.shape[1]
    return (order + first).flatten().sort().values


def _same_blocks(
    kept: Kept, source: Any, layer: PDOConv, into: tuple[Width, ...], out: tuple[Width, ...]
) -> bool:
    """Whether the blocks of a grouped convolution are those of the source."""
    if into and source.groups == source.in_channels:
        return layer.groups == len(kept.channels(into))
    whole = not into or len(kept.channels(into)) == source.in_channels
    if not whole or layer.groups != source.groups:
        return False
    channels = kept.channels(out)
    theirs = channels * source.groups // source.out_channels
    ours = torch.arange(len(channels)) * source.groups // len(channels)
    return bool(torch.equal(theirs, ours))


def fit_filter(basis: FilterBasis, filters: Tensor, half: bool = False) -> tuple[Tensor, float]:
    """The weights whose canonical filters are nearest to ``[…, k, k]``, and what is left of these.

    Filters of volumes are ``[…, k, k, k]``. Least squares over the pixels of both supports.
    ``half``: the filter is even and its layer reads points between pixels, as means of these.

    >>> from econv import filter_basis
    >>> weights, error = fit_filter(filter_basis("p4", "paper", "central"), torch.randn(2, 3, 3, 3))
    >>> weights.shape, error < 1e-6
    (torch.Size([2, 3, 9]), True)
    """
    design = _as_run(basis.synthesis[0], half)
    size, given, axes = design.shape[-1], filters.shape[-1], design.ndim - 1
    common = max(size, given)
    matrix = torch.from_numpy(_padded(design, common).reshape(len(design), -1).T.copy())
    wanted = functional.pad(filters.double(), [(common - given) // 2] * 2 * axes)
    flat = wanted.reshape(-1, common**axes)
    solution = torch.linalg.lstsq(matrix, flat.T).solution.T
    left = (solution @ matrix.T - flat).norm()
    weights = solution.reshape(*filters.shape[:-axes], len(design))
    return weights, fit_error(float(left), float(flat.norm()))


def fit_error(left: float, whole: float) -> float:
    """What is left, relative to the whole; of nothing, nothing is left."""
    return left / whole if whole else 0.0


def _as_run(synthesis: np.ndarray, half: bool) -> np.ndarray:
    if not half:
        return synthesis
    # On means of neighbours along each axis a filter acts as itself, blurred by them.
    for axis in range(1, synthesis.ndim):
        nothing = np.zeros_like(synthesis.take([0], axis))
        before, after = (nothing, synthesis), (synthesis, nothing)
        synthesis = (np.concatenate(before, axis) + np.concatenate(after, axis)) / 2
    return synthesis


def _padded(design: np.ndarray, size: int) -> np.ndarray:
    each = (size - design.shape[-1]) // 2
    return np.pad(design, [(0, 0), *[(each, each)] * (design.ndim - 1)])


def _importance(plan: Plan) -> dict[Width, Tensor]:
    """How much each channel of each width matters: the scales of its norms, or its filters."""
    by_norm: dict[Width, Tensor] = {}
    by_filter: dict[Width, Tensor] = {}
    for part in plan.parts.values():
        weight = getattr(part.source, "weight", None)
        if not isinstance(weight, Tensor) or weight.is_meta:
            continue
        if weight.ndim == 1:
            _add(by_norm, part.into, weight.detach().abs().double().cpu())
        elif part.out and not isinstance(part.source, _ConvTransposeNd):
            norms = weight.detach().double().cpu().flatten(1).norm(dim=1)
            _add(by_filter, part.out, norms)
    found = {}
    for width in plan.widths():
        even = torch.ones(width.channels, dtype=torch.float64)
        scales = by_norm.get(width, even)
        filters = by_filter.get(width, even)
        different = bool((scales != scales[0]).any())
        found[width] = scales if different else filters
    return found


def _add(known: dict[Width, Tensor], widths: tuple[Width, ...], numbers: Tensor) -> None:
    """Sum numbers per channel, each layer with weight one."""
    position = 0
    scaled = numbers / numbers.norm().clamp_min(1e-300)
    for width in runs(widths):
        here = scaled[position : position + width.channels]
        known[width] = known[width] + here if width in known else here
        position += width.channels
