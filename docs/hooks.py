"""Equations: TeX between ``$$`` or in ``$`…`$`` becomes MathML, which browsers draw themselves."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_DISPLAY = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"\$`([^`\n]+)`\$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace equations, but not in blocks of code."""
    parts = _FENCE.split(markdown)
    parts[::2] = [_with_equations(part) for part in parts[::2]]
    return "".join(parts)


def _with_equations(text: str) -> str:
    text = _DISPLAY.sub(lambda found: f"\n{convert(found[1], display='block')}\n", text)
    return _INLINE.sub(lambda found: convert(found[1]), text)
