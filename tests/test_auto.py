"""The choice of an engine: by layer, by block, by the cost model; and what ran can be asked."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import econv
from econv.engines import auto, native

needs_kernel = pytest.mark.skipif(not native.available(), reason="no C++ compiler")


def what_runs(layer, shape, dtype=torch.float32, **options):
    with econv.engine(**options) as ran, torch.no_grad():
        layer(torch.randn(shape, dtype=dtype))
    return ran


def test_a_layers_own_choice_goes_first():
    layer = econv.GroupConv2d(1, 1, "p4", engine="dense")
    assert what_runs(layer, (1, 4, 6, 6), name="spectral") == ["dense"]
    layer = econv.GroupConv2d(1, 1, "p4", engine="spectral")
    (ran,) = what_runs(layer, (1, 4, 6, 6), name="dense")
    assert ran.startswith("spectral/")


def test_the_innermost_block_decides_and_ends():
    layer = econv.GroupConv2d(1, 1, "p4")
    x = torch.randn(1, 4, 6, 6)
    with econv.engine("spectral") as outer:
        layer(x)
        with econv.engine("dense") as inner:
            layer(x)
        layer(x)
    layer(x)
    assert inner == ["dense"]
    assert [ran.split("/")[0] for ran in outer] == ["spectral", "dense", "spectral"]


def test_a_block_ends_with_an_error_too():
    layer = econv.GroupConv2d(1, 1, "p4")
    with pytest.raises(KeyError), econv.engine("spectral"):
        raise KeyError
    assert what_runs(layer, (1, 4, 6, 6)) == ["dense"]


def test_an_unknown_engine_is_an_error():
    with (
        pytest.raises(ValueError, match=r"unknown engine 'fast'.*'dense', 'spectral'"),
        econv.engine("fast"),
    ):
        pass
    with pytest.raises(ValueError, match="unknown engine 'fast'"):
        econv.GroupConv2d(1, 1, "p4", engine="fast")


def test_a_network_tells_the_engine_of_every_convolution():
    network = nn.Sequential(
        econv.LiftConv2d(1, 2, "p4", engine="dense"),
        nn.ReLU(),
        econv.GroupConv2d(2, 2, "p4", engine="spectral"),
    )
    with econv.engine() as ran:
        network(torch.randn(1, 1, 8, 8))
    assert [name.split("/")[0] for name in ran] == ["dense", "spectral"]


@needs_kernel
@pytest.mark.parametrize(
    ("layer", "shape", "engine"),
    [
        (econv.GroupConv2d(16, 16, "p8"), (8, 128, 32, 32), "spectral/native"),
        (econv.GroupConv2d(8, 8, "p16"), (1, 128, 16, 16), "spectral/native"),
        (econv.GroupConv2d(8, 8, "p8", dtype=torch.float64), (4, 64, 16, 16), "spectral/native"),
        (econv.GroupConv2d(2, 2, "p4"), (1, 8, 8, 8), "dense"),
        (econv.GroupConv2d(8, 8, "p4", operators="order<=0"), (4, 32, 16, 16), "dense"),
        (econv.GroupConv2d(8, 8, "p8", groups=8), (2, 64, 8, 8), "dense"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_auto_picks_what_is_faster_by_far(layer, shape, engine):
    assert what_runs(layer, shape, layer.weight.dtype) == [engine]


def test_auto_is_dense_without_the_kernel(monkeypatch):
    monkeypatch.setenv("ECONV_NATIVE", "0")
    assert what_runs(econv.GroupConv2d(16, 16, "p8"), (8, 128, 16, 16)) == ["dense"]


def test_auto_is_dense_on_devices_without_coefficients():
    layer = econv.GroupConv2d(16, 16, "p8", device="meta")
    x = torch.empty(8, 128, 32, 32, device="meta")
    assert auto.choose(x, layer.workload(x.shape, backward=True)) == "dense"


def test_costs_grow_with_the_square_of_the_order_and_with_the_order():
    costs = {}
    for name in ("p8", "p32"):
        layer = econv.GroupConv2d(8, 8, name, device="meta")
        shape = torch.Size((4, layer.in_channels, 32, 32))
        costs[name] = auto.costs(layer.workload(shape, backward=False))
    assert 15 <= costs["p32"]["dense"] / costs["p8"]["dense"] <= 17
    assert 4 <= costs["p32"]["spectral"] / costs["p8"]["spectral"] <= 6


def test_a_backward_pass_costs_more():
    layer = econv.GroupConv2d(8, 8, "p8", device="meta", stride=2)
    shape = torch.Size((4, 64, 32, 32))
    forward, both = (auto.costs(layer.workload(shape, backward=b)) for b in (False, True))
    assert 2 <= both["dense"] / forward["dense"] <= 4
    # Gradients are formed at the resolution of the input: four times that of the output.
    assert both["spectral"] / forward["spectral"] > 4


def test_the_default_is_dense_while_a_graph_is_captured():
    layer = econv.GroupConv2d(16, 16, "p8")
    program = torch.export.export(layer, (torch.randn(8, 128, 16, 16),))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "aten.conv2d.default" in targets


RECORD = Path(__file__).parent.parent / "benchmarks" / "results" / "engines_cpu.json"


@pytest.mark.skipif(not RECORD.exists(), reason="the records are not part of this distribution")
def test_the_cost_model_picks_well_over_the_recorded_grid():
    losses = []
    for record in json.loads(RECORD.read_text())["layers"]:
        case = record["case"]
        make = econv.LiftConv2d if case["kind"] == "lift" else econv.GroupConv2d
        fields = (case["in_fields"], case["out_fields"], case["group"])
        options = {"operators": case["operators"], "stride": case["stride"], "device": "meta"}
        layer = make(*fields, **options)
        shape = torch.Size((case["batch"], layer.in_channels, case["size"], case["size"]))
        for name in ("forward", "forward+backward"):
            times = record[name]["least"]
            costs = auto.costs(layer.workload(shape, backward=name != "forward"))
            picked = times[min(costs, key=lambda engine: costs[engine])]
            losses.append(picked / min(times["dense"], times["spectral"]) - 1)
    assert len(losses) >= 2 * 60
    assert max(losses) <= 0.05
