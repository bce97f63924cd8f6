"""The kernels for Hopper GPUs without one: run by `gluon_interpreter`, and that is tested here."""

import numpy as np
import pytest
import torch

from gluon_interpreter import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    Deadlock,
    Gluon,
    OutOfBounds,
    Race,
    Value,
    inline_asm_elementwise,
)
from interpreting import pass_interpreted


@pytest.mark.first
def test_interpreted():
    pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")
    pass_interpreted("hopper_checks.py")


@pytest.mark.slow
def test_larger_groups_interpreted():
    pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")
    pass_interpreted("hopper_checks.py", marked="slow", least=4)


def asm(code, *words):
    """An instruction on words of two halves each, which come back as numbers."""
    operands = [Value(np.array(word, np.float16).view(np.int32), INT32) for word in words]
    registers = "=r" + ",r" * len(words)
    found = inline_asm_elementwise(code, registers, operands, dtype=INT32, is_pure=True, pack=1)
    return found.array.view(np.float16).tolist()


CONSTANT = "{ .reg .b32 c; mov.b32 c, 0xc0003c00;"  # 1 below, −2 above
INSTRUCTIONS = [
    ("add.f16x2 $0, $1, $2;", [5.0, 9.0]),
    ("sub.f16x2 $0, $1, $2;", [-3.0, -5.0]),
    (CONSTANT + " fma.rn.f16x2 $0, $1, c, $2; }", [5.0, 3.0]),
    ("prmt.b32 $0, $1, $2, 0x5410;", [1.0, 4.0]),
    ("prmt.b32 $0, $1, $2, 0x7632;", [2.0, 7.0]),
    ("prmt.b32 $0, $1, $2, 0x1076;", [7.0, 1.0]),
]


@pytest.mark.parametrize(("code", "wanted"), INSTRUCTIONS)
def test_instructions_on_two_halves(code, wanted):
    assert asm(code, [1.0, 2.0], [4.0, 7.0]) == wanted


def test_products_with_two_constants_and_sums_that_are_rounded_once():
    assert asm(CONSTANT + " mul.f16x2 $0, $1, c; }", [3.0, 5.0]) == [3.0, -10.0]
    # (1 + 3·2^−10)² − 1, of which a product that was rounded first would keep 6·2^−10 alone.
    fma = "{ .reg .b32 c; mov.b32 c, 0x3c033c03; fma.rn.f16x2 $0, $1, c, $2; }"
    one = 1 + 3 * 2**-10
    assert asm(fma, [one, one], [-1.0, -1.0]) == [6 * 2**-10 + 2 * 2**-18] * 2


UNKNOWN = ["max.f16x2 $0, $1, $2;", "prmt.b32 $0, $1, $2, 0x8410;", "add.f16x2 $0, $2, $1;"]


@pytest.mark.parametrize("code", UNKNOWN)
def test_other_instructions_raise(code):
    with pytest.raises(NotImplementedError, match=r"unknown instruction|prmt with"):
        asm(code, [1.0, 2.0], [4.0, 7.0])


