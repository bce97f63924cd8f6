"""What the laboratory finds, as frozen dataclasses that become JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from econv.groups import FloatArray, Group


class _Result:
    """A frozen dataclass that knows how to become JSON."""

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain lists, strings and floats."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, _Result):
        return value.to_dict()
    if isinstance(value, Group):
        return value.name
    if isinstance(value, np.ndarray):
        if np.iscomplexobj(value):
            return {"real": value.real.tolist(), "imag": value.imag.tolist()}
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value


@dataclass(frozen=True)
class LayerError(_Result):
    """How far the map after one layer is from turning with the input."""

    name: str
    type: str
    kind: str
    order: int
    """How many channels turn together: the group's elements, the components of a vector, or 1."""
    shape: tuple[int, ...]
    errors: tuple[float, ...]
    """‖f(πx) − πf(x)‖ / ‖πf(x)‖ for each element."""


@dataclass(frozen=True)
class OutputError(_Result):
    """How far the output for one turned input is from the turned output."""

    element: int
    absolute: float
    """The largest difference of any number."""
    relative: float
    """‖f(πx) − πf(x)‖ / ‖πf(x)‖."""
    agreement: float | None
    """For scores: the share of images whose predicted class stays the same."""


@dataclass(frozen=True)
class LayerErrors(_Result):
    """The table of :func:`layer_errors`."""

    group: Group
    elements: tuple[int, ...]
    names: tuple[str, ...]
    """The elements in words, such as ``45°``."""
    layers: tuple[LayerError, ...]
    output_kind: str
    output: tuple[OutputError, ...]
    unknown: tuple[str, ...]
    """Modules whose maps were not compared, because how they turn is not known."""
    strided: tuple[str, ...]
    """Layers that keep only some of the pixels: on some sizes their samples lie off the centre."""

    def first_inexact(self, tolerance: float = 1e-4) -> str | None:
        """The first layer that fails at a quarter turn or flip, where every layer can be exact.

        ``"output"`` where all maps that were compared are exact and the output is not.
        """
        places = [
            i for i, element in enumerate(self.elements) if element in self.group.grid_symmetries
        ]
        for layer in self.layers:
            # Written so that a NaN fails.
            if not all(layer.errors[i] <= tolerance for i in places):
                return layer.name
        if not all(self.output[i].relative <= tolerance for i in places):
            return "output"
        return None


@dataclass(frozen=True)
class AngleCurve(_Result):
    """Error over the angle of rotation."""

    kind: str
    angles: tuple[float, ...]
    errors: tuple[float, ...]
    group: Group | None
    """The group of the model; its own angles are those that the layers are made for."""


@dataclass(frozen=True)
class ResolutionCurve(_Result):
    """Error over the length of a pixel, and the order with which it vanishes."""

    element: int
    angle: str
    spacings: tuple[float, ...]
    errors: tuple[float, ...]
    order: float


@dataclass(frozen=True, eq=False)
class OperatorSymbol(_Result):
    """The frequency response of one operator's stencil beside the ideal one."""

    name: str
    frequencies: FloatArray
    """Radians per pixel along each axis, from −π to π."""
    stencil: npt.NDArray[np.complex128]
    """Response ``[y, x]``, y upwards with the index."""
    ideal: npt.NDArray[np.complex128]
    error: float
    """Relative L2 distance to the ideal, for images with the given smoothness."""
    turning_error: float
    """Relative L2 distance between the response and that of the turned stencils, turned back."""


@dataclass(frozen=True)
class ErrorSources(_Result):
    """Where the error of the last map comes from; the shares are of the squared error.

    Below the accuracy of rounding there is nothing to share out, and all shares are zero.
    """

    layer: str
    element: int
    angle: str
    error: float
    """Relative error in the whole inscribed disc."""
    interior: float
    """Relative error in the interior disc, where padding plays no role."""
    grid: float | None
    """Relative error at quarter turns and flips; none if the group has none."""
    comparison: float
    """What turning the map there and back changes: sharp maps cannot be compared more finely."""
    sampling: float
    """An estimate at angles off the pixel grid, from the error on it."""
    padding: float
    stencil: float
    broken: float = 0.0
    """Share of a layer that is not equivariant, instead of ``sampling``: an estimate likewise."""
    broken_layer: str | None = None
    """The first layer that fails on the pixel grid for a reason other than its stride."""

    @property
    def exact(self) -> bool:
        """Whether the error is that of rounding, so that there is nothing to explain."""
        return self.error <= 1e-5
