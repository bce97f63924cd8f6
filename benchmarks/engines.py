"""Time of the engines on one layer after another: dense, spectral, and what "auto" picks.

All run in turns in one process, on the same inputs, so that whatever else the machine does meets
all. Times are medians; what counts are their ratios. With `--clock cpu` processor time is measured
instead, which says little with several threads but holds on a busy machine with one.

    python benchmarks/engines.py --threads 2                       # the layers of the table
    python benchmarks/engines.py --grid --threads 1 --clock cpu    # for the cost model
    python benchmarks/engines.py --fit benchmarks/results/engines_cpu.json   # and how well it picks

On a GPU (bfloat16, channels-last, dense = cuDNN with `benchmark=True`) a time is that of several
passes queued one after the other, as in training, and beside it that of the same pass as a CUDA
graph, free of what Python costs.

    python benchmarks/engines.py --device cuda --json benchmarks/results/engines_cuda.json
    python benchmarks/engines.py --device cuda --tune 60 --json benchmarks/results/tiles_cuda.json
    python benchmarks/engines.py --table benchmarks/results/tiles_cuda.json   # for `TUNED`
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import econv
from econv.engines import auto, native
from econv.engines.spectral import Geometry
from econv.files import write_atomically
from econv.plan import spectral_plan

try:
    from econv.engines import triton_ops
    from econv.engines.triton_kernels import scheme
except ImportError:  # no Triton: all but the measurements on a GPU
    pass

ENGINES = ("dense", "spectral")
MEASURED = (*ENGINES, "auto")
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


# Equal fields in a group four times as large: at most 6 times the time, wanted 5.
GROWTH = (
    Case("p8", 20, 20, 64, 32, dtype="bfloat16"),
    Case("p32", 20, 20, 64, 32, dtype="bfloat16"),
)
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
    x = image(case, layer, device)
    outputs = {}
    for engine in MEASURED:
        with torch.no_grad(), econv.engine(engine) as ran:
            outputs[engine] = layer(x), ran[0]
    # A comparison of times means something only between layers that compute the same.
    scale = float(outputs["dense"][0].abs().max())
    tolerance = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}[case.dtype]
    for engine, (found, _) in outputs.items():
        error = float((found - outputs["dense"][0]).abs().max()) / scale
        if not error <= tolerance:
            raise AssertionError(f"{engine} is off by {error:.1e} on {case}")
    record: dict[str, Any] = {"case": case._asdict(), "ran": {}}
    record["spectral"] = outputs["spectral"][1]
    gradient = torch.randn_like(outputs["dense"][0])
    del outputs
    x.requires_grad_()
    for name, run in passes(layer, x, gradient).items():
        with econv.engine("auto") as ran:
            run("auto")
        record["ran"][name] = ran[-1]
        runs = {engine: partial(run, engine) for engine in MEASURED}
        record[name] = interleaved(runs, device, clock, repeats, seconds)
        if device == "cuda":
            graphs = {engine: captured(runs[engine]) for engine in ENGINES}
            record[name]["graph"] = interleaved(graphs, device, clock, repeats, seconds)["median"]
    return record


def image(case: Case, layer: econv.layers.PDOConv2d, device: str) -> Tensor:
    shape = (case.batch, layer.in_channels, case.size, case.size)
    x = torch.randn(shape, device=device, dtype=DTYPES[case.dtype])
    return x.to(memory_format=torch.channels_last) if device == "cuda" else x


def interleaved(
    runs: dict[str, Callable[[], None]],
    device: str,
    clock: Callable[[], float],
    repeats: int,
    seconds: float,
) -> dict[str, Any]:
    """Median and least time of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    stop = time.perf_counter() + seconds
    for repeat in itertools.count():
        if repeat >= repeats or (repeat >= 3 and time.perf_counter() > stop):
            break
        for name in runs if repeat % 2 else reversed(runs):
            times[name].append(timed(runs[name], device, clock))
    return {
        "repeats": repeat,
        "median": {name: rounded(statistics.median(t)) for name, t in times.items()},
        "least": {name: rounded(min(t)) for name, t in times.items()},
    }


QUEUED = 5  # passes of one measurement on a GPU


