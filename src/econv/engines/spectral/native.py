"""The spectral engine in compiled code, for the CPU: `native.cpp`, built on first use.

Nothing is built when econv is installed or imported. The first convolution that wants the kernel
compiles it, in a few seconds, with the C++ compiler that is found (``CXX``, ``c++``, ``g++`` or
``clang++``) and keeps it in a folder of the user's; later processes load it from there. Where there
is no compiler, or none that works, the plain torch path runs, and :func:`reason` says why.

Environment variables: ``ECONV_NATIVE=0`` forbids it; ``ECONV_CACHE`` is the folder (by default
``econv`` in ``XDG_CACHE_HOME`` or ``~/.cache``).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from econv.engines.problem import Geometry, Problem
from econv.engines.spectral.torch import Torch, arrays
from econv.files import atomic, cache_folder
from econv.files import processor as _processor
from econv.fourier import butterflies
from econv.plan import SpectralPlan

__all__ = ["Native", "available", "reason", "run"]

_SOURCE = Path(__file__).with_name("native.cpp")
_LARGEST = 9  # size of the stencils that the kernel is instantiated for
_REALS = {torch.float32: "float", torch.float64: "double"}
_TUNED: tuple[list[str], ...] = (
    ["-march=native"],
    ["-mcpu=native"],
    [],
)  # the first that the compiler takes
_SECONDS = 300  # to compile in; it takes about three


def available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernel can be had here; builds it if need be."""
    return reason(dtype) is None


def reason(dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernel cannot be had, or ``None`` if it can."""
    if os.environ.get("ECONV_NATIVE", "1") == "0":
        return "forbidden by ECONV_NATIVE=0"
    if dtype not in _REALS:
        return f"there is no kernel for {dtype}"
    found = _library(_REALS[dtype])
    return found if isinstance(found, str) else None


class Native(Torch):
    """A C++ kernel for the CPU, float32 and float64."""

    name = "spectral/native"
    compiled = True

    def why_not(self, problem: Problem) -> str | None:
        """It runs on a CPU, in float32 or float64, for stencils up to 9×9."""
        if problem.device.type != "cpu":
            return f"it runs on a CPU; the input is on {problem.device.type}"
        if problem.context == "watched":
            return "a tracer, a dispatch mode or a tensor subclass must see operations of torch"
        # Half precisions run in float32 and are rounded once, at the end.
        if torch.promote_types(problem.dtype, torch.float32) not in _REALS:
            return f"it runs in float32 and float64; the input is {problem.dtype}"
        size = problem.convolution.basis.size
        if size > _LARGEST:
            return f"it knows stencils of up to {_LARGEST}×{_LARGEST}; these are {size}×{size}"
        return super().why_not(problem) or reason(torch.promote_types(problem.dtype, torch.float32))

    def product(self, *operands: Any) -> tuple[Tensor | None, Tensor | None]:
        """The layer, and the gradient to its weights."""
        return run(*operands)


def run(
    x: Tensor,
    weights: Tensor,
    plan: SpectralPlan,
    geometry: Geometry,
    other: Tensor | None = None,
    output: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """The layer, and with ``other`` the gradient to the weights of their inner product."""
    library = _library(_REALS[x.dtype])
    if isinstance(library, str):
        raise RuntimeError(f"the native kernel is not available: {library}")
    program = _program(plan, x.dtype)
    x, weights = _dense_images(x), weights.contiguous()
    out_fields, in_fields = weights.shape[:2]
    out_channels = plan.synthesis.shape[0]
    shape = (x.shape[0], out_fields * out_channels, geometry.height, geometry.width)
    result = x.new_empty(shape) if output else None
    found = None if other is None else torch.empty_like(weights)
    if not x.numel() or not geometry.height or not geometry.width:
        return (
            None if result is None else result.zero_(),
            None if found is None else found.zero_(),
        )
    job = _Job()
    job.size_of_job = ctypes.sizeof(_Job)
    job.threads = torch.get_num_threads()
    job.batch, job.height, job.width = x.shape[0], *x.shape[2:]
    job.in_fields, job.out_fields = in_fields, out_fields
    job.in_channels, job.out_channels = plan.analysis.shape[0], out_channels
    job.out_height, job.out_width = geometry.height, geometry.width
    job.x_stride = x.stride(0)
    job.up, job.down, job.dilation, job.before = geometry[:4]
    program.fill(job)
    job.x, job.w = x.data_ptr(), weights.data_ptr()
    job.y = result.data_ptr() if result is not None else None
    if other is not None and found is not None:
        other = _dense_images(other)
        job.other, job.other_stride = other.data_ptr(), other.stride(0)
        job.w_gradient = found.data_ptr()
    code = library.econv_spectral(ctypes.byref(job))
    if code:
        stencils = f"expected stencils of up to {_LARGEST}×{_LARGEST}; got {plan.basis.size}"
        wrong = {1: "another layout of its arguments", 2: stencils, 3: "no memory"}
        raise RuntimeError(f"the native kernel failed: {wrong.get(code, code)}")
    return result, found


def _dense_images(x: Tensor) -> Tensor:
    """Images whose channels, rows and columns are contiguous, at any distance."""
    height, width = x.shape[2:]
    return x if x.stride()[1:] == (height * width, width, 1) else x.contiguous()


_SIZES = """size_of_job threads batch in_fields out_fields in_channels out_channels height width
out_height out_width x_stride other_stride up down dilation before size stencils features slots
weights blocks"""
_IMAGES = "x w other y w_gradient"
_COUNTS = "rows places pairs first singles"
_TABLES = "pair single row_start row_place row_factor place_start place_row place_factor"
_POINTERS = """class_start class_stencil class_adds class_factor feature_place feature_factor block
entry sign"""


class _Transform(ctypes.Structure):
    """`struct Transform` of native.cpp."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in _COUNTS.split()],
        *[(name, ctypes.c_void_p) for name in _TABLES.split()],
    ]


