"""What it costs to import, to build, to keep and to run: econv, escnn, e2cnn and an ordinary CNN.

    python benchmarks/build_and_size.py --python ../peers/bin/python

- import: seconds that the library adds to `import torch`, in fresh interpreters.
- build: seconds to construct six 5×5 convolutions of 24 to 96 regular fields with batch norm and
  ReLU, orientation pooling and a classifier, in fresh interpreters; the libraries take turns.
- checkpoint: the bytes of that network's saved state dict, in train and in eval mode.
- layer: the time of one convolution between regular fields over that of the plain Conv2d with as
  many channels and taps. The two run interleaved in one process, so that whatever else the machine
  does meets both; each result is first checked against that Conv2d with the layer's filters.

Import and construction run on one thread and are counted in seconds of the processor, which a busy
machine does not stretch as it does those of the clock.

How to make the environment of escnn and e2cnn, and what `--python` means: see compatibility.py.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
from timing import interleaved

HERE = Path(__file__).resolve()
WIDTHS = (24, 48, 48, 96, 96, 96)
IMPORTED = {
    "econv": ["econv"],
    "escnn": ["escnn.gspaces", "escnn.nn"],
    "e2cnn": ["e2cnn.gspaces", "e2cnn.nn"],
}
# What econv promises: seconds of import, seconds to build its ResNet-26, layer time in training.
IMPORT_TARGET, BUILD_TARGET, LAYER_TARGET = 0.3, 1.0, 1.05
LIMIT = 1800.0

# ---------------------------------------------------- what runs in the environment of a library


def import_seconds(library: str) -> float:
    """The library's own part; torch alone for ``library="torch"``."""
    if library != "torch":
        importlib.import_module("torch")
    start = time.process_time()
    for module in IMPORTED.get(library, [library]):
        importlib.import_module(module)
    return time.process_time() - start


def build_seconds(library: str, group: str) -> float:
    import torch

    import libraries

    torch.set_num_threads(1)
    chosen = libraries.get(library)
    start = time.process_time()
    chosen.network(group, WIDTHS)
    return time.process_time() - start


def build_resnet_seconds() -> float:
    import torch

    from econv.models import ResNet

    torch.set_num_threads(1)
    start = time.process_time()
    ResNet("p8", depth=26, fields=(20, 40, 80))
    return time.process_time() - start


def sizes(library: str, group: str) -> dict[str, int]:
    """Bytes of the parameters, and of the file with the state dict in either mode."""
    import torch

    import libraries

    # Some libraries take what eval mode needs out of the state only when train mode is asked for.
    network = libraries.get(library).network(group, WIDTHS).train()

    def saved() -> int:
        file = io.BytesIO()
        torch.save(network.state_dict(), file)
        return file.getbuffer().nbytes

    parameters = list(network.parameters())
    found = {
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "train_bytes": saved(),
    }
    network.eval()
    return {**found, "eval_bytes": saved()}


def layer_times(
    library: str, group: str, fields: int, batch: int, size: int, repeats: int, threads: int
) -> dict[str, dict[str, Any]]:
    """The layer's time over the plain convolution's, by memory format and pass."""
    import torch
    from torch import nn

    import libraries

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    chosen = libraries.get(library)
    layer = chosen.convolution(group, fields, fields)
    channels = fields * libraries.order_of(group)
    results: dict[str, dict[str, Any]] = {}
    for name in ("contiguous_format", "channels_last"):
        memory_format = getattr(torch, name)
        plain = nn.Conv2d(
            channels, channels, libraries.TAPS, padding=libraries.TAPS // 2, bias=False
        )
        plain = plain.to(memory_format=memory_format)
        shape = (batch, channels, size, size)
        x, gradient = (torch.randn(shape).to(memory_format=memory_format) for _ in range(2))
        with torch.no_grad():
            plain.weight.copy_(chosen.filters(layer))
        x.requires_grad_()
        given = chosen.wrapped(x, layer)

        def output(module: nn.Module, given: Any = given, x: Any = x) -> Any:
            if module is layer:
                out = module(given)
                return getattr(out, "tensor", out)
            return module(x)

        def forward(module: nn.Module, output: Any = output) -> None:
            with torch.no_grad():
                output(module)

        def both(module: nn.Module, output: Any = output, x: Any = x, g: Any = gradient) -> None:
            x.grad = None
            module.zero_grad(set_to_none=True)
            output(module).backward(g)

        wanted = output(plain)
        # A comparison of times means something only between layers that compute the same.
        if not torch.allclose(
            output(layer), wanted, atol=1e-4 * float(wanted.detach().abs().max())
        ):
            raise AssertionError("the layer and the plain convolution with its filters disagree")
        results[name] = {}
        for what, training, run in (
            ("forward", True, forward),
            ("forward+backward", True, both),
            ("eval", False, forward),
        ):
            layer.train(training)
            results[name][what] = compare(
                lambda run=run: run(layer), lambda run=run, plain=plain: run(plain), repeats
            )
        layer.train()
    return results


def compare(
    ours: Callable[[], None], plain: Callable[[], None], repeats: int
) -> dict[str, float | list[float]]:
    """Relate the times of two that run interleaved."""
    times = interleaved({"ours": ours, "plain": plain}, repeats, warm_up=3)
    paired = [a / b for a, b in zip(times["ours"], times["plain"], strict=True)]
    lower, _, upper = statistics.quantiles(paired, n=4)
    return {
        "ratio": statistics.median(times["ours"]) / statistics.median(times["plain"]),
        "ratio_of_fastest": min(times["ours"]) / min(times["plain"]),
        "paired_quartiles": [lower, upper],
    }


# -------------------------------------------------------------------------------- what asks them


