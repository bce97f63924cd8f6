"""Checks that Triton interprets: in a process of their own, since how it runs is settled early."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def pass_interpreted(name, chosen=""):
    """The chosen checks of a file, by default all of them, run and pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    command += ["-k", chosen, str(HERE / name)]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b\d{2,} passed", done.stdout), done.stdout[-500:]
    assert "skipped" not in done.stdout.splitlines()[-1]
