"""What ``engine="auto"`` runs: the engine that a cost model says is faster.

The model counts what each engine does and weighs the counts with coefficients that were fitted to
measurements (`benchmarks/engines.py --fit`). Only ratios matter: a faster processor is faster at
both. Where there are no coefficients, or the compiled kernel cannot be had, it is dense.

On a CPU the counts add up. A GPU works while Python queues what comes next: there a call takes the
longer of the two. Hopper GPUs run other kernels in 16 bits, whose warps have roles, for layers that
they fit: they have coefficients of their own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from econv.engines import without_python
from econv.engines.dense import memory_format
from econv.engines.kernel_counts import PROCESSORS, Kernels, KernelsWithRoles, parts, rounded
from econv.engines.spectral import Geometry, kernel_name, kernels, native, result_dtype
from econv.engines.spectral.triton.scheme import FIELDS, scheme
from econv.fourier import butterflies
from econv.groups import FloatArray
from econv.plan import ParityError, SpectralPlan

__all__ = [
    "Part",
    "Workload",
    "choose",
    "costs",
    "faster",
    "has_roles",
    "host",
    "negligible",
    "on_kernels",
    "seconds",
    "terms",
    "where",
]

# Seconds for each count of `terms`, on one core or one GPU. A `where` that is not here runs dense.
COEFFICIENTS: dict[str, dict[str, tuple[float, ...]]] = {
    "cpu": {
        "dense": (1.657e-11, 6.602e-10, 8.775e-11, 0.0001161, 0.0001368),
        "spectral": (1.666e-11, 1.924e-11, 1.235e-10, 1.267e-10, 4.432e-11, 0.0001596, 8.583e-05),
    },
    "cuda, 16-bit": {
        "dense": (
            *(2.253e-15, 2.409e-15, 6.022e-16, 3.963e-09, 6.943e-12, 1.042e-12),
            *(1.811e-05, 3.181e-05, 0.0002137, 0.0007728),
        ),
        "spectral": (
            *(6.033e-15, 6.165e-15, 3.063e-13, 5.212e-13, 8.873e-13, 3.337e-12, 1.253e-11),
            *(2.463e-05, 2.696e-05, 0.000605, 0.001812),
        ),
    },
    "hopper, 16-bit": {
        "dense": (
            *(2.324e-15, 2.699e-15, 5.296e-16, 2.204e-09, 5.19e-12, 9.06e-13),
            *(1.785e-05, 3.229e-05, 0.0001709, 0.0006448, 0, 0),
        ),
        "spectral": (
            *(1.312e-14, 9.032e-15, 9.289e-14, 5.001e-13, 3.219e-15, 1.009e-15, 1.882e-13),
            *(1.362e-12, 3.721e-13, 4.831e-12, 7.752e-12, 2.383e-05, 3.314e-05),
            *(0.0004436, 0.001065, 0.0004929, 0.001056),
        ),
    },
    "cuda, 32-bit": {
        "dense": (
            *(6.415e-15, 1.212e-14, 1.349e-15, 0, 2.265e-11, 0),
            *(2.703e-05, 4.069e-05, 0.0001796, 0.0006513),
        ),
        "spectral": (
            *(2.583e-14, 8.845e-15, 6.991e-13, 1.165e-12, 2.215e-13, 7.292e-12, 3.682e-11),
            *(2.074e-05, 1.764e-05, 0.0003808, 0.001142),
        ),
    },
}

_SMALL = 100_000  # multiplications; below, nothing is faster than one call of conv2d
# By the bytes of a number; below, a GPU has done conv2d before the spectral kernels are launched.
_QUEUED = {2: 100_000_000_000, 4: 30_000_000_000}
_VECTOR = 16  # channels
_CAPABILITY = (8, 0)  # of the oldest GPU whose tensor cores the kernels know
_HOPPER = (9, 0)


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


def where(device: str, dtype: torch.dtype, roles: bool = False) -> str:
    """The name of the coefficients for a type of device and a dtype.

    ``roles``: whether warps of a GPU may have roles, as `has_roles` says.

    >>> where("cpu", torch.float64), where("cuda", torch.bfloat16)
    ('cpu', 'cuda, 16-bit')
    >>> where("cuda", torch.bfloat16, roles=True), where("cuda", torch.float32, roles=True)
    ('hopper, 16-bit', 'cuda, 32-bit')
    """
    if device != "cuda":
        return device
    return f"{'hopper' if roles and dtype.itemsize == 2 else device}, {8 * dtype.itemsize}-bit"


def host(device: str) -> int:
    """How many of the counts, the last ones, are what Python does; ``device`` as `where` says it.

    Calls forwards and backwards; on Hopper GPUs then those of kernels whose warps have roles.
    """
    return 4 if device.startswith("hopper") else 2


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

    GPU, dense: multiplications of the convolution and the gradient to its input, those of the
    gradient to its filters, those of both where channels are not aligned, the inner lengths of the
    first two where channels do not fill whole lines, elements of the filters, elements of the maps,
    launches forwards, launches backwards, calls forwards, calls backwards. spectral: products,
    those of the gradient to the weights, features, taps, elements of the maps and spectra, elements
    of the gradient as it is laid out, sums of the gradient to the weights, and the same launches
    and calls.

    Hopper GPU, dense: the same, and twice nothing. spectral: the first four of launches whose warps
    have no roles, the same four of those that have, and so on; calls are of either kind.
    """
    if device == "cpu":
        return _on_a_cpu(work)
    return _on_a_gpu(work, 4 if device.endswith("32-bit") else 2, device.startswith("hopper"))


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
        filled = rounded(outputs, _VECTOR) * inputs
        if work.backward:
            filled += rounded(inputs, _VECTOR) * (outputs + rounded(outputs, _VECTOR))
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


