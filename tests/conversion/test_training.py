"""What a conversion does with training behaviour, hooks, frozen and reparametrised weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from econv import ConversionError, convert
from plain_networks import conv_norm
from test_convert import Of, between, converted, images


def drop_path(x, p, training):
    if not training:
        return x
    kept = torch.rand(x.shape[0], 1, 1, 1, device=x.device, dtype=x.dtype) > p
    return x * kept / (1 - p)


def differ(network, x):
    with torch.no_grad():
        return not torch.equal(network(x), network(x))


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "alpha_dropout"])
def test_functions_that_drop_follow_the_mode(name):
    drop = getattr(functional, name)
    network = converted(Of(lambda s, x, y: drop(y, 0.3, s.training)))
    assert differ(network.train(), images())
    assert not differ(network.eval(), images())
    assert not any("eval" in note for note in network.report.notes)


def test_dropout_that_is_kept_on_stays_on():
    for function in (
        lambda s, x, y: functional.dropout(y, 0.3),  # torch's default
        lambda s, x, y: functional.dropout(y, 0.3, training=True),
    ):
        network = converted(Of(function), measure=True)
        assert differ(network.eval(), images())
        assert any("drops in eval mode too" in note for note in network.report.notes)
    with pytest.raises(ConversionError, match="drops whole maps in eval mode too"):
        converted(Of(lambda s, x, y: functional.dropout2d(y, 0.3, True)))


def test_dropout_that_is_kept_off_stays_off():
    network = converted(Of(lambda s, x, y: functional.dropout(y, 0.3, training=False)))
    assert not differ(network.train(), images())
    assert any("never drops" in note for note in network.report.notes)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x, y: drop_path(y, 0.2, s.training),
        lambda s, x, y: y + torch.randn_like(y) if s.training else y,
        lambda s, x, y: s.conv(y) if s.training else y,
    ],
)
def test_what_the_source_does_in_training_only_is_noted(function):
    report = converted(Of(function, conv=nn.Conv2d(8, 8, 1))).report
    assert any("in training the source computes something else" in n for n in report.notes)


def test_a_network_that_does_the_same_in_training_has_no_note():
    source = nn.Sequential(conv_norm(3, 8), nn.Dropout(0.2), nn.Conv2d(8, 2, 1))
    assert converted(source).report.notes == ()


@pytest.mark.parametrize("where", ["0", "0.1", ""])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_stop_the_conversion_or_are_noted(where, kind):
    source = nn.Sequential(conv_norm(3, 8), nn.Conv2d(8, 2, 1))
    getattr(source.get_submodule(where), kind)(lambda *given: None)
    with pytest.raises(ConversionError, match="forward hooks") as caught:
        converted(source)
    assert caught.value.module == where
    notes = converted(source, strict=False).report.notes
    assert any(f"hooks are gone: {where or 'the network'}" in note for note in notes)


def test_frozen_parameters_stay_frozen_with_their_numbers_or_are_noted():
    source = between(nn.BatchNorm2d(8))
    source[0].requires_grad_(False)
    source[1].bias.requires_grad_(False)
    network = converted(source, match="fields", pretrained=True)
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad}
    assert frozen == {"0.weight", "0.bias", "1.bias"}
    anew = converted(source)
    assert all(p.requires_grad for p in anew.parameters())
    assert any("frozen parameters" in note for note in anew.report.notes)


def test_reparametrised_weights_are_taken_over_and_noted():
    source = between(nn.ReLU()).double()
    plain = copy.deepcopy(source)
    parametrizations.weight_norm(source[0])
    options = {"pretrained": True, "options": {"stencils": "central"}, "measure": False}
    network, expected = (
        convert(each, "p4", "fields", example_input=images(), **options) for each in (source, plain)
    )
    assert torch.allclose(network(images() * 0 + 1), expected(images() * 0 + 1))
    assert any("no longer normalised or reparametrised: 0" in n for n in network.report.notes)


def test_statistics_are_computed_as_in_the_source():
    for function in (
        lambda s, x, y: y / (1 + y.var((2, 3), False)[:, :, None, None]),
        lambda s, x, y: y / (1 + y.var((2, 3), False, True)),
        lambda s, x, y: y / (1 + torch.std(y, (2, 3), unbiased=False, keepdim=True)),
        lambda s, x, y: y / (1 + y.std((2, 3), keepdim=True)),
        lambda s, x, y: y - y.mean(axis=1, keepdims=True),
    ):
        source = Of(function).double()
        options = {"pretrained": True, "options": {"stencils": "central"}, "measure": False}
        network = convert(source, "p1", "fields", example_input=images(), **options)
        x = images()
        assert torch.allclose(network(x), source(x), atol=1e-12)


@pytest.mark.parametrize("group", ["p1", "p4"])
@pytest.mark.parametrize("match", ["fields", "params", "width"])
def test_a_grouped_first_layer_is_fitted_block_by_block_or_not_at_all(group, match):
    source = nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1, groups=3), nn.ReLU(), nn.Conv2d(24, 2, 1))
    ).double()
    options = {"pretrained": True, "options": {"stencils": "central"}, "measure": False}
    network = convert(source, group, match, example_input=images(), **options)
    first, line = network.get_submodule("0"), network.report.lines[0]
    if first.groups == 3:
        assert line.fit <= 1e-12
        kept = first.filters()[:: first.group.order]
        blocks = source[0].weight.unflatten(0, (3, 8))
        for filters, block in zip(kept.unflatten(0, (3, -1)), blocks, strict=True):
            for found in filters:
                assert (block - found).flatten(1).norm(dim=1).min() <= 1e-12
    else:
        assert line.fit is None
        assert any("0: its blocks are not the source's" in n for n in network.report.notes)


def test_blocks_that_cannot_be_kept_are_drawn_anew():
    source = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Conv2d(6, 2, 1)).double()
    for match in ("width", "params"):
        network = converted(source, "p8", match, pretrained=True)
        assert network.get_submodule("0").groups == 1
        assert network.report.lines[0].fit is None
