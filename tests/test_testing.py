"""The checkers: they measure what they say, and they reject what is broken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from torch import nn
from torch.nn import functional

from econv import (
    Central,
    Group,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupPool2d,
    LiftConv2d,
    LiftConv3d,
    Polynomial,
    VectorConv2d,
    VectorConv3d,
    central,
    restrict,
)
from econv.engines.dense import filter_offsets
from econv.testing import (
    _on_grid,
    assert_equivariant,
    convergence_order,
    equivariance_error,
    random_rotations,
    rotate,
    smooth_field,
    transform,
)

DOUBLE = {"dtype": torch.float64}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def channels_of(kind: str, group: Group) -> int:
    return {"scalar": 3, "regular": 2 * group.order, "vector": 4}[kind]


# transform: the group acts


@pytest.mark.parametrize("kind", ["scalar", "regular", "vector"])
@pytest.mark.parametrize("name", ["p4", "p4m", "p2m", "p6m", "p8m"])
@pytest.mark.parametrize("shape", [(6, 6), (5, 5), (4, 7)])
def test_grid_symmetries_compose_exactly_as_the_group_does(name, kind, shape):
    group = Group(name)
    x = noise(2, channels_of(kind, group), *shape)
    for a in group.grid_symmetries:
        for b in group.grid_symmetries:
            twice = transform(transform(x, group, b, kind), group, a, kind)
            once = transform(x, group, int(group.product[a, b]), kind)
            assert torch.equal(twice, once)


@pytest.mark.parametrize("kind", ["scalar", "regular", "vector"])
@pytest.mark.parametrize("name", ["p1", "p4m", "p8m"])
def test_the_identity_changes_nothing_and_other_grid_symmetries_do(name, kind):
    group = Group(name)
    x = noise(1, channels_of(kind, group), 5, 5)
    unchanged = [e for e in group.grid_symmetries if torch.equal(transform(x, group, e, kind), x)]
    assert unchanged == [0]


@pytest.mark.parametrize("kind", ["scalar", "regular", "vector"])
@pytest.mark.parametrize("name", ["p8", "p6", "p8m"])
def test_other_elements_compose_to_interpolation_accuracy(name, kind):
    group = Group(name)
    x = smooth_field(41, channels_of(kind, group), smoothness=4.0)
    inside = (slice(None), slice(None), slice(14, 27), slice(14, 27))
    for a, b in [(1, 1), (1, group.order - 1), (group.order - 1, 1)]:
        twice = transform(transform(x, group, b, kind), group, a, kind)[inside]
        once = transform(x, group, int(group.product[a, b]), kind)[inside]
        assert (twice - once).norm() < 1e-5 * once.norm()
        wrong = transform(x, group, int(group.product[a, group.inverse[b]]), kind)[inside]
        if group.inverse[b] != b:
            assert (twice - wrong).norm() > 0.1 * once.norm()


# transform: direction and kinds


def test_element_one_of_p4_turns_the_right_side_to_the_top():
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 4] = 1.0  # right
    seen = [transform(x, "p4", element)[0, 0].nonzero().tolist() for element in range(4)]
    assert seen == [[[2, 4]], [[0, 2]], [[2, 0]], [[4, 2]]]  # right, top, left, bottom


def test_the_reflection_turns_the_top_to_the_bottom():
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 0, 1] = 1.0
    assert transform(x, "p1m", 1)[0, 0].nonzero().tolist() == [[4, 1]]
    # In pnm the reflection comes first, the turn after it.
    assert transform(x, "p4m", 5)[0, 0].nonzero().tolist() == [[3, 4]]


@pytest.mark.parametrize("size", [40, 41])
def test_element_one_of_p8_turns_the_right_side_to_the_upper_right(size):
    line = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    right, up = line[None, :], -line[:, None]

    def blob(x, y):
        return torch.exp(-((right - x) ** 2 + (up - y) ** 2) / 8)[None, None]

    diagonal = 8 * math.sqrt(0.5)
    assert torch.allclose(transform(blob(8, 0), "p8", 1), blob(diagonal, diagonal), atol=1e-4)
    assert torch.allclose(transform(blob(8, 0), "p8m", 9), blob(diagonal, diagonal), atol=1e-4)
    assert torch.allclose(transform(blob(0, 8), "p8m", 9), blob(diagonal, -diagonal), atol=1e-4)


@pytest.mark.parametrize("name", ["p8", "p8m"])
def test_orientations_are_permuted_by_the_inverse_element_from_the_left(name):
    group = Group(name)
    x = torch.zeros(1, 2 * group.order, 5, 5, dtype=torch.float64)
    x[0, :, 2, 2] = torch.arange(2.0 * group.order)  # the centre stays where it is
    for element in range(group.order):
        sources = np.linalg.inv(group.matrices[element]) @ group.matrices
        expected = [int(np.abs(group.matrices - s).sum(axis=(1, 2)).argmin()) for s in sources]
        turned = transform(x, group, element, "regular")[0, :, 2, 2].unflatten(0, (2, -1))
        assert turned[0].tolist() == pytest.approx(expected, abs=1e-9)
        assert turned[1].tolist() == pytest.approx([group.order + e for e in expected], abs=1e-9)


def test_in_p8_element_one_rolls_the_orientations_by_one():
    x = torch.arange(8.0, dtype=torch.float64).reshape(1, 8, 1, 1).expand(1, 8, 5, 5)
    turned = transform(x, "p8", 1, "regular")[0, :, 2, 2]
    assert turned.tolist() == pytest.approx([7, 0, 1, 2, 3, 4, 5, 6], abs=1e-9)


def test_a_vector_to_the_right_becomes_one_pointing_up():
    right = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    right[:, 0] = 1.0
    assert transform(right, "p4", 1, "vector")[0, :, 1, 1].tolist() == [0.0, 1.0]
    assert transform(right, "p4m", 5, "vector")[0, :, 1, 1].tolist() == [0.0, 1.0]
    up = right.flip(1)
    assert transform(up, "p4", 1, "vector")[0, :, 1, 1].tolist() == [-1.0, 0.0]
    assert transform(up, "p4m", 4, "vector")[0, :, 1, 1].tolist() == [0.0, -1.0]


def test_the_pixels_of_a_vector_field_move_too():
    field = torch.zeros(1, 4, 5, 5)
    field[0, 2, 2, 4] = 1.0  # the second vector, at the right border, points right
    turned = transform(field, "p4", 1, "vector")
    assert turned[0].nonzero().tolist() == [[3, 0, 2]]  # at the top, it points up
    assert turned[0, 3, 0, 2] == 1.0


def test_a_diagonal_turn_of_a_vector():
    right = torch.zeros(1, 2, 9, 9, dtype=torch.float64)
    right[:, 0] = 1.0
    turned = transform(right, "p8", 1, "vector")[0, :, 4, 4]
    assert turned.tolist() == pytest.approx([math.sqrt(0.5)] * 2, abs=1e-12)


def test_an_invariant_of_any_shape_stays():
    scores = noise(3, 10)
    assert transform(scores, "p8m", 11, "invariant") is scores


def test_quarter_turns_swap_height_and_width():
    x = noise(1, 1, 3, 5)
    assert transform(x, "p4", 1).shape[-2:] == (5, 3)
    assert transform(x, "p4", 2).shape[-2:] == (3, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("element", [1, 2])
def test_transform_keeps_the_dtype(dtype, element):
    assert transform(noise(1, 2, 6, 6).to(dtype), "p8", element, "vector").dtype == dtype


# transform: interpolation


def scipy_turn(image: np.ndarray, angle: float, mirrored: bool) -> np.ndarray:
    """r(A⁻¹x) by scipy's quintic splines, A the reflection (if any) and then the turn."""
    height, width = image.shape
    rows, columns = np.mgrid[:height, :width]
    middle = (width - 1) / 2 - 1j * (height - 1) / 2
    source = (columns - 1j * rows - middle) * np.exp(-1j * angle)
    source = (source.conj() if mirrored else source) + middle
    turned = ndimage.map_coordinates(image, [-source.imag, source.real], order=5, mode="mirror")
    slack = 1e-9
    inside = (source.real >= -slack) & (source.real <= width - 1 + slack)
    inside &= (source.imag <= slack) & (source.imag >= 1 - height - slack)
    return np.where(inside, turned, 0.0)


