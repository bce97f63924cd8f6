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
    filled,
    issue_function,
    load_taps,
    pieces_of_a_chunk,
    pipeline_step,
    products,
    sum_layouts,
    thread_layouts,
    tile_offsets,
    used_pieces,
    weight_names,
    workers,
    zeros,
)
from econv.engines.spectral.triton.scheme import FIELDS, Scheme, power_of_two
from econv.engines.spectral.triton.source import (
    HEADROOM,
    Writer,
    joined,
    split_evenly,
    times_rows,
    twos,
)
from econv.fourier import butterflies

__all__ = ["convolution_source", "weight_gradient_features", "weight_gradient_source"]


def _produce(write: Writer, layout: Scheme, pieces: Sequence[int]) -> None:
    pixel_words = FIELDS * layout.width // 2
    names = ", ".join(f"z{n}" for n in range(len(pieces)))
    for chunk in range(layout.chunks):
        differentiate_function(write, layout, chunk, pieces, FIELDS)
    write("@gluon.jit")
    write(
        f"def produce(x, full, empty, {names}, pixels, height, width, down, dilation, pitch,\n"
        "            image_pitch, grid_size, chunks, tiles, BP: gl.constexpr,\n"
        "            WARPS: gl.constexpr, STAGES: gl.constexpr, PARTITION: gl.constexpr,\n"
        "            PARTITIONS: gl.constexpr):"
    )
    write.depth += 1
    thread_layouts(write, layout, FIELDS)
    tile_offsets(write, layout, FIELDS, "gl.program_id(0)", "here")
    write(f"each = grid_size.to(gl.int64) * {pixel_words}")
    write("source = x")
    load_taps(write, FIELDS, layout.width // 2, "(x + here)", early_taps(layout))
    write("for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):")
    write.depth += 1
    tile_offsets(write, layout, FIELDS, "(tile + gl.num_programs(0))", "later")
    for chunk in range(layout.chunks):
        write(f"source = x + {chunk} * each")
        write("for chunk in range(0, chunks):")
        write.depth += 1
        write("last = chunk + 1 == chunks")
        write(f"chunk_after = (chunk + 1) * {layout.chunks}")
        write(
            f"ahead = gl.where(last, {(chunk + 1) % layout.chunks}, chunk_after + {chunk}) * each"
        )
        where = "here" if chunk + 1 < layout.chunks else "gl.where(last, later, here)"
        pipeline_step(write, layout, chunk, pieces, "x + ahead", where)
        write(f"source += {layout.chunks} * each")
        write.depth -= 1
    write("here = later")
    write.depth -= 2
    write()


def _consume(write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int]) -> None:
    features = ", ".join(f"z{n}" for n in range(len(pieces)))
    weights = ", ".join(f"{n}_in, {n}" for n in weight_names(parts, pieces))
    write("@gluon.jit")
    write(
        f"def consume(y, x_largest, w_largest, full, empty, ready, {features}, {weights},\n"
        "            pixels, height, width, chunks, tiles, programs, out_fields, y_dot,\n"
        "            BP: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr):"
    )
    write.depth += 1
    sum_layouts(write, parts)
    write(f"steps = {layout.chunks} * chunks")
    write("mine = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)")
    write("all_steps = mine * steps")
    write("for early in gl.static_range(STAGES):")
    write(f"    issue({weights}, ready, early, early % steps, early < all_steps, programs)")
    write("step = 0")
    write("power_of_weights = exponent(gl.load(w_largest))")
    write("for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):")
    write.depth += 1
    # On its way long before it is needed: what the pixels of the tile were scaled by.
    write("pixel = tile * BP + gl.arange(0, BP, layout=gl.SliceLayout(1, SUMS0))")
    write("owner = gl.minimum(pixel, pixels - 1) // (height * width)")
    write("largest = gl.load(x_largest + owner)")
    zeros(write, layout, parts, "BP")
    for there, run in itertools.groupby(
        range(layout.chunks), lambda chunk: filled(layout, chunk, pieces)
    ):
        _multiply(write, layout, parts, there, len(list(run)), weights)
    _outputs(write, layout, parts)
    write.depth -= 2
    write()


