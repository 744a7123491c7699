"""`draftsmith demo`: equal, complete answers with and without the drafter; the shipped drafter is used."""

from pathlib import Path

import pytest
from support.tiny_runs import untrained_run

from draftsmith.cli.demo import QUESTIONS, demonstrate, show
from draftsmith.models.base.registry import SHIPPED_DRAFTER, read_drafter
from draftsmith.models.target.packaged import SMOLLM2
from draftsmith.recipes.run_folder import RunFolder


def test_answer_is_equal_with_and_without_the_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drafter is untrained, which does not change the answer."""
    run = untrained_run(tmp_path)
    found = demonstrate(run.target, None, 12, RunFolder(run).drafter)
    show(found)
    printed = " ".join(capsys.readouterr().out.split())
    assert [each.question for each in found.shown] == list(QUESTIONS)
    for each in found.shown:
        assert each.same
        assert 4 <= each.rounds <= each.tokens <= 11  # the first of twelve comes with the prompt
        assert " ".join(each.answer.split()) in printed
    assert found.sentence() in printed
    assert "every answer is the same; float32" in printed
    assert printed.count("... (cut at 12 tokens)") == sum(each.cut for each in found.shown)
    assert "Bold green: accepted draft tokens" in printed


def test_shipped_drafter() -> None:
    drafter = read_drafter(SHIPPED_DRAFTER, "auto")  # weights with the recorded hashes
    assert (drafter.config.target_config["hidden_size"], drafter.config.target_config["vocab_size"]) == (576, 49152)
    assert (SHIPPED_DRAFTER / "model.safetensors").stat().st_size < 16 * 2**20
    card = (SHIPPED_DRAFTER / "README.md").read_text(encoding="utf-8")
    assert f"base_model: {SMOLLM2.hub_id}" in card
    assert "license: apache-2.0" in card