@pytest.mark.parametrize("shape", [(17, 17), (16, 16), (12, 19), (21, 14)])
@pytest.mark.parametrize(
    ("name", "elements"),
    [("p8", [1, 3, 5, 7]), ("p8m", [9, 11, 13, 15]), ("p12", [1, 5]), ("p6m", [7, 8, 10])],
)
def test_interpolation_is_scipys_quintic_spline(name, elements, shape):
    group = Group(name)
    x = noise(2, 3, *shape)
    for element in elements:
        angle = 2 * math.pi * (element % group.rotations) / group.rotations
        mirrored = element >= group.rotations
        turned = transform(x, group, element)
        for image, result in zip(x.flatten(0, 1), turned.flatten(0, 1), strict=True):
            expected = scipy_turn(image.numpy(), angle, mirrored)
            np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-10)


def test_where_no_image_was_there_are_zeros():
    turned = transform(torch.ones(1, 1, 21, 21, dtype=torch.float64), "p8", 1)[0, 0]
    corners = [turned[i, j].item() for i in (0, -1) for j in (0, -1)]
    assert corners == [0.0] * 4
    assert turned[10, 10].item() == pytest.approx(1.0, abs=1e-12)


def test_interpolation_is_a_thousand_times_finer_than_bicubic_sampling():
    size, group = 65, Group("p8")
    line = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    generator = np.random.default_rng(0)
    blobs = generator.uniform(-12, 12, (30, 2)), generator.normal(size=30)

    def field(right, up):
        bumps = [
            amplitude * torch.exp(-((right - x) ** 2 + (up - y) ** 2) / (2 * 2.5**2))
            for (x, y), amplitude in zip(*blobs, strict=True)
        ]
        return torch.stack(bumps).sum(0)

    right, up = line.expand(size, size), -line[:, None].expand(size, size)
    inverse = group.matrices[1].T
    source_right = inverse[0, 0] * right + inverse[0, 1] * up
    source_up = inverse[1, 0] * right + inverse[1, 1] * up
    exact = field(source_right, source_up)
    image = field(right, up)[None, None]
    grid = torch.stack([source_right, -source_up], dim=-1)[None] / ((size - 1) / 2)
    bicubic = functional.grid_sample(image, grid, mode="bicubic", align_corners=True)
    disc = right**2 + up**2 <= 20.0**2
    quintic_error = (transform(image, group, 1)[0, 0] - exact)[disc].norm()
    bicubic_error = (bicubic[0, 0] - exact)[disc].norm()
    assert bicubic_error < 0.02 * exact[disc].norm()  # bicubic sampling was called rightly
    assert bicubic_error > 1000 * quintic_error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(1, 3, 4, 4), "p4", 1, "tensor"), "unknown kind"),
        ((torch.zeros(1, 3, 4, 4), "p4", 4), "from 0 to 3; got 4"),
        ((torch.zeros(1, 3, 4, 4), "p4", -1), "from 0 to 3; got -1"),
        ((torch.zeros(3, 4, 4), "p4", 1), r"\[batch, channels, height, width\]"),
        ((torch.zeros(1, 3, 4, 4), "p4", 1, "vector"), "multiples of 2"),
        ((torch.zeros(1, 12, 4, 4), "p8", 1, "regular"), "multiples of 8"),
        ((torch.zeros(1, 3, 4, 4), "q4", 1), "unknown group"),
        ((torch.zeros(1, 8, 4, 4), "p1", 0, [[1, 2]]), r"pairs such as .*; got \[\[1, 2\]\]"),
        ((torch.zeros(1, 3, 4, 4), "p4", 1, [("scalar", 1.5)]), "pairs such as"),
        ((torch.zeros(1, 3, 4, 4), "p4", 1, [("scalar", 4), ("scalar", -1)]), r"for \["),
    ],
)
def test_transform_refuses_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        transform(*arguments)


