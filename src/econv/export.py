"""Networks without econv: what a trained network computes, as plain torch modules for inference.

:func:`export` traces a network, puts a plain form in the place of each of our layers and folds
batch norms into the convolutions before them. This module knows what each layer computes in eval
mode, and nothing of how it is trained.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from functools import reduce, singledispatch
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from econv.layers import (
    Curl2d,
    FieldParameter,
    GroupFrameScore2d,
    GroupLinear,
    GroupUpsampleConv,
    GroupWindowConv,
    GroupWindows2d,
    PDOConv,
    SyncBatchNorm,
)
from econv.layers.activations import GroupActivation, limited
from econv.layers.attention import GroupAttentionPool, score, weigh
from econv.layers.checks import expect
from econv.layers.fields import FieldConv, curl
from econv.layers.frames import points_in_frames
from econv.layers.normalisation import (
    GroupBatchNorm,
    GroupGroupNorm,
    GroupInstanceNorm,
    GroupLayerNorm,
)
from econv.layers.orientations import (
    GroupDropout,
    GroupPool,
    GroupPReLU,
    Restrict,
    Spread,
    pool_orientations,
)
from econv.layers.sampling import (
    LINEAR,
    CentredAvgPool,
    CentredMaxPool,
    Downsample,
    Enlarge,
    NearestResize,
    Recentre,
    Upsample,
    halve,
    nearest_pixels,
    points_about_centre,
    smoothed,
)
from econv.layers.window import jets
from econv.tracing import followed

__all__ = ["export", "plain_form"]


def export(model: nn.Module, example_input: Any = None) -> nn.Module:
    """The same network for inference, as plain torch modules: no trace of econv is left.

    Every PDO-eConv becomes a `Conv2d` (of volumes a `Conv3d`) with its filters, every group batch
    norm a `BatchNorm2d`,
    and where a norm follows a convolution the two become one. The result is in eval mode and
    frozen, on the model's device and in its dtype; it pickles, compiles, exports and runs where
    econv is not installed. The model itself is left alone.

    A network whose ``forward`` cannot be traced symbolically (it branches on its input, or has
    optional arguments) keeps its own class, with a warning: only the layers within become plain,
    norms stay beside their convolutions, and loading it needs the code of that class.

    Args:
        model: any network made of our layers and of torch's.
        example_input: a tensor, or a tuple of arguments. If given, both networks are run, and a
            relative difference above 1e-5 (in half precisions, 16 units of rounding) is an error.

    Raises:
        ValueError: for what is no module, layers without a plain form, forward hooks, and a result
            that differs from the network's on ``example_input``.

    >>> from econv import GroupBatchNorm2d, LiftConv2d
    >>> network = nn.Sequential(LiftConv2d(1, 2, "p4"), GroupBatchNorm2d(2, "p4"), nn.ReLU())
    >>> plain = export(network, torch.randn(1, 1, 8, 8))
    >>> [type(layer).__name__ for layer in plain.children()]
    ['Conv2d', 'ReLU']
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module; got {type(model).__name__}")
    source = copy.deepcopy(model).eval().requires_grad_(False)
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    with torch.no_grad():
        wanted = None if example_input is None else source(*arguments)
        plain = _plain(source)
        _check_no_trace(plain)
        if example_input is not None:
            _check_equal(plain(*arguments), wanted)
    return plain


# ------------------------------------------------------------------------- layers, one by one


@singledispatch
def plain_form(layer: nn.Module) -> nn.Module:
    """The plain torch module that computes in eval mode what a layer of ours computes.

    ``@plain_form.register`` adds the form of a layer of your own, by its class.

    Raises:
        ValueError: for a layer that has none.

    >>> from econv import GroupPool2d
    >>> type(plain_form(GroupPool2d("p4"))).__module__.startswith("econv")
    False
    """
    raise ValueError(f"expected a layer with a plain form; got {type(layer).__name__}")


@plain_form.register
def _(layer: PDOConv) -> nn.Module:
    steps = [*_before(layer).values(), _conv(layer)]
    return nn.Sequential(*steps) if len(steps) > 1 else steps[0]


