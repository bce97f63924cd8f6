"""Several processes: networks under DistributedDataParallel, and norms that share statistics."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import econv
from catalogue import NETWORKS, trained
from econv import GroupBatchNorm2d, convert_sync_batchnorm
from econv.layers import SyncBatchNorm, SyncGroupBatchNorm2d

SAMPLES = (3, 5)  # of each process
CASES = {
    **NETWORKS,
    "group norm": (lambda: GroupBatchNorm2d(2, "p4"), (2, 8, 5, 6)),
    "group norm, cumulative": (lambda: GroupBatchNorm2d(2, "p4", momentum=None), (2, 8, 5, 6)),
    "group norm, bare": (
        lambda: nn.Sequential(
            GroupBatchNorm2d(2, "p4", affine=False, track_running_stats=False), nn.PReLU()
        ),
        (2, 8, 5, 6),
    ),
    "norm of vectors": (lambda: nn.BatchNorm1d(4), (2, 4)),
    "norm of volumes": (lambda: nn.BatchNorm3d(4), (2, 4, 3, 4, 5)),
}
LAST = "convnet7"  # this one runs channels-last


def case(name):
    """A network in float64 without dropout, and the samples of all processes."""
    torch.manual_seed(list(CASES).index(name))
    make, shape = CASES[name]
    network = trained(make).double()
    for module in network.modules():
        if "Dropout" in type(module).__name__:
            module.p = 0.0
    x = torch.randn(sum(SAMPLES), *shape[1:], dtype=torch.float64) * 2 + 1
    return network, x.to(memory_format=torch.channels_last) if name == LAST else x


def step(network, x, samples):
    """Two training steps' results: outputs, gradients, statistics."""
    x = x.requires_grad_()
    for _ in range(2):
        network.zero_grad()
        found = network(x)
        found = found if isinstance(found, tuple) else (found,)
        # The mean over processes of these sums is the mean over all samples.
        loss = sum(out.sin().flatten(1).mean(1).sum() for out in found) / samples
        x.grad = None
        loss.backward()
    plain = network.module if hasattr(network, "module") else network
    return {
        "outputs": [out.detach() for out in found],
        "to x": x.grad * samples,
        "gradients": {n: p.grad for n, p in plain.named_parameters()},
        "state": {n: b for n, b in plain.named_buffers() if n in plain.state_dict()},
    }


def worker(folder, rank):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    mine = slice(0, SAMPLES[0]) if rank == 0 else slice(SAMPLES[0], None)
    found = {}
    for name in CASES:
        network, x = case(name)
        network = convert_sync_batchnorm(network)
        shared = nn.parallel.DistributedDataParallel(network, find_unused_parameters=False)
        found[name] = step(shared, x[mine], sum(SAMPLES) / 2)
    # A process without samples takes part.
    norm = convert_sync_batchnorm(GroupBatchNorm2d(2, "p4").double())
    torch.manual_seed(0)
    x = torch.randn(6, 8, 3, 3, dtype=torch.float64)
    norm(x if rank else x[:0].requires_grad_()).sum().backward()
    found["empty"] = norm.state_dict()
    # Groups of processes: each alone.
    alone = [torch.distributed.new_group([r]) for r in range(2)]
    norm = convert_sync_batchnorm(GroupBatchNorm2d(2, "p4").double(), alone[rank])
    norm(x[rank::2] * (rank + 1))
    found["alone"] = norm.state_dict()
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    code = "import sys, test_synchronised as t; t.worker(sys.argv[1], int(sys.argv[2]))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(rank)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in workers]
    finally:
        for process in workers:
            process.kill()
    assert [process.returncode for process in workers] == [0, 0], "\n".join(errors)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(pair, name):
    first, second = (results[name] for results in pair)
    alone = step(*case(name), sum(SAMPLES))
    for a, b, wanted in zip(first["outputs"], second["outputs"], alone["outputs"], strict=True):
        close(torch.cat([a, b]), wanted)
    # A sample's gradient counts the loss of all samples, which reaches it through the statistics.
    close(torch.cat([first["to x"], second["to x"]]), alone["to x"])
    for results in (first, second):
        close(results["gradients"], alone["gradients"])
        close(results["state"], alone["state"])


