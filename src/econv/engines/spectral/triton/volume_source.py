"""Writes the kernels of layers between volumes, for one plan: in Gluon, and the same in Triton.

Copies of one irrep differ in their weights alone. A loop over them, and over fields by eight, does
the same each time: it reads the taps of one copy, differentiates each of its components, sums
derivatives to features, and multiplies these with the weights. A thread holds two numbers side by
side, as the tensor cores want them, so that features go there from registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from econv.engines.spectral.triton.scheme import folded
from econv.engines.spectral.triton.writer import Writer, transform_back
from econv.fourier import transform
from econv.plan import SpectralPlan

__all__ = ["FIELDS", "Family", "Scheme", "convolution_source", "gradient_source", "scheme"]

FIELDS = 8
"""Fields that are read together, and written together: half of the rows of a product."""

TILE = 2 * FIELDS
"""Rows and columns of a matrix of weights."""

_GRADIENT_SUMS = 30  # products of one kernel of the weight's gradient: four registers each


class Family(NamedTuple):
    """The copies of one irrep among the slots of the input."""

    first: int
    """The first slot of the first copy."""
    size: int
    """Slots of a copy."""
    copies: int
    couplings: dict[int, list[list[int]]]
    """For each block its features of the first copy, ``[rows][couplings]``."""
    inner: dict[int, list[list[int]]]
    """For each block where the weights of these stand, ``[copies][couplings]``."""


class Product(NamedTuple):
    """The weights of two couplings and two columns of a block, or of one (twice the same)."""

    block: int
    couplings: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Scheme:
    """The order in which the kernels of a plan do their products."""

    plan: SpectralPlan

    @cached_property
    def families(self) -> tuple[Family, ...]:
        plan = self.plan
        place = {
            int(block.features[row, k]): (number, row, k)
            for number, block in enumerate(plan.blocks)
            for row, k in np.ndindex(block.features.shape)
        }
        copies = transform(plan.basis.group, plan.source)
        starts = np.cumsum([0, *(len(copy.basis) for copy in copies)]).tolist()
        found = []
        for irrep in sorted({copy.irrep for copy in copies}):
            these = [n for n, copy in enumerate(copies) if copy.irrep == irrep]
            own = [
                [f for f in sorted(place) if starts[n] <= self.terms(f)[0][1] < starts[n + 1]]
                for n in these
            ]
            blocks = sorted({place[f][0] for f in own[0]})
            inner = {
                b: [sorted({place[f][2] for f in of if place[f][0] == b}) for of in own]
                for b in blocks
            }
            couplings = {
                b: [
                    [int(plan.blocks[b].features[row, k]) for k in inner[b][0]]
                    for row in range(plan.blocks[b].rows)
                ]
                for b in blocks
            }
            family = Family(
                starts[these[0]], len(copies[these[0]].basis), len(these), couplings, inner
            )
            for copy in range(family.copies):
                self._check(family, copy)
            found.append(family)
        return tuple(found)

    def terms(self, feature: int) -> list[tuple[int, int, float]]:
        """(stencil, slot, factor) of a feature."""
        plan = self.plan
        tables = plan.feature_stencils, plan.feature_slots, plan.feature_factors
        every = zip(*(table[feature].tolist() for table in tables), strict=True)
        return [term for term in every if term[2]]

    def _check(self, family: Family, copy: int) -> None:
        """That a copy is the first one, moved."""
        moved = copy * family.size
        for block, rows in family.couplings.items():
            for row, first in enumerate(rows):
                others = self.plan.blocks[block].features[row, family.inner[block][copy]].tolist()
                for one, other in zip(first, others, strict=True):
                    wanted = [(s, slot + moved, v) for s, slot, v in self.terms(one)]
                    if wanted != self.terms(other):
                        raise ArithmeticError(f"copies of an irrep of {self.plan!r} differ")

    def products(self, family: Family) -> list[Product]:
        """Those of the convolution."""
        return [
            Product(block, couplings, columns)
            for block, rows in family.couplings.items()
            for couplings in _twos(len(rows[0]))
            for columns in self.columns(block)
        ]

    def sums(self, family: Family) -> list[list[tuple[int, int, tuple[int, int]]]]:
        """Those of the weight's gradient, (block, coupling, columns), kernel by kernel."""
        kernels: list[list[tuple[int, int, tuple[int, int]]]] = [[]]
        for block, rows in family.couplings.items():
            new = [(block, k, two) for k in range(len(rows[0])) for two in self.columns(block)]
            if kernels[-1] and len(kernels[-1]) + len(new) > _GRADIENT_SUMS:
                kernels.append([])
            kernels[-1] += new
        return kernels

    @cached_property
    def count(self) -> int:
        """`sums` of all copies of all families."""
        return sum(family.copies * sum(map(len, self.sums(family))) for family in self.families)

    def columns(self, block: int) -> list[tuple[int, int]]:
        """The columns of a block, two by two."""
        return _twos(self.plan.blocks[block].columns)

    @cached_property
    def starts(self) -> list[int]:
        """Where the entries of each block begin among all, and their number."""
        return np.cumsum([0, *(block.entries.size for block in self.plan.blocks)]).tolist()

    @cached_property
    def tiles(self) -> np.ndarray:
        """Which entry stands where in the matrices of weights; −1: none.

        ``[copies of all families × products, 256]``: sixteen rows, columns of a block by output
        fields, and sixteen columns, couplings by input fields, in the order in which the threads
        of a warp keep such an operand.
        """
        found = []
        for family in self.families:
            for copy in range(family.copies):
                for block, couplings, columns in self.products(family):
                    corners = np.full((2, 2), -1)
                    for a, k in _distinct(couplings):
                        for b, n in _distinct(columns):
                            corners[b, a] = self._entry(block, family.inner[block][copy][k], n)
                    rows = np.broadcast_to(corners[:, None, :, None, None], (2, 8, 2, 4, 2))
                    found.append(rows.transpose(1, 3, 2, 0, 4).ravel())
        return np.array(found, dtype=np.int32)

    @cached_property
    def places(self) -> np.ndarray:
        """For each entry where its gradient is: half of a sum, for each kernel by copy and sum."""
        found = np.full(self.starts[-1], -1)
        number = 0
        for family in self.families:
            for kernel in self.sums(family):
                for copy in range(family.copies):
                    for block, k, columns in kernel:
                        for half, n in _distinct(columns):
                            entry = self._entry(block, family.inner[block][copy][k], n)
                            found[entry] = 2 * number + half
                        number += 1
        if (found < 0).any():
            raise ArithmeticError(f"{self.plan!r} has weights that no product reads")
        return found

    def _entry(self, block: int, k: int, n: int) -> int:
        return self.starts[block] + k * self.plan.blocks[block].columns + n

    @cached_property
    def headroom(self) -> int:
        """The largest input is scaled to less than twice 2^ this: no feature leaves float16."""
        plan = self.plan
        sizes = np.abs(plan.stencils).reshape(len(plan.stencils), -1).sum(1)
        slots = np.abs(plan.analysis).sum(1)
        factors = np.abs(plan.feature_factors)
        features = (factors * sizes[plan.feature_stencils] * slots[plan.feature_slots]).sum(1)
        most = max(features.max(), sizes.max() * slots.max())
        return min(7, 14 - math.ceil(math.log2(most)))

    @property
    def matrices_of_a_voxel(self) -> int:
        """Matrices of two columns by eight fields that a program keeps of each of its voxels."""
        return sum(block.rows * len(_twos(block.columns)) for block in self.plan.blocks)