class _Job(ctypes.Structure):
    """`struct Job` of native.cpp."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in _SIZES.split()],
        *[(name, ctypes.c_void_p) for name in _IMAGES.split()],
        ("analysis", _Transform),
        ("synthesis", _Transform),
        *[(name, ctypes.c_void_p) for name in _POINTERS.split()],
    ]


@dataclass(frozen=True, eq=False)
class _Program:
    """The arrays of a plan as the kernel reads them."""

    values: dict[str, Any]
    arrays: list[np.ndarray]  # kept alive: the values point into them

    def fill(self, job: Any) -> None:
        for name, value in self.values.items():
            setattr(job, name, value)


@lru_cache(maxsize=512)
def _program(plan: SpectralPlan, dtype: torch.dtype) -> _Program:
    tables = arrays(plan)
    real = np.float32 if dtype == torch.float32 else np.float64
    kept: list[np.ndarray] = []

    def place(array: Any) -> int:
        found = np.asarray(array)
        kept.append(np.ascontiguousarray(found, real if found.dtype.kind == "f" else np.int64))
        return int(kept[-1].ctypes.data)

    def fast(matrix: np.ndarray) -> _Transform:
        pairs, rest = butterflies(matrix)
        seen: list[int] = []
        for pair in pairs:
            if seen and set(pair) & set(seen):
                break
            seen += pair
        single = [p for p in range(matrix.shape[1]) if p not in seen]
        lists = [np.array(found, dtype=np.int64) for found in (pairs, single)]
        pointers = map(place, (*lists, *_sparse(rest), *_sparse(rest.T)))
        counts = (len(pairs), len(seen) // 2, len(single))
        return _Transform(*matrix.shape, *counts, *pointers)

    blocks, weight = [], 0
    for block in plan.blocks:
        blocks.append([block.rows, block.inner, block.columns, weight])
        weight += block.inner * block.columns
    start, stencil, adds, factors = symmetry_classes(plan.stencils)
    values: dict[str, Any] = {
        "size": plan.basis.size,
        "stencils": len(plan.stencils),
        "features": tables["pick"].shape[1],
        "slots": tables["synthesis"].shape[1],
        "weights": plan.weights,
        "blocks": len(blocks),
        "analysis": fast(plan.analysis),
        "synthesis": fast(tables["synthesis"].T),
        "class_start": place(start),
        "class_stencil": place(stencil),
        "class_adds": place(adds),
        "class_factor": place(factors),
        "feature_place": place(tables["pick"].T),
        "feature_factor": place(tables["factors"].T),
        "block": place(blocks),
        "entry": place(tables["entries"]),
        "sign": place(tables["signs"]),
    }
    return _Program(values, kept)


def _sparse(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entries of a matrix row by row: where each row starts, columns, values."""
    rows, columns = np.nonzero(matrix)
    return np.searchsorted(rows, np.arange(len(matrix) + 1)), columns, matrix[rows, columns]


