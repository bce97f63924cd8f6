"""Random shapes through every engine, for an hour in one process: does memory stay flat?

    python benchmarks/soak.py --seconds 3600

Every step draws a layer (one of a fixed number of bases, any numbers of fields), an image or a
volume of any size and batch, an engine that can run it, train or eval mode. Outputs are compared
with the dense engine now and then. The first third of the time warms up: caches fill, the allocator
finds its size. After that the resident memory may grow by what `ALLOWED` says, and no cache or
other container of a module of econv may grow without end. The exit status is 1 if something does.
What the allocator keeps of freed memory does not count: shapes that never come again leave gaps.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import econv
from econv.engines import choice
from econv.files import write_atomically
from recording import origin, stamp

ALLOWED = 0.05  # of growth after the warm-up, and besides …
SLACK = 24.0  # … megabytes, which the allocator moves by
GROUPS = ("p1", "p2", "p3", "p4", "p6", "p8", "p16", "p1m", "p2m", "p4m", "p8m")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"operators": "order<=2"},
    {"operators": "order<=1", "size": 5},
    {"stencils": "central"},
    {"stencils": "gaussian", "size": 7},
)
SPACE = ("C2", "D2", "T", "O")
OPTIONS_IN_SPACE: tuple[dict[str, Any], ...] = ({}, {"stencils": "central"})
# What fills up for long, and how far it may.
BOUNDED = dict.fromkeys(
    ("econv.engines.choice._memory", "econv.engines.choice._decided"), choice._MOST_MEMORIES
)
SAMPLES = 60
EVERY = 25  # steps from one comparison with dense to the next


def resident() -> float:
    """The memory of this process that is in use, in megabytes."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        if trim is not None:
            trim(0)
    path = Path("/proc/self/statm")
    if not path.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    import os

    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def containers() -> dict[str, int]:
    """How much every dictionary, list and set at the top of econv's modules holds.

    Caches of functions too, but for those that have a largest size.
    """
    found: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("econv") or module is None:
            continue
        for attribute, value in vars(module).items():
            info = getattr(value, "cache_info", None)
            if callable(info) and getattr(value, "__module__", "").startswith("econv"):
                if info().maxsize is None:
                    found[f"{value.__module__}.{attribute}"] = info().currsize
            elif isinstance(value, dict | list | set) and not attribute.startswith("__"):
                found[f"{name}.{attribute}"] = len(value)
    return found


def step(draw: random.Random, compare: bool) -> str:
    """One layer, forwards and, in train mode, backwards; which engine ran."""
    volumes = draw.random() < 0.2
    several = OPTIONS_IN_SPACE if volumes else OPTIONS
    options: dict[str, Any] = {**draw.choice(several), "bias": draw.random() < 0.5}
    options |= {"stride": draw.choice((1, 1, 2)), "dilation": draw.choice((1, 1, 2))}
    dtype = draw.choice((torch.float32, torch.float32, torch.float64))
    group = econv.Group(draw.choice(SPACE if volumes else GROUPS))
    wanted = draw.choice(("auto", "dense", "spectral"))
    fields = draw.randint(1, 6), draw.randint(1, 6)
    layer: torch.nn.Module
    lift: Any = econv.LiftConv3d if volumes else econv.LiftConv2d
    between: Any = econv.GroupConv3d if volumes else econv.GroupConv2d
    if draw.random() < 0.3:
        layer, channels = lift(*fields, group, **options), fields[0]
    else:
        layer, channels = between(*fields, group, **options), fields[0] * group.order
    layer = layer.to(dtype)
    sides = [draw.randint(1, most) for most in ((12,) * 3 if volumes else (48, 48))]
    extent = layer.extent  # "same" padding: any size will do
    shape = draw.choice((0, 1, 2, 3, 5)), channels, *(max(side, extent) for side in sides)
    x = torch.randn(shape, dtype=dtype)
    if draw.random() < 0.3:
        x = x.to(memory_format=torch.channels_last_3d if volumes else torch.channels_last)
    training = draw.random() < 0.6
    layer.train(training)
    x.requires_grad_(training)
    layer.engine = wanted
    with econv.engine() as ran:
        out = layer(x)
    if training:
        out.square().sum().backward()
    if compare and out.numel():
        layer.engine = "dense"
        exact = layer(x)
        error = float((out - exact).detach().abs().max() / exact.detach().abs().max().clamp(1e-30))
        if not error <= (1e-9 if dtype == torch.float64 else 1e-3):
            raise SystemExit(f"{ran}: differs by {error:.1e} from dense: {layer}, {shape}")
    return str(ran[0]) if ran else "none"


def soak(
    seconds: float, seed: int = 0, one: Callable[[random.Random, bool], str] = step
) -> dict[str, Any]:
    """Samples of memory and containers over the time, and how often each engine ran."""
    draw, steps, ran = random.Random(seed), 0, {}
    torch.manual_seed(seed)
    start = time.monotonic()
    samples: list[dict[str, Any]] = []
    while (passed := time.monotonic() - start) < seconds:
        name = one(draw, steps % EVERY == 0)
        ran[name] = ran.get(name, 0) + 1
        steps += 1
        if passed >= len(samples) * seconds / SAMPLES:
            samples.append({"seconds": passed, "megabytes": resident(), "held": containers()})
    return {"steps": steps, "ran": dict(sorted(ran.items())), "samples": samples}


def growing(samples: list[dict[str, Any]]) -> Iterator[str]:
    """What grew after the first third, as sentences."""
    third = len(samples) // 3
    if third < 3:
        raise ValueError(f"expected at least 9 samples; got {len(samples)}")
    memory = [sample["megabytes"] for sample in samples]
    before = statistics.median(memory[third : 2 * third])
    after = statistics.median(memory[-third:])
    if after > before * (1 + ALLOWED) + SLACK:
        yield f"memory grew from {before:.0f} to {after:.0f} MB"
    held = [sample["held"] for sample in samples]
    for name, count in held[-1].items():
        counts = [held[place].get(name, 0) for place in (third, 2 * third)]
        if counts[0] < counts[1] < count and count > BOUNDED.get(name, 0):
            yield f"{name} grew from {counts[0]} to {counts[1]} to {count}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    args = parser.parse_args(arguments)
    if args.seconds <= 0:
        parser.error(f"expected --seconds above 0; got {args.seconds}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    found = soak(args.seconds, args.seed)
    memory = [sample["megabytes"] for sample in found["samples"]]
    wrong = list(growing(found["samples"]))
    engines_ran = ", ".join(f"{name} {count}" for name, count in found["ran"].items())
    print(f"{found['steps']} steps in {args.seconds:g} s: {engines_ran}")
    print(
        f"memory: {memory[0]:.0f} MB at first, {max(memory):.0f} at most, {memory[-1]:.0f} at last"
    )
    for line in wrong:
        print(line)
    if args.json:
        record = {**origin("cpu"), **stamp(), "asked_seconds": args.seconds, "grew": wrong, **found}
        write_atomically(args.json, (json.dumps(record, indent=1) + "\n").encode())
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
