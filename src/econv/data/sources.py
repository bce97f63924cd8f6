"""What there is: the official files, their checksums, addresses and numbers of images."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from econv.data.formats import Reader, read_amat, read_cifar, read_idx


@dataclass(frozen=True)
class File:
    """One official file: its checksum, where it is published, and the files inside of it."""

    name: str
    md5: str
    folders: tuple[str, ...]  # addresses without the name
    members: tuple[str, ...]
    member_md5: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What a data set must be, and the files that it is read from."""

    train: int  # validation images included
    validation: int
    test: int
    classes: int
    shape: tuple[int, int, int]  # channels, height, width
    files: tuple[File, ...]
    subfolders: tuple[str, ...]  # where other tools unpack those files
    read: Reader
    keep: bool = False  # what was read, because reading takes long
    recreations: tuple[str, ...] = ()  # SHA-256 of arrays that are known to stand in for these
    number: int = 1  # bytes that a pixel takes in the files, at most

    @property
    def largest(self) -> int:
        """Bytes that a file inside the archives can have: all images, their classes and a head."""
        return max(self.train, self.test) * (math.prod(self.shape) + 2) * self.number + 64

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(member for file in self.files for member in file.members)


_MNIST_FOLDERS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_MNIST_MD5 = {  # compressed, and the content
    "train-images-idx3-ubyte": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "6bbc9ace898e44ae57da46a324031adb",
    ),
    "train-labels-idx1-ubyte": (
        "d53e105ee54ea40749a09fcbcd1e9432",
        "a25bea736e30d166cdddb491f175f624",
    ),
    "t10k-images-idx3-ubyte": (
        "9fb629c4189551a2d022fa330f9573f3",
        "2646ac647ad5339dbf082846283269ea",
    ),
    "t10k-labels-idx1-ubyte": (
        "ec29112dd5afa0611ce80d1b7f02629c",
        "27ae3e4e09519cfbb04c329615203637",
    ),
}

_MNIST_ROT = Source(
    train=12_000,
    validation=2_000,
    test=50_000,
    classes=10,
    shape=(1, 28, 28),
    files=(
        File(
            "mnist_rotation_new.zip",
            "0f9a947ff3d30e95cd685462cbf3b847",
            (
                "https://www.iro.umontreal.ca/~lisa/icml2007data/",
                "http://www.iro.umontreal.ca/~lisa/icml2007data/",
            ),
            (
                "mnist_all_rotation_normalized_float_train_valid.amat",
                "mnist_all_rotation_normalized_float_test.amat",
            ),
        ),
    ),
    subfolders=("mnist_rotation_new",),
    read=read_amat,
    keep=True,
    number=32,
    # Those that the records of the paper's tables were trained on.
    recreations=("6dd0cc6aa2e1cd141dab696a7e7cf1dacc1f35eece20f13690be7cebd4731f06",),
)
_MNIST = Source(
    train=60_000,
    validation=5_000,
    test=10_000,
    classes=10,
    shape=(1, 28, 28),
    files=tuple(
        File(f"{member}.gz", compressed, _MNIST_FOLDERS, (member,), (content,))
        for member, (compressed, content) in _MNIST_MD5.items()
    ),
    subfolders=("mnist", "MNIST/raw"),
    read=read_idx,
)


def _cifar(
    classes: int, label_bytes: int, md5: str, folder: str, members: tuple[str, ...]
) -> Source:
    archive = File(
        f"cifar-{classes}-binary.tar.gz", md5, ("https://www.cs.toronto.edu/~kriz/",), members
    )
    return Source(
        train=50_000,
        validation=2_500,
        test=10_000,
        classes=classes,
        shape=(3, 32, 32),
        files=(archive,),
        subfolders=(folder,),
        read=read_cifar(label_bytes, classes),
    )


SOURCES = {
    "mnist_rot": _MNIST_ROT,
    "mnist_rot_recreated": replace(_MNIST_ROT, files=_MNIST.files),
    "mnist": _MNIST,
    "cifar10": _cifar(
        classes=10,
        label_bytes=1,
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        members=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    ),
    "cifar100": _cifar(
        classes=100,
        label_bytes=2,
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        members=("train.bin", "test.bin"),
    ),
}

NAMES = ("digits", "digits_upright", "modelnet10_rot", "modelnet10_upright", *SOURCES)
"""The data sets that :func:`econv.data.load` knows."""

_CLASSES = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
    "cifar100": "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy "
    "bridge bus butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud "
    "cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl "
    "hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree "
    "motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal "
    "shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper "
    "table tank telephone television tiger tractor train trout tulip turtle wardrobe whale "
    "willow_tree wolf woman worm",
}


def class_names(name: str, count: int) -> tuple[str, ...]:
    """The names of the classes of a data set, in their order; their numbers if they have none.

    >>> class_names("cifar10", 10)[3], class_names("mnist", 10)[3]
    ('cat', '3')
    """
    names = _CLASSES.get(name, "").split()
    return tuple(names) if len(names) == count else tuple(map(str, range(count)))