def _twos(count: int) -> list[tuple[int, int]]:
    """Numbers two by two; of an odd count the last stands for both."""
    return [(n, min(n + 1, count - 1)) for n in range(0, count, 2)]


def _distinct(two: tuple[int, int]) -> list[tuple[int, int]]:
    """The members of a pair, numbered; one that is there twice counts once."""
    return list(enumerate(two[: 2 if two[0] != two[1] else 1]))


@lru_cache(maxsize=256)
def scheme(plan: SpectralPlan) -> Scheme:
    return Scheme(plan)


class _Writer(Writer):
    """For tensors of float16 in both languages: two neighbours are one register."""

    def arange(self, end: str | int, layout: str, more: str = "") -> str:
        """Numbers from 0 along one axis; Gluon has to know whose."""
        where = f", layout={layout}" if self.language == "gl" else ""
        return f"{self.language}.arange(0, {end}{where}){more}"

    def zeros(self, shape: str, layout: str) -> str:
        if self.language == "gl":
            return f"gl.full({shape}, 0.0, gl.float32, layout={layout})"
        return f"tl.zeros({shape}, tl.float32)"

    def laid(self, value: str, layout: str) -> str:
        return f"gl.convert_layout({value}, {layout})" if self.language == "gl" else value

    def multiplied(self, a: str, b: str, total: str) -> None:
        if self.language == "gl":
            self(f"{total} = product({a}, {b}, {total}, PRECISION)")
        else:
            self(f"{total} = tl.dot({a}, {b}, {total}, input_precision=PRECISION)")


