"""What int8 costs: a p8 network trained on turned digits, exported, quantised, tested.

Weights and activations become 8-bit integers through torchao (`pip install 'econv[quantise]'`): a
scale for each output channel of the weights, one for each map of activations, from a few
hundred training images. Reported are test errors, how many predictions change, how many of them
a quarter turn of the image changes, and the bytes of the weights.

    python benchmarks/quantisation.py --json benchmarks/results/quantisation.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import econv
from econv.data import Dataset, load, normalise
from econv.models import ConvNet
from recording import stamp


def train(network: nn.Module, data: Dataset, epochs: int, batch: int = 64) -> None:
    x, y = normalise(data.train.x, data), data.train.y
    steps = epochs * (len(y) // batch)
    optimizer = torch.optim.AdamW(econv.parameter_groups(network, 0.01), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
    network.train()
    for _ in range(epochs):
        order = torch.randperm(len(y))
        for chosen in order[: len(y) // batch * batch].split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
            schedule.step()
    network.eval()


def quantise(plain: nn.Module, calibration: Tensor) -> nn.Module:
    """The plain network with 8-bit weights and activations, by torch's current route (PT2E)."""
    logging.disable(logging.WARNING)
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    dynamic = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(plain, (calibration[:2],), dynamic_shapes=dynamic).module()
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(program, quantizer)
    for images in calibration.split(64):
        prepared(images)
    quantised: nn.Module = convert_pt2e(prepared)
    return quantised


def used_bytes(network: torch.fx.GraphModule) -> dict[str, int]:
    """Bytes of the tensors with more than one dimension that a graph reads, by dtype."""
    found: dict[str, int] = {}
    for node in network.graph.nodes:
        if node.op == "get_attr":
            tensor = network
            for part in node.target.split("."):
                tensor = getattr(tensor, part)
            if tensor.ndim > 1:
                dtype = str(tensor.dtype).removeprefix("torch.")
                found[dtype] = found.get(dtype, 0) + tensor.numel() * tensor.element_size()
    return found


@torch.no_grad()
def predictions(network: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([network(images).argmax(1) for images in x.split(250)])


def one(seed: int, args: argparse.Namespace, data: Dataset) -> dict[str, Any]:
    torch.manual_seed(seed)
    network = ConvNet("p8", fields=args.fields, pool="max", readout="mean", dropout=0.0)
    start = time.perf_counter()
    train(network, data, args.epochs)
    seconds = time.perf_counter() - start
    x, y = normalise(data.test.x, data), data.test.y
    plain = econv.export(network, x[:4])
    order = torch.randperm(len(data.train.y))[: args.calibration]
    quantised = quantise(plain, normalise(data.train.x[order], data))
    turned = x.rot90(1, (2, 3))
    networks = {"float32": network, "exported": plain, "int8": quantised}
    upright = {name: predictions(m, x) for name, m in networks.items()}
    result: dict[str, Any] = {"seed": seed, "training_s": round(seconds, 1)}
    result["test_error"] = {n: float((p != y).double().mean()) for n, p in upright.items()}
    result["predictions_changed"] = {
        n: float((p != upright["float32"]).double().mean()) for n, p in upright.items()
    }
    result["changed_by_a_quarter_turn"] = {
        n: float((predictions(m, turned) != upright[n]).double().mean())
        for n, m in networks.items()
    }
    weights = [p for p in plain.parameters() if p.ndim > 1]
    result["weight_bytes"] = {
        "float32": sum(p.numel() * p.element_size() for p in weights),
        **used_bytes(quantised),
    }
    return result


def fields(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("/"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--fields", type=fields, default="4/4/8/8/16/16", help="of the layers (%(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--calibration", type=int, default=512, help="images (%(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(arguments)
    if min(*args.fields, args.epochs, args.seeds, args.calibration, args.threads or 1) < 1:
        parser.error("expected whole numbers of at least 1")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: no such folder: {args.json.parent}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")  # of torch's exporter and torchao
    data = load("digits")
    results = []
    for seed in range(args.seeds):
        results.append(one(seed, args, data))
        found = results[-1]
        print(f"seed {seed}, trained in {found['training_s']} s, {len(data.test.y)} test images")
        for what in ("test_error", "predictions_changed", "changed_by_a_quarter_turn"):
            row = "  ".join(f"{name} {100 * value:.2f} %" for name, value in found[what].items())
            print(f"  {what.replace('_', ' '):<28}{row}")
        print(f"  bytes of weights            {found['weight_bytes']}")

    def mean(what: str, name: str) -> float:
        return sum(found[what][name] for found in results) / len(results)

    loss = mean("test_error", "int8") - mean("test_error", "float32")
    print(f"\nint8 adds {100 * loss:+.2f} points of test error, mean over {len(results)} seeds")
    if args.json:
        record = {
            **stamp(),
            "data": "digits",
            "fields": list(args.fields),
            "epochs": args.epochs,
            "calibration": args.calibration,
            "test_images": len(data.test.y),
            "added_test_error": loss,
            "seeds": results,
            "torch": torch.__version__,
            "torchao": __import__("torchao").__version__,
            "python": sys.version.split()[0],
        }
        temporary = args.json.with_name(f".{args.json.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, args.json)


if __name__ == "__main__":
    main()
