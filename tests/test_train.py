"""Training: resumed bit for bit, stopped cleanly, the same on two processes as on one."""

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from econv import GroupBatchNorm2d, create_model, files, progress, records, train
from econv.data import Augmentation, Dataset, Split, permutation
from econv.layers import PDOConv2d
from econv.recipes import RECIPES, Recipe
from econv.records import Record
from econv.train import KeyedDropout, SynchronisedNorm, runs
from econv.train.capture import tried
from econv.train.how import How, convolution_precision
from econv.train.optimise import Optimizer, Vector
from econv.train.parts import replace
from econv.train.processes import Processes
from econv.train.trainer import Trainer

ONE = Processes(0, 1, torch.device("cpu"))
HOW = How(torch.device("cpu"), "eager", "float64", False)

TINY = Recipe(
    name="tiny",
    table=0,
    row="tiny",
    dataset="stripes",
    model="convnet6_p4",
    model_options=(
        ("fields", (2, 3)),
        ("image_size", 12),
        ("num_classes", 3),
        ("pooled_after", (1,)),
        ("dropout", 0.2),
        ("pool", "max"),
    ),
    epochs=4,
    batch_size=16,
    learning_rate=0.02,
    warmup_epochs=1.0,
    weight_decay=0.01,
    label_smoothing=0.05,
    ema_decay=0.9,
    augmentation=(("rotate", True), ("shift", 1)),
)


