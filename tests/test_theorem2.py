"""Theorem 2: on a grid of spacing h the equivariance error vanishes like h².

Smooth functions are known in closed form, so a function and its turned copy are each sampled on
the same small grid around the origin, the one point that a turned grid shares with the grid for
every element. Nothing is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from econv import (
    Group,
    GroupConv2d,
    GroupConv3d,
    LiftConv2d,
    LiftConv3d,
    VectorConv2d,
    VectorConv3d,
)
from econv.operators import Exponents, Polynomial
from econv.stencils import StencilSet
from econv.testing import convergence_order

GROUPS = ["p6", "p8", "p6m", "p8m"]
# All elements of O are symmetries of cubes: on voxels that are twice as deep most are angles.
OF_SPACE = [("I", (1.0, 1.0, 1.0)), ("O", (2.0, 1.0, 1.0))]
LAYERS = {
    2: (LiftConv2d, GroupConv2d, VectorConv2d),
    3: (LiftConv3d, GroupConv3d, VectorConv3d),
}
FUNCTIONS, WAVES, IN, OUT = 8, 6, 2, 3
# In units of the shortest wavelength over 2π: above, the next order of the error shows;
# below, rounding divided by a power of the spacing does.
SPACINGS = (0.12, 0.08, 0.055, 0.04)
WIDER_SPACINGS = (0.2, 0.14, 0.1, 0.07)

Make = Callable[[float], nn.Module]


class SmoothFamily:
    """Random sums of plane waves, one for each function (batch), channel and orientation."""

    def __init__(self, channels: int, orientations: int, seed: int, dimension: int = 2) -> None:
        random = np.random.default_rng(seed)
        shape = (FUNCTIONS, channels, orientations, WAVES)
        length = random.uniform(0.3, 1.0, shape)
        angle = random.uniform(0.0, 2 * np.pi, shape)
        self.phase = random.uniform(0.0, 2 * np.pi, shape)
        across = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
        if dimension == 3:
            z = random.uniform(-1, 1, (*shape, 1))
            across = np.concatenate([np.sqrt(1 - z**2) * across, z], axis=-1)
        self.waves = length[..., None] * across

    def sample(self, size: int, lengths: tuple[float, ...], matrix: np.ndarray) -> np.ndarray:
        """f(A⁻¹x) on a grid around the origin, ``[batch, channels, orientations, size, …]``.

        ``lengths`` are those of a pixel along the axes of an array.
        """
        lines = [length * (np.arange(size) - size // 2) for length in lengths]
        *first, y, x = np.meshgrid(*lines, indexing="ij")
        points = np.tensordot(np.linalg.inv(matrix), np.stack([x, -y, *first]), axes=1)
        angle = np.tensordot(self.waves, points, axes=1)
        angle += self.phase.reshape(*self.phase.shape, *[1] * len(lines))
        return np.cos(angle).sum(axis=3) / np.sqrt(WAVES)


def turned_orientations(group: Group, element: int) -> list[int]:
    """For every A the index of Ã⁻¹A, read off the matrices."""
    wanted = np.linalg.inv(group.matrices[element]) @ group.matrices
    distance = np.abs(wanted[:, None] - group.matrices).max(axis=(2, 3))
    return distance.argmin(axis=1).tolist()


def not_on_the_grid(group: Group, voxel: tuple[float, ...] = ()) -> list[int]:
    deep = len(set(voxel)) > 1  # and square along the other two axes
    kept = [g for g in group.grid_symmetries if not deep or abs(group.matrices[g][2, 2]) > 0.99]
    return [element for element in range(group.order) if element not in kept]


@torch.no_grad()
def measured_error(
    make: Make,
    group: Group,
    spacing: float,
    *,
    size: int,
    input_kind: str,
    output_kind: str = "regular",
    compare_with: Callable[[int], int] = lambda element: element,
    voxel: tuple[float, ...] = (),
) -> float:
    """RMS at the origin of f(πe) − πf(e), over functions, channels and elements, relative to f(e).

    ``compare_with`` names the element that turns the output: itself, unless the test wants
    the comparison to be wrong. ``voxel`` are its lengths, in spacings, along (z, y, x).
    """
    module = make(spacing)
    dimension = group.dimension
    orientations = group.order if input_kind == "regular" else 1
    channels = dimension if input_kind == "vector" else IN
    family = SmoothFamily(channels, orientations, seed=1, dimension=dimension)
    lengths = tuple(spacing * length for length in voxel or (1.0,) * dimension)

    def turned_input(element: int) -> np.ndarray:
        """πe around the origin, ``[batch, fields, orientations or 1, size, …]``."""
        matrix = group.matrices[element]
        e = family.sample(size, lengths, matrix)
        if input_kind == "regular":
            return e[:, :, turned_orientations(group, element)]
        if input_kind == "vector":
            return np.einsum("dc,bco...->bdo...", matrix, e)
        return e

    elements = not_on_the_grid(group, voxel)
    inputs = np.concatenate([turned_input(element) for element in [0, *elements]])
    results = module(torch.from_numpy(inputs).flatten(1, 2))
    assert results.shape[2:] == (1,) * dimension
    parts = group.order if output_kind == "regular" else dimension
    straight, *turned = results.flatten(1).unflatten(1, (-1, parts)).split(FUNCTIONS)
    squares = []
    for element, result in zip(elements, turned, strict=True):
        other = compare_with(element)
        if output_kind == "regular":
            expected = straight[:, :, turned_orientations(group, other)]
        else:
            expected = straight @ torch.from_numpy(group.matrices[other].T.copy())
        squares.append((result - expected).square().mean())
    return float((torch.stack(squares).mean() / straight.square().mean()).sqrt())


def with_coefficients(layer: nn.Module, seed: int) -> nn.Module:
    """β fixed while h shrinks: what the theorem is about."""
    generator = torch.Generator().manual_seed(seed)
    shape = layer.weight.shape
    # Divided like this, features keep their size, so that tanh neither saturates nor sharpens them.
    deviation = math.prod(shape[1:]) ** -0.5
    beta = deviation * torch.randn(shape, generator=generator, dtype=torch.float64)
    layer.set_coefficients(beta)
    return layer


def options_of(spacing: float, options: dict[str, object]) -> dict[str, object]:
    """Those of a layer; ``voxel`` are its lengths, in spacings."""
    voxel = options.pop("voxel", ())
    lengths = tuple(spacing * length for length in voxel) or spacing
    given = {"stencils": "central", "padding": "valid", "dtype": torch.float64, **options}
    return {**given, "spacing": lengths}


def lift(group: str, spacing: float, **options: object) -> nn.Module:
    kind = LAYERS[Group(group).dimension][0]
    channels = Group(group).dimension if options.get("vectors") else IN
    layer = kind(channels, OUT, group, **options_of(spacing, options))
    return with_coefficients(layer, 2)


def group_conv(
    group: str,
    spacing: float,
    fields: tuple[int, int] = (IN, OUT),
    seed: int = 3,
    **options: object,
) -> nn.Module:
    kind = LAYERS[Group(group).dimension][1]
    return with_coefficients(kind(*fields, group, **options_of(spacing, options)), seed)


def vector_conv(group: str, spacing: float, **options: object) -> nn.Module:
    kind = LAYERS[Group(group).dimension][2]
    return with_coefficients(kind(IN, OUT, group, **options_of(spacing, options)), 4)


class ThreeLayers(nn.Module):
    def __init__(self, group: str, spacing: float, **options: object) -> None:
        super().__init__()
        options = {"operators": "order<=2", **options}
        self.lift = lift(group, spacing, **options)
        self.first = group_conv(group, spacing, (OUT, OUT), 5, **options)
        self.second = group_conv(group, spacing, (OUT, OUT), 6, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.tanh(self.lift(x)))))


def order_of(
    make: Callable[..., nn.Module],
    name: str,
    spacings: tuple[float, ...] = SPACINGS,
    *,
    size: int,
    options: dict[str, object] | None = None,
    **how: object,
) -> float:
    group, options = Group(name), options or {}
    maker, voxel = partial(make, name, **options), options.get("voxel", ())
    return convergence_order(
        lambda h: measured_error(maker, group, h, size=size, voxel=voxel, **how), spacings
    )


@pytest.mark.parametrize("name", GROUPS)
def test_lifting_the_papers_operators_has_order_two(name):
    order = order_of(lift, name, size=5, input_kind="scalar")
    assert order == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("name", GROUPS)
def test_group_convolution_with_the_papers_operators_has_order_two(name):
    order = order_of(group_conv, name, size=5, input_kind="regular")
    assert order == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("name", GROUPS)
def test_three_layers_with_a_smooth_nonlinearity_have_order_two(name):
    order = order_of(ThreeLayers, name, size=7, input_kind="scalar")
    assert order == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("name", GROUPS)
def test_lifting_vector_fields_has_order_two(name):
    order = order_of(lift, name, size=5, input_kind="vector", options={"vectors": 1})
    assert order == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("name", GROUPS)
def test_producing_vector_fields_has_order_two(name):
    order = order_of(vector_conv, name, size=5, input_kind="regular", output_kind="vector")
    assert order == pytest.approx(2.0, abs=0.1)


SPACE = {
    "lift": (lift, {}, {"size": 3, "input_kind": "scalar"}),
    "lifted vectors": (lift, {"vectors": 1}, {"size": 3, "input_kind": "vector"}),
    "group": (group_conv, {}, {"size": 3, "input_kind": "regular"}),
    "vector": (vector_conv, {}, {"size": 3, "input_kind": "regular", "output_kind": "vector"}),
}


@pytest.mark.parametrize(
    "stencils",
    ["isotropic", *(pytest.param(n, marks=pytest.mark.slow) for n in ("central", "gaussian"))],
)
@pytest.mark.parametrize(("name", "voxel"), OF_SPACE)
@pytest.mark.parametrize(
    "kind", ["lift", *(pytest.param(n, marks=pytest.mark.slow) for n in SPACE if n != "lift")]
)
def test_layers_of_space_have_order_two(kind, name, voxel, stencils):
    make, options, how = SPACE[kind]
    options = {"stencils": stencils, "voxel": voxel, **options}
    assert order_of(make, name, options=options, **how) == pytest.approx(2.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "voxel"), OF_SPACE)
def test_the_wrong_elements_transform_does_not_converge_in_space(name, voxel):
    how = {"size": 3, "input_kind": "scalar", "options": {"voxel": voxel}}
    assert order_of(lift, name, compare_with=lambda g: (g + 1) % 24, **how) == pytest.approx(
        0.0, abs=0.1
    )


@pytest.mark.slow
def test_filters_that_take_long_voxels_for_cubes_do_not_converge():
    def cubes(group, spacing, **options):
        return lift(group, spacing, **{**options, "voxel": (1.0, 1.0, 1.0)})

    order = order_of(cubes, "O", size=3, input_kind="scalar", options={"voxel": (2.0, 1.0, 1.0)})
    assert order == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    ("make", "kind", "size"),
    [(lift, "scalar", 7), (group_conv, "regular", 7), (ThreeLayers, "scalar", 13)],
    ids=["lift", "group", "network"],
)
def test_fourth_order_stencils_have_order_four(name, make, kind, size):
    order = order_of(
        make, name, WIDER_SPACINGS, size=size, input_kind=kind, options={"accuracy": 4}
    )
    assert order == pytest.approx(4.0, abs=0.2)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    ("make", "kind", "size"),
    [(lift, "scalar", 5), (group_conv, "regular", 5), (ThreeLayers, "scalar", 7)],
    ids=["lift", "group", "network"],
)
def test_the_wrong_elements_transform_does_not_converge(name, make, kind, size):
    order = Group(name).order
    result = order_of(
        make,
        name,
        size=size,
        input_kind=kind,
        compare_with=lambda element: (element + 1) % order,
    )
    assert result == pytest.approx(0.0, abs=0.1)


@dataclass(frozen=True)
class Forward(StencilSet):
    """One-sided differences: consistent, but of first order only."""

    accuracy: int = 1
    name: ClassVar[str] = "forward"

    def smallest_size(self, operators: list[Polynomial]) -> int:
        return 2 * max(e for p in operators for exponents, _ in p.terms for e in exponents) + 1

    def weights(self, exponents: Exponents, size: int) -> np.ndarray:
        x, y = (self.line(derivative, size) for derivative in exponents)
        return y[::-1, None] * x

    @staticmethod
    def line(derivative: int, size: int) -> np.ndarray:
        line = np.zeros(size)
        for step in range(derivative + 1):
            line[size // 2 + step] = (-1) ** (derivative - step) * math.comb(derivative, step)
        return line


@pytest.mark.parametrize("name", ["p8", "p6m"])
def test_one_sided_differences_are_told_apart_by_order_one(name):
    order = order_of(
        group_conv,
        name,
        tuple(spacing / 2 for spacing in SPACINGS),
        size=5,
        input_kind="regular",
        options={"stencils": Forward(), "operators": "order<=2"},
    )
    assert order == pytest.approx(1.0, abs=0.1)
