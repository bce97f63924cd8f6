"""Generates the Triton source of a plan's kernels.

One program owns a tile of pixels. A thread owns a pixel and a field with all slots of its spectrum.
It reads the taps, forms every derivative in registers, adds them up to features and hands those to
the tensor cores. Derivatives never reach memory. Weights and gradients lie as the warp-specialised
kernels copy them.

The plan fixes which tap meets which coefficient, which features meet which irrep, and how a
spectrum becomes channels. All of it is unrolled: the source has no tables and no branches, and its
length depends neither on the fields nor on the image. The memory layout is that of `scheme`;
`kernels` compiles the text.
"""

from __future__ import annotations

import numpy as np

from econv.engines.spectral.triton.derivatives import tap_offset, write_derivatives
from econv.engines.spectral.triton.scheme import FIELDS, HEADROOM, Scheme
from econv.engines.spectral.triton.writer import Writer, times_rows, transform_back, twos
from econv.fourier import butterflies
from econv.gpu.launch import FIRST
from econv.gpu.sizes import power_of_two

_ITEMS = "BF, BP" if FIRST else "BP, BF"
"""The axes of what threads own: fields lie side by side in memory, and so do threads."""

_PIXEL, _FIELD = ("None, :", ":, None") if FIRST else (":, None", "None, :")
"""How what belongs to a pixel, or to a field, is broadcast over these axes."""


def _features(write: Writer, layout: Scheme, chunk: int) -> None:
    """A function: where the centre taps lie → the features of a slot chunk, piece by piece.

    ``[target, pixel, (field, feature)]``, from derivatives that stay in registers.
    """

    def load(names: dict[str, tuple[int, int]]) -> None:
        for name, tap in names.items():
            write(f"{name}0 = tl.load(centre{tap_offset(*tap)})")

    with write.function(f"features{chunk}", "centre, row, column", "BF BP"):
        stencils = sorted({stencil for stencil, _ in layout.derivatives(chunk)})
        write_derivatives(write, layout, [stencils], load, {})
        for stencil in stencils:
            write(f"d = tl.reshape(d{stencil}_0, [{_ITEMS}, {twos(layout.width)}])")
            write.split("d", [f"d{stencil}_{slot}" for slot in range(layout.width)])
        for feature in np.unique(layout.lists[chunk][layout.lists[chunk] >= 0]).tolist():
            text = ""
            for (stencil, pair), (side, factor) in layout.terms(feature).items():
                text += f" {'-' if factor < 0 else '+'} d{stencil}_{2 * pair + side}"
            write(f"f{feature} = {text.removeprefix(' + ').lstrip()}")
        order, first = "(2, 1, 0, 3)" if FIRST else "(2, 0, 1, 3)", 0
        for number, size in enumerate(layout.pieces):
            pairs = layout.pairs(chunk, first, size)
            names = [
                f"f{feature}"
                for target in range(layout.batch)
                for column in pairs
                for feature in column[target]
            ]
            write(f"""
                z = tl.reshape({write.joined(names)}, [{_ITEMS}, {layout.batch}, {size}])
                z{number} = tl.reshape(tl.trans(z, {order}), [{layout.batch}, BP, BF * {size}])
            """)
            first += size
        write(f"return {', '.join(f'z{n}' for n in range(len(layout.pieces)))},")


def _found_features(write: Writer, layout: Scheme, chunk: int) -> None:
    """The features ``z{piece}`` of the pixels and fields that lie ``here``."""
    names = "".join(f"z{n}, " for n in range(len(layout.pieces)))
    write(f"{names}= features{chunk}(source + here, row, column, BF, BP)")


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
                for row, name in enumerate(("centre", "scale", "shift")):
                    at = f"affine + {row} * fields + field"
                    write(f"{name} = tl.load({at}, mask=there, other=0.0)")
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


def _pack(write: Writer, layout: Scheme, parts: tuple[int, ...]) -> None:
    """The kernel ``pack``: the spectrum of an output's gradient, in rows of pixels.

    ``[block of pixels, program, part, target, (field, column)]``.
    """
    fields = sum(parts)
    names = [f"t{n}" for n in range(2 * layout.batch)]
    arguments = "x, largest, out, pixels, fields, height, width, programs"
    arguments += ", x_image, x_channel, x_line, x_dot"
    with write.function("pack", arguments, "BP", "pixels fields height width programs"):
        write(f"""
            BF: tl.constexpr = {FIELDS}
            TARGETS: tl.constexpr = {layout.batch}
            pixel = tl.program_id(0) * BP + tl.arange(0, BP)
            field = tl.program_id(1) * BF + tl.arange(0, BF)
            inside = pixel < pixels
            row = pixel // width
            dot = pixel - row * width
            image = row // height
            line = row - image * height
            base = image.to(tl.int64) * x_image + line * x_line + dot * x_dot
            factor = two_to({HEADROOM} - exponent(tl.load(largest)))
        """)
        _transformed(write, layout, layout.output_analysis)
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


