"""The spectral engine's kernels for GPUs: Triton source, written for each plan.

One program owns a tile of pixels. A thread owns a pixel and a field with all slots of its spectrum:
it reads the taps, forms every derivative in registers, adds them up to features and hands those to
the tensor cores; the derivatives never reach memory. Which tap meets which coefficient, which
features meet which irrep and how a spectrum becomes channels is fixed by the plan, so all of it is
written out: the source has no tables and no branches, and its length does not grow with the fields
or the image.

This room knows how a plan becomes source text, and nothing of torch. What it refuses to know is
where tensors live and what calls what: that is the business of `econv.engines.triton_ops`.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from econv.fourier import transform
from econv.plan import SpectralPlan

__all__ = ["FIELDS", "HEADROOM", "Scheme", "analyse", "arrange", "kernels", "scheme", "spread"]

FIELDS = 4
"""Fields of one tile: with four features each they fill the shortest product, 16."""

HEADROOM = 9
"""The largest number of an image is scaled to about 2^9: derivatives stay far from overflow in
float16, whose largest is 2^16, and all but the smallest 2^-23 of the image keep every digit."""


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class Target(NamedTuple):
    """One pair of output slots and the features that reach it: a matrix product of its own.

    Every target has two output columns and its own features: a row of a block with two columns, or
    two blocks of one column each, so that all targets are alike.
    """

    features: tuple[tuple[int, ...], ...]
    """For each column the numbers of the features that its weights may meet, or none: those of all
    columns are the same or have nothing in common."""
    entries: dict[tuple[int, int], tuple[int, float]]
    """(feature, column) → spectral weight and sign."""
    slots: tuple[int, ...]
    """The slots of the output's spectrum, one for each column; −1: none."""