def stripes(seed: int = 0, train_count: int = 70) -> Dataset:
    """Rings of three radii in noise: a task that any turn leaves as it is."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.arange(12) - 5.5
    radius = (axis[:, None] ** 2 + axis**2).sqrt()

    def split(count: int) -> Split:
        y = torch.randint(0, 3, (count,), generator=generator)
        rings = torch.stack([(radius - r).abs() < 0.8 for r in (1.0, 3.0, 5.0)])
        noise = torch.randint(0, 100, (count, 12, 12), generator=generator)
        x = (rings[y] * 120 + noise).to(torch.uint8)
        return Split(x[:, None], y)

    return Dataset.of("stripes", split(train_count), split(40), split(50), 3)


def start(folder: Path, recipe: Recipe = TINY, seed: int = 0, **options: object) -> Record:
    values: dict[str, object] = {
        "data": stripes(),
        "device": "cpu",
        "output": folder / "out",
        "records": folder / "records",
        "progress": False,
        "checkpoint_every": 1,
    }
    return train.run(recipe, seed, **{**values, **options})  # type: ignore[arg-type]


def outcome(record: Record) -> dict[str, object]:
    """All of a record but what time and place leave on it."""
    told = dataclasses.asdict(record)
    for name in ("seconds", "setup_seconds", "finished"):
        del told[name]
    told["epochs"] = [{k: v for k, v in e.items() if k != "seconds"} for e in record.epochs]
    return told


def weights(folder: Path, recipe: Recipe = TINY, seed: int = 0) -> bytes:
    return (folder / "out" / recipe.name / str(seed) / "model.safetensors").read_bytes()


def trainer(recipe: Recipe = TINY, data: Dataset | None = None, **how: object) -> Trainer:
    data = data or stripes()
    chosen = dataclasses.replace(HOW, **how)
    return Trainer(recipe, 0, data.train, data, chosen, ONE)


def changed(**changes: object) -> Recipe:
    return dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


def with_options(**options: object) -> Recipe:
    return changed(model_options=tuple({**dict(TINY.model_options), **options}.items()))


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, error: type[BaseException]) -> None:
    """The run ends when it comes to that step, counted from 1 over all phases."""
    original = Trainer.step
    done = [0]

    def stopping(self: Trainer) -> None:
        done[0] += 1
        if done[0] == step:
            raise error
        original(self)

    monkeypatch.setattr(Trainer, "step", stopping)


# ------------------------------------------------------------------------------------ results


def test_a_network_learns_and_the_record_says_what_happened(tmp_path: Path) -> None:
    record = start(tmp_path, changed(epochs=12))
    assert record.test_error <= 10
    assert record.epochs[-1]["loss"] < record.epochs[0]["loss"] / 1.5
    assert records.load(tmp_path / "records" / "tiny" / "0.json") == record
    assert (record.dataset, record.recreated, record.processes) == ("stripes", False, 1)
    assert [e["epoch"] for e in record.epochs] == list(range(1, 13))
    assert record.settings == changed(epochs=12).settings()
    assert record.seconds >= sum(e["seconds"] for e in record.epochs) > 0
    assert record.setup_seconds > 0


def test_one_batch_can_be_learned_by_heart() -> None:
    data = stripes(train_count=16)
    recipe = changed(
        augmentation=(), label_smoothing=0.0, ema_decay=0.0, epochs=60, weight_decay=0.0
    )
    recipe = dataclasses.replace(
        recipe, model_options=tuple({**dict(TINY.model_options), "dropout": 0.0}.items())
    )
    network = trainer(recipe, data)
    losses = [network.epoch(e, lambda *_: None)[0] for e in range(60)]
    assert losses[-1] < 0.02 < 0.5 < losses[0]


def test_the_selected_epoch_is_the_best_one_and_its_weights_are_tested(tmp_path: Path) -> None:
    record = start(tmp_path, changed(epochs=6, evaluate_every=2))
    seen = [e for e in record.epochs if "validation_error" in e]
    assert [e["epoch"] for e in seen] == [2, 4, 6]
    best = min(seen, key=lambda e: (e["validation_error"], e["validation_loss"]))
    assert record.selected_epoch == best["epoch"]
    assert record.validation_error == best["validation_error"]

    from safetensors.torch import load

    model = create_model(TINY.model, **dict(TINY.model_options)).eval()
    model.load_state_dict(load(weights(tmp_path)))
    data = stripes()
    x = (data.test.x / 255 - data.mean[0]) / data.std[0]
    classes = model(x).argmax(1)
    assert 100 * (classes != data.test.y).double().mean() == pytest.approx(record.test_error)
    assert hashlib.sha256(classes.numpy().tobytes()).hexdigest() == record.predictions_sha256


def test_an_early_best_epoch_is_kept_over_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([(3, 0.5), (1, 0.5), (1, 0.4), (1, 0.4), (2, 0.1)])
    states: list[dict[str, torch.Tensor]] = []
    original = Trainer.predict

    def predict(self: Trainer, split: Split) -> tuple[torch.Tensor, float]:
        if len(split) == 50:  # the test split
            states.append({n: t.clone() for n, t in self.evaluated.state_dict().items()})
            return original(self, split)
        states.append({n: t.clone() for n, t in self.evaluated.state_dict().items()})
        wrong, loss = next(errors)
        classes = split.y.clone()
        classes[:wrong] = (classes[:wrong] + 1) % 3
        return classes, loss

    monkeypatch.setattr(Trainer, "predict", predict)
    record = start(tmp_path, changed(epochs=5))
    assert record.selected_epoch == 3
    assert record.validation_error == 2.5
    assert all(torch.equal(states[-1][n], states[2][n]) for n in states[2])
    assert not all(torch.equal(states[-1][n], states[4][n]) for n in states[4])


def test_the_test_split_is_read_once_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = Trainer.predict

    def predict(self: Trainer, split: Split) -> tuple[torch.Tensor, float]:
        read.append(len(split))
        return original(self, split)

    monkeypatch.setattr(Trainer, "predict", predict)
    start(tmp_path, changed(retrain_on_all=True))
    assert read == [40] * 4 + [50]


def test_retraining_takes_the_last_epoch_of_training_on_both_splits(tmp_path: Path) -> None:
    record = start(tmp_path, changed(retrain_on_all=True))
    assert record.retrained
    assert [e["phase"] for e in record.epochs] == ["select"] * 4 + ["retrain"] * 4
    plain = start(tmp_path / "plain")
    assert not plain.retrained
    assert record.validation_error == plain.validation_error
    assert record.selected_epoch == plain.selected_epoch

    data = stripes().with_validation_in_training()
    network = trainer(TINY, data, precision="float32")
    losses = [network.epoch(e, lambda *_: None) for e in range(4)]
    assert len(losses[0]) == 110 // 16
    assert record.epochs[-1]["loss"] == sum(losses[-1]) / len(losses[-1])
    found, _ = network.predict(data.test)
    expected = hashlib.sha256(found.numpy().tobytes()).hexdigest()
    assert record.predictions_sha256 == expected


def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    first, again, other = (start(tmp_path / n, seed=s) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert outcome(first) == outcome(again)
    assert first.epochs[0]["loss"] != other.epochs[0]["loss"]


def test_the_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    start(tmp_path, changed(epochs=1))
    assert torch.equal(torch.rand(3), expected)


# -------------------------------------------------------------------------- interrupted, resumed


@pytest.mark.parametrize(
    ("recipe", "every", "step"),
    [
        (TINY, 1, 11),
        (TINY, 2, 15),
        (TINY, 3, 3),
        (changed(optimizer="adam", ema_decay=0.0, schedule="steps", milestones=(0.5,)), 1, 9),
        (changed(optimizer="sgd", evaluate_every=3), 1, 13),
        (changed(retrain_on_all=True), 1, 14),
        (changed(retrain_on_all=True), 3, 25),
    ],
)
def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, every: int, step: int
) -> None:
    whole = start(tmp_path / "whole", recipe)
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "parts", recipe, checkpoint_every=every)
    resumed = start(tmp_path / "parts", recipe, checkpoint_every=every)
    assert outcome(resumed) == outcome(whole)
    assert weights(tmp_path / "parts", recipe) == weights(tmp_path / "whole", recipe)


def test_resuming_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 14, KeyboardInterrupt)  # four steps an epoch: in the fourth
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    steps: list[int] = []
    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self: (steps.append(1), original(self))[1])
    start(tmp_path)
    assert len(steps) == 4


def test_a_failed_write_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start(tmp_path / "whole")
    original = files.write_atomically
    written: list[str] = []

    def failing(path: Path, content: bytes) -> None:
        written.append(path.name)
        if written.count("checkpoint.json") == 3:
            raise OSError("no space left")
        original(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", failing)
        with pytest.raises(OSError, match="no space left"):
            start(tmp_path / "parts")
    folder = tmp_path / "parts" / "out" / "tiny" / "0"
    assert json.loads((folder / "checkpoint.json").read_text())["told"]["epoch"] == 2
    assert outcome(start(tmp_path / "parts")) == outcome(whole)


def test_checkpoints_hold_everything_and_go_when_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "out" / "tiny" / "0"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoint-0-2.safetensors",
        "checkpoint.json",
    ]
    tensors = load_file(folder / "checkpoint-0-2.safetensors")
    owners = {name.split(".")[0] for name in tensors}
    assert owners == {"step", "model", "average", "optimizer", "best"}
    assert tensors["step"].item() == 8
    told = json.loads((folder / "checkpoint.json").read_text())["told"]
    assert told["epoch"] == 2
    assert told["best"]["epoch"] in (1, 2)
    start(tmp_path)
    assert [p.name for p in folder.iterdir()] == ["model.safetensors"]


def damage_tensors(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def damage_json(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_bytes(path.read_bytes()[:-20])


def lose_tensors(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_tensors, "checksum differs"),
        (damage_json, "cannot be used"),
        (lose_tensors, "No such file"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_a_fresh_start_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage, message: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    damage(tmp_path / "out" / "tiny" / "0")
    with pytest.raises(train.CheckpointError, match=message) as caught:
        start(tmp_path)
    assert "--fresh" in str(caught.value)
    assert outcome(start(tmp_path, resume=False)) == outcome(start(tmp_path / "other"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": changed(weight_decay=0.5)}, r"other settings \(weight_decay\)"),
        ({"data": stripes(1)}, "other data_sha256"),
        ({"precision": "float64"}, "other precision"),
    ],
)
def test_a_checkpoint_or_record_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], message: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    with pytest.raises(train.CheckpointError, match=message):
        start(tmp_path, **change)
    start(tmp_path)
    with pytest.raises(train.CheckpointError, match=r"0\.json is the record of a run with other"):
        start(tmp_path, **change)


def test_a_finished_run_is_not_trained_again_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, AssertionError)
        assert start(tmp_path) == first
        with pytest.raises(AssertionError):
            start(tmp_path, resume=False)
    assert outcome(start(tmp_path)) == outcome(first)


@pytest.mark.parametrize("poison", ["loss", "weights"])
def test_no_number_stops_the_run_names_the_step_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: str
) -> None:
    from safetensors.torch import load_file

    original = Trainer.step

    def step(self: Trainer) -> None:
        original(self)
        number = int(self.step_number)
        if poison == "loss" and number == 10:
            self.losses[1] = float("nan")
        if poison == "weights" and number == 12:
            self.weights.flat[0] = float("inf")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(train.DivergedError) as caught:
            start(tmp_path)
    message = str(caught.value)
    if poison == "loss":
        assert "the loss is nan at step 10 (epoch 3, step 2 of 4)" in message
    else:
        assert "the weights are no numbers after step 12 (epoch 3, step 4 of 4)" in message
    assert "The checkpoint after epoch 2 is kept in" in message
    tensors = load_file(tmp_path / "out" / "tiny" / "0" / "checkpoint-0-2.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert outcome(start(tmp_path)) == outcome(start(tmp_path / "whole"))


def test_a_learning_rate_that_is_far_too_high_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(train.DivergedError, match="No checkpoint was written yet"):
        start(tmp_path, changed(learning_rate=1e30, optimizer="sgd", warmup_epochs=0.0))


# ---------------------------------------------------------------------------------- the step


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_the_optimisers_are_torchs(name: str) -> None:
    weight = torch.randn(40, dtype=torch.float64)
    decay = torch.full_like(weight, 0.03)
    ours = weight.clone()
    theirs = nn.Parameter(weight.clone())
    options = {"lr": 0.1, "weight_decay": 0.03}
    reference: torch.optim.Optimizer = {
        "adam": lambda: torch.optim.Adam([theirs], **options),
        "adamw": lambda: torch.optim.AdamW([theirs], **options),
        "sgd": lambda: torch.optim.SGD([theirs], momentum=0.9, nesterov=True, **options),
    }[name]()
    optimizer = Optimizer(name, ours, decay)
    for step in range(10):
        rate = 0.1 / (step + 1)
        gradient = torch.randn_like(weight)
        reference.param_groups[0]["lr"] = rate
        theirs.grad = gradient.clone()
        reference.step()
        numbers = (rate, *optimizer.corrections(step))
        optimizer.update(ours, gradient, *(torch.tensor(n, dtype=torch.float64) for n in numbers))
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["digits_p8", "digits_cnn", "cifar10_resnet26_p6", "tiny"])
def test_decay_falls_on_convolutions_and_the_classifier_alone(name: str) -> None:
    recipe = dataclasses.replace(RECIPES.get(name, TINY), weight_decay=0.5, epochs=1)
    data = stripes()
    if name.startswith("cifar"):
        x = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8)
        data = Dataset.of("noise", *[Split(x, torch.zeros(16, dtype=torch.int64))] * 3, 10)
    network = trainer(recipe, data)
    wanted = {
        f"{prefix}.weight"
        for prefix, module in network.model.named_modules()
        if isinstance(module, PDOConv2d | nn.Conv2d | nn.Linear)
    }
    vector = Vector(list(network.model.parameters()))
    vector.flat.copy_(network.optimizer.decay)
    names = [n for n, _ in network.model.named_parameters()]
    decayed = {n for n, part in zip(names, vector.parts, strict=True) if (part == 0.5).all()}
    free = {n for n, part in zip(names, vector.parts, strict=True) if (part == 0).all()}
    assert decayed == wanted
    assert decayed | free == set(names)
    assert free


def test_a_step_does_what_plain_torch_does() -> None:
    recipe = changed(augmentation=(), ema_decay=0.9, optimizer="adamw", schedule="cosine")
    recipe = dataclasses.replace(
        recipe, model_options=tuple({**dict(TINY.model_options), "dropout": 0.0}.items())
    )
    data = stripes()
    network = trainer(recipe, data)
    torch.manual_seed(0)
    model = create_model(recipe.model, **dict(recipe.model_options)).double()
    average = [p.detach().clone() for p in model.parameters()]
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    )
    losses = []
    step = 0
    for epoch in range(2):
        order = permutation(70, 0, epoch)
        for low in range(0, 64, 16):
            index = order[low : low + 16]
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate((step + 0.5) / 4)
            x = (data.train.x[index].double() / 255 - data.mean[0]) / data.std[0]
            loss = functional.cross_entropy(model(x), data.train.y[index], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay = min(0.9, (step + 1) / (step + 10))
            for kept, p in zip(average, model.parameters(), strict=True):
                kept.lerp_(p.detach(), 1 - decay)
            losses.append(loss.item())
            step += 1
    ours = network.epoch(0, lambda *_: None) + network.epoch(1, lambda *_: None)
    assert ours == pytest.approx(losses, rel=1e-9)
    for mine, theirs in zip(network.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-7, atol=1e-9)
    assert network.average is not None
    for mine, kept in zip(network.average.parameters(), average, strict=True):
        assert torch.allclose(mine, kept, rtol=1e-7, atol=1e-9)


class Watched(TorchDispatchMode):
    """Notes every operation; refuses those that wait for the device or bring numbers to it."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in self.waiting:
            raise AssertionError(f"{name} cannot be captured")
        self.seen.append(name)
        return func(*args, **(kwargs or {}))


