"""Pooling over windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from econv.conversion.arguments import check_map, known_arguments
from econv.conversion.plan import Plan, Value
from econv.conversion.registry import rule
from econv.conversion.steps import in_frames, in_its_place, map_step, smooth_step
from econv.conversion.trace import ConversionError, owner, value_of
from econv.conversion.windows import Windows

_WINDOWS = {"kernel_size": None, "stride": None, "padding": 0}


@rule(nn.MaxPool2d, nn.MaxPool3d, "max_pool2d", "max_pool3d")
def max_pool(plan: Plan, node: fx.Node) -> Value:
    given = known_arguments(
        plan, node, **_WINDOWS, dilation=1, ceil_mode=False, return_indices=False
    )
    windows = Windows.of(given)
    if windows.dilation != 1:
        raise ConversionError("", "its windows are dilated")
    if given.return_indices:
        raise ConversionError("", "it returns the places of the maxima, which a rotation exchanges")
    if plan.group.order == 1:  # nothing turns: its windows stay where they are
        return plan.copy(node, plan.value(node.args[0]))
    if _in_frames(plan, node, windows):
        options = {"fill": -torch.inf, "ceil_mode": given.ceil_mode}
        return _pooled_in_frames(plan, node, windows, nn.MaxPool2d, **options)
    numbers = windows.kernel, windows.stride, windows.padding // 2

    def plain() -> nn.Module:
        return plan.layer("CentredMaxPool")(*numbers, given.ceil_mode)

    # Fitted layers after it expect maxima.
    return _pooled(plan, node, windows, plain, "max" if plan.fitted else "mean")


@rule(nn.AvgPool2d, nn.AvgPool3d, "avg_pool2d", "avg_pool3d")
def avg_pool(plan: Plan, node: fx.Node) -> Value:
    given = known_arguments(
        plan, node, **_WINDOWS, ceil_mode=False, count_include_pad=True, divisor_override=None
    )
    windows = Windows.of(given)
    if given.divisor_override is not None:
        raise ConversionError("", "its divisor is not the size of its windows")
    if plan.group.order == 1:
        return plan.copy(node, plan.value(node.args[0]))
    counts_all = not given.ceil_mode and (given.count_include_pad or not windows.padding)
    if counts_all and _in_frames(plan, node, windows):
        return _pooled_in_frames(plan, node, windows, nn.AvgPool2d)
    numbers = windows.kernel, windows.stride, windows.padding // 2

    def plain() -> nn.Module:
        return plan.layer("CentredAvgPool")(*numbers, given.ceil_mode, given.count_include_pad)

    return _pooled(plan, node, windows, plain, "mean")


def _in_frames(plan: Plan, node: fx.Node, windows: Windows) -> bool:
    """Whether group features are to be read by the source's windows, frame by frame.

    Windows that lie symmetrically in the example may not do so on other sizes, where they stride.
    """
    value = plan.value(node.args[0])
    return plan.in_frames and value.kind == "fields" and windows.stride > 1


def _pooled_in_frames(
    plan: Plan, node: fx.Node, windows: Windows, kind: Callable[..., nn.Module], **options: Any
) -> Value:
    check_map(plan, plan.value(node.args[0]))
    beside = str(node.target) if node.op == "call_module" else owner(node)
    before, _ = in_frames(plan, node, windows, beside, **options)
    read: Any = node.args[0]
    name = in_its_place(plan, node, lambda: kind(windows.kernel, windows.stride))
    return plan.emit(node, plan.value(read), lambda e: e.module(name, e.module(before, e[read])))


def _pooled(
    plan: Plan, node: fx.Node, windows: Windows, plain: Callable[[], nn.Module], reduce: str
) -> Value:
    """What pools; a halving that folds few frequencies where that is asked for."""
    read, out = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    halves = tuple(out.shape[2:]) == tuple((n + 1) // 2 for n in read.shape[2:])
    if not (plan.smooth and windows.stride == 2 and halves):
        return map_step(plan, node, plain)
    return smooth_step(plan, node, lambda: plan.layer("Downsample")(reduce, 8), plain)


@rule(classes=("BlurPool2d",))
def blur_pool(plan: Plan, node: fx.Node) -> Value:
    read, out = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    if tuple(out.shape[2:]) != tuple((n + 1) // 2 for n in read.shape[2:]):
        raise ConversionError("", "it blurs without halving")
    return map_step(plan, node, plan.layer("Downsample"))
