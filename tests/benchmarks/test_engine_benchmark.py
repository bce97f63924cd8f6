"""benchmarks/engines.py and timing.py: what is compared, and how it is timed."""

import itertools
import json
import math
from functools import cache, partial

import pytest
import torch

engines = pytest.importorskip("engines", reason="no benchmarks beside the tests")
timing = pytest.importorskip("timing", reason="no benchmarks beside the tests")

SMALL = engines.Case("p4", 1, 1, 1, 8)


def test_engines_that_differ_are_not_compared():
    good = [torch.ones(3), torch.ones(3), torch.ones(3)]
    engines.check(SMALL, "spectral", good, good)
    for place in range(3):
        for value in (math.nan, 1.01):
            bad = [tensor.clone() for tensor in good]
            bad[place][1] = value
            with pytest.raises(AssertionError, match=r"spectral: expected the .* to be off"):
                engines.check(SMALL, "spectral", bad, good)


def test_auto_is_held_against_the_better_engine():
    assert engines.over_better({"dense": 2.0, "spectral": 1.0, "auto": 1.1}) == 1.1
    assert engines.over_better({"dense": 2.0, "spectral": 4.0, "auto": 2.0}) == 1.0


def test_the_layers_of_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(engines.LAYERS, "cpu", [SMALL, SMALL._replace(batch=2)])
    peaks = cache(partial(engines.cpu_peaks, SMALL))  # of processes that take seconds to start
    monkeypatch.setattr(engines, "cpu_peaks", lambda case: peaks())
    path = tmp_path / "found.json"
    engines.main(["--seconds", "0", "--json", str(path)])
    found = json.loads(path.read_text())
    assert [engines.Case(**layer["case"]).batch for layer in found["layers"]] == [1, 2]
    for layer in found["layers"]:
        assert layer["ran"]["dense"] == "dense"
        for name in engines.PASSES:
            assert set(layer[name]["median"]) == set(engines.MEASURED)
            assert min(layer[name]["least"].values()) > 0
    assert "dense/spectral: forward" in capsys.readouterr().out
    engines.main(["--limit", "0", "--json", str(path)])
    assert "stopped after 0 s" in capsys.readouterr().out


@pytest.fixture
def no_gpu(monkeypatch):
    """What runs on a GPU runs here: graphs and compiled layers are plain calls."""

    def here(function):
        return lambda case, device="cpu", *more: function(case, "cpu", *more)

    def settled(runs, *_, **__):
        return {"median": {name: timing.timed(run, "cpu") for name, run in runs.items()}}

    for name in ("layer", "image"):
        monkeypatch.setattr(engines.Case, name, here(getattr(engines.Case, name)))
    norm = engines.econv.GroupBatchNorm2d
    monkeypatch.setattr(engines.econv, "GroupBatchNorm2d", lambda *a, **k: norm(*a))
    monkeypatch.setattr(engines, "captured", lambda step, state: step)
    monkeypatch.setattr(engines, "isolated", settled)
    monkeypatch.setattr(engines, "medians", lambda runs, *_, **__: settled(runs))
    monkeypatch.setattr(engines, "kernels", lambda step: {"void at::f<int>(int)": 2.0, "gemm": 1.0})
    monkeypatch.setattr(torch, "compile", lambda module: module)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)


def test_what_is_told_of_a_layer_on_a_gpu(no_gpu):
    record = engines.measure(SMALL, "cuda", 0.0) | engines.beyond_time(SMALL)
    both = record["forward+backward"]
    for times in (both["graph"], both["isolated"]["median"], both["compile"]["median"]):
        assert set(times) == set(engines.MEASURED)
    assert set(record["auto_over_better"]) == {"graph", "compile"}
    assert set(record["after_norm_and_relu"]["peak_bytes"]) == {*engines.ENGINES, engines.FUSED}
    assert record["kernels"]["dense"] == {"at::f": 2.0, "gemm": 1.0}
    assert max(record["errors"]["spectral"].values()) < 1e-4
    record["auto_over_better"]["compile"] = 1.2
    assert "compile 1.20 (too much)" in engines.line(SMALL, record)


def test_what_runs_isolated_has_time_to_settle(monkeypatch):
    """In stretches of six measurements, of which the first two are of another clock."""
    clock, ran, measured = itertools.count(), [], []

    def timed(run, *_):
        run()
        measured.append(len(measured) % 6 < 2)
        return 9.0 if measured[-1] else 2.0 if ran[-1] == "dense" else 1.0

    monkeypatch.setattr(timing, "timed", timed)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) / 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1500)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 700_000)
    runs = {name: partial(ran.append, name) for name in ("dense", "spectral")}
    found = timing.isolated(runs, seconds=3.0, rounds=2)
    assert len(measured) == 4 * 6
    assert found["median"] == {"dense": 2.0, "spectral": 1.0}
    assert found["mhz"] == {"dense": [1500] * 2, "spectral": [1500] * 2}
    assert found["watts"] == {"dense": [700] * 2, "spectral": [700] * 2}

    def missing():
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", missing)
    assert timing.isolated(runs, seconds=3.0, rounds=1)["median"]["dense"] == 2.0
    assert timing.isolated(runs, seconds=3.0, rounds=3, stop=-1.0)["rounds"] == 1


def test_what_runs_interleaved_is_as_often_first_as_last():
    ran = []
    runs = {name: partial(ran.append, name) for name in "ab"}
    times = timing.interleaved(runs, repeats=4, warm_up=0)
    assert "".join(ran) == "abbaabba"
    assert {name: len(each) for name, each in times.items()} == {"a": 4, "b": 4}


def test_layers_that_take_more_memory_or_err_more_than_dense_end_the_benchmark():
    errors = {"dense": {"output": 2.0}, "spectral": {"output": 2.9}}
    good = {"case": {"group": "p8"}, "peak_bytes": {"dense": 2, "spectral": 2}, "errors": errors}
    assert engines.worse([good]) == []
    heavy = {**good, "peak_bytes": {"dense": 2, "spectral": 3}}
    wrong = {**good, "errors": {**errors, "spectral": {"output": 3.1}}}
    assert len(engines.worse([good, heavy, wrong])) == 2
    assert engines.worse([{"case": {"group": "p8"}}]) == []  # nothing measured of it
