"""MNIST-rot made from MNIST: labelled, and the same every time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from econv import data
from econv.data import DataError, recreated
from econv.data.digits import turned
from econv.data.sources import SOURCES


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
    assert (first.seed, other.seed) == (0, 1)


def test_what_is_kept_says_what_it_is_wherever_it_is_copied(mnist, tmp_path, monkeypatch):
    made = data.load("mnist_rot_recreated", source=mnist.folder)
    assert not made.unverified
    (kept,) = (tmp_path / "cache" / "derived").iterdir()
    (tmp_path / "a.npz").write_bytes(kept.read_bytes())
    monkeypatch.setitem(SOURCES, "mnist_rot", SOURCES["mnist_rot_recreated"])
    for name in ("mnist_rot", "mnist_rot_recreated"):
        found = data.load(name, source=tmp_path / "a.npz")
        assert (found.name, found.recreated, found.unverified) == (name, True, True)
        assert all(map(torch.equal, all_images(found), all_images(made)))


def test_a_recreation_can_stand_under_the_name_of_the_original(mnist):
    found = data.load("mnist_rot", source=mnist.folder, recreated=True)
    made = data.load("mnist_rot_recreated", source=mnist.folder)
    assert (found.name, found.recreated, found.unverified) == ("mnist_rot", True, False)
    assert all(map(torch.equal, all_images(found), all_images(made)))
    for name in ("cifar10", "digits", "mnist_rot_recreated"):
        with pytest.raises(ValueError, match=f"expected recreated with one of .*; got '{name}'"):
            data.load(name, recreated=True)


def test_a_recreation_is_as_unverified_as_its_source(mnist, tmp_path):
    arrays = mnist.arrays()
    arrays["test_x"] = 255 - arrays["test_x"]
    np.savez(tmp_path / "a.npz", **arrays)
    found = data.load("mnist_rot_recreated", source=tmp_path / "a.npz")
    assert (found.recreated, found.unverified) == (True, True)


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
        assert found.seed is None
        with pytest.raises(DataError, match=r"made before: expected MNIST's own files .* seed 1"):
            data.load("mnist_rot_recreated", source=source, seed=1)
    (tmp_path / "made" / "mnist_rot_recreated.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match="cannot be read"):
        data.load("mnist_rot_recreated", source=tmp_path / "made")
