"""Finite groups of rotations and reflections of space: those of prisms and of the regular solids.

Axes are right-handed: x points right, y up, z towards the reader. Groups with one main axis have
it along z, and turn every slice of a volume as ``pn`` turns an image. The tetrahedron and the cube
lie on the axes; the icosahedron lies so that its tetrahedral subgroup does.

Like `groups`, this module knows matrices, multiplication and representations, and nothing else.
"""

from __future__ import annotations

import math
import re
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from econv.groups import FloatArray, Group, GroupLike, IntArray, Irrep, frozen, rotation

__all__ = ["PointGroup"]

_NAME = re.compile(r"([CD])([1-9][0-9]{0,3})([vhd]?)|(T[dh]?|Oh?|Ih?)", re.ASCII)
_SUFFIXES = {"C": ("", "v", "h"), "D": ("", "h", "d")}
_SOLIDS = ("T", "Td", "Th", "O", "Oh", "I", "Ih")

_GOLDEN = (1 + math.sqrt(5)) / 2
_THIRD = np.array([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]])  # x → y → z → x
_HALVES = np.array([np.diag(d) for d in ((1.0, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))])
_HALF_X = np.diag([1.0, -1, -1])
_FLIP_Y, _FLIP_Z = np.diag([1.0, -1, 1]), np.diag([1.0, 1, -1])


