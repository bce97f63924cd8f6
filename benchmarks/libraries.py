"""The same networks in each library, built the way its own documentation shows.

``torch`` is the control: ordinary convolutions with as many channels and taps. What an ordinary
network cannot do either says nothing about a library of equivariant ones.

Only torch is imported here; each library when one of its networks is asked for. Groups are named
as in econv: p8 is the rotations by 45° (C8), p4m the quarter turns with reflections (D4).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fresh import AbsentError

NAMES = ("econv", "escnn", "e2cnn", "torch")
TAPS = 5


def get(name: str) -> Library:
    """The library of that name, which must be installed in this environment."""
    if importlib.util.find_spec(name) is None:
        raise AbsentError("not installed")
    return {"econv": Econv, "escnn": Escnn, "e2cnn": E2cnn, "torch": Torch}[name]()


def versions(name: str) -> dict[str, str | None]:
    """What the results of a library depend on, in this environment."""
    get(name)
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in dict.fromkeys((name, "torch", "numpy", "onnx", "onnxruntime", "torchao")):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            source = name if package == name else None  # run from its sources
            found[package] = source and importlib.import_module(source).__version__
    return found


def order_of(group: str) -> int:
    """How many elements ``pn`` or ``pnm`` has."""
    return int(group.strip("pm")) * (2 if group.endswith("m") else 1)


class Library:
    """How one library builds, exports and converts. Networks take and give plain tensors."""

    name: str
    learned: str  # the name of a convolution's parameter

    def network(
        self,
        group: str = "p8",
        fields: tuple[int, ...] = (2, 4, 4),
        halved: bool = False,
    ) -> Network:
        """Convolution, batch norm, ReLU for each width; pooling; a linear classifier.

        Args:
            group: ``pn`` or ``pnm``.
            fields: how many regular fields each convolution gives.
            halved: halve the image after the first layer, by what the library has for it.
        """
        layers: list[nn.Module] = []
        before = 0
        for index, count in enumerate(fields):
            layers += [
                self.convolution(group, before, count),
                self.norm(group, count),
                self.relu(group, count),
            ]
            if halved and not index:
                layers.append(self.half(group, count))
            before = count
        return self.assembled([*layers, self.pool(group, before)], nn.Linear(before, 10))

    def assembled(self, layers: list[nn.Module], classifier: nn.Linear) -> Network:
        return Network(nn.Sequential(*layers), classifier)

    def convolution(self, group: str, before: int, after: int) -> nn.Module:
        """A convolution with 5×5 taps; ``before = 0`` is an image with three channels."""
        raise NotImplementedError

    def norm(self, group: str, fields: int) -> nn.Module:
        raise NotImplementedError

    def relu(self, group: str, fields: int) -> nn.Module:
        return nn.ReLU()

    def half(self, group: str, fields: int) -> nn.Module:
        raise NotImplementedError

    def pool(self, group: str, fields: int) -> nn.Module:
        raise NotImplementedError

    def wrapped(self, x: Tensor, layer: nn.Module) -> Any:
        """What the layer takes as its input."""
        return x

    def tensor(self, x: Any) -> Tensor:
        """The numbers of what a layer gives."""
        return x

    def movements(self, group: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """How each element of the group acts on images and on features, as the library has it."""
        raise NotImplementedError

    def filters(self, layer: nn.Module) -> Tensor:
        """The filter bank that a plain convolution would take."""
        return layer.weight

    def exported(self, network: Network) -> nn.Module:
        """A plain torch network, by the library's own means."""
        raise NotImplementedError

    def synchronised(self, network: Network) -> nn.Module:
        """The network with norms that share their statistics, by the recommended means."""
        return nn.SyncBatchNorm.convert_sync_batchnorm(network)


class Network(nn.Module):
    """Layers of a library between plain tensors."""

    def __init__(self, features: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier)

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.features.children())

    def enter(self, x: Tensor) -> Any:
        return x

    def leave(self, x: Any) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.leave(self.features(self.enter(x))))


