"""Training steps of whole networks: ResNets, and what `econv.convert` makes of them.

A step is forward, loss, backward and fused SGD with momentum. The source and the converted network
with each engine run in one process, each isolated for some time, in several rounds; times are
medians. On CUDA steps run under autocast to bfloat16, with parameters in float32 and channels-last
images, through `torch.compile` or as one CUDA graph.

    python benchmarks/networks.py --profile --json benchmarks/results/networks_cuda.json
    python benchmarks/networks.py --cpu --json benchmarks/results/networks_cpu.json
    python benchmarks/networks.py --device cpu --batch 2 --size 64 --rounds 1   # that it runs

Results are written as they come. A record that the file already holds, of the same code, device
and sizes, is continued: what is measured again is replaced.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import econv
from econv.engines import Problem, choice
from econv.train.capture import captured
from recording import Growing, origin
from timing import isolated, kernels

# The networks


class Basic(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, into: int, planes: int, stride: int) -> None:
        super().__init__()
        out = planes * self.expansion
        self.conv1 = nn.Conv2d(into, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = shortcut(into, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        found = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(found + self.downsample(x))
        return result


class Bottleneck(nn.Module):
    """A 3×3 convolution, where the stride is, between two 1×1 ones, and a shortcut."""

    expansion = 4

    def __init__(self, into: int, planes: int, stride: int) -> None:
        super().__init__()
        out = planes * self.expansion
        self.conv1 = nn.Conv2d(into, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(into, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        found = self.relu(self.bn1(self.conv1(x)))
        found = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(found)))))
        result: Tensor = self.relu(found + self.downsample(x))
        return result


def shortcut(into: int, out: int, stride: int) -> nn.Module:
    if stride == 1 and into == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))


def resnet(block: type[Basic | Bottleneck], depths: tuple[int, ...]) -> nn.Sequential:
    """The ResNets of torchvision: the same layers in the same order."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    into = 64
    for stage, depth in enumerate(depths):
        planes = 64 << stage
        for number in range(depth):
            layers.append(block(into, planes, 2 if stage and not number else 1))
            into = planes * block.expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 1000))


class Network(NamedTuple):
    """A source, and how it is converted."""

    make: Callable[[], nn.Module]
    parameters: int
    """Of the source: torchvision's number."""
    match: str


NETWORKS = {
    "resnet18": Network(partial(resnet, Basic, (2, 2, 2, 2)), 11_689_512, "params"),
    "resnet50": Network(partial(resnet, Bottleneck, (3, 4, 6, 3)), 25_557_032, "params"),
    "resnet18, flops": Network(partial(resnet, Basic, (2, 2, 2, 2)), 11_689_512, "flops"),
}
GROUP = "p8"
SOURCE = "source"
ENGINES = ("dense", "auto")


def variants(network: Network, x: Tensor) -> dict[str, nn.Module]:
    """The source and the converted network with each engine, on the device of ``x``."""
    torch.manual_seed(0)
    source = network.make().to(x.device)
    if x.is_cuda:
        source = source.to(memory_format=torch.channels_last)
    options: dict[str, Any] = {"example_input": x[:2], "measure": False}
    converted = econv.convert(source, GROUP, network.match, **options)
    found = {SOURCE: source}
    for engine in ENGINES:
        found[engine] = copy.deepcopy(converted)
        for module in convolutions(found[engine]):
            module.engine = engine
    return found


def convolutions(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, econv.layers.PDOConv2d)]


# A training step


def training_step(model: nn.Module, x: Tensor, y: Tensor, way: str) -> Callable[[], None]:
    """A step, ready to be called: compiled, captured or eager."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=True)
    call = torch.compile(model) if way == "compile" else model
    cuda = x.is_cuda

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            loss = functional.cross_entropy(call(x).float(), y)
        loss.backward()
        optimizer.step()

    if way == "graph":
        replay = captured(step, ())

        def replayed(_keep: Callable[[], None] = step) -> None:  # with all that the graph reads
            replay()

        return replayed
    for _ in range(3):
        step()
    if cuda:
        torch.cuda.synchronize()
    return step


def chosen(model: nn.Module, x: Tensor) -> dict[str, int]:
    """How many convolutions each engine runs where only the device's work counts."""
    found: Counter[str] = Counter()

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        read = module.read(inputs[0])
        context = "traced" if x.is_cuda else "eager"
        name = choice.resolve(module.engine)
        problem = Problem.of(module.convolution, read, module.weight, context, name)
        found[choice.choose(problem).name] += 1

    hooks = [module.register_forward_pre_hook(look) for module in convolutions(model)]
    try:
        with torch.autocast("cuda", torch.bfloat16) if x.is_cuda else nullcontext():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return dict(sorted(found.items()))


