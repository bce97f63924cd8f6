"""The paper's networks: their sizes, their symmetry, and how fast they come into being."""

import re
import statistics
import subprocess
import sys

import pytest
import torch
from torch import nn

from econv import (
    Downsample2d,
    GroupActivation2d,
    GroupConv2d,
    GroupPool2d,
    LiftConv2d,
    from_pretrained,
)
from econv.models import MODELS, ImageNetResNet, ResNet, create_model
from econv.testing import assert_equivariant, equivariance_error, transform

STARTUP = """
from time import perf_counter
import torch
start = perf_counter()
import econv
imported = perf_counter()
from econv.models import MODELS, ResNet, create_model
ready = perf_counter()
ResNet("p8")
print(imported - start, perf_counter() - ready)
"""


@pytest.fixture(scope="module")
def startup():
    """Seconds to import econv after torch and to build the ResNet, in fresh processes."""
    runs = []
    for _ in range(5):
        command = [sys.executable, "-c", STARTUP]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        runs.append([float(seconds) for seconds in out.split()])
    return [statistics.median(seconds) for seconds in zip(*runs, strict=True)]


def test_importing_adds_at_most_a_third_of_a_second_to_torch(startup):
    assert startup[0] <= 0.3


def test_the_resnet_of_4_6_million_parameters_builds_in_under_a_second(startup):
    assert startup[1] < 1.0


@pytest.mark.parametrize(
    ("group", "depth", "fields", "parameters"),
    [
        ("p8", 26, (20, 40, 80), 4_591_630),
        ("p8", 44, (11, 23, 45), 2_621_693),
        ("p6", 26, (6, 13, 26), 362_386),
    ],
)
def test_parameter_counts_are_those_of_the_paper(group, depth, fields, parameters):
    network = ResNet(group, depth, fields)
    assert sum(p.numel() for p in network.parameters()) == parameters
    convolutions = [m for m in network.modules() if isinstance(m, LiftConv2d | GroupConv2d)]
    spatial = [m for m in convolutions if len(m.basis.operators) > 1]
    assert len(spatial) + 1 == depth  # and the classifier


def test_the_defaults_are_the_large_network():
    assert sum(p.numel() for p in ResNet().parameters()) == 4_591_630


def small(group="p4", exact=True, pool="max", **options):
    network = ResNet(group, 8, (2, 3, 4), 2, 5, pool, exact, options or None).double()
    for module in network.modules():  # statistics and biases that are not trivial
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return network


@pytest.mark.parametrize("size", [28, 29, 32, 33])
@pytest.mark.parametrize(
    ("group", "train"),
    [("p4", True), ("p8", True), ("p8", False), ("p4m", True), ("p4m", False), ("p8m", False)],
)
def test_the_exact_network_commutes_with_the_symmetries_of_the_grid(size, group, train):
    network = small(group).train(train)
    x = torch.randn(2, 2, size, size, dtype=torch.float64)
    assert_equivariant(network, x, tolerance=1e-12)


@pytest.mark.parametrize("pool", ["max", "mean", "mean+std+top2"])
def test_all_ways_of_pooling_are_invariant(pool):
    x = torch.randn(2, 2, 28, 28, dtype=torch.float64)
    assert_equivariant(small("p4m", pool=pool).eval(), x, tolerance=1e-12)


def test_strides_are_exact_on_odd_sizes_and_on_no_others():
    network = small("p4", exact=False).eval()
    for size, exact in ((28, False), (29, True), (32, False), (33, True)):
        x = torch.randn(2, 2, size, size, dtype=torch.float64)
        error = equivariance_error(network, x, element=1)
        assert error <= 1e-12 if exact else error > 1e-6


def test_without_pooling_the_classifier_sees_the_orientations():
    network = small("p4", pool=None).eval()
    x = torch.randn(2, 2, 28, 28, dtype=torch.float64)
    assert network.classifier.in_features == 4 * 4
    assert equivariance_error(network, x, element=1) > 1e-6
    features = nn.Sequential(network.lift, network.blocks, network.norm)
    turned = features(transform(x, "p4", 1))
    error = (turned - transform(features(x), "p4", 1, "regular")).detach().abs().max()
    assert float(error) <= 1e-12 * float(turned.detach().abs().max())


