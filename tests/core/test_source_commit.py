"""The commit recorded with every result: the hash of the source tree, or none."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.places import ROOT

from draftsmith import provenance


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one commit, with a file that is not draftsmith's."""
    (tmp_path / "theirs.py").write_text("")
    for words in (["init", "-q"], ["add", "theirs.py"], ["commit", "-q", "-m", "theirs"]):
        git(tmp_path, *words)
    return tmp_path


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def install_into(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = repository / ".venv" / "core" / "provenance.py"
    copy.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / "core" / "provenance.py", copy)
    monkeypatch.setattr(provenance, "__file__", str(copy))
    return copy


def test_tag_does_not_replace_the_hash(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = install_into(repository, monkeypatch)
    git(repository, "add", str(copy))
    git(repository, "commit", "-q", "-m", "ours")
    git(repository, "tag", "-a", "v1.0.0", "-m", "v1.0.0")
    commit = git(repository, "rev-parse", "HEAD")
    assert provenance.source_commit() == commit
    copy.write_text(copy.read_text() + "\n")
    assert provenance.source_commit() == f"{commit}-dirty"
