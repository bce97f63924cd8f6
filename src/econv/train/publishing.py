"""From a finished run to weights that anybody can check, with a card that says what they are."""

from __future__ import annotations

import copy
import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from econv import records as records_room
from econv.data import Dataset, Split, class_names, fingerprint
from econv.files import write_atomically
from econv.models import create_model
from econv.progress import Progress
from econv.records import Record
from econv.testing import rotate
from econv.train.errors import CheckpointError
from econv.train.execution import Execution, convolution_precision
from econv.train.processes import Processes
from econv.weights import LICENCE, Transforms, Weights

_HALVED = 1 << 20  # bytes: smaller files stay in float32, where every prediction can be compared
_CLOSE = {"tf32": 0.05, "bfloat16": 0.1}
"""Percent of the images by which an error may differ from one recorded in that arithmetic."""
_ROUNDED = 0.02
"""And from one recorded in float32, or by what weights are stored in half precision."""


def publish(
    record: Record,
    run: Path | str,
    data: Dataset,
    records: Path | str,
    weights: Path | str,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Weights:
    """Write the weights of a finished run to ``<weights>/<recipe>/``, and return them.

    The test split is read again, to compare: nothing is chosen by it but how the numbers are
    stored. Large files are in half precision if the error stays the same.

    Args:
        record: of the run.
        run: the folder with its ``model.safetensors``.
        data: what it was trained and tested on.
        records: the folder where the record lies.
        weights: the folder for weights of all recipes.
        device: where to evaluate; the first GPU if there is one.
        progress: whether to say on stderr how far it is.

    Raises:
        CheckpointError: if the files are not those of the record.
        ValueError: for data that `expect_publishable` refuses.
    """
    expect_publishable(data)
    content = _content(record, Path(run) / "model.safetensors")
    if fingerprint(data) != record.data_sha256:
        raise CheckpointError(
            f"expected the images of the record of {record.recipe}, seed {record.seed}; these are "
            "others"
        )
    place = records_room.path_of(Path(records), record.recipe, record.seed, record.data_seed)
    settings = record.settings
    network: Any = create_model(settings["model"], **settings["model_options"])
    network.load_state_dict(_safetensors().load(content))
    trained = data.with_validation_in_training() if record.retrained else data
    height, width = data.train.x.shape[2:]
    found = Weights(
        name=record.recipe,
        folder=Path(weights) / record.recipe,
        model=settings["model"],
        recipe=record.recipe,
        seed=record.seed,
        data_seed=record.data_seed or 0,
        dataset=record.dataset,
        recreated=record.recreated,
        mean=trained.mean,
        std=trained.std,
        size=(height, width),
        disc=settings.get("disc", False),
        test_angles=settings.get("test_angles", 0),
        classes=class_names(record.dataset, data.classes),
        metrics={"test_error": record.test_error, "validation_error": record.validation_error},
        parameters=record.parameters,
        dtype="float32",
        precision=record.precision,
        record_sha256=hashlib.sha256(place.read_bytes()).hexdigest(),
        predictions_sha256=record.predictions_sha256,
        data_sha256=record.data_sha256,
    )

    def evaluated(dtype: str) -> Evaluation:
        return Evaluation.of(_rounded(network, dtype), found, data.test, device, progress)

    whole = evaluated("float32")
    if not whole.close:
        raise CheckpointError(
            f"expected the record's test error of {record.test_error:.2f} %; these weights have "
            f"{whole.error:.2f} %"
        )
    half = ("float16", "bfloat16") if len(content) > _HALVED else ()
    stored = ((dtype, evaluated(dtype)) for dtype in half)
    fitting = (d for d, e in stored if e.close and abs(e.error - whole.error) <= _ROUNDED + 1e-9)
    dtype = next(fitting, "float32")
    told = {**found.entry(), "dtype": dtype}
    network._write(found.folder, {"weights": told}, getattr(torch, dtype))
    write_atomically(found.folder / "README.md", _card(record, told).encode())
    return Weights.find(found.folder)


def expect_publishable(data: Dataset) -> None:
    """Images that a card can describe; what is else is refused, before training."""
    if data.train.x.ndim != 4:
        raise ValueError(
            "expected images with weights, whose card has a height and a width; got volumes "
            f"{tuple(data.train.x.shape)}"
        )


class Evaluation:
    """What weights predict of a test split, beside what the record says."""

    def __init__(self, classes: Tensor, error: float, weights: Weights, precision: str) -> None:
        self.count = len(classes)
        self.error = error
        self.wanted = weights.metrics["test_error"]
        digest = hashlib.sha256(classes.cpu().numpy().tobytes()).hexdigest()
        self.same = digest == weights.predictions_sha256
        """Whether every prediction is the record's."""
        apart = abs(self.error - self.wanted)
        self.close = self.same or apart <= _CLOSE.get(weights.precision, _ROUNDED) + 1e-9
        """Whether the error is, as far as rounding lets it."""
        exact = weights.precision == precision == "float32"
        self.comparable = exact and weights.dtype == "float32"
        """Whether the arithmetic is that of the record, so that predictions must be the same."""

    @property
    def holds(self) -> bool:
        return self.same if self.comparable else self.close

    @classmethod
    def of(
        cls,
        network: nn.Module,
        weights: Weights,
        split: Split,
        device: torch.device | str | None,
        progress: bool,
    ) -> Evaluation:
        """Predict the classes of a test split, in the record's precision where the device can."""
        place = Processes.join(device).device
        coarse = place.type == "cuda" and weights.precision in _CLOSE
        precision = weights.precision if coarse else "float32"
        execution = Execution(place, "eager", precision, precision == "bfloat16")
        transforms, split, angles = weights.transforms(), split.to(place), weights.test_angles or 1
        network = network.to(place).eval()
        parts, wrong = [], []
        with (
            convolution_precision(execution),
            Progress(weights.name, angles * len(split), _rate, progress) as bar,
        ):
            for turn in range(angles):
                found = _classes(network, transforms, split, 360 * turn / angles, execution, bar)
                parts.append(found)
                wrong.append(100 * int((found != split.y).sum()) / len(split))
        return cls(torch.cat(parts), sum(wrong) / len(wrong), weights, precision)


@torch.no_grad()
def _classes(
    network: nn.Module,
    transforms: Transforms,
    split: Split,
    degrees: float,
    execution: Execution,
    bar: Progress,
) -> Tensor:
    """As `Trainer.predict` has them: the same sums in the same order."""
    size = 2048 if execution.device.type == "cuda" else 256
    found = []
    for x in split.x.split(size):
        images = x.to(execution.dtype) / 255
        images = transforms(rotate(images, degrees) if degrees else images)
        if execution.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with execution.autocast():
            scores = network(images)
        found.append(scores.to(execution.dtype).argmax(1))
        bar.advance(len(x), f"{degrees:g}°" if degrees else "test images")
    return torch.cat(found)


def _rate(rate: float) -> str:
    return f"{rate:.0f} images/s"


def _content(record: Record, path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(
            f"expected the weights of {record.recipe}, seed {record.seed}, in {path}; they are not "
            "there: train with --fresh, or name the folder of the run with --output"
        )
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != record.weights_sha256:
        raise CheckpointError(f"{path} holds other weights than those of the record")
    return content


def _rounded(network: nn.Module, dtype: str) -> nn.Module:
    """A copy whose matrices went through another format."""
    made, kept = copy.deepcopy(network), getattr(torch, dtype)
    for value in made.state_dict().values():
        if value.is_floating_point() and value.ndim > 1:
            value.copy_(value.to(kept))
    return made


def _card(record: Record, told: Mapping[str, Any]) -> str:
    """The model card, in the form that the Hugging Face Hub reads."""
    images = record.dataset + " (re-created, not the official images)" * record.recreated
    angles = f", mean over {told['test_angles']} angles" * bool(told["test_angles"])
    again = f" --data-seed {record.data_seed}" * bool(record.data_seed)
    place = f"records/{record.recipe}/{records_room.run_name(record.seed, record.data_seed)}.json"
    rows = {
        "network": f"`{told['model']}`, {record.parameters:,} parameters",
        "data": images,
        "recipe": f"`econv train {record.recipe}{again}`, seed {record.seed}",
        "test error": f"{record.test_error:.2f} %{angles}",
        "validation error": f"{record.validation_error:.2f} %",
        "stored as": told["dtype"],
        "record": f"`{place}`, SHA-256 `{told['record_sha256']}`",
        "predictions": f"SHA-256 `{record.predictions_sha256}`",
        "licence": LICENCE,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: econv
license: {LICENCE.lower()}
---
# {record.recipe}

| | |
|---|---|
{table}

Written by `econv train`. Images are given to the network as `transforms()` makes them: pixels from
0 to 1, minus the mean, over the deviation of the training images.

```python
import econv

weights = econv.Weights.find("{record.recipe}")
network = econv.create_model("{told["model"]}", weights=weights)
scores = network(weights.transforms()(images))
```

`econv verify {record.recipe}` reads the test images and compares with the record.
"""


def _safetensors() -> Any:
    return importlib.import_module("safetensors.torch")