class Torch(Library):
    name = "torch"
    learned = "weight"

    def convolution(self, group: str, before: int, after: int) -> nn.Module:
        order = order_of(group)
        return nn.Conv2d(before * order or 3, after * order, TAPS, padding=TAPS // 2, bias=False)

    def norm(self, group: str, fields: int) -> nn.Module:
        return nn.BatchNorm2d(fields * order_of(group))

    def half(self, group: str, fields: int) -> nn.Module:
        return nn.AvgPool2d(2)

    def pool(self, group: str, fields: int) -> nn.Module:
        return nn.Conv2d(fields * order_of(group), fields, 1)

    def exported(self, network: Network) -> nn.Module:
        return network


class Econv(Library):
    name = "econv"
    learned = "weight"

    def __init__(self) -> None:
        self.econv = importlib.import_module("econv")

    def convolution(self, group: str, before: int, after: int) -> nn.Module:
        if not before:
            return self.econv.LiftConv2d(3, after, group, size=TAPS)
        return self.econv.GroupConv2d(before, after, group, size=TAPS)

    def norm(self, group: str, fields: int) -> nn.Module:
        return self.econv.GroupBatchNorm2d(fields, group)

    def half(self, group: str, fields: int) -> nn.Module:
        return self.econv.Downsample2d()

    def pool(self, group: str, fields: int) -> nn.Module:
        return self.econv.GroupPool2d(group)

    def movements(self, group: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        for element in range(order_of(group)):

            def moved(x: Tensor, element: int = element) -> Tensor:
                kind = "scalar" if x.shape[1] == 3 else "regular"
                return self.econv.testing.transform(x, group, element, kind)

            yield f"element {element}", moved

    def filters(self, layer: nn.Module) -> Tensor:
        return layer.filters()

    def exported(self, network: Network) -> nn.Module:
        return self.econv.export(network)

    def synchronised(self, network: Network) -> nn.Module:
        return self.econv.convert_sync_batchnorm(network)


class Geometric(Library):
    """What escnn and its predecessor e2cnn have in common: nearly everything."""

    learned = "weights"

    def __init__(self) -> None:
        self.nn = importlib.import_module(f"{self.name}.nn")
        self.gspaces = importlib.import_module(f"{self.name}.gspaces")

    def space(self, group: str) -> Any:
        raise NotImplementedError

    def fields(self, group: str, count: int) -> Any:
        """The type of so many regular fields, or of an image."""
        space = self.space(group)
        kind = count * [space.regular_repr] if count else 3 * [space.trivial_repr]
        return self.nn.FieldType(space, kind)

    def assembled(self, layers: list[nn.Module], classifier: nn.Linear) -> Network:
        return GeometricNetwork(self.nn.SequentialModule(*layers), classifier)

    def convolution(self, group: str, before: int, after: int) -> nn.Module:
        types = self.fields(group, before), self.fields(group, after)
        return self.nn.R2Conv(*types, TAPS, padding=TAPS // 2, bias=False)

    def norm(self, group: str, fields: int) -> nn.Module:
        return self.nn.InnerBatchNorm(self.fields(group, fields))

    def relu(self, group: str, fields: int) -> nn.Module:
        return self.nn.ReLU(self.fields(group, fields))

    def half(self, group: str, fields: int) -> nn.Module:
        names = ("PointwiseAvgPoolAntialiased2D", "PointwiseAvgPoolAntialiased")
        pooling = next(getattr(self.nn, name) for name in names if hasattr(self.nn, name))
        return pooling(self.fields(group, fields), sigma=0.66, stride=2)

    def pool(self, group: str, fields: int) -> nn.Module:
        return self.nn.GroupPooling(self.fields(group, fields))

    def wrapped(self, x: Tensor, layer: nn.Module) -> Any:
        return self.nn.GeometricTensor(x, layer.in_type)

    def tensor(self, x: Any) -> Tensor:
        return x.tensor

    def movements(self, group: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        for element in self.space(group).testing_elements:
            yield f"element {element}", lambda x, element=element: x.transform(element)

    def filters(self, layer: nn.Module) -> Tensor:
        weight = layer.eval().export().weight
        layer.train()
        return weight

    def exported(self, network: Network) -> nn.Module:
        # Their export() works on the equivariant part of a network in eval mode.
        return nn.Sequential(network.eval().features.export(), network.head).eval()


class GeometricNetwork(Network):
    """Wraps what comes in and unwraps what goes out, as the examples of escnn and e2cnn do."""

    def __init__(self, features: nn.Module, classifier: nn.Linear) -> None:
        super().__init__(features, classifier)
        library = type(features).__module__.partition(".")[0]
        self.geometric = importlib.import_module(f"{library}.nn").GeometricTensor

    def enter(self, x: Tensor) -> Any:
        return self.geometric(x, self.features.in_type)

    def leave(self, x: Any) -> Tensor:
        return x.tensor


class Escnn(Geometric):
    name = "escnn"

    def space(self, group: str) -> Any:
        rotations = int(group.strip("pm"))
        if group.endswith("m"):
            return self.gspaces.flipRot2dOnR2(rotations)
        return self.gspaces.rot2dOnR2(rotations)


class E2cnn(Geometric):
    name = "e2cnn"

    def space(self, group: str) -> Any:
        rotations = int(group.strip("pm"))
        if group.endswith("m"):
            return self.gspaces.FlipRot2dOnR2(rotations)
        return self.gspaces.Rot2dOnR2(rotations)


def trained(library: Library, **options: Any) -> Network:
    """A network after two steps of training, so that nothing in it is at its first value."""
    torch.manual_seed(0)
    network = library.network(**options).train()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
    for _ in range(2):
        optimiser.zero_grad()
        network(torch.randn(4, 3, 17, 17)).square().mean().backward()
        optimiser.step()
    network.zero_grad(set_to_none=True)
    return network


def layers_of(name: str) -> dict[str, Any]:
    """The version of escnn or e2cnn, and the public names of its layers."""
    found = importlib.import_module(f"{name}.nn")
    names = sorted(each for each in vars(found) if each[0].isupper())
    return {"version": importlib.metadata.version(name), "layers": names}
