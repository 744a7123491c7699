"""Training's progress: a line per record, above a bar on a terminal."""

import re
import sys
from pathlib import Path

import pytest
from support.tiny_runs import tiny_run

from draftsmith.train.drafter.shown import line_of, span
from draftsmith.train.drafter.stage import train_drafter

RECORD = {"loss": 3.274, "accuracy_depth1": 0.584, "accuracy_depth2": 0.44, "tokens_per_s": 4600.4, "epoch": 0.3}
HELD_OUT_LOGS = {"eval_loss": 3.411, "eval_accuracy_depth1": 0.55, "eval_tau_depth1": 1.55, "eval_tau_depth10": 2.314}


def test_line_of_a_record() -> None:
    assert line_of(RECORD, 725.0) == "loss 3.27  acc 58/44 %  4,600 tok/s  12 min left"
    assert line_of(HELD_OUT_LOGS, 725.0) == "held-out: loss 3.41  acc 55 %  tau 2.31"  # for the deepest chain
    assert [span(seconds) for seconds in (4, 89, 90, 5340, 12_000)] == ["4 s", "89 s", "2 min", "89 min", "3 h 20 min"]


@pytest.mark.parametrize("on_terminal", [False, True])
def test_records_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_terminal: bool
) -> None:
    """Two of three steps and the end are logged, without the Trainer's dictionaries; on a terminal with a bar."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    recipe = tiny_run(tmp_path, train={"max_steps": 3, "logging_steps": 2, "disable_tqdm": False})
    train_drafter(recipe)
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith("step ")]
    form = r"step {}/3  loss \d+\.\d\d  acc [\d/]+ %  [\d,]+ tok/s  \d+ s left"
    assert [bool(re.fullmatch(form.format(step), line)) for step, line in zip((2, 3), lines, strict=True)] == [True] * 2
    assert ("training: 100%" in printed.err) == on_terminal
