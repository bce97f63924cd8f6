"""What `econv env` says: all that a report needs, the engines' own reasons, and no user's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import econv
from econv import environment
from econv.cli import main
from econv.engines import ENGINES


def printed(capsys, *arguments: str) -> str:
    assert main(["env", *arguments]) == 0
    return capsys.readouterr().out


def test_it_says_what_a_report_needs(capsys):
    found = json.loads(printed(capsys, "--json"))
    assert set(found) == {"versions", "system", "devices", "engines", "folders", "variables"}
    assert found["versions"]["econv"] == econv.__version__
    assert {"python", "torch", "numpy", "triton"} <= set(found["versions"])
    assert found["system"]["threads"] >= 1
    assert set(ENGINES) < set(found["engines"]["cpu"])
    lines = [line.split() for line in printed(capsys).splitlines()]
    assert ["econv", econv.__version__] in lines
    assert ["dense", "available"] in lines


def test_the_engines_give_their_own_reasons(monkeypatch):
    monkeypatch.setenv("ECONV_NATIVE", "0")
    found = environment.environment()
    assert found["engines"]["cpu"]["dense"] is None
    assert found["engines"]["cpu"]["spectral/native"] == "forbidden by ECONV_NATIVE=0"
    assert "NVIDIA" in found["engines"]["cpu"]["spectral/triton"]
    assert found["variables"]["ECONV_NATIVE"] == "0"


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(environment, "compiler", lambda: None)
    found = environment.environment()
    assert found["versions"]["no-such-package"] is None
    assert found["system"]["compiler"] is None
    lines = [line.split() for line in environment.text(found).splitlines()]
    assert ["no-such-package", "not", "there"] in lines
    assert ["compiler", "not", "there"] in lines


@pytest.mark.parametrize("output", ["", "exit 3"])
def test_a_compiler_that_says_nothing_is_no_error(tmp_path, monkeypatch, output):
    broken = tmp_path / "c++"
    broken.write_text(f"#!/bin/sh\n{output}\n")
    broken.chmod(0o755)
    monkeypatch.setattr(environment, "compiler", lambda: str(broken))
    assert environment._compiler().startswith(f"{broken}: ")


def test_nothing_names_the_user(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("ECONV_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("ECONV_TEST", f"first:{tmp_path}/second")
    assert Path.home() == tmp_path
    told = printed(capsys, "--json")
    assert str(tmp_path) not in told
    found = json.loads(told)
    assert found["folders"]["kernels and choices"] == "~/kernels"
    assert found["variables"]["ECONV_TEST"] == "first:~/second"