def _before(layer: PDOConv) -> dict[str, nn.Module]:
    """What a plain convolution needs before it, by what it has done to the input."""
    steps: dict[str, nn.Module] = {}
    if layer.centred:
        steps["recentred"] = _graph(_Recentre(layer), "Recentre")
    if borders := plain_borders(layer)[0]:
        steps["padded"] = borders[0] if len(borders) == 1 else nn.Sequential(*borders)
    return steps


def plain_borders(layer: PDOConv) -> tuple[list[nn.Module], dict[str, Any]]:
    """What pads the input of `Conv2d` as a layer's is padded, and the arguments of `Conv2d`.

    Of `Conv3d`, for volumes.
    """
    padding, mode = layer.padding, layer.padding_mode
    if isinstance(mode, str):
        return [], {"padding": padding, "padding_mode": mode}
    kinds = {"reflect": "ReflectionPad", "replicate": "ReplicationPad", "circular": "CircularPad"}
    axes = range(layer.dimension)
    # Both ends of every axis, the last axis first.
    sides = [tuple(padding * (a == axis) for a in axes[::-1] for _ in range(2)) for axis in axes]
    pads = [
        _of_torch(kinds[m], layer.dimension)(side)
        for m, side in zip(mode, sides, strict=True)
        if m != "zeros"
    ]
    return pads, {"padding": tuple(padding if m == "zeros" else 0 for m in mode)}


def _of_torch(name: str, dimension: int) -> Any:
    """Torch's module of that name for images or for volumes."""
    return getattr(nn, f"{name}{dimension}d")


@plain_form.register
def _(layer: GroupAttentionPool) -> nn.Module:
    return _graph(_Attention(layer), "OrientationAttention")


@plain_form.register
def _(layer: GroupFrameScore2d) -> nn.Module:
    return _graph(_FrameScore(layer), "FrameScore")


@plain_form.register
def _(layer: GroupWindows2d) -> nn.Module:
    return _graph(_InFrames(layer), "WindowsInFrames")


@plain_form.register
def _(layer: GroupWindowConv) -> nn.Module:
    return _graph(_Window(layer), "Window")


def _conv(layer: PDOConv) -> Any:
    filters = layer.filters().detach()
    conv = _of_torch("Conv", layer.dimension)(
        layer.in_channels,
        layer.out_channels,
        layer.basis.size,
        layer.stride,
        dilation=layer.dilation,
        groups=layer.groups,
        bias=layer.bias is not None,
        **plain_borders(layer)[1],
        device=filters.device,
        dtype=filters.dtype,
    )
    conv.weight.copy_(filters)
    if conv.bias is not None and layer.bias is not None:
        conv.bias.copy_(_by_channel(layer.bias, layer.out_channels))
    return conv


@plain_form.register
def _(layer: FieldConv) -> nn.Module:
    """One convolution for all kinds of fields."""
    first, *others = convs = [_conv(head) for head in layer.heads]
    joined = copy.copy(first)
    joined.out_channels = sum(conv.out_channels for conv in convs)
    joined._parameters = {"weight": nn.Parameter(torch.cat([conv.weight for conv in convs]))}
    rest = first.weight.new_zeros(sum(conv.out_channels for conv in others))
    bias = None if first.bias is None else nn.Parameter(torch.cat([first.bias, rest]))
    joined._parameters["bias"] = bias
    steps = [*_before(layer.heads[0]).values(), joined]
    return nn.Sequential(*steps) if len(steps) > 1 else joined


@plain_form.register
def _(layer: Curl2d) -> nn.Module:
    return _graph(_Curl(layer), "Curl")


@plain_form.register
def _(layer: GroupLinear) -> nn.Module:
    conv = _conv(layer)
    linear = nn.Linear(layer.in_channels, layer.out_channels, conv.bias is not None)
    state = {
        name: value.flatten(1) if value.ndim > 1 else value
        for name, value in conv.state_dict().items()
    }
    linear.load_state_dict(state, assign=True)
    return linear


@plain_form.register
def _(layer: GroupBatchNorm) -> nn.Module:
    if layer.running_mean is None:
        return _graph(_BatchStatistics(layer), "BatchStatisticsNorm")
    return _channel_norm(layer, layer.fields * layer.group.order)


@plain_form.register
def _(layer: SyncBatchNorm) -> nn.Module:
    tracked = layer.running_mean is not None
    norm = layer.ordinary(
        layer.num_features, layer.eps, layer.momentum, layer.affine, track_running_stats=tracked
    )
    return _with_state(norm, layer, layer.num_features)


