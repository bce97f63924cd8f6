"""Writes how taps become derivatives: for Triton's kernels and for the warp-specialised ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from econv.engines.spectral.triton.scheme import Scheme
from econv.engines.spectral.triton.writer import Writer


def tap_offset(dy: int, dx: int) -> str:
    """Where a tap lies, seen from the centre. Rows run downwards, in the image as in a stencil."""
    return (f" + {dy} * row" if dy else "") + (f" + {dx} * column" if dx else "")


def write_derivatives(
    write: Writer,
    layout: Scheme,
    of_word: Sequence[Sequence[int]],
    load: Callable[[dict[str, tuple[int, int]]], None],
    scales: Mapping[tuple[int, int], float] | None = None,
    first: dict[tuple[int, int], float] | None = None,
) -> None:
    """The derivatives ``d{stencil}_{word}``, from the taps around a centre.

    A word is as much of a spectrum as is added at a time, and ``of_word`` the stencils that each is
    read through. ``load`` gives words of taps these names, with a number behind. Derivatives are
    divided by ``scales``; ``first`` finds what their first taps count.
    """
    started: set[tuple[int, int]] = set()

    def add(name: str, word: int, factors: np.ndarray) -> None:
        for stencil, value in zip(of_word[word], factors.tolist(), strict=True):
            if value:
                value /= scales.get((stencil, word), 1.0) if scales else 1.0
                old = f"d{stencil}_{word}" if (stencil, word) in started else None
                started.add((stencil, word))
                if old is None and first is not None:
                    first[stencil, word] = value
                text = (
                    name if old is None and value == 1.0 else write.scaled(name, value, value, old)
                )
                write(f"d{stencil}_{word} = {text}")

    def taps(word: int, i: int, j: int) -> None:
        """A class of taps, which is in ``u``, to the derivatives that read it."""
        mirrored = _mirrored(coefficients[word], i, j)
        kept = f"k{min(i, j)}_{max(i, j)}_{word}"
        if mirrored is None:
            add("u", word, coefficients[word][:, i, j])
        elif i < j:  # the other ones come later
            write(f"{kept} = u")
        else:
            for sign, factors in zip("+-", mirrored, strict=True):
                if factors.any():
                    write(f"w = {write.sum(kept, 'u', sign)}")
                    add("w", word, factors)

    def used(word: int, i: int, j: int) -> bool:
        there = coefficients[word][:, i, j].any()
        return bool(there) or _mirrored(coefficients[word], i, j) is not None

    coefficients = [layout.coefficients[stencils] for stencils in of_word]
    # Those that mirror each other on a diagonal come one after the other.
    order = sorted(layout.mirrored(), key=lambda taps: (max(taps[:2]), min(taps[:2]), taps[0]))
    for dy, dx, rows, columns in order:
        load(
            {
                above + beside: (y, x)
                for above, y in zip("pm", (dy, -dy)[: len(rows)], strict=False)
                for beside, x in zip("pm", (dx, -dx)[: len(columns)], strict=False)
            }
        )
        for word in range(len(of_word)):
            for sign, j in zip("+-", columns, strict=False):
                if not any(used(word, i, j) for i in rows):
                    continue
                for above in "pm"[: len(rows)]:
                    one = f"{above}p{word}"
                    if dx:
                        one = write.sum(one, f"{above}m{word}", sign)
                    write(f"at_{above} = {one}")
                for other, i in zip("+-", rows, strict=False):
                    if used(word, i, j):
                        write(f"u = {write.sum('at_p', 'at_m', other) if dy else 'at_p'}")
                        taps(word, i, j)


def _mirrored(coefficients: np.ndarray, i: int, j: int) -> tuple[np.ndarray, np.ndarray] | None:
    """What stencils read of the sum and the difference of two classes of taps, (i, j) and (j, i).

    Of the lesser row first, so that (i, j) is the one with i < j. Nothing where these do not mirror
    each other on a diagonal, or it would be no less work.
    """
    reach = coefficients.shape[-1] // 2
    if i == j or (i > reach) != (j > reach):
        return None
    one, two = coefficients[:, min(i, j), max(i, j)], coefficients[:, max(i, j), min(i, j)]
    least = 1e-9 * np.abs(coefficients).max(initial=0.0)
    both = [np.where(np.abs(v) > least, v, 0.0) for v in ((one + two) / 2, (one - two) / 2)]
    work = sum(np.count_nonzero(v) + v.any() for v in both)
    if work >= np.count_nonzero(one) + np.count_nonzero(two):
        return None
    return both[0], both[1]
