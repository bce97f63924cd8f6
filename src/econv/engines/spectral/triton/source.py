"""Generates the Triton source of a plan's kernels.

One program owns a tile of pixels. A thread owns a pixel and a field with all slots of its spectrum.
It reads the taps, forms every derivative in registers, adds them up to features and hands those to
the tensor cores. Derivatives never reach memory.

The plan fixes which tap meets which coefficient, which features meet which irrep, and how a
spectrum becomes channels. All of it is unrolled: the source has no tables and no branches, and its
length depends neither on the fields nor on the image. The memory layout is that of `scheme`;
`kernels` compiles the text.
"""

from __future__ import annotations

import itertools

import numpy as np
import triton

from econv.engines.spectral.triton.scheme import FIELDS, HEADROOM, RUN, Scheme, power_of_two
from econv.engines.spectral.triton.writer import Writer, times_rows, twos
from econv.fourier import butterflies

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
if VERSION < (3, 6):
    raise ImportError(f"expected Triton 3.6 or later; got {triton.__version__}")

FIRST = VERSION < (3, 7)
"""Along which axes a load distributes threads, then warps: the first ones, or those next to the
contiguous axis. Tensors with another order would be exchanged between threads."""

_ITEMS = "BF, BP" if FIRST else "BP, BF"
"""The axes of what threads own: fields lie side by side in memory, and so do threads."""

_PIXEL, _FIELD = ("None, :", ":, None") if FIRST else (":, None", "None, :")
"""How what belongs to a pixel, or to a field, is broadcast over these axes."""


def _differentiate(write: Writer, layout: Scheme) -> None:
    """A function: where the centre taps lie → every derivative there, in registers."""
    with write.function("differentiate", "centre, row, column"):
        coefficients = layout.coefficients
        started: set[int] = set()

        def add(name: str, i: int, j: int) -> None:
            for stencil in np.flatnonzero(coefficients[:, i, j]).tolist():
                value = float(coefficients[stencil, i, j])
                old = f"d{stencil}" if stencil in started else None
                started.add(stencil)
                write(f"d{stencil} = {write.scaled(name, value, value, old)}")

        # Taps that mirror each other are loaded as one tensor with an axis of two for each mirror.
        # That axis is in a thread's registers.
        one = ":, :, None, :" if FIRST else "None, :, :, :"
        two = ":, :, None, None, :" if FIRST else "None, None, :, :, :"
        first, second = (2, 3) if FIRST else (0, 1)

        def split(source: str, mirror: int, axes: int) -> str:
            order = [*(n for n in range(axes) if n != mirror), mirror]
            return f"tl.split(tl.trans({source}, ({', '.join(map(str, order))})))"

        def mirrored(axis: int, axes: int) -> str:
            return ", ".join(":" if n == axis else "None" for n in range(axes))

        write("side = 1 - 2 * tl.arange(0, 2)")
        write(f"above = side[{mirrored(first, 4)}] * row")
        write(f"beside = side[{mirrored(first, 4)}] * column")
        write(f"both = (side * row)[{mirrored(first, 5)}]")
        write(f"both_beside = (side * column)[{mirrored(second, 5)}]")
        for dy, dx, rows, columns in layout.mirrored():
            if not dy and not dx:
                write("u = tl.load(centre)")
                add("u", 0, 0)
            elif not (dy and dx):
                # Rows run downwards, in the image as in a stencil.
                where = f"{dy} * above" if dy else f"{dx} * beside"
                write(f"t = tl.load(centre[{one}] + {where})")
                write(f"p, m = {split('t', first, 4)}")
                for sign, i, j in (("+", dy, dx), ("-", rows[-1], columns[-1])):
                    write(f"u = {write.sum('p', 'm', sign)}")
                    add("u", i, j)
            else:
                where = f"{dy} * both + {dx} * both_beside"
                write(f"t = tl.load(centre[{two}] + ({where}))")
                write(f"p, m = {split('t', second, 5)}")
                for sign, j in zip("+-", columns, strict=True):
                    if not coefficients[:, rows, j].any():
                        continue
                    write(f"q = {write.sum('p', 'm', sign)}")
                    write(f"q, n = {split('q', first, 4)}")
                    for other, i in zip("+-", rows, strict=True):
                        if coefficients[:, i, j].any():
                            write(f"u = {write.sum('q', 'n', other)}")
                            add("u", i, j)
        names = ", ".join(f"d{n}" for n in range(len(coefficients)))
        write(f"return {names},")


