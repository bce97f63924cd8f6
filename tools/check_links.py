"""Do the links between pages lead somewhere? Files and headings, in all Markdown of the project.

    python tools/check_links.py              # part of `make lint`
    python tools/check_links.py --external   # the addresses elsewhere, which nobody visits here

Names of the code, ``[text][econv.layers]``, are the business of `make docs`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("*.md", "docs/**/*.md", "examples/**/*.md", ".github/**/*.md")

CODE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$|<!--.*?-->|\$\$.*?\$\$|`+[^`\n]+`+", re.M | re.S)
LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:href|src)=\"([^\"]+)\"|^\[[^\]]+\]: (\S+)", re.M
)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*$", re.M)
NAMED = re.compile(r"(?:\{[^}\n]*#|id=\"|name=\")([\w.-]+)")
OUTSIDE = re.compile(r"(?:[a-z][a-z0-9+.-]*:|//)", re.I)


class Link(NamedTuple):
    page: Path
    line: int
    target: str


def links(page: Path) -> Iterator[Link]:
    """Every link of a page, but for those in code and comments."""
    text = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), page.read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        target = found[1] or found[2] or found[3]
        yield Link(page, text.count("\n", 0, found.start()) + 1, target)


def anchors(page: Path) -> set[str]:
    """What may stand behind ``#``: headings, as sites and as GitHub write them, and names."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^( *)(```|~~~).*?^\1\2[ \t]*$", "", text, flags=re.M | re.S)
    found, seen = set(NAMED.findall(prose)), dict[str, int]()
    for heading in HEADING.findall(prose):
        words = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", heading)
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\{[^}]*\}", "", words)).strip().lower()
        for slug in {re.sub(r"[-\s]+", "-", plain), re.sub(r"\s", "-", plain)}:
            count = seen[slug] = seen.get(slug, -1) + 1
            found |= {slug} if not count else {f"{slug}-{count}", f"{slug}_{count}"}
    return found


def wrong(link: Link) -> str | None:
    """Why a link leads nowhere, or nothing."""
    path, _, anchor = unquote(link.target).partition("#")
    target = (link.page.parent / path).resolve() if path else link.page
    if path.startswith("/") or not target.exists():
        return f"no such file: {path}"
    if not target.is_relative_to(ROOT) and link.page.is_relative_to(ROOT):
        return f"outside of the project: {path}"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        modules = re.findall(r"^::: ([\w.]+)$", target.read_text(encoding="utf-8"), re.M)
        if not any(anchor == name or anchor.startswith(f"{name}.") for name in modules):
            return f"no such heading: #{anchor}"
    return None


def main() -> int:
    """0, or 1 with the links that lead nowhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--external", action="store_true", help="list the addresses elsewhere")
    options = parser.parse_args()
    pages = sorted({page for place in PLACES for page in ROOT.glob(place)})
    found = [link for page in pages for link in links(page)]
    outside = [link for link in found if OUTSIDE.match(link.target)]
    if options.external:
        print("\n".join(sorted({link.target for link in outside})))
        return 0
    inside = [link for link in found if not OUTSIDE.match(link.target)]
    mistakes = [(link, reason) for link in inside if (reason := wrong(link))]
    for link, reason in mistakes:
        print(f"{link.page.relative_to(ROOT)}:{link.line}: {reason}", file=sys.stderr)
    print(f"{len(inside)} links between {len(pages)} pages, {len(outside)} elsewhere")
    return int(bool(mistakes))


if __name__ == "__main__":
    sys.exit(main())
