"""One loop: recipe and seed → record.

Everything that a step reads lives on the device: the images, the epoch's permutation, the learning
rates of all steps and the step's own number. A step is therefore the same sequence of operations
every time, and on a GPU it is captured once, as a CUDA graph, and replayed. All randomness is
keyed by seed, epoch, step and sample, so that a run depends neither on the number of processes nor
on having been interrupted.

Several processes run under ``torchrun`` with torch's own `DistributedDataParallel`: it is part of
torch, starts on every cluster, and leaves this loop as it is. Networks this small gain nothing
from sharded optimisers, which is what larger frameworks would add.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from econv import files
from econv import records as records_room
from econv.data import Augmentation, Dataset, Split, keyed_bits, load, permutation
from econv.engines import dense
from econv.models import create_model
from econv.recipes import RECIPES, Recipe, recipe
from econv.records import Record

__all__ = [
    "CheckpointError",
    "DivergedError",
    "TrainingError",
    "WorkerLostError",
    "add_arguments",
    "main",
    "run",
]

ENGINES = ("eager", "graph", "compile")
PRECISIONS = ("float64", "float32", "tf32", "bfloat16")

_MOMENTUM = 0.9
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_WARM_UP_STEPS = 3
_DROPOUT = 0x44524F50  # first word of this room's keys


class TrainingError(RuntimeError):
    """A run ended before its time; the message says why and what is left."""


class DivergedError(TrainingError):
    """The loss is no longer a number."""


class WorkerLostError(TrainingError):
    """Another process of the same run is gone."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be read or belongs to another run."""


def run(
    recipe: Recipe,
    seed: int,
    *,
    data: Dataset | None = None,
    root: Path | str | None = None,
    source: Path | str | None = None,
    device: torch.device | str | None = None,
    output: Path | str = "outputs",
    records: Path | str = "records",
    resume: bool = True,
    progress: bool = True,
    tensorboard: Path | str | None = None,
    checkpoint_every: int = 10,
    engine: str | None = None,
    precision: str | None = None,
    channels_last: bool | None = None,
) -> Record:
    """Train a recipe to its end, write the record and return it.

    The epoch with the lowest validation error is selected (of equal ones the one with the lower
    validation loss); the test split is read once, after that.

    Args:
        recipe: what to train; see :data:`econv.recipes.RECIPES`.
        seed: of the weights, the order of the images, augmentation and dropout.
        data: the data set, if it is at hand; otherwise the recipe's is loaded.
        root: where :func:`econv.data.load` keeps what it downloads.
        source: a folder or an ``.npz`` that it reads instead.
        device: where to train; the first GPU if there is one.
        output: checkpoints and the trained weights go to ``<output>/<recipe>/<seed>/``.
        records: the record goes to ``<records>/<recipe>/<seed>.json``.
        resume: go on from the checkpoint, or return the record, that a run of the same settings
            left; otherwise start anew.
        progress: whether to say on stderr how far it is.
        tensorboard: a folder for TensorBoard's event files.
        checkpoint_every: epochs from one checkpoint to the next.
        engine: ``"eager"``; ``"graph"``, the whole step in a CUDA graph; ``"compile"``, the network
            through `torch.compile` too. By default ``"graph"`` on one GPU, otherwise ``"eager"``.
        precision: ``"float64"``, ``"float32"``, ``"tf32"`` or ``"bfloat16"`` for convolutions; by
            default ``"tf32"`` on GPUs and ``"float32"`` elsewhere.
        channels_last: whether images are laid out with channels last; by default with bfloat16.
    """
    started = time.perf_counter()
    if not 0 <= seed < 2**32:
        raise ValueError(f"expected a seed from 0 to 2**32 - 1; got {seed}")
    if checkpoint_every < 1:
        raise ValueError(f"expected checkpoint_every of at least 1; got {checkpoint_every}")
    processes = _Processes.join(device)
    how = _How.choose(processes, engine, precision, channels_last)
    folder = Path(output) / recipe.name / str(seed)
    if not resume and processes.first:
        _clear(folder, records_room.path_of(Path(records), recipe.name, seed))
    if data is None:
        data = load(recipe.dataset, root=root, source=source)
    identity = {
        "settings": recipe.settings(),
        "seed": seed,
        "data_sha256": _fingerprint(data),
        "precision": how.precision,
    }
    done = _finished(recipe, seed, identity, Path(records), processes) if resume else None
    if done is not None:
        return done
    checkpoints = _Checkpoints(folder, identity, processes)
    saved = checkpoints.load() if resume else None
    with (
        _watched(processes, checkpoints),
        _math(how),
        torch.random.fork_rng(devices=[how.device] if how.device.type == "cuda" else []),
        _board(tensorboard, recipe, seed, processes) as board,
    ):
        loop = _Loop(recipe, seed, data, how, processes, checkpoints, checkpoint_every)
        loop.say = _Progress(recipe, seed, progress and processes.first)
        loop.board = board
        record = loop.train(saved, started)
        if processes.first:
            records_room.save(record, Path(records))
            checkpoints.remove()
        processes.wait()
    return record


