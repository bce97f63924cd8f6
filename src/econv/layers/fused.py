"""Norm, ReLU and convolution in one go, where the kernels for GPUs run the convolution.

A pre-activation network normalises, rectifies, convolves. One after the other, the first two write
the activated map to memory and keep it for the backward pass, where the third reads it again.
Together, the kernels read what comes before the norm and apply both where they read it: the
activated map exists nowhere, neither forwards nor backwards. Before a dense convolution it does,
but one kernel writes it, and one finds the gradient to what came before.

This module knows when that is possible; what is done then is the business of
`econv.layers.pooled` (statistics) and `econv.engines.spectral.triton` (kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from econv import engines
from econv.gpu.devices import DEVICES
from econv.layers.convolution import GroupConv2d
from econv.layers.normalisation import GroupBatchNorm2d
from econv.layers.pooled import activates
from econv.tensors import transformed, watched

__all__ = ["may_fuse", "norm_relu", "norm_relu_conv"]


def norm_relu_conv(
    norm: nn.Module,
    conv: nn.Module,
    x: Tensor,
    relu: Callable[[Tensor], Tensor] | None = None,
    shortcut: bool = False,
) -> Any:
    """``conv(relu(norm(x)))``, without the maps in between where that can be had.

    It can on a GPU with Triton, where ``norm`` is a :class:`~econv.GroupBatchNorm2d` and ``conv`` a
    :class:`~econv.GroupConv2d`. The kernels of ``engine="spectral"`` normalise and rectify where
    they read. Where ``"auto"`` takes the dense engine one kernel writes the activated map. Then
    :func:`econv.engine` lists ``"spectral/triton+norm+relu"`` or ``"dense+norm+relu"``. Results are
    the same to rounding, running statistics and gradients of every order included.

    Everywhere else the modules run one after the other, as if they were called so: on a CPU and
    with ``engine="dense"``; inside `torch.compile`, `torch.export` and whatever else traces or
    transforms; where a module has hooks, or is of another class (subclassed, parametrised,
    synchronised, quantised); with ``groups`` or ``centred``, in float64, in float16 where it is
    trained, under an autocast to another dtype than that of ``x``.

    ``relu`` is what is called between the two: a module, which may work in place, or `torch.relu`
    (the default) or `torch.relu_`.

    With ``shortcut=True`` a pair is given back: the result, and ``x`` for whatever else reads it,
    such as a residual sum. Their gradients are then added where that of the norm is written.

    Raises:
        ValueError: for maps that the norm or the convolution does not read.

    >>> norm, conv = GroupBatchNorm2d(4, "p8"), GroupConv2d(4, 6, "p8")
    >>> norm_relu_conv(norm, conv, torch.randn(2, 32, 9, 9)).shape
    torch.Size([2, 48, 9, 9])
    """
    if may_fuse(x) and _as_made(norm, relu) and _fits(conv, norm):
        assert isinstance(norm, GroupBatchNorm2d)
        assert isinstance(conv, GroupConv2d)
        norm.check(x)
        at_the_load = conv.fuses(x)
        if (at_the_load or (at_the_load is not None and activates(x))) and norm.fuses(x):
            if at_the_load:
                first, affine, x = norm.as_affine(x)
            else:
                (first, x), affine = norm.activated(x), None
            result: Tensor = conv.forward_activated(first, affine)
            return (result, x) if shortcut else result
    result = conv((torch.relu if relu is None else relu)(norm(x)))
    return (result, x) if shortcut else result


def norm_relu(norm: nn.Module, x: Tensor, relu: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """``relu(norm(x))``, by one kernel where :func:`norm_relu_conv` would use it.

    That is where engines are chosen by ``"auto"``.

    Raises:
        ValueError: for maps that the norm does not read.

    >>> norm_relu(GroupBatchNorm2d(4, "p8"), torch.randn(2, 32, 9, 9)).shape
    torch.Size([2, 32, 9, 9])
    """
    if may_fuse(x) and engines.resolve("auto") == "auto" and _as_made(norm, relu):
        assert isinstance(norm, GroupBatchNorm2d)
        norm.check(x)
        if activates(x) and norm.fuses(x):
            return norm.activated(x)[0]
    result: Tensor = (torch.relu if relu is None else relu)(norm(x))
    return result


def may_fuse(x: Tensor) -> bool:
    """Whether kernels may take ``x``, with nobody who would want to see operations of torch."""
    if torch.compiler.is_compiling() or watched(x):
        return False
    return x.device.type in DEVICES and not transformed()


def _as_made(norm: nn.Module, relu: Callable[[Tensor], Tensor] | None) -> bool:
    """Whether to call both is to run their `forward` as it was written, and no more."""
    if type(norm) is not GroupBatchNorm2d or hooks._has_any_global_hook():
        return False
    if type(relu) is not nn.ReLU and relu not in (None, torch.relu, torch.relu_):
        return False
    return _unchanged(norm) and (not isinstance(relu, nn.Module) or _unchanged(relu))


def _fits(conv: nn.Module, norm: nn.Module) -> bool:
    """Whether the convolution is one that reads what the norm gives, as it was written."""
    if type(conv) is not GroupConv2d:
        return False
    alike = norm.group == conv.group and norm.fields == conv.in_fields
    return bool(alike) and _unchanged(conv)


def _unchanged(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return False
    if module._backward_hooks or module._backward_pre_hooks or module._compiled_call_impl:
        return False
    return not any(watched(p) for p in module._parameters.values() if p is not None)
