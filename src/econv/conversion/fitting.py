"""Weights that are fitted to images: what the converted network gives, to what the source gives.

The converted network runs once on all images. Before a layer is reached its weight is set: by least
squares of its output in the frame of the images against the output of the source's layer, from what
the converted network itself feeds it. What the layers before it cannot express is made good where
it can be. No labels are asked for, and nothing is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from econv.conversion.fit import Kept
from econv.conversion.plan import Plan, PlannedModule
from econv.layers import (
    GroupAttentionPool2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupFrameScore2d,
    GroupUpsampleConv,
    LiftConv2d,
    PDOConv2d,
)

__all__ = ["MOST", "fit_on_images"]

MOST = 512
"""So many images are fitted to; others are there to be counted."""

_ROWS = 20_000
"""About so many pixels of a layer's output are looked at."""

_EXACT = 1e-3
"""A layer that misses so little, relative to its deviation, stays as it is."""

_FEW = 16
"""On so many images that is seen."""

_RIDGE = 1e-3
"""How much the filter-wise fit counts against the images, relative to the mean square feature."""

_ROWS_UPRIGHT = 3072
"""So many orientations of images are told apart, all together."""

_RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
_SHARPEST = tuple(2.0**n for n in range(-1, 9))
_OBSERVED = (_BatchNorm, nn.Conv2d, nn.Linear, nn.ConvTranspose2d)
_NUMBERS = 1 << 24
"""Numbers that are held at once, about."""


class Moments(NamedTuple):
    """What a norm of the source read on the images."""

    mean: Tensor
    variance: Tensor
    norm: Any


class Target(NamedTuple):
    """What a layer of the source gave on the images."""

    output: Tensor
    """Of some of its pixels, ``[images, channels, pixels]``."""
    pixels: Tensor
    """Which ones."""


