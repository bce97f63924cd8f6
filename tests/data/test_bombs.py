"""Files that say or hold more than they may: refused before memory is taken, nothing is written."""

import gzip
import io
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from econv import data
from econv.arrays import Npz, open_npz, read_npy
from econv.data import DataError, archives, digits, formats
from econv.lab.images import load_images

MB = 1 << 20


@contextmanager
def sparing(most: int = 16) -> Iterator[None]:
    """Fails where a block takes more megabytes than that at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most * MB, f"{peak / MB:.0f} MB"


def head(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    """What stands before an array in NumPy's files."""
    stream = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()


def archive(path: Path, arrays: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, content in arrays.items():
            whole.writestr(f"{name}.npy", content)
    return path


def huge(head: bytes, megabytes: int) -> bytes:
    """An ``.npz`` whose one array is deflated to a thousandth."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    parts, checksum = [deflate.compress(head)], zlib.crc32(head)
    for _ in range(megabytes):
        parts.append(deflate.compress(bytes(MB)))
        checksum = zlib.crc32(bytes(MB), checksum)
    body = b"".join([*parts, deflate.flush()])
    size, name = len(head) + megabytes * MB, b"train_y.npy"
    about = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, checksum, len(body), size, len(name), 0)
    local = b"PK\3\4" + about + name + body
    central = b"PK\1\2\x14\0" + about + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    end = struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)
    return local + central + b"PK\5\6" + end


@pytest.mark.parametrize(
    "claimed", ["7 TB", "7 TB of labels", "negative", "too much", "a longer head"]
)
def test_an_array_that_says_it_is_huge_is_refused(publish, tmp_path, claimed):
    published = publish("mnist")
    arrays = {}
    for name, array in published.arrays().items():
        stream = io.BytesIO()
        np.save(stream, array)
        arrays[name] = stream.getvalue()
    arrays |= {
        "7 TB": {"train_x": head((7 << 40,))},
        "7 TB of labels": {"train_y": head((7 << 37,), "<i8")},
        "negative": {"train_y": head((-1, -80), "<i8")},
        "too much": {"train_y": arrays["train_y"] + bytes(64 * MB)},
        "a longer head": {"train_y": b"\x93NUMPY\2\0" + struct.pack("<I", 1 << 31) + b"{"},
    }[claimed]
    path = archive(tmp_path / "a.npz", arrays)
    with sparing(), pytest.raises(DataError, match=r"a\.npz: (cannot be read|expected)"):
        data.load("mnist", source=path)


def test_an_array_that_is_huge_is_not_unpacked(publish, tmp_path):
    count = 64 * MB
    (tmp_path / "a.npz").write_bytes(huge(head((count,)), 64))
    with sparing(), open_npz(tmp_path / "a.npz") as found:
        assert isinstance(found, Npz)
        assert found.head("train_y").shape == (count,)
        with pytest.raises(
            ValueError, match=f"expected train_y of at most {MB} bytes; got {count}"
        ):
            found.read("train_y", MB)
    publish("mnist")
    with pytest.raises(DataError, match="train_x, test_x, test_y missing"):
        data.load("mnist", source=tmp_path / "a.npz")


def test_a_compressed_file_is_unpacked_as_far_as_it_may_be(publish, tmp_path):
    published = publish("mnist")
    path = published.folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(64 * MB)))
    with (
        sparing(),
        pytest.raises(DataError, match=r"train-images-idx3-ubyte of at most \d+ bytes; got more"),
    ):
        data.load("mnist", source=published.folder)
    (tmp_path / digits.FILE).write_bytes(gzip.compress(b"1," * 32 * MB))
    with sparing(48), pytest.raises(DataError, match="expected text with MD5"):
        data.load("digits", source=tmp_path)


def test_a_line_without_an_end_is_not_waited_for(tmp_path):
    (tmp_path / "a").write_bytes(b"0.5 " * 10_000)
    read: list[int] = []

    class Endless(io.RawIOBase):
        def read(self, size=-1):
            read.append(size)
            return b"0.5 " * 10_000

    with pytest.raises(formats.WrongMemberError, match="expected lines of at most"):
        formats.read_amat(lambda name: Endless(), ["a", "a"])
    assert len(read) == 1


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0
) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size = kind, link, size
    return found


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([entry("train.bin", tarfile.SYMTYPE, "/etc/passwd")], "expected one train.bin .* got 0"),
        ([entry("train.bin", tarfile.LNKTYPE, "../secret")], "expected one train.bin .* got 0"),
        ([entry("train.bin", tarfile.FIFOTYPE)], "expected one train.bin .* got 0"),
        ([entry("train.bin", size=64 * MB)], "expected train.bin of at most 1000 bytes; got more"),
        ([entry("a/train.bin", size=4), entry("b/train.bin", size=4)], "got more"),
    ],
)
def test_links_devices_and_floods_in_archives_are_refused(tmp_path, entries, problem):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as whole:
        for found in entries:
            whole.addfile(found, io.BytesIO(bytes(found.size)) if found.size < MB else Zeros())
    with sparing(), pytest.raises((KeyError, ValueError), match=problem):
        archives.read_tar(path, ["train.bin"], 1000)


class Zeros(io.RawIOBase):
    def read(self, size=-1):
        return bytes(size)


def test_paths_in_archives_lead_nowhere(tmp_path):
    path = tmp_path / "inside" / "a.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as whole:
        for name in ("../out.bin", "/../../train.bin"):
            whole.addfile(entry(name, size=4), io.BytesIO(b"abcd"))
    assert archives.read_tar(path, ["train.bin"], 1000) == {"train.bin": b"abcd"}
    assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == ["a.tar.gz"]


def test_pictures_and_arrays_to_check_with_are_bounded_too(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a.npy").write_bytes(head((7 << 40,)))
    archive(tmp_path / "b.npz", {"x": head((7 << 40,))})
    with (
        sparing(),
        pytest.raises(ValueError, match=r"a\.npy: expected \d+ bytes, as it says; got 128"),
    ):
        load_images(tmp_path / "a.npy")
    with sparing(), pytest.raises(ValueError, match=r"b\.npz: x says that it has"):
        load_images(tmp_path / "b.npz")
    picture = io.BytesIO()
    image.new("1", (8, 8)).save(picture, "png")
    content = bytearray(picture.getvalue())
    content[16:24] = struct.pack(">II", 9000, 9000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    (tmp_path / "c.png").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"c\.png: expected at most \d+ pixels; got \(9000, 9000\)"
    ):
        load_images(tmp_path / "c.png")


def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.arange(6).reshape(3, 2).T,
        "c": np.array("x"),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    with open_npz(tmp_path / "a.npz") as found:
        for name, array in arrays.items():
            assert np.array_equal(found.read(name), array)
    np.save(tmp_path / "a.npy", arrays["b"])
    assert np.array_equal(read_npy(tmp_path / "a.npy"), arrays["b"])
