"""Two `draftsmith distill` on one run folder, as on two GPUs or nodes: they share the work, and one may be killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.data.distill.ledger_view import LedgerView
from draftsmith.data.sources.questions import questions_file
from draftsmith.recipes.errors import UserError

CONVERSATIONS = 24


def start(runs: Path) -> Any:
    # Questions of a file: building conversations from the standard library takes longer than answering these.
    keys = [
        f"runs_dir={runs}", f"data.conversations.source={questions_file('embedded')}",
        "data.conversations.decontaminate=[]", f"data.conversations.limit={CONVERSATIONS}",
        "data.distill.max_new_tokens=32", "data.distill.options.batch_size=2",
    ]  # fmt: skip
    command = [sys.executable, "-m", "draftsmith.eval.commands.cli", "distill", "quickstart", *keys]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)


def settled(data: Path) -> int:
    try:
        counts = LedgerView(data).counts()
    except UserError:  # not begun
        return 0
    return sum(counts[state].total() for state in ("done", "truncated", "failed") if state in counts)


@pytest.mark.slow
def test_both_work_and_one_is_killed(tmp_path: Path) -> None:
    data = tmp_path / "runs" / "quickstart" / "data"
    first, second = start(tmp_path / "runs"), start(tmp_path / "runs")
    while settled(data) < 4:
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()  # a process that nobody has waited for still looks alive, until its heartbeat is missed
    assert second.wait(timeout=300) == 0
    view = LedgerView(data)
    assert settled(data) == CONVERSATIONS
    lines = [line for file in (data / "shards").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) == len(view)
    assert len(datasets.load_from_disk(str(data / "tokens"))) == len(view)
    # A run in one piece says the same.
    assert start(tmp_path / "whole").wait(timeout=300) == 0
    assert list(view.records()) == list(LedgerView(tmp_path / "whole" / "quickstart" / "data").records())


@pytest.mark.slow
def test_both_to_the_end(tmp_path: Path) -> None:
    both = [start(tmp_path / "runs") for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    data = tmp_path / "runs" / "quickstart" / "data"
    assert settled(data) == CONVERSATIONS
    assert LedgerView(data).attempts() == {1: CONVERSATIONS}
