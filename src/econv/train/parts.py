"""Parts of a network that several processes, or a captured step, need in another form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _mixed(z: Tensor) -> Tensor:
    """A hash of 64 bits, in place: every bit of the result hangs on every bit of the number."""
    # The shift of a negative number brings ones in from the left; the masks take them away.
    z.bitwise_xor_((z >> 32) & 0xFFFFFFFF).mul_(-0x61C8864680B583EB)
    z.bitwise_xor_((z >> 29) & 0x7FFFFFFFF).mul_(-0x4B47D0C5A1A6B2B3)
    return z.bitwise_xor_((z >> 32) & 0xFFFFFFFF)


class KeyedDropout(nn.Module):
    """Dropout whose choice is a function of a key for each sample, and of nothing else.

    ``keys``, of 32 bits, are set before every training pass. The same sample loses the same
    numbers whatever the batch around it.

    Raises:
        ValueError: when called in training without a key for each sample.
    """

    def __init__(self, probability: float, salt: int) -> None:
        super().__init__()
        self.probability = probability
        self.salt = salt
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        if self.keys is None or len(self.keys) != len(x):
            raise ValueError("expected a key for each sample before a training pass")
        size = x[0].numel()
        places = torch.arange((size + 3) // 4, device=x.device)  # one word serves four numbers
        words = _mixed((self.keys << 32)[:, None] + (self.salt << 24) + places)
        drawn = words.view(torch.int16)[:, :size].reshape(x.shape)
        dropped = round(self.probability * 65536)
        return x * ((drawn >= dropped - 32768) * (65536 / (65536 - dropped))).to(x.dtype)


def shared(model: nn.Module) -> nn.Module:
    """The network whose gradients are means over the processes."""
    parallel = nn.parallel.DistributedDataParallel
    # The norms' statistics are equal everywhere; sending them would be in vain.
    names = inspect.signature(parallel).parameters
    send = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {send: False}
    return parallel(model, **options)


def replace(model: nn.Module, kind: type, make: Callable[[Any, int], nn.Module]) -> None:
    """Put another module in the place of every one of a kind."""
    found = [(owner, name, m) for owner in model.modules() for name, m in owner.named_children()]
    for number, (owner, name, module) in enumerate(e for e in found if isinstance(e[2], kind)):
        setattr(owner, name, make(module, number))
