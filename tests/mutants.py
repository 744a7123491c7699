"""Mistakes that the fast tests must catch: each is made in a copy of the tree, where the named tests must fail.

    python tests/mutants.py            # `make mutants`: all of them
    python tests/mutants.py residual   # those whose name holds a word

A mistake replaces one line, which must be in its file exactly once: a moved or rewritten line is reported, not skipped.
The tests are first run on the unchanged copy, where they must pass. Tests marked `slow` or `nightly` do not count.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.places import make_importable

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
PYTEST = (*("-q", "-x", "-p", "no:cacheprovider", "--no-header"), "-m", "not slow and not nightly and not cuda")
FAILED_TESTS = 1  # pytest's exit code


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old` in `file` becomes `new`, and one of `tests` (files, or arguments of pytest) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [Mutant(**each) for each in tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]]


def copied_tree(folder: Path) -> Path:
    """The files that are in git, or would be, and the link by which `draftsmith` is imported from there."""
    listing = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    make_importable(folder)
    return folder


def run_tests(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """pytest in a copy, which its imports are taken from."""
    environment = os.environ | {"PYTHONPATH": str(folder / ".typing"), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # a copy's files change within a second
    command = [sys.executable, "-m", "pytest", *PYTEST, *tests.split()]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def unknown_places(mutants: Sequence[Mutant]) -> list[str]:
    """List what does not fit the tree: lines that do not occur exactly once, tests that no longer exist."""
    wrong = []
    for each in mutants:
        file = ROOT / each.file
        found = file.read_text(encoding="utf-8").count(each.old) if file.is_file() else 0
        if found != 1:
            wrong.append(f"{each.name}: found {found} times in {each.file}: {each.old}")
        paths = [word for word in each.tests.split() if word.startswith("tests/")]
        wrong += [f"{each.name}: no {path}" for path in paths if not (ROOT / path).exists()]
    return wrong


def verdict(mutant: Mutant, folder: Path) -> str:
    """`caught`, with the test that did, or what happened instead."""
    began = time.monotonic()
    before = run_tests(folder, mutant.tests)
    if before.returncode:
        return f"UNKNOWN, as the tests fail without it: {before.stdout[-600:]}"
    file = folder / mutant.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    result = run_tests(folder, mutant.tests)
    file.write_text(whole, encoding="utf-8")
    if result.returncode == FAILED_TESTS:
        by = next((line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        return f"caught by {by.split(' - ')[0].removeprefix('FAILED ')} ({time.monotonic() - began:.0f} s)"
    return "NOT CAUGHT" if result.returncode == 0 else f"UNKNOWN: {result.stdout[-600:]}"


def main() -> int:
    words = sys.argv[1:]
    mutants = [each for each in MUTANTS if not words or any(word in each.name for word in words)]
    wrong = unknown_places(mutants)
    if wrong:
        print("The table no longer fits the code:", *wrong, sep="\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        copy, caught = copied_tree(Path(folder)), 0
        for each in mutants:
            found = verdict(each, copy)
            print(f"{each.name}: {found}", flush=True)
            caught += found.startswith("caught")
    print(f"{caught} of {len(mutants)} caught")
    return int(caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
