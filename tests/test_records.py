"""Records: written whole or not at all, and checked when they are read."""

import dataclasses
import json
import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from econv import files, records, report
from econv.recipes import RECIPES
from econv.records import Record, RecordError


def record(**changes: object) -> Record:
    values: dict[str, object] = {
        "recipe": "mnist_rot_p8",
        "seed": 3,
        "dataset": "mnist_rot",
        "recreated": False,
        "parameters": 26_747,
        "validation_error": 1.5,
        "test_error": 1.25,
        "seconds": 20.5,
        "setup_seconds": 4.0,
        "device": "cpu, 2 threads",
        "selected_epoch": 2,
        "retrained": False,
        "data_sha256": "0" * 64,
        "predictions_sha256": "1" * 64,
        "epochs": [
            {"phase": "select", "epoch": 1, "loss": 0.1},
            {"phase": "select", "epoch": 2, "loss": 0.1, "validation_error": 1.5},
        ],
        "settings": {"name": "mnist_rot_p8"},
        "processes": 1,
        "step": "eager",
        "precision": "float32",
        "revision": "unknown",
        "source_sha256": "2" * 64,
        "versions": {"torch": "2"},
        "finished": "2030-01-01T00:00:00+00:00",
    }
    return Record(**{**values, **changes})  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = records.save(record(), tmp_path)
    assert path == tmp_path / "mnist_rot_p8" / "3.json"
    assert records.load(path) == record()
    told = json.loads(path.read_text())
    demanded = "recipe seed dataset recreated parameters validation_error test_error seconds"
    for name in (*demanded.split(), "setup_seconds", "device"):
        assert told[name] == getattr(record(), name)


def test_older_records_learn_from_others_of_the_same_data(tmp_path: Path) -> None:
    records.save(record(seed=1), tmp_path)
    assert [r.unverified for r in records.load_all(tmp_path)] == [None]
    records.save(record(seed=2, unverified=True), tmp_path)
    records.save(record(seed=3, data_sha256="4" * 64), tmp_path)
    records.save(record(seed=4, unverified=False), tmp_path)
    assert [r.unverified for r in records.load_all(tmp_path)] == [True, True, None, False]


def test_all_records_are_found_in_order(tmp_path: Path) -> None:
    for seed in (10, 2):
        records.save(record(seed=seed), tmp_path)
    records.save(record(recipe="digits_p8"), tmp_path)
    found = [(r.recipe, r.seed) for r in records.load_all(tmp_path)]
    assert found == [("digits_p8", 3), ("mnist_rot_p8", 2), ("mnist_rot_p8", 10)]
    assert records.load_all(tmp_path / "nowhere") == []


def test_the_error_of_the_selected_epoch_is_the_records() -> None:
    with pytest.raises(RecordError, match=r"expected selected_epoch 2 .* of 1\.0; got \[1\.5\]"):
        record(validation_error=1.0)
    with pytest.raises(RecordError, match="expected selected_epoch 2 once"):
        record(epochs=[LAST, LAST])
    with pytest.raises(RecordError, match="expected selected_epoch 2 once"):
        record(epochs=[{**LAST, "phase": "retrain"}])


LAST = {"phase": "select", "epoch": 2, "loss": 0.1, "validation_error": 1.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": "3"},
        {"seed": True},
        {"recreated": 1},
        {"test_error": float("nan")},
        {"test_error": False},
        {"test_error": 101.0},
        {"validation_error": -1.0},
        {"epochs": {}},
        {"epochs": [{"loss": 1.0}]},
        {"epochs": [{**LAST, "epoch": True}]},
        {"epochs": [{**LAST, "epoch": 0}]},
        {"epochs": [{**LAST, "loss": "0.1"}]},
        {"epochs": [{**LAST, "loss": None}]},
        {"epochs": [{**LAST, "validation_loss": float("inf")}]},
        {"epochs": [{**LAST, "learning_rate": True}]},
        {"epochs": [{**LAST, "validation_error": 101}]},
        {"epochs": [{**LAST, "seconds": -1.0}]},
        {"epochs": [{**LAST, "phase": "test"}]},
        {"versions": []},
        {"versions": {"torch": 2}},
        {"seconds": -5},
        {"setup_seconds": -0.1},
        {"parameters": 0},
        {"processes": 0},
        {"seed": -1},
        {"selected_epoch": 9999},
        {"selected_epoch": 1},
        {"selected_epoch": 0},
        {"retrained": True, "settings": {"retrain_on_all": False}},
        {"retrained": False, "settings": {"retrain_on_all": True}},
        {"parts": [1]},
        {"parts": [{"after": 0}]},
        {"parts": {}},
        {"shared": 0},
        {"shared": True},
        {"format": 4},
    ],
)
def test_wrong_values_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RecordError, match=f"expected .*{next(iter(changes))}"):
        record(**changes)


PART = {
    "after": 0,
    "revision": "unknown",
    "source_sha256": "2" * 64,
    "step": "eager",
    "processes": 1,
    "device": "cpu, 2 threads",
    "torch": "2",
    "processor": "one",
    "kernel": "none",
}
HOSTILE = ("<script>alert(1)</script>", "\x1b[2J", "a | b", "`rm`", "two\nlines", "\u202e")


