"""Run notebooks from top to bottom, as Jupyter would, and keep what they print and draw.

    make notebooks                                  # all of examples/notebooks
    make notebooks ARGS=examples/notebooks/classification.ipynb

It needs no Jupyter: the code cells run one after the other in a folder that is thrown away, a cell
ends with its printed text, its pictures and the value of its last line.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from econv.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"
TIGHT = {"savefig.bbox": "tight"}  # as Jupyter has it
sys.path.insert(0, str(ROOT / "examples"))

from workshop import write_picture  # noqa: E402


def main() -> None:
    """Run those named, or all, and write them back with what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        start = time.perf_counter()
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run(notebook, str(path))
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        write_atomically(path, text.encode())
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {len(text) / 1000:.0f} kB")


def run(notebook: dict[str, Any], name: str = "notebook") -> dict[str, Any]:
    """Run the code cells, put what came out behind each, and return all names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder, elsewhere(folder), plt.rc_context(TIGHT):
        for number, cell in enumerate(cells, 1):
            cell["execution_count"] = number
            cell["outputs"] = execute("".join(cell["source"]), names, f"{name}, cell {number}")
    return names


def execute(source: str, names: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Run one cell; returns its outputs in Jupyter's format."""
    body = ast.parse(source, name).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), silent_show():
        exec(compile(ast.Module(body, []), name, "exec"), names)
        value = None if last is None else eval(compile(last, name, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
    for figure in map(plt.figure, plt.get_fignums()):
        data = {"image/png": picture(figure), "text/plain": ["<Figure>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    if value is not None:
        told = {"data": {"text/plain": lines(repr(value))}, "metadata": {}}
        outputs.append({**told, "execution_count": None, "output_type": "execute_result"})
    return outputs


def picture(figure: Any) -> str:
    """PNG as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        write_picture(figure, path)
        return base64.b64encode(path.read_bytes()).decode()


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


@contextlib.contextmanager
def elsewhere(folder: str) -> Iterator[None]:
    """Work in another folder (`contextlib.chdir` came with Python 3.11)."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def silent_show() -> Iterator[None]:
    """What a cell shows is what it leaves open: without a window there is nothing else to do."""
    show, plt.show = plt.show, lambda *_, **__: None
    try:
        yield
    finally:
        plt.show = show


if __name__ == "__main__":
    main()
