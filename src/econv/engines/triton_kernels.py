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
from typing import Any

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


@dataclass(frozen=True)
class Product:
    """Features of one slot chunk that meet one block: a matrix product for each field chunk."""

    block: int
    row: int
    first: int
    """The first row of the block's weights."""
    features: tuple[int, ...]
    """Numbers of the features; a power of two of them. Padding repeats one; its weight is zero."""


@dataclass(frozen=True, eq=False)
class Scheme:
    """Where everything lies: the orders in which the kernels of a plan keep slots and weights."""

    plan: SpectralPlan
    vector: int
    """Slots that a thread reads at a time."""

    @cached_property
    def positions(self) -> np.ndarray:
        """Where each slot of the plan's spectrum lies, pairs aligned."""
        found: list[int] = []
        free = 0
        for copy in transform(self.plan.basis.group, self.plan.source):
            size = len(copy.basis)
            free += -free % size
            found += range(free, free + size)
            free += size
        return np.array(found)

    @cached_property
    def width(self) -> int:
        """Slots that are read at a time: the vector, or less for small groups."""
        return min(self.vector, _power_of_two(int(self.positions[-1]) + 1))

    @property
    def chunks(self) -> int:
        """How many times `width` slots the spectrum takes."""
        return int(self.positions[-1]) // self.width + 1

    @cached_property
    def analysis(self) -> np.ndarray:
        """Channels to slots where they lie, ``[channels, chunks * width]``."""
        found = np.zeros((self.plan.analysis.shape[1], self.chunks * self.width))
        found[:, self.positions] = self.plan.analysis.T
        return found

    @cached_property
    def orders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each block and slot chunk the inner numbers that it holds, −1 for padding."""
        found = []
        for block in self.plan.blocks:
            chunk = self._chunk_of(block.features)
            if not (chunk == chunk[0]).all():
                raise ArithmeticError(f"rows of a block of {self.plan!r} read different slots")
            parts = []
            for number in range(self.chunks):
                inner = np.flatnonzero(chunk[0] == number).tolist()
                parts.append(tuple(inner + [-1] * (-len(inner) % 4)))
            found.append(tuple(parts))
        return tuple(found)

    def _chunk_of(self, features: np.ndarray) -> np.ndarray:
        plan = self.plan
        chunk = self.positions[plan.feature_slots] // self.width
        used = plan.feature_factors != 0
        if (used.all(axis=1) & (chunk[:, 0] != chunk[:, 1])).any():
            raise ArithmeticError(f"a feature of {plan!r} reads slots of two chunks")
        return np.where(used[:, 0], chunk[:, 0], chunk[:, 1])[features]

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The padded inner length of each block."""
        return tuple(sum(map(len, parts)) for parts in self.orders)

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """Where the weights of each block begin, and where the last end, for one pair of fields."""
        sizes = [n * b.columns for n, b in zip(self.inner, self.plan.blocks, strict=True)]
        return (0, *np.cumsum(sizes).tolist())

    @cached_property
    def places(self) -> np.ndarray:
        """For each weight of a pair of fields, ``[weights, 6]``.

        Segment, padded inner length, inner number, columns, column, and the spectral weight that
        stands there (−1: none).
        """
        rows = []
        for number, (block, parts) in enumerate(zip(self.plan.blocks, self.orders, strict=True)):
            inner = [k for part in parts for k in part]
            for row, k in enumerate(inner):
                for column in range(block.columns):
                    entry = int(block.entries[k, column]) if k >= 0 else -1
                    where = (self.segments[number], len(inner), row, block.columns, column, entry)
                    rows.append(where)
        return np.array(rows, dtype=np.int32)

    @cached_property
    def signs(self) -> np.ndarray:
        """The sign of each weight of a pair of fields, 0 where none stands."""
        found = []
        for block, parts in zip(self.plan.blocks, self.orders, strict=True):
            for k in (k for part in parts for k in part):
                found += block.signs[k].tolist() if k >= 0 else [0.0] * block.columns
        return np.array(found, dtype=np.float32)

    @cached_property
    def adjoint_places(self) -> tuple[np.ndarray, np.ndarray]:
        """`places` and `signs` of the adjoint layer, as spectral weights of this one."""
        matrix = self.plan.adjoint_map  # a permutation with signs
        if not ((matrix != 0).sum(axis=0) == 1).all():
            raise ArithmeticError(f"the adjoint of {self.plan!r} mixes spectral weights")
        source = np.abs(matrix).argmax(axis=0)
        places = self.places.copy()
        entry = places[:, 5]
        places[:, 5] = np.where(entry >= 0, source[entry], -1)
        signs = self.signs * np.where(entry >= 0, matrix[source[entry], entry], 0.0)
        return places, signs.astype(np.float32)

    @cached_property
    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """For each spectral weight where it stands (−1: nowhere) and with which sign."""
        entries = self.places[:, 5]
        lists = [np.flatnonzero(entries == n) for n in range(self.plan.weights)]
        most = max(map(len, lists))
        where = np.full((len(lists), most), -1, dtype=np.int32)
        signs = np.zeros((len(lists), most), dtype=np.float32)
        for number, found in enumerate(lists):
            where[number, : len(found)] = found
            signs[number, : len(found)] = self.signs[found]
        return where, signs

    def products(self, chunk: int) -> Iterator[Product]:
        """The matrix products that the features of one slot chunk enter."""
        for number, (block, parts) in enumerate(zip(self.plan.blocks, self.orders, strict=True)):
            start = sum(len(part) for part in parts[:chunk])
            inner = parts[chunk]
            for first, size in _powers(len(inner)):
                chosen = [k if k >= 0 else inner[0] for k in inner[first : first + size]]
                for row in range(block.rows):
                    features = tuple(int(block.features[row, k]) for k in chosen)
                    yield Product(number, row, start + first, features)

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
    """Pieces of a length that are powers of two, at most 16: where each begins and its size."""
    first = 0
    while first < length:
        size = min(16, 1 << ((length - first).bit_length() - 1))
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


