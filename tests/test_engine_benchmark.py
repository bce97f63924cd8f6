"""benchmarks/engines.py: its grids, what fails in them, and the fit of the cost model."""

import itertools
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from econv.engines import ENGINES, auto

engines = pytest.importorskip("engines", reason="no benchmarks beside the tests")
cases = pytest.importorskip("engine_cases", reason="no benchmarks beside the tests")
choices = pytest.importorskip("engine_choices", reason="no benchmarks beside the tests")

TRUTH = {
    "dense": (2e-15, 3e-15, 6e-16, 3e-9, 7e-12, 1e-12, 2e-5, 3e-5, 7e-5, 1.5e-4),
    "spectral": (6e-15, 5e-15, 4e-13, 5e-13, 9e-13, 4e-12, 2e-11, 2e-5, 3e-5, 2e-4, 4e-4),
}
OF_ROLES = (3e-15, 3e-15, 2e-13, 8e-13)
TRUTH_WITH_ROLES = {
    "dense": (*TRUTH["dense"], 0, 0),
    "spectral": (*TRUTH["spectral"][:4], *OF_ROLES, *TRUTH["spectral"][4:], 3e-4, 6e-4),
}


def layer_record(case, truth, kernels=True, noise=1.0, roles=False):
    """What a GPU would tell of a layer if the cost model were right."""
    found = {"case": case._asdict(), "spectral": "spectral/triton" if kernels else "spectral/torch"}
    found["ran"] = dict.fromkeys(cases.PASSES, "dense")
    for name in cases.PASSES:
        work = choices.workload(case, name)
        device = auto.where("cuda", cases.DTYPES[case.dtype], roles)
        counts = auto.terms(work, device)
        times, graph = (
            {e: noise * float(auto.seconds(counts[e], truth[e], device, r)) for e in ENGINES}
            for r in (False, True)
        )
        if not kernels:  # which the model knows little of
            times["spectral"], graph["spectral"] = (10 * t["dense"] for t in (times, graph))
        times["auto"] = times["dense"]
        found[name] = {"median": times, "least": times, "graph": graph, "repeats": 3}
    return found


@pytest.fixture(scope="module")
def record():
    layers = [layer_record(case, TRUTH, kernels=case.kind == "group") for case in cases.cuda_grid()]
    return {"kind": "cuda", "layers": layers, "failed": []}