def _derivatives(
    write: _Writer, layout: Scheme, name: str, line: Callable[[int, int], dict[int, str]]
) -> None:
    """The derivatives ``{name}_{stencil}`` of one component.

    ``line(z, y)`` writes loads and gives names of the taps of a line by their x. Planes that mirror
    each other come one after the other, and so do lines.
    """
    coefficients = np.moveaxis(folded(layout.plan), 0, -1)
    reach, numbers = len(coefficients) // 2, count()
    known: set[int] = set()

    def sums(place: tuple[int, ...], wanted: Any) -> Iterator[tuple[tuple[int, ...], str]]:
        """Which sums and differences along the other axes are found at a place, and their names."""
        taps = line(*place) if len(place) == 2 else {}
        for distance in range(reach + 1):
            parts = _parts(distance, reach)
            here = wanted[parts]
            if not here.any():
                continue
            sides: list[dict[tuple[int, ...], str]] = [
                {(): taps[step]} if taps else dict(sums((*place, step), here.any(0)))
                for step in (distance, -distance)[: len(parts)]
            ]
            for rest, found in sides[0].items():
                both = []
                for part, one, sign in zip(parts, here, "+-", strict=False):
                    if one[rest]:
                        both.append(((part, *rest), found))
                        if distance:
                            both[-1] = (part, *rest), (into := f"{name}u{next(numbers)}")
                            write(f"{into} = {write.sum(found, sides[1][rest], sign)}")
                yield from both

    for part, one in sums((), coefficients.any(-1)):
        for stencil, value in enumerate(coefficients[part].tolist()):
            if value:
                into = f"{name}_{stencil}"
                old = into if stencil in known else None
                known.add(stencil)
                write(f"{into} = {write.scaled(one, value, value, old)}")


def _parts(distance: int, reach: int) -> list[int]:
    """Where sums and differences of taps at a distance from the middle stand."""
    return [distance, reach + distance] if distance else [0]


def _features(
    write: _Writer, layout: Scheme, family: Family, kept: list[int]
) -> Iterator[tuple[int, str]]:
    """Write features, one after the other: its number and a name."""
    for feature in kept:
        total: str | None = None
        for stencil, slot, factor in layout.terms(feature):
            one = f"c{slot - family.first}_{stencil}"
            if total is None and factor == 1.0:
                write(f"f{feature} = {one}")
            else:
                write(f"f{feature} = {write.scaled(one, factor, factor, total)}")
            total = f"f{feature}"
        yield feature, f"f{feature}"


