"""Data sets by name, and where they are kept."""

import sys

import pytest

from econv import data
from econv.data import DataError


def test_a_source_that_does_not_exist_is_refused(tmp_path):
    for name in ("mnist", "mnist_rot", "mnist_rot_recreated", "cifar100", "digits"):
        with pytest.raises(DataError, match=r"nowhere.*expected"):
            data.load(name, source=tmp_path / "nowhere")


def test_an_unknown_name_and_seed_are_refused():
    with pytest.raises(ValueError, match="unknown data set 'imagenet': expected one of"):
        data.load("imagenet")
    with pytest.raises(ValueError, match="seed from 0"):
        data.load("digits", seed=-1)


@pytest.mark.parametrize(
    ("variables", "platform", "expected"),
    [
        ({"ECONV_DATA": "/a/b"}, "linux", "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "linux", "/c/econv"),
        ({"HOME": "/h"}, "linux", "/h/.cache/econv"),
        ({"HOME": "/h"}, "darwin", "/h/Library/Caches/econv"),
        ({"LOCALAPPDATA": "/l"}, "win32", "/l/econv"),
    ],
)
def test_the_cache_lies_where_the_platform_wants_it(monkeypatch, variables, platform, expected):
    for name in ("ECONV_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert data.cache_folder().as_posix() == expected
