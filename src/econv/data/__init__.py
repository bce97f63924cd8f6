"""Data sets: official files with checksums, the embedded default, batches that live on the device.

A data set is three splits of images in memory, on any device. Where the images come from (a
package, a download, a folder, an archive of arrays) is settled in :func:`load`, once. What is not
the expected file is refused there, and what no checksum vouches for is called unverified. Random
numbers are keyed: they depend on the seed, the epoch and the sample alone, never on the batch, the
process or the device. This package knows nothing of models and training.

The modules: `splits`, what a data set is; `keyed`, random numbers; `augmentation`; `formats`, bytes
to arrays; `sources`, the official files and their checksums; `archives`, `npz` and `download`, how
files are read and got; `official`, all of these together; `dividing`, who is held out; `digits`,
`recreated` and `modelnet`, what is turned; `loading`, a data set by its name.
"""

from econv.data.augmentation import PADDINGS, Augmentation, prepare
from econv.data.errors import DataError
from econv.data.keyed import keyed_bits, keyed_uniform, permutation
from econv.data.loading import cache_folder, load
from econv.data.sources import NAMES, class_names
from econv.data.splits import Dataset, Split, fingerprint, normalise

__all__ = [
    "NAMES",
    "PADDINGS",
    "Augmentation",
    "DataError",
    "Dataset",
    "Split",
    "cache_folder",
    "class_names",
    "fingerprint",
    "keyed_bits",
    "keyed_uniform",
    "load",
    "normalise",
    "permutation",
    "prepare",
]
