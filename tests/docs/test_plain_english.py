"""Pages and docstrings stay readable: short, few numbers in a sentence, paths that exist."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import econv

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="no docs beside the tests")

PAGES = [
    *(
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "examples/notebooks/README.md",
    ),
    *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md")),
]
LONGEST = {"README.md": 120, "docs/engines.md": 100, "docs/engine-kernels.md": 100}

# Not prose: code, tables, what scripts write between markers, comments, equations, front matter.
NOT_PROSE = re.compile(
    r"^---\n.*?^---$|^```.*?^```$|<!-- (?:table\b|econv report:).*?<!-- (?:econv report: )?end -->"
    r"|<!--.*?-->|^\$\$\n.*?^\$\$$|^\|.*?\|$|^    .*?$",
    re.M | re.S,
)
# What is a name is no number: `code`, links' addresses, 5×5 and 1/2 count once, p8 not at all.
NAMES = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+|\{[^}]*\}|<[^>]*>")
NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*(?:[×/^]\d+)*")


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose; items and paragraphs end one."""
    prose = NAMES.sub(" it ", NOT_PROSE.sub("\n\n", text))
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+) )", prose):
        words = re.sub(r"^\s*(?:[-*]|\d+\.|#+) ", "", paragraph)
        found += re.split(r"(?<=[.!?:;])\s+", " ".join(words.split()))
    return [sentence for sentence in found if sentence]