def fit_on_images(
    plan: Plan,
    kept: Kept,
    network: nn.Module,
    modules: dict[str, nn.Module],
    source: nn.Module,
    images: Tensor,
) -> dict[str, float]:
    """Fit a converted network to its source on images, which are upright as those in training.

    Returns:
        The misfit of each layer: what is left of its output, relative to its deviation.
    """
    images = images[:MOST]
    targets, moments = _observed(plan, source, images)
    fits: dict[str, float] = {}
    handles: dict[str, Any] = {}

    seen: dict[str, Tensor] = {}

    def before(name: str, part: PlannedModule) -> Callable[..., Any]:
        def fit(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            handles.pop(name).remove()  # what is called twice is fitted to its first call
            x, found = inputs[0].detach(), None
            if isinstance(module, GroupFrameScore2d):
                seen[name] = module.features(x)
            elif isinstance(module, GroupAttentionPool2d):
                return inputs[0], _attend(module, x, name)
            elif isinstance(module, GroupBatchNorm2d) and name in moments:
                _match_moments(module, x, moments[name], kept.channels(part.into))
            elif isinstance(module, PDOConv2d) and name in targets:
                channels = kept.channels(part.out)
                found = _as_it_is(module, x, targets[name], channels)
                if found is None or found > _EXACT:
                    found = _fit_convolution(module, x, targets[name], channels)
            elif isinstance(module, nn.Conv2d | nn.Linear) and name in targets:
                found = _fit_read_out(module, x, targets[name])
            if found is not None:
                fits[name] = found
            return None

        return fit

    def _attend(module: GroupAttentionPool2d, x: Tensor, name: str) -> Tensor | float:
        """Fit what weighs orientations, and score them anew."""
        scores = plan.scores.get(name, [])
        others: list[Any] = [(modules[score], seen.pop(score)) for score in scores]
        _find_upright(module, x, others)
        found = [(given * score.weight).sum((2, 3)) for score, given in others]
        return torch.stack(found).sum(0) if found else 0.0

    for name, part in plan.parts.items():
        fitted = _fitted(modules[name])
        if fitted is not None and not part.kept:
            handles[name] = fitted.register_forward_pre_hook(before(name, part))
    modes = {module: module.training for module in network.modules()}
    try:
        with torch.no_grad():
            network.eval()(images)
    finally:
        for handle in handles.values():
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return fits


def _fitted(layer: nn.Module) -> nn.Module | None:
    """The module in a part of the network that can be fitted."""
    if isinstance(layer, GroupUpsampleConv):
        return layer.conv
    kinds = (
        *(PDOConv2d, GroupBatchNorm2d, GroupAttentionPool2d, GroupFrameScore2d),
        *(nn.Conv2d, nn.Linear),
    )
    return next((module for module in layer.modules() if isinstance(module, kinds)), None)


def _observed(
    plan: Plan, source: nn.Module, images: Tensor
) -> tuple[dict[str, Target], dict[str, Moments]]:
    """What the source's layers give and its norms read, at their first call."""
    run = copy.deepcopy(source, {id(p): p for p in source.parameters()}).eval()
    targets: dict[str, Target] = {}
    moments: dict[str, Moments] = {}
    generator = torch.Generator().manual_seed(0)

    def watch(name: str, module: nn.Module) -> Callable[..., None]:
        def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if name in targets or name in moments or not isinstance(output, Tensor):
                return
            if isinstance(module, _BatchNorm):
                x = inputs[0].transpose(0, 1).flatten(1).double()
                moments[name] = Moments(x.mean(1), x.var(1, correction=0), module)
                return
            maps = output.unsqueeze(-1).flatten(2)
            number = min(maps.shape[2], max(1, -(-_ROWS // len(maps))))
            pixels = torch.randperm(maps.shape[2], generator=generator)[:number].sort().values
            targets[name] = Target(maps[:, :, pixels.to(maps.device)], pixels)

        return after

    inside = dict(run.named_modules())  # a function that stands for a module is not among them
    for name, part in plan.parts.items():
        found = part.source
        if name in inside and isinstance(found, _OBSERVED):
            inside[name].register_forward_hook(watch(name, found))
    with torch.no_grad():
        run(images)
    return targets, moments


# One layer


def _as_it_is(layer: PDOConv2d, x: Tensor, target: Target, channels: Tensor) -> float | None:
    """The misfit of a layer with the weight that it has, on a few of the images."""
    order = layer.group.order
    wanted = target.output[:_FEW]
    if wanted.shape[1] <= int(channels.max()) or x.ndim != 4:
        return None
    wanted = wanted[:, channels.to(x.device)]
    found = layer.forward(x[:_FEW])[:, ::order].flatten(2)  # without hooks
    if found.shape[1] != wanted.shape[1] or found.shape[2] <= int(target.pixels.max()):
        return None
    left = (found[:, :, target.pixels.to(x.device)] - wanted).double()
    spread = (wanted - wanted.mean((0, 2), keepdim=True)).double().norm()
    return float(left.norm() / spread) if spread > 0 else None


def _fit_convolution(layer: PDOConv2d, x: Tensor, target: Target, channels: Tensor) -> float | None:
    """Set a layer's weight, in the frame of the images; its other orientations follow."""
    lifts = isinstance(layer, LiftConv2d)
    if not (lifts or isinstance(layer, GroupConv2d)) or not isinstance(layer.padding_mode, str):
        return None
    order = layer.group.order
    x = layer.read(x if x.ndim == 4 else x[:, :, None, None])
    if not lifts:
        x = x[:, ::order]
    padding, mode = layer.padding, layer.padding_mode
    if padding:
        name = "constant" if mode == "zeros" else mode
        x = functional.pad(x, [padding] * 4, mode=name)
    step = 1 if layer.extent == 1 and not padding else layer.stride
    synthesis = layer.synthesis[:, 0].reshape(len(layer.basis.operators), -1)
    if target.output.shape[1] <= int(channels.max()):
        return None
    wanted = target.output[:, channels.to(x.device)]
    blocks, own = layer.groups, layer.weight if lifts else layer.weight[:, :, 0]
    start = own.detach().double().flatten(1).unflatten(0, (blocks, -1))  # [blocks, out, in * ops]
    problem = _Ridge(start)
    each = max(1, _NUMBERS // (x.shape[1] * layer.basis.size**2 * wanted.shape[2]))
    for part, rows in zip(x.split(each), wanted.split(each), strict=True):
        if not part.numel():
            continue
        patches = functional.unfold(part, layer.basis.size, layer.dilation, 0, step)
        if patches.shape[2] <= int(target.pixels.max()):
            return None  # it gives fewer pixels than the source
        patches = patches[:, :, target.pixels.to(x.device)].unflatten(
            1, (blocks, -1, synthesis.shape[1])
        )
        features = torch.einsum("nbfkp,sk->bnpfs", patches, synthesis)
        problem.add(
            features.flatten(3).flatten(1, 2),
            rows.unflatten(1, (blocks, -1)).permute(1, 0, 3, 2).flatten(1, 2),
        )
    weight, bias, misfit = problem.solve(_RIDGE)
    own.copy_(weight.flatten(0, 1).view_as(own))
    if layer.bias is not None:
        layer.bias.copy_(bias.flatten())
    return misfit


class _Ridge:
    """Least squares with an offset, drawn towards a first guess: rows are added, then solved for.

    ``start`` is ``[blocks, outputs, features]``: blocks are problems of their own.
    """

    def __init__(self, start: Tensor) -> None:
        self.start = start
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.gram: Tensor | None = None
        self.count = 0

    def add(self, features: Tensor, outputs: Tensor) -> None:
        """Rows ``[blocks, rows, features]`` and what is wanted of them."""
        self.rows.append((features, outputs))
        if sum(a.shape[1] for a, _ in self.rows) > features.shape[2]:
            self._reduce()

    def _products(self) -> Tensor:
        if self.gram is None:
            raise ValueError("expected rows before a solution; got none")
        return self.gram

    def _reduce(self) -> None:
        """Products of the rows in place of the rows."""
        for features, outputs in self.rows:
            one = torch.ones_like(features[..., :1])
            joined = torch.cat([features, outputs, one], 2)
            product = (joined.transpose(1, 2) @ joined).double()
            self.gram = product if self.gram is None else self.gram + product
            self.count += features.shape[1]
        self.rows = []

    def solve(self, ridge: float) -> tuple[Tensor, Tensor, float]:
        """Weights ``[blocks, outputs, features]``, offsets and the misfit."""
        self._reduce()
        n = self.start.shape[2]
        whole = self._products() / self.count
        means = whole[:, -1, :-1]
        moments = whole[:, :-1, :-1] - means[:, :, None] * means[:, None]
        features, mixed, outputs = moments[:, :n, :n], moments[:, :n, n:], moments[:, n:, n:]
        scale = features.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None]
        damped = features + ridge * scale * torch.eye(n, dtype=features.dtype, device=whole.device)
        missing = mixed - features @ self.start.transpose(1, 2)
        weight = self.start + torch.linalg.solve(damped, missing).transpose(1, 2)
        bias = means[:, n:] - torch.einsum("bof,bf->bo", weight, means[:, :n])
        spread = outputs.diagonal(dim1=1, dim2=2).sum()
        left = spread - 2 * (weight * mixed.transpose(1, 2)).sum()
        left += ((weight @ features) * weight).sum()
        return weight, bias, float((left / spread).clamp_min(0).sqrt()) if spread > 0 else 0.0


def _match_moments(layer: GroupBatchNorm2d, x: Tensor, moments: Moments, channels: Tensor) -> None:
    """Let a norm give the mean and deviation that the source's gives, in the frame of the images.

    Its statistics are those of all orientations, as in training; scale and bias make up for it.
    """
    mean, variance, source = moments
    if layer.running_mean is None or layer.running_var is None or source.running_mean is None:
        return
    if not layer.affine:
        return
    apart = x.unflatten(1, (layer.fields, -1)).double()
    own = apart[:, :, 0].transpose(0, 1).flatten(1)
    whole = apart.transpose(0, 1).flatten(1)
    chosen = channels.to(x.device)
    scale = (source.running_var.double() + source.eps).rsqrt()
    if source.weight is not None:
        scale = scale * source.weight.double()
    shift = -scale * source.running_mean.double()
    if source.bias is not None:
        shift = shift + source.bias.double()
    wanted = (scale * mean + shift)[chosen]
    ratio = (variance[chosen] / own.var(1, correction=0).clamp_min(1e-12)).sqrt().clamp_max(10)
    gain = scale[chosen] * ratio
    layer.running_mean.copy_(whole.mean(1))
    layer.running_var.copy_(whole.var(1, correction=0))
    layer.weight.copy_(gain * (layer.running_var.double() + layer.eps).sqrt())
    layer.bias.copy_(wanted + gain * (layer.running_mean.double() - own.mean(1)))


def _fit_read_out(layer: nn.Conv2d | nn.Linear, x: Tensor, target: Target) -> float | None:
    """Set the weight of a layer that reads pooled features; ridge by leaving out each image."""
    if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
        return None
    maps = x.unsqueeze(-1).flatten(2)
    if maps.shape[2] <= int(target.pixels.max()) or maps.ndim != 3 or x.ndim not in (2, 4):
        return None
    maps = maps[:, :, target.pixels.to(x.device)]
    features = maps.transpose(1, 2).flatten(0, 1).double()
    wanted = target.output.transpose(1, 2).flatten(0, 1).double()
    if wanted.shape[1] != layer.weight.shape[0]:
        return None
    start = layer.weight.detach().double().flatten(1)
    weight, bias = _regression(features, wanted, start)
    layer.weight.copy_(weight.view_as(layer.weight))
    if layer.bias is not None:
        layer.bias.copy_(bias)
    left = features @ weight.T + bias - wanted
    spread = (wanted - wanted.mean(0)).norm()
    return float(left.norm() / spread) if spread > 0 else 0.0


def _regression(features: Tensor, wanted: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Ridge regression towards a first guess; the ridge leaves the least when rows are left out."""
    middle, mean = features.mean(0), wanted.mean(0)
    centred = features - middle
    missing = wanted - mean - centred @ start.T
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    scale = values.square().mean().clamp_min(1e-30)
    seen = left.T @ missing
    best: tuple[float, Tensor] | None = None
    for ridge in _RIDGES:
        shrunk = values.square() / (values.square() + ridge * scale)
        rest = missing - left @ (shrunk[:, None] * seen)
        leverage = (left.square() @ shrunk + 1 / len(left)).clamp_max(0.999)
        score = float((rest / (1 - leverage)[:, None]).square().sum())
        if best is None or score < best[0]:
            solution = right.T @ ((values / (values.square() + ridge * scale))[:, None] * seen)
            best = (score, start + solution.T)
    assert best is not None
    weight = best[1]
    return weight, mean - weight @ middle


class Upright:
    """What tells the frame of the images from others: its features, orientation by orientation."""

    def __init__(self, images: int, order: int) -> None:
        self.number, self.order = images, order
        self.rows: list[Tensor] = []
        self.deviations: list[Tensor] = []

    def add(self, features: Tensor) -> None:
        """Features ``[images, order, …]`` of each orientation in its own frame."""
        rows = features[: self.number].flatten(2).flatten(0, 1).double()
        rows = rows - rows.mean(0)
        variance = rows.square().mean(0)
        # What hardly varies is not blown up; all maps weigh alike, however many numbers they have.
        deviation = (variance + 1e-2 * variance.mean() + 1e-12).sqrt() * rows.shape[1] ** 0.5
        self.rows.append(rows / deviation)
        self.deviations.append(deviation)

    def weights(self) -> list[Tensor]:
        """Of each of the features, whose weighted sum is largest in the frame of the images.

        A ridge regression of +1 in that frame, and of what makes the sum zero in the others. How
        strong the ridge is, and how sharply the scores then differ, is found on images that were
        left out.
        """
        rows = torch.cat(self.rows, 1)
        wanted = torch.full((self.order,), -1 / (self.order - 1), dtype=rows.dtype)
        wanted[0] = 1.0
        wanted = wanted.to(rows.device).repeat(len(rows) // self.order)
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        values = values.clamp_min(0)
        seen = vectors.T @ wanted
        best: tuple[float, Tensor] | None = None
        for ridge in _RIDGES:
            damped = values + ridge * values.mean()
            dual = vectors @ (seen / damped)
            out = _left_out(vectors, damped, dual, wanted, self.order)
            for sharpness in _SHARPEST:
                score = float((out * sharpness).log_softmax(1)[:, 0].mean())
                if best is None or score > best[0]:
                    best = (score, sharpness * dual)
        assert best is not None
        return [a.T @ best[1] / b for a, b in zip(self.rows, self.deviations, strict=True)]


def _find_upright(
    layer: GroupAttentionPool2d, x: Tensor, others: Sequence[tuple[GroupFrameScore2d, Tensor]] = ()
) -> None:
    """Let the frame of the images stand out among the orientations.

    ``others`` score maps beside the layer's own input, of which the features are given.
    """
    order = layer.group.order
    if order == 1:
        return
    features = x.unsqueeze(-1).flatten(2).mean(2).unflatten(1, (-1, order))
    found = Upright(min(len(x), max(2, _ROWS_UPRIGHT // order)), order)
    found.add(features[:, :, layer.places.to(x.device)].transpose(1, 2))  # [n, A, f, k]
    for _, given in others:
        found.add(given)
    modules = (layer, *(score for score, _ in others))
    for module, weight in zip(modules, found.weights(), strict=True):
        own = module.get_parameter("weight")
        own.copy_(weight.view_as(own))


def _left_out(vectors: Tensor, damped: Tensor, dual: Tensor, wanted: Tensor, order: int) -> Tensor:
    """The scores of every image from all the others, ``[images, order]``."""
    apart = vectors.unflatten(0, (-1, order))
    own = torch.einsum("nav,nbv->nab", apart / damped, apart)
    missed = torch.linalg.solve(own, dual.unflatten(0, (-1, order)))
    return wanted.unflatten(0, (-1, order)) - missed
