"""Every layer and every kind of model, small: what the tests of compatibility run through."""

import pytest
import torch
from torch import nn

from econv import GroupBatchNorm2d, GroupConv2d, LiftConv2d, convert
from econv.models import ConvNet, ResNet
from test_layers import CHANNELS, LAYERS, EveryLayer

__all__ = [
    *("CASES", "CHANNELS", "LAYERS", "MODES", "NETWORKS", "WITH_MODES"),
    *("case", "grid", "has_modes", "outputs", "run", "trained"),
]

MODES = pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])


def converted():
    """Strided and pooled as torchvision's networks are, made equivariant."""
    source = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.GroupNorm(2, 8),
        nn.PReLU(8),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return convert(source, "p4", match="width", example_input=torch.zeros(1, 3, 20, 21))


NETWORKS = {
    "resnet": (lambda: ResNet("p8", depth=8, fields=(1, 2, 2)), (2, 3, 20, 21)),
    "exact resnet": (
        lambda: ResNet("p4m", depth=8, fields=(1, 2, 2), exact=True, pool="mean"),
        (2, 3, 20, 21),
    ),
    "ordinary resnet": (lambda: ResNet(None, depth=8, fields=(2, 3, 4)), (2, 3, 20, 21)),
    "convnet6": (lambda: ConvNet("p8", fields=(2,) * 6), (2, 1, 28, 28)),
    "convnet7": (
        lambda: ConvNet(
            "p6", fields=(1, 2, 2), pooled_after=(2,), shrink=False, readout="mean", pool="max"
        ),
        (2, 1, 20, 21),
    ),
    "every layer": (EveryLayer, (2, 1, 16, 17)),
    "converted": (converted, (2, 3, 20, 21)),
    "sequential": (
        lambda: nn.Sequential(
            LiftConv2d(1, 2, "p4"), GroupBatchNorm2d(2, "p4"), nn.ReLU(), GroupConv2d(2, 1, "p4")
        ),
        (2, 1, 9, 9),
    ),
}


def trained(make):
    """A network whose parameters and statistics are none of those it started with."""
    network = make()
    with torch.no_grad():
        for tensor in network.parameters():
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
        for name, tensor in network.named_buffers():
            if name.endswith("running_mean"):
                tensor.normal_()
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0)
    return network


def outputs(network, x):
    with torch.no_grad():
        found = network(x)
    return found if isinstance(found, tuple) else (found,)


CASES = {**{name: (make, (2, CHANNELS, 12, 13)) for name, make in LAYERS.items()}, **NETWORKS}


def has_modes(module):
    """Whether code of a part of a module asks for ``training``: other modules have one mode."""
    classes = {kind for part in module.modules() for kind in type(part).__mro__}
    members = [one for kind in classes - {*nn.Module.__mro__} for one in vars(kind).values()]
    return any("training" in one.__code__.co_names for one in members if hasattr(one, "__code__"))


# Making all of them to find out takes longer than a collection may.
WITH_MODES = [*NETWORKS, "GroupBatchNorm2d", "GroupBatchNorm2d eval", "SyncGroupBatchNorm2d"]
WITH_MODES += ["GroupInstanceNorm2d", "GroupDropout2d"]


def grid(slow):
    """Every case in both modes, fast where it adds to the others; those that are slow by name."""
    return [
        pytest.param(
            name,
            train,
            id=f"{name}-{'train' if train else 'eval'}",
            marks=() if name not in slow and (train or name in WITH_MODES) else pytest.mark.slow,
        )
        for name in CASES
        for train in (True, False)
    ]


def case(name, train, dropout=True, dtype=torch.float32):
    """A layer or a network with statistics of its own, and a batch for it."""
    make, shape = CASES[name]
    module = trained(make).to(dtype).train(train)
    if not dropout:
        for part in module.modules():
            if "Dropout" in type(part).__name__:
                part.p = 0.0
    return module, torch.randn(shape, dtype=dtype)


def run(module, *inputs):
    """The outputs as a tuple, with the same random numbers in every call."""
    torch.manual_seed(1)
    found = module(*inputs)
    return found if isinstance(found, tuple) else (found,)