def graph_form(recipe: Recipe) -> Trainer:
    """A trainer whose network has the parts that a captured step has."""
    network = trainer(recipe)
    kind = nn.modules.batchnorm._BatchNorm
    replace(network.model, kind, lambda m, _: SynchronisedNorm(m, ONE))
    return network


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_can_be_captured_and_is_the_same_every_time(optimizer: str) -> None:
    network = graph_form(changed(optimizer=optimizer))
    sequences = []
    for _ in range(3):
        with Watched() as watched:
            network.step()
        sequences.append(watched.seen)
    assert len(sequences[0]) > 50
    assert sequences[0] == sequences[1] == sequences[2]


def test_the_watcher_refuses_what_waits() -> None:
    with Watched(), pytest.raises(AssertionError, match="_local_scalar_dense cannot be captured"):
        torch.ones(1).item()
    with Watched(), pytest.raises(AssertionError, match="cannot be captured"):
        torch.ones(2)[torch.tensor([True, False])]


def test_trying_a_step_leaves_no_trace() -> None:
    network, untouched = trainer(), trainer()
    tried(network.step, list(network.state().values()), 2)
    for name, tensor in untouched.state().items():
        assert torch.equal(network.state()[name], tensor), name
    assert network.epoch(0, lambda *_: None) == untouched.epoch(0, lambda *_: None)


