"""Engines against the reference: filters, outputs and every gradient."""

import pytest
import torch
from torch.nn import functional

from econv import (
    Central,
    FieldConv2d,
    GroupConv2d,
    LiftConv2d,
    VectorConv2d,
    engines,
    filter_basis,
    reference,
)
from econv.engines import dense
from econv.layers import GroupConv, LiftConv, VectorConv

GROUPS = ["p1", "p2", "p3", "p4", "p6", "p8", "p12", "p1m", "p2m", "p4m", "p6m", "p8m"]
OPTIONS = {
    "order<=0": {"operators": "order<=0"},
    "order<=1": {"operators": "order<=1"},
    "order<=2": {"operators": "order<=2"},
    "order<=4": {"operators": "order<=4"},
    "laplacian": {"operators": [(2, 0), (0, 2)]},
    "one derivative": {"operators": [(1, 0)]},
    "wide": {"size": 7},
    "fourth-order accuracy": {"accuracy": 4, "stencils": "central"},
    "fine": {"spacing": 0.25},
    "rectangles": {"spacing": (0.7, 0.4)},
    "flat rectangles": {"spacing": (0.5, 1.5), "stencils": "gaussian", "size": 7, "dilation": 2},
    "central rectangles": {"spacing": (2.0, 0.5), "stencils": "central"},
    "coarse and dilated": {"spacing": 1.5, "dilation": 2},
    "all at once": {
        "operators": "order<=2",
        "stencils": "central",
        "accuracy": 4,
        "size": 9,
        "dilation": 3,
    },
}


def distance(a, b):
    """The largest difference between two tensors of one shape."""
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def reference_filters(layer, coefficients=None):
    """What the reference says the filters of a layer are."""
    if isinstance(layer, VectorConv):
        build = reference.vector_filters
    elif isinstance(layer, GroupConv):
        build = reference.group_filters
    else:
        build = reference.lift_filters
    more = {}
    if isinstance(layer, LiftConv):
        more = {"vectors": layer.vectors, "pseudoscalars": layer.pseudoscalars}
    elif layer.output_kind in ("scalar", "pseudoscalar"):
        build, more = reference.scalar_filters, {"pseudo": layer.output_kind == "pseudoscalar"}
    spacing, dilation = layer.spacing, layer.dilation
    several = isinstance(spacing, tuple)
    return build(
        layer.coefficients() if coefficients is None else coefficients,
        layer.group,
        layer.basis.operators,
        layer.basis.stencils,
        layer.basis.size,
        tuple(n * dilation for n in spacing) if several else spacing * dilation,
        **more,
    )


def assert_filters_are_the_reference(layer):
    found, wanted = layer.filters(), reference_filters(layer)
    assert found.dtype == torch.float64
    assert distance(found, wanted) <= 1e-12
    assert float(wanted.detach().abs().max()) > 1e-2  # not zeros compared with zeros


