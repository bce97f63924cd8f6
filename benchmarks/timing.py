"""Times that can be compared: interleaved in one process, or each isolated.

Interleaved, whatever else the machine does meets all alike. Isolated, each runs at the clock that
it would run at in training: a GPU that reaches its power limit lowers its clock, and raises it
again only some tenths of a second later.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

Run = Callable[[], object]

QUEUED = 5  # passes of one measurement on a GPU
ISOLATED = 1.0  # seconds in which one thing runs alone


def interleaved(runs: Mapping[str, Run], repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each, each as often first as any other."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(-warm_up, repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = time.perf_counter()
            runs[name]()
            if repeat >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def medians(
    runs: Mapping[str, Run], device: str, repeats: int = 30, seconds: float = 20.0
) -> dict[str, Any]:
    """Median and least seconds of each, interleaved; on a GPU several passes are queued."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    stop = time.perf_counter() + seconds
    for repeat in itertools.count():
        if repeat >= repeats or (repeat >= 3 and time.perf_counter() > stop):
            break
        for name in runs if repeat % 2 else reversed(list(runs)):
            times[name].append(timed(runs[name], device))
    return {
        "repeats": repeat,
        "median": {name: rounded(statistics.median(t)) for name, t in times.items()},
        "least": {name: rounded(min(t)) for name, t in times.items()},
    }


def isolated(
    runs: Mapping[str, Run],
    device: str = "cuda",
    seconds: float = ISOLATED,
    rounds: int = 2,
    stop: float = math.inf,
) -> dict[str, Any]:
    """Median seconds of each while nothing else runs, and the clock (MHz) and power (W) then.

    The first third of every stretch is for the clock to settle. After ``stop``, as
    `time.perf_counter` tells it, no further round begins.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    found: dict[str, Any] = {"seconds": seconds, "rounds": 0, "median": {}, "mhz": {}, "watts": {}}
    for _ in range(rounds):
        if found["rounds"] and time.perf_counter() > stop:
            break
        found["rounds"] += 1
        for name, run in runs.items():
            start, taken = time.perf_counter(), []
            while not taken or time.perf_counter() < start + seconds:
                taken.append(timed(run, device))
            times[name] += taken[len(taken) // 3 :]
            if device == "cuda":
                _clock_and_power(run, name, found)
    found["median"] = {name: rounded(statistics.median(t)) for name, t in times.items()}
    return found


def _clock_and_power(run: Run, name: str, found: dict[str, Any]) -> None:
    for _ in range(QUEUED):
        run()
    with suppress(Exception):  # pynvml may be missing, or not be allowed to tell
        found["mhz"].setdefault(name, []).append(torch.cuda.clock_rate())
        found["watts"].setdefault(name, []).append(round(torch.cuda.power_draw() / 1e3))
    torch.cuda.synchronize()


def timed(run: Run, device: str) -> float:
    """Seconds of one pass."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # the queue is not empty when the time begins
    begin.record()
    for _ in range(QUEUED):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / QUEUED


def kernels(run: Run, passes: int = QUEUED) -> dict[str, float]:
    """Microseconds of each kernel of a pass on the GPU, in all, the longest first."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(passes):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            found[event.key] = found.get(event.key, 0.0) + event.self_device_time_total / passes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def rounded(seconds: float) -> float:
    """Four digits: there are no more in any of them."""
    return float(f"{seconds:.4g}")
