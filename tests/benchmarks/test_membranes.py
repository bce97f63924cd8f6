"""benchmarks/membranes.py: the challenge's scores on pictures whose values are known, its files."""

import argparse
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from econv.data import DataError

membranes = pytest.importorskip("membranes", reason="no benchmarks beside the tests")


def test_one_cell_for_two_halves_has_the_known_scores() -> None:
    truth = np.repeat([[1, 2]], 8, 0).repeat(4, 1)
    assert membranes.agreement(truth, truth) == (1.0, 1.0)
    one = np.ones_like(truth)
    rand, info = membranes.agreement(one, truth)
    # Σp² = ½, Σs² = 1, Σt² = ½; nothing is told apart.
    assert rand == pytest.approx(2 * 0.5 / (1 + 0.5))
    assert info == pytest.approx(0)
    assert membranes.agreement(truth, one) == (rand, pytest.approx(0))


def test_quarters_of_two_halves_have_the_known_scores() -> None:
    truth = np.repeat([[1, 2]], 8, 0).repeat(4, 1)
    quarters = truth + 2 * (np.arange(8) >= 4)[:, None]
    rand, info = membranes.agreement(quarters, truth)
    assert rand == pytest.approx(2 * 0.25 / (0.25 + 0.5))
    assert info == pytest.approx(2 * math.log(2) / (2 * math.log(2) + math.log(2)))


def test_only_the_inside_of_true_cells_counts_and_found_borders_are_single_pixels() -> None:
    truth = np.array([[1, 1, 0, 2, 2]])
    assert membranes.agreement(np.array([[1, 1, 7, 2, 2]]), truth) == (1.0, 1.0)
    rand, _ = membranes.agreement(np.array([[1, 0, 0, 2, 2]]), truth)
    # p: ¼, ¼, ½ of the four pixels; s the same; t: ½, ½.
    assert rand == pytest.approx(2 * (2 / 16 + 1 / 4) / (2 / 16 + 1 / 4 + 1 / 2))
    with pytest.raises(ValueError, match="borders alone"):
        membranes.agreement(truth, 0 * truth)


def test_borders_are_thinned_and_still_part_what_they_parted() -> None:
    pytest.importorskip("skimage")
    inside = np.ones((40, 48), bool)
    inside[:, 20:29] = inside[15:22] = False  # four cells, borders of 9 and 7 pixels to the edge
    thin, thick = membranes.cells_of(inside), membranes.cells_of(inside, thin=False)
    assert thin.max() == thick.max() == 4
    assert (thin == 0).sum() < 48 + 40 + 8 < (thick == 0).sum()
    for number in range(1, 5):
        assert len(np.unique(thin[thick == number])) == 1
    # What has the right cells but for the width of borders is perfect; one hole joins two cells.
    truth = thick > 0
    levels = (membranes.LEVELS * thin.astype(bool)).astype(np.uint8)
    found = membranes.scores_of(levels, truth)
    assert found["v_rand"] == pytest.approx([1.0] * 9)
    assert found["v_info"] == pytest.approx([1.0] * 9)
    assert found["pixel_error"] > 5
    inside[5, 20:29] = True
    joined = membranes.scores_of((membranes.LEVELS * inside).astype(np.uint8), truth)
    assert joined["v_rand"][4] < 0.9


def test_a_row_has_means_and_the_best_threshold() -> None:
    pytest.importorskip("skimage")
    truth = np.ones((2, 24, 24), np.uint8)
    truth[:, :, 11:13] = 0
    levels = np.where(truth, membranes.LEVELS, 13).astype(np.uint8)  # a border at 0.65
    found = membranes.scored({"network": "p8m"}, levels, truth)
    assert found["v_rand"] < found["v_rand_best"] == pytest.approx(1.0)
    assert found["v_rand_threshold"] == 0.7
    assert found["network"] == "p8m"


def tif(pictures: np.ndarray, order: str = "<", stack: bool = False) -> bytes:
    """A file as ImageJ writes it, or one with every picture's own tags."""
    _, height, width = pictures.shape
    content = bytearray((b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 0))
    link = 4
    for number in range(1 if stack else len(pictures)):
        data = pictures.tobytes() if stack else pictures[number].tobytes()
        words = f"ImageJ=1\nimages={len(pictures)}\n\0".encode() if stack else b"none\0"
        start, text = len(content), len(content) + len(data)
        content += data + words
        struct.pack_into(order + "I", content, link, len(content))
        tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1)]
        tags += [(262, 3, 1, 1), (270, 2, len(words), text), (273, 4, 1, start)]
        tags += [(278, 4, 1, height), (279, 4, 1, width * height)]
        content += struct.pack(order + "H", len(tags))
        for tag, kind, count, value in tags:
            content += struct.pack(order + "HHI", tag, kind, count)
            content += (
                struct.pack(order + "HH", value, 0)
                if kind == 3
                else struct.pack(order + "I", value)
            )
        link = len(content)
        content += struct.pack(order + "I", 0)
    return bytes(content)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("stack", [False, True])
