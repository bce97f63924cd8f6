"""Time of the engines on one layer after another: dense, spectral, and what "auto" picks.

All run in turns in one process, on the same inputs, so that whatever else the machine does meets
all. Times are medians; what counts are their ratios. With `--clock cpu` processor time is measured
instead, which says little with several threads but holds on a busy machine with one.

    python benchmarks/engines.py --threads 2                       # the layers of the table
    python benchmarks/engines.py --grid --threads 1 --clock cpu    # for the cost model
    python benchmarks/engines.py --fit benchmarks/results/engines_cpu.json   # and how well it picks

On a GPU (bfloat16, channels-last, dense = cuDNN with `benchmark=True`) a time is that of several
passes queued one after the other, as in training, and beside it that of the same pass as a CUDA
graph, free of what Python costs. Graphs of whole steps are timed twice (but for the grid): in
turns, a few passes each, and for themselves, a second each; aims are held to the latter. A GPU that
reaches its power limit lowers its clock, and raises it again only some tenths of a second later: in
turns all run at a clock between theirs, for themselves each at its own, as in training.

    cd benchmarks/results
    python ../engines.py --device cuda --json engines_cuda.json               # the layers
    python ../engines.py --device cuda --grid --json engines_cuda_grid.json   # in four minutes
    python ../engines.py --fit engines_cuda_grid.json engines_cuda.json
    python ../engines.py --device cuda --tune 60 --json tiles_cuda.json
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
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import econv
from econv.engines import ENGINES, auto
from econv.engines.spectral import Geometry, kernel_name, native
from econv.files import write_atomically
from econv.layers import norm_relu_conv
from econv.plan import spectral_plan
from econv.records import revision, source_hash
from econv.train.capture import captured
from engine_cases import DTYPES, GROWTH, MOST, PASSES, TARGETS, Case, cpu_grid, cuda_grid
from engine_choices import fit, print_choices, together, workload

try:
    import triton

    from econv.engines import triton_ops
except ImportError:  # all but the measurements on a GPU
    triton = None

MEASURED = (*ENGINES, "auto")
# Of the largest number: what separates engines that compute the same.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
TF32 = 1e-2


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
    case: Case,
    device: str,
    clock: Callable[[], float],
    repeats: int,
    seconds: float,
    alone: bool = False,
) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = case.layer(device)
    x = image(case, layer, device)
    record: dict[str, Any] = {"case": case._asdict(), "ran": {}}
    gradient, wanted = None, None
    x.requires_grad_()
    for engine in MEASURED:
        with econv.engine(engine) as ran:
            out = layer(x)
        if engine == "spectral":
            record["spectral"] = ran[0]
        gradient = torch.randn_like(out) if gradient is None else gradient
        found = [out.detach(), *torch.autograd.grad(out, [x, layer.weight], gradient)]
        wanted = found if wanted is None else wanted
        check(case, engine, found, wanted)
    assert gradient is not None
    del out, found, wanted
    for name, run in passes(layer, x, gradient).items():
        with econv.engine("auto") as ran:
            run("auto")
        record["ran"][name] = ran[-1]
        runs = {engine: partial(run, engine) for engine in MEASURED}
        record[name] = interleaved(runs, device, clock, repeats, seconds)
        if device == "cuda":
            graphs = {engine: captured(runs[engine], ()) for engine in ENGINES}
            record[name]["graph"] = interleaved(graphs, device, clock, repeats, seconds)["median"]
            if alone and name == "forward+backward":
                record[name]["alone"] = bouts(graphs)
    return record


def check(case: Case, engine: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    """A comparison of times means something only between layers that compute the same."""
    tf32 = case.dtype == "float32" and found[0].is_cuda and torch.backends.cudnn.allow_tf32
    tolerance = TF32 if tf32 else TOLERANCES[case.dtype]
    names = ("output", "gradient to the input", "gradient to the weights")
    for name, ours, theirs in zip(names, found, wanted, strict=True):
        error = float((ours - theirs).abs().max()) / float(theirs.abs().max())
        if not error <= tolerance:
            raise AssertionError(
                f"{engine}: expected the {name} to be off by at most {tolerance:.0e} on {case}; "
                f"got {error:.1e}"
            )


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


BOUT = 1.0  # seconds in which a GPU runs one thing alone
BOUTS = 2


def bouts(
    runs: dict[str, Callable[[], None]], seconds: float = BOUT, count: int = BOUTS
) -> dict[str, Any]:
    """Median time of each when it runs alone, and the clock (MHz) and power (W) that it runs at.

    The first third of every bout is for the clock to settle.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    found: dict[str, Any] = {"seconds": seconds, "median": {}, "mhz": {}, "watts": {}}
    for _, (name, run) in itertools.product(range(count), runs.items()):
        start, taken = time.perf_counter(), []
        while time.perf_counter() < start + seconds:
            taken.append(timed(run, "cuda", time.perf_counter))
        times[name] += taken[len(taken) // 3 :]
        for _ in range(QUEUED):
            run()
        with suppress(Exception):  # pynvml may be missing, or not be allowed to tell
            found["mhz"].setdefault(name, []).append(torch.cuda.clock_rate())
            found["watts"].setdefault(name, []).append(round(torch.cuda.power_draw() / 1e3))
        torch.cuda.synchronize()
    found["median"] = {name: rounded(statistics.median(t)) for name, t in times.items()}
    return found


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


def cuda_peak(case: Case) -> dict[str, int]:
    """Bytes by which a training step raises what is allocated on the GPU, at its most."""
    found = {}
    for engine in ENGINES:
        layer = case.layer("cuda")
        found[engine] = cuda_peak_of(layer, image(case, layer, "cuda").requires_grad_(), engine)
    return found


def cuda_peak_of(module: torch.nn.Module, x: Tensor, engine: str) -> int:
    with econv.engine(engine):
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            x.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            module(x).sum().backward()
    return torch.cuda.max_memory_allocated() - before


def kernels(case: Case, engine: str) -> dict[str, float]:
    """Where the time of a training step goes on the GPU: microseconds of each kernel, in all."""
    torch.manual_seed(0)
    layer = case.layer("cuda")
    x = image(case, layer, "cuda").requires_grad_()
    run = passes(layer, x, torch.randn_like(layer(x)))["forward+backward"]
    return kernels_of(partial(run, engine))


def kernels_of(run: Callable[[], None]) -> dict[str, float]:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(QUEUED):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            name = re.split(r"[<(]", event.key.removeprefix("void "))[0][:60]
            took = found.get(name, 0.0) + event.self_device_time_total / QUEUED
            found[name] = round(took, 1)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def with_norm(case: Case, seconds: float) -> dict[str, float]:
    """Seconds of a training step of the layer, its batch norm and ReLU, as a CUDA graph."""
    torch.manual_seed(0)
    layer = case.layer("cuda")
    x = image(case, layer, "cuda").requires_grad_()
    norm = econv.GroupBatchNorm2d(case.out_fields, case.group, device="cuda")
    block = torch.nn.Sequential(layer, norm, torch.nn.ReLU())
    run = passes(block, x, torch.randn_like(layer(x)))["forward+backward"]
    graphs = {engine: captured(partial(run, engine), ()) for engine in ENGINES}
    found: dict[str, float] = interleaved(graphs, "cuda", time.perf_counter, 20, seconds)["median"]
    return found


class PreActivated(torch.nn.Module):
    """Norm, ReLU, layer: one after the other, or in one go."""

    def __init__(self, case: Case, device: str, fuse: bool) -> None:
        super().__init__()
        self.norm = econv.GroupBatchNorm2d(case.in_fields, case.group, device=device)
        self.layer = case.layer(device)
        self.fuse = fuse

    def forward(self, x: Tensor) -> Tensor:
        if self.fuse:
            return norm_relu_conv(self.norm, self.layer, x)
        result: Tensor = self.layer(torch.relu(self.norm(x)))
        return result


FUSED = "fused"  # beside the names of the engines


def pre_activated(case: Case, seconds: float) -> dict[str, Any]:
    """A training step of norm, ReLU and layer as a CUDA graph, and its memory: each way."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"ran": {}, "peak_bytes": {}, "kernels": {}}
    graphs, kept = {}, []
    for name in (*ENGINES, FUSED):
        engine = "spectral" if name == FUSED else name
        block = PreActivated(case, "cuda", name == FUSED)
        x = image(case, block.layer, "cuda").requires_grad_()
        with torch.no_grad(), econv.engine(engine) as ran:
            gradient = torch.randn_like(block(x))
        found["ran"][name] = ran[0]
        found["peak_bytes"][name] = cuda_peak_of(block, x, engine)
        run = partial(passes(block, x, gradient)["forward+backward"], engine)
        found["kernels"][name] = kernels_of(run)
        graphs[name] = captured(run, ())
        kept.append(run)  # with all that its graph reads
    found |= interleaved(graphs, "cuda", time.perf_counter, 20, seconds)
    found["alone"] = bouts(graphs)
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


def _named(names: str, *rows: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# What is tried, in this order: small programs and large ones, few launches and many.
CONVOLUTION_TILES = _named(
    "pixels warps accumulators",
    (32, 4, 384),
    (64, 8, 384),
    (16, 2, 384),
    (32, 4, 192),
    (64, 4, 192),
    (64, 8, 192),
    (128, 8, 192),
)
GRADIENT_TILES = _named(
    "gradient_pixels gradient_fields gradient_warps",
    (64, 2, 4),
    (64, 4, 8),
    (128, 2, 8),
    (32, 4, 4),
)
SPLITS = (1, 2, 3, 4)  # times as many programs as one for each processor


def tune(cases: list[Case], seconds: float, path: Path | None) -> None:
    """The best tiles for each layer, in at most so many seconds each; kept as they are found."""
    jobs = [
        Job((case,), (kind,), changes)
        for case in cases
        for kind, several in (("convolve", CONVOLUTION_TILES), ("gram", GRADIENT_TILES))
        for changes in several
    ]
    compile_beforehand(jobs, math.inf)
    records = []
    for case in cases:
        records.append(tuned(case, seconds))
        print(json.dumps(records[-1]), flush=True)
        if path:
            record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            write_atomically(path, _one_line_each({**record, "layers": records}).encode())


class Job(NamedTuple):
    """Kernels that one process compiles: layers that share many of them stay together."""

    cases: tuple[Case, ...]
    operators: tuple[str, ...]
    changes: dict[str, int]


def compile_beforehand(jobs: list[Job], seconds: float) -> set[Case]:
    """Compile on all cores, and say what went wrong; the layers that were not ready in time.

    None of the processes touches the GPU: Triton keeps what they compile, and finds it again.
    """
    start = time.perf_counter()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    late = {case for job in jobs for case in job.cases}
    open_jobs = {case: sum(case in job.cases for job in jobs) for case in late}
    with multiprocessing.get_context("spawn").Pool(
        min(len(jobs), max(1, (cores or 2) - 1))
    ) as pool:
        waiting = pool.imap_unordered(precompiled, jobs)
        try:
            for _ in jobs:
                left = seconds - (time.perf_counter() - start)
                job, problem = waiting.next(None if left == math.inf else max(0.0, left))
                for case in job.cases:
                    open_jobs[case] -= 1
                if problem:
                    print(f"{job.cases[0]}: {job.operators} {job.changes}: {problem}", flush=True)
        except multiprocessing.TimeoutError:
            print(f"not all was compiled within {seconds:.0f} s", flush=True)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    return {case for case in late if open_jobs[case]}


def precompiled(job: Job) -> tuple[Job, str]:
    """Compile what layers need, without a GPU; what went wrong, or nothing."""
    import triton_compile

    problem = ""
    for case in job.cases:
        layer = case.layer("meta")
        plan = spectral_plan(layer.basis, "regular", "regular")
        shape = (case.batch, case.in_fields, case.out_fields, case.size)
        options = (case.size, case.size, case.stride, layer.padding, layer.dilation)
        geometry = Geometry.of(plan.basis.size, *options)
        try:
            with triton_ops.tiles(**job.changes) if job.changes else nullcontext():
                triton_compile.operators(plan, *shape, geometry, case.dtype, job.operators)
        except Exception as error:  # one that does not compile is one less to try
            problem = f"{type(error).__name__}: {error}"[:200]
    return job, problem


def families(cases: Sequence[Case]) -> list[Job]:
    """The jobs of a grid: one for the convolutions of layers alike, one for their gradients."""
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        layer = case.layer("meta")
        # Layers that the kernels do not know have none to compile.
        if all(kernel_name(part.plan) for part in workload(case, "forward").parts):
            alike = (layer.basis, case.in_fields, case.out_fields, case.stride, case.dtype)
            found.setdefault(alike, []).append(case)
    # The longest first, so that the last to end ends soon.
    order = sorted(found.items(), key=lambda item: -item[0][0].group.order)
    kinds = (("gram",), ("convolve", "adjoint"))
    return [Job(tuple(several), names, {}) for _, several in order for names in kinds]


def kernels_kept() -> int:
    """How many compiled kernels Triton has at hand."""
    return sum(1 for _ in Path(triton.knobs.cache.dir).rglob("*.cubin"))


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
    for kind, several in (("convolve", CONVOLUTION_TILES), ("gram", GRADIENT_TILES)):
        fastest, chosen = math.inf, {}
        more = [{"splits": n} for n in SPLITS] if kind == "gram" else []
        for changes in itertools.chain(several, more):
            extra = changes in more
            if time.perf_counter() > stop:
                break
            trial = {**(chosen if extra else {}), **changes}
            if "splits" in changes:
                trial["splits"] = changes["splits"] * splits(layer, trial)
            try:
                with triton_ops.tiles(**trial, warp_specialised=0):
                    runs[kind]()
                    took = min(timed(runs[kind], "cuda", time.perf_counter) for _ in range(5))
            except Exception as error:  # too much shared memory, say
                found["tried"].append([kind, trial, f"{type(error).__name__}: {error}"[:120]])
                continue
            found["tried"].append([kind, trial, rounded(took)])
            if took < fastest:
                fastest, chosen = took, trial
        found[kind] = {"tiles": chosen, "seconds": fastest}
    return found


def splits(layer: econv.layers.PDOConv2d, changes: dict[str, int]) -> int:
    """Programs that share pixels where each processor of the GPU has one program."""
    chosen = triton_ops.Tiles(**changes)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return max(1, processors * chosen.gradient_fields // layer.in_fields)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--grid", action="store_true", help="many shapes, for the cost model")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its choice)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=30, help="at most (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for a layer (%(default)s)")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="for everything, about")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--tune", type=float, metavar="SECONDS", help="tiles of a layer, at most")
    parser.add_argument(
        "--fit", type=Path, nargs="+", metavar="FILE", help="fit the cost model to records"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.fit:
        record = together(args.fit)
        print_choices(record, fit(record))
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak:
        print_peak(args.peak[0], Case(*json.loads(args.peak[1])))
        return
    torch.backends.cudnn.benchmark = True
    targets = TARGETS[args.device]
    if args.tune:
        tune([*targets, GROWTH[1]], args.tune, args.json)
        return
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    cases = chosen(args)
    within = args.within
    if within is None and args.grid and args.device == "cuda":
        within = WITHIN
    stop = time.perf_counter() + (math.inf if within is None else within)
    if args.device == "cuda":
        late = compile_beforehand(
            families(cases), COMPILING * (math.inf if within is None else within)
        )
        cases.sort(key=lambda case: case in late)
        kept = kernels_kept()
    run = Run(args, head(args), [], [])
    for number, case in enumerate(cases):
        left = stop - time.perf_counter()
        if left <= 0:
            run.failed.append({"case": case._asdict(), "error": "no time was left"})
            continue
        # Half of a layer's share is for making it ready, the rest for four measurements.
        seconds = min(args.seconds, left / (len(cases) - number) / 8)
        try:
            alone = args.device == "cuda" and not args.grid
            record = measure(case, args.device, clock, args.repeats, seconds, alone)
            if not args.grid:
                record |= beyond_time(case, args.device, seconds)
        except Exception as error:
            if not args.grid:
                raise
            # One layer that fails is no reason to know nothing of the others.
            run.failed.append(
                {"case": case._asdict(), "error": f"{type(error).__name__}: {error}"[:300]}
            )
            print(f"{case}: {run.failed[-1]['error']}", flush=True)
            write_record(run)
            if args.device == "cuda":
                torch.cuda.synchronize()  # raises if the device is lost, and everything with it
            continue
        run.layers.append(record)
        print(line(case, record, targets), flush=True)
        write_record(run)  # as far as it has come
    write_record(run)
    if args.grid and args.device == "cuda":
        print(f"{kernels_kept() - kept} kernels were compiled late, while layers were measured")
    if run.failed:
        print(f"{len(run.failed)} of {len(cases)} layers failed or were left out")
    if args.grid or args.device == "cpu":
        print_choices(contents(run), auto.COEFFICIENTS)
    else:
        print_growth(run.layers)


WITHIN = 210.0  # seconds for the grid on a GPU
COMPILING = 0.5  # the share of it in which compilers may end


class Run(NamedTuple):
    args: argparse.Namespace
    head: dict[str, Any]
    layers: list[dict[str, Any]]
    failed: list[dict[str, Any]]


def chosen(args: argparse.Namespace) -> list[Case]:
    """The layers to measure."""
    if not args.grid:
        return [*TARGETS[args.device], *(GROWTH if args.device == "cuda" else ())]
    if args.device == "cuda":
        return cuda_grid()
    found = []
    for case in cpu_grid():
        layer = case.layer("meta")
        maps = layer.in_channels * layer.out_channels * layer.basis.size**2
        if maps * case.batch * (case.size // case.stride) ** 2 <= MOST:
            found.append(case)
    return found


def beyond_time(case: Case, device: str, seconds: float) -> dict[str, Any]:
    if device == "cuda":
        return {
            "peak_bytes": cuda_peak(case),
            "errors": errors(case),
            "kernels": {engine: kernels(case, engine) for engine in ENGINES},
            "with_norm_and_relu": with_norm(case, seconds),
            "after_norm_and_relu": pre_activated(case, seconds),
        }
    return {"peak_bytes": peak_bytes(case)} if Path("/proc/self/status").exists() else {}


def line(case: Case, record: dict[str, Any], targets: dict[Case, tuple[float, float]]) -> str:
    """What is printed of a layer."""
    ratios = [
        record[name]["median"]["dense"] / record[name]["median"]["spectral"] for name in PASSES
    ]
    text = f"{case!s:<48} dense/spectral {ratios[0]:6.2f} forward {ratios[1]:6.2f} both"
    alone = record["forward+backward"].get("alone")
    counts = alone["median"]["dense"] / alone["median"]["spectral"] if alone else ratios[1]
    text += f"   auto: {record['ran']['forward']}, {record['ran']['forward+backward']}"
    if case in targets:
        least, aim = targets[case]
        verdict = "reached" if counts >= aim else "at least" if counts >= least else "missed"
        text += f"   (≥ {least}, aim {aim}: {verdict})"
    if memory := record.get("peak_bytes"):
        text += f"   peak MB {memory['dense'] / 1e6:.0f} / {memory['spectral'] / 1e6:.0f}"
    if graph := record["forward+backward"].get("graph"):
        text += f"   as a graph {graph['dense'] / graph['spectral']:.2f}"
    if alone:
        text += f", alone {counts:.2f}"
    if after := record.get("after_norm_and_relu"):
        times, peaks = after["median"], after["peak_bytes"]
        text += f"   after norm and ReLU {times['dense'] / times['spectral']:.2f}"
        text += f", fused {times['dense'] / times[FUSED]:.2f}"
        text += f", peak MB {' / '.join(f'{peak / 1e6:.0f}' for peak in peaks.values())}"
    if "errors" in record:
        worst = max(
            record["errors"]["spectral"][name] / value
            for name, value in record["errors"]["dense"].items()
        )
        text += f"   error {worst:.2f} of dense's"
    return text


def print_growth(records: list[dict[str, Any]]) -> None:
    both = {Case(**record["case"]): record["forward+backward"] for record in records}
    small, large = (both[case] for case in GROWTH)
    for engine in ENGINES:
        alone = large["alone"]["median"][engine] / small["alone"]["median"][engine]
        in_turns = large["graph"][engine] / small["graph"][engine]
        print(f"p32 / p8, {engine}: alone {alone:.2f}, in turns {in_turns:.2f}")


def write_record(run: Run) -> None:
    if run.args.json:
        write_atomically(run.args.json, _one_line_each(contents(run)).encode())


def contents(run: Run) -> dict[str, Any]:
    load = {"load": os.getloadavg()}
    return {**run.head, **load, "failed": run.failed, "layers": run.layers}


def head(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    return {
        "kind": args.device,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "roles": cuda and auto.has_roles(torch.device("cuda")),
        "threads": torch.get_num_threads(),
        "clock": args.clock,
        "native": native.reason() or "available",
        "torch": torch.__version__,
        "triton": None if triton is None else triton.__version__,
        "python": sys.version.split()[0],
        "revision": revision(),
        "source_sha256": source_hash(),
    }


def _one_line_each(record: dict[str, Any]) -> str:
    layers = ",\n".join(json.dumps(layer) for layer in record["layers"])
    head = json.dumps({key: value for key, value in record.items() if key != "layers"})
    return f'{head[:-1]}, "layers": [\n{layers}\n]}}\n'


if __name__ == "__main__":
    main()
