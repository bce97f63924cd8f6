"""Is what would be published whole? Builds it, looks into it, and tries it in empty environments.

    make release-check                                  # with the oldest torch and with the newest
    make release-check ARGS='--torch newest --python python3.12'

The sdist and the wheel go to dist/. The wheel must hold the package and nothing else, the sdist
must build the same wheel, and the metadata must be valid. Then, for each torch, an environment is
made from nothing, the wheel installed as a user would, `tools/smoke.py` run far from the sources,
and pip asked whether it finds what every extra needs beside that torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

from packaging.metadata import ExceptionGroup, Metadata
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src"
KINDS = {".py", ".typed", ".cpp", ".inc", ".html", ".css"}
NEEDED = ("econv/py.typed", "econv/page.html", "econv/engines/spectral/native.cpp")
SDIST = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/econv/__init__.py", "tests")


def main() -> int:
    """0, or 1 with what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, default=ROOT / "dist", help="for sdist and wheel (dist)")
    add("--torch", nargs="*", default=["oldest", "newest"], help="oldest, newest or versions")
    add("--python", default=sys.executable, help="the interpreter of the environments (this one)")
    add("--no-extras", action="store_true", help="do not ask pip about the extras")
    options = parser.parse_args()
    sdist, wheel = build(ROOT, options.output)
    metadata = metadata_of(wheel)
    mistakes = [*wrong_in_wheel(wheel, SOURCES), *wrong_in_sdist(sdist), *wrong_metadata(metadata)]
    with tempfile.TemporaryDirectory() as folder:
        mistakes += differences(wheel, rebuilt(sdist, Path(folder)))
    for mistake in mistakes:
        print(f"wrong: {mistake}", file=sys.stderr)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; {sdist.name}")
    names = [] if options.no_extras else extras(metadata)
    failed = [
        failure for text in options.torch for failure in trial(wheel, options.python, text, names)
    ]
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return int(bool(mistakes or failed))


def build(project: Path, output: Path, *targets: str) -> list[Path]:
    """The files that hatchling makes of a project, both or those named."""
    output.mkdir(parents=True, exist_ok=True)
    made = []
    for target in targets or ("sdist", "wheel"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder]
            subprocess.run(command, cwd=project, check=True, stdout=subprocess.DEVNULL)
            (file,) = Path(folder).iterdir()
            made.append(Path(shutil.copy(file, output)))
    return made


def rebuilt(sdist: Path, folder: Path) -> Path:
    """The wheel that an sdist makes."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    (wheel,) = build(project, folder / "wheel", "wheel")
    return wheel


def wrong_in_wheel(wheel: Path, sources: Path) -> list[str]:
    """What lacks of the package, and what does not belong into it."""
    package = {
        path.relative_to(sources).as_posix()
        for path in sources.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    mistakes = [f"{wheel.name} has no {name}" for name in sorted({*package, *NEEDED} - names)]
    mistakes += [f"{wheel.name} has {name}" for name in sorted(names - package)]
    odd = (name for name in sorted(names & package) if Path(name).suffix not in KINDS)
    return mistakes + [f"{wheel.name} has {name}, which is no source" for name in odd]


def wrong_in_sdist(sdist: Path) -> list[str]:
    """What lacks of the sources."""
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    return [
        f"{sdist.name} has no {wanted}"
        for wanted in SDIST
        if not any(name == wanted or name.startswith(f"{wanted}/") for name in names)
    ]


def metadata_of(wheel: Path) -> str:
    """The text of METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def wrong_metadata(text: str) -> list[str]:
    """What an index would refuse, and what does not agree with the package."""
    try:
        known = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        return [f"metadata: {error}" for error in group.exceptions]
    package = (SOURCES / "econv" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', package, re.M)
    mistakes = []
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    if re.findall(r"^version: (.+)$", citation, re.M) != version:
        mistakes.append(f"CITATION.cff has another version than econv.__version__, {version}")
    if version != [str(known.version)]:
        mistakes.append(f"metadata: version {known.version}, but econv.__version__ is {version}")
    if known.description_content_type != "text/markdown" or not known.description:
        mistakes.append("metadata: no README in Markdown")
    if not known.requires_python:
        mistakes.append("metadata: no lower end of Python")
    core = {r.name for r in known.requires_dist or () if r.marker is None}
    if core != {"torch", "numpy"}:
        mistakes.append(f"metadata: the core needs {sorted(core)}, not torch and numpy alone")
    if not known.license_expression or not known.license_files:
        mistakes.append("metadata: no licence")
    return mistakes


def differences(wheel: Path, other: Path) -> list[str]:
    """Files that two wheels do not have alike."""
    first, second = contents(wheel), contents(other)
    names = sorted(name for name in first.keys() | second if first.get(name) != second.get(name))
    return [f"{name} differs in the wheel that the sdist makes" for name in names]


def contents(wheel: Path) -> dict[str, str]:
    """The checksum of every file."""
    with zipfile.ZipFile(wheel) as archive:
        return {n: hashlib.sha256(archive.read(n)).hexdigest() for n in archive.namelist()}


def extras(metadata: str) -> list[str]:
    """Their names."""
    return Parser().parsestr(metadata, headersonly=True).get_all("Provides-Extra", [])


def requirements(metadata: str, version: str, python: tuple[int, int]) -> list[str]:
    """What pip is told beside the wheel: ``oldest``, ``newest`` or a version of torch."""
    if version == "newest":
        return []
    if version != "oldest":
        return [f"torch=={version}"]
    pinned = []
    for text in Parser().parsestr(metadata, headersonly=True).get_all("Requires-Dist", []):
        needed = Requirement(text)
        if needed.marker is None:
            (lower,) = (part.version for part in needed.specifier if part.operator == ">=")
            if needed.name == "numpy" and python >= (3, 13):
                lower = "2.1"  # the first for this Python
            pinned.append(f"{needed.name}=={lower}.*")
    return pinned


def trial(wheel: Path, python: str, version: str, names: Sequence[str]) -> list[str]:
    """What does not work of the wheel and its extras in an empty environment with one torch."""
    ask = "import sys; print(*sys.version_info[:2])"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    major, minor = map(int, told.split())
    wanted = requirements(metadata_of(wheel), version, (major, minor))
    print(f"Python {major}.{minor}, {' '.join(wanted) or 'newest torch'}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = environment(Path(folder) / "environment", python)
        if not installs(run, str(wheel), *wanted):
            return [f"torch {version}: installing"]
        failed = [] if smoke(run, Path(folder)) else [f"torch {version}: the smoke test"]
        for name in names:
            if not installs(run, f"{wheel}[{name}]", "--dry-run"):
                failed.append(f"torch {version}: extra {name}")
        return failed


def installs(python: str, *arguments: str) -> bool:
    """Whether pip finds all that is asked for, as wheels."""
    pip = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    return clean([*pip, *arguments], tempfile.gettempdir())


def smoke(python: str, folder: Path) -> bool:
    """Whether the smoke test passes with an interpreter, in a folder far from the sources."""
    place = folder / "elsewhere"
    place.mkdir()
    shutil.copy(ROOT / "tools" / "smoke.py", place)
    return clean([python, "-I", "smoke.py"], place)


def environment(folder: Path, python: str) -> str:
    """An empty environment with pip; returns its interpreter."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")


def clean(command: Sequence[str], folder: str | Path) -> bool:
    """Whether a command succeeds without what this process's environment says of Python."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(command, cwd=folder, env=variables, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
