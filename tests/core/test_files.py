"""Folders of a run are written whole: an interruption at any time leaves the old one or the new one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from draftsmith.files import written_whole


@pytest.mark.parametrize(("stopped_at", "left"), [(1, "old"), (2, "old"), (None, "new")])
def test_an_interrupted_write_leaves_the_old_folder(
    stopped_at: int | None, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls, rename = tmp_path / "drafter", list[Path](), Path.rename

    def stopped_rename(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == stopped_at:
            raise KeyboardInterrupt
        return rename(path, target)

    folder.mkdir()
    (folder / "weights").write_text("old")
    monkeypatch.setattr(Path, "rename", stopped_rename)
    try:
        with written_whole(folder) as partial:
            (partial / "weights").write_text("new")
    except KeyboardInterrupt:
        assert stopped_at is not None
    assert (folder / "weights").read_text() == left
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(("killed_at", "left"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_killed_write_is_cleaned_up_by_the_next(killed_at: int, left: str, tmp_path: Path) -> None:
    """Whatever its process id, while folders of living processes stay."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "weights").write_text("old")
    with written_whole(folder) as living:
        (living / "weights").write_text("living")
        process = multiprocessing.get_context("fork").Process(target=write_and_die, args=(folder, killed_at))
        process.start()
        process.join(20)
        assert process.exitcode == -signal.SIGKILL
        stopped = written_whole(folder)
        stopped.__enter__()
        assert (folder / "weights").read_text() == left
        stopped.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert (living / "weights").read_text() == "living"
        assert len(list(tmp_path.iterdir())) == 2  # all else is cleaned up
    assert [file.name for file in tmp_path.iterdir()] == ["drafter"]
    assert (folder / "weights").read_text() == "living"


def write_and_die(folder: Path, killed_at: int) -> None:
    """Write the folder; kill this process, by SIGKILL, before its first rename, between both, or after them."""
    rename, renames = Path.rename, [0]

    def killed_rename(path: Path, target: Path) -> Path:
        if renames[0] == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        renames[0] += 1
        renamed = rename(path, target)
        if renames[0] == killed_at == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed

    Path.rename = killed_rename  # type: ignore[method-assign, assignment]
    with written_whole(folder) as partial:
        (partial / "weights").write_text("new")
