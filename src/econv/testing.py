"""Public checkers: is a layer or a network equivariant, and how fast does its error vanish?

They know tensors, groups and modules, but nothing of how a layer works inside.

At quarter turns and flips the check is exact. At other angles an image must be interpolated, and
the interpolation has to be far better than what it measures: `transform` uses quintic splines.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.groups import FloatArray, Group, GroupLike
from econv.layers.checks import positive

__all__ = [
    "KINDS",
    "assert_equivariant",
    "convergence_order",
    "equivariance_error",
    "rotate",
    "smooth_field",
    "transform",
]

KINDS = ("scalar", "pseudoscalar", "regular", "vector", "invariant")
"""How channels turn: not at all, with a sign under reflections, as group features, as (x, y)
components; or nothing turns."""

Kind = str | Sequence[tuple[str, int]]
"""One of `KINDS`, or for channels of several kinds each with its number of fields, in order."""


def transform(
    x: Tensor,
    group: GroupLike,
    element: int,
    kind: Kind = "scalar",
    spacing: float | tuple[float, float] = 1.0,
) -> Tensor:
    """π of one group element: turn an image, a group feature map or a vector field.

    - ``"scalar"``: (πr)(x) = r(Ã⁻¹x), every channel an image;
    - ``"regular"``: (πe)(x, A) = e(Ã⁻¹x, Ã⁻¹A), channels ``fields * order``;
    - ``"pseudoscalar"``: (πω)(x) = det(Ã) ω(Ã⁻¹x);
    - ``"vector"``: (πv)(x) = Ã v(Ã⁻¹x), channels in pairs x (right), y (up);
    - ``[("scalar", 1), ("vector", 1)]`` and the like: channels of several kinds, one after the
      other, and how many fields are of each;
    - ``"invariant"``: the tensor itself, of any shape, such as class scores.

    Pixels turn about the centre of the image. Quarter turns and flips are exact (and swap height
    and width of images that are not square); other angles are interpolated by quintic splines, in
    float64, with zeros where no image was. Where pixels are rectangles, ``spacing=(dy, dx)``, only
    half turns and flips along the axes are exact, and quarter turns are interpolated.

    >>> x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> transform(x, "p4", 1)[0, 0].tolist()
    [[2.0, 4.0], [1.0, 3.0]]
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a torch.Tensor; got {type(x).__name__}")
    found = Group(group)
    if not isinstance(kind, str):
        return _transform_parts(x, found, element, kind, spacing)
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: expected one of {KINDS}")
    if not isinstance(element, int | np.integer) or not 0 <= element < found.order:
        raise ValueError(
            f"expected an element of {found} from 0 to {found.order - 1}; got {element}"
        )
    if kind == "invariant":
        return x
    if x.ndim != 4:
        raise ValueError(f"expected [batch, channels, height, width]; got {tuple(x.shape)}")
    aspect = _aspect(spacing)
    if not (x.is_floating_point() or element in _exact(found, aspect)):
        raise ValueError(f"expected a floating-point image to interpolate; got {x.dtype}")
    multiple = _channels(kind, found)
    if x.shape[1] % multiple:
        raise ValueError(
            f"expected channels in multiples of {multiple} for kind {kind!r} of {found}; "
            f"got {x.shape[1]}"
        )
    moved = _move_pixels(x, found, element, aspect)
    channels = moved.unflatten(1, (-1, multiple))
    if kind == "regular":
        # Orientation A of the result is orientation Ã⁻¹A of the input.
        channels = channels[:, :, found.relative[element].tolist()]
    elif kind == "vector":
        matrix = torch.tensor(found.matrices[element], dtype=x.dtype, device=x.device)
        channels = torch.einsum("dc,bvcyx->bvdyx", matrix, channels)
    elif kind == "pseudoscalar" and element >= found.rotations:
        channels = -channels
    return channels.flatten(1, 2)