def run_reference(layer, x):
    """The layer as the reference runs it, differentiable through the coefficients."""
    bias = layer.bias
    if bias is not None:
        bias = bias.repeat_interleave(layer.out_channels // len(bias))
    mode, padding = layer.padding_mode, layer.padding
    if not isinstance(mode, str):
        x, padding = reference.pad(x, padding, mode), 0
    elif mode != "zeros":
        x, padding = functional.pad(x, (padding,) * 2 * layer.dimension, mode=mode), 0
    return reference.convolve(
        x, reference_filters(layer), bias, layer.stride, padding, layer.dilation, layer.groups
    )


@pytest.mark.parametrize("group", GROUPS)
def test_filters_of_lift_conv_equal_the_reference(group):
    assert_filters_are_the_reference(LiftConv2d(2, 2, group, dtype=torch.float64))


@pytest.mark.parametrize("group", GROUPS)
def test_filters_of_lift_conv_with_vectors_equal_the_reference(group):
    assert_filters_are_the_reference(LiftConv2d(3, 2, group, vectors=1, dtype=torch.float64))


@pytest.mark.parametrize("group", GROUPS)
def test_filters_of_fields_that_change_sign_equal_the_reference(group):
    options = {"dtype": torch.float64}
    assert_filters_are_the_reference(LiftConv2d(2, 2, group, pseudoscalars=2, **options))
    assert_filters_are_the_reference(LiftConv2d(5, 1, group, pseudoscalars=1, vectors=1, **options))
    for head in FieldConv2d(2, group, scalars=2, pseudoscalars=1, vectors=1, **options).heads:
        assert_filters_are_the_reference(head)


@pytest.mark.parametrize("group", GROUPS)
def test_filters_of_group_conv_equal_the_reference(group):
    assert_filters_are_the_reference(GroupConv2d(2, 1, group, dtype=torch.float64))


@pytest.mark.parametrize("group", GROUPS)
def test_filters_of_vector_conv_equal_the_reference(group):
    assert_filters_are_the_reference(VectorConv2d(1, 1, group, dtype=torch.float64))


@pytest.mark.parametrize("group", ["p4", "p3m"])
def test_filters_of_several_fields_equal_the_reference(group):
    assert_filters_are_the_reference(LiftConv2d(5, 3, group, vectors=2, dtype=torch.float64))
    assert_filters_are_the_reference(GroupConv2d(3, 2, group, dtype=torch.float64))
    assert_filters_are_the_reference(VectorConv2d(2, 2, group, dtype=torch.float64))


@pytest.mark.parametrize("group", ["p4", "p6", "p3m"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_filters_equal_the_reference_with_other_operators_and_grids(group, options):
    for layer in (
        LiftConv2d(3, 1, group, vectors=1, dtype=torch.float64, **options),
        GroupConv2d(1, 1, group, dtype=torch.float64, **options),
        VectorConv2d(1, 1, group, dtype=torch.float64, **options),
    ):
        assert_filters_are_the_reference(layer)


def test_filters_equal_the_reference_with_groups():
    assert_filters_are_the_reference(LiftConv2d(4, 2, "p4", groups=2, dtype=torch.float64))
    assert_filters_are_the_reference(GroupConv2d(4, 2, "p4", groups=2, dtype=torch.float64))
    assert_filters_are_the_reference(VectorConv2d(4, 2, "p4", groups=2, dtype=torch.float64))


def test_the_comparison_notices_a_transposed_product_table():
    layer = GroupConv2d(1, 1, "p3m", dtype=torch.float64)
    layer.offsets = torch.tensor(dense.filter_offsets(layer.group.relative.T, 1))
    with pytest.raises(AssertionError):
        assert_filters_are_the_reference(layer)


def test_the_comparison_notices_a_mirrored_y_axis():
    layer = LiftConv2d(1, 1, "p4", dtype=torch.float64)
    layer.synthesis = layer.synthesis.flip(-2)
    with pytest.raises(AssertionError):
        assert_filters_are_the_reference(layer)


FORWARD = {
    "plain": {},
    "bias": {"bias": True},
    "stride": {"stride": 2, "bias": True},
    "stride 3 and padding": {"stride": 3, "padding": 1},
    "valid": {"padding": "valid"},
    "wide padding": {"padding": 4},
    "dilation": {"dilation": 2, "spacing": 0.5},
    "groups": {"groups": 2, "bias": True},
    "rectangles": {"spacing": (0.8, 0.5), "bias": True},
    "reflect": {"padding_mode": "reflect"},
    "replicate": {"padding_mode": "replicate", "stride": 2},
    "circular": {"padding_mode": "circular", "bias": True},
    "a channel": {"padding_mode": ("zeros", "circular"), "bias": True},
    "a chute": {"padding_mode": ("circular", "replicate"), "stride": 2},
    "a mirror": {"padding_mode": ("reflect", "zeros")},
    "accuracy": {"accuracy": 4, "stencils": "central", "padding": "valid", "bias": True},
    "everything": {"stride": 2, "padding": 3, "dilation": 2, "groups": 2, "bias": True},
}


def layers_with(group, options):
    """One layer of each kind, with random coefficients and biases."""
    kinds = [
        LiftConv2d(4, 2, group, dtype=torch.float64, **options),
        GroupConv2d(2, 2, group, dtype=torch.float64, **options),
        VectorConv2d(2, 2, group, dtype=torch.float64, **{**options, "bias": False}),
    ]
    if "groups" not in options:
        kinds.append(LiftConv2d(4, 1, group, vectors=1, dtype=torch.float64, **options))
        parts = {"pseudoscalars": 1, "vectors": 1}
        kinds.append(LiftConv2d(4, 1, group, **parts, dtype=torch.float64, **options))
        kinds += FieldConv2d(
            2, group, scalars=2, pseudoscalars=1, dtype=torch.float64, **options
        ).heads
    for layer in kinds:
        if layer.bias is not None:
            torch.nn.init.normal_(layer.bias)
    return kinds


@pytest.mark.parametrize("options", FORWARD.values(), ids=FORWARD.keys())
@pytest.mark.parametrize("engine", ["auto", "dense"])
def test_outputs_and_gradients_equal_the_reference(engine, options):
    for layer in layers_with("p4", {**options, "engine": engine}):
        x = torch.randn(2, layer.in_channels, 12, 11, dtype=torch.float64, requires_grad=True)
        found, wanted = layer(x), run_reference(layer, x)
        assert found.shape[1] == layer.out_channels
        assert distance(found, wanted) <= 1e-12
        inputs = [x, *layer.parameters()]
        probe = torch.randn_like(found)
        ours = torch.autograd.grad(found, inputs, probe)
        theirs = torch.autograd.grad(wanted, inputs, probe)
        for a, b in zip(ours, theirs, strict=True):
            assert distance(a, b) <= 1e-12 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("group", ["p3", "p6", "p8", "p2m", "p3m"])
@pytest.mark.parametrize("engine", ["auto", "dense"])
def test_outputs_and_gradients_equal_the_reference_in_other_groups(engine, group):
    options = {"dtype": torch.float64, "engine": engine}
    for layer in (
        GroupConv2d(1, 1, group, bias=True, **options),
        VectorConv2d(1, 1, group, **options),
        LiftConv2d(4, 1, group, pseudoscalars=1, vectors=1, **options),
        *FieldConv2d(1, group, scalars=2, pseudoscalars=1, bias=True, **options).heads,
    ):
        x = torch.randn(1, layer.in_channels, 7, 7, dtype=torch.float64, requires_grad=True)
        found, wanted = layer(x), run_reference(layer, x)
        assert distance(found, wanted) <= 1e-12
        probe = torch.randn_like(found)
        inputs = [x, *layer.parameters()]
        ours = torch.autograd.grad(found, inputs, probe)
        theirs = torch.autograd.grad(wanted, inputs, probe)
        for a, b in zip(ours, theirs, strict=True):
            assert distance(a, b) <= 1e-12 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        LiftConv2d(2, 1, "p3", bias=True, operators="order<=2", dtype=torch.float64),
        LiftConv2d(3, 1, "p4", vectors=1, operators="order<=1", dtype=torch.float64),
        GroupConv2d(1, 1, "p4", bias=True, operators="order<=2", dtype=torch.float64),
        GroupConv2d(1, 2, "p2m", bias=True, operators="order<=1", stride=2, dtype=torch.float64),
        GroupConv2d(2, 2, "p3", bias=True, operators="order<=1", groups=2, dtype=torch.float64),
        GroupConv2d(1, 1, "p2", operators="order<=2", padding_mode="circular", dtype=torch.float64),
        VectorConv2d(1, 1, "p3", operators="order<=1", dtype=torch.float64),
    ],
    ids=lambda layer: f"{type(layer).__name__}-{layer.group}",
)
def test_gradcheck(layer, train):
    layer.train(train)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(1, layer.in_channels, 4, 5, dtype=torch.float64, requires_grad=True)
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values))


