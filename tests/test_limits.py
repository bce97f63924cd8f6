"""Limits are told before any work: what would take hours or gigabytes ends in a sentence."""

import gc
import time

import pytest
import torch
from torch import nn

import econv
from econv import testing


class Silent(nn.Module):
    def forward(self, x):
        return None


TOO_MUCH = {
    "rotations": lambda: econv.Group("p" + "9" * 30),
    "a turned volume": lambda: econv.Group("C" + "9" * 30),
    "a group of a layer": lambda: econv.GroupConv2d(1, 1, "p20000"),
    "a derivative": lambda: econv.central((1_000_000, 0)),
    "a power": lambda: econv.Polynomial.monomial((1, 0)) ** 10**7,
    "an order": lambda: econv.operator_set("order<=1000000000"),
    "a list of operators": lambda: econv.operator_set([(0, 0), (10**6, 0)]),
    "an accuracy": lambda: econv.Central(10**6),
    "a size": lambda: econv.LiftConv2d(1, 1, "p8", size=31),
    "a larger size": lambda: econv.LiftConv2d(1, 1, "p8", size=10**6 + 1),
    "fields": lambda: econv.GroupConv2d(20_000, 20_000, "p8"),
    "more fields": lambda: econv.GroupBatchNorm2d(10**12, "p8"),
    "a stride": lambda: econv.GroupConv2d(1, 1, "p8", stride=2**63 - 1),
    "a dilation": lambda: econv.GroupConv2d(1, 1, "p8", dilation=2**62),
    "a padding": lambda: econv.GroupConv2d(1, 1, "p8", padding=10**9),
    "windows": lambda: econv.GroupConv2d(1, 1, "p8", centred=(3, 10**9)),
    "a spacing": lambda: econv.GroupConv2d(1, 1, "p8", spacing=(1e-300, 1e300)),
    "a depth": lambda: econv.models.ResNet("p8", depth=6_000_002, fields=(1, 1, 1)),
    "a name of several": lambda: econv.create_model({}),
    "features or not": lambda: econv.create_model("resnet8_p4", features_only="no"),
    "a margin": lambda: econv.create_model("convnet6_p4", margin=2**31),
    "a large image": lambda: econv.create_model("convnet6_p4", image_size=10**5),
    "a pattern": lambda: econv.models.list_models(float("inf")),
    "weights of nobody": lambda: econv.create_model("convnet6_p4", weights="no such"),
    "no layers": lambda: econv.create_model("convnet6_p8", fields=()),
    "points": lambda: econv.Recentre2d()(torch.zeros(1, 1, 5, 5), 10**6, 10**6),
    "no points": lambda: econv.NearestResize2d()(torch.zeros(1, 1, 5, 5), 0, 4),
    "a factor": lambda: econv.Enlarge2d(10**6),
    "a tensor of dimensions": lambda: econv.operator_set(dimension=torch.zeros(2, 3)),
    "turns in so many": lambda: testing.random_rotations(1, dimension=torch.zeros(2)),
    "an accuracy of several": lambda: econv.filter_basis("p4", accuracy=torch.zeros(2)),
    "options of several": lambda: econv.models.EncoderUNet(encoder_options=torch.zeros(2, 3)),
    "volumes of several": lambda: econv.models.UNet("p4", dimension=torch.zeros(2)),
    "no module": lambda: testing.assert_equivariant(-0.5, torch.zeros(1, 1, 9, 9), "p4"),
    "no error of it": lambda: testing.equivariance_error(-0.5, torch.zeros(1, 1, 9, 9), 1, "p4"),
    "kinds of several": lambda: testing.assert_equivariant(
        nn.Identity(), torch.zeros(1, 4, 9, 9), "p4", input_kind=torch.zeros(2)
    ),
    "elements of none": lambda: testing.assert_equivariant(
        nn.Identity(), torch.zeros(1, 4, 9, 9), "p4", elements=torch.tensor(2)
    ),
    "a dtype": lambda: testing.smooth_field(5, dtype=10**30),
    "a number of a parameter": lambda: econv.FieldParameter(
        2, "p4", initial=1e300, dtype=torch.bfloat16
    ),
    "a slope": lambda: econv.GroupPReLU2d(2, "p4", init=1e300),
    "a seed": lambda: testing.smooth_field(5, seed=10**30),
    "no tensor": lambda: testing.assert_equivariant(nn.Identity(), False, "p4"),
    "nothing": lambda: testing.equivariance_error(Silent(), torch.zeros(1, 1, 9, 9), 1, "p4"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_it_is_refused_at_once(name):
    begun = time.process_time()
    with pytest.raises(ValueError, match="expected"):
        TOO_MUCH[name]()
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "no"},
        {"bias": None},
        {"dtype": "float32"},
        {"dtype": torch.int32},
        {"dtype": torch.float8_e4m3fn},
    ],
)
def test_options_of_convolutions_are_what_they_say(options):
    with pytest.raises(ValueError, match="expected"):
        econv.GroupConv2d(1, 1, "p4", **options)