@dataclass(frozen=True, eq=False)
class Scheme:
    """Where everything lies: the orders in which the kernels of a plan keep slots and weights."""

    plan: SpectralPlan
    vector: int
    """Slots that a thread reads at a time."""

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """What the products give, two slots each."""
        found: list[Target] = []
        single: list[Target] = []
        for block in self.plan.blocks:
            if block.columns > 2:
                raise ArithmeticError(f"{self.plan!r} has a block of {block.columns} columns")
            for row in range(block.rows):
                names = tuple(block.features[row].tolist())
                entries = {
                    (names[k], n): (int(block.entries[k, n]), float(block.signs[k, n]))
                    for k, n in np.ndindex(block.entries.shape)
                }
                slots = tuple(block.slots[row].tolist())
                (found if block.columns == 2 else single).append(Target((names,), entries, slots))
        for first in single[::2]:
            rest = single[single.index(first) + 1 :][:1]
            entries = dict(first.entries)
            names, slots = first.features, (*first.slots, -1)
            for second in rest:
                names += second.features
                slots = (*first.slots, *second.slots)
                entries |= {(f, 1): value for (f, _), value in second.entries.items()}
            found.append(Target(names, entries, slots))
        return tuple(found)

    @property
    def batch(self) -> int:
        """How many products are made at a time: a power of two, some of them of zeros."""
        return _power_of_two(len(self.targets))

    @cached_property
    def positions(self) -> np.ndarray:
        """Where each slot of the plan's spectrum lies, pairs aligned.

        Every target should find as many features in one chunk as in another: neighbouring irreps
        take turns.
        """
        copies = transform(self.plan.basis.group, self.plan.source)
        ends = np.cumsum([len(copy.basis) for copy in copies])
        best: tuple[int, np.ndarray] | None = None
        kinds = sorted({copy.irrep for copy in copies})
        for turns in (1, 2, 4):
            order = sorted(
                range(len(copies)), key=lambda n: (kinds.index(copies[n].irrep) % turns, n)
            )
            order.sort(key=lambda n: kinds.index(copies[n].irrep) % turns)
            found = np.zeros(ends[-1], dtype=np.int64)
            free = 0
            for number in order:
                size = len(copies[number].basis)
                free += -free % size
                found[ends[number] - size : ends[number]] = np.arange(free, free + size)
                free += size
            inner = sum(self._lengths(found))
            if best is None or inner < best[0]:
                best = inner, found
        assert best is not None
        return best[1]

    def _width(self, positions: np.ndarray) -> int:
        return min(self.vector, _power_of_two(int(positions.max()) + 1))

    def _chunk_of(self, positions: np.ndarray) -> np.ndarray:
        """The slot chunk that each feature reads."""
        plan = self.plan
        chunk = positions[plan.feature_slots] // self._width(positions)
        used = plan.feature_factors != 0
        if (used.all(axis=1) & (chunk[:, 0] != chunk[:, 1])).any():
            raise ArithmeticError(f"a feature of {plan!r} reads slots of two chunks")
        return np.where(used[:, 0], chunk[:, 0], chunk[:, 1])

    def _lengths(self, positions: np.ndarray) -> list[int]:
        """The padded number of features of a target for each slot chunk."""
        chunk_of = self._chunk_of(positions)
        lengths = []
        for chunk in range(chunk_of.max() + 1):
            most = max(
                sum(int((chunk_of[list(names)] == chunk).sum()) for names in target.features)
                for target in self.targets
            )
            lengths.append(most + -most % 4)
        return lengths

    @property
    def width(self) -> int:
        """Slots that are read at a time: the vector, or less for small groups."""
        return self._width(self.positions)

    @property
    def chunks(self) -> int:
        """How many times `width` slots the spectrum takes."""
        return int(self.positions.max()) // self.width + 1

    @cached_property
    def analysis(self) -> np.ndarray:
        """Channels to slots where they lie, ``[channels, chunks * width]``."""
        found = np.zeros((self.plan.analysis.shape[1], self.chunks * self.width))
        found[:, self.positions] = self.plan.analysis.T
        return found

    @cached_property
    def lists(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each slot chunk and target the features, −1 for padding: equal lengths in a chunk."""
        chunk_of = self._chunk_of(self.positions)
        found = []
        for chunk, length in enumerate(self._lengths(self.positions)):
            rows = []
            for target in self.targets:
                names = [f for part in target.features for f in part if chunk_of[f] == chunk]
                rows.append(tuple(names + [-1] * (length - len(names))))
            rows += [(-1,) * length] * (self.batch - len(rows))
            found.append(tuple(rows))
        return tuple(found)

    @property
    def inner(self) -> int:
        """Features of a target over all chunks, padding counted."""
        return sum(len(rows[0]) for rows in self.lists)

    @property
    def pieces(self) -> tuple[tuple[int, int, int, int], ...]:
        """The products: slot chunk, first feature there, how many, and how many came before."""
        found, start = [], 0
        for chunk, rows in enumerate(self.lists):
            for first, size in _powers(len(rows[0])):
                found.append((chunk, first, size, start + first))
            start += len(rows[0])
        return tuple(found)

    @cached_property
    def piece_of(self) -> np.ndarray:
        """For each inner number where its piece begins and how long it is, ``[inner, 2]``."""
        rows = [[start, size] for _, _, size, start in self.pieces for _ in range(size)]
        return np.array(rows, dtype=np.int32)

    @cached_property
    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """The spectral weight (−1: none) and sign at each place, ``[batch * inner * 2]``."""
        entries = np.full((self.batch, self.inner, 2), -1, dtype=np.int32)
        signs = np.zeros((self.batch, self.inner, 2), dtype=np.float32)
        for t, target in enumerate(self.targets):
            names = [f for rows in self.lists for f in rows[t]]
            for k, feature in enumerate(names):
                for column in range(2):
                    known = target.entries.get((feature, column))
                    if known is not None:
                        entries[t, k, column], signs[t, k, column] = known
        return entries.ravel(), signs.ravel()

    @cached_property
    def adjoint_entries(self) -> tuple[np.ndarray, np.ndarray]:
        """`entries` of the adjoint layer, as spectral weights of this one."""
        matrix = self.plan.adjoint_map  # a permutation with signs
        if not ((matrix != 0).sum(axis=0) == 1).all():
            raise ArithmeticError(f"the adjoint of {self.plan!r} mixes spectral weights")
        source = np.abs(matrix).argmax(axis=0)
        entries, signs = self.entries
        turned = np.where(entries >= 0, source[entries], -1).astype(np.int32)
        factor = np.where(entries >= 0, matrix[source[entries], entries], 0.0)
        return turned, (signs * factor).astype(np.float32)

    @cached_property
    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """For each spectral weight where it stands (−1: nowhere) and with which sign."""
        entries, signs = self.entries
        lists = [np.flatnonzero(entries == n) for n in range(self.plan.weights)]
        most = max(map(len, lists))
        where = np.full((len(lists), most), -1, dtype=np.int32)
        factors = np.zeros((len(lists), most), dtype=np.float32)
        for number, found in enumerate(lists):
            where[number, : len(found)] = found
            factors[number, : len(found)] = signs[found]
        return where, factors

    @cached_property
    def coefficients(self) -> np.ndarray:
        """The stencils on sums and differences of taps, ``[stencils, size, size]``.

        Along each axis the taps t become, in this order, x(0), x(t) + x(−t) for t = 1 …, and
        x(t) − x(−t) for t = 1 …: stencils that are even or odd there need half of them.
        """
        stencils = self.plan.stencils
        size = stencils.shape[-1]
        reach = size // 2
        fold = np.zeros((size, size))
        fold[0, reach] = 1.0
        for t in range(1, reach + 1):
            fold[t, [reach - t, reach + t]] = 0.5
            fold[reach + t, [reach - t, reach + t]] = -0.5, 0.5
        found = np.einsum("ay,syx,bx->sab", fold, stencils, fold)
        return np.where(np.abs(found) <= 1e-12 * np.abs(found).max(), 0.0, found)


@lru_cache(maxsize=512)
def scheme(plan: SpectralPlan, vector: int) -> Scheme:
    """The scheme of a plan whose kernels read ``vector`` slots at a time."""
    return Scheme(plan, vector)


def _powers(length: int) -> Iterator[tuple[int, int]]:
    """Pieces of a length that are powers of two, at most 32: where each begins and its size."""
    first = 0
    while first < length:
        size = min(32, 1 << ((length - first).bit_length() - 1))
        yield first, size
        first += size


class _Writer:
    """Lines of source, with the current indentation before them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, text: str = "") -> None:
        for line in text.split("\n"):
            self.lines.append("    " * self.depth + line if line else "")

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def _differentiate(write: _Writer, layout: Scheme) -> None:
    """A function: where the centre tap lies → every derivative there, in registers."""
    write("@triton.jit")
    write("def differentiate(centre, row, column):")
    write.depth += 1
    coefficients = layout.coefficients
    reach = coefficients.shape[-1] // 2
    started: set[int] = set()

    def load(name: str, dy: int, dx: int) -> None:
        write(f"{name} = tl.load(centre + ({dy} * row + {dx} * column))")

    def add(stencil: int, value: float, name: str) -> None:
        product = name if value == 1.0 else f"{name} * {value!r}"
        old = f" + d{stencil}" if stencil in started else ""
        started.add(stencil)
        write(f"d{stencil} = {product}{old}")

    for dy in range(reach + 1):
        sides = ("p", "m") if dy else ("p",)
        for dx in range(reach + 1):
            kinds = [(i, j) for i in ((dy, reach + dy) if dy else (0,))
                     for j in ((dx, reach + dx) if dx else (0,))]
            if not any(coefficients[:, i, j].any() for i, j in kinds):
                continue
            for side in sides:
                y = dy if side == "p" else -dy
                if dx:
                    load("right", y, dx)
                    load("left", y, -dx)
                    write(f"e{side} = right + left")
                    write(f"o{side} = right - left")
                else:
                    load(f"e{side}", y, 0)
            for i, j in kinds:
                if not coefficients[:, i, j].any():
                    continue
                kind = "o" if j > reach else "e"
                if dy:
                    # Rows run downwards and stencils are stored row 0 on top, as taps are.
                    write(f"u = {kind}p {'-' if i > reach else '+'} {kind}m")
                else:
                    write(f"u = {kind}p")
                for stencil in np.flatnonzero(coefficients[:, i, j]):
                    add(int(stencil), float(coefficients[stencil, i, j]), "u")
    names = ", ".join(f"d{n}" for n in range(len(coefficients)))
    write(f"return {names},")
    write.depth -= 1
    write()


