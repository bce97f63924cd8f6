"""The kernels for volumes without a GPU: interpreted, and compiled for one that is not there."""

import pytest

from interpreting import pass_interpreted
from test_triton import compiled

pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")


@pytest.mark.slow
def test_interpreted():
    pass_interpreted("volume_checks.py")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiled_for_a_gpu_that_is_not_there(tmp_path, dtype):
    """Features go to the tensor cores from registers: no barrier, and nothing in shared memory."""
    layer = f"T,8,3,8,{dtype},order<=2"
    record = compiled(layer, tmp_path, "--engine", "spectral/triton")
    assert record["compile_seconds"] < 20
    kernels = {row["kernel"]: row for row in record["launches"]}
    assert {"arrange", "analyse", "forward", "weight_gradient", "add_up"} <= kernels.keys()
    for row in record["launches"]:
        if row["kernel"] in ("forward", "weight_gradient"):
            assert row["shared"] == 0
            assert row["instructions"]["HMMA"] > 0
            assert not {"BAR", "STS.32", "STS.128"} & row["instructions"].keys()
