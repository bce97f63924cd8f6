"""The picture of the rooms, from the import contracts: `python docs/house.py` writes it.

The first contract of pyproject.toml lists the rooms of the package from the top down, and
import-linter holds the code to it. What stands beside a room is the first line of its module.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "house.svg"

WIDTH, LINE, GAP, ROOM, LONGEST = 860, 27, 7, 126, 98
INK, SOFT, EDGE = "#1f2430", "#4a5160", "#8a93a6"

# Where a floor begins, and its colour.
FLOORS = {
    "cli": ("evidence", "#fdf1dc"),
    "page": ("instruments", "#e3f2e1"),
    "timm": ("networks", "#dcebf7"),
    "engines": ("engines", "#e9e2f5"),
    "reference": ("exact mathematics", "#f7e3e3"),
    "arrays": ("files and progress", "#eceff3"),
}


def layers() -> list[list[str]]:
    """The rooms of each layer, from the top down."""
    import tomllib  # Python 3.11

    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    house = config["tool"]["importlinter"]["contracts"][0]
    return [re.findall(r"econv\.(\w+)", layer) for layer in house["layers"]]


def first_line(room: str) -> str:
    """What a room says of itself."""
    folder = ROOT / "src" / "econv" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = " ".join(text.split("\n\n")[0].split()).replace("`", "")
    if len(line) > LONGEST:
        line = re.split(r"(?<=[.:;])\s", line)[0].rstrip(":;")
    if len(line) > LONGEST:
        line = line[: LONGEST - 2].rsplit(" ", 1)[0] + " …"
    return line


def picture(found: list[list[str]]) -> str:
    """The house as SVG."""
    rows, y, colour = [], 10, "#ffffff"
    for layer in found:
        for room in layer:
            if room in FLOORS:
                name, colour = FLOORS[room]
                y += GAP
                rows.append(
                    f'<text x="{WIDTH - 12}" y="{y + 18}" text-anchor="end" font-weight="bold" '
                    f'fill="{SOFT}">{name}</text>'
                )
        top = y
        for room in layer:
            rows.append(f'<text x="26" y="{y + 18}" class="room">{room}</text>')
            text = html.escape(first_line(room), quote=False)
            rows.append(f'<text x="{ROOM + 26}" y="{y + 18}" class="told">{text}</text>')
            y += LINE - 3
        box = f'<rect x="14" y="{top}" width="{ROOM}" height="{y - top}" rx="4" fill="{colour}"/>'
        rows.insert(0, box)
        y += GAP
    style = (
        f"text{{font:12.5px system-ui,sans-serif;fill:{SOFT}}}"
        f".room{{font-weight:600;fill:{INK}}}rect{{stroke:{EDGE}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 4}" role="img" '
        f'aria-label="The modules of econv, from the top down">\n<style>{style}</style>\n'
        f'<rect width="{WIDTH}" height="{y + 4}" fill="#ffffff" stroke="none"/>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    text = picture(layers())
    if "--check" not in sys.argv:
        PICTURE.write_text(text, encoding="utf-8")
    elif PICTURE.read_text(encoding="utf-8") != text:
        sys.exit("docs/pictures/house.svg is not what the contracts say: python docs/house.py")