class Measurement:
    """Asks the environments, and keeps what they say."""

    def __init__(self, pythons: dict[str, str]) -> None:
        self.pythons = pythons

    def ask(self, name: str, function: str, /, **arguments: Any) -> Any:
        outcome = fresh.call(self.pythons[name], HERE, function, arguments, LIMIT)
        if outcome.status != "pass":
            sys.exit(f"{name}: {function} ended with {outcome.message}")
        return outcome.value

    def medians(self, function: str, repeats: int, **arguments: Any) -> dict[str, float]:
        """The median of what each library answers, interleaved, after one round to warm up."""
        found: dict[str, list[float]] = {name: [] for name in self.pythons}
        for _ in range(repeats + 1):
            for name, answers in found.items():
                answers.append(self.ask(name, function, library=name, **arguments))
        return {name: statistics.median(answers[1:]) for name, answers in found.items()}


def verdict(value: float, target: float, unit: str = "") -> str:
    return f"econv at most {target:g}{unit}: {'reached' if value <= target else 'missed'}"


def print_row(title: str, values: dict[str, str], note: str = "") -> None:
    print(f"{title:<38}" + "".join(f"{value:>16}" for value in values.values()) + f"   {note}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    from compatibility import interpreters

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", default=[], metavar="[LIBRARY=]PATH")
    parser.add_argument("--group", default="p8", help="pn or pnm (default: %(default)s)")
    for name, default, least, words in (
        ("imports", 7, 1, "fresh interpreters that import"),
        ("builds", 3, 1, "fresh interpreters that build"),
        ("repeats", 40, 2, "timed runs of a layer"),
        ("fields", 16, 1, "fields in and out of the layer"),
        ("batch", 8, 1, "images"),
        ("size", 32, 1, "pixels a side"),
        ("threads", 1, 1, "threads of torch for the layer"),
    ):
        parser.add_argument(f"--{name}", type=at_least(least), default=default, help=words)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(arguments)
    try:
        args.python = interpreters(args.python)
        rotations = args.group.removeprefix("p").removesuffix("m")
        if not args.group.startswith("p") or not rotations.isdecimal() or int(rotations) < 1:
            raise ValueError(f"expected a group such as p8 or p4m; got {args.group!r}")
    except ValueError as error:
        parser.error(str(error))
    return args


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number ≥ {least}; got {text!r}")
        return int(text)

    return number


def main(arguments: list[str] | None = None) -> None:
    from compatibility import versions

    args = parse(arguments)
    known = versions(args.python, LIMIT)
    measurement = Measurement({name: p for name, p in args.python.items() if known[name]})
    for name in known:
        if not known[name]:
            print(f"{name} is not installed: see --help")
    print_row("", {n: n if n != "torch" else "ordinary" for n in measurement.pythons})

    imports = measurement.medians("import_seconds", args.imports)
    row = {n: f"{s:.2f} s" for n, s in imports.items()}
    print_row(
        "import, after torch (ordinary: torch)", row, verdict(imports["econv"], IMPORT_TARGET, " s")
    )

    builds = measurement.medians("build_seconds", args.builds, group=args.group)
    row = {n: f"{s:.2f} s" for n, s in builds.items()}
    print_row(f"build six layers, {min(WIDTHS)}–{max(WIDTHS)} fields", row)
    times = [measurement.ask("econv", "build_resnet_seconds") for _ in range(args.builds)]
    resnet = statistics.median(times)
    row = dict.fromkeys(measurement.pythons, "") | {"econv": f"{resnet:.2f} s"}
    print_row("build p8 ResNet-26, 20/40/80 fields", row, verdict(resnet, BUILD_TARGET, " s"))

    kept = {n: measurement.ask(n, "sizes", library=n, group=args.group) for n in builds}
    print_row("parameters", {n: f"{k['parameters']:,}" for n, k in kept.items()})
    for mode in ("train", "eval"):
        row = {n: f"{k[f'{mode}_bytes'] / k['parameter_bytes']:.3f} ×" for n, k in kept.items()}
        print_row(f"checkpoint, {mode} mode, over parameters", row)

    options = {n: getattr(args, n) for n in ("fields", "batch", "size", "repeats", "threads")}
    layers = {
        name: measurement.ask(name, "layer_times", library=name, group=args.group, **options)
        for name in measurement.pythons
    }
    print(
        f"\none layer, {args.fields}→{args.fields} fields of {args.group}, batch {args.batch}, "
        f"{args.size}×{args.size}, float32, {args.threads} threads: time over the plain Conv2d's"
    )
    for memory_format in layers["econv"]:
        for what in layers["econv"][memory_format]:
            found = {n: layer[memory_format][what] for n, layer in layers.items()}
            row = {
                n: f"{f['ratio']:.3f} ({f['paired_quartiles'][0]:.2f}–"
                f"{f['paired_quartiles'][1]:.2f})"
                for n, f in found.items()
            }
            print_row(f"{memory_format}, {what}", row)
    worst = max(f["forward+backward"]["ratio"] for f in layers["econv"].values())
    print(f"forward+backward: {verdict(worst, LAYER_TARGET)} ({worst:.3f})")

    if args.json:
        from econv.files import write_atomically
        from recording import stamp

        settings = {n: getattr(args, n) for n in ("group", "imports", "builds")} | options
        record = {
            **stamp(),
            "settings": {**settings, "widths": WIDTHS},
            "versions": known,
            "import_s": imports,
            "build_s": builds,
            "build_resnet26_p8_s": resnet,
            "checkpoint": kept,
            "layer": layers,
        }
        write_atomically(args.json, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    fresh.end_calls_when_terminated()
    main()
