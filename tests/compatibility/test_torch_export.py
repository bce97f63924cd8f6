"""torch.export: programs of every layer and network, with any batch and image size."""

import copy

import pytest
import torch
from torch import nn

from catalogue import CASES, case, grid, run
from econv import export

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# Of the last each layer is a case of its own.
SLOW = ["exact resnet", "ordinary resnet", "convnet7", "sequential", "every layer"]
FIXED = ["convnet6"]  # its classifier reads the whole map


def sizes(name):
    """Batch and sides that a program made with another batch must run on."""
    if name in FIXED:
        return [(3, 28, 28), (7, 28, 28)]
    return [(3, 20, 21), (7, 22, 20), (2, 33, 24)]


def images(name, module, size):
    dtype = next(iter([p.dtype for p in module.parameters()]), torch.float32)
    return torch.randn(size[0], CASES[name][1][1], *size[1:], dtype=dtype)


def program(name, module):
    x = images(name, module, sizes(name)[0])
    dynamic = {0: torch.export.Dim("batch", min=2)}
    if name not in FIXED:
        dynamic |= {n: torch.export.Dim(side, min=18) for n, side in ((2, "height"), (3, "width"))}
    return torch.export.export(module, (x,), dynamic_shapes=(dynamic,), strict=False)


def assert_programs_run(name, module, made):
    exported = made.module()
    for size in sizes(name):
        x = images(name, module, size)
        for found, wanted in zip(run(exported, x), run(module, x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "train"), grid(SLOW))
def test_programs_run_on_every_batch_and_image_size(name, train):
    module, _ = case(name, train, dropout=False)
    assert_programs_run(name, module, program(name, copy.deepcopy(module)))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("name", ["resnet", "convnet6"])
def test_a_program_is_saved_and_read(name, tmp_path):
    module, _ = case(name, train=False)
    torch.export.save(program(name, module), tmp_path / "network.pt2")
    assert_programs_run(name, module, torch.export.load(tmp_path / "network.pt2"))


@pytest.mark.parametrize("name", ["resnet", "convnet6", "every layer"])
def test_plain_networks_export_as_well(name):
    module = case(name, train=False)[0].double()  # filters are made in another order
    assert_programs_run(name, module, program(name, export(module)))


def test_a_frozen_size_is_noticed():
    class Frozen(nn.Module):
        def forward(self, x):
            return x if x.shape[2] == 20 else -x

    with pytest.raises(Exception, match=r"(?s)[Cc]onstraint.*height"):
        program("sequential", Frozen())
