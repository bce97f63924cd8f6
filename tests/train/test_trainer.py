"""One step: what plain torch does, on the right images, in any number format."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from econv import create_model
from econv.data import Augmentation, Dataset, Split, permutation
from econv.train.trainer import Trainer
from tiny_training import TINY, changed, start, stripes, trainer


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


def test_dropout_depends_on_seed_epoch_and_sample_and_not_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Trainer._loss
    drawn: dict[int, dict[tuple[int, int], int]] = {}

    def watching(self: Trainer, indices: torch.Tensor) -> torch.Tensor:
        loss = original(self, indices)
        (dropout,) = self.dropouts
        assert dropout.keys is not None
        epoch = int(self.step_number) // self.steps
        pairs = zip(indices.tolist(), dropout.keys.tolist(), strict=True)
        drawn.setdefault(self.batch, {}).update({(epoch, i): key for i, key in pairs})
        return loss

    monkeypatch.setattr(Trainer, "_loss", watching)
    for size in (10, 35):
        network = trainer(changed(batch_size=size))
        for epoch in range(2):
            network.epoch(epoch, lambda *_: None)
    assert drawn[10] == drawn[35]
    assert len(set(drawn[10].values())) == len(drawn[10]) == 140


def test_a_step_leaves_the_data_alone(tmp_path: Path) -> None:
    data = stripes()
    start(tmp_path, data=data)
    assert torch.equal(data.train.x, stripes().train.x)
    assert torch.equal(data.test.y, stripes().test.y)


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ("TensorFloat32 tensor cores for float32 matrix multiplication available", True),
        ("something else", False),
    ],
)
def test_only_the_compilers_advice_on_number_formats_is_silenced(
    monkeypatch: pytest.MonkeyPatch, text: str, silent: bool
) -> None:
    def compiled(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            warnings.warn(text, stacklevel=1)
            return model(x)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    if silent:
        trainer(step="compile")
    else:
        with pytest.warns(UserWarning, match=text):
            trainer(step="compile")


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


def volumes() -> Dataset:
    """Balls of two radii in 10³ voxels."""
    line = torch.arange(10) - 4.5
    radius = (line[:, None, None] ** 2 + line[:, None] ** 2 + line**2).sqrt()
    y = torch.arange(8) % 2
    x = (radius < 2 + 2 * y[:, None, None, None]).to(torch.uint8)[:, None] * 255
    return Dataset.of("balls", *[Split(x, y)] * 3, classes=2)


VOLUMES = dataclasses.replace(
    TINY,
    model="convnet6_3d_T",
    model_options=(("fields", (1, 1)), ("pooled_after", (1,)), ("num_classes", 2)),
    batch_size=4,
    augmentation=(("rotate", True), ("scale", 0.1), ("shift", 1)),
)


@pytest.mark.parametrize("last", [False, True])
def test_volumes_train_like_images(tmp_path: Path, last: bool) -> None:
    record = start(tmp_path, VOLUMES, data=volumes(), channels_last=last)
    losses = [entry["loss"] for entry in record.epochs]
    assert losses[-1] < losses[0]
    again = start(tmp_path / "again", VOLUMES, data=volumes(), channels_last=last)
    assert again.predictions_sha256 == record.predictions_sha256


def test_volumes_turn_anew_in_every_epoch_and_have_no_inscribed_disc() -> None:
    data = volumes()
    network = trainer(VOLUMES, data)
    network.epoch(0, lambda *_: None)
    first = network.drawn.clone()
    network.epoch(1, lambda *_: None)
    assert (network.drawn - first).abs().amax(1).min() > 1e-3
    with pytest.raises(ValueError, match="expected images for disc"):
        trainer(dataclasses.replace(VOLUMES, disc=True), data)
