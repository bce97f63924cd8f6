"""One state: weights are all there is, in train and eval mode, however they are changed."""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from econv import (
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupLayerNorm2d,
    GroupPool2d,
    LiftConv2d,
    Restrict2d,
    VectorConv2d,
    filter_basis,
)
from econv.basis import COORDINATES
from econv.layers import PDOConv2d
from econv.models import ResNet

PDO_LAYERS = {
    "lift": lambda: LiftConv2d(4, 2, "p4", bias=True),
    "lift vectors": lambda: LiftConv2d(4, 2, "p4", vectors=1),
    "group": lambda: GroupConv2d(1, 2, "p4", bias=True),
    "vector": lambda: VectorConv2d(1, 2, "p4"),
}
MODES = pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])


def network():
    return nn.Sequential(
        LiftConv2d(3, 2, "p4", vectors=1, bias=True),
        GroupBatchNorm2d(2, "p4"),
        nn.ReLU(),
        GroupConv2d(2, 3, "p4"),
        GroupLayerNorm2d(3, "p4"),
        Downsample2d(),
        Restrict2d("p4", "p2"),
        GroupConv2d(6, 2, "p2", bias=True),
        GroupPool2d("p2"),
    )


def images():
    return torch.randn(2, 3, 9, 9)


@pytest.mark.parametrize("name", PDO_LAYERS)
@MODES
def test_the_state_is_the_weight_and_the_bias(name, train):
    layer = PDO_LAYERS[name]().train(train)
    layer(torch.randn(1, 4, 8, 8)).sum().backward()
    wanted = {"weight", "bias"} if layer.bias is not None else {"weight"}
    assert set(layer.state_dict()) == wanted | {"coordinates"}
    assert {key for key, _ in layer.named_parameters()} == wanted


def test_the_state_is_the_same_in_train_and_eval_mode():
    model = network()
    train = copy.deepcopy(model.train().state_dict())
    evaluated = model.eval()
    evaluated(images())
    state = evaluated.state_dict()
    assert list(state) == list(train)
    assert all(torch.equal(state[key], train[key]) for key in train)


@MODES
def test_gradients_reach_every_parameter_and_do_not_depend_on_the_mode(train):
    model = nn.Sequential(LiftConv2d(3, 2, "p4"), GroupConv2d(2, 1, "p4", bias=True))
    x = images()
    model.train(train)(x).pow(2).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.train(not train)(x).pow(2).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))
    assert all(a.abs().max() > 0 for a in found)


def copies():
    def by_torch_save(model):
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        return torch.load(stream, weights_only=False)

    def by_state_dict(model):
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        stream.seek(0)
        torch.manual_seed(7)
        other = network().train(model.training)
        other.load_state_dict(torch.load(stream, weights_only=True))
        return other

    return {
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "torch.save": by_torch_save,
        "state_dict": by_state_dict,
    }


@pytest.mark.parametrize("how", copies())
@MODES
def test_a_copy_computes_the_same_and_shares_nothing(how, train):
    model, x = network().train(), images()
    model(x)  # running statistics that differ from those of a fresh network
    model.train(train)
    twin = copies()[how](model)
    assert twin.training == train
    kept = model[1].running_mean.clone()
    out = model(x)
    assert torch.equal(twin(x), out)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    model[1].running_mean.copy_(kept)
    assert torch.equal(model(x), out)
    assert not torch.equal(twin(x), out)


@pytest.mark.parametrize("how", copies())
def test_a_copy_of_a_layer_follows_changes_of_dtype(how):
    twin = copies()[how](network().eval()).double()
    model = network().double().eval()
    model.load_state_dict(twin.state_dict())
    x = images().double()
    assert torch.equal(twin(x), model(x))


def by_data(layer, value):
    layer.weight.data = value.clone()


def by_data_in_place(layer, value):
    layer.weight.data.copy_(value)


def by_vector(layer, value):
    others = parameters_to_vector(list(layer.parameters())[1:]) if layer.bias is not None else None
    parts = [value.flatten()] if others is None else [value.flatten(), others]
    vector_to_parameters(torch.cat(parts).detach(), layer.parameters())


def in_place(layer, value):
    with torch.no_grad():
        layer.weight.copy_(value)


def by_new_parameter(layer, value):
    layer.weight = nn.Parameter(value.clone())


def by_load(layer, value):
    layer.load_state_dict({**layer.state_dict(), "weight": value})


def by_load_assign(layer, value):
    layer.load_state_dict({**layer.state_dict(), "weight": value.clone()}, assign=True)


def by_storage(layer, value):
    layer.weight.detach().numpy()[...] = value.numpy()


