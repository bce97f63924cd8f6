"""What the kernels of the spectral engine compile to, without a GPU.

The launches of one training step of a layer are caught before they reach a device and compiled for
a Hopper GPU (sm_90): processor seconds to compile, registers, spills, shared memory, and the
instructions of each kernel, counted as often as they run. From these follows a bound on the time of
a launch: the busiest of the units that carry the instructions out. (Not of
warp-specialised kernels: not all of their warps run the same instructions.)

    python benchmarks/triton_compile.py                        # the layers of the table
    python benchmarks/triton_compile.py --tiles pixels=32      # cut in another way
    python benchmarks/triton_compile.py --not-warp-specialised # for GPUs other than Hopper
    python benchmarks/triton_compile.py --activated            # with norm and ReLU at the load
    python benchmarks/triton_compile.py --dump folder          # with the machine code
    python benchmarks/triton_compile.py --wait --layer p8,40,512,16 p32,20,64,32   # how long it is
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

from econv import filter_basis
from econv.engines import triton_ops
from econv.engines.spectral import Geometry
from econv.engines.spectral.hopper import kernels as hopper_kernels
from econv.engines.spectral.tiling import Like
from econv.engines.spectral.triton import steps as triton_steps
from econv.engines.spectral.triton.launches import statistics_steps
from econv.plan import SpectralPlan, spectral_plan

SMS, CLOCK, MEMORY = 132, 1.7e9, 4.1e12  # of an H200: processors, cycles and bytes a second
L2 = 5.5e12  # bytes a second that the processors read from the second-level cache


class Layer(NamedTuple):
    """A layer and its input, as in benchmarks/engines.py."""

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
    arguments: dict[str, Any]
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
    run, together = triton.JITFunction.run, triton_steps.compile_together

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        start = processor_seconds()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seconds = processor_seconds() - start
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(self.fn.__name__, tuple(grid), given, kernel, seconds))

    triton.JITFunction.run = compile_only
    if one_by_one:
        triton_steps.compile_together = lambda *_: None
    triton.runtime.driver.set_active(_Device())
    try:
        yield launches
    finally:
        triton.JITFunction.run = run
        triton_steps.compile_together = together


OPERATORS = ("convolve", "gram", "adjoint")  # of a training step, in the order in which they run


def waited(layer: Layer) -> float:
    """Seconds until all kernels of a training step are there that were never compiled before."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        start = time.perf_counter()
        training_step(layer, one_by_one=False)
        return time.perf_counter() - start


def training_step(layer: Layer, activated: bool = False, one_by_one: bool = True) -> list[Launch]:
    """The launches of the forward pass, then those of both gradients."""
    plan = spectral_plan(filter_basis(layer.group, layer.operators), "regular", "regular")
    geometry = Geometry(1, 1, 1, plan.basis.size // 2, layer.size, layer.size)
    shape = (layer.batch, layer.fields, layer.fields, layer.size)
    options = {"activated": activated, "one_by_one": one_by_one}
    return operators(plan, *shape, geometry, layer.dtype, **options)


def operators(
    plan: SpectralPlan,
    batch: int,
    in_fields: int,
    out_fields: int,
    size: int,
    geometry: Geometry,
    dtype: str,
    names: Sequence[str] = OPERATORS,
    activated: bool = False,
    one_by_one: bool = True,
) -> list[Launch]:
    """The launches of some operators of a layer on images of ``size`` by ``size``.

    ``activated``: the layer normalises and rectifies its input at the load.
    """
    order = plan.basis.group.order
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": "meta"}
    options["memory_format"] = torch.channels_last
    x = torch.empty((batch, in_fields * order, size, size), **options)
    g = torch.empty((batch, out_fields * order, geometry.height, geometry.width), **options)
    weights = torch.empty(out_fields, in_fields, plan.weights, device="meta")
    affine = torch.empty(3, in_fields, device="meta") if activated else None
    with caught(one_by_one) as launches:
        if affine is not None:
            statistics(x, in_fields)
        x_scaled = (x, triton_ops.run_largest(x, affine))
        g_scaled, w_scaled = ((t, triton_ops.run_largest(t)) for t in (g, weights))
        for name in names:
            if name == "convolve":
                numbers = (*geometry, True, affine)
                triton_ops.run_convolve(*x_scaled, *w_scaled, plan.name, False, *numbers)
            elif name == "gram":
                triton_ops.run_gram(*x_scaled, *g_scaled, plan.name, *geometry[:4], affine)
            else:
                back = geometry.transposed(plan.basis.size, size, size)
                to_x = triton_ops.run_convolve(*g_scaled, *w_scaled, plan.name, True, *back, True)
                if affine is not None:
                    to_x, to_affine = triton_ops.run_activation_backward(to_x, x, affine)
                    numbers = torch.empty(4, in_fields, device="meta")
                    triton_ops.statistics_backward(x, to_x, numbers, to_affine)
    return launches


def statistics(x: torch.Tensor, fields: int) -> None:
    """Launch what makes the numbers of a norm from the statistics of channels."""
    float32 = torch.float32
    kept = (float32, float32)
    launch = statistics_steps(Like.of(x), fields, float32, float32, kept, 0.1, 1e-5)
    of_channels, of_fields = (torch.empty(n, device="meta") for n in (x.shape[1], fields))
    numbers = torch.empty(4, fields, device="meta")
    launch(*[of_channels] * 2, *[of_fields] * 4, of_channels, numbers)


class Code(NamedTuple):
    registers: int
    spills: int  # bytes of the stack that a thread uses
    shared: int
    counts: dict[str, float]  # instructions of one warp, as often as they run


_TOOLS = Path(nvidia.__file__).parent / "bin"
_LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z0-9_.]+)([^;]*);")


