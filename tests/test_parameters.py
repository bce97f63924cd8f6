"""Weight decay: the weights of convolutions decay, and nothing else does."""

import math

import pytest
import torch
from torch import nn

import econv
from catalogue import LAYERS, NETWORKS
from econv import parameter_groups
from econv.parameters import no_weight_decay


@pytest.mark.parametrize("name", LAYERS)
def test_of_each_layer_the_weight_of_a_linear_map_alone_decays(name):
    layer = LAYERS[name]()
    decays = {n for n, _ in layer.named_parameters()} - no_weight_decay(layer)
    wanted = {n for n, p in layer.named_parameters() if n.endswith("weight") and p.ndim > 1}
    assert decays == wanted
    assert bool(wanted) == any(part in name for part in ("Conv2d", "Attention", "FrameScore"))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_of_a_network_is_in_one_group(name):
    network = NETWORKS[name][0]()
    decay, other = parameter_groups(network, 0.05)
    assert (decay["weight_decay"], other["weight_decay"]) == (0.05, 0.0)
    assert (decay["name"], other["name"]) == ("decay", "no_decay")
    found = [id(p) for group in (decay, other) for p in group["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {id(p) for p in network.parameters()}
    assert all(p.ndim > 1 for p in decay["params"])
    assert all(p.ndim == 1 for p in other["params"])
    assert decay["params"]
    assert other["params"]


def test_a_norm_with_a_scale_per_pixel_does_not_decay():
    network = nn.Sequential(nn.LayerNorm([4, 4]), nn.Linear(4, 4))
    assert no_weight_decay(network) == {"0.weight", "0.bias", "1.bias"}


def test_frozen_and_shared_parameters():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    decay, other = parameter_groups(nn.Sequential(first, second), 0.1)
    assert [id(p) for p in decay["params"]] == [id(first.weight)]
    assert [id(p) for p in other["params"]] == [id(first.bias)]


def test_an_optimiser_shrinks_what_decays_and_nothing_else():
    network = econv.create_model("convnet6_p4", fields=(1, 1))
    before = {n: p.detach().clone() for n, p in network.named_parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(parameter_groups(network, 0.5), lr=1.0).step()
    left_alone = no_weight_decay(network)
    for name, parameter in network.named_parameters():
        factor = 1.0 if name in left_alone else 0.5
        assert torch.equal(parameter, factor * before[name])
    assert 0 < len(left_alone) < len(before)


@pytest.mark.parametrize("bad", [-1e-3, math.inf, math.nan, "0.1", None, True])
def test_bad_decays_are_refused(bad):
    with pytest.raises(ValueError, match="expected a weight_decay of 0 or more"):
        parameter_groups(nn.Linear(1, 1), bad)
