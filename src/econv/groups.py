"""Finite groups of rotations and reflections: the symmetries that a network can have.

This module knows matrices, multiplication and representations. It knows nothing of
derivatives, pixels or tensors.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

__all__ = ["Group", "GroupLike", "Irrep", "frozen", "rotation"]

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

_NAME = re.compile(r"p([1-9][0-9]*)(m?)")
_MIRROR = np.diag([1.0, -1.0])
_MOST_ROTATIONS = 1024  # about an axis: tables of products have the square of the order


class Group:
    """A finite subgroup S of O(2), called by the paper's names, or of O(3).

    ``Group("pn")`` holds the n rotations by 2πk/n, anticlockwise; ``Group("pnm")`` holds these and,
    at index n + k, the same rotations times the reflection diag(1, −1). Element 0 is the identity.
    Groups of space, such as ``Group("O")``, are those of :class:`econv.solids.PointGroup`.

    Groups are values: equal by name, hashable, picklable, and one object per name in a process.
    Wherever the library asks for a group, its name will do.

    Raises:
        ValueError: for a name that no group has, or more than 1,024 rotations about an axis.

    >>> group = Group("p4m")
    >>> group.order, group.dimension
    (8, 2)
    >>> int(group.product[1, 4]), int(group.inverse[1])
    (5, 3)
    >>> Group("p4m") is group
    True
    """

    name: str
    """The name that was asked for, such as ``"p8m"``."""
    dimension: int
    """The dimension d of the space that the group acts on."""
    rotations: int
    """How many of the elements are rotations: n, for pn and pnm alike."""
    mirrored: bool
    """Whether the group contains reflections."""

    _known: ClassVar[dict[str, Group]] = {}
    _kinds: ClassVar[list[type[Group]]] = []  # those of other spaces make themselves known

    def __init_subclass__(cls) -> None:
        Group._kinds.append(cls)

    def __new__(cls, name: GroupLike) -> Group:
        if isinstance(name, Group):
            return name
        if isinstance(name, str) and name in Group._known:
            return Group._known[name]
        if isinstance(name, str) and _too_large(name):
            raise ValueError(
                f"expected a group of at most {_MOST_ROTATIONS} rotations about an axis; "
                f"got {name[:40]!r}"
            )
        kinds: list[type[Group]] = [Group, *Group._kinds]
        for kind in kinds:
            properties = kind._read(name) if isinstance(name, str) else None
            if properties is not None:
                group = object.__new__(kind)
                group.__dict__.update(name=name, **properties)
                return Group._known.setdefault(name, group)
        raise ValueError(
            f"unknown group {name!r}: expected 'pn' (n rotations) or 'pnm' (with reflections) "
            "with a whole number n ≥ 1, such as 'p4', 'p8' or 'p6m'; for volumes 'Cn', 'Cnv', "
            "'Cnh', 'Dn', 'Dnh', 'Dnd', 'T', 'Td', 'Th', 'O', 'Oh', 'I' or 'Ih'"
        )

    @classmethod
    def _read(cls, name: str) -> dict[str, Any] | None:
        """What a name says of a group of this kind; nothing if it is none."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return {"dimension": 2, "rotations": int(match[1]), "mirrored": bool(match[2])}

    @property
    def order(self) -> int:
        """The number of elements."""
        return self.rotations * (2 if self.mirrored else 1)

    @property
    def steps(self) -> int:
        """In how many equal steps the rotations of the plane go round; 0 in space."""
        return self.rotations if self.dimension == 2 else 0

    @cached_property
    def matrices(self) -> FloatArray:
        """The elements as orthogonal matrices, ``[order, d, d]``."""
        turns = np.stack([rotation(k, self.rotations) for k in range(self.rotations)])
        return frozen(np.concatenate([turns, turns @ _MIRROR]) if self.mirrored else turns)

    @cached_property
    def product(self) -> IntArray:
        """``product[a, b]`` is the index of the element a·b."""
        # A turn that comes after a reflection goes the other way round: F·R(θ) = R(−θ)·F.
        turn, mirror = self._turn_and_mirror
        turns = (turn[:, None] + np.where(mirror, -1, 1)[:, None] * turn) % self.rotations
        return frozen(turns + self.rotations * (mirror[:, None] ^ mirror))

    @cached_property
    def inverse(self) -> IntArray:
        """``inverse[a]`` is the index of a⁻¹."""
        turn, mirror = self._turn_and_mirror
        return frozen(np.where(mirror, np.arange(self.order), -turn % self.rotations))

    @cached_property
    def relative(self) -> IntArray:
        """``relative[a, b]`` is the index of a⁻¹·b, the k for which a·k = b."""
        return frozen(self.product[self.inverse])

    def element_name(self, element: int) -> str:
        """An element in words.

        >>> Group("p8m").element_name(1), Group("p8m").element_name(9)
        ('45°', '45°, mirrored')
        """
        angle = f"{360 * (element % self.rotations) / self.rotations:.4g}°"
        return f"{angle}, mirrored" if element >= self.rotations else angle

    @cached_property
    def grid_symmetries(self) -> tuple[int, ...]:
        """The elements that map the pixel grid onto itself: quarter turns and flips.

        >>> Group("p8").grid_symmetries
        (0, 2, 4, 6)
        """
        whole = (self.matrices == np.round(self.matrices)).all(axis=(1, 2))
        return tuple(int(element) for element in np.flatnonzero(whole))

    @cached_property
    def grid_generators(self) -> tuple[int, ...]:
        """Symmetries of the grid of which all its others are products, far turns first.

        >>> [Group("O").element_name(element) for element in Group("O").grid_generators]
        ['90° about z', '90° about −y']
        """
        chosen: list[int] = []
        reached = {0}
        for element in sorted(self.grid_symmetries, key=lambda e: (self._period(e) < 4, e)):
            if element not in reached:
                chosen.append(element)
                reached = self._products({*reached, element})
        return tuple(chosen)

    def _period(self, element: int) -> int:
        """How often an element is done until nothing has changed."""
        count, found = 1, element
        while found:
            found, count = int(self.product[found, element]), count + 1
        return count

    def _products(self, elements: set[int]) -> set[int]:
        """All products of some elements."""
        while True:
            chosen = sorted(elements)
            more = elements | set(self.product[np.ix_(chosen, chosen)].flatten().tolist())
            if more == elements:
                return elements
            elements = more

    @cached_property
    def generators(self) -> tuple[int, ...]:
        """Elements whose products are all elements."""
        return (1 % self.rotations, *[self.rotations] * self.mirrored)

    @cached_property
    def irreps(self) -> tuple[Irrep, ...]:
        """The real irreducible representations, each verified when it is built."""
        n, order = self.rotations, self.order
        turn, mirror = self._turn_and_mirror
        alternating = (-1.0) ** turn
        determinant = np.where(mirror, -1.0, 1.0)
        lines: list[tuple[str, FloatArray]] = [("trivial", np.ones(order))]
        if self.mirrored:
            lines.append(("determinant", determinant))
        if n % 2 == 0:
            lines.append(("alternating", alternating))
        if self.mirrored and n % 2 == 0:
            lines.append(("alternating·determinant", alternating * determinant))
        found = [Irrep(self, name, values[:, None, None], 1) for name, values in lines]
        for frequency in range(1, (n + 1) // 2):
            planes = np.stack([rotation(frequency * k, n) for k in range(n)])
            if self.mirrored:
                planes = np.concatenate([planes, planes @ _MIRROR])
            # Without reflections a plane of C_n is one complex line: over the reals it occurs once.
            found.append(Irrep(self, f"frequency {frequency}", planes, 2 if self.mirrored else 1))
        return tuple(found)

    @cached_property
    def fourier(self) -> FloatArray:
        """The group Fourier transform: an orthogonal matrix ``[order, order]``.

        It maps a function on the group to its coefficients, block after block in the order of
        :attr:`irreps`, each block ``multiplicity`` times. Translation of the function from the
        left, f(g) → f(h⁻¹g), becomes the block-diagonal matrix of the ρ(h).

        >>> transform = Group("p3").fourier
        >>> bool(np.allclose(transform @ transform.T, np.eye(3)))
        True
        """
        rows = [
            math.sqrt(irrep.dimension / self.order) * irrep.matrices[:, :, column].T
            for irrep in self.irreps
            for column in range(irrep.multiplicity)
        ]
        transform = np.concatenate(rows)
        if not np.allclose(transform @ transform.T, np.eye(self.order), rtol=0, atol=1e-12):
            raise ArithmeticError(f"the irreps of {self.name} do not span the functions on it")
        return frozen(transform)

    def embed(self, subgroup: GroupLike) -> IntArray:
        """The indices, in this group, of the elements of a subgroup, in the subgroup's order.

        >>> Group("p8").embed("p4").tolist()
        [0, 2, 4, 6]
        """
        inner = Group(subgroup)
        other = inner.dimension != self.dimension
        if other or self.rotations % inner.rotations or (inner.mirrored and not self.mirrored):
            raise ValueError(
                f"{inner.name} is not a subgroup of {self.name}: its number of rotations must "
                f"divide {self.rotations}"
                + ("" if self.mirrored else ", and it must not contain reflections")
            )
        turn, mirror = inner._turn_and_mirror
        step = self.rotations // inner.rotations
        return turn * step + self.rotations * mirror

    def cosets(self, subgroup: GroupLike) -> IntArray:
        """The right cosets Tc of a subgroup T: entry ``[c, t]`` is the index of t·c.

        Left translation by an element of T permutes each row like T permutes itself.

        >>> Group("p8").cosets("p4").tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        """
        elements = self.embed(subgroup)
        rows: list[IntArray] = []
        seen: set[int] = set()
        for representative in range(self.order):
            if representative not in seen:
                row = self.product[elements, representative]
                seen.update(row.tolist())
                rows.append(row)
        return np.stack(rows)

    @cached_property
    def _turn_and_mirror(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        index = np.arange(self.order)
        return index % self.rotations, index >= self.rotations

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"groups are values: cannot set {name!r} of {self!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"groups are values: cannot delete {name!r} of {self!r}")

    def __reduce__(self) -> tuple[type[Group], tuple[str]]:
        return Group, (self.name,)

    def __repr__(self) -> str:
        return f"Group({self.name!r})"

    def __str__(self) -> str:
        return self.name

    def __len__(self) -> int:
        return self.order


GroupLike = Group | str


def _too_large(name: str) -> bool:
    digits = re.fullmatch(r"[A-Za-z]([1-9][0-9]*)[a-z]?", name)
    return digits is not None and (len(digits[1]) > 9 or int(digits[1]) > _MOST_ROTATIONS)


@dataclass(frozen=True, eq=False)
class Irrep:
    """One real irreducible representation ρ of a group, as orthogonal matrices.

    Construction fails unless ρ is orthogonal and multiplicative.

    Raises:
        ValueError: for matrices that are no orthogonal representation of the group.

    >>> trivial = Irrep(Group("p4"), "trivial", np.ones((4, 1, 1)), multiplicity=1)
    >>> trivial.dimension
    1
    """

    group: Group
    name: str
    matrices: FloatArray
    """ρ(g) for every element, ``[order, dimension, dimension]``."""
    multiplicity: int
    """How often ρ occurs among the functions on the group."""

    def __post_init__(self) -> None:
        matrices, group = frozen(np.array(self.matrices, dtype=np.float64)), self.group
        object.__setattr__(self, "matrices", matrices)
        if matrices.ndim != 3 or matrices.shape != (group.order, *[matrices.shape[-1]] * 2):
            raise ValueError(
                f"expected matrices of shape [{group.order}, d, d] for {group.name}; "
                f"got {matrices.shape}"
            )
        identity = np.eye(self.dimension)
        orthogonal = np.abs(matrices @ matrices.swapaxes(1, 2) - identity).max()
        # A map that respects multiplication by the generators respects every product.
        multiplicative = max(
            np.abs(matrices @ matrices[b] - matrices[group.product[:, b]]).max()
            for b in group.generators or (0,)
        )
        if not (orthogonal <= 1e-12 and multiplicative <= 1e-12):  # so that a NaN fails
            raise ValueError(
                f"{self.name!r} is not an orthogonal representation of {group.name}: "
                f"off by {orthogonal:.1e} (orthogonal) and {multiplicative:.1e} (multiplicative)"
            )

    @property
    def dimension(self) -> int:
        """The size of the matrices."""
        return int(self.matrices.shape[-1])


def rotation(k: int, n: int) -> FloatArray:
    """The rotation by 2πk/n, exact for quarter turns and symmetric to the last bit for all.

    >>> rotation(1, 4).tolist()
    [[0.0, -1.0], [1.0, 0.0]]
    """
    cosine, sine = _unit_vector(k % n, n)
    return np.array([[cosine, -sine], [sine, cosine]])


def _unit_vector(k: int, n: int) -> tuple[float, float]:
    # Reduced to the first octant, so that angles that mirror each other get mirrored floats.
    if 8 * k > 4 * n:
        cosine, sine = _unit_vector(n - k, n)
        return cosine, -sine
    if 4 * k > n:
        cosine, sine = _unit_vector(n - 2 * k, 2 * n)
        return -cosine, sine
    if 8 * k > n:
        cosine, sine = _unit_vector(n - 4 * k, 4 * n)
        return sine, cosine
    if 8 * k == n:
        return math.sqrt(0.5), math.sqrt(0.5)
    angle = 2 * math.pi * k / n
    return math.cos(angle), math.sin(angle)


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, made read-only: values are shared and must not change.

    >>> frozen(np.zeros(2)).flags.writeable
    False
    """
    array.flags.writeable = False
    return array
