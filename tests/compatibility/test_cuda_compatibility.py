"""What the tests of compatibility show on the CPU, on a GPU: every layer and every network."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from catalogue import CASES, MODES, case, outputs, run, trained
from econv import GroupBatchNorm2d, convert_sync_batchnorm, export, from_pretrained
from econv.models import ResNet

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found"),
    # torch warns of its own deprecated parts, and advises faster arithmetic.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


def on_device(name, train, dropout=True, dtype=torch.float64):
    module, x = case(name, train, dropout, dtype)
    return module.cuda(), x.cuda()


def close(found, wanted, tolerance=1e-9):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@MODES
@pytest.mark.parametrize("name", CASES)
def test_one_graph_on_the_device(name, train):
    torch._dynamo.reset()
    module, x = on_device(name, train, dropout=False)
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 5):
        inputs = x[:1].expand(batch, *x.shape[1:]).clone()
        close(run(compiled, inputs), run(eager, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "exact resnet", "convnet7", "every layer"])
def test_inductor_trains_the_same_on_the_device(name):
    torch._dynamo.reset()
    module, x = on_device(name, train=True, dropout=False)
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True)
    for network in (eager, compiled):
        sum(out.sin().sum() for out in run(network, x)).backward()
    for ours, wanted in zip(module.parameters(), eager.parameters(), strict=True):
        close(ours.grad, wanted.grad, 1e-6)


@MODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_autocast_trains_on_the_device(name, dtype, train):
    module, x = on_device(name, train, dropout=False, dtype=torch.float32)
    x.requires_grad_()
    with torch.autocast("cuda", dtype=dtype):
        found = run(module, x)
    sum(out.float().sum() for out in found).backward()
    assert all(out.isfinite().all() for out in found)
    for tensor in (x, *module.parameters()):
        assert tensor.grad.dtype == torch.float32
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_exported_networks_equal_the_original_on_the_device(name):
    module, x = on_device(name, train=False)
    plain = export(module)
    assert all(t.is_cuda for t in (*plain.parameters(), *plain.buffers()))
    close(outputs(plain, x), outputs(module, x))


@pytest.mark.parametrize("name", CASES)
def test_functional_gradients_on_the_device(name):
    module, x = on_device(name, train=False)
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def loss(parameters, x):
        found = functional_call(module, parameters, (x,))
        return sum(out.sin().sum() for out in (found if isinstance(found, tuple) else (found,)))

    found = grad(loss, argnums=1)(parameters, x)
    x.requires_grad_()
    sum(out.sin().sum() for out in run(module, x)).backward()
    close(found, x.grad)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "make", [lambda: GroupBatchNorm2d(3, "p4"), lambda: nn.BatchNorm2d(12)], ids=["group", "plain"]
)
def test_synchronised_norms_on_the_device(make, layout):
    ordinary = trained(make).double().cuda()
    ours = convert_sync_batchnorm(copy.deepcopy(ordinary))
    x = (torch.randn(5, 12, 4, 6, dtype=torch.float64) * 3 + 2).to(memory_format=layout).cuda()
    results = []
    for norm in (ours, ordinary):
        y = x.clone().requires_grad_()
        out = norm(y)
        assert out.is_contiguous(memory_format=layout)
        out.sin().sum().backward()
        gradients = [y.grad, *(p.grad for p in norm.parameters())]
        results.append([out.detach(), *gradients, *norm.state_dict().values()])
    close(*results)


def test_saved_networks_come_back_to_the_device(tmp_path):
    pytest.importorskip("safetensors")
    network = ResNet("p4", depth=8, fields=(1, 2, 2)).cuda().eval()
    network.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path, device="cuda")
    x = torch.randn(1, 3, 20, 20, device="cuda")
    assert torch.equal(again(x), network(x))