def _features(write: _Writer, layout: Scheme, chunk: int, source: str) -> None:
    """Differentiate one slot chunk and name every feature that it holds."""
    plan = layout.plan
    offset = f" + {chunk} * places * {FIELDS * layout.width}" if chunk else ""
    stencils = len(plan.stencils)
    names = ", ".join(f"d{n}" for n in range(stencils))
    write(f"{names}, = differentiate({source}{offset} + here, row, column)")
    wanted = sorted({f for product in layout.products(chunk) for f in product.features})
    used: set[tuple[int, int]] = set()
    for feature in wanted:
        for t in range(2):
            if plan.feature_factors[feature, t]:
                slot = int(layout.positions[plan.feature_slots[feature, t]])
                used.add((int(plan.feature_stencils[feature, t]), slot % layout.width))
    for stencil in range(stencils):
        parts = [
            f"z{stencil}_{slot}" if (stencil, slot) in used else None
            for slot in range(layout.width)
        ]
        _split(write, f"d{stencil}", parts, "BP, BF")
    for feature in wanted:
        text = ""
        for t in range(2):
            factor = plan.feature_factors[feature, t]
            if factor:
                slot = int(layout.positions[plan.feature_slots[feature, t]]) % layout.width
                name = f"z{plan.feature_stencils[feature, t]}_{slot}"
                text += f" {'-' if factor < 0 else '+'} {name}"
        write(f"f{feature} = {text.removeprefix(' + ').lstrip()}")


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
    write("here = (place[:, None, None] * BF + field[None, :, None]) * SC + slot[None, None, :]")


def _common(write: _Writer) -> None:
    write("field = tl.arange(0, BF)")
    write("slot = tl.arange(0, SC)")
    write("row = pitch * dilation * (BF * SC)")
    write("column = dilation * (BF * SC)")


