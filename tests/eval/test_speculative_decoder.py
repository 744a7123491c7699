"""The decoder for scripts gives the loop's answers with any drafter."""

from pathlib import Path

import pytest
from support.tiny_models import tiny_parallel, tiny_target
from support.tiny_runs import save_target

from draftsmith.errors import UserError
from draftsmith.eval.speculative_decoder import SpeculativeDecoder
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.schema import MethodConfig, TargetRecipe

PROMPT = [1, 5, 6, 7]
TREE = MethodConfig(name="tree", tree="best_first", nodes=6, branch=3)


def test_answers_equal_the_targets() -> None:
    target = tiny_target()
    with SpeculativeDecoder(target, None, max_length_tokens=64) as plain:
        expected = plain.answer(PROMPT, 24)
    assert expected.rounds == 23  # the prefill gives the first token
    rounds = []
    with SpeculativeDecoder(target, None, tiny_parallel(target), TREE, max_length_tokens=64) as decoder:
        found = decoder.answer(PROMPT, 24, rounds.append)
    assert found.ids == expected.ids
    assert len(rounds) == found.rounds
    assert sum(round_.kept for round_ in rounds) == 23


def test_prompts_that_do_not_fit_are_refused() -> None:
    target = tiny_target()
    with SpeculativeDecoder(target, None, tiny_parallel(target), TREE, max_length_tokens=32) as decoder:
        with pytest.raises(UserError, match="a prompt of 32 tokens and an answer of 1 do not fit into a session of 32"):
            decoder.answer([5] * 32, 1)
        assert len(decoder.answer([5] * 31, 1).ids) == 1


def test_question_needs_a_tokenizer(tmp_path: Path) -> None:
    target = tiny_target()
    with SpeculativeDecoder(target, None, max_length_tokens=64) as decoder, pytest.raises(ValueError, match="template"):
        decoder.ask("w5")
    save_target(tmp_path)
    target, tokenizer = load_target(TargetRecipe(model=str(tmp_path)))
    with SpeculativeDecoder(target, tokenizer) as decoder:
        answer = decoder.ask("w5 w6 w7", 8)
    assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True).strip() != ""
