"""The warp-specialised kernels of the spectral engine, for Hopper GPUs.

`source` writes their text, in Gluon. Triton calls Gluon experimental: where a part of it is missing
`AVAILABLE` is false, and the kernels of `econv.engines.spectral.triton` run instead.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

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

from econv.engines.spectral.hopper.schedule import ROWS, rows_of_a_copy
from econv.engines.spectral.hopper.source import convolution_source, weight_gradient_source
from econv.engines.spectral.triton.kernels import exponent, read_source, two_to
from econv.engines.spectral.triton.scheme import FIELDS, Scheme


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


class _Address(NamedTuple):
    """As much of a tensor as descriptors are encoded from."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Copies:
    """How a kernel copies the rows of matrices of halves, one of which follows the other.

    What depends on their shapes is made once; a call moves it to where they lie.
    """

    def __init__(
        self, layout: Scheme, parts: tuple[int, ...], rows: int, inners: Sequence[int]
    ) -> None:
        ends = list(itertools.accumulate(rows * inner for inner in inners))
        self.matrices = []
        for inner, end in zip(inners, ends, strict=True):
            matrix = torch.empty(rows, inner, dtype=torch.float16, device="meta")
            shared = gl.NVMMASharedLayout(min(128, 2 * inner), 16, rank=2)
            blocks = ([rows_of_a_copy(layout, part), inner] for part in parts)
            each = [TensorDescriptor.from_tensor(matrix, block, shared) for block in blocks]
            self.matrices.append((end - rows * inner, end, each))

    def __call__(self, memory: Tensor) -> list[Any]:
        """As descriptors of matrices that lie in some memory."""
        flat = memory.view(-1)
        return self._moved(lambda first, end: flat[first:end])

    def at(self, address: int) -> list[Any]:
        """As descriptors of matrices from an address on."""
        return self._moved(lambda first, end: _Address(address + 2 * first))

    def _moved(self, base: Callable[[int, int], Any]) -> list[Any]:
        found = []
        for first, end, each in self.matrices:
            there = base(first, end)
            for descriptor in each:
                moved = copy.copy(descriptor)
                moved.base = there
                found.append(moved)
        return found


def weight_copies(layout: Scheme, parts: tuple[int, ...], arranged: tuple[int, ...]) -> Copies:
    """Of weights that were arranged in rows, piece by piece."""
    rows = math.prod(arranged) // (FIELDS * layout.length)
    return Copies(layout, parts, rows, [FIELDS * size for size in layout.used_pieces])


def row_copies(layout: Scheme, parts: tuple[int, ...], packed: tuple[int, ...]) -> Copies:
    """Of a gradient that was packed in rows of pixels."""
    return Copies(layout, parts, math.prod(packed) // ROWS, [ROWS])
