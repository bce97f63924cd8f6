"""The moving picture says how much maps change, and both scripts refuse what would mislead."""

import json

import pytest
import torch

moving_picture = pytest.importorskip(
    "moving_picture", reason="no benchmarks or no matplotlib beside the tests"
)
equivariance = pytest.importorskip("equivariance")


def test_still_maps_do_not_change_and_others_do():
    still = torch.rand(1, 3, 26, 26, dtype=torch.float64).expand(4, -1, -1, -1)
    assert moving_picture.changes(still) == [0, 0, 0, 0]
    turned = torch.stack([still[0].rot90(k, (1, 2)) for k in range(4)])
    found = moving_picture.changes(turned)
    assert found[0] == 0
    assert min(found[1:]) > 0.1


def test_what_the_border_reaches_does_not_count():
    maps = torch.rand(1, 2, 26, 26, dtype=torch.float64).repeat(2, 1, 1, 1)
    maps[1, :, 0, 0] += 1
    assert moving_picture.changes(maps) == [0, 0]
    maps[1, :, 13, 13] += 1
    assert moving_picture.changes(maps)[1] > 0


def test_the_fields_that_vary_are_shown():
    maps = torch.zeros(1, 6, 26, 26)
    for place, size in enumerate((0, 5, 0, 3, 9, 1)):
        maps[0, place] = size * torch.rand(26, 26)
    assert moving_picture.most_telling(maps) == [4, 1, 3, 5]
    tiles = moving_picture.tiled(maps.double(), [4, 1, 3, 5])
    assert tiles[0].shape == (2 * 4 * 26, 2 * 4 * 26)


def test_a_picture_that_is_too_large_is_refused(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    noise = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8).numpy()
    pictures = [image.fromarray(noise)] * moving_picture.STEPS
    moving_picture.as_gif(pictures, tmp_path / "a.gif")
    monkeypatch.setattr(moving_picture, "LARGEST", 100)
    with pytest.raises(SystemExit, match="bytes are more than 100"):
        moving_picture.as_gif(pictures, tmp_path / "b.gif")


def test_a_row_of_a_library_goes_into_a_record_that_there_is(tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.json"
    with pytest.raises(SystemExit):
        equivariance.parse(["--add", "e2cnn", "--json", str(file)])
    assert "a record that there is" in capsys.readouterr().err
    record = {"one_layer": {"fields": 1, "group": "p8", "errors": {}, "quarter_turn": {}}}
    file.write_text(json.dumps({**record, "settings": {"seeds": 1}}))

    def exact(library, fields, seed):
        layer = equivariance.random_layer("p8", fields, seed, {"stencils": "central"})
        return lambda x: layer(x).detach()

    monkeypatch.setattr(equivariance, "peer_layer", exact)
    monkeypatch.setattr(equivariance.importlib.metadata, "version", lambda name: "1.2")
    equivariance.add_row("e2cnn", file)
    found = json.loads(file.read_text())
    row = found["one_layer"]["errors"]["e2cnn R2Conv 5×5"]
    assert row == sorted(row, reverse=True)
    assert found["added"]["e2cnn"]["e2cnn"] == "1.2"
    # Channels in another order than ours: quarter turns are off, and nothing is written.
    monkeypatch.setattr(equivariance, "peer_layer", lambda *_: lambda x: x * torch.rand(8, 1, 1))
    with pytest.raises(SystemExit, match="misread"):
        equivariance.add_row("e2cnn", file)
    assert json.loads(file.read_text()) == found
