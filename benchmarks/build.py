"""What it costs to import econv, to build a network and to keep its checkpoint.

The network is the p8 pre-activation ResNet-26 with 20/40/80 fields. Where escnn is installed, a
six-layer network of its C8 convolutions is built in the same run.

    python benchmarks/build.py
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

IMPORT_TARGET = 0.3
BUILD_TARGET = 1.0

# Each statement is timed by a fresh interpreter, which prints seconds as its last line.
CLOCK = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
IMPORT_TORCH = CLOCK.format("import torch")
IMPORT_ECONV = "import torch; " + CLOCK.format("import econv")
BUILD_ECONV = "from econv.models import ResNet; " + CLOCK.format(
    "ResNet('p8', depth=26, fields=(20, 40, 80))"
)
BUILD_ESCNN = """
import time
from escnn import gspaces, nn

start = time.perf_counter()
space = gspaces.rot2dOnR2(8)
before = nn.FieldType(space, 3 * [space.trivial_repr])
layers = []
for fields in (24, 48, 48, 96, 96, 96):
    after = nn.FieldType(space, fields * [space.regular_repr])
    layers += [nn.R2Conv(before, after, 5, padding=2), nn.InnerBatchNorm(after), nn.ReLU(after)]
    before = after
nn.SequentialModule(*layers)
print(time.perf_counter() - start)
"""


def median_seconds(code: str, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"this failed:\n{code}\n{run.stderr}")
        times.append(float(run.stdout.split()[-1]))
    return statistics.median(times)


def checkpoint() -> dict[str, int]:
    """The size of the saved state, and of the tensors that it has to hold."""
    import torch

    from econv.models import ResNet

    network = ResNet("p8", depth=26, fields=(20, 40, 80))
    state = network.state_dict()
    file = io.BytesIO()
    torch.save(state, file)

    def size(tensors: Iterable[torch.Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "parameter_bytes": size(network.parameters()),
        "running_statistics_bytes": size(network.buffers())
        - size(b for name, b in network.named_buffers() if name not in state),
        "checkpoint_bytes": file.getbuffer().nbytes,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="fresh interpreters (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats: expected a whole number of at least 1; got {args.repeats}")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: no such folder: {args.json.parent}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    print(f"medians over {args.repeats} fresh interpreters\n")
    median_seconds(IMPORT_ECONV, 1)  # files read from disk for the first time
    torch_import = median_seconds(IMPORT_TORCH, args.repeats)
    econv_import = median_seconds(IMPORT_ECONV, args.repeats)
    build = median_seconds(BUILD_ECONV, args.repeats)
    sizes = checkpoint()
    escnn_build = None
    if importlib.util.find_spec("escnn") is not None:
        median_seconds(BUILD_ESCNN, 1)
        escnn_build = median_seconds(BUILD_ESCNN, max(1, args.repeats // 3))

    def verdict(value: float, target: float) -> str:
        return f"at most {target:g} s: {'reached' if value <= target else 'missed'}"

    print(f"import torch                                 {torch_import:6.2f} s")
    print(
        f"import econv adds                            {econv_import:6.2f} s   "
        f"{verdict(econv_import, IMPORT_TARGET)}"
    )
    print(
        f"build p8 ResNet-26 with 20/40/80 fields      {build:6.2f} s   "
        f"{verdict(build, BUILD_TARGET)}"
    )
    if escnn_build is None:
        print("build six C8 layers with escnn                    –     escnn is not installed")
    else:
        print(
            f"build six C8 layers with escnn, 24–96 fields {escnn_build:6.2f} s   "
            f"{escnn_build / build:.1f} times the ResNet"
        )
    tensors = sizes["parameter_bytes"] + sizes["running_statistics_bytes"]
    print(
        f"\ncheckpoint of the ResNet: {sizes['checkpoint_bytes'] / sizes['parameter_bytes']:.4f} "
        f"times the {sizes['parameter_bytes']:,} bytes of its {sizes['parameters']:,} parameters\n"
        f"({sizes['running_statistics_bytes']:,} bytes are running statistics of batch norm, "
        f"{sizes['checkpoint_bytes'] - tensors:,} the container)"
    )
    if args.json:
        record = {
            "repeats": args.repeats,
            "import_torch_s": torch_import,
            "import_econv_adds_s": econv_import,
            "build_resnet26_p8_s": build,
            "build_escnn_six_layers_s": escnn_build,
            **sizes,
            "python": sys.version.split()[0],
        }
        temporary = args.json.with_name(f".{args.json.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, args.json)


if __name__ == "__main__":
    main()
