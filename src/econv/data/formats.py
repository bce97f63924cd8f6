"""The formats of official files: bytes to arrays, or an error that says what is wrong."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Files = Callable[[str], contextlib.AbstractContextManager[IO[bytes]]]


@dataclass(frozen=True)
class Arrays:
    """Images uint8 ``[n, channels, height, width]`` and classes int64 ``[n]``, as published."""

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array


@dataclass(frozen=True)
class Found:
    """Arrays, and what is known of them."""

    arrays: Arrays
    recreated: bool
    """Whether they stand in for the published ones."""
    unverified: bool
    """Whether no checksum says that they are what they are taken for."""


Reader = Callable[[Files, Sequence[str]], Arrays]


class WrongMemberError(Exception):
    """A file that does not hold what its format asks for."""

    def __init__(self, member: str, problem: str) -> None:
        super().__init__(problem)
        self.member = member


def read_idx(files: Files, members: Sequence[str]) -> Arrays:
    """Images and classes, each with a head that says how many there are."""

    def read(member: str, dimensions: int) -> Array:
        with files(member) as stream:
            data = stream.read()
        magic = bytes([0, 0, 8, dimensions])  # unsigned bytes
        if data[:4] != magic:
            raise WrongMemberError(member, f"expected to begin with {magic!r}; got {data[:4]!r}")
        head = 4 + 4 * dimensions
        shape = tuple(int(n) for n in np.frombuffer(data[4:head], ">u4"))
        if len(shape) != dimensions or len(data) != head + math.prod(shape):
            raise WrongMemberError(
                member, f"expected {head} bytes and {shape} more; got {len(data)}"
            )
        return np.frombuffer(data, np.uint8, offset=head).reshape(shape)

    train_x, train_y, test_x, test_y = (
        read(name, 3 if "images" in name else 1) for name in members
    )
    return Arrays(
        train_x[:, None], train_y.astype(np.int64), test_x[:, None], test_y.astype(np.int64)
    )


def as_idx(array: Array) -> bytes:
    """The content of the file that :func:`read_idx` reads an array from."""
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


def read_cifar(label_bytes: int, classes: int) -> Reader:
    """Records of labels (the last one counts) and three planes of 32×32 pixels."""
    length = label_bytes + 3 * 32 * 32

    def read(files: Files, members: Sequence[str]) -> Arrays:
        records = []
        for member in members:
            with files(member) as stream:
                data = np.frombuffer(stream.read(), np.uint8)
            if not data.size or data.size % length:
                raise WrongMemberError(
                    member, f"expected records of {length} bytes; got {data.size} bytes"
                )
            records.append(data.reshape(-1, length))
            largest = int(records[-1][:, label_bytes - 1].max())
            if largest >= classes:
                raise WrongMemberError(
                    member, f"expected classes from 0 to {classes - 1}; got {largest}"
                )

        def images(parts: Sequence[Array]) -> Array:
            return np.concatenate([p[:, label_bytes:].reshape(-1, 3, 32, 32) for p in parts])

        def labels(parts: Sequence[Array]) -> Array:
            return np.concatenate([p[:, label_bytes - 1] for p in parts]).astype(np.int64)

        train, test = records[:-1], records[-1:]
        return Arrays(images(train), labels(train), images(test), labels(test))

    return read


def read_amat(files: Files, members: Sequence[str]) -> Arrays:
    """Lines of 784 pixels from 0 to 1 and a class, as text."""
    train, test = (_amat(name, files) for name in members)
    return Arrays(*train, *test)


_LINE = 785 * 32  # bytes


def _amat(member: str, files: Files) -> tuple[Array, Array]:
    images, labels = [], []
    rest = b""
    with files(member) as stream:
        while True:
            block = stream.read(1 << 24)
            lines, newline, after = (rest + block).rpartition(b"\n")
            rest = after if block else b""
            lines = lines + newline if block else lines + newline + after
            if len(rest) > _LINE:
                raise WrongMemberError(member, f"expected lines of at most {_LINE} bytes")
            if lines.strip():
                values = _numbers(member, lines)
                classes = values[:, -1]
                pixels = values[:, :-1]
                if not (np.abs(pixels - 0.5).max() <= 1 and (classes == classes.round()).all()):
                    raise WrongMemberError(member, "expected pixels from 0 to 1 and a whole class")
                if not 0 <= classes.min() <= classes.max() <= 9:
                    raise WrongMemberError(member, "expected classes from 0 to 9")
                images.append((pixels * 255).round().clip(0, 255).astype(np.uint8))
                labels.append(classes.astype(np.int64))
            if not block:
                break
    if not images:
        raise WrongMemberError(member, "expected lines of 785 numbers; got none")
    return np.concatenate(images).reshape(-1, 1, 28, 28), np.concatenate(labels)


def _numbers(member: str, lines: bytes) -> Array:
    count = lines.count(b"\n") + (not lines.endswith(b"\n"))
    values = parsed(lines, " ")
    if values is None or values.size != 785 * count:
        raise WrongMemberError(
            member,
            f"expected lines of 785 numbers; got "
            f"{'something else' if values is None else f'{values.size} numbers in {count} lines'}",
        )
    return values.reshape(count, 785)


def parsed(text: bytes, separator: str) -> Array | None:
    """Numbers from text, fast; None if anything else is in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return np.fromstring(text.decode("ascii"), dtype=np.float64, sep=separator)
        except (DeprecationWarning, ValueError):
            return None
