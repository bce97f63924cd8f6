"""What the README says is so: its code runs, its tables are those of benchmarks and records."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from econv import records, report

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="no README beside the tests")


def test_the_code_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # it saves networks
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 2
    exec(compile("\n".join(blocks), str(README), "exec"), {})
    assert float(capsys.readouterr().out) < 0.001


def test_the_first_result_comes_within_25_lines():
    lines = README.read_text(encoding="utf-8").splitlines()
    for result in ("scores = network(", "    make run "):
        assert any(result in line for line in lines[:25])


def test_the_tables_are_those_of_the_benchmarks():
    script = ROOT / "benchmarks" / "readme.py"
    if not script.exists():
        pytest.skip("no benchmarks beside the tests")
    command = [sys.executable, str(script), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_papers_tables_are_those_of_the_records():
    folder = ROOT / "records"
    if not folder.exists():
        pytest.skip("no records beside the tests")
    text = README.read_text(encoding="utf-8")
    found = report.rows(records.load_all(folder))
    assert report.updated(text, found) == text, "econv report --markdown README.md mends it"
    changed = report.rows([])
    assert report.updated(text, changed) != text
