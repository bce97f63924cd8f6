"""Which orientation a network reads its answer from: what it sees to tell which one is upright.

Orientations are weighed by scores. Deep features have forgotten much of what tells where up is, so
that maps before them are looked at, too: those that the code around the head has at hand.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from econv.conversion.plan import (
    ATTENTION,
    VECTOR,
    Emission,
    Plan,
    PlannedModule,
    Step,
    Value,
    in_source_order,
)
from econv.conversion.structure import leaves
from econv.conversion.trace import Call, value_of
from econv.conversion.widths import Sizes, Width
from econv.layers import GroupFrameScore2d

__all__ = ["attended"]

_MAPS = 3
"""So many maps are looked at: the last ones, of different sizes."""


def attended(plan: Plan, node: fx.Node, value: Value, beside: str) -> Step:
    """What a head reads: group features pooled over orientations by attention.

    Where the head is a part of a module that is given features without pixels, such as a
    ``classifier``, the orientations are weighed before that module.
    """
    read: Any = node.args[0]
    place = read
    maps = _in_sight(plan, node, _around(plan, node))
    while not maps and (before := _before(plan, place)) is not None:
        maps = _in_sight(plan, place, _around(plan, place))
        place = place if maps else before
    scores = [_score(plan, found, beside) for found in maps]
    own = plan.value(place)
    name = plan.pool_part(beside, own.widths, ATTENTION)
    if not maps:
        return lambda e: in_source_order(e, e.module(name, e[read]), value)
    plan.scores[name] = [score for score, _ in scores]

    def pool(e: Emission) -> fx.Node:
        total = None
        for score, seen in scores:
            found = e.module(score, e[seen])
            total = found if total is None else e.function(operator.add, total, found)
        return e.module(name, e[place], total)

    if _around(plan, place) is _around(plan, node):
        return lambda e: in_source_order(e, pool(e), value)
    spread = plan.insert(beside, "spread", lambda: plan.layer("Spread")(plan.group))
    last = max(at for at, (found, _) in enumerate(plan.steps) if found is place)
    plan.steps.insert(last + 1, (place, lambda e: e.module(spread, pool(e))))
    return plan.pooled(read, value, beside, "mean")


def _score(plan: Plan, seen: fx.Node, beside: str) -> tuple[str, fx.Node]:
    widths: tuple[Width, ...] = plan.value(seen).widths

    def make(sizes: Sizes, where: dict[str, Any]) -> nn.Module:
        return GroupFrameScore2d(sizes.fields(widths), plan.group, **where)

    name = plan.new_name(f"{beside}_upright" if beside else "upright")
    return plan.add_part(PlannedModule(name, make, into=widths), repr, source="–"), seen


def _around(plan: Plan, node: fx.Node) -> Call | None:
    """The call in whose code a node stands."""
    call = plan.trace.passes_of(node)[0].call_of.get(node)
    return call.caller if call is not None and node.op == "call_module" else call


def _before(plan: Plan, node: fx.Node) -> fx.Node | None:
    """What a node without pixels is made of, and nothing else is, if it has no pixels either."""
    tensors = [read for read in node.all_input_nodes if isinstance(value_of(read), Tensor)]
    if len(tensors) != 1 or not _is_vector(plan, tensors[0]):
        return None
    readers = [user for user in tensors[0].users if isinstance(value_of(user), Tensor)]
    return tensors[0] if readers == [node] else None


def _is_vector(plan: Plan, node: fx.Node) -> bool:
    value, found = plan.value(node), value_of(node)
    if value.kind != "fields" or value.layout not in (plan.image, VECTOR):
        return False
    return bool(found.shape[2:].numel() == 1)


def _in_sight(plan: Plan, node: fx.Node, around: Call | None) -> list[fx.Node]:
    """Maps that the code of a call has at hand before a node, the last of each size."""
    if plan.dimension != 2:
        return []
    given = [] if around is None else [around.arguments]
    passes = plan.trace.passes_of(node)
    results = [call.result for call in passes[0].calls if call.caller is around]
    seen = {leaf for leaf in leaves([*given, *results]) if isinstance(leaf, fx.Node)}
    found: dict[torch.Size, fx.Node] = {}
    for other in plan.trace.graph.nodes:
        if other is node:
            break
        if not all(other in one.order for one in passes):
            continue
        at_hand = other in seen or (_around(plan, other) is around and other.op != "placeholder")
        value = plan.value(other)
        if at_hand and value.kind == "fields" and value.axes == plan.image:
            size = value_of(other).shape[2:]
            if size.numel() > 1:
                found.pop(size, None)
                found[size] = other
    return list(found.values())[-_MAPS:]