# equivariance_error and assert_equivariant: what they measure


@pytest.mark.parametrize("element", range(16))
def test_what_commutes_has_no_error(element):
    x = noise(1, 32, 9, 9)
    assert equivariance_error(lambda e: 3 * e, x, element, "p8m", input_kind="regular") < 1e-14
    if element in Group("p8m").grid_symmetries:
        assert equivariance_error(torch.square, x, element, "p8m", input_kind="regular") == 0.0


def test_the_error_is_relative_to_the_turned_output():
    x = noise(1, 1, 6, 6)

    def blemished(image):
        """Adds the same pattern to every image, whichever way it is turned."""
        pattern = torch.zeros_like(image)
        pattern[..., 0, 1] = 0.25
        return image + pattern

    error = equivariance_error(blemished, x, 1, "p4", output_kind="scalar")
    turned = transform(blemished(x), "p4", 1)
    assert error == pytest.approx(math.sqrt(2) * 0.25 / turned.norm().item(), rel=1e-12)


def test_a_vanishing_output_has_no_error_unless_only_one_side_vanishes():
    x = noise(1, 1, 6, 6)
    assert equivariance_error(torch.zeros_like, x, 1, "p4", output_kind="scalar") == 0.0

    calls = []

    def vanishes_later(image):
        calls.append(image)
        return image if len(calls) == 1 else torch.zeros_like(image)

    assert equivariance_error(vanishes_later, x, 1, "p4", output_kind="scalar") == math.inf


def test_kinds_and_group_are_what_the_layer_says_of_itself():
    x = noise(1, 2, 9, 9)
    wind = LiftConv2d(2, 2, "p4m", vectors=1, **DOUBLE)
    flow = VectorConv2d(2, 1, "p4m", **DOUBLE)
    for element in range(8):
        assert equivariance_error(wind, x, element) < 1e-12
        assert equivariance_error(flow, wind(x).detach(), element) < 1e-12
    assert equivariance_error(wind, x, 1, input_kind="scalar") > 0.1
    assert equivariance_error(flow, wind(x).detach(), 1, output_kind="scalar") > 0.1


