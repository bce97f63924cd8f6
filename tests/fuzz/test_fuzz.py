"""Calls that nobody thought of: each ends in a result, or in a sentence on what was expected.

``make test`` runs some hundred cases, always the same; ``make fuzz`` ``ECONV_FUZZ`` new ones. Each
has five seconds and two gigabytes.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import econv
from econv import models, reference, testing
from econv.engines.spectral.native import Native
from econv.layers.convolution import ConvOptions

CASES = int(os.environ.get("ECONV_FUZZ", "0"))
SECONDS, BYTES = 5.0, 2 << 30
DOUBLE = torch.float64


def cases(share):
    """So many of the cases: the same ones in every run, unless a number was asked for."""
    return settings(
        max_examples=max(1, round(share * (CASES or 500))),
        deadline=None,
        derandomize=not CASES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class TooLongError(BaseException):
    """A case took longer than it may; nothing that it calls catches this."""


@contextlib.contextmanager
def limits(seconds=SECONDS, memory=BYTES):
    """What runs inside may take so long, and so much more memory."""

    def stop(*_):
        raise TooLongError(f"more than {seconds:g} s")

    linux = sys.platform == "linux"
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if linux else 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    if pages:
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    signal.signal(signal.SIGPROF, stop)  # for good: a late one must not end the process
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


WORDS = (
    "expected",
    "cannot ",
    "must",
    "unknown",
    "takes no",
    "unexpected keyword",
    "missing",
    "not a ",
)


# What torch's own modules say in the same place.
OF_TORCH = (
    "when none is available",
    "cannot be called on meta tensors",
    "to type float without overflow",
)


def allowed(call, *given, **options):
    """The result, or nothing where a ValueError or TypeError says what was expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with limits():
                return call(*given, **options)
        except (ValueError, TypeError) as error:
            if not any(word in str(error).lower() for word in WORDS):
                raise AssertionError(f"says nothing of what was expected: {error!r}") from error
            return None
        except RuntimeError as error:
            if not any(words in str(error) for words in OF_TORCH):
                raise
            return None  # torch's own sentence on names of devices


# What can stand for an argument


