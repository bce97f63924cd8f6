"""Official files: read exactly, wherever they are, or refused by name."""

import gzip
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from econv import data
from econv.data import DataError, formats
from econv.data.sources import SOURCES
from small_data import (
    DAMAGES,
    OFFICIAL,
    md5,
    members_of,
    packed,
)


@pytest.mark.parametrize("name", OFFICIAL)
def test_archives_in_a_folder_are_read(publish, name):
    published = publish(name)
    found = data.load(name, source=published.folder)
    published.check(found)
    assert not found.recreated
    assert not found.unverified


@pytest.mark.parametrize("name", OFFICIAL)
def test_unpacked_files_are_read(publish, tmp_path, name):
    published = publish(name)
    found = data.load(name, source=published.unpack(tmp_path / "unpacked"))
    published.check(found)
    assert found.unverified is (name != "mnist")  # whose checksums are of the files themselves


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


@pytest.mark.parametrize("name", ["mnist_rot", "cifar10", "cifar100"])
def test_other_images_in_unpacked_files_are_unverified_and_that_is_said_once(
    publish, tmp_path, name, capsys, monkeypatch
):
    published = publish(name)
    (train_x, train_y), (test_x, test_y) = published.train, published.test
    members = members_of(name, (255 - train_x, train_y), (255 - test_x, test_y))
    monkeypatch.setattr(published, "members", members)
    folder = published.unpack(tmp_path / "unpacked")
    assert all(data.load(name, source=folder).unverified for _ in range(2))
    assert capsys.readouterr().err.count(f"{name} from {folder}: unverified, no checksum") == 1
    assert not data.load(name, source=published.folder).unverified
    assert "unverified" not in capsys.readouterr().err


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
    with np.load(kept) as archive:
        arrays = dict(archive)
    arrays["test_y"] = arrays["test_y"][::-1]  # another file, whole in itself
    np.savez(kept, **arrays)
    published.check(data.load("mnist_rot", source=published.folder))
    assert len(calls) == 6


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
