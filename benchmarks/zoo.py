"""What `econv.convert` makes of the networks that people have, each in a process of its own.

For every network: whether it converts or is refused, and with which sentence; seconds and peak
memory of the conversion; the forward time over the source's, with as many multiply-adds (of
networks of volumes, with as many channels); the relative error under a quarter turn, in float64;
and whether the outputs keep their shapes.

    python benchmarks/zoo.py --json benchmarks/results/zoo.json
    python benchmarks/zoo.py --only resnet                      # those with that in their names
    python benchmarks/zoo.py --volumes --json benchmarks/results/zoo_volumes.json

It needs torchvision, timm, segmentation_models_pytorch and monai; what is not installed is left
out, and the record says so. Results are written as they come, and a record is continued.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import econv
from econv.lab import calibrate
from recording import Growing, origin

GROUPS = {2: "p8", 3: "O"}
MATCHES = {2: "flops", 3: "width"}
"""In space one field of 24 orientations costs more than many a source in all."""
SECONDS = 30.0
"""For a conversion; the process has as long again for the rest, four times over."""
GIGABYTES = 4.0
REFUSED, CONVERTS, FAILED = "refused", "converts", "failed"


class Source(NamedTuple):
    """A network of a package."""

    package: str
    name: str
    size: int = 224
    attention: bool = False
    """Whether its layers attend to patches or windows with a fixed frame."""
    options: Mapping[str, Any] = {}
    channels: int = 3
    dimension: int = 2

    @property
    def key(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{self.package}: {self.name}{options}"

    def make(self) -> nn.Module:
        """The network, with weights drawn anew."""
        torch.manual_seed(0)
        module, _, name = f"{PACKAGES[self.package]}.{self.name}".rpartition(".")
        options = dict(self.options)
        if self.package == "timm":
            return importlib.import_module("timm").create_model(self.name, **options)
        if self.package == "torchvision":
            options |= {"weights": None}
            if "segmentation" in self.name or "detection" in self.name:
                options |= {"weights_backbone": None}
            if self.name in ("googlenet", "inception_v3"):
                options |= {"init_weights": False}
        if self.package == "segmentation_models_pytorch":
            options = {"encoder_name": "resnet18", "encoder_weights": None, **options}
        made: nn.Module = getattr(importlib.import_module(module), name)(**options)
        return made


PACKAGES = {
    "torchvision": "torchvision.models",
    "timm": "timm",
    "segmentation_models_pytorch": "segmentation_models_pytorch",
    "monai": "monai.networks.nets",
}


def _sources() -> list[Source]:
    found = [
        Source("torchvision", name)
        for name in (
            *("alexnet", "vgg11_bn", "vgg16_bn", "resnet18", "resnet34", "resnet50"),
            *("resnext50_32x4d", "wide_resnet50_2", "densenet121", "googlenet", "mobilenet_v2"),
            *("mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x1_0", "squeezenet1_1"),
            *("mnasnet1_0", "efficientnet_b0", "efficientnet_v2_s", "regnet_y_400mf"),
            *("regnet_x_400mf", "convnext_tiny"),
        )
    ]
    found.append(Source("torchvision", "inception_v3", 299))
    found += [
        Source("torchvision", name, attention=True) for name in ("vit_b_16", "swin_t", "maxvit_t")
    ]
    found += [
        Source("torchvision", f"segmentation.{name}", 128)
        for name in ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large")
    ]
    found += [
        Source("torchvision", f"detection.{name}", 192)
        for name in ("fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn")
    ]
    found += [
        Source("timm", name)
        for name in (
            *("resnet18", "resnet50d", "resnext50_32x4d", "seresnet50", "regnetx_002"),
            *("regnety_002", "convnext_atto", "tf_efficientnet_b0", "resnetblur50"),
            *("ecaresnet26t", "skresnet18", "resnest14d", "hrnet_w18_small", "xception41"),
            *("ghostnet_100", "res2net50_26w_4s", "mobilenetv3_small_100", "dla34"),
            *("ese_vovnet19b_dw", "cspresnet50", "cspdarknet53", "rexnet_100", "selecsls42b"),
            *("darknet53", "repvgg_a0", "mixnet_s", "mobileone_s0", "nf_resnet50", "gernet_s"),
        )
    ]
    found += [
        Source("timm", name, attention=True)
        for name in (
            *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"),
            *("mixer_b16_224", "botnet26t_256"),
        )
    ]
    found += [
        Source("segmentation_models_pytorch", name, 128)
        for name in (
            *("Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "Linknet"),
            "PAN",
        )
    ]
    found.append(Source("segmentation_models_pytorch", "MAnet", 128, True))
    found.append(
        Source(
            "segmentation_models_pytorch", "Unet", 128, options={"encoder_name": "efficientnet-b0"}
        )
    )
    plane = {"spatial_dims": 2, "in_channels": 1}
    both = {**plane, "out_channels": 2}
    steps = {"channels": (32, 64, 128), "strides": (2, 2)}
    monai: list[tuple[str, dict[str, Any], bool]] = [
        ("UNet", {**both, **steps}, False),
        ("UNet", {**both, **steps, "num_res_units": 2}, False),
        ("BasicUNet", both, False),
        ("SegResNet", both, False),
        ("AttentionUnet", {**both, **steps}, False),
        ("DenseNet121", both, False),
        ("SEResNet50", {**plane, "num_classes": 2}, False),
        ("UNETR", {**both, "img_size": 96}, True),
    ]
    found += [Source("monai", name, 96, attends, given, 1) for name, given, attends in monai]
    return found


def _sources_of_volumes() -> list[Source]:
    space = {"spatial_dims": 3, "in_channels": 1}
    both = {**space, "out_channels": 2}
    steps = {"channels": (32, 64, 128), "strides": (2, 2)}
    levels = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    resnet = {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2}
    maps: list[tuple[str, dict[str, Any], bool]] = [
        ("UNet", {**both, **steps}, False),
        ("UNet", {**both, **steps, "num_res_units": 2}, False),
        ("BasicUNet", both, False),
        ("DynUNet", {**both, **levels, "filters": (32, 64, 128)}, False),
        ("SegResNet", {**both, "init_filters": 32}, False),
        ("VNet", both, False),
        ("AttentionUnet", {**both, **steps}, False),
        ("UNETR", {**both, "img_size": 32}, True),
    ]
    classes: list[tuple[str, dict[str, Any]]] = [
        ("resnet10", resnet),
        ("resnet18", resnet),
        ("resnet50", resnet),
        ("DenseNet121", both),
        ("SEResNet50", {**space, "num_classes": 2}),
    ]
    videos = [f"video.{name}" for name in ("r3d_18", "mc3_18", "r2plus1d_18")]
    return [
        *(Source("monai", name, 32, attends, given, 1, 3) for name, given, attends in maps),
        *(Source("monai", name, 33, False, given, 1, 3) for name, given in classes),
        *(Source("torchvision", name, 33, dimension=3) for name in videos),
    ]


SOURCES = {source.key: source for source in (*_sources(), *_sources_of_volumes())}


# One network, in a process of its own


def declare_operators() -> None:
    """Let torchvision's Python parts be imported where its compiled ones want another torch."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


