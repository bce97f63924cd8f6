"""Norm, ReLU and convolution of converted networks in one go: where, and that nobody else sees it.

Kernels that do so are a stand-in here, on a CPU; without it both forms of a network run the same
modules, and what they compute is equal to the last bit.
"""

import copy
import inspect
import io
import math
import pickle

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import econv
from econv import GroupBatchNorm2d, GroupConv2d
from econv.conversion import fusion
from econv.conversion.fusion import chains, flattened, fused
from econv.layers import fused as layer
from econv.layers import norm_relu_conv
from fusing import FUSED, fuse_on_cpu


class Block(nn.Module):
    """As in ResNet-18: one ReLU that is called twice, in place."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride > 1:
            shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outside))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class PreActivated(nn.Module):
    """The norm's input has another reader, and the ReLU is a function."""

    def __init__(self, fields):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(fields), nn.BatchNorm2d(fields)
        self.conv1, self.conv2 = (nn.Conv2d(fields, fields, 3, padding=1) for _ in range(2))

    def forward(self, x):
        out = self.conv1(functional.relu(self.bn1(x), inplace=True))
        return x + self.conv2(self.bn2(out).relu())


class Residual(nn.Module):
    """A small ResNet-18, with a pre-activated block at its end."""

    def __init__(self, classes=5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16, 1))
        self.last = PreActivated(16)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.last(self.layer2(self.layer1(x))).mean((2, 3)))


def images():
    return torch.randn(3, 3, 18, 18, generator=torch.Generator().manual_seed(1))


def converted(source, **options):
    options = {"match": "width", "options": {"engine": "spectral"}, "measure": False, **options}
    network = econv.convert(source, "p4", example_input=images(), **options)
    for module in network.modules():
        if isinstance(module, GroupBatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(tensor, 0.3, 1.2)
    return network


@pytest.fixture
def network():
    return converted(Residual())


@pytest.fixture
def second_form(monkeypatch):
    """Devices of networks seem to fuse; each call of the second form counts, as do its chains."""
    monkeypatch.setattr(layer, "DEVICES", {"cpu"})
    called = []

    def counted(*given):
        called.append(given)
        return norm_relu_conv(*given)

    monkeypatch.setattr(fusion, "norm_relu_conv", counted)
    return called


def plain(network, *inputs):
    """What the graphs give that everybody sees."""
    return type(fx.GraphModule(network, flattened(network))).forward(network, *inputs)


def step(run, network, x):
    """Output, gradients and running statistics of a step."""
    x = x.clone().requires_grad_()
    network.zero_grad()
    out = run(x)
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in network.parameters()), *network.buffers()]


def names(found):
    return [str(chain.conv.target) for chain in found if chain.conv]


def test_chains_of_a_residual_network(network):
    found = chains(flattened(network), network)
    blocks = [f"layer{i}.{j}.conv2" for i in (1, 2) for j in (0, 1)]
    assert names(found) == [*blocks, "last.conv1", "last.conv2"]
    assert [str(c.norm.target) for c in found if not c.conv] == ["bn1"]  # a pooling follows
    for norm, relu, conv in found:
        assert list(norm.users) == [relu]
        assert len(relu.users) == 1
        assert conv in (*relu.users, None)


def test_the_rewritten_graph(network):
    flat = flattened(network)
    before = str(flat)
    graph = fused(flat, network)
    graph.lint()
    calls = [n for n in graph.nodes if n.op == "call_function" and "norm_relu" in n.name]
    assert len(calls) == 6 + 1
    assert chains(graph, network) == []
    assert fused(graph, network) is None
    assert len(graph.nodes) == len(flat.nodes) - 2 * 6 + 2 * 6 + 4 + 1  # modules are read
    assert str(flat) == before