class PointGroup(Group):
    """A finite subgroup of O(3), by its Schoenflies symbol; ask for it as ``Group("O")``.

    - ``Cn``: n rotations about z. ``Cnv``: with mirrors that hold the axis, y → −y among them.
      ``Cnh``: with the mirror z → −z.
    - ``Dn``: with n half turns about axes across z, one of them x. ``Dnh``: with z → −z. ``Dnd``:
      with mirrors midway between those axes.
    - ``T``, ``O``, ``I``: the 12, 24 and 60 rotations of the tetrahedron, cube and icosahedron.
      ``Th``, ``Oh``, ``Ih``: with the point reflection. ``Td``: with the tetrahedron's mirrors.

    Elements 0 … ``rotations`` − 1 are the rotations, and element ``rotations`` + k is rotation k
    times one fixed element that is none. The first twelve of O and of I are those of T.

    Raises:
        ValueError: for a name that no group of space has.

    >>> group = Group("O")
    >>> group.order, group.dimension, len(group.grid_symmetries)
    (24, 3, 24)
    >>> Group("I").embed("T").tolist() == list(range(12))
    True
    """

    @classmethod
    def _read(cls, name: str) -> dict[str, Any] | None:
        match = _NAME.fullmatch(name)
        if match is None or match[3] not in (*_SUFFIXES.get(match[1], ()), None):
            return None
        rotations, mirror = _elements(name)
        return {"dimension": 3, "rotations": len(rotations), "mirrored": mirror is not None}

    @cached_property
    def matrices(self) -> FloatArray:
        rotations, mirror = _elements(self.name)
        parts = [rotations] if mirror is None else [rotations, rotations @ mirror]
        return frozen(np.concatenate(parts) + 0.0)  # without zeros that are negative

    @cached_property
    def product(self) -> IntArray:
        flat = self.matrices.reshape(self.order, -1)
        rows = [places(a @ self.matrices, flat) for a in self.matrices]
        return frozen(np.stack(rows))

    @cached_property
    def inverse(self) -> IntArray:
        found = places(self.matrices.swapaxes(1, 2), self.matrices.reshape(self.order, -1))
        return frozen(found)

    def element_name(self, element: int) -> str:
        """An element in words: the angle and the axis (x, y, z), and what is mirrored.

        A reflection is named by the axis that it turns round; other elements that mirror are a
        rotation times the inversion x → −x.

        >>> group = Group("Oh")
        >>> [group.element_name(element) for element in (12, 24, 25)]
        ['90° about z', 'inverted', 'mirrored along x']
        >>> group.element_name(28)
        '120° about (1, 1, 1), inverted'
        """
        whole = np.asarray(self.matrices[element])
        mirrors = np.linalg.det(whole) < 0
        turn = -whole if mirrors else whole
        cosine = (np.trace(turn) - 1) / 2
        angle = math.degrees(math.acos(min(1.0, max(-1.0, cosine))))
        if angle < 1e-6:
            return "inverted" if mirrors else "0°"
        # What the rotation keeps; its direction is that in which the angle is positive.
        kept = np.linalg.svd(turn - np.eye(3))[2][-1]
        twist = np.array(
            [turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]
        )
        first = next(n for n in kept if abs(n) > 1e-9)
        kept = kept * (np.sign(kept @ twist) if np.abs(twist).max() > 1e-9 else np.sign(first))
        axis = _axis_name(kept)
        if mirrors and angle > 180 - 1e-6:
            return f"mirrored along {axis}"
        return f"{angle:.4g}° about {axis}" + (", inverted" if mirrors else "")

    @cached_property
    def generators(self) -> tuple[int, ...]:
        found: list[int] = []
        reached = np.arange(self.order) == 0
        for element in range(1, self.order):
            if not reached[element]:
                found.append(element)
                while True:
                    here = np.flatnonzero(reached)
                    reached[self.product[here][:, found].ravel()] = True
                    if reached.sum() == len(here):
                        break
        return tuple(found)

    @cached_property
    def irreps(self) -> tuple[Irrep, ...]:
        every = _wheel_irreps(self) if self.name[0] in "CD" else _solid_irreps(self)
        return tuple(Irrep(self, *each) for each in every)

    def embed(self, subgroup: GroupLike) -> IntArray:
        inner = Group(subgroup)
        flat = self.matrices.reshape(self.order, -1)
        found = places(inner.matrices, flat, strict=False) if inner.dimension == 3 else None
        if found is None or (found < 0).any():
            raise ValueError(
                f"{inner.name} is not a subgroup of {self.name}: expected one whose elements are "
                f"all among those of {self.name}, as they lie: {', '.join(self.subgroups)}"
            )
        return found

    @cached_property
    def subgroups(self) -> tuple[str, ...]:
        """The groups of these names whose elements are all in this one, as they lie.

        >>> Group("T").subgroups
        ('C1', 'C2', 'D1', 'D2', 'T')
        """
        axis = int((np.abs(self.matrices[: self.rotations, 2, 2] - 1) < 1e-9).sum())
        names = [
            f"{kind}{n}{suffix}"
            for kind in "CD"
            for n in range(1, axis + 1)
            if axis % n == 0
            for suffix in _SUFFIXES[kind]
        ]
        flat = self.matrices.reshape(self.order, -1)
        fitting = [n for n in (*names, *_SOLIDS) if self.order % Group(n).order == 0]
        return tuple(
            n for n in fitting if (places(Group(n).matrices, flat, strict=False) >= 0).all()
        )


def _axis_name(axis: FloatArray) -> str:
    """x, y, z with a sign, or the direction in numbers whose largest is one."""
    scaled = axis / np.abs(axis).max()
    small = np.abs(scaled) < 1e-9
    if small.sum() == 2:
        place = int(np.abs(scaled).argmax())
        return f"{'−' if scaled[place] < 0 else ''}{'xyz'[place]}"
    return "(" + ", ".join(f"{n + 0.0:.3g}".replace("-", "−") for n in scaled.round(9)) + ")"


def places(wanted: FloatArray, flat: FloatArray, strict: bool = True) -> IntArray:
    """For each of some orthogonal matrices its place among others, that are flattened.

    Two are the same where the trace of AᵀB is d. What is not among them is −1, or an error.
    """
    size = wanted.shape[-1]
    traces = wanted.reshape(len(wanted), -1) @ flat.T
    found = traces.argmax(axis=1)
    there = np.abs(flat[found] - wanted.reshape(len(wanted), -1)).max(axis=1) <= 1e-9
    if strict and not there.all():
        raise ArithmeticError(f"matrices of {size}×{size} are missing: they do not form a group")
    return np.where(there, found, -1)


