"""The cost model of `engine="auto"` over records of benchmarks/engines.py: fit and choices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from econv.engines import ENGINES, auto
from engine_cases import DTYPES, PASSES, Case

Coefficients = dict[str, dict[str, tuple[float, ...]]]


class Measured(NamedTuple):
    """The passes of a record that one set of coefficients is for."""

    device: str  # as `auto.where` says it
    names: list[str]
    counts: dict[str, np.ndarray]  # [passes, terms] of each engine
    times: dict[str, np.ndarray]  # what a choice is judged by
    queued: dict[str, np.ndarray]  # the same without Python, on a GPU; nothing on a CPU
    usable: np.ndarray  # where the spectral engine may be chosen: it has kernels of its own there
    fitted: np.ndarray  # what the coefficients are fitted to


def workload(case: Case, name: str) -> auto.Workload:
    layer = case.layer("meta")
    shape = torch.Size((case.batch, layer.in_channels, case.size, case.size))
    return layer.workload(shape, backward=name != "forward")


def together(files: Sequence[Path]) -> dict[str, Any]:
    """Records of one kind of device as one."""
    records = [json.loads(file.read_text()) for file in files]
    kinds = sorted({record.get("kind", "cpu") for record in records})
    if len(kinds) > 1:
        raise ValueError(f"expected records of one kind of device; got {' and '.join(kinds)}")
    return {**records[0], "layers": [layer for record in records for layer in record["layers"]]}


def had_roles(record: dict[str, Any]) -> bool:
    """Whether warps had roles where they could; older records tell by the kernels that ran."""
    ran = (layer.get("kernels", {}).get("spectral", {}) for layer in record["layers"])
    return bool(record.get("roles", any("arrange_rows" in names for names in ran)))


def measured(record: dict[str, Any]) -> list[Measured]:
    """A whole record, for each set of coefficients what it is for."""
    kind, roles = record.get("kind", "cpu"), had_roles(record)
    passes: dict[str, list[tuple[dict[str, Any], Case, str]]] = {}
    for layer in record["layers"]:
        case = Case(**layer["case"])
        passes.setdefault(auto.where(kind, DTYPES[case.dtype], roles), []).extend(
            (layer, case, name) for name in PASSES
        )
    found = []
    for device, listed in passes.items():
        counts = [auto.terms(workload(case, name), device) for _, case, name in listed]
        # A GPU that others do not share gives steady times; the least of a CPU is what it can do.
        statistic = "least" if kind == "cpu" else "median"
        graphs = (
            {} if kind == "cpu" else {e: [m[n]["graph"][e] for m, _, n in listed] for e in ENGINES}
        )
        own = "spectral/native" if kind == "cpu" else "spectral/triton"
        usable = np.array([layer.get("spectral", own) == own for layer, *_ in listed])
        exact = np.array([kind != "cpu" or case.dtype == "float32" for _, case, _ in listed])
        found.append(
            Measured(
                device,
                [f"{case}, {name}" for _, case, name in listed],
                {e: np.array([several[e] for several in counts]) for e in ENGINES},
                {e: np.array([m[n][statistic][e] for m, _, n in listed]) for e in ENGINES},
                {e: np.array(times) for e, times in graphs.items()},
                usable,
                exact & usable,
            )
        )
    return found


def losses(
    found: Measured, coefficients: Mapping[str, ArrayLike], replayed: bool = False
) -> np.ndarray:
    """How much slower each choice is than the better engine: 0.05 is 5 %.

    ``replayed``: as CUDA graphs, without Python.
    """
    times = found.queued if replayed else found.times
    expected = {
        engine: auto.seconds(found.counts[engine], coefficients[engine], found.device, replayed)
        for engine in ENGINES
    }
    spectral = found.usable & (expected["spectral"] < expected["dense"])
    picked = np.where(spectral, times["spectral"], times["dense"])
    return picked / np.minimum(times["dense"], times["spectral"]) - 1


def taken(record: dict[str, Any]) -> np.ndarray:
    """How much slower ``auto`` itself was than the better engine, the choice included."""
    statistic = "least" if record.get("kind", "cpu") == "cpu" else "median"
    times = [layer[name][statistic] for layer in record["layers"] for name in PASSES]
    return np.array([each["auto"] / min(each[e] for e in ENGINES) - 1 for each in times])


def print_choices(record: dict[str, Any], coefficients: Coefficients) -> None:
    """How much slower what the cost model picks is than the better engine, over a record."""
    for found in measured(record):
        if found.device not in coefficients:
            print(f"{found.device}: no coefficients, always dense")
            continue
        for replayed in (False, True)[: 1 + bool(found.queued)]:
            lost = losses(found, coefficients[found.device], replayed)
            print(
                f"{found.device}{' as CUDA graphs' * replayed}: {(lost <= 0.05).sum()} of "
                f"{len(lost)} choices within 5 % of the better engine; the worst:"
            )
            for number in np.argsort(-lost)[:5]:
                print(f"    {lost[number]:6.1%}  {found.names[number]}")
    lost = taken(record)
    if not len(lost):
        return
    print(
        f"auto itself, as it was measured: {(lost <= 0.05).sum()} of {len(lost)} within 5 %, "
        f"{np.median(lost):.1%} slower in the median, {lost.max():.1%} at most"
    )


ENOUGH = 0.04  # a loss that need not be made smaller
SURE = 0.1  # how far apart, in logarithms, expected times are that leave no doubt
FAITH = 10  # what a time that is off by all of itself costs, in lost times
TRIALS = 20_000


def fit(record: dict[str, Any]) -> Coefficients:
    """The coefficients of the cost model, printed as `auto.COEFFICIENTS` has them."""
    table: Coefficients = {}
    for found in measured(record):
        table[found.device] = {
            engine: tuple(float(f"{value:.4g}") for value in values)
            for engine, values in fitted(found).items()
        }
        print(f'    "{found.device}": {{')
        for engine, values in table[found.device].items():
            print(f'        "{engine}": ({", ".join(f"{value:g}" for value in values)}),')
        print("    },")
        replayed = bool(found.queued)
        times = found.queued if replayed else found.times
        for engine, values in table[found.device].items():
            expected = auto.seconds(found.counts[engine], values, found.device, replayed)
            error = np.abs(expected / times[engine] - 1)[found.fitted]
            middle = np.median(error)
            print(f"# {engine}: error {middle:.2f} in the middle, {error.max():.2f} at most")
        for way, lost in enumerate(left_out(found)):
            print(
                f"# layers that the fit did not see{', as CUDA graphs' * way}: "
                f"{(lost <= 0.05).sum()} of {len(lost)} choices within 5 %, {lost.max():.1%} lost "
                f"at most, {lost.mean():.2%} in the mean"
            )
    return table


def fitted(found: Measured) -> dict[str, np.ndarray]:
    """The coefficients of one set.

    They are fitted to the relative error of the times; then the spectral ones are scaled together,
    by a few percent, so that the worst wrong choice between the engines costs least. Where that
    still costs more than it should, they are moved on in random steps, the same in every run.
    """
    start = {engine: _coefficients(found, engine) for engine in ENGINES}

    def scaled(factor: float) -> dict[str, np.ndarray]:
        return {"dense": start["dense"], "spectral": factor * start["spectral"]}

    def rank(factor: float) -> tuple[float, float, float]:
        lost = losses(found, scaled(factor))
        return float(lost.max()), float(lost.mean()), abs(np.log(factor))

    best = scaled(min(np.linspace(0.9, 1.1, 81).tolist(), key=rank))
    ways = (False, True)[: 1 + bool(found.queued)]
    if max(losses(found, best, replayed).max() for replayed in ways) > ENOUGH:
        best = moved(found, best)
    return best


def left_out(found: Measured) -> list[np.ndarray]:
    """The losses of layers, a fifth of them at a time, by coefficients fitted to the others.

    With Python and, on a GPU, without.
    """
    layers = np.arange(len(found.names)) // len(PASSES)
    fifth = layers % 5
    lost = [np.zeros(len(found.names)) for _ in range(1 + bool(found.queued))]
    for number in range(5):
        here = fifth == number
        if not here.all():
            coefficients = fitted(chosen(found, ~here))
            for way, those in enumerate(lost):
                those[here] = losses(chosen(found, here), coefficients, bool(way))
    return lost


def chosen(found: Measured, which: np.ndarray) -> Measured:
    """Some of the passes."""
    parts = {
        name: {engine: array[which] for engine, array in getattr(found, name).items()}
        for name in ("counts", "times", "queued")
    }
    names = [name for name, kept in zip(found.names, which, strict=True) if kept]
    usable, exact = found.usable[which], found.fitted[which]
    return found._replace(names=names, usable=usable, fitted=exact, **parts)


def moved(found: Measured, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Coefficients near the given ones whose wrong choices cost less, with Python and without."""
    generator = np.random.default_rng(0)
    ways = (False, True)[: 1 + bool(found.queued)]
    first = np.concatenate([start[engine] for engine in ENGINES])
    sizes = [len(start[engine]) for engine in ENGINES]

    def badness(shift: np.ndarray) -> float:
        parts = np.split(first * np.exp(shift), sizes[:1])
        given = dict(zip(ENGINES, parts, strict=True))
        return sum(misfit(found, given, replayed) for replayed in ways) + float(shift @ shift)

    best = np.zeros_like(first)
    score = badness(best)
    for _ in range(TRIALS):
        size = 0.3 * 0.03 ** generator.random()  # large steps and small ones
        steps = generator.normal(0, size, len(best)) * (generator.random(len(best)) < 0.3)
        if (found_score := badness(best + steps)) < score:
            best, score = best + steps, found_score
    return dict(zip(ENGINES, np.split(first * np.exp(best), sizes[:1]), strict=True))


