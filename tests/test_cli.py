"""The command: what it prints, what it writes, and one clear line for what it cannot check."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import econv
from econv import GroupBatchNorm2d, GroupConv2d, GroupPool2d, LiftConv2d
from econv.cli import main

MODEL = """
import torch
from torch import nn
from econv import *

def make(stride=1, group="p4"):
    torch.manual_seed(0)
    return nn.Sequential(
        LiftConv2d(1, 2, group, stride=stride), GroupBatchNorm2d(2, group), nn.ReLU(),
        GroupConv2d(2, 2, group), GroupPool2d(group), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(2, 3))

def strided(): return make(2)
def eighths(): return make(1, "p8")
def fails(): raise RuntimeError("no data")
def nothing(): return None
def plain(): return nn.Conv2d(1, 3, 3)
def mixed(): return nn.Sequential(LiftConv2d(1, 1, "p8"), GroupPool2d("p8"), LiftConv2d(1, 1, "p6"))
def three(): return LiftConv2d(3, 1, "p4")
def middle(): return GroupConv2d(2, 3, "p4")
def vectors(): return VectorConv2d(2, 1, "p4")
def half(): return nn.Sequential(LiftConv2d(1, 2, "p2"), nn.ReLU(), GroupConv2d(2, 2, "p2"))
def cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
def read_out(): return nn.Sequential(LiftConv2d(1, 2, "p4"), nn.Flatten(), nn.LazyLinear(3))
def broken():
    return nn.Sequential(LiftConv2d(1, 2, "p8"), nn.Conv2d(16, 16, 1), GroupConv2d(2, 2, "p8"))
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = make()
    def forward(self, x): return self.module(x)