# ---------------------------------------------------------------------------------------------
# Processes


@dataclass(frozen=True)
class _Processes:
    """The processes of one run, and this one among them."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, device: torch.device | str | None) -> _Processes:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = torch.device(device)
        if place.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError(f"expected a device that is there; got {device}: no GPU is")
            number = int(os.environ.get("LOCAL_RANK", "0")) if place.index is None else place.index
            place = torch.device("cuda", number)
            torch.cuda.set_device(place)
        if world > 1 and not distributed.is_initialized():
            backend = "nccl" if place.type == "cuda" else "gloo"
            distributed.init_process_group(backend, timeout=timedelta(minutes=10))
        if not distributed.is_initialized():
            return cls(0, 1, place)
        return cls(distributed.get_rank(), distributed.get_world_size(), place)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up in place over the processes."""
        if self.world > 1:
            distributed.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        self.sum(torch.zeros(1, device=self.device))

    def share(self, content: bytes | None) -> bytes | None:
        """The first process's bytes in all of them: folders need not be shared by machines."""
        if self.world == 1:
            return content
        length = torch.tensor([-1 if content is None else len(content)], device=self.device)
        distributed.broadcast(length, 0)
        if length.item() < 0:
            return None
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8)
        if content:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        buffer = buffer.to(self.device)
        distributed.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()


@contextmanager
def _watched(processes: _Processes, checkpoints: _Checkpoints) -> Iterator[None]:
    """Says in one sentence that a worker is gone; the backends say it in their own ways."""
    try:
        yield
    except TrainingError:
        raise
    except RuntimeError as error:
        text = str(error)
        signs = ("gloo", "NCCL", "Connection", "peer", "timed out", "Timed out")
        if processes.world == 1 or not any(sign in text for sign in signs):
            raise
        first = text.splitlines()[0] if text else type(error).__name__
        raise WorkerLostError(
            f"process {processes.rank} of {processes.world} lost another one, which was killed or "
            f"cut off ({first}). {checkpoints.describe()}"
        ) from error


# ---------------------------------------------------------------------------------------------
# How the step is run


@dataclass(frozen=True)
class _How:
    """Device, engine and number formats of a run."""

    device: torch.device
    engine: str
    precision: str
    channels_last: bool

    @classmethod
    def choose(
        cls,
        processes: _Processes,
        engine: str | None,
        precision: str | None,
        channels_last: bool | None,
    ) -> _How:
        on_gpu = processes.device.type == "cuda"
        engine = engine or ("graph" if on_gpu and processes.world == 1 else "eager")
        precision = precision or ("tf32" if on_gpu else "float32")
        if engine not in ENGINES:
            raise ValueError(f"expected an engine in {ENGINES}; got {engine!r}")
        if precision not in PRECISIONS:
            raise ValueError(f"expected a precision in {PRECISIONS}; got {precision!r}")
        if engine == "graph" and not on_gpu:
            raise ValueError("expected a GPU for the engine 'graph': CUDA graphs need one")
        if engine != "eager" and processes.world > 1:
            raise ValueError(f"expected the engine 'eager' with several processes; got {engine!r}")
        if precision == "tf32" and not on_gpu:
            raise ValueError("expected a GPU for the precision 'tf32': only GPUs have it")
        last = precision == "bfloat16" if channels_last is None else channels_last
        return cls(processes.device, engine, precision, last)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision != "bfloat16":
            return nullcontext()
        # A cache of casted weights would outlive a captured graph.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)


@contextmanager
def _math(how: _How) -> Iterator[None]:
    """TF32 for convolutions alone: the products that make filters keep their accuracy."""
    if how.device.type != "cuda":
        yield
        return
    backend = torch.backends.cudnn
    wanted = how.precision != "float32"
    value: bool | str = wanted
    holder, name = backend, "allow_tf32"
    if hasattr(backend, "conv"):  # since torch 2.9; the two ways must not be mixed
        holder, name, value = backend.conv, "fp32_precision", "tf32" if wanted else "ieee"
    kept, benchmark = getattr(holder, name), backend.benchmark
    setattr(holder, name, value)
    backend.benchmark = True
    try:
        yield
    finally:
        setattr(holder, name, kept)
        backend.benchmark = benchmark


