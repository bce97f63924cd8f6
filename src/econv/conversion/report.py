"""What became what: the table that a conversion leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Line", "Report"]


@dataclass(frozen=True)
class Line:
    """One module of the source, and what it became."""

    name: str
    source: str
    became: str
    fit: float | None = None
    """Of a fitted filter: what is left of the source's, relative to its norm."""


@dataclass(frozen=True)
class Report:
    """What a conversion did, in numbers; ``print`` it for a table."""

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
        text += ["", *self.summary()]
        return "\n".join(text)

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
        """The numbers, without the table."""
        lines = [
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
        lines += [f"left alone: {name}: {reason}" for name, reason in self.left]
        lines += [f"note: {note}" for note in self.notes]
        return lines


def _compared(what: str, before: int, after: int) -> str:
    ratio = f" ({after / before:.3f}×)" if before else ""
    return f"{what:<18}  {before:,} → {after:,}{ratio}"
