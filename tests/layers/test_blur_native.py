"""Means of pixels by compiled code: torch's convolutions are the truth, and say when it is used."""

import ctypes

import pytest
import torch
from torch import nn
from torch.nn import functional

from econv import GroupActivation2d, group_activation
from econv.engines.spectral import native
from econv.layers import blur, blur_native
from econv.layers.blur import mean_of_pixels

FORMATS = (torch.contiguous_format, torch.channels_last)
FUNCTIONS = {"none": None, "relu": nn.ReLU(), "silu": nn.SiLU(), "softplus": nn.Softplus()}
# One plane is a line, or several; one row is a block, or several; taps as in layers, and others.
SIZES = [(1, 1), (5, 6), (3, 17), (33, 64)]
TAPS = [(5, 5), (4, 4), (7, 6)]

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler")


@pytest.fixture
def jobs(monkeypatch):
    """How often the kernel ran."""
    ran, run = [], native.means
    monkeypatch.setattr(native, "means", lambda *job: (ran.append(job), run(*job)))
    return ran


def cases(size, taps, dtype):
    """Images, weights and where windows begin, in both layouts and for one channel and many."""
    torch.manual_seed(0)
    for form in FORMATS:
        for channels in (1, 5):
            for begin in {tuple(t // 2 for t in taps), tuple((t - 1) // 2 for t in taps)}:
                if all(n + 2 * b >= t for n, b, t in zip(size, begin, taps, strict=True)):
                    x = torch.randn(2, channels, *size, dtype=dtype).contiguous(memory_format=form)
                    rows, columns = (torch.rand(t, dtype=dtype) + 0.1 for t in taps)
                    yield x.requires_grad_(), rows, columns, taps, begin


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_convolution_and_its_gradient(jobs, name, dtype):
    function, tolerance = FUNCTIONS[name], 1e-13 if dtype == torch.float64 else 1e-5
    for size in SIZES:
        for taps in TAPS:
            for x, *given in cases(size, taps, dtype):
                found = mean_of_pixels(x, *given, function)
                assert jobs
                wanted = blur._by_convolution(x if function is None else function(x), *given)
                g = torch.randn_like(found)
                assert (found - wanted).abs().max() < tolerance
                (to_x,), (expected,) = (torch.autograd.grad(y, x, g) for y in (found, wanted))
                assert (to_x - expected).abs().max() < tolerance
                if size != (1, 1) and x.shape[1] > 1:
                    assert found.stride().index(1) == x.stride().index(1)


@pytest.mark.parametrize("function", [nn.SiLU(), None], ids=["silu", "none"])
def test_derivatives_of_the_second_order(function):
    for x, *given in cases((3, 4), (4, 5), torch.float64):
        if x.shape[1] == 1:
            continue
        few = x[:1, :2].detach().requires_grad_()
        assert torch.autograd.gradgradcheck(lambda x, g=given: mean_of_pixels(x, *g, function), few)


def test_large_numbers_of_either_sign():
    one = torch.ones(1, dtype=torch.float64)
    line = torch.linspace(-900, 900, 4097, dtype=torch.float64).view(1, 1, 1, -1)
    for dtype, error in ((torch.float32, 3e-7), (torch.float64, 4e-16)):
        x = line.to(dtype).requires_grad_()
        given = (one.to(dtype), one.to(dtype), (1, 1), (0, 0))
        found, exact = mean_of_pixels(x, *given, nn.SiLU()), functional.silu(x.detach().double())
        assert ((found - exact).abs() <= error * exact.abs().clamp(min=1)).all()
        (slope,) = torch.autograd.grad(found.sum(), x)
        inner = x.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(functional.silu(inner).sum(), inner)
        assert (slope - expected).abs().max() < 8 * error
    x = torch.full((1, 1, 3, 20), torch.nan)
    assert all(group_activation(x, f).isnan().all() for f in ("relu", "silu"))


def test_one_pass_for_a_function_that_it_knows(jobs):
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    for name, forwards in (("silu", [2]), ("relu", [1]), ("gelu", [0])):
        jobs.clear()
        GroupActivation2d(name)(x).sum().backward()
        assert [job[1][11] for job in jobs] == 2 * forwards
        assert [job[1][12] for job in jobs] == [0, 1]


def hooked(kind):
    def change(module):
        getattr(module, f"register_{kind}_hook")(lambda *given: None)

    return change


def patched(module):
    module.forward = torch.sigmoid


def subclassed(module):
    module.__class__ = type("Other", (nn.SiLU,), {})


CHANGES = [*map(hooked, ("forward", "forward_pre", "full_backward")), patched, subclassed]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_called(change):
    module = nn.SiLU()
    assert blur_native.number_of(module) == 2
    change(module)
    assert blur_native.number_of(module) is None
    x = torch.randn(1, 2, 6, 6)
    wanted = group_activation(module(x), nn.Identity())
    torch.testing.assert_close(group_activation(x, module), wanted)


# torch warns of its own deprecated parts while the compiler is imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_must_see_torchs_operations_sees_them(jobs, monkeypatch):
    layer, x = GroupActivation2d("silu", 2), torch.randn(2, 8, 9, 9)
    wanted = layer(x)
    assert jobs
    jobs.clear()
    found = [
        torch.jit.trace(layer, x, check_trace=False)(x),
        torch.func.vmap(layer)(x[None])[0],
        torch.export.export(layer, (x,)).module()(x),
        torch.compile(layer, fullgraph=True, backend="eager")(x),
    ]
    monkeypatch.setenv("ECONV_NATIVE", "0")
    found.append(layer(x))
    assert not jobs
    for y in found:
        torch.testing.assert_close(y, wanted)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert not jobs


def test_another_layout_of_the_job_is_refused():
    library = native._library("float")
    job = (ctypes.c_int64 * 64)(*[99] * 64)  # more taps than it has room for
    codes = [library.econv_means(ctypes.addressof(job), count) for count in range(64)]
    assert sorted(codes)[-2:] == [1, 2]
    with pytest.raises(ValueError, match="expected 13 numbers and 7 tensors"):
        native.means(torch.float32, [0] * 3, [])