def _channels(kind: str, group: Group) -> int:
    """Of one field."""
    return {"regular": group.order, "vector": 2}.get(kind, 1)


def _transform_parts(
    x: Tensor,
    group: Group,
    element: int,
    parts: Sequence[tuple[str, int]],
    spacing: float | tuple[float, float],
) -> Tensor:
    try:
        sizes = [fields * _channels(kind, group) for kind, fields in parts]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected one of {KINDS}, or pairs such as ('scalar', 1); got {parts!r}"
        ) from error
    if x.ndim != 4 or sum(sizes) != x.shape[1]:
        raise ValueError(
            f"expected [batch, {sum(sizes)}, height, width] for {list(map(tuple, parts))}; "
            f"got {tuple(x.shape)}"
        )
    each = zip(x.split(sizes, dim=1), parts, strict=True)
    return torch.cat([transform(own, group, element, kind, spacing) for own, (kind, _) in each], 1)


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Turn every channel of ``[batch, channels, height, width]`` anticlockwise by any angle.

    Exact at quarter turns (which swap height and width); elsewhere by quintic splines, with zeros
    where no image was, as in :func:`transform`.

    >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90)[0, 0].tolist()
    [[2.0, 4.0], [1.0, 3.0]]
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a torch.Tensor; got {type(x).__name__}")
    if x.ndim != 4:
        raise ValueError(f"expected [batch, channels, height, width]; got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point image to interpolate; got {x.dtype}")
    if not isinstance(degrees, float | int) or not math.isfinite(degrees):
        raise ValueError(f"expected a finite angle in degrees; got {degrees!r}")
    if degrees % 90 == 0:
        return torch.rot90(x, round(degrees / 90), (-2, -1))
    angle = math.radians(degrees % 360)
    cosine, sine = math.cos(angle), math.sin(angle)
    return _resample(x, np.array([[cosine, -sine], [sine, cosine]]))


def equivariance_error(
    module: Callable[[Tensor], Tensor],
    x: Tensor,
    element: int,
    group: GroupLike | None = None,
    *,
    input_kind: Kind | None = None,
    output_kind: Kind | None = None,
    margin: float = 3 / 16,
    spacing: float | tuple[float, float] | None = None,
) -> float:
    """How far a module is from commuting with one group element: ‖f(πx) − πf(x)‖ / ‖πf(x)‖.

    Args:
        module: a layer, a network, or any function of one tensor.
        x: its input, ``[batch, channels, height, width]``.
        element: index of the group element.
        group: the group; by default ``module.group``.
        input_kind: how the input turns, see :func:`transform`; by default what the layer says of
            itself, else ``"scalar"``.
        output_kind: how the output turns; by default what the layer says of itself, else
            ``"regular"``, or ``"invariant"`` for an output that is no image.
        margin: for elements that need interpolation, the error is taken inside the central disc
            that ends this fraction of the side before the border, where padding plays no role.
        spacing: the length of a pixel, or its lengths along (y, x); by default those that the
            layers name.

    Both passes see the same random numbers, and running statistics are left as they were.

    >>> from econv import LiftConv2d
    >>> layer = LiftConv2d(1, 2, "p8", dtype=torch.float64)
    >>> image = smooth_field(33, channels=1, smoothness=2.0)
    >>> equivariance_error(layer, image, element=2) < 1e-12  # a quarter turn
    True
    >>> 1e-12 < equivariance_error(layer, image, element=1) < 0.01  # an eighth
    True
    """
    found = _group_of(module, group)
    into = input_kind or _kind_of(module, "input", "scalar")
    lengths = _spacing_of(module) if spacing is None else spacing
    turned_input = transform(x, found, element, into, lengths)
    with _undisturbed(module, x.device) as run:
        turned_first, turned_last = run(turned_input), run(x)
    default = "regular" if turned_last.ndim == 4 else "invariant"
    out = output_kind or _kind_of(module, "output", default)
    turned_last = transform(turned_last, found, element, out, lengths)
    if turned_first.shape != turned_last.shape:
        raise ValueError(
            f"the output for the turned input has shape {tuple(turned_first.shape)}, the turned "
            f"output {tuple(turned_last.shape)}: expected the same"
        )
    difference, size = (turned_first - turned_last).double(), turned_last.double()
    aspect = _aspect(lengths)
    if out != "invariant" and element not in _exact(found, aspect):
        disc = _disc(size.shape[-2], size.shape[-1], margin, aspect).to(size.device)
        difference, size = difference * disc, size * disc
    error, norm = float(difference.norm()), float(size.norm())
    if norm == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / norm


