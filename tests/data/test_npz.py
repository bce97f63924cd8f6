"""Arrays in .npz files: checked like official ones, and never unpickled."""

import dataclasses
import os
import pickle

import numpy as np
import pytest

from econv import data
from econv.data import DataError, npz
from econv.data.sources import SOURCES
from small_data import DAMAGES, OFFICIAL


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
    assert found.unverified is (name != "mnist")  # whose files are known byte for byte


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
def test_recreated_images_are_labelled_and_others_unverified(
    publish, tmp_path, file, says, recreated
):
    arrays = publish("mnist_rot").arrays()
    if says is not None:
        arrays["recreated"] = np.array(says)
    np.savez(tmp_path / file, **arrays)
    found = data.load("mnist_rot", source=tmp_path / file)
    assert found.recreated is recreated
    assert found.unverified


def test_known_recreations_are_recognised_whatever_their_name(publish, tmp_path, monkeypatch):
    arrays = publish("mnist_rot").arrays()
    np.savez(tmp_path / "a.npz", **arrays)
    digest = npz.content_hash(npz.read_npz(tmp_path / "a.npz", "mnist_rot").arrays)
    known = dataclasses.replace(SOURCES["mnist_rot"], recreations=(digest,))
    monkeypatch.setitem(SOURCES, "mnist_rot", known)
    found = data.load("mnist_rot", source=tmp_path / "a.npz")
    assert (found.recreated, found.unverified) == (True, False)
    arrays["test_x"] = 255 - arrays["test_x"]
    np.savez(tmp_path / "a.npz", **arrays)
    found = data.load("mnist_rot", source=tmp_path / "a.npz")
    assert (found.recreated, found.unverified) == (False, True)


def test_other_images_than_the_official_ones_are_unverified(publish, tmp_path):
    arrays = publish("mnist").arrays()
    arrays["test_x"] = 255 - arrays["test_x"]
    np.savez(tmp_path / "a.npz", **arrays)
    assert data.load("mnist", source=tmp_path / "a.npz").unverified
    np.savez(tmp_path / "a.npz", **arrays, recreated=np.array(True))
    found = data.load("mnist", source=tmp_path / "a.npz")
    assert (found.recreated, found.unverified) == (True, True)


@pytest.mark.parametrize("says", ["False", 0, [True], [[False]]])
def test_a_label_that_is_no_truth_value_is_refused(publish, tmp_path, says):
    np.savez(tmp_path / "a.npz", **publish("mnist_rot").arrays(), recreated=np.array(says))
    with pytest.raises(DataError, match=r"a\.npz: expected recreated as one truth value; got"):
        data.load("mnist_rot", source=tmp_path / "a.npz")


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
    "from one": (lambda a: a["train_y"].__iadd__(1), "10 classes from 1 to 10"),
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