@plain_form.register
def _(layer: GroupInstanceNorm) -> nn.Module:
    channels = layer.fields * layer.group.order
    if layer.running_mean is not None:
        return _channel_norm(layer, channels)
    norm = nn.GroupNorm(layer.fields, channels, layer.eps, layer.affine)
    return _with_state(norm, layer, channels)


@plain_form.register
def _(layer: GroupLayerNorm) -> nn.Module:
    return _graph(_PixelNorm(layer), "PixelNorm")


@plain_form.register
def _(layer: GroupGroupNorm) -> nn.Module:
    channels = layer.fields * layer.group.order
    norm = nn.GroupNorm(layer.num_groups, channels, layer.eps, layer.weight is not None)
    return _with_state(norm, layer, channels)


@plain_form.register
def _(layer: GroupPReLU) -> nn.Module:
    channels = layer.fields * layer.group.order
    return _with_state(nn.PReLU(channels), layer, channels)


@plain_form.register
def _(layer: FieldParameter) -> nn.Module:
    return _graph(_Numbers(layer), "Numbers")


@plain_form.register
def _(layer: Spread) -> nn.Module:
    return _graph(_Spread(layer.group.order), "Spread")


@plain_form.register(CentredAvgPool)
@plain_form.register(CentredMaxPool)
def _(layer: CentredAvgPool | CentredMaxPool) -> nn.Module:
    return _graph(_CentredPool(layer), type(layer).__name__)


@plain_form.register
def _(layer: Enlarge) -> nn.Module:
    return _graph(_EnlargeBy(layer), "EnlargeBy")


@plain_form.register
def _(layer: Recentre) -> nn.Module:
    kind = {2: _PointsAboutCentre, 3: _VoxelsAboutCentre}[layer.dimension]
    return _graph(kind(layer.fill), "PointsAboutCentre")


@plain_form.register
def _(layer: NearestResize) -> nn.Module:
    kind = {2: _NearestPixels, 3: _NearestVoxels}[layer.dimension]
    return _graph(kind(), "NearestPixels")


@plain_form.register
def _(layer: GroupPool) -> nn.Module:
    return _graph(_Pool(layer.group.order, layer.statistics), "OrientationPool")


@plain_form.register
def _(layer: GroupDropout) -> nn.Module:
    return nn.Identity()


@plain_form.register
def _(layer: Restrict) -> nn.Module:
    return _graph(_Restrict(layer), "Permute")


@plain_form.register
def _(layer: Downsample) -> nn.Module:
    return _graph(_Halve(layer), "Halve")


@plain_form.register
def _(layer: Upsample) -> nn.Module:
    linear = nn.Upsample(scale_factor=2.0, mode=LINEAR[layer.dimension])
    if layer.antialias == 4:
        return linear
    return nn.Sequential(linear, _graph(_Smooth(layer), "Smooth"))


@plain_form.register
def _(layer: GroupActivation) -> nn.Module:
    return _graph(_Activate(layer), "Activate")


@plain_form.register
def _(layer: GroupUpsampleConv) -> nn.Module:
    return nn.Sequential(plain_form(layer.upsample), plain_form(layer.conv))


def _by_channel(values: Tensor, channels: int) -> Tensor:
    return values.detach().repeat_interleave(channels // values.numel())


def _with_state(norm: nn.Module, layer: nn.Module, channels: int) -> nn.Module:
    """The norm of channels with the state of the norm of fields."""
    state = {
        name: _by_channel(value, channels) if value.ndim else value
        for name, value in layer.state_dict().items()
    }
    norm.load_state_dict(state, assign=True)  # device and dtype come along
    return norm


def _channel_norm(layer: GroupBatchNorm | GroupInstanceNorm, channels: int) -> nn.Module:
    kind = _of_torch("BatchNorm", layer.dimension)
    norm = kind(channels, layer.eps, layer.momentum, layer.affine)
    return _with_state(norm, layer, channels)


class _Fixed(nn.Module):
    """Operations to be traced; buffers hold what is fixed."""

    def __init__(self, **fixed: Tensor | None) -> None:
        super().__init__()
        for name, value in fixed.items():
            self.register_buffer(name, None if value is None else value.detach().clone())


class _BatchStatistics(_Fixed):
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: GroupBatchNorm) -> None:
        shape = (layer.fields, 1, *[1] * layer.dimension)
        scale, bias = (None if p is None else p.view(shape) for p in (layer.weight, layer.bias))
        super().__init__(scale=scale, bias=bias)
        self.order, self.eps = layer.group.order, layer.eps
        self.axes = (0, *range(2, 3 + layer.dimension))

    def forward(self, x: Tensor) -> Tensor:
        fields = x.unflatten(1, (-1, self.order))
        variance, mean = torch.var_mean(fields, self.axes, correction=0, keepdim=True)
        normed = (fields - mean) * torch.rsqrt(variance + self.eps)
        if self.scale is not None:
            normed = normed * self.scale + self.bias
        return normed.flatten(1, 2)


