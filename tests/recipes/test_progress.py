"""Progress: a bar on a terminal, whole lines now and then in a file."""

import os
import subprocess
import sys

import pytest
from support.terminal import in_terminal

from draftsmith.recipes import progress
from draftsmith.recipes.progress import LIBRARIES_BARS, ProgressLines, bars_where_they_can_be, progress_bar

BAR = (
    "from draftsmith.recipes.progress import progress_bar\n"
    "with progress_bar(3, 'distil', 'conv') as bar:\n"
    "    for _ in range(3): bar.update()\n"
)


def test_a_line_every_half_minute_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """3000 conversations at 25 a second take two minutes; the other 1000 were there before."""
    now = 0.0
    with ProgressLines(4000, "distil", "conv", initial=1000, clock=lambda: now) as bar:
        for _ in range(120):
            now += 1.0
            bar.update(25)
            bar.set_postfix({"tokens/s": 1200, "failed": 0}, refresh=False)
    assert capsys.readouterr().err.splitlines() == [
        "distil: 1750/4000 (44 %), 00:30 gone, 01:30 to go, 25.00conv/s, tokens/s 1200, failed 0",
        "distil: 2500/4000 (62 %), 01:00 gone, 01:00 to go, 25.00conv/s, tokens/s 1200, failed 0",
        "distil: 3250/4000 (81 %), 01:30 gone, 00:30 to go, 25.00conv/s, tokens/s 1200, failed 0",
        "distil: 4000/4000 (100 %), 02:00 gone, 00:00 to go, 25.00conv/s, tokens/s 1200, failed 0",
    ]
    with ProgressLines(4, "distil", "conv", clock=lambda: now) as bar:
        bar.update(3)
    assert capsys.readouterr().err.splitlines() == ["distil: 3/4 (75 %), 00:00 gone, ? to go, ?conv/s"]


def test_a_file_gets_no_carriage_returns() -> None:
    result = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, check=True)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("distil: 3/3 (100 %)")
    assert "\r" not in result.stderr
    assert "\x1b" not in result.stderr


def test_a_terminal_gets_a_bar() -> None:
    shown = in_terminal([sys.executable, "-c", BAR])
    assert b"\r" in shown
    assert b"3/3" in shown


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with bars_where_they_can_be(quiet=True), progress_bar(2, "distil", "conv") as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "")
    with bars_where_they_can_be(), progress_bar(2, "distil", "conv", shown=False) as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "")


def test_libraries_draw_no_bars_into_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "0")
    with bars_where_they_can_be():
        assert {name: os.environ[name] for name in LIBRARIES_BARS} == LIBRARIES_BARS
    assert os.environ["TQDM_DISABLE"] == "0"
    assert "HF_DATASETS_DISABLE_PROGRESS_BARS" not in os.environ
    assert not progress.is_quiet()
