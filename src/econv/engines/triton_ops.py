"""The spectral engine on a GPU as operators of torch: three launches around each product.

``econv::convolve`` is a layer A(x; w), linear in its input and in its spectral weights, or its
adjoint; ``econv::gram`` is the gradient to the weights. Their derivatives are these two again, so
that every order of differentiation is made of them. They have fake kernels: compilers and exporters
see one opaque operator each.

Arithmetic: 16-bit inputs run in float16, each image scaled by a power of two to the middle of its
range, so that derivatives and weights keep three digits more than bfloat16 has; sums are float32.
float32 inputs run in float32 with products in tf32, or in three of them where tf32 is not allowed.

Memory: what is kept for the backward pass is the input and the spectral weights. While an operator
runs there is the spectrum of a group of images on the padded grid.

This room knows tensors and launches. The kernels are those of `econv.engines.triton_kernels`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from econv.engines.dense import memory_format
from econv.engines.spectral import Geometry
from econv.engines.triton_kernels import (
    FIELDS,
    HEADROOM,
    INTERPRETED,
    RUN,
    Scheme,
    arrange,
    convolution,
    gradient,
    scheme,
    spread,
)
from econv.plan import SpectralPlan, plan_named

__all__ = ["Tiles", "convolve", "covers", "gram", "run_convolve", "run_gram", "tiles"]

_INTERNAL = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.float16,
    torch.float32: torch.float32,
}


class Tiles(NamedTuple):
    """How a launch is cut into programs.

    Pixels times fields of a program are at least 32 for each of its warps: a thread owns a pixel
    and a field.
    """

    pixels: int = 64
    """Pixels of one program of the convolution, which takes `FIELDS` fields at a time."""
    warps: int = 8
    stages: int = 1
    accumulators: int = 384
    """Output channels (slots times fields) of one program, at most."""
    gram_pixels: int = 128
    """Pixels at a time in the gradient to the weights."""
    gram_fields: int = 2
    """Input fields of one program there, at most `FIELDS`."""
    gram_warps: int = 8
    gram_accumulators: int = 384
    splits: int = 0
    """How many programs share the pixels of one gradient to the weights; 0: enough for the GPU."""
    bytes: int = 64 << 20
    """The most that is made of the images of one launch: they run in groups."""


TUNED: dict[tuple[int, int], Tiles] = {}
"""The best of what was measured, by targets (a power of two) and output fields.

Made by ``benchmarks/engines.py --device cuda --tune``; what is not there takes the nearest number
of fields, or the defaults where there is none for its targets.
"""
_override: list[Tiles] = []


class tiles:  # noqa: N801  # a context manager, named as `econv.engine` is
    """Inside the block every launch is cut as given: for measurements.

    >>> with tiles(pixels=128):  # doctest: +SKIP
    ...     layer(x)
    """

    def __init__(self, **changes: int) -> None:
        self.changes = changes

    def __enter__(self) -> Tiles:
        found = (_override[-1] if _override else Tiles())._replace(**self.changes)
        _override.append(found)
        return found

    def __exit__(self, *error: object) -> None:
        _override.pop()


def _tiles(layout: Scheme, fields: int, dtype: torch.dtype) -> Tiles:
    if _override:
        return _override[-1]
    known = [key for key in TUNED if key[0] == layout.batch]
    if not known or dtype != torch.float16:
        # Where slots come in several chunks the gradient holds one at a time, of more fields.
        return Tiles() if layout.chunks == 1 else Tiles(gram_pixels=64, gram_fields=4)
    return TUNED[min(known, key=lambda key: abs(math.log(key[1] / fields)))]


def covers(dtype: torch.dtype, size: int, geometry: Geometry, shape: tuple[int, ...]) -> bool:
    """Whether the kernels can run a layer from regular fields to regular ones, both ways.

    ``size`` is that of the stencils, ``shape`` that of the input.
    """
    back = geometry.transposed(size, *shape[2:])
    return dtype in _INTERNAL and geometry.before >= 0 and back.before >= 0


@dataclass(frozen=True)
class _Grid:
    """The padded grid that holds a spectrum: rows and images share the zeros between them."""

    pitch: int
    """From a row to the next."""
    lines: int
    """Rows of an image."""
    places: int

    @staticmethod
    def of(shape: tuple[int, ...], geometry: Geometry, size: int) -> _Grid:
        reach = geometry.dilation * (size - 1) + 1
        lengths, shared = [], []
        for have, wanted in zip(shape[2:], (geometry.height, geometry.width), strict=True):
            needed = (wanted - 1) * geometry.down + reach
            after = needed - geometry.before - ((have - 1) * geometry.up + 1)
            shared.append(max(0, min(geometry.before, after)))
            lengths.append(needed - shared[-1])
        lines, pitch = lengths
        places = (shape[0] * lines + shared[0]) * pitch + shared[1]
        return _Grid(pitch, lines, places)


class _Spectrum(NamedTuple):
    values: Tensor  # [field chunks, slot chunks, places, FIELDS, width]
    grid: _Grid


class _Constants(NamedTuple):
    entries: Tensor
    signs: Tensor
    adjoint_entries: Tensor
    adjoint_signs: Tensor
    pieces: Tensor
    owners: Tensor
    owner_signs: Tensor


@lru_cache(maxsize=512)
def _constants(layout: Scheme, device: torch.device) -> _Constants:
    arrays = (*layout.entries, *layout.adjoint_entries, layout.piece_of, *layout.owners)
    with torch.inference_mode(False):
        made = [torch.tensor(array, device=device) for array in arrays]
    return _Constants(*made)


def _scheme(plan: SpectralPlan, dtype: torch.dtype) -> Scheme:
    return scheme(plan, 16 // _INTERNAL[dtype].itemsize)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that some kernel fills: every element, or nobody reads it."""
    return torch.empty(shape, dtype=dtype, device=device)


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.linalg.vector_norm(x, math.inf, dim=dims, dtype=torch.float32)


