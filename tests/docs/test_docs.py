"""What the pages of the docs say is so: their code runs, and nothing public is left out."""

import importlib.util
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch

import econv
from econv import cli
from econv.recipes import RECIPES, recipe
from econv.train.trainer import augmentation_of, network_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="no docs beside the tests")

# A comment before a block names the packages without which it cannot run.
BLOCK = re.compile(r"(?:<!-- needs: ([\w, ]+) -->\n)?```python\n(.*?)^```", re.M | re.S)


def blocks(page: Path) -> list[tuple[tuple[str, ...], str]]:
    """The packages and the code of every block, moved to its own line for the traceback."""
    text = page.read_text(encoding="utf-8")
    return [
        (
            tuple(re.findall(r"\w+", found[1] or "")),
            "\n" * text.count("\n", 0, found.start(2)) + found[2],
        )
        for found in BLOCK.finditer(text)
    ]


def run(page: Path) -> None:
    names: dict[str, object] = {"__name__": "docs"}
    for packages, code in blocks(page):
        if all(importlib.util.find_spec(package) for package in packages):
            exec(compile(code, str(page), "exec"), names)


PAGES = [
    str(page.relative_to(DOCS))
    for page in sorted(DOCS.rglob("*.md"))
    if "```python" in page.read_text(encoding="utf-8")
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of exporters
@pytest.mark.parametrize("page", PAGES)
def test_the_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(DOCS / page)


def test_code_that_is_wrong_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\nmore\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(page)
    assert caught.traceback[-1].lineno + 1 == 10


def test_a_block_that_needs_what_is_missing_is_left_out(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- needs: torch, no_such_package -->\n```python\nraise KeyError\n```\n")
    run(page)
    page.write_text("<!-- needs: torch -->\n```python\nraise KeyError\n```\n")
    with pytest.raises(KeyError):
        run(page)


# A line of a console, `$ econv train …`, or one set off by four spaces.
COMMAND = re.compile(
    r"^(?:\$ |    )(?:econv |torchrun .*-m econv\.)((?:train|report|demo|check)\b.*)$", re.M
)


def commands(page: Path) -> list[list[str]]:
    """The arguments of every command on a page."""
    return [shlex.split(line, comments=True) for line in COMMAND.findall(page.read_text("utf-8"))]


def try_command(arguments: list[str]) -> None:
    """Raise :class:`ValueError` or leave if a command would not begin to run."""
    options = cli._parser().parse_args(arguments)
    if arguments[0] == "train":
        for name in RECIPES if options.recipe == "RECIPE" else [options.recipe]:
            chosen = recipe(name).with_changes(dict(c.split("=", 1) for c in options.changes))
            classes = 100 if "cifar100" in name else 10
            with torch.device("meta"):
                network_of(chosen, classes)
            augmentation_of(chosen)


COMMANDS = [
    pytest.param(arguments, id=f"{page.relative_to(ROOT)}: {' '.join(arguments)}")
    for page in [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
    if page.exists()
    for arguments in commands(page)
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_the_commands_can_be_given(arguments):
    try_command(arguments)


def examples_of_help() -> list[str]:
    """Every command line among the examples of `econv --help` and of its commands."""
    texts = [cli._EXAMPLES, *cli._EXAMPLES_OF.values()]
    found = re.findall(
        r"(?:\beconv|-m econv\.)\s?((?:demo|check|train|report)\b.*)$", "\n".join(texts), re.M
    )
    return [re.split(r"\s{2,}", line)[0] for line in found]


@pytest.mark.parametrize("line", examples_of_help())
def test_the_examples_of_the_help_can_be_given(line):
    try_command(shlex.split(line))


def test_the_help_shows_what_people_do(capsys):
    for arguments, least in (
        ([], 5),
        (["check"], 4),
        (["demo"], 2),
        (["train"], 5),
        (["report"], 3),
    ):
        with pytest.raises(SystemExit):
            cli.main([*arguments, "--help"])
        out = capsys.readouterr().out
        examples = out[out.index("what people do" if not arguments else "examples:") :]
        assert len(re.findall(r"\beconv.(?:demo|check|train|report|verify)", examples)) >= least
        assert max(map(len, out.splitlines())) <= 100


def test_the_commands_of_every_kind_are_found():
    assert {param.values[0][0] for param in COMMANDS} == {"train", "report", "demo", "check"}


@pytest.mark.parametrize(
    "line",
    [
        "econv train mnist_rot_p8 --set epochs=3 --set fields=9",
        "econv train mnist_rot_p8 --set model_options.fields=9  # a comment",
        "econv train mnist_rot_p8 --set model_options.foo=9",
        "econv train mnist_rot_p8 --set augmentation.spin=1",
        "econv train mnist_rot_p9",
        "econv report --htm1 page.html",
        "torchrun --nproc-per-node=4 -m econv.train mnist_rot_p8 --sed 3",
    ],
)
def test_a_command_that_is_wrong_is_noticed(tmp_path, line, capsys):
    (tmp_path / "page.md").write_text(f"text\n\n```console\n$ {line}\n```\n")
    ((arguments),) = commands(tmp_path / "page.md")
    with pytest.raises((ValueError, SystemExit)):
        try_command(arguments)


def test_the_reference_has_every_public_module():
    told = set()
    for page in (DOCS / "reference").glob("*.md"):
        told |= set(re.findall(r"^::: (econv[\w.]*)$", page.read_text(encoding="utf-8"), re.M))
    modules = {f"econv.{found.name}" for found in pkgutil.iter_modules(econv.__path__)}
    assert {name for name in modules if "._" not in name} <= told


def test_the_reference_begins_with_every_public_name():
    page = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    told = set(re.findall(r"\[`econv\.(\w+)`\]", page))
    assert set(econv.__all__) == told


def test_the_page_of_the_layers_has_them_all():
    page = (DOCS / "reference" / "layers.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^ +- (\w+)$", page, re.M)) == sorted(econv.layers.__all__)


def test_the_layers_that_the_migration_page_names_exist():
    # `layers_of` of benchmarks/libraries.py, where those libraries are.
    path = ROOT / "benchmarks" / "results" / "peer_layers.json"
    if not path.exists():
        pytest.skip("no benchmarks beside the tests")
    peers = json.loads(path.read_text(encoding="utf-8"))
    known = {name for library in ("escnn", "e2cnn") for name in peers[library]["layers"]}
    text = (DOCS / "migrating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \|", text.split("## Layers")[1].split("\n## ")[0], re.M)
    names = {name for row in rows for name in re.findall(r"`([A-Z]\w+)", row)}
    assert len(names) > 30
    assert names - known == set()


def missing_tests(text: str) -> list[str]:
    """The tests that a text names and that there are not."""
    missing = []
    for file, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text):
        path = ROOT / file
        found = path.is_file() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))
        missing += [] if found else [f"{file}::{name}"]
    return missing


def test_the_tests_that_pages_name_exist():
    # What once failed on a GPU keeps the name that it had.
    made = re.compile(r"<!-- table: device tests -->.*?<!-- end -->", re.S)
    for page in DOCS.rglob("*.md"):
        assert missing_tests(made.sub("", page.read_text(encoding="utf-8"))) == [], page
    assert missing_tests("tests/test_no.py, tests/test_basis.py::test_no") == [
        "tests/test_no.py::",
        "tests/test_basis.py::test_no",
    ]


def test_names_in_tables_break_at_their_marks_and_figures_nowhere():
    pytest.importorskip("latex2mathml", reason="what builds the site is not installed")
    found = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(found)
    found.loader.exec_module(hooks)
    row = "<tr><td class='a/b/c/d/e/f/g/h/i'><code>layers/convolution.py</code></td>"
    row += "<td>7.2e-05</td></tr><p>layers/convolution.py</p>"
    assert hooks.on_page_content(row) == row.replace(
        "<code>layers/convolution.py", "<code>layers/<wbr>convolution.<wbr>py"
    ).replace("7.2e-05", '<span class="figure">7.2e-05</span>')