@lru_cache(maxsize=256)
def _elements(name: str) -> tuple[FloatArray, FloatArray | None]:
    """The rotations, and what they are multiplied by to give the other elements."""
    if name[0] in "CD":
        count = int(name.rstrip("vhd")[1:])
        turns = np.stack([_about_z(k, count) for k in range(count)])
        if name[0] == "D":
            turns = np.concatenate([turns, turns @ _HALF_X])
        mirrors = {"v": _FLIP_Y, "h": _FLIP_Z, "d": _about_z(1, 2 * count) @ _FLIP_Z}
        return turns, mirrors.get(name[-1])
    tetrahedron = np.concatenate([np.linalg.matrix_power(_THIRD, c) @ _HALVES for c in range(3)])
    others = {"d": _THIRD @ _about_z(1, 4) @ _FLIP_Z, "h": -np.eye(3)}
    if name[0] == "T":
        return tetrahedron, others.get(name[-1])
    if name[0] == "O":
        every = np.concatenate([tetrahedron, tetrahedron @ _about_z(1, 4)])
        return every, others.get(name[-1])
    fifths = [_snapped(np.linalg.matrix_power(_fifth(), j)) for j in range(5)]
    every = _snapped(np.concatenate([turn @ tetrahedron for turn in fifths]))
    return every, others.get(name[-1])


def _about_z(k: int, n: int) -> FloatArray:
    """The rotation about z by 2πk/n, as exact as that of the plane."""
    found = np.eye(3)
    found[:2, :2] = rotation(k, n)
    return found


# Of the icosahedron: entries are halves of a + bφ, and are rounded to the nearest of what there is.
_ENTRIES = np.array([0.0, 0.5, 1.0, _GOLDEN / 2, (_GOLDEN - 1) / 2])
_CONJUGATES = np.array([0.0, 0.5, 1.0, (1 - _GOLDEN) / 2, -_GOLDEN / 2])  # √5 → −√5


def _snapped(matrices: FloatArray, values: FloatArray = _ENTRIES) -> FloatArray:
    """Every entry as the nearest of what entries may be, or as what stands for it in ``values``."""
    nearest = np.abs(np.abs(matrices)[..., None] - _ENTRIES).argmin(axis=-1)
    return np.sign(matrices) * values[nearest] * (nearest > 0)


def _fifth() -> FloatArray:
    """A fifth of a turn about the corner (0, 1, φ) of the icosahedron."""
    x, y, z = np.array([0.0, 1.0, _GOLDEN]) / math.hypot(1.0, _GOLDEN)
    across = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    angle = 2 * math.pi / 5
    return np.eye(3) + math.sin(angle) * across + (1 - math.cos(angle)) * across @ across


class _Parts(NamedTuple):
    """One irrep: what `Irrep` takes after the group."""

    name: str
    matrices: FloatArray
    multiplicity: int


