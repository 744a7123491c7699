"""The decoder for scripts gives the loop's answers with any drafter."""

from support.tiny_models import tiny_parallel, tiny_target

from draftsmith.eval.speculative_decoder import SpeculativeDecoder
from draftsmith.recipes.schema import MethodConfig

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
