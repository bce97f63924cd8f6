"""Put faults into a copy of the code, one after the other, and see whether the tests find them.

    python tests/mutants/run.py                     all of them: make mutants
    python tests/mutants/run.py --only plots page   those of some files
    python tests/mutants/run.py --survivors         those that no test is expected to find
    python tests/mutants/run.py --json FILE         all, with a record of it

`faults.json` has them: the file, its text, the text in its place, and the test that must fail. A
fault without a test is a survivor and says why. The exit status is 0 if at least 95 % are found and
everything went as the list says: a survivor that is found now should get its test.

Each test runs in a process of its own, forked from one that has loaded torch, with the copy first
on its path. One process at a time, with a low priority.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.json")
LEAST = 0.95
LIMIT = 120.0  # seconds a test; a fault that makes it hang is found
EXTRA = ("--doctest-modules", "-p", "no:xdist", "-p", "no:benchmark")


@dataclass(frozen=True)
class Fault:
    """One change of the code that is wrong."""

    file: str
    """Below src/econv."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    test: str = ""
    """Of pytest, the one that must fail."""
    reason: str = ""
    """Why no test finds it, in place of one."""

    def applied(self, text: str) -> str:
        """The file's text with the fault in it."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.file}: expected this text once, with another in its place; found it "
                f"{text.count(self.old)} times: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def faults(path: Path = LIST) -> list[Fault]:
    """The committed list; each is found by a test or says why it is not."""
    found = [Fault(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    for fault in found:
        if bool(fault.test) == bool(fault.reason):
            raise ValueError(f"expected a test, or a reason why there is none; got {fault}")
    return found


def fails(copy: Path, tests: str, limit: float = LIMIT) -> tuple[bool, str]:
    """Whether the tests, one a line, fail with this copy of the code, and the first that does."""
    told = copy / "outcome"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_tests(copy, tests, told)
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True, f"no end within {limit:g} s"
    return (True, told.read_text()) if told.exists() else (False, "")


def _run_tests(copy: Path, tests: str, told: Path) -> None:
    """In the forked process: never returns."""
    import pytest

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not told.exists():
                told.write_text(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not told.exists():
                told.write_text(report.nodeid)

    os.environ["PYTHONPATH"] = str(copy / "src")  # of processes that tests start
    os.environ["ECONV_CACHE"] = str(copy / "cache")
    sys.path.insert(0, str(copy / "src"))
    sys.dont_write_bytecode = True
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        os.chdir(ROOT)
        status = 1
        try:
            arguments = ["-x", "-q", "-p", "no:cacheprovider", *EXTRA, *tests.splitlines()]
            status = pytest.main(arguments, plugins=[Watch()])
        finally:
            if status not in (0, 5) and not told.exists():
                told.write_text("the tests did not run")
            os._exit(0)


def copied(folder: Path) -> Path:
    """A copy of the code, as far as faults need it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    return folder


def outcome(fault: Fault, copy: Path) -> tuple[bool, str]:
    """Whether the fault's test finds it, or for a survivor its file's tests."""
    path = copy / "src" / "econv" / fault.file
    before = path.read_text(encoding="utf-8")
    path.write_text(fault.applied(before), encoding="utf-8")
    try:
        return fails(copy, fault.test)
    finally:
        path.write_text(before, encoding="utf-8")


def record(path: Path, told: dict[str, object]) -> None:
    """Write what was found, of which code, and when."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    from recording import stamp  # only now: forked processes import a copy of the code

    path.write_text(json.dumps({**told, **stamp()}, indent=1) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="files with this in their name")
    parser.add_argument("--list", type=Path, default=LIST, metavar="FILE", help="other faults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--survivors", action="store_true", help="list those that are not found")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    listed = [f for f in faults(args.list) if not args.only or any(n in f.file for n in args.only)]
    survivors = [
        f"{f.file}: {f.old.strip()!r} → {f.new.strip()!r}: {f.reason}" for f in listed if f.reason
    ]
    if args.survivors:
        print("\n".join(survivors))
        return 0
    import torch  # forked processes have it

    torch.set_num_threads(1)
    os.nice(15)
    missed, start = [], time.monotonic()
    wanted = [fault for fault in listed if fault.test]
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        found, name = fails(copy, "\n".join(sorted({fault.test for fault in wanted})), 20 * LIMIT)
        if found:
            print(f"fails without any fault: {name}")
            return 1
        for number, fault in enumerate(wanted, 1):
            found, _ = outcome(fault, copy)
            if not found:
                missed.append(fault)
            print(
                f"{number:4}/{len(wanted)} {'found ' if found else 'MISSED'} {fault.file} "
                f"{fault.new.strip().splitlines()[0] if fault.new.strip() else '(removed)'}",
                flush=True,
            )
    found_ones = len(wanted) - len(missed)
    share = found_ones / max(1, len(listed))
    print(
        f"\n{found_ones} of {len(listed)} faults found ({share:.1%}), "
        f"in {(time.monotonic() - start) / 60:.0f} minutes"
    )
    if args.json:
        told = {"listed": len(listed), "found": found_ones, "survivors": survivors}
        told["missed"] = [vars(fault) for fault in missed]
        record(args.json, {**told, "seconds": round(time.monotonic() - start)})
    for fault in missed:
        print(
            f"missed by {fault.test}: {fault.file}: {fault.old.strip()!r} → {fault.new.strip()!r}"
        )
    for line in survivors:
        print(f"survives, {line}")
    return int(bool(missed) or share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
