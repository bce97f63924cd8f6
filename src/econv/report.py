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
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from econv.files import write_atomically
from econv.page import filled
from econv.recipes import RECIPES, Recipe
from econv.records import Record, load_all, strays

__all__ = [
    "Row",
    "add_arguments",
    "aligned",
    "as_html",
    "as_markdown",
    "as_table",
    "as_text",
    "curves",
    "main",
    "rows",
    "section",
    "update",
    "updated",
    "variants",
]

BEGIN, END = "<!-- econv report: begin -->", "<!-- econv report: end -->"

TITLES = {
    0: "The embedded digits: 5,000 of MNIST, turned",
    1: "Table 1. MNIST-rot, no augmentation",
    2: "Table 2. MNIST-rot, augmented by rotations",
    3: "Table 3. CIFAR-10 and CIFAR-100",
    4: "Trained on upright images, tested on images at every angle",
}
_HEADS = (
    "network",
    "paper, %",
    "ours, %",
    "seeds",
    "paper's parameters",
    "parameters",
    "seconds",
    "run as",
    "data",
)
_RUN_HEADS = (
    "run",
    "data",
    "seed",
    "validation, %",
    "epoch",
    "test, %",
    "seconds",
    "set-up",
    "device",
    "step",
    "torch",
    "revision",
    "finished",
)
_WORDS = ("run as", "data", "device", "step", "torch", "revision", "finished")
RETRAINED = "retrained on all"
NOTE = (
    "Test errors are the mean ± sample standard deviation (n − 1) over seeds. They are those of "
    "the epoch with the lowest validation error or, in rows marked as "
    f"{RETRAINED}, of the last epoch of a second training on training and validation images "
    "together; the test split is read once. Seconds are those of training with its evaluations; "
    "compiling and reading the data come before and are in the records."
)
RECREATED = (
    " Re-created data are made from MNIST as MNIST-rot was; they are not its official images."
)
UNVERIFIED = (
    " No checksum vouches for unverified data: they were not checked against official files."
)
SHARED = " † Several runs shared the device: their seconds would say nothing of one alone."
INCOMPLETE = "incomplete"
COLOURS = 6
"""Of learning curves; the page's style names them."""
_VARIANTS = "With changed settings"

_Series = tuple[str, Sequence[Record]]
"""A name and the runs of it."""


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
        """Mean and standard deviation of the test error, or how many seeds are missing.

        Where test images were turned, means over the seeds upright and at the worst angle too.
        """
        if not self.complete:
            return f"{INCOMPLETE} ({len(self.records)} of {self.recipe.minimum_seeds} seeds)"
        found = spread([record.test_error for record in self.records])
        angles = [record.angle_errors for record in self.records if record.angle_errors]
        if not angles:
            return found
        by_angle = [statistics.fmean(errors) for errors in zip(*angles, strict=True)]
        worst = max(range(len(by_angle)), key=by_angle.__getitem__)
        return (
            f"{found} (upright {by_angle[0]:.2f}, worst {by_angle[worst]:.2f} at "
            f"{360 * worst / len(by_angle):g}°)"
        )

    def cells(self) -> tuple[str, ...]:
        recipe, found = self.recipe, self.records
        name = recipe.row + (f" ({recipe.note})" if recipe.note else "")
        paper = "–" if recipe.paper_error is None else _percent(recipe.paper_error)
        parameters = sorted({record.parameters for record in found})
        where = ", ".join(sorted({record.device for record in found}))
        labels = sorted({record.dataset for record in found})
        labels += ["re-created"] if self.recreated else []
        labels += ["unverified"] if any(record.unverified for record in found) else []
        labels += [RETRAINED] if any(record.retrained for record in found) else []
        labels += [f"{self.outdated} outdated"] if self.outdated else []
        return (
            name,
            paper,
            self.error,
            str(len(found)),
            recipe.paper_parameters or "–",
            " / ".join(f"{count:,}" for count in parameters) or "–",
            f"{_seconds(found)} ({where})" if found else "–",
            "; ".join(sorted({_run_as(record) for record in found})) or "–",
            ", ".join(labels) or "–",
        )


def _run_as(record: Record) -> str:
    return f"{record.step}, {record.precision}"


def _seconds(records: Sequence[Record]) -> str:
    """Their mean, or a mark if a run shared its device with others."""
    if any((record.shared or 1) > 1 for record in records):
        return "†"
    return f"{statistics.fmean(record.seconds for record in records):.1f}"