def _split(write: _Writer, source: str, names: Sequence[str | None], shape: str) -> None:
    """Take a tensor apart along its last axis, whose length is that of ``names``."""
    if len(names) == 1:
        if names[0]:
            write(f"{names[0]} = tl.reshape({source}, [{shape}])")
    elif any(names):
        half = len(names) // 2
        write(f"{source}e, {source}o = tl.split(tl.reshape({source}, [{shape}, {half}, 2]))")
        _split(write, f"{source}e", names[::2], shape)
        _split(write, f"{source}o", names[1::2], shape)


def _joined(names: Sequence[str], shape: str) -> str:
    """An expression for the names side by side along a new last axis."""
    if len(names) == 1:
        return f"tl.reshape({names[0]}, [{shape}, 1])"
    if len(names) == 2:
        return f"tl.join({names[0]}, {names[1]})"
    even, odd = _joined(names[::2], shape), _joined(names[1::2], shape)
    return f"tl.reshape(tl.join({even}, {odd}), [{shape}, {len(names)}])"


def _features(write: _Writer, layout: Scheme, copies: int) -> None:
    """The features of a tile, one tensor ``z[(target, copy), pixel, (field, feature)]`` a piece."""
    # A branch that is always taken keeps two heuristics of Triton's out. The loads stay where they
    # are: the taps of the next turn would be copied to shared memory, past the cache that holds
    # what taps have in common. And products do not see that their features were joined: they
    # would read them in a width that leaves fragments to be put together by hand.
    write("if pixels > 0:")
    write.depth += 1
    for chunk in range(layout.chunks):
        _derivatives(write, layout, chunk)
        for number, (owner, first, size, _) in enumerate(layout.pieces):
            if owner == chunk:
                _gathered(write, layout, number, chunk, first, size, copies)
    write.depth -= 1
    write("else:")
    for number, (_, _, size, _) in enumerate(layout.pieces):
        shape = f"[{layout.batch * copies}, BP, BF * {size}]"
        write(f"    z{number} = tl.zeros({shape}, x.dtype.element_ty)")