def disassembled(launch: Launch, trips: float) -> tuple[Code, str]:
    """The machine code of a launch; ``trips`` is how often its main loop runs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.kernel.asm["cubin"])
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    sass = text.stdout + text.stderr
    used = re.search(r"REG:(\d+) STACK:(\d+)", sass)
    assert used is not None
    lines = [(int(a, 16), op, rest) for a, _, op, rest in _LINE.findall(sass)]
    loops: list[tuple[int, int]] = []  # the outermost: from where to where
    for address, op, rest in lines:
        if op.startswith("BRA") and (goal := re.search(r"0x([0-9a-f]+)", rest)):
            to = int(goal[1], 16)
            if to < address:  # one that stays where it is ends the code
                loops = [*(ends for ends in loops if ends[1] < to), (to, address)]
    counts: dict[str, float] = collections.Counter()
    for address, op, _ in lines:
        inside = any(first <= address <= last for first, last in loops)
        counts[_kind(op)] += trips if inside else 1.0
    spills = int(used[2])
    return Code(int(used[1]), spills, launch.kernel.metadata.shared, dict(counts)), sass


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


WAVEFRONTS = {  # cycles that an access of a warp keeps the first-level cache busy, at the least
    "LDG.128": 4, "LDG.64": 2, "LDG.32": 1, "LDG.16": 1, "STG.128": 4, "STG.64": 2, "STG.32": 1,
    "STG.16": 1, "LDS.128": 4, "LDS.64": 2, "LDS.32": 1, "LDS.16": 1, "STS.128": 4, "STS.64": 2,
    "STS.32": 1, "STS.16": 1, "LDSM.4": 4, "LDSM.2": 2, "LDSM.1": 1, "LDL.32": 1, "STL.32": 1,
    "LDL.64": 2, "STL.64": 2, "LDL.128": 4, "STL.128": 4,
}  # fmt: skip


def bounds(launch: Launch, code: Code) -> dict[str, float]:
    """Seconds that each unit of the GPU needs for a launch."""
    outside = {"memory": traffic(launch) / MEMORY, "L2": shared_traffic(launch) / L2}
    if "PRODUCERS" in launch.arguments:
        return outside
    programs = 1
    for length in launch.grid:
        programs *= length
    warps = launch.kernel.metadata.num_warps
    total = programs * warps
    issue = sum(code.counts.values()) / 4
    # A product of m16n8k16 halves takes a quarter of a processor 6.5 cycles where it is started
    # by one warp: five eighths of what the units could do.
    tensor = code.counts.get("HMMA", 0) * 6.5 / 4
    memory = sum(WAVEFRONTS.get(kind, 0) * n for kind, n in code.counts.items())
    waves = {"issue": issue, "tensor": tensor, "cache": memory}
    rate = SMS * CLOCK
    found = {name: total * cycles / rate for name, cycles in waves.items()}
    return found | outside


def traffic(launch: Launch) -> int:
    """Bytes of the tensors of a launch, each read or written once."""
    given = (getattr(value, "base", value) for value in launch.arguments.values())
    tensors = {id(value): value for value in given if isinstance(value, torch.Tensor)}
    return sum(map(_bytes, tensors.values()))


def shared_traffic(launch: Launch) -> int:
    """Bytes that all programs of a launch read, what several read counted for each."""
    given = launch.arguments
    if "PRODUCERS" in given:  # each tile of a program does
        copied = {id(value.base): value.base for value in given.values() if hasattr(value, "base")}
        others = sum(map(_bytes, copied.values()))
        if launch.name == "forward":
            return given["tiles"] * others + launch.grid[1] * _bytes(given["x"])
        return launch.grid[0] * others + launch.grid[1] * _bytes(given["x"])
    if launch.name == "forward":  # a tile of pixels reads all weights
        return launch.grid[0] * _bytes(given["w"]) + launch.grid[1] * _bytes(given["x"])
    if launch.name == "weight_gradient":  # each run of input fields reads all of it
        chunks = given["x"].shape[1]
        return launch.grid[0] * chunks * _bytes(given["g"]) + launch.grid[1] * _bytes(given["x"])
    return traffic(launch)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def occupancy(launch: Launch, code: Code) -> int:
    """Programs that fit on a processor at a time."""
    threads = launch.kernel.metadata.num_warps * 32
    registers = -(-code.registers // 8) * 8 * threads
    fit = [65536 // registers, 2048 // threads, 32]
    if code.shared:
        fit.append(227 * 1024 // (code.shared + 1024))
    return min(fit)


def trips(launch: Launch) -> float:
    """How often the main loop of a launch runs."""
    given = launch.arguments
    if "PRODUCERS" in given:
        return given["tiles"] / launch.grid[0 if launch.name == "forward" else 2]
    if launch.name == "forward":
        return given["chunks"]
    if launch.name == "weight_gradient":
        return given["tiles"] / launch.grid[2]
    if launch.name == "reduce":
        return given["splits"] / given["SPLITS"]
    return 1.0


def report(layer: Layer, activated: bool, dump: Path | None) -> dict[str, Any]:
    launches = training_step(layer, activated)
    seen: dict[str, float] = {}
    for launch in launches:
        seen.setdefault(launch.kernel.hash, launch.seconds)
    compile_seconds = sum(seen.values())
    rows = []
    for number, launch in enumerate(launches):
        code, sass = disassembled(launch, trips(launch))
        if dump:
            dump.mkdir(parents=True, exist_ok=True)
            name = f"{layer.group}_{layer.fields}_{number}_{launch.name}"
            (dump / f"{name}.sass").write_text(sass)
            (dump / f"{name}.ttgir").write_text(launch.kernel.asm["ttgir"])
        rows.append(
            {
                "kernel": launch.name,
                "grid": launch.grid,
                "warps": launch.kernel.metadata.num_warps,
                "seconds": round(launch.seconds, 2),
                "registers": code.registers,
                "spills": code.spills,
                "shared": code.shared,
                "programs_at_a_time": occupancy(launch, code),
                "loads": threads_along_axes(launch, "load"),
                "stores": threads_along_axes(launch, "store"),
                "microseconds": {k: round(v * 1e6, 1) for k, v in bounds(launch, code).items()},
                "instructions": {
                    kind: round(n) for kind, n in sorted(code.counts.items(), key=lambda i: -i[1])
                },
            }
        )
    total = round(compile_seconds, 1)
    return {"layer": layer._asdict(), "compile_seconds": total, "launches": rows}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layer", nargs="*", help="such as p8,40,512,16 (default: the table's)")
    parser.add_argument("--tiles", nargs="*", default=[], help="such as pixels=32 warps=4")
    parser.add_argument("--not-warp-specialised", action="store_true", help="Triton only")
    parser.add_argument("--activated", action="store_true", help="norm and ReLU at the load")
    parser.add_argument("--wait", action="store_true", help="seconds to wait, and nothing else")
    parser.add_argument("--most", type=int, default=14, help="kinds of instructions shown")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write the machine code there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is printed to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.not_warp_specialised:
        hopper_kernels.AVAILABLE = False
    layers = []
    for text in args.layer or ():
        group, *numbers = text.split(",")
        layers.append(Layer(group, *map(int, numbers[:3]), *numbers[3:]))
    changes = {name: int(value) for name, value in (text.split("=") for text in args.tiles)}
    found = []
    for layer in layers or LAYERS:
        if args.wait:
            print(f"{layer}: {waited(layer):.1f} s on {os.cpu_count()} cores", flush=True)
            continue
        with triton_ops.tiles(**changes) if changes else nullcontext():
            record = report(layer, args.activated, args.dump)
        found.append(record)
        print(f"{layer}: {record['compile_seconds']} s to compile")
        bound = 0.0
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in record["launches"]:
            kinds.setdefault(row["kernel"], []).append(row)
        for kernel, rows in kinds.items():
            row = rows[0]
            times = {
                unit: sum(r["microseconds"][unit] for r in rows) for unit in row["microseconds"]
            }
            bound += sum(max(r["microseconds"].values()) for r in rows)
            print(
                f"  {kernel:<19} {len(rows):>2} × {row['grid']!s:<14} {row['warps']:>2} warps"
                f" {row['registers']:>3} registers, {row['spills']} B spilled,"
                f" {row['shared'] / 1024:.0f} KiB shared, {row['programs_at_a_time']} at a time;"
                f" µs: {', '.join(f'{unit} {time:.0f}' for unit, time in times.items())}"
            )
            if kernel in ("forward", "weight_gradient"):
                shown = list(row["instructions"].items())[: args.most]
                print(f"                      {', '.join(f'{kind} {n}' for kind, n in shown)}")
        print(f"  in all ≥ {bound:.0f} µs, by the busiest unit of each launch", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