def _features(write: Writer, layout: Scheme, chunk: int) -> None:
    """The features of a slot chunk: ``z[target, pixel, (field, feature)]`` for each piece."""
    _derivatives(write, layout, chunk)
    pairs = _Pairs(write, layout)
    order = "(3, 1, 0, 4, 2)" if FIRST else "(3, 0, 1, 4, 2)"
    before = sum(len(rows[0]) for rows in layout.lists[:chunk])
    for number, size, start in layout.pieces_of(chunk):
        columns = [
            write.joined([pairs.pair(*pair) for pair in column])
            for column in layout.pairs(chunk, start - before, size)
        ]
        # [field and pixel, 2, target, inner / 2]: the inner axis is joined last, so that a thread
        # holds neighbours along it and stores them at once.
        shape = f"[{_ITEMS}, 2, {layout.batch}, {size // 2}]"
        write(f"""
            z = tl.reshape({write.joined(columns)}, {shape})
            z = tl.trans(z, {order})
            z{number} = tl.reshape(z, [{layout.batch}, BP, BF * {size}])
        """)


def _derivatives(write: Writer, layout: Scheme, chunk: int) -> None:
    """Differentiate one slot chunk: tensors ``d{stencil}_{pair}`` of two slots each."""
    offset = f" + {chunk * FIELDS * layout.width} * grid_size" if chunk else ""
    stencils = range(len(layout.plan.stencils))
    names = ", ".join(f"d{n}" for n in stencils)
    write(f"{names}, = differentiate(source{offset} + here, row, column)")
    pairs = layout.width // 2
    for stencil in stencils:
        if pairs > 1:
            write(f"d = tl.trans(tl.reshape(d{stencil}, [{_ITEMS}, {pairs}, 2]), (0, 1, 3, 2))")
            write(f"d{stencil} = tl.reshape(d, [{_ITEMS}, 2, {twos(pairs)}])")
        write.split(f"d{stencil}", [f"d{stencil}_{pair}" for pair in range(pairs)])
    write("signs = (1 - 2 * tl.arange(0, 2))[None, None, :].to(x.dtype.element_ty)")


class _Pairs:
    """Features two by two, written when they are first asked for."""

    def __init__(self, write: Writer, layout: Scheme) -> None:
        self.write, self.layout = write, layout
        self.taken: set[str] = set()

    def _once(self, name: str, text: str) -> str:
        if name not in self.taken:
            self.taken.add(name)
            self.write(f"{name} = {text}")
        return name

    def _parts(self, source: str) -> None:
        if f"{source}e" not in self.taken:
            self.taken.add(f"{source}e")
            self.write(f"{source}e, {source}o = tl.split({source})")

    def _swapped(self, source: str) -> str:
        if self.write.f16x2:
            swap = self.write.asm("prmt.b32 $0, $1, $1, 0x1032;", source)
            return self._once(f"{source}s", swap)
        self._parts(source)
        return self._once(f"{source}s", f"tl.join({source}o, {source}e)")

    def _single(self, feature: int) -> str:
        """One feature as a tensor of its own."""
        text = ""
        for (stencil, pair), (side, factor) in self.layout.terms(feature).items():
            source = f"d{stencil}_{pair}"
            self._parts(source)
            text += f" {'-' if factor < 0 else '+'} {source}{'eo'[side]}"
        return self._once(f"f{feature}", text.removeprefix(" + ").lstrip())

    def pair(self, one: int, two: int) -> str:
        """Two features side by side."""
        name = f"f{one}_{two}"
        if name in self.taken:
            return name
        if not self.layout.alike(one, two):
            return self._once(name, f"tl.join({self._single(one)}, {self._single(two)})")
        left, right = self.layout.terms(one), self.layout.terms(two)
        found = None
        for key, (side, factor) in left.items():
            source = f"d{key[0]}_{key[1]}"
            if side:
                source = self._swapped(source)
            other = right[key][1]
            if factor == other == 1.0:
                found = source if found is None else self.write.sum(found, source)
            else:
                found = self.write.scaled(source, factor, other, found)
        assert found is not None
        return self._once(name, found)


