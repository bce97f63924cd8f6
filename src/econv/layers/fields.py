"""What features become in the end: scalars, pseudoscalars and vectors; flows without divergence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.engines import Part
from econv.groups import GroupLike
from econv.layers.checks import check_filled, check_rank, positive, read_group, truth
from econv.layers.convolution import (
    ConvOptions,
    GroupConv,
    GroupConv2d,
    GroupConv3d,
    VectorConv,
    VectorConv2d,
    VectorConv3d,
    read_padding_mode,
    read_spacing,
)
from econv.tensors import memory_format

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Curl2d", "FieldConv", "FieldConv2d", "FieldConv3d"]


class _Sum(GroupConv):
    """Features to fields of one channel, out(x) = Σ_A s(x, A) with s = Φ̃[e], or Σ_A det(A)·s."""

    def __init__(
        self,
        in_fields: int,
        out_fields: int,
        group: GroupLike,
        output_kind: str,
        **options: Unpack[ConvOptions],
    ) -> None:
        self.output_kind = output_kind
        super().__init__(in_fields, out_fields, group, **options)

    def _output_channels(self, order: int) -> int:
        return self.out_fields

    def _output_scale(self) -> float:
        # The sum over orientations adds `order` maps of equal variance.
        return 1.0 / math.sqrt(self.group.order)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, output_kind={self.output_kind!r}"


class _Sum2d(_Sum, GroupConv2d):
    pass


class _Sum3d(_Sum, GroupConv3d):
    pass


_HEADS: dict[int, tuple[type[_Sum], type[VectorConv]]] = {
    2: (_Sum2d, VectorConv2d),
    3: (_Sum3d, VectorConv3d),
}


class FieldConv(nn.Module):
    """Maps group features to fields, in any number of dimensions."""

    dimension: int
    input_kind = "regular"

    def __init__(
        self,
        in_fields: int,
        group: GroupLike,
        *,
        scalars: int = 0,
        pseudoscalars: int = 0,
        vectors: int = 0,
        **options: Unpack[ConvOptions],
    ) -> None:
        super().__init__()
        counts = {"scalars": scalars, "pseudoscalars": pseudoscalars, "vectors": vectors}
        whole = [isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts.values()]
        if not all(whole) or not any(counts.values()):
            raise ValueError(
                "expected whole numbers of scalars, pseudoscalars and vectors, at least one of "
                f"them above 0; got {counts}"
            )
        if truth("bias", options.get("bias", False)) and not scalars:
            raise ValueError(
                "expected bias=False without scalars: no other constant is equivariant"
            )
        if positive("groups", options.get("groups", 1)) != 1:
            raise ValueError(f"expected groups=1; got {options['groups']}")
        others: ConvOptions = {**options, "bias": False}
        self.group = read_group(group, self.dimension, type(self).__name__)
        self.in_fields = in_fields
        summed, turned = _HEADS[self.dimension]
        self.scalars = summed(in_fields, scalars, group, "scalar", **options) if scalars else None
        self.pseudoscalars = (
            summed(in_fields, pseudoscalars, group, "pseudoscalar", **others)
            if pseudoscalars
            else None
        )
        self.vectors = turned(in_fields, vectors, group, **others) if vectors else None

    @property
    def heads(self) -> list[GroupConv]:
        """The convolutions, one for each kind that is put out, in the order of the channels."""
        every = (self.scalars, self.pseudoscalars, self.vectors)
        return [head for head in every if head is not None]

    @property
    def output_parts(self) -> tuple[Part, ...]:
        """The kinds of the output channels in their order, and how many fields are of each."""
        return tuple(
            Part(
                head.output_kind,
                head.out_channels // (self.dimension if head is self.vectors else 1),
            )
            for head in self.heads
        )

    @property
    def output_kind(self) -> str:
        """The kind of all channels; of several kinds ``"mixed"``: `output_parts` has them."""
        return "mixed" if len(parts := self.output_parts) > 1 else parts[0].kind

    def reset_parameters(self) -> None:
        """Draw the weights anew, and set the bias to zero."""
        for head in self.heads:
            head.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``[batch, in_fields * order, …]``."""
        found = [head(x) for head in self.heads]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class FieldConv2d(FieldConv):
    """Maps group features to scalars, pseudoscalars and vectors, s = Φ̃[e] summed over the frames.

    ``[batch, in_fields * order, height, width]`` → ``[batch, scalars + pseudoscalars + 2 * vectors,
    …]``, in this order; of each vector the x (right) and the y (**up**) component.

    - scalars, such as a pressure: out(x) = Σ_A s(x, A);
    - pseudoscalars, which change sign under reflections, such as a vorticity or a stream function:
      out(x) = Σ_A det(A)·s(x, A);
    - vectors, such as a velocity: out(x) = Σ_A A·[s₁(x, A), s₂(x, A)].

    Each kind has a convolution of its own (``layer.scalars``, ``layer.pseudoscalars``,
    ``layer.vectors``, or ``None``), with ``filters()`` and ``coefficients()``; an exported network
    runs them as one. ``bias=True`` gives the scalars one each: no other constant is equivariant.

    Args:
        in_fields: fields of the feature map.
        group: a :class:`~econv.Group` or its name.
        scalars: how many to put out, 0 by default.
        pseudoscalars: how many to put out, 0 by default.
        vectors: how many to put out, 0 by default.
        options: those of :class:`LiftConv2d`.

    Raises:
        ValueError: for no kind at all, ``groups`` other than 1, ``bias=True`` without scalars, and
            what :class:`GroupConv2d` refuses.

    >>> head = FieldConv2d(4, "p8m", scalars=1, vectors=1, bias=True)
    >>> head(torch.randn(2, 4 * 16, 12, 12)).shape  # a pressure and a velocity
    torch.Size([2, 3, 12, 12])
    >>> [tuple(part) for part in head.output_parts]
    [('scalar', 1), ('vector', 1)]
    """

    dimension = 2


