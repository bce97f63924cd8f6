"""Times that can be compared: whatever else the machine does meets all that run in turns."""

from __future__ import annotations

import time
from collections.abc import Callable


def in_turns(
    runs: dict[str, Callable[[], object]], repeats: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each, in one process, each as often first as any other."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(-warm_up, repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = time.perf_counter()
            runs[name]()
            if repeat >= 0:
                times[name].append(time.perf_counter() - start)
    return times