def _percent(value: float) -> str:
    """With two digits after the point, and a third where there is one.

    >>> _percent(3.5), _percent(0.709)
    ('3.50', '0.709')
    """
    return f"{value:.3f}".removesuffix("0")


def spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation.

    >>> spread([1.0, 2.0])
    '1.50 ± 0.71'
    """
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def rows(records: Iterable[Record], recipes: Mapping[str, Recipe] = RECIPES) -> list[Row]:
    """The rows of all tables: one for each recipe, and for each set of images it was trained on.

    Recipes that keep the paper's own schedule, or are in none of its tables, appear once they have
    records.
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
        kinds = sorted({_kind(record) for record in current})
        # The paper's tables show what is missing; nobody asked for the rest.
        demanded = recipe.table in (1, 2, 3) and not name.endswith("_paper")
        if not kinds and (demanded or outdated):
            found.append(Row(recipe, (), False, outdated))
        for kind in kinds:
            kept = [record for record in current if _kind(record) == kind]
            found.append(Row(recipe, tuple(kept), kind[0], outdated))
    return found


def _kind(record: Record) -> tuple[bool, str, str, str, int]:
    """Runs that differ in this, such as those on other images, have no common mean."""
    return (
        record.recreated,
        record.dataset,
        record.data_sha256,
        record.precision,
        record.parameters,
    )


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
    tables = [
        f"{title}\n{aligned(heads, lines)}\n" for title, heads, lines in _tables(found, others)
    ]
    return "\n".join([*tables, textwrap.fill(_note(found, others), 100)])


