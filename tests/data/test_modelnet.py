"""ModelNet10: meshes to voxels, archives, packed bits, and what is turned."""

import zipfile

import numpy as np
import pytest
import torch

from econv import data
from econv.data import DataError, modelnet
from econv.data.modelnet import CLASSES, read_off, voxels

BOX = [(x, y, z) for x in (0, 1) for y in (0, 2) for z in (0, 4)]
FACES = [(0, 1, 3, 2), (4, 5, 7, 6), (0, 1, 5, 4), (2, 3, 7, 6), (0, 2, 6, 4), (1, 3, 7, 5)]


def off(corners=BOX, faces=FACES, head="OFF\n"):
    lines = [f"{len(corners)} {len(faces)} 0"]
    lines += [" ".join(map(str, corner)) for corner in corners]
    lines += [" ".join(map(str, (len(face), *face))) for face in faces]
    return (head + "\n".join(lines)).encode()


@pytest.mark.parametrize("head", ["OFF\n", "OFF", "OFF\n# made by hand\n"])
def test_a_box_is_read_and_lies_in_the_middle(head):
    points, triangles = read_off(off(head=head), "box.off")
    assert points.tolist() == [list(map(float, corner)) for corner in BOX]
    assert len(triangles) == 2 * len(FACES)
    found = voxels(points, triangles, grid=8, shape=4)
    wanted = np.zeros((8, 8, 8), bool)
    wanted[2:6, 3:5, 3:5] = True  # what is one voxel wide about the centre touches two
    assert np.array_equal(found, wanted)


def test_the_surface_has_no_holes_and_an_empty_inside():
    points, triangles = read_off(
        off([(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)]), "cube"
    )
    found = voxels(points, triangles)
    assert found.sum() == 24**3 - 22**3
    assert found[3:27, 3:27, 3:27].sum() == found.sum()


def test_y_points_up_and_axes_are_z_y_x():
    far = [(0, 0, 0), (0, 8, 0), (0.01, 0, 0)]
    found = voxels(*read_off(off([*far, (8, 0, 0), (8, 0.01, 0)], [(0, 1, 2), (0, 3, 4)]), "L"))
    z, y, x = np.nonzero(found)
    assert set(z) == {15}
    assert (y[x == x.min()].min(), y.max(), x.max()) == (3, 26, 26)
    assert set(y[x > 5]) == {26}  # what lies along x is at the bottom


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"ply", "begins with OFF"),
        (b"OFF 3", "counts"),
        (off()[:-6], "faces"),
        (off(faces=[(0, 1, 9)]), "faces between"),
        (off(corners=[(0, 0, "nan"), *BOX[1:]]), "finite"),
        (b"OFF 3 2 0 0 0 0 1 0 0 0 1 0 3 0 1 2 4 0 1", "end early"),
    ],
)
def test_broken_meshes_are_refused_by_name(text, problem):
    with pytest.raises(DataError, match=f"chair_0001.off: .*{problem}"):
        read_off(text, "chair_0001.off")


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """An archive as ModelNet10.zip is, of three shapes in each class."""
    monkeypatch.setattr(modelnet, "COUNTS", {"train": 20, "test": 10})
    monkeypatch.setattr(modelnet, "VALIDATION", 10)
    path = tmp_path / "ModelNet10.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("ModelNet10/README.txt", "shapes")
        made.writestr("__MACOSX/ModelNet10/bed/train/._bed_0001.off", "no mesh")
        for label, name in enumerate(CLASSES):
            corners = [(x, y * (1 + label / 10), z) for x, y, z in BOX]
            for part, number in (("train", 1), ("train", 2), ("test", 3)):
                made.writestr(f"ModelNet10/{name}/{part}/{name}_{number:04}.off", off(corners))
    return path


def test_an_archive_is_read_once_and_kept_as_bits(archive, tmp_path, capsys):
    found = [data.load("modelnet10_rot", root=tmp_path, source=archive) for _ in range(2)]
    assert capsys.readouterr().err.count("making modelnet10-") == 1
    for one in found:
        assert [len(split) for split in (one.train, one.validation, one.test)] == [10, 10, 10]
        assert one.train.x.shape[1:] == (1, 32, 32, 32)
        assert one.test.y.tolist() == list(range(10)) == sorted(one.train.y.tolist())
        assert one.unverified
    assert torch.equal(found[0].test.x, found[1].test.x)
    assert set(found[0].train.x.unique().tolist()) == {0, 255}


def test_what_is_turned_depends_on_the_name_and_the_seed_alone(archive, tmp_path):
    rot, upright, other = (
        data.load(name, root=tmp_path, source=archive, seed=seed)
        for name, seed in (("modelnet10_rot", 0), ("modelnet10_upright", 0), ("modelnet10_rot", 1))
    )
    assert torch.equal(rot.test.x, upright.test.x)
    assert torch.equal(rot.train.x, upright.train.x)
    assert not torch.equal(rot.validation.x, upright.validation.x)
    assert not torch.equal(rot.test.x, other.test.x)
    assert set(upright.validation.x.unique().tolist()) == {0, 255}
    # A turn keeps the volume, up to what the grid does to surfaces.
    volume = rot.validation.x.double().sum((1, 2, 3, 4)) / upright.validation.x.double().sum(
        (1, 2, 3, 4)
    )
    assert ((volume - 1).abs() < 0.05).all()


def test_other_archives_are_refused(archive, tmp_path):
    with zipfile.ZipFile(archive, "a") as made:
        made.writestr("ModelNet10/bed/test/bed_0009.off", off())
    with pytest.raises(DataError, match="expected 10 shapes for test; got 11"):
        data.load("modelnet10_rot", root=tmp_path, source=archive)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"ModelNet10\.zip; neither is there.*name it"):
        data.load("modelnet10_rot", root=empty)
    archive.write_bytes(b"PK not at all")
    with pytest.raises(DataError, match=r"cannot be read as ModelNet10\.zip"):
        data.load("modelnet10_rot", root=tmp_path, source=archive)
    wrong = tmp_path / "modelnet10_voxels.npz"
    np.savez(wrong, train_x=np.zeros((3, 9), np.uint8))
    with pytest.raises(
        DataError, match=r"expected train_x as uint8 \[20, 3375\]; got uint8 \[3, 9\]"
    ):
        data.load("modelnet10_rot", root=tmp_path, source=wrong)