def test_options_reach_every_convolution():
    network = small("p4", padding_mode="circular", stencils="central", bias=True)
    convolutions = [m for m in network.modules() if isinstance(m, LiftConv2d | GroupConv2d)]
    assert len(convolutions) == 1 + 3 * 2 + 2
    assert {m.padding_mode for m in convolutions} == {"circular"}
    assert all(m.bias is not None for m in convolutions)


def test_halving_happens_twice_either_way():
    sizes = {}
    for exact in (True, False):
        network = small("p4", exact=exact)
        x = torch.randn(1, 2, 29, 32, dtype=torch.float64)
        sizes[exact] = network.blocks(network.lift(x)).shape[2:]
        halvings = [m for m in network.modules() if isinstance(m, Downsample2d)]
        strides = [m for m in network.modules() if getattr(m, "stride", 1) == 2]
        assert (len(halvings), len(strides)) == ((2, 0) if exact else (0, 4))
    assert sizes[True] == sizes[False] == (8, 8)


def test_channels_last_gives_the_same_scores():
    network = small("p8").eval()
    x = torch.randn(2, 2, 28, 28, dtype=torch.float64)
    difference = network(x) - network(x.to(memory_format=torch.channels_last))
    assert float(difference.detach().abs().max()) <= 1e-12


def test_a_training_step_reaches_every_parameter():
    network = small("p4", exact=False, pool=None).float()
    network(torch.randn(2, 2, 20, 20)).pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters())


@pytest.mark.parametrize("name", ["resnet8_p8", "convnet6_p8"])
def test_the_classifier_reads_every_statistic(name):
    network = create_model(name, pool="mean+top3")
    fields = network.config["fields"][-1]
    channels = 1 if network.config["num_classes"] == 0 else network.classifier.weight.shape[1]
    assert (network.num_features, channels) == (4 * fields, 4 * fields)


def test_pool_is_a_group_pool():
    assert isinstance(small(pool="mean").pool, GroupPool2d)
    assert small(pool="mean").pool.reduce == "mean"


@pytest.mark.parametrize("depth", [2, 7, 25, 27, -4, 0])
def test_a_depth_that_no_resnet_has_is_an_error(depth):
    with pytest.raises(ValueError, match=rf"expected a depth of 6n \+ 2.*got {depth}"):
        ResNet("p4", depth)


@pytest.mark.parametrize("fields", [(4,), (4, 8), (4, 8, 16, 32)])
def test_the_wrong_number_of_stages_is_an_error(fields):
    with pytest.raises(ValueError, match=r"expected the fields of three stages; got \(4,"):
        ResNet("p4", 8, fields)


@pytest.mark.parametrize(
    ("arguments", "expected", "got"),
    [
        ({"group": "q8"}, "expected 'pn'", "'q8'"),
        ({"pool": "sum"}, "'max', 'mean'", "'sum'"),
        ({"fields": (2, 0, 4)}, "at least 1", "got (2, 0, 4)"),
        ({"in_channels": 0}, "at least 1", "got 0"),
        ({"options": {"stencils": "round"}}, "expected", "'round'"),
    ],
)
def test_arguments_that_make_no_network_are_errors(arguments, expected, got):
    with pytest.raises(ValueError, match="expected") as caught:
        ResNet(**{"group": "p4", "depth": 8, "fields": (2, 2, 2), **arguments})
    assert expected in str(caught.value)
    assert got in str(caught.value)


def test_the_wrong_number_of_image_channels_is_an_error():
    with pytest.raises(ValueError, match="expected 2 image channels; got 3 channels"):
        small()(torch.randn(1, 3, 28, 28, dtype=torch.float64))


# The rows of the paper's tables


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet18", 11_689_512),  # torchvision's
        ("resnet50", 25_557_032),
        ("convnet6", 21_620),  # "22k"
        ("convnet6_p4", 24_610),  # "25k"
        ("convnet6_p8", 26_747),
        ("convnet7_p8", 646_426),  # "0.65M"
        ("paper_resnet26", 369_498),  # "0.37M"
        ("paper_resnet26_p6", 362_386),
        ("paper_resnet26_p6m", 366_076),  # "0.37M"
        ("paper_resnet26_p8", 4_591_630),
        ("paper_resnet44", 2_636_074),  # "2.64M"
        ("paper_resnet44_p4m", 2_621_693),  # "2.62M"
        ("paper_resnet44_p8", 2_621_693),
        ("paper_wide_resnet26", 36_479_194),  # "36.5M"
    ],
)
def test_parameters_of_the_papers_networks(name, parameters):
    with torch.device("meta"):
        network = create_model(name)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert name in MODELS