def _tried(step: Callable[[], None], state: Sequence[Tensor], times: int = 1) -> None:
    """Run the step, so that all is compiled and chosen; the state is then what it was before."""
    before = [tensor.clone() for tensor in state]
    for _ in range(times):
        step()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)


def _captured(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """The step as one CUDA graph; the state is afterwards what it was before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _tried(step, state, _WARM_UP_STEPS)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, and changes nothing
        step()
    torch.cuda.synchronize()
    replay: Callable[[], None] = graph.replay
    return replay


# ---------------------------------------------------------------------------------------------
# Parts of a network that several processes, or a captured step, need in another form


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
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, processes: _Processes
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
        processes: _Processes = ctx.processes
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

    def __init__(self, norm: _BatchNorm, processes: _Processes) -> None:
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


def _shared(model: nn.Module) -> nn.Module:
    """The network whose gradients are means over the processes."""
    engine = nn.parallel.DistributedDataParallel
    # The norms' statistics are equal everywhere; sending them would be in vain.
    names = inspect.signature(engine).parameters
    send = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {send: False}
    return engine(model, **options)


def _replace(model: nn.Module, kind: type, make: Callable[[Any, int], nn.Module]) -> None:
    """Put another module in the place of every one of a kind."""
    found = [(owner, name, m) for owner in model.modules() for name, m in owner.named_children()]
    for number, (owner, name, module) in enumerate(e for e in found if isinstance(e[2], kind)):
        setattr(owner, name, make(module, number))


# ---------------------------------------------------------------------------------------------
# One training state and its step


class _Vector:
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


class _Optimizer:
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


class _Trainer:
    """The network, its moving average, the optimiser and the data, all on the device."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        train: Split,
        data: Dataset,
        how: _How,
        processes: _Processes,
    ) -> None:
        self.recipe, self.seed, self.how, self.processes = recipe, seed, how, processes
        device, dtype = how.device, how.dtype
        self.split = train
        count = len(train.y)
        batch = min(recipe.batch_size, count)
        if batch % processes.world:
            raise ValueError(
                f"expected a batch that {processes.world} processes can share equally; "
                f"got {batch} images"
            )
        self.batch = batch
        self.steps = count // batch
        local = batch // processes.world
        self.lanes = torch.arange(local, device=device) + processes.rank * local
        self.order = torch.arange(count, device=device)
        self.losses = torch.zeros(self.steps, device=device, dtype=dtype)
        self.step_number = torch.zeros(1, dtype=torch.int64, device=device)
        self.mean, self.deviation = (
            torch.tensor(values, device=device, dtype=dtype).view(1, -1, 1, 1)
            for values in (data.mean, data.std)
        )
        self.augmentation = Augmentation(**dict(recipe.augmentation))
        self.drawn = self.augmentation.draw(seed, 0, self.order)

        # On one GPU torch's own dropout, seeded in every epoch, spares the hash.
        keyed = device.type != "cuda" or processes.world > 1
        torch.manual_seed(seed)
        model = create_model(recipe.model, **dict(recipe.model_options))
        if keyed:
            _replace(model, nn.Dropout, lambda m, number: KeyedDropout(m.p, number))
        if processes.world > 1 or how.engine == "graph":
            _replace(model, _BatchNorm, lambda m, _: SynchronisedNorm(m, processes))
        self.model = model.to(device=device, dtype=dtype).train()
        self.dropouts = [m for m in self.model.modules() if isinstance(m, KeyedDropout)]
        parameters = list(self.model.parameters())
        self.weights = _Vector(parameters)
        self.weights.hold(parameters)
        self.gradients = _Vector(parameters)
        decay = _Vector(parameters)
        for part, parameter in zip(decay.parts, parameters, strict=True):
            part.fill_(recipe.weight_decay if parameter.ndim > 1 else 0.0)
        self.optimizer = _Optimizer(recipe.optimizer, self.weights.flat, decay.flat)
        self.average: nn.Module | None = None
        if recipe.ema_decay:
            self.average = copy.deepcopy(self.model).eval()
            self.averaged = _Vector(parameters)
            self.averaged.hold(list(self.average.parameters()))
            self.floating = [b for b in self.model.buffers() if b.is_floating_point()]
            self.averaged_floating = [b for b in self.average.buffers() if b.is_floating_point()]
        self.schedule = torch.tensor(self._rows(), device=device, dtype=dtype)

        self.network: Callable[[Tensor], Tensor] = self.model
        if processes.world > 1:
            self.network = _shared(self.model)
        elif how.engine == "compile":
            self.network = torch.compile(self.model)
        self.advance: Callable[[], None] = self.step
        if how.engine != "eager":
            state = list(self.state().values())
            if device.type == "cuda":
                self.advance = _captured(self.step, state)
            else:
                _tried(self.step, state)

    def _rows(self) -> list[tuple[float, float, float, float]]:
        """For each step: learning rate, share of the new weights in the average, corrections."""
        recipe, rows = self.recipe, []
        for step in range(recipe.epochs * self.steps):
            # The middle of the step: neither the rise nor the fall wastes one at 0.
            rate = recipe.rate((step + 0.5) / self.steps)
            decay = min(recipe.ema_decay, (step + 1) / (step + 10))
            rows.append((rate, 1 - decay, *_Optimizer.corrections(step)))
        return rows

    @property
    def evaluated(self) -> nn.Module:
        return self.model if self.average is None else self.average

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the next step depends on, live."""
        found = {"step": self.step_number}
        for owner, module in (("model", self.model), ("average", self.average)):
            if module is not None:
                found |= {f"{owner}.{name}": t for name, t in module.state_dict().items()}
        return found | {f"optimizer.{name}": t for name, t in self.optimizer.state.items()}

    def images(self, x: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Pictures of bytes as the network reads them, augmented as drawn."""
        images = x.to(self.how.dtype) / 255
        if drawn is not None:
            images = self.augmentation.apply(images, drawn)
        images = (images - self.mean) / self.deviation
        if self.how.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images

    def step(self) -> None:
        """One step of training. Nothing in it waits for the device or depends on its numbers."""
        place = self.step_number % self.steps
        indices = self.order.index_select(0, place * self.batch + self.lanes)
        rate, share, first, second = self.schedule.index_select(0, self.step_number)[0].unbind()
        loss = self._loss(indices)
        torch._foreach_copy_(self.gradients.parts, self._gradients(loss))
        with torch.no_grad():
            self.optimizer.update(self.weights.flat, self.gradients.flat, rate, first, second)
            if self.average is not None:
                self.averaged.flat.add_((self.weights.flat - self.averaged.flat) * share)
                change = torch._foreach_sub(self.floating, self.averaged_floating)
                torch._foreach_mul_(change, share)
                torch._foreach_add_(self.averaged_floating, change)
            self.losses.index_copy_(0, place, loss.detach().to(self.losses.dtype).view(1))
            self.step_number.add_(1)

    def _loss(self, indices: Tensor) -> Tensor:
        if self.dropouts:
            keys = keyed_bits(_DROPOUT, self.seed, self.step_number, indices)
            for dropout in self.dropouts:
                dropout.keys = keys
        pictures = self.split.x.index_select(0, indices)
        drawn = self.drawn.index_select(0, indices) if self.augmentation else None
        images = self.images(pictures, drawn)
        with self.how.autocast():
            scores = self.network(images)
        return functional.cross_entropy(
            scores.to(self.how.dtype),
            self.split.y.index_select(0, indices),
            label_smoothing=self.recipe.label_smoothing,
        )

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        parameters = list(self.model.parameters())
        if self.processes.world == 1:
            return list(torch.autograd.grad(loss, parameters))
        loss.backward()
        found = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return found

    def epoch(self, number: int, tick: Callable[[int, int, int], None]) -> list[float]:
        """Train for one epoch, counted from 0; the losses of its steps."""
        count = len(self.order)
        self.order.copy_(permutation(count, self.seed, number, self.how.device))
        if self.augmentation:
            everyone = torch.arange(count, device=self.how.device)
            self.drawn.copy_(self.augmentation.draw(self.seed, number, everyone))
        if self.how.device.type == "cuda":
            torch.cuda.manual_seed(self.seed * 1_000_003 + number)
        for step in range(self.steps):
            self.advance()
            tick(number, step, self.steps)
        losses = self.processes.sum(self.losses.clone()) / self.processes.world
        found: list[float] = losses.tolist()
        return found

    @torch.no_grad()
    def predict(self, split: Split) -> tuple[Tensor, float]:
        """The predicted classes of a split and its mean loss, each process doing its part."""
        module = self.evaluated
        training = module.training
        module.eval()
        count = len(split.y)
        part = -(-count // self.processes.world)
        start, stop = self.processes.rank * part, min(count, (self.processes.rank + 1) * part)
        classes = torch.zeros(count, dtype=torch.int64, device=self.how.device)
        total = torch.zeros((), dtype=torch.float64, device=self.how.device)
        size = 2048 if self.how.device.type == "cuda" else 256
        for low in range(start, stop, size):
            high = min(low + size, stop)
            with self.how.autocast():
                scores = module(self.images(split.x[low:high]))
            scores = scores.to(self.how.dtype)
            classes[low:high] = scores.argmax(1)
            total += functional.cross_entropy(scores, split.y[low:high], reduction="sum")
        module.train(training)
        self.processes.sum(classes)
        return classes, float(self.processes.sum(total)) / count

    def finite(self) -> bool:
        return bool(self.weights.flat.isfinite().all())


# ---------------------------------------------------------------------------------------------
# The loop


class _Loop:
    """Phases, epochs, selection and checkpoints."""

    say: _Progress
    board: Any

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        data: Dataset,
        how: _How,
        processes: _Processes,
        checkpoints: _Checkpoints,
        checkpoint_every: int,
    ) -> None:
        self.recipe, self.seed, self.how, self.processes = recipe, seed, how, processes
        self.recreated = data.recreated
        self.data = data.to(how.device)
        self.checkpoints, self.checkpoint_every = checkpoints, checkpoint_every
        self.phases = ["select", "retrain"] if recipe.retrain_on_all else ["select"]
        # What goes into the checkpoint's JSON, next to the tensors.
        self.told: dict[str, Any] = {
            "phase": 0,
            "epoch": 0,
            "best": None,
            "history": [],
            "seconds": 0.0,
            "setup_seconds": 0.0,
        }
        self.best: dict[str, Tensor] = {}

    def train(self, saved: _Saved | None, started: float) -> Record:
        if saved is not None:
            self.told.update(saved.told)
        while True:
            trainer = self._trainer(saved)
            saved = None
            now = time.perf_counter()
            self.told["setup_seconds"] += now - started
            started = now
            started = self._phase(trainer, started)
            if self.told["phase"] == len(self.phases) - 1:
                break
            self.told.update(phase=self.told["phase"] + 1, epoch=0)
        return self._finish(trainer, started)

    def _trainer(self, saved: _Saved | None) -> _Trainer:
        data = self.data
        if self.phases[self.told["phase"]] == "retrain":
            data = data.with_validation_in_training()
        trainer = _Trainer(self.recipe, self.seed, data.train, data, self.how, self.processes)
        if saved is not None:
            state = trainer.state()
            given = {n: t for n, t in saved.tensors.items() if not n.startswith("best.")}
            if {n: t.shape for n, t in given.items()} != {n: t.shape for n, t in state.items()}:
                raise CheckpointError(
                    f"the tensors in {self.checkpoints.folder} do not fit {self.recipe.model}: "
                    "the code has changed; start anew with --fresh"
                )
            for name, tensor in state.items():
                tensor.copy_(given[name])
            self.best = {
                name.removeprefix("best."): tensor.to(self.how.device)
                for name, tensor in saved.tensors.items()
                if name.startswith("best.")
            }
            self.say.resumed(self.told["epoch"])
        return trainer

    def _phase(self, trainer: _Trainer, started: float) -> float:
        recipe, told = self.recipe, self.told
        phase = self.phases[told["phase"]]
        while told["epoch"] < recipe.epochs:
            number = told["epoch"]
            losses = trainer.epoch(number, self.say.step)
            self._check(losses, trainer, number)
            entry: dict[str, Any] = {
                "phase": phase,
                "epoch": number + 1,
                "learning_rate": recipe.rate(number + 0.5),
                "loss": sum(losses) / len(losses),
            }
            last = number + 1 == recipe.epochs
            if phase == "select" and (last or (number + 1) % recipe.evaluate_every == 0):
                self._evaluate(trainer, entry)
            now = time.perf_counter()
            entry["seconds"] = now - started
            told["seconds"] += now - started
            started = now
            told["history"].append(entry)
            told["epoch"] = number + 1
            self.say.epoch(entry, told["best"], trainer.batch * trainer.steps, len(self.phases))
            self._write_board(entry, number + 1 + told["phase"] * recipe.epochs)
            if last or (number + 1) % self.checkpoint_every == 0:
                self._save(trainer)
                # What a checkpoint takes belongs to the run, too.
                now = time.perf_counter()
                told["seconds"] += now - started
                started = now
        return started

    def _check(self, losses: list[float], trainer: _Trainer, number: int) -> None:
        bad = next((i for i, loss in enumerate(losses) if not abs(loss) < float("inf")), None)
        if bad is None and trainer.finite():
            return
        where = f"step {number * trainer.steps + (len(losses) if bad is None else bad + 1)}"
        within = f"epoch {number + 1}, step {(len(losses) if bad is None else bad + 1)}"
        what = (
            "the weights are no numbers after" if bad is None else f"the loss is {losses[bad]} at"
        )
        raise DivergedError(
            f"{self.recipe.name}, seed {self.seed}: {what} {where} ({within} of {trainer.steps}). "
            f"{self.checkpoints.describe()} A lower learning_rate may help."
        )

    def _evaluate(self, trainer: _Trainer, entry: dict[str, Any]) -> None:
        split = self.data.validation
        classes, loss = trainer.predict(split)
        error = 100 * int((classes != split.y).sum()) / len(split.y)
        if not abs(loss) < float("inf"):
            raise DivergedError(
                f"{self.recipe.name}, seed {self.seed}: the validation loss is {loss} after epoch "
                f"{entry['epoch']}. {self.checkpoints.describe()}"
            )
        entry.update(validation_loss=loss, validation_error=error)
        best = self.told["best"]
        if best is None or (error, loss) < (best["validation_error"], best["validation_loss"]):
            self.told["best"] = {
                "epoch": entry["epoch"],
                "validation_error": error,
                "validation_loss": loss,
            }
            self.best = {n: t.clone() for n, t in trainer.evaluated.state_dict().items()}

    def _save(self, trainer: _Trainer) -> None:
        if not self.processes.first:
            return
        tensors = trainer.state() | {f"best.{name}": t for name, t in self.best.items()}
        self.checkpoints.save(self.told, tensors)

    def _finish(self, trainer: _Trainer, started: float) -> Record:
        told, split, best = self.told, self.data.test, self.told["best"]
        retrained = self.phases[-1] == "retrain"
        if not retrained:
            trainer.evaluated.load_state_dict(self.best)
        classes, _ = trainer.predict(split)
        error = 100 * int((classes != split.y).sum()) / len(split.y)
        self.checkpoints.save_weights(trainer.evaluated.state_dict())
        told["seconds"] += time.perf_counter() - started
        record = Record(
            recipe=self.recipe.name,
            seed=self.seed,
            dataset=self.data.name,
            recreated=self.recreated,
            parameters=sum(p.numel() for p in trainer.model.parameters()),
            validation_error=best["validation_error"],
            test_error=error,
            seconds=told["seconds"],
            setup_seconds=told["setup_seconds"],
            device=_device_name(self.how.device),
            selected_epoch=best["epoch"],
            retrained=retrained,
            data_sha256=self.checkpoints.identity["data_sha256"],
            predictions_sha256=hashlib.sha256(classes.cpu().numpy().tobytes()).hexdigest(),
            epochs=told["history"],
            settings=self.recipe.settings(),
            processes=self.processes.world,
            engine=self.how.engine,
            precision=self.how.precision,
            revision=records_room.revision(),
            source_sha256=records_room.source_hash(),
            versions=records_room.versions(),
            finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        self.say.finished(record)
        return record

    def _write_board(self, entry: Mapping[str, Any], step: int) -> None:
        if self.board is not None:
            for name in ("loss", "learning_rate", "validation_loss", "validation_error"):
                if name in entry:
                    self.board.add_scalar(name, entry[name], step)


# ---------------------------------------------------------------------------------------------
# Checkpoints


@dataclass(frozen=True)
class _Saved:
    told: dict[str, Any]
    tensors: dict[str, Tensor]


class _Checkpoints:
    """``checkpoint.json`` and the tensors that it names.

    The JSON is replaced last and in one move: before that the old pair is whole, afterwards the
    new one is.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], processes: _Processes) -> None:
        self.folder = folder
        self.identity = identity
        self.processes = processes
        self.path = folder / "checkpoint.json"
        self.last: tuple[int, int] | None = None

    def describe(self) -> str:
        if self.last is None:
            return "No checkpoint was written yet."
        phase = " of retraining" if self.last[0] else ""
        return (
            f"The checkpoint after epoch {self.last[1]}{phase} is kept in {self.folder}; the same "
            "command goes on from there."
        )

    def save(self, told: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        content = _safetensors().save(
            {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        )
        name = f"checkpoint-{told['phase']}-{told['epoch']}.safetensors"
        files.write_atomically(self.folder / name, content)
        whole = {
            **self.identity,
            "told": told,
            "tensors": name,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        text = json.dumps(whole, allow_nan=False)
        files.write_atomically(self.path, text.encode())
        self.last = (told["phase"], told["epoch"])
        for other in self.folder.glob("checkpoint-*.safetensors"):
            if other.name != name:
                other.unlink()

    def load(self) -> _Saved | None:
        """The checkpoint, the first process's in all of them; an error if it is of another run."""
        text = content = None
        problem = b""
        if self.processes.first and self.path.exists():
            try:
                text = self.path.read_bytes()
                content = self._tensors(json.loads(text))
            except (ValueError, KeyError, TypeError, OSError, CheckpointError) as error:
                problem = (
                    f"the checkpoint in {self.folder} cannot be used: {error}; start anew with "
                    "--fresh, or remove the folder"
                ).encode()
        problem = self.processes.share(problem) or b""
        if problem:
            raise CheckpointError(problem.decode())
        text, content = self.processes.share(text), self.processes.share(content)
        if text is None or content is None:
            return None
        told = json.loads(text)["told"]
        self.last = (told["phase"], told["epoch"])
        return _Saved(told, _safetensors().load(content))

    def _tensors(self, whole: dict[str, Any]) -> bytes:
        for name, wanted in self.identity.items():
            if whole[name] != wanted:
                detail = ""
                if isinstance(wanted, dict):
                    keys = sorted(k for k in wanted if whole[name].get(k) != wanted[k])
                    detail = f" ({', '.join(keys)})"
                raise CheckpointError(f"it was made with other {name}{detail}")
        content = (self.folder / whole["tensors"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != whole["sha256"]:
            raise CheckpointError(f"{whole['tensors']} is damaged: its checksum differs")
        return content

    def save_weights(self, weights: Mapping[str, Tensor]) -> None:
        if self.processes.first:
            content = _safetensors().save({n: t.detach().cpu().clone() for n, t in weights.items()})
            files.write_atomically(self.folder / "model.safetensors", content)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        for tensors in self.folder.glob("checkpoint-*.safetensors"):
            tensors.unlink()


def _safetensors() -> Any:
    try:  # by name: it need not be installed where types are checked
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'econv[train]'") from None


def _clear(folder: Path, record: Path) -> None:
    """Remove what an earlier run of the same recipe and seed left."""
    record.unlink(missing_ok=True)
    (folder / "checkpoint.json").unlink(missing_ok=True)
    for tensors in [*folder.glob("checkpoint-*.safetensors"), *folder.glob("model.safetensors")]:
        tensors.unlink()


def _finished(
    recipe: Recipe, seed: int, identity: dict[str, Any], folder: Path, processes: _Processes
) -> Record | None:
    """The record that an earlier run left; an error if it is one of something else."""
    path = records_room.path_of(folder, recipe.name, seed)
    content = path.read_bytes() if processes.first and path.exists() else None
    content = processes.share(content)
    if content is None:
        return None
    record = records_room.parse(content, path)
    other = [name for name, wanted in identity.items() if getattr(record, name) != wanted]
    if other:
        raise CheckpointError(
            f"{path} is the record of a run with other {' and '.join(other)}; start anew with "
            "--fresh, or name another folder for records"
        )
    return record


def _fingerprint(data: Dataset) -> str:
    found = hashlib.sha256(data.name.encode())
    for split in (data.train, data.validation, data.test):
        for tensor in (split.x, split.y):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


# ---------------------------------------------------------------------------------------------
# Telling


@contextmanager
def _board(
    folder: Path | str | None, recipe: Recipe, seed: int, processes: _Processes
) -> Iterator[Any]:
    if folder is None or not processes.first:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("--tensorboard needs it: pip install tensorboard") from None
    writer = SummaryWriter(str(Path(folder) / recipe.name / str(seed)))
    try:
        yield writer
    finally:
        writer.close()


class _Progress:
    """One line that is rewritten on a terminal; a line now and then elsewhere."""

    def __init__(self, recipe: Recipe, seed: int, enabled: bool) -> None:
        self.recipe = recipe
        self.title = f"{recipe.name}, seed {seed}"
        self.enabled = enabled
        self.terminal = sys.stderr.isatty()
        self.interval = 0.2 if self.terminal else 10.0
        self.told = time.monotonic()
        self.trained = 0
        self.spent = 0.0
        self.text = ""

    def _say(self, text: str, important: bool = False) -> None:
        now = time.monotonic()
        if not self.enabled or (now - self.told < self.interval and not important):
            return
        self.told = now
        if self.terminal:
            end = "\n" if important else ""
            print(f"\r\x1b[K{text}", end=end, file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def resumed(self, epoch: int) -> None:
        self._say(f"{self.title}: going on after epoch {epoch}", important=True)

    def step(self, epoch: int, step: int, steps: int) -> None:
        # On a GPU steps are only queued here; the epochs tell the truth about time.
        self._say(
            f"{self.title}: epoch {epoch + 1}/{self.recipe.epochs}, step {step + 1}/{steps}"
            f"{self.text}"
        )

    def epoch(
        self, entry: Mapping[str, Any], best: Mapping[str, Any] | None, images: int, phases: int
    ) -> None:
        self.trained += 1
        self.spent += entry["seconds"]
        each = self.spent / self.trained
        ahead = self.recipe.epochs - entry["epoch"]
        if entry["phase"] == "select":
            ahead += (phases - 1) * self.recipe.epochs
        self.text = f", loss {entry['loss']:.4f}"
        if "validation_error" in entry and best is not None:
            self.text += (
                f", validation {entry['validation_error']:.2f} % "
                f"(best {best['validation_error']:.2f} % at {best['epoch']})"
            )
        remaining = timedelta(seconds=round(ahead * each))
        self.text += f", {images / entry['seconds']:,.0f} images/s, {remaining} left"
        retrain = " of retraining" if entry["phase"] == "retrain" else ""
        self._say(
            f"{self.title}: epoch {entry['epoch']}/{self.recipe.epochs}{retrain}{self.text}",
            important=ahead == 0,
        )

    def finished(self, record: Record) -> None:
        self._say(
            f"{self.title}: test error {record.test_error:.2f} %, validation "
            f"{record.validation_error:.2f} % (epoch {record.selected_epoch}), "
            f"{record.parameters:,} parameters, {record.seconds:.1f} s + "
            f"{record.setup_seconds:.1f} s to set up, {record.device}",
            important=True,
        )


# ---------------------------------------------------------------------------------------------
# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``econv train``."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help=f"one of {', '.join(RECIPES)}")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="another value for a setting of the recipe, such as epochs=3",
    )
    add("--seeds", type=int, default=1, metavar="N", help="how many runs (default: %(default)s)")
    add("--seed", type=int, default=0, help="the first of them (default: %(default)s)")
    add("--root", type=Path, metavar="FOLDER", help="where downloaded data are kept")
    add("--source", type=Path, metavar="PATH", help="a folder or .npz with the data")
    add("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    add("--output", type=Path, default=Path("outputs"), metavar="FOLDER", help="for checkpoints")
    add("--records", type=Path, default=Path("records"), metavar="FOLDER", help="for records")
    add("--fresh", action="store_true", help="start anew instead of going on")
    add("--quiet", action="store_true", help="no progress")
    add("--tensorboard", type=Path, metavar="FOLDER", help="write event files for TensorBoard")
    add("--checkpoint-every", type=int, default=10, metavar="EPOCHS", help="default: %(default)s")
    add("--engine", choices=ENGINES, help="default: graph on one GPU, otherwise eager")
    add("--precision", choices=PRECISIONS, help="default: tf32 on GPUs, otherwise float32")
    add(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="memory layout of images (default: with bfloat16)",
    )


def leave() -> None:
    """Part from the other processes, all at once: one that leaves early makes the rest abort."""
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def main(options: argparse.Namespace) -> int:
    """Train what the options say; 0, or 1 with a line on stderr, or 130 if interrupted."""
    try:
        chosen = recipe(options.recipe).with_changes(_pairs(options.changes))
        if options.seeds < 1:
            raise ValueError(f"expected --seeds of at least 1; got {options.seeds}")
        kept = _stop_on_terminate()
        try:
            for seed in range(options.seed, options.seed + options.seeds):
                _run_and_print(chosen, seed, options)
        finally:
            if kept is not None:
                signal.signal(signal.SIGTERM, kept)
        leave()
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except (TrainingError, ValueError, ImportError, OSError) as error:
        print(f"econv train: {error}", file=sys.stderr)
        return 1
    return 0


def _run_and_print(chosen: Recipe, seed: int, options: argparse.Namespace) -> None:
    record = run(
        chosen,
        seed,
        root=options.root,
        source=options.source,
        device=options.device,
        output=options.output,
        records=options.records,
        resume=not options.fresh,
        progress=not options.quiet,
        tensorboard=options.tensorboard,
        checkpoint_every=options.checkpoint_every,
        engine=options.engine,
        precision=options.precision,
        channels_last=options.channels_last,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        label = " (re-created)" if record.recreated else ""
        print(
            f"{record.recipe} seed {seed}: test error {record.test_error:.2f} %, validation error "
            f"{record.validation_error:.2f} % on {record.dataset}{label}, {record.parameters:,} "
            f"parameters, {record.seconds:.1f} s + {record.setup_seconds:.1f} s to set up"
        )


def _pairs(changes: Sequence[str]) -> dict[str, str]:
    found = {}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise ValueError(f"expected --set key=value; got {change!r}")
        found[key.strip()] = value.strip()
    return found


def _stop_on_terminate() -> Any:
    """Let SIGTERM end a run as Ctrl-C does; returns the handler before, None outside threads."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        return signal.signal(signal.SIGTERM, stop)
    except ValueError:  # only the main thread may
        return None


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m econv.train", description=__doc__)
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
