"""Engines that seem to take a given time, by a clock that only they move."""

from __future__ import annotations

from econv.engines import choice
from econv.engines.dense import Dense


class Clock:
    """Stands for the module ``time``."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Fake:
    """The dense engine under any name, at any speed."""

    fuses = False

    def __init__(self, name, seconds, clock, error=None, reason=None):
        self.name, self.seconds, self.clock = name, seconds, clock
        self.error, self.reason = error, reason
        self.compiled = name != "dense"
        self.calls = 0

    def why_not(self, problem):
        return self.reason

    def run(self, problem, x, weight, bias=None, prologue=None):
        self.calls += 1
        self.clock.now += self.seconds
        if self.error is not None:
            raise self.error
        return Dense().run(problem, x, weight, bias, prologue)


def installed(patch, dense=1.0, native=2.0, **options):
    """Two engines that take so many seconds, on a clock of theirs; all problems are measured.

    ``patch`` is a `pytest.MonkeyPatch`; options are those of the second.
    """
    clock = Clock()
    made = [Fake("dense", dense, clock), Fake("spectral/native", native, clock, **options)]
    patch.setattr(choice, "time", clock)
    patch.setitem(choice._TINY, "cpu", 0)
    for one in made:
        patch.setitem(choice.ENGINES, one.name, one)
    return made
