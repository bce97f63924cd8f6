"""Networks in every precision and memory format: autocast, conversion, channels-last throughout."""

import copy

import pytest
import torch

import econv
from catalogue import CASES, MODES, NETWORKS, case, run
from test_spectral import ON_A_CPU

# Relative errors; a network adds up those of its layers.
TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.15, torch.float64: 1e-4}


def distance(found, wanted):
    return max(
        float((a.detach().double() - b.detach().double()).abs().max())
        / max(1.0, float(b.detach().abs().max()))
        for a, b in zip(found, wanted, strict=True)
    )


@MODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_autocast_computes_the_same_and_trains(name, dtype, train):
    module, x = case(name, train, dropout=False)
    exact = run(copy.deepcopy(module), x)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        found = run(module, x)
    assert distance(found, exact) <= TOLERANCE[dtype]
    sum(out.float().sum() for out in found).backward()
    for tensor in (x, *module.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.float32
        assert tensor.grad.isfinite().all()


@MODES
@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda module: module.double(), torch.float64),
        (lambda module: module.half(), torch.float16),
        (lambda module: module.to(torch.bfloat16), torch.bfloat16),
    ],
    ids=["double", "half", "bfloat16"],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_converted_networks_compute_the_same_and_train(name, convert, dtype, train):
    module, x = case(name, train, dropout=False)
    exact = run(copy.deepcopy(module), x)
    convert(module)
    found = run(module, x.to(dtype))
    assert all(out.dtype == dtype for out in found)
    assert distance(found, exact) <= TOLERANCE[dtype]
    sum(out.float().mean() for out in found).backward()
    for parameter in module.parameters():
        assert parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()


def test_a_layer_of_another_dtype_would_be_noticed():
    module, x = case("convnet6", train=False)
    exact = run(copy.deepcopy(module), x)
    with torch.no_grad():
        module.layers[0].weight.mul_(1.5)
        module.classifier.weight.mul_(1.5)
    assert distance(run(module.half(), x.half()), exact) > TOLERANCE[torch.float16]


@MODES
@pytest.mark.parametrize("name", NETWORKS)
def test_channels_last_is_kept_by_every_layer_of_a_network(name, train):
    module, x = case(name, train, dropout=False)
    contiguous = run(copy.deepcopy(module), x)
    lost = []

    def look(part, args, out):
        if isinstance(out, torch.Tensor) and out.ndim == 4 and min(out.shape[1:]) > 1:
            seen.append(part)
            if not out.is_contiguous(memory_format=torch.channels_last):
                lost.append(type(part).__name__)

    seen: list[torch.nn.Module] = []
    for part in module.modules():
        part.register_forward_hook(look)
    module.to(memory_format=torch.channels_last)
    found = run(module, x.to(memory_format=torch.channels_last))
    assert lost == []
    assert len(seen) >= 4
    assert distance(found, contiguous) <= 1e-5


@pytest.mark.parametrize("engine", ON_A_CPU)
def test_one_channel_that_was_made_channels_last_is_so_for_every_engine(engine):
    """Its numbers lie as they did before: the stride says what is wanted, as for torch."""
    layer = econv.LiftConv2d(1, 2, "p4", engine=engine)
    x = torch.randn(2, 1, 9, 10)
    assert layer(x).is_contiguous()
    last = layer(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert not last.is_contiguous()
