"""The paper's tables with the numbers of records beside, and one page with learning curves.

Only finished records of the recipe as it is now count towards a row; a row without enough seeds
says so and shows no mean. This module trains nothing and decides nothing.
"""

from __future__ import annotations

import argparse
import html
import inspect
import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from econv.basis import filter_basis
from econv.files import printable, write_atomically
from econv.models import MODELS
from econv.page import filled
from econv.recipes import CONTROL, RECIPES, Recipe
from econv.records import Record, load_all, run_name, strays

__all__ = [
    "Row",
    "add_arguments",
    "aligned",
    "as_html",
    "as_markdown",
    "as_table",
    "as_text",
    "compared",
    "curves",
    "earlier",
    "main",
    "rows",
    "section",
    "update",
    "updated",
    "variants",
]

BEGIN, END = "<!-- econv report: begin -->", "<!-- econv report: end -->"
COMPARED, EARLIER = "<!-- econv report: recipes -->", "<!-- econv report: earlier -->"

TITLES = {
    0: "The embedded digits: 5,000 of MNIST, turned",
    1: "Table 1. MNIST-rot, no augmentation",
    2: "Table 2. MNIST-rot, augmented: the paper by rotations, ours as each row says",
    3: "Table 3. CIFAR-10 and CIFAR-100",
    4: "Trained on upright images, tested on images at every angle",
    5: "Volumes, tested in every orientation",
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
    "together; the test split is read once. Every run of a recipe's settings counts, whatever code "
    "it ran; means by code stand beside where there are several. Our recipes differ from the "
    "paper's in more than the layer, for the ordinary networks too: docs/paper.md has every "
    "difference, and the runs of earlier settings. Seconds are those of training with its "
    "evaluations; compiling and reading the data come before and are in the records."
)
CHANGED = "settings changed after a test error was seen"
SEVERAL = (
    " Where data were made again with several seeds, mean and deviation are those of all runs, over"
    " seeds and data, and the means on each of the data stand beside. A second row of such a name,"
    " without data seeds, is of one set of images that was made by another program."
)
RECREATED = (
    " Re-created data are made from MNIST as MNIST-rot was; they are not its official images."
)
UNVERIFIED = (
    " No checksum vouches for unverified data: they were not checked against official files."
)
OUTDATED = " Outdated runs are of earlier settings; they do not count."
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
    outdated: tuple[Record, ...] = ()
    """Records of the same name with other settings; they do not count."""

    @property
    def seeds(self) -> int:
        """How many different ones there are: one may have been run by several codes."""
        return len({record.seed for record in self.records})

    @property
    def data(self) -> int:
        """How many times the data were made again, with other seeds."""
        return len({record.data_sha256 for record in self.records})

    @property
    def complete(self) -> bool:
        return self.seeds >= self.recipe.minimum_seeds

    @property
    def _trained(self) -> int:
        """How many different runs there are, whatever code ran them."""
        return len({(record.seed, record.data_sha256) for record in self.records})

    @property
    def changed(self) -> bool:
        """Whether a test error of other settings was known before these were run."""
        first = min((record.finished for record in self.records), default=None)
        return any(first is None or record.finished < first for record in self.outdated)

    @property
    def error(self) -> str:
        """Mean and standard deviation of the test error, or how many seeds are missing.

        Over seeds and data, and with the means on each of the data, where there are several. Where
        several codes ran, each one's own too; where test images were turned, means over the
        seeds upright, at 45° where that was tested, and at the worst angle.
        """
        if not self.complete:
            return f"{INCOMPLETE} ({self.seeds} of {self.recipe.minimum_seeds} seeds)"
        found = spread([record.test_error for record in self.records])
        if self.data > 1:
            on = _by(self.records, lambda record: record.data_sha256).values()
            found += f" ({', '.join(spread([r.test_error for r in ran]) for ran in on)} by data)"
        by_code = _by(self.records, lambda record: ", ".join(_revisions(record)))
        if len(by_code) > 1 and self._trained < len(self.records):
            means = (
                f"{spread([record.test_error for record in ran])} by {code}"
                for code, ran in by_code.items()
            )
            found += f" ({'; '.join(means)})"
        angles = [record.angle_errors for record in self.records if record.angle_errors]
        if not angles:
            return found
        by_angle = [statistics.fmean(errors) for errors in zip(*angles, strict=True)]
        worst = max(range(len(by_angle)), key=by_angle.__getitem__)
        diagonal = "" if len(by_angle) % 8 else f"45° {by_angle[len(by_angle) // 8]:.2f}, "
        return (
            f"{found} (upright {by_angle[0]:.2f}, {diagonal}worst {by_angle[worst]:.2f} at "
            f"{360 * worst / len(by_angle):g}°)"
        )

    @property
    def name(self) -> str:
        notes = [self.recipe.note] * bool(self.recipe.note) + [CHANGED] * self.changed
        return self.recipe.row + f" ({'; '.join(notes)})" * bool(notes)

    def cells(self) -> tuple[str, ...]:
        recipe, found = self.recipe, self.records
        paper = "–" if recipe.paper_error is None else _percent(recipe.paper_error)
        parameters = sorted({record.parameters for record in found})
        where = ", ".join(sorted({record.device for record in found}))
        labels = sorted({record.dataset for record in found})
        labels += ["re-created"] if self.recreated else []
        made = sorted({r.data_seed for r in found if r.data_seed is not None})
        labels += [f"data seeds {', '.join(map(str, made))}"] if len(made) > 1 else []
        labels += ["unverified"] if any(record.unverified for record in found) else []
        labels += [RETRAINED] if any(record.retrained for record in found) else []
        labels += [f"{len(self.outdated)} outdated"] if self.outdated else []
        runs = str(self.seeds)
        if self.data > 1:
            every = self._trained == self.seeds * self.data
            runs += f"{' on each of' * every or ','} {self.data} data sets"
        runs += f", {len(found)} runs" * (len(found) > self.seeds)
        return (
            self.name,
            paper,
            self.error,
            runs,
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

    Recipes that keep the paper's own schedule, controls, and those in none of its tables appear
    once they have records.
    """
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.recipe, []).append(record)
    found = []
    for name, recipe in recipes.items():
        mine = by_name.get(name, [])
        settings = recipe.settings()
        current = [record for record in mine if record.settings == settings]
        outdated = tuple(record for record in mine if record.settings != settings)
        kinds = sorted({_kind(record) for record in current})
        # The paper's tables show what is missing; nobody asked for the rest.
        demanded = recipe.table in (1, 2, 3) and recipe.note != CONTROL
        demanded &= not name.endswith("_paper")
        if not kinds and (demanded or outdated):
            found.append(Row(recipe, (), False, outdated))
        for kind in kinds:
            kept = [record for record in current if _kind(record) == kind]
            found.append(Row(recipe, tuple(kept), kind[0], outdated))
    return found


def _by(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def _kind(record: Record) -> tuple[bool, str, str, str, int]:
    """Runs that differ in this, such as those on other images, have no common mean."""
    return (
        record.recreated,
        record.dataset,
        # Those that were made again with several seeds tell of one thing.
        record.data_sha256 if record.data_seed is None else "",
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
    return "\n".join([*tables, *_differences(found), textwrap.fill(_note(found, others), 100)])


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
        lines += [f"**{title}**", "", _in_markdown(heads, cells), ""]
    return "\n".join([*lines, _note(found), ""])


def _in_markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in lines]
    return "\n".join(
        ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        + ["| " + " | ".join(row) + " |" for row in rows]
    )


def _on_its_side(
    heads: Sequence[str], lines: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A table with many columns as one with many rows, which fits a page.

    >>> _on_its_side(["a", "b"], [["1", "2"], ["3", "4"]])
    (('a', '1', '3'), [('b', '2', '4')])
    """
    head, *rest = zip(heads, *lines, strict=True)
    return head, rest


_COMPARED_HEADS = (
    "network",
    "paper, %",
    "the paper's recipe here, %",
    "ours, %",
    "less by",
    "layers",
    "fields",
    "orientations pooled",
    "dropout",
    "augmentation",
    "label smoothing",
    "weights averaged",
    "epochs",
    "batch",
    "optimiser",
    "highest rate",
    "schedule",
    "weight decay",
    "retrained on all",
)


def compared(
    found: Sequence[Row], recipes: Mapping[str, Recipe] = RECIPES
) -> list[tuple[str, ...]]:
    """Ours against the paper's recipe: a line for every row of the paper's that was run.

    A cell has one value where both agree, and "paper's → ours" where they do not. Of a recipe that
    was run on several kinds of data, that with most data sets, then runs.
    """
    lines = []
    several = sorted(found, key=lambda row: (row.data, len(row.records)))
    most = {row.recipe.name: row for row in several}
    for row in found:
        paper = recipes.get(f"{row.recipe.name}_paper")
        if paper is None or row.recipe.paper_error is None or row is not most[row.recipe.name]:
            continue
        if not row.records:
            continue
        here = most.get(paper.name)
        mean = statistics.fmean(record.test_error for record in row.records)
        better = f"{row.recipe.paper_error - mean:.2f}" if row.complete else "–"
        told = zip(_settings_told(paper), _settings_told(row.recipe), strict=True)
        name = row.recipe.row if row.recipe.row == paper.row else f"{paper.row} → {row.recipe.row}"
        cells = (theirs if theirs == ours else f"{theirs} → {ours}" for theirs, ours in told)
        reached = here.error if here and here.records else "–"
        lines.append((name, _percent(row.recipe.paper_error), reached, row.error, better, *cells))
    return lines


def _settings_told(recipe: Recipe) -> tuple[str, ...]:
    """What decides a result, in words, defaults of the network included."""
    kind, options = MODELS[recipe.model]
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()
    }
    network: dict[str, Any] = {**defaults, **options, **dict(recipe.model_options)}
    augmentation = (
        key if value is True else f"{key} {value}" for key, value in recipe.augmentation
    )
    return (
        _layers(network),
        ", ".join(map(str, network["fields"])),
        str(network["pool"] or "no") if network["group"] else "–",
        f"{network.get('dropout', 0) or 'no'}",
        ", ".join(augmentation) or "no",
        f"{recipe.label_smoothing or 'no'}",
        f"by {recipe.ema_decay}" if recipe.ema_decay else "no",
        str(recipe.epochs),
        str(recipe.batch_size),
        recipe.optimizer,
        f"{recipe.learning_rate:g}",
        recipe.schedule + f", warm-up {recipe.warmup_epochs:g}" * bool(recipe.warmup_epochs),
        f"{recipe.weight_decay or 'no'}",
        "yes" if recipe.retrain_on_all else "no",
    )


