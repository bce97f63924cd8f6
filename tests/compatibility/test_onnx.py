"""ONNX: networks through torch's current exporter, run by onnxruntime, equal to 1e-5."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from catalogue import CASES, case, run
from econv import Downsample2d, GroupConv2d, GroupDropout2d, LiftConv2d, create_model, export

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter and onnxscript
QUICK = ["every layer", "convnet6"]
GRID = [
    pytest.param(name, train, marks=() if name in QUICK and not train else pytest.mark.slow)
    for name in CASES
    for train in (True, False)
]


def session(module, x, fixed, path):
    """The network in onnxruntime, made from one batch, with dynamic batch and image size."""
    dynamic = {0: torch.export.Dim("batch", min=2)}
    if not fixed:
        dynamic |= {n: torch.export.Dim(side, min=18) for n, side in ((2, "height"), (3, "width"))}
    program = torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=(dynamic,), verbose=False)
    program.save(str(path))
    made = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = made.get_inputs()[0].name
    return lambda x: [torch.from_numpy(y) for y in made.run(None, {name: x.numpy()})]


# torch's exporter writes adaptive pooling for the size that it has seen.
FIXED = ("convnet6", "GroupWindowConv2d", "GroupFrameScore2d")


def assert_runs(name, module, wanted, path, tolerance=1e-5):
    fixed = name in FIXED
    channels = CASES[name][1][1]
    size = (28, 28) if fixed else (20, 21)
    runs = session(module, torch.randn(3, channels, *size), fixed, path)
    for batch, sides in ((3, size), (5, size if fixed else (33, 24))):
        x = torch.randn(batch, channels, *sides)
        for found, exact in zip(runs(x), run(wanted, x), strict=True):
            scale = max(1.0, float(exact.abs().max()))
            assert float((found - exact).abs().max()) <= tolerance * scale


@pytest.mark.parametrize(("name", "train"), GRID)
def test_onnxruntime_computes_the_same(name, train, tmp_path):
    # The exporter writes networks for inference: torch's own batch norms too come out with their
    # running statistics, whatever the mode.
    module, _ = case(name, train, dropout=False)
    assert_runs(name, module, copy.deepcopy(module).eval(), tmp_path / "network.onnx")


@pytest.mark.parametrize("name", ["convnet6", pytest.param("every layer", marks=pytest.mark.slow)])
def test_plain_networks_are_the_same(name, tmp_path):
    module, _ = case(name, train=False)
    assert_runs(name, export(module), module, tmp_path / "plain.onnx")


def test_dropout_in_train_mode_drops_whole_fields(tmp_path):
    module = GroupDropout2d("p4", 0.5).train()
    runs = session(module, torch.ones(3, 64, 20, 20), False, tmp_path / "dropout.onnx")
    (out,) = runs(torch.ones(4, 64, 18, 18))
    fields = out.unflatten(1, (-1, 4)).flatten(2)
    assert np.isin(fields.numpy(), [0.0, 2.0]).all()
    assert (fields == fields[..., :1]).all()
    assert 0.2 < float(fields.mean()) / 2 < 0.8


def test_a_difference_is_noticed(tmp_path):
    module, _ = case("sequential", train=False)
    other = nn.Sequential(copy.deepcopy(module), nn.Hardtanh(-1, 1)).eval()
    with pytest.raises(AssertionError):
        assert_runs("sequential", other, module, tmp_path / "other.onnx")


def test_the_older_exporter_is_told_of_the_other():
    with pytest.raises(ValueError, match=r"dynamo=True.*Downsample2d"):
        torch.onnx.export(Downsample2d(), (torch.randn(1, 2, 8, 8),), dynamo=False)


def test_the_older_exporter_takes_dynamic_sizes_without_it(tmp_path):
    plain = export(nn.Sequential(LiftConv2d(1, 2, "p4"), nn.ReLU(), GroupConv2d(2, 2, "p4")).eval())
    path = tmp_path / "older.onnx"
    names = {"input_names": ["x"], "output_names": ["y"]}
    axes = {"x": {0: "batch", 2: "height", 3: "width"}}
    image = torch.randn(2, 1, 9, 9)
    torch.onnx.export(plain, (image,), str(path), dynamo=False, dynamic_axes=axes, **names)
    made = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = torch.randn(3, 1, 12, 10)
    (found,) = made.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_networks_of_volumes_run(plain, tmp_path):
    torch.manual_seed(0)
    network = create_model("unet_3d_T", fields=(1, 2)).eval()
    volume, path = torch.randn(2, 1, 8, 9, 8), tmp_path / "volumes.onnx"
    given = export(network) if plain else network
    program = torch.onnx.export(given, (volume,), dynamo=True, verbose=False)
    program.save(str(path))
    made = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    other = torch.randn(2, 1, 8, 9, 8)
    (found,) = made.run(None, {made.get_inputs()[0].name: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), network(other), rtol=1e-4, atol=1e-5)
