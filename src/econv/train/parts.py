"""Parts of a network that several processes, or a captured step, need in another form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from econv.engines import dense
from econv.train.processes import Processes


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


class _Normalise(torch.autograd.Function):
    """Batch norm of ``[n, fields, m]`` whose sums run over all processes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, processes: Processes
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(weight.dtype)
        variance, mean = torch.var_mean(wide, (0, 2), correction=0)
        if processes.world > 1:
            m, v = mean.double(), variance.double()
            m, square = processes.sum(torch.stack([m, v + m * m])).div_(processes.world)
            mean, variance = m.to(mean.dtype), (square - m * m).clamp_min_(0).to(mean.dtype)
        deviation = torch.rsqrt(variance + eps)
        scale = weight * deviation
        shift = torch.addcmul(bias, mean, scale, value=-1)
        ctx.save_for_backward(x, mean, deviation, scale)
        ctx.processes = processes
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return torch.addcmul(shift[:, None], wide, scale[:, None]).to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, mean, deviation, scale = ctx.saved_tensors
        processes: Processes = ctx.processes
        wide = gradient.to(mean.dtype)
        offset = mean * deviation
        normed = torch.addcmul(-offset[:, None], x.to(mean.dtype), deviation[:, None])
        sums = torch.stack([wide.sum((0, 2)), (wide * normed).sum((0, 2))])
        to_bias, to_weight = sums.clone().unbind() if processes.world > 1 else sums.unbind()
        share = -1.0 / (x.numel() // x.shape[1] * processes.world)
        first, second = (processes.sum(sums) * share).unbind()
        to_x = torch.addcmul(first[:, None], normed, second[:, None])
        to_x.add_(wide).mul_(scale[:, None])
        return to_x.to(x.dtype), to_weight, to_bias, None, None


class SynchronisedNorm(nn.Module):
    """A batch norm, of fields or of channels, with the statistics of all processes' samples.

    It takes over the parameters and buffers of the norm that it stands for, under their names.
    Torch's own synchronised norm refuses the CPU; its ordinary one gives each channel to one
    multiprocessor of a GPU, which leaves most of them idle where a network has seven fields.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: _BatchNorm, processes: Processes) -> None:
        super().__init__()
        if norm.momentum is None or not norm.affine or not norm.track_running_stats:
            raise ValueError(f"expected a norm with momentum, scale and statistics; got {norm}")
        self.fields = norm.running_mean.numel()  # type: ignore[union-attr]
        self.eps = norm.eps
        self.momentum = norm.momentum
        self.weight = norm.weight
        self.bias = norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.processes = processes

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        order = channels // self.fields
        last = dense.memory_format(x) is torch.channels_last
        if last:
            folded = x.permute(0, 2, 3, 1).reshape(-1, self.fields, order)
        else:
            folded = x.reshape(batch, self.fields, order * height * width)
        normed = self._normalise(folded)
        if last:
            return normed.view(batch, height, width, channels).permute(0, 3, 1, 2)
        return normed.view(batch, channels, height, width)

    def _normalise(self, folded: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if not self.training:
            return functional.batch_norm(
                folded, mean, variance, self.weight, self.bias, eps=self.eps
            )
        count = folded.numel() // self.fields * self.processes.world
        normed, now, spread = _Normalise.apply(
            folded, self.weight, self.bias, self.eps, self.processes
        )
        with torch.no_grad():
            mean.lerp_(now, self.momentum)
            variance.lerp_(spread * (count / max(count - 1, 1)), self.momentum)
            self.num_batches_tracked.add_(1)
        return normed


def shared(model: nn.Module) -> nn.Module:
    """The network whose gradients are means over the processes."""
    engine = nn.parallel.DistributedDataParallel
    # The norms' statistics are equal everywhere; sending them would be in vain.
    names = inspect.signature(engine).parameters
    send = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {send: False}
    return engine(model, **options)


def replace(model: nn.Module, kind: type, make: Callable[[Any, int], nn.Module]) -> None:
    """Put another module in the place of every one of a kind."""
    found = [(owner, name, m) for owner in model.modules() for name, m in owner.named_children()]
    for number, (owner, name, module) in enumerate(e for e in found if isinstance(e[2], kind)):
        setattr(owner, name, make(module, number))
