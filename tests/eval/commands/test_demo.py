"""`draftsmith demo`: both sides give one answer, which is shown whole; the drafter that ships is one."""

from pathlib import Path

import pytest
import torch

from draftsmith.eval.commands.demo import QUESTIONS, demonstrate, show
from draftsmith.models.base.registry import SHIPPED_DRAFTER, load_drafter_class, read_drafter, read_training
from draftsmith.models.target.loading import load_target
from draftsmith.models.target.smollm2_wheel import HUB_ID
from draftsmith.recipes.schema import TargetRecipe


@pytest.mark.parametrize("question", ["What does os.path.join do?", None])
def test_the_answer_with_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str], question: str | None) -> None:
    """Of a drafter that is not trained, which changes no word."""
    recipe = TargetRecipe(model="embedded", dtype="float32")
    torch.manual_seed(0)
    load_drafter_class("parallel").from_target(load_target(recipe)[0], {"num_masks": 2}).save_pretrained(tmp_path)
    found = demonstrate(recipe, question, 12, tmp_path)
    show(found)
    printed = " ".join(capsys.readouterr().out.split())
    assert [each.question for each in found.shown] == ([question] if question else list(QUESTIONS))
    for each in found.shown:
        assert each.same
        assert 4 <= each.rounds <= each.tokens <= 11  # the first of twelve comes with the prompt
        assert " ".join(each.answer.split()) in printed
    assert f"{found.ratio:.2f}x (median of questions)" in printed
    assert "every answer is the same; float32" in printed


def test_the_drafter_that_ships() -> None:
    drafter = read_drafter(SHIPPED_DRAFTER, "auto")  # weights with the hashes that are noted
    assert (drafter.config.target_config["hidden_size"], drafter.config.target_config["vocab_size"]) == (576, 49152)
    assert (SHIPPED_DRAFTER / "model.safetensors").stat().st_size < 16e6
    assert read_training(SHIPPED_DRAFTER).steps > 0
    card = (SHIPPED_DRAFTER / "README.md").read_text(encoding="utf-8")
    assert f"base_model: {HUB_ID}" in card
    assert "license: apache-2.0" in card
