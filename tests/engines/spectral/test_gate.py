"""What compiled code is given: tensors that it cannot read are refused before it runs."""

import pytest
import torch
from torch import nn

import econv
from econv import filter_basis
from econv.engines.problem import Geometry
from econv.engines.spectral import native
from econv.engines.spectral.gate import UnreadableError, address
from econv.engines.spectral.operator import FAILED, Task
from econv.plan import spectral_plan

DOUBLE = torch.float64
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


def freed(*shape, dtype=torch.float32):
    x = torch.randn(*shape, dtype=dtype)
    x.untyped_storage().resize_(0)
    return x


class Wrapper(torch.Tensor):
    """A tensor that holds another, as quantised and distributed ones do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inside = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        found = function(*inside[0], **inside[1])
        return cls(found) if function is torch.ops.aten.detach.default else found


class Subclass(torch.Tensor):
    pass


UNREADABLE = {
    "meta": torch.empty(2, 3, device="meta"),
    "another dtype": torch.empty(2, 3, dtype=DOUBLE),
    "another shape": torch.empty(3, 2),
    "another rank": torch.empty(2, 3, 1),
    "gaps": torch.empty(2, 6)[:, ::2],
    "turned": torch.empty(3, 2).T,
    "repeated": torch.empty(2, 1).expand(2, 3),
    "negative": torch._neg_view(torch.empty(2, 3)),
    "freed": freed(2, 3),
    "sparse": torch.empty(2, 3).to_sparse(),
    "subclass": torch.empty(2, 3).as_subclass(Subclass),
    "wrapped": Wrapper(torch.empty(2, 3)),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_no_address_of(name):
    with pytest.raises(UnreadableError, match="expected x"):
        address("x", UNREADABLE[name], torch.float32, (2, 3))


def test_an_address_of_what_is_there():
    x = torch.randn(4, 2, 3)
    assert address("x", x, torch.float32, (4, 2, 3)) == x.data_ptr()
    assert address("x", nn.Parameter(x), torch.float32, (4, 2, 3)) == x.data_ptr()
    assert address("x", None, torch.float32, (4, 2, 3)) == 0
    assert address("x", x[::2], torch.float32, (2, 2, 3), apart=True) == x.data_ptr()
    with pytest.raises(UnreadableError, match="without gaps"):
        address("x", x[::2], torch.float32, (2, 2, 3))


def test_what_is_batched_by_torch_has_no_address():
    seen = []

    def ask(x):
        with pytest.raises(UnreadableError, match="wrapped"):
            address("x", x, torch.float32, (3,))
        seen.append(x)
        return x

    torch.func.vmap(ask)(torch.zeros(2, 3))
    assert seen


def layer(engine="spectral", **options):
    return econv.GroupConv2d(2, 2, "p4", engine=engine, dtype=DOUBLE, **options)


@pytest.mark.parametrize("engine", ["auto", "spectral"])
def test_layers_and_images_on_different_devices(engine):
    with torch.device("meta"):
        there = econv.GroupConv2d(4, 4, "p8", engine=engine)
        norm = econv.GroupBatchNorm2d(4, "p8")
    for module in (there, norm):
        with pytest.raises(ValueError, match=r"expected a tensor on meta.*got one on cpu"):
            module(torch.randn(2, 32, 16, 16))
    with pytest.raises(ValueError, match=r"expected a tensor on cpu.*got one on meta"):
        econv.GroupConv2d(4, 4, "p8", engine=engine)(torch.empty(2, 32, 16, 16, device="meta"))
    assert there(torch.empty(2, 32, 16, 16, device="meta")).shape == (2, 32, 16, 16)


@needs_compiler
def test_freed_tensors_are_named_and_the_engine_is_not_blamed():
    one, before = layer(), dict(FAILED)
    with pytest.raises(ValueError, match="it was freed"):
        one(freed(1, 8, 9, 9, dtype=DOUBLE))
    x = torch.randn(1, 9, 9, 8, dtype=DOUBLE).permute(0, 3, 1, 2)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="it was freed"):
        one(x)
    x = torch.randn(1, 8, 9, 9, dtype=DOUBLE, requires_grad=True)
    with pytest.raises(ValueError, match="it was freed"):
        one(x).backward(freed(1, 8, 9, 9, dtype=DOUBLE))
    assert before == FAILED


def everything(module, x, probe, engine):
    with econv.engine(engine):
        y = module(x)
    found = torch.autograd.grad(y, [x, *module.parameters()], probe)
    return [y, *found]


def same(found, wanted, tolerance=1e-10):
    for one, two in zip(found, wanted, strict=True):
        assert float((one - two).detach().abs().max()) <= tolerance


def test_lazy_negatives_are_read_with_their_sign():
    module, x = layer("auto"), torch.randn(2, 8, 7, 9, dtype=DOUBLE)
    x, probe = torch._neg_view(x).requires_grad_(), torch._neg_view(torch.randn_like(x))
    same(*(everything(module, x, probe, engine) for engine in ("spectral", "dense")))
    smooth = econv.GroupActivation2d("silu", 2)
    same([smooth(x)], [smooth(x.detach().clone() * 1)])


def test_weights_of_subclasses_are_read_by_operations_of_torch():
    module, x = econv.GroupConv2d(4, 4, "p8"), torch.randn(2, 32, 9, 9)
    wanted = module(x)
    module.weight = nn.Parameter(Wrapper(module.weight.detach()), requires_grad=False)
    same([module(x)], [wanted], 1e-5)
    with econv.engine("spectral") as ran:
        same([module(x)], [wanted], 1e-5)
    assert ran == ["spectral/torch"]


@pytest.mark.parametrize("stride", [65, 1 << 16])
@pytest.mark.parametrize("engine", ["spectral", "auto"])
def test_strides_beyond_the_image_take_no_memory(stride, engine):
    module = layer("auto", stride=stride)
    x = torch.randn(2, 8, 9, 70, dtype=DOUBLE, requires_grad=True)
    probe = torch.randn_like(module(x))
    same(*(everything(module, x, probe, one) for one in (engine, "dense")))


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(1, 8, 40, 33), (5, 8, 9, 12)])
def test_threads_share_the_work(threads, shape):
    """A share that is lost would be seen in the gradient to the weight."""
    module, before = layer("auto"), torch.get_num_threads()
    x = torch.randn(shape, dtype=DOUBLE, requires_grad=True)
    probe = torch.randn(shape, dtype=DOUBLE)
    wanted = everything(module, x, probe, "dense")
    torch.set_num_threads(threads)
    try:
        with econv.engine("spectral") as ran:
            found = everything(module, x, probe, "spectral")
    finally:
        torch.set_num_threads(before)
    assert ran == ["spectral/native"]
    same(found, wanted)


@needs_compiler
@pytest.mark.slow
def test_a_kernel_that_drops_a_share_is_found(monkeypatch, tmp_path):
    """The test above can fail: in this kernel the sums of all threads but the first are lost."""
    source = native._SOURCE.read_text()
    one = "for (int64_t t = 0; t < threads; t++) sum += all"
    assert source.count(one) == 1
    other = tmp_path / "native.cpp"
    other.write_text(source.replace(one, one.replace("t < threads", "t < 1")))
    monkeypatch.setattr(native, "_SOURCE", other)
    monkeypatch.setenv("ECONV_CACHE", str(tmp_path / "kernels"))
    native._library.cache_clear()
    try:
        test_threads_share_the_work(1, (1, 8, 40, 33))
        with pytest.raises(AssertionError):
            test_threads_share_the_work(2, (1, 8, 40, 33))
    finally:
        native._library.cache_clear()


@needs_compiler
def test_jobs_whose_numbers_do_not_belong_together():
    plan = spectral_plan(filter_basis("p4"), "regular", "regular")
    x, w = torch.randn(1, 8, 6, 6), torch.randn(3, 2, plan.weights)
    engine, good = native.Native(), Geometry(1, 1, 1, 2, (6, 6))
    found, _ = engine.product(x, w, Task(plan, good))
    assert found.shape == (1, 12, 6, 6)
    for bad in (
        {"down": 0},
        {"down": 10**6},
        {"up": -1},
        {"dilation": 65},
        {"sizes": (-1, 6)},
        {"sizes": (6, 6, 6)},
        {"before": 2**62},
    ):
        with pytest.raises(UnreadableError, match="expected"):
            engine.product(x, w, Task(plan, good._replace(**bad)))
    for images, weights in ((x[0], w), (x, w[0]), (x[:, 1:], w), (x, w[..., 1:]), (x, w.double())):
        with pytest.raises(UnreadableError, match="expected"):
            engine.product(images, weights, Task(plan, good))
    with pytest.raises(UnreadableError, match="the gradient of shape"):
        engine.product(x, w, Task(plan, good), torch.randn(1, 12, 6, 7))
    with pytest.raises(UnreadableError, match="expected float32 or float64"):
        engine.product(x.long(), w, Task(plan, good))
