"""The kernels for GPUs without one: run by Triton's interpreter, compiled for a GPU that is not
there.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from interpreting import pass_interpreted

triton = pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PARTS = {"1": "reference or dense_engine", "2": "not (reference or dense_engine)"}


@pytest.mark.first
@pytest.mark.parametrize("chosen", PARTS.values(), ids=PARTS.keys())
def test_interpreted(chosen):
    pass_interpreted("triton_checks.py", chosen)


def compiled(layer, folder, *options):
    """What the kernels of a layer compile to, in a process without the interpreter."""
    command = [sys.executable, str(BENCHMARKS / "triton_compile.py")]
    command += ["--layer", layer, "--json", str(folder / "found.json"), *options]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (record,) = json.loads((folder / "found.json").read_text())
    return record


def test_compiled_for_a_gpu_that_is_not_there(tmp_path):
    """Every kernel of a layer compiles, soon, and keeps its numbers in registers."""
    record = compiled("p8,16,64,16", tmp_path, "--engine", "spectral/triton")
    assert record["compile_seconds"] < 20
    kernels = {row["kernel"]: row for row in record["launches"]}
    names = {"largest", "arrange", "analyse", "forward", "pack", "weight_gradient", "reduce"}
    assert set(kernels) == names
    for row in kernels.values():
        assert row["spills"] == 0, row
        assert row["shared"] <= 227 * 1024
    for name in ("forward", "weight_gradient"):
        assert kernels[name]["instructions"]["HMMA"] > 0
    # Neighbouring threads read and store what lies side by side: four fields of a place, the 64
    # pixels of a row.
    for access in ("loads", "stores"):
        assert {tuple(sorted(row)) for row in kernels["analyse"][access]} == {(1, 4, 8)}
    assert {max(row) for row in kernels["pack"]["stores"]} == {8}


def test_kernels_of_a_layer_are_there_soon(tmp_path):
    """Compiled in threads, as at a first call, and from an empty cache."""
    command = [sys.executable, str(BENCHMARKS / "triton_compile.py"), "--wait"]
    command += ["--layer", "p16,4,4,8,bfloat16,order<=1"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (seconds,) = re.findall(r"bfloat16, order<=1: ([\d.]+) s on \d+ cores", done.stdout)
    assert 0.5 < float(seconds) < 60
    assert not list(tmp_path.iterdir())


def test_later_processes_find_what_was_compiled(tmp_path):
    """Kernels have names and sources that are the same every time: Triton's cache knows them."""
    first, later = (compiled("p8,4,4,8,bfloat16,order<=1", tmp_path) for _ in range(2))
    assert [row["kernel"] for row in first["launches"]] == [
        row["kernel"] for row in later["launches"]
    ]
    assert later["compile_seconds"] < 0.2 * first["compile_seconds"]


def test_compiled_warp_specialised(tmp_path):
    """All keep their numbers in registers, and products do not wait for one another."""
    record = compiled("p8,40,64,16", tmp_path)
    assert record["compile_seconds"] < 20
    kernels = {row["kernel"]: row for row in record["launches"]}
    names = {"largest", "arrange", "analyse", "forward", "pack", "weight_gradient", "reduce"}
    assert set(kernels) == names
    for name in ("forward", "weight_gradient"):
        row, found = kernels[name], kernels[name]["instructions"]
        assert row["spills"] == 0
        assert row["shared"] <= 227 * 1024
        assert row["programs_at_a_time"] == 1
        assert found["HGMMA"] > 0
        assert "HMMA" not in found
        # Where registers are short a product has two of these, before and after it.
        assert found["WARPGROUP"] < found["HGMMA"]
        assert found["LDSM.4"] == pytest.approx(found["HGMMA"] / 2, abs=1)  # 40 columns: 32 and 8
        assert found["UTMALDG"] > 0  # weights, and the output's gradient, are copied
        assert found["LDG.128"] >= 25  # taps
        assert found["STS.128"] > 0  # features
        assert not {"STS.32", "STS.16"} & found.keys()


def test_compiled_where_slots_come_in_chunks_of_unlike_products(tmp_path):
    """The interpreter does not mind what a compiler does: a name whose type changes in a loop."""
    record = compiled("p6m,3,1,8,float32,order<=2", tmp_path)
    assert {"forward", "weight_gradient"} <= {row["kernel"] for row in record["launches"]}


def test_compiled_with_norm_and_relu_at_the_load(tmp_path):
    """They take no kernels that spill, and every access is as wide as it can be."""
    record = compiled("p16,16,16,8", tmp_path, "--activated", "--engine", "spectral/triton")
    kernels = {row["kernel"]: row for row in record["launches"]}
    own = ("analyse_activated", "activate", "activation_backward", "norm_backward")
    for name in own:
        assert kernels[name]["spills"] == 0
        loads = {kind for kind in kernels[name]["instructions"] if kind.startswith("LDG")}
        assert loads == {"LDG.128", "LDG.32"}  # images, and the numbers of fields
    assert kernels["add_statistics"]["spills"] == kernels["moments"]["spills"] == 0
    assert kernels["moments"]["instructions"]["LDG.128"] >= 1
    # The adjoint's input is a gradient, which nothing is done to.
    assert {"analyse", "largest", "forward", "weight_gradient", "pack"} <= kernels.keys()
    # Where a field has more channels than a thread stores at once: all fields of a pixel.
    first = 0 if triton.__version__ < "3.7" else 1
    assert {row[first] for row in kernels["forward"]["stores"]} == {16}


MEANS = """
import torch
from econv.layers.shift_kernel import launch
from triton_compile import caught, report

def image(height, width, dtype):
    shape = (70_000, 24, height, width)
    last = torch.channels_last
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=last)

with caught() as launches:
    for dtype in (torch.bfloat16, torch.float32):
        for step, size in ((1, (15, 14)), (2, (8, 7))):
            x, y = image(16, 15, dtype), image(*size, dtype)
            launch(x, y, step, False)
            launch(y, x, step, True)
for one in launches:
    assert one.name == "_mean_of_four"
    blocks, *others = one.grid
    assert blocks >= 7 * 70_000 and all(n <= 65_535 for n in others), one.grid
    assert report(one, None)["spills"] == 0
assert len(launches) == 8
"""


def test_compiled_means_of_four_pixels(tmp_path):
    """Of more images than the second and third axes of a grid hold."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", MEANS]
    path = os.pathsep.join([str(BENCHMARKS), environment.get("PYTHONPATH", "")])
    environment["PYTHONPATH"] = path
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
