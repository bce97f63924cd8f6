"""What the docstrings' own conventions become on the site.

References such as ``:class:`~econv.Group` `` become links, examples, which stand in the text
without a heading, become blocks of code, and Ψ[r](x) stays what it is, which Markdown would take
for a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)
_CODE = re.compile(r"(```.*?```|``.*?``|`[^`]*`)", re.DOTALL)


class Conventions(griffe.Extension):
    """Rewrites the docstrings of a package once all of it is known."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite every docstring of the package."""
        for found in _objects(pkg):
            if found.docstring:
                found.docstring.value = _rewritten(found.docstring.value, found)


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):  # and no alias of one that comes elsewhere
            yield from _objects(member)


def _rewritten(text: str, scope: griffe.Object) -> str:
    text = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
    # Roles go first: their names stand between backticks, as code does.
    parts = _CODE.split(_ROLE.sub(lambda role: f"\0{role[1]}{role[2]}\0", text))
    parts[::2] = [part.replace("](", "]\\(") for part in parts[::2]]
    return re.sub(r"\0(~?)([\w.]+)\0", lambda role: _link(role[1], role[2], scope), "".join(parts))


def _link(short: str, name: str, scope: griffe.Object) -> str:
    shown = name.rpartition(".")[2] if short else name
    path = _full_path(name, scope)
    try:
        target = scope.modules_collection[path]
    except KeyError:
        return f"[`{shown}`][{path}]"  # it leads nowhere, and stops the build
    if target.is_module and target.name in target.members:  # a function that hides its module
        target = target.members[target.name]
    return f"[`{shown}`][{target.canonical_path}]" if target.has_docstring else f"`{shown}`"


def _full_path(name: str, scope: griffe.Object) -> str:
    if name.startswith("econv."):
        return name
    first, _, rest = name.partition(".")
    if first in scope.members:  # an attribute of the class that speaks
        return f"{scope.path}.{name}"
    found = scope.resolve(first)
    return f"{found}.{rest}" if rest else found