def convolution_source(layout: Scheme, language: str, f16x2: bool, group: int) -> str:
    """The kernel ``forward``: a tile of voxels, and eight fields of the output with all channels.

    ``group``: channels that are stored together.
    """
    plan, write = layout.plan, _Writer(language, f16x2, False)
    order = plan.synthesis.shape[0]
    arguments = (
        "spectrum, weights, y, scales, w_largest, depth, height, width, deep, along, across,"
        " positions, sample, plane, row, down, dilation, chunks, begin, out_fields, y_sample,"
        " y_channel, y_plane, y_row, y_column"
    )
    general = "depth height width deep along across positions sample plane row begin out_fields"
    lang = language
    with write.function("forward", arguments, "VOXELS LINES PLANES WARPS PRECISION", general):
        if language == "gl":
            _thread_layouts(write, "WARPS")
            write(
                """
                TILE: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
                OUT: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [1, WARPS], [1, 0])
                """
            )
            write(
                f"STORED: gl.constexpr = gl.BlockedLayout([1, 2, {group}], [8, 4, 1],"
                " [1, WARPS, 1], [2, 1, 0])"
            )
        voxel = write.arange("VOXELS", "gl.SliceLayout(0, HALVES)", "[None, :]")
        write(
            f"""
            tile = {lang}.program_id(0)
            first_x = tile % across * (VOXELS // (LINES * PLANES))
            first_y = tile // across % along * LINES
            first_z = tile // (across * along) % deep * PLANES
            image = tile // (across * along * deep)
            """
        )
        _voxels(write, voxel)
        write("place = image * sample + z * down * plane + y_ * down * row + x * down")
        eight = write.arange(FIELDS, "gl.SliceLayout(1, HALVES)", "[:, None]")
        write(f"at = {lang}.where(inside, place, 0) * {FIELDS} + {eight}")
        write(f"entry = {write.arange(256, 'TILE')}")
        write(f"out_chunk = {lang}.program_id(1)")
        for number, block in enumerate(plan.blocks):
            for r in range(block.rows):
                for n, _ in layout.columns(number):
                    write(f"a{number}_{r}_{n} = {write.zeros('[16, VOXELS]', 'SUMS')}")
        tiles = len(layout.tiles)
        before = 0
        for family in layout.families:
            products = layout.products(family)
            with write.block(f"for unit in range(0, {family.copies} * chunks):"):
                write(
                    f"""
                    copy = unit // chunks
                    chunk = unit % chunks
                    first = ({family.first} + copy * {family.size}) * chunks + chunk
                    matrices = weights + ((out_chunk * chunks + chunk) * {tiles} + {before}
                                          + copy * {len(products)}) * 256
                    """
                )
                for m in range(family.size):
                    write(
                        f"p = spectrum + (first + {m} * chunks).to({lang}.int64)"
                        f" * positions * {FIELDS} + at"
                    )
                    _derivatives(write, layout, f"c{m}", _taps(write, plan, m))
                _multiply(write, layout, family, products)
            before += family.copies * len(products)
        _store(write, layout, group, order)
    return write.text()


def _thread_layouts(write: _Writer, warps: str) -> None:
    """How threads hold derivatives, sums of products, and the factors of these."""
    write(f"""
        SIDE: gl.constexpr = 4 // (spectrum.dtype.element_ty.primitive_bitwidth // 8)
        HALVES: gl.constexpr = gl.BlockedLayout([SIDE, 1], [4, 8], [1, {warps}], [0, 1])
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, {warps}], [16, 8])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, SIDE)
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, SIDE)
    """)


def _voxels(write: _Writer, numbers: str) -> None:
    """Where the voxels of a tile lie: along x, then y, then z."""
    write(
        f"""
        n = {numbers}
        x = first_x + n % (VOXELS // (LINES * PLANES))
        y_ = first_y + n // (VOXELS // (LINES * PLANES)) % LINES
        z = first_z + n // (VOXELS // PLANES)
        inside = (x < width) & (y_ < height) & (z < depth)
        """
    )


def _taps(write: _Writer, plan: SpectralPlan, m: int) -> Callable[[int, int], dict[int, str]]:
    reach = plan.basis.size // 2

    def line(z: int, y: int) -> dict[int, str]:
        write(f"q = p + ({reach + z} * plane + {reach + y} * row) * (dilation * {FIELDS})")
        names = {}
        for x in range(-reach, reach + 1):
            names[x] = f"t{reach + x}_{reach + y}_{reach + z}"
            step = f" + {reach + x} * {FIELDS} * dilation" if reach + x else ""
            write(f"{names[x]} = {write.language}.load(q{step})")
        return names

    return line


def _multiply(write: _Writer, layout: Scheme, family: Family, products: list[Product]) -> None:
    lang = write.language
    for number, (block, couplings, columns) in enumerate(products):
        rows = family.couplings[block]
        if columns[0] == 0:  # the first with these couplings
            for r, row in enumerate(rows):
                kept = list(dict.fromkeys(row[k] for k in couplings))
                names = dict(_features(write, layout, family, kept))
                one, two = (names[row[k]] for k in couplings)
                write(f"both = {lang}.permute({lang}.join({one}, {two}), (2, 0, 1))")
                both = write.laid(f"{lang}.reshape(both, [16, VOXELS])", "RIGHT")
                write(f"b{r} = {both}")
        # As the threads of a warp keep it: row % 8, column // 2 % 4, column // 8, row // 8, two.
        write(
            f"""
            w = {lang}.reshape({lang}.load(matrices + {number * 256} + entry), [8, 4, 2, 2, 2])
            w = {lang}.reshape({lang}.permute(w, (3, 0, 2, 1, 4)), [16, 16])
            """
        )
        write(f"w = {write.laid('w', 'LEFT')}")
        for r in range(len(rows)):
            write.multiplied("w", f"b{r}", f"a{block}_{r}_{columns[0]}")


