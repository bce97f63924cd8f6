"""Which engine runs a problem: the one that was asked for, or the one that was faster here.

At a problem's first call ``"auto"`` times the engines that can run it, as cuDNN's benchmark mode
does, and remembers. Three times are kept of each: that of a call from Python, that of the device
alone, which counts in CUDA graphs, and that of Python alone, of which a part counts in compiled
graphs, too. A short `rule` decides where nothing may be measured.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from econv.engines import dense
from econv.engines.problem import Engine, Problem, Prologue, Weight, times
from econv.engines.registry import ENGINES, check_name, first_able
from econv.engines.spectral import operator
from econv.files import cache_folder, processor_name, write_atomically
from econv.gpu.devices import tf32_allowed
from econv.tensors import undisturbed

__all__ = ["Times", "choose", "engine", "keep", "kept", "measured", "noted", "resolve"]

_log = logging.getLogger("econv.engines")
_T = TypeVar("_T")

_TINY = {"cpu": 20_000_000, "cuda": 2_000_000_000}
"""Multiplications of the dense engine below which measuring takes longer than it can save."""

_MOSTLY_FILTERS = 64
"""On a CPU, where dense filters are so many times as large as the maps, they would be made, for a
measurement, in vain."""

_SHARE_OF_HOST = 0.5
"""How much of Python's time for the launches of a spectral engine counts in a compiled graph: a
network waits for it, or for the device."""


_MOST_SIZES = 16  # of one convolution that are measured; later ones run as the largest did


class Times(NamedTuple):
    """Seconds that a problem took."""

    call: float
    """From Python, until the result is there."""
    device: float
    """Of the device alone."""
    host: float = 0.0
    """Of Python alone, which launches what a GPU then does."""


_KINDS = ("call", "device", "traced")


# For the whole process, as torch's own switches are: what a compiler can follow and guard.
_blocks: list[tuple[str, bool]] = []  # a name, and whether to measure
_lists: list[list[str]] = []


def resolve(name: str) -> str:
    """The engine that a layer's own choice stands for here: its name, or ``"auto"``."""
    return _blocks[-1][0] if name == "auto" and _blocks else name


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
    then ``"+norm+relu"`` where kernels did these two as well. Compiled and exported passes add
    nothing. Blocks hold for all threads.

    Args:
        name: ``"auto"``, ``"dense"``, ``"spectral"`` or one of the names above.
        measure: whether ``"auto"`` may time engines; if not, a rule decides.

    Raises:
        ValueError: for an unknown name; and at the layer, inside the block, for an engine that
            cannot run there.

    >>> import econv, torch
    >>> layer = econv.GroupConv2d(1, 1, "p8")
    >>> with econv.engine("dense") as ran:
    ...     _ = layer(torch.randn(1, 8, 9, 9))
    >>> ran
    ['dense']
    """
    with during(_blocks, (check_name(name), measure)), noted() as ran:
        yield ran


def noted() -> AbstractContextManager[list[str]]:
    """Watch what :func:`engine` tells of; the choice is that of the blocks around."""
    return during(_lists, [])


@contextlib.contextmanager
def during(those: list[_T], one: _T) -> Iterator[_T]:
    """Add one to a list for as long as a block lasts; those of threads end in any order."""
    those.append(one)
    try:
        yield one
    finally:
        those[:] = [other for other in those if other is not one]


def choose(problem: Problem) -> Engine:
    """The engine for a problem: of the name that was asked for, or by what ``"auto"`` knows."""
    if problem.named:
        return first_able(problem.engine, problem)
    kind = _kind(problem)
    circumstances = (may_measure(), _tf32(problem), _store() is not None, len(operator.FAILED))
    # By its name: what is remembered of a convolution must not outlive its layers with its plans.
    key = (problem.convolution.name, *problem[1:], kind, circumstances)
    found = _memory.get(key)
    if found is None:
        found = _decide(problem, kind)
        if len(_memory) >= _MOST_MEMORIES:
            _memory.clear()
        if not (kind == "device" and problem.context == "eager"):  # captured: measured later
            _memory[key] = found
    return found


_MOST_MEMORIES = 4096  # of each kind, in the file too
_memory: dict[tuple[Any, ...], Engine] = {}  # of calls, for as long as nothing changes
_decided: dict[str, str] = {}  # by measuring, here or where it was `kept`
_times: dict[Path, dict[str, dict[str, Times]]] = {}  # by file: read, and measured since
_lock = threading.RLock()


def candidates(problem: Problem) -> list[Engine]:
    """What ``"auto"`` chooses from: the dense engine, and the first compiled one that can run."""
    for one in ENGINES.values():
        failed = (one.name, problem.convolution.name) in operator.FAILED
        if one.compiled and not failed and one.why_not(problem) is None:
            return [ENGINES["dense"], one]
    return [ENGINES["dense"]]


def _kind(problem: Problem) -> str:
    """What counts: the time of a call, of the device alone, or of a traced graph's launches."""
    if problem.context != "traced":
        return "device" if _capturing(problem.device) else "call"
    inductor: Any = sys.modules.get("torch._inductor.config")
    return "device" if inductor and inductor.triton.cudagraphs else "traced"