def aligned(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of texts in columns of equal width.

    >>> print(aligned(["a", "b"], [["long", "1"]]))
    a     b
    long  1
    """
    whole = [heads, *lines]
    widths = [max(len(cell) for cell in column) for column in zip(*whole, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in whole
    )


def as_markdown(found: Sequence[Row]) -> str:
    """The tables for a README."""
    lines = []
    for title, heads, cells in _tables(found, None):
        lines += [f"**{title}**", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for line in cells:
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
        lines.append("")
    return "\n".join([*lines, _note(found), ""])


def _note(found: Sequence[Row], others: Mapping[str, Sequence[Record]] | None = None) -> str:
    """What a reader of these tables must know."""
    shown = [record for row in found for record in row.records]
    shown += [record for records in (others or {}).values() for record in records]
    return (
        NOTE
        + RECREATED * any(record.recreated for record in shown)
        + UNVERIFIED * any(record.unverified for record in shown)
        + SHARED * any((record.shared or 1) > 1 for record in shown)
    )


def updated(text: str, found: Sequence[Row], name: str | Path = "the text") -> str:
    """A README's text with the tables between its markers; errors call it by the name."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{name}: expected one line {BEGIN!r} and, after it, one line {END!r}")
    return f"{text[:begin]}{BEGIN}\n\n{as_markdown(found)}\n{text[end:]}"


def update(path: Path, found: Sequence[Row]) -> bool:
    """Put the tables between the markers of a file; whether that changed it."""
    text = path.read_text(encoding="utf-8")
    after = updated(text, found, path)
    if after != text:
        write_atomically(path, after.encode())
    return after != text


def as_html(
    found: Sequence[Row],
    others: Mapping[str, Sequence[Record]] | None = None,
    title: str = "econv: what was trained",
    further: str = "",
) -> str:
    """One page that needs nothing else: every table with its learning curves and its runs.

    Args:
        found: the rows of the tables.
        others: records with changed settings, by name.
        title: the heading.
        further: HTML that follows the tables, as :func:`section` makes it.
    """
    parts = []
    for number, (caption, heads, lines) in enumerate(_tables(found, others)):
        series = _series(found, others, caption)
        parts.append(
            section(
                f"table-{number}",
                caption,
                as_table(heads, lines) + _all_curves(series) + _runs(series),
            )
        )
    return filled(
        "report.html",
        {
            "title": html.escape(title),
            "note": html.escape(_note(found, others)),
            "tables": "".join(parts),
            "further": further,
        },
    )


def section(name: str, title: str, content: str) -> str:
    """A part of the page under a heading; the content is HTML."""
    return (
        f"<section aria-labelledby='{name}'><h2 id='{name}'>{html.escape(title)}</h2>"
        f"{content}</section>"
    )


def as_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """An HTML table of texts, the first of each line as its head."""
    kinds = [" class='word'" if head in _WORDS else "" for head in heads]
    parts = ["<div class='scroll' tabindex='0'><table><thead><tr>"]
    for head, kind in zip(heads, kinds, strict=True):
        unbroken = html.escape(head).replace(" %", "&nbsp;%")
        parts.append(f"<th scope='col'{kind}>{unbroken}</th>")
    parts.append("</tr></thead><tbody>")
    for first, *rest in lines:
        parts.append(f"<tr><th scope='row'>{html.escape(first)}</th>")
        for cell, kind in zip(rest, kinds[1:], strict=True):
            kind = " class='soft'" if cell.startswith(INCOMPLETE) else kind
            parts.append(f"<td{kind}>{html.escape(cell)}</td>")
        parts.append("</tr>")
    return "".join([*parts, "</tbody></table></div>"])


def _series(
    found: Sequence[Row], others: Mapping[str, Sequence[Record]] | None, caption: str
) -> list[_Series]:
    """What was run for one table."""
    if caption == _VARIANTS:
        return [(name, tuple(records)) for name, records in (others or {}).items()]
    return [
        (row.cells()[0], row.records)
        for row in found
        if row.records and TITLES[row.recipe.table] == caption
    ]


def _data(record: Record) -> str:
    labels = [record.dataset, *["re-created"] * record.recreated]
    return ", ".join([*labels, *["unverified"] * bool(record.unverified)])


def _all_curves(series: Sequence[_Series]) -> str:
    """The learning curves of one table: one figure for each data set."""
    by_data: dict[str, list[_Series]] = {}
    for name, records in series:
        by_data.setdefault(_data(records[0]), []).append((name, records))
    return "".join(
        f"<h3>Learning curves: {html.escape(data)}</h3>{curves(mine)}"
        for data, mine in by_data.items()
    )


def curves(series: Sequence[_Series]) -> str:
    """Validation error and training loss over the epochs, a colour for each name, as HTML.

    Every run has its own line; the dot is the epoch that was selected.
    """
    legend = "".join(
        f"<li class='series-{number % COLOURS}'><i></i>{html.escape(name)}"
        f" <span class='soft'>{_seeds(records)}</span></li>"
        for number, (name, records) in enumerate(series)
    )
    panels = "".join(
        f"<figure><figcaption>{caption}</figcaption>{_panel(series, key, caption)}</figure>"
        for key, caption in (
            ("validation_error", "validation error, %"),
            ("loss", "training loss"),
        )
    )
    return f"<ul class='legend'>{legend}</ul><div class='curves'>{panels}</div>"


def _seeds(records: Sequence[Record]) -> str:
    seeds = ", ".join(str(record.seed) for record in records)
    return f"{'seed' if len(records) == 1 else 'seeds'} {seeds}"


def _panel(series: Sequence[_Series], key: str, caption: str) -> str:
    """One chart with a logarithmic scale."""
    lines = [
        (number, name, record, _points(record, key))
        for number, (name, records) in enumerate(series)
        for record in records
    ]
    # A perfect score has no logarithm: it is drawn at the bottom.
    positive = [y for *_, points in lines for _, y in points if y > 0] or [1.0]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    low, high = low - 0.05, max(high + 0.05, low + 0.2)
    last = max([x for *_, points in lines for x, _ in points] + [2])
    left, right, top, bottom = 70, 452, 12, 232

    def place(epoch: float, value: float) -> tuple[float, float]:
        x = left + (right - left) * (epoch - 1) / (last - 1)
        level = math.log10(value) if value > 0 else low
        return x, bottom - (bottom - top) * (level - low) / (high - low)

    label = html.escape(f"{caption} over epochs, logarithmic")
    parts = [f"<svg class='chart' viewBox='0 0 480 290' role='img' aria-label='{label}'>"]
    for tick in _ticks(10**low, 10**high):
        y = place(1, tick)[1]
        parts.append(f"<line class='grid' x1='{left}' x2='{right}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text x='{left - 8}' y='{y + 5:.1f}' text-anchor='end'>{tick:g}</text>")
    for epoch in _epochs(last):
        x = place(epoch, 1)[0]
        parts.append(f"<text x='{x:.1f}' y='{bottom + 24}' text-anchor='middle'>{epoch}</text>")
    middle = (left + right) / 2
    parts.append(f"<text x='{middle}' y='{bottom + 49}' text-anchor='middle'>epoch</text>")
    for number, name, record, points in lines:
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        hint = html.escape(f"{name}, seed {record.seed}: test error {record.test_error:.2f} %")
        parts.append(
            f"<g class='series-{number % COLOURS}'><title>{hint}</title><polyline points='{path}'/>"
        )
        chosen = dict(points).get(record.selected_epoch)
        if chosen is not None:
            x, y = place(record.selected_epoch, chosen)
            parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4'/>")
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _points(record: Record, key: str) -> list[tuple[int, float]]:
    """The metric over the epochs in which the weights were selected."""
    return [
        (entry["epoch"], entry[key])
        for entry in record.epochs
        if key in entry and entry.get("phase", "select") == "select"
    ]


def _revisions(record: Record) -> list[str]:
    """Those of all that took part, shortened."""
    found = [part["revision"] for part in record.parts or []] or [record.revision]
    return [
        commit[:10] + ("+changes" if commit.endswith("+changes") else "")
        for commit in dict.fromkeys(found)
    ]


def _runs(series: Sequence[_Series]) -> str:
    """Every run of a table, to be unfolded."""
    lines = [
        (
            name,
            _data(record),
            str(record.seed),
            f"{record.validation_error:.2f}",
            str(record.selected_epoch),
            f"{record.test_error:.2f}",
            f"{record.seconds:.1f}" + "†" * ((record.shared or 1) > 1),
            f"{record.setup_seconds:.1f}",
            record.device,
            _run_as(record),
            record.versions.get("torch", "–"),
            ", ".join(_revisions(record)),
            record.finished,
        )
        for name, records in series
        for record in records
    ]
    if not lines:
        return ""
    return f"<details><summary>Every run</summary>{as_table(_RUN_HEADS, lines)}</details>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``econv report``."""
    add = parser.add_argument
    add("--records", type=Path, default=Path("records"), metavar="FOLDER", help="what to report")
    add("--html", type=Path, metavar="FILE", help="write a page with learning curves")
    add("--markdown", type=Path, metavar="FILE", help="put the tables between the file's markers")
    add("--check", type=Path, metavar="FILE", help="fail if the tables in the file are not these")


def main(options: argparse.Namespace) -> int:
    """Print the tables and write what is asked for; 0, or 1 with a line on stderr.

    Without any record, too: a script that waits for some must notice.
    """
    try:
        for path in strays(options.records):
            print(f"econv report: {path} is left out: no record's name", file=sys.stderr)
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
            if updated(text, found, options.check) != text:
                raise ValueError(f"the tables in {options.check} are not those of the records")
        if not records:
            raise ValueError(
                f"no records in {options.records}: econv train writes them, or name another folder "
                "with --records"
            )
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"econv report: {error}", file=sys.stderr)
        return 1
    return 0