@pytest.mark.parametrize("training", [False, True])
def test_both_forms_are_equal_to_the_last_bit(network, second_form, training):
    network.train(training)
    other, x = copy.deepcopy(network), images()
    found = step(network, network, x)
    assert len(second_form) == 6
    wanted = step(lambda x: plain(other, x), other, x)
    assert len(second_form) == 6
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("training", [False, True])
def test_kernels_fuse_all_chains_that_they_take(monkeypatch, network, training):
    fuse_on_cpu(monkeypatch)
    network.double().float().train(training)
    other, x = copy.deepcopy(network), images()
    with econv.engine() as ran:
        found = step(network, network, x)
    assert ran.count(FUSED) == 6
    with econv.engine() as ran:
        wanted = step(lambda x: plain(other, x), other, x)
    assert FUSED not in ran
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_other_devices_run_what_everybody_sees(monkeypatch, network):
    monkeypatch.setattr(fusion, "fused", None)
    network(images())
    network(x=images())


def test_arguments_by_name(network, second_form):
    assert torch.equal(network.eval()(x=images()), plain(network, images()))
    assert len(second_form) == 6


class Of(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.relu, self.gelu = nn.BatchNorm2d(8), nn.ReLU(), nn.GELU()
        self.drop, self.relu6 = nn.Dropout2d(0.5), nn.ReLU6()
        self.between, self.fc = between, nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.between(self, self.conv1(x)).mean((2, 3)))


def two_readers_of_the_norm(s, y):
    normed = s.norm(y)
    return s.conv2(s.relu(normed)) + normed


def two_readers_of_the_relu(s, y):
    active = s.relu(s.norm(y))
    return s.conv2(active) + active


def two_convolutions(s, y):
    active = s.relu(s.norm(y))
    return s.conv2(active) + s.conv2(active)


ALONE = {
    "another reader of the norm": two_readers_of_the_norm,
    "another reader of the ReLU": two_readers_of_the_relu,
    "two convolutions": two_convolutions,
    "GELU": lambda s, y: s.conv2(s.gelu(s.norm(y))),
    "ReLU6": lambda s, y: s.conv2(s.relu6(s.norm(y))),
    "leaky": lambda s, y: s.conv2(functional.leaky_relu(s.norm(y), 0.1)),
    "dropout": lambda s, y: s.conv2(s.drop(s.relu(s.norm(y)))),
    "no norm": lambda s, y: s.conv2(s.relu(y)),
    "no ReLU": lambda s, y: s.conv2(s.norm(y)),
    "no convolution": lambda s, y: s.relu(s.norm(s.conv2(y))),
    "a norm of two": lambda s, y: s.conv2(s.relu(s.norm(y) + y)),
}


WITHOUT = {"another reader of the ReLU", "two convolutions", "dropout", "no convolution"}
"""Where norm and ReLU are one call, and the convolution another."""


@pytest.mark.parametrize("name", ALONE)
def test_what_is_left_alone(name, second_form):
    network = converted(Of(ALONE[name])).eval()
    found = chains(flattened(network), network)
    assert [chain.conv for chain in found] == [None] * (name in WITHOUT)
    assert torch.equal(network(images()), plain(network, images()))
    assert not second_form


RELUS = {
    "module": lambda s, y: s.conv2(s.relu(s.norm(y))),
    "torch": lambda s, y: s.conv2(torch.relu(s.norm(y))),
    "torch, in place": lambda s, y: s.conv2(torch.relu_(s.norm(y))),
    "functional": lambda s, y: s.conv2(functional.relu(s.norm(y))),
    "functional, in place": lambda s, y: s.conv2(functional.relu(s.norm(y), True)),
    "functional, by name": lambda s, y: s.conv2(functional.relu(s.norm(y), inplace=True)),
    "method": lambda s, y: s.conv2(s.norm(y).relu()),
    "method, in place": lambda s, y: s.conv2(s.norm(y).relu_()),
    "a reader of the input": lambda s, y: s.conv2(s.relu(s.norm(y))) + y,
}


@pytest.mark.parametrize("name", RELUS)
def test_relus(name, second_form):
    network = converted(Of(RELUS[name])).train()
    second_form.clear()  # the conversion ran it, too
    other = copy.deepcopy(network)
    found = step(network, network, images())
    wanted = step(lambda x: plain(other, x), other, images())
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    ((*_, given),) = second_form
    relu = network.relu if name in ("module", "a reader of the input") else None
    assert given is (torch.relu_ if "in place" in name or "by name" in name else relu or given)


