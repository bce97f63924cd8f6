"""Time of the engines on one layer after another: dense, spectral, and what "auto" picks.

All run in turns in one process, on the same inputs, so that whatever else the machine does meets
all. Times are medians; what counts are their ratios. With `--clock cpu` processor time is measured
instead, which says little with several threads but holds on a busy machine with one.

    python benchmarks/engines.py --threads 2                       # the layers of the table
    python benchmarks/engines.py --grid --threads 1 --clock cpu    # for the cost model
    python benchmarks/engines.py --fit benchmarks/results/engines_cpu.json   # and how well it picks
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import econv
from econv.engines import auto, native
from econv.files import write_atomically

ENGINES = ("dense", "spectral", "auto")
PASSES = ("forward", "forward+backward")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
MOST = 4e10  # multiplications of a layer of the grid in the dense engine


class Case(NamedTuple):
    """One layer and its input."""

    group: str
    in_fields: int
    out_fields: int
    batch: int
    size: int
    kind: str = "group"  # or "lift"
    operators: str = "paper"
    stride: int = 1
    dtype: str = "float32"

    def layer(self, device: str) -> econv.layers.PDOConv2d:
        make = econv.LiftConv2d if self.kind == "lift" else econv.GroupConv2d
        options: dict[str, Any] = {"operators": self.operators, "stride": self.stride}
        options |= {"dtype": DTYPES[self.dtype], "device": device}
        return make(self.in_fields, self.out_fields, self.group, **options)

    def __str__(self) -> str:
        text = f"{self.kind} {self.group} {self.in_fields}→{self.out_fields}"
        text += f", batch {self.batch}, {self.size}×{self.size}"
        more = [f"stride {self.stride}"] * (self.stride > 1)
        more += [self.operators] * (self.operators != "paper")
        return ", ".join([text, *more, *[self.dtype] * (self.dtype != "float32")])


TARGETS = {  # least and wanted speed-up over dense, forward+backward
    "cpu": {
        Case("p8", 16, 16, 8, 32): (2.5, 5.0),
        Case("p16", 16, 16, 8, 32): (5.0, 9.0),
    },
    "cuda": {
        Case("p8", 40, 40, 512, 16, dtype="bfloat16"): (1.5, 3.0),
        Case("p8", 80, 80, 512, 8, dtype="bfloat16"): (2.0, 3.5),
        Case("p16", 20, 20, 256, 32, dtype="bfloat16"): (3.0, 6.0),
        Case("p8m", 20, 20, 256, 32, dtype="bfloat16"): (3.0, 6.0),
    },
}


def grid() -> Iterator[Case]:
    """Shapes from far below to far above the point where the engines are equally fast."""
    shapes = itertools.product(
        ("p1", "p2", "p4", "p6", "p8", "p12", "p16", "p4m", "p8m"), (2, 4, 8, 16), (8, 16, 32)
    )
    for number, (group, fields, size) in enumerate(shapes):
        yield Case(group, fields, fields, (1, 8)[number % 2], size)
    for group, fields in (("p4", 8), ("p8", 8), ("p8", 16), ("p16", 8)):
        yield Case(group, 3, fields, 8, 32, kind="lift")
        yield Case(group, fields, 2 * fields, 4, 16, stride=2)
        yield Case(group, fields, fields, 4, 16, dtype="float64")
        yield Case(group, fields, fields, 4, 28)
        for operators in ("order<=0", "order<=2"):
            yield Case(group, fields, fields, 4, 16, operators=operators)
    yield Case("p8", 40, 40, 4, 16)
    yield Case("p8", 80, 80, 4, 8)
    yield Case("p32", 8, 8, 2, 16)


def passes(layer: torch.nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Callable[[str], None]]:
    def forward(engine: str) -> None:
        with torch.no_grad(), econv.engine(engine):
            layer(x)

    def both(engine: str) -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        with econv.engine(engine):
            layer(x).backward(gradient)

    return {"forward": forward, "forward+backward": both}


def measure(
    case: Case, device: str, clock: Callable[[], float], repeats: int, seconds: float
) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = case.layer(device)
    shape = (case.batch, layer.in_channels, case.size, case.size)
    x = torch.randn(shape, device=device, dtype=DTYPES[case.dtype])
    outputs = {}
    for engine in ENGINES:
        with torch.no_grad(), econv.engine(engine) as ran:
            outputs[engine] = layer(x), ran[0]
    # A comparison of times means something only between layers that compute the same.
    scale = float(outputs["dense"][0].abs().max())
    tolerance = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}[case.dtype]
    for engine, (found, _) in outputs.items():
        error = float((found - outputs["dense"][0]).abs().max()) / scale
        if not error <= tolerance:
            raise AssertionError(f"{engine} is off by {error:.1e} on {case}")
    x.requires_grad_()
    record: dict[str, Any] = {"case": case._asdict(), "ran": {}}
    for name, run in passes(layer, x, torch.randn_like(outputs["dense"][0])).items():
        with econv.engine("auto") as ran:
            run("auto")
        record["ran"][name] = ran[-1]
        times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for engine in ENGINES:
            run(engine)
        stop = time.perf_counter() + seconds
        for repeat in itertools.count():
            if repeat >= repeats or (repeat >= 3 and time.perf_counter() > stop):
                break
            for engine in ENGINES if repeat % 2 else reversed(ENGINES):
                start = clock()
                run(engine)
                if device == "cuda":
                    torch.cuda.synchronize()
                times[engine].append(clock() - start)
        record[name] = {
            "repeats": len(times["dense"]),
            "median": {e: rounded(statistics.median(t)) for e, t in times.items()},
            "least": {e: rounded(min(t)) for e, t in times.items()},
        }
    return record


def rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def peak_bytes(case: Case) -> dict[str, int]:
    """Bytes by which a training step raises the most that a process ever held (Linux)."""
    found = {}
    for engine in ("dense", "spectral"):
        command = [sys.executable, __file__, "--peak", engine, json.dumps(case)]
        command += ["--threads", str(torch.get_num_threads())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[engine] = int(done.stdout)
    return found


def print_peak(engine: str, case: Case) -> None:
    with econv.engine(engine):
        warm = case._replace(batch=1).layer("cpu")
        warm(torch.randn(1, warm.in_channels, 16, 16)).sum().backward()  # libraries, kernels
        layer = case.layer("cpu")
        shape = (case.batch, layer.in_channels, case.size, case.size)
        x = torch.randn(shape, dtype=DTYPES[case.dtype], requires_grad=True)
        before = _high_water()
        layer(x).sum().backward()
    print(_high_water() - before)


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def workload(record: dict[str, Any], name: str) -> auto.Workload:
    case = Case(**record["case"])
    layer = case.layer("meta")
    shape = torch.Size((case.batch, layer.in_channels, case.size, case.size))
    return layer.workload(shape, backward=name != "forward")


def print_choices(records: list[dict[str, Any]]) -> None:
    """How much slower what the cost model picks is than the better engine, over a record."""
    found = []
    for record in records:
        for name in PASSES:
            times, costs = record[name]["least"], auto.costs(workload(record, name))
            better = min(times["dense"], times["spectral"])
            picked = times[min(costs, key=lambda engine: costs[engine])]
            found.append((picked / better - 1, str(Case(**record["case"])), name))
    found.sort(reverse=True)
    near = sum(loss <= 0.05 for loss, *_ in found)
    print(f"auto: {near} of {len(found)} choices within 5 % of the better engine; the worst:")
    for loss, case, name in found[:5]:
        print(f"    {loss:6.1%}  {case}, {name}")


def fit(records: list[dict[str, Any]]) -> None:
    """Print the coefficients of the cost model, fitted to the relative error of the times."""
    for engine in ("dense", "spectral"):
        rows, wanted = [], []
        for record in records:
            case = Case(**record["case"])
            if case.dtype != "float32":
                continue
            for name in PASSES:
                terms = auto.terms(workload(record, name))[engine]
                rows.append(np.array(terms) / record[name]["least"][engine])
                wanted.append(1.0)
        matrix, target = np.array(rows), np.array(wanted)
        weights = np.ones(len(matrix))
        for _ in range(20):  # towards the least sum of absolute errors: a few outliers do not count
            found = nonnegative(matrix * weights[:, None], target * weights)
            error = np.abs(matrix @ found - target)
            weights = 1 / np.sqrt(np.maximum(error, 0.03))
        print(f'    "{engine}": ({", ".join(f"{c:.3g}" for c in found)}),')
        print(
            f"    # relative error {np.median(error):.2f} in the middle, {error.max():.2f} at most"
        )


def nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The least squares solution without negative coefficients, by leaving those out."""
    kept = np.ones(matrix.shape[1], dtype=bool)
    while True:
        found = np.zeros(matrix.shape[1])
        found[kept] = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if (found >= 0).all():
            return found
        kept &= found > 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--grid", action="store_true", help="many shapes, for the cost model")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its choice)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=30, help="at most (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for a layer (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit the cost model to a record")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.fit:
        records = json.loads(args.fit.read_text())["layers"]
        fit(records)
        print_choices(records)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak:
        print_peak(args.peak[0], Case(*json.loads(args.peak[1])))
        return
    torch.backends.cudnn.benchmark = True
    targets = TARGETS[args.device]
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    records = []
    for case in grid() if args.grid else targets:
        layer = case.layer("meta")
        maps = layer.in_channels * layer.out_channels * layer.basis.size**2
        if args.grid and maps * case.batch * (case.size // case.stride) ** 2 > MOST:
            continue
        record = measure(case, args.device, clock, args.repeats, args.seconds)
        if not args.grid and args.device == "cpu" and Path("/proc/self/status").exists():
            record["peak_bytes"] = peak_bytes(case)
        records.append(record)
        ratios = [
            record[name]["median"]["dense"] / record[name]["median"]["spectral"] for name in PASSES
        ]
        line = f"{case!s:<48} dense/spectral {ratios[0]:6.2f} forward {ratios[1]:6.2f} both"
        line += f"   auto: {record['ran']['forward']}, {record['ran']['forward+backward']}"
        if case in targets:
            least, aim = targets[case]
            verdict = (
                "reached" if ratios[1] >= aim else "at least" if ratios[1] >= least else "missed"
            )
            line += f"   (≥ {least}, aim {aim}: {verdict})"
        if memory := record.get("peak_bytes"):
            line += f"   peak MB {memory['dense'] / 1e6:.0f} / {memory['spectral'] / 1e6:.0f}"
        print(line, flush=True)
    if args.device == "cpu":
        print_choices(records)
    if args.json:
        record = {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
            "clock": args.clock,
            "load": os.getloadavg(),
            "native": native.reason() or "available",
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "layers": records,
        }
        write_atomically(args.json, _one_line_each(record).encode())


def _one_line_each(record: dict[str, Any]) -> str:
    layers = ",\n".join(json.dumps(layer) for layer in record["layers"])
    head = json.dumps({key: value for key, value in record.items() if key != "layers"})
    return f'{head[:-1]}, "layers": [\n{layers}\n]}}\n'


if __name__ == "__main__":
    main()
