"""Splits and data sets: statistics, normalisation, and who is held out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from econv import data
from econv.data import Dataset, Split
from econv.data.dividing import stratified
from econv.data.splits import statistics
from small_data import random_dataset, random_split


def test_statistics_are_those_of_the_training_split():
    found = random_dataset()
    x = found.train.x.numpy() / 255.0
    assert found.mean == pytest.approx(x.mean((0, 2, 3)), rel=1e-14)
    assert found.std == pytest.approx(x.std((0, 2, 3)), rel=1e-13)


def test_statistics_do_not_overflow():
    x = torch.full((200, 1, 40, 40), 255, dtype=torch.uint8)
    x[::2] = 0
    assert statistics(x) == ((0.5,), (0.5,))


def test_a_constant_channel_is_not_divided_by_zero():
    blank = Split(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1]))
    found = Dataset.of("blank", blank, blank, blank, classes=2)
    assert found.std == (1.0,)
    assert not data.normalise(blank.x, found).any()


@pytest.mark.parametrize("channels", [1, 3])
def test_normalised_training_images_have_mean_0_and_std_1(channels):
    splits = [random_split(channels=channels, seed=s) for s in range(3)]
    found = Dataset.of("random", *splits, classes=4)
    result = data.normalise(found.train.x, found)
    assert result.dtype == torch.float32
    assert result.mean((0, 2, 3)).numpy() == pytest.approx(0, abs=1e-6)
    assert result.std((0, 2, 3), correction=0).numpy() == pytest.approx(1, abs=1e-6)
    assert torch.equal(data.normalise(found.train.x.float() * (1 / 255), found), result)
    with pytest.raises(ValueError, match=rf"expected \[batch, {channels}, height, width\]"):
        data.normalise(found.train.x[:, :0], found)


def test_validation_joins_training():
    found = random_dataset()
    joined = found.with_validation_in_training()
    assert torch.equal(joined.train.x, torch.cat([found.train.x, found.validation.x]))
    assert torch.equal(joined.train.y, torch.cat([found.train.y, found.validation.y]))
    assert joined.validation is found.validation
    assert joined.test is found.test
    assert joined.mean == pytest.approx((joined.train.x / 255.0).mean((0, 2, 3)).tolist())
    assert joined.mean != found.mean


def test_splits_refuse_what_is_no_split():
    x, y = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"uint8 \[n, channels, height, width\]; got torch.float"):
        Split(x.float(), y)
    with pytest.raises(ValueError, match="uint8"):
        Split(x[:, 0], y)
    with pytest.raises(ValueError, match=r"int64 \[3\]"):
        Split(x, y[:2])
    with pytest.raises(ValueError, match="int64"):
        Split(x, y.int())
    with pytest.raises(ValueError, match="one device"):
        Split(x, y.to("meta"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"classes": 3}, "train classes from 0 to 2; got 0 to 3"),
        ({"classes": 0}, "at least one class"),
        ({"mean": (0.0,)}, "each of 3 channels"),
        ({"std": (1.0, 0.0, 1.0)}, "positive stds"),
        ({"std": (1.0, math.nan, 1.0)}, "positive stds"),
        ({"mean": (1.0, math.inf, 1.0)}, "finite means"),
        ({"test": random_split(size=6)}, "test images of"),
    ],
)
def test_data_sets_refuse_what_is_none(change, problem):
    with pytest.raises(ValueError, match=problem):
        replace(random_dataset(), **change)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_every_stretch_of_the_stratified_order_is_representative(classes, seed, draw):
    y = np.array(classes)
    order = stratified(y, seed)
    assert sorted(order) == list(range(len(y)))
    cut = draw.draw(st.integers(0, len(y)))
    found = np.bincount(y[order[:cut]], minlength=5)
    expected = np.bincount(y, minlength=5) * cut / len(y)
    assert np.abs(found - expected).max() <= 3  # half a step of its own, and of each of five
