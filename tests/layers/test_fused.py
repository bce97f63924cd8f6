"""Norm, ReLU and convolution in one go: when, and that the three modules run everywhere else.

What the kernels then do is checked by `triton_checks`; here a stand-in does it, on a CPU.
"""

import copy

import pytest
import torch
from torch import nn

import econv
from econv import GroupBatchNorm2d, GroupConv2d
from econv.layers import fused, norm_relu_conv
from fusing import FUSED, fuse_on_cpu


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels seem to run on a CPU."""
    fuse_on_cpu(monkeypatch)


class PreActivated(nn.Module):
    def __init__(self, relu=None, **options):
        super().__init__()
        self.relu = relu
        self.norm = GroupBatchNorm2d(2, "p4")
        self.conv = GroupConv2d(2, 3, "p4", **{"engine": "spectral", **options})
        with torch.no_grad():
            self.norm.running_mean.normal_()
            for tensor in (self.norm.weight, self.norm.bias, self.norm.running_var):
                tensor.uniform_(0.5, 1.5)

    def forward(self, x):
        return norm_relu_conv(self.norm, self.conv, x, self.relu)

    def one_after_the_other(self, x):
        return self.conv((torch.relu if self.relu is None else self.relu)(self.norm(x)))


def ran_by(run, x):
    """What ran, the kernels first where they did norm and ReLU."""
    with econv.engine() as ran:
        run(x)
    return ran


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return PreActivated().eval()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return 2 * torch.randn(3, 8, 7, 6) + 1


def test_it_is_the_three_modules(pair, x):
    assert ran_by(pair, x)[0] == FUSED
    torch.testing.assert_close(pair(x), pair.one_after_the_other(x), rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_norm_in_eval(pair, x):
    x.requires_grad_()
    inputs = [x, *pair.parameters()]
    found = torch.autograd.grad(pair(x).square().sum(), inputs)
    wanted = torch.autograd.grad(pair.one_after_the_other(x).square().sum(), inputs)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def a_hook(module, kind):
    def register(pair):
        getattr(getattr(pair, module), f"register_{kind}_hook")(lambda *arguments: None)

    return register


def subclassed(pair):
    pair.conv.__class__ = type("Other", (GroupConv2d,), {})


def parametrised(pair):
    nn.utils.parametrize.register_parametrization(pair.conv, "weight", nn.Identity())


def synchronised(pair):
    pair.norm = econv.convert_sync_batchnorm(pair.norm)


def patched(pair):
    pair.norm.forward = pair.norm.forward


def of_channels(pair):
    pair.norm = nn.BatchNorm2d(8).eval()


def by_filters(pair):
    pair.conv.engine = "dense"


def centred(pair):
    pair.conv.centred = True


def without_eps(pair):
    one = torch.ones(1)
    try:  # as the norm does it that is in eval mode
        nn.functional.batch_norm(one[None], one, one, eps=0.0)
    except ValueError:
        pytest.skip("this version of torch refuses an eps of 0")
    pair.norm.eps = 0.0


def looked_at_here_and_there(pair):
    options = {"operators": "order<=0", "stride": 2, "padding": 0, "engine": "spectral"}
    pair.conv = GroupConv2d(2, 2, "p4", **options)


def grouped(pair):
    pair.conv = GroupConv2d(2, 2, "p4", groups=2, engine="spectral")


AS_BEFORE = {
    "forward hook": a_hook("norm", "forward"),
    "forward pre-hook": a_hook("conv", "forward_pre"),
    "backward hook": a_hook("conv", "full_backward"),
    "backward pre-hook": a_hook("norm", "full_backward_pre"),
    "subclass": subclassed,
    "parametrised": parametrised,
    "synchronised": synchronised,
    "another forward": patched,
    "another norm": of_channels,
    "dense": by_filters,
    "centred": centred,
    "groups": grouped,
    "one pixel of several": looked_at_here_and_there,
    "no eps": without_eps,
}


@pytest.mark.parametrize("change", AS_BEFORE.values(), ids=AS_BEFORE.keys())
def test_modules_that_differ_are_called_one_after_the_other(monkeypatch, pair, x, change):
    assert ran_by(pair, x)[0] == FUSED
    change(pair)
    called = []
    for name in ("norm", "conv"):
        kind = type(getattr(pair, name))

        def noted(self, x, forward=kind.forward, name=name):
            called.append(name)
            return forward(self, x)

        monkeypatch.setattr(kind, "forward", noted)
    with econv.engine() as ran:
        out = pair(x)
    assert FUSED not in ran
    assert len(ran) == 1
    assert called == (["conv"] if change is patched else ["norm", "conv"])
    assert torch.equal(out, pair.one_after_the_other(x))


RELUS = {
    "module": nn.ReLU(),
    "in place": nn.ReLU(inplace=True),
    "function": torch.relu,
    "function in place": torch.relu_,
}


@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS.keys())
@pytest.mark.parametrize("training", [False, True])
def test_a_relu_of_ones_own(x, relu, training):
    torch.manual_seed(0)
    pair = PreActivated(relu).train(training)
    other, kept = copy.deepcopy(pair), x.clone()
    assert ran_by(pair, x)[0] == FUSED
    wanted = other.one_after_the_other(x)
    torch.testing.assert_close(pair.eval()(x), other.eval()(x))
    torch.testing.assert_close(pair.train(training)(x), wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(x, kept)


def with_a_hook(kind):
    relu = nn.ReLU()
    getattr(relu, f"register_{kind}_hook")(lambda *arguments: None)
    return relu


def with_another_forward():
    relu = nn.ReLU()
    relu.forward = torch.sigmoid
    return relu


NO_RELU = {
    "forward hook": lambda: with_a_hook("forward"),
    "forward pre-hook": lambda: with_a_hook("forward_pre"),
    "backward hook": lambda: with_a_hook("full_backward"),
    "backward pre-hook": lambda: with_a_hook("full_backward_pre"),
    "another forward": with_another_forward,
    "subclass": type("Other", (nn.ReLU,), {}),
    "another module": nn.GELU,
    "no modules": nn.Sequential,
    "another function": lambda: torch.sigmoid,
}


@pytest.mark.parametrize("make", NO_RELU.values(), ids=NO_RELU.keys())
def test_what_is_no_plain_relu_is_called(x, make):
    pair = PreActivated(make()).eval()
    with econv.engine() as ran:
        found = pair(x)
    assert len(ran) == 1
    assert FUSED not in ran
    assert torch.equal(found, pair.one_after_the_other(x))


def test_hooks_of_the_relu_see_what_it_makes(pair, x):
    pair.relu, seen = nn.ReLU(inplace=True), []
    pair.relu.register_forward_hook(lambda module, given, made: seen.append(made.clone()))
    pair(x)
    assert torch.equal(*seen, torch.relu(pair.norm(x)))


def test_a_hook_of_all_modules_is_called(pair, x):
    called = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, *_: called.append(type(module))
    )
    try:
        assert FUSED not in ran_by(pair, x)
    finally:
        hook.remove()
    assert called == [GroupBatchNorm2d, GroupConv2d, PreActivated]


def test_what_the_kernels_do_not_take_runs_one_after_the_other(monkeypatch, pair, x):
    assert FUSED not in ran_by(copy.deepcopy(pair).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert FUSED not in ran_by(pair, x)
        assert ran_by(pair, x.bfloat16())[0] == FUSED
    pair.conv.engine = "auto"
    with econv.engine("dense") as ran:
        pair(x)
    assert ran == ["dense"]
    pair.conv.engine = "spectral"
    monkeypatch.setattr(fused, "DEVICES", {"cuda"})
    assert FUSED not in ran_by(pair, x)


# torch warns of its own deprecated parts while the compiler is imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_traces_or_transforms_sees_the_modules(pair, x):
    wanted = pair.one_after_the_other(x)
    program = torch.export.export(pair, (x,)).module()
    compiled = torch.compile(pair, fullgraph=True, backend="eager")
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda module, name: module is not pair
    graph = tracer.trace(pair)
    kinds = [node.op for node in graph.nodes]
    assert kinds == ["placeholder", "call_module", "call_function", "call_module", "output"]
    by_script = torch.jit.trace(pair, x)
    mapped = torch.func.vmap(pair)(x[:, None])[:, 0]
    for run in (program, compiled, torch.fx.GraphModule(pair, graph), by_script):
        assert FUSED not in ran_by(run, x)
        torch.testing.assert_close(run(x), wanted)
    torch.testing.assert_close(mapped, wanted)
    assert ran_by(pair, x)[0] == FUSED


def test_bad_input_is_refused_as_by_the_modules(pair, x):
    for bad in (x[:, :7], x[0], x.double(), x[..., :3], "an image"):
        for run in (pair, pair.one_after_the_other):
            with pytest.raises(ValueError, match="expected"):
                run(bad)


def test_one_number_for_each_field_is_no_batch(x):
    norm, conv = GroupBatchNorm2d(8, "p1"), GroupConv2d(8, 8, "p1", operators="order<=0")
    with pytest.raises(ValueError, match="more than 1 value"):
        norm_relu_conv(norm, conv, x[:1, :, :1, :1])


def test_blocks_of_a_network_use_it_where_norm_relu_and_convolution_follow_each_other():
    network = econv.models.ResNet("p4", 8, (2, 2, 3), options={"engine": "spectral"}).eval()
    names = list(network.state_dict())
    with econv.engine() as ran:
        network(torch.randn(1, 3, 24, 24))
    # Two in each block, but one in those with a shortcut, which reads the activated map as well.
    assert ran.count(FUSED) == 4
    assert list(network.state_dict()) == names