# Rows and columns of the tiles that a convolution may be cut into, and the share of a GPU's speed
# that they reach.
_CONVOLUTION_TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.7), (64, 64, 0.5))


def _whole_tiles(rows: int, columns: int) -> float:
    """Elements of a matrix in whole tiles, on all processors at a time."""

    def padded(height: int, width: int) -> int:
        tiles = parts(rows, height) * parts(columns, width)
        return rounded(tiles, PROCESSORS) * height * width

    return min(padded(height, width) / speed for height, width, speed in _CONVOLUTION_TILES)


def _on_a_gpu(work: Workload, itemsize: int, roles: bool) -> dict[str, tuple[float, ...]]:
    dense = np.zeros(10)
    spectral = np.zeros(17)
    for part in work.parts:
        dense += work.groups * _dense_on_a_gpu(work, part, itemsize)
        spectral += work.groups * _spectral_on_a_gpu(work, part, itemsize, roles)
    back_too = float(work.backward)
    dense[-4:] = 1, back_too, 1, back_too
    if roles:
        dense = np.append(dense, [0, 0])
    else:
        spectral = np.delete(spectral, _OF_ROLES)
    return {"dense": tuple(dense.tolist()), "spectral": tuple(spectral.tolist())}


_OF_ROLES = (4, 5, 6, 7, 15, 16)  # counts of launches whose warps have roles


# Bytes of the channels of a pixel: a convolution reads so many together, and runs other kernels
# where channels are not a multiple of the next; where they are none of the last, a tile takes
# longer to come about.
_TOGETHER, _ALIGNED, _WHOLE = 64, 32, 128


def _dense_on_a_gpu(work: Workload, part: Part, itemsize: int) -> FloatArray:
    plan, in_fields, out_fields = part
    inputs = in_fields * plan.analysis.shape[0]
    outputs = out_fields * plan.synthesis.shape[0]
    out, back = work.batch * work.out_pixels, work.batch * work.height * work.width
    taps = plan.basis.size**2
    line = _TOGETHER // itemsize
    products = _whole_tiles(out, outputs) * taps * rounded(inputs, line)
    to_filters = 0
    if work.backward:
        again = _whole_tiles(back, inputs) * taps * rounded(outputs, line)
        products += again / work.geometry.down**2
        to_filters = out * rounded(outputs, 64) * taps * rounded(inputs, 64)
    unaligned, partial = (
        bool(inputs * itemsize % unit or outputs * itemsize % unit) for unit in (_ALIGNED, _WHOLE)
    )
    turns = taps * (inputs + outputs if work.backward else inputs)
    passes = 3 if work.backward else 1
    counts = [products, to_filters, unaligned * (products + to_filters), partial * turns]
    counts += [passes * inputs * outputs * taps, passes * (back * inputs + out * outputs)]
    return np.array([*counts, 0, 0, 0, 0], dtype=np.float64)


