"""Generates the producers of the warp-specialised kernels: from taps to features.

A thread owns a pixel and a field with all slots of a chunk, two float16 in each word. Producers
hand features over in stages of shared memory. `source` makes kernels of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from econv.engines.spectral.triton.derivatives import tap_offset, write_derivatives
from econv.engines.spectral.triton.scheme import FIELDS, HEADROOM, Scheme
from econv.engines.spectral.triton.writer import Writer, twos
from econv.gpu.sizes import power_of_two

ROWS = 64
"""Rows of a warp-specialised product."""

PRODUCERS, PARTITIONS = 8, 2
"""Warps of a program that differentiate, and their parts, each of which goes its own pace."""

_ITEMS = "ITEMS: gl.constexpr = gl.BlockedLayout([1, 1], [{}, {}], [1, WARPS], [0, 1])"
"""How pixels and fields belong to threads."""


def weight_gradient_features(layout: Scheme) -> int:
    """Features of a field and target in the gradient to the weights, with padding."""
    return max(ROWS // FIELDS, power_of_two(layout.length))


def _load_taps(write: Writer, fields: int, words: int, centre: str, names: dict[str, str]) -> None:
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
    reach = layout.plan.basis.size // 2
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
        _load_taps(write, fields, len(words), "centre", later)

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
    for terms in normal.terms.values():
        found.append(sum(abs(f) * most[s, word] * slots[word, side] for s, word, side, f in terms))
    return found


def _features(
    write: Writer, layout: Scheme, chunk: int, pieces: Sequence[int], fields: int
) -> None:
    """The features ``v{piece}`` of a slot chunk, as they lie in the stage.

    Two by two, each pair written when it is first asked for.
    """

    @cache
    def halves(one: tuple[int, int, int], two: tuple[int, int, int]) -> str:
        """One half each of two derivatives, (stencil, word, side)."""
        a, b = (f"d{stencil}_{word}" for stencil, word, _ in (one, two))
        if a == b and (one[2], two[2]) == (0, 1):
            return a
        name = f"h{one[0]}_{one[1]}{one[2]}_{two[0]}_{two[1]}{two[2]}"
        low, high = 2 * one[2], 4 + 2 * two[2]
        selector = low | (low + 1) << 4 | high << 8 | (high + 1) << 12
        write(f"{name} = {write.asm(f'prmt.b32 $0, $1, $2, {selector:#x};', a, b)}")
        return name

    @cache
    def word(one: int, two: int) -> str:
        """Two features side by side."""
        left, right = (_normal(layout, chunk).terms[feature] for feature in (one, two))
        if layout.alike(one, two):  # in one order, so that halves come from one derivative
            keys = [term[:2] for term in left]
            right = sorted(right, key=lambda term: keys.index(term[:2]))
        found = None
        for a, b in itertools.zip_longest(left, right):
            # What one of them does not have counts nothing.
            a, b = a or (*left[-1][:3], 0.0), b or (*right[-1][:3], 0.0)
            source = halves(a[:3], b[:3])
            if found is not None and a[3] == b[3] == 1.0:
                found = write.sum(found, source)
            else:
                found = write.scaled(source, a[3], b[3], found)
        write(f"f{one}_{two} = {found}")
        return f"f{one}_{two}"

    for number in layout.filled(chunk, pieces):
        size = pieces[number]
        pairs = layout.pairs(chunk, sum(pieces[:number]), size)
        columns = [write.joined([word(*pair) for pair in column]) for column in pairs]
        # The inner axis is joined last, so that a thread holds neighbours along it.
        write(f"""
            v = gl.reshape({write.joined(columns)}, [{fields}, BP, {layout.batch}, {size // 2}])
            v = gl.permute(v, (2, 1, 0, 3))
            v{number} = gl.reshape(v, [{layout.batch}, BP, {fields * size // 2}])
        """)


def _thread_layouts(write: Writer, layout: Scheme, fields: int) -> None:
    """How threads lie, and what all tiles have in common."""
    words = layout.width // 2
    held = f"[1, 1, {words}], [{fields}, {32 // fields}, 1], [1, WARPS, 1], [2, 0, 1]"
    write(_ITEMS.format(fields, 32 // fields))
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


def _tile_offsets(write: Writer, layout: Scheme, fields: int, tile: str, result: str) -> None:
    """Where the centre taps of a tile lie; past the last pixel, those of the first."""
    words = layout.width // 2
    reach = layout.plan.basis.size // 2
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
        write(_ITEMS.format(fields, 32 // fields))
        write("centre = source + here")
        _derivatives(write, layout, chunk, fields, _normal(layout, chunk).scales)
        write("centre = next_source + next_here")
        _load_taps(write, fields, layout.width // 2, "centre", early_taps(layout))
        _features(write, layout, chunk, pieces, fields)
        write(f"return {', '.join(f'v{n}' for n in layout.filled(chunk, pieces))}, {early}")


def _pipeline_step(
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


def produce(write: Writer, layout: Scheme, pieces: Sequence[int]) -> None:
    """Features of one tile after the other, of all its fields for one chunk of slots at a time."""
    _thread_layouts(write, layout, FIELDS)
    _tile_offsets(write, layout, FIELDS, "gl.program_id(0)", "here")
    write(f"each = grid_size.to(gl.int64) * {FIELDS * layout.width // 2}")
    write("source = x")
    _load_taps(write, FIELDS, layout.width // 2, "(x + here)", early_taps(layout))
    with write.block("for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):"):
        _tile_offsets(write, layout, FIELDS, "(tile + gl.num_programs(0))", "later")
        for chunk in range(layout.chunks):
            write(f"source = x + {chunk} * each")
            with write.block("for chunk in range(0, chunks):"):
                after = (chunk + 1) % layout.chunks
                write("last = chunk + 1 == chunks")
                write(f"chunk_after = (chunk + 1) * {layout.chunks}")
                write(f"ahead = gl.where(last, {after}, chunk_after + {chunk}) * each")
                where = "here" if after else "gl.where(last, later, here)"
                _pipeline_step(write, layout, chunk, pieces, "x + ahead", where)
                write(f"source += {layout.chunks} * each")
        write("here = later")


def produce_for_weights(write: Writer, layout: Scheme, chunk: int) -> None:
    """Features of one tile after the other, of the fields of a program for one chunk of slots."""
    features = weight_gradient_features(layout)
    fields = ROWS // features
    _thread_layouts(write, layout, fields)
    write(f"source = (gl.program_id(0) * {layout.chunks} + {chunk}) * grid_size.to(gl.int64)")
    write(f"source = x + source * {fields * layout.width // 2}")
    _tile_offsets(write, layout, fields, "gl.program_id(2)", "here")
    _load_taps(write, fields, layout.width // 2, "(source + here)", early_taps(layout))
    with write.block("for tile in range(gl.program_id(2), tiles, gl.num_programs(2)):"):
        _tile_offsets(write, layout, fields, "(tile + gl.num_programs(2))", "later")
        _pipeline_step(write, layout, chunk, (features,), "source", "later")
        write("here = later")
