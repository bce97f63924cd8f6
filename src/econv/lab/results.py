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
    errors: tuple[float | None, ...]
    """‖f(πx) − πf(x)‖ / ‖πf(x)‖ for each element; None for maps of too few pixels to turn so."""


@dataclass(frozen=True)
class Blame(_Result):
    """What breaks equivariance at a quarter turn or flip, where every layer can be exact."""

    names: tuple[str, ...]
    """The module to blame, or those that may be, one of which is."""
    strided: bool
    """Whether it keeps pixels that lie off the centre on this size, and is sound on others."""
    between: tuple[str, str] | None = None
    """Without a module to blame: the layers between which functions break it."""

    def __str__(self) -> str:
        if self.between is not None:
            return f"what lies between {self.between[0]} and {self.between[1]}"
        return " or ".join(self.names)


def verdict(blame: Blame) -> str:
    """A sentence on what is to blame, and why.

    >>> verdict(Blame(("conv1",), strided=False))
    'conv1 breaks equivariance.'
    """
    if blame.between is not None:
        first, last = blame.between
        why = (
            "keeps only some of the pixels, which lie off the centre on this size"
            if blame.strided
            else "breaks equivariance"
        )
        return f"What lies between {first} and {last} {why}."
    if blame.strided:
        return f"{blame} has a stride, and on this size its samples lie off the centre."
    if len(blame.names) > 1:
        return f"One of these breaks equivariance: {', '.join(blame.names)}."
    return f"{blame} breaks equivariance."


@dataclass(frozen=True)
class OutputError(_Result):
    """How far the output for one turned input is from the turned output."""

    element: int
    absolute: float
    """The largest difference of any number."""
    relative: float | None
    """‖f(πx) − πf(x)‖ / ‖πf(x)‖; None for a map of too few pixels to turn so."""
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
    blame: Blame | None = None
    """What is to blame where something fails at a symmetry of the pixel grid."""

    def first_inexact(self, tolerance: float = 1e-4) -> str | None:
        """The first layer that fails at a quarter turn or flip, where every layer can be exact.

        ``"output"`` where all maps that were compared are exact and the output is not.
        """
        places = [
            i for i, element in enumerate(self.elements) if element in self.group.grid_symmetries
        ]
        for layer in self.layers:
            # Written so that a NaN fails.
            if not all(_within(layer.errors[i], tolerance) for i in places):
                return layer.name
        if not all(_within(self.output[i].relative, tolerance) for i in places):
            return "output"
        return None


def _within(error: float | None, tolerance: float) -> bool:
    """Whether an error is at most the tolerance; a NaN is not."""
    return error is None or error <= tolerance


@dataclass(frozen=True)
class AngleCurve(_Result):
    """Error over the angle of rotation."""

    kind: str
    angles: tuple[float, ...]
    errors: tuple[float | None, ...]
    group: Group | None
    """The group of the model; its own angles are those that the layers are made for."""
    changed: tuple[float, ...] | None = None
    """For scores: the share of images whose predicted class is another than at 0°."""


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
    """What fails on the pixel grid for a reason other than its stride: what is to blame."""

    @property
    def exact(self) -> bool:
        """Whether the error is that of rounding, so that there is nothing to explain."""
        return self.error <= 1e-5


@dataclass(frozen=True)
class LieDerivative(_Result):
    """How far one step of a network is from moving with what it reads, infinitesimally.

    Relative to the map itself, and per unit of the movement: of a rotation a radian, of a
    translation a pixel of the input, of a change of scale a factor e.
    """

    name: str
    type: str
    kind: str
    shape: tuple[int, ...]
    own: float | None
    """‖df(Gx) − G f(x)‖ / ‖f(x)‖ of this step alone; None where there is nothing to compare."""
    total: float | None
    """The same of the whole network up to here; None where it was not asked for."""
    share: float | None
    """What this step contributes to the Lie derivative of the output; all of them sum to 1."""


@dataclass(frozen=True)
class LieDerivatives(_Result):
    """The table of :func:`lie_derivatives`."""

    transformation: str
    layers: tuple[LieDerivative, ...]
    output_kind: str
    output: float | None
    """The Lie derivative of the whole network, relative to its output; None likewise."""
    rest: float | None
    """The share of functions between the steps; with those of all layers it sums to 1."""
    method: str
    """``"forward mode"``, or finite differences and why."""

    def largest(self, count: int = 3) -> tuple[LieDerivative, ...]:
        """The layers with the largest shares, or without shares with the largest own errors."""
        known = [entry for entry in self.layers if entry.own is not None]
        order = sorted(known, key=lambda e: e.own if e.share is None else e.share, reverse=True)  # type: ignore[arg-type,return-value]
        return tuple(order[:count])


