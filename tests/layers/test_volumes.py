"""Convolutions of volumes: against the reference, the cube's symmetries, and bad input."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import econv
from econv import (
    Group,
    GroupConv2d,
    GroupConv3d,
    GroupLinear,
    LiftConv2d,
    LiftConv3d,
    VectorConv2d,
    VectorConv3d,
    engines,
    filter_basis,
    reference,
)
from econv.engines import Problem, Prologue
from econv.engines.spectral import native
from econv.layers import PDOConv, PDOConv2d, PDOConv3d, recentre
from econv.plan import spectral_plan
from test_bad_input import rejected
from test_engines import assert_filters_are_the_reference, distance, run_reference

ENGINES = ["dense", "spectral/torch"]
if native.reason(torch.float64) is None:
    ENGINES.append("spectral/native")
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "central": {"stencils": "central"},
    "gaussian": {"stencils": "gaussian"},
    "another gaussian": {"stencils": econv.stencils.Gaussian(0.8)},
    "5³": {"size": 5, "stencils": "gaussian", "padding": 1},
    "isotropic 5³": {"size": 5, "bias": True},
    "third order": {"operators": "order<=3", "padding": 1},
    "own operators": {"operators": [(0, 0, 0), (1, 0, 0), (0, 1, 1)]},
    "points": {"operators": "order<=0", "bias": True},
    "stride": {"stride": 2, "bias": True},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2, "spacing": 0.5},
    "groups": {"groups": 2, "bias": True},
    "circular": {"padding_mode": "circular", "bias": True},
    "replicate": {"padding_mode": "replicate"},
    "reflect": {"padding_mode": "reflect", "stride": 2},
    "periodic slices": {"padding_mode": ("zeros", "circular", "circular")},
    "a pipe": {"padding_mode": ("circular", "replicate", "reflect")},
    "voxels": {"spacing": (2.5, 0.7, 0.7), "bias": True},
    "no two lengths alike": {"spacing": (0.8, 0.5, 0.7), "stencils": "gaussian"},
}
QUICK = [
    *("bias", "gaussian", "isotropic 5³", "points", "stride", "groups"),
    *("periodic slices", "a pipe", "voxels"),
]
LARGE = ["C4v", "D3", "D2d", "T", "Td", "Th", "O"]


def rarely(value):
    return pytest.param(value, marks=pytest.mark.slow)


def layers_with(group, options, fields=1):
    """One layer of each kind, with random coefficients and biases."""
    options = {"dtype": torch.float64, **options}
    fields *= options.get("groups", 1)
    kinds = [
        LiftConv3d(2 * fields, fields, group, **options),
        GroupConv3d(fields, fields, group, **options),
        VectorConv3d(fields, fields, group, **{**options, "bias": False}),
    ]
    if "groups" not in options:
        kinds.append(LiftConv3d(5, 1, group, pseudoscalars=1, vectors=1, **options))
    for layer in kinds:
        if layer.bias is not None:
            nn.init.normal_(layer.bias)
    return kinds


def assert_equal_to_the_reference(layer, x, tolerance=1e-10):
    """Outputs and every gradient, of every engine."""
    inputs = [x.requires_grad_(), *layer.parameters()]
    wanted = run_reference(layer, x)
    probe = torch.randn_like(wanted)
    theirs = [wanted, *torch.autograd.grad(wanted, inputs, probe)]
    for engine in ENGINES:
        with econv.engine(engine) as ran:
            found = layer(x)
        assert ran == [engine]
        ours = [found, *torch.autograd.grad(found, inputs, probe)]
        for a, b in zip(ours, theirs, strict=True):
            assert distance(a, b) <= tolerance * max(1.0, float(b.detach().abs().max()))
            assert float(b.detach().abs().max()) > 1e-3


# Filters, outputs and gradients


@pytest.mark.parametrize(
    "group",
    ["C1", "C3", "C2v", "C2h", *map(rarely, LARGE)],
)
def test_filters_equal_the_reference(group):
    for layer in layers_with(group, {}):
        assert_filters_are_the_reference(layer)


@pytest.mark.parametrize("name", [n if n in QUICK else rarely(n) for n in OPTIONS])
def test_outputs_and_gradients_equal_the_reference(name):
    for layer in layers_with("D2", OPTIONS[name]):
        x = torch.randn(2, layer.in_channels, 5, 6, 7, dtype=torch.float64)
        assert_equal_to_the_reference(layer, x)


@pytest.mark.parametrize("group", ["C3", "C1h", *map(rarely, ("C4", "D3d", "T"))])
def test_outputs_and_gradients_equal_the_reference_in_other_groups(group):
    for layer in layers_with(group, {"bias": True}):
        x = torch.randn(1, layer.in_channels, 4, 3, 5, dtype=torch.float64)
        assert_equal_to_the_reference(layer, x)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["Th", "O", "Oh", "I"])
def test_engines_equal_each_other_in_large_groups(group):
    for layer in layers_with(group, {}):
        x = torch.randn(1, layer.in_channels, 4, 3, 5, dtype=torch.float64, requires_grad=True)
        found = []
        for name in ENGINES:
            with econv.engine(name) as ran:
                y = layer(x)
            assert ran == [name]
            probe = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
            found.append([y, *torch.autograd.grad(y, [x, layer.weight], probe)])
        for others in found[1:]:
            for a, b in zip(others, found[0], strict=True):
                assert distance(a, b) <= 1e-10 * float(b.detach().abs().max())


def test_the_comparison_notices_a_mirrored_z_axis():
    layer = LiftConv3d(1, 1, "D2", dtype=torch.float64)
    layer.synthesis = layer.synthesis.unflatten(-1, (3, 3, 3)).flip(-3).flatten(-3)
    with pytest.raises(AssertionError):
        assert_filters_are_the_reference(layer)


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_the_reference_convolves_as_torch_does(padding_mode):
    x, filters = (torch.randn(*n, dtype=torch.float64) for n in ((2, 4, 5, 6, 7), (4, 2, 3, 3, 3)))
    x = reference.pad(x, 1, (padding_mode, "zeros", "replicate"))
    found = reference.convolve(x, filters, None, stride=2, padding=1, groups=2)
    wanted = nn.functional.conv3d(x, filters, None, stride=2, padding=1, groups=2)
    assert distance(found, wanted) <= 1e-12


@pytest.mark.skipif(len(ENGINES) < 3, reason="no C++ compiler")
@pytest.mark.parametrize("width", [7, 16, 24, *map(rarely, (3, 8, 15, 17, 40, 70))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_runs_every_width(width, dtype):
    options = {"stride": 2, "padding": 2} if width % 2 else {"dilation": 2, "size": 5}
    options |= {"stencils": "gaussian", "dtype": dtype}
    layer = GroupConv3d(1, 2, "C3", **options)
    x = torch.randn(2, 3, 9, 10, width + 8, dtype=dtype, requires_grad=True)
    found = []
    for engine in ("dense", "spectral/native"):
        with econv.engine(engine):
            y = layer(x)
        probe = torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape)
        found.append([y, *torch.autograd.grad(y, [x, layer.weight], probe)])
    for wanted, ours in zip(*found, strict=True):
        scale = float(wanted.detach().abs().max())
        assert distance(wanted, ours) <= (1e-4 if dtype == torch.float32 else 1e-11) * scale


@pytest.mark.skipif(len(ENGINES) < 3, reason="no C++ compiler")
def test_the_kernel_cuts_up_large_volumes():
    # So many channels and lines that regions are parts of slices and of lines.
    layer = GroupConv3d(4, 1, "T", operators=[(0, 0, 0), (0, 1, 0), (1, 0, 1)])
    x = torch.randn(1, 48, 11, 70, 90)
    with torch.no_grad():
        found = [layer.forward(x) for layer.engine in ("dense", "spectral/native")]
    assert distance(*found) <= 1e-4 * float(found[0].abs().max())


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("group", ["C3", "O", "I"])
def test_cube_classes_hold_the_whole_stencils(group, size):
    """The stencils again, from their parts, formed as the kernel forms them."""
    operators = "order<=0" if size == 1 else None
    stencils = spectral_plan(
        filter_basis(group, operators, size=size), "scalar", "regular"
    ).stencils
    start, chosen, adds, factors = native.symmetry_classes(stencils)
    patch = np.random.default_rng(0).normal(size=(size,) * 3)
    r = size // 2

    def split(values):  # along the first axis
        opposite = [(values[r + i], values[r - i]) for i in range(1, r + 1)]
        return [values[r]] + [a + b for a, b in opposite], [a - b for a, b in opposite]

    found, at, seen = np.zeros(len(stencils)), 0, set()
    for which, (y, x, z) in enumerate(itertools.product((0, 1), repeat=3)):
        parts = [
            part
            for slice_ in split(patch)[z]
            for line in split(slice_)[y]
            for part in split(line)[x]
        ]
        for entry in range(start[which], start[which + 1]):
            stencil = int(chosen[entry])
            assert adds[entry] == (stencil in seen)
            seen.add(stencil)
            found[stencil] += factors[at : at + len(parts)] @ parts
            at += len(parts)
    assert at == len(factors)
    np.testing.assert_allclose(found, (stencils * patch).sum(axis=(1, 2, 3)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_first_and_second_order(engine):
    layer = GroupConv3d(1, 1, "C2", operators=[(0, 0, 0), (1, 0, 0)], dtype=torch.float64)
    x = torch.randn(1, 2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    weight = layer.weight.detach().clone().requires_grad_()

    def run(x, weight):
        with econv.engine(engine):
            found = torch.func.functional_call(layer, {"weight": weight}, (x,))
        return found[..., 0, :, 1:].pow(2)

    assert torch.autograd.gradcheck(run, (x, weight))
    assert torch.autograd.gradgradcheck(run, (x, weight))


# What a layer is


def test_names_of_one_implementation():
    for two, three in (
        (LiftConv2d, LiftConv3d),
        (GroupConv2d, GroupConv3d),
        (VectorConv2d, VectorConv3d),
    ):
        assert two.forward is three.forward
        assert two.__init__ is three.__init__
        assert (two.dimension, three.dimension) == (2, 3)
        assert issubclass(two, PDOConv2d)
        assert issubclass(three, PDOConv3d)
        assert issubclass(three, PDOConv)
        assert not issubclass(three, PDOConv2d)
    assert issubclass(VectorConv2d, GroupConv2d)
    assert issubclass(VectorConv3d, GroupConv3d)


def test_a_layer_of_volumes_is_copied_pickled_and_loaded():
    layer = GroupConv3d(1, 2, "D2", bias=True, spacing=(2.0, 1.0, 1.0))
    x = torch.randn(1, 4, 4, 4, 4)
    assert list(layer.state_dict()) == list(GroupConv2d(1, 2, "p4", bias=True).state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    other = GroupConv3d(1, 2, "D2", bias=True, spacing=(2.0, 1.0, 1.0))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert repr(layer) == (
        "GroupConv3d(1, 2, D2, operators='order<=2', stencils='isotropic', size=3, bias=True, "
        "spacing=(2.0, 1.0, 1.0))"
    )
    assert str(layer.convolution) == "D2, 1 regular → 2 regular, 3×3×3"


@pytest.mark.parametrize("spacing", [0.5, (2.5, 0.7, 0.7), (0.8, 0.5, 0.7)])
@pytest.mark.parametrize("stencils", ["isotropic", "central", "gaussian"])
def test_a_derivative_is_the_slope_over_lengths(stencils, spacing):
    layer = LiftConv3d(1, 1, "C1", stencils=stencils, spacing=spacing, dtype=torch.float64)
    dz, dy, dx = spacing if isinstance(spacing, tuple) else (spacing,) * 3
    x, y, z = (np.arange(5.0) - 2) * dx, (2 - np.arange(5.0)) * dy, (np.arange(5.0) - 2) * dz
    z, y, x = np.meshgrid(z, y, x, indexing="ij")
    volume = torch.tensor(3 * x - 2 * y + 0.5 * z + x * z - y**2)[None, None]
    wanted = [0.0, 3.0, -2.0, 0.5, 0.0, 0.0, 1.0, -2.0, 0.0, 0.0]  # 1, x, y, z, xx, xy, xz, yy …
    names = [str(p) for p in layer.basis.operators.polynomials]
    assert names == ["1", "∂x", "∂y", "∂z", "∂xx", "∂xy", "∂xz", "∂yy", "∂yz", "∂zz"]
    for place, value in enumerate(wanted):
        beta = torch.zeros(1, 1, 10, dtype=torch.float64)
        beta[..., place] = 1.0
        layer.set_coefficients(beta)
        assert distance(layer.coefficients(), beta) <= 1e-12
        assert layer(volume)[0, 0, 2, 2, 2].item() == pytest.approx(value, abs=1e-12)


def test_a_vector_conv_can_take_the_gradient_of_a_volume():
    layer = VectorConv3d(1, 1, "O", operators="order<=1", dtype=torch.float64)
    beta = torch.zeros(3, 1, 24, 4, dtype=torch.float64)
    for component in range(3):
        beta[component, 0, 0, 1 + component] = 1 / 24
    layer.set_coefficients(beta)
    z, y, x = torch.meshgrid(*[torch.arange(5.0, dtype=torch.float64)] * 3, indexing="ij")
    volume = (2 * x - 3 * -y + 0.5 * z)[None, None].expand(1, 24, -1, -1, -1)
    found = layer(volume)[0, :, 2, 2, 2]
    torch.testing.assert_close(found, torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64))


def test_a_linear_map_of_features_is_the_pointwise_convolution_in_space():
    linear = GroupLinear(2, 3, "O", dtype=torch.float64)
    conv = GroupConv3d(2, 3, "O", operators="order<=0", bias=True, dtype=torch.float64)
    conv.load_state_dict(linear.state_dict())
    x = torch.randn(2, 48, dtype=torch.float64)
    assert distance(linear(x), conv(x[:, :, None, None, None])[..., 0, 0, 0]) <= 1e-14


@pytest.mark.parametrize("stencils", ["isotropic", "central", "gaussian"])
@pytest.mark.parametrize("group", ["T", "O"])
def test_at_initialisation_layers_keep_the_second_moment(group, stencils):
    order, fields = Group(group).order, 8
    with torch.no_grad(), econv.engine("dense"):
        x = torch.randn(2, fields * order, 8, 8, 8)
        ratios = []
        for _ in range(6):
            layer = GroupConv3d(fields, fields, group, stencils=stencils, padding_mode="circular")
            after = torch.relu(layer(x))
            ratios.append(float(after.square().mean() / x.square().mean()))
            x = after / after.square().mean().sqrt()
    assert 0.8 <= math.exp(np.log(ratios).mean()) <= 1.25
    assert layer.gains().relu == pytest.approx(1.0, abs=1e-6)


# The symmetries of the cube


def sources(size, matrix):
    """Where each voxel of a turned cube comes from: f(A⁻¹p), p = (x, y, z) with y up."""
    z, y, x = np.meshgrid(*[2 * np.arange(size) - size + 1] * 3, indexing="ij")  # in half voxels
    points = np.stack([x, -y, z]).reshape(3, -1)
    back = np.round(matrix.T @ points).astype(int)
    x, y, z = (back[0], -back[1], back[2])
    column, row, layer = ((n + size - 1) // 2 for n in (x, y, z))
    return torch.tensor((layer * size + row) * size + column)


def turned(x, group, element, kind):
    """π of a grid symmetry, by matrices: apart from the library's own."""
    size, matrix = x.shape[-1], group.matrices[element]
    moved = x.flatten(2)[:, :, sources(size, matrix)].view(x.shape)
    if kind == "regular":
        back = group.relative[element].tolist()
        return moved.unflatten(1, (-1, group.order))[:, :, back].flatten(1, 2)
    if kind == "vector":
        return torch.einsum(
            "cd,bvdzyx->bvczyx", torch.tensor(matrix.copy()), moved.unflatten(1, (-1, 3))
        ).flatten(1, 2)
    return moved