def _forward(write: _Writer, layout: Scheme, parts: tuple[int, ...]) -> None:
    plan = layout.plan
    write("@triton.jit")
    write(
        "def forward(x, w, y, x_largest, w_largest, pixels, height, width, down, dilation, pitch,\n"
        "            image_pitch, places, chunks, in_padded, out_padded, out_fields, out_step,\n"
        "            y_image, y_channel, y_line, y_dot, BP: tl.constexpr, PRECISION: tl.constexpr,\n"
        "            STAGES: tl.constexpr):"
    )
    write.depth += 1
    write(f"BF: tl.constexpr = {FIELDS}")
    write(f"SC: tl.constexpr = {layout.width}")
    _common(write)
    write("pixel = tl.program_id(0) * BP + tl.arange(0, BP)")
    write("first = tl.program_id(1) * out_step")
    _pixels(write, layout)
    for part, size in enumerate(parts):
        for number, block in enumerate(plan.blocks):
            for row in range(block.rows):
                shape = f"[BP, {size * block.columns}]"
                write(f"a{number}_{row}_{part} = tl.zeros({shape}, tl.float32)")
    write("source = x")
    write("for chunk in tl.range(0, chunks, num_stages=STAGES):")
    write.depth += 1
    for chunk in range(layout.chunks):
        _features(write, layout, chunk, "source")
        loaded: set[str] = set()
        for product in layout.products(chunk):
            block = plan.blocks[product.block]
            length = len(product.features)
            write(f"k = tl.arange(0, BF * {length})")
            joined = _joined([f"f{n}" for n in product.features], "BP, BF")
            write(f"z = tl.reshape({joined}, [BP, BF * {length}])")
            inner, columns = layout.inner[product.block], block.columns
            start = 0
            for part, size in enumerate(parts):
                name = f"w{product.block}_{product.first}_{part}"
                if name not in loaded:
                    loaded.add(name)
                    line = f"(chunk * BF + k // {length}) * {inner} + {product.first} + k % {length}"
                    write(f"n = tl.arange(0, {size * columns}) + (first + {start}) * {columns}")
                    write(
                        f"{name} = tl.load(w + {layout.segments[product.block]} * in_padded *"
                        f" out_padded + ({line})[:, None] * (out_padded * {columns}) + n[None, :])"
                    )
                total = f"a{product.block}_{product.row}_{part}"
                write(f"{total} = tl.dot(z, {name}, {total}, input_precision=PRECISION)")
                start += size
    write(f"source += places * {layout.chunks * FIELDS * layout.width}")
    write.depth -= 1
    write("power = exponent(tl.load(x_largest + image)) + exponent(tl.load(w_largest))")
    write(f"scale = two_to(power - {2 * HEADROOM})[:, None]")
    channels = plan.synthesis.shape[0]
    padded = _power_of_two(channels)
    write("base = image.to(tl.int64) * y_image + line * y_line + dot * y_dot")
    write(f"element = tl.arange(0, {padded})")
    start = 0
    for part, size in enumerate(parts):
        names: dict[int, str] = {}
        for number, block in enumerate(plan.blocks):
            for row in range(block.rows):
                total = f"a{number}_{row}_{part}"
                chosen = [f"s{slot}" for slot in block.slots[row].tolist()]
                _split(write, total, chosen, f"BP, {size}")
                names.update({s: f"s{s}" for s in block.slots[row].tolist()})
        for channel in range(channels):
            terms = [
                f"{name} * {float(plan.synthesis[channel, slot])!r}"
                for slot, name in sorted(names.items())
                if abs(plan.synthesis[channel, slot]) > 1e-14
            ]
            write(f"y{channel} = ({' + '.join(terms)}) * scale")
        outputs = [f"y{c if c < channels else 0}" for c in range(padded)]
        write(f"o = first + {start} + tl.arange(0, {size})")
        if padded == 1:
            write("where = base[:, None] + (o * y_channel)[None, :]")
            write("kept = inside[:, None] & (o < out_fields)[None, :]")
            write("tl.store(y + where, y0.to(y.dtype.element_ty), mask=kept)")
        else:
            write(f"found = {_joined(outputs, f'BP, {size}')}")
            write(f"channel = o[:, None] * {channels} + element[None, :]")
            write("where = base[:, None, None] + (channel * y_channel)[None, :, :]")
            write(f"known = (o < out_fields)[:, None] & (element < {channels})[None, :]")
            write("kept = inside[:, None, None] & known[None, :, :]")
            write("tl.store(y + where, found.to(y.dtype.element_ty), mask=kept)")
        start += size
    write.depth -= 1
    write()


