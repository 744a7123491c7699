"""Progress: a bar on a terminal, occasional lines in a file, nothing with --quiet."""

import re
import subprocess
import sys

import pytest

from draftsmith.progress import configure_progress_bars, progress_bar

# Three thousand updates of two nested bars, 20 ms apart by a fake clock.
BARS = (
    "import sys, tqdm.std\n"
    "from draftsmith.progress import configure_progress_bars, progress_bar\n"
    "number = 0\n"
    "tqdm.std.time = lambda: number / 50\n"
    "with configure_progress_bars(), progress_bar(3000, 'distil /a/b/c.json by x', 'conv') as bar:\n"
    "    with progress_bar(3000, 'inner', 'step') as inner:\n"
    "        for number in range(3000):\n"
    "            bar.update(); inner.update()\n"
    "            if number == 2000: print('in between', file=sys.stderr)\n"
)


def test_log_file_gets_a_whole_line_every_half_minute() -> None:
    """In 60 s each bar writes at least one line, and one more when it ends."""
    result = subprocess.run([sys.executable, "-c", BARS], capture_output=True, check=True)
    assert result.stdout == b""
    assert not re.search(rb"[\r\x1b]|\n\n", result.stderr)
    *lines, last = result.stderr.decode().splitlines()
    assert last.startswith("distil c.json by x: 3000 of 3000 conv, ")
    assert "in between" in lines
    assert [line.partition(":")[0] for line in lines if "left" in line].count("inner") in (2, 3)
    assert all(
        re.fullmatch(r"(inner|distil c.json by x): \d+ of 3000 \w+, \S+, \S+ left|in between", line) for line in lines
    )


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with configure_progress_bars(quiet=True), progress_bar(2, "distil", "conv") as bar:
        bar.update(2)
    with configure_progress_bars(), progress_bar(2, "distil", "conv", shown=False) as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "")
