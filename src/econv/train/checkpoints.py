"""Checkpoints and trained weights: safetensors with a JSON that names them, whole or not at all."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from econv import files, records
from econv.train.errors import CheckpointError, when
from econv.train.processes import Processes

FORMAT = 2
"""Of the JSON. In format 1 nothing vouched for what it says."""

NEWEST, BEFORE = "checkpoint.json", "checkpoint-before.json"
_FIRST_KEYS = {"settings", "seed", "data_sha256", "precision", "told", "tensors", "sha256"}
_TENSORS = "checkpoint-*.safetensors"
_SEAL = re.compile(rb'\{"checksum": "([0-9a-f]{64})", (.*)', re.DOTALL)


class _DamagedError(CheckpointError):
    """One generation cannot be used; that before it may be."""


@dataclass(frozen=True)
class Saved:
    told: dict[str, Any]
    tensors: dict[str, Tensor]


class Checkpoints:
    """The last two states of a run: a JSON each, and the tensors that it names.

    ``checkpoint.json`` is replaced last and in one move: before that the old pair is whole,
    afterwards the new one is. What it was is kept as ``checkpoint-before.json``, for the case that
    the newest is found damaged. Every file has its checksum.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], processes: Processes) -> None:
        self.folder = folder
        self.identity = identity
        self.processes = processes
        self.path = folder / NEWEST
        self.last: tuple[int, int, int] | None = None
        self.text: bytes | None = None  # of the newest that is known to be whole

    def describe(self) -> str:
        if self.last is None:
            return "No checkpoint was written yet."
        return (
            f"The checkpoint after {when(*self.last)} is kept in {self.folder}; the same "
            "command goes on from there."
        )

    def save(self, told: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        content = _content(tensors)
        place = told["phase"], told["epoch"], told["step"]
        name = f"checkpoint-{'-'.join(map(str, place[: 3 if place[2] else 2]))}.safetensors"
        files.write_atomically(self.folder / name, content)
        whole = {
            "format": FORMAT,
            **self.identity,
            "told": told,
            "tensors": name,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        text = sealed(whole)
        if self.text is not None:
            files.write_atomically(self.folder / BEFORE, self.text)
        files.write_atomically(self.path, text)
        kept = {name} if self.text is None else {name, json.loads(self.text)["tensors"]}
        self.last, self.text = place, text
        for other in self.folder.glob(_TENSORS):
            if other.name not in kept:
                other.unlink()

    def load(self) -> Saved | None:
        """The newest checkpoint that is whole, the first process's in all of them.

        What is damaged is named on stderr. An error if nothing is whole, if the checkpoint is of
        another run or of a newer version.
        """
        text = content = None

        def read() -> None:
            nonlocal text, content
            problems: list[str] = []
            for path in (self.path, self.folder / BEFORE):
                if not path.exists():
                    continue
                try:
                    text, content = self._pair(path)
                    break
                except _DamagedError as error:
                    problems.append(f"{path.name}: {error}")
                except CheckpointError as error:
                    problems.append(str(error))
                    break
            found = "; ".join(problems)
            if problems and text is None:
                raise CheckpointError(
                    f"the checkpoint in {self.folder} cannot be used: {found}; start anew with "
                    "--fresh, or remove the folder"
                )
            if problems:
                print(
                    f"{self.folder}: damaged, going on from the checkpoint before: {found}",
                    file=sys.stderr,
                    flush=True,
                )

        self.processes.together(read, CheckpointError)
        text, content = self.processes.share(text), self.processes.share(content)
        if text is None or content is None:
            return None
        told = _parsed(text)["told"]
        self.last, self.text = (told["phase"], told["epoch"], told["step"]), text
        return Saved(told, _safetensors().load(content))

    def _pair(self, path: Path) -> tuple[bytes, bytes]:
        """The bytes of a checkpoint's two files, as they were written."""
        try:
            text = path.read_bytes()
            whole = _parsed(text)
            for name, wanted in self.identity.items():
                if whole[name] != wanted:
                    raise CheckpointError(
                        f"it was made with other {_difference(name, whole, wanted)}"
                    )
            _check_told(whole["told"], self.identity["settings"])
            if not re.fullmatch(r"checkpoint-[\d-]+\.safetensors", whole["tensors"]):
                raise _DamagedError(f"expected the name of tensors; got {whole['tensors']!r:.50}")
            content = (self.folder / whole["tensors"]).read_bytes()
        except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
            raise _DamagedError(f"{error}") from None
        if hashlib.sha256(content).hexdigest() != whole["sha256"]:
            raise _DamagedError(f"{whole['tensors']} is damaged: its checksum differs")
        return text, content

    def save_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Write ``model.safetensors``; its SHA-256, in every process."""
        content = _content(weights)
        if self.processes.first:
            files.write_atomically(self.folder / "model.safetensors", content)
        return hashlib.sha256(content).hexdigest()

    def remove(self) -> None:
        for path in (self.path, self.folder / BEFORE, *self.folder.glob(_TENSORS)):
            path.unlink(missing_ok=True)


def sealed(whole: Mapping[str, Any]) -> bytes:
    """A checkpoint's JSON, which begins with the checksum of all that follows."""
    rest = json.dumps(whole, allow_nan=False)[1:].encode()
    return b'{"checksum": "%s", ' % hashlib.sha256(rest).hexdigest().encode() + rest


def _parsed(text: bytes) -> dict[str, Any]:
    """A checkpoint's JSON, checked; what an older version noted comes under the present names."""
    seal = _SEAL.fullmatch(text)
    whole: dict[str, Any] = json.loads(text)
    if not isinstance(whole, dict):
        raise _DamagedError("expected an object")
    if seal is not None and hashlib.sha256(seal[2]).hexdigest().encode() != seal[1]:
        raise _DamagedError("its checksum differs")
    found = whole.get("format", 1)
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointError(f"it is of a newer version: format {found}, where {FORMAT} is known")
    if seal is None and set(whole) != _FIRST_KEYS:
        raise _DamagedError("it lacks its checksum")
    told = whole["told"]
    if isinstance(told, dict):
        told.update({"step": 0, "spent": 0.0, "convolutions": {}} | told)
        if isinstance(told.get("parts"), list):
            told["parts"] = [records.renamed(part) for part in told["parts"]]
    return whole


def _difference(name: str, whole: Mapping[str, Any], wanted: Any) -> str:
    if not isinstance(wanted, dict) or not isinstance(whole[name], dict):
        return name
    keys = sorted(k for k in {*wanted, *whole[name]} if whole[name].get(k) != wanted.get(k))
    return f"{name} ({', '.join(keys)})"


def _check_told(told: Any, settings: Mapping[str, Any]) -> None:
    """Raise an error if the run's own notes are not what a run of these settings notes."""
    kinds = {
        "phase": int,
        "epoch": int,
        "step": int,
        "spent": float,
        "best": dict | None,
        "history": list,
        "seconds": float,
        "setup_seconds": float,
        "parts": list,
        "convolutions": dict,
    }
    if not isinstance(told, dict):
        raise _DamagedError(f"expected told as an object; got {told!r:.50}")
    for name, kind in kinds.items():
        if name not in told:
            raise _DamagedError(f"expected {name}, which is missing: an older version wrote it")
        value = told[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _DamagedError(f"expected {name} of another kind; got {value!r:.50}")
    choices = told.get("choices", {})  # older versions measured nothing
    if not isinstance(choices, dict) or not all(isinstance(v, str) for v in choices.values()):
        raise _DamagedError(f"expected choices as names of engines; got {choices!r:.50}")
    for entry in told["history"]:
        records.check_epoch(entry)
    for part in told["parts"]:
        records.check_part(part)
    phase, epoch = told["phase"], told["epoch"]
    last = int(settings["retrain_on_all"])
    if not (0 <= phase <= last and 0 <= epoch <= settings["epochs"] and told["step"] >= 0):
        raise _DamagedError(f"expected a phase and an epoch of this run; got {phase}, {epoch}")
    if len(told["history"]) != phase * settings["epochs"] + epoch or not told["parts"]:
        raise _DamagedError("expected a history of every epoch so far, and who took part")
    best = told["best"]
    names = ("epoch", "validation_error", "validation_loss")
    seen = [{n: entry[n] for n in names} for entry in told["history"] if "validation_loss" in entry]
    if best not in seen and (seen or best is not None):
        raise _DamagedError(f"expected best as one of the evaluated epochs; got {best!r:.50}")


def _safetensors() -> Any:
    try:  # by name: it need not be installed where types are checked
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'econv[train]'") from None


def clear(folder: Path, record: Path) -> None:
    """Remove what an earlier run of the same recipe and seed left."""
    names = (NEWEST, BEFORE, "model.safetensors")
    for path in (record, *(folder / name for name in names), *folder.glob(_TENSORS)):
        path.unlink(missing_ok=True)


def _content(tensors: Mapping[str, Tensor]) -> bytes:
    found: bytes = _safetensors().save(
        {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    )
    return found
