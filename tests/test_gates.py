"""Gates: every test runs under some target of make, and what is skipped is accounted for."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import wrong_skips

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LIST = json.loads((TESTS / "skips.json").read_text(encoding="utf-8"))


def given_reasons(text: str) -> set[str]:
    """The reasons in a file's source, with X for what is filled in."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name not in ("skip", "skipif", "importorskip", "AbsentError"):
            continue
        reasons = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
        if name in ("skip", "AbsentError") and node.args and not reasons:
            reasons = node.args[:1]
        if name == "importorskip" and not reasons:
            package = node.args[0]
            word = package.value if isinstance(package, ast.Constant) else "X"
            reasons = [ast.Constant(f"could not import '{word}': X")]
        for reason in reasons:
            parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
            texts = [p.value if isinstance(p, ast.Constant) else "X" for p in parts]
            found.add("".join(map(str, texts)))
    return found


REASONS = {
    (str(path.relative_to(ROOT)), reason)
    # A test skips for what this one gives as its reason.
    for path in [*TESTS.rglob("*.py"), *ROOT.glob("benchmarks/compatibility_checks.py")]
    for reason in given_reasons(path.read_text(encoding="utf-8"))
    # Of bars that skip what is done, of tests of tests, and of controls that are left out.
    if reason not in ("50", "no such thing", "no GPU", "X")
    and reason != "an ordinary network is not equivariant"
}


def without_a_skip(entries: list[dict[str, str]]) -> list[str]:
    """The reasons of entries that no skip in the source gives."""
    given = {reason for _, reason in REASONS}
    return [e["reason"] for e in entries if not any(re.fullmatch(e["reason"], r) for r in given)]


def test_every_reason_to_skip_a_test_is_in_the_list():
    assert len(REASONS) > 30
    unknown = [r for r in REASONS if not any(re.fullmatch(e["reason"], r[1]) for e in LIST)]
    assert unknown == []


def test_every_entry_is_of_a_skip_that_there_is():
    if not (ROOT / "benchmarks").exists():
        pytest.skip("no benchmarks beside the tests")
    assert without_a_skip(LIST) == []
    assert without_a_skip([{"reason": "nobody skips for this"}]) == ["nobody skips for this"]


def test_every_entry_names_a_target_of_make():
    if not (ROOT / "Makefile").exists():
        pytest.skip("no Makefile beside the tests")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for entry in LIST:
        assert set(entry) <= {"reason", "runs", "needs"}
        assert entry["runs"] in targets


def test_every_target_but_that_for_a_gpu_runs_on_a_schedule():
    flows, page = ROOT / ".github" / "workflows", ROOT / "CONTRIBUTING.md"
    if not flows.exists() or not page.exists():
        pytest.skip("no workflows beside the tests")
    run = [path.read_text(encoding="utf-8") for path in flows.glob("*.yml")]
    matrix = re.findall(r"target: \[(.*)\]", "".join(run))
    scheduled = {name for names in matrix for name in names.split(", ")}
    scheduled |= set(re.findall(r"run: make ([\w-]+)", "".join(run)))
    text = page.read_text(encoding="utf-8")
    told = set(re.findall(r"^    make ([\w-]+) .*#", text, re.M)) | {"fuzz-native"}
    assert len(told) >= 11
    assert told - scheduled == {"test-gpu"}
    assert "`make test-gpu` runs by hand" in text


def test_unaccounted_skips_are_named():
    assert wrong_skips({"no C++ compiler", "no CUDA device found"}, "test") == []
    assert wrong_skips({"because"}, "") == ["tests/skips.json has no such reason: because"]
    onnx = "could not import 'onnxruntime': No module named 'onnxruntime'"
    assert wrong_skips({onnx}, "") == []
    for gate in ("test", "test-all"):
        (line,) = wrong_skips({onnx}, gate)
        assert line.startswith(f"make {gate} runs these tests, and they were skipped")
    assert wrong_skips({"timm cannot be imported: no"}, "test-all") == []
    assert len(wrong_skips({"timm cannot be imported: no"}, "test-packages")) == 1


@pytest.mark.parametrize(("reason", "status"), [("no C++ compiler", 0), ("not today", 1)])
def test_a_run_with_an_unaccounted_skip_fails(tmp_path, reason, status):
    conftest = (TESTS / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    (tmp_path / "skips.json").write_text((TESTS / "skips.json").read_text(encoding="utf-8"))
    (tmp_path / "small_data.py").write_text("")
    (tmp_path / "test_x.py").write_text(
        f"import pytest\n\n\ndef test_it():\n    pytest.skip({reason!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = {k: v for k, v in os.environ.items() if k != "ECONV_GATE"}
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("tests/skips.json has no such reason: not today" in done.stdout) == bool(status)


def test_tests_for_a_gpu_are_those_that_make_test_gpu_runs():
    device_tests = pytest.importorskip("device_tests", reason="no benchmarks beside the tests")
    needing = {
        str(path.relative_to(ROOT))
        for path in TESTS.rglob("test_*.py")
        if "no CUDA device found" in given_reasons(path.read_text(encoding="utf-8"))
    }
    assert needing <= set(device_tests.FILES)
    assert all((ROOT / file).exists() for file in device_tests.FILES)


def test_all_tests_are_below_the_folders_that_make_test_all_collects():
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("no pyproject.toml beside the tests")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^testpaths = \["src", "tests"\]$', text, re.M)
    ignored = re.findall(r"--ignore-glob=(\S+?)[\s\"]", text)
    assert not any(path.match(glob) for path in TESTS.rglob("test_*.py") for glob in ignored)


@pytest.mark.slow
def test_a_level_of_forward_mode_that_is_left_open_is_an_error(tmp_path):
    conftest = (TESTS / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    (tmp_path / "skips.json").write_text("[]")
    (tmp_path / "small_data.py").write_text("")
    (tmp_path / "test_x.py").write_text(
        "from torch.autograd import forward_ad\n\n\n"
        "def test_it():\n    forward_ad.enter_dual_level()\n\n\ndef test_another():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "left open" in done.stdout