def _analyse(write: Writer, layout: Scheme, fields: int = FIELDS) -> None:
    """The kernels ``analyse`` and ``analyse_activated``: the scaled spectrum on the padded grid.

    ``fields`` are contiguous. ``each`` is 1 where every image has a largest number of its own, and
    0 where all have one. Activated: max(0, (x − centre)·scale + shift) is transformed, with three
    numbers of each field, and zero outside of the image.
    """
    general = "fields height width pitch lines grid_size images before"
    last = "largest, out, images, fields, height, width, up, before, pitch, lines, grid_size, each"
    last += ", x_image, x_channel, x_line, x_dot"
    for activated in (False, True):
        name, first = ("analyse_activated", "x, affine") if activated else ("analyse", "x")
        with write.function(name, f"{first}, {last}", "BP", general):
            _analyse_body(write, layout, fields, activated)


def _analyse_body(write: Writer, layout: Scheme, fields: int, activated: bool) -> None:
    write(f"""
        BF: tl.constexpr = {fields}
        SC: tl.constexpr = {layout.width}
        offset = tl.program_id(0) * BP + tl.arange(0, BP)
        chunk = tl.program_id(1)
        field = chunk * BF + tl.arange(0, BF)
        row = offset // pitch
        image = row // lines
        line = row - image * lines - before
        dot = offset - row * pitch - before
        inside = (image < images) & (line >= 0) & (line < height * up)
        inside = inside & (dot >= 0) & (dot < width * up)
        inside = inside & (line % up == 0) & (dot % up == 0)
        base = image.to(tl.int64) * x_image + (line // up) * x_line + (dot // up) * x_dot
        power = exponent(tl.load(largest + image * each, mask=image < images, other=1.0))
        factor = two_to({HEADROOM} - power)
    """)
    if activated:
        write("there = field < fields")
        for row, number in enumerate(("centre", "scale", "shift")):
            write(f"{number} = tl.load(affine + {row} * fields + field, mask=there, other=0.0)")
        write("factor = tl.where(inside, factor, 0.0)")
    write(f"factor = factor[{_PIXEL}, None]")
    _transformed(write, layout, layout.analysis, activated)
    write(f"""
        where = offset[{_PIXEL}, None] * BF + tl.arange(0, BF)[{_FIELD}, None]
        where = where * SC + tl.arange(0, SC)[None, None, :]
        kept = (offset < grid_size)[{_PIXEL}, None]
        into = out + chunk.to(tl.int64) * grid_size * (BF * SC * {layout.chunks})
    """)
    for part in range(layout.chunks):
        names = [f"t{part * layout.width + n}" for n in range(layout.width)]
        found = f"tl.reshape({write.joined(names)}, [{_ITEMS}, SC])"
        write(f"found = {found}.to(out.dtype.element_ty)")
        write("tl.store(into + where, found, mask=kept)")
        if part + 1 < layout.chunks:
            write("into += grid_size * (BF * SC)")


def _transformed(
    write: Writer, layout: Scheme, analysis: np.ndarray, activated: bool = False
) -> None:
    """The spectrum ``t0 …`` of the channels that lie at ``base``, times a factor."""
    channels = layout.plan.analysis.shape[1]
    vector = min(power_of_two(channels), layout.vector)
    write(f"element = tl.arange(0, {vector})")
    # As much at a time as a thread reads in one go: what it splits is its own.
    for first in range(0, channels, vector):
        write(f"""
            channel = (field * {channels} + {first})[{_FIELD}, None] + element[None, None, :]
            known = inside[{_PIXEL}, None] & (field < fields)[{_FIELD}, None]
            known = known & (element < {channels - first})[None, None, :]
            where = base[{_PIXEL}, None] + channel * x_channel
            c = tl.load(x + where, mask=known, other=0.0).to(tl.float32)
        """)
        if activated:
            write(f"c = (c - centre[{_FIELD}, None]) * scale[{_FIELD}, None]")
            write(f"c = rectified(c + shift[{_FIELD}, None])")
        write("c = c * factor")
        write(f"c = tl.reshape(c, [{_ITEMS}{', ' * (vector > 1)}{twos(vector)}])")
        write.split("c", [f"c{n}" if n < channels else None for n in range(first, first + vector)])
    pairs, rest = butterflies(analysis.T)
    for a, b in pairs:
        write(f"c{a}, c{b} = c{a} + c{b}, c{a} - c{b}")
    times_rows(write, rest, "c", "t")