def _decide(problem: Problem, kind: str) -> Engine:
    able = {one.name: one for one in candidates(problem)}
    # A captured step takes what its first runs took: no other engine has been compiled.
    by_rule = rule(problem, list(able.values()), problem.context == "traced")
    small = problem.multiplications < _TINY.get(problem.device.type, math.inf)
    small |= problem.device.type == "cpu" and problem.filters > _MOSTLY_FILTERS * problem.maps
    if small or problem.context not in ("eager", "traced") or not may_measure():
        return by_rule
    text, store, quiet = _text(problem), _store(), _capturing(problem.device)
    keys = {one: f"{one}: {text}" for one in _KINDS}
    with _lock:
        if store is None or torch.distributed.get_rank() == 0:
            names = _settled(problem, keys, kind, able)
            if store is not None and not quiet:
                known = {key: name for key, name in names.items() if name}
                store.set(f"econv {keys[kind]}", json.dumps(known))
        else:
            if len(able) > 1 and not quiet:
                _hear(store, keys[kind])
            names = _decided
        best = {one: able.get(names.get(key, "")) for one, key in keys.items()}
        later = best["device"]
        if problem.device.type == "cuda" and kind == "call" and later not in (None, best["call"]):
            # A CUDA graph captured later takes it, and cannot compile it. What fails is told then.
            with undisturbed(problem.device), contextlib.suppress(Exception):
                for fused in {False, later.fuses and problem.convolution.groups == 1}:
                    _pass(later, problem, fused)()
    return best[kind] or by_rule


def _settled(
    problem: Problem, keys: dict[str, str], kind: str, able: dict[str, Engine]
) -> dict[str, str]:
    """What runs, as a call and in graphs, as far as it is known; one of them is written down."""
    if len(able) == 1:
        return dict.fromkeys(keys.values(), "dense")
    key = keys[kind]
    new = _decided.get(key) not in able
    if new and len(_decided) >= _MOST_MEMORIES:
        return {}  # a rule decides
    alike = [one for one in _decided if one.rpartition(" ")[0] == key.rpartition(" ")[0]]
    if new and len(alike) >= _MOST_SIZES:
        largest = _decided[max(alike, key=lambda one: (_pixels(one), one))]
        _decided[key] = largest if largest in able else "dense"
        new = False
    times = measured(problem, may_run=new and not _capturing(problem.device))
    usable = {n: pair for n, pair in times.items() if n in able and math.isfinite(pair.call)}
    counts = {
        name: {
            "call": t.call,
            "device": t.device,
            "traced": t.device + _SHARE_OF_HOST * t.host * (name != "dense"),
        }
        for name, t in usable.items()
    }
    best = {one: min(counts, key=lambda n: counts[n][one], default="") for one in keys}
    if new and usable:
        _decided[key] = best[kind]
        others = ", ".join(f"{n} {1e3 * found[kind]:.3g} ms" for n, found in counts.items())
        _log.info("%s: %s (%s)", problem, _decided[key], others)
    return {key: _decided.get(key, best[one]) for one, key in keys.items()}


