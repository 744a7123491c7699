"""Our own decoder's figures for the prompts that an engine was asked, from records that can be checked by hand."""

from typing import Any

import pytest
from support.records import made_up

from draftsmith.data.sources.questions import Question
from draftsmith.eval.bench.records import QuestionRecord, answer_settings
from draftsmith.eval.serving.own import chain_of, own_figures
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.recipes.schema import EvalRecipe, MethodRecipe

QUESTION, PROMPT = Question(1, "math", ("w5",)), [5, 6]
ASKED: Any = {1: (QUESTION, PROMPT)}
GREEDY = Sampling(0.0)


def record(prompt: list[int] = PROMPT) -> QuestionRecord:
    """10 tokens, the first from the prefill: three rounds of a chain, nine without, 2 s and 5 s."""
    made = made_up(0, 2.0, 5.0)
    for answer in made.answers.values():
        answer.settings |= answer_settings({}, prompt, QUESTION.turns, GREEDY, 10)
    return made


def test_of_the_same_prompts() -> None:
    plain, chain = own_figures([record()], "chain", ASKED, GREEDY, 10)
    assert (plain["arm"], chain["arm"]) == ("without drafter", "with drafter")
    assert (plain["tokens_per_s"], chain["tokens_per_s"]) == (2.0, 5.0)
    assert chain["drafts"] == 3
    assert chain["tau_committed"] == chain["tau_by_question"] == 3.0
    assert chain["acceptance_by_depth"] == chain["acceptance_conditional"] == [1.0, 1.0]
    assert plain["tau_committed"] is chain["tau"] is None
    assert chain["time_per_output_token_s"] == pytest.approx(1.95 / 9)
    assert chain["first_token_s"] == 0.05


@pytest.mark.parametrize(
    ("prompt", "sampling", "new_tokens", "method"),
    [([5, 7], GREEDY, 10, "chain"), (PROMPT, Sampling(0.0, top_k=3), 10, "chain"), (PROMPT, GREEDY, 9, "chain"),
     (PROMPT, GREEDY, 10, "tree")],
)  # fmt: skip
def test_other_prompts_are_not_compared(prompt: list[int], sampling: Sampling, new_tokens: int, method: str) -> None:
    assert own_figures([record(prompt)], method, ASKED, sampling, new_tokens) == []


def test_which_method_drafts_as_an_engine_does() -> None:
    methods = [
        MethodRecipe(name="tree", tree="best_first"),
        MethodRecipe(name="lenient", lenience=0.5),
        MethodRecipe(name="theirs", drafter="elsewhere"),
        MethodRecipe(name="short", max_depth=2),
        MethodRecipe(name="lookup", kind="prompt_lookup"),
        MethodRecipe(name="chain", max_depth=3),
    ]
    found = [chain_of(EvalRecipe(methods=methods[:count]), 3) for count in (5, 6)]
    assert [method and method.name for method in found] == [None, "chain"]