ready = make()
number = 3
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a slow machine stderr would say how far it is, which has tests of its own."""
    monkeypatch.setattr("econv.progress._SAID", float("inf"))


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


QUICK = ("--skip", "lie", "split", "advice", "sizes")  # for tests of the rest


def run(capsys, *arguments: object, why: bool = False) -> str:
    code = main(["check", *map(str, arguments), *(() if why else QUICK)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def refused(capsys, *arguments: object) -> str:
    code = main(["check", *map(str, arguments)])
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("econv check: ")
    assert err.count("\n") == 1
    return err


def test_a_first_look_needs_no_arguments(capsys):
    out = run(capsys, "--size", 17, "--count", 2)
    assert "built-in network: p8, 2 images of 17×17 pixels" in out
    heads = next(line for line in out.splitlines() if line.startswith("element"))
    assert heads.split()[1:] == ["45°", "90°∗", "135°", "180°∗", "225°", "270°∗", "315°"]
    row = next(line for line in out.splitlines() if line.startswith("0 LiftConv2d"))
    errors = [float(cell) for cell in row.split()[3:]]
    assert errors[1] < 1e-5 < errors[0]
    assert "strided sampling        0.0 % (estimate)" in out
    assert out.count("faded to zero outside of the inscribed disc") == 1
    assert "Not exact" not in out


def test_models_come_from_files_factories_and_modules(capsys, model):
    factory = run(capsys, f"{model}:make", "--size", 17)
    ready = run(capsys, f"{model}:ready", "--size", 17)
    assert "p4" in factory
    assert factory.splitlines()[1:] == ready.splitlines()[1:]


def test_models_come_from_packages_in_the_working_folder(capsys, model, monkeypatch):
    model.rename(model.with_name("some_models.py"))
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "some_models:make: p4" in run(capsys, "some_models:make", "--size", 17)


def test_a_stride_off_the_centre_is_reported(capsys, model):
    out = run(capsys, f"{model}:strided", "--size", 32)
    assert "Not exact at the symmetries of the pixel grid from 0 on. 0 (LiftConv2d) has a" in out
    share = float(re.search(r"strided sampling +([\d.]+) %", out)[1])
    assert share > 10
    assert "Not exact" not in run(capsys, f"{model}:strided", "--size", 33)


def test_each_checkpoint_has_a_row(capsys, model, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(
        LiftConv2d(1, 2, "p4"),
        GroupBatchNorm2d(2, "p4"),
        nn.ReLU(),
        GroupConv2d(2, 2, "p4"),
        GroupPool2d("p4"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2, 3),
    )
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    torch.save(network.state_dict(), first)
    with torch.no_grad():
        network[3].weight.mul_(2)
    torch.save({"state_dict": network.state_dict(), "epoch": 3}, second)
    out = run(capsys, f"{model}:make", "--weights", first, second, "--size", 17)
    assert "Does training keep it?" in out
    rows = [line.split() for line in out.splitlines() if ".pt " in line]
    assert [row[0] for row in rows] == [str(first), str(second)]
    assert all(float(row[1]) < 1e-5 for row in rows)
    assert f"After {second}:" in out


def test_all_that_is_asked_for_is_written(capsys, model, tmp_path):
    out = run(
        capsys,
        *(f"{model}:eighths", "--size", 24, "--count", 1, "--angles", 0, 30, 45),
        *("--html", tmp_path / "page.html", "--json", tmp_path / "numbers.json"),
        *("--plots", tmp_path / "plots"),
    )
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    names = sorted(p.name for p in (tmp_path / "plots").iterdir())
    assert names == ["angles.png", "filters.png", "resolution.png", "symbols.png"]
    numbers = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))
    assert numbers["angles"]["angles"] == [0, 30, 45]
    assert numbers["table"]["group"] == "p8"
    assert numbers["sources"]["angle"] == "45°"
    assert numbers["econv"] == econv.__version__
    printed = re.search(r" 30°  (\S+)", out)[1]
    assert float(printed) == pytest.approx(numbers["angles"]["errors"][1], rel=0.05)


def test_images_of_the_user_are_used(capsys, model, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(3, 1, 20, 20)))
    out = run(capsys, f"{model}:make", "--images", tmp_path / "x.npy", "--count", 2)
    assert "2 images of 20×20 pixels" in out


def test_the_seed_decides(capsys):
    one, same, other = (run(capsys, "--size", 17, "--count", 1, "--seed", s) for s in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "expected MODEL as package.module:name"),
        (["no_such_package_here:make"], "cannot import no_such_package_here"),
        (["{folder}/missing.py:make"], "no such file"),
        (["{folder}/broken.py:make"], "broken.py failed: SyntaxError"),
        (["{model}:missing"], "has no 'missing'"),
        (["{model}:number"], "to be a module or to make one; it is 3"),
        (["{model}:fails"], "failed: RuntimeError: no data"),
        (["{model}:nothing"], "to return a torch module; got NoneType"),
        (["{model}:plain", "--tolerance", "1e-5"], "no layer that names one"),
        (["{model}:plain", "--html", "{folder}/page.html"], "--html needs a group"),
        (["{model}:plain", "--group", "p4"], "no equivariant map"),
        (["{model}:mixed"], "several (p6, p8)"),
        (["{model}:make", "--group", "p8"], "not a subgroup"),
        (["{model}:make", "--size", "3"], "fails on images of shape [4, 1, 3, 3]: ValueError"),
        (["{model}:make", "--channels", "2"], "fails on images of shape"),
        (["{model}:make", "--images", "{folder}/missing"], "no such file or folder"),
        (["{model}:make", "--images", "{folder}/wide.npy"], "expected square images"),
        (["{model}:three", "--images", "{folder}/grey.npy"], "expected images of 3 channels"),
        (["{model}:make", "--weights", "{folder}/missing.pt"], "no such file"),
        (["{model}:make", "--weights", "{folder}/wide.npy"], "cannot read weights"),
        (["{model}:make", "--weights", "{folder}/other.pt"], "do not fit the model"),
        (["{model}:make", "--weights", "{folder}/tensor.pt"], "expected a state dict"),
        (
            ["{model}:make", "--weights", "{folder}/pickled.pt"],
            "tensors in {folder}/pickled.pt; got ReLU",
        ),
        (["--html", "{folder}/missing/page.html"], "no such folder"),
        (["{model}:make", "--group", "p1"], "p1 has nothing to check"),
        (
            ["{model}:half", "--images", "{folder}/wide.npy", "--html", "{folder}/page.html"],
            "--html turns images by any angle and needs square ones; got 8×12 pixels",
        ),
        (
            ["{model}:half", "--images", "{folder}/wide.npy", "--angles", "20"],
            "--angles turns images by any angle",
        ),
        (["resnet7_p8"], "depth"),
    ],
)
def test_bad_input_gets_one_line_and_code_two(capsys, model, arguments, message):
    folder = model.parent
    (folder / "broken.py").write_text("def make(:")
    np.save(folder / "wide.npy", np.zeros((8, 12)))
    np.save(folder / "grey.npy", np.zeros((12, 12)))
    torch.save({"weight": torch.zeros(1)}, folder / "other.pt")
    torch.save(torch.zeros(1), folder / "tensor.pt")
    torch.save(nn.ReLU(), folder / "pickled.pt")
    texts = [text.format(folder=folder, model=model) for text in arguments]
    assert message.replace("{folder}", str(folder)) in refused(capsys, *texts)


@pytest.mark.parametrize(
    "arguments",
    [["--group", "q4"], ["--size", "0"], ["--smoothness", "-1"], ["--angles", "x"], ["--nonsense"]],
)
def test_bad_options_are_refused_by_the_parser(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(["check", *arguments])
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_pictures_without_matplotlib_name_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "econv[plot]" in refused(capsys, "--plots", tmp_path / "plots")


def test_safetensors_that_are_not_installed_are_named(capsys, monkeypatch, model, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (tmp_path / "x.safetensors").write_bytes(b"")
    text = refused(capsys, f"{model}:make", "--weights", tmp_path / "x.safetensors")
    assert "pip install safetensors" in text


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"econv {econv.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "printed", "code"),
    [
        (("check", "--size", "17", "--count", "1", *QUICK), b"LiftConv2d", 0),
        (("report",), b"incomplete (0 of", 1),
    ],
)
def test_a_process_without_utf8_still_prints(tmp_path, arguments, printed, code):
    command = [sys.executable, "-m", "econv.cli", *arguments]
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    result = subprocess.run(
        command, capture_output=True, env=environment, check=False, cwd=tmp_path
    )
    assert result.returncode == code, result.stderr
    assert printed in result.stdout
    assert b"?" in result.stdout  # in place of what it cannot print


def test_the_first_look_says_why_and_what_would_help(capsys, tmp_path):
    path = tmp_path / "numbers.json"
    out = run(capsys, "--count", 1, "--json", path, why=True)
    numbers = json.loads(path.read_text(encoding="utf-8"))
    rotation, translation, scale = numbers["lie"]
    assert [rotation["transformation"], translation["transformation"]] == [
        "rotation",
        "translation",
    ]
    relu = rotation["layers"][2]
    lines = out[out.index("Lie derivatives") :].splitlines()
    row = next(line for line in lines if line.startswith("2 ReLU")).split()
    assert float(row[2]) == pytest.approx(relu["own"], rel=0.05)
    assert float(row[3]) == pytest.approx(relu["total"], rel=0.05)
    assert float(row[4]) == pytest.approx(100 * relu["share"], abs=0.06)
    assert float(row[6]) == pytest.approx(translation["layers"][2]["own"], rel=0.05)
    assert float(row[7]) == pytest.approx(scale["layers"][2]["own"], rel=0.05)
    share = float(re.search(r"^  activations +(-?[\d.]+) %", out, re.MULTILINE)[1])
    found = {entry["name"]: entry["share"] for entry in numbers["split"]["sources"]}
    assert share == pytest.approx(100 * found["activations"], abs=0.06)
    assert "What would help, by trial: error at 45° before and after, untrained" in out
    for suggestion in numbers["advice"]["suggestions"]:
        assert f"  {suggestion['change']}: " in out
        assert suggestion["after"] <= 0.9 * suggestion["before"]
    assert numbers["advice"]["suggestions"]
    assert "Sampling fits 65×65 pixels" in out
    assert numbers["sizes"]["exact"] is True


def test_parts_may_be_skipped(capsys, model, tmp_path):
    path = tmp_path / "numbers.json"
    options = ("--size", 17, "--json", path, "--skip", "lie", "advice")
    out = run(capsys, f"{model}:eighths", *options, why=True)
    numbers = json.loads(path.read_text(encoding="utf-8"))
    assert (numbers["lie"], numbers["advice"]) == (None, None)
    assert numbers["split"]["sources"]
    assert "Lie derivatives" not in out
    assert "What would help" not in out
    assert "What the error of the output at 45° is made of" in out
    with pytest.raises(SystemExit):
        main(["check", "--skip", "nothing"])


def test_networks_without_a_group_are_told_why_as_well(capsys, model):
    model.write_text(
        MODEL
        + """