def assert_equivariant(
    module: Callable[[Tensor], Tensor],
    x: Tensor,
    group: GroupLike | None = None,
    *,
    elements: Iterable[int] | None = None,
    tolerance: float | None = None,
    input_kind: Kind | None = None,
    output_kind: Kind | None = None,
    margin: float = 3 / 16,
    spacing: float | tuple[float, float] | None = None,
) -> None:
    """Raise ``AssertionError`` with every element's error unless the module is equivariant.

    By default the elements are the grid's own symmetries, which must hold to rounding: 1e-12 in
    float64, 1e-5 in float32, 5e-2 in half precisions. Other elements need a ``tolerance`` that says
    what the stencils are expected to give. Further arguments: see :func:`equivariance_error`.
    """
    found = _group_of(module, group)
    lengths = _spacing_of(module) if spacing is None else spacing
    exact = _exact(found, _aspect(lengths))
    chosen = exact if elements is None else tuple(elements)
    if not chosen:
        raise ValueError("expected at least one element to check; got none")
    if tolerance is None:
        if not set(chosen) <= set(exact):
            raise ValueError(
                "expected a tolerance for elements that are no symmetries of the pixel grid: "
                f"their error depends on the stencils; those of {found} are {exact}"
            )
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(x.dtype, 5e-2)

    def measured(into: Any, out: Any) -> dict[int, float]:
        kinds = {"input_kind": into, "output_kind": out}
        return {
            element: equivariance_error(
                module, x, element, found, **kinds, margin=margin, spacing=lengths
            )
            for element in chosen
        }

    def holds(errors: dict[int, float]) -> bool:
        # Written so that a NaN error fails.
        return all(error <= tolerance for error in errors.values())

    errors = measured(input_kind, output_kind)
    if holds(errors):
        return
    table = "\n".join(f"  element {e}: {error:.3e}" for e, error in errors.items())
    hint = ""
    if input_kind is None and not hasattr(module, "input_kind") and x.shape[1] % 2 == 0:
        for out in dict.fromkeys((output_kind, output_kind or "vector")):
            with contextlib.suppress(ValueError):  # channels that are no vectors
                if holds(measured("vector", out)):
                    more = "" if out == output_kind else f" and output_kind={out!r}"
                    hint = f"\nIt is with input_kind='vector'{more}: channels in pairs x, y (up)"
                    break
    raise AssertionError(f"not equivariant to {found} within {tolerance:.1e}:\n{table}{hint}")


def convergence_order(
    error: Callable[[float], float] | Sequence[float], spacings: Sequence[float]
) -> float:
    """The measured order of an error in the spacing: the slope of log error over log h.

    ``error`` is a function of the spacing, or the errors measured at each of the ``spacings``.

    >>> round(convergence_order(lambda h: 3 * h**2, [0.1, 0.05, 0.025]), 6)
    2.0
    """
    h = np.asarray(spacings, dtype=np.float64)
    different = h.ndim == 1 and len(h) >= 2 and len(set(h.tolist())) == len(h)
    if not (different and np.isfinite(h).all() and h.min() > 0):
        raise ValueError(f"expected at least two different positive spacings; got {spacings!r}")
    errors = [error(float(s)) for s in h] if callable(error) else error
    found = np.asarray(errors, dtype=np.float64)
    if found.shape != h.shape:
        raise ValueError(f"expected one error for each of {len(h)} spacings; got {found.shape}")
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise ValueError(f"expected positive finite errors; got {found.tolist()}")
    slope, _ = np.polyfit(np.log(h), np.log(found), 1)
    return float(slope)