def _derivatives(write: _Writer, layout: Scheme, chunk: int) -> None:
    """Differentiate one slot chunk and name every feature that it holds."""
    plan = layout.plan
    offset = f" + {chunk * FIELDS * layout.width} * places" if chunk else ""
    stencils = len(plan.stencils)
    names = ", ".join(f"d{n}" for n in range(stencils))
    write(f"{names}, = differentiate(source{offset} + here, row, column)")
    wanted = sorted({f for names in layout.lists[chunk] for f in names if f >= 0})
    used: set[tuple[int, int]] = set()
    for feature in wanted:
        for t in range(2):
            if plan.feature_factors[feature, t]:
                slot = int(layout.positions[plan.feature_slots[feature, t]])
                used.add((int(plan.feature_stencils[feature, t]), slot % layout.width))
    for stencil in range(stencils):
        parts = [
            f"d{stencil}_{slot}" if (stencil, slot) in used else None
            for slot in range(layout.width)
        ]
        _split(write, f"d{stencil}", parts, "BF, BP")
    for feature in wanted:
        text = ""
        for t in range(2):
            factor = plan.feature_factors[feature, t]
            if factor:
                slot = int(layout.positions[plan.feature_slots[feature, t]]) % layout.width
                name = f"d{plan.feature_stencils[feature, t]}_{slot}"
                text += f" {'-' if factor < 0 else '+'} {name}"
        write(f"f{feature} = {text.removeprefix(' + ').lstrip()}")


def _gathered(
    write: _Writer, layout: Scheme, number: int, chunk: int, first: int, size: int, copies: int
) -> None:
    """The features of every target side by side."""
    spare = next(f for names in layout.lists[chunk] for f in names if f >= 0)
    columns = []
    for k in range(first, first + size):
        column = []
        for names in layout.lists[chunk]:
            # Padding repeats a feature of the same target; its weights are zero.
            other = names[0] if names[0] >= 0 else spare
            column += [f"f{names[k] if names[k] >= 0 else other}"] * copies
        columns.append(_joined(column, "BF, BP"))
    # The inner axis is joined last: a thread then holds neighbours along it, and stores them at
    # once.
    batch = f"BF, BP, {layout.batch * copies}"
    write(f"z = tl.trans({_joined(columns, batch)}, (2, 1, 0, 3))")
    write(f"z{number} = tl.reshape(z, [{layout.batch * copies}, BP, BF * {size}])")


