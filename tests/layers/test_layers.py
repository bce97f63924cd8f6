"""Layers: what each computes, by hand; dtypes, memory formats, devices; dynamic sizes in export."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from econv import (
    Central,
    CentredAvgPool2d,
    CentredMaxPool2d,
    Curl2d,
    Downsample2d,
    FieldConv2d,
    FieldParameter,
    Group,
    GroupActivation2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupGroupNorm2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupLinear,
    GroupPool2d,
    GroupPReLU2d,
    GroupUpsampleConv2d,
    LiftConv2d,
    Restrict2d,
    Spread2d,
    Upsample2d,
    VectorConv2d,
    convert_sync_batchnorm,
    reference,
    restrict,
)
from econv.layers import (
    Enlarge2d,
    GroupAttentionPool2d,
    GroupFrameScore2d,
    GroupWindowConv2d,
    GroupWindows2d,
    NearestResize2d,
    Recentre2d,
    recentre,
)
from econv.layers.sampling import picked
from econv.stencils import Gaussian
from econv.testing import assert_equivariant, equivariance_error, transform


class FramedPool(nn.Module):
    """Orientations weighed by what coarse maps in their frames say."""

    def __init__(self, fields, group):
        super().__init__()
        self.score, self.pool = (
            GroupFrameScore2d(fields, group),
            GroupAttentionPool2d(fields, group),
        )
        nn.init.normal_(self.score.weight)

    def forward(self, x):
        return self.pool(x, self.score(x))


CHANNELS = 8  # two fields of p4, for every layer of the table
LAYERS = {
    "LiftConv2d": lambda: LiftConv2d(8, 2, "p4", bias=True),
    "LiftConv2d vectors": lambda: LiftConv2d(8, 2, "p4", vectors=3),
    "LiftConv2d pseudoscalars": lambda: LiftConv2d(8, 2, "p4", pseudoscalars=3, vectors=2),
    "FieldConv2d": lambda: FieldConv2d(
        2, "p4", scalars=2, pseudoscalars=1, vectors=1, bias=True, padding_mode="circular"
    ),
    "FieldConv2d in a channel": lambda: FieldConv2d(
        2, "p4", pseudoscalars=1, vectors=1, padding_mode=("zeros", "circular")
    ),
    "Curl2d": lambda: Curl2d(spacing=(0.5, 1.0), padding_mode=("replicate", "circular")),
    "GroupConv2d": lambda: GroupConv2d(2, 3, "p4", bias=True),
    "GroupConv2d stride": lambda: GroupConv2d(2, 3, "p4", stride=2),
    "GroupConv2d centred": lambda: GroupConv2d(2, 3, "p4", stride=2, centred=True),
    "GroupConv2d centred 2×2": lambda: GroupConv2d(
        2, 3, "p4", operators="order<=2", stride=2, padding=1, centred=(2, 0)
    ),
    "GroupConv2d groups": lambda: GroupConv2d(2, 4, "p4", groups=2),
    "GroupConv2d reflect": lambda: GroupConv2d(2, 3, "p4", padding_mode="reflect"),
    "GroupConv2d replicate": lambda: GroupConv2d(2, 3, "p4", padding_mode="replicate"),
    "GroupConv2d circular": lambda: GroupConv2d(2, 3, "p4", padding_mode="circular"),
    "GroupConv2d channel": lambda: GroupConv2d(2, 3, "p4", padding_mode=("zeros", "circular")),
    "GroupConv2d mirror": lambda: GroupConv2d(
        2, 3, "p4", padding_mode=("reflect", "replicate"), stride=2, centred=True
    ),
    "GroupConv2d 1×1": lambda: GroupConv2d(2, 3, "p4", operators="order<=0"),
    "GroupWindowConv2d": lambda: nn.Sequential(
        nn.AdaptiveAvgPool2d(3),
        GroupWindowConv2d(2, 3, "p4", operators="order<=2", bias=True),
    ),
    "VectorConv2d": lambda: VectorConv2d(2, 3, "p4"),
    "GroupUpsampleConv2d": lambda: GroupUpsampleConv2d(2, 3, "p4"),
    "GroupUpsampleConv2d by 3": lambda: GroupUpsampleConv2d(2, 3, "p4", factor=3, excess=-1),
    "GroupBatchNorm2d": lambda: GroupBatchNorm2d(2, "p4"),
    "GroupBatchNorm2d eval": lambda: GroupBatchNorm2d(2, "p4").eval(),
    "SyncGroupBatchNorm2d": lambda: convert_sync_batchnorm(GroupBatchNorm2d(2, "p4")),
    "GroupInstanceNorm2d": lambda: GroupInstanceNorm2d(2, "p4", affine=True),
    "GroupGroupNorm2d": lambda: GroupGroupNorm2d(2, 2, "p4"),
    "GroupLayerNorm2d": lambda: GroupLayerNorm2d(2, "p4"),
    "GroupPool2d max": lambda: GroupPool2d("p4"),
    "GroupPool2d mean": lambda: GroupPool2d("p4", "mean"),
    "GroupPool2d std": lambda: GroupPool2d("p4", "std"),
    "GroupPool2d several": lambda: GroupPool2d("p4", "mean+std+top2"),
    "GroupAttentionPool2d": lambda: GroupAttentionPool2d(2, "p4"),
    "GroupFrameScore2d": lambda: FramedPool(2, "p4"),
    "GroupWindows2d": lambda: GroupWindows2d("p4", 3, 2, (1, 1)),
    "GroupWindows2d p8": lambda: GroupWindows2d("p8", 2, 2, "same", fill=0.5, ceil_mode=True),
    "GroupWindows2d lifts": lambda: GroupWindows2d("p4m", 3, 3, (0, 1), (1, 0), lifts=True),
    "GroupDropout2d": lambda: GroupDropout2d("p4"),
    "GroupPReLU2d": lambda: GroupPReLU2d(2, "p4"),
    "Spread2d": lambda: Spread2d("p4"),
    "CentredMaxPool2d": lambda: CentredMaxPool2d(3, 2, 1),
    "CentredMaxPool2d ceil": lambda: CentredMaxPool2d(3, 2, ceil_mode=True),
    "CentredAvgPool2d": lambda: CentredAvgPool2d(2),
    "CentredAvgPool2d ceil": lambda: CentredAvgPool2d(3, 3, 1, True, count_include_pad=False),
    "Downsample2d": lambda: Downsample2d(),
    "Downsample2d max": lambda: Downsample2d("max"),
    "Downsample2d 8": lambda: Downsample2d(antialias=8),
    "Upsample2d": lambda: Upsample2d(),
    "Upsample2d 6": lambda: Upsample2d(antialias=6),
    "GroupActivation2d": lambda: GroupActivation2d(),
    "GroupActivation2d 2": lambda: GroupActivation2d("gelu", 2),
    "Enlarge2d": lambda: Enlarge2d(3, excess=-1),
    "Restrict2d": lambda: Restrict2d("p4", "p2"),
}
PDO_LAYERS = ["LiftConv2d", "LiftConv2d vectors", "GroupConv2d", "VectorConv2d"]
EPSILON = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-5, torch.float64: 1e-13}


def distance(a, b):
    """The largest difference between two tensors of one shape."""
    assert a.shape == b.shape
    return float((a.double() - b.double()).detach().abs().max())


def largest(x):
    """The scale of a tensor, at least 1, that rounding errors are measured against."""
    return max(1.0, float(x.detach().abs().max()))


def run(layer, x):
    """The layer with the same random numbers in every call."""
    torch.manual_seed(1)
    return layer(x)


# Dtypes, memory formats, devices


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", EPSILON)
def test_layers_keep_the_dtype_and_its_accuracy(name, dtype):
    layer = LAYERS[name]()
    x = torch.randn(2, CHANNELS, 9, 10).to(dtype)
    exact = run(copy.deepcopy(layer).to(dtype).double(), x.double())
    out = run(layer.to(dtype), x)
    assert out.dtype == dtype
    assert distance(out, exact) <= EPSILON[dtype] * largest(exact)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_channels_last_in_is_channels_last_out_with_the_same_values(name, dtype):
    layer = LAYERS[name]().to(dtype)
    x = torch.randn(2, CHANNELS, 9, 10, dtype=dtype)
    plain = run(copy.deepcopy(layer), x)
    last = run(layer, x.to(memory_format=torch.channels_last))
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert distance(plain, last) <= EPSILON[dtype] * largest(plain)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_do_not_depend_on_the_memory_format(name):
    layer = LAYERS[name]().double()
    gradients = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(2)
        x = torch.randn(2, CHANNELS, 9, 10, dtype=torch.float64).to(memory_format=memory_format)
        x.requires_grad_()
        run(copy.deepcopy(layer), x).pow(2).sum().backward()
        gradients.append(x.grad)
    assert distance(*gradients) <= 1e-12 * largest(gradients[0])


@pytest.mark.parametrize("name", LAYERS)
def test_images_with_channels_last_need_no_gradient(name):
    """Group norm of torch 2.13 ended the process there."""
    layer = LAYERS[name]()
    x = torch.randn(2, CHANNELS, 9, 10)
    gradients = []
    for image in (x, x.to(memory_format=torch.channels_last)):
        torch.manual_seed(2)
        layer.zero_grad()
        y = run(layer, image)
        if y.requires_grad:
            y.pow(2).sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert distance(one, other) <= 1e-4 * max(1.0, largest(one))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_read_tensors_that_are_not_contiguous(name):
    layer = LAYERS[name]()
    wide = torch.randn(2, CHANNELS + 3, 9, 20)
    view = wide[:, 1:-2, :, ::2]
    assert distance(run(copy.deepcopy(layer), view), run(layer, view.contiguous())) <= 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_runs_forward_and_backward(name):
    layer = LAYERS[name]()
    x = torch.randn(2, CHANNELS, 9, 10, requires_grad=True)
    exact = run(copy.deepcopy(layer), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(layer, x)
    assert out.dtype in (torch.bfloat16, torch.float32)
    assert distance(out, exact) <= EPSILON[torch.bfloat16] * largest(exact)
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_autocast_leaves_filters_in_the_dtype_of_the_layer():
    layer = GroupConv2d(1, 1, "p8")
    exact = layer.filters()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer.filters()
        assert layer(torch.randn(1, 8, 9, 9)).dtype == torch.bfloat16
    assert inside.dtype == torch.float32
    assert torch.equal(exact, inside)


@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_batch_gives_an_empty_batch(name):
    layer = LAYERS[name]().eval()
    shape = layer(torch.randn(2, CHANNELS, 9, 10)).shape[1:]
    assert layer(torch.randn(0, CHANNELS, 9, 10)).shape == (0, *shape)


def reference_filters(layer):
    build = {
        LiftConv2d: reference.lift_filters,
        GroupConv2d: reference.group_filters,
        VectorConv2d: reference.vector_filters,
    }[type(layer)]
    vectors = {"vectors": layer.vectors} if isinstance(layer, LiftConv2d) else {}
    basis = layer.basis
    return build(
        layer.coefficients(), layer.group, basis.operators, basis.stencils, basis.size, **vectors
    )


@pytest.mark.parametrize(
    "layer",
    [
        LiftConv2d(3, 1, "p6", vectors=1),
        GroupConv2d(1, 1, "p8"),
        VectorConv2d(1, 1, "p3m"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_filters_are_exact_after_any_change_of_dtype(layer):
    """Whatever dtype a layer passed through, its filters are those of the dtype it has now."""
    layer = copy.deepcopy(layer)
    assert distance(layer.filters(), reference_filters(layer)) > 1e-10  # rounded, in float32
    layer.double()
    assert distance(layer.filters(), reference_filters(layer)) <= 1e-12
    layer.half().double()
    assert distance(layer.filters(), reference_filters(layer)) <= 1e-12
    nn.Sequential(layer).to(torch.bfloat16).to(torch.float64)
    assert distance(layer.filters(), reference_filters(layer)) <= 1e-12


@pytest.mark.parametrize("name", PDO_LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_construction_on_the_meta_device(name, dtype):
    with torch.device("meta"):
        layer = LAYERS[name]().to(dtype)
    tensors = [*layer.parameters(), *layer.buffers()]
    assert {t.device.type for t in tensors} == {"meta"}
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    twin = LAYERS[name]().to(dtype)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(2, CHANNELS, 9, 9, dtype=dtype)
    assert torch.equal(layer(x), twin(x))
    deviation = float(layer.weight.detach().std())
    wanted = float(LAYERS[name]().weight.detach().std())
    assert 0.5 * wanted < deviation < 2 * wanted


@pytest.mark.parametrize("name", LAYERS)
def test_layers_infer_shapes_on_the_meta_device(name):
    layer = LAYERS[name]()
    shape = layer(torch.randn(2, CHANNELS, 9, 10)).shape
    out = layer.to("meta")(torch.randn(2, CHANNELS, 9, 10, device="meta"))
    assert out.device.type == "meta"
    assert out.shape == shape


@pytest.mark.parametrize("name", PDO_LAYERS)
def test_a_meta_layer_can_be_given_a_state_by_assignment(name):
    source = LAYERS[name]()
    with torch.device("meta"):
        layer = LAYERS[name]()
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, CHANNELS, 9, 9)
    assert torch.equal(layer.filters(), source.filters())
    assert torch.equal(layer(x), source(x))


@pytest.mark.parametrize("name", PDO_LAYERS)
def test_a_state_of_another_dtype_can_be_assigned(name):
    source, layer = LAYERS[name]().double(), LAYERS[name]()
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, CHANNELS, 9, 9, dtype=torch.float64)
    assert torch.equal(layer(x), source(x))


def test_device_and_dtype_keywords():
    keywords = {"device": "meta", "dtype": torch.float16}
    for layer in (
        LiftConv2d(2, 1, "p4", bias=True, vectors=1, **keywords),
        GroupConv2d(1, 1, "p4", bias=True, **keywords),
        VectorConv2d(1, 1, "p4", **keywords),
        GroupUpsampleConv2d(1, 1, "p4", **keywords),
        GroupBatchNorm2d(1, "p4", **keywords),
        GroupInstanceNorm2d(1, "p4", affine=True, **keywords),
        GroupLayerNorm2d(1, "p4", **keywords),
    ):
        parameters = list(layer.parameters())
        assert parameters
        assert {(p.device.type, p.dtype) for p in parameters} == {("meta", torch.float16)}
        for buffer in layer.buffers():
            assert buffer.device.type == "meta"
            assert not buffer.is_floating_point() or buffer.dtype == torch.float16


def test_the_representation_names_what_was_chosen():
    text = repr(GroupConv2d(2, 3, "p8", stride=2, bias=True, operators="order<=2", dilation=2))
    for part in ("2, 3", "p8", "'order<=2'", "'isotropic'", "stride=2", "bias=True", "dilation=2"):
        assert part in text
    assert "spacing" not in text
    assert "vectors=1" in repr(LiftConv2d(2, 1, "p4", vectors=1))
    assert "p4" in repr(GroupBatchNorm2d(3, "p4"))
    assert "p=0.25" in repr(GroupDropout2d("p4", 0.25))


# Coefficients and spacing


def plane(slope_x, slope_y, size=9):
    """Slopes in pixels: x right, y up."""
    line = torch.arange(size, dtype=torch.float64)
    return (slope_x * line - slope_y * line[:, None])[None, None]


def test_filters_do_not_depend_on_the_spacing_but_coefficients_do():
    fine = GroupConv2d(1, 1, "p8", spacing=0.5, dtype=torch.float64)
    plain = GroupConv2d(1, 1, "p8", dtype=torch.float64)
    plain.load_state_dict(fine.state_dict())
    assert torch.equal(fine.filters(), plain.filters())
    orders = torch.tensor(plain.basis.operators.orders, dtype=torch.float64)
    assert distance(fine.coefficients(), plain.coefficients() * 0.5**orders) <= 1e-14
    assert distance(fine.coefficients(), plain.coefficients()) > 1e-3


@pytest.mark.parametrize("spacing", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("accuracy", [2, 4])
def test_a_derivative_is_the_slope_over_the_spacing_for_every_dilation(spacing, dilation, accuracy):
    options = {"spacing": spacing, "dilation": dilation, "padding": "valid"}
    central = Central(accuracy)
    layer = LiftConv2d(1, 1, "p8", stencils=central, dtype=torch.float64, **options)
    beta = torch.zeros_like(layer.coefficients())
    beta[..., 1] = 1.0  # ∂x
    layer.set_coefficients(beta)
    out = layer(plane(2.0, -3.0, size=21))
    directions = torch.tensor(layer.group.matrices[:, :, 0])
    wanted = directions @ torch.tensor([2.0, -3.0], dtype=torch.float64) / spacing
    assert distance(out, wanted[None, :, None, None].expand_as(out)) <= 1e-11


@pytest.mark.parametrize(("spacing", "dilation"), [(1.0, 1), (0.5, 1), (1.0, 2), (0.25, 3)])
def test_the_effective_spacing_is_spacing_times_dilation(spacing, dilation):
    layer = GroupConv2d(1, 1, "p6", spacing=spacing, dilation=dilation, dtype=torch.float64)
    plain = GroupConv2d(1, 1, "p6", spacing=spacing * dilation, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.coefficients(), plain.coefficients())


@given(
    kind=st.sampled_from([LiftConv2d, GroupConv2d, VectorConv2d]),
    group=st.sampled_from(["p1", "p3", "p4", "p6m", "p8"]),
    operators=st.sampled_from(["paper", "order<=2", "order<=1", [(0, 0), (2, 0), (0, 2)]]),
    spacing=st.floats(0.25, 4.0),
    dilation=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_set_coefficients_is_the_inverse_of_coefficients(
    kind, group, operators, spacing, dilation, seed
):
    options = {"spacing": spacing, "dilation": dilation, "dtype": torch.float64}
    layer = kind(2, 1, group, operators=operators, **options)
    generator = torch.Generator().manual_seed(seed)
    beta = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
    layer.set_coefficients(beta)
    assert distance(layer.coefficients(), beta) <= 1e-11
    assert layer.weight.requires_grad


def test_coefficients_have_the_shapes_of_the_paper():
    assert LiftConv2d(3, 2, "p8").coefficients().shape == (2, 3, 9)
    assert GroupConv2d(3, 2, "p8").coefficients().shape == (2, 3, 8, 9)
    assert VectorConv2d(3, 2, "p8").coefficients().shape == (4, 3, 8, 9)
    assert GroupConv2d(4, 2, "p8", groups=2).coefficients().shape == (2, 2, 8, 9)


def test_coefficients_are_differentiable():
    layer = GroupConv2d(1, 1, "p4")
    layer.coefficients().pow(2).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().max() > 0


# Vector fields


@pytest.mark.parametrize("group", ["p1", "p3", "p4", "p8", "p1m", "p6m"])
def test_the_divergence_of_a_vector_field_is_the_same_in_every_frame(group):
    layer = LiftConv2d(2, 1, group, vectors=1, operators="order<=1", dtype=torch.float64)
    beta = torch.zeros_like(layer.coefficients())
    beta[0, 0, 1] = beta[0, 1, 2] = 1.0  # ∂x of the x component and ∂y of the y component
    layer.set_coefficients(beta)
    field = torch.cat([plane(2.0, 5.0), plane(-7.0, 4.0)], dim=1)
    out = layer(field)[..., 2:-2, 2:-2]
    assert distance(out, torch.full_like(out, 2.0 + 4.0)) <= 1e-12


@pytest.mark.parametrize("group", ["p3", "p4", "p8", "p4m"])
def test_a_vector_conv_can_take_the_gradient_of_an_image(group):
    """s₁(x, A) = ∂x^(A) r: the sum Σ_A A·[s₁, 0] is (order / 2)·∇r in every group with n ≥ 3."""
    order = Group(group).order
    layer = VectorConv2d(1, 1, group, operators="order<=1", dtype=torch.float64)
    beta = torch.zeros_like(layer.coefficients())
    beta[0, 0, 0, 1] = 1.0
    layer.set_coefficients(beta)
    features = plane(2.0, -3.0).expand(-1, order, -1, -1)  # an image, the same in every frame
    out = layer(features)[0, :, 4, 4] * 2 / order
    assert distance(out, torch.tensor([2.0, -3.0], dtype=torch.float64)) <= 1e-12


# Norms


def test_batch_norm_in_train_mode_by_hand():
    norm = GroupBatchNorm2d(3, "p4", eps=1e-3, momentum=0.2, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = 2 * torch.randn(5, 12, 6, 7, dtype=torch.float64) + 3
    by_field = x.unflatten(1, (3, 4))
    mean = by_field.mean(dim=(0, 2, 3, 4))
    variance = by_field.var(dim=(0, 2, 3, 4), unbiased=False)

    def per_field(values):
        return values[None, :, None, None, None]

    normed = (by_field - per_field(mean)) / per_field((variance + 1e-3).sqrt())
    wanted = (normed * per_field(norm.weight) + per_field(norm.bias)).flatten(1, 2)
    assert distance(norm(x), wanted) <= 1e-12
    count = 5 * 4 * 6 * 7
    assert distance(norm.running_mean, 0.2 * mean) <= 1e-13
    assert distance(norm.running_var, 0.8 + 0.2 * variance * count / (count - 1)) <= 1e-13
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_in_eval_mode_uses_the_running_statistics(memory_format):
    norm = GroupBatchNorm2d(2, "p3", dtype=torch.float64).eval()
    norm.running_mean.copy_(torch.tensor([1.0, -2.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    out = norm(x.to(memory_format=memory_format))
    scale = torch.tensor([4.0, 0.25], dtype=torch.float64).add(1e-5).rsqrt()
    shift = torch.tensor([1.0, -2.0], dtype=torch.float64)
    wanted = (x.unflatten(1, (2, 3)) - shift[:, None, None, None]) * scale[:, None, None, None]
    assert distance(out, wanted.flatten(1, 2)) <= 1e-13
    assert norm.running_mean.tolist() == [1.0, -2.0]
    assert int(norm.num_batches_tracked) == 0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_without_momentum_averages_all_batches(memory_format):
    norm = GroupBatchNorm2d(2, "p4", momentum=None, dtype=torch.float64)
    batches = torch.randn(3, 4, 8, 5, 5, dtype=torch.float64)
    for x in batches:
        norm(x.to(memory_format=memory_format))
    by_field = batches.unflatten(2, (2, 4))
    assert distance(norm.running_mean, by_field.mean(dim=(1, 3, 4, 5)).mean(0)) <= 1e-13
    assert distance(norm.running_var, by_field.var(dim=(1, 3, 4, 5)).mean(0)) <= 1e-13


def test_batch_norm_flags():
    plain = GroupBatchNorm2d(2, "p4", affine=False)
    assert list(plain.parameters()) == []
    assert set(plain.state_dict()) == {"running_mean", "running_var", "num_batches_tracked"}
    untracked = GroupBatchNorm2d(2, "p4", track_running_stats=False)
    assert set(untracked.state_dict()) == {"weight", "bias"}
    x = torch.randn(3, 8, 5, 5) + 7
    assert torch.equal(untracked.eval()(x), untracked.train()(x))
    assert abs(float(untracked(x).detach().mean())) < 1e-5
    assert GroupBatchNorm2d(2, "p4").weight.shape == (2,)


def test_batch_norm_of_p1_is_ordinary_batch_norm():
    ours, theirs = GroupBatchNorm2d(3, "p1"), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5)
    assert distance(ours(x), theirs(x)) <= 1e-6
    assert distance(ours.running_var, theirs.running_var) <= 1e-6


def test_instance_norm_by_hand():
    norm = GroupInstanceNorm2d(
        2, "p3", eps=1e-3, affine=True, track_running_stats=True, dtype=torch.float64
    )
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = 2 * torch.randn(4, 6, 5, 6, dtype=torch.float64) + 3
    by_field = x.unflatten(1, (2, 3))
    mean = by_field.mean(dim=(2, 3, 4), keepdim=True)
    variance = by_field.var(dim=(2, 3, 4), keepdim=True, unbiased=False)
    normed = (by_field - mean) / (variance + 1e-3).sqrt()
    affine = normed * norm.weight[:, None, None, None] + norm.bias[:, None, None, None]
    assert distance(norm(x), affine.flatten(1, 2)) <= 1e-12
    unbiased = by_field.var(dim=(2, 3, 4)).mean(0)
    assert distance(norm.running_mean, 0.1 * mean.flatten(1).mean(0)) <= 1e-13
    assert distance(norm.running_var, 0.9 + 0.1 * unbiased) <= 1e-13
    before = norm.running_mean.clone()
    out = norm.eval()(x)
    shift, scale = norm.running_mean, (norm.running_var + 1e-3).rsqrt()
    normed = (by_field - shift[:, None, None, None]) * scale[:, None, None, None]
    affine = normed * norm.weight[:, None, None, None] + norm.bias[:, None, None, None]
    assert distance(out, affine.flatten(1, 2)) <= 1e-12
    assert torch.equal(before, norm.running_mean)
    assert list(GroupInstanceNorm2d(2, "p3").parameters()) == []


def test_layer_norm_by_hand():
    norm = GroupLayerNorm2d(3, "p4", eps=1e-3, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = 2 * torch.randn(2, 12, 5, 6, dtype=torch.float64) + 3
    mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
    normed = ((x - mean) / (variance + 1e-3).sqrt()).unflatten(1, (3, 4))
    wanted = normed * norm.weight[:, None, None, None] + norm.bias[:, None, None, None]
    assert distance(norm(x), wanted.flatten(1, 2)) <= 1e-12
    plain = GroupLayerNorm2d(3, "p4", eps=1e-3, affine=False, dtype=torch.float64)
    assert list(plain.parameters()) == []
    assert distance(plain(x), normed.flatten(1, 2)) <= 1e-12
    norm.reset_parameters()
    assert distance(norm(x), plain(x)) <= 1e-13


# Pooling and dropout


def test_pooling_over_orientations_by_hand():
    x = torch.randn(2, 12, 3, 4)
    for reduce in ("max", "mean"):
        out = GroupPool2d("p4", reduce)(x)
        for field in range(3):
            maps = torch.stack([x[:, 4 * field + element] for element in range(4)])
            wanted = maps.max(0).values if reduce == "max" else maps.sum(0) / 4
            assert distance(out[:, field], wanted) <= 1e-6


def test_several_statistics_of_orientations_by_hand():
    pool = GroupPool2d("p4", "std+top3+mean+max")
    values = torch.tensor([[1.0, 5.0, 2.0, 4.0], [-1.0, -1.0, 3.0, -1.0]])
    wanted = torch.tensor(
        [[2.5**0.5, 5.0, 4.0, 2.0, 3.0, 5.0], [3**0.5, 3.0, -1.0, -1.0, 0.0, 3.0]]
    )
    assert pool.outputs == 6
    torch.testing.assert_close(pool(values.reshape(1, 8)), wanted.reshape(1, 12))
    maps = values.reshape(1, 8, 1, 1) * torch.ones(1, 1, 2, 3)
    torch.testing.assert_close(pool(maps), wanted.reshape(1, 12, 1, 1) * torch.ones(1, 1, 2, 3))


@pytest.mark.parametrize("reduce", ["std", "top3", "mean+std+top2"])
@pytest.mark.parametrize("group", ["p8", "p4m"])
def test_statistics_of_orientations_turn_with_the_pixels_and_have_gradients(group, reduce):
    pool, order = GroupPool2d(group, reduce), Group(group).order
    x = torch.randn(2, 2 * order, 5, 5, dtype=torch.float64, requires_grad=True)
    assert_equivariant(pool, x.detach(), tolerance=1e-12)
    # Whatever grid they stand on: orientations of another angle, in another place, too.
    for element in range(order):
        moved = x.unflatten(1, (2, order))[:, :, Group(group).product[element].tolist()].flatten(
            1, 2
        )
        assert distance(pool(moved), pool(x)) <= 1e-12
    assert torch.autograd.gradcheck(pool, (x[:1, :, :1, :2],))


@pytest.mark.parametrize("reduce", ["std", "top3", "mean+std+top2"])
def test_statistics_of_equal_orientations_have_gradients_that_are_numbers(reduce):
    x = torch.zeros(2, 16, requires_grad=True)
    GroupPool2d("p8", reduce)(x).sum().backward()
    assert x.grad.isfinite().all()


def test_a_pooling_that_was_pickled_with_one_statistic_still_pools():
    old = GroupPool2d("p4", "mean")
    del old.statistics
    assert pickle.loads(pickle.dumps(old))(torch.arange(8.0)[None]).tolist() == [[1.5, 5.5]]


def test_pooling_takes_vectors_of_features_too():
    assert GroupPool2d("p4")(torch.arange(8.0)[None]).tolist() == [[3.0, 7.0]]
    assert GroupPool2d("p4", "mean")(torch.arange(8.0)[None]).tolist() == [[1.5, 5.5]]


def test_equal_maxima_give_the_weights_the_gradient_of_shared_ones():
    """On a blank image all orientations are equal: one takes the gradient, for all of them."""
    lift = LiftConv2d(1, 2, "p8", padding_mode="circular").double()
    conv = GroupConv2d(2, 3, "p8", padding_mode="circular", bias=True).double()
    weights = [*lift.parameters(), *conv.parameters()]
    features = conv(torch.relu(lift(torch.ones(1, 1, 9, 9, dtype=torch.float64))))
    by_orientation = features.unflatten(1, (3, 8))
    upstream = torch.randn(3, dtype=torch.float64)[:, None, None]
    gradients = [
        torch.autograd.grad((pooled * upstream).sum(), weights, retain_graph=True)
        for pooled in (GroupPool2d("p8")(features), by_orientation.mean(2))
    ]
    for found, shared in zip(*gradients, strict=True):
        torch.testing.assert_close(found, shared, rtol=1e-9, atol=1e-9)


def test_dropout_drops_whole_fields_and_scales_the_rest():
    layer = GroupDropout2d("p4", p=0.25)
    out = layer(torch.ones(200, 5 * 4, 3, 3)).unflatten(1, (5, 4))
    kept = out.amax(dim=(2, 3, 4))
    assert torch.equal(kept, out.amin(dim=(2, 3, 4)))  # a field is kept or dropped as one
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    dropped = float((kept == 0).float().mean())
    assert 0.20 < dropped < 0.30  # 1000 draws: four standard deviations are 0.055
    assert len({tuple(sample) for sample in kept.tolist()}) > 5  # fields are drawn apart


def test_dropout_at_its_ends_and_in_eval_mode():
    x = torch.randn(2, 8, 3, 3)
    assert torch.equal(GroupDropout2d("p4", 0.0)(x), x)
    assert GroupDropout2d("p4", 1.0)(x).abs().max() == 0
    assert torch.equal(GroupDropout2d("p4", 0.9).eval()(x), x)


# Down- and upsampling


def row(*values):
    """An image with these columns, constant along y, and its turned copy."""
    image = torch.tensor(values, dtype=torch.float64)[None, None, None].expand(1, 1, 6, -1)
    return image.contiguous()


@pytest.mark.parametrize("turned", [False, True])
def test_downsampling_by_hand(turned):
    a, b, c, d, e = 3.0, -1.0, 7.0, 2.0, 11.0
    cases = [
        (row(a, b, c, d, e), [(3 * a + b) / 4, (b + 2 * c + d) / 4, (d + 3 * e) / 4]),
        (row(a, b, c, d), [(4 * a + 3 * b + c) / 8, (b + 3 * c + 4 * d) / 8]),
        (row(a, b, c), [(3 * a + b) / 4, (b + 3 * c) / 4]),
        (row(a, b), [(a + b) / 2]),
        (row(a), [a]),
    ]
    for image, wanted in cases:
        image = image.mT if turned else image
        out = Downsample2d()(image)
        out = out.mT if turned else out
        assert out.shape[2:] == (3, len(wanted))
        assert distance(out, row(*wanted)[:, :, :3]) <= 1e-14


def test_downsampling_by_the_maximum_takes_neighbourhoods_first():
    image = row(1.0, 5.0, 2.0, 4.0, 3.0, 0.0)
    highest = row(5.0, 5.0, 5.0, 4.0, 4.0, 3.0)
    assert distance(Downsample2d("max")(image), Downsample2d("mean")(highest)) <= 1e-14


@pytest.mark.parametrize("turned", [False, True])
def test_upsampling_by_hand(turned):
    a, b, c = 3.0, -1.0, 7.0
    even = [
        a,
        0.75 * a + 0.25 * b,
        0.25 * a + 0.75 * b,
        0.75 * b + 0.25 * c,
        0.25 * b + 0.75 * c,
        c,
    ]
    odd = [a, (a + b) / 2, b, (b + c) / 2, c]
    image = row(a, b, c).mT if turned else row(a, b, c)
    for wanted in (even, odd):
        size = (len(wanted), 12) if turned else (12, len(wanted))
        out = Upsample2d()(image, size=size)
        out = out.mT if turned else out
        assert distance(out, row(*wanted)[:, :, :1].expand(-1, -1, 12, -1)) <= 1e-14


@given(height=st.integers(1, 9), width=st.integers(1, 9), dtype=st.sampled_from(list(EPSILON)))
@settings(max_examples=30, deadline=None)
def test_upsampling_doubles_by_default(height, width, dtype):
    x = torch.randn(1, 2, height, width).to(dtype)
    out, asked = Upsample2d()(x), Upsample2d()(x, size=(2 * height, 2 * width))
    assert out.shape[2:] == (2 * height, 2 * width)
    assert distance(out, asked) <= EPSILON[dtype]


@given(height=st.integers(1, 20), width=st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_sizes_go_down_and_up_again(height, width):
    x = torch.randn(1, 2, height, width, dtype=torch.float64)
    for reduce in ("mean", "max"):
        low = Downsample2d(reduce)(x)
        assert low.shape[2:] == (-(-height // 2), -(-width // 2))
        assert Upsample2d()(low, size=x.shape[2:]).shape == x.shape


@given(height=st.integers(1, 12), width=st.integers(1, 12), odd=st.booleans())
@settings(max_examples=40, deadline=None)
def test_sampling_commutes_with_quarter_turns_and_flips_on_every_size(height, width, odd):
    x = torch.randn(1, 2, height, width, dtype=torch.float64)
    size = (2 * height - odd, 2 * width)

    def upsample(x, turned=False):
        return Upsample2d()(x, size=size[::-1] if turned else size)

    wide = Downsample2d(antialias=6), Downsample2d("max", 8), Upsample2d(8)
    for sample in (Downsample2d(), Downsample2d("max"), *wide):
        assert distance(sample(x.rot90(1, (2, 3))), sample(x).rot90(1, (2, 3))) <= 1e-14
        assert distance(sample(x.flip(2)), sample(x).flip(2)) <= 1e-14
    assert distance(upsample(x.rot90(1, (2, 3)), True), upsample(x).rot90(1, (2, 3))) <= 1e-14
    assert distance(upsample(x.flip(3)), upsample(x).flip(3)) <= 1e-14


@pytest.mark.parametrize("taps", [4, 6, 8, 12])
@pytest.mark.parametrize("size", [48, 49])
def test_what_passes_a_low_pass_is_what_is_documented(taps, size):
    """The answer to waves of f per pixel is cos(πf)^(taps − 1), one tap less on odd sizes."""
    place = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    kept = slice(8, 16)
    for f in (0.0, 1 / 16, 1 / 8, 3 / 8, 1 / 2):
        wave = torch.cos(2 * math.pi * f * place)[None, None, :, None].expand(1, 1, -1, size)
        # Along the other axis the image is constant, which passes as it is.
        expected = math.cos(math.pi * f) ** (taps - 1 - size % 2)
        halved = Downsample2d(antialias=taps)(wave)[0, 0, kept, 12]
        where = torch.arange(-(-size // 2), dtype=torch.float64) * 2
        where = where + (0.0 if size % 2 else 0.5) - (size - 1) / 2
        answer = expected * torch.cos(2 * math.pi * f * where)[kept]
        assert distance(halved, answer) < 1e-12
    passing, folded = (math.cos(math.pi * f) ** (taps - 1) for f in (1 / 8, 3 / 8))
    told = {4: (0.79, 0.056), 6: (0.68, 0.0082), 8: (0.57, 0.0012)}
    for wanted, found in zip(told.get(taps, ()), (passing, folded), strict=False):
        assert found == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("taps", [6, 8])
def test_doubling_leaves_little_of_what_the_grid_repeats(taps):
    place = torch.arange(40, dtype=torch.float64) - 19.5
    for f in (1 / 16, 1 / 8, 1 / 4):
        wave = torch.cos(2 * math.pi * f * place)[None, None, :, None].expand(1, 1, -1, 8)
        fine = torch.arange(80, dtype=torch.float64) / 2 - 19.75
        out = Upsample2d(taps)(wave)[0, 0, 20:60, 8]
        own, repeated = math.cos(math.pi * f / 2), math.sin(math.pi * f / 2)
        passed = own ** (taps - 1) * torch.cos(2 * math.pi * f * fine)[20:60]
        left = distance(out, passed)
        assert left <= repeated ** (taps - 1) + 1e-12
        assert left < distance(Upsample2d()(wave)[0, 0, 20:60, 8], passed)


def test_bad_numbers_of_taps_are_told():
    for taps in (3, 5, 2, 18, 4.0, True, "8"):
        for kind in (lambda n: Downsample2d(antialias=n), Upsample2d):
            with pytest.raises(ValueError, match="even number of taps from 4 to 16"):
                kind(taps)


def test_torch_pooling_commutes_on_even_sizes_only():
    """Why Downsample2d exists: the same comparison says no to max_pool2d on odd sizes."""
    for size, exact in ((8, True), (9, False)):
        x = torch.randn(1, 1, size, size, dtype=torch.float64)
        left = functional.max_pool2d(x.flip(3), 2)
        right = functional.max_pool2d(x, 2).flip(3)
        assert (distance(left, right) == 0) == exact


def test_sampling_keeps_constants():
    x = torch.full((1, 2, 7, 8), 3.0, dtype=torch.float64)
    ups = Upsample2d()(x), Upsample2d()(x, (13, 15))
    for out in (Downsample2d()(x), Downsample2d("max")(x), *ups):
        assert float((out - 3).abs().max()) <= 1e-14


def test_the_upsampling_convolution_is_upsampling_then_convolution():
    layer = GroupUpsampleConv2d(2, 3, "p4", bias=True, dtype=torch.float64)
    nn.init.normal_(layer.conv.bias)
    x = torch.randn(1, 8, 7, 6, dtype=torch.float64)
    assert layer.group is Group("p4")
    for size in (None, (13, 12), (14, 11)):
        assert torch.equal(layer(x, size), layer.conv(Upsample2d()(x, size)))


# Restriction to subgroups

SUBGROUPS = [("p8", "p4"), ("p8m", "p4m"), ("p8m", "p4"), ("p4m", "p2m"), ("p4m", "p4")]


def restriction_error(read, group, subgroup):
    """How far features, read in some way, are from turning as features of the subgroup."""
    outer, inner = Group(group), Group(subgroup)
    x = torch.randn(2, 3 * outer.order, 6, 6, dtype=torch.float64)
    errors = []
    for t, g in enumerate(outer.embed(inner).tolist()):
        turned_first = read(transform(x, outer, g, "regular"))
        turned_last = transform(read(x), inner, t, "regular")
        errors.append(distance(turned_first, turned_last))
    return max(errors)


@pytest.mark.parametrize(("group", "subgroup"), SUBGROUPS)
def test_restricted_features_turn_as_features_of_the_subgroup(group, subgroup):
    assert restriction_error(lambda x: restrict(x, group, subgroup), group, subgroup) == 0
    assert restriction_error(Restrict2d(group, subgroup), group, subgroup) == 0


@pytest.mark.parametrize(("group", "subgroup"), SUBGROUPS[:4])
def test_features_read_as_they_lie_do_not(group, subgroup):
    """Blocks of consecutive channels are no cosets."""
    assert restriction_error(lambda x: x, group, subgroup) > 0.1


@pytest.mark.parametrize(("group", "subgroup"), [("p8m", "p4m"), ("p4m", "p2m"), ("p6m", "p1m")])
def test_cosets_on_the_wrong_side_do_not(group, subgroup):
    outer = Group(group)
    elements = outer.embed(subgroup).tolist()
    left, seen = [], set()
    for c in range(outer.order):
        if c not in seen:
            coset = [int(outer.product[c, t]) for t in elements]
            seen.update(coset)
            left += coset

    def read(x):
        return x.unflatten(1, (-1, outer.order))[:, :, left].flatten(1, 2)

    assert sorted(left) == list(range(outer.order))
    assert restriction_error(read, group, subgroup) > 0.1
    assert restriction_error(Restrict2d(group, subgroup), group, subgroup) == 0


def test_restriction_multiplies_the_fields_and_keeps_every_number():
    x = torch.randn(1, 2 * 16, 4, 4)
    out = restrict(x, "p8m", "p4")
    assert out.shape == x.shape
    assert torch.equal(out.flatten().sort().values, x.flatten().sort().values)
    assert torch.equal(restrict(x, "p8m", "p8m"), x)
    assert torch.equal(
        GroupPool2d("p8m")(x),
        GroupPool2d("p4")(out).unflatten(1, (2, 4)).amax(2),
    )


# Equivariance of the 1×1 convolution, and training


@pytest.mark.parametrize("group", ["p1", "p3", "p5", "p8", "p12", "p1m", "p3m", "p6m", "p8m"])
def test_the_pointwise_convolution_is_exact_for_every_element(group):
    found = Group(group)
    layer = GroupConv2d(3, 2, group, operators="order<=0", bias=True, dtype=torch.float64)
    assert layer.filters().shape[2:] == (1, 1)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 3 * found.order, 4, 5, dtype=torch.float64)

    def turn(x, element):  # pixels play no role
        return x.unflatten(1, (-1, found.order))[:, :, found.relative[element].tolist()].flatten(
            1, 2
        )

    for element in range(found.order):
        assert distance(layer(turn(x, element)), turn(layer(x), element)) <= 1e-13


def test_the_pointwise_comparison_can_say_no():
    layer = GroupConv2d(1, 1, "p4", operators="order<=0", dtype=torch.float64)
    with torch.no_grad():
        filters = layer.filters().clone()
    filters[0] *= 2  # one orientation unlike the others
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    left = functional.conv2d(x.roll(1, 1), filters)
    assert distance(left, functional.conv2d(x, filters).roll(1, 1)) > 1e-3


def test_a_small_network_overfits_one_batch():
    network = nn.Sequential(
        LiftConv2d(1, 4, "p4"),
        GroupBatchNorm2d(4, "p4"),
        nn.ReLU(),
        GroupConv2d(4, 8, "p4"),
        GroupBatchNorm2d(8, "p4"),
        nn.ReLU(),
        Downsample2d(),
        GroupConv2d(8, 8, "p4", bias=True),
        GroupPool2d("p4"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    x, labels = torch.randn(8, 1, 12, 12), torch.arange(8) % 4
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    first = float(functional.cross_entropy(network(x), labels).detach())
    for _ in range(80):
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters())
    assert first > 1.0
    assert float(loss.detach()) < 0.05


# Centred windows


@pytest.mark.parametrize("sizes", [(9, 9), (9, 8), (8, 5), (12, 9), (9, 12), (13, 4)])
def test_recentring_is_the_reference(sizes):
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    assert distance(recentre(x, *sizes), reference.recentre(x, *sizes)) <= 1e-15


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(9, 17),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 2),
)
def test_a_centred_stride_is_the_reference_and_has_torchs_size(size, stride, padding, dilation):
    options = {"stride": stride, "padding": padding, "dilation": dilation, "dtype": torch.float64}
    layer = GroupConv2d(1, 2, "p4", centred=True, bias=True, **options)
    nn.init.normal_(layer.bias)
    x = torch.randn(1, 4, size, size + 1, dtype=torch.float64)
    torchs = GroupConv2d(1, 2, "p4", **options)(x)
    counts = [stride * (n - 1) + layer.extent - 2 * padding for n in torchs.shape[2:]]
    filters, bias = layer.filters(), layer.bias.repeat_interleave(4)
    centred = reference.recentre(x, *counts)
    wanted = reference.convolve(centred, filters, bias, stride, padding, dilation)
    found = layer(x)
    assert found.shape == torchs.shape
    assert distance(found, wanted) <= 1e-12
    assert_equivariant(layer, x)


def test_a_stride_that_is_symmetric_already_is_torchs():
    layer = GroupConv2d(1, 2, "p4", stride=2, centred=True)
    plain = GroupConv2d(1, 2, "p4", stride=2)
    plain.load_state_dict(layer.state_dict())
    odd, even = torch.randn(1, 4, 9, 9), torch.randn(1, 4, 10, 10)
    assert torch.equal(layer(odd), plain(odd))
    assert distance(layer(even), plain(even)) > 0.1


@pytest.mark.parametrize("size", range(8, 13))
@pytest.mark.parametrize(("extent", "padding", "stride"), [(2, 0, 2), (4, 0, 4), (4, 2, 2)])
def test_windows_are_counted_as_those_of_an_even_kernel(size, extent, padding, stride):
    layer = LiftConv2d(
        *(3, 2, "p4"), operators="order<=2", stride=stride, centred=(extent, padding), padding=1
    ).double()
    x = torch.randn(1, 3, size, size, dtype=torch.float64)
    even = nn.Conv2d(3, 1, extent, stride, padding // 2).double()
    assert layer(x).shape[2:] == even(x).shape[2:]
    assert_equivariant(layer, x)


POOLS = [(1, 2, 0), (2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 3, 1), (2, 3, 0), (4, 4, 2), (5, 1, 2)]


@pytest.mark.parametrize("size", range(7, 14))
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_centred_pools_have_torchs_size_and_turn(pool, ceil, size):
    x = torch.randn(1, 2, size, size, dtype=torch.float64)
    kernel, stride, padding = pool
    symmetric = (size + 2 * padding - kernel) % stride == 0
    pairs = [(CentredMaxPool2d(*pool, ceil), nn.MaxPool2d(*pool, ceil_mode=ceil))]
    for counted in (True, False):
        theirs = nn.AvgPool2d(*pool, ceil_mode=ceil, count_include_pad=counted)
        pairs.append((CentredAvgPool2d(*pool, ceil, counted), theirs))
    for ours, theirs in pairs:
        found, wanted = ours(x), theirs(x)
        assert found.shape == wanted.shape
        assert not symmetric or distance(found, wanted) <= 1e-14
        assert_equivariant(ours, x, "p4m")


def test_torchs_pool_turns_only_where_its_windows_are_symmetric():
    x = torch.randn(1, 2, 10, 10, dtype=torch.float64)
    plain, centred = nn.MaxPool2d(3, 2, 1), CentredMaxPool2d(3, 2, 1)
    assert equivariance_error(plain, x, 1, "p4", output_kind="scalar") > 0.1
    assert equivariance_error(centred, x, 1, "p4") <= 1e-14


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "output_padding"),
    [(2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (3, 2, 1, 0), (5, 3, 1, 0), (3, 1, 1, 0)],
)
@pytest.mark.parametrize("size", [7, 8])
def test_upsampling_convolutions_have_the_size_of_transposed_ones(
    kernel, stride, padding, output_padding, size
):
    theirs = nn.ConvTranspose2d(4, 1, kernel, stride, padding, output_padding).double()
    excess = kernel - stride - 2 * padding + output_padding
    ours = GroupUpsampleConv2d(1, 1, "p4", factor=stride, excess=excess).double()
    x = torch.randn(1, 4, size, size, dtype=torch.float64)
    assert ours(x).shape[2:] == theirs(x).shape[2:]
    assert_equivariant(ours, x)


# Norms, slopes and scales per field


def test_group_norm_by_hand():
    norm = GroupGroupNorm2d(2, 4, "p4").double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 16, 5, 6, dtype=torch.float64)
    blocks = x.reshape(3, 2, 8, 5, 6)
    mean = blocks.mean((2, 3, 4), keepdim=True)
    variance = blocks.var((2, 3, 4), unbiased=False, keepdim=True)
    normed = ((blocks - mean) / (variance + norm.eps).sqrt()).reshape(3, 4, 4, 5, 6)
    wanted = normed * norm.weight[:, None, None, None] + norm.bias[:, None, None, None]
    assert distance(norm(x), wanted.reshape(x.shape)) <= 1e-12
    assert_equivariant(norm, x[..., :5])
    assert GroupGroupNorm2d(2, 4, "p4", affine=False).weight is None


def test_a_slope_for_every_field_by_hand():
    prelu = GroupPReLU2d(2, "p4").double()
    prelu.weight.data.copy_(torch.tensor([0.1, 3.0], dtype=torch.float64))
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    slopes = torch.tensor([0.1] * 4 + [3.0] * 4, dtype=torch.float64)[:, None, None]
    assert distance(prelu(x), torch.where(x > 0, x, slopes * x)) == 0
    assert_equivariant(prelu, x)


@pytest.mark.parametrize("pixels", [True, False])
def test_a_number_for_every_field_by_hand(pixels):
    scale = FieldParameter(2, "p4", initial=0.5, pixels=pixels)
    assert scale.weight.tolist() == [0.5, 0.5]
    scale.weight.data.copy_(torch.tensor([1.0, 2.0]))
    assert scale().flatten().tolist() == [1.0] * 4 + [2.0] * 4
    assert scale().shape == ((8, 1, 1) if pixels else (8,))


def test_spreading_is_what_pooling_undoes():
    x = torch.randn(2, 3, 4, 4)
    spread = Spread2d("p8m")(x)
    assert torch.equal(GroupPool2d("p8m")(spread), x)
    assert Spread2d("p8")(x[:, :, 0, 0]).shape == (2, 24)
    assert_equivariant(Spread2d("p8m"), x)


def test_a_linear_map_of_features_is_the_pointwise_convolution():
    linear = GroupLinear(2, 3, "p8")
    x = torch.randn(4, 16)
    conv = GroupConv2d(2, 3, "p8", operators="order<=0", bias=True)
    conv.load_state_dict(linear.state_dict())
    assert torch.equal(linear(x), conv(x[:, :, None, None]).flatten(1))
    with pytest.raises(ValueError, match=r"expected \[batch, channels\]"):
        linear(x[:, :, None, None])


# Export


class EveryLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = LiftConv2d(1, 2, "p4")
        self.norm = GroupBatchNorm2d(2, "p4")
        self.halve = Downsample2d()
        self.highest = Downsample2d("max")
        self.third = CentredMaxPool2d(3, 3, 1)
        self.rounded = CentredAvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)
        self.strided = GroupConv2d(2, 2, "p4", stride=3, centred=True)
        self.even = GroupConv2d(
            *(2, 2, "p4"), operators="order<=2", stride=2, padding=1, centred=(2, 0)
        )
        self.tripled = GroupUpsampleConv2d(2, 2, "p4", factor=3, excess=-1)
        self.conv = GroupConv2d(2, 2, "p4", bias=True, padding_mode="circular")
        self.instance = GroupInstanceNorm2d(2, "p4", affine=True)
        self.layer = GroupLayerNorm2d(2, "p4")
        self.up = Upsample2d()
        self.up_conv = GroupUpsampleConv2d(2, 2, "p4")
        self.dropout = GroupDropout2d("p4")
        self.restrict = Restrict2d("p4", "p2")
        self.pool = GroupPool2d("p2")
        self.vector = VectorConv2d(2, 1, "p4")
        self.spread = Spread2d("p4")
        self.gate = GroupLinear(2, 2, "p4")
        self.groups = GroupGroupNorm2d(2, 2, "p4")
        self.slope = GroupPReLU2d(2, "p4")
        self.scale = FieldParameter(2, "p4", initial=0.5)
        self.enlarge = Enlarge2d(3, excess=-1)
        self.resize = NearestResize2d()
        self.recentre = Recentre2d()

    def forward(self, x):
        full = torch.relu(self.norm(self.lift(x))) + self.spread(torch.cat([x, x], dim=1))
        full = full * torch.sigmoid(self.gate(full.mean(dim=(2, 3))))[:, :, None, None]
        half = self.layer(self.instance(self.conv(self.halve(full))))
        half = half + self.scale() * self.slope(self.groups(half))
        half = half + self.up_conv(self.highest(half), size=half.shape[2:])
        full = full + self.up(half, size=x.shape[2:])
        images = self.pool(self.restrict(self.dropout(full)))
        sampled = self.third(full), self.rounded(full), self.strided(full), self.even(full)
        larger = self.up(half), self.tripled(full), self.enlarge(half)
        framed = self.recentre(
            self.resize(half, x.shape[2], x.shape[3]), x.shape[2] + 1, x.shape[3] + 2
        )
        return images, self.vector(full), *larger, *sampled, framed


def test_export_keeps_height_and_width_dynamic():
    network = EveryLayer().double().eval()
    sides = {2: torch.export.Dim("height", min=9), 3: torch.export.Dim("width", min=9)}
    example = torch.randn(2, 1, 16, 17, dtype=torch.float64)
    program = torch.export.export(network, (example,), dynamic_shapes={"x": sides}, strict=False)
    module = program.module()
    for height, width in ((16, 17), (9, 9), (10, 10), (13, 28), (32, 15)):
        x = torch.randn(2, 1, height, width, dtype=torch.float64)
        for found, wanted in zip(module(x), network(x), strict=True):
            assert distance(found, wanted) <= 1e-12


# Initialisation of the layers themselves


def second_moment_on_noise(layer):
    x = torch.randn(4, layer.in_channels, 24, 24)
    return float(layer(x).detach().square().mean())


@pytest.mark.parametrize("groups", [1, 4])
def test_blocks_are_drawn_for_the_maps_that_they_read(groups):
    layer = GroupConv2d(16, 16, "p8", groups=groups, padding_mode="circular")
    assert second_moment_on_noise(layer) == pytest.approx(layer.gains().noise, rel=0.1)


def test_vectors_are_drawn_for_the_orientations_that_they_add():
    layer = VectorConv2d(16, 16, "p8", padding_mode="circular")
    assert second_moment_on_noise(layer) == pytest.approx(layer.gains().noise, rel=0.2)


def test_a_reset_sets_the_bias_to_zero():
    layer = GroupConv2d(2, 2, "p4", bias=True)
    layer.bias.data.fill_(3.0)
    layer.reset_parameters()
    assert torch.equal(layer.bias, torch.zeros(2))


def test_counts_may_be_numpy_integers():
    layer = GroupConv2d(np.int64(2), np.int32(3), "p4")
    assert layer(torch.randn(1, 8, 8, 8)).shape == (1, 12, 8, 8)


@pytest.mark.parametrize(
    ("stencils", "text"),
    [("gaussian", "stencils='gaussian'"), (Gaussian(0.8), "stencils=Gaussian(width=0.8)")],
)
def test_the_representation_tells_stencils_apart(stencils, text):
    assert text in repr(GroupConv2d(1, 1, "p8", stencils=stencils))


def test_a_stencil_set_brings_its_own_accuracy():
    with pytest.raises(ValueError, match=r"accuracy=2.*got 4"):
        GroupConv2d(1, 1, "p8", stencils=Central(), accuracy=4)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("channels", "step"), [(8, 2), (3, 2), (6, 3)])
def test_pixels_that_a_stride_picks(channels, step, dtype, layout):
    """As slices give them, with gradients in the same layout; some fit words of eight bytes."""
    x = torch.randn(2, channels, 7, 8, dtype=dtype).contiguous(memory_format=layout)
    x.requires_grad_()
    found, wanted = picked(x, step), x[:, :, ::step, ::step]
    assert torch.equal(found, wanted)
    assert found.is_contiguous(memory_format=layout)
    probe = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(y, x, probe)[0] for y in (found, wanted))
    assert torch.equal(ours, theirs)
    assert ours.is_contiguous(memory_format=layout)
    if dtype == torch.float64:
        assert torch.autograd.gradgradcheck(lambda image: picked(image, step), (x,))


@pytest.mark.parametrize("affine", [True, False])
def test_norms_say_whether_they_have_weights(affine):
    assert f"affine={affine}" in repr(GroupInstanceNorm2d(2, "p4", affine=affine))
    assert f"affine={affine}" in repr(GroupLayerNorm2d(2, "p4", affine=affine))


def test_the_slope_of_a_group_prelu_begins_as_torchs_own():
    assert torch.equal(GroupPReLU2d(3, "p4").weight, torch.full((3,), 0.25))


def test_every_second_pixel_of_a_view_that_negates():
    x = torch.randn(1, 8, 7, 7).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert torch.equal(picked(torch._neg_view(x), 2), picked(-x, 2))
