"""The report: rows count what they should, say what is missing, and print everywhere alike."""

import argparse
import dataclasses
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import browsing
from econv import records, report
from econv.recipes import RECIPES
from econv.records import Record
from test_records import record


def made(name: str = "mnist_rot_p8", seed: int = 0, **changes: object) -> Record:
    epochs = [
        {"phase": "select", "epoch": e, "loss": 1 / e, "validation_error": 8 / e} for e in (1, 2, 4)
    ]
    values: dict[str, object] = {"epochs": epochs, "selected_epoch": 4, "validation_error": 2.0}
    if name in RECIPES:
        values["settings"] = RECIPES[name].settings()
        values["retrained"] = RECIPES[name].retrain_on_all
    return record(recipe=name, seed=seed, **{**values, **changes})


def row(found: list[report.Row], name: str = "mnist_rot_p8") -> report.Row:
    (match,) = [r for r in found if r.recipe.name == name]
    return match


def test_enough_seeds_give_mean_and_deviation_beside_the_papers_number() -> None:
    found = [made(seed=s, test_error=e) for s, e in enumerate((1.2, 1.3, 1.7))]
    cells = row(report.rows(found)).cells()
    assert cells[1:4] == ("1.87", "1.40 ± 0.26", "3")
    assert cells[5] == "26,747"
    assert cells[6] == "20.5 (cpu, 2 threads)"
    assert cells[7] == "eager, float32"
    assert cells[8] == "mnist_rot, retrained on all"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_seeds_are_incomplete_and_show_no_mean(count: int) -> None:
    found = report.rows([made(seed=s, test_error=1.23) for s in range(count)])
    assert row(found).error == f"incomplete ({count} of 3 seeds)"
    for text in (report.as_text(found), report.as_markdown(found), report.as_html(found)):
        assert f"incomplete ({count} of 3 seeds)" in text
    assert "1.23" not in report.as_text(found) + report.as_markdown(found)


def test_re_created_data_are_labelled_and_never_averaged_with_official_ones() -> None:
    official = [made(seed=s, test_error=1.0) for s in range(3)]
    again = [
        made(seed=s, test_error=2.0, recreated=True, data_sha256="9" * 64) for s in range(3, 6)
    ]
    found = [r for r in report.rows([*official, *again]) if r.recipe.name == "mnist_rot_p8"]
    assert [(r.recreated, r.error) for r in found] == [
        (False, "1.00 ± 0.00"),
        (True, "2.00 ± 0.00"),
    ]
    assert "re-created" not in found[0].cells()[8]
    assert "re-created" in found[1].cells()[8]
    for text in (report.as_text(found), report.as_markdown(found), report.as_html(found)):
        assert "re-created" in text


def test_runs_on_other_images_have_rows_of_their_own() -> None:
    mixed = [made(seed=s, data_sha256=str(s) * 64) for s in range(3)]
    found = [r for r in report.rows(mixed) if r.recipe.name == "mnist_rot_p8"]
    assert len(found) == 3
    assert not any(r.complete for r in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bfloat16"},
        {"parameters": 26_000},
        {"dataset": "other"},
        {"data_sha256": "9" * 64},
        {"recreated": True},
    ],
)
def test_unlike_runs_are_not_averaged(changes: dict[str, object]) -> None:
    mixed = [made(seed=0), made(seed=1), made(seed=2, **changes)]
    found = [r for r in report.rows(mixed) if r.recipe.name == "mnist_rot_p8"]
    assert sorted(r.error for r in found) == [f"incomplete ({n} of 3 seeds)" for n in (1, 2)]
    others = {"x": [made("x", s, test_error=1.0 + s) for s in (0, 1)]}
    assert "1.50 ± 0.71" in report.as_text([], others)
    others["x"][1] = made("x", 1, test_error=2.0, **changes)
    assert "1.50" not in report.as_text([], others)


def test_rows_say_how_they_were_run() -> None:
    found = [made(seed=s, step=e) for s, e in enumerate(("eager", "graph", "eager"))]
    assert row(report.rows(found)).cells()[7] == "eager, float32; graph, float32"
    others = {"x": found}
    assert "eager, float32; graph, float32" in report.as_text([], others)


def test_records_of_earlier_settings_do_not_count() -> None:
    old = dataclasses.replace(RECIPES["mnist_rot_p8"], epochs=7).settings()
    found = row(report.rows([*(made(seed=s) for s in range(2)), made(seed=2, settings=old)]))
    assert not found.complete
    assert "1 outdated" in found.cells()[8]