def ordinary():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, 2, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
"""
    )
    out = run(capsys, f"{model}:ordinary", "--size", 32, why=True)
    assert "ordinary: no layers that name a group, 4 images of 32×32 pixels" in out
    assert "Equivariance errors" not in out
    assert re.search(r"^  not equivariant +[\d.]+ % .* 0 \(Conv2d\)", out, re.MULTILINE)
    assert "Sampling does not fit 32×32 pixels: 3 (Conv2d) reads 16 pixels" in out
    assert "The nearest that fit: 30 and 34." in out


def test_what_cannot_be_measured_is_said(capsys, model):
    model.write_text(
        MODEL
        + """
class Rows(nn.Module):
    def forward(self, x): return x.flatten(2)
def rows(): return nn.Sequential(nn.Conv2d(1, 2, 3), Rows())
"""
    )
    out = run(capsys, f"{model}:rows", "--size", 17, why=True)
    assert "Not measured, Lie derivatives: the output is neither a map" in out


def test_the_command_is_installed_under_its_name():
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert 'econv = "econv_command:main"' in pyproject.read_text(encoding="utf-8")


# In place of econv: it says when it is being imported, and takes long where it is told to.
IMPORTED = """
import sys, time
print("importing", flush=True)
time.sleep(60 if sys.argv[1:] == ["slow"] else 0)
"""
CLI = """
import signal
def main():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return 130
"""


@pytest.mark.skipif(os.name != "posix", reason="no fork on this system")
def test_ctrl_c_ends_the_command_quietly_from_its_first_import_on(tmp_path):
    (tmp_path / "econv").mkdir()
    (tmp_path / "econv" / "__init__.py").write_text(IMPORTED)
    (tmp_path / "econv" / "cli.py").write_text(CLI)
    source = Path(econv.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, source)))}
    # A shell has SIGINT ignored where it starts tests in the background.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", heard + "import econv_command as c; exit(c.main())"]
    for speed, status in (("slow", -signal.SIGINT), ("fast", 130)):
        process = subprocess.Popen(
            [*command, speed], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout.readline() == b"importing\n"
        if speed == "slow":
            process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == b""
        assert process.returncode == status


def test_an_output_that_is_not_exact_is_said(capsys, model):
    out = run(capsys, f"{model}:read_out", "--size", 17)
    assert "from output on. One of these breaks equivariance: 1 (Flatten), 2 (Linear)" in out
    assert "Not exact" not in run(capsys, f"{model}:make", "--size", 17)


def test_a_layer_that_is_not_equivariant_is_named_instead_of_sampling(capsys, model):
    out = run(capsys, f"{model}:broken", "--size", 33)
    share = float(re.search(r"not equivariant, 1 \(Conv2d\): ([\d.]+) % \(estimate", out)[1])
    assert "from 2 on. 1 (Conv2d) breaks equivariance." in out
    assert "A mistake in the network: '2' (GroupConv2d) expects features that turn" in out
    assert share > 10
    assert "strided sampling" not in out


def test_rounding_is_not_explained(capsys, model):
    out = run(capsys, f"{model}:make", "--size", 17)
    assert "nothing to explain: exact to rounding" in out
    assert " %\n  padding" not in out
    assert "nothing to explain" not in run(capsys, f"{model}:eighths", "--size", 17)


@pytest.mark.parametrize(("name", "kind"), [("middle", "regular"), ("vectors", "vector")])
def test_a_layer_that_reads_features_is_given_features(capsys, model, name, kind):
    out = run(capsys, f"{model}:{name}", "--size", 17)
    assert re.search(rf"^output +{kind} ", out, re.MULTILINE)
    assert "Not exact" not in out


def test_a_model_may_have_a_child_of_the_name_that_wrappers_add(capsys, model, tmp_path):
    out = run(capsys, f"{model}:Wrapped", "--size", 17)
    namespace: dict = {}
    exec(MODEL, namespace)
    state = namespace["Wrapped"]().state_dict()
    assert all(key.startswith("module.") for key in state)
    torch.save(state, tmp_path / "own.pt")
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "wrapped.pt")
    for name in ("own", "wrapped"):
        path = tmp_path / f"{name}.pt"
        assert run(capsys, f"{model}:Wrapped", "--size", 17, "--weights", path) == out


def test_images_that_are_not_square_have_numbers_without_a_curve(capsys, model, tmp_path):
    np.save(tmp_path / "wide.npy", np.random.default_rng(0).normal(size=(1, 1, 12, 20)))
    path = tmp_path / "numbers.json"
    out = run(capsys, f"{model}:half", "--images", tmp_path / "wide.npy", "--json", path)
    assert "images of 12×20 pixels" in out
    numbers = json.loads(path.read_text(encoding="utf-8"))
    assert numbers["angles"] is None
    assert numbers["table"]["layers"]


def test_that_no_layer_of_a_cnn_could_be_compared_is_said(capsys, model):
    out = run(capsys, f"{model}:cnn", "--size", 17, "--group", "p4")
    assert "No layer could be compared" in out
    assert "No layer could be compared" not in run(capsys, f"{model}:make", "--size", 17)


def test_above_the_tolerance_the_code_is_one(capsys, model):
    strided = [f"{model}:strided", "--size", "32", "--tolerance"]
    assert main(["check", *strided, "1e-3", *QUICK]) == 1
    out, err = capsys.readouterr()
    assert "Equivariance errors" in out
    assert re.fullmatch(
        r"econv check: the error \S+ of .+ at .+ exceeds the tolerance 0.001\n", err
    )
    run(capsys, *strided, "100")
    run(capsys, f"{model}:eighths", "--size", 33, "--tolerance", "1e-4")  # 45° is not on the grid


def test_a_nan_is_above_every_tolerance(capsys, model, tmp_path):
    namespace: dict = {}
    exec(MODEL, namespace)
    state = namespace["make"]().state_dict()
    torch.save(state, tmp_path / "good.pt")
    state["3.weight"].fill_(torch.nan)
    torch.save(state, tmp_path / "nan.pt")
    weights = ["--weights", str(tmp_path / "good.pt"), str(tmp_path / "nan.pt")]
    assert (
        main(["check", f"{model}:make", "--size", "17", "--tolerance", "9", *weights, *QUICK]) == 1
    )
    assert "the error nan of 3" in capsys.readouterr().err


def test_networks_are_known_by_name(capsys):
    options = ("--size", 17, "--count", 1)
    assert "resnet8_p4: p4" in run(capsys, "resnet8_p4", *options)
    run(capsys, "resnet8_p4", *options, "--channels", 2)


class Options:
    """What a user's own code leaves in a checkpoint."""

    def __init__(self) -> None:
        self.rate = 0.1


