"""Exported networks: plain torch, equal to the original, and nothing of econv left in them."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

import econv
from catalogue import CHANNELS, LAYERS, NETWORKS, outputs, trained
from econv import (
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupInstanceNorm2d,
    GroupPool2d,
    GroupUpsampleConv2d,
    LiftConv2d,
    Upsample2d,
    export,
)
from econv.export import plain_form
from econv.models import ResNet


def assert_equal(plain, network, x, tolerance=1e-5):
    for found, wanted in zip(outputs(plain, x), outputs(network, x), strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))


def kinds(network):
    return [type(module) for module in network.modules() if not list(module.children())]


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_equals_its_plain_form(name, train):
    layer = trained(LAYERS[name]).train(train)
    plain = export(layer)
    assert layer.training == train
    assert not plain.training
    assert not any(p.requires_grad for p in plain.parameters())
    layer.eval()
    for size in ((9, 10), (12, 7)):
        assert_equal(plain, layer, torch.randn(2, CHANNELS, *size))


def test_every_layer_has_a_plain_form():
    found = {getattr(econv.layers, name) for name in econv.layers.__all__}
    layers = {kind for kind in found if isinstance(kind, type) and issubclass(kind, nn.Module)}
    assert {
        kind for kind in layers if plain_form.dispatch(kind) is plain_form.dispatch(object)
    } == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_equal_the_original(name, dtype):
    make, shape = NETWORKS[name]
    network = trained(make).to(dtype).eval()
    x = torch.randn(shape, dtype=dtype)
    plain = export(network, x)
    assert_equal(plain, network, x, 1e-5 if dtype is torch.float32 else 1e-12)
    if name != "convnet6":
        x = torch.randn(3, shape[1], shape[2] + 3, shape[3], dtype=dtype)
        assert_equal(plain, network, x, 1e-5 if dtype is torch.float32 else 1e-12)
    assert all(kind.__module__.startswith("torch.") for kind in kinds(plain))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays(dtype):
    network = trained(NETWORKS["convnet6"][0]).to(dtype).eval()
    plain = export(network)
    x = torch.randn(2, 1, 28, 28, dtype=dtype)
    assert plain(x).dtype == dtype
    assert_equal(plain, network, x, 0.02 if dtype is torch.float16 else 0.1)


@pytest.mark.parametrize(
    "first", ["import econv", "import econv.export", "from econv.export import plain_form"]
)
def test_importing_the_module_of_the_same_name_leaves_the_function(first):
    code = f"{first}; import econv, econv.export, torch; print(econv.export(torch.nn.ReLU()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "ReLU()\n"


def test_the_original_is_left_alone():
    network = trained(NETWORKS["resnet"][0])
    kept = copy.deepcopy(network.state_dict())
    layers = list(network.modules())
    export(network)
    assert network.training
    assert all(a is b for a, b in zip(layers, network.modules(), strict=True))
    assert all(p.requires_grad for p in network.parameters())
    assert all(torch.equal(value, kept[key]) for key, value in network.state_dict().items())


def test_norms_are_folded_where_a_convolution_comes_before():
    plain = export(trained(NETWORKS["convnet6"][0]))
    assert kinds(plain).count(nn.Conv2d) == 7
    assert not any(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds(plain))
    assert nn.Dropout not in kinds(plain)


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_is_folded_into_a_convolution_that_has_a_bias(affine):
    """The bias passes through the norm too: it is scaled as the weight is."""
    network = nn.Sequential(
        LiftConv2d(3, 2, "p4", bias=True),
        GroupBatchNorm2d(2, "p4", affine=affine),
        nn.ReLU(),
        nn.Conv2d(8, 5, 3, bias=True),
        nn.BatchNorm2d(5, affine=affine),
    ).double()
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(4, 9)
        for name, parameter in module.named_parameters(recurse=False):
            nn.init.uniform_(parameter, 1, 2) if name == "bias" else None
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    plain = export(network.eval(), x)
    assert not any(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds(plain))
    torch.testing.assert_close(plain(x), network(x), rtol=0, atol=1e-12)


def test_norms_before_the_activation_become_norms_of_channels():
    network = ResNet("p8", depth=8, fields=(1, 2, 2))
    plain = export(network)
    norms = [m for m in plain.modules() if isinstance(m, nn.BatchNorm2d)]
    # Each block's second norm follows a convolution; its first and the last one follow a sum.
    assert sorted(m.num_features for m in norms) == [8, 8, 16, 16]


def test_a_convolution_that_is_read_twice_keeps_its_norm():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = LiftConv2d(1, 1, "p4"), GroupBatchNorm2d(1, "p4")

        def forward(self, x):
            features = self.conv(x)
            return self.norm(features) + features

    network = trained(Twice).eval()
    plain = export(network)
    assert nn.BatchNorm2d in kinds(plain)
    assert_equal(plain, network, torch.randn(1, 1, 8, 8))


def test_a_layer_that_is_called_twice_stays_one_and_keeps_its_norm():
    conv = GroupConv2d(1, 1, "p4")
    network = nn.Sequential(conv, GroupBatchNorm2d(1, "p4"), conv)
    plain = export(trained(lambda: network))
    assert kinds(plain) == [nn.Conv2d, nn.BatchNorm2d]
    assert_equal(plain, network.eval(), torch.randn(1, 4, 8, 8))


def test_a_norm_without_statistics_normalises_each_batch():
    for affine in (True, False):
        network = trained(
            lambda affine=affine: nn.Sequential(
                GroupConv2d(2, 2, "p4"),
                GroupBatchNorm2d(2, "p4", affine=affine, track_running_stats=False),
            )
        ).eval()
        assert_equal(export(network), network, torch.randn(3, 8, 8, 8) * 2 + 1)


def test_an_instance_norm_with_statistics_reads_them():
    layer = trained(lambda: GroupInstanceNorm2d(2, "p4", track_running_stats=True)).eval()
    plain = export(layer)
    assert type(plain) is nn.BatchNorm2d
    assert_equal(plain, layer, torch.randn(3, 8, 8, 8) * 2 + 1)


@pytest.mark.parametrize("size", [(15, 16), (16, 15), 15, 16, None])
def test_upsampling_to_a_size(size):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.conv = Upsample2d(), GroupUpsampleConv2d(1, 1, "p4")

        def forward(self, x):
            return self.up(x, size), self.up(x=x, size=size), self.conv(x, size=size)

    network = Network().eval()
    assert_equal(export(network), network, torch.randn(1, 4, 8, 8))


def test_channels_last_is_kept():
    network = nn.Sequential(
        LiftConv2d(1, 2, "p4"),
        GroupConv2d(2, 2, "p4", padding_mode="reflect"),
        Downsample2d(),
        GroupInstanceNorm2d(2, "p4"),
        GroupBatchNorm2d(2, "p4"),
        Upsample2d(),
    )
    plain = export(trained(lambda: network)).to(memory_format=torch.channels_last)
    assert len(list(plain.children())) == 6
    x = torch.randn(2, 1, 16, 17).to(memory_format=torch.channels_last)
    for layer in plain.children():
        layer.register_forward_hook(
            lambda module, args, out: seen.append(
                out.is_contiguous(memory_format=torch.channels_last)
            )
        )
    seen: list[bool] = []
    plain(x)
    assert seen == [True] * 6


def test_parametrised_layers_export_what_they_compute():
    network = nn.Sequential(LiftConv2d(1, 2, "p4"), GroupConv2d(2, 2, "p4"))
    parametrizations.weight_norm(network[0], dim=0)
    parametrizations.spectral_norm(network[1])
    network.eval()
    plain = export(network)
    assert not any(parametrize.is_parametrized(m) for m in plain.modules())
    assert_equal(plain, network, torch.randn(1, 1, 8, 8))


# What cannot be traced


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(LiftConv2d(1, 2, "p4"), GroupBatchNorm2d(2, "p4"))
        self.head = ResNet("p4", depth=8, fields=(1, 1, 1), in_channels=2)
        self.pool = GroupPool2d("p4")
        self.up = GroupUpsampleConv2d(2, 2, "p4")

    def forward(self, x):
        x = self.body(x)
        if x.mean() > 0:
            x = x * 2
        return self.head(self.pool(self.up(x)))


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = LiftConv2d(1, 2, "p4")

    def forward(self, x, mask=None):
        x = self.body(x)
        return x if mask is None else x * mask


def test_a_network_that_branches_keeps_its_class():
    network = trained(Branching).eval()
    with pytest.warns(UserWarning, match="Branching keeps its class.*control flow"):
        plain = export(network)
    assert type(plain) is Branching
    assert [type(m) for m in plain.body] == [nn.Conv2d, nn.BatchNorm2d]
    assert_equal(plain, network, torch.randn(2, 1, 12, 12))


def test_optional_arguments_are_kept():
    network = Optional().eval()
    with pytest.warns(UserWarning, match=r"Optional keeps its class.*mask=None"):
        plain = export(network)
    x, mask = torch.randn(2, 1, 9, 9), torch.rand(9, 9)
    assert torch.equal(plain(x), network(x))
    assert torch.equal(plain(x, mask=mask), network(x, mask=mask))


def test_a_layer_with_a_forward_of_its_own_is_refused():
    class Doubled(GroupConv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match=r"forward of PDOConv; Doubled has its own"):
        export(nn.Sequential(Doubled(1, 1, "p4")))

    @plain_form.register
    def _(layer: Doubled) -> nn.Module:
        conv = plain_form.dispatch(GroupConv2d)(layer)
        conv.weight.mul_(2)
        return conv

    network = nn.Sequential(Doubled(1, 1, "p4"))
    assert_equal(export(network), network, torch.randn(1, 4, 8, 8))


def test_hooks_that_would_be_lost_are_refused():
    layer = GroupConv2d(1, 1, "p4")
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match="no forward hooks"):
        export(nn.Sequential(layer))


def test_a_network_that_computes_something_else_when_traced_is_found_out():
    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = LiftConv2d(1, 1, "p4")

        def forward(self, x):
            return self.lift(x) if isinstance(x, torch.Tensor) else -self.lift(x)

    with pytest.raises(ValueError, match="cannot be traced faithfully"):
        export(Sly(), torch.randn(1, 1, 8, 8))


def test_what_is_no_network_is_refused():
    with pytest.raises(ValueError, match=r"expected a torch.nn.Module; got OrderedDict"):
        export(LiftConv2d(1, 1, "p4").state_dict())


# Without econv

READER = """
import sys
sys.modules["econv"] = None  # importing it raises ImportError
import pickle, torch
torch.set_num_threads(1)
for path in sys.argv[1:]:
    network, pickled, x, wanted = torch.load(path, weights_only=False)
    assert "econv" not in repr(network)
    for plain in (network, pickle.loads(pickled)):
        assert not plain.training
        with torch.no_grad():
            found = plain(x)
        found = found if isinstance(found, tuple) else (found,)
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max())), path
print("read", len(sys.argv) - 1)
"""


def test_exported_networks_run_where_econv_cannot_be_imported(tmp_path):
    paths = []
    for number, (make, shape) in enumerate(NETWORKS.values()):
        network, x = trained(make).eval(), torch.randn(shape)
        plain = export(network)
        pickled = pickle.dumps(plain)
        assert b"econv" not in pickled
        path = tmp_path / f"{number}.pt"
        torch.save((plain, pickled, x, outputs(network, x)), path)
        assert b"econv" not in path.read_bytes()
        paths.append(str(path))
    run = subprocess.run(
        [sys.executable, "-c", READER, *paths], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"read {len(NETWORKS)}\n"


def test_the_reader_cannot_import_econv(tmp_path):
    network = nn.Sequential(LiftConv2d(1, 1, "p4"))
    path = tmp_path / "original.pt"
    torch.save((network, pickle.dumps(network), torch.randn(1, 1, 8, 8), ()), path)
    run = subprocess.run([sys.executable, "-c", READER, path], capture_output=True, text=True)
    assert run.returncode != 0
    assert "econv" in run.stderr


def test_a_copy_of_an_exported_network_computes_the_same():
    plain = export(trained(NETWORKS["exact resnet"][0]))
    x = torch.randn(2, 3, 20, 21)
    assert isinstance(plain, fx.GraphModule)
    assert torch.equal(copy.deepcopy(plain)(x), plain(x))
    assert type(plain).__name__ == "ResNet"


def test_downsampling_is_exact_in_the_exported_network():
    plain = export(nn.Sequential(Downsample2d()).double())
    x = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    assert (plain(x.flip(2)) - plain(x).flip(2)).abs().max() <= 1e-15


@pytest.mark.parametrize("layer", [econv.Recentre2d(0.5), econv.NearestResize2d()])
@pytest.mark.parametrize("sizes", [(9, 12), (12, 9), (8, 21), (16, 20)])
def test_layers_that_are_told_a_size_equal_their_plain_form(layer, sizes):
    plain = export(layer)
    x = torch.randn(2, 3, 8, 10)
    torch.testing.assert_close(plain(x, *sizes), layer(x, *sizes))


# Volumes


@pytest.mark.parametrize("name", ["resnet10_3d_T", "unet_3d_T"])
def test_networks_of_volumes_become_plain_convolutions(name):
    torch.manual_seed(0)
    fields = (1, 2) if "unet" in name else (1, 1, 1, 1)
    network = econv.create_model(name, fields=fields, in_channels=1)
    side = 9 if "unet" in name else 33
    network(torch.randn(2, 1, side, side, side))
    volume = torch.randn(1, 1, side, side, side)
    plain = export(network.eval(), volume)
    assert nn.Conv3d in kinds(plain)
    assert nn.BatchNorm3d not in kinds(plain)  # folded into the convolutions before them
    other = torch.randn(2, 1, side + 1, side + 2, side)
    assert_equal(plain, network, other)
    network.train()
    network(torch.randn(2, 1, side, side, side))
    with pytest.raises(AssertionError):
        assert_equal(plain, network.eval(), other)
