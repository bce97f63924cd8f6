"""The kernels for GPUs without one: run by Triton's interpreter, compiled for a GPU that is not
there.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

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