def _store(write: _Writer, layout: Scheme, group: int, order: int) -> None:
    plan, lang = layout.plan, write.language
    write(
        f"""
        power = exponent({lang}.load(scales + begin + image))
        power += exponent({lang}.load(w_largest)) - {layout.headroom + WEIGHT_HEADROOM}
        scale = two_to(power)
        """
    )
    slots: dict[int, str] = {}
    for number, block in enumerate(plan.blocks):
        for r in range(block.rows):
            for two in layout.columns(number):
                total = f"a{number}_{r}_{two[0]}"
                halves = f"{lang}.permute({lang}.reshape({total}, [2, 8, VOXELS]), (1, 2, 0))"
                names = [f"s{block.slots[r, n]}" for n in two]
                write(f"h0, h1 = {lang}.split({halves})")
                for half, (place, _) in enumerate(_distinct(two)):
                    name = names[place]
                    write(f"{name} = {write.laid(f'h{half}', 'OUT')} * scale")
                    slots[int(block.slots[r, two[half]])] = name
    for slot in set(range(plan.synthesis.shape[1])) - slots.keys():
        write(f"s{slot} = {next(iter(slots.values()))} * 0.0")
    transform_back(write, plan.synthesis)
    outer = "gl.SliceLayout(1, gl.SliceLayout(2, STORED))"
    inner = "gl.SliceLayout(0, gl.SliceLayout(2, STORED))"
    last = "gl.SliceLayout(0, gl.SliceLayout(0, STORED))"
    _voxels(write, f"({write.arange('VOXELS', inner, '[None, :]')})[:, :, None]")
    field = write.arange(FIELDS, outer, "[:, None]")
    member = write.arange(group, last, "[None, :]")
    write(
        f"""
        field = out_chunk * {FIELDS} + ({field})[:, :, None]
        member = ({member})[None, :, :]
        known = inside & (field < out_fields) & (member < {group})
        into = y + image.to({lang}.int64) * y_sample + z.to({lang}.int64) * y_plane
        into = into + (y_ * y_row + x * y_column) + (field * {order} + member) * y_channel
        """
    )
    for first in range(0, order, group):
        joined = write.joined([f"y{first + n}" for n in range(group)])
        shape = f"[{FIELDS}, VOXELS, {group}]"
        write(f"out = {write.laid(f'{lang}.reshape({joined}, {shape})', 'STORED')}")
        write(f"{lang}.store(into + {first} * y_channel, out.to(y.dtype.element_ty), mask=known)")


WEIGHT_HEADROOM = 7
"""The largest weight is scaled to at least 2^ this."""