def test_gradients_of_gradients():
    layer = GroupConv2d(1, 1, "p2", operators="order<=1", dtype=torch.float64)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    weight = layer.weight.detach().clone().requires_grad_()

    def run(x, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).pow(2)

    assert torch.autograd.gradgradcheck(run, (x, weight))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", "valid", 1, 4])
def test_padding_modes_equal_explicit_padding(mode, padding):
    options = {"padding": padding, "padding_mode": mode, "stencils": "central"}
    layer = GroupConv2d(1, 2, "p4", dtype=torch.float64, **options)  # 3×3
    pixels = {"same": 1, "valid": 0}.get(padding, padding)
    x = torch.randn(2, 4, 8, 9, dtype=torch.float64)
    padded = functional.pad(x, (pixels,) * 4, mode="constant" if mode == "zeros" else mode)
    wanted = functional.conv2d(padded, layer.filters())
    assert layer.padding == pixels
    assert distance(layer(x), wanted) <= 1e-12
    padded = reference.pad(x, pixels, (mode, mode))
    assert distance(reference.convolve(padded, layer.filters()), wanted) <= 1e-12


@pytest.mark.parametrize("group", ["p4", "p8"])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_padding_is_half_the_extent_on_every_side(group, dilation, stride):
    layer = GroupConv2d(1, 1, group, dilation=dilation, stride=stride)
    extent = dilation * (layer.basis.size - 1) + 1
    assert (layer.extent, layer.padding) == (extent, extent // 2)
    height, width = 13, 18
    out = layer(torch.randn(1, layer.in_channels, height, width))
    assert out.shape[2:] == (-(-height // stride), -(-width // stride))


def test_the_dense_engine_is_the_one_that_runs(monkeypatch):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return convolve(*arguments)

    convolve = dense.convolve
    monkeypatch.setattr(dense, "convolve", counted)
    for engine in ("auto", "dense"):
        GroupConv2d(1, 1, "p4", engine=engine)(torch.randn(1, 4, 5, 5))
    assert len(calls) == 2
    assert engines.check_name("auto") == "auto"
    assert engines.check_name("dense") == "dense"


def test_an_engine_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"unknown engine 'fast'.*'auto'.*'dense'"):
        engines.check_name("fast")


def test_engine_functions_work_on_plain_arrays():
    """The dense functions need no layer: arrays of a basis and a weight suffice."""
    basis = filter_basis("p4", "paper", Central())
    weight = torch.randn(2, 3, 9, dtype=torch.float64)
    known = engines.convolution(basis, (engines.Part("scalar", 3),), "regular", 2)
    synthesis = torch.tensor(dense.tables(known)["synthesis"])
    found = dense.filters(known, engines.Weight(weight, (synthesis,)))
    coefficients = weight @ torch.tensor(basis.to_coefficients(1.0))
    wanted = reference.lift_filters(coefficients, "p4", "paper", "central", 3)
    assert distance(found, wanted) <= 1e-12


@pytest.mark.parametrize("operators", ["paper", "order<=0"])
@pytest.mark.parametrize("target", ["regular", "vector"])
def test_filters_expanded_as_one_kernel_are_the_same(operators, target):
    """What a compiler fuses on a GPU: filters, and the gradient of the weight."""
    basis = filter_basis("p4m", operators, Central())
    known = engines.convolution(basis, (engines.Part("regular", 3),), target, 2)
    tables = tuple(torch.tensor(array) for array in dense.tables(known).values())
    fields = 4 if target == "vector" else 2
    coordinates = len(tables[0])
    weight = torch.randn(fields, 3, 8, coordinates, dtype=torch.float64, requires_grad=True)
    found = {}
    for fused in (None, torch.float64):
        bank = dense.filters(known, engines.Weight(weight, tables), fused)
        (slope,) = torch.autograd.grad(bank.sin().sum(), weight)
        found[fused] = bank, slope
    for one, other in zip(*found.values(), strict=True):
        assert one.shape == other.shape
        assert distance(one, other) <= 1e-13


@pytest.mark.parametrize(
    ("size", "taps", "stride", "padding"),
    [(23, 7, 2, 3), (24, 7, 2, 3), (16, 5, 2, 0), (17, 5, 2, 2), (20, 3, 4, 1), (9, 7, 2, 3)],
)
def test_strided_filters_read_blocks_of_pixels_as_channels(size, taps, stride, padding):
    """What the dense engine makes of lifting layers on a GPU, whose tensor cores want channels."""
    x = torch.randn(2, 3, size, size + 1, dtype=torch.float64, requires_grad=True)
    bank = torch.randn(5, 3, taps, taps, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64)
    wanted = torch.nn.functional.conv2d(x, bank, bias, stride, padding)
    found = dense._on_blocks_of_pixels(x, bank, bias, stride, padding)
    probe = torch.randn_like(wanted)
    ours = (found, *torch.autograd.grad(found, (x, bank), probe))
    theirs = (wanted, *torch.autograd.grad(wanted, (x, bank), probe))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