def _pixels(write: _Writer, layout: Scheme) -> None:
    """Which pixels a tile holds and where their centre taps lie."""
    reach = layout.coefficients.shape[-1] // 2
    write("inside = pixel < pixels")
    write("p = tl.where(inside, pixel, 0)")
    write("image = p // (height * width)")
    write("line = (p - image * (height * width)) // width")
    write("dot = p % width")
    write("place = image * image_pitch + line * down * pitch + dot * down")
    write(f"place += {reach} * (pitch + 1) * dilation")
    write(f"here = place[None, :, None] * {FIELDS} + field[:, None, None]")
    write("here = here * SC + slot[None, None, :]")


def _common(write: _Writer, layout: Scheme) -> None:
    write(f"SC: tl.constexpr = {layout.width}")
    write(f"TARGETS: tl.constexpr = {layout.batch}")
    write("target = tl.arange(0, TARGETS)")
    write("slot = tl.arange(0, SC)")
    write(f"row = pitch * dilation * ({FIELDS} * SC)")
    write(f"column = dilation * ({FIELDS} * SC)")


def _forward(write: _Writer, layout: Scheme, parts: tuple[int, ...], copies: int) -> None:
    """A layer: features of a tile of pixels, products with the weights, channels of the output.

    Products of equal shape are one batched product, and each warp makes some of the batch. Where
    there are fewer targets than warps, each target is there in ``copies``, for as many runs of
    output fields.
    """
    plan = layout.plan
    fields = sum(parts)
    write("@triton.jit")
    write(
        "def forward(x, w, y, x_largest, w_largest, pixels, height, width, down, dilation, pitch,\n"
        "            image_pitch, places, chunks, out_padded, out_fields, y_image, y_channel,\n"
        "            y_line, y_dot, BP: tl.constexpr, PRECISION: tl.constexpr,\n"
        "            STAGES: tl.constexpr):"
    )
    write.depth += 1
    write(f"BF: tl.constexpr = {FIELDS}")
    _common(write, layout)
    write(f"COPIES: tl.constexpr = {copies}")
    write("field = tl.arange(0, BF)")
    write("pixel = tl.program_id(0) * BP + tl.arange(0, BP)")
    write(f"first = tl.program_id(1) * {fields * copies}")
    _pixels(write, layout)
    for part, size in enumerate(parts):
        write(f"a{part} = tl.zeros([TARGETS * COPIES, BP, {2 * size}], tl.float32)")
    write("batch = tl.arange(0, TARGETS * COPIES)")
    write("source = x")
    write("weight = w")
    write("for chunk in tl.range(0, chunks, num_stages=STAGES):")
    write.depth += 1
    _features(write, layout, copies)
    for number, (_, _, size, start) in enumerate(layout.pieces):
        write(f"k = tl.arange(0, BF * {size})[None, None, :]")
        write(f"piece = weight + {start} * (2 * BF * TARGETS) * out_padded")
        write(f"member = (batch // COPIES) * (2 * out_padded) + batch % COPIES * {2 * fields}")
        done = 0
        for part, wide in enumerate(parts):
            write(f"n = member[:, None] + (2 * first + {2 * done} + tl.arange(0, {2 * wide}))[None, :]")
            write(f"v = tl.load(piece + n[:, :, None] * (BF * {size}) + k)")
            write(f"v = tl.trans(v, (0, 2, 1))")
            write(f"a{part} = tl.dot(z{number}, v, a{part}, input_precision=PRECISION)")
            done += wide
    write(f"source += places * {layout.chunks * FIELDS * layout.width}")
    write(f"weight += out_padded * {2 * FIELDS * layout.batch * layout.inner}")
    write.depth -= 1
    write("power = exponent(tl.load(x_largest + image)) + exponent(tl.load(w_largest))")
    write(f"scale = two_to(power - {2 * HEADROOM})[:, None]")
    channels = plan.synthesis.shape[0]
    padded = _power_of_two(channels)
    write("base = image.to(tl.int64) * y_image + line * y_line + dot * y_dot")
    write(f"element = tl.arange(0, {padded})")
    slots = [slot for target in layout.targets for slot in target.slots]
    slots += [-1] * (2 * layout.batch - len(slots))
    done = 0
    for part, size in enumerate(parts):
        # [(target, copy), pixel, (field, column)] → [pixel, (copy, field), (target, column)]
        write(f"s = tl.reshape(a{part}, [TARGETS, COPIES, BP, {2 * size}])")
        write(f"s = tl.reshape(tl.trans(s, (2, 1, 3, 0)), [BP, COPIES * {size}, 2, TARGETS])")
        write(f"s = tl.reshape(tl.trans(s, (0, 1, 3, 2)), [BP, COPIES * {size}, 2 * TARGETS])")
        _split(write, "s", [f"s{n}" if n >= 0 else None for n in slots], f"BP, COPIES * {size}")
        for channel in range(channels):
            terms = [
                f"s{slot} * {float(plan.synthesis[channel, slot])!r}"
                for slot in sorted(slots)
                if slot >= 0 and abs(plan.synthesis[channel, slot]) > 1e-14
            ]
            write(f"y{channel} = ({' + '.join(terms)}) * scale")
        outputs = [f"y{c if c < channels else 0}" for c in range(padded)]
        write(f"found = {_joined(outputs, f'BP, COPIES * {size}')}")
        write(f"o = tl.arange(0, COPIES * {size})")
        write(f"o = first + {done} + o // {size} * {fields} + o % {size}")
        write(f"channel = o[:, None] * {channels} + element[None, :]")
        write("where = base[:, None, None] + (channel * y_channel)[None, :, :]")
        write(f"known = (o < out_fields)[:, None] & (element < {channels})[None, :]")
        write("kept = inside[:, None, None] & known[None, :, :]")
        write("tl.store(y + where, found.to(y.dtype.element_ty), mask=kept)")
        done += size
    write.depth -= 1
    write()