def rule(problem: Problem, able: list[Engine], device_only: bool) -> Engine:
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
        wins = basis.size >= 5 and problem.multiplications >= (1e9 if device_only else 1e11)
    return able[-1 if wins else 0]


def kept() -> dict[str, str]:
    """What ``"auto"`` has decided by measuring, as text: for checkpoints and records."""
    return dict(sorted(_decided.items()))


def keep(decided: dict[str, str]) -> None:
    """Decide as before, where the engines can run: a resumed run repeats to the last bit."""
    _decided.update({str(key): str(name) for key, name in decided.items() if name in ENGINES})
    _memory.clear()
    _kept[0] = hashlib.sha256(json.dumps(kept()).encode()).hexdigest()[:16]


_kept = [""]


def traced_name(name: str) -> str:
    """``"auto"`` with what else decides, for graphs: compilers keep them on disk by such words."""
    if name != "auto":
        return name
    by_rule = ":rule" if _blocks and not _blocks[-1][1] else ""
    return f"auto:{_kept[0]}{by_rule}"


def may_measure() -> bool:
    """Whether engines may be timed here and now."""
    if os.environ.get("ECONV_MEASURE") == "0" or (_blocks and not _blocks[-1][1]):
        return False
    return not torch.are_deterministic_algorithms_enabled()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Measuring


def measured(problem: Problem, may_run: bool = True) -> dict[str, Times]:
    """The times of the candidates: remembered, or measured now; nothing where that may not be.

    What was measured on one kind of device is in a file that any process may replace. One that
    cannot be read, or was damaged, is as good as none; one that cannot be written is not. Two
    processes may write at once: the last one's is kept whole.
    """
    path, text = cache_folder() / "choices" / _file(problem.device), _text(problem)
    if path not in _times:
        _times[path] = _read(path)
    found = _times[path].get(text, {})
    if {one.name for one in candidates(problem)} <= found.keys():
        return found
    if not may_run:
        return {}
    found = _times[path][text] = _measure(problem)
    if found and all(math.isfinite(times.call) for times in found.values()):
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            every = {**_read(path), **_times[path]}
            _times[path] = dict([*every.items()][-_MOST_MEMORIES:])
            write_atomically(path, json.dumps(_times[path]).encode())
    return found


def _read(path: Path) -> dict[str, dict[str, Times]]:
    found: dict[str, dict[str, Times]] = {}
    try:
        for text, times in json.loads(path.read_text(encoding="utf-8")).items():
            each = {name: Times(*map(float, three)) for name, three in times.items()}
            if all(min(t[:2]) > 0 and max(t) < math.inf and t.host >= 0 for t in each.values()):
                found[text] = each
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return found