@pytest.mark.parametrize("norm", [econv.GroupBatchNorm2d, econv.GroupLayerNorm2d])
@pytest.mark.parametrize(
    "options", [{"eps": -1}, {"eps": float("nan")}, {"eps": "x"}, {"affine": "no"}, {"dtype": "x"}]
)
def test_options_of_norms_are_what_they_say(norm, options):
    with pytest.raises(ValueError, match="expected"):
        norm(2, "p4", **options)


LAYERS = [
    econv.Downsample2d(),
    econv.Downsample2d("max"),
    econv.Upsample2d(),
    econv.Upsample2d(6),
    econv.Enlarge2d(2),
    econv.CentredMaxPool2d(2),
    econv.CentredAvgPool2d(2),
    econv.GroupActivation2d("silu"),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_images_without_pixels_or_channels(layer):
    for shape in ((1, 3, 0, 5), (1, 3, 5, 0), (1, 0, 5, 5)):
        with pytest.raises(ValueError, match="expected images with channels and pixels"):
            layer(torch.zeros(shape))
    assert len(layer(torch.zeros(0, 3, 5, 5))) == 0


@pytest.mark.parametrize(
    "norm",
    [
        econv.GroupBatchNorm2d(2, "p4"),
        econv.GroupInstanceNorm2d(2, "p4"),
        econv.GroupInstanceNorm2d(2, "p4", affine=True, track_running_stats=True),
        econv.GroupGroupNorm2d(1, 2, "p4"),
        econv.GroupLayerNorm2d(2, "p4"),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_of_an_empty_batch(norm):
    y = norm(torch.zeros(0, 8, 5, 5))
    assert y.shape == (0, 8, 5, 5)
    if y.requires_grad:
        y.sum().backward()
    assert not any(p.grad is None or p.grad.any() for p in norm.parameters())
    assert all(buffer.isfinite().all() for buffer in norm.buffers())


# torch says of nested tensors that they are a prototype.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_not_dense():
    layer, x = econv.GroupConv2d(2, 2, "p4"), torch.zeros(1, 8, 5, 5)
    for other in (x.to_sparse(), torch.nested.nested_tensor([x[0], x[0]])):
        with pytest.raises(ValueError, match="expected a dense tensor"):
            layer(other)


def test_an_export_of_an_empty_batch():
    model = nn.Sequential(econv.LiftConv2d(1, 2, "p4"), nn.ReLU()).eval()
    plain = econv.export(model, torch.zeros(0, 1, 9, 9))
    x = torch.randn(2, 1, 9, 9)
    torch.testing.assert_close(plain(x), model(x))


def test_caches_forget_what_no_layer_holds():
    from econv.engines import problem

    gc.collect()
    before = len(problem._NAMED)
    for number in range(3, 90):
        layer = econv.LiftConv2d(1, 1, f"p{number}", operators="order<=0")
    gc.collect()
    assert len(problem._NAMED) - before <= 64
    assert problem.convolution_named(layer.convolution.name) is layer.convolution
