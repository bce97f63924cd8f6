"""A converted network is still that network: its modules in their places, called, and hooked."""

import contextlib
import copy
import importlib
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import econv
from econv import convert
from econv.conversion.fusion import flattened
from econv.conversion.network import ConvertedPart
from plain_networks import NETWORKS, UNet


class Block(nn.Module):
    """As in torchvision: one ReLU that is called twice."""

    def __init__(self, before, after, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if stride > 1:
            shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(after))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Named(nn.Module):
    """As timm has them: features, a head, and what they say of themselves."""

    def __init__(self, classes=6):
        super().__init__()
        self.num_classes, self.num_features, self.head_hidden_size = classes, 16, 16
        self.pretrained_cfg = {"input_size": (3, 32, 32), "classifier": "fc"}
        self.feature_info = [
            {"num_chs": 8, "reduction": 1, "module": "layer1"},
            {"num_chs": 16, "reduction": 2, "module": "layer2"},
        ]
        self.global_pool = "avg"
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Block(8, 8), Block(8, 8))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16))
        self.fc = nn.Linear(16, classes)

    def get_classifier(self, name_only=False):
        return "fc" if name_only else self.fc

    def reset_classifier(self, num_classes, global_pool=None):
        self.num_classes = num_classes
        self.fc = nn.Linear(16, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x):
        return self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x)))))

    def forward_head(self, x, pre_logits: bool = False):
        x = x.mean((2, 3))
        return x if pre_logits else self.fc(x)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def images(size=16, channels=3):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(3))


def converted(source, group="p4", match="width", x=None, **options):
    options = {"measure": False, "options": {"engine": "dense"}, **options}
    x = images() if x is None else x
    return convert(source.eval(), group, match, example_input=x, **options)


@pytest.fixture
def network():
    return converted(Named())


def calls(network, *inputs):
    """What each module gives, in the order of the calls."""
    found = []
    handles = [
        m.register_forward_hook(lambda m, given, out, name=name: found.append((name, out)))
        for name, m in network.named_modules()
    ]
    with torch.no_grad():
        network(*inputs)
    for handle in handles:
        handle.remove()
    return found


# Places and calls


def test_modules_are_where_they_were_and_are_called_as_they_were(network):
    source = Named().eval()
    names = [name for name, _ in source.named_modules()]
    own = [name for name, _ in network.named_modules() if name != "fc_orientations"]
    assert own == names
    called = [name for name, _ in calls(network, images()) if name != "fc_orientations"]
    assert called == [name for name, _ in calls(source, images())]
    assert type(network).__name__ == "Named"
    assert {type(block).__name__ for block in [*network.layer1, *network.layer2]} == {"Block"}
    assert isinstance(network.layer2, nn.Sequential)


@pytest.mark.parametrize(
    "name",
    [
        *("resnet18", "mobilenet_v3_small"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("densenet121", "convnext_tiny")),
    ],
)
def test_all_modules_of_well_known_networks_are_called(name):
    source, x = NETWORKS[name][0]().eval(), images(64)
    found = {name for name, _ in calls(converted(source, x=x), x)}
    assert {name for name, _ in calls(source, x)} <= found


def test_a_part_runs_its_part(network):
    x = images()
    given = dict(calls(network, x))
    last = network.layer2[-1]
    found = last(given["layer2.0"])
    assert torch.equal(found, given["layer2.1"])
    assert found.shape == (2, 16, 8, 8)
    assert torch.equal(network.layer2(given["layer1"]), given["layer2"])


def test_hooks_see_and_change_what_passes(network):
    x = images()
    before = network(x)
    seen = []
    with_zeros = [
        network.layer2.register_forward_hook(lambda m, given, out: torch.zeros_like(out)),
        network.layer1[0].register_forward_pre_hook(lambda m, given: seen.append(given[0].shape)),
    ]
    found = network(x)
    assert torch.allclose(found, network.fc.bias.expand_as(found))
    assert seen == [(2, 8, 16, 16)]
    for handle in with_zeros:
        handle.remove()
    assert torch.equal(network(x), before)


