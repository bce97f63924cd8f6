"""Time of an exported network relative to the plain CNN of the same width, depth and filter size.

The networks run interleaved in one process: whatever else the machine does meets all of them.
The plain CNN is measured as it is written, with its batch norms, and with them folded as export
folds ours; the network before export and the CNN with 3×3 filters stand beside it.

    python benchmarks/export_speed.py --threads 2 --json benchmarks/results/export_speed.json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import econv
from econv.models import ResNet
from recording import stamp
from timing import interleaved

TARGET = 1.05
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def plain(network: ResNet, size: int) -> ResNet:
    """The ordinary ResNet with as many channels as ours has, and filters of this size."""
    assert network.group is not None
    order = network.group.order
    config = {**network.config, "group": None, "pool": None, "options": None}
    config["fields"] = [order * fields for fields in config["fields"]]
    cnn = ResNet(**config)
    for name, module in list(cnn.named_modules()):
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            other = nn.Conv2d(
                module.in_channels, module.out_channels, size, module.stride, size // 2, bias=False
            )
            cnn.set_submodule(name, other)
    return cnn.eval().requires_grad_(False)


def measure(args: argparse.Namespace, memory_format: torch.memory_format) -> dict[str, float]:
    torch.manual_seed(0)
    network = econv.create_model(args.model, depth=args.depth, fields=args.fields, pool="max")
    assert isinstance(network, ResNet)
    network.eval().requires_grad_(False)
    x = torch.randn(args.batch, 3, args.size, args.size).to(memory_format=memory_format)
    exported = econv.export(network, x)  # checks that both compute the same
    taps = network.blocks[0].conv1.basis.size
    written = plain(network, taps)
    networks: dict[str, nn.Module] = {
        "exported": exported,
        "plain": written,
        "plain, folded": econv.export(written, x),
        "before export": network,
        "plain, 3×3": plain(network, 3),
    }

    def runner(module: nn.Module) -> Callable[[], Tensor]:
        module = copy.deepcopy(module).to(memory_format=memory_format)
        return lambda: module(x)

    with torch.inference_mode():
        times = interleaved({name: runner(m) for name, m in networks.items()}, args.repeats)
    found = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: found["exported"] / seconds for name, seconds in found.items()}
    # The ratio of the fastest runs is what is least disturbed by the rest of the machine.
    ratios["plain, fastest runs"] = min(times["exported"]) / min(times["plain"])
    del ratios["exported"]
    return ratios


def fields(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("/"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="paper_resnet26_p8", help="(%(default)s)")
    parser.add_argument("--depth", type=int, default=14, help="layers (%(default)s)")
    parser.add_argument("--fields", type=fields, default="4/8/16", help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="images (%(default)s)")
    parser.add_argument("--size", type=int, default=32, help="pixels a side (%(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs (%(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(arguments)
    if min(args.batch, args.size, args.repeats, args.threads or 1) < 1:
        parser.error("expected whole numbers of at least 1")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: no such folder: {args.json.parent}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    print(
        f"{args.model} of {args.depth} layers with {'/'.join(map(str, args.fields))} fields, batch "
        f"{args.batch}, {args.size}×{args.size}, float32, {torch.get_num_threads()} threads, "
        f"{args.repeats} runs, interleaved: time of the exported network over that of …"
    )
    results: dict[str, dict[str, float]] = {}
    for name, memory_format in MEMORY_FORMATS.items():
        results[name] = measure(args, memory_format)
        print(f"\n{name}")
        for what, ratio in results[name].items():
            print(f"  {what:<22}{ratio:>7.3f}")
    worst = max(found["plain"] for found in results.values())
    print(f"\nat most {TARGET} × plain: {'reached' if worst <= TARGET else 'missed'} ({worst:.3f})")
    if args.json:
        record = {
            **stamp(),
            "model": args.model,
            "depth": args.depth,
            "fields": list(args.fields),
            "batch": args.batch,
            "size": args.size,
            "threads": torch.get_num_threads(),
            "repeats": args.repeats,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "time_of_exported_over": results,
        }
        temporary = args.json.with_name(f".{args.json.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")
        os.replace(temporary, args.json)


if __name__ == "__main__":
    main()