def smooth_field(
    size: int,
    channels: int = 1,
    smoothness: float = 2.0,
    seed: int = 0,
    batch: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """A smooth random image ``[batch, channels, size, size]`` with second moment 1 as a whole.

    White noise blurred by a Gaussian of ``smoothness`` pixels, periodic at the border.

    >>> smooth_field(32, channels=3).shape
    torch.Size([1, 3, 32, 32])
    """
    for name, count in (("size", size), ("channels", channels), ("batch", batch)):
        positive(name, count, 1 << 14)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"expected seed as a whole number; got {seed!r}")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, channels, size, size, generator=generator, dtype=torch.float64)
    frequency = torch.fft.fftfreq(size, dtype=torch.float64)
    line = torch.exp(-2 * (math.pi * smoothness * frequency) ** 2)
    field = torch.fft.ifft2(torch.fft.fft2(noise) * line[:, None] * line).real
    return (field / field.pow(2).mean().sqrt()).to(dtype)


def _group_of(module: object, group: GroupLike | None) -> Group:
    found = group if group is not None else getattr(module, "group", None)
    if found is None:
        raise ValueError(f"expected a group: {type(module).__name__} has no attribute 'group'")
    return Group(found)


def _kind_of(module: object, end: str, default: str) -> Kind:
    """What a module says of its input or output."""
    kind = str(getattr(module, f"{end}_kind", default))
    return kind if kind != "mixed" else list(getattr(module, f"{end}_parts"))


def _spacing_of(module: object) -> float | tuple[float, float]:
    """The pair of spacings that the layers of a module agree on; 1 where none names a pair."""
    parts = module.modules() if isinstance(module, nn.Module) else [module]
    named = [found for part in parts if isinstance(found := getattr(part, "spacing", 1.0), tuple)]
    if len({_aspect(found) for found in named}) > 1:
        raise ValueError(f"expected pixels of one shape: the layers have {sorted(set(named))}")
    return named[0] if named else 1.0


def _aspect(spacing: float | tuple[float, float]) -> float:
    """Height of a pixel over its width."""
    y, x = spacing if isinstance(spacing, tuple | list) else (spacing, spacing)
    return y / x


def _exact(group: Group, aspect: float) -> tuple[int, ...]:
    """The elements that map the pixel grid onto itself."""
    square = aspect == 1.0
    return tuple(e for e in group.grid_symmetries if square or not group.matrices[e][0, 1])