@pytest.mark.parametrize("name", ["convnet6", "convnet6_p8", "convnet7_p8", "convnet6_p3m"])
def test_convnets_classify_images_of_28_pixels(name):
    assert create_model(name, num_classes=7)(torch.randn(2, 1, 28, 28)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet8", "resnet8_p4", "resnet14_p3m"])
def test_any_depth_and_group_has_a_name(name):
    network = create_model(name, num_classes=7)
    assert network(torch.randn(2, 3, 20, 20)).shape == (2, 7)
    assert (network.group is None) == (name == "resnet8")


def test_pooling_orientations_shrinks_the_classifier():
    pooled = create_model("convnet6_p8", pool="max")
    assert sum(p.numel() for p in pooled.parameters()) == 18_907


@pytest.mark.parametrize("size", [28, 32])
def test_the_seven_layer_network_is_invariant_to_quarter_turns(size):
    network = create_model("convnet7_p8", dropout=0.0).double().eval()
    assert_equivariant(network, torch.randn(1, 1, size, size, dtype=torch.float64))


def test_the_map_before_the_classifier_of_the_six_layer_network_turns_along():
    network = create_model("convnet6_p8").double().eval()
    x = torch.randn(1, 1, 28, 28, dtype=torch.float64)
    assert_equivariant(network.layers, x, "p8", output_kind="regular")


@pytest.mark.parametrize("name", ["resnet", "resnet26_q8", "convnet5_p8", "", "vgg", None])
def test_an_unknown_model_is_an_error_that_lists_the_names(name):
    with pytest.raises(ValueError, match=r"unknown model.*paper_resnet26_p8"):
        create_model(name)


@pytest.mark.parametrize("options", [{"pool": "max"}, {"options": {"stencils": "central"}}])
def test_an_ordinary_network_has_no_orientations(options):
    with pytest.raises(ValueError, match="without a group"):
        create_model("resnet8", **options)


def test_images_that_vanish_are_an_error():
    with pytest.raises(ValueError, match=r"larger images.*12 pixels"):
        create_model("convnet6_p8", image_size=12)
    with pytest.raises(ValueError, match="expected image_size: a whole number"):
        create_model("convnet6_p8", image_size=torch.zeros(2, 3))


# What networks answer


def named(name, **options):
    fields = (1, 1, 2) if name.startswith("convnet") else (1, 2, 2)
    depth = {} if name.startswith("convnet") else {"depth": 8}
    return create_model(name, fields=fields, **depth, **options)


@pytest.mark.parametrize("name", ["resnet26_p8", "convnet6_p8", "convnet7_p8"])
def test_a_network_is_its_features_and_its_head(name):
    model = named(name, in_channels=2).eval()
    x = torch.randn(2, 2, 28, 28)
    features = model.forward_features(x)
    assert features.ndim == 4
    assert torch.equal(model.forward_head(features), model(x))
    before = model.forward_head(features, pre_logits=True)
    if name != "convnet6_p8":  # whose classifier reads the whole map
        assert before.shape == (2, model.num_features)
    assert model.get_classifier() is model.classifier
    model.reset_classifier(5)
    assert model(x).shape == (2, 5)
    assert model.num_classes == model.config["num_classes"] == 5
    model.double().reset_classifier(3)
    assert model(x.double()).dtype == torch.float64
    model.float().reset_classifier(0)
    assert torch.equal(model(x), before)
    headless = named(name, num_classes=0)
    assert "classifier.weight" not in headless.state_dict()


@pytest.mark.parametrize("name", ["resnet26_p8", "convnet6_p8", "convnet7_p8", "unet_p4"])
def test_checkpointed_training_computes_the_same_gradients_and_keeps_less(name):
    model = (create_model(name, fields=(2, 3)) if name == "unet_p4" else named(name)).double()
    x = torch.randn(2, model.config["in_channels"], 28, 28, dtype=torch.float64)
    found, kept = [], []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        torch.manual_seed(0)
        model.zero_grad()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            out = model(x)
        out.sin().sum().backward()
        kept.append(sum(sizes))
        found.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    assert kept[1] < 0.7 * kept[0]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [-1, 1.5, True, None])
def test_bad_numbers_of_classes_are_refused(bad):
    with pytest.raises(ValueError, match="num_classes of 0 or more"):
        create_model("convnet6_p4", num_classes=bad)


