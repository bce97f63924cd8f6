"""What the docstrings' own conventions become on the site.

References such as ``:class:`~econv.Group` `` become links, and examples, which stand in the text
without a heading, become blocks of code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)


class Conventions(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object, if it has one."""
        if obj.docstring:
            text = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = _ROLE.sub(lambda role: _link(role[1], role[2], obj), text)


def _link(short: str, name: str, scope: griffe.Object) -> str:
    shown = name.rpartition(".")[2] if short else name
    return f"[`{shown}`][{_full_path(name, scope)}]"


def _full_path(name: str, scope: griffe.Object) -> str:
    if name.startswith("econv."):
        return name
    first, _, rest = name.partition(".")
    if first in scope.members:  # an attribute of the class that speaks
        return f"{scope.path}.{name}"
    found = scope.resolve(first)
    return f"{found}.{rest}" if rest else found