def numbers(sentence: str) -> list[str]:
    return NUMBER.findall(sentence)


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_has_more_than_two_numbers(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [s for s in sentences(text) if len(numbers(s)) > 2] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_very_long(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [s for s in sentences(text) if len(s.split()) > 45] == []


@pytest.mark.parametrize("page", LONGEST)
def test_the_page_is_short(page):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= LONGEST[page]


def test_a_sentence_with_three_numbers_is_noticed():
    page = "# 1 2 3\n\nA layer of p8 took 3 ms,\nor 4.5 on 5×5. So\n"
    page += "\n| 1 | 2 | 3 |\n\n- `1` 2 and 3\n"
    counts = [len(numbers(sentence)) for sentence in sentences(page)]
    assert counts == [3, 3, 0, 2]


def test_a_decision_takes_at_most_six_lines():
    text = (DOCS / "decisions.md").read_text(encoding="utf-8")
    decisions, tried = text.split("## Tried without success")
    paragraphs = re.split(r"\n\s*\n", decisions)
    assert len([p for p in paragraphs if p.startswith("**")]) > 30
    assert [p for p in paragraphs if p.count("\n") >= 6] == []
    items = re.split(r"\n(?=- )", tried.strip())
    assert [item for item in items if item.count("\n") >= 2] == []
    assert max(map(len, text.splitlines())) <= 120  # of what a line is


def test_the_changelog_is_read_in_two_minutes():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(text.split("\n## ")[1].split()) <= 600


def test_the_walks_name_files_that_exist():
    """Of the page on architecture: every path in a row of a table."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    walks = [part.partition("\n")[::2] for part in re.split(r"\n## ", text)]
    known = 0
    for title, walk in walks:
        package = ROOT / "src" / "econv"
        folder = package / "conversion" if "convert" in title else package
        for row in re.findall(r"^\| .*$", walk, re.M):
            beside = folder
            for name in re.findall(r"`([\w/]+(?:\.py|\.cpp|/))`", row):
                places = [base / name for base in (folder, beside, package, ROOT)]
                path = next((place for place in places if place.exists()), None)
                assert path is not None, f"{title}: {name}"
                beside, known = path.parent, known + 1
    assert known > 50


def test_every_term_is_in_the_glossary_and_linked_to():
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = set(re.findall(r"\{ #([\w-]+) \}$", glossary, re.M))
    linked = set()
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        linked |= set(re.findall(r"glossary\.md#([\w-]+)\)", page.read_text(encoding="utf-8")))
    assert len(terms) > 20
    assert linked <= terms
    assert len(linked) > len(terms) / 2


# Words of ours, where they mean nothing else. Decisions are for people who know them.
TERMS = {
    "canonical-filter": "canonical filters?",
    "closure": "closure",
    "engine": "engines?",
    "equivariance": "equivarian(?:t|ce)",
    "feature-map": "feature maps?",
    "field": "fields?",
    "group": "groups?",
    "irrep": "irreps?",
    "lie-derivative": "Lie derivatives?",
    "lifting": "lift(?:s|ing|ed)?",
    "operator": "operators?",
    "orientation": "orientations?",
    "recipe": "recipes?",
    "stencil": "stencils?",
    "twin": "twins?",
}
WITH_TERMS = [
    page
    for page in PAGES
    if page.startswith("docs/") and page not in ("docs/glossary.md", "docs/decisions.md")
]
# Where a word is plain English first: the page that explains it, any orientation, a vector field,
# the Hubble eXtreme Deep Field, the operator that is linked to as a derivative.
PLAIN = {
    ("docs/engines.md", "engine"),
    ("docs/images.md", "orientation"),
    ("docs/volumes.md", "orientation"),
    ("docs/rollouts.md", "field"),
    ("docs/examples/galaxies.md", "field"),
    ("docs/engine-kernels.md", "operator"),
}
NOT_SAID = re.compile(
    r"^#.*?$|`[^`]*`|!\[[^\]]*\]|\]\([^)]*\)|\]\[[^\]]*\]|https?://\S+|<[^>]*>|\{[^}]*\}", re.M
)


def unlinked(text: str) -> list[str]:
    """The terms that a page uses before it links to what they mean."""

    def hidden(found: re.Match[str]) -> str:
        return re.sub(r"[^\n\]]", "·", found[0])

    said = NOT_SAID.sub(hidden, NOT_PROSE.sub(hidden, text))
    found = []
    for term, words in TERMS.items():
        first = re.search(rf"(?<![\w./-])(?:{words})(?![\w-])", said, re.I)
        if first is not None:
            before = said.rfind("[", 0, first.start())
            inside = before >= 0 and "]" not in said[before : first.start()]
            found += [] if inside else [term]
    return found


@pytest.mark.parametrize("page", WITH_TERMS)
def test_terms_are_linked_where_a_page_first_uses_them(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [term for term in unlinked(text) if (page, term) not in PLAIN] == []


def test_a_term_without_a_link_is_noticed():
    assert unlinked("# Groups\n\nA `group`, a [group](glossary.md#group), the group.") == []
    assert unlinked("A group, and a [group](glossary.md#group) of Fields.") == ["field", "group"]
    assert unlinked("An [engine](engines.md) has\na [stencil][econv.stencils].") == []


def test_the_picture_of_the_house_is_that_of_the_contracts():
    pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml by itself")
    script = [sys.executable, str(DOCS / "house.py"), "--check"]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# It needs torchvision: its example is on the page on converting.
ELSEWHERE = {"convert_detector"}


def test_every_public_name_says_what_it_is_and_has_an_example():
    told = {name: inspect.getdoc(getattr(econv, name)) or "" for name in econv.__all__}
    modules = {name for name in told if inspect.ismodule(getattr(econv, name))}
    assert {name for name, text in told.items() if len(text.split()) < 4} == set()
    without = {name for name, text in told.items() if ">>>" not in text}
    assert without - modules <= ELSEWHERE


# What users import from; the rest of the reference is for people who change the library.
MODULES = ("groups", "lab", "models", "operators", "parameters", "plots", "recipes", "reference")


@pytest.mark.parametrize("name", [*MODULES, "stencils", "testing"])
def test_the_functions_of_modules_that_users_import_from_have_examples(name):
    module = importlib.import_module(f"econv.{name}")
    told = {word: getattr(module, word) for word in module.__all__}
    functions = {word: found for word, found in told.items() if inspect.isfunction(found)}
    assert functions
    assert [word for word, found in functions.items() if ">>>" not in inspect.getdoc(found)] == []
