"""What the README says is so: its code runs, its tables are those of benchmarks and records."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from econv import files, records, report

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="no README beside the tests")


def code() -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S))


def test_the_code_prints_what_stands_beside_it(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(code(), str(README), "exec"), {})
    told = re.findall(r"^print\(.*\)\s+# (.*)$", code(), re.M)
    assert len(told) >= 2
    assert capsys.readouterr().out.splitlines() == told


def test_it_can_be_read_in_one_go():
    """At most 120 lines, in the order in which a stranger asks."""
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    order = (
        "Convolutional networks",
        "docs/pictures/turning.gif",
        "## Install",
        "## A network",
        "table: equivariance",
        "table: accuracy",
        "table: speed",
        "## Convert your network",
        "## What is in it",
        "make run ",
        "make test ",
        "## Citation",
        "MIT licence",
    )
    places = [next(n for n, line in enumerate(lines) if words in line) for words in order]
    assert places == sorted(places)


def test_the_tables_have_at_most_three_columns_of_figures():
    heads = re.findall(r"^(\|.*\|)\n\|---", README.read_text(encoding="utf-8"), re.M)
    assert len(heads) == 3
    assert all(head.count("|") - 1 <= 1 + 3 for head in heads)


def test_what_it_links_to_exists():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README.read_text(encoding="utf-8"))
    inside = [link for link in links if "://" not in link]
    assert len(inside) > 20
    assert [link for link in inside if not (ROOT / link).exists()] == []


def test_the_moving_picture_is_small_and_was_measured():
    picture = ROOT / "docs" / "pictures" / "turning.gif"
    content = picture.read_bytes()
    assert content.startswith(b"GIF89a")
    assert len(content) <= 2_000_000
    found = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))
    ours, cnn = found["digits_p8"], found["digits_cnn"]
    assert ours["parameters"] <= cnn["parameters"]
    assert ours["largest_change_at_quarter_turns"] < 1e-5 < cnn["largest_change_at_quarter_turns"]
    assert 4 * ours["mean_change"] < cnn["mean_change"]


def test_the_short_tables_are_made_of_what_was_measured():
    readme = pytest.importorskip("readme", reason="no benchmarks beside the tests")
    errors = {"isotropic 5×5": [0.001], "escnn R2Conv 5×5": [0.02], "central 5×5": [0.3]}
    found = {"one_layer": {"errors": errors}, "settings": {"smoothness": [1.5], "seeds": 5}}
    text = readme.equivariance_in_short(found, [])
    assert "| smoothness in pixels | escnn | econv |" in text  # no record of e2cnn, no column
    assert "| 1.5 | 0.02 | **0.001** |" in text
    assert "**" not in readme.accuracy_in_short(report.rows([]))  # no records, no rows
    group = {"in_fields": 16}
    cpu = {
        "threads": 2,
        "layers": [
            {
                "case": {**group, "group": name},
                "forward+backward": {"median": {"dense": 0.02, "spectral": 0.004}},
            }
            for name in ("p8", "p16")
        ],
    }
    speed = {"dense": 4000.0, "auto": 8000.0}
    run = {"recipe": "cifar10_resnet26_p8_paper", "batch": 128, "images_per_second": speed}
    training = {"device": "a GPU", "runs": [run]}
    text = readme.speed_in_short(cpu, {**cpu, "device": "a GPU"}, training)
    assert "| layer of p16, 16 fields, 2 CPU cores | 20 | **4** |" in text
    assert "| ResNet-26 of the paper, a GPU | 32 | **16** |" in text


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
    both["isolated"] = {"median": {"dense": 7.0, "spectral": 2.0}}
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
    layer["after_norm_and_relu"]["isolated"] = {
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
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    found = report.rows(records.load_all(folder))
    assert report.updated(text, found) == text, "econv report --markdown docs/results.md mends it"
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


# What was found before results said so; no new file comes here.
BY_UNKNOWN_CODE = {"build_and_size", "equivariance", "export_speed", "quantisation"}
AT_AN_UNKNOWN_TIME = BY_UNKNOWN_CODE | {
    *("engines_cpu", "networks_cpu", "networks_cuda", "networks_cuda_before", "pretrained"),
    *("training_cpu", "training_cuda", "volumes", "zoo"),
}
ON_AN_UNKNOWN_MACHINE = AT_AN_UNKNOWN_TIME | {
    *("compatibility", "convert_and_rotate", "depth", "device_tests", "engines_cuda"),
    *("every_angle", "learning_rates", "migrating", "mutants", "networks_cuda_flops"),
    *("peer_layers", "tetris_3", "tetris_5", "volume_engines_cpu", "volume_engines_cuda"),
    "zoo_volumes",
}


def wrong_origin(name: str, found: dict) -> list[str]:
    """What a result does not say about where it comes from."""
    columns = found.get("libraries", {}).values()
    runs = [{**found, **run} for run in found.get("runs", [])]
    wrong = set()
    for part in columns or runs or [{**found.get("origin", {}), **found}]:
        code, when = part.get("revision", ""), part.get("finished", "")
        old = code == "unknown" and name in BY_UNKNOWN_CODE
        if not old and not re.fullmatch(r"[0-9a-f]{40}(\+changes)?", code):
            wrong.add(f"{name}: revision {code!r}")
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", when):
            # The day on which it was committed is known.
            day = re.fullmatch(r"\d{4}-\d\d-\d\d", part.get("committed", ""))
            if not day or name not in AT_AN_UNKNOWN_TIME:
                wrong.add(f"{name}: finished {when!r}")
        machine = part.get("machine", "")
        if machine in ("", "unknown") and name not in ON_AN_UNKNOWN_MACHINE:
            wrong.add(f"{name}: machine {machine!r}")
    return sorted(wrong)


def test_every_result_says_by_which_code_and_when_and_where_it_was_found():
    folder = ROOT / "benchmarks" / "results"
    if not folder.exists():
        pytest.skip("no benchmarks beside the tests")
    found = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("*.json")}
    assert [line for name in found for line in wrong_origin(name, found[name])] == []
    assert set(found) >= ON_AN_UNKNOWN_MACHINE


def test_a_result_of_unknown_origin_is_found_out():
    recording = pytest.importorskip("recording", reason="no benchmarks beside the tests")
    said = recording.stamp() | {"revision": "a" * 40}
    assert said["machine"] == recording.origin("cpu")["machine"] == files.processor_model() != ""
    assert wrong_origin("new", said) == []
    for key in ("revision", "finished", "machine"):
        for part in ({**said, key: "unknown"}, {**said, key: ""}):
            (line,) = wrong_origin("new", part)
            assert line.startswith(f"new: {key} ")
    old = {"revision": "unknown", "finished": "unknown", "committed": "2026-11-19"}
    assert wrong_origin("quantisation", old) == []
    assert len(wrong_origin("new", {"runs": [old]})) == 3
    assert len(wrong_origin("compatibility", {"libraries": {"econv": old}})) == 2
