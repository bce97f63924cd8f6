"""What became what: the table that a conversion leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Accuracy", "Cost", "Line", "Report", "Turn", "Unsmoothed"]


@dataclass(frozen=True)
class Line:
    """One module of the source, and what it became."""

    name: str
    source: str
    became: str
    fit: float | None = None
    """Of a fitted filter: what is left of the source's, relative to its norm."""


@dataclass(frozen=True)
class Accuracy:
    """The share of labelled images that a network names rightly, before and after."""

    turn: str
    """By how much the images are turned, such as ``"90°"``."""
    source: float
    converted: float


@dataclass(frozen=True)
class Turn:
    """The change of the output under a rotation that is no symmetry of the pixel grid.

    It is relative to the output; scores of several images, to what tells these images apart.
    """

    degrees: float
    source: float
    converted: float


@dataclass(frozen=True)
class Unsmoothed:
    """What one activation or pooling would cost, if it alone were as in the source."""

    name: str
    was: str
    error: float
    """The error at 45° of a network with all others smooth."""


@dataclass(frozen=True)
class Cost:
    """What a network would cost with one ``match``."""

    match: str
    scale: float
    """Fields for each channel of the source."""
    parameters: int
    multiply_adds: int
    """Of one image, with dense filters."""
    step: float
    """The time of a training step over the source's, an estimate: the multiply-adds of the
    example's batch and of the filters' expansion, over the source's."""


@dataclass(frozen=True)
class Report:
    """What a conversion did, in numbers; ``print`` it for a table.

    >>> import econv, torch
    >>> cnn = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 2, 1))
    >>> network = econv.convert(cnn, "p4", "width", example_input=torch.randn(1, 3, 16, 16))
    >>> report = network.report
    >>> isinstance(report, Report), report.source_parameters, report.parameters
    (True, 242, 62)
    """

    group: str
    match: str
    scale: float
    """Fields for each channel of the source."""
    lines: tuple[Line, ...]
    source_parameters: int
    """Of the modules that the traced pass called."""
    parameters: int
    source_multiply_adds: int
    multiply_adds: int
    turn: str
    """The rotation of the errors, such as ``"90°"``."""
    source_error: float | None
    error: float | None
    outputs: tuple[tuple[int, ...], ...] = ()
    """Shapes of what it returns for the example, which are the source's."""
    left: tuple[tuple[str, str], ...] = ()
    """What was left alone, and why."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    costs: tuple[Cost, ...] = ()
    """Of this network first, then of what other matches would have made."""
    batch: int = 1
    """Images in the example."""
    turns: tuple[Turn, ...] = ()
    """The errors at 45° and 22.5°, of the example in its inscribed disc."""
    unsmoothed: tuple[Unsmoothed, ...] = ()
    """With ``smooth``: what was smoothed, and what it would cost not to be; the dearest first."""
    accuracy: tuple[Accuracy, ...] = ()
    """On the labelled images that were given, as they are and turned."""

    def __str__(self) -> str:
        fitted = any(line.fit is not None for line in self.lines)
        header = ["module", "was", f"is now ({self.group})"] + ["fit error"] * fitted
        rows = [
            [line.name, line.source, line.became]
            + ["" if line.fit is None else f"{line.fit:.3f}"] * fitted
            for line in self.lines
        ]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [header, ["-" * width for width in widths], *rows]
        ]
        first, *rest = self.summary()
        return "\n".join([first, "", *text, "", *rest])

    def missed(self) -> str | None:
        """By how much the numbers that should stay do not, where that is more than 2 %."""
        before, after = {
            "params": (self.source_parameters, self.parameters),
            "flops": (self.source_multiply_adds, self.multiply_adds),
        }.get(self.match, (1, 1))
        if not before or abs(after / before - 1) <= 0.02:
            return None
        what = "parameters" if self.match == "params" else "multiply-adds"
        return (
            f"{after / before - 1:+.1%} {what}: widths are whole numbers of fields, and none come "
            "nearer"
        )

    def summary(self) -> list[str]:
        """The numbers, without the table; first what the network costs."""
        lines = [
            self.headline(),
            f"fields per channel  {self.scale:.4f} (match={self.match!r})",
            _compared("parameters", self.source_parameters, self.parameters),
            _compared("multiply-adds", self.source_multiply_adds, self.multiply_adds),
        ]
        if self.outputs:
            shapes = ", ".join("×".join(map(str, shape)) or "one number" for shape in self.outputs)
            lines.append(f"{'output':<18}  {shapes}, as the source's")
        if self.error is not None and self.source_error is not None:
            lines.append(
                f"error at {self.turn:<9}  {self.source_error:.2e} → {self.error:.2e} "
                "(relative change of the output)"
            )
        lines += [
            f"error at {f'{turn.degrees:g}°':<9}  {turn.source:.2e} → {turn.converted:.2e}"
            for turn in self.turns
        ]
        lines += [
            f"as in the source, {found.name} ({found.was}) alone would make of the error at 45° "
            f"{found.error:.2e}"
            for found in self.unsmoothed[:_DEAREST]
        ]
        lines += [
            f"accuracy at {found.turn:<6}  {found.source:.1%} → {found.converted:.1%} "
            "(of the images given)"
            for found in self.accuracy
        ]
        lines += self._cost_table()
        lines += [f"left alone: {name}: {reason}" for name, reason in self.left]
        lines += [f"note: {note}" for note in self.notes]
        return lines

    def headline(self) -> str:
        """The work over the source's, with other matches beside it."""
        if not self.source_multiply_adds:
            return f"{self.multiply_adds:,} multiply-adds (match={self.match!r})"
        work = [(self.match, self.multiply_adds)]
        work += [(c.match, c.multiply_adds) for c in self.costs[1:] if c.match in _AFFORDABLE]
        first, *others = (
            f"{_times(count / self.source_multiply_adds)} with match={match!r}"
            for match, count in work
        )
        beside = f" ({', '.join(others)})" if others else ""
        return f"multiply-adds over the source's: {first}{beside}"

    def _cost_table(self) -> list[str]:
        if len(self.costs) < 2:
            return []
        images = f"{self.batch} image" + "s" * (self.batch != 1)
        rows = [
            ["match", "parameters", "multiply-adds", f"step of {images}, estimated"],
            ["(source)", f"{self.source_parameters:,}", f"{self.source_multiply_adds:,}", "1×"],
        ]
        rows += [
            [c.match, f"{c.parameters:,}", f"{c.multiply_adds:,}", _times(c.step)]
            for c in self.costs
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]


_DEAREST = 3  # of what was smoothed, as many are named
_AFFORDABLE = ("flops", "width")


def _times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 9.95 else f"{ratio:.2g}×"


def _compared(what: str, before: int, after: int) -> str:
    ratio = f" ({after / before:.3f}×)" if before else ""
    return f"{what:<18}  {before:,} → {after:,}{ratio}"
