"""The docstrings of public names: an example that runs, and the errors that the code raises."""

import ast
import builtins
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import econv

ROOT = Path(__file__).resolve().parents[2]

# Rooms of commands, whose examples are command lines, and rooms that only other rooms enter.
COMMANDS = {"cli", "demo", "environment", "report", "train", "verify"}
INSIDE = {"arrays", "checking", "engines", "files", "gpu", "harmonics", "page", "plan"}
INSIDE |= {"pretrained", "progress", "records", "tensors", "timm", "tracing"}

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="no docs beside the tests")


@cache
def modules() -> list[ModuleType]:
    """econv, and the modules right below it."""
    names = [found.name for found in pkgutil.iter_modules(econv.__path__, "econv.")]
    wanted = [name for name in names if "._" not in name and name != "econv.timm"]  # may be missing
    return [econv, *map(importlib.import_module, wanted)]


@cache
def public() -> dict[str, Callable]:
    """Every class and function of an ``__all__``, by its first name."""
    found: dict[int, tuple[str, Callable]] = {}
    for room in modules():
        for name in getattr(room, "__all__", ()):
            one = getattr(room, name)
            ours = getattr(one, "__module__", "").startswith("econv")
            if ours and callable(one) and name not in _OF_COMMANDS:
                found.setdefault(id(one), (f"{room.__name__}.{name}", one))
    return dict(found.values())


_OF_COMMANDS = {"main", "add_arguments"}  # they say what is wrong on the terminal


# -------------------------------------------------------------------------------------- errors


def raised(one: Callable, helpers: int = 2) -> set[str]:
    """The errors that a function raises, or a class when made or called.

    Those of functions that are not public count, too, as many calls deep as ``helpers`` says.
    """
    if not inspect.isclass(one):
        return _raised(inspect.unwrap(one), helpers)
    found: set[str] = set()
    for base in one.__mro__:
        for name in ("__new__", "__init__", "__post_init__", "__call__", "forward"):
            method = base.__dict__.get(name)
            method = inspect.unwrap(getattr(method, "__func__", method))
            if inspect.isfunction(method) and method.__module__.startswith("econv"):
                found |= _raised(method, helpers)
    return found


