"""Checks of the kernels for volumes: `test_triton_volumes` runs them interpreted."""

from unittest.mock import patch

import pytest
import torch

import econv
from econv import GroupConv3d
from econv.engines import ENGINES, Problem
from econv.engines.spectral.triton import volumes
from econv.engines.spectral.triton.kernels import INTERPRETED
from econv.gpu import passes
from test_engines import run_reference
from triton_checks import (
    DEVICE,
    FLOAT32,
    TRITON,
    error,
    exact,
    kernels_run,
    results,
)

__all__ = ["kernels_run"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim", "ignore:invalid value encountered:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def few_programs():
    """Where they run one after the other."""
    with patch.dict(volumes.CHANGES, {"programs": 3} if INTERPRETED else {}):
        yield


def case(group, fields=(2, 1), shape=(1, 3, 4, 5), dtype=torch.float32, last=True, **options):
    layer = GroupConv3d(*fields, group, engine=TRITON, device=DEVICE, **options).to(dtype)
    shape = (shape[0], layer.in_channels, *shape[1:])
    x = torch.randn(shape).to(device=DEVICE, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    with econv.engine() as ran:
        out = layer(x)
    assert set(ran) == {TRITON}
    assert out.stride() == torch.empty_like(out, memory_format=torch.preserve_format).stride()
    layer.engine = "spectral"
    return layer, x, torch.randn_like(out)


REFERENCE = {
    "plain": {},
    "channels first": {"last": False, "shape": (2, 4, 3, 3), "bias": True},
    "stride 2": {"stride": 2, "shape": (1, 5, 6, 4)},
    "dilation 2": {"dilation": 2, "padding": 2, "shape": (1, 5, 5, 6)},
    "no padding": {"padding": 0, "shape": (1, 4, 3, 5)},
    "circular": {"padding_mode": "circular", "shape": (1, 3, 3, 4)},
    "boxes": {"spacing": (2.0, 1.0, 0.5)},
    "fields beyond a tile": {"fields": (9, 10), "shape": (1, 3, 3, 3)},
    "groups": {"fields": (4, 2), "groups": 2},
}


@pytest.mark.parametrize("options", REFERENCE.values(), ids=REFERENCE.keys())
def test_outputs_and_gradients_equal_the_reference(options):
    layer, x, probe = case("C2v", **options)
    wanted = exact(layer, x, probe, run_reference)
    for ours, theirs in zip(results(layer, x, probe, TRITON), wanted, strict=True):
        assert error(ours, theirs) <= FLOAT32


GROUPS = [("C1", {}), ("C3v", {}), ("T", {}), ("D4", {}), ("O", {"fields": (1, 1)})]
GROUPS += [] if INTERPRETED else [("I", {})]  # which takes minutes
GROUPS += [("Th", {}), ("D3d", {"stencils": "central"}), ("C4", {"stencils": "gaussian"})]
GROUPS += [
    ("D2", {"size": 5, "fields": (1, 1), "shape": (1, 5, 5, 6)}),
    ("C2", {"operators": "order<=3", "size": 5, "shape": (1, 5, 5, 5)}),
]


@pytest.mark.parametrize(("group", "options"), GROUPS)
def test_every_kind_of_group_equals_the_dense_engine_in_float64(group, options):
    layer, x, probe = case(group, **{"shape": (2, 3, 3, 4), **options})
    wanted = exact(layer, x, probe)
    for ours, theirs in zip(results(layer, x, probe, TRITON), wanted, strict=True):
        assert error(ours, theirs) <= FLOAT32


HALF = [("T", torch.bfloat16, 1.5), ("O", torch.bfloat16, 1.5), ("C4v", torch.float16, 2.5)]


@pytest.mark.parametrize(("group", "dtype", "factor"), HALF)
def test_half_precisions_err_little_more_than_the_dense_engine(group, dtype, factor):
    layer, x, probe = case(group, (3, 2), (2, 4, 3, 5), dtype)
    wanted = exact(layer, x, probe)
    ours, theirs = (results(layer, x, probe, engine) for engine in (TRITON, "dense"))
    for a, b, truth in zip(ours, theirs, wanted, strict=True):
        assert a.dtype == dtype
        assert error(a, truth) <= factor * error(b, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_in_groups_and_memory_full_of_nan_give_the_same(monkeypatch, dtype):
    layer, x, probe = case("C2", (3, 3), (5, 3, 4, 3), dtype)
    wanted = results(layer, x, probe, TRITON)
    shapes = []

    def poisoned(shape, dtype, device):
        shapes.append(shape)
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(passes, "empty", poisoned)
    monkeypatch.setattr(volumes, "LEAST", 0)
    forget()
    try:
        for ours, theirs in zip(results(layer, x, probe, TRITON), wanted, strict=True):
            assert error(ours, theirs) <= 1e-6
    finally:
        forget()
    assert len(shapes) == 8  # two for each convolution, four for the gradient to the weights


def forget():
    volumes.convolution_run.cache_clear()
    volumes.weight_gradient_run.cache_clear()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_reaches_its_neighbours_and_no_other_volume(value):
    layer, x, _ = case("C2", (2, 2), (3, 4, 4, 4), torch.float16)
    clean = layer(x)
    x[1, 0, 1, 1, 1] = value
    found = layer(x)
    assert not found[1, :, 1, 1, 1].isfinite().any()
    assert torch.equal(found[::2], clean[::2])


def test_volumes_of_any_magnitude_keep_their_digits():
    layer, x, _ = case("C2", (2, 2), (4, 3, 3, 3), torch.bfloat16)
    scales = torch.tensor([1.0, 1e-20, 1e20, 0.0]).to(DEVICE)[:, None, None, None, None]
    scaled = (x * scales).bfloat16()
    found = layer(scaled).double()
    with econv.engine("dense"):
        wanted = layer.double()(scaled.double())
    for scale, ours, theirs in zip(scales.flatten().tolist()[:3], found, wanted, strict=False):
        assert error(ours / scale, theirs / scale) <= 5e-3
    assert not found[3].any()


@pytest.mark.parametrize("last", [True, False])
def test_gradients_of_gradients_equal_the_dense_engine_in_float64(last):
    layer, x, probe = case("C2", (2, 2), (2, 3, 3, 4), last=last, stride=2)

    def second(layer, x, probe):
        given = [x.detach().requires_grad_(), layer.weight]
        first = torch.autograd.grad(layer(given[0]), given, probe, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), given)

    with econv.engine() as ran:
        found = second(layer, x, probe)
    assert TRITON in ran
    layer.engine = "dense"
    wanted = second(layer.double().cpu(), x.double().cpu(), probe.double().cpu())
    for ours, theirs in zip(found, wanted, strict=True):
        assert error(ours, theirs) <= FLOAT32


def test_per_sample_gradients_are_those_of_each_sample():
    layer, x, probe = case("C2", (1, 1), (2, 3, 3, 3))
    weight = layer.weight.detach()

    def loss(weight, x, probe):
        out = torch.func.functional_call(layer, {"weight": weight}, (x[None],))
        return (out * probe[None]).sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weight, x, probe)
    each = [torch.func.grad(loss)(weight, *pair) for pair in zip(x, probe, strict=True)]
    torch.testing.assert_close(found, torch.stack(each), rtol=1e-4, atol=1e-4)
    whole = results(layer, x, probe, TRITON)[2]
    torch.testing.assert_close(found.sum(0), whole, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_do_not_cover_is_said():
    def reason(layer, name=TRITON):
        x = torch.empty(1, layer.in_channels, 9, 9, 9, device=DEVICE)
        return ENGINES[name].why_not(Problem.of(layer.convolution, x, layer.weight))

    assert reason(GroupConv3d(1, 1, "D2", size=5)) is None
    wide = GroupConv3d(1, 1, "D2", size=7, stencils="gaussian")
    assert reason(wide) == "it knows stencils of up to 5×5×5; these are 7×7×7"
    large = "of volumes it knows groups of up to 60 elements; this has 120"
    assert reason(GroupConv3d(1, 1, "Ih")) == large
    assert "it maps group features to group features" in reason(econv.LiftConv3d(1, 1, "D2"))
