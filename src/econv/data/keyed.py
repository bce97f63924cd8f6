"""Random numbers that are a function of their keys: no state, the same on every device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LARGEST_WORD = (1 << 32) - 1
# Odd multipliers as signed 32-bit numbers: a product with 32 unsigned bits stays inside int64.
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))

PERMUTATION, AUGMENTATION, ORDER, ANGLE, SHARES = 1, 2, 3, 4, 5  # first words of this module's keys


def keyed_bits(*words: int | Tensor) -> Tensor:
    """32 random bits, as int64, that are a function of the words alone.

    Words are integers from 0 to 2³²−1, or int64 tensors of them, which broadcast; at least one is
    a tensor, and the result lies on its device. The same on every device, without any state.

    Raises:
        ValueError: for words that are no whole numbers from 0 to 2³² − 1, or numbers alone.

    >>> all(keyed_bits(7, torch.arange(9))[i] == keyed_bits(7, torch.tensor(i)) for i in range(9))
    True
    """
    tensors = [word for word in words if isinstance(word, Tensor)]
    if not tensors:
        raise ValueError("expected at least one word as a tensor; got numbers alone")
    state: Any = 0x9E3779B9
    for word in words:
        if isinstance(word, Tensor):
            if word.is_floating_point() or word.dtype == torch.bool:
                raise ValueError(f"expected integer words; got {word.dtype}")
            word = word.to(torch.int64)
        elif not 0 <= word <= LARGEST_WORD:
            raise ValueError(f"expected words from 0 to 2**32 - 1; got {word}")
        elif torch.compiler.is_compiling():  # a number would be compiled in
            word = torch.full((), word, dtype=torch.int64, device=tensors[0].device)
        state = (state ^ word) & LARGEST_WORD
        for factor, shift in zip(_FACTORS, (16, 15), strict=True):
            state = state ^ (state >> shift)
            state = (state * factor) & LARGEST_WORD
        state = state ^ (state >> 16)
    return state


def keyed_uniform(*words: int | Tensor) -> Tensor:
    """float32 numbers in [0, 1), multiples of 2⁻²⁴, keyed like :func:`keyed_bits`.

    >>> drawn = keyed_uniform(7, torch.arange(3))
    >>> bool((drawn[1:] == keyed_uniform(7, torch.arange(1, 3))).all())
    True
    """
    return (keyed_bits(*words) >> 8).to(torch.float32) * 2.0**-24


def permutation(
    n: int, seed: int | Tensor, epoch: int | Tensor, device: torch.device | str | None = None
) -> Tensor:
    """A random order of ``range(n)``, the same on every device and in every process.

    >>> sorted(permutation(5, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """
    index = torch.arange(n, device=device)
    high = keyed_bits(PERMUTATION, seed, epoch, index)
    low = keyed_bits(PERMUTATION, seed, epoch, index, 1)
    return torch.argsort((high << 31) | (low >> 1), stable=True)


def unit_circle(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle 2π·bits/2³², float64.

    Sums and products only, each rounded as IEEE says: no library's cosine makes a batch, a thread
    or a device differ.
    """
    quarters = ((bits + (1 << 29)) >> 30) & 3
    rest = ((bits + (1 << 29)) & ((1 << 30) - 1)) - (1 << 29)
    angle = rest.to(torch.float64) * (math.pi / 2**31)  # |angle| ≤ π/4
    square = angle * angle
    cosine, sine = torch.ones_like(angle), torch.ones_like(angle)
    for k in range(16, 0, -2):  # Horner's scheme for the two Taylor series
        cosine = 1 - cosine * square * (1 / (k * (k - 1)))
        sine = 1 - sine * square * (1 / (k * (k + 1)))
    sine = sine * angle
    odd = (quarters & 1).bool()
    negative = 1.0 - (quarters & 2).to(torch.float64)
    return (
        torch.where(odd, -sine, cosine) * negative,
        torch.where(odd, cosine, sine) * negative,
    )