_PACKED = (
    "x, largest, out, pixels, fields, height, width, programs, x_image, x_channel, x_line, x_dot"
)


def _pack(write: Writer, layout: Scheme, parts: tuple[int, ...], copies: int) -> None:
    """The kernel ``pack``: the spectrum of an output's gradient as the tensor cores read it.

    ``[tile of pixels, program, part]``, and there `_Fragments` whose inner number is the pixel.
    """
    with write.function("pack", _PACKED, "TILE BP", "pixels fields height width programs"):
        _gradient_spectrum(write, layout, RUN)
        names = [f"t{n}" for n in range(2 * layout.batch)]
        # Pixels are [run, 2, 4, 2], fields [2, 4]; a thread stores what lies side by side.
        pixels, run, threads = "BP // 16, 2, 4, 2", "2, 4", "(0, 6, 5, 7, 2, 1, 4, 3)"
        axes, lane, member = "BP // 16, TARGETS, 32", "None, None, :", ":, :, None"
        if FIRST:
            pixels, run, threads = run, pixels, "(1, 7, 4, 2, 6, 3, 0, 5)"
            axes, lane, member = "32, BP // 16, TARGETS", ":, None, None", "None, :, :"
        fields, runs, wide = sum(parts), sum(parts) // RUN, parts[0] // RUN
        write(f"""
            found = tl.reshape({write.joined(names)}, [{pixels}, {run}, TARGETS, 2])
            found = tl.trans(found, {threads}).to(out.dtype.element_ty)
            found = tl.reshape(found, [{axes}, 8])
            program = run // {runs * copies}
            copy = run // {runs} % {copies}
            run = run % {runs}
            second = run >= {wide}
            tile = tl.program_id(0) * BP // TILE
            where = (tile.to(tl.int64) * programs + program) * {fields * copies}
            where += tl.where(second, {parts[0] * copies}, 0)
            where = where * (TARGETS * 2 * TILE)
            run = run - tl.where(second, {wide}, 0)
            group = run * (TILE // 16) + tl.program_id(0) * BP % TILE // 16
            group += tl.arange(0, BP // 16)
            member = tl.arange(0, TARGETS) * {copies} + copy
            offset = (group * (TARGETS * {copies}))[:, None] + member[None, :]
            offset = offset[{member}, None] * 32 + tl.arange(0, 32)[{lane}, None]
            tl.store(out + where + offset * 8 + tl.arange(0, 8)[None, None, None, :], found)
        """)


def packed_rows_source(layout: Scheme, parts: tuple[int, ...], contiguous: int) -> str:
    """``analyse`` and ``pack`` for the warp-specialised gradient to the weights.

    So many fields of the input are contiguous. The spectrum of the output's gradient is packed in
    rows of pixels, ``[block of pixels, program, part, target, (field, column)]``.
    """
    write = Writer("tl", f16x2=False)
    _analyse(write, layout, contiguous)
    fields = sum(parts)
    with write.function("pack", _PACKED, "BP", "pixels fields height width programs"):
        _gradient_spectrum(write, layout, FIELDS)
        names = [f"t{n}" for n in range(2 * layout.batch)]
        write(f"""
            found = tl.reshape({write.joined(names)}, [{_ITEMS}, TARGETS, 2])
            found = tl.trans(found, {"(2, 0, 3, 1)" if FIRST else "(2, 1, 3, 0)"})
            program = field // {fields}
            o = field % {fields}
            second = o >= {parts[0]}
            size = tl.where(second, {fields - parts[0]}, {parts[0]})
            o = o - tl.where(second, {parts[0]}, 0)
            row = (tl.program_id(0) * programs + program) * {fields} + field % {fields} - o
            row = row * (TARGETS * 2)
            target = tl.arange(0, TARGETS)
            row = row[None, :] + (target[:, None] * size[None, :] + o[None, :]) * 2
            row = row[:, :, None] + tl.arange(0, 2)[None, None, :]
            where = row.to(tl.int64)[:, :, :, None] * BP + tl.arange(0, BP)[None, None, None, :]
            tl.store(out + where, found.to(out.dtype.element_ty))
        """)
    return write.text()


