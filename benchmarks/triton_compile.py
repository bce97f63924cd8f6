"""What the kernels of a layer compile to, and how long that takes, without a GPU.

The launches of one training step are caught before they reach a device and compiled for a Hopper
GPU (sm_90): processor seconds to compile, registers, spills, shared memory and instructions.

    python benchmarks/triton_compile.py                        # the layers of the table
    python benchmarks/triton_compile.py --engine spectral/triton
    python benchmarks/triton_compile.py --activated            # with norm and ReLU at the load
    python benchmarks/triton_compile.py --dump folder          # with the machine code
    python benchmarks/triton_compile.py --engine spectral/triton --layer O,8,4,32,bfloat16,order<=2
    python benchmarks/triton_compile.py --wait --layer p8,40,512,16   # seconds at a first call
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

from econv import filter_basis
from econv.engines import ENGINES
from econv.engines.problem import Geometry
from econv.engines.spectral.operator import Saved, Task
from econv.gpu import launch as triton_launch
from econv.layers.norm_kernels import activated, field_statistics, norm_gradient
from econv.plan import spectral_plan


class Layer(NamedTuple):
    """A layer and its input."""

    group: str
    fields: int
    batch: int
    size: int
    dtype: str = "bfloat16"
    operators: str = "paper"

    def __str__(self) -> str:
        text = f"{self.group} {self.fields}→{self.fields}, batch {self.batch}"
        text += f", {self.size}×{self.size}, {self.dtype}"
        return text + f", {self.operators}" * (self.operators != "paper")


LAYERS = (
    Layer("p8", 40, 512, 16),
    Layer("p8", 80, 512, 8),
    Layer("p16", 20, 256, 32),
    Layer("p8m", 20, 256, 32),
)


class Launch(NamedTuple):
    name: str
    grid: tuple[int, ...]
    kernel: Any
    seconds: float


class _Device:
    """As much of a driver as a compiler asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def processor_seconds() -> float:
    """Time of processors that this process and those it waited for have taken."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextmanager
def caught(one_by_one: bool = True) -> Iterator[list[Launch]]:
    """Launches inside the block are compiled, one after the other, and go nowhere.

    Otherwise those of a layer are compiled together, as on a GPU.
    """
    launches: list[Launch] = []
    run, together = triton.JITFunction.run, triton_launch.compile_together

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        start = processor_seconds()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seconds = processor_seconds() - start
        launches.append(Launch(self.fn.__name__, tuple(grid), kernel, seconds))

    triton.JITFunction.run = compile_only
    if one_by_one:
        triton_launch.compile_together = lambda *_: None
    triton.runtime.driver.set_active(_Device())
    try:
        yield launches
    finally:
        triton.JITFunction.run = run
        triton_launch.compile_together = together


def training_step(
    layer: Layer, engine: str, activated: bool = False, one_by_one: bool = True
) -> list[Launch]:
    """The launches of the forward pass, then those of both gradients."""
    plan = spectral_plan(filter_basis(layer.group, layer.operators), "regular", "regular")
    basis, sizes = plan.basis, (layer.size,) * plan.basis.group.dimension
    task = Task(plan, Geometry.of(basis.size, sizes, 1, basis.size // 2, 1))
    shape = (layer.batch, layer.fields * basis.group.order, *sizes)
    layout = torch.channels_last if len(sizes) == 2 else torch.channels_last_3d
    options: dict[str, Any] = {"device": "meta", "memory_format": layout}
    x, gradient = (torch.empty(shape, dtype=getattr(torch, layer.dtype), **options),) * 2
    coordinates = basis.group.order * len(basis.operators)
    weight = torch.empty(layer.fields, layer.fields, coordinates, device="meta")
    affine = torch.empty(3, layer.fields, device="meta") if activated else None
    one: Any = ENGINES[engine]
    with caught(one_by_one) as launches:
        if activated:
            statistics(x, layer.fields)
        _, known = one.forward(task, x, weight, affine)
        found = one.backward(task, gradient, Saved(x, weight, affine, known), (True, True))
        if activated:
            numbers = torch.empty(4, layer.fields, device="meta")
            norm_gradient(x, found[0], numbers, found[2], shortcut=x)
    return launches


def statistics(x: torch.Tensor, fields: int) -> None:
    """Launch what makes the numbers of a norm, and what writes an activated map."""
    weight, bias, mean, variance = (torch.empty(fields, device="meta") for _ in range(4))
    numbers = field_statistics(x, fields, weight, bias, (mean, variance, 0.1), 1e-5)
    activated(x, numbers[:3])


def waited(layer: Layer, engine: str) -> float:
    """Seconds until all kernels of a training step are there that were never compiled before."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        start = time.perf_counter()
        training_step(layer, engine, one_by_one=False)
        return time.perf_counter() - start


