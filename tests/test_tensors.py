"""How tensors lie in memory, and what runs apart from all that goes on around it."""

import pytest
import torch
from torch import func

import econv
from econv.tensors import memory_format, replicate, transformed, undisturbed, watched

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (3, 0)])
def test_replicated_borders_are_those_of_torch(before, after):
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 4, 5, dtype=torch.float64).to(memory_format=layout)
        wanted = torch.nn.functional.pad(x, (before, after) * 2, mode="replicate")
        found = replicate(x, before, after)
        assert torch.equal(found, wanted)
        assert found.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 4, 5, 6)])
def test_a_layout_is_kept(shape):
    x, last = torch.zeros(shape), LAST[len(shape)]
    assert memory_format(x) is torch.contiguous_format
    pixels = x[0, 0].numel()
    made = torch.empty(shape, memory_format=last)
    assert memory_format(made) is (last if pixels > 1 else torch.contiguous_format)
    assert memory_format(x[..., ::2].transpose(-1, -2)) is torch.contiguous_format


@pytest.mark.parametrize("dimension", [2, 3])
@pytest.mark.parametrize("engine", ["dense", "spectral/torch"])
def test_networks_of_channels_last_are_mapped_over_members_of_a_batch(dimension, engine):
    def layer(name, *given, **options):
        return getattr(econv, f"{name}{dimension}d")(*given, **options)

    group, last = {2: "p4", 3: "C2"}[dimension], LAST[dimension + 2]
    conv = layer("GroupConv", 1, 1, group, engine=engine)
    norm = layer("GroupBatchNorm", 1, group).eval()
    network = torch.nn.Sequential(conv, norm, layer("Downsample"), layer("GroupPool", group))
    x = torch.randn(3, conv.in_channels, *[6] * dimension).to(memory_format=last)
    wanted = network(x)

    def total(x):
        return network(x[None]).square().sum()

    torch.testing.assert_close(func.vmap(lambda x: network(x[None])[0])(x), wanted)
    each = func.vmap(func.grad(total))(x)
    (whole,) = torch.autograd.grad(network(x.requires_grad_()).square().sum(), x)
    torch.testing.assert_close(each, whole)


def test_what_is_undisturbed_is_no_part_of_what_runs_around():
    kept = []

    def inner(given):
        assert transformed()
        with undisturbed(torch.device("cpu")):
            made = torch.full((3,), 2.0, requires_grad=True)
            assert (made[None] @ made[:, None]).dtype == torch.float32
            assert not made.is_inference()
            (slope,) = torch.autograd.grad((made @ made).square(), made)
        kept.append(slope)
        return given

    hooks = torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), hooks:
        func.vmap(inner)(torch.zeros(2))
    assert kept[0].tolist() == [96.0] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tracing itself
def test_subclasses_and_tracers_watch():
    x = torch.zeros(2)
    assert not watched(x)
    assert watched(x.as_subclass(type("Other", (torch.Tensor,), {})))
    seen = []
    torch.jit.trace(lambda x: seen.append(watched(x)) or x + 1, x, check_trace=False)
    assert seen == [True]
