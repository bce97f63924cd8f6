"""What PyTorch offers, tried on the same small network built with econv, escnn and e2cnn.

    python benchmarks/compatibility.py --python ../peers/bin/python

The network is three 5×5 convolutions of the rotations by 45° (p8, C8) with batch norm and ReLU,
orientation pooling and a linear classifier, built and exported the way each library documents
(escnn and e2cnn: GeometricTensor, InnerBatchNorm, GroupPooling, their own export()). An ordinary
CNN of the same widths is the control: a check that it fails would be a wrong check, and that ends
this script with an error. So does a check that econv fails.

Every check runs in a fresh interpreter and is ended after a time limit: a crash or a hang is a
result like any other, and no check sees what another one left behind.

escnn and e2cnn need NumPy 1 and escnn a Fortran compiler, so they get an environment of their own:

    python3 -m venv ../peers        # needs gfortran (Debian: apt install gfortran)
    ../peers/bin/pip install 'numpy<2' torch==2.13.0 escnn==1.0.11 e2cnn==0.2.3 \\
        onnx onnxruntime onnxscript torchao

Take the torch that econv is run with. `--python escnn=PATH` names the interpreter of one library,
`--python PATH` that of escnn and e2cnn. A library that is not found is reported as not installed;
so are onnx, onnxruntime, onnxscript and torchao where a check wants them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fresh
import libraries
from compatibility_checks import CHECKS, Check
from fresh import Outcome

HERE = Path(__file__).resolve().parent
PEERS = ("escnn", "e2cnn")
CONTROL = "torch"
WORDS = {"pass": "pass", "fail": "FAIL", "absent": "–"}


def interpreters(given: list[str]) -> dict[str, str]:
    """Which interpreter runs each library; without a word, the one that runs this."""
    found = dict.fromkeys(libraries.NAMES, sys.executable)
    for text in given:
        name, equals, path = text.partition("=")
        if not equals:
            name, path = "", text
        if name and name not in found:
            raise ValueError(f"expected one of {', '.join(found)} before '='; got {name!r}")
        # Not resolved: the links of a virtual environment lead out of it.
        place = os.path.abspath(os.path.expanduser(path))
        if not os.access(place, os.X_OK) or os.path.isdir(place):
            raise ValueError(f"expected a Python interpreter; got {path!r}")
        for library in (name,) if name else PEERS:
            found[library] = place
    return found


def versions(pythons: dict[str, str], limit: float) -> dict[str, dict[str, Any] | None]:
    """The versions in each library's environment; None where the library is not installed."""
    found: dict[str, dict[str, Any] | None] = {}
    for name, python in pythons.items():
        outcome = fresh.call(
            python, HERE / "libraries.py", "versions", {"name": name}, max(limit, 60)
        )
        if outcome.status == "fail":
            raise SystemExit(f"{name} ({python}): {outcome.message}")
        found[name] = outcome.value
    return found


def run_all(
    checks: list[Check], pythons: dict[str, str], limit: float, jobs: int
) -> dict[str, dict[str, Outcome]]:
    """Run every check on every library, and print a line as soon as a check is done on all."""
    file = HERE / "compatibility_checks.py"
    width = max(len(check.title) for check in checks) + 2
    print(" " * width + "".join(f"{name:<9}" for name in pythons))
    results: dict[str, dict[str, Outcome]] = {name: {} for name in pythons}
    pool = ThreadPoolExecutor(jobs)
    try:
        waiting: dict[tuple[str, str], Future[Outcome]] = {
            (check.name, name): pool.submit(
                fresh.call, python, file, "run", {"name": check.name, "library": name}, limit
            )
            for check in checks
            for name, python in pythons.items()
        }
        topic = ""
        for check in checks:
            if check.topic != topic:
                topic = check.topic
                print(f"\n{topic}")
            for name in pythons:
                results[name][check.name] = waiting[check.name, name].result()
            words = "".join(f"{WORDS[results[n][check.name].status]:<9}" for n in pythons)
            print(f"{check.title:<{width}}{words}".rstrip(), flush=True)
    finally:  # also when interrupted: nothing new starts, nothing goes on alone
        pool.shutdown(wait=False, cancel_futures=True)
        fresh.end_all()
    return results


