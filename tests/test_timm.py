"""timm: every model by its name there, with what timm's scripts ask of a model."""

import pytest
import torch

import econv
from econv.models import MODELS, ImageNetResNet

try:
    import timm

    import econv.timm as registered
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision for another torch
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

SMALL = {
    "resnet": {"fields": (1, 1, 1), "depth": 8},
    "imagenet": {"fields": (1, 1, 1, 1)},
    "convnet": {"fields": (1, 1, 2)},
}


def small(name):
    imagenet = MODELS[name][0] is ImageNetResNet
    key = "convnet" if "convnet" in name else "imagenet" if imagenet else "resnet"
    options = dict(SMALL[key])
    if MODELS[name][1]["group"] is None and key == "resnet":
        options["stem"] = 1
    return options


def images(model, batch=2):
    return torch.randn(batch, *model.default_cfg["input_size"])


def test_every_model_is_registered():
    assert set(timm.list_models("econv_*")) == {f"econv_{name}" for name in MODELS}
    assert set(registered.__all__) == {f"econv_{name}" for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_timm_makes_the_same_network(name):
    torch.manual_seed(0)
    model = timm.create_model(f"econv_{name}", num_classes=7, **small(name))
    torch.manual_seed(0)
    wanted = econv.create_model(name, num_classes=7, **small(name))
    x = images(model)
    assert model.num_classes == model.default_cfg["num_classes"] == 7
    assert torch.equal(model.eval()(x), wanted.eval()(x))


def test_timms_words_for_arguments_are_understood():
    model = timm.create_model(
        "econv_convnet6_p8", fields=(1, 1, 2), in_chans=2, img_size=20, drop_rate=0.3
    )
    found = {name: model.config[name] for name in ("in_channels", "image_size", "dropout")}
    assert found == {"in_channels": 2, "image_size": 20, "dropout": 0.3}
    headless = timm.create_model(
        "econv_paper_resnet26_p8", num_classes=0, **small("paper_resnet26_p8")
    )
    assert headless.eval()(images(headless)).shape == (2, headless.num_features)


def test_timms_own_optimiser_groups_leave_norms_alone():
    from timm.optim import param_groups_weight_decay

    model = timm.create_model("econv_paper_resnet26_p8", **small("paper_resnet26_p8"))
    theirs = param_groups_weight_decay(model, 0.1, model.no_weight_decay())
    ours = econv.parameter_groups(model, 0.1)
    by_decay = {g["weight_decay"]: {id(p) for p in g["params"]} for g in theirs}
    assert by_decay == {g["weight_decay"]: {id(p) for p in g["params"]} for g in ours}


def test_timm_resolves_the_data():
    model = timm.create_model("econv_convnet6_p8", **small("convnet6_p8"))
    assert timm.data.resolve_data_config(model=model)["input_size"] == (1, 28, 28)


def test_weights_that_do_not_exist_are_not_promised():
    with pytest.raises(ValueError, match=r"no weights of econv_paper_resnet26_p8.*from_pretrained"):
        timm.create_model("econv_paper_resnet26_p8", pretrained=True)


def test_features_dropout_and_groups_are_as_timm_has_them():
    from timm.models import group_parameters
    from timm.optim import create_optimizer_v2

    small_one = {"fields": (1, 1, 2, 2)}
    backbone = timm.create_model(
        "econv_resnet18_p4", features_only=True, out_indices=(1, 4), **small_one
    )
    maps = backbone.eval()(torch.randn(1, 3, 160, 160))
    assert [m.shape[1] for m in maps] == backbone.feature_info.channels() == [1, 2]
    assert backbone.feature_info.reduction() == [4, 32]
    model = timm.create_model("econv_resnet18_p4", drop_rate=0.2, **small_one)
    assert model.head_drop.p == 0.2
    groups = group_parameters(model, model.group_matcher())
    assert len(groups) == 1 + 8 + 1  # the stem, the blocks, the head
    assert sum(map(len, groups.values())) == len(list(model.parameters()))
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, layer_decay=0.5)
    scales = {group["lr_scale"] for group in optimizer.param_groups}
    assert max(scales) == 1.0
    assert len(scales) == 10
