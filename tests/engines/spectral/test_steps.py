"""Launches by address reach a GPU's driver as Triton's own do: its launcher around a recorder."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")
nvidia = pytest.importorskip("triton.backends.nvidia.driver")

from triton.compiler.compiler import CompiledKernel  # noqa: E402

from econv.engines.spectral.triton import steps as triton_steps  # noqa: E402
from econv.engines.spectral.triton.steps import Launch, Operand, Steps  # noqa: E402

MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [8, 64], "fp4_padded": False}


class Descriptor(SimpleNamespace):
    def __init__(self, base, rows):
        super().__init__(base=base, shape=[rows, 64], strides=[64, 1], padding="zero")
        self.round_f32_to_tf32 = False


class Copied:
    """Two matrices in some memory of halves, the second of which follows the first."""

    def __call__(self, memory):
        return [Descriptor(memory, 8), Descriptor(memory[512:], 16)]

    def at(self, address):
        first, second = (SimpleNamespace(data_ptr=lambda n=n: address + n) for n in (0, 1024))
        return [Descriptor(first, 8), Descriptor(second, 16)]


class Driver:
    """A driver that writes down what is launched."""

    def __init__(self):
        self.raw, self.encoded = [], []
        self.utils = SimpleNamespace(
            fill_tma_descriptor=self.encode,
            fill_tma_descriptor_tiled=self.encode,
            build_signature_metadata=lambda signature: ("signature", tuple(signature)),
        )

    def encode(self, *numbers):
        self.encoded.append(numbers)
        return ("map", repr(numbers))

    def launch(self, *arguments):
        self.raw.append(arguments)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 17

    def compiled(self, signature, metadata):
        """A kernel that was compiled, as Triton launches it."""
        run = object.__new__(nvidia.CudaLauncher)
        run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
        run.global_scratch_size = run.profile_scratch_size = 0
        run.global_scratch_align = run.profile_scratch_align = 1
        run.launch = nvidia.wrap_handle_tensordesc(self.launch, signature, metadata)
        if hasattr(nvidia, "annotate_arguments"):  # since 3.7
            run.arg_annotations, run.kernel_signature = ["annotated"], "signature"
        kernel = object.__new__(CompiledKernel)
        kernel.module, kernel._run, kernel.function = "loaded", run, 23
        kernel.packed_metadata, kernel.src, kernel.name = (4, 1, 0), None, "kernel"
        return kernel


class Kernel:
    """A kernel that Triton finds the compiled one of."""

    def __init__(self, compiled):
        self.compiled, self.found = compiled, 0

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.found += 1
            constants = [value for name, value in options.items() if name.isupper()]
            self.compiled[grid](*arguments, *constants)
            return self.compiled

        return run


@pytest.fixture
def driver(monkeypatch):
    found, before = Driver(), triton.runtime.driver._active
    triton.runtime.driver.set_active(found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 17, raising=False)
    yield found
    triton.runtime.driver._active = before


def plain(values):
    """Tensors as their addresses, and hooks, which nobody added to, as none."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.data_ptr()
        elif isinstance(value, (list, tuple)):
            yield tuple(plain(value))
        elif hasattr(value, "calls") or type(value).__name__ == "LazyDict":
            yield None
        else:
            yield value


def has_tensors(values):
    """Whether any of them is one, or has one inside."""
    return any(
        has_tensors(value) if isinstance(value, (list, tuple)) else isinstance(value, torch.Tensor)
        for value in values
    )


def steps(driver):
    """Two launches: of images and their scales, and of the same images and of what is copied."""
    one = Kernel(driver.compiled({"x": "*bf16", "s": "*fp32", "n": "i32", "B": "constexpr"}, None))
    descriptor = "tensordesc<fp16[8, 64],layout>"
    signature = {"x": "*bf16", "a": descriptor, "b": descriptor, "y": "*fp32", "n": "i32"}
    two = Kernel(driver.compiled(signature, [MAP, {**MAP, "swizzle": 2}]))
    images = Operand(0, 32, lambda memory: memory[16:])
    launches = [
        (Launch(one, (5, 2), (7,), BLOCK=64, num_warps=4), [images, Operand(2)]),
        (
            Launch(two, (3,), (9,), num_warps=4),
            [Operand(0), Operand(1, copied=Copied()), Operand(2)],
        ),
    ]
    return Steps(launches), (one, two)


def memories():
    x, rows = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.float16)
    return x, rows, torch.zeros(8)


