"""Generates the parts that all warp-specialised kernels share: the pipeline from taps to products.

Producer warps differentiate. A thread of theirs owns a pixel and a field with all slots of a chunk,
two float16 in each word. Consumer warps multiply. Stages in shared memory connect them: producers
fill in the features, and the copy engine the other factor. `source` makes kernels of these parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from econv.engines.spectral.triton.derivatives import tap_offset, write_derivatives
from econv.engines.spectral.triton.scheme import FIELDS, HEADROOM, Scheme, power_of_two
from econv.engines.spectral.triton.writer import Writer, twos

ROWS = 64
"""Rows of a warp-specialised product."""

_BOX = 256  # rows of a matrix that one copy brings, at most


def rows_of_a_copy(layout: Scheme, part: int) -> int:
    """Rows of weights that are copied at once: all targets of a part, if that can be."""
    return min(_BOX, 2 * part * layout.batch)


def weight_gradient_features(layout: Scheme) -> int:
    """Features of a field and target in the gradient to the weights, with padding."""
    return max(ROWS // FIELDS, power_of_two(layout.length))


def load_taps(write: Writer, fields: int, words: int, centre: str, names: dict[str, str]) -> None:
    """Load taps, each a name and its offset from the centre, and split them into words."""
    for name, offset in names.items():
        write(f"t = gl.load({centre}{offset})")
        if words == 1:
            write(f"{name}0 = gl.convert_layout(gl.reshape(t, [{fields}, BP]), ITEMS)")
            continue
        parts = [f"{name}{word}" for word in range(words)]
        write(f"t = gl.reshape(t, [{fields}, BP, {twos(words)}])")
        write.split("t", parts)
        for part in parts:
            write(f"{part} = gl.convert_layout({part}, ITEMS, assert_trivial=True)")


def early_taps(layout: Scheme) -> dict[str, str]:
    """The taps above and below the centre, which are loaded a step ahead.

    They lie in all lines of the cache that the others do, but for those at the tile's sides: the
    others find them there.
    """
    reach = layout.coefficients.shape[-1] // 2
    downs = range(-reach, reach + 1)
    return {f"early{'_' if dy < 0 else ''}{abs(dy)}_": tap_offset(dy, 0) for dy in downs}


def _derivatives(
    write: Writer, layout: Scheme, chunk: int, fields: int, scales: dict[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """The derivatives ``d{stencil}_{word}`` of a chunk, as `write_derivatives` has them."""
    words, read = range(layout.width // 2), layout.derivatives(chunk)
    early = {offset: name for name, offset in early_taps(layout).items()}

    def load(names: dict[str, tuple[int, int]]) -> None:
        offsets = {name: tap_offset(*tap) for name, tap in names.items()}
        for name, offset in offsets.items():
            for word in words if offset in early else ():
                write(f"{name}{word} = {early[offset]}{word}")
        later = {name: offset for name, offset in offsets.items() if offset not in early}
        load_taps(write, fields, len(words), "centre", later)

    of_word = [sorted(s for s, w in read if w == word) for word in words]
    return write_derivatives(write, layout, of_word, load, scales)


_LEAST = 0.2  # that a first tap counts: what is divided by it is at most five times as large


class _Normal(NamedTuple):
    """Derivatives and features of a chunk as the kernels have them: first factors are one.

    A derivative begins with one of its taps (unless that counts little: then it stays as it is),
    and a feature with one of its derivatives, that count one. What that divides features by is a
    factor of their weights.
    """

    scales: dict[tuple[int, int], float]
    """What derivatives, (stencil, pair of slots), are divided by."""
    gains: dict[int, float]
    """What features are divided by."""
    terms: dict[int, list[tuple[int, int, int, float]]]
    """Of each feature: stencil, pair of slots, which of the two, and factor."""


@lru_cache(maxsize=512)
def _normal(layout: Scheme, chunk: int) -> _Normal:
    first = _derivatives(Writer("gl"), layout, chunk, FIELDS, {})
    found = _Normal({key: v if abs(v) >= _LEAST else 1.0 for key, v in first.items()}, {}, {})
    for pair in layout.lists[chunk].reshape(-1, 2).tolist():
        for feature in (f for f in pair if f >= 0):
            terms = layout.terms(feature)
            # Two that are alike begin with the same derivative.
            key = next(iter(layout.terms(pair[0]) if layout.alike(*pair) else terms))
            gain = found.gains[feature] = terms[key][1] * found.scales[key]
            found.terms[feature] = [
                (*key, side, factor * found.scales[key] / gain)
                for key, (side, factor) in terms.items()
            ]
    return found


def gains(layout: Scheme) -> np.ndarray:
    """What the weights of each feature are multiplied by, ``[batch * inner * 2]``."""
    known = {-1: 1.0}
    for chunk in range(layout.chunks):
        known |= _normal(layout, chunk).gains
    return np.array([[known[f]] * 2 for f in layout.features.flat], dtype=np.float32).ravel()


def fits(layout: Scheme) -> bool:
    """Whether no derivative and no feature is ever too large for float16.

    Sums of mirrored taps are smaller than the derivatives that read them.
    """
    most = max(max(magnitudes(layout, chunk)) for chunk in range(layout.chunks))
    return most * 2.0 ** (HEADROOM + 1) < float(np.finfo(np.float16).max)


def magnitudes(layout: Scheme, chunk: int) -> list[float]:
    """How large derivatives and features of a chunk can be where no channel is larger than one."""
    normal = _normal(layout, chunk)
    slots = np.abs(layout.analysis).sum(axis=0)[chunk * layout.width :].reshape(-1, 2)
    taps = np.abs(layout.plan.stencils).sum(axis=(1, 2))
    most = {key: taps[key[0]] / abs(scale) for key, scale in normal.scales.items()}
    found = [factor * slots[word].max() for (_, word), factor in most.items()]
    found += [
        sum(
            abs(factor) * most[stencil, word] * slots[word, side]
            for stencil, word, side, factor in terms
        )
        for terms in normal.terms.values()
    ]
    return found


class _Words:
    """Features two by two, written when they are first asked for."""

    def __init__(self, write: Writer, layout: Scheme, chunk: int) -> None:
        self.write, self.layout, self.normal = write, layout, _normal(layout, chunk)
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
            self.write(f"{name} = {self.write.asm(f'prmt.b32 $0, $1, $2, {selector:#x};', a, b)}")
        return name

    def word(self, one: int, two: int) -> str:
        """Two features side by side."""
        name = f"f{one}_{two}"
        if name in self.taken:
            return name
        left, right = (self.normal.terms[feature] for feature in (one, two))
        if self.layout.alike(one, two):  # in one order, so that halves come from one derivative
            keys = [term[:2] for term in left]
            right = sorted(right, key=lambda term: keys.index(term[:2]))
        found = None
        for a, b in itertools.zip_longest(left, right):
            # What one of them does not have counts nothing.
            a, b = a or (*left[-1][:3], 0.0), b or (*right[-1][:3], 0.0)
            source = self._halves(a[:3], b[:3])
            if found is not None and a[3] == b[3] == 1.0:
                found = self.write.sum(found, source)
            else:
                found = self.write.scaled(source, a[3], b[3], found)
        assert found is not None
        self.taken.add(name)
        self.write(f"{name} = {found}")
        return name


def _features(
    write: Writer, layout: Scheme, chunk: int, pieces: Sequence[int], fields: int
) -> None:
    """The features ``v{piece}`` of a slot chunk, as they lie in the stage."""
    words = _Words(write, layout, chunk)
    for number in layout.filled(chunk, pieces):
        size = pieces[number]
        columns = [
            write.joined([words.word(*pair) for pair in column])
            for column in layout.pairs(chunk, sum(pieces[:number]), size)
        ]
        # The inner axis is joined last, so that a thread holds neighbours along it.
        write(f"""
            v = gl.reshape({write.joined(columns)}, [{fields}, BP, {layout.batch}, {size // 2}])
            v = gl.permute(v, (2, 1, 0, 3))
            v{number} = gl.reshape(v, [{layout.batch}, BP, {fields * size // 2}])
        """)


def _items(write: Writer, fields: int) -> None:
    """How pixels and fields belong to threads."""
    threads = f"[{fields}, {32 // fields}]"
    write(f"ITEMS: gl.constexpr = gl.BlockedLayout([1, 1], {threads}, [1, WARPS], [0, 1])")


def thread_layouts(write: Writer, layout: Scheme, fields: int) -> None:
    """How threads lie, and what all tiles have in common."""
    words = layout.width // 2
    held = f"[1, 1, {words}], [{fields}, {32 // fields}, 1], [1, WARPS, 1], [2, 0, 1]"
    _items(write, fields)
    # In 64 bits what is constant in the offset of a tap becomes part of the instruction.
    write(f"""
        VECTORS: gl.constexpr = gl.BlockedLayout({held})
        PIXELS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, VECTORS))
        OF_FIELDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, VECTORS))
        OF_WORDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, VECTORS))
        row = (pitch * dilation * {fields * words}).to(gl.int64)
        column = dilation * {fields * words}
        field = gl.arange(0, {fields}, layout=OF_FIELDS)
        word = gl.arange(0, {words}, layout=OF_WORDS)
        step = 0
    """)


def tile_offsets(write: Writer, layout: Scheme, fields: int, tile: str, result: str) -> None:
    """Where the centre taps of a tile lie; past the last pixel, those of the first."""
    words = layout.width // 2
    reach = layout.coefficients.shape[-1] // 2
    write(f"""
        pixel = ({tile} * PARTITIONS + PARTITION) * BP + gl.arange(0, BP, layout=PIXELS)
        p = gl.where(pixel < pixels, pixel, 0)
        image = p // (height * width)
        line = (p - image * (height * width)) // width
        dot = p % width
        offset = image * image_pitch + line * down * pitch + dot * down
        offset += {reach} * (pitch + 1) * dilation
        {result} = offset[None, :, None] * {fields * words} + field[:, None, None] * {words}
        {result} = {result} + word[None, None, :]
    """)


def _early_words(layout: Scheme) -> str:
    """What is loaded a step ahead, word for word."""
    words = range(layout.width // 2)
    return ", ".join(f"{name}{word}" for name in early_taps(layout) for word in words)


def differentiate_function(
    write: Writer, layout: Scheme, chunk: int, pieces: Sequence[int], fields: int
) -> None:
    """A function: the features of a tile and a chunk of slots, and the early taps of the next step.

    Triton analyses the body of a loop twice and that of a nested loop four times, but the body of a
    function once.
    """
    early = _early_words(layout)
    given = f"source, here, next_source, next_here, row, column, {early}"
    with write.function(f"differentiate{chunk}", given, "BP WARPS"):
        _items(write, fields)
        write("centre = source + here")
        _derivatives(write, layout, chunk, fields, _normal(layout, chunk).scales)
        write("centre = next_source + next_here")
        load_taps(write, fields, layout.width // 2, "centre", early_taps(layout))
        _features(write, layout, chunk, pieces, fields)
        write(f"return {', '.join(f'v{n}' for n in layout.filled(chunk, pieces))}, {early}")


def pipeline_step(
    write: Writer, layout: Scheme, chunk: int, pieces: Sequence[int], source: str, here: str
) -> None:
    """The features of a tile and a chunk of slots, handed over.

    The centre taps of the next step lie at ``source`` and, from there, ``here``.
    """
    early, there = _early_words(layout), layout.filled(chunk, pieces)
    found, now = ", ".join(f"v{n}" for n in there), f"source, here, {source}, {here}"
    write(f"""
        stage = step % STAGES
        phase = step // STAGES & 1
        {found}, {early} = differentiate{chunk}({now}, row, column, {early}, BP, WARPS)
        mbarrier.wait(empty.index(stage), phase ^ 1)
    """)
    for number in there:
        write(f"z{number}.index(stage).slice(PARTITION * BP, BP, dim=1).store(v{number})")
    write("""
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        step += 1
    """)


def issue_function(
    write: Writer, layout: Scheme, parts: Sequence[int], pieces: Sequence[int]
) -> None:
    """A function: copy the rows of one block to a stage."""
    columns = 2 * sum(parts)
    given = ", ".join(f"{name}_in, {name}" for name in weight_names(parts, pieces))
    with write.function("issue", f"{given}, ready, stage, block, wanted, programs"):
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
                    where = f"{name}_in, [first + {done + start}, 0], ready.index(stage), {into}"
                    write(f"tma.async_copy_global_to_shared({where}, pred=wanted)")
                done += rows


def weight_names(parts: Sequence[int], pieces: Sequence[int]) -> list[str]:
    return [f"w{number}_{part}" for number in range(len(pieces)) for part in range(len(parts))]


def sum_layouts(write: Writer, parts: Sequence[int]) -> None:
    """How threads hold the sums of products."""
    for part, size in enumerate(parts):
        shape = f"[16, {2 * size}, 16]"
        layout = f"gl.NVMMADistributedLayout([3, 0], [WARPS, 1], {shape})"
        write(f"SUMS{part}: gl.constexpr = {layout}")


def zeros(write: Writer, layout: Scheme, parts: Sequence[int], rows: str) -> None:
    for target in range(layout.batch):
        for part, size in enumerate(parts):
            shape = f"[{rows}, {2 * size}]"
            write(f"a{target}_{part} = gl.zeros({shape}, gl.float32, layout=SUMS{part})")


def products(
    write: Writer, parts: Sequence[int], stage: str, factors: Sequence[tuple[int, int, str]]
) -> None:
    """Products are added to the sums, each of features and of what was copied to a stage.

    Features go into registers, once for all columns, while the products before run. ``factors``:
    the numbers of a piece and of a target, and where their features lie.
    """

    def fetch(index: int) -> None:
        write(f"f{index} = {factors[index][2]}.load(gl.DotOperandLayout(0, SUMS0, 2))")

    fetch(0)
    for index, (number, target, _) in enumerate(factors):
        if index + 1 < len(factors):
            fetch(index + 1)
        for part, size in enumerate(parts):
            one, name = f"f{index}", f"a{target}_{part}"
            if part:
                layout = f"gl.DotOperandLayout(0, SUMS{part}, 2)"
                one = f"gl.convert_layout({one}, {layout}, assert_trivial=True)"
            two = f"w{number}_{part}.index({stage}).slice({target * 2 * size}, {2 * size}, dim=0)"
            write(f"{name} = warpgroup_mma({one}, {two}.permute((1, 0)), {name}, is_async=True)")
        before = factors[index - 1][1]
        if index and before != target:
            # Not the last products, but those before them: their registers are free.
            names = ", ".join(f"a{before}_{part}" for part in range(len(parts)))
            write(f"{names} = warpgroup_mma_wait({len(parts)}, deps=[{names}])")


def awaited(write: Writer, layout: Scheme, parts: Sequence[int]) -> None:
    """All products that are under way are done."""
    names = ", ".join(f"a{t}_{p}" for t in range(layout.batch) for p in range(len(parts)))
    write(f"{names} = warpgroup_mma_wait(0, deps=[{names}])")


def specialise(write: Writer, partitions: int, consumed: str, produced: str) -> None:
    """Consumers and producers run at the same time; what they are given."""
    write("gl.warp_specialize([")
    write(f"    (consume, ({consumed})),")
    each = (f"BP // {partitions}", f"PRODUCERS // {partitions}", "STAGES")
    for number in range(partitions):
        last = ", ".join((*each, f"T{number}", f"{partitions}"))
        write(f"    (produce, ({produced}, {last})),")
    warps, registers = (", ".join([n] * partitions) for n in (each[1], "REGISTERS"))
    write(f"], [{warps}], [{registers}])")


def barriers(write: Writer, partitions: int, **lengths: str) -> None:
    """What is full when all partitions have said so, and empty or ready when one thread has.

    And the numbers of the partitions, ``T0 …``, as constants.
    """
    write("BARRIER: gl.constexpr = mbarrier.MBarrierLayout()")
    for name, length in lengths.items():
        write(f"""
            {name} = gl.allocate_shared_memory(gl.int64, [{length}, 1], BARRIER)
            for stage in gl.static_range({length}):
                mbarrier.init({name}.index(stage), count={partitions if name == "full" else 1})
        """)
    write("fence_async_shared()")
    write("thread_barrier()")
    for partition in range(partitions):
        write(f"T{partition}: gl.constexpr = {partition}")
