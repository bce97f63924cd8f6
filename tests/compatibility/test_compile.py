"""torch.compile: one graph for every layer and network, and no recompilation that a CNN spares."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from catalogue import CASES, MODES, NETWORKS, WITH_MODES, case, grid, has_modes, run
from econv import create_model

# torch warns of its own deprecated parts while the compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# Of the last each layer is a case of its own.
SLOW = ["exact resnet", "ordinary resnet", "convnet6", "sequential", "every layer"]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compilations(module, x, batches=(2, 3, 5, 7), check=None):
    """How often the compiler is called while the batch size changes."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for batch in batches:
        inputs = torch.randn(batch, *x.shape[1:])
        found = run(compiled, inputs)
        if check is not None:
            check(inputs, found)
    assert counter.op_count > 0
    return counter.frame_count


@pytest.fixture(scope="module")
def of_a_cnn():
    """What an ordinary network needs, in train mode, with everything that changes in it."""
    torch._dynamo.reset()
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return compilations(network, torch.randn(2, 1, 12, 13))


@pytest.mark.parametrize(("name", "train"), grid(SLOW))
def test_one_graph_and_no_more_compilations_than_a_cnn(name, train, of_a_cnn):
    module, x = case(name, train)
    eager = copy.deepcopy(module)

    def equal(inputs, found):
        for ours, wanted in zip(found, run(eager, inputs), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)

    assert compilations(module, x, check=equal) <= of_a_cnn


@pytest.mark.parametrize("name", ["resnet", "every layer"])
def test_gradients_of_a_compiled_network(name):
    module, x = case(name, train=True)
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for network in (eager, compiled):
        sum(out.sin().mean() for out in run(network, x)).backward()
    for ours, wanted in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    for ours, wanted in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("name", [*NETWORKS, "GroupConv2d replicate"])
def test_inductor_computes_the_same(name, train):
    module, x = case(name, train, dropout=False, dtype=torch.float64)
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True)
    for network in (eager, compiled):
        sum(out.sin().sum() for out in run(network, x)).backward()
    for ours, wanted in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-9, atol=1e-9)


COMPILED = """
import sys, torch
from econv import GroupConv2d
from econv.stencils import Gaussian

x = torch.linspace(-1, 1, 2 * 8 * 9 * 9).sin().view(2, 8, 9, 9)
for width in map(float, sys.argv[1:]):
    torch._dynamo.reset()
    layer = GroupConv2d(2, 2, "p4", stencils=Gaussian(width), engine="spectral")
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        layer.weight.grad, ours = None, x.clone().requires_grad_()
        y = run(ours)
        y.square().sum().backward()
        results.append((y, ours.grad, layer.weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
def test_what_other_processes_compiled_is_of_the_same_layer(tmp_path):
    """Compiled graphs are kept on disk: what they say of a layer has to hold in every process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for widths in (["0.8"], ["0.5", "0.8"]):
        command = [sys.executable, "-c", COMPILED, *widths]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]


# The checks can say no


class Breaks(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Freezes(nn.Module):
    def forward(self, x):
        return x * int(torch.ones(int(x.shape[0])).shape[0] == 1) if x.shape[0] == 3 else x * 2


def test_a_graph_break_is_noticed():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compilations(Breaks(), torch.randn(2, 3))


def test_recompilations_are_noticed(of_a_cnn):
    assert compilations(Freezes(), torch.randn(2, 3), batches=(2, 4, 3, 5)) > of_a_cnn


def test_the_networks_are_those_of_the_catalogue():
    assert set(SLOW) < set(NETWORKS)


def test_modules_with_modes_are_known():
    """The others are compiled and exported in one of them here, and in both by all tests."""
    assert [name for name, (make, _) in CASES.items() if has_modes(make())] == [
        name for name in CASES if name in WITH_MODES
    ]


def test_networks_of_volumes_are_one_graph():
    torch.manual_seed(0)
    network = create_model("unet_3d_T", fields=(1, 2)).train()
    eager = copy.deepcopy(network)

    def equal(inputs, found):
        for ours, wanted in zip(found, run(eager, inputs), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)

    assert compilations(network, torch.randn(2, 1, 8, 9, 8), batches=(2, 3), check=equal) <= 2