def _gradient_spectrum(write: Writer, layout: Scheme, fields: int) -> None:
    """The spectrum ``t0 …`` of a gradient at the pixels and for the fields of a program."""
    write(f"""
        BF: tl.constexpr = {fields}
        TARGETS: tl.constexpr = {layout.batch}
        pixel = tl.program_id(0) * BP + tl.arange(0, BP)
        run = tl.program_id(1)
        field = run * BF + tl.arange(0, BF)
        inside = pixel < pixels
        row = pixel // width
        dot = pixel - row * width
        image = row // height
        line = row - image * height
        base = image.to(tl.int64) * x_image + line * x_line + dot * x_dot
        factor = two_to({HEADROOM} - exponent(tl.load(largest)))
    """)
    _transformed(write, layout, layout.output_analysis)


def _pixels(write: Writer, layout: Scheme) -> None:
    """Which pixels a tile holds and where their centre taps lie."""
    reach = layout.coefficients.shape[-1] // 2
    write(f"""
        inside = pixel < pixels
        p = tl.where(inside, pixel, 0)
        image = p // (height * width)
        line = (p - image * (height * width)) // width
        dot = p % width
        offset = image * image_pitch + line * down * pitch + dot * down
        offset += {reach} * (pitch + 1) * dilation
        here = offset[{_PIXEL}, None] * {FIELDS} + field[{_FIELD}, None]
        here = here * SC + slot[None, None, :]
    """)


def _common(write: Writer, layout: Scheme) -> None:
    write(f"""
        SC: tl.constexpr = {layout.width}
        TARGETS: tl.constexpr = {layout.batch}
        slot = tl.arange(0, SC)
        row = pitch * dilation * ({FIELDS} * SC)
        column = dilation * ({FIELDS} * SC)
    """)


class _Fragments:
    """A matrix of weights in the order in which the tensor cores' threads hold it.

    A thread reads ``vector`` neighbours in one go, those of a warp lie side by side, and nothing
    has to be exchanged. Of the inner number's bits the first and the fourth belong to a thread, the
    two between them and three of the column's to the number of the thread.
    """

    def __init__(self, inner: int, columns: int, left: bool = False) -> None:
        inners, runs = inner // 16, columns // 8
        two = min(2, runs)
        one = min(2, inners) if two == 1 else 1
        self.vector = 4 * one * two
        self.groups = inners // one * (runs // two)
        # Axes by name, n for columns and k for the inner number: those of threads, of warps, of
        # registers, and last those of a thread's neighbours.
        groups = [
            [("n0", "8"), ("k1", "4")],
            [("b", "TARGETS * COPIES")],
            [("n2", f"{runs // two}"), ("k4", f"{inners // one}")],
        ]
        own = [("n1", f"{two}"), ("k3", f"{one}"), ("k2", "2"), ("k0", "2")]
        if left:  # a factor on the left, transposed: its threads hold their bits in another order
            own = [("k2", "2"), ("n1", f"{two}"), ("k3", f"{one}"), ("k0", "2")]
        axes = [*itertools.chain(*(groups if FIRST else groups[::-1])), *own]
        names = [name for name, _ in axes]
        wanted = ("b", "k4", "k3", "k2", "k1", "k0", "n2", "n1", "n0")
        self.axes = f"[{', '.join(length for _, length in axes)}]"
        self.order = f"({', '.join(str(names.index(name)) for name in wanted)})"
        self.shape = f"[TARGETS * COPIES, {inner}, {columns}]"

    def load(self, write: Writer, source: str, result: str) -> None:
        """Read the matrices of all products, ``[product, inner, column]``."""
        run = ":, None" if FIRST else ":, None, None, None"
        member = f"tl.arange(0, {self.groups})[{run}] * (TARGETS * COPIES) + member"
        where = f"(({member}) * 32 + lane) * {self.vector} + tl.arange(0, {self.vector})"
        held = f"tl.reshape(tl.load({source} + ({where})), {self.axes})"
        write(f"{result} = tl.reshape(tl.trans({held}, {self.order}), {self.shape})")

    @staticmethod
    def threads(write: Writer) -> None:
        """What `load` reads with."""
        write(f"lane = tl.arange(0, 32)[{':, None, None, None' if FIRST else ':, None'}]")
        write("member = tl.arange(0, TARGETS * COPIES)[:, None, None]")