def symmetry_error(run, x, group, into, out, elements=None):
    errors = []
    for element in group.grid_symmetries if elements is None else elements:
        first, last = run(turned(x, group, element, into)), turned(run(x), group, element, out)
        errors.append(float((first - last).abs().max() / last.abs().max()))
    return max(errors)


class FieldNorm(nn.Module):
    """A batch norm over fields, by operations of torch."""

    def __init__(self, fields, group):
        super().__init__()
        self.order = Group(group).order
        self.norm = nn.BatchNorm3d(fields, dtype=torch.float64)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        fields = x.unflatten(1, (-1, self.order))
        return self.norm(fields.flatten(2, 3)).view_as(fields).flatten(1, 2)


def network(group, last=GroupConv3d, **options):
    options = {"dtype": torch.float64, **options}
    return nn.Sequential(
        LiftConv3d(1, 2, group, bias=True, **options),
        FieldNorm(2, group),
        nn.ReLU(),
        GroupConv3d(2, 2, group, **options),
        FieldNorm(2, group),
        nn.ReLU(),
        last(2, 1, group, **options),
    )


@pytest.mark.parametrize(
    ("group", "size", "engine"),
    [("O", 5, "dense"), ("O", 6, "spectral/torch"), ("Oh", 4, "dense"), ("Oh", 5, "dense")],
)
def test_networks_have_the_symmetries_of_the_cube(group, size, engine):
    group = Group(group)
    assert len(group.grid_symmetries) == group.order
    x = torch.randn(1, 1, *[size] * 3, dtype=torch.float64)
    model = network(group).eval()
    with torch.no_grad(), econv.engine(engine):
        assert symmetry_error(model, x, group, "scalar", "regular", group.generators) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "train"),
    [
        ({}, False),
        ({}, True),
        ({"stencils": "central"}, False),
        ({"size": 5, "stencils": "gaussian"}, False),
        ({"stride": 2, "centred": True}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("group", ["O", "Oh"])
def test_networks_have_all_symmetries_of_the_cube(group, size, options, train):
    group = Group(group)
    model = network(group, **options).train(train)
    size += 6 * ("stride" in options)
    x = torch.randn(1, 1, *[size] * 3, dtype=torch.float64)
    with torch.no_grad(), econv.engine("dense"):
        assert symmetry_error(model, x, group, "scalar", "regular") <= 1e-12


def test_vectors_have_the_symmetries_of_the_cube():
    group = Group("Oh")
    lift = LiftConv3d(4, 1, group, vectors=1, dtype=torch.float64)
    drop = VectorConv3d(1, 1, group, dtype=torch.float64)
    scalar, vector = torch.randn(2, 3, 5, 5, 5, dtype=torch.float64)[:, None].unbind(0)

    def both(vector):
        return lift(torch.cat([scalar[:, :1], vector], 1))

    with torch.no_grad(), econv.engine("dense"):
        for element in group.generators:
            moved = torch.cat(
                [
                    turned(scalar[:, :1], group, element, "scalar"),
                    turned(vector, group, element, "vector"),
                ],
                1,
            )
            found, wanted = lift(moved), turned(both(vector), group, element, "regular")
            assert distance(found, wanted) <= 1e-12
            features = both(vector)
            found = drop(turned(features, group, element, "regular"))
            assert distance(found, turned(drop(features), group, element, "vector")) <= 1e-12
            if np.linalg.det(group.matrices[element]) < 0:
                wrong = turned(drop(features), group, element, "scalar")
                assert distance(found, wrong) > 1e-3


def test_the_measure_of_symmetry_can_say_no():
    group = Group("O")
    plain = nn.Conv3d(1, 24, 3, padding=1, dtype=torch.float64)
    x = torch.randn(1, 1, 5, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        assert symmetry_error(plain, x, group, "scalar", "regular", group.generators) > 0.1
        lift = LiftConv3d(1, 1, group, stride=2, dtype=torch.float64)
        even = torch.randn(1, 1, 6, 6, 6, dtype=torch.float64)
        assert symmetry_error(lift, even, group, "scalar", "regular", group.generators) > 0.1
        assert symmetry_error(lift, x, group, "scalar", "regular", group.generators) <= 1e-12
        centred = LiftConv3d(1, 1, group, stride=2, centred=True, dtype=torch.float64)
        assert symmetry_error(centred, even, group, "scalar", "regular", group.generators) <= 1e-12


def test_long_voxels_keep_what_their_grid_keeps():
    group, x = Group("O"), torch.randn(1, 1, 5, 5, 5, dtype=torch.float64)
    lift = LiftConv3d(1, 1, group, spacing=(2.0, 1.0, 1.0), dtype=torch.float64)
    about_z = [g for g in range(24) if abs(abs(group.matrices[g][2, 2]) - 1) < 1e-9]
    others = sorted(set(range(24)) - set(about_z))
    assert len(about_z) == 8
    with torch.no_grad():
        assert symmetry_error(lift, x, group, "scalar", "regular", about_z) <= 1e-12
        for element in others:
            assert symmetry_error(lift, x, group, "scalar", "regular", [element]) > 1e-3


@pytest.mark.parametrize("sizes", [(5, 6, 4), (4, 4, 3)])
def test_recentring_volumes_is_the_reference(sizes):
    x = torch.randn(2, 3, 5, 5, 4, dtype=torch.float64)
    assert distance(recentre(x, *sizes), reference.recentre(x, *sizes)) <= 1e-15


# Compilers, layouts, dtypes


@pytest.mark.parametrize("kind", [econv.CentredAvgPool3d, econv.CentredMaxPool3d])
def test_half_precision_pools_on_the_cpu(kind):
    """torch has no kernel of its own for means of volumes in float16 there."""
    x = torch.randn(1, 2, 5, 4, 5, requires_grad=True)
    wanted = kind(2)(x)
    found = kind(2)(x.half())
    assert found.dtype == torch.float16
    assert distance(found.float(), wanted) <= 1e-2
    found.sum().backward()
    assert x.grad.isfinite().all()


def test_means_of_volumes_take_windows_that_fit_with_their_padding_alone():
    x = torch.randn(1, 2, 5, 6, 2)
    counted = econv.CentredAvgPool3d(3, 1, 1)
    wanted = torch.nn.functional.conv3d(x[:, :1], torch.full((1, 1, 3, 3, 3), 1 / 27), padding=1)
    torch.testing.assert_close(counted(x)[:, :1], wanted)
    uncounted = econv.CentredAvgPool3d(3, 1, 1, ceil_mode=True, count_include_pad=False)
    torch.testing.assert_close(uncounted(torch.ones_like(x)), torch.ones_like(x))


def test_a_compiled_layer_is_the_same():
    layer = GroupConv3d(1, 1, "D2", dtype=torch.float64, bias=True)
    x = torch.randn(1, 4, 4, 5, 4, dtype=torch.float64, requires_grad=True)
    for engine in ENGINES:
        with econv.engine(engine):
            found, wanted = torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x)
            assert distance(found, wanted) <= 1e-12
            probe = torch.randn_like(wanted)
            ours = torch.autograd.grad(found, [x, layer.weight], probe)
            theirs = torch.autograd.grad(wanted, [x, layer.weight], probe)
        for a, b in zip(ours, theirs, strict=True):
            assert distance(a, b) <= 1e-10 * float(b.abs().max())


@pytest.mark.parametrize("engine", ["auto", "spectral"])
def test_an_exported_layer_is_the_same_on_every_size(engine):
    layer = LiftConv3d(4, 1, "C3v", vectors=1, bias=True, dtype=torch.float64, engine=engine)
    x, other = (torch.randn(2, 4, *s, dtype=torch.float64) for s in ((4, 5, 6), (5, 4, 7)))
    size = {n: torch.export.Dim(f"size{n}", min=3) for n in (2, 3, 4)}
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: None, **size},))
    assert distance(program.module()(other), layer(other)) <= 1e-12