def test_every_epoch_shows_every_image_once_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[int]] = []
    original = Trainer._loss

    def watching(self: Trainer, indices: torch.Tensor) -> torch.Tensor:
        seen.append(indices.tolist())
        return original(self, indices)

    monkeypatch.setattr(Trainer, "_loss", watching)
    network = trainer(changed(batch_size=10))
    for epoch in range(2):
        network.epoch(epoch, lambda *_: None)
    first, second = ([i for batch in part for i in batch] for part in (seen[:7], seen[7:]))
    assert sorted(first) == sorted(second) == list(range(70))
    assert first != second


def test_training_images_are_augmented_anew_in_every_epoch_and_others_never() -> None:
    network = trainer()
    data = stripes()
    index = torch.arange(5)
    batches = []
    for epoch in range(2):
        network.epoch(epoch, lambda *_: None)
        batches.append(network.images(data.train.x[index], network.drawn[index]))
        augmentation = Augmentation(rotate=True, shift=1)
        turned = augmentation(data.train.x[index].double() / 255, 0, epoch, index)
        expected = (turned - data.mean[0]) / data.std[0]
        assert torch.allclose(batches[-1], expected)
    assert not torch.allclose(*batches)
    plain = (data.test.x.double() / 255 - data.mean[0]) / data.std[0]
    assert torch.allclose(network.images(data.test.x), plain)


