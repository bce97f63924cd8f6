"""A linter of image sizes: where do the samples of every layer lie symmetrically?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from econv.lab.lie import check_images
from econv.lab.results import Misfit, Sizes
from econv.lab.steps import _Hooks, _watched
from econv.layers import PDOConv

_FAR = 64  # from the given size, at most, in the search for one that fits


def sizes(model: nn.Module, images: Tensor, tried: Iterable[int] | None = None) -> Sizes:
    """For which sizes of square images sampling commutes with quarter turns, and which layer not.

    A window of k pixels that moves by a stride of s covers an image symmetrically on some sizes
    only: where n + 2·padding − k is a multiple of s. On others the samples lie off the centre, and
    a quarter turn moves them. The layers of econv that sample are exact on every size, other than
    convolutions with a stride and without ``centred=True``. Strides, poolings, transposed
    convolutions, padding, slices such as ``x[..., ::2, ::2]`` and resizing are looked at, as
    modules and as functions. The network is run on every size without numbers (on the meta device),
    so that this is about where samples lie; whether filters turn is the business of others.

    Args:
        model: any module of one tensor.
        images: ``[batch, channels, size, size]``, or volumes with a third side; only the shape
            matters.
        tried: the sizes; by default the given one, 8 around it, and further where none of these
            fits.

    Raises:
        ValueError: for images that cannot be turned, and sizes below 1.

    >>> network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2))
    >>> found = sizes(network, torch.zeros(1, 1, 29, 29))
    >>> found.exact, found.below, found.above, found.pattern, found.misfits[0].name
    (False, 28, 30, 'even sizes', '1 (MaxPool2d)')
    """
    volumes = isinstance(images, Tensor) and images.ndim == 5 and images.is_floating_point()
    if not volumes:
        check_images(images)
    if len(set(images.shape[2:])) > 1:
        what = "cubes" if volumes else "square images"
        raise ValueError(f"expected {what} to turn; got {tuple(images.shape[2:])} pixels")
    size, axes = images.shape[-1], images.ndim - 2
    channels, dtype = images.shape[1], images.dtype
    shapes = copy.deepcopy(model).to("meta").eval()
    known: dict[int, list[Misfit] | None] = {}
    try:
        _misfits(shapes, torch.empty(1, channels, *[size] * axes, device="meta", dtype=dtype))
        network, device = shapes, torch.device("meta")
    except Exception:  # a module that needs numbers, or a size on which the model does not run
        network, device = copy.deepcopy(model).eval(), images.device

    def fits(n: int) -> bool:
        if n not in known:
            try:
                with torch.no_grad():
                    x = torch.zeros(1, channels, *[n] * axes, device=device, dtype=dtype)
                    known[n] = _misfits(network, x)
            except Exception:  # too small, or of another size than the model was made for
                known[n] = None
        return known[n] == []

    if tried is None:
        wanted = list(range(max(1, size - 8), size + 9))
    else:
        wanted = sorted(set(tried))
        if not wanted or min(wanted) < 1:
            raise ValueError(f"expected sizes of at least 1 pixel; got {wanted}")
    fits(size)
    for n in wanted:
        fits(n)
    below = next((n for n in sorted(known, reverse=True) if n < size and fits(n)), None)
    above = next((n for n in sorted(known) if n > size and fits(n)), None)
    if tried is None and known[size] is not None:
        if below is None:
            below = _next(range(size - 9, max(0, size - _FAR), -1), fits, known)
        if above is None:
            above = _next(range(size + 9, size + _FAR), fits, known)
    here = known[size]
    return Sizes(
        size,
        None if here is None else not here,
        tuple(here or ()),
        tuple(n for n in wanted if fits(n)),
        _ends([n for n in wanted if known[n] is not None] or wanted),
        below,
        above,
        axes,
    )


def _next(numbers: Iterable[int], fits: Callable[[int], bool], known: dict[int, Any]) -> int | None:
    """The first size that fits, before those on which the model does not run."""
    for n in numbers:
        if fits(n):
            return n
        if known[n] is None:
            return None
    return None


def _ends(numbers: list[int]) -> tuple[int, int]:
    return numbers[0], numbers[-1]


def _misfits(model: nn.Module, x: Tensor) -> list[Misfit]:
    watch = _Geometry(model)
    with torch.no_grad():
        _watched(model, model, x, watch)
    return watch.found


class _Geometry(_Hooks):
    """Where the samples of every step lie; of the user's modules, of the functions they call."""

    functions = _Hooks.functions | {"conv2d", "conv3d", "pad"}

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.found: list[Misfit] = []
        self.given: tuple[Any, Any, dict[str, Any]] = (None, (), {})

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.given = (func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def is_step(self, module: nn.Module) -> bool:
        """Whether a module is looked at as a whole."""
        known = type(module).__module__.startswith(("torch.nn.", "econv.layers."))
        return known and super().is_step(module)

    def ended(
        self, name: str, kind: str, module: nn.Module | None, inputs: Any, output: Tensor
    ) -> Tensor | None:
        read = next((a for a in inputs if isinstance(a, Tensor)), None)
        if read is None or read.ndim not in (4, 5) or output.ndim != read.ndim:
            return None
        _, args, kwargs = self.given
        why = _of_module(module, read, output) if module is not None else None
        if module is None:
            why = _of_function(kind, args, kwargs, read, output)
        if why:
            label = name if module is None else f"{name} ({kind})"
            self.found.append(Misfit(label, read.shape[-1], why))
        return None


def _of_module(module: nn.Module, read: Tensor, output: Tensor) -> str | None:
    if isinstance(module, PDOConv):
        if module.centred:
            return None
        return _windows(read, output, module.extent, module.stride, module.padding, 1)
    if type(module).__module__.startswith("econv.layers"):
        return None
    if isinstance(module, nn.ConvTranspose2d | nn.ConvTranspose3d):
        if any(module.output_padding):
            return f"output_padding={module.output_padding} adds pixels at two sides only"
        return None
    if isinstance(module, _WINDOWS):
        padding = getattr(module, "padding", 0)
        dilation = getattr(module, "dilation", 1)
        if padding == "same":
            odd = _first(dilation) * (_first(module.kernel_size) - 1) % 2
            why = "padding='same' pads even filters by one pixel more at two sides"
            return why if odd else None
        padding = 0 if padding == "valid" else padding
        return _windows(read, output, module.kernel_size, module.stride, padding, dilation)
    if isinstance(module, nn.Upsample):
        return _resized(module.mode, read, output)
    padding = getattr(module, "padding", None)
    if isinstance(padding, tuple) and "Pad" in type(module).__name__:
        return None if padding[::2] == padding[1::2] else f"padding={padding} is not symmetric"
    return None


_WINDOWS = (
    *(nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d),
    *(nn.Conv3d, nn.MaxPool3d, nn.AvgPool3d, nn.LPPool3d),
)
_POOLS = {f"{kind}_pool{d}d" for kind in ("max", "avg", "lp") for d in (2, 3)}


def _of_function(
    name: str, args: Any, kwargs: dict[str, Any], read: Tensor, output: Tensor
) -> str | None:
    if name in _POOLS | {"boolean_dispatch"}:
        names = ("kernel_size", "stride", "padding", "dilation")
        given = dict(zip(names, args[1:], strict=False)) | kwargs
        if "kernel_size" not in given:
            return None
        stride = given.get("stride") or given["kernel_size"]
        dilation = given.get("dilation", 1) if name[:3] in ("max", "boo") else 1
        dilation = dilation if not isinstance(dilation, bool) else 1
        size, padding = given["kernel_size"], given.get("padding", 0)
        return _windows(read, output, size, stride, padding, dilation)
    if name in ("conv2d", "conv3d"):
        of_conv = ("weight", "bias", "stride", "padding", "dilation")
        given = dict(zip(of_conv, args[1:], strict=False)) | kwargs
        size, padding = tuple(given["weight"].shape[2:]), given.get("padding", 0)
        padding = 0 if isinstance(padding, str) else padding
        stride = given.get("stride", 1)
        return _windows(read, output, size, stride, padding, given.get("dilation", 1))
    if name == "pad":
        number = 2 * (read.ndim - 2)
        padding = [*(args[1] if len(args) > 1 else kwargs["pad"]), *[0] * number][:number]
        even = padding[::2] == padding[1::2]
        return None if even else f"padding={tuple(padding)} is not symmetric"
    if name == "interpolate":
        return _resized(str(kwargs.get("mode", "nearest")), read, output)
    if name == "slice":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        for place, part in enumerate(index):
            axis = read.ndim - (len(index) - place) if Ellipsis in index else place
            if not isinstance(part, slice) or axis < 2:
                continue
            start, _, step = part.indices(read.shape[axis])
            last = start + step * (output.shape[axis] - 1)
            if start + last != read.shape[axis] - 1:
                return f"it keeps pixels {start} to {last} of 0 to {read.shape[axis] - 1}"
    return None


def _windows(
    read: Tensor, output: Tensor, size: Any, stride: Any, padding: Any, dilation: Any
) -> str | None:
    """Whether windows of so many pixels lie symmetrically on all axes."""
    for axis in range(read.ndim - 2):
        n, m = read.shape[2 + axis], output.shape[2 + axis]
        k, s, p, d = (_first(value, axis) for value in (size, stride, padding, dilation))
        first, last = -p, -p + s * (m - 1) + d * (k - 1)
        if first + last != n - 1:
            return (
                f"{m} windows of {d * (k - 1) + 1} pixels, {s} apart, reach from {first} to {last} "
                f"and the image from 0 to {n - 1}"
            )
    return None


def _resized(mode: str, read: Tensor, output: Tensor) -> str | None:
    offset = {"nearest": 0, "nearest-exact": 1}.get(mode)
    if offset is None:  # weighs neighbours by their distance
        return None
    for n, m in zip(read.shape[2:], output.shape[2:], strict=True):
        taken = [(2 * j + offset) * n // (2 * m) for j in range(m)]
        if any(a + b != n - 1 for a, b in zip(taken, reversed(taken), strict=True)):
            return f"mode={mode!r} from {n} to {m} pixels takes pixels {taken[0]} to {taken[-1]}"
    return None


def _first(value: Any, axis: int = 0) -> int:
    if isinstance(value, tuple | list):
        return int(value[min(axis, len(value) - 1)])
    return int(value)
