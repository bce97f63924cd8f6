"""Public checkers: is a layer or a network equivariant, and how fast does its error vanish?

They know tensors, groups and modules, but nothing of how a layer works inside.

At the symmetries of the grid (quarter turns and flips, for volumes the 48 of the cube) the check is
exact. At other angles an image must be interpolated, and the interpolation has to be far better
than what it measures: `transform` uses quintic splines.

Images are ``[batch, channels, height, width]`` and volumes ``[batch, channels, depth, height,
width]``; x points right, y up and z along the depth.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.groups import FloatArray, Group, GroupLike
from econv.layers.checks import check_factory, number, positive

__all__ = [
    "KINDS",
    "assert_equivariant",
    "convergence_order",
    "equivariance_error",
    "random_rotations",
    "rotate",
    "smooth_field",
    "transform",
]

KINDS = ("scalar", "pseudoscalar", "regular", "vector", "invariant")
"""How channels turn: not at all, with a sign under reflections, as group features, as (x, y) or
(x, y, z) components; or nothing turns."""

Kind = str | Sequence[tuple[str, int]]
"""One of `KINDS`, or for channels of several kinds each with its number of fields, in order."""

_MAPS = {2: "[batch, channels, height, width]", 3: "[batch, channels, depth, height, width]"}

Element = int | FloatArray | Tensor
"""The index of an element of a group; or any orthogonal matrix, of (x, y) or (x, y, z)."""

Spacing = float | tuple[float, ...]
"""The length of a pixel, or its lengths along (y, x) or (z, y, x)."""


def transform(
    x: Tensor,
    group: GroupLike | None,
    element: Element,
    kind: Kind = "scalar",
    spacing: Spacing = 1.0,
) -> Tensor:
    """π of one group element: turn an image or a volume, a group feature map or a vector field.

    - ``"scalar"``: (πr)(x) = r(Ã⁻¹x), every channel an image;
    - ``"regular"``: (πe)(x, A) = e(Ã⁻¹x, Ã⁻¹A), channels ``fields * order``;
    - ``"pseudoscalar"``: (πω)(x) = det(Ã) ω(Ã⁻¹x);
    - ``"vector"``: (πv)(x) = Ã v(Ã⁻¹x), channels in pairs x (right), y (up), of volumes in threes
      x, y, z;
    - ``[("scalar", 1), ("vector", 1)]`` and the like: channels of several kinds, one after the
      other, and how many fields are of each;
    - ``"invariant"``: the tensor itself, of any shape, such as class scores.

    Pixels turn about the centre of the image. Quarter turns and flips, of volumes all symmetries of
    the cube, are exact (and swap the sides of maps that are not square); other angles are
    interpolated by quintic splines, in float64, with zeros where no image was. Where pixels are
    rectangles, ``spacing=(dy, dx)`` or ``(dz, dy, dx)``, only those are exact that keep their
    shape, and others are interpolated.

    ``element`` may be any orthogonal matrix, ``[2, 2]`` or ``[3, 3]``, which no group needs to
    hold; but group features turn by elements of their group alone.

    Raises:
        ValueError: for an unknown kind, channels that do not fit it, and an element that the group
            does not have.

    >>> x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> transform(x, "p4", 1)[0, 0].tolist()
    [[2.0, 4.0], [1.0, 3.0]]
    >>> transform(torch.arange(8.0).view(1, 1, 2, 2, 2), "O", 12).flatten().tolist()
    [1.0, 3.0, 0.0, 2.0, 5.0, 7.0, 4.0, 6.0]
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a torch.Tensor; got {type(x).__name__}")
    found = None if group is None else Group(group)
    matrix, index = _read_element(found, element)
    dimension = len(matrix)
    if dimension not in _MAPS:
        raise ValueError(f"expected a group of the plane or of space; got {found}")
    if not isinstance(kind, str):
        return _transform_parts(x, found, element, dimension, kind, spacing)
    if _known(kind) == "invariant":
        return x
    if x.ndim != dimension + 2:
        raise ValueError(f"expected {_MAPS[dimension]}; got {tuple(x.shape)}")
    lengths = _lengths(spacing, dimension)
    if not (x.is_floating_point() or _on_grid(matrix, lengths)):
        raise ValueError(f"expected a floating-point image to interpolate; got {x.dtype}")
    multiple = _channels(kind, found, dimension)
    if x.shape[1] % multiple:
        of = f" of {found}" if found is not None else ""
        raise ValueError(
            f"expected channels in multiples of {multiple} for kind {kind!r}{of}; got {x.shape[1]}"
        )
    moved = _move_pixels(x, matrix, lengths)
    channels = moved.unflatten(1, (-1, multiple))
    if kind == "regular":
        assert found is not None
        if index is None:
            raise ValueError(
                f"expected an element of {found} for group features, as its index: another "
                "rotation does not permute their orientations"
            )
        # Orientation A of the result is orientation Ã⁻¹A of the input.
        channels = channels[:, :, found.relative[index].tolist()]
    elif kind == "vector":
        turn = torch.tensor(matrix, dtype=x.dtype, device=x.device)
        channels = torch.einsum("dc,bvc...->bvd...", turn, channels)
    elif kind == "pseudoscalar" and np.linalg.det(matrix) < 0:
        channels = -channels
    return channels.flatten(1, 2)