def test_a_recipe_that_was_changed_after_its_test_error_was_seen_says_so() -> None:
    old = dataclasses.replace(RECIPES["mnist_rot_p8"], epochs=7).settings()
    now = [made(seed=s, finished="2026-02-01T00:00:00+00:00") for s in range(3)]
    before = made(seed=0, settings=old, test_error=9.0, finished="2026-01-01T00:00:00+00:00")
    after = dataclasses.replace(before, finished="2026-03-01T00:00:00+00:00")
    assert report.CHANGED in row(report.rows([*now, before])).cells()[0]
    assert report.CHANGED not in row(report.rows([*now, after])).cells()[0]
    assert report.CHANGED in row(report.rows([before])).cells()[0]
    assert report.CHANGED not in row(report.rows(now)).cells()[0]
    ((name, paper, error, seeds, _, finished, changes),) = report.earlier(
        report.rows([*now, before])
    )
    assert (name, paper, error, seeds) == ("PDO-eConv, p8", "1.87", "9.00", "0")
    assert (finished, changes) == ("2026-01-01", "epochs 7 → 150")
    assert report.earlier(report.rows(now)) == []


def test_settings_of_strangers_steer_no_terminal_and_are_no_markup() -> None:
    settings = RECIPES["mnist_rot_p8"].settings() | {"batch_size": "<script>\x1b[2J", "\x1b[1m": 1}
    found = report.rows([made(settings=settings, finished="2026-01-01T00:00:00+00:00")])
    text = report.updated(f"{report.EARLIER}\n{report.END}\n", found)
    assert "batch_size &lt;script>?[2J → 128" in text
    for shown in (report.as_text(found), text, report.as_html(found)):
        assert "\x1b" not in shown
    assert "<script>?" not in text + report.as_html(found)


def test_runs_of_several_codes_all_count_and_each_code_has_its_mean() -> None:
    ran = [made(seed=s, test_error=1.0, revision="a" * 40) for s in range(3)]
    ran += [made(seed=s, test_error=2.0, revision="b" * 40) for s in range(2)]
    cells = row(report.rows(ran)).cells()
    assert cells[2] == "1.40 ± 0.55 (1.00 ± 0.00 by aaaaaaaaaa; 2.00 ± 0.00 by bbbbbbbbbb)"
    assert cells[3] == "3, 5 runs"
    again = [made(seed=0, revision=code * 40) for code in "abc"]
    assert row(report.rows(again)).error == "incomplete (1 of 3 seeds)"


def test_every_difference_to_the_papers_recipe_is_in_a_column() -> None:
    found = report.rows([made(seed=s, test_error=1.37) for s in range(3)])
    (line,) = report.compared(found)
    cells = dict(zip(report._COMPARED_HEADS, line, strict=True))
    assert cells["network"] == "PDO-eConv, p8"
    assert (cells["paper, %"], cells["less by"]) == ("1.87", "0.50")
    assert cells["layers"].startswith("9 operators, central 5×5, init paper → 9 operators, iso")
    assert cells["fields"] == "7, 7, 7, 7, 7, 7 → 8, 8, 8, 8, 8, 10"
    assert cells["orientations pooled"] == "no → max"
    assert cells["epochs"] == "200 → 150"
    assert cells["batch"] == "128"
    assert cells["retrained on all"] == "no → yes"
    text, page = report.as_text(found), report.as_html(found)
    assert "orientations pooled: no → max" in " ".join(text.split())
    assert "<td>no → max</td>" in page


def test_what_the_papers_recipe_gave_here_stands_between_the_papers_figure_and_ours() -> None:
    ran = [made(seed=s, test_error=1.5, recreated=True) for s in range(3)]
    (line,) = report.compared(report.rows(ran))
    assert line[:5] == ("PDO-eConv, p8", "1.87", "–", "1.50 ± 0.00", "0.37")
    ran += [made("mnist_rot_p8_paper", seed=s, test_error=2.0 + s) for s in range(3)]
    (line,) = report.compared(report.rows(ran))
    assert line[1:4] == ("1.87", "3.00 ± 1.00", "1.50 ± 0.00")


