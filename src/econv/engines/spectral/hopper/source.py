"""Generates the source of the warp-specialised kernels, in Gluon, for Hopper GPUs.

Producer warps differentiate while consumer warps multiply. Features pass from the former to the
latter through stages in shared memory. Consumers fetch them into registers, once for all columns.
A program is persistent: it takes one tile of pixels after the other, and makes the features of the
next tile while it writes the channels of the last.

The memory layout is that of `econv.engines.spectral.triton.scheme`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from econv.engines.spectral.hopper.schedule import (
    ROWS,
    awaited,
    barriers,
    differentiate_function,
    early_taps,
    issue_function,
    load_taps,
    pipeline_step,
    products,
    specialise,
    sum_layouts,
    thread_layouts,
    tile_offsets,
    weight_gradient_features,
    weight_names,
    zeros,
)
from econv.engines.spectral.triton.scheme import FIELDS, HEADROOM, Scheme, power_of_two
from econv.engines.spectral.triton.writer import Writer, transform_back, twos

_GRID = "pixels, height, width, down, dilation, pitch, image_pitch, grid_size"
_GENERAL = "pixels height width pitch image_pitch grid_size tiles programs"
_AHEAD = 32  # registers of a thread for sums that are being loaded, about: those of 32 fields


def convolution_source(layout: Scheme, parts: tuple[int, ...], partitions: int) -> str:
    """The kernel ``forward`` of a plan's layer, on float16 spectra, to outputs channels-last.

    One program gives ``sum(parts)`` output fields, each of the parts a power of two.
    """
    pieces = layout.used_pieces
    write = Writer("gl")
    for chunk in range(layout.chunks):
        differentiate_function(write, layout, chunk, pieces, FIELDS)
    features = ", ".join(f"z{n}" for n in range(len(pieces)))
    constants = "BP WARPS STAGES PARTITION PARTITIONS"
    with write.function(
        "produce", f"x, full, empty, {features}, {_GRID}, chunks, tiles", constants
    ):
        _produce(write, layout, pieces)
    issue_function(write, layout, parts, pieces)
    weights = ", ".join(f"{n}_in, {n}" for n in weight_names(parts, pieces))
    consumed = f"y, x_largest, w_largest, full, empty, ready, {features}, {weights}"
    last = "tiles, programs, out_fields, y_dot"
    consumed += f", pixels, height, width, chunks, {last}"
    with write.function("consume", consumed, "BP WARPS STAGES"):
        _consume(write, layout, parts, pieces, weights)
    copied = ", ".join(f"{n}_in" for n in weight_names(parts, pieces))
    arguments = f"x, {copied}, y, x_largest, w_largest, {_GRID}, chunks, {last}"
    general, constants = f"{_GENERAL} chunks out_fields", "BP PRODUCERS REGISTERS STAGES"
    with write.function("forward", arguments, constants, general):
        _memory(write, layout, parts, pieces, "STAGES")
        barriers(write, partitions, full="STAGES", empty="STAGES", ready="STAGES")
        words = ", ".join(f"z{n}_words" for n in range(len(pieces)))
        produced = f"x, full, empty, {words}, {_GRID}, chunks, tiles"
        specialise(write, partitions, f"{consumed}, BP, gl.num_warps(), STAGES", produced)
    return write.text()


def weight_gradient_source(
    layout: Scheme, parts: tuple[int, ...], chunk: int, partitions: int
) -> str:
    """The kernel ``weight_gradient``: the gradient to the weights of one chunk of slots.

    Rows of its products are the features of `ROWS` // `weight_gradient_features` fields, columns
    those of ``sum(parts)`` output fields, and the inner dimension are pixels.
    """
    features, piece = weight_gradient_features(layout), (ROWS // FIELDS,)
    fields = ROWS // features
    write = Writer("gl")
    differentiate_function(write, layout, chunk, (features,), fields)
    constants = "BP WARPS STAGES PARTITION PARTITIONS"
    with write.function("produce", f"x, full, empty, z0, {_GRID}, tiles", constants):
        thread_layouts(write, layout, fields)
        write(f"source = (gl.program_id(0) * {layout.chunks} + {chunk}) * grid_size.to(gl.int64)")
        write(f"source = x + source * {fields * layout.width // 2}")
        tile_offsets(write, layout, fields, "gl.program_id(2)", "here")
        load_taps(write, fields, layout.width // 2, "(source + here)", early_taps(layout))
        with write.block("for tile in range(gl.program_id(2), tiles, gl.num_programs(2)):"):
            tile_offsets(write, layout, fields, "(tile + gl.num_programs(2))", "later")
            pipeline_step(write, layout, chunk, (features,), "source", "later")
            write("here = later")
    issue_function(write, layout, parts, piece)
    weights = ", ".join(f"{n}_in, {n}" for n in weight_names(parts, piece))
    last = "tiles, programs, in_padded, out_padded, again"
    consumed = f"partial, x_largest, g_largest, full, empty, ready, z0, {weights}, {last}"
    with write.function("consume", consumed, "BP WARPS STAGES READY COUNT"):
        _accumulate(write, layout, parts, weights)
        _store_sums(write, layout, parts, chunk, features)
    copied = ", ".join(f"{n}_in" for n in weight_names(parts, piece))
    arguments = f"x, {copied}, partial, x_largest, g_largest, {_GRID}, {last}"
    general, constants = f"{_GENERAL} in_padded again", "BP PRODUCERS REGISTERS STAGES READY COUNT"
    with write.function("weight_gradient", arguments, constants, general):
        _memory(write, layout, parts, piece, "READY")
        barriers(write, partitions, full="STAGES", empty="STAGES", ready="READY")
        produced = f"x, full, empty, z0_words, {_GRID}, tiles"
        consumed += ", BP, gl.num_warps(), STAGES, READY, COUNT"
        specialise(write, partitions, consumed, produced)
    return write.text()


def _memory(
    write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int], copies: str
) -> None:
    """Shared memory: features, as float16 and as words, and so many stages of what is copied."""
    for number, size in enumerate(pieces):
        inner = FIELDS * size
        swizzle = min(128, 2 * inner)
        name, shape = f"z{number}", f"[STAGES, {layout.batch} * BP, {inner}]"
        words = f"[STAGES, {layout.batch}, BP, {inner // 2}]"
        write(f"""
            H{number}: gl.constexpr = gl.NVMMASharedLayout({swizzle}, 16, rank=2)
            W{number}: gl.constexpr = gl.NVMMASharedLayout({swizzle}, 32, rank=3)
            {name} = gl.allocate_shared_memory(gl.float16, {shape}, H{number})
            {name}_words = {name}._reinterpret(gl.int32, {words}, W{number})
        """)
        for part, fields in enumerate(parts):
            name = f"w{number}_{part}"
            shape = f"[{copies}, {layout.batch * 2 * fields}, {inner}]"
            write(f"{name} = gl.allocate_shared_memory(gl.float16, {shape}, {name}_in.layout)")


def _produce(write: Writer, layout: Scheme, pieces: Sequence[int]) -> None:
    """Features of one tile after the other, of all its fields for one chunk of slots at a time."""
    thread_layouts(write, layout, FIELDS)
    tile_offsets(write, layout, FIELDS, "gl.program_id(0)", "here")
    write(f"each = grid_size.to(gl.int64) * {FIELDS * layout.width // 2}")
    write("source = x")
    load_taps(write, FIELDS, layout.width // 2, "(x + here)", early_taps(layout))
    with write.block("for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):"):
        tile_offsets(write, layout, FIELDS, "(tile + gl.num_programs(0))", "later")
        for chunk in range(layout.chunks):
            write(f"source = x + {chunk} * each")
            with write.block("for chunk in range(0, chunks):"):
                after = (chunk + 1) % layout.chunks
                write("last = chunk + 1 == chunks")
                write(f"chunk_after = (chunk + 1) * {layout.chunks}")
                write(f"ahead = gl.where(last, {after}, chunk_after + {chunk}) * each")
                where = "here" if after else "gl.where(last, later, here)"
                pipeline_step(write, layout, chunk, pieces, "x + ahead", where)
                write(f"source += {layout.chunks} * each")
        write("here = later")


def _consume(
    write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int], weights: str
) -> None:
    """The products of one tile after the other, and its outputs."""
    sum_layouts(write, parts)
    write(f"""
        steps = {layout.chunks} * chunks
        mine = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
        all_steps = mine * steps
        for early in gl.static_range(STAGES):
            issue({weights}, ready, early, early % steps, early < all_steps, programs)
        step = 0
        power_of_weights = exponent(gl.load(w_largest))
    """)
    with write.block("for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):"):
        # Loaded long before it is needed: what the pixels of the tile were scaled by.
        write("""
            pixel = tile * BP + gl.arange(0, BP, layout=gl.SliceLayout(1, SUMS0))
            owner = gl.minimum(pixel, pixels - 1) // (height * width)
            largest = gl.load(x_largest + owner)
        """)
        zeros(write, layout, parts, "BP")
        for there, run in itertools.groupby(
            range(layout.chunks), lambda chunk: layout.filled(chunk, pieces)
        ):
            # So many chunks of slots have features in these pieces.
            with write.block(f"for again in range(0, {len(list(run))} * chunks):"):
                write("""
                    stage = step % STAGES
                    phase = step // STAGES & 1
                    mbarrier.wait(ready.index(stage), phase)
                    mbarrier.wait(full.index(stage), phase)
                """)
                rows = "z{}.index(stage).slice({} * BP, BP, dim=0)"
                pairs = itertools.product(there, range(layout.batch))
                products(write, parts, "stage", [(n, t, rows.format(n, t)) for n, t in pairs])
                awaited(write, layout, parts)
                write(f"""
                    mbarrier.arrive(empty.index(stage), count=1)
                    later = step + STAGES
                    issue({weights}, ready, stage, later % steps, later < all_steps, programs)
                    step += 1
                """)
        _outputs(write, layout, parts)


def _larger(layout: Scheme) -> int:
    """By how many powers of two slots may be larger than the channels that they belong to.

    Those that wait in the output are divided by as much.
    """
    return math.ceil(math.log2(np.abs(layout.plan.analysis).sum(axis=1).max()))


def _outputs(write: Writer, layout: Scheme, parts: Sequence[int]) -> None:
    """The channels of a tile to the output; of the first half of a layer, its slots.

    Those wait where the channels of the same pixels and fields will be, for the second half.
    """
    channels = layout.plan.synthesis.shape[0]
    for part, size in enumerate(parts):
        # A thread holds both columns of a field, of every target.
        for target in range(layout.batch):
            write(f"s, o = gl.split(gl.reshape(a{target}_{part}, [BP, {size}, 2]))")
            for name, slot in zip("so", layout.slots[2 * target : 2 * target + 2], strict=True):
                if slot >= 0:
                    write(f"s{slot} = {name}")
        if layout.before:
            write(f"HELD{part}: gl.constexpr = s.type.layout")
            vector = min(len(layout.before), layout.vector)
            _output_offsets(write, f"WAITING{part}", ["s"] * vector, parts, part, channels)
            write(f"factor = two_to({2 * HEADROOM + _larger(layout)} - power)")
            for start in range(0, len(layout.before), vector):
                write(f"""
                    r = gl.load(into + {start}, mask=known, other=0.0).to(gl.float32)
                    r = r * factor[:, None, None]
                    r = gl.reshape(r, [BP, {size}, {twos(vector)}])
                """)
                slots = layout.before[start : start + vector]
                names = [f"s{slot}" if slot >= 0 else None for slot in slots]
                write.split("r", names)
                for name in filter(None, names):
                    write(f"{name} = gl.convert_layout({name}, HELD{part}, assert_trivial=True)")
        divided = 2 * HEADROOM
        if layout.complete:
            transform_back(write, layout.plan.synthesis)
            outputs = [f"y{c}" for c in range(channels)]
        else:
            outputs = [f"s{slot if slot >= 0 else layout.slots[0]}" for slot in layout.slots]
            divided += _larger(layout)
        vector = min(power_of_two(len(outputs)), layout.vector)
        outputs += outputs[:1] * (-len(outputs) % vector)
        _output_offsets(write, f"STORED{part}", outputs[:vector], parts, part, channels)
        write(f"scale = two_to(power - {divided})")
        for start in range(0, len(outputs), vector):
            found = _side_by_side(write, outputs[start : start + vector], size)
            write(f"found = ({found} * scale[:, None, None]).to(y.dtype.element_ty)")
            known = "known"
            if start + vector > channels:
                known += f" & (element < {channels - start})[None, None, :]"
            write(f"gl.store(into + {start}, found, mask={known})")


def _output_offsets(
    write: Writer, layout: str, names: Sequence[str], parts: Sequence[int], part: int, channels: int
) -> None:
    """Where in the output threads find what they hold, for each pixel and field of a part.

    ``names`` are neighbours there; the layout of such numbers gets the name ``layout``.
    """
    pixel, field, element = (
        f"gl.SliceLayout({one}, gl.SliceLayout({two}, {layout}))"
        for one, two in ((1, 2), (0, 2), (0, 1))
    )
    write(f"""
        found = {_side_by_side(write, names, parts[part])}
        {layout}: gl.constexpr = found.type.layout
        pixel = tile * BP + gl.arange(0, BP, layout={pixel})
        inside = pixel < pixels
        power = exponent(gl.convert_layout(largest, {pixel})) + power_of_weights
        o = gl.program_id(1) * {sum(parts)} + {sum(parts[:part])}
        o += gl.arange(0, {parts[part]}, layout={field})
        element = gl.arange(0, {len(names)}, layout={element})
        known = inside[:, None, None] & (o < out_fields)[None, :, None]
        channel = o[None, :, None] * {channels} + element[None, None, :]
        into = y + (pixel.to(gl.int64)[:, None, None] * y_dot + channel)
    """)


def _side_by_side(write: Writer, names: Sequence[str], size: int) -> str:
    """Numbers of every pixel and output field, along a last axis."""
    return f"gl.reshape({write.joined(names)}, [BP, {size}, {len(names)}])"


def _accumulate(write: Writer, layout: Scheme, parts: Sequence[int], weights: str) -> None:
    """The products of all tiles of a program, added up."""
    sum_layouts(write, parts)
    write(f"""
        SUBS: gl.constexpr = BP // {ROWS}
        split = gl.program_id(2)
        splits = gl.num_programs(2)
        blocks = (tiles - split + splits - 1) // splits * SUBS
    """)

    def issue(stage: str, block: str) -> None:
        number = f"(split + ({block}) // SUBS * splits) * SUBS + ({block}) % SUBS"
        write(f"issue({weights}, ready, {stage}, {number}, {block} < blocks, programs)")

    with write.block("for early in gl.static_range(READY):"):
        issue("early", "early")
    zeros(write, layout, parts, f"{ROWS}")
    write("step = 0")
    write("block = 0")
    with write.block("for tile in range(split, tiles, splits):"):
        write("stage = step % STAGES")
        write("mbarrier.wait(full.index(stage), step // STAGES & 1)")
        with write.block("for sub in gl.static_range(SUBS):"):
            write("copied = block % READY")
            write("mbarrier.wait(ready.index(copied), block // READY & 1)")
            rows = f"z0.index(stage).slice({{}} * BP + sub * {ROWS}, {ROWS}, dim=0).permute((1, 0))"
            targets = range(layout.batch)
            products(write, parts, "copied", [(0, t, rows.format(t)) for t in targets])
            awaited(write, layout, parts)
            write("later = block + READY")
            issue("copied", "later")
            write("block += 1")
        write("mbarrier.arrive(empty.index(stage), count=1)")
        write("step += 1")


def _store_sums(
    write: Writer, layout: Scheme, parts: Sequence[int], chunk: int, features: int
) -> None:
    """A program adds its sums to those that it found in the images before these."""
    start = chunk * layout.length
    numbers = layout.unpadded[:, start : start + layout.length]
    found = [row[row >= 0] for row in numbers]  # of each target, one after the other
    write(f"""
        power = exponent(gl.load(x_largest)) + exponent(gl.load(g_largest))
        scale = two_to(power - {2 * HEADROOM})
        into = partial + split.to(gl.int64) * in_padded * out_padded * (2 * COUNT)
    """)
    for part, size in enumerate(parts):
        write(f"""
            row = gl.arange(0, {ROWS}, layout=gl.SliceLayout(1, SUMS{part}))
            field = gl.program_id(0) * {ROWS // features} + row // {features}
            number = row % {features}
            out = gl.arange(0, {2 * size}, layout=gl.SliceLayout(0, SUMS{part}))
            out += 2 * (gl.program_id(1) * {sum(parts)} + {sum(parts[:part])})
            base = into + out[None, :]
        """)
        # Some old sums are loaded while those before them are written.
        ahead = max(1, _AHEAD // size)
        for target in range(layout.batch + ahead):
            if target < layout.batch and found[target].size:
                write(f"""
                    where = (field * COUNT + {found[target][0]} + number) * (out_padded * 2)
                    at{target} = base + where[:, None]
                    there{target} = (number < {found[target].size})[:, None]
                    old{target} = gl.load(at{target}, mask=there{target} & (again > 0), other=0.0)
                """)
            now = target - ahead
            if now >= 0 and found[now].size:
                write(f"gl.store(at{now}, a{now}_{part} * scale + old{now}, mask=there{now})")
