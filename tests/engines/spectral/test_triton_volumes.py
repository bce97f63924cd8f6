"""The kernels for volumes without a GPU: interpreted, and compiled for one that is not there."""

import pytest
import torch

import econv
from econv.engines import ENGINES, Problem
from econv.gpu.sizes import Like
from interpreting import pass_interpreted
from test_triton import compiled

pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")


@pytest.mark.parametrize(
    ("group", "fields", "side", "reason"),
    [
        ("C1", 8, 128, None),
        ("C1", 8, 410, "its kernels count what they keep of an image in 32 bits"),
        ("O", 6, 128, None),
        ("O", 6, 256, "its kernels count what they keep of an image in 32 bits"),
    ],
)
def test_volumes_of_more_numbers_than_the_kernels_count_are_refused(group, fields, side, reason):
    layer = econv.GroupConv3d(fields, 1, group)
    x = torch.empty(1, layer.in_channels, 9, 9, 9)
    problem = Problem.of(layer.convolution, x, layer.weight)
    assert ENGINES["spectral/triton"]._not_covered(problem._replace(sizes=(side,) * 3)) == reason


def test_large_batches_are_cut_into_what_the_kernels_count():
    from econv.engines.spectral.triton import volumes

    layer = econv.GroupConv3d(8, 8, "C1").convolution
    plan, geometry = layer.plan(layer.parts[0]), layer.geometry((128,) * 3)
    x = torch.empty(256, 8, 128, 128, 128, device="meta", dtype=torch.float16)
    like = Like(x.shape, x.stride(), x.dtype, torch.device("cpu"))
    forward = volumes.Convolution(like, plan.name, False, geometry, 8, False, "ieee")
    backward = volumes.WeightGradient(like, like, plan.name, geometry, "ieee")
    spectra = [*forward.groups, *(group[0] for group in backward.groups)]
    assert max(one.numbers for one in spectra) < 2**31
    assert sum(one.samples.stop - one.samples.start for one in forward.groups) == 256


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
