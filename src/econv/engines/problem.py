"""What a convolution is, said once: the value that engines are asked about.

A layer knows its `Convolution`. With the input's size, dtype and device it is a `Problem`. This
module knows shapes; how a problem is run is the business of the engines.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from econv.basis import FilterBasis
from econv.fourier import KINDS
from econv.plan import SpectralPlan, spectral_plan
from econv.tensors import autocasts, memory_format, replicate, transformed, watched


class Geometry(NamedTuple):
    """Which input pixels an output pixel reads, along all axes alike.

    Output y reads the points y·down + t·dilation − before of the input, t = 0 … size − 1, where
    the input was spread by ``up`` (up − 1 zeros between pixels) and is zero outside.
    """

    up: int
    down: int
    dilation: int
    before: int
    """Pixels of padding before the first; negative ones are cut off."""
    sizes: tuple[int, ...]
    """Of the output, along each axis: (height, width), or (depth, height, width)."""

    @staticmethod
    def of(size: int, lengths: Sequence[int], stride: int, padding: int, dilation: int) -> Geometry:
        """The geometry of a layer with zeros around an input of the given lengths."""
        reach = dilation * (size - 1) + 1
        sizes = tuple((n + 2 * padding - reach) // stride + 1 for n in lengths)
        return Geometry(1, stride, dilation, padding, sizes)

    def transposed(self, size: int, lengths: Sequence[int]) -> Geometry:
        """The geometry of the adjoint, whose output has the given lengths."""
        before = self.dilation * (size - 1) - self.before
        return Geometry(self.down, self.up, self.dilation, before, tuple(lengths))

    @property
    def numbers(self) -> list[int]:
        """All of it in a row, as graphs and kernels are told; `read` is the way back."""
        return [*self[:4], *self.sizes]

    @staticmethod
    def read(numbers: Sequence[int]) -> Geometry:
        """The geometry with these `numbers`."""
        up, down, dilation, before, *sizes = numbers
        return Geometry(up, down, dilation, before, tuple(sizes))

    @property
    def pixels(self) -> int:
        """Of the output."""
        return math.prod(self.sizes)


class Part(NamedTuple):
    """Input channels that transform alike."""

    kind: str
    """How: one of `econv.fourier.KINDS`."""
    fields: int


@dataclass(frozen=True, eq=False)
class Convolution:
    """What a layer's convolution is, whatever it reads. Equal ones are one object.

    Made by `convolution`; fields are counted in all groups together.

    Raises:
        ValueError: for an unknown kind of field.
    """

    basis: FilterBasis
    parts: tuple[Part, ...]
    target: str
    out_fields: int
    groups: int = 1
    stride: int = 1
    padding: int = 0
    padding_mode: str | tuple[str, ...] = "zeros"  # several are those of (y, x) or (z, y, x)
    dilation: int = 1

    def __post_init__(self) -> None:
        for kind in (*(part.kind for part in self.parts), self.target):
            if kind not in KINDS:
                raise ValueError(f"unknown kind of field {kind!r}: expected one of {KINDS}")

    def __reduce__(self) -> tuple[Any, ...]:
        return convolution, tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    @cached_property
    def name(self) -> str:
        """A text that stands for the convolution: in graphs, in files and in checkpoints."""
        of_basis = ("group", "operators", "stencils")
        words: dict[str, Any] = {word: getattr(self.basis, word).name for word in of_basis}
        # The digest: two bases may have the same words.
        words |= {"size": self.basis.size, "basis": self.basis.digest, "parts": self.parts}
        words |= {"target": self.target, "out": self.out_fields, "groups": self.groups}
        words |= {"stride": self.stride, "padding": [self.padding, self.padding_mode]}
        return json.dumps({**words, "dilation": self.dilation})

    def plan(self, part: Part) -> SpectralPlan:
        """The spectral factorisation of the layer on one part of its input."""
        if part.kind not in self._plans:
            self._plans[part.kind] = spectral_plan(self.basis, part.kind, self.target)
        return self._plans[part.kind]

    @cached_property
    def _plans(self) -> dict[str, SpectralPlan]:
        """Those that were asked for: they last as long as the layers do."""
        return {}

    @property
    def dimension(self) -> int:
        """Of the space: 2 for images, 3 for volumes."""
        return self.basis.group.dimension

    def width(self, kind: str) -> int:
        """Channels of a field."""
        return {"vector": self.dimension, "regular": self.basis.group.order}.get(kind, 1)

    def geometry(self, lengths: Sequence[int]) -> Geometry:
        """Of an input whose borders, if they are not zeros, were made before."""
        zeros = self.padding if self.padding_mode == "zeros" else 0
        return Geometry.of(self.basis.size, lengths, self.stride, zeros, self.dilation)

    @cached_property
    def channels(self) -> tuple[int, int]:
        """Of the input and of the output."""
        read = sum(part.fields * self.width(part.kind) for part in self.parts)
        return read, self.out_fields * self.width(self.target)

    def __str__(self) -> str:
        into = " + ".join(f"{fields} {kind}" for kind, fields in self.parts)
        options = f", stride {self.stride}" if self.stride > 1 else ""
        options += f", groups {self.groups}" if self.groups > 1 else ""
        return (
            f"{self.basis.group.name}, {into} → {self.out_fields} {self.target}, "
            f"{times([self.basis.size] * self.dimension)}{options}"
        )


# They last as long as layers do, the latest a little longer: copies are made of what is gone.
_NAMED: WeakValueDictionary[str, Convolution] = WeakValueDictionary()
_latest: deque[Convolution] = deque(maxlen=16)


def convolution(*properties: Any, **others: Any) -> Convolution:
    """The convolution with these properties, one object for all that ask for it.

    >>> from econv import filter_basis
    >>> print(convolution(filter_basis("p8"), (Part("regular", 4),), "regular", 6))
    p8, 4 regular → 6 regular, 5×5
    """
    made = Convolution(*properties, **others)
    found = _NAMED.setdefault(made.name, made)
    _latest.append(found)
    return found


def convolution_named(name: str) -> Convolution:
    """The convolution whose `Convolution.name` this is."""
    found = _NAMED.get(name)
    if found is None:
        raise ValueError(f"expected the name of a convolution of this process; got {name}")
    return found


class Problem(NamedTuple):
    """One call of a convolution: all that an engine may ask before it runs."""

    convolution: Convolution
    batch: int
    sizes: tuple[int, ...]
    """Of the input along each axis, without padding."""
    dtype: torch.dtype
    """Of the output; under autocast the input may have another."""
    device: torch.device
    channels_last: bool
    to_input: bool
    """Whether a gradient to the input follows."""
    to_weight: bool
    context: str = "eager"
    """``"eager"``; ``"traced"`` into a graph that may hold operators of ours; ``"transformed"`` by
    `torch.func` or forward-mode differentiation; ``"watched"`` by what must see torch's own
    operations, such as an exporter or a tensor subclass."""
    engine: str = "auto"
    """Its name, where one was asked for."""
    weight_dtype: torch.dtype = torch.float32

    @staticmethod
    def of(
        convolution: Convolution,
        x: Tensor,
        weight: Tensor,
        context: str | None = None,
        engine: str = "auto",
    ) -> Problem:
        """The problem that a call poses; symbolic sizes count as what they were seen as."""
        batch, _, *sizes = (_hint(n) for n in x.shape)
        to_x, to_weight = (torch.is_grad_enabled() and t.requires_grad for t in (x, weight))
        if context is None:
            context = "transformed" if transformed() else "eager"
            context = "watched" if watched(x) or watched(weight) else context
        rounded = x.dtype != torch.float64 and autocasts(x.device)
        dtype = torch.get_autocast_dtype(x.device.type) if rounded else x.dtype
        last = memory_format(x) is not torch.contiguous_format
        images = (batch, tuple(sizes), dtype, x.device, last)
        return Problem(convolution, *images, to_x, to_weight, context, engine, weight.dtype)

    @property
    def named(self) -> bool:
        """Whether an engine was asked for by name: then what fails is an error."""
        return self.engine != "auto"

    @property
    def multiplications(self) -> int:
        """Those of the dense engine, forwards."""
        pixels = math.prod(self.sizes) // self.convolution.stride**self.convolution.dimension
        return self.batch * pixels * self.filters

    @property
    def filters(self) -> int:
        """Numbers of the dense filters."""
        conv = self.convolution
        return math.prod(conv.channels) // conv.groups * conv.basis.size**conv.dimension

    @property
    def maps(self) -> int:
        """Numbers of the input, and of an output as large."""
        return self.batch * math.prod(self.sizes) * sum(self.convolution.channels)

    def __str__(self) -> str:
        layout = ", channels-last" if self.channels_last else ""
        passes = "with gradients" if self.to_input or self.to_weight else "forwards"
        return (
            f"{self.convolution}, batch {self.batch}, {times(self.sizes)}{layout}, "
            f"{str(self.dtype).removeprefix('torch.')}, {passes}"
        )


class Weight(NamedTuple):
    """What a layer learns, and the fixed arrays of `econv.engines.dense.tables` that expand it."""

    learned: Tensor
    tables: tuple[Tensor, ...]

    def parts(self, convolution: Convolution) -> list[Tensor]:
        """For each part of the input ``[out fields, in fields / groups, coordinates]``."""
        weight = self.learned.flatten(2)
        if convolution.target != "regular":  # [width * fields, in fields, coordinates / width]
            width = convolution.width(convolution.target)
            weight = weight.unflatten(0, (-1, width)).transpose(1, 2).flatten(2)
        if convolution.parts[0].kind == "regular":
            return [weight]
        parts = [
            (n // convolution.groups, convolution.width(kind)) for kind, n in convolution.parts
        ]
        own = weight.split([fields * width for fields, width in parts], 1)
        return [w.unflatten(1, shape).flatten(2) for w, shape in zip(own, parts, strict=True)]


class Prologue(NamedTuple):
    """What an engine does to its input where it reads it: max(0, (x − centre)·scale + shift)."""

    affine: Tensor | None
    """These numbers of each field, ``[3, fields]`` in float32; nothing if it was done before."""

    def apply(self, x: Tensor) -> Tensor:
        """The same as operations of torch, in the dtype of ``x``."""
        if self.affine is None:
            return x
        each = x.shape[1] // self.affine.shape[1]
        rows = self.affine[:, :, None].expand(-1, -1, each)
        rows = rows.reshape(3, 1, -1, *[1] * (x.ndim - 2))
        centre, scale, shift = rows.unbind()
        return torch.relu((x.to(self.affine.dtype) - centre) * scale + shift).to(x.dtype)


class Engine(Protocol):
    """A way to run a convolution."""

    name: str
    compiled: bool = False
    """Whether it runs kernels of ours, which ``"auto"`` measures against the dense engine."""
    fuses: bool = False
    """Whether it runs a prologue where it reads the input, which is then never written."""

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot run a problem, as a sentence; nothing where it can."""
        return None

    def run(
        self,
        problem: Problem,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> Tensor:
        """The convolution of ``x``, as the prologue makes it; ``bias`` is that of channels."""
        raise NotImplementedError


def bordered(convolution: Convolution, x: Tensor) -> tuple[Tensor, int]:
    """The input with borders that are not zeros, in its layout, and the padding that is left."""
    padding, mode = convolution.padding, convolution.padding_mode
    if mode == "zeros" or not padding:
        return x, padding
    every, padded = tuple(range(2, x.ndim)), x
    each = [(every, mode)] if isinstance(mode, str) else [*zip(zip(every), mode, strict=True)]
    for axes, way in each:
        if way == "replicate":
            padded = replicate(padded, padding, padding, axes)
        else:
            sides = [padding * (axis in axes) for axis in every[::-1] for _ in range(2)]
            padded = functional.pad(padded, sides, mode="constant" if way == "zeros" else way)
    return padded.contiguous(memory_format=memory_format(x)), 0


def times(sizes: Iterable[int]) -> str:
    """Sizes as a text, such as 8×9."""
    return "×".join(map(str, sizes))


def _hint(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        size = 1 if size.node.hint is None else size.node.hint
    return int(size)  # while `torch.jit` traces, sizes are tensors