def _read_element(group: Group | None, element: Element) -> tuple[FloatArray, int | None]:
    """The matrix, and the index of an element of the group."""
    if isinstance(element, int | np.integer) and group is not None:
        if not 0 <= element < group.order:
            raise ValueError(
                f"expected an element of {group} from 0 to {group.order - 1}; got {element}"
            )
        return np.asarray(group.matrices[element]), int(element)
    given = element.detach().cpu().numpy() if isinstance(element, Tensor) else element
    try:
        matrix = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):  # no numbers at all
        matrix = np.empty(0)
    size = len(matrix) if matrix.ndim else 0
    fits = matrix.shape == (size, size) and size in (
        (2, 3) if group is None else (group.dimension,)
    )
    if not fits or not np.abs(matrix @ matrix.T - np.eye(size)).max() <= 1e-6:
        whole = "an orthogonal matrix" if group is None else f"an element of {group}"
        sizes = "2×2 or 3×3" if group is None else f"{group.dimension}×{group.dimension}"
        raise ValueError(f"expected {whole}, as its index or as a matrix {sizes}; got {element!r}")
    return matrix, None


def _known(kind: object) -> str:
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: expected one of {KINDS}")
    return kind


def _channels(kind: str, group: Group | None, dimension: int) -> int:
    """Of one field."""
    if kind == "regular" and group is None:
        raise ValueError("expected a group for group features; got none")
    return {"regular": group.order if group else 1, "vector": dimension}.get(kind, 1)


def _transform_parts(
    x: Tensor,
    group: Group | None,
    element: Element,
    dimension: int,
    parts: Sequence[tuple[str, int]],
    spacing: Spacing,
) -> Tensor:
    try:
        pairs = [(_known(kind), operator.index(fields)) for kind, fields in parts]
        sizes = [fields * _channels(kind, group, dimension) for kind, fields in pairs]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected one of {KINDS}, or pairs such as ('scalar', 1); got {parts!r}"
        ) from error
    if x.ndim != dimension + 2 or sum(sizes) != x.shape[1] or min(sizes, default=0) < 0:
        wanted = _MAPS[dimension].replace("channels", str(sum(sizes)))
        raise ValueError(f"expected {wanted} for {pairs}; got {tuple(x.shape)}")
    each = zip(x.split(sizes, dim=1), pairs, strict=True)
    return torch.cat([transform(own, group, element, kind, spacing) for own, (kind, _) in each], 1)