def _copied(write: Writer, number: int, size: int) -> None:
    """The features of a piece once for each copy of a target: ``v{number}``.

    The name belongs to the piece: what a loop assigns keeps the type that it had before the loop.
    """
    shape = f"BP, BF * {size}]"
    copies = f"tl.broadcast_to(z{number}[:, None, :, :], [TARGETS, COPIES, {shape})"
    write(f"v{number} = tl.reshape({copies}, [TARGETS * COPIES, {shape})")


_GRID = "pixels, height, width, down, dilation, pitch, image_pitch, grid_size"
_GENERAL = "pixels height width pitch image_pitch grid_size"


def _forward(
    write: Writer, layout: Scheme, parts: tuple[int, ...], copies: int, last: bool
) -> None:
    """A layer: features of a tile of pixels, products with the weights, channels of the output.

    Products of equal shape are one batched product, and each warp makes some of the batch. Where
    there are fewer targets than warps, each target is there in ``copies``, for as many runs of
    output fields.
    """
    arguments = f"x, w, y, x_largest, w_largest, {_GRID}, chunks, out_padded, out_fields"
    arguments += ", y_image, y_channel, y_line, y_dot"
    with write.function("forward", arguments, "BP PRECISION", f"{_GENERAL} chunks out_fields"):
        write(f"BF: tl.constexpr = {FIELDS}")
        _common(write, layout)
        write(f"""
            COPIES: tl.constexpr = {copies}
            field = tl.arange(0, BF)
            pixel = tl.program_id(0) * BP + tl.arange(0, BP)
            first = tl.program_id(1) * {sum(parts) * copies}
        """)
        _pixels(write, layout)
        for part, size in enumerate(parts):
            write(f"a{part} = tl.zeros([TARGETS * COPIES, BP, {2 * size}], tl.float32)")
        write(f"step = out_padded * {2 * FIELDS * layout.batch * layout.inner}")
        _Fragments.threads(write)

        def products(chunk: int) -> None:
            for number, size, start in layout.pieces_of(chunk):
                _copied(write, number, size)
                each = 2 * FIELDS * size * layout.batch
                write(f"piece = weight + {start * 2 * FIELDS * layout.batch} * out_padded")
                write(f"piece += first * {each}")
                for part, wide in enumerate(parts):
                    _Fragments(FIELDS * size, 2 * wide).load(write, "piece", f"w{number}_{part}")
                    factors = f"v{number}, w{number}_{part}"
                    write(f"a{part} = tl.dot({factors}, a{part}, input_precision=PRECISION)")
                    write(f"piece += COPIES * {wide * each}")

        # Each iteration multiplies the features of the one before it. Its loads and sums do not
        # depend on its products, and run beside them. (Triton would also prefetch the taps of
        # features that are multiplied at once, past the cache that holds what taps share.)
        for chunk in range(layout.chunks):
            for number, size, _ in layout.pieces_of(chunk):
                write(f"z{number} = tl.zeros([TARGETS, BP, BF * {size}], x.dtype.element_ty)")
            write("source = x")
            write("weight = w")
            with write.block("for chunk in tl.range(0, chunks):"):
                products(chunk)
                write("weight += tl.where(chunk > 0, step, 0)")
                _features(write, layout, chunk)
                write(f"source += grid_size * {layout.chunks * FIELDS * layout.width}")
            products(chunk)
        _channels(write, layout, parts, last)


