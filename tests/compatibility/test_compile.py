"""torch.compile: one graph for every layer and network, and no recompilation that a CNN spares."""

import copy

import pytest
import torch
from torch import nn

from catalogue import CASES, MODES, NETWORKS, case, run

# torch warns of its own deprecated parts while the compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SLOW = ["exact resnet", "ordinary resnet", "convnet6", "sequential"]
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]


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


@MODES
@pytest.mark.parametrize("name", NAMES)
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
