"""The kernels for GPUs without one: run by Triton's interpreter, compiled for a GPU that is not
there.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")

HERE = Path(__file__).parent
PARTS = {"1": "reference or dense_engine", "2": "not (reference or dense_engine)"}


@pytest.mark.parametrize("chosen", PARTS.values(), ids=PARTS.keys())
def test_interpreted(chosen):
    """A process of its own: how Triton runs is settled when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    command += ["-k", chosen, str(HERE / "triton_checks.py")]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b\d\d passed", done.stdout), done.stdout[-500:]
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_compiled_for_a_gpu_that_is_not_there(tmp_path):
    """Every kernel of a layer compiles, soon, and keeps its numbers in registers."""
    command = [sys.executable, str(HERE.parent / "benchmarks" / "triton_compile.py")]
    command += ["--layer", "p8,16,64,16", "--json", str(tmp_path / "found.json")]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    (record,) = json.loads((tmp_path / "found.json").read_text())
    assert record["compile_seconds"] < 20
    kernels = {row["kernel"]: row for row in record["launches"]}
    names = {"largest", "arrange", "analyse", "forward", "lay", "gram", "spread"}
    assert set(kernels) == names
    for row in kernels.values():
        assert row["spills"] == 0, row
        assert row["shared"] <= 227 * 1024
    for name in ("forward", "gram"):
        assert kernels[name]["instructions"]["HMMA"] > 0
        assert kernels[name]["microseconds"]["tensor"] > 0