def _gram(write: _Writer, layout: Scheme, parts: tuple[int, ...]) -> None:
    """The gradient to the weights: features of the input against the output's gradient."""
    plan = layout.plan
    write("@triton.jit")
    write(
        "def gram(x, g, partial, x_largest, g_largest, images, pixels, height, width, down,\n"
        "         dilation, pitch, image_pitch, places, g_step, g_start, g_pitch, g_image_pitch,\n"
        "         g_places, g_chunks, tiles, in_padded, out_padded, out_step, BP: tl.constexpr,\n"
        "         IMAGES: tl.constexpr, PRECISION: tl.constexpr):"
    )
    write.depth += 1
    write(f"BF: tl.constexpr = {FIELDS}")
    write(f"SC: tl.constexpr = {layout.width}")
    _common(write)
    write("chunk = tl.program_id(0)")
    write("first = tl.program_id(1) * out_step")
    write("split = tl.program_id(2)")
    write("batch = tl.arange(0, IMAGES)")
    write("known = batch < images")
    write("x_most = tl.max(exponent(tl.load(x_largest + batch, mask=known, other=0.0)))")
    write("g_most = tl.max(exponent(tl.load(g_largest + batch, mask=known, other=0.0)))")
    write(f"source = x + chunk.to(tl.int64) * places * {layout.chunks * FIELDS * layout.width}")
    names = []
    for part, size in enumerate(parts):
        for number, block in enumerate(plan.blocks):
            for chunk in range(layout.chunks):
                for product in layout.products(chunk):
                    if product.block == number and product.row == 0:
                        name = f"a{number}_{product.first}_{part}"
                        names.append(name)
                        shape = f"[{size * block.columns}, BF * {len(product.features)}]"
                        write(f"{name} = tl.zeros({shape}, tl.float32)")
    write("for tile in tl.range(split, tiles, tl.num_programs(2), num_stages=1):")
    write.depth += 1
    write("pixel = tile * BP + tl.arange(0, BP)")
    _pixels(write, layout)
    write("power = exponent(tl.load(x_largest + image)) + exponent(tl.load(g_largest + image))")
    # Pixels of the last tile that are none read the first pixel, and count nothing.
    write("share = tl.where(inside, two_to(power - (x_most + g_most)), 0.0)")
    write("share = share.to(g.dtype.element_ty)[:, None]")
    write("there = image * g_image_pitch + (line * g_step + g_start) * g_pitch")
    write("there += dot * g_step + g_start")
    start = 0
    for part, size in enumerate(parts):
        write(f"o = first + {start} + tl.arange(0, {size})")
        for chunk in range(layout.chunks):
            # Fields beyond the last read what is there; their gradients are dropped.
            known = "tl.minimum(o // BF, g_chunks - 1).to(tl.int64)"
            write(f"where = {known} * {layout.chunks} + {chunk}")
            write(
                "where = (where[None, :] * g_places + there[:, None]) * (BF * SC)"
                " + (o % BF * SC)[None, :]"
            )
            write("h = tl.load(g + where[:, :, None] + slot[None, None, :])")
            kept = [
                f"g{part}_{slot}" if slot in layout.positions else None
                for slot in range(chunk * layout.width, (chunk + 1) * layout.width)
            ]
            _split(write, "h", kept, f"BP, {size}")
        for number, block in enumerate(plan.blocks):
            for row in range(block.rows):
                slots = layout.positions[block.slots[row]].tolist()
                joined = _joined([f"g{part}_{slot}" for slot in slots], f"BP, {size}")
                if block.columns == 1:
                    joined = f"g{part}_{slots[0]}"
                write(f"h = tl.reshape({joined}, [BP, {size * block.columns}]) * share")
                write(f"h{number}_{row}_{part} = tl.trans(h)")
        start += size
    for chunk in range(layout.chunks):
        _features(write, layout, chunk, "source")
        for product in layout.products(chunk):
            length = len(product.features)
            joined = _joined([f"f{n}" for n in product.features], "BP, BF")
            write(f"z = tl.reshape({joined}, [BP, BF * {length}])")
            for part in range(len(parts)):
                total = f"a{product.block}_{product.first}_{part}"
                other = f"h{product.block}_{product.row}_{part}"
                write(f"{total} = tl.dot({other}, z, {total}, input_precision=PRECISION)")
    write.depth -= 1
    write(f"scale = two_to(x_most + g_most - {2 * HEADROOM})")
    write(f"base = partial + split.to(tl.int64) * {layout.segments[-1]} * in_padded * out_padded")
    start = 0
    for part, size in enumerate(parts):
        done: set[str] = set()
        for chunk in range(layout.chunks):
            for product in layout.products(chunk):
                total = f"a{product.block}_{product.first}_{part}"
                if total in done:
                    continue
                done.add(total)
                length, columns = len(product.features), plan.blocks[product.block].columns
                write(f"n = tl.arange(0, {size * columns})")
                write(f"k = tl.arange(0, BF * {length})")
                write(
                    f"weight = {layout.segments[product.block]} + ({product.first} + k % {length})"
                    f"[None, :] * {columns} + (n % {columns})[:, None]"
                )
                write(f"o = first + {start} + n // {columns}")
                write(
                    f"where = (weight * in_padded + (chunk * BF + k // {length})[None, :])"
                    " * out_padded + o[:, None]"
                )
                write(f"tl.store(base + where, {total} * scale)")
        start += size
    write.depth -= 1
    write()


