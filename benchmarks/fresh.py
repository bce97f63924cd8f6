"""Call a function in a fresh interpreter, which may be another environment's, within a time limit.

What the function does to its process (a crash, a hang, a changed setting) stays there: the caller
gets an :class:`Outcome` in every case. Only the standard library is needed on either side.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHILD = "import sys; sys.path.insert(0, sys.argv[1]); import fresh; fresh.answer(*sys.argv[2:])"

_running: set[subprocess.Popen[bytes]] = set()
LONGEST = 300
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class AbsentError(Exception):
    """Raised by a function that does not apply here; its message says what is missing."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    status: str  # "pass", "fail" or "absent"
    message: str = ""  # the first line of the error, or what is missing
    value: Any = None  # what the function returned, through JSON
    seconds: float = 0.0


def first_line(error: BaseException) -> str:
    """The type of an error and its first line, with the next one where that only announces it."""
    text = COLOURS.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no message)"]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {said}"[:LONGEST]


def call(
    python: str, file: Path, function: str, arguments: dict[str, Any], limit: float
) -> Outcome:
    """Call ``function(**arguments)`` of a Python file; end it and all it started at the limit."""
    environment = dict(os.environ)
    if Path(python) != Path(sys.executable):  # paths of this environment are not for another one
        for name in ("PYTHONPATH", "PYTHONHOME"):
            environment.pop(name, None)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        place, said = Path(folder) / "answer.json", Path(folder) / "stderr"
        command = [python, "-c", CHILD, str(HERE), str(file), function, json.dumps(arguments)]
        with said.open("wb") as stderr:
            try:
                process = subprocess.Popen(
                    [*command, str(place)],
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    cwd=folder,  # what a check leaves behind goes with the folder
                    start_new_session=True,
                )
            except OSError as error:
                return Outcome("fail", first_line(error))
            _running.add(process)
            timed_out = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                _end_group(process)
                _running.discard(process)
        seconds = time.perf_counter() - start
        if timed_out:
            return Outcome("fail", f"TimeoutError: not done after {limit:g} s", None, seconds)
        if place.exists():
            return Outcome(**json.loads(place.read_text(encoding="utf-8")), seconds=seconds)
        return Outcome("fail", _how_it_ended(process.returncode, said), None, seconds)


def end_calls_when_terminated() -> None:
    """Let a script that is told to end unwind, which ends the calls it waits for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end_all() -> None:
    """End the calls that other threads are waiting for: for a caller that is interrupted."""
    for process in list(_running):
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how_it_ended(code: int, said: Path) -> str:
    lines = said.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if code < 0:
        last = f"ended by signal {signal.Signals(-code).name}"
    return f"crash: {last or f'exit status {code}'}"


def answer(file: str, function: str, arguments: str, place: str) -> None:
    """What the fresh interpreter runs: the call, and its outcome into a file."""
    found: dict[str, Any]
    try:
        sys.path.insert(0, str(Path(file).parent))
        module = importlib.import_module(Path(file).stem)
        found = {"status": "pass", "value": getattr(module, function)(**json.loads(arguments))}
        text = json.dumps(found)
    except AbsentError as error:
        text = json.dumps({"status": "absent", "message": str(error)})
    except BaseException as error:
        text = json.dumps({"status": "fail", "message": first_line(error)})
    Path(place).write_text(text, encoding="utf-8")