# Where the time goes


_LAYOUT = "_to_copy|_unsafe_view|view|clone|transpose|permute|expand|squeeze|unsqueeze|t|bmm|mm"
CLASSES = {  # the first whose expression is found in a kernel's name, in small letters
    "optimiser": r"fusedsgd|fused_sgd|fusedoptimizer|multi_tensor_apply",
    "norms": (
        r"batch_?norm|\bbn_[fb]w|var_mean|welford|^add_statistics$|^norm_backward$|^moments$"
        r"|^activate$"
    ),
    "sampling": r"pool|constant_pad|_slice_|recentre|mean_of_four|half_pixel",
    # The compiler's names list operations: those that only cast and arrange do so with filters.
    "filter expansion": (
        rf"^triton_[a-z]+_fused(?:_(?:{_LAYOUT}|convolution|convolution_backward))*_\d+$"
        r"|^expand_filters$|^filters_backward$|index_?(?:select|func)|gather|sgemm|gemmsn|gemv|f32f32_f32f32|tf32|s1688gemm|nvjet_s"
        r"|cublas|splitkreduce|cutlass::kernel2<(?!.*(?:fprop|dgrad|wgrad))"
    ),
    "convolutions": (
        r"^(?:analyse|forward|weight_gradient|pack|arrange|largest|reduce|spread|to_affine"
        r"|activation_backward)\w*$"
        r"|fprop|dgrad|wgrad|cudnn|convolve|conv2d|depthwise|xmma|cutlass|nvjet|gemm|tonhwc|tonchw"
    ),
}
REST = "rest"


def class_of(kernel: str) -> str:
    """What a kernel of a training step does, by its name."""
    name = kernel.removeprefix("void ").lower()
    return next((kind for kind, words in CLASSES.items() if re.search(words, name)), REST)