class AcrossParts(nn.Module):
    """Norm and ReLU end one part, the convolution begins the next."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(*(self.stage() for _ in range(3)))
        self.fc = nn.Linear(8, 4)

    @staticmethod
    def stage():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        return self.fc(self.stages(self.lift(x)).mean((2, 3)))


def test_chains_across_parts_run_in_one_go_while_nobody_watches_the_parts(second_form):
    network, x = converted(AcrossParts()).eval(), images()
    wanted = plain(network, x)
    second_form.clear()
    assert torch.equal(network(x), wanted)
    assert len(second_form) == 2
    for kind in KINDS:
        seen = []
        part = network.stages[1]
        handle = getattr(part, f"register_{kind}_hook")(lambda *given, s=seen: s.append(given[0]))
        second_form.clear()
        found = network(x)
        found.sum().backward()
        assert torch.equal(found, wanted)
        assert seen == [part]
        assert not second_form
        handle.remove()
    network(x)
    assert len(second_form) == 2  # of this call


def test_parts_that_are_edited_count_in_both_forms(second_form):
    network, x = converted(AcrossParts()).eval(), images()
    network(x)
    for edit in (
        lambda: network.stages.append(copy.deepcopy(network.stages[0])),
        lambda: network.stages[3].insert(1, nn.Tanh()),
        lambda: network.set_submodule("stages.1", nn.Identity()),
        lambda: network.set_submodule("stages", nn.Sequential(network.stages[0], nn.ReLU())),
    ):
        before = network(x)
        edit()
        found = network(x)
        assert not torch.equal(found, before)
        assert torch.equal(found, plain(network, x))


def test_what_is_written_in_place_comes_after_the_norm_as_before(second_form):
    def between(s, y):
        normed = s.norm(y)
        y = functional.relu_(y)
        return s.conv2(s.relu(normed)) + y

    network = converted(Of(between)).eval()
    second_form.clear()  # the conversion ran it, too
    with torch.no_grad():
        assert torch.equal(network(images()), plain(network, images()))
    assert len(second_form) == 1


KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["norm", "relu", "conv2"])
def test_hooks_of_a_part(monkeypatch, kind, name):
    fuse_on_cpu(monkeypatch)
    network, called = converted(Of(RELUS["module"])).eval(), []
    for _ in range(2):
        with econv.engine() as ran:
            network(images()).sum().backward()
        assert (FUSED in ran) != bool(called)
        if not called:
            part = network.get_submodule(name)
            handle = getattr(part, f"register_{kind}_hook")(lambda *given: called.append(given[0]))
            network(images()).sum().backward()
    assert called == [part, part]
    handle.remove()
    with econv.engine() as ran:
        network(images())
    assert FUSED in ran


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_the_network(network, second_form, kind):
    called = []
    getattr(network, f"register_{kind}_hook")(lambda *given: called.append(given[0]))
    network(images().requires_grad_()).sum().backward()
    assert called == [network]
    assert len(second_form) == 6


def test_parts_that_are_replaced(network, second_form):
    x = images()
    network.eval()(x)
    conv = GroupConv2d(4, 4, "p4", operators="order<=0", bias=True)
    norm = copy.deepcopy(network.get_submodule("layer2.0.bn1"))
    nn.init.normal_(norm.bias)
    network.set_submodule("layer1.0.bn1", nn.Identity())
    network.set_submodule("layer1.1.relu", nn.GELU())
    network.set_submodule("layer2.0.bn1", norm)
    network.set_submodule("layer2.1.conv2", conv)
    network.fc = nn.Linear(4, 2)
    second_form.clear()
    found = network(x)
    assert found.shape == (3, 2)
    assert torch.equal(found, plain(network, x))
    given = [part for call in second_form for part in call]
    assert {id(conv), id(norm)} <= {id(part) for part in given}


def test_a_network_that_is_recompiled(network, second_form):
    x = images()
    network.eval()
    before = network(x)
    (fc,) = (node for node in network.graph.nodes if node.target == "fc")
    (last,) = (node for node in network.graph.nodes if node.op == "output")
    last.args = (fc.args[0],)
    assert torch.equal(network(x), before)
    network.graph.erase_node(fc)
    network.recompile()
    second_form.clear()
    assert network(x).shape == (3, 4)
    assert len(second_form) == 6
    assert torch.equal(network(x), plain(network, x))


def test_a_graph_that_was_edited_counts_when_it_is_recompiled(network, second_form):
    (fc,) = (node for node in network.graph.nodes if node.target == "fc")
    fc.replace_all_uses_with(fc.args[0])
    assert network.eval()(images()).shape == (3, 5)
    assert len(second_form) == 6  # of the parts, one by one
    network.recompile()
    second_form.clear()
    assert network(images()).shape == (3, 4)
    assert len(second_form) == 6


def test_another_graph(network, second_form):
    network.eval()(images())
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("image"),)))
    network.graph = graph
    assert torch.equal(network(images()), -images())


def told(network):
    """All that others see of a network."""
    seen = [str(network.graph), network.code, str(inspect.signature(network.forward))]
    seen += [list(network.state_dict()), [name for name, _ in network.named_modules()]]
    return [*seen, sorted(network.__dict__)]


def test_nobody_sees_the_second_form(network, second_form):
    before = told(network)
    network.eval()(images())
    assert len(second_form) == 6
    assert told(network) == before
    assert str(inspect.signature(network.forward)) == "(x)"


def in_a_file(network):
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "file": in_a_file,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies(network, second_form, copied):
    x, before = images(), copied(network.eval())
    wanted = network(x)
    other = copied(network)
    assert told(other) == told(before)
    second_form.clear()
    assert torch.equal(other(x), wanted)
    assert len(second_form) == 6
    own = {id(part) for part in other.modules()}
    assert all(id(part) in own for call in second_form for part in call[:2])
    with torch.no_grad():
        other.last.conv1.weight.zero_()
    assert not torch.equal(other(x), wanted)
    assert torch.equal(network(x), wanted)


def test_state_is_shared_by_both_forms(network, second_form):
    other = converted(Residual()).eval()
    network.eval()(images())
    other(images())
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(images()), network(images()))
    state = {name: torch.zeros_like(t) for name, t in network.state_dict().items()}
    found = torch.func.functional_call(network, state, images())
    assert torch.equal(found, torch.zeros(3, 5))


# torch warns of its own deprecated parts while the compiler is imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_compiler_sees_the_plain_graph(network, second_form):
    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module.forward

    network.eval()
    compiled = torch.compile(network, fullgraph=True, backend=keep)
    found = compiled(images())
    assert not second_form
    torch.testing.assert_close(found, plain(network, images()))
    (graph,) = graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("relu" in name for name in calls) == 1 + 2 * 4 + 1
    # As a part of another network, too.
    whole = torch.compile(nn.Sequential(network, nn.ReLU()), fullgraph=True, backend=keep)
    torch.testing.assert_close(whole(images()), torch.relu(found))
    assert not second_form


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_traces_or_transforms_sees_the_plain_graph(network, second_form):
    network.eval()
    x = images()
    wanted = plain(network, x)
    found = [
        torch.export.export(network, (x,)).module()(x),
        torch.jit.trace(network, x, check_trace=False)(x),  # a check calls the network
        torch.func.vmap(network)(x[:, None])[:, 0],
    ]
    assert not second_form
    found.append(econv.export(network, x)(x))  # which runs the network to compare
    for each in found:
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-5)
    second_form.clear()
    assert (
        Tracer().trace(network).python_code("self").src
        == flattened(network).python_code("self").src
    )
    assert not second_form


class Tracer(fx.Tracer):
    """Follows networks, and no layers."""

    def is_leaf_module(self, m, module_qualified_name):
        return not isinstance(m, fx.GraphModule | nn.Sequential)


def test_functions_that_tracers_follow_are_followed(network, second_form):
    """Of those in a function's globals: a tracer puts its own in their place."""
    (fc,) = (node for node in network.graph.nodes if node.target == "fc")
    with network.graph.inserting_after(fc):
        largest = network.graph.call_function(math.floor, (fc,))
    fc.replace_all_uses_with(largest, lambda user: user is not largest)
    network.recompile()
    for root in (network, nn.Sequential(network)):
        graph = Tracer().trace(root)
        assert any(node.target is math.floor for node in graph.nodes)
