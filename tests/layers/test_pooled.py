"""Batch norm from pooled statistics of channels: the same as torch's norm of fields.

The kernels that it calls exist on GPUs alone; here stand-ins do what torch's documentation of
`SyncBatchNorm` says of them. tests/layers/test_cuda.py runs the kernels themselves.
"""

import copy

import pytest
import torch
from torch import nn

import econv
from econv.layers import pooled

SHAPE = (1, -1, 1, 1)


def stats(x, eps):
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return mean, (variance + eps).rsqrt()


def elemt(x, weight, bias, mean, invstd, eps):
    normed = (x - mean.view(SHAPE)) * invstd.view(SHAPE)
    return normed if weight is None else normed * weight.view(SHAPE) + bias.view(SHAPE)


def backward_reduce(gradient, x, mean, invstd, weight, to_input, to_weight, to_bias):
    assert to_input
    sums = gradient.sum((0, 2, 3)), (gradient * (x - mean.view(SHAPE))).sum((0, 2, 3))
    return *sums, sums[1] * invstd if to_weight else None, sums[0] if to_bias else None


def backward_elemt(gradient, x, mean, invstd, weight, sums, products, count):
    centred = (x - mean.view(SHAPE)) * (products * invstd**2).view(SHAPE)
    scale = invstd if weight is None else invstd * weight
    return (gradient - (sums.view(SHAPE) + centred) / count.sum()) * scale.view(SHAPE)


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for the kernels; the list of calls tells that they ran."""
    calls = []
    for made in (stats, elemt, backward_reduce, backward_elemt):

        def run(*arguments, made=made):
            calls.append(made.__name__)
            return made(*arguments)

        monkeypatch.setattr(torch, f"batch_norm_{made.__name__}", run)
    monkeypatch.setattr(pooled, "usable", lambda x, fields, eps: True)
    return calls


def ready(norm, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in norm.parameters():
            p.uniform_(0.5, 1.5)
    return norm.double()


def step(norm, x, probe):
    x = x.clone().requires_grad_()
    out = norm(x)
    return [out, *torch.autograd.grad(out, [x, *norm.parameters()], probe), *norm.buffers()]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3}]
)
def test_outputs_gradients_and_running_statistics_are_those_of_torch(
    kernels, monkeypatch, options, layout
):
    norm = ready(econv.GroupBatchNorm2d(3, "p4", **options))
    twin = copy.deepcopy(norm)
    x = (3 + 2 * torch.randn(4, 12, 5, 6, dtype=torch.float64)).to(memory_format=layout)
    probe = torch.randn_like(x)
    found = [step(norm, x * scale, probe) for scale in (1, 2)]
    assert kernels == ["stats", "elemt", "backward_reduce", "backward_elemt"] * 2
    monkeypatch.setattr(pooled, "usable", lambda x, fields, eps: False)
    wanted = [step(twin, x * scale, probe) for scale in (1, 2)]
    assert len(kernels) == 8
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "layout", "options", "dtype"),
    [
        ((3, 12, 5, 6), torch.channels_last, {"momentum": 0.3}, torch.float64),
        ((3, 12, 5, 6), torch.channels_last, {"affine": False}, torch.bfloat16),
        pytest.param(
            (3, 12, 5, 6),
            torch.channels_last,
            {"track_running_stats": False},
            torch.float64,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (2, 72, 2, 3, 2), torch.channels_last_3d, {}, torch.float64, marks=pytest.mark.slow
        ),
    ],
)
def test_in_a_compiled_graph_it_is_the_norm_of_fields(monkeypatch, shape, layout, options, dtype):
    """As a GPU has it; the compiler's own kernels run in test_cuda.py."""
    flat = len(shape) == 4
    kind, group = (econv.GroupBatchNorm2d, "p4") if flat else (econv.GroupBatchNorm3d, "O")
    norm = ready(kind(3, group, **options))
    x = (30 + 2 * torch.randn(shape, dtype=torch.float64)).to(dtype).to(memory_format=layout)
    probe = torch.randn_like(x)
    wanted = [step(norm, x.double() * scale, probe.double()) for scale in (1, 2)]
    asked = []
    monkeypatch.setattr(pooled, "usable", lambda x, fields, eps: asked.append(fields) or True)
    norm = ready(kind(3, group, **options)).to(torch.promote_types(dtype, torch.float32))
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True, dynamic=not flat)
    found = [step(compiled, x * scale, probe) for scale in (1, 2)]
    assert asked
    bound = 1e-10 if dtype == torch.float64 else 0.01
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours[0].dtype == dtype
        assert all(image.is_contiguous(memory_format=layout) for image in ours[:2])
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=bound, atol=bound)