def _wheel_irreps(group: PointGroup) -> list[_Parts]:
    """Those of Cn, Dn and their kin: a wheel of N turns, which may flip, times a sign or none."""
    kind, suffix, n = group.name[0], group.name[-1], int(group.name.rstrip("vhd")[1:])
    k = np.arange(group.order) % n
    flip = (np.arange(group.order) // n % 2 == 1) & (kind == "D")
    improper = np.arange(group.order) >= group.rotations
    sign = np.where(improper & (suffix == "h"), -1.0, 1.0)
    if suffix == "v":
        flip = improper
    size, turn = n, k
    if suffix == "d":  # R^k F^f S, with the rotary reflection S = R^½ that turns with half the step
        size, turn = 2 * n, (2 * k + np.where(flip, -1, 1) * improper) % (2 * n)
    flips = kind == "D" or suffix == "v"
    ones = np.ones(group.order)
    alternating, flipped = (-1.0) ** turn, np.where(flip, -1.0, 1.0)
    lines: dict[str, FloatArray] = {"trivial": ones}
    if flips:
        lines["flip"] = flipped
    if size % 2 == 0:
        lines["alternating"] = alternating
        if flips:
            lines["alternating·flip"] = alternating * flipped
    found = [_Parts(name, values[:, None, None], 1) for name, values in lines.items()]
    for frequency in range(1, (size + 1) // 2):
        planes = np.stack([rotation(int(frequency * t), size) for t in turn])
        planes[flip] = planes[flip] @ np.diag([1.0, -1.0])
        found.append(_Parts(f"frequency {frequency}", planes, 2 if flips else 1))
    if suffix == "h":
        found += [
            _Parts(f"{p.name}, odd", sign[:, None, None] * p.matrices, p.multiplicity)
            for p in found
        ]
    return found


def _solid_irreps(group: PointGroup) -> list[_Parts]:
    """Those of the regular solids, by their symbols: A and B lines, E planes, T, G and H of 3–5."""
    name, determinant = group.name, np.where(np.arange(group.order) < group.rotations, 1.0, -1.0)
    # Td is the group of the cube's rotations with other mirrors; with −1 a group is a product.
    turns = determinant[:, None, None] * group.matrices
    found = _icosahedral(turns, group) if name[0] == "I" else _cubic(turns, name in ("T", "Th"))
    if name[-1] != "h":
        return found
    odd = [
        _Parts(f"{p.name}u", determinant[:, None, None] * p.matrices, p.multiplicity) for p in found
    ]
    return [p._replace(name=f"{p.name}g") for p in found] + odd


_PLANE = np.array([[-1.0, -1, 2], [math.sqrt(3), -math.sqrt(3), 0]]) / math.sqrt(6)
"""What is left of functions of the three axes without their mean: 2z − x − y and x − y."""


def _cubic(turns: FloatArray, small: bool) -> list[_Parts]:
    """Of T or O, as matrices without whole numbers other than 0 and ±1."""
    axes = np.abs(turns)  # how the three axes are permuted
    plane = _PLANE @ axes @ _PLANE.T
    plane = np.where(np.abs(plane) < 1e-12, 0.0, plane)
    one = np.ones((len(turns), 1, 1))
    if small:
        return [_Parts("A", one, 1), _Parts("E", plane, 1), _Parts("T", turns, 3)]
    parity = np.linalg.det(axes).round()[:, None, None]
    return [
        _Parts("A1", one, 1),
        _Parts("A2", parity, 1),
        _Parts("E", plane, 2),
        _Parts("T1", turns, 3),
        _Parts("T2", parity * turns, 3),
    ]


def _icosahedral(turns: FloatArray, group: PointGroup) -> list[_Parts]:
    # The other T has √5 the other way round. G permutes five tetrahedra, without their sum; the
    # first stays under T. H turns symmetric matrices without a trace.
    five = np.arange(60).reshape(5, 12)
    proper = group.product[:60, five[:, 0]] // 12  # where each rotation takes the j-th tetrahedron
    which = np.tile(proper, (len(turns) // 60, 1))
    permutations = np.eye(5)[which].swapaxes(1, 2)
    rows = np.array(
        [[4.0, -1, -1, -1, -1], [0, 1, 1, -1, -1], [0, 1, -1, 1, -1], [0, 1, -1, -1, 1]]
    )
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    squares = np.zeros((5, 3, 3))
    squares[0], squares[1] = np.diag(_PLANE[0]), np.diag(_PLANE[1])
    for place, (i, j) in enumerate(((1, 2), (2, 0), (0, 1)), 2):
        squares[place, i, j] = squares[place, j, i] = math.sqrt(0.5)
    quintet = np.einsum("iab,gac,jcd,gbd->gij", squares, turns, squares, turns, optimize=True)
    return [
        _Parts("A", np.ones((len(turns), 1, 1)), 1),
        _Parts("T1", turns, 3),
        _Parts("T2", _snapped(turns, _CONJUGATES), 3),
        _Parts("G", _clean(rows @ permutations @ rows.T), 4),
        _Parts("H", _clean(quintet), 5),
    ]


def _clean(matrices: FloatArray) -> FloatArray:
    return np.where(np.abs(matrices) < 1e-13, 0.0, matrices)
