"""What is said about bad input: what was expected, and what came.

Nothing is checked while a graph is traced, so that no size is frozen into it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from econv.groups import Group


def positive(name: str, value: Any, most: int = 2**31 - 1) -> int:
    whole = (
        0 if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    )
    if whole < 1:
        raise ValueError(f"expected {name} as a whole number of at least 1; got {value!r}")
    if whole > most:
        raise ValueError(f"expected {name} of at most {most}; got {value!r}")
    return whole


def check_groups(groups: Any, **counts: int) -> None:
    positive("groups", groups)
    for name, count in counts.items():
        if count % groups:
            raise ValueError(f"expected {name} divisible by groups={groups}; got {count}")


def check_rank(x: Tensor, ranks: tuple[int, ...] = (4,)) -> None:
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a torch.Tensor; got {type(x).__name__}")
    if x.ndim not in ranks:
        or_flat = " or [batch, channels]" if 2 in ranks else ""
        raise ValueError(
            f"expected a tensor [batch, channels, height, width]{or_flat}; "
            f"got {x.ndim} dimensions: {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point tensor, such as x.float(); got {x.dtype}")


def check_maps(x: Tensor, channels: int, expected: str, weight: Tensor | None = None) -> None:
    check_rank(x)
    if torch.compiler.is_compiling():
        return
    if x.shape[1] != channels:
        raise ValueError(f"expected {expected}; got {x.shape[1]} channels: {tuple(x.shape)}")
    if weight is not None:
        check_device(x, weight)
    if weight is None or x.dtype == weight.dtype:
        return
    # Autocast converts both to its own dtype, but leaves float64 alone.
    cast = torch.float64 not in (x.dtype, weight.dtype)
    if not (cast and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"expected {weight.dtype}, the dtype of the layer; got {x.dtype}: convert one of them"
        )


def check_device(x: Tensor, weight: Tensor) -> None:
    if x.device != weight.device:
        raise ValueError(
            f"expected a tensor on {weight.device}, the device of the layer; got one on {x.device}"
        )


def check_fields(x: Tensor, fields: int, group: Group, weight: Tensor | None) -> None:
    channels = fields * group.order
    check_maps(x, channels, f"{channels} channels ({fields} fields of {group.name})")
    if weight is None or torch.compiler.is_compiling():
        return
    check_device(x, weight)
    # torch normalises half precisions with float32 parameters, and nothing else mixed.
    if x.dtype != weight.dtype and not (
        weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)
    ):
        raise ValueError(f"expected {weight.dtype}, the dtype of the layer; got {x.dtype}")


def check_multiple(x: Tensor, group: Group, ranks: tuple[int, ...] = (4,)) -> None:
    check_rank(x, ranks)
    if not torch.compiler.is_compiling() and x.shape[1] % group.order:
        raise ValueError(
            f"expected channels in multiples of {group.order}, the order of {group.name}; "
            f"got {x.shape[1]}: {tuple(x.shape)}"
        )


def expect(condition: Any, message: str) -> None:
    """Stop where a condition on sizes does not hold; a traced graph is for sizes where it does."""
    if not condition:
        raise ValueError(message)
