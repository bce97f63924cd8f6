"""The worked examples, in small: what their pages claim holds, and the pages show what came out."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMES = ("galaxies", "tissue", "waves")

if not (ROOT / "examples" / "workshop.py").exists():
    pytest.skip("no examples beside the tests", allow_module_level=True)
pytest.importorskip("matplotlib")


def example(name: str):
    if name != "waves":
        pytest.importorskip("skimage")
    return importlib.import_module(name)


def parameters_agree(networks) -> bool:
    counts = [found["parameters"] for found in networks.values()]
    return max(counts) <= 1.1 * min(counts)


def test_galaxies_are_told_apart_at_every_angle():
    networks = example("galaxies").compare(steps=80, seeds=1, angles=[0, 45, 90, 180])["networks"]
    assert parameters_agree(networks)
    assert networks["p8"]["changed"][2:] == [0.0, 0.0]  # quarter turns and half turns
    assert networks["plain"]["changed"][1] > 3 * networks["p8"]["changed"][1]
    p8, plain, turned = (np.mean(networks[k]["right"]) for k in ("p8", "plain", "turned"))
    assert p8 > max(plain, turned) + 0.05


def test_the_converted_unet_draws_the_same_mask_at_every_angle():
    # After fewer steps what it draws still depends on the last digit of every sum.
    results, _ = example("tissue").compare(steps=80, seeds=1, angles=[0, 105, 270])
    p8, plain = results["networks"]["p8"], results["networks"]["plain"]
    assert parameters_agree(results["networks"])
    assert p8["changed"][2] < 1e-3  # a quarter turn; what is left is a tie broken by rounding
    assert max(p8["changed"]) < 0.05 < min(plain["changed"][1:])
    assert np.ptp(p8["overlap"]) < 0.02 < 0.05 < np.ptp(plain["overlap"])
    assert min(p8["overlap"]) > 0.7


def test_waves_from_other_directions_need_no_learning():
    results, _ = example("waves").compare(steps=70, seeds=1)
    p8, plain = results["networks"]["p8"], results["networks"]["plain"]
    assert parameters_agree(results["networks"])
    assert p8["quarter_turn"] < 1e-5 < 0.1 < plain["quarter_turn"]
    one_step = {angle: steps[0] for angle, steps in p8["errors"].items()}
    assert one_step["90"] < 1.2 * one_step["0"]
    for angle in ("45", "90"):
        assert 3 * one_step[angle] < plain["errors"][angle][0]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_what_came_out(name):
    from workshop import with_table

    page = (DOCS / "examples" / f"{name}.md").read_text(encoding="utf-8")
    results = json.loads((DOCS / "pictures" / f"{name}.json").read_text(encoding="utf-8"))
    assert with_table(page, example(name).table(results)) == page
    found = results["networks"]
    assert parameters_agree(found)
    if name == "tissue":
        assert min(found["p8"]["overlap"]) > min(found["plain"]["overlap"]) + 0.05
    picture = DOCS / "pictures" / f"{name}.png"
    assert 10_000 < picture.stat().st_size < 150_000
    assert f"](../pictures/{name}.png)](../pictures/{name}.png)" in page


def test_a_page_without_a_place_for_its_table_is_noticed():
    from workshop import with_table

    assert with_table("a\n<!-- table -->\nold\n<!-- end -->\n", "new").count("new") == 1
    with pytest.raises(ValueError, match="markers of a table once in the page; found 0"):
        with_table("nothing", "new")
