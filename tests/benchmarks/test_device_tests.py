"""The record of the tests on a GPU: what passed, what did not, and a run that fails says so."""

import json
import sys
from pathlib import Path

import pytest

device_tests = pytest.importorskip("device_tests", reason="no benchmarks beside the tests")
readme = pytest.importorskip("readme", reason="no benchmarks beside the tests")

GOOD = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_good(n):
    assert n

@pytest.mark.skip(reason="no such thing")
def test_left_out():
    pass
"""
BAD = """
import pytest

def test_good():
    pass

@pytest.mark.parametrize("n", [1, 2])
def test_bad(n):
    assert n == 1

@pytest.fixture
def broken():
    raise OSError

def test_of_a_fixture(broken):
    pass
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(root, within=120.0, **sources):
    for name, source in sources.items():
        (root / "tests" / f"{name}.py").write_text(source)
    files = tuple(f"tests/{name}.py" for name in sources)
    return device_tests.run(files, 1, within, root)


def test_every_outcome_is_counted_in_its_file(root):
    found = run(root, test_one=GOOD, test_one_more=BAD)
    one, more = (found["files"][f"tests/{name}.py"] for name in ("test_one", "test_one_more"))
    assert (one["passed"], one["failed"], one["skipped"]) == (2, 0, 1)
    assert (more["passed"], more["failed"], more["skipped"]) == (2, 2, 0)
    assert found["failures"] == [
        "tests/test_one_more.py::test_bad[2]",
        "tests/test_one_more.py::test_of_a_fixture",
    ]
    assert found["skips"] == {"no such thing": 1}
    assert found["seconds"] > 0


@pytest.mark.parametrize(
    ("source", "failure"),
    [
        ("import no_such_package", "tests/test_it.py::tests.test_it"),
        ("", "tests/test_it.py: no test ran"),
        ("import os\ndef test_it(): os._exit(7)", "tests/test_it.py: no test ran"),
    ],
    ids=["an import that fails", "no tests", "a crash"],
)
def test_a_file_that_gives_no_result_is_a_failure(root, source, failure):
    assert failure in run(root, test_it=source)["failures"]


def test_a_run_that_takes_too_long_is_a_failure(root):
    """What had ended by then is written down."""
    slow = "import time\ndef test_bad(): assert False\ndef test_slow(): time.sleep(60)"
    found = run(root, within=12.0, test_it=slow)
    assert found["failures"] == [
        "tests/test_it.py::test_bad",
        "pytest did not end within 12 s",
    ]
    assert found["files"]["tests/test_it.py"]["failed"] == 1
    assert found["seconds"] < 30


def test_a_run_that_does_not_heed_an_interrupt_is_killed(root, monkeypatch):
    monkeypatch.setattr(device_tests, "GRACE", 0.5)
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    found = run(root, within=4.0, test_it=f"{deaf}def test_it(): time.sleep(60)")
    assert found["failures"] == ["tests/test_it.py: no test ran", "pytest did not end within 4 s"]
    assert found["seconds"] < 30


def test_a_file_that_skips_itself_has_not_failed(root):
    source = 'import pytest\npytest.skip("no GPU", allow_module_level=True)'
    found = run(root, test_it=source, test_other=GOOD)
    assert found["files"]["tests/test_it.py"]["skipped"] == 1
    assert found["failures"] == []


@pytest.mark.parametrize("good", [True, False])
def test_the_record_is_written_and_the_exit_status_is_that_of_the_tests(
    monkeypatch, tmp_path, capsys, good
):
    count = {"passed": 3, "failed": 0 if good else 1, "skipped": 0, "seconds": 1.0}
    failures = [] if good else ["tests/test_cuda.py::test_it"]
    found = {"files": {"tests/test_cuda.py": count}, "failures": failures, "skips": {}}
    monkeypatch.setattr(device_tests, "run", lambda *_: {**found, "seconds": 2.0})
    monkeypatch.setattr(device_tests, "device", lambda: "a device")
    file = tmp_path / "record.json"
    status = 0
    try:
        device_tests.main(["--json", str(file)])
    except SystemExit as error:
        status = error.code
    assert status == (0 if good else 1)
    record = json.loads(file.read_text())
    assert record["device"] == "a device"
    assert record["failures"] == failures
    assert record["files"] == found["files"]
    assert set(record["versions"]) >= {"python", "torch", "triton"}
    assert record["versions"]["python"] == sys.version.split()[0]
    assert record["revision"]
    assert len(record["source_sha256"]) == 64
    assert ("FAILED" in capsys.readouterr().out) is not good
    text = readme.device_tests(record)
    assert ("**1 failed**" in text) is not good
    assert ("tests/test_cuda.py::test_it" in text) is not good


def test_without_a_device_nothing_is_run(monkeypatch):
    monkeypatch.setattr(device_tests, "device", lambda: None)
    with pytest.raises(SystemExit, match="expected a CUDA device"):
        device_tests.main([])


def test_tests_do_not_start_side_by_side_without_what_that_takes(monkeypatch):
    monkeypatch.setattr(device_tests, "device", lambda: "a device")
    monkeypatch.setattr(device_tests.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="expected pytest-xdist for 4 processes"):
        device_tests.main(["--processes", "4"])


def test_the_files_are_there():
    for file in device_tests.FILES:
        assert (Path(__file__).parents[2] / file).exists(), file


def test_without_a_record_the_page_says_so():
    assert "no record" in readme.device_tests(None)
