"""The `econv` command. It reads arguments, prints tables and says what is wrong in one line.

What is measured is the business of `lab`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import econv
from econv import demo, environment, lab, layers, page, report, train, verify
from econv.checking import KindError, checked
from econv.engines.problem import times
from econv.files import atomic, write_atomically
from econv.groups import Group
from econv.layers import PDOConv2d, VectorConv2d
from econv.progress import Progress
from econv.testing import smooth_field

__all__ = ["main"]

_COLUMNS = 8  # elements side by side in a table
_COUNT = 4  # images
_SIZE = 65  # pixels along each side of random fields
_SIZE_OF_VOLUMES = 33  # voxels
_LARGE = 129  # and of those for networks that are made for photographs
_WHY = ("lie", "split", "advice", "sizes")  # what answers why, each of which may be skipped


_EXAMPLES = """\
what people do:
  see what it is about    econv demo
  check a network         econv check model.py:build --weights best.pt --html why.html
  train                   econv train mnist_rot_p8 --seeds 3
  compare with the paper  econv report --html report.html
  check our weights       econv verify digits_p8

econv COMMAND --help has more examples."""

_EXAMPLES_OF = {
    "check": """\
examples:
  econv check                                          a small network, for a first look
  econv check cifar_resnet26_p8 --skip advice          one by name
  econv check model.py:build --weights 1.pt 9.pt       does training keep it?
  econv check model.py:build --tolerance 1e-5          for scripts: the exit code says it
  econv check model.py:build --images slides/ --html check.html
  econv check unet_3d_O --images scans/ --size 32      volumes, from .npy or .npz""",
    "demo": """\
examples:
  econv demo                     into outputs/; goes on where it was stopped
  econv demo --seed 1 --fresh""",
    "train": """\
examples:
  econv train digits_p8                                minutes on a CPU, no download
  econv train mnist_rot_p8 --seeds 3                   a row of the paper's tables
  econv train mnist_rot_p8 --set epochs=3              with a change
  econv train cifar10_resnet26_p8 --source folder/     data that are there already
several GPUs: torchrun --nproc-per-node=4 -m econv.train cifar10_resnet26_p8""",
    "verify": """\
examples:
  econv verify digits_p8                               seconds, no download
  econv verify mine/mnist_rot_p8 --source folder/      your own weights, data that are there
  econv verify --all                                   every row whose images are here""",
    "report": """\
examples:
  econv report                                         of records/
  econv report --records mine --html report.html       of your runs, with learning curves
  econv report --markdown docs/results.md              tables between the markers of a file""",
}


class _Wrapped(argparse.HelpFormatter):
    """Paragraphs are wrapped as usual; examples, which have lines of their own, are not."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)


