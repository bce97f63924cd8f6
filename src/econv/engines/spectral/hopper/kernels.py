"""The warp-specialised kernels of the spectral engine, for Hopper GPUs.

`source` writes their text, in Gluon. Triton calls Gluon experimental: where a part of it is missing
`AVAILABLE` is false, and the kernels of `econv.engines.spectral.triton` run instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
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

    # All warps of a partition wait for one another; Triton 3.7 renamed it.
    thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
    AVAILABLE = True
except (ImportError, AttributeError):
    AVAILABLE = False

from econv.engines.spectral.hopper.schedule import (
    ROWS,
    pieces_of_a_chunk,
    rows_of_a_copy,
    used_pieces,
)
from econv.engines.spectral.hopper.source import convolution_source, weight_gradient_source
from econv.engines.spectral.triton.kernels import INTERPRETED, exponent, read_source, two_to
from econv.engines.spectral.triton.scheme import FIELDS, Scheme


def supported(device: torch.device) -> bool:
    """Whether a device runs these kernels: a Hopper GPU, and a Triton with all of Gluon."""
    if INTERPRETED or not AVAILABLE:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) == (9, 0)
    return device.type == "meta"  # which stands for an H200


@lru_cache(maxsize=256)
def forward(layout: Scheme, parts: tuple[int, ...], partitions: int) -> Any:
    """The kernel of a plan's layer."""
    return _read(convolution_source(layout, parts, partitions), layout)["forward"]


@lru_cache(maxsize=256)
def weight_gradient(layout: Scheme, parts: tuple[int, ...], chunk: int, partitions: int) -> Any:
    """The kernel of the gradient to the weights of one chunk of slots."""
    return _read(weight_gradient_source(layout, parts, chunk, partitions), layout)[
        "weight_gradient"
    ]


def _read(source: str, layout: Scheme) -> dict[str, Any]:
    names = {
        "gluon": gluon,
        "gl": gl,
        "fence_async_shared": fence_async_shared,
        "thread_barrier": thread_barrier,
        "mbarrier": mbarrier,
        "tma": tma,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
        "exponent": gluon.jit(exponent.fn),
        "two_to": gluon.jit(two_to.fn),
    }
    return read_source(source, layout, names)


class Copies:
    """How a kernel copies the rows of matrices of halves, one of which follows the other.

    What depends on their shapes is made once; a call moves it to where they lie.
    """

    def __init__(
        self, layout: Scheme, parts: tuple[int, ...], rows: int, inners: Sequence[int]
    ) -> None:
        self.lengths = [rows * inner for inner in inners]
        self.descriptors = []
        for inner in inners:
            matrix = torch.empty(rows, inner, dtype=torch.float16, device="meta")
            shared = gl.NVMMASharedLayout(min(128, 2 * inner), 16, rank=2)
            blocks = ([rows_of_a_copy(layout, part), inner] for part in parts)
            each = [TensorDescriptor.from_tensor(matrix, block, shared) for block in blocks]
            self.descriptors.append(each)

    def __call__(self, memory: Tensor) -> list[Any]:
        """As descriptors of matrices that lie in some memory."""
        found = []
        flat = memory.view(-1)[: sum(self.lengths)].split(self.lengths)
        for matrix, each in zip(flat, self.descriptors, strict=True):
            for descriptor in each:
                found.append(copy.copy(descriptor))
                found[-1].base = matrix
        return found


def weight_copies(layout: Scheme, parts: tuple[int, ...], arranged: tuple[int, ...]) -> Copies:
    """Of weights that were arranged in rows, piece by piece."""
    pieces = pieces_of_a_chunk(layout)
    assert pieces is not None
    rows = math.prod(arranged) // (FIELDS * sum(pieces))
    return Copies(layout, parts, rows, [FIELDS * size for size in used_pieces(layout)])


def row_copies(layout: Scheme, parts: tuple[int, ...], packed: tuple[int, ...]) -> Copies:
    """Of a gradient that was packed in rows of pixels."""
    return Copies(layout, parts, math.prod(packed) // ROWS, [ROWS])