def test_an_output_that_is_no_image_must_not_change_at_all():
    lift, pool = LiftConv2d(1, 3, "p4m", **DOUBLE), GroupPool2d("p4m")
    x = noise(2, 1, 9, 9)
    assert_equivariant(lambda r: pool(lift(r)).mean(dim=(2, 3)), x, "p4m")
    with pytest.raises(AssertionError, match="not equivariant to p4m"):
        assert_equivariant(lambda r: lift(r).mean(dim=(2, 3)), x, "p4m")


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_and_random_numbers_are_left_as_they_were(training):
    network = nn.Sequential(
        LiftConv2d(1, 4, "p4", **DOUBLE),
        GroupBatchNorm2d(4, "p4", **DOUBLE),
        GroupDropout2d("p4", p=0.5),
    ).train(training)
    x = noise(3, 1, 8, 8)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    random_state = torch.get_rng_state()
    for element in range(4):
        # Without the same random numbers in both passes, dropout alone would give an error near 1.
        assert equivariance_error(network, x, element, "p4") < 1e-12
    assert torch.equal(torch.get_rng_state(), random_state)
    after = network.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert network.training is training
    network(x)
    moved = not torch.equal(network.state_dict()["1.running_mean"], before["1.running_mean"])
    assert moved is training


def test_the_state_is_restored_when_the_module_raises():
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            torch.rand(1)
            raise RuntimeError("as meant")

    module, random_state = Fails(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="as meant"):
        equivariance_error(module, noise(1, 1, 4, 4), 1, "p4")
    assert module.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), random_state)


def test_at_other_angles_the_border_counts_only_without_margin():
    size = 64
    line = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    at_right_border = (line > 26)[None, :] & (line.abs() < 16)[:, None]

    def spoils_the_border(x):
        return x * ~at_right_border

    x = smooth_field(size)
    kinds = {"input_kind": "scalar", "output_kind": "scalar"}
    inside = equivariance_error(spoils_the_border, x, 1, "p8", **kinds)
    wide = equivariance_error(spoils_the_border, x, 1, "p8", margin=0.0, **kinds)
    assert inside < 1e-4
    assert wide > 0.05
    # Quarter turns are exact up to the border, and so is the check.
    assert equivariance_error(spoils_the_border, x, 2, "p8", **kinds) > 0.05


def test_the_error_of_a_layer_shrinks_with_the_smoothness_of_the_image():
    layer = LiftConv2d(1, 2, "p8", stencils="central", **DOUBLE)
    errors = [
        equivariance_error(layer, smooth_field(49, smoothness=smoothness), element=1)
        for smoothness in (1.0, 2.0, 4.0)
    ]
    assert errors[0] > 3 * errors[1] > 9 * errors[2] > 0


def test_assert_equivariant_accepts_layers_and_names_the_errors_of_others():
    x = smooth_field(33)
    layer = LiftConv2d(1, 2, "p8", stencils="central", **DOUBLE)
    assert_equivariant(layer, x)
    assert_equivariant(layer, x, elements=range(8), tolerance=0.1)
    with pytest.raises(AssertionError) as caught:
        assert_equivariant(layer, x, elements=[1, 2], tolerance=1e-9)
    lines = str(caught.value).splitlines()
    assert lines[0] == "not equivariant to p8 within 1.0e-09:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["element 1", "element 2"]
    assert float(lines[1].split(": ")[1]) > 1e-9 > float(lines[2].split(": ")[1])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_tolerance_follows_the_dtype(dtype, tolerance, factor):
    x = torch.ones(1, 1, 4, 4, dtype=dtype)
    calls = []

    def off_by_a_factor(image):
        """Answers in float64, so that the error is the one asked for."""
        calls.append(image)
        return image.double() * (1 + factor * tolerance * (len(calls) % 2))

    check = {"elements": [1], "output_kind": "scalar"}
    if factor < 1:
        assert_equivariant(off_by_a_factor, x, "p4", **check)
    else:
        with pytest.raises(AssertionError):
            assert_equivariant(off_by_a_factor, x, "p4", **check)


def test_elements_off_the_grid_need_a_tolerance():
    layer = LiftConv2d(1, 2, "p8", **DOUBLE)
    with pytest.raises(ValueError, match=r"expected a tolerance .* \(0, 2, 4, 6\)"):
        assert_equivariant(layer, smooth_field(16), elements=[0, 1])


def test_a_module_without_a_group_is_refused():
    with pytest.raises(ValueError, match="Identity has no attribute 'group'"):
        equivariance_error(nn.Identity(), noise(1, 1, 4, 4), 1)


def test_outputs_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="expected the same"):
        equivariance_error(
            lambda x: x[..., 1:, :], noise(1, 1, 4, 4), 1, "p4", output_kind="scalar"
        )


# equivariance_error and assert_equivariant: what they reject


def rejects(module, x, group, **kinds) -> float:
    """The largest error over the grid symmetries of a module that must be rejected."""
    with pytest.raises(AssertionError, match="not equivariant"):
        assert_equivariant(module, x, group, **kinds)
    found = Group(group)
    return max(equivariance_error(module, x, e, found, **kinds) for e in found.grid_symmetries)


def with_table(name: str, table) -> GroupConv2d:
    """A layer whose output A reads input B through table(A, B) in place of A⁻¹B."""
    layer = GroupConv2d(2, 2, name, engine="dense", **DOUBLE)
    order = layer.group.order
    relative = np.array([[table(a, b) for b in range(order)] for a in range(order)])
    layer.offsets = torch.tensor(filter_offsets(relative, layer.in_fields))
    return layer


