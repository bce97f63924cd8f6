"""Differential operators with constant coefficients: polynomials in ∂.

This module knows how an orthogonal matrix acts on operators and which operators a group needs.
Every action is derived by substitution, ∇ → A⁻¹∇; no rotated operator is typed in anywhere.
It knows nothing of pixels or tensors.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from econv.groups import FloatArray, Group, GroupLike, frozen

__all__ = ["OperatorSet", "OperatorsLike", "Polynomial", "action", "monomials", "operator_set"]

Exponents = tuple[int, ...]
Scalar = float | complex

_PAPER = ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2))
_AXES = "xyz"
_HIGHEST = 12
"""The order of derivation beyond which rounding is all that is left of a stencil of any size."""


@dataclass(frozen=True)
class Polynomial:
    """A differential operator: a polynomial in the d derivatives, real or complex.

    >>> dx, dy = Polynomial.variables(2)
    >>> laplacian = dx**2 + dy**2
    >>> print(laplacian)
    ∂xx + ∂yy
    >>> print(dx.in_frame(np.array([[0.0, -1.0], [1.0, 0.0]])))
    ∂y
    """

    terms: tuple[tuple[Exponents, Scalar], ...]
    """(exponents, coefficient) for every monomial with a coefficient other than zero, sorted."""
    dimension: int

    @classmethod
    def of(cls, terms: Mapping[Exponents, Scalar], dimension: int) -> Polynomial:
        """The polynomial with the given coefficient for each exponent tuple."""
        kept = {exponents: value for exponents, value in terms.items() if value != 0}
        return cls(tuple(sorted(kept.items(), key=lambda term: _reading_order(term[0]))), dimension)

    @classmethod
    def monomial(cls, exponents: Exponents) -> Polynomial:
        """∂^exponents, such as ∂xxy for ``(2, 1)``."""
        return cls(((tuple(exponents), 1.0),), len(exponents))

    @classmethod
    def variables(cls, dimension: int) -> tuple[Polynomial, ...]:
        """The first derivatives (∂x, ∂y, …): the components of ∇."""
        return tuple(
            cls.monomial(tuple(int(i == axis) for i in range(dimension)))
            for axis in range(dimension)
        )

    @property
    def order(self) -> int:
        """The highest order of derivation; 0 for a constant."""
        return max((sum(exponents) for exponents, _ in self.terms), default=0)

    def coefficient(self, exponents: Exponents) -> Scalar:
        """The coefficient of ∂^exponents."""
        return dict(self.terms).get(exponents, 0.0)

    def in_frame(self, matrix: npt.ArrayLike) -> Polynomial:
        """The same operator in the turned frame: χ^(A), every ∂ replaced by A⁻¹∇ (equations 5, 7).

        ``matrix`` is A, orthogonal, ``[d, d]``.
        """
        orthogonal = _orthogonal(matrix, self.dimension)
        nabla = self.variables(self.dimension)
        # A⁻¹ = Aᵀ: component i of A⁻¹∇ is Σ_j A[j, i] ∂_j.
        turned = [
            _sum((nabla[j] * orthogonal[j, i] for j in range(self.dimension)), self.dimension)
            for i in range(self.dimension)
        ]
        powers = [_Powers(component) for component in turned]
        return _sum(
            (
                math.prod((powers[i][e] for i, e in enumerate(exponents) if e), start=one) * value
                for one in [Polynomial.monomial((0,) * self.dimension)]
                for exponents, value in self.terms
            ),
            self.dimension,
        )

    def __add__(self, other: Polynomial) -> Polynomial:
        return _sum((self, other), self.dimension)

    def __mul__(self, other: Polynomial | Scalar) -> Polynomial:
        if not isinstance(other, Polynomial):
            factor = complex(other) if isinstance(other, complex) else float(other)
            return Polynomial.of({e: v * factor for e, v in self.terms}, self.dimension)
        if other.dimension != self.dimension:
            raise ValueError(_mixed_dimensions(self.dimension, other.dimension))
        product: dict[Exponents, Scalar] = {}
        for (left, a), (right, b) in itertools.product(self.terms, other.terms):
            exponents = tuple(map(sum, zip(left, right, strict=True)))
            product[exponents] = product.get(exponents, 0.0) + a * b
        return Polynomial.of(product, self.dimension)

    __rmul__ = __mul__

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + other * -1.0

    def __pow__(self, exponent: int) -> Polynomial:
        if not isinstance(exponent, int) or exponent < 0:
            raise ValueError(f"expected a whole exponent, 0 or more; got {exponent!r}")
        if exponent > 64:
            raise ValueError(f"expected an exponent of at most 64; got {exponent!r}")
        return _Powers(self)[exponent]

    def __str__(self) -> str:
        return " + ".join(_term_text(e, v) for e, v in self.terms).replace("+ -", "- ") or "0"


@dataclass(frozen=True)
class OperatorSet:
    """The monomials of the polynomial H, in the order of its coefficients β.

    Raises:
        ValueError: for exponents that are no whole numbers, and monomials that come twice.

    >>> operator_set("paper").monomials[:4]
    ((0, 0), (1, 0), (0, 1), (2, 0))
    >>> len(operator_set("paper").closure("p8"))
    12
    """

    monomials: tuple[Exponents, ...]
    name: str = field(default="", compare=False)
    angle: float = 0.0
    """Degrees by which the frame of the operators is turned, in the plane only. The filter of the
    identity then is turned too."""

    def __post_init__(self) -> None:
        found = self.monomials
        if not isinstance(found, tuple) or not all(isinstance(e, tuple) for e in found):
            raise ValueError(f"expected a tuple of exponent tuples; got {found!r}")
        if not found:
            raise ValueError("expected at least one monomial, such as (0, 0); got none")
        for exponents in found:
            if len(exponents) != len(found[0]) or any(e < 0 for e in exponents):
                raise ValueError(
                    "expected exponent tuples of non-negative whole numbers, all of one length, "
                    f"such as (2, 1) for ∂xxy; got {exponents!r}"
                )
        if len(set(found)) != len(found):
            raise ValueError(f"expected each monomial once; got {found!r}")
        check_order(max(map(sum, found)))
        if not math.isfinite(self.angle) or (self.angle and self.dimension != 2):
            raise ValueError(
                "expected angle as degrees in the plane, 0 (default) elsewhere; got "
                f"{self.angle!r} in {self.dimension} dimensions"
            )
        if not self.name:
            turned = f"@{self.angle:g}" if self.angle else ""
            names = (str(Polynomial.monomial(exponents)) for exponents in found)
            object.__setattr__(self, "name", ",".join(names) + turned)

    @property
    def dimension(self) -> int:
        """The dimension d of the space."""
        return len(self.monomials[0])

    @property
    def order(self) -> int:
        """The highest order of derivation."""
        return max(self.orders)

    @property
    def orders(self) -> tuple[int, ...]:
        """The order of derivation of each monomial."""
        return tuple(sum(exponents) for exponents in self.monomials)

    @property
    def polynomials(self) -> tuple[Polynomial, ...]:
        """The operators: the monomials, in the turned frame if there is an angle."""
        found = tuple(Polynomial.monomial(exponents) for exponents in self.monomials)
        if not self.angle:
            return found
        c, s = math.cos(math.radians(self.angle)), math.sin(math.radians(self.angle))
        return tuple(operator.in_frame([[c, -s], [s, c]]) for operator in found)

    def turned(self, group: GroupLike) -> FloatArray:
        """The operators in the frame of every element: ``[order, operators, monomials]``.

        Row ``[A, s]`` holds the coefficients C^(A) of operator s in frame A over
        ``monomials(self.order, self.dimension)``.
        """
        return _turned(self, Group(group))

    def closure(self, group: GroupLike) -> tuple[Polynomial, ...]:
        """A basis of the smallest space that holds these operators and all their turned copies.

        A set that is closed already is its own basis. Otherwise the basis is orthonormal for the
        inner product ⟨∂^a, ∂^b⟩ = a!/|a|! δ_ab, which rotations leave alone, so that
        :func:`action` is an orthogonal matrix. Each basis polynomial is homogeneous.
        """
        turned = self.turned(group)
        columns = monomials(self.order, self.dimension)
        degrees = np.array([sum(e) for e in columns])
        # a!/|a|!: with it, substituting an orthogonal matrix preserves the inner product.
        weights = np.sqrt([_bombieri(e) for e in columns])
        basis: list[Polynomial] = []
        for degree in sorted(set(self.orders)):
            chosen = degrees == degree
            rows = turned[:, np.array(self.orders) == degree][..., chosen]
            rows = rows.reshape(-1, int(chosen.sum())) * weights[chosen]
            values, vectors = np.linalg.svd(rows)[1:]
            rank = int((values > 1e-9 * values[0]).sum())
            names = [e for e in columns if sum(e) == degree]
            for row in vectors[:rank] / weights[chosen]:
                row = np.where(np.abs(row) < 1e-12, 0.0, row)
                terms = dict(zip(names, row.tolist(), strict=True))
                basis.append(Polynomial.of(terms, self.dimension))
        return self.polynomials if len(basis) == len(self) else tuple(basis)

    def __len__(self) -> int:
        return len(self.monomials)

    def __iter__(self) -> Iterator[Exponents]:
        return iter(self.monomials)


OperatorsLike = OperatorSet | str | Iterable[Sequence[int]]


def operator_set(operators: OperatorsLike | None = None, dimension: int = 2) -> OperatorSet:
    """Read an operator set: ``"paper"``, ``"order<=N"``, or a list of exponent tuples.

    ``"paper"`` is 1, ∂x, ∂y, ∂xx, ∂xy, ∂yy, ∂xxy, ∂xyy, ∂xxyy (two dimensions only);
    ``"order<=N"`` all monomials up to total order N, a set that is closed under every group.
    The default is ``"paper"`` in the plane, and ``"order<=2"`` in space, ten operators. After an
    ``@`` stand degrees by which the frame of all operators is turned: ``"paper@22.5"`` has the
    angles 2πk/8 + π/8 that the authors' released code takes for p8.

    Raises:
        ValueError: for unknown operators, and those of another dimension.

    >>> [str(p) for p in operator_set("order<=1").polynomials]
    ['1', '∂x', '∂y']
    >>> operator_set([(0, 0), (2, 0), (0, 2)]).name
    '1,∂xx,∂yy'
    >>> operator_set("paper@22.5").angle
    22.5
    """
    if not isinstance(dimension, int) or dimension not in (1, 2, 3):
        raise ValueError(f"expected 1, 2 or 3 dimensions; got {dimension!r}")
    if operators is None:
        operators = "paper" if dimension == 2 else "order<=2"
    if isinstance(operators, OperatorSet):
        found = operators
    elif isinstance(operators, str):
        match = re.fullmatch(
            r"(?:paper|order *<= *([0-9]+))(?:@(-?[0-9]+(?:\.[0-9]+)?))?", operators
        )
        if match is None:
            raise ValueError(
                f"unknown operators {operators!r}: expected 'paper', 'order<=N' with a whole "
                "number N, either with '@' and degrees after it, or a list of exponent tuples "
                "such as [(0, 0), (1, 0), (0, 1)]"
            )
        order = int(match[1]) if match[1] is not None and len(match[1]) < 10 else 10**9
        listed = _PAPER if match[1] is None else monomials(check_order(order), dimension)
        angle = float(match[2] or 0)
        name = ("paper" if match[1] is None else f"order<={match[1]}") + f"@{angle:g}" * bool(angle)
        found = OperatorSet(listed, name, angle)
    else:
        found = OperatorSet(exponent_tuples(operators))
    if found.dimension != dimension:
        raise ValueError(
            f"expected operators in {dimension} dimensions; {found.name!r} has {found.dimension}"
        )
    return found


def check_order(order: int) -> int:
    """The order of derivation, if stencils are made for it."""
    if order > _HIGHEST:
        raise ValueError(f"expected operators of an order of at most {_HIGHEST}; got {order}")
    return order


def monomials(order: int, dimension: int) -> tuple[Exponents, ...]:
    """All exponent tuples up to a total order, low orders first, x before y.

    >>> monomials(2, 2)
    ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2))
    """
    every = itertools.product(range(order + 1), repeat=dimension)
    return tuple(sorted((e for e in every if sum(e) <= order), key=_reading_order))


def action(matrix: npt.ArrayLike, operators: Sequence[Polynomial]) -> FloatArray:
    """The matrix by which an orthogonal A acts on a closed set of operators, ``[n, n]``.

    Row i holds operator i in frame A, written in the operators themselves. For row vectors of
    coefficients, action(BA) = action(A) · action(B). A set that A does not map into itself is an
    error: take :meth:`OperatorSet.closure` first.

    Raises:
        ValueError: for complex operators, and for a set that the matrix does not map onto itself.

    >>> turn = Group("p4").matrices[1]
    >>> action(turn, operator_set("order<=1").polynomials).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]]
    """
    columns = monomials(max(p.order for p in operators), operators[0].dimension)
    if any(isinstance(v, complex) and v.imag for p in operators for _, v in p.terms):
        raise ValueError(
            "expected real operators; take the real and imaginary parts of complex ones"
        )
    here = _rows(operators, columns)
    there = _rows([p.in_frame(matrix) for p in operators], columns)
    solution = np.linalg.lstsq(here.T, there.T, rcond=None)[0].T
    residue = float(np.abs(solution @ here - there).max())
    if residue > 1e-9 * max(1.0, float(np.abs(there).max())):
        raise ValueError(
            f"the operators are not closed under this matrix (off by {residue:.1e}): "
            "expected a closed set, such as OperatorSet.closure gives"
        )
    return solution + 0.0


@lru_cache(maxsize=256)
def _turned(operators: OperatorSet, group: Group) -> FloatArray:
    columns = monomials(operators.order, operators.dimension)
    rows = np.stack(
        [_rows([p.in_frame(a) for p in operators.polynomials], columns) for a in group.matrices]
    )
    rows[np.abs(rows) < 1e-13] = 0.0  # what cancels exactly leaves dust of rounding
    return frozen(rows)


def _rows(polynomials: Sequence[Polynomial], columns: Sequence[Exponents]) -> FloatArray:
    place = {exponents: i for i, exponents in enumerate(columns)}
    rows = np.zeros((len(polynomials), len(columns)))
    for row, polynomial in zip(rows, polynomials, strict=True):
        for exponents, value in polynomial.terms:
            row[place[exponents]] = value
    return rows


class _Powers:
    """The powers of a polynomial, each formed once."""

    def __init__(self, base: Polynomial) -> None:
        self.base = base
        self.known = [Polynomial.monomial((0,) * base.dimension)]

    def __getitem__(self, exponent: int) -> Polynomial:
        while len(self.known) <= exponent:
            self.known.append(self.known[-1] * self.base)
        return self.known[exponent]


def _sum(polynomials: Iterable[Polynomial], dimension: int) -> Polynomial:
    total: dict[Exponents, Scalar] = {}
    for polynomial in polynomials:
        if polynomial.dimension != dimension:
            raise ValueError(_mixed_dimensions(dimension, polynomial.dimension))
        for exponents, value in polynomial.terms:
            total[exponents] = total.get(exponents, 0.0) + value
    return Polynomial.of(total, dimension)


def _mixed_dimensions(left: int, right: int) -> str:
    return f"expected operators in the same number of dimensions; got {left} and {right}"


def _orthogonal(matrix: npt.ArrayLike, dimension: int) -> FloatArray:
    found = np.asarray(matrix, dtype=np.float64)
    if found.shape != (dimension, dimension):
        raise ValueError(f"expected a {dimension}×{dimension} matrix; got shape {found.shape}")
    if not np.allclose(found @ found.T, np.eye(dimension), rtol=0, atol=1e-9):
        raise ValueError(f"expected an orthogonal matrix; got {found.tolist()}")
    return found


def exponent_tuples(operators: Iterable[Sequence[int]]) -> tuple[Exponents, ...]:
    """The orders of derivation along each axis, as tuples of whole numbers."""
    try:
        listed = [tuple(exponents) for exponents in operators]
        found = tuple(tuple(int(e) for e in exponents) for exponents in listed)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "expected operators as 'paper', 'order<=N' or a list of exponent tuples such as "
            f"[(0, 0), (1, 0)]; got {operators!r}"
        ) from error
    if found != tuple(listed):
        raise ValueError(f"expected whole numbers as exponents; got {listed!r}")
    return found


def _reading_order(exponents: Exponents) -> tuple[int, Exponents]:
    return sum(exponents), tuple(-e for e in exponents)


def _bombieri(exponents: Exponents) -> float:
    return math.prod(map(math.factorial, exponents)) / math.factorial(sum(exponents))


def _term_text(exponents: Exponents, value: Scalar) -> str:
    axes = _AXES if len(exponents) <= len(_AXES) else [f"{i}" for i in range(len(exponents))]
    name = "".join(axis * e for axis, e in zip(axes, exponents, strict=False))
    derivative = f"∂{name}" if name else ""
    if value in (1, -1) and derivative:
        return derivative if value == 1 else f"-{derivative}"
    number = f"({value:.4g})" if isinstance(value, complex) and value.imag else f"{value.real:.4g}"
    return f"{number}·{derivative}" if derivative else number