def measure(source: Source) -> dict[str, Any]:
    """The row of a network."""
    row: dict[str, Any] = {"key": source.key, "attention": source.attention}
    model = source.make().eval()
    detector = "detection" in source.name
    part: Any = model.backbone if detector else model
    x = torch.randn(2, source.channels, *[source.size] * source.dimension)
    before, start = _peak(), time.perf_counter()
    try:
        converted = econv.convert(
            part,
            GROUPS[source.dimension],
            MATCHES[source.dimension],
            example_input=x,
            measure=False,
        )
    except ValueError as error:  # a `ConversionError`, or widths that cannot be had
        row |= {"outcome": REFUSED, "sentence": " ".join(str(error).split())[:400]}
        return row | _cost(before, start)
    row |= {"outcome": CONVERTS, "of": "backbone" if detector else "network"} | _cost(before, start)
    converted.eval()
    with torch.no_grad():
        row["forward_ratio"] = round(_seconds(converted, x) / _seconds(part, x), 2)
        ours, theirs = (_outputs(network(x)) for network in (converted, part))
        row["same_shapes"] = [o.shape for o in ours] == [t.shape for t in theirs]
        converted, x = converted.double(), x.double()
        calibrate(converted, x)
        pairs = zip(_outputs(converted(x)), _outputs(converted(x.rot90(1, (2, 3)))), strict=True)
        row["error"] = max(_error(out, turned) for out, turned in pairs)
    return row


