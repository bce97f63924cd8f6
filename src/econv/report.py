"""Records → the paper's tables with our numbers beside, and one page with learning curves.

Only finished records of the recipe as it is now count towards a row; a row without enough seeds
says so and shows no mean. This room trains nothing and decides nothing.
"""

from __future__ import annotations

import argparse
import html
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from econv.files import write_atomically
from econv.recipes import RECIPES, Recipe
from econv.records import Record, load_all

__all__ = ["Row", "add_arguments", "as_html", "as_markdown", "as_text", "main", "rows", "update"]

BEGIN, END = "<!-- econv report: begin -->", "<!-- econv report: end -->"

TITLES = {
    0: "The embedded digits",
    1: "Table 1. MNIST-rot, no augmentation",
    2: "Table 2. MNIST-rot, augmented by rotations",
    3: "Table 3. CIFAR-10 and CIFAR-100",
}
_HEADS = (
    "network",
    "paper, %",
    "ours, %",
    "seeds",
    "paper's parameters",
    "parameters",
    "seconds",
    "data",
)


@dataclass(frozen=True)
class Row:
    """One line of a table: a recipe, and the records of it on one kind of data."""

    recipe: Recipe
    records: tuple[Record, ...]
    recreated: bool
    outdated: int = 0
    """Records of the same name with other settings; they do not count."""

    @property
    def complete(self) -> bool:
        return len(self.records) >= self.recipe.minimum_seeds

    @property
    def error(self) -> str:
        """Mean and standard deviation of the test error, or how many seeds are missing."""
        if not self.complete:
            return f"incomplete ({len(self.records)} of {self.recipe.minimum_seeds} seeds)"
        return spread([record.test_error for record in self.records])

    def cells(self) -> tuple[str, ...]:
        recipe, found = self.recipe, self.records
        name = recipe.row + (f" ({recipe.note})" if recipe.note else "")
        paper = "–" if recipe.paper_error is None else f"{recipe.paper_error:.4g}"
        parameters = sorted({record.parameters for record in found})
        seconds = statistics.fmean(record.seconds for record in found) if found else math.nan
        where = sorted({record.device for record in found})
        labels = sorted({record.dataset for record in found})
        labels += ["re-created"] if self.recreated else []
        labels += ["retrained on all"] if any(record.retrained for record in found) else []
        labels += [f"{self.outdated} outdated"] if self.outdated else []
        return (
            name,
            paper,
            self.error,
            str(len(found)),
            recipe.paper_parameters or "–",
            " / ".join(f"{count:,}" for count in parameters) or "–",
            f"{seconds:.1f} ({', '.join(where)})" if found else "–",
            ", ".join(labels) or "–",
        )


def spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation.

    >>> spread([1.0, 2.0])
    '1.50 ± 0.71'
    """
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def rows(records: Iterable[Record], recipes: Mapping[str, Recipe] = RECIPES) -> list[Row]:
    """The rows of all tables: one for each recipe, and for each set of images it was trained on.

    Recipes that keep the paper's own schedule appear once they have records.
    """
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.recipe, []).append(record)
    found = []
    for name, recipe in recipes.items():
        mine = by_name.get(name, [])
        settings = recipe.settings()
        current = [record for record in mine if record.settings == settings]
        outdated = len(mine) - len(current)
        # Runs on different images have no common mean.
        kinds = sorted({(record.recreated, record.data_sha256) for record in current})
        if not kinds and (not name.endswith("_paper") or outdated):
            found.append(Row(recipe, (), False, outdated))
        for kind in kinds:
            kept = [r for r in current if (r.recreated, r.data_sha256) == kind]
            found.append(Row(recipe, tuple(kept), kind[0], outdated))
    return found


def variants(
    records: Iterable[Record], recipes: Mapping[str, Recipe] = RECIPES
) -> dict[str, list[Record]]:
    """The records of recipes with changed settings, by name."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.recipe not in recipes:
            found.setdefault(record.recipe, []).append(record)
    return found


def as_text(found: Sequence[Row], others: Mapping[str, Sequence[Record]] | None = None) -> str:
    """The tables for a terminal."""
    lines = []
    for title, heads, cells in _tables(found, others):
        widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
        lines.append(title)
        for line in [heads, *cells]:
            padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
        lines.append("")
    return "\n".join(lines)


