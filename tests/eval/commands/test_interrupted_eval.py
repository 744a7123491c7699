"""SIGTERM and Ctrl-C end a measurement with one sentence; it resumes where it stopped, with equal answers."""

import os
import signal
from typing import Any

import pytest
from support.finished_run import FinishedRun

from draftsmith.errors import INTERRUPTED
from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.decoding.session import TargetSession


def read_answers(run: FinishedRun) -> dict[tuple[int, Any], Any]:
    """Return the token ids of every answer by question and method."""
    return {
        (record.run, record.question_id, name): [turn.ids for turn in answer.turns]
        for record in RecordLog(run.root / "eval" / "records.jsonl")
        for name, answer in record.answers.items()
    }


@pytest.mark.parametrize(
    ("where", "number", "code"),
    [
        ("later forward", signal.SIGINT, 130),
        ("after a record", signal.SIGTERM, 143),
    ],
)
def test_interrupted_measurement_resumes(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, where: str, number: signal.Signals, code: int
) -> None:
    whole = read_answers(finished)
    for file in sorted((finished.root / "eval").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    calls = 0

    def interrupting(method: Any, at: int, is_before: bool) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if is_before and calls == at:
                os.kill(os.getpid(), number)
            result = method(*arguments, **options)
            if not is_before and calls == at:
                os.kill(os.getpid(), number)
            return result

        return called

    with monkeypatch.context() as patch:
        if where == "later forward":
            forward = interrupting(TargetSession.forward_trees, 15, is_before=True)
            patch.setattr(TargetSession, "forward_trees", forward)
        else:
            patch.setattr(RecordLog, "append", interrupting(RecordLog.append, 1, is_before=False))
        stopped = finished.call("eval")
    assert (stopped.exit_code, stopped.stderr.splitlines()[-1]) == (code, INTERRUPTED)
    kept = read_answers(finished)
    assert kept.items() <= whole.items()
    assert bool(kept) == (where == "after a record")
    finished.done("eval")
    assert read_answers(finished) == whole
