"""What a conversion was asked for and what it chose, so that it can be made again elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from econv.groups import Group
from econv.layers import ConvOptions
from econv.pretrained import as_json, from_json

__all__ = ["Recipe", "described"]


@dataclass(frozen=True)
class Recipe:
    """The arguments of a conversion, resolved, and the widths that it chose."""

    group: Group
    match: str
    pool: str
    strict: bool
    fitted: bool
    """Whether layers have operators that reach the source's filters."""
    smooth: bool
    options: ConvOptions
    methods: tuple[str, ...]
    """Methods that are converted beside ``forward``."""
    example: tuple[Any, ...]
    """The arguments of the traced pass; of a tensor what :func:`described` says."""
    scale: float | None = None
    """Fields for each channel of the source, where they have been chosen."""
    num_classes: int | None = None
    """Of a classifier that was reset."""

    def written(self) -> dict[str, Any]:
        """All of it in numbers, texts, lists and dictionaries; a tensor as its shape and dtype."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        found: dict[str, Any] = as_json(given, "recipe")
        return found

    def inputs(self) -> tuple[Any, ...]:
        """Arguments like those of the traced pass; tensors are zeros."""
        return tuple(map(_made, self.example))

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Recipe:
        """The recipe that :meth:`written` wrote."""
        if not isinstance(written, Mapping):
            raise ValueError(f"expected a recipe as a mapping; got {type(written).__name__}")
        given, wanted = dict(from_json(dict(written))), {field.name for field in fields(cls)}
        if set(given) != wanted:
            raise ValueError(
                f"expected a recipe with {', '.join(sorted(wanted))}; got one with "
                f"{', '.join(sorted(given)) or 'nothing'}"
            )
        given["group"] = Group(given["group"])
        given["methods"] = tuple(given["methods"])
        given["example"] = tuple(given["example"])
        return cls(**given)


def described(argument: Any) -> Any:
    """An argument; of a tensor its shape and dtype."""
    if not isinstance(argument, Tensor):
        return argument
    return {"shape": list(argument.shape), "dtype": str(argument.dtype).removeprefix("torch.")}


def _made(written: Any) -> Any:
    if not isinstance(written, dict) or set(written) != {"shape", "dtype"}:
        return written
    dtype = getattr(torch, str(written["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected a dtype of torch; got {written['dtype']!r}")
    return torch.zeros(written["shape"], dtype=dtype)