def test_of_several_sets_of_images_the_row_with_most_runs_is_compared() -> None:
    ran = [made(seed=s, test_error=1.0, recreated=True) for s in range(3)]
    again: dict[str, Any] = {"recreated": True, "test_error": 2.0}
    ran += [
        made(seed=s, data_seed=d, data_sha256=f"{d}" * 64, **again)
        for s in range(3)
        for d in (1, 2, 3)
    ]
    found = report.rows(ran)
    mine = [r for r in found if r.recipe.name == "mnist_rot_p8"]
    assert sorted((r.error, r.cells()[3]) for r in mine) == [
        ("1.00 ± 0.00", "3"),
        (
            f"2.00 ± 0.00 ({', '.join(['2.00 ± 0.00'] * 3)} by data)",
            "3 on each of 3 data sets, 9 runs",
        ),
    ]
    assert [line[3][:4] for line in report.compared(found)] == ["2.00"]
    assert "A second row of such a name" in report.as_text(found)
    each = [made(seed=s, data_seed=s + 1, data_sha256=f"{s}" * 64, **again) for s in range(3)]
    assert row(report.rows(each)).cells()[2:4] == (
        "2.00 ± 0.00 (2.00, 2.00, 2.00 by data)",
        "3, 3 data sets",
    )


def test_whatever_decides_a_result_would_show_among_the_differences() -> None:
    """A change of any setting changes a cell, so that no difference goes untold."""
    name = "mnist_rot_p8"
    changes = {
        "model_options": (("options", {"stencils": "gaussian"}),),
        "epochs": 3,
        "batch_size": 3,
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "schedule": "steps",
        "warmup_epochs": 2.0,
        "weight_decay": 0.5,
        "augmentation": (("shift", 1),),
        "label_smoothing": 0.5,
        "ema_decay": 0.5,
        "retrain_on_all": False,
    }
    before = report._settings_told(RECIPES[name])
    for key, value in changes.items():
        other = dataclasses.replace(RECIPES[name], **{key: value})
        assert report._settings_told(other) != before, key
    untold = {"dataset", "model", "milestones", "final_rate", "evaluate_every", "name"}
    assert set(RECIPES[name].settings()) == set(changes) | untold


def test_marked_tables_of_recipes_and_earlier_runs_are_written_and_checked(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"a\n{report.COMPARED}\nold\n{report.END}\nb\n{report.EARLIER}\n{report.END}\nc\n"
    )
    old = dataclasses.replace(RECIPES["mnist_rot_p8"], epochs=7).settings()
    found = report.rows([*(made(seed=s) for s in range(3)), made(seed=0, settings=old)])
    assert report.update(page, found)
    text = page.read_text()
    assert "| PDO-eConv, p8 | 1.87 |" in text
    assert "epochs 7 → 150" in text
    assert "old" not in text
    assert [line for line in text.splitlines() if len(line) == 1] == ["a", "b", "c"]
    assert not report.update(page, found)
    for broken in (text.replace(report.END, "", 1), text + report.END, text + report.COMPARED):
        with pytest.raises(ValueError, match="expected one line"):
            report.updated(broken, found)


def test_retraining_is_said() -> None:
    found = row(report.rows([made(seed=s) for s in range(3)]))
    assert "retrained on all" in found.cells()[8]
    name = "mnist_rot_p8_paper"
    found = row(report.rows([made(name, seed=s) for s in range(3)]), name)
    assert "retrained on all" not in found.cells()[8]


def test_the_papers_schedules_appear_once_they_were_run() -> None:
    name = "mnist_rot_p8_paper"
    assert name not in [r.recipe.name for r in report.rows([])]
    assert row(report.rows([made(name)]), name).error == "incomplete (1 of 3 seeds)"


def test_every_demanded_row_is_there_without_any_record() -> None:
    text = report.as_text(report.rows([]))
    for title in ("Table 1", "Table 2", "Table 3"):
        assert title in text
    for error in ("5.03", "2.28", "1.87", "0.709", "11.50", "5.65", "5.38", "3.50", "27.00"):
        assert error in text


def test_changed_settings_are_listed_apart() -> None:
    found = [made("mnist_rot_p8+epochs=3", seed=s, test_error=float(s)) for s in (1, 2)]
    others = report.variants(found)
    assert list(others) == ["mnist_rot_p8+epochs=3"]
    text = report.as_text(report.rows(found), others)
    assert "With changed settings" in text
    assert "1.50 ± 0.71" in text
    assert row(report.rows(found)).error == "incomplete (0 of 3 seeds)"


