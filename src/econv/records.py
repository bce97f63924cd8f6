"""What a run leaves behind: one JSON file per recipe and seed, ``records/<recipe>/<seed>.json``.

Of data that were made again with a seed of their own it is ``<seed>-data<seed of the data>.json``.

Runs that later ones took the place of lie in ``records/earlier/<number>/``, as in a folder of their
own: what a table ever showed stays.

A record holds what was trained, on what, by which code on which machine, every epoch's metrics and
the one reading of the test split. Files appear whole or not at all, and what is read back is
checked field by field.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import subprocess
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from econv import files

__all__ = [
    "Record",
    "RecordError",
    "check_epoch",
    "check_part",
    "load",
    "load_all",
    "parse",
    "path_of",
    "renamed",
    "revision",
    "run_name",
    "save",
    "strays",
    "versions",
]

FORMAT = 3
"""In format 1 ``step`` had the name ``engine``, until format 2 the paper's ResNets no prefix."""


_LARGEST = 1e15
"""No error, rate or number of seconds is larger."""


class RecordError(ValueError):
    """A file is no record; the message says which one and why."""


@dataclass(frozen=True)
class Record:
    """One finished run. Errors are in percent, times in seconds.

    Raises:
        RecordError: a ``ValueError``, for values that no run can have.
    """

    recipe: str
    seed: int
    dataset: str
    recreated: bool
    """Whether the data set is a re-creation and not the official files."""
    parameters: int
    validation_error: float
    """Of the selected epoch."""
    test_error: float
    """Read once, with the weights of the selected epoch or, if retrained, of the last."""
    seconds: float
    """Training with its evaluations, over all the parts of a resumed run."""
    setup_seconds: float
    """Reading the data, building the network, compiling and capturing."""
    device: str
    selected_epoch: int
    """The epoch with the lowest validation error, counted from 1."""
    retrained: bool
    """Whether the tested weights come from training on training and validation split together."""
    data_sha256: str
    """Of the images and classes of all splits."""
    predictions_sha256: str
    """Of the predicted classes of the test split, one byte or more each, in its order."""
    epochs: list[dict[str, Any]]
    """Metrics of every epoch: phase, epoch, learning_rate, loss, seconds and, where evaluated,
    validation_loss and validation_error."""
    settings: dict[str, Any]
    """The whole recipe."""
    processes: int
    step: str
    """How a step was run: ``eager``, ``graph`` or ``compile``."""
    precision: str
    revision: str
    """Of the code: the commit, with ``+changes`` if files differ; where there is no git, what
    ``ECONV_REVISION`` says, or ``unknown``."""
    source_sha256: str
    """Of the package's Python files."""
    versions: dict[str, str]
    finished: str
    """When, in UTC."""
    unverified: bool | None = None
    """Whether no checksum vouches for the data; None if not known, as in older records."""
    channels_last: bool | None = None
    """Whether images were laid out with channels last; None if not known."""
    parts: list[dict[str, Any]] | None = None
    """What took part in turn: for each stretch ``after``, the number of epochs before it, and its
    revision, source_sha256, step, processes, device, torch, processor and kernel (of the last
    three older records say nothing). One for a run by the same code in the same way, however often
    it was interrupted; None if not known."""
    shared: int | None = None
    """How many runs shared the device, this one among them; None if not known."""
    convolutions: dict[str, int] | None = None
    """How many of econv's convolutions each engine ran in a step, as `econv.engine` names them;
    None if not known, or if ``torch.compile`` ran them."""
    choices: dict[str, str] | None = None
    """What ``"auto"`` had measured to be faster, by problem; None if not known."""
    angle_errors: list[float] | None = None
    """Of test images turned by equal steps of the full turn, from 0; ``test_error`` is their mean.
    None for test images as they are."""
    weights_sha256: str | None = None
    """Of ``model.safetensors``, which the run left with its checkpoints; None if not known."""
    data_seed: int | None = None
    """With which the data were made again; None if they are what they are, or if not known."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = str(field.type)
            if not _is(value, kind):
                raise RecordError(f"expected {field.name} as {kind}; got {value!r}")
        if self.format != FORMAT:
            raise RecordError(f"expected format {FORMAT}; got {self.format}")
        if self.shared is not None and self.shared < 1:
            raise RecordError(f"expected shared of at least 1; got {self.shared}")
        for name in ("validation_error", "test_error"):
            if not 0 <= getattr(self, name) <= 100:
                raise RecordError(f"expected {name} in percent; got {getattr(self, name)!r}")
        for name in ("seconds", "setup_seconds", "seed", "data_seed"):
            if (getattr(self, name) or 0) < 0:
                raise RecordError(f"expected {name} of 0 or more; got {getattr(self, name)}")
        for name in ("parameters", "processes", "selected_epoch"):
            if getattr(self, name) < 1:
                raise RecordError(f"expected {name} of at least 1; got {getattr(self, name)}")
        for part in self.parts or []:
            check_part(part)
        shown = [getattr(self, f.name) for f in fields(self)], *map(dict.values, self.parts or [])
        for text in (one for some in shown for one in some if isinstance(one, str)):
            if not _plain(text):
                raise RecordError(f"expected printable text without markup; got {text!r}")
        for key, value in self.versions.items():
            if not isinstance(value, str) or not _plain(key + value):
                raise RecordError(f"expected versions as texts; got {key!r}: {value!r}")
        for entry in self.epochs:
            check_epoch(entry)
        if self.angle_errors is not None:
            self._check_angles(self.angle_errors)
        self._check_selection()

    def _check_angles(self, errors: list[float]) -> None:
        """Errors at so many angles as the settings have, whose mean is the test error."""
        asked = self.settings.get("test_angles")
        if len(errors) != asked or not all(_is(e, "float") and 0 <= e <= 100 for e in errors):
            raise RecordError(
                f"expected angle_errors of {asked!r} angles, in percent; got {errors}"
            )
        mean = sum(errors) / len(errors)
        if not math.isclose(mean, self.test_error, abs_tol=1e-9):
            raise RecordError(f"expected test_error as the mean {mean}; got {self.test_error}")

    def _check_selection(self) -> None:
        """The selected epoch is one of those that were evaluated, and as good as is said."""
        seen = [
            entry["validation_error"]
            for entry in self.epochs
            if entry["epoch"] == self.selected_epoch
            and entry.get("phase", "select") == "select"
            and "validation_error" in entry
        ]
        if seen != [self.validation_error]:
            raise RecordError(
                f"expected selected_epoch {self.selected_epoch} once among the epochs, with a "
                f"validation error of {self.validation_error}; got {seen}"
            )
        asked = self.settings.get("retrain_on_all", self.retrained)
        if asked is not self.retrained:
            raise RecordError(
                f"expected retrained as the settings have it, {asked!r}; got {self.retrained}"
            )


_PART = {
    "after": "int",
    "revision": "str",
    "source_sha256": "str",
    "step": "str",
    "processes": "int",
    "device": "str",
}
_FURTHER = {"torch": "str", "processor": "str", "kernel": "str"}
"""What older records do not say of their parts."""
_NUMBERS = ("learning_rate", "loss", "seconds", "validation_loss", "validation_error")


def check_part(part: Any) -> None:
    """Raise :class:`RecordError` if this is none of the parts of a record.

    Raises:
        RecordError: a ``ValueError``, for what is no part.
    """
    kinds = {k: type(part[k]).__name__ for k in part} if isinstance(part, dict) else {}
    if kinds not in (_PART, _PART | _FURTHER):
        raise RecordError(f"expected parts with {', '.join(_PART | _FURTHER)}; got {part!r}")


def check_epoch(entry: Any) -> None:
    """Raise :class:`RecordError` if these are not the metrics of an epoch.

    Raises:
        RecordError: a ``ValueError``, for what is no epoch.
    """
    if not isinstance(entry, dict) or not _is(entry.get("epoch"), "int") or entry["epoch"] < 1:
        raise RecordError(f"expected epochs with their number from 1; got {entry!r}")
    if entry.get("phase", "select") not in ("select", "retrain"):
        raise RecordError(f"expected epochs of the phase 'select' or 'retrain'; got {entry!r}")
    for name in _NUMBERS:
        if name in entry and not _is(entry[name], "float"):
            raise RecordError(f"expected epochs with {name} as a number; got {entry!r}")
    if not 0 <= entry.get("validation_error", 0) <= 100 or entry.get("seconds", 0) < 0:
        raise RecordError(f"expected epochs with errors in percent, seconds above 0; got {entry!r}")


def run_name(seed: int, data_seed: int | None = None) -> str:
    """What a run of a recipe is called, by its seed and that of its data.

    >>> run_name(0), run_name(0, 2)
    ('0', '0-data2')
    """
    return f"{seed}-data{data_seed}" if data_seed else f"{seed}"


def path_of(folder: Path, recipe: str, seed: int, data_seed: int | None = None) -> Path:
    """Where the record of a recipe, its seed and that of its data lies."""
    return Path(folder) / recipe / f"{run_name(seed, data_seed)}.json"


def save(record: Record, folder: Path) -> Path:
    """Write the record to its place and return that."""
    path = path_of(folder, record.recipe, record.seed, record.data_seed)
    text = json.dumps(asdict(record), indent=1, allow_nan=False)
    files.write_atomically(path, text.encode() + b"\n")
    return path


def load(path: Path) -> Record:
    """Read a record; :class:`RecordError` names the file if it is none."""
    return parse(Path(path).read_bytes(), Path(path))


def parse(content: bytes, path: Path) -> Record:
    """The record in a file's bytes; the path is checked against it and named in errors.

    Raises:
        RecordError: a ``ValueError``, for a file that is no record, or lies where another belongs.
    """
    try:
        told = json.loads(content)
    except RecursionError:
        raise RecordError(f"{path} is no record: it is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"{path} is no record: {error}") from None
    told = _current(told)
    names = {field.name for field in fields(Record)}
    # What older records do not have has a value that says so.
    needed = {f.name for f in fields(Record) if f.default is MISSING} | {"format"}
    given = set(told) if isinstance(told, dict) else set()
    if not needed <= given <= names:
        raise RecordError(
            f"{path} is no record: missing {sorted(needed - given)}, "
            f"unknown {sorted(given - names)}"
        )
    try:
        record = Record(**told)
    except RecordError as error:
        raise RecordError(f"{path} is no record: {error}") from None
    if path.stem != run_name(record.seed, record.data_seed) or path.parent.name != record.recipe:
        raise RecordError(
            f"{path} holds the record of {record.recipe}, "
            f"seed {run_name(record.seed, record.data_seed)}: moved or edited"
        )
    return record


def _current(told: Any) -> Any:
    """What a file of an older format says, in the present one."""
    if not isinstance(told, dict) or told.get("format") not in (1, 2):
        return told
    found = (renamed(told) if told["format"] == 1 else dict(told)) | {"format": FORMAT}
    settings = found.get("settings")
    if isinstance(settings, dict) and isinstance(settings.get("model"), str):
        name = re.sub(r"^(?=(wide_)?resnet)", "paper_", settings["model"])
        found["settings"] = settings | {"model": name}
    if told["format"] == 2:
        return found
    if isinstance(found.get("parts"), list):
        found["parts"] = [renamed(part) for part in found["parts"]]
    return found


def renamed(told: Any) -> Any:
    """A record or part of format 1 under the present names."""
    if not isinstance(told, dict) or "step" in told:
        return told
    return {"step" if name == "engine" else name: value for name, value in told.items()}


def load_all(folder: Path) -> list[Record]:
    """Every record under the folder, by recipe and seed; none if the folder is not there.

    Those of earlier runs are among them.

    Files that are not named as records are, by a seed, are left alone: :func:`strays` has them.
    What one record says of its data holds for older ones of the same data, which do not say it.
    """
    folders = [Path(folder), *sorted(Path(folder).glob("earlier/*"))]
    paths = [path for each in folders for path in each.glob("*/*.json") if _named_by_seed(path)]
    found = [load(path) for path in paths]
    unverified = {record.data_sha256 for record in found if record.unverified}
    seeds = {r.data_sha256: r.data_seed for r in found if r.data_seed is not None}
    for number, record in enumerate(found):
        if record.unverified is None and record.data_sha256 in unverified:
            found[number] = record = replace(record, unverified=True)
        if record.data_seed is None and record.data_sha256 in seeds:
            found[number] = replace(record, data_seed=seeds[record.data_sha256])
    return sorted(found, key=lambda r: (r.recipe, r.data_seed or 0, r.seed, r.finished))


def strays(folder: Path) -> list[Path]:
    """JSON files under the folder whose names are not those of records."""
    return sorted(path for path in Path(folder).rglob("*.json") if not _is_place(path, folder))


def _is_place(path: Path, folder: Path) -> bool:
    of = path.parent.parent
    return _named_by_seed(path) and (of == Path(folder) or of.parent == Path(folder) / "earlier")


def _named_by_seed(path: Path) -> bool:
    return re.fullmatch(r"[0-9]+(-data[1-9][0-9]*)?", path.stem) is not None


@lru_cache
def revision() -> str:
    """The commit that the package's files come from, with ``+changes`` if they differ from it.

    A copied tree may have no repository, or another one around it: what the environment variable
    ``ECONV_REVISION`` says counts before git's answer. It is a commit of 7 to 40 hexadecimal
    digits with or without ``+changes`` (``ECONV_REVISION=$(git rev-parse HEAD)`` at the source).

    Raises:
        ValueError: for an ``ECONV_REVISION`` that is no commit.
    """
    told = os.environ.get("ECONV_REVISION")
    if told:
        return _checked(told)
    here = Path(__file__).parent
    try:
        # The files' own repository, and not one that happens to lie around an installed package.
        _git(here, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if changed else "")


def _checked(told: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{7,40}(\+changes)?", told):
        raise ValueError(
            "expected ECONV_REVISION as a commit of 7 to 40 hexadecimal digits, with or without "
            f"'+changes'; got {told!r}"
        )
    return told


@lru_cache
def source_hash() -> str:
    """One hash over the package's Python files."""
    here = Path(__file__).parent
    found = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        found.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Of Python and of what computes."""
    import numpy as np
    import torch

    import econv

    return {
        "python": platform.python_version(),
        "econv": econv.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version() or "none"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _plain(value: Any) -> bool:
    """Whether a text can be shown anywhere: it steers no terminal and is no markup."""
    return value == files.printable(value) and not set(value) & set("<>|`")


def _is(value: Any, kind: str) -> bool:
    if kind.endswith(" | None"):
        return value is None or _is(value, kind.removesuffix(" | None"))
    if kind == "float":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) < _LARGEST and math.isfinite(value)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    kinds: dict[str, type] = {"str": str, "bool": bool}
    container = list if kind.startswith("list") else dict
    return isinstance(value, kinds.get(kind, container))
