"""Small data sets, random ones and ones published as the official ones are."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import torch

from econv.data import Dataset, Split
from econv.data.sources import SOURCES

OFFICIAL = ("mnist_rot", "mnist", "cifar10", "cifar100")
COUNTS = {
    "mnist_rot": (60, 20, 40),
    "mnist": (80, 20, 20),
    "cifar10": (100, 20, 20),
    "cifar100": (300, 100, 100),
}
DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "one bit": lambda c: c[: len(c) // 2] + bytes([c[len(c) // 2] ^ 4]) + c[len(c) // 2 + 1 :],
    "longer": lambda content: content + b"x",
    "empty": lambda content: b"",
    "a page": lambda content: b"<html>404</html>",
}


def md5(content):
    return hashlib.md5(content).hexdigest()


def images_and_classes(name, count, seed):
    random = np.random.default_rng(seed)
    source = SOURCES[name]
    x = random.integers(0, 256, (count, *source.shape), dtype=np.uint8)
    return x, np.arange(count) % source.classes


def amat(x, y):
    lines = io.StringIO()
    np.savetxt(lines, np.column_stack([x.reshape(len(x), -1) / 255, y]), fmt="%.7g")
    return lines.getvalue().encode()


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


def members_of(name, train, test):
    """The content of every official file inside the archives."""
    (train_x, train_y), (test_x, test_y) = train, test
    names = SOURCES[name].members
    if name == "mnist_rot":
        return dict(zip(names, [amat(*train), amat(*test)], strict=True))
    if name == "mnist":
        arrays = (train_x[:, 0], train_y, test_x[:, 0], test_y)
        return dict(zip(names, map(idx, arrays), strict=True))
    labels = 1 if name == "cifar10" else 2

    def records(x, y):
        columns = [y[:, None]] * labels + [x.reshape(len(x), -1)]
        if labels == 2:
            columns[0] = y[:, None] // 5
        return np.concatenate(columns, 1).astype(np.uint8)

    parts = np.split(records(*train), 5) if name == "cifar10" else [records(*train)]
    return {n: p.tobytes() for n, p in zip(names, [*parts, records(*test)], strict=True)}


def packed(file, members):
    """The official archive's bytes."""
    if file.endswith(".zip"):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return stream.getvalue()
    if file.endswith(".tar.gz"):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for name, content in members.items():
                entry = tarfile.TarInfo(f"some-folder/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return stream.getvalue()
    (content,) = members.values()
    return gzip.compress(content)


class Published:
    """A small data set published as the official one is, and expected by `load` in its place."""

    def __init__(self, name, folder, monkeypatch):
        train, validation, test = COUNTS[name]
        self.name, self.folder = name, folder
        folder.mkdir()
        self.train = images_and_classes(name, train, seed=1)
        self.test = images_and_classes(name, test, seed=2)
        self.members = members_of(name, self.train, self.test)
        files = []
        for file in SOURCES[name].files:
            inside = {m: self.members[m] for m in file.members}
            content = packed(file.name, inside)
            (folder / file.name).write_bytes(content)
            digests = tuple(md5(self.members[m]) for m in file.members if file.member_md5)
            address = (f"{folder.as_uri()}/",)
            files.append(replace(file, md5=md5(content), folders=address, member_md5=digests))
        self.files = tuple(files)
        source = replace(
            SOURCES[name], train=train, validation=validation, test=test, files=self.files
        )
        self.monkeypatch = monkeypatch
        monkeypatch.setitem(SOURCES, name, source)

    def at(self, *addresses):
        """Publish the same files at other addresses."""
        files = tuple(replace(file, folders=addresses) for file in self.files)
        source = replace(SOURCES[self.name], files=files)
        self.monkeypatch.setitem(SOURCES, self.name, source)

    def unpack(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.members.items():
            (folder / name).write_bytes(content)
        return folder

    def arrays(self):
        named = dict(zip(("train_x", "train_y"), self.train, strict=True))
        named |= dict(zip(("test_x", "test_y"), self.test, strict=True))
        for key in ("train_x", "test_x"):
            named[key] = named[key].transpose(0, 2, 3, 1)
        return named

    def check(self, dataset):
        """The images and classes are those published, each in one split."""
        train, validation, test = COUNTS[self.name]
        assert [len(dataset.train), len(dataset.validation), len(dataset.test)] == [
            train - validation,
            validation,
            test,
        ]
        assert np.array_equal(dataset.test.x.numpy(), self.test[0])
        assert np.array_equal(dataset.test.y.numpy(), self.test[1])
        published = {x.tobytes(): int(y) for x, y in zip(*self.train, strict=True)}
        for split in (dataset.train, dataset.validation):
            for x, y in zip(split.x.numpy(), split.y.tolist(), strict=True):
                assert published.pop(x.tobytes()) == y
        assert not published
        assert dataset.name == self.name
        assert dataset.classes == SOURCES[self.name].classes


def random_split(count=12, channels=3, size=5, classes=4, seed=0):
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, (count, channels, size, size + 1), dtype=np.uint8)
    return Split(torch.from_numpy(x), torch.arange(count) % classes)


def random_dataset():
    return Dataset.of("random", *(random_split(seed=s) for s in range(3)), classes=4)
