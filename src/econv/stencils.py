"""Finite-difference stencils: where derivatives first meet the pixel grid.

Everything upstream is exact algebra; every discretisation error is born in this file.
This module knows nothing of groups, filters or tensors.

Arrays of weights have one axis per coordinate, the last one x. x points right along its axis;
y points up, against its axis, because rows run downwards; a third coordinate runs along its axis.

Pixels may be rectangles: their ``aspect`` is height over width, 1 for squares; in space it is the
pair of depth and height over width. Lengths are in sides of a square of the same area, or a cube of
the same volume, so that derivatives mean the same on every grid.
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

from econv.groups import FloatArray, frozen
from econv.harmonics import Field, designed, gaussian_derivatives, nearest, of_order
from econv.operators import (
    Exponents,
    OperatorSet,
    Polynomial,
    check_order,
    exponent_tuples,
    monomials,
)

__all__ = [
    "Aspect",
    "Central",
    "Gaussian",
    "Isotropic",
    "Stencil",
    "StencilSet",
    "StencilsLike",
    "central",
    "harmonic",
    "stencil_set",
]

_LARGEST = 21  # size: a design of isotropic stencils grows with its sixth power
_MOST_ACCURACY = 16  # fractions of larger ones take long, and float64 does not tell them apart

Aspect = float | tuple[float, ...]
"""Of a pixel: height over width; in space depth and height over width, or 1 for cubes."""


@dataclass(frozen=True, eq=False)
class Stencil:
    """Weights that approximate one differential operator at the centre of a patch.

    Construction fails unless every Taylor moment below ``operator.order + accuracy`` is right, so
    a stencil that is not the derivative it says it is cannot exist.

    Raises:
        ValueError: for weights whose sides are not equal and odd, and operators of several orders.
        ArithmeticError: for weights that are not a stencil of that operator and accuracy.

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
    aspect: Aspect = 1.0
    """Height of a pixel over its width; in space depth and height over width."""

    def __post_init__(self) -> None:
        if not isinstance(self.operator, Polynomial):
            raise ValueError(f"expected an operator as a Polynomial; got {self.operator!r}")
        weights = frozen(np.atleast_1d(self.weights).copy())
        object.__setattr__(self, "weights", weights)
        shape = (self.size,) * self.operator.dimension
        if weights.shape != shape or self.size % 2 == 0:
            raise ValueError(
                f"expected weights of {self.operator.dimension} equal odd sizes for "
                f"{self.operator}; got shape {weights.shape}"
            )
        if len({sum(exponents) for exponents, _ in self.operator.terms}) > 1:
            raise ValueError(
                f"expected an operator whose terms have one order, so that it scales with the "
                f"spacing; got {self.operator}: take the stencils of its parts"
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
                centre,
                coordinates(self.size, self.operator.dimension, self.aspect),
                strict=True,
            )
        ]
        return (self.weights * function(*points)).sum().item() / spacing**self.operator.order


def check_moments(stencil: Stencil, tolerance: float = 1e-10) -> None:
    """Raise ``ArithmeticError`` unless the stencil's Taylor moments are those of its operator.

    The moment Σ w·x^a / a! must be the operator's coefficient of ∂^a for every |a| below
    order + accuracy: then Taylor's theorem gives an error of O(spacing ** accuracy).
    """
    operator = stencil.operator
    powers = monomials(operator.order + stencil.accuracy - 1, operator.dimension)
    # Sums of large powers cancel: rounding is measured against the sum of their absolute values.
    terms = taylor_terms(powers, stencil.size, operator.dimension, stencil.aspect)
    terms = terms * stencil.weights.ravel()
    wanted = np.array([operator.coefficient(exponents) for exponents in powers])
    error = np.abs(terms.sum(axis=1) - wanted) / np.maximum(1.0, np.abs(terms).sum(axis=1))
    worst = int(error.argmax())
    if not error[worst] <= tolerance:  # written so that a NaN fails
        raise ArithmeticError(
            f"not a stencil of accuracy {stencil.accuracy} for {operator}: moment "
            f"{powers[worst]} is {terms[worst].sum():.6g}, expected {wanted[worst]:.6g}"
        )