def print_failures(checks: list[Check], results: dict[str, dict[str, Outcome]]) -> None:
    for name, outcomes in results.items():
        found = [(c, outcomes[c.name]) for c in checks if outcomes[c.name].status != "pass"]
        if found:
            print(f"\n{name}")
        for check, outcome in found:
            text = f"{WORDS[outcome.status]} {check.title}: {outcome.message}"
            print(textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="      "))


def record(
    checks: list[Check],
    results: dict[str, dict[str, Outcome]],
    versions: dict[str, dict[str, Any] | None],
    limit: float,
) -> dict[str, Any]:
    """What the tables are made of."""
    from recording import stamp

    return {
        "limit_s": limit,
        "checks": [{"name": c.name, "topic": c.topic, "title": c.title} for c in checks],
        "libraries": {
            name: {
                "versions": known,
                **stamp(),
                "results": {
                    check: {"status": o.status, "message": o.message or o.value or ""}
                    for check, o in results.get(name, {}).items()
                },
            }
            for name, known in versions.items()
        },
    }


def with_other_columns(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The new record with the columns that only the old one has, which must be of these checks."""
    if old["checks"] != new["checks"]:
        raise ValueError("the file holds the results of other checks: run all libraries")
    columns = {**old["libraries"], **new["libraries"]}
    return {**new, "libraries": columns}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="[LIBRARY=]PATH",
        help="the interpreter of a library, or of escnn and e2cnn; may be given several times",
    )
    parser.add_argument(
        "--libraries",
        nargs="+",
        choices=libraries.NAMES,
        default=libraries.NAMES,
        metavar="LIBRARY",
        help="these alone; what --json FILE holds of the others stays",
    )
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help="these alone")
    parser.add_argument("--limit", type=float, default=300, help="seconds a check (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="checks side by side (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    args = parser.parse_args(arguments)
    if args.limit <= 0 or args.jobs < 1:
        parser.error(f"expected --limit above 0 and --jobs of 1 or more; got {args}")
    try:
        args.python = interpreters(args.python)
    except ValueError as error:
        parser.error(f"--python: {error}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    checks = [check for name, check in CHECKS.items() if not args.only or name in args.only]
    asked = {name: python for name, python in args.python.items() if name in args.libraries}
    old = None
    if args.json and args.json.exists() and len(asked) < len(libraries.NAMES):
        old = json.loads(args.json.read_text(encoding="utf-8"))
        try:
            with_other_columns(record(checks, {}, {}, args.limit), old)
        except ValueError as error:
            sys.exit(f"{args.json}: {error}")
    found = versions(asked, args.limit)
    for name, known in found.items():
        listed = ", ".join(
            f"{package} {v or 'not installed'}" for package, v in (known or {}).items()
        )
        print(f"{name}: {listed or 'not installed'}")
    print()
    pythons = {name: python for name, python in asked.items() if found[name]}
    results = run_all(checks, pythons, args.limit, args.jobs)
    print_failures(checks, results)
    if args.json:
        from econv.files import write_atomically

        content = record(checks, results, found, args.limit)
        if old is not None:
            content = with_other_columns(content, old)
        text = json.dumps(content, indent=1, ensure_ascii=False)
        write_atomically(args.json, (text + "\n").encode())
    for name in ("econv", CONTROL):
        failed = [n for n, outcome in results.get(name, {}).items() if outcome.status == "fail"]
        if failed:
            sys.exit(f"\n{name} failed: {', '.join(failed)}")


if __name__ == "__main__":
    fresh.end_calls_when_terminated()
    main()