def test_the_readme_changes_between_its_markers_only(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    found = report.rows([made()])
    assert report.update(path, found)
    text = path.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert report.as_markdown(found) in text
    assert not report.update(path, found)


@pytest.mark.parametrize(
    "text",
    ["nothing", report.BEGIN, report.END + report.BEGIN, report.BEGIN * 2 + report.END],
)
def test_a_readme_without_its_markers_is_left_alone(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"README\.md: expected one line"):
        report.update(path, report.rows([]))
    assert path.read_text() == text
    assert report.main(options(records=tmp_path, check=path)) == 1
    assert f"econv report: {path}: expected one line" in capsys.readouterr().err


def test_markdown_tables_have_as_many_cells_as_heads() -> None:
    lines = report.as_markdown(report.rows([made(), made("digits_p8")])).splitlines()
    bars = {line.count("|") for line in lines if line.startswith("|")}
    assert bars == {10, 8}  # the digits, which the paper has not, lack its two columns


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href")]
        if tag not in ("meta", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_needs_nothing_else_and_draws_every_seed() -> None:
    found = [made(seed=s) for s in range(3)]
    page = _Page()
    page.feed(report.as_html(report.rows(found)))
    assert page.open == []
    assert page.addresses == []
    panels = page.seen.count("svg")
    assert panels == 2  # validation error and training loss
    assert page.seen.count("polyline") == page.seen.count("circle") == 3 * panels


def test_the_page_escapes_what_records_say(monkeypatch) -> None:
    monkeypatch.setattr(records, "_plain", lambda text: True)  # records refuse markup themselves
    name = "mnist_rot_p8+note=<script>"
    found = [made(name, device="<script>", dataset="<script>")]
    page = report.as_html(report.rows(found), report.variants(found))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def lines_of(drawn: str) -> list[list[tuple[float, float]]]:
    """The points of every line, downwards positive."""
    texts = [part.split("'")[0] for part in drawn.split("points='")[1:]]
    return [[tuple(map(float, point.split(","))) for point in text.split()] for text in texts]


def test_a_curve_falls_where_the_error_does_and_takes_a_perfect_score() -> None:
    errors, losses = lines_of(report.curves([("p8", [made()])]))
    for line in (errors, losses):
        heights = [y for _, y in line]
        assert heights == sorted(heights)
        assert heights[0] < heights[-1]
    perfect = [{"epoch": e, "validation_error": 0.0} for e in (1, 4)]
    for epochs in (perfect, perfect[1:]):
        drawn = report.curves([("p8", [made(epochs=epochs, validation_error=0.0)])])
        assert "nan" not in drawn


def test_curves_of_one_table_share_their_scale_and_keep_their_colour() -> None:
    worse = [{"phase": "select", "epoch": e, "validation_error": 80 / e} for e in (1, 2, 4)]
    cnn = [made("mnist_rot_cnn", s, epochs=worse, validation_error=20.0) for s in range(2)]
    drawn = report.curves([("CNN", cnn), ("p8", [made()])])
    validation = drawn.split("</svg>")[0]
    first, second, ours = lines_of(validation)
    assert first == second
    assert all(y < lower for (_, y), (_, lower) in zip(first, ours, strict=True))
    assert validation.count("<g class='series-0'>") == 2
    assert validation.count("<g class='series-1'>") == 1
    assert "seeds 0, 1" in drawn


def test_retraining_does_not_run_back_over_the_curve() -> None:
    again = [{"phase": "retrain", "epoch": e, "loss": 0.1} for e in (1, 2, 4)]
    drawn = report.curves([("p8", [made(epochs=[*made().epochs, *again], retrained=True)])])
    assert [len(line) for line in lines_of(drawn)] == [3, 3]


def test_every_run_is_listed_with_what_it_ran_on() -> None:
    found = [made(seed=s, test_error=1.25, setup_seconds=7.75) for s in range(2)]
    page = report.as_html(report.rows(found))
    runs = page.split("<details>")[1].split("</details>")[0]
    assert runs.count("<tr>") == 3
    for text in ("1.25", "7.8", found[0].device, found[0].versions["torch"]):
        assert text in runs
    assert "<details>" not in report.as_html(report.rows([]))


def test_data_are_explained_as_re_created_where_there_are_some() -> None:
    assert report.RECREATED not in report.as_markdown(report.rows([made()]))
    again = report.as_markdown(report.rows([made(recreated=True)]))
    assert report.RECREATED in again


def test_unverified_data_are_labelled_and_explained() -> None:
    assert report.UNVERIFIED not in report.as_markdown(report.rows([made()]))
    found = [made(seed=s, unverified=True) for s in range(3)]
    assert row(report.rows(found)).cells()[8] == "mnist_rot, unverified, retrained on all"
    assert report.UNVERIFIED in report.as_markdown(report.rows(found))
    assert "mnist_rot, unverified" in report.as_html(report.rows(found))


def test_seconds_of_runs_that_shared_a_device_are_not_shown() -> None:
    found = [made(seed=s, seconds=77.7, shared=n) for s, n in enumerate((1, 3, None))]
    others = {"x": [made("x", seconds=77.7, shared=2)]}
    rows = report.rows(found)
    assert row(rows).cells()[6] == "† (cpu, 2 threads)"
    for text in (report.as_text(rows), report.as_markdown(rows), report.as_text([], others)):
        assert "77.7" not in text
        assert "".join(text.split()).count("".join(report.SHARED.split())) == 1
    assert "77.7†" in report.as_html(rows)
    for shared in (1, None):
        alone = report.rows([made(seed=s, shared=shared) for s in range(3)])
        assert row(alone).cells()[6] == "20.5 (cpu, 2 threads)"
        assert "†" not in report.as_text(alone) + report.as_markdown(alone)


def test_the_note_says_which_epoch_is_tested_and_is_everywhere() -> None:
    found = report.rows([made()])
    for text in (report.as_text(found), report.as_markdown(found), report.as_html(found)):
        words = " ".join(text.split())
        assert "sample standard deviation (n − 1)" in words
        assert f"{report.RETRAINED}, of the last epoch of a second training" in words


def options(**changes: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changes})


def test_the_command_prints_writes_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page, readme = tmp_path / "records", tmp_path / "page.html", tmp_path / "README.md"
    for seed in range(3):
        records.save(made(seed=seed, test_error=1.5), folder)
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    assert report.main(options(records=folder, check=readme)) == 1
    assert "are not those of the records" in capsys.readouterr().err
    assert report.main(options(records=folder, html=page, markdown=readme, check=readme)) == 0
    assert "1.50 ± 0.00" in capsys.readouterr().out
    assert "1.50 ± 0.00" in page.read_text()
    assert "1.50 ± 0.00" in readme.read_text()


def test_the_command_names_a_broken_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "0.json").write_text("{}")
    assert report.main(options(records=tmp_path)) == 1
    assert "0.json is no record" in capsys.readouterr().err


