"""Saving and sharing: a folder, or a repository on the Hugging Face Hub, with two files.

``config.json`` says which network it is and with which arguments it was made,
``model.safetensors`` holds its state. Nothing is unpickled, no code is run that is not here, and
what is not exactly a whole network is refused with the reason.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import numbers
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from econv.arrays import bounded
from econv.basis import COORDINATES
from econv.files import printable, write_atomically
from econv.groups import Group
from econv.operators import OperatorSet, operator_set
from econv.stencils import Central, Gaussian, Isotropic, StencilSet

__all__ = [
    "FORMAT",
    "Pretrained",
    "Saved",
    "as_json",
    "from_json",
    "from_pretrained",
    "is_ours",
    "read_config",
    "remade",
    "saved_folder",
    "weights_folders",
]

FORMAT = 2
"""The version of the files; readers refuse newer ones."""

_MOST_CONFIG = 1 << 20  # bytes
_MOST_TENSORS = 100_000
_DEEPEST = 16  # lists and objects within one another
_FLOATS = {"F16", "BF16", "F32", "F64"}
# What files may ask of our own networks, before any of it is worked out.
_LARGEST = {"accuracy": 16, "size": 25, "margin": 512, "image_size": 4096}
_LARGEST_ORDERS = {"group": 360, "operators": 12}
_MOST_WORK = 200  # times that of a layer of p8 with the paper's operators on 5×5

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_SETS: tuple[type[StencilSet], ...] = (Central, Gaussian, Isotropic)
_STENCILS = {kind.name: kind for kind in _SETS}
Network = TypeVar("Network", bound="Pretrained")


class Saved:
    """What can be saved: a network that knows what it was made of."""

    def _made_of(self) -> tuple[str, Mapping[str, Any]]:
        """The name of the kind of network, and the arguments that it was made with."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` to a folder, each in one move.

        >>> import econv
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     econv.create_model("convnet6_p4").save_pretrained(folder)
        ...     econv.from_pretrained(folder).group
        Group('p4')
        """
        self._write(Path(folder))

    def _write(
        self, folder: Path, also: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """The two files, with further entries in the first and matrices as ``dtype``."""
        kind, arguments = self._made_of()
        identity = {"model_type": kind, "arguments": as_json(arguments, "config")}
        config = {"library_name": "econv", "format": FORMAT, "econv_version": _version()}
        config.update(identity, **(also or {}))
        network: Any = self
        state = {name: _own(value, dtype) for name, value in network.state_dict().items()}
        metadata = {"format": "pt", "econv": json.dumps(identity, sort_keys=True)}
        content = _safetensors().save(state, metadata)
        # Should only the first file come to be, it says that it is not the second one's.
        write_atomically(folder / _WEIGHTS, content)
        text = json.dumps(config, indent=2) + "\n"
        write_atomically(folder / _CONFIG, text.encode())

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Add a network",
    ) -> str:
        """Upload what :meth:`save_pretrained` writes; returns the address of the commit."""
        hub = _hub()
        api = hub.HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message
            )
        return str(commit.commit_url)


class Pretrained(Saved, nn.Module):
    """A network that can be saved with what it was made of, and made again from that.

    A subclass keeps the arguments of its constructor in :attr:`config`; what can be written are
    numbers, strings, groups, operators, stencils, and lists and dictionaries of them.
    """

    config: dict[str, Any]
    _kinds: ClassVar[dict[str, type[Pretrained]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__name__.startswith("_"):
            Pretrained._kinds[cls.model_type()] = cls

    @classmethod
    def model_type(cls) -> str:
        """The name of the class in ``config.json``."""
        ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        return cls.__qualname__ if ours else f"{cls.__module__}.{cls.__qualname__}"

    def _made_of(self) -> tuple[str, Mapping[str, Any]]:
        return self.model_type(), self.config

    @classmethod
    def from_pretrained(
        cls: type[Network],
        source: str | Path,
        *,
        device: torch.device | str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> Network:
        """The network that ``save_pretrained`` wrote, in eval mode.

        Args:
            source: a folder, or the name ``owner/name`` of a repository on the Hugging Face Hub.
            device: where to put the network; the CPU by default.
            revision: branch, tag or commit of the repository.
            cache_dir: where downloads are kept; `huggingface_hub`'s own folder by default.
            local_files_only: whether to read what was downloaded before and nothing else.
            token: credentials for a private repository.
        """
        options = {
            "revision": revision,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "token": token,
        }
        network: Network = _from_files(str(source), options, cls)
        return network.to(device).eval()


Make = Callable[..., nn.Module]
_REMADE: dict[str, Make] = {}


def remade(name: str) -> Callable[[Make], Make]:
    """Register what makes networks of a kind of another network, and of their arguments."""

    def register(make: Make) -> Make:
        _REMADE[name] = make
        return make

    return register


def from_pretrained(
    source: str | Path,
    *,
    model: nn.Module | None = None,
    num_classes: int | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Any:
    """The network in a folder or in a repository on the Hugging Face Hub, whatever its kind.

    Args:
        source: the name of weights, such as ``"digits_p8"``, as :class:`econv.Weights` finds them;
            a folder; or the name ``owner/name`` of a repository.
        num_classes: for a network with another number of classes: the features stay, the last layer
            is a new one, and a warning says so.
        model: for a network that :func:`econv.convert` made, the one that it was made of, with any
            weights; it is not changed.
        device: where to put the network; the CPU by default.
        options: of a repository, as :meth:`Pretrained.from_pretrained` has them.

    Raises:
        ValueError: if files are missing, damaged or too large, describe no network of econv, or do
            not fit one another or ``model``.
        ImportError: without safetensors, or without huggingface_hub for a repository.

    >>> import econv, tempfile
    >>> network = econv.create_model("cifar_resnet8_p4").eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     network.save_pretrained(folder)
    ...     again = from_pretrained(folder)
    >>> torch.equal(again.state_dict()["classifier.weight"], network.classifier.weight)
    True
    """
    if model is None:
        network = Pretrained.from_pretrained(source, device=device, **options)
    else:
        network = _from_files(str(source), options, model=model).to(device).eval()
    if num_classes is not None:
        _reset_classes(network, num_classes, str(source))
    return network


def _reset_classes(network: Any, wanted: int, source: str) -> None:
    """Another last layer, and a warning, if the network has another number of classes."""
    if not hasattr(network, "reset_classifier"):
        raise ValueError(
            f"expected no num_classes: a {type(network).__name__} keeps its own; got {wanted}"
        )
    there = network.num_classes
    if there != wanted:
        network.reset_classifier(wanted)
        warnings.warn(
            f"{source} has {there} classes: the features are kept, the last layer for {wanted} "
            "is new",
            stacklevel=3,
        )


def _from_files(
    source: str,
    options: Mapping[str, Any],
    wanted: type[Pretrained] | None = None,
    model: nn.Module | None = None,
) -> Any:
    """The network in the files: of a class, or made of another network."""
    paths = {name: _find(source, name, options) for name in (_CONFIG, _WEIGHTS)}
    config = read_config(paths[_CONFIG])
    identity = {name: config[name] for name in ("model_type", "arguments")}
    make = _maker(identity["model_type"], paths[_CONFIG], wanted, model)
    library = importlib.import_module(_safetensors().__name__.partition(".")[0])
    try:
        with library.safe_open(paths[_WEIGHTS], "pt") as file:
            heads = _heads(paths[_WEIGHTS], file, identity)
            network = _built(make, paths[_CONFIG], identity, heads, model)
            _check_heads(network, heads, paths[_WEIGHTS])
            # Copied: tensors in the file need not begin where fast kernels want them to.
            state = {name: file.get_tensor(name).clone() for name in heads}
    except library.SafetensorError as error:
        raise ValueError(
            f"{paths[_WEIGHTS]} is not a safetensors file, or truncated: {error}"
        ) from None
    _check_values(state, paths[_WEIGHTS])
    # In format 1 nothing says what the numbers of a weight are: the first version's pixels.
    pixels = torch.tensor(COORDINATES.index("pixels"))
    told = [n for n in network.state_dict() if n.rpartition(".")[2] == "coordinates"]
    state = {**dict.fromkeys(told, pixels), **state}
    if "weights" in config:  # perhaps in half precision, to be small
        like = network.state_dict()
        state = {name: value.to(like[name].dtype) for name, value in state.items()}
    network.load_state_dict(state, assign=True)
    return network


def _maker(name: str, path: Path, wanted: type[Pretrained] | None, model: nn.Module | None) -> Make:
    """What makes networks of this kind, if the files may have one."""
    kind, remake = Pretrained._kinds.get(name), _REMADE.get(name)
    if kind is None and remake is None:
        raise ValueError(
            f"{path}: unknown model_type {name!r}; expected one of "
            f"{sorted([*Pretrained._kinds, *_REMADE])}"
        )
    if remake is not None and model is not None:
        return functools.partial(remake, model)
    if remake is not None:
        raise ValueError(
            f"{path}: a {name} is made of another network: expected it as "
            "econv.from_pretrained(…, model=…)"
        )
    assert kind is not None
    if wanted is None:
        raise ValueError(f"{path}: expected a network made of {type(model).__name__}; got a {name}")
    if not issubclass(kind, wanted):
        raise ValueError(f"{path}: expected a {wanted.model_type()}; it is a {kind.model_type()}")
    return kind


# ------------------------------------------------------------------------------------ files


def _find(source: str, name: str, options: Mapping[str, Any]) -> Path:
    folder = Path(source)
    if source and folder.is_dir():
        path = folder / name
        if not path.is_file():
            there = sorted(p.name for p in folder.iterdir())
            raise ValueError(f"expected {name} in {folder}; found {there}")
        return path
    if re.fullmatch(r"\w[\w.+=-]*", source):
        return _weights_folder(source) / name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        raise ValueError(
            "expected a folder, or a name such as 'owner/name' on the Hugging Face Hub; "
            f"{source!r} is neither"
        )
    try:
        return Path(_hub().hf_hub_download(source, name, **options))
    except (OSError, ValueError) as error:  # what huggingface_hub raises derives from these
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"cannot read {name} of {source!r} from the Hub: {reason}") from error


def saved_folder(source: str | Path) -> Path:
    """The folder with both files: by its path, the name of weights, or one of a repository.

    Raises:
        ValueError: for a name that leads to no files.
    """
    found = [_find(str(source), name, {}) for name in (_CONFIG, _WEIGHTS)]
    return found[0].parent


def weights_folders() -> list[Path]:
    """Where weights are looked for by name.

    The folder that the environment variable ``ECONV_WEIGHTS`` names; ``weights/`` where the program
    runs; and the one of the checkout that this package is part of.
    """
    told = os.environ.get("ECONV_WEIGHTS")
    found = [Path(told).expanduser()] if told else []
    checkout = Path(__file__).resolve().parents[2] / "weights"
    return [*found, Path("weights"), *([checkout] if checkout.is_dir() else [])]


def _weights_folder(name: str) -> Path:
    """The folder of the weights of that name; `ValueError` says where it looked, and what to do."""
    places = weights_folders()
    for place in places:
        folder = place / name
        if folder.is_dir():
            for file in (_CONFIG, _WEIGHTS):
                if not (folder / file).is_file():
                    raise ValueError(f"expected {file} in {folder}: {_WHERE_FROM.format(name)}")
            return folder
    there = sorted({file.parent.name for place in places for file in place.glob(f"*/{_CONFIG}")})
    raise ValueError(
        f"expected weights by name: no weights named {name!r} in {', '.join(map(str, places))}, "
        f"where there are {', '.join(there) or 'none'}. {_WHERE_FROM.format(name)}"
    )


_WHERE_FROM = (
    "They are in the folder weights/{0} of econv's source repository: copy it, or name the folder "
    "around it in ECONV_WEIGHTS; for a folder beside you, write ./{0}"
)


def is_ours(path: Path) -> bool:
    """Whether a ``config.json`` is one of econv's: other libraries have files of that name.

    Raises:
        ValueError: for a file that is not JSON.
    """
    return _ours(_parsed(path))


def _ours(config: Any) -> bool:
    return isinstance(config, dict) and config.get("library_name") == "econv"


def _parsed(path: Path) -> Any:
    try:
        with path.open("rb") as stream:
            content = bounded(stream, _MOST_CONFIG, "a configuration")
        return json.loads(content, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or truncated: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """All of ``config.json``, if it is one of econv's.

    Raises:
        ValueError: for a file that is not JSON, does not describe a network of econv, or is of a
            later format.
    """
    config = _parsed(path)
    if not _ours(config):
        raise ValueError(f"{path} does not describe a network of econv (library_name: 'econv')")
    version = config.get("format")
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise ValueError(
            f"{path} has format {version!r}; this version of econv reads 1 to {FORMAT}"
        )
    if not isinstance(config.get("model_type"), str) or not isinstance(
        config.get("arguments"), dict
    ):
        raise ValueError(f"{path} lacks model_type (a string) or arguments (an object)")
    return config


def _no_number(word: str) -> Any:
    raise ValueError(f"expected numbers; got {word}")


_Heads = dict[str, tuple[list[int], str]]
"""Shapes and kinds of tensors, as a file says them."""


def _heads(path: Path, file: Any, identity: Mapping[str, Any]) -> _Heads:
    """What the file holds; none of it is read yet."""
    written = (file.metadata() or {}).get("econv")
    if written is not None and written != json.dumps(dict(identity), sort_keys=True):
        raise ValueError(f"{path} and {_CONFIG} beside it describe different networks")
    names = list(file.keys())
    if len(names) > _MOST_TENSORS:
        raise ValueError(f"{path}: expected at most {_MOST_TENSORS} tensors; got {len(names)}")
    parts = {name: file.get_slice(name) for name in names}
    return {name: (list(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def _built(
    make: Make, path: Path, identity: Mapping[str, Any], heads: _Heads, model: nn.Module | None
) -> nn.Module:
    """The network that is told, if it is about as large as the file holds, or as its source."""
    name, arguments = identity["model_type"], identity["arguments"]
    total = sum(math.prod(shape) for shape, _ in heads.values())
    given = [p.numel() for p in model.parameters()] if model is not None else []
    count, most = len(heads) + len(given), total + sum(given)
    ours = "." not in name
    _check_arguments(path, arguments, max(total, 4096) if ours else None)
    thread, found = threading.get_ident(), [0, 0]

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or threading.get_ident() != thread:
            return
        found[0] += 1
        found[1] += parameter.numel()
        # Some are made and replaced again; a network that does not fit is told apart later.
        if found[0] > 8 * count + 64 or found[1] > 8 * most + 4096:
            raise ValueError(
                f"expected a network of the {total} values in {len(heads)} tensors of {_WEIGHTS}; "
                "this one is larger"
            )

    hook = nn.modules.module.register_module_parameter_registration_hook(registered)
    try:
        return make(**from_json(arguments))
    except Exception as error:  # whatever a constructor makes of arguments that are not its own
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: arguments that {name} does not take: {reason}") from None
    finally:
        hook.remove()


def _check_arguments(path: Path, arguments: Mapping[str, Any], largest: int | None) -> None:
    """Raise `ValueError` where arguments ask for more work than any network in use."""
    work = {"group": 8, "operators": 9, "size": 5}
    left: list[tuple[str, Any, int]] = [("arguments", arguments, 0)]
    while left:
        key, value, depth = left.pop()
        if depth > _DEEPEST:
            raise ValueError(f"{path}: expected arguments of at most {_DEEPEST} levels; got more")
        if isinstance(value, dict):
            left += [(name, item, depth + 1) for name, item in value.items()]
        elif isinstance(value, list):
            left += [(key, item, depth + 1) for item in value]
        if largest is None:
            continue  # what the user's own classes take is theirs to know
        key, value = _group_in(key, value)
        asked, most = _asked(key, value), _LARGEST.get(key, largest)
        if isinstance(value, int) and abs(value) > most:
            raise ValueError(f"{path}: expected {key} of at most {most}; got {_shown(value)}")
        if asked is not None and asked > _LARGEST_ORDERS[key]:
            limit = _LARGEST_ORDERS[key]
            raise ValueError(
                f"{path}: expected {key} of order {limit} at most; got {_shown(value)}"
            )
        if key == "group" and asked:
            work["group"] = max(work["group"], asked)
        elif asked is not None:
            work["operators"] = max(work["operators"], (asked + 1) * (asked + 2) // 2)
            work["size"] = max(work["size"], asked + 1)
        elif key == "size" and isinstance(value, int):
            work["size"] = max(work["size"], value)
    product = work["group"] / 8 * work["operators"] / 9 * (work["size"] / 5) ** 2
    if product > _MOST_WORK:
        raise ValueError(
            f"{path}: expected at most {_MOST_WORK} times the work of a layer of p8 with the "
            f"paper's operators; {work} are {product:.0f} times that"
        )


def _group_in(key: str, value: Any) -> tuple[str, Any]:
    """The group that an argument of another name asks for, as that of a ``group``."""
    if key == "encoder" and isinstance(value, str):  # its name may end with one, or with several
        orders = re.findall(r"_[A-Z]?p?(\d{1,9})", value)
        return "group", f"p{max(map(int, orders), default=1)}"
    return ("group", value) if key == "restrict" and isinstance(value, str) else (key, value)


def _asked(key: str, value: Any) -> int | None:
    """The order of a group or of operators, if that is what an argument says."""
    if key == "group" and isinstance(value, str):
        digits = re.sub(r"\D", "", value)[:9]
        return int(digits or 1)
    if key != "operators":
        return None
    if isinstance(value, str):
        found = re.match(r"order *<= *(\d{1,9})", value)
        return int(found[1]) if found else None
    exponents = [item for item in value if isinstance(item, int)] if isinstance(value, list) else []
    return sum(exponents) if exponents else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 50 else f"{text[:45]} …"


def _check_heads(network: nn.Module, heads: _Heads, path: Path) -> None:
    """Raise `ValueError` if the file's tensors are not those of the network."""
    wanted = network.state_dict()
    # In format 1 nothing says what the numbers of a weight are.
    problems = [
        f"{name} is missing"
        for name in wanted
        if name not in heads and name.rpartition(".")[2] != "coordinates"
    ]
    problems += [f"{printable(name)[:80]} is unknown" for name in heads if name not in wanted]
    for name, value in wanted.items():
        if name not in heads:
            continue
        shape, kind = heads[name]
        exact = {torch.int64: {"I64"}, torch.bool: {"BOOL"}}
        kinds = _FLOATS if value.is_floating_point() else exact.get(value.dtype, {"I64"})
        if shape != list(value.shape):
            problems.append(f"{name} is {shape}, expected {list(value.shape)}")
        elif kind not in kinds:
            problems.append(f"{name} is {kind}, expected {' or '.join(sorted(kinds))}")
    _refuse(problems, path, type(network).__name__)