def test_addresses_are_launched_as_tensors_are(driver):
    found, kernels = steps(driver)
    given = memories()
    found(*given)
    assert len(driver.raw) == 2
    found(*given)
    assert [kernel.found for kernel in kernels] == [1, 1]
    first, later = driver.raw[:2], driver.raw[2:]
    assert [tuple(plain(one)) for one in first] == [tuple(plain(one)) for one in later]
    assert has_tensors(first)
    assert not has_tensors(later)


def test_the_comparison_sees_another_place(driver):
    found, _ = steps(driver)
    x, rows, y = memories()
    found(x, rows, y)
    moved = torch.zeros(64, dtype=torch.bfloat16)
    found(moved, rows, y)
    first, later = driver.raw[:2], driver.raw[2:]
    for one, other in zip(first, later, strict=True):
        assert tuple(plain(one)) != tuple(plain(other))


def test_what_is_copied_is_encoded_once_for_an_address(driver, monkeypatch):
    monkeypatch.setattr(triton_steps, "_KEPT", 2)
    found, _ = steps(driver)
    x, _, y = memories()
    places = [torch.zeros(2048, dtype=torch.float16) for _ in range(3)]
    found(x, places[0], y)
    driver.encoded.clear()
    order, encoded = (0, 1, 0, 1, 2, 0), (2, 4, 4, 4, 6, 8)  # the third takes the place of both
    for rows, more in zip((places[number] for number in order), encoded, strict=True):
        found(x, rows, y)
        assert len(driver.encoded) == more
        assert driver.encoded[-1][0] in [place.data_ptr() + 1024 for place in places]
    assert repr(driver.encoded[-1]) in repr(driver.raw[-1])


class Elsewhere(torch.Tensor):
    """A tensor of another device."""

    def get_device(self):
        return 1


@pytest.mark.parametrize("why", ["unaligned", "elsewhere", "heard", "called", "version", "scratch"])
def test_everything_else_goes_through_triton(driver, monkeypatch, why):
    found, kernels = steps(driver)
    x, rows, y = memories()
    never = why in ("version", "scratch")
    if why == "version":
        monkeypatch.setattr(triton_steps, "_KNOWN", ("2.",))
    if why == "scratch":
        kernels[1].compiled._run.global_scratch_size = 128
        monkeypatch.setattr(nvidia._allocation, "_allocator", SimpleNamespace(get=lambda: max))
    for _ in range(2):
        found(x, rows, y)
    assert has_tensors(driver.raw[-1]) is never
    heard = []
    if why == "unaligned":
        x = torch.zeros(65, dtype=torch.bfloat16)[1:]
    if why == "elsewhere":
        y = y.as_subclass(Elsewhere)
    if why == "heard":
        chain = type(triton.knobs.runtime.launch_enter_hook)()
        chain.add(heard.append)
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
    if why == "called":
        monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", heard.append)
    found(x, rows, y)
    assert len(driver.raw) == 6
    assert has_tensors(driver.raw[-1])


def test_no_hooks_at_all_are_no_hindrance(driver, monkeypatch):
    found, _ = steps(driver)
    given = memories()
    found(*given)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(triton.knobs.runtime, name, None)
    found(*given)
    assert not has_tensors(driver.raw[-1])


@pytest.mark.parametrize("byte", [0, 2])
def test_a_kernel_for_aligned_operands_is_not_given_others(driver, byte):
    """One launch of two groups of images, the second of which may begin at any address."""
    found, _ = steps(driver)
    launch, parts = found.steps[0]
    moved = Operand(0, byte, lambda memory: memory[byte // 2 :])
    found = Steps([(launch, parts), (launch, [moved, *parts[1:]])])
    for _ in range(2):
        found(*memories())
    assert has_tensors(driver.raw[-1]) is (byte > 0)


def test_nothing_is_queued_before_all_is_compiled(driver):
    """Triton's interpreter compiles nothing: every call goes through it."""
    found, (_, two) = steps(driver)

    class Interpreted(Kernel):
        def __getitem__(self, grid):
            run = super().__getitem__(grid)
            return lambda *arguments, **options: run(*arguments, **options) and None

    _, parts = found.steps[1]
    slow = Interpreted(two.compiled)
    found = Steps([found.steps[0], (Launch(slow, (3,), (9,), num_warps=4), parts)])
    for _ in range(3):
        found(*memories())
    assert slow.found == 3
