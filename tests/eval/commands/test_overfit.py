"""`draftsmith doctor --overfit`: a drafter memorises one answer of the embedded target unless it is defective."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from draftsmith.eval.commands import cli, overfit
from draftsmith.models.base.drafter import Drafter

FEW = "data.conversations.limit=20"


def examine(recipe: str, folder: Path, *overrides: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code and the findings by check; assert that no run folder was written."""
    file = folder / "out.json"
    values = (f"runs_dir={folder / 'runs'}", FEW, *overrides)
    result = CliRunner().invoke(cli.app, ["doctor", recipe, *values, "--overfit", "--rows=0", f"--json={file}"])
    assert result.exit_code in (0, 1), result.output
    assert not (folder / "runs").exists()
    return result.exit_code, {entry["check"]: entry for entry in json.loads(file.read_text())["findings"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_drafter_memorises_one_answer(kind: str, tmp_path: Path) -> None:
    """All depths in one pass, or a step per depth: 96 tokens, 95 after the prefill's, in 16 rounds of at most 6."""
    code, findings = examine(f"embedded-{kind}", tmp_path)
    entry, figures = findings["overfit"], findings["overfit"]["figures"]
    assert (code, entry["severity"]) == (0, "ok")
    assert (figures["depth"], figures["answer_tokens"], figures["bound"]) == (5, 96, 95 / 16)
    assert figures["tau"] >= 95 / 17
    assert 50 <= figures["steps"] <= 200
    assert entry["sentence"].startswith(f"{kind} learns one answer by heart: tau {figures['tau']:.2f} of 5.94 after ")


@pytest.mark.slow
def test_features_of_the_wrong_position_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training still learns the labels, but decoding with the right features drafts none of them."""
    right = Drafter.training_features

    def one_off(drafter: Drafter, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        features, teacher = right(drafter, *args, **options)
        return features.roll(1, dims=1), teacher

    monkeypatch.setattr(Drafter, "training_features", one_off)
    code, findings = examine("embedded-medusa", tmp_path)
    figures = findings["overfit"]["figures"]
    assert (code, findings["overfit"]["severity"]) == (1, "defect")
    assert figures["accuracy"] > 0.98
    assert figures["tau"] < 2
    assert re.match(
        r"medusa drafts something else than it was trained on: tau 1\.\d\d of 5\.94 after \d+ steps on one answer of "
        r"96 tokens \(loss .*, \d+% of the labels right, \d+ s\); compare the labels, features and positions of "
        r"training with those of its decoder \(models/drafters/medusa\.py, models/decoding/decoders\.py\)",
        findings["overfit"]["sentence"],
    )
    assert findings["train = decode"]["severity"] == "ok"  # which does not cover the trainer's call of the drafter


@pytest.mark.slow
def test_too_few_steps_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter has not learned its labels."""
    monkeypatch.setattr(overfit, "STEPS", 2)
    code, findings = examine("embedded-medusa", tmp_path)
    assert (code, findings["overfit"]["severity"]) == (1, "defect")
    assert re.match(
        r"medusa cannot learn even one answer: tau .* of 5\.94 after 2 steps .*check train\.learning_rate and "
        r"drafter\.options, then the labels and features that models/drafters/medusa\.py is trained on",
        findings["overfit"]["sentence"],
    )


def test_kinds_without_layers_are_reported(tmp_path: Path) -> None:
    code, findings = examine("embedded-pass", tmp_path)
    assert (code, findings["overfit"]["severity"]) == (0, "ok")
    assert findings["overfit"]["sentence"] == (
        "not checked: a pass_embeddings drafter trains no layers that could memorise an answer"
    )


def test_defects_of_the_data_are_reported_first(tmp_path: Path) -> None:
    code, findings = examine("embedded-medusa", tmp_path, "data.conversations.source=gone.jsonl")
    assert code == 1
    assert findings["overfit"]["sentence"] == "not checked: correct the defects above first"
