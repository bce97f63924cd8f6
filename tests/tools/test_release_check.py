"""What must not be published is noticed, and what the project builds is whole."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("packaging.metadata")
release_check = pytest.importorskip("release_check", reason="no tools beside the tests")

METADATA = f"""Metadata-Version: 2.4
Name: econv
Version: {__import__("econv").__version__}
License-Expression: MIT
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: numpy>=2.0
Requires-Dist: torch>=2.10
Provides-Extra: plot
Requires-Dist: matplotlib>=3.8; extra == 'plot'
Description-Content-Type: text/markdown

# econv
"""
SOURCES = [*release_check.NEEDED, "econv/__init__.py"]


@pytest.fixture
def sources(tmp_path) -> Path:
    for name in SOURCES:
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    return tmp_path / "src"


def wheel(folder: Path, names: list[str], text: str = "text") -> Path:
    path = folder / f"{text}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in [*names, "econv-0.dist-info/METADATA"]:
            archive.writestr(name, text)
    return path


def test_a_whole_wheel_is_right(tmp_path, sources):
    assert release_check.wrong_in_wheel(wheel(tmp_path, SOURCES), sources) == []


@pytest.mark.parametrize("name", SOURCES)
def test_what_lacks_is_found(tmp_path, sources, name):
    made = wheel(tmp_path, [other for other in SOURCES if other != name])
    assert release_check.wrong_in_wheel(made, sources) == [f"text.whl has no {name}"]


@pytest.mark.parametrize("name", ["tests/test_x.py", "records/0.json", "econv/__pycache__/x.pyc"])
def test_what_does_not_belong_is_found(tmp_path, sources, name):
    made = wheel(tmp_path, [*SOURCES, name])
    assert release_check.wrong_in_wheel(made, sources) == [f"text.whl has {name}"]


def test_weights_among_the_sources_are_found(tmp_path, sources):
    (sources / "econv" / "best.pt").write_text("text")
    made = wheel(tmp_path, [*SOURCES, "econv/best.pt"])
    (mistake,) = release_check.wrong_in_wheel(made, sources)
    assert mistake == "text.whl has econv/best.pt, which is no source"


def test_wheels_that_differ_are_found(tmp_path):
    one, other = wheel(tmp_path, SOURCES), wheel(tmp_path, SOURCES, "other")
    assert release_check.differences(one, one) == []
    assert len(release_check.differences(one, other)) == len(SOURCES) + 1


def test_metadata_of_a_release_are_right():
    assert release_check.wrong_metadata(METADATA) == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Version: 0", "Version: 9", "but econv.__version__ is"),
        ("Name: econv\n", "", "required field"),
        ("text/markdown", "text/plain", "no README in Markdown"),
        ("Requires-Python: >=3.10\n", "", "no lower end of Python"),
        ("Requires-Dist: torch>=2.10", "Requires-Dist: torch>=2.10\nRequires-Dist: rich", "rich"),
        ("License-Expression: MIT\n", "", "no licence"),
        ("Requires-Dist: torch>=2.10", "Requires-Dist: torch>>2", "invalid"),
    ],
)
def test_wrong_metadata_are_found(old, new, reason):
    (mistake,) = release_check.wrong_metadata(METADATA.replace(old, new))
    assert reason in mistake


def test_a_citation_of_another_version_is_found(tmp_path, monkeypatch):
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 9.9\n")
    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    (mistake,) = release_check.wrong_metadata(METADATA)
    assert "CITATION.cff has another version" in mistake


def test_the_oldest_versions_are_the_lower_ends():
    told = release_check.requirements
    assert told(METADATA, "oldest", (3, 10)) == ["numpy==2.0.*", "torch==2.10.*"]
    assert told(METADATA, "oldest", (3, 13))[0] == "numpy==2.1.*"  # 2.0 knows no Python 3.13
    assert told(METADATA, "newest", (3, 10)) == []
    assert told(METADATA, "2.12.0", (3, 10)) == ["torch==2.12.0"]
    assert release_check.extras(METADATA) == ["plot"]


@pytest.mark.slow
def test_a_smoke_test_from_the_source_tree_is_refused(tmp_path):
    smoke = Path(release_check.__file__).with_name("smoke.py")
    root = release_check.ROOT
    code = f"import sys, runpy; sys.path.insert(0, {str(root / 'src')!r}); sys.prefix = 'x'; "
    code += f"runpy.run_path({str(smoke)!r})"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode
    assert "not the installed econv" in ran.stderr


@pytest.mark.slow
def test_what_the_project_builds_is_whole(tmp_path):
    pytest.importorskip("hatchling")
    sdist, made = release_check.build(release_check.ROOT, tmp_path)
    assert release_check.wrong_in_wheel(made, release_check.SOURCES) == []
    assert release_check.wrong_in_sdist(sdist) == []
    assert release_check.wrong_metadata(release_check.metadata_of(made)) == []
    assert release_check.differences(made, release_check.rebuilt(sdist, tmp_path / "again")) == []