@cache
def _raised(function: Callable, helpers: int) -> frozenset[str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return frozenset()  # made by `dataclass`
    ours = {id(inspect.unwrap(one)) for one in public().values()}
    found: set[str] = set()
    for node in ast.walk(body):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = error.attr if isinstance(error, ast.Attribute) else getattr(error, "id", "")
            found |= {name} if name.endswith("Error") else set()  # and no variable
        if helpers and isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = function.__globals__.get(node.func.id)
            own = inspect.isfunction(called) and called.__module__.startswith("econv")
            if own and id(called) not in ours:
                found |= _raised(called, helpers - 1)
    return frozenset(found - {"NotImplementedError"})


def told(one: Callable) -> set[str]:
    """The errors that the section of a docstring names."""
    section = re.search(r"^Raises:\n((?: +\S.*\n?)+)", inspect.getdoc(one) or "", re.M)
    return set(re.findall(r"^    (\w+): ", section[1], re.M)) if section else set()


def silent(one: Callable) -> set[str]:
    """The errors that a docstring keeps to itself; one kind of a `ValueError` stands for all."""
    said = told(one)
    return raised(one) - said - ({"ValueError", "StepError"} if said & VALUE_ERRORS else set())


VALUE_ERRORS = {"ConversionError", "DataError", "RecordError", "ValueError"}


def test_the_docstrings_say_what_is_raised():
    assert {name: silent(one) for name, one in public().items() if silent(one)} == {}
    assert sum(bool(raised(one)) for one in public().values()) > 120  # the code was read


def test_errors_that_are_told_exist():
    known = set(vars(builtins)) | {name.rpartition(".")[2] for name in public()}
    assert {name: told(one) - known for name, one in public().items() if told(one) - known} == {}


def test_an_error_that_is_not_told_is_noticed():
    def directly(x: int) -> None:
        """Tell nothing."""
        raise KeyError(x)

    class Made:
        """Tell of another error.

        Raises:
            KeyError: never.
        """

        def __init__(self) -> None:
            raise TypeError

    Made.__init__.__module__ = "econv.made"
    assert silent(directly) == {"KeyError"}
    assert silent(Made) == {"TypeError"}
    assert raised(econv.FieldParameter) == raised(econv.FieldParameter, 1) == {"ValueError"}
    assert raised(econv.FieldParameter, 0) == set()  # helpers raise it


LAYERS = sorted(
    name for name in econv.layers.__all__ if name.endswith("2d") and name != "PDOConv2d"
)
NEEDED = {"group": "p4", "subgroup": "p2"}  # of others, 2 will do
BAD = (None, -1, 2.5, "x", [], torch.zeros(2))
READ = (None, torch.zeros(2), torch.zeros(1, 7, 9, 9), torch.zeros(1, 8, 9, 9, dtype=torch.int32))
READ += (torch.zeros(1, 8, 0, 9), torch.zeros(1, 8, 1, 1, dtype=torch.float64))


def errors_of(layer: type) -> set[str]:
    """The errors of bad arguments, one at a time, and of what the layer does not read."""
    arguments = inspect.signature(layer).parameters
    options = inspect.signature(econv.layers.PDOConv).parameters
    by_name = [a for a in arguments.values() if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    given = {a.name: NEEDED.get(a.name, 2) for a in by_name if a.default is a.empty}
    given |= {"scalars": 1} if "scalars" in arguments else {}
    names = {a.name for a in by_name}
    if "options" in arguments:
        names |= {a.name for a in options.values() if a.kind == a.KEYWORD_ONLY}
        names -= {"in_channels", "out_channels"} - arguments.keys()  # of the base alone
    found = set()
    made = layer(**given)
    calls = [(layer, (), {**given, name: bad}) for name in names for bad in BAD]
    sizes = (9, 9) if layer in (econv.Recentre2d, econv.NearestResize2d) else ()
    calls += [(made, (x, *sizes), {}) for x in READ]
    for call, inputs, keywords in calls:
        try:
            call(*inputs, **keywords)
        except Exception as error:
            found.add(type(error).__name__)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_bad_calls_of_layers_raise_what_is_told_and_nothing_else(name):
    layer = getattr(econv.layers, name)
    assert errors_of(layer) == {"ValueError"} <= told(layer)


# ------------------------------------------------------------------------------------ examples


@cache
def used() -> set[str]:
    """The names in all examples, of docstrings, of pages and of the README; printed classes too."""
    parser = doctest.DocTestParser()
    block = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
    examples, printed = [], set()
    for path in (ROOT / "src").rglob("*.py"):
        found = parser.get_examples(path.read_text("utf-8"))
        examples += [one.source for one in found]
        printed |= {name for one in found for name in re.findall(r"[A-Z]\w+", one.want)}
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        examples += block.findall(path.read_text("utf-8"))
    return printed.union(*map(names_in, examples))


def names_in(example: str) -> set[str]:
    """Names, and attributes of econv and its modules; those of others, as of numpy, are not ours.

    What is assigned is a variable.
    """
    nodes = list(ast.walk(ast.parse(example)))
    found = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    found -= {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    chains = [ast.unparse(n).split(".") for n in nodes if isinstance(n, ast.Attribute)]
    rooms = {room.__name__.rpartition(".")[2] for room in modules()}
    return found | {last for *path, last in chains if path and path[-1] in rooms}


def reached(names: dict[str, Callable], words: set[str]) -> set[str]:
    """The names that an example of their own or of others shows.

    An example of a function shows the class of what it gives and the errors that it tells of, one
    of a class its bases and what it holds and gives.
    """
    shown = {n for n, one in names.items() if ">>>" in (one.__doc__ or "")}
    shown |= {n for n in names if n.rpartition(".")[2] in words}
    while True:
        these = [names[n] for n in shown]
        types = {base for one in these if inspect.isclass(one) for base in one.__mro__}
        types |= {kind for one in these for kind in given_by(one)}
        errors = {name for one in these for name in told(one)}
        more = {n for n, one in names.items() if one in types or n.rpartition(".")[2] in errors}
        more -= shown
        if not more:
            return shown
        shown |= more


def given_by(one: Callable) -> set[object]:
    """The classes of what a function returns; of what a class holds, and its methods return."""
    members = [m.fget if isinstance(m, property) else m for m in vars(one).values()]
    methods = [m for m in members if inspect.isfunction(m)] if inspect.isclass(one) else [one]
    wanted = [hints(m).get("return") for m in methods]
    wanted += hints(one).values() if inspect.isclass(one) else []
    found: set[object] = set()
    while wanted:
        hint = wanted.pop()
        found |= {hint} if inspect.isclass(hint) else set()
        wanted += typing.get_args(hint)
    return found


def hints(one: Callable) -> dict[str, object]:
    try:
        return typing.get_type_hints(one)
    except (NameError, TypeError):  # of names that are imported for type checkers only
        return {}


def test_public_names_have_an_example():
    names = {n: one for n, one in public().items() if n.split(".")[1] not in COMMANDS | INSIDE}
    assert len(names) > 150
    assert names.keys() - reached(names, used()) == set()


def test_every_name_of_econv_has_an_example_of_its_own():
    names = {n: one for n, one in public().items() if n.count(".") == 1}
    assert len(names) > 60
    assert [n for n, one in names.items() if ">>>" not in (one.__doc__ or "")] == []


def test_a_name_without_an_example_is_noticed():
    class Held:
        """Nothing."""

    class Holder:
        """Nothing."""

        held: list[Held]

    def make() -> Holder:
        """Nothing."""

    names = {"make": make, "Holder": Holder, "Held": Held, "other": lambda: None}
    assert reached(names, {"other"}) == {"other"}
    assert reached(names, {"make"}) == {"make", "Holder", "Held"}
    found = names_in("x = np.load(load_images(econv.lab.sizes(x)))")
    assert found == {"np", "load_images", "econv", "lab", "sizes"}
