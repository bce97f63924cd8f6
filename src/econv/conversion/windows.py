"""Where the windows of a convolution or pooling lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from econv.conversion.arguments import equal

__all__ = ["Windows"]


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution or pooling, the same along all axes."""

    kernel: int
    stride: int
    padding: int
    """Of both ends of an axis together."""
    dilation: int = 1
    before: int | None = None
    """How many pixels of the padding are before the image; half of them, if nothing is said."""
    same: bool = False
    """Whether the padding depends on the size, as TensorFlow's does."""

    @property
    def extent(self) -> int:
        """Pixels from the first to the last that a window reads."""
        return self.dilation * (self.kernel - 1) + 1

    @classmethod
    def of(cls, given: Any) -> Windows:
        """Read off a module or arguments; an error where axes differ."""
        sides = given.kernel_size
        volume = isinstance(sides, tuple | list) and len(sides) == 3
        kernel = equal(sides, f"its kernel is not {'a cube' if volume else 'square'}")
        stride = equal(given.stride or given.kernel_size, "its strides are unequal")
        dilation = equal(getattr(given, "dilation", 1), "its dilations are unequal")
        reach = dilation * (kernel - 1)
        before = None
        if type(given).__name__ == "Conv2dSame":  # ⌈n / stride⌉ samples, as TensorFlow pads
            return cls(kernel, stride, reach, dilation, same=True)
        if type(given).__name__ == "Conv2dStaticSamePadding":  # as long as the image it is for
            static = getattr(given.static_padding, "padding", (0, 0, 0, 0))
            both = (static[0] + static[1], static[2] + static[3])
            padding = equal(both, "its paddings are unequal")
            before = equal((static[0], static[2]), "its paddings are unequal")
        elif isinstance(given.padding, str):
            padding = reach if given.padding == "same" else 0
        else:
            padding = 2 * equal(given.padding, "its paddings are unequal")
        return cls(kernel, stride, padding, dilation, before)

    @property
    def sides(self) -> tuple[int, int] | str:
        """The padding before and after the image, or ``"same"``."""
        before = self.padding // 2 if self.before is None else self.before
        return "same" if self.same else (before, self.padding - before)

    @property
    def symmetric(self) -> bool:
        """Whether they lie symmetrically, each about a pixel, on images of every size."""
        return self.stride == 1 and self.padding % 2 == 0 and self.extent % 2 == 1

    def left_over(self, side: int) -> int:
        """Pixels of an axis beyond the last window, as torch puts them."""
        return max(0, side + self.padding - self.extent) % self.stride

    def between(self, side: int) -> bool:
        """Whether as many windows of an odd kernel, about the centre, lie between pixels."""
        number = (side + self.padding - self.extent) // self.stride + 1
        return (side - self.stride * (number - 1) - 1) % 2 == 1
