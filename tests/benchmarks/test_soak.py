"""benchmarks/soak.py: what grows is noticed, and what fills up and stays is not."""

import random

import pytest

soak = pytest.importorskip("soak", reason="no benchmarks beside the tests")


def samples(megabytes, held):
    return [
        {"seconds": n, "megabytes": megabytes(n), "held": {"econv.x": held(n)}} for n in range(60)
    ]


def test_memory_that_grows_after_the_warm_up_is_noticed(monkeypatch):
    flat = samples(lambda n: 300 + min(n, 15) * 20, lambda n: min(n, 18))
    assert list(soak.growing(flat)) == []
    (line,) = soak.growing(samples(lambda n: 300 + 5 * n, lambda n: 3))
    assert line.startswith("memory grew from 4")
    (line,) = soak.growing(samples(lambda n: 300, lambda n: n))
    assert line == "econv.x grew from 20 to 40 to 59"
    for most, count in ((59, 0), (58, 1)):  # what fills up may, as far as it is bounded
        monkeypatch.setitem(soak.BOUNDED, "econv.x", most)
        assert len(list(soak.growing(samples(lambda n: 300, lambda n: n)))) == count
    assert set(soak.BOUNDED) <= {*soak.containers(), "econv.x"}
    with pytest.raises(ValueError, match="at least 9 samples"):
        list(soak.growing(flat[:8]))


def test_every_engine_takes_its_turn_and_agrees_with_dense():
    draw = random.Random(0)
    ran = {soak.step(draw, compare=True) for _ in range(40)}
    assert "dense" in ran
    assert any(name.startswith("spectral/") for name in ran)


def test_what_modules_hold_is_counted(monkeypatch):
    import econv.basis

    before = soak.containers()
    assert "econv.basis._filter_basis" not in before  # has a largest size
    assert "econv.basis._digested" not in before  # holds nothing that nobody else does
    monkeypatch.setattr(econv.basis, "_kept", {"x": 1}, raising=False)
    assert soak.containers() == {**before, "econv.basis._kept": 1}


def test_a_run_ends_in_time_and_says_what_grew(monkeypatch, tmp_path, capsys):
    clock = iter(range(10**6))
    monkeypatch.setattr(soak.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(soak, "step", lambda draw, compare: "dense")
    monkeypatch.setattr(soak.soak, "__defaults__", (0, soak.step))
    memory = iter(range(0, 10**6, 10))
    monkeypatch.setattr(soak, "resident", lambda: float(next(memory)))
    place = tmp_path / "soak.json"
    assert soak.main(["--seconds", "100", "--json", str(place)]) == 1
    assert "memory grew from" in capsys.readouterr().out
    assert "memory grew from" in place.read_text()
    monkeypatch.setattr(soak, "resident", lambda: 300.0)
    assert soak.main(["--seconds", "100"]) == 0
    assert " steps in 100 s: dense " in capsys.readouterr().out
