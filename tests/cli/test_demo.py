"""`draftsmith demo`: equal, complete answers with and without the drafter; the shipped drafter is used."""

from pathlib import Path

import pytest
from support.tiny_runs import untrained_run

from draftsmith.cli.demo import QUESTIONS, demonstrate, drafting_recipe, show
from draftsmith.models.base.registry import SHIPPED_DRAFTERS, read_drafter
from draftsmith.models.target.packaged import PACKAGED
from draftsmith.recipes.run_folder import RunFolder


def test_answer_is_equal_with_and_without_the_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drafter is untrained, which does not change the answer."""
    run = untrained_run(tmp_path)
    found = demonstrate(drafting_recipe(run.target, RunFolder(run).drafter), None, 12)
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


@pytest.mark.parametrize(
    ("name", "sizes", "most_mb"), [("smollm2", (576, 49_152), 16), ("qwen2.5-coder-0.5b", (896, 151_936), 26)]
)
def test_shipped_drafters(name: str, sizes: tuple[int, int], most_mb: int) -> None:
    folder = SHIPPED_DRAFTERS[name]
    drafter = read_drafter(folder, "auto")  # weights with the recorded hashes
    assert tuple(drafter.config.target_config[key] for key in ("hidden_size", "vocab_size")) == sizes
    assert (folder / "model.safetensors").stat().st_size < most_mb * 2**20
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"base_model: {PACKAGED[name].hub_id}" in card
    assert "license: apache-2.0" in card