def test_a_process_without_samples_takes_part(pair):
    torch.manual_seed(0)
    norm = GroupBatchNorm2d(2, "p4").double()
    norm(torch.randn(6, 8, 3, 3, dtype=torch.float64))
    for results in pair:
        close(results["empty"], dict(norm.state_dict()))


def test_groups_of_processes_share_among_themselves(pair):
    torch.manual_seed(0)
    x = torch.randn(6, 8, 3, 3, dtype=torch.float64)
    for rank, results in enumerate(pair):
        norm = GroupBatchNorm2d(2, "p4").double()
        norm(x[rank::2] * (rank + 1))
        close(results["alone"], dict(norm.state_dict()))


# One process


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda: GroupBatchNorm2d(3, "p4"), lambda: nn.BatchNorm2d(12)], ids=["group", "plain"]
)
def test_without_processes_it_is_the_ordinary_norm(make, dtype, layout):
    ordinary = trained(make).to(dtype)
    ours = convert_sync_batchnorm(copy.deepcopy(ordinary))
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for training in (True, True, False):
        x = (torch.randn(5, 12, 4, 6, dtype=dtype) * 3 + 2).to(memory_format=layout)
        upstream = torch.randn_like(x)
        results = []
        for norm in (ours.train(training), ordinary.train(training)):
            y = x.clone().requires_grad_()
            out = norm(y)
            assert out.dtype == dtype
            assert out.is_contiguous(memory_format=layout)
            gradients = torch.autograd.grad(out, [y, *norm.parameters()], upstream)
            results.append([out.detach(), *gradients, *norm.state_dict().values()])
        for found, wanted in zip(*results, strict=True):
            assert found.dtype == wanted.dtype
            scale = max(1.0, float(wanted.abs().max()))
            assert (found - wanted).abs().max() <= tolerance * scale


def test_conversion_keeps_parameters_names_hooks_and_mode():
    network = trained(NETWORKS["resnet"][0]).eval()
    names, parameters = list(network.state_dict()), list(network.parameters())
    called = []
    network.norm.register_forward_hook(lambda *_: called.append(1))
    assert convert_sync_batchnorm(network) is network
    assert convert_sync_batchnorm(network) is network
    assert list(network.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))
    assert isinstance(network.norm, SyncGroupBatchNorm2d)
    assert not network.norm.training
    network(torch.randn(1, 3, 20, 20))
    assert called == [1]


def test_torchs_own_synchronised_norms_are_left_to_torch():
    network = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm2d(3))
    convert_sync_batchnorm(network)
    assert [type(m) for m in network] == [nn.SyncBatchNorm, SyncBatchNorm]


def test_torchs_own_conversion_says_what_to_do():
    network = NETWORKS["resnet"][0]()
    with pytest.raises(AttributeError, match=r"econv\.convert_sync_batchnorm\(model\)"):
        nn.SyncBatchNorm.convert_sync_batchnorm(network)
    assert not hasattr(network.norm, "num_features")


def test_norms_of_unknown_kinds_are_refused_before_anything_changes():
    class Mine(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    network = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Mine(3)))
    with pytest.raises(ValueError, match=r"got Mine at '1.0'"):
        convert_sync_batchnorm(network)
    assert type(network[0]) is nn.BatchNorm2d


def test_bad_input_is_refused():
    norm = convert_sync_batchnorm(nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match=r"expected \[batch, 3, …\].*got \(2, 4, 5, 5\)"):
        norm(torch.randn(2, 4, 5, 5))
    with pytest.raises(ValueError, match="more than one number per field"):
        norm(torch.randn(1, 3, 1, 1))


def test_synchronised_networks_export_like_ordinary_ones():
    network = trained(NETWORKS["convnet6"][0])
    x = torch.randn(2, 1, 28, 28)
    wanted = econv.export(network)(x)
    assert torch.equal(econv.export(convert_sync_batchnorm(network))(x), wanted)
    norm = trained(lambda: nn.BatchNorm1d(3))
    plain = econv.export(convert_sync_batchnorm(norm))
    assert type(plain) is nn.BatchNorm1d
    x = torch.randn(4, 3)
    assert torch.equal(plain(x), norm.eval()(x))
