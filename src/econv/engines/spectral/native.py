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
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from econv.engines.problem import Problem, times
from econv.engines.spectral.operator import Task
from econv.engines.spectral.torch import Torch, arrays
from econv.files import atomic, cache_folder
from econv.files import processor as _processor
from econv.fourier import butterflies
from econv.plan import SpectralPlan

__all__ = ["Native", "available", "compiler", "means", "reason"]

_SOURCE = Path(__file__).with_name("native.cpp")
_INCLUDED = Path(__file__).with_name("means.inc")  # at its end
_LARGEST = {2: 9, 3: 5}  # size of the stencils that the kernel is instantiated for
_REALS = {torch.float32: "float", torch.float64: "double"}
_TUNED: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])  # the first that works
_WRONG = {1: "another layout of its arguments", 2: "more taps than it knows", 3: "no memory"}
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


def identity(dtype: torch.dtype = torch.float32) -> str:
    """Which kernel there is, by source, compiler and processor, or why there is none."""
    return reason(dtype) or Path(str(_library(_REALS[dtype])._name)).stem


class Native(Torch):
    """A C++ kernel for the CPU, float32 and float64."""

    name = "spectral/native"
    compiled = True

    def why_not(self, problem: Problem) -> str | None:
        """It runs on a CPU, in float32 or float64, for stencils up to 9×9 or 5×5×5."""
        if problem.device.type != "cpu":
            return f"it runs on a CPU; the input is on {problem.device.type}"
        if problem.context == "watched":
            return "a tracer, a dispatch mode or a tensor subclass must see operations of torch"
        # Half precisions run in float32 and are rounded once, at the end.
        if torch.promote_types(problem.dtype, torch.float32) not in _REALS:
            return f"it runs in float32 and float64; the input is {problem.dtype}"
        size, dimension = problem.convolution.basis.size, problem.convolution.dimension
        if size > (most := _LARGEST[dimension]):
            known, these = (times([n] * dimension) for n in (most, size))
            return f"it knows stencils of up to {known}; these are {these}"
        return super().why_not(problem) or reason(torch.promote_types(problem.dtype, torch.float32))

    def product(
        self, x: Tensor, weights: Tensor, task: Task, other: Tensor | None = None, out: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """The layer, and with ``other`` the gradient to the weights of their inner product."""
        library, plan, geometry = _library(_REALS[x.dtype]), task.plan, task.geometry
        if isinstance(library, str):
            raise RuntimeError(f"the native kernel is not available: {library}")
        x, weights = _dense_images(x), weights.contiguous()
        other = None if other is None else _dense_images(other)
        out_fields, in_fields, _ = weights.shape
        shape = (x.shape[0], out_fields * len(plan.synthesis), *geometry.sizes)
        nothing = not x.numel() or not geometry.pixels
        result = (x.new_zeros if nothing else x.new_empty)(shape) if out else None
        found = None if other is None else torch.zeros_like(weights)
        if nothing:
            return result, found
        program, _kept = _program(plan, x.dtype)
        flat = [1] * (x.ndim == 4)  # the depth of an image
        into = [*geometry.numbers[:4], *flat, *geometry.sizes]
        numbers = (
            *(torch.get_num_threads(), x.shape[0], *flat, *x.shape[2:], in_fields, out_fields),
        )
        strides = x.stride(0), 0 if other is None else other.stride(0)
        images = [0 if t is None else t.data_ptr() for t in (x, weights, other, result, found)]
        job = array("q", [*program, *into, *numbers, *strides, *images])
        code = library.econv_spectral(job.buffer_info()[0], len(job))
        if code:
            raise RuntimeError(f"the native kernel failed: {_WRONG.get(code, code)}")
        return result, found


def means(dtype: torch.dtype, job: Sequence[int]) -> None:
    """Run `struct MeansJob` of means.inc."""
    library = _library(_REALS[dtype])
    if isinstance(library, str):
        raise RuntimeError(f"the native kernel is not available: {library}")
    numbers = array("q", job)
    if code := library.econv_means(numbers.buffer_info()[0], len(numbers)):
        raise RuntimeError(f"the native kernel failed: {_WRONG.get(code, code)}")


def _dense_images(x: Tensor) -> Tensor:
    """Images whose channels, rows and columns are contiguous, at any distance."""
    steps = tuple(math.prod(x.shape[n:]) for n in range(2, x.ndim + 1))
    return x if x.stride()[1:] == steps else x.contiguous()


@lru_cache(maxsize=512)
def _program(plan: SpectralPlan, dtype: torch.dtype) -> tuple[list[int], list[np.ndarray]]:
    """What `struct Job` of native.cpp says of a plan, and the arrays that it points into."""
    tables = arrays(plan)
    real = np.float32 if dtype == torch.float32 else np.float64
    kept: list[np.ndarray] = []

    def address(table: Any) -> int:
        found = np.asarray(table)
        kept.append(np.ascontiguousarray(found, real if found.dtype.kind == "f" else np.int64))
        return int(kept[-1].ctypes.data)

    def sparse(matrix: np.ndarray) -> list[int]:
        rows, columns = np.nonzero(matrix)
        start = np.searchsorted(rows, np.arange(len(matrix) + 1))
        return [len(matrix), *map(address, (start, columns, matrix[rows, columns]))]

    def fast(matrix: np.ndarray, turned: bool = False) -> list[int]:
        """Three factors; the first, or turned the last, has all pairs with no value in common."""
        pairs, last = butterflies(matrix)
        first, free = np.eye(matrix.shape[1]), set(range(matrix.shape[1]))
        while pairs and free.issuperset(pairs[0]):
            a, b = pairs.pop(0)
            first[[a, b], [b, a]], first[b, b] = 1.0, -1.0
            free -= {a, b}
        if turned:
            first, pairs, last = last.T, pairs[::-1], first
        return [*sparse(first), len(pairs), address(np.array(pairs, dtype=np.int64)), *sparse(last)]

    blocks = [[block.rows, block.inner, block.columns] for block in plan.blocks]
    slots = tables["synthesis"].T
    if plan.stencils.ndim == 3:
        start, pick, factors = 0, tables["pick"].T, tables["factors"].T
        classes = symmetry_classes(plan.stencils)
    else:  # as many terms as each feature has
        there = tables["factors"].T != 0
        start = address(np.append(0, there.sum(axis=1).cumsum()))
        pick, factors = tables["pick"].T[there], tables["factors"].T[there]
        classes = cube_classes(plan.stencils)
    numbers = [
        *(
            plan.stencils.ndim - 1,
            plan.basis.size,
            len(plan.stencils),
            len(slots),
            plan.weights,
            len(blocks),
        ),
        *(len(plan.analysis), len(plan.synthesis)),
        *(*fast(plan.analysis), *fast(slots, turned=True), *fast(slots)),
        *map(address, classes),
        start,
        *map(address, (pick, factors, blocks, tables["entries"], tables["signs"])),
    ]
    return numbers, kept


def symmetry_classes(stencils: np.ndarray) -> tuple[np.ndarray, ...]:
    """Stencils by the symmetric parts of a patch that they read: starts, stencils, adds, factors.

    The parts are those that `derivatives` in native.cpp forms: along each axis the middle, the sums
    and the differences of opposite taps; among the even-even and the odd-odd ones, sums and
    differences across the diagonal. A stencil with the symmetry of its operator reads parts of one
    class, six at most on 5×5 where it has up to 25 taps. For each class: which stencils read it,
    whether an earlier class has given a part of them, and a factor for each part.
    """
    count, size, _ = stencils.shape
    taps, radius = np.eye(size), size // 2
    ahead, behind = taps[radius + 1 :], taps[:radius][::-1]
    even, odd = np.concatenate([taps[radius : radius + 1], ahead + behind]), ahead - behind

    def across(lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.triu_indices(len(lines))
        part = lines[a, :, None] * lines[b, None]
        turned = part.transpose(0, 2, 1)
        return part + turned * (a != b)[:, None, None], (part - turned)[a != b]

    mixed = (odd[:, None, :, None] * even[:, None]).reshape(-1, size, size)
    classes = [*across(even), mixed, mixed.transpose(0, 2, 1), *across(odd)]
    parts = np.concatenate(classes).reshape(size**2, size**2)
    factors = stencils.reshape(count, -1) @ np.linalg.inv(parts)
    return _by_class(factors, [len(found) for found in classes])


def cube_classes(stencils: np.ndarray) -> tuple[np.ndarray, ...]:
    """As `symmetry_classes`, of stencils in space: eight classes, even or odd along y, x and z."""
    count, size = stencils.shape[:2]
    taps, radius = np.eye(size), size // 2
    ahead, behind = taps[radius + 1 :], taps[:radius][::-1]
    lines = np.concatenate([taps[radius : radius + 1], ahead + behind]), ahead - behind
    classes = [
        np.einsum("az,by,cx->abczyx", lines[z], lines[y], lines[x]).reshape(-1, size**3)
        for y, x, z in itertools.product((0, 1), repeat=3)
    ]
    factors = stencils.reshape(count, -1) @ np.linalg.inv(np.concatenate(classes))
    return _by_class(factors, [len(found) for found in classes])


def _by_class(factors: np.ndarray, lengths: list[int]) -> tuple[np.ndarray, ...]:
    """The factors of each stencil, class after class of its parts, without those that read none."""
    factors[np.abs(factors) <= 1e-14 * np.abs(factors).max(axis=1, keepdims=True)] = 0.0
    each = np.split(factors, np.cumsum(lengths)[:-1], axis=1)
    reads = np.array([here.any(axis=1) for here in each])  # [class, stencil]
    given = np.concatenate([here[own].ravel() for here, own in zip(each, reads, strict=True)])
    start = np.append(0, reads.sum(axis=1).cumsum())
    return start, np.nonzero(reads)[1], (reads.cumsum(axis=0) > 1)[reads], given


def compiler() -> str | None:
    """The C++ compiler that the kernel is built with, if there is one."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


@lru_cache(maxsize=8)
def _library(real: str) -> Any:
    """The loaded library, or the reason why there is none."""
    if sys.platform == "win32":
        return "not supported on Windows"
    import fcntl

    builder = compiler()
    if builder is None:
        return "no C++ compiler found (CXX, c++, g++, clang++)"
    openmp, asked = _loaded_openmp(), [builder, "--version"]
    try:
        version = subprocess.run(asked, capture_output=True, timeout=60, check=True).stdout
        # What was tuned for this processor must not run on another that shares the folder.
        parts = [
            _SOURCE.read_bytes(),
            _INCLUDED.read_bytes(),
            version,
            builder,
            real,
            openmp or "",
            _processor(),
        ]
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
        with _folder() as folder:
            path = Path(folder) / f"spectral-{real}-{key}.so"
            with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time, however it ends
                if not path.exists():
                    with atomic(path) as temporary:
                        _compile(builder, real, openmp, temporary)
            library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    for function in (library.econv_spectral, library.econv_means):
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


def _compile(builder: str, real: str, openmp: str | None, target: Path) -> None:
    """Build with the best flags that work: tuned and with torch's own threads, if possible."""
    common = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", f"-DREAL={real}"]
    built, problem = target.with_name(f"{target.name}.o"), ""
    # Linked by name with the library that torch has loaded: one pool of threads, not two.
    threads = ([("-fopenmp", openmp)] if openmp else []) + [("-pthread", "-pthread")]
    for tuned, (flag, linked) in itertools.product(_TUNED, threads):
        make = [builder, *common, *tuned, flag, "-c", str(_SOURCE), "-o", str(built)]
        link = [builder, "-shared", str(built), linked, "-o", str(target)]
        try:
            for step in (make, link):
                subprocess.run(step, capture_output=True, text=True, timeout=_SECONDS, check=True)
            ctypes.CDLL(str(target))
            return
        except (subprocess.CalledProcessError, OSError) as error:
            problem = problem or f"{error} {getattr(error, 'stderr', '').strip()[-500:]}"
        finally:
            built.unlink(missing_ok=True)
    raise RuntimeError(f"{builder} could not build the kernel: {problem}")


def _loaded_openmp() -> str | None:
    """The OpenMP library that torch runs its threads with, if the system tells."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        found = re.search(r"/.*/lib(gomp|iomp5|omp)[^/\s]*$", maps, re.MULTILINE)
        return found[0] if found else None
    return None


def _folder() -> contextlib.AbstractContextManager[str]:
    """The user's own folder for kernels, or a passing one where it cannot be used."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        # Code is loaded from it: nobody else may be able to put any there.
        private = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if private and os.access(folder, os.W_OK | os.X_OK):
            return contextlib.nullcontext(str(folder))
    return tempfile.TemporaryDirectory(prefix="econv-")