def misfit(found: Measured, given: Mapping[str, np.ndarray], replayed: bool) -> float:
    """How bad coefficients are: what their choices cost, and how far off the times are.

    Half of what a wrong choice costs counts by how sure the model is of it: what is right by a hair
    is no better than what is wrong by one. Times that are told well keep choices right that nobody
    measured.
    """
    times = found.queued if replayed else found.times
    here = found.fitted
    told = {
        engine: np.log(
            auto.seconds(found.counts[engine][here], given[engine], found.device, replayed)
        )
        for engine in ENGINES
    }
    known = {engine: np.log(times[engine][here]) for engine in ENGINES}
    apart = known["dense"] - known["spectral"]
    lead = (told["dense"] - told["spectral"]) * np.sign(apart)
    stake = np.maximum(np.expm1(np.abs(apart)) - ENOUGH / 2, 0)
    wrong = stake * (lead < 0)
    unsure = stake * np.clip((SURE - lead) / (2 * SURE), 0, 1)
    errors = sum(float(np.abs(told[e] - known[e]).mean()) for e in ENGINES)
    cost = float(wrong.max(initial=0) + wrong.sum() + unsure.sum())
    return (1 if replayed else 10) * cost + FAITH * errors


def _coefficients(found: Measured, engine: str) -> np.ndarray:
    counts, times, here = found.counts[engine], found.times[engine], found.fitted
    if not found.queued:
        return robust(counts[here], times[here])
    device, last = found.queued[engine], auto.host(found.device)
    queued = robust(counts[here, :-last], device[here])
    # Where a pass takes clearly longer than what it queues, it is Python that takes the time.
    waiting = here & (times > 1.2 * device)
    python: list[float] = []
    for first in range(-last, 0, 2):  # of kernels of one kind
        forward, backward = counts[:, first] > 0, counts[:, first + 1] > 0
        told = [waiting & forward & ~backward, waiting & forward & backward]
        spent = [float(np.median(times[those])) if those.any() else 0.0 for those in told]
        python += [spent[0], max(0.0, spent[1] - spent[0])]
    return np.array([*queued, *python])


def robust(counts: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Coefficients that are nowhere negative: towards the least sum of absolute relative errors."""
    matrix = counts / times[:, None]
    weights = np.ones(len(times))
    for _ in range(20):  # a few outliers do not count
        found = nonnegative(matrix * weights[:, None], weights)
        error = np.abs(matrix @ found - 1)
        weights = 1 / np.sqrt(np.maximum(error, 0.03))
    return found


def nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The least squares solution among those without negative numbers (Lawson and Hanson's way)."""
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = matrix / lengths
    found = np.zeros(matrix.shape[1])
    kept = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(3 * len(found)):
        gain = np.where(kept, 0.0, scaled.T @ (target - scaled @ found))
        if gain.max() <= 1e-10 * np.linalg.norm(target):
            break
        kept[gain.argmax()] = True
        while True:
            trial = np.zeros_like(found)
            trial[kept] = np.linalg.lstsq(scaled[:, kept], target, rcond=None)[0]
            bad = kept & (trial <= 0)
            if not bad.any():
                break
            step = (found[bad] / (found[bad] - trial[bad])).min()
            found = found + step * (trial - found)
            kept &= found > 1e-14 * np.abs(found).max()
            found[~kept] = 0.0
        found = trial
    return found / lengths