def test_the_command_leaves_out_what_is_no_record_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records.save(made(), tmp_path)
    (tmp_path / "mnist_rot_p8" / "notes.json").write_text("{}")
    assert report.main(options(records=tmp_path)) == 0
    told = capsys.readouterr()
    assert "incomplete (1 of 3 seeds)" in told.out
    assert "notes.json is left out" in told.err


def test_rows_of_no_table_appear_once_there_is_a_record() -> None:
    assert "digits" not in report.as_markdown(report.rows([]))
    assert row(report.rows([made("digits_p8")]), "digits_p8").complete


@pytest.mark.parametrize("last", [2, 3, 7, 12, 30, 99, 200, 300, 4000])
def test_epochs_on_the_axis_are_few_and_hold_both_ends(last: int) -> None:
    found = report._epochs(last)
    assert (found[0], found[-1]) == (1, last)
    assert 2 <= len(found) <= 6


# In a real browser


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("report")
    found = [made(name, seed=s) for name in ("mnist_rot_cnn", "mnist_rot_p8") for s in range(3)]
    found += [made("mnist_rot_p8+epochs=3"), made("cifar10_resnet26_p6m", dataset="cifar10")]
    page = report.as_html(report.rows(found), report.variants(found))
    (folder / "report.html").write_text(page, encoding="utf-8")
    for browser in browsing.started(folder / "profile"):
        browser.get((folder / "report.html").as_uri())
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        yield browser


@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_the_page_fits_every_screen(opened: Any, width: int) -> None:
    browsing.assert_nothing_overflows(opened, width)


@pytest.mark.parametrize("width", [320, 390, 480, 768, 1000, 1200])
def test_learning_curves_are_legible_on_every_screen(opened: Any, width: int) -> None:
    browsing.assert_charts_are_legible(opened, width)


def test_the_page_has_a_dark_mode_and_no_errors(opened: Any) -> None:
    browsing.assert_dark_mode_has_other_colours(opened)
    assert opened.get_log("browser") == []


@pytest.mark.parametrize(
    ("style", "check"),
    [
        (".chart text { font-size: 5px !important; }", browsing.assert_charts_are_legible),
        (".chart text { translate: 400px; }", browsing.assert_charts_are_legible),
        ("h1 { width: 2000px; }", browsing.assert_nothing_overflows),
    ],
)
def test_the_checks_in_the_browser_can_say_no(opened: Any, style: str, check: Any) -> None:
    check(opened, 768)
    opened.execute_script(
        "const style = document.createElement('style'); style.id = 'worse';"
        "style.textContent = arguments[0]; document.head.append(style)",
        style,
    )
    try:
        with pytest.raises(AssertionError):
            check(opened, 768)
    finally:
        opened.execute_script("document.getElementById('worse').remove()")
