"""Networks that earlier versions saved: they must still load, and compute what they computed."""

import json
from pathlib import Path

import pytest
import torch

from econv import export, from_pretrained

pytest.importorskip("safetensors")
FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def read(name):
    network = from_pretrained(FOLDER / name).double()
    found = json.loads((FOLDER / name / "outputs.json").read_text())
    x = torch.tensor(found["x"], dtype=torch.float64)
    x = x.view(2, network.config["in_channels"], 28, 28)
    return network, x, torch.tensor(found["outputs"], dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_network_computes_what_it_computed(name):
    network, x, wanted = read(name)
    assert wanted.abs().max() > 0.01
    assert (network(x) - wanted).abs().max() <= 1e-8 * wanted.abs().max()
    assert (export(network)(x) - wanted).abs().max() <= 1e-8 * wanted.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_another_weight_would_be_noticed(name):
    network, x, wanted = read(name)
    parameter = next(iter(network.parameters()))
    with torch.no_grad():
        parameter.mul_(1 + 1e-6)
    assert (network(x) - wanted).abs().max() > 1e-8 * wanted.abs().max()


def test_golden_files_are_there_and_small():
    assert len(NAMES) >= 6
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.*")) < 200_000