def test_official_files_are_read(tmp_path: Path, order: str, stack: bool) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (3, 6, 8), np.uint8)
    labels = 255 * random.integers(0, 2, (3, 6, 8)).astype(np.uint8)
    for name, pictures in zip(membranes.FILES, (images, labels), strict=True):
        (tmp_path / name).write_bytes(tif(pictures, order, stack))
    x, y = membranes.load(tmp_path)
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, labels // 255)
    again = membranes.load(tmp_path / membranes.FILES[0])
    np.testing.assert_array_equal(again[1], y)


def test_pillow_reads_what_the_test_writes(tmp_path: Path) -> None:
    pictures = pytest.importorskip("PIL.Image", reason="no Pillow")
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 8), np.uint8)
    (tmp_path / "a.tif").write_bytes(tif(images))
    with pictures.open(tmp_path / "a.tif") as found:
        np.testing.assert_array_equal(np.asarray(found), images[0])


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train-volume\.tif is missing: get it from https"):
        membranes.load(tmp_path)
    whole = tif(np.zeros((1, 4, 4), np.uint8))
    for content in (
        b"",
        b"GIF89a",
        whole[:30],
        whole.replace(b"\x03\x01\x03\0", b"\x03\x01\x04\0"),
    ):
        (tmp_path / membranes.FILES[0]).write_bytes(content)
        with pytest.raises(DataError, match=r"train-(volume|labels)\.tif"):
            membranes.load(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 4, 4)))
    with pytest.raises(DataError, match="cannot read x and y"):
        membranes.load(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 4, 4), np.uint8), y=np.full((1, 4, 4), 255))
    with pytest.raises(DataError, match="cells 0 or 1"):
        membranes.load(tmp_path / "a.npz")


def test_folds_test_every_image_once_and_never_train_on_it() -> None:
    found = membranes.folds(30)
    assert sorted(np.concatenate([test for _, test in found])) == list(range(30))
    for train, test in found:
        assert len(train) == 24
        assert len(test) == 6
        assert not set(train) & set(test)


def test_both_networks_have_about_as_many_parameters() -> None:
    ours, twin = (membranes.size_of(membranes.network_of(name)) for name in ("p8m", "CNN"))
    assert 0.95 < ours / twin < 1.05


@pytest.mark.parametrize("turned", [False, True])
def test_crops_take_image_and_cells_from_the_same_place(turned: bool) -> None:
    y = (torch.rand(3, 1, 40, 40) < 0.5).float()
    y = y.repeat_interleave(8, 2).repeat_interleave(8, 3)
    generator = torch.Generator().manual_seed(0)
    images, cells = membranes.crops(y, y, turned, generator, 64)
    assert images.shape == (membranes.BATCH, 1, 64, 64)
    same = ((images[:, 0] > 0.5) == (cells == 1)).float().mean()
    assert same > (0.97 if turned else 0.9999)
    straight = images[(images > 0.01) & (images < 0.99)].numel()
    assert (straight > 0) is turned  # without a turn, pixels are those of the image


def test_a_run_is_scored_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("skimage")
    random = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        x=random.integers(0, 256, (10, 40, 40), np.uint8),
        y=(random.random((10, 40, 40)) < 0.8).astype(np.uint8),
    )
    common = ["membranes.py", "--data", str(tmp_path / "a.npz"), "--rows", str(tmp_path / "rows")]
    common += ["--quiet", "--device", "cpu", "--json", str(tmp_path / "a.json")]
    own = ["--counts", "2", "--folds", "0", "--steps", "2", "--crop", "32"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", [*common, *own])
        membranes.main()
    assert capsys.readouterr().out.count(" s\n") == 4
    monkeypatch.setattr(sys, "argv", [*common, "--score"])
    membranes.main()
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert len(rows) == 4
    assert all(0 <= row["v_rand"] <= row["v_rand_best"] <= 1 for row in rows)
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", [*common, "--draw", str(tmp_path / "a.png")])
    membranes.main()
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_parts_share_all_runs() -> None:
    options = argparse.Namespace(folds=[0, 1], counts=[2, 5], networks=["CNN", "p8m"], part="1/1")
    whole = membranes.wanted(options)
    parts = []
    for part in ("1/3", "2/3", "3/3"):
        options.part = part
        parts += membranes.wanted(options)
    assert sorted(parts) == sorted(whole)
    options.part = "4/3"
    with pytest.raises(SystemExit, match="expected --part"):
        membranes.wanted(options)