def _multiply(
    write: Writer,
    layout: Scheme,
    parts: Sequence[int],
    pieces: Sequence[int],
    chunks: int,
    weights: str,
) -> None:
    """So many chunks of slots with features in these pieces, all fields of each."""
    write(f"for again in range(0, {chunks} * chunks):")
    write.depth += 1
    write("stage = step % STAGES")
    write("phase = step // STAGES & 1")
    write("mbarrier.wait(ready.index(stage), phase)")
    write("mbarrier.wait(full.index(stage), phase)")
    products(
        write,
        parts,
        "stage",
        [
            (number, target, f"z{number}.index(stage).slice({target} * BP, BP, dim=0)")
            for number in pieces
            for target in range(layout.batch)
        ],
    )
    awaited(write, layout, parts)
    write("mbarrier.arrive(empty.index(stage), count=1)")
    write("later = step + STAGES")
    write(f"issue({weights}, ready, stage, later % steps, later < all_steps, programs)")
    write("step += 1")
    write.depth -= 1


def _larger(layout: Scheme) -> int:
    """By how many powers of two slots may be larger than the channels that they belong to.

    Those that wait in the output are divided by as much.
    """
    return math.ceil(math.log2(np.abs(layout.plan.analysis).sum(axis=1).max()))


def _outputs(write: Writer, layout: Scheme, parts: Sequence[int]) -> None:
    """The channels of a tile to the output; of the first half of a layer, its slots.

    Those wait where the channels of the same pixels and fields will be, for the second half.
    """
    plan = layout.plan
    channels = plan.synthesis.shape[0]
    pairs, rest = butterflies(plan.synthesis.T)
    done = 0
    for part, size in enumerate(parts):
        # A thread holds both columns of a field, of every target.
        for target in range(layout.batch):
            one, two = layout.slots[2 * target : 2 * target + 2]
            write(f"s, o = gl.split(gl.reshape(a{target}_{part}, [BP, {size}, 2]))")
            for name, slot in (("s", one), ("o", two)):
                if slot >= 0:
                    write(f"s{slot} = {name}")
        if layout.before:
            write(f"HELD{part}: gl.constexpr = s.type.layout")
            vector = min(len(layout.before), layout.vector)
            _output_offsets(
                write, f"WAITING{part}", ["s"] * vector, size, channels, sum(parts), done
            )
            write(f"factor = two_to({2 * HEADROOM + _larger(layout)} - power)")
            for start in range(0, len(layout.before), vector):
                write(f"r = gl.load(into + {start}, mask=known, other=0.0).to(gl.float32)")
                write("r = r * factor[:, None, None]")
                write(f"r = gl.reshape(r, [BP, {size}, {twos(vector)}])")
                slots = layout.before[start : start + vector]
                names = [f"s{slot}" if slot >= 0 else None for slot in slots]
                split_evenly(write, "r", names, "gl")
                for name in filter(None, names):
                    write(f"{name} = gl.convert_layout({name}, HELD{part}, assert_trivial=True)")
        divided = 2 * HEADROOM
        if layout.complete:
            times_rows(write, rest.T, "s", "y")
            for a, b in reversed(pairs):
                write(f"y{a}, y{b} = y{a} + y{b}, y{a} - y{b}")
            outputs = [f"y{c}" for c in range(channels)]
        else:
            outputs = [f"s{slot if slot >= 0 else layout.slots[0]}" for slot in layout.slots]
            divided += _larger(layout)
        vector = min(power_of_two(len(outputs)), layout.vector)
        outputs += outputs[:1] * (-len(outputs) % vector)
        _output_offsets(write, f"LAID{part}", outputs[:vector], size, channels, sum(parts), done)
        write(f"scale = two_to(power - {divided})")
        for start in range(0, len(outputs), vector):
            found = _side_by_side(outputs[start : start + vector], size)
            write(f"found = ({found} * scale[:, None, None]).to(y.dtype.element_ty)")
            known = "known"
            if start + vector > channels:
                known += f" & (element < {channels - start})[None, None, :]"
            write(f"gl.store(into + {start}, found, mask={known})")
        done += size