def lightning_checkpoint(path: Path, network: nn.Module, prefix: str = "model.") -> Path:
    """As Lightning writes them: the weights under a prefix, and objects of the user's."""
    state = {f"{prefix}{key}": value for key, value in network.state_dict().items()}
    state["criterion.weight"] = torch.ones(3)
    found = {"state_dict": state, "epoch": 3, "hyper_parameters": Options(), "callbacks": {}}
    torch.save(found, path)
    return path


@pytest.fixture
def namespace() -> dict:
    found: dict = {}
    exec(MODEL, found)
    return found


def test_checkpoints_of_lightning_are_read_without_their_objects(
    capsys, model, namespace, tmp_path, monkeypatch
):
    network = namespace["make"]()
    torch.save(network.state_dict(), tmp_path / "plain.pt")
    path = lightning_checkpoint(tmp_path / "last.ckpt", network)
    monkeypatch.setattr(Options, "__init__", lambda self: pytest.fail("an object was made"))
    monkeypatch.setattr(
        Options, "__setstate__", lambda self, _: pytest.fail("an object was made"), raising=False
    )
    arguments = (f"{model}:make", "--size", 17, "--weights")
    assert run(capsys, *arguments, path) == run(capsys, *arguments, tmp_path / "plain.pt")


def test_networks_of_several_names_in_one_checkpoint_are_told_apart(
    capsys, model, namespace, tmp_path
):
    network = namespace["make"]()
    state = {f"net.{key}": value for key, value in network.state_dict().items()}
    state |= {f"ema.{key}": 0 * value for key, value in network.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "two.ckpt")
    arguments = (f"{model}:make", "--size", 17, "--weights", tmp_path / "two.ckpt")
    assert "fit, under 'ema.', 'net.': name one with --prefix" in refused(capsys, *arguments)
    torch.save(network.state_dict(), tmp_path / "plain.pt")
    plain = run(capsys, *arguments[:-1], tmp_path / "plain.pt")
    assert run(capsys, *arguments, "--prefix", "net.") == plain
    assert "nothing under 'other.'; found ema., net." in refused(
        capsys, *arguments, "--prefix", "other."
    )