def _measure(problem: Problem) -> dict[str, Times]:
    """Time the candidates, one after the other; nothing if the dense engine raises an error."""
    found: dict[str, Times] = {}
    with undisturbed(problem.device):
        for one in candidates(problem):
            try:
                found[one.name] = _time(_pass(one, problem), problem.device)
            except (torch.OutOfMemoryError, MemoryError):
                found[one.name] = Times(math.inf, math.inf)
            except Exception as error:
                if one.name == "dense":
                    _log.info("%s cannot be measured: %r", problem, error)
                    return {}
                operator.give_up(one.name, problem.convolution.name, problem, error)
        if problem.device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _pass(one: Engine, problem: Problem, fused: bool = False) -> Callable[[], None]:
    """A forward pass, and a backward pass where gradients follow, on numbers of its own."""
    problem = problem._replace(context="eager")
    conv, device, into = problem.convolution, problem.device, problem.convolution.channels[0]
    last = torch.channels_last if conv.dimension == 2 else torch.channels_last_3d
    layout = last if problem.channels_last else torch.contiguous_format
    shape = (problem.batch, into, *problem.sizes)
    x = torch.empty(shape, dtype=problem.dtype, device=device, memory_format=layout)
    each = conv.dimension if conv.target == "vector" else 1
    maps = (conv.out_fields * each, into // conv.groups)
    size = (*maps, len(conv.basis.operators))
    learned = torch.empty(size, dtype=problem.weight_dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for tensor in (x, learned):
        tensor.normal_(generator=generator)
    if conv.parts[0].kind == "regular":
        learned = learned.unflatten(1, (-1, conv.basis.group.order))
    tables = [torch.tensor(array, device=device) for array in dense.tables(conv).values()]
    weight = Weight(learned, tuple(t.to(learned) if t.is_floating_point() else t for t in tables))
    needed = ((x, problem.to_input), (learned, problem.to_weight))
    wanted = [tensor.requires_grad_() for tensor, need in needed if need]
    prologue = Prologue(torch.ones(3, conv.parts[0].fields, device=device)) if fused else None

    def run() -> None:
        with torch.set_grad_enabled(bool(wanted)):
            y = one.run(problem, x, weight, None, prologue)
            if wanted:
                torch.autograd.grad(y, wanted, y.detach())  # a gradient as good as any

    return run


_SECONDS = 0.05  # of timing, at most, of each engine


def _time(run: Callable[[], None], device: torch.device) -> Times:
    def waited() -> float:
        start = time.perf_counter()
        run()
        torch.get_device_module(device).synchronize(device)
        return time.perf_counter() - start

    waited()  # compiles, and makes what is made once
    calls = [waited()]
    while sum(calls) < _SECONDS and len(calls) < 10:
        calls.append(waited())
    if device.type != "cuda":
        return Times(min(calls), min(calls))
    several = max(1, min(10, int(_SECONDS / min(calls))))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The queue waits, for twice as long as Python may fill it: the device's work alone is timed.
    torch.cuda._sleep(10**8 + int(4e9 * min(several * min(calls), 2 * _SECONDS)))
    start.record()
    begin = time.perf_counter()
    for _ in range(several):
        run()
    host = (time.perf_counter() - begin) / several
    end.record()
    torch.cuda.synchronize(device)
    return Times(min(calls), start.elapsed_time(end) / several / 1e3, host)


# Remembering


def _text(problem: Problem) -> str:
    """A problem as a key that holds in every process; the size is last."""
    passes = f"{int(problem.to_input)}{int(problem.to_weight)}"
    layout = "last" if problem.channels_last else "first"
    words = f"{problem.convolution.name} {problem.dtype} {problem.weight_dtype} {layout} {passes}"
    if problem.device.type == "cpu":
        words += f", {torch.get_num_threads()} threads"
    sizes = times((problem.batch, *problem.sizes))
    return f"{words}{', TF32' * _tf32(problem)}, {sizes}"


def _pixels(key: str) -> int:
    return math.prod(map(int, key.rpartition(" ")[2].split("×")))


def _tf32(problem: Problem) -> bool:
    """Whether a GPU may round products of float32."""
    rounds = problem.device.type == "cuda" and problem.dtype == torch.float32
    return rounds and tf32_allowed()


@functools.cache
def _file(device: torch.device) -> str:
    """A name for a kind of device, and the versions of what runs there."""
    words = [torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()]
    words.append(str(torch.__version__))
    for name in ("triton", "econv"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            words.append(metadata.version(name))
    return re.sub(r"[^\w.]+", "-", "-".join(words)) + ".json"


# Several processes

_WAIT = 60  # seconds for the first process to decide
_silent: list[str] = []  # what it was waited for in vain


def _store() -> Any:
    """Where processes that train together leave word for each other."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not together or torch.distributed.get_world_size() == 1:
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def _hear(store: Any, text: str) -> None:
    """Decide as the first process did; if it ever keeps silent for long, ask no more."""
    if _silent:
        return
    try:
        store.wait([f"econv {text}"], timedelta(seconds=_WAIT))
        _decided.update(json.loads(store.get(f"econv {text}")))
    except (RuntimeError, ValueError):
        _silent.append(text)
        _log.warning("the first process has not decided on %s: from now on a rule decides", text)