def test_a_step_leaves_the_data_alone(tmp_path: Path) -> None:
    data = stripes()
    start(tmp_path, data=data)
    assert torch.equal(data.train.x, stripes().train.x)
    assert torch.equal(data.test.y, stripes().test.y)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("last", [False, True])
def test_other_number_formats_and_layouts_train_too(
    tmp_path: Path, precision: str, last: bool
) -> None:
    found = start(tmp_path, changed(epochs=2), precision=precision, channels_last=last)
    usual = start(tmp_path / "usual", changed(epochs=2))
    assert found.precision == precision
    close = 1e-4 if precision == "float64" else 0.05
    assert found.epochs[1]["loss"] == pytest.approx(usual.epochs[1]["loss"], rel=close)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_the_settings_of_torch_are_put_back(precision: str) -> None:
    def settings() -> tuple[object, ...]:
        backend = torch.backends.cudnn
        if hasattr(backend, "conv"):
            return backend.benchmark, backend.conv.fp32_precision
        return backend.benchmark, backend.allow_tf32

    before = settings()
    how = How(torch.device("cuda"), "graph", precision, False)
    with convolution_precision(how):
        wanted = {"float32": ("ieee", False), "tf32": ("tf32", True)}[precision]
        assert settings()[0] is True
        assert settings()[1] in wanted
    assert settings() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "graph"}, "CUDA graphs need one"),
        ({"engine": "fast"}, "expected an engine"),
        ({"precision": "tf32"}, "only GPUs"),
        ({"precision": "float8"}, "expected a precision"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"seed": -1}, "expected a seed"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start(tmp_path, **options)
    assert not (tmp_path / "out").exists()


def test_a_wrong_revision_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong() -> str:
        raise ValueError("expected ECONV_REVISION")

    monkeypatch.setattr(records, "revision", wrong)
    interrupt_at(monkeypatch, 1, AssertionError)
    with pytest.raises(ValueError, match="expected ECONV_REVISION"):
        start(tmp_path)