def test_a_head_keeps_its_own_pooling():
    with pytest.raises(ValueError, match="no global_pool"):
        named("resnet26_p8").reset_classifier(3, global_pool="avg")


def test_importing_econv_imports_none_of_its_friends():
    code = (
        "import sys, econv; friends = {'timm', 'huggingface_hub', 'safetensors', 'onnx', "
        "'torchao', 'econv.timm'}; "
        "print(sorted(friends & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# What names mean


def small_named(name, **options):
    fields = (1, 1, 2, 2) if "resnet18" in name or "resnet50" in name else (1, 2, 2)
    return create_model(name, fields=fields, num_classes=5, **options)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("resnet18_p8", (129, 132)),
        ("resnet50_p4", (129, 130)),
        ("cifar_resnet8_p4m", (32, 33)),
        ("resnet8_p4", (31, 32)),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_named_resnets_are_invariant_to_quarter_turns(name, sizes, place):
    network = small_named(name).double().eval()
    for norm in network.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(norm.bias)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    x = torch.randn(1, 3, sizes[place], sizes[place], dtype=torch.float64)
    assert_equivariant(network, x, tolerance=1e-11)


def test_the_papers_networks_are_not_and_their_names_say_so():
    network = small_named("paper_resnet8_p4").double().eval()
    assert network.config["pool"] is None
    assert not network.config["exact"]
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    assert equivariance_error(network, x, 1, output_kind="invariant") > 1e-3


@pytest.mark.parametrize(("depth", "blocks"), [(18, 8), (34, 16), (50, 16), (101, 33), (152, 50)])
def test_imagenet_depths_are_those_that_everybody_means(depth, blocks):
    with torch.device("meta"):
        network = create_model(f"resnet{depth}_p4")
    assert type(network) is ImageNetResNet
    assert network.image_size == 224
    stages = [network.layer1, network.layer2, network.layer3, network.layer4]
    assert sum(len(stage) for stage in stages) == blocks
    spatial = [m for m in network.modules() if isinstance(m, LiftConv2d | GroupConv2d)]
    shortcuts = [m for name, m in network.named_modules() if name.endswith("downsample.0")]
    assert len(spatial) - len(shortcuts) + 1 == depth
    assert (network.conv1.basis.size, network.conv1.stride) == (7, 2)
    count = sum(p.numel() for p in network.parameters())
    with torch.device("meta"):
        plain = sum(p.numel() for p in create_model(f"resnet{depth}").parameters())
    assert abs(count - plain) < 0.1 * plain


def test_an_ordinary_imagenet_resnet_halves_five_times():
    network = create_model("resnet18", fields=(2, 2, 3, 4), num_classes=0)
    assert network.forward_features(torch.randn(1, 3, 224, 224)).shape == (1, 4, 7, 7)
    assert network(torch.randn(1, 3, 64, 64)).shape == (1, 4)


def test_an_imagenet_depth_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"expected a depth of \[10, 18, 34.*got 20"):
        ImageNetResNet("p4", depth=20)
    with pytest.raises(ValueError, match=r"expected a depth of .*got \{'a': 1\}"):
        ImageNetResNet("p4", depth={"a": 1})
    with pytest.raises(ValueError, match="four stages"):
        ImageNetResNet("p4", fields=(1, 2))


def test_weights_of_the_papers_network_do_not_fit_and_it_is_said_which_do():
    state = small_named("paper_resnet8_p4").state_dict()
    with pytest.raises(ValueError, match=r"reads all orientations.*paper_resnet"):
        small_named("resnet8_p4").load_state_dict(state)
    small_named("resnet8_p4", pool=None, exact=False).load_state_dict(state)


