"""Checkpoints and trained weights: safetensors with a JSON that names them, whole or not at all."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from econv import files, records
from econv.train.errors import CheckpointError
from econv.train.processes import Processes


@dataclass(frozen=True)
class Saved:
    told: dict[str, Any]
    tensors: dict[str, Tensor]


class Checkpoints:
    """``checkpoint.json`` and the tensors that it names.

    The JSON is replaced last and in one move: before that the old pair is whole, afterwards the
    new one is.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], processes: Processes) -> None:
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

    def load(self) -> Saved | None:
        """The checkpoint, the first process's in all of them; an error if it is of another run."""
        text = content = None

        def read() -> None:
            nonlocal text, content
            if not self.path.exists():
                return
            try:
                text = self.path.read_bytes()
                content = self._tensors(_parsed(text))
            except (ValueError, KeyError, TypeError, OSError, CheckpointError) as error:
                raise CheckpointError(
                    f"the checkpoint in {self.folder} cannot be used: {error}; start anew with "
                    "--fresh, or remove the folder"
                ) from None

        self.processes.together(read, CheckpointError)
        text, content = self.processes.share(text), self.processes.share(content)
        if text is None or content is None:
            return None
        told = _parsed(text)["told"]
        self.last = (told["phase"], told["epoch"])
        return Saved(told, _safetensors().load(content))

    def _tensors(self, whole: dict[str, Any]) -> bytes:
        for name, wanted in self.identity.items():
            if whole[name] != wanted:
                detail = ""
                if isinstance(wanted, dict):
                    keys = sorted(k for k in wanted if whole[name].get(k) != wanted[k])
                    detail = f" ({', '.join(keys)})"
                raise CheckpointError(f"it was made with other {name}{detail}")
        _check_told(whole["told"], self.identity["settings"])
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


def _parsed(text: bytes) -> dict[str, Any]:
    """A checkpoint's JSON; the parts that an older version noted come under the present names."""
    whole: dict[str, Any] = json.loads(text)
    told = whole["told"]
    if isinstance(told, dict) and isinstance(told.get("parts"), list):
        told["parts"] = [records.renamed(part) for part in told["parts"]]
    return whole


def _check_told(told: Any, settings: Mapping[str, Any]) -> None:
    """Raise an error if the run's own notes are not what a run of these settings notes."""
    kinds = {
        "phase": int,
        "epoch": int,
        "best": dict | None,
        "history": list,
        "seconds": float,
        "setup_seconds": float,
        "parts": list,
    }
    if not isinstance(told, dict):
        raise CheckpointError(f"expected told as an object; got {told!r:.50}")
    for name, kind in kinds.items():
        if name not in told:
            raise CheckpointError(f"expected {name}, which is missing: an older version wrote it")
        value = told[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"expected {name} of another kind; got {value!r:.50}")
    choices = told.get("choices", {})  # older versions measured nothing
    if not isinstance(choices, dict) or not all(isinstance(v, str) for v in choices.values()):
        raise CheckpointError(f"expected choices as names of engines; got {choices!r:.50}")
    for entry in told["history"]:
        records.check_epoch(entry)
    for part in told["parts"]:
        records.check_part(part)
    phase, epoch = told["phase"], told["epoch"]
    last = int(settings["retrain_on_all"])
    if not (0 <= phase <= last and 0 <= epoch <= settings["epochs"]):
        raise CheckpointError(f"expected a phase and an epoch of this run; got {phase}, {epoch}")
    if len(told["history"]) != phase * settings["epochs"] + epoch or not told["parts"]:
        raise CheckpointError("expected a history of every epoch so far, and who took part")
    best = told["best"]
    names = ("epoch", "validation_error", "validation_loss")
    seen = [{n: entry[n] for n in names} for entry in told["history"] if "validation_loss" in entry]
    if best not in seen and (seen or best is not None):
        raise CheckpointError(f"expected best as one of the evaluated epochs; got {best!r:.50}")


def _safetensors() -> Any:
    try:  # by name: it need not be installed where types are checked
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'econv[train]'") from None


def clear(folder: Path, record: Path) -> None:
    """Remove what an earlier run of the same recipe and seed left."""
    record.unlink(missing_ok=True)
    (folder / "checkpoint.json").unlink(missing_ok=True)
    for tensors in [*folder.glob("checkpoint-*.safetensors"), *folder.glob("model.safetensors")]:
        tensors.unlink()