@pytest.mark.parametrize("name", ["p4m", "p8m"])
@pytest.mark.parametrize("left", [True, False], ids=["B·A⁻¹", "A·B⁻¹"])
def test_a_transposed_product_table_is_rejected(name, left):
    group = Group(name)

    def table(a, b):
        return int(
            group.product[b, group.inverse[a]] if left else group.product[a, group.inverse[b]]
        )

    x = noise(1, 2 * group.order, 9, 9)
    assert rejects(with_table(name, table), x, name) > 0.1


@pytest.mark.parametrize("name", ["p4", "p4m"])
def test_a_table_that_only_renames_the_weights_is_accepted(name):
    group = Group(name)
    x = noise(1, 2 * group.order, 9, 9)
    assert_equivariant(with_table(name, lambda a, b: int(group.relative[a, b])), x)
    assert_equivariant(with_table(name, lambda a, b: int(group.relative[b, a])), x)


@dataclass(frozen=True)
class MirroredRows(Central):
    """Central differences that take y to point down."""

    guarded: bool = True

    def weights(self, exponents, size):
        return super().weights(exponents, size)[::-1]

    def stencil(self, operator, size=None):
        if self.guarded:
            return super().stencil(operator, size)
        (exponents, _), *others = operator.terms
        assert not others
        return SimpleNamespace(weights=self.weights(exponents, size))


def test_a_mirrored_y_axis_cannot_become_a_stencil():
    with pytest.raises(ArithmeticError, match="moment"):
        MirroredRows().stencil(Polynomial.monomial((0, 1)))


@pytest.mark.parametrize("name", ["p4", "p4m", "p8"])
def test_a_mirrored_y_axis_is_rejected(name):
    broken = MirroredRows(guarded=False)
    x = noise(1, 1, 9, 9)
    assert rejects(LiftConv2d(1, 2, name, stencils=broken, **DOUBLE), x, name) > 0.1
    features = noise(1, 2 * Group(name).order, 9, 9)
    assert rejects(GroupConv2d(2, 2, name, stencils=broken, **DOUBLE), features, name) > 0.1
    assert_equivariant(LiftConv2d(1, 2, name, stencils=Central(), **DOUBLE), x)


def randomised(norm: nn.Module) -> nn.Module:
    for i, tensor in enumerate([norm.weight, norm.bias, norm.running_mean, norm.running_var]):
        tensor.data.copy_(noise(*tensor.shape, seed=i).abs() + 0.1)
    return norm


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_per_orientation_is_rejected(training):
    x = noise(2, 12, 6, 6)
    plain = randomised(nn.BatchNorm2d(12, **DOUBLE)).train(training)
    assert rejects(plain, x, "p4", input_kind="regular") > 0.1
    assert_equivariant(randomised(GroupBatchNorm2d(3, "p4", **DOUBLE)).train(training), x)


def test_restriction_by_interleaving_is_rejected():
    lift = LiftConv2d(1, 2, "p8m", **DOUBLE)
    interleaved = [*range(0, 16, 2), *range(1, 16, 2)]
    x = noise(1, 1, 9, 9)

    def broken(r):
        return lift(r).unflatten(1, (-1, 16))[:, :, interleaved].flatten(1, 2)

    assert rejects(broken, x, "p4m") > 0.1
    assert_equivariant(lambda r: restrict(lift(r), "p8m", "p4m"), x, "p4m")


@pytest.mark.parametrize("pad", [(1, 2, 1, 2), (2, 1, 2, 1), (2, 2, 1, 2)])
def test_unequal_padding_is_rejected(pad):
    layer = LiftConv2d(1, 2, "p4", stencils="central", padding="valid", **DOUBLE)
    x = noise(1, 1, 8, 8)
    if pad[0] + pad[1] == pad[2] + pad[3]:
        assert rejects(lambda r: layer(functional.pad(r, pad)), x, "p4") > 0.1
    else:
        with pytest.raises(ValueError, match="expected the same"):
            assert_equivariant(lambda r: layer(functional.pad(r, pad)), x, "p4")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_an_output_that_is_not_finite_is_rejected(bad, everywhere):
    def spoils(x):
        result = x.clone()
        if everywhere:
            return result.fill_(bad)
        result[..., 2, 2] = bad
        return result

    x = noise(1, 1, 5, 5)
    with pytest.raises(AssertionError):
        assert_equivariant(spoils, x, "p4", output_kind="scalar")
    with pytest.raises(AssertionError):
        assert_equivariant(
            spoils, x, "p8", elements=[1], tolerance=1e9, output_kind="scalar", margin=0.4
        )
    assert not equivariance_error(spoils, x, 1, "p4", output_kind="scalar") <= 1e9


# convergence_order