ROUTES = [
    by_data,
    by_data_in_place,
    by_vector,
    in_place,
    by_new_parameter,
    by_load,
    by_load_assign,
    by_storage,
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
@pytest.mark.parametrize("name", PDO_LAYERS)
@MODES
def test_a_weight_changed_by_any_route_is_seen_by_the_next_call(route, name, train):
    layer, x = PDO_LAYERS[name]().train(train), torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        before = layer(x)
        layer(x)
    value = torch.randn_like(layer.weight.detach())
    route(layer, value)
    fresh = PDO_LAYERS[name]()
    fresh.load_state_dict({**layer.state_dict(), "weight": value})
    with torch.no_grad():
        assert torch.equal(layer(x), fresh(x))
        assert torch.equal(layer.filters(), fresh.filters())
        assert not torch.equal(layer(x), before)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ],
    ids=["fused Adam", "foreach Adam", "SGD"],
)
@MODES
def test_an_optimiser_step_is_seen_by_the_next_call(optimizer, train):
    layer, x = GroupConv2d(1, 2, "p4", bias=True).train(train), torch.randn(1, 4, 8, 8)
    stepper = optimizer(layer.parameters())
    for _ in range(2):
        before = layer(x)
        before.pow(2).sum().backward()
        stepper.step()
        after = layer(x)
        fresh = GroupConv2d(1, 2, "p4", bias=True)
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(after, fresh(x))
        assert not torch.equal(after, before)


@pytest.mark.parametrize("name", PDO_LAYERS)
@MODES
def test_no_buffer_depends_on_the_weights(name, train):
    one, other = PDO_LAYERS[name](), PDO_LAYERS[name]()
    assert not torch.equal(one.weight, other.weight)
    kept = {key: value.clone() for key, value in one.named_buffers()}
    for layer in (one, other):
        layer.train(train)
        layer(torch.randn(1, 4, 8, 8)).sum().backward()
        nn.init.normal_(layer.weight)
        layer(torch.randn(1, 4, 8, 8))
        found = dict(layer.named_buffers())
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[key], kept[key]) for key in kept)


@pytest.mark.parametrize("name", PDO_LAYERS)
def test_a_forward_pass_leaves_nothing_behind(name):
    layer = PDO_LAYERS[name]()

    def attributes():
        return {
            key: sorted(value) if key in ("_parameters", "_buffers") else id(value)
            for key, value in vars(layer).items()
        }

    before = attributes()
    for train in (True, False):
        layer.train(train)
        layer.train(True)
        layer(torch.randn(1, 4, 8, 8)).sum().backward()
        layer.filters()
        layer.coefficients()
    assert attributes() == before


def test_a_checkpoint_is_no_larger_than_the_weights():
    model = ResNet("p8")
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    statistics = sum(
        b.numel() * b.element_size()
        for module in model.modules()
        if isinstance(module, GroupBatchNorm2d)
        for b in module.buffers()
    )
    assert sum(p.numel() for p in model.parameters()) == 4_591_630
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    assert parameters < stream.tell() <= 1.05 * (parameters + statistics)
    state = model.state_dict()
    told = sum(8 for name in state if name.endswith(".coordinates"))
    stored = sum(value.numel() * value.element_size() for value in state.values())
    assert stored == parameters + statistics + told
    assert told == 8 * sum(isinstance(module, PDOConv2d) for module in model.modules())


# States of the first version, whose weights are pixels and do not say so


def of_version_1(state):
    """A copy as the first version would have written it."""
    found = OrderedDict((name, value.clone()) for name, value in state.items())
    del found["coordinates"]
    found._metadata = {"": {"version": 1}}
    return found


def test_parameters_alone_are_in_the_coordinates_of_the_layer():
    """Averaged weights, say, have no buffers beside them."""
    layer, other, x = LiftConv2d(4, 2, "p4"), LiftConv2d(4, 2, "p4"), torch.randn(1, 4, 8, 8)
    other.load_state_dict(dict(layer.named_parameters()), strict=False)
    assert torch.equal(other(x), layer(x))
    old = of_version_1(layer.state_dict())
    layer.load_state_dict(old)
    other.load_state_dict(old)
    other.load_state_dict({"weight": 2 * layer.weight.detach()}, strict=False)
    assert other.basis.coordinates == "pixels"
    torch.testing.assert_close(other(x), 2 * layer(x))


def first_version(layer):
    """What the first version would have computed, and the state that it would have saved."""
    basis = layer.basis
    pixels = filter_basis(basis.group, basis.operators, basis.stencils, coordinates="pixels")
    state = of_version_1(layer.state_dict())
    matrix = torch.from_numpy(pixels.synthesis.copy()).to(layer.weight)
    return state, torch.einsum("oks,gsyx->ogkyx", state["weight"].flatten(1, -2), matrix)


def own_filters(layer):
    """The filters of each frame, read as `first_version` gives them."""
    matrix = torch.from_numpy(layer.basis.synthesis.copy()).to(layer.weight)
    return torch.einsum("oks,gsyx->ogkyx", layer.weight.detach().flatten(1, -2), matrix)


