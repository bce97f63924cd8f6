"""Windows that begin in the corner of an image, and turn with the frame of every orientation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.groups import Group, GroupLike
from econv.layers.checks import check_rank, positive, read_group, truth
from econv.tensors import memory_format

__all__ = ["GroupWindows2d", "points_in_frames"]


class GroupWindows2d(nn.Module):
    """The points that a plain convolution's or pooling's windows fill, in every frame.

    torch begins in one corner of an image: what remains beyond the last window lies at the far
    ends. Run on a turned image, the windows lie elsewhere in it. Here the map of each orientation
    is padded and cropped as torch would in the frame of that orientation, ``[batch, fields * order,
    …]`` to the same channels: windows without padding, by the same stride, then fill all of it, and
    each orientation reads what the plain layer reads in an image that is turned so. That is
    equivariant on all sizes. On quarter turns and flips the points are pixels; for other elements
    they are interpolated linearly.

    Args:
        group: a :class:`~econv.Group` or its name.
        extent: pixels from the first to the last that a window reads.
        step: pixels from one window to the next.
        padding: pixels before and after the image along each axis, as the plain layer has them;
            or ``"same"`` for ⌈n / step⌉ windows, as TensorFlow pads.
        reach: further pixels that the windows here have before and after those.
        fill: what lies outside of the image.
        ceil_mode: as in torch's poolings.
        lifts: whether it reads an image ``[batch, channels, …]``, each channel of which becomes a
            field.

    Raises:
        ValueError: for a group of space, or pixels that are no whole numbers; when called, for
            channels that are not whole fields, and images smaller than a window.

    >>> windows = GroupWindows2d("p4", extent=3, step=2, padding=(1, 1))
    >>> windows(torch.randn(1, 8, 56, 56)).shape[2:], windows(torch.randn(1, 8, 57, 57)).shape[2:]
    (torch.Size([57, 57]), torch.Size([59, 59]))
    """

    output_kind = "regular"

    def __init__(
        self,
        group: GroupLike,
        extent: int,
        step: int,
        padding: tuple[int, int] | str = (0, 0),
        reach: tuple[int, int] = (0, 0),
        fill: float = 0.0,
        ceil_mode: bool = False,
        lifts: bool = False,
    ) -> None:
        super().__init__()
        self.group = read_group(group, 2, type(self).__name__)
        self.extent, self.step = positive("extent", extent), positive("step", step)
        self.padding = padding if padding == "same" else _pair("padding", padding, " or 'same'")
        self.reach = _pair("reach", reach)
        if not isinstance(fill, int | float) or isinstance(fill, bool):
            raise ValueError(f"expected fill as a number; got {fill!r}")
        self.fill = float(fill)
        self.ceil_mode, self.lifts = truth("ceil_mode", ceil_mode), truth("lifts", lifts)
        self.corners = corners(self.group)

    @property
    def input_kind(self) -> str:
        """What it reads."""
        return "scalar" if self.lifts else "regular"

    def points(self, size: int) -> tuple[int, int]:
        """The first point of an axis in the frame of the images, and how many there are."""
        if isinstance(self.padding, str):
            windows = (size + self.step - 1) // self.step
            lacking = (windows - 1) * self.step + self.extent - size
            if self.extent < self.step:  # it is none where nothing lacks, said without a question
                lacking = lacking * ((lacking + self.step) // self.step)
            before = lacking // 2
        else:
            before, after = self.padding
            space = size + before + after - self.extent
            if isinstance(space, int) and space < 0:
                least = self.extent - before - after
                raise ValueError(
                    f"expected an image of at least {least} pixels along each side; got {size}"
                )
            if self.ceil_mode:
                # As in torch, no window starts in the padding at the far end.
                space += min(self.step - 1, self.extent - after - 1)
            windows = space // self.step + 1
        earlier, later = self.reach
        filled = (windows - 1) * self.step + self.extent
        return -before - earlier, filled + earlier + later

    def forward(self, x: Tensor) -> Tensor:
        """Pad and crop ``[batch, fields * order, height, width]``."""
        check_rank(x)
        order = self.group.order
        if not self.lifts and not torch.compiler.is_compiling() and x.shape[1] % order:
            raise ValueError(
                f"expected channels as fields of {order} orientations ({self.group.name}); got "
                f"{x.shape[1]}"
            )
        found = self.find(x)
        return found.contiguous(memory_format=memory_format(x))

    def find(self, x: Tensor) -> Tensor:
        """What `forward` computes, in whatever layout comes out; sizes may be symbolic."""
        given = (self.points(x.shape[2]), self.points(x.shape[3]))
        return points_in_frames(x, self.corners, *given, self.fill, self.lifts)

    def extra_repr(self) -> str:
        text = f"{self.group.name}, extent={self.extent}, step={self.step}"
        options = {
            "padding": (self.padding, (0, 0)),
            "reach": (self.reach, (0, 0)),
            "fill": (self.fill, 0.0),
            "ceil_mode": (self.ceil_mode, False),
            "lifts": (self.lifts, False),
        }
        return text + "".join(f", {n}={v!r}" for n, (v, usual) in options.items() if v != usual)


def corners(group: Group) -> tuple[tuple[float, float], ...]:
    """For every orientation, how far down and to the right what was down and right has turned.

    >>> corners(Group("p4"))
    ((1.0, 1.0), (-1.0, 1.0), (-1.0, -1.0), (1.0, -1.0))
    """
    turned = np.asarray(group.matrices) @ np.array([1.0, -1.0])  # y points up
    exact = np.where(np.abs(turned - turned.round()) < 1e-9, turned.round(), turned) + 0.0
    return tuple((float(-y) + 0.0, float(x)) for x, y in exact)


def points_in_frames(
    x: Tensor,
    corners: tuple[tuple[float, float], ...],
    rows: tuple[int, int],
    columns: tuple[int, int],
    fill: float,
    lifts: bool,
) -> Tensor:
    """Of each orientation the points, a pixel apart, that are ``rows`` and ``columns`` (the first
    and how many) in its own frame.
    """
    (top, height), (left, width) = rows, columns
    below, beside = x.shape[2] - height - top, x.shape[3] - width - left
    found = []
    for element, (down, right) in enumerate(corners):
        own = x if lifts else x[:, element :: len(corners)]
        if abs(down) == abs(right) == 1.0:
            own = _pixels(own, 2, top if down > 0 else below, height, fill)
            own = _pixels(own, 3, left if right > 0 else beside, width, fill)
        else:
            own, in_rows = _between(own, 2, ((1 + down) * top + (1 - down) * below) / 2, height)
            start = ((1 + right) * left + (1 - right) * beside) / 2
            own, in_columns = _between(own, 3, start, width)
            own = torch.where(in_rows[:, None] & in_columns, own, fill)
        found.append(own)
    return torch.stack(found, 2).flatten(1, 2)


def _between(x: Tensor, dim: int, start: float, size: int) -> tuple[Tensor, Tensor]:
    """Points of an axis from ``start`` on, linearly between pixels, and which are inside."""
    position = torch.arange(size, device=x.device, dtype=torch.float64) + start
    low, last = position.floor(), x.shape[dim] - 1
    weight = (position - low).to(x.dtype).reshape(-1, *[1] * (3 - dim))
    before, after = (x.index_select(dim, (low.long() + n).clamp(0, last)) for n in (0, 1))
    mixed = before * (1 - weight) + after * weight
    return mixed, (position >= -0.5) & (position <= last + 0.5)


def _pixels(x: Tensor, dim: int, start: int, size: int, fill: float) -> Tensor:
    """Pixels of an axis from ``start`` on, which may be outside."""
    if all(isinstance(n, int) for n in (start, size, x.shape[dim])):
        before, after = max(0, -start), max(0, start + size - x.shape[dim])
        inside = x.narrow(dim, max(0, start), max(0, size - before - after))
        sides = [0, 0] * (3 - dim) + [before, after]
        return functional.pad(inside, sides, value=fill) if before or after else inside
    index = torch.arange(size, device=x.device) + start
    inside = ((index >= 0) & (index < x.shape[dim])).reshape(-1, *[1] * (3 - dim))
    return torch.where(inside, x.index_select(dim, index.clamp(0, x.shape[dim] - 1)), fill)


def _pair(name: str, given: object, more: str = "") -> tuple[int, int]:
    numbers = tuple(given) if isinstance(given, tuple | list) else ()
    whole = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if len(numbers) != 2 or len(whole) != 2:
        raise ValueError(f"expected {name} as two whole numbers, 0 or more{more}; got {given!r}")
    return whole[0], whole[1]
