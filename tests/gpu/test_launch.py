"""Later launches reach a GPU's driver as the first does: Triton's launcher around a recorder."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")
nvidia = pytest.importorskip("triton.backends.nvidia.driver")

from triton.compiler.compiler import CompiledKernel  # noqa: E402

from econv.gpu.launch import Launch, launch_all  # noqa: E402

MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [8, 64], "fp4_padded": False}


class Descriptor(SimpleNamespace):
    def __init__(self, base, rows):
        super().__init__(base=base, shape=[rows, 64], strides=[64, 1], padding="zero")
        self.round_f32_to_tf32 = False


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
def driver():
    found, before = Driver(), triton.runtime.driver._active
    triton.runtime.driver.set_active(found)
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


def launches(driver):
    """Of images and their scales, and of the same images and of what is copied."""
    one = Kernel(driver.compiled({"x": "*bf16", "s": "*fp32", "n": "i32", "B": "constexpr"}, None))
    descriptor = "tensordesc<fp16[8, 64],layout>"
    signature = {"x": "*bf16", "a": descriptor, "b": descriptor, "y": "*fp32", "n": "i32"}
    two = Kernel(driver.compiled(signature, [MAP, {**MAP, "swizzle": 2}]))
    first = Launch(one, (5, 2), (7,), BLOCK=64, num_warps=4)
    return first, Launch(two, (3,), (9,), num_warps=4), (one, two)


def memories():
    x, rows = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.float16)
    return x, rows, torch.zeros(8)


def jobs(first, second, x, rows, y):
    copied = [Descriptor(rows, 8), Descriptor(rows[512:], 16)]
    return [(first, (x[16:], y)), (second, (x, *copied, y))]


def test_later_launches_are_the_first_without_finding_their_kernels(driver):
    *pair, kernels = launches(driver)
    given = memories()
    for number in (1, 2, 3):
        launch_all(jobs(*pair, *given))
        assert len(driver.raw) == 2 * number
        assert [kernel.found for kernel in kernels] == [1, 1]
    arrived = [tuple(plain(one)) for one in driver.raw]
    assert arrived[:2] == arrived[2:4] == arrived[4:]
    assert arrived[0][:3] == (5, 2, 1)
    assert driver.encoded[-1][0] == given[1].data_ptr() + 1024
    assert repr(driver.encoded[-1]) in repr(driver.raw[-1])


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_the_comparison_sees_another_place(driver, moved):
    *pair, kernels = launches(driver)
    given = memories()
    launch_all(jobs(*pair, *given))
    other = list(given)
    other[moved] = torch.zeros_like(given[moved])
    launch_all(jobs(*pair, *other))
    assert [kernel.found for kernel in kernels] == [1, 1]
    same = [
        tuple(plain(a)) == tuple(plain(b))
        for a, b in zip(driver.raw[:2], driver.raw[2:], strict=True)
    ]
    assert same == [moved == 1, False]


@pytest.mark.parametrize("byte", [0, 2])
def test_a_kernel_for_aligned_operands_is_not_given_others(driver, byte):
    """One launch of two groups of images, the second of which may begin at any address."""
    launch, _, (kernel, _) = launches(driver)
    x, _, y = memories()
    for number in (1, 2, 3):
        launch_all([(launch, (x, y)), (launch, (x[byte // 2 :], y))])
        assert kernel.found == (1 + number if byte else 1)
        assert len(driver.raw) == 2 * number


def test_what_was_found_for_other_addresses_is_not_kept(driver):
    launch, _, (kernel, _) = launches(driver)
    x, _, y = memories()
    launch(x[1:], y)
    launch(x, y)
    launch(x, y)
    assert kernel.found == 2


def test_whoever_listens_hears_of_every_launch(driver, monkeypatch):
    *pair, _ = launches(driver)
    heard = []
    launch_all(jobs(*pair, *memories()))
    chain = type(triton.knobs.runtime.launch_enter_hook)()
    chain.add(heard.append)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
    launch_all(jobs(*pair, *memories()))
    assert all(any(value is chain for value in raw) for raw in driver.raw[2:])


def test_where_nothing_is_compiled_every_call_goes_through_triton(driver):
    """So it is with Triton's interpreter."""
    _, _, (_, two) = launches(driver)

    class Interpreted(Kernel):
        def __getitem__(self, grid):
            run = super().__getitem__(grid)
            return lambda *arguments, **options: run(*arguments, **options) and None

    slow = Interpreted(two.compiled)
    launch = Launch(slow, (3,), (9,), num_warps=4)
    for _ in range(3):
        launch_all(jobs(launch, launch, *memories())[1:])
    assert slow.found == 3


def test_what_a_kernel_does_not_take_is_refused_before_it_is_launched():
    @triton.jit
    def kernel(x, BLOCK: triton.language.constexpr):
        pass

    Launch(kernel, (1,), (), BLOCK=8, num_warps=4)
    with pytest.raises(TypeError, match="takes no blocks"):
        Launch(kernel, (1,), (), BLOCK=8, blocks=4)