# --------------------------------------------------------------------------- dropout and norms


def keyed(probability: float, keys: torch.Tensor, salt: int = 0) -> KeyedDropout:
    dropout = KeyedDropout(probability, salt)
    dropout.keys = keys
    return dropout


@pytest.mark.parametrize("probability", [0.1, 0.2, 0.5])
def test_keyed_dropout_drops_its_share_and_keeps_the_mean(probability: float) -> None:
    x = torch.ones(64, 5, 33, 31)
    y = keyed(probability, torch.arange(64))(x)
    share = (y == 0).float()
    assert share.mean().item() == pytest.approx(probability, abs=0.002)
    assert y.mean().item() == pytest.approx(1.0, abs=0.004)
    # Every sample and every place has its share, and neighbours know nothing of each other.
    spread = (probability * (1 - probability) / x[0].numel()) ** 0.5
    assert (share.mean((1, 2, 3)) - probability).abs().max() < 5 * spread
    centred = share.flatten(1) - probability
    for step in (1, 2, 3, 4, 31, 33 * 31):
        both = (centred[:, step:] * centred[:, :-step]).mean() / (probability * (1 - probability))
        assert abs(both.item()) < 0.01
    across = (centred[1:] * centred[:-1]).mean() / (probability * (1 - probability))
    assert abs(across.item()) < 0.01


def test_keyed_dropout_hangs_on_sample_layer_and_step_and_not_on_the_batch() -> None:
    x = torch.ones(6, 2, 5, 5)
    keys = torch.arange(6)
    y = keyed(0.5, keys)(x)
    assert torch.equal(keyed(0.5, keys[2:4])(x[2:4]), y[2:4])
    assert not torch.equal(keyed(0.5, keys, salt=1)(x), y)
    assert not torch.equal(keyed(0.5, keys + 6)(x), y)
    network = trainer(with_options(dropout=0.5))
    masks = []
    for _ in range(2):
        network._loss(torch.arange(4))
        masks.append(network.dropouts[0].keys)
        network.step_number.add_(1)
    assert not torch.equal(masks[0], masks[1])


def test_keyed_dropout_passes_gradients_and_rests_in_evaluation() -> None:
    dropout = keyed(0.5, torch.arange(4))
    x = torch.randn(4, 3, 3, 3, requires_grad=True)
    y = dropout(x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    assert torch.equal(dropout.eval()(x), x)
    with pytest.raises(ValueError, match="a key for each sample"):
        keyed(0.5, torch.arange(3))(x)


@pytest.mark.parametrize("kind", ["group", "plain"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_synchronised_norm_of_one_process_is_the_ordinary_one(
    kind: str, layout: torch.memory_format
) -> None:
    theirs = GroupBatchNorm2d(3, "p4") if kind == "group" else nn.BatchNorm2d(12)
    theirs = theirs.double()
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    holder = nn.Sequential(theirs)
    ours = nn.Sequential(GroupBatchNorm2d(3, "p4") if kind == "group" else nn.BatchNorm2d(12))
    ours = ours.double()
    replace(ours, nn.modules.batchnorm._BatchNorm, lambda m, _: SynchronisedNorm(m, ONE))
    assert isinstance(ours[0], SynchronisedNorm)
    ours.load_state_dict(holder.state_dict())
    for training in (True, True, False):
        holder.train(training)
        ours.train(training)
        base = torch.randn(5, 12, 4, 6, dtype=torch.float64) * 3 + 2
        x = base.to(memory_format=layout).requires_grad_()
        z = base.clone(memory_format=layout).requires_grad_()
        upstream = torch.randn_like(base)
        mine, expected = ours(x), holder(z)
        assert torch.allclose(mine, expected, rtol=1e-11, atol=1e-12)
        gradients = torch.autograd.grad(mine, [x, *ours.parameters()], upstream)
        wanted = torch.autograd.grad(expected, [z, *holder.parameters()], upstream)
        for a, b in zip(gradients, wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-11)
        for name, value in holder.state_dict().items():
            assert torch.allclose(ours.state_dict()[name].double(), value.double(), rtol=1e-12)


# --------------------------------------------------------------------------------- processes

WORKER = """
import json, os, signal, sys
import torch
from pathlib import Path
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
import test_train
from econv import train
from econv.train.trainer import Trainer
folder, precision, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank = int(os.environ["RANK"])
if kill_at and rank == 1:
    original = Trainer.step
    done = [0]
    def step(self):
        done[0] += 1
        if done[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self)
    Trainer.step = step
try:
    record = test_train.start(folder, test_train.PAIR, precision=precision)
except train.TrainingError as error:
    print(f"{{type(error).__name__}}: {{error}}", file=sys.stderr, flush=True)
    os._exit(3)
if rank == 0:
    (folder / "done").write_text(str(record.processes))
train.leave()
"""

PAIR = changed(name="pair", epochs=5, augmentation=(("rotate", True),))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pair(folder: Path, precision: str, kill_at: int = 0) -> list[tuple[int, str]]:
    """Two processes of one run: their exit codes and what they wrote to stderr."""
    folder.mkdir(parents=True)
    script = folder / "worker.py"
    script.write_text(WORKER.format(tests=str(Path(__file__).parent)))
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-W",
        "error::FutureWarning",
        str(script),
        str(folder),
        precision,
        str(kill_at),
    ]
    workers = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, error) for worker, error in zip(workers, errors, strict=True)]


