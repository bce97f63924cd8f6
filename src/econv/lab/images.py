"""Images to check with: files, folders and arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from econv.arrays import open_npz, read_npy
from econv.engines.problem import times

_PIXELS = 1 << 26
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".npy", ".npz")


def load_images(
    source: str | Path | Sequence[str | Path] | npt.NDArray[Any] | Tensor,
    channels: int | None = None,
    *,
    square: bool = False,
    limit: int | None = None,
    size: int | None = None,
    dimension: int = 2,
) -> Tensor:
    """Images as a float tensor ``[n, channels, height, width]``; bytes become 0 … 1.

    Args:
        source: a file (picture, ``.npy`` or ``.npz``), several files, a folder of them, with or
            without a subfolder for each class, an array or a tensor. Arrays may be ``[h, w]``,
            ``[h, w, c]``, ``[c, h, w]``, ``[n, h, w]``, ``[n, c, h, w]`` or ``[n, h, w, c]``;
            channels are looked for among 1 to 4.
        channels: how many the model reads; any number by default.
        square: whether quarter turns will be asked for.
        limit: take so many only: of subfolders as many from each.
        size: cut the square in the middle of each image out and resize it to so many pixels;
            needed where images are of several sizes.
        dimension: 3 for volumes ``[n, channels, depth, height, width]``, of arrays alone: those
            have a depth before the height. ``square`` and ``size`` then mean cubes.

    Raises:
        ValueError: for a file that is missing or holds no images, images of several sizes, and
            images that the model does not read.
        ImportError: for pictures, without pillow and without matplotlib.

    >>> load_images(np.zeros((28, 28), dtype=np.uint8)).shape
    torch.Size([1, 1, 28, 28])
    """
    if isinstance(source, Tensor | np.ndarray):
        named = [("the array", _as_images(source, "the array", dimension))]
    else:
        paths = [Path(source)] if isinstance(source, str | Path) else [Path(p) for p in source]
        found_paths = _image_paths(paths, limit)
        named = [(str(p), _read_images(p, channels, dimension)) for p in found_paths]
    if size is not None:
        named = [(name, _resized(found, size)) for name, found in named]
    first, rest = named[0], named[1:]
    for name, found in rest:
        if found.shape[1:] != first[1].shape[1:]:
            raise ValueError(
                f"expected images of one size: {first[0]} has "
                f"{_size_text(first[1])}, {name} has {_size_text(found)}; a size to resize them to "
                "(--size) makes them alike"
            )
    images = torch.cat([found for _, found in named])[:limit]
    if images.numel() == 0:
        raise ValueError(f"expected at least one image; {first[0]} has none")
    if channels is not None and images.shape[1] != channels:
        raise ValueError(
            f"expected images of {channels} channel{'s' * (channels != 1)}, which the model reads; "
            f"{first[0]} has {images.shape[1]}"
        )
    if square and len(set(images.shape[2:])) > 1:
        whole, cut = ("square images", "square") if dimension == 2 else ("cubes", "to cubes")
        raise ValueError(
            f"expected {whole}, which quarter turns map onto themselves; {first[0]} has "
            f"{times(images.shape[2:])} pixels; a size (--size) cuts them {cut}"
        )
    if not bool(torch.isfinite(images).all()):
        raise ValueError(f"expected finite numbers; {first[0]} has NaN or infinity")
    return images


def windowed(images: Tensor, start: float = 0.7) -> Tensor:
    """The images with everything outside of the inscribed disc (of volumes the ball) faded to zero.

    Turning such an image loses no corner, so that what remains is the error of the model. The fade
    begins at the fraction ``start`` of the disc's radius.

    >>> windowed(torch.ones(1, 1, 9, 9))[0, 0, 0, 0].item()
    0.0
    """
    sides = images.shape[2:]
    lines = [torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in sides]
    squares = sum(line**2 for line in torch.meshgrid(*lines, indexing="ij"))
    radius = torch.sqrt(torch.as_tensor(squares)) / (min(sides) / 2)
    fade = torch.clamp((radius - start) / (1 - start), 0, 1)
    # The polynomial from 0 to 1 with four derivatives that vanish at both ends: a kink in any of
    # them would be seen by the stencils.
    rise = fade**5 * (126 - fade * (420 - fade * (540 - fade * (315 - fade * 70))))
    return images * (1 - rise).to(images)


def _resized(images: Tensor, size: int) -> Tensor:
    """The square in the middle, or the cube, of so many pixels along each side."""
    side = min(images.shape[2:])
    square = images
    for axis, length in enumerate(images.shape[2:], 2):
        square = square.narrow(axis, (length - side) // 2, side)
    if side == size:
        return square
    if images.ndim == 4:
        return functional.interpolate(square, (size, size), mode="bilinear", antialias=True)
    if size < side:  # means, where torch has no antialiasing
        return functional.adaptive_avg_pool3d(square, size)
    return functional.interpolate(square, (size,) * 3, mode="trilinear")


def _in_folder(folder: Path) -> list[Path]:
    """Its images and those of its subfolders, one of each folder in turn."""
    by_folder: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in IMAGE_FILES and not hidden and path.is_file():
            by_folder.setdefault(path.parent, []).append(path)
    turns = itertools.zip_longest(*by_folder.values())
    return [path for turn in turns for path in turn if path is not None]


def _image_paths(paths: Sequence[Path], limit: int | None) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}")
        if path.is_dir():
            inside = _in_folder(path)
            if not inside:
                raise ValueError(
                    f"no images in the folder {path} or below it: expected {', '.join(IMAGE_FILES)}"
                )
            found += inside
        else:
            found.append(path)
    if not found:
        raise ValueError("expected at least one image file")
    return found[:limit]


def _read_images(path: Path, channels: int | None, dimension: int) -> Tensor:
    try:
        if path.suffix.lower() == ".npy":
            return _as_images(read_npy(path), str(path), dimension)
        if path.suffix.lower() == ".npz":
            with open_npz(path) as archive:
                if len(archive.names) != 1:
                    raise ValueError(f"expected one array; found {archive.names}")
                return _as_images(archive.read(archive.names[0]), str(path), dimension)
        if dimension != 2:
            raise ValueError("expected volumes as .npy or .npz")
        picture = _as_images(_read_picture(path), str(path), dimension)
        # Folders of photographs have grey ones among them.
        grey = picture.shape[1] == 1 and channels == 3
        return picture.expand(-1, 3, -1, -1).contiguous() if grey else picture
    except ImportError:
        raise
    except Exception as error:  # decoders raise what they like
        text = str(error)
        named = text.startswith(str(path))
        raise ValueError(text if named else f"cannot read {path}: {text}") from None


def _read_picture(path: Path) -> npt.NDArray[Any]:
    try:
        from PIL import Image
    except ImportError:
        try:
            from matplotlib.image import imread
        except ImportError:
            raise ImportError(
                f"reading {path} needs pillow or matplotlib: pip install 'econv[plot]', or give "
                "the images as a .npy file"
            ) from None
        return np.asarray(imread(path))
    with Image.open(path) as picture:
        if math.prod(picture.size) > _PIXELS:  # before any of them is decoded
            raise ValueError(f"expected at most {_PIXELS} pixels; got {picture.size}")
        if picture.mode in ("P", "LA", "PA", "RGBA", "CMYK"):
            picture = picture.convert("L" if picture.mode == "LA" else "RGB")
        elif picture.mode == "1":
            picture = picture.convert("L")
        return np.asarray(picture)


def _as_images(source: npt.NDArray[Any] | Tensor, name: str, dimension: int) -> Tensor:
    if isinstance(source, np.ndarray):
        if source.dtype.kind not in "fiub":
            raise ValueError(f"{name}: expected an array of numbers; got {source.dtype}")
        native = source.astype(source.dtype.newbyteorder("="))
        if native.dtype.kind == "u" and native.dtype.itemsize > 1:
            native = native.astype(np.float64) / np.iinfo(source.dtype).max
        x = torch.from_numpy(np.ascontiguousarray(native))
    else:
        x = source.detach().cpu()
        if x.is_complex():
            raise ValueError(f"{name}: expected real numbers; got {x.dtype}")
    if x.dtype == torch.uint8:
        x = x.float() / 255
    elif x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    more = x.ndim - dimension
    last = more >= 1 and x.shape[-1] in (1, 3, 4)
    if more == 0:
        x = x[None, None]
    elif more == 1 and x.shape[0] <= 4:
        x = x[None]
    elif more == 1:
        x = x.movedim(-1, 0)[None] if last else x[:, None]
    elif more == 2:
        x = x.movedim(-1, 1) if last and x.shape[1] > 4 else x
    else:
        what = "images" if dimension == 2 else "volumes"
        raise ValueError(
            f"{name}: expected {what} of {dimension} to {dimension + 2} dimensions; "
            f"got {tuple(x.shape)}"
        )
    return x.contiguous()


def _size_text(images: Tensor) -> str:
    channels, *sides = images.shape[1:]
    return f"{channels} channel{'s' * (channels != 1)} of {times(sides)} pixels"
