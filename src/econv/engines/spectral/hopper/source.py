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
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from econv.engines.spectral.hopper.schedule import (
    PARTITIONS,
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


def convolution_source(layout: Scheme, parts: tuple[int, ...]) -> str:
    """The kernel ``forward`` of a plan's layer, on float16 spectra, to outputs channels-last.

    One program gives ``sum(parts)`` output fields, each of the parts a power of two.
    """
    last = "chunks, tiles, programs, out_fields, y_dot"
    write = _Source(layout, parts, layout.used_pieces, "y, x_largest, w_largest", last)
    for chunk in range(layout.chunks):
        differentiate_function(write, layout, chunk, write.pieces, FIELDS)
    with write.producers():
        produce(write, layout, write.pieces)
    with write.consumers():
        write.consume()
    write.kernel("forward", "chunks out_fields")
    return write.text()


def weight_gradient_source(layout: Scheme, parts: tuple[int, ...], chunk: int) -> str:
    """The kernel ``weight_gradient``: the gradient to the weights of one chunk of slots.

    Rows of its products are the features of `ROWS` // `weight_gradient_features` fields, columns
    those of ``sum(parts)`` output fields, and the inner dimension are pixels.
    """
    features, results = weight_gradient_features(layout), "partial, x_largest, g_largest"
    last = "tiles, programs, in_padded, out_padded, again"
    write = _Source(layout, parts, (ROWS // FIELDS,), results, last, "READY COUNT")
    differentiate_function(write, layout, chunk, (features,), ROWS // features)
    with write.producers():
        produce_for_weights(write, layout, chunk)
    with write.consumers():
        write.accumulate()
        write.store_sums(chunk, features)
    write.kernel("weight_gradient", "in_padded again")
    return write.text()


class _Source(Writer):
    """A kernel of consumers and producers that run at the same time, with what each is given."""

    def __init__(self, layout: Scheme, parts: Sequence[int], pieces: Sequence[int], *rest: str):
        """``rest``: what is written, further arguments, and constants of those without outputs."""
        super().__init__("gl")
        self.layout, self.parts, self.pieces = layout, parts, pieces
        self.results, self.last, self.constants = (*rest, "")[:3]
        self.pairs = [*itertools.product(range(len(pieces)), range(len(parts)))]
        self.names = [f"w{number}_{part}" for number, part in self.pairs]
        self.weights = ", ".join(f"{one}_in, {one}" for one in self.names)
        self.features = ", ".join(f"z{number}" for number in range(len(pieces)))
        self.produced = f"{_GRID}, {self.last.partition('tiles')[0]}tiles"
        shape = "" if self.constants else "pixels, height, width, "
        given = f"full, empty, ready, {self.features}, {self.weights}, {shape}{self.last}"
        self.consumed = f"{self.results}, {given}"

    def producers(self) -> AbstractContextManager[None]:
        each = "BP WARPS STAGES PARTITION PARTITIONS"
        return self.function("produce", f"x, full, empty, {self.features}, {self.produced}", each)

    def consumers(self) -> AbstractContextManager[None]:
        with self.function("issue", f"{self.weights}, ready, stage, block, wanted, programs"):
            self._issue()
        return self.function("consume", self.consumed, f"BP WARPS STAGES {self.constants}")

    def kernel(self, name: str, general: str) -> None:
        inputs = [f"{one}_in" for one in self.names]
        arguments = ", ".join(["x", *inputs, self.results, _GRID, self.last])
        given = f"BP PRODUCERS REGISTERS STAGES {self.constants}"
        copies = "READY" if self.constants else "STAGES"
        with self.function(name, arguments, given, f"{_GENERAL} {general}"):
            self._memory(copies)
            self("BARRIER: gl.constexpr = mbarrier.MBarrierLayout()")
            # Full when all partitions have said so, and empty or ready when one thread has.
            lengths = {"full": "STAGES", "empty": "STAGES", "ready": copies}
            for barrier, length in lengths.items():
                count = PARTITIONS if barrier == "full" else 1
                self(f"""
                    {barrier} = gl.allocate_shared_memory(gl.int64, [{length}, 1], BARRIER)
                    for stage in gl.static_range({length}):
                        mbarrier.init({barrier}.index(stage), count={count})
                """)
            self("fence_async_shared()")
            self("thread_barrier()")
            for number in range(PARTITIONS):
                self(f"T{number}: gl.constexpr = {number}")
            self("gl.warp_specialize([")
            more = ", ".join(["BP", "gl.num_warps()", "STAGES", *self.constants.split()])
            self(f"    (consume, ({self.consumed}, {more})),")
            words = ", ".join(f"z{number}_words" for number in range(len(self.pieces)))
            warps = f"PRODUCERS // {PARTITIONS}"
            for number in range(PARTITIONS):
                more = f"BP // {PARTITIONS}, {warps}, STAGES, T{number}, {PARTITIONS}"
                self(f"    (produce, (x, full, empty, {words}, {self.produced}, {more})),")
            lists = (", ".join([one] * PARTITIONS) for one in (warps, "REGISTERS"))
            self("], [{}], [{}])".format(*lists))

    def _issue(self) -> None:
        """The rows of one block are copied to a stage."""
        columns = 2 * sum(self.parts) * self.layout.batch
        copied = 2 * columns * FIELDS * sum(self.pieces)
        self(f"""
            mbarrier.expect(ready.index(stage), {copied}, pred=wanted)
            first = (block * programs + gl.program_id(1)) * {columns}
        """)
        for name, (_, part) in zip(self.names, self.pairs, strict=True):
            done = 2 * sum(self.parts[:part]) * self.layout.batch
            where = f"{name}_in, [first + {done}, 0], ready.index(stage), {name}.index(stage)"
            self(f"tma.async_copy_global_to_shared({where}, pred=wanted)")

    def _memory(self, copies: str) -> None:
        """Shared memory: features, as float16 and as words; so many stages of what is copied."""
        for number, size in enumerate(self.pieces):
            inner, name = FIELDS * size, f"z{number}"
            for kind, bits, rank in (("H", 16, 2), ("W", 32, 3)):
                swizzled = f"gl.NVMMASharedLayout({min(128, 2 * inner)}, {bits}, rank={rank})"
                self(f"{kind}{number}: gl.constexpr = {swizzled}")
            batch = self.layout.batch
            shape, words = f"{batch} * BP, {inner}", f"{batch}, BP, {inner // 2}"
            self(f"""
                {name} = gl.allocate_shared_memory(gl.float16, [STAGES, {shape}], H{number})
                {name}_words = {name}._reinterpret(gl.int32, [STAGES, {words}], W{number})
            """)
            for part, fields in enumerate(self.parts):
                name = f"w{number}_{part}"
                shape = f"[{copies}, {self.layout.batch * 2 * fields}, {inner}]"
                self(f"{name} = gl.allocate_shared_memory(gl.float16, {shape}, {name}_in.layout)")

    def _zeros(self, rows: str) -> None:
        for target in range(self.layout.batch):
            for part, size in enumerate(self.parts):
                shape = f"[{rows}, {2 * size}]"
                self(f"a{target}_{part} = gl.zeros({shape}, gl.float32, layout=SUMS{part})")

    def _sum_layouts(self) -> None:
        """How threads hold the sums of products."""
        for part, size in enumerate(self.parts):
            layout = f"gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, {2 * size}, 16])"
            self(f"SUMS{part}: gl.constexpr = {layout}")

    def _products(self, stage: str, rows: str, pieces: Sequence[int]) -> None:
        """Products are added to the sums, each of features and of what was copied to a stage.

        Features go into registers, once for all columns, while the products before run. ``rows``
        says where those of a piece and a target lie.
        """
        factors = list(itertools.product(pieces, range(self.layout.batch)))

        def fetch(index: int) -> None:
            features = rows.format(*factors[index])
            self(f"f{index} = {features}.load(gl.DotOperandLayout(0, SUMS0, 2))")

        def wait(targets: Iterable[int], running: int) -> None:
            names = ", ".join(f"a{t}_{part}" for t in targets for part in range(len(self.parts)))
            self(f"{names} = warpgroup_mma_wait({running}, deps=[{names}])")

        fetch(0)
        for index, (number, target) in enumerate(factors):
            if index + 1 < len(factors):
                fetch(index + 1)
            for part, size in enumerate(self.parts):
                one, name = f"f{index}", f"a{target}_{part}"
                if part:
                    held = f"gl.DotOperandLayout(0, SUMS{part}, 2)"
                    one = f"gl.convert_layout({one}, {held}, assert_trivial=True)"
                rows_of = f"slice({2 * target * size}, {2 * size}, dim=0).permute((1, 0))"
                two = f"w{number}_{part}.index({stage}).{rows_of}"
                self(f"{name} = warpgroup_mma({one}, {two}, {name}, is_async=True)")
            if index and self.layout.batch > 1:
                # Not the last products, but those before them: their registers are free.
                wait([factors[index - 1][1]], len(self.parts))
        wait(range(self.layout.batch), 0)

    def consume(self) -> None:
        """The products of one tile after the other, and its outputs."""
        self._sum_layouts()
        self(f"""
            steps = {self.layout.chunks} * chunks
            mine = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
            all_steps = mine * steps
            for early in gl.static_range(STAGES):
                issue({self.weights}, ready, early, early % steps, early < all_steps, programs)
            step = 0
            power_of_weights = exponent(gl.load(w_largest))
        """)
        with self.block("for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):"):
            # Loaded long before it is needed: what the pixels of the tile were scaled by.
            self("""
                pixel = tile * BP + gl.arange(0, BP, layout=gl.SliceLayout(1, SUMS0))
                owner = gl.minimum(pixel, pixels - 1) // (height * width)
                largest = gl.load(x_largest + owner)
            """)
            self._zeros("BP")
            for there, run in itertools.groupby(
                range(self.layout.chunks), lambda chunk: self.layout.filled(chunk, self.pieces)
            ):
                # So many chunks of slots have features in these self.pieces.
                with self.block(f"for again in range(0, {len(list(run))} * chunks):"):
                    self("""
                        stage = step % STAGES
                        phase = step // STAGES & 1
                        mbarrier.wait(ready.index(stage), phase)
                        mbarrier.wait(full.index(stage), phase)
                    """)
                    rows = "z{}.index(stage).slice({} * BP, BP, dim=0)"
                    self._products("stage", rows, there)
                    later = "later % steps, later < all_steps"
                    self(f"""
                        mbarrier.arrive(empty.index(stage), count=1)
                        later = step + STAGES
                        issue({self.weights}, ready, stage, {later}, programs)
                        step += 1
                    """)
            self._outputs()

    def _larger(self) -> int:
        """By how many powers of two slots may be larger than the channels that they belong to.

        Those that wait in the output are divided by as much.
        """
        return math.ceil(math.log2(np.abs(self.layout.plan.analysis).sum(axis=1).max()))

    def _outputs(self) -> None:
        """The channels of a tile to the output; of the first half of a layer, its slots.

        Those wait where the channels of the same pixels and fields will be, for the second half.
        """
        layout, channels = self.layout, len(self.layout.plan.synthesis)
        for part, size in enumerate(self.parts):
            # A thread holds both columns of a field, of every target.
            for target in range(layout.batch):
                self(f"s, o = gl.split(gl.reshape(a{target}_{part}, [BP, {size}, 2]))")
                for name, slot in zip("so", layout.slots[2 * target :], strict=False):
                    if slot >= 0:
                        self(f"s{slot} = {name}")
            if layout.before:
                self(f"HELD{part}: gl.constexpr = s.type.layout")
                vector = min(len(layout.before), layout.vector)
                self._output_offsets(f"WAITING{part}", ["s"] * vector, part, channels)
                self(f"factor = two_to({2 * HEADROOM + self._larger()} - power)")
                for start in range(0, len(layout.before), vector):
                    self(f"""
                        r = gl.load(into + {start}, mask=known, other=0.0).to(gl.float32)
                        r = r * factor[:, None, None]
                        r = gl.reshape(r, [BP, {size}, {twos(vector)}])
                    """)
                    slots = layout.before[start : start + vector]
                    names = [f"s{slot}" if slot >= 0 else None for slot in slots]
                    self.split("r", names)
                    for name in filter(None, names):
                        self(f"{name} = gl.convert_layout({name}, HELD{part}, assert_trivial=True)")
            divided = 2 * HEADROOM
            if layout.half and not layout.before:
                outputs = [f"s{slot if slot >= 0 else layout.slots[0]}" for slot in layout.slots]
                divided += self._larger()
            else:
                transform_back(self, layout.plan.synthesis)
                outputs = [f"y{c}" for c in range(channels)]
            vector = min(power_of_two(len(outputs)), layout.vector)
            outputs += outputs[:1] * (-len(outputs) % vector)
            self._output_offsets(f"STORED{part}", outputs[:vector], part, channels)
            self(f"scale = two_to(power - {divided})")
            for start in range(0, len(outputs), vector):
                found = self._side_by_side(outputs[start : start + vector], size)
                self(f"found = ({found} * scale[:, None, None]).to(y.dtype.element_ty)")
                known = "known"
                if start + vector > channels:
                    known += f" & (element < {channels - start})[None, None, :]"
                self(f"gl.store(into + {start}, found, mask={known})")

    def _output_offsets(self, layout: str, names: Sequence[str], part: int, channels: int) -> None:
        """Where in the output threads find what they hold, for each pixel and field of a part.

        ``names`` are neighbours there; the layout of such numbers gets the name ``layout``.
        """
        pixel, field, element = (
            f"gl.SliceLayout({one}, gl.SliceLayout({two}, {layout}))"
            for one, two in ((1, 2), (0, 2), (0, 1))
        )
        self(f"""
            found = {self._side_by_side(names, self.parts[part])}
            {layout}: gl.constexpr = found.type.layout
            pixel = tile * BP + gl.arange(0, BP, layout={pixel})
            inside = pixel < pixels
            power = exponent(gl.convert_layout(largest, {pixel})) + power_of_weights
            o = gl.program_id(1) * {sum(self.parts)} + {sum(self.parts[:part])}
            o += gl.arange(0, {self.parts[part]}, layout={field})
            element = gl.arange(0, {len(names)}, layout={element})
            known = inside[:, None, None] & (o < out_fields)[None, :, None]
            channel = o[None, :, None] * {channels} + element[None, None, :]
            into = y + (pixel.to(gl.int64)[:, None, None] * y_dot + channel)
        """)

    def _side_by_side(self, names: Sequence[str], size: int) -> str:
        """Numbers of every pixel and output field, along a last axis."""
        return f"gl.reshape({self.joined(names)}, [BP, {size}, {len(names)}])"

    def accumulate(self) -> None:
        """The products of all tiles of a program, added up."""
        self._sum_layouts()
        self(f"""
            SUBS: gl.constexpr = BP // {ROWS}
            split = gl.program_id(2)
            splits = gl.num_programs(2)
            blocks = (tiles - split + splits - 1) // splits * SUBS
        """)

        def issue(stage: str, block: str) -> None:
            number = f"(split + ({block}) // SUBS * splits) * SUBS + ({block}) % SUBS"
            self(f"issue({self.weights}, ready, {stage}, {number}, {block} < blocks, programs)")

        with self.block("for early in gl.static_range(READY):"):
            issue("early", "early")
        self._zeros(f"{ROWS}")
        self("step = 0")
        self("block = 0")
        with self.block("for tile in range(split, tiles, splits):"):
            self("stage = step % STAGES")
            self("mbarrier.wait(full.index(stage), step // STAGES & 1)")
            with self.block("for sub in gl.static_range(SUBS):"):
                self("copied = block % READY")
                self("mbarrier.wait(ready.index(copied), block // READY & 1)")
                rows = f"z{{}}.index(stage).slice({{}} * BP + sub * {ROWS}, {ROWS}, dim=0)"
                self._products("copied", f"{rows}.permute((1, 0))", [0])
                self("later = block + READY")
                issue("copied", "later")
                self("block += 1")
            self("mbarrier.arrive(empty.index(stage), count=1)")
            self("step += 1")

    def store_sums(self, chunk: int, features: int) -> None:
        """A program adds its sums to those that it found in the images before these."""
        start = chunk * self.layout.length
        numbers = self.layout.unpadded[:, start : start + self.layout.length]
        found = [row[row >= 0] for row in numbers]  # of each target, one after the other
        self(f"""
            power = exponent(gl.load(x_largest)) + exponent(gl.load(g_largest))
            scale = two_to(power - {2 * HEADROOM})
            into = partial + split.to(gl.int64) * in_padded * out_padded * (2 * COUNT)
        """)
        for part, size in enumerate(self.parts):
            self(f"""
                row = gl.arange(0, {ROWS}, layout=gl.SliceLayout(1, SUMS{part}))
                field = gl.program_id(0) * {ROWS // features} + row // {features}
                number = row % {features}
                out = gl.arange(0, {2 * size}, layout=gl.SliceLayout(0, SUMS{part}))
                out += 2 * (gl.program_id(1) * {sum(self.parts)} + {sum(self.parts[:part])})
                base = into + out[None, :]
            """)
            # Some old sums are loaded while those before them are written.
            ahead = max(1, _AHEAD // size)
            for target in range(self.layout.batch + ahead):
                known = f"there{target} & (again > 0)"
                if target < self.layout.batch and found[target].size:
                    self(f"""
                        where = (field * COUNT + {found[target][0]} + number) * (out_padded * 2)
                        at{target} = base + where[:, None]
                        there{target} = (number < {found[target].size})[:, None]
                        old{target} = gl.load(at{target}, mask={known}, other=0.0)
                    """)
                now = target - ahead
                if now >= 0 and found[now].size:
                    self(f"gl.store(at{now}, a{now}_{part} * scale + old{now}, mask=there{now})")