def places(told: Any, of: type | None = None) -> list[tuple[Any, Any]]:
    """Every container in what JSON tells, and each of its keys, of values of one type or any."""
    found = []
    for key, value in told.items() if isinstance(told, dict) else enumerate(told):
        found += [(told, key)] if of is None or isinstance(value, of) else []
        found += places(value, of) if isinstance(value, dict | list) else []
    return found


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_record_is_markup_or_steers_a_terminal(tmp_path: Path, text: str) -> None:
    known = record(parts=[PART], weights_sha256="5" * 64)
    path = records.save(known, tmp_path)
    whole = json.loads(path.read_text())
    texts = [n for n, (of, _) in enumerate(places(whole, str)) if of is not whole["settings"]]
    assert len(texts) > 15
    for number in texts:
        told = json.loads(path.read_text())
        of, key = places(told, str)[number]
        of[key] = text
        with pytest.raises(RecordError) as caught:
            records.parse(json.dumps(told).encode(), path)
        assert str(caught.value).isprintable()
    for edit in ({"versions": {text: "2"}}, {"settings": {"retrain_on_all": text}}, {text: 1}):
        with pytest.raises(RecordError) as caught:
            records.parse(json.dumps(whole | edit).encode(), path)
        assert str(caught.value).isprintable()


def test_a_damaged_record_is_refused_or_can_be_reported(tmp_path: Path) -> None:
    settings = RECIPES["mnist_rot_p8"].settings()
    known = record(parts=[PART], settings=settings, retrained=settings["retrain_on_all"])
    content = records.save(known, tmp_path).read_bytes()
    path = records.path_of(tmp_path, "mnist_rot_p8", 3)
    draw = random.Random(0)
    values = (None, True, -1, 1e400, 10**30, "", [], {}, [[]], {"a": []}, [None], *HOSTILE)
    refused = accepted = 0
    for trial in range(600):
        told = json.loads(content)
        of, key = draw.choice(places(told))
        if trial % 3 == 0:
            del of[key]
        else:
            of[key] = draw.choice(values)
        changed = bytearray(json.dumps(told).encode())
        if trial % 5 == 0:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            found = records.parse(bytes(changed), path)
        except RecordError as error:
            refused += str(error).isprintable()
        else:
            accepted += 1
            rows = report.rows([found])
            page = report.as_html(rows, report.variants([found])) + report.as_markdown(rows)
            assert "<script>alert" not in page
            assert "\x1b" not in page + report.as_text(rows)
    assert refused + accepted == 600
    assert min(refused, accepted) > 100


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda told: told.pop("test_error"), r"missing \['test_error'\]"),
        (lambda told: told.pop("format"), r"missing \['format'\]"),
        (lambda told: told.update(unverified="no"), "expected unverified"),
        (lambda told: told.update(more=1), r"unknown \['more'\]"),
        (lambda told: told.update(seconds="1"), "expected seconds"),
        (lambda told: told.update(seed=4), "seed 4: moved or edited"),
        (lambda told: told.update(recipe="other"), "record of other"),
    ],
)
def test_an_edited_file_is_refused_by_name(tmp_path: Path, edit, message: str) -> None:
    path = records.save(record(), tmp_path)
    told = json.loads(path.read_text())
    edit(told)
    path.write_text(json.dumps(told))
    with pytest.raises(RecordError, match=message) as caught:
        records.load(path)
    assert str(path) in str(caught.value)


def test_a_record_of_the_first_format_means_what_it_did(tmp_path: Path) -> None:
    part = {
        "after": 0,
        "revision": "unknown",
        "source_sha256": "2" * 64,
        "step": "graph",
        "processes": 1,
        "device": "cpu, 2 threads",
    }
    known = record(step="graph", parts=[part])
    path = records.save(known, tmp_path)
    told = json.loads(path.read_text())
    for each in (told, told["parts"][0]):
        each["engine"] = each.pop("step")
    told["format"] = 1
    path.write_text(json.dumps(told))
    assert records.load(path) == known
    assert json.loads(path.read_text()) == told  # reading changes no file
    told["format"] = 3
    path.write_text(json.dumps(told))
    with pytest.raises(RecordError, match=r"missing \['step'\], unknown \['engine'\]"):
        records.load(path)


def test_a_record_from_before_a_field_says_that_it_is_not_known(tmp_path: Path) -> None:
    path = records.save(record(unverified=True), tmp_path)
    assert records.load(path).unverified is True
    told = json.loads(path.read_text())
    del told["unverified"]
    path.write_text(json.dumps(told))
    assert records.load(path).unverified is None