def _channels(write: Writer, layout: Scheme, parts: tuple[int, ...], last: bool) -> None:
    """From sums to channels of the output; ``last``: those are contiguous."""
    pairs, rest = butterflies(layout.plan.synthesis.T)
    channels = layout.plan.synthesis.shape[0]
    padded = power_of_two(channels)
    # Found anew: what belongs to a thread's pixels here need not be kept during the loop.
    write(f"""
        owner = tl.minimum(pixel, pixels - 1) // (height * width)
        power = exponent(tl.load(x_largest + owner)) + exponent(tl.load(w_largest))
        scale = two_to(power - {2 * HEADROOM})[:, None, None]
    """)
    split = last and padded > layout.vector
    if split:  # one pixel after the other, through all images
        write("base = pixel.to(tl.int64) * y_dot")
    else:
        write("base = image.to(tl.int64) * y_image + line * y_line + dot * y_dot")
    # A thread holds a pixel and a field, the next one the next field. Where a field's channels are
    # contiguous and more than a thread writes in one go, they are stored that way: otherwise all
    # would be exchanged. (Fewer are not: registers are short.)
    transposed, vector = split and FIRST, layout.vector if split else padded
    pixel, field = (_PIXEL, _FIELD) if transposed else (":, None", "None, :")
    for part, size in enumerate(parts):
        # [(target, copy), pixel, (field, column)] → [pixel, (copy, field), (target, column)]
        write(f"""
            s = tl.reshape(a{part}, [TARGETS, COPIES, BP, {2 * size}])
            s = tl.reshape(tl.trans(s, (2, 1, 3, 0)), [BP, COPIES * {size}, 2, TARGETS])
            s = tl.trans(s, (0, 1, 3, 2))
            s = tl.reshape(s, [BP, COPIES * {size}, {twos(2 * layout.batch)}])
        """)
        write.split("s", [f"s{n}" if n >= 0 else None for n in layout.slots])
        times_rows(write, rest.T, "s", "y")
        for a, b in reversed(pairs):
            write(f"y{a}, y{b} = y{a} + y{b}, y{a} - y{b}")
        write(f"""
            o = tl.arange(0, COPIES * {size})
            o = first + {sum(parts[:part])} + o // {size} * {sum(parts)} + o % {size}
            element = tl.arange(0, {vector})[None, None, :]
        """)
        for start in range(0, channels, vector):
            outputs = [f"y{c if c < channels else 0}" for c in range(start, start + vector)]
            found = f"tl.reshape({write.joined(outputs)}, [BP, COPIES * {size}, {vector}])"
            write(f"found = {found}")
            write("found = (found * scale).to(y.dtype.element_ty)")
            if transposed:
                write("found = tl.trans(found, (1, 0, 2))")
            write(f"""
                channel = o[{field}, None] * {channels} + {start} + element
                known = (o < out_fields)[{field}, None] & (element < {channels - start})
                where = base[{pixel}, None] + channel * y_channel
                tl.store(y + where, found, mask=inside[{pixel}, None] & known)
            """)


def _weight_gradient(
    write: Writer, layout: Scheme, parts: tuple[int, ...], copies: int, pixels: int
) -> None:
    """The gradient to the weights: features of the input against the output's gradient."""
    arguments = f"x, g, partial, x_largest, g_largest, {_GRID}, tiles, in_padded, out_padded, again"
    general = f"{_GENERAL} tiles in_padded again"
    each, sums = layout.chunks * FIELDS * layout.width, 2 * layout.batch * layout.inner
    with write.function("weight_gradient", arguments, "BF PRECISION", general):
        write(f"FIELDS: tl.constexpr = {FIELDS}")
        write(f"COPIES: tl.constexpr = {copies}")
        _common(write, layout)
        # In 64 bits what is constant in the offset of a tap becomes part of the instruction. (The
        # layer itself has no register to spare for it.)
        write(f"""
            row = row.to(tl.int64)
            BP: tl.constexpr = {pixels}
            i = tl.program_id(0) * BF
            first = tl.program_id(1) * {sum(parts) * copies}
            split = tl.program_id(2)
            field = i % FIELDS + tl.arange(0, BF)
            source = x + (i // FIELDS).to(tl.int64) * grid_size * {each}
        """)
        _Fragments.threads(write)
        write(f"""
            power = exponent(tl.load(x_largest)) + exponent(tl.load(g_largest))
            scale = two_to(power - {2 * HEADROOM})
            into = partial + split.to(tl.int64) * in_padded * out_padded * {sums}
            product = tl.arange(0, TARGETS * COPIES)
        """)
        for chunk in range(layout.chunks):
            _weight_gradient_of_chunk(write, layout, parts, pixels, chunk)


