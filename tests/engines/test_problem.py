"""A convolution as a value: what engines are asked about, and what they answer."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from econv import GroupConv2d, LiftConv2d, VectorConv2d, engines, filter_basis
from econv.engines import ENGINES, Part, Problem, registry
from econv.engines.problem import Geometry, convolution_named
from econv.engines.spectral.triton import engine as kernels
from econv.gpu import devices
from econv.stencils import Gaussian
from test_engines import distance


def convolution(group="p4", **options):
    given = {"parts": (Part("regular", 2),), "target": "regular", "out_fields": 3, **options}
    return engines.convolution(filter_basis(group), *given.values())


def problem(layer, shape, dtype=torch.float32, device="cpu", last=False, context="eager"):
    """What a call of a layer on such images, with gradients, would be."""
    batch, height, width = shape
    known = layer.convolution
    return Problem(
        *(known, batch, (height, width), dtype, torch.device(device), last, True, True, context)
    )


# Values


def test_equal_convolutions_are_one_object():
    first, again, other = convolution(), convolution(), convolution(out_fields=4)
    assert first is again
    assert first is not other
    assert len({first.name, again.name, other.name}) == 2
    for known in (first, other):
        assert convolution_named(known.name) is known


OTHERS = [
    {"bias": True},
    {"group": "p8"},
    {"stride": 2},
    {"padding": 1},
    {"padding_mode": "circular"},
    {"padding_mode": ("zeros", "circular")},
    {"padding_mode": ("circular", "zeros")},
    {"dilation": 2},
    {"groups": 2},
    {"size": 7},
    {"operators": "order<=2"},
    {"stencils": "gaussian"},
    {"stencils": Gaussian(width=0.9)},
    {"accuracy": 4, "stencils": "central"},
]


@pytest.mark.parametrize("options", OTHERS[1:], ids=str)
def test_layers_that_compute_otherwise_have_other_names(options):
    plain = GroupConv2d(2, 2, "p4")
    other = GroupConv2d(2, 2, **{"group": "p4", **options})
    assert plain.convolution.name != other.convolution.name
    assert GroupConv2d(2, 2, "p4", bias=True).convolution is plain.convolution
    assert GroupConv2d(2, 2, "p4", dtype=torch.float64).convolution is plain.convolution


def test_names_tell_kinds_of_fields_apart():
    layers = [
        *(LiftConv2d(4, 2, "p4", vectors=n) for n in range(3)),
        *(GroupConv2d(4, 2, "p4"), VectorConv2d(4, 2, "p4"), GroupConv2d(2, 4, "p4")),
    ]
    assert len({layer.convolution.name for layer in layers}) == len(layers)


class Own(Gaussian):
    """Stencils that words do not tell apart."""

    def __repr__(self):
        return "Own()"


def test_two_bases_that_words_do_not_tell_apart_have_names_of_their_own():
    for kind in (Gaussian, Own):
        one, other = (
            GroupConv2d(1, 1, "p4", stencils=kind(width)).convolution for width in (0.83, 0.87)
        )
        assert one.name != other.name
        for known in (one, other):
            assert convolution_named(known.name) is known


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_the_same_object(copied):
    known = GroupConv2d(2, 3, "p6m", stride=2, groups=1, dilation=2).convolution
    assert copied(known) is known


def test_a_name_is_the_same_in_every_process():
    code = (
        "import econv; from econv.stencils import Gaussian;"
        "print(econv.GroupConv2d(2, 3, 'p8', stride=2, stencils=Gaussian(0.8)).convolution.name)"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    here = GroupConv2d(2, 3, "p8", stride=2, stencils=Gaussian(0.8)).convolution.name
    assert names == {here + "\n"}


def test_a_convolution_cannot_be_changed():
    with pytest.raises(AttributeError):
        convolution().stride = 2


def test_unknown_kinds_of_fields_are_refused():
    with pytest.raises(ValueError, match="unknown kind of field 'image'"):
        engines.convolution(filter_basis("p4"), (Part("image", 2),), "regular", 3)
    with pytest.raises(ValueError, match="unknown kind of field 'tensor'"):
        engines.convolution(filter_basis("p4"), (Part("scalar", 2),), "tensor", 3)


def test_a_layer_computes_what_its_options_say_now():
    layer = GroupConv2d(2, 2, "p4")
    before = layer.convolution
    layer.stride, layer.padding_mode = 2, "circular"
    after = layer.convolution
    assert (before.stride, after.stride) == (1, 2)
    assert after is GroupConv2d(2, 2, "p4", stride=2, padding_mode="circular").convolution
    twin = GroupConv2d(2, 2, "p4", stride=2, padding_mode="circular")
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(1, 8, 9, 9)
    assert torch.equal(layer(x), twin(x))


# Problems


def test_a_problem_says_what_a_call_is():
    layer = GroupConv2d(2, 3, "p4", stride=2)
    x = torch.randn(2, 8, 7, 9).to(memory_format=torch.channels_last)
    found = Problem.of(layer.convolution, x, layer.weight)
    wanted = Problem(
        *(layer.convolution, 2, (7, 9), torch.float32, torch.device("cpu"), True, False, True)
    )
    assert found == wanted
    assert hash(found) == hash(wanted)
    assert str(found) == (
        "p4, 2 regular → 3 regular, 5×5, stride 2, batch 2, 7×9, channels-last, float32, "
        "with gradients"
    )
    with torch.no_grad():
        alone = Problem.of(layer.convolution, x.contiguous(), layer.weight)
    assert alone == wanted._replace(channels_last=False, to_weight=False)
    assert str(alone).endswith("float32, forwards")
    with torch.autocast("cpu", torch.bfloat16):
        assert Problem.of(layer.convolution, x, layer.weight).dtype == torch.bfloat16


def test_a_problem_says_who_looks_on():
    layer, x = GroupConv2d(2, 3, "p4"), torch.randn(2, 8, 7, 9)
    seen = []

    def look(x):
        seen.append(Problem.of(layer.convolution, x, layer.weight).context)
        return x

    look(x)
    torch.func.vmap(look)(x[None])
    torch.func.grad(lambda x: look(x).sum())(x)
    with FlopCounterMode(display=False):
        look(x)
    look(x.as_subclass(type("Other", (torch.Tensor,), {})))
    assert seen == ["eager", "transformed", "transformed", "watched", "watched"]


CONVOLUTIONS = [
    GroupConv2d(2, 3, "p4", engine="dense"),
    GroupConv2d(2, 4, "p8", engine="dense", groups=2),
    LiftConv2d(5, 2, "p6", vectors=1, engine="dense"),
    VectorConv2d(2, 3, "p3m", engine="dense"),
    GroupConv2d(1, 2, "p4", engine="dense", stride=2),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=lambda layer: str(layer.convolution))
def test_multiplications_are_those_of_the_dense_engine(layer):
    x = torch.randn(3, layer.in_channels, 8, 10)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    count = counter.get_flop_counts()["Global"][torch.ops.aten.convolution]
    assert 2 * Problem.of(layer.convolution, x, layer.weight).multiplications == count


@pytest.mark.parametrize("options", [(2, 1, 1), (1, 2, 3), (3, 0, 2), (1, 4, 1)])
def test_the_transposed_geometry_is_that_of_the_adjoint(options):
    stride, padding, dilation = options
    geometry = Geometry.of(3, (11, 14), stride, padding, dilation)
    x = torch.randn(1, 1, 11, 14, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    y = torch.nn.functional.conv2d(x, kernel, None, stride, padding, dilation)
    assert y.shape[2:] == geometry.sizes
    probe = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, x, probe)
    back = geometry.transposed(3, (11, 14))
    assert back.sizes == (11, 14)
    spread = torch.zeros(1, 1, back.up * y.shape[2], back.up * y.shape[3], dtype=torch.float64)
    spread[:, :, :: back.up, :: back.up] = probe
    found = torch.zeros_like(wanted)
    for i in range(11):
        for j in range(14):
            for a in range(3):
                for b in range(3):
                    row = i * back.down + a * back.dilation - back.before
                    column = j * back.down + b * back.dilation - back.before
                    if 0 <= row < spread.shape[2] and 0 <= column < spread.shape[3]:
                        term = spread[0, 0, row, column] * kernel[0, 0, 2 - a, 2 - b]
                        found[0, 0, i, j] += term
    assert distance(found, wanted) <= 1e-12


# What engines say


def test_every_engine_says_why_it_cannot_run():
    layer = GroupConv2d(2, 3, "p4", size=11, padding=5)
    given = problem(layer, (1, 12, 12), torch.float64)
    reasons = {name: engine.why_not(given) for name, engine in ENGINES.items()}
    assert list(reasons) == [
        *("dense", "spectral/hopper", "spectral/triton", "spectral/native", "spectral/torch")
    ]
    assert reasons["dense"] is reasons["spectral/torch"] is None
    for name in ("spectral/hopper", "spectral/triton"):
        assert reasons[name] == "it runs on NVIDIA GPUs; the input is on cpu"
    assert reasons["spectral/native"] == "it knows stencils of up to 9×9; these are 11×11"
    on_gpu = problem(layer, (1, 12, 12), device="cuda")
    assert ENGINES["spectral/native"].why_not(on_gpu) == "it runs on a CPU; the input is on cuda"
    with pytest.raises(ValueError, match=r"'spectral/native' cannot run p4, .*up to 9×9"):
        registry.first_able("spectral/native", given)
    assert registry.first_able("spectral", given).name == "spectral/torch"


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A Hopper GPU that is not there."""
    monkeypatch.setattr(kernels, "unavailable", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_is_hopper", lambda device: True)
    monkeypatch.setattr(kernels, "_specialised", lambda *given: True)
    return monkeypatch


COVERED = {
    "bfloat16": (GroupConv2d(2, 2, "p8"), torch.bfloat16, True),
    "stride": (GroupConv2d(2, 4, "p4", stride=2), torch.float16, True),
    "groups": (GroupConv2d(4, 4, "p8", groups=2), torch.float32, True),
    "padding made before": (
        *(GroupConv2d(2, 2, "p4", padding=7, padding_mode="circular"), torch.float16, True),
    ),
    "padding wider than stencils": (GroupConv2d(2, 2, "p4", padding=7), torch.float16, False),
    "float64": (GroupConv2d(2, 2, "p8"), torch.float64, False),
    "lift": (LiftConv2d(3, 2, "p8"), torch.bfloat16, False),
    "lift with vectors": (LiftConv2d(4, 2, "p8", vectors=1), torch.bfloat16, False),
    "vectors": (VectorConv2d(2, 2, "p8"), torch.bfloat16, False),
}


@pytest.mark.parametrize(("layer", "dtype", "covered"), COVERED.values(), ids=COVERED.keys())
def test_kernels_of_a_gpu_take_what_they_cover(on_a_gpu, layer, dtype, covered):
    given = problem(layer, (8, 16, 16), dtype, "cuda", last=True)
    reason = ENGINES["spectral/triton"].why_not(given)
    assert (reason is None) == covered, reason
    if not covered:
        assert ENGINES["spectral/hopper"].why_not(given) == reason
        assert registry.first_able("spectral", given).name == "spectral/torch"


HOPPER = [
    ((9, 0), torch.bfloat16, True, True, "spectral/hopper"),
    ((9, 0), torch.float16, True, True, "spectral/hopper"),
    ((9, 0), torch.float32, True, True, "spectral/triton"),
    ((9, 0), torch.bfloat16, False, True, "spectral/hopper"),
    ((9, 0), torch.bfloat16, True, False, "spectral/triton"),
    ((8, 0), torch.bfloat16, True, True, "spectral/triton"),
    ((10, 0), torch.bfloat16, True, True, "spectral/triton"),
]


@pytest.mark.parametrize(("capability", "dtype", "last", "fits", "engine"), HOPPER)
def test_warp_specialised_kernels_run_on_what_they_are_made_for(
    on_a_gpu, capability, dtype, last, fits, engine
):
    on_a_gpu.setattr(kernels, "_is_hopper", lambda device: capability == (9, 0))
    on_a_gpu.setattr(kernels, "_specialised", lambda *given: fits)
    given = problem(GroupConv2d(16, 16, "p8"), (8, 16, 16), dtype, "cuda", last)
    assert registry.first_able("spectral", given).name == engine


def test_kernels_of_a_gpu_are_not_for_images_that_they_cannot_count(on_a_gpu):
    layer = GroupConv2d(1, 1, "p8")
    for side, covered in ((8192, False), (8100, True)):
        reason = ENGINES["spectral/triton"].why_not(problem(layer, (1, side, side), device="cuda"))
        assert (reason is None) == covered
        assert covered or "32 bits" in reason


@pytest.mark.parametrize("context", ["watched", "transformed"])
def test_kernels_of_a_gpu_are_not_for_tracers(on_a_gpu, context):
    layer = GroupConv2d(16, 16, "p8")
    for now, name in ((context, "spectral/torch"), ("traced", "spectral/triton")):
        given = problem(layer, (8, 16, 16), device="cuda", context=now)
        assert registry.first_able("spectral", given).name == name


@pytest.mark.parametrize("reason", ["off", "missing", "old", "old Triton"])
def test_kernels_say_why_a_gpu_cannot_run_them(monkeypatch, reason):
    capability = (9, 0) if reason == "old Triton" else (7, 5)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.5.1"))
    if reason == "off":
        monkeypatch.setenv("ECONV_TRITON", "0")
    elif reason == "missing":
        monkeypatch.setattr(devices, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(devices, "find_spec", lambda name: True)
    said = {
        "off": "forbidden by ECONV_TRITON=0",
        "missing": "Triton is not installed",
        "old": "the GPU is older than Ampere",
        "old Triton": "it needs Triton 3.6 or later; this is 3.5.1",
    }
    monkeypatch.setattr(devices, "_not_installed", devices._not_installed.__wrapped__)
    given = problem(GroupConv2d(2, 2, "p8"), (8, 16, 16), device="cuda")
    assert ENGINES["spectral/triton"].why_not(given) == said[reason]


def test_importing_and_choosing_does_not_load_triton():
    code = """
import sys, torch, econv
econv.GroupConv2d(2, 2, "p4", engine="spectral")(torch.randn(1, 8, 6, 6))
sys.exit("triton" in sys.modules)
"""
    environment = {"ECONV_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0


def test_what_engines_make_of_a_plan_goes_with_its_layers():
    layer = GroupConv2d(1, 1, "p5", operators="order<=1", engine="spectral")
    layer(torch.randn(1, 5, 5, 5))
    (part,) = layer.convolution.parts
    plan, name = weakref.ref(layer.convolution.plan(part)), layer.convolution.name
    assert plan().made
    del layer
    for order in range(20, 38):  # the latest stay a little longer
        other = LiftConv2d(1, 1, f"p{order}", operators="order<=0").convolution
        assert other.plan(other.parts[0]) is other.plan(other.parts[0])
    gc.collect()
    assert plan() is None
    with pytest.raises(ValueError, match="of this process"):
        convolution_named(name)
