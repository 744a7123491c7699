"""An interrupted measurement resumes where it stopped, with equal answers, and only with equal settings."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.finished_run import FinishedRun

from draftsmith.cli.artifacts import measurement_settings
from draftsmith.errors import INTERRUPTED
from draftsmith.eval.bench.records import RecordLog
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.recipes.schema import EvalRecipe, MethodConfig, Recipe


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
    owner, name, at = (RecordLog, "append", 1) if where == "after a record" else (TargetSession, "forward_tree", 15)
    method = getattr(owner, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = method(*arguments, **options)
        if calls == at:
            os.kill(os.getpid(), number)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        stopped = finished.call("eval")
    assert (stopped.exit_code, stopped.stderr.splitlines()[-1]) == (code, INTERRUPTED)
    kept = read_answers(finished)
    assert kept.items() <= whole.items()
    assert bool(kept) == (where == "after a record")
    finished.done("eval")
    assert read_answers(finished) == whole


def with_method(kind: str, **options: object) -> Recipe:
    return Recipe(name="x", eval=EvalRecipe(methods=[MethodConfig(name="m", kind=kind, options=options)]))


def test_changed_draft_model_in_the_same_folder_is_detected(tmp_path: Path) -> None:
    recipes = with_method("draft_model", model=str(tmp_path)), with_method("specinfer", models=[str(tmp_path)])
    hashes = []
    for value in (0.0, 1.0):
        save_file({"weight": torch.full((4,), value)}, tmp_path / "model.safetensors")
        hashes.append([measurement_settings(recipe)["method_weights"] for recipe in recipes])
    assert hashes[0][0] == hashes[0][1] != hashes[1][0] == hashes[1][1]