def sides(dimension: int, aspect: Aspect) -> tuple[float, ...]:
    """The lengths of a pixel along x, y, …; their product is 1.

    >>> sides(2, 4.0)
    (0.5, 2.0)
    >>> sides(3, (8.0, 1.0))
    (0.5, 0.5, 4.0)
    """
    if aspect == 1.0:
        return (1.0,) * dimension
    if dimension == 2 and not isinstance(aspect, tuple):
        return 1 / math.sqrt(aspect), math.sqrt(aspect)
    if not isinstance(aspect, tuple) or len(aspect) != dimension - 1:
        raise ValueError(
            f"expected an aspect of 1 or {dimension - 1} numbers in {dimension} dimensions; "
            f"got {aspect!r}"
        )
    unit = math.prod(aspect) ** (1 / dimension)
    return tuple(length / unit for length in (1.0, *aspect[::-1]))


def coordinates(size: int, dimension: int, aspect: Aspect = 1.0) -> tuple[FloatArray, ...]:
    """The coordinates (x, y, …) of the points of a patch around 0, each ``[size] * d``."""
    line = np.arange(size, dtype=np.float64) - size // 2
    lines = [side * line for side in sides(dimension, aspect)[::-1]]
    axes = np.meshgrid(*lines, indexing="ij")[::-1]
    return tuple(-axis if name == 1 else axis for name, axis in enumerate(axes))


def taylor_terms(
    powers: Sequence[Exponents], size: int, dimension: int, aspect: Aspect = 1.0
) -> FloatArray:
    """x^a / a! at every point of a patch, ``[powers, size ** d]``."""
    points = np.stack([axis.ravel() for axis in coordinates(size, dimension, aspect)])
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

    def weights_on(self, exponents: Exponents, size: int, aspect: Aspect) -> FloatArray:
        """The same where pixels are rectangles: derivatives along pixels, over their lengths.

        Moments stay as they are. What is designed for rotations should be designed again.
        """
        lengths = sides(len(exponents), aspect)
        scale = math.prod(n**e for n, e in zip(lengths, exponents, strict=True))
        return self.weights(exponents, size) / scale

    def stencil(
        self, operator: Polynomial, size: int | None = None, aspect: Aspect = 1.0
    ) -> Stencil:
        """The stencil of an operator, on the smallest support or on a given one."""
        smallest = self.smallest_size([operator])
        size = check_size(smallest if size is None else size, smallest, str(operator), self)
        total = sum(
            (
                self.weights_on(exponents, size, aspect) * value
                for exponents, value in operator.terms
            ),
            start=np.zeros((size,) * operator.dimension),
        )
        return Stencil(operator, total, self.accuracy, aspect)


