"""A conversion made again: from its recipe and its source, in memory and from files."""

import json

import pytest
import torch
from torch import nn

import econv
from econv import convert, rebuild
from plain_networks import UNet


class Named(nn.Module):
    """With a classifier that can be reset, and methods that ``forward`` does not call."""

    def __init__(self, width=8, classes=3):
        super().__init__()
        self.num_classes, self.num_features = classes, width
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm, self.fc = nn.BatchNorm2d(width), nn.Linear(width, classes)

    def forward_features(self, x):
        return torch.relu(self.norm(self.stem(x)))

    def get_classifier(self):
        return self.fc

    def reset_classifier(self, num_classes):
        self.fc = nn.Linear(self.num_features, num_classes)

    def forward(self, x):
        return self.fc(self.forward_features(x).mean((2, 3)))

    def embed(self, x):
        return self.forward_features(x).amax((2, 3))

    def predict(self, x, sharpness=2.0):
        return (sharpness * self(x)).softmax(1)


x = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(4))
smooth = nn.functional.interpolate(torch.rand(20, 1, 4, 4), size=16, mode="bicubic")
METHODS = {"methods": ("embed", "predict")}
CASES = {
    "params": (Named, "p4", {}),
    "smooth": (Named, "p8", {"match": "width", "smooth": True, "pool": "mean+max"}),
    "its filters": (Named, "p4", {"pretrained": True, "options": {"accuracy": 4}}),
    "fitted to images": (Named, "p4", {"pretrained": True, "images": smooth}),
    "methods": (Named, "p4m", {"match": "fields", **METHODS}),
    "U-Net": (lambda: UNet((4, 4, 4), classes=2), "p4", {"match": "width"}),
}


def made(case):
    source, group, options = CASES[case]
    given = torch.randn(2, 3, 16, 16) if case == "U-Net" else x
    network = convert(source(), group, example_input=given, measure=False, **options)
    return network.eval(), source(), given


@pytest.mark.parametrize("case", CASES)
def test_its_recipe_is_json_and_makes_the_same_modules(case):
    network, source, given = made(case)
    again = rebuild(source, json.loads(json.dumps(network.recipe))).eval()
    assert again.recipe == network.recipe
    assert [n for n, _ in again.named_modules()] == [n for n, _ in network.named_modules()]
    again.load_state_dict(network.state_dict())
    assert torch.equal(again(given), network(given))
    assert again.output_kind == network.output_kind
    assert again.group == network.group


@pytest.mark.parametrize("case", CASES)
def test_a_folder_and_the_source_are_the_network(tmp_path, case):
    pytest.importorskip("safetensors")
    network, source, given = made(case)
    before = [p.clone() for p in source.parameters()]
    network.save_pretrained(tmp_path)
    again = econv.from_pretrained(tmp_path, model=source)
    assert not again.training
    assert torch.equal(again(given), network(given))
    assert all(torch.equal(*pair) for pair in zip(before, source.parameters(), strict=True))


def test_a_classifier_that_was_reset_is_part_of_it(tmp_path):
    pytest.importorskip("safetensors")
    network, source, _ = made("params")
    network.reset_classifier(5)
    network.save_pretrained(tmp_path)
    again = econv.from_pretrained(tmp_path, model=source)
    assert again(x).shape == (2, 5)
    assert again.num_classes == 5
    assert torch.equal(again(x), network(x))


def test_files_are_refused_without_their_source_or_with_another(tmp_path):
    pytest.importorskip("safetensors")
    network, source, _ = made("params")
    network.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"made of another network: expected it as .*model=…"):
        econv.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"fc\.weight is \[3, .*\], expected \[7, "):
        econv.from_pretrained(tmp_path, model=Named(classes=7))
    econv.create_model("convnet6_p4", fields=(1,) * 6).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a network made of Named; got a ConvNet"):
        econv.from_pretrained(tmp_path, model=source)


def test_files_may_not_ask_for_more_than_they_hold(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    network, source, _ = made("params")
    recipe = {**network.recipe, "scale": 3000.0}
    identity = {"model_type": "ConvertedNetwork", "arguments": recipe}
    config = {"library_name": "econv", "format": 2, **identity}
    (tmp_path / "config.json").write_text(json.dumps(config))
    metadata = {"econv": json.dumps(identity, sort_keys=True)}
    safetensors.save_file(network.state_dict(), tmp_path / "model.safetensors", metadata)
    with pytest.raises(ValueError, match="this one is larger"):
        econv.from_pretrained(tmp_path, model=source)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": ...}, "expected a recipe with .*scale.*; got one with"),
        ({"more": 1}, "expected a recipe with .*; got one with .*more"),
        ({"example": [{"shape": [1, 1, 16, 16], "dtype": "nn"}]}, "expected a dtype of torch"),
    ],
)
def test_other_recipes_are_refused(changed, message):
    network, source, _ = made("params")
    recipe = {k: v for k, v in {**network.recipe, **changed}.items() if v is not ...}
    with pytest.raises(ValueError, match=message):
        rebuild(source, recipe)


# Methods that forward does not call


def test_methods_compute_with_the_modules_of_the_network():
    network, source, _ = made("methods")
    assert network.embed(x).shape == source.embed(x).shape
    assert torch.allclose(network.predict(x), (2 * network(x)).softmax(1), atol=1e-6)
    turned = x.rot90(1, (2, 3))
    assert torch.allclose(network.embed(turned), network.embed(x), atol=1e-5)
    before = network.embed(x)
    with torch.no_grad():
        network.stem.weight.mul_(2)
    assert not torch.allclose(network.embed(x), before)


@pytest.mark.parametrize("names", [("no_such",), ("forward",), ("_call_impl",), "stem"])
def test_other_methods_are_refused(names):
    with pytest.raises(ValueError, match="expected methods of Named beside forward; got"):
        convert(Named(), "p4", example_input=x, methods=names)


def test_methods_that_forward_calls_are_there_already():
    with pytest.raises(ValueError, match="expected methods that forward does not call"):
        convert(Named(), "p4", example_input=x, methods=("forward_features",))


def test_a_method_that_tells_where_up_is_is_refused():
    class Upper(Named):
        def upper(self, x):
            return self.forward_features(x)[:, :, :4].mean((2, 3))

    with pytest.raises(econv.ConversionError):
        convert(Upper(), "p4", example_input=x, methods=("upper",))