def losses(record: Record) -> list[float]:
    return [e[name] for e in record.epochs for name in ("loss", "validation_loss")]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    for code, error in pair(tmp_path / "two", "float64"):
        assert code == 0, error
    together = records.load(tmp_path / "two" / "records" / "pair" / "0.json")
    alone = start(tmp_path / "one", PAIR, precision="float64")
    assert together.processes == 2
    assert losses(together) == pytest.approx(losses(alone), abs=1e-9)
    assert together.predictions_sha256 == alone.predictions_sha256
    assert (together.test_error, together.selected_epoch) == (
        alone.test_error,
        alone.selected_epoch,
    )


def test_a_killed_worker_ends_the_run_with_a_clear_message_and_it_resumes(tmp_path: Path) -> None:
    (first, error), (second, _) = pair(tmp_path / "two", "float32", kill_at=14)
    assert second == -signal.SIGKILL
    assert first == 3, error
    assert "WorkerLostError: process 0 of 2 lost another one" in error
    assert "The checkpoint after epoch 3 is kept in" in error
    assert not (tmp_path / "two" / "records").exists()
    resumed = start(tmp_path / "two", PAIR, precision="float32")
    alone = start(tmp_path / "one", PAIR)
    assert [e["epoch"] for e in resumed.epochs] == [1, 2, 3, 4, 5]
    steps = [[e["loss"] for e in record.epochs] for record in (resumed, alone)]
    assert steps[0] == pytest.approx(steps[1], abs=1e-6)


def test_a_batch_must_be_shared_equally() -> None:
    data = stripes()
    three = Processes(0, 3, torch.device("cpu"))
    with pytest.raises(ValueError, match="3 processes can share equally; got 16"):
        Trainer(TINY, 0, data.train, data, HOW, three)


def test_several_processes_run_eagerly() -> None:
    with pytest.raises(ValueError, match="'eager' with several processes"):
        How.choose(Processes(0, 2, torch.device("cpu")), "compile", None, None)


# ---------------------------------------------------------------------------------- telling


def test_progress_tells_rates_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SAID", 0.0)
    start(tmp_path, progress=True)
    told = capsys.readouterr().err
    assert "tiny, seed 0: epoch 2/4, step 3/4" in told
    assert "images/s" in told
    assert " left" in told
    assert "test error" in told
    start(tmp_path / "quiet")
    assert capsys.readouterr().err == ""


def test_tensorboard_gets_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "board" / "tiny" / "0")
            assert purge_step == 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def flush(self) -> None:
            written.append(("flushed", 0))

        def close(self) -> None:
            written.append(("closed", 0))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    start(tmp_path, changed(retrain_on_all=True), tensorboard=tmp_path / "board")
    assert [step for name, step in written if name == "loss"] == list(range(1, 9))
    assert [step for name, step in written if name == "validation_error"] == [1, 2, 3, 4]
    assert written.count(("flushed", 0)) == 8  # with every checkpoint
    assert written[-1] == ("closed", 0)


