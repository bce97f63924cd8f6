"""Every page of the site in a real browser, wide and narrow, light and dark.

Nothing sticks out, nothing is cut, and all text stands out from what is behind it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import browsing

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="no docs beside the tests"),
]

# What is wider than its place and does not scroll there.
BEYOND = """
const scrolls = e => {
  for (; e && e !== document.body; e = e.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
  return false;
};
const found = [...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.left < window.innerWidth && box.right > window.innerWidth + 1
    && !e.closest(".md-sidebar") && !scrolls(e);
});
if (document.documentElement.scrollWidth > window.innerWidth) found.push(document.body);
return found.map(e => e.outerHTML.slice(0, 200));
"""

# On a wide screen nothing has to scroll.
SCROLLS = """
return [...document.querySelectorAll(".md-content pre code, .md-content table")].filter(e => {
  const place = e.matches("table") ? e.closest(".md-typeset__scrollwrap") || e.parentElement : e;
  return e.scrollWidth > place.clientWidth + 1;
}).map(e => e.innerText.slice(0, 200));
"""

# Text with less contrast than WCAG 2 asks of large text.
PALE = """
document.head.insertAdjacentHTML("beforeend", "<style>* { transition: none !important }</style>");
const numbers = color => (color.match(/[0-9.]+/g) || [0, 0, 0, 0]).map(Number);
const light = color => {
  const [r, g, b] = numbers(color).map(v => v / 255).map(
    v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = e => {
  for (; e; e = e.parentElement) {
    const color = getComputedStyle(e).backgroundColor, parts = numbers(color);
    if (parts.length < 4 || parts[3] > 0.5) return color;
  }
  return "rgb(255, 255, 255)";
};
return [...document.querySelectorAll(
  ".md-content p, .md-content li, .md-content td, .md-content th, .md-content h1, .md-content h2," +
  " .md-content a, .md-content code, .md-content span"
)].filter(e => e.innerText && e.getBoundingClientRect().width
  && !e.closest(".md-button, .headerlink")
  && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
).filter(e => {
  const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 3;
}).map(e => e.outerHTML.slice(0, 200));
"""

BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from browsing.started(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason="what builds the site is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    known = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=known, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


def test_nothing_sticks_out_of_any_page(browser, site):
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    assert len(pages) > 30
    found = {}
    for page in pages:
        browser.get(page.as_uri())
        for width in (1280, 400):
            browsing.resize(browser, width)
            beyond = browser.execute_script(BEYOND)
            beyond += browser.execute_script(SCROLLS) if width == 1280 else []
            if beyond:
                found[f"{page.relative_to(site)}, {width}"] = beyond
    assert found == {}


def test_text_is_legible_on_every_page_light_and_dark(browser, site):
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    found, shown = {}, set()
    browsing.resize(browser, 1280)
    for page in pages:
        browser.get(page.as_uri())
        for scheme in ("default", "slate"):  # what the button for light and dark sets
            browser.execute_script(f"document.body.dataset.mdColorScheme = '{scheme}'")
            if pale := browser.execute_script(PALE):
                found[f"{page.relative_to(site)}, {scheme}"] = pale
            shown.add(browser.execute_script(BACKGROUND))
    assert len(shown) == 2  # the dark pages were dark
    assert found == {}


def test_pale_text_is_noticed(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><body style='background:#111'><div class='md-content'><p>hidden</p>"
        "<p style='color:#eee'>seen</p></div>"
    )
    browser.get(page.as_uri())
    (pale,) = browser.execute_script(PALE)
    assert "hidden" in pale


def test_what_sticks_out_is_noticed(browser, tmp_path):
    page = tmp_path / "page.html"
    code = "x" * 400
    page.write_text(
        "<!doctype html><body><div style='width:2000px'>wide</div><div class='md-content'>"
        f"<pre><code style='display:block;overflow:auto'>{code}</code></pre></div>"
    )
    browser.get(page.as_uri())
    browsing.resize(browser, 1280)
    assert any("wide" in text for text in browser.execute_script(BEYOND))
    assert len(browser.execute_script(SCROLLS)) == 1