@contextlib.contextmanager
def _undisturbed(
    module: Callable[[Tensor], Tensor], device: torch.device
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Run a module without gradient, each time from the same state and random seed."""
    buffers = list(module.buffers()) if isinstance(module, nn.Module) else []
    kept = [buffer.clone() for buffer in buffers]

    def restore() -> None:
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        result = module(x)
        restore()
        if not isinstance(result, Tensor):
            raise ValueError(f"expected a module that gives a tensor; got {type(result).__name__}")
        return result

    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            yield run
        finally:
            restore()


def _move_pixels(x: Tensor, group: Group, element: int, aspect: float = 1.0) -> Tensor:
    """r(A⁻¹x) for every channel."""
    matrix = group.matrices[element]
    if element in _exact(group, aspect):
        if element >= group.rotations:  # A = R·F: the flip y → −y comes first
            x = x.flip(-2)
            matrix = matrix @ np.diag([1.0, -1.0])
        quarters = round(math.atan2(matrix[1, 0], matrix[0, 0]) / (math.pi / 2))
        return torch.rot90(x, quarters, (-2, -1))
    # In pixels, that are shorter along one axis.
    return _resample(x, matrix * [[1.0, 1 / aspect], [aspect, 1.0]])


def _resample(x: Tensor, matrix: FloatArray) -> Tensor:
    """r(A⁻¹x) by quintic B-splines, with zeros outside of the image."""
    height, width = x.shape[-2:]
    places, weights = _taps(height, width, tuple(matrix.ravel().tolist()))

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(x.device)

    coefficients = tensor(_spline_filter(height)) @ x.double() @ tensor(_spline_filter(width)).T
    # Each pixel is a weighted sum of coefficients, with one row of them for all channels at once.
    table = coefficients.flatten(2).flatten(0, 1).T.contiguous()
    result = functional.embedding_bag(
        tensor(places), table, mode="sum", per_sample_weights=tensor(weights)
    )
    return result.T.reshape(x.shape).to(x.dtype)


@lru_cache(maxsize=64)
def _taps(height: int, width: int, matrix: tuple[float, ...]) -> tuple[np.ndarray, FloatArray]:
    """The 36 coefficients that each turned pixel reads, and their weights, ``[pixels, 36]``."""
    rows, columns = np.mgrid[:height, :width]
    right = columns - (width - 1) / 2
    up = (height - 1) / 2 - rows
    inverse = np.array(matrix).reshape(2, 2).T
    source_column = inverse[0, 0] * right + inverse[0, 1] * up + (width - 1) / 2
    source_row = (height - 1) / 2 - (inverse[1, 0] * right + inverse[1, 1] * up)
    edge = 1e-9  # a corner that rounding moved out of the image still belongs to it
    inside = (np.abs(source_row - (height - 1) / 2) <= (height - 1) / 2 + edge) & (
        np.abs(source_column - (width - 1) / 2) <= (width - 1) / 2 + edge
    )
    places, weights = [], []
    for row, row_weight in _spline_taps(source_row, height):
        for column, column_weight in _spline_taps(source_column, width):
            places.append((row * width + column).ravel())
            weights.append((row_weight * column_weight * inside).ravel())
    return np.stack(places, axis=1), np.stack(weights, axis=1)


def _spline_taps(position: FloatArray, size: int) -> Iterator[tuple[np.ndarray, FloatArray]]:
    """The six coefficients that a quintic spline reads at each position, and their weights."""
    base = np.floor(position).astype(np.int64)
    for offset in range(-2, 4):
        yield _mirrored(base + offset, size), _quintic(position - (base + offset))


def _quintic(t: FloatArray) -> FloatArray:
    """The quintic B-spline: (1/5!) Σ_j (−1)^j C(6, j) (t + 3 − j)₊⁵."""
    terms = [(-1) ** j * math.comb(6, j) * np.maximum(t + 3 - j, 0.0) ** 5 for j in range(7)]
    return np.sum(terms, axis=0) / math.factorial(5)


@lru_cache(maxsize=32)
def _spline_filter(size: int) -> FloatArray:
    """The matrix from pixels to spline coefficients, mirrored at the border pixels."""
    collocation = np.zeros((size, size))
    pixels = np.arange(size)
    for offset in range(-2, 3):
        np.add.at(
            collocation, (pixels, _mirrored(pixels + offset, size)), _quintic(np.array(offset))
        )
    return np.linalg.inv(collocation)


def _mirrored(index: np.ndarray, size: int) -> np.ndarray:
    """Indices outside of 0 … size − 1 reflected at the first and the last pixel."""
    if size == 1:
        return np.zeros_like(index)
    period = 2 * (size - 1)
    folded = np.abs(index) % period
    return np.minimum(folded, period - folded)


def _disc(height: int, width: int, margin: float, aspect: float = 1.0) -> Tensor:
    """The disc in the middle; lengths are in widths of a pixel."""
    radius = min(height * aspect, width) * (0.5 - margin)
    rows = (torch.arange(height, dtype=torch.float64) - (height - 1) / 2) * aspect
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    return (rows[:, None] ** 2 + columns**2 <= radius**2).double()