def _check_values(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise `ValueError` for numbers that no training leaves."""
    problems = []
    for name, value in state.items():
        if not bool(torch.isfinite(value).all()):
            problems.append(f"{name} has NaN or infinity")
        elif name.endswith(("running_var", "num_batches_tracked")) and bool((value < 0).any()):
            problems.append(f"{name} is negative")
    _refuse(problems, path, "a network")


def _refuse(problems: Sequence[str], path: Path, what: str) -> None:
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{path} does not fit {what}: {'; '.join(problems[:5])}{more}")


def _own(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    matrix = value.is_floating_point() and value.ndim > 1
    return value.detach().to("cpu", dtype if matrix else None, copy=True).contiguous()


# --------------------------------------------------------------------------------- arguments


def as_json(value: Any, name: str) -> Any:
    """An argument as JSON has it.

    Raises:
        ValueError: for a value that a file cannot hold.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Group):
        return value.name
    if isinstance(value, OperatorSet):
        named = value.name.startswith(("paper", "order<="))
        same = named and operator_set(value.name, value.dimension) == value
        return value.name if same else [list(exponents) for exponents in value]
    if isinstance(value, StencilSet) and type(value) in _STENCILS.values():
        return {"stencil_set": value.name, **asdict(value)}  # type: ignore[call-overload]
    if isinstance(value, Mapping):
        return {str(key): as_json(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence):
        return [as_json(item, name) for item in value]
    raise ValueError(
        f"expected {name} as numbers, strings, a group, operators or stencils, which a file can "
        f"hold; got {type(value).__name__}"
    )


def from_json(value: Any) -> Any:
    """The argument that JSON holds.

    Raises:
        ValueError: for stencils of an unknown name.
    """
    if isinstance(value, dict):
        items = {key: from_json(item) for key, item in value.items()}
        if "stencil_set" not in items:
            return items
        name = items.pop("stencil_set")
        if name not in _STENCILS:
            raise ValueError(f"unknown stencil_set {name!r}: expected one of {sorted(_STENCILS)}")
        return _STENCILS[name](**items)
    return [from_json(item) for item in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------------- libraries


def _safetensors() -> Any:
    return _library("safetensors.torch", "saved networks need safetensors")


def _hub() -> Any:
    return _library("huggingface_hub", "the Hugging Face Hub needs huggingface_hub")


def _library(name: str, what: str) -> Any:
    try:  # by name: it need not be installed where types are checked
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{what}: pip install 'econv[hub]'") from None


def _version() -> str:
    return str(importlib.import_module("econv").__version__)
