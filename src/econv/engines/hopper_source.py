"""A layer for Hopper GPUs, as source in Gluon, the part of Triton in which warps have roles.

Some warps differentiate and others multiply, at the same time: the former hand features to the
latter through shared memory, in stages that they fill and empty in turns. A program stays on its
processor and takes one tile of pixels after the other; while the channels of one are written, the
features of the next are made.

What a thread that differentiates owns is a pixel and a field with all slots of a chunk, two halves
in each word. How features follow from taps is said by `econv.engines.triton_scheme`, as for
`econv.engines.triton_source`, whose kernels run where these do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from econv.engines.triton_scheme import FIELDS, Scheme, power_of_two
from econv.engines.triton_source import (
    HEADROOM,
    Writer,
    joined,
    split_evenly,
    times_rows,
    twos,
)
from econv.fourier import butterflies

__all__ = [
    "ROWS",
    "gram_features",
    "hopper_gram_source",
    "hopper_source",
    "pieces_of_a_chunk",
    "rows_of_a_copy",
]

_BOX = 256  # rows of a matrix that one copy brings, at most


def rows_of_a_copy(layout: Scheme, part: int) -> int:
    """Rows of weights that are copied at once: all targets of a part, if that can be."""
    return min(_BOX, 2 * part * layout.batch)


def pieces_of_a_chunk(layout: Scheme) -> tuple[int, ...] | None:
    """The features of a target in each product of a slot chunk; nothing where chunks differ."""
    found = {
        tuple(size for owner, _, size, _ in layout.pieces if owner == chunk)
        for chunk in range(layout.chunks)
    }
    return found.pop() if len(found) == 1 else None


def _asm(code: str, *operands: str) -> str:
    registers = "=r" + ",r" * len(operands)
    return (
        f'gl.inline_asm_elementwise("{code}", "{registers}", [{", ".join(operands)}],'
        " dtype=gl.int32, is_pure=True, pack=1)"
    )


def _sum(one: str, other: str, sign: str = "+") -> str:
    return _asm(f"{'add' if sign == '+' else 'sub'}.f16x2 $0, $1, $2;", one, other)


def _scaled(one: str, low: float, high: float, other: str | None) -> str:
    """One times two numbers, plus the other."""
    bits = int(np.array([low, high], dtype=np.float16).view(np.uint32)[0])
    start = f"{{ .reg .b32 c; mov.b32 c, {bits:#x};"
    if other is None:
        return _asm(f"{start} mul.f16x2 $0, $1, c; }}", one)
    return _asm(f"{start} fma.rn.f16x2 $0, $1, c, $2; }}", one, other)


def _taps(write: Writer, fields: int, words: int, centre: str, names: dict[str, str]) -> None:
    """Load taps, each a name and its place from the centre, and take them apart into words."""
    for name, place in names.items():
        write(f"t = gl.load({centre}{place})")
        if words == 1:
            write(f"{name}0 = gl.convert_layout(gl.reshape(t, [{fields}, BP]), ITEMS)")
            continue
        parts = [f"{name}{word}" for word in range(words)]
        write(f"t = gl.reshape(t, [{fields}, BP, {twos(words)}])")
        split_evenly(write, "t", parts, "gl")
        for part in parts:
            write(f"{part} = gl.convert_layout({part}, ITEMS, assert_trivial=True)")


def _place(dy: int, dx: int) -> str:
    """Where a tap lies, seen from the centre. Rows run downwards, in the image as in a stencil."""
    return (f" + {dy} * row" if dy else "") + (f" + {dx} * column" if dx else "")


def _early(layout: Scheme) -> dict[str, str]:
    """The taps above and below the centre, which are loaded a turn ahead.

    They lie in all lines of the cache that the others do, but for those at the tile's sides: the
    others find them there.
    """
    reach = layout.coefficients.shape[-1] // 2
    return {f"e{dy % 9}_": _place(dy, 0) for dy in range(-reach, reach + 1)}


def _derivatives(write: Writer, layout: Scheme, fields: int) -> None:
    """Every derivative of every word: ``d{stencil}_{word}``, from the taps around ``centre``."""
    coefficients = layout.coefficients
    reach = coefficients.shape[-1] // 2
    words = layout.width // 2
    started: set[tuple[int, int]] = set()

    def add(name: str, word: int, i: int, j: int) -> None:
        for stencil in np.flatnonzero(coefficients[:, i, j]).tolist():
            value = float(coefficients[stencil, i, j])
            old = f"d{stencil}_{word}" if (stencil, word) in started else None
            started.add((stencil, word))
            write(f"d{stencil}_{word} = {_scaled(name, value, value, old)}")

    for dy in range(reach + 1):
        for dx in range(reach + 1):
            rows = (dy, reach + dy) if dy else (0,)
            columns = (dx, reach + dx) if dx else (0,)
            if not coefficients[:, rows][:, :, columns].any():
                continue
            names = {}
            for above, y in zip("pm", (dy, -dy)[: len(rows)], strict=False):
                for beside, x in zip("pm", (dx, -dx)[: len(columns)], strict=False):
                    if dx:
                        names[above + beside] = _place(y, x)
                    else:
                        for word in range(words):
                            write(f"{above}{beside}{word} = e{y % 9}_{word}")
            _taps(write, fields, words, "centre", names)
            for word in range(words):
                for sign, j in zip("+-", columns, strict=False):
                    if not coefficients[:, rows, j].any():
                        continue
                    for above in "pm"[: len(rows)]:
                        one = f"{above}p{word}"
                        if dx:
                            one = _sum(one, f"{above}m{word}", sign)
                        write(f"at_{above} = {one}")
                    for other, i in zip("+-", rows, strict=False):
                        if coefficients[:, i, j].any():
                            write(f"u = {_sum('at_p', 'at_m', other) if dy else 'at_p'}")
                            add("u", word, i, j)


class _Words:
    """Features two by two, written when they are first asked for."""

    def __init__(self, write: Writer, layout: Scheme) -> None:
        self.write, self.layout = write, layout
        self.taken: set[str] = set()

    def _halves(self, one: tuple[int, int, int], two: tuple[int, int, int]) -> str:
        """One half each of two derivatives, (stencil, word, side)."""
        a, b = (f"d{stencil}_{word}" for stencil, word, _ in (one, two))
        if a == b and (one[2], two[2]) == (0, 1):
            return a
        name = f"h{one[0]}_{one[1]}{one[2]}_{two[0]}_{two[1]}{two[2]}"
        if name not in self.taken:
            self.taken.add(name)
            low, high = 2 * one[2], 4 + 2 * two[2]
            selector = low | (low + 1) << 4 | high << 8 | (high + 1) << 12
            self.write(f"{name} = {_asm(f'prmt.b32 $0, $1, $2, {selector:#x};', a, b)}")
        return name

    def word(self, one: int, two: int) -> str:
        """Two features side by side."""
        name = f"f{one}_{two}"
        if name in self.taken:
            return name
        left, right = (
            [(*key, side, factor) for key, (side, factor) in self.layout.terms(feature).items()]
            for feature in (one, two)
        )
        if self.layout.alike(one, two):  # in one order, so that halves come from one derivative
            right.sort(key=lambda term: [t[:2] for t in left].index(term[:2]))
        found = None
        for n in range(max(len(left), len(right))):
            # What one of them does not have counts nothing.
            a = left[n] if n < len(left) else (*left[-1][:3], 0.0)
            b = right[n] if n < len(right) else (*right[-1][:3], 0.0)
            source = self._halves(a[:3], b[:3])
            if a[3] == b[3] == 1.0:
                found = source if found is None else _sum(found, source)
            else:
                found = _scaled(source, a[3], b[3], found)
        assert found is not None
        self.taken.add(name)
        self.write(f"{name} = {found}")
        return name


def _stored(
    write: Writer, layout: Scheme, chunk: int, pieces: Sequence[int], fields: int
) -> None:
    """The features of a slot chunk to their places in the stage."""
    words = _Words(write, layout)
    lists = layout.lists[chunk]
    spare = next(f for names in lists for f in names if f >= 0)
    first = 0
    for number, size in enumerate(pieces):
        columns = []
        for k in range(first, first + size, 2):
            column = []
            for names in lists:
                # Padding repeats features of the same target; their weights are zero.
                other = names[:2] if names[1] >= 0 else (spare, spare)
                one, two = (*names[k : k + 2], -1, -1)[:2]
                if one < 0:
                    one, two = other
                column.append(words.word(one, two if two >= 0 else one))
            columns.append(joined(column, "gl"))
        first += size
        # The inner axis is joined last, so that a thread holds neighbours along it.
        shape = f"[{fields}, BP, {layout.batch}, {size // 2}]"
        write(f"v = gl.reshape({joined(columns, 'gl')}, {shape})")
        write("v = gl.permute(v, (2, 1, 0, 3))")
        write(f"v{number} = gl.reshape(v, [{layout.batch}, BP, {fields * size // 2}])")
    write("mbarrier.wait(empty.index(stage), phase ^ 1)")
    for number in range(len(pieces)):
        write(f"z{number}.index(stage).slice(TEAM * BP, BP, dim=1).store(v{number})")


def _places(write: Writer, layout: Scheme, fields: int) -> None:
    """How threads lie, and what all tiles have in common."""
    words = layout.width // 2
    threads = f"[{fields}, {32 // fields}"
    write(f"ITEMS: gl.constexpr = gl.BlockedLayout([1, 1], {threads}], [1, WARPS], [0, 1])")
    write(
        f"VECTORS: gl.constexpr = gl.BlockedLayout([1, 1, {words}], {threads}, 1],"
        " [1, WARPS, 1], [2, 0, 1])"
    )
    write("PIXELS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, VECTORS))")
    write("OF_FIELDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, VECTORS))")
    write("OF_WORDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, VECTORS))")
    # In 64 bits what is constant in the place of a tap becomes part of the instruction.
    write(f"row = (pitch * dilation * {fields * words}).to(gl.int64)")
    write(f"column = dilation * {fields * words}")
    write(f"field = gl.arange(0, {fields}, layout=OF_FIELDS)")
    write(f"word = gl.arange(0, {words}, layout=OF_WORDS)")
    write("turn = 0")


def _tile(write: Writer, layout: Scheme, fields: int, tile: str, result: str) -> None:
    """Where the centre taps of a tile lie; of the last one, if there are no more."""
    words = layout.width // 2
    reach = layout.coefficients.shape[-1] // 2
    write(f"pixel = ({tile} * TEAMS + TEAM) * BP + gl.arange(0, BP, layout=PIXELS)")
    write("p = gl.where(pixel < pixels, pixel, 0)")
    write("image = p // (height * width)")
    write("line = (p - image * (height * width)) // width")
    write("dot = p % width")
    write("place = image * image_pitch + line * down * pitch + dot * down")
    write(f"place += {reach} * (pitch + 1) * dilation")
    write(f"{result} = place[None, :, None] * {fields * words} + field[:, None, None] * {words}")
    write(f"{result} = {result} + word[None, None, :]")


def _turn(
    write: Writer, layout: Scheme, chunk: int, pieces: Sequence[int], fields: int, upcoming: str
) -> None:
    """The features of a tile and a chunk of slots, handed over.

    ``upcoming``: where the centre taps of the next turn lie.
    """
    write("stage = turn % STAGES")
    write("phase = turn // STAGES & 1")
    write("centre = source + here")
    _derivatives(write, layout, fields)
    write(f"centre = {upcoming}")
    _taps(write, fields, layout.width // 2, "centre", _early(layout))
    _stored(write, layout, chunk, pieces, fields)
    write("fence_async_shared()")
    write("team_barrier()")
    write("mbarrier.arrive(full.index(stage), count=1)")
    write("turn += 1")


def _produce(write: Writer, layout: Scheme, pieces: Sequence[int]) -> None:
    place_words = FIELDS * layout.width // 2
    names = ", ".join(f"z{n}" for n in range(len(pieces)))
    write("@gluon.jit")
    write(
        f"def produce(x, full, empty, {names}, pixels, height, width, down, dilation, pitch,\n"
        "            image_pitch, places, chunks, tiles, BP: gl.constexpr, WARPS: gl.constexpr,\n"
        "            STAGES: gl.constexpr, TEAM: gl.constexpr, TEAMS: gl.constexpr):"
    )
    write.depth += 1
    _places(write, layout, FIELDS)
    _tile(write, layout, FIELDS, "gl.program_id(0)", "here")
    write(f"each = places.to(gl.int64) * {place_words}")
    write("source = x")
    _taps(write, FIELDS, layout.width // 2, "(x + here)", _early(layout))
    write("for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):")
    write.depth += 1
    _tile(write, layout, FIELDS, "(tile + gl.num_programs(0))", "later")
    for chunk in range(layout.chunks):
        write(f"source = x + {chunk} * each")
        write("for chunk in range(0, chunks):")
        write.depth += 1
        write("last = chunk + 1 == chunks")
        write(f"ahead = gl.where(last, {(chunk + 1) % layout.chunks} * each, (chunk + 1) * {layout.chunks} * each + {chunk} * each)")
        where = "here" if chunk + 1 < layout.chunks else "gl.where(last, later, here)"
        _turn(write, layout, chunk, pieces, FIELDS, f"(x + ahead) + {where}")
        write(f"source += {layout.chunks} * each")
        write.depth -= 1
    write("here = later")
    write.depth -= 2
    write()


def _issue(write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int]) -> None:
    """A function: the rows of one block to their places in a stage."""
    columns = 2 * sum(parts)
    names = _weight_names(parts, pieces)
    write("@gluon.jit")
    write(
        f"def issue({', '.join(f'{n}_in, {n}' for n in names)}, ready, stage, block, wanted, programs):"
    )
    write.depth += 1
    total = columns * layout.batch * FIELDS * sum(pieces) * 2
    write(f"mbarrier.expect(ready.index(stage), {total}, pred=wanted)")
    write(f"first = (block * programs + gl.program_id(1)) * {layout.batch * columns}")
    for number in range(len(pieces)):
        done = 0
        for part, size in enumerate(parts):
            name = f"w{number}_{part}"
            rows = 2 * size * layout.batch
            for start in range(0, rows, _BOX):
                into = f"{name}.index(stage)"
                if rows > _BOX:
                    into += f".slice({start}, {_BOX}, dim=0)"
                write(
                    f"tma.async_copy_global_to_shared({name}_in, [first + {done + start}, 0],"
                    f" ready.index(stage), {into}, pred=wanted)"
                )
            done += rows
    write.depth -= 1
    write()


def _weight_names(parts: Sequence[int], pieces: Sequence[int]) -> list[str]:
    return [f"w{number}_{part}" for number in range(len(pieces)) for part in range(len(parts))]


def _sums(write: Writer, parts: Sequence[int]) -> None:
    """How threads hold the sums of products."""
    for part, size in enumerate(parts):
        shape = f"[16, {2 * size}, 16]"
        laid = f"gl.NVMMADistributedLayout([3, 0], [WARPS, 1], {shape})"
        write(f"SUMS{part}: gl.constexpr = {laid}")


def _zeros(write: Writer, layout: Scheme, parts: Sequence[int], rows: str) -> None:
    for target in range(layout.batch):
        for part, size in enumerate(parts):
            shape = f"[{rows}, {2 * size}]"
            write(f"a{target}_{part} = gl.zeros({shape}, gl.float32, layout=SUMS{part})")


def _awaited(write: Writer, layout: Scheme, parts: Sequence[int]) -> None:
    """All products that are under way are done."""
    names = ", ".join(f"a{t}_{p}" for t in range(layout.batch) for p in range(len(parts)))
    write(f"{names} = warpgroup_mma_wait(0, deps=[{names}])")


def _consume(write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int]) -> None:
    plan = layout.plan
    features = ", ".join(f"z{n}" for n in range(len(pieces)))
    weights = ", ".join(f"{n}_in, {n}" for n in _weight_names(parts, pieces))
    write("@gluon.jit")
    write(
        f"def consume(y, x_largest, w_largest, full, empty, ready, {features}, {weights},\n"
        "            pixels, height, width, chunks, tiles, programs, out_fields, y_dot,\n"
        "            BP: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr):"
    )
    write.depth += 1
    _sums(write, parts)
    write(f"turns = {layout.chunks} * chunks")
    write("mine = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)")
    write("all_turns = mine * turns")
    write("for early in gl.static_range(STAGES):")
    write(f"    issue({weights}, ready, early, early % turns, early < all_turns, programs)")
    write("turn = 0")
    write("for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):")
    write.depth += 1
    _zeros(write, layout, parts, "BP")
    write("for again in range(0, turns):")
    write.depth += 1
    write("stage = turn % STAGES")
    write("phase = turn // STAGES & 1")
    write("mbarrier.wait(ready.index(stage), phase)")
    write("mbarrier.wait(full.index(stage), phase)")
    for number in range(len(pieces)):
        for target in range(layout.batch):
            for part in range(len(parts)):
                name = f"a{target}_{part}"
                rows = 2 * parts[part]
                write(
                    f"{name} = warpgroup_mma("
                    f"z{number}.index(stage).slice({target} * BP, BP, dim=0),"
                    f" w{number}_{part}.index(stage).slice({target * rows}, {rows}, dim=0)"
                    f".permute((1, 0)), {name}, is_async=True)"
                )
    _awaited(write, layout, parts)
    write("mbarrier.arrive(empty.index(stage), count=1)")
    write("later = turn + STAGES")
    write(f"issue({weights}, ready, stage, later % turns, later < all_turns, programs)")
    write("turn += 1")
    write.depth -= 1
    pairs, rest = butterflies(plan.synthesis.T)
    channels = plan.synthesis.shape[0]
    padded = power_of_two(channels)
    vector = min(padded, layout.vector)
    slots = [slot for target in layout.targets for slot in target.slots]
    done = 0
    for part, size in enumerate(parts):
        # A thread holds both columns of a field, of every target.
        for target in range(layout.batch):
            one, two = (slots[2 * target : 2 * target + 2] + [-1, -1])[:2]
            write(f"s, o = gl.split(gl.reshape(a{target}_{part}, [BP, {size}, 2]))")
            for name, slot in (("s", one), ("o", two)):
                if slot >= 0:
                    write(f"s{slot} = {name}")
        times_rows(write, rest.T, "s", "y")
        for a, b in reversed(pairs):
            write(f"y{a}, y{b} = y{a} + y{b}, y{a} - y{b}")
        for start in range(0, channels, vector):
            outputs = [f"y{c if c < channels else 0}" for c in range(start, start + vector)]
            write(f"found = gl.reshape({joined(outputs, 'gl')}, [BP, {size}, {vector}])")
            if not start:
                write(f"LAID{part}: gl.constexpr = found.type.layout")
                write(f"pixel = tile * BP + gl.arange(0, BP, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAID{part})))")
                write("inside = pixel < pixels")
                write("owner = gl.minimum(pixel, pixels - 1) // (height * width)")
                write("power = exponent(gl.load(x_largest + owner)) + exponent(gl.load(w_largest))")
                write(f"scale = two_to(power - {2 * HEADROOM})")
                write(
                    f"o = gl.program_id(1) * {sum(parts)} + {done}"
                    f" + gl.arange(0, {size}, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAID{part})))"
                )
                write(f"element = gl.arange(0, {vector}, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAID{part})))")
                write("base = pixel.to(gl.int64) * y_dot")
            write("found = (found * scale[:, None, None]).to(y.dtype.element_ty)")
            write(f"channel = o[None, :, None] * {channels} + {start} + element[None, None, :]")
            write("known = inside[:, None, None] & (o < out_fields)[None, :, None]")
            if start + vector > channels:
                write(f"known = known & (element < {channels - start})[None, None, :]")
            write("gl.store(y + (base[:, None, None] + channel), found, mask=known)")
        done += size
    write.depth -= 2
    write()


def _workers(write: Writer, teams: int) -> None:
    """How many warps and registers the teams that differentiate have."""
    each = (", ".join([what] * teams) for what in (f"PRODUCERS // {teams}", "REGISTERS"))
    write(f"], [{next(each)}], [{next(each)}])")


def _barriers(write: Writer, teams: int, **lengths: str) -> None:
    """What is full when all teams have said so, and empty or ready when one thread has."""
    write("BARRIER: gl.constexpr = mbarrier.MBarrierLayout()")
    for name, length in lengths.items():
        write(f"{name} = gl.allocate_shared_memory(gl.int64, [{length}, 1], BARRIER)")
        write(f"for stage in gl.static_range({length}):")
        write(f"    mbarrier.init({name}.index(stage), count={teams if name == 'full' else 1})")
    write("fence_async_shared()")
    write("team_barrier()")


def gram_features(layout: Scheme) -> int:
    """Features of a field and target, padded, in the gradient to the weights."""
    pieces = pieces_of_a_chunk(layout)
    assert pieces is not None
    return max(ROWS // FIELDS, power_of_two(sum(pieces)))


def _gram_consume(
    write: Writer, layout: Scheme, parts: Sequence[int], chunk: int, features: int
) -> None:
    length = len(layout.lists[chunk][0])
    start = sum(len(rows[0]) for rows in layout.lists[:chunk])
    fields = ROWS // features
    weights = ", ".join(f"{n}_in, {n}" for n in _weight_names(parts, (1,)))
    write("@gluon.jit")
    write(
        f"def consume(partial, x_largest, g_largest, full, empty, ready, z0, {weights}, tiles,\n"
        "            programs, in_padded, out_padded, again, BP: gl.constexpr,\n"
        "            WARPS: gl.constexpr, STAGES: gl.constexpr, READY: gl.constexpr):"
    )
    write.depth += 1
    _sums(write, parts)
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
    _zeros(write, layout, parts, f"{ROWS}")
    write("turn = 0")
    write("block = 0")
    write("for tile in range(split, tiles, splits):")
    write.depth += 1
    write("stage = turn % STAGES")
    write("mbarrier.wait(full.index(stage), turn // STAGES & 1)")
    write("for sub in gl.static_range(SUBS):")
    write.depth += 1
    write("place = block % READY")
    write("mbarrier.wait(ready.index(place), block // READY & 1)")
    for target in range(layout.batch):
        for part, size in enumerate(parts):
            name = f"a{target}_{part}"
            rows = 2 * size
            write(
                f"{name} = warpgroup_mma("
                f"z0.index(stage).slice({target} * BP + sub * {ROWS}, {ROWS}, dim=0)"
                f".permute((1, 0)), w0_{part}.index(place).slice({target * rows}, {rows}, dim=0)"
                f".permute((1, 0)), {name}, is_async=True)"
            )
    _awaited(write, layout, parts)
    write("later = block + READY")
    issue("place", "later")
    write("block += 1")
    write.depth -= 1
    write("mbarrier.arrive(empty.index(stage), count=1)")
    write("turn += 1")
    write.depth -= 1
    write("power = exponent(gl.load(x_largest)) + exponent(gl.load(g_largest))")
    write(f"scale = two_to(power - {2 * HEADROOM})")
    each = 2 * layout.batch * layout.inner
    write(f"into = partial + split.to(gl.int64) * in_padded * out_padded * {each}")
    done = 0
    for part, size in enumerate(parts):
        write(f"row = gl.arange(0, {ROWS}, layout=gl.SliceLayout(1, SUMS{part}))")
        write(f"field = gl.program_id(0) * {fields} + row // {features}")
        write(f"number = row % {features}")
        write(f"there = number < {length}")
        write(f"out = gl.arange(0, {2 * size}, layout=gl.SliceLayout(0, SUMS{part}))")
        write(f"out += 2 * (gl.program_id(1) * {sum(parts)} + {done})")
        for target in range(layout.batch):
            write(f"where = (field * {layout.batch} + {target}) * {layout.inner} + {start} + number")
            write("where = where[:, None] * (out_padded * 2) + out[None, :]")
            # A program adds to what it found in the images before these.
            write("old = gl.load(into + where, mask=there[:, None] & (again > 0), other=0.0)")
            write(f"gl.store(into + where, a{target}_{part} * scale + old, mask=there[:, None])")
        done += size
    write.depth -= 1
    write()


ROWS = 64
"""Rows of a product where warps have roles."""


def hopper_gram_source(
    layout: Scheme, parts: tuple[int, ...], chunk: int, teams: int
) -> str:
    """The kernel ``gram``: the gradient to the weights that belong to one chunk of slots.

    The features of `ROWS` // `gram_features` fields are the rows of its products, their inner
    number is that of the pixel, and the columns are those of ``sum(parts)`` output fields.
    """
    features = gram_features(layout)
    fields = ROWS // features
    place_words = fields * layout.width // 2
    write = Writer(packed=True)
    write("@gluon.jit")
    write(
        "def produce(x, full, empty, z0, pixels, height, width, down, dilation, pitch,\n"
        "            image_pitch, places, tiles, BP: gl.constexpr, WARPS: gl.constexpr,\n"
        "            STAGES: gl.constexpr, TEAM: gl.constexpr, TEAMS: gl.constexpr):"
    )
    write.depth += 1
    _places(write, layout, fields)
    write(f"source = (gl.program_id(0) * {layout.chunks} + {chunk}) * places.to(gl.int64)")
    write(f"source = x + source * {place_words}")
    _tile(write, layout, fields, "gl.program_id(2)", "here")
    _taps(write, fields, layout.width // 2, "(source + here)", _early(layout))
    write("for tile in range(gl.program_id(2), tiles, gl.num_programs(2)):")
    write.depth += 1
    _tile(write, layout, fields, "(tile + gl.num_programs(2))", "later")
    _turn(write, layout, chunk, (features,), fields, "source + later")
    write("here = later")
    write.depth -= 2
    write()
    piece = (ROWS // FIELDS,)
    _issue(write, layout, parts, piece)
    _gram_consume(write, layout, parts, chunk, features)
    names = _weight_names(parts, piece)
    write(
        "@gluon.jit(do_not_specialize=['pixels', 'height', 'width', 'pitch', 'image_pitch',"
        " 'places', 'tiles', 'programs', 'in_padded', 'again'])"
    )
    write(
        f"def gram(x, {', '.join(f'{n}_in' for n in names)}, partial, x_largest, g_largest, pixels,\n"
        "         height, width, down, dilation, pitch, image_pitch, places, tiles, programs,\n"
        "         in_padded, out_padded, again, BP: gl.constexpr, PRODUCERS: gl.constexpr,\n"
        "         REGISTERS: gl.constexpr, STAGES: gl.constexpr, READY: gl.constexpr):"
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
    _barriers(write, teams, full="STAGES", empty="STAGES", ready="READY")
    both = ", ".join(f"{n}_in, {n}" for n in names)
    for team in range(teams):
        write(f"T{team}: gl.constexpr = {team}")
    write("gl.warp_specialize([")
    write(
        f"    (consume, (partial, x_largest, g_largest, full, empty, ready, z0, {both}, tiles,\n"
        "      programs, in_padded, out_padded, again, BP, gl.num_warps(), STAGES, READY)),"
    )
    for team in range(teams):
        write(
            "    (produce, (x, full, empty, words, pixels, height, width, down, dilation, pitch,\n"
            f"      image_pitch, places, tiles, BP // {teams}, PRODUCERS // {teams}, STAGES,\n"
            f"      T{team}, {teams})),"
        )
    _workers(write, teams)
    write.depth -= 1
    return write.text()


def hopper_source(layout: Scheme, parts: tuple[int, ...], teams: int) -> str:
    """The kernel ``forward`` of a plan's layer, on float16 spectra, to outputs channels-last.

    One program gives ``sum(parts)`` output fields, each of the parts a power of two.
    """
    pieces = pieces_of_a_chunk(layout)
    assert pieces is not None
    write = Writer(packed=True)
    _produce(write, layout, pieces)
    _issue(write, layout, parts, pieces)
    _consume(write, layout, parts, pieces)
    names = _weight_names(parts, pieces)
    weights = ", ".join(f"{n}_in" for n in names)
    write(
        "@gluon.jit(do_not_specialize=['pixels', 'height', 'width', 'pitch', 'image_pitch',"
        " 'places', 'chunks', 'tiles', 'programs', 'out_fields'])"
    )
    write(
        f"def forward(x, {weights}, y, x_largest, w_largest, pixels, height, width, down,\n"
        "            dilation, pitch, image_pitch, places, chunks, tiles, programs, out_fields,\n"
        "            y_dot, BP: gl.constexpr, PRODUCERS: gl.constexpr, REGISTERS: gl.constexpr,\n"
        "            STAGES: gl.constexpr):"
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
    _barriers(write, teams, full="STAGES", empty="STAGES", ready="STAGES")
    both = ", ".join(f"{n}_in, {n}" for n in names)
    for team in range(teams):
        write(f"T{team}: gl.constexpr = {team}")
    write("gl.warp_specialize([")
    write(
        f"    (consume, (y, x_largest, w_largest, full, empty, ready, {', '.join(held)}, {both},\n"
        "      pixels, height, width, chunks, tiles, programs, out_fields, y_dot, BP,\n"
        "      gl.num_warps(), STAGES)),"
    )
    for team in range(teams):
        write(
            f"    (produce, (x, full, empty, {', '.join(f'{n}_words' for n in held)}, pixels,\n"
            "      height, width, down, dilation, pitch, image_pitch, places, chunks, tiles,\n"
            f"      BP // {teams}, PRODUCERS // {teams}, STAGES, T{team}, {teams})),"
        )
    _workers(write, teams)
    write.depth -= 1
    return write.text()
