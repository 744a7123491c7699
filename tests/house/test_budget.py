"""The size of the house is limited: whatever adds lines removes others.

The limits are what the house has today. They are lowered with every cut, towards 31,000 lines of the package, 23,500 of
tests and 1,750 of C++, files of 550 lines and folders of 17 entries. A failing test shows which files grew most since
the last tag, or over the last 50 commits if there is none. Without git it shows the counts alone.
"""

import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.places import PACKAGES, ROOT

from draftsmith.models.base.drafter import Drafter

MOST_FILE_LINES = 550
MOST_ENTRIES = 17  # of a folder: its folders and its files of code
MOST_DRAFTER_MEMBERS = 24  # that `Drafter` defines
COMMITS = 50
# Root folders and the suffixes of their files, by what is counted, with the most lines.
BUDGETS = {
    "package": (PACKAGES, (".py",), 34_261),
    "tests": (("tests",), (".py",), 23_723),
    "C++": (PACKAGES, (".cpp", ".h"), 1_726),
    "YAML": (("recipes",), (".yaml",), 650),  # lines that are not blank
}
FOLDERS = (*PACKAGES, "tests", "benchmarks")


def list_files(folders: Iterable[str], suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Return the source files below root folders whose names end with one of the suffixes."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*"))
    return sorted(
        file for file in files if file.is_file() and file.name.endswith(suffixes) and "__pycache__" not in file.parts
    )


def list_entries(folder: Path) -> list[str]:
    """Return the names of a folder's folders and files of code."""
    entries = (each for each in folder.iterdir() if each.is_dir() or each.suffix in (".py", ".cpp", ".h"))
    return [each.name for each in entries if each.name != "__pycache__"]


def count_lines(file: Path) -> int:
    lines = file.read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) for line in lines) if file.suffix == ".yaml" else len(lines)


def git(*words: str) -> str:
    """Return what a git command prints; nothing if git or the history is missing."""
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip()


def describe_growth(folders: Iterable[str], suffixes: tuple[str, ...]) -> str:
    """Return the files that grew most, as one sentence, or an empty text without git."""
    start = git("describe", "--tags", "--abbrev=0") or git("rev-list", "HEAD", f"--max-count={COMMITS}").split("\n")[-1]
    growth = Counter[str]()
    patterns = [f"{folder}/*{suffix}" for folder in folders for suffix in suffixes]
    for line in git("diff", "--numstat", "-M", start, "--", *patterns).splitlines() if start else ():
        added, removed, name = line.split("\t")
        growth[name] = int(added) - int(removed)
    grown = [f"{name} by {lines}" for name, lines in growth.most_common(5) if lines > 0]
    return f"; since {start[:12]} grew most: {', '.join(grown)}" if grown else ""


@pytest.mark.parametrize("what", BUDGETS)
def test_lines(what: str) -> None:
    folders, suffixes, most = BUDGETS[what]
    count = sum(map(count_lines, list_files(folders, suffixes)))
    assert count <= most, f"{what}: {count} lines, at most {most}{describe_growth(folders, suffixes)}"


def test_files_are_short() -> None:
    counts = {file.relative_to(ROOT).as_posix(): count_lines(file) for file in list_files(FOLDERS, (".py",))}
    assert {name: count for name, count in counts.items() if count > MOST_FILE_LINES} == {}


def test_folders_have_few_entries() -> None:
    folders = {file.parent for file in list_files(FOLDERS)} - {ROOT / "tests" / "support"}
    wrong = {folder.relative_to(ROOT).as_posix(): len(list_entries(folder)) for folder in folders}
    assert {name: count for name, count in wrong.items() if count > MOST_ENTRIES} == {}


def test_drafter_has_few_members() -> None:
    members = [name for name in vars(Drafter) if not name.startswith("__") or name == "__init__"]
    assert len(members) <= MOST_DRAFTER_MEMBERS, members
