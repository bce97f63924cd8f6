"""Down- and upsampling that commute with quarter turns and flips on every size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.engines import dense
from econv.layers.checks import check_rank
from econv.layers.constants import WithConstants

__all__ = ["Downsample2d", "Upsample2d"]


class Downsample2d(WithConstants):
    """Halves an image, n → ⌈n/2⌉, and commutes with quarter turns and flips on every size.

    `stride=2` and `max_pool2d` keep pixels 0, 2, 4 …, which mirror onto themselves on one parity of
    the size only (a stride-2 convolution with ``padding="same"`` on odd sizes, `max_pool2d(2)` on
    even ones; in general where (n + 2·padding − extent) is a multiple of the stride). Here the
    samples lie symmetrically on all: on odd sizes on pixels, smoothed by [1 2 1]/4, on even
    sizes between them, smoothed by [1 3 3 1]/8. The parity enters by arithmetic, not by a branch,
    so that exported graphs keep dynamic sizes.

    ``reduce="max"`` takes the maximum of each 3×3 neighbourhood first and replaces `max_pool2d`.
    Channels are treated alike: images, fields and vector components may all pass.

    >>> half = Downsample2d()
    >>> half(torch.randn(1, 3, 8, 8)).shape[-1], half(torch.randn(1, 3, 9, 9)).shape[-1]
    (4, 5)
    """

    input_kind = "scalar"
    output_kind = "scalar"
    taps: Tensor

    def __init__(self, reduce: str = "mean") -> None:
        super().__init__()
        if reduce not in ("mean", "max"):
            raise ValueError(f"expected reduce 'mean' or 'max'; got {reduce!r}")
        self.reduce = reduce
        self._refresh_constants()

    def _constants(self) -> dict[str, np.ndarray]:
        # Four taps with stride 2 on an axis padded by one pixel before and two after: centred on
        # pixels 0, 2, 4 …, and on the pixels next to these.
        return {"taps": np.array([[1.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 1.0]]) / 4}

    def forward(self, x: Tensor) -> Tensor:
        """Halve ``[batch, channels, height, width]``."""
        check_rank(x)
        halved = halve(x, self.taps, self.reduce)
        return halved.contiguous(memory_format=dense.memory_format(x))

    def extra_repr(self) -> str:
        return f"reduce={self.reduce!r}"


class Upsample2d(nn.Module):
    """Doubles an image by linear interpolation, and commutes with quarter turns and flips.

    n → 2n, or to ``size``, 2n or 2n − 1 for each side: the sizes that :class:`Downsample2d` halves
    to n. Like there, the parity of the size enters by arithmetic.

    >>> Upsample2d()(torch.randn(1, 3, 8, 8)).shape[-1]
    16
    >>> Upsample2d()(torch.randn(1, 3, 8, 8), size=15).shape[-1]
    15
    """

    input_kind = "scalar"
    output_kind = "scalar"

    def forward(self, x: Tensor, size: int | tuple[int, int] | None = None) -> Tensor:
        """Double ``[batch, channels, height, width]``."""
        check_rank(x)
        if size is None:
            return functional.interpolate(x, scale_factor=2.0, mode="bilinear")
        wanted = size if isinstance(size, tuple | list) else (size, size)
        fitting = [(2 * n - 1, 2 * n) for n in x.shape[2:]]
        if not torch.compiler.is_compiling() and not (
            len(wanted) == 2
            and all(isinstance(n, int | torch.SymInt) for n in wanted)
            and all(low <= n <= high for n, (low, high) in zip(wanted, fitting, strict=True))
        ):
            raise ValueError(
                f"expected a size of twice {tuple(x.shape[2:])}, or one less; got {size!r}"
            )
        enlarged = _double(_double(x, 2, wanted[0]), 3, wanted[1])
        return enlarged.contiguous(memory_format=dense.memory_format(x))


def halve(x: Tensor, taps: Tensor, reduce: str) -> Tensor:
    """What :class:`Downsample2d` computes, in operations that any tracer can follow."""
    if reduce == "max":
        x = functional.max_pool2d(x, 3, stride=1, padding=1)
    kernel = _taps(x.shape[2], taps)[:, None] * _taps(x.shape[3], taps)
    padded = functional.pad(x, (1, 2, 1, 2), mode="replicate")
    channels = x.shape[1]
    kernels = kernel.to(x.dtype).expand(channels, 1, 4, 4)
    return functional.conv2d(padded, kernels, stride=2, groups=channels)


def _taps(size: int, taps: Tensor) -> Tensor:
    between = (1 - size % 2) / 2  # ½ on even sizes, where samples lie between two pixels
    return taps[0] * (1 - between) + taps[1] * between


def _double(x: Tensor, dim: int, size: int) -> Tensor:
    """Linear interpolation of one axis to ``size`` points half a pixel apart, about its centre."""
    # Gathered by index, so that the output has the size that was asked for, symbolic or not.
    last = x.shape[dim] - 1
    quarter = (1 - size % 2) / 4  # on even sizes no new point lies on an old one
    position = torch.arange(size, device=x.device, dtype=torch.float64) / 2 - quarter
    low = position.floor()
    weight = (position - low).to(x.dtype).reshape(-1, *[1] * (3 - dim))
    index = low.long()
    before = x.index_select(dim, index.clamp(0, last))
    after = x.index_select(dim, (index + 1).clamp(0, last))
    return before * (1 - weight) + after * weight