@pytest.mark.parametrize("name", ["resnet18_p4", "cifar_resnet8_p4"])
def test_features_only_returns_the_maps_of_the_stages(name):
    backbone = small_named(name, features_only=True).double().eval()
    size = 160 if "18" in name else 32
    x = torch.randn(1, 3, size, size, dtype=torch.float64)
    info, maps = backbone.feature_info, backbone(x)
    assert [m.shape[1] for m in maps] == info.channels()
    assert [size // m.shape[2] for m in maps] == info.reduction()
    modules = dict(backbone.network.named_modules())
    assert set(info.module_name()) <= set(modules)
    assert "classifier.weight" not in backbone.network.state_dict()
    for turned, straight in zip(backbone(transform(x, "p4", 1)), maps, strict=True):
        torch.testing.assert_close(turned, transform(straight, "p4", 1))
    last = small_named(name, features_only=True, out_indices=(-1,))
    assert last.feature_info.channels() == info.channels()[-1:]
    assert len(last(x.float())) == 1
    every = small_named(name, features_only=True, pool=None)
    assert every(x.float())[0].shape[1] == 4 * info.channels()[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("convnet6_p4", {"features_only": True}, "network with stages"),
        ("resnet8_p4", {"features_only": True, "out_indices": (3,)}, "from -3 to 2"),
        ("resnet8_p4", {"out_indices": (1,)}, "together with features_only"),
        ("resnet8_p4", {"drop_rate": 1.0}, "drop_rate as a number"),
    ],
)
def test_options_that_mean_nothing_are_errors(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **options)


@pytest.mark.parametrize("name", ["resnet18_p4", "resnet8_p4"])
def test_drop_rate_drops_features_before_the_classifier(name):
    network = small_named(name, drop_rate=0.5)
    x = torch.randn(2, network.classifier.in_features, 2, 2).repeat_interleave(4, 1)
    network.eval()
    assert torch.equal(network.forward_head(x), network.forward_head(x))
    network.train()
    assert not torch.equal(network.forward_head(x), network.forward_head(x))
    assert network.config["drop_rate"] == 0.5


@pytest.mark.parametrize("name", ["resnet18_p4", "resnet8_p4", "convnet6_p4"])
@pytest.mark.parametrize("coarse", [False, True])
def test_every_parameter_is_matched_by_a_part_or_is_the_heads(name, coarse):
    network = create_model(name)
    matcher = network.group_matcher(coarse)
    blocks = matcher["blocks"]
    patterns = [blocks] if isinstance(blocks, str) else [pattern for pattern, _ in blocks]
    left = [
        key
        for key, _ in network.named_parameters()
        if not any(re.search(pattern, key) for pattern in [matcher["stem"], *patterns])
    ]
    assert {key.partition(".")[0] for key in left} == {"classifier"}


SMOOTH = {"activation": "silu", "antialias": 0.7}


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("cifar_resnet8_p4", 27, {"fields": (1, 2, 2), "oversample": 2}),
        ("cifar_resnet8_p4", 22, {"fields": (1, 1, 1), "margin": 3}),
        ("resnet18_p4", 129, {"fields": (1, 1, 2, 2)}),
        ("resnet50_p4", 129, {"fields": (1, 1, 1, 1)}),
        ("convnet6_p4", 28, {"fields": (2,) * 6, "pool": "max", "readout": "mean"}),
        ("convnet7_p8m", 26, {"fields": (1,) * 7, "margin": 3, "image_size": 26}),
    ],
)
def test_smooth_networks_are_exact_on_the_grid_and_take_the_weights_of_others(name, size, options):
    torch.manual_seed(0)
    smooth = create_model(name, **SMOOTH, **options).double()
    channels = smooth.config["in_channels"]
    x = torch.randn(2, channels, size, size, dtype=torch.float64)
    smooth.train()(x)
    assert_equivariant(smooth.eval(), x, output_kind="invariant", tolerance=1e-9)
    activations = [m for m in smooth.modules() if isinstance(m, GroupActivation2d)]
    assert activations
    assert {m.oversample for m in activations} == {options.get("oversample", 1)}
    halvings = [m for m in smooth.modules() if isinstance(m, Downsample2d)]
    assert {m.antialias for m in halvings} == {8}
    assert not [m for m in smooth.modules() if isinstance(m, nn.ReLU | nn.MaxPool2d)]
    plain = create_model(name, **{k: v for k, v in options.items() if k != "oversample"}).double()
    plain.load_state_dict(smooth.state_dict())
    assert not torch.allclose(plain.eval()(x), smooth(x))


def test_smooth_networks_are_saved_with_what_they_are(tmp_path):
    network = create_model("convnet7_p4", fields=(1,) * 7, margin=2, oversample=2, **SMOOTH)
    network.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert again.config == network.config
    x = torch.randn(1, 1, 28, 28)
    assert torch.equal(again.eval()(x), network.eval()(x))