def _output_offsets(
    write: Writer,
    layout: str,
    names: Sequence[str],
    size: int,
    channels: int,
    fields: int,
    done: int,
) -> None:
    """Where in the output threads find what they hold, for each pixel and field of a part.

    ``layout`` is what it is called how numbers lie that stand side by side there, as names do.
    """
    write(f"found = {_side_by_side(names, size)}")
    write(f"{layout}: gl.constexpr = found.type.layout")
    pixel, field, element = (
        f"gl.SliceLayout({one}, gl.SliceLayout({two}, {layout}))"
        for one, two in ((1, 2), (0, 2), (0, 1))
    )
    write(f"pixel = tile * BP + gl.arange(0, BP, layout={pixel})")
    write("inside = pixel < pixels")
    write(f"power = exponent(gl.convert_layout(largest, {pixel})) + power_of_weights")
    write(f"o = gl.program_id(1) * {fields} + {done}")
    write(f"o += gl.arange(0, {size}, layout={field})")
    write(f"element = gl.arange(0, {len(names)}, layout={element})")
    write("known = inside[:, None, None] & (o < out_fields)[None, :, None]")
    write(f"channel = o[None, :, None] * {channels} + element[None, None, :]")
    write("into = y + (pixel.to(gl.int64)[:, None, None] * y_dot + channel)")


def _side_by_side(names: Sequence[str], size: int) -> str:
    """Numbers of every pixel and output field, along a last axis."""
    return f"gl.reshape({joined(names, 'gl')}, [BP, {size}, {len(names)}])"