@pytest.mark.parametrize("engine", ENGINES)
def test_channels_last_in_is_channels_last_out_with_the_same_values(engine):
    layer = GroupConv3d(1, 2, "D2", dtype=torch.float64, engine=engine, stride=2, centred=True)
    x = torch.randn(2, 4, 5, 6, 4, dtype=torch.float64)
    last = x.to(memory_format=torch.channels_last_3d)
    assert distance(layer(last), layer(x)) <= 1e-12
    assert layer(last).is_contiguous(memory_format=torch.channels_last_3d)
    assert layer(x).is_contiguous()


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_runs_forward_and_backward(engine):
    layer, x = GroupConv3d(1, 1, "D2", engine=engine), torch.randn(1, 4, 4, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    found.float().square().mean().backward()
    assert layer.weight.grad.dtype == torch.float32
    wanted = layer(x)
    assert ((found - wanted).norm() / wanted.norm()).item() <= 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_meta_devices_and_empty_batches(engine):
    with torch.device("meta"):
        layer = GroupConv3d(1, 2, "D2", engine="dense")
        assert layer(torch.empty(1, 4, 4, 4, 4)).shape == (1, 8, 4, 4, 4)
    layer = GroupConv3d(1, 2, "D2", engine=engine)
    assert layer(torch.empty(0, 4, 4, 4, 4)).shape == (0, 8, 4, 4, 4)


def test_a_prologue_is_applied_to_volumes():
    x, affine = torch.randn(2, 8, 3, 3, 3), torch.randn(3, 2)
    centre, scale, shift = affine.repeat_interleave(4, 1)[:, None, :, None, None, None]
    torch.testing.assert_close(Prologue(affine).apply(x), torch.relu((x - centre) * scale + shift))


def test_engines_say_which_volumes_they_do_not_run():
    layer, x = GroupConv3d(1, 1, "D2"), torch.randn(1, 4, 4, 4, 4)
    problem = Problem.of(layer.convolution, x, layer.weight)
    assert engines.ENGINES["spectral/hopper"].why_not(problem) == "it serves images only"
    wide = GroupConv3d(1, 1, "D2", size=7, stencils="gaussian")
    problem = Problem.of(wide.convolution, torch.randn(1, 4, 8, 8, 8), wide.weight)
    reason = engines.ENGINES["spectral/native"].why_not(problem)
    assert reason == "it knows stencils of up to 5×5×5; these are 7×7×7"
    for name in ("spectral/triton", "spectral/hopper"):
        with (
            econv.engine(name),
            pytest.raises(ValueError, match=r"it serves images only|NVIDIA|installed"),
        ):
            layer(x)


# Bad input


def test_layers_say_what_volumes_they_expect():
    lift, conv = LiftConv3d(2, 1, "O"), GroupConv3d(2, 1, "O", size=5)
    rank = "expected a tensor [batch, channels, depth, height, width]"
    rejected(rank, "4 dimensions: (1, 2, 8, 8)", lift, torch.randn(1, 2, 8, 8))
    rejected(rank, "4 dimensions: (2, 8, 8, 8)", lift, torch.randn(2, 8, 8, 8))
    rank = "expected a tensor [batch, channels, height, width]"
    rejected(rank, "5 dimensions", LiftConv2d(2, 1, "p4"), torch.randn(1, 2, 8, 8, 8))
    rejected("expected 2 volume channels", "got 3 channels", lift, torch.randn(1, 3, 8, 8, 8))
    rejected("48 channels (2 fields of O)", "got 24 channels", conv, torch.randn(1, 24, 8, 8, 8))
    least = "expected a volume of at least 5×5×5 voxels"
    rejected(least, "got 8×4×8", conv, torch.randn(1, 48, 8, 4, 8))
    rejected(
        "expected a volume of at least 3×3×3 voxels", "2×8×8", lift, torch.randn(1, 2, 2, 8, 8)
    )
    wide = LiftConv3d(1, 1, "T", padding=6, padding_mode=("zeros", "circular", "zeros"))
    assert wide(torch.randn(1, 1, 4, 6, 4)).shape[2:] == (14, 16, 14)
    rejected("larger than the padding of 6", "got 6×4×6", wide, torch.randn(1, 1, 6, 4, 6))


@pytest.mark.parametrize(
    ("two", "three"),
    [(LiftConv2d, LiftConv3d), (GroupConv2d, GroupConv3d), (VectorConv2d, VectorConv3d)],
)
def test_groups_of_another_space_are_refused(two, three):
    rejected("expected a group of space, such as 'O' or 'Ih'", "got 'p8'", three, 3, 3, "p8")
    rejected("expected a group of the plane, such as 'p4' or 'p8m'", "got 'O'", two, 2, 2, "O")
    rejected("operators in 3 dimensions", "'paper' has 2", three, 3, 3, "O", operators="paper")
    for spacing in ((1.0, 2.0), (1.0, 2.0, 3.0, 4.0), (1.0, 0.0, 1.0), "wide", (1.0, True, 1.0)):
        rejected("or three of them for (z, y, x)", repr(spacing), three, 3, 3, "O", spacing=spacing)
    rejected(
        "or a pair of them for (y, x)", "(1.0, 2.0, 3.0)", two, 2, 2, "p4", spacing=(1.0, 2.0, 3.0)
    )
    for mode in (("zeros", "circular"), ("zeros", "circular", "wrap"), "wrap"):
        rejected("or three of them for (z, y, x)", repr(mode), three, 3, 3, "O", padding_mode=mode)
    modes = ("zeros", "zeros", "circular")
    rejected("or a pair of them for (y, x)", repr(modes), two, 2, 2, "p4", padding_mode=modes)


def test_vectors_of_space_take_three_channels():
    rejected("between 0 and in_channels / 3 = 1", "got 2", LiftConv3d, 5, 1, "O", vectors=2)
    rejected(
        "between 0 and 2, the channels", "got 3", LiftConv3d, 5, 1, "O", vectors=1, pseudoscalars=3
    )
    assert str(LiftConv3d(5, 1, "O", vectors=1).convolution.parts) == (
        "(Part(kind='scalar', fields=2), Part(kind='vector', fields=1))"
    )
