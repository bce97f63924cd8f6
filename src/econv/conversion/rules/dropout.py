"""Dropout of numbers, of maps and of whole samples."""

from __future__ import annotations

from torch import fx, nn

from econv.conversion.arguments import argument, known
from econv.conversion.plan import Plan, Value
from econv.conversion.registry import rule
from econv.conversion.steps import map_step, module_step
from econv.conversion.trace import ConversionError, name_of, owner


@rule(nn.Dropout, nn.AlphaDropout, classes=("StochasticDepth", "DropPath"))
def dropout_module(plan: Plan, node: fx.Node) -> Value:
    return plan.copy(node, plan.value(node.args[0]))


@rule(nn.Dropout2d, nn.Dropout3d)
def dropout_of_maps(plan: Plan, node: fx.Node) -> Value:
    value, p = plan.value(node.args[0]), plan.module(node).p
    if value.kind == "image":
        return plan.copy(node, value)
    return map_step(plan, node, lambda: plan.layer("GroupDropout")(plan.group, p))


@rule("dropout", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", drops=True)
def dropout(plan: Plan, node: fx.Node) -> Value:
    """A function that drops, as a module that knows whether it is trained."""
    name, (read, value) = name_of(node), plan.first(node)
    maps = value.kind == "fields" and name in ("dropout2d", "dropout3d", "feature_dropout")
    p = float(known(argument(node, 1, "p", 0.5)))
    drops, trained = _drops(node), plan.in_training.get(node)
    if drops:
        if maps:
            raise ConversionError("", "it drops whole maps in eval mode too")
        plan.notes.append(
            f"{owner(node) or node.name}: it drops in eval mode too, as in the source"
        )
        return plan.copy(node, value)
    if trained is not None and not _drops(trained):
        plan.notes.append(f"{owner(node) or node.name}: it never drops, and is gone")
        return plan.emit(node, value, lambda e: e[read])

    def make() -> nn.Module:
        if name in ("dropout", "alpha_dropout"):
            return nn.Dropout(p) if name == "dropout" else nn.AlphaDropout(p)
        fields = value.kind == "fields"
        return plan.layer("GroupDropout")(plan.group, p) if fields else plan.plain("Dropout")(p)

    if maps:
        return map_step(plan, node, make)
    return module_step(plan, node, value, make)


def _drops(node: fx.Node) -> bool:
    in_torch = "train" in node.kwargs  # torch.dropout calls it so
    default = name_of(node) != "alpha_dropout"
    return bool(known(argument(node, 2, "train" if in_torch else "training", default)))
