"""Writes the source of kernels, line by line: for Triton and for Gluon. It needs neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import dedent, indent

import numpy as np

from econv.fourier import butterflies


class Writer:
    """Lines of source at the current indentation, and how expressions are spelled.

    ``language`` is ``"tl"`` or ``"gl"``: Triton holds two float16 as neighbours in a tensor, Gluon
    as one int32, if they are ``words``.

    ``f16x2``: sums are PTX instructions on two float16. Left to itself the compiler finds other
    pairs than those that were loaded together, and spends a quarter of its instructions on them.
    """

    def __init__(self, language: str, f16x2: bool = True, words: bool = True) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.language, self.f16x2 = language, f16x2
        self.words = words and language == "gl"

    def __call__(self, text: str) -> None:
        """Write lines, without the indentation that they have in common."""
        self.lines.append(indent(dedent(text).strip("\n"), "    " * self.depth))

    @contextmanager
    def block(self, text: str) -> Iterator[None]:
        """What is written inside belongs to the statement ``text``."""
        self(text)
        self.depth += 1
        yield
        self.depth -= 1

    @contextmanager
    def function(
        self, name: str, arguments: str, constants: str = "", general: str | None = None
    ) -> Iterator[None]:
        """What is written inside is the body of a function.

        ``general``: of a kernel, arguments for whose values nothing is compiled specially.
        """
        found = "triton.jit" if self.language == "tl" else "gluon.jit"
        if general is not None:
            found += f"(do_not_specialize={general.split()!r})"
        self(f"@{found}")
        given = [arguments, *(f"{name}: {self.language}.constexpr" for name in constants.split())]
        with self.block(f"def {name}({', '.join(given)}):"):
            yield

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def asm(self, code: str, *operands: str) -> str:
        """An instruction on two float16 at a time."""
        registers = "=r" + ",r" * len(operands)
        dtype, pack = ("int32", 1) if self.words else ("float16", 2)
        return (
            f'{self.language}.inline_asm_elementwise("{code}", "{registers}",'
            f" [{', '.join(operands)}], dtype={self.language}.{dtype}, is_pure=True, pack={pack})"
        )

    def sum(self, one: str, other: str, sign: str = "+") -> str:
        if not self.f16x2:
            return f"{one} {sign} {other}"
        return self.asm(f"{'add' if sign == '+' else 'sub'}.f16x2 $0, $1, $2;", one, other)

    def scaled(self, one: str, low: float, high: float, other: str | None) -> str:
        """One times ``low``, of two float16 the second times ``high``, plus the other."""
        if other is None and low == high == 1.0:
            return one
        if not self.f16x2:
            return f"{one} * {low!r}" + ("" if other is None else f" + {other}")
        bits = int(np.array([low, high], dtype=np.float16).view(np.uint32)[0])
        start = f"{{ .reg .b32 c; mov.b32 c, {bits:#x};"
        if other is None:
            return self.asm(f"{start} mul.f16x2 $0, $1, c; }}", one)
        return self.asm(f"{start} fma.rn.f16x2 $0, $1, c, $2; }}", one, other)

    def split(self, source: str, names: Sequence[str | None]) -> None:
        """Split a tensor along its last axes, of length two each: a name for every member."""
        if len(names) == 1:
            if names[0] and names[0] != source:
                self(f"{names[0]} = {source}")
        elif any(names):
            self(f"{source}e, {source}o = {self.language}.split({source})")
            self.split(f"{source}e", names[::2])
            self.split(f"{source}o", names[1::2])

    def joined(self, names: Sequence[str]) -> str:
        """An expression for the names joined along new last axes of length two each."""
        if len(names) == 1:
            return names[0]
        one, two = (self.joined(names[n::2]) for n in range(2))
        return f"{self.language}.join({one}, {two})"


def times_rows(write: Writer, matrix: np.ndarray, source: str, result: str) -> None:
    """Each row of a matrix times tensors that are named by a letter and the number of a column."""
    for number, row in enumerate(matrix):
        terms = [f"{source}{n} * {float(row[n])!r}" for n in np.flatnonzero(row)]
        write(f"{result}{number} = {' + '.join(terms) or f'{source}0 * 0.0'}")


def transform_back(write: Writer, matrix: np.ndarray) -> None:
    """Slots ``s0 …`` to channels ``y0 …``."""
    pairs, rest = butterflies(matrix.T)
    times_rows(write, rest.T, "s", "y")
    for a, b in reversed(pairs):
        write(f"y{a}, y{b} = y{a} + y{b}, y{a} - y{b}")


def twos(length: int) -> str:
    """The axes that `Writer.split` splits."""
    return ", ".join(["2"] * (length.bit_length() - 1))
