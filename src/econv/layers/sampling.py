"""Down- and upsampling that commute with the symmetries of the grid on every size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.layers.checks import (
    LARGEST_IMAGE,
    check_filled,
    check_rank,
    check_sizes,
    number,
    positive,
    truth,
)
from econv.layers.constants import WithConstants
from econv.layers.shift import mean_of_four
from econv.layers.slices import by_slices
from econv.tensors import memory_format, one_by_one, replicate, transformed, watched

__all__ = [
    "CentredAvgPool",
    "CentredAvgPool2d",
    "CentredAvgPool3d",
    "CentredMaxPool",
    "CentredMaxPool2d",
    "CentredMaxPool3d",
    "Downsample",
    "Downsample2d",
    "Downsample3d",
    "Enlarge",
    "Enlarge2d",
    "Enlarge3d",
    "NearestResize",
    "NearestResize2d",
    "NearestResize3d",
    "Recentre",
    "Recentre2d",
    "Recentre3d",
    "Upsample",
    "Upsample2d",
    "Upsample3d",
    "picked",
    "recentre",
    "window_count",
]


class Downsample(WithConstants):
    """Halves a map, in any number of dimensions."""

    dimension: int
    input_kind = "scalar"
    output_kind = "scalar"
    taps: Tensor

    def __init__(self, reduce: str = "mean", antialias: int = 4) -> None:
        super().__init__()
        if reduce not in ("mean", "max"):
            raise ValueError(f"expected reduce 'mean' or 'max'; got {reduce!r}")
        self.reduce = reduce
        self.antialias = read_antialias(antialias)
        self._refresh_constants()

    def _constants(self) -> dict[str, np.ndarray]:
        # With stride 2 on an axis that is padded by one pixel more after than before: centred on
        # pixels 0, 2, 4 …, and on the pixels next to these.
        line = binomial(self.antialias - 1)
        return {"taps": np.stack([np.append(line, 0.0), np.append(0.0, line)])}

    def forward(self, x: Tensor) -> Tensor:
        """Halve ``[batch, channels, …]``."""
        check_rank(x, self.dimension)
        check_filled(x)
        compiling = torch.compiler.is_compiling()
        if not compiling and torch._C._is_tracing() and torch.onnx.is_in_onnx_export():
            raise ValueError(
                "expected torch's current exporter, torch.onnx.export(…, dynamo=True): the older "
                "one writes no convolution whose kernel depends on the size, as "
                f"{type(self).__name__}'s does"
            )
        halved = halve(x, self.taps, self.reduce, self.antialias, self.dimension)
        return halved.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        more = f", antialias={self.antialias}" if self.antialias != 4 else ""
        return f"reduce={self.reduce!r}{more}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("antialias", 4)  # of layers that were pickled before it was there


class Downsample2d(Downsample):
    """Halves an image, n → ⌈n/2⌉, and commutes with quarter turns and flips on every size.

    `stride=2` and `max_pool2d` keep pixels 0, 2, 4 …, which mirror onto themselves on one parity of
    the size only (a stride-2 convolution with ``padding="same"`` on odd sizes, `max_pool2d(2)` on
    even ones; in general where (n + 2·padding − extent) is a multiple of the stride). Here the
    samples lie symmetrically on all: on odd sizes on pixels, smoothed by [1 2 1]/4, on even
    sizes between them, smoothed by [1 3 3 1]/8. The parity enters by arithmetic, not by a branch,
    so that exported graphs keep dynamic sizes.

    Channels are treated alike: images, fields and vector components may all pass.

    Args:
        reduce: ``"mean"`` (default), or ``"max"`` for the maximum of each 3×3 neighbourhood first,
            which replaces `max_pool2d`. A maximum has kinks, and costs most of the symmetry at
            angles between quarter turns.
        antialias: taps of the low-pass along each axis, 4 (default), 6, 8 or any other even number:
            binomial ones, as those above, one fewer on odd sizes. Of n taps the answer to a
            frequency of f per pixel is cos(πf)ⁿ⁻¹. Half of the new grid's highest frequency, f =
            1/8, passes with .79, .68 and .57 for 4, 6 and 8 taps; what would be folded onto it, f =
            3/8, with .056, .0082 and .0012. Binomial kernels are nearly the same in all directions,
            as sharper ones are not, which costs more than what they let pass is worth.

    Raises:
        ValueError: for an unknown ``reduce``, or taps that are no even number from 4 to 16; when
            called, for what is not ``[batch, channels, height, width]``, and by the older of
            torch's ONNX exporters.

    >>> half = Downsample2d()
    >>> half(torch.randn(1, 3, 8, 8)).shape[-1], half(torch.randn(1, 3, 9, 9)).shape[-1]
    (4, 5)
    """

    dimension = 2


class Downsample3d(Downsample):
    """Halves a volume, n → ⌈n/2⌉, and commutes with the symmetries of the cube on every size.

    What :class:`Downsample2d` does along two axes it does along three; arguments are the same.

    Raises:
        ValueError: for an unknown ``reduce``, or taps that are no even number from 4 to 16; when
            called, for what is not ``[batch, channels, depth, height, width]``, and by the older of
            torch's ONNX exporters.

    >>> half = Downsample3d()
    >>> half(torch.randn(1, 2, 8, 8, 8)).shape[2:], half(torch.randn(1, 2, 7, 8, 9)).shape[2:]
    (torch.Size([4, 4, 4]), torch.Size([4, 4, 5]))
    """

    dimension = 3


class Upsample(WithConstants):
    """Doubles a map, in any number of dimensions."""

    dimension: int
    input_kind = "scalar"
    output_kind = "scalar"
    antialias = 4  # of layers that were pickled before it was there
    taps: Tensor

    def __init__(self, antialias: int = 4) -> None:
        super().__init__()
        self.antialias = read_antialias(antialias)
        self._refresh_constants()

    def _constants(self) -> dict[str, np.ndarray]:
        # What turns the four taps of linear interpolation into as many as are wanted.
        return {} if self.antialias == 4 else {"taps": binomial(self.antialias - 3)}

    def forward(self, x: Tensor, size: int | tuple[int, ...] | None = None) -> Tensor:
        """Double ``[batch, channels, …]``."""
        check_rank(x, self.dimension)
        check_filled(x)
        doubled = self._doubled(x, size)
        if self.antialias == 4:
            return doubled
        smooth = smoothed(doubled, self.taps, self.antialias - 3, self.dimension)
        return smooth.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        return f"antialias={self.antialias}" if self.antialias != 4 else ""

    def _doubled(self, x: Tensor, size: int | tuple[int, ...] | None) -> Tensor:
        if size is None:
            return functional.interpolate(x, scale_factor=2.0, mode=LINEAR[self.dimension])
        wanted = size if isinstance(size, (tuple, list)) else (size,) * self.dimension
        fitting = [(2 * n - 1, 2 * n) for n in x.shape[2:]]
        traced = torch.compiler.is_compiling() or torch._C._is_tracing()  # of its own numbers
        if not traced and not (
            len(wanted) == self.dimension
            and all(isinstance(n, int | torch.SymInt) for n in wanted)
            and all(low <= n <= high for n, (low, high) in zip(wanted, fitting, strict=True))
        ):
            raise ValueError(
                f"expected a size of twice {tuple(x.shape[2:])}, or one less; got {size!r}"
            )
        enlarged = x
        for dim, length in enumerate(wanted, 2):
            enlarged = _double(enlarged, dim, length)
        return enlarged.contiguous(memory_format=memory_format(x))


class Upsample2d(Upsample):
    """Doubles an image by linear interpolation, and commutes with quarter turns and flips.

    n → 2n, or to ``size``, 2n or 2n − 1 for each side: the sizes that :class:`Downsample2d` halves
    to n. Like there, the parity of the size enters by arithmetic.

    Args:
        antialias: taps of the low-pass that fills the finer grid, along each axis: 4 (default) is
            linear interpolation; with 6, 8 or any other even number these are the taps of
            :class:`Downsample2d`, which leave less of what the coarse grid repeats.

    Raises:
        ValueError: for taps that are no even number from 4 to 16; when called, for a ``size`` that
            is not twice the image's or one less.

    >>> Upsample2d()(torch.randn(1, 3, 8, 8)).shape[-1]
    16
    >>> Upsample2d()(torch.randn(1, 3, 8, 8), size=15).shape[-1]
    15
    """

    dimension = 2


class Upsample3d(Upsample):
    """Doubles a volume by linear interpolation; what :class:`Upsample2d` is to images.

    Raises:
        ValueError: for taps that are no even number from 4 to 16; when called, for a ``size`` that
            is not twice the volume's or one less.

    >>> Upsample3d()(torch.randn(1, 2, 4, 4, 4), size=(7, 8, 8)).shape[2:]
    torch.Size([7, 8, 8])
    """

    dimension = 3


LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
"""What `torch.nn.functional.interpolate` calls linear interpolation."""


def halve(x: Tensor, taps: Tensor, reduce: str, count: int, dimension: int = 2) -> Tensor:
    """What :class:`Downsample2d` computes, in operations that any tracer can follow."""
    if reduce == "max":
        x = by_dimension("max_pool", dimension)(x, 3, stride=1, padding=1)
    sides = (count // 2 - 1, count // 2)

    def across(x: Tensor) -> Tensor:
        both = (_taps(x.shape[2], taps), _taps(x.shape[3], taps))
        return _means(x, both, (count, count), sides, 2)

    def along(x: Tensor) -> Tensor:
        return _means(x, (_taps(x.shape[2], taps), taps.new_ones(1)), (count, 1), sides, 2)

    return by_slices(x, dimension, across, along)


def by_dimension(name: str, dimension: int) -> Callable[..., Tensor]:
    """A function of torch that has the dimension in its name.

    >>> by_dimension("avg_pool", 3)(torch.ones(1, 1, 2, 2, 2), 2).item()
    1.0
    """
    found: Callable[..., Tensor] = getattr(functional, f"{name}{dimension}d")
    return found


def _means(
    x: Tensor,
    lines: tuple[Tensor, Tensor],
    counts: tuple[int, int],
    sides: tuple[int, int],
    step: int = 1,
) -> Tensor:
    """Weighted means of ``counts`` pixels, ``step`` apart, along the axes that have several.

    So many pixels are put before and after them on both ``sides``.
    """
    channels = x.shape[1]
    kernels = (lines[0][:, None] * lines[1]).to(x.dtype).expand(channels, 1, *counts)
    axes = tuple(axis for axis, count in enumerate(counts, 2) if count > 1)
    steps = tuple(step if count > 1 else 1 for count in counts)
    return functional.conv2d(replicate(x, *sides, axes), kernels, stride=steps, groups=channels)


def binomial(count: int) -> np.ndarray:
    """The binomial coefficients over their sum, so many.

    >>> binomial(3).tolist()
    [0.25, 0.5, 0.25]
    """
    line = np.array([math.comb(count - 1, k) for k in range(count)], dtype=np.float64)
    return line / line.sum()


def read_antialias(given: object) -> int:
    whole = isinstance(given, int) and not isinstance(given, bool)
    if not whole or given not in range(4, 18, 2):
        raise ValueError(
            f"expected antialias as an even number of taps from 4 to 16; got {given!r}"
        )
    return int(given)  # type: ignore[call-overload]


def smoothed(x: Tensor, taps: Tensor, count: int, dimension: int = 2) -> Tensor:
    """Weighted means of ``count`` pixels, an odd number, along all axes."""
    sides = (count // 2, count // 2)

    def across(x: Tensor) -> Tensor:
        return _means(x, (taps, taps), (count, count), sides)

    def along(x: Tensor) -> Tensor:
        return _means(x, (taps, taps.new_ones(1)), (count, 1), sides)

    return by_slices(x, dimension, across, along)


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
    weight = (position - low).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1 - dim))
    index = low.long()
    before = x.index_select(dim, index.clamp(0, last))
    after = x.index_select(dim, (index + 1).clamp(0, last))
    return before * (1 - weight) + after * weight


class Enlarge(nn.Module):
    """Linear interpolation about the centre, in any number of dimensions."""

    dimension: int
    input_kind = "scalar"
    output_kind = "scalar"

    def __init__(self, factor: int, excess: int = 0) -> None:
        super().__init__()
        self.factor = positive("factor", factor, LARGEST_IMAGE)
        if isinstance(excess, bool) or not isinstance(excess, int):
            raise ValueError(f"expected excess as a whole number of pixels; got {excess!r}")
        self.excess = excess

    def forward(self, x: Tensor) -> Tensor:
        """Enlarge ``[batch, channels, …]``."""
        check_rank(x, self.dimension)
        check_filled(x)
        return self.enlarge(x, recentre)

    def enlarge(self, x: Tensor, recentre: Callable[..., Tensor]) -> Tensor:
        """Interpolate, and take the points that ``recentre`` finds."""
        axes = range(2, 2 + self.dimension)
        sizes = [x.shape[axis] * self.factor + self.excess for axis in axes]
        check_sizes(*sizes)
        mode = LINEAR[self.dimension]
        enlarged = functional.interpolate(x, scale_factor=float(self.factor), mode=mode)
        return recentre(enlarged, *sizes)

    def extra_repr(self) -> str:
        return f"factor={self.factor}" + (f", excess={self.excess}" if self.excess else "")


class Enlarge2d(Enlarge):
    """Linear interpolation to ``factor`` · n + ``excess`` pixels, symmetric about the centre.

    Exact under quarter turns and flips on every size; with a factor of 2 and no excess it is
    :class:`Upsample2d`.

    Raises:
        ValueError: for a ``factor`` below 1 or numbers that are not whole; when called, where no
            pixel would be left.

    >>> Enlarge2d(3, excess=-1)(torch.randn(1, 2, 8, 8)).shape[-1]
    23
    """

    dimension = 2


class Enlarge3d(Enlarge):
    """Linear interpolation of volumes to ``factor`` · n + ``excess`` voxels, about the centre.

    Raises:
        ValueError: for a ``factor`` below 1 or numbers that are not whole; when called, where no
            voxel would be left.

    >>> Enlarge3d(3, excess=-1)(torch.randn(1, 2, 4, 4, 4)).shape[2:]
    torch.Size([11, 11, 11])
    """

    dimension = 3


def window_count(size: int, extent: int, stride: int, padding: int) -> int:
    """How many windows torch puts on an axis; ``padding`` is that of both its ends together.

    >>> window_count(224, extent=3, stride=2, padding=2)
    112
    """
    return (size + padding - extent) // stride + 1


def picked(x: Tensor, step: int) -> Tensor:
    """Every ``step``-th pixel along all axes, in the layout of ``x``, as the gradient is.

    >>> picked(torch.arange(9.0).view(1, 1, 3, 3), 2).flatten().tolist()
    [0.0, 2.0, 6.0, 8.0]
    """
    followed = torch.compiler.is_compiling() or watched(x) or transformed()
    found: Tensor = _each(x, step, 2) if followed else _Picked.apply(x, step)
    return found.contiguous(memory_format=memory_format(x))


def _each(x: Tensor, step: int, first: int, axes: int | None = None) -> Tensor:
    """Every ``step``-th number along so many axes, from the first on; by default to the last."""
    axes = x.ndim - first if axes is None else axes
    return x[(slice(None),) * first + (slice(None, None, step),) * axes]


class _Picked(torch.autograd.Function):
    """The gradient of slices would be filled with zeros for each, in another layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int) -> Tensor:
        ctx.like, ctx.step = (x.shape, memory_format(x)), step
        (words,) = _in_words(x)
        found = _each(words, step, 1, x.ndim - 2).contiguous().view(x.dtype).movedim(-1, 1)
        return found.contiguous(memory_format=memory_format(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return one_by_one(partial(_Picked.spread, ctx), gradient), None

    @staticmethod
    def spread(ctx: Any, gradient: Tensor) -> Tensor:
        """Every number in its place, and zeros between them."""
        (shape, layout), step = ctx.like, ctx.step
        found = torch.empty(
            shape, dtype=gradient.dtype, device=gradient.device, memory_format=layout
        ).zero_()
        into, given = _in_words(found, gradient)
        _each(into, step, 1, found.ndim - 2).copy_(given)
        return found


def _in_words(*images: Tensor) -> tuple[Tensor, ...]:
    """Images with channels as the last axis, in numbers of eight bytes if all of them fit.

    torch copies number by number where pixels are apart.
    """
    last = tuple(x.movedim(1, -1) for x in images)
    several = 8 // images[0].element_size()
    whole = not torch.is_grad_enabled() and all(
        x.is_contiguous()
        and not x.is_neg()  # whose numbers are negated when they are read
        and x.shape[-1] % several == 0
        and x.storage_offset() % several == 0
        for x in last
    )
    return tuple(x.view(torch.int64) for x in last) if whole else last


def recentre(x: Tensor, *sizes: int, fill: float = 0.0, step: int = 1) -> Tensor:
    """The points, a pixel apart, about the centre of a map: so many along each of its axes.

    torch puts windows on pixels 0, s, 2s … and leaves what remains at the far end alone: on sizes
    where something remains, the samples lie off the centre and do not turn onto themselves. On
    the n − r points about the centre, r what would remain, the same windows lie symmetrically.
    Where r is even this crops; where it is odd the points lie between two pixels and are their
    mean. Points outside of the image are ``fill``. Of the points each ``step``-th is taken.

    Raises:
        ValueError: for another number of sizes than the map has axes.

    >>> recentre(torch.arange(5.0).expand(1, 1, 5, 5), 5, 4)[0, 0, 0].tolist()
    [0.5, 1.5, 2.5, 3.5]
    """
    if len(sizes) != x.ndim - 2:
        raise ValueError(f"expected {x.ndim - 2} sizes for {tuple(x.shape)}; got {sizes}")
    found = points_about_centre(x, *sizes, fill=fill, step=step)
    return found.contiguous(memory_format=memory_format(x))


def points_about_centre(x: Tensor, *sizes: int, fill: float = 0.0, step: int = 1) -> Tensor:
    """:func:`recentre` in whatever layout comes out; sizes may be symbolic."""
    whole = [x.shape[2 + axis] for axis in range(len(sizes))]
    known = not _symbolic(*whole, *sizes)
    if known and [n - size for n, size in zip(whole, sizes, strict=True)] == [1, 1]:
        return mean_of_four(x, step)  # points between four pixels
    found = x
    for axis, size in enumerate(sizes):
        found = _recentre_axis(found, 2 + axis, size, fill, len(sizes) - 1 - axis)
    return found if step == 1 else _each(found, step, 2, len(sizes))


def _recentre_axis(x: Tensor, dim: int, size: int, fill: float, rest: int) -> Tensor:
    whole = x.shape[dim]
    if not _symbolic(whole, size):
        if size == whole:
            return x
        if (whole - size) % 2:
            x = (x.narrow(dim, 0, whole - 1) + x.narrow(dim, 1, whole - 1)) / 2
        each = (size - x.shape[dim]) // 2
        return functional.pad(x, [0, 0] * rest + [each, each], value=fill) if each else x
    # A symbolic size: gathered by index, so that no parity is frozen into the graph.
    # Sums and not differences are halved: of negative numbers ONNX rounds another way.
    before = torch.arange(size, device=x.device) + ((whole + size) // 2 - size)
    after = before + (whole + size) % 2
    inside = ((before >= 0) & (after < whole)).reshape(-1, *[1] * rest)
    pairs = [x.index_select(dim, index.clamp(0, whole - 1)) for index in (before, after)]
    return torch.where(inside, (pairs[0] + pairs[1]) / 2, fill)


class Recentre(nn.Module):
    """Pads and crops about the centre, in any number of dimensions."""

    dimension: int
    input_kind = "scalar"
    output_kind = "scalar"

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.fill = number("fill", fill)

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        """The points about the centre of ``[batch, channels, …]``, so many along each axis."""
        check_rank(x, self.dimension)
        check_filled(x)
        check_sizes(*sizes)
        return recentre(x, *sizes, fill=self.fill)

    def extra_repr(self) -> str:
        return f"fill={self.fill:g}"


class Recentre2d(Recentre):
    """Pads and crops to a size about the centre, on every size: :func:`recentre` as a layer.

    Padding of one pixel more on one side of an image than on the other does not turn with it; half
    a pixel more on both sides does.

    Raises:
        ValueError: for a ``fill`` that is not finite; when called, for sizes that are not two whole
            numbers.

    >>> Recentre2d()(torch.randn(1, 3, 8, 8), 9, 7).shape[2:]
    torch.Size([9, 7])
    """

    dimension = 2


class Recentre3d(Recentre):
    """Pads and crops volumes to a size about the centre: :func:`recentre` as a layer.

    Raises:
        ValueError: for a ``fill`` that is not finite; when called, for sizes that are not three
            whole numbers.

    >>> Recentre3d()(torch.randn(1, 3, 8, 8, 8), 9, 7, 8).shape[2:]
    torch.Size([9, 7, 8])
    """

    dimension = 3


class NearestResize(nn.Module):
    """Takes the nearest pixel, in any number of dimensions."""

    dimension: int
    input_kind = "scalar"
    output_kind = "scalar"

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        """Resize ``[batch, channels, …]``: so many pixels along each axis."""
        check_rank(x, self.dimension)
        check_filled(x)
        if len(sizes) != self.dimension:
            raise ValueError(f"expected {self.dimension} sizes; got {sizes}")
        check_sizes(*sizes)
        resized = nearest_pixels(x, *sizes)
        return resized.contiguous(memory_format=memory_format(x))


class NearestResize2d(NearestResize):
    """Takes the nearest pixel, to any size, and commutes with quarter turns and flips on all.

    `interpolate(mode="nearest")` takes the pixel to the left of a point where the new size is no
    multiple of the old one. Here it is the one whose centre is nearest, and the mean of two where
    two are equally near; on multiples the result is torch's.

    Raises:
        ValueError: when called, for sizes that are not two whole numbers.

    >>> NearestResize2d()(torch.arange(2.0).expand(1, 1, 2, 2), 1, 3)[0, 0].tolist()
    [[0.0, 0.5, 1.0]]
    """

    dimension = 2


class NearestResize3d(NearestResize):
    """Takes the nearest voxel, to any size; what :class:`NearestResize2d` is to images.

    Raises:
        ValueError: when called, for sizes that are not three whole numbers.

    >>> NearestResize3d()(torch.randn(1, 2, 4, 4, 4), 6, 8, 5).shape[2:]
    torch.Size([6, 8, 5])
    """

    dimension = 3


def nearest_pixels(x: Tensor, *sizes: int) -> Tensor:
    """What :class:`NearestResize2d` computes, in operations that any tracer can follow."""
    for dim, size in enumerate(sizes, 2):
        x = _nearest_axis(x, dim, size)
    return x


def _nearest_axis(x: Tensor, dim: int, size: int) -> Tensor:
    whole = x.shape[dim]
    place = torch.arange(size, device=x.device)
    # In halves of pixels, so that numbers stay whole: seen from both ends, which agree but on ties.
    before = ((2 * place + 1) * whole) // (2 * size)
    after = whole - 1 - ((2 * (size - 1 - place) + 1) * whole) // (2 * size)
    return (x.index_select(dim, before) + x.index_select(dim, after)) / 2


def _symbolic(*sizes: object) -> bool:
    return any(not isinstance(size, int) for size in sizes)


class CentredPool(nn.Module):
    """As many windows as torch's pooling has, of the same size, symmetric on every size."""

    dimension: int
    input_kind = "scalar"
    output_kind = "scalar"

    def __init__(
        self, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.kernel_size = positive("kernel_size", kernel_size, LARGEST_IMAGE)
        self.stride = (
            self.kernel_size if stride is None else positive("stride", stride, LARGEST_IMAGE)
        )
        if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
            raise ValueError(f"expected padding as one whole number, 0 or more; got {padding!r}")
        if 2 * padding > self.kernel_size:
            raise ValueError(
                f"expected padding of at most half of kernel_size={kernel_size}; got {padding}"
            )
        self.padding = padding
        self.ceil_mode = truth("ceil_mode", ceil_mode)

    def points(self, size: int) -> int:
        """How many points of an axis the windows fill, without the padding."""
        # As in torch, no window starts in the padding at the far end: only so many more pixels may
        # be missing from the last window.
        most = min(self.stride - 1, self.kernel_size - self.padding - 1)
        missing = most if self.ceil_mode else 0
        # A window as wide as both paddings sees no pixel alone: then there must be two.
        least = self.kernel_size - 2 * self.padding or self.stride - missing
        if not _symbolic(size) and size < least:
            raise ValueError(
                f"expected an image of at least {least} pixels along each side; got {size}"
            )
        windows = window_count(size + missing, self.kernel_size, self.stride, 2 * self.padding)
        return self.stride * (windows - 1) + self.kernel_size - 2 * self.padding

    def forward(self, x: Tensor) -> Tensor:
        """Pool ``[batch, channels, …]``."""
        check_rank(x, self.dimension)
        check_filled(x)
        return self.pool(x, recentre)

    def pool(self, x: Tensor, recentre: Callable[..., Tensor]) -> Tensor:
        """Pool the points that ``recentre`` finds."""
        raise NotImplementedError

    def _sizes(self, x: Tensor, border: int = 0) -> list[int]:
        axes = range(2, 2 + self.dimension)
        return [self.points(x.shape[axis]) + 2 * border for axis in axes]

    def extra_repr(self) -> str:
        text = f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return text + (", ceil_mode=True" if self.ceil_mode else "")


class CentredMaxPool(CentredPool):
    """Max pooling about the centre, in any number of dimensions."""

    def pool(self, x: Tensor, recentre: Callable[..., Tensor]) -> Tensor:
        """Pool the points that ``recentre`` finds."""
        centred = recentre(x, *self._sizes(x), fill=-torch.inf)
        pool = by_dimension("max_pool", self.dimension)
        return pool(centred, self.kernel_size, self.stride, self.padding)


class CentredMaxPool2d(CentredMaxPool):
    """`MaxPool2d` that commutes with quarter turns and flips on every size.

    As many windows of the same size, moved to lie symmetrically: see :func:`recentre`. Where
    torch's windows are symmetric already, the result is torch's.

    Raises:
        ValueError: for numbers that are not whole, or padding of more than half a window; when
            called, for images smaller than a window.

    >>> pool = CentredMaxPool2d(3, stride=2, padding=1)
    >>> pool(torch.randn(1, 3, 112, 112)).shape[-1], pool(torch.randn(1, 3, 9, 9)).shape[-1]
    (56, 5)
    """

    dimension = 2


class CentredMaxPool3d(CentredMaxPool):
    """`MaxPool3d` that commutes with the symmetries of the cube on every size.

    Raises:
        ValueError: for numbers that are not whole, or padding of more than half a window; when
            called, for volumes smaller than a window.

    >>> CentredMaxPool3d(3, stride=2, padding=1)(torch.randn(1, 2, 9, 8, 9)).shape[2:]
    torch.Size([5, 4, 5])
    """

    dimension = 3


class CentredAvgPool(CentredPool):
    """Average pooling about the centre, in any number of dimensions."""

    def __init__(
        self,
        kernel_size: int,
        stride: int | None = None,
        padding: int = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.count_include_pad = truth("count_include_pad", count_include_pad)

    def pool(self, x: Tensor, recentre: Callable[..., Tensor]) -> Tensor:
        """Pool the points that ``recentre`` finds."""
        known = isinstance(x, Tensor)  # and no stand-in of a trace, which does not tell its dtype
        if self.dimension == 3 and known and x.dtype == torch.float16 and x.is_cpu:
            return self.pool(x.float(), recentre).to(x.dtype)  # torch has no such kernel
        means = self._average(recentre(x, *self._sizes(x)), self.padding)
        if not self.ceil_mode and (self.count_include_pad or not self.padding):
            return means
        # Windows may reach over the image, and over the padding: divide by what they count.
        border = self.padding if self.count_include_pad else 0
        axes = range(2, 2 + self.dimension)
        ones = x.new_ones(1, 1, *[x.shape[axis] + 2 * border for axis in axes])
        counted = recentre(ones, *self._sizes(x, border))
        return means / self._average(counted, self.padding - border)

    def _average(self, x: Tensor, padding: int) -> Tensor:
        if self.dimension == 3 and padding:  # torch wants windows that fit without it
            x, padding = functional.pad(x, (padding,) * 6), 0
        average = by_dimension("avg_pool", self.dimension)
        return average(x, self.kernel_size, self.stride, padding)

    def extra_repr(self) -> str:
        counted = "" if self.count_include_pad else ", count_include_pad=False"
        return super().extra_repr() + counted


class CentredAvgPool2d(CentredAvgPool):
    """`AvgPool2d` that commutes with quarter turns and flips on every size.

    As many windows of the same size, moved to lie symmetrically: see :func:`recentre`. With
    ``kernel_size=1`` it takes every ``stride``-th pixel, or means of pixels where these lie between
    them.

    Raises:
        ValueError: for numbers that are not whole, or padding of more than half a window; when
            called, for images smaller than a window.

    >>> CentredAvgPool2d(2)(torch.randn(1, 3, 9, 9)).shape[-1]
    4
    """

    dimension = 2


class CentredAvgPool3d(CentredAvgPool):
    """`AvgPool3d` that commutes with the symmetries of the cube on every size.

    Raises:
        ValueError: for numbers that are not whole, or padding of more than half a window; when
            called, for volumes smaller than a window.

    >>> CentredAvgPool3d(2)(torch.randn(1, 2, 9, 9, 9)).shape[2:]
    torch.Size([4, 4, 4])
    """

    dimension = 3