_TOOLS = Path(nvidia.__file__).parent / "bin"
_LINE = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)[^;]*;")


def report(launch: Launch, dump: Path | None) -> dict[str, Any]:
    """What a launch compiled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.kernel.asm["cubin"])
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    sass = text.stdout + text.stderr
    if dump:
        dump.with_suffix(".sass").write_text(sass)
        dump.with_suffix(".ttgir").write_text(launch.kernel.asm["ttgir"])
    used = re.search(r"REG:(\d+) STACK:(\d+)", sass)
    assert used is not None
    registers, shared = int(used[1]), launch.kernel.metadata.shared
    threads = launch.kernel.metadata.num_warps * 32
    fit = [65536 // (-(-registers // 8) * 8 * threads), 2048 // threads, 32]
    return {
        "kernel": launch.name,
        "grid": launch.grid,
        "warps": launch.kernel.metadata.num_warps,
        "seconds": round(launch.seconds, 2),
        "registers": registers,
        "spills": int(used[2]),  # bytes of the stack that a thread uses
        "shared": shared,
        "programs_at_a_time": min([*fit, 227 * 1024 // (shared + 1024)] if shared else fit),
        "loads": threads_along_axes(launch, "load"),
        "stores": threads_along_axes(launch, "store"),
        "instructions": dict(collections.Counter(map(_kind, _LINE.findall(sass))).most_common()),
    }


def threads_along_axes(launch: Launch, access: str) -> list[list[int]]:
    """How many threads of a warp lie along each axis of what is loaded or stored as tensors."""
    text = launch.kernel.asm["ttgir"]
    found = dict(
        re.findall(r"^(#\w+) = #ttg\.blocked<.*?threadsPerWarp = \[([\d, ]+)\]", text, re.M)
    )
    names = re.findall(rf"tt\.{access} .*: tensor<[^#]*, (#\w+)>", text)
    return [list(map(int, found[name].split(","))) for name in names if name in found]


def _kind(op: str) -> str:
    """A name for instructions that cost alike: with the width of an access where that counts."""
    base, *more = op.split(".")
    if base in ("LDG", "STG", "LDS", "STS", "LDL", "STL"):
        width = next((word for word in more if word in ("64", "128", "U16", "U8")), "32")
        return f"{base}.{width.lstrip('U')}"
    if base == "LDSM":
        return f"LDSM.{more[-1]}" if more else base
    return base


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layer", nargs="*", help="such as p8,40,512,16 (default: the table's)")
    names = ("spectral/hopper", "spectral/triton")
    parser.add_argument("--engine", choices=names, default=names[0])
    parser.add_argument("--activated", action="store_true", help="norm and ReLU at the load")
    parser.add_argument("--wait", action="store_true", help="seconds to wait, and nothing else")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write the machine code there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is printed to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    layers = []
    for text in args.layer or ():
        group, fields, batch, size, *more = text.split(",")
        layers.append(Layer(group, int(fields), int(batch), int(size), *more))
    found = []
    for layer in layers or LAYERS:
        if args.wait:
            seconds = waited(layer, args.engine)
            print(f"{layer}: {seconds:.1f} s on {os.cpu_count()} cores", flush=True)
            continue
        launches = training_step(layer, args.engine, args.activated)
        seen = {launch.kernel.hash: launch for launch in reversed(launches)}.values()
        total = round(sum(launch.seconds for launch in seen), 1)
        print(f"{layer}: {total} s to compile")
        rows = []
        if args.dump:
            args.dump.mkdir(parents=True, exist_ok=True)
        for number, launch in enumerate(launches):
            name = f"{layer.group}_{layer.fields}_{number}_{launch.name}"
            row = report(launch, args.dump and args.dump / name)
            rows.append(row)
            print(
                f"  {row['kernel']:<19} {row['grid']!s:<14} {row['warps']:>2} warps"
                f" {row['registers']:>3} registers, {row['spills']} B spilled,"
                f" {row['shared'] / 1024:.0f} KiB shared, {row['programs_at_a_time']} at a time"
            )
        found.append({"layer": layer._asdict(), "compile_seconds": total, "launches": rows})
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
