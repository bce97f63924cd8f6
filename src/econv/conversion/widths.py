"""How many fields each tensor has: channels that must agree, and the factor that scales them.

A `Width` is a run of channels of the source. Sums make widths equal, concatenations put them in a
row, slices split them; what is left are the widths that may be chosen. This module knows numbers
and nothing of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from econv.conversion.trace import ConversionError

__all__ = ["Sizes", "Width", "count_of", "divide", "join", "match_widths", "runs", "slice_runs"]


class Width:
    """A run of channels whose number of fields is chosen as one."""

    def __init__(self, channels: int, name: str) -> None:
        self.channels = channels
        self.name = name
        self.fixed: int | None = None
        """A number of fields that does not scale."""
        self.blocks = 1
        """Into how many blocks a grouped convolution of the source divides it."""
        self.multiple_of: tuple[tuple[Width, ...], int] | None = None
        """Widths whose fields together, times a number, give this one's."""
        self._same: Width | None = None
        self._parts: tuple[Width, Width] | None = None

    def root(self) -> Width:
        """The width that stands for all that must agree."""
        found = self
        while found._same is not None:
            found = found._same
        return found

    def split(self, first: int) -> None:
        """Make it two widths in a row, the first of so many channels."""
        found = self.root()
        if found.fixed is not None or found.multiple_of is not None:
            raise ConversionError(found.name, "its channels are divided in a way that is not known")
        found._parts = (
            Width(first, found.name),
            Width(found.channels - first, found.name),
        )

    def fix(self, fields: int) -> None:
        """Settle its number of fields."""
        found = self.root()
        if found.fixed not in (None, fields) or found.multiple_of is not None:
            raise ConversionError(found.name, f"it would need {found.fixed} and {fields} fields")
        found.fixed = fields

    def unite(self, other: Width) -> None:
        """Make two widths of equal channels one."""
        kept, gone = self.root(), other.root()
        if kept is gone:
            return
        if gone.multiple_of is not None and kept.multiple_of is None:
            kept, gone = gone, kept
        settled = gone.fixed is not None or gone.multiple_of is not None
        if kept.multiple_of and settled and not _alike(kept.multiple_of, gone.multiple_of):
            raise ConversionError(gone.name, "its width depends on two others")
        if gone.fixed is not None:
            kept.fix(gone.fixed)
        kept.blocks = max(kept.blocks, gone.blocks)
        gone._same = kept


def _alike(a: tuple[tuple[Width, ...], int], b: tuple[tuple[Width, ...], int] | None) -> bool:
    if b is None:
        return False
    return a[1] == b[1] and runs(a[0]) == runs(b[0])


def runs(widths: Iterable[Width]) -> list[Width]:
    """The widths as they are now, split where something has split them."""
    found: list[Width] = []
    for width in widths:
        root = width.root()
        if root._parts is None:
            found.append(root)
        else:
            found += runs(root._parts)
    return found


def count_of(widths: Iterable[Width]) -> int:
    """The channels of the source."""
    return sum(width.channels for width in runs(widths))


def join(left: Iterable[Width], right: Iterable[Width]) -> None:
    """Make two rows of widths equal, run by run."""
    a, b = runs(left), runs(right)
    while a and b:
        first, second = a[0], b[0]
        if first is second:
            a, b = a[1:], b[1:]
        elif first.channels == second.channels:
            first.unite(second)
            a, b = a[1:], b[1:]
        elif first.channels > second.channels:
            first.split(second.channels)
            a = runs(a)
        else:
            second.split(first.channels)
            b = runs(b)
    if a or b:
        raise ConversionError((a or b)[0].name, "channels are added that are not as many")


def slice_runs(widths: Iterable[Width], start: int, stop: int) -> tuple[list[Width], list[Width]]:
    """The widths before and within a range of the source's channels."""
    for edge in (start, stop):
        position = 0
        for width in runs(widths):
            if position < edge < position + width.channels:
                width.split(edge - position)
                break
            position += width.channels
    before: list[Width] = []
    within: list[Width] = []
    position = 0
    for width in runs(widths):
        if position < start:
            before.append(width)
        elif position < stop:
            within.append(width)
        position += width.channels
    return before, within


def divide(widths: Iterable[Width], number: int) -> tuple[Width, ...]:
    """The widths of one of so many equal parts."""
    each = count_of(widths) // number
    rows = [slice_runs(widths, i * each, (i + 1) * each)[1] for i in range(number)]
    for row in rows[1:]:
        join(rows[0], row)
    return tuple(rows[0])


class Sizes:
    """The number of fields of every width, for one scale: fields per channel."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def of(self, width: Width) -> int:
        """Fields of one run."""
        found = width.root()
        if found.multiple_of is not None:
            base, times = found.multiple_of
            return times * self.fields(base)
        if found.fixed is not None:
            return found.fixed
        block = self.block(found)
        return block * max(1, math.floor(found.channels * self.scale / block + 0.5))

    def fields(self, widths: Iterable[Width]) -> int:
        """Fields of widths in a row."""
        return sum(self.of(width) for width in runs(widths))

    def block(self, width: Width) -> int:
        """Fields of each block of a width that a grouped convolution divides."""
        found = width.root()
        if found.blocks == 1:
            return 1
        return max(1, math.floor(found.channels / found.blocks * self.scale + 0.5))

    def groups(self, into: Sequence[Width], out: Sequence[Width], groups: int) -> int:
        """How many blocks a grouped convolution has: as many as the narrowest blocks allow."""
        in_fields, out_fields = self.fields(into), self.fields(out)
        common = math.gcd(in_fields, out_fields)
        per_block = max(1, math.floor(count_of(into) / groups * self.scale + 0.5))
        wanted = max(1, in_fields // per_block)
        return max(n for n in range(1, common + 1) if common % n == 0 and n <= wanted)

    def too_narrow(self, widths: Iterable[Width]) -> list[Width]:
        """The widths of which less than half a field would be left."""
        return [
            width
            for width in runs(widths)
            if width.fixed is None
            and width.multiple_of is None
            and width.channels * self.scale < 0.5
        ]


def match_widths(count: Callable[[Sizes], int], target: int, guess: float) -> Sizes:
    """The scale whose count is nearest to the target.

    The count grows with the scale, in steps and about as its square. From a guess, the scale is
    corrected by the root of what is missing, or halved between the nearest ones on both sides.
    """
    below, above = 0.0, math.inf
    tried: list[tuple[float, float, int]] = []
    scale = guess
    for _ in range(14):
        found = count(Sizes(scale))
        tried.append((abs(math.log(found / target)), scale, found))
        below, above = (scale, above) if found <= target else (below, scale)
        if found == target or above - below < 1e-4 * scale:
            break
        step = scale * math.sqrt(target / found)
        scale = step if below < step < above else (below + min(above, 4 * below + 1e-3)) / 2
    miss, best, found = min(tried)
    if miss > math.log(1.25):
        raise ValueError(
            f"expected widths with a count near {target:,}; the nearest have {found:,}: layers "
            "cannot be narrower than one field; choose a smaller group or another match"
        )
    return Sizes(best)
