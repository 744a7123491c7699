"""Each folder says what is in it; the packages are those of the tree."""

import re
from pathlib import Path

import pytest
from support.places import PACKAGES, ROOT

FILES = [file for name in (*PACKAGES, "benchmarks") for file in (ROOT / name).rglob("*.py")]
FOLDERS = sorted({file.parent for file in FILES} - {ROOT / "benchmarks"})
NAMES = [folder.relative_to(ROOT).as_posix() for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_a_folder_says_what_is_in_it(folder: Path) -> None:
    """And in which order to read it: two sentences at least."""
    docstring = re.match(r'"""(.*?)"""', (folder / "__init__.py").read_text(encoding="utf-8"), re.DOTALL)
    assert docstring
    assert len(re.findall(r"[.!?](?=\s|$)", docstring[1])) >= 2


def test_every_folder_is_a_package_of_pyproject() -> None:
    """A folder that is not listed is silently absent from the wheel."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    in_wheel = [name for name in NAMES if not name.startswith("benchmarks/")]
    assert sorted(setuptools["packages"]) == sorted("draftsmith." + name.replace("/", ".") for name in in_wheel)