class FieldConv3d(FieldConv):
    """Maps group features of volumes to scalars, pseudoscalars and vectors.

    ``[batch, in_fields * order, depth, height, width]`` → ``[batch, scalars + pseudoscalars + 3 *
    vectors, …]``, of each vector the x, the y (**up**) and the z component; what
    :class:`FieldConv2d` is to images.

    Raises:
        ValueError: for no kind at all, ``groups`` other than 1, ``bias=True`` without scalars, and
            what :class:`GroupConv3d` refuses.

    >>> head = FieldConv3d(1, "T", scalars=1, vectors=1)
    >>> head(torch.randn(2, 12, 5, 5, 5)).shape
    torch.Size([2, 4, 5, 5, 5])
    """

    dimension = 3


class Curl2d(nn.Module):
    """Stream functions to flows without divergence: (∂ψ/∂y, −∂ψ/∂x) by central differences.

    ``[batch, n, height, width]`` → ``[batch, 2 * n, height, width]``, for each ψ the x (right) and
    the y (**up**) component. Central differences along x and y commute: the divergence by central
    differences is zero to rounding, whatever ψ is, at every pixel whose neighbours are in the
    image; with ``padding_mode="circular"`` at every pixel.

    ψ is a pseudoscalar, as :class:`FieldConv2d` puts them out: under reflections it changes sign,
    as the sense of rotation does. Quarter turns and flips are exact, as far as the grid and its
    borders have them; other angles have order two.

    Args:
        spacing: the length of a pixel, or its lengths along (y, x), 1.0 by default.
        padding_mode: how ψ goes on beyond the border: ``"replicate"`` (default), ``"zeros"``,
            ``"reflect"`` or ``"circular"``, or a pair of them for (y, x).

    Raises:
        ValueError: for a spacing that is not positive or an unknown padding mode; when called, for
            what is not ``[batch, n, height, width]``, and with ``"reflect"`` for images of one
            pixel along an axis.

    >>> flow = Curl2d(padding_mode="circular")(torch.randn(1, 1, 8, 8, dtype=torch.float64))
    >>> u, v = flow[0, 0], flow[0, 1]
    >>> divergence = u.roll(-1, 1) - u.roll(1, 1) + v.roll(1, 0) - v.roll(-1, 0)  # times 2
    >>> bool(divergence.abs().max() < 1e-14)
    True
    """

    input_kind = "pseudoscalar"
    output_kind = "vector"

    def __init__(
        self,
        *,
        spacing: float | tuple[float, float] = 1.0,
        padding_mode: str | tuple[str, str] = "replicate",
    ) -> None:
        super().__init__()
        self.spacing = read_spacing(spacing)
        self.padding_mode = read_padding_mode(padding_mode)

    def forward(self, x: Tensor) -> Tensor:
        """Differentiate ``[batch, n, height, width]``."""
        check_rank(x)
        check_filled(x)
        if not torch.compiler.is_compiling() and not torch._C._is_tracing():
            each = (
                (self.padding_mode,) * 2
                if isinstance(self.padding_mode, str)
                else self.padding_mode
            )
            least = [1 + (mode == "reflect") for mode in each]
            if any(n < most for n, most in zip(x.shape[2:], least, strict=True)):
                raise ValueError(
                    f"expected images of at least {least[0]}×{least[1]} pixels with "
                    f"padding_mode={self.padding_mode!r}; got {tuple(x.shape)}"
                )
        flow = curl(x, self.spacing, self.padding_mode)
        return flow.contiguous(memory_format=memory_format(x))

    def extra_repr(self) -> str:
        """The arguments."""
        return f"spacing={self.spacing}, padding_mode={self.padding_mode!r}"


def curl(
    x: Tensor, spacing: float | tuple[float, ...], padding_mode: str | tuple[str, ...]
) -> Tensor:
    """What :class:`Curl2d` computes, as functions of torch."""
    dy, dx = spacing if isinstance(spacing, tuple) else (spacing, spacing)
    both = (padding_mode, padding_mode) if isinstance(padding_mode, str) else padding_mode
    upwards, right = ("constant" if mode == "zeros" else mode for mode in both)
    rows = functional.pad(x, (0, 0, 1, 1), mode=upwards)
    columns = functional.pad(x, (1, 1, 0, 0), mode=right)
    along_y = (rows[:, :, :-2] - rows[:, :, 2:]) / (2 * dy)  # rows run downwards
    along_x = (columns[:, :, :, 2:] - columns[:, :, :, :-2]) / (2 * dx)
    return torch.stack([along_y, -along_x], dim=2).flatten(1, 2)