_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _tables(found: Sequence[Row], others: Mapping[str, Sequence[Record]] | None) -> list[_Table]:
    tables: list[_Table] = []
    for number in (1, 2, 3, 4, 0):
        mine = [row for row in found if row.recipe.table == number]
        heads: tuple[str, ...] = _HEADS
        lines = [row.cells() for row in mine]
        if number in (0, 4):  # not in the paper
            shown = [i for i, head in enumerate(_HEADS) if not head.startswith("paper")]
            heads = tuple(_HEADS[i].replace("ours", "test error") for i in shown)
            lines = [tuple(line[i] for i in shown) for line in lines]
        if lines:
            tables.append((TITLES[number], heads, lines))
    if others:
        heads = (
            "recipe",
            "validation, %",
            "test, %",
            "seeds",
            "parameters",
            "seconds",
            "run as",
            "data",
        )
        lines = []
        for name, whole in others.items():
            for kind in sorted({_kind(record) for record in whole}):
                records = [record for record in whole if _kind(record) == kind]
                lines.append(
                    (
                        name,
                        spread([record.validation_error for record in records]),
                        spread([record.test_error for record in records]),
                        str(len(records)),
                        f"{records[0].parameters:,}",
                        _seconds(records),
                        "; ".join(sorted({_run_as(record) for record in records})),
                        "; ".join(sorted({_data(record) for record in records})),
                    )
                )
        tables.append((_VARIANTS, heads, lines))
    return tables


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**d for d in decades for m in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high] or [math.sqrt(low * high)]


def _epochs(last: int) -> list[int]:
    """The first and the last epoch, and some between them.

    >>> _epochs(200), _epochs(12)
    ([1, 50, 100, 150, 200], [1, 3, 6, 9, 12])
    """
    step = next((last // n for n in (4, 5, 3) if last % n == 0), max(1, round(last / 4)))
    return sorted({1, last} | {n for n in range(step, last, step) if last - n > step / 2 < n})


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m econv.report", description=__doc__)
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