def _spectral_on_a_gpu(work: Workload, part: Part, itemsize: int, roles: bool) -> FloatArray:
    plan, in_fields, out_fields = part
    inputs = in_fields * plan.analysis.shape[0]
    outputs = out_fields * plan.synthesis.shape[0]
    out, back = work.batch * work.out_pixels, work.batch * work.height * work.width
    products, calls = np.zeros((2, 4)), np.zeros((2, 2))  # without roles and with
    if not kernel_name(plan):  # torch's operations, which write every feature
        passes, there = (3 if work.backward else 1), _counts(plan)
        products[0, 0] = passes * out * in_fields * out_fields * there.products
        maps = 2 * passes * (out * in_fields * there.features + back * inputs + out * outputs)
        calls[0] = 1, passes // 3
        return np.array([*products.flat, maps, 0, 0, *calls[0], *calls.flat], dtype=np.float64)
    plain = Kernels(scheme(plan, 16 // itemsize), in_fields, out_fields, itemsize)
    able = KernelsWithRoles(*plain)
    spectrum = work.batch * work.in_pixels * 2 * plain.layout.batch
    some, many = rounded(in_fields, FIELDS), rounded(out_fields, FIELDS)
    forwards = roles and able.convolves(adjoint=False)
    found = (able if forwards else plain).convolution(out, adjoint=False)
    products[int(forwards), [0, 2, 3]] += found
    calls[int(forwards), 0] = 1
    maps = 2 * back * inputs + out * outputs + spectrum * some
    laid = sums = 0
    if work.backward:  # to the input at its resolution, to the weights at that of the output
        backwards = roles and able.convolves(adjoint=True)
        found = (able if backwards else plain).convolution(back, adjoint=True)
        products[int(backwards), [0, 2, 3]] += found
        summing = roles and able.sums
        cut = able if summing else plain
        splits = cut.splits(work.batch, work.height * work.width, work.out_pixels)
        products[int(summing), 1:] += cut.gram(out, splits)
        calls[int(summing), 1] = 1
        maps += 2 * back * inputs + 3 * out * outputs + spectrum * (some + many)
        laid, sums = out * cut.laid, splits * cut.weights
    launches = calls.sum(axis=0)
    return np.array([*products.flat, maps, laid, sums, *launches, *calls.flat], dtype=np.float64)


def seconds(
    counts: ArrayLike, coefficients: ArrayLike, device: str, replayed: bool = False
) -> FloatArray:
    """The time that some counts are expected to take, or many: over their last axis."""
    each, last = np.multiply(counts, coefficients), host(device)
    python, queued = each[..., -last:].sum(axis=-1), each[..., :-last].sum(axis=-1)
    if device == "cpu":
        return python + queued
    return queued if replayed else np.maximum(python, queued)


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
    """The engine that is expected to be faster where every one can run.

    The dense one on devices that there are no coefficients for.
    """
    if device not in COEFFICIENTS:
        return "dense"
    try:
        found = costs(work, device, replayed)
    except ParityError:
        return "dense"
    return min(found, key=lambda engine: found[engine])


def negligible(x: Tensor, multiplications: int) -> bool:
    """Whether so many multiplications of the dense engine are too few to choose another.

    Asked before anything is counted: a small layer would wait longer for the choice than for what
    it gains. What is replayed does not wait.
    """
    if x.is_cuda and not without_python():
        return multiplications < _QUEUED.get(result_dtype(x).itemsize, math.inf)
    return multiplications < _SMALL


def choose(x: Tensor, work: Workload) -> str:
    """The engine for one call: ``"dense"`` or ``"spectral"``."""
    device = x.device.type
    if x.is_cuda:
        roles = memory_format(x) is torch.channels_last and has_roles(x.device)
        device = where("cuda", result_dtype(x), roles)
    if faster(work, device, without_python()) == "dense":
        return "dense"
    if x.is_cuda:
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


@lru_cache
def has_roles(device: torch.device) -> bool:
    """Whether warps of a GPU may have roles, where channels lie last."""
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    try:
        from econv.engines.spectral.hopper import kernels as hopper_kernels  # which needs Triton
    except ImportError:
        return False
    return hopper_kernels.AVAILABLE
