"""What a network returns: the shapes that the converted one must return, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from econv.conversion.trace import ConversionError, value_of

__all__ = ["check_outputs"]


def check_outputs(
    network: nn.Module, inputs: tuple[Any, ...], result: Any, method: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Run a converted network on the example; its outputs have the source's shapes.

    Args:
        network: the network, or the graph of a method of it.
        inputs: what it is given.
        result: what it returns, in nodes of the source.
        method: the name of the method.

    Returns:
        The shapes of the tensors that it returns.

    Raises:
        ConversionError: with both shapes, where they differ.
    """
    expected = torch.fx.node.map_arg(result, value_of)
    modes = {module: module.training for module in network.modules()}
    try:
        with torch.no_grad():
            found = network.eval()(*_where(network, inputs))
    except Exception as error:
        raise ConversionError(
            method,
            f"the converted network does not run on the example input: {type(error).__name__}: "
            f"{error}",
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    wanted, given = _shapes(expected), _shapes(found)
    if wanted != given:
        raise ConversionError(
            method, f"it would return {_described(given)}; the source returns {_described(wanted)}"
        )
    return tuple(given)


def _shapes(output: Any) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in tree_flatten(output)[0] if isinstance(x, Tensor)]


def _described(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(map(str, shapes)) or "no tensor"


def _where(network: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The inputs, on the device of the network."""
    own = next(network.parameters(), None)
    if own is None:
        return inputs
    return tree_map(lambda x: x.to(own.device) if isinstance(x, Tensor) else x, inputs)
