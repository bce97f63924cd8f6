"""What the README says is so: its code runs, its tables are those of benchmarks and records."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from econv import records, report

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_tables_of_engines_say_how_many_times_dense_takes():
    readme = pytest.importorskip("readme", reason="no benchmarks beside the tests")
    case = {"group": "p8", "in_fields": 4, "out_fields": 8, "batch": 2, "size": 16}
    times = {"dense": 3.0, "spectral": 2.0}
    errors = {"dense": {"output": 0.2, "input": 0.2}, "spectral": {"output": 0.1, "input": 0.3}}
    parts = dict.fromkeys(("forward", "gram", "analyse", "pack", "largest", "spread"), 10.0)
    layer = {
        "case": case,
        "forward": {"median": times},
        "forward+backward": {"median": times, "graph": {"dense": 5.0, "spectral": 2.0}},
        "peak_bytes": {"dense": 2e6, "spectral": 1e6},
        "errors": errors,
        "kernels": {"dense": {"conv": 90.0}, "spectral": parts},
    }
    known = {"device": "a GPU", "torch": "2", "triton": "3", "revision": "a" * 40, "threads": 2}
    found = {**known, "layers": [layer]}
    name = "| p8, 4→8, batch 2, 16×16 |"
    assert f"{name} 1.50 | **1.50** | 2 / 1 |" in readme.cpu_layers(found)
    both = layer["forward+backward"]
    for word in ("alone", "isolated"):
        both[word] = {"median": {"dense": 7.0, "spectral": 2.0}}
        text = f"{name} 1.50 | 1.50 | 2.50 / **3.50** | – | – | 2 / 1 | 1.50 |"
        assert text in readme.gpu_layers(found)
    both["compile"] = {"median": {"dense": 4.0, "spectral": 2.0}}
    layer["auto_over_better"] = {"graph": 1.0, "compile": 1.04}
    assert "**3.50** | 2.00 | 1.00 / 1.04 | 2 / 1 |" in readme.gpu_layers(found)
    assert readme.gpu_fused(found) == ""
    layer["after_norm_and_relu"] = {
        "median": {"dense": 9.0, "spectral": 6.0, "fused": 4.0},
        "peak_bytes": {"dense": 4e6, "spectral": 3e6, "fused": 2e6},
    }
    assert f"{name} 1.50 | 2.25 | 4 / 3 / 2 |" in readme.gpu_fused(found)
    layer["after_norm_and_relu"]["alone"] = {
        "median": {"dense": 9.0, "spectral": 3.0, "fused": 2.0}
    }
    assert f"{name} 3.00 | 4.50 | 4 / 3 / 2 |" in readme.gpu_fused(found)
    assert "revision aaaaaaaaaaaa;" in readme.gpu_layers(found)
    assert f"{name} 10 | 10 | 10 | 10 | 10 | 10 | 60 | 90 |" in readme.gpu_kernels(found)
    run = {"recipe": "one+batch_size=8", "operators": ["9 on 5×5"], "parameters": 1234, "batch": 8}
    run["images_per_second"] = {"dense": 2.0, "spectral": 5.0, "auto": 4.0}
    fast = {**run, "images_per_second": {"dense": 9807.0, "spectral": 7202.4, "auto": 9807.0}}
    head = {"device": "cpu", "precision": "float32", "revision": "0123456789abcdef"}
    text = readme.training_speed({"runs": [run, {**fast, "batch": 16}], **head})
    assert "| 1,234 | 16 | 9,807 | 7,202 | 9,807 | 0.73 | 1.00 |" in text
    assert "| one | 9 on 5×5 | 1,234 | 8 | 2.0 | 5.0 | 4.0 | 2.50 | 2.00 |" in text
    assert "code of revision 0123456789ab;" in text


def test_the_tables_of_networks_hold_source_and_converted():
    readme = pytest.importorskip("readme", reason="no benchmarks beside the tests")
    row = {"network": "resnet18, flops", "match": "flops", "way": "compile"}
    row |= {"median": {"source": 0.01, "dense": 0.03, "auto": 0.02}}
    row |= {"chosen": {"auto": {"dense": 3, "spectral/hopper": 17}}}
    failed = {**row, "median": {"source": 0.01}}
    found = {"device": "a GPU", "revision": "a" * 40, "group": "p8", "batch": 64, "size": 224}
    found |= {"precision": "bfloat16", "rows": [row, failed]}
    text = readme.networks(found)
    line = "| resnet18, flops | `torch.compile` | 10 | 30 | 20 | **2.00** | 0.67 | – |"
    assert f"{line} 3 × dense, 17 × spectral/hopper |" in text
    assert text.count("resnet18") == 1
    assert readme.time_of_networks(found) == ""
    row["profile"] = {"auto": {"ms": {"convolutions": 3.0, "norms": 1.5}}}
    assert "| resnet18, flops | auto | 3.00 | 1.50 | 4.50 |" in readme.time_of_networks(found)
    row["profile"]["source"] = {"ms": {"convolutions": 1.0, "norms": 0.5}}
    assert "**2.00** | 0.67 | 3.00 |" in readme.networks(found)
    for made in (readme.networks, readme.time_of_networks):
        assert made(None) == ""


def test_a_table_without_a_record_is_absent():
    readme = pytest.importorskip("readme", reason="no benchmarks beside the tests")
    text = "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n"
    assert readme.with_tables(text, {"x": ""}) == "a\n<!-- table: x -->\n<!-- end -->\nb\n"


def test_the_papers_tables_are_those_of_the_records():
    folder = ROOT / "records"
    if not folder.exists():
        pytest.skip("no records beside the tests")
    text = README.read_text(encoding="utf-8")
    found = report.rows(records.load_all(folder))
    assert report.updated(text, found) == text, "econv report --markdown README.md mends it"
    changed = report.rows([])
    assert report.updated(text, changed) != text


def test_the_comparison_with_the_papers_recipes_is_that_of_the_records():
    page, folder = ROOT / "docs" / "paper.md", ROOT / "records"
    if not page.exists() or not folder.exists():
        pytest.skip("no records beside the tests")
    text = page.read_text(encoding="utf-8")
    found = report.rows(records.load_all(folder))
    assert report.updated(text, found) == text, "econv report --markdown docs/paper.md mends it"
    assert report.updated(text, report.rows([])) != text
