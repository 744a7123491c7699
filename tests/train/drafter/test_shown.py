"""Training's progress: a line per record in a log file, a panel on a terminal."""

import io
import re
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from draftsmith.train.drafter.shown import ShownTraining

RECORD = {"loss": "3.274", "accuracy_depth1": "0.584", "accuracy_depth2": "0.44", "tokens_per_s": 4600.4, "epoch": 0.3}
HELD_OUT_LOGS = {"eval_loss": 3.411, "eval_accuracy_depth1": 0.55, "eval_tau_depth1": 1.55, "eval_tau_depth10": 2.314}


def state(step: int = 240) -> Any:
    return SimpleNamespace(global_step=step, max_steps=788, is_world_process_zero=True, log_history=[])


def logs(values: dict[str, Any]) -> Any:
    return {key: float(value) for key, value in values.items()}


def test_terminal_shows_a_panel() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    shown = ShownTraining(terminal)
    shown.on_train_begin(None, state(0), None)  # type: ignore[arg-type]
    for step, loss in ((100, 6.0), (200, 4.0), (240, 3.27)):
        shown.on_log(None, state(step), None, logs(RECORD | {"loss": loss}))  # type: ignore[arg-type]
    shown.on_log(None, state(), None, logs(HELD_OUT_LOGS))  # type: ignore[arg-type]
    shown.on_log(None, state(), None, {"train_runtime": 1.0})  # type: ignore[arg-type]
    shown.on_train_end(None, state(), None)  # type: ignore[arg-type]
    last = terminal.file.getvalue().rpartition("\x1b[2K")[2]  # type: ignore[attr-defined]
    assert re.search(r"step 240/788 +4,600 tok/s +\d+ s left", last)
    assert re.search(r"loss +3\.27 +█▃▁", last)
    assert re.search(r"depth 2 +44 % +▁▁▁", last)
    assert "step 240, held-out: loss 3.41  acc 55 %  tau 2.31" in last
    shown.stop()  # a second time
