"""PDO-eConvs: the convolutions themselves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from econv import engines
from econv.basis import COORDINATES, Gains, filter_basis
from econv.engines import Part, Prologue, Weight, dense
from econv.engines.problem import times
from econv.groups import Group, GroupLike
from econv.layers.checks import (
    LARGEST_IMAGE,
    check_factory,
    check_groups,
    check_maps,
    check_rank,
    positive,
    read_group,
    truth,
)
from econv.layers.constants import WithConstants
from econv.layers.sampling import (
    Enlarge,
    Enlarge2d,
    Enlarge3d,
    Upsample,
    Upsample2d,
    Upsample3d,
    picked,
    recentre,
    window_count,
)
from econv.operators import OperatorsLike
from econv.stencils import Aspect, StencilsLike, stencil_set
from econv.tensors import without_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "ConvOptions",
    "GroupConv",
    "GroupConv2d",
    "GroupConv3d",
    "GroupLinear",
    "GroupUpsampleConv",
    "GroupUpsampleConv2d",
    "GroupUpsampleConv3d",
    "LiftConv",
    "LiftConv2d",
    "LiftConv3d",
    "PDOConv",
    "PDOConv2d",
    "PDOConv3d",
    "VectorConv",
    "VectorConv2d",
    "VectorConv3d",
]

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
_MOST_NUMBERS = 1 << 31  # of a weight
_MOST_PADDING = 1024  # pixels, but for "same"
_WINDOWS = ("stride", "padding", "padding_mode", "dilation")


class ConvOptions(TypedDict, total=False):
    """The keywords that every PDO-eConv takes; :class:`LiftConv2d` says what they mean.

    >>> options = ConvOptions(stencils="central", padding_mode="circular")
    >>> GroupConv2d(4, 6, "p8", **options).padding_mode
    'circular'
    """

    operators: OperatorsLike | None
    stencils: StencilsLike
    size: int | None
    accuracy: int
    stride: int
    padding: int | str
    padding_mode: str | tuple[str, ...]
    bias: bool
    groups: int
    dilation: int
    spacing: float | tuple[float, ...]
    centred: bool | tuple[int, int]
    init: str
    engine: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class PDOConv(WithConstants):
    """What the three kinds of PDO-eConv share: one learned weight, expanded in every forward pass.

    The layers of images and of volumes are the same, but for their ``dimension``.

    Nothing derived is kept: the state is ``weight`` (and ``bias``), in train and eval alike, and a
    weight changed by any route is seen by the next call. A buffer, ``coordinates``, says what the
    numbers of the weight are coordinates of (:data:`econv.basis.COORDINATES`): a layer that loads a
    state of the first version, which does not say so, takes its pixels as they are. What names no
    version and no coordinates, such as a dictionary of parameters, is in those of the layer.

    Raises:
        ValueError: for options out of their range; when called, for input that the layer does not
            read.
        TypeError: for a keyword that there is not, such as ``kernel_size``.
    """

    dimension: int
    """Of the space: 2 for images, 3 for volumes."""
    input_kind: str
    output_kind: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    coordinates: Tensor
    synthesis: Tensor

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        group: GroupLike,
        *,
        in_channels: int,
        out_channels: int,
        operators: OperatorsLike | None = None,
        stencils: StencilsLike = "isotropic",
        size: int | None = None,
        accuracy: int = 2,
        stride: int = 1,
        padding: int | str = "same",
        padding_mode: str | tuple[str, ...] = "zeros",
        bias: bool = False,
        groups: int = 1,
        dilation: int = 1,
        spacing: float | tuple[float, ...] = 1.0,
        centred: bool | tuple[int, int] = False,
        init: str = "relu",
        engine: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            given = next(iter(unknown))
            meant = ": size is the side of the filters" if given == "kernel_size" else ""
            raise TypeError(f"{type(self).__name__} takes no argument {given!r}{meant}")
        super().__init__()
        self.group = self._read_group(group)
        self.spacing = read_spacing(spacing, self.dimension)
        aspect = _aspect(self.spacing)
        self.basis = filter_basis(self.group, operators, stencils, size, accuracy, aspect)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = positive("stride", stride, LARGEST_IMAGE)
        self.dilation = positive("dilation", dilation, LARGEST_IMAGE)
        self.groups = groups
        self.padding = self._read_padding(padding)
        self.padding_mode = read_padding_mode(padding_mode, self.dimension)
        self.centred = _read_centred(centred)
        self.engine = engines.check_name(engine)
        self.basis.scale(init)  # an unknown name fails here, not at the first reset
        self.init = init
        self._order = self.group.order
        self._convolution = self._describe()
        check_factory(device, dtype)
        numbers = math.prod(weight_shape) * len(self.basis.operators)
        if numbers > _MOST_NUMBERS:
            raise ValueError(
                f"expected fields whose weight has at most {_MOST_NUMBERS} numbers; these have "
                f"{numbers}"
            )
        self.weight = nn.Parameter(
            torch.empty(*weight_shape, len(self.basis.operators), device=device, dtype=dtype)
        )
        if truth("bias", bias):
            shape = (weight_shape[0],)
            self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._refresh_constants()
        self.reset_parameters()

    def _read_group(self, group: GroupLike) -> Group:
        return read_group(group, self.dimension, type(self).__name__)

    def _read_padding(self, padding: int | str) -> int:
        if isinstance(padding, str) and padding in ("same", "valid"):
            return self.extent // 2 if padding == "same" else 0
        if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
            raise ValueError(
                "expected padding as 'same', 'valid' or one whole number for every side "
                f"(unequal sides break the symmetry); got {padding!r}"
            )
        if padding > _MOST_PADDING:
            raise ValueError(f"expected padding of at most {_MOST_PADDING}; got {padding!r}")
        return padding

    def _constants(self) -> dict[str, np.ndarray]:
        return dense.tables(self.convolution)

    def _constants_like(self, name: str) -> Tensor:
        return self.weight

    def _constants_fit(self) -> bool:
        here, constants = self.weight, self.synthesis
        return constants.dtype == here.dtype and constants.device == here.device

    def _refresh_constants(self) -> None:
        told = COORDINATES.index(self.basis.coordinates)  # anew: `to_empty()` leaves nothing of it
        with torch.inference_mode(False):
            self.register_buffer("coordinates", torch.tensor(told, device=self.weight.device))
        super()._refresh_constants()

    def _read_weight_in(self, coordinates: str) -> None:
        """Take the weight as these coordinates from now on."""
        basis = self.basis
        if coordinates != basis.coordinates:
            own = (basis.group, basis.operators, basis.stencils, basis.size)
            self.basis = filter_basis(*own, basis.stencils.accuracy, basis.aspect, coordinates)
            self._convolution = self._describe()
            self._refresh_constants()

    _version = 2  # of states; those of version 1 hold pixels and do not say so

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        weights = (f"{prefix}weight", f"{prefix}parametrizations.weight.")
        if any(name.startswith(weights) for name in state_dict):
            # Parameters alone, such as averaged ones, are in the layer's own coordinates.
            meant = "pixels" if more[0].get("version") == 1 else self.basis.coordinates
            told = state_dict.setdefault(
                f"{prefix}coordinates", torch.tensor(COORDINATES.index(meant))
            )
            if not told.is_meta:
                place = int(told) if told.numel() == 1 else -1
                if 0 <= place < len(COORDINATES):
                    self._read_weight_in(COORDINATES[place])
                else:
                    more[-1].append(
                        f"expected {prefix}coordinates as a number from 0 to "
                        f"{len(COORDINATES) - 1}; got {told.tolist()}"
                    )
        super()._load_from_state_dict(state_dict, prefix, *more)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the fixed arrays, which come back from the basis."""
        state = self.__dict__.copy()
        fixed = self._constants()
        state["_buffers"] = {n: b for n, b in state["_buffers"].items() if n not in fixed}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.pop("extent", None)  # layers once kept it, and had no description
        if "_convolution" not in self.__dict__:
            self._convolution = self._describe()
        if "coordinates" not in self._buffers:  # pickled by the first version
            self._read_weight_in("pixels")
        self._refresh_constants()

    @property
    def extent(self) -> int:
        """How many pixels the stencils span along each side."""
        return self.dilation * (self.basis.size - 1) + 1

    @property
    def convolution(self) -> engines.Convolution:
        """What the layer computes, as the engines are told."""
        return self._convolution

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _WINDOWS and "_convolution" in self.__dict__:
            self._convolution = self._describe()

    def _describe(self) -> engines.Convolution:
        each = {"regular": self._order, "vector": self.dimension}.get(self.output_kind, 1)
        fields = (self._parts(), self.output_kind, self.out_channels // each, self.groups)
        windows = (self.stride // self._step, self.padding, self.padding_mode, self.dilation)
        return engines.convolution(self.basis, *fields, *windows)

    def _parts(self) -> tuple[Part, ...]:
        """The kinds of the input channels, in their order."""
        raise NotImplementedError

    def _fan_in(self) -> int:
        """How many maps one output reads."""
        return math.prod(self.weight.shape[1:-1])

    def reset_parameters(self) -> None:
        """Draw the weight anew, as ``init`` says, and set the bias to zero."""
        deviation = self.basis.standard_deviation(self._fan_in(), self.init)
        nn.init.normal_(self.weight, std=deviation * self._output_scale())
        # What is drawn are pixels, so that a seed gives the filters that it always gave.
        matrix = torch.tensor(self.basis.from_pixels, device="cpu")
        with torch.no_grad():
            self.weight.copy_(self.weight @ matrix.to(self.weight.device, self.weight.dtype))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _output_scale(self) -> float:
        return 1.0

    def gains(self) -> Gains:
        """What the layer at initialisation does to constants, to white noise and under ReLU."""
        return self.basis.gains(self.init)

    def _side(self) -> float:
        """Of a square as large as a cell of the grid that the stencils stand on."""
        aspect = _aspect(self.spacing)
        if not np.allclose(aspect, self.basis.aspect, rtol=1e-9, atol=0):
            raise ValueError(
                f"expected a spacing of pixels {self.basis.aspect!r} times as high as wide, for "
                f"which the filters were made; got {self.spacing!r}: make another layer"
            )
        own = self.spacing
        volume = math.prod(own) if isinstance(own, tuple) else 0.0
        return (volume ** (1 / self.dimension) if isinstance(own, tuple) else own) * self.dilation

    def coefficients(self) -> Tensor:
        """The paper's β, differentiable: ``weight`` in the basis of the operators."""
        matrix = torch.from_numpy(self.basis.to_coefficients(self._side()))
        return self.weight @ matrix.to(device=self.weight.device, dtype=self.weight.dtype)

    @torch.no_grad()
    def set_coefficients(self, coefficients: Tensor) -> None:
        """Set β: the operators' coefficients on a grid of this layer's spacing."""
        given = torch.as_tensor(coefficients)
        if given.shape != self.weight.shape:
            raise ValueError(
                f"expected coefficients of shape {tuple(self.weight.shape)}; "
                f"got {tuple(given.shape)}"
            )
        matrix = self.basis.from_coefficients(self._side())
        exact = given.to(device="cpu", dtype=torch.float64) @ torch.from_numpy(matrix)
        self.weight.copy_(exact)

    def filters(self) -> Tensor:
        """The dense filter bank that `conv2d` takes, channels by channels by size by size, or
        `conv3d`.
        """
        # Filters carry the layer's accuracy: autocast must not round them before the convolution.
        with without_autocast(self.weight.device):
            return dense.filters(self.convolution, self._weight())

    def _weight(self) -> Weight:
        if not self._constants_fit():  # the weight was assigned, not converted
            self._refresh_constants()
        found = (self._buffers.get(name) for name in dense.TABLES)
        return Weight(self.weight, tuple(table for table in found if table is not None))

    def _channel_bias(self) -> Tensor | None:
        if self.bias is None:
            return None
        each = self.out_channels // len(self.bias)
        if torch.compiler.is_dynamo_compiling():
            # The compiler of torch 2.10 fails at views that are the bias of a 1×1 convolution.
            channels = torch.arange(self.out_channels, device=self.bias.device)
            return self.bias[channels // each]
        return self.bias[:, None].expand(-1, each).flatten()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``[batch, in_channels, height, width]``, or volumes of one axis more."""
        x, bias = self.read(x), self._channel_bias()
        return engines.convolve(self.convolution, x, self._weight(), bias, self.engine)

    def read(self, x: Tensor) -> Tensor:
        """What `forward` makes of its input before it is convolved."""
        self._check_input(x)
        step = self._step
        if self.centred:
            x = recentre(x, *(self.points(n) for n in x.shape[2:]), step=step)
        elif step > 1:
            x = picked(x, step)
        return x

    @property
    def _step(self) -> int:
        """Of layers that read one pixel for each of theirs, only these pixels are looked at."""
        return self.stride if self.extent == 1 and not self.padding else 1

    def points(self, size: int) -> int:
        """How many points of an axis the windows fill, without the padding."""
        extent, padding = self.extent, 2 * self.padding
        as_extent, as_padding = (
            self.centred if isinstance(self.centred, tuple) else (extent, padding)
        )
        windows = window_count(size, as_extent, self.stride, as_padding)
        return self.stride * (windows - 1) + extent - padding

    def fuses(self, x: Tensor) -> bool | None:
        """Whether `forward` would normalise and rectify ``x`` where it is read.

        It is told how with :meth:`forward_activated`. Nothing where kernels are not to do it
        before that either.
        """
        self._check_input(x)
        found = engines.fuses(self.convolution, x, self.weight, self.engine)
        if self.centred or self._step > 1:  # `read` makes another input
            return False if engines.resolve(self.engine) == "auto" and found is not None else None
        return found

    def forward_activated(self, x: Tensor, affine: Tensor | None = None) -> Tensor:
        """Convolve max(0, (x − centre)·scale + shift), which is never written where `fuses`.

        ``affine`` are these numbers of each field, ``[3, fields]`` in float32; without them ``x``
        was activated by a kernel.
        """
        if affine is None:
            x = self.read(x)
        given = (self._weight(), self._channel_bias(), self.engine, Prologue(affine))
        return engines.convolve(self.convolution, x, *given)

    def _check_input(self, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        expected = self._expected_channels()
        check_maps(x, self.in_channels, expected, self.weight, self.dimension)
        sizes, whole, points = x.shape[2:], *_WORDS[self.dimension]
        # Windows that are as an ordinary convolution's may reach beyond a small map, as its do.
        least = self.extent
        if isinstance(self.centred, tuple):
            least = max(1, self.centred[0] - self.centred[1])
        if min(sizes) < least:
            raise ValueError(
                f"expected {whole} of at least {times([least] * self.dimension)} {points}, the "
                f"extent of the stencils; got {times(sizes)}"
            )
        # Wider than this, reflection and wrapping would read beyond the other side.
        most = {"zeros": math.inf, "replicate": math.inf, "circular": 0, "reflect": -1}
        mode = self.padding_mode
        modes = (mode,) * self.dimension if isinstance(mode, str) else mode
        read = [self.points(n) if self.centred else n for n in sizes]
        if any(self.padding > n + most[m] for n, m in zip(read, modes, strict=True)):
            raise ValueError(
                f"expected {whole} larger than the padding of {self.padding} for "
                f"padding_mode={self.padding_mode!r}; got {times(sizes)}"
            )

    def _expected_channels(self) -> str:
        raise NotImplementedError

    def _stencils_text(self) -> str:
        stencils = self.basis.stencils
        named = stencil_set(stencils.name, stencils.accuracy, self.group.steps)
        return repr(stencils.name if stencils == named else stencils)

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, in the order of the signature."""
        basis = self.basis
        text = f", {self.group.name}, operators={basis.operators.name!r}"
        text += f", stencils={self._stencils_text()}, size={basis.size}"
        options: dict[str, tuple[Any, Any]] = {
            "accuracy": (basis.stencils.accuracy, 2),
            "stride": (self.stride, 1),
            "padding": (self.padding, self.extent // 2),
            "padding_mode": (self.padding_mode, "zeros"),
            "bias": (self.bias is not None, False),
            "groups": (self.groups, 1),
            "dilation": (self.dilation, 1),
            "spacing": (self.spacing, 1.0),
            "centred": (self.centred, False),
            "init": (self.init, "relu"),
            "coordinates": (basis.coordinates, "orthonormal"),
            "engine": (self.engine, "auto"),
        }
        for name, (value, default) in options.items():
            if value != default:
                text += f", {name}={value!r}"
        return text


class PDOConv2d(PDOConv):
    """The PDO-eConvs of images.

    Raises:
        ValueError: for options out of their range; when called, for input that the layer does not
            read.
        TypeError: for a keyword that there is not, such as ``kernel_size``.
    """

    dimension = 2


class PDOConv3d(PDOConv):
    """The PDO-eConvs of volumes.

    Raises:
        ValueError: for options out of their range; when called, for input that the layer does not
            read.
        TypeError: for a keyword that there is not, such as ``kernel_size``.
    """

    dimension = 3


class LiftConv(PDOConv):
    """What :class:`LiftConv2d` and :class:`LiftConv3d` share.

    Raises:
        ValueError: as :class:`LiftConv2d`.
        TypeError: for a keyword that there is not, such as ``kernel_size``.
    """

    output_kind = "regular"
    pseudoscalars = 0  # of layers that were pickled before there were any

    def __init__(
        self,
        in_channels: int,
        out_fields: int,
        group: GroupLike,
        *,
        vectors: int = 0,
        pseudoscalars: int = 0,
        **options: Unpack[ConvOptions],
    ) -> None:
        groups = options.get("groups", 1)
        in_channels = positive("in_channels", in_channels)
        out_fields = positive("out_fields", out_fields)
        check_groups(groups, in_channels=in_channels, out_fields=out_fields)
        d = self.dimension
        if not isinstance(vectors, int) or vectors is True or not 0 <= d * vectors <= in_channels:
            raise ValueError(
                f"expected vectors between 0 and in_channels / {d} = {in_channels // d}; "
                f"got {vectors!r}"
            )
        most = in_channels - d * vectors
        whole = isinstance(pseudoscalars, int) and pseudoscalars is not True
        if not whole or not 0 <= pseudoscalars <= most:
            raise ValueError(
                f"expected pseudoscalars between 0 and {most}, the channels that are no vectors; "
                f"got {pseudoscalars!r}"
            )
        if (vectors or pseudoscalars) and groups != 1:
            raise ValueError(
                f"expected groups=1 with vector or pseudoscalar channels; got groups={groups}"
            )
        self.out_fields = out_fields
        self.vectors = vectors
        self.pseudoscalars = pseudoscalars
        super().__init__(
            (out_fields, in_channels // groups),
            group,
            in_channels=in_channels,
            out_channels=out_fields * self._read_group(group).order,
            **options,
        )

    @property
    def input_kind(self) -> str:  # type: ignore[override]  # it depends on the channels
        """The kind of all channels; of several kinds ``"mixed"``: `input_parts` has them."""
        return "mixed" if len(parts := self._parts()) > 1 else parts[0].kind

    @property
    def input_parts(self) -> tuple[Part, ...]:
        """The kinds of the input channels in their order, and how many fields are of each."""
        return self._parts()

    def _parts(self) -> tuple[Part, ...]:
        scalars = self.in_channels - self.pseudoscalars - self.dimension * self.vectors
        found = {
            "scalar": scalars,
            "pseudoscalar": self.pseudoscalars,
            "vector": self.vectors,
        }
        return tuple(Part(kind, fields) for kind, fields in found.items() if fields)

    def _expected_channels(self) -> str:
        return f"{self.in_channels} {_KINDS[self.dimension]} channels"

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_fields}{super().extra_repr()}"
        text += f", pseudoscalars={self.pseudoscalars}" if self.pseudoscalars else ""
        return text + (f", vectors={self.vectors}" if self.vectors else "")


class LiftConv2d(LiftConv, PDOConv2d):
    """Ψ̃: lifts an image to a group feature map, Ψ[r](x, A) = χ^(A)[r](x).

    ``[batch, in_channels, height, width]`` → ``[batch, out_fields * order, …]``.

    Args:
        in_channels: channels of the image.
        out_fields: fields of the feature map; each has one channel per group element.
        group: a :class:`~econv.Group` or its name.
        vectors: how many vector fields the image ends with, 0 by default. Each takes two of the
            ``in_channels``, its x (right) and y (**up**) component, and is read in frame A as A⁻¹v.
        pseudoscalars: how many pseudoscalars come before the vectors, 0 by default: channels that
            change sign under reflections, such as a vorticity; read in frame A as det(A)·ω.
        operators: ``"paper"`` (default), ``"order<=N"`` or a list of exponent tuples.
        stencils: ``"isotropic"`` (default), ``"central"`` (the paper's), ``"gaussian"``, or a
            :class:`~econv.stencils.StencilSet` such as ``Gaussian(width=0.8)``.
        size: odd support of the filters; by default the smallest that the turned operators need.
        accuracy: order of the error of central stencils, 2 by default.
        stride: as in `Conv2d`, 1 by default. Exactly symmetric under quarter turns only on sizes n
            with (n + 2·padding − extent) divisible by the stride: with ``padding="same"`` and
            stride 2, on odd sizes. To have it exact on all, say ``centred=True``.
        padding: ``"same"`` (default: half the support on every side, also with a stride),
            ``"valid"`` or one whole number.
        padding_mode: ``"zeros"`` (default), ``"reflect"``, ``"replicate"`` or ``"circular"``, or a
            pair of them for (y, x): ``("replicate", "circular")`` is a channel that is periodic
            along x between walls. Where they differ, half turns and flips along the axes stay
            exact, and quarter turns do not.
        bias: whether to learn one bias per field, ``False`` by default.
        groups: blocks of channels and fields that are convolved apart, 1 by default.
        dilation: pixels from one stencil point to the next, 1 by default.
        spacing: h, the length of a pixel, 1.0 by default: a derivative of order m divides by
            (spacing·dilation)^m. A pair is that along (y, x), for pixels that are rectangles:
            derivatives are those of physical lengths, frames turn in them, and the stencils are
            designed for that grid. Half turns and flips along the axes stay exact; quarter turns
            become angles like others, whose error vanishes with the spacing.
        centred: ``False`` (default) puts the windows where torch does; ``True`` puts as many
            symmetrically about the centre, so that quarter turns and flips are exact on every size
            (:func:`~econv.layers.recentre` says how). A pair ``(extent, padding)`` does so with as
            many windows as an ordinary convolution of that extent, and that padding of both sides
            together, would have: an even 2×2 convolution has none of its own here.
        init: ``"relu"`` (default), ``"silu"``, ``"gelu"`` or ``"softplus"`` keeps the second moment
            through layers with that function, ``"paper"`` is section 4.4.
        engine: ``"auto"`` (default), ``"dense"`` or ``"spectral"``; see :func:`econv.engine`.
        device: as in `Conv2d`.
        dtype: as in `Conv2d`.

    Raises:
        ValueError: for an unknown group, operators or stencils, a ``size`` that the turned
            operators exceed, or other options out of their range; when called, for other channels,
            another dtype or device, images smaller than the stencils, and an engine that cannot run
            here.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> lift = LiftConv2d(3, 4, "p8")
    >>> lift(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 32, 16, 16])
    >>> wind = LiftConv2d(2, 4, "p8", vectors=1)
    >>> pressure_spin_and_wind = LiftConv2d(4, 4, "p8m", pseudoscalars=1, vectors=1)
    """


class LiftConv3d(LiftConv, PDOConv3d):
    """:class:`LiftConv2d` for volumes, by groups of space: Ψ[r](x, A) = χ^(A)[r](x).

    ``[batch, in_channels, depth, height, width]`` → ``[batch, out_fields * order, …]``. x points
    right, y **up**, and z along the depth.

    Arguments are those of `LiftConv2d`, but for these: ``operators`` are the ten of
    ``"order<=2"`` by default; a vector field takes three of the ``in_channels``, its x, y and z
    component; ``padding_mode`` may be three names, and ``spacing`` three lengths, for (z, y, x), as
    voxels of CT and MRI have them. On cubes all symmetries of the grid that the group has are
    exact, 24 of ``"O"`` and 48 of ``"Oh"``; on other voxels those that are half turns and flips
    along the axes, with a square base also those that turn it.

    Raises:
        ValueError: for a group of the plane, or options out of their range; when called, for other
            channels, another dtype or device, and volumes smaller than the stencils.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> lift = LiftConv3d(1, 2, "O")
    >>> lift(torch.randn(1, 1, 6, 6, 6)).shape
    torch.Size([1, 48, 6, 6, 6])
    >>> ct = LiftConv3d(1, 2, "D4h", spacing=(2.5, 0.7, 0.7))
    """


class GroupConv(PDOConv):
    """What :class:`GroupConv2d` and :class:`GroupConv3d` share.

    Raises:
        ValueError: as :class:`GroupConv2d`.
        TypeError: for a keyword that there is not, such as ``kernel_size``.
    """

    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        in_fields: int,
        out_fields: int,
        group: GroupLike,
        **options: Unpack[ConvOptions],
    ) -> None:
        groups = options.get("groups", 1)
        in_fields = positive("in_fields", in_fields)
        out_fields = positive("out_fields", out_fields)
        check_groups(groups, in_fields=in_fields, out_fields=out_fields)
        order = self._read_group(group).order
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

    def _parts(self) -> tuple[Part, ...]:
        return (Part("regular", self.in_fields),)

    def _expected_channels(self) -> str:
        return f"{self.in_channels} channels ({self.in_fields} fields of {self.group.name})"

    def extra_repr(self) -> str:
        return f"{self.in_fields}, {self.out_fields}{super().extra_repr()}"


class GroupConv2d(GroupConv, PDOConv2d):
    """Φ̃: maps group features to group features, Φ[e](x, A) = Σ_k χ_k^(A)[e](x, Ak).

    ``[batch, in_fields * order, height, width]`` → ``[batch, out_fields * order, …]``.

    With ``operators="order<=0"`` it is the 1×1 group convolution, exactly equivariant for every
    element. The other arguments are those of :class:`LiftConv2d`.

    Raises:
        ValueError: for a group of space, or options out of their range; when called, for other
            channels, another dtype or device, and maps smaller than the stencils.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> conv = GroupConv2d(4, 6, "p8")
    >>> conv(torch.randn(2, 4 * 8, 16, 16)).shape
    torch.Size([2, 48, 16, 16])
    >>> conv.coefficients().shape, conv.filters().shape
    (torch.Size([6, 4, 8, 9]), torch.Size([48, 32, 5, 5]))
    >>> GroupConv2d(4, 6, "p8", operators="order<=0").filters().shape
    torch.Size([48, 32, 1, 1])
    """


class GroupConv3d(GroupConv, PDOConv3d):
    """:class:`GroupConv2d` for volumes, by groups of space: Φ[e](x, A) = Σ_k χ_k^(A)[e](x, Ak).

    ``[batch, in_fields * order, depth, height, width]`` → ``[batch, out_fields * order, …]``. The
    other arguments are those of :class:`LiftConv3d`.

    Raises:
        ValueError: for a group of the plane, or options out of their range; when called, for other
            channels, another dtype or device, and maps smaller than the stencils.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> conv = GroupConv3d(2, 3, "T")
    >>> conv(torch.randn(1, 2 * 12, 5, 5, 5)).shape
    torch.Size([1, 36, 5, 5, 5])
    >>> conv.coefficients().shape, conv.filters().shape
    (torch.Size([3, 2, 12, 10]), torch.Size([36, 24, 3, 3, 3]))
    """


class GroupLinear(GroupConv2d):
    """The 1×1 group convolution on features without pixels, ``[batch, in_fields * order]``.

    What `Linear` is to `Conv2d`: the gates of squeeze-and-excitation are made of it.

    Raises:
        ValueError: for fields below 1 or an unknown group; when called, for what is not ``[batch,
            in_fields * order]``, or has another dtype or device.
        TypeError: for a keyword that there is not.

    >>> GroupLinear(4, 6, "p8")(torch.randn(2, 4 * 8)).shape
    torch.Size([2, 48])
    """

    def __init__(
        self,
        in_fields: int,
        out_fields: int,
        group: GroupLike,
        bias: bool = True,
        init: str = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dimension = Group(group).dimension
        super().__init__(
            in_fields,
            out_fields,
            group,
            operators="order<=0",
            bias=bias,
            init=init,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, in_fields * order]``."""
        if not torch.compiler.is_compiling():
            check_rank(x, flat=True)
            if x.ndim != 2:
                raise ValueError(f"expected [batch, channels]; got {tuple(x.shape)}")
        return super().forward(x.view(*x.shape, *[1] * self.dimension)).flatten(1)


class VectorConv(GroupConv):
    """What :class:`VectorConv2d` and :class:`VectorConv3d` share.

    Raises:
        ValueError: as :class:`VectorConv2d`.
        TypeError: for a keyword that there is not, such as ``kernel_size``.
    """

    output_kind = "vector"

    def __init__(
        self, in_fields: int, out_vectors: int, group: GroupLike, **options: Unpack[ConvOptions]
    ) -> None:
        in_fields = positive("in_fields", in_fields)
        out_vectors = positive("out_vectors", out_vectors)
        if truth("bias", options.get("bias", False)):
            raise ValueError("expected bias=False: a constant vector is not equivariant")
        check_groups(options.get("groups", 1), in_fields=in_fields, out_vectors=out_vectors)
        self.out_vectors = out_vectors
        super().__init__(in_fields, self.dimension * out_vectors, group, **options)

    def _output_channels(self, order: int) -> int:
        return self.dimension * self.out_vectors

    def _output_scale(self) -> float:
        # The sum over orientations adds `order` maps of equal variance.
        return 1.0 / math.sqrt(self.group.order)

    def extra_repr(self) -> str:
        return f"{self.in_fields}, {self.out_vectors}{PDOConv.extra_repr(self)}"


class VectorConv2d(VectorConv, GroupConv2d):
    """Maps group features to vector fields, out(x) = Σ_A A·[s₁(x, A), s₂(x, A)] with s = Φ̃[e].

    ``[batch, in_fields * order, height, width]`` → ``[batch, 2 * out_vectors, …]``, for each vector
    its x (right) and y (**up**) component. The output turns as a vector field does:
    (π_Ã v)(x) = Ã v(Ã⁻¹x). There is no bias: no constant vector is equivariant.

    ``coefficients()`` are those of s, ``[2 * out_vectors, in_fields, order, operators]``.

    Raises:
        ValueError: for a group of space, ``bias=True``, or options out of their range; when called,
            for other channels, another dtype or device, and maps smaller than the stencils.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> flow = VectorConv2d(4, 1, "p8", operators="order<=1")
    >>> flow(torch.randn(2, 4 * 8, 16, 16)).shape
    torch.Size([2, 2, 16, 16])
    """


class VectorConv3d(VectorConv, GroupConv3d):
    """:class:`VectorConv2d` for volumes: out(x) = Σ_A A·[s₁(x, A), s₂(x, A), s₃(x, A)].

    ``[batch, in_fields * order, depth, height, width]`` → ``[batch, 3 * out_vectors, …]``, for each
    vector its x (right), y (**up**) and z (along the depth) component.

    Raises:
        ValueError: for a group of the plane, ``bias=True``, or options out of their range; when
            called, for other channels, another dtype or device, and maps smaller than the stencils.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> flow = VectorConv3d(2, 1, "O", operators="order<=1")
    >>> flow(torch.randn(1, 2 * 24, 5, 5, 5)).shape
    torch.Size([1, 3, 5, 5, 5])
    """


class GroupUpsampleConv(nn.Module):
    """What :class:`GroupUpsampleConv2d` and :class:`GroupUpsampleConv3d` share.

    Raises:
        ValueError: as :class:`GroupUpsampleConv2d`.
        TypeError: for a keyword that there is not, such as ``kernel_size``.
    """

    dimension: int
    input_kind = "regular"
    output_kind = "regular"

    def __init__(
        self,
        in_fields: int,
        out_fields: int,
        group: GroupLike,
        *,
        factor: int = 2,
        excess: int = 0,
        **options: Unpack[ConvOptions],
    ) -> None:
        super().__init__()
        double, more, conv = _UPSAMPLING[self.dimension]
        enlarge = more(factor, excess)
        self.upsample = double() if (factor, excess) == (2, 0) else enlarge
        self.conv = conv(in_fields, out_fields, group, **options)

    @property
    def group(self) -> Group:
        """The group of the convolution."""
        return self.conv.group

    def forward(self, x: Tensor, size: int | tuple[int, ...] | None = None) -> Tensor:
        """Upsample and convolve; to twice the size, ``size`` may be that or one less."""
        if size is None:
            enlarged = self.upsample(x)
        elif isinstance(self.upsample, Upsample):
            enlarged = self.upsample(x, size)
        else:
            raise ValueError(f"expected no size with {self.upsample}; got {size}")
        result: Tensor = self.conv(enlarged)
        return result


_UPSAMPLING: dict[int, tuple[type[Upsample], type[Enlarge], type[GroupConv]]] = {
    2: (Upsample2d, Enlarge2d, GroupConv2d),
    3: (Upsample3d, Enlarge3d, GroupConv3d),
}


class GroupUpsampleConv2d(GroupUpsampleConv):
    """An upsampling convolution: linear interpolation, then :class:`GroupConv2d`.

    The equivariant counterpart of a transposed convolution with stride ``factor``; options are
    those of `GroupConv2d`. n pixels become ``factor`` · n + ``excess``: for a transposed layer
    the excess is extent − stride − 2·padding + output_padding.

    Raises:
        ValueError: for what :class:`Enlarge2d` and :class:`GroupConv2d` refuse; when called, for a
            ``size`` that is not twice the image's or one less, or is given with another factor.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> up = GroupUpsampleConv2d(4, 2, "p4")
    >>> up(torch.randn(1, 16, 8, 8)).shape, up(torch.randn(1, 16, 8, 8), size=15).shape
    (torch.Size([1, 8, 16, 16]), torch.Size([1, 8, 15, 15]))
    >>> GroupUpsampleConv2d(4, 2, "p4", factor=3, excess=-1)(torch.randn(1, 16, 8, 8)).shape[-1]
    23
    """

    dimension = 2


class GroupUpsampleConv3d(GroupUpsampleConv):
    """:class:`GroupUpsampleConv2d` for volumes, by groups of space.

    Raises:
        ValueError: for what :class:`Enlarge3d` and :class:`GroupConv3d` refuse; when called, for a
            ``size`` that is not twice the volume's or one less, or is given with another factor.
        TypeError: for a keyword that there is not, such as ``kernel_size``.

    >>> up = GroupUpsampleConv3d(2, 1, "T")
    >>> up(torch.randn(1, 24, 4, 4, 4)).shape[2:]
    torch.Size([8, 8, 8])
    >>> up(torch.randn(1, 24, 4, 4, 4), size=(7, 8, 8)).shape[2:]
    torch.Size([7, 8, 8])
    """

    dimension = 3


_WORDS = {2: ("an image", "pixels"), 3: ("a volume", "voxels")}
_KINDS = {2: "image", 3: "volume"}
_SEVERAL = {2: "a pair of them for (y, x)", 3: "three of them for (z, y, x)"}


def read_spacing(given: object, dimension: int = 2) -> float | tuple[float, ...]:
    lengths = tuple(given) if isinstance(given, tuple | list) else (given,) * dimension
    numbers = [float(n) for n in lengths if isinstance(n, float | int) and n is not True]
    right = len(lengths) == len(numbers) == dimension
    if not right or not all(0 < n < math.inf for n in numbers):
        raise ValueError(f"expected a positive spacing, or {_SEVERAL[dimension]}; got {given!r}")
    if max(numbers) > 1000 * min(numbers):
        raise ValueError(f"expected sides that differ by a factor of 1000 at most; got {given!r}")
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


def _aspect(spacing: float | tuple[float, ...]) -> Aspect:
    if not isinstance(spacing, tuple):
        return 1.0
    aspect = tuple(length / spacing[-1] for length in spacing[:-1])
    return aspect if len(aspect) > 1 else aspect[0]


def read_padding_mode(given: object, dimension: int = 2) -> str | tuple[str, ...]:
    modes = tuple(given) if isinstance(given, tuple | list) else (given,) * dimension
    # As strings: others may not be hashable, or not compare.
    right = len(modes) == dimension
    if not right or not all(isinstance(m, str) and m in _PADDING_MODES for m in modes):
        raise ValueError(
            f"expected padding_mode in {_PADDING_MODES}, or {_SEVERAL[dimension]}; got {given!r}"
        )
    each = tuple(str(mode) for mode in modes)
    return each[0] if len(set(each)) == 1 else each


def _read_centred(centred: object) -> bool | tuple[int, int]:
    if isinstance(centred, bool):
        return centred
    if isinstance(centred, tuple | list) and len(centred) == 2:
        extent, padding = centred
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in centred)
        if whole and 1 <= extent <= LARGEST_IMAGE and 0 <= padding <= LARGEST_IMAGE:
            return extent, padding
    raise ValueError(
        "expected centred as True, False or a pair (extent, padding) of whole numbers; "
        f"got {centred!r}"
    )
