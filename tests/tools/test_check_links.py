"""Links that lead nowhere are found, and those of this project lead somewhere."""

from __future__ import annotations

import pytest

check_links = pytest.importorskip("check_links", reason="no tools beside the tests")

PAGE = """# A page of *words*, `code` & [links](other.md)

[one](other.md) [two](other.md#second-heading) <a href="other.md">three</a> [here](#again_1)
![four](picture.png) [five](other.md "its title") [names][econv.layers]

    [six]: other.md

## Again
## Again

```python
x[1](no.md)
## No heading
```
`[seven](no.md)` <!-- [eight](no.md) -->

$$
u[r](x)
$$

[nine]: other.md#econv.layers.Some
"""
OTHER = "# Other\n\nText\n\n## Second heading {#named}\n\n::: econv.layers\n"


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(check_links, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text(OTHER)
    (tmp_path / "picture.png").write_bytes(b"")
    return tmp_path / "page.md"


def mistakes(page, text: str) -> list[str | None]:
    page.write_text(text)
    found = [(link.line, check_links.wrong(link)) for link in check_links.links(page)]
    return [f"{line}: {reason}" for line, reason in found if reason]


def test_links_that_lead_somewhere_are_right(page):
    assert mistakes(page, PAGE) == []
    assert len(list(check_links.links(page))) == 8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[x](no.md)", "no such file: no.md"),
        ("![x](no.png)", "no such file: no.png"),
        ('<img src="no.png">', "no such file: no.png"),
        ("[x]: no.md", "no such file: no.md"),
        ("[x](other.md#second)", "no such heading: #second"),
        ("[x](other.md#econv.models)", "no such heading: #econv.models"),
        ("[x](#no)", "no such heading: #no"),
        ("[x](/other.md)", "no such file: /other.md"),
        ("```\n# Only code\n```\n[x](#only-code)", "no such heading: #only-code"),
    ],
)
def test_links_that_lead_nowhere_are_found(page, text, reason):
    line = 1 + text.count("\n")
    assert mistakes(page, f"{text}\n") == [f"{line}: {reason}"]


def test_a_page_outside_is_none_of_ours(page, tmp_path, monkeypatch):
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.setattr(check_links, "ROOT", inner)
    assert mistakes(inner / "page.md", "[x](../other.md)") == [
        "1: outside of the project: ../other.md"
    ]


def test_the_pages_of_this_project_lead_somewhere(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["check_links.py"])
    code = check_links.main()
    assert (code, capsys.readouterr().err) == (0, "")
