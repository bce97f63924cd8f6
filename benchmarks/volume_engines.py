"""Time of the engines on convolutions of volumes, and the memory that they take on a GPU.

    python benchmarks/volume_engines.py --threads 2 --json outputs/volume_engines.json
    python benchmarks/volume_engines.py --device cuda --json outputs/volume_engines_cuda.json

One layer at a time, forward and backward; all engines in one process, on the same numbers, one
after the other again and again. Times are medians and the least; what counts are their ratios. On
a CPU numbers are float32, and seconds of the processor are told too, which other work on the
machine lengthens less. On a GPU they are bfloat16 with channels last, and dense is cuDNN.
``--engines spectral`` leaves the choice between spectral engines to econv, and the row says which.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import econv
from recording import Growing, origin
from timing import medians

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--engines", nargs="+", default=["dense", "spectral", "spectral/torch"])
    parser.add_argument("--groups", nargs="+", help="only these; by default all")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, for each layer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True
    head = {"benchmark": "volume_engines", "origin": origin(args.device)}
    record = Growing(args.json, head, "rows", lambda row: row["case"])
    for case in CASES[args.device]:
        if args.groups is None or case.group in args.groups:
            row = measured(case, args.device, args.engines, args.seconds)
            record.keep(row)
            least = row["seconds"]["least"]
            ratios = {name: round(least["dense"] / took, 2) for name, took in least.items()}
            print(f"{case.group}, {case.fields} fields, {case.size}³: dense over each {ratios}")


def measured(case: Case, device: str, engines: list[str], seconds: float) -> dict[str, object]:
    """Times of each engine, forward and backward, after a look at whether they agree."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = econv.GroupConv3d(case.fields, case.fields, case.group, device=device, dtype=dtype)
    shape = (case.batch, layer.in_channels, case.size, case.size, case.size)
    layout = torch.contiguous_format if device == "cpu" else torch.channels_last_3d
    x = torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=layout)
    x.requires_grad_()

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
        if not error <= TOLERANCES[str(dtype).removeprefix("torch.")]:
            raise SystemExit(f"{name} is off by {error:.1e} on {case}")
    row: dict[str, object] = {
        "case": list(case),
        "dtype": str(dtype).removeprefix("torch."),
        "multiplications": [layer.group.order**2, *_spectral_multiplications(layer)],
        "ran": {name: ran[0] for name, (ran, _) in found.items()},
        "seconds": medians({name: run(name) for name in engines}, device, seconds=seconds),
    }
    if device == "cpu":
        each = {name: min(_processor_seconds(run(name)) for _ in range(5)) for name in engines}
        row["processor_seconds"] = {name: round(seconds, 4) for name, seconds in each.items()}
    else:
        row["bytes"] = {name: _peak(run(name)) for name in engines}
    return row


def _spectral_multiplications(layer: econv.GroupConv3d) -> list[float]:
    """For each pixel, pair of fields and operator, beside the dense ones for each tap."""
    plan = layer.convolution.plan(layer.convolution.parts[0])
    return [plan.multiplications / len(plan.stencils)]


def _processor_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _peak(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
