"""Where kernels in Triton run, and whether one of them works: asked by all that have some."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

__all__ = ["DEVICES", "DTYPES", "on_device", "ran", "tf32_allowed", "unavailable", "works"]

_log = logging.getLogger("econv.engines")

DEVICES = {"cuda"}
"""The kinds of device that the kernels run on."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What they read and write."""

_OLDEST = (8, 0)  # capability of the GPUs whose tensor cores the kernels know

on_device = torch.cuda.device_of
"""Kernels are launched on the current device: it has to be that of the tensors."""


def unavailable(device: torch.device) -> str | None:
    """Why no kernel in Triton runs on a device, or None."""
    if device.type not in DEVICES:
        return f"it runs on NVIDIA GPUs; the input is on {device.type}"
    if os.environ.get("ECONV_TRITON") == "0":
        return "forbidden by ECONV_TRITON=0"
    return _not_installed(device)


@cache
def _not_installed(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "it runs on NVIDIA GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        return "the GPU is older than Ampere"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        return f"it needs Triton 3.6 or later; this is {triton.__version__}"
    return None


_TRIED: dict[tuple[str, torch.device], bool] = {}
"""Whether kernels that have a name worked on a device."""


def works(what: str, device: torch.device, attempt: str | None = None) -> bool:
    """Whether a kernel works on a device, as far as is known; if not, that is said once.

    ``attempt`` is a module whose function of that name runs it where it never ran: it needs a C
    compiler, for one thing. While a graph is captured nothing can be tried.
    """
    if unavailable(device) is not None:
        return False
    if attempt is None or (what, device) in _TRIED:
        return _TRIED.get((what, device), True)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    with torch.inference_mode(False), torch.no_grad():
        return ran(what, device, lambda: import_module(attempt).attempt(device))


def ran(what: str, device: torch.device, run: Callable[[], object]) -> bool:
    """Whether a kernel ran, and works as far as is known."""
    try:
        run()
        _TRIED[what, device] = True
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a driver raises
        _TRIED[what, device] = False
        reason = f"{type(error).__name__}: {str(error).strip()[:500]}"
        _log.warning("%s failed on %s and is not used again: %s", what, device, reason)
    return _TRIED[what, device]


def tf32_allowed() -> bool:
    """Whether GPUs may round what convolutions multiply in float32."""
    return torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
