"""int8: an exported network keeps its predictions when torchao makes it one of 8-bit integers."""

import sys
from pathlib import Path

import pytest
import torch

from catalogue import trained
from econv import export
from econv.models import ConvNet

pytest.importorskip("torchao")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torchao warns much


@pytest.fixture
def quantise(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import quantisation

    yield quantisation
    sys.modules.pop("quantisation", None)


def test_int8_weights_and_activations_keep_what_is_computed(quantise):
    network = trained(lambda: ConvNet("p4", fields=(3, 3, 3), readout="mean", pool="max")).eval()
    x = torch.randn(32, 1, 28, 28)
    plain = export(network)
    small = quantise.quantise(plain, x)
    wanted, found = plain(x), small(x)
    assert not torch.equal(found, wanted)
    assert float((found - wanted).norm() / (wanted - wanted.mean(0)).norm()) < 0.2
    used = quantise.used_bytes(small)
    assert set(used) == {"int8"}
    weights = sum(p.numel() * p.element_size() for p in plain.parameters() if p.ndim > 1)
    assert used["int8"] == weights // 4