def rotate(x: Tensor, degrees: float | FloatArray | Tensor) -> Tensor:
    """Turn every channel of ``[batch, channels, height, width]`` anticlockwise by any angle.

    Exact at quarter turns (which swap height and width); elsewhere by quintic splines, with zeros
    where no image was, as in :func:`transform`. Volumes ``[batch, channels, depth, height, width]``
    turn about z. In place of an angle it takes an orthogonal matrix, ``[2, 2]`` of (x, y) or, for
    volumes, ``[3, 3]`` of (x, y, z).

    Raises:
        ValueError: for what is no batch of images of floating-point numbers, and an angle that is
            not finite.

    >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90)[0, 0].tolist()
    [[2.0, 4.0], [1.0, 3.0]]
    >>> rotate(torch.rand(1, 1, 5, 5, 5), random_rotations(1)[0]).shape
    torch.Size([1, 1, 5, 5, 5])
    """
    if not isinstance(degrees, int | float | np.floating | np.integer):
        return transform(x, None, degrees)
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a torch.Tensor; got {type(x).__name__}")
    if x.ndim not in (4, 5):
        wanted = "[batch, channels, height, width], or a volume with its depth before these"
        raise ValueError(f"expected {wanted}; got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point image to interpolate; got {x.dtype}")
    if not math.isfinite(degrees):
        raise ValueError(f"expected a finite angle in degrees; got {degrees!r}")
    degrees = float(degrees % 360)
    if degrees % 90 == 0:
        return torch.rot90(x, round(degrees / 90), (-2, -1))
    angle = math.radians(degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    slices = x.flatten(1, -3)  # which a turn about z leaves in their places
    return _resample(slices, np.array([[cosine, -sine], [sine, cosine]])).view(x.shape)


def random_rotations(count: int, dimension: int = 3, seed: int = 0) -> FloatArray:
    """So many rotations, ``[count, d, d]``, uniform among all: what networks are to be tested at.

    Raises:
        ValueError: for another dimension than 2 or 3, and a count below 1.

    >>> rotations = random_rotations(4)
    >>> bool(np.allclose(np.linalg.det(rotations), 1.0))
    True
    """
    if not isinstance(dimension, int) or dimension not in (2, 3):
        raise ValueError(f"expected a dimension of 2 or 3; got {dimension!r}")
    count, seed = positive("count", count), positive("seed", seed, 1 << 63, least=0)
    normal = np.random.default_rng(seed).standard_normal((count, dimension, dimension))
    # The orthogonal factor is uniform where the triangular one has a positive diagonal.
    matrices, triangles = np.linalg.qr(normal)
    matrices = matrices * np.sign(np.diagonal(triangles, axis1=1, axis2=2))[:, None]
    matrices[:, 0] *= np.sign(np.linalg.det(matrices))[:, None]
    found: FloatArray = matrices
    return found


def equivariance_error(
    module: Callable[[Tensor], Tensor],
    x: Tensor,
    element: Element,
    group: GroupLike | None = None,
    *,
    input_kind: Kind | None = None,
    output_kind: Kind | None = None,
    margin: float = 3 / 16,
    spacing: Spacing | None = None,
) -> float:
    """How far a module is from commuting with one group element: ‖f(πx) − πf(x)‖ / ‖πf(x)‖.

    Args:
        module: a layer, a network, or any function of one tensor.
        x: its input, ``[batch, channels, height, width]``, or a volume.
        element: index of the group element; or any orthogonal matrix, where neither input nor
            output is a group feature map: such as one of :func:`random_rotations`.
        group: the group; by default ``module.group``.
        input_kind: how the input turns, see :func:`transform`; by default what the layer says of
            itself, else ``"scalar"``.
        output_kind: how the output turns; by default what the layer says of itself, else
            ``"regular"``, or ``"invariant"`` for an output that is no image.
        margin: for elements that need interpolation, the error is taken inside the central disc
            or ball that ends this fraction of the side before the border, where padding plays no
            role.
        spacing: the length of a pixel, or its lengths along (y, x) or (z, y, x); by default those
            that the layers name.

    Both passes see the same random numbers, and running statistics are left as they were.

    Raises:
        ValueError: for an element that the group does not have, a module without a group where none
            is given, and outputs whose shape turning changes.

    >>> from econv import LiftConv2d
    >>> layer = LiftConv2d(1, 2, "p8", dtype=torch.float64)
    >>> image = smooth_field(33, channels=1, smoothness=2.0)
    >>> equivariance_error(layer, image, element=2) < 1e-12  # a quarter turn
    True
    >>> 1e-12 < equivariance_error(layer, image, element=1) < 0.01  # an eighth
    True
    """
    _expect_call(module, x)
    known = group is not None or getattr(module, "group", None) is not None
    found = _group_of(module, group) if known or isinstance(element, int) else None
    into = _kind_of(module, "input", "scalar") if input_kind is None else input_kind
    lengths = _spacing_of(module) if spacing is None else spacing
    turned_input = transform(x, found, element, into, lengths)
    with _undisturbed(module, x.device) as run:
        turned_first, turned_last = run(turned_input), run(x)
    default = "regular" if turned_last.ndim == x.ndim else "invariant"
    out = _kind_of(module, "output", default) if output_kind is None else output_kind
    turned_last = transform(turned_last, found, element, out, lengths)
    if turned_first.shape != turned_last.shape:
        raise ValueError(
            f"the output for the turned input has shape {tuple(turned_first.shape)}, the turned "
            f"output {tuple(turned_last.shape)}: expected the same"
        )
    difference, size = (turned_first - turned_last).double(), turned_last.double()
    matrix, _ = _read_element(found, element)
    sides = _lengths(lengths, len(matrix))
    if out != "invariant" and not _on_grid(matrix, sides):
        ball = _ball(size.shape[2:], margin, sides).to(size.device)
        difference, size = difference * ball, size * ball
    error, norm = float(difference.norm()), float(size.norm())
    if norm == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / norm


def _expect_call(module: object, x: object) -> None:
    if not callable(module):
        raise ValueError(f"expected a module or a function; got {module!r}")
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a torch.Tensor; got {type(x).__name__}")


def assert_equivariant(
    module: Callable[[Tensor], Tensor],
    x: Tensor,
    group: GroupLike | None = None,
    *,
    elements: Iterable[Element] | None = None,
    tolerance: float | None = None,
    input_kind: Kind | None = None,
    output_kind: Kind | None = None,
    margin: float = 3 / 16,
    spacing: Spacing | None = None,
) -> None:
    """Raise ``AssertionError`` with every element's error unless the module is equivariant.

    By default the elements are the grid's own symmetries, which must hold to rounding: 1e-12 in
    float64, 1e-5 in float32, 5e-2 in half precisions. Other elements need a ``tolerance`` that says
    what the stencils are expected to give. Further arguments: see :func:`equivariance_error`.

    Raises:
        AssertionError: with a table of the errors, where one is above the tolerance.
        ValueError: for what cannot be checked: no group, no elements, or elements that are no
            symmetries of the pixel grid without a ``tolerance``.

    >>> from econv import LiftConv2d
    >>> image = torch.randn(1, 1, 16, 16, dtype=torch.float64)
    >>> assert_equivariant(LiftConv2d(1, 2, "p8", dtype=torch.float64), image)
    >>> assert_equivariant(lambda x: x.cumsum(3), image, "p4", output_kind="scalar")
    Traceback (most recent call last):
    AssertionError: ...
    """
    _expect_call(module, x)
    found = _group_of(module, group)
    lengths = _spacing_of(module) if spacing is None else spacing
    sides = _lengths(lengths, found.dimension)
    exact = tuple(e for e in found.grid_symmetries if _on_grid(found.matrices[e], sides))
    many = isinstance(elements, Iterable) and getattr(elements, "ndim", 1) != 0
    if elements is not None and not many:
        raise ValueError(f"expected elements as a sequence; got {elements!r}")
    chosen: tuple[Element, ...] = exact if elements is None else tuple(elements)
    if not chosen:
        raise ValueError("expected at least one element to check; got none")
    if tolerance is None:
        if not all(_on_grid(_read_element(found, e)[0], sides) for e in chosen):
            raise ValueError(
                "expected a tolerance for elements that are no symmetries of the pixel grid: "
                f"their error depends on the stencils; those of {found} are {exact}"
            )
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(x.dtype, 5e-2)

    def measured(into: Any, out: Any) -> list[float]:
        kinds = {"input_kind": into, "output_kind": out}
        return [
            equivariance_error(module, x, element, found, **kinds, margin=margin, spacing=lengths)
            for element in chosen
        ]

    def holds(errors: list[float]) -> bool:
        # Written so that a NaN error fails.
        return all(error <= tolerance for error in errors)

    errors = measured(input_kind, output_kind)
    if holds(errors):
        return
    named = [
        f"element {e}" if isinstance(e, int | np.integer) else f"matrix {number}"
        for number, e in enumerate(chosen)
    ]
    table = "\n".join(f"  {n}: {error:.3e}" for n, error in zip(named, errors, strict=True))
    hint = ""
    whole = x.shape[1] % found.dimension == 0
    if input_kind is None and not hasattr(module, "input_kind") and whole:
        for out in [None, "vector"] if output_kind is None else [output_kind]:
            with contextlib.suppress(ValueError):  # channels that are no vectors
                if holds(measured("vector", out)):
                    more = "" if out == output_kind else f" and output_kind={out!r}"
                    several = "pairs x, y (up)" if found.dimension == 2 else "threes x, y (up), z"
                    hint = f"\nIt is with input_kind='vector'{more}: channels in {several}"
                    break
    raise AssertionError(f"not equivariant to {found} within {tolerance:.1e}:\n{table}{hint}")


def convergence_order(
    error: Callable[[float], float] | Sequence[float], spacings: Sequence[float]
) -> float:
    """The measured order of an error in the spacing: the slope of log error over log h.

    ``error`` is a function of the spacing, or the errors measured at each of the ``spacings``.

    Raises:
        ValueError: for fewer than two spacings, and errors that are not positive and finite.

    >>> round(convergence_order(lambda h: 3 * h**2, [0.1, 0.05, 0.025]), 6)
    2.0
    """
    try:
        h = np.asarray(spacings, dtype=np.float64)
    except (TypeError, ValueError):  # no numbers
        h = np.empty(0)
    different = h.ndim == 1 and len(h) >= 2 and len(set(h.tolist())) == len(h)
    if not (different and np.isfinite(h).all() and h.min() > 0):
        raise ValueError(f"expected at least two different positive spacings; got {spacings!r}")
    errors = [error(float(s)) for s in h] if callable(error) else error
    try:
        found = np.asarray(errors, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
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
    dimension: int = 2,
) -> Tensor:
    """A smooth random image ``[batch, channels, size, size]`` with second moment 1 as a whole.

    White noise blurred by a Gaussian of ``smoothness`` pixels, periodic at the border; with
    ``dimension=3`` a volume.

    Raises:
        ValueError: for numbers out of their range, such as a dimension that is not 1, 2 or 3.

    >>> smooth_field(32, channels=3).shape
    torch.Size([1, 3, 32, 32])
    >>> smooth_field(8, dimension=3).shape
    torch.Size([1, 1, 8, 8, 8])
    """
    for name, count in (("size", size), ("channels", channels), ("batch", batch)):
        positive(name, count, 1 << 14)
    check_factory(None, dtype)
    seed = positive("seed", seed, (1 << 63) - 1, least=-(1 << 63))
    if not isinstance(dimension, int) or dimension not in (1, 2, 3):
        raise ValueError(f"expected 1, 2 or 3 as dimension; got {dimension!r}")
    smoothness = number("smoothness", smoothness)
    generator = torch.Generator().manual_seed(seed)
    sizes = (size,) * dimension
    noise = torch.randn(batch, channels, *sizes, generator=generator, dtype=torch.float64)
    frequency = torch.fft.fftfreq(size, dtype=torch.float64)
    line = torch.exp(-2 * (math.pi * smoothness * frequency) ** 2)
    axes = tuple(range(-dimension, 0))
    spectrum = torch.fft.fftn(noise, dim=axes)
    for axis in axes:
        spectrum = spectrum * line.view(-1, *[1] * (-1 - axis))
    field = torch.fft.ifftn(spectrum, dim=axes).real
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


def _spacing_of(module: object) -> Spacing:
    """The spacings that the layers of a module agree on; 1 where none names several."""
    parts = module.modules() if isinstance(module, nn.Module) else [module]
    named = [found for part in parts if isinstance(found := getattr(part, "spacing", 1.0), tuple)]
    if len({_lengths(found, len(found)) for found in named}) > 1:
        raise ValueError(f"expected pixels of one shape: the layers have {sorted(set(named))}")
    return named[0] if named else 1.0


def _lengths(spacing: Spacing, dimension: int) -> tuple[float, ...]:
    """Of a pixel along x, y, …, in its widths."""
    if not isinstance(spacing, tuple | list):
        return (1.0,) * dimension
    if len(spacing) != dimension:
        raise ValueError(f"expected one spacing, or {dimension} of them; got {spacing!r}")
    return tuple(length / spacing[-1] for length in spacing[::-1])


def _on_grid(matrix: FloatArray, lengths: tuple[float, ...]) -> bool:
    """Whether a matrix maps the pixel grid onto itself."""
    if not (matrix == np.round(matrix)).all():
        return False
    return all(lengths[i] == lengths[j] for i, j in np.argwhere(matrix))


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


def _move_pixels(x: Tensor, matrix: FloatArray, lengths: tuple[float, ...]) -> Tensor:
    """r(A⁻¹x) for every channel."""
    if not _on_grid(matrix, lengths):
        sides = np.array(lengths)
        return _resample(x, matrix * sides[:, None] / sides)  # in pixels
    # Coordinate j of what is read is ± coordinate i of where it goes; indices run against y.
    last, flipped, order = x.ndim - 1, [], list(range(x.ndim))
    for i, j in np.argwhere(matrix):
        order[last - i] = int(last - j)
        if matrix[i, j] * _DOWNWARDS[i] * _DOWNWARDS[j] < 0:
            flipped.append(int(last - j))
    return x.flip(flipped).permute(order)


_DOWNWARDS = (1, -1, 1)
"""Whether indices run along x, y and z or against them."""


def _resample(x: Tensor, matrix: FloatArray) -> Tensor:
    """r(A⁻¹x) by quintic B-splines, with zeros outside of the image."""
    coefficients, sizes = x.double(), tuple(x.shape[2:])
    for dim, size in enumerate(sizes, 2):
        line = torch.from_numpy(_spline_filter(size)).to(x.device)
        coefficients = (coefficients.transpose(dim, -1) @ line.T).transpose(dim, -1)
    # Each pixel is a weighted sum of coefficients, with one row of them for all channels at once.
    table = coefficients.flatten(2).flatten(0, 1).T.contiguous()
    found = []
    for places, weights in _each_taps(sizes, tuple(matrix.ravel().tolist())):
        given = (torch.from_numpy(places).to(x.device), torch.from_numpy(weights).to(x.device))
        found.append(
            functional.embedding_bag(given[0], table, mode="sum", per_sample_weights=given[1])
        )
    return torch.cat(found).T.reshape(x.shape).to(x.dtype)


def _each_taps(
    sizes: tuple[int, ...], matrix: tuple[float, ...]
) -> Iterator[tuple[np.ndarray, FloatArray]]:
    """The taps of an image, which are kept; or of each slice of a volume, too many to keep."""
    if len(sizes) == 2:
        yield _kept_taps(sizes, matrix)
        return
    for depth in range(sizes[0]):
        yield _taps(sizes, matrix, depth)


@lru_cache(maxsize=64)
def _kept_taps(sizes: tuple[int, ...], matrix: tuple[float, ...]) -> tuple[np.ndarray, FloatArray]:
    return _taps(sizes, matrix)


def _taps(
    sizes: tuple[int, ...], matrix: tuple[float, ...], depth: int | None = None
) -> tuple[np.ndarray, FloatArray]:
    """The 36 or 216 coefficients that each turned pixel reads, and their weights.

    ``[pixels, 6^d]``; with a ``depth`` of that slice of a volume alone.
    """
    dimension = len(sizes)
    inverse = np.array(matrix).reshape(dimension, dimension).T
    middle = [(size - 1) / 2 for size in sizes[::-1]]
    ranges = [range(size) for size in sizes]
    if depth is not None:
        ranges[0] = range(depth, depth + 1)
    indices = np.meshgrid(*ranges, indexing="ij")[::-1]  # along x, y, …
    signs = _DOWNWARDS[:dimension]
    places = [s * (n - m) for s, n, m in zip(signs, indices, middle, strict=True)]
    sources = [
        s * sum(row[i] * place for i, place in enumerate(places)) + m
        for s, row, m in zip(signs, inverse, middle, strict=True)
    ]
    edge = 1e-9  # a corner that rounding moved out of the image still belongs to it
    inside = reduce(
        np.logical_and, (np.abs(n - m) <= m + edge for n, m in zip(sources, middle, strict=True))
    )
    lines = [_spline_taps(n, size) for n, size in zip(sources[::-1], sizes, strict=True)]
    found, weights = [], []
    for taps in itertools.product(*map(tuple, lines)):
        place = np.zeros_like(taps[0][0])
        weight = np.ones_like(taps[0][1])
        for (index, own), size in zip(taps, sizes, strict=True):
            place, weight = place * size + index, weight * own
        found.append(place.ravel())
        weights.append((weight * inside).ravel())
    return np.stack(found, axis=1), np.stack(weights, axis=1)


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


def _ball(sizes: Sequence[int], margin: float, lengths: tuple[float, ...]) -> Tensor:
    """The disc or ball in the middle, where it is 1; ``lengths`` are those of a pixel."""
    sides = lengths[::-1]  # along y, x or z, y, x
    radius = min(size * side for size, side in zip(sizes, sides, strict=True)) * (0.5 - margin)
    squares = torch.zeros(())
    for size, side in zip(sizes, sides, strict=True):
        line = (torch.arange(size, dtype=torch.float64) - (size - 1) / 2) * side
        squares = squares[..., None] + line**2
    return (squares <= radius**2).double()
