"""The choice of an engine: by layer, by block, by the cost model; and what ran can be asked."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import econv
from econv.engines import auto, replayed
from econv.engines.spectral import native

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


def test_a_layer_that_was_called_follows_other_coefficients(monkeypatch):
    """What is remembered of a choice is remembered in one place."""
    layer = econv.GroupConv2d(8, 8, "p8")
    cheap, dear = ({e: (c,) * n for e, n in (("dense", 5), ("spectral", 7))} for c in (0.0, 1.0))
    for name in ("dense", "spectral", "dense"):
        other = "spectral" if name == "dense" else "dense"
        monkeypatch.setitem(auto.COEFFICIENTS, "cpu", {name: cheap[name], other: dear[other]})
        auto.faster.cache_clear()
        assert what_runs(layer, (4, 64, 16, 16))[0].startswith(name)
    auto.faster.cache_clear()


@pytest.mark.parametrize(
    "layer",
    [
        econv.GroupConv2d(4, 6, "p4", groups=2),
        econv.LiftConv2d(5, 3, "p4", vectors=1),
        econv.LiftConv2d(3, 2, "p4m"),
        econv.VectorConv2d(3, 2, "p4"),
    ],
    ids=["group", "scalars and vectors", "scalars", "to vectors"],
)
def test_the_model_counts_the_fields_that_weights_have(layer):
    shapes = [(part.source, *part.weight.shape[1::-1]) for part in layer._parts()]
    assert list(layer._fields()) == shapes


def test_a_workload_is_that_of_the_options_that_a_layer_has_now():
    layer = econv.GroupConv2d(4, 4, "p4")
    shape = torch.Size((2, 16, 12, 12))
    before = layer.workload(shape, backward=True)
    layer.stride, layer.padding_mode = 2, "circular"
    after = layer.workload(shape, backward=True)
    assert (before.geometry.down, after.geometry.down) == (1, 2)
    assert (before.height, after.height) == (12, 16)


def test_the_default_is_dense_while_a_graph_is_captured():
    layer = econv.GroupConv2d(16, 16, "p8")
    program = torch.export.export(layer, (torch.randn(8, 128, 16, 16),))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "aten.conv2d.default" in targets


SPECTRAL_ALWAYS = {"dense": (1.0,) * 10, "spectral": (0.0,) * 11}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Tensors of a GPU that is not there, with coefficients by which spectral always wins."""
    pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")
    monkeypatch.setattr(native, "watched", lambda x: False)
    monkeypatch.setattr(auto, "_recent", lambda device: True)
    for bits in (16, 32):
        monkeypatch.setitem(auto.COEFFICIENTS, f"cuda, {bits}-bit", SPECTRAL_ALWAYS)
    monkeypatch.setattr(auto, "faster", auto.faster.__wrapped__)
    return monkeypatch


def chosen_on_a_gpu(layer, size=16, dtype=torch.bfloat16):
    with FakeTensorMode():
        x = torch.empty(8, layer.in_channels, size, size, dtype=dtype, device="cuda")
    return auto.choose(x, layer.workload(x.shape, backward=True))


def test_auto_is_dense_on_a_gpu_without_coefficients(on_a_gpu):
    layer = econv.GroupConv2d(16, 16, "p8", device="meta")
    assert chosen_on_a_gpu(layer) == "spectral"
    on_a_gpu.delitem(auto.COEFFICIENTS, "cuda, 16-bit")
    assert chosen_on_a_gpu(layer) == "dense"
    assert chosen_on_a_gpu(layer, dtype=torch.float32) == "spectral"


@pytest.mark.parametrize(
    ("layer", "dtype", "engine"),
    [
        (econv.GroupConv2d(2, 2, "p8", device="meta"), torch.bfloat16, "spectral"),
        (econv.GroupConv2d(2, 4, "p4", stride=2, device="meta"), torch.float16, "spectral"),
        (econv.GroupConv2d(4, 4, "p8", groups=2, device="meta"), torch.float32, "spectral"),
        (
            econv.GroupConv2d(2, 2, "p4", padding=7, padding_mode="circular", device="meta"),
            torch.float16,
            "spectral",
        ),
        (econv.GroupConv2d(2, 2, "p4", padding=7, device="meta"), torch.float16, "dense"),
        (econv.GroupConv2d(2, 2, "p8", device="meta"), torch.float64, "dense"),
        (econv.LiftConv2d(3, 2, "p8", device="meta"), torch.bfloat16, "dense"),
        (econv.LiftConv2d(4, 2, "p8", vectors=1, device="meta"), torch.bfloat16, "dense"),
        (econv.VectorConv2d(2, 2, "p8", device="meta"), torch.bfloat16, "dense"),
    ],
    ids=[
        *("bfloat16", "stride", "groups", "padding made before", "padding wider than stencils"),
        *("float64", "lift", "lift with vectors", "vectors"),
    ],
)
def test_auto_takes_the_kernels_of_a_gpu_for_what_they_cover(on_a_gpu, layer, dtype, engine):
    assert chosen_on_a_gpu(layer, dtype=dtype) == engine


