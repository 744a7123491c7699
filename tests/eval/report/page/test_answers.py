"""Answers round by round: which draft was turned down, what is counted, and what is said of a round."""

from draftsmith.eval.bench.traced import TracedAnswer, TracedRound
from draftsmith.eval.report.page.answers import SHOWN_PROMPT_CHARS, first_rejected, shown_answers

#     root
#     0 ── 1 " a" ── 2 " b" ── 4 " d"
#      └── 3 " c"
TEXTS, PARENTS = ["", " a", " b", " c", " d"], [-1, 0, 1, 0, 2]


def answer(*rounds: TracedRound, prompt: str = "?") -> TracedAnswer:
    return TracedAnswer("tree@0", "parallel", 7, "math", prompt, "The", list(rounds))


def test_the_first_choice_behind_what_was_kept() -> None:
    assert first_rejected(TracedRound(TEXTS, PARENTS, [0], " x")) == [" a", " b", " d"]
    assert first_rejected(TracedRound(TEXTS, PARENTS, [0, 1], " x")) == [" b", " d"]
    assert first_rejected(TracedRound(TEXTS, PARENTS, [0, 3], " x")) == []
    assert first_rejected(TracedRound(TEXTS, PARENTS, [0, 1], None)) == []


def test_rounds_are_counted() -> None:
    rounds = [TracedRound(TEXTS, PARENTS, [0, 1, 2], " x"), TracedRound(TEXTS, PARENTS, [0, 3], None)]
    (question,) = shown_answers([answer(*rounds)])
    (shown,) = question.answers
    assert (shown.arm, shown.tokens, shown.drafted) == ("tree", 4, 3)
    assert [(each.drafted, each.kept, each.own, each.nodes) for each in shown.rounds] == [
        (" a b", 2, " x", 4),
        (" c", 1, None, 4),
    ]
    assert shown.rounds[0].title == "round 1: 4 tokens drafted, 2 kept, then the target's ' x'; rejected: ' d'"
    assert shown.rounds[1].title == "round 2: 4 tokens drafted, 1 kept"


def test_answers_to_one_question_stand_together_and_prompts_are_cut() -> None:
    rounds = TracedRound(TEXTS, PARENTS, [0], " x")
    long = "y" * (SHOWN_PROMPT_CHARS + 1)
    (question,) = shown_answers([answer(rounds, prompt=long), answer(rounds, prompt=long), answer()])
    assert len(question.answers) == 2
    assert question.prompt == "y" * SHOWN_PROMPT_CHARS + "…"