def test_what_touches_the_border_does_not_reach_into_the_margin():
    network = create_model("convnet6_p4", fields=(1,) * 6, margin=3, pool="max", **SMOOTH).double()
    x = torch.full((1, 1, 28, 28), 0.5, dtype=torch.float64)
    x[..., 10:14, :] = 2.0
    wide = torch.full((1, 1, 34, 34), 0.5, dtype=torch.float64)
    wide[..., 3:-3, 3:-3] = x
    same = create_model("convnet6_p4", image_size=34, fields=(1,) * 6, pool="max", **SMOOTH)
    same.double().load_state_dict(network.state_dict())
    torch.testing.assert_close(network.eval()(x), same.eval()(wide), rtol=0, atol=1e-12)


def test_a_resnet_reads_its_image_on_a_margin_but_gives_no_maps_of_it():
    network = create_model("cifar_resnet8_p4", fields=(1, 1, 1), margin=2).eval()
    x = torch.randn(1, 3, 20, 20)
    corners = x[..., ::19, ::19].mean((2, 3), keepdim=True)
    wide = nn.functional.pad(x - corners, (2,) * 4) + corners
    same = create_model("cifar_resnet8_p4", fields=(1, 1, 1)).eval()
    same.load_state_dict(network.state_dict())
    assert torch.equal(network(x), same(wide))
    with pytest.raises(ValueError, match="expected margin=0 for a decoder's maps; got 2"):
        create_model("cifar_resnet8_p4", features_only=True, margin=2)


def test_initial_weights_know_their_activation():
    plain, smooth = create_model("cifar_resnet8_p4"), create_model("cifar_resnet8_p4", **SMOOTH)
    assert (plain.lift.init, smooth.lift.init) == ("relu", "silu")
    assert create_model("cifar_resnet8_p4", activation="tanh").lift.init == "relu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "swish"}, "unknown activation"),
        ({"oversample": 2}, "above 0"),
        ({"antialias": -1.0}, "expected width"),
        ({"margin": -1}, "expected margin"),
        ({"margin": True}, "expected margin"),
    ],
)
def test_what_smooth_networks_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        create_model("convnet7_p4", **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convnet6_p4", {}),  # reads the last map whole
        ("convnet7_p8", {}),
        ("paper_resnet26_p8", {"fields": (4, 4, 8)}),
        ("resnet18_p4", {"fields": (2, 2, 2, 4)}),
    ],
)
def test_the_classifier_begins_as_the_paper_says(name, options):
    """Xavier's scheme: normal, with the variance 2 / (inputs + outputs)."""
    torch.manual_seed(0)
    network = create_model(name, num_classes=1000, **options)
    weight = network.classifier.weight.detach().flatten(1)
    area = network.classifier.weight[0, 0].numel()
    wanted = (2 / (weight.shape[1] + area * 1000)) ** 0.5
    assert float(weight.std()) == pytest.approx(wanted, rel=0.05)
    assert abs(float(weight.mean())) < 4 * wanted / weight.numel() ** 0.5
    kurtosis = float(((weight / weight.std()) ** 4).mean())
    assert kurtosis == pytest.approx(3.0, abs=0.3)  # 1.8 if it were uniform
    if "resnet" in name:
        assert not network.classifier.bias.any()


def test_ordinary_networks_begin_by_hes_scheme():
    torch.manual_seed(0)
    network = create_model("convnet7", fields=(64,) * 7)
    for conv in [m for m in network.modules() if isinstance(m, nn.Conv2d)][1:-1]:
        wanted = (2 / conv.weight[0].numel()) ** 0.5
        assert float(conv.weight.detach().std()) == pytest.approx(wanted, rel=0.05)


# Volumes


def small_3d(name, **options):
    """A network for volumes with few fields, in float64, whose norms have seen something."""
    torch.manual_seed(0)
    fields = (1, 2) if name.startswith("unet") else (1, 1, 1, 1)
    network = create_model(name, fields=fields, num_classes=3, in_channels=1, **options).double()
    sides = [12] * 3 if name.startswith("unet") else [33] * 3
    with torch.no_grad():
        network(torch.randn(2, 1, *sides, dtype=torch.float64))
    return network.eval()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("unet_3d_O", (8, 9)),
        ("unet_3d_Th", (7, 8)),
        ("resnet10_3d_T", (33, 34)),
        pytest.param("unet_3d_Oh", (8, 9), marks=pytest.mark.slow),
        pytest.param("resnet10_3d_O", (33, 34), marks=pytest.mark.slow),
        pytest.param("resnet10_3d_Oh", (33, 36), marks=pytest.mark.slow),
        pytest.param("resnet18_3d_D4h", (33, 34), marks=pytest.mark.slow),
    ],
)
def test_networks_of_volumes_are_exact_under_the_symmetries_of_the_cube(name, sizes):
    network = small_3d(name)
    for size in sizes:
        volume = torch.randn(1, 1, *[size] * 3, dtype=torch.float64)
        group = network.group
        fast = name in ("resnet10_3d_T", "unet_3d_O", "unet_3d_Th")
        elements = group.generators if fast else group.grid_symmetries
        assert_equivariant(network, volume, elements=elements, tolerance=1e-12)