@pytest.mark.parametrize("reason", ["off", "old", "watched", "autocast"])
def test_auto_is_dense_on_a_gpu_where_the_kernels_cannot_run(on_a_gpu, reason):
    layer = econv.GroupConv2d(16, 16, "p8", device="meta")
    assert chosen_on_a_gpu(layer, dtype=torch.float32) == "spectral"
    if reason == "off":
        on_a_gpu.setenv("ECONV_TRITON", "0")
    elif reason == "old":
        on_a_gpu.setattr(auto, "_recent", lambda device: False)
    elif reason == "watched":
        on_a_gpu.undo()
        on_a_gpu.setattr(auto, "faster", auto.faster.__wrapped__)
        on_a_gpu.setattr(auto, "_recent", lambda device: True)
        on_a_gpu.setitem(auto.COEFFICIENTS, "cuda, 32-bit", SPECTRAL_ALWAYS)
    else:  # what runs is what autocast makes of it
        on_a_gpu.delitem(auto.COEFFICIENTS, "cuda, 16-bit")
        on_a_gpu.setattr(auto, "result_dtype", lambda x: torch.bfloat16)
    assert chosen_on_a_gpu(layer, dtype=torch.float32) == "dense"


def test_python_counts_on_a_gpu_unless_calls_are_replayed(monkeypatch):
    """Dense queues less and works more: which is longer, the work or the queueing?"""
    device = "cuda, 16-bit"
    host = {"dense": (7e-5, 15e-5), "spectral": (2e-4, 4e-4)}
    coefficients = {
        "dense": (4e-15, 5e-15, 0, 0, 4e-12, 2e-13, 1e-5, 3e-5, *host["dense"]),
        "spectral": (1e-14, 1e-14, 3e-13, 1e-12, 1e-12, 3e-13, 0, 2e-5, 5e-5, *host["spectral"]),
    }
    monkeypatch.setitem(auto.COEFFICIENTS, device, coefficients)
    layer = econv.GroupConv2d(20, 20, "p8", device="meta")
    small, large = (
        layer.workload(torch.Size((batch, 160, 16, 16)), backward=False) for batch in (64, 4096)
    )
    costs = auto.costs(small, device)
    assert costs["spectral"] == host["spectral"][0]
    assert auto.costs(large, device)["spectral"] > 10 * costs["spectral"]
    auto.faster.cache_clear()
    assert auto.faster(small, device) == "dense"
    assert auto.faster(small, device, replayed=True) == "spectral"
    assert auto.faster(large, device) == auto.faster(large, device, replayed=True) == "spectral"
    auto.faster.cache_clear()


@pytest.fixture
def asked(on_a_gpu):
    """What the cost model was asked for."""
    found = []
    on_a_gpu.setattr(auto, "faster", lambda work, device, replayed: found.append(device))
    return found


@pytest.mark.parametrize(
    ("capability", "dtype", "last", "gluon", "device"),
    [
        ((9, 0), torch.bfloat16, True, True, "hopper, 16-bit"),
        ((9, 0), torch.float16, True, True, "hopper, 16-bit"),
        ((9, 0), torch.float32, True, True, "cuda, 32-bit"),
        ((9, 0), torch.bfloat16, False, True, "cuda, 16-bit"),
        ((9, 0), torch.bfloat16, True, False, "cuda, 16-bit"),
        ((9, 0), torch.bfloat16, True, None, "cuda, 16-bit"),
        ((8, 0), torch.bfloat16, True, True, "cuda, 16-bit"),
        ((10, 0), torch.bfloat16, True, True, "cuda, 16-bit"),
    ],
)
def test_what_warps_with_roles_cost_counts_where_they_have_them(
    on_a_gpu, asked, capability, dtype, last, gluon, device
):
    """``gluon``: whether it has all that the kernels need; None where there is no Triton."""
    on_a_gpu.setattr(auto, "has_roles", auto.has_roles.__wrapped__)
    on_a_gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if gluon is None:
        on_a_gpu.delattr("econv.engines.spectral.hopper.kernels", raising=False)
        on_a_gpu.setitem(sys.modules, "econv.engines.spectral.hopper.kernels", None)
    else:
        from econv.engines.spectral.hopper import kernels as hopper_kernels

        on_a_gpu.setattr(hopper_kernels, "AVAILABLE", gluon)
    layer = econv.GroupConv2d(16, 16, "p8", device="meta")
    order = torch.channels_last if last else torch.contiguous_format
    with FakeTensorMode():
        x = torch.empty(8, 128, 16, 16, dtype=dtype, device="cuda", memory_format=order)
    auto.choose(x, layer.workload(x.shape, backward=True))
    assert asked == [device]


