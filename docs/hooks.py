"""Equations become MathML, which browsers draw themselves; names in tables break at their marks.

An equation is TeX between ``$$`` or in ``$`…`$``.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_DISPLAY = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"\$`([^`\n]+)`\$")
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_TAG = re.compile(r"(<[^>]*>)")
_LONG = re.compile(r"\S{16,}")
_MARK = re.compile(r"(?<=[/_.=,(])(?=\S)")
_FIGURE = re.compile(r"\b\d[\d.]*e-\d+")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace equations, but not in blocks of code."""
    parts = _FENCE.split(markdown)
    parts[::2] = [_with_equations(part) for part in parts[::2]]
    return "".join(parts)


def _with_equations(text: str) -> str:
    text = _DISPLAY.sub(lambda found: f"\n{convert(found[1], display='block')}\n", text)
    return _INLINE.sub(lambda found: convert(found[1]), text)


def on_page_content(html: str, **_: Any) -> str:
    """In a table a long name breaks at its marks, on a narrow screen, and a figure nowhere."""
    return _CELL.sub(lambda cell: "".join(map(_breaking, _TAG.split(cell[0]))), html)


def _breaking(text: str) -> str:
    if text.startswith("<"):
        return text
    text = _LONG.sub(lambda word: _MARK.sub("<wbr>", word[0]), text)
    return _FIGURE.sub(r'<span class="figure">\g<0></span>', text)
