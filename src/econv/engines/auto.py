"""What ``engine="auto"`` runs: the engine that a cost model says is faster.

The model counts what each engine does and weighs the counts with coefficients that were fitted to
measurements (`benchmarks/engines.py --fit`). Only ratios matter: a faster processor is faster at
both. Where there are no coefficients, or the compiled kernel cannot be had, it is dense.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from econv.engines import native
from econv.fourier import butterflies
from econv.plan import ParityError, SpectralPlan

__all__ = ["Part", "Workload", "choose", "costs", "terms"]

# Seconds for each count of `terms`, on one core. A device that is not here runs dense.
COEFFICIENTS: dict[str, dict[str, tuple[float, ...]]] = {
    "cpu": {
        "dense": (1.73e-11, 7.721e-10, 1.475e-10, 0.0001134, 0.0001398),
        "spectral": (1.845e-11, 2.394e-11, 6.635e-11, 1.551e-10, 4.269e-11, 0.0001684, 9.799e-05),
    },
}

_VECTOR = 16  # channels


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
    in_pixels: int
    """Of one input image, padding included."""
    out_pixels: int
    backward: bool
    """Whether a backward pass will follow."""


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


def terms(work: Workload) -> dict[str, tuple[float, ...]]:
    """What each engine does, in the order of its coefficients.

    dense: multiplications, elements of the filters, elements of the maps, calls forwards, calls
    backwards. spectral: products, derivatives, features, transforms, weights, and the same calls.
    """
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


def _rounded(channels: int) -> int:
    return -(-channels // _VECTOR) * _VECTOR


def costs(work: Workload, device: str = "cpu") -> dict[str, float]:
    """The time that each engine is expected to take, in seconds on one core."""
    return {
        engine: float(np.dot(counts, COEFFICIENTS[device][engine]))
        for engine, counts in terms(work).items()
    }


@lru_cache(maxsize=4096)
def _faster(work: Workload, device: str) -> str:
    try:
        found = costs(work, device)
    except ParityError:
        return "dense"
    return min(found, key=lambda engine: found[engine])


def choose(x: Tensor, work: Workload) -> str:
    """The engine for one call: ``"dense"`` or ``"spectral"``."""
    device = x.device.type
    if device not in COEFFICIENTS:
        return "dense"
    if _faster(work, device) == "dense":
        return "dense"
    usable = all(native.supports(x, part.plan) for part in work.parts)
    return "spectral" if usable else "dense"
