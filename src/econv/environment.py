"""What a report of a problem should say: versions, machine, engines and why some cannot run here.

`econv env` prints it. The engines are asked themselves, each on every device; nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import econv
from econv import data
from econv.basis import filter_basis
from econv.engines import ENGINES, Part, Problem, convolution
from econv.engines.spectral.native import compiler
from econv.files import cache_folder, processor_model

__all__ = ["add_arguments", "environment", "main", "text"]

PACKAGES = (
    *("torch", "numpy", "triton", "torchvision", "timm", "torchao"),
    *("onnx", "onnxruntime", "onnxscript", "safetensors", "huggingface_hub"),
    *("matplotlib", "scikit-image", "scipy", "mlxtend", "rich"),
)
"""Those that econv can use; the first two it needs."""

VARIABLES = ("CUDA_VISIBLE_DEVICES", "CXX", "OMP_NUM_THREADS")
"""Environment variables that change what runs, beside all whose names begin with ``ECONV_``."""


def environment() -> dict[str, Any]:
    """All of it, as JSON has it. The user's home is written as ``~``.

    Asking the engines for the first time builds the kernel for the CPU, which takes seconds.

    >>> found = environment()
    >>> found["versions"]["econv"] == econv.__version__, found["engines"]["cpu"]["dense"]
    (True, None)
    """
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found: dict[str, Any] = {
        "versions": _versions(),
        "system": {
            "platform": platform.platform(),
            "processor": processor_model(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "compiler": _compiler(),
        },
        "devices": {str(device): _device(device) for device in devices[1:]},
        "engines": {str(device): _engines(device) for device in devices},
        "folders": {"kernels and choices": str(cache_folder()), "data": str(data.cache_folder())},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("ECONV_") or name in VARIABLES
        },
    }
    return {key: _without_home(part) for key, part in found.items()}


def text(found: dict[str, Any]) -> str:
    """What `environment` found, as lines for people.

    >>> print(text({"versions": {"econv": "0.1.0", "timm": None}}))
    versions
      econv  0.1.0
      timm   not there
    """
    lines = []
    for title, part in found.items():
        nothing = "available" if title == "engines" else "not there"
        lines += [title, *_rows(part, nothing, "  ")]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``econv env``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    """Print it; 0."""
    found = environment()
    print(json.dumps(found, indent=1, ensure_ascii=False) if options.json else text(found))
    return 0


def _rows(part: dict[str, Any], nothing: str, indent: str) -> list[str]:
    if not part:
        return [f"{indent}none"]
    width = max(map(len, part)) + 2
    lines = []
    for name, value in part.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *_rows(value, nothing, indent + "  ")]
        else:
            said = nothing if value is None else " ".join(str(value).split())
            lines.append(f"{indent}{name:<{width}}{said}")
    return lines


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"econv": econv.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {**found, "cuda": torch.version.cuda, "cudnn": None if cudnn is None else str(cudnn)}


def _compiler() -> str | None:
    """The path and the first line of what it says of itself."""
    path = compiler()
    if path is None:
        return None
    try:
        asked = [path, "--version"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}: {error}"
    return f"{path}: {said.partition(chr(10))[0]}"


def _device(device: torch.device) -> dict[str, Any]:
    known = torch.cuda.get_device_properties(device)
    return {
        "name": known.name,
        "capability": f"{known.major}.{known.minor}",
        "memory": f"{known.total_memory / 2**30:.0f} GiB",
    }


def _engines(device: torch.device) -> dict[str, Any]:
    """Of each engine nothing where it can run an ordinary layer in training, or why it cannot."""
    conv = convolution(filter_basis("p8"), (Part("regular", 16),), "regular", 16, padding=2)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    problem = Problem(conv, 8, (32, 32), dtype, device, False, True, True)
    reasons = {name: engine.why_not(problem) for name, engine in ENGINES.items()}
    return {"asked": str(problem), **reasons}


def _without_home(part: Any) -> Any:
    """The same, without the user's name in paths."""
    if isinstance(part, dict):
        return {key: _without_home(value) for key, value in part.items()}
    home = str(Path.home())
    if isinstance(part, str) and len(home) > 1:
        return part.replace(home, "~")
    return part