def test_derivatives_of_the_second_order(kernels):
    norm = ready(econv.GroupBatchNorm2d(2, "p2"))
    x = torch.randn(3, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    norm.track_running_stats = False
    norm.running_mean = norm.running_var = None
    assert torch.autograd.gradcheck(norm, x)
    assert torch.autograd.gradgradcheck(norm, x)
    assert "backward_elemt" in kernels


def test_evaluation_and_a_cumulative_average_are_left_to_torch(kernels):
    norm = ready(econv.GroupBatchNorm2d(2, "p4"))
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    norm.eval()(x)
    econv.GroupBatchNorm2d(2, "p4", momentum=None).double()(x)
    assert kernels == []


def test_a_shared_norm_pools_only_where_it_is_alone(kernels, monkeypatch):
    norm = econv.convert_sync_batchnorm(nn.Sequential(ready(econv.GroupBatchNorm2d(2, "p4"))))
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    norm(x)
    assert kernels == ["stats", "elemt"]
    from econv.layers import synchronised

    monkeypatch.setattr(synchronised, "_processes", lambda group: "others")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums, group: None)
    norm(x)
    assert kernels == ["stats", "elemt"]


@pytest.mark.parametrize("turned", [False, True])
def test_derivatives_through_an_input_that_is_not_dense(kernels, turned):
    """A penalty on the gradient: what a copy inside the norm would cut off."""
    norm = ready(econv.GroupBatchNorm2d(2, "p2"))
    x = torch.randn(3, 4, 5, 3, dtype=torch.float64, requires_grad=True)

    def penalty(x):
        given = x.transpose(2, 3) if turned else x
        (gradient,) = torch.autograd.grad((norm(given) ** 3).sum(), x, create_graph=True)
        return gradient.square().sum()

    assert torch.autograd.gradcheck(penalty, x)


def test_statistics_that_are_no_longer_tracked_stay(kernels):
    norm = ready(econv.GroupBatchNorm2d(2, "p4"))
    norm.track_running_stats = False
    before = [buffer.clone() for buffer in norm.buffers()]
    norm(torch.randn(2, 8, 4, 4, dtype=torch.float64))
    assert kernels == ["stats", "elemt"]
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))


def test_the_variance_of_a_constant_field_is_not_negative(kernels):
    norm = econv.GroupBatchNorm2d(1, "p2", momentum=1.0)
    assert norm(torch.full((2, 2, 3, 3), 0.1)).abs().max() < 1e-3
    assert float(norm.running_var) >= 0


class OnGPU(torch.Tensor):
    """As much of a tensor on a GPU as is asked for."""

    is_cuda = True


def on_gpu(*shape, **options):
    return torch.zeros(shape, **options).as_subclass(OnGPU)


LARGE = (64, 16, 16, 16)


@pytest.mark.parametrize(
    ("x", "fields", "eps", "wanted"),
    [
        (on_gpu(*LARGE), 2, 1e-5, True),
        (torch.zeros(LARGE), 2, 1e-5, False),
        (on_gpu(*LARGE, dtype=torch.int32), 2, 1e-5, False),
        (on_gpu(2, 16, 16, 16), 2, 1e-5, False),
        (on_gpu(*LARGE), 2, 0.0, False),
    ],
    ids=["a large one", "CPU", "integers", "a small one", "no eps"],
)
def test_where_it_is_usable(monkeypatch, x, fields, eps, wanted):
    monkeypatch.setattr(pooled, "watched", lambda x: False)
    assert pooled.usable(x, fields, eps) is wanted


def test_a_compiler_gets_channels_that_lie_last_by_channel(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    small = on_gpu(2, 16, 4, 4)
    assert not pooled.usable(small, 2, 1e-5)
    assert pooled.usable(small.contiguous(memory_format=torch.channels_last), 2, 1e-5)
    monkeypatch.setattr(pooled, "exporting", lambda: True)
    assert not pooled.usable(small.contiguous(memory_format=torch.channels_last), 2, 1e-5)


def test_it_is_not_usable_while_something_watches_or_transforms(monkeypatch):
    x = on_gpu(*LARGE)
    assert not pooled.usable(x, 2, 1e-5)  # no tensor of torch's own kind
    monkeypatch.setattr(pooled, "watched", lambda x: False)
    monkeypatch.setattr(pooled, "transformed", lambda: True)
    assert not pooled.usable(x, 2, 1e-5)
