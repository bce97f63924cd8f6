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
from econv.plan import SpectralPlan

__all__ = ["Part", "Workload", "choose", "costs", "terms"]

# Seconds for each count of `terms`, on one core. A device that is not here runs dense.
COEFFICIENTS: dict[str, dict[str, tuple[float, ...]]] = {
    "cpu": {
        "dense": (3e-11, 1e-10, 1e-9, 1e-4),
        "spectral": (3e-11, 3e-11, 3e-11, 3e-11, 3e-11, 1e-4),
    },
}


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

    dense: multiplications, elements of the filters, elements of the maps, calls.
    spectral: products, derivatives, features, transforms, weights, calls.
    """
    passes = 3 if work.backward else 1
    dense, spectral = np.zeros(4), np.zeros(6)
    for plan, in_fields, out_fields in work.parts:
        source, target = plan.analysis.shape[0], plan.synthesis.shape[0]
        pairs = in_fields * out_fields * work.groups
        taps = source * target * plan.basis.size**2
        images = work.batch * work.groups
        out, back = images * work.out_pixels, images * work.in_pixels
        dense += passes * np.array(
            [
                work.batch * work.out_pixels * pairs * taps,
                pairs * taps,
                back * in_fields * source + out * out_fields * target,
                0,
            ]
        )
        there = _counts(plan)
        spectral += [
            out * in_fields * out_fields * there.products,
            out * in_fields * there.derivatives,
            out * in_fields * there.features,
            back * in_fields * there.analysis + out * out_fields * there.synthesis,
            pairs * plan.weights * plan.weight_map.shape[0],
            work.groups,
        ]
        if work.backward:  # at the resolution of the input, with or without a stride
            again = _counts(plan.adjoint)
            spectral += [
                2 * back * in_fields * out_fields * again.products,
                back * out_fields * again.derivatives,
                back * out_fields * again.features,
                2 * back * in_fields * again.synthesis + back * out_fields * again.analysis,
                2 * pairs * plan.weights * plan.weight_map.shape[0],
                work.groups,
            ]
    dense[-1] = 2 if work.backward else 1
    return {"dense": tuple(dense.tolist()), "spectral": tuple(spectral.tolist())}


def costs(work: Workload, device: str = "cpu") -> dict[str, float]:
    """The time that each engine is expected to take, in seconds on one core."""
    return {
        engine: float(np.dot(counts, COEFFICIENTS[device][engine]))
        for engine, counts in terms(work).items()
    }


@lru_cache(maxsize=4096)
def _faster(work: Workload, device: str) -> str:
    found = costs(work, device)
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
