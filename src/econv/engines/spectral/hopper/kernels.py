"""The warp-specialised kernels of the spectral engine, for Hopper GPUs.

`source` writes their text, in Gluon. Triton calls Gluon experimental: where a part of it is missing
`AVAILABLE` is false, and the kernels of `econv.engines.spectral.triton` run instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _PARTS = "fence_async_shared mbarrier tma warpgroup_mma warpgroup_mma_wait"
    _NAMES = {name: getattr(hopper, name) for name in _PARTS.split()}
    # All warps of a partition wait for one another; Triton 3.7 renamed it.
    _NAMES["thread_barrier"] = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
    AVAILABLE = True
except (ImportError, AttributeError):
    AVAILABLE = False

from econv.engines.spectral.hopper.source import convolution_source, weight_gradient_source
from econv.engines.spectral.triton.kernels import INTERPRETED, exponent, read_source, two_to
from econv.engines.spectral.triton.scheme import Scheme


def supported(device: torch.device) -> bool:
    """Whether a device runs these kernels: a Hopper GPU, and a Triton with all of Gluon."""
    able = AVAILABLE and not INTERPRETED and device.type == "cuda"
    return able and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=512)
def generated(layout: Scheme, parts: tuple[int, ...], chunk: int | None = None) -> Any:
    """The kernel of a plan's layer; of the gradient to the weights that for a chunk of slots."""
    if chunk is None:
        return _read(convolution_source(layout, parts), layout)["forward"]
    return _read(weight_gradient_source(layout, parts, chunk), layout)["weight_gradient"]


def _read(source: str, layout: Scheme) -> dict[str, Any]:
    ours = {"exponent": gluon.jit(exponent.fn), "two_to": gluon.jit(two_to.fn)}
    return read_source(source, layout, {"gluon": gluon, "gl": gl, **_NAMES, **ours})


class Copies:
    """How a kernel copies the rows of matrices of halves, one of which follows the other.

    What depends on their shapes is made once; a call moves it to where they lie.
    """

    def __init__(
        self, layout: Scheme, parts: tuple[int, ...], rows: int, inners: Sequence[int]
    ) -> None:
        self.matrices: list[tuple[slice, list[Any]]] = []
        first = 0
        for inner in inners:
            matrix = torch.empty(rows, inner, dtype=torch.float16, device="meta")
            shared = gl.NVMMASharedLayout(min(128, 2 * inner), 16, rank=2)
            blocks = [[2 * part * layout.batch, inner] for part in parts]  # at most 256 rows
            made = [TensorDescriptor.from_tensor(matrix, block, shared) for block in blocks]
            self.matrices.append((slice(first, first := first + rows * inner), made))

    def __call__(self, memory: Tensor) -> list[Any]:
        """As descriptors of matrices that lie in some memory."""
        flat, found = memory.view(-1), []
        for part, descriptors in self.matrices:
            base = flat[part]
            for descriptor in descriptors:
                moved = object.__new__(TensorDescriptor)  # what is checked has been checked
                moved.__dict__.update(descriptor.__dict__, base=base)
                found.append(moved)
        return found
