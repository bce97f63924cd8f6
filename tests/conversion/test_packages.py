"""Conversion of the networks of torchvision and timm, where these are installed."""

import importlib

import pytest
import torch

from econv import convert
from econv.lab import calibrate
from econv.testing import equivariance_error

TORCHVISION = (
    *("resnet18", "resnet50", "vgg11_bn", "mobilenet_v3_small", "efficientnet_b0"),
    *("convnext_tiny", "densenet121"),
)
TIMM = (
    *("resnet18", "resnet50d", "resnext50_32x4d", "regnetx_002", "regnety_002"),
    *("convnext_atto", "tf_efficientnet_b0", "resnetblur18", "ecaresnet26t", "skresnet18"),
    *("resnest14d", "hrnet_w18_small", "xception41", "ghostnet_100", "res2net50_26w_4s"),
)
CASES = [
    *(("torchvision.models", name) for name in TORCHVISION),
    *(("timm", name) for name in TIMM),
]


def network(package, name):
    try:
        found = importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # torchvision's operators want their own torch
        pytest.skip(f"{package} is not installed, or not for this torch: {error}")
    return found.create_model(name) if package == "timm" else getattr(found, name)()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("group", ["p4", "p8"])
@pytest.mark.parametrize(("package", "name"), CASES)
def test_a_network_of_the_package_becomes_exact(package, name, group):
    source = network(package, name).double()
    x = torch.randn(2, 3, 224, 224, dtype=torch.float64)
    converted = convert(source, group, "width", example_input=x, measure=False)
    calibrate(converted, x)
    calibrate(source, x)
    turn = converted.group.rotations // 4
    assert equivariance_error(converted, x, turn) <= 1e-9
    assert equivariance_error(source, x, 1, "p4", output_kind="invariant") > 1e-3
    assert converted(x).shape == source(x).shape