@pytest.mark.parametrize(("name", "group"), [("unet_3d_O", "p4"), ("resnet10_3d_O", "p4m")])
def test_a_group_of_the_plane_for_a_network_of_volumes_is_refused(name, group):
    with pytest.raises(ValueError, match=f"expected a group of space, .* got '{group}'"):
        create_model(name, group=group)


def test_features_of_a_network_of_volumes():
    network = small_3d("resnet10_3d_T", features_only=True, out_indices=(1, 4)).double().eval()
    volume = torch.randn(1, 1, 33, 33, 33, dtype=torch.float64)
    maps = network(volume)
    assert [m.shape[1] for m in maps] == network.feature_info.channels()
    assert [round(33 / m.shape[2]) for m in maps] == [2, 11]
    turned = network(volume.rot90(2, (2, 3)))
    for straight, there in zip(maps, turned, strict=True):
        torch.testing.assert_close(there, straight.rot90(2, (2, 3)), rtol=0, atol=1e-12)


def test_another_stride_in_a_network_of_volumes_is_noticed():
    network = small_3d("resnet10_3d_T", exact=False)
    volume = torch.randn(1, 1, 34, 34, 34, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not equivariant"):
        assert_equivariant(network, volume, elements=network.group.generators)


@pytest.mark.parametrize("name", ["resnet18_3d", "unet_3d", "unet"])
def test_ordinary_twins_have_as_many_parameters_within_a_factor_of_three(name):
    ours = create_model(f"{name}_O" if "3d" in name else f"{name}_p8")
    twin = create_model(name)
    assert twin.group is None
    assert twin.dimension == ours.dimension
    counts = [sum(p.numel() for p in network.parameters()) for network in (ours, twin)]
    assert 1 / 3 < counts[0] / counts[1] < 3
    assert all("Group" not in type(m).__name__ for m in twin.modules())


def test_a_u_net_gives_scores_of_every_voxel_of_any_size():
    network = small_3d("unet_3d_T").float()
    for sides in ((6, 7, 9), (8, 8, 8)):
        assert network(torch.randn(2, 1, *sides)).shape == (2, 3, *sides)
    images = create_model("unet_p4", fields=(1, 2, 2), num_classes=0)
    assert images(torch.randn(2, 1, 21, 23)).shape == (2, 1, 21, 23)


@pytest.mark.parametrize("name", ["unet_3d_T", "unet_3d", "resnet10_3d_T"])
def test_networks_of_volumes_are_saved_and_made_again(name, tmp_path):
    pytest.importorskip("safetensors")
    network = small_3d(name).float()
    network.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    side = 8 if "unet" in name else 33
    volume = torch.randn(1, 1, side, side, side)
    assert type(again) is type(network)
    torch.testing.assert_close(again(volume), network(volume), rtol=0, atol=0)


def test_feature_maps_of_volumes_are_an_ordinary_backbone():
    backbone = create_model("resnet10_3d_T", features_only=True, fields=(1, 1, 2, 2), in_channels=1)
    maps = backbone(torch.randn(1, 1, 40, 40, 40))
    assert [tuple(m.shape[2:]) for m in maps] == [(n,) * 3 for n in (20, 20, 10, 5, 3)]
    assert backbone.feature_info.reduction() == [2, 2, 4, 8, 16]
    assert [m.shape[1] for m in maps] == backbone.feature_info.channels()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unet_3d_p8", "expected a group of space"),
        ("resnet10_3d_p4", "expected a group of space"),
        ("unet_O", "expected a group of the plane"),
        ("resnet11_3d_O", "expected a depth of"),
        ("convnet6_O", "unknown model"),
    ],
)
def test_names_that_mix_images_and_volumes_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        create_model(name)


