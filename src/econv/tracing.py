"""What torch.fx needs help with while it follows a network.

This module knows torch.fx; who traces what, and why, is the business of others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

__all__ = ["followed", "keep_whole"]

# What makes tensors out of sizes alone; and what older torch wants true numbers for.
_FUNCTIONS = [
    *(
        (torch, n)
        for n in ("arange", "linspace", "zeros", "ones", "full", "rand", "randn", "empty")
    ),
    (functional, "conv2d"),
    (functional, "conv3d"),
]


@contextlib.contextmanager
def followed(follow: bool = True) -> Iterator[None]:
    """Let torch.fx follow `torch.arange(x.shape[3])` and its like, which it does not by itself.

    Within the block these functions are others, for all threads. ``follow=False`` within it: as
    they are, for what is run while something is traced (and for what that imports).
    """
    before = [(owner, name, getattr(owner, name)) for owner, name in _FUNCTIONS]
    try:
        for owner, name, found in before:
            make = getattr(found, "__wrapped__", found)
            setattr(owner, name, _followed(make) if follow else make)
        yield
    finally:
        for owner, name, found in before:
            setattr(owner, name, found)


def _followed(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def follow(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []
        fx.node.map_aggregate(
            (args, kwargs), lambda a: found.append(a) if isinstance(a, fx.Proxy) else None
        )
        if not found:
            return make(*args, **kwargs)
        return found[0].tracer.create_proxy("call_function", make, args, kwargs)

    return follow


def keep_whole(given: Iterable[Any], is_whole: Callable[[nn.Module], bool]) -> None:
    """Let whoever follows a call with these arguments take some modules as they are.

    Tracers of others, such as that of torchvision's feature extraction, know torch's layers only,
    and would look into ours.
    """
    tracer: Any = next((found.tracer for found in given if isinstance(found, fx.Proxy)), None)
    if tracer is None or not hasattr(tracer, "is_leaf_module") or "is_leaf_module" in vars(tracer):
        return
    if type(tracer).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return  # ours know better
    found = tracer.is_leaf_module
    tracer.is_leaf_module = lambda module, name: is_whole(module) or found(module, name)
