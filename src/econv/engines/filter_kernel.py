"""The filters of every orientation as one kernel, and the gradient to the weight. Needs Triton.

By operations of torch these are a product of small matrices, a gathering and a rounding, each
launched for a few microseconds of work: in a network of many layers they are a tenth of a step.
"""

# Kernels are written in Triton's language, which has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from econv.gpu.devices import on_device

__all__ = ["attempt", "expand", "gradient"]

_CHANNELS = 128  # of a program


@triton.jit
def expand_filters(
    weight, synthesis, offsets, out, channels,
    COORDINATES: tl.constexpr, PIXELS: tl.constexpr, ORDER: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr
):  # fmt: skip
    """``out[o, A, pixel, (i, B)]``: the weights of (i, A⁻¹B), in frame A."""
    row = tl.program_id(0)
    frame = row % ORDER
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    pixel = tl.arange(0, BP)
    known = channel < channels
    place = tl.load(offsets + frame * channels + channel, mask=known, other=0) // ORDER
    source = weight + ((row // ORDER).to(tl.int64) * channels + place) * COORDINATES
    total = tl.zeros([BP, BC], tl.float32)
    for s in tl.static_range(COORDINATES):
        number = tl.load(source + s, mask=known, other=0.0).to(tl.float32)
        stencil = synthesis + (s * ORDER + frame) * PIXELS + pixel
        stencil = tl.load(stencil, mask=pixel < PIXELS, other=0.0).to(tl.float32)
        total += stencil[:, None] * number[None, :]
    into = out + row.to(tl.int64) * PIXELS * channels + pixel[:, None] * channels + channel[None, :]
    there = (pixel < PIXELS)[:, None] & known[None, :]
    tl.store(into, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def filters_backward(
    g, synthesis, back, out, channels, out_step, frame_step, channel_step, pixel_step,
    COORDINATES: tl.constexpr, BS: tl.constexpr, PIXELS: tl.constexpr, ORDER: tl.constexpr,
    BF: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The adjoint of `expand_filters`: every weight has its own channel in each frame."""
    o = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * BC + tl.arange(0, BC)
    s = tl.arange(0, BS)
    known = own < channels
    total = tl.zeros([BS, BF, BC], tl.float32)
    for first in tl.static_range(0, ORDER, BF):
        frame = first + tl.arange(0, BF)
        there = (frame < ORDER)[:, None] & known[None, :]
        channel = tl.load(back + own[None, :] * ORDER + frame[:, None], mask=there, other=0)
        channel -= frame[:, None] * channels
        source = g + o * out_step + frame[:, None] * frame_step + channel * channel_step
        kept = (s < COORDINATES)[:, None] & (frame < ORDER)[None, :]
        stencil = synthesis + (s[:, None] * ORDER + frame[None, :]) * PIXELS
        for pixel in tl.range(0, PIXELS):
            number = tl.load(source + pixel * pixel_step, mask=there, other=0.0).to(tl.float32)
            factor = tl.load(stencil + pixel, mask=kept, other=0.0).to(tl.float32)
            total += factor[:, :, None] * number[None, :, :]
    into = out + (o * channels + own[None, :]) * COORDINATES + s[:, None]
    there = (s < COORDINATES)[:, None] & known[None, :]
    tl.store(into, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=there)


def expand(weight: Tensor, synthesis: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """The filter bank ``[out, A, (in, B), pixels]``, in which channels lie last."""
    coordinates, order, pixels = synthesis.shape
    rows, channels = len(weight) * order, weight.shape[1] * order
    out = torch.empty(len(weight), order, pixels, channels, dtype=dtype, device=weight.device)
    if out.numel():
        options = {"COORDINATES": coordinates, "PIXELS": pixels, "ORDER": order, "num_warps": 4}
        programs = (rows, triton.cdiv(channels, _CHANNELS))
        with on_device(weight):
            expand_filters[programs](
                weight.contiguous(), synthesis, offsets, out, channels,
                BP=triton.next_power_of_2(pixels), BC=_CHANNELS, **options
            )  # fmt: skip
    return out.transpose(2, 3)


def gradient(g: Tensor, synthesis: Tensor, back: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient to the weight ``[out, in, k, coordinates]`` from that to `expand`'s bank."""
    coordinates, order, pixels = synthesis.shape
    out_fields, channels = len(g), g.shape[2]
    shape = (out_fields, channels // order, order, coordinates)
    out = torch.empty(shape, dtype=dtype, device=g.device)
    if out.numel():
        options = {"COORDINATES": coordinates, "PIXELS": pixels, "ORDER": order, "num_warps": 4}
        programs = (out_fields, triton.cdiv(channels, 32))
        with on_device(g):
            filters_backward[programs](
                g, synthesis, back, out, channels, *g.stride(),
                BS=triton.next_power_of_2(coordinates), BF=min(8, triton.next_power_of_2(order)),
                BC=32, **options
            )  # fmt: skip
    return out


def attempt(device: torch.device) -> None:
    """Both kernels, once."""
    one, order = torch.ones(1, 1, 1, 1, device=device), torch.zeros(1, 1, device=device).long()
    bank = expand(one, one[0], order[0], torch.float32)
    gradient(bank, one[0], order[0], torch.float32)
