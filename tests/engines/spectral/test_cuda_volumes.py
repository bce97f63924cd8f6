"""The kernels for volumes on a GPU: the checks of the interpreter, and what only a device shows."""

import gc

import pytest
import torch

import econv

if not torch.cuda.is_available():
    pytest.skip("no CUDA device found", allow_module_level=True)

import triton

from econv.engines.spectral.triton import volumes
from econv.train.capture import captured
from volume_checks import *  # noqa: F403
from volume_checks import TRITON, error, exact, results
from volume_checks import few_programs as few_programs
from volume_checks import kernels_run as kernels_run

BFLOAT16 = {"device": "cuda", "dtype": torch.bfloat16, "engine": "spectral"}


def row(group, fields=8, sizes=(12, 13, 16), batch=2):
    layer = econv.GroupConv3d(fields, fields, group, **BFLOAT16)
    x = torch.randn(batch, layer.in_channels, *sizes, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    return layer, x, torch.randn_like(x)


@pytest.mark.parametrize("group", ["O", "I"])
def test_layers_of_the_benchmark_err_little_more_than_the_dense_engine(group):
    layer, x, probe = row(group)
    wanted = exact(layer, x, probe)
    with econv.engine() as ran:
        ours = results(layer, x, probe, "spectral")
    assert ran == [TRITON]
    assert ours[0].is_contiguous(memory_format=torch.channels_last_3d)
    for a, b, truth in zip(ours, results(layer, x, probe, "dense"), wanted, strict=True):
        assert error(a, truth) <= 1.5 * error(b, truth)


def test_later_calls_find_no_kernels_anew_and_give_the_same(monkeypatch):
    layer, x, probe = row("O", batch=5)
    sought, run = [], triton.JITFunction.run

    def counted(self, *arguments, **options):
        sought.append(self)
        return run(self, *arguments, **options)

    wanted = results(layer, x, probe, "spectral")
    monkeypatch.setattr(triton.JITFunction, "run", counted)
    for _ in range(3):
        found = results(layer, x, probe, "spectral")
        assert all(map(torch.equal, found, wanted))
    assert not sought


def test_a_captured_pass_gives_the_same():
    layer, x, probe = row("T")
    wanted = results(layer, x, probe, "spectral")
    x, found = x.clone().requires_grad_(), []

    def step():
        y = layer(x)
        found[:] = [y.detach(), *torch.autograd.grad(y, [x, layer.weight], probe)]

    captured(step, ())()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=False))


def test_triton_alone_gives_what_gluon_gives(monkeypatch):
    layer, x, probe = row("T")
    wanted = exact(layer, x, probe)
    theirs = results(layer, x, probe, "spectral")
    monkeypatch.setitem(volumes.CHANGES, "language", "tl")
    for a, b, truth in zip(results(layer, x, probe, "spectral"), theirs, wanted, strict=True):
        assert error(a, truth) <= 1.1 * error(b, truth)


def test_a_step_takes_no_more_memory_than_the_dense_engine():
    layer, x, probe = row("O", sizes=(32, 32, 32), batch=4)
    layer.engine = "auto"
    x.requires_grad_()

    def peak(engine):
        def step():
            with econv.engine(engine):
                torch.autograd.grad(layer(x), [x, layer.weight], probe)

        step()
        gc.collect()  # what earlier steps left would be freed in this one, and hide what it takes
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before

    with torch.autograd.set_multithreading_enabled(False):  # no thread keeps the last gradients
        peaks = {engine: peak(engine) for engine in ("dense", "spectral")}
    assert peaks["spectral"] <= peaks["dense"], peaks
