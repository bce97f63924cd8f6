"""Finite-difference stencils: where derivatives first meet the pixel grid.

Everything upstream is exact algebra; every discretisation error is born in this file.
This room knows nothing of groups, filters or tensors.

Arrays of weights have one axis per coordinate, the last one x. x points right along its axis;
y points up, against its axis, because rows run downwards; a third coordinate runs along its axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from econv.groups import FloatArray
from econv.operators import Exponents, Polynomial, monomials

__all__ = ["Central", "Stencil", "StencilSet", "StencilsLike", "central", "stencil_set"]


@dataclass(frozen=True, eq=False)
class Stencil:
    """Weights that approximate one differential operator at the centre of a patch.

    Construction fails unless every Taylor moment below ``operator.order + accuracy`` is right, so
    a stencil that is not the derivative it says it is cannot exist.

    >>> central((1, 0)).apply(lambda x, y: 3 * x)
    3.0
    >>> central((2, 1)).weights.tolist()
    [[0.5, -1.0, 0.5], [0.0, 0.0, 0.0], [-0.5, 1.0, -0.5]]
    """

    operator: Polynomial
    """What is approximated; complex for a complex operator."""
    weights: npt.NDArray[Any]
    """``[size] * d`` at spacing 1, row 0 on top."""
    accuracy: int
    """The error is O(spacing ** accuracy)."""

    def __post_init__(self) -> None:
        weights = np.array(self.weights)
        weights.flags.writeable = False
        object.__setattr__(self, "weights", weights)
        shape = (self.size,) * self.operator.dimension
        if weights.shape != shape or self.size % 2 == 0:
            raise ValueError(
                f"expected weights of {self.operator.dimension} equal odd sizes for "
                f"{self.operator}; got shape {weights.shape}"
            )
        check_moments(self)

    @property
    def size(self) -> int:
        """The number of weights along each axis."""
        return int(self.weights.shape[-1])

    def apply(
        self,
        function: Callable[..., Any],
        at: Sequence[float] | None = None,
        spacing: float = 1.0,
    ) -> Any:
        """The operator applied to a function of d coordinates at one point, on a grid of pixels."""
        centre = at if at is not None else (0.0,) * self.operator.dimension
        points = [
            c + spacing * offset
            for c, offset in zip(
                centre, coordinates(self.size, self.operator.dimension), strict=True
            )
        ]
        order = {sum(exponents) for exponents, _ in self.operator.terms}
        if len(order) > 1:
            raise ValueError(f"{self.operator} mixes orders; apply its homogeneous parts instead")
        return (self.weights * function(*points)).sum().item() / spacing ** (order or {0}).pop()


def check_moments(stencil: Stencil, tolerance: float = 1e-10) -> None:
    """Raise ``ArithmeticError`` unless the stencil's Taylor moments are those of its operator.

    The moment Σ w·x^a / a! must be the operator's coefficient of ∂^a for every |a| below
    order + accuracy: then Taylor's theorem gives an error of O(spacing ** accuracy).
    """
    operator = stencil.operator
    powers = monomials(operator.order + stencil.accuracy - 1, operator.dimension)
    # Sums of large powers cancel: rounding is measured against the sum of their absolute values.
    terms = taylor_terms(powers, stencil.size, operator.dimension) * stencil.weights.ravel()
    wanted = np.array([operator.coefficient(exponents) for exponents in powers])
    error = np.abs(terms.sum(axis=1) - wanted) / np.maximum(1.0, np.abs(terms).sum(axis=1))
    worst = int(error.argmax())
    if error[worst] > tolerance:
        raise ArithmeticError(
            f"not a stencil of accuracy {stencil.accuracy} for {operator}: moment "
            f"{powers[worst]} is {terms[worst].sum():.6g}, expected {wanted[worst]:.6g}"
        )


def coordinates(size: int, dimension: int) -> tuple[FloatArray, ...]:
    """The coordinates (x, y, …) of the points of a patch around 0, each ``[size] * d``."""
    line = np.arange(size, dtype=np.float64) - size // 2
    axes = np.meshgrid(*[line] * dimension, indexing="ij")[::-1]
    return tuple(-axis if name == 1 else axis for name, axis in enumerate(axes))


def taylor_terms(powers: Sequence[Exponents], size: int, dimension: int) -> FloatArray:
    """x^a / a! at every point of a patch, ``[powers, size ** d]``."""
    points = np.stack([axis.ravel() for axis in coordinates(size, dimension)])
    exponents = np.array(powers)[:, :, None]
    factorials = np.array([math.prod(map(math.factorial, a)) for a in powers])
    return np.prod(points**exponents, axis=1) / factorials[:, None]


class StencilSet(ABC):
    """A way to turn operators into stencils: a value that a filter basis receives.

    The weights are linear in the operator, so that a turned operator, a sum of monomials, has the
    sum of their stencils.
    """

    name: ClassVar[str]
    accuracy: int
    """The order of the error in the spacing."""

    @abstractmethod
    def smallest_size(self, operators: Sequence[Polynomial]) -> int:
        """The smallest odd support on which all these operators can be approximated."""

    @abstractmethod
    def weights(self, exponents: Exponents, size: int) -> FloatArray:
        """The weights of one monomial on a support of ``[size] * d``."""

    def stencil(self, operator: Polynomial, size: int | None = None) -> Stencil:
        """The stencil of an operator, on the smallest support or on a given one."""
        smallest = self.smallest_size([operator])
        size = check_size(smallest if size is None else size, smallest, str(operator), self)
        total = sum(
            (self.weights(exponents, size) * value for exponents, value in operator.terms),
            start=np.zeros((size,) * operator.dimension),
        )
        return Stencil(operator, total, self.accuracy)


@dataclass(frozen=True)
class Central(StencilSet):
    """Central differences, the paper's: products of one-dimensional schemes.

    >>> Central().stencil(Polynomial.monomial((2, 0))).weights[1].tolist()
    [1.0, -2.0, 1.0]
    """

    accuracy: int = 2
    name: ClassVar[str] = "central"

    def __post_init__(self) -> None:
        if not isinstance(self.accuracy, int) or self.accuracy < 2 or self.accuracy % 2:
            raise ValueError(
                f"expected an even accuracy, 2 or higher, for central stencils; "
                f"got {self.accuracy!r}"
            )

    def smallest_size(self, operators: Sequence[Polynomial]) -> int:
        highest = max((e for p in operators for exponents, _ in p.terms for e in exponents))
        return _line(highest, self.accuracy).size

    def weights(self, exponents: Exponents, size: int) -> FloatArray:
        total = np.ones((1,) * len(exponents))
        for name, derivative in enumerate(exponents):
            line = _line(derivative, self.accuracy)
            line = np.pad(line, (size - line.size) // 2)
            shape = [1] * len(exponents)
            shape[-1 - name] = size
            total = total * (line[::-1] if name == 1 else line).reshape(shape)
        return total


StencilsLike = StencilSet | str


def stencil_set(stencils: StencilsLike, accuracy: int = 2) -> StencilSet:
    """Read a stencil set: ``"central"``, or a :class:`StencilSet` as it is.

    >>> stencil_set("central", accuracy=4)
    Central(accuracy=4)
    """
    if isinstance(stencils, StencilSet):
        return stencils
    if stencils == "central":
        return Central(accuracy)
    raise ValueError(f"unknown stencils {stencils!r}: expected 'central' or a StencilSet")


def central(exponents: Exponents, accuracy: int = 2, size: int | None = None) -> Stencil:
    """The central-difference stencil of one monomial, such as ∂xxy for ``(2, 1)``."""
    return Central(accuracy).stencil(Polynomial.monomial(tuple(exponents)), size)


def check_size(size: int, smallest: int, what: str, stencils: StencilSet) -> int:
    """Return ``size``, or say why it cannot hold the operators."""
    if not isinstance(size, int) or size % 2 == 0 or size < smallest:
        raise ValueError(
            f"expected an odd size of at least {smallest} for the {stencils.name} stencils of "
            f"{what}; got {size!r}"
        )
    return size


@lru_cache(maxsize=256)
def _line(derivative: int, accuracy: int) -> FloatArray:
    """The central difference in one dimension: the derivative of the interpolating polynomial.

    On 2r + 1 points, r the smallest radius that gives the accuracy. Worked in fractions, so that
    the weights are the correctly rounded ones.
    """
    radius = (derivative + 1) // 2 + accuracy // 2 - 1 if derivative else 0
    nodes = range(-radius, radius + 1)
    weights = []
    for here in nodes:
        lagrange = [Fraction(1)]  # ascending coefficients of Π (x − node) / (here − node)
        for node in nodes:
            if node != here:
                shifted = [Fraction(0), *lagrange]
                lagrange = [
                    (up - node * low) / (here - node)
                    for up, low in zip(shifted, [*lagrange, Fraction(0)], strict=True)
                ]
        weights.append(float(lagrange[derivative] * math.factorial(derivative)))
    line = np.array(weights)
    line.flags.writeable = False
    return line
