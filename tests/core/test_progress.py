"""Progress: a bar on a terminal, the same now and then in a file, nothing where it is to be quiet."""

import os
import subprocess
import sys

import pytest

from draftsmith import progress
from draftsmith.progress import IN_A_FILE, configure_progress_bars, progress_bar

# Three thousand updates within a second or so.
BAR = (
    "from draftsmith.progress import configure_progress_bars, progress_bar\n"
    "with configure_progress_bars(), progress_bar(3000, 'distil', 'conv') as bar:\n"
    "    from tqdm import tqdm\n"
    "    for _ in tqdm(range(3000), file=open('/dev/null', 'w')): bar.update()\n"
)


def test_log_file_has_first_and_last_line() -> None:
    result = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, check=True)
    assert result.stdout == ""
    shown = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(shown) == 2
    assert "3000/3000" in shown[1]


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with configure_progress_bars(quiet=True), progress_bar(2, "distil", "conv") as bar:
        bar.update(2)
    with configure_progress_bars(), progress_bar(2, "distil", "conv", shown=False) as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "")


def test_environment_disables_libraries_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_MININTERVAL", "7")
    with configure_progress_bars():
        assert {name: os.environ[name] for name in IN_A_FILE} == IN_A_FILE
    assert os.environ["TQDM_MININTERVAL"] == "7"
    assert "HF_DATASETS_DISABLE_PROGRESS_BARS" not in os.environ
    assert not progress.is_quiet()