@dataclass(frozen=True)
class Central(StencilSet):
    """Central differences, the paper's: products of one-dimensional schemes.

    Raises:
        ValueError: for an accuracy that is odd, below 2, or very large.

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
        if self.accuracy > _MOST_ACCURACY:
            raise ValueError(
                f"expected an accuracy of at most {_MOST_ACCURACY}; got {self.accuracy!r}"
            )

    def smallest_size(self, operators: Sequence[Polynomial]) -> int:
        every = (e for p in operators for exponents, _ in p.terms for e in exponents)
        highest = max(every, default=0)
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


class HarmonicStencils(StencilSet):
    """Stencils designed for the operators D₊^p D₋^q, which a rotation only multiplies by a phase.

    D₊ = ∂x + i∂y and D₋ = ∂x − i∂y. Turning the frame by θ multiplies D₊^p D₋^q by e^{−i(p−q)θ}:
    it has the angular frequency m = p − q, and a stencil for it should turn the same way. Every
    polynomial in ∂x and ∂y is a sum of such operators, and takes the sum of their stencils.

    In space the operators Δ^q h(∂) play their part, h the harmonic polynomials of each degree.
    """

    accuracy = 2

    @abstractmethod
    def designed(self, order: int, dimension: int, size: int, aspect: Aspect) -> FloatArray:
        """The weights of all monomials of an order, in the order of `monomials`, flattened.

        They are for any dimension; in the plane the weights are those of `harmonic_weights`.
        """

    @abstractmethod
    def harmonic_weights(
        self, p: int, q: int, size: int, aspect: float = 1.0
    ) -> npt.NDArray[np.complex128]:
        """The weights of D₊^p D₋^q with p ≥ q, on ``[size, size]``."""

    def smallest_size(self, operators: Sequence[Polynomial]) -> int:
        """Moments of order N need N + 1 points along an axis, and an odd number of them."""
        return max(2 * ((operator.order + 1) // 2) + 1 for operator in operators)

    def weights(self, exponents: Exponents, size: int) -> FloatArray:
        return self.weights_on(exponents, size, 1.0)

    def weights_on(self, exponents: Exponents, size: int, aspect: Aspect) -> FloatArray:
        dimension, order = len(exponents), sum(exponents)
        if dimension != 2:
            place = of_order(order, dimension).index(tuple(exponents))
            found = self.designed(order, dimension, size, aspect)[place]
            return found.reshape((size,) * dimension).copy()
        if isinstance(aspect, tuple):
            raise ValueError(f"expected one number as the aspect of pixels; got {aspect!r}")
        plus, minus = Polynomial.variables(2)  # here the variables are D₊ and D₋ themselves
        dx, dy = (plus + minus) * 0.5, (plus - minus) * -0.5j
        total = np.zeros((size, size))
        for (p, q), value in (dx ** exponents[0] * dy ** exponents[1]).terms:
            found = self.harmonic_weights(max(p, q), min(p, q), size, aspect)
            # Reflection swaps D₊ and D₋, and conjugates the weights.
            total = total + (value * (found if p >= q else found.conj())).real
        return total


@dataclass(frozen=True)
class Isotropic(HarmonicStencils):
    """Stencils that turn as the operators do, as well as the support allows: the default.

    Central differences are accurate along the axes and poor across them; it is this anisotropy,
    not the order of accuracy, that breaks equivariance. For each D₊^p D₋^q of order N the weights
    here keep all Taylor moments through order N + 1 exact, so that the error stays O(h²), and
    among those minimise what turns wrongly on random fields of smoothness 1, 1.5, 2 and 3 pixels,
    with a little weight on plain accuracy. They have the symmetry of the grid to the last bit, so
    that quarter turns and flips are exact; of a grid of rectangles, half turns and flips.

    Args:
        rotations: the n of the group pn or pnm that the stencils shall serve. What turns wrongly is
            measured for its smallest turn, 2π/n; for every angle alike if n is 0 (the default),
            if the grid itself has those turns (n = 1, 2, 4), or if n is above 16. Layers that are
            asked for ``"isotropic"`` stencils put in their own group's. In space all rotations
            count alike.

    Raises:
        ValueError: for a number of rotations below 0.

    >>> laplacian = Isotropic().weights((2, 0), 3) + Isotropic().weights((0, 2), 3)
    >>> laplacian.round(3).tolist()[0]
    [0.181, 0.637, 0.181]
    """

    rotations: int = 0
    name: ClassVar[str] = "isotropic"

    def __post_init__(self) -> None:
        whole = isinstance(self.rotations, int) and not isinstance(self.rotations, bool)
        if not whole or self.rotations < 0:
            raise ValueError(f"expected a number of rotations, 0 or more; got {self.rotations!r}")
        if self.rotations > 16 or self.rotations in (1, 2, 4):
            object.__setattr__(self, "rotations", 0)

    def harmonic_weights(
        self, p: int, q: int, size: int, aspect: float = 1.0
    ) -> npt.NDArray[np.complex128]:
        return _isotropic(p, q, size, self.rotations, aspect)

    def designed(self, order: int, dimension: int, size: int, aspect: Aspect) -> FloatArray:
        return _isotropic_set(order, dimension, size, aspect)


@dataclass(frozen=True)
class Gaussian(HarmonicStencils):
    """Derivatives of a Gaussian, with their Taylor moments put right.

    Sampled derivatives of a Gaussian have wrong low moments on a few pixels and do not converge to
    the derivative as images get smoother. Here the samples get the smallest correction, measured
    against the Gaussian itself, that makes all moments through order N + 1 exact.

    Args:
        width: standard deviation of the Gaussian in pixels; wider suppresses more noise.

    Raises:
        ValueError: for a width that is not between 0.3 and 100 pixels.

    >>> x = np.arange(-2, 3)
    >>> round(float((Gaussian(width=0.7).weights((1, 0), 5) * x).sum()), 12)
    1.0
    """

    width: float = 1.0
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        # Narrower, its samples beside the centre vanish; wider, it is flat on every support.
        if not isinstance(self.width, float | int) or not 0.3 <= self.width <= 100:
            raise ValueError(f"expected a width of 0.3 to 100 pixels; got {self.width!r}")

    def harmonic_weights(
        self, p: int, q: int, size: int, aspect: float = 1.0
    ) -> npt.NDArray[np.complex128]:
        return _gaussian(p, q, size, self.width, aspect)

    def designed(self, order: int, dimension: int, size: int, aspect: Aspect) -> FloatArray:
        return _gaussian_set(order, dimension, size, self.width, aspect)


StencilsLike = StencilSet | str


def stencil_set(stencils: StencilsLike, accuracy: int = 2, rotations: int = 0) -> StencilSet:
    """Read a stencil set: ``"isotropic"``, ``"central"``, ``"gaussian"``, or the set itself.

    ``accuracy`` is for central stencils, ``rotations`` for isotropic ones.

    Raises:
        ValueError: for another name, or for an accuracy that these stencils do not have.

    >>> stencil_set("central", accuracy=4)
    Central(accuracy=4)
    """
    if isinstance(stencils, StencilSet):
        if not isinstance(accuracy, int) or accuracy not in (2, stencils.accuracy):
            raise ValueError(
                f"expected accuracy={stencils.accuracy}, that of {stencils!r}; got {accuracy!r}"
            )
        return stencils
    if isinstance(stencils, str) and stencils == "central":
        return Central(accuracy)
    if not isinstance(stencils, str) or stencils not in ("isotropic", "gaussian"):
        raise ValueError(
            f"unknown stencils {stencils!r}: expected 'isotropic', 'central', 'gaussian' or a "
            "StencilSet such as Gaussian(width=0.8)"
        )
    if not isinstance(accuracy, int) or accuracy != 2:
        raise ValueError(
            f"expected accuracy=2 with {stencils!r} stencils, only central ones have others; "
            f"got {accuracy!r}"
        )
    return Isotropic(rotations) if stencils == "isotropic" else Gaussian()


def central(exponents: Exponents, accuracy: int = 2, size: int | None = None) -> Stencil:
    """The central-difference stencil of one monomial, such as ∂xxy for ``(2, 1)``.

    Raises:
        ValueError: for exponents that are no whole numbers, and an accuracy that is odd or below 2.

    >>> central((1, 0)).weights[1].tolist()
    [-0.5, 0.0, 0.5]
    """
    (order,) = OperatorSet(exponent_tuples([exponents]))
    check_order(sum(order))
    return Central(accuracy).stencil(Polynomial.monomial(order), size)


def check_size(size: int, smallest: int, what: str, stencils: StencilSet) -> int:
    """Return ``size``, or say why it cannot hold the operators."""
    if not isinstance(size, int) or size is True or size % 2 == 0 or size < smallest:
        raise ValueError(
            f"expected an odd size of at least {smallest} for the {stencils.name} stencils of "
            f"{what}; got {size!r}"
        )
    if size > _LARGEST:
        raise ValueError(f"expected a size of at most {_LARGEST} for stencils; got {size!r}")
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
    return frozen(np.array(weights))


def harmonic(p: int, q: int) -> Polynomial:
    """The operator D₊^p D₋^q, of order p + q and angular frequency p − q.

    >>> print(harmonic(1, 1))
    ∂xx + ∂yy
    """
    dx, dy = Polynomial.variables(2)
    return (dx + dy * 1j) ** p * (dx + dy * -1j) ** q


# What the isotropic stencils are designed for. The figures behind each choice, and what else was
# tried, are in docs/decisions.md.
_SMOOTHNESS = (1.0, 1.5, 2.0, 3.0)  # of the random fields, in pixels
_SMOOTH_WEIGHT = 6.5  # the power of the smoothness by which a field weighs more
_LEAST_LEAK = 0.2  # least weight of a leak, also of one that the group's turns do not show
_CONSISTENCY = 2.5e-6  # weight of plain accuracy up to 5×5 …
_CONSISTENCY_WIDE = 3e-8  # … and on wider supports, where leaks are a hundred times smaller


@lru_cache(maxsize=256)
def _isotropic(
    p: int, q: int, size: int, rotations: int, aspect: float
) -> npt.NDArray[np.complex128]:
    """Minimise the leak into wrong angular frequencies under exact moments.

    A field of smoothness σ has the power spectrum e^{−σ²|κ|²}. The symbol ŝ(κ) = Σ_x s_x e^{iκ·x}
    splits into angular frequencies l, and turns correctly where only l = m = p − q occurs. Their
    energies are quadratic forms in the weights with closed coefficients:
    ∫ e^{−σ²|κ|²} over the plane gives G(x − y) = e^{−|x−y|²/4σ²} for all frequencies together, and
    e^{−(|x|²+|y|²)/4σ²} I_l(|x||y|/2σ²) e^{il(φ_x−φ_y)} for frequency l alone.
    """
    if p == q == 0:
        return frozen(_delta(size))
    m = p - q
    points = _complex_points(size, aspect)
    quadratic = np.zeros((size**2, size**2), dtype=np.complex128)
    linear = np.zeros(size**2, dtype=np.complex128)
    consistency = _CONSISTENCY if size <= 5 else _CONSISTENCY_WIDE
    for sigma in _SMOOTHNESS:
        everything = np.exp(-(np.abs(points[:, None] - points) ** 2) / (4 * sigma**2))
        leak = everything - _frequency_energy(points, m, sigma)
        # A turn by θ shows 1 − cos(dθ) of what leaked by d frequencies; 1 is the mean over all θ.
        # The grid's quarter turns leave d = ±4, ±8 …, of which those beyond 12 hardly matter;
        # half turns of rectangles leave every even d.
        for d in range(0, 13, 4 if aspect == 1.0 else 2)[1:] if rotations else ():
            excess = max(1 - math.cos(2 * math.pi * d / rotations), _LEAST_LEAK) - 1
            both = [_frequency_energy(points, m + step, sigma) for step in (d, -d)]
            leak = leak + excess * sum(both)
        unit = sigma**_SMOOTH_WEIGHT
        quadratic += unit * (leak + consistency * everything)
        linear += unit * consistency * _gaussian_derivative(p, q, -points, 2 * sigma**2)
    return frozen(_constrained(p, q, size, quadratic, linear, aspect))


@lru_cache(maxsize=256)
def _gaussian(p: int, q: int, size: int, width: float, aspect: float) -> npt.NDArray[np.complex128]:
    """Samples of a differentiated Gaussian with the smallest correction that sets the moments."""
    if p == q == 0:
        return frozen(_delta(size))
    points = _complex_points(size, aspect)
    # Correlation with s reads f at x where convolution reads it at −x.
    samples = _gaussian_derivative(p, q, -points, width**2) / (2 * math.pi * width**2)
    operator = harmonic(p, q)
    powers = monomials(operator.order + 1, 2)
    moments = np.array([operator.coefficient(exponents) for exponents in powers])
    rows = taylor_terms(powers, size, 2, aspect)
    # The correction c with the least Σ |c|²/g among those that set the moments is √g times the
    # shortest solution of rows·√g; scaled so, weights that span many orders stay accurate.
    root = np.exp(-(np.abs(points) ** 2) / (4 * width**2))
    missing = moments - rows @ samples
    correction = root * np.linalg.lstsq(rows * root, missing, rcond=1e-14)[0]
    weights = _symmetrised((samples + correction).reshape(size, size), p - q, aspect == 1.0)
    return Stencil(operator, weights, 2, aspect).weights


@lru_cache(maxsize=256)
def _isotropic_set(order: int, dimension: int, size: int, aspect: Aspect) -> FloatArray:
    """The same design in any dimension, for all angles alike."""
    fields = [Field(sigma, sigma**_SMOOTH_WEIGHT) for sigma in _SMOOTHNESS]
    consistency = _CONSISTENCY if size <= 5 else _CONSISTENCY_WIDE
    points, conditions = _grid(order, dimension, size, aspect)
    return (
        designed(order, points, conditions, fields, consistency)
        if order
        else frozen(_nothing(points))
    )


@lru_cache(maxsize=256)
def _gaussian_set(
    order: int, dimension: int, size: int, width: float, aspect: Aspect
) -> FloatArray:
    points, conditions = _grid(order, dimension, size, aspect)
    if not order:
        return frozen(_nothing(points))
    variance = width**2
    # Correlation with s reads f at x where convolution reads it at −x.
    samples = gaussian_derivatives(order, -points, variance)
    samples = samples / (2 * math.pi * variance) ** (dimension / 2)
    unit = np.exp(-(points**2).sum(axis=1) / (2 * variance))
    return nearest(order, points, conditions, samples, unit)


def _grid(order: int, dimension: int, size: int, aspect: Aspect) -> tuple[FloatArray, FloatArray]:
    """The points of a patch ``[n, d]``, and the Taylor terms there through order + 1."""
    points = np.stack([axis.ravel() for axis in coordinates(size, dimension, aspect)], axis=1)
    return points, taylor_terms(monomials(order + 1, dimension), size, dimension, aspect)


def _nothing(points: FloatArray) -> FloatArray:
    """The stencil of order 0: one point."""
    return (np.abs(points).sum(axis=1) == 0).astype(np.float64)[None]


def _constrained(
    p: int,
    q: int,
    size: int,
    quadratic: npt.NDArray[np.complexfloating[Any]],
    linear: npt.NDArray[np.complexfloating[Any]],
    aspect: float,
) -> npt.NDArray[np.complex128]:
    """The weights s that minimise sᴴQs − 2 Re(sᴴb) among all stencils of D₊^p D₋^q.

    A stencil of it has exact moments through order p + q + 1 and the symmetry of the operator
    under the grid's eight symmetries, four on rectangles, which leaves a handful of real unknowns.
    """
    operator = harmonic(p, q)
    square = aspect == 1.0
    basis = _symmetric_basis(
        p - q, size, square
    )  # [size², unknowns], complex columns, real combinations
    powers = monomials(operator.order + 1, 2)
    conditions = taylor_terms(powers, size, 2, aspect) @ basis
    moments = np.array([operator.coefficient(exponents) for exponents in powers])
    conditions = np.concatenate([conditions.real, conditions.imag])
    moments = np.concatenate([moments.real, moments.imag])
    values, vectors = np.linalg.svd(conditions)[1:]
    free = vectors[int((values > 1e-10 * values[0]).sum()) :].T
    start = np.linalg.lstsq(conditions, moments, rcond=1e-10)[0]
    cost = (basis.conj().T @ quadratic @ basis).real
    target = (basis.conj().T @ linear).real
    step = np.linalg.lstsq(free.T @ cost @ free, free.T @ (target - cost @ start), rcond=None)[0]
    weights = _symmetrised((basis @ (start + free @ step)).reshape(size, size), p - q, square)
    return Stencil(operator, weights, 2, aspect).weights


def _symmetric_basis(m: int, size: int, square: bool) -> npt.NDArray[np.complex128]:
    """An orthonormal basis of the weights that turn with angular frequency m on the grid."""
    units = np.eye(size**2).reshape(-1, size, size)
    rows = _symmetrised(np.concatenate([units, 1j * units]), m, square).reshape(-1, size**2)
    vectors, values = np.linalg.svd(np.concatenate([rows.real, rows.imag], axis=1).T)[:2]
    kept = vectors[:, values > 1e-9]
    return kept[: size**2] + 1j * kept[size**2 :]


def _symmetrised(weights: npt.NDArray[Any], m: int, square: bool) -> npt.NDArray[np.complex128]:
    """The mean over the grid's symmetries: a quarter turn multiplies by i^m, a flip conjugates.

    Rectangles have half turns and flips alone.
    """
    # i^m is a permutation of real and imaginary parts with signs, so the mean is exactly symmetric
    # as soon as the sum does not depend on the order of its terms: quarter turns first, in pairs.
    half = (weights + (-1) ** m * np.rot90(weights, 2, (-2, -1))) / 2
    if square:
        half = (half + np.array([1, 1j, -1, -1j])[m % 4] * np.rot90(half, 1, (-2, -1))) / 2
    return (half + half[..., ::-1, :].conj()) / 2


def _frequency_energy(
    points: npt.NDArray[np.complex128], frequency: int, sigma: float
) -> npt.NDArray[np.complex128]:
    """The quadratic form of one angular frequency under the spectrum e^{−σ²|κ|²}."""
    radii, place = np.unique(np.abs(points).round(12), return_inverse=True)
    # The Bessel function I_l(z) = mean of e^{z cos t} cos(lt), which equidistant points give to
    # rounding; the Gaussian factor is taken inside so that nothing overflows.
    t = 2 * np.pi * np.arange(64) / 64
    distance = radii[:, None, None] ** 2 + radii[:, None] ** 2
    distance = distance - 2 * radii[:, None, None] * radii[:, None] * np.cos(t)
    bessel = (np.exp(-distance / (4 * sigma**2)) * np.cos(frequency * t)).mean(axis=-1)
    unit = np.where(points == 0, 1, points / np.maximum(np.abs(points), 1e-300)) ** frequency
    return bessel[place[:, None], place] * unit[:, None] * unit.conj()


def _gaussian_derivative(
    p: int, q: int, points: npt.NDArray[np.complex128], variance: float
) -> npt.NDArray[np.complex128]:
    """D₊^p D₋^q of e^{−|u|²/2v}, in closed form, p ≥ q.

    With u₊ = x + iy: D₊ u₋ = 2, D₊ u₊ = 0, and D₊ multiplies the Gaussian by −u₊/v.
    """
    plus, minus = -points / variance, -points.conj() / variance
    total = sum(
        math.comb(p, j)
        * math.perm(q, j)
        * (-2 / variance) ** j
        * minus ** (q - j)
        * plus ** (p - j)
        for j in range(q + 1)
    )
    return total * np.exp(-(np.abs(points) ** 2) / (2 * variance))


def _complex_points(size: int, aspect: float) -> npt.NDArray[np.complex128]:
    x, y = coordinates(size, 2, aspect)
    return (x + 1j * y).ravel()


def _delta(size: int) -> npt.NDArray[np.complex128]:
    weights = np.zeros((size, size), dtype=np.complex128)
    weights[size // 2, size // 2] = 1
    return weights
