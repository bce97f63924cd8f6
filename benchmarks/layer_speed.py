"""Time of one GroupConv2d relative to the plain Conv2d with as many channels and taps.

Both run in turns in one process, so that whatever else the machine does meets both. What counts is
the ratio of the medians; the quartiles of the ratios of neighbouring runs say how far to trust it.

    python benchmarks/layer_speed.py --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import econv

TARGET = 1.05
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def forward(layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def forward_backward(layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
    x.grad = None
    layer.zero_grad(set_to_none=True)
    layer(x).backward(gradient)


PASSES = {"forward": forward, "forward+backward": forward_backward}


def seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(
    ours: Callable[[], None], plain: Callable[[], None], repeats: int
) -> dict[str, float | list[float]]:
    """Run both in turns, each first as often as second, and relate their times."""
    for _ in range(3):
        ours()
        plain()
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for repeat in range(repeats):
        turn = [("ours", ours), ("plain", plain)]
        for name, function in turn if repeat % 2 else reversed(turn):
            times[name].append(seconds(function))
    paired = [a / b for a, b in zip(times["ours"], times["plain"], strict=True)]
    lower, _, upper = statistics.quantiles(paired, n=4)
    return {
        "ratio": statistics.median(times["ours"]) / statistics.median(times["plain"]),
        "ratio_of_fastest": min(times["ours"]) / min(times["plain"]),
        "paired_quartiles": [lower, upper],
    }


def measure(args: argparse.Namespace, memory_format: torch.memory_format) -> dict[str, dict]:
    torch.manual_seed(0)
    layer = econv.GroupConv2d(args.fields, args.fields, args.group, engine="dense")
    channels, taps = layer.in_channels, layer.basis.size
    plain = nn.Conv2d(channels, channels, taps, padding=taps // 2, bias=False)
    plain = plain.to(memory_format=memory_format)
    shape = (args.batch, channels, args.size, args.size)
    x, gradient = (torch.randn(shape).to(memory_format=memory_format) for _ in range(2))

    # A comparison of times means something only between layers that compute the same.
    with torch.no_grad():
        plain.weight.copy_(layer.filters())
    expected, found = plain(x), layer(x)
    if not torch.allclose(found, expected, atol=1e-4 * float(expected.detach().abs().max())):
        raise AssertionError("the layer and the plain convolution with its filters disagree")

    x.requires_grad_()
    return {
        name: compare(
            lambda run=run: run(layer, x, gradient),
            lambda run=run: run(plain, x, gradient),
            args.repeats,
        )
        for name, run in PASSES.items()
    }


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text}")
    return value


def several(text: str) -> int:
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2 repeats; got {text}")
    return value


def group(text: str) -> econv.Group:
    try:
        return econv.Group(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--group", type=group, default="p8", help="group (default: %(default)s)")
    parser.add_argument("--fields", type=positive, default=16, help="in and out (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="images (%(default)s)")
    parser.add_argument("--size", type=positive, default=32, help="pixels a side (%(default)s)")
    parser.add_argument("--repeats", type=several, default=40, help="timed runs (%(default)s)")
    parser.add_argument("--threads", type=positive, help="threads of torch (default: its choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(arguments)
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: no such folder: {args.json.parent}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    channels = args.fields * args.group.order
    print(
        f"GroupConv2d({args.fields}, {args.fields}, {str(args.group)!r}) over "
        f"Conv2d({channels}, {channels}) of the same filter size, dense engine, batch {args.batch},"
        f" {args.size}×{args.size}, float32, {torch.get_num_threads()} threads,"
        f" {args.repeats} runs in turns"
    )
    print(f"\n{'memory format':<15}{'pass':<18}{'ratio':>7}{'of fastest':>12}   paired quartiles")
    results: dict[str, dict] = {}
    for name, memory_format in MEMORY_FORMATS.items():
        results[name] = measure(args, memory_format)
        for what, found in results[name].items():
            lower, upper = found["paired_quartiles"]
            print(
                f"{name:<15}{what:<18}{found['ratio']:>7.3f}{found['ratio_of_fastest']:>12.3f}"
                f"   {lower:.3f} – {upper:.3f}"
            )
    worst = max(found["forward+backward"]["ratio"] for found in results.values())
    verdict = "reached" if worst <= TARGET else "missed"
    print(f"\nforward+backward at most {TARGET}: {verdict} ({worst:.3f})")
    if args.json:
        record = {
            "group": str(args.group),
            "fields": args.fields,
            "batch": args.batch,
            "size": args.size,
            "threads": torch.get_num_threads(),
            "repeats": args.repeats,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "results": results,
        }
        temporary = args.json.with_name(f".{args.json.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, args.json)


if __name__ == "__main__":
    main()
