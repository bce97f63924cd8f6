"""What is said about bad input: what was expected, and what came.

Nothing is checked while a graph is traced, so that no size is frozen into it.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from econv.groups import Group, GroupLike

MAPS = {
    1: "[batch, channels, length]",
    2: "[batch, channels, height, width]",
    3: "[batch, channels, depth, height, width]",
}
"""What tensors of each dimension look like."""


def read_group(group: GroupLike, dimension: int, name: str) -> Group:
    """The group, if it acts on what the layer of that name reads."""
    found = Group(group)
    if found.dimension != dimension:
        wanted = {2: "the plane, such as 'p4' or 'p8m'", 3: "space, such as 'O' or 'Ih'"}
        raise ValueError(f"{name}: expected a group of {wanted[dimension]}; got {found.name!r}")
    return found


LARGEST_IMAGE = 1 << 16
"""Pixels along a side, or a stride, dilation or padding: more are a slip."""


def positive(name: str, value: Any, most: int = 1 << 24, least: int = 1) -> int:
    """A whole number within limits."""
    try:
        whole = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a tensor of several numbers has an index too, until it is asked for it
        whole = least - 1
    if whole < least:
        raise ValueError(f"expected {name} as a whole number of at least {least}; got {value!r}")
    if whole > most:
        raise ValueError(f"expected {name} of at most {most}; got {value!r}")
    return whole


def number(name: str, value: Any) -> float:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"expected {name} as a finite number; got {value!r}")
    return float(value)


def held(name: str, value: float, dtype: torch.dtype) -> None:
    """A number that is one of that dtype, too."""
    if abs(value) > torch.finfo(dtype).max:
        raise ValueError(f"expected {name} as a number that {dtype} holds; got {value!r}")


def truth(name: str, value: Any) -> bool:
    """A truth value, and nothing that merely counts as one: ``"no"`` would."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"expected {name} as True or False; got {value!r}")
    return bool(value)


def check_factory(device: Any, dtype: Any) -> None:
    """A device, and a dtype that parameters can have; ``None`` is torch's default."""
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected device as 'cpu' or 'cuda:0' are; got {device!r}") from error
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"expected a floating-point dtype such as torch.float32; got {dtype!r}")


def check_statistics(eps: Any, momentum: Any = None) -> None:
    """What keeps a norm from dividing by zero, and how fast running statistics follow."""
    if not isinstance(eps, float | int) or isinstance(eps, bool) or not 0 <= eps < math.inf:
        raise ValueError(f"expected eps as a number of 0 or more; got {eps!r}")
    given = isinstance(momentum, float | int) and not isinstance(momentum, bool)
    if momentum is not None and not (given and 0 <= momentum <= 1):
        raise ValueError(f"expected momentum between 0 and 1, or None; got {momentum!r}")


_WHOLE = (int, torch.SymInt, torch.fx.Proxy, Tensor)


def check_sizes(*sizes: Any) -> None:
    """Height and width that an image is to have; those of a traced graph may be symbols."""
    for size in sizes:
        whole = isinstance(size, _WHOLE) and not isinstance(size, bool)
        if not whole or (isinstance(size, int) and not 1 <= size <= LARGEST_IMAGE):
            raise ValueError(
                f"expected sizes as whole numbers from 1 to {LARGEST_IMAGE}; got {size!r}"
            )


def check_filled(x: Tensor) -> None:
    """An image has pixels and channels; only the batch may be empty."""
    if not torch.compiler.is_compiling() and not torch._C._is_tracing() and 0 in x.shape[1:]:
        raise ValueError(f"expected images with channels and pixels; got {tuple(x.shape)}")


def check_groups(groups: Any, **counts: int) -> None:
    positive("groups", groups)
    for name, count in counts.items():
        if count % groups:
            raise ValueError(f"expected {name} divisible by groups={groups}; got {count}")


def check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module; got {type(model).__name__}")


def check_rank(x: Tensor, dimension: int = 2, flat: bool = False) -> None:
    """Whether ``x`` is a batch of maps; with ``flat`` features without pixels will do."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a torch.Tensor; got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        what = "a nested one" if x.is_nested else str(x.layout)
        raise ValueError(f"expected a dense tensor, such as x.to_dense(); got {what}")
    if x.ndim != dimension + 2 and not (flat and x.ndim == 2):
        raise ValueError(
            f"expected a tensor {MAPS[dimension]}{' or [batch, channels]' if flat else ''}; "
            f"got {x.ndim} dimensions: {tuple(x.shape)}"
        )
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(f"expected a floating-point tensor, such as x.float(); got {x.dtype}")


def check_maps(
    x: Tensor, channels: int, expected: str, weight: Tensor | None = None, dimension: int = 2
) -> None:
    check_rank(x, dimension)
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
    expected = f"{channels} channels ({fields} fields of {group.name})"
    check_maps(x, channels, expected, dimension=group.dimension)
    if weight is None or torch.compiler.is_compiling():
        return
    check_device(x, weight)
    # torch normalises half precisions with float32 parameters, and nothing else mixed.
    if x.dtype != weight.dtype and not (
        weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)
    ):
        raise ValueError(f"expected {weight.dtype}, the dtype of the layer; got {x.dtype}")


def check_multiple(x: Tensor, group: Group, flat: bool = False) -> None:
    check_rank(x, group.dimension, flat)
    if not torch.compiler.is_compiling() and x.shape[1] % group.order:
        raise ValueError(
            f"expected channels in multiples of {group.order}, the order of {group.name}; "
            f"got {x.shape[1]}: {tuple(x.shape)}"
        )


def expect(condition: Any, message: str) -> None:
    """Stop where a condition on sizes does not hold; a traced graph is for sizes where it does."""
    if not condition:
        raise ValueError(message)