def test_grad_cam(network):
    """The map turns with the image, as the network does."""
    network.double()
    maps = {}

    def keep(module, given, out):
        maps["features"] = out
        out.register_hook(lambda gradient: maps.update(gradient=gradient))

    network.layer2.register_forward_hook(keep)

    def cam(x):
        network(x)[:, 2].sum().backward()
        weights = maps["gradient"].mean((2, 3), keepdim=True)
        return (weights * maps["features"]).sum(1).relu().detach()

    x = images().double()
    found = cam(x)
    assert found.shape == (2, 8, 8)
    assert found.abs().max() > 0
    assert torch.allclose(cam(x.rot90(1, (2, 3))), found.rot90(1, (1, 2)), atol=1e-12)


def test_the_graphs_of_the_parts_together_are_one_without_parts(network):
    flat = flattened(network)
    targets = [str(node.target) for node in flat.nodes if node.op == "call_module"]
    leaves = [n for n, m in network.named_modules() if not isinstance(m, _INSIDE)]
    assert set(targets) == set(leaves)
    whole = fx.GraphModule(network, flat)
    assert torch.equal(whole(images()), network(images()))


_INSIDE = (ConvertedPart, nn.Sequential)


# Arguments and results that are no single tensors


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, maps, scale: float = 1.0, *, more=None):
        first, second = maps["first"], maps["second"]
        return OrderedDict(sum=self.conv(first) * scale + second, rest=[second, more])


class Many(nn.Module):
    def forward(self, *maps, **named):
        return sum(maps) + named["last"]


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.pair, self.many = nn.Conv2d(3, 8, 3), Pair(), Many()
        self.end = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = torch.relu(self.lift(x))
        out = self.pair({"first": x, "second": x + 1}, 2.0, more=x)
        return self.end(self.many(out["sum"], *out["rest"], last=x))


def test_structures_pass_as_they_are():
    network, x = converted(Structured()), images()
    found = dict(calls(network, x))
    assert {"pair", "many", "pair.conv"} <= found.keys()
    assert list(found["pair"]) == ["sum", "rest"]
    first = torch.relu(network.lift(x))
    maps = {"first": first, "second": first + 1}
    given = network.pair(maps, 2.0, more=first)
    assert torch.equal(given["sum"], found["pair"]["sum"])
    with pytest.raises(ValueError, match=r"expected scale=2\.0, for which pair was converted"):
        network.pair(maps, more=first)


class Twice(nn.Module):
    """A head that reads maps of several sizes, and one that does not do the same each time."""

    def __init__(self):
        super().__init__()
        self.lift, self.head, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.Module(), Other()
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.end = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = torch.relu(self.lift(x))
        x = self.head(x) + functional.interpolate(self.head(functional.max_pool2d(x, 2)), (16, 16))
        return self.end(self.other(self.other(x, True), False))


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x, active):
        return torch.tanh(self.conv(x)) if active else self.conv(x)


def test_a_module_that_is_called_twice():
    network = converted(Twice())
    called = [name for name, _ in calls(network, images())]
    assert called.count("head") == called.count("head.0") == 2
    assert called.count("other.conv") == 2
    assert "other" not in called
    (note,) = (note for note in network.report.notes if note.startswith("other: "))
    assert note.endswith("its hooks do not; its calls are not the same")