_GRID = "pixels, height, width, down, dilation, pitch, image_pitch, grid_size"
_GENERAL = "pixels height width pitch image_pitch grid_size"


def _common(write: Writer, layout: Scheme, fields: int) -> None:
    """What all tiles of a program have in common."""
    write(f"""
        BF: tl.constexpr = {fields}
        SC: tl.constexpr = {layout.width}
        TARGETS: tl.constexpr = {layout.batch}
        row = pitch * dilation * (BF * SC)
        column = dilation * (BF * SC)
        target = tl.arange(0, TARGETS)[:, None, None]
    """)


def _pixels(write: Writer, layout: Scheme) -> None:
    """Which pixels a tile holds and where their centre taps lie."""
    reach = layout.plan.basis.size // 2
    write(f"""
        inside = pixel < pixels
        p = tl.where(inside, pixel, 0)
        image = p // (height * width)
        line = (p - image * (height * width)) // width
        dot = p % width
        offset = image * image_pitch + line * down * pitch + dot * down
        offset += {reach} * (pitch + 1) * dilation
        here = offset[{_PIXEL}, None] * BF + tl.arange(0, BF)[{_FIELD}, None]
        here = here * SC + tl.arange(0, SC)[None, None, :]
    """)


def _forward(write: Writer, layout: Scheme, parts: tuple[int, ...]) -> None:
    """A layer: features of a tile of pixels, products with the weights, channels of the output.

    Products of equal shape are one batched product, and each warp makes some of the batch.
    """
    arguments = f"x, w, y, x_largest, w_largest, {_GRID}, chunks, programs, out_fields"
    arguments += ", y_image, y_channel, y_line, y_dot"
    columns = 2 * layout.batch * sum(parts)
    with write.function("forward", arguments, "BP PRECISION", f"{_GENERAL} chunks out_fields"):
        _common(write, layout, FIELDS)
        write("pixel = tl.program_id(0) * BP + tl.arange(0, BP)")
        _pixels(write, layout)
        for part, size in enumerate(parts):
            write(f"a{part} = tl.zeros([TARGETS, BP, {2 * size}], tl.float32)")
        write(f"rows = {layout.chunks * columns} * chunks * programs")
        for chunk in range(layout.chunks):
            write(f"source = x + {chunk} * grid_size.to(tl.int64) * (BF * SC)")
            with write.block("for chunk in tl.range(0, chunks, num_stages=1):"):
                _found_features(write, layout, chunk)
                write(f"first = ({chunk} * chunks + chunk) * programs + tl.program_id(1)")
                write(f"first = first * {columns}")
                start = 0
                for number, size in enumerate(layout.pieces):
                    write(f"k = tl.arange(0, BF * {size})[None, :, None]")
                    done = 0
                    for part, wide in enumerate(parts):
                        write(f"""
                            n = tl.arange(0, {2 * wide})[None, None, :]
                            where = first + {done} + target * {2 * wide} + n
                            where = {start} * BF * rows + where * (BF * {size}) + k
                            v = tl.load(w + where)
                            a{part} = tl.dot(z{number}, v, a{part}, input_precision=PRECISION)
                        """)
                        done += 2 * wide * layout.batch
                    start += size
                write(f"source += grid_size.to(tl.int64) * (BF * SC * {layout.chunks})")
        _channels(write, layout, parts)


def _channels(write: Writer, layout: Scheme, parts: tuple[int, ...]) -> None:
    """From sums to channels of the output."""
    channels = layout.plan.synthesis.shape[0]
    padded = power_of_two(channels)
    write(f"""
        owner = tl.minimum(pixel, pixels - 1) // (height * width)
        power = exponent(tl.load(x_largest + owner)) + exponent(tl.load(w_largest))
        scale = two_to(power - {2 * HEADROOM})[:, None, None]
        base = image.to(tl.int64) * y_image + line * y_line + dot * y_dot
        element = tl.arange(0, {padded})[None, None, :]
    """)
    outputs = [f"y{c if c < channels else 0}" for c in range(padded)]
    for part, size in enumerate(parts):
        # [target, pixel, (field, column)] → [pixel, field, (target, column)]
        write(f"""
            s = tl.trans(tl.reshape(a{part}, [TARGETS, BP, {size}, 2]), (1, 2, 0, 3))
            s = tl.reshape(s, [BP, {size}, {twos(2 * layout.batch)}])
        """)
        write.split("s", [f"s{n}" if n >= 0 else None for n in layout.slots])
        transform_back(write, layout.plan.synthesis)
        write(f"""
            o = tl.program_id(1) * {sum(parts)} + {sum(parts[:part])} + tl.arange(0, {size})
            found = tl.reshape({write.joined(outputs)}, [BP, {size}, {padded}])
            known = (o < out_fields)[None, :, None] & (element < {channels})
            where = base[:, None, None] + (o[None, :, None] * {channels} + element) * y_channel
            found = (found * scale).to(y.dtype.element_ty)
            tl.store(y + where, found, mask=inside[:, None, None] & known)
        """)


