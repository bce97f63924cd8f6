"""The page for people who come from escnn: both codes run and give the same shapes."""

from __future__ import annotations

import json

import pytest
import torch

from econv.testing import equivariance_error, smooth_field

migrating = pytest.importorskip("migrating", reason="no benchmarks beside the tests")
if not migrating.PAGE.exists():
    pytest.skip("no docs beside the tests", allow_module_level=True)

CODES = migrating.codes(migrating.PAGE.read_text(encoding="utf-8"))
TITLES = pytest.mark.parametrize("title", migrating.KINDS)


def shape(code: str) -> list[int]:
    return list(migrating.function(code)(torch.randn(2, 3, 33, 33)).shape)


def test_every_heading_has_both_codes():
    assert list(CODES) == list(migrating.KINDS)
    assert all(tuple(tabs) == migrating.LIBRARIES for tabs in CODES.values())


@TITLES
def test_our_code_turns_with_the_image(title):
    run = migrating.function(CODES[title]["econv"])
    x = smooth_field(33, 3, dtype=torch.float32)
    kinds = {"input_kind": "scalar", "output_kind": migrating.KINDS[title]}
    assert equivariance_error(run, x, 2, "p8", **kinds) < 1e-5


@TITLES
def test_the_record_has_equal_shapes_and_ours(title):
    found = json.loads((migrating.RESULTS / "migrating.json").read_text(encoding="utf-8"))
    row = found["codes"][title]
    assert row["escnn"]["shape"] == row["econv"]["shape"]
    code = migrating.function(CODES[title]["econv"])
    size = found["pixels"]
    assert list(code(torch.randn(1, 3, size, size)).shape) == row["econv"]["shape"]


@TITLES
@pytest.mark.filterwarnings("ignore")  # of escnn's
def test_both_codes_give_the_same_shape(title):
    pytest.importorskip("escnn")
    assert shape(CODES[title]["escnn"]) == shape(CODES[title]["econv"])


def test_only_codes_in_tabs_are_taken():
    text = '### Some\n\n=== "escnn"\n\n    ```py\n    y = x\n    ```\n\n=== "econv"\n\n    ```py\n'
    text += "    z = 2\n    y = z * x\n    ```\n\n### Other\n\n```py\ny = x\n```\n## End\n"
    assert migrating.codes(text) == {"Some": {"escnn": "y = x\n", "econv": "z = 2\ny = z * x\n"}}
    run = migrating.function("z = 2\ny = z * x\n")
    assert run(torch.ones(3)).tolist() == [2.0] * 3


def test_an_error_is_measured():
    code = "import torch\nramp = torch.linspace(0, 1, 65)\ny = x * ramp\n"
    assert migrating.measure(code, "scalar", seeds=1)["errors"]["90"] > 0.1
    assert migrating.measure("y = x\n", "scalar", seeds=1)["errors"]["90"] < 1e-6