def test_a_mistake_in_the_network_is_named(capsys, model):
    model.write_text(
        MODEL
        + """
def forgotten(): return nn.Sequential(LiftConv2d(1, 2, "p8"), GroupConv2d(4, 1, "p4"))
"""
    )
    out = run(capsys, f"{model}:forgotten", "--group", "p4", "--size", 17)
    assert "A mistake in the network: '1' (GroupConv2d) expects group features of p4" in out
    assert "econv.restrict(x, 'p8', 'p4')" in out
    assert "A mistake" not in run(capsys, f"{model}:make", "--size", 17)


def test_every_error_of_small_maps_has_a_bound(capsys, tmp_path, model):
    model.write_text(
        MODEL
        + """
def deep(): return nn.Sequential(
    LiftConv2d(1, 2, "p8"), nn.AvgPool2d(8), GroupConv2d(2, 1, "p8", operators="order<=0"))
"""
    )
    path = tmp_path / "numbers.json"
    out = run(capsys, f"{model}:deep", "--size", 16, "--json", path)
    assert not re.search(r"\binf\b", out)
    assert "–: too few pixels, or no signal" in out
    numbers = json.loads(path.read_text(encoding="utf-8"))
    assert numbers["table"]["layers"][1]["errors"][0] is None


def test_folders_of_classes_are_read(capsys, model, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "set" / name).mkdir(parents=True)
        np.save(tmp_path / "set" / name / "0.npy", np.random.default_rng(0).random((30, 20)))
    arguments = (f"{model}:make", "--images", tmp_path / "set")
    assert "--size) cuts them square" in refused(capsys, *arguments)
    assert "2 images of 16×16 pixels" in run(capsys, *arguments, "--size", 16)


