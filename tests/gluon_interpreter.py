"""An interpreter of the part of Gluon that the kernels for Hopper GPUs use, on the CPU.

Programs run one after the other. The partitions of a program are threads, one of which runs at a
time. Who goes on at each operation on shared memory or barriers is drawn from a seed, and so is
when a copy arrives and a product reads its operands. Where no partition can go on, that is a
deadlock.

What is right by luck is found, too. Every partition has a vector clock that barriers hand on, and
each number in shared memory knows who wrote and read it last. An access that no barrier orders
after them is a `Race`, whatever the seed. Stores reach products and copies only through
``fence_async_shared``, and other partitions only after ``thread_barrier``, since one thread of a
partition arrives for all. After ``warpgroup_mma_wait`` Triton lets the threads of a partition wait
for one another by itself; what a partition reads counts as read when it waited for all of its
products.

Whatever the sources do not use raises; so do addresses outside of a tensor, int32 that overflows,
and programs of one launch that meet in global memory.
"""

import inspect
import itertools
import math
import random
import re
import threading
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace

import numpy as np
import torch


class Race(RuntimeError):
    """Two accesses to memory without an order."""


class Deadlock(RuntimeError):
    """No partition can go on."""


class OutOfBounds(IndexError):
    """An address, a row or a stage that is not there."""


# --- Numbers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DType:
    name: str
    size: int
    holds: type
    """As which numpy computes with it: bfloat16, which it does not know, as rounded float32."""

    @property
    def floating(self):
        return np.issubdtype(self.holds, np.floating)


BOOL = DType("int1", 1, np.bool_)
INT16 = DType("int16", 2, np.int16)
INT32 = DType("int32", 4, np.int32)
INT64 = DType("int64", 8, np.int64)
FLOAT16 = DType("float16", 2, np.float16)
BFLOAT16 = DType("bfloat16", 2, np.float32)
FLOAT32 = DType("float32", 4, np.float32)
OF_TORCH = {
    torch.int32: INT32,
    torch.int64: INT64,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.float32: FLOAT32,
}


def rounded_to_bfloat16(array):
    found = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    return found.bfloat16().float().numpy().reshape(array.shape)


def plain(value):
    """The number of a scalar, which Python knows."""
    if isinstance(value, Value):
        if value.array.ndim:
            raise TypeError(f"expected one number; got a block {value.array.shape}")
        return value.array.item()
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number; got {value!r}")
    return value


class Value:
    """A number or a block of numbers of a program."""

    __array_ufunc__ = None

    def __init__(self, array, dtype):
        self.array, self.dtype = np.asarray(array, dtype=dtype.holds), dtype

    @property
    def type(self):
        return SimpleNamespace(layout=("the layout of", self.array.shape))

    @property
    def shape(self):
        return self.array.shape

    def to(self, dtype, bitcast=False):
        if bitcast:
            if dtype.size != self.dtype.size or BFLOAT16 in (dtype, self.dtype):
                raise TypeError(f"no bits of {self.dtype.name} as {dtype.name}")
            return Value(self.array.view(dtype.holds), dtype)
        if self.dtype.floating and not dtype.floating:
            raise NotImplementedError(f"{self.dtype.name} to {dtype.name}")
        with np.errstate(over="ignore"):
            array = self.array.astype(dtype.holds)
        if dtype is BFLOAT16:
            array = rounded_to_bfloat16(array)
        elif not dtype.floating and dtype is not BOOL and (array != self.array).any():
            raise OverflowError(f"{self.dtype.name} beyond {dtype.name}")
        return Value(array, dtype)

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        if any(k not in (None, slice(None)) for k in keys):
            raise NotImplementedError(f"only new axes; got {key!r}")
        if sum(k is not None for k in keys) != self.array.ndim:
            raise IndexError(f"{key!r} of a block {self.array.shape}")
        return Value(self.array[key], self.dtype)

    def __index__(self):
        if self.dtype.floating:
            raise TypeError(f"expected an integer; got {self.dtype.name}")
        return plain(self)

    def __bool__(self):
        raise TypeError("a kernel cannot branch on what is known when it runs")

    def _with(self, other):
        """Both arrays, and their common dtype."""
        if isinstance(other, bool) or not isinstance(other, Value | int | float):
            return NotImplemented
        if not isinstance(other, Value):
            dtype = self.dtype
            if isinstance(other, float) and not dtype.floating:
                raise NotImplementedError(f"{dtype.name} with {other!r}")
            if isinstance(other, int) and not dtype.floating and abs(other) >= 2**31:
                dtype = INT64
            return self.array, np.asarray(other, dtype=dtype.holds), dtype
        if self.dtype.floating != other.dtype.floating:
            raise NotImplementedError(f"{self.dtype.name} with {other.dtype.name}")
        if self.dtype.floating and self.dtype is not other.dtype:
            raise NotImplementedError(f"{self.dtype.name} with {other.dtype.name}")
        if self.array.ndim and other.array.ndim and self.array.ndim != other.array.ndim:
            raise ValueError(f"blocks {self.array.shape} and {other.array.shape}")
        dtype = max(self.dtype, other.dtype, key=lambda d: d.size)
        return self.array, other.array, dtype