STRANGE = [
    *(None, True, False, 0, 1, 2, 3, -1, 7, 1.5, -0.5, math.nan, math.inf, 1e300),
    *(2**31, 2**63 - 1, 10**30, "", "no", "p4", "p0", "p999999999999", "O", "float32", "order<=99"),
    *((), (1, 2), (0, 0), [3], [[1, 2]], {}, {"a": 1}, b"p4", object(), np.int64(3), np.nan),
    *(
        torch.float32,
        torch.int8,
        torch.float8_e4m3fn,
        torch.tensor(2),
        torch.zeros(2, 3),
        nn.ReLU(),
    ),
]
FEW = st.integers(1, 3)
GROUPS = st.sampled_from(["p1", "p2", "p3", "p4", "p6", "p8", "p1m", "p4m", "p6m"])
SIZE = st.sampled_from([None, None, 5, 7, 9, 4, 1])
KIND = st.sampled_from([None, "scalar", "regular", "vector"])
USUAL = {
    **dict.fromkeys(("in_channels", "in_fields", "out_fields", "out_vectors", "fields"), FEW),
    **dict.fromkeys(("group", "whole"), GROUPS),
    "subgroup": st.sampled_from(["p1", "p2", "p4", "p1m"]),
    "operators": st.sampled_from(["paper", "order<=1", "order<=2", [(0, 0), (1, 0)]]),
    "stencils": st.sampled_from(["isotropic", "central", "gaussian"]),
    "size": SIZE,
    "accuracy": st.sampled_from([2, 4]),
    "stride": st.integers(1, 3),
    "padding": st.sampled_from(["same", "valid", 0, 1, 3]),
    "padding_mode": st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    "bias": st.booleans(),
    "groups": st.just(1),
    "dilation": st.integers(1, 2),
    "spacing": st.sampled_from([1.0, 0.5, (1.0, 2.0)]),
    "centred": st.sampled_from([False, True, (3, 2)]),
    "init": st.sampled_from(["relu", "paper"]),
    "engine": st.sampled_from(["auto", "dense", "spectral", "spectral/torch"]),
    "device": st.sampled_from([None, "cpu", "meta"]),
    "dtype": st.sampled_from([None, torch.float32, DOUBLE, torch.bfloat16]),
    "reduce": st.sampled_from(["max", "mean", "std"]),
    "kernel_size": FEW,
    "factor": FEW,
    "antialias": st.sampled_from([4, 6]),
    "eps": st.sampled_from([1e-5, 0.0]),
    "momentum": st.sampled_from([0.1, None]),
    "name": st.sampled_from(["convnet6_p4", "p4", "spectral", "convnet6"]),
    "activation": st.sampled_from(["silu", "relu", torch.tanh]),
    "function": st.just("silu"),
    "model": st.builds(lambda: nn.Sequential(nn.ReLU())),
    "module": st.builds(lambda: nn.Sequential(econv.LiftConv2d(1, 1, "p4"))),
    "example_input": st.builds(lambda: torch.zeros(1, 1, 9, 9)),
    "p": st.sampled_from([0.0, 0.2]),
    "exponents": st.tuples(st.integers(0, 3), st.integers(0, 3)),
    "x": st.builds(lambda: torch.randn(1, 8, 9, 9)),
    "element": st.integers(0, 3),
    "weight_decay": st.just(1e-4),
    "num_groups": st.just(1),
    "depth": st.sampled_from([8, 18]),
    "num_classes": st.integers(0, 3),
    **dict.fromkeys(("affine", "track_running_stats", "ceil_mode", "exact"), st.booleans()),
    **dict.fromkeys(("scalars", "vectors", "pseudoscalars", "batch", "channels"), FEW),
    **dict.fromkeys(("input_kind", "output_kind", "kind"), KIND),
    **dict.fromkeys(("drop_rate", "dropout"), st.sampled_from([0.0, 0.5])),
    "count": st.integers(1, 3),
    "degrees": st.sampled_from([90, 30.0]),
    "dimension": st.sampled_from([2, 3]),
    "elements": st.sampled_from([None, (0, 1)]),
    "image_size": st.integers(5, 40),
    "margin": st.sampled_from([0, 0.25, 2]),
    "out_indices": st.sampled_from([None, (0,), (-1,)]),
    "oversample": st.integers(1, 2),
    "pixels": st.integers(1, 9),
    "pool": st.sampled_from([None, "max", "mean", "mean+std"]),
    "pooled_after": st.sampled_from([(), (1,), (0, 1)]),
    "readout": st.sampled_from([None, "mean"]),
    "rotations": st.sampled_from([4, 8]),
    "seed": st.integers(0, 3),
    "smoothness": st.sampled_from([1, 2.0]),
    "tolerance": st.sampled_from([None, 0.5]),
    "width": st.sampled_from([0.5, 1.0]),
}
PUBLIC = {
    **{name: getattr(econv, name) for name in econv.__all__},
    **{f"testing.{name}": getattr(testing, name) for name in testing.__all__},
    **{f"models.{name}": getattr(models, name) for name in models.__all__},
}
CALLS = {
    name: call
    for name, call in PUBLIC.items()
    if callable(call)
    and not inspect.ismodule(call)
    and not (inspect.isclass(call) and issubclass(call, BaseException))
}
LEFT_OUT = {"models.Network", "models.FeatureInfo"}  # abstract; made by another


def parameters(call):
    """The names of the arguments of a call, and whether each is needed."""
    found = inspect.signature(call).parameters.values()
    plain = [one for one in found if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    names = {one.name: one.default is one.empty for one in plain}
    if any(one.kind is one.VAR_KEYWORD for one in found) and "Conv" in getattr(
        call, "__name__", ""
    ):
        names |= dict.fromkeys(ConvOptions.__annotations__, False)
    return names


@st.composite
def calls(draw):
    """A public name, and arguments: most as they should be, some strange."""
    name = draw(st.sampled_from(sorted(CALLS)))
    options = {}
    strange = draw(st.integers(0, 3)) == 0
    for word, needed in parameters(CALLS[name]).items():
        if not needed and draw(st.integers(0, 4)) > 1:
            continue
        usual = USUAL.get(word)
        odd = usual is None or (strange and draw(st.integers(0, 2)) == 0)
        options[word] = draw(st.sampled_from(STRANGE) if odd else usual)
    if "fields" in parameters(CALLS[name]) and name.startswith("models."):
        options.setdefault("fields", {"models.ResNet": [1] * 3}.get(name, [1] * 4))
    return name, options


def nested(x):
    with warnings.catch_warnings():  # torch says once that they are new
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x, x])