class _PixelNorm(_Fixed):
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: GroupLayerNorm) -> None:
        channels = layer.fields * layer.group.order
        scale, bias = (
            None if p is None else _by_channel(p, channels) for p in (layer.weight, layer.bias)
        )
        super().__init__(scale=scale, bias=bias)
        self.channels, self.eps = channels, layer.eps
        axes = range(2, 2 + layer.dimension)
        self.to_last, self.back = (0, *axes, 1), (0, axes[-1], *(axis - 1 for axis in axes))

    def forward(self, x: Tensor) -> Tensor:
        last = x.permute(self.to_last)
        normed = functional.layer_norm(last, (self.channels,), self.scale, self.bias, self.eps)
        return normed.permute(self.back)


class _Pool(nn.Module):
    def __init__(self, order: int, statistics: tuple[tuple[str, int], ...]) -> None:
        super().__init__()
        self.order, self.statistics = order, statistics

    def forward(self, x: Tensor) -> Tensor:
        return pool_orientations(x, self.order, self.statistics)


class _Recentre(nn.Module):
    """What a centred convolution reads, for every size."""

    def __init__(self, layer: PDOConv) -> None:
        super().__init__()
        self.points, self.axes = layer.points, range(2, 2 + layer.dimension)

    def forward(self, x: Tensor) -> Tensor:
        return points_about_centre(x, *[self.points(x.shape[axis]) for axis in self.axes])


class _Attention(_Fixed):
    weight: Tensor
    places: Tensor

    def __init__(self, layer: GroupAttentionPool) -> None:
        super().__init__(weight=layer.weight, places=layer.places)
        self.order = layer.group.order

    def forward(self, x: Tensor, scores: Tensor | float = 0.0) -> Tensor:
        return weigh(x, self.weight, self.places, self.order, scores)


class _FrameScore(_Fixed):
    weight: Tensor
    frames: Tensor

    def __init__(self, layer: GroupFrameScore2d) -> None:
        super().__init__(weight=layer.weight, frames=layer.frames)
        self.side = layer.side

    def forward(self, x: Tensor) -> Tensor:
        return score(x, self.weight, self.frames, self.side)


class _InFrames(nn.Module):
    """The points that windows fill in the frame of each orientation, for every size."""

    def __init__(self, layer: GroupWindows2d) -> None:
        super().__init__()
        self.points, self.corners = layer.points, layer.corners
        self.fill, self.lifts = layer.fill, layer.lifts

    def forward(self, x: Tensor) -> Tensor:
        given = (self.points(x.shape[2]), self.points(x.shape[3]))
        return points_in_frames(x, self.corners, *given, self.fill, self.lifts)


class _Window(_Fixed):
    """A map read at once: derivatives for every orientation, then one matrix."""

    synthesis: Tensor
    matrix: Tensor
    bias: Tensor | None

    def __init__(self, layer: GroupWindowConv) -> None:
        bias = None if layer.bias is None else _by_channel(layer.bias, layer.out_channels)
        super().__init__(synthesis=layer.synthesis, matrix=layer.weight.flatten(1), bias=bias)
        self.points = layer.points if layer.centred else None
        self.places = layer.places
        self.dimension = layer.dimension

    def forward(self, x: Tensor) -> Tensor:
        if self.points is not None:
            axes = range(2, 2 + self.dimension)
            x = points_about_centre(x, *[self.points(x.shape[axis]) for axis in axes])
        found = functional.linear(jets(x, self.synthesis, self.places), self.matrix)
        found = found.transpose(1, 2).flatten(1)
        if self.bias is not None:
            found = found + self.bias
        for axis in range(self.dimension):
            found = found.unsqueeze(2 + axis)
        return found