@given(
    order=st.floats(-4, 8),
    constant=st.floats(1e-6, 1e6),
    spacings=st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True),
)
def test_the_order_of_a_power_law_is_its_exponent(order, constant, spacings):
    h = [s / 1000 for s in spacings]
    assert convergence_order(lambda s: constant * s**order, h) == pytest.approx(order, abs=1e-6)
    errors = [constant * s**order for s in h]
    assert convergence_order(errors, h) == pytest.approx(order, abs=1e-6)


def test_order_one_and_order_two_are_told_apart():
    h = [0.1, 0.05, 0.025, 0.0125]
    slope = math.cos(1.0)
    first = [abs((math.sin(1 + s) - math.sin(1)) / s - slope) for s in h]
    second = [abs(central((1, 0)).apply(lambda x, y: np.sin(x), (1.0, 0.0), s) - slope) for s in h]
    fourth = [
        abs(central((1, 0), accuracy=4).apply(lambda x, y: np.sin(x), (1.0, 0.0), s) - slope)
        for s in h
    ]
    assert convergence_order(first, h) == pytest.approx(1.0, abs=0.05)
    assert convergence_order(second, h) == pytest.approx(2.0, abs=0.05)
    assert convergence_order(fourth, h) == pytest.approx(4.0, abs=0.05)


@pytest.mark.parametrize(
    ("errors", "spacings", "message"),
    [
        ([1.0], [0.1], "two different positive spacings"),
        ([], [], "two different positive spacings"),
        ([1.0, 2.0], [0.1, 0.1], "two different positive spacings"),
        ([1.0, 2.0, 3.0], [0.1, 0.1, 0.2], "two different positive spacings"),
        ([1.0, 2.0], [0.0, 0.1], "two different positive spacings"),
        ([1.0, 2.0], [-0.1, 0.1], "two different positive spacings"),
        ([1.0, 2.0], [math.nan, 0.1], "two different positive spacings"),
        ([1.0, 2.0], [0.1, math.inf], "two different positive spacings"),
        ([1.0, 2.0], [[0.1, 0.2]], "two different positive spacings"),
        ([1.0, 2.0, 3.0], [0.1, 0.2], "one error for each of 2"),
        ([1.0, 0.0], [0.1, 0.2], "positive finite errors"),
        ([1.0, -1.0], [0.1, 0.2], "positive finite errors"),
        ([1.0, math.nan], [0.1, 0.2], "positive finite errors"),
        ([1.0, math.inf], [0.1, 0.2], "positive finite errors"),
    ],
)
def test_convergence_order_refuses_bad_input(errors, spacings, message):
    with pytest.raises(ValueError, match=message):
        convergence_order(errors, spacings)


# smooth_field


