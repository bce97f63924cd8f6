"""How tensors lie in memory, and who follows what is done with them: tracers, transformations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "autocasts",
    "exporting",
    "functionalised",
    "memory_format",
    "one_by_one",
    "replicate",
    "transformed",
    "undisturbed",
    "watched",
    "without_autocast",
]


def replicate(x: Tensor, before: int, after: int, axes: tuple[int, ...] | None = None) -> Tensor:
    """The image with its outermost pixels repeated, so often before and after each axis.

    Unlike that of `torch.nn.functional.pad`, its gradient can be compiled in every memory format.
    """
    for dim in range(2, x.ndim) if axes is None else axes:
        first, last = x.narrow(dim, 0, 1), x.narrow(dim, -1, 1)
        x = torch.cat([*[first] * before, x, *[last] * after], dim)
    return x


def memory_format(x: Tensor) -> torch.memory_format:
    """The layout of a batch of images or volumes, to be kept by what is computed from it."""
    if not torch.compiler.is_compiling() and _inside("Vmap"):
        return torch.contiguous_format  # torch converts to no other there
    channels, pixels = x.shape[1], math.prod(x.shape[2:])
    # One channel lies in both ways; what was made channels-last tells by its stride, as for torch.
    if x.is_contiguous() and (channels > 1 or x.stride(1) > 1 or pixels == 1):
        return torch.contiguous_format
    steps = [channels * math.prod(x.shape[n:]) for n in range(3, x.ndim + 1)]
    strides = (channels * pixels, 1, *steps)
    last = all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))
    if not last:
        return torch.contiguous_format
    return torch.channels_last if x.ndim == 4 else torch.channels_last_3d


def watched(x: Tensor) -> bool:
    """Whether a tracer, or whatever else watches, must see operations of torch."""
    watching = torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0
    watching = watching or functionalised()
    return watching or type(x) not in (Tensor, torch.nn.Parameter)


def exporting() -> bool:
    """Whether `torch.export` follows; its own question is answered wrongly inside a compiler."""
    return torch.compiler._is_exporting_flag


def transformed() -> bool:
    """Whether functions are being transformed (vmap, jvp …) in ways that kernels do not know."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._are_functorch_transforms_active()


def functionalised() -> bool:
    """Whether `torch.func.functionalize` follows, which knows no functions of autograd."""
    return _inside("Functionalize")


def _inside(name: str) -> bool:
    """Whether a transformation of that name is among those that go on."""
    if not torch._C._are_functorch_transforms_active():
        return False
    kind = getattr(torch._C._functorch.TransformType, name)
    found = torch._C._functorch.get_interpreter_stack() or []
    return any(one.key() == kind for one in found)


_Found = TypeVar("_Found", Tensor, tuple[Tensor | None, ...])


def one_by_one(run: Callable[..., _Found], *given: Tensor | None) -> _Found:
    """Apply a function; to each member where torch batches gradients by a way of its own.

    It does for ``is_grads_batched`` and ``vectorize=True``, and knows few operations there.
    """
    batched = torch._C._functorch.is_legacy_batchedtensor
    if not any(t is not None and batched(t) for t in given):
        return run(*given)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    while not any(_at(t, level) for t in given):  # of blocks within one another the innermost
        level -= 1
    each = [
        repeat(t) if t is None or not _at(t, level) else torch._remove_batch_dim(t, level, 1, 0)
        for t in given
    ]
    found = [one_by_one(run, *one) for one in zip(*each, strict=False)]

    def joined(parts: Any) -> Any:
        return None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level)

    if isinstance(found[0], tuple):
        return tuple(joined(parts) for parts in zip(*found, strict=True))
    return joined(found)


def _at(x: Tensor | None, level: int) -> bool:
    """Whether a tensor is batched at a level of torch's own batching."""
    if x is None or not torch._C._functorch.is_legacy_batchedtensor(x):
        return False
    # Where it is not, the size that is asked for is made up.
    one, two = (torch._remove_batch_dim(x, level, n, 0).shape[0] for n in (2, 3))
    return one == two


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast is off inside: engines round where they say so."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """What runs inside is no part of what runs around: no modes, no hooks, no autocast of it."""
    with ExitStack() as those:
        if device.type == "cuda":
            those.enter_context(torch.cuda.device(device))
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            those.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        those.enter_context(torch._C._DisableFuncTorch())
        those.enter_context(_disable_current_modes())
        those.enter_context(torch.inference_mode(False))
        those.enter_context(without_autocast(device))
        yield


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on there."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
