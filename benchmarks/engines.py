"""Time of the engines on one layer after another: dense, spectral, and what "auto" picks.

    python benchmarks/engines.py --threads 2
    python benchmarks/engines.py --device cuda --json benchmarks/results/engines_cuda.json

All run in one process, on the same inputs, interleaved; times are medians, and what counts are
their ratios. On a GPU (bfloat16, channels-last, dense = cuDNN with `benchmark=True`) a time is that
of several passes queued one after the other, as in training. Training steps also run as CUDA
graphs, interleaved and isolated, and through `torch.compile`, isolated (benchmarks/timing.py says
what that means). In each of these ways "auto" may take 1.05 times what the better engine takes.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import econv
from econv.layers import norm_relu_conv
from econv.train.capture import captured
from recording import Growing, origin
from timing import ISOLATED, isolated, kernels, medians, rounded

ENGINES = ("dense", "spectral")
MEASURED = (*ENGINES, "auto")
FUSED = "fused"  # beside the names of the engines
PASSES = ("forward", "forward+backward")
ALLOWED = 1.05
# Of the largest number: what separates engines that compute the same.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


class Case(NamedTuple):
    """One layer and its input."""

    group: str
    in_fields: int
    out_fields: int
    batch: int
    size: int
    dtype: str = "float32"

    def layer(self, device: str, engine: str = "auto") -> econv.GroupConv2d:
        options: dict[str, Any] = {"dtype": getattr(torch, self.dtype), "device": device}
        return econv.GroupConv2d(
            self.in_fields, self.out_fields, self.group, engine=engine, **options
        )

    def image(self, device: str) -> Tensor:
        channels = self.in_fields * self.layer("meta").group.order
        shape = (self.batch, channels, self.size, self.size)
        x = torch.randn(shape, device=device, dtype=getattr(torch, self.dtype))
        return x.to(memory_format=torch.channels_last) if device == "cuda" else x

    def __str__(self) -> str:
        fields = f"{self.in_fields}→{self.out_fields}"
        return f"{self.group} {fields}, batch {self.batch}, {self.size}×{self.size}, {self.dtype}"


LAYERS = {
    "cpu": [Case("p8", 16, 16, 8, 32), Case("p16", 16, 16, 8, 32)],
    "cuda": [
        Case("p8", 40, 40, 512, 16, "bfloat16"),
        Case("p8", 80, 80, 512, 8, "bfloat16"),
        Case("p16", 20, 20, 256, 32, "bfloat16"),
        Case("p8m", 20, 20, 256, 32, "bfloat16"),
        Case("p8", 20, 20, 64, 32, "bfloat16"),
        Case("p32", 20, 20, 64, 32, "bfloat16"),
    ],
}


# What is timed


def passes(module: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Callable[[str], None]]:
    def forward(engine: str) -> None:
        with torch.no_grad(), econv.engine(engine):
            module(x)

    def both(engine: str) -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        with econv.engine(engine):
            module(x).backward(gradient)

    return dict(zip(PASSES, (forward, both), strict=True))


def compiled(case: Case, engine: str, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    """A training step of a layer of its own through `torch.compile`."""
    layer = case.layer("cuda", engine)
    call = torch.compile(layer)

    def step() -> None:
        x.grad = layer.weight.grad = None
        call(x).backward(gradient)

    step()
    return step


def measure(case: Case, device: str, seconds: float, alone: float = ISOLATED) -> dict[str, Any]:
    """Times of a layer, once the engines were seen to compute the same."""
    torch.manual_seed(0)
    layer, x = case.layer(device), case.image(device).requires_grad_()
    record: dict[str, Any] = {"case": case._asdict(), "ran": {}}
    results = {}
    gradient = None
    for engine in MEASURED:
        with econv.engine(engine) as ran:
            out = layer(x)
        record["ran"][engine] = ran[0]
        gradient = torch.randn_like(out) if gradient is None else gradient
        found = torch.autograd.grad(out, [x, layer.weight], gradient)
        results[engine] = [out.detach(), *found]
        check(case, engine, results[engine], results["dense"])
    assert gradient is not None
    del out, found, results
    for name, run in passes(layer, x, gradient).items():
        runs = {engine: partial(run, engine) for engine in MEASURED}
        record[name] = medians(runs, device, seconds=seconds)
    if device == "cuda":
        graphs = {engine: captured(run, ()) for engine, run in runs.items()}
        record[name]["graph"] = medians(graphs, device, seconds=seconds)["median"]
        record[name]["isolated"] = isolated(graphs, seconds=alone)
        steps = {engine: compiled(case, engine, x, gradient) for engine in MEASURED}
        record[name]["compile"] = isolated(steps, seconds=alone)
        record["auto_over_better"] = {
            "graph": over_better(record[name]["isolated"]["median"]),
            "compile": over_better(record[name]["compile"]["median"]),
        }
    return record


def over_better(times: Mapping[str, float]) -> float:
    """What "auto" takes, over what the better engine takes."""
    return round(times["auto"] / min(times[engine] for engine in ENGINES), 3)


def check(case: Case, engine: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    """A comparison of times means something only between layers that compute the same."""
    tolerance = TOLERANCES[case.dtype]
    names = ("output", "gradient to the input", "gradient to the weights")
    for name, ours, theirs in zip(names, found, wanted, strict=True):
        error = float((ours - theirs).abs().max()) / float(theirs.abs().max())
        if not error <= tolerance:
            raise AssertionError(
                f"{engine}: expected the {name} to be off by at most {tolerance:.0e} on {case}; "
                f"got {error:.1e}"
            )


# On a GPU, beside the time


def step_of(module: nn.Module, x: Tensor, engine: str) -> Callable[[], None]:
    """A training step, with a gradient of noise."""
    with torch.no_grad(), econv.engine(engine):
        gradient = torch.randn_like(module(x))
    return partial(passes(module, x, gradient)["forward+backward"], engine)


def cuda_peak(step: Callable[[], None]) -> int:
    """Bytes by which a training step raises what is allocated on the GPU, at its most."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
    return torch.cuda.max_memory_allocated() - before


