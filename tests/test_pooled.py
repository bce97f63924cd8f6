"""Batch norm from pooled statistics of channels: the same as torch's norm of fields.

The kernels that it calls exist on GPUs alone; here stand-ins do what torch's documentation of
`SyncBatchNorm` says of them. tests/test_cuda.py runs the kernels themselves.
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
    monkeypatch.setattr(pooled, "usable", lambda x, fields: True)
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
    monkeypatch.setattr(pooled, "usable", lambda x, fields: False)
    wanted = [step(twin, x * scale, probe) for scale in (1, 2)]
    assert len(kernels) == 8
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 8, 4, 4),
        torch.zeros(2, 8, 4),
        torch.fx.Proxy(torch.fx.Graph().placeholder("x")),
    ],
    ids=["CPU", "three dimensions", "followed by torch.fx"],
)
def test_not_usable(x):
    assert not pooled.usable(x, 2)