def test_the_grid_of_a_gpu_is_wide():
    found = cases.cuda_grid()
    assert len(set(found)) == len(found) >= 60
    assert {case.group for case in found} >= {"p1", "p2", "p4", "p6", "p8", "p12", "p16"}
    assert {case.group for case in found} >= {"p4m", "p8m"}
    assert {case.dtype for case in found} == {"bfloat16", "float16", "float32"}
    for name, least, most in (("out_fields", 2, 80), ("size", 8, 64), ("batch", 16, 512)):
        values = [getattr(case, name) for case in found]
        assert (min(values), max(values)) == (least, most)
    assert {case.stride for case in found} == {1, 2}
    assert {case.kind for case in found} == {"group", "lift"}
    assert {case.layer("meta").basis.size for case in found} == {3, 5}
    # The first third, should there be time for no more, has something of everything.
    early = found[: len(found) // 3]
    assert len({case.group for case in early}) == 9
    assert len({case.dtype for case in early}) == 3


def test_the_fit_finds_the_coefficients_that_made_a_record(record, capsys):
    found = choices.fit(record)
    assert set(found) == {"cuda, 16-bit", "cuda, 32-bit"}
    for measured in choices.measured(record):
        for replayed in (False, True):
            assert choices.losses(measured, found[measured.device], replayed).max() <= 0.01
        for engine in ENGINES:
            args = (measured.counts[engine], found[measured.device][engine], measured.device)
            error = auto.seconds(*args) / measured.times[engine] - 1
            assert np.abs(error[measured.fitted]).max() <= 0.02
    printed = capsys.readouterr().out
    table = "\n".join(line for line in printed.splitlines() if not line.startswith("#"))
    assert eval("{" + table + "}") == found  # ready to be copied


def test_the_fit_tells_launches_with_roles_from_those_without():
    few = [case for case in cases.cuda_grid() if case.dtype != "float32" and case.kind == "group"]
    layers = [layer_record(case, TRUTH_WITH_ROLES, roles=True) for case in few]
    (found,) = choices.measured({"kind": "cuda", "roles": True, "layers": layers})
    assert found.device == "hopper, 16-bit"
    fitted = choices.fitted(found)
    for replayed in (False, True):
        assert choices.losses(found, fitted, replayed).max() <= 0.01
    for engine in ENGINES:
        error = auto.seconds(found.counts[engine], fitted[engine], found.device)
        assert np.abs(error / found.times[engine] - 1).max() <= 0.02
    assert fitted["spectral"][-4:] == pytest.approx((2e-4, 4e-4, 3e-4, 6e-4), rel=0.05)


def test_records_tell_whether_warps_had_roles():
    layers = [{"kernels": {"spectral": {"forward": 1.0, "arrange": 1.0}}}, {}]
    assert not choices.had_roles({"layers": layers})
    layers.append({"kernels": {"spectral": {"forward": 1.0, "arrange_rows": 1.0}}})
    assert choices.had_roles({"layers": layers})
    assert not choices.had_roles({"layers": layers, "roles": False})
    assert choices.had_roles({"layers": [], "roles": True})


def test_the_fit_moves_on_where_times_are_not_those_of_the_model():
    """Every layer is faster or slower than the model says, by up to 8 %."""
    generator = np.random.default_rng(7)
    layers = []
    for case in cases.cuda_grid():
        if case.kind == "group" and case.dtype == "bfloat16":
            factors = {engine: generator.uniform(0.92, 1.08) for engine in ENGINES}
            truth = {e: [*(factors[e] * np.array(TRUTH[e][:-2])), *TRUTH[e][-2:]] for e in ENGINES}
            layers.append(layer_record(case, truth))
    (found,) = choices.measured({"kind": "cuda", "layers": layers})
    first = {engine: choices._coefficients(found, engine) for engine in ENGINES}
    assert choices.losses(found, first).max() > 0.1
    moved = choices.moved(found, first)
    assert choices.losses(found, moved).max() <= 0.01
    before, after = (choices.losses(found, given, True).sum() for given in (first, moved))
    assert after <= 0.5 * before


def test_losses_say_so_where_the_choice_is_wrong(record):
    found, _ = choices.measured(record)
    turned = {"dense": TRUTH["dense"], "spectral": 3 * np.array(TRUTH["spectral"])}
    assert choices.losses(found, TRUTH).max() == 0
    assert choices.losses(found, turned).max() > 0.5


def test_a_layer_without_kernels_is_dense_and_not_fitted(record):
    found, _ = choices.measured(record)
    lifts = np.array([name.startswith("lift") for name in found.names])
    assert lifts.sum() == 4
    assert not found.usable[lifts].any()
    assert not found.fitted[lifts].any()
    free = {**TRUTH, "spectral": (0.0,) * 11}
    lost = choices.losses(found, free)
    dense = found.times["dense"] / np.minimum(found.times["dense"], found.times["spectral"]) - 1
    assert (lost[lifts] == dense[lifts]).all()


def test_nonnegative_solutions_are_the_best_ones():
    optimize = pytest.importorskip("scipy.optimize")
    generator = np.random.default_rng(1)
    for _ in range(20):
        matrix = generator.normal(size=(30, 6)) * 10.0 ** generator.integers(-9, 9, 6)
        target = generator.normal(size=30)
        wanted, distance = optimize.nnls(matrix / np.linalg.norm(matrix, axis=0), target)
        found = choices.nonnegative(matrix, target)
        assert (found >= 0).all()
        assert math.isclose(np.linalg.norm(matrix @ found - target), distance, rel_tol=1e-9)
        assert ((found > 0) == (wanted > 0)).all()


def test_engines_that_differ_are_not_compared():
    case = cases.Case("p4", 1, 1, 1, 8)
    good = [torch.ones(3), torch.ones(3), torch.ones(3)]
    engines.check(case, "spectral", good, good)
    for place in range(3):
        for value in (math.nan, 1.01):
            bad = [tensor.clone() for tensor in good]
            bad[place][1] = value
            with pytest.raises(AssertionError, match=r"spectral: expected the .* to be off"):
                engines.check(case, "spectral", bad, good)


def test_what_runs_alone_has_time_to_settle(monkeypatch):
    """In bouts of six measurements, of which the first two are of another clock."""
    clock, ran, measured = itertools.count(), [], []

    def timed(run, *_):
        run()
        measured.append(len(measured) % 6 < 2)
        return 9.0 if measured[-1] else 2.0 if ran[-1] == "dense" else 1.0

    monkeypatch.setattr(engines, "timed", timed)
    monkeypatch.setattr(engines.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1500)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 700_000)
    runs = {name: partial(ran.append, name) for name in ("dense", "spectral")}
    found = engines.bouts(runs, seconds=7.0, count=2)
    assert len(measured) == 4 * 6
    assert found["median"] == {"dense": 2.0, "spectral": 1.0}
    assert found["mhz"] == {"dense": [1500] * 2, "spectral": [1500] * 2}
    assert found["watts"] == {"dense": [700] * 2, "spectral": [700] * 2}

    def missing():
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", missing)
    assert engines.bouts(runs, seconds=7.0, count=1)["median"]["dense"] == 2.0


