"""What a network is expected to stand from PyTorch: one function a check, for every library.

A check takes a library, raises what goes wrong and may return a few words about what it found.
Each compares numbers with those of the same network run the ordinary way: that nothing was raised
is not enough.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import libraries
from fresh import AbsentError, first_line
from libraries import Library, Network, trained

BATCH, PIXELS = 4, 17
OTHER_BATCH, OTHER_HEIGHT, OTHER_WIDTH = 3, 20, 23
MODES = {"train": True, "eval": False}

# What the checks are about, in the order of the table.
COMPILE = "`torch.compile`: whole graph, no extra recompilation"
EXPORT = "`torch.export`: dynamic batch and image size"
ONNX = "ONNX, run in onnxruntime"
DEPLOYMENT = "export to plain torch, int8 weights"
PRECISION = "autocast, float64, float16, bfloat16"
LAYOUT = "`channels_last` kept"
FUNC = "`torch.func`: functional_call, grad, vmap"
COPIES = "deepcopy, pickle, `torch.save`"
STATE = "one state dict for train and eval, live weights"
TRAINING = "DDP, SyncBatchNorm, checkpointing, parametrize"
TENSORS = "plain tensors in, clear errors"
EQUIVARIANCE = "quarter turns and reflections exact"


@dataclass(frozen=True)
class Check:
    name: str
    topic: str
    title: str
    function: Callable[..., str | None]
    control: bool  # an ordinary network must pass it, or the check is wrong


CHECKS: dict[str, Check] = {}


def check(topic: str, title: str, control: bool = True, **variants: dict[str, Any]) -> Any:
    """Register a check, or one for each variant, whose options the function gets."""

    def register(function: Callable[..., str | None]) -> Callable[..., str | None]:
        base = function.__name__
        for variant, options in (variants or {"": {}}).items():
            name = f"{base}_{variant}" if variant else base
            mode = "train" if options.get("training") else "eval"
            words = title.format(mode=mode, **options)
            run = functools.partial(function, **options)
            CHECKS[name] = Check(name, topic, words, run, control)
        return function

    return register


def by_mode(topic: str, title: str) -> Any:
    modes = {name: {"training": training} for name, training in MODES.items()}
    return check(topic, title + ", {mode} mode", **modes)


def run(name: str, library: str) -> str | None:
    """Run one check on one library."""
    chosen = libraries.get(library)
    if library == "torch" and not CHECKS[name].control:
        raise AbsentError("an ordinary network is not equivariant")
    torch.manual_seed(0)
    return CHECKS[name].function(chosen)


# ---------------------------------------------------------------------------------- comparisons


def image(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (BATCH, 3, PIXELS, PIXELS), generator=generator)


def difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        raise AssertionError(f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def same(found: Tensor, wanted: Tensor, what: str = "output", limit: float = 1e-5) -> float:
    """Raise unless the largest difference is below ``limit`` times the largest number."""
    error = difference(found, wanted)
    if not error <= limit:  # NaN is not below anything
        raise AssertionError(f"the {what} differs by {error:.1g} of its size")
    return error


def gradients(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    network.zero_grad(set_to_none=True)
    network(x).square().sum().backward()
    return {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


def same_gradients(
    found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float = 1e-4
) -> None:
    if found.keys() != wanted.keys():
        names = sorted(found.keys() ^ wanted.keys())
        raise AssertionError(f"gradients of {', '.join(names)} in one of the two only")
    for name, gradient in wanted.items():
        same(found[name], gradient, f"gradient of {name}", limit)


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise AbsentError(f"{package} is not installed in this environment")


def frozen(library: Library) -> Network:
    """A network that learns while its norms keep their statistics: images stay independent."""
    network = trained(library).train()
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return network


# ----------------------------------------------------------------------------------- compilation


@by_mode(COMPILE, "fullgraph=True, output and gradients")
def compiled(library: Library, training: bool) -> None:
    network = trained(library).train(training)
    twin = copy.deepcopy(network) if library.name == "torch" else trained(library).train(training)
    whole = torch.compile(network, fullgraph=True)
    x = image()
    same(whole(x), twin(x), limit=1e-4)
    # Batch norm makes the gradients of the last layers' shifts small: compare what is large.
    found, wanted = gradients(whole, x), gradients(twin, x)
    same_gradients({n.removeprefix("_orig_mod."): g for n, g in found.items()}, wanted, 1e-3)


@by_mode(COMPILE, "no graph break")
def graph_breaks(library: Library, training: bool) -> None:
    network = trained(library).train(training)
    found = torch._dynamo.explain(network)(image())
    if found.graph_break_count:
        raise AssertionError(f"{found.graph_break_count} graph breaks")


@by_mode(COMPILE, "no more recompilations than an ordinary network for new batch sizes")
def recompilations(library: Library, training: bool) -> str:
    ours = _recompilations(trained(library).train(training))
    plain = _recompilations(trained(libraries.get("torch")).train(training))
    if ours > plain:
        raise AssertionError(f"{ours} recompilations where an ordinary network has {plain}")
    return f"{ours}"


def _recompilations(network: nn.Module) -> int:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    whole = torch.compile(network, backend=counter)
    whole(image())
    before = counter.frame_count
    for batch in (5, 6, 7, 8):
        whole(image(batch, 3, PIXELS, PIXELS))
    return counter.frame_count - before


# ---------------------------------------------------------------------------------- other runtimes


def _dynamic() -> dict[int, Any]:
    dimension = torch.export.Dim
    return {
        0: dimension("batch", min=2, max=64),
        2: dimension("height", min=8, max=256),
        3: dimension("width", min=8, max=256),
    }


def _exports(network: nn.Module) -> None:
    program = torch.export.export(network, (image(),), dynamic_shapes=(_dynamic(),))
    other = image(OTHER_BATCH, 3, OTHER_HEIGHT, OTHER_WIDTH)
    same(program.module()(other), network(other))


@by_mode(EXPORT, "batch and image size dynamic")
def torch_export(library: Library, training: bool) -> None:
    _exports(trained(library).train(training))


@check(EXPORT, "after the library's own export to plain torch")
def torch_export_of_plain(library: Library) -> None:
    _exports(library.exported(trained(library).eval()))


def _runs_in_onnxruntime(network: nn.Module, dynamo: bool) -> str:
    needs("onnx", "onnxruntime", "onnxscript")
    import onnxruntime

    network = network.eval()
    other = image(OTHER_BATCH, 3, OTHER_HEIGHT, OTHER_WIDTH)
    wanted = network(other)
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "network.onnx")
        names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "verbose": False}
        if dynamo:
            program = torch.onnx.export(
                network, (image(),), dynamo=True, dynamic_shapes=(_dynamic(),), **names
            )
            program.save(place)
        else:
            axes = {"x": {0: "batch", 2: "height", 3: "width"}, "y": {0: "batch"}}
            torch.onnx.export(network, (image(),), place, dynamo=False, dynamic_axes=axes, **names)
        session = onnxruntime.InferenceSession(place, providers=["CPUExecutionProvider"])
        found = session.run(None, {"x": other.numpy()})[0]
    return f"to {same(torch.from_numpy(found), wanted):.0e}"


@check(ONNX, "dynamo exporter, sizes dynamic, run in onnxruntime")
def onnx_dynamo(library: Library) -> str:
    return _runs_in_onnxruntime(trained(library), dynamo=True)


@check(ONNX, "legacy exporter, sizes dynamic, run in onnxruntime")
def onnx_legacy(library: Library) -> str:
    return _runs_in_onnxruntime(trained(library), dynamo=False)


@check(ONNX, "dynamo exporter after the library's own export to plain torch")
def onnx_of_plain(library: Library) -> str:
    return _runs_in_onnxruntime(library.exported(trained(library)), dynamo=True)


@check(DEPLOYMENT, "the library's own export: no module of it left, same output")
def plain_export(library: Library) -> str:
    network = trained(library).eval()
    wanted = network(image())
    plain = library.exported(network)
    for module in plain.modules():
        home = type(module).__module__.partition(".")[0]
        if home in ("econv", "escnn", "e2cnn"):
            raise AssertionError(f"a module of {home} is left: {type(module).__name__}")
    error = same(plain(image()), wanted)
    stored = io.BytesIO()
    torch.save(plain, stored)
    stored.seek(0)
    same(torch.load(stored, weights_only=False)(image()), wanted)
    return f"to {error:.0e}"


@check(DEPLOYMENT, "int8 weights (torchao, pt2e) of the exported network")
def int8_weights(library: Library) -> str:
    needs("torchao")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    plain = library.exported(trained(library).eval()).eval()
    wanted = plain(image())
    quantiser = x86.X86InductorQuantizer()
    quantiser.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(plain, (image(),)).module(), quantiser)
    prepared(image())
    quantised = convert_pt2e(prepared)
    stored = [t for t in quantised.state_dict().values() if t.dtype == torch.int8]
    convolutions = sum(isinstance(m, nn.Conv2d) for m in plain.modules())
    if len(stored) < convolutions:
        raise AssertionError(f"int8 weights in {len(stored)} layers of {convolutions}")
    return f"output to {same(quantised(image()), wanted, limit=0.1):.1%}"


# -------------------------------------------------------------------------------------- precision


@check(
    PRECISION,
    "autocast in {dtype}, output and gradients",
    bfloat16={"dtype": "bfloat16"},
    float16={"dtype": "float16"},
)
def autocast(library: Library, dtype: str) -> None:
    network = frozen(library)
    wanted, wanted_gradients = network(image()), gradients(network, image())
    network.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=getattr(torch, dtype)):
        found = network(image())
    if str(found.dtype) != f"torch.{dtype}":
        raise AssertionError(f"the output has dtype {found.dtype}")
    same(found, wanted, limit=0.05)
    found.float().square().sum().backward()
    same_gradients({n: p.grad for n, p in network.named_parameters()}, wanted_gradients, 0.2)


def _precisions() -> dict[str, dict[str, Any]]:
    return {
        f"{dtype}_{mode}": {"dtype": dtype, "training": training}
        for dtype in ("float64", "float16", "bfloat16")
        for mode, training in MODES.items()
    }


def _before_pooling(network: Network, x: Tensor) -> Any:
    """What all layers but the orientation pooling, which is the last, make of an image."""
    features = network.enter(x)
    for layer in network.layers[:-1]:
        features = layer(features)
    return features


@check(
    PRECISION,
    ".to({dtype}), {mode} mode: convolution, norm and ReLU",
    **_precisions(),
)
def dtypes(library: Library, dtype: str, training: bool) -> None:
    kind = getattr(torch, dtype)
    network = trained(library).train(training)
    wanted = network.leave(_before_pooling(network, image()))
    network.to(kind)  # in that mode: what was built for the old dtype must not stay behind
    found = network.leave(_before_pooling(network, image().to(kind)))
    if found.dtype != kind:
        raise AssertionError(f"the output has dtype {found.dtype}")
    same(found, wanted, limit=1e-4 if dtype == "float64" else 0.1)
    if not training:
        return
    found.sum().backward()
    for name, parameter in network.features.named_parameters():
        if name.startswith(f"{len(network.layers) - 1}."):
            continue  # the control's pooling learns
        if parameter.grad is None or parameter.grad.dtype != kind:
            raise AssertionError(f"no gradient of {name} in {dtype}")


@check(PRECISION, ".to(float64): orientation pooling")
def pooling_dtype(library: Library) -> None:
    network = trained(library).eval()
    wanted = network(image())
    same(network.to(torch.float64)(image().double()), wanted, limit=1e-4)


@check(PRECISION, ".double() of one network leaves another one alone")
def dtype_of_others(library: Library) -> None:
    network = trained(library)
    wanted = network(image())
    trained(library).double()
    same(network(image()), wanted)


def _lost(library: Library, training: bool) -> list[str]:
    """The layers that do not keep the layout of their input."""
    network = trained(library).train(training)
    wanted = trained(library).train(training)(image())
    network = network.to(memory_format=torch.channels_last)
    lost: list[str] = []

    def look(name: str, module: nn.Module, given: Any, out: Any) -> None:
        tensor = getattr(out, "tensor", out)
        if tensor.ndim == 4 and not tensor.is_contiguous(memory_format=torch.channels_last):
            lost.append(f"{name} ({type(module).__name__})")

    for name, module in network.features.named_children():
        module.register_forward_hook(functools.partial(look, name))
    same(network(image().to(memory_format=torch.channels_last)), wanted, limit=1e-4)
    return lost


@by_mode(LAYOUT, "channels_last kept by convolution, norm and ReLU")
def channels_last(library: Library, training: bool) -> None:
    last = str(len(trained(library).layers) - 1)
    lost = [name for name in _lost(library, training) if name.split()[0] != last]
    if lost:
        raise AssertionError(f"lost in layer {', '.join(lost)}")


@check(LAYOUT, "channels_last kept by orientation pooling")
def pooling_layout(library: Library) -> None:
    last = str(len(trained(library).layers) - 1)
    lost = [name for name in _lost(library, False) if name.split()[0] == last]
    if lost:
        raise AssertionError(f"lost in layer {', '.join(lost)}")


# -------------------------------------------------------------------------------------- torch.func


def _other_parameters(network: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() * 1.5 + 0.01 for n, p in network.named_parameters()}


@by_mode(FUNC, "functional_call with other parameters")
def functional_call(library: Library, training: bool) -> None:
    network = trained(library).train(training)
    parameters = _other_parameters(network)
    twin = trained(library)
    twin.load_state_dict(parameters, strict=False)
    twin.train(training)
    found = torch.func.functional_call(network, parameters, (image(),))
    same(found, twin(image()))


@check(FUNC, "grad")
def func_grad(library: Library) -> None:
    network = frozen(library)
    wanted = gradients(network, image())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(network, parameters, (image(),)).square().sum()

    parameters = {n: p.detach() for n, p in network.named_parameters()}
    same_gradients(torch.func.grad(loss)(parameters), wanted)


@check(FUNC, "vmap over images")
def func_vmap(library: Library) -> None:
    network = trained(library).eval()
    x = image()
    same(torch.func.vmap(lambda one: network(one[None])[0])(x), network(x))


@check(FUNC, "vmap of grad: a gradient for each image")
def per_sample_gradients(library: Library) -> None:
    network = frozen(library)
    x = image()
    parameters = {n: p.detach() for n, p in network.named_parameters()}

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(network, parameters, (one[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for index in range(len(x)):
        wanted = gradients(network, x[index : index + 1])
        same_gradients({n: g[index] for n, g in found.items()}, wanted)


# ---------------------------------------------------------------------------- copies and files


@by_mode(COPIES, "copy.deepcopy, the copy trains on its own")
def deepcopy(library: Library, training: bool) -> None:
    network = trained(library).train(training)
    wanted = network(image())
    _lives_on(copy.deepcopy(network), network, wanted, training)


@by_mode(COPIES, "pickle")
def pickled(library: Library, training: bool) -> None:
    network = trained(library).train(training)
    wanted = network(image())
    _lives_on(pickle.loads(pickle.dumps(network)), network, wanted, training)


@by_mode(COPIES, "torch.save of the network")
def saved_whole(library: Library, training: bool) -> None:
    network = trained(library).train(training)
    wanted = network(image())
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    _lives_on(torch.load(file, weights_only=False), network, wanted, training)


def _lives_on(other: nn.Module, network: nn.Module, wanted: Tensor, training: bool) -> None:
    """The copy gives the same, learns, and leaves the original as it was."""
    same(other(image()), wanted)
    other.train()
    other(image()).square().sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    other.train(training)
    if difference(other(image()), wanted) < 1e-3:
        raise AssertionError("a step of training changed nothing in the copy")
    same(network(image()), wanted, "original's output")


@by_mode(COPIES, "state dict through torch.save, load(weights_only=True)")
def state_saved(library: Library, training: bool) -> None:
    network = trained(library).train(training)
    wanted = network(image())
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other = library.network().train(training)
    other.load_state_dict(torch.load(file, weights_only=True))
    same(other(image()), wanted)


@check(STATE, "the same state dict in train and eval mode")
def same_state(library: Library) -> None:
    network = trained(library)
    before = network.state_dict()
    names, size = set(before), sum(t.nbytes for t in before.values())
    after = network.eval().state_dict()
    if set(after) != names:
        more = sum(t.nbytes for t in after.values()) / size
        unequal = sorted(set(after) ^ names)
        raise AssertionError(f"{len(unequal)} keys differ ({unequal[0]} …), {more:.1f} × the size")


@check(
    STATE,
    "state dict of {mode} mode loads in the other",
    train={"training": True},
    eval={"training": False},
)
def loads_across(library: Library, training: bool) -> None:
    network = trained(library)
    wanted = network.eval()(image())
    state = copy.deepcopy(network.train(training).state_dict())
    other = library.network().train(not training)
    other.load_state_dict(state)
    same(other.eval()(image()), wanted)


@check(STATE, "a weight changed in eval mode changes the output")
def live_weights(library: Library) -> None:
    network = trained(library).eval()
    before = network(image())
    with torch.no_grad():
        getattr(network.layers[3], library.learned).neg_()
    after = network(image())
    fresh = trained(library)
    with torch.no_grad():
        getattr(fresh.layers[3], library.learned).neg_()
    if difference(after, before) < 1e-3:
        raise AssertionError("the output is the old one: stale filters")
    same(after, fresh.eval()(image()))


@check(STATE, "gradients reach every weight in eval mode, in every step")
def learns_in_eval(library: Library) -> None:
    network = trained(library).eval()
    first = gradients(network, image())
    missing = [n for n, _ in network.named_parameters() if n not in first]
    if missing:
        raise AssertionError(f"no gradient of {', '.join(missing)}")
    same_gradients(gradients(network, image()), first)


# ---------------------------------------------------------------------------------------- training


@check(TRAINING, "DistributedDataParallel, two processes, gradients of the whole batch")
def distributed(library: Library) -> None:
    wanted = gradients(frozen(library), image())
    for found in _in_two_processes("_ddp_gradients", library.name):
        same_gradients({n.removeprefix("module."): g for n, g in found.items()}, wanted)


def _ddp_gradients(library: Library, rank: int) -> dict[str, Tensor]:
    network = nn.parallel.DistributedDataParallel(frozen(library))
    half = image().chunk(2)[rank]
    (2 * network(half).square().sum()).backward()  # DDP takes the mean of two processes
    return {n: p.grad for n, p in network.named_parameters() if p.grad is not None}


def _in_two_processes(function: str, library: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_one_process, (function, library, folder), nprocs=2)
        except torch.multiprocessing.ProcessRaisedException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


def _one_process(rank: int, function: str, library: str, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    found = globals()[function](libraries.get(library), rank)
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@check(TRAINING, "conversion to synchronised batch norm, same output and state")
def synchronised(library: Library) -> str:
    network = trained(library)
    wanted = network(image())
    names = set(network.state_dict())
    network = library.synchronised(trained(library))
    left = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and "sync" not in type(module).__name__.lower()
    ]
    if left:
        raise AssertionError(f"not converted: {', '.join(left)}")
    same(network(image()), wanted)
    if set(network.state_dict()) != names:
        raise AssertionError("the state dict changed")
    module = inspect.unwrap(library.synchronised).__func__.__qualname__  # type: ignore[attr-defined]
    return "torch's conversion" if module.startswith("Library.") else "the library's conversion"


@check(TRAINING, "activation checkpointing, layer by layer")
def checkpointed(library: Library) -> None:
    from torch.utils.checkpoint import checkpoint

    wanted = gradients(frozen(library), image())
    network = frozen(library)

    def forward(x: Tensor) -> Tensor:
        features = network.enter(x)
        for layer in network.layers:
            features = checkpoint(layer, features, use_reentrant=False)
        return network.head(network.leave(features))

    forward(image()).square().sum().backward()
    same_gradients({n: p.grad for n, p in network.named_parameters()}, wanted)


class Negated(nn.Module):
    """Not only another scale, which the batch norm behind a convolution would undo."""

    def forward(self, weight: Tensor) -> Tensor:
        return -weight


@by_mode(TRAINING, "torch.nn.utils.parametrize of a convolution's weight")
def parametrised(library: Library, training: bool) -> None:
    from torch.nn.utils import parametrize

    network, twin = trained(library).train(training), trained(library)
    with torch.no_grad():
        getattr(twin.layers[3], library.learned).neg_()
    wanted = twin.train(training)(image())
    plain = trained(library).train(training)(image())
    parametrize.register_parametrization(network.layers[3], library.learned, Negated())
    same(network(image()), wanted)
    parametrize.remove_parametrizations(
        network.layers[3], library.learned, leave_parametrized=False
    )
    same(network(image()), plain, "output after removal")


# ------------------------------------------------------------------------------------ plain tensors


@check(TENSORS, "a plain tensor into a layer: works, or the error says what is wanted")
def plain_tensors(library: Library) -> str | None:
    layer = library.convolution("p8", 4, 4)
    x = torch.cat([image(2, 16, 9, 9), image(2, 16, 9, 9, seed=2)], dim=1)
    try:
        layer(x)
    except Exception as error:
        if str(error).strip():
            return first_line(error)
        raise
    return None


@check(TENSORS, "a wrong number of channels is an error that says both numbers")
def wrong_channels(library: Library) -> str:
    layer = library.convolution("p8", 4, 4)
    try:
        layer(library.wrapped(image(2, 31, 9, 9), layer))
    except Exception as error:
        said = str(error)
        if "31" in said and ("32" in said or "4" in said):
            return first_line(error)
        raise AssertionError(f"the error says only: {first_line(error)}") from error
    raise AssertionError("31 channels were taken for 32")


# ------------------------------------------------------------------------------------ equivariance


def turned(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    for quarter in range(1, 4):
        yield f"{90 * quarter}°", x.rot90(quarter, (2, 3))


def _invariant(network: Network, size: int) -> str:
    """The scores are the same for every quarter turn of the image."""
    network.eval()
    x = image(2, 3, size, size)
    wanted = network(x)
    # What rounds in float32 stays far below; a filter that is turned wrongly far above.
    return f"to {max(same(network(y), wanted, f'output ({n})', 1e-4) for n, y in turned(x)):.0e}"


@check(EQUIVARIANCE, "quarter turns, p8 (C8)", control=False)
def quarter_turns(library: Library) -> str:
    return _invariant(trained(library), PIXELS)


# All three halve images of odd sizes exactly, and escnn and e2cnn ask for them.
@check(EQUIVARIANCE, "quarter turns of 17×17 images, halved on the way", control=False)
def halved(library: Library) -> str:
    return _invariant(trained(library, halved=True), 17)


@check(
    EQUIVARIANCE,
    "reflections and quarter turns of features, p4m (D4)",
    control=False,
)
def reflections(library: Library) -> str:
    errors = {}
    for before in (0, 2):
        layer = library.convolution("p4m", before, 2).eval()
        channels = 2 * libraries.order_of("p4m") if before else 3
        x = library.wrapped(image(2, channels, PIXELS, PIXELS), layer)
        out = layer(x)
        for element, moved in library.movements("p4m"):
            wanted, found = moved(out), layer(moved(x))
            words = f"output ({'group convolution' if before else 'lifting layer'}, {element})"
            errors[words] = difference(library.tensor(found), library.tensor(wanted))
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] > 1e-4:
        raise AssertionError(f"the {worst} differs by {errors[worst]:.1g} of its size")
    return f"to {errors[worst]:.0e}"