@dataclass(frozen=True)
class Source(_Result):
    """What one kind of step, or one step, adds to the error of the output."""

    name: str
    share: float
    """Of the squared error; all of them sum to 1, and errors that cancel others are negative."""
    alone: float | None = None
    """The error that would remain if nothing else erred; None where the share is tiny."""
    layers: tuple[str, ...] = ()
    """The steps with the largest shares, largest first."""


@dataclass(frozen=True)
class ErrorSplit(_Result):
    """The table of :func:`split_error`."""

    degrees: float
    kind: str
    """How the output turns."""
    error: float
    """‖f(πx) − πf(x)‖ / ‖πf(x)‖ of the output."""
    sources: tuple[Source, ...]
    """By kind of step, largest share first."""
    layers: tuple[Source, ...]
    """By step, in the order in which they run."""
    unexplained: float
    """What the shares lack to a sum of 1: the integral over them is taken at a few points."""

    @property
    def exact(self) -> bool:
        """Whether the error is that of rounding, so that there is nothing to share out."""
        return self.error <= 1e-5


@dataclass(frozen=True)
class Suggestion(_Result):
    """A change that was made in a copy of the network, and what it did to the error."""

    change: str
    """What to do, such as ``"SiLU in place of these 6 ReLUs"``."""
    layers: tuple[str, ...]
    """Where."""
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.change}: {_short(self.before)} → {_short(self.after)}"


@dataclass(frozen=True)
class Advice(_Result):
    """What :func:`advice` tried and found."""

    degrees: float
    error: float
    """Of the output, before any change."""
    statistics: str
    """Whether those of norms were ``"estimated"`` anew for every network, or ``"held"``."""
    suggestions: tuple[Suggestion, ...]
    """The changes that helped, best first."""
    together: Suggestion | None
    """The best of each kind at once, where that is better than the best alone."""
    tried: tuple[str, ...]
    """Every change that was made, those that did not help included."""


@dataclass(frozen=True)
class Misfit(_Result):
    """A layer whose samples lie off the centre of what it reads."""

    name: str
    reads: int
    """Pixels along the side of its input."""
    why: str


@dataclass(frozen=True)
class Sizes(_Result):
    """What :func:`sizes` found."""

    size: int
    """The side of the images that were given."""
    exact: bool | None
    """Whether sampling commutes with quarter turns at that size; None if the model does not run."""
    misfits: tuple[Misfit, ...]
    """At that size, the layers to blame."""
    fitting: tuple[int, ...]
    """All sizes among those that were tried where it does."""
    tried: tuple[int, int]
    """The smallest and the largest of these on which the model runs."""
    below: int | None
    """The nearest smaller size that fits."""
    above: int | None
    """The nearest larger size that fits."""
    dimension: int = 2
    """Of the images; 3 for volumes."""

    @property
    def pattern(self) -> str:
        """The sizes that fit in words, where they repeat.

        >>> Sizes(32, False, (), (31, 33, 35, 37), (31, 38), 31, 33).pattern
        'odd sizes'
        """
        low, high = self.tried
        every = set(range(low, high + 1))
        if set(self.fitting) == every:
            return "every size"
        for period in (2, 4, 8, 16, 32):
            if 2 * period > len(every):
                break
            rests = sorted({n % period for n in self.fitting})
            if {n for n in every if n % period in rests} == set(self.fitting) and rests:
                if period == 2:
                    return "odd sizes" if rests == [1] else "even sizes"
                ends = [f"{period}k" + (f"+{rest}" if rest else "") for rest in rests]
                return "sizes " + ", ".join(ends)
        return ", ".join(str(n) for n in self.fitting) or "none of these"


def size_verdict(sizes: Sizes) -> str:
    """A sentence or two on which sizes fit, and which layer is to blame.

    >>> size_verdict(Sizes(33, True, (), (31, 33, 35, 37), (31, 38), 31, 35)).partition(": ")[0]
    'Sampling fits 33×33 pixels'
    """
    low, high = sizes.tried
    points = "pixels" if sizes.dimension == 2 else "voxels"
    whole = f"{'×'.join([str(sizes.size)] * sizes.dimension)} {points}"
    if sizes.exact is None:
        here = f"The model does not run on {whole}."
    elif sizes.exact:
        here = f"Sampling fits {whole}: quarter turns move no sample."
    else:
        blamed = "; ".join(f"{m.name} reads {m.reads} {points}: {m.why}" for m in sizes.misfits)
        here = f"Sampling does not fit {whole}: {blamed}."
    near = [str(n) for n in (sizes.below, sizes.above) if n is not None]
    nearest = f" The nearest that fit: {' and '.join(near)}." if near and not sizes.exact else ""
    return f"{here}{nearest} From {low} to {high} {points} it fits {sizes.pattern}."


def _short(error: float) -> str:
    """As errors are spoken of: .083."""
    if not 1e-4 <= error < 1:
        return f"{error:.2g}"
    return f"{error:.2g}".removeprefix("0")