@pytest.fixture
def grid(monkeypatch):
    """A grid for a GPU without one: three layers, of which the second fails."""
    few = [cases.Case("p4", n, n, 16, 16, dtype="bfloat16") for n in (2, 4, 8)]

    def measure(case, *_):
        if case.in_fields == 4:
            raise AssertionError("spectral: the output is off by nan")
        return layer_record(case, TRUTH)

    monkeypatch.setattr(engines, "cuda_grid", lambda: list(few))
    monkeypatch.setattr(engines, "measure", measure)
    monkeypatch.setattr(engines, "compile_beforehand", lambda jobs, seconds: {few[0]})
    monkeypatch.setattr(engines, "kernels_kept", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(auto, "has_roles", lambda device: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return few


def test_a_layer_that_fails_does_not_end_the_grid(grid, tmp_path, capsys):
    path = tmp_path / "record.json"
    engines.main(["--device", "cuda", "--grid", "--json", str(path)])
    record = json.loads(path.read_text())
    # What was not compiled beforehand comes last.
    assert [layer["case"]["in_fields"] for layer in record["layers"]] == [8, 2]
    (failed,) = record["failed"]
    assert failed["case"]["in_fields"] == 4
    assert "off by nan" in failed["error"]
    assert (record["kind"], record["device"]) == ("cuda", "a device")
    assert "1 of 3 layers failed" in capsys.readouterr().out


def test_a_grid_ends_when_its_time_is_over(grid, tmp_path):
    path = tmp_path / "record.json"
    engines.main(["--device", "cuda", "--grid", "--within", "0", "--json", str(path)])
    record = json.loads(path.read_text())
    assert record["layers"] == []
    assert [layer["error"] for layer in record["failed"]] == ["no time was left"] * 3


def test_layers_that_share_kernels_are_compiled_together():
    jobs = engines.families(cases.cuda_grid())
    assert len(jobs) <= 90
    for job in jobs:
        assert len({(c.group, c.in_fields, c.out_fields, c.dtype) for c in job.cases}) == 1
        assert all(case.kind == "group" for case in job.cases)
    for names in (("gram",), ("convolve", "adjoint")):
        listed = [case for job in jobs if job.operators == names for case in job.cases]
        assert sorted(listed) == sorted(c for c in cases.cuda_grid() if c.kind == "group")


def test_kernels_are_compiled_without_a_gpu(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = cases.Case("p1", 2, 4, 4, 8, operators="order<=0", stride=2, dtype="bfloat16")
    jobs = engines.families([case])
    assert engines.compile_beforehand(jobs, 300.0) == set()
    assert "Error" not in capsys.readouterr().out
    kept = {path.stem for path in Path(tmp_path).rglob("*.cubin")}
    assert {"analyse", "arrange", "forward", "weight_gradient", "reduce"} <= kept
    import triton

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        assert engines.kernels_kept() >= 5
    assert engines.compile_beforehand(jobs, 0.0) == {case}
    assert "not all was compiled" in capsys.readouterr().out


RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def recorded(name):
    layers = json.loads((RESULTS / f"{name}.json").read_text())["layers"]
    return [(cases.Case(**layer["case"]), layer) for layer in layers]


def test_layers_of_the_record_take_no_more_memory_and_err_little_more_than_dense():
    for case, layer in recorded("engines_cuda"):
        peak = layer["peak_bytes"]
        assert peak["spectral"] <= peak["dense"], str(case)
        for name, error in layer["errors"]["spectral"].items():
            assert error <= 1.5 * layer["errors"]["dense"][name], (str(case), name)
