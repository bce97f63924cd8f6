"""All parameters as one vector, and the optimisers that change it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_MOMENTUM = 0.9
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class Vector:
    """Tensors of many shapes as parts of one, so that one operation changes them all."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        # Each starts at a multiple of 256 bytes, as if it had been allocated alone.
        step = 256 // like[0].element_size()
        starts = [0]
        for tensor in like:
            starts.append(starts[-1] + -(-tensor.numel() // step) * step)
        self.flat = like[0].new_zeros(starts[-1])
        self.parts = [
            self.flat[start : start + tensor.numel()].view(tensor.shape)
            for start, tensor in zip(starts, like, strict=False)
        ]

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Become the storage of the parameters."""
        for part, parameter in zip(self.parts, parameters, strict=True):
            part.copy_(parameter.detach())
            parameter.data = part


class Optimizer:
    """Adam, AdamW or SGD with Nesterov momentum on one vector, with numbers from the device."""

    def __init__(self, name: str, weights: Tensor, decay: Tensor) -> None:
        self.name = name
        self.decay = decay
        moments = ("momentum",) if name == "sgd" else ("first", "second")
        self.state = {moment: torch.zeros_like(weights) for moment in moments}

    @staticmethod
    def corrections(step: int) -> tuple[float, float]:
        """What makes up for moments that start at 0."""
        return 1 - _BETAS[0] ** (step + 1), 1 - _BETAS[1] ** (step + 1)

    def update(
        self, weights: Tensor, gradient: Tensor, rate: Tensor, first: Tensor, second: Tensor
    ) -> None:
        if self.name == "adamw":
            weights.mul_(1 - rate * self.decay)
        else:
            gradient = torch.addcmul(gradient, weights, self.decay)
        if self.name == "sgd":
            momentum = self.state["momentum"].mul_(_MOMENTUM).add_(gradient)
            weights.sub_(rate * gradient.add_(momentum, alpha=_MOMENTUM))
            return
        mean = self.state["first"].lerp_(gradient, 1 - _BETAS[0])
        square = self.state["second"].mul_(_BETAS[1])
        square.addcmul_(gradient, gradient, value=1 - _BETAS[1])
        weights.sub_(rate / first * mean / (square / second).sqrt_().add_(_EPSILON))