@lru_cache(maxsize=256)
def kernels(layout: Scheme, parts: tuple[int, ...]) -> dict[str, Any]:
    """The kernels of a plan, `forward` and `gram`, and their source.

    ``parts`` are powers of two: how many output fields one program gives, in pieces.
    """
    write = _Writer()
    _differentiate(write, layout)
    _forward(write, layout, parts)
    _gram(write, layout, parts)
    source = write.text()
    plan = layout.plan
    name = f"<econv {plan.basis.group.name} {len(plan.stencils)} {layout.width} {parts} {hash(source):x}>"
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
        where = (chunk.to(tl.int64) * CHUNKS + part) * places + place
        where = where[:, None, None] * BF + tl.arange(0, BF)[None, :, None]
        kept = (place < places)[:, None, None]
        tl.store(
            out + where * SC + slot[None, None, :],
            (total * scale).to(out.dtype.element_ty),
            mask=kept,
        )


@triton.jit
def arrange(
    weights, places, signs, largest, out, out_fields, in_fields, out_stride, in_stride, in_padded,
    out_padded, total, BLOCK: tl.constexpr, HEADROOM: tl.constexpr,
):
    """Spectral weights of every pair of fields to where the kernels of a plan read them, scaled."""  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < total
    o = n % out_padded
    i = n // out_padded % in_padded
    number = n // (out_padded * in_padded)
    segment = tl.load(places + number * 6, mask=kept, other=0)
    inner = tl.load(places + number * 6 + 1, mask=kept, other=0)
    k = tl.load(places + number * 6 + 2, mask=kept, other=0)
    columns = tl.load(places + number * 6 + 3, mask=kept, other=0)
    column = tl.load(places + number * 6 + 4, mask=kept, other=0)
    entry = tl.load(places + number * 6 + 5, mask=kept, other=-1)
    sign = tl.load(signs + number, mask=kept, other=0.0)
    known = (o < out_fields) & (i < in_fields) & (entry >= 0)
    value = tl.load(weights + o * out_stride + i * in_stride + entry, mask=known, other=0.0)
    value *= sign * two_to(HEADROOM - exponent(tl.load(largest)))
    where = segment * (in_padded * out_padded) + ((i * inner + k) * out_padded + o) * columns
    tl.store(out + where + column, value.to(out.dtype.element_ty), mask=kept)


@triton.jit
def spread(
    partial, owners, signs, out, out_fields, in_fields, count, weights, in_padded, out_padded,
    splits, MOST: tl.constexpr, BLOCK: tl.constexpr,
):
    """Sum the partial gradients, in a fixed order, and give each spectral weight its own."""  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < count * in_fields * out_fields
    o = n % out_fields
    i = n // out_fields % in_fields
    number = n // (out_fields * in_fields)
    total = tl.zeros([BLOCK], tl.float32)
    for t in tl.static_range(MOST):
        weight = tl.load(owners + number * MOST + t, mask=kept, other=-1)
        sign = tl.load(signs + number * MOST + t, mask=kept, other=0.0)
        source = partial + (weight * in_padded + i) * out_padded + o
        for _ in tl.range(0, splits):
            total += tl.load(source, mask=weight >= 0, other=0.0) * sign
            source += weights * in_padded * out_padded
    tl.store(out + (o * in_fields + i) * count + number, total, mask=kept)
