"""Training's progress: a line per record."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.train.drafter.shown import ShownTraining

RECORD = {"loss": 3.274, "accuracy_depth1": 0.584, "accuracy_depth2": 0.44, "tokens_per_s": 4600.4, "epoch": 0.3}
HELD_OUT_LOGS = {"eval_loss": 3.411, "eval_accuracy_depth1": 0.55, "eval_tau_depth1": 1.55, "eval_tau_depth10": 2.314}


def state(step: int = 240) -> Any:
    return SimpleNamespace(global_step=step, max_steps=788, is_world_process_zero=True, log_history=[])


def test_line_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ShownTraining()
    shown.on_train_begin(None, state(0), None)  # type: ignore[arg-type]
    for values in (RECORD, HELD_OUT_LOGS):
        shown.on_log(None, state(), None, values)  # type: ignore[arg-type]
    shown.on_log(None, state(), None, {"train_runtime": 1.0})  # type: ignore[arg-type]
    assert re.fullmatch(
        r"step 240/788  loss 3\.27  acc 58/44 %  4,600 tok/s  0 s left\n"
        r"step 240/788  held-out: loss 3\.41  acc 55 %  tau 2\.31\n",
        capsys.readouterr().out,
    )