def _whole(operation, one, other, dtype):
    """In 64 bits, to see what 32 do not hold."""
    if dtype.floating:
        with np.errstate(all="ignore"):
            found = operation(one.astype(dtype.holds), other.astype(dtype.holds))
        return Value(rounded_to_bfloat16(found) if dtype is BFLOAT16 else found, dtype)
    found = np.asarray(operation(one.astype(np.int64), other.astype(np.int64)))
    if dtype is INT32 and ((found > 2**31 - 1) | (found < -(2**31))).any():
        raise OverflowError(f"{operation.__name__} of int32 gives {found.min()} … {found.max()}")
    return Value(found, dtype)


def _quotient(one, other):
    """Towards zero, as C has it."""
    if (other == 0).any():
        raise ZeroDivisionError("integer division by zero in a kernel")
    return np.sign(one) * np.sign(other) * (np.abs(one) // np.abs(other))


def _remainder(one, other):
    return one - _quotient(one, other) * other


def _integer_only(operation):
    def run(one, other, dtype):
        if dtype.floating:
            raise NotImplementedError(f"{operation.__name__} of {dtype.name}")
        return _whole(operation, one, other, dtype)

    return run


def _compared(operation):
    return lambda one, other, dtype: Value(operation(one, other), BOOL)


def _bits(operation):
    def run(one, other, dtype):
        if dtype.floating:
            raise NotImplementedError(f"{operation.__name__} of {dtype.name}")
        return Value(operation(one.astype(dtype.holds), other.astype(dtype.holds)), dtype)

    return run


_OPERATIONS = {
    "add": lambda *given: _whole(np.add, *given),
    "sub": lambda *given: _whole(np.subtract, *given),
    "mul": lambda *given: _whole(np.multiply, *given),
    "floordiv": _integer_only(_quotient),
    "mod": _integer_only(_remainder),
    "and": _bits(np.bitwise_and),
    "xor": _bits(np.bitwise_xor),
    "rshift": _bits(np.right_shift),
    "lshift": _integer_only(np.left_shift),
    "lt": _compared(np.less),
    "gt": _compared(np.greater),
    "eq": _compared(np.equal),
}


def _method(run, turned):
    def method(self, other):
        given = self._with(other)
        if given is NotImplemented:
            return given
        one, two, dtype = given
        return run(two, one, dtype) if turned else run(one, two, dtype)

    return method


for _name, _run in _OPERATIONS.items():
    setattr(Value, f"__{_name}__", _method(_run, False))
    if _name not in ("lt", "gt", "eq"):
        setattr(Value, f"__r{_name}__", _method(_run, True))
Value.__hash__ = None


def number(value, dtype=INT32):
    return value if isinstance(value, Value) else Value(value, dtype)


# --- Global memory ---------------------------------------------------------------------------


class Storage:
    """Memory of a tensor, and which programs of a launch read and wrote each two bytes of it."""

    NOBODY, SEVERAL = -1, -2

    def __init__(self, size):
        self.reader = np.full(-(-size // 2), self.NOBODY, dtype=np.int64)
        self.writer = self.reader.copy()

    def read(self, halves, program):
        strangers = self.writer[halves]
        if ((strangers != self.NOBODY) & (strangers != program)).any():
            raise Race(f"program {program} reads what another one of the launch writes")
        before = self.reader[halves]
        alone = (before == self.NOBODY) | (before == program)
        self.reader[halves] = np.where(alone, program, self.SEVERAL)

    def write(self, halves, program):
        if len(np.unique(halves)) != halves.size:
            raise Race(f"program {program} stores two numbers at one address")
        for seen in (self.reader[halves], self.writer[halves]):
            if ((seen != self.NOBODY) & (seen != program)).any():
                raise Race(f"program {program} writes what another one of the launch uses")
        self.writer[halves] = program


class Pointer:
    """Addresses in a tensor: whole numbers of its elements from its first one on."""

    def __init__(self, flat, dtype, storage, first, offsets):
        self.flat, self.element, self.storage = flat, dtype, storage
        self.first, self.offsets = first, offsets

    @staticmethod
    def to(tensor, storage):
        extent = 1 + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        flat = torch.as_strided(tensor, (extent if tensor.numel() else 0,), (1,))
        dtype = OF_TORCH[tensor.dtype]
        flat = (flat.view(torch.int16) if dtype is BFLOAT16 else flat).numpy()
        first = tensor.storage_offset() * dtype.size // 2
        return Pointer(flat, dtype, storage, first, Value(0, INT64))

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.element)

    def __add__(self, offsets):
        if not isinstance(offsets, int) and offsets.dtype.floating:
            raise TypeError(f"an address plus {offsets.dtype.name}")
        found = self.offsets + offsets
        return Pointer(self.flat, self.element, self.storage, self.first, found)

    def _places(self, mask, what):
        places = self.offsets.array
        kept = np.ones_like(places, dtype=bool)
        if mask is not None:
            kept = np.broadcast_to(mask.array, places.shape)
        there = places[kept]
        if ((there < 0) | (there >= self.flat.size)).any():
            raise OutOfBounds(
                f"a {what} at {there.min()} … {there.max()} of {self.flat.size} numbers"
            )
        width = self.element.size // 2
        halves = self.first + there[:, None] * width + np.arange(width)
        return kept, there, halves.ravel()

    def load(self, mask, other, program):
        kept, there, halves = self._places(mask, "load")
        self.storage.read(halves, program)
        if not kept.all() and other is None:
            raise ValueError("a load with a mask needs what to put elsewhere")
        found = np.full(kept.shape, 0 if other is None else other, dtype=self.element.holds)
        values = self.flat[there]
        if self.element is BFLOAT16:
            values = (values.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
        found[kept] = values
        return Value(found, self.element)

    def store(self, value, mask, program):
        if value.dtype is not self.element:
            raise TypeError(f"a store of {value.dtype.name} to {self.element.name}")
        kept, there, halves = self._places(mask, "store")
        self.storage.write(halves, program)
        values = np.broadcast_to(value.array, kept.shape)[kept]
        if self.element is BFLOAT16:
            values = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
            values = values.view(np.int16)
        self.flat[there] = values


class Rows:
    """What a kernel sees of a `TensorDescriptor`: rows of a matrix, copied in boxes."""

    def __init__(self, descriptor, pointer):
        self.shape = tuple(descriptor.shape)
        self.block_shape, self.layout = tuple(descriptor.block_shape), descriptor.layout
        self.pointer = pointer
        if pointer.element is not FLOAT16 or tuple(descriptor.strides) != (self.shape[1], 1):
            raise NotImplementedError("only rows of float16 one after the other")

    def box(self, corner, program):
        start, left = corner
        rows, columns = self.block_shape
        if left != 0 or columns != self.shape[1] or not 0 <= start <= self.shape[0] - rows:
            raise OutOfBounds(f"{self.block_shape} from {corner} on of {self.shape}")
        offsets = Value(start * columns + np.arange(rows * columns).reshape(rows, columns), INT64)
        return (self.pointer + offsets).load(None, None, program).array


# --- Partitions, and memory that they share ----------------------------------------------------


class _Over(BaseException):
    """Another partition failed: this one ends, too."""


@dataclass(eq=False)
class Partition:
    name: str
    number: int
    clock: np.ndarray
    """How far it knows every agent: see `Machine.agents`."""
    warps: int = 4
    stores: int = 0
    fenced: int = 0
    """As many of its stores as copies and products can see."""
    published: tuple[int, int] = (0, 0)
    """Stores, and those that were fenced, when its threads last waited for one another."""
    products: list = field(default_factory=list)
    issued: int = 0
    resume: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits: tuple | None = None
    over: bool = False


class Machine:
    """One program: its partitions, barriers and copies under way."""

    def __init__(self, program, grid, warps, schedule):
        self.program, self.grid, self.warps = program, grid, warps
        self.number = int(np.ravel_multi_index(program, grid))
        self.random = schedule.random
        self.restless = schedule.restless
        self.agents = itertools.count()
        self.barriers, self.copies, self.partitions = [], [], []
        self.failure = None
        self.bytes = 0
        self.length = 64
        self.main = self.partition("main", warps)
        self.current = self.main

    def agent(self):
        """A new line in all clocks."""
        found = next(self.agents)
        if found >= self.length:
            raise NotImplementedError(f"more than {self.length} agents")
        return found

    def partition(self, name, warps):
        # Three agents: its stores, those of them that are fenced, and its products.
        number = self.agent()
        self.agent(), self.agent()
        clock = self.current.clock.copy() if number else np.zeros(self.length, dtype=np.int64)
        return Partition(name, number, clock, warps)

    def specialise(self, parts):
        """Run functions at the same time, each (name, function, arguments, warps)."""
        publish(self.main)
        self.main.clock[self.main.number : self.main.number + 2] = self.main.published
        self.partitions = [self.partition(name, warps) for name, _, _, warps in parts]
        threads = [
            threading.Thread(target=self._run, args=(partition, function, arguments), daemon=True)
            for partition, (_, function, arguments, _) in zip(self.partitions, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._next(None)
        for thread in threads:
            thread.join()
        self.current = self.main
        if self.failure is not None:
            raise self.failure

    def _run(self, partition, function, arguments):
        partition.resume.acquire()
        try:
            if self.failure is None:
                function(*arguments)
                if partition.products:
                    raise Race(f"{partition.name} ends with products under way")
        except _Over:
            pass
        except BaseException as error:
            self._fail(error)
        partition.over = True
        if self.failure is None:
            self._next(partition)

    def _can_go(self, partition):
        if partition.over:
            return False
        if partition.waits is None:
            return True
        barrier, parity = partition.waits
        return barrier.phase & 1 != parity

    def _next(self, partition):
        """Hand over to whoever is drawn; copies arrive in between."""
        try:
            chosen = self._drawn()
        except Exception as error:
            self._fail(error)
            if partition is None or partition.over:
                return
            raise _Over from None
        if chosen in (None, partition):
            return
        self.current = chosen
        chosen.resume.release()
        if partition is not None and not partition.over:
            partition.resume.acquire()
            if self.failure is not None:
                raise _Over

    def _drawn(self):
        """A partition that can go on; nothing where all are over."""
        while True:
            ready = [other for other in self.partitions if self._can_go(other)]
            if not ready and not self.copies:
                break
            drawn = self.random.randrange(len(ready) + len(self.copies))
            if drawn < len(ready):
                return ready[drawn]
            self.copies.pop(drawn - len(ready))()
        stuck = [other for other in self.partitions if not other.over]
        if stuck:
            raise Deadlock("; ".join(self._why(other) for other in stuck))
        for barrier in self.barriers:
            if all(partition.clock[barrier.agent] < barrier.last for partition in self.partitions):
                raise Race(f"a program ends and nobody waited for the copies to {barrier.name}")
        return None

    def _fail(self, error):
        self.failure = self.failure or error
        for partition in self.partitions:
            partition.resume.release()

    @staticmethod
    def _why(partition):
        barrier, parity = partition.waits
        return (
            f"{partition.name} waits for phase {parity} of {barrier.name}, which is in phase"
            f" {barrier.phase} with {barrier.missing} to arrive and {barrier.bytes} bytes to come"
        )

    def pause(self):
        """Before an operation that others can see."""
        partition = self.current
        if self.partitions and self.random.random() < self.restless:
            self._next(partition)
        return partition

    def wait(self, barrier, parity):
        partition = self.pause()
        if parity not in (0, 1):
            raise ValueError(f"phase {parity}")
        partition.waits = (barrier, parity)
        if not self._can_go(partition):
            if not self.partitions:
                raise Deadlock(self._why(partition))
            self._next(partition)
        partition.waits = None
        np.maximum(partition.clock, barrier.done, out=partition.clock)


def publish(partition):
    """The threads of a partition wait for one another."""
    partition.published = (partition.stores, partition.fenced)


def released(partition):
    """What others know when one thread of a partition has told them."""
    found = partition.clock.copy()
    found[partition.number : partition.number + 2] = partition.published
    return found


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all bytes that are expected, too."""

    def __init__(self, name, machine, count):
        self.name, self.count, self.agent = name, count, machine.agent()
        self.phase, self.missing, self.bytes = 0, count, 0
        self.fenced = False
        """Whether copies know of it."""
        self.last = 0
        """The phase, counted from one, of the last copy."""
        self.done = np.zeros(machine.length, dtype=np.int64)
        self.coming = self.done.copy()

    def arrive(self, clock, count):
        if not 1 <= count <= self.missing:
            raise Deadlock(f"{count} arrive at {self.name}, where {self.missing} are missing")
        np.maximum(self.coming, clock, out=self.coming)
        self.missing -= count
        self._finish()

    def _finish(self):
        if self.missing == 0 and self.bytes == 0:
            self.done = self.coming
            self.done[self.agent] = self.phase + 1  # all copies of this phase
            self.coming = self.done.copy()
            self.phase += 1
            self.missing = self.count

    def complete(self, size):
        self.bytes -= size
        self._finish()


SHARED_BYTES = 227 << 10
"""What a program on an H200 can have."""


class Buffer:
    """Shared memory: NaN until somebody writes, and who wrote and read each of its numbers."""

    def __init__(self, machine, dtype, shape):
        size = math.prod(shape)
        self.machine, self.dtype = machine, dtype
        poison = np.nan if dtype.floating else 0
        self.numbers = np.full(size, poison, dtype=dtype.holds)
        self.writer = np.full(size, -1, dtype=np.int64)
        self.stored = np.zeros(size, dtype=np.int64)
        """When: the writer's own time."""
        self.readers = {}
        """For each agent that makes products, the last access that reads each number."""

    def write(self, places, clock, agent, time):
        known = clock[np.maximum(self.writer[places], 0)] >= self.stored[places]
        if not (known | (self.writer[places] < 0)).all():
            raise Race("shared memory is written before what was there was ordered")
        for reader, last in self.readers.items():
            if (last[places] > clock[reader]).any():
                raise Race("shared memory is written while somebody may still read it")
        self.writer[places], self.stored[places] = agent, time


class Shared:
    """A view of shared memory."""

    def __init__(self, buffer, dtype, where):
        self.buffer, self.dtype, self.where = buffer, dtype, where

    def _view(self, where):
        return Shared(self.buffer, self.dtype, where)

    @property
    def shape(self):
        return self.where.shape

    def index(self, number):
        number = plain(number)
        if not 0 <= number < self.where.shape[0]:
            raise OutOfBounds(f"stage {number} of {self.where.shape[0]}")
        return self._view(self.where[number])

    def slice(self, start, length, dim):
        if not 0 <= start <= start + length <= self.where.shape[dim]:
            raise OutOfBounds(f"{length} from {start} on of {self.where.shape[dim]}")
        return self._view(
            np.moveaxis(np.moveaxis(self.where, dim, 0)[start : start + length], 0, dim)
        )

    def permute(self, order):
        return self._view(self.where.transpose(order))

    def _reinterpret(self, dtype, shape, layout):
        if (self.dtype, dtype) != (FLOAT16, INT32) or self.where.size != 2 * math.prod(shape):
            raise NotImplementedError(f"{self.dtype.name} {self.shape} as {dtype.name} {shape}")
        # Words keep the first of their two halves: the swizzle of both views is the same.
        return Shared(self.buffer, dtype, self.where.ravel()[::2].reshape(shape))

    def _places(self):
        places = self.where.ravel()
        if self.dtype is INT32:
            places = np.stack([places, places + 1], axis=-1).ravel()
        return places

    def store(self, value):
        machine = self.buffer.machine
        partition = machine.pause()
        if value.dtype is not self.dtype or value.shape != self.shape:
            raise TypeError(f"{value.dtype.name} {value.shape} to {self.dtype.name} {self.shape}")
        places = self._places()
        partition.stores += 1
        clock = partition.clock.copy()
        clock[partition.number] = partition.stores  # its own stores it knows
        self.buffer.write(places, clock, partition.number, partition.stores)
        self.buffer.numbers[places] = np.ascontiguousarray(value.array).view(np.float16).ravel()

    def load(self, layout):
        """Into registers, for a product."""
        if layout[0] != "DotOperandLayout":
            raise NotImplementedError(f"a load from shared memory as {layout[0]}")
        partition = self.buffer.machine.pause()
        partition.issued += 1
        self.read(partition)
        return Value(self.buffer.numbers[self.where].copy(), self.dtype)

    def filled(self, array, clock, agent, time):
        """By a copy."""
        places = self._places()
        self.buffer.write(places, clock, agent, time)
        self.buffer.numbers[places] = array.ravel()

    def read(self, partition):
        """That it may be read, by a product or a load, until all products are waited for."""
        if self.dtype is not FLOAT16:
            raise NotImplementedError(f"a product of {self.dtype.name}")
        places, buffer = self._places(), self.buffer
        writer = buffer.writer[places]
        if (writer < 0).any():
            raise Race("shared memory is read that nobody wrote")
        # What a partition stored counts when it was fenced, which is the agent after its own.
        partitions = np.isin(
            writer, [t.number for t in (buffer.machine.main, *buffer.machine.partitions)]
        )
        if (partition.clock[writer + partitions] < buffer.stored[places]).any():
            raise Race("shared memory is read that may not be written yet")
        last = buffer.readers.setdefault(
            partition.number + 2, np.zeros(buffer.numbers.size, np.int64)
        )
        last[places] = partition.issued

    def now(self):
        return self.buffer.numbers[self.where].astype(np.float32)


class Product:
    """A sum of products that is under way: nothing can be done with it but to add another."""

    def __init__(self, one, other, total, early):
        self.operands, self.total, self.result = (one, other), total, None
        if early:
            self.finish()

    def finish(self):
        """The sum, which reads its operands as they are now unless it was made before."""
        if self.result is None:
            start = self.total.finish() if isinstance(self.total, Product) else self.total.array
            one, other = (
                operand.now() if isinstance(operand, Shared) else operand.array.astype(np.float32)
                for operand in self.operands
            )
            with np.errstate(all="ignore"):
                self.result = start + one @ other
        return self.result


# --- The language ----------------------------------------------------------------------------


def halves(*arrays):
    return [np.ascontiguousarray(array).view(np.float16) for array in arrays]


def _asm_sum(found, one, other):
    one, other = halves(one, other)
    return one + other if found["name"] == "add" else one - other


def _asm_scaled(found, one, *other):
    constant = np.array([int(found["bits"], 16)], dtype=np.uint32).view(np.float16)
    (one,) = halves(one)
    total = one.astype(np.float64) * np.resize(constant, one.shape[-1]).astype(np.float64)
    if other:  # rounded once
        total = total + halves(*other)[0].astype(np.float64)
    return total.astype(np.float16)


def _asm_bytes(found, one, other):
    selector = int(found["bits"], 16)
    source = np.stack([one, other], axis=-1).view(np.uint8)  # bytes 0 … 7 of each pair
    chosen = [selector >> 4 * n & 15 for n in range(4)]
    if max(chosen) > 7 or selector >> 16:
        raise NotImplementedError(f"prmt with {selector:#x}")
    return np.ascontiguousarray(source[..., chosen])


_CONSTANT = r"\{ \.reg \.b32 c; mov\.b32 c, (?P<bits>0x[0-9a-f]{1,8}); "
_ASSEMBLY = [
    (re.compile(r"(?P<name>add|sub)\.f16x2 \$0, \$1, \$2;"), 2, _asm_sum),
    (re.compile(_CONSTANT + r"mul\.f16x2 \$0, \$1, c; \}"), 1, _asm_scaled),
    (re.compile(_CONSTANT + r"fma\.rn\.f16x2 \$0, \$1, c, \$2; \}"), 2, _asm_scaled),
    (re.compile(r"prmt\.b32 \$0, \$1, \$2, (?P<bits>0x[0-9a-f]{1,4});"), 2, _asm_bytes),
]


def inline_asm_elementwise(code, registers, operands, dtype, is_pure, pack):
    if (dtype, is_pure, pack) != (INT32, True, 1) or any(o.dtype is not INT32 for o in operands):
        raise NotImplementedError("only words of 32 bits, one at a time")
    for pattern, count, run in _ASSEMBLY:
        found = pattern.fullmatch(code)
        if found and len(operands) == count and registers == "=r" + ",r" * count:
            shape = operands[0].shape
            if any(o.shape != shape for o in operands) or not shape:
                raise ValueError(f"operands of shapes {[o.shape for o in operands]}")
            with np.errstate(all="ignore"):
                result = run(found, *(np.ascontiguousarray(o.array) for o in operands))
            return Value(result.view(np.int32).reshape(shape), INT32)
    raise NotImplementedError(f"unknown instruction {code!r} with {registers!r}")


def _power_of_two(*lengths):
    for n in lengths:
        if n < 1 or n & (n - 1):
            raise ValueError(f"a block has lengths that are powers of two; got {n}")


def _arange(start, end, layout=None):
    _power_of_two(end - start)
    return Value(np.arange(start, end), INT32)


def _zeros(shape, dtype, layout=None):
    _power_of_two(*shape)
    return Value(np.zeros(shape), dtype)


def _where(condition, one, other):
    if condition.dtype is not BOOL:
        raise TypeError(f"expected a condition; got {condition.dtype.name}")
    pair = [v for v in (one, other) if isinstance(v, Value)]
    dtype = max((v.dtype for v in pair), key=lambda d: d.size) if pair else INT32
    if {v.dtype.floating for v in pair} == {True, False}:
        raise NotImplementedError("a choice between integers and others")
    one, other = (v.array if isinstance(v, Value) else v for v in (one, other))
    return Value(np.where(condition.array, one, other), dtype)


def _extreme(operation):
    def run(one, other):
        one, other = (one, other) if isinstance(one, Value) else (other, one)
        a, b, dtype = one._with(other)
        return _whole(operation, a, b, dtype)

    return run


def _reshape(value, shape):
    _power_of_two(*shape)
    return Value(value.array.reshape(shape), value.dtype)


def _join(one, other):
    if one.shape != other.shape or one.dtype is not other.dtype:
        raise ValueError(f"{one.shape} and {other.shape} side by side")
    return Value(np.stack([one.array, other.array], axis=-1), one.dtype)


def _split(value):
    if value.shape[-1] != 2:
        raise ValueError(f"expected pairs; got {value.shape}")
    return tuple(Value(value.array[..., n], value.dtype) for n in range(2))


def _convert_layout(value, layout, assert_trivial=False):
    return value


def _range(*bounds):
    for n in range(*(plain(bound) for bound in bounds)):
        yield number(n)


class Schedule:
    """What chance decides, from a seed; how often another partition goes on, too."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.restless = self.random.choice([0.05, 0.5, 1.0])


class Kernel:
    """A function of the sources; the one that is launched is called ``kernel[grid](…)``."""

    def __init__(self, gluon, function, do_not_specialize=()):
        self.gluon, self.function = gluon, function
        self.free = set(do_not_specialize)
        parameters = inspect.signature(function).parameters
        self.names = list(parameters)
        # As text where the module that reads the source postpones annotations.
        constants = ("gl.constexpr", gluon.gl.constexpr)
        self.constant = [p.annotation in constants for p in parameters.values()]
        if not self.free <= set(self.names):
            raise NameError(f"no {self.free - set(self.names)} among {self.names}")

    def __call__(self, *arguments):
        if len(arguments) != len(self.names):
            raise TypeError(f"{self.function.__name__} takes {self.names}")
        for name, constant, value in zip(self.names, self.constant, arguments, strict=True):
            if constant and isinstance(value, Value):
                raise TypeError(f"{name} of {self.function.__name__} has to be a constant")
        return self.function(*arguments)

    def __getitem__(self, grid):
        def launch(*given, num_warps, **constants):
            arguments = dict(zip(self.names, given, strict=False)) | constants
            if len(given) + len(constants) != len(self.names) or len(arguments) != len(self.names):
                raise TypeError(f"{self.function.__name__} takes {self.names}")
            self.gluon.launched = (grid, given, {"num_warps": num_warps, **constants})
            storages = {}
            seen = [
                arguments[name] if constant else self._argument(name, arguments[name], storages)
                for name, constant in zip(self.names, self.constant, strict=True)
            ]
            for program in np.ndindex(*grid):
                self.gluon.run(self, seen, program, grid, num_warps)

        return launch

    def _argument(self, name, value, storages):
        def pointer(tensor):
            memory = tensor.untyped_storage()
            storage = storages.setdefault(memory.data_ptr(), None)
            if storage is None:
                storage = storages[memory.data_ptr()] = Storage(memory.nbytes())
            return Pointer.to(tensor, storage)

        if isinstance(value, torch.Tensor):
            return pointer(value)
        if isinstance(value, int):
            if value == 1 and name not in self.free:
                return 1  # Triton makes a constant of it
            return Value(value, INT32 if abs(value) < 2**31 else INT64)
        return Rows(value, pointer(value.base))


class Gluon:
    """The names that the sources know. ``launches`` counts programs by the kernel's name."""

    def __init__(self, seed=0):
        self.schedule = Schedule(seed)
        self.launches = {}
        self.launched = None
        """The last launch: grid, arguments, options."""
        self.machine = None
        layouts = (
            "BlockedLayout",
            "SliceLayout",
            "NVMMASharedLayout",
            "NVMMADistributedLayout",
            "DotOperandLayout",
        )
        self.gl = SimpleNamespace(
            constexpr=object(),
            int32=INT32,
            int64=INT64,
            float16=FLOAT16,
            float32=FLOAT32,
            arange=_arange,
            zeros=_zeros,
            where=_where,
            minimum=_extreme(np.minimum),
            maximum=_extreme(np.maximum),
            reshape=_reshape,
            permute=lambda value, order: Value(value.array.transpose(order), value.dtype),
            join=_join,
            split=_split,
            convert_layout=_convert_layout,
            inline_asm_elementwise=inline_asm_elementwise,
            static_range=range,
            program_id=lambda axis: number(self.machine.program[axis]),
            num_programs=lambda axis: number(self.machine.grid[axis]),
            num_warps=lambda: self.machine.current.warps,
            load=self._load,
            store=self._store,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialise,
            **{name: lambda *parts, rank=None, name=name: (name, parts) for name in layouts},
        )
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=self._init,
            arrive=self._arrive,
            expect=self._expect,
            wait=self._wait,
        )
        self.tma = SimpleNamespace(async_copy_global_to_shared=self._copy)

    def run(self, kernel, arguments, program, grid, warps):
        name = kernel.function.__name__
        self.launches[name] = self.launches.get(name, 0) + 1
        self.machine = Machine(program, grid, warps, self.schedule)
        self.made = {}
        kernel(*arguments)

    def jit(self, function=None, do_not_specialize=()):
        if function is None:
            return lambda function: Kernel(self, function, do_not_specialize)
        return Kernel(self, function)

    def borrowed(self, function):
        """A function of Triton's as one of Gluon's, which has the same words."""
        return FunctionType(function.__code__, {"tl": self.gl}, function.__name__)

    def names(self, **borrowed):
        """For the text of a kernel."""
        return {
            "gluon": SimpleNamespace(jit=self.jit),
            "gl": self.gl,
            "mbarrier": self.mbarrier,
            "tma": self.tma,
            "range": _range,
            "fence_async_shared": self._fence,
            "thread_barrier": self._thread_barrier,
            "warpgroup_mma": self._product,
            "warpgroup_mma_wait": self._product_wait,
            **{name: self.borrowed(function) for name, function in borrowed.items()},
        }

    def _load(self, pointer, mask=None, other=None):
        return pointer.load(mask, other, self.machine.number)

    def _store(self, pointer, value, mask=None):
        pointer.store(value, mask, self.machine.number)

    def _allocate(self, dtype, shape, layout):
        if dtype is INT64 and layout != "barriers":
            raise NotImplementedError("int64 in shared memory that is no barrier")
        size = math.prod(shape)
        self.machine.bytes += size * dtype.size
        if self.machine.bytes > SHARED_BYTES:
            raise MemoryError(f"{self.machine.bytes} bytes of shared memory of {SHARED_BYTES}")
        buffer = Buffer(self.machine, dtype, shape)
        return Shared(buffer, dtype, np.arange(size).reshape(shape))

    def _specialise(self, parts, warps, registers):
        if not len(parts) == len(warps) + 1 == len(registers) + 1:
            raise ValueError(f"{len(parts)} functions, {warps} warps, {registers} registers")
        names = [f"{function.function.__name__} {n}" for n, (function, _) in enumerate(parts)]
        many = [self.machine.warps, *warps]
        self.machine.specialise(
            [(name, *part, count) for name, part, count in zip(names, parts, many, strict=True)]
        )

    def _barrier(self, view):
        if view.dtype is not INT64 or view.shape != (1,):
            raise TypeError(f"expected one barrier; got {view.dtype.name} {view.shape}")
        key = (id(view.buffer), int(view.where[0]))
        if key not in self.made:
            raise RuntimeError("a barrier is used that was not initialised")
        return self.made[key][1]

    def _init(self, view, count):
        key = (id(view.buffer), int(view.where[0]))
        if key in self.made or self.machine.partitions:
            raise RuntimeError("a barrier is initialised once, before there are partitions")
        several = {id(buffer): None for buffer, _ in self.made.values()} | {key[0]: None}
        name = f"barrier {list(several).index(key[0])}.{key[1]}"
        barrier = Barrier(name, self.machine, count)
        self.made[key] = (view.buffer, barrier)
        self.machine.barriers.append(barrier)

    def _arrive(self, view, *, count=1, pred=True):
        barrier, partition = self._barrier(view), self.machine.pause()
        if plain(pred):
            barrier.arrive(released(partition), count)

    def _expect(self, view, size, pred=True):
        barrier, partition = self._barrier(view), self.machine.pause()
        if plain(pred):
            barrier.bytes += size
            barrier.arrive(released(partition), 1)

    def _wait(self, view, phase):
        self.machine.wait(self._barrier(view), plain(phase))

    def _copy(self, rows, corner, view, into, pred=True):
        barrier, partition = self._barrier(view), self.machine.pause()
        corner = tuple(plain(place) for place in corner)
        if into.shape != rows.block_shape or into.dtype is not FLOAT16:
            raise TypeError(f"a copy of {rows.block_shape} to {into.dtype.name} {into.shape}")
        if not plain(pred):
            return
        if not barrier.fenced:
            raise Race(f"a copy may arrive at {barrier.name} before that is initialised")
        clock, time, machine = released(partition), barrier.phase + 1, self.machine
        barrier.last = time

        def arrives():
            into.filled(rows.box(corner, machine.number), clock, barrier.agent, time)
            barrier.complete(2 * math.prod(rows.block_shape))

        machine.copies.append(arrives)

    def _fence(self):
        partition = self.machine.pause()
        partition.fenced = partition.stores
        for barrier in self.machine.barriers:
            barrier.fenced |= partition is self.machine.main

    def _thread_barrier(self):
        publish(self.machine.pause())

    def _product(self, one, other, total, *, is_async):
        partition = self.machine.pause()
        (rows, inner), (same, columns) = one.shape, other.shape
        if (
            rows != 64
            or inner != same
            or inner % 16
            or columns % 8
            or columns > 256
            or not is_async
            or not isinstance(other, Shared)
            or one.dtype is not FLOAT16
        ):
            raise NotImplementedError(f"a product of {one.shape} and {other.shape}")
        if isinstance(total, Value) and (total.dtype, total.shape) != (FLOAT32, (rows, columns)):
            raise TypeError(f"{total.dtype.name} {total.shape} plus a product")
        if isinstance(total, Product) and total not in partition.products:
            raise Race("a product is added to one that was waited for")
        partition.issued += 1
        for operand in (one, other):
            if isinstance(operand, Shared):
                operand.read(partition)
        found = Product(one, other, total, self.schedule.random.random() < 0.5)
        if isinstance(total, Product):
            # Products of a partition are made in the order in which they are asked for.
            partition.products.remove(total)
        partition.products.append(found)
        return found

    def _product_wait(self, outstanding, deps):
        partition = self.machine.pause()
        over = partition.products[: max(0, len(partition.products) - outstanding)]
        if {id(dep) for dep in deps if isinstance(dep, Product)} != set(map(id, over)):
            raise Race("a wait for other products than those under way")
        partition.products = partition.products[len(over) :]
        if not partition.products:
            partition.clock[partition.number + 2] = partition.issued
        publish(partition)
        found = tuple(
            Value(dep.finish(), FLOAT32) if isinstance(dep, Product) else dep for dep in deps
        )
        return found if len(found) > 1 else found[0]