def timed(run: Callable[[], None], device: str, clock: Callable[[], float]) -> float:
    if device != "cuda":
        start = clock()
        run()
        return clock() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # the queue is not empty when the time begins
    begin.record()
    for _ in range(QUEUED):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / QUEUED


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """The same as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def cuda_peak(case: Case) -> dict[str, int]:
    """Bytes by which a training step raises what is allocated on the GPU, at its most."""
    found = {}
    for engine in ENGINES:
        layer = case.layer("cuda")
        x = image(case, layer, "cuda").requires_grad_()
        with econv.engine(engine):
            for _ in range(2):
                layer.zero_grad(set_to_none=True)
                x.grad = None
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                layer(x).sum().backward()
        found[engine] = torch.cuda.max_memory_allocated() - before
    return found


def errors(case: Case) -> dict[str, dict[str, float]]:
    """Relative errors against float64: output, gradient to the input, gradient to the weights."""
    torch.manual_seed(0)
    layer = case._replace(batch=4).layer("cuda")
    x = image(case._replace(batch=4), layer, "cuda")
    exact = copy.deepcopy(layer).double()
    probe = torch.randn_like(layer(x))

    def results(layer: torch.nn.Module, dtype: torch.dtype) -> list[Tensor]:
        given = x.detach().to(dtype).requires_grad_()
        out = layer(given)
        return [out, *torch.autograd.grad(out, [given, layer.weight], probe.to(dtype))]

    with econv.engine("dense"):
        wanted = results(exact, torch.float64)
    found = {}
    for engine in ENGINES:
        with econv.engine(engine):
            ours = results(layer, x.dtype)
        found[engine] = {
            name: rounded(float((a.double() - b).norm() / b.norm()))
            for name, a, b in zip(("output", "input", "weights"), ours, wanted, strict=True)
        }
    return found


def rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def peak_bytes(case: Case) -> dict[str, int]:
    """Bytes by which a training step raises the most that a process ever held (Linux)."""
    found = {}
    for engine in ENGINES:
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
    """Print the coefficients of the cost model.

    They are fitted to the relative error of the times; then the spectral ones are scaled together,
    by a few percent, so that the worst wrong choice between the engines costs least.
    """
    cases = [(record, name) for record in records for name in PASSES]
    times = {
        engine: np.array([record[name]["least"][engine] for record, name in cases])
        for engine in ENGINES
    }
    terms = {
        engine: np.array([auto.terms(workload(*case))[engine] for case in cases])
        for engine in ENGINES
    }
    chosen = np.array([record["case"]["dtype"] == "float32" for record, _ in cases])
    found: dict[str, np.ndarray] = {}
    for engine in ENGINES:
        matrix = (terms[engine] / times[engine][:, None])[chosen]
        weights = np.ones(len(matrix))
        for _ in range(20):  # towards the least sum of absolute errors: a few outliers do not count
            found[engine] = nonnegative(matrix * weights[:, None], weights)
            error = np.abs(matrix @ found[engine] - 1)
            weights = 1 / np.sqrt(np.maximum(error, 0.03))
        print(f"# {engine}: error {np.median(error):.2f} in the middle, {error.max():.2f} at most")
    best = np.minimum(times["dense"], times["spectral"])
    expected = {engine: terms[engine] @ found[engine] for engine in ENGINES}

    def wrong(factor: float) -> tuple[float, float]:
        spectral = factor * expected["spectral"] < expected["dense"]
        losses = np.where(spectral, times["spectral"], times["dense"]) / best - 1
        return float(losses.max()), float(losses.mean())

    factor = min(np.linspace(0.9, 1.1, 81).tolist(), key=wrong)
    found["spectral"] *= factor
    for engine, values in found.items():
        print(f'    "{engine}": ({", ".join(f"{c:.4g}" for c in values)}),')
    print(f"# spectral times {factor:.3f}: the worst choice loses {wrong(factor)[0]:.1%}")


def nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The least squares solution without negative coefficients, by leaving those out."""
    kept = np.ones(matrix.shape[1], dtype=bool)
    while True:
        found = np.zeros(matrix.shape[1])
        found[kept] = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if (found >= 0).all():
            return found
        kept &= found > 0


# What is tried, in this order: small programs and large ones, few launches and many.
CONVOLUTION_TILES: tuple[dict[str, int], ...] = (
    {},
    {"pixels": 32, "warps": 4},
    {"stages": 2},
    {"accumulators": 192},
    {"accumulators": 256},
    {"pixels": 128, "accumulators": 192},
    {"pixels": 32, "warps": 4, "accumulators": 192},
    {"pixels": 64, "warps": 4, "accumulators": 192},
)
GRADIENT_TILES: tuple[dict[str, int], ...] = (
    {},
    {"gram_pixels": 64, "gram_fields": 4},
    {"gram_pixels": 64, "gram_fields": 4, "gram_accumulators": 192},
    {"gram_pixels": 64, "gram_warps": 4},
    {"gram_pixels": 32, "gram_fields": 4, "gram_warps": 4, "gram_accumulators": 192},
    {"gram_accumulators": 192},
)
# Those of the best, which need no compiler.
GROUPS = ({"bytes": 32 << 20}, {"bytes": 128 << 20}, {"bytes": 1 << 33})
SPLITS = (1, 2, 3, 4)  # times as many programs as the default


def tune(cases: list[Case], seconds: float, path: Path | None) -> None:
    """The best tiles for each layer, in at most so many seconds each; kept as they are found."""
    work = [
        (case, changes, kind)
        for case in cases
        for kind, several in (("convolve", CONVOLUTION_TILES), ("gram", GRADIENT_TILES))
        for changes in several
    ]
    start = time.perf_counter()
    # One process for each core, none of which touches the GPU: Triton keeps what they compile.
    with ProcessPoolExecutor(
        max(1, (os.cpu_count() or 2) - 2), multiprocessing.get_context("spawn")
    ) as pool:
        for (case, changes, kind), problem in zip(
            work, pool.map(precompiled, *zip(*work, strict=True)), strict=True
        ):
            if problem:
                print(f"{case}: {kind} {changes}: {problem}", flush=True)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    records = []
    for case in cases:
        records.append(tuned(case, seconds))
        print(json.dumps(records[-1]), flush=True)
        if path:
            record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            write_atomically(path, _one_line_each({**record, "layers": records}).encode())


