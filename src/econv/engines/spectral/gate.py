"""The gate of compiled code: an address is given away once nothing can be wrong about it.

What the kernels in C++ get are numbers. They look at nothing; all that could lead them out of a
tensor's memory is checked here, and nowhere else is an address taken.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["UnreadableError", "address", "check", "check_plain"]

_MOST = 1 << 40
"""No number of pixels, channels or taps is larger, so that no product of a few overflows."""

_PLAIN = (Tensor, nn.Parameter)


class UnreadableError(ValueError):
    """A tensor that compiled code cannot take; the engine is not at fault."""


def address(
    name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], apart: bool = False
) -> int:
    """Where the numbers of a tensor lie, 0 if there is none.

    It is a plain one in the memory of the CPU, of this dtype and shape, whose numbers follow one
    another without gaps; those of images ``apart`` only within each image.
    """
    if x is None:
        return 0
    check_plain(name, x, dtype)
    if x.is_neg():
        raise UnreadableError(f"expected {name} with its signs in memory; got a lazy negative")
    if x.shape != shape:
        raise UnreadableError(f"expected {name} of shape {tuple(shape)}; got {tuple(x.shape)}")
    if not x.is_contiguous() and not (apart and x[0].is_contiguous() and x.stride(0) < _MOST):
        raise UnreadableError(f"expected {name} without gaps; got strides {x.stride()}")
    return x.data_ptr()


def check_plain(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Stop unless a tensor is a plain one, in memory that is all there: it may be copied."""
    plain = type(x) in _PLAIN and x.is_cpu and x.layout is torch.strided
    if not plain or x.dtype is not dtype:
        raise UnreadableError(
            f"expected {name} as a plain tensor of {dtype} on cpu; "
            f"got a {type(x).__name__} of {x.dtype} on {x.device}, {x.layout}"
        )
    try:
        held = x.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # what torch.func wraps has none
        raise UnreadableError(f"expected {name} as a plain tensor; got a wrapped one") from None
    if x.is_contiguous():
        last = x.numel()
    else:
        last = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    needed = (x.storage_offset() + last) * x.itemsize
    if held < needed and x.numel():
        raise UnreadableError(
            f"expected {name} with its memory of {needed} bytes; got a tensor whose storage has "
            f"{held}: it was freed or resized"
        )


def check(holds: bool, what: str) -> None:
    """Stop where numbers of a job do not belong together."""
    if not holds:
        raise UnreadableError(f"expected {what}; got another job for compiled code")