class PreActivated(nn.Module):
    """Norm, ReLU, layer: one after the other, or fused."""

    def __init__(self, case: Case, fuse: bool) -> None:
        super().__init__()
        self.norm = econv.GroupBatchNorm2d(case.in_fields, case.group, device="cuda")
        self.layer, self.fuse = case.layer("cuda"), fuse

    def forward(self, x: Tensor) -> Tensor:
        if self.fuse:
            return norm_relu_conv(self.norm, self.layer, x)
        result: Tensor = self.layer(torch.relu(self.norm(x)))
        return result


def compared(modules: dict[str, nn.Module], case: Case, alone: float) -> dict[str, Any]:
    """Training steps as isolated CUDA graphs, and their memory, for each way."""
    found: dict[str, Any] = {"peak_bytes": {}}
    graphs, kept = {}, []
    for name, module in modules.items():
        engine = "spectral" if name == FUSED else name
        x = case.image("cuda").requires_grad_()
        step = step_of(module, x, engine)
        found["peak_bytes"][name] = cuda_peak(step)
        graphs[name] = captured(step, ())
        kept.append(step)  # with all that its graph reads
    return found | isolated(graphs, seconds=alone)


def beyond_time(case: Case, alone: float = ISOLATED) -> dict[str, Any]:
    """Memory, errors and kernels of a layer, and its time with a norm and ReLU before it."""
    torch.manual_seed(0)
    steps = {
        engine: step_of(case.layer("cuda"), case.image("cuda").requires_grad_(), engine)
        for engine in ENGINES
    }
    before: dict[str, nn.Module] = {
        name: PreActivated(case, name == FUSED) for name in (*ENGINES, FUSED)
    }
    return {
        "peak_bytes": {engine: cuda_peak(step) for engine, step in steps.items()},
        "errors": errors(case),
        "kernels": {engine: of_each_kernel(step) for engine, step in steps.items()},
        "after_norm_and_relu": compared(before, case, alone),
    }


def of_each_kernel(step: Callable[[], None]) -> dict[str, float]:
    """Microseconds, by the first part of the kernels' names."""
    found: dict[str, float] = {}
    for key, took in kernels(step).items():
        name = key.removeprefix("void ").partition("<")[0].partition("(")[0][:60]
        found[name] = round(found.get(name, 0.0) + took, 1)
    return found