def test_networks_for_images_alone_refuse_groups_of_space():
    with pytest.raises(ValueError, match="expected a group of the plane"):
        ResNet("O")
    with pytest.raises(ValueError, match="expected dimension 2 or 3"):
        create_model("unet_p4", dimension=1)


def test_ordinary_resnets_are_as_wide_as_everybody_knows_them():
    with torch.device("meta"):
        assert create_model("resnet18").config["fields"] == [64, 128, 256, 512]
        # As many parameters: p8 has eight orientations of √8 times fewer fields.
        assert create_model("resnet18_p8").config["fields"] == [23, 45, 91, 181]


@pytest.mark.parametrize(
    ("name", "last"),
    [("wrn10_1_p8m_p4m_p1m", "p1m"), ("wrn10_1_p8m", "p8m"), ("wrn10_1_p8_p4_p4", "p4")],
)
def test_wide_resnets_turn_under_the_group_of_their_last_stage(name, last):
    torch.manual_seed(0)
    network = create_model(name, fields=(1, 2, 2), stem=1).double().eval()
    assert network.group.name == last
    x = torch.randn(1, 3, 21, 21, dtype=torch.float64)
    assert_equivariant(network, x, elements=network.group.grid_symmetries)
    assert_equivariant(network, x[..., :20, :20], elements=network.group.grid_symmetries)


def test_a_restriction_gives_up_the_turns_that_it_says():
    torch.manual_seed(0)
    network = create_model("wrn10_1_p4m_p4m_p1m", fields=(1, 2, 2), stem=1).double().eval()
    x = torch.randn(1, 3, 20, 20, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not equivariant"):
        assert_equivariant(network, x, "p4", elements=(1,))
    with pytest.raises(ValueError, match="network of one group for its maps"):
        create_model("wrn10_1_p4m_p4m_p1m", features_only=True)


@pytest.mark.parametrize("name", ["wrn16_8", "wrn28_10"])
def test_wide_resnets_have_the_papers_parameters_and_ours_about_as_many(name):
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in create_model(name + end).parameters())
            for end in ("", "_p4m", "_p8m", "_p8m_p4m_p1m")
        ]
    # Zagoruyko & Komodakis (2016), table 4: 11.0M and 36.5M.
    assert round(counts[0] / 1e6, 1) == {"wrn16_8": 11.0, "wrn28_10": 36.5}[name]
    assert all(0.9 < count / counts[0] < 1.15 for count in counts)


def test_a_restricted_network_is_saved_and_made_again(tmp_path):
    pytest.importorskip("safetensors")
    network = create_model("wrn10_1_p4m_p4_p2", fields=(1, 1, 2), stem=1).eval()
    network.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 20, 20)
    torch.testing.assert_close(from_pretrained(tmp_path)(x), network(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wrn16_8_p4_p8_p4", {}, "p8 is not a subgroup of p4"),
        ("wrn16_8_p4_p2", {}, "those of three stages"),
        ("wrn15_8", {}, r"expected a Wide ResNet of 6n \+ 4 layers"),
        ("wrn10_1_p4", {"restrict": "p2"}, "expected restrict as the groups of two stages"),
        ("wrn10_1", {"restrict": ("p2", "p1")}, "expected a group to restrict"),
    ],
)
def test_restrictions_that_do_not_fit_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **options)


@pytest.mark.parametrize(
    "name", ["convnet6_3d", "convnet6_3d_O", "convnet6_3d_I", "convnet6_3d_Oh"]
)
def test_stacks_for_volumes_have_as_many_parameters_whatever_the_group(name):
    count = sum(p.numel() for p in create_model(name).parameters())
    assert abs(count / 208_000 - 1) < 0.03


@pytest.mark.parametrize("options", [{}, {"activation": "silu", "antialias": 0.7, "margin": 1}])
def test_a_stack_for_volumes_keeps_its_scores_under_the_symmetries_of_the_grid(options):
    small = {"fields": (1, 1, 1), "pooled_after": (1,), "num_classes": 3}
    network = create_model("convnet6_3d_T", **small, **options).double().eval()
    x = torch.randn(1, 1, 8, 8, 8, dtype=torch.float64)
    scores = network(x)
    assert scores.shape == (1, 3)
    for element in range(1, 12):
        torch.testing.assert_close(network(transform(x, "T", element)), scores, rtol=0, atol=1e-12)
    assert create_model("convnet6_3d", **small)(x.float()).shape == (1, 3)
