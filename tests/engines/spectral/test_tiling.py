"""The rules by which launches on a GPU are cut, without a GPU and without Triton."""

import subprocess
import sys

import numpy as np
import pytest

from econv import filter_basis
from econv.engines.spectral import tiling
from econv.engines.spectral.triton.scheme import folded, scheme
from econv.plan import spectral_plan

HOPPER = {"p2": False, "p4": False, "p8": True, "p16": True, "p8m": True, "p32": True, "p1": False}


def layout(group):
    return scheme(spectral_plan(filter_basis(group), "regular", "regular"), 8)


@pytest.mark.parametrize(("group", "expected"), HOPPER.items())
def test_layers_of_many_targets_are_warp_specialised(group, expected):
    for kind in (tiling.convolution_tiling, tiling.weight_gradient_tiling):
        found = kind(layout(group), 20, tiling.Tiles(), True)
        assert found.warp_specialised is expected


def test_what_does_not_fit_is_not_warp_specialised(monkeypatch):
    given = (layout("p16"), 20, tiling.Tiles(), True)
    with monkeypatch.context() as patch:  # features more than the rows of a product
        patch.setattr(tiling, "weight_gradient_features", lambda layout: 128)
        assert not tiling.weight_gradient_tiling(*given).warp_specialised
        assert tiling.convolution_tiling(*given).warp_specialised
    monkeypatch.setattr(tiling, "_SHARED", 1000)
    assert not tiling.convolution_tiling(*given).warp_specialised


@pytest.mark.parametrize("special", [False, True])
def test_kernels_that_may_not_be_warp_specialised_are_not(special):
    chosen = tiling.Tiles()
    assert tiling.convolution_tiling(layout("p8"), 40, chosen, special).warp_specialised is special
    found = tiling.weight_gradient_tiling(layout("p8"), 40, chosen, special)
    assert found.warp_specialised is special


def test_parts_are_powers_of_two_and_hold_all_fields():
    for fields in range(1, 200):
        for programs, least in ((1, 4), (2, 8), (3, 4)):
            cut = tiling.Cut.of(fields, programs, least)
            assert all(part & (part - 1) == 0 and part >= least for part in cut.parts)
            assert len(cut.parts) <= 2
            assert 0 <= cut.padded - fields < sum(cut.parts)


def test_the_rules_need_no_triton():
    code = "import sys; sys.modules['triton'] = None; import econv.engines.spectral.tiling"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("group", ["p4", "p8", "p8m"])
def test_a_layout_has_every_slot_and_weight_where_it_says(group):
    found = layout(group)
    assert sorted(found.positions) == list(range(len(found.plan.analysis)))
    entries, signs = found.entries
    where, again = found.owners
    for weight in range(found.plan.weights):
        held = where[weight][where[weight] >= 0]
        assert sorted(held) == np.flatnonzero(entries == weight).tolist() != []
        assert np.array_equal(again[weight][: len(held)], signs[held])


@pytest.mark.parametrize("group", ["p8", "O"])
def test_stencils_on_sums_and_differences_are_the_stencils(group):
    plan = spectral_plan(filter_basis(group), "regular", "regular")
    size, reach = plan.basis.size, plan.basis.size // 2
    taps = np.arange(size) - reach
    sums = [(taps == 0).astype(float)] + [(abs(taps) == t).astype(float) for t in taps[reach + 1 :]]
    matrix = np.stack(sums + [(abs(taps) == t) * np.sign(taps) for t in taps[reach + 1 :]])
    spec = {2: "sab,ay,bx->syx", 3: "sabc,az,by,cx->szyx"}[plan.stencils.ndim - 1]
    given = np.einsum(spec, folded(plan), *[matrix] * (plan.stencils.ndim - 1))
    assert np.abs(given - plan.stencils).max() < 1e-12 * np.abs(plan.stencils).max()
