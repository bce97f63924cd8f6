"""Time of the engines on convolutions of volumes, and the memory that they take on a GPU.

    python benchmarks/volume_engines.py --threads 2 --json outputs/volume_engines.json
    python benchmarks/volume_engines.py --device cuda --json outputs/volume_engines_cuda.json

One layer at a time, forward and backward; all engines in one process, on the same numbers. Times
are medians; what counts are their ratios. On a CPU numbers are float32, engines run one after the
other again and again, and seconds of the processor are told too, which other work on the machine
lengthens less. ``--engines spectral`` leaves the choice between spectral engines to econv, and the
row says which.

On a GPU numbers are bfloat16, passes are CUDA graphs, each alone (benchmarks/timing.py says what
that means), and dense is the faster of cuDNN with channels last and with channels first. Told
besides: memory at the peak of a training step, the kernels of a spectral one, and errors against
float64. ``--tiles voxels=16,programs=528`` times the spectral engine with other tiles, too.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import econv
from econv.train.capture import captured
from recording import Growing, origin
from timing import isolated, kernels, medians, rounded

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


class Case(NamedTuple):
    """One layer and its input."""

    group: str
    fields: int
    batch: int
    size: int


CASES = {
    "cpu": [Case("T", 4, 2, 24), Case("O", 4, 2, 24), Case("Oh", 4, 1, 16), Case("I", 2, 1, 16)],
    "cuda": [Case("O", 8, 4, 32), Case("I", 8, 4, 32)],
}


PASSES = ("forward", "forward+backward")
LAST, FIRST = torch.channels_last_3d, torch.contiguous_format


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--engines", nargs="+", default=["dense", "spectral", "spectral/torch"])
    parser.add_argument("--groups", nargs="+", help="only these; by default all")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, for each layer")
    parser.add_argument(
        "--tiles", nargs="*", default=[], help="on a GPU, such as voxels=16,programs=528"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True
    head = {"benchmark": "volume_engines", "origin": origin(args.device)}
    record = Growing(args.json, head, "rows", lambda row: row["case"])
    for case in CASES[args.device]:
        if args.groups is not None and case.group not in args.groups:
            continue
        if args.device == "cpu":
            row = measured(case, args.engines, args.seconds)
            least = row["seconds"]["least"]
            ratios = {name: round(least["dense"] / took, 2) for name, took in least.items()}
        else:
            row = measured_on_a_gpu(case, args.tiles, record.keep)
            ratios = row["dense over spectral"]
        record.keep(row)
        print(f"{case.group}, {case.fields} fields, {case.size}³: dense over each {ratios}")


def measured_on_a_gpu(
    case: Case, tiles: list[str], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Times of graphs, memory, errors and kernels; kept as they come."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = econv.GroupConv3d(case.fields, case.fields, case.group, **options)
    row: dict[str, Any] = {"case": list(case), "dtype": "bfloat16", "errors": errors(layer)}
    ways = {"dense": ("dense", LAST), "dense, channels first": ("dense", FIRST)}
    ways |= {name: (name, LAST) for name in ("spectral", "auto")}
    shape = (case.batch, layer.in_channels, *[case.size] * 3)
    row |= {"ran": {}, "bytes": {}, "kernels": {}, "seconds": {name: {} for name in PASSES}}
    row["tiles"] = {}

    def step(engine: str, layout: torch.memory_format) -> dict[str, Callable[[], None]]:
        x = torch.randn(shape, **options).contiguous(memory_format=layout).requires_grad_()
        probe = torch.randn_like(x, requires_grad=False)

        def forward() -> None:
            with torch.no_grad(), econv.engine(engine):
                layer(x)

        def both() -> None:
            with econv.engine(engine) as ran:
                y = layer(x)
            row["ran"][engine] = ran[0]
            torch.autograd.grad(y, [x, layer.weight], probe)

        return dict(zip(PASSES, (forward, both), strict=True))

    def graphs(way: tuple[str, torch.memory_format]) -> dict[str, float]:
        kept = step(*way)  # graphs know only where it lies
        runs = {name: captured(run, ()) for name, run in kept.items()}
        times: dict[str, float] = isolated(runs, seconds=0.5, rounds=1)["median"]
        return times

    for name, way in ways.items():
        row["bytes"][name] = peak(step(*way)["forward+backward"])
        for one, took in graphs(way).items():
            row["seconds"][one][name] = took
        if name == "spectral":
            found = kernels(step(*way)["forward+backward"])
            row["kernels"] = {key[:60]: round(took, 1) for key, took in found.items()}
        keep(row)
        torch.cuda.empty_cache()
    row["dense over spectral"] = {}
    for one, times in row["seconds"].items():
        dense = min(took for name, took in times.items() if name.startswith("dense"))
        row["dense over spectral"][one] = round(dense / times["spectral"], 2)
    for text in tiles:
        from econv.engines.spectral.triton import volumes

        pairs = (pair.split("=") for pair in text.split(","))
        volumes.CHANGES.update({name: int(n) if n.isdigit() else n for name, n in pairs})
        try:
            row["tiles"][text] = graphs(ways["spectral"])
        except Exception as error:  # such as tiles that no memory holds
            row["tiles"][text] = f"{type(error).__name__}: {error}"[:200]
        volumes.CHANGES.clear()
        print(f"{case.group}, {text}: {row['tiles'][text]}", flush=True)
        keep(row)
    return row


def errors(layer: econv.GroupConv3d) -> dict[str, dict[str, float]]:
    """Relative errors of output and gradients against float64, on a small volume."""
    x = torch.randn(2, layer.in_channels, 8, 9, 10, device="cuda", dtype=torch.bfloat16)
    probe = torch.randn_like(layer(x))

    def results(layer: econv.GroupConv3d, engine: str, dtype: torch.dtype) -> list[Tensor]:
        given = x.to(dtype).contiguous(memory_format=LAST).requires_grad_()
        with econv.engine(engine):
            y = layer(given)
        return [y.detach(), *torch.autograd.grad(y, [given, layer.weight], probe.to(dtype))]

    wanted = results(copy.deepcopy(layer).double(), "dense", torch.float64)
    found: dict[str, dict[str, float]] = {}
    for engine in ("dense", "spectral"):
        pairs = zip(results(layer, engine, x.dtype), wanted, strict=True)
        each = (rounded(float((a.double() - b).norm() / b.norm())) for a, b in pairs)
        found[engine] = dict(zip(("output", "to input", "to weight"), each, strict=True))
        for name, error in found[engine].items():
            if not error <= TOLERANCES["bfloat16"]:
                raise SystemExit(f"{engine} is off by {error:.1e} in {name}")
    return found


def peak(run: Callable[[], object]) -> int:
    """Bytes by which a pass raises what is allocated on the GPU, at its most."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(case: Case, engines: list[str], seconds: float) -> dict[str, Any]:
    """Times of each engine, forward and backward, after a look at whether they agree."""
    layer = econv.GroupConv3d(case.fields, case.fields, case.group)
    shape = (case.batch, layer.in_channels, case.size, case.size, case.size)
    x = torch.randn(shape, requires_grad=True)

    def passed(name: str) -> tuple[list[str], torch.Tensor]:
        with econv.engine(name) as ran:
            y = layer(x)
        torch.autograd.grad(y, [x, layer.weight], y.detach())
        return ran, y.detach()

    def run(name: str) -> Callable[[], object]:
        return lambda: passed(name)

    found = {name: passed(name) for name in engines}
    wanted = found["dense"][1].float()
    for name, (_, y) in found.items():
        error = float((y.float() - wanted).abs().max() / wanted.abs().max())
        if not error <= TOLERANCES["float32"]:
            raise SystemExit(f"{name} is off by {error:.1e} on {case}")
    each = {name: min(_processor_seconds(run(name)) for _ in range(5)) for name in engines}
    return {
        "case": list(case),
        "dtype": "float32",
        "multiplications": [layer.group.order**2, *_spectral_multiplications(layer)],
        "ran": {name: ran[0] for name, (ran, _) in found.items()},
        "seconds": medians({name: run(name) for name in engines}, "cpu", seconds=seconds),
        "processor_seconds": {name: round(took, 4) for name, took in each.items()},
    }


def _spectral_multiplications(layer: econv.GroupConv3d) -> list[float]:
    """For each pixel, pair of fields and operator, beside the dense ones for each tap."""
    plan = layer.convolution.plan(layer.convolution.parts[0])
    return [plan.multiplications / len(plan.stencils)]


def _processor_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
