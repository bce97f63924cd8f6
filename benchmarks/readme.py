"""Write the tables of the README from the results that the benchmarks left, or check them.

python benchmarks/readme.py           rewrite what stands between the markers
python benchmarks/readme.py --check   exit with 1 if the README says anything else
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"

# Rows of the table, as the benchmark calls them and as a reader should.
ROWS = {
    "escnn R2Conv 5×5": "escnn R2Conv, 5×5",
    "central 5×5": "econv, the paper's central differences, 5×5",
    "isotropic 5×5": "**econv, isotropic stencils, 5×5 (default)**",
    "isotropic 7×7": "econv, isotropic stencils, 7×7",
}


def equivariance_table() -> str:
    found = json.loads((RESULTS / "equivariance.json").read_text(encoding="utf-8"))
    smoothness = found["settings"]["smoothness"]
    lines = [
        "| smoothness of the image, pixels | " + " | ".join(f"{s:g}" for s in smoothness) + " |",
        "|---|" + "---|" * len(smoothness),
    ]
    for name, text in ROWS.items():
        errors = found["one_layer"]["errors"][name]
        lines.append(f"| {text} | " + " | ".join(f"{error:.2g}" for error in errors) + " |")
    fields = found["one_layer"]["fields"]
    lines.append("")
    lines.append(
        f"({fields}→{fields} fields of 8 orientations, one run; `benchmarks/equivariance.py`.)"
    )
    return "\n".join(lines)


TABLES = {"equivariance": equivariance_table}


def with_tables(text: str) -> str:
    """The README with every table between its markers made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        content = table().replace("\\", r"\\")
        text, count = re.subn(pattern, rf"\g<1>{content}\n\g<2>", text, flags=re.S)
        if count != 1:
            raise SystemExit(f"expected the markers of table {name!r} once; found {count}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    wanted = with_tables(text)
    if options.check:
        sys.exit("README.md: a table differs from benchmarks/results" if wanted != text else 0)
    temporary = README.with_suffix(".tmp")
    temporary.write_text(wanted, encoding="utf-8")
    os.replace(temporary, README)


if __name__ == "__main__":
    main()