def made(shape, dtype, layout):
    """An image in one of many layouts, or none at all."""
    x = torch.randn(shape).to(dtype)
    if layout == "last":
        return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    return {
        "plain": lambda: x,
        "turned": lambda: x.transpose(-1, -2) if x.ndim > 1 else x,
        "gaps": lambda: torch.cat([x, x], -1)[..., ::2] if x.ndim else x,
        "expanded": lambda: x[..., :1].expand(x.shape) if x.ndim and x.shape[-1] else x,
        "negative": lambda: torch._neg_view(x) if x.is_floating_point() else x,
        "meta": lambda: x.to("meta"),
        "sparse": lambda: x.to_sparse() if dtype.itemsize > 1 else x,
        "nested": lambda: nested(x) if dtype.itemsize > 1 else x,
        "gradient": lambda: x.requires_grad_() if x.is_floating_point() else x,
        "list": lambda: x.tolist(),
    }[layout]()


LAYOUTS = ["plain"] * 6 + ["last", "turned", "gaps", "expanded", "negative", "meta", "sparse"]
LAYOUTS += ["nested", "gradient", "gradient", "list"]
DTYPES = [torch.float32] * 6 + [DOUBLE, torch.bfloat16, torch.float16, torch.int64, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


@st.composite
def images(draw):
    """The shape, dtype and layout of an image; most fit a layer of its channels."""
    batch, height, width = draw(st.sampled_from([0, 1, 2])), *(draw(st.integers(0, 13)),) * 2
    channels = draw(st.sampled_from([None] * 6 + [0, 1, 5]))
    if draw(st.booleans()):
        width = draw(st.integers(1, 13))
    rank = draw(st.sampled_from([4] * 8 + [0, 2, 3, 5]))
    return (batch, channels, height, width, 2)[:rank], *map(
        draw, (st.sampled_from(DTYPES), st.sampled_from(LAYOUTS))
    )


def reads(module):
    """The channels that a module would read, as far as it says so."""
    for word in ("in_channels", "fields", "num_features"):
        if isinstance(count := getattr(module, word, None), int):
            return count * getattr(module, "_order", 1) if word == "fields" else count
    group = getattr(module, "group", None)
    return group.order if isinstance(group, econv.Group) else 1


@cases(0.6)
@given(call=calls(), image=images())
def test_a_call_gives_a_result_or_says_what_was_expected(call, image):
    name, options = call
    if name in LEFT_OUT:
        return
    found = allowed(CALLS[name], **options)
    if isinstance(found, econv.Group) and found.order <= 16:
        assert found.irreps
    ours = type(found).__module__.startswith("econv.layers")
    if not ours or len(parameters(found.forward)) != 1:
        return
    shape, dtype, layout = image
    shape = tuple(reads(found) if n is None else n for n in shape)
    x = made(shape, dtype, layout)
    y = allowed(found, x)
    if isinstance(y, torch.Tensor) and y.requires_grad:
        allowed(y.float().sum().backward)


def test_limits_can_say_no():
    def forever():
        while True:
            time.process_time()

    with pytest.raises(TooLongError), limits(seconds=0.05):
        forever()
    if sys.platform == "linux":
        with pytest.raises(RuntimeError, match="allocate"), limits(memory=1 << 20):
            torch.empty(1 << 28)
    for error in (RuntimeError("expected"), ValueError("oh"), AttributeError("expected")):

        def wrong(error=error):
            raise error

        with pytest.raises((type(error), AssertionError)):
            allowed(wrong)


# Every engine on every problem


PLANE = ["p1", "p2", "p3", "p4", "p6", "p8", "p1m", "p3m", "p4m"]
SPACE = ["C2", "T", "O"]


@st.composite
def problems(draw):
    """A layer and an image or a volume, most of which fit one another."""
    kind = draw(st.sampled_from(["lift", "group", "group", "vector"]))
    group = draw(st.sampled_from(2 * PLANE + SPACE))
    flat = group in PLANE
    sets = ["order<=1", "order<=2", "paper"] if flat else ["order<=0", "order<=1"]
    modes = ["zeros", "zeros", "replicate", "circular", "reflect"]
    options = {
        "operators": draw(st.sampled_from(sets)) if kind != "vector" or flat else "order<=1",
        "stencils": draw(st.sampled_from(["isotropic", "isotropic", "central"])),
        "stride": draw(st.integers(1, 4 if flat else 2)),
        "dilation": draw(st.integers(1, 3 if flat else 2)),
        "padding": draw(st.sampled_from(["same", "same", "valid", 0, 1, 2, 7 if flat else 3])),
        "padding_mode": draw(st.sampled_from(modes)),
        "bias": draw(st.booleans()) and kind != "vector",
        "centred": draw(st.integers(0, 3)) == 0,
        "groups": draw(st.sampled_from([1, 1, 1, 2])),
    }
    most = (3 if flat else 2) // options["groups"]
    fields = [options["groups"] * draw(st.integers(1, most)) for _ in range(2)]
    most = 24 if flat else 7  # small ones are rare: they are less than a stencil
    sides = [most - draw(st.integers(0, most - 1)) for _ in range(2 if flat else 3)]
    image = draw(st.integers(1, 3 if flat else 2)), *sides
    layout = draw(st.sampled_from(["plain", "last", "turned", "gaps", "expanded", "negative"]))
    return kind, group, tuple(fields), options, image, layout


KINDS = {
    (kind, dimension): getattr(econv, f"{kind.capitalize()}Conv{dimension}d")
    for kind in ("lift", "group", "vector")
    for dimension in (2, 3)
}


def everything(layer, x, engine):
    """The result, and the gradients to input, weight and bias."""
    x = x.detach().requires_grad_()
    with econv.engine(engine):
        y = layer(x)
    probe = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).sin().view(y.shape)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], probe)]