def precompiled(case: Case, changes: dict[str, int], kind: str) -> str:
    """Compile what a layer needs, without a GPU; what went wrong, or nothing."""
    import triton_compile

    shape = triton_compile.Layer(case.group, case.out_fields, case.batch, case.size, case.dtype)
    try:
        with triton_ops.tiles(**changes):
            triton_compile.training_step(shape, kind)
    except Exception as error:  # one that does not compile is one less to try
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def tuned(case: Case, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = case.layer("cuda")
    plan = spectral_plan(layer.basis, "regular", "regular")
    x = image(case, layer, "cuda")
    weights = torch.randn(case.out_fields, case.in_fields, plan.weights, device="cuda")
    geometry = Geometry(1, 1, 1, layer.padding, case.size, case.size)
    runs = {
        "convolve": lambda: triton_ops.convolve(x, weights, plan.name, False, *geometry),
        "gram": lambda: triton_ops.gram(x, x, plan.name, *geometry[:4]),
    }
    stop = time.perf_counter() + seconds
    found: dict[str, Any] = {"case": case._asdict(), "tried": []}
    best: dict[str, int] = {}
    for kind, several in (("convolve", CONVOLUTION_TILES), ("gram", GRADIENT_TILES)):
        fastest, chosen = math.inf, {}
        # The size of a group is settled by the convolution; the programs by the gradient.
        more = list(GROUPS) if kind == "convolve" else [{"splits": n} for n in SPLITS]
        for changes in itertools.chain(several, more):
            extra = changes in more
            if time.perf_counter() > stop:
                break
            trial = {**best, **(chosen if extra else {}), **changes}
            if "splits" in changes:
                trial["splits"] = changes["splits"] * splits(layer, trial)
            try:
                with triton_ops.tiles(**trial):
                    runs[kind]()
                    took = min(timed(runs[kind], "cuda", time.perf_counter) for _ in range(5))
            except Exception as error:  # too much shared memory, say
                found["tried"].append([kind, trial, f"{type(error).__name__}: {error}"[:120]])
                continue
            found["tried"].append([kind, trial, rounded(took)])
            if took < fastest:
                fastest, chosen = took, trial
        best.update(chosen)
        found[kind] = fastest
    found["tiles"] = best
    return found


def splits(layer: econv.layers.PDOConv2d, changes: dict[str, int]) -> int:
    """Programs that share pixels where each processor of the GPU has one program."""
    chosen = triton_ops.Tiles(**changes)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return max(1, processors * chosen.gram_fields // layer.in_fields)


def print_table(path: Path) -> None:
    """What a record of `--tune` says, as the table `triton_ops.TUNED`."""
    for record in json.loads(path.read_text())["layers"]:
        case = Case(**record["case"])
        plan = spectral_plan(case.layer("meta").basis, "regular", "regular")
        batch = scheme(plan, 8).batch
        changes = ", ".join(f"{name}={value}" for name, value in record["tiles"].items())
        print(f"    ({batch}, {case.out_fields}): Tiles({changes}),")


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
    parser.add_argument("--tune", type=float, metavar="SECONDS", help="tiles of a layer, at most")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print tuned tiles as source")
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
    if args.table:
        print_table(args.table)
        return
    if args.tune:
        tune([*targets, GROWTH[1]], args.tune, args.json)
        return
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    records = []
    cases = list(grid()) if args.grid else [*targets, *(GROWTH if args.device == "cuda" else ())]
    for case in cases:
        layer = case.layer("meta")
        maps = layer.in_channels * layer.out_channels * layer.basis.size**2
        if args.grid and maps * case.batch * (case.size // case.stride) ** 2 > MOST:
            continue
        record = measure(case, args.device, clock, args.repeats, args.seconds)
        if not args.grid and args.device == "cpu" and Path("/proc/self/status").exists():
            record["peak_bytes"] = peak_bytes(case)
        if args.device == "cuda":
            record["peak_bytes"] = cuda_peak(case)
            record["errors"] = errors(case)
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
        if "errors" in record:
            graph = record["forward+backward"]["graph"]
            line += f"   as a graph {graph['dense'] / graph['spectral']:.2f}"
            worst = max(
                record["errors"]["spectral"][name] / value
                for name, value in record["errors"]["dense"].items()
            )
            line += f"   error {worst:.2f} of dense's"
        print(line, flush=True)
        if args.json:  # as far as it has come
            write_record(args, records)
    if args.device == "cpu":
        print_choices(records)
    else:
        print_growth(records)


def print_growth(records: list[dict[str, Any]]) -> None:
    times = {Case(**record["case"]): record["forward+backward"]["median"] for record in records}
    small, large = (times[case] for case in GROWTH)
    for engine in ENGINES:
        print(f"p32 / p8, {engine}: {large[engine] / small[engine]:.2f}")


def write_record(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
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
