"""Keyed random numbers: a function of their words, and as good as random."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from econv import data
from econv.data.keyed import unit_circle

words32 = st.integers(0, 2**32 - 1)


def hashed(*words):
    """The same function in unbounded unsigned arithmetic."""
    state = 0x9E3779B9
    for word in words:
        state ^= word
        state ^= state >> 16
        state = state * 0x7FEB352D % 2**32
        state ^= state >> 15
        state = state * 0x846CA68B % 2**32
        state ^= state >> 16
    return state


@given(st.lists(words32, min_size=1, max_size=4))
def test_keyed_bits_follow_the_words_alone(words):
    expected = hashed(*words)
    tensors = [torch.tensor(word) for word in words]
    assert int(data.keyed_bits(*tensors)) == expected
    assert int(data.keyed_bits(*words[:-1], tensors[-1])) == expected
    assert int(data.keyed_bits(tensors[0], *words[1:])) == expected
    compiled = torch.tensor([words] * 3).unbind(1)
    assert data.keyed_bits(*compiled).tolist() == [expected] * 3


def test_every_bit_of_a_word_changes_half_of_the_bits():
    index = torch.arange(4000)
    one = data.keyed_bits(1, 2, index)
    for bit in range(32):
        other = data.keyed_bits(1, 2, index ^ (1 << bit))
        flipped = torch.stack([((one ^ other) >> k & 1).double().mean() for k in range(32)])
        assert (flipped - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("words", [(0, 0), (0, 1), (1, 0), (123, 199)])
def test_keyed_uniform_numbers_are_uniform(words):
    numbers = data.keyed_uniform(*words, torch.arange(100_000)).double().numpy()
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.015


def test_keyed_numbers_refuse_bad_words():
    with pytest.raises(ValueError, match="at least one word as a tensor"):
        data.keyed_bits(1, 2)
    for word in (-1, 2**32):
        with pytest.raises(ValueError, match=r"from 0 to 2\*\*32 - 1"):
            data.keyed_bits(word, torch.arange(2))
    with pytest.raises(ValueError, match="integer words"):
        data.keyed_bits(torch.zeros(2))


@given(st.integers(0, 300), words32, words32)
def test_a_permutation_holds_every_index_once(n, seed, epoch):
    found = data.permutation(n, seed, epoch)
    assert found.dtype == torch.int64
    assert sorted(found.tolist()) == list(range(n))
    assert torch.equal(found, data.permutation(n, torch.tensor(seed), torch.tensor(epoch)))


def test_permutations_are_random():
    epochs = [data.permutation(10, seed=3, epoch=epoch) for epoch in range(3000)]
    counts = torch.stack([torch.stack(epochs).eq(i).sum(0) for i in range(10)])
    assert stats.chisquare(counts.numpy().ravel()).pvalue > 1e-3
    long = data.permutation(10_000, 0, 0)
    assert abs(np.corrcoef(long, np.arange(10_000))[0, 1]) < 0.04
    assert not torch.equal(long, data.permutation(10_000, 0, 1))
    assert not torch.equal(long, data.permutation(10_000, 1, 0))


@given(words32)
def test_the_unit_circle_is_that_of_the_library(bits):
    cosine, sine = unit_circle(torch.tensor([bits]))
    angle = 2 * math.pi * bits / 2**32
    assert float(cosine) == pytest.approx(math.cos(angle), abs=1.5e-15)
    assert float(sine) == pytest.approx(math.sin(angle), abs=1.5e-15)
    assert math.hypot(cosine, sine) == pytest.approx(1, abs=4e-16)


def test_quarters_of_the_circle_are_exact():
    cosine, sine = unit_circle(torch.arange(4) << 30)
    assert cosine.tolist() == [1, 0, -1, 0]
    assert sine.tolist() == [0, 1, 0, -1]