class BadInputError(Exception):
    """What the user gave cannot be checked; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 0 if all went well."""
    parser = _parser()
    args = parser.parse_args(arguments)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal without ‖ shows something else
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\neconv {args.command}: stopped", file=sys.stderr)
        return 130  # as shells have it
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _run_check(args: argparse.Namespace) -> int:
    """``econv check``: 0, or 1 above the tolerance, or 2 for input that cannot be checked.

    With a line on stderr for the last two.
    """
    try:
        too_large = _check(args)
        sys.stdout.flush()
        if too_large:
            print(f"econv check: {too_large}", file=sys.stderr)
            return 1
    except BrokenPipeError:
        raise
    except (BadInputError, ValueError, ImportError, OSError) as error:
        text = " ".join(str(error).split())
        print(f"econv check: {text}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="econv",
        description="Networks that are equivariant to rotations and reflections: check, train, "
        "report.",
        epilog=_EXAMPLES,
        formatter_class=_Wrapped,
    )
    parser.add_argument("--version", action="version", version=f"econv {econv.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    check = commands.add_parser(
        "check",
        help="is a model equivariant, why not, what would help, does training keep it?",
        description="Measures how far a model is from turning with its input, layer by layer, says "
        "why, and tries what would help. For networks without layers of econv and without --group "
        "there is no table by group elements; all the rest is measured as of images.",
        epilog=_EXAMPLES_OF["check"],
        formatter_class=_Wrapped,
    )
    check.set_defaults(run=_run_check)
    for name, room, text in (
        ("demo", demo, "the first thing to run: a network and its CNN twin on turned digits"),
        ("train", train, "train a network of the paper's tables, or your change of one"),
        ("report", report, "the paper's tables with the records of your runs beside its figures"),
        ("verify", verify, "do published weights predict what their record says?"),
        ("env", environment, "versions, devices and engines, for the report of a problem"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=(room.__doc__ or "").split("\n")[0],
            epilog=_EXAMPLES_OF.get(name),
            formatter_class=_Wrapped,
        )
        room.add_arguments(command)
        command.set_defaults(run=room.main)
    add = check.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="package.module:name or file.py:name, a module or a function that makes one, or a "
        "name that econv.create_model knows, such as resnet18_p8; without it, a small untrained "
        "network for a first look",
    )
    add(
        "--weights",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        metavar="FILE",
        help="state dicts (.pt, .ckpt or .safetensors), also inside checkpoints of Lightning; one "
        "row for each, in the order given",
    )
    add(
        "--prefix",
        metavar="TEXT",
        help="what stands before the model's names in the state dicts, such as 'model.' (default: "
        "whatever fits)",
    )
    add(
        "--images",
        nargs="+",
        metavar="PATH",
        help="pictures, .npy or .npz files (volumes: these alone), or a folder, with or without a "
        "subfolder for each class; smooth random fields by default",
    )
    add(
        "--count",
        type=_positive,
        help="how many images (default: 4; of random fields for a network given by name 2, or 1 "
        "where these are large)",
    )
    add(
        "--size",
        type=_positive,
        metavar="PIXELS",
        help="side of random fields (default: 65, of volumes 33; for a network given by name what "
        "it is made for, but at most 129, of volumes 33); images are cut to the square in their "
        "middle and resized to it, volumes to the cube",
    )
    add(
        "--channels",
        type=_positive,
        help="of random fields and of a model given by name (default: what the model reads)",
    )
    add(
        "--smoothness",
        type=_positive_float,
        default=3.0,
        help="of random fields, in pixels (default: %(default)s)",
    )
    add(
        "--group",
        type=_group,
        help="the group to check, which those of all layers must contain; needed where no layer "
        "has one or they differ (default: that of the layers; p8 for the built-in network)",
    )
    add(
        "--tolerance",
        type=_positive_float,
        metavar="ERROR",
        help="exit with code 1 if any layer or the output is off by more at a symmetry of the "
        "pixel grid, or at any element of a group that has none",
    )
    add(
        "--skip",
        nargs="+",
        action="extend",
        default=[],
        choices=_WHY,
        metavar="PART",
        help="leave out: lie (Lie derivatives), split (what the error is made of), advice (changes "
        "that are tried), sizes (where sampling fits); they are measured on the first image",
    )
    add("--angles", nargs="+", type=float, metavar="DEGREES", help="print the error at these too")
    add("--html", type=Path, metavar="FILE", help="write one page with a slider that turns it all")
    add("--plots", type=Path, metavar="FOLDER", help="write pictures; needs econv[plot]")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--twin-weights", type=Path, metavar="FILE", help="state dict of the CNN twin on the page")
    add("--seed", type=int, default=0, help="of weights and random fields (default: %(default)s)")
    return parser


