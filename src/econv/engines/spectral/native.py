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
import logging
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from econv.basis import filter_basis
from econv.engines.problem import Geometry, Problem, times
from econv.engines.spectral.gate import address, check, check_plain
from econv.engines.spectral.operator import Task
from econv.engines.spectral.torch import Torch, apply, arrays
from econv.files import atomic, cache_folder, locked, remove_leftovers, write_atomically
from econv.files import processor as _processor
from econv.fourier import butterflies
from econv.plan import SpectralPlan, of_plan, spectral_plan
from econv.tensors import undisturbed

__all__ = ["Native", "compiler", "reason"]

_SOURCE = Path(__file__).with_name("native.cpp")
_WIDEST = 64  # stride and dilation: what is kept of a map grows with them
_LARGEST = {2: 9, 3: 5}  # size of the stencils that the kernel is instantiated for
_REALS = {torch.float32: "float", torch.float64: "double"}
_TUNED: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])  # the first that works
_WRONG = {1: "another layout of its arguments", 2: "more taps than it knows", 3: "no memory"}
_SECONDS = 300.0  # to compile in; it takes about three
_PATIENCE = 20.0  # seconds after which a compiler is spoken of
_log = logging.getLogger("econv.engines")


def reason(dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernel cannot be had, or ``None`` if it can; builds it if need be."""
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
        widest = max(problem.convolution.stride, problem.convolution.dilation)
        if widest > _WIDEST:
            return f"it knows strides and dilations of up to {_WIDEST}; this one is {widest}"
        return super().why_not(problem) or reason(torch.promote_types(problem.dtype, torch.float32))

    def product(
        self, x: Tensor, weights: Tensor, task: Task, other: Tensor | None = None, out: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """The layer, and with ``other`` the gradient to the weights of their inner product."""
        return _product(_loaded(x.dtype), x, weights, task, other, out)


def _product(
    library: Any, x: Tensor, weights: Tensor, task: Task, other: Tensor | None, out: bool
) -> tuple[Tensor | None, Tensor | None]:
    plan, geometry = task.plan, task.geometry
    x, weights = _dense_images("x", x, x.dtype), _packed("the weights", weights, x.dtype)
    other = None if other is None else _dense_images("the gradient", other, x.dtype)
    check(weights.ndim == 3, "weights [out fields, in fields, weights]")
    out_fields, in_fields, _ = weights.shape
    shape = (x.shape[0], out_fields * len(plan.synthesis), *geometry.sizes)
    check(max(geometry[:3]) <= _WIDEST and min(geometry[:3]) > 0, f"steps of 1 to {_WIDEST}")
    check(len(geometry.sizes) == x.ndim - 2 == plan.basis.group.dimension, "one size for each axis")
    check(min(geometry.sizes) >= 0 and abs(geometry.before) < 1 << 31, "no sizes below zero")
    reads = (x.shape[0], in_fields * plan.analysis.shape[1], *x.shape[2:])
    sums = (out_fields, in_fields, plan.weights)
    given = (
        address("x", x, x.dtype, reads, apart=True),
        address("the weights", weights, x.dtype, sums),
        address("the gradient", other, x.dtype, shape, apart=True),
    )
    nothing = not x.numel() or not math.prod(shape)
    result = (x.new_zeros if nothing else x.new_empty)(shape) if out else None
    found = None if other is None else torch.zeros_like(weights)
    if nothing:
        return result, found
    program, _kept = _program(plan, x.dtype)
    flat = [1] * (x.ndim == 4)  # the depth of an image
    into = [*geometry.numbers[:4], *flat, *geometry.sizes]
    numbers = (torch.get_num_threads(), x.shape[0], *flat, *x.shape[2:], in_fields, out_fields)
    strides = x.stride(0), 0 if other is None else other.stride(0)
    made = address("y", result, x.dtype, shape), address("the sums", found, x.dtype, sums)
    job = array("q", [*program, *into, *numbers, *strides, *given, *made])
    code = library.econv_spectral(job.buffer_info()[0], len(job))
    if code:
        raise RuntimeError(f"the native kernel failed: {_WRONG.get(code, code)}")
    return result, found


def _loaded(dtype: torch.dtype) -> Any:
    """The library, or an error that says why there is none."""
    check(dtype in _REALS, "float32 or float64")
    found = _library(_REALS[dtype])
    if isinstance(found, str):
        raise RuntimeError(f"the native kernel is not available: {found}")
    return found


def _dense_images(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Images whose channels, rows and columns are contiguous, at any distance."""
    check(x.layout is torch.strided and x.ndim in (4, 5), "images [batch, channels, …]")
    steps = tuple(math.prod(x.shape[n:]) for n in range(2, x.ndim + 1))
    if x.stride()[1:] == steps and not x.is_neg() and x.stride(0) >= 0:
        return x
    return _packed(name, x, dtype)


def _packed(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without gaps: a copy where need be, from memory that is there."""
    if x.is_contiguous() and not x.is_neg():
        return x
    check_plain(name, x, dtype)
    return x.resolve_neg().contiguous()


@of_plan
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
    slots, factors = tables["synthesis"].T, tables["factors"].T
    terms = factors != 0
    terms[:, 0] = True  # one at least
    start = np.append(0, terms.sum(axis=1).cumsum())
    sizes = (plan.stencils.ndim - 1, plan.basis.size, len(plan.stencils), len(slots))
    channels = (len(plan.analysis), len(plan.synthesis))
    features = (start, tables["pick"].T[terms], factors[terms])
    last = (*symmetry_classes(plan.stencils), *features, blocks, tables["entries"], tables["signs"])
    numbers = [*sizes, plan.weights, len(blocks), *channels]
    numbers += [*fast(plan.analysis), *fast(slots, turned=True), *fast(slots)]
    numbers += map(address, last)
    return numbers, kept


def symmetry_classes(stencils: np.ndarray) -> tuple[np.ndarray, ...]:
    """Stencils by the symmetric parts of a patch that they read: starts, stencils, adds, factors.

    The parts are those that `derivatives` in native.cpp forms: along each axis the middle, the sums
    and the differences of opposite taps; among the even-even and the odd-odd ones, sums and
    differences across the diagonal. Those of space come in eight classes, even or odd along y, x
    and z. A stencil with the symmetry of its operator reads parts of one class, six at most on 5×5
    where it has up to 25 taps. For each class: which stencils read it, whether an earlier class has
    given a part of them, and a factor for each part.
    """
    count, size = stencils.shape[:2]
    taps, radius = np.eye(size), size // 2
    ahead, behind = taps[radius + 1 :], taps[:radius][::-1]
    even, odd = lines = np.concatenate([taps[radius : radius + 1], ahead + behind]), ahead - behind

    def across(lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.triu_indices(len(lines))
        part = lines[a, :, None] * lines[b, None]
        turned = part.transpose(0, 2, 1)
        return part + turned * (a != b)[:, None, None], (part - turned)[a != b]

    if stencils.ndim == 3:
        mixed = (odd[:, None, :, None] * even[:, None]).reshape(-1, size, size)
        classes = [*across(even), mixed, mixed.transpose(0, 2, 1), *across(odd)]
    else:
        classes = [
            np.einsum("az,by,cx->abczyx", lines[z], lines[y], lines[x]).reshape(-1, *[size] * 3)
            for y, x, z in itertools.product((0, 1), repeat=3)
        ]
    parts = np.concatenate(classes).reshape(stencils[0].size, -1)
    factors = stencils.reshape(count, -1) @ np.linalg.inv(parts)
    factors[np.abs(factors) <= 1e-14 * np.abs(factors).max(axis=1, keepdims=True)] = 0.0
    each = np.split(factors, np.cumsum([len(found) for found in classes])[:-1], axis=1)
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
    builder, openmp = compiler(), _loaded_openmp()
    if builder is None:
        return "no C++ compiler found (CXX, c++, g++, clang++)"
    try:
        version = _output([builder, "--version"], time.monotonic() + _SECONDS)
        # What was tuned for this processor must not run on another that shares the folder.
        parts = [_SOURCE.read_bytes(), version, builder, real, openmp or "", _processor()]
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
        with _folder() as folder:
            path = Path(folder) / f"spectral-{real}-{key}.so"
            with locked(path.with_suffix(".lock"), wait=True):
                remove_leftovers(Path(folder))
                library = _kept(path)
                if library is None:
                    with atomic(path) as temporary:
                        _compile(builder, real, openmp, temporary)
                        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
                    write_atomically(path.with_suffix(".sha256"), digest.encode())
                    library = _opened(path)
        _compare(library, real)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.warning("no compiled kernel for CPUs, operations of torch run instead: %s", error)
        return str(error)
    return library


def _kept(path: Path) -> Any:
    """The library that was built before: a file of the user's, as it was written; or nothing.

    One that was cut short would end the process where it is loaded, or later.
    """
    with contextlib.suppress(OSError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not _private(status):
            return None
        digest = path.with_suffix(".sha256").read_bytes()
        if digest == hashlib.sha256(path.read_bytes()).hexdigest().encode():
            return _opened(path)
    return None


def _opened(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    try:
        library.econv_spectral.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    except AttributeError as error:
        raise OSError(f"{path} is no kernel of econv: {error}") from None
    return library


def _compare(library: Any, real: str) -> None:
    """Raise `RuntimeError` unless the kernels of a library agree with operations of torch, once.

    A library may have been built wrongly, and would then give other numbers, or none.
    """
    dtype = next(dtype for dtype, name in _REALS.items() if name == real)
    cpu, most = torch.device("cpu"), 1e-4 if real == "float" else 1e-9

    def numbers(*shape: int) -> Tensor:
        return torch.arange(math.prod(shape), dtype=dtype, device=cpu).mul(0.7).sin().view(shape)

    plan = spectral_plan(filter_basis("p4", "order<=1"), "regular", "regular")
    with undisturbed(cpu), torch.no_grad():
        task = Task(plan, Geometry(1, 1, 1, 1, (6, 7)))
        x, other = numbers(2, 8, 6, 7), numbers(2, 4, 6, 7)
        weights = numbers(1, 2, plan.weights)
        found = [*_product(library, x, weights, task, other, True)]
        wanted = [*apply(x, weights, plan, task.geometry, other)]
        for ours, exact in zip(found, wanted, strict=True):
            assert ours is not None
            assert exact is not None
            error = float((ours - exact).abs().max() / exact.abs().max())
            if not error < most:  # so that a NaN fails
                raise RuntimeError(
                    f"the kernel that was built differs from operations of torch by {error:.1e}"
                )


def _compile(builder: str, real: str, openmp: str | None, target: Path) -> None:
    """Build with the best flags that work: tuned and with torch's own threads, if possible."""
    common = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", f"-DREAL={real}"]
    built, problem = target.with_name(f"{target.name}.o"), ""
    until = time.monotonic() + _SECONDS
    # Linked by name with the library that torch has loaded: one pool of threads, not two.
    threads = ([("-fopenmp", openmp)] if openmp else []) + [("-pthread", "-pthread")]
    for tuned, (flag, linked) in itertools.product(_TUNED, threads):
        make = [builder, *common, *tuned, flag, "-c", str(_SOURCE), "-o", str(built)]
        link = [builder, "-shared", str(built), linked, "-o", str(target)]
        try:
            for step in (make, link):
                _output(step, until)
            _opened(target)
            return
        except (subprocess.CalledProcessError, OSError) as error:
            problem = problem or f"{error} {getattr(error, 'stderr', '').strip()[-500:]}"
        finally:
            built.unlink(missing_ok=True)
    raise RuntimeError(f"{builder} could not build the kernel: {problem}")


def _output(command: list[str], until: float) -> str:
    """What a compiler says; it is told of one that takes long, and one that hangs is ended."""
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    words: Any = {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, **pipes, **words, start_new_session=True)
    says = "%s is building the kernel for CPUs; ECONV_NATIVE=0 forbids it"
    patience = threading.Timer(_PATIENCE, _log.warning, (says, command[0]))
    patience.start()
    try:
        output, errors = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not end within {_SECONDS:g} s") from None
    finally:
        patience.cancel()
        with contextlib.suppress(ProcessLookupError):  # it and what it started
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output


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
        # Code is loaded from it: nobody else may be able to put any there, or another in its place.
        own = _private(folder.stat()) and not any(
            one.stat().st_mode & 0o002 and not one.stat().st_mode & stat.S_ISVTX
            for one in folder.resolve().parents
        )
        if own and os.access(folder, os.W_OK | os.X_OK):
            return contextlib.nullcontext(str(folder))
    return tempfile.TemporaryDirectory(prefix="econv-")


def _private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
