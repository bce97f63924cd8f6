"""Random changes of batches, on their device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from econv.data.keyed import AUGMENTATION, SHARES, keyed_bits, unit_circle
from econv.data.splits import Dataset, normalise, unit_range

PADDINGS = ("zeros", "reflect", "border")


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a batch, on its device, keyed by seed, epoch and sample.

    - ``rotate``: by a uniform angle, anticlockwise about the centre, by cubic convolution;
    - ``scale``: larger or smaller by up to this share, such as 0.1;
    - ``stretch``: longer by up to this share along one direction and shorter across it, which
      together with a turn makes shears too;
    - ``shift``: by up to this many pixels, whole ones, along both axes;
    - ``flip``: left and right exchanged, every other time;
    - ``erase``: a square of this many pixels a side, anywhere, set to zero;
    - ``padding``: what lies outside of the image: ``"zeros"``, its mirror image about the border
      pixels (``"reflect"``) or the nearest pixel (``"border"``).

    The flip comes first and the shift last; only erasing follows. Without ``rotate``, ``scale`` and
    ``stretch`` pixels only move, exactly. Zeros are black before :func:`normalise` and grey after
    it: :func:`prepare` keeps the right order.

    Volumes, ``[batch, channels, depth, height, width]``, are turned by rotations uniform in SO(3),
    scaled and shifted, by trilinear interpolation with zeros outside. The rest is for images.

    Raises:
        ValueError: for settings out of their range.

    >>> x = torch.rand(4, 1, 28, 28)
    >>> augment = Augmentation(rotate=True, shift=2)
    >>> whole = augment(x, seed=0, epoch=1, indices=torch.arange(4))
    >>> torch.equal(whole[2:], augment(x[2:], seed=0, epoch=1, indices=torch.arange(2, 4)))
    True
    """

    rotate: bool = False
    shift: int = 0
    flip: bool = False
    padding: str = "zeros"
    scale: float = 0.0
    stretch: float = 0.0
    erase: int = 0

    def __post_init__(self) -> None:
        for name in ("rotate", "flip"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"expected {name} as True or False; got {value!r}")
        for name in ("shift", "erase"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"expected {name} of 0, 1, 2 … pixels; got {value!r}")
        for name in ("scale", "stretch"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < 0.5:
                raise ValueError(f"expected {name} as a share from 0 to below 0.5; got {value!r}")
        if self.padding not in PADDINGS:
            raise ValueError(f"unknown padding {self.padding!r}: expected one of {PADDINGS}")

    def __bool__(self) -> bool:
        """Whether anything is changed at all."""
        return self._interpolates or self.shift > 0 or self.flip or self.erase > 0

    @property
    def _interpolates(self) -> bool:
        return self.rotate or self.scale > 0 or self.stretch > 0

    def __call__(
        self, x: Tensor, seed: int | Tensor, epoch: int | Tensor, indices: Tensor
    ) -> Tensor:
        """The batch ``x``, ``[batch, channels, height, width]``, changed.

        ``indices`` are the samples' numbers in the training split. A CUDA graph wants ``epoch`` as
        a tensor: a number is frozen into it. Many small steps: on a GPU they are worth compiling.
        """
        return self.apply(x, self.draw(seed, epoch, indices, x.ndim - 2)) if self else x

    def draw(
        self, seed: int | Tensor, epoch: int | Tensor, indices: Tensor, dimension: int = 2
    ) -> Tensor:
        """What happens to each sample, float64 ``[n, 10]``, for :func:`apply`.

        Cosine and sine of the angle, shift down and to the right, −1 for a flip; shares of scale
        and of stretch along the axes and along the diagonals; where the erased square lies, as
        shares of the image. A whole epoch may be drawn at once and indexed by sample.

        Of volumes ``[n, 8]``: a quaternion, shifts along x, y and z, and the share of scale.
        """
        if indices.ndim != 1:
            raise ValueError(f"expected indices as [batch]; got {tuple(indices.shape)}")
        if dimension == 3:
            return self._draw_in_space(seed, epoch, indices)
        lane = torch.arange(4, device=indices.device)
        bits = keyed_bits(AUGMENTATION, seed, epoch, indices[:, None] * 4 + lane)
        if self.rotate:
            cosine, sine = unit_circle(bits[:, 0])
        else:
            zero = torch.zeros_like(bits[:, 0], dtype=torch.float64)
            cosine, sine = zero + 1, zero
        pixels = ((bits[:, 1:3] * (2 * self.shift + 1)) >> 32) - self.shift
        mirror = 1 - 2 * (bits[:, 3] >> 31) * int(self.flip)
        drawn = [cosine, sine, *pixels.double().unbind(1), mirror.double()]
        lane = torch.arange(5, device=indices.device)
        bits = keyed_bits(SHARES, seed, epoch, indices[:, None] * 5 + lane)
        scale, radius, down, right = (bits[:, 1:].double() * 2.0**-32).unbind(1)
        # Uniform over the disc of stretches: no direction is preferred.
        length = self.stretch * radius.sqrt()
        cosine, sine = unit_circle(bits[:, 0])
        drawn += [self.scale * (2 * scale - 1), length * cosine, length * sine]
        drawn += [share * float(self.erase > 0) for share in (down, right)]
        return torch.stack(drawn, 1)

    def _draw_in_space(self, seed: int | Tensor, epoch: int | Tensor, indices: Tensor) -> Tensor:
        if self.flip or self.stretch or self.erase or self.padding != "zeros":
            raise ValueError(
                f"expected rotate, scale and shift for volumes, with padding 'zeros'; got {self}"
            )
        turns = quaternions(AUGMENTATION, seed, epoch, indices)
        if not self.rotate:
            turns = torch.eye(1, 4, dtype=turns.dtype, device=turns.device).expand_as(turns)
        lane = torch.arange(4, device=indices.device)
        bits = keyed_bits(SHARES, seed, epoch, indices[:, None] * 4 + lane)
        shifts = ((bits[:, :3] * (2 * self.shift + 1)) >> 32) - self.shift
        scale = self.scale * (bits[:, 3:].double() * 2.0**-31 - 1)
        return torch.cat([turns, shifts.double(), scale], 1)

    def apply(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The batch changed as :func:`draw` says."""
        if x.ndim not in (4, 5):
            raise ValueError(f"expected [batch, channels, height, width]; got {tuple(x.shape)}")
        numbers = 10 if x.ndim == 4 else 8
        if drawn.shape != (len(x), numbers):
            raise ValueError(
                f"expected one index, or [{len(x)}, {numbers}] as drawn, for each of {len(x)} "
                f"images; got {tuple(drawn.shape)}"
            )
        if x.ndim == 5:
            return turn(x, drawn[:, :4], drawn[:, 4:7], drawn[:, 7])
        if self._interpolates:
            x = deform(x, drawn, self.padding, self.scale > 0 or self.stretch > 0)
        elif self.shift or self.flip:
            x = move(x, drawn, self.padding)
        return _erase(x, drawn, self.erase) if self.erase else x


def prepare(
    x: Tensor,
    dataset: Dataset,
    augmentation: Augmentation,
    seed: int | Tensor,
    epoch: int | Tensor,
    indices: Tensor,
) -> Tensor:
    """A batch of a split, augmented and then normalised: what a network trains on.

    ``indices`` are those of the images in their split. An image, a seed and an epoch give the same
    batch wherever it is made.

    >>> from econv.data import Split
    >>> pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> data = Dataset.of("two", *[Split(pixels, torch.tensor([0, 1]))] * 3, classes=2)
    >>> prepare(pixels, data, Augmentation(), 0, 1, indices=torch.arange(2)).flatten().tolist()
    [-1.0, 1.0]
    """
    return normalise(augmentation(unit_range(x), seed, epoch, indices), dataset)


def move(x: Tensor, drawn: Tensor, padding: str) -> Tensor:
    """Flip and shift by whole pixels: one gather, of any dtype."""
    height, width = x.shape[-2:]
    whole = drawn[:, 2:5].to(torch.int64)
    down, right, mirror = whole[:, :, None].unbind(1)
    row = torch.arange(height, device=x.device) - down
    column = torch.arange(width, device=x.device) - right
    column = torch.where(mirror < 0, width - 1 - column, column)
    row, row_inside = _folded(row, height, padding)
    column, column_inside = _folded(column, width, padding)
    index = (row[:, :, None] * width + column[:, None, :]).flatten(1)
    moved = x.flatten(2).gather(2, index[:, None].expand(-1, x.shape[1], -1)).view(x.shape)
    if padding != "zeros":
        return moved
    inside = row_inside[:, :, None] & column_inside[:, None, :]
    return torch.where(inside[:, None], moved, torch.zeros((), dtype=x.dtype, device=x.device))


def deform(x: Tensor, drawn: Tensor, padding: str, stretched: bool = False) -> Tensor:
    """Flip, stretch, turn and shift by cubic convolution (Catmull and Rom's), in x's precision.

    Only products and sums of two numbers, in a fixed order: a pixel is the same in any batch.
    """
    if not x.is_floating_point():
        raise ValueError(f"expected floats, which can be interpolated; got {x.dtype}")
    height, width = x.shape[-2:]
    precision = torch.promote_types(x.dtype, torch.float32)
    parts = drawn.to(precision)[:, :, None, None].unbind(1)
    cosine, sine, down, right, mirror = parts[:5]
    # Where each pixel comes from, about the centre: x to the right and y up.
    across = torch.arange(width, dtype=precision, device=x.device) - (width - 1) / 2 - right
    up = (height - 1) / 2 - torch.arange(height, dtype=precision, device=x.device)
    up = up[:, None] + down
    across, up = cosine * across + sine * up, cosine * up - sine * across
    if stretched:
        scale, straight, skew = parts[5:8]
        across, up = (
            (1 + scale + straight) * across + skew * up,
            skew * across + (1 + scale - straight) * up,
        )
    source_column = across * mirror + (width - 1) / 2
    source_row = (height - 1) / 2 - up
    row, row_weight = _cubic(source_row.flatten(1), height, padding)
    column, column_weight = _cubic(source_column.flatten(1), width, padding)
    index = (row[:, :, None] * width + column[:, None]).flatten(1)  # [batch, 4·4·pixels]
    weight = row_weight[:, :, None] * column_weight[:, None]
    taps = x.flatten(2).to(precision).gather(2, index[:, None].expand(-1, x.shape[1], -1))
    taps = taps.view(*x.shape[:2], 16, -1) * weight.flatten(1, 2)[:, None]
    for half in (8, 4, 2, 1):
        taps = taps[:, :, :half] + taps[:, :, half:]
    return taps.view(x.shape).to(x.dtype)


def quaternions(*words: int | Tensor) -> Tensor:
    """Unit quaternions of rotations uniform in SO(3), float64 ``[n, 4]``, keyed by the words.

    The last word is a tensor ``[n]``.
    """
    *first, index = words
    assert isinstance(index, Tensor)
    lane = torch.arange(3, device=index.device)
    bits = keyed_bits(*first, index[:, None] * 3 + lane)
    share = bits[:, 0].double() * 2.0**-32
    parts = []
    for radius, angle in ((1 - share, bits[:, 1]), (share, bits[:, 2])):
        parts += [radius.sqrt() * part for part in unit_circle(angle)]
    return torch.stack(parts, 1)


def turn(
    x: Tensor, turns: Tensor, shifts: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Volumes turned about their centres by quaternions, then shifted, by trilinear interpolation.

    >>> half = torch.tensor([[0.0, 0.0, 0.0, 1.0]])  # about z: x and y change their signs
    >>> turn(torch.arange(8.0).view(1, 1, 2, 2, 2), half).flatten().tolist()
    [3.0, 2.0, 1.0, 0.0, 7.0, 6.0, 5.0, 4.0]
    """
    if not x.is_floating_point():
        raise ValueError(f"expected floats, which can be interpolated; got {x.dtype}")
    r, i, j, k = turns.unbind(1)
    # The inverse rotation: where each voxel comes from, along x, y and z.
    rows = (
        (1 - 2 * (j * j + k * k), 2 * (i * j + k * r), 2 * (i * k - j * r)),
        (2 * (i * j - k * r), 1 - 2 * (i * i + k * k), 2 * (j * k + i * r)),
        (2 * (i * k + j * r), 2 * (j * k - i * r), 1 - 2 * (i * i + j * j)),
    )
    back = torch.stack([torch.stack(row, 1) for row in rows], 1)
    # y points up and rows run down; torch measures positions in halves of the sides.
    halves = [n / 2 for n in x.shape[:1:-1]]
    halves[1] = -halves[1]
    sides = torch.stack([torch.full_like(r, half) for half in halves], 1)
    back = back * (sides[:, None] / sides[:, :, None])
    if scale is not None:
        back = back * (1 + scale)[:, None, None]
    moved = torch.zeros_like(sides) if shifts is None else -shifts / sides
    theta = torch.cat([back, back @ moved[:, :, None]], 2).to(x.dtype)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def _erase(x: Tensor, drawn: Tensor, side: int) -> Tensor:
    """Set a square to zero whose centre lies anywhere in the image: at borders less is lost."""
    inside = []
    for size, centre in zip(x.shape[-2:], drawn[:, 8:].unbind(1), strict=True):
        first = (centre * size).floor().to(torch.int64) - side // 2
        place = torch.arange(size, device=x.device) - first[:, None]
        inside.append((place >= 0) & (place < side))
    rows, columns = inside
    hidden = rows[:, :, None] & columns[:, None, :]
    return torch.where(hidden[:, None], torch.zeros((), dtype=x.dtype, device=x.device), x)


def _cubic(position: Tensor, size: int, padding: str) -> tuple[Tensor, Tensor]:
    """The four pixels along one axis that each position reads, and their weights, ``[b, 4, n]``."""
    base = position.floor()
    t = position - base
    s = 1 - t
    weights = torch.stack(
        [
            -0.5 * t * s * s,
            1 - t * t * (2.5 - 1.5 * t),
            1 - s * s * (2.5 - 1.5 * s),
            -0.5 * s * t * t,
        ],
        1,
    )
    offset = torch.arange(-1, 3, device=position.device)[:, None]
    index, inside = _folded(base.to(torch.int64)[:, None] + offset, size, padding)
    return index, weights * inside if padding == "zeros" else weights


def _folded(index: Tensor, size: int, padding: str) -> tuple[Tensor, Tensor]:
    """Indices brought inside of 0 … size − 1, and which of them were inside."""
    inside = (index >= 0) & (index < size)
    if padding == "reflect" and size > 1:
        index = index.abs() % (2 * (size - 1))
        index = torch.minimum(index, 2 * (size - 1) - index)
    return index.clamp(0, size - 1), inside
