"""The list of faults: each still applies, to code of every room, and names a test that there is."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run

sys.path.pop(0)
needs_code = pytest.mark.skipif(
    not (run.ROOT / "src" / "econv").is_dir(), reason="no code beside the tests"
)


@needs_code
def test_every_fault_applies_and_its_test_is_there():
    listed = run.faults()
    assert len(listed) >= 150
    assert len({(f.file, f.old, f.new) for f in listed}) == len(listed)
    for fault in listed:
        code = fault.applied((run.ROOT / "src" / "econv" / fault.file).read_text(encoding="utf-8"))
        if fault.file.endswith(".py"):
            ast.parse(code)
        if fault.test:
            file, _, name = fault.test.partition("::")
            tests = (run.ROOT / file).read_text(encoding="utf-8")
            assert f"def {name.partition('[')[0]}(" in tests, fault.test


@needs_code
def test_faults_are_in_all_rooms_and_few_survive():
    listed = run.faults()
    rooms = Counter(fault.file.partition("/")[0].removesuffix(".py") for fault in listed)
    source = run.ROOT / "src" / "econv"
    folders = {str(path.parent.relative_to(source)) for path in source.rglob("*.py")}
    assert folders == {str(Path(fault.file).parent) for fault in listed}
    assert len(rooms) >= 20
    assert len({fault.file for fault in listed}) >= 50
    assert {"plots", "page", "fourier", "stencils", "plan", "files", "models", "lab"} <= set(rooms)
    survivors = [fault for fault in listed if fault.reason]
    assert len(survivors) <= (1 - run.LEAST) * len(listed)
    assert all(len(fault.reason) > 20 for fault in survivors)


def test_a_fault_that_does_not_apply_is_an_error():
    fault = run.Fault("x.py", "a = 1", "a = 2", "t")
    assert fault.applied("a = 1\nb = 1") == "a = 2\nb = 1"
    for text in ("a = 2", "a = 1\na = 1"):
        with pytest.raises(ValueError, match="expected this text once"):
            fault.applied(text)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="no fork on this system")
def test_the_run_tells_what_is_found_from_what_is_not(tmp_path):
    test = "tests/test_groups.py::test_steps_are_the_turns_of_the_plane_and_none_in_space"
    good = run.Fault(
        "groups.py", "if self.dimension == 2 else 0", "if self.dimension == 3 else 0", test
    )
    blind = run.Fault("files.py", "_ABANDONED = 60.0", "_ABANDONED = 61.0", test)
    path = tmp_path / "faults.json"
    for listed, status, line in (
        ([good], 0, "1 of 1 faults found"),
        ([good, blind], 1, "1 of 2 faults found"),
    ):
        path.write_text(json.dumps([vars(fault) for fault in listed]), encoding="utf-8")
        # In a process of its own, which has not imported the code without faults.
        told = tmp_path / "told.json"
        command = [sys.executable, run.__file__, "--list", str(path), "--json", str(told)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, line in done.stdout) == (status, True), done.stdout + done.stderr
        found = json.loads(told.read_text(encoding="utf-8"))
        assert (found["found"], found["listed"]) == (1, len(listed))
        assert [fault["file"] for fault in found["missed"]] == ["files.py"] * (len(listed) - 1)
        assert {"machine", "revision", "finished"} <= set(found)