def _cost(before: float, start: float) -> dict[str, float]:
    took = time.perf_counter() - start
    return {"seconds": round(took, 1), "megabytes": round(_peak() - before)}


def _peak() -> float:
    """The most memory that the process ever held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _seconds(network: nn.Module, x: Tensor) -> float:
    """Of a forward pass, the least of three after one."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        network(x)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _outputs(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    members = found.values() if isinstance(found, Mapping) else found
    return [tensor for member in members for tensor in _outputs(member)]


def _error(out: Tensor, turned: Tensor) -> float:
    wanted = out.rot90(1, (2, 3)) if out.ndim > 3 else out
    return float((turned - wanted).norm() / wanted.norm())


# All of them


def tried(key: str) -> dict[str, Any]:
    """The row of a network, also where its process fails or does not end."""
    command = [sys.executable, __file__, "--one", key]
    failed = {"key": key, "attention": SOURCES[key].attention, "outcome": FAILED}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=5 * SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {**failed, "sentence": f"did not end within {5 * SECONDS:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {**failed, "sentence": lines[-1][:400]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What counts of all rows."""
    plain = [row for row in rows if not row["attention"]]
    there = [row for row in plain if row["outcome"] == CONVERTS]
    costs = [row for row in rows if "seconds" in row]
    return {
        "networks": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "without_attention": len(plain),
        "of_these_convert": len(there),
        "other_shapes": [row["key"] for row in there if not row.get("same_shapes", True)],
        "most_seconds": max((row["seconds"] for row in costs), default=None),
        "most_megabytes": max((row["megabytes"] for row in costs), default=None),
        "worst_error": max((row["error"] for row in there), default=None),
    }


def line(row: dict[str, Any]) -> str:
    text = f"{row['key']:<60} {row['outcome']:<9}"
    if "seconds" in row:
        text += f" {row['seconds']:6.1f} s {row['megabytes']:6.0f} MB"
    if "error" in row:
        text += f"  forward ×{row['forward_ratio']:<6} error {row['error']:.1e}"
        text += "" if row["same_shapes"] else "  OTHER SHAPES"
    return f"{text}  {row.get('sentence', '')}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="networks with this in the name")
    parser.add_argument("--volumes", action="store_true", help="networks of volumes, not of images")
    parser.add_argument("--again", action="store_true", help="also those that the record has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument("--one", choices=SOURCES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        warnings.simplefilter("ignore")
        declare_operators()
        print(json.dumps(measure(SOURCES[args.one])))
        return
    versions = {package: installed(package) for package in PACKAGES}
    dimension = 3 if args.volumes else 2
    sources = {key: s for key, s in SOURCES.items() if s.dimension == dimension}
    if args.volumes:
        versions = {s.package: versions[s.package] for s in sources.values()}
    head = {
        **origin("cpu"),
        "versions": versions,
        "group": GROUPS[dimension],
        "match": MATCHES[dimension],
    }
    record = Growing(args.json, head, "rows", lambda row: row["key"])
    known = {row["key"] for row in record.rows}
    for key, source in sources.items():
        left_out = args.only not in key or (key in known and not args.again)
        if versions[source.package] is None or left_out:
            continue
        row = tried(key)
        print(line(row), flush=True)
        record.keep(row)
    record.write(summary=summary(record.rows))
    print(json.dumps(summary(record.rows), indent=1))


if __name__ == "__main__":
    main()