class Aside(nn.Module):
    """Leaves something behind that its caller reads."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        self.kept = torch.relu(x)
        return self.conv(x)


class Leaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.aside = nn.Conv2d(3, 8, 3, padding=1), Aside()
        self.end = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.aside(self.lift(x))
        return self.end(x + self.aside.kept)


def test_what_cannot_be_passed_runs_in_its_caller():
    network = converted(Leaks(), measure=True)
    assert network.report.error < 1e-5
    called = [name for name, _ in calls(network, images())]
    assert called == ["lift", "aside.conv", *called[2:]]
    assert any(n.startswith("aside: ") and "read elsewhere" in n for n in network.report.notes)


class Constants(nn.Module):
    """A parameter of its own, a tensor made of numbers, an inserted module with a shared ReLU."""

    def __init__(self, act):
        super().__init__()
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1), act
        self.gamma = nn.Parameter(torch.full((8, 1, 1), 0.5))

    def forward(self, x):
        y = self.act(self.conv(x)) * self.gamma * torch.tensor(0.5)
        return x + functional.interpolate(functional.max_pool2d(y, 2), scale_factor=2)


def test_a_shared_module_has_all_its_names():
    body = with_constants()
    network = converted(Through(body, body[1].act))
    assert network.act is network.body[1].act is network.body[2].act
    assert "body.1" in dict(calls(network, images()))


class Through(nn.Module):
    def __init__(self, body, act):
        super().__init__()
        self.act, self.body = act, body

    def forward(self, x):
        return self.body(x)


def with_constants():
    act = nn.ReLU()
    blocks = [Constants(act) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Conv2d(8, 4, 1))


def test_parameters_constants_and_inserted_modules_belong_to_the_part_that_uses_them():
    network, x = converted(with_constants()), images()
    found = dict(calls(network, x))
    assert {"1", "1.conv", "1.act", "2", "2.conv"} <= found.keys()
    assert network[1].act is network[2].act
    keys = set(network.state_dict())
    assert {"1.gamma", "2.gamma"} <= keys | {name.rpartition(".")[0] for name in keys}
    assert not any("constant" in key for key in keys)
    inserted = [line.name for line in network.report.lines if "pool" in line.name]
    assert inserted
    assert all(name in dict(network.named_modules()) for name in inserted)
    # Checkpoints from before, which had the numbers in the network.
    state = {**network.state_dict(), "_tensor_constant0": torch.tensor(0.5)}
    network.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        network.load_state_dict({**state, "other": torch.tensor(0.5)})


# Lists


def test_items_of_lists():
    source = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 4),
    )
    network, x = converted(source), images()
    assert len(network) == 6
    assert [type(part).__name__ for part in network][2:4] == ["AdaptiveAvgPool2d", "Flatten"]
    assert type(network[4][1]) is nn.Linear
    assert type(network[-1]) is nn.Linear
    network[5] = nn.Linear(network[5].in_features, 7)
    assert network(x).shape == (2, 7)
    with pytest.raises(ValueError, match="expected one item; got slice"):
        network[4][:2]
    network[4][0] = nn.Identity()
    assert type(copy.deepcopy(network)[4][0]) is nn.Identity


def test_module_lists_and_dictionaries():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.ModuleList([nn.Conv2d(3, 8, 3), Other(), nn.Conv2d(8, 8, 3)])
            self.heads = nn.ModuleDict({"map": nn.Conv2d(8, 4, 1)})

        def forward(self, x):
            return self.heads["map"](self.items[1](self.items[0](x), True))

    network = converted(Lists())
    assert isinstance(network.items, nn.ModuleList)
    assert type(network.items[1]).__name__ == "Other"
    assert isinstance(network.heads, nn.ModuleDict)
    assert list(network.heads) == ["map"]


# What timm's networks offer


def test_features_and_head(network):
    x = images()
    features = network.forward_features(x)
    assert features.shape == (2, 16, 8, 8)
    assert network.num_features == 16
    assert torch.equal(network.forward_head(features), network(x))
    numbers = network.forward_head(features, pre_logits=True)
    assert numbers.shape == (2, network.head_hidden_size) == (2, 4)
    assert torch.equal(network.fc(numbers), network(x))


@pytest.mark.parametrize("match", ["width", "fields"])
def test_feature_info_has_the_channels_of_the_converted_maps(match):
    network = converted(Named(), match=match)
    given = dict(calls(network, images()))
    assert [info["num_chs"] for info in network.feature_info] == [
        given[info["module"]].shape[1] for info in network.feature_info
    ]
    assert network.feature_info[1]["num_chs"] == (16 if match == "width" else 64)
    assert network.pretrained_cfg == Named().pretrained_cfg
    assert Named().feature_info[1]["num_chs"] == 16


def test_resetting_the_classifier(network):
    x = images()
    features = network.forward_features(x)
    assert network.get_classifier() is network.fc
    assert network.get_classifier(name_only=True) == "fc"
    network.reset_classifier(9)
    assert network(x).shape == network.forward_head(features).shape == (2, 9)
    assert network.num_classes == 9
    assert econv.export(network, x)(x).shape == (2, 9)
    other = pickle.loads(pickle.dumps(network))
    other.reset_classifier(0, "avg")
    assert torch.equal(other(x), network.forward_head(features, True))
    other.reset_classifier(3)
    assert other(x).shape == (2, 3)
    assert network(x).shape == (2, 9)
    with pytest.raises(ValueError, match="expected global_pool='avg', as the network was"):
        network.reset_classifier(4, "max")


def test_what_the_source_does_not_offer_is_not_offered():
    network = converted(UNet((4, 4, 4), classes=2))
    for name in ("forward_features", "reset_classifier", "get_classifier", "feature_info"):
        assert not hasattr(network, name)


# Copies, files and other tools


def through_a_file(network):
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_copies_are_the_same_network(network, copied):
    x = images()
    network.layer1.train()
    network.layer1[0].eval()
    other = copied(network)
    assert [n for n, _ in other.named_modules()] == [n for n, _ in network.named_modules()]
    assert [type(m).__name__ for m in other.modules()] == [
        type(m).__name__ for m in network.modules()
    ]
    assert [m.training for m in other.modules()] == [m.training for m in network.modules()]
    assert list(other.state_dict()) == list(network.state_dict())
    network.eval()
    other.eval()
    assert torch.equal(other(x), network(x))
    with torch.no_grad():
        other.layer2[1].conv2.weight.zero_()
    assert not torch.equal(other.forward_features(x), network.forward_features(x))
    assert torch.equal(other.forward_head(other.forward_features(x)), other(x))
    again = copied(other.double())
    assert torch.equal(again.forward_features(x.double()), other.forward_features(x.double()))
    assert again.report.summary() == network.report.summary()


class Annotated(nn.Sequential):
    """With annotations that are texts, as under ``from __future__ import annotations``."""

    def check(self, x: "torch.Tensor") -> None:
        assert x.shape[1] == 3

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        self.check(x)
        return super().forward(x)


def test_annotations_that_are_texts_do_not_keep_a_network_out_of_files():
    source = Annotated(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    network = converted(source)
    assert torch.equal(through_a_file(network)(images()), network(images()))
    assert not hasattr(network, "check")  # it gives nothing


def test_modes_are_those_of_the_source():
    source = Named()
    source.layer1.eval()
    network = convert(source, "p4", "width", example_input=images(), measure=False)
    theirs = dict(source.named_modules())
    assert {n: m.training for n, m in network.named_modules() if n in theirs} == {
        name: module.training for name, module in theirs.items()
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_parts_are_compiled_and_exported(network):
    x = images()
    wanted = network(x)
    for part, given in ((network, x), (network.layer1, network.forward_features(x)[:, :8])):
        compiled = torch.compile(part, fullgraph=True, backend="eager")
        assert torch.equal(compiled(given), part(given))
    found = torch.export.export(network, (x,)).module()(x)
    torch.testing.assert_close(found, wanted)
    plain = econv.export(network, x)
    torch.testing.assert_close(plain(x), wanted, rtol=1e-4, atol=1e-5)


def test_tracers_of_others_take_our_layers_as_they_are(network):
    graph = fx.Tracer().trace(network)
    targets = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    assert {"conv1", "layer2.1.conv2", "fc_orientations"} <= targets
    assert torch.equal(fx.GraphModule(network, graph)(images()), network(images()))
    with pytest.raises(ValueError, match="expected a torch"):
        fx.Tracer().trace(nn.Sequential(network.conv1))  # which no converted part calls


def package(name):
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # torchvision's operators want their own torch
        pytest.skip(f"{name} is not installed, or not for this torch: {error}")


@pytest.mark.filterwarnings("ignore")  # of the packages
def test_feature_extraction_of_torchvision():
    models = package("torchvision.models")
    extraction = package("torchvision.models.feature_extraction")
    x = images(64)
    network = converted(models.resnet18(), x=x)
    given = dict(calls(network, x))
    assert torch.equal(network.layer4[-1](given["layer4.0"]), given["layer4"])
    found = extraction.create_feature_extractor(network, ["layer3", "layer4.0.relu"])(x)
    assert torch.equal(found["layer3"], given["layer3"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "regnety_002", "efficientnet_b0"])
def test_what_timm_offers(name):
    source, x = package("timm").create_model(name).eval(), images(64)
    network = converted(source, x=x)
    features = network.forward_features(x)
    assert features.shape[1] == network.num_features
    assert torch.equal(network.forward_head(features), network(x))
    given = dict(calls(network, x))
    assert [i["num_chs"] for i in network.feature_info] == [
        given[i["module"]].shape[1] for i in network.feature_info
    ]
    network.reset_classifier(3)
    assert network(x).shape == (2, 3)
    network.reset_classifier(0)
    assert torch.equal(network(x), network.forward_head(features, pre_logits=True))
    with contextlib.suppress(AttributeError):
        assert network.head_hidden_size == network(x).shape[1]
