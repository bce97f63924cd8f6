"""Generates the source of the warp-specialised kernels, in Gluon, for Hopper GPUs.

Producer warps differentiate (see `schedule`) while consumer warps multiply. Features pass from the
former to the latter through stages in shared memory, and the copy engine brings the other factor.
Consumers fetch features into registers, once for all columns.
A program is persistent: it takes one tile of pixels after the other, and makes the features of the
next tile while it writes the channels of the last.

The memory layout is that of `econv.engines.spectral.triton.scheme`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from econv.engines.spectral.hopper.schedule import (
    BOX,
    ROWS,
    differentiate_function,
    produce,
    produce_for_weights,
    weight_gradient_features,
)
from econv.engines.spectral.triton.scheme import FIELDS, HEADROOM, Scheme
from econv.engines.spectral.triton.writer import Writer, transform_back, twos
from econv.gpu.sizes import power_of_two

_GRID = "pixels, height, width, down, dilation, pitch, image_pitch, grid_size"
_GENERAL = "pixels height width pitch image_pitch grid_size tiles programs"
_AHEAD = 32  # registers of a thread for sums that are being loaded, about: those of 32 fields


def convolution_source(layout: Scheme, parts: tuple[int, ...], partitions: int) -> str:
    """The kernel ``forward`` of a plan's layer, on float16 spectra, to outputs channels-last.

    One program gives ``sum(parts)`` output fields, each of the parts a power of two.
    """
    write, pieces = Writer("gl"), layout.used_pieces
    for chunk in range(layout.chunks):
        differentiate_function(write, layout, chunk, pieces, FIELDS)
    return _kernel(
        *(write, layout, parts, pieces, partitions, "forward", "y, x_largest, w_largest"),
        *("chunks, tiles, programs, out_fields, y_dot", "chunks out_fields", ""),
        lambda: produce(write, layout, pieces),
        lambda weights: _consume(write, layout, parts, pieces, weights),
    )


def weight_gradient_source(
    layout: Scheme, parts: tuple[int, ...], chunk: int, partitions: int
) -> str:
    """The kernel ``weight_gradient``: the gradient to the weights of one chunk of slots.

    Rows of its products are the features of `ROWS` // `weight_gradient_features` fields, columns
    those of ``sum(parts)`` output fields, and the inner dimension are pixels.
    """
    write, features = Writer("gl"), weight_gradient_features(layout)
    differentiate_function(write, layout, chunk, (features,), ROWS // features)

    def consume(weights: str) -> None:
        _accumulate(write, layout, parts, weights)
        _store_sums(write, layout, parts, chunk, features)

    pieces, name = (ROWS // FIELDS,), "weight_gradient"
    return _kernel(
        *(write, layout, parts, pieces, partitions, name, "partial, x_largest, g_largest"),
        *("tiles, programs, in_padded, out_padded, again", "in_padded again", "READY COUNT"),
        lambda: produce_for_weights(write, layout, chunk),
        consume,
    )


def _kernel(
    write: Writer,
    layout: Scheme,
    parts: Sequence[int],
    pieces: Sequence[int],
    partitions: int,
    name: str,
    results: str,
    last: str,
    general: str,
    constants: str,
    produce: Callable[[], None],
    consume: Callable[[str], None],
) -> str:
    """A kernel of consumers and producers that run at the same time, with what each is given."""
    shape = "" if constants else "pixels, height, width, "
    copies = "READY" if constants else "STAGES"
    names = [f"w{number}_{part}" for number in range(len(pieces)) for part in range(len(parts))]
    weights = ", ".join(f"{one}_in, {one}" for one in names)
    features = ", ".join(f"z{number}" for number in range(len(pieces)))
    produced = f"{_GRID}, {last.partition('tiles')[0]}tiles"
    each = "BP WARPS STAGES PARTITION PARTITIONS"
    with write.function("produce", f"x, full, empty, {features}, {produced}", each):
        produce()
    with write.function("issue", f"{weights}, ready, stage, block, wanted, programs"):
        _issue(write, layout, parts, pieces)
    consumed = f"{results}, full, empty, ready, {features}, {weights}, {shape}{last}"
    with write.function("consume", consumed, f"BP WARPS STAGES {constants}"):
        consume(weights)
    arguments = ", ".join(["x", *(f"{one}_in" for one in names), results, _GRID, last])
    given = f"BP PRODUCERS REGISTERS STAGES {constants}"
    with write.function(name, arguments, given, f"{_GENERAL} {general}"):
        _memory(write, layout, parts, pieces, copies)
        write("BARRIER: gl.constexpr = mbarrier.MBarrierLayout()")
        # Full when all partitions have said so, and empty or ready when one thread has.
        lengths = {"full": "STAGES", "empty": "STAGES", "ready": copies}
        for barrier, length in lengths.items():
            count = partitions if barrier == "full" else 1
            write(f"""
                {barrier} = gl.allocate_shared_memory(gl.int64, [{length}, 1], BARRIER)
                for stage in gl.static_range({length}):
                    mbarrier.init({barrier}.index(stage), count={count})
            """)
        write("fence_async_shared()")
        write("thread_barrier()")
        for number in range(partitions):
            write(f"T{number}: gl.constexpr = {number}")
        write("gl.warp_specialize([")
        more = ", ".join(["BP", "gl.num_warps()", "STAGES", *constants.split()])
        write(f"    (consume, ({consumed}, {more})),")
        words = ", ".join(f"z{number}_words" for number in range(len(pieces)))
        warps = f"PRODUCERS // {partitions}"
        for number in range(partitions):
            more = f"BP // {partitions}, {warps}, STAGES, T{number}, {partitions}"
            write(f"    (produce, (x, full, empty, {words}, {produced}, {more})),")
        lists = (", ".join([one] * partitions) for one in (warps, "REGISTERS"))
        write("], [{}], [{}])".format(*lists))
    return write.text()


def _issue(write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int]) -> None:
    """The rows of one block are copied to a stage."""
    columns = 2 * sum(parts) * layout.batch
    write(f"""
        mbarrier.expect(ready.index(stage), {2 * columns * FIELDS * sum(pieces)}, pred=wanted)
        first = (block * programs + gl.program_id(1)) * {columns}
    """)
    for number in range(len(pieces)):
        for part, size in enumerate(parts):
            name, rows = f"w{number}_{part}", 2 * size * layout.batch
            done = 2 * sum(parts[:part]) * layout.batch
            for start in range(0, rows, BOX):
                into = f"{name}.index(stage)"
                if rows > BOX:
                    into += f".slice({start}, {BOX}, dim=0)"
                where = f"{name}_in, [first + {done + start}, 0], ready.index(stage), {into}"
                write(f"tma.async_copy_global_to_shared({where}, pred=wanted)")


def _memory(
    write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int], copies: str
) -> None:
    """Shared memory: features, as float16 and as words, and so many stages of what is copied."""
    for number, size in enumerate(pieces):
        inner, name = FIELDS * size, f"z{number}"
        for kind, bits, rank in (("H", 16, 2), ("W", 32, 3)):
            swizzled = f"gl.NVMMASharedLayout({min(128, 2 * inner)}, {bits}, rank={rank})"
            write(f"{kind}{number}: gl.constexpr = {swizzled}")
        shape, words = f"{layout.batch} * BP, {inner}", f"{layout.batch}, BP, {inner // 2}"
        write(f"""
            {name} = gl.allocate_shared_memory(gl.float16, [STAGES, {shape}], H{number})
            {name}_words = {name}._reinterpret(gl.int32, [STAGES, {words}], W{number})
        """)
        for part, fields in enumerate(parts):
            name = f"w{number}_{part}"
            shape = f"[{copies}, {layout.batch * 2 * fields}, {inner}]"
            write(f"{name} = gl.allocate_shared_memory(gl.float16, {shape}, {name}_in.layout)")


def _zeros(write: Writer, layout: Scheme, parts: Sequence[int], rows: str) -> None:
    for target in range(layout.batch):
        for part, size in enumerate(parts):
            shape = f"[{rows}, {2 * size}]"
            write(f"a{target}_{part} = gl.zeros({shape}, gl.float32, layout=SUMS{part})")


def _sum_layouts(write: Writer, parts: Sequence[int]) -> None:
    """How threads hold the sums of products."""
    for part, size in enumerate(parts):
        layout = f"gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, {2 * size}, 16])"
        write(f"SUMS{part}: gl.constexpr = {layout}")


def _products(
    write: Writer,
    layout: Scheme,
    parts: Sequence[int],
    stage: str,
    rows: str,
    pieces: Sequence[int],
) -> None:
    """Products are added to the sums, each of features and of what was copied to a stage.

    Features go into registers, once for all columns, while the products before run. ``rows`` says
    where those of a piece and a target lie.
    """
    factors = list(itertools.product(pieces, range(layout.batch)))

    def fetch(index: int) -> None:
        features = rows.format(*factors[index])
        write(f"f{index} = {features}.load(gl.DotOperandLayout(0, SUMS0, 2))")

    def wait(targets: Iterable[int], running: int) -> None:
        names = ", ".join(f"a{t}_{part}" for t in targets for part in range(len(parts)))
        write(f"{names} = warpgroup_mma_wait({running}, deps=[{names}])")

    fetch(0)
    for index, (number, target) in enumerate(factors):
        if index + 1 < len(factors):
            fetch(index + 1)
        for part, size in enumerate(parts):
            one, name = f"f{index}", f"a{target}_{part}"
            if part:
                held = f"gl.DotOperandLayout(0, SUMS{part}, 2)"
                one = f"gl.convert_layout({one}, {held}, assert_trivial=True)"
            two = f"w{number}_{part}.index({stage}).slice({target * 2 * size}, {2 * size}, dim=0)"
            write(f"{name} = warpgroup_mma({one}, {two}.permute((1, 0)), {name}, is_async=True)")
        if index and layout.batch > 1:
            # Not the last products, but those before them: their registers are free.
            wait([factors[index - 1][1]], len(parts))
    wait(range(layout.batch), 0)


def _consume(
    write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int], weights: str
) -> None:
    """The products of one tile after the other, and its outputs."""
    _sum_layouts(write, parts)
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
        _zeros(write, layout, parts, "BP")
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
                _products(write, layout, parts, "stage", rows, there)
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
        if layout.half and not layout.before:
            outputs = [f"s{slot if slot >= 0 else layout.slots[0]}" for slot in layout.slots]
            divided += _larger(layout)
        else:
            transform_back(write, layout.plan.synthesis)
            outputs = [f"y{c}" for c in range(channels)]
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
    _sum_layouts(write, parts)
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
    _zeros(write, layout, parts, f"{ROWS}")
    write("step = 0")
    write("block = 0")
    with write.block("for tile in range(split, tiles, splits):"):
        write("stage = step % STAGES")
        write("mbarrier.wait(full.index(stage), step // STAGES & 1)")
        with write.block("for sub in gl.static_range(SUBS):"):
            write("copied = block % READY")
            write("mbarrier.wait(ready.index(copied), block // READY & 1)")
            rows = f"z{{}}.index(stage).slice({{}} * BP + sub * {ROWS}, {ROWS}, dim=0)"
            _products(write, layout, parts, "copied", f"{rows}.permute((1, 0))", [0])
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
