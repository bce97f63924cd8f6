"""Writes how taps become derivatives: for Triton's kernels and for the warp-specialised ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from econv.engines.spectral.triton.scheme import Scheme, folded
from econv.engines.spectral.triton.writer import Writer


def tap_offset(dy: int, dx: int) -> str:
    """Where a tap lies, seen from the centre. Rows run downwards, in the image as in a stencil."""
    return (f" + {dy} * row" if dy else "") + (f" + {dx} * column" if dx else "")


def write_derivatives(
    write: Writer,
    layout: Scheme,
    of_word: Sequence[Sequence[int]],
    load: Callable[[dict[str, tuple[int, int]]], None],
    scales: Mapping[tuple[int, int], float],
) -> dict[tuple[int, int], float]:
    """The derivatives ``d{stencil}_{word}``, from the taps around a centre.

    A word is as much of a spectrum as is added at a time, and ``of_word`` the stencils that each is
    read through. ``load`` gives words of taps these names, with a number behind. Derivatives are
    divided by ``scales``. Returned is what the first tap of each counts.
    """
    first: dict[tuple[int, int], float] = {}

    def add(name: str, word: int, factors: np.ndarray) -> None:
        for stencil, value in zip(of_word[word], factors.tolist(), strict=True):
            if value:
                value /= scales.get((stencil, word), 1.0)
                old = f"d{stencil}_{word}" if (stencil, word) in first else None
                first.setdefault((stencil, word), value)
                write(f"d{stencil}_{word} = {write.scaled(name, value, value, old)}")

    coefficients, signs = folded(layout.plan), {"p": 1, "m": -1}
    reach = coefficients.shape[-1] // 2
    # Those that mirror each other on a diagonal come one after the other.
    order = sorted(np.ndindex(reach + 1, reach + 1), key=lambda tap: (max(tap), min(tap), tap[0]))
    for dy, dx in order:
        # Where in the coefficients the sums (and differences) of mirrored taps stand.
        rows, columns = ((t, reach + t) if t else (0,) for t in (dy, dx))
        if not coefficients[:, rows][:, :, columns].any():
            continue
        downs, sides = "pm"[: len(rows)], "pm"[: len(columns)]
        names = itertools.product(downs, sides)
        load({a + b: (signs[a] * dy, signs[b] * dx) for a, b in names})
        for word, stencils in enumerate(of_word):
            for sign, j in zip("+-", columns, strict=False):
                read = [_read(coefficients[stencils], i, j) for i in rows]
                for above in downs if any(read) else "":
                    one = f"{above}p{word}"
                    write(f"at_{above} = {write.sum(one, f'{above}m{word}', sign) if dx else one}")
                for i, other, found in zip(rows, "+-", read, strict=False):
                    if not found:
                        continue
                    write(f"u = {write.sum('at_p', 'at_m', other) if dy else 'at_p'}")
                    kept = f"k{min(i, j)}_{max(i, j)}_{word}"
                    if "" in found:
                        add("u", word, found[""])
                    elif i < j:  # the other ones come later
                        write(f"{kept} = u")
                    else:
                        for both, factors in found.items():
                            write(f"w = {write.sum(kept, 'u', both)}")
                            add("w", word, factors)
    return first


def _read(coefficients: np.ndarray, i: int, j: int) -> dict[str, np.ndarray]:
    """What stencils read of a class of taps, (i, j): of itself, under the name "".

    Or of its sum "+" and difference "-" with (j, i), the lesser row first, where these mirror each
    other on a diagonal and it is less work.
    """
    reach = coefficients.shape[-1] // 2
    one, two = coefficients[:, min(i, j), max(i, j)], coefficients[:, max(i, j), min(i, j)]
    least = 1e-9 * np.abs(coefficients).max(initial=0.0)
    both = [np.where(np.abs(v) > least, v, 0.0) for v in ((one + two) / 2, (one - two) / 2)]
    work = sum(np.count_nonzero(v) + v.any() for v in both)
    less = work < np.count_nonzero(one) + np.count_nonzero(two)
    mirrored = i != j and (i > reach) == (j > reach) and less
    found = zip("+-", both, strict=True) if mirrored else [("", coefficients[:, i, j])]
    return {name: factors for name, factors in found if factors.any()}