def _layers(network: Mapping[str, Any]) -> str:
    """Operators, stencils and initialisation of a network's convolutions.

    >>> _layers({"group": "p8", "options": {"stencils": "central"}})
    '9 operators, central 5×5, init relu'
    """
    if network["group"] is None:
        return "3×3 filters"
    options = dict(network["options"] or {})
    init = options.pop("init", "relu")
    basis = filter_basis(network["group"], **options)
    angle = basis.operators.angle
    return (
        f"{len(basis.operators)} operators{f', turned {angle:g}°' * bool(angle)}, "
        f"{basis.stencils.name} {basis.size}×{basis.size}, init {init}"
    )


_EARLIER_HEADS = ("network", "paper, %", "test error, %", "seeds", "code", "finished", "then → now")


def earlier(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """Runs of settings that a recipe no longer has: what they gave, and what was changed.

    They are left out of the rows' means.
    """
    lines: list[tuple[str, ...]] = []
    for recipe, outdated in {row.recipe.name: (row.recipe, row.outdated) for row in found}.values():
        now = _flat(recipe.settings())
        for ran in _by(outdated, lambda record: f"{_kind(record)} {record.settings}").values():
            then = _flat(ran[0].settings)
            changes = [
                printable(f"{key} {then.get(key, 'not set')} → {now.get(key, 'not set')}")
                for key in [*then, *(key for key in now if key not in then)]
                if then.get(key) != now.get(key)
            ]
            lines.append(
                (
                    recipe.row + f" ({recipe.note})" * bool(recipe.note),
                    "–" if recipe.paper_error is None else _percent(recipe.paper_error),
                    spread([record.test_error for record in ran]),
                    ", ".join(_name(record) for record in ran),
                    ", ".join(dict.fromkeys(r for record in ran for r in _revisions(record))),
                    max(record.finished for record in ran)[:10],
                    ", ".join(changes),
                )
            )
    return lines


def _flat(settings: Mapping[str, Any], owner: str = "") -> dict[str, Any]:
    """Settings within settings by their names with points between."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{owner}{key}.") if isinstance(value, dict) else {owner + key: value}
    return found


def _further(found: Sequence[Row]) -> list[_Table]:
    """Ours against the paper's recipe, and runs of earlier settings, where there are any."""
    tables: list[_Table] = [
        ("Ours against the paper's recipe", _COMPARED_HEADS, compared(found)),
        ("Left out: runs of earlier settings", _EARLIER_HEADS, earlier(found)),
    ]
    return [table for table in tables if table[2]]


def _differences(found: Sequence[Row]) -> list[str]:
    """The same for a terminal: only what differs, a paragraph for each row."""
    parts = []
    for title, heads, lines in _further(found):
        told = [title]
        for line in lines:
            pairs = zip(heads[1:], line[1:], strict=True)
            cells = [f"{h}: {cell}" for h, cell in pairs if "→" in cell or "%" in h]
            whole = f"{line[0]}: {'; '.join(cells)}"
            told.append(textwrap.fill(whole, 100, subsequent_indent="  ", break_on_hyphens=False))
        parts.append("\n".join(told) + "\n")
    return parts


def _note(found: Sequence[Row], others: Mapping[str, Sequence[Record]] | None = None) -> str:
    """What a reader of these tables must know."""
    shown = [record for row in found for record in row.records]
    shown += [record for records in (others or {}).values() for record in records]
    return (
        NOTE
        + RECREATED * any(record.recreated for record in shown)
        + SEVERAL * any(row.data > 1 for row in found)
        + UNVERIFIED * any(record.unverified for record in shown)
        + OUTDATED * any(row.outdated for row in found)
        + SHARED * any((record.shared or 1) > 1 for record in shown)
    )


def updated(text: str, found: Sequence[Row], name: str | Path = "the text") -> str:
    """A page's text with the tables between its markers; errors call it by the name.

    Three kinds of markers begin a table: of all rows, as in docs/results.md, of recipes compared
    with the paper's and of earlier runs. A page has one of them or more, each with its own end.

    Raises:
        ValueError: for a page without the two lines between which the table goes.
    """
    parts = {
        BEGIN: lambda: as_markdown(found),
        COMPARED: lambda: _in_markdown(*_on_its_side(_COMPARED_HEADS, compared(found))) + "\n",
        EARLIER: lambda: _in_markdown(_EARLIER_HEADS, earlier(found)) + "\n",
    }
    wanted = [marker for marker in parts if marker in text] or [BEGIN]
    for marker in wanted:
        begin = text.find(marker)
        end = text.find(END, max(begin, 0))
        between = text[begin + len(marker) : end]
        if begin < 0 or end < 0 or text.count(marker) != 1 or any(m in between for m in parts):
            raise ValueError(
                f"{name}: expected one line {marker!r} and, after it, one line {END!r}"
            )
        text = f"{text[:begin]}{marker}\n\n{parts[marker]()}\n{text[end:]}"
    if text.count(END) != len(wanted):
        raise ValueError(f"{name}: expected one line {END!r} for each table; got {text.count(END)}")
    return text


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
    for number, (caption, heads, lines) in enumerate(_further(found)):
        parts.append(section(f"further-{number}", caption, as_table(heads, lines)))
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
    seeds = ", ".join(map(_name, records))
    return f"{'seed' if len(records) == 1 else 'seeds'} {seeds}"


def _name(record: Record) -> str:
    """Of a run, by its seeds."""
    return run_name(record.seed, record.data_seed)


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
        hint = html.escape(f"{name}, seed {_name(record)}: test error {record.test_error:.2f} %")
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
            _name(record),
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
    for number in (1, 2, 3, 4, 5, 0):
        mine = [row for row in found if row.recipe.table == number]
        heads: tuple[str, ...] = _HEADS
        lines = [row.cells() for row in mine]
        if number in (0, 4, 5):  # not in the paper
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
