"""The least time of kernels whose warps have roles on an H200, by what each of its units carries.

Operations are those that the kernels carry out, padding counted; bytes are those that have to reach
or leave the GPU's memory, once each. benchmarks/readme.py sets them beside measured times.
"""

from __future__ import annotations

from typing import NamedTuple

from econv.engines.kernel_counts import PROCESSORS, KernelsWithRoles, rounded
from econv.engines.spectral.hopper.source import gram_features, hopper_gram_source, hopper_source
from econv.engines.spectral.triton.scheme import FIELDS, Scheme, scheme
from econv.plan import spectral_plan
from engine_cases import Case

TENSOR = 989e12  # operations a second of the tensor cores in 16 bits, as NVIDIA gives them
MEMORY = 4.8e12  # bytes a second, as NVIDIA gives them
CLOCK = 1.98e9
SUM = 2.25  # cycles of a scheduler: `rates` in results/kernel_counters_cuda.json
SCHEDULERS = 4 * PROCESSORS
HALF = 2  # bytes


class Limits(NamedTuple):
    """The least µs of some kernels of a training step by tensor cores, sums and memory."""

    tensor: float
    sums: float
    memory: float


def _microseconds(products: float, sums: float, size: float) -> Limits:
    """Of so many multiplications, sums of two halves by a warp, and bytes."""
    return Limits(
        2e6 * products / TENSOR, 1e6 * sums * SUM / (SCHEDULERS * CLOCK), 1e6 * size / MEMORY
    )


def _sums(source: str) -> int:
    """Instructions on two halves in the functions of a kernel that differentiate."""
    parts = source.split("@gluon.jit\n")
    return sum(part.count(".f16x2") for part in parts if part.startswith("def differentiate"))


def limits(case: Case) -> dict[str, Limits]:
    """Of the layer and its adjoint, the gradient to the weights, and the transforms."""
    layer = case.layer("meta")
    plan = spectral_plan(layer.basis, "regular", "regular")
    kernels = KernelsWithRoles(scheme(plan, 8), case.in_fields, case.out_fields, HALF)
    pixels = case.batch * case.size**2
    shares, fields = kernels.shares, rounded(case.in_fields, FIELDS)
    features = sum(share.batch * share.inner for share in shares)
    # The spectrum has zeros around images, two of which share them.
    places = case.batch * (case.size + layer.padding) ** 2
    spectrum = HALF * places * fields * kernels.layout.chunks * kernels.layout.width
    maps = HALF * pixels * layer.in_channels
    cut, warps = kernels.cut(adjoint=False), pixels * fields / 32
    made = products = 0.0
    for share in shares:
        made += _sums(hopper_source(share, _parts(cut.fields), 2)) * cut.programs
    products = features * pixels * fields * 2.0 * cut.programs * cut.fields
    gram_cut = kernels.gram_cut
    laid = HALF * pixels * kernels.laid
    wide = sum(_rows(share) for share in shares)
    gram_products = wide * pixels * fields * 2.0 * gram_cut.programs * gram_cut.fields
    gram_made = sum(
        _sums(hopper_gram_source(share, _parts(gram_cut.fields), chunk, 2))
        for share in shares
        for chunk in range(share.chunks)
    )
    return {
        "layer and adjoint": _microseconds(2 * products, 2 * made * warps, 2 * (spectrum + maps)),
        "gradient to the weights": _microseconds(
            gram_products, gram_made * gram_cut.programs * warps, spectrum + laid
        ),
        # Spectra of the input, twice, and of the output's gradient, which is also laid out; the
        # largest numbers of both.
        "transforms": _microseconds(0, 0, 3 * (maps + spectrum) + maps + laid + 2 * maps),
    }


def _rows(share: Scheme) -> int:
    """Features of a field in the gradient to the weights, which are the rows of products."""
    return share.batch * share.chunks * gram_features(share)


def _parts(fields: int) -> tuple[int, ...]:
    first = 1 << (fields.bit_length() - 1)
    return (first, fields - first) if fields > first else (first,)