def as_markdown(found: Sequence[Row]) -> str:
    """The tables for a README."""
    lines = []
    for title, heads, cells in _tables(found, None):
        lines += [f"**{title}**", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for line in cells:
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
        lines.append("")
    return "\n".join(lines)


def updated(text: str, found: Sequence[Row]) -> str:
    """A README's text with the tables between its markers."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected one line {BEGIN!r} and, after it, one line {END!r}")
    return f"{text[:begin]}{BEGIN}\n\n{as_markdown(found)}\n{text[end:]}"


def update(path: Path, found: Sequence[Row]) -> bool:
    """Put the tables between the markers of a file; whether that changed it."""
    text = path.read_text(encoding="utf-8")
    try:
        after = updated(text, found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if after != text:
        write_atomically(path, after.encode())
    return after != text


def as_html(
    found: Sequence[Row],
    others: Mapping[str, Sequence[Record]] | None = None,
    title: str = "econv: what was trained",
) -> str:
    """One page that needs nothing else: the tables, and a learning curve for every recipe."""
    parts = [f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>{_STYLE}"]
    parts.append(f"<title>{html.escape(title)}</title></head><body><h1>{html.escape(title)}</h1>")
    for caption, heads, cells in _tables(found, others):
        parts.append(f"<h2>{html.escape(caption)}</h2><div class='wide'><table><tr>")
        parts += [f"<th>{html.escape(head)}</th>" for head in heads]
        parts.append("</tr>")
        for line in cells:
            parts.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>")
        parts.append("</table></div>")
    curves = [(_name(row), row.records) for row in found if row.records]
    curves += [(name, tuple(records)) for name, records in (others or {}).items()]
    if curves:
        parts.append(
            "<h2>Learning curves</h2><p>Validation error in percent over epochs, one line for each "
            "seed; the dot is the selected epoch.</p><div class='curves'>"
        )
        for name, records in curves:
            parts.append(f"<figure><figcaption>{html.escape(name)}</figcaption>{curve(records)}")
            parts.append("</figure>")
        parts.append("</div>")
    parts.append("</body></html>\n")
    return "".join(parts)


def curve(records: Sequence[Record]) -> str:
    """The validation errors of some runs as an SVG, on a logarithmic scale."""
    lines = []
    for record in records:
        points = [
            (e["epoch"], e["validation_error"]) for e in record.epochs if "validation_error" in e
        ]
        lines.append((record, points))
    # A perfect score has no logarithm: it is drawn at the bottom.
    positive = [y for _, points in lines for _, y in points if y > 0] or [1.0]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    low, high = low - 0.05, max(high + 0.05, low + 0.2)
    last = max([x for _, points in lines for x, _ in points] + [2])
    left, right, top, bottom = 44, 470, 12, 220

    def place(epoch: float, error: float) -> tuple[float, float]:
        x = left + (right - left) * (epoch - 1) / (last - 1)
        level = math.log10(error) if error > 0 else low
        return x, bottom - (bottom - top) * (level - low) / (high - low)

    parts = ["<svg viewBox='0 0 480 250' role='img' aria-label='validation error over epochs'>"]
    for tick in _ticks(10**low, 10**high):
        y = place(1, tick)[1]
        parts.append(f"<line class='grid' x1='{left}' x2='{right}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text x='{left - 6}' y='{y + 4:.1f}' text-anchor='end'>{tick:g}</text>")
    for epoch in sorted({1, (1 + last) // 2, last}):
        x = place(epoch, 1)[0]
        parts.append(f"<text x='{x:.1f}' y='{bottom + 20}' text-anchor='middle'>{epoch}</text>")
    for number, (record, points) in enumerate(lines):
        colour = f"hsl({(210 + 67 * number) % 360} 65% 45%)"
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        hint = html.escape(f"seed {record.seed}: test error {record.test_error:.2f} %")
        parts.append(
            f"<polyline points='{path}' style='stroke:{colour}'><title>{hint}</title></polyline>"
        )
        x, y = place(record.selected_epoch, record.validation_error)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' style='fill:{colour}'/>")
    return "".join(parts) + "</svg>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``econv report``."""
    add = parser.add_argument
    add("--records", type=Path, default=Path("records"), metavar="FOLDER", help="what to report")
    add("--html", type=Path, metavar="FILE", help="write a page with learning curves")
    add("--markdown", type=Path, metavar="FILE", help="put the tables between the file's markers")
    add("--check", type=Path, metavar="FILE", help="fail if the tables in the file are not these")


def main(options: argparse.Namespace) -> int:
    """Print the tables and write what is asked for; 0, or 1 with a line on stderr."""
    try:
        records = load_all(options.records)
        found, others = rows(records), variants(records)
        print(as_text(found, others))
        if options.html is not None:
            write_atomically(options.html, as_html(found, others).encode())
            print(f"Page: {options.html}")
        if options.markdown is not None:
            changed = update(options.markdown, found)
            print(f"{options.markdown}: {'updated' if changed else 'as it was'}")
        if options.check is not None:
            text = options.check.read_text(encoding="utf-8")
            if updated(text, found) != text:
                raise ValueError(f"the tables in {options.check} are not those of the records")
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"econv report: {error}", file=sys.stderr)
        return 1
    return 0


_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _tables(found: Sequence[Row], others: Mapping[str, Sequence[Record]] | None) -> list[_Table]:
    tables: list[_Table] = []
    for number in (1, 2, 3, 0):
        lines = [row.cells() for row in found if row.recipe.table == number]
        if lines:
            tables.append((TITLES[number], _HEADS, lines))
    if others:
        heads = ("recipe", "validation, %", "test, %", "seeds", "parameters", "seconds", "data")
        lines = []
        for name, records in others.items():
            kinds = sorted({r.dataset + (", re-created" if r.recreated else "") for r in records})
            lines.append(
                (
                    name,
                    spread([record.validation_error for record in records]),
                    spread([record.test_error for record in records]),
                    str(len(records)),
                    " / ".join(f"{n:,}" for n in sorted({r.parameters for r in records})),
                    f"{statistics.fmean(record.seconds for record in records):.1f}",
                    "; ".join(kinds),
                )
            )
        tables.append(("With changed settings", heads, lines))
    return tables


def _name(row: Row) -> str:
    return row.recipe.name + (" (re-created)" if row.recreated else "")


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**d for d in decades for m in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high] or [math.sqrt(low * high)]


_STYLE = """<meta name='viewport' content='width=device-width'><style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem; border-bottom: 1px solid #8886; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; } svg text { font-size: 12px; fill: currentColor; }
polyline { fill: none; stroke-width: 1.5; } .grid { stroke: #8884; }
</style>"""


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m econv.report", description=__doc__)
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
