"""The notebooks run from top to bottom, keep what came out, and what they say of it holds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
notebooks = pytest.importorskip("notebooks", reason="no tools beside the tests")

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]


def run(name: str) -> dict:
    """The names that a notebook leaves; it may take two minutes of one core."""
    pytest.importorskip("skimage")
    notebook = json.loads((notebooks.FOLDER / f"{name}.ipynb").read_text("utf-8"))
    start = time.process_time()
    names = notebooks.run(notebook, name)
    assert time.process_time() - start < 120
    return names


@pytest.mark.slow
def test_images_of_ones_own_are_classified_at_every_angle():
    right = run("classification")["right"]
    assert min(right["p8"]) > 0.95
    assert min(right["plain CNN"]) < min(right["p8"]) - 0.1


@pytest.mark.slow
def test_vessels_are_found_at_every_angle():
    overlaps = run("segmentation")["overlaps"]
    assert min(overlaps["p8"]) > 0.7
    assert max(overlaps["p8"]) - min(overlaps["p8"]) < 0.1
    assert min(overlaps["plain U-Net"]) < min(overlaps["p8"]) - 0.05


@pytest.mark.slow
def test_materials_are_told_apart_in_any_orientation():
    names = run("volumes")
    tilted, anyhow = names["tilted"], names["anyhow"]
    assert min(tilted["I"][0], tilted["I"][-1], tilted["plain CNN"][0]) > 0.9
    assert tilted["plain CNN"][-1] < 0.5
    assert anyhow["plain CNN"] + 0.2 < anyhow["I"] > 0.8


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_came_out_is_kept(path):
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert all(cell["execution_count"] == n for n, cell in enumerate(cells(path), 1))
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert path.stat().st_size < 500_000
    assert not any("/home/" in str(output) or "/tmp/" in str(output) for output in outputs)


def notebook(*sources: str) -> dict:
    return {"cells": [{"cell_type": "code", "source": source} for source in sources]}


def test_a_cell_keeps_text_pictures_and_its_last_value():
    plot = "from matplotlib import pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    made = notebook("print('a')\nprint('b')\nx = 2\nx + 1", plot, "x = None\nx")
    names = notebooks.run(made)
    text, value = made["cells"][0]["outputs"]
    assert text["text"] == ["a\n", "b\n"]
    assert value["data"]["text/plain"] == ["3"]
    (drawn,) = made["cells"][1]["outputs"]
    assert set(drawn["data"]) == {"image/png", "text/plain"}
    assert made["cells"][2]["outputs"] == []
    assert names["x"] is None


def test_a_cell_that_fails_is_an_error_with_its_number():
    before = Path.cwd()
    with pytest.raises(ZeroDivisionError) as caught:
        notebooks.run(notebook("x = 1", "\nx / 0"), "some")
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno) == ("some, cell 2", 1)
    assert Path.cwd() == before
