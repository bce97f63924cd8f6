"""Keyed dropout: its share, and what it depends on."""

import pytest
import torch

from econv.train import KeyedDropout
from tiny_training import trainer, with_options


def keyed(probability: float, keys: torch.Tensor, salt: int = 0) -> KeyedDropout:
    dropout = KeyedDropout(probability, salt)
    dropout.keys = keys
    return dropout


@pytest.mark.parametrize("probability", [0.1, 0.2, 0.5])
def test_keyed_dropout_drops_its_share_and_keeps_the_mean(probability: float) -> None:
    x = torch.ones(64, 5, 33, 31)
    y = keyed(probability, torch.arange(64))(x)
    share = (y == 0).float()
    assert share.mean().item() == pytest.approx(probability, abs=0.002)
    assert y.mean().item() == pytest.approx(1.0, abs=0.004)
    # Every sample and every place has its share, and neighbours know nothing of each other.
    spread = (probability * (1 - probability) / x[0].numel()) ** 0.5
    assert (share.mean((1, 2, 3)) - probability).abs().max() < 5 * spread
    centred = share.flatten(1) - probability
    for step in (1, 2, 3, 4, 31, 33 * 31):
        both = (centred[:, step:] * centred[:, :-step]).mean() / (probability * (1 - probability))
        assert abs(both.item()) < 0.01
    across = (centred[1:] * centred[:-1]).mean() / (probability * (1 - probability))
    assert abs(across.item()) < 0.01


def test_keyed_dropout_hangs_on_sample_layer_and_epoch_and_not_on_the_batch() -> None:
    x = torch.ones(6, 2, 5, 5)
    keys = torch.arange(6)
    y = keyed(0.5, keys)(x)
    assert torch.equal(keyed(0.5, keys[2:4])(x[2:4]), y[2:4])
    assert not torch.equal(keyed(0.5, keys, salt=1)(x), y)
    assert not torch.equal(keyed(0.5, keys + 6)(x), y)
    network = trainer(with_options(dropout=0.5))
    masks = []
    for _ in range(2):
        network._loss(torch.arange(4))
        masks.append(network.dropouts[0].keys)
        network.step_number.add_(network.steps)
    assert not torch.equal(masks[0], masks[1])


def test_keyed_dropout_passes_gradients_and_rests_in_evaluation() -> None:
    dropout = keyed(0.5, torch.arange(4))
    x = torch.randn(4, 3, 3, 3, requires_grad=True)
    y = dropout(x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    assert torch.equal(dropout.eval()(x), x)
    with pytest.raises(ValueError, match="a key for each sample"):
        keyed(0.5, torch.arange(3))(x)