def test_files_that_are_not_named_by_a_seed_are_left_out(tmp_path: Path) -> None:
    path = records.save(record(), tmp_path)
    others = [tmp_path / "notes.json", tmp_path / "x" / "y" / "3.json", path.with_stem("best")]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("{}")
    assert records.load_all(tmp_path) == [record()]
    assert records.strays(tmp_path) == sorted(others)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_torn_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = records.save(record(), tmp_path)
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"3\.json is no record"):
        records.load_all(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_tried_without_leaving_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.check_folder(tmp_path)
    files.check_folder(tmp_path / "new" / "deep")
    monkeypatch.chdir(tmp_path)
    files.check_folder("relative")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "lost").symlink_to(tmp_path / "gone" / "away")
    for wrong in ("file", "file/below", "lost"):
        with pytest.raises(OSError, match=f"folder that can be written to; got .*{wrong}: "):
            files.check_folder(tmp_path / wrong)


def test_records_are_values() -> None:
    assert record() == record()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record().seed = 4  # type: ignore[misc]


@pytest.fixture
def git(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What git answers to each verb; a verb without an answer fails, as outside a repository."""
    answers = {"ls-files": "__init__.py", "rev-parse": "abc", "status": ""}

    def answer(folder: Path, verb: str, *_: str) -> str:
        if verb not in answers:
            raise subprocess.CalledProcessError(128, "git")
        return answers[verb]

    monkeypatch.setattr(records, "_git", answer)
    monkeypatch.delenv("ECONV_REVISION", raising=False)
    records.revision.cache_clear()
    yield answers
    records.revision.cache_clear()


def test_the_revision_is_the_commit(git: dict[str, str]) -> None:
    assert records.revision() == "abc"
    records.revision.cache_clear()
    git["status"] = " M file.py"
    assert records.revision() == "abc+changes"


def test_without_git_the_revision_is_unknown_or_told(
    git: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    git.clear()
    assert records.revision() == "unknown"
    for told in ("0123abc", "f" * 40, "0123abc+changes"):
        records.revision.cache_clear()
        monkeypatch.setenv("ECONV_REVISION", told)
        assert records.revision() == told
    records.revision.cache_clear()
    monkeypatch.setenv("ECONV_REVISION", "")
    assert records.revision() == "unknown"


@pytest.mark.parametrize(
    "told",
    ["main", "0123ab", "f" * 41, "0123ABC", "0123abc+change", "0123abc+changes\n", "unknown"],
)
def test_what_is_no_revision_is_refused(
    git: dict[str, str], monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    git.clear()
    monkeypatch.setenv("ECONV_REVISION", told)
    with pytest.raises(ValueError, match="expected ECONV_REVISION as a commit"):
        records.revision()


def test_what_is_told_counts_before_git(
    git: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECONV_REVISION", "0123abc")
    assert records.revision() == "0123abc"


def test_the_source_hash_and_versions_say_what_ran() -> None:
    assert len(records.source_hash()) == 64
    assert {"python", "econv", "torch", "numpy", "cuda", "cudnn", "system"} == set(
        records.versions()
    )


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("resnet26_p8", "paper_resnet26_p8"),
        ("wide_resnet26", "paper_wide_resnet26"),
        ("convnet6_p8", "convnet6_p8"),
        ("paper_resnet26", "paper_resnet26"),
    ],
)
def test_older_records_call_the_papers_resnets_by_their_present_names(
    tmp_path: Path, number: int, old: str, new: str
) -> None:
    path = records.save(record(step="graph"), tmp_path)
    told = json.loads(path.read_text())
    told["format"], told["settings"] = number, told["settings"] | {"model": old}
    path.write_text(json.dumps(told))
    assert records.load(path).settings["model"] == new


def test_earlier_runs_lie_in_folders_of_their_own_and_are_read_with_the_others(
    tmp_path: Path,
) -> None:
    now = record(finished="2026-02-01T00:00:00+00:00")
    before = record(finished="2026-01-01T00:00:00+00:00", test_error=9.0)
    records.save(now, tmp_path)
    records.save(before, tmp_path / "earlier" / "1")
    assert records.load_all(tmp_path) == [before, now]
    assert records.strays(tmp_path) == []
    wrong = tmp_path / "earlier" / "1" / "0.json"
    wrong.write_text("{}")
    assert records.strays(tmp_path) == [wrong]


def test_every_run_that_was_ever_committed_is_still_among_the_records() -> None:
    root = Path(__file__).resolve().parents[1]
    if not (root / "records").exists() or not (root / ".git").exists():
        pytest.skip("no history beside the tests")

    def git(*arguments: str, given: str = "") -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, input=given, capture_output=True, text=True, check=True
        ).stdout

    changes = git("log", "--format=", "--raw", "--no-abbrev", "--no-renames", "--", "records")
    blobs = {line.split()[3] for line in changes.splitlines() if line.endswith(".json")}
    shown = git("cat-file", "--batch", given="\n".join(sorted(blobs - {"0" * 40})))
    runs = r'"recipe": "(.*)",\n "seed": (\d+),[^{]*?"predictions_sha256": "(.*)"'
    ever = set(re.findall(runs, shown))
    kept = {
        (r.recipe, str(r.seed), r.predictions_sha256) for r in records.load_all(root / "records")
    }
    assert ever - kept == set()
