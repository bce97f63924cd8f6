"""Equations become MathML, which browsers draw themselves; code in tables may break at its marks.

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
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_MARK = re.compile(r"(?<=[/_.=,(])(?=[^\s])")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace equations, but not in blocks of code."""
    parts = _FENCE.split(markdown)
    parts[::2] = [_with_equations(part) for part in parts[::2]]
    return "".join(parts)


def _with_equations(text: str) -> str:
    text = _DISPLAY.sub(lambda found: f"\n{convert(found[1], display='block')}\n", text)
    return _INLINE.sub(lambda found: convert(found[1]), text)


def on_page_content(html: str, **_: Any) -> str:
    """On a narrow screen the name of a file breaks behind a slash, not in the middle of a word."""
    return _CELL.sub(
        lambda cell: _CODE.sub(lambda code: _MARK.sub("<wbr>", code[0]), cell[0]), html
    )