def test_tensorboard_reads_each_epoch_once_whatever_happened_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"

    def curves() -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(board / "tiny" / "0"))
        events.Reload()
        return {
            name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }

    def check(record: Record) -> None:
        found = curves()
        assert set(found) == {"loss", "learning_rate", "validation_loss", "validation_error"}
        for name, points in found.items():
            expected = [(e["epoch"], e[name]) for e in record.epochs if name in e]
            assert [step for step, _ in points] == [step for step, _ in expected]
            assert [v for _, v in points] == pytest.approx([v for _, v in expected], rel=1e-6)

    with monkeypatch.context() as patch:
        interrupt_at(patch, 15, KeyboardInterrupt)  # in the fourth epoch, a checkpoint at two
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, tensorboard=board, checkpoint_every=2)
    assert [step for step, _ in curves()["loss"]] == [1, 2, 3]
    check(start(tmp_path, tensorboard=board, checkpoint_every=2))
    check(start(tmp_path, tensorboard=board, resume=False))
    assert len(list((board / "tiny" / "0").iterdir())) == 3


@pytest.mark.parametrize(
    ("module", "message"),
    [("torch.utils.tensorboard", "pip install tensorboard"), ("safetensors.torch", "econv.train")],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message):
        start(tmp_path, tensorboard=tmp_path if "tensorboard" in module else None)


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.main(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "unknown recipe 'nothing'"),
        (("digits_p8", "--set", "epochs"), "expected --set key=value; got 'epochs'"),
        (("digits_p8", "--set", "epochs=x"), "expected epochs: a whole number"),
        (("digits_p8", "--seeds", "0"), "expected --seeds of at least 1"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert command(*arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("econv train: ")
    assert message in told
    assert told.count("\n") == 1


def test_the_command_trains_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    monkeypatch.setattr(runs, "load", lambda name, root, source: stripes())
    places = ("--output", str(tmp_path / "out"), "--records", str(tmp_path / "records"))
    arguments = ("tiny", "--set", "epochs=2", "--seeds", "2", "--seed", "5", "--device", "cpu")
    assert command(*arguments, *places, "--quiet") == 0
    found = records.load_all(tmp_path / "records")
    assert [(r.recipe, r.seed, len(r.epochs)) for r in found] == [
        ("tiny+epochs=2", 5, 2),
        ("tiny+epochs=2", 6, 2),
    ]
    assert "tiny+epochs=2 seed 6: test error" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_the_same_one_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    monkeypatch.setattr(runs, "load", lambda name, root, source: stripes())
    places = ("--output", str(tmp_path / "out"), "--records", str(tmp_path / "records"))
    arguments = ("tiny", "--device", "cpu", "--checkpoint-every", "1", *places)
    original = Trainer.step
    before = signal.getsignal(signal.SIGTERM)

    def step(self: Trainer) -> None:
        if int(self.step_number) == 9:
            signal.raise_signal(number)
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        assert command(*arguments) == 130
    assert "The same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
    assert command(*arguments) == 0
    assert "going on after epoch 2" in capsys.readouterr().err


def test_the_package_can_be_run_as_torchrun_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "econv.train", "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("econv train: unknown recipe 'nothing'")


def test_importing_econv_imports_nothing_of_training() -> None:
    code = (
        "import sys, econv; names = 'train recipes records report data'.split(); "
        "sys.exit(any(f'econv.{n}' in sys.modules for n in names))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------- a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")
@pytest.mark.parametrize(
    "engine",
    [
        "graph",
        pytest.param(
            "compile",
            # torch warns of its own deprecated parts while the compiler is imported.
            marks=pytest.mark.filterwarnings(
                "ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores"
            ),
        ),
    ],
)
def test_a_captured_step_trains_as_an_eager_one(tmp_path: Path, engine: str) -> None:
    recipe = with_options(dropout=0.0)
    options: dict[str, object] = {"device": "cuda", "precision": "float64"}
    eager = start(tmp_path / "eager", recipe, engine="eager", **options)
    captured = start(tmp_path / "captured", recipe, engine=engine, **options)
    assert losses(captured) == pytest.approx(losses(eager), abs=1e-6)
    on_cpu = start(tmp_path / "cpu", recipe, precision="float64")
    assert losses(captured) == pytest.approx(losses(on_cpu), abs=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")
def test_a_captured_step_draws_new_dropout_every_time_and_the_same_in_every_run(
    tmp_path: Path,
) -> None:
    # Without learning, only dropout and the order of the images move the loss.
    still = dataclasses.replace(
        with_options(dropout=0.5), learning_rate=1e-12, batch_size=70, augmentation=()
    )
    first, again = (start(tmp_path / n, still, device="cuda") for n in ("a", "b"))
    assert len({e["loss"] for e in first.epochs}) == 4
    assert losses(first) == pytest.approx(losses(again), rel=1e-4)
