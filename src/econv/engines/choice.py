"""Which engine runs a problem: the one that was asked for, or the one that was faster here.

At a problem's first call ``"auto"`` times the engines that can run it, as cuDNN's benchmark mode
does, and remembers. Two times are kept of each: that of a call from Python, and that of the
device alone, which is what counts in compiled graphs and in CUDA graphs. A short `rule` decides
where nothing may be measured.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from econv.engines import dense
from econv.engines.problem import Problem, Weight
from econv.engines.registry import ENGINES, Engine, check_name, first_able
from econv.files import atomic, cache_folder

__all__ = [
    "Times",
    "choose",
    "engine",
    "keep",
    "kept",
    "may_measure",
    "measured",
    "note",
    "noted",
    "resolve",
]

_log = logging.getLogger("econv.engines")

_TINY = {"cpu": 20_000_000, "cuda": 2_000_000_000}
"""Multiplications of the dense engine below which measuring takes longer than it can save."""


_MOST_SIZES = 16  # of one convolution that are measured; later ones run as the largest did


class Times(NamedTuple):
    """Seconds that a problem took."""

    call: float
    """From Python, until the result is there."""
    device: float
    """The device's own work."""


# For the whole process, as torch's own switches are: what a compiler can follow and guard.
_names: list[str] = []
_measuring: list[bool] = []
_lists: list[list[str]] = []


def resolve(name: str) -> str:
    """The engine that a layer's own choice stands for here: its name, or ``"auto"``."""
    if name != "auto":
        return name
    return _names[-1] if _names else "auto"


def note(ran: str) -> None:
    """Tell the blocks around what ran."""
    for found in _lists:
        found.append(ran)


