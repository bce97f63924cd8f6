"""One training state and its step."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.data import Augmentation, Dataset, Split, keyed_bits, permutation
from econv.engines import noted
from econv.layers import convert_sync_batchnorm
from econv.models import ConvNet, ResNet, create_model
from econv.recipes import Recipe
from econv.testing import rotate
from econv.train.capture import captured, tried
from econv.train.execution import Execution
from econv.train.optimise import Optimizer, Vector
from econv.train.parts import KeyedDropout, replace, shared
from econv.train.processes import Processes
from econv.weights import inscribed_disc

_DROPOUT = 0x44524F50  # first word of this module's keys


def batches(recipe: Recipe, count: int) -> tuple[int, int]:
    """The size of a batch, and how many of them an epoch of so many images has."""
    size = min(recipe.batch_size, count)
    return size, count // size


def network_of(recipe: Recipe, classes: int) -> ResNet | ConvNet:
    """The recipe's network, with new weights; `ValueError` if there is none for the data."""
    options = dict(recipe.model_options)
    try:
        model = create_model(recipe.model, **options)
    except (TypeError, RuntimeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(
            f"expected model_options that {recipe.model} can be built with; got {options}: {error}"
        ) from None
    if model.num_classes != classes:
        raise ValueError(
            f"expected model_options with num_classes={classes}, as the data have; "
            f"got {model.num_classes}"
        )
    return model


def augmentation_of(recipe: Recipe) -> Augmentation:
    options = dict(recipe.augmentation)
    names = [field.name for field in fields(Augmentation)]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ValueError(
            f"expected augmentation with keywords of {', '.join(names)}; got {', '.join(unknown)}"
        )
    return Augmentation(**options)


class Trainer:
    """The network, its moving average, the optimiser and the data, all on the device."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        train: Split,
        data: Dataset,
        execution: Execution,
        processes: Processes,
    ) -> None:
        self.recipe, self.seed, self.execution, self.processes = recipe, seed, execution, processes
        device, dtype = execution.device, execution.dtype
        self.split, self.dimension = train, train.x.ndim - 2
        count = len(train.y)
        batch, self.steps = batches(recipe, count)
        if batch % processes.world:
            raise ValueError(
                f"expected a batch that {processes.world} processes can share equally; "
                f"got {batch} images"
            )
        self.batch = batch
        local = batch // processes.world
        self.lanes = torch.arange(local, device=device) + processes.rank * local
        self.order = torch.arange(count, device=device)
        self.losses = torch.zeros(self.steps, device=device, dtype=dtype)
        self.generator: Tensor | None = None  # torch's own on a GPU, as an epoch's middle left it
        self.step_number = torch.zeros(1, dtype=torch.int64, device=device)
        self.mean, self.deviation = (
            torch.tensor(values, device=device, dtype=dtype).view(1, -1, *[1] * self.dimension)
            for values in (data.mean, data.std)
        )
        self.disc: Tensor | None = None
        if recipe.disc:
            if self.dimension != 2:
                raise ValueError(f"expected images for disc; got {tuple(train.x.shape)}")
            self.disc = inscribed_disc(*train.x.shape[2:]).to(device, dtype)
        self.augmentation = augmentation_of(recipe)
        self.drawn = self.augmentation.draw(seed, 0, self.order, self.dimension)

        # On one GPU torch's own dropout, seeded in every epoch, spares the hash.
        keyed = device.type != "cuda" or processes.world > 1
        torch.manual_seed(seed)
        model = network_of(recipe, data.classes)
        if keyed:
            replace(model, nn.Dropout, lambda m, number: KeyedDropout(m.p, number))
        if processes.world > 1:
            convert_sync_batchnorm(model)
        self.model = model.to(device=device, dtype=dtype).train()
        self._look_once(data.classes)
        self.dropouts = [m for m in self.model.modules() if isinstance(m, KeyedDropout)]
        parameters = list(self.model.parameters())
        self.weights = Vector(parameters)
        self.weights.hold(parameters)
        self.gradients = Vector(parameters)
        decay = Vector(parameters)
        for part, parameter in zip(decay.parts, parameters, strict=True):
            part.fill_(recipe.weight_decay if parameter.ndim > 1 else 0.0)
        self.optimizer = Optimizer(recipe.optimizer, self.weights.flat, decay.flat)
        self.average: nn.Module | None = None
        if recipe.ema_decay:
            self.average = copy.deepcopy(self.model).eval()
            self.averaged = Vector(parameters)
            self.averaged.hold(list(self.average.parameters()))
            self.floating = [b for b in self.model.buffers() if b.is_floating_point()]
            self.averaged_floating = [b for b in self.average.buffers() if b.is_floating_point()]
        self.watching: Split | None = None
        self.schedule = torch.tensor(self._rows(), device=device, dtype=dtype)

        self.network: Callable[[Tensor], Tensor] = self.model
        if processes.world > 1:
            self.network = shared(self.model)
        elif execution.step == "compile":
            self.network = torch.compile(self.model)
        self.convolutions: dict[str, int] = {}
        self.advance: Callable[[], None] = self._noting
        if execution.step != "eager":
            state = list(self.state().values())
            with warnings.catch_warnings():
                # On purpose: TF32 is for convolutions, the products that make filters stay exact.
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
                if device.type == "cuda":
                    self.advance = captured(self._noting, state)
                else:
                    tried(self._noting, state)

    @torch.no_grad()
    def _look_once(self, classes: int) -> None:
        """Say what the network has against the images before anything is trained."""
        pictures = self.split.x[:1]
        self.model.eval()
        try:
            with self.execution.autocast():
                scores = self.model(self.images(pictures))
        except RuntimeError as error:
            raise ValueError(
                f"expected a network for images of {list(pictures.shape[1:])}; "
                f"{self.recipe.model} says: {str(error).splitlines()[0]}"
            ) from None
        finally:
            self.model.train()
        if scores.shape != (1, classes):
            raise ValueError(
                f"expected {classes} scores of an image of {list(pictures.shape[1:])}; "
                f"{self.recipe.model} gives {scores.numel()}"
            )

    def _rows(self) -> list[tuple[float, float, float, float]]:
        """For each step: learning rate, share of the new weights in the average, corrections."""
        recipe, rows = self.recipe, []
        for step in range(recipe.epochs * self.steps):
            # The middle of the step: neither the rise nor the fall wastes one at 0.
            rate = recipe.rate((step + 0.5) / self.steps)
            decay = min(recipe.ema_decay, (step + 1) / (step + 10))
            rows.append((rate, 1 - decay, *Optimizer.corrections(step)))
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

    def within(self) -> dict[str, Tensor]:
        """What the next step depends on besides, in the middle of an epoch."""
        losses = self.processes.sum(self.losses.clone()) / self.processes.world
        found = {"losses": losses}
        if self.execution.device.type == "cuda":
            found["generator"] = torch.cuda.get_rng_state(self.execution.device)
        return found

    def go_on(self, within: dict[str, Tensor]) -> None:
        """Take up what :meth:`within` gave."""
        self.losses.copy_(within["losses"])
        self.generator = within.get("generator")

    def images(self, x: Tensor, drawn: Tensor | None = None, degrees: float = 0.0) -> Tensor:
        """Pictures of bytes as the network reads them, augmented as drawn, or turned."""
        images = x.to(self.execution.dtype) / 255
        if degrees:
            images = rotate(images, degrees)
        if drawn is not None:
            images = self.augmentation.apply(images, drawn)
        images = (images - self.mean) / self.deviation
        if self.disc is not None:
            images = images * self.disc
        if self.execution.channels_last:
            # Of one channel torch keeps either layout as it is; only this one says which is meant.
            last = images.movedim(1, -1)
            images = last.flatten().view(last.shape).movedim(-1, 1)
        return images

    def _noting(self) -> None:
        """A step, of which `convolutions` tells what ran them, and how many."""
        with noted() as ran:
            self.step()
        self.convolutions = dict(sorted(Counter(ran).items()))

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
            # A sample comes once in an epoch: its number and the epoch's tell all draws apart.
            epoch = self.step_number // self.steps
            keys = keyed_bits(_DROPOUT, self.seed, epoch, indices)
            for dropout in self.dropouts:
                dropout.keys = keys
        pictures = self.split.x.index_select(0, indices)
        drawn = self.drawn.index_select(0, indices) if self.augmentation else None
        images = self.images(pictures, drawn)
        with self.execution.autocast():
            scores = self.network(images)
        return functional.cross_entropy(
            scores.to(self.execution.dtype),
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

    def epoch(
        self, number: int, tick: Callable[[int, int, int], None], first: int = 0
    ) -> list[float]:
        """Train for one epoch, counted from 0; the losses of its steps.

        Of an epoch that goes on, ``first`` steps were done before.
        """
        count = len(self.order)
        self.order.copy_(permutation(count, self.seed, number, self.execution.device))
        if self.augmentation:
            everyone = torch.arange(count, device=self.execution.device)
            drawn = self.augmentation.draw(self.seed, number, everyone, self.dimension)
            self.drawn.copy_(drawn)
        if self.execution.device.type == "cuda":
            torch.cuda.manual_seed(self.seed * 1_000_003 + number)
            if first and self.generator is not None:
                torch.cuda.set_rng_state(self.generator.cpu(), self.execution.device)
        for step in range(first, self.steps):
            self.advance()
            tick(number, step, self.steps)
        losses = self.processes.sum(self.losses.clone()) / self.processes.world
        found: list[float] = losses.tolist()
        return found

    def watch(self, split: Split) -> None:
        """Prepare to look at this split often: on a GPU its evaluation becomes a CUDA graph too."""
        if self.execution.step == "eager" or self.execution.device.type != "cuda":
            return
        classes = torch.zeros(len(split.y), dtype=torch.int64, device=self.execution.device)
        total = torch.zeros((), dtype=torch.float64, device=self.execution.device)
        with self._evaluating():
            self.watched = captured(lambda: self._score(split, classes, total), [])
        self.watching, self.seen = split, (classes, total)

    @torch.no_grad()
    def predict(self, split: Split, degrees: float = 0.0) -> tuple[Tensor, float]:
        """The predicted classes of a split and its mean loss, each process doing its part.

        Its images are turned by so many ``degrees``, by quintic splines.
        """
        if split is self.watching and not degrees:
            self.watched()
            classes, total = self.seen
            return classes.clone(), float(total) / len(split.y)
        classes = torch.zeros(len(split.y), dtype=torch.int64, device=self.execution.device)
        total = torch.zeros((), dtype=torch.float64, device=self.execution.device)
        with self._evaluating():
            self._score(split, classes, total, degrees)
        self.processes.sum(classes)
        return classes, float(self.processes.sum(total)) / len(split.y)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.evaluated.training
        self.evaluated.eval()
        try:
            yield
        finally:
            self.evaluated.train(training)

    @torch.no_grad()
    def _score(self, split: Split, classes: Tensor, total: Tensor, degrees: float = 0.0) -> None:
        """Write this process's share of the predicted classes, and its sum of the losses."""
        count = len(split.y)
        part = -(-count // self.processes.world)
        start, stop = self.processes.rank * part, min(count, (self.processes.rank + 1) * part)
        size = 2048 if self.execution.device.type == "cuda" else 256
        size //= 32 ** (self.dimension - 2)  # volumes take so much more memory
        total.zero_()
        for low in range(start, stop, size):
            high = min(low + size, stop)
            with self.execution.autocast():
                scores = self.evaluated(self.images(split.x[low:high], degrees=degrees))
            scores = scores.to(self.execution.dtype)
            classes[low:high] = scores.argmax(1)
            total += functional.cross_entropy(scores, split.y[low:high], reduction="sum")

    def finite(self) -> bool:
        return bool(self.weights.flat.isfinite().all())