def _groups(x: Tensor, layout: Scheme, geometry: Geometry, most: int, more: int = 0) -> list[slice]:
    """Images in equal groups, such that no more than ``most`` bytes are made of one.

    That is their spectrum, and ``more`` numbers for each image.
    """
    grid = _Grid.of(tuple(x.shape), geometry, layout.plan.basis.size)
    fields = FIELDS * triton.cdiv(x.shape[1] // layout.plan.analysis.shape[1], FIELDS)
    numbers = grid.places * fields * layout.chunks * layout.width + x.shape[0] * more
    total = numbers * _INTERNAL[x.dtype].itemsize
    # Multiples of four: kernels are compiled anew for addresses that are less aligned.
    each = 4 * triton.cdiv(x.shape[0], 4 * triton.cdiv(total, most))
    return [slice(i, i + each) for i in range(0, x.shape[0], each)]


def _analysed(
    analyse: Any, x: Tensor, largest: Tensor, layout: Scheme, geometry: Geometry
) -> _Spectrum:
    """The spectrum of images, scaled by a largest number of all or of each."""
    plan = layout.plan
    channels = plan.analysis.shape[1]
    batch, fields = x.shape[0], x.shape[1] // channels
    grid = _Grid.of(tuple(x.shape), geometry, plan.basis.size)
    chunks = triton.cdiv(fields, FIELDS)
    shape = (chunks, layout.chunks, grid.places, FIELDS, layout.width)
    values = _empty(shape, _INTERNAL[x.dtype], x.device)
    block = 64
    analyse[(triton.cdiv(grid.places, block), chunks)](
        x,
        largest,
        values,
        batch,
        fields,
        x.shape[2],
        x.shape[3],
        geometry.up,
        geometry.before,
        grid.pitch,
        grid.lines,
        grid.places,
        largest.dim(),
        x.stride(0),
        x.stride(1),
        x.stride(2),
        x.stride(3),
        BQ=block,
        num_warps=4,
    )
    return _Spectrum(values, grid)


class _Cut(NamedTuple):
    """The output fields of one program: so many copies of these parts, powers of two each."""

    parts: tuple[int, ...]
    copies: int
    programs: int

    @property
    def padded(self) -> int:
        return self.programs * self.copies * sum(self.parts)


def _cut(fields: int, layout: Scheme, warps: int, accumulators: int, least: int) -> _Cut:
    copies = max(1, warps // layout.batch)
    most = max(least * copies, accumulators // (2 * layout.batch))
    programs = triton.cdiv(fields, most)
    each = least * triton.cdiv(fields, least * copies * programs)
    parts: list[int] = []
    while each:  # 20 is 16 + 4; 28, which would take three parts, is 32
        size = 1 << (each.bit_length() - 1)
        rest = each - size
        if parts or rest & (rest - 1):
            size = triton.next_power_of_2(each)
        parts.append(size)
        each -= min(size, each)
    return _Cut(tuple(parts), copies, triton.cdiv(fields, copies * sum(parts)))


def _arranged(weights: Tensor, layout: Scheme, cut: _Cut, dtype: torch.dtype, adjoint: bool) -> Any:
    constants = _constants(layout, weights.device)
    weights = weights.contiguous()
    turned = weights.transpose(0, 1) if adjoint else weights
    out_fields, in_fields = turned.shape[:2]
    in_padded = FIELDS * triton.cdiv(in_fields, FIELDS)
    count = layout.batch * layout.inner
    found = _empty((in_padded, count, cut.padded, 2), dtype, weights.device)
    largest = _largest(weights, (0, 1, 2))
    arrange[(triton.cdiv(found.numel(), 1024),)](
        weights,
        constants.adjoint_entries if adjoint else constants.entries,
        constants.adjoint_signs if adjoint else constants.signs,
        constants.pieces,
        largest,
        found,
        out_fields,
        in_fields,
        turned.stride(0),
        turned.stride(1),
        cut.padded,
        layout.batch,
        layout.inner,
        cut.copies,
        sum(cut.parts),
        cut.parts[0],
        found.numel(),
        BF=FIELDS,
        BLOCK=1024,
        HEADROOM=HEADROOM,
        num_warps=8,
    )
    return found, largest


def _packed(dtype: torch.dtype) -> bool:
    return dtype == torch.float16 and not INTERPRETED


def _precision(dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return "tf32"  # says nothing about products of float16
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # asked for in torch's newer words
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return "tf32" if allowed else "tf32x3"


def _output(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


_GEOMETRY = "SymInt up, SymInt down, SymInt dilation, SymInt before"
_LIBRARY = torch.library.Library("econv", "DEF")
_LIBRARY.define(
    f"convolve(Tensor x, Tensor weights, str plan, bool adjoint, {_GEOMETRY},"
    " SymInt height, SymInt width) -> Tensor"
)
_LIBRARY.define(f"gram(Tensor x, Tensor g, str plan, {_GEOMETRY}) -> Tensor")
convolve = torch.ops.econv.convolve.default
gram = torch.ops.econv.gram.default


def run_convolve(
    x: Tensor,
    weights: Tensor,
    plan: str,
    adjoint: bool,
    up: int,
    down: int,
    dilation: int,
    before: int,
    height: int,
    width: int,
) -> Tensor:
    """A layer, or its adjoint, on ``[batch, fields * order, height, width]``.

    ``weights`` are spectral weights ``[out, in, count]`` in float32, those of the layer in both
    cases; the numbers from ``up`` on are those of `econv.engines.spectral.Geometry`.
    """
    layout = _scheme(plan_named(plan), x.dtype)
    geometry = Geometry(up, down, dilation, before, height, width)
    found = layout.plan
    channels = found.synthesis.shape[0]
    out_fields = weights.shape[1 if adjoint else 0]
    y = _output(x, (x.shape[0], out_fields * channels, height, width))
    if not y.numel():
        return y
    internal = _INTERNAL[x.dtype]
    chosen = _tiles(layout, out_fields, internal)
    cut = _cut(out_fields, layout, chosen.warps, chosen.accumulators, FIELDS)
    arranged, w_largest = _arranged(weights, layout, cut, internal, adjoint)
    x_largest = _largest(x, (1, 2, 3))
    analyse, kernel = convolution(layout, cut.parts, cut.copies, _packed(internal))
    for images in _groups(x, layout, geometry, chosen.bytes):
        part = y[images]
        pixels = part.shape[0] * height * width
        spectrum = _analysed(analyse, x[images], x_largest[images], layout, geometry)
        grid = spectrum.grid
        kernel[(triton.cdiv(pixels, chosen.pixels), cut.programs)](
            spectrum.values,
            arranged,
            part,
            x_largest[images],
            w_largest,
            pixels,
            height,
            width,
            down,
            dilation,
            grid.pitch,
            grid.pitch * grid.lines,
            grid.places,
            spectrum.values.shape[0],
            cut.padded,
            out_fields,
            y.stride(0),
            y.stride(1),
            y.stride(2),
            y.stride(3),
            BP=chosen.pixels,
            PRECISION=_precision(internal),
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
    return y


def _fake_convolve(
    x: Tensor,
    weights: Tensor,
    plan: str,
    adjoint: bool,
    up: int,
    down: int,
    dilation: int,
    before: int,
    height: int,
    width: int,
) -> Tensor:
    channels = plan_named(plan).synthesis.shape[0]
    out_fields = weights.shape[1 if adjoint else 0]
    return _output(x, (x.shape[0], out_fields * channels, height, width))


def run_gram(
    x: Tensor,
    g: Tensor,
    plan: str,
    up: int,
    down: int,
    dilation: int,
    before: int,
) -> Tensor:
    """The gradient of ⟨A(x; w), g⟩ to the spectral weights w, ``[out, in, count]`` in float32."""
    layout = _scheme(plan_named(plan), x.dtype)
    found = layout.plan
    channels = found.analysis.shape[1]
    in_fields, out_fields = x.shape[1] // channels, g.shape[1] // channels
    shape = (out_fields, in_fields, found.weights)
    height, width = g.shape[2:]
    if not g.numel() * x.numel():
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    internal = _INTERNAL[x.dtype]
    chosen = _tiles(layout, out_fields, internal)
    geometry = Geometry(up, down, dilation, before, height, width)
    cut = _cut(out_fields, layout, chosen.gram_warps, chosen.gram_accumulators, RUN)
    laid = cut.padded * 2 * layout.batch  # numbers for each pixel
    groups = _groups(x, layout, geometry, chosen.bytes, laid * height * width)
    tiles_ = triton.cdiv(g[groups[0]].shape[0] * height * width, chosen.gram_pixels)
    in_padded = FIELDS * triton.cdiv(in_fields, FIELDS)
    programs = in_padded // chosen.gram_fields * cut.programs
    splits = min(chosen.splits or max(1, 264 // programs), tiles_)
    count = layout.batch * layout.inner
    partial = _empty((splits, in_padded, count, cut.padded, 2), torch.float32, x.device)
    # Images add up: they are scaled alike.
    x_largest, g_largest = (_largest(image, (0, 1, 2, 3)) for image in (x, g))
    written = gradient(layout, cut.parts, cut.copies, chosen.gram_pixels, _packed(internal))
    for again, images in enumerate(groups):
        ours = _analysed(written.analyse, x[images], x_largest, layout, geometry)
        theirs = g[images]
        pixels = theirs.shape[0] * height * width
        tiles_ = triton.cdiv(pixels, chosen.gram_pixels)
        fragments = _empty((tiles_, laid * chosen.gram_pixels), internal, x.device)
        block = min(64, chosen.gram_pixels)
        written.lay[(tiles_ * (chosen.gram_pixels // block), cut.padded // RUN)](
            theirs,
            g_largest,
            fragments,
            pixels,
            out_fields,
            height,
            width,
            cut.programs,
            g.stride(0),
            g.stride(1),
            g.stride(2),
            g.stride(3),
            BP=chosen.gram_pixels,
            BQ=block,
            num_warps=4,
        )
        written.gram[(in_padded // chosen.gram_fields, cut.programs, splits)](
            ours.values,
            fragments,
            partial,
            x_largest,
            g_largest,
            pixels,
            height,
            width,
            down,
            dilation,
            ours.grid.pitch,
            ours.grid.pitch * ours.grid.lines,
            ours.grid.places,
            tiles_,
            in_padded,
            cut.padded,
            again,
            BF=chosen.gram_fields,
            PRECISION=_precision(internal),
            num_warps=chosen.gram_warps,
        )
    constants = _constants(layout, x.device)
    result = _empty(shape, torch.float32, x.device)
    spread[(triton.cdiv(result.numel(), 1024),)](
        partial,
        constants.owners,
        constants.owner_signs,
        result,
        out_fields,
        in_fields,
        found.weights,
        in_padded,
        cut.padded,
        count,
        splits,
        MOST=constants.owners.shape[1],
        BLOCK=1024,
        num_warps=8,
    )
    return result


def _fake_gram(
    x: Tensor, g: Tensor, plan: str, up: int, down: int, dilation: int, before: int
) -> Tensor:
    found = plan_named(plan)
    channels = found.analysis.shape[1]
    shape = (g.shape[1] // channels, x.shape[1] // channels, found.weights)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _convolve_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, ctx.plan, ctx.adjoint, *geometry = inputs
    ctx.geometry = Geometry(*geometry)
    ctx.shape = x.shape[2:]
    ctx.save_for_backward(x, weights)


def _convolve_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weights = ctx.saved_tensors
    size = plan_named(ctx.plan).basis.size
    back = ctx.geometry.transposed(size, *ctx.shape)
    to_x = to_weights = None
    if ctx.needs_input_grad[1]:  # first: while it runs, the other, larger one does not exist
        # The layer's input and output in this order, whichever of them was ours.
        pair, way = ((gradient, x), back) if ctx.adjoint else ((x, gradient), ctx.geometry)
        to_weights = gram(*pair, ctx.plan, *way[:4])
    if ctx.needs_input_grad[0]:
        to_x = convolve(gradient, weights, ctx.plan, not ctx.adjoint, *back)
    return to_x, to_weights, *[None] * 8


def _gram_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, g, ctx.plan, *geometry = inputs
    ctx.geometry = Geometry(*geometry, *g.shape[2:])
    ctx.save_for_backward(x, g)


def _gram_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, g = ctx.saved_tensors
    to_x = to_g = None
    if ctx.needs_input_grad[0]:
        back = ctx.geometry.transposed(plan_named(ctx.plan).basis.size, *x.shape[2:])
        to_x = convolve(g, gradient, ctx.plan, True, *back)
    if ctx.needs_input_grad[1]:
        to_g = convolve(x, gradient, ctx.plan, False, *ctx.geometry)
    return to_x, to_g, *[None] * 5


for _name, _kernel, _fake, _backward, _context in (
    ("convolve", run_convolve, _fake_convolve, _convolve_backward, _convolve_context),
    ("gram", run_gram, _fake_gram, _gram_backward, _gram_context),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"econv::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"econv::{_name}", _backward, setup_context=_context, lib=_LIBRARY
    )