def test_images_on_a_cpu_are_not_asked_about_a_gpu(asked):
    x = torch.empty(8, 128, 16, 16).to(memory_format=torch.channels_last)
    layer = econv.GroupConv2d(16, 16, "p8", device="meta")
    auto.choose(x, layer.workload(x.shape, backward=True))
    assert asked == ["cpu"]


def test_the_cost_model_does_not_load_triton():
    code = "import sys, econv.engines.auto; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("group", "roles"), [("p8", True), ("p4", False), ("p12", False)])
def test_launches_with_roles_have_counts_of_their_own(group, roles):
    layer = econv.GroupConv2d(20, 20, group, device="meta")
    work = layer.workload(torch.Size((16, layer.in_channels, 16, 16)), backward=True)
    known, found = (auto.terms(work, f"{kind}, 16-bit") for kind in ("cuda", "hopper"))
    assert found["dense"] == (*known["dense"], 0, 0)
    first, own = found["spectral"][:4], found["spectral"][4:8]
    calls, own_calls = found["spectral"][-4:-2], found["spectral"][-2:]
    if roles:
        assert (first, calls, own_calls) == ((0,) * 4, (0, 0), (1, 1))
        assert all(own)
    else:
        assert (own, own_calls) == ((0,) * 4, (0, 0))
        assert (*first, *found["spectral"][8:-2]) == known["spectral"]
    for device, counts in (("cuda, 16-bit", known), ("hopper, 16-bit", found)):
        for engine, values in auto.COEFFICIENTS[device].items():
            assert len(values) == len(counts[engine])


def test_a_block_of_replayed_calls_ends_with_an_error_too(on_a_gpu):
    asked = []
    on_a_gpu.setattr(auto, "faster", lambda work, device, replayed: asked.append(replayed))
    layer = econv.GroupConv2d(16, 16, "p8", device="meta")
    with replayed():
        chosen_on_a_gpu(layer)
    with pytest.raises(KeyError), replayed():
        raise KeyError
    chosen_on_a_gpu(layer)
    assert asked == [True, False]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def choices():
    return pytest.importorskip("engine_choices", reason="no benchmarks beside the tests")


def test_the_cost_model_picks_well_over_the_recorded_grid(choices):
    (found,) = choices.measured(choices.together([RESULTS / "engines_cpu.json"]))
    assert len(found.names) >= 2 * 60
    assert choices.losses(found, auto.COEFFICIENTS["cpu"]).max() <= 0.05


WITHOUT_ROLES = ("engines_cuda_without_roles_grid", "engines_cuda_without_roles")
WITH_ROLES = ("engines_cuda_grid", "engines_cuda")  # of one run


def on_a_gpu_of(choices, names):
    """What was measured on a GPU, 16-bit and 32-bit."""
    return choices.measured(choices.together([RESULTS / f"{name}.json" for name in names]))


@pytest.fixture
def without_roles(choices):
    """What was measured when warps had no roles, as on GPUs that are no Hopper."""
    return on_a_gpu_of(choices, WITHOUT_ROLES)


@pytest.fixture
def with_roles(choices):
    return on_a_gpu_of(choices, WITH_ROLES)


def lost_more(found, lost, than=0.05):
    return [name for name, share in zip(found.names, lost, strict=True) if share > than]


def test_the_cost_model_picks_well_over_the_records_of_a_gpu(choices, without_roles):
    found, wide = without_roles
    assert (found.device, wide.device) == ("cuda, 16-bit", "cuda, 32-bit")
    assert len(set(found.names)) >= 2 * 60
    assert choices.losses(found, auto.COEFFICIENTS[found.device]).max() <= 0.05


def test_the_cost_model_picks_well_for_cuda_graphs(choices, without_roles):
    """All but eight of 160; the four that lose most are one layer's."""
    found, _ = without_roles
    lost = choices.losses(found, auto.COEFFICIENTS[found.device], replayed=True)
    assert (len(lost), sum(lost <= 0.05)) == (160, 152)
    assert lost.mean() <= 0.013
    names = lost_more(found, lost, 0.15)
    assert len(names) == 4
    assert all(name.startswith("group p4 80→80") for name in names)
    assert lost.max() <= 0.42


