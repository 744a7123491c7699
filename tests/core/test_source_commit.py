"""The commit recorded with every result: the hash of the source tree, or none."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.places import ROOT

from draftsmith import provenance


def test_tag_does_not_replace_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    copy = tmp_path / "core" / "provenance.py"
    copy.parent.mkdir()
    shutil.copyfile(ROOT / "core" / "provenance.py", copy)
    monkeypatch.setattr(provenance, "__file__", str(copy))
    git("init", "-q")
    assert provenance.source_commit() is None  # a file that is not in the repository
    git("add", str(copy))
    git("commit", "-q", "-m", "ours")
    git("tag", "-a", "v1.0.0", "-m", "v1.0.0")
    commit = git("rev-parse", "HEAD")
    assert provenance.source_commit() == commit
    copy.write_text(copy.read_text() + "\n")
    assert provenance.source_commit() == f"{commit}-dirty"
