"""Which rule plans which operation.

A rule is a function that plans one call; its decorator names the operations it is for. This is all
that a new operation needs, in a file of `rules` or elsewhere:

    @rule(nn.Hardswish, "hardswish")
    def hardswish(plan: Plan, node: fx.Node) -> Value:
        return plan.copy(node, plan.value(node.args[0]))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from econv.conversion.plan import Plan, Value
from econv.conversion.trace import name_of, plain_name

__all__ = ["Rule", "dropping", "rule", "rule_for", "rule_of", "rule_of_module"]

Convert = Callable[[Plan, fx.Node], Value]


@dataclass(frozen=True)
class Rule:
    """A function that plans calls, and what is known about the operations that it is for."""

    convert: Convert
    variants: tuple[str, ...] = ()
    """Names of subclasses that mean the same as their base, though their forward is another."""
    many: bool = False
    """Whether it reads lists of tensors too; a module, more than one tensor."""
    drops: bool = False
    """Whether it may be called with other arguments in training."""
    otherwise: Callable[[Plan, fx.Node, str], Value] = Plan.leave
    """What is done instead where the rule refuses and the conversion is not strict."""


_RULES: dict[tuple[str, object], Rule] = {}


def rule(
    *operations: type[nn.Module] | Callable[..., Any] | str,
    classes: tuple[str, ...] = (),
    constants: bool = False,
    **known: Any,
) -> Callable[[Convert], Convert]:
    """Register a rule.

    Args:
        operations: classes of modules; functions, operators and methods, themselves or by name.
            A name stands for all that bear it: ``"relu"`` for `torch.relu`, `functional.relu`,
            `Tensor.relu` and `Tensor.relu_`.
        classes: modules of other libraries, by the name of their class.
        constants: whether it is for calls that read nothing that turns, and only for these.
        known: the fields of :class:`Rule`.
    """
    keys: list[tuple[str, object]] = [("class", name) for name in classes]
    for operation in operations:
        if isinstance(operation, type) and issubclass(operation, nn.Module):
            keys.append(("module", operation))
        else:
            keys.append(("constants" if constants else "call", plain_name(operation)))

    def register(convert: Convert) -> Convert:
        found = Rule(convert, **known)
        for key in keys:
            first = _RULES.setdefault(key, found)
            if first is not found:
                name = getattr(key[1], "__name__", key[1])
                both = (f"{f.__module__}.{f.__name__}" for f in (first.convert, convert))
                raise ValueError(f"expected one rule for {name}; got {' and '.join(both)}")
        return convert

    return register


def rule_of(
    node: fx.Node, modules: Mapping[str, nn.Module], constants: bool = False
) -> Rule | None:
    """The rule for a call, if there is one; ``constants``: one that reads nothing that turns."""
    if node.op == "call_module":
        return None if constants else rule_of_module(modules[str(node.target)])
    if node.op not in ("call_function", "call_method"):
        return None
    return _RULES.get(("constants" if constants else "call", name_of(node)))


def rule_of_module(module: nn.Module) -> Rule | None:
    """The rule for a module: by the name of its class, or that of a base with the same forward."""
    kind = type(module)
    found = _RULES.get(("class", kind.__name__))
    if found is not None:
        return found
    for base in kind.__mro__:
        found = _RULES.get(("module", base))
        if found is not None:
            same = kind.forward is getattr(base, "forward", None)
            return found if same or kind.__name__ in found.variants else None
    return None


def rule_for(name: str) -> Convert:
    """The rule for a function, for others that come down to it."""
    return _RULES["call", name].convert


def dropping() -> frozenset[str]:
    """The names of functions whose arguments may be others in training."""
    return frozenset(str(name) for (_, name), found in _RULES.items() if found.drops)