def test_control_c_ends_it_without_a_traceback(capsys, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("econv.lab.layer_errors", stop)
    assert main(["check", "--size", "17"]) == 130
    assert capsys.readouterr().err == "\neconv check: stopped\n"


def test_long_checks_say_how_far_they_are(capsys, monkeypatch):
    monkeypatch.setattr("econv.progress._SAID", 0.0)
    options = ["--angles", "0", "30", "--skip", "advice"]
    assert main(["check", "--size", "17", "--count", "1", *options]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("econv check: ") for line in lines)
    assert {"layers", "sources of the error", "angles", "Lie derivatives", "sizes"} <= {
        line.removeprefix("econv check: ").partition(",")[0] for line in lines
    }
    assert lines[-1].endswith("0:00:00 left")  # the number of passes was known


def test_a_report_without_records_fails(capsys, tmp_path):
    assert main(["report", "--records", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "incomplete (0 of" in out
    assert err == f"econv report: no records in {tmp_path}: econv train writes them, or name " + (
        "another folder with --records\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar_resnet26_p8", "paper_resnet44_p8", "resnet18_p8"])
def test_networks_by_name_are_checked_within_fifteen_seconds(capsys, name):
    start = time.process_time()  # what other processes take does not count
    assert main(["check", name]) == 0
    assert time.process_time() - start < 15
    # On a slow machine it says meanwhile how far it is.
    assert all("left" in line for line in capsys.readouterr().err.splitlines())