def where_time_goes(run: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds of a step on the GPU, by class, and of the longest kernels of each."""
    sums: dict[str, float] = dict.fromkeys([*CLASSES, REST], 0.0)
    longest: dict[str, dict[str, float]] = {kind: {} for kind in sums}
    for name, microseconds in kernels(run, 3).items():
        kind = class_of(name)
        sums[kind] += microseconds / 1e3
        if len(longest[kind]) < 12:
            longest[kind][name[:160]] = round(microseconds / 1e3, 4)
    return {"ms": {kind: round(ms, 3) for kind, ms in sums.items()}, "longest": longest}


# Measuring


def measure(
    name: str, ways: list[str], args: argparse.Namespace, stop: float, keep: Callable[..., None]
) -> None:
    """Rows of one network, handed to ``keep`` as they come."""
    network = NETWORKS[name]
    make = torch.Generator().manual_seed(0)
    x = torch.randn(args.batch, 3, args.size, args.size, generator=make).to(args.device)
    if args.device == "cuda":
        x = x.to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (args.batch,), generator=make).to(args.device)
    models = variants(network, x)
    models = {each: m for each, m in models.items() if each in (SOURCE, *args.engines)}
    counts = {each: sum(p.numel() for p in m.parameters()) for each, m in models.items()}
    if counts[SOURCE] != network.parameters:
        raise AssertionError(f"{name}: {counts[SOURCE]:,} parameters, not {network.parameters:,}")
    for way in ways:
        row: dict[str, Any] = {"network": name, "match": network.match, "way": way}
        row |= {"parameters": counts, "set_up_s": {}, "chosen": {}, "errors": {}}
        runs: dict[str, Callable[[], None]] = {}
        for each, model in models.items():
            if time.perf_counter() > stop:
                return
            start = time.perf_counter()
            try:
                if each != SOURCE:
                    row["chosen"][each] = chosen(model, x)
                runs[each] = training_step(model, x, y, way)
            except Exception as error:  # the others can still be told apart
                row["errors"][each] = f"{type(error).__name__}: {error}"[:500]
                print(f"{name}, {way}, {each}: {row['errors'][each]}", flush=True)
            row["set_up_s"][each] = round(time.perf_counter() - start, 1)
        if runs and time.perf_counter() < stop:
            row |= isolated(runs, args.device, args.seconds, args.rounds, stop)
            keep(row)
            if args.profile and way == "compile" and args.device == "cuda":
                try:
                    row["profile"] = {each: where_time_goes(run) for each, run in runs.items()}
                except Exception as error:  # a profiler needs rights that it may not have
                    row["errors"]["profile"] = f"{type(error).__name__}: {error}"[:500]
                keep(row)
        elif row["errors"]:
            keep(row)
        runs.clear()
        for model in models.values():
            model.zero_grad(set_to_none=True)
        forget()


def forget() -> None:
    """Compiled code and graphs of the last networks, and their memory."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def line(row: dict[str, Any], batch: int) -> str:
    """What is printed of a row."""
    times = row.get("median", {})
    text = f"{row['network']:<16} {row['way']:<8}"
    text += "".join(f" {each} {1e3 * took:8.2f} ms" for each, took in times.items())
    if SOURCE in times:
        ratios = [f"{each} {times[each] / times[SOURCE]:.2f}" for each in ENGINES if each in times]
        text += f"   over the source: {', '.join(ratios)}; {batch / times[SOURCE]:,.0f} images/s"
    if ran := row["chosen"].get("auto"):
        text += "   auto: " + ", ".join(f"{n} × {engine}" for engine, n in ran.items())
    return text


def print_profile(row: dict[str, Any]) -> None:
    kinds = [*CLASSES, REST]
    print(f"{'ms of ' + row['network']:<24}" + "".join(f"{kind:>18}" for kind in kinds))
    for each, found in row["profile"].items():
        print(f"  {each:<22}" + "".join(f"{found['ms'][kind]:>18.2f}" for kind in kinds))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="(default: all)")
    parser.add_argument("--ways", nargs="+", choices=("compile", "graph", "eager"))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cpu", action="store_true", help="the row of a CPU, with 2 threads")
    parser.add_argument("--batch", type=int, help="images (64; 4 on a CPU)")
    parser.add_argument("--size", type=int, help="pixels of a side (224; 64 on a CPU)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.6, help="isolated (%(default)s)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", default=math.inf)
    parser.add_argument("--profile", action="store_true", help="where compiled steps spend time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    args = parser.parse_args(arguments)
    if args.cpu:
        args.device = "cpu"
        torch.set_num_threads(2)
    cuda = args.device == "cuda"
    args.networks = args.networks or (list(NETWORKS) if cuda else ["resnet18"])
    args.ways = args.ways or (["compile", "graph"] if cuda else ["eager"])
    args.batch = args.batch or (64 if cuda else 4)
    args.size = args.size or (224 if cuda else 64)
    if not cuda and "graph" in args.ways:
        parser.error("a CPU has no CUDA graphs")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    stop = time.perf_counter() + args.limit
    torch.backends.cudnn.benchmark = True
    record = Growing(args.json, head(args), "rows", lambda row: (row["network"], row["way"]))

    def keep(row: dict[str, Any]) -> None:
        if "profile" in row:
            print_profile(row)
        else:
            print(line(row, args.batch), flush=True)
        record.keep(row, stopped=True)  # unless it comes to the end

    for name in args.networks:
        if time.perf_counter() < stop:
            measure(name, args.ways, args, stop, keep)
        forget()
    stopped = time.perf_counter() > stop
    if stopped:
        print(f"stopped after {args.limit:.0f} s", flush=True)
    record.write(stopped=stopped)


def head(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    sizes = {"group": GROUP, "batch": args.batch, "size": args.size}
    precision = "bfloat16, autocast" if cuda else "float32"
    return {**origin(args.device), **sizes, "precision": precision}


if __name__ == "__main__":
    main()
