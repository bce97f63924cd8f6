"""A step can be captured: the same operations every time, and the same training."""

import dataclasses
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from econv import convert_sync_batchnorm
from econv.recipes import Recipe
from econv.train.capture import captured, tried
from econv.train.trainer import Trainer
from tiny_training import changed, losses, start, trainer, with_options


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
    convert_sync_batchnorm(network.model)
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


def test_a_step_is_warmed_up_and_then_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that does nothing."""
    device, recording = MagicMock(), []
    device.graph().__enter__.side_effect = lambda *_: recording.append(True)
    device.graph().__exit__.side_effect = lambda *_: recording.clear()
    for name in ("Stream", "stream", "current_stream", "CUDAGraph", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    seen = []
    replay = captured(lambda: seen.append(bool(recording)), [])
    assert seen == [False, False, False, True]
    assert replay is device.CUDAGraph().replay


def test_trying_a_step_leaves_no_trace() -> None:
    network, untouched = trainer(), trainer()
    tried(network.step, list(network.state().values()), 2)
    for name, tensor in untouched.state().items():
        assert torch.equal(network.state()[name], tensor), name
    assert network.epoch(0, lambda *_: None) == untouched.epoch(0, lambda *_: None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")
@pytest.mark.parametrize(
    "step",
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
def test_a_captured_step_trains_as_an_eager_one(tmp_path: Path, step: str) -> None:
    recipe = with_options(dropout=0.0)
    options: dict[str, object] = {"device": "cuda", "precision": "float64"}
    eager = start(tmp_path / "eager", recipe, step="eager", **options)
    captured = start(tmp_path / "captured", recipe, step=step, **options)
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
