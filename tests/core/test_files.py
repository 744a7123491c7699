"""Folders of a run are written whole: an interruption at any time leaves the old one or the new one."""

from __future__ import annotations

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