def test_the_cost_model_picks_well_over_the_records_of_a_hopper_gpu(choices, with_roles):
    narrow, wide = with_roles
    assert (narrow.device, wide.device) == ("hopper, 16-bit", "cuda, 32-bit")
    assert (len(narrow.names), len(wide.names)) == (160, 30)
    for found in with_roles:
        assert choices.losses(found, auto.COEFFICIENTS[found.device]).max() <= 0.05


def test_nothing_is_counted_where_a_gpu_would_not_wait(choices, with_roles, without_roles):
    """Where auto does not ask its cost model, that would say dense; elsewhere it is asked."""
    cases = pytest.importorskip("engine_cases")
    asked = []
    for names, roles in ((WITH_ROLES, True), (WITHOUT_ROLES, False)):
        for layer in choices.together([RESULTS / f"{name}.json" for name in names])["layers"]:
            case = cases.Case(**layer["case"])
            made = case.layer("meta")
            elements = case.batch * made.in_channels * case.size**2
            multiplications = made.filter_elements() * elements
            found = [
                auto.faster(
                    choices.workload(case, name),
                    auto.where("cuda", cases.DTYPES[case.dtype], roles),
                )
                for name in cases.PASSES
            ]
            asked.append(multiplications >= auto._QUEUED[cases.DTYPES[case.dtype].itemsize])
            assert asked[-1] or found == ["dense", "dense"]
    assert 0.2 <= sum(asked) / len(asked) <= 0.8


def test_what_is_replayed_is_counted_where_python_would_be_too_slow():
    with FakeTensorMode():
        wide = torch.empty(1, device="cuda")
    for x, most in ((wide, auto._QUEUED[4]), (wide.bfloat16(), auto._QUEUED[2])):
        assert auto.negligible(x, most - 1)
        assert not auto.negligible(x, most)
        assert not auto.negligible(torch.empty(1, dtype=x.dtype), most - 1)
        with replayed():
            assert not auto.negligible(x, most - 1)
            assert auto.negligible(x, auto._SMALL - 1)
    assert auto.negligible(wide.double(), 10**15)  # no kernels, and nothing to ask


def test_the_cost_model_picks_well_for_cuda_graphs_of_a_hopper_gpu(choices, with_roles):
    """All but seven of 190."""
    narrow, wide = with_roles
    assert choices.losses(wide, auto.COEFFICIENTS[wide.device], replayed=True).max() <= 0.05
    lost = choices.losses(narrow, auto.COEFFICIENTS[narrow.device], replayed=True)
    assert sum(lost <= 0.05) == 153
    assert lost.mean() <= 0.006
    assert lost_more(narrow, lost, 0.15) == ["group p4 20→20, batch 128, 16×16, bfloat16, forward"]
    assert lost.max() <= 0.19


@pytest.mark.parametrize("names", [WITHOUT_ROLES, WITH_ROLES])
def test_a_cost_model_that_picks_badly_is_found_out(choices, names):
    """Neither one engine for all nor coefficients that are somewhat off would pass."""
    found = on_a_gpu_of(choices, names)[0]
    known = {name: np.array(c) for name, c in auto.COEFFICIENTS[found.device].items()}
    for dense, spectral in ((0, 1), (1, 0), (1, 2), (2, 1)):
        scaled = {"dense": dense * known["dense"], "spectral": spectral * known["spectral"]}
        assert choices.losses(found, scaled).max() > 0.05
        assert sum(choices.losses(found, scaled, replayed=True) <= 0.05) < 140


def test_coefficients_of_other_kernels_would_pick_worse_for_graphs_of_a_hopper_gpu(
    choices, with_roles
):
    """Launched one by one the same layers gain: those for which Python is no hindrance."""
    record = choices.together([RESULTS / f"{name}.json" for name in WITH_ROLES])
    found = choices.measured({**record, "roles": False})[0]
    assert found.device == "cuda, 16-bit"
    assert found.names == with_roles[0].names
    lost = choices.losses(found, auto.COEFFICIENTS[found.device], replayed=True)
    assert sum(lost <= 0.05) < 153
    assert lost.max() > 0.3


def test_records_of_unlike_devices_are_not_fitted_together(choices):
    with pytest.raises(ValueError, match="one kind of device; got cpu and cuda"):
        choices.together([RESULTS / "engines_cpu.json", RESULTS / "engines_cuda.json"])