def _gram(write: _Writer, layout: Scheme, parts: tuple[int, ...], copies: int) -> None:
    """The gradient to the weights: features of the input against the output's gradient."""
    fields = sum(parts)
    write("@triton.jit")
    write(
        "def gram(x, g, partial, x_largest, g_largest, images, pixels, height, width, down,\n"
        "         dilation, pitch, image_pitch, places, g_step, g_start, g_pitch, g_image_pitch,\n"
        "         g_places, g_chunks, tiles, in_padded, out_padded, BP: tl.constexpr,\n"
        "         BF: tl.constexpr, IMAGES: tl.constexpr, PRECISION: tl.constexpr):"
    )
    write.depth += 1
    write(f"FIELDS: tl.constexpr = {FIELDS}")
    write(f"COPIES: tl.constexpr = {copies}")
    _common(write, layout)
    write("member = tl.arange(0, TARGETS * COPIES)")
    write("i = tl.program_id(0) * BF")
    write(f"first = tl.program_id(1) * {fields * copies}")
    write("split = tl.program_id(2)")
    write("batch = tl.arange(0, IMAGES)")
    write("known = batch < images")
    write("x_most = tl.max(exponent(tl.load(x_largest + batch, mask=known, other=0.0)))")
    write("g_most = tl.max(exponent(tl.load(g_largest + batch, mask=known, other=0.0)))")
    write("field = i % FIELDS + tl.arange(0, BF)")
    each = layout.chunks * FIELDS * layout.width
    write(f"source = x + (i // FIELDS).to(tl.int64) * places * {each}")
    pieces = layout.pieces
    for part, wide in enumerate(parts):
        for number, (_, _, size, _) in enumerate(pieces):
            shape = f"[TARGETS * COPIES, {2 * wide}, BF * {size}]"
            write(f"a{part}_{number} = tl.zeros({shape}, tl.float32)")
    write("for tile in tl.range(split, tiles, tl.num_programs(2), num_stages=1):")
    write.depth += 1
    write("pixel = tile * BP + tl.arange(0, BP)")
    _pixels(write, layout)
    write("power = exponent(tl.load(x_largest + image)) + exponent(tl.load(g_largest + image))")
    # Pixels of the last tile that are none read the first pixel, and count nothing.
    write("share = tl.where(inside, two_to(power - (x_most + g_most)), 0.0)")
    write("share = share.to(g.dtype.element_ty)[None, None, :]")
    write("there = image * g_image_pitch + (line * g_step + g_start) * g_pitch")
    write("there += dot * g_step + g_start")
    write("there = there[None, :, None] * FIELDS + tl.arange(0, FIELDS)[:, None, None]")
    slots = [slot for target in layout.targets for slot in target.slots]
    slots += [-1] * (2 * layout.batch - len(slots))
    done = 0
    for part, wide in enumerate(parts):
        count = wide // FIELDS
        write(f"c = tl.arange(0, COPIES * {count})")
        write(f"c = first // FIELDS + c // {count} * {fields // FIELDS} + {done // FIELDS} + c % {count}")
        # Fields beyond the last read what is there; their gradients are dropped.
        write("c = tl.minimum(c, g_chunks - 1).to(tl.int64)")
        for chunk in range(layout.chunks):
            write(f"where = ((c * {layout.chunks} + {chunk}) * g_places * FIELDS)[None, None, :]")
            write("h = tl.load(g + (where + there)[:, :, :, None] * SC + slot[None, None, None, :])")
            kept = [
                f"g{slot}" if slot in layout.positions else None
                for slot in range(chunk * layout.width, (chunk + 1) * layout.width)
            ]
            _split(write, "h", kept, f"FIELDS, BP, COPIES * {count}")
        names = [f"g{layout.positions[slot if slot >= 0 else 0]}" for slot in slots]
        joined = _joined(names, f"FIELDS, BP, COPIES * {count}")
        write(f"h = tl.reshape({joined}, [FIELDS, BP, COPIES, {count}, TARGETS, 2])")
        write("h = tl.trans(h, (4, 2, 3, 0, 5, 1))")
        write(f"h{part} = tl.reshape(h, [TARGETS * COPIES, {2 * wide}, BP]) * share")
        done += wide
    _features(write, layout, copies)
    for number in range(len(pieces)):
        for part in range(len(parts)):
            total = f"a{part}_{number}"
            write(f"{total} = tl.dot(h{part}, z{number}, {total}, input_precision=PRECISION)")
    write.depth -= 1
    write(f"scale = two_to(x_most + g_most - {2 * HEADROOM})")
    each = 2 * layout.batch * layout.inner
    write(f"into = partial + split.to(tl.int64) * in_padded * out_padded * {each}")
    done = 0
    for part, wide in enumerate(parts):
        for number, (_, _, size, start) in enumerate(pieces):
            write(f"n = (member % COPIES * {2 * fields})[:, None] + tl.arange(0, {2 * wide})[None, :]")
            write(f"n += 2 * (first + {done})")
            write(f"k = tl.arange(0, BF * {size})")
            write(f"line_of = ((i + k // {size}) * TARGETS)[None, :] + (member // COPIES)[:, None]")
            write(f"line_of = line_of * {layout.inner} + ({start} + k % {size})[None, :]")
            write("where = line_of[:, None, :] * (out_padded * 2) + n[:, :, None]")
            write(f"tl.store(into + where, a{part}_{number} * scale)")
        done += wide
    write.depth -= 1
    write()


