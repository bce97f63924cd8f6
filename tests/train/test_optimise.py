"""The optimisers are torch's, and decay falls where it should."""

import dataclasses

import pytest
import torch
from torch import nn

from econv.data import Dataset, Split
from econv.layers import PDOConv2d
from econv.recipes import RECIPES
from econv.train.optimise import Optimizer, Vector
from tiny_training import (
    TINY,
    stripes,
    trainer,
)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_the_optimisers_are_torchs(name: str) -> None:
    weight = torch.randn(40, dtype=torch.float64)
    decay = torch.full_like(weight, 0.03)
    ours = weight.clone()
    theirs = nn.Parameter(weight.clone())
    options = {"lr": 0.1, "weight_decay": 0.03}
    reference: torch.optim.Optimizer = {
        "adam": lambda: torch.optim.Adam([theirs], **options),
        "adamw": lambda: torch.optim.AdamW([theirs], **options),
        "sgd": lambda: torch.optim.SGD([theirs], momentum=0.9, nesterov=True, **options),
    }[name]()
    optimizer = Optimizer(name, ours, decay)
    for step in range(10):
        rate = 0.1 / (step + 1)
        gradient = torch.randn_like(weight)
        reference.param_groups[0]["lr"] = rate
        theirs.grad = gradient.clone()
        reference.step()
        numbers = (rate, *optimizer.corrections(step))
        optimizer.update(ours, gradient, *(torch.tensor(n, dtype=torch.float64) for n in numbers))
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["digits_p8", "digits_cnn", "cifar10_resnet26_p6", "tiny"])
def test_decay_falls_on_convolutions_and_the_classifier_alone(name: str) -> None:
    recipe = dataclasses.replace(RECIPES.get(name, TINY), weight_decay=0.5, epochs=1)
    data = stripes()
    if name != "tiny":
        shape = (3, 32, 32) if name.startswith("cifar") else (1, 28, 28)
        x = torch.randint(0, 256, (16, *shape), dtype=torch.uint8)
        data = Dataset.of("noise", *[Split(x, torch.zeros(16, dtype=torch.int64))] * 3, 10)
    network = trainer(recipe, data)
    wanted = {
        f"{prefix}.weight"
        for prefix, module in network.model.named_modules()
        if isinstance(module, PDOConv2d | nn.Conv2d | nn.Linear)
    }
    vector = Vector(list(network.model.parameters()))
    vector.flat.copy_(network.optimizer.decay)
    names = [n for n, _ in network.model.named_parameters()]
    decayed = {n for n, part in zip(names, vector.parts, strict=True) if (part == 0.5).all()}
    free = {n for n, part in zip(names, vector.parts, strict=True) if (part == 0).all()}
    assert decayed == wanted
    assert decayed | free == set(names)
    assert free
