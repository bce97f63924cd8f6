"""The layers on a GPU: the same numbers as on the CPU, in every dtype, compiled too."""

import copy

import pytest
import torch
from torch import nn

from econv import (
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupPool2d,
    GroupUpsampleConv2d,
    LiftConv2d,
    Restrict2d,
    Upsample2d,
    VectorConv2d,
)
from econv.layers import pooled
from econv.models import ResNet, create_model
from econv.testing import assert_equivariant, smooth_field, transform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")

LAYERS = {
    "lift": (lambda: LiftConv2d(3, 2, "p8", vectors=1, bias=True), 3),
    "group": (lambda: GroupConv2d(2, 3, "p8m", bias=True, padding_mode="reflect"), 32),
    "strided": (lambda: GroupConv2d(2, 2, "p6", stride=2, dilation=2, groups=2), 12),
    "vector": (lambda: VectorConv2d(2, 2, "p8"), 16),
    "up": (lambda: GroupUpsampleConv2d(2, 2, "p4"), 8),
    "batch norm": (lambda: GroupBatchNorm2d(2, "p8"), 16),
    "instance norm": (lambda: GroupInstanceNorm2d(2, "p8", affine=True), 16),
    "layer norm": (lambda: GroupLayerNorm2d(2, "p8"), 16),
    "pool": (lambda: GroupPool2d("p8"), 16),
    "dropout": (lambda: GroupDropout2d("p8").eval(), 16),
    "down": (Downsample2d, 4),
    "down max": (lambda: Downsample2d("max"), 4),
    "upsample": (Upsample2d, 4),
    "restrict": (lambda: Restrict2d("p8", "p4"), 16),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_equal_the_cpu(name, memory_format):
    make, channels = LAYERS[name]
    torch.manual_seed(0)
    here = make().double()
    there = copy.deepcopy(here).cuda()
    x = torch.randn(2, channels, 13, 13, dtype=torch.float64).to(memory_format=memory_format)
    runs = []
    for layer, image in ((here, x), (there, x.cuda())):
        image = image.detach().requires_grad_()
        out = layer(image)
        torch.manual_seed(1)
        (out * torch.randn(out.shape, dtype=torch.float64).to(out.device)).sum().backward()
        gradients = [p.grad for p in layer.parameters()]
        runs.append([t.detach().cpu() for t in (out, image.grad, *gradients)])
    for cpu, cuda in zip(*runs, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_every_dtype_runs(name, dtype):
    make, channels = LAYERS[name]
    layer = make().to(device="cuda", dtype=dtype)
    x = torch.randn(2, channels, 14, 14, device="cuda", dtype=dtype)
    out = layer(x.to(memory_format=torch.channels_last))
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_quarter_turns_are_exact_on_the_device():
    network = ResNet("p8", depth=8, fields=(2, 3, 4), in_channels=1, pool="max", exact=True)
    network = network.double().cuda().eval()
    for size in (32, 33):
        image = smooth_field(size).cuda()
        assert_equivariant(network, image, tolerance=1e-11)
        assert transform(image, "p8", 1).device.type == "cuda"


# torch warns of its own deprecated parts while the compiler is imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores")
def test_a_compiled_network_is_one_graph_and_trains_the_same():
    """In float64: with fewer digits a maximum may be that of another orientation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = ResNet("p8", depth=8, fields=(2, 3, 4), pool="max", exact=True).double().cuda()
    compiled = torch.compile(copy.deepcopy(network), fullgraph=True)
    x = torch.randn(4, 3, 32, 32, device="cuda", dtype=torch.float64)
    for module in (network, compiled):
        loss = nn.functional.cross_entropy(module(x), torch.arange(4, device="cuda"))
        loss.backward()
    for plain, other in zip(network.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, plain.grad, rtol=1e-8, atol=1e-8)


def test_autocast_keeps_the_filters_exact_until_the_convolution():
    layer = GroupConv2d(4, 4, "p8").cuda()
    x = torch.randn(2, 32, 16, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer.filters().dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores")
def test_gradients_of_a_compiled_network_in_bfloat16_are_numbers():
    torch._dynamo.reset()  # of the sizes here, whatever was compiled before
    torch.manual_seed(0)
    network = create_model("convnet6_p8", pool="max", dropout=0.0).cuda()
    x = torch.randn(8, 1, 28, 28, device="cuda")

    def gradients(module, autocast):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = module(x).logsumexp(1).sum()
        found = torch.autograd.grad(loss, list(network.parameters()))
        return torch.cat([gradient.flatten() for gradient in found])

    exact = gradients(network, autocast=False)
    plain, compiled = (
        float((gradients(module, autocast=True) - exact).norm() / exact.norm())
        for module in (network, torch.compile(network))
    )
    assert compiled < 1.5 * plain
    assert plain < 0.2


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores")
def test_a_norm_of_fields_is_that_of_the_cpu(dtype, memory_format, compiled):
    """Its sums are found channel by channel: outputs, gradients and running statistics."""
    torch.manual_seed(0)
    here = GroupBatchNorm2d(5, "p8").double()
    nn.init.uniform_(here.weight, 0.5, 1.5)
    there = copy.deepcopy(here).float().cuda()
    x = (2 + 3 * torch.randn(40, 40, 9, 7)).to(dtype).to(memory_format=memory_format)
    probe = torch.randn_like(x)
    runs = []
    for norm, kind in ((here, torch.float64), (there, dtype)):
        image = x.to(norm.weight.device, kind).detach().requires_grad_()
        run = torch.compile(norm, fullgraph=True) if compiled and norm is there else norm
        out = run(image)
        out.backward(probe.to(out))
        assert out.dtype == kind
        assert image.grad.stride() == image.stride()
        runs.append([out, image.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for wanted, found in zip(*runs, strict=True):
        scale = wanted.detach().abs().max().double()
        assert (found.detach().cpu().double() - wanted.detach()).abs().max() <= close * scale


def test_derivatives_of_the_second_order_of_a_norm_of_fields(monkeypatch):
    monkeypatch.setattr(pooled, "_LEAST", 0)
    torch.manual_seed(0)
    norm = GroupBatchNorm2d(2, "p2", track_running_stats=False).double().cuda()
    x = torch.randn(3, 4, 3, 2, dtype=torch.float64, device="cuda", requires_grad=True)
    assert torch.autograd.gradcheck(norm, x)
    assert torch.autograd.gradgradcheck(norm, x)


def test_the_sums_of_a_norm_of_fields_are_found_channel_by_channel(monkeypatch):
    """One field at a time leaves most of a GPU idle."""
    asked = []
    found = torch.batch_norm_stats
    monkeypatch.setattr(torch, "batch_norm_stats", lambda x, eps: asked.append(x) or found(x, eps))
    norm = GroupBatchNorm2d(2, "p8").cuda()
    x = torch.randn(64, 16, 16, 16, device="cuda")
    norm(x[:1])  # too small to be worth it
    assert not asked
    norm(x)
    assert len(asked) == 1
    norm.eval()(x)
    assert len(asked) == 1
