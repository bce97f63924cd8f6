"""At initialisation a deep network neither explodes nor dies out."""

from __future__ import annotations

import math

import pytest

from deep_growth import group_layer, growth, plain_layer

STENCILS = ["central", "isotropic", "gaussian"]


def mean_growth(maker, **options) -> float:
    make, channels = maker
    means = growth(make, channels, **options)
    return math.exp(sum(map(math.log, means)) / len(means))


@pytest.mark.parametrize("seeds", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stencils", STENCILS)
@pytest.mark.parametrize("group", ["p8", "p6m"])
def test_fifty_layers_keep_the_second_moment(group, stencils, seeds):
    growth_per_layer = mean_growth(group_layer(group, stencils=stencils), seeds=range(seeds))
    assert 0.9 <= growth_per_layer <= 1.1


@pytest.mark.parametrize("group", ["p8", "p6m"])
def test_the_papers_scheme_explodes_with_central_differences(group):
    maker = group_layer(group, stencils="central", init="paper")
    assert mean_growth(maker, seeds=range(2), depth=25) > 1.15


def test_the_measurement_gives_he_and_deviations_from_it_their_due():
    make, channels = plain_layer(64, 3)
    assert mean_growth((make, channels), seeds=range(2)) == pytest.approx(1.0, abs=0.1)

    def doubled():
        conv = make()
        conv.weight.data *= 2
        return conv

    assert mean_growth((doubled, channels), seeds=range(2)) == pytest.approx(4.0, abs=0.4)
