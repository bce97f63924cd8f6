"""Kernels that normalise and rectify where they read, as operations of torch: they run on a CPU."""

from __future__ import annotations

import torch

from econv.engines import ENGINES, choice
from econv.engines.door import FUSED as BOTH
from econv.engines.spectral.torch import Torch
from econv.engines.spectral.triton.engine import Hopper, Triton
from econv.layers import fused, pooled

__all__ = ["FUSED", "fuse_on_cpu"]

FUSED = Triton.name + BOTH


class OnAnyDevice(Triton):
    """What the kernels do, as operations of torch."""

    def why_not(self, problem):
        return self._not_covered(problem)

    def forward(self, task, x, weight, affine):
        return Torch().forward(task, x, weight, affine)

    def backward(self, task, gradient, saved, wanted):
        return Torch().backward(task, gradient, saved, wanted)


def affine(x, fields, weight, bias, running, eps):
    """`pooled.affine`, as operations of torch."""
    folded = x.float().unflatten(1, (fields, -1))
    variance, mean = torch.var_mean(folded, (0, 2, 3, 4), correction=0)
    if running is not None:
        running.update(mean.detach(), variance.detach(), x.numel() // fields)
    return x, pooled.rows(mean, (variance + eps).rsqrt(), weight, bias), x


def fuse_on_cpu(monkeypatch):
    """Let the kernels seem to run on a CPU for the rest of a test."""
    monkeypatch.setattr(choice, "_memory", {})
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    monkeypatch.setattr(pooled, "affine", affine)
    monkeypatch.setattr(Hopper, "why_not", lambda self, problem: "not here")
    monkeypatch.setitem(ENGINES, Triton.name, OnAnyDevice())
