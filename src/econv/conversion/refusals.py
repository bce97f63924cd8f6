"""Refusals that help: what kind of network it is, and what can be done about it.

This module knows what other architectures look like; it converts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from econv.conversion.trace import LEAVE, ConversionError

__all__ = ["ARCHITECTURES", "Architecture", "explained"]


@dataclass(frozen=True)
class Architecture:
    """A kind of network that cannot be converted as a whole."""

    name: str
    reason: str
    is_one: Callable[[nn.Module], bool]
    remedy: str = ""


def explained(error: ConversionError, model: nn.Module) -> ConversionError:
    """The same refusal, with the architecture and what to do instead, where they are known."""
    reason, remedy = error.reason, error.remedy
    found = next((kind for kind in ARCHITECTURES if kind.is_one(model)), None)
    if found is not None:
        reason = f"this is {found.name}: {found.reason}; {reason}"
        remedy = found.remedy or remedy
    elif _within_attention(error.module, model):
        reason = f"it is attention over positions, in a network with convolutions; {reason}"
    part = _convertible_part(model, error.module)
    if part and remedy in ("", LEAVE):
        alone = f"convert(model.{part}, …) converts the part that is a CNN alone"
        remedy = f"{alone}, and {remedy}" if remedy else alone
    return ConversionError(error.module, reason, error.line, remedy)


# What they look like


def _attends(module: nn.Module) -> bool:
    """Whether a module compares positions by queries and keys."""
    known = nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    queries = ("qkv", "to_qkv", "to_q", "q", "q_proj", "query", "in_proj_weight")
    return isinstance(module, known) or any(hasattr(module, name) for name in queries)


def _convolutions(model: nn.Module) -> list[nn.Conv2d | nn.Conv3d]:
    """Convolutions that look further than one pixel and than one patch."""
    found = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    return [m for m in found if set(m.kernel_size) != {1} and m.kernel_size != m.stride]


def _has(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def _named(model: nn.Module, *parts: str) -> bool:
    """Whether a module's class has one of these words in its name."""
    return any(part in type(module).__name__ for module in model.modules() for part in parts)


def _is_detector(model: nn.Module) -> bool:
    return hasattr(model, "backbone") and _named(model, "AnchorGenerator", "RegionProposalNetwork")


def _is_transformer(model: nn.Module) -> bool:
    return any(_attends(m) for m in model.modules()) and not _convolutions(model)


def _is_mixer(model: nn.Module) -> bool:
    return _named(model, "Mixer", "ResMLP", "SpatialGating") and not _convolutions(model)


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "a detector",
        "its boxes have sides along the axes of the image, which a rotation exchanges",
        _is_detector,
        "econv.convert_detector(model, …) converts its backbone and lets its heads follow quarter "
        "turns",
    ),
    Architecture(
        "a Swin transformer",
        "its windows and patches have a fixed frame",
        lambda model: _is_transformer(model) and _named(model, "Window", "Swin"),
        "convert a convolutional network of its size, such as a ConvNeXt",
    ),
    Architecture(
        "a vision transformer",
        "its patches have a fixed frame, and its embeddings say where each one lies",
        _is_transformer,
        "convert a convolutional network of its size, such as a ResNet or a ConvNeXt",
    ),
    Architecture(
        "an MLP-Mixer",
        "its patches have a fixed frame, and it mixes them in a fixed order",
        _is_mixer,
        "convert a convolutional network of its size, such as a ResNet or a ConvNeXt",
    ),
    Architecture(
        "a network of sequences",
        "its convolutions are one-dimensional, and there is no image to turn",
        lambda model: _has(model, nn.Conv1d) and not _has(model, nn.Conv2d, nn.Conv3d),
    ),
    Architecture(
        "a recurrent network",
        "it reads features one after another, and there is no rule for that",
        lambda model: _has(model, nn.RNNBase),
    ),
)
"""In the order in which they are looked for."""


def _within_attention(name: str, model: nn.Module) -> bool:
    """Whether a module is part of one that attends to positions."""
    while name:
        try:
            if _attends(model.get_submodule(name)):
                return True
        except AttributeError:
            return False
        name = name.rpartition(".")[0]
    return False


def _convertible_part(model: nn.Module, name: str) -> str:
    """The child with most convolutions that does not contain what is refused."""
    refused = name.partition(".")[0]
    children = {
        child: len(_convolutions(module))
        for child, module in model.named_children()
        if child != refused and child.isidentifier() and not any(map(_attends, module.modules()))
    }
    best = max(children, key=lambda child: children[child], default="")
    enough = best and 2 * children[best] > len(_convolutions(model)) and children[best] > 1
    return best if enough else ""