def test_a_smooth_field_depends_on_its_arguments_alone():
    random_state = torch.get_rng_state()
    field = smooth_field(24, channels=2, seed=3, batch=2)
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.manual_seed(99)
    assert torch.equal(smooth_field(24, channels=2, seed=3, batch=2), field)
    assert not torch.allclose(smooth_field(24, channels=2, seed=4, batch=2), field, atol=0.1)
    assert field.shape == (2, 2, 24, 24)
    assert field.dtype == torch.float64
    assert smooth_field(24, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("smoothness", [0.0, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("size", [24, 33])
def test_a_smooth_field_has_second_moment_one(size, smoothness):
    field = smooth_field(size, channels=2, smoothness=smoothness, batch=3)
    assert field.square().mean().item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("smoothness", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("size", [32, 33])
def test_a_smooth_field_is_white_noise_blurred_by_a_gaussian(size, smoothness):
    white = smooth_field(size, smoothness=0.0, seed=5)[0, 0].numpy()
    blurred = ndimage.gaussian_filter(white, smoothness, mode="wrap", truncate=7.0)
    blurred /= np.sqrt((blurred**2).mean())
    field = smooth_field(size, smoothness=smoothness, seed=5)[0, 0].numpy()
    np.testing.assert_allclose(field, blurred, rtol=0, atol=1e-4)


def test_the_spectrum_of_a_smooth_field_is_gaussian():
    smoothness, size = 2.0, 48
    field = smooth_field(size, channels=64, smoothness=smoothness)
    power = torch.fft.fft2(field).abs().square().mean(dim=(0, 1))
    frequency = torch.fft.fftfreq(size, dtype=torch.float64)
    radius = (frequency[:, None] ** 2 + frequency**2).sqrt()
    ring = (radius > 0) & (radius < 0.25)
    # log power = constant − (2π·smoothness·radius)²
    slope, _ = np.polyfit(radius[ring].square().numpy(), power[ring].log().numpy(), 1)
    assert slope == pytest.approx(-((2 * math.pi * smoothness) ** 2), rel=0.02)


def test_an_integer_image_is_only_turned_where_nothing_is_interpolated():
    image = torch.arange(9).reshape(1, 1, 3, 3)
    assert transform(image, "p8", 2).dtype == torch.int64
    with pytest.raises(ValueError, match=r"floating-point image.*int64"):
        transform(image, "p8", 1)


@pytest.mark.parametrize("element", [-1, 8])
def test_an_element_is_a_number_within_the_group(element):
    with pytest.raises(ValueError, match="element of p8 from 0 to 7; got"):
        transform(noise(1, 1, 5, 5), "p8", element)


@pytest.mark.parametrize("element", [1.5, "1", None, "first"])
def test_what_is_no_element_says_what_one_is(element):
    with pytest.raises(ValueError, match="element of p8, as its index or as a matrix 2×2; got"):
        transform(noise(1, 1, 5, 5), "p8", element)


def test_a_layer_of_scalars_and_vectors_together_says_which_is_which():
    layer, x = LiftConv2d(3, 1, "p4", vectors=1, **DOUBLE), noise(1, 3, 9, 9)
    assert layer.input_kind == "mixed"
    assert equivariance_error(layer, x, 1) < 1e-12
    assert equivariance_error(layer, x, 1, input_kind="scalar") > 1e-2
    wrong = [("vector", 1), ("scalar", 1)]
    assert equivariance_error(layer, x, 1, input_kind=wrong) > 1e-2


def test_no_elements_are_no_check():
    with pytest.raises(ValueError, match="at least one element"):
        assert_equivariant(torch.relu, noise(1, 1, 5, 5), "p4", elements=[])


def test_forgotten_vectors_are_suggested():
    lift = LiftConv2d(2, 2, "p4", vectors=1, dtype=torch.float64)
    field = smooth_field(11, channels=2)
    scores = nn.Sequential(lift, GroupPool2d("p4"))
    half = LiftConv2d(2, 2, "p2", vectors=1, dtype=torch.float64)
    flow = nn.Sequential(half, VectorConv2d(2, 1, "p2", dtype=torch.float64))
    options = {"group": "p4", "output_kind": "scalar"}
    with pytest.raises(AssertionError, match="It is with input_kind='vector': channels in pairs"):
        assert_equivariant(scores, field, **options)
    assert_equivariant(scores, field, input_kind="vector", **options)
    with pytest.raises(AssertionError, match="input_kind='vector' and output_kind='vector'"):
        assert_equivariant(flow, field, "p2")
    broken = nn.Sequential(nn.Conv2d(2, 2, 3, dtype=torch.float64))
    with pytest.raises(AssertionError) as caught:
        assert_equivariant(broken, field, "p2")
    assert "input_kind" not in str(caught.value)


# Volumes


@pytest.mark.parametrize("kind", ["scalar", "regular", "vector", "pseudoscalar"])
@pytest.mark.parametrize("name", ["Th", "O", "D4h"])
def test_symmetries_of_the_cube_compose_exactly_as_the_group_does(name, kind):
    group = Group(name)
    channels = {"regular": group.order, "vector": 6}.get(kind, 2)
    x = noise(1, channels, 3, 4, 5)
    for a, b in [(1, 2), (3, group.order - 1), (group.order - 2, 1)]:
        first = transform(x, group, b, kind)
        both = transform(first, group, a, kind)
        wanted = transform(x, group, int(group.product[a, b]), kind)
        assert torch.equal(both, wanted)


def test_elements_of_the_cube_move_voxels_as_their_matrices_say():
    group = Group("Oh")
    sizes = (3, 4, 5)
    z, y, x = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in sizes)
    # Each component of the position is a volume, and together they are a vector field.
    where = torch.stack(torch.meshgrid(z, -y, x, indexing="ij")[::-1])[None]
    for element in range(0, group.order, 5):
        moved = transform(where, group, element, "vector")
        sides = moved.shape[2:]
        z, y, x = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in sides)
        wanted = torch.stack(torch.meshgrid(z, -y, x, indexing="ij")[::-1])[None]
        torch.testing.assert_close(moved, wanted, rtol=0, atol=0)


def test_the_slices_of_a_volume_turn_about_z_as_images_do():
    image = smooth_field(17, smoothness=2.0)
    volume = image[:, :, None].expand(-1, -1, 5, -1, -1)
    wanted = transform(image, "p8", 1)
    found = transform(volume, "C8", 1)
    # Along the depth the volume is constant, which mirrored splines keep.
    torch.testing.assert_close(found, wanted[:, :, None].expand_as(found), rtol=0, atol=1e-12)


def test_volumes_turn_by_any_rotation_and_back():
    rotation = random_rotations(3, seed=1)[2]
    volume = smooth_field(21, smoothness=3.0, dimension=3)
    middle = (slice(None), slice(None), *[slice(7, 14)] * 3)
    back = rotate(rotate(volume, rotation), rotation.T)
    assert (back - volume)[middle].norm() < 2e-3 * volume[middle].norm()
    # A field that is known everywhere says whether it was the right way.
    steps = torch.arange(21, dtype=torch.float64) - 10
    z, y, x = torch.meshgrid(steps, -steps, steps, indexing="ij")
    direction = np.array([0.1, -0.05, 0.07])
    plane = torch.sin(direction[0] * x + direction[1] * y + direction[2] * z)[None, None]
    turned = rotation @ direction
    wanted = torch.sin(turned[0] * x + turned[1] * y + turned[2] * z)[None, None]
    assert (rotate(plane, rotation) - wanted)[middle].abs().max() < 1e-4


def test_rotations_are_uniform():
    found = random_rotations(4000, seed=3)
    np.testing.assert_allclose(
        found @ found.swapaxes(1, 2), np.eye(3)[None].repeat(4000, 0), atol=1e-12
    )
    np.testing.assert_allclose(np.linalg.det(found), 1.0, atol=1e-12)
    assert np.abs(found.mean(0)).max() < 0.05
    # The angle of a uniform rotation: the mean of its cosine is −1/2.
    cosines = (np.trace(found, axis1=1, axis2=2) - 1) / 2
    assert abs(cosines.mean() + 0.5) < 0.03
    assert random_rotations(2, dimension=2).shape == (2, 2, 2)


def test_layers_of_volumes_are_checked_at_the_elements_of_their_groups():
    torch.manual_seed(0)
    lift = LiftConv3d(1, 1, "I", **DOUBLE)
    volume = smooth_field(19, smoothness=3.0, dimension=3)
    assert_equivariant(lift, volume, elements=(1, 4))
    element = next(e for e in range(60) if e not in lift.group.grid_symmetries)
    # Splines that end in a mirror are less exact near the border, where the field does not.
    assert 1e-6 < equivariance_error(lift, volume, element, margin=0.3) < 0.01
    broken = nn.Conv3d(1, 60, 3, padding=1, **DOUBLE)
    with pytest.raises(AssertionError, match="element"):
        assert_equivariant(broken, volume, "I")


def test_what_is_invariant_is_checked_at_any_rotation():
    volume = smooth_field(21, smoothness=2.0, dimension=3)
    rotation = random_rotations(1, seed=5)[0]
    laplacian = LiftConv3d(1, 1, "C1", operators=[(2, 0, 0), (0, 2, 0), (0, 0, 2)], **DOUBLE)
    kinds = {"input_kind": "scalar", "output_kind": "scalar", "margin": 0.3}
    laplacian.set_coefficients(torch.ones_like(laplacian.coefficients()))
    assert equivariance_error(laplacian, volume, rotation, **kinds) < 0.01
    laplacian.set_coefficients(torch.tensor([1.0, 0.0, 0.0], **DOUBLE).expand(1, 1, 3))
    assert equivariance_error(laplacian, volume, rotation, **kinds) > 0.3
    with pytest.raises(AssertionError, match="matrix 0"):
        assert_equivariant(laplacian, volume, "C1", elements=[rotation], tolerance=0.01, **kinds)


def test_vectors_of_volumes_turn_with_them():
    layer = VectorConv3d(1, 1, "T", operators="order<=1", **DOUBLE)
    assert_equivariant(layer, noise(1, 12, 4, 5, 5)[..., :4, :4])


def test_voxels_that_are_no_cubes_turn_in_lengths():
    spacing = (2.0, 1.0, 1.0)
    x = noise(1, 1, 3, 4, 4)
    group = Group("O")
    about_z = next(e for e in range(24) if group.matrices[e][2, 2] == 1 and e)
    assert torch.equal(transform(x, group, about_z, spacing=spacing), transform(x, group, about_z))
    about_x = next(e for e in range(24) if group.matrices[e][0, 0] == 1 and group.matrices[e][1, 2])
    assert transform(x, group, about_x, spacing=spacing).shape == x.shape  # interpolated
    assert transform(x, group, about_x).shape == (1, 1, 4, 3, 4)


def test_bad_input_for_volumes_is_refused():
    x = noise(1, 12, 4, 4, 4)
    with pytest.raises(ValueError, match=r"expected \[batch, channels, depth, height, width\]"):
        transform(noise(1, 12, 4, 4), "T", 0)
    with pytest.raises(ValueError, match="expected an element of T"):
        transform(x, "T", np.eye(2))
    with pytest.raises(ValueError, match="expected an orthogonal matrix"):
        rotate(x, 2 * np.eye(3))
    with pytest.raises(ValueError, match="for group features"):
        transform(x, "T", random_rotations(1)[0], "regular")
    with pytest.raises(ValueError, match="expected a group for group features"):
        transform(x, None, random_rotations(1)[0], "regular")
    with pytest.raises(ValueError, match="expected one spacing, or 3"):
        transform(x, "T", 1, spacing=(1.0, 2.0))


def test_what_maps_rectangles_onto_themselves():
    group = Group("p4m")
    for matrix in group.matrices:
        diagonal = abs(float(matrix[0, 1])) < 0.5
        assert _on_grid(matrix, (1.0, 2.0)) == diagonal
        assert _on_grid(matrix, (1.0, 1.0))
    assert not _on_grid(Group("p8").matrices[1], (1.0, 1.0))