def errors(case: Case) -> dict[str, dict[str, float]]:
    """Relative errors against float64: output, gradient to the input, gradient to the weights."""
    torch.manual_seed(0)
    few = case._replace(batch=4)
    layer, x = few.layer("cuda"), few.image("cuda")
    probe = torch.randn_like(layer(x))

    def results(layer: econv.GroupConv2d, engine: str, dtype: torch.dtype) -> list[Tensor]:
        given = x.detach().to(dtype).requires_grad_()
        with econv.engine(engine):
            out = layer(given)
        return [out.detach(), *torch.autograd.grad(out, [given, layer.weight], probe.to(dtype))]

    wanted = results(copy.deepcopy(layer).double(), "dense", torch.float64)
    found = {}
    for engine in ENGINES:
        ours = results(layer, engine, x.dtype)
        found[engine] = {
            name: rounded(float((a.double() - b).norm() / b.norm()))
            for name, a, b in zip(("output", "input", "weights"), ours, wanted, strict=True)
        }
    return found


# On a CPU, beside the time


def cpu_peaks(case: Case) -> dict[str, int]:
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
        warm = case._replace(batch=1, size=16)
        warm.layer("cpu")(warm.image("cpu")).sum().backward()  # libraries, kernels
        layer, x = case.layer("cpu"), case.image("cpu").requires_grad_()
        before = _high_water()
        layer(x).sum().backward()
    print(_high_water() - before)


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def line(case: Case, record: dict[str, Any]) -> str:
    """What is printed of a layer."""

    def ratio(times: dict[str, float], other: str = "spectral") -> str:
        return f"{times['dense'] / times[other]:.2f}"

    both = record["forward+backward"]
    text = f"{case!s:<42} dense/spectral: forward {ratio(record['forward']['median'])}"
    text += f", both {ratio(both['median'])}"
    if "isolated" in both:
        text += f", graphs {ratio(both['graph'])}, isolated {ratio(both['isolated']['median'])}"
        text += f", compiled {ratio(both['compile']['median'])}"
        text += "; auto over the better:"
        for way, over in record["auto_over_better"].items():
            text += f" {way} {over:.2f}{' (too much)' * (over > ALLOWED)}"
    if after := record.get("after_norm_and_relu"):
        text += f"; after norm and ReLU {ratio(after['median'])}"
        text += f", fused {ratio(after['median'], FUSED)}"
    if memory := record.get("peak_bytes"):
        text += f"; peak MB {' / '.join(f'{peak / 1e6:.0f}' for peak in memory.values())}"
    return f"{text}; auto: {record['ran']['auto']}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, nargs="+", help="which ones, from 0 (default: all)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its choice)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for a median, at most")
    parser.add_argument("--isolated", type=float, default=ISOLATED, help="seconds (%(default)s)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", default=math.inf)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def worse(layers: list[dict[str, Any]]) -> list[str]:
    """Where the spectral engine takes more memory than dense, or errs by half as much again."""
    found = []
    for layer in layers:
        peak, errors = layer.get("peak_bytes", {}), layer.get("errors", {})
        if {"dense", "spectral"} <= peak.keys() and peak["spectral"] > peak["dense"]:
            found.append(f"{layer['case']}: {peak['spectral']} bytes, dense {peak['dense']}")
        found += [
            f"{layer['case']}: {name} errs by {error:.2g}, dense by {errors['dense'][name]:.2g}"
            for name, error in errors.get("spectral", {}).items()
            if error > 1.5 * errors["dense"][name]
        ]
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    stop = time.perf_counter() + args.limit
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak:
        print_peak(args.peak[0], Case(*json.loads(args.peak[1])))
        return
    torch.backends.cudnn.benchmark = True
    cases = LAYERS[args.device]
    record = Growing(args.json, origin(args.device), "layers", lambda row: Case(**row["case"]))
    for number in range(len(cases)) if args.layers is None else args.layers:
        if time.perf_counter() > stop:
            print(f"stopped after {args.limit:.0f} s")
            break
        case = cases[number]
        found = measure(case, args.device, args.seconds, args.isolated)
        if args.device == "cuda":
            found |= beyond_time(case, args.isolated)
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        elif Path("/proc/self/status").exists():
            found["peak_bytes"] = cpu_peaks(case)
        print(line(case, found), flush=True)
        record.keep(found)
    if args.device == "cuda" and (lines := worse(record.rows)):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
