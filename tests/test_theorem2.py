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

from econv import Group, GroupConv2d, LiftConv2d, VectorConv2d
from econv.operators import Exponents, Polynomial
from econv.stencils import StencilSet
from econv.testing import convergence_order

GROUPS = ["p6", "p8", "p6m", "p8m"]
FUNCTIONS, WAVES, IN, OUT = 8, 6, 2, 3
# In units of the shortest wavelength over 2π: above, the next order of the error shows;
# below, rounding divided by a power of the spacing does.
SPACINGS = (0.12, 0.08, 0.055, 0.04)
WIDER_SPACINGS = (0.2, 0.14, 0.1, 0.07)

Make = Callable[[float], nn.Module]


class SmoothFamily:
    """Random sums of plane waves, one for each function (batch), channel and orientation."""

    def __init__(self, channels: int, orientations: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        shape = (FUNCTIONS, channels, orientations, WAVES)
        length = random.uniform(0.3, 1.0, shape)
        angle = random.uniform(0.0, 2 * np.pi, shape)
        self.wave_x, self.wave_y = length * np.cos(angle), length * np.sin(angle)
        self.phase = random.uniform(0.0, 2 * np.pi, shape)

    def sample(self, size: int, spacing: float, matrix: np.ndarray) -> np.ndarray:
        """f(A⁻¹x) on a grid around the origin, ``[batch, channels, orientations, size, size]``."""
        line = spacing * (np.arange(size) - size // 2)
        points = np.stack(np.broadcast_arrays(line[None, :], -line[:, None]))
        x, y = np.tensordot(np.linalg.inv(matrix), points, axes=1)
        angle = (
            self.wave_x[..., None, None] * x
            + self.wave_y[..., None, None] * y
            + self.phase[..., None, None]
        )
        return np.cos(angle).sum(axis=-3) / np.sqrt(WAVES)


def turned_orientations(group: Group, element: int) -> list[int]:
    """For every A the index of Ã⁻¹A, read off the matrices."""
    wanted = np.linalg.inv(group.matrices[element]) @ group.matrices
    distance = np.abs(wanted[:, None] - group.matrices).max(axis=(2, 3))
    return distance.argmin(axis=1).tolist()


def not_on_the_grid(group: Group) -> list[int]:
    return [element for element in range(group.order) if element not in group.grid_symmetries]


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
) -> float:
    """RMS at the origin of f(πe) − πf(e), over functions, channels and elements, relative to f(e).

    ``compare_with`` names the element that turns the output: itself, unless the test wants
    the comparison to be wrong.
    """
    module = make(spacing)
    family = SmoothFamily(IN, group.order if input_kind == "regular" else 1, seed=1)

    def turned_input(element: int) -> np.ndarray:
        """πe around the origin, ``[batch, fields, orientations or 1, size, size]``."""
        matrix = group.matrices[element]
        e = family.sample(size, spacing, matrix)
        if input_kind == "regular":
            return e[:, :, turned_orientations(group, element)]
        if input_kind == "vector":
            return np.einsum("dc,bcoyx->bdoyx", matrix, e)
        return e

    elements = not_on_the_grid(group)
    inputs = np.concatenate([turned_input(element) for element in [0, *elements]])
    results = module(torch.from_numpy(inputs).flatten(1, 2))
    assert results.shape[-2:] == (1, 1)
    parts = group.order if output_kind == "regular" else 2
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


def lift(group: str, spacing: float, **options: object) -> nn.Module:
    options = {"stencils": "central", "padding": "valid", "dtype": torch.float64, **options}
    return with_coefficients(LiftConv2d(IN, OUT, group, spacing=spacing, **options), 2)


def group_conv(
    group: str,
    spacing: float,
    fields: tuple[int, int] = (IN, OUT),
    seed: int = 3,
    **options: object,
) -> nn.Module:
    options = {"stencils": "central", "padding": "valid", "dtype": torch.float64, **options}
    return with_coefficients(GroupConv2d(*fields, group, spacing=spacing, **options), seed)


def vector_conv(group: str, spacing: float) -> nn.Module:
    layer = VectorConv2d(
        IN, OUT, group, spacing=spacing, stencils="central", padding="valid", dtype=torch.float64
    )
    return with_coefficients(layer, 4)


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
    group = Group(name)
    maker = partial(make, name, **(options or {}))
    return convergence_order(
        lambda spacing: measured_error(maker, group, spacing, size=size, **how), spacings
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
