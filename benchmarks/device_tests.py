"""Run the tests that need a GPU and write down how they ended, for docs/compatibility.md.

    python benchmarks/device_tests.py --processes 8 --json benchmarks/results/device_tests.json
    python benchmarks/readme.py

The exit status is that of a test run: not zero where a test failed, where a file had no tests and
where pytest did not come to its end. The record says so too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from econv.files import write_atomically
from econv.records import versions
from recording import stamp

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "tests/layers/test_cuda.py",
    "tests/compatibility/test_cuda_compatibility.py",
    "tests/engines/spectral/test_cuda_triton.py",
    "tests/engines/spectral/test_cuda_volumes.py",
    "tests/train/test_capture.py",
    "tests/data/test_augmentation.py",
    "tests/conversion/test_packages.py",
)
WITHIN = 570.0
GRACE = 15.0  # seconds to write down what has run
LONGEST = 200


def run(files: tuple[str, ...], processes: int, within: float, root: Path = ROOT) -> dict[str, Any]:
    """How the tests of some files end: ``files``, ``failures`` and ``skips`` of a record."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *files]
        if processes > 1:
            command += ["-n", str(processes), "--dist", "worksteal"]
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=root, preexec_fn=_heed if os.name == "posix" else None
        )
        try:
            process.wait(within)
            late = False
        except subprocess.TimeoutExpired:
            late = True
            _interrupt(process)
        found = ended(report, files)
        found["seconds"] = round(time.perf_counter() - start, 1)
    if late:
        found["failures"].append(f"pytest did not end within {within:g} s")
    elif process.returncode != 0 and not found["failures"]:
        found["failures"].append(f"pytest ended with {process.returncode}")
    return found


def _heed() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would pytest."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """End pytest as Ctrl-C does: it writes down how the tests ended that have run."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ended(report: Path, files: tuple[str, ...]) -> dict[str, Any]:
    """What pytest wrote about its tests, file by file."""
    counts = {file: {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0} for file in files}
    failures: list[str] = []
    skips: Counter[str] = Counter()
    for case in _cases(report):
        # A file that could not be read, or that skips itself, is a case of that name.
        module = case.get("classname") or case.get("name", "")
        file = next((f for f in files if f"{module}.".startswith(f"{_module(f)}.")), None)
        name = f"{file or module}::{case.get('name')}"
        reason = case.find("skipped")
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if bad else "passed" if reason is None else "skipped"
        if bad or file is None:
            failures.append(name)
        if outcome == "skipped" and reason is not None:
            skips[reason.get("message", "")[:LONGEST]] += 1
        if file is not None:
            counts[file][outcome] += 1
            counts[file]["seconds"] += float(case.get("time", 0))
    for file, count in counts.items():
        count["seconds"] = round(count["seconds"], 1)
        if not count["passed"] + count["failed"] + count["skipped"]:
            failures.append(f"{file}: no test ran")
    return {"files": counts, "failures": sorted(failures), "skips": dict(sorted(skips.items()))}


def _cases(report: Path) -> list[ElementTree.Element]:
    try:
        cases = ElementTree.parse(report).iter("testcase")
        return [case for case in cases if case.get("name")]  # what was interrupted has none
    except (OSError, ElementTree.ParseError):  # pytest did not come as far as that
        return []


def _module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def device() -> str | None:
    """The name of the GPU, or nothing."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def machine() -> dict[str, Any]:
    """What the tests ran on, and what of."""
    try:
        import triton
    except ImportError:
        known = "none"
    else:
        known = triton.__version__
    return {
        "device": device(),
        "versions": {**versions(), "triton": known},
        **stamp(),
    }


def summary(record: dict[str, Any]) -> str:
    lines = [f"{record['device']}, torch {record['versions']['torch']}, {record['seconds']} s"]
    for file, count in record["files"].items():
        parts = ", ".join(f"{count[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        lines.append(f"  {file:<40} {parts}, {count['seconds']} s")
    lines += [f"  skipped {number} times: {reason}" for reason, number in record["skips"].items()]
    lines += [f"  FAILED {name}" for name in record["failures"]]
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", default=FILES, help="others than the usual ones")
    parser.add_argument("--processes", type=int, default=1, help="side by side (%(default)s)")
    parser.add_argument("--within", type=float, default=WITHIN, help="seconds (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if device() is None:
        sys.exit("expected a CUDA device; torch finds none")
    if args.processes > 1 and importlib.util.find_spec("xdist") is None:
        sys.exit(f"expected pytest-xdist for {args.processes} processes; it is not installed")
    found = run(tuple(args.files), args.processes, args.within)
    record = {**machine(), "processes": args.processes, **found}
    print(summary(record))
    if args.json:
        write_atomically(args.json, (json.dumps(record, indent=1) + "\n").encode())
    if record["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