def weight_gradient_features(layout: Scheme) -> int:
    """Features of a field and target, padded, in the gradient to the weights."""
    pieces = pieces_of_a_chunk(layout)
    assert pieces is not None
    return max(ROWS // FIELDS, power_of_two(sum(pieces)))


_AHEAD = 32  # registers of a thread for what is on its way, about: those of 32 output fields


def _weight_gradient_consume(
    write: Writer, layout: Scheme, parts: Sequence[int], chunk: int, features: int
) -> None:
    start = sum(len(rows[0]) for rows in layout.lists[:chunk])
    numbers = layout.unpadded[:, start : start + len(layout.lists[chunk][0])]
    found = [row[row >= 0] for row in numbers]  # of each target, one after the other
    fields = ROWS // features
    weights = ", ".join(f"{n}_in, {n}" for n in weight_names(parts, (1,)))
    write("@gluon.jit")
    write(
        f"def consume(partial, x_largest, g_largest, full, empty, ready, z0, {weights}, tiles,\n"
        "            programs, in_padded, out_padded, again, BP: gl.constexpr,\n"
        "            WARPS: gl.constexpr, STAGES: gl.constexpr, READY: gl.constexpr,\n"
        "            COUNT: gl.constexpr):"
    )
    write.depth += 1
    sum_layouts(write, parts)
    write(f"SUBS: gl.constexpr = BP // {ROWS}")
    write("split = gl.program_id(2)")
    write("splits = gl.num_programs(2)")
    write("blocks = (tiles - split + splits - 1) // splits * SUBS")

    def issue(stage: str, block: str) -> None:
        number = f"(split + ({block}) // SUBS * splits) * SUBS + ({block}) % SUBS"
        write(f"issue({weights}, ready, {stage}, {number}, {block} < blocks, programs)")

    write("for early in gl.static_range(READY):")
    write.depth += 1
    issue("early", "early")
    write.depth -= 1
    zeros(write, layout, parts, f"{ROWS}")
    write("step = 0")
    write("block = 0")
    write("for tile in range(split, tiles, splits):")
    write.depth += 1
    write("stage = step % STAGES")
    write("mbarrier.wait(full.index(stage), step // STAGES & 1)")
    write("for sub in gl.static_range(SUBS):")
    write.depth += 1
    write("slot = block % READY")
    write("mbarrier.wait(ready.index(slot), block // READY & 1)")
    tile = f"slice({{}} * BP + sub * {ROWS}, {ROWS}, dim=0).permute((1, 0))"
    products(
        write,
        parts,
        "slot",
        [(0, target, f"z0.index(stage).{tile.format(target)}") for target in range(layout.batch)],
    )
    awaited(write, layout, parts)
    write("later = block + READY")
    issue("slot", "later")
    write("block += 1")
    write.depth -= 1
    write("mbarrier.arrive(empty.index(stage), count=1)")
    write("step += 1")
    write.depth -= 1
    write("power = exponent(gl.load(x_largest)) + exponent(gl.load(g_largest))")
    write(f"scale = two_to(power - {2 * HEADROOM})")
    write("into = partial + split.to(gl.int64) * in_padded * out_padded * (2 * COUNT)")
    done = 0
    for part, size in enumerate(parts):
        write(f"row = gl.arange(0, {ROWS}, layout=gl.SliceLayout(1, SUMS{part}))")
        write(f"field = gl.program_id(0) * {fields} + row // {features}")
        write(f"number = row % {features}")
        write(f"out = gl.arange(0, {2 * size}, layout=gl.SliceLayout(0, SUMS{part}))")
        write(f"out += 2 * (gl.program_id(1) * {sum(parts)} + {done})")
        write("base = into + out[None, :]")
        # A program adds to what it found in the images before these. More of that is on its way
        # while the first of it is written.
        ahead = max(1, _AHEAD // size)
        for target in range(layout.batch + ahead):
            if target < layout.batch and found[target].size:
                write(f"where = (field * COUNT + {found[target][0]} + number) * (out_padded * 2)")
                write(f"at{target} = base + where[:, None]")
                write(f"there{target} = (number < {found[target].size})[:, None]")
                before = f"there{target} & (again > 0)"
                write(f"old{target} = gl.load(at{target}, mask={before}, other=0.0)")
            now = target - ahead
            if now >= 0 and found[now].size:
                write(f"gl.store(at{now}, a{now}_{part} * scale + old{now}, mask=there{now})")
        done += size
    write.depth -= 1
    write()


def weight_gradient_source(
    layout: Scheme, parts: tuple[int, ...], chunk: int, partitions: int
) -> str:
    """The kernel ``weight_gradient``: the gradient to the weights of one chunk of slots.

    Rows of its products are the features of `ROWS` // `weight_gradient_features` fields, columns
    those of ``sum(parts)`` output fields, and the inner dimension are pixels.
    """
    features = weight_gradient_features(layout)
    fields = ROWS // features
    pixel_words = fields * layout.width // 2
    write = Writer(f16x2=True)
    differentiate_function(write, layout, chunk, (features,), fields)
    write("@gluon.jit")
    write(
        "def produce(x, full, empty, z0, pixels, height, width, down, dilation, pitch,\n"
        "            image_pitch, grid_size, tiles, BP: gl.constexpr, WARPS: gl.constexpr,\n"
        "            STAGES: gl.constexpr, PARTITION: gl.constexpr, PARTITIONS: gl.constexpr):"
    )
    write.depth += 1
    thread_layouts(write, layout, fields)
    write(f"source = (gl.program_id(0) * {layout.chunks} + {chunk}) * grid_size.to(gl.int64)")
    write(f"source = x + source * {pixel_words}")
    tile_offsets(write, layout, fields, "gl.program_id(2)", "here")
    load_taps(write, fields, layout.width // 2, "(source + here)", early_taps(layout))
    write("for tile in range(gl.program_id(2), tiles, gl.num_programs(2)):")
    write.depth += 1
    tile_offsets(write, layout, fields, "(tile + gl.num_programs(2))", "later")
    pipeline_step(write, layout, chunk, (features,), "source", "later")
    write("here = later")
    write.depth -= 2
    write()
    piece = (ROWS // FIELDS,)
    issue_function(write, layout, parts, piece)
    _weight_gradient_consume(write, layout, parts, chunk, features)
    names = weight_names(parts, piece)
    write(
        "@gluon.jit(do_not_specialize=['pixels', 'height', 'width', 'pitch', 'image_pitch',"
        " 'grid_size', 'tiles', 'programs', 'in_padded', 'again'])"
    )
    write(
        f"def weight_gradient(x, {', '.join(f'{n}_in' for n in names)}, partial, x_largest,\n"
        "         g_largest, pixels, height, width, down, dilation, pitch, image_pitch,\n"
        "         grid_size, tiles, programs, in_padded, out_padded, again, BP: gl.constexpr,\n"
        "         PRODUCERS: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr,\n"
        "         READY: gl.constexpr, COUNT: gl.constexpr):"
    )
    write.depth += 1
    write("HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)")
    write("WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=3)")
    shape = f"[STAGES, {layout.batch} * BP, {ROWS}]"
    write(f"z0 = gl.allocate_shared_memory(gl.float16, {shape}, HALVES)")
    shape = f"[STAGES, {layout.batch}, BP, {ROWS // 2}]"
    write(f"words = z0._reinterpret(gl.int32, {shape}, WORDS)")
    for part, size in enumerate(parts):
        shape = f"[READY, {layout.batch * 2 * size}, {ROWS}]"
        write(f"w0_{part} = gl.allocate_shared_memory(gl.float16, {shape}, HALVES)")
    barriers(write, partitions, full="STAGES", empty="STAGES", ready="READY")
    both = ", ".join(f"{n}_in, {n}" for n in names)
    write("gl.warp_specialize([")
    write(
        f"    (consume, (partial, x_largest, g_largest, full, empty, ready, z0, {both}, tiles,\n"
        "      programs, in_padded, out_padded, again, BP, gl.num_warps(), STAGES, READY, COUNT)),"
    )
    for partition in range(partitions):
        write(
            "    (produce, (x, full, empty, words, pixels, height, width, down, dilation, pitch,\n"
            f"      image_pitch, grid_size, tiles, BP // {partitions}, PRODUCERS // {partitions},\n"
            f"      STAGES, T{partition}, {partitions})),"
        )
    workers(write, partitions)
    write.depth -= 1
    return write.text()


def convolution_source(layout: Scheme, parts: tuple[int, ...], partitions: int) -> str:
    """The kernel ``forward`` of a plan's layer, on float16 spectra, to outputs channels-last.

    One program gives ``sum(parts)`` output fields, each of the parts a power of two.
    """
    pieces = used_pieces(layout)
    write = Writer(f16x2=True)
    _produce(write, layout, pieces)
    issue_function(write, layout, parts, pieces)
    _consume(write, layout, parts, pieces)
    names = weight_names(parts, pieces)
    weights = ", ".join(f"{n}_in" for n in names)
    write(
        "@gluon.jit(do_not_specialize=['pixels', 'height', 'width', 'pitch', 'image_pitch',"
        " 'grid_size', 'chunks', 'tiles', 'programs', 'out_fields'])"
    )
    write(
        f"def forward(x, {weights}, y, x_largest, w_largest, pixels, height, width, down,\n"
        "            dilation, pitch, image_pitch, grid_size, chunks, tiles, programs,\n"
        "            out_fields, y_dot, BP: gl.constexpr, PRODUCERS: gl.constexpr,\n"
        "            REGISTERS: gl.constexpr, STAGES: gl.constexpr):"
    )
    write.depth += 1
    batch = layout.batch
    held = []
    for number, size in enumerate(pieces):
        k = FIELDS * size
        swizzle = min(128, 2 * k)
        halves = f"gl.NVMMASharedLayout({swizzle}, 16, rank=2)"
        words = f"gl.NVMMASharedLayout({swizzle}, 32, rank=3)"
        write(f"H{number}: gl.constexpr = {halves}")
        write(f"W{number}: gl.constexpr = {words}")
        write(
            f"z{number} = gl.allocate_shared_memory(gl.float16, [STAGES, {batch} * BP, {k}],"
            f" H{number})"
        )
        write(
            f"z{number}_words = z{number}._reinterpret(gl.int32, [STAGES, {batch}, BP, {k // 2}],"
            f" W{number})"
        )
        for part, fields in enumerate(parts):
            name = f"w{number}_{part}"
            write(
                f"{name} = gl.allocate_shared_memory(gl.float16,"
                f" [STAGES, {batch * 2 * fields}, {k}], {name}_in.layout)"
            )
        held.append(f"z{number}")
    barriers(write, partitions, full="STAGES", empty="STAGES", ready="STAGES")
    both = ", ".join(f"{n}_in, {n}" for n in names)
    write("gl.warp_specialize([")
    write(
        f"    (consume, (y, x_largest, w_largest, full, empty, ready, {', '.join(held)}, {both},\n"
        "      pixels, height, width, chunks, tiles, programs, out_fields, y_dot, BP,\n"
        "      gl.num_warps(), STAGES)),"
    )
    for partition in range(partitions):
        write(
            f"    (produce, (x, full, empty, {', '.join(f'{n}_words' for n in held)}, pixels,\n"
            "      height, width, down, dilation, pitch, image_pitch, grid_size, chunks, tiles,\n"
            f"      BP // {partitions}, PRODUCERS // {partitions}, STAGES, T{partition},\n"
            f"      {partitions})),"
        )
    workers(write, partitions)
    write.depth -= 1
    return write.text()