def symmetry_classes(
    stencils: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Stencils by the symmetric parts of a patch that they read: starts, stencils, adds, factors.

    The parts are those that `derivatives` in native.cpp forms: along each axis the middle, the sums
    and the differences of opposite taps; among the even-even and the odd-odd ones, sums and
    differences across the diagonal. A stencil with the symmetry of its operator reads parts of one
    class, six at most on 5×5 where it has up to 25 taps. For each class: which stencils read it,
    whether an earlier class has given a part of them, and a factor for each part.
    """
    count, size, _ = stencils.shape
    radius = size // 2
    middle = np.eye(size)[radius]
    sums = [middle] + [np.eye(size)[radius + i] + np.eye(size)[radius - i] for i in _to(radius)]
    gaps = [np.eye(size)[radius + i] - np.eye(size)[radius - i] for i in _to(radius)]
    classes: list[list[np.ndarray]] = [
        [np.outer(a, b) + (np.outer(b, a) if i else 0) for a, b, i in _pairs(sums, 0)],
        [np.outer(a, b) - np.outer(b, a) for a, b, _ in _pairs(sums, 1)],
        [np.outer(a, b) for a in gaps for b in sums],
        [np.outer(a, b) for b in gaps for a in sums],
        [np.outer(a, b) + (np.outer(b, a) if i else 0) for a, b, i in _pairs(gaps, 0)],
        [np.outer(a, b) - np.outer(b, a) for a, b, _ in _pairs(gaps, 1)],
    ]
    parts = np.array([part.ravel() for found in classes for part in found])
    factors = stencils.reshape(count, -1) @ np.linalg.inv(parts)
    factors[np.abs(factors) <= 1e-14 * np.abs(factors).max(axis=1, keepdims=True)] = 0.0
    start, chosen, adds, given = [0], [], [], []
    seen: set[int] = set()
    first = 0
    for found in classes:
        here = factors[:, first : first + len(found)]
        first += len(found)
        for stencil in np.flatnonzero(here.any(axis=1)).tolist():
            chosen.append(stencil)
            adds.append(int(stencil in seen))
            given.append(here[stencil])
            seen.add(stencil)
        start.append(len(chosen))
    return np.array(start), np.array(chosen), np.array(adds), np.concatenate(given)


def _to(radius: int) -> range:
    return range(1, radius + 1)


def _pairs(lines: list[np.ndarray], least: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    for a, one in enumerate(lines):
        for b, two in enumerate(lines[a + least :]):
            yield one, two, b + least


@lru_cache(maxsize=8)
def _library(real: str) -> Any:
    """The loaded library, or the reason why there is none."""
    try:
        return _load(real)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)


def _load(real: str) -> ctypes.CDLL:
    if sys.platform == "win32":
        raise RuntimeError("not supported on Windows")
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler found (CXX, c++, g++, clang++)")
    source = _SOURCE.read_bytes()
    openmp = _loaded_openmp()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=60, check=True
    ).stdout
    # What was tuned for this processor must not run on another that shares the folder.
    parts = [source, version, compiler, real, openmp or "", _processor(), platform.machine()]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
    with _folder() as folder:
        path = folder / f"spectral-{real}-{key}.so"
        if not path.exists():
            with _lock(folder / f"spectral-{real}-{key}.lock"):
                if not path.exists():  # another process may have built it meanwhile
                    with atomic(path) as temporary:
                        _compile(compiler, real, openmp, temporary)
        library = ctypes.CDLL(str(path))
    library.econv_spectral.argtypes = [ctypes.POINTER(_Job)]
    library.econv_spectral.restype = ctypes.c_int
    return library


def _compile(compiler: str, real: str, openmp: str | None, target: Path) -> None:
    """Build with the best flags that work: tuned and with torch's own threads, if possible."""
    problem = ""
    for tuned in _TUNED:
        for threads in ([["-fopenmp"]] if openmp else []) + [["-pthread"]]:
            common = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", f"-DREAL={real}"]
            built = target.with_name(f"{target.name}.o")
            # Linked by name with the library that torch has loaded: one pool of threads, not two.
            link = [openmp] if openmp and threads == ["-fopenmp"] else ["-pthread"]
            steps = [
                [compiler, *common, *tuned, *threads, "-c", str(_SOURCE), "-o", str(built)],
                [compiler, "-shared", str(built), *link, "-o", str(target)],
            ]
            try:
                for step in steps:
                    done = subprocess.run(step, capture_output=True, text=True, timeout=_SECONDS)
                    if done.returncode:
                        problem = problem or f"{' '.join(step)}: {done.stderr.strip()[-500:]}"
                        break
                else:
                    try:
                        ctypes.CDLL(str(target))
                    except OSError as error:
                        problem = problem or str(error)
                        continue
                    return
            finally:
                built.unlink(missing_ok=True)
    raise RuntimeError(f"{compiler} could not build the kernel: {problem}")


def _loaded_openmp() -> str | None:
    """The OpenMP library that torch runs its threads with, if the system tells."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line.split()[-1]
            if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
                return path
    return None


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """The user's own folder for kernels, or a passing one where it cannot be used."""
    folder = cache_folder()
    usable = False
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        # Code is loaded from it: nobody else may be able to put any there.
        private = status.st_uid == os.getuid() and not status.st_mode & 0o022
        usable = private and os.access(folder, os.W_OK | os.X_OK)
    if usable:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="econv-") as passing:
            yield Path(passing)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Only one process at a time, however it ends."""
    import fcntl

    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