@lru_cache(maxsize=256)
def kernels(layout: Scheme, parts: tuple[int, ...], copies: int) -> dict[str, Any]:
    """The kernels of a plan, `forward` and `gram`, and their source.

    One program gives ``copies`` times ``sum(parts)`` output fields; parts are powers of two, at
    least `FIELDS`.
    """
    write = _Writer()
    _differentiate(write, layout)
    _forward(write, layout, parts, copies)
    _gram(write, layout, parts, copies)
    source = write.text()
    plan = layout.plan
    name = f"<econv {plan.basis.group.name} {len(plan.stencils)} {layout.width} {parts} {copies} {hash(source):x}>"
    # Triton reads the source of a function: this is where Python looks for it.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {
        "__name__": __name__, "triton": triton, "tl": tl, "exponent": exponent, "two_to": two_to
    }
    exec(compile(source, name, "exec"), space)
    return {"forward": space["forward"], "gram": space["gram"], "source": source}


@triton.jit
def exponent(largest):
    """⌊log₂⌋ of a float32, kept where 2^ of it is a number; that of inf and NaN scales by one."""
    found = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.where(found == 128, 9, tl.minimum(tl.maximum(found, -100), 100))


@triton.jit
def two_to(power):
    """2^power, exactly; powers too small for a float32 become the smallest."""
    return ((tl.maximum(tl.minimum(power, 127), -126) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def analyse(
    x, matrix, largest, out, images, fields, height, width, up, before, pitch, lines, places,
    x_image, x_channel, x_line, x_dot,
    CHANNELS: tl.constexpr, CHUNKS: tl.constexpr, SC: tl.constexpr, BF: tl.constexpr,
    BQ: tl.constexpr, HEADROOM: tl.constexpr,
):
    """The spectrum of every field at every place of the padded grid, scaled.

    What is done to a layer's input before it is convolved belongs here, at the load.
    """  # fmt: skip
    place = tl.program_id(0) * BQ + tl.arange(0, BQ)
    chunk = tl.program_id(1)
    field = chunk * BF + tl.arange(0, BF)
    image = place // (pitch * lines)
    line = place // pitch % lines - before
    dot = place % pitch - before
    inside = (image < images) & (line >= 0) & (line < height * up) & (dot >= 0) & (dot < width * up)
    inside = inside & (line % up == 0) & (dot % up == 0)
    base = image.to(tl.int64) * x_image + (line // up) * x_line + (dot // up) * x_dot
    source = x + base[:, None] + (field * CHANNELS * x_channel)[None, :]
    known = inside[:, None] & (field < fields)[None, :]
    power = exponent(tl.load(largest + image, mask=image < images, other=1.0))
    scale = two_to(HEADROOM - power)[:, None, None]
    slot = tl.arange(0, SC)
    for part in tl.static_range(CHUNKS):
        total = tl.zeros([BQ, BF, SC], tl.float32)
        for channel in tl.range(0, CHANNELS):
            value = tl.load(source + channel * x_channel, mask=known, other=0.0).to(tl.float32)
            row = tl.load(matrix + channel * (CHUNKS * SC) + part * SC + slot)
            total += value[:, :, None] * row[None, None, :]
        where = (chunk * CHUNKS + part).to(tl.int64) * places + place
        where = where[:, None, None] * BF + tl.arange(0, BF)[None, :, None]
        kept = (place < places)[:, None, None]
        tl.store(
            out + where * SC + slot[None, None, :],
            (total * scale).to(out.dtype.element_ty),
            mask=kept,
        )


@triton.jit
def arrange(
    weights, entries, signs, pieces, largest, out, out_fields, in_fields, out_stride, in_stride,
    out_padded, targets, inner, total, BF: tl.constexpr, BLOCK: tl.constexpr,
    HEADROOM: tl.constexpr,
):
    """Spectral weights to ``[field chunk, piece, target, (out, column), (field, feature)]``, scaled.

    Products read them as they lie, the inner axis contiguous.
    """  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < total
    k = n % inner
    field = n // inner % BF
    column = n // (inner * BF) % 2
    o = n // (inner * BF * 2) % out_padded
    target = n // (inner * BF * 2) // out_padded % targets
    chunk = n // (inner * BF * 2) // out_padded // targets
    place = (target * inner + k) * 2 + column
    entry = tl.load(entries + place, mask=kept, other=-1)
    sign = tl.load(signs + place, mask=kept, other=0.0)
    start = tl.load(pieces + k * 2)
    size = tl.load(pieces + k * 2 + 1)
    i = chunk * BF + field
    known = (o < out_fields) & (i < in_fields) & (entry >= 0)
    value = tl.load(weights + o * out_stride + i * in_stride + entry, mask=known, other=0.0)
    value *= sign * two_to(HEADROOM - exponent(tl.load(largest)))
    where = (chunk * inner + start) * (targets * out_padded * 2 * BF)
    where += (((target * out_padded + o) * 2 + column) * BF + field) * size + k - start
    tl.store(out + where, value.to(out.dtype.element_ty), mask=kept)


@triton.jit
def spread(
    partial, owners, signs, out, out_fields, in_fields, weights, in_padded, out_padded, count,
    splits, MOST: tl.constexpr, BLOCK: tl.constexpr,
):
    """Sum the partial gradients, in a fixed order, and give each spectral weight its own."""  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < weights * in_fields * out_fields
    o = n % out_fields
    i = n // out_fields % in_fields
    number = n // (out_fields * in_fields)
    total = tl.zeros([BLOCK], tl.float32)
    for t in tl.static_range(MOST):
        place = tl.load(owners + number * MOST + t, mask=kept, other=-1)
        sign = tl.load(signs + number * MOST + t, mask=kept, other=0.0)
        source = partial + ((i * count + place // 2) * out_padded + o) * 2 + place % 2
        for _ in tl.range(0, splits):
            total += tl.load(source, mask=place >= 0, other=0.0) * sign
            source += in_padded * count * out_padded * 2
    tl.store(out + (o * in_fields + i) * weights + number, total, mask=kept)