@contextlib.contextmanager
def engine(name: str = "auto", measure: bool = True) -> Iterator[list[str]]:
    """Choose, and watch, the engine of the convolutions that run inside the block.

    The name holds for all layers that leave the choice open (``engine="auto"``). What the block
    gives is a list to which every convolution adds what ran it: ``"dense"``,
    ``"spectral/torch"``, ``"spectral/native"``, ``"spectral/triton"`` or ``"spectral/hopper"``;
    after the last two there may be ``"+norm+relu"``, where the kernels did these two as well.
    Compiled and exported passes add nothing. Blocks hold for all threads.

    Args:
        name: ``"auto"``, ``"dense"``, ``"spectral"`` or one of the names above.
        measure: whether ``"auto"`` may time engines; if not, a rule decides.

    >>> import econv, torch
    >>> layer = econv.GroupConv2d(1, 1, "p8")
    >>> with econv.engine("dense") as ran:
    ...     _ = layer(torch.randn(1, 8, 9, 9))
    >>> ran
    ['dense']
    """
    _names.append(check_name(name))
    _measuring.append(measure)
    try:
        with noted() as ran:
            yield ran
    finally:
        _names.pop()
        _measuring.pop()


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Watch what :func:`engine` tells of; the choice is that of the blocks around."""
    ran: list[str] = []
    _lists.append(ran)
    try:
        yield ran
    finally:
        _lists[:] = [found for found in _lists if found is not ran]


def choose(problem: Problem, name: str, learned: Tensor) -> Engine:
    """The engine for a problem; ``name`` as `resolve` gives it."""
    if name != "auto":
        return first_able(name, problem)
    alone = problem.context == "traced" or _capturing(problem.device)
    key = (problem, alone, may_measure())
    found = _memory.get(key)
    if found is None:
        found = _decide(problem, alone, learned)
        if not (alone and problem.context == "eager"):  # a captured step may be measured later
            _memory[key] = found
    return found


_memory: dict[tuple[Problem, bool, bool], Engine] = {}
_decided: dict[str, str] = {}
_failed: dict[tuple[str, str], str] = {}
_sizes: dict[tuple[Problem, bool], dict[int, str]] = {}
"""Of a convolution what was decided, by the work of each size that was measured."""
_lock = threading.RLock()


def candidates(problem: Problem) -> list[Engine]:
    """What ``"auto"`` chooses from: the dense engine, and the first compiled one that can run."""
    found = [ENGINES["dense"]]
    for other in ENGINES.values():
        compiled = other.name.startswith("spectral/") and other.name != "spectral/torch"
        failed = (other.name, problem.convolution.name) in _failed
        if compiled and not failed and other.why_not(problem) is None:
            return [*found, other]
    return found


def _decide(problem: Problem, alone: bool, learned: Tensor) -> Engine:
    able = {one.name: one for one in candidates(problem)}
    if len(able) == 1:
        return ENGINES["dense"]
    plain = problem.context in ("eager", "traced")
    if not (plain and may_measure()) or problem.multiplications < _TINY[problem.device.type]:
        return rule(problem, list(able.values()), alone)
    key = f"{'device' if alone else 'call'}: {_text(problem)}"
    if _decided.get(key) in able:
        return able[_decided[key]]
    shapeless = problem._replace(batch=0, height=0, width=0)
    sizes = _sizes.setdefault((shapeless, alone), {})
    if len(sizes) >= _MOST_SIZES:
        return able.get(sizes[max(sizes)], ENGINES["dense"])
    capturing = _capturing(problem.device)
    with _lock:
        times = measured(problem, learned.dtype, may_run=not capturing) or {}
        if not (alone or capturing):
            _warm(problem, learned.dtype, times)
    usable = {n: t[int(alone)] for n, t in times.items() if n in able}
    best = min(usable, key=lambda n: usable[n]) if usable else ""
    if not usable or not math.isfinite(usable[best]):
        return rule(problem, list(able.values()), alone)
    _decided[key] = sizes[problem.multiplications] = best
    others = ", ".join(f"{n} {1e3 * t:.3g} ms" for n, t in usable.items())
    _log.info("%s: %s (%s)", problem, best, others)
    return able[best]


def rule(problem: Problem, able: list[Engine], alone: bool) -> Engine:
    """Which engine is faster as a rule, where nothing is measured.

    On a CPU the compiled kernel wins but for the smallest layers. On a GPU `conv2d` is hard to
    beat with few taps, and a call from Python has to be worth more launches.
    """
    if problem.context == "watched" or len(able) == 1:
        return able[0]
    basis = problem.convolution.basis
    if problem.device.type == "cpu":
        wins = problem.multiplications >= 100_000 and basis.group.order > 2
    else:
        wins = basis.size >= 5 and problem.multiplications >= (1e9 if alone else 1e11)
    return able[-1 if wins else 0]


def failed(problem: Problem, one: Engine, error: Exception) -> None:
    """Never choose an engine for a convolution again, and say so once."""
    key = (one.name, problem.convolution.name)
    if key not in _failed:
        _failed[key] = reason = f"{type(error).__name__}: {str(error).strip()[:500]}"
        _log.warning("%s failed on %s and is not chosen again: %s", one.name, problem, reason)
    _memory.clear()


def kept() -> dict[str, str]:
    """What ``"auto"`` has decided by measuring, as text: for checkpoints and records."""
    return dict(sorted(_decided.items()))


def keep(decided: dict[str, str]) -> None:
    """Decide as before, where the engines can run: a resumed run repeats to the last bit."""
    _decided.update({str(key): str(name) for key, name in decided.items() if name in ENGINES})
    _memory.clear()


def may_measure() -> bool:
    """Whether engines may be timed here and now."""
    if os.environ.get("ECONV_MEASURE") == "0" or (_measuring and not _measuring[-1]):
        return False
    return not torch.are_deterministic_algorithms_enabled()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Measuring


def measured(problem: Problem, dtype: torch.dtype, may_run: bool = True) -> dict[str, Times] | None:
    """The times of the candidates: remembered, shared by the first process, or measured now."""
    memory, text = _Disk.of(problem.device), _text(problem)
    names = {one.name for one in candidates(problem)}
    found = memory.times.get(text)
    store = _store()
    first = store is None or torch.distributed.get_rank() == 0
    if not first and may_run and text not in memory.told:
        memory.told[text] = _shared(store, text)
    if not first and memory.told.get(text):
        return memory.told[text]
    if found is None or not names <= found.keys():
        if not may_run or not first:
            return None
        found = _measure(problem, dtype)
        if found and all(math.isfinite(times.call) for times in found.values()):
            memory.add(text, found)
        else:
            memory.times[text] = found
    if store is not None and first:  # what it remembers, too: others may have to wait for it
        store.set(f"econv {text}", json.dumps(found))
    return found


def _measure(problem: Problem, dtype: torch.dtype) -> dict[str, Times]:
    """Time the candidates, one after the other, on numbers of their own."""
    found: dict[str, Times] = {}
    _measured_here.add(_text(problem))
    eager = problem._replace(context="eager")
    with _disable_current_modes(), torch.inference_mode(False), _no_autocast(problem.device):
        for one in candidates(problem):
            try:
                found[one.name] = _time(_pass(one, eager, dtype), problem.device)
            except (torch.OutOfMemoryError, MemoryError):
                found[one.name] = Times(math.inf, math.inf)
            except Exception as error:
                failed(problem, one, error)
        if problem.device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _warm(problem: Problem, dtype: torch.dtype, times: dict[str, Times]) -> None:
    """Run once what a CUDA graph that is captured later would take, so that it is compiled then.

    Times that were read from the disk have compiled nothing in this process.
    """
    if problem.device.type != "cuda" or _text(problem) in _measured_here or not times:
        return
    _measured_here.add(_text(problem))
    best = min(times, key=lambda name: times[name].device)
    if best != min(times, key=lambda name: times[name].call):
        with _disable_current_modes(), torch.inference_mode(False), _no_autocast(problem.device):
            _pass(ENGINES[best], problem._replace(context="eager"), dtype)()


_measured_here: set[str] = set()


def _pass(one: Engine, problem: Problem, dtype: torch.dtype) -> Callable[[], None]:
    """A forward pass, and a backward pass where gradients follow."""
    conv, device = problem.convolution, problem.device
    generator = torch.Generator(device).manual_seed(0)
    layout = torch.channels_last if problem.channels_last else torch.contiguous_format
    channels = sum(part.fields * conv.width(part.kind) for part in conv.parts)

    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    images = drawn((problem.batch, channels, problem.height, problem.width), problem.dtype)
    x = images.contiguous(memory_format=layout).requires_grad_(problem.to_input)
    tables = [
        torch.tensor(array, device=device, dtype=dtype if array.dtype.kind == "f" else None)
        for array in dense.tables(conv).values()
    ]
    shape: tuple[int, ...] = (
        conv.out_fields * (2 if conv.target == "vector" else 1),
        channels // conv.groups,
    )
    if conv.parts[0].kind == "regular":
        shape = (shape[0], conv.parts[0].fields // conv.groups, conv.basis.group.order)
    learned = drawn((*shape, len(conv.basis.operators)), dtype).requires_grad_(problem.to_weight)
    weight = Weight(learned, tuple(tables))
    wanted = [t for t in (x, learned) if t.requires_grad]
    gradient: list[Tensor] = []

    def run() -> None:
        with torch.set_grad_enabled(bool(wanted)):
            y = one.run(problem, x, weight)
            if wanted:
                if not gradient:
                    gradient.append(torch.empty_like(y).normal_(generator=generator))
                torch.autograd.grad(y, wanted, gradient[0])

    return run


_SECONDS = 0.05  # of timing, at most, of each engine


def _time(run: Callable[[], None], device: torch.device) -> Times:
    def waited() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    waited()  # compiles, and makes what is made once
    calls = [waited()]
    while sum(calls) < _SECONDS and len(calls) < 10:
        calls.append(waited())
    if device.type != "cuda":
        return Times(min(calls), min(calls))
    # The queue waits while Python fills it: what is timed is the device's work alone.
    several = max(1, min(10, int(_SECONDS / min(calls))))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in (10**8, 10**9):
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(several):
            run()
        end.record()
        late = start.query()
        torch.cuda.synchronize(device)
        if not late:
            break
    return Times(min(calls), start.elapsed_time(end) / several / 1e3)


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False)


# Remembering


def _text(problem: Problem) -> str:
    """A problem as a key that holds in every process."""
    threads = f", {torch.get_num_threads()} threads" if problem.device.type == "cpu" else ""
    passes = f"{int(problem.to_input)}{int(problem.to_weight)}"
    sizes = f"{problem.batch}×{problem.height}×{problem.width}"
    layout = "last" if problem.channels_last else "first"
    return f"{problem.convolution.name} {sizes} {problem.dtype} {layout} {passes}{threads}"


class _Disk:
    """What was measured on one kind of device, in a file that any process may replace.

    A file that cannot be read, or was damaged, is as good as none; one that cannot be written is
    not. Two processes may write at once: the last one's is kept whole.
    """

    _all: ClassVar[dict[str, _Disk]] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times = self._read()
        self.told: dict[str, dict[str, Times] | None] = {}  # by the first of several processes

    @classmethod
    def of(cls, device: torch.device) -> _Disk:
        name = platform.processor() or platform.machine()
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        name = re.sub(r"[^\w.]+", "-", f"{name}-{_versions()}-{os.environ.get('ECONV_CACHE', '')}")
        if name not in cls._all:
            cls._all[name] = cls(cache_folder() / "choices" / f"{name}.json")
        return cls._all[name]

    def _read(self) -> dict[str, dict[str, Times]]:
        found: dict[str, dict[str, Times]] = {}
        try:
            for text, times in json.loads(self.path.read_text(encoding="utf-8")).items():
                each = {name: Times(*map(float, pair)) for name, pair in times.items()}
                if all(0 < seconds < math.inf for pair in each.values() for seconds in pair):
                    found[text] = each
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}
        return found

    def add(self, text: str, times: dict[str, Times]) -> None:
        self.times[text] = times
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.times = {**self._read(), **self.times}
            with atomic(self.path) as temporary:
                temporary.write_text(json.dumps(self.times), encoding="utf-8")


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = [str(torch.__version__)]
    for name in ("triton", "econv"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(version(name))
    return "-".join(found)


_WAIT = 120  # seconds for the first process to measure


def _store() -> Any:
    """Where processes that train together leave word for each other."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def _shared(store: Any, text: str) -> dict[str, Times] | None:
    """What the first process measured; nothing if it does not meet the problem for long."""
    from datetime import timedelta

    key = f"econv {text}"
    try:
        store.wait([key], timedelta(seconds=_WAIT))
        return {name: Times(*pair) for name, pair in json.loads(store.get(key)).items()}
    except (RuntimeError, ValueError):
        _log.warning("the first process has measured nothing for %s: a rule decides", text)
        return None
