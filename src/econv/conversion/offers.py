"""What sources offer beside ``forward``, said of the converted network.

Methods that ``forward`` calls have graphs of their own already; here is what timm's networks say of
themselves: channels of their features, their classifier, and how to have another one.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, fx, nn

from econv.conversion.fusion import flattened
from econv.conversion.network import Classifier, ConvertedNetwork, ConvertedPart, Head
from econv.conversion.plan import Plan
from econv.conversion.structure import remove_unused
from econv.conversion.trace import value_of
from econv.conversion.widths import Sizes
from econv.layers.checks import expect

__all__ = ["offer"]

_AS_THEY_ARE = ("num_classes", "default_cfg", "pretrained_cfg")


def offer(network: ConvertedNetwork, source: nn.Module, plan: Plan, sizes: Sizes) -> None:
    """Let a converted network have what the source has."""
    for name in _AS_THEY_ARE:
        if name in vars(source):
            vars(network)[name] = copy.deepcopy(vars(source)[name])
    given = _channels(plan, sizes)
    if isinstance(getattr(source, "num_features", None), int) and ("", "forward_features") in given:
        vars(network)["num_features"] = given["", "forward_features"]
    info = getattr(source, "feature_info", None)
    found = copy.deepcopy(info)
    entries: Any = getattr(found, "info", found)  # features_only: an object of timm's
    listed = isinstance(entries, list) and bool(entries) and all(map(_is_described, entries))
    if listed and all((entry["module"], _when(entry)) in given for entry in entries):
        for entry in entries:
            entry["num_chs"] = given[entry["module"], _when(entry)]
        vars(network)["feature_info"] = found
    _offer_classifier(network, source)


def _is_described(entry: Any) -> bool:
    return isinstance(entry, dict) and {"num_chs", "module"} <= entry.keys()


def _when(entry: dict[str, Any]) -> str:
    return "before" if entry.get("hook_type") == "forward_pre" else ""


def _channels(plan: Plan, sizes: Sizes) -> dict[tuple[str, str], int]:
    """The channels of what each module and method gives, and of what a module reads first."""
    found: dict[tuple[str, str], int] = {}
    for call in plan.trace.passes[0].calls:
        first = next(iter(call.arguments.values()), None)
        for when, node in ((call.method, call.result), ("before", first)):
            if isinstance(node, fx.Node) and isinstance(value_of(node), Tensor):
                value = plan.value(node)
                if value.kind == "fields":
                    found[call.path, when] = sizes.fields(value.widths) * plan.group.order
                elif value_of(node).ndim > 1:
                    found[call.path, when] = int(value_of(node).shape[1])
    return found


def _offer_classifier(network: ConvertedNetwork, source: Any) -> None:
    if not callable(getattr(source, "get_classifier", None)):
        return
    theirs = source.get_classifier()
    names = [name for name, module in source.named_modules() if module is theirs]
    if not names or not any(name == names[0] for name, _ in network.named_modules()):
        return
    layer: Any = network.get_submodule(names[0])
    pool = getattr(source, "global_pool", getattr(getattr(source, "head", None), "global_pool", ""))
    vars(network)["classifier_of"] = Classifier(
        names[0],
        layer.in_features if isinstance(layer, nn.Linear) else 0,
        getattr(layer, "bias", None) is not None,
        str(getattr(pool, "pool_type", pool)),
        callable(getattr(source, "reset_classifier", None)),
    )
    if isinstance(layer, nn.Linear) and hasattr(source, "head_hidden_size"):
        vars(network)["head_hidden_size"] = layer.in_features
    whole = vars(network).get("forward_head")
    if isinstance(whole, ConvertedPart):
        features = _before(whole, names[0])
        if features is not None:
            vars(network)["forward_head"] = Head(whole, features)


def _before(head: ConvertedPart, classifier: str) -> ConvertedPart | None:
    """What a head gives without its classifier, if it can be asked for that."""
    given = [str(node.target) for node in head.graph.nodes if node.op == "placeholder"]
    if len(given) != 2 or given[1] != "pre_logits":
        return None
    graph = flattened(head)
    calls = [n for n in graph.nodes if n.op == "call_module" and n.target == classifier]
    if len(calls) != 1:
        return None
    for node in reversed(list(graph.nodes)):
        asked = node.args[0] if node.target is expect else None
        if isinstance(asked, fx.Node) and any(r.target == given[1] for r in asked.all_input_nodes):
            graph.erase_node(node)  # the check that the features are not asked for
    read: Any = calls[0].args[0]
    calls[0].replace_all_uses_with(read)
    graph.erase_node(calls[0])
    remove_unused(graph)
    return head.sharing(graph, "forward_head")
