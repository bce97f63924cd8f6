"""The spectral engine's kernel for Hopper GPUs: what becomes of `econv.engines.hopper_source`.

This room knows Gluon.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from econv.engines.hopper_source import (
    hopper_gram_source,
    hopper_source,
    pieces_of_a_chunk,
    rows_of_a_copy,
)
from econv.engines.triton_kernels import exponent, read_source, two_to
from econv.engines.triton_scheme import FIELDS, Scheme

__all__ = ["hopper_forward", "hopper_gram", "row_copies", "weight_copies"]


_BARRIER = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""All warps of a team wait for one another; Triton 3.7 gave it another name."""


@lru_cache(maxsize=256)
def hopper_forward(layout: Scheme, parts: tuple[int, ...], teams: int) -> Any:
    """The kernel of a plan's layer."""
    return _read(hopper_source(layout, parts, teams), layout)["forward"]


@lru_cache(maxsize=256)
def hopper_gram(layout: Scheme, parts: tuple[int, ...], chunk: int, teams: int) -> Any:
    """The kernel of the gradient to the weights of one chunk of slots."""
    return _read(hopper_gram_source(layout, parts, chunk, teams), layout)["gram"]


def _read(source: str, layout: Scheme) -> dict[str, Any]:
    names = {
        "gluon": gluon,
        "gl": gl,
        "fence_async_shared": fence_async_shared,
        "team_barrier": _BARRIER,
        "mbarrier": mbarrier,
        "tma": tma,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
        "exponent": gluon.jit(exponent.fn),
        "two_to": gluon.jit(two_to.fn),
    }
    return read_source(source, layout, names)


def weight_copies(layout: Scheme, parts: tuple[int, ...], arranged: Tensor) -> list[Any]:
    """How the kernel copies weights that were arranged in rows, piece by piece."""
    pieces = pieces_of_a_chunk(layout)
    assert pieces is not None
    rows = arranged.numel() // (FIELDS * sum(pieces))
    found, start = [], 0
    for size in pieces:
        inner = FIELDS * size
        matrix = arranged.view(-1)[start : start + rows * inner].view(rows, inner)
        found += row_copies(layout, parts, matrix)
        start += rows * inner
    return found


def row_copies(layout: Scheme, parts: tuple[int, ...], matrix: Tensor) -> list[Any]:
    """How a kernel copies the rows of a matrix, part by part."""
    inner = matrix.shape[1]
    laid = gl.NVMMASharedLayout(min(128, 2 * inner), 16, rank=2)
    blocks = ([rows_of_a_copy(layout, part), inner] for part in parts)
    return [TensorDescriptor.from_tensor(matrix, block, laid) for block in blocks]
