"""Group × operators × stencils → the fixed arrays that turn coefficients into filters.

This module knows what a learned weight means and how it should be drawn; it stays in numpy float64
and knows nothing of tensors or of how a convolution is run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from econv.groups import FloatArray, Group, GroupLike, frozen
from econv.operators import OperatorSet, OperatorsLike, Polynomial, monomials, operator_set
from econv.stencils import (
    Aspect,
    Central,
    Gaussian,
    Isotropic,
    StencilSet,
    StencilsLike,
    check_size,
    stencil_set,
)

__all__ = ["COORDINATES", "INITIALISATIONS", "FilterBasis", "Gains", "basis_of", "filter_basis"]

COORDINATES = ("pixels", "orthonormal")
"""What the numbers of a weight are coordinates of; see :class:`FilterBasis`. Their places in this
tuple are what states of layers hold."""

INITIALISATIONS = ("relu", "silu", "gelu", "softplus", "paper")
"""``"paper"``: He on the canonical filter (section 4.4). The others: the same times one scalar that
makes the gain of a convolution followed by that function 1."""

_TORUS = {2: 24, 3: 12}  # pixels along each side of the periodic image that gains are computed on
_WIDTH = 32  # its fields: in a finite network gains fluctuate, and their typical value is lower
_DEPTH = 50  # layers of the network, fed with white noise, whose mean gain is computed


class Gains(NamedTuple):
    """Factors by which one layer at initialisation multiplies the second moment of its input.

    Expected values for a wide layer; the square roots are the factors for amplitudes.
    """

    constant: float
    """For constant images, mean over the orientations, without nonlinearity."""
    noise: float
    """For white noise, mean over the orientations, without nonlinearity."""
    relu: float
    """For the layer followed by ReLU, on white noise: the typical gain per layer, the geometric
    mean over a network of fifty layers with 32 fields."""


@dataclass(frozen=True)
class FilterBasis:
    """The filters of one group, operator set and stencil set: a value, made by `filter_basis`.

    A learned weight is a vector of ``len(operators)`` numbers: the *canonical filter* χ^(I), as
    central differences on their smallest support write it, in coordinates of an orthonormal basis.
    With ``coordinates="orthonormal"``, the default, the first of them alone is the filter's answer
    to constants and the others follow the derivatives, order by order; optimisers that treat
    numbers one by one, as Adam does, then move means and details apart. With ``"pixels"``, the
    way of the first version, the numbers are the pixels, row by row from the top, where the
    operators fill the support, as the paper's nine fill 3×3. The paper's β follows from the linear
    system of its section 4.4, β = weight · :attr:`canonical`.

    >>> basis = filter_basis("p8", "paper", "central")
    >>> basis.size, basis.turned.shape
    (5, (8, 9, 5, 5))
    """

    group: Group
    operators: OperatorSet
    stencils: StencilSet
    size: int
    aspect: Aspect = 1.0
    """Height of a pixel over its width, in space depth and height over width. Spacings are sides of
    a square of the same area, or a cube of the same volume."""
    coordinates: str = "orthonormal"

    @cached_property
    def turned(self) -> FloatArray:
        """Operator s in frame A as weights at spacing 1: ``[order, operators, size, size]``."""
        coefficients = self.operators.turned(self.group)
        columns = monomials(self.operators.order, self.operators.dimension)
        used = np.flatnonzero(np.abs(coefficients).max(axis=(0, 1)))
        weights = np.stack([self.monomial(columns[j]) for j in used])
        return frozen(np.tensordot(coefficients[..., used], weights, axes=1))

    def monomial(self, exponents: tuple[int, ...]) -> FloatArray:
        """The stencil of ∂^exponents on the support of the basis, at spacing 1."""
        operator = Polynomial.monomial(exponents)
        grid = (self.size,) if self.aspect == 1.0 else (self.size, self.aspect)
        found = self.stencils.stencil(operator, *grid).weights
        return found.astype(np.float64)

    @cached_property
    def canonical_filters(self) -> FloatArray:
        """The linear system T: each operator as a canonical filter, ``[operators, taps]``.

        Always central differences of second order on the smallest support that holds the operators
        themselves (3×3 for the paper's nine), of squares, whatever stencils and pixels the layer
        runs with: the system fixes what a weight *means*, so that weights can move between them.
        """
        central = Central()
        upright = [Polynomial.monomial(exponents) for exponents in self.operators]
        size = central.smallest_size(upright)
        rows = [central.weights(exponents, size).ravel() for exponents in self.operators]
        return frozen(np.stack(rows))

    @cached_property
    def canonical(self) -> FloatArray:
        """The matrix from weights to coefficients at spacing 1, β = weight · canonical."""
        system = self.canonical_filters
        if self.coordinates == "orthonormal":
            filters = _orthonormal(system, np.array(self.operators.orders))
            return frozen(filters @ np.linalg.pinv(system))
        if system.shape[0] == system.shape[1]:
            return frozen(np.linalg.inv(system))
        # T = Rᵀ Qᵀ with orthonormal columns in Q: weight = β Rᵀ are the coordinates in Qᵀ.
        triangular = np.linalg.qr(system.T)[1]
        signs = np.where(np.diag(triangular) < 0, -1.0, 1.0)
        return frozen(np.linalg.inv((triangular * signs[:, None]).T))

    @cached_property
    def from_pixels(self) -> FloatArray:
        """The orthogonal matrix from weights in pixels to weights in these coordinates."""
        pixels = dataclasses.replace(self, coordinates="pixels")
        return frozen(pixels.canonical @ np.linalg.inv(self.canonical))

    @cached_property
    def synthesis(self) -> FloatArray:
        """The filters of each coordinate of the weight: ``[order, operators, size, size]``.

        The filter in frame A is Σ_j weight[j] · synthesis[A, j].
        """
        return frozen(np.einsum("sj,gj...->gs...", self.canonical, self.turned))

    def to_coefficients(self, spacing: float) -> FloatArray:
        """The matrix from weights to the paper's β on a grid of the given spacing.

        A derivative of order m divides by spacing^m, and β multiplies by it: the filters
        themselves do not depend on the spacing.
        """
        return self.canonical * self._spacing_powers(spacing)

    def from_coefficients(self, spacing: float) -> FloatArray:
        """The inverse of :meth:`to_coefficients`."""
        return np.linalg.inv(self.canonical) / self._spacing_powers(spacing)[:, None]

    def _spacing_powers(self, spacing: float) -> FloatArray:
        return np.power(float(spacing), np.array(self.operators.orders, dtype=np.float64))

    def scale(self, initialisation: str) -> float:
        """The factor that an initialisation puts before He's standard deviation."""
        if initialisation not in INITIALISATIONS:
            raise ValueError(
                f"unknown initialisation {initialisation!r}: expected one of {INITIALISATIONS}"
            )
        if initialisation == "paper":
            return 1.0
        if initialisation == "relu":
            return 1.0 / math.sqrt(self._he_gains.relu)
        if initialisation not in self._scales:
            self._scales[initialisation] = self._smooth_scale(_SMOOTH[initialisation])
        return self._scales[initialisation]

    @cached_property
    def _scales(self) -> dict[str, float]:
        return {}

    def standard_deviation(self, fan_in: int, initialisation: str = "relu") -> float:
        """The standard deviation of a weight; ``fan_in`` counts the maps that one output reads."""
        return self.scale(initialisation) * math.sqrt(2.0 / (fan_in * len(self.operators)))

    def gains(self, initialisation: str = "relu") -> Gains:
        """What one layer at initialisation does to constants, to white noise and under ReLU.

        >>> gains = filter_basis("p8", "paper", "central").gains("paper")
        >>> round(gains.constant, 3), round(gains.noise, 3), round(gains.relu, 3)
        (2.0, 3.174, 1.538)
        >>> round(filter_basis("p8", "paper", "central").gains("relu").relu, 6)
        1.0
        """
        square = self.scale(initialisation) ** 2
        return Gains(*(square * gain for gain in self._he_gains))

    @cached_property
    def _he_gains(self) -> Gains:
        """The gains of He's initialisation in the limit of many fields.

        Weights are independent between relative orientations and fields, so the power spectrum of
        output orientation A is the mean input spectrum times Σ_j |ŝ_Aj|², s_Aj the filters of
        `synthesis`. Over many fields it is a Gaussian field, whose autocovariance ReLU maps in
        closed form (Cho & Saul 2009). Iterating both from white noise gives the gain of each layer.

        With N fields the gain of a layer fluctuates, by a variance of 5/N for maps that are
        constant (Hanin & Nica 2020) and less the faster their correlation falls with distance;
        its logarithm averages lower by half of that.
        """
        power, axes, corner = self._he_power
        constant, noise = float(power[corner].mean()), float(power.mean())
        covariance = np.zeros(power.shape[1:])
        covariance[corner] = 1.0
        logarithm = 0.0
        for _ in range(_DEPTH):
            spectrum = np.fft.fftn(covariance, axes=axes).real
            before = np.fft.ifftn(power * spectrum, axes=axes).real
            after = _relu_covariance(before, before[corner]).mean(axis=0)
            logarithm += math.log(after[corner])
            covariance = after / after[corner]
            logarithm -= 2.5 / _WIDTH * float((covariance**2).mean())
        return Gains(constant, noise, math.exp(logarithm / _DEPTH))

    @cached_property
    def _he_power(self) -> tuple[FloatArray, tuple[int, ...], tuple[Any, ...]]:
        """The mean squared symbol of each orientation, its axes, and where its constant is."""
        axes = tuple(range(-self.operators.dimension, 0))
        torus = (
            max(_TORUS.get(self.operators.dimension, 24), 2 * self.size),
        ) * self.operators.dimension
        spectra = np.abs(np.fft.fftn(self.synthesis, torus, axes=axes)) ** 2
        power = spectra.sum(axis=1) * (2.0 / len(self.operators))  # [order, *torus]
        return power, axes, (...,) + (0,) * self.operators.dimension

    def _smooth_scale(self, function: Callable[[FloatArray], FloatArray]) -> float:
        """The scale of a function that, unlike ReLU, bends: what a layer does hangs on its scale.

        Every layer of the same recursion is scaled so that the second moment after it is 1; what is
        given is the geometric mean of these scales. The covariance after the function is a power
        series in the correlation before it, whose coefficients are the function's own in Hermite
        polynomials. The width counts as for ReLU, by the function's fourth moment.
        """
        power, axes, corner = self._he_power
        covariance = np.zeros(power.shape[1:])
        covariance[corner] = 1.0
        logarithm = 0.0
        for _ in range(_DEPTH):
            spectrum = np.fft.fftn(covariance, axes=axes).real
            before = np.fft.ifftn(power * spectrum, axes=axes).real
            variance = before[corner]
            low, high = -12.0, 12.0  # of the logarithm of the squared scale
            for _ in range(50):
                middle = (low + high) / 2
                moments = _hermite(function, math.exp(middle) * variance)[1]
                low, high = (low, middle) if moments.mean() > 1 else (middle, high)
            series, _, fourth = _hermite(function, math.exp(low) * variance)
            shape = variance.shape + (1,) * (before.ndim - 1)
            correlation = np.clip(before / variance.reshape(shape), -1.0, 1.0)
            after = np.zeros_like(before)
            for coefficients in reversed(series):  # Horner's scheme
                after = after * correlation + coefficients.reshape(shape)
            covariance = after.mean(axis=0)
            spread = (float(fourth.mean()) - 1) / (2 * _WIDTH)
            logarithm += low + spread * float((covariance**2).mean())
        return math.exp(logarithm / _DEPTH / 2)

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that stand for the content, in every process.

        From then on `basis_of` finds a basis of that content in this process.
        """
        stencils = self.stencils
        if type(stencils) in _OWN:
            # What defines the filters, not the filters: their last digits differ between machines.
            numbers = [float(value) for value in dataclasses.astuple(stencils)]  # type: ignore[call-overload]
            filters = f"{stencils.name} {numbers}"
        else:
            filters = hashlib.sha256(self.synthesis.tobytes()).hexdigest()
        operators = [[int(e) for e in exponents] for exponents in self.operators]
        content = f"{self.group.name} {operators} {self.size} {filters} {self.coordinates}"
        content += f" {self.aspect!r}" if self.aspect != 1.0 else ""
        content += f" {self.operators.angle!r}" if self.operators.angle else ""
        found = hashlib.sha256(content.encode()).hexdigest()[:32]
        _digested.setdefault(found, self)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt from its parts: a pickled layer holds no expanded array.
        parts = (self.group, self.operators, self.stencils, self.size)
        return filter_basis, (*parts, self.stencils.accuracy, self.aspect, self.coordinates)

    def __repr__(self) -> str:
        more = f", aspect={self.aspect}" if self.aspect != 1.0 else ""
        more += f", coordinates={self.coordinates!r}" if self.coordinates == "pixels" else ""
        return (
            f"FilterBasis({self.group}, {self.operators.name!r}, {self.stencils!r}, "
            f"size={self.size}{more})"
        )


_OWN = (Central, Gaussian, Isotropic)
_digested: WeakValueDictionary[str, FilterBasis] = WeakValueDictionary()


def basis_of(digest: str) -> FilterBasis | None:
    """The basis with this `FilterBasis.digest`, if this process has asked for its digest.

    >>> basis = filter_basis("p4")
    >>> basis_of(basis.digest) is basis
    True
    """
    return _digested.get(digest)


def filter_basis(
    group: GroupLike,
    operators: OperatorsLike | None = None,
    stencils: StencilsLike = "isotropic",
    size: int | None = None,
    accuracy: int = 2,
    aspect: Aspect = 1.0,
    coordinates: str = "orthonormal",
) -> FilterBasis:
    """The filter basis of a group, an operator set and a stencil set, made once per process.

    ``operators`` are the paper's nine by default, in space the ten of ``"order<=2"``; ``size`` is
    the support of the filters, the smallest odd one that holds every turned operator by default;
    ``aspect`` the height of a pixel over its width, in space depth and height over width;
    ``coordinates`` are those of a weight, ``"orthonormal"`` or ``"pixels"``.

    Raises:
        ValueError: for unknown names, or a size that does not hold every turned operator.

    >>> basis = filter_basis("p8")
    >>> basis.turned.shape  # [element, operator, height, width]
    (8, 9, 5, 5)
    """
    if coordinates not in COORDINATES:
        raise ValueError(f"expected coordinates as one of {COORDINATES}; got {coordinates!r}")
    if not isinstance(size, Hashable):
        raise ValueError(f"expected an odd size of at least 1, as one number; got {size!r}")
    found = Group(group)
    return _filter_basis(
        found,
        operator_set(operators, found.dimension),
        stencil_set(stencils, accuracy, found.steps),
        size,
        _aspect(aspect),
        coordinates,
    )


def _aspect(given: Aspect) -> Aspect:
    lengths = given if isinstance(given, tuple | list) else (given,)
    try:
        found = tuple(float(length) for length in lengths)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected aspect as a number, or several; got {given!r}") from error
    if lengths is not given:
        return found[0]
    return 1.0 if set(found) == {1.0} else found


@lru_cache(maxsize=64, typed=True)
def _filter_basis(
    group: Group,
    operators: OperatorSet,
    stencils: StencilSet,
    size: int | None,
    aspect: Aspect,
    coordinates: str,
) -> FilterBasis:
    columns = monomials(operators.order, operators.dimension)
    used = np.abs(operators.turned(group)).max(axis=(0, 1)) > 0
    needed = [Polynomial.monomial(e) for e, kept in zip(columns, used, strict=True) if kept]
    smallest = stencils.smallest_size(needed)
    what = f"the operators {operators.name!r} in {group.name}"
    return FilterBasis(
        group,
        operators,
        stencils,
        check_size(smallest if size is None else size, smallest, what, stencils),
        aspect,
        coordinates,
    )


def _orthonormal(filters: FloatArray, orders: np.ndarray) -> FloatArray:
    """Orthonormal filters with the same span, ``[operators, taps]``.

    Those of one order are made orthonormal together, by the nearest orthonormal ones, so that the
    grid's own symmetries permute them up to signs as they permute the derivatives; order by order,
    each without its share in those before, and the identity last: what is left of it is the only
    one of them with a sum.
    """
    found = np.zeros_like(filters)
    for order in sorted(set(orders.tolist()), key=lambda order: (order == 0, order)):
        here = orders == order
        block = filters[here]
        for _ in range(2):  # the second time takes what rounding left
            block = block - block @ found.T @ found
            left, _, right = np.linalg.svd(block, full_matrices=False)
            block = left @ right
        found[here] = block
    return found


def _silu(x: FloatArray) -> FloatArray:
    return x / (1 + np.exp(-x))


def _gelu(x: FloatArray) -> FloatArray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def _softplus(x: FloatArray) -> FloatArray:
    return np.logaddexp(x, 0.0)


_SMOOTH: dict[str, Callable[[FloatArray], FloatArray]] = {
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus,
}
_TERMS = 24  # of the series in Hermite polynomials


@lru_cache
def _quadrature() -> tuple[FloatArray, FloatArray]:
    """Nodes of Gauss and Hermite, and there each polynomial times the weight, orthonormal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    polynomials = [np.ones_like(nodes), nodes]
    for k in range(1, _TERMS - 1):
        polynomials.append(
            (nodes * polynomials[k] - math.sqrt(k) * polynomials[k - 1]) / math.sqrt(k + 1)
        )
    return nodes, np.stack(polynomials) * weights / weights.sum()


def _hermite(
    function: Callable[[FloatArray], FloatArray], variance: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """For Gaussians of these variances: the series of the covariance of the function's values in
    the correlation, ``[terms, *variance]``; their second moment; their fourth.
    """
    nodes, polynomials = _quadrature()
    values = function(np.sqrt(variance)[..., None] * nodes)
    second, fourth = (values**2) @ polynomials[0], (values**4) @ polynomials[0]
    series = np.moveaxis(values @ polynomials.T, -1, 0) ** 2
    return series, second, fourth


def _relu_covariance(covariance: FloatArray, variance: FloatArray) -> FloatArray:
    """E[relu(u) relu(v)] for Gaussian u, v with the given covariance and equal variances."""
    scale = variance.reshape(variance.shape + (1,) * (covariance.ndim - variance.ndim))
    cosine = np.clip(covariance / scale, -1.0, 1.0)
    angle = np.arccos(cosine)
    return scale * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)