@pytest.mark.parametrize("name", PDO_LAYERS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_of_the_first_version_computes_what_it_computed(name, assign):
    layer = PDO_LAYERS[name]()
    state, wanted = first_version(layer)
    assert not torch.allclose(own_filters(layer), wanted)
    before = dict(state)
    layer.load_state_dict(state, assign=assign)
    assert list(state) == list(before)
    assert torch.equal(own_filters(layer), wanted)
    assert torch.equal(layer.weight, before["weight"])  # to the last bit, not turned
    assert "coordinates='pixels'" in repr(layer)


def test_a_layer_takes_the_coordinates_of_every_state_that_it_loads():
    x = torch.randn(1, 4, 8, 8)
    new, layer = LiftConv2d(4, 2, "p4"), LiftConv2d(4, 2, "p4")
    state, _ = first_version(layer)
    layer.load_state_dict(state)
    old = layer(x)
    layer.load_state_dict(new.state_dict())
    assert torch.equal(layer(x), new(x))
    assert repr(layer) == repr(new)
    again = LiftConv2d(4, 2, "p4")
    again.load_state_dict(state)
    saved = again.state_dict()
    assert int(saved["coordinates"]) == COORDINATES.index("pixels")
    layer.load_state_dict(saved)
    assert torch.equal(layer(x), old)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.double().float()):
        assert torch.equal(twin(x), old)
    coefficients = layer.coefficients().detach()
    new.set_coefficients(coefficients)
    assert torch.allclose(new(x), old, atol=1e-5)


def test_a_layer_that_the_first_version_pickled_computes_what_it_computed():
    layer = GroupConv2d(1, 2, "p4", bias=True)
    _, wanted = first_version(layer)
    del layer._buffers["coordinates"]
    assert torch.equal(own_filters(pickle.loads(pickle.dumps(layer))), wanted)


def test_normalised_weights_of_the_first_version_are_pixels_too():
    layer = nn.utils.parametrizations.weight_norm(GroupConv2d(1, 2, "p4"))
    layer.load_state_dict(of_version_1(layer.state_dict()))
    assert layer.basis.coordinates == "pixels"


@pytest.mark.parametrize("told", [torch.tensor(7), torch.tensor([0, 1])])
def test_coordinates_that_no_version_has_are_refused(told):
    layer = LiftConv2d(1, 1, "p4")
    with pytest.raises(RuntimeError, match=r"expected coordinates as a number from 0 to 1; got"):
        layer.load_state_dict({**layer.state_dict(), "coordinates": told})


def test_coordinates_survive_materialising_on_a_device():
    layer = GroupConv2d(1, 2, "p4", device="meta").to_empty(device="cpu")
    assert int(layer.coordinates) == COORDINATES.index("orthonormal")


def test_the_weight_is_what_training_sees():
    """Functional calls with other weights, as meta-learning and ensembles make them."""
    layer, x = GroupConv2d(1, 2, "p4"), torch.randn(1, 4, 8, 8)
    weights = torch.randn(3, *layer.weight.shape)

    def call(weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    many = torch.func.vmap(call)(weights)
    for weight, out in zip(weights, many, strict=True):
        in_place(layer, weight)
        assert torch.allclose(layer(x), out, atol=1e-5)


@pytest.mark.parametrize("make", [Downsample2d, lambda: Restrict2d("p8", "p4")])
def test_fixed_arrays_survive_the_meta_device(make):
    with torch.device("meta"):
        empty = make()
    x = torch.randn(1, 16, 9, 9)
    assert torch.equal(empty.to_empty(device="cpu")(x), make()(x))


def test_fixed_arrays_are_exact_after_any_conversion():
    halve, x = Downsample2d(), torch.randn(1, 2, 8, 8, dtype=torch.float64)
    assert torch.equal(halve.half().double()(x), Downsample2d()(x))


def test_a_weight_assigned_in_inference_mode_can_be_trained_later():
    layer = GroupConv2d(1, 1, "p4")
    layer.weight = nn.Parameter(layer.weight.detach().double())
    x = torch.randn(1, 4, 8, 8, dtype=torch.float64)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("make", PDO_LAYERS.values(), ids=PDO_LAYERS.keys())
def test_layers_pickled_before_they_had_a_description_come_back(make):
    layer = make()
    state = layer.__getstate__()
    del state["_convolution"]
    state["extent"] = 3
    again = type(layer).__new__(type(layer))
    again.__setstate__(copy.deepcopy(state))
    assert again.convolution is layer.convolution
    assert again.extent == layer.extent
    x = torch.randn(1, layer.in_channels, 7, 7)
    torch.testing.assert_close(again(x), layer(x), rtol=0, atol=0)


def test_the_extent_follows_the_dilation():
    layer = GroupConv2d(1, 1, "p4", padding=0)
    assert layer.extent == layer.basis.size
    layer.dilation = 3
    assert layer.extent == 3 * (layer.basis.size - 1) + 1
    with pytest.raises(ValueError, match=f"at least {layer.extent}×{layer.extent} pixels"):
        layer(torch.randn(1, 4, layer.extent - 1, layer.extent - 1))
    assert layer(torch.randn(1, 4, layer.extent, layer.extent)).shape[2:] == (1, 1)


def test_a_pickled_layer_holds_no_expanded_array():
    layer = GroupConv2d(1, 1, "p8m")
    assert len(pickle.dumps(layer)) < 4 * layer.weight.numel() + 4000
    assert torch.equal(pickle.loads(pickle.dumps(layer)).filters(), layer.filters())
