"""The converted network: an ordinary module with the source's call signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx, nn
from torch.fx.graph_module import reduce_graph_module

from econv.groups import Group

if TYPE_CHECKING:
    from econv.conversion.report import Report

__all__ = ["ConvertedNetwork"]


class ConvertedNetwork(fx.GraphModule):
    """An equivariant network made by :func:`~econv.convert`.

    Its parts have the names that they have in the source. :attr:`report` says what became what.
    """

    input_kind = "scalar"
    group: Group
    report: Report
    output_kind: str

    def __init__(self, root: dict[str, Any] | nn.Module, graph: fx.Graph, name: str) -> None:
        super().__init__(root, graph, class_name=name)

    def describe_as(self, group: Group, output_kind: str, report: Report) -> ConvertedNetwork:
        """Say what the network is: what copies of it say too."""
        self.group = group
        self.output_kind = output_kind
        self.report = report
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedNetwork:
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, ConvertedNetwork)
        return copied.describe_as(self.group, self.output_kind, self.report)

    def __reduce__(self) -> tuple[Any, ...]:
        told = (self.group, self.output_kind, self.report)
        _, arguments = super().__reduce__()
        return _unpickle, (arguments, self.__class__.__name__, told, self.training)


def _unpickle(
    arguments: tuple[Any, ...], name: str, told: tuple[Any, ...], training: bool
) -> ConvertedNetwork:
    plain = reduce_graph_module(*arguments)
    network = ConvertedNetwork(plain, plain.graph, name).describe_as(*told)
    network.training = training
    return network
