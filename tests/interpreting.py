"""Checks that Triton interprets: in a process of their own, since how it runs is settled early."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def pass_interpreted(name, chosen="", marked="not slow", least=10):
    """The chosen checks of a file, by default all that are not slow, run and pass: several."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    command += ["-k", chosen, "-m", marked, str(HERE / name)]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"\b(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-500:]
    assert int(passed[1]) >= least, done.stdout[-500:]
    assert "skipped" not in done.stdout.splitlines()[-1]