def test_integers_are_those_of_a_gpu():
    n = Value(np.array([-7, 7]), INT32)
    assert (n // 2).array.tolist() == [-3, 3]
    assert (n % 4).array.tolist() == [-3, 3]
    big = Value(2**30, INT32)
    with pytest.raises(OverflowError, match="int32"):
        big * 2
    assert (big.to(INT64) * 2).array == 2**31
    with pytest.raises(OverflowError, match="beyond int32"):
        (big.to(INT64) * 2).to(INT32)
    with pytest.raises(ZeroDivisionError, match="in a kernel"):
        n // 0


def test_bfloat16_rounds_as_torch_does():
    x = torch.randn(1000)
    assert np.array_equal(
        Value(x.numpy(), FLOAT32).to(BFLOAT16).array, x.bfloat16().float().numpy()
    )


def launch(source, grid, *given, seed=0, **constants):
    """The function ``kernel`` of a text."""
    gluon = Gluon(seed)
    space = gluon.names()
    exec(source, space)
    space["kernel"][(*grid, 1, 1)[:3]](*given, num_warps=4, **constants)


DOUBLE = """
@gluon.jit(do_not_specialize=['count'])
def kernel(x, y, count, step, N: gl.constexpr):
    n = gl.program_id(0) * N + gl.arange(0, N, layout=None)
    value = gl.load(x + n * step, mask=n < count, other=0.0)
    gl.store(y + n, (value * 2.0).to(y.dtype.element_ty), mask=n < count)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_reads_and_writes_tensors_where_masks_allow(dtype):
    x, y = torch.randn(20)[1::2].float(), torch.zeros(11, dtype=dtype)
    launch(DOUBLE, (2,), x, y[:10], 10, 2, N=8)
    assert torch.equal(y[:10], (2 * x).to(dtype))
    assert y[10] == 0


BROKEN = {
    "a load": ("mask=n < count, other", "mask=n < 99, other", OutOfBounds, "load at .* of 10"),
    "a store": ("mask=n < count)", "mask=n < 99)", OutOfBounds, "store at .* of 10"),
    "twice": ("y + n,", "y + n // 2,", Race, "at one address"),
    "two programs": ("y + n,", "y + n % N,", Race, "program 1 writes what another"),
    "a program reads another's": ("y + n,", "x + (9 - n),", Race, "what another one"),
    "a branch": ("value =", "if n < count: pass\n    value =", TypeError, "cannot branch"),
    "a dtype": (".to(y.dtype.element_ty)", ".to(gl.float16)", TypeError, "float16 to float32"),
    "a length": ("gl.arange(0, N", "gl.arange(0, N + 1", ValueError, "powers of two"),
    "an operation": ("* 2.0", "/ 2.0", TypeError, "unsupported operand"),
    "what is constant": ("n * step", "n * step.to(gl.int64)", AttributeError, "'int' object"),
}


@pytest.mark.parametrize(("old", "new", "error", "why"), BROKEN.values(), ids=BROKEN.keys())
def test_what_a_kernel_may_not_do_raises(old, new, error, why):
    assert old in DOUBLE
    with pytest.raises(error, match=why):
        launch(DOUBLE.replace(old, new, 1), (2,), torch.randn(10), torch.zeros(10), 10, 1, N=8)


# Each of two partitions waits until the other has arrived.
MEETING = """
@gluon.jit
def partition(mine, other, out, NUMBER: gl.constexpr):
    mbarrier.arrive(mine.index(0), count=1)
    mbarrier.wait(other.index(0), 0)
    place = NUMBER + gl.arange(0, 1, layout=None)
    gl.store(out + place, gl.zeros([1], gl.float32, layout=None) + 1.0)

@gluon.jit
def kernel(out, COUNT: gl.constexpr):
    one = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    two = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(one.index(0), count=1)
    mbarrier.init(two.index(0), count=COUNT)
    parts = [(partition, (one, two, out, 0)), (partition, (two, one, out, 1))]
    gl.warp_specialize(parts, [4], [24])
"""


@pytest.mark.parametrize("seed", range(4))
def test_teams_wait_for_one_another_and_a_deadlock_is_told(seed):
    out = torch.zeros(2)
    launch(MEETING, (1,), out, COUNT=1, seed=seed)
    assert out.tolist() == [1.0, 1.0]
    why = "partition 0 waits for phase 0 of barrier 1.0, which is in phase 0 with 1 to arrive"
    with pytest.raises(Deadlock, match=why):
        launch(MEETING, (1,), out, COUNT=2, seed=seed)
    late = MEETING.replace("    mbarrier.arrive(mine.index(0), count=1)\n", "")
    with pytest.raises(Deadlock, match=r"partition 0 waits.*; partition 1 waits"):
        launch(late, (1,), out, COUNT=1, seed=seed)


def test_shared_memory_has_an_end():
    text = MEETING.replace("    mbarrier.init(one", "    {}\n    mbarrier.init(one", 1)
    more = "gl.allocate_shared_memory(gl.float16, [64, SIZE], None)"
    launch(text.format(more.replace("SIZE", "1800")), (1,), torch.zeros(2), COUNT=1)
    with pytest.raises(MemoryError, match="256016 bytes of shared memory of 232448"):
        launch(text.format(more.replace("SIZE", "2000")), (1,), torch.zeros(2), COUNT=1)
