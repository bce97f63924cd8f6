"""torch.func, activation checkpointing and parametrisations, for every layer and network."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import econv
from catalogue import CASES, LAYERS, MODES, NETWORKS, case, run
from econv import layers

DOUBLE = torch.float64


def total(outputs):
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(out.sin().sum() for out in found)


def state(module):
    """Parameters, and buffers that a call may not change for others."""
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    return {n: p.detach() for n, p in module.named_parameters()}, buffers


def gradients(module, x):
    """What autograd says, of the parameters and of the input."""
    module = copy.deepcopy(module)
    x = x.clone().requires_grad_()
    total(run(module, x)).backward()
    return {name: p.grad for name, p in module.named_parameters()}, x.grad


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@MODES
@pytest.mark.parametrize("name", CASES)
def test_functional_gradients_are_those_of_autograd(name, train):
    module, x = case(name, train, dropout=False, dtype=DOUBLE)
    wanted = gradients(module, x)
    parameters, buffers = state(module)

    def loss(parameters, x, buffers):  # an argument, because batch norms change them
        return total(functional_call(module, (parameters, buffers), (x,)))

    close(grad(loss, argnums=(0, 1))(parameters, x, buffers), wanted)


@MODES
@pytest.mark.parametrize("name", CASES)
def test_an_ensemble_runs_as_one(name, train):
    modules = []
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        module, x = case(name, train, dropout=False, dtype=DOUBLE)
        modules.append(module)
    inputs = torch.randn(3, *x.shape, dtype=DOUBLE)
    wanted = [run(copy.deepcopy(module), x) for module, x in zip(modules, inputs, strict=True)]
    if isinstance(modules[0], fx.GraphModule):  # torch gives every graph a class of its own
        parameters, buffers = (
            {name: torch.stack([dict(kind(m))[name] for m in modules]) for name, _ in kind(module)}
            for kind in (nn.Module.named_parameters, nn.Module.named_buffers)
        )
    else:
        parameters, buffers = stack_module_state(modules)

    def call(parameters, buffers, x):
        found = functional_call(modules[0], (parameters, buffers), (x,))
        return found if isinstance(found, tuple) else (found,)

    found = vmap(call)(parameters, buffers, inputs)
    for number, outputs in enumerate(wanted):
        close([out[number] for out in found], list(outputs))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_each_sample(name):
    # In eval mode: batch norms in train mode mix the samples.
    module, x = case(name, train=False, dtype=DOUBLE)
    parameters, buffers = state(module)

    def loss(parameters, sample):
        return total(functional_call(module, (parameters, buffers), (sample[None],)))

    found = vmap(grad(loss), (None, 0))(parameters, x)
    for number, sample in enumerate(x):
        wanted, _ = gradients(module, sample[None])
        close({key: value[number] for key, value in found.items()}, wanted)


@MODES
@pytest.mark.parametrize("name", CASES)
def test_checkpointed_activations_give_the_same_gradients(name, train):
    module, x = case(name, train, dtype=DOUBLE)  # dropout too: random numbers are kept
    wanted = gradients(module, x)
    x = x.requires_grad_()
    torch.manual_seed(1)
    total(checkpoint(module, x, use_reentrant=False)).backward()
    close(({n: p.grad for n, p in module.named_parameters()}, x.grad), wanted)


def derivatives(name, function, x):
    """One of torch's ways to derivatives, of a function of images."""
    square = lambda x: function(x).pow(2).sum()  # noqa: E731
    of_first, of_second = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    seed = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    if name == "hessian":
        return torch.func.hessian(square)(x)
    if name == "jacfwd(grad)":
        return torch.func.jacfwd(grad(square))(x)
    if name == "jvp(grad)":
        return torch.func.jvp(grad(square), (x,), (torch.ones_like(x),))[1]
    if name == "functionalize":
        return torch.func.functionalize(function)(x)
    if name == "functionalize(grad)":
        return torch.func.functionalize(grad(square))(x)
    if name == "is_grads_batched":
        x = x.requires_grad_()
        y = function(x)
        return torch.autograd.grad(y, x, seed[:3, :, : y.shape[1]], is_grads_batched=True)[0]
    if name == "jacobian":
        return of_first(function, x, vectorize=True)
    if name == "jacobian, forward":
        return of_first(function, x, vectorize=True, strategy="forward-mode")
    if name == "second order":
        return of_second(square, x, vectorize=True)
    assert name == "second order, forward"
    return of_second(square, x, vectorize=True, outer_jacobian_strategy="forward-mode")


WAYS = ["hessian", "jacfwd(grad)", "jvp(grad)", "functionalize", "functionalize(grad)"]
WAYS += ["is_grads_batched", "jacobian", "jacobian, forward", "second order"]
WAYS += ["second order, forward"]


# torch warns of its own script where it takes the derivative of a derivative.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ["auto", "spectral"])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_derivatives_of_a_convolution(name, engine):
    module = econv.GroupConv2d(1, 1, "p4", dtype=DOUBLE)
    x = torch.randn(1, 4, 5, 5, dtype=DOUBLE)
    found = []
    for one in (engine, "dense"):
        with econv.engine(one):
            found.append(derivatives(name, module, x.clone()))
    close([found[0].detach()], [found[1].detach()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_derivatives_of_a_smooth_activation(name):
    smooth, x = econv.GroupActivation2d("silu", 1).double(), torch.randn(1, 1, 4, 5, dtype=DOUBLE)
    found = derivatives(name, smooth, x.clone())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECONV_NATIVE", "0")
        wanted = derivatives(name, smooth, x.clone())
    close([found.detach()], [wanted.detach()])


class Scaled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 4


@MODES
@pytest.mark.parametrize("name", CASES)
def test_parametrised_weights_are_what_layers_use(name, train):
    module, x = case(name, train, dropout=False, dtype=DOUBLE)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for part in twin.modules():
            if isinstance(getattr(part, "weight", None), nn.Parameter):
                part.weight.div_(2)
    for part in list(module.modules()):
        if isinstance(getattr(part, "weight", None), nn.Parameter):
            parametrize.register_parametrization(part, "weight", Scaled())
    close(run(module, x), run(twin, x))
    if list(module.parameters()):
        total(run(module, x)).backward()
    assert all(p.grad is not None for p in module.parameters())
    for part in list(module.modules()):
        if parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")
    close(run(module, x), run(twin, x))


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("name", [name for name in LAYERS if "Conv2d" in name])
def test_torchs_own_parametrisations_fit(name, make):
    module, x = case(name, train=True, dtype=DOUBLE)
    layer = next(part for part in module.modules() if hasattr(part, "weight"))
    before = layer.weight.detach().clone()
    make(layer)
    total(run(module, x)).backward()
    if make is parametrizations.weight_norm:
        close(layer.weight.detach(), before)
    else:
        assert float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), ord=2)) < 1.3
    assert copy.deepcopy(module)(x).shape == module(x).shape


def test_the_catalogue_has_every_layer():
    exported = [getattr(layers, name) for name in layers.__all__]
    modules = {
        kind
        for kind in exported
        if isinstance(kind, type) and issubclass(kind, nn.Module)
        # Volumes have tests of their own, and what has no dimension is a base of both.
        if not kind.__name__.endswith("3d") and not hasattr(layers, f"{kind.__name__}2d")
    }
    used = {type(part) for make in LAYERS.values() for part in make().modules()}
    used |= {type(part) for part in NETWORKS["every layer"][0]().modules()}
    # What the convolutions have in common, and the norm of channels, which is not one of fields.
    assert modules - used == {layers.PDOConv2d, layers.SyncBatchNorm}