def gradient_source(layout: Scheme, number: int, kernel: int, language: str, f16x2: bool) -> str:
    """A kernel ``gradient`` of the products of one family."""
    plan, write, lang = layout.plan, _Writer(language, f16x2, False), language
    family = layout.families[number]
    sums = layout.sums(family)
    own = sums[kernel]
    arguments = (
        "spectrum, gradient, out, x_largest, g_largest, positions, plane, row, dilation, chunks,"
        " out_chunks, steps, each"
    )
    general = "positions plane row steps each"
    with write.function("weight_gradient", arguments, "VOXELS ODD PRECISION", general):
        if language == "gl":
            _thread_layouts(write, "1")
        voxel = write.arange("VOXELS", "gl.SliceLayout(1, HALVES)", "[:, None]")
        eight = write.arange(FIELDS, "gl.SliceLayout(0, HALVES)", "[None, :]")
        other = write.arange("VOXELS", "gl.SliceLayout(0, LEFT)", "[None, :]")
        both = write.arange(2 * FIELDS, "gl.SliceLayout(1, LEFT)", "[:, None]")
        write(
            f"""
            voxel = {voxel}
            eight = {eight}
            other = {other}
            both = {both}
            copy = {lang}.program_id(0) % {family.copies}
            chunk = {lang}.program_id(0) // {family.copies} % chunks
            out_chunk = {lang}.program_id(0) // ({family.copies} * chunks)
            split = {lang}.program_id(1)
            first = ({family.first} + copy * {family.size}) * chunks + chunk
            size = positions.to({lang}.int64) * {FIELDS}
            theirs = other // 2 * {2 * FIELDS} + both % {FIELDS} * 2 + other % 2
            """
        )
        for block, k, two in own:
            write(f"a{block}_{k}_{two[0]} = {write.zeros('[16, 8]', 'SUMS')}")
        with write.block(
            f"for step in range(split * each, {lang}.minimum(split * each + each, steps)):"
        ):
            write("start = step * VOXELS")
            for m in range(family.size):
                write(f"p = spectrum + (first + {m} * chunks) * size")
                _derivatives(write, layout, f"c{m}", _pairs(write, plan))
            for block in dict.fromkeys(block for block, *_ in own):
                columns = layout.columns(block)
                for r, row in enumerate(family.couplings[block]):
                    for two in columns:
                        one, last = (int(plan.blocks[block].slots[r, n]) for n in two)
                        slot = str(one) if one == last else f"{lang}.where(both < 8, {one}, {last})"
                        write(
                            f"g{two[0]} = {lang}.load(gradient + ({slot} * out_chunks + out_chunk)"
                            f" * size + (start * {FIELDS} + theirs))"
                        )
                    for k, feature in enumerate(row):
                        for _, name in _features(write, layout, family, [feature]):
                            write(f"b = {write.laid(name, 'RIGHT')}")
                        for two in columns:
                            write.multiplied(f"g{two[0]}", "b", f"a{block}_{k}_{two[0]}")
        outs = write.arange(2 * FIELDS, "gl.SliceLayout(1, SUMS)", "[:, None]")
        ins = write.arange(FIELDS, "gl.SliceLayout(0, SUMS)", "[None, :]")
        write(
            f"""
            power = exponent({lang}.load(x_largest)) + exponent({lang}.load(g_largest))
            scale = two_to(power - {layout.headroom + scheme(plan.adjoint).headroom})
            number = split * ({family.copies} * chunks * out_chunks) + {lang}.program_id(0)
            number = number * {len(own)}
            into = out + number.to({lang}.int64) * {2 * FIELDS**2} + {outs} * {FIELDS} + {ins}
            """
        )
        for place, (block, k, two) in enumerate(own):
            total = f"a{block}_{k}_{two[0]}"
            write(f"{lang}.store(into + {place * 2 * FIELDS**2}, {total} * scale)")
    return write.text()


def _pairs(write: _Writer, plan: SpectralPlan) -> Callable[[int, int], dict[int, str]]:
    """Taps of two neighbours at a time, which lie together where the first is even.

    ``ODD``: the dilation is; then a tap at an odd distance is half of two words.
    """
    reach, lang = plan.basis.size // 2, write.language

    def of_pair(place: str) -> str:
        """Two neighbours from an even place on."""
        inside = f"voxel // 2 * {2 * FIELDS} + eight * 2 + voxel % 2"
        return f"{lang}.load(p + ({place}) * {FIELDS} + ({inside}))"

    def line(z: int, y: int) -> dict[int, str]:
        names = {}
        write(f"line = start + ({reach + z} * plane + {reach + y} * row) * dilation")
        for x in range(-reach, reach + 1):
            t = reach + x
            name = names[x] = f"t{t}_{reach + y}_{reach + z}"
            place = f"line + {t} * dilation"
            if t % 2 and write.f16x2:
                with write.block("if ODD:"):
                    sides = of_pair(f"{place} - 1"), of_pair(f"{place} + 1")
                    write(f"{name} = {write.asm('prmt.b32 $0, $1, $2, 0x5432;', *sides)}")
                with write.block("else:"):
                    write(f"{name} = {of_pair(place)}")
            elif t % 2:
                write(f"v = {place} + voxel")
                write(f"{name} = {lang}.load(p + (v // 2 * {2 * FIELDS} + eight * 2 + v % 2))")
            else:
                write(f"{name} = {of_pair(place)}")
        return names

    return line
