"""Functions that have modules: pools, resizing, dropout, padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from econv.conversion.arguments import argument, known, module_step
from econv.conversion.modules import avg_pool, gate_halves, max_pool, pool_step
from econv.conversion.plan import Plan, Value
from econv.conversion.resizing import Resizing, adaptive_size, pad, resize
from econv.conversion.trace import ConversionError, owner
from econv.layers import GroupDropout2d

__all__ = ["adaptive", "avg_pool2d", "dropout", "glu", "interpolate", "max_pool2d", "pad2d"]


@dataclass
class _PoolArguments:
    """The arguments of a pooling function, as its module would hold them."""

    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any = 1
    ceil_mode: bool = False
    return_indices: bool = False
    count_include_pad: bool = True
    divisor_override: Any = None


def _pooling(plan: Plan, node: fx.Node, names: tuple[str, ...], convert: Any) -> Value:
    arguments: dict[str, Any] = {"stride": None, "padding": 0}
    for place, name in enumerate(names, start=1):
        found = known(argument(node, place, name, ...))
        if found is not ...:
            arguments[name] = found
    arguments["stride"] = arguments["stride"] or arguments["kernel_size"]
    result: Value = convert(plan, node, _PoolArguments(**arguments))
    return result


def max_pool2d(plan: Plan, node: fx.Node) -> Value:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    return _pooling(plan, node, names, max_pool)


def avg_pool2d(plan: Plan, node: fx.Node) -> Value:
    names = (
        *("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
        "divisor_override",
    )
    return _pooling(plan, node, names, avg_pool)


def adaptive(plan: Plan, node: fx.Node) -> Value:
    return adaptive_size(plan, node, argument(node, 1, "output_size"))


def interpolate(plan: Plan, node: fx.Node) -> Value:
    given = Resizing(
        argument(node, 1, "size"),
        argument(node, 2, "scale_factor"),
        str(argument(node, 3, "mode", "nearest")),
        argument(node, 4, "align_corners"),
        bool(argument(node, 6, "antialias", False)),
    )
    return resize(plan, node, given)


def dropout(plan: Plan, node: fx.Node, name: str) -> Value:
    """A function that drops, as a module that knows whether it is trained."""
    value = plan.value(node.args[0])
    p = float(known(argument(node, 1, "p", 0.5)))
    drops, trained = _drops(node, name), plan.in_training.get(node)
    if drops:
        if value.kind == "fields" and name in ("dropout2d", "feature_dropout"):
            raise ConversionError("", "it drops whole maps in eval mode too")
        plan.notes.append(
            f"{owner(node) or node.name}: it drops in eval mode too, as in the source"
        )
        return plan.copy(node, value)
    if trained is not None and not _drops(trained, name):
        plan.notes.append(f"{owner(node) or node.name}: it never drops, and is gone")
        return plan.emit(node, value, lambda e: e[node.args[0]])  # type: ignore[index]

    def make() -> nn.Module:
        if name in ("dropout", "alpha_dropout"):
            return nn.Dropout(p) if name == "dropout" else nn.AlphaDropout(p)
        return GroupDropout2d(plan.group, p) if value.kind == "fields" else nn.Dropout2d(p)

    if value.kind == "fields" and name in ("dropout2d", "feature_dropout"):
        return pool_step(plan, node, value, make)
    return module_step(plan, node, value, make)


def _drops(node: fx.Node, name: str) -> bool:
    in_torch = "train" in node.kwargs  # torch.dropout calls it so
    default = name != "alpha_dropout"
    return bool(known(argument(node, 2, "train" if in_torch else "training", default)))


def pad2d(plan: Plan, node: fx.Node) -> Value:
    mode, fill = argument(node, 2, "mode", "constant"), argument(node, 3, "value", 0.0)
    return pad(plan, node, argument(node, 1, "pad"), str(mode), fill)


def glu(plan: Plan, node: fx.Node) -> Value:
    return gate_halves(plan, node, known(argument(node, 1, "dim", -1)))