class _CentredPool(nn.Module):
    def __init__(self, layer: CentredAvgPool | CentredMaxPool) -> None:
        super().__init__()
        self.pool = layer.pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x, points_about_centre)


class _EnlargeBy(nn.Module):
    def __init__(self, layer: Enlarge) -> None:
        super().__init__()
        self.enlarge = layer.enlarge

    def forward(self, x: Tensor) -> Tensor:
        return self.enlarge(x, points_about_centre)


class _PointsAboutCentre(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        return points_about_centre(x, height, width, fill=self.fill)


class _VoxelsAboutCentre(_PointsAboutCentre):
    def forward(self, x: Tensor, depth: int, height: int, width: int) -> Tensor:  # type: ignore[override]
        return points_about_centre(x, depth, height, width, fill=self.fill)


class _Curl(nn.Module):
    def __init__(self, layer: Curl2d) -> None:
        super().__init__()
        self.spacing, self.padding_mode = layer.spacing, layer.padding_mode

    def forward(self, x: Tensor) -> Tensor:
        return curl(x, self.spacing, self.padding_mode)


class _NearestPixels(nn.Module):
    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        return nearest_pixels(x, height, width)


class _NearestVoxels(nn.Module):
    def forward(self, x: Tensor, depth: int, height: int, width: int) -> Tensor:
        return nearest_pixels(x, depth, height, width)


class _Numbers(_Fixed):
    numbers: Tensor

    def __init__(self, layer: FieldParameter) -> None:
        super().__init__(numbers=layer())

    def forward(self) -> Tensor:
        return self.numbers


class _Spread(nn.Module):
    def __init__(self, order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.order, dim=1)


class _Restrict(_Fixed):
    places: Tensor

    def __init__(self, layer: Restrict) -> None:
        super().__init__(places=layer.places)
        self.order = layer.whole.order

    def forward(self, x: Tensor) -> Tensor:
        by_orientation = x.unflatten(1, (-1, self.order))
        return by_orientation.index_select(2, self.places).flatten(1, 2)


class _Halve(_Fixed):
    taps: Tensor

    def __init__(self, layer: Downsample) -> None:
        super().__init__(taps=layer.taps)
        self.settings = (layer.reduce, layer.antialias, layer.dimension)

    def forward(self, x: Tensor) -> Tensor:
        return halve(x, self.taps, *self.settings)


class _Smooth(_Fixed):
    taps: Tensor

    def __init__(self, layer: Upsample) -> None:
        super().__init__(taps=layer.taps)
        self.settings = (layer.antialias - 3, layer.dimension)

    def forward(self, x: Tensor) -> Tensor:
        return smoothed(x, self.taps, *self.settings)


class _Activate(_Fixed):
    def __init__(self, layer: GroupActivation) -> None:
        super().__init__(**dict(layer.named_buffers(recurse=False)))
        self.names = list(self._buffers)
        self.function = layer.function
        self.settings, self.dimension = (layer.oversample, layer.width), layer.dimension

    def forward(self, x: Tensor) -> Tensor:
        lines = {name: getattr(self, name) for name in self.names}
        return limited(x, self.function, *self.settings, lines, self.dimension)


class _Enlarge(_Fixed):
    """`Upsample2d` to a given size, whose parity enters by arithmetic."""

    taps: Tensor

    def __init__(self, layer: Upsample) -> None:
        super().__init__(**dict(layer.named_buffers()))
        self.count, self.dimension = layer.antialias - 3, layer.dimension

    def forward(self, x: Tensor, size: Any) -> Tensor:
        # One number or several? torch's own function knows.
        wanted = functional.interpolate(x[:, :1], size=size).shape
        axes = range(2, 2 + self.dimension)
        for axis in axes:
            sizes = tuple(wanted[a] if a == axis else x.shape[a] for a in axes)
            x = self._along(x, wanted[axis], sizes)
        return x if self.count == 1 else smoothed(x, self.taps, self.count, self.dimension)

    def _along(self, x: Tensor, length: int, size: tuple[int, ...]) -> Tensor:
        mode = LINEAR[self.dimension]
        on_pixels, between = (
            functional.interpolate(x, size=size, mode=mode, align_corners=corners)
            for corners in (True, False)
        )
        odd = length % 2
        return on_pixels * odd + between * (1 - odd)


# --------------------------------------------------------------------------------- networks


def _is_layer(module: nn.Module) -> bool:
    return plain_form.dispatch(type(module)) is not plain_form.dispatch(object)


def _check_layer(layer: nn.Module) -> None:
    """Refuse a layer that computes something else than its class says."""
    known: Any = next(kind for kind in type(layer).__mro__ if kind in plain_form.registry)
    if type(layer).forward is not known.forward:
        raise ValueError(
            f"expected the forward of {known.__name__}; {type(layer).__name__} has its own: "
            "register its plain form with @plain_form.register, from econv.export"
        )
    if _has_hooks(layer):
        raise ValueError(f"expected no forward hooks, which would be lost, on {layer}")


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _plain(module: nn.Module) -> nn.Module:
    for layer in filter(_is_layer, module.modules()):
        _check_layer(layer)
    if _is_layer(module):
        return plain_form(module).eval().requires_grad_(False)
    if _Tracer().is_leaf_module(module, ""):
        return module
    reason = _optional_arguments(module)
    if reason is None:
        try:
            with followed():
                graph = _Tracer().trace(module)
        except Exception as error:  # a tracer meets code of any kind
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            return _apart(_folded(_with_forms(module, graph)))
    if _ours(module):
        raise ValueError(
            f"expected a network that can be traced; {type(module).__name__}: {reason}"
        )
    warnings.warn(
        f"{type(module).__name__} keeps its class, and its norms are not folded, because its "
        f"forward cannot be traced: {reason}",
        stacklevel=3,
    )
    _replace_layers(module, {})
    return module


def _ours(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == __name__.partition(".")[0]


def _optional_arguments(module: nn.Module) -> str | None:
    """Why a traced network would not take the arguments that this one takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind not in required:
            return f"its argument {str(parameter)!r} is optional"
    return None


def _replace_layers(module: nn.Module, done: dict[int, nn.Module]) -> None:
    """Make what is ours within a module plain, and leave the module itself."""
    for name, child in list(module.named_children()):
        if id(child) not in done:
            if _is_layer(child) or _ours(child):
                done[id(child)] = _plain(child)
            else:
                done[id(child)] = child
                _replace_layers(child, done)
        setattr(module, name, done[id(child)])


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, GroupUpsampleConv):
            return False  # its halves are leaves; the first must see the size
        return _is_layer(m) or super().is_leaf_module(m, module_qualified_name)


def _graph(module: nn.Module, name: str) -> fx.GraphModule:
    with followed():
        return _bare(module, fx.Tracer().trace(module), name)


def _bare(root: nn.Module | dict[str, Any], graph: fx.Graph, name: str) -> fx.GraphModule:
    """A module of the graph, without what remembers where it came from."""
    bare = fx.Graph()
    bare.output(bare.graph_copy(graph, {}))
    for node in bare.nodes:
        node.type = None
        node.meta.clear()
    return fx.GraphModule(root, bare, name).eval().requires_grad_(False)


def _with_forms(module: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The network as a graph of torch's modules and functions."""
    forms: dict[int, nn.Module] = {}  # a layer that is called twice stays one
    targets: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            targets[node.target] = reduce(getattr, node.target.split("."), module)
        elif node.op == "call_function" and node.target is expect:
            node.target = torch._assert
        elif node.op == "call_module":
            layer = module.get_submodule(node.target)
            if _is_layer(layer):
                # Plain forms take what ours take, in the same order, under other names.
                given = inspect.signature(layer.forward).bind(*node.args, **node.kwargs)
                node.args, node.kwargs = tuple(a for a in given.args if a is not None), {}
            if isinstance(layer, Upsample) and len(node.args) > 1:
                node.target += "_to_size"
                layer = _graph(_Enlarge(layer), "Enlarge")
            elif _is_layer(layer):
                form: Callable[[Any], nn.Module] = plain_form
                whole = isinstance(layer, GroupWindowConv)
                if isinstance(layer, PDOConv) and not whole and (steps := _before(layer)):
                    form = _conv
                    # Apart, so that a norm can be folded into the convolution.
                    for done, step in steps.items():
                        targets[name := f"{node.target}_{done}"] = step
                        with graph.inserting_before(node):
                            node.args = (graph.call_module(name, node.args),)
                if id(layer) not in forms:
                    forms[id(layer)] = form(layer)
                layer = forms[id(layer)]
            targets[node.target] = layer
    return _bare(targets, graph, type(module).__name__)


def _folded(network: fx.GraphModule) -> fx.GraphModule:
    """Leave out what does nothing in eval mode, and fold norms into the convolutions before."""
    graph = network.graph
    for node in list(graph.nodes):
        if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
            module = network.get_submodule(node.target)
            if type(module) in _IDLE and not _has_hooks(module):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
    calls = Counter(
        id(network.get_submodule(node.target)) for node in graph.nodes if node.op == "call_module"
    )
    read = {node.target.rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    for node in list(graph.nodes):
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or (node.op, before.op) != ("call_module",) * 2:
            continue
        norm, conv = (network.get_submodule(str(n.target)) for n in (node, before))
        if (
            (type(norm), type(conv)) in _FOLDED
            and norm.running_mean is not None
            and len(before.users) == 1
            and calls[id(norm)] == calls[id(conv)] == 1
            and not {node.target, before.target} & read
            and not _has_hooks(norm)
            and not _has_hooks(conv)
        ):
            network.set_submodule(str(before.target), _joined(conv, norm))
            node.replace_all_uses_with(before)
            graph.erase_node(node)
    network.delete_all_unused_submodules()
    network.recompile()
    return network


_FOLDED = ((nn.BatchNorm2d, nn.Conv2d), (nn.BatchNorm3d, nn.Conv3d))


def _apart(network: fx.GraphModule) -> fx.GraphModule:
    """Give every call of a module without state its own copy: quantisers tell calls by modules."""
    calls: Counter[str] = Counter()
    names = {name for name, _ in network.named_modules()}
    for node in network.graph.nodes:
        if node.op != "call_module":
            continue
        module, name = network.get_submodule(node.target), str(node.target)
        calls[name] += 1
        if calls[name] == 1 or len([*module.children(), *module.state_dict()]):
            continue
        free = (f"{name}_{number}" for number in count(calls[name]))
        node.target = next(new for new in free if new not in names)
        names.add(node.target)
        network.add_submodule(node.target, copy.copy(module))
    network.recompile()
    return network


_IDLE = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def _joined(conv: Any, norm: Any) -> nn.Module:
    """The convolution whose output is what the norm makes of the given one's."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    wide = torch.float64 if conv.weight.device.type != "mps" else torch.float32
    scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    if conv.bias is not None:
        shift = shift + conv.bias * scale
    joined = copy.copy(conv)
    joined._parameters = {
        "weight": nn.Parameter(
            (conv.weight * scale.view(-1, *[1] * (conv.weight.ndim - 1))).to(conv.weight.dtype)
        ),
        "bias": nn.Parameter(shift.to(conv.weight.dtype)),
    }
    plain: nn.Module = joined.requires_grad_(False)
    return plain


# ----------------------------------------------------------------------------------- checks


def _check_no_trace(network: nn.Module) -> None:
    found = [name or "itself" for name, module in network.named_modules() if _ours(module)]
    if isinstance(network, fx.GraphModule):
        for node in network.graph.nodes:
            if node.op == "call_function" and node.target.__module__.partition(".")[0] == "econv":
                found.append(node.target.__name__)
    if found:
        raise ValueError(f"expected layers with a plain form; these have none: {found}")


def _check_equal(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if not isinstance(theirs, Tensor):
            continue
        if not theirs.numel():
            continue
        scale = max(1.0, float(theirs.abs().max()))
        error = float((ours - theirs).abs().max()) / scale
        tolerance = max(1e-5, 16 * torch.finfo(theirs.dtype).eps)
        if not error <= tolerance:
            raise ValueError(
                f"expected the exported network to equal the original to {tolerance:g}; the "
                f"difference is {error:g}: its forward cannot be traced faithfully"
            )