def _check(args: argparse.Namespace) -> str | None:
    """Measure, print and write; returns what exceeds the tolerance."""
    for path in (args.html, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInputError(f"no such folder: {path.absolute().parent}")
    if args.plots is not None:
        importlib.import_module("econv.plots")._figure(1, 1)  # says so now if matplotlib is missing
        args.plots.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    name = args.model or "built-in network"
    channels = args.channels
    if args.model is None:
        looked_at = Group(args.group or "p8")
        if args.images is not None and channels is None:
            first = lab.load_images(args.images, limit=1, dimension=looked_at.dimension)
            channels = first.shape[1]
        model: nn.Module = _first_look(looked_at, channels or 1)
    else:
        model = _load_model(args.model, channels)
    group = _group_of(model, args)
    if group is not None and group.order == 1:
        raise BadInputError(f"{group} has nothing to check: its one element turns nothing")
    images = _images(args, model, channels, group)
    square, volumes = len(set(images.shape[2:])) == 1, images.ndim == 5
    for option, given in (("--html", args.html), ("--angles", args.angles)):
        if given is not None and not square:
            what = (
                "volumes by any angle and needs cubes"
                if volumes
                else ("images by any angle and needs square ones")
            )
            raise BadInputError(
                f"{option} turns {what}; got {times(images.shape[2:])} {_points(images)}"
            )
    checkpoints = []
    # Each shape is seen a few times: to time engines for it would take longer.
    with econv.engine(measure=False), _Passes(args, model, group, square) as passes:
        passes.say("a first look")
        mistake = _probe(model, images)
        if args.model is None and not args.weights:
            _prepare(model, images)
        model.eval()
        for path in args.weights:
            _load_weights(model, path, args.prefix)
            model.eval()
            passes.say(f"layers, {path.name}")
            if group is not None:
                checkpoints.append((path, lab.layer_errors(model, lab.windowed(images), group)))
        passes.say("layers")
        table, sources, why_not = None, None, ""
        if group is not None:
            table = (
                checkpoints[-1][1]
                if checkpoints
                else lab.layer_errors(model, lab.windowed(images), group)
            )
            passes.say("sources of the error")
            sources, why_not = _sources(model, images, group)
        why = _Why(args, model, images, group, passes) if square else None
        curve = None
        if group is not None and square and (args.angles or args.plots or args.json):
            passes.say("angles")
            curve = lab.angle_curve(model, lab.windowed(images), args.angles, group)
        written = None
        if args.html is not None and table is not None:
            passes.say("page")
            written = _page(args, model, images, table, sources, why_not, name, why)

    shape, what = times(images.shape[2:]), "volumes" if volumes else "images"
    of_group = "no layers that name a group" if group is None else group.name
    print(f"{name}: {of_group}, {len(images)} {what} of {shape} {_points(images)}")
    whole = "ball" if volumes else "disc"
    print(f"Table and curve use the {what} faded to zero outside of the inscribed {whole}.")
    if len(checkpoints) > 1:
        _print_checkpoints(checkpoints)
        print(f"\nAfter {args.weights[-1]}:")
    if table is not None:
        _print_table(table)
    if mistake:
        print(f"\nA mistake in the network: {mistake}.")
    if sources is not None and group is not None:
        _print_sources(sources, group)
    elif group is not None:
        print(f"\nThe sources of the error cannot be told apart: {why_not}")
    if why is not None:
        why.print()
    if volumes:
        others = "Lie derivatives, what the error is made of, what would help"
        print(f"\nMeasured of images only: {others}")
    if args.angles and curve is not None:
        print("\nError of the output over the angle" + (", about z" if volumes else ""))
        for angle, error in zip(curve.angles, curve.errors, strict=True):
            print(f"  {angle:>7.4g}°  {_figure(error)}")
        if curve.changed is not None:
            share = 100 * sum(curve.changed) / len(curve.changed)
            print(f"  The predicted class is another than at 0° for {share:.0f} % of the {what}.")

    if args.json is not None:
        record = {
            "econv": econv.__version__,
            "model": name,
            "images": list(images.shape),
            "table": table.to_dict() if table is not None else None,
            "sources": sources.to_dict() if sources is not None else None,
            **(why.to_dict() if why is not None else dict.fromkeys(_WHY)),
            "angles": curve.to_dict() if curve is not None else None,
            "checkpoints": [
                {"weights": str(path), "table": found.to_dict()} for path, found in checkpoints
            ],
        }
        with atomic(args.json) as temporary:
            text = json.dumps(_finite(record), indent=1, ensure_ascii=False, allow_nan=False)
            temporary.write_text(text + "\n", encoding="utf-8")
        print(f"\nNumbers: {args.json}")
    if args.plots is not None and group is not None:
        print()
        _plots(args.plots, model, curve, group)
    if written is not None:
        write_atomically(args.html, written.encode())
        print(f"\nPage: {args.html}")
    if args.tolerance is None:
        return None
    tables = [found for _, found in checkpoints] or ([table] if table is not None else [])
    return _too_large(tables, args.tolerance)


def _group_of(model: nn.Module, args: argparse.Namespace) -> Group | None:
    """The group to check; nothing for a network that knows none, where none was named."""
    knows = any(hasattr(m, name) for m in model.modules() for name in ("group", "subgroup"))
    if knows or args.group is not None:
        return lab.find_group(model, args.group)
    needing = ("tolerance", "html", "plots", "angles")
    given = [f"--{name}" for name in needing if getattr(args, name) is not None]
    if given:
        raise BadInputError(
            f"{given[0]} needs a group: the model has no layer that names one; name it with --group"
        )
    return None


def _too_large(tables: Sequence[lab.LayerErrors], tolerance: float) -> str | None:
    found = [
        (error, f"{name} at {angle}")
        for table in tables
        for name, errors in [
            *((entry.name, entry.errors) for entry in table.layers),
            ("output", [entry.relative for entry in table.output]),
        ]
        for element, angle, error in zip(table.elements, table.names, errors, strict=True)
        if error is not None
        and (element in table.group.grid_symmetries or len(table.group.grid_symmetries) == 1)
    ]
    if not found:
        return "nothing could be compared: every map has too few pixels for the angles of the group"
    # A NaN is the worst.
    error, where = max(found, key=lambda entry: math.inf if math.isnan(entry[0]) else entry[0])
    if error <= tolerance:
        return None
    return f"the error {_figure(error)} of {where} exceeds the tolerance {tolerance:g}"


def _points(images: Tensor) -> str:
    return "voxels" if images.ndim == 5 else "pixels"


def _first_look(group: Group, channels: int) -> nn.Sequential:
    def layer(name: str) -> Any:
        return getattr(layers, f"{name}{group.dimension}d")

    def block(before: int, after: int) -> list[nn.Module]:
        return [
            layer("GroupConv")(before, after, group),
            layer("GroupBatchNorm")(after, group),
            nn.ReLU(),
        ]

    few = 4 if group.dimension == 2 else 2
    return nn.Sequential(
        layer("LiftConv")(channels, few, group),
        layer("GroupBatchNorm")(few, group),
        nn.ReLU(),
        *block(few, few),
        layer("Downsample")(),
        *block(few, 2 * few),
        layer("GroupPool")(group),
        nn.AdaptiveAvgPool2d(1) if group.dimension == 2 else nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(2 * few, 10),
    )


def _prepare(model: nn.Module, images: Tensor) -> None:
    """Statistics that fit the images, and scores that differ between classes."""
    lab.calibrate(model, images)
    classifier = next(m for m in model.modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        factor = 1.5 / model(images).std(dim=1, correction=0).mean()
        for parameter in classifier.parameters():
            parameter.mul_(factor)


def _load_model(text: str, channels: int | None) -> nn.Module:
    place, colon, name = text.rpartition(":")
    if not colon:
        try:
            options: dict[str, Any] = {} if channels is None else {"in_channels": channels}
            made: nn.Module = econv.create_model(text, **options)
            return made
        except ValueError as error:
            if not str(error).startswith("unknown model"):
                raise
    if not place or not name:
        raise BadInputError(
            "expected MODEL as package.module:name or file.py:name, or a name that "
            f"econv.create_model knows, such as resnet18_p8; got {text!r}"
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadInputError(f"{place} has no {name!r}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise BadInputError(f"expected {text} to be a module or to make one; it is {found!r}")
        try:
            found = found()
        except Exception as error:  # the user's code may raise anything
            raise BadInputError(f"{text}() failed: {type(error).__name__}: {error}") from None
    if not isinstance(found, nn.Module):
        raise BadInputError(
            f"expected {text}() to return a torch module; got {type(found).__name__}"
        )
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInputError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"_econv_check_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BadInputError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInputError(f"{path} failed: {type(error).__name__}: {error}") from None
    return module


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:  # as `python -m` has it, and an installed command has not
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise BadInputError(f"cannot import {name}: {type(error).__name__}: {error}") from None


def _load_weights(model: nn.Module, path: Path, prefix: str | None = None) -> None:
    if not path.is_file():
        raise BadInputError(f"no such file: {path}")
    try:
        if path.suffix == ".safetensors":
            # By name: it need not be installed where types are checked.
            state = importlib.import_module("safetensors.torch").load_file(path)
        else:
            state = _read_tensors(path)
    except ImportError:
        raise BadInputError(f"reading {path} needs safetensors: pip install safetensors") from None
    except Exception as error:  # unpicklers raise what they like
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise BadInputError(f"cannot read weights from {path}: {first}") from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise BadInputError(
            f"expected a state dict of tensors in {path}; got {type(state).__name__}"
        )
    try:
        model.load_state_dict(_without_prefix(state, set(model.state_dict()), prefix, path))
    except RuntimeError as error:
        raise BadInputError(f"the weights in {path} do not fit the model: {error}") from None


def _read_tensors(path: Path) -> Any:
    """What a file of torch holds, without running its code.

    Checkpoints of Lightning name classes of the user's: objects of these are left out.
    """
    stubs: list[Any] = []
    if zipfile.is_zipfile(path):  # older files have no list of what they name
        for name in torch.serialization.get_unsafe_globals_in_checkpoint(path):
            stubs.append((type(name.rpartition(".")[2], (_Unread,), {}), name))
    with torch.serialization.safe_globals(stubs):
        return torch.load(path, map_location="cpu", weights_only=True)


class _Unread:
    """Stands for an object of a class that is not loaded: it takes what comes, and forgets it."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None:
        """As lists have it."""

    def extend(self, values: object) -> None:
        """As lists have it."""


def _without_prefix(
    state: dict[str, Tensor], wanted: set[str], prefix: str | None, path: Path
) -> dict[str, Tensor]:
    """The model's part of a state dict, in which a wrapper put something before the names."""
    if prefix is None:
        first = next(iter(sorted(wanted)), "")
        possible = sorted({key.removesuffix(first) for key in state if key.endswith(first)})
        fitting = [p for p in possible if all(p + key in state for key in wanted)]
        if "" in fitting or not fitting:
            return state
        if len(fitting) > 1:
            raise BadInputError(
                f"{path} has several networks that fit, under {', '.join(map(repr, fitting))}: "
                "name one with --prefix"
            )
        prefix = fitting[0]
    found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    if not found:
        there = sorted({key.partition(".")[0] + "." for key in state})
        raise BadInputError(f"{path} has nothing under {prefix!r}; found {', '.join(there)}")
    return found


def _images(
    args: argparse.Namespace, model: nn.Module, channels: int | None, group: Group | None
) -> Tensor:
    quarter = group is None or any(group.matrices[e][0, 0] == 0 for e in group.grid_symmetries)
    dimension = 2 if group is None else group.dimension
    of_layers = (getattr(module, "in_channels", None) for module in model.modules())
    reads = channels or next((found for found in of_layers if isinstance(found, int)), None)
    if args.images is not None:
        images = lab.load_images(
            args.images,
            reads,
            square=quarter,
            limit=args.count or _COUNT,
            size=args.size,
            dimension=dimension,
        )
    else:
        made_for = getattr(model, "image_size", None)
        made_for = made_for if isinstance(made_for, int) else _SIZE
        size = args.size or min(made_for, _SIZE if made_for <= _SIZE else _LARGE)
        if dimension == 3:
            size = args.size or min(made_for, _SIZE_OF_VOLUMES)
        named = args.model is not None and ":" not in args.model
        count = args.count or (_COUNT if not named else 2 if size <= _SIZE else 1)
        if dimension == 3:
            count = args.count or 1
        images = smooth_field(
            size, reads or 1, args.smoothness, args.seed, count, dimension=dimension
        )
    weights = [p for p in model.parameters() if p.is_floating_point()]
    return images.to(weights[0]) if weights else images


class _Passes:
    """Counts the passes of a model through `check`, and says how many are left."""

    def __init__(
        self, args: argparse.Namespace, model: nn.Module, group: Group | None, square: bool
    ) -> None:
        parts = {"sizes"} if group is not None and group.dimension == 3 else {*_WHY}
        total = 1 + (len(parts - set(args.skip)) if square else 0)
        if group is not None:
            plane = group.dimension == 2
            exact = len(group.grid_symmetries if plane else group.grid_generators)
            table = 1 + len(lab.telling_elements(group))
            total += table * max(1, len(args.weights)) + 2 + exact
        if group is not None and square and (args.angles or args.plots or args.json):
            total += 1 + len(args.angles or range(page.STEPS[group.dimension]))
        if args.html is not None and group is not None:
            total += 2 * page.STEPS[group.dimension] + 1
        self._bar = Progress("econv check", total, _per_second, last=False)
        self._what = ""
        self._counts = True
        # A function, which copies of the model share.
        self._hook = model.register_forward_hook(self._pass)

    def _pass(self, *_: object) -> None:
        if self._counts:
            self._bar.advance(1, self._what)

    @contextlib.contextmanager
    def as_one(self, what: str) -> Iterator[None]:
        """Count whatever passes there are as one."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True
        self._bar.advance(1, what)

    def say(self, what: str) -> None:
        """What the passes are for from now on."""
        self._what = what

    def __enter__(self) -> _Passes:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)
        self._hook.remove()


def _per_second(rate: float) -> str:
    return f"{rate:.1f} passes/s"


def _probe(model: nn.Module, images: Tensor) -> str | None:
    """Run the model once; what is wrong with the kinds of its features, if anything."""
    kept = model.training
    mistake = None
    try:
        with torch.no_grad():
            try:
                with checked():
                    model.eval()(images[:1])
            except KindError as error:
                mistake = str(error)
                model(images)
    except Exception as error:  # the user's code may raise anything
        raise BadInputError(
            f"the model fails on images of shape {list(images.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from None
    finally:
        model.train(kept)
    return mistake


def _sources(model: nn.Module, images: Tensor, group: Group) -> tuple[lab.ErrorSources | None, str]:
    off_grid = [e for e in range(group.order) if e not in group.grid_symmetries]
    element = (off_grid or [*group.grid_generators] or [0])[0]
    try:
        return lab.error_sources(model, images, element, group), ""
    except ValueError as error:
        return None, str(error)


def _parts(images: Tensor) -> tuple[str, ...]:
    """What of `_WHY` is measured; of volumes where samples lie alone."""
    return ("sizes",) if images.ndim == 5 else _WHY


class _Why:
    """Why a network is not equivariant, and what would help: measured on the first image."""

    lie: tuple[lab.LieDerivatives, ...] = ()
    split: lab.ErrorSplit | None = None
    advice: lab.Advice | None = None
    sizes: lab.Sizes | None = None

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        images: Tensor,
        group: Group | None,
        passes: _Passes,
    ) -> None:
        self.image, self.made_up = lab.windowed(images[:1]), args.images is None
        whole = Group("p8") if group is None else group
        off_grid = [e for e in range(whole.rotations) if e not in whole.grid_symmetries]
        self.degrees = 360 * off_grid[0] / whole.rotations if off_grid else 45.0
        self.failed: dict[str, str] = {}
        parts: dict[str, tuple[str, Callable[[], None]]] = {
            "lie": ("Lie derivatives", lambda: self._lie(model)),
            "split": ("what the error is made of", lambda: self._split(model)),
            "advice": ("what would help", lambda: self._advice(model)),
            "sizes": ("sizes", lambda: self._sizes(model)),
        }
        for name, (what, measure) in parts.items():
            if name in _parts(images) and name not in args.skip:
                with passes.as_one(what):
                    try:
                        measure()
                    except (ValueError, RuntimeError) as error:
                        self.failed[what] = " ".join(str(error).split())

    def _lie(self, model: nn.Module) -> None:
        rotation = lab.lie_derivatives(model, self.image, "rotation")
        others = (
            lab.lie_derivatives(model, self.image, name, shares=False, totals=False)
            for name in ("translation", "scale")
        )
        self.lie = (rotation, *others)

    def _split(self, model: nn.Module) -> None:
        self.split = lab.split_error(model, self.image, self.degrees)

    def _advice(self, model: nn.Module) -> None:
        # Without images of the user's, large networks are for a first look, which is quick.
        large = self.made_up and self.image.shape[-1] > _SIZE
        kinds = ("activations", "strides") if large else lab.KINDS_OF_ADVICE
        self.advice = lab.advice(model, self.image, self.degrees, kinds=kinds)

    def _sizes(self, model: nn.Module) -> None:
        self.sizes = lab.sizes(model, self.image)

    def to_dict(self) -> dict[str, Any]:
        """Each part's numbers, or nothing where it was skipped or failed."""
        found = {name: getattr(self, name) for name in _WHY[1:]}
        parts = {name: None if part is None else part.to_dict() for name, part in found.items()}
        return {"lie": [table.to_dict() for table in self.lie] or None, **parts}

    def print(self) -> None:
        """All parts that were measured."""
        if self.lie:
            _print_lie(self.lie)
        if self.split is not None:
            _print_split(self.split)
        if self.advice is not None:
            _print_advice(self.advice)
        if self.sizes is not None:
            print(f"\n{lab.size_verdict(self.sizes)}")
        for what, why in self.failed.items():
            print(f"\nNot measured, {what}: {why}")


def _print_lie(tables: Sequence[lab.LieDerivatives]) -> None:
    print(
        "\nLie derivatives: what a layer does wrong when the image begins to move, over its map\n"
        "(per radian, pixel and factor e; all: the network up to here; share: of the output's)"
    )
    rotation = tables[0]
    first = max(len(f"{e.name} {e.type}") for e in rotation.layers) + 2 if rotation.layers else 8
    others = [table.transformation for table in tables[1:]]
    heads = [rotation.transformation, "all", "share", *others]
    print(" " * first + "".join(f"{head:>13}" for head in heads))
    for rows in zip(*(table.layers for table in tables), strict=True):
        share = "–" if rows[0].share is None else f"{100 * rows[0].share:.1f} %"
        cells = [_figure(rows[0].own), _figure(rows[0].total), share]
        cells += [_figure(row.own) for row in rows[1:]]
        print(
            f"{rows[0].name + ' ' + rows[0].type:<{first}}"
            + "".join(f"{cell:>13}" for cell in cells)
        )
    print(f"{'output':<{first}}{'':>13}{_figure(rotation.output):>13}")
    for table in tables:
        if table.method != "forward mode":
            print(f"{table.transformation.capitalize()} by {table.method}.")
            break


def _print_split(split: lab.ErrorSplit) -> None:
    print(
        f"\nWhat the error of the output at {split.degrees:g}° is made of "
        f"({_figure(split.error)}), and what each alone would make"
    )
    if split.exact:
        print("  Nothing to explain: exact to rounding.")
    for source in split.sources:
        if source.alone is None and abs(source.share) < 0.005:
            continue
        alone = _figure(source.alone)
        print(
            f"  {source.name:<22}{100 * source.share:>7.1f} %{alone:>10}  "
            + ", ".join(source.layers)
        )
    if abs(split.unexplained) > 0.02:
        print(f"  {'not resolved':<22}{100 * split.unexplained:>7.1f} %")


def _print_advice(advice: lab.Advice) -> None:
    norms = "estimated anew" if advice.statistics == "estimated" else "held"
    print(
        f"\nWhat would help, by trial: error at {advice.degrees:g}° before and after, untrained, "
        f"statistics of norms {norms}"
    )
    for suggestion in advice.suggestions:
        print(f"  {suggestion}")
    if advice.together is not None:
        print(f"  all of this: {advice.together}")
    if not advice.suggestions:
        print("  None of what was tried lowers it by a tenth.")
    others = [text for text in advice.tried if text not in {s.change for s in advice.suggestions}]
    if others:
        print(f"  Tried without such an effect: {'; '.join(others)}.")


def _print_table(table: lab.LayerErrors) -> None:
    exact = set(table.group.grid_symmetries)
    print("\nEquivariance errors ‖f(πx) − πf(x)‖ / ‖πf(x)‖; ∗ marks symmetries of the grid")
    names = [f"{entry.name} {entry.type}" for entry in table.layers]
    heads = [
        name + ("∗" if element in exact else " ")
        for element, name in zip(table.elements, table.names, strict=True)
    ]
    first = max(len(name) for name in [*names, "output, invariant"]) + 2
    kinds = max(len(kind) for kind in (*(e.kind for e in table.layers), table.output_kind, "kind"))
    width = max(10, *(len(head) + 1 for head in heads))
    columns = min(_COLUMNS, max(1, 90 // width))
    for start in range(0, len(heads), columns):
        part = slice(start, start + columns)
        print(f"{'element':<{first + kinds}}" + "".join(f"{h:>{width}}" for h in heads[part]))
        for name, entry in zip(names, table.layers, strict=True):
            cells = "".join(f"{_figure(e):>{width - 1}} " for e in entry.errors[part])
            print(f"{name:<{first}}{entry.kind:<{kinds}}{cells}")
        output = table.output[part]
        cells = "".join(f"{_figure(e.relative):>{width - 1}} " for e in output)
        print(f"{'output':<{first}}{table.output_kind:<{kinds}}{cells}")
        if all(e.agreement is not None for e in output):
            cells = "".join(f"{100 * (e.agreement or 0):>{width - 3}.0f} % " for e in output)
            print(f"{'same class':<{first + kinds}}{cells}")
    if not table.layers:
        print(
            "No layer could be compared, because none says how its map turns: "
            "only the output was measured."
        )
    if any(error is None for entry in table.layers for error in entry.errors):
        print("–: too few pixels, or no signal, for a comparison at that angle.")
    if table.blame is not None:
        print(
            f"Not exact at the symmetries of the pixel grid from {table.first_inexact()} on. "
            f"{lab.verdict(table.blame)}"
        )
    if table.unknown:
        print(f"Not compared, because how they turn is unknown: {', '.join(table.unknown)}")


def _print_sources(sources: lab.ErrorSources, group: Group) -> None:
    if sources.exact:
        print(
            f"\nThe map after {sources.layer} is off by {_figure(sources.error)} at "
            f"{sources.angle}: nothing to explain: exact to rounding."
        )
        return
    estimated = sources.grid is not None and sources.element not in group.grid_symmetries
    note = " (estimate)" if estimated else ""
    what, whole = ("images", "disc") if group.dimension == 2 else ("volumes", "ball")
    print(
        f"\nThe {what} as they came, corners included: where the error at {sources.angle} comes "
        f"from, in the map\nafter {sources.layer} ({_figure(sources.error)} in the whole {whole}, "
        f"{_figure(sources.interior)} inside):"
    )
    if sources.broken_layer is None:
        print(f"  strided sampling      {100 * sources.sampling:5.1f} %{note}")
    else:
        print(f"  not equivariant, {sources.broken_layer}: {100 * sources.broken:.1f} %{note}")
    print(f"  padding and cropping  {100 * sources.padding:5.1f} %")
    print(f"  stencils              {100 * sources.stencil:5.1f} %")
    print(f"Turning that map there and back changes it by {_figure(sources.comparison)}.")


def _print_checkpoints(checkpoints: Sequence[tuple[Path, lab.LayerErrors]]) -> None:
    print("\nDoes training keep it? The largest error of any layer, and of the output")
    width = max(len(str(path)) for path, _ in checkpoints) + 2
    print(
        f"{'weights':<{width}}{'on the grid':>13}{'elsewhere':>13}{'output':>13}{'same class':>13}"
    )
    for path, table in checkpoints:
        exact = set(table.group.grid_symmetries)

        def largest(on_grid: bool, table: lab.LayerErrors = table, grid: set[int] = exact) -> str:
            found = [
                error
                for entry in table.layers
                for element, error in zip(table.elements, entry.errors, strict=True)
                if (element in grid) == on_grid and error is not None
            ]
            return _figure(max(found)) if found else "–"

        output = _figure(
            max((e.relative for e in table.output if e.relative is not None), default=None)
        )
        shares = [e.agreement for e in table.output if e.agreement is not None]
        same = f"{100 * min(shares):.0f} %" if shares else "–"
        row = f"{largest(True):>13}{largest(False):>13}{output:>13}{same:>13}"
        print(f"{path!s:<{width}}{row}")


def _plots(folder: Path, model: nn.Module, curve: lab.AngleCurve | None, group: Group) -> None:
    from econv import plots

    figures = {} if curve is None else {"angles": plots.plot_angles(curve)}
    layer = next(
        (
            m
            for m in model.modules()
            if isinstance(m, PDOConv2d) and not isinstance(m, VectorConv2d)
        ),
        None,
    )
    if layer is not None and group.dimension == 2:
        figures["filters"] = plots.plot_filters(layer)
        figures["symbols"] = plots.plot_symbols(lab.operator_symbols(layer.basis))
        off_grid = [e for e in range(group.order) if e not in group.grid_symmetries]
        if off_grid and layer.stride == 1 and layer.input_kind != "mixed":
            named = {"first layer": lab.resolution_curve(layer, off_grid[0], group=group)}
            figures["resolution"] = plots.plot_resolution(named)
    for name, figure in figures.items():
        print(f"Picture: {plots.save(figure, folder / f'{name}.png')}")


def _page(
    args: argparse.Namespace,
    model: nn.Module,
    images: Tensor,
    table: lab.LayerErrors,
    sources: lab.ErrorSources | None,
    why_not: str,
    name: str,
    why: _Why | None,
) -> str:
    if sources is None:
        raise BadInputError(f"--html: {why_not}")
    twin = None
    if args.twin_weights is not None:
        twin = lab.plain_twin(model)
        _load_weights(twin, args.twin_weights, args.prefix)
    return page.page(
        model,
        images,
        twin=twin,
        group=table.group,
        title=f"Equivariance of {name}",
        table=table,
        sources=sources,
        lie=why.lie[0] if why is not None and why.lie else None,
        split=why.split if why is not None else None,
        advice=why.advice if why is not None else None,
        sizes=why.sizes if why is not None else None,
    )


def _figure(error: float | None) -> str:
    return "–" if error is None else f"{error:.1e}"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number; got {text}")
    return value


def _group(text: str) -> Group:
    try:
        return Group(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
