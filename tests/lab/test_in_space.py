"""The laboratory, the command and the page, on volumes."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

import econv
from econv import lab
from econv.cli import main
from econv.page import SLICES, STEPS, _of_space, page
from econv.testing import rotate, smooth_field, transform


def network(group="T", stride=1, plain=False):
    torch.manual_seed(0)
    options = {"engine": "dense"}
    return nn.Sequential(
        econv.LiftConv3d(1, 1, group, stride=stride, **options),
        nn.Conv3d(12, 12, 1) if plain else econv.GroupBatchNorm3d(1, group), nn.ReLU(),
        econv.GroupConv3d(1, 2, group, **options), econv.GroupPool3d(group),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 3),
    ).double().eval()  # fmt: skip


def volumes(size=9, batch=1):
    return smooth_field(size, batch=batch, dimension=3, smoothness=1.5)


def test_every_layer_is_exact_at_the_symmetries_of_the_cube():
    table = lab.layer_errors(network(), volumes())
    assert table.names == ("180° about x", "180° about y", "120° about (1, 1, 1)")
    assert [layer.kind for layer in table.layers][:5] == ["regular"] * 4 + ["scalar"]
    assert max(max(layer.errors) for layer in table.layers) < 1e-12
    assert max(error.relative for error in table.output) < 1e-12


def test_what_does_not_turn_is_named():
    table = lab.layer_errors(network(plain=True), volumes())
    assert "1 (Conv3d)" in table.unknown
    assert table.blame is not None
    assert not table.blame.strided
    assert lab.layer_errors(network(stride=2), volumes(8)).blame.strided


def test_elements_of_other_angles_stand_for_their_kind():
    group = econv.Group("I")
    names = [group.element_name(element) for element in lab.telling_elements(group)]
    assert names[:3] == ["180° about x", "180° about y", "120° about (1, 1, 1)"]
    assert {name.split("°")[0] for name in names[3:]} == {"72", "120", "144", "180"}
    assert lab.telling_elements("p8") == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("name", ["O", "Oh", "Th", "D4h", "I", "C4v"])
def test_all_symmetries_of_the_grid_are_products_of_a_few(name):
    group = econv.Group(name)
    reached = {0}
    while True:
        more = {int(group.product[a, b]) for a in reached for b in (0, *group.grid_generators)}
        if more == reached:
            break
        reached = more
    assert reached == set(group.grid_symmetries)
    assert len(group.grid_generators) <= 4


def test_an_element_is_named_by_its_angle_axis_and_mirror():
    group = econv.Group("Oh")
    for element, matrix in enumerate(group.matrices):
        name = group.element_name(element)
        determinant = np.linalg.det(matrix)
        assert (determinant < 0) == ("mirrored" in name or "inverted" in name)
        if "about" in name and determinant > 0:
            angle = np.degrees(np.arccos((np.trace(matrix) - 1) / 2))
            assert float(name.split("°")[0]) == pytest.approx(angle)
    names = [group.element_name(element) for element in range(group.order)]
    assert len(set(names)) == group.order


def test_volumes_turn_about_z_by_angles():
    volume = volumes(5)
    assert torch.equal(rotate(volume, 90), transform(volume, "C4", 1))
    torch.testing.assert_close(rotate(volume, 45), transform(volume, "C8", 1), rtol=0, atol=1e-12)


def test_the_angle_curve_turns_volumes_about_z():
    images = lab.windowed(volumes())
    curve = lab.angle_curve(network("C4"), images, [0, 30, 90])
    assert curve.errors[2] < 1e-12 < curve.errors[1]
    with pytest.raises(ValueError, match="no group features"):
        lab.angle_curve(network()[:4], images)


def test_sources_are_told_apart_in_space():
    strided = lab.error_sources(network(stride=2), volumes(12), 4)
    assert strided.sampling > 0.9
    assert lab.error_sources(network(stride=2), volumes(13), 4).exact


def test_the_twin_has_ordinary_convolutions_of_volumes():
    twin = lab.plain_twin(network())
    assert type(twin[0]) is nn.Conv3d
    assert type(twin[1]) is nn.BatchNorm3d
    assert lab.layer_errors(twin, volumes(), "T").output[0].relative > 1e-4


def test_windows_fade_volumes_outside_of_their_ball():
    faded = lab.windowed(torch.ones(1, 1, 9, 9, 9))
    assert faded[0, 0, 0, 0].abs().max() == 0
    assert faded[0, 0, 4, 4, 4] == 1
    assert torch.equal(faded, faded.transpose(2, 4))


def test_sizes_of_volumes_are_linted():
    source = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.MaxPool3d(2))
    found = lab.sizes(source, torch.zeros(1, 1, 9, 9, 9))
    assert (found.exact, found.below, found.above, found.pattern) == (False, 8, 10, "even sizes")
    assert "does not fit 9×9×9 voxels: 1 (MaxPool3d) reads 9 voxels" in lab.size_verdict(found)
    padded = nn.Sequential(nn.ConstantPad3d((0, 0, 0, 0, 0, 1), 0.0), nn.Conv3d(1, 2, 3))
    assert "is not symmetric" in lab.sizes(padded, torch.zeros(1, 1, 8, 8, 8)).misfits[0].why


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((6, 7, 8), (1, 1, 6, 7, 8)),
        ((2, 6, 7, 8), (1, 2, 6, 7, 8)),
        ((5, 6, 7, 8), (5, 1, 6, 7, 8)),
        ((6, 7, 8, 3), (1, 3, 6, 7, 8)),
        ((5, 2, 6, 7, 8), (5, 2, 6, 7, 8)),
        ((2, 6, 7, 8, 3), (2, 3, 6, 7, 8)),
    ],
)
def test_volumes_are_read_from_arrays(shape, wanted):
    assert lab.load_images(np.zeros(shape, np.float32), dimension=3).shape == wanted


def test_volumes_of_files_are_cut_to_cubes(tmp_path):
    np.save(tmp_path / "scan.npy", np.random.default_rng(0).random((6, 9, 12)))
    assert lab.load_images(tmp_path, dimension=3, size=4, square=True).shape == (1, 1, 4, 4, 4)
    with pytest.raises(ValueError, match=r"expected cubes, .* has 6×9×12 pixels"):
        lab.load_images(tmp_path, dimension=3, square=True)
    with pytest.raises(ValueError, match="volumes of 3 to 5 dimensions"):
        lab.load_images(np.zeros((4, 4)), dimension=3)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 1, 8, 8), r"volumes as a float tensor \[batch, channels, depth"),
        (torch.zeros(1, 1, 6, 8, 8).double(), "volumes with equal sides .* got 6×8×8"),
    ],
)
def test_other_inputs_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        lab.layer_errors(network("O")[:1] if x.ndim == 4 else network(), x)


def test_an_oblong_volume_is_checked_where_nothing_swaps_its_sides():
    flow = nn.Sequential(econv.LiftConv3d(1, 1, "D2", engine="dense"), nn.ReLU()).double()
    table = lab.layer_errors(flow, torch.randn(1, 1, 5, 6, 7, dtype=torch.float64))
    assert max(max(layer.errors) for layer in table.layers) < 1e-12


# The command and its page

MODEL = """
import torch
from torch import nn
import econv

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        econv.LiftConv3d(1, 1, "T", engine="dense"), nn.ReLU(), econv.GroupPool3d("T"),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(1, 3))
"""


def test_the_command_measures_volumes(capsys, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    np.save(tmp_path / "scans.npy", np.random.default_rng(0).random((5, 10, 9, 9)))
    given = ["check", f"{tmp_path / 'model.py'}:make", "--images", str(tmp_path / "scans.npy")]
    json_file = tmp_path / "check.json"
    found = main([*given, "--size", "9", "--tolerance", "1e-4", "--json", str(json_file)])
    printed = capsys.readouterr()
    assert (found, printed.err) == (0, "")
    assert "T, 4 volumes of 9×9×9 voxels" in printed.out
    assert "120° about (1, 1, 1)∗" in printed.out
    assert "Sampling fits 9×9×9 voxels" in printed.out
    record = json.loads(json_file.read_text())
    assert record["images"][2:] == [9, 9, 9]
    assert len(record["angles"]["angles"]) == STEPS[3]
    assert record["lie"] is None


def test_the_command_refuses_volumes_that_are_no_cubes(capsys, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    np.save(tmp_path / "scan.npy", np.zeros((10, 9, 9)))
    model = f"{tmp_path / 'model.py'}:make"
    assert main(["check", model, "--images", str(tmp_path / "scan.npy")]) == 2
    assert "expected cubes" in capsys.readouterr().err


def test_the_words_of_space_leave_names_of_layers_alone():
    names = "<code>discriminator.pixel_shuffle</code>, disc.pixels.0"
    said = _of_space(f"{names}: the disc of pixels, off the pixel grid. GroupConv2d(size=7)")
    assert said == f"{names}: the ball of voxels, off the voxel grid. GroupConv2d(size=5)"


def test_the_page_has_a_slice_of_every_angle():
    model, given = network(), volumes(8)
    text = page(model, given)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert (len(data["angles"]), data["slices"]) == (STEPS[3], SLICES)
    assert data["depths"][0] == "slice 1 of 8"
    assert data["depths"][-1] == "slice 8 of 8"
    assert 'id="slice"' in text
    assert [a for a, exact in zip(data["angles"], data["exact"], strict=True) if exact] == [0, 180]
    errors = dict(zip(data["angles"], data["errors"]["ours"], strict=True))
    assert errors[180] < 1e-6 < errors[90]
    for word in ("8×8×8 voxels", "about z", "inscribed ball"):
        assert word in text
    assert "inscribed disc" not in text
    with pytest.raises(ValueError, match="expected cubes"):
        page(model, torch.zeros(1, 1, 8, 8, 9))