def _weight_gradient(write: Writer, layout: Scheme, parts: tuple[int, ...], fields: int) -> None:
    """The gradient to the weights: features of the input against the output's gradient."""
    arguments = f"x, g, numbers, partial, x_largest, g_largest, {_GRID}, tiles, programs"
    arguments += ", in_padded, out_padded, again"
    general = f"{_GENERAL} tiles in_padded again"
    columns = 2 * layout.batch * sum(parts)
    with write.function("weight_gradient", arguments, "BP PRECISION COUNT", general):
        _common(write, layout, fields)
        write(f"""
            i = tl.program_id(0) * BF
            split = tl.program_id(2)
            power = exponent(tl.load(x_largest)) + exponent(tl.load(g_largest))
            scale = two_to(power - {2 * HEADROOM})
            into = partial + split.to(tl.int64) * in_padded * out_padded * (2 * COUNT)
            source = x + i.to(tl.int64) * grid_size * (SC * {layout.chunks})
        """)
        for chunk in range(layout.chunks):
            for part, wide in enumerate(parts):
                for number, size in enumerate(layout.pieces):
                    shape = f"[TARGETS, {2 * wide}, BF * {size}]"
                    write(f"a{part}_{number} = tl.zeros({shape}, tl.float32)")
            loop = "for tile in tl.range(split, tiles, tl.num_programs(2), num_stages=1):"
            with write.block(loop):
                write("pixel = tile * BP + tl.arange(0, BP)")
                _pixels(write, layout)
                _found_features(write, layout, chunk)
                write(f"first = (tile * programs + tl.program_id(1).to(tl.int64)) * {columns}")
                done = 0
                for part, wide in enumerate(parts):
                    write(f"""
                        n = tl.arange(0, {2 * wide})[None, :, None]
                        where = (first + {done} + target * {2 * wide} + n) * BP
                        h = tl.load(g + where + tl.arange(0, BP)[None, None, :])
                    """)
                    for number in range(len(layout.pieces)):
                        total = f"a{part}_{number}"
                        product = f"tl.dot(h, z{number}, {total}, input_precision=PRECISION)"
                        write(f"{total} = {product}")
                    done += 2 * wide * layout.batch
            write("source += grid_size.to(tl.int64) * (BF * SC)")
            _store_sums(write, layout, parts, chunk)


def _store_sums(write: Writer, layout: Scheme, parts: tuple[int, ...], chunk: int) -> None:
    """A program adds its sums to those that it found in the images before these."""
    start = chunk * layout.length
    for number, size in enumerate(layout.pieces):
        write(f"""
            feature = tl.arange(0, BF * {size})[None, None, :]
            which = tl.load(numbers + target * {layout.inner} + {start} + feature % {size})
        """)
        start += size
        for part, wide in enumerate(parts):
            write(f"""
                out = 2 * (tl.program_id(1) * {sum(parts)} + {sum(parts[:part])})
                out += tl.arange(0, {2 * wide})[None, :, None]
                at = ((i + feature // {size}) * COUNT + which) * (out_padded * 2) + out
                known = (which >= 0) & (out >= 0)
                old = tl.load(into + at, mask=known & (again > 0), other=0.0)
                tl.store(into + at, a{part}_{number} * scale + old, mask=known)
            """)


def convolution_source(layout: Scheme, parts: tuple[int, ...], f16x2: bool) -> str:
    """The kernels ``analyse``, ``analyse_activated`` and ``forward`` of a plan's layer.

    One program gives ``sum(parts)`` output fields; parts are powers of two, at least `FIELDS`.
    ``f16x2`` is for float16, and not for the interpreter.
    """
    write = Writer("tl", f16x2)
    _analyse(write, layout)
    for chunk in range(layout.chunks):
        _features(write, layout, chunk)
    _forward(write, layout, parts)
    return write.text()


def weight_gradient_source(layout: Scheme, parts: tuple[int, ...], fields: int, f16x2: bool) -> str:
    """The kernels of the gradient to the weights: ``analyse``, ``pack``, ``weight_gradient``.

    As in `convolution_source`, for so many input fields of a program.
    """
    write = Writer("tl", f16x2)
    _analyse(write, layout, fields)
    _pack(write, layout, parts)
    for chunk in range(layout.chunks):
        _features(write, layout, chunk)
    _weight_gradient(write, layout, parts, fields)
    return write.text()