def agree(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        assert one.shape == two.shape
        if one.numel():
            scale = max(1.0, float(two.detach().abs().max()))
            assert float((one - two).detach().abs().max()) <= 1e-9 * scale


def posed(problem):
    """The layer and the image, if they fit one another."""
    kind, group, fields, options, (batch, *sides), layout = problem
    layer = KINDS[kind, len(sides)](*fields, group, dtype=DOUBLE, **options)
    if layout == "turned":
        sides[-2:] = sides[:-3:-1]
    x = made((batch, layer.in_channels, *sides), DOUBLE, layout)
    try:
        layer.read(x)
    except ValueError:
        return None
    return layer, x


def test_engines_agree_with_gradients():
    seen = Counter()

    @cases(0.3)
    @given(problem=problems())
    def every_problem(problem):
        seen["posed"] += 1
        found = posed(problem)
        if found is None:
            return
        with limits():
            each = [everything(*found, name) for name in ("dense", "spectral", "spectral/torch")]
        agree(each[1], each[0])
        agree(each[2], each[0])
        options = problem[3]
        seen.update(["valid", "flat" if problem[1] in PLANE else "volumes"])
        seen.update([options["padding_mode"]] + ["groups"] * (options["groups"] == 2))

    every_problem()
    assert seen["valid"] >= seen["posed"] // 2
    for word in ("flat", "volumes", "zeros", "replicate", "circular", "reflect", "groups"):
        assert seen[word] >= seen["posed"] // 100, seen


FILTERS = {
    "lift": reference.lift_filters,
    "group": reference.group_filters,
    "vector": reference.vector_filters,
}


@cases(0.1)
@given(problem=problems().filter(lambda problem: problem[1] in ("p1", "p2", "p3", "p4", "p1m")))
def test_the_reference_agrees_with_gradients(problem):
    kind, group, _, options, _, _ = problem
    problem = (kind, group, (1, 1), {**options, "centred": False, "groups": 1}, *problem[4:])
    found = posed(problem)
    if found is None:
        return
    layer, x = found
    x = x.detach().requires_grad_()
    with limits(seconds=20):
        words = (options["operators"], options["stencils"], layer.basis.size, layer.dilation)
        filters = FILTERS[kind](layer.coefficients(), group, *words)
        padding, mode = layer.padding, layer.padding_mode
        image = x if mode == "zeros" else reference.pad(x, padding, (mode, mode))
        bias = None if layer.bias is None else layer._channel_bias()
        windows = (layer.stride, padding if mode == "zeros" else 0, layer.dilation)
        y = reference.convolve(image, filters, bias, *windows)
    probe = torch.linspace(-1, 1, y.numel(), dtype=DOUBLE).sin().view(y.shape)
    wanted = [y, *torch.autograd.grad(y, [x, *layer.parameters()], probe)]
    agree(everything(layer, x, "dense"), wanted)


def test_a_wrong_engine_falls_out(monkeypatch):
    """The comparison can fail: for a gradient that is off by a millionth."""
    right = Native.product

    def wrong(*given, **options):
        found, total = right(*given, **options)
        return found, None if total is None else total * (1 + 1e-6)

    problem = ("group", "p4", (2, 2), {}, (2, 9, 9), "plain")
    layer, x = posed(problem)
    agree(everything(layer, x, "spectral"), everything(layer, x, "dense"))
    monkeypatch.setattr(Native, "product", wrong)
    with pytest.raises(AssertionError):
        agree(everything(layer, x, "spectral"), everything(layer, x, "dense"))
