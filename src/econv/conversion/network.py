"""The converted network: an ordinary module with the source's call signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.fx.graph import PythonCode
from torch.fx.graph_module import reduce_graph_module

from econv.conversion.fusion import switched
from econv.groups import Group

if TYPE_CHECKING:
    from econv.conversion.report import Report

__all__ = ["ConvertedNetwork", "sizes_in_order"]


class ConvertedNetwork(fx.GraphModule):
    """An equivariant network made by :func:`~econv.convert`.

    Its parts have the names that they have in the source. :attr:`report` says what became what.
    On GPUs norm, ReLU and convolution that follow each other run in one go where they can, as
    :func:`econv.layers.norm_relu_conv` says; ``graph`` and ``code`` have the three.
    """

    input_kind = "scalar"
    group: Group
    report: Report
    output_kind: str

    def __init__(self, root: dict[str, Any] | nn.Module, graph: fx.Graph, name: str) -> None:
        super().__init__(root, graph, class_name=name)

    def describe_as(self, **told: Any) -> ConvertedNetwork:
        """Say what the network is: its group, output_kind and report. Copies say it too."""
        for name in _TOLD:
            if name in told:
                setattr(self, name, told[name])
        return self

    def recompile(self) -> PythonCode:
        """Make ``forward`` from the graph."""
        code = super().recompile()
        made: Any = type(self)
        made.forward = switched(made.forward, self.graph, self.code)
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedNetwork:
        copied: Any = super().__deepcopy__(memo)
        found: ConvertedNetwork = copied.describe_as(**self.__dict__)
        found.training = self.training
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        told = {name: self.__dict__[name] for name in _TOLD if name in self.__dict__}
        arguments: Any = super().__reduce__()[1]
        return _unpickle, (arguments, self.__class__.__name__, told, self.training)


_TOLD = ("group", "output_kind", "report")


def _unpickle(
    arguments: tuple[Any, ...], name: str, told: dict[str, Any], training: bool
) -> ConvertedNetwork:
    plain: Any = reduce_graph_module(*arguments)
    network = ConvertedNetwork(plain, plain.graph, name).describe_as(**told)
    network.training = training
    return network


def sizes_in_order(x: Tensor, order: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of a tensor, in the order of the axes that the source had."""
    return tuple(x.shape[i] for i in order)