def _weight_gradient_of_chunk(
    write: Writer, layout: Scheme, parts: tuple[int, ...], pixels: int, chunk: int
) -> None:
    """The gradient to the weights of one slot chunk: what a program holds at a time."""
    pieces = layout.pieces_of(chunk)
    for number, size, _ in pieces:
        for part, wide in enumerate(parts):
            shape = f"[TARGETS * COPIES, {2 * wide}, BF * {size}]"
            write(f"a{part}_{number} = tl.zeros({shape}, tl.float32)")
        # As in `forward`, each iteration multiplies the features of the one before it.
        write(f"z{number} = tl.zeros([TARGETS, BP, BF * {size}], x.dtype.element_ty)")
    write("last = tl.minimum(split, tiles - 1)")

    def products() -> None:
        write("h = g + (last.to(tl.int64) * out_padded + first) * (TARGETS * 2 * BP)")
        for part, wide in enumerate(parts):
            _Fragments(pixels, 2 * wide, left=True).load(write, "h", "transposed")
            write(f"h{part} = tl.trans(transposed, (0, 2, 1))")
            write(f"h += COPIES * {wide} * (TARGETS * 2 * BP)")
        for number, size, _ in pieces:
            _copied(write, number, size)
            for part in range(len(parts)):
                total, factors = f"a{part}_{number}", f"h{part}, v{number}"
                write(f"{total} = tl.dot({factors}, {total}, input_precision=PRECISION)")

    with write.block("for tile in tl.range(split, tiles, tl.num_programs(2), num_stages=1):"):
        products()
        write("pixel = tile * BP + tl.arange(0, BP)")
        _pixels(write, layout)
        _features(write, layout, chunk)
        write("last = tile")
    products()
    for part, wide in enumerate(parts):
        for number, size, start in pieces:
            # A program adds to what it found in the images before these.
            write(f"""
                out = 2 * (first + {sum(parts[:part])}) + tl.arange(0, {2 * wide})[None, :]
                out = (product % COPIES * {2 * sum(parts)})[:, None] + out
                k = tl.arange(0, BF * {size})
                where = ((i + k // {size}) * TARGETS)[None, :] + (product // COPIES)[:, None]
                where = where * {layout.inner} + ({start} + k % {size})[None, :]
                where = where[:, None, :] * (out_padded * 2) + out[:, :, None]
                old = tl.load(into + where, mask=(where >= 0) & (again > 0), other=0.0)
                tl.store(into + where, a{part}_{number} * scale + old)
            """)


def convolution_source(
    layout: Scheme, parts: tuple[int, ...], copies: int, f16x2: bool, last: bool
) -> str:
    """The kernels ``analyse``, ``analyse_activated`` and ``forward`` of a plan's layer.

    One program gives ``copies`` times ``sum(parts)`` output fields; parts are powers of two, at
    least `FIELDS`. ``f16x2`` is for float16, and not for the interpreter; ``last`` for outputs
    whose channels lie side by side.
    """
    write = Writer("tl", f16x2)
    _analyse(write, layout)
    _differentiate(write, layout)
    _forward(write, layout, parts, copies, last)
    return write.text()


def weight_gradient_source(
    layout: Scheme, parts: tuple[int, ...], copies: int, pixels: int, f16x2: bool
) -> str:
    """The kernels of the gradient to the weights: ``analyse``, ``pack``, ``weight_gradient``.

    As in `convolution_source`, with parts of at least `RUN` and ``pixels`` at a time.
    """
    write = Writer("tl", f16x2)
    _analyse(write, layout)
    _pack(write, layout, parts, copies)
    _differentiate(write, layout)
    _weight_gradient(write, layout, parts, copies, pixels)
    return write.text()
