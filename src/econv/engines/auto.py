"""What ``engine="auto"`` runs: the engine that a cost model says is faster.

The model counts what each engine does and weighs the counts with coefficients that were fitted to
measurements (`benchmarks/engines.py --fit`). Only ratios matter: a faster processor is faster at
both. Where there are no coefficients, or the compiled kernel cannot be had, it is dense.

On a CPU the counts add up. A GPU works while Python queues what comes next: there a call takes the
longer of the two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from econv.engines import native, without_python
from econv.engines.spectral import Geometry, kernels, result_dtype
from econv.fourier import butterflies
from econv.groups import FloatArray
from econv.plan import ParityError, SpectralPlan

__all__ = ["Part", "Workload", "choose", "costs", "faster", "seconds", "terms", "where"]

# Seconds for each count of `terms`, on one core or one GPU. A `where` that is not here runs dense.
COEFFICIENTS: dict[str, dict[str, tuple[float, ...]]] = {
    "cpu": {
        "dense": (1.73e-11, 7.721e-10, 1.475e-10, 0.0001134, 0.0001398),
        "spectral": (1.845e-11, 2.394e-11, 6.635e-11, 1.551e-10, 4.269e-11, 0.0001684, 9.799e-05),
    },
    "cuda, 16-bit": {
        "dense": (2e-15, 0, 5.07e-15, 5.52e-12, 2.76e-12, 2.1e-5, 3.13e-5, 1.54e-4, 6.01e-4),
        "spectral": (5.72e-15, 0, 6.45e-14, 7.91e-13, 1.11e-11, 2.33e-5, 1.35e-5, 4.5e-4, 1.22e-3),
    },
    "cuda, 32-bit": {
        "dense": (4.02e-15, 0, 0, 6.78e-11, 7.7e-12, 2.57e-5, 5.05e-5, 3.06e-4, 6.67e-4),
        "spectral": (
            *(1.59e-14, 5.22e-14, 1.91e-13, 5.82e-13, 3.3e-11),
            *(1.66e-5, 2.75e-6, 4.72e-4, 1.46e-3),
        ),
    },
}

HOST = 2
"""The last of the counts: what Python does for a call, forwards and backwards."""

_VECTOR = 16  # channels
_CAPABILITY = (8, 0)  # of the oldest GPU whose tensor cores the kernels know


class Part(NamedTuple):
    """Input fields that transform alike, for one of the groups of channels."""

    plan: SpectralPlan
    in_fields: int
    out_fields: int


class Workload(NamedTuple):
    """What one call of a layer has to do."""

    parts: tuple[Part, ...]
    groups: int
    batch: int
    height: int
    """Of the input; with the padding where that is not of zeros."""
    width: int
    geometry: Geometry
    backward: bool
    """Whether a backward pass will follow."""

    @property
    def in_pixels(self) -> int:
        """Of one input image, padding included."""
        rim = 2 * self.geometry.before
        return (self.height + rim) * (self.width + rim)

    @property
    def out_pixels(self) -> int:
        """Of one output image."""
        return self.geometry.height * self.geometry.width


def where(device: str, dtype: torch.dtype) -> str:
    """The name of the coefficients for a type of device and a dtype.

    >>> where("cpu", torch.float64), where("cuda", torch.bfloat16)
    ('cpu', 'cuda, 16-bit')
    """
    return f"{device}, {8 * dtype.itemsize}-bit" if device == "cuda" else device


class _Counts(NamedTuple):
    """Operations of the spectral engine for each pixel: of an input field, of an output field."""

    products: int  # of a pair of fields
    derivatives: int
    features: int
    analysis: int
    synthesis: int


@lru_cache(maxsize=1024)
def _counts(plan: SpectralPlan) -> _Counts:
    entries = native.symmetry_classes(plan.stencils)[3].size
    pairs_in, rest_in = butterflies(plan.analysis)
    pairs_out, rest_out = butterflies(plan.synthesis.T)
    return _Counts(
        plan.multiplications,
        plan.analysis.shape[0] * (entries + 2 * plan.basis.size**2),
        sum(block.rows * block.inner for block in plan.blocks),
        2 * len(pairs_in) + int(np.count_nonzero(rest_in)),
        2 * len(pairs_out) + int(np.count_nonzero(rest_out)),
    )


def terms(work: Workload, device: str = "cpu") -> dict[str, tuple[float, ...]]:
    """What each engine does, in the order of its coefficients; ``device`` as `where` says it.

    CPU, dense: multiplications, elements of the filters, elements of the maps, calls forwards,
    calls backwards. spectral: products, derivatives, features, transforms, weights, and the same
    calls.

    GPU, dense: multiplications of the convolution, of the gradient to its input and of that to its
    filters, elements of the filters, elements of the maps, launches forwards, launches backwards,
    calls forwards, calls backwards. spectral: products, those of the gradient to the weights,
    derivatives, elements of the maps and spectra, weights, and the same launches and calls.
    """
    return _on_a_gpu(work) if device.startswith("cuda") else _on_a_cpu(work)


def _on_a_cpu(work: Workload) -> dict[str, tuple[float, ...]]:
    passes = 3 if work.backward else 1
    dense, spectral = np.zeros(5), np.zeros(7)
    for plan, in_fields, out_fields in work.parts:
        inputs = in_fields * plan.analysis.shape[0]
        outputs = out_fields * plan.synthesis.shape[0]
        images = work.batch * work.groups
        out, back = images * work.out_pixels, images * work.in_pixels
        # conv2d fills whole vectors with output channels; the gradient to its input with input
        # channels, that to its weight with both.
        filled = _rounded(outputs) * inputs
        if work.backward:
            filled += _rounded(inputs) * (outputs + _rounded(outputs))
        taps = plan.basis.size**2
        dense += [
            out * filled * taps,
            passes * work.groups * inputs * outputs * taps,
            passes * (back * inputs + out * outputs),
            0,
            0,
        ]
        there = _counts(plan)
        weights = in_fields * out_fields * work.groups * plan.weights * plan.weight_map.shape[0]
        spectral += [
            out * in_fields * out_fields * there.products,
            out * in_fields * there.derivatives,
            out * in_fields * there.features,
            back * in_fields * there.analysis + out * out_fields * there.synthesis,
            passes * weights,
            work.groups,
            0,
        ]
        if work.backward:  # at the resolution of the input, with or without a stride
            again = _counts(plan.adjoint)
            spectral += [
                2 * back * in_fields * out_fields * again.products,
                back * out_fields * again.derivatives,
                back * out_fields * again.features,
                2 * back * in_fields * again.synthesis + back * out_fields * again.analysis,
                0,
                work.groups,
                work.groups,
            ]
    dense[-2:] = passes // 3 + 1, passes // 3
    return {"dense": tuple(dense.tolist()), "spectral": tuple(spectral.tolist())}


def _rounded(count: int, unit: int = _VECTOR) -> int:
    return -(-count // unit) * unit


class _Tiles(NamedTuple):
    """What the kernels for GPUs make of a plan: everything in powers of two, or fours."""

    slots: int  # of the spectrum of a field
    products: int  # of a pair of fields
    differences: int  # derivatives and features of an input field


# Rows and columns of the tiles that a convolution may be cut into, and the share of a GPU's speed
# that they reach.
_CONVOLUTION_TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.85), (64, 64, 0.7))
_PROCESSORS = 132


def _waves(rows: int, columns: int, inner: int) -> float:
    """Multiplications of a matrix product in whole tiles, on all processors at a time."""

    def padded(height: int, width: int) -> int:
        tiles = -(-rows // height) * -(-columns // width)
        return _rounded(tiles, _PROCESSORS) * height * width

    least = min(padded(height, width) / speed for height, width, speed in _CONVOLUTION_TILES)
    return least * _rounded(inner, 32)


_FIELDS = 4  # of a tile
_ACCUMULATORS = 384  # output slots of a program
_PROGRAMS = 264  # that share a gradient to the weights


@lru_cache(maxsize=1024)
def _tiles(plan: SpectralPlan) -> _Tiles:
    single = [block.inner for block in plan.blocks if block.columns == 1 for _ in range(block.rows)]
    double = [block.inner for block in plan.blocks if block.columns > 1 for _ in range(block.rows)]
    # Two slots make a product of their own: two columns of one block, or one of two.
    lengths = double + [sum(single[first : first + 2]) for first in range(0, len(single), 2)]
    number = 1 << (len(lengths) - 1).bit_length()
    inner = _rounded(max(lengths), 4)
    there = _counts(plan)
    filled = 2 * number / plan.analysis.shape[0]
    return _Tiles(
        2 * number, 2 * number * inner, round(filled * there.derivatives) + number * inner
    )


def _on_a_gpu(work: Workload) -> dict[str, tuple[float, ...]]:
    dense, spectral = np.zeros(9), np.zeros(9)
    for plan, in_fields, out_fields in work.parts:
        inputs = in_fields * plan.analysis.shape[0]
        outputs = out_fields * plan.synthesis.shape[0]
        images = work.batch * work.groups
        out, back = images * work.out_pixels, images * work.height * work.width
        taps = plan.basis.size**2
        filters = work.groups * inputs * outputs * taps
        maps = back * inputs + out * outputs
        dense[:5] += [_waves(out, outputs, inputs * taps), 0, 0, filters, maps]
        if work.backward:
            to_filters = out * _rounded(outputs, 64) * _rounded(inputs * taps, 64)
            dense[:5] += [
                0,
                _waves(back, inputs, outputs * taps) / work.geometry.down**2,
                to_filters,
                2 * filters,
                2 * maps,
            ]
        tiles = _tiles(plan)
        some, many = _rounded(in_fields, _FIELDS), _rounded(out_fields, _FIELDS)
        pairs = some * many * tiles.products
        # Every program differentiates all input fields anew for its share of the output fields.
        ahead, behind = (-(-n * tiles.slots // _ACCUMULATORS) for n in (many, some))
        spectrum = images * work.in_pixels * tiles.slots
        spectral += [
            out * pairs,
            0,
            out * some * ahead * tiles.differences,
            2 * back * inputs + spectrum * some * (1 + ahead) + out * outputs,
            work.groups * pairs,
            work.groups,
            0,
            work.groups,
            0,
        ]
        if work.backward:  # to the input at its resolution, to the weights at that of the output
            splits = max(1, _PROGRAMS // (some // 2 * ahead))
            laid = out * many * tiles.slots
            spectral += [
                back * pairs,
                out * pairs,
                back * many * behind * tiles.differences + out * some * ahead * tiles.differences,
                2 * (back * inputs + 2 * out * outputs)
                + spectrum * (many * (1 + behind) + some * (1 + ahead))
                + laid * (1 + some // _FIELDS),
                work.groups * pairs * (1 + 2 * splits),
                0,
                work.groups,
                0,
                work.groups,
            ]
    back_too = float(work.backward)
    dense[-4:] = 1, back_too, 1, back_too
    return {"dense": tuple(dense.tolist()), "spectral": tuple(spectral.tolist())}


def seconds(
    counts: ArrayLike, coefficients: ArrayLike, device: str, replayed: bool = False
) -> FloatArray:
    """The time that some counts are expected to take, or many: over their last axis."""
    each = np.multiply(counts, coefficients)
    host, queued = each[..., -HOST:].sum(axis=-1), each[..., :-HOST].sum(axis=-1)
    if not device.startswith("cuda"):
        return host + queued
    return queued if replayed else np.maximum(host, queued)


def costs(work: Workload, device: str = "cpu", replayed: bool = False) -> dict[str, float]:
    """The time that each engine is expected to take, in seconds; ``device`` as `where` says it.

    ``replayed``: as a CUDA graph.
    """
    return {
        engine: float(seconds(counts, COEFFICIENTS[device][engine], device, replayed))
        for engine, counts in terms(work, device).items()
    }


@lru_cache(maxsize=4096)
def faster(work: Workload, device: str, replayed: bool = False) -> str:
    """The engine that is expected to be faster where every one can run."""
    try:
        found = costs(work, device, replayed)
    except ParityError:
        return "dense"
    return min(found, key=lambda engine: found[engine])


def choose(x: Tensor, work: Workload) -> str:
    """The engine for one call: ``"dense"`` or ``"spectral"``."""
    dtype = result_dtype(x)
    device = where(x.device.type, dtype)
    if device not in COEFFICIENTS or faster(work, device, without_python()) == "dense":
        return "dense"
    if x.device.type == "cuda":
        usable = not native.watched(x) and _recent(x.device) and on_kernels(x, work)
    else:
        usable = all(native.supports(x, part.plan) for part in work.parts)
    return "spectral" if usable else "dense"


def on_kernels(x: Tensor, work: Workload) -> bool:
    """Whether the spectral engine would run on the kernels for GPUs."""
    dtype, shape = result_dtype(x), (*x.shape[:2], work.height, work.width)
    return all(
        kernels(x, part.plan, work.geometry, dtype, shape) is not None for part in work.parts
    )


@lru_cache
def _recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _CAPABILITY
