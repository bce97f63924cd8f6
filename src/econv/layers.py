"""PDO-eConvs and the layers around them: ordinary `nn.Module`s on ordinary tensors.

A group feature map is a plain tensor ``[batch, fields * order, height, width]`` whose channel is
``field * order + element``. Fields are sliced and concatenated like any channels:

>>> features = torch.randn(2, 6 * 8, 16, 16)  # six fields of p8
>>> first_two = features[:, : 2 * 8]
>>> both = torch.cat([first_two, features], dim=1)  # eight fields
>>> by_orientation = features.unflatten(1, (-1, 8))  # [2, 6, 8, 16, 16]

This room knows parameters, shapes and what to say about bad input. What the numbers mean is the
business of `basis`, how a convolution is run that of `engines`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from econv.basis import Gains, filter_basis
from econv.engines import dense, resolve
from econv.groups import Group, GroupLike
from econv.operators import OperatorsLike
from econv.stencils import StencilsLike

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Downsample2d",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupDropout2d",
    "GroupInstanceNorm2d",
    "GroupLayerNorm2d",
    "GroupPool2d",
    "GroupUpsampleConv2d",
    "LiftConv2d",
    "Restrict2d",
    "Upsample2d",
    "VectorConv2d",
    "restrict",
]

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class ConvOptions(TypedDict, total=False):
    """The keywords that every PDO-eConv takes; :class:`LiftConv2d` says what they mean."""

    operators: OperatorsLike
    stencils: StencilsLike
    size: int | None
    accuracy: int
    stride: int
    padding: int | str
    padding_mode: str
    bias: bool
    groups: int
    dilation: int
    spacing: float
    init: str
    engine: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class _WithConstants(nn.Module):
    """A module that reads fixed arrays, as non-persistent buffers made from `_constants`."""

    def _constants(self) -> dict[str, np.ndarray]:
        """The arrays, by the name of their buffer; floating-point ones in float64."""
        raise NotImplementedError

    def _constants_like(self, name: str) -> Tensor:
        """A tensor with the device and, for floating-point arrays, the dtype that is wanted."""
        return getattr(self, name, torch.empty(0))

    def _refresh_constants(self) -> None:
        # Made anew whenever dtype or device change: a buffer that merely follows `.half()` or
        # `.double()` keeps the rounding of the dtype it came from, one that follows `to_empty()`
        # holds nothing.
        for name, array in self._constants().items():
            like = self._constants_like(name)
            dtype = like.dtype if array.dtype == np.float64 else None
            constant = torch.tensor(array, device=like.device, dtype=dtype)
            self.register_buffer(name, constant, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _WithConstants:
        super()._apply(fn, recurse)
        self._refresh_constants()
        return self


class PDOConv2d(_WithConstants):
    """What the three kinds of PDO-eConv share: one learned weight, expanded in every forward pass.

    Nothing derived is kept: the state is ``weight`` (and ``bias``), in train and eval alike, and a
    weight changed by any route is seen by the next call.
    """

    input_kind: str
    output_kind: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    synthesis: Tensor

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        group: GroupLike,
        *,
        in_channels: int,
        out_channels: int,
        operators: OperatorsLike = "paper",
        stencils: StencilsLike = "isotropic",
        size: int | None = None,
        accuracy: int = 2,
        stride: int = 1,
        padding: int | str = "same",
        padding_mode: str = "zeros",
        bias: bool = False,
        groups: int = 1,
        dilation: int = 1,
        spacing: float = 1.0,
        init: str = "relu",
        engine: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = Group(group)
        self.basis = filter_basis(self.group, operators, stencils, size, accuracy)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = _positive("stride", stride)
        self.dilation = _positive("dilation", dilation)
        self.groups = groups
        if not isinstance(spacing, float | int) or not 0 < spacing < math.inf:
            raise ValueError(f"expected a positive spacing; got {spacing!r}")
        self.spacing = float(spacing)
        self.extent = self.dilation * (self.basis.size - 1) + 1
        self.padding = self._read_padding(padding)
        if padding_mode not in _PADDING_MODES:
            raise ValueError(f"expected padding_mode in {_PADDING_MODES}; got {padding_mode!r}")
        self.padding_mode = padding_mode
        self.engine = engine
        resolve(engine)
        self.basis.scale(init)  # an unknown name fails here, not at the first reset
        self.init = init
        self._order = self.group.order
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"expected a floating-point dtype; got {dtype}")
        self.weight = nn.Parameter(
            torch.empty(*weight_shape, len(self.basis.operators), device=device, dtype=dtype)
        )
        if bias:
            shape = (weight_shape[0],)
            self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._refresh_constants()
        self.reset_parameters()

    def _read_padding(self, padding: int | str) -> int:
        if isinstance(padding, str) and padding in ("same", "valid"):
            return self.extent // 2 if padding == "same" else 0
        if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
            raise ValueError(
                "expected padding as 'same', 'valid' or one whole number for every side "
                f"(unequal sides break the symmetry); got {padding!r}"
            )
        return padding

    def _constants(self) -> dict[str, np.ndarray]:
        # Operators first, so that one matrix product with the weight gives every filter.
        return {"synthesis": self.basis.synthesis.swapaxes(0, 1)}

    def _constants_like(self, name: str) -> Tensor:
        return self.weight

    def _constants_fit(self) -> bool:
        here, constants = self.weight, self.synthesis
        return constants.dtype == here.dtype and constants.device == here.device

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        # With `assign=True` the loaded tensor becomes the weight, whatever its dtype and device.
        super()._load_from_state_dict(*arguments, **options)
        if not self._constants_fit():
            self._refresh_constants()

    def _fan_in(self) -> int:
        """How many maps one output reads."""
        return math.prod(self.weight.shape[1:-1])

    def reset_parameters(self) -> None:
        """Draw the weight anew, as ``init`` says, and set the bias to zero."""
        deviation = self.basis.standard_deviation(self._fan_in(), self.init)
        nn.init.normal_(self.weight, std=deviation * self._output_scale())
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _output_scale(self) -> float:
        return 1.0

    def gains(self) -> Gains:
        """What the layer at initialisation does to constants, to white noise and under ReLU."""
        return self.basis.gains(self.init)

    def coefficients(self) -> Tensor:
        """The paper's β, differentiable: ``weight`` in the basis of the operators."""
        return self.weight @ self._spacing_matrix(self.basis.to_coefficients)

    @torch.no_grad()
    def set_coefficients(self, coefficients: Tensor) -> None:
        """Set β: the operators' coefficients on a grid of this layer's spacing."""
        given = torch.as_tensor(coefficients)
        if given.shape != self.weight.shape:
            raise ValueError(
                f"expected coefficients of shape {tuple(self.weight.shape)}; "
                f"got {tuple(given.shape)}"
            )
        matrix = self.basis.from_coefficients(self.spacing * self.dilation)
        exact = given.to(device="cpu", dtype=torch.float64) @ torch.from_numpy(matrix)
        self.weight.copy_(exact)

    def _spacing_matrix(self, matrix: Callable[[float], np.ndarray]) -> Tensor:
        array = torch.from_numpy(matrix(self.spacing * self.dilation))
        return array.to(device=self.weight.device, dtype=self.weight.dtype)

    def filters(self) -> Tensor:
        """The dense filter bank that `conv2d` takes, channels by channels by size by size."""
        if not self._constants_fit():  # a weight was put in place by hand
            self._refresh_constants()
        # Filters carry the layer's accuracy: autocast must not round them before the convolution.
        with _without_autocast(self.weight.device):
            return self._filters()

    def _filters(self) -> Tensor:
        raise NotImplementedError

    def _channel_bias(self) -> Tensor | None:
        if self.bias is None:
            return None
        return self.bias[:, None].expand(-1, self._order).flatten()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``[batch, in_channels, height, width]``."""
        self._check_input(x)
        return dense.convolve(
            x,
            self.filters(),
            self._channel_bias(),
            self.stride,
            self.padding,
            self.padding_mode,
            self.dilation,
            self.groups,
        )

    def _check_input(self, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        _check_maps(x, self.in_channels, self._expected_channels(), self.weight)
        height, width = x.shape[2:]
        if min(height, width) < self.extent:
            raise ValueError(
                f"expected an image of at least {self.extent}×{self.extent} pixels, the extent of "
                f"the stencils; got {height}×{width}"
            )
        # Wider than this, reflection and wrapping would read beyond the other side.
        most = {"zeros": math.inf, "replicate": math.inf, "circular": 0, "reflect": -1}
        if self.padding > min(height, width) + most[self.padding_mode]:
            raise ValueError(
                f"expected an image larger than the padding of {self.padding} for "
                f"padding_mode={self.padding_mode!r}; got {height}×{width}"
            )

    def _expected_channels(self) -> str:
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, in the order of the signature."""
        basis = self.basis
        text = f", {self.group.name}, operators={basis.operators.name!r}"
        text += f", stencils={basis.stencils.name!r}, size={basis.size}"
        options: dict[str, tuple[Any, Any]] = {
            "accuracy": (basis.stencils.accuracy, 2),
            "stride": (self.stride, 1),
            "padding": (self.padding, self.extent // 2),
            "padding_mode": (self.padding_mode, "zeros"),
            "bias": (self.bias is not None, False),
            "groups": (self.groups, 1),
            "dilation": (self.dilation, 1),
            "spacing": (self.spacing, 1.0),
            "init": (self.init, "relu"),
            "engine": (self.engine, "auto"),
        }
        for name, (value, default) in options.items():
            if value != default:
                text += f", {name}={value!r}"
        return text


class LiftConv2d(PDOConv2d):
    """Ψ̃: lifts an image to a group feature map, Ψ[r](x, A) = χ^(A)[r](x).

    ``[batch, in_channels, height, width]`` → ``[batch, out_fields * order, …]``.

    Args:
        in_channels: channels of the image.
        out_fields: fields of the feature map; each has one channel per group element.
        group: a :class:`~econv.Group` or its name.
        vectors: how many vector fields the image ends with. Each takes two of the ``in_channels``,
            its x (right) and y (**up**) component, and is read in frame A as A⁻¹v.
        operators: ``"paper"``, ``"order<=N"`` or a list of exponent tuples.
        stencils: ``"isotropic"``, ``"central"`` (the paper's), ``"gaussian"``, or a
            :class:`~econv.stencils.StencilSet` such as ``Gaussian(width=0.8)``.
        size: odd support of the filters; the smallest that the turned operators need by default.
        accuracy: order of the error of central stencils.
        stride: as in `Conv2d`. Exactly symmetric under quarter turns only on sizes n with
            (n + 2·padding − extent) divisible by the stride: with ``padding="same"`` and stride 2,
            on odd sizes. On other sizes, or to have it exact on all, use :class:`Downsample2d`.
        padding: ``"same"`` (half the support on every side, also with a stride), ``"valid"`` or
            one whole number.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        bias: whether to learn one bias per field.
        groups: blocks of channels and fields that are convolved apart, as in `Conv2d`.
        dilation: pixels from one stencil point to the next.
        spacing: h, the length of a pixel: a derivative of order m divides by (spacing·dilation)^m.
        init: ``"relu"`` keeps the second moment through ReLU layers, ``"paper"`` is section 4.4.
        engine: ``"auto"`` or ``"dense"``.
        device, dtype: as in `Conv2d`.

    >>> lift = LiftConv2d(3, 4, "p8")
    >>> lift(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 32, 16, 16])
    >>> wind = LiftConv2d(2, 4, "p8", vectors=1)
    """

    output_kind = "regular"
    frames: Tensor

    def __init__(
        self,
        in_channels: int,
        out_fields: int,
        group: GroupLike,
        *,
        vectors: int = 0,
        **options: Unpack[ConvOptions],
    ) -> None:
        groups = options.get("groups", 1)
        _positive("in_channels", in_channels)
        _positive("out_fields", out_fields)
        _check_groups(groups, in_channels=in_channels, out_fields=out_fields)
        if not isinstance(vectors, int) or vectors is True or not 0 <= 2 * vectors <= in_channels:
            raise ValueError(
                f"expected vectors between 0 and in_channels / 2 = {in_channels // 2}; "
                f"got {vectors!r}"
            )
        if vectors and groups != 1:
            raise ValueError(f"expected groups=1 with vector channels; got groups={groups}")
        self.out_fields = out_fields
        self.vectors = vectors
        super().__init__(
            (out_fields, in_channels // groups),
            group,
            in_channels=in_channels,
            out_channels=out_fields * Group(group).order,
            **options,
        )

    @property
    def input_kind(self) -> str:  # type: ignore[override]  # it depends on the channels
        """``"scalar"`` or ``"vector"``; images that mix both have no single kind."""
        if 0 < 2 * self.vectors < self.in_channels:
            return "mixed"
        return "vector" if self.vectors else "scalar"

    def _constants(self) -> dict[str, np.ndarray]:
        constants = super()._constants()
        if self.vectors:
            constants["frames"] = self.group.matrices[self.group.inverse]
        return constants

    def _filters(self) -> Tensor:
        if not self.vectors:
            return dense.lift_filters(self.weight, self.synthesis, None)
        scalars = self.in_channels - 2 * self.vectors
        parts = [dense.lift_filters(self.weight[:, scalars:], self.synthesis, self.frames)]
        if scalars:
            parts.insert(0, dense.lift_filters(self.weight[:, :scalars], self.synthesis, None))
        return torch.cat(parts, dim=1)

    def _expected_channels(self) -> str:
        return f"{self.in_channels} image channels"

    def extra_repr(self) -> str:
        vectors = f", vectors={self.vectors}" if self.vectors else ""
        return f"{self.in_channels}, {self.out_fields}{super().extra_repr()}{vectors}"


class GroupConv2d(PDOConv2d):
    """Φ̃: maps group features to group features, Φ[e](x, A) = Σ_k χ_k^(A)[e](x, Ak).

    ``[batch, in_fields * order, height, width]`` → ``[batch, out_fields * order, …]``.

    With ``operators="order<=0"`` it is the 1×1 group convolution, exactly equivariant for every
    element. The other arguments are those of :class:`LiftConv2d`.

    >>> conv = GroupConv2d(4, 6, "p8")
    >>> conv(torch.randn(2, 4 * 8, 16, 16)).shape
    torch.Size([2, 48, 16, 16])
    >>> conv.coefficients().shape, conv.filters().shape
    (torch.Size([6, 4, 8, 9]), torch.Size([48, 32, 5, 5]))
    >>> GroupConv2d(4, 6, "p8", operators="order<=0").filters().shape
    torch.Size([48, 32, 1, 1])
    """

    input_kind = "regular"
    output_kind = "regular"
    places: Tensor

    def __init__(
        self,
        in_fields: int,
        out_fields: int,
        group: GroupLike,
        **options: Unpack[ConvOptions],
    ) -> None:
        groups = options.get("groups", 1)
        _positive("in_fields", in_fields)
        _positive("out_fields", out_fields)
        _check_groups(groups, in_fields=in_fields, out_fields=out_fields)
        order = Group(group).order
        self.in_fields = in_fields
        self.out_fields = out_fields
        super().__init__(
            (out_fields, in_fields // groups, order),
            group,
            in_channels=in_fields * order,
            out_channels=self._output_channels(order),
            **options,
        )

    def _output_channels(self, order: int) -> int:
        return self.out_fields * order

    def _constants(self) -> dict[str, np.ndarray]:
        places = dense.filter_places(self.group.relative, self.weight.shape[1])
        return {**super()._constants(), "places": places}

    def _filters(self) -> Tensor:
        return dense.group_filters(self.weight, self.synthesis, self.places)

    def _expected_channels(self) -> str:
        return f"{self.in_channels} channels ({self.in_fields} fields of {self.group.name})"

    def extra_repr(self) -> str:
        return f"{self.in_fields}, {self.out_fields}{super().extra_repr()}"


class VectorConv2d(GroupConv2d):
    """Maps group features to vector fields, out(x) = Σ_A A·[s₁(x, A), s₂(x, A)] with s = Φ̃[e].

    ``[batch, in_fields * order, height, width]`` → ``[batch, 2 * out_vectors, …]``, for each vector
    its x (right) and y (**up**) component. The output turns as a vector field does:
    (π_Ã v)(x) = Ã v(Ã⁻¹x). There is no bias: no constant vector is equivariant.

    ``coefficients()`` are those of s, ``[2 * out_vectors, in_fields, order, operators]``.

    >>> flow = VectorConv2d(4, 1, "p8", operators="order<=1")
    >>> flow(torch.randn(2, 4 * 8, 16, 16)).shape
    torch.Size([2, 2, 16, 16])
    """

    output_kind = "vector"
    matrices: Tensor

    def __init__(
        self, in_fields: int, out_vectors: int, group: GroupLike, **options: Unpack[ConvOptions]
    ) -> None:
        _positive("in_fields", in_fields)
        _positive("out_vectors", out_vectors)
        if options.get("bias"):
            raise ValueError("expected bias=False: a constant vector is not equivariant")
        _check_groups(options.get("groups", 1), in_fields=in_fields, out_vectors=out_vectors)
        self.out_vectors = out_vectors
        super().__init__(in_fields, 2 * out_vectors, group, **options)

    def _output_channels(self, order: int) -> int:
        return 2 * self.out_vectors

    def _output_scale(self) -> float:
        # The sum over orientations adds `order` maps of equal variance.
        return 1.0 / math.sqrt(self.group.order)

    def _constants(self) -> dict[str, np.ndarray]:
        return {**super()._constants(), "matrices": self.group.matrices}

    def _filters(self) -> Tensor:
        return dense.vector_filters(self.weight, self.synthesis, self.places, self.matrices)

    def extra_repr(self) -> str:
        return f"{self.in_fields}, {self.out_vectors}{PDOConv2d.extra_repr(self)}"


class GroupUpsampleConv2d(nn.Module):
    """An upsampling convolution: :class:`Upsample2d`, then :class:`GroupConv2d`.

    The equivariant counterpart of a transposed convolution with stride 2; options are those of
    `GroupConv2d`.

    >>> up = GroupUpsampleConv2d(4, 2, "p4")
    >>> up(torch.randn(1, 16, 8, 8)).shape, up(torch.randn(1, 16, 8, 8), size=15).shape
    (torch.Size([1, 8, 16, 16]), torch.Size([1, 8, 15, 15]))
    """

    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self, in_fields: int, out_fields: int, group: GroupLike, **options: Unpack[ConvOptions]
    ) -> None:
        super().__init__()
        self.upsample = Upsample2d()
        self.conv = GroupConv2d(in_fields, out_fields, group, **options)

    @property
    def group(self) -> Group:
        """The group of the convolution."""
        return self.conv.group

    def forward(self, x: Tensor, size: int | tuple[int, int] | None = None) -> Tensor:
        """Upsample to ``size`` (twice the size by default) and convolve."""
        result: Tensor = self.conv(self.upsample(x, size))
        return result


class GroupBatchNorm2d(_BatchNorm):
    """Batch norm with one mean, variance, scale and bias per *field*, which equivariance needs.

    The statistics run over batch, orientations and pixels. Arguments and state are those of
    `BatchNorm2d` with ``fields`` in place of channels.

    >>> norm = GroupBatchNorm2d(4, "p8")
    >>> norm(torch.randn(2, 32, 8, 8)).shape, norm.weight.shape
    (torch.Size([2, 32, 8, 8]), torch.Size([4]))
    """

    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            _positive("fields", fields), eps, momentum, affine, track_running_stats, device, dtype
        )
        self.fields = fields
        self.group = Group(group)
        self._order = self.group.order

    def _check_input_dim(self, input: Tensor) -> None:
        """The folded tensor is ours; what the user gave is checked in `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, height, width]``."""
        _check_fields(x, self.fields, self.group, self.weight)
        batch, channels, height, width = x.shape
        if dense.memory_format(x) is torch.channels_last:
            last = x.permute(0, 2, 3, 1)
            folded = last.reshape(batch * height * width, self.fields, self._order)
            normed = super().forward(folded)
            return normed.view(batch, height, width, channels).permute(0, 3, 1, 2)
        folded = x.reshape(batch, self.fields, self._order * height * width)
        return super().forward(folded).view(batch, channels, height, width)

    def extra_repr(self) -> str:
        return f"{self.group.name}, {super().extra_repr()}"


class GroupInstanceNorm2d(_InstanceNorm):
    """Instance norm with one mean and variance per sample and *field*, over all its orientations.

    Arguments and state are those of `InstanceNorm2d` with ``fields`` in place of channels.

    >>> GroupInstanceNorm2d(4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            _positive("fields", fields), eps, momentum, affine, track_running_stats, device, dtype
        )
        self.fields = fields
        self.group = Group(group)

    def _check_input_dim(self, input: Tensor) -> None:
        """The folded tensor is ours; what the user gave is checked in `forward`."""

    def _get_no_batch_dim(self) -> int:
        return 2

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, height, width]``."""
        _check_fields(x, self.fields, self.group, self.weight)
        normed = super().forward(x.reshape(x.shape[0], self.fields, -1)).view(x.shape)
        return normed.contiguous(memory_format=dense.memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.group.name}, {super().extra_repr()}"


class GroupLayerNorm2d(nn.Module):
    """Layer norm over all fields and orientations of a pixel; one scale and one bias per *field*.

    What ConvNeXt calls LayerNorm2d, made equivariant.

    >>> GroupLayerNorm2d(4, "p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 32, 8, 8])
    """

    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        fields: int,
        group: GroupLike,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fields = _positive("fields", fields)
        self.group = Group(group)
        self.eps = eps
        self._order = self.group.order
        if affine:
            self.weight = nn.Parameter(torch.empty(fields, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(fields, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every scale to one and every bias to zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[batch, fields * order, height, width]``."""
        _check_fields(x, self.fields, self.group, self.weight)
        last = x.permute(0, 2, 3, 1)
        weight = bias = None
        if self.weight is not None:
            weight = self.weight[:, None].expand(-1, self._order).flatten()
            bias = self.bias[:, None].expand(-1, self._order).flatten()
        normed = functional.layer_norm(last, (self.fields * self._order,), weight, bias, self.eps)
        return normed.permute(0, 3, 1, 2).contiguous(memory_format=dense.memory_format(x))

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.group.name}, {self.fields}, eps={self.eps}, affine={affine}"


class GroupPool2d(nn.Module):
    """Pools over orientations: ``[batch, fields * order, …]`` → ``[batch, fields, …]``.

    What comes out is a stack of ordinary images that turn with the input.

    >>> GroupPool2d("p8")(torch.randn(2, 32, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    """

    input_kind = "regular"
    output_kind = "scalar"

    def __init__(self, group: GroupLike, reduce: str = "max") -> None:
        super().__init__()
        self.group = Group(group)
        self._order = self.group.order
        if reduce not in ("max", "mean"):
            raise ValueError(f"expected reduce 'max' or 'mean'; got {reduce!r}")
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        """Pool ``[batch, fields * order, height, width]``, or ``[batch, fields * order]``."""
        _check_multiple(x, self.group, ranks=(2, 4))
        by_orientation = x.unflatten(1, (-1, self._order))
        # `amax` shares the gradient among equal maxima, so that it is equivariant too.
        pooled = by_orientation.amax(2) if self.reduce == "max" else by_orientation.mean(2)
        return pooled if x.ndim == 2 else pooled.contiguous(memory_format=dense.memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.group.name}, reduce={self.reduce!r}"


class GroupDropout2d(nn.Module):
    """Drops whole fields: all orientations and pixels of a field together.

    >>> GroupDropout2d("p8", p=0.2).eval()(torch.ones(1, 16, 4, 4)).sum().item()
    256.0
    """

    input_kind = "regular"
    output_kind = "regular"

    def __init__(self, group: GroupLike, p: float = 0.5) -> None:
        super().__init__()
        self.group = Group(group)
        self._order = self.group.order
        if not isinstance(p, float | int) or not 0.0 <= p <= 1.0:
            raise ValueError(f"expected a probability p between 0 and 1; got {p!r}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop fields of ``[batch, fields * order, height, width]`` in train mode."""
        _check_multiple(x, self.group)
        dropped = functional.dropout3d(x.unflatten(1, (-1, self._order)), self.p, self.training)
        return dropped.flatten(1, 2)

    def extra_repr(self) -> str:
        return f"{self.group.name}, p={self.p}"


class Downsample2d(_WithConstants):
    """Halves an image, n → ⌈n/2⌉, and commutes with quarter turns and flips on every size.

    `stride=2` and `max_pool2d` keep pixels 0, 2, 4 …, which mirror onto themselves on one parity of
    the size only (a stride-2 convolution with ``padding="same"`` on odd sizes, `max_pool2d(2)` on
    even ones; in general where (n + 2·padding − extent) is a multiple of the stride). Here the
    samples lie symmetrically on all: on odd sizes on pixels, smoothed by [1 2 1]/4, on even
    sizes between them, smoothed by [1 3 3 1]/8. The parity enters by arithmetic, not by a branch,
    so that exported graphs keep dynamic sizes.

    ``reduce="max"`` takes the maximum of each 3×3 neighbourhood first and replaces `max_pool2d`.
    Channels are treated alike: images, fields and vector components may all pass.

    >>> half = Downsample2d()
    >>> half(torch.randn(1, 3, 8, 8)).shape[-1], half(torch.randn(1, 3, 9, 9)).shape[-1]
    (4, 5)
    """

    taps: Tensor

    def __init__(self, reduce: str = "mean") -> None:
        super().__init__()
        if reduce not in ("mean", "max"):
            raise ValueError(f"expected reduce 'mean' or 'max'; got {reduce!r}")
        self.reduce = reduce
        self._refresh_constants()

    def _constants(self) -> dict[str, np.ndarray]:
        # Four taps with stride 2 on an axis padded by one pixel before and two after: centred on
        # pixels 0, 2, 4 …, and on the pixels next to these.
        return {"taps": np.array([[1.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 1.0]]) / 4}

    def _kernel(self, x: Tensor, dim: int) -> Tensor:
        between = (
            1 - x.shape[dim] % 2
        ) / 2  # ½ on even sizes, where samples lie between two pixels
        on_pixels, next_pixels = self.taps.to(x.dtype).unbind()
        return on_pixels * (1 - between) + next_pixels * between

    def forward(self, x: Tensor) -> Tensor:
        """Halve ``[batch, channels, height, width]``."""
        _check_rank(x)
        if self.reduce == "max":
            x = functional.max_pool2d(x, 3, stride=1, padding=1)
        kernel = self._kernel(x, 2)[:, None] * self._kernel(x, 3)
        padded = functional.pad(x, (1, 2, 1, 2), mode="replicate")
        channels = x.shape[1]
        kernels = kernel.expand(channels, 1, 4, 4)
        halved = functional.conv2d(padded, kernels, stride=2, groups=channels)
        return halved.contiguous(memory_format=dense.memory_format(x))

    def extra_repr(self) -> str:
        return f"reduce={self.reduce!r}"


class Upsample2d(nn.Module):
    """Doubles an image by linear interpolation, and commutes with quarter turns and flips.

    n → 2n, or to ``size``, 2n or 2n − 1 for each side: the sizes that :class:`Downsample2d` halves
    to n. Like there, the parity of the size enters by arithmetic.

    >>> Upsample2d()(torch.randn(1, 3, 8, 8)).shape[-1]
    16
    >>> Upsample2d()(torch.randn(1, 3, 8, 8), size=15).shape[-1]
    15
    """

    def forward(self, x: Tensor, size: int | tuple[int, int] | None = None) -> Tensor:
        """Double ``[batch, channels, height, width]``."""
        _check_rank(x)
        if size is None:
            return functional.interpolate(x, scale_factor=2.0, mode="bilinear")
        wanted = size if isinstance(size, tuple | list) else (size, size)
        fitting = [(2 * n - 1, 2 * n) for n in x.shape[2:]]
        if not torch.compiler.is_compiling() and not (
            len(wanted) == 2
            and all(isinstance(n, int | torch.SymInt) for n in wanted)
            and all(low <= n <= high for n, (low, high) in zip(wanted, fitting, strict=True))
        ):
            raise ValueError(
                f"expected a size of twice {tuple(x.shape[2:])}, or one less; got {size!r}"
            )
        enlarged = _double(_double(x, 2, wanted[0]), 3, wanted[1])
        return enlarged.contiguous(memory_format=dense.memory_format(x))


class Restrict2d(_WithConstants):
    """:func:`restrict` as a module; input and output are regular for the subgroup's elements."""

    places: Tensor

    def __init__(self, group: GroupLike, subgroup: GroupLike) -> None:
        super().__init__()
        self.group = Group(group)
        self.subgroup = Group(subgroup)
        self._refresh_constants()

    def _constants(self) -> dict[str, np.ndarray]:
        return {"places": self.group.cosets(self.subgroup).ravel()}

    def forward(self, x: Tensor) -> Tensor:
        """Read ``[batch, fields * group.order, height, width]`` as features of the subgroup."""
        _check_multiple(x, self.group)
        by_orientation = x.unflatten(1, (-1, self.group.order))
        chosen = by_orientation.index_select(2, self.places).flatten(1, 2)
        return chosen.contiguous(memory_format=dense.memory_format(x))

    def extra_repr(self) -> str:
        return f"{self.group.name}, {self.subgroup.name}"


def restrict(x: Tensor, group: GroupLike, subgroup: GroupLike) -> Tensor:
    """Read group features as features of a subgroup T, with |S| / |T| times as many fields.

    Field (f, c) of the result holds, for t in T, the orientation t·c of field f: the right cosets
    Tc, each of which T permutes as it permutes itself.

    >>> x = torch.arange(8.0).reshape(1, 8, 1, 1)
    >>> restrict(x, "p8", "p4").flatten().tolist()
    [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]
    """
    module = Restrict2d(group, subgroup).to(x.device)
    result: Tensor = module(x)
    return result


def _double(x: Tensor, dim: int, size: int) -> Tensor:
    """Linear interpolation of one axis to ``size`` points half a pixel apart, about its centre."""
    # Gathered by index, so that the output has the size that was asked for, symbolic or not.
    last = x.shape[dim] - 1
    quarter = (1 - size % 2) / 4  # on even sizes no new point lies on an old one
    position = torch.arange(size, device=x.device, dtype=torch.float64) / 2 - quarter
    low = position.floor()
    weight = (position - low).to(x.dtype).reshape(-1, *[1] * (3 - dim))
    index = low.long()
    before = x.index_select(dim, index.clamp(0, last))
    after = x.index_select(dim, (index + 1).clamp(0, last))
    return before * (1 - weight) + after * weight


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"expected {name} as a whole number of at least 1; got {value!r}")
    return value


def _check_groups(groups: Any, **counts: int) -> None:
    _positive("groups", groups)
    for name, count in counts.items():
        if count % groups:
            raise ValueError(f"expected {name} divisible by groups={groups}; got {count}")


def _check_rank(x: Tensor, ranks: tuple[int, ...] = (4,)) -> None:
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a torch.Tensor; got {type(x).__name__}")
    if x.ndim not in ranks:
        raise ValueError(
            f"expected a tensor [batch, channels, height, width]; got {x.ndim} dimensions: "
            f"{tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point tensor, such as x.float(); got {x.dtype}")


def _check_maps(x: Tensor, channels: int, expected: str, weight: Tensor | None = None) -> None:
    _check_rank(x)
    if torch.compiler.is_compiling():
        return
    if x.shape[1] != channels:
        raise ValueError(f"expected {expected}; got {x.shape[1]} channels: {tuple(x.shape)}")
    if (
        weight is not None
        and x.dtype != weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
    ):
        raise ValueError(
            f"expected {weight.dtype}, the dtype of the layer; got {x.dtype}: convert one of them, "
            "or use autocast"
        )


def _check_fields(x: Tensor, fields: int, group: Group, weight: Tensor | None) -> None:
    channels = fields * group.order
    _check_maps(x, channels, f"{channels} channels ({fields} fields of {group.name})")
    # torch normalises half precisions with float32 parameters, and nothing else mixed.
    if (
        weight is not None
        and not torch.compiler.is_compiling()
        and x.dtype != weight.dtype
        and not (weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16))
    ):
        raise ValueError(f"expected {weight.dtype}, the dtype of the layer; got {x.dtype}")


def _check_multiple(x: Tensor, group: Group, ranks: tuple[int, ...] = (4,)) -> None:
    _check_rank(x, ranks)
    if not torch.compiler.is_compiling() and x.shape[1] % group.order:
        raise ValueError(
            f"expected channels in multiples of {group.order}, the order of {group.name}; "
            f"got {x.shape[1]}: {tuple(x.shape)}"
        )
